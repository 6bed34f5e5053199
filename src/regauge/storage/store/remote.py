"""Stores on object storage, which fsspec copies to the cache shard by shard. Existing copies are used again."""

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge.checkpoints.disk import require_space
from regauge.checkpoints.location import MANIFEST
from regauge.checkpoints.writing import SUFFIX, whole_file
from regauge.core.progress import Progress, no_progress
from regauge.storage.cache import cache_folder
from regauge.storage.store.manifest import FOLDER, Manifest

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

KIND = "stores"
"""The name of the cache folder that contains copies of remote stores."""
ADDRESS = re.compile(r"([a-z][a-z0-9+.-]+):/+(.+)")


def url_of(folder: str | Path) -> str | None:
    """Return the URL that an argument names, even if `Path` has removed a slash; None for a local folder."""
    found = ADDRESS.fullmatch(os.fspath(folder))
    if found is None:
        return None
    scheme, rest = found.groups()
    return f"{scheme}://{'/' if scheme in ('file', 'local') else ''}{rest.rstrip('/')}"


def copy_store(url: str, progress: Progress = no_progress) -> Path:
    """Copy the missing files of a store from a URL to the cache.

    Shards never change, so only new shards are copied, each atomically. If the URL previously contained another store,
    the copy of that store is removed.

    Args:
        url: The URL of the store's folder, such as "s3://bucket/mlps", with any fsspec protocol.
        progress: Displays the number of copied bytes.

    Returns:
        The folder of the copy.

    Raises:
        ValueError: fsspec does not know the protocol, or the package for the protocol is not installed.
        FileNotFoundError: There is no store at the URL.
        OSError: The storage cannot be reached, or a download ended early.
    """
    filesystem, root = _open(url)
    local = cache_folder() / KIND / hashlib.sha256(url.encode()).hexdigest()[:24]
    local.mkdir(parents=True, exist_ok=True)
    with _errors_told(url):
        _copy_manifest(filesystem, url, root, local)
        shards = _shards(filesystem, root)
        missing = {name: size for name, size in shards.items() if not (local / FOLDER / name).exists()}
        if missing:
            require_space(local / FOLDER, sum(missing.values()))
        advance = progress(f"copying {url}", sum(missing.values()))
        for name, size in missing.items():
            _copy(filesystem, f"{root}/{FOLDER}/{name}", local / FOLDER / name, size)
            advance(size)
    return local


@contextmanager
def _errors_told(url: str) -> Iterator[None]:
    """Convert errors of a protocol's package, which may have any type, to an OSError with advice."""
    try:
        yield
    except (OSError, ValueError):
        raise
    except Exception as error:
        reason = str(error).rstrip(".") or type(error).__name__
        raise OSError(f"{url!r} cannot be read ({reason}); check the URL, the network and the credentials") from error


def _open(url: str) -> "tuple[AbstractFileSystem, str]":
    import fsspec  # takes as long as a small command

    try:
        filesystem, root = fsspec.url_to_fs(url)
    except (ValueError, ImportError) as error:
        raise ValueError(
            f"{url!r} cannot be opened: {str(error).rstrip('.')}; or copy the store to a folder"
        ) from error
    return filesystem, str(root).rstrip("/")


def _copy_manifest(filesystem: "AbstractFileSystem", url: str, root: str, local: Path) -> None:
    """Copy the manifest, the only file that may change. If the store was replaced, remove the old store's shards."""
    with tempfile.TemporaryDirectory(dir=local, prefix=".") as fresh:
        try:
            filesystem.get_file(f"{root}/{MANIFEST}", str(Path(fresh) / MANIFEST))
        except FileNotFoundError as error:
            raise FileNotFoundError(f"there is no store at {url!r}: it has no {MANIFEST}; check the URL") from error
        there = Manifest.read(Path(fresh))
        if (local / MANIFEST).exists() and Manifest.read(local).key != there.key:
            shutil.rmtree(local / FOLDER, ignore_errors=True)
        (local / FOLDER).mkdir(exist_ok=True)
        os.replace(Path(fresh) / MANIFEST, local / MANIFEST)


def _shards(filesystem: "AbstractFileSystem", root: str) -> dict[str, int]:
    """Return the sizes of the shards by name, sorted by name."""
    filesystem.invalidate_cache()  # others may have written since the last look
    try:
        entries: list[dict[str, Any]] = filesystem.ls(f"{root}/{FOLDER}", detail=True)
    except FileNotFoundError:  # object storage has no empty folders
        return {}
    sizes = {str(entry["name"]).rsplit("/", 1)[-1]: int(entry["size"]) for entry in entries if entry["type"] == "file"}
    return {name: sizes[name] for name in sorted(sizes) if name.endswith(SUFFIX) and not name.startswith(".")}


def _copy(filesystem: "AbstractFileSystem", source: str, path: Path, size: int) -> None:
    """Copy a shard under a temporary name, and rename it when it is complete."""
    with whole_file(path, nbytes=size) as temporary:
        filesystem.get_file(source, str(temporary))
        if (found := temporary.stat().st_size) != size:
            raise OSError(f"{source!r} has {size} bytes, of which {found} came; try again")

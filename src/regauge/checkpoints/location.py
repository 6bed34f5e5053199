"""Paths of checkpoints, found by the names that users give. This module does not import torch.

A name is the path of a file, of a shard index or of a folder. `FILE:NAME` selects one of the networks in a file, and
`BASE+ADAPTER` is a base with an adapter. `org/model` is a model of the Hugging Face hub. A hub model is read from the
hub's cache on this machine if the cache contains it. Nothing is downloaded.
"""

import os
import re
from pathlib import Path

from regauge.checkpoints.formats.file_formats import CHUNKS, METADATA, every_format, weight_suffixes
from regauge.checkpoints.plain_files import read_json
from regauge.core.counted import shorten

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FILES = ("adapter_model.safetensors", "adapter_model.bin")
"""The names of adapter files in a folder of PEFT's format."""
MANIFEST = "store.json"
"""The file that marks a folder as a store of many networks, which is not a checkpoint."""
ALIGNMENT = ".alignment.safetensors"
"""The suffix of stored alignments."""
SHARD = re.compile(r"shard-\d+-model-\d+-of-\d+\.safetensors")
"""A pattern of the file names of torch's distributed safetensors writer. Each process writes one or more such files."""
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
"""A pattern of the names of models on the hub."""
ADDRESS = re.compile(r"[a-z0-9]{2,}:/", re.IGNORECASE)
"""A pattern of the beginning of a URL that was converted to a path, with single instead of double slashes."""
COMMIT = re.compile(r"[0-9a-f]{7,64}")
CACHES = (
    ("HF_HUB_CACHE", ""),
    ("HUGGINGFACE_HUB_CACHE", ""),
    ("HF_HOME", "hub"),
    ("XDG_CACHE_HOME", "huggingface/hub"),
)
"""Environment variables that name a folder, each with the subfolder that contains the cache of the hub."""


def is_adapter(folder: Path) -> bool:
    """Return whether a folder holds an adapter."""
    return (folder / ADAPTER_CONFIG).is_file()


def folder_files() -> tuple[str, ...]:
    """Return the file names that are searched in a folder, in this order, before an adapter is searched for."""
    return tuple(name for one in every_format().values() for name in one.names)


def locate(path: str | Path) -> Path:
    """Return the file that contains a checkpoint, or the shards' index.

    For a folder, return the file in the folder that is read.

    A model of the hub is searched for in the cache; see `find_cached`.
    """
    path = find_cached(str(path)) or Path(path)
    if path.is_dir():
        path = _in_folder(path)
    if not path.exists():
        raise FileNotFoundError(say_absent(str(path)))
    return path


def files_of(file: Path) -> list[Path]:
    """Return all weight files of a checkpoint, beginning with the file that `locate` returns.

    Raises:
        FileNotFoundError, ValueError: The file is an index that is damaged or names missing files.
    """
    beside: list[Path] = []
    if file.name.endswith(".index.json"):
        beside = [file.parent / name for name in dict.fromkeys(shards_of(file).values())]
    elif file.name == METADATA:
        beside = sorted(file.parent.glob(f"*{CHUNKS}"))
    elif SHARD.fullmatch(file.name):
        beside = sorted(path for path in file.parent.iterdir() if SHARD.fullmatch(path.name) and path != file)
    return [file, *beside]


def shards_of(index: Path) -> dict[str, str]:
    """Map each parameter name to its file, according to the index of a sharded checkpoint.

    Raises:
        FileNotFoundError: A shard is missing.
        ValueError: The file is not an index, or the index names files outside of its folder.
    """
    what = f"{str(index)!r} is not the index of a sharded checkpoint"
    try:
        document = read_json(index)
    except ValueError as error:
        raise ValueError(f"{what}: {error}; fetch it again") from error
    try:
        files: dict[str, str] = document["weight_map"]
        shards = list(dict.fromkeys(files.values()))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{what}: it lacks a 'weight_map' from parameter names to files; fetch it again") from error
    if not shards:
        raise ValueError(f"{str(index)!r} names no tensors; it was cut off, or its network is empty: fetch it again")
    strange = [shard for shard in shards if not _is_name(shard)]
    if strange:
        raise ValueError(
            f"{str(index)!r} names shards outside of its folder ({shorten(strange)}), which are not read: move them "
            "into it"
        )
    absent = [shard for shard in shards if (index.parent / shard).is_dir() or not (index.parent / shard).exists()]
    if absent:
        raise FileNotFoundError(
            f"{str(index)!r} names shards that do not exist: {shorten(absent)} ({len(absent)} of {len(shards)}); put "
            "them next to it"
        )
    return files


def _is_name(shard: object) -> bool:
    """Return whether a string can be the name of a weight file next to an index."""
    if not isinstance(shard, str) or "\0" in shard:
        return False
    return Path(shard).name == shard and shard.endswith(weight_suffixes(is_read=True))


def split_sum(path: str) -> tuple[str, str] | None:
    """Return a base and an adapter's folder if a path does not exist and has the form `BASE+ADAPTER`."""
    base, plus, folder = path.rpartition("+")
    if not plus or Path(path).exists() or not Path(folder).is_dir():
        return None
    if not is_adapter(Path(folder)):
        raise ValueError(
            f"{folder!r} is no adapter: it lacks {ADAPTER_CONFIG}; write BASE+ADAPTER with a folder of PEFT's format"
        )
    return base, folder


def split_entry(path: str) -> tuple[str, str | None]:
    """Return a file and an entry if a path does not exist and has the form `FILE:NAME`; otherwise the path and None."""
    if Path(path).exists():
        return path, None
    for place in (k for k, letter in enumerate(path[:-1]) if letter == ":"):
        file = Path(path[:place])
        if (file.name.endswith(weight_suffixes(has_entries=True)) and file.is_file()) or (file / METADATA).is_file():
            return path[:place], path[place + 1 :]
    return path, None


def find_cached(name: str) -> Path | None:
    """Return the cached folder of a hub model's branch `main` on this machine, or None.

    The path of an existing file or folder is never a hub name.
    """
    if not HUB_NAME.fullmatch(name) or os.path.lexists(name):
        return None
    folder = _cache() / f"models--{name.replace('/', '--')}"
    try:
        commit = (folder / "refs" / "main").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    snapshot = folder / "snapshots" / commit
    return snapshot if COMMIT.fullmatch(commit) and snapshot.is_dir() else None


def is_address(text: str) -> bool:
    """Return whether a string begins like a URL, for example with https://."""
    return ADDRESS.match(text) is not None


def say_absent(path: str) -> str:
    """Return an error text about a missing checkpoint. If the path may be a hub name, explain how to fetch it."""
    if is_address(path):
        return f"{path!r} is an address, and regauge fetches nothing: download the checkpoint, and name the file"
    text = f"there is no checkpoint {path!r}; check the path"
    if not HUB_NAME.fullmatch(path) or "/" not in path or path.endswith((".json", *weight_suffixes(is_read=True))):
        return text
    return (
        f"{text}, or if it is a model of the Hugging Face hub, fetch it, since regauge does not: "
        f"hf download {path} --local-dir {path.partition('/')[2]}"
    )


def _cache() -> Path:
    """Return the folder of the hub's cache on this machine."""
    for variable, inside in CACHES:
        if os.environ.get(variable):
            return Path(os.environ[variable]).expanduser() / inside
    return Path.home() / ".cache/huggingface/hub"


def _in_folder(folder: Path) -> Path:
    for name in (*folder_files(), *ADAPTER_FILES):
        if (folder / name).exists():
            return folder / name
    for pattern in (pattern for one in every_format().values() for pattern in one.alone):
        found = [file for file in sorted(folder.glob(pattern)) if not file.name.endswith(ALIGNMENT)]
        if len(found) == 1 or (found and all(SHARD.fullmatch(file.name) for file in found)):
            return found[0]
        if found:
            raise ValueError(
                f"the folder {str(folder)!r} holds several checkpoints ({shorten([f.name for f in found])}); name one"
            )

    if (folder / MANIFEST).exists():
        raise FileNotFoundError(
            f"the folder {str(folder)!r} is a store of networks, not a checkpoint; `regauge zoo info {folder}` shows "
            f"its contents, and `regauge zoo export {folder} -o FOLDER` writes files"
        )
    raise FileNotFoundError(
        f"the folder {str(folder)!r} holds no checkpoint ({', '.join(folder_files())} or one other .safetensors file); "
        "name the file, or the folder that holds it"
    )

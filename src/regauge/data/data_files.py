"""Files of data sets: in the user's folder, in the cache, or downloaded and verified by checksum."""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from regauge.storage.cache import cache_folder

FOLDER_VARIABLE = "REGAUGE_DATA"
"""The environment variable for the folder with data sets that no dependency provides. The folder is searched before the
cache."""
OFFLINE_VARIABLE = "REGAUGE_OFFLINE"
"""The environment variable that forbids downloads if it is set to anything but 0."""


@dataclass(frozen=True)
class DataFile:
    """A file that can be downloaded.

    Attributes:
        data: The name of the data set.
        folder: The folder of the data set within the folder of all data sets.
        name: The name of the file.
        sha256: The SHA-256 of the file that is downloaded.
        addresses: The URLs of the file, the best first; empty if the file cannot be downloaded.
        others: Other names of files with the same content.
    """

    data: str
    folder: str
    name: str
    sha256: str
    addresses: tuple[str, ...] = ()
    others: tuple[str, ...] = ()


def locate(file: DataFile) -> Path:
    """Return the path of the file on this machine: in `REGAUGE_DATA`, in the cache, or newly downloaded to the cache.

    A download is verified before it appears in the cache. An existing file is returned without verification, because
    the reader verifies its content.

    Raises:
        FileNotFoundError: The file is not on this machine, and downloads are not allowed or fail.
    """
    found = present(file)
    if found is not None:
        return found
    if not file.addresses:
        raise FileNotFoundError(_absent(file, "it has no public address"))
    if os.environ.get(OFFLINE_VARIABLE, "0") not in ("", "0"):
        raise FileNotFoundError(_absent(file, f"{OFFLINE_VARIABLE} forbids downloads"))
    return _downloaded(file)


def present(file: DataFile) -> Path | None:
    """Return the path of the file on this machine, without a download."""
    return next((path for folder in folders(file.folder) if (path := in_folder(folder, file)) is not None), None)


def in_folder(folder: Path, file: DataFile) -> Path | None:
    """Return the path of a file in a folder, under any of the file's names."""
    return next((folder / name for name in (file.name, *file.others) if (folder / name).is_file()), None)


def folders(name: str) -> list[Path]:
    """Return the folders that may contain the files of a data set: first the user's folder, then the cache."""
    root = os.environ.get(FOLDER_VARIABLE)
    return [*([Path(root) / name] if root else []), cache_folder() / name]


def check(path: Path, content: bytes, sha256: str | Sequence[str], data: str) -> None:
    """Raise an error if the content has an unexpected checksum.

    Raises:
        ValueError: The content has none of the expected checksums.
    """
    found = hashlib.sha256(content).hexdigest()
    expected = [sha256] if isinstance(sha256, str) else sha256
    if found not in expected:
        raise ValueError(
            f"{str(path)!r} is not the file of {data}: its content has SHA-256 {found[:16]}..., not "
            f"{expected[0][:16]}...; fetch it again"
        )


def read(file: DataFile, folder: str | Path | None = None) -> bytes:
    """Return the content of a file in a folder. Without a folder, search for the file on this machine, or download the
    file.

    Raises:
        FileNotFoundError: The file does not exist and cannot be downloaded.
        ValueError: The checksum of the file is wrong.
    """
    path = locate(file) if folder is None else Path(folder) / file.name
    if not path.is_file():
        raise FileNotFoundError(f"{str(path)!r} does not exist; check the path")
    content = path.read_bytes()
    check(path, content, file.sha256, file.data)
    return content


def _downloaded(file: DataFile) -> Path:
    import pooch

    failures = []
    pooch.get_logger().setLevel("WARNING")
    for address in file.addresses:
        try:
            return Path(
                pooch.retrieve(address, f"sha256:{file.sha256}", fname=file.name, path=cache_folder() / file.folder)
            )
        except ValueError as error:
            failures.append(f"{address} sent another file: {error}")
        except OSError as error:
            failures.append(f"{address}: {error}")
    raise FileNotFoundError(_absent(file, f"it could not be downloaded: {'; '.join(failures)}"))


def _absent(file: DataFile, reason: str) -> str:
    return (
        f"{file.data} is not part of regauge: set {FOLDER_VARIABLE} to a folder with {file.name!r} in {file.folder}/ "
        f"({reason})"
    )

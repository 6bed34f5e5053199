"""The staging folder of an output, such as `OUT.partial`, and the file that marks the folder as regauge's own.

In a staging folder, regauge deletes only files that it has written. The folder holds only files of known names,
including `run.json`, which is called the ledger. Until the ledger is written, all files and folders inside are empty
and have known names. Symbolic links are refused, because they may lead outside of the folder.
"""

import json
import os
import re
import shutil
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

from regauge.checkpoints.disk import TEMPORARY
from regauge.checkpoints.plain_files import read_json
from regauge.checkpoints.writing import save_text

FORMAT = "regauge.run"
LEDGER, LOCK, CONTENT, REPLACED = "run.json", "lock", "output", "replaced"
PROGRESS = "progress.safetensors"
OWN_LEDGER = "run.{}.json"
"""The file name of the ledger of one of several processes that write an output."""
KNOWN = re.compile(rf"{LEDGER}|run\.\d+\.json|{LOCK}|{CONTENT}|{REPLACED}|(\d+\.)?([a-z]+\.)?{PROGRESS}")
"""A pattern of the names that may occur in an output's staging folder."""

PARTS = re.compile(rf"{LEDGER}|[0-9a-f]{{16}}")
"""A pattern of the names that may occur in the folder of a partly computed population matrix."""


def claim(folder: Path, known: re.Pattern[str]) -> None:
    """Create a folder with a ledger, or reuse a folder that regauge has created.

    Raises:
        FileExistsError: regauge has not created the folder.
    """
    require_own(folder, known)
    folder.mkdir(exist_ok=True)
    write_ledger(folder, {"inputs": None, "shards": {}})


def require_own(folder: Path, known: re.Pattern[str] = KNOWN) -> None:
    """Raise an error if a folder exists and contains anything that regauge does not write into it.

    Raises:
        FileExistsError: The path is a symbolic link or not a folder, or the folder contains other files.
    """
    try:
        entries = list(os.scandir(folder)) if stat.S_ISDIR(folder.lstat().st_mode) else None
    except FileNotFoundError:
        return
    if entries is None:
        raise _refuse(folder, "is a symbolic link, or no folder")
    for entry in entries:
        if entry.is_symlink():
            raise _refuse(folder, f"holds the symbolic link {entry.name!r}")
        if not (known.fullmatch(entry.name) or TEMPORARY.fullmatch(entry.name)):
            raise _refuse(folder, f"contains {entry.name!r}, which regauge did not write")
    names = {entry.name for entry in entries}
    require_lock(folder / LOCK)
    if LEDGER not in names:
        filled = [n for n in sorted(names) if n != LOCK and not TEMPORARY.fullmatch(n) and not _is_empty(folder / n)]
        if filled:
            raise _refuse(folder, f"contains {filled[0]!r}, but no ledger {LEDGER!r} that says who made it")
    read_ledger(folder)


def read_ledger(folder: Path, name: str = LEDGER) -> dict[str, Any] | None:
    """Read the ledger of a folder; return None if the folder has no ledger.

    Raises:
        FileExistsError: The file is damaged or not a ledger of regauge.
    """
    try:
        document = read_json(folder / name)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise _refuse(folder, f"holds a damaged ledger {name!r} ({error})") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT or not _fits(document):
        raise _refuse(folder, f"holds a file {name!r} that is no ledger of regauge")
    return dict(document)


def _fits(document: dict[str, Any]) -> bool:
    inputs, shards = document.get("inputs"), document.get("shards")
    is_listed = isinstance(shards, dict) and all(isinstance(one, list) for one in shards.values())
    return is_listed and isinstance(inputs, dict | None)


def write_ledger(folder: Path, document: dict[str, Any], name: str = LEDGER) -> None:
    """Write the ledger of a folder, either completely or not at all."""
    save_text(json.dumps({"format": FORMAT, **document}, indent=1), folder / name)


def empty_own(folder: Path, known: re.Pattern[str] = KNOWN) -> None:
    """Remove all files of regauge in a folder except the lock; the ledger is removed last."""
    for entry in list(os.scandir(folder)):
        if entry.name in (LEDGER, LOCK) or not (known.fullmatch(entry.name) or TEMPORARY.fullmatch(entry.name)):
            continue
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        else:
            os.unlink(entry.path)
    (folder / LEDGER).unlink(missing_ok=True)


def remove_own(folder: Path, known: re.Pattern[str] = KNOWN) -> None:
    """Remove all files of regauge in a folder, and the folder unless it contains other files."""
    with suppress(OSError):
        empty_own(folder, known)
        (folder / LOCK).unlink(missing_ok=True)
        folder.rmdir()


def require_lock(path: Path) -> None:
    """Raise an error unless a lock file can be used: the path does not exist, or is an empty file that is not a link.

    Raises:
        FileExistsError: The path exists and is not an empty file.
    """
    if os.path.lexists(path) and (path.is_symlink() or not path.is_file() or not _is_empty(path)):
        raise FileExistsError(f"{str(path)!r} has the name of a lock of regauge, but is no lock; move it away")


def _is_empty(path: Path) -> bool:
    """Return whether a path is an empty file or folder, or no longer exists."""
    try:
        return not any(path.iterdir()) if path.is_dir() else path.stat().st_size == 0
    except FileNotFoundError:
        return True


def _refuse(folder: Path, what: str) -> FileExistsError:
    return FileExistsError(
        f"{str(folder)!r} {what}; regauge writes the output there and deletes only its own files: move it away, or "
        "choose another name for the output"
    )

"""Checks and readers of ordinary files with UTF-8 names and contents. This module does not import torch."""

import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from regauge.core.typed_json import parse_json

SPECIAL = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
"""Special kinds of files on which reading could wait forever, by their names in errors."""


def require_suffix(path: Path, suffixes: tuple[str, ...]) -> None:
    """Raise a ValueError unless the name of an output ends in the suffix of a format that can be written."""
    if path.suffix not in suffixes:
        raise ValueError(f"the output {str(path)!r} must end in {' or '.join(suffixes)}")


def require_expanded(path: str | Path) -> None:
    """Raise a ValueError if a path begins with ~, which stands for the home folder only in a shell."""
    if Path(path).parts[:1] == ("~",) and not os.path.lexists("~"):
        raise ValueError(
            f"{os.fspath(path)!r} begins with ~, which stands for your home folder only in a shell; write the folder "
            "in full"
        )


def require_plain(path: str | Path) -> None:
    """Raise an error if a path is neither a file nor a folder, if its name is not UTF-8, or if it begins with ~.

    Raises:
        ValueError: The path is a pipe, a socket or a device, begins with ~, or the name is not UTF-8.
    """
    require_expanded(path)
    text = os.fspath(path)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the name {text!r} is not UTF-8, so it cannot be printed or recorded; rename it") from error
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):  # for a missing file, the caller raises an error
        return
    if stat.S_IFMT(mode) in SPECIAL:
        raise ValueError(f"{text!r} is {SPECIAL[stat.S_IFMT(mode)]}, but a file or folder is needed; copy it to a file")


def leads_out(path: Path, folder: Path) -> bool:
    """Return whether a path in a folder leads outside of the folder through a link.

    In the cache of the Hugging Face hub, the files of a snapshot are links into a folder `blobs` of the same model.
    Files in the folder `blobs` count as inside.
    """
    inside = [folder.resolve()]
    if inside[0].parent.name == "snapshots":
        inside.append(inside[0].parent.parent / "blobs")
    return not any(path.resolve().is_relative_to(one) for one in inside)


def short_paths(paths: Sequence[str]) -> list[str]:
    """Return paths for published texts: absolute paths become relative to their common folder."""
    every = [[os.path.normpath(part) for part in re.split(r"\+(?=/)", path)] for path in paths]
    absolute = [os.path.dirname(part) for parts in every for part in parts if os.path.isabs(part)]
    root = os.path.commonpath(absolute) if absolute else ""
    return ["+".join(os.path.relpath(p, root) if os.path.isabs(p) else p for p in parts) for parts in every]


def require_inside(path: Path) -> None:
    """Raise a ValueError if a file is a link out of its folder, because the target may not be meant to be copied."""
    if leads_out(path, path.parent):
        raise ValueError(f"{str(path)!r} is a link out of its folder, so it is not copied; put the file itself there")


def read_inside(path: Path) -> bytes:
    """Return the content of a file in a folder that is copied; raise a ValueError for a link out of the folder."""
    require_inside(path)
    return path.read_bytes()


def read_text(path: Path) -> str:
    """Return the text of a file in a folder that is copied; raise a ValueError if it is unreadable."""
    try:
        return read_inside(path).decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{str(path)!r} is no text in UTF-8: {error.reason} at byte {error.start}; save it as UTF-8"
        ) from error


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file in a folder that is copied; raise a ValueError if it is malformed."""
    return parse_object(read_inside(path), path)


def parse_object(text: str | bytes, path: Path) -> dict[str, Any]:
    """Return the object in a file's JSON text. Malformed text raises a ValueError with the file's name."""
    try:
        found = parse_json(text)
    except ValueError as error:
        raise ValueError(f"{str(path)!r} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{str(path)!r} holds a {type(found).__name__}, but must hold an object of names and values")
    return found


def read_json(path: Path) -> Any:
    """Read a JSON file. Malformed content raises a ValueError without the name of the file, which the caller adds."""
    require_plain(path)
    return parse_json(path.read_bytes())

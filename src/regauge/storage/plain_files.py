"""Files as they are expected: plain ones with names and texts in UTF-8; nothing here imports torch."""

import json
import os
import stat
from pathlib import Path
from typing import Any

SPECIAL = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
"""What reading could wait for without end."""


def require_suffix(path: Path, suffixes: tuple[str, ...]) -> None:
    """Raise a ValueError unless the name of an output ends as the formats that it can be written in."""
    if path.suffix not in suffixes:
        raise ValueError(f"the output {str(path)!r} must end in {' or '.join(suffixes)}")


def require_plain(path: str | Path) -> None:
    """Refuse what is there under a path if it is no file or folder, or if its name cannot be written down.

    Raises:
        ValueError: It is a pipe, a socket or a device, or its name is not UTF-8.
    """
    text = os.fspath(path)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the name {text!r} is not UTF-8, so it cannot be written into texts; rename it") from error
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):  # it is not there, or cannot be: that is told by who needs it
        return
    if stat.S_IFMT(mode) in SPECIAL:
        raise ValueError(f"{text!r} is {SPECIAL[stat.S_IFMT(mode)]}, but a file or folder is needed; copy it to a file")


def read_json(path: Path) -> Any:
    """What a JSON file says; whatever is wrong with it is a ValueError, as a clause, but for what the disk says."""
    require_plain(path)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"it is no text in UTF-8: {error.reason} at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error}") from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error

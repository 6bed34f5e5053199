"""The user's cache of computed texts, with a hash of the inputs as key. Every text can be recomputed.

Each entry is one file. The first line of a file is the SHA-256 of all further lines, by which damage is detected. The
file is written atomically, so several processes can use the same folder. Entries that cannot be read or written are
skipped.
"""

import hashlib
import json
import os
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from regauge.checkpoints.disk import TEMPORARY
from regauge.checkpoints.writing import save_text

VARIABLE = "REGAUGE_CACHE"
"""The environment variable for the cache folder. By default, the operating system's cache folder is used."""
CACHE_BYTES = 256_000_000
"""The largest total size in bytes of the entries of one kind. If the entries are larger, the oldest entries are
deleted."""
ENTRY = re.compile(r"[0-9a-f]{64}\.txt")
"""A pattern of the names of entries. Other files in the folder are neither read nor deleted."""
ABANDONED = 3600
"""The age in seconds from which an unfinished file counts as abandoned by a killed process."""


def cache_folder() -> Path:
    """Return the folder of the cache, which may not exist yet."""
    own = os.environ.get(VARIABLE)
    if own:
        return Path(own)
    from platformdirs import user_cache_path

    return user_cache_path("regauge")


def recall(kind: str, origin: Any) -> str | None:
    """Return the text that is stored for an origin, which is any JSON value. Return None if there is no undamaged
    entry.
    """
    with suppress(OSError, UnicodeDecodeError):
        checksum, _, text = _place(kind, origin).read_text(encoding="utf-8").partition("\n")
        if checksum == _sha256(text):
            return text
    return None


def keep(kind: str, origin: Any, text: str) -> None:
    """Store a text for an origin, and delete the oldest entries of the same kind if there are too many."""
    place = _place(kind, origin)
    with suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        save_text(f"{_sha256(text)}\n{text}", place)
        _make_room(place)


def _place(kind: str, origin: Any) -> Path:
    return cache_folder() / kind / f"{_sha256(json.dumps(origin, sort_keys=True))}.txt"


def _make_room(newest: Path) -> None:
    now, entries = time.time(), []
    for path in newest.parent.iterdir():
        with suppress(FileNotFoundError):  # another process makes room, too
            status = path.stat()
            if TEMPORARY.fullmatch(path.name):
                if now - status.st_mtime > ABANDONED:
                    path.unlink()
            elif path != newest and ENTRY.fullmatch(path.name):
                entries.append((status.st_mtime, path, status.st_size))
    total = newest.stat().st_size + sum(size for _, _, size in entries)
    for _, path, size in sorted(entries):
        if total <= CACHE_BYTES:
            break
        path.unlink(missing_ok=True)
        total -= size


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()

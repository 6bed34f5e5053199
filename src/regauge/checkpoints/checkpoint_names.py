"""Names of checkpoints that are not paths, and what they mean; nothing here imports torch.

`FILE:NAME` is one of the networks in a file. `org/model` is a model of the Hugging Face hub, which is read from
the cache of that hub on this machine, where it lies there; nothing is fetched.
"""

import os
import re
from pathlib import Path

from regauge.checkpoints.formats.file_formats import weight_suffixes

ALIGNMENT = ".alignment.safetensors"
"""The ending of stored alignments."""
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
"""Names of models of the hub."""
ADDRESS = re.compile(r"[a-z0-9]+:/", re.IGNORECASE)
"""The beginning of addresses as paths, in which slashes are single."""
COMMIT = re.compile(r"[0-9a-f]{7,64}")
CACHES = (
    ("HF_HUB_CACHE", ""),
    ("HUGGINGFACE_HUB_CACHE", ""),
    ("HF_HOME", "hub"),
    ("XDG_CACHE_HOME", "huggingface/hub"),
)
"""Variables of the environment that say where the cache of the hub is, with the folder in what they name."""


def split_entry(path: str) -> tuple[str, str | None]:
    """A file and the network in it where a path that is not there is `FILE:NAME`; else the path."""
    if Path(path).exists():
        return path, None
    for place in (k for k, letter in enumerate(path[:-1]) if letter == ":"):
        if path[:place].endswith(weight_suffixes(has_entries=True)) and Path(path[:place]).is_file():
            return path[:place], path[place + 1 :]
    return path, None


def find_cached(name: str) -> Path | None:
    """The folder of a model of the hub in the cache on this machine, as of its branch `main`; None without one.

    What is a path of something is no such name.
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


def say_absent(path: str) -> str:
    """An error text: there is no checkpoint at a path, and how to fetch one where it may be the name of a model."""
    if ADDRESS.match(path):
        return f"{path!r} is an address, and regauge fetches nothing: download the checkpoint, and name the file"
    text = f"there is no checkpoint {path!r}; check the path"
    if not HUB_NAME.fullmatch(path) or "/" not in path or path.endswith((".json", *weight_suffixes(is_read=True))):
        return text
    return (
        f"{text}, or if it is a model of the Hugging Face hub, fetch it, since regauge does not: "
        f"hf download {path} --local-dir {path.partition('/')[2]}"
    )


def _cache() -> Path:
    """The folder of the hub's cache."""
    for variable, inside in CACHES:
        if os.environ.get(variable):
            return Path(os.environ[variable]).expanduser() / inside
    return Path.home() / ".cache/huggingface/hub"

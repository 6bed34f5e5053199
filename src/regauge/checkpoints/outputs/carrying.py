"""Files next to the weights of a checkpoint: those that are copied to a new folder, and those that are left."""

import shutil
from dataclasses import dataclass, field
from pathlib import Path

from regauge.checkpoints.checkpoint import Checkpoint
from regauge.checkpoints.disk import PARTIAL
from regauge.checkpoints.formats.file_formats import INDEX, weight_suffixes
from regauge.checkpoints.location import ADAPTER_CONFIG
from regauge.checkpoints.outputs.replacing import OURS
from regauge.checkpoints.plain_files import leads_out

LARGE_FILE = 100_000_000
"""Bytes of a file from which on it is left."""


@dataclass(frozen=True)
class Carried:
    """Names in a folder: those that were copied, those that were left, and links that lead out of it, which stay."""

    copied: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    outward: list[str] = field(default_factory=list)


def carry_files(source: Checkpoint, folder: Path, out: Path) -> Carried:
    """Copy what describes a network in a folder with its configuration: settings, tokenizer, texts, subfolders.

    Subfolders go along as a whole or not at all. Hidden folders, such as those of git, are left, and links to what lies
    outside of the folder. Where the network itself is replaced, all of that
    stays, and only its configuration is copied.

    Args:
        source: The network.
        folder: The folder to which its files are copied.
        out: The folder in which they will be.

    Returns:
        What was copied and left; the weights, and what regauge wrote, are neither.
    """
    place = source.path.parent
    configs = [name for name in ("config.json", ADAPTER_CONFIG) if (place / name).is_file()]
    if not configs:
        return Carried()
    if out.exists() and out.samefile(place):
        for name in configs:
            if not leads_out(place / name, place):
                shutil.copyfile(place / name, folder / name)
        return Carried()
    own = {source.path, *source.metadata}
    result = Carried()
    for path in sorted(place.iterdir()):
        if path in own or path.name in OURS or path.name.endswith(PARTIAL):
            continue
        is_hidden_folder = path.is_dir() and path.name.startswith(".")
        if is_hidden_folder or not _goes_along(path):
            result.left.append(path.name)
        elif leads_out(path, place) or (path.is_dir() and any(leads_out(one, place) for one in path.rglob("*"))):
            result.outward.append(path.name)
        elif path.is_dir():
            shutil.copytree(path, folder / path.name, copy_function=shutil.copyfile, dirs_exist_ok=True)
            result.copied.append(path.name)
        else:
            shutil.copyfile(path, folder / path.name)
            result.copied.append(path.name)
    return result


def _goes_along(path: Path) -> bool:
    """Return whether a file is small and holds no values, of another network or a training; whether all of a folder do
    so."""
    if path.is_dir():
        return not path.is_symlink() and all(_goes_along(inner) for inner in path.iterdir())
    return path.is_file() and not path.name.endswith((*weight_suffixes(), INDEX)) and path.stat().st_size < LARGE_FILE

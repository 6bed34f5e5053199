"""Selection of the files next to a checkpoint's weights that are copied to a new folder."""

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
"""Files of at least this many bytes are not copied."""


@dataclass(frozen=True)
class Carried:
    """File names in a folder: copied files, other files, and links out of the folder, which are not copied."""

    copied: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    outward: list[str] = field(default_factory=list)


def carry_files(source: Checkpoint, folder: Path, out: Path) -> Carried:
    """Copy the files that describe a network: configuration, tokenizer, text files and subfolders.

    If the network's folder has no configuration, nothing is copied. A subfolder is copied completely or not at all.
    Hidden folders, such as `.git`, and links out of the folder are not copied. If the output replaces the network in
    the same folder, only the configuration is copied, because the other files are already in the folder.

    Args:
        source: The network.
        folder: The folder to which the files are copied.
        out: The final folder of the output.

    Returns:
        The names of copied files and of files that were not copied, excluding weights and files that regauge wrote.
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
    """Return whether a file, or every file of a folder, is small and contains no weights, such that it is copied."""
    if path.is_dir():
        return not path.is_symlink() and all(_goes_along(inner) for inner in path.iterdir())
    return path.is_file() and not path.name.endswith((*weight_suffixes(), INDEX)) and path.stat().st_size < LARGE_FILE

"""Replacement of an output: the old checkpoint's files are removed, and all other files in its folder are kept.

A new folder is completed before it gets the old folder's name. The new folder gets hard links to the files that are
kept. The old folder is moved aside before the new folder gets its name. If a run is killed before the new folder gets
its name, no folder has the old name. `finish_replacing` completes or undoes an interrupted replacement.
"""

import os
import shutil
from collections.abc import Collection
from pathlib import Path

from regauge.checkpoints.formats.file_formats import INDEX, weight_suffixes
from regauge.checkpoints.location import files_of, folder_files, locate
from regauge.checkpoints.writing import flush

OURS = ("regauge.alignment.safetensors", "regauge.md", "regauge.json")
"""Names of the files that regauge writes next to weights: alignment, card and provenance."""


def own_files(folder: Path) -> set[str]:
    """Return the files of a folder that belong to its checkpoint: weights, index, and files that regauge wrote.

    Damaged files, and shards that no index names, are included.
    """
    heads = {name for name in folder_files() if (folder / name).is_file()}
    heads |= {name for name in [_only_checkpoint(folder)] if name is not None}
    own = heads.union(OURS)
    for head in heads:
        stem, suffix = os.path.splitext(head.removesuffix(".index.json"))
        own |= {path.name for path in folder.glob(f"{stem}-*-of-*{suffix}")}
        try:
            own |= {path.name for path in files_of(folder / head)}
        except (OSError, ValueError):
            continue
    return {name for name in own if (folder / name).is_file()}


def replace_files(new: Path, out: Path) -> None:
    """Move a file and its companion files to their final paths. A second call continues an interrupted run.

    A new file must never lie next to the companion files of an old file, such as the old model card. Therefore the old
    companions are removed before the file is replaced, and the new companions are moved afterwards. If there is no old
    file, the new file is moved last.
    """
    beside = sorted(path for path in new.iterdir() if path.name != out.name)
    if (new / out.name).exists():
        if out.exists():
            for path in beside:
                (out.parent / path.name).unlink(missing_ok=True)
            flush(out.parent)
        else:
            _move_all(beside, out.parent)
        os.replace(new / out.name, out)
        flush(out.parent)
    _move_all([path for path in beside if path.exists()], out.parent)


def replace_folder(new: Path, out: Path, aside: Path) -> tuple[list[str], list[str]]:
    """Move a folder to its final path, and keep the old folder's files that do not belong to a checkpoint.

    Returns:
        The names of replaced or removed files, and the names of kept files.
    """
    if not out.exists():
        os.rename(new, out)
        return [], []
    own, names = own_files(out), {path.name for path in out.iterdir()}
    replaced = sorted(
        own | {p.name for p in new.iterdir() if (out / p.name).is_file() and not p.samefile(out / p.name)}
    )
    _link(out, new, own)
    shutil.copymode(out, new)
    os.rename(out, aside)
    os.rename(new, out)
    finish_replacing(out, aside)
    return [name for name in replaced if name in names], sorted(names.difference(replaced))


def finish_replacing(out: Path, aside: Path) -> None:
    """Finish an interrupted `replace_folder`: move the old folder back, or move its other files to the new folder and
    remove the old folder.

    If no folder was moved aside, nothing happens.
    """
    if not os.path.lexists(aside):
        return
    if out.exists():
        _move(aside, out, own_files(aside))
        shutil.rmtree(aside)
    else:
        os.rename(aside, out)


def _move_all(files: Collection[Path], folder: Path) -> None:
    """Move files into a folder, and replace files of the same names."""
    for path in files:
        os.replace(path, folder / path.name)
    flush(folder)


def _only_checkpoint(folder: Path) -> str | None:
    """Return the weight file or index that represents a folder, even if its name is unusual."""
    try:
        name = locate(folder).name
    except (OSError, ValueError):
        return None
    return name if name.endswith((*weight_suffixes(is_written=True), INDEX)) else None


def _link(old: Path, new: Path, skipped: Collection[str]) -> None:
    """Hard-link the files of one folder into another folder, except files whose names exist there."""
    for path in list(old.iterdir()):
        place = new / path.name
        if path.name in skipped:
            continue
        if path.is_dir() and not path.is_symlink():
            if not place.exists():
                place.mkdir()
                shutil.copymode(path, place)
            if place.is_dir():
                _link(path, place, ())
        elif not os.path.lexists(place):
            try:
                os.link(path, place, follow_symlinks=False)
            except OSError:  # a file system without hard links: moved afterwards
                continue


def _move(old: Path, new: Path, skipped: Collection[str]) -> None:
    """Move the files that another folder lacks, because they could not be linked or were added later."""
    for path in list(old.iterdir()):
        place = new / path.name
        if path.name in skipped:
            continue
        if not os.path.lexists(place):
            os.rename(path, place)
        elif path.is_dir() and not path.is_symlink() and place.is_dir():
            _move(path, place, ())

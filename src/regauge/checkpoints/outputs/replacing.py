"""One output in the place of another: what belongs to the old checkpoint goes, everything else in a folder stays.

A new folder is complete before it takes its place, with hard links to what stays. The old one is moved aside first,
and between the two steps nothing has the name; `finish_replacing` mends that for a run that was killed.
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
    """Return the files of a folder that make up its checkpoint: weights with their index, and what regauge wrote about
    them.

    Damaged ones are among them, and shards that no index names.
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
    """Put a file, and the files that belong to it, where others may be; called again, it continues an interrupted run.

    At no time does a file stand next to files that belong to another one: the old ones go before the file is replaced,
    the new ones come after it. Where there is no old file, the new one comes last.
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
    """Put a folder where another may be, with what does not belong to the checkpoint of that one.

    Returns:
        The names that were replaced or removed, and those that were kept.
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
    """Go on where a run ended within `replace_folder`: the old folder comes back, or leaves what stays and is removed.

    Without a folder that was moved aside there is nothing to do.
    """
    if not os.path.lexists(aside):
        return
    if out.exists():
        _move(aside, out, own_files(aside))
        shutil.rmtree(aside)
    else:
        os.rename(aside, out)


def _move_all(files: Collection[Path], folder: Path) -> None:
    """Move files into a folder, in place of others."""
    for path in files:
        os.replace(path, folder / path.name)
    flush(folder)


def _only_checkpoint(folder: Path) -> str | None:
    """Return the file of weights, or the index, that a folder is read by under another name than usual."""
    try:
        name = locate(folder).name
    except (OSError, ValueError):
        return None
    return name if name.endswith((*weight_suffixes(is_written=True), INDEX)) else None


def _link(old: Path, new: Path, skipped: Collection[str]) -> None:
    """Give the files of one folder places in another one too, but for those whose names are taken."""
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
    """Move what is not in another folder yet: what could not be linked, or came in the meantime."""
    for path in list(old.iterdir()):
        place = new / path.name
        if path.name in skipped:
            continue
        if not os.path.lexists(place):
            os.rename(path, place)
        elif path.is_dir() and not path.is_symlink() and place.is_dir():
            _move(path, place, ())

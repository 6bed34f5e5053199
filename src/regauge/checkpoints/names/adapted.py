"""Adapters of networks whose tensor names in files differ from the module's tensor names, which the adapter uses."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from regauge.checkpoints.formats.adapters import TIED, place_changes, refuse_absent
from regauge.checkpoints.formats.changes import Change, Rearranged, Trained
from regauge.checkpoints.formats.headers import StoredTensor
from regauge.checkpoints.names.conversion import Blank, Conversion
from regauge.checkpoints.names.transformers_models import CONFIG, choose_factory, find_conversion
from regauge.core.params import work_dtype

Changes = Mapping[str, tuple[Trained, ...]]


class Base(Protocol):
    """A network in files."""

    path: Path
    stored: Mapping[str, StoredTensor]

    def read(self, name: str, *, rows: tuple[int, int] | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """Return a copy of one tensor, or of a range of its first axis."""


def changes_of_files(base: Base, folder: Path, changes: Changes) -> dict[str, tuple[Change, ...]]:
    """Return an adapter's changes of the tensors in the base's files, by the names in the files.

    Args:
        base: The base network, under the names in its files.
        folder: The adapter's folder, which errors name.
        changes: The changes of the tensors of the module, by their names in the module.

    Raises:
        ValueError: The base lacks some changed tensors, or they have other shapes in the base.
    """
    module = _module(base)
    if module is None:
        raise refuse_absent(base.path.parent, folder, changes, base.stored)
    conversion = find_conversion(_blanks(base), module)
    shapes = {name: base.stored[stored].shape for name, stored in conversion.renamed.items()}
    shapes |= {name: blank.shape for name, blank in conversion.blanks.items()}
    placed = place_changes(folder, changes, shapes, partial(_read_made, base, conversion))
    if placed is None:
        raise refuse_absent(base.path.parent, folder, changes, shapes)
    result: dict[str, tuple[Change, ...]] = {}
    for name, own in placed.items():
        if name in conversion.renamed:
            result[conversion.renamed[name]] = own
            continue
        for source in dict.fromkeys(box.source for box in conversion.made[name]):
            result[source] = (Rearranged(partial(_take_apart, base, conversion, source, placed)),)
    return result


def require_untied(base: Base, folder: Path, changed: Sequence[str]) -> None:
    """Raise a ValueError if an adapter changes only the embedding of a base whose head is tied to the embedding.

    Args:
        base: The base network, under the names in its files.
        folder: The adapter's folder.
        changed: The names, in the files, of changed tensors that may be the embedding.

    Raises:
        ValueError: The adapter changes a tied embedding. With a changed tied embedding, the sum would not be a network
            of the architecture.
    """
    module, shared = _module(base) if changed else None, set[str]()
    if module is not None:
        owners: dict[int, list[str]] = {}
        for name, tensor in module.state_dict(keep_vars=True).items():
            owners.setdefault(id(tensor), []).append(name)
        renamed = find_conversion(_blanks(base), module).renamed
        shared = {renamed.get(name, name) for names in owners.values() if len(names) > 1 for name in names}
    found = [name for name in changed if module is None or name in shared]
    if found:
        raise ValueError(TIED.format(str(folder), found[0], "the head", "the head"))


def _module(base: Base) -> nn.Module | None:
    """Return the base's model, uninitialized; None if no model can be built from the base's folder."""
    if not (base.path.parent / CONFIG).is_file():
        return None
    try:
        build = choose_factory(base.path.parent, _blanks(base))
        with torch.device("meta"):
            module: nn.Module = build()
    except (ImportError, ValueError):
        return None
    return module


def _blanks(base: Base) -> dict[str, Blank]:
    return {name: Blank(one.shape, one.dtype) for name, one in base.stored.items()}


def _take_apart(base: Base, conversion: Conversion, source: str, changes: Changes) -> Tensor:
    """Return a tensor of the files, computed from the changed tensors of the module."""

    def value(name: str) -> Tensor:
        tensor = _read_made(base, conversion, name)
        for change in changes.get(name, ()):
            tensor = change.apply(partial(_part, tensor), None)
        return tensor

    return conversion.take_apart(source, value)


def _read_made(base: Base, conversion: Conversion, name: str) -> Tensor:
    """Return a tensor of the module, computed from the tensors of the files."""
    if name in conversion.renamed:
        return base.read(conversion.renamed[name])
    dtype = work_dtype(conversion.blanks[name].dtype)
    return conversion.make(name, lambda there, rows: base.read(there, rows=rows), dtype=dtype)


def _part(tensor: Tensor, rows: tuple[int, int] | None) -> Tensor:
    return tensor if rows is None else tensor[rows[0] : rows[1]]

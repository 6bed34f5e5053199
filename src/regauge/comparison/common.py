"""What two networks of different shapes have in common: the tensors that are compared, whole or cut, and all others."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from regauge.core.params import Params
from regauge.core.symmetry import Symmetry
from regauge.storage.checkpoints.checkpoint import Checkpoint
from regauge.storage.checkpoints.formats.state_dicts import shorten

Shape = tuple[int, ...]
SHARED = 0.5
"""Axes that nothing moves, such as that of tokens, are cut to the shorter length if that is this share of the longer
one at least. Shorter ones mean something else: another set of classes, another input."""


@dataclass(frozen=True)
class Common:
    """The part of two networks that can be compared.

    Attributes:
        symmetry: The symmetry as it acts on that part.
        shapes: The shape to which each compared tensor is cut.
        share: The share of the first network's values that is compared.
        notes: Sentences about what is cut or left out.
    """

    symmetry: Symmetry
    shapes: Mapping[str, Shape]
    share: float
    notes: tuple[str, ...]

    def of(self, network: Mapping[str, Tensor] | Checkpoint) -> "Params | Part":
        """That part of a network; of a checkpoint on the disk a checkpoint that reads no more than it."""
        if isinstance(network, Checkpoint) and network.is_lazy:
            return Part(network, self.shapes)
        params = network.params if isinstance(network, Checkpoint) else network
        return {name: params[name][_corner(shape)] for name, shape in self.shapes.items() if name in params}


class Part(Checkpoint):
    """Some tensors of a checkpoint, each cut to its first rows and columns."""

    def __init__(self, source: Checkpoint, shapes: Mapping[str, Shape]) -> None:
        stored = {
            name: one._replace(shape=shapes[name], nbytes=prod(shapes[name]) * one.dtype.itemsize)
            for name, one in source.stored.items()
            if name in shapes
        }
        super().__init__(source.label, source.path, stored, source.metadata)
        self.source, self.form, self.read_so_far = source, source.form, source.read_so_far

    def dtype_of(self, name: str) -> torch.dtype:
        """What a tensor is read in."""
        return self.source.dtype_of(name)

    def read(self, name: str, *, rows: tuple[int, int] | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """A copy of one tensor, or of a range of its first axis, as far as it is compared."""
        shape = self.stored[name].shape
        if rows is None and shape and shape != self.source.stored[name].shape:
            rows = (0, shape[0])
        tensor = self.source.read(name, rows=rows, dtype=dtype)
        return tensor[(slice(None), *_corner(shape)[1:])].contiguous() if shape else tensor


def find_common(a: Mapping[str, Tensor], b: Mapping[str, Tensor], symmetry: Symmetry) -> Common | None:
    """The part of two networks that can be compared where they have different shapes; None where all is the same.

    Tensors of the same shape are compared, and those that are longer along axes that nothing moves up to the shorter
    length (vocabularies that were extended). Left out are tensors of other widths and whole layers that one network
    does not have: numbered parts such as `layers.7`. It is None, too, where a network lacks anything else, or where
    nothing is left on which the symmetry acts: these are different architectures, or damaged networks.

    Args:
        a: The first network, perhaps on the meta device, or a checkpoint of which the headers are read.
        b: The second one.
        symmetry: Of the first one's architecture.
    """
    first, second = (
        {name: tuple(t.shape) for name, t in _on_meta(one).items() if isinstance(t, Tensor)} for one in (a, b)
    )
    if first == second:
        return None
    tied = {name for names in symmetry.tied if any(n in first and n in second for n in names) for name in names}
    only = [[name for name in own if name not in other] for own, other in ((first, second), (second, first))]
    for own, other in zip(only, (second, first), strict=True):
        parts = {part for name in other for part in _numbered(name)}
        if any(name not in tied and not any(part not in parts for part in _numbered(name)) for name in own):
            return None
    moved = {(place.parameter, place.axis) for group in symmetry.groups for place in group.placements}
    parts = {part for name in symmetry.shapes for part in _numbered(name)}
    shapes, cut, left = dict[str, Shape](), dict[str, list[str]](), list[str]()
    for name, shape in first.items():
        if name in second:
            axes = {axis for one, axis in moved if one == name}
            common = _shared_shape(shape, second[name], axes)
            is_known = all(symmetry.shapes[name][axis] in (0, shape[axis]) for axis in axes)
            is_known = is_known and (name in symmetry.shapes or all(part in parts for part in _numbered(name)))
            if common is None or not is_known:
                left.append(name)
                continue
            shapes[name] = common
            if shape != second[name]:
                cut.setdefault(_lengths(shape, second[name]), []).append(name)
    if not any(name in shapes for name, _ in moved):
        return None
    notes = [f"{shorten(names)}: {lengths}" for lengths, names in cut.items()]
    notes += [f"left out, because its shape differs: {n!r}, {first[n]} in A and {second[n]} in B" for n in left[:2]]
    notes += [f"left out, because their shapes differ: {shorten(left[2:])}"] if left[2:] else []
    for label, names in zip("AB", only, strict=True):
        notes += [f"left out, because only {label} has them: {shorten(names)}"] if names else []
    again = {*symmetry.buffers, *(name for names in symmetry.tied for name in names[1:])}
    sizes = [sum(prod(s) for name, s in some.items() if name not in again) for some in (shapes, first)]
    return Common(restrict(symmetry, shapes), shapes, sizes[0] / sizes[1], tuple(notes))


def restrict(symmetry: Symmetry, shapes: Mapping[str, Shape]) -> Symmetry:
    """A symmetry as it acts on some of its tensors, of these shapes, without the groups that do nothing to them."""
    groups = [replace(g, placements=tuple(p for p in g.placements if p.parameter in shapes)) for g in symmetry.groups]
    needed = {name for group in groups if group.placements for name in (group.name, *group.within)}
    return replace(
        symmetry,
        groups=tuple(group for group in groups if group.name in needed),
        shapes={name: shapes[name] for name in symmetry.shapes if name in shapes},
        buffers=_known(symmetry.buffers, shapes),
        tied=tuple(known for names in symmetry.tied if len(known := _known(names, shapes)) > 1),
        ones=_known(symmetry.ones, shapes),
        readers=tuple((name, axis) for name, axis in symmetry.readers if name in shapes),
    )


def _on_meta(network: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return network.on_meta() if isinstance(network, Checkpoint) else network


def _known(names: Iterable[str], shapes: Mapping[str, Shape]) -> tuple[str, ...]:
    return tuple(name for name in names if name in shapes)


def _numbered(name: str) -> list[str]:
    """The parts with a number that a tensor is in, such as "layers.7" for "layers.7.mlp.weight"."""
    words = name.split(".")
    return [".".join(words[: k + 1]) for k, word in enumerate(words) if word.isdigit()]


def _shared_shape(x: Shape, y: Shape, moved: set[int]) -> Shape | None:
    """The shape to which two tensors are cut; None if they cannot be compared."""
    if len(x) != len(y):
        return None
    for axis, (n, m) in enumerate(zip(x, y, strict=True)):
        if n != m and (axis in moved or min(n, m) < SHARED * max(n, m)):
            return None
    return tuple(map(min, x, y))


def _lengths(x: Shape, y: Shape) -> str:
    """How far two tensors are compared along each axis in which they differ, in words."""
    differing = [(k, n, m) for k, (n, m) in enumerate(zip(x, y, strict=True)) if n != m]
    parts = (f"the first {min(n, m):,} along axis {k}, where A has {n:,} and B {m:,}" for k, n, m in differing)
    return "compared are " + ", and ".join(parts)


def _corner(shape: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(n) for n in shape)

"""The common part of two networks with different shapes: the tensors that both have, cut to their common size."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from regauge.checkpoints.checkpoint import Checkpoint, CheckpointView
from regauge.core.behind_gains import Added
from regauge.core.counted import shorten
from regauge.core.groups import Group, axes_of
from regauge.core.params import Params
from regauge.core.symmetry import Symmetry
from regauge.pruning import cut_symmetry
from regauge.pruning.cut_translations import cut_translations
from regauge.pruning.extension import extend_symmetry

Shape = tuple[int, ...]
SHARED = 0.5
"""The smallest ratio of two lengths at which two axes are compared up to the shorter length.

For example, two token axes of different lengths are cut to the shorter length. If one axis is much shorter, it has
another meaning, such as other class labels or inputs.
"""
Shapes = Mapping[str, Shape]


@dataclass(frozen=True)
class Widths:
    """The groups in which two networks have different numbers of units.

    Attributes:
        sizes: For each group with different numbers of units, the number of units in the first and in the second
            network.
        sides: The symmetry of each network.
        whole: The symmetry of a network that has, for each group, the larger number of units.
        common: The symmetry of a network that has, for each group, the smaller number of units.
    """

    sizes: Mapping[str, tuple[int, int]]
    sides: tuple[Symmetry, Symmetry]
    whole: Symmetry
    common: Symmetry

    def narrow(self, shapes: Shapes) -> dict[str, Shape]:
        """Return the shapes that both networks have after each group is cut to the smaller number of units."""
        return _with_lengths(shapes, self.common, [self.common[name] for name in self.sizes])


@dataclass(frozen=True)
class Common:
    """The part of two networks that can be compared.

    Attributes:
        symmetry: The symmetry as it acts on the part that can be compared.
        shapes: The shape to which each compared tensor is cut.
        share: The fraction of the first network's entries that is compared.
        notes: Notes on tensors that are cut or excluded.
        widths: The groups in which the two networks have different numbers of units. For groups with different numbers
            of units, matching units are selected before other axes are cut.
        is_whole: Whether the common part covers both networks completely. A whole common part means that both networks
            have the same shapes, but the symmetry may come from a network of other shapes.
    """

    symmetry: Symmetry
    shapes: Mapping[str, Shape]
    share: float
    notes: tuple[str, ...]
    widths: Widths | None = None
    is_whole: bool = False

    def of(self, network: Mapping[str, Tensor] | Checkpoint) -> "Params | CutCheckpoint":
        """Return the part of a network that can be compared with the other network.

        For a checkpoint on disk, return a checkpoint that reads only the comparable part.
        """
        if isinstance(network, Checkpoint) and network.is_lazy:
            return CutCheckpoint(network, self.shapes)
        params = network.params if isinstance(network, Checkpoint) else network
        return {name: params[name][corner(shape)] for name, shape in self.shapes.items() if name in params}

    def part_of(self, network: Mapping[str, Tensor], k: int) -> tuple[Params, Symmetry]:
        """Return the part of network k that can be compared, with all units of its groups, and the symmetry that acts
        on this part.
        """
        assert self.widths is not None
        symmetry = self.extend(self.widths.sides[k])
        shapes = {**self.shapes, **symmetry.shapes}
        part = {name: network[name][corner(shapes[name])] for name in self.shapes if name in network}
        return part, symmetry.bind(part)

    def extend(self, symmetry: Symmetry) -> Symmetry:
        """Return a symmetry of wider networks, restricted to the tensors that can be compared."""
        return restrict(symmetry, _with_lengths(self.shapes, symmetry, symmetry.groups))


class CutCheckpoint(CheckpointView):
    """Some tensors of a checkpoint, each cut to its first rows and columns."""

    def __init__(self, source: Checkpoint, shapes: Mapping[str, Shape]) -> None:
        stored = {
            name: one._replace(shape=shapes[name], nbytes=prod(shapes[name]) * one.dtype.itemsize)
            for name, one in source.stored.items()
            if name in shapes
        }
        super().__init__(source, stored)

    def read(self, name: str, *, rows: tuple[int, int] | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """Return a copy of the compared part of one tensor, or of a range of its first axis."""
        shape = self.stored[name].shape
        if rows is None and shape and shape != self.source.stored[name].shape:
            rows = (0, shape[0])
        tensor = self.source.read(name, rows=rows, dtype=dtype)
        return tensor[(slice(None), *corner(shape)[1:])].contiguous() if shape else tensor


def find_common(
    a: Mapping[str, Tensor], b: Mapping[str, Tensor], symmetry: Symmetry, *, has_widths: bool = True
) -> Common | None:
    """Return the comparable part of two networks of different shapes, or None if all shapes fit the symmetry.

    Tensors of the same shape are compared completely. If two tensors differ in length along an axis on which no group
    acts (an extended vocabulary), they are compared up to the shorter length. If a group has different numbers of units
    in the two networks, the smaller number of units is compared. Tensors whose shapes differ in any other way are left
    out. Layers that one network lacks, that is, numbered parts such as `layers.7`, are also left out. The result is
    also None if one network lacks a tensor outside numbered layers, or if the symmetry acts on no remaining tensor. If
    a tensor outside numbered layers is missing, the networks have different architectures or are damaged.

    Args:
        a: The first network. The networks may be on the meta device, or checkpoints of which only the headers are read.
        b: The second network, in the same form.
        symmetry: The symmetry of the first network's architecture.
        has_widths: Whether groups may have different numbers of units in the two networks. If False, tensors on which
            groups of different sizes act are left out.
    """
    first, second = (
        {name: tuple(t.shape) for name, t in _on_meta(one).items() if isinstance(t, Tensor)} for one in (a, b)
    )
    if first == second:
        fitting = fit_widths(symmetry, first)
        return None if fitting is symmetry else Common(fitting, first, 1.0, (), is_whole=True)
    given = first, second
    widths = find_widths(first, second, symmetry) if has_widths else None
    if widths is not None:
        symmetry, first, second = widths.common, widths.narrow(first), widths.narrow(second)
    tied = {name for names in symmetry.tied if any(n in first and n in second for n in names) for name in names}
    only = [[name for name in own if name not in other] for own, other in ((first, second), (second, first))]
    for own, other in zip(only, (second, first), strict=True):
        parts = {part for name in other for part in numbered_parts(name)}
        if any(name not in tied and not any(part not in parts for part in numbered_parts(name)) for name in own):
            return None
    moved = {(place.parameter, place.axis) for group in symmetry.groups for place in group.placements}
    parts = {part for name in symmetry.shapes for part in numbered_parts(name)}
    shapes, cut, left = dict[str, Shape](), dict[str, list[str]](), list[str]()
    for name, shape in first.items():
        if name in second:
            axes = {axis for one, axis in moved if one == name}
            common = _shared_shape(shape, second[name], axes)
            is_known = all(axes_of(symmetry.shapes[name])[axis] in (0, axes_of(shape)[axis]) for axis in axes)
            is_known = is_known and (name in symmetry.shapes or all(part in parts for part in numbered_parts(name)))
            if common is None or not is_known:
                left.append(name)
                continue
            shapes[name] = common
            if shape != second[name]:
                cut.setdefault(_lengths(shape, second[name]), []).append(name)
    if not any(name in shapes for name, _ in moved):
        return None
    part = restrict(symmetry, shapes)
    notes = [] if widths is None else _units(part, widths)
    notes += [f"{shorten(names)}: {lengths}" for lengths, names in cut.items()]
    notes += [
        f"left out, because its shape differs: {name!r}, {given[0][name]} in A and {given[1][name]} in B"
        for name in left[:2]
    ]
    notes += [f"left out, because their shapes differ: {shorten(left[2:])}"] if left[2:] else []
    for label, names in zip("AB", only, strict=True):
        notes += [f"left out, because only {label} has them: {shorten(names)}"] if names else []
    again = {*symmetry.buffers, *(name for names in symmetry.tied for name in names[1:])}
    sizes = [sum(prod(s) for name, s in some.items() if name not in again) for some in (shapes, given[0])]
    return Common(part, shapes, sizes[0] / sizes[1], tuple(notes), widths)


def restrict(symmetry: Symmetry, shapes: Mapping[str, Shape]) -> Symmetry:
    """Return a symmetry restricted to tensors of given shapes. Groups that act on none of the given tensors are left
    out.
    """
    groups = [replace(g, placements=tuple(p for p in g.placements if p.parameter in shapes)) for g in symmetry.groups]
    needed = {name for group in groups if group.placements for name in (group.name, *group.within)}
    given = {name: shape for name, shape in symmetry.shapes.items() if name in shapes and 0 not in shape}
    masks = {
        name: {axis: torch.arange(n) < shapes[name][axis] for axis, n in enumerate(shape) if n != shapes[name][axis]}
        for name, shape in given.items()
    }
    return replace(
        symmetry,
        groups=tuple(group for group in groups if group.name in needed),
        shapes={name: shapes[name] for name in symmetry.shapes if name in shapes},
        buffers=_known(symmetry.buffers, shapes),
        tied=tuple(known for names in symmetry.tied if len(known := _known(names, shapes)) > 1),
        ones=_known(symmetry.ones, shapes),
        readers=tuple((name, axis) for name, axis in symmetry.readers if name in shapes),
        gains=_known(symmetry.gains, shapes),
        added={
            name: _within(number, math.prod(shapes[name])) for name, number in symmetry.added.items() if name in shapes
        },
        translations=tuple(cut_translations(symmetry.translations, given, masks).values()),
    )


def _with_lengths(shapes: Shapes, symmetry: Symmetry, groups: Iterable[Group]) -> dict[str, Shape]:
    """Return shapes of tensors in which the axes of the given groups have the lengths that they have in a symmetry."""
    result = dict(shapes)
    for place in (place for group in groups for place in group.placements):
        if shapes.get(place.parameter):
            own = list(result[place.parameter])
            own[place.axis] = symmetry.shapes[place.parameter][place.axis]
            result[place.parameter] = tuple(own)
    return result


def _on_meta(network: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return network.on_meta() if isinstance(network, Checkpoint) else network


def _known(names: Iterable[str], shapes: Mapping[str, Shape]) -> tuple[str, ...]:
    return tuple(name for name in names if name in shapes)


def numbered_parts(name: str) -> list[str]:
    """Return the numbered parts of a name that contain the tensor, such as "layers.7" for "layers.7.mlp.weight"."""
    words = name.split(".")
    return [".".join(words[: k + 1]) for k, word in enumerate(words) if word.isdigit()]


def _shared_shape(x: Shape, y: Shape, moved: set[int]) -> Shape | None:
    """Return the shape to which two tensors are cut for a comparison, or None if they cannot be compared."""
    if len(x) != len(y):
        return None
    for axis, (n, m) in enumerate(zip(x, y, strict=True)):
        if n != m and (axis in moved or min(n, m) < SHARED * max(n, m)):
            return None
    return tuple(map(min, x, y))


def _units(symmetry: Symmetry, widths: Widths) -> list[str]:
    """Return sentences that state which units are compared."""
    names: dict[tuple[int, int], list[str]] = {}
    for group in symmetry.groups:
        if group.name in widths.sizes:
            names.setdefault(widths.sizes[group.name], []).append(group.name)
    result = []
    for (n, m), own in names.items():
        few, many = ("B", "A") if n > m else ("A", "B")
        result.append(
            f"{shorten(own)}: {min(n, m):,} units are compared, all of {few} and the best matches among the "
            f"{max(n, m):,} of {many}"
        )
    return result


def _lengths(x: Shape, y: Shape) -> str:
    """Return a clause that states how many entries are compared along each axis whose lengths differ."""
    differing = [(k, n, m) for k, (n, m) in enumerate(zip(x, y, strict=True)) if n != m]
    parts = (f"the first {min(n, m):,} along axis {k}, where A has {n:,} and B {m:,}" for k, n, m in differing)
    return "compared are " + ", and ".join(parts)


def corner(shape: Sequence[int]) -> tuple[slice, ...]:
    """Return slices that select the first entries along each axis."""
    return tuple(slice(n) for n in shape)


def find_widths(a: Shapes, b: Shapes, symmetry: Symmetry) -> Widths | None:
    """Return the groups in which two networks have different numbers of units, or None if there are none.

    Only groups that permute single units are considered. In both networks, all axes of one group must have the same
    number of units. Networks that `regauge.prune` made have equal numbers of units on all axes of a group.

    Args:
        a: The shapes of the first network.
        b: The shapes of the second network.
        symmetry: The symmetry of either network, or of another network of the same architecture.
    """
    if not symmetry.is_sized:
        return None
    found = [count_units(shapes, symmetry) for shapes in (a, b)]
    names = [name for name in found[0] if found[0][name] != found[1][name]]
    if not names:
        return None
    try:
        first, second = (resize(symmetry, sizes) for sizes in found)
        sizes = {name: (found[0][name], found[1][name]) for name in names}
        whole = resize(first, {name: max(pair) for name, pair in sizes.items()})
        common = resize(first, {name: min(pair) for name, pair in sizes.items()})
    except ValueError:  # Units are not at regular distances on an axis.
        return None
    return Widths(sizes, (first, second), whole, common)


def fit_widths(symmetry: Symmetry, shapes: Shapes) -> Symmetry:
    """Return a symmetry resized to the numbers of units of a network.

    The symmetry is returned unchanged if it already fits the shapes, or cannot be resized to fit.
    """
    if not symmetry.is_sized or _fits(symmetry, shapes):
        return symmetry
    try:
        fitting = resize(symmetry, count_units(shapes, symmetry))
    except ValueError:  # Units are not at regular distances on an axis.
        return symmetry
    return fitting if _fits(fitting, shapes) else symmetry


def resize(symmetry: Symmetry, sizes: Mapping[str, int]) -> Symmetry:
    """Return the symmetry of a network in which some groups have more or fewer units.

    Raises:
        ValueError: The entries of a resized group's units would not lie at regular distances on an axis.
    """
    less = {name: size for name, size in sizes.items() if size < symmetry[name].size}
    more = {name: size for name, size in sizes.items() if size > symmetry[name].size}
    symmetry = cut_symmetry(symmetry, less) if less else symmetry
    return extend_symmetry(symmetry, more) if more else symmetry


def count_units(shapes: Shapes, symmetry: Symmetry) -> dict[str, int]:
    """Return the number of units of each group in a network.

    If the axes of a group do not agree on its number of units, return the number in the symmetry. If a group shares all
    its axes with other groups, the units of the other groups are counted first.
    """
    counts: dict[str, int] = {}
    while True:
        told: dict[str, set[int]] = {}
        for name, count in _tell(shapes, symmetry, counts):
            told.setdefault(name, set()).add(count)
        if not told:
            return {group.name: counts.get(group.name, group.size) for group in symmetry.groups}
        for name, numbers in told.items():
            count = numbers.pop() if len(numbers) == 1 else 0
            counts[name] = count or symmetry[name].size
        try:
            symmetry = resize(symmetry, {name: counts[name] for name in told})
        except ValueError:
            counts |= {name: symmetry[name].size for name in told}


def _fits(symmetry: Symmetry, shapes: Shapes) -> bool:
    return all(shapes[name] == symmetry.shapes[name] for name in symmetry.sites if name in shapes)


def _tell(shapes: Shapes, symmetry: Symmetry, known: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    """Yield each group with its number of units. The number is computed from the length of an axis, once all other
    groups on this axis are counted.

    The number is 0 if no number of units fits the length of the axis.
    """
    for name, sites in symmetry.sites.items():
        if name not in shapes:
            continue
        there, here = shapes[name], symmetry.shapes[name]
        entries: dict[int, dict[str, int]] = {}
        for site in sites:
            if site.group.name not in known and site.group.is_permuted:
                own = entries.setdefault(site.placement.axis, {})
                own[site.group.name] = own.get(site.group.name, 0) + site.positions.numel() // site.group.size
        for axis, own in entries.items():
            if len(own) == 1:
                (group, each), *_ = own.items()
                more = there[axis] - here[axis] if len(there) == len(here) else None
                yield group, 0 if more is None or more % each else max(0, symmetry[group].size + more // each)


def _within(added: Added, length: int) -> Added:
    """Return the constants that the model adds to a vector, restricted to the first entries of the vector."""
    if not isinstance(added, tuple):
        return added
    return tuple((start, min(stop, length), number) for start, stop, number in added if start < length)

"""Relaxed elements: arbitrary matrices on units in place of permutation matrices, and their differentiable action.

A hard element permutes and scales entries, `x'[u] = factor[u] x[perm[u]]`. The action is a product with a signed
permutation matrix. A relaxed element has arbitrary matrices instead: `x'[u] = sum_v M[u, v] x[v]`. Examples are doubly
stochastic matrices and convex combinations of hard elements. The action is linear in each matrix. Matrices act only on
units: positions, kernel entries and flattened images move with their units.

If a group is repeated within other groups, it has a single matrix on the pairs (block, unit), blocks first:
`J[(b, u), (c, v)] = P[b, c] Q_bc[u, v]`. Here P is the matrix of the block group. If two groups with one block group
act on one tensor within the same blocks (a grouped convolution), the action includes P only once: `J_1 J_2 / P`.

Relaxed elements have no positive scales and no shifts. Methods first apply an initial element to the second network.
The relaxed element acts on the transformed network.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from regauge.core.act import Site
from regauge.core.behind_gains import plus
from regauge.core.closest import Character, character
from regauge.core.groups import axes_of
from regauge.core.symmetry import Symmetry

Key = tuple[str, Character]
"""The name of a group, and its character: the exponents (0 or 1) of the signs that multiply some entries.

The exponents for the groups that contain the group come first, in order. The exponents for the group itself follow.

The character of a linear group is (1,) if the inverse transpose acts, and otherwise (0,).
"""

Matrices = Mapping[Key, Tensor]
"""A matrix `[*batch, N, N]` for each key. N is the number of units in all blocks, and blocks come first."""


class RelaxedAction:
    """The action of relaxed elements on some tensors. The action is prepared once and applied to many elements.

    The action is differentiable and linear in every tensor, and works with `torch.func.vmap`. If the matrices belong to
    an element g without scales and shifts, the action equals `symmetry.act(g, tensors)`.

    Args:
        symmetry: The symmetry. All its sizes must be known.
        names: The names of the tensors to transform. Tensors on which no group acts are not changed.
        groups: The groups that have matrices. Other groups do not act. Default: all groups.

    Attributes:
        keys: The keys of the required matrices.

    Raises:
        ValueError: Two groups overlap on an axis, but the axis is not a product of the two groups.
    """

    def __init__(self, symmetry: Symmetry, names: Iterable[str], groups: Collection[str] | None = None) -> None:
        self._groups = {group.name: group for group in symmetry.groups}
        present = set(self._groups if groups is None else groups)
        self._lengths = {key: block_sizes(symmetry, key) for key in self._groups}
        self._tensors = {
            name: _steps(symmetry.sites[name], axes_of(symmetry.shapes[name]), present)
            for name in names
            if name in symmetry.sites
        }
        self._shapes, self._added = symmetry.shapes, symmetry.added
        found = (operand.key for steps in self._tensors.values() for step in steps for operand in step.operands())
        self.keys: tuple[Key, ...] = tuple(dict.fromkeys(found))

    def __call__(self, matrices: Matrices, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the transformed tensors, `[*batch, *shape]`.

        Batch axes of matrices and tensors broadcast.

        Raises:
            KeyError: A group has matrices, but no matrix for some exponents of signs that occur (see `Key`).
            ValueError: A matrix does not have the size of its group.
        """
        blocks = {key: self._blocks(key, matrices) for key in self.keys}
        moved = dict(tensors)
        for name, steps in self._tensors.items():
            added = self._added.get(name)
            tensor = tensors[name] if added is None else plus(tensors[name], added)
            shape = self._shapes[name]
            tensor = tensor if shape else tensor.unsqueeze(-1)
            for step in steps:
                tensor = step.apply(tensor, tensor.ndim - len(axes_of(shape)), blocks)
            tensor = tensor if shape else tensor.squeeze(-1)
            moved[name] = tensor if added is None else plus(tensor, added, -1)
        return moved

    def _blocks(self, key: Key, matrices: Matrices) -> Tensor:
        """Return the matrix of a key as `[*batch, bases..., unit, bases..., unit]`, or the identity if the key has no
        matrix.
        """
        sizes = self._lengths[key[0]]
        n = int(np.prod(sizes))
        if key not in matrices:
            if any(name == key[0] for name, _ in matrices):
                raise KeyError(f"the relaxed element has no matrix for {key}; it has {list(matrices)[:5]}")
            return torch.eye(n).reshape(*sizes, *sizes)
        matrix = matrices[key]
        if matrix.shape[-2:] != (n, n):
            raise ValueError(
                f"the matrix of {key} has shape {tuple(matrix.shape)}; group {key[0]!r} has {n} units in all its "
                f"blocks, so it must end in ({n}, {n})"
            )
        return matrix.reshape(*matrix.shape[:-2], *sizes, *sizes)


def block_sizes(symmetry: Symmetry, name: str) -> tuple[int, ...]:
    """Return the sizes of the groups within which a group is repeated, then its own size.

    The product of the returned sizes is N, the number of units in all blocks.
    """
    group = symmetry[name]
    return (*(symmetry[base].size for base in group.within), group.size)


def split_character(symmetry: Symmetry, key: Key) -> dict[str, Character]:
    """Return the exponents of signs in a key, split into the exponents of each base of the group and the exponents of
    the group itself.
    """
    parts, rest = {}, key[1]
    for name in (*symmetry[key[0]].within, key[0]):
        group = symmetry[name]
        count = 1 if group.matrix == "linear" else group.signs + group.shifts
        parts[name], rest = rest[:count], rest[count:]
    return parts


@dataclass(frozen=True)
class _Label:
    """A group that acts on one axis of a tensor, and the axes that contain its block indices."""

    name: str
    axis: int
    character: Character
    bases: tuple[tuple[str, int], ...]
    size: int

    @property
    def place(self) -> tuple[str, int]:
        return self.name, self.axis


@dataclass(frozen=True)
class _Segment:
    """Positions on an axis where the same groups act, ordered by unit: `[*units, rest]`."""

    positions: Tensor
    labels: tuple[_Label, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        sizes = [label.size for label in self.labels]
        return (*sizes, self.positions.numel() // int(np.prod(sizes)))


@dataclass(frozen=True)
class _Operand:
    """A matrix in an Einstein sum, raised to the power one or to a negative power."""

    key: Key
    letters: str
    power: int


@dataclass(frozen=True)
class _Cell:
    """A block of entries (one segment on each of some axes), and the Einstein sum that transforms it, or None if no
    group acts.
    """

    equation: str
    operands: tuple[_Operand, ...]
    tensor_at: int

    def apply(self, tensor: Tensor, blocks: Mapping[Key, Tensor]) -> Tensor:
        terms = [_power(blocks[o.key].to(tensor), o.power) for o in self.operands]
        terms.insert(self.tensor_at, tensor)
        return torch.einsum(self.equation, *terms)


@dataclass(frozen=True)
class _Step:
    """A step that transforms some axes together: their segments, and one block (cell) for each combination of
    segments.
    """

    axes: tuple[int, ...]
    segments: tuple[tuple[_Segment, ...], ...]
    cells: Mapping[tuple[int, ...], _Cell | None]

    def operands(self) -> Iterable[_Operand]:
        return (operand for cell in self.cells.values() if cell is not None for operand in cell.operands)

    def apply(self, tensor: Tensor, lead: int, blocks: Mapping[Key, Tensor]) -> Tensor:
        return self._assemble(tensor, lead, blocks, ())

    def _assemble(self, tensor: Tensor, lead: int, blocks: Mapping[Key, Tensor], chosen: tuple[int, ...]) -> Tensor:
        """Cut one axis after the other into its segments, transform each cell, and join the cells again."""
        if len(chosen) == len(self.axes):
            cell = self.cells[chosen]
            return tensor if cell is None else self._move(cell, tensor, lead, blocks, chosen)
        # Counted from the end: matrices may bring batch axes that the tensor does not have yet.
        ndim, order = tensor.ndim - lead, self._orders[len(chosen)]
        axis, segments = self.axes[len(chosen)] - ndim, self.segments[len(chosen)]
        if order is not None:
            tensor = tensor.index_select(tensor.ndim + axis, order[0].to(tensor.device))
        pieces = torch.split_with_sizes(tensor, [segment.positions.numel() for segment in segments], axis)
        moved = [self._assemble(piece, lead, blocks, (*chosen, k)) for k, piece in enumerate(pieces)]
        batch = np.broadcast_shapes(*(tuple(piece.shape[: piece.ndim - ndim]) for piece in moved))
        moved = [piece.expand(*batch, *piece.shape[piece.ndim - ndim :]) for piece in moved]
        result = moved[0] if len(moved) == 1 else torch.cat(moved, axis)
        return result if order is None else result.index_select(result.ndim + axis, order[1].to(tensor.device))

    @cached_property
    def _orders(self) -> list[tuple[Tensor, Tensor] | None]:
        """Return the positions of each axis, segment by segment, and the inverse permutation; None if the positions are
        in order.
        """
        orders = [torch.cat([segment.positions for segment in several]) for several in self.segments]
        return [None if bool((o == torch.arange(len(o))).all()) else (o, o.argsort()) for o in orders]

    def _move(
        self, cell: _Cell, tensor: Tensor, lead: int, blocks: Mapping[Key, Tensor], chosen: tuple[int, ...]
    ) -> Tensor:
        shape: list[int] = list(tensor.shape[lead:])
        split: list[int] = []
        picked = {axis: several[k] for axis, several, k in zip(self.axes, self.segments, chosen, strict=True)}
        for axis, length in enumerate(shape):
            split += picked[axis].shape if axis in picked else (length,)
        moved = cell.apply(tensor.reshape(*tensor.shape[:lead], *split), blocks)
        return moved.reshape(*moved.shape[: moved.ndim - len(split)], *shape)


def _steps(sites: Sequence[Site], shape: tuple[int, ...], present: set[str]) -> list[_Step]:
    """Return the steps that transform a tensor, one for each set of linked axes.

    The steps can be taken in any order.
    """
    linked: list[set[int]] = []
    for site in sites:
        own = site.placement.axis
        axes = {own, *(own if axis is None else axis for axis, _ in site.bases)}
        for others in [others for others in linked if others & axes]:
            linked.remove(others)
            axes |= others
        linked.append(axes)
    steps = []
    for axes in linked:
        ordered = tuple(sorted(axes))
        segments = tuple(tuple(_segments([s for s in sites if s.placement.axis == k], shape[k])) for k in ordered)
        cells: dict[tuple[int, ...], _Cell | None] = {}
        for chosen in np.ndindex(*(len(several) for several in segments)):
            picked = {k: several[c] for k, several, c in zip(ordered, segments, chosen, strict=True)}
            cells[chosen] = _cell(picked, len(shape), present)
        if any(cell is not None for cell in cells.values()):
            steps.append(_Step(ordered, segments, cells))
    return steps


def _segments(sites: Sequence[Site], length: int) -> list[_Segment]:
    """Return the positions of an axis as segments, each with the groups that act on it."""
    sites = sorted(sites, key=lambda site: len(site.group.within))
    units = np.full((len(sites), length), -1)
    for k, site in enumerate(sites):
        units[k, site.positions.numpy()] = site.units.numpy()
    patterns, which = np.unique(units >= 0, axis=1, return_inverse=True)
    result = []
    for p in range(patterns.shape[1]):
        here = [k for k in range(len(sites)) if patterns[k, p]]
        positions = np.flatnonzero(which.ravel() == p)
        labels = tuple(_label(sites[k]) for k in here)
        sizes = [label.size for label in labels]
        if here:
            joint = np.ravel_multi_index(tuple(units[k, positions] for k in here), sizes)
            counts = np.bincount(joint, minlength=int(np.prod(sizes)))
            if (counts != counts[0]).any():
                raise ValueError(
                    f"groups {[label.name for label in labels]} overlap on an axis of "
                    f"{sites[here[0]].placement.parameter!r} without being factors of it; relaxed elements cannot act "
                    "there: leave this tensor out, or one of the groups"
                )
            positions = positions[joint.argsort(kind="stable")]
        result.append(_Segment(torch.from_numpy(positions), labels))
    return sorted(result, key=lambda segment: int(segment.positions[0]))


def _label(site: Site) -> _Label:
    own = site.placement.axis
    axes = [own if axis is None else axis for axis, _ in site.bases]
    bases = tuple(zip(site.group.within, axes, strict=True))
    own_character = (int(site.placement.is_inverse),) if site.group.matrix == "linear" else character(site.placement)
    return _Label(site.group.name, own, own_character, bases, site.group.size)


def _cell(segments: Mapping[int, _Segment], ndim: int, present: set[str]) -> _Cell | None:
    """Return the Einstein sum for one segment on each axis; None if no group with a matrix acts."""
    labels = {label.place: label for segment in segments.values() for label in segment.labels}
    needed = {place for place in labels if place[0] in present}
    needed |= {base for place in needed for base in labels[place].bases}
    if not needed:
        return None
    # Every group that moves has two indices, one of the source and one of the target; others keep one.
    letters = iter("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
    source = {place: next(letters) for place in labels}
    target = {place: next(letters) if place in needed else source[place] for place in labels}
    into = out = ""
    for axis in range(ndim):
        places = [label.place for label in segments[axis].labels] if axis in segments else []
        rest = next(letters)
        into += "".join(source[p] for p in places) + rest
        out += "".join(target[p] for p in places) + rest
    operands = []
    for place, power in _powers(labels, needed).items():
        chain = [*labels[place].bases, place]
        joint = tuple(e for p in chain for e in labels[p].character)
        indices = "".join(target[p] for p in chain) + "".join(source[p] for p in chain)
        operands.append(_Operand((place[0], joint), indices, power))
    # Divisors come first, and the tensor after the first product, so that sums are computed as early as possible.
    operands.sort(key=lambda operand: operand.power)
    at = 1 + sum(operand.power < 0 for operand in operands)
    terms = ["..." + operand.letters for operand in operands]
    terms.insert(at, "..." + into)
    return _Cell(",".join(terms) + "->..." + out, tuple(operands), at)


def _powers(labels: Mapping[tuple[str, int], _Label], needed: set[tuple[str, int]]) -> dict[tuple[str, int], int]:
    """Return the nonzero power to which the matrix of each group is raised in a product.

    The matrix of a group also contains the factors of its bases, and each factor must occur once in the product. If
    groups g and h are repeated within b, the product is `J_g J_h / P_b`. Therefore the power of a base is one minus the
    powers of all groups that are repeated within it.
    """
    powers: dict[tuple[str, int], int] = {}
    for place in sorted(needed, key=lambda p: -len(labels[p].bases)):
        powers[place] = 1 - sum(power for other, power in powers.items() if place in labels[other].bases)
    return {place: power for place, power in powers.items() if power}


def _power(matrix: Tensor, power: int) -> Tensor:
    """Return a matrix, or its entrywise negative power. Entries that are not finite are set to zero."""
    if power == 1:
        return matrix
    is_zero = matrix == 0
    return torch.where(is_zero, 0.0, torch.where(is_zero, 1.0, matrix) ** power)

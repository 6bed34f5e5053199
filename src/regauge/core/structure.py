"""Structure: tensors that a network does not learn (masks, permutations, tables) and that a symmetry does not change.

Two units can be exchanged if the entries of both are equal in all structure tensors: see `regauge.core.exchangeable`.
If two networks have different structure, alignment uses only elements that map one structure to the other: see `carry`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regauge.core.act import Site, act
from regauge.core.element import Element, identity, stack
from regauge.core.exchangeable import bits
from regauge.core.params import VALUES
from regauge.core.symmetry import Symmetry

ATTEMPTS = 512
"""The largest number of times that a search for an element between two structures refines the colors of units."""

Codes = NDArray[np.uint64]
Colors = dict[str, Codes]


def is_same(first: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same bits after both are converted to the coarser of the two dtypes."""
    if first.shape != other.shape:
        return False
    if first.dtype != other.dtype and {first.dtype, other.dtype} <= VALUES:
        coarse = min((first.dtype, other.dtype), key=lambda dtype: dtype.itemsize)
        first, other = first.to(coarse), other.to(coarse)
    if first.dtype != other.dtype:
        return False
    return torch.equal(bits(first), bits(other.to(first.device)))


def require_same(name: str, tensors: Sequence[Tensor]) -> None:
    """Raise a ValueError unless all networks have the same structure tensor with a given name."""
    if not all(is_same(tensors[0], other) for other in tensors):
        raise ValueError(_difference(name))


def carry(symmetry: Symmetry, a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Element | None:
    """Return an element that maps the structure of network `b` to the structure of `a`, or None if they are equal.

    The search assigns colors to units and refines them until units with different structure have different colors
    (one-dimensional Weisfeiler-Leman test). If several units have the same color, the search tries pairs of them, one
    unit from each network. The element that the search finds is checked bit by bit.

    Raises:
        ValueError: No element maps one structure to the other; the message names a buffer that differs.
    """
    different = [name for name in symmetry.structure if name in a and name in b and not is_same(a[name], b[name])]
    if not different:
        return None
    movable = [name for name in symmetry.structure if name in symmetry.sites and name in a and name in b]
    fixed = [name for name in different if name not in movable]
    found = None if fixed else _Search(symmetry, movable, a, b).run()
    if found is None:
        raise ValueError(_difference((fixed or different)[0]))
    return found


def without_structure(symmetry: Symmetry) -> Symmetry:
    """Return the symmetry without its placements on structure tensors.

    The result is a symmetry for networks without structure tensors.
    """
    held = frozenset(symmetry.structure)
    groups = tuple(
        replace(g, placements=tuple(p for p in g.placements if p.parameter not in held)) for g in symmetry.groups
    )
    shapes = {name: shape for name, shape in symmetry.shapes.items() if name not in held}
    return replace(symmetry, groups=groups, shapes=shapes)


def _difference(name: str) -> str:
    return (
        f"the networks differ in {name!r}, a structure tensor that training does not change, such as a mask. No order "
        "of units maps one to the other. Give networks with equal structure tensors, or discover the symmetry with "
        f"move=[{name!r}] if these are ordinary values"
    )


def carry_pairs(symmetry: Symmetry, a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Element | None:
    """Return elements that map structures onto each other, for every pair of networks of two populations.

    If all structures are equal, the result is None.
    """
    names = [name for name in symmetry.structure if name in a and name in b]
    if all(is_same(a[name], b[name]) for name in names):
        return None
    found = []
    for k in range(len(a[names[0]])):
        one = carry(symmetry, *({name: network[name][k] for name in names} for network in (a, b)))
        found.append(symmetry.identity() if one is None else one)
    return stack(found)


class _Search:
    """A search for permutations that map the structure of one network to that of another."""

    def __init__(
        self, symmetry: Symmetry, names: Sequence[str], a: Mapping[str, Tensor], b: Mapping[str, Tensor]
    ) -> None:
        self._symmetry, self._names = symmetry, names
        self._a = {name: a[name] for name in names}
        self._b = {name: b[name].to(a[name].dtype).to(a[name].device) for name in names}
        self._groups = [g for g in symmetry.groups if g.is_permuted and not g.within and g.size > 1]
        known = {group.name for group in self._groups}
        self._places = {name: [s for s in symmetry.sites[name] if s.group.name in known] for name in names}
        self._codes = [_codes(network, names) for network in (self._a, self._b)]
        self._left = ATTEMPTS

    def run(self) -> Element | None:
        """Return an element that maps one structure to the other, or None if the search finds none."""
        start = {group.name: np.zeros(group.size, np.uint64) for group in self._groups}
        return self._descend(start, start)

    def _descend(self, first: Colors, other: Colors) -> Element | None:
        """Refine the colors of both networks.

        If several units share a color, pair one of them with each unit of this color in the other network in turn.
        """
        self._left -= 1
        first, other = self._refine(first, 0), self._refine(other, 1)
        if self._left < 0 or any((np.sort(first[name]) != np.sort(other[name])).any() for name in first):
            return None
        element = self._element(first, other)
        moved = act(self._symmetry.groups, self._sites(), element, self._b, self._ndims())
        if all(is_same(self._a[name], moved[name]) for name in self._names):
            return element
        tie = _smallest_tie(first)
        if tie is None:
            return None
        name, unit = tie
        for partner in np.flatnonzero(other[name] == first[name][unit]):
            found = self._descend(_marked(first, name, unit), _marked(other, name, int(partner)))
            if found is not None or self._left < 0:
                return found
        return None

    def _sites(self) -> dict[str, list[Site]]:
        return {name: self._symmetry.sites[name] for name in self._names}

    def _ndims(self) -> dict[str, int]:
        return {name: self._a[name].ndim for name in self._names}

    def _element(self, first: Colors, other: Colors) -> Element:
        """Return the element that pairs the units of each color in the order of their indices."""
        element = identity(self._symmetry.groups)
        for group in self._groups:
            perm = np.empty(group.size, np.int64)
            perm[first[group.name].argsort(kind="stable")] = other[group.name].argsort(kind="stable")
            value = replace(element[group.name], perm=torch.from_numpy(perm))
            element = element.replace(group.name, value)
        return element

    def _refine(self, colors: Colors, network: int) -> Colors:
        """Refine colors until no color changes. In each round, the new color of a unit is a hash of its old color, its
        entries in structure tensors, and the colors at the indices of these entries.
        """
        while True:
            signatures = {name: [color] for name, color in colors.items()}
            for name in self._names:
                codes, places = self._codes[network][name], self._places[name]
                on_axes = [_axis_colors(colors, places, axis, n) for axis, n in enumerate(codes.shape)]
                for axis in sorted({site.placement.axis for site in places}):
                    rest = codes.copy()
                    for other, color in enumerate(on_axes):
                        if other != axis:
                            shape = [-1 if k == other else 1 for k in range(codes.ndim)]
                            rest = _mix(rest, color.reshape(shape) + np.uint64(other + 1))
                    # A sum does not depend on the order of the entries, so a total depends only on the colors of units.
                    # Therefore equal units of two networks get equal totals. Overflow modulo 2^64 is intended.
                    totals = rest.sum(axis=tuple(k for k in range(codes.ndim) if k != axis), dtype=np.uint64)
                    for site in (site for site in places if site.placement.axis == axis):
                        for positions in site.by_copies.numpy():
                            signatures[site.group.name].append(_mix(totals[positions], np.uint64(axis)))
            refined = {name: _chain(parts) for name, parts in signatures.items()}
            if all(len(np.unique(refined[name])) == len(np.unique(colors[name])) for name in colors):
                return refined
            colors = refined


def _codes(network: Mapping[str, Tensor], names: Sequence[str]) -> dict[str, Codes]:
    """Return one integer for each entry of each tensor, made of the entry's bits and the index of its tensor."""
    result = {}
    for k, name in enumerate(names):
        tensor = network[name].detach().cpu().contiguous()
        rows = bits(tensor).reshape(*tensor.shape, -1).numpy().astype(np.uint64)
        code = np.full(tuple(tensor.shape), k, np.uint64)
        for byte in np.moveaxis(rows, -1, 0):
            code = _mix(code, byte)
        result[name] = code
    return result


def _axis_colors(colors: Colors, places: Sequence[Site], axis: int, length: int) -> Codes:
    """Return a color for each index of an axis: the color of its unit.

    An index that belongs to no unit gets a unique color.
    """
    found = _mix(np.arange(length, dtype=np.uint64), np.uint64(1))
    for k, site in enumerate(site for site in places if site.placement.axis == axis):
        for copy, positions in enumerate(site.by_copies.numpy()):
            found[positions] = _mix(colors[site.group.name], np.uint64(1000 * (k + 1) + copy))
    return found


def _smallest_tie(colors: Colors) -> tuple[str, int] | None:
    """Return the name of a group and the index of a unit, whose color the fewest units (but at least two) share."""
    best: tuple[int, str, int] | None = None
    for name, color in colors.items():
        _, firsts, counts = np.unique(color, return_index=True, return_counts=True)
        for first, count in zip(firsts.tolist(), counts.tolist(), strict=True):
            if count > 1 and (best is None or count < best[0]):
                best = (count, name, first)
    return None if best is None else best[1:]


def _marked(colors: Colors, name: str, unit: int) -> Colors:
    color = colors[name].copy()
    color[unit] = _mix(color[unit : unit + 1], np.uint64(77))[0]
    return {**colors, name: color}


def _chain(parts: Sequence[Codes]) -> Codes:
    result = parts[0]
    for part in parts[1:]:
        result = _mix(result, part)
    return result


def _mix(first: Codes, other: Any) -> Codes:
    """Return a hash of each pair of integers (splitmix64). A sum of hashes represents a multiset of pairs."""
    with np.errstate(over="ignore"):
        mixed = (first * np.uint64(0x9E3779B97F4A7C15)) ^ (np.uint64(0xD1B54A32D192ED03) + other)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        result: Codes = mixed ^ (mixed >> np.uint64(31))
    return result

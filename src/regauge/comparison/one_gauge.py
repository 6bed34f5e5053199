"""Related networks, all aligned to common coordinates (one gauge), and inner products of their weights."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from jaxtyping import Float64
from torch import Tensor

from regauge.alignment import align
from regauge.alignment.methods.weight_matching import WeightMatching
from regauge.alignment.representatives import has_representatives
from regauge.canonical.null_spaces import without_null_spaces
from regauge.comparison.common import restrict
from regauge.comparison.match_whole import perturb
from regauge.comparison.pair import FORMATS, holds
from regauge.comparison.trees import Points, span
from regauge.comparison.verdicts import MOVED
from regauge.core.balance import balance, has_balance
from regauge.core.behind_gains import zero_gains
from regauge.core.params import VALUES, Params
from regauge.core.symmetry import Symmetry

Shape = tuple[int, ...]

SAMPLED = 1 << 18
"""The number of entries of each network from which inner products are computed. Smaller networks are used whole."""
BLOCKS = 8
"""The number of blocks into which the entries of a tensor are divided."""
APART = 1.2
"""Networks count as aligned to one gauge if their distances are at most this multiple of the distances of separately
aligned pairs."""
PRUNED = 0.9
"""A network counts as a pruned copy of another network if at least this fraction of their squared distance lies in its
zero entries.
"""
SLACK = 4.0
"""A network does not count as the original of a pruned network if their squared distance outside of the zeros is more
than this multiple of the smallest such distance.
"""
ZEROS = 0.01
"""The smallest fraction of zero entries from which a network can count as pruned."""


def in_one_gauge(
    names: Sequence[str],
    read: Callable[[str], Mapping[str, Tensor]],
    symmetry: Symmetry,
    distances: Float64[Tensor, "n n"],
) -> Points | None:
    """Align related networks to common coordinates, and return them as points; None if the distances after alignment do
    not fit.

    The first network is balanced. Each further network is aligned to a near relative that is already aligned. A network
    is kept in memory only until all networks that are aligned to it have been read. If networks differ in the lengths
    of axes without a group, only the common part is used. Residual streams are first aligned by permutations. If the
    distances after alignment by permutations differ from the given distances, streams are aligned by rotations instead.

    Args:
        names: The names of the networks.
        read: A function that returns a network.
        symmetry: The symmetry of a pair of the networks.
        distances: The absolute distances between the balanced networks of all pairs.
    """
    own = [{n: tuple(tensor.shape) for n, tensor in read(name).items()} for name in names]
    shapes = _common_shapes(own, symmetry)
    if shapes is None:
        return None
    sizes = [sum(map(math.prod, one.values())) for one in own]

    def cut(name: str) -> Params:
        return {n: t[tuple(map(slice, shapes[n]))] for n, t in read(name).items()}

    symmetry = restrict(symmetry, shapes).bind(cut(names[0]))
    # In a rotated stream, units do not correspond one to one.
    ways = (False, True) if symmetry.rotatable else (False,)
    tried = (_in_gauge_of(names, cut, symmetry, distances, sizes=sizes, is_rotated=one) for one in ways)
    return next((points for points in tried if points is not None), None)


def _in_gauge_of(
    names: Sequence[str],
    read: Callable[[str], Params],
    symmetry: Symmetry,
    distances: Float64[Tensor, "n n"],
    *,
    sizes: Sequence[int],
    is_rotated: bool,
) -> Points | None:
    """Align related networks to common coordinates, as `in_one_gauge` does, for networks of one shape and one kind of
    alignment.

    Args:
        names: The names of the networks.
        read: A function that returns a network.
        symmetry: The symmetry of the first network, to whose coordinates all others are aligned.
        distances: The absolute distances between the balanced networks of all pairs.
        sizes: The numbers of entries of the networks, also of entries that other networks lack.
        is_rotated: Whether residual streams are rotated, instead of permuted.
    """
    is_split = has_representatives(symmetry)
    behind = symmetry.on_representatives(rotate=is_rotated) if is_split else symmetry
    order = span(-distances.numpy())  # Each network comes after a near relative.
    needed = Counter(near for near, _ in order)
    gauge, rows = dict[int, Params](), dict[int, Tensor]()
    rounding = torch.zeros(len(names), dtype=torch.float64)
    places = _choose(read(names[0]), symmetry)
    for near, k in [(-1, 0), *order]:
        given = read(names[k])
        spacing = _spacing(given[n] for n in places)
        own: Params = {n: t.detach().double() if t.is_floating_point() else t for n, t in given.items()}
        if is_rotated and any(bool(zero) for zero in zero_gains(symmetry, own, symmetry.rotatable).values()):
            return None
        stored = own, {n: perturb(n, t, spacing) for n, t in own.items()}
        here, there = (symmetry.split(one)[0] if is_split else one for one in stored)
        own, element = without_null_spaces(here, behind), behind.identity()
        if near >= 0:
            aligned = align(gauge[near], own, behind, method=WeightMatching())
            own, element = aligned.params, aligned.element
        if has_balance(behind):
            scales = balance(own, behind)
            own, element = behind.act(scales, own), behind.compose(scales, element)
        rows[k] = _row(own, places)
        # Rounding moves a network further in these coordinates than as stored, if scales or matrices are not isometric.
        rounding[k] = (_row(behind.act(element, there), places) - _row(behind.act(element, here), places)).norm()
        if near >= 0 and (rows[k] - rows[near]).norm() > APART * distances[near, k] + MOVED * rows[k].norm():
            return None
        needed[near] -= 1
        gauge |= {k: own} if needed[k] else {}
        gauge = {one: params for one, params in gauge.items() if needed[one]}
    points = torch.stack([rows[k] for k in range(len(names))])
    pieces = [one for part in torch.split(points, [len(at) for at in places.values()], 1) for one in _blocks(part)]
    tensors = [k for k, at in enumerate(places.values()) for _ in range(min(BLOCKS, len(at)))]
    products = torch.stack([piece @ piece.T for piece in pieces])
    return Points(names, products, torch.tensor(tensors), _find_pruned(points), rounding, points.shape[1], sizes)


def _common_shapes(networks: Sequence[Mapping[str, Shape]], symmetry: Symmetry) -> dict[str, Shape] | None:
    """Return the shapes that all networks have in common, or None if they differ in names or along axes of groups."""
    moved = {(place.parameter, place.axis) for group in symmetry.groups for place in group.placements}
    shapes = dict(networks[0])
    for network in networks:
        if {*network} != {*shapes} or any(len(network[n]) != len(shape) for n, shape in shapes.items()):
            return None
        for name, shape in shapes.items():
            here = network[name]
            if any(here[axis] != n and (name, axis) in moved for axis, n in enumerate(shape)):
                return None
            shapes[name] = tuple(map(min, shape, here))
    return shapes


def _choose(params: Mapping[str, Tensor], symmetry: Symmetry) -> dict[str, Tensor]:
    """Return, for each compared tensor, the positions of the entries from which inner products are computed."""
    ignored = {*symmetry.buffers, *(name for names in symmetry.tied for name in names[1:])}
    sizes = {n: t.numel() for n, t in params.items() if n not in ignored and t.dtype in VALUES and t.numel()}
    total, source = sum(sizes.values()), torch.Generator().manual_seed(0)
    if total <= SAMPLED:
        return {name: torch.arange(size) for name, size in sizes.items()}
    counts = {name: min(size, max(BLOCKS, size * SAMPLED // total)) for name, size in sizes.items()}
    return {name: torch.randint(sizes[name], (count,), generator=source) for name, count in counts.items()}


def _blocks(points: Tensor) -> Sequence[Tensor]:
    """Return the entries of one tensor in blocks."""
    return points.tensor_split(min(BLOCKS, points.shape[1]), 1)


def _spacing(tensors: Iterable[Tensor]) -> float:
    """Return the spacing of numbers near one in the coarsest format that holds all entries."""
    known = list(tensors)
    coarsest = next((f for f in FORMATS if all(holds(f, tensor) for tensor in known)), torch.float64)
    return torch.finfo(coarsest).eps


def _row(params: Params, places: Mapping[str, Tensor]) -> Tensor:
    """Return the chosen entries of a network, weighted such that distances of tensors stay the same on average."""
    return torch.cat([params[n].flatten()[at] * (params[n].numel() / len(at)) ** 0.5 for n, at in places.items()])


def _find_pruned(points: Tensor) -> Tensor:
    """Return, for each pair of networks, whether the second equals the first with some entries set to zero."""
    zeros = points == 0
    found = torch.zeros(len(points), len(points), dtype=torch.bool)
    for k, own in enumerate(zeros):
        if own.double().mean() >= ZEROS:
            gaps = (points - points[k]).square()
            has_fewer = zeros.sum(1) < (1 - ZEROS) * own.sum()
            rest, all_gaps = gaps[:, ~own].sum(1), gaps.sum(1)
            found[:, k] = has_fewer & (rest < (1 - PRUNED) * all_gaps)
            found[:, k] &= rest <= SLACK * rest.where(found[:, k], torch.inf).min()
    return found

"""Shares: weights of units, by which the copies of a split unit count as one unit.

If a unit is split into two copies whose outgoing weights add up to the original weights, the function stays the same.
Every unit gets a share that is proportional to its outgoing weights. A net divides outgoing weights by shares, and uses
shares as the weights of units in all means. The features of the copies then equal the features of the unit, and the
shares of the copies sum to the share of the unit.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from regauge.core.arguments import check_arguments
from regauge.core.symmetry import Symmetry
from regauge.core.unit_plans import Axis, default_readers
from regauge.weightspace.layout.blocks import Block, End, Grid
from regauge.weightspace.layout.compile import Layout

Shares = Mapping[str, Float[Tensor, "models *sizes"]]
"""For each group, the shares of its units, on the axes of its unit set. The shares sum to one within each copy of the
group.

Groups whose units have equal shares are left out.
"""
LOGARITHM_FLOOR = 1e-30
"""The number that replaces zero before a logarithm is taken."""


@check_arguments
def find_readers(symmetry: Symmetry | Sequence[Symmetry]) -> frozenset[Axis]:
    """Return the axes (parameter, axis) along which layers sum over units, as recorded by discovery.

    If discovery recorded no axes, return the axes of torch's layers: axis 1 of weights (out, in, ...), axis 0 of
    transposed convolutions, and no axis of vectors and embeddings.

    Args:
        symmetry: The symmetry of the networks, or a list of symmetries of several architectures.

    Raises:
        ValueError: In one architecture, a layer sums over units along an axis of a parameter. In another architecture,
            no layer sums along this axis of the parameter with the same name.
    """
    symmetries = (symmetry,) if isinstance(symmetry, Symmetry) else tuple(symmetry)
    moved = [{(p.parameter, p.axis) for group in one.groups for p in group.placements} for one in symmetries]
    found = [default_readers(one) & axes for one, axes in zip(symmetries, moved, strict=True)]
    every = frozenset[Axis]().union(*found)
    for axes, own in zip(moved, found, strict=True):
        if wrong := sorted((axes & every) - own):
            raise ValueError(
                f"{wrong[0]} sums over units in one architecture and not in another; rename the parameter in one of "
                "them, or make a net for each"
            )
    return every


def find_shares(values: Mapping[str, Tensor], layout: Layout) -> dict[str, Tensor]:
    """Return the shares of all units that have outgoing weights, computed from values of blocks.

    The share of a unit is proportional to the magnitudes of its outgoing weights. Over the units that receive a weight,
    the largest magnitude is used, because copies of receiving units do not change the maximum. If a weight reads
    further units, magnitudes are summed over these units. Units without outgoing weights have no shares.
    """
    totals: dict[str, Tensor] = {}
    for block in layout.blocks:
        grid = layout.grid(block.name)
        for axis, label in enumerate(block.labels):
            if not label.reads or label.group not in layout.units:
                continue
            kept = (*grid.bases[axis], axis)
            rest = [k for k in range(len(block.labels)) if k not in kept]
            given = [1 + k for k in rest if not block.labels[k].reads]
            read = [1 + k for k in rest if block.labels[k].reads]
            size = values[block.name].abs().amax((*given, -1))
            left = [k for k in range(len(block.labels)) if 1 + k not in given]
            places = [1 + left.index(axis - 1) for axis in read]
            size = (size.sum(places) if places else size) ** (1 / label.reads)
            order = sorted(kept)
            size = size.permute(0, *(1 + order.index(k) for k in kept))
            totals[label.group] = totals.get(label.group, 0) + size
    return {name: x / x.sum(-1, keepdim=True).clamp_min(LOGARITHM_FLOOR) for name, x in totals.items()}


def divide(values: Mapping[str, Tensor], layout: Layout, shares: Shares) -> dict[str, Tensor]:
    """Return values of blocks, divided by the shares of the units that the blocks read, or zero where a share
    is zero.
    """
    return {b.name: divide_by(values[b.name], read_weights(b, layout, shares)) for b in layout.blocks}


def divide_by(x: Tensor, weights: Tensor | None) -> Tensor:
    """Return values divided by weights. The weights have the leading axes of the values. The result is zero where a
    weight is zero.
    """
    if weights is None:
        return x
    weights = weights.reshape(*weights.shape, *([1] * (x.ndim - weights.ndim)))
    return torch.where(weights > 0, x / weights.clamp_min(LOGARITHM_FLOOR), torch.zeros_like(x))


def read_weights(block: Block, layout: Layout, shares: Shares) -> Tensor | None:
    """Return products of the weights (shares) of the units that a block reads, `[models, *ones]`, or None if the block
    reads no units.
    """
    grid, made = layout.grid_of(block), None
    for axis, label in enumerate(block.labels):
        if label.reads and label.group in shares:
            share = _along(shares[label.group], axis, grid).squeeze(-1) ** label.reads
            made = share if made is None else made * share
    return made


def weigh(x: Tensor, axes: Iterable[int], grid: Grid, shares: Shares) -> Tensor:
    """Return vectors times the weights (shares) of units along some axes, counted with the model axis. The sum of the
    result over these axes is a weighted mean.
    """
    for axis in axes:
        share = shares.get(grid.groups[axis - 1])  # Without shares all units count alike: 1 / n each.
        x = x / grid.sizes[axis - 1] if share is None else x * _along(share, axis - 1, grid)
    return x


def average(x: Tensor, axes: Iterable[int], grid: Grid, shares: Shares) -> Tensor:
    """Return the mean of vectors over some axes (counted with the model axis), weighted by the shares of units."""
    axes = tuple(axes)
    if not axes:
        return x
    return weigh(x, axes, grid, shares).sum(axes) if _matter(axes, grid, shares) else x.mean(axes)


class Terms:
    """Factors by which sums of n terms are multiplied. Sums of terms with random signs grow like sqrt(n), so the factor
    is 1 / sqrt(n).

    If units have weights (shares), all sums are weighted means, and the factor is sqrt(n). In weighted means, n is the
    number of units in the networks for which the layer was made, because other networks may contain copies of units.
    """

    def __init__(self, layouts: Iterable[Layout]) -> None:
        self.sizes = {layout.key: {b.name: b.sizes for b in layout.pair_blocks} for layout in layouts}

    def factor(self, block: Block, end: End, layout: Layout, shares: Shares) -> float:
        """Return the factor for sums over all axes of a block except those that index one unit set."""
        sizes = self.sizes[layout.key][block.name] if shares else block.sizes
        count = math.prod(size for axis, size in enumerate(sizes) if axis not in end.axes)
        return math.sqrt(count) if shares else 1 / math.sqrt(count)


def log_weights(axes: Iterable[int], grid: Grid, shares: Shares) -> Tensor | None:
    """Return the log weights of units along some axes, `[models, *ones, 1]`, or None if all weights are equal."""
    axes = tuple(axes)
    if not _matter(axes, grid, shares):
        return None
    ones = next(iter(shares.values())).new_ones((1,) * (len(grid.sizes) + 2))
    return weigh(ones, axes, grid, shares).clamp_min(LOGARITHM_FLOOR).log()


def _matter(axes: Iterable[int], grid: Grid, shares: Shares) -> bool:
    return any(grid.groups[axis - 1] in shares for axis in axes)


def _along(share: Tensor, axis: int, grid: Grid) -> Tensor:
    """Return the weights of units (shares) arranged at the axes of a grid, `[models, *ones, 1]`."""
    kept = (*grid.bases[axis], axis)
    order = sorted(range(len(kept)), key=kept.__getitem__)
    shape = [size if k in kept else 1 for k, size in enumerate(grid.sizes)]
    return share.permute(0, *(1 + k for k in order)).reshape(len(share), *shape, 1)

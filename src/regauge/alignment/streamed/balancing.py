"""Balancing of networks on disk, and fitting of the scales of nearly equal networks, in independent parts.

Tensors whose scales depend on one another form one part. The tensors of a part are read one after another. Memory holds
only sums of tensors over the axes on which no scales act.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from regauge.alignment.engine.frames import notes_on
from regauge.alignment.engine.refit import fit_continuous, join, squared_distances
from regauge.alignment.streamed.passes import Passes
from regauge.checkpoints.checkpoint import Checkpoint
from regauge.core.balance import Balance, Buffers, agree, balance_but, balanced_parts, count_frozen_gains
from regauge.core.element import Element
from regauge.core.families import CHUNK, row_ranges
from regauge.core.groups import Group, Placement, axes_of
from regauge.core.matrices import root_of
from regauge.core.params import Params, require_finite, work_dtype
from regauge.core.symmetry import Symmetry


def balance_streamed(
    checkpoints: Sequence[Checkpoint], symmetry: Symmetry, buffers: Buffers, passes: Passes
) -> tuple[list[Element], tuple[str, ...]]:
    """Return the element that balances each network, and messages about groups that could not be balanced."""
    symmetry = count_frozen_gains(symmetry, buffers)
    sides, notes = [symmetry.identity()] * len(checkpoints), list[str]()

    def balance_part(part: frozenset[str]) -> list[Balance]:
        before = passes.bytes_and_seconds[0]

        def balance(k: int, rigid: Mapping[str, Tensor]) -> Balance:
            params = _read_part(checkpoints[k], symmetry, part)
            return balance_but(params, _restrict(symmetry, params), buffers, rigid)

        found = agree(len(checkpoints), balance)
        passes.advance(passes.bytes_and_seconds[0] - before)
        return list(found)

    for found in passes.crew.map(balance_part, balanced_parts(symmetry, buffers=buffers)):
        notes += notes_on(found[0].rigid)
        for k, own in enumerate(found):
            sides[k] = join(sides[k], own.element)
    return sides, tuple(notes)


def fit_streamed(
    a: Checkpoint,
    b: Checkpoint,
    symmetry: Symmetry,
    groups: Sequence[Group],
    parts: Iterable[Collection[str]],
    passes: Passes,
) -> tuple[Element, bool]:
    """Return scales and matrices that bring the second network closest to the first, and whether the distance becomes
    smaller.

    Args:
        a: The first network.
        b: The second network, already aligned to the first.
        symmetry: The symmetry. All sizes must be known, and gains of frozen normalization must be treated as
            parameters.
        groups: The groups whose scales and matrices are fitted; see `fitted_groups`.
        parts: The sets of tensors that are fitted together; see `fitted_parts`.
        passes: The counter of the bytes that are read.
    """
    total, gained, chosen = symmetry.identity(), 0.0, {group.name for group in groups}

    def fit(part: Collection[str]) -> tuple[float, Element]:
        before = passes.bytes_and_seconds[0]
        x, y = {}, {}
        for name in sorted(part):
            x[name], y[name] = _read_pair(a, b, symmetry, name)
        own = _restrict(symmetry, {name: tensor[0] for name, tensor in x.items()})
        before_fit = squared_distances(x, y)
        element, left = fit_continuous(own, [group for group in own.groups if group.name in chosen], x, y)
        passes.advance(passes.bytes_and_seconds[0] - before)
        return float(before_fit - left), element.item(0)

    for gain, found in passes.crew.map(fit, parts):
        gained += gain
        total = join(total, found)
    return total, gained > 0


def _read_part(checkpoint: Checkpoint, symmetry: Symmetry, part: Collection[str]) -> Params:
    """Read the running statistics and some tensors, summed over axes that `balance` does not need."""
    params = {name: checkpoint.read(name) for name in sorted(set(symmetry.buffers) & symmetry.sites.keys())}
    return params | {name: _reduce(checkpoint, symmetry, name) for name in sorted(part)}


def _restrict(symmetry: Symmetry, params: Params) -> Symmetry:
    """Return the symmetry restricted to some parameters with given shapes, without actions on axes that were summed."""
    shapes = {name: tuple(tensor.shape) for name, tensor in params.items()}

    def is_kept(place: Placement) -> bool:
        name, axis = place.parameter, place.axis
        return name in shapes and axes_of(shapes[name])[axis] == axes_of(symmetry.shapes[name])[axis]

    groups = (replace(g, placements=tuple(p for p in g.placements if is_kept(p))) for g in symmetry.groups)
    buffers = tuple(name for name in symmetry.buffers if name in params)
    kept = tuple(group for group in groups if group.placements)
    return Symmetry(kept, shapes, buffers=buffers, added=symmetry.added)


def summed_axes(symmetry: Symmetry, name: str) -> tuple[int, ...]:
    """Return the axes of a tensor over which products can be summed, because no scales and no matrices act there.

    If matrices act on a tensor that is read in chunks, only the first axis can be summed.
    """
    sites, ndim = symmetry.sites[name], len(symmetry.shapes[name])
    if any(site.group.matrix == "linear" for site in sites):
        return (0,) if len(row_ranges(symmetry, name)) > 1 else ()
    used = {axis for site in sites if any(site.placement.scale) for axis in site.axes}
    return tuple(axis for axis in range(ndim) if axis not in used)


def _is_mixed(symmetry: Symmetry, name: str) -> bool:
    return any(site.group.matrix == "linear" for site in symmetry.sites[name])


def _reduce(checkpoint: Checkpoint, symmetry: Symmetry, name: str) -> Tensor:
    """Return a smaller tensor: products of entries, summed over axes on which no scales act.

    The products are squares of entries or, if matrices act on the tensor, the inner products of all pairs of columns.
    """
    axes = summed_axes(symmetry, name)
    if not axes:
        tensor = checkpoint.read(name)
        require_finite({name: tensor}, str(checkpoint.path), symmetry.structure)
        return tensor
    sums = _Sums(symmetry, name)
    for rows in row_ranges(symmetry, name):
        piece = checkpoint.read(name, rows=rows)
        require_finite({name: piece}, str(checkpoint.path), symmetry.structure)
        sums.add([piece])
    if _is_mixed(symmetry, name):
        (gram,) = sums.found
        return root_of(gram).reshape(len(gram), *symmetry.shapes[name][1:])
    return sums.found[0].sqrt()


def _read_pair(a: Checkpoint, b: Checkpoint, symmetry: Symmetry, name: str) -> tuple[Tensor, Tensor]:
    """Return the tensor with a given name from both networks, as a batch of one pair. If possible, smaller tensors that
    give the same fit are returned instead.

    If axes can be summed, smaller tensors replace the stored tensors. The smaller tensors give the same fit, because
    they have the same sums of squares and products. If matrices act on the tensors, the smaller tensors have the same
    products of all columns.
    """
    dtype = work_dtype(a.stored[name].dtype, b.stored[name].dtype)
    axes, sums = summed_axes(symmetry, name), _Sums(symmetry, name)
    if not axes:
        x, y = (one.read(name, dtype=dtype).unsqueeze(0) for one in (a, b))
        return x, y
    for rows in row_ranges(symmetry, name):
        sums.add([one.read(name, rows=rows, dtype=dtype) for one in (a, b)])
    if _is_mixed(symmetry, name):
        (gram,) = sums.found
        roots = root_of(gram).reshape(len(gram), 2, *symmetry.shapes[name][1:])
        return roots[None, :, 0], roots[None, :, 1]
    squares, products, others = sums.found
    roots = squares.sqrt()
    along = torch.where(roots > 0, products / roots, 0.0)
    across = (others - along.square()).clamp_min(0).sqrt()
    x, y = (torch.cat(pair, axes[0])[None] for pair in ((roots, torch.zeros_like(roots)), (along, across)))
    return x, y


class _Sums:
    """Sums of products of several tensors over axes that can be summed, in float64, accumulated over chunks of rows.

    The products are those of each tensor with itself and with all later tensors, entry by entry. If matrices act, one
    matrix contains the products of all columns of all tensors.
    """

    def __init__(self, symmetry: Symmetry, name: str) -> None:
        self._axes, self._is_mixed = summed_axes(symmetry, name), _is_mixed(symmetry, name)
        self.found: list[Tensor] = []

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Add the products for a range of rows of all tensors."""
        rows = max(1, CHUNK // (16 * max(1, tensors[0][:1].numel())))
        parts = [self._products(part) for part in zip(*(torch.split(tensor, rows) for tensor in tensors), strict=True)]
        for sums in parts if 0 in self._axes else [[torch.cat(own) for own in zip(*parts, strict=True)]]:
            self.found = [have + new for have, new in zip(self.found, sums, strict=True)] if self.found else sums

    def _products(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        wide = [tensor.double() for tensor in tensors]
        if self._is_mixed:
            both = torch.cat([tensor.flatten(1) for tensor in wide], 1)
            return [both.mT @ both]
        pairs = [(x, y) for k, x in enumerate(wide) for y in wide[k:]]
        return [(x * y).sum(self._axes, keepdim=True) for x, y in pairs]

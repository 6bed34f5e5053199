"""Balance networks on the disk, and fit the scales of nearly equal ones, part by part.

Tensors whose scales depend on one another are read together. Of those that are read in pieces only sums over the first
axis are kept, on which nothing acts.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from regauge.alignment.engine.frames import notes_on
from regauge.alignment.engine.refit import fit_continuous, squared_distances
from regauge.alignment.streamed.passes import Passes
from regauge.checkpoints.checkpoint import Checkpoint
from regauge.core.balance import Balance, Buffers, agree, balance_but, balanced_parts, count_frozen_gains
from regauge.core.element import Element, Value
from regauge.core.families import row_ranges
from regauge.core.groups import Group
from regauge.core.matrices import root_of
from regauge.core.params import Params, require_finite, work_dtype
from regauge.core.symmetry import Symmetry


def balance_streamed(
    checkpoints: Sequence[Checkpoint], symmetry: Symmetry, buffers: Buffers, passes: Passes
) -> tuple[list[Element], tuple[str, ...]]:
    """The element that balances each network, and sentences on groups that keep their matrices; see `balance_alike`."""
    symmetry = count_frozen_gains(symmetry, buffers)
    sides, notes = [symmetry.identity()] * len(checkpoints), list[str]()
    for part in balanced_parts(symmetry, buffers=buffers):
        before = passes.bytes_and_seconds[0]

        def balance(k: int, rigid: Mapping[str, Tensor], part: frozenset[str] = part) -> Balance:
            params = _read_part(checkpoints[k], symmetry, part)
            return balance_but(params, _restrict(symmetry, params), buffers, rigid)

        found = agree(len(checkpoints), balance)
        notes += notes_on(found[0].rigid)
        for k, own in enumerate(found):
            for name, value in own.element.items():
                sides[k] = sides[k].replace(name, _join(sides[k][name], value))
        passes.advance(passes.bytes_and_seconds[0] - before)
    return sides, tuple(notes)


def fit_streamed(
    a: Checkpoint,
    b: Checkpoint,
    symmetry: Symmetry,
    groups: Sequence[Group],
    parts: Iterable[Collection[str]],
    passes: Passes,
) -> tuple[Element, bool]:
    """The scales and matrices that bring the second network closest to the first, and whether that is closer.

    Args:
        a: The first network.
        b: The second network, moved next to the first.
        symmetry: With every size known, and gains of frozen normalization counted.
        groups: The groups that are fitted; see `fitted_groups`.
        parts: Tensors that are fitted together; see `fitted_parts`.
        passes: Counts what is read.
    """
    total, gained, chosen = symmetry.identity(), 0.0, {group.name for group in groups}
    for part in parts:
        before = passes.bytes_and_seconds[0]
        x, y = {}, {}
        for name in sorted(part):
            x[name], y[name] = _read_pair(a, b, symmetry, name)
        own = _restrict(symmetry, {name: tensor[0] for name, tensor in x.items()})
        before_fit = squared_distances(x, y)
        element, left = fit_continuous(own, [group for group in own.groups if group.name in chosen], x, y)
        gained += float(before_fit - left)
        for name, value in element.item(0).items():
            total = total.replace(name, _join(total[name], value))
        passes.advance(passes.bytes_and_seconds[0] - before)
    return total, gained > 0


def _read_part(checkpoint: Checkpoint, symmetry: Symmetry, part: Collection[str]) -> Params:
    """Read what `balance` needs of some tensors, and all running statistics."""
    params = {name: checkpoint.read(name) for name in sorted(set(symmetry.buffers) & symmetry.sites.keys())}
    return params | {name: _reduce(checkpoint, symmetry, name) for name in sorted(part)}


def _join(known: Value, found: Value) -> Value:
    """The value of a group by two parts, of which each found the identity where the other did not."""
    scale = None if known.scale is None or found.scale is None else known.scale * found.scale
    return replace(known, scale=scale, matrix=known.matrix if found.matrix is None else found.matrix)


def _restrict(symmetry: Symmetry, params: Params) -> Symmetry:
    """The symmetry on some parameters alone, of these shapes."""
    groups = (
        replace(group, placements=tuple(p for p in group.placements if p.parameter in params))
        for group in symmetry.groups
    )
    shapes = {name: tuple(tensor.shape) for name, tensor in params.items()}
    buffers = tuple(name for name in symmetry.buffers if name in params)
    kept = tuple(group for group in groups if group.placements)
    return Symmetry(kept, shapes, buffers=buffers, added=symmetry.added)


def _reduce(checkpoint: Checkpoint, symmetry: Symmetry, name: str) -> Tensor:
    """A tensor, or of one that is read in pieces another one with the same sums over the first axis.

    These are sums of squares, or where matrices act the inner products of all columns.
    """
    ranges, sums = row_ranges(symmetry, name), torch.zeros(())
    is_mixed = any(site.group.matrix == "linear" for site in symmetry.sites[name])
    for rows in ranges:
        piece = checkpoint.read(name, rows=rows, dtype=None if len(ranges) == 1 else torch.float32)
        require_finite({name: piece}, str(checkpoint.path), symmetry.structure)
        if len(ranges) == 1:
            return piece
        if is_mixed:
            flat = piece.flatten(1).double()
            sums = sums + flat.mT @ flat
        else:
            sums = sums + piece.square_().sum(0, keepdim=True, dtype=torch.float64)
    return root_of(sums).reshape(len(sums), *symmetry.shapes[name][1:]) if is_mixed else sums.sqrt()


def _read_pair(a: Checkpoint, b: Checkpoint, symmetry: Symmetry, name: str) -> tuple[Tensor, Tensor]:
    """Both tensors of a name as a batch of one pair.

    Of those that are read in pieces others with the same sums of squares and of products over the first axis, or where
    matrices act of the products of all columns, so that what acts on the other axes brings them as close.
    """
    dtype = work_dtype(a.stored[name].dtype, b.stored[name].dtype)
    ranges = row_ranges(symmetry, name)
    if len(ranges) == 1:
        x, y = (one.read(name, dtype=dtype).unsqueeze(0) for one in (a, b))
        return x, y
    if any(site.group.matrix == "linear" for site in symmetry.sites[name]):
        width = torch.Size(symmetry.shapes[name][1:]).numel()
        gram = torch.zeros(2 * width, 2 * width, dtype=torch.float64)
        for rows in ranges:
            both = torch.cat([one.read(name, rows=rows, dtype=dtype).flatten(1) for one in (a, b)], 1).double()
            gram += both.mT @ both
        roots = root_of(gram).reshape(2 * width, 2, *symmetry.shapes[name][1:])
        return roots[None, :, 0], roots[None, :, 1]
    squares, others, products = torch.stack(list(_sums(a, b, name, ranges, dtype))).sum(0)
    roots = squares.sqrt()
    along = torch.where(roots > 0, products / roots, 0.0)
    across = (others - along.square()).clamp_min(0).sqrt()
    return torch.stack([roots, torch.zeros_like(roots)])[None], torch.stack([along, across])[None]


def _sums(
    a: Checkpoint, b: Checkpoint, name: str, ranges: Sequence[tuple[int, int] | None], dtype: torch.dtype
) -> Iterator[Tensor]:
    """Sums over the first axis of the squares of both tensors and of their products, float64, piece by piece."""
    for rows in ranges:
        x, y = (one.read(name, rows=rows, dtype=dtype) for one in (a, b))
        products = (x * y).sum(0, dtype=torch.float64)
        yield torch.stack([x.square_().sum(0, dtype=torch.float64), y.square_().sum(0, dtype=torch.float64), products])

"""The equivariant head, which outputs a change of every parameter that transforms like the parameter itself."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor, nn

from regauge.core.params import Params
from regauge.weightspace.features import Read, spread
from regauge.weightspace.layers.dense import Dense
from regauge.weightspace.layers.reach import Known
from regauge.weightspace.layout.blocks import Block
from regauge.weightspace.layout.characters import Character, at_end, blank, is_odd, multiply
from regauge.weightspace.layout.compile import Layout
from regauge.weightspace.layout.waves import find_period
from regauge.weightspace.layout.writer import WrittenValues
from regauge.weightspace.shares import divide_by, read_weights, weigh

RANK = 4
"""The number of terms `b_i` times the mean of `c_j v_j` in the change of a tensor, along axes on which matrices act."""


@dataclass(frozen=True)
class Equivariant:
    """A head that maps features to one change for every parameter.

    Initially, the size of the change is `scale` times the size of the tensor.

    The change of a weight between two units is computed from the features of the pair of units. The change of a weight
    of one unit is computed from the features of the unit. Along an axis on which matrices act, let `v_i` be the vectors
    of weights that a matrix multiplies. The change of `v_i` is `a_i v_i`, plus a few terms of the form `b_i` times the
    mean over j of `c_j v_j`. The numbers `a`, `b` and `c` are computed from features. Therefore a matrix transforms the
    change in the same way as the weights. If signs act on the canonical weights, the change is computed from features
    that signs change, and from the weights themselves. For angles, the sine of twice the angle replaces the weights.
    Buffers are not changed.

    Attributes:
        scale: The initial size of the changes. The head learns a separate size for every tensor.
        changes: The number of parallel changes. If there are several changes, tensors have an axis for the changes
            after the model axis. Average the outputs of the changed networks, not their weights.

    References:
        Zhou et al. (2023), section 4, for learned scales; arXiv 2602.01083 for parallel changes.
    """

    scale: float = 0.01
    changes: int = 1

    def __post_init__(self) -> None:
        if not self.scale > 0 or self.changes < 1:
            raise ValueError(f"scale={self.scale} and changes={self.changes} must be positive")

    def reads(self, layouts: Sequence[Layout], *, has_pairs: bool) -> frozenset[str]:
        """Return the kinds of features that the head reads from the last layer."""
        pairs = {block.name for layout in layouts for block in layout.pair_blocks}
        is_read = any(written.block.name not in pairs for layout in layouts for written in layout.writer.written)
        odd = ("odd",) if any(layout.unit_signs[name] for layout in layouts for name in layout.units) else ()
        return frozenset({"units", "positions", "pairs", *odd, *(("network",) if is_read else ())})

    def build(
        self,
        layouts: Sequence[Layout],
        width: int,
        *,
        has_pairs: bool,
        generator: torch.Generator | None,
        known: Sequence[Known] = (),
    ) -> nn.Module:
        """Return the torch module of this head; see `weightspace.heads`."""
        return _Head(self, layouts, width, known or [layout.unit_signs for layout in layouts], has_pairs, generator)


class _Head(nn.Module):
    def __init__(
        self,
        settings: Equivariant,
        layouts: Sequence[Layout],
        width: int,
        known: Sequence[Known],
        has_pairs: bool,
        generator: torch.Generator | None,
    ) -> None:
        super().__init__()
        self.changes = nn.ModuleList(
            _Changes(settings, layout, width, own, has_pairs, generator)
            for layout, own in zip(layouts, known, strict=True)
        )

    def forward(self, read: Read) -> Params:
        """Return the change of every parameter of canonical networks."""
        changes: Params = self.changes[read.number](read)
        return changes


class _Changes(nn.Module):
    """The changes of the networks of one architecture."""

    def __init__(
        self,
        settings: Equivariant,
        layout: Layout,
        width: int,
        known: Known,
        has_pairs: bool,
        generator: torch.Generator | None,
    ) -> None:
        super().__init__()
        self.known = known
        self.count = settings.changes
        pairs = {block.name for block in layout.pair_blocks} if has_pairs else {}
        self.maps, self.mixers, self.odd_maps = nn.ModuleList(), nn.ModuleDict(), nn.ModuleDict()
        for k, written in enumerate(layout.writer.written):
            outputs = settings.changes * written.values
            self.maps.append(Dense(width, outputs, generator=generator))
            is_signed = is_odd(layout.character(written.block))
            is_made = written.block.name in pairs or _factors(written.block, layout, known) is not None
            has_odd = is_signed and is_made
            if has_odd and not written.matrices:
                self.odd_maps[f"{k}"] = Dense(width, outputs, is_biased=False, generator=generator)
            if written.group is not None and (has_odd or not is_signed):
                mixer = Dense(width, 2 * RANK * outputs, is_biased=not is_signed, generator=generator)
                self.mixers[f"{k}"] = mixer
        sizes = {name: units.sizes[-1] for name, units in layout.units.items()}
        self.counts = [
            math.prod(sizes[label.group] for label in written.block.labels if label.reads)
            for written in layout.writer.written
        ]
        self.scales = nn.Parameter(torch.full((len(layout.writer.parameters),), settings.scale))

    def forward(self, read: Read) -> Params:
        writer = read.layout.writer
        pieces = [
            _Change(written, read, count, self.known)
            for written, count in zip(writer.written, self.counts, strict=True)
        ]
        pools: dict[tuple[str, bool], list[Tensor]] = {}
        for k, piece in enumerate(pieces):
            group = piece.written.group
            if group is not None and f"{k}" in self.mixers:
                gathered = piece.gather(self.mixers[f"{k}"], self.count)
                pools.setdefault((group.group, group.is_inverse), []).append(gathered)
        made = []
        for k, (piece, dense) in enumerate(zip(pieces, self.maps, strict=True)):
            change = piece.change(dense, self.count)
            if f"{k}" in self.odd_maps:
                change = change + piece.turn(self.odd_maps[f"{k}"], self.count)
            group = piece.written.group
            if group is not None and f"{k}" in self.mixers:
                change = change + piece.scatter(torch.stack(pools[group.group, group.is_inverse]).mean(0))
            made.append(piece.share_out(change))
        result = {}
        for k, (name, tensor) in enumerate(writer.write(made).items()):
            scaled = tensor * (self.scales[k] * read.sizes[name])
            result[name] = (scaled.squeeze(1) if self.count == 1 else scaled).to(read.params[name].dtype)
        return result


class _Change:
    """The change of one part of a tensor (a piece), computed from the features of the part's units."""

    def __init__(self, written: WrittenValues, read: Read, count: int, known: Known) -> None:
        self.written = written
        self.grid, self.shares = read.layout.grid_of(written.block), read.features.shares
        weights = read_weights(written.block, read.layout, self.shares)
        self.weights = None if weights is None else weights * count
        features = read.features
        block = written.block
        if block.name in features.pairs:
            self.features = features.pairs[block.name]
        else:
            x = features.network.reshape(len(features.network), *([1] * len(block.sizes)), -1)
            for end in block.ends:
                x = x + spread(features.units[end.units], end, block)
            self.features = x.expand(-1, *block.sizes, -1) / (1 + len(block.ends)) ** 0.5
        self.values, self.odd = None, None
        is_signed = is_odd(read.layout.character(block))
        if is_signed:
            self.odd = _odd(block, read, known)
        if written.matrices or is_signed:
            values = written.read(read.params).to(features.network.dtype)
            period = find_period(block) if read.layout.waves is not None else None
            if period is None:
                values = values / read.sizes[written.piece.parameter]
            else:  # A half period adds `period[2]` to the value and 2 pi to the angle, so the sine stays the same.
                values = torch.sin(2 * math.pi / period[2] * values)
            self.values = divide_by(values, self.weights)
        self.out: Tensor | None = None

    def change(self, dense: nn.Module, changes: int) -> Tensor:
        """Return the change, `[models, *units, *matrices, changes, values]`."""
        change: Tensor = dense(self.features).unflatten(-1, (changes, -1))
        if self.values is None:
            return change
        for _ in self.written.matrices:
            change = change.unsqueeze(-3)
        return change * self.values.unsqueeze(-2)

    def share_out(self, change: Tensor) -> Tensor:
        """Multiply the change of a weight by the shares of the units that the weight reads. The copies of a split unit
        therefore divide the change among each other.
        """
        if self.weights is None:
            return change
        return change * self.weights.reshape(*self.weights.shape, *([1] * (change.ndim - self.weights.ndim)))

    def turn(self, dense: nn.Module, changes: int) -> Tensor:
        """Return the change computed from features that signs change, `[models, *units, changes, values]`."""
        change: Tensor = dense(self.odd).unflatten(-1, (changes, -1))
        return change

    def gather(self, mixer: nn.Module, changes: int) -> Tensor:
        """Return `RANK` weighted means of the values on which a matrix acts; features determine the weights."""
        assert self.values is not None
        mixed = (
            mixer(self.features if self.odd is None else self.odd).unflatten(-1, (2, RANK, changes, -1)).unsqueeze(-5)
        )
        into, self.out = mixed.unbind(-4)
        product = into * self.values.unsqueeze(-2).unsqueeze(-2)
        if self.shares:
            away = [1 + k for k in range(len(self.written.units)) if k not in self.written.bases]
            lead = 1 + len(self.written.units)
            weighed = weigh(product.flatten(lead), away, self.grid, self.shares).reshape(product.shape)
            product = weighed * math.prod(product.shape[axis] for axis in away)
        return self.written.pool(product)

    def scatter(self, pooled: Tensor) -> Tensor:
        """Apply the transpose of `gather` to the sum of its results over all tensors."""
        assert self.out is not None
        return (self.out * self.written.unpool(pooled)).sum(-3)


def _factors(block: Block, layout: Layout, known: Known) -> tuple[Character, ...] | None:
    """For each end (unit set) of a block, return the character of one feature of its units. The product of features
    with the returned characters changes under signs and scales like the block's values. Return None if no features have
    this property.
    """
    wanted = layout.character(block)
    choices = [(at_end(blank(wanted), end), *sorted(known.get(end.units, ()))) for end in block.ends]
    for chosen in product(*choices):
        if multiply(blank(wanted), zip(block.ends, chosen, strict=True)) == wanted:
            return chosen
    return None


def _odd(block: Block, read: Read, known: Known) -> Tensor | None:
    """Return features that signs and scales multiply like the values of a block, `[models, *units, width]`."""
    odd = read.features.odd
    if block.name in odd.pairs:
        return odd.pairs[block.name]
    chosen = _factors(block, read.layout, known)
    if chosen is None:
        return None
    found = torch.ones(()).to(read.features.network)
    for end, own in zip(block.ends, chosen, strict=True):
        x = odd.units[end.units][own] if is_odd(own) else read.features.units[end.units]
        found = found * spread(x, end, block)
    return found.expand(-1, *block.sizes, -1)

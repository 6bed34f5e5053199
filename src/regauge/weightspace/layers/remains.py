"""Invariant functions of features that signs and scales change: directions, products, and ratios of sizes."""

from collections.abc import Collection, Iterable, Iterator, Mapping

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from regauge.weightspace.features import spread
from regauge.weightspace.layers.dense import Invariants, OddNorm, ScaledNorm
from regauge.weightspace.layers.plan import LayerPlan
from regauge.weightspace.layers.reach import Reach
from regauge.weightspace.layout.blocks import Block
from regauge.weightspace.layout.characters import Character, at_end, has_scale, has_sign, scales_of
from regauge.weightspace.layout.compile import Layout

Relation = Mapping[Character, float]
"""One exponent for each character of features. No scale changes the product of the features' norms, each raised to its
exponent."""


class Remains(nn.Module):
    """A map from vectors that signs and scales change to vectors that signs and scales do not change.

    Division by the size of the vectors makes the result invariant under scales. Products of two linear maps make the
    result invariant under signs.
    """

    def __init__(self, characters: Iterable[Character], plan: LayerPlan, hidden: int) -> None:
        super().__init__()
        characters = [*characters]  # no set: exponents of signs and of scales may be equal in different groups
        if not all(map(has_scale, characters)):
            self.odd_norm = OddNorm(plan.width)
        if any(map(has_scale, characters)):
            self.scaled_norm = ScaledNorm(plan.width)
        if any(map(has_sign, characters)):
            self.products = Invariants(plan.width, hidden, plan.generator)
        if not all(map(has_sign, characters)):
            self.directions = plan.dense(plan.width, hidden, is_biased=False)

    def norm(self, u: Tensor, character: Character) -> Tensor:
        """Return vectors divided by their root mean squares."""
        made: Tensor = (self.scaled_norm if has_scale(character) else self.odd_norm)(u)
        return made

    def forward(self, normed: Tensor, character: Character) -> Tensor:
        made: Tensor = (self.products if has_sign(character) else self.directions)(normed)
        return made


class UnitSizes(nn.Module):
    """Invariants of a unit under scales: logarithms of products of powers of the norms of its features."""

    def __init__(self, reaches: Mapping[str, Reach], plan: LayerPlan, hidden: int) -> None:
        super().__init__()
        self.relations = {
            key: {name: find_relations(found) for name, found in one.made.items()} for key, one in reaches.items()
        }
        if any(found for one in self.relations.values() for found in one.values()):
            self.into = plan.dense(1, hidden, is_biased=False)

    def hear(self, name: str, turned: Mapping[Character, Tensor], layout: Layout) -> Iterator[Tensor]:
        """Yield messages to the units of a set. The result is computed from ratios of the norms of the units' features,
        which no scale changes.
        """
        for relation in self.relations[layout.key][name]:
            sizes = [(power, *log_size(turned[one])) for one, power in relation.items()]
            yield self.into(_squash(sizes))


class PairSizes(nn.Module):
    """Invariants of pairs under scales: logarithms of the norms of pair features, divided by norms of unit features."""

    def __init__(self, reaches: Mapping[str, Reach], plan: LayerPlan, hidden: int) -> None:
        super().__init__()
        self.ends = {
            layout.key: {block.name: _ends(layout, block, reaches[layout.key].known) for block in layout.pair_blocks}
            for layout in plan.layouts
        }
        if any(found is not None for one in self.ends.values() for found in one.values()):
            self.into = plan.dense(1, hidden, is_biased=False)

    def hear(
        self, block: Block, odd: Tensor, units: Mapping[str, Mapping[Character, Tensor]], layout: Layout
    ) -> Iterator[Tensor]:
        """Yield messages to the pairs of a block, computed from the invariant ratio of the norms of their features."""
        ends = self.ends[layout.key][block.name]
        if ends is None:
            return
        sizes = [(1.0, *log_size(odd))]
        for k, one in ends:
            end = block.ends[k]
            size, is_there = log_size(units[end.units][one])
            sizes.append((-1.0, spread(size, end, block), spread(is_there, end, block)))
        yield self.into(_squash(sizes))


def _ends(
    layout: Layout, block: Block, known: Mapping[str, Collection[Character]]
) -> list[tuple[int, Character]] | None:
    """Return the unit sets whose scales change the values of a block, each with the exponents of its scales. Return
    None if no unit features have the exponents of the block's scales.
    """
    character = layout.signs.get(block.name, ())
    if not has_scale(character):
        return None
    ends = [(k, at_end(character, end)) for k, end in enumerate(block.ends)]
    found = [(k, one) for k, one in ends if has_scale(one)]
    axes = [axis for k, _ in found for axis in block.ends[k].axes if any(scales_of((character[axis],)))]
    is_known = all(one in known[block.ends[k].units] for k, one in found)
    return found if is_known and len(axes) == len({*axes}) else None


def find_relations(characters: Iterable[Character]) -> list[Relation]:
    """Return a basis of the linear relations between the exponents with which scales multiply some values.

    A relation consists of powers p with `sum_k p_k e_k = 0` for the exponents e of every family. No scale changes the
    product of the features' norms, each raised to its power in p.
    """
    basis: list[Character] = []
    relations: list[Relation] = []
    for one in sorted(filter(has_scale, characters)):
        wanted = np.array(scales_of(one), float)
        rows = np.array([scales_of(other) for other in basis], float).reshape(len(basis), len(wanted))
        powers = np.linalg.lstsq(rows.T, wanted, rcond=None)[0] if basis else np.zeros(0)
        if basis and np.allclose(powers @ rows, wanted):
            relations.append({one: 1.0, **dict(zip(basis, (-powers).tolist(), strict=True))})
        else:
            basis.append(one)
    return relations


def log_size(u: Float[Tensor, "*units width"]) -> tuple[Float[Tensor, "*units 1"], Bool[Tensor, "*units 1"]]:
    """Return the log norm of vectors, and a mask of the nonzero vectors, for which the logarithm exists."""
    norm = torch.linalg.vector_norm(u, dim=-1, keepdim=True)
    return norm.clamp_min(torch.finfo(u.dtype).tiny).log(), norm > 0


def _squash(sizes: Iterable[tuple[float, Tensor, Tensor]]) -> Tensor:
    """Return asinh of a weighted sum of logarithms, or zero if one of the norms is zero."""
    total: Tensor | float = 0.0
    is_there: Tensor | bool = True
    for power, size, there in sizes:
        total, is_there = total + power * size, there & is_there
    return torch.asinh(torch.as_tensor(total)) * torch.as_tensor(is_there)

"""Transport plans between the units of two networks, and how they take a tensor of one to the widths of the other."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from regauge.alignment.widths.axes import Axis, uncovered
from regauge.core.act import Site

SignCharacter = tuple[int, ...]
"""Which families of signs act at a place, 0 or 1 each."""


@dataclass(frozen=True)
class UnitPlan:
    """Which units of two layers belong together.

    Attributes:
        mass: How much of each pair, float64 `[n_a, n_b]`; rows sum to 1/n_a and columns to 1/n_b.
        sign: The sign with which each pair is joined, int8 `[families, n_a, n_b]`.
    """

    mass: Tensor
    sign: Tensor

    def signed(self, exponents: SignCharacter) -> Tensor:
        """The masses, multiplied by the families of signs that act at a place."""
        result = self.mass
        for family, exponent in enumerate(exponents):
            if exponent:
                result = result * self.sign[family]
        return result


def map_tensor(
    tensor: Tensor,
    pairs: Sequence[tuple[Site, Site]],
    shape: Sequence[int],
    plans: Mapping[str, UnitPlan],
    readers: Collection[Axis],
) -> Tensor:
    """A tensor of the second network taken to the shape that it has in the first, axis by axis."""
    for axis in sorted({site.placement.axis for site, _ in pairs}):
        own = [pair for pair in pairs if pair[0].placement.axis == axis]
        there = uncovered([b for _, b in own], axis, tensor.shape[axis]).to(tensor.device)
        here = uncovered([a for a, _ in own], axis, shape[axis]).to(tensor.device)
        result = tensor.new_empty([shape[k] if k == axis else n for k, n in enumerate(tensor.shape)])
        result.index_copy_(axis, here, tensor.index_select(axis, there))
        for site_a, site_b in own:
            plan = plans[site_a.group.name]
            is_read = (site_a.placement.parameter, axis) in readers
            matrix = plan.signed(sign_character(site_a)) / plan.mass.sum(0 if is_read else 1, keepdim=True)
            last = tensor.index_select(axis, site_b.positions.to(tensor.device)).movedim(axis, 0)
            units = matrix.to(tensor) @ last.reshape(site_b.group.size, -1)
            moved = units.reshape(site_a.positions.numel(), *last.shape[1:]).movedim(0, axis)
            result.index_copy_(axis, site_a.positions.to(tensor.device), moved)
        tensor = result
    return tensor


def sign_character(site: Site) -> SignCharacter:
    """Which families of signs act at a site."""
    return tuple(exponent % 2 for exponent in site.placement.sign)

"""Transport plans (soft assignments) between units of two networks, and conversion of tensors by transport plans."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regauge.core.act import Site
from regauge.core.symmetry import Symmetry

Axis = tuple[str, int]
"""The name of a parameter, and the number of one of its axes."""


SignCharacter = tuple[int, ...]
"""The exponents (0 or 1) of the sign families at a placement."""


@dataclass(frozen=True)
class UnitPlan:
    """A transport plan between the units of a layer in two networks.

    Attributes:
        mass: The mass of each pair of units, float64 `[n_a, n_b]`. Each row of the masses sums to 1/n_a, and each
            column to 1/n_b.
        sign: For each pair of units, the sign by which one unit must be multiplied to match the other, int8 `[families,
            n_a, n_b]`.
    """

    mass: Tensor
    sign: Tensor

    def signed(self, exponents: SignCharacter) -> Tensor:
        """Return the masses of pairs of units, multiplied by the signs of the families that act at a placement."""
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
    """Convert a tensor of the second network to the shape of the first network. Along each axis, the tensor is averaged
    or distributed over corresponding units.
    """
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
    """Return, for each family of signs, whether its signs multiply the entries along an axis on which a group acts (0
    or 1).
    """
    return tuple(exponent % 2 for exponent in site.placement.sign)


def uncovered(sites: Sequence[Site], axis: int, length: int) -> Tensor:
    """Return the indices of an axis on which no group acts."""
    is_free = torch.ones(length, dtype=torch.bool)
    for site in sites:
        if site.placement.axis == axis:
            is_free[site.positions] = False
    return is_free.nonzero().flatten()


def default_readers(symmetry: Symmetry) -> frozenset[Axis]:
    """Return the axes along which layers sum over units, as discovery recorded them.

    If a symmetry does not record the axes, for example because it was made of `Group` objects, the axes of torch's
    layers are returned. Layers of torch sum over axis 1 of weights (out, in, ...) and over axis 0 of transposed
    convolutions (in, out, ...). No layer sums over an axis of a vector or an embedding. The frozen axes of the symmetry
    show which parameters are transposed convolutions or embeddings.
    """
    if symmetry.readers:
        return frozenset(symmetry.readers)
    operators = {frozen.parameter: set[str]() for frozen in symmetry.frozen}
    for frozen in symmetry.frozen:
        operators[frozen.parameter].add(frozen.reason.split(":")[0])
    readers = set()
    for group in symmetry.groups:
        for p in group.placements:
            known = operators.get(p.parameter, set())
            is_transposed = any(operator.startswith("conv_transpose") for operator in known)
            if "embedding" not in known and p.axis == (0 if is_transposed else 1):
                readers.add((p.parameter, p.axis))
    return frozenset((name, axis) for name, axis in readers if len(symmetry.shapes[name]) > 1)

"""Pairs of networks where they are compared: at the points of smallest norm on their orbits under positive scales."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Float64
from torch import Tensor

from regauge.alignment.engine.climbs import Climbs
from regauge.alignment.engine.paired_networks import at, dots
from regauge.core import act as _act
from regauge.core.element import Element, Value
from regauge.core.families import Tensors, compared
from regauge.core.scales import balance
from regauge.core.symmetry import Symmetry

Scales = Literal["balance", "keep"]
"""Whether networks are compared where their positive scales are balanced, or as they are."""


@dataclass(frozen=True)
class Frame:
    """The compared tensors of pairs of networks, balanced or as they are, and the way back.

    The first network stays where it is, so the second one takes over its scales. Straight lines stay what they are,
    because scales act linearly: `(1 - t) a + t act(element, b)` is the same network, up to scales, as the point of the
    line between the balanced ones.

    Attributes:
        symmetry: The symmetry of all networks, with every size known.
        a: The first networks, `[pair, ...]`.
        b: The second networks.
        given: The second networks as they are.
        scales: What balances the first and the second networks; None where scales are kept.
    """

    symmetry: Symmetry
    a: Tensors
    b: Tensors
    given: Tensors
    scales: tuple[Element, Element] | None

    @classmethod
    def of(
        cls, params_a: Mapping[str, Tensor], params_b: Mapping[str, Tensor], symmetry: Symmetry, scales: Scales
    ) -> "Frame":
        """Compare networks `[pair, ...]`, balanced by scales that keep their buffers."""
        a, b = compared([params_a, params_b], symmetry)
        if scales == "keep" or not any(group.scales for group in symmetry.groups):
            return cls(symmetry, a, b, b, None)
        left, right = (balance(params, symmetry, buffers="keep") for params in (params_a, params_b))
        return cls(symmetry, rescale(symmetry, left, a), rescale(symmetry, right, b), b, (left, right))

    def original(self) -> Tensors:
        """The second networks with the scales of the first, which is where the identity leads."""
        return self.b if self.scales is None else rescale(self.symmetry, self.scales[0], self.given)

    def identity_objective(self) -> Float64[Tensor, " pair"]:
        """`<a, x> - (|x|^2 - |b|^2) / 2` at x = `original()`: the objective of the identity."""
        if self.scales is None:
            return self.objective(self.b)
        total = torch.zeros(self.scales[0].batch, dtype=torch.float64)
        for name, tensor in self.given.items():
            x = rescale(self.symmetry, self.scales[0], {name: tensor})[name]
            total += dots(self.a[name], x)
            if any(any((*site.placement.scale, *site.placement.shift)) for site in self.symmetry.sites[name]):
                total -= (dots(x, x) - dots(self.b[name], self.b[name])) / 2
        return total

    def objective(self, b: Tensors) -> Float64[Tensor, " pair"]:
        """The inner products of the first networks and others."""
        return torch.stack([dots(self.a[name], b[name]) for name in self.a]).sum(0)

    def rows(self, rows: Tensor) -> "Frame":
        """The frame of some pairs."""
        a, b, given = ({n: at(t, rows) for n, t in tensors.items()} for tensors in (self.a, self.b, self.given))
        scales = None if self.scales is None else (self.scales[0].rows(rows), self.scales[1].rows(rows))
        return Frame(self.symmetry, a, b, given, scales)

    def lead_back(self, climbs: Climbs, *, is_from_original: bool = False) -> Climbs:
        """Climbs between the networks as they are, from climbs that began at `b` or at `original()`."""
        if self.scales is None:
            return climbs
        left, right = self.scales
        element = self.symmetry.compose(climbs.element, left if is_from_original else right)
        return replace(climbs, element=self.symmetry.compose(self.symmetry.inverse(left), element), moved={})


def rescale(symmetry: Symmetry, scales: Element, tensors: Tensors) -> dict[str, Tensor]:
    """Tensors multiplied by the positive factors of an element."""
    factors = Element({name: Value(scale=value.scale) for name, value in scales.items()}, scales.batch)
    sites = {name: symmetry.sites[name] for name in tensors}
    return _act.act(symmetry.groups, sites, factors, tensors, {name: len(symmetry.shapes[name]) for name in tensors})

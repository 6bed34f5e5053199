"""Two networks at the points of smallest norm on their orbits under positive scales, where they are matched."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from regauge.core import act as _act
from regauge.core.element import Element
from regauge.core.families import Tensors
from regauge.core.scales import balance
from regauge.core.symmetry import Symmetry

Scales = Literal["balance", "keep"]
"""Whether networks are compared where their positive scales are balanced, or as they are."""


@dataclass(frozen=True)
class Balanced:
    """What counts of two networks, balanced, and the way back.

    An element g that was found there stands for `compose(back, compose(g, scales))` of the networks as they are.
    The first network stays where it is, so the second one takes over its scales. Straight lines stay what they
    are, because scales act linearly: `(1 - t) a + t act(element, b)` is the same network, up to scales, as the
    point of the line between the balanced ones.

    Attributes:
        a: The first network, balanced.
        b: The second network, balanced.
        scales: What balances the second network.
        back: The inverse of what balances the first one.
        original: The second network moved by what balances the first one: where the identity leads.
        original_scales: What balances the first network.
    """

    a: Tensors
    b: Tensors
    scales: Element
    back: Element
    original: Tensors
    original_scales: Element

    def identity_objective(self, symmetry: Symmetry) -> Tensor:
        """`<a, x> - (|x|^2 - |b|^2) / 2` at x = `original`: what the identity is worth between a and b, float64."""
        lead = len(self.scales.batch)
        total = torch.zeros(self.scales.batch, dtype=torch.float64)
        for name, x in self.original.items():
            total += _dots(self.a[name], x, lead)
            if any(any((*site.placement.scale, *site.placement.shift)) for site in symmetry.sites[name]):
                total -= (_dots(x, x, lead) - _dots(self.b[name], self.b[name], lead)) / 2
        return total


def balanced(
    params_a: Mapping[str, Tensor],
    params_b: Mapping[str, Tensor],
    a: Tensors,
    b: Tensors,
    symmetry: Symmetry,
    *,
    scales: Scales = "balance",
) -> Balanced:
    """Balance two networks by scales that keep their buffers.

    Args:
        params_a: The first network, or a population with a leading model axis.
        params_b: The second network or population.
        a: What counts of the first.
        b: What counts of the second.
        symmetry: Of both.
        scales: "keep" leaves both networks as they are.
    """
    if scales == "keep":
        lead = next((t.ndim - len(symmetry.shapes[n]) for n, t in b.items()), 0)
        blank = symmetry.identity(next(iter(b.values())).shape[:lead] if lead else ())
        return Balanced(a, b, scales=blank, back=blank, original=b, original_scales=blank)
    left = balance(params_a, symmetry, buffers="keep")
    right = balance(params_b, symmetry, buffers="keep")
    if not any(group.scales for group in symmetry.groups):
        return Balanced(a, b, scales=right, back=left, original=b, original_scales=left)
    return Balanced(
        a=_moved(symmetry, left, a),
        b=_moved(symmetry, right, b),
        scales=right,
        back=symmetry.inverse(left),
        original=_moved(symmetry, left, b),
        original_scales=left,
    )


def _moved(symmetry: Symmetry, scales: Element, tensors: Tensors) -> dict[str, Tensor]:
    sites = {name: symmetry.sites[name] for name in tensors}
    return _act.act(symmetry.groups, sites, scales, tensors, {name: len(symmetry.shapes[name]) for name in tensors})


def _dots(x: Tensor, y: Tensor, lead: int) -> Tensor:
    """Inner products for each network: rows in their own precision, the sum over rows in float64."""
    rows = x * y if x.ndim <= lead + 1 else torch.linalg.vecdot(x.flatten(lead + 1), y.flatten(lead + 1))
    return (rows.flatten(lead) if x.ndim > lead else rows.unsqueeze(-1)).sum(-1, dtype=torch.float64).cpu()


def require_scales(scales: str) -> None:
    """Refuse what is no treatment of scales.

    Raises:
        ValueError: It is neither "balance" nor "keep".
    """
    if scales not in get_args(Scales):
        raise ValueError(f"scales is {scales!r}; choose 'balance' or 'keep'")

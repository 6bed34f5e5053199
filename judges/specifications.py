"""Specifications of permutations that others write by hand: which axes each one reorders, and what matching reaches."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from judge import Failed
from torch import Tensor, nn

import regauge as rg

Axes = Iterable[tuple[str, int]]
Params = Mapping[str, Tensor]


@dataclass(frozen=True)
class Specification:
    """Permutations by name, each with the axes of tensors that it reorders."""

    axes: Mapping[str, tuple[tuple[str, int], ...]]

    @cached_property
    def names(self) -> list[str]:
        """The tensors with an axis that is reordered."""
        return list(dict.fromkeys(name for axes in self.axes.values() for name, _ in axes))

    def symmetry(self, params: Params) -> rg.Symmetry:
        """The symmetry that it says, by hand."""
        own: dict[str, list[str | None]] = {name: [None] * params[name].ndim for name in self.names if name in params}
        for perm, axes in self.axes.items():
            for name, axis in axes:
                own[name][axis] = perm
        return rg.Symmetry.from_axes(
            {name: tuple(perms) for name, perms in own.items()}, kinds=dict.fromkeys(self.axes, "permutation")
        )

    def orders(self, params: Params, seed: int) -> dict[str, Tensor]:
        """A random order for each permutation."""
        generator = torch.Generator().manual_seed(seed)
        sizes = {perm: params[axes[0][0]].shape[axes[0][1]] for perm, axes in self.axes.items()}
        return {perm: torch.randperm(n, generator=generator) for perm, n in sizes.items()}

    def permuted(self, params: Params, orders: Params) -> dict[str, Tensor]:
        """A network whose axes are reordered."""
        moved = dict(params)
        for perm, axes in self.axes.items():
            for name, axis in axes:
                moved[name] = moved[name].index_select(axis, orders[perm].long())
        return moved

    def inner(self, networks: list[Params]) -> float:
        """The sum of inner products of all pairs of networks over the tensors that have a permutation."""
        names = [name for name in self.names if name in networks[0] and networks[0][name].is_floating_point()]
        return float(
            sum(
                (a[name].double() * b[name].double()).sum()
                for k, a in enumerate(networks)
                for b in networks[:k]
                for name in names
            )
        )


LeftOut = Callable[[str], bool]
"""Whether a specification says nothing of a tensor that units have entries in, such as a statistic."""


def compare_axes(
    model: nn.Module, inputs: Tensor, spec: Specification, left_out: LeftOut = lambda name: False
) -> str | None:
    """Raise `Failed` unless the permutations of a specification are groups of regauge, which may have more."""
    others, notes = unlike(model, inputs, spec, left_out)
    for perm, (axes, near) in others.items():
        change = effect(model, inputs, axes)
        raise Failed(
            f"{perm} moves {short(axes - near)} and not {short(near - axes)}, unlike regauge; a random order of {perm} "
            f"changes the outputs by {change:.2g} of their largest entry"
        )
    return "; ".join(notes) or None


def unlike(
    model: nn.Module, inputs: Tensor, spec: Specification, left_out: LeftOut
) -> tuple[dict[str, tuple[frozenset[tuple[str, int]], frozenset[tuple[str, int]]]], list[str]]:
    """The permutations that are no groups of regauge, each with its axes and those of the nearest group; and notes."""
    known = model.state_dict()
    for perm, axes in spec.axes.items():
        if absent := [name for name, _ in axes if name not in known]:
            raise Failed(f"the model has no {absent[0]}, which {perm} moves")
    symmetry = rg.discover(model.eval(), (inputs,))
    found, matrices = (
        [
            frozenset((p.parameter, p.axis) for p in group.placements if not left_out(p.parameter))
            for group in symmetry.groups
            if is_of(group)
        ]
        for is_of in (lambda group: group.has_order, lambda group: group.matrix != "none")
    )
    notes: dict[str, None] = {}
    others = {}
    for perm, listed in spec.axes.items():
        own = frozenset(listed)
        if own in matrices:
            notes["matrices act where the specification has permutations"] = None
        elif own not in found:
            others[perm] = own, max([*found, *matrices], key=lambda one: len(one & own), default=frozenset())
    if len(found) > len(spec.axes):
        notes["regauge also has groups that the specification leaves out"] = None
    return others, list(notes)


def effect(model: nn.Module, inputs: Tensor, axes: Axes) -> float:
    """The change of the outputs by a random order of some axes, in float64, relative to their largest entry."""
    model = model.double()
    inputs = torch.randn(inputs.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    params = {
        name: t + 0.1 * torch.randn(t.shape, generator=torch.Generator().manual_seed(k), dtype=t.dtype)
        if t.is_floating_point() and "running" not in name
        else t
        for k, (name, t) in enumerate(model.state_dict().items())
    }
    moved = dict(params)
    for name, axis in axes:
        order = torch.randperm(params[name].shape[axis], generator=torch.Generator().manual_seed(2))
        moved[name] = moved[name].index_select(axis, order)
    with torch.no_grad():
        first, second = (torch.func.functional_call(model, one, (inputs,)) for one in (params, moved))
    return float((first - second).abs().max() / first.abs().max())


def judged(first: float, theirs: float, ours: float, best: float | None) -> str | None:
    """Raise `Failed` unless regauge reaches the inner products that the peer reaches, and those of a permuted copy."""
    text = f"inner products: {first:.6g} as given, {theirs:.6g} by the peer, {ours:.6g} by regauge"
    if not ours - first >= 0.999 * (theirs - first):
        raise Failed(text)
    if best is not None and not ours >= (1 - 1e-6) * best:
        raise Failed(f"{text}; the permutations would give {best:.6g}")
    return text if abs(ours - theirs) > 1e-3 * abs(theirs - first) else None


def build(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """A model with the values that the peer draws."""
    torch.manual_seed(seed)
    return make()


def random_params(make: Callable[[], nn.Module], seed: int) -> dict[str, Tensor]:
    """Values as the peer draws them, with noise where it starts with constants."""
    params = {name: tensor.detach().clone() for name, tensor in build(make, seed).state_dict().items()}
    generator = torch.Generator().manual_seed(seed)
    return {
        name: t + 0.1 * torch.randn(t.shape, generator=generator).abs() if t.is_floating_point() and t.ndim == 1 else t
        for name, t in params.items()
    }


def short(axes: Axes) -> str:
    """Some axes in words."""
    listed = sorted(axes)
    more = f" and {len(listed) - 3} more" if len(listed) > 3 else ""
    return ", ".join(f"axis {axis} of {name}" for name, axis in listed[:3]) + more if listed else "nothing"

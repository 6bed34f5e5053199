"""Sequences of group elements that transform a network into an equivalent network (another gauge). Between two
elements, gains may be set to one.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from regauge.core import act as _act
from regauge.core.arguments import check_arguments
from regauge.core.behind_gains import plus
from regauge.core.element import Element
from regauge.core.groups import Group
from regauge.core.outputs import Outputs
from regauge.core.params import Params, round_alike, round_to, to_work, work_dtype
from regauge.core.symmetry import Symmetry
from regauge.discovery.discover import discover_with_ones, trace_and_record
from regauge.discovery.registry import leaves_as_operators
from regauge.discovery.rewrites.gains import gains, unit_gains


@dataclass(frozen=True)
class Move:
    """An element of a symmetry, and the gains that become one when it is applied.

    Applying the element sets the gains to one up to rounding. Afterwards, the gains are set to exactly one.
    """

    symmetry: Symmetry
    element: Element
    ones: tuple[str, ...] = ()

    def moved_groups(self) -> tuple[Group, ...]:
        """Return the groups in which the element is not the identity."""
        blank = self.symmetry.identity()

        def is_moved(group: Group) -> bool:
            still = dict(blank[group.name].items())
            return any(not torch.equal(tensor, still[name]) for name, tensor in self.element[group.name].items())

        return tuple(group for group in self.symmetry.groups if is_moved(group))

    def tensor(self, name: str, tensor: Tensor) -> Tensor:
        """Return a transformed tensor of a network, or a transformed chunk along an axis on which no group acts."""
        if name in self.ones:
            return plus(torch.ones_like(tensor), self.symmetry.added.get(name, 0.0), -1)
        sites = self.symmetry.sites.get(name)
        if sites is None:
            return tensor
        return _act.act(self.symmetry.groups, {name: sites}, self.element, {name: tensor}, {name: tensor.ndim})[name]

    def __call__(self, params: Mapping[str, Tensor]) -> Params:
        """Return the transformed network."""
        moved = self.symmetry.act(self.element, params)
        return {**moved, **{name: self.tensor(name, moved[name]) for name in self.ones if name in moved}}


def apply_moves(moves: Sequence[Move], params: Mapping[str, Tensor]) -> Params:
    """Apply several transformations to a network one after the other, and round the result once to the network's
    dtypes.
    """
    wide = to_work(params)
    for move in moves:
        wide = move(wide)
    return round_alike({name: wide[name] for name in params}, params)


def move_tensor(moves: Sequence[Move], name: str, tensor: Tensor) -> Tensor:
    """Apply moves to one tensor, and round the result to its dtype once."""
    if not tensor.is_floating_point():
        return tensor
    wide = tensor.to(work_dtype(tensor.dtype))
    for move in moves:
        wide = move.tensor(name, wide)
    return round_to(wide, tensor.dtype, name)


def take_out_translations(
    symmetry: Symmetry, params: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype]
) -> Move | None:
    """Return the move that sets the coordinates of translations to zero and does not change gains.

    Translations that are exact only with the stored running statistics are not changed. Translations of 16-bit tensors
    are not changed either: after rounding to 16 bits, the network would compute another function. The result is None if
    the symmetry has no other translations.
    """
    symmetry = symmetry.on_data
    families = [
        family
        for family in symmetry.translations
        if all(dtypes.get(name, params[name].dtype).itemsize > 2 for name in family.parameters)
    ]
    if not families:
        return None
    coordinates = symmetry.split(params)[1]
    return Move(symmetry, symmetry.identity().translated({one.name: -coordinates[one.name] for one in families}))


@dataclass(frozen=True)
class Uncovered:
    """Rotations that become possible after gains are set to one.

    Attributes:
        before: The move that sets gains to one; None if no gain prevents rotations.
        symmetry: The groups that rotate, and the groups (such as heads) within which the rotating groups are repeated.
        reasons: Gains that are not changed, each with the reason.
    """

    before: Move | None
    symmetry: Symmetry
    reasons: Mapping[str, str]


@check_arguments
def uncover_rotations(
    read: Callable[[str], Tensor],
    symmetry: Symmetry,
    module: nn.Module,
    inputs: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    outputs: Outputs = None,
) -> Uncovered:
    """Find the rotations that are possible after gains are set to one, by scales and signs of the symmetry.

    `uncover_rotations` reads only gains. Therefore the module may be on the meta device, and the network may be on the
    disk.

    Args:
        read: A function that returns a parameter by name.
        symmetry: The symmetry that `discover` finds for the module without the argument `ones`.
        module: The module of the network.
        inputs: Positional inputs for tracing.
        kwargs: Keyword inputs.
        outputs: The outputs that must be preserved.

    References:
        Ashkboos et al. (2024), SliceGPT, section 3.1.
    """
    with leaves_as_operators(module):
        program, _ = trace_and_record(module, inputs, dict(kwargs), outputs)
        found = gains(program)
    names = [name for name in found if name in symmetry.shapes]
    element, ones, reasons = unit_gains({name: read(name) for name in names}, symmetry, names)
    plain = rotating(symmetry)
    if not ones:
        return Uncovered(None, plain, reasons)
    every = sorted({*ones, *(name for names in symmetry.tied for name in names if {*names} & {*ones})})
    held = symmetry.structure
    turned = rotating(discover_with_ones(program, module, inputs, kwargs, outputs=outputs, ones=every, structure=held))
    places = {(p.parameter, p.axis) for group in plain.groups if group.matrix != "none" for p in group.placements}
    new = {
        (place.parameter, place.axis) for group in turned.groups if group.matrix != "none" for place in group.placements
    } - places
    needed: set[str] = set()
    for group in symmetry.groups:
        own = {(p.parameter, p.axis) for p in group.placements}
        if own & new:
            needed |= {p.parameter for p in group.placements if p.parameter in every}
    if not needed:
        return Uncovered(None, plain, reasons)
    scaled = [g for g in symmetry.groups if needed & {place.parameter for place in g.placements}]
    only = _restricted(symmetry, scaled)
    value = only.identity()
    for group in scaled:
        value = value.replace(group.name, element[group.name])
    gained = tuple(sorted(needed))
    return Uncovered(Move(only, value, gained), replace(turned, ones=gained), reasons)


@check_arguments
def rotating(symmetry: Symmetry) -> Symmetry:
    """Return the groups of a symmetry that rotate; the groups within which they are repeated are included, but
    fixed.
    """
    return _restricted(symmetry, [group for group in symmetry.groups if group.matrix != "none"])


def _restricted(symmetry: Symmetry, kept: Collection[Group]) -> Symmetry:
    """Return some groups of a symmetry; the groups within which they are repeated are included, but fixed."""
    bases = {name for group in kept for name in group.within}

    def still(group: Group) -> Group:
        fixed = group.without("scale", "sign", "parity", "shift").unordered
        bare = tuple(replace(p, scale=(), sign=(), parity=(), shift=()) for p in fixed.placements)
        return replace(fixed, placements=bare, scales=0, signs=0, shifts=0)

    groups = (g if g in kept else still(g) for g in symmetry.groups if g in kept or g.name in bases)
    return replace(symmetry, groups=tuple(groups))

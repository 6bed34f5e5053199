"""A test whether groups can act on parameters, by applying a random element to random tensors of the same shapes.

Parameters are tested one at a time. The axes of a large parameter are tested separately, and axes that a test does not
need get size one. The test does not use the parameters themselves, so the model may be on the meta device. If groups
act in the same way on several parameters, such as layers of one shape, only one of these parameters is tested.
"""

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from regauge.core.act import overlapping
from regauge.core.groups import Group, Placement
from regauge.core.probe import relative_change
from regauge.core.symmetry import Symmetry

LARGE_PARAMETER = 1 << 20
"""The number of entries above which a parameter is tested axis by axis."""
LARGEST_MATRIX = 1024
"""The largest size of a random matrix that is sampled. Sampling larger matrices would take most of the time.

The identity is used instead of larger matrices.
"""
RETURN_TOLERANCE = 1e-8
"""The largest accepted relative change of a float64 tensor after an element, and then its inverse, have acted on it."""


def cannot_act(symmetry: Symmetry) -> dict[str, str]:
    """Return the groups that cannot act on the parameters in their placements, each with the reason."""
    failed: dict[str, str] = {}
    good: set[Hashable] = set()
    for part in _parts(symmetry):
        key = part.geometry()
        if key not in good:
            found = part.failures()
            failed = {**found, **failed}
            good |= set() if found else {key}
    return failed


@dataclass(frozen=True)
class _Part:
    """One parameter, or some of its axes, and the groups that act on them.

    If a group is repeated within the units of other groups, such as heads, the outer groups are listed first.

    Attributes:
        groups: The groups, restricted to their placements on the parameter.
        whole: The same groups with their placements on all parameters. The multiplication of elements needs all
            placements.
    """

    parameter: str
    shape: tuple[int, ...]
    groups: tuple[Group, ...]
    whole: tuple[Group, ...]

    def geometry(self) -> Hashable:
        """Return a key that describes the groups, their placements and the parameter's shape without any names.

        If the keys of two parameters are equal, the groups act on the two parameters in the same way.
        """
        numbers = {group.name: str(k) for k, group in enumerate(self.groups)}

        def key(here: Group, whole: Group) -> Hashable:
            places = tuple(replace(p, parameter="", scale=(), sign=(), parity=(), shift=()) for p in here.placements)
            within = tuple(numbers[base] for base in here.within)
            bare = replace(here, name="", within=within, placements=(), scales=0, signs=0, shifts=0)
            signs = tuple((p.sign, p.shift) for p in whole.placements if any(p.shift)) if whole.shifts else ()
            return bare, places, _families(here), signs

        return self.shape, tuple(map(key, self.groups, self.whole))

    def failures(self) -> dict[str, str]:
        """Return the groups for which the test fails, each with the reason.

        Each group is tested together with the earlier groups that passed the test.
        """
        failed: dict[str, str] = {}
        if self._try(range(len(self.groups))) is None:
            return failed
        tried: list[int] = []
        for k, group in enumerate(self.groups):
            reason = None if failed.keys().isdisjoint(group.within) else "the group around it cannot act"
            reason = reason or self._try([*tried, k])
            if reason is None:
                tried.append(k)
            else:
                failed[group.name] = reason
        return failed

    def _try(self, chosen: Sequence[int]) -> str | None:
        """Return the reason why groups cannot act together on a random tensor, or None if they can."""
        shapes, generator = {self.parameter: self.shape}, torch.Generator().manual_seed(0)
        groups = tuple(self.groups[k] for k in chosen)
        symmetry, algebra = Symmetry(groups, shapes), Symmetry(tuple(self.whole[k] for k in chosen), {})
        before = torch.randn(self.shape, generator=generator, dtype=torch.float64)
        try:
            pair = next(overlapping(groups, shapes), None)
            if pair is not None:
                return f"{pair[0].name!r} and {pair[1].name!r} both move the same entries of {self.parameter!r}"
            element, blank = algebra.random(generator), algebra.identity()
            for group in groups:
                if group.matrix != "none" and group.size > LARGEST_MATRIX:
                    element = element.replace(group.name, blank[group.name])
            moved = symmetry.act(element, {self.parameter: before})
            after = symmetry.act(algebra.inverse(element), moved)[self.parameter]
        except (ValueError, IndexError, RuntimeError) as error:
            return str(error).splitlines()[0]
        is_same = relative_change([before], [after]) <= RETURN_TOLERANCE
        return None if is_same else f"an element and its inverse change {self.parameter!r}"


def _families(group: Group) -> Hashable:
    """Return a key that describes how the families of a group change one parameter.

    Families without effect on the parameter are left out. If the group has no shifts, the order of its families has no
    influence, and the exponents are sorted. For example, a residual stream has one family for each gain that multiplies
    it, but most parameters depend on only one family.
    """
    places = group.placements
    if group.shifts:
        return tuple((p.scale, p.sign, p.parity, p.shift) for p in places)
    columns = [zip(*(p.scale for p in places), strict=True), zip(*(p.sign for p in places), strict=True)]
    return tuple(tuple(sorted(column for column in several if any(column))) for several in columns)


def _parts(symmetry: Symmetry) -> Iterator[_Part]:
    by_name = {group.name: group for group in symmetry.groups}
    order = {name: k for k, name in enumerate(by_name)}
    places: dict[str, dict[str, list[Placement]]] = {}
    for group in symmetry.groups:
        for placement in group.placements:
            places.setdefault(placement.parameter, {}).setdefault(group.name, []).append(placement)

    def bases_of(names: set[str]) -> set[str]:
        found = {base for name in names for base in by_name[name].within}
        return found | bases_of(found) if found else found

    def part(parameter: str, shape: tuple[int, ...], local: Mapping[str, Sequence[Placement]]) -> _Part:
        names = set(local) | bases_of(set(local))
        ranked = sorted(names, key=lambda name: (len(bases_of({name})), order[name]))
        whole = tuple(by_name[name] for name in ranked)
        here = tuple(replace(group, placements=tuple(local.get(group.name, ()))) for group in whole)
        return _Part(parameter, shape, here, whole)

    for parameter, local in places.items():
        shape = symmetry.shapes[parameter]
        if math.prod(shape) <= LARGE_PARAMETER:
            yield part(parameter, shape, local)
            continue
        for axis in sorted({p.axis for found in local.values() for p in found}):
            along = {name: [p for p in found if p.axis == axis] for name, found in local.items()}
            along = {name: found for name, found in along.items() if found}
            kept = along | {name: local[name] for name in bases_of(set(along)) if name in local}
            used = {p.axis for found in kept.values() for p in found}
            yield part(parameter, tuple(n if k in used else 1 for k, n in enumerate(shape)), kept)

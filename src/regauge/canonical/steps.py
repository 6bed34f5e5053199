"""The order in which a symmetry's freedom is used up, and by which values; it depends on the symmetry alone.

Each step fixes one kind of freedom of one group by values that nothing still free can change. Where a ReLU unit is
scaled such that its incoming weights have unit norm, the scales of the units that it reads must be settled before,
so that layers come in the order in which the signal passes them; a residual stream is settled by those of its
writers that no other scale touches any more. Steps that come later leave what was fixed as it is, so that one pass
suffices and the result is exact.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from regauge.canonical.span import Span
from regauge.core.act import Site
from regauge.core.groups import Group
from regauge.core.symmetry import Symmetry
from regauge.core.units import copies_of

Place = tuple[str, Site]
"""A parameter, and where a group acts on it."""


@dataclass(frozen=True)
class ScaleStep:
    """Each unit is scaled such that its values at all places together have norm one.

    Attributes:
        group: Its name.
        direction: By what power of the factor each family is multiplied.
        places: The values that get norm one.
        spare: The values that get norm one where all at `places` are zero: biases.
    """

    group: str
    direction: tuple[float, ...]
    places: tuple[Place, ...]
    spare: tuple[Place, ...]


@dataclass(frozen=True)
class LinearStep:
    """An invertible matrix makes the Gram matrices of both sides equal and diagonal, or that of one side the identity.

    Attributes:
        group: Its name.
        forward: Places that the matrix multiplies.
        inverse: Places that its inverse transpose multiplies.
    """

    group: str
    forward: tuple[Place, ...]
    inverse: tuple[Place, ...]


@dataclass(frozen=True)
class RotationStep:
    """A rotation makes the Gram matrix of all places diagonal, largest entry first."""

    group: str
    places: tuple[Place, ...]


@dataclass(frozen=True)
class ShiftStep:
    """Half periods bring the mean of the values at a place into (-amount / 2, amount / 2]."""

    group: str
    family: int
    place: Place


@dataclass(frozen=True)
class SignStep:
    """Each unit is flipped such that the sum of its values is positive, at the first place where it is not zero.

    Attributes:
        group: Its name.
        flips: The families of signs that flip; empty for a group of matrices, whose units flip as they are.
        places: Those that flip.
    """

    group: str
    flips: tuple[int, ...]
    places: tuple[Place, ...]


@dataclass(frozen=True)
class OrderStep:
    """Units are sorted by their sums of first, second and third powers, place by place, and then entry by entry.

    Attributes:
        group: Its name.
        sums: Places whose sums are compared.
        entries: Places whose entries are compared: all other axes are in order.
    """

    group: str
    sums: tuple[Place, ...]
    entries: tuple[Place, ...]


Step = ScaleStep | LinearStep | RotationStep | ShiftStep | SignStep | OrderStep


@dataclass(frozen=True)
class Plan:
    """The steps, in order, and what they leave free.

    Attributes:
        steps: Scales and invertible matrices, then rotations, then signs and shifts, then orders.
        left: Sentences about freedom that no step fixes.
    """

    steps: tuple[Step, ...]
    left: tuple[str, ...]


def plan(symmetry: Symmetry) -> Plan:
    """The steps that bring any network of an architecture to its canonical form.

    Args:
        symmetry: With every size known.
    """
    planner = _Planner(symmetry)
    planner.settle_continuous()
    planner.settle_rotations()
    planner.settle_signs()
    planner.settle_orders()
    return Plan(tuple(planner.steps), tuple(planner.left()))


@dataclass
class _Spot:
    """A place that counts, and what else acts on its values."""

    name: str
    site: Site
    is_weight: bool
    others: list["_Spot"] = field(default_factory=list)

    @property
    def group(self) -> Group:
        return self.site.group

    @property
    def place(self) -> Place:
        return self.name, self.site


class _Planner:
    def __init__(self, symmetry: Symmetry) -> None:
        self.symmetry = symmetry
        self.steps: list[Step] = []
        self.spots = _spots(symmetry)
        self.scales = {group.name: Span(group.scales) for group in symmetry.groups}
        self.signs = {group.name: Span(_sign_families(group), is_binary=True) for group in symmetry.groups}
        self.open_shifts = {group.name: set(range(group.shifts)) for group in symmetry.groups}
        self.linear = {group.name for group in symmetry.groups if group.matrix == "linear"}
        self.rotated = {group.name for group in symmetry.groups if group.matrix != "none"}
        self.unordered = {group.name for group in symmetry.groups if group.is_permuted and group.size > 1}

    # --- scales and invertible matrices ---------------------------------------------------------------------

    def settle_continuous(self) -> None:
        """Scales by weights that come in, then by biases and gains, then by what goes out; matrices by both sides."""
        attempts: tuple[Callable[[], bool], ...] = (
            lambda: self._step_linear(is_complete=True),
            lambda: self._step_scale(lambda spot: spot.is_weight and _comes_in(spot)),
            lambda: self._step_scale(_comes_in),
            lambda: self._step_scale(lambda _: True),
            lambda: self._step_linear(is_complete=False),
        )
        while any(attempt() for attempt in attempts):
            pass

    def _step_scale(self, is_wanted: Callable[[_Spot], bool]) -> bool:
        for group in self.symmetry.groups:
            span = self.scales[group.name]
            ready = [
                s for s in self.spots[group.name] if not span.contains(s.site.placement.scale) and self._is_bare(s)
            ]
            wanted = [spot for spot in ready if is_wanted(spot)]
            if not wanted:
                continue
            vector = wanted[0].site.placement.scale
            places = [s for s in wanted if span.is_same(s.site.placement.scale, vector)]
            spare = [s for s in ready if s not in places and span.is_same(s.site.placement.scale, vector)]
            direction = tuple(float(x) for x in span.settle(vector))
            self.steps.append(ScaleStep(group.name, direction, _places(places), _places(spare)))
            return True
        return False

    def _step_linear(self, *, is_complete: bool) -> bool:
        for group in self.symmetry.groups:
            if group.name not in self.linear:
                continue
            spots = self.spots[group.name]
            bare = [spot for spot in spots if self._is_bare(spot)]
            forward = [spot for spot in bare if not spot.site.placement.is_inverse]
            inverse = [spot for spot in bare if spot.site.placement.is_inverse]
            is_ready = len(bare) == len(spots) and forward and inverse if is_complete else bare
            if is_ready:
                self.steps.append(LinearStep(group.name, _places(forward), _places(inverse)))
                self.linear.remove(group.name)
                return True
        return False

    def _is_bare(self, spot: _Spot) -> bool:
        """Whether no other scale or invertible matrix moves the values of a spot; rotations keep their norms."""
        return all(
            self.scales[other.group.name].contains(other.site.placement.scale) and other.group.name not in self.linear
            for other in spot.others
        )

    # --- rotations ------------------------------------------------------------------------------------------

    def settle_rotations(self) -> None:
        """A rotation is fixed by the Gram matrix of its places, which no other rotation, sign or order changes."""
        for group in self.symmetry.groups:
            if group.name in self.rotated - self.linear:
                spots = [spot for spot in self.spots[group.name] if self._is_bare(spot)]
                if spots:
                    self.steps.append(RotationStep(group.name, _places(spots)))
                    self.rotated.remove(group.name)

    # --- signs and shifts -----------------------------------------------------------------------------------

    def settle_signs(self) -> None:
        """Signs by the gains that have norm one, then by weights, then by biases; shifts as soon as they can be."""
        gains = {
            (name, site.placement.axis)
            for step in self.steps
            if isinstance(step, ScaleStep)
            for name, site in step.places
            if len(self.symmetry.shapes[name]) == 1
        }
        attempts: tuple[Callable[[], bool], ...] = (
            self._step_shift,
            lambda: self._step_sign(lambda spot: (spot.name, spot.site.placement.axis) in gains),
            lambda: self._step_sign(lambda spot: spot.is_weight),
            lambda: self._step_sign(lambda _: True),
        )
        while any(attempt() for attempt in attempts):
            pass

    def _step_shift(self) -> bool:
        for group in self.symmetry.groups:
            for family in sorted(self.open_shifts[group.name]):
                for spot in self.spots[group.name]:
                    moved = {k for k, amount in enumerate(spot.site.placement.shift) if amount}
                    is_alone = moved & self.open_shifts[group.name] == {family}
                    if is_alone and self._is_signed(spot) and all(self._is_fixed(other) for other in spot.others):
                        self.steps.append(ShiftStep(group.name, family, spot.place))
                        self.open_shifts[group.name].remove(family)
                        return True
        return False

    def _step_sign(self, is_wanted: Callable[[_Spot], bool]) -> bool:
        for group in self.symmetry.groups:
            span = self.signs[group.name]
            ready = [
                spot
                for spot in self.spots[group.name]
                if not span.contains(_signs(spot))
                and self._is_steady(spot)
                and all(self._is_fixed(other) for other in spot.others)
            ]
            wanted = [spot for spot in ready if is_wanted(spot)]
            if not wanted:
                continue
            vector = _signs(wanted[0])
            spare = [spot for spot in ready if spot is not wanted[0] and span.is_same(_signs(spot), vector)]
            direction = span.settle(vector)
            flips = tuple(k for k, bit in enumerate(direction) if bit) if group.matrix == "none" else ()
            self.steps.append(SignStep(group.name, flips, _places([wanted[0], *spare])))
            return True
        return False

    def _is_steady(self, spot: _Spot) -> bool:
        """Whether the group itself moves the values of a spot by nothing but signs."""
        name, place = spot.group.name, spot.site.placement
        moved = {k for k, (amount, odd) in enumerate(zip(place.shift, place.parity, strict=True)) if amount or odd}
        is_scaled = self.scales[name].contains(place.scale)
        return is_scaled and name not in self.rotated and not moved & self.open_shifts[name]

    def _is_signed(self, spot: _Spot) -> bool:
        """Whether the group itself moves the values of a spot neither by signs nor by scales."""
        name, place = spot.group.name, spot.site.placement
        odd = {k for k, parity in enumerate(place.parity) if parity}
        is_scaled = self.scales[name].contains(place.scale)
        return is_scaled and self.signs[name].contains(_signs(spot)) and not odd & self.open_shifts[name]

    def _is_fixed(self, spot: _Spot) -> bool:
        """Whether the group itself can only reorder the values of a spot."""
        return self._is_steady(spot) and self.signs[spot.group.name].contains(_signs(spot))

    # --- orders ---------------------------------------------------------------------------------------------

    def settle_orders(self) -> None:
        """Inner groups before what they are repeated within, and first those that read from axes in order."""
        waiting = [group for group in self.symmetry.groups if group.name in self.unordered]
        while waiting:
            inner = [g for g in waiting if not any(g.name in other.within for other in waiting)]
            choices = [(group, *self._keys(group)) for group in inner]
            group, sums, entries = next((choice for choice in choices if choice[2]), choices[0])
            waiting.remove(group)
            if sums:
                self.steps.append(OrderStep(group.name, _places(sums), _places(entries)))
                self.unordered.remove(group.name)

    def _keys(self, group: Group) -> tuple[list[_Spot], list[_Spot]]:
        sums = [
            spot
            for spot in self.spots[group.name]
            if self._is_fixed(spot) and all(self._is_fixed(other) for other in spot.others)
        ]
        sums.sort(key=lambda spot: not spot.is_weight)
        entries = [
            spot
            for spot in sums
            if not any(o.group.name in self.unordered and o.group.name not in group.within for o in spot.others)
        ]
        return sums, entries

    # --- what is left ---------------------------------------------------------------------------------------

    def left(self) -> Iterable[str]:
        """Sentences about freedom that no step fixes."""
        for group in self.symmetry.groups:
            name, copies = group.name, copies_of(self.symmetry, group.name)
            where = f"group {name!r}" + (f" ({copies} copies)" if copies > 1 else "")
            if not self.scales[name].is_everything:
                yield f"{where} keeps scales: no values are moved by them alone"
            if name in self.rotated:
                yield f"{where} keeps its matrices: no values are moved by them alone"
            elif not self.signs[name].is_everything:
                yield f"{where} keeps signs: no values are moved by them alone"
            if self.open_shifts[name]:
                yield f"{where} keeps half-period shifts: no values are moved by them alone"
            if name in self.unordered:
                yield f"{where} keeps its order: no values are free of other signs and scales"


def _spots(symmetry: Symmetry) -> dict[str, list[_Spot]]:
    """The places of each group that count: no buffers, and one of several names of one tensor."""
    ignored = {*symmetry.buffers, *(name for names in symmetry.tied for name in names[1:])}
    result: dict[str, list[_Spot]] = {group.name: [] for group in symmetry.groups}
    for name, sites in symmetry.sites.items():
        if name in ignored:
            continue
        here = [_Spot(name, site, is_weight=len(symmetry.shapes[name]) > 1) for site in sites]
        for spot in here:
            spot.others = [other for other in here if other is not spot and _overlap(spot.site, other.site)]
            result[spot.group.name].append(spot)
    return result


def _overlap(one: Site, other: Site) -> bool:
    """Whether two sites of one parameter act on common entries."""
    if one.placement.axis != other.placement.axis:
        return True
    return not set(one.positions.tolist()).isdisjoint(other.positions.tolist())


def _places(spots: Sequence[_Spot]) -> tuple[Place, ...]:
    return tuple(spot.place for spot in spots)


def _comes_in(spot: _Spot) -> bool:
    return any(exponent > 0 for exponent in spot.site.placement.scale)


def _sign_families(group: Group) -> int:
    """A rotation that is fixed up to the signs of its axes has one sign for each unit."""
    return group.signs if group.matrix == "none" else 1


def _signs(spot: _Spot) -> tuple[int, ...]:
    return tuple(e % 2 for e in spot.site.placement.sign) if spot.group.matrix == "none" else (1,)

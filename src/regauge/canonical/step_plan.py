"""The plan of a canonical form: the order in which group elements are fixed, and the entries that fix them.

The order and the entries depend only on the symmetry. Each step fixes one kind of freedom of one group, by entries that
no later step changes. A ReLU unit is scaled to give its incoming weights unit norm. Before a unit is scaled, the scales
of the units that it reads must be fixed. Therefore layers are processed in the order of the signal. A residual stream
is fixed by layers that write to it, if all other scales of these layers are already fixed. One pass over all steps is
therefore sufficient, and the result is exact.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from regauge.canonical.places import GroupSite, Places, comes_in, places_of
from regauge.canonical.ranks import largest_ranks, rank_of
from regauge.core.groups import Group
from regauge.core.symmetry import Symmetry


@dataclass(frozen=True)
class ScaleStep:
    """A step that scales each unit such that its entries in all tensors in `places` have norm one.

    The field `spare` contains biases. If all entries in `places` are zero, biases get norm one instead. The scale of
    each family is the unit's factor, raised to the power of the family's entry in `direction`. The unit's factor
    divides the entries at `opposite` (outgoing weights). If a unit has no other nonzero entries, its outgoing weights
    get norm one.
    """

    group: str
    direction: tuple[float, ...]
    places: Places
    spare: Places
    opposite: Places


@dataclass(frozen=True)
class LinearStep:
    """A step whose matrix makes two Gram matrices equal and diagonal, or a single Gram matrix the identity.

    The matrix multiplies the entries at `forward`, and its inverse transpose multiplies the entries at `inverse`. If
    the product of the entries at `forward` and at `inverse` has rank r, only r coordinates are balanced.
    """

    group: str
    forward: Places
    inverse: Places


@dataclass(frozen=True)
class RotationStep:
    """A step whose rotation makes the Gram matrix of a group's entries (in all tensors of `places`) diagonal, in
    descending order.

    If an earlier step has made the Gram matrix the identity, the matrix does not distinguish coordinates. To
    distinguish coordinates, entries are first multiplied by fixed weights along other axes, which `weighed` lists for
    each tensor of `places`.
    """

    group: str
    places: Places
    weighed: tuple[tuple[GroupSite | int, ...], ...]


@dataclass(frozen=True)
class ShiftStep:
    """A step that adds half periods of one family, which brings the mean of a unit's entries into (-amount / 2, amount
    / 2].
    """

    group: str
    family: int
    place: GroupSite


@dataclass(frozen=True)
class SignStep:
    """A step that flips units such that the sum of their entries is positive, in the first tensor where the sum is not
    zero.

    `flips` contains the sign families that flip. `flips` is empty for a group of matrices, whose coordinates flip
    directly.
    """

    group: str
    flips: tuple[int, ...]
    places: Places


@dataclass(frozen=True)
class OrderStep:
    """A step that sorts units by sums of first, second and third powers of their entries, tensor by tensor, and then by
    entries.

    Single entries are compared only in tensors whose order along all other axes is already fixed.
    """

    group: str
    sums: Places
    entries: Places


Step = ScaleStep | LinearStep | RotationStep | ShiftStep | SignStep | OrderStep


@dataclass(frozen=True)
class Plan:
    """The steps that fix the elements of a symmetry, and the parts of the symmetry that no step fixes.

    Attributes:
        steps: The steps in this order: scales and matrices; rotations, signs and shifts; permutations.
        left: Sentences that describe the freedom that no step fixes.
        open: The freedom that no step fixes, as pairs of a group and the part of its elements ("scale", "linear", ...).
    """

    steps: tuple[Step, ...]
    left: tuple[str, ...]
    open: tuple[tuple[str, str], ...]


def plan(symmetry: Symmetry) -> Plan:
    """Return the steps that bring any network to its canonical form.

    All sizes of the symmetry's groups must be known.
    """
    planner = _Planner(symmetry)
    planner.settle_continuous()
    planner.settle_rotations()
    planner.settle_signs()
    planner.settle_orders()
    left = tuple(planner.left())
    return Plan(
        tuple(planner.steps), tuple(text for _, _, text in left), tuple((group, part) for group, part, _ in left)
    )


class _Planner:
    def __init__(self, symmetry: Symmetry) -> None:
        self.symmetry = symmetry
        self.steps: list[Step] = []
        self.places = places_of(symmetry)
        self.scales = {group.name: Span(group.scales) for group in symmetry.groups}
        signs = {group.name: group.signs if group.matrix == "none" else 1 for group in symmetry.groups}
        self.signs = {name: Span(count, is_binary=True) for name, count in signs.items()}
        self.open_shifts = {group.name: set(range(group.shifts)) for group in symmetry.groups}
        # In a representative, these biases are zero, and a norm of zero does not determine a scale.
        self.zero = {family.entries.parameter for family in symmetry.translations if not family.constant}
        self.ranks = largest_ranks(symmetry, self.places)
        self.linear = {*self.ranks}
        self.whitened = set[str]()
        self.rotated = {group.name for group in symmetry.groups if group.matrix != "none"}
        self.unordered = {group.name for group in symmetry.groups if group.is_permuted and group.has_order}

    def settle_continuous(self) -> None:
        """Fix scales by incoming weights, then by biases and gains, then by outgoing weights.

        Fix each matrix by the entries that it multiplies, and by the entries that its inverse transpose multiplies.
        """
        attempts: tuple[Callable[[], bool], ...] = (
            lambda: self._step_linear(is_complete=True),
            lambda: self._step_scale(lambda place: place.is_weight and comes_in(place)),
            lambda: self._step_scale(lambda place: comes_in(place) and place.name not in self.zero),
            lambda: self._step_scale(lambda place: place.name not in self.zero),
            lambda: self._step_linear(is_complete=False),
            lambda: self._step_scale(lambda _: True),
        )
        while any(attempt() for attempt in attempts):
            pass

    def _step_scale(self, is_wanted: Callable[[GroupSite], bool]) -> bool:
        for group in self.symmetry.groups:
            span = self.scales[group.name]
            ready = [p for p in self.places[group.name] if not span.contains(p.scale) and self._is_bare(p)]
            first = next(filter(is_wanted, ready), None)
            if first is not None:
                alike = [p for p in ready if span.is_same(p.scale, first.scale)]
                places = tuple(filter(is_wanted, alike))
                spare = tuple(p for p in alike if p not in places)
                opposite = tuple(p for p in ready if span.is_same(p.scale, [-x for x in first.scale]))
                direction = tuple(float(x) for x in span.settle(first.scale))
                self.steps.append(ScaleStep(group.name, direction, places, spare, opposite))
                return True
        return False

    def _step_linear(self, *, is_complete: bool) -> bool:
        for group in self.symmetry.groups:
            if group.name not in self.linear:
                continue
            places = self.places[group.name]
            bare = [place for place in places if self._is_bare(place)]
            forward = tuple(place for place in bare if not place.site.placement.is_inverse)
            inverse = tuple(place for place in bare if place.site.placement.is_inverse)
            if is_complete:
                choices = [(forward, inverse)] if len(bare) == len(places) and forward and inverse else []
            else:
                choices = [(forward, inverse), (forward, ()), ((), inverse)]
            sides = next((chosen for chosen in choices if self._has_rank(group, *chosen)), None)
            if sides is not None:
                self.steps.append(LinearStep(group.name, *sides))
                self.linear.remove(group.name)
                self.whitened |= set() if all(sides) else {group.name}
                return True
        return False

    def _has_rank(self, group: Group, *sides: Places) -> bool:
        """Return whether the entries of some tensors can have full rank, which fixes the whole matrix."""
        known = [rank_of(self.symmetry, side, self.ranks) for side in sides if side]
        return bool(known) and min(known) >= self.ranks[group.name]

    def _is_bare(self, place: GroupSite) -> bool:
        """Return whether the scales and invertible matrices of all other groups on the entries at a site (see
        `GroupSite`) are already fixed.
        """
        return all(
            self.scales[other.group.name].contains(other.scale) and other.group.name not in self.linear
            for other in place.others
        )

    def settle_rotations(self) -> None:
        """Fix rotations by the Gram matrix of their entries, which no other rotation, sign or permutation changes."""
        waiting = [group.name for group in self.symmetry.groups if group.name in self.rotated - self.linear]
        while waiting:
            name = next((n for n in waiting if n not in self.whitened or any(self._weighed(n))), waiting[0])
            waiting.remove(name)
            places = tuple(filter(self._is_bare, self.places[name]))
            if places:
                weighed = self._weighed(name) if name in self.whitened else ((),) * len(places)
                self.steps.append(RotationStep(name, places, weighed))
                self.rotated.remove(name)

    def _weighed(self, group: str) -> tuple[tuple[GroupSite | int, ...], ...]:
        """Return, for each tensor in which only the given group is not fixed yet, the axes for `RotationStep.weighed`:
        axes on which no group acts, and axes whose rotations are already fixed.
        """
        result = []
        for place in filter(self._is_bare, self.places[group]):
            axes = {*range(len(self.symmetry.shapes[place.name]))} - {place.site.placement.axis}
            others = {axis: [o for o in place.others if o.site.placement.axis == axis] for axis in axes}
            free = [axis for axis in axes if not others[axis]]
            fixed = [own[0] for own in others.values() if len(own) == 1 and self._is_turned(own[0])]
            result.append((*free, *fixed))
        return tuple(result)

    def _is_turned(self, place: GroupSite) -> bool:
        """Return whether a matrix acts along a whole axis of the tensor and is already fixed up to signs."""
        length = self.symmetry.shapes[place.name][place.site.placement.axis]
        is_whole = place.site.positions.numel() == length == place.group.size
        return is_whole and place.group.matrix != "none" and place.group.name not in self.rotated

    def settle_signs(self) -> None:
        """Fix signs by gains of norm one, then by weights, then by biases.

        Fix half-period shifts as soon as possible.
        """
        gains = {
            (place.name, place.site.placement.axis)
            for step in self.steps
            if isinstance(step, ScaleStep)
            for place in step.places
            if not place.is_weight
        }
        attempts: tuple[Callable[[], bool], ...] = (
            self._step_shift,
            lambda: self._step_sign(lambda place: (place.name, place.site.placement.axis) in gains),
            lambda: self._step_sign(lambda place: place.is_weight),
            lambda: self._step_sign(lambda _: True),
        )
        while any(attempt() for attempt in attempts):
            pass

    def _step_shift(self) -> bool:
        for group in self.symmetry.groups:
            for family in sorted(self.open_shifts[group.name]):
                for place in self.places[group.name]:
                    moved = {k for k, amount in enumerate(place.site.placement.shift) if amount}
                    is_alone = moved & self.open_shifts[group.name] == {family}
                    if is_alone and self._is_signed(place) and all(map(self._is_fixed, place.others)):
                        self.steps.append(ShiftStep(group.name, family, place))
                        self.open_shifts[group.name].remove(family)
                        return True
        return False

    def _step_sign(self, is_wanted: Callable[[GroupSite], bool]) -> bool:
        for group in self.symmetry.groups:
            span = self.signs[group.name]
            ready = [
                place
                for place in self.places[group.name]
                if not span.contains(place.signs) and self._is_steady(place) and all(map(self._is_fixed, place.others))
            ]
            first = next(filter(is_wanted, ready), None)
            if first is not None:
                spare = [p for p in ready if p is not first and span.is_same(p.signs, first.signs)]
                direction = span.settle(first.signs)
                flips = tuple(k for k, bit in enumerate(direction) if bit) if group.matrix == "none" else ()
                self.steps.append(SignStep(group.name, flips, (first, *spare)))
                return True
        return False

    def _is_steady(self, place: GroupSite) -> bool:
        """Return whether the group of a site can change the entries at the site only by signs."""
        name, how = place.group.name, place.site.placement
        moved = {k for k, (amount, odd) in enumerate(zip(how.shift, how.parity, strict=True)) if amount or odd}
        is_scaled = self.scales[name].contains(place.scale)
        return is_scaled and name not in self.rotated and not moved & self.open_shifts[name]

    def _is_signed(self, place: GroupSite) -> bool:
        """Return whether the group of a site changes the entries at the site neither by signs nor by scales."""
        name = place.group.name
        odd = {k for k, parity in enumerate(place.site.placement.parity) if parity}
        is_scaled = self.scales[name].contains(place.scale)
        return is_scaled and self.signs[name].contains(place.signs) and not odd & self.open_shifts[name]

    def _is_fixed(self, place: GroupSite) -> bool:
        """Return whether the group of a site can only permute the entries at the site."""
        return self._is_steady(place) and self.signs[place.group.name].contains(place.signs)

    def settle_orders(self) -> None:
        """Fix permutations of inner groups before permutations of outer groups.

        Groups whose units are computed from axes with a fixed order come first.
        """
        waiting = [group for group in self.symmetry.groups if group.name in self.unordered]
        while waiting:
            inner = [g for g in waiting if not any(g.name in other.within for other in waiting)]
            choices = [(group, *self._keys(group)) for group in inner]
            group, sums, entries = next((choice for choice in choices if choice[2]), choices[0])
            waiting.remove(group)
            if sums:
                self.steps.append(OrderStep(group.name, sums, entries))
                self.unordered.remove(group.name)

    def _keys(self, group: Group) -> tuple[Places, Places]:
        """Return the tensors whose sums can be compared (weights first), and the tensors whose single entries can be
        compared.
        """
        sums = [p for p in self.places[group.name] if self._is_fixed(p) and all(map(self._is_fixed, p.others))]
        sums.sort(key=lambda place: not place.is_weight)
        open_names = self.unordered - {*group.within}
        return tuple(sums), tuple(p for p in sums if not any(o.group.name in open_names for o in p.others))

    def left(self) -> Iterable[tuple[str, str, str]]:
        """Return the freedom that no step fixes: the group, the part of its elements (such as signs), and a
        sentence.
        """
        for group in self.symmetry.groups:
            name, copies = group.name, self.symmetry.count_copies(group.name)
            where = f"group {name!r}" + (f" ({copies} copies)" if copies > 1 else "")
            kinds = {
                ("scale", "scales"): not self.scales[name].is_everything,
                ("linear", "its matrices"): name in self.rotated,
                ("linear" if group.matrix != "none" else "sign", "signs"): name not in self.rotated
                and not self.signs[name].is_everything,
                ("shift", "half-period shifts"): bool(self.open_shifts[name]),
            }
            for part, kind in (key for key, is_free in kinds.items() if is_free):
                yield name, part, f"{where}: {kind} are not fixed, because no values change by them alone"
            if name in self.unordered:
                yield (
                    name,
                    "permutation",
                    f"{where}: its order is not fixed, because no values are free of other signs and scales",
                )


class Span:
    """Products of scales (or signs) that are already fixed, as vectors of exponents, and the directions that change no
    fixed product.

    Args:
        families: The length of the vectors.
        is_binary: Whether the vectors are taken modulo two, as exponents of signs are.
    """

    def __init__(self, families: int, *, is_binary: bool = False) -> None:
        self._is_binary = is_binary
        self._free = [tuple(Fraction(int(k == f)) for k in range(families)) for f in range(families)]
        self._known: dict[tuple[int, ...], bool] = {}

    @property
    def is_everything(self) -> bool:
        """Whether all directions are fixed."""
        return not self._free

    def contains(self, vector: Sequence[int]) -> bool:
        """Return whether every direction that is not fixed leaves the vector unchanged."""
        key = tuple(vector)
        if key not in self._known:
            self._known[key] = not any(self._dot(vector, free) for free in self._free)
        return self._known[key]

    def is_same(self, left: Sequence[int], right: Sequence[int]) -> bool:
        """Return whether every direction that is not fixed changes the two vectors by the same amount."""
        return self.contains([a - b for a, b in zip(left, right, strict=True)])

    def settle(self, vector: Sequence[int]) -> tuple[Fraction, ...]:
        """Add a vector to the fixed vectors. Return the dual vector, whose product with `vector` is 1 and with all
        earlier vectors 0.
        """
        chosen = next(free for free in self._free if self._dot(vector, free))
        length = self._dot(vector, chosen)
        # Free directions are orthogonal to all that is fixed, so a free one with product one with the vector is dual to
        # it; the other free ones are made orthogonal to the vector by multiples of that.
        direction = self._reduce(x / length for x in chosen)
        others = [free for free in self._free if free is not chosen]
        self._known.clear()
        self._free = [
            self._reduce(x - self._dot(vector, free) * y for x, y in zip(free, direction, strict=True))
            for free in others
        ]
        return direction

    def _dot(self, left: Sequence[int], right: Sequence[Fraction]) -> Fraction:
        total = sum((x * y for x, y in zip(left, right, strict=True)), Fraction())
        return total % 2 if self._is_binary else total

    def _reduce(self, values: Iterable[Fraction]) -> tuple[Fraction, ...]:
        return tuple(x % 2 if self._is_binary else x for x in values)

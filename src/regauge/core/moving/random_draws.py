"""Random permutations, signs, scales and half periods of all groups of a symmetry, computed from one random tensor."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from regauge.core.groups import Group, Placement, class_labels
from regauge.core.symmetry import Symmetry

Key = TypeVar("Key")
Factor = tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""A kind of factor: a group, and the exponents of its scales, of its signs, and of the signs of odd half periods."""
Shift = tuple[str, tuple[float, ...]]
"""A kind of shift: a group, and the amounts that its half periods add."""
Array = NDArray[Any]

Source = tuple[Sequence[int], torch.Generator]
"""A generator that samples elements, and the sizes of the batches that these elements transform."""

WORD = 63
"""The number of random bits in one random integer."""
LOW = 24
"""The number of low bits that choose signs and half periods, or a scale. The higher bits permute the units."""

VECTOR = 64
"""The number of entries that a processor handles at once, or a multiple of this number."""


@dataclass(frozen=True)
class ElementRun:
    """Consecutive random elements, and the batches on which they act: element k acts on network k of each batch.

    Attributes:
        first: The index of the first element.
        elements: The number of elements.
        batches: The index of the first network and the number of networks, for each batch.
    """

    first: int
    elements: int
    batches: tuple[tuple[int, int], ...]

    def networks(self, some: slice, start: int) -> Iterator[tuple[int, int]]:
        """Yield, for each batch, the range of networks on which some elements of the run act: the first network, and
        the number of networks.

        `start` is the index, within the run, of the first element in `some`.
        """
        for first, count in self.batches:
            n = min(some.stop - some.start, count - start)
            if n > 0:
                yield first + start, n


def shares_of(sources: Sequence[Source]) -> list[ElementRun]:
    """Assign random elements to the networks of all sources.

    If every source has a single batch, one `ElementRun` covers all networks.
    """
    if all(len(counts) == 1 for counts, _ in sources):
        total = sum(counts[0] for counts, _ in sources)
        return [ElementRun(0, total, ((0, total),))]
    shares, element, network = list[ElementRun](), 0, 0
    for counts, _ in sources:
        firsts = [network + sum(counts[:k]) for k in range(len(counts))]
        shares.append(ElementRun(element, max(counts), tuple(zip(firsts, counts, strict=True))))
        element, network = element + max(counts), network + sum(counts)
    return shares


def portions(shares: Sequence[ElementRun], step: int) -> Iterator[tuple[ElementRun, slice, int]]:
    """Yield the elements of each run in slices of at most `step` elements. The index of the slice's first element
    within the run is yielded together with each slice.
    """
    for share in shares:
        for start in range(0, share.elements, step):
            stop = min(start + step, share.elements)
            yield share, slice(share.first + start, share.first + stop), start


@dataclass(frozen=True)
class Drawn:
    """Sampled elements for some networks, stored as tables with one column for each unit of each copy of a group.

    The last column of each table represents the identity.

    Attributes:
        displacements: The index of the source unit of each unit, minus the index of the unit itself.
        logs: Base-2 logarithms of the scales for each kind of factor, or None if there are no scales.
        signs: Signs for each kind of factor, or None if there are no signs.
        shifts: The amounts that each kind of half period adds, or None if there are no half periods.
    """

    displacements: Int[Tensor, "models moves"]
    logs: Float[Tensor, "models factors"] | None
    signs: Float[Tensor, "models factors"] | None
    shifts: Float[Tensor, "models shifts"] | None

    def factors(self, dtype: torch.dtype) -> Tensor | None:
        """Return the products of signs and scales that multiply entries, or None if there are no signs and scales."""
        signs = None if self.signs is None else self.signs.to(dtype)
        scales = None
        if self.logs is not None:
            # Pad to whole vectors of the processor, because torch rounds the remaining entries differently.
            whole = functional.pad(self.logs.to(dtype), (0, -self.logs.shape[1] % VECTOR))
            scales = whole.exp2()[:, : self.logs.shape[1]]
        return signs if scales is None else scales if signs is None else scales * signs


class Draws:
    """A plan of the random numbers that a random element needs, computed once for a symmetry and some of its parts.

    Each unit gets one random integer. Units are permuted by sorting them by the high bits of their integers. The low
    bits of a unit's integer determine its signs and half periods. In addition, each scale gets its own random integer.

    Attributes:
        moves: The table columns for the displacements of each permuted group.
        factors: The table columns for each kind of factor.
        shifts: The table columns for each kind of shift.
    """

    def __init__(self, symmetry: Symmetry, parts: Sequence[str]) -> None:
        self.moves: dict[str, slice] = {}
        self.factors: dict[Factor, slice] = {}
        self.shifts: dict[Shift, slice] = {}
        self._parts = tuple(parts)
        self._groups = {group.name: group for group in symmetry.groups if group.matrix == "none"}
        groups = list(self._groups.values())
        count = {group.name: symmetry.count_copies(group.name) * group.size for group in groups}
        copies = [torch.zeros(0, dtype=torch.int64)]
        for group in groups:
            if group.is_permuted and "permutation" in parts:
                place_columns(self.moves, group.name, count[group.name])
                own = torch.arange(count[group.name]) // group.size
                if group.classes:
                    labels = class_labels(group)
                    own = own * (1 + int(labels.max())) + labels.repeat(count[group.name] // group.size)
                copies.append(sum(map(len, copies)) + own)
        self._rank_units(torch.cat(copies))
        units, scales = dict(self.moves), dict[tuple[str, int], slice]()
        for group in groups:
            place_columns(units, group.name, count[group.name] if self._count_states(group) > 1 else 0)
            for family in range(group.scales if "scale" in parts else 0):
                place_columns(scales, (group.name, family), count[group.name])
            for place in group.placements:
                factor, shift = self.factor_of(group, place), self.shift_of(group, place)
                if factor is not None:
                    place_columns(self.factors, factor, count[group.name])
                if shift is not None:
                    place_columns(self.shifts, shift, count[group.name])
        self._units, self._width = blank(units), blank(units) + blank(scales)
        self._states = np.ones(self._units, np.int64)
        for name, columns in units.items():
            self._states[columns] = self._count_states(self._groups[name])
        self._signs = self._tabulate(self.factors, units, self._sign_states, torch.float32)
        self._shifts = self._tabulate(self.shifts, units, self._shift_states, torch.float64)
        self._logs = self._exponents(scales)

    def factor_of(self, group: Group, place: Placement) -> Factor | None:
        """Return the exponents of the sampled scales and signs at a placement, or None if no factor acts there."""

        def wanted(part: str, exponents: Sequence[int]) -> tuple[int, ...]:
            return tuple(exponents) if part in self._parts and any(exponents) else ()

        made = (group.name, wanted("scale", place.scale), wanted("sign", place.sign), wanted("shift", place.parity))
        return made if any(made[1:]) else None

    def shift_of(self, group: Group, place: Placement) -> Shift | None:
        """Return the amounts that half periods add at a placement, or None if nothing is added there."""
        return (group.name, tuple(place.shift)) if "shift" in self._parts and any(place.shift) else None

    def draw(self, sources: Sequence[tuple[int, torch.Generator]]) -> Drawn:
        """Sample elements from generators. Each source is a pair of batch sizes and a generator.

        Permutations and signs are uniformly random. Scales lie between 1/2 and 2, and their logarithms are uniformly
        random. Shifts are -1, 0 or 1.
        """
        models = sum(count for count, _ in sources)
        bits = torch.empty(models, self._width, dtype=torch.int64)
        for part, (count, generator) in zip(torch.split(bits, [count for count, _ in sources]), sources, strict=True):
            if generator.device.type == "cpu":
                part.random_(generator=generator)
            else:
                drawn = torch.empty(count, self._width, dtype=torch.int64, device=generator.device)
                part.copy_(drawn.random_(generator=generator))
        numbers = bits.numpy()
        permuted = self._permute(numbers)
        if not (self._signs or self._shifts or self._logs):
            return Drawn(permuted, None, None, None)
        # `(low * count) >> LOW` spreads LOW random bits over `count` states with one product instead of a division
        # (Lemire 2019).
        low = numbers & ((1 << LOW) - 1)
        states = (low[:, : self._units] * self._states) >> LOW

        def look_up(table: tuple[Array, Array, Array]) -> Tensor:
            values, columns, starts = table
            return torch.from_numpy(values.take(states.take(columns, 1) + starts))

        logs = None
        if self._logs:
            uniform = functional.pad(torch.from_numpy(low[:, self._units :] * 2.0 ** (1 - LOW) - 1), (0, 1))
            logs = torch.stack([uniform.index_select(1, columns) * e for columns, e in self._logs]).sum(0)
        return Drawn(
            permuted,
            logs,
            None if self._signs is None else look_up(self._signs),
            None if self._shifts is None else look_up(self._shifts),
        )

    def _rank_units(self, copies: Int[Tensor, " moves"]) -> None:
        """Prepare the sorting that permutes units within each copy of a group, or within each class of units."""
        count = len(copies)
        column = max(1, (count - 1).bit_length())
        high = column + (int(copies.max()) if count else 0).bit_length()
        self._column, self._random = column, min(WORD - LOW, WORD - high)
        self._order = ((copies << (self._random + column)) | torch.arange(count)).numpy()
        self._targets = copies.argsort(stable=True).numpy()
        self._is_in_order = bool((self._targets == np.arange(count)).all())

    def _permute(self, bits: Array) -> Int[Tensor, "models moves"]:
        """Return random displacements of units, obtained by sorting the units of each copy by random bits."""
        count = len(self._order)
        displacements = np.zeros((len(bits), count + 1), np.int32)
        if count:
            keys = bits[:, :count] >> (WORD - self._random)
            keys <<= self._column
            keys |= self._order
            keys.sort(-1)
            keys &= (1 << self._column) - 1  # the low bits of a key are the number of its unit
            # Sorting assigns the units of each copy or class to positions of the same copy or class.
            if self._is_in_order:
                np.subtract(keys, self._targets, out=displacements[:, :count], casting="unsafe")
            else:
                displacements[:, self._targets] = keys - self._targets
        return torch.from_numpy(displacements)

    def _count_states(self, group: Group) -> int:
        """Return the number of combinations of signs and half periods that a unit can have."""
        signs, shifts = group.signs * ("sign" in self._parts), group.shifts * ("shift" in self._parts)
        return int(2**signs * 3**shifts)

    def _decode(self, group: Group) -> tuple[list[Tensor], list[Tensor]]:
        """Return all combinations of signs and half periods that a unit can have, as one tensor for each family."""
        state = torch.arange(self._count_states(group))
        signs = group.signs * ("sign" in self._parts)
        shifts = group.shifts * ("shift" in self._parts)
        return (
            [(state >> family) & 1 for family in range(signs)],
            [(state >> signs) // 3**family % 3 - 1 for family in range(shifts)],
        )

    def _sign_states(self, factor: Factor) -> Tensor:
        """Return the sign of a product of signs for each combination of signs and half periods that a unit can have."""
        group, _, sign, parity = factor
        bits, shifts = self._decode(self._groups[group])
        flips = [one for one, e in zip(bits, sign, strict=False) if e]
        flips += [one & 1 for one, e in zip(shifts, parity, strict=False) if e]
        return 1 - 2 * (sum(flips, torch.zeros(self._count_states(self._groups[group]), dtype=torch.int64)) & 1)

    def _shift_states(self, shift: Shift) -> Tensor:
        """Return the amount that a shift adds for each combination of signs and half periods that a unit can have."""
        group, amounts = shift
        _, shifts = self._decode(self._groups[group])
        return torch.stack([one.double() * amount for one, amount in zip(shifts, amounts, strict=True)]).sum(0)

    def _tabulate(
        self,
        kinds: Mapping[Any, slice],
        units: Mapping[str, slice],
        states: Callable[[Any], Tensor],
        dtype: torch.dtype,
    ) -> tuple[Array, Array, Array] | None:
        """Return a table of the values of all factors (or shifts), for each combination of signs and half periods that
        a unit can have.

        Also return, for each column of the table, the unit of the column and the position of its first value.
        """
        made = [(kind, states(kind), units[kind[0]]) for kind in kinds]
        if not any(bool((values != values[0]).any()) for _, values, _ in made):
            return None
        neutral = torch.full((int(self._states.max()),), 1 if dtype == torch.float32 else 0)
        starts = np.cumsum([0, *(len(values) for _, values, _ in made)]).tolist()
        columns, places = list[Tensor](), list[Tensor]()
        for (kind, values, unit), start in zip(made, starts, strict=False):
            # Units with one state may have no column. Like the identity, they read the neutral values.
            own = torch.zeros(kinds[kind].stop - kinds[kind].start, dtype=torch.int64)
            columns.append(torch.arange(unit.start, unit.stop) if len(values) > 1 else own)
            places.append(own + (start if len(values) > 1 else starts[-1]))
        return (
            torch.cat([*(values for _, values, _ in made), neutral]).to(dtype).numpy(),
            torch.cat([*columns, torch.zeros(1, dtype=torch.int64)]).numpy(),
            torch.cat([*places, torch.tensor(starts[-1:])]).numpy(),
        )

    def _exponents(self, scales: Mapping[tuple[str, int], slice]) -> list[tuple[Tensor, Tensor]]:
        """Return layers of scales and exponents. Each factor of an element is a product of powers of scales, with one
        power from each layer.

        Layer k holds the k-th scale of each factor and its exponent.
        """
        width, layers = blank(self.factors) + 1, list[tuple[Tensor, Tensor]]()
        for (group, exponents, _, _), columns in self.factors.items():
            there = [(family, exponent) for family, exponent in enumerate(exponents) if exponent]
            for depth, (family, exponent) in enumerate(there):
                if depth == len(layers):
                    layers.append((torch.full((width,), blank(scales)), torch.zeros(width)))
                layers[depth][0][columns] = torch.arange(scales[group, family].start, scales[group, family].stop)
                layers[depth][1][columns] = exponent
        return layers


def blank(places: Mapping[Key, slice]) -> int:
    """Return the index of the last column of a table, which represents the identity."""
    return max((columns.stop for columns in places.values()), default=0)


def place_columns(places: dict[Key, slice], key: Key, count: int) -> None:
    """Reserve the next `count` columns of a table for a key, unless the key already has columns."""
    if key not in places:
        places[key] = slice(blank(places), blank(places) + count)

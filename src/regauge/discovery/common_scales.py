"""Common scales: one positive factor for a whole tensor, if separate factors for units are not possible.

The solver of `solve.py` gives each unit of an axis a factor. Some operators allow only one factor for all units. For
example, before a normalization to length one, all units may be multiplied by one factor, but not by different factors.
Each tensor of the program has one unknown: the logarithm of a factor of the whole tensor. If an axis consists of
blocks, such as fused queries, keys and values, the blocks have separate unknowns. The constraints (laws) of an operator
also apply to factors that are constant along an axis. Constraints on constant factors give linear equations between the
unknowns. A solution is a new common scale unless factors for units, invertible matrices and other common scales already
include it.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache

from regauge.core.groups import Group, Placement
from regauge.discovery.emit import merged
from regauge.discovery.freedom import Freedom
from regauge.discovery.laws import Axis, Law, Record, Value
from regauge.discovery.layout import Atom, terms
from regauge.discovery.slots import SlotBlock, Slots
from regauge.discovery.systems import Proportions, Rational, Row, independent, null_space, quotient

MOST_BLOCKS = 16
"""The largest number of blocks of an axis that get separate factors. An axis with more blocks is treated as one
block."""
WHOLE = -1
"""The number that replaces the axis in `Block` if a factor multiplies a whole tensor."""
Counts = tuple[int, ...]
"""The number of blocks of each axis of a tensor."""
Block = tuple[int, int]
"""An axis and one of its blocks; for a whole tensor, `WHOLE` and zero.

The first axis with several blocks has a factor for each of its blocks. Each later axis has a factor for each block
except the first. The factors of later axes are relative to the first block of the same axis.
"""
Exponents = Mapping[tuple[str, int, int], Rational]
"""The exponents of a common scale, by tensor and block."""


def common_groups(
    records: Iterable[Record],
    params: Mapping[str, Value],
    slots: Slots,
    freedoms: Sequence[Freedom],
    groups: Sequence[Group],
    aliases: Mapping[str, tuple[str, ...]],
    structure: Collection[str],
    watched: Mapping[str, Value] | None = None,
) -> tuple[Group, ...]:
    """Return one group of size one for each common scale.

    Args:
        records: The constraints (laws) of all operators.
        params: The parameters and buffers.
        slots: The slots of all laws in `records`.
        freedoms: The transformations that may act on the units of single axis factors (atoms).
        groups: The groups made from `freedoms`. New groups get names that no group in `groups` has.
        aliases: All names of each tensor.
        structure: The tensors that no group scales.
        watched: Intermediate values on which the groups are also placed.
    """
    equations = _Equations(slots.blocks)
    for record in records:
        equations.add(record)
    for name, value in params.items():
        if name in structure:
            equations.fix(value)
        equations.tie_unread(value)
    tensors = {**params, **(watched or {})}
    found = [_few(one) for one in equations.families(tensors)]
    kept = _new(found, [_uniform(family, params, slots) for family in _families(freedoms)], params)
    emitter = _Emitter(tensors, groups, aliases)
    return tuple(emitter.group(exponents) for exponents in kept)


class _Equations:
    """Linear equations whose unknowns are logarithms of factors, for whole tensors and for blocks of axes."""

    def __init__(self, blocks: Mapping[tuple[Value, int], Sequence[SlotBlock]]) -> None:
        self.blocks = blocks
        self.first: dict[Value, int] = {}
        self.counts: dict[Value, Counts] = {}
        self.total = 0
        self.unknowns = Proportions()
        self.seen: dict[Hashable, tuple[list[int], list[Row]]] = {}
        self.read: set[tuple[Value, int, int]] = set()

    def add(self, record: Record) -> None:
        """Add the equations that follow from the laws of one operator.

        An unknown (logarithm of a factor) is zero if the laws allow no factor but one.
        """
        order: dict[Value, int] = {}
        key = []
        for law in record:
            axes = tuple([(order.setdefault(axis.value, len(order)), _is_whole(axis)) for axis in law.axes])
            key.append((law.scale, axes))
        values = list(order)
        counts = [self._counts(value) for value in values]
        if all(sum(one) == len(one) for one in counts):
            found = self.seen.get(tuple(key))
            if found is None:
                found = self.seen[tuple(key)] = self._rows(record, values)
        else:
            found = self._rows(record, values)
        numbers = [self.first[value] + k for value in values for k in range(self._size(value))]
        zeros, rows = found
        self.unknowns.fix(*[numbers[k] for k in zeros])
        for row in rows:
            self.unknowns.equate([numbers[k] for k in row], list(row.values()))

    def fix(self, value: Value) -> None:
        self.unknowns.fix(*(number for number, _, _ in self._numbers(value)))

    def tie_unread(self, value: Value) -> None:
        """Give each block of a parameter that the model never reads the same factor as a neighboring block. For
        example, a model may never read the last rows of a table.
        """
        counts = self.counts.get(value, ())
        numbers = _factors(counts)
        for axis, count in enumerate(counts):
            read = [k for k in range(count) if (value, axis, k) in self.read]
            for k in range(count) if 0 < len(read) < count else ():
                if k not in read:
                    near = max((r for r in read if r < k), default=read[0])
                    pair = [(numbers[axis, b], sign) for b, sign in ((k, 1), (near, -1)) if (axis, b) in numbers]
                    self.unknowns.equate([self.first[value] + number for number, _ in pair], [sign for _, sign in pair])

    def families(self, tensors: Mapping[str, Value]) -> list[Exponents]:
        """Return a basis of the solutions. Each solution is a common scale, given by the exponents with which it
        multiplies each tensor.
        """
        unknowns = self.unknowns
        unknowns.settle()
        sizes: dict[int, int] = defaultdict(int)
        for number in range(self.total):
            sizes[unknowns.find(number)[0]] += 1
        free_of = _solved(unknowns.pending, sizes)
        families: dict[int, dict[tuple[str, int, int], Rational]] = defaultdict(lambda: defaultdict(int))
        for name, value in tensors.items():
            every = _block_counts(self.blocks, value)
            for number, axis, block in self._numbers(value):
                root, weight = unknowns.value(number)
                for free, factor in free_of.get(root, {root: 1}).items() if weight else ():
                    for where, sign in _block_factor(every, axis, block).items():
                        families[free][name, *where] += weight * factor * sign
        found = ({e: x for e, x in family.items() if x} for family in families.values())
        return [family for family in found if family]

    def _counts(self, value: Value) -> Counts:
        """Return, for each axis of a tensor, the number of blocks that have a factor of their own."""
        found = self.counts.get(value)
        if found is None:
            counts = _block_counts(self.blocks, value)
            found = self.counts[value] = tuple([n if n <= MOST_BLOCKS else 1 for n in counts])
            self.first[value] = self.total
            self.total += self._size(value)
        return found

    def _size(self, value: Value) -> int:
        return 1 + sum(self.counts[value]) - value.ndim

    def _numbers(self, value: Value) -> Iterator[tuple[int, int, int]]:
        """Yield the unknowns of a tensor (logarithms of factors). Each unknown comes with the axis and the block that
        its factor multiplies.
        """
        if value in self.first:
            for k, (axis, block) in enumerate(_factors(self.counts[value])):
                yield self.first[value] + k, axis, block

    def _rows(self, record: Record, values: Sequence[Value]) -> tuple[list[int], list[Row]]:
        """Return the unknowns (logarithms of factors) that must be zero for one operator, and the equations between the
        operator's other unknowns.

        The unknowns are numbered tensor by tensor.
        """
        starts: dict[Value, int] = {}
        total = 0
        for value in values:
            starts[value] = total
            total += self._size(value)
        free: dict[tuple[Value, int], set[int]] = {
            (value, dim): set(range(count))
            for value in values
            for dim, count in enumerate(self.counts[value])
            if count > 1
        }
        generators: list[Row] = []
        for law in record:
            for axis in law.axes:
                self._cover(axis, free)
            if law.scale is None:
                continue
            ways = null_space([dict(enumerate(row)) for row in law.scale], range(len(law.axes))).values()
            for along in self._along(law):
                for way in ways:
                    changed = [self._unknowns(*along[k], starts, factor) for k, factor in way.items()]
                    generators.append(_total(changed))
        self.read.update((v, d, t) for v, d in free for t in range(self.counts[v][d]) if t not in free[v, d])
        # Blocks that no law of the operator mentions are free.
        generators += [self._unknowns(v, d, t, starts) for (v, d), left in free.items() for t in left]
        rows = null_space(generators, range(total)).values()
        return [k for row in rows if len(row) == 1 for k in row], [row for row in rows if len(row) > 1]

    def _cover(self, axis: Axis, free: Mapping[tuple[Value, int], set[int]]) -> None:
        for dim in axis.dims:
            left = free.get((axis.value, dim))
            if left:
                left.difference_update(left if axis.length is None else self._range(axis) or tuple(left))

    def _range(self, axis: Axis) -> list[int]:
        """Return the blocks in a range of an axis. Return an empty list if the range begins or ends within a block."""
        value, (dim,) = axis.value, axis.dims
        count = self.counts[value][dim]
        if count == 1:
            return [0] if axis.length in (None, value.shape[dim]) else []
        bounds = [block[0] for block in self.blocks[value, dim]] + [value.shape[dim]]
        stop = value.shape[dim] if axis.length is None else axis.start + axis.length
        if axis.start not in bounds or stop not in bounds:
            return []
        return [k for k in range(count) if axis.start <= bounds[k] < stop]

    def _along(self, law: Law) -> list[list[tuple[Value, int, int]]]:
        """Return the blocks that a law relates. Each row contains a tensor, an axis and a block for each axis of the
        law.
        """
        if all(len(axis.dims) == 1 for axis in law.axes):
            ranges = [self._range(axis) for axis in law.axes]
            shapes = {self._shapes(axis, found) for axis, found in zip(law.axes, ranges, strict=True)}
            if all(ranges) and len(shapes) == 1:
                where = [[(axis.value, axis.dims[0], k) for k in r] for axis, r in zip(law.axes, ranges, strict=True)]
                return [list(row) for row in zip(*where, strict=True)]
        return [[(axis.value, WHOLE, 0) for axis in law.axes]] if all(map(_is_whole, law.axes)) else []

    def _shapes(self, axis: Axis, blocks: Sequence[int]) -> Hashable:
        """Return a hashable key for the positions and the indivisible factors of the blocks of an axis.

        If all axes of one law have equal keys, their blocks are aligned.
        """
        every = self.blocks[axis.value, axis.dims[0]]
        return tuple((every[k][0] - axis.start, every[k][1]) for k in blocks if len(every) <= MOST_BLOCKS)

    def _unknowns(self, value: Value, axis: int, block: int, starts: Mapping[Value, int], factor: Rational = 1) -> Row:
        """Return how the unknowns of a tensor change if one block of an axis is multiplied by a factor."""
        counts = self.counts[value]
        numbers = _factors(counts)
        found = _block_factor(counts, axis, block)
        return {starts[value] + numbers[where]: factor * sign for where, sign in found.items()}


@cache
def _factors(counts: Counts) -> dict[Block, int]:
    """Return the blocks of a tensor that have separate factors, each with the number of its unknown (logarithm of the
    factor).
    """
    several = [axis for axis, count in enumerate(counts) if count > 1]
    found = [(axis, k) for axis in several for k in range(axis != several[0], counts[axis])]
    return {where: k for k, where in enumerate(found or [(WHOLE, 0)])}


@cache
def _block_factor(counts: Counts, axis: int, block: int) -> dict[Block, int]:
    """Return how the unknowns of a tensor change if one block of an axis, or the whole tensor, is multiplied by a
    factor.
    """
    every = _factors(counts)
    first = next(iter(every))[0]
    if axis != WHOLE and counts[axis] > 1 and (axis == first or block):
        return {(axis, block): 1}
    whole = {where: 1 for where in every if where[0] == first}
    return whole if axis == WHOLE or counts[axis] == 1 else whole | {(axis, k): -1 for k in range(1, counts[axis])}


def _block_counts(blocks: Mapping[tuple[Value, int], Sequence[SlotBlock]], value: Value) -> Counts:
    return tuple([len(blocks.get((value, dim), (None,))) or 1 for dim in range(value.ndim)])


def _total(rows: Iterable[Row]) -> Row:
    result: Row = defaultdict(int)
    for row in rows:
        for x, c in row.items():
            result[x] += c
    return {x: c for x, c in result.items() if c}


def _is_whole(axis: Axis) -> bool:
    return axis.length is None or axis.length == axis.value.shape[axis.dims[0]]


def _solved(rows: Sequence[Row], sizes: Mapping[int, int]) -> dict[int, Row]:
    """Solve linear equations: return each unknown that is not free as a linear combination of free unknowns.

    Unknowns that represent many tensors stay free. Unknowns that occur in only one equation are eliminated first,
    because their elimination changes no other equation.
    """
    where: dict[int, set[int]] = defaultdict(set)
    for k, row in enumerate(rows):
        for x in row:
            where[x].add(k)
    single = [x for x, found in where.items() if len(found) == 1]
    eliminated: list[tuple[int, Row]] = []
    left = set(range(len(rows)))
    while single:
        found = where[single.pop()]
        if not found:
            continue
        (k,) = found
        x = min((y for y in rows[k] if len(where[y]) == 1), key=sizes.__getitem__)
        eliminated.append((x, rows[k]))
        left.discard(k)
        for y in rows[k]:
            where[y].discard(k)
            if len(where[y]) == 1:
                single.append(y)
    rest = [rows[k] for k in sorted(left)]
    coupled = sorted({x for row in rest for x in row}, key=sizes.__getitem__)
    result: dict[int, Row] = {x: {} for x in coupled}  # An unknown that no solution contains is zero, not free.
    for free, vector in null_space(rest, coupled).items():
        for x, factor in vector.items():
            result[x][free] = factor
    for x, row in reversed(eliminated):
        total: Row = defaultdict(int)
        for y, c in row.items():
            for free, factor in result.get(y, {y: 1}).items() if y != x else ():
                total[free] -= quotient(c * factor, row[x])
        result[x] = {free: factor for free, factor in total.items() if factor}
    return dict(result)


def _families(freedoms: Sequence[Freedom]) -> Iterator[Mapping[int, int]]:
    """Yield the exponents of every known factor: factors for single units, and multiples of the identity in groups of
    matrices.
    """
    for freedom in freedoms:
        yield from (family for family, _ in freedom.scales)
        yield from (part.slots for part in freedom.matrices if part.kind == "linear")
        yield from (family for part in freedom.turns for family, _ in part.scales)


def _uniform(family: Mapping[int, int], params: Mapping[str, Value], slots: Slots) -> Exponents:
    """Return the exponents of a family of scales for whole tensors, if the family has the same factor for all units."""
    result: dict[tuple[str, int, int], Rational] = defaultdict(int)
    for slot, exponent in family.items():
        place = slots.places.get(slot)
        if place is not None:
            counts = _block_counts(slots.blocks, params[place.name])
            for where, sign in _block_factor(counts, place.axis, place.term).items():
                result[place.name, *where] += exponent * sign
    return {entry: e for entry, e in result.items() if e}


def _new(found: Sequence[Exponents], known: Sequence[Exponents], params: Collection[str]) -> list[Exponents]:
    """Return families of scales that are linearly independent of known families. Among all possible choices, families
    that change few tensors are returned.
    """
    numbers: dict[tuple[str, int, int], int] = {}

    def row(exponents: Exponents) -> Row:
        items = ((entry, e) for entry, e in exponents.items() if entry[0] in params)
        return {numbers.setdefault(entry, len(numbers)): e for entry, e in items}

    def count(exponents: Exponents) -> int:
        return sum(name in params for name, _, _ in exponents)

    def shorter(exponents: Exponents, others: Sequence[Exponents]) -> Exponents:
        """Subtract multiples of other families from a family of scales, as long as the subtraction reduces the number
        of nonzero exponents.
        """
        every = (
            {e: x for e in {**exponents, **other} if (x := exponents.get(e, 0) - factor * other.get(e, 0))}
            for other in others
            for factor in {quotient(exponents[e], other[e]) for e in other if e in exponents}
        )
        found = next((one for one in every if count(one) < count(exponents)), None)
        return exponents if found is None else shorter(found, others)

    found = sorted((one for one in found if count(one)), key=count)
    chosen = independent([row(one) for one in found], [row(one) for one in known])
    rest = [one for k, one in enumerate(found) if k not in chosen]
    return [_few(shorter(found[k], rest)) for k in chosen]


def _few(exponents: Exponents) -> Exponents:
    """Return the multiple of a family of scales whose exponents are whole numbers without a common divisor.

    The first exponent is positive.
    """
    scale = math.lcm(*(e.denominator for e in exponents.values()))
    divisor = math.gcd(*(int(e * scale) for e in exponents.values()))
    sign = 1 if next(iter(exponents.values())) > 0 else -1
    return {entry: int(e * scale) // divisor * sign for entry, e in exponents.items()}


class _Emitter:
    def __init__(
        self, tensors: Mapping[str, Value], groups: Sequence[Group], aliases: Mapping[str, tuple[str, ...]]
    ) -> None:
        self.tensors, self.aliases = tensors, aliases
        self.names = {group.name for group in groups}
        self.taken = {(p.parameter, p.axis) for group in groups for p in group.placements}

    def group(self, exponents: Exponents) -> Group:
        by_name: dict[str, dict[tuple[int, int], int]] = defaultdict(dict)
        for (name, axis, block), exponent in exponents.items():
            by_name[name][axis, block] = int(exponent)
        places = [place for name, own in by_name.items() for place in self._placements(name, own)]
        stem, _, last = places[0].parameter.rpartition(".")
        stem = f"{stem if stem and last in ('weight', 'bias') else places[0].parameter}.scale"
        name = next(n for n in (stem, *(f"{stem}#{k}" for k in range(2, 2 + len(self.names)))) if n not in self.names)
        self.names.add(name)
        return Group(name, 1, tuple(places), is_permuted=False, scales=1)

    def _placements(self, name: str, exponents: Mapping[tuple[int, int], int]) -> list[Placement]:
        """Return the placements of a common scale on one tensor. If axes have several blocks, the placements are on
        these axes. If no axis has several blocks, the only placement is on a single axis.
        """
        value = self.tensors[name]
        whole = exponents.get((WHOLE, 0), 0)
        several = {axis: terms(value.layouts[axis]) for axis in sorted({axis for axis, _ in exponents} - {WHOLE})}
        if len(several) == 1:
            ((axis, blocks),) = several.items()
            found = {exponents.get((axis, k), 0) for k in range(len(blocks))}
            is_first = axis == next(iter(_factors(tuple(len(terms(layout)) for layout in value.layouts))))[0]
            if is_first and len(found) == 1:
                (whole,), several = found, {}
        result = [
            Placement(name, axis, start, value.shape[axis], _repeats(factors), scale=(exponents[axis, k],))
            for axis, blocks in several.items()
            for k, (start, factors) in enumerate(blocks)
            if exponents.get((axis, k))
        ]
        if whole:
            # An axis on which no other group acts.
            axis = next((k for k in range(value.ndim) if (name, k) not in self.taken), 0)
            repeats = ((value.shape[axis], 1),) if value.ndim else ()
            result.append(Placement(name, axis, repeats=repeats, scale=(whole,)))
        return [
            replace(place, parameter=alias) for alias in self.aliases.get(name, (name,)) for place in merged(result)
        ]


def _repeats(factors: Sequence[tuple[Atom, int]]) -> tuple[tuple[int, int], ...]:
    return tuple((atom.size, stride) for atom, stride in factors if atom.size > 1)

"""A plan for computing the squared norm of networks. Parameters are sorted by the scales and matrices that act on
them.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array, csr_array

from regauge.core.act import Site
from regauge.core.families import balanced_matrices, unit_index
from regauge.core.groups import axes_of
from regauge.core.remembered import remembered
from regauge.core.scales import Direction, ScaleSite, directions, normalizers
from regauge.core.symmetry import Symmetry

Axes = tuple[int, ...]
Index = NDArray[np.int64]


@dataclass(frozen=True)
class Table:
    """Tensors on which scales act along two sets of axes. The sums of squares of one tensor form a matrix, whose rows
    and columns are multiplied by scales.

    Attributes:
        axes: For each tensor, the axes that become the rows of its matrix, and the axes that become the columns.
        shape: The number of rows and the number of columns of each matrix.
        sides: Two ranges of rows in `NormPlan.incidence`: one for the rows of all matrices, and one for their columns.
    """

    axes: Mapping[str, tuple[Axes, Axes]]
    shape: tuple[int, int]
    sides: tuple[slice, slice]


@dataclass(frozen=True)
class Pool:
    """Entries `[batch, copies, n, columns]` of tensors, which a group of matrices multiplies along the axis of length
    n.

    Scales multiply the columns of a pool.

    Attributes:
        group: The name of the group.
        sign: One if the matrix of the group acts, and minus one if its inverse acts.
        sites: The tensors and the axes on which the group acts (sites). The entries of all sites are concatenated in
            the order of `sites`.
        rows: The rows of `NormPlan.incidence` for the columns of the pool, copy by copy.
    """

    group: str
    sign: int
    sites: Sequence[tuple[str, Site]]
    rows: slice


@dataclass(frozen=True)
class Loose:
    """A tensor `[batch, values]` that fits no simpler case: matrices act on several of its axes, or on part of an axis.

    Attributes:
        name: The name of the tensor.
        slots: For each site on the tensor: the group, the sign, and the indices of the entries, `[copies, n, columns]`.
        rows: The rows of `NormPlan.incidence` for the entries of the tensor.
    """

    name: str
    slots: Sequence[tuple[str, int, Index]]
    rows: slice


class Incidence:
    """Exponents `[row, unit]`: how much the logarithm of a sum of squares (row) grows if the log scale of a unit grows
    by one.

    Attributes:
        rows: The matrix of exponents, `[row, unit]`.
        columns: The transposed matrix of exponents, `[unit, row]`.
        rising: The positive exponents, transposed.
        falling: The absolute values of the negative exponents, transposed.
        steepest: For each unit, the largest positive and the largest negative exponent over all rows. Each exponent is
            first multiplied by the number of units that scale its row.
    """

    def __init__(self, rows: csr_array, tables: Sequence[Table]) -> None:
        self.rows, self.columns = rows, rows.T.tocsr()
        reach = np.diff(rows.indptr)
        for one, other in (table.sides for table in tables):
            most = [int(reach[side].max(initial=0)) for side in (one, other)]
            reach[one] += most[1]
            reach[other] += most[0]
        self.rising, self.falling = self.columns.maximum(0), (-self.columns).maximum(0)
        self.steepest = np.zeros((2, rows.shape[1]))
        for steepest, part in zip(self.steepest, (self.rising.tocoo(), self.falling.tocoo()), strict=True):
            np.maximum.at(steepest, part.row, part.data * reach[part.col])


@dataclass(frozen=True)
class Filters:
    """A normalizer, which is a direction of scales that changes buffers. The field `moves` is the effect of the
    normalizer on all sums of squares, and `own` is its effect on the sums that no other scale changes.
    """

    direction: Direction
    moves: Incidence
    own: Incidence


@dataclass(frozen=True)
class NormPlan:
    """The compared parameters, sorted by the scales and matrices that act on them.

    Attributes:
        directions: Directions of scales (combinations of the scale families of one group), each with one unknown for
            each unit. The units of all directions are numbered consecutively.
        incidence: The change of every row for a step of each unit of each direction.
        entries: For each tensor whose sums of squares are rows of `incidence`, the axes that the sums keep. The rows of
            `entries` come first in `incidence`.
        tables: The tensors that two scales multiply.
        pools: The entries that both scales and the matrices of one group multiply.
        loose: The tensors on which matrices act along several axes, or along part of an axis.
        grams: The entries on which one group of matrices acts, but no scale.
        coupled: The groups of matrices whose best values depend on other groups or on scales.
        filters: The normalizers, which are scales that change buffers. The list `filters` is empty unless balancing may
            change buffers.
    """

    directions: tuple[Direction, ...]
    incidence: Incidence
    entries: Mapping[str, Axes]
    tables: Sequence[Table]
    pools: Sequence[Pool]
    loose: Sequence[Loose]
    grams: Mapping[str, Sequence[tuple[str, Site]]]
    coupled: tuple[str, ...]
    filters: Sequence[Filters]


@remembered
def plan_of(symmetry: Symmetry, buffers: Literal["move", "keep"]) -> NormPlan:
    """Return the plan for computing the squared norm of networks under a symmetry.

    All sizes of the symmetry's groups must be known.
    """
    shapes, linear, scaled = symmetry.shapes, balanced_matrices(symmetry), directions(symmetry, buffers)
    rows = _Rows(symmetry)
    placed: dict[str, list[ScaleSite]] = {}
    for place in (place for direction in scaled for place in direction.places):
        placed.setdefault(place.name, []).append(place)
    grams: dict[str, list[tuple[str, Site]]] = {name: [] for name in linear}
    pooled: dict[tuple[str, int], list[tuple[str, Site]]] = {}
    several: dict[str, list[Site]] = {}
    mixed = dict.fromkeys(name for names in linear.values() for name in names)
    for name in mixed:
        sites = [site for site in symmetry.sites[name] if site.group.name in linear]
        is_covered = sum(len(site.positions) for site in sites) == shapes[name][sites[0].placement.axis]
        if len({site.placement.axis for site in sites}) > 1 or (name in placed and not is_covered):
            several[name] = sites
            continue
        for site in sites:
            own = pooled.setdefault((site.group.name, _sign(site)), []) if name in placed else None
            (grams[site.group.name] if own is None else own).append((name, site))
    entries, shaped = dict[str, Axes](), dict[tuple[int, int], dict[str, tuple[Axes, Axes]]]()
    for name in (name for name in placed if name not in mixed):
        fields = [*dict.fromkeys(place.axes for place in placed[name])]
        if len(fields) == 2 and not {*fields[0]} & {*fields[1]}:
            lengths = [math.prod(shapes[name][axis] for axis in axes) for axes in fields]
            shaped.setdefault((lengths[0], lengths[1]), {})[name] = (fields[0], fields[1])
        else:
            entries[name] = tuple(sorted({axis for axes in fields for axis in axes}))
            rows.add_all([(name, entries[name])])
    tables = []
    for shape, each in shaped.items():
        sides = [rows.add_all((name, axes[k]) for name, axes in each.items()) for k in (0, 1)]
        tables.append(Table(each, shape, (sides[0], sides[1])))
    pools = [Pool(group, sign, sites, rows.add_columns(sites)) for (group, sign), sites in pooled.items()]
    loose = [
        Loose(
            name,
            [(site.group.name, _sign(site), _index(symmetry, name, site)) for site in sites],
            rows.add_all([(name, tuple(range(len(shapes[name]))))]),
        )
        for name, sites in several.items()
    ]
    coupled = dict.fromkeys([pool.group for pool in pools] + [slot[0] for one in loose for slot in one.slots])
    filters = [
        Filters(each, *(Incidence(rows.exponents([replace(each, places=p)]), tables) for p in (each.places, each.own)))
        for each in (normalizers(symmetry) if buffers == "move" else ())
    ]
    incidence = Incidence(rows.exponents(scaled), tables)
    return NormPlan(scaled, incidence, entries, tables, pools, loose, grams, tuple(coupled), filters)


def _sign(site: Site) -> int:
    return -1 if site.placement.is_inverse else 1


def _index(symmetry: Symmetry, name: str, site: Site) -> Index:
    """Return the flat indices of the entries on which a group acts in a tensor, `[copies, n, columns]`."""
    index = unit_index(symmetry, name, site)
    found: Index = index.reshape(-1, site.group.size, index.shape[1]).numpy()
    return found


class _Rows:
    """A growing list of sums of squares (rows). All entries in one sum of squares are multiplied by the same scales.

    Each row is one entry of a tensor of sums, and has an index along each axis over which the tensor was not summed.
    """

    def __init__(self, symmetry: Symmetry) -> None:
        self._symmetry, self._count = symmetry, 0
        self._parts: list[tuple[str, Mapping[int, Index], Index]] = []

    def add_all(self, sums: Iterable[tuple[str, Axes]]) -> slice:
        """Add rows for tensors whose squares are summed over all axes except the given ones."""
        first = self._count
        for name, axes in sums:
            shape = axes_of(self._symmetry.shapes[name])
            lengths = [shape[axis] for axis in axes]
            where = np.indices(lengths).reshape(len(axes), -1)
            numbers = np.arange(self._count, self._count + math.prod(lengths))
            self._parts.append((name, dict(zip(axes, where, strict=True)), numbers))
            self._count += len(numbers)
        return slice(first, self._count)

    def add_columns(self, sites: Sequence[tuple[str, Site]]) -> slice:
        """Add a row for each column of the entries on which groups act, ordered by copy and, within a copy, by
        tensor.
        """
        first = self._count
        columns = [_index(self._symmetry, name, site)[:, 0] for name, site in sites]
        self._count += sum(each.size for each in columns)
        numbers = np.arange(first, self._count).reshape(len(columns[0]), -1)
        ends = np.cumsum([each.shape[1] for each in columns])
        for (name, _), each, own in zip(sites, columns, np.split(numbers, ends[:-1], axis=1), strict=True):
            where = np.unravel_index(each.flatten(), self._symmetry.shapes[name])
            self._parts.append((name, dict(enumerate(where)), own.flatten()))
        return slice(first, self._count)

    def exponents(self, directions: Sequence[Direction]) -> csr_array:
        """Return the exponents with which scales multiply all rows.

        A scale affects only rows that have an index along each axis that determines the unit of the scale.
        """
        placed: dict[str, list[tuple[int, ScaleSite]]] = {}
        ends = np.cumsum([0, *(direction.count for direction in directions)])
        for first, direction in zip(ends, directions, strict=False):
            for place in direction.places:
                placed.setdefault(place.name, []).append((int(first), place))
        found: list[tuple[Index, Index, float]] = []
        for name, where, rows in self._parts:
            for first, place in placed.get(name, []):
                if not {*place.axes} <= where.keys():
                    continue
                *others, own = place.axes
                position = np.full(axes_of(self._symmetry.shapes[name])[own], -1)
                position[place.positions.numpy()] = np.arange(len(place.positions))
                chosen = position[where[own]]
                is_moved = chosen >= 0
                lengths = [self._symmetry.shapes[name][axis] for axis in others]
                index = place.index.expand(*lengths, -1).numpy()
                units = index[(*(where[axis][is_moved] for axis in others), chosen[is_moved])]
                found.append((rows[is_moved], first + units, place.exponent))
        rows, units = (np.concatenate([np.zeros(0, int), *each]) for each in ([f[k] for f in found] for k in (0, 1)))
        exponents = np.repeat([exponent for *_, exponent in found], [len(each) for each, *_ in found])
        return csr_array(coo_array((exponents, (rows, units)), (self._count, int(ends[-1]))))

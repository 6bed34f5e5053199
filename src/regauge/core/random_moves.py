"""Random elements of one symmetry that move populations: compiled once, drawn and applied in a few operations."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int, Num
from torch import Tensor

from regauge.core.act import Site
from regauge.core.movable import VALUES
from regauge.core.params import Params
from regauge.core.random_draws import Draws, blank
from regauge.core.symmetry import Symmetry

LONG_ROW = 16
"""From this many values behind the last axis that a group acts on, whole rows are moved."""
SMALL = 256
"""Tensors of up to so many values are moved together, column by column."""
AT_ONCE = 1 << 19
"""Values that are moved at once: with their places, about what a cache holds."""
LARGEST = 2**31 - 1
"""Places that 32 bits can count."""
WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Whole numbers of so many bytes, as which numpy sees any value."""


@dataclass(frozen=True, eq=False)
class _Term:
    """Columns of a table, spread over some axes of a tensor; `step` is what a displacement by one unit means there."""

    columns: Int[Tensor, " columns"] | slice
    shape: tuple[int, ...]
    step: int = 0

    def of(self, table: Num[Tensor, "models width"]) -> Tensor:
        """`[models, *shape]`."""
        picked = table[:, self.columns] if isinstance(self.columns, slice) else table.index_select(1, self.columns)
        return picked.view(len(table), *self.shape)

    def spread(self, shape: tuple[int, ...], width: int) -> Int[Tensor, " values"]:
        """The column of each value of a tensor."""
        return torch.arange(width)[self.columns].view(self.shape).expand(shape).reshape(-1)


@dataclass(frozen=True, eq=False)
class _Piece:
    """A tensor, counted in rows of `run` values, and what moves it."""

    name: str
    shape: tuple[int, ...]
    run: int
    moves: tuple[_Term, ...]
    factors: tuple[_Term, ...]
    shifts: tuple[_Term, ...]

    @property
    def size(self) -> int:
        """Number of rows."""
        return math.prod(self.shape)

    def unmoved(self, first: Int[Tensor, " models"]) -> tuple[tuple[tuple[int, ...], Tensor], ...]:
        """The places of rows where nothing moves, as tables whose sum it is; `first` is that of each network."""
        (shape, counted), *others = self._counted
        return (shape, counted + first.view(-1, *[1] * len(self.shape))), *others

    def places(self, table: Int[Tensor, "models width"], unmoved: Sequence[tuple[tuple[int, ...], Tensor]]) -> Tensor:
        """Where each row comes from, `[models, *shape]`."""
        whole = None
        for shape, total in unmoved:
            for term in self.moves:
                if term.shape == shape:
                    total = torch.add(total, term.of(table), alpha=term.step)
            whole = total if whole is None else whole + total
        assert whole is not None
        return whole

    def multiply(self, values: Tensor, table: Float[Tensor, "models width"] | None) -> None:
        """Multiply rows, `[models, *shape, ...]`, in place."""
        if table is not None:
            for term in self.factors:
                values *= _like(values, term.of(table))

    def add(self, values: Tensor, table: Float[Tensor, "models width"] | None) -> None:
        """Add what half periods add, in place."""
        if table is not None:
            for term in self.shifts:
                values += _like(values, term.of(table))

    @cached_property
    def _counted(self) -> tuple[tuple[tuple[int, ...], Tensor], ...]:
        """The places of unmoved rows as a sum of small tables: over the axes of each term, and over those left."""
        left, tables = [axis for axis, n in enumerate(self.shape) if n > 1], []
        for shape in dict.fromkeys(term.shape for term in self.moves):
            mine = [axis for axis in left if shape[axis] > 1]
            left = [axis for axis in left if axis not in mine]
            tables.append((shape, self._count(mine)))
        return (*tables, ((), self._count(left))) if left or not tables else tuple(tables)

    def _count(self, axes: Sequence[int]) -> Tensor:
        """Places along some axes, with ones in the shape for the others."""
        total = torch.zeros([1] * (1 + len(self.shape)), dtype=torch.int32)
        for axis in axes:
            steps = torch.arange(self.shape[axis], dtype=torch.int32) * math.prod(self.shape[axis + 1 :])
            total = total + steps.view([1] + [-1 if k == axis else 1 for k in range(len(self.shape))])
        return total


@dataclass(frozen=True, eq=False)
class _Layer:
    """For each value of small tensors, laid end to end, a column of a table, and the step of displacements."""

    columns: Int[Tensor, " values"]
    steps: Int[Tensor, " values"]


class _Values:
    """Tensors of one dtype that are moved value by value: the small ones together, then each larger one."""

    def __init__(self, pieces: Sequence[_Piece], draws: Draws) -> None:
        small = [piece for piece in pieces if piece.size <= SMALL]
        self.large = [piece for piece in pieces if piece.size > SMALL]
        self.pieces = [*small, *self.large]
        self.starts = [0]
        for piece in self.pieces:
            self.starts.append(self.starts[-1] + piece.size)
        self.small, self.border, self.total = small, sum(piece.size for piece in small), self.starts[-1]
        self.moves = _layers(small, lambda piece: piece.moves, blank(draws.moves))
        self.factors = _layers(small, lambda piece: piece.factors, blank(draws.factors))
        self.shifts = _layers(small, lambda piece: piece.shifts, blank(draws.shifts))
        self._unmoved: tuple[Any, Any] = (None, None)

    def places(
        self, table: Int[Tensor, "models width"], stride: int, offsets: Sequence[int]
    ) -> Int[Tensor, "models values"]:
        """Where each value comes from, in networks that follow one another at a distance."""
        key = (len(table), stride, tuple(offsets))
        known, unmoved = self._unmoved
        if known != key:
            unmoved = self._count(*key)
            self._unmoved = (key, unmoved)
        small, large = unmoved
        out = torch.empty(len(table), self.total, dtype=torch.int32)
        for layer in self.moves:
            small = small + table.index_select(1, layer.columns) * layer.steps
        out[:, : self.border] = small
        for piece, start, one in zip(self.large, self.starts[len(self.small) :], large, strict=False):
            out[:, start : start + piece.size].view(-1, *piece.shape).copy_(piece.places(table, one))
        return out

    def change(
        self,
        values: Tensor,
        factors: Float[Tensor, "models factors"] | None,
        shifts: Float[Tensor, "models shifts"] | None,
    ) -> None:
        """Multiply values by their factors, and add what half periods add, in place."""
        small = values[:, : self.border]
        if factors is not None:
            for layer in self.factors:
                small *= _like(values, factors.index_select(1, layer.columns))
        if shifts is not None:
            for layer in self.shifts:
                small += _like(values, shifts.index_select(1, layer.columns))
        for piece, start in zip(self.large, self.starts[len(self.small) :], strict=False):
            whole = values[:, start : start + piece.size].view(-1, *piece.shape)
            piece.multiply(whole, factors)
            piece.add(whole, shifts)

    def _count(self, models: int, stride: int, offsets: Sequence[int]) -> tuple[Tensor, list[Any]]:
        """The places of values where nothing moves: of all small tensors, and of each larger one."""
        first = torch.arange(models, dtype=torch.int32) * stride
        begins = [torch.arange(o, o + p.size, dtype=torch.int32) for o, p in zip(offsets, self.small, strict=False)]
        small = first.unsqueeze(1) + torch.cat([*begins, torch.zeros(0, dtype=torch.int32)])
        large = zip(self.large, offsets[len(self.small) :], strict=False)
        return small, [piece.unmoved(first + offset) for piece, offset in large]


class RandomMoves:
    """Random elements without matrices, as `symmetry.random` draws them, for each network of a population.

    What follows from the symmetry is found once. A batch then takes one draw and one sort for all permutations; where
    values come from is a sum of small tables over the axes of each tensor, and one gather moves all.

    Args:
        symmetry: With every size known.
        parts: Some of "permutation", "sign", "scale" and "shift".
    """

    def __init__(self, symmetry: Symmetry, parts: Sequence[str]) -> None:
        self.symmetry = symmetry
        self._draws = Draws(symmetry, parts)
        self._known: dict[tuple[str, ...], tuple[tuple[_Piece, ...], _Values]] = {}

    def __call__(self, params: Mapping[str, Tensor], sources: Sequence[tuple[int, torch.Generator]]) -> Params:
        """The networks, each moved by an element of its own.

        Args:
            params: With one leading model axis.
            sources: Numbers of networks that follow one another, and the source of chance of each such batch; what a
                batch becomes does not depend on the others.
        """
        drawn = self._draws.draw(sources)
        by_kind: dict[tuple[torch.dtype, torch.device], list[str]] = {}
        for name in self.symmetry.sites:
            if name in params:
                by_kind.setdefault((params[name].dtype, params[name].device), []).append(name)
        moved = dict(params)
        for (dtype, _), names in by_kind.items():
            work = torch.float64 if dtype == torch.float64 else torch.float32
            factors = drawn.factors(work) if dtype in VALUES else None
            shifts = drawn.shifts.to(work) if dtype in VALUES and drawn.shifts is not None else None
            rows, values = self._compile(tuple(names))
            for piece in rows:
                moved[piece.name] = _move_rows(piece, params[piece.name], drawn.displacements, factors, shifts)
            if values.pieces:
                moved |= _move_values(values, params, drawn.displacements, factors, shifts)
        return moved

    def _compile(self, names: tuple[str, ...]) -> tuple[tuple[_Piece, ...], _Values]:
        """Tensors that are moved by rows, and those that are moved by values."""
        if names not in self._known:
            pieces = [piece for piece in map(self._piece, names) if piece.moves or piece.factors or piece.shifts]
            rows = tuple(piece for piece in pieces if piece.run > 1)
            self._known[names] = rows, _Values([piece for piece in pieces if piece.run == 1], self._draws)
        return self._known[names]

    def _piece(self, name: str) -> _Piece:
        shape, sites = tuple(self.symmetry.shapes[name]), self.symmetry.sites[name]
        last = 1 + max(site.placement.axis for site in sites)
        run = math.prod(shape[last:])
        shape, run = (shape[:last], run) if run >= LONG_ROW else (shape, 1)
        moves, factors, shifts = [], [], []
        for site in sites:
            place, draws = site.placement, self._draws
            if site.group.name in draws.moves:
                step = place.stride * math.prod(shape[place.axis + 1 :])
                columns = draws.moves[site.group.name]
                moves.append(self._term(site, shape, columns, blank(draws.moves), step))
            factor, shift = draws.factor_of(site.group, place), draws.shift_of(site.group, place)
            if factor is not None:
                factors.append(self._term(site, shape, draws.factors[factor], blank(draws.factors)))
            if shift is not None:
                shifts.append(self._term(site, shape, draws.shifts[shift], blank(draws.shifts)))
        return _Piece(name, shape, run, tuple(moves), tuple(factors), tuple(shifts))

    def _term(self, site: Site, shape: tuple[int, ...], columns: slice, blank: int, step: int = 0) -> _Term:
        """Where a site acts the columns of its units, and elsewhere the one that changes nothing."""
        spread = tuple(n if axis in site.axes else 1 for axis, n in enumerate(shape))
        if not site.bases and site.is_plain and site.group.size == shape[site.placement.axis]:
            return _Term(columns, spread, step)
        slots, copies = site.units, site.group.size
        for index, base in zip(reversed(site.base_index), reversed(site.group.within), strict=True):
            slots, copies = slots + index * copies, copies * self.symmetry[base].size
        whole = torch.full([shape[axis] for axis in site.axes], blank)
        whole[..., site.positions] = slots + columns.start
        order = sorted(range(whole.ndim), key=lambda k: site.axes[k])
        return _Term(whole.permute(order).reshape(-1), spread, step)


def _move_values(
    values: _Values,
    params: Mapping[str, Tensor],
    displacements: Int[Tensor, "models moves"],
    factors: Float[Tensor, "models factors"] | None,
    shifts: Float[Tensor, "models shifts"] | None,
) -> Params:
    """Move tensors value by value, some networks at a time."""
    source, stride, offsets = _lay_out([params[piece.name] for piece in values.pieces], values.starts)
    models, work = len(displacements), next((t.dtype for t in (factors, shifts) if t is not None), source.dtype)
    out = source.new_empty(models, values.total)
    step = max(1, min(models, AT_ONCE // values.total, LARGEST // max(1, stride)))
    for start in range(0, models, step):
        some, first = slice(start, start + step), start * stride
        places = values.places(displacements[some], stride, offsets).view(-1).to(source.device)
        torch.index_select(source[first:], 0, places, out=out[some].view(-1))
        made = out[some].to(work)
        values.change(made, None if factors is None else factors[some], None if shifts is None else shifts[some])
        if work != out.dtype:
            out[some] = made.to(out.dtype)
    ends = zip(values.pieces, values.starts, values.starts[1:], strict=False)
    return {piece.name: out[:, start:end].view(params[piece.name].shape) for piece, start, end in ends}


def _lay_out(tensors: Sequence[Tensor], starts: Sequence[int]) -> tuple[Tensor, int, Sequence[int]]:
    """Memory with all values, by how much networks are apart there, and where each tensor of the first one begins.

    Networks that were read from a store lie in one block of memory, which is not copied.
    """
    first, models = tensors[0], len(tensors[0])
    storage, stride = first.untyped_storage().data_ptr(), first.stride(0)
    if all(t.stride(0) == stride and _is_dense(t) and t.untyped_storage().data_ptr() == storage for t in tensors):
        begins = [int(tensor.storage_offset()) for tensor in tensors]
        low = min(begins)
        end = max(begin + tensor[0].numel() for begin, tensor in zip(begins, tensors, strict=True))
        return first.as_strided(((models - 1) * stride + end - low,), (1,), low), stride, [b - low for b in begins]
    return torch.cat([tensor.reshape(models, -1) for tensor in tensors], 1).view(-1), starts[-1], starts


def _is_dense(tensor: Tensor) -> bool:
    """Whether the values of each network follow one another."""
    stride, wanted = tensor.stride(), 1
    for axis in range(tensor.ndim - 1, 0, -1):
        if stride[axis] != wanted and tensor.shape[axis] != 1:
            return False
        wanted *= tensor.shape[axis]
    return True


def _move_rows(
    piece: _Piece,
    tensor: Tensor,
    displacements: Int[Tensor, "models moves"],
    factors: Float[Tensor, "models factors"] | None,
    shifts: Float[Tensor, "models shifts"] | None,
) -> Tensor:
    """Move a tensor row by row."""
    models, work = len(tensor), next((t.dtype for t in (factors, shifts) if t is not None), tensor.dtype)
    made = tensor.reshape(models, piece.size, piece.run)
    if piece.moves:
        places = piece.places(displacements, piece.unmoved(torch.zeros(models, dtype=torch.int32)))
        made = _take_rows(made, places.expand(models, *piece.shape).reshape(models, -1).long()).to(work)
    else:
        made = made.to(work, copy=True, memory_format=torch.contiguous_format)
    whole = made.view(models, *piece.shape, piece.run)
    piece.multiply(whole, factors)
    piece.add(whole, shifts)
    return made.to(tensor.dtype).view(tensor.shape)


def _like(values: Tensor, table: Tensor) -> Tensor:
    """A table on the device of values, with an axis of length one where these have rows."""
    table = table.to(values.device)
    return table.unsqueeze(-1) if values.ndim > table.ndim else table


def _take_rows(x: Tensor, places: Int[Tensor, "models rows"]) -> Tensor:
    """Rows `x[model, places[model]]`; numpy copies rows that do not follow one another several times as fast."""
    models = torch.arange(len(x)).unsqueeze(1)
    whole = WHOLE.get(x.itemsize)
    if x.device.type != "cpu" or whole is None:
        return x[models.to(x.device), places.to(x.device)]
    return torch.from_numpy(x.view(whole).numpy()[models.numpy(), places.numpy()]).view(x.dtype)


def _layers(
    pieces: Sequence[_Piece], terms_of: Callable[[_Piece], tuple[_Term, ...]], blank: int
) -> tuple[_Layer, ...]:
    """The first term of each small tensor, the second one of each, and so on."""
    layers = []
    for k in range(max((len(terms_of(piece)) for piece in pieces), default=0)):
        columns, steps = [], []
        for piece in pieces:
            term = terms_of(piece)[k] if k < len(terms_of(piece)) else None
            here = torch.full((piece.size,), blank) if term is None else term.spread(piece.shape, blank + 1)
            columns.append(here)
            steps.append(torch.full((piece.size,), 0 if term is None else term.step, dtype=torch.int32))
        layers.append(_Layer(torch.cat(columns), torch.cat(steps)))
    return tuple(layers)

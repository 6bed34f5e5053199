"""Random elements applied entry by entry to those tensors of a population that have short rows."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate, groupby

import torch
from jaxtyping import Float, Int, Num
from torch import Tensor

from regauge.core.moving.moved_tensors import MovedTensor, Term, Unmoved
from regauge.core.moving.random_draws import Drawn, Draws, ElementRun, blank, portions
from regauge.core.params import Params

SMALL = 256
"""Consecutive tensors with at most this many entries are transformed together, as one tensor."""
VALUES_AT_ONCE = 1 << 19
"""The number of entries that are gathered at once.

The gathered entries, with their indices and factors, almost fill a cache of the processor."""
LARGEST_PLACE = 2**31 - 1
"""The largest index that fits in 32 bits."""


@dataclass(frozen=True, eq=False)
class _Layer:
    """The positions of one random value for each entry of concatenated small tensors. The field `columns` gives the
    column of the table of random values. The field `steps` gives by how many positions an entry moves if its unit moves
    by one position.
    """

    columns: Int[Tensor, "1 values"]
    steps: Int[Tensor, " values"]

    def of(self, table: Num[Tensor, "models width"]) -> Num[Tensor, "models values"]:
        return table.gather(1, self.columns.expand(len(table), -1))


class _Small:
    """Consecutive small tensors, which are transformed as one tensor."""

    def __init__(self, tensors: Sequence[MovedTensor], draws: Draws) -> None:
        self._sizes = [tensor.size for tensor in tensors]
        self._moves = _layers(tensors, lambda t: t.moves, blank(draws.moves))
        self._factors = _layers(tensors, lambda t: t.factors, blank(draws.factors))
        self.size = sum(self._sizes)

    def unmoved(self, first: Int[Tensor, " models"], begins: Sequence[int]) -> Unmoved:
        places = [torch.arange(b, b + n, dtype=torch.int32) for b, n in zip(begins, self._sizes, strict=True)]
        return (((), first.unsqueeze(1) + torch.cat(places)),)

    def place(self, table: Int[Tensor, "models moves"], unmoved: Unmoved, out: Int[Tensor, "models values"]) -> None:
        total = unmoved[0][1][: len(table)]
        for layer in self._moves:
            total = torch.addcmul(total, layer.of(table), layer.steps)
        out.copy_(total)

    def multiply(self, table: Float[Tensor, "models factors"], out: Float[Tensor, "models values"]) -> None:
        if not self._factors:
            out.fill_(1)
        for k, layer in enumerate(self._factors):
            out.copy_(layer.of(table)) if k == 0 else out.mul_(layer.of(table))


class _Large:
    """A large tensor that is transformed entry by entry.

    The source index of an entry is a sum of tables, one for each axis. The factor of an entry is a product of tables,
    one for each axis.
    """

    def __init__(self, tensor: MovedTensor) -> None:
        self._tensor, self.size = tensor, tensor.size

    def unmoved(self, first: Int[Tensor, " models"], begins: Sequence[int]) -> Unmoved:
        return self._tensor.unmoved(first + begins[0])

    def place(self, table: Int[Tensor, "models moves"], unmoved: Unmoved, out: Int[Tensor, "models values"]) -> None:
        self._tensor.place(table, unmoved, out.view(-1, *self._tensor.shape))

    def multiply(self, table: Float[Tensor, "models factors"], out: Float[Tensor, "models values"]) -> None:
        self._tensor.multiply(table, out.view(-1, *self._tensor.shape))


@dataclass(frozen=True, eq=False)
class _Memory:
    """The tensors of several networks in one block of memory.

    Attributes:
        values: All entries, beginning with the first entry of the first network.
        stride: The distance between the first entries of consecutive networks.
        begins: The position at which each tensor begins within the first network.
        tensors: Views of the block, one for each tensor.
    """

    values: Num[Tensor, " values"]
    stride: int
    begins: list[int]
    tensors: list[Num[Tensor, "models *shape"]]

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> "_Memory":
        """Return the block of memory that holds all tensors.

        If the tensors lie in several blocks, copy them to a new one.

        Tensors that were read from a store lie in one block.
        """
        first, models = tensors[0], len(tensors[0])
        storage, stride = first.untyped_storage().data_ptr(), first.stride(0)
        if all(t.stride(0) == stride and _is_dense(t) and t.untyped_storage().data_ptr() == storage for t in tensors):
            places = [int(tensor.storage_offset()) for tensor in tensors]
            low, high = min(places), max(place + t[0].numel() for place, t in zip(places, tensors, strict=True))
            values = first.as_strided(((models - 1) * stride + high - low,), (1,), low)
            return cls(values, stride, [place - low for place in places], list(tensors))
        block = torch.cat([tensor.reshape(models, -1) for tensor in tensors], 1)
        begins = [0, *accumulate(tensor[0].numel() for tensor in tensors)]
        views = [block[:, a:b].view(t.shape) for a, b, t in zip(begins, begins[1:], tensors, strict=False)]
        return cls(block.view(-1), begins[-1], begins[:-1], views)

    def runs(self, sizes: Sequence[int]) -> list[tuple[int, int, Num[Tensor, "models run"]]]:
        """Return runs of tensors that are consecutive in memory.

        Each run has a start and an end, counted in entries of all concatenated tensors, and a view of the memory.
        """
        runs, models = list[tuple[int, int, Tensor]](), len(self.tensors[0])
        ends = [begin + size for begin, size in zip(self.begins, sizes, strict=True)]
        first = start = 0
        for k in range(len(sizes)):
            if k + 1 == len(sizes) or self.begins[k + 1] != ends[k]:
                length = ends[k] - self.begins[first]
                view = self.values.as_strided(
                    (models, length), (self.stride, 1), self.values.storage_offset() + self.begins[first]
                )
                runs.append((start, start + length, view))
                first, start = k + 1, start + length
        return runs


class MovedValues:
    """Tensors of one dtype that are transformed entry by entry."""

    def __init__(self, tensors: Sequence[MovedTensor], draws: Draws) -> None:
        self.tensors, self._sizes = tensors, [tensor.size for tensor in tensors]
        self._parts: list[tuple[slice, _Small | _Large]] = []
        for is_small, found in groupby(range(len(tensors)), lambda k: tensors[k].size <= SMALL):
            some = list(found)
            if is_small:
                self._parts.append((slice(some[0], some[-1] + 1), _Small(tensors[some[0] : some[-1] + 1], draws)))
            else:
                self._parts += [(slice(k, k + 1), _Large(tensors[k])) for k in some]

    def move(
        self,
        params: Mapping[str, Tensor],
        shares: Sequence[ElementRun],
        drawn: Drawn,
        factors: Float[Tensor, "elements factors"] | None,
        shifts: Float[Tensor, "elements shifts"] | None,
    ) -> Params:
        """Transform tensors of networks, in place if the tensors lie in one block of memory."""
        memory, total = _Memory.of([params[tensor.name] for tensor in self.tensors]), sum(self._sizes)
        source, stride, runs = memory.values, memory.stride, memory.runs(self._sizes)
        elements = max(share.elements for share in shares)
        step = -(
            -elements // -(-elements // max(1, min(VALUES_AT_ONCE // total, LARGEST_PLACE // stride)))
        )  # portions of equal size
        firsts = torch.arange(step, dtype=torch.int32) * stride
        unmoved = [part.unmoved(firsts, memory.begins[which]) for which, part in self._parts]
        places = torch.empty(step, total, dtype=torch.int32)
        products = None if factors is None else torch.empty(step, total, dtype=factors.dtype)
        buffer = source.new_empty(step, total)
        for share, some, start in portions(shares, step):
            size = some.stop - some.start
            self._place(drawn.displacements[some], unmoved, places[:size])
            if factors is not None and products is not None:
                self._multiply(factors[some], products[:size])
            added = [] if shifts is None else self._add(shifts[some], memory)
            there = places.view(-1).to(source.device)
            by = None if products is None else products.to(source.device)
            made = buffer
            for first, n in share.networks(some, start):
                if n < len(made):  # the last portion, or the last batch
                    made, there, by = made[:n], there[: n * total], None if by is None else by[:n]
                    added = [(home, shift[:n]) for home, shift in added]
                torch.index_select(source[first * stride :], 0, there, out=made.view(-1))
                for at, end, home in runs:
                    new, changed = home.narrow(0, first, n), made if end - at == total else made[:, at:end]
                    if by is None:
                        new.copy_(changed)
                    else:
                        torch.mul(changed, by if end - at == total else by[:, at:end], out=new)
                for home, shift in added:
                    home.narrow(0, first, n).add_(shift)
        return {one.name: tensor for one, tensor in zip(self.tensors, memory.tensors, strict=True)}

    def _place(self, table: Int[Tensor, "some moves"], unmoved: Sequence[Unmoved], out: Tensor) -> None:
        """Write to `out`, for each entry of consecutive networks, the index of the entry from which it is taken."""
        start = 0
        for (_, part), known in zip(self._parts, unmoved, strict=True):
            part.place(table, known, out[:, start : start + part.size])
            start += part.size

    def _multiply(self, table: Float[Tensor, "some factors"], out: Tensor) -> None:
        """Write the product of all factors of each entry to `out`."""
        start = 0
        for _, part in self._parts:
            part.multiply(table, out[:, start : start + part.size])
            start += part.size

    def _add(self, table: Float[Tensor, "some shifts"], memory: _Memory) -> list[tuple[Tensor, Tensor]]:
        """Return the tensors to which half periods add a constant, each with this constant."""
        return [
            (home, reduce(torch.add, [term.of(table) for term in tensor.shifts]).to(home.device))
            for tensor, home in zip(self.tensors, memory.tensors, strict=True)
            if tensor.shifts
        ]


def _is_dense(tensor: Tensor) -> bool:
    """Return whether the entries of each network are consecutive in memory."""
    stride, wanted = tensor.stride(), 1
    for axis in range(tensor.ndim - 1, 0, -1):
        if stride[axis] != wanted and tensor.shape[axis] != 1:
            return False
        wanted *= tensor.shape[axis]
    return True


def _layers(
    tensors: Sequence[MovedTensor], terms_of: Callable[[MovedTensor], tuple[Term, ...]], blank: int
) -> tuple[_Layer, ...]:
    """Return layers, where layer k holds the k-th term of every small tensor."""
    layers = []
    for k in range(max((len(terms_of(tensor)) for tensor in tensors), default=0)):
        columns, steps = [], []
        for tensor in tensors:
            term = terms_of(tensor)[k] if k < len(terms_of(tensor)) else None
            here = torch.full((tensor.size,), blank) if term is None else term.spread(tensor.shape, blank + 1)
            columns.append(here)
            steps.append(torch.full((tensor.size,), 0 if term is None else term.step, dtype=torch.int32))
        layers.append(_Layer(torch.cat(columns).unsqueeze(0), torch.cat(steps)))
    return tuple(layers)

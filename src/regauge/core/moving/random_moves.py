"""Random elements of one symmetry for whole populations: compiled once, then sampled and applied together."""

from collections.abc import Mapping, Sequence
from functools import reduce

import torch
from jaxtyping import Float, Int, Num
from torch import Tensor

from regauge.core.behind_gains import plus
from regauge.core.moving.moved_tensors import MovedTensor, moved_tensors
from regauge.core.moving.moved_values import MovedValues
from regauge.core.moving.random_draws import Drawn, Draws, ElementRun, Source, portions, shares_of
from regauge.core.params import VALUES, Params
from regauge.core.symmetry import Symmetry

ROW_VALUES_AT_ONCE = 1 << 17
"""The number of entries that are gathered at once. The gathered entries fit in a cache of the processor."""
LONG = 64
"""Rows of at least this length are gathered by network and row.

Shorter rows are gathered from the concatenated rows of all networks.
"""
WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes, by size in bytes. Numpy copies entries of any dtype as integers of the same size."""


class RandomMoves:
    """Random elements without matrices for each network of a population, sampled like `Symmetry.random` does.

    Tables that depend only on the symmetry are computed once. Each call samples one random tensor, and one sort gives
    all permutations. The source index of an entry is a sum of small tables over the axes of its tensor. One gather
    moves all entries.

    Args:
        symmetry: The symmetry. All sizes of groups must be known.
        parts: Some of the names "permutation", "sign", "scale" and "shift".
    """

    def __init__(self, symmetry: Symmetry, parts: Sequence[str]) -> None:
        self.symmetry = symmetry
        self._draws = Draws(symmetry, parts)
        self._known: dict[tuple[str, ...], tuple[list[MovedTensor], MovedValues]] = {}

    def __call__(self, params: Mapping[str, Tensor], sources: Sequence[Source]) -> Params:
        """Return the networks after a random element has acted on each of them.

        The elements within a batch are independent of each other.

        Args:
            params: The networks, with one leading model axis. The memory of the networks is reused, and their entries
                are undefined after the call.
            sources: For each generator, the sizes of the consecutive batches that share its elements. Element k of a
                generator acts on network k of each of its batches.
        """
        for name, number in self.symmetry.added.items():
            if name in params:
                params[name].copy_(plus(params[name], number))
        shares = shares_of(sources)
        drawn = self._draws.draw([(max(counts), generator) for counts, generator in sources])
        by_kind: dict[tuple[torch.dtype, torch.device], list[str]] = {}
        for name in params:  # in the order of the tensors in a store
            if name in self.symmetry.sites:
                by_kind.setdefault((params[name].dtype, params[name].device), []).append(name)
        moved = dict(params)
        for (dtype, _), names in by_kind.items():
            work = torch.float64 if dtype == torch.float64 else torch.float32
            factors = drawn.factors(work) if dtype in VALUES else None
            shifts = drawn.shifts.to(work) if dtype in VALUES and drawn.shifts is not None else None
            rows, values = self._compile(tuple(names))
            for tensor in rows:
                move_rows(tensor, params[tensor.name], shares, drawn, factors, shifts)
            if values.tensors:
                moved |= values.move(params, shares, drawn, factors, shifts)
        for name, number in self.symmetry.added.items():
            if name in moved:
                moved[name].copy_(plus(moved[name], number, -1))
        return moved

    def _compile(self, names: tuple[str, ...]) -> tuple[list[MovedTensor], MovedValues]:
        """Return the tensors that are transformed row by row, and the tensors that are transformed entry by entry."""
        if names not in self._known:
            found = moved_tensors(self.symmetry, self._draws, names)
            values = MovedValues([tensor for tensor in found if tensor.run == 1], self._draws)
            self._known[names] = [tensor for tensor in found if tensor.run > 1], values
        return self._known[names]


def move_rows(
    tensor: MovedTensor,
    networks: Num[Tensor, "models *shape"],
    shares: Sequence[ElementRun],
    drawn: Drawn,
    factors: Float[Tensor, "elements factors"] | None,
    shifts: Float[Tensor, "elements shifts"] | None,
) -> None:
    """Transform one tensor of all networks in place. Every `ElementRun` in `shares` lists the batches of networks on
    which its elements act.
    """
    step = min(max(share.elements for share in shares), max(1, ROW_VALUES_AT_ONCE // (tensor.size * tensor.run)))
    unmoved = tensor.unmoved(torch.zeros(step, dtype=torch.int32))
    behind = [1] * (networks.ndim - 1 - len(tensor.shape))
    for share, some, start in portions(shares, step):
        size = some.stop - some.start
        places = torch.empty(size, *tensor.shape, dtype=torch.int32)
        tensor.place(drawn.displacements[some], unmoved, places)
        by = shift = None
        if factors is not None and tensor.factors:
            by = torch.empty(size, *tensor.shape, dtype=factors.dtype)
            tensor.multiply(factors[some], by)
            by = by.view(*by.shape, *behind).to(networks.device)
        if shifts is not None and tensor.shifts:
            shift = reduce(torch.add, [term.of(shifts[some]) for term in tensor.shifts])
            shift = shift.view(*shift.shape, *behind).to(networks.device)
        for first, n in share.networks(some, start):
            home = networks[first : first + n]
            made = _take_rows(home.reshape(n, tensor.size, tensor.run), places[:n].view(n, -1)).view(home.shape)
            if by is None:
                home.copy_(made)
            else:
                torch.mul(made, by[:n], out=home)
            if shift is not None:
                home += shift[:n]


def _take_rows(x: Num[Tensor, "models rows run"], places: Int[Tensor, "models rows"]) -> Num[Tensor, "models rows run"]:
    """Return the rows `x[model, places[model]]`.

    Numpy copies rows that are not consecutive several times as fast as torch does.
    """
    models, whole = torch.arange(len(x)).unsqueeze(1), WHOLE.get(x.itemsize)
    if x.device.type != "cpu" or whole is None:
        return x[models.to(x.device), places.to(x.device)]
    there = x.view(whole).numpy()
    if x.shape[2] >= LONG:
        taken = there[models.numpy(), places.numpy()]
    else:
        flat = (places + models * x.shape[1]).view(-1).numpy()
        taken = there.reshape(-1, x.shape[2]).take(flat, 0, mode="clip")
    return torch.from_numpy(taken).view(x.dtype)

"""Random elements of one symmetry that move populations: compiled once, drawn and applied in a few operations."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from regauge.core.moving.moved_rows import move_rows
from regauge.core.moving.moved_tensors import MovedTensor, moved_tensors
from regauge.core.moving.moved_values import MovedValues
from regauge.core.moving.random_draws import Draws, Source, shares_of
from regauge.core.params import VALUES, Params
from regauge.core.symmetry import Symmetry


class RandomMoves:
    """Random elements without matrices, as `symmetry.random` draws them, for each network of a population.

    What follows from the symmetry is found once. A call then takes one draw and one sort for all permutations; where
    values come from is a sum of small tables over the axes of each tensor, and one gather moves all.

    Args:
        symmetry: The symmetry, with every size known.
        parts: Some of "permutation", "sign", "scale" and "shift".
    """

    def __init__(self, symmetry: Symmetry, parts: Sequence[str]) -> None:
        self.symmetry = symmetry
        self._draws = Draws(symmetry, parts)
        self._known: dict[tuple[str, ...], tuple[list[MovedTensor], MovedValues]] = {}

    def __call__(self, params: Mapping[str, Tensor], sources: Sequence[Source]) -> Params:
        """The networks, each moved by an element that is independent of the others of its batch.

        Args:
            params: With one leading model axis. Their memory is used again: what they hold afterwards is undefined.
            sources: Numbers of networks in batches that follow one another, and the source of chance that they share:
                network k of each of these batches is moved by element k of that source.
        """
        for name, number in self.symmetry.added.items():
            if name in params:
                params[name].add_(number)
        shares = shares_of(sources)
        drawn = self._draws.draw([(max(counts), generator) for counts, generator in sources])
        by_kind: dict[tuple[torch.dtype, torch.device], list[str]] = {}
        for name in params:  # in the order in which a store holds them
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
                moved[name].sub_(number)
        return moved

    def _compile(self, names: tuple[str, ...]) -> tuple[list[MovedTensor], MovedValues]:
        """Return tensors that are moved by rows, and those that are moved by values."""
        if names not in self._known:
            found = moved_tensors(self.symmetry, self._draws, names)
            values = MovedValues([tensor for tensor in found if tensor.run == 1], self._draws)
            self._known[names] = [tensor for tensor in found if tensor.run > 1], values
        return self._known[names]

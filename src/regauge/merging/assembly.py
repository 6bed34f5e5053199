"""The loop that combines several networks, tensor by tensor. Each tensor has its own rule and factors."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from regauge.checkpoints.checkpoint import Checkpoint
from regauge.checkpoints.formats.headers import TensorSpec
from regauge.core.element import Element
from regauge.core.families import move_tensor, row_ranges
from regauge.core.params import VALUES, require_held, require_shared, round_to
from regauge.core.structure import require_same
from regauge.core.symmetry import Symmetry
from regauge.hub.tokens import TokenPlan, as_tokenized
from regauge.merging.rule import PIECE, Rule, Target, combine_from, small_piece
from regauge.merging.table import RULES

Place = tuple[int, str]
"""The index of a network, and the name of a tensor in this network."""


@dataclass(frozen=True)
class Part:
    """A plan for one tensor of the result: its sources and the rule that combines them.

    Attributes:
        spec: The tensor's name, shape and dtype.
        sources: The tensors from which the result's tensor is computed.
        base: The tensor from which task vectors are differences; None without a base.
        rule: The rule that combines the sources.
        factors: The factors of the sources.
        key: The name from which the random numbers of the tensor are derived.
        depth: The relative depth of the tensor, for rules with settings.
    """

    spec: TensorSpec
    sources: tuple[Place, ...]
    base: Place | None
    rule: Rule
    factors: tuple[float, ...]
    key: str
    depth: float = 0.0


@dataclass(frozen=True)
class Assembly:
    """A network that is assembled from tensors of several networks.

    Each tensor is read, converted to the working dtype, transformed by an element, and converted to the vocabulary of
    the result. Afterwards, the tensors of all networks are combined, and the result is rounded once.

    Attributes:
        parts: The plans for the tensors of the result, by name.
        networks: The checkpoints, under the vocabulary of the result.
        symmetry: The symmetry to which the elements belong.
        elements: The elements that transform the networks; None for networks that are not transformed.
        tokens: The network from which each missing row of a token is copied, if vocabularies differ.
        seed: The seed of the rules' random numbers.
    """

    parts: Mapping[str, Part]
    networks: Sequence[Checkpoint]
    symmetry: Symmetry
    elements: Sequence[Element | None]
    tokens: TokenPlan | None = None
    seed: int | None = None
    _means: dict[Place, Tensor] = field(default_factory=dict, repr=False, compare=False)

    def pieces(self, name: str) -> Iterator[Tensor]:
        """Yield the entries of one tensor of the result, in the tensor's dtype and in chunks along axis 0."""
        part = self.parts[name]
        dtype = part.spec.dtype
        is_structure = any(source in self.symmetry.structure for _, source in part.sources)
        if is_structure or dtype not in VALUES or 0 in part.spec.shape:
            kept, *others = [self._moved(place, None, dtype) for place in part.sources]
            if is_structure:
                require_same(name, [kept, *others])
            require_shared(name, [kept, *others])
            yield kept
            return
        work, target = self._work(part), Target(part.key, part.depth, self.seed)
        for rows in self._ranges(part):
            with small_piece(rows):
                start = None if part.base is None else self._filled(part.base, rows, work)
                tensors = (self._filled(place, rows, work) for place in part.sources)
                made = combine_from(start, part.rule, tensors, part.factors, target)
                places = [*part.sources, *([] if part.base is None else [part.base])]
                require_held(name, made, (self._filled(place, rows, work) for place in places))
                rounded = round_to(made, dtype, name)
            yield rounded

    def held(self) -> int:
        """Return the largest number of bytes held while one tensor is computed."""
        largest = 0
        for part in self.parts.values():
            rows = self._ranges(part)[0]
            share = 1.0 if rows is None else (rows[1] - rows[0]) / part.spec.shape[0]
            copies = 4 + part.rule.held(len(part.sources)) + (part.base is not None)
            largest = max(largest, int(copies * share * part.spec.nbytes / part.spec.dtype.itemsize * 8))
        return largest

    def _work(self, part: Part) -> torch.dtype:
        """Return the dtype of sums: float32 if all sources are in half precision, else float64."""
        stored = [self.networks[k].stored[name].dtype for k, name in part.sources]
        return torch.float32 if max(one.itemsize for one in (*stored, part.spec.dtype)) < 4 else torch.float64

    def _ranges(self, part: Part) -> list[tuple[int, int] | None]:
        """Return the ranges of the first axis in which a tensor may be computed; None for the whole tensor."""
        shape, places = part.spec.shape, [*part.sources, *([] if part.base is None else [part.base])]
        if not part.rule.splits(shape) or any(self._axis(place) > 0 for place in places):
            return [None]
        moved = [name for k, name in places if self.elements[k] is not None]
        if any(None in row_ranges(self.symmetry, name, shape) for name in moved):
            return [None]
        return row_ranges(Symmetry(()), part.spec.name, shape, PIECE)

    def _axis(self, place: Place) -> int:
        """Return the token axis of a tensor, or -1."""
        return -1 if self.tokens is None else self.tokens.axes.get(place[1], -1)

    def _moved(self, place: Place, rows: tuple[int, int] | None, work: torch.dtype) -> Tensor:
        """Return a copy of a tensor, or of a chunk, transformed by its network's element."""
        k, name = place
        tensor, element = self.networks[k].read(name, rows=rows, dtype=work), self.elements[k]
        return tensor if element is None else move_tensor(self.symmetry, element, name, tensor)

    def _filled(self, place: Place, rows: tuple[int, int] | None, work: torch.dtype) -> Tensor:
        """Return a transformed tensor in which the missing token rows are copied from other networks."""
        tensor, axis, (k, name) = self._moved(place, rows, work), self._axis(place), place
        if axis < 0:
            return tensor
        assert self.tokens is not None
        first, end = rows if rows is not None and axis == 0 else (0, self.tokens.size)
        taken = self.tokens.taken[k, first:end].nonzero().flatten()
        if len(taken):
            values = torch.zeros_like(tensor.index_select(axis, taken))
            shares = self.tokens.shares[:, first:end][:, taken]
            for j in shares.sum(1).nonzero().flatten().tolist():
                other = self._moved((j, name), rows, work).index_select(axis, taken)
                values += other * shares[j].to(work).reshape(-1, *[1] * (tensor.ndim - 1 - axis))
            tensor.index_copy_(axis, taken, values)
            for row in taken.tolist():
                if first + row in self.tokens.given:
                    j, there = self.tokens.given[first + row]
                    tensor.narrow(axis, row, 1).copy_(self._given(j, name, axis, there, work))
        blank = self.tokens.blank[first:end].nonzero().flatten()
        if len(blank):
            tensor.index_copy_(axis, blank, self._mean(place, axis, work).expand_as(tensor.index_select(axis, blank)))
        return tensor

    def _given(self, k: int, name: str, axis: int, row: int, work: torch.dtype) -> Tensor:
        """Return one row of a network's tensor, transformed."""
        network = self.networks[k]
        source = as_tokenized(network)
        if not 0 <= row < source.stored[name].shape[axis]:
            raise ValueError(f"{network.label} has no row {row} in {name!r}; name another token")
        own = source.read(name, rows=(row, row + 1), dtype=work) if axis == 0 else source.read(name, dtype=work)
        own = own if axis == 0 else own.narrow(axis, row, 1)
        element = self.elements[k]
        return own if element is None else move_tensor(self.symmetry, element, name, own)

    def _mean(self, place: Place, axis: int, work: torch.dtype) -> Tensor:
        """Return the mean of all token rows, which is used for rows without a token."""
        if place not in self._means:
            assert self.tokens is not None
            known = replace(self.tokens, blank=torch.zeros_like(self.tokens.blank))
            whole = replace(self, tokens=known)._filled(place, None, work)
            used = (~self.tokens.blank).nonzero().flatten()
            self._means[place] = whole.index_select(axis, used).mean(axis, keepdim=True)
        return self._means[place]


def take_over(network: Checkpoint, number: int) -> dict[str, Part]:
    """Return a plan in which the result equals the network with this index."""
    rule, form = RULES["passthrough"].build(), network.form
    return {
        name: Part(
            TensorSpec(name, tuple(one.shape), form.dtype_of(one.dtype)), ((number, name),), None, rule, (1.0,), name
        )
        for name, one in network.stored.items()
    }

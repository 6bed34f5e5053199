"""The loop that merges many networks tensor by tensor. The result is the same for networks in memory and in files."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from regauge.checkpoints.checkpoint import Checkpoint
from regauge.core.element import Element
from regauge.core.families import move_tensor, row_ranges
from regauge.core.interpolation import shares_of
from regauge.core.params import VALUES, Params, require_held, require_shared, round_to
from regauge.core.symmetry import Symmetry
from regauge.merging.rule import PIECE, Rule, Target, combine_from, small_piece, weighted_sum
from regauge.merging.settings import Number, Setting, find_depths

MOVING = 3
"""The number of copies of a chunk while the chunk is read, transformed by an element and converted."""


@dataclass(frozen=True)
class Blend:
    """The merge of several networks: the networks, the elements that align them, and the rule that combines them.

    Each tensor is read, converted to the working dtype, transformed, combined with the other networks' tensors, and
    rounded once. Running statistics are averaged, with the factors as weights if the rule is a mean, and otherwise with
    equal weights. Structure tensors, such as masks, are copied from the base or the first network, because alignment
    maps the structure of the other networks to them. Other tensors that are not floating point (integers, codes) must
    be equal in all networks. Counters are copied from the base or the first network.

    Attributes:
        rule: The rule that combines tensors.
        symmetry: The symmetry, with every size known.
        networks: Parameters by name, or checkpoints.
        base: The network from which task vectors are differences; None without a base.
        weights: One weight for each network; by default, equal weights as the rule defines them.
        elements: The elements that transform the networks. For the network whose coordinates the result has, the
            element is the identity. None if no network is transformed.
        seed: The seed of the rule's random numbers.
    """

    rule: Rule
    symmetry: Symmetry
    networks: tuple[Mapping[str, Tensor], ...]
    base: Mapping[str, Tensor] | None = None
    weights: tuple[Number, ...] | None = None
    elements: tuple[Element, ...] | None = None
    seed: int | None = None

    @property
    def reference(self) -> Mapping[str, Tensor]:
        """Return the network whose names, dtypes and counters the result has: the base, or else the first network."""
        return self.networks[0] if self.base is None else self.base

    @property
    def given(self) -> tuple[Number, ...]:
        """Return the weights that the caller gave. By default, every weight is one."""
        return (1.0,) * len(self.networks) if self.weights is None else self.weights

    @property
    def factors(self) -> tuple[Number, ...]:
        """Return the weights for the record: the factors if all tensors have the same factors, otherwise the
        settings.
        """
        if self.weights is not None and any(isinstance(one, Setting) for one in self.weights):
            return self.weights
        return self.rule.factors(self._numbers(Target("")), len(self.networks))

    def check(self) -> None:
        """Raise an error if weights or settings are invalid for some tensor. No tensor is combined.

        Raises:
            ValueError: Weights or settings are invalid, or a tensor that is not floating point differs between the
                networks.
        """
        varies = any(isinstance(one, Setting) for one in self.weights or ())
        for name, tensor in self._like.items():
            if name in self.symmetry.structure:
                continue
            is_everywhere = all(name in network for network in self.networks)  # else `align` raises an error
            if tensor.dtype not in VALUES and name not in self.symmetry.sites and is_everywhere:
                for rows in row_ranges(self.symmetry, name, tensor.shape):
                    self._require_shared(name, rows)
            elif tensor.dtype in VALUES and name not in self.symmetry.buffers:
                target = self._target(name)
                self.rule.check(target, len(self.networks))
                try:
                    self.rule.factors(self._numbers(target), len(self.networks))
                except ValueError as error:
                    raise ValueError(f"at {name!r} {error}" if varies else str(error)) from None

    def only(self, chosen: Sequence[int]) -> "Blend":
        """Return a copy that combines only the chosen networks; all other networks get weight zero."""
        return replace(self, weights=tuple(one if k in chosen else 0.0 for k, one in enumerate(self.given)))

    @property
    def params(self) -> Params:
        """Return the result in memory."""
        result: Params = {}
        for name in self.reference:
            parts, dtype = list(self.pieces(name)), self._like[name].dtype
            result[name] = round_to(parts[0] if len(parts) == 1 else torch.cat(parts), dtype, name)
        return result

    def pieces(self, name: str) -> Iterator[Tensor]:
        """Yield the entries of one tensor of the result, before rounding, in chunks along axis 0."""
        like, count = self._like[name], len(self.networks)
        if name in self.symmetry.structure:
            for rows in self._ranges(name):
                yield read_piece(self.reference, name, rows, like.dtype)
            return
        if like.dtype not in VALUES or like.numel() == 0:
            for rows in row_ranges(self.symmetry, name, like.shape):
                yield self._require_shared(name, rows)
            return
        work, target = self._work_dtype(name), self._target(name)
        factors = self.rule.factors(self._numbers(target), count)
        is_statistic = name in self.symmetry.buffers
        if is_statistic and not self.rule.has_shares:
            factors = shares_of(None, count)
        alone = next((k for k, one in enumerate(factors) if one == 1), None) if self.rule.has_shares else None
        if any(one != 0 for k, one in enumerate(factors) if k != alone):
            alone = None
        for rows in self._ranges(name):
            if alone is not None and self.base is None:
                yield self._moved(alone, name, rows, work)
                continue
            with small_piece(rows):
                start = None if is_statistic or self.base is None else read_piece(self.base, name, rows, work)
                tensors = (self._moved(k, name, rows, work) for k in range(count))
                if is_statistic:
                    made = weighted_sum(tensors, factors)
                else:
                    made = combine_from(start, self.rule, tensors, factors, target)
                require_held(name, made, (read_piece(one, name, rows, work) for one in self._all))
            yield made

    def held(self) -> int:
        """Return the largest number of bytes held while one tensor is computed."""
        copies = MOVING + self.rule.held(len(self.networks)) + (self.base is not None)
        largest = 0
        for name, tensor in self._like.items():
            rows = self._ranges(name)[0]
            share = 1.0 if rows is None else (rows[1] - rows[0]) / tensor.shape[0]
            largest = max(largest, int(share * tensor.numel() * self._work_dtype(name).itemsize))
        return copies * largest

    @property
    def _all(self) -> tuple[Mapping[str, Tensor], ...]:
        """Return the networks, and the base if there is a base."""
        return self.networks if self.base is None else (*self.networks, self.base)

    @cached_property
    def _like(self) -> Mapping[str, Tensor]:
        """A mapping with the names, shapes and dtypes of the result."""
        return self.reference.on_meta() if isinstance(self.reference, Checkpoint) else self.reference

    @cached_property
    def _first(self) -> dict[str, str]:
        """Map each name to one of the names of the same tensor, so that tied names share random numbers and
        settings.
        """
        stored = self.reference.stored if isinstance(self.reference, Checkpoint) else self.reference
        found = {}
        for names in self.symmetry.tied:
            first = next((name for name in names if name in stored), names[0])
            found.update(dict.fromkeys(names, first))
        return found

    @cached_property
    def _depths(self) -> dict[str, float]:
        return find_depths(self._like)

    def _work_dtype(self, name: str) -> torch.dtype:
        """Return the dtype of sums: float32 if all tensors are in half precision, else float64."""
        widest = max(_dtype_of(network, name).itemsize for network in self._all)
        return torch.float32 if widest < 4 else torch.float64

    def _target(self, name: str) -> Target:
        name = self._first.get(name, name)
        return Target(name, self._depths.get(name, 0.0), self.seed)

    def _numbers(self, target: Target) -> list[float] | None:
        return None if self.weights is None else [target.number(one) for one in self.weights]

    def _ranges(self, name: str) -> list[tuple[int, int] | None]:
        shape = self._like[name].shape
        return row_ranges(self.symmetry, name, shape, PIECE) if self.rule.splits(shape) else [None]

    def _require_shared(self, name: str, rows: tuple[int, int] | None) -> Tensor:
        """Return the tensor of the reference (integers or codes), or a chunk; raise a ValueError if networks differ."""
        dtype = self._like[name].dtype
        tensors = [self._moved(k, name, rows, dtype) for k in range(len(self.networks))]
        kept = tensors[0] if self.base is None else read_piece(self.base, name, rows, dtype)
        require_shared(name, [kept, *tensors])
        return kept

    def _moved(self, k: int, name: str, rows: tuple[int, int] | None, work: torch.dtype) -> Tensor:
        """Return a copy of a tensor of network k, or of a chunk, transformed by the network's element."""
        tensor = read_piece(self.networks[k], name, rows, work)
        if self.elements is None or (k == 0 and self.base is None):
            return tensor
        return move_tensor(self.symmetry, self.elements[k], name, tensor)


def list_dtypes(networks: Sequence[Checkpoint]) -> str | None:
    """Return the floating-point dtypes of each network, for a message; None if all networks have the same dtypes."""
    kinds = {}
    for network in networks:
        found = {one.dtype for one in network.stored.values() if one.dtype.is_floating_point}
        kinds[network.label] = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in found))
    return None if len(set(kinds.values())) <= 1 else "; ".join(f"{label} in {own}" for label, own in kinds.items())


def dtype_notes(networks: Sequence[Checkpoint]) -> tuple[str, ...]:
    """Return a note on the dtype of the result (that of the first network), if the dtypes of networks differ."""
    first, *_ = networks
    listed = list_dtypes(networks)
    if listed is None or first.form.dtype is not None:
        return ()
    return (f"the networks differ in dtype ({listed}); the result has those of {first.label}; `dtype=` chooses others",)


def _dtype_of(network: Mapping[str, Tensor], name: str) -> torch.dtype:
    """Return the dtype of a tensor. For a file, return the dtype in which the tensor is read."""
    if isinstance(network, Checkpoint):
        return network.form.work_dtype(network.stored[name].dtype if name in network.stored else network[name].dtype)
    return network[name].dtype


def read_piece(network: Mapping[str, Tensor], name: str, rows: tuple[int, int] | None, dtype: torch.dtype) -> Tensor:
    """Return a copy of a tensor, or of some rows, in the given dtype; read the tensor from memory or a file."""
    if isinstance(network, Checkpoint):
        return network.read(name, rows=rows, dtype=dtype)
    tensor = network[name] if rows is None else network[name][rows[0] : rows[1]]
    return tensor.to(dtype, copy=True)

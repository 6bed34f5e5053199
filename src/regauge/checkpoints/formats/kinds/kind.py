"""A kind of adapters: the tensors that an adapter of this kind stores for a module, and the weight changes that these
tensors describe.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch import Tensor

from regauge.checkpoints.formats.changes import CarriedBias, Mapped, Replaced
from regauge.core.expressions import Expression

Parts: TypeAlias = Mapping[str, Tensor]
"""The tensors of one module, by the last component of their names."""
Config: TypeAlias = Mapping[str, Any]
Made: TypeAlias = Iterator[tuple[str, CarriedBias | Mapped | Replaced]]
"""Changes of a module, each with the name of the changed tensor in the module."""

NO_PROJECTION = "it lacks the projections that all modules share; save it with save_projection=True"
MOST_TERMS = 100
"""The largest number of terms of a power series."""


@dataclass(frozen=True)
class Kind:
    """A kind of adapters: a pattern of tensor names in a module, and a function that yields the changes."""

    names: str
    make: Callable[[str, Parts, Config, Parts], Made]


@lru_cache(maxsize=2048)
def ending(pattern: str) -> Expression:
    """Return the regular expression for module paths that end in a key of a configuration, such as `rank_pattern`."""
    return Expression(rf"(.*\.)?({pattern})")


def added(change: Tensor) -> Mapped:
    """Return the change `W + d`, where the entries of `d` are reshaped to the shape of W."""

    def add(weight: Tensor) -> Tensor:
        return weight + change.to(weight).reshape(weight.shape)

    sides = (change.shape[0], change[0].numel()) if change.ndim == 2 else None
    return Mapped(add, sides, change.numel())


def scale(config: Config, module: str, rank: int) -> float:
    """Return the factor `alpha / rank`, with the configuration's alpha for the module."""
    patterns = config.get("alpha_pattern") or {}
    found = (one for key, one in patterns.items() if ending(key).fullmatch(module))
    return float(next(found, config.get("alpha", 8))) / rank


def exact(parts: Parts) -> dict[str, Tensor]:
    """Return the tensors of a module in float64."""
    return {name: one.double() for name, one in parts.items()}


def antisymmetric(values: Tensor, size: int) -> Tensor:
    """Return the antisymmetric matrices of a size that have given entries above the diagonal."""
    matrix = values.new_zeros(*values.shape[:-1], size, size)
    matrix[..., *torch.triu_indices(size, size, 1)] = values
    return matrix - matrix.mT


def require_terms(config: Config) -> int:
    """Return the number of terms of the Cayley-Neumann series that a configuration sets.

    Raises:
        ValueError: The number is less than 1 or greater than 100.
    """
    terms = int(config.get("num_cayley_neumann_terms", 5))
    if not 1 <= terms <= MOST_TERMS:
        raise ValueError(f"num_cayley_neumann_terms is {terms}, but must be from 1 to {MOST_TERMS}")
    return terms

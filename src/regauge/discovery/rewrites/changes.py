"""A change of a value of a traced model.

It is either *known*, a tensor that is added whatever the inputs are, or known only to be equal at some indices: then
every index carries a label, equal labels mean equal changes, and the label zero means no change.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

EQUAL = 1e-12
"""Known changes that differ by less than this share of the largest one are equal: they differ by rounding."""


class Seen(Exception):
    """Something sees the change, so the function is another one."""


@dataclass(frozen=True)
class Known:
    """The same tensor is added for all inputs."""

    value: Tensor

    def is_uniform(self, dim: int) -> bool:
        """Whether it is constant along an axis."""
        if not self.value.stride(dim):
            return True
        low, high = self.value.aminmax(dim=dim)
        size = torch.maximum(-self.value.min(), self.value.max())
        return bool((high - low <= EQUAL * size).all())

    def moved(self, call: Callable[[Tensor], Any]) -> Any:
        """The change of what an operator makes that only moves values."""
        return pytree.tree_map_only(Tensor, Known, call(self.value))


@dataclass(frozen=True)
class Labeled:
    """What is added depends on the inputs; it is equal where the labels are."""

    labels: Tensor

    def is_uniform(self, dim: int) -> bool:
        """Whether it is constant along an axis."""
        return bool((self.labels == self.labels.narrow(dim, 0, 1)).all())

    def moved(self, call: Callable[[Tensor], Any]) -> Any:
        """The change of what an operator makes that only moves values."""
        return pytree.tree_map_only(Tensor, Labeled, call(self.labels))


Change = Known | Labeled


def is_nothing(change: Any) -> bool:
    """Whether a change, or every one of several, is zero everywhere."""
    if isinstance(change, Known | Labeled):
        return not bool((change.value if isinstance(change, Known) else change.labels).any())
    return all(is_nothing(one) for one in change)


def along(values: Tensor, dim: int, shape: Sequence[int]) -> Tensor:
    """Values for one axis, the same along all others."""
    return values.reshape([n if k == dim else 1 for k, n in enumerate(shape)]).expand(tuple(shape))


def classes_of(rows: Tensor) -> Tensor:
    """For each row a number; equal rows have equal ones, zero means that nothing changes."""
    # Products with one fixed vector without structure tell rows apart, and sort much faster than they do.
    mixed = rows @ torch.arange(1.0, rows.shape[1] + 1, dtype=rows.dtype).square().cos()
    step = EQUAL * rows.abs().sum(1).max()
    classes = torch.unique((mixed / step).round() if step > 0 else mixed, return_inverse=True)[1]
    return torch.where((rows == 0).all(1), 0, classes + 1)

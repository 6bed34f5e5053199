"""Changes of the values of a traced model, and what is known of the values that they meet whatever the inputs are."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils import _pytree as pytree

from regauge.core.params import Params
from regauge.discovery.operators import PIECES, SAME, VIEWS, argument, operator_name, shape_of
from regauge.discovery.trace import Program

EQUAL_CHANGES = 1e-12
"""Known changes that differ by less than this share of the largest one are equal: they differ by rounding."""
MOVES = VIEWS | PIECES | {"expand", "cat", "stack", "index_select", "roll", "flip", "repeat", "getitem", "index"}
"""Operators whose results are entries of their operands."""


class Seen(Exception):
    """Something sees the change, so the function is another one."""


@dataclass(frozen=True)
class Change:
    """A change of a value of a traced model.

    Attributes:
        entries: The added values, the same for all inputs, if they are known. Otherwise labels: equal labels mean equal
            changes, and the label zero means no change.
        is_known: Whether the entries are known.
    """

    entries: Tensor
    is_known: bool = True

    def is_uniform(self, dim: int) -> bool:
        """Whether it is constant along an axis."""
        if not self.is_known:
            return bool((self.entries == self.entries.narrow(dim, 0, 1)).all())
        if not self.entries.stride(dim):
            return True
        low, high = self.entries.aminmax(dim=dim)
        size = torch.maximum(-self.entries.min(), self.entries.max())
        return bool((high - low <= EQUAL_CHANGES * size).all())

    def map(self, move: Callable[[Tensor], Any]) -> Any:
        """The change of the result of an operator that only moves values."""
        return pytree.tree_map_only(Tensor, lambda t: Change(t, self.is_known), move(self.entries))


def is_nothing(change: Any) -> bool:
    """Whether a change, or every one of several, is zero everywhere."""
    return not bool(change.entries.any()) if isinstance(change, Change) else all(map(is_nothing, change))


def along(values: Tensor, dim: int, shape: Sequence[int]) -> Tensor:
    """Values for one axis, the same along all others."""
    return values.reshape([n if k == dim else 1 for k, n in enumerate(shape)]).expand(tuple(shape))


def classes_of(rows: Tensor) -> Tensor:
    """A class number for each row: equal rows have equal numbers, and zero means that nothing changes."""
    # Products with one fixed vector without structure tell rows apart, and sort much faster than they do.
    mixed = rows @ torch.arange(1.0, rows.shape[1] + 1, dtype=rows.dtype).square().cos()
    step = EQUAL_CHANGES * rows.abs().sum(1).max()
    classes = torch.unique((mixed / step).round() if step > 0 else mixed, return_inverse=True)[1]
    return torch.where((rows == 0).all(1), 0, classes + 1)


@dataclass
class ValueFlow:
    """A traced model through which changes flow: parameters in float64, and the biases that may take up a change."""

    program: Program
    params: Params
    takers: frozenset[str]
    _constants: dict[Node, Any] = field(default_factory=dict)

    def constant(self, argument: Any) -> Tensor | None:
        """The value of an operand that depends on parameters and constants only."""
        if not isinstance(argument, Node):
            return argument if isinstance(argument, Tensor) else None
        if argument not in self._constants:
            self._constants[argument] = self._evaluate(argument)
        found = self._constants[argument]
        return found if isinstance(found, Tensor) else None

    def _evaluate(self, node: Node) -> Any:
        if node.op == "placeholder":
            if node.name in self.program.states:
                return self.params[self.program.states[node.name]]
            return self.program.held.get(node.name)
        operands = {source: self.constant(source) for source in node.all_input_nodes}
        is_simple = node.op == "call_function" and operator_name(node) in SAME | MOVES | {"mul", "add"}
        if not is_simple or not operands or any(value is None for value in operands.values()):
            return None
        return call(node, operands)

    def sums_to_one(self, node: Any) -> bool:
        """Whether a value is non-negative weights that sum to one along its last axis."""
        if not isinstance(node, Node) or node.op != "call_function":
            return False
        if operator_name(node) in ("softmax", "_softmax", "_safe_softmax"):
            return node.args[1] in (-1, len(shape_of(node)) - 1)
        is_copy = operator_name(node) in SAME | {"expand", "view", "reshape"}
        return is_copy and shape_of(node)[-1] == shape_of(node.args[0])[-1] and self.sums_to_one(node.args[0])

    def sums_to_zero(self, node: Any) -> bool:
        """Whether a value sums to zero along its last axis: after LayerNorm with equal gains and a centered bias."""
        if not isinstance(node, Node) or node.op != "call_function":
            return False
        name, source = operator_name(node), node.args[0]
        if name == "layer_norm":
            gain, bias = (self.constant(argument(node, k, None)) for k in (2, 3))
            is_even = gain is None or bool((gain == gain.flatten()[0]).all())
            return len(node.args[1]) == 1 and is_even and (bias is None or float(bias.sum().abs()) <= EQUAL_CHANGES)  # type: ignore[arg-type]
        if name in ("slice", "select", "unsqueeze"):
            ndim = max(len(shape_of(node)), len(shape_of(source)))
            if argument(node, 1, 0) % ndim == ndim - 1:
                return False  # It takes entries of the last axis, or makes a new one.
        elif name not in SAME | {"view", "reshape"}:
            return False
        return shape_of(node)[-1:] == shape_of(source)[-1:] and self.sums_to_zero(source)


def call(node: Node, operands: Mapping[Node, Any]) -> Any:
    """The operator of a node on other operands."""
    whole = {key: t.contiguous() if isinstance(t, Tensor) else t for key, t in operands.items()}
    args, kwargs = pytree.tree_map_only(Node, lambda n: whole[n], (node.args, dict(node.kwargs)))
    try:
        return node.target(*args, **kwargs)  # type: ignore[operator]
    except (RuntimeError, IndexError, TypeError) as error:
        raise Seen from error  # An operator that cannot be called on a change says nothing about it.

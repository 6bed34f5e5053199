"""A traced model through which changes flow: what its values are where no input matters."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.fx import Node
from torch.utils import _pytree as pytree

from regauge.core.params import Params
from regauge.discovery.activations import COPIES
from regauge.discovery.rewrites.changes import EQUAL, Seen
from regauge.discovery.rewrites.gains import operator
from regauge.discovery.trace import Program

SAME = COPIES & {"clone", "contiguous", "detach", "alias", "_to_copy", "to", "type_as", "dropout", "feature_dropout",
                 "lift_fresh_copy"}  # fmt: skip
"""Copies that leave every value where it is."""
MOVES = (COPIES - SAME) | {"slice", "select", "narrow", "cat", "stack", "split", "split_with_sizes", "chunk", "unbind",
                           "index_select", "roll", "flip", "repeat", "getitem", "index"}  # fmt: skip
"""Operators whose results are entries of their operands."""


@dataclass
class Flow:
    """A traced model through which changes flow.

    Attributes:
        program: The trace.
        params: Parameters in float64.
        takers: Biases that may take up a change.
    """

    program: Program
    params: Params
    takers: frozenset[str]
    _constants: dict[Node, Any] = field(default_factory=dict)
    _sums: dict[Node, bool] = field(default_factory=dict)
    _zero_sums: dict[Node, bool] = field(default_factory=dict)

    def constant(self, argument: Any) -> Tensor | None:
        """The value of an operand that depends on parameters and constants only."""
        if not isinstance(argument, Node):
            return argument if isinstance(argument, Tensor) else None
        if argument not in self._constants:
            self._constants[argument] = self._evaluated(argument)
        found = self._constants[argument]
        return found if isinstance(found, Tensor) else None

    def _evaluated(self, node: Node) -> Any:
        if node.op == "placeholder":
            if node.name in self.program.states:
                return self.params[self.program.states[node.name]]
            return self.program.held.get(node.name)
        if (
            node.op != "call_function"
            or not node.all_input_nodes
            or operator(node) not in SAME | MOVES | {"mul", "add"}
        ):
            return None
        operands = {source: self.constant(source) for source in node.all_input_nodes}
        if any(value is None for value in operands.values()):
            return None
        return call(node, operands)

    def sums_to_one(self, node: Any) -> bool:
        """Whether a value is non-negative weights that sum to one along its last axis."""
        if not isinstance(node, Node) or node.op != "call_function":
            return False
        if operator(node) in ("softmax", "_softmax", "_safe_softmax"):
            return node.args[1] in (-1, len(shape_of(node)) - 1)
        if operator(node) in SAME | {"expand", "view", "reshape"}:
            return shape_of(node)[-1] == shape_of(node.args[0])[-1] and self.sums_to_one(node.args[0])
        return False

    def sums_to_zero(self, node: Any) -> bool:
        """Whether a value sums to zero along its last axis: after LayerNorm with equal gains and a centered bias."""
        if not isinstance(node, Node) or node.op != "call_function":
            return False
        if operator(node) == "layer_norm":
            gain, bias = (self.constant(argument(node, k, None)) for k in (2, 3))
            is_even = gain is None or bool((gain == gain.flatten()[0]).all())
            return len(node.args[1]) == 1 and is_even and (bias is None or float(bias.sum().abs()) <= EQUAL)  # type: ignore[arg-type]
        if operator(node) in SAME | {"view", "reshape", "slice", "select", "unsqueeze"}:
            source = node.args[0]
            return (
                shape_of(node)[-1:] == shape_of(source)[-1:] and not _touches_last(node) and self.sums_to_zero(source)
            )
        return False


def call(node: Node, operands: Mapping[Node, Any]) -> Any:
    """The operator of a node on other operands."""
    whole = {key: t.contiguous() if isinstance(t, Tensor) else t for key, t in operands.items()}
    args, kwargs = pytree.tree_map_only(Node, lambda n: whole[n], (node.args, dict(node.kwargs)))
    try:
        return node.target(*args, **kwargs)  # type: ignore[operator]
    except (RuntimeError, IndexError, TypeError) as error:
        raise Seen from error  # An operator that cannot be called on a change says nothing about it.


def argument(node: Node, position: int, default: Any) -> Any:
    """An argument that may be left out."""
    return node.args[position] if len(node.args) > position else default


def shape_of(node: Any) -> tuple[int, ...]:
    """Of what a node makes; numbers have none."""
    return tuple(int(n) for n in node.meta["val"].shape) if isinstance(node, Node) else ()


def _touches_last(node: Node) -> bool:
    """Whether a slice or a selection takes entries of the last axis, or the last axis is new."""
    dim = argument(node, 1, 0)
    is_axis = operator(node) in ("slice", "select", "unsqueeze") and isinstance(dim, int)
    return is_axis and dim % max(len(shape_of(node.args[0])) + (operator(node) == "unsqueeze"), 1) == (
        len(shape_of(node)) - (operator(node) != "select")
    )

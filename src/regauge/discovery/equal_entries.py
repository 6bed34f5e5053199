"""A test whether entries of a tensor can be equal.

The result of operators such as argmax depends on the order of equal entries.

A ReLU makes entries zero with positive probability, and zeros are equal. A linear layer after the ReLU makes the
entries different again. If nothing is known about a tensor, the test assumes that its entries can be equal.
"""

from collections.abc import Sequence
from typing import Any

from torch.fx import Node

from regauge.discovery.operators import SAME, VIEWS, argument, operator_name, shape_of, words

INJECTIVE = SAME | words(
    "sigmoid tanh log_sigmoid log log2 log10 log1p exp exp2 expm1 softplus elu selu celu leaky_relu silu gelu mish abs "
    "absolute square pow sqrt rsqrt reciprocal neg negative sin cos erf atan asinh sinh tan softmax _softmax "
    "log_softmax _log_softmax _safe_softmax layer_norm native_layer_norm rms_norm _fused_rms_norm batch_norm "
    "group_norm _native_batch_norm_legit_no_training native_group_norm instance_norm slice narrow split "
    "split_with_sizes chunk"
)
"""Operators that keep the axes, and whose results are different for different entries of the first operand."""
MOVES = VIEWS | {"mT", "select"}
REDUCTIONS = words("sum mean var std logsumexp linalg_vector_norm amax amin")
NONZERO = words("sigmoid exp exp2 softplus softmax _softmax _safe_softmax cosh layer_norm batch_norm embedding addmm")
LAYERS = words("embedding addmm lstm gru rnn_tanh")
"""Operators with a bias or a table, whose result entries along the last axis differ for every input."""


class EqualEntries:
    """A record of which tensors in one trace can have equal entries."""

    def __init__(self) -> None:
        self.tied: dict[tuple[Node, int | None], bool] = {}
        self.vanishing: dict[Node, bool] = {}

    def may_tie(self, node: Any, dim: int | None) -> bool:
        """Return whether two entries along an axis are equal with positive probability.

        If `dim` is None, any two entries of the tensor are compared, not only entries along one axis.
        """
        if not isinstance(node, Node):
            return True
        if (node, dim) not in self.tied:
            self.tied[node, dim] = self._ties(node, dim)
        return self.tied[node, dim]

    def _ties(self, node: Node, dim: int | None) -> bool:
        if node.op in ("placeholder", "get_attr"):
            return False
        name, shape = operator_name(node), shape_of(node)
        if dim is not None and shape:
            dim %= len(shape)
        is_last = dim is not None and dim == len(shape) - 1
        if is_last and not self._may_tie_across(node):
            return False
        if name == "getitem":
            return self.may_tie(node.args[0], dim if shape_of(node.args[0]) in ((), shape) else None)
        if name == "linear" or name in LAYERS:
            if is_last:
                return name == "linear" and self._lacks_bias(node) and self._may_agree(node)
            return name != "linear" or self.may_tie(node.args[0], dim)
        if name.startswith("conv") and "transpose" not in name:
            return dim != 1 or (self._lacks_bias(node) and self._may_agree(node))
        if name in ("matmul", "mm", "bmm", "einsum"):
            operands = [arg for arg in _flat(node.args) if isinstance(arg, Node)]
            return dim is None or any(self.may_vanish(arg) for arg in operands)
        if name == "cdist":
            # Different rows have different distances to a row without zeros. Only for order zero can the distances
            # agree.
            pairs = {len(shape) - 1: node.args[1::-1], len(shape) - 2: node.args[:2]}
            if argument(node, 2, 2.0) == 0 or dim not in pairs:
                return True
            own, other = pairs[dim]
            return self.may_tie(own, -2) or self.may_vanish(other)
        if name in ("add", "sub", "rsub"):
            return all(self.may_tie(arg, here) for arg, here in _aligned(node, dim)) if _aligned(node, dim) else True
        if name in ("mul", "div"):
            along = _aligned(node, dim)
            others = [arg for arg in node.args[:2] if all(arg is not found for found, _ in along)]
            return (
                not along
                or any(self.may_tie(arg, here) for arg, here in along)
                or any(self.may_vanish(arg) for arg in others)
            )
        if name in INJECTIVE:
            return self.may_tie(node.args[0], dim)
        if name in MOVES:
            return self.may_tie(node.args[0], _before(node, dim))
        return True

    def _may_tie_across(self, node: Node) -> bool:
        """Return whether the sums (or means, maxima, minima) of two blocks of one axis can be equal.

        The node must reduce each block to one entry, and the blocks must lie along the last axis. Before the node,
        another operator may have selected the largest entries of each block. For all other nodes, the result is True.
        """
        name = operator_name(node)
        first = node.args[0] if node.args else None
        if name == "getitem" and node.args[1] == 0 and isinstance(first, Node) and operator_name(first) == "max":
            name, node, first = "amax", first, first.args[0]
        if name not in ("sum", "mean", "amax", "amin") or not isinstance(first, Node) or len(node.args) < 2:
            return True
        dims = node.args[1] if isinstance(node.args[1], list | tuple) else [node.args[1]]
        is_kept = len(shape_of(first)) == len(shape_of(node))
        if list(dims) not in ([-1], [len(shape_of(first)) - 1]) or argument(node, 2, is_kept):
            return True
        if operator_name(first) == "getitem" and first.args[1] == 0:
            order = first.args[0]
            if not isinstance(order, Node) or operator_name(order) not in ("topk", "sort"):
                return True
            first = order.args[0] if argument(order, 2, -1) in (-1, len(shape_of(first)) - 1) else None
        if not isinstance(first, Node) or operator_name(first) not in ("view", "reshape", "_unsafe_view"):
            return True
        blocks, source = shape_of(first), shape_of(first.args[0])
        return blocks[:-2] != source[:-1] or self.may_tie(first.args[0], -1)

    def _lacks_bias(self, node: Node) -> bool:
        return len(node.args) < 3 or node.args[2] is None or self.may_tie(node.args[2], -1)

    def _may_agree(self, node: Node) -> bool:
        """Return whether two outputs of a layer without bias can be equal, because the input is zero or two weight rows
        are equal.
        """
        return self.may_vanish(node.args[0]) or self.may_tie(node.args[1], 0)

    def may_vanish(self, node: Any) -> bool:
        """Return whether entries of a traced tensor are zero with positive probability."""
        if not isinstance(node, Node):
            return bool(node == 0)
        if node not in self.vanishing:
            self.vanishing[node] = self._vanishes(node)
        return self.vanishing[node]

    def _vanishes(self, node: Node) -> bool:
        if node.op in ("placeholder", "get_attr"):
            return False
        name = operator_name(node)
        if name in NONZERO or name in LAYERS:
            return False
        if name == "linear" or name.startswith("conv"):
            return self._lacks_bias(node) and self.may_vanish(node.args[0])
        if name in ("add", "sub", "rsub"):
            return all(self.may_vanish(arg) for arg in node.args[:2])
        if name in ("mul", "matmul", "mm", "bmm", "einsum", "scaled_dot_product_attention"):
            return any(self.may_vanish(arg) for arg in _flat(node.args) if not isinstance(arg, str))
        if name in INJECTIVE or name in MOVES or name in REDUCTIONS or name in ("div", "getitem"):
            return self.may_vanish(node.args[0])
        return True


def _flat(arguments: Sequence[Any]) -> list[Any]:
    return [x for arg in arguments for x in (_flat(arg) if isinstance(arg, list | tuple) else [arg])]


def _aligned(node: Node, dim: int | None) -> list[tuple[Node, int | None]]:
    """Return the operands that vary along an axis of the result. Each operand comes with the number of its axis that
    corresponds to the axis of the result.
    """
    full = shape_of(node)
    result: list[tuple[Node, int | None]] = []
    for arg in node.args[:2]:
        shape = shape_of(arg)
        if not isinstance(arg, Node) or (dim is None and shape != full):
            continue
        here = None if dim is None else dim - len(full) + len(shape)
        if here is None or (here >= 0 and shape[here] == full[dim or 0]):
            result.append((arg, here))
    return result


def _before(node: Node, dim: int | None) -> int | None:
    """Return the axis of the operand that becomes axis `dim` of the result of a view or transposition.

    Return None if several axes are merged or split.
    """
    old, new, name = shape_of(node.args[0]), shape_of(node), operator_name(node)
    if dim is None:
        return None
    if name in ("t", "mT", "transpose"):
        axes: Any = node.args[1:3] if name == "transpose" else (-1, -2)
        pair = [d % len(new) for d in axes]
        return pair[1 - pair.index(dim)] if dim in pair else dim
    if name == "permute":
        order: Any = node.args[1]
        return int(order[dim]) % len(new)
    if name == "select":
        return dim + (dim >= int(argument(node, 1, 0)) % len(old))
    if name == "movedim":
        return None
    if old[:dim] == new[:dim] and len(old) > dim and old[dim] == new[dim]:
        return dim
    is_tail = len(old) >= len(new) - dim and old[len(old) - (len(new) - dim) :] == new[dim:]
    return len(old) - (len(new) - dim) if is_tail else None

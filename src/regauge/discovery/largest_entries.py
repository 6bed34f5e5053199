"""A test whether the choice of the largest entries can depend on the order of equal entries. The test also covers
masked entries.

Routers mask some experts and then choose among the experts without a mask. Masked entries are equal. However, no masked
entry is chosen while enough unmasked entries remain.
"""

import math
from typing import Any

import torch
from torch.fx import Node

from regauge.discovery.equal_entries import EqualEntries
from regauge.discovery.operators import SAME, argument, operator_name, shape_of, words

POSITIVE = words("sigmoid softmax _softmax exp softplus")
ZEROS = words("zeros zeros_like new_zeros")
NEGATED = words("bitwise_not logical_not")


def may_tie_on_top(known: EqualEntries, node: Any, dim: int, count: int) -> bool:
    """Return whether the choice of the `count` largest entries along an axis can depend on the order of entries."""
    if not isinstance(node, Node):
        return True
    name, shape = operator_name(node), shape_of(node)
    if name in SAME and shape_of(node.args[0]) == shape:
        return may_tie_on_top(known, node.args[0], dim, count)
    filled = _filled(node, dim % len(shape)) if shape else None
    if filled is None or shape[dim] - filled < count:
        return known.may_tie(node, dim)
    return known.may_tie(node.args[0], dim)


def do_ties_vanish(known: EqualEntries, top: Node, dim: int) -> bool:
    """Return whether all equal entries among the largest are zeros of a ReLU that are later written into zeros.

    If all equal entries are zeros of a ReLU, the choice among equal entries has no effect. For example, sparse
    autoencoders write their largest entries into a tensor of zeros.
    """
    source = top.args[0]
    while isinstance(source, Node) and operator_name(source) in SAME:
        source = source.args[0]
    if not isinstance(source, Node) or operator_name(source) != "relu" or known.may_tie(source.args[0], dim):
        return False
    parts = [user for user in top.users if operator_name(user) == "getitem"]
    values = {part for part in parts if part.args[1] == 0}
    positions = [part for part in parts if part.args[1] == 1]
    return all(_writes_back(user, part, values) for part in positions for user in part.users)


def _writes_back(node: Node, positions: Node, values: set[Node]) -> bool:
    """Return whether a node writes values, or the ReLU of values, to their own positions in a tensor of zeros."""
    if operator_name(node) != "scatter" or len(node.args) != 4 or node.args[2] is not positions:
        return False
    base, source = node.args[0], node.args[3]
    while isinstance(source, Node) and operator_name(source) in SAME | {"relu"}:
        source = source.args[0]
    return isinstance(base, Node) and operator_name(base) in ZEROS and source in values


def _filled(node: Node, dim: int) -> int | None:
    """Return an upper bound on the number of entries along an axis that a node replaces by the smallest value.

    If the node does not mask entries, the result is None.
    """
    name, args = operator_name(node), node.args
    if name == "masked_fill" and _is_least(args[2], args[0]) and shape_of(args[0]) == shape_of(node):
        return _marked(args[1]) if dim == len(shape_of(node)) - 1 and _matches(args[1], node) else None
    if name == "scatter" and args[1] in (dim, dim - len(shape_of(node))) and _is_least(args[3], args[0]):
        return shape_of(args[2])[dim]
    return None


def _is_least(value: Any, x: Any) -> bool:
    """Return whether a number is at most as large as all entries of a tensor."""
    if isinstance(value, Node) or not isinstance(value, int | float):
        return False
    while isinstance(x, Node) and operator_name(x) in (*SAME, "view", "reshape"):
        x = x.args[0]
    is_positive = isinstance(x, Node) and operator_name(x) in POSITIVE
    return value == -math.inf or (value <= 0 and is_positive)


def _matches(mask: Any, node: Node) -> bool:
    return isinstance(mask, Node) and shape_of(mask)[-1:] == shape_of(node)[-1:]


def _marked(mask: Any) -> int | None:
    """Return how many entries a mask selects along its last axis, or None if this number may differ between rows."""
    found = _count(mask)
    return None if found is None or found[0] != 1 else found[1]


def _count(node: Any) -> tuple[int, int] | None:
    """Return `(axes, count)` if each block of a mask along its last `axes` axes contains exactly `count` ones.

    Return None if `axes` and `count` are not known.
    """
    if not isinstance(node, Node):
        return None
    name, args, shape = operator_name(node), node.args, shape_of(node)
    if name == "scatter":
        is_last = args[1] in (-1, len(shape) - 1) and shape_of(args[2])[:-1] == shape[:-1]
        is_blank = isinstance(args[0], Node) and operator_name(args[0]) in ZEROS
        return (1, shape_of(args[2])[-1]) if is_last and is_blank and args[3] == 1 and _is_choice(args[2]) else None
    inner = _count(args[0]) if args else None
    if inner is None:
        return None
    axes, count = inner
    before = shape_of(args[0])
    tail = before[len(before) - axes :]
    if name in SAME:
        return inner
    if name in NEGATED and node.meta["val"].dtype == torch.bool:
        return axes, math.prod(tail) - count
    if name == "unsqueeze" and args[1] in (-1, len(before)):
        return axes + 1, count
    if name == "expand" and len(shape) == len(before):
        return axes, count * math.prod(shape[len(shape) - axes :]) // math.prod(tail)
    if name in ("view", "reshape", "_unsafe_view"):
        widths = [k for k in range(1, len(shape) + 1) if math.prod(shape[len(shape) - k :]) == math.prod(tail)]
        return (widths[0], count) if widths else None
    return None


def _is_choice(indices: Any) -> bool:
    """Return whether all indices along the last axis of an index tensor are distinct."""
    if not isinstance(indices, Node) or operator_name(indices) != "getitem" or indices.args[1] != 1:
        return False
    chosen = indices.args[0]
    if not isinstance(chosen, Node) or operator_name(chosen) != "topk":
        return False
    return argument(chosen, 2, -1) in (-1, len(shape_of(indices)) - 1)

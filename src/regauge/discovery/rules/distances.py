"""Distances between rows, and norms of matrices."""

from regauge.discovery import laws as law
from regauge.discovery.builder import Builder, Over
from regauge.discovery.laws import LawOf, Value
from regauge.discovery.operators import Call, Rule, as_value
from regauge.discovery.rules.reductions import reduce


def all_pairs(b: Builder, call: Call) -> Value:
    """Return the norms of the differences between each row of one tensor and each row of a second tensor (cdist)."""
    x, y = as_value(b, call["x1"]), as_value(b, call["x2"])
    x, y = b.unsqueeze(x, x.ndim - 1), b.unsqueeze(y, y.ndim - 2)
    return _norm(b, _difference(b, x, y, (*call.shape, x.shape[-1])), call["p"])


def own_pairs(b: Builder, call: Call) -> Value:
    """Return the norms of the differences between all pairs of rows of one tensor, in a fixed order (pdist)."""
    x = as_value(b, call.x)
    shape = [*call.shape, x.shape[1]]
    pairs = b.carry(x, [None, 1], shape, law.linear, ended=None, reason=f"{b.op}: pairs of rows")
    return _norm(b, pairs, call["p"])


def distance(b: Builder, call: Call) -> Value:
    """Return the norm of the difference of two tensors over all entries (dist)."""
    x, y = as_value(b, call["self"]), as_value(b, call["other"])
    shape = [max(pair) for pair in zip(x.shape, y.shape, strict=True)]
    difference = _difference(b, x, y, shape)
    over, along = _kind(call["p"], difference.ndim)
    return b.reduce(difference, range(difference.ndim), keepdim=False, over=over, along=along)


def singular_values(b: Builder, call: Call) -> Value:
    """Return the singular values of matrices.

    Permutations and signs of rows and columns do not change singular values.
    """
    x = as_value(b, call.x)
    sources = [*range(x.ndim - 2), None]
    reason = f"{b.op}: singular values in their order"
    return b.carry(x, sources, call.shape, law.magnitude, ended=law.even, reason=reason)


def matrix_norm(b: Builder, call: Call) -> Value:
    """Return matrix norms of any order."""
    return reduce(b, as_value(b, call.x), call, law.magnitude, "magnitude")


def _difference(b: Builder, x: Value, y: Value, shape: tuple[int, ...] | list[int]) -> Value:
    return b.add([x, b.mul([y, -1], y.shape)], shape)


def _norm(b: Builder, x: Value, order: float) -> Value:
    over, along = _kind(order, 1)
    return b.reduce(x, [-1], keepdim=False, over=over, along=along)


def _kind(order: float, count: int) -> tuple[Over, LawOf]:
    """Return the reduction argument `over` and the law for a norm of the given order.

    Rotations along one axis do not change the 2-norm, and signs do not change any norm. The norm of order zero is the
    number of nonzero entries.
    """
    return "norm" if order == 2 and count == 1 else "magnitude", law.fixed if order == 0 else law.magnitude


RULES: dict[str, Rule] = {
    "cdist": all_pairs,
    "pdist": own_pairs,
    "dist": distance,
    "linalg_svdvals": singular_values,
    "linalg_matrix_norm": matrix_norm,
}

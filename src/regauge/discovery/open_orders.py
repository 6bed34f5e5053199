"""Open orders: orders of entries that an operator leaves unspecified. A test shows whether a later operator depends on
an open order.

`topk` without sorting returns the largest entries in an unspecified order, which may differ between tokens. The order
of the selected entries has no effect if every later operator treats all ranks alike and each token separately. The
units that `topk` compares may then be permuted. If a later operator depends on the order, `topk` is treated as an
operator without a rule.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from regauge.discovery.laws import Axis, Law, Record, Value
from regauge.discovery.layout import Atom, leaves


class OpenOrder(NamedTuple):
    """A result with an unspecified order along one axis: the name of its node, the result, and this axis."""

    node: str
    value: Value
    dim: int


def find_sensitive(orders: Iterable[OpenOrder], records: Sequence[Record]) -> frozenset[str]:
    """Return the nodes whose results have an unspecified order, if a later operator depends on this order.

    Call this function after all operators have been read, because operators may split axes further.
    """
    every = list(orders)
    known = Counter(atom for one in every for atom in leaves(one.value.layouts[one.dim]))
    return frozenset(one.node for one in every if not _is_free(one, known, records))


def _is_free(order: OpenOrder, known: Mapping[Atom, int], records: Sequence[Record]) -> bool:
    """Return whether permuting the entries of an unordered axis, separately for each token, changes no other tensor.

    The condition is checked operator by operator, in the order of the program. Tensors that have the unordered axis are
    permuted in the same way, and all other tensors stay unchanged. An operator passes the check if the unordered axis
    may be permuted and the operator treats each token separately. Parameters have no tokens, and different unordered
    axes are independent.
    """
    size = order.value.shape[order.dim]
    if size == 1:
        return True
    (rank, *more) = leaves(order.value.layouts[order.dim])
    if more or rank.size != size or rank.frozen is not None or known[rank] > 1:
        return False
    others = [layout for dim, layout in enumerate(order.value.layouts) if dim != order.dim]
    tokens = {atom for layout in others for atom in leaves(layout) if atom.size > 1}
    return rank not in tokens and all(_treats_alike(record, rank, tokens) for record in records)


def _treats_alike(record: Record, rank: Atom, tokens: set[Atom]) -> bool:
    values = {axis.value for law in record for axis in law.axes}
    ranked = [value for value in values if any(rank in leaves(layout) for layout in value.layouts)]
    if not ranked:
        return True
    if any(law.is_shared and any(rank in _atoms(axis) for axis in law.axes) for law in record):
        return False
    for value in ranked:
        found = [atom for layout in value.layouts for atom in leaves(layout)]
        if any(found.count(atom) != 1 for atom in (rank, *tokens)):
            return False
    first, *rest = ranked
    return all(_runs_along(record, first, other, atom) for other in rest for atom in tokens)


def _runs_along(record: Record, one: Value, other: Value, token: Atom) -> bool:
    """Return whether an operator treats each token separately, and combines only entries of the same token from the two
    tensors.
    """
    return any(not law.is_mixing and _has(law, one, token) and _has(law, other, token) for law in record)


def _has(law: Law, value: Value, atom: Atom) -> bool:
    return any(axis.value is value and atom in _atoms(axis) for axis in law.axes)


def _atoms(axis: Axis) -> list[Atom]:
    return [atom for dim in axis.dims for atom in leaves(axis.value.layouts[dim])]

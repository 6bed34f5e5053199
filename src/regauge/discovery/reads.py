"""A search for the axes of parameters over which layers sum, such as the input axis of a linear layer.

The axes of a weight may have any order.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from regauge.core.groups import Group
from regauge.discovery.laws import Law, Record, Value

Node = tuple[Value, int]
"""One axis of a tensor of the program."""


def read_axes(
    records: Iterable[Record],
    params: Mapping[str, Value],
    aliases: Mapping[str, tuple[str, ...]],
    groups: Sequence[Group],
) -> tuple[tuple[str, int], ...]:
    """Return the axes of parameters over which operators sum products with other values.

    Only axes on which groups act are returned.

    Before an operator sums products, other operators may rearrange, mask, scale or multiply the weights. An axis is
    excluded if one operator sums over it, and another operator uses it as an output axis. For example, if the last
    layer shares the weight of an embedding, the axes of this weight are excluded.
    """
    found = _Roles(params)
    for record in records:
        found.add(record)
    read = found.read()
    axes = ((name, k) for name, value in params.items() for k in range(value.ndim) if found.top(value, k) in read)
    named = ((alias, k) for name, k in axes for alias in aliases.get(name, (name,)))
    moved = {(place.parameter, place.axis) for group in groups for place in group.placements}
    return tuple(sorted(moved.intersection(named)))


class _Roles:
    """The roles of axes in layers, for tensors that depend on parameters but not on inputs.

    If axes share an index of an operator, this class joins them into one set.

    Attributes:
        parts: Pairs of an axis and the axes into which an operator splits it.
        open: For each summed product of two parameters, the summed axes of both parameters. Along one summed axis, the
            layer reads units. This axis is chosen later.
    """

    def __init__(self, params: Mapping[str, Value]) -> None:
        self.has_params: dict[Value, bool] = dict.fromkeys(params.values(), True)
        self.has_inputs: dict[Value, bool] = dict.fromkeys(params.values(), False)
        self.above: dict[Node, Node] = {}
        self.reads: set[Node] = set()
        self.gives: set[Node] = set()
        self.parts: list[tuple[Node, list[Node]]] = []
        self.open: list[list[list[Node]]] = []

    def add(self, record: Record) -> None:
        """Add the axes of one operator. Tensors that occur for the first time are results of the operator."""
        values = dict.fromkeys(axis.value for law in record for axis in law.axes)
        seen = [value for value in values if value in self.has_params]
        for value in values:
            if value not in self.has_params:
                self.has_params[value] = any(self.has_params[one] for one in seen)
                self.has_inputs[value] = value.has_inputs or any(self.has_inputs[one] for one in seen)
        for law in record:
            self._add_law(law)

    def _add_law(self, law: Law) -> None:
        weights = [
            [(axis.value, dim) for dim in axis.dims if axis.value.shape[dim] > 1]
            for axis in law.axes
            if self._is_weight(axis.value)
        ]
        has_others = len(weights) < len(law.axes)
        weights = [own for own in weights if own]
        if law.is_contraction and not has_others:
            self.open.append(weights)
        elif has_others:
            (self.reads if law.is_contraction else self.gives).update(node for own in weights for node in own)
        if not law.is_contraction:
            for one, other in pairwise(weights):
                self._join(one, other)

    def _is_weight(self, value: Value) -> bool:
        return self.has_params[value] and not self.has_inputs[value]

    def _join(self, one: list[Node], other: list[Node]) -> None:
        if len(one) == len(other):
            for a, b in zip(map(self._top, one), map(self._top, other), strict=True):
                if a != b:
                    self.above[a] = b
        elif min(len(one), len(other)) == 1:
            (whole,), parts = sorted((one, other), key=len)
            self.parts.append((whole, parts))

    def _top(self, node: Node) -> Node:
        while node in self.above:
            node = self.above[node]
        return node

    def read(self) -> set[Node]:
        """Return the axes along which layers only sum over units. An axis that also has another role is left out.

        Each set of joined axes is represented by one axis.
        """
        reads, gives = ({self._top(node) for node in found} for found in (self.reads, self.gives))
        for sides in self.open:
            # The chosen axis belongs to a matrix rather than a vector, and to the second of two matrices.
            able = [own for own in sides if not any(self._top(node) in gives for node in own)]
            if able:
                chosen = max(reversed(able), key=lambda own: own[0][0].ndim)
                reads.update(map(self._top, chosen))
        for whole, parts in reversed(self.parts):
            top, tops = self._top(whole), [*map(self._top, parts)]
            if reads.intersection(tops) - gives:
                reads.add(top)
            for found in (reads, gives):
                found.update(tops if top in found else ())
        return reads - gives

    def top(self, value: Value, dim: int) -> Node:
        """Return the axis that represents the set of axes which contains a given axis."""
        return self._top((value, dim))

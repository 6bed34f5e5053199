"""Follow a change of some parameters through the operators of a traced model.

Operators that move values move the changes alike. A change ends at an operator that does not see it (a softmax of
scores that all change alike, a LayerNorm of features that all change alike), or at a bias that takes it up.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.nn import functional

from regauge.core.params import Params
from regauge.discovery.operators import SAME, argument, operator_name, shape_of, words
from regauge.discovery.rewrites.value_flow import MOVES, Change, Seen, ValueFlow, along, call, classes_of, is_nothing

LAYERS = {"linear": (0, 1, 2), "addmm": (1, 2, 0), "conv1d": (0, 1, 2), "conv2d": (0, 1, 2), "conv3d": (0, 1, 2)}
"""Operators that are linear in a value and in a weight: arguments of value, weight and bias."""


def follow(flow: ValueFlow, start: Mapping[str, Tensor]) -> Params | None:
    """The given changes of parameters with the changes of biases that compensate them; None where something sees them.

    Parameters go by the first of their names. No output and no buffer that the model writes may change.
    """
    try:
        return _Run(flow, start).result()
    except Seen:
        return None


class _Run:
    """One change on its way through the program."""

    def __init__(self, flow: ValueFlow, start: Mapping[str, Tensor]) -> None:
        self.flow, self.start = flow, start
        self.taken: Params = {}
        self.changes: dict[Node, Any] = {}
        self.next_label = 1

    def result(self) -> Params:
        for node in self.flow.program.graph.graph.nodes:
            if node.op == "placeholder":
                state = self.flow.program.states.get(node.name)
                if state is not None and state in self.start:
                    self.changes[node] = Change(self.start[state])
            elif node.op == "call_function" and any(source in self.changes for source in node.all_input_nodes):
                name = operator_name(node)
                if name not in FOLLOWED:
                    raise Seen
                change = FOLLOWED[name](self, node)
                if change is not None and not is_nothing(change):
                    self.changes[node] = change
        ends = [*self.flow.program.outputs, *(node for node, _ in self.flow.program.written)]
        if any(node in self.changes for node in ends):
            raise Seen
        return {**self.start, **self.taken}

    def _of(self, argument: Any) -> Any:
        return self.changes.get(argument) if isinstance(argument, Node) else None

    def _fresh(self, labels: Tensor) -> Change:
        """Labels that no other change has; zeros stay."""
        labels = torch.where(labels == 0, 0, labels + self.next_label)
        self.next_label = int(labels.max()) + 1
        return Change(labels, is_known=False)

    def _labels(self, change: Change | None, node: Node) -> Tensor:
        if change is None:
            return torch.zeros(shape_of(node), dtype=torch.int64)
        if not change.is_known:
            return change.entries
        labels = torch.unique(change.entries, return_inverse=True)[1]
        return self._fresh(torch.where(change.entries == 0, 0, labels + 1)).entries

    def _same(self, node: Node) -> Any:
        return self._of(node.args[0])

    def _move(self, node: Node) -> Any:
        """The entries of the change where the operator puts the entries of the value."""
        sources = [source for source in node.all_input_nodes if source in self.changes]
        if any(isinstance(self.changes[source], list | tuple) for source in sources):
            return self.changes[sources[0]][node.args[1]]  # One of the results of a split.
        indices = set(node.all_input_nodes[1:]) if operator_name(node) in ("index", "index_select") else set()
        if indices & set(sources):
            raise Seen
        is_known = all(self.changes[source].is_known for source in sources)
        operands: dict[Node, Any] = {}
        for source in node.all_input_nodes:
            change = self._of(source)
            held = self.flow.constant(source)
            if source in indices and held is not None:
                operands[source] = held
            elif source in indices:
                # Wherever it points to, the change is the same.
                if operator_name(node) != "index" or None in node.args[1]:  # type: ignore[operator]
                    raise Seen
                self._unseen(self.changes[node.args[0]], range(len(node.args[1])))  # type: ignore[index,arg-type]
                operands[source] = torch.zeros(shape_of(source), dtype=torch.int64)
            elif is_known:
                blank = torch.zeros(shape_of(source), dtype=torch.float64)
                operands[source] = blank if change is None else change.entries
            else:
                operands[source] = self._labels(change, source)
        return Change(torch.zeros(()), is_known).map(lambda _: call(node, operands))

    def _linear(self, node: Node) -> Change:
        return self._known(node, node.args[0])

    def _known(self, node: Node, argument: Any) -> Change:
        """An operator that is linear in one operand, on a known change of it."""
        others = {source: self.flow.constant(source) for source in node.all_input_nodes if source is not argument}
        if any(o is None or s in self.changes for s, o in others.items()):
            raise Seen
        return Change(call(node, {**others, argument: self._require_known(self._of(argument))}))

    def _require_known(self, change: Change | None) -> Tensor:
        if change is None or not change.is_known:
            raise Seen
        return change.entries

    def _layer(self, node: Node) -> Change | None:
        x, w, b = (argument(node, k, None) for k in LAYERS[operator_name(node)])
        if operator_name(node) == "addmm" and (node.kwargs or self.flow.constant(w) is None):
            raise Seen
        dim = len(shape_of(node)) - 1 if operator_name(node) in ("linear", "addmm") else 1
        total: Change | None = None
        change, changed = self._of(x), self._of(w)
        if changed is not None:
            if change is not None:
                raise Seen
            total = self._reweigh(node, x, self._require_known(changed), dim)
        elif change is not None:
            weights = self.flow.constant(w)
            if weights is None:
                raise Seen
            blank = torch.zeros((), dtype=torch.float64) if operator_name(node) == "addmm" else None
            operands = {x: self._require_known(change), w: weights, **({b: blank} if isinstance(b, Node) else {})}
            total = Change(call(node, operands))
        shift = self._of(b)
        if shift is not None:
            total = self._add(total, Change(along(shift.entries, dim, shape_of(node))), node)
        return self._take_up(b, total, [k for k in range(len(shape_of(node))) if k != dim])

    def _reweigh(self, node: Node, x: Any, change: Tensor, dim: int) -> Change | None:
        """A change of the weights: outputs change alike where their rows change alike."""
        if operator_name(node) == "addmm":
            change = change.mT
        rows = change.flatten(1)
        groups = int(argument(node, 6, 1)) if operator_name(node).startswith("conv") else 1
        if groups > 1:
            # Rows of different groups read different channels.
            group = torch.arange(1, groups + 1, dtype=rows.dtype).repeat_interleave(len(rows) // groups)
            rows = torch.cat([rows / rows.abs().max(), group.unsqueeze(1)], 1)
        if operator_name(node) in ("linear", "addmm") and Change(rows).is_uniform(1) and self.flow.sums_to_zero(x):
            return None
        classes = classes_of(rows)
        shape = shape_of(node)
        others = torch.arange(torch.Size([n for k, n in enumerate(shape) if k != dim]).numel())
        grid = others.reshape([1 if k == dim else n for k, n in enumerate(shape)]) * (int(classes.max()) + 1)
        labels = torch.where(along(classes, dim, shape) == 0, 0, grid + along(classes, dim, shape))
        return self._fresh(labels)

    def _embedding(self, node: Node) -> Change | None:
        table = self._require_known(self._of(node.args[0]))
        if node.args[1] in self.changes:
            raise Seen
        shape = shape_of(node)
        if Change(table).is_uniform(0):
            return Change(along(table[0], len(shape) - 1, shape))
        indices = self.flow.constant(node.args[1])
        if indices is not None:
            return Change(functional.embedding(indices, table))
        classes = classes_of(table.mT)
        places = torch.arange(torch.Size(shape[:-1]).numel()).reshape(*shape[:-1], 1) * (int(classes.max()) + 1)
        return self._fresh(torch.where(classes == 0, 0, places + classes))

    def _add(self, x: Change | None, y: Change | None, node: Node) -> Change | None:
        """The sum of two changes of one shape."""
        if x is None or y is None:
            return x if y is None else y
        if x.is_known and y.is_known:
            return Change(x.entries + y.entries)
        left, right = self._labels(x, node), self._labels(y, node)
        pairs = torch.stack([left, right], -1).reshape(-1, 2)
        both = torch.unique(pairs, dim=0, return_inverse=True)[1].reshape(left.shape) + 1
        return self._fresh(torch.where((left == 0) & (right == 0), 0, both))

    def _sum(self, node: Node) -> Change | None:
        shape, alpha = shape_of(node), float(node.kwargs.get("alpha", 1))  # type: ignore[arg-type]
        factors = (1.0, -alpha if operator_name(node) == "sub" else alpha)
        total: Change | None = None
        for operand, factor in zip(node.args[:2], factors, strict=True):
            change = self._of(operand)
            if change is not None:
                here = change.entries.expand(shape)
                if change.is_known:
                    change = Change(here * factor)
                else:
                    change = Change(here, is_known=False) if factor == 1.0 else self._fresh(here)
                total = self._add(total, change, node)
        for operand, factor in zip(node.args[:2], factors, strict=True):
            if factor == 1.0 and self._is_taker(operand):
                own = shape_of(operand)
                lead = len(shape) - len(own)
                uniform = [d for d in range(len(shape)) if d < lead or own[d - lead] != shape[d]]
                total = self._take_up(operand, total, uniform)
        return total

    def _is_taker(self, operand: Any) -> bool:
        states = self.flow.program.states
        return (
            isinstance(operand, Node) and operand.op == "placeholder" and states.get(operand.name) in self.flow.takers
        )

    def _take_up(self, operand: Any, change: Change | None, uniform: Sequence[int]) -> Change | None:
        """Let a bias compensate a change and return None; return the change where it varies along `uniform`."""
        if change is None or not change.is_known or not self._is_taker(operand):
            return change
        state = self.flow.program.states[operand.name]
        if state in self.start or state in self.taken or not all(change.is_uniform(d) for d in uniform):
            return change
        value = change.entries
        for d in uniform:
            value = value.narrow(d, 0, 1)
        self.taken[state] = -value.reshape(self.flow.params[state].shape)
        return None

    def _scale(self, node: Node) -> Change | None:
        x, y = node.args[:2]
        if self._of(x) is not None and self._of(y) is not None:
            raise Seen
        changed, other = (x, y) if self._of(x) is not None else (y, x)
        change, is_quotient = self._of(changed), operator_name(node) == "div"
        if is_quotient and changed is y:
            raise Seen
        if isinstance(other, Node):
            other = self.flow.constant(other)
            if other is None or not change.is_known:
                raise Seen
        if change.is_known:
            return Change(change.entries / other if is_quotient else change.entries * other)
        return self._fresh(change.entries)

    def _softmax(self, node: Node) -> None:
        self._unseen(self._of(node.args[0]), [int(node.args[1])])  # type: ignore[arg-type]

    def _unseen(self, change: Change | None, dims: Sequence[int]) -> None:
        """Drop a change that is constant along these axes, to which the operator is blind; raise `Seen` for others."""
        if change is not None and not all(change.is_uniform(d) for d in dims):
            raise Seen

    def _layer_norm(self, node: Node) -> Change | None:
        x, sizes = node.args[:2]
        dims = range(-len(sizes), 0)  # type: ignore[arg-type]
        change = self._of(x)
        if change is not None:
            # Constant along all normalized axes together, not along each alone.
            self._unseen(change.map(lambda t: t.flatten(dims[0])), [-1])
        if self._of(argument(node, 2, None)) is not None:
            raise Seen
        bias = self._of(argument(node, 3, None))
        return None if bias is None else Change(bias.entries.expand(shape_of(node)).clone())

    def _attention(self, node: Node) -> Change | None:
        query, key, value = node.args[:3]
        if self._of(query) is not None or self._of(argument(node, 3, None)) is not None:
            raise Seen
        self._unseen(self._of(key), [-2])
        change = self._of(value)
        if change is None:
            return None
        self._unseen(change, [-2])
        shape = shape_of(node)
        row = self._require_known(change).narrow(-2, 0, 1)
        if row.shape[-3] != shape[-3]:
            row = row.repeat_interleave(shape[-3] // row.shape[-3], -3)
        return Change(row.expand(shape).clone())

    def _product(self, node: Node) -> Change | None:
        left, right = node.args[:2]
        change = self._of(right)
        if self._of(left) is not None:
            return self._known(node, left)
        if change is not None and change.is_known and self.flow.sums_to_one(left) and change.is_uniform(-2):
            return Change(change.entries.narrow(-2, 0, 1).expand(shape_of(node)).clone())
        if change is None or not change.is_uniform(-1):
            raise Seen
        shape = shape_of(node)
        rows = torch.arange(1, torch.Size(shape[:-1]).numel() + 1).reshape(*shape[:-1], 1)
        return self._fresh(rows.expand(shape))

    def _recurrent(self, node: Node) -> None:
        """The bias of the state is added to that of the input, except where a gate of a GRU multiplies it."""
        name, weights = operator_name(node), _weights(node)
        if any(source in self.changes for source in node.all_input_nodes if source not in weights):
            raise Seen
        for k, weight in enumerate(weights):
            change = self._of(weight)
            if change is None:
                continue
            if k % 4 != 3 or not change.is_known or not self._is_taker(weights[k - 1]):
                raise Seen
            third = len(change.entries) // 3
            if name == "gru" and bool((change.entries[2 * third :] != 0).any()):
                raise Seen
            state = self.flow.program.states[weights[k - 1].name]
            if state in self.start or state in self.taken:
                raise Seen
            self.taken[state] = -change.entries


def _weights(node: Node) -> list[Any]:
    """The weights of a recurrent layer with biases, four for each direction of each layer."""
    found: list[list[Any]] = [list(a) for a in node.args[2:4] if isinstance(a, list | tuple)]
    if not found or node.args[3] is not True:
        raise Seen
    return found[0]


FOLLOWED: dict[str, Callable[[_Run, Node], Any]] = {
    **dict.fromkeys(SAME, _Run._same),
    **dict.fromkeys(MOVES, _Run._move),
    **dict.fromkeys(LAYERS, _Run._layer),
    **dict.fromkeys(words("add sub"), _Run._sum),
    **dict.fromkeys(words("mul div"), _Run._scale),
    **dict.fromkeys(words("sum mean neg cumsum avg_pool1d avg_pool2d"), _Run._linear),
    **dict.fromkeys(words("adaptive_avg_pool1d adaptive_avg_pool2d"), _Run._linear),
    **dict.fromkeys(words("softmax _softmax _safe_softmax log_softmax _log_softmax"), _Run._softmax),
    **dict.fromkeys(words("matmul bmm"), _Run._product),
    **dict.fromkeys(words("lstm gru rnn_tanh rnn_relu"), _Run._recurrent),
    "embedding": _Run._embedding,
    "layer_norm": _Run._layer_norm,
    "scaled_dot_product_attention": _Run._attention,
}
"""The effects of operators on a change; all other operators see it."""

"""What a change of some parameters does to the values of a traced model, followed through its operators.

A change of a value is either *known*, a tensor that is added whatever the inputs are, or known only to be equal at
some indices: then every index carries a label, equal labels mean equal changes, and the label zero means no change.
Operators that move values move labels alike. What ends a change is an operator that does not see it: a softmax of
scores that all change alike, a LayerNorm of features that all change alike, or a bias that takes it up.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.nn import functional
from torch.utils import _pytree as pytree

from regauge.core.params import Params
from regauge.discover.activations import COPIES
from regauge.discover.rewrites.gains import operator
from regauge.discover.trace import Program

EQUAL = 1e-12
"""Known changes that differ by less than this share of the largest one are equal: they differ by rounding."""
SAME = COPIES & {"clone", "contiguous", "detach", "alias", "_to_copy", "to", "type_as", "dropout", "feature_dropout",
                 "lift_fresh_copy"}  # fmt: skip
"""Copies that leave every value where it is."""
MOVES = (COPIES - SAME) | {"slice", "select", "narrow", "cat", "stack", "split", "split_with_sizes", "chunk", "unbind",
                           "index_select", "roll", "flip", "repeat", "getitem", "index"}  # fmt: skip
"""Operators whose results are entries of their operands."""
LAYERS = {"linear": (0, 1, 2), "addmm": (1, 2, 0), "conv1d": (0, 1, 2), "conv2d": (0, 1, 2), "conv3d": (0, 1, 2)}
"""Operators that are linear in a value and in a weight: arguments of value, weight and bias."""
LINEAR = {"sum", "mean", "neg", "avg_pool1d", "avg_pool2d", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "cumsum"}
RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu"}


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
        return pytree.tree_map_only(Tensor, Known, call(self.value))


@dataclass(frozen=True)
class Labeled:
    """What is added depends on the inputs; it is equal where the labels are."""

    labels: Tensor

    def is_uniform(self, dim: int) -> bool:
        """Whether it is constant along an axis."""
        return bool((self.labels == self.labels.narrow(dim, 0, 1)).all())

    def moved(self, call: Callable[[Tensor], Any]) -> Any:
        return pytree.tree_map_only(Tensor, Labeled, call(self.labels))


Change = Known | Labeled


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

    def follow(self, start: Mapping[str, Tensor]) -> Params | None:
        """All that must be added to the parameters for the outputs to stay when `start` is added.

        Args:
            start: What is added to some parameters, by the first of their names.

        Returns:
            `start` and what biases take up; None where something sees the change.
        """
        try:
            return _Run(self, start).result()
        except Seen:
            return None

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
        return _call(node, operands)

    def sums_to_one(self, node: Any) -> bool:
        """Whether a value is non-negative weights that sum to one along its last axis."""
        if not isinstance(node, Node) or node.op != "call_function":
            return False
        if operator(node) in ("softmax", "_softmax", "_safe_softmax"):
            return node.args[1] in (-1, len(_shape(node)) - 1)
        if operator(node) in SAME | {"expand", "view", "reshape"}:
            return _shape(node)[-1] == _shape(node.args[0])[-1] and self.sums_to_one(node.args[0])
        return False

    def sums_to_zero(self, node: Any) -> bool:
        """Whether a value sums to zero along its last axis: after LayerNorm with equal gains and a centered bias."""
        if not isinstance(node, Node) or node.op != "call_function":
            return False
        if operator(node) == "layer_norm":
            gain, bias = (self.constant(_argument(node, k, None)) for k in (2, 3))
            is_even = gain is None or bool((gain == gain.flatten()[0]).all())
            return len(node.args[1]) == 1 and is_even and (bias is None or float(bias.sum().abs()) <= EQUAL)  # type: ignore[arg-type]
        if operator(node) in SAME | {"view", "reshape", "slice", "select", "unsqueeze"}:
            source = node.args[0]
            return _shape(node)[-1:] == _shape(source)[-1:] and not _touches_last(node) and self.sums_to_zero(source)
        return False


class _Run:
    """One change on its way through the program."""

    def __init__(self, flow: Flow, start: Mapping[str, Tensor]) -> None:
        self.flow, self.start = flow, start
        self.taken: Params = {}
        self.changes: dict[Node, Any] = {}
        self.next_label = 1

    def result(self) -> Params:
        for node in self.flow.program.graph.graph.nodes:
            if node.op == "placeholder":
                state = self.flow.program.states.get(node.name)
                if state is not None and state in self.start:
                    self.changes[node] = Known(self.start[state])
            elif node.op == "call_function" and any(source in self.changes for source in node.all_input_nodes):
                change = self._through(node)
                if change is not None and not _is_nothing(change):
                    self.changes[node] = change
        ends = [*self.flow.program.outputs, *(node for node, _ in self.flow.program.written)]
        if any(node in self.changes for node in ends):
            raise Seen
        return {**self.start, **self.taken}

    def _through(self, node: Node) -> Any:
        name = operator(node) or getattr(node.target, "__name__", "")
        if name in SAME:
            return self._of(node.args[0])
        if name in MOVES:
            return self._moved(node)
        if name in LAYERS:
            return self._layer(node, *LAYERS[name])
        if name in ("add", "sub"):
            return self._sum(node, -1.0 if name == "sub" else 1.0)
        if name in ("mul", "div"):
            return self._scaled(node)
        if name in LINEAR:
            return self._known(node, node.args[0])
        if name == "embedding":
            return self._embedding(node)
        if name == "layer_norm":
            return self._layer_norm(node)
        if name in ("softmax", "_softmax", "_safe_softmax", "log_softmax", "_log_softmax"):
            return self._unseen(self._of(node.args[0]), [int(node.args[1])])  # type: ignore[arg-type]
        if name == "scaled_dot_product_attention":
            return self._attention(node)
        if name in ("matmul", "bmm"):
            return self._product(node)
        if name in RECURRENT:
            return self._recurrent(node)
        raise Seen

    def _of(self, argument: Any) -> Any:
        return self.changes.get(argument) if isinstance(argument, Node) else None

    def _fresh(self, labels: Tensor) -> Labeled:
        """Labels that no other change has; zeros stay."""
        labels = torch.where(labels == 0, 0, labels + self.next_label)
        self.next_label = int(labels.max()) + 1
        return Labeled(labels)

    def _labels(self, change: Change | None, node: Node) -> Labeled:
        if isinstance(change, Labeled):
            return change
        if change is None:
            return Labeled(torch.zeros(_shape(node), dtype=torch.int64))
        labels = torch.unique(change.value, return_inverse=True)[1]
        return self._fresh(torch.where(change.value == 0, 0, labels + 1))

    def _moved(self, node: Node) -> Any:
        """The entries of the change where the operator puts the entries of the value."""
        sources = [source for source in node.all_input_nodes if source in self.changes]
        if any(isinstance(self.changes[source], list | tuple) for source in sources):
            return self.changes[sources[0]][node.args[1]]  # One of the results of a split.
        indices = set(node.all_input_nodes[1:]) if operator(node) in ("index", "index_select") else set()
        if indices & set(sources):
            raise Seen
        is_known = all(isinstance(self.changes[source], Known) for source in sources)
        operands: dict[Node, Any] = {}
        for source in node.all_input_nodes:
            change = self._of(source)
            held = self.flow.constant(source)
            if source in indices and held is not None:
                operands[source] = held
            elif source in indices:
                # Wherever it points to, the change is the same.
                if operator(node) != "index" or None in node.args[1]:  # type: ignore[operator]
                    raise Seen
                self._unseen(self.changes[node.args[0]], range(len(node.args[1])))  # type: ignore[index,arg-type]
                operands[source] = torch.zeros(_shape(source), dtype=torch.int64)
            elif is_known:
                operands[source] = torch.zeros(_shape(source), dtype=torch.float64) if change is None else change.value
            else:
                operands[source] = self._labels(change, source).labels
        return pytree.tree_map_only(Tensor, Known if is_known else Labeled, _call(node, operands))

    def _known(self, node: Node, argument: Any) -> Known:
        """An operator that is linear in one operand, on a known change of it."""
        change = self._of(argument)
        others = {source: self.flow.constant(source) for source in node.all_input_nodes if source is not argument}
        if not isinstance(change, Known) or any(o is None or s in self.changes for s, o in others.items()):
            raise Seen
        return Known(_call(node, {**others, argument: change.value}))

    def _layer(self, node: Node, value: int, weight: int, bias: int) -> Change | None:
        x, w, b = (_argument(node, k, None) for k in (value, weight, bias))
        if operator(node) == "addmm" and (node.kwargs or self.flow.constant(w) is None):
            raise Seen
        dim = len(_shape(node)) - 1 if operator(node) in ("linear", "addmm") else 1
        total: Change | None = None
        change, changed = self._of(x), self._of(w)
        if changed is not None:
            if change is not None or not isinstance(changed, Known):
                raise Seen
            total = self._reweighted(node, x, changed.value, dim)
        elif change is not None:
            weights = self.flow.constant(w)
            if not isinstance(change, Known) or weights is None:
                raise Seen
            blank = torch.zeros((), dtype=torch.float64) if operator(node) == "addmm" else None
            operands = {x: change.value, w: weights, **({b: blank} if isinstance(b, Node) else {})}
            total = Known(_call(node, operands))
        shift = self._of(b)
        if shift is not None:
            total = self._added(total, Known(_along(shift.value, dim, _shape(node))), node)
        return self._taken(b, total, [k for k in range(len(_shape(node))) if k != dim])

    def _reweighted(self, node: Node, x: Any, change: Tensor, dim: int) -> Labeled | None:
        """A change of the weights: outputs change alike where their rows change alike."""
        if operator(node) == "addmm":
            change = change.mT
        rows = change.flatten(1)
        groups = int(_argument(node, 6, 1)) if operator(node).startswith("conv") else 1
        if groups > 1:
            # Rows of different groups read different channels.
            group = torch.arange(1, groups + 1, dtype=rows.dtype).repeat_interleave(len(rows) // groups)
            rows = torch.cat([rows / rows.abs().max(), group.unsqueeze(1)], 1)
        if operator(node) in ("linear", "addmm") and Known(rows).is_uniform(1) and self.flow.sums_to_zero(x):
            return None
        classes = _classes(rows)
        shape = _shape(node)
        others = torch.arange(torch.Size([n for k, n in enumerate(shape) if k != dim]).numel())
        grid = others.reshape([1 if k == dim else n for k, n in enumerate(shape)]) * (int(classes.max()) + 1)
        labels = torch.where(_along(classes, dim, shape) == 0, 0, grid + _along(classes, dim, shape))
        return self._fresh(labels)

    def _embedding(self, node: Node) -> Change | None:
        table = self._of(node.args[0])
        if not isinstance(table, Known) or node.args[1] in self.changes:
            raise Seen
        shape = _shape(node)
        if table.is_uniform(0):
            return Known(_along(table.value[0], len(shape) - 1, shape))
        indices = self.flow.constant(node.args[1])
        if indices is not None:
            return Known(functional.embedding(indices, table.value))
        classes = _classes(table.value.mT)
        places = torch.arange(torch.Size(shape[:-1]).numel()).reshape(*shape[:-1], 1) * (int(classes.max()) + 1)
        return self._fresh(torch.where(classes == 0, 0, places + classes))

    def _added(self, x: Change | None, y: Change | None, node: Node) -> Change | None:
        """The sum of two changes of one shape."""
        if x is None or y is None:
            return x if y is None else y
        if isinstance(x, Known) and isinstance(y, Known):
            return Known(x.value + y.value)
        left, right = self._labels(x, node).labels, self._labels(y, node).labels
        pairs = torch.stack([left, right], -1).reshape(-1, 2)
        both = torch.unique(pairs, dim=0, return_inverse=True)[1].reshape(left.shape) + 1
        return self._fresh(torch.where((left == 0) & (right == 0), 0, both))

    def _sum(self, node: Node, sign: float) -> Change | None:
        shape, alpha = _shape(node), float(node.kwargs.get("alpha", 1))  # type: ignore[arg-type]
        total: Change | None = None
        for k, operand in enumerate(node.args[:2]):
            change = self._of(operand)
            if change is not None:
                factor = sign * alpha if k else 1.0
                here = change.moved(lambda t: t.expand(shape))
                if isinstance(here, Known):
                    here = Known(here.value * factor)
                elif factor != 1.0:
                    here = self._fresh(here.labels)
                total = self._added(total, here, node)
        for k, operand in enumerate(node.args[:2]):
            if isinstance(total, Known) and self._is_taker(operand) and (k == 0 or sign * alpha == 1.0):
                own = _shape(operand)
                lead = len(shape) - len(own)
                uniform = [d for d in range(len(shape)) if d < lead or own[d - lead] != shape[d]]
                total = self._taken(operand, total, uniform)
        return total

    def _is_taker(self, operand: Any) -> bool:
        states = self.flow.program.states
        return (
            isinstance(operand, Node) and operand.op == "placeholder" and states.get(operand.name) in self.flow.takers
        )

    def _taken(self, operand: Any, change: Change | None, uniform: Sequence[int]) -> Change | None:
        """What is left of a change that a bias takes up where it can: only what is the same along `uniform`."""
        if not isinstance(change, Known) or not self._is_taker(operand):
            return change
        state = self.flow.program.states[operand.name]
        if state in self.start or state in self.taken or not all(change.is_uniform(d) for d in uniform):
            return change
        value = change.value
        for d in uniform:
            value = value.narrow(d, 0, 1)
        self.taken[state] = -value.reshape(self.flow.params[state].shape)
        return None

    def _scaled(self, node: Node) -> Change | None:
        x, y = node.args[:2]
        if self._of(x) is not None and self._of(y) is not None:
            raise Seen
        changed, other = (x, y) if self._of(x) is not None else (y, x)
        change, is_quotient = self._of(changed), operator(node) == "div"
        if is_quotient and changed is y:
            raise Seen
        if isinstance(other, Node):
            value = self.flow.constant(other)
            if not isinstance(change, Known) or value is None:
                raise Seen
            return Known(change.value / value if is_quotient else change.value * value)
        if isinstance(change, Known):
            factor: Any = other
            return Known(change.value / factor if is_quotient else change.value * factor)
        return self._fresh(change.labels)

    def _unseen(self, change: Change | None, dims: Sequence[int]) -> None:
        """Nothing remains of a change that is constant along these axes."""
        if change is not None and not all(change.is_uniform(d) for d in dims):
            raise Seen

    def _layer_norm(self, node: Node) -> Change | None:
        x, sizes = node.args[:2]
        dims = range(-len(sizes), 0)  # type: ignore[arg-type]
        change = self._of(x)
        if change is not None:
            # Constant along all normalized axes together, not along each alone.
            flat = change.moved(lambda t: t.flatten(dims[0]))
            self._unseen(flat, [-1])
        if self._of(_argument(node, 2, None)) is not None:
            raise Seen
        bias = self._of(_argument(node, 3, None))
        return None if bias is None else Known(bias.value.expand(_shape(node)).clone())

    def _attention(self, node: Node) -> Change | None:
        query, key, value = node.args[:3]
        if self._of(query) is not None or self._of(_argument(node, 3, None)) is not None:
            raise Seen
        self._unseen(self._of(key), [-2])
        change = self._of(value)
        if change is None:
            return None
        self._unseen(change, [-2])
        if not isinstance(change, Known):
            raise Seen
        shape = _shape(node)
        row = change.value.narrow(-2, 0, 1)
        if row.shape[-3] != shape[-3]:
            row = row.repeat_interleave(shape[-3] // row.shape[-3], -3)
        return Known(row.expand(shape).clone())

    def _product(self, node: Node) -> Change | None:
        left, right = node.args[:2]
        change = self._of(right)
        if self._of(left) is not None:
            return self._known(node, left)
        if self.flow.sums_to_one(left) and isinstance(change, Known) and change.is_uniform(-2):
            return Known(change.value.narrow(-2, 0, 1).expand(_shape(node)).clone())
        if change is None or not change.is_uniform(-1):
            raise Seen
        shape = _shape(node)
        rows = torch.arange(1, torch.Size(shape[:-1]).numel() + 1).reshape(*shape[:-1], 1)
        return self._fresh(rows.expand(shape))

    def _recurrent(self, node: Node) -> None:
        """The bias of the state is added to that of the input, except where a gate of a GRU multiplies it."""
        name, weights = operator(node), _weights(node)
        if any(source in self.changes for source in node.all_input_nodes if source not in weights):
            raise Seen
        for k, weight in enumerate(weights):
            change = self._of(weight)
            if change is None:
                continue
            if k % 4 != 3 or not isinstance(change, Known) or not self._is_taker(weights[k - 1]):
                raise Seen
            third = len(change.value) // 3
            if name == "gru" and bool((change.value[2 * third :] != 0).any()):
                raise Seen
            state = self.flow.program.states[weights[k - 1].name]
            if state in self.start or state in self.taken:
                raise Seen
            self.taken[state] = -change.value


def _is_nothing(change: Any) -> bool:
    if isinstance(change, Known | Labeled):
        return not bool((change.value if isinstance(change, Known) else change.labels).any())
    return all(_is_nothing(one) for one in change)


def _weights(node: Node) -> list[Any]:
    """The weights of a recurrent layer with biases, four for each direction of each layer."""
    found: list[list[Any]] = [list(a) for a in node.args[2:4] if isinstance(a, list | tuple)]
    if not found or node.args[3] is not True:
        raise Seen
    return found[0]


def _call(node: Node, operands: Mapping[Node, Any]) -> Any:
    """The operator of a node on other operands."""
    whole = {key: t.contiguous() if isinstance(t, Tensor) else t for key, t in operands.items()}
    args, kwargs = pytree.tree_map_only(Node, lambda n: whole[n], (node.args, dict(node.kwargs)))
    try:
        return node.target(*args, **kwargs)  # type: ignore[operator]
    except (RuntimeError, IndexError, TypeError) as error:
        raise Seen from error  # An operator that cannot be called on a change says nothing about it.


def _argument(node: Node, position: int, default: Any) -> Any:
    return node.args[position] if len(node.args) > position else default


def _shape(node: Any) -> tuple[int, ...]:
    return tuple(int(n) for n in node.meta["val"].shape) if isinstance(node, Node) else ()


def _along(values: Tensor, dim: int, shape: Sequence[int]) -> Tensor:
    """Values for one axis, the same along all others."""
    return values.reshape([n if k == dim else 1 for k, n in enumerate(shape)]).expand(tuple(shape))


def _classes(rows: Tensor) -> Tensor:
    """For each row a number; equal rows have equal ones, zero means that nothing changes."""
    # Products with one fixed vector without structure tell rows apart, and sort much faster than they do.
    mixed = rows @ torch.arange(1.0, rows.shape[1] + 1, dtype=rows.dtype).square().cos()
    step = EQUAL * rows.abs().sum(1).max()
    classes = torch.unique((mixed / step).round() if step > 0 else mixed, return_inverse=True)[1]
    return torch.where((rows == 0).all(1), 0, classes + 1)


def _touches_last(node: Node) -> bool:
    """Whether a slice or a selection takes entries of the last axis, or the last axis is new."""
    dim = _argument(node, 1, 0)
    is_axis = operator(node) in ("slice", "select", "unsqueeze") and isinstance(dim, int)
    return is_axis and dim % max(len(_shape(node.args[0])) + (operator(node) == "unsqueeze"), 1) == (
        len(_shape(node)) - (operator(node) != "select")
    )

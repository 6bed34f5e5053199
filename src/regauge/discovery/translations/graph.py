"""A traced model with the information that the search for translations needs.

The information contains parameters and their views, integer constants, and known sums of values.
"""

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from regauge.core.translations import Entries, ImageStep
from regauge.discovery.operators import PIECES, SAME, VIEWS, argument, operator_name, shape_of, words
from regauge.discovery.trace import Program
from regauge.discovery.translations.offsets import SeenError

MAXIMA, PAIRED = words("amax amin max min logsumexp"), words("maximum minimum logaddexp")
"""Operators that return a maximum, minimum or smooth maximum: along axes, or of two values."""
PADS = words("pad constant_pad_nd")
"""Operators that pad a value with constants."""
RESHAPES = words("view _unsafe_view reshape flatten unflatten squeeze")
"""Operators that arrange the same entries in the same order."""
MOST_NUMBERS = 1 << 20
"""The largest number of entries of a value that is inspected entry by entry."""
Total = tuple[Entries | None, tuple[ImageStep, ...]]
"""The known sum of a value: the gain by which the value is divided before it is summed (or None), and the operation
that multiplies a vector by the sum. If the sum is zero, the operation is missing."""

BIASES = {"layer_norm": 3, "group_norm": 3, "batch_norm": 2, "instance_norm": 2, "linear": 2, "addmm": 0}
BIASES |= dict.fromkeys(words("conv1d conv2d conv3d"), 2)
"""Operators that add a parameter to each channel, and the argument position of this parameter."""
CELLS = dict.fromkeys(words("lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell"), 4)
"""Operators that compute a single step of a recurrent layer, each with the argument position of the bias that belongs
to the input."""


@dataclass(frozen=True)
class Graph:
    """A traced model. The methods of a graph return which nodes are parameters, which sums are known, and which
    operators read a value.

    Attributes:
        program: The traced model.
        ones: Gains that are one in a representative, which is a rescaled network of the same function.
        onward: Cached effects that the change (offset) of a node's value has on the outputs.
    """

    program: Program
    ones: frozenset[str]
    onward: dict[Hashable, Any] = field(default_factory=dict)
    _constants: dict[Node, Any] = field(default_factory=dict)
    _totals: dict[tuple[Node, int], Total | None] = field(default_factory=dict)

    @cached_property
    def order(self) -> dict[Node, int]:
        """The position of each node in the graph."""
        return {node: k for k, node in enumerate(self.program.graph.graph.nodes)}

    @cached_property
    def first(self) -> dict[Node, Node]:
        """For each node, the first node (possibly itself) that calls the same operator on the same operands."""
        found: dict[Node, Node] = {}
        known: dict[Hashable, Node] = {}
        for node in self.order:
            found[node] = node
            if node.op == "call_function" and node.all_input_nodes:
                args, kwargs = map_arg((node.args, node.kwargs), found.__getitem__)
                leaves, tree = pytree.tree_flatten((args, kwargs))
                if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
                    found[node] = known.setdefault((node.target, str(tree), tuple(map(repr, leaves))), node)
        return found

    @cached_property
    def written(self) -> dict[Node, str]:
        """The results that the model writes to buffers and parameters, each with the name of the tensor to which it is
        written.
        """
        return dict(self.program.written)

    @cached_property
    def ends(self) -> frozenset[Node]:
        """The outputs, and the results that the model writes to its state."""
        return frozenset([*(node for node, _ in self.program.outputs), *self.written])

    @cached_property
    def placeholders(self) -> dict[str, list[Node]]:
        """The nodes of each parameter, by its first name."""
        found: dict[str, list[Node]] = {}
        for node in self.program.graph.graph.find_nodes(op="placeholder"):
            if (name := self.program.states.get(node.name)) is not None:
                found.setdefault(name, []).append(node)
        return found

    @cached_property
    def norm_groups(self) -> tuple[int, ...]:
        """The numbers of groups in group normalizations, in descending order."""
        nodes = [node for node in self.order if node.op == "call_function" and operator_name(node) == "group_norm"]
        return tuple(sorted({int(given(node)[1]) for node in nodes}, reverse=True))

    @cached_property
    def norm_widths(self) -> tuple[int, ...]:
        """The widths of layer normalizations over only part of an axis, such as one head, in ascending order."""
        found = set[int]()
        for node in self.order:
            if node.op == "call_function" and operator_name(node) in ("layer_norm", "native_layer_norm"):
                source, width = given(node)[0], int(given(node)[1][-1])
                while operator_name(source) in SAME | VIEWS and shape_of(source)[-1] == width:
                    source = given(source)[0]
                if shape_of(source)[-1] != width and len(given(node)[1]) == 1:
                    found.add(width)
        return tuple(sorted(found))

    @cached_property
    def maxima(self) -> frozenset[tuple[int, int]]:
        """The lengths of pairs of adjacent axes, in order, for operators that take the maximum along one axis of the
        pair.

        A negative length marks the axis of the maximum.
        """
        found = set[tuple[int, int]]()
        for node in self.order:
            name = operator_name(node) if node.op == "call_function" else ""
            shape = shape_of(given(node)[0]) if name in MAXIMA | PAIRED else ()
            dims = argument(node, 1, None) if name in MAXIMA else None
            dims = dims[0] if isinstance(dims, list | tuple) and len(dims) == 1 else dims
            if name in PAIRED and shape:
                found |= {(-2, n) for n in shape}
            elif isinstance(dims, int) and shape:
                axis = dims % len(shape)
                found |= {(shape[axis - 1], -shape[axis])} if axis else set()
                found |= {(-shape[axis], shape[axis + 1])} if axis + 1 < len(shape) else set()
        return frozenset(found)

    @cached_property
    def cuts(self) -> dict[int, tuple[tuple[int, int], ...]]:
        """The parts into which operators cut the last axis of values, each as a start and a length. The keys are the
        lengths of the cut axes.
        """
        found: dict[int, dict[tuple[int, int], None]] = {}
        for node in self.order:
            name = operator_name(node) if node.op == "call_function" else ""
            if name in ("gru", "gru_cell"):  # The first two gates add both biases; the third multiplies one of them.
                for weight in node.all_input_nodes:
                    if len(shape := shape_of(weight)) == 1 and self.parameter(weight) is not None:
                        found.setdefault(shape[0], {})[0, 2 * shape[0] // 3] = None
                continue
            if name not in PIECES or not math.prod(shape := shape_of(given(node)[0])) or not shape:
                continue
            at, dim = (2, 0) if name.startswith("split") or name == "chunk" else (1, 0)
            if int(argument(node, at, dim)) not in (-1, len(shape) - 1):
                continue
            pieces = found.setdefault(shape[-1], {})
            if name in ("slice", "narrow"):
                pieces[int(argument(node, 2, 0) or 0) % shape[-1], shape_of(node)[-1]] = None
            elif name.startswith("split") or name == "chunk":
                start = 0
                for part in node.meta["val"]:
                    pieces[start, part.shape[-1]] = None
                    start += part.shape[-1]
        return {length: tuple(pieces) for length, pieces in found.items()}

    @cached_property
    def has_factors(self) -> bool:
        """Whether the model adds or subtracts a product of a value and a parameter."""
        products = (node for node in self.order if node.op == "call_function" and operator_name(node) == "mul")
        return any(
            self.entries(one) is not None
            for node in products
            if any(operator_name(user) in ("add", "sub") for user in node.users)
            for one in given(node)[:2]
        )

    @cached_property
    def joined(self) -> tuple[tuple[int, ...], ...]:
        """For each concatenation in the model, the lengths of the concatenated values along the axis of the
        concatenation.
        """
        nodes = [node for node in self.order if node.op == "call_function" and operator_name(node) == "cat"]
        found = set[tuple[int, ...]]()
        for node in nodes:
            shapes, axis = [shape_of(part) for part in given(node)[0]], int(argument(node, 1, 0))
            # An empty vector, such as an empty cache, may be concatenated with values of any shape.
            found.add(tuple(shape[axis] for shape in shapes if tuple(shape) != (0,)))
        return tuple(sorted(found))

    def parameter(self, node: Any) -> str | None:
        """Return the name of the parameter that a node represents, or None."""
        is_state = isinstance(node, Node) and node.op == "placeholder"
        return self.program.states.get(node.name) if is_state else None

    def is_single(self, name: str) -> bool:
        """Return whether a parameter has only one name and exactly one operator uses it, once."""
        nodes = self.placeholders.get(name, [])
        return len(self.program.aliases.get(name, (name,))) == 1 and len(nodes) == 1 and len(nodes[0].users) == 1

    def is_read_once(self, node: Node) -> bool:
        """Return whether at most one operator reads each entry of a value."""
        users = list(node.users)
        if len(users) == 1:
            return True
        if all(operator_name(user) == "getitem" for user in users):
            return len({given(user)[1] for user in users}) == len(users)
        if not all(operator_name(user) == "slice" for user in users):
            return False
        size = math.prod(shape_of(node))
        numbers = torch.arange(size).reshape(shape_of(node)) if size < MOST_NUMBERS else None
        if numbers is None:
            return False
        seen = torch.cat([call(user, {node: numbers}).flatten() for user in users])
        return len(set(seen.tolist())) == len(seen)

    def is_of_steps(self, name: str) -> bool:
        """Return whether all users of a parameter are steps of one recurrent operator that add it as a bias."""
        nodes = self.placeholders.get(name, [])
        if len(self.program.aliases.get(name, (name,))) > 1 or len(nodes) != 1:
            return False
        known, kinds = {**BIASES, **CELLS}, {operator_name(user) for user in nodes[0].users}
        positions = [known[kind] for kind in kinds if kind in known]
        return len(positions) == len(kinds) == 1 and all(
            argument(user, positions[0], None) is nodes[0] for user in nodes[0].users
        )

    def entries(self, node: Any) -> Entries | None:
        """Return the parameter entries that a node represents, if the node is a view of a parameter."""
        chain = []
        while isinstance(node, Node) and node.op == "call_function":
            chain.append(node)
            node = given(node)[0]
        name = self.parameter(node)
        if name is None:
            return None
        view = torch.empty(self.program.shapes[name], device="meta")
        for one in reversed(chain):
            if operator_name(one) in SAME:
                continue
            if operator_name(one) not in VIEWS | PIECES | {"getitem", "expand"} or len(one.all_input_nodes) > 1:
                return None
            before = view
            view = call(one, {given(one)[0]: view}, may_copy=False)
            parts = pytree.tree_leaves(view)
            if any(part is not before and part._base is None for part in parts):
                return None
        if not isinstance(view, Tensor):
            return None
        return Entries(name, tuple(view.shape), tuple(view.stride()), int(view.storage_offset()))

    def constant(self, node: Any) -> Tensor | None:
        """Return the integers that a node represents, if the integers do not depend on inputs."""
        if not isinstance(node, Node):
            return None
        if node not in self._constants:
            self._constants[node] = self._evaluate(node)
        found = self._constants[node]
        return found if isinstance(found, Tensor) and not found.is_meta else None

    def _evaluate(self, node: Node) -> Any:
        value = node.meta.get("val")
        if isinstance(value, Tensor) and value.is_floating_point():
            return None
        if node.op == "placeholder":
            return self.program.constants.get(node.name)
        sources = node.all_input_nodes
        operands = {source: self.constant(source) for source in sources}
        if node.op != "call_function" or any(held is None for held in operands.values()):
            return None
        try:
            return call(node, operands)
        except SeenError:
            return None

    def total(self, node: Any, axis: int = -1) -> Total | None:
        """Return the sum of a value along an axis if this sum does not depend on the inputs.

        The value may first have to be divided by a gain.

        Returns:
            The gain (None without a gain), and the operation that multiplies a vector by the sum (no operation if the
            sum is zero). The result is None if the sum depends on the inputs or is unknown.
        """
        if not isinstance(node, Node) or node.op != "call_function":
            return None
        if (node, axis) not in self._totals:  # A square asks twice for the same factor.
            self._totals[node, axis] = self._total(node, axis)
        return self._totals[node, axis]

    def _total(self, node: Node, axis: int) -> Total | None:
        name, source = operator_name(node), given(node)[0]
        if name == "getitem":
            return self.total(source, axis) if given(node)[1] == 0 else None
        if name in ("layer_norm", "native_layer_norm"):
            weight, bias = argument(node, 2, None), argument(node, 3, None)
            gain = self.entries(weight)
            is_last = axis in (-1, len(shape_of(source)) - 1)
            if len(given(node)[1]) != 1 or not is_last or (weight is not None and gain is None):
                return None
            return self._with_bias((gain, ()), bias)
        if not (ndim := len(shape_of(node))):
            return None
        axis %= ndim
        is_last = axis == ndim - 1
        if name == "sub" and isinstance(mean := given(node)[1], Node) and operator_name(mean) == "mean":
            is_own = argument(mean, 1, None) in ([-1], [axis]) and is_last
            return (None, ()) if given(mean)[0] is source and is_own and argument(mean, 2, False) else None
        if name in ("mul", "div", "add") and not node.kwargs:
            return self._total_of_two(node) if is_last else None
        before = axis_before(node, axis)
        found = None if before is None else self.total(source, before)
        is_padded = name in PADS and any(given(node)[1])
        return None if is_padded and found and found[1] else found  # The zeros of the padding lack the bias.

    def _total_of_two(self, node: Node) -> Total | None:
        """Return the known sum of a product or sum of two values, as in norms that are written in Python.

        In a product, one factor must be a gain or a number. In a sum, one summand must be a bias.
        """
        x, y = given(node)[:2]
        kind, width = operator_name(node), shape_of(node)[-1:]
        for value, other in ((x, y), (y, x)) if kind != "div" else ((x, y),):
            found = self.total(value) if shape_of(value)[-1:] == width else None
            if found is None or found[1]:
                continue
            if kind == "add":
                return self._with_bias(found, other) if len(shape_of(other)) == 1 else None
            if not isinstance(other, Node) or shape_of(other)[-1:] in ((), (1,)):
                return found
            if kind == "mul" and found[0] is None and len(shape_of(other)) == 1 and (gain := self.entries(other)):
                return gain, ()
        return None

    def _with_bias(self, total: Total, bias: Any) -> Total | None:
        """Return the sum of a value after a bias has been added to it."""
        if bias is None:
            return total
        entries, gain = self.entries(bias), total[0]
        return None if entries is None else (gain, (ImageStep("total", entries, by=gain),))

    def sums_to_one(self, node: Any, axis: int = -1) -> bool:
        """Return whether a value consists of non-negative weights that sum to one along an axis."""
        while isinstance(node, Node) and node.op == "call_function" and (ndim := len(shape_of(node))):
            if operator_name(node) in ("softmax", "_softmax", "_safe_softmax"):
                return (int(given(node)[1]) - axis) % ndim == 0
            before = None if operator_name(node) in PADS else axis_before(node, axis % ndim)
            if before is None:
                return False
            node, axis = given(node)[0], before
        return False


def is_same_values(name: str) -> bool:
    """Return whether an operator returns the entries of its operand at the same indices."""
    return name in words("expand transpose permute t mT adjoint unsqueeze") or name in RESHAPES


def pads_zeros(node: Node) -> bool:
    """Return whether a node pads with zeros only."""
    is_constant = argument(node, 2, "constant") in ("constant", 0) and argument(node, 3, None) in (None, 0)
    return (is_constant and not node.kwargs) or not any(given(node)[1])


def axis_before(node: Node, axis: int) -> int | None:
    """Return the axis of the operand whose known sums determine the sums along an axis of the result.

    The sums of the result then equal sums of the operand, means of sums of the operand, or zero.
    """
    name, source, shape = operator_name(node), shape_of(given(node)[0]), shape_of(node)
    ndim = len(source)
    if name in SAME | {"expand"}:
        return ndim - len(shape) + axis if shape[axis] == source[ndim - len(shape) + axis] else None
    if name in ("transpose", "permute", "t", "mT", "adjoint"):
        order = list(range(ndim))
        if name == "permute":
            order = [int(d) % ndim for d in given(node)[1]]
        else:
            first, second = (int(d) % ndim for d in (given(node)[1:3] if name == "transpose" else (-2, -1)))
            order[first], order[second] = second, first
        return order[axis]
    if name == "mean":
        several = argument(node, 1, None)
        dims = {int(d) % ndim for d in ([several] if isinstance(several, int) else several or range(ndim))}
        kept = [d for d in range(ndim) if d not in dims or argument(node, 2, False)]
        return None if kept[axis] in dims else kept[axis]
    if name in ("slice", "index_select", "roll", "flip"):
        dims = argument(node, 1 if name != "roll" else 2, 0 if name == "slice" else ())
        several = [dims] if isinstance(dims, int) else list(dims)
        return None if not several or axis in (int(d) % ndim for d in several) else axis
    if name in ("select", "unsqueeze"):
        cut = int(given(node)[1]) % max(ndim, len(shape))
        if name == "select":
            return axis + (axis >= cut)
        return None if axis == cut else axis - (axis > cut)
    if name in PADS:
        last = 2 * (
            ndim - 1 - axis
        )  # Widths begin at the last axis, and may cut at one end what they add at the other.
        return None if any(given(node)[1][last : last + 2]) or not pads_zeros(node) else axis
    if name.startswith("adaptive_avg_pool"):
        return axis if axis < ndim - int(name[-2]) else None
    if name in RESHAPES:
        ahead, size = math.prod(shape[:axis]), shape[axis]
        return next((k for k in range(ndim) if source[k] == size and math.prod(source[:k]) == ahead), None)
    return None


def given(node: Node) -> Any:
    """Return the arguments of a node. Arguments may have any type."""
    return node.args


def call(node: Node, operands: Mapping[Node, Any], *, may_copy: bool = True) -> Any:
    """Call the operator of a node on the given operands, instead of the node's own operands.

    Operands are copied if the operator cannot make a view of them.
    """
    args, kwargs = map_arg((node.args, node.kwargs), operands.__getitem__)
    try:
        return node.target(*args, **kwargs)  # type: ignore[operator]
    except (RuntimeError, IndexError, TypeError, NotImplementedError) as error:
        if may_copy and operator_name(node) == "view":
            return call(node, {one: t.contiguous() for one, t in operands.items()}, may_copy=False)
        raise SeenError from error

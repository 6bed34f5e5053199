"""Follow an offset of one parameter through the operators of a traced model.

Operators that move values move its entries alike, and linear ones map it by their weights. An offset ends at an
operator that does not see it (a softmax of scores that all change alike, a LayerNorm of features that all change
alike), or at a parameter that takes it back. Whatever else it meets sees it.
"""

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.nn import functional
from torch.utils import _pytree as pytree

from regauge.core.translations import Entries, Image, Step
from regauge.discovery.operators import PIECES, SAME, VIEWS, argument, operator_name, shape_of, words
from regauge.discovery.trace import Program
from regauge.discovery.translations.offsets import (
    Offset,
    Seen,
    Term,
    along,
    channel_vector,
    each_position,
    is_constant,
    picked,
)

MOVES = (
    VIEWS | PIECES | words("mT adjoint expand cat stack index_select roll flip repeat repeat_interleave getitem index")
)
"""Operators whose results are entries of their operands."""
LAYERS = {"linear": (0, 1, 2), "addmm": (1, 2, 0), "conv1d": (0, 1, 2), "conv2d": (0, 1, 2), "conv3d": (0, 1, 2)}
"""Operators that are linear in a value and in a weight: arguments of value, weight and bias."""
BIASES = {"layer_norm": 3, "group_norm": 3, "batch_norm": 2, "instance_norm": 2, "linear": 2, "addmm": 0}
BIASES |= dict.fromkeys(words("conv1d conv2d conv3d"), 2)
"""Operators that add a parameter to each channel, and which of their arguments it is."""
HIDDEN = -1e3
"""What a mask writes in place of scores is below this."""


@dataclass(frozen=True, eq=False)
class Taker:
    """A parameter that is added in a value, and may take an offset back.

    Attributes:
        entries: Its entries.
        constant: The axes of these along which an offset must be the same: rows of a table that are looked up.
        places: For each entry of the value 1 plus the number of the parameter's entry that is added there, counted
            without constant axes; zero where none is.
    """

    entries: Entries
    constant: tuple[int, ...]
    places: Tensor

    def move(self, function: Callable[[Tensor], Tensor]) -> "Taker":
        """The parameter in what an operator makes that only moves values."""
        return replace(self, places=function(self.places))


@dataclass(frozen=True)
class Graph:
    """A traced model as offsets see it.

    Attributes:
        program: The model.
        ones: Gains that are one in a representative.
    """

    program: Program
    ones: frozenset[str]
    _constants: dict[Node, Any] = field(default_factory=dict)

    @cached_property
    def order(self) -> dict[Node, int]:
        """The place of each node."""
        return {node: k for k, node in enumerate(self.program.graph.graph.nodes)}

    @cached_property
    def ends(self) -> frozenset[Node]:
        """Outputs, and what is written into buffers."""
        return frozenset([*self.program.outputs, *(node for node, _ in self.program.written)])

    @cached_property
    def placeholders(self) -> dict[str, list[Node]]:
        """The nodes of each parameter, by the first of its names."""
        found: dict[str, list[Node]] = {}
        for node in self.program.graph.graph.find_nodes(op="placeholder"):
            if (name := self.program.states.get(node.name)) is not None:
                found.setdefault(name, []).append(node)
        return found

    @cached_property
    def norm_groups(self) -> tuple[int, ...]:
        """The numbers of groups of group normalizations, the largest first."""
        nodes = [node for node in self.order if node.op == "call_function" and operator_name(node) == "group_norm"]
        return tuple(sorted({int(given(node)[1]) for node in nodes}, reverse=True))

    def norm_gain(self, node: Any) -> Entries | None:
        """The gain of the LayerNorm whose output a value is, unless it is one in a representative."""
        while isinstance(node, Node) and node.op == "call_function":
            if operator_name(node) in ("layer_norm", "native_layer_norm"):
                gain = argument(node, 2, None)
                return None if self.parameter(gain) in self.ones else self.entries(gain)
            node = given(node)[0]
        return None

    def parameter(self, node: Any) -> str | None:
        """The parameter that a node is."""
        is_state = isinstance(node, Node) and node.op == "placeholder"
        return self.program.states.get(node.name) if is_state else None

    def is_single(self, name: str) -> bool:
        """Whether one operator uses a parameter, once."""
        nodes = self.placeholders.get(name, [])
        return len(self.program.aliases.get(name, (name,))) == 1 and len(nodes) == 1 and len(nodes[0].users) == 1

    def entries(self, node: Any) -> Entries | None:
        """The entries of a parameter that a node holds, where it is a view of one."""
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
        """The whole numbers that a node holds, where they do not depend on inputs."""
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
        except Seen:
            return None

    def total(self, node: Any, gain: Entries | None = None) -> tuple[Step, ...] | None:
        """The sum of a value along its last axis, the same for all inputs, as a step; none where it is zero.

        Args:
            node: The value.
            gain: What the value is divided by before it is summed.

        Returns:
            None where the sum depends on the inputs, or is not known.
        """
        if not isinstance(node, Node) or node.op != "call_function":
            return None
        name, source = operator_name(node), given(node)[0]
        if name in ("layer_norm", "native_layer_norm"):
            own = argument(node, 2, None)
            is_one = own is None or self.parameter(own) in self.ones
            if len(given(node)[1]) != 1 or (self.entries(own) != gain if gain else not is_one):
                return None
            return self._sum_of(argument(node, 3, None), gain)
        if name == "sub" and isinstance(mean := given(node)[1], Node) and operator_name(mean) == "mean":
            is_last = argument(mean, 1, None) in ([-1], [len(shape_of(source)) - 1])
            return () if given(mean)[0] is source and is_last and argument(mean, 2, False) and not gain else None
        if name in ("mul", "div", "add") and not node.kwargs:
            return self._total_of_two(node, gain)
        is_kept = shape_of(node)[-1:] == shape_of(source)[-1:]
        if name in ("slice", "select", "unsqueeze", "index_select", "transpose", "permute"):
            ndim = max(len(shape_of(node)), len(shape_of(source)))
            if name == "permute":
                is_kept = given(node)[1][-1] in (-1, ndim - 1)
            else:
                dims = given(node)[1:3] if name == "transpose" else [argument(node, 1, 0)]
                is_kept = is_kept and all(int(d) % ndim != ndim - 1 for d in dims)
        elif name == "getitem":
            is_kept = given(node)[1] == 0
        elif name not in SAME | words("view reshape _unsafe_view flatten unflatten expand squeeze"):
            return None
        return self.total(source, gain) if is_kept else None

    def _total_of_two(self, node: Node, gain: Entries | None) -> tuple[Step, ...] | None:
        """The sum of a product with a gain, or of a sum with a bias, in a norm that is written by hand."""
        x, y = given(node)[:2]
        kind, width = operator_name(node), shape_of(node)[-1:]
        for value, other in ((x, y), (y, x)) if kind != "div" else ((x, y),):
            if shape_of(value)[-1:] != width:
                continue
            if kind == "add":
                if self.entries(other) is not None and len(shape_of(other)) == 1 and self.total(value, gain) == ():
                    return self._sum_of(other, gain)
                continue
            is_gain = kind == "mul" and (self.entries(other) == gain if gain else self.parameter(other) in self.ones)
            is_number = not gain and (not isinstance(other, Node) or shape_of(other)[-1:] in ((), (1,)))
            if (is_gain or is_number) and self.total(value) == ():
                return ()
        return None

    def _sum_of(self, bias: Any, gain: Entries | None) -> tuple[Step, ...] | None:
        """The sum of a bias, divided by a gain, as a step; none where there is no bias."""
        if bias is None:
            return ()
        entries = self.entries(bias)
        return None if entries is None else (Step("total", entries, by=gain),)

    def sums_to_one(self, node: Any) -> bool:
        """Whether a value is non-negative weights that sum to one along its last axis."""
        while isinstance(node, Node) and node.op == "call_function":
            if operator_name(node) in ("softmax", "_softmax", "_safe_softmax"):
                return given(node)[1] in (-1, len(shape_of(node)) - 1)
            is_copy = operator_name(node) in SAME | words("expand view reshape _unsafe_view")
            if not is_copy or shape_of(node)[-1] != shape_of(given(node)[0])[-1]:
                return False
            node = given(node)[0]
        return False


def given_by_name(node: Node, name: str, default: Any) -> Any:
    """A keyword argument of a node."""
    return node.kwargs.get(name, default)


def given(node: Node) -> Any:
    """The arguments of a node, of whatever types its operator takes."""
    return node.args


def call(node: Node, operands: Mapping[Node, Any], *, may_copy: bool = True) -> Any:
    """The operator of a node on other operands, which are copied if it cannot look at them otherwise."""
    if may_copy and operator_name(node) == "view":
        operands = {one: t.contiguous() for one, t in operands.items()}
    args, kwargs = pytree.tree_map_only(Node, lambda n: operands[n], (node.args, dict(node.kwargs)))
    try:
        return node.target(*args, **kwargs)
    except (RuntimeError, IndexError, TypeError, NotImplementedError) as error:
        raise Seen from error


def follow(
    graph: Graph, start: Term, home: str, takers: frozenset[str], gain: Entries | None = None
) -> tuple[Image, ...] | None:
    """What makes up for a vector that is added to a parameter; None where something sees it.

    Args:
        graph: The model.
        start: The vector, with places in the shape of the whole parameter.
        home: The parameter.
        takers: Parameters that may take offsets back.
        gain: What is added is divided by it along the axis that is constant: layers read through the parameter behind
            a LayerNorm with that gain.
    """
    for is_eager in (False, True):
        run = _Run(graph, takers - {home}, gain, is_eager)
        try:
            return run.result(home, start)
        except Seen:
            if not run.is_missed:
                return None
    return None


class _Run:
    """One offset on its way through the model.

    Parameters take it back if `is_eager`; otherwise `is_missed` says that some could have.
    """

    def __init__(self, graph: Graph, takers: frozenset[str], gain: Entries | None, is_eager: bool) -> None:
        self.graph, self.takers, self.gain, self.is_eager = graph, takers, gain, is_eager
        self.is_missed = False
        self.images: list[Image] = []
        self.offsets: dict[Node, Any] = {}

    def result(self, home: str, start: Term) -> tuple[Image, ...]:
        waiting: list[tuple[int, Node]] = []
        queued: set[Node] = set()

        def arrive(node: Node, offset: Any) -> None:
            if node in self.graph.ends:
                raise Seen
            self.offsets[node] = offset
            for user in node.users:
                if user not in queued and (user.users or user in self.graph.ends):
                    queued.add(user)
                    heapq.heappush(waiting, (self.graph.order[user], user))

        for node in self.graph.placeholders.get(home, ()):
            if self.gain and any(operator_name(user) not in ("linear", "addmm") for user in node.users):
                raise Seen
            arrive(node, Offset((start,)))
        while waiting:
            node = heapq.heappop(waiting)[1]
            rule = FOLLOWED.get(operator_name(node)) if node.op == "call_function" else None
            if rule is None:
                raise Seen
            found = rule(self, node)
            if isinstance(found, Offset) and found.is_nothing:
                found = None
            if found is not None:
                arrive(node, found)
        return tuple(self.images)

    def _of(self, operand: Any) -> Any:
        return self.offsets.get(operand) if isinstance(operand, Node) else None

    def _require_same(self, node: Node) -> None:
        value = node.meta.get("val")
        if isinstance(value, Tensor) and not value.is_floating_point():
            raise Seen

    def _same(self, node: Node) -> Any:
        self._require_same(node)
        return self._of(given(node)[0])

    def _move(self, node: Node) -> Any:
        """The entries of the offset where the operator puts the entries of the value."""
        first = given(node)[0]
        if operator_name(node) == "getitem":
            several = self._of(first)
            return several[given(node)[1]] if isinstance(several, list | tuple) else None
        sources = [source for source in node.all_input_nodes if source in self.offsets]
        values = first if isinstance(first, list | tuple) else [first]
        if any(source not in values for source in sources):
            raise Seen
        indices = [one for one in node.all_input_nodes if one not in values]
        held = {one: self.graph.constant(one) for one in indices}
        if any(one is None for one in held.values()):
            offset = self._of(first)
            # Wherever an unknown index points to, the offset must be the same.
            if operator_name(node) == "index" and None not in given(node)[1]:
                dims = range(len(given(node)[1]))
            elif operator_name(node) == "index_select":
                dims = range(int(given(node)[1]), int(given(node)[1]) + 1)
            else:
                raise Seen
            if not offset.is_uniform(*dims):
                raise Seen
            held = {one: torch.zeros(shape_of(one), dtype=torch.int64) for one in indices}
        if len(sources) == 1 and len(values) == 1:
            return self._of(first).move(lambda array: call(node, {first: array, **held}))
        return self._joined(node, sources, held)

    def _joined(self, node: Node, sources: list[Node], held: Mapping[Node, Any]) -> Any:
        """The offset of several values that an operator puts side by side."""

        def run(arrays: Mapping[Node, Tensor]) -> Tensor:
            blanks = {one: torch.zeros(shape_of(one), dtype=torch.int64) for one in node.all_input_nodes}
            found: Tensor = call(node, {**blanks, **held, **arrays})
            return found

        offsets = [self.offsets[source] for source in sources]
        is_masked = any(offset.is_masked for offset in offsets)
        if all(offset.labels is None for offset in offsets):
            terms = [
                replace(term, places=run({source: term.places}))
                for source, offset in zip(sources, offsets, strict=True)
                for term in offset.terms
            ]
            return Offset(tuple(terms), is_masked=is_masked)
        labels, last = {}, 0
        for source, offset in zip(sources, offsets, strict=True):
            own = offset.as_labels()
            labels[source] = torch.where(own == 0, 0, own + last)
            last = int(labels[source].max())
        return Offset(labels=run(labels), is_masked=is_masked)

    def _layer(self, node: Node) -> Offset | None:
        name = operator_name(node)
        x, w, b = (argument(node, k, None) for k in LAYERS[name])
        if name == "addmm" and node.kwargs:
            raise Seen
        dim = len(shape_of(node)) - 1 if name in ("linear", "addmm") else 1
        terms: list[Term] = []
        if self._of(w) is not None:
            if self._of(x) is not None or self._of(b) is not None:
                raise Seen
            found = self._reweigh(node, x, self._of(w), dim)
            if found is None or found.labels is not None:
                return found
            terms += found.terms
        elif self._of(x) is not None:
            weights = self._weights(node, w)
            terms += [self._through(term, weights, dim, shape_of(node)) for term in self._of(x).known()]
        if (shift := self._of(b)) is not None:
            terms += [replace(term, places=along(term.places, dim, shape_of(node))) for term in shift.known()]
        return self._take_back(b, Offset(tuple(terms)), lambda own: along(own, dim, shape_of(node)))

    def _through(self, term: Term, weights: Entries, dim: int, shape: tuple[int, ...]) -> Term:
        """What a layer makes of an offset of each channel."""
        steps, size = channel_vector(term, dim)
        copies, outputs, inputs = weights.sizes[:3]
        if size != copies * inputs:
            raise Seen
        places = along(torch.arange(1, copies * outputs + 1), dim, shape)
        return Term((*steps, Step("through", weights)), copies * outputs, places)

    def _weights(self, node: Node, w: Any) -> Entries:
        """The weights of a layer that pads nothing as `[copies, outputs, inputs, ...]`."""
        found, name, copies = self.graph.entries(w), operator_name(node), 1
        if found is None:
            raise Seen
        if name.startswith("conv"):
            padding = argument(node, 4, 0)
            pads = [padding] if isinstance(padding, int | str) else list(padding)
            if any(pad not in (0, "valid") for pad in pads):
                raise Seen
            copies = int(argument(node, 6, 1))
        elif name == "addmm":
            found = replace(found, sizes=found.sizes[::-1], strides=found.strides[::-1])
        outputs = found.sizes[0] // copies
        return replace(
            found,
            sizes=(copies, outputs, *found.sizes[1:]),
            strides=(outputs * found.strides[0], *found.strides),
        )

    def _reweigh(self, node: Node, x: Any, change: Offset, dim: int) -> Offset | None:
        """An offset of the weights: outputs change alike where their rows do."""
        (term,) = change.known()
        places = term.places.mT if operator_name(node) == "addmm" else term.places
        shape = shape_of(node)
        rest = range(1, places.ndim)
        if all(is_constant(places, k) for k in rest):
            total = self.graph.total(x, self.gain) if operator_name(node) in ("linear", "addmm") else None
            if total is None:
                raise Seen
            rows = places[(slice(None), *[0] * len(rest))]
            return Offset((Term((*term.steps, *total), term.size, along(rows, dim, shape)),)) if total else None
        if self.gain:
            raise Seen
        groups = int(argument(node, 6, 1)) if operator_name(node).startswith("conv") else 1
        if is_constant(places, 0):
            alike = torch.ones(shape[dim], dtype=torch.int64)
        else:
            alike = (places.flatten(1) != 0).any(1).long()
            some = places[alike.bool()]
            if not is_constant(some, 0):
                raise Seen
        # Channels of different groups read different inputs.
        numbers = alike * torch.arange(1, groups + 1).repeat_interleave(shape[dim] // groups)
        channels, position = along(numbers, dim, shape), each_position(shape, [dim]) - 1
        return Offset(labels=torch.where(channels == 0, 0, position * (groups + 1) + channels))

    def _embedding(self, node: Node) -> Any:
        table, index = given(node)[:2]
        offset, shape = self._of(table), shape_of(node)
        if offset is None or self._of(index) is not None:
            raise Seen
        if offset.is_uniform(0):
            return offset.move(lambda array: along(array[0], len(shape) - 1, shape))
        known = self.graph.constant(index)
        if known is not None:
            return offset.move(lambda array: functional.embedding(known, array))
        if not offset.is_uniform(1) or not all(bool(array[:, 0].all()) for array in offset.arrays):
            raise Seen
        return Offset(labels=each_position(shape, [len(shape) - 1]))

    def _sum(self, node: Node) -> Offset | None:
        shape, alpha = shape_of(node), float(given_by_name(node, "alpha", 1))
        operands = list(given(node)[:2])
        factors = [1.0, -alpha if operator_name(node) == "sub" else alpha]
        offsets = [self._of(operand) for operand in operands]
        self._require_same(node)
        total = self._added(shape, offsets, factors)
        if total is None or total.labels is not None:
            return total
        for operand, offset, factor in zip(operands, offsets, factors, strict=True):
            if offset is None and factor == 1.0:
                total = self._take_back(operand, total, lambda own: own.expand(shape))
                if total is None:
                    return None
        return total

    def _added(self, shape: tuple[int, ...], offsets: list[Any], factors: list[float]) -> Any:
        """The sum of offsets of one shape, multiplied by factors."""
        whole = [None if one is None else one.move(lambda array: array.expand(shape)) for one in offsets]
        there = [(one, factor) for one, factor in zip(whole, factors, strict=True) if one is not None]
        is_masked = any(one.is_masked for one, _ in there)
        if len(there) == 2 and factors[0] == -factors[1] and there[0][0].is_equal(there[1][0]):
            return None
        if all(one.labels is None for one, _ in there):
            scaled = [one if factor == 1 else one.then(Step("scale", factor=factor)) for one, factor in there]
            return Offset(tuple(term for one in scaled for term in one.terms), is_masked=is_masked)
        if len(there) == 1:
            return there[0][0]
        first, second = (one.as_labels() for one, _ in there)
        return Offset(labels=first * (int(second.max()) + 1) + second, is_masked=is_masked)

    def _scale(self, node: Node) -> Offset | None:
        x, y = given(node)[:2]
        self._require_same(node)
        if self._of(x) is not None and self._of(y) is not None:
            raise Seen
        changed, other = (x, y) if self._of(x) is not None else (y, x)
        offset, is_quotient = self._of(changed), operator_name(node) == "div"
        if is_quotient and changed is y:
            raise Seen
        if not isinstance(other, Node):
            factor = float(other)
            return offset.then(Step("scale", factor=1 / factor if is_quotient else factor))
        shape = shape_of(node)
        offset = offset.move(lambda array: array.expand(shape))
        if self.graph.parameter(other) in self.graph.ones:
            return offset
        if offset.labels is None and (entries := self.graph.entries(other)) is not None:
            axes = [len(shape) - len(entries.sizes) + k for k, n in enumerate(entries.sizes) if n > 1]
            if len(axes) == 1:
                step = Step("over" if is_quotient else "times", entries)
                terms = []
                for term in offset.known():
                    steps, size = channel_vector(term, axes[0])
                    places = along(torch.arange(1, size + 1), axes[0], shape)
                    terms.append(Term((*steps, step), size, places))
                return Offset(tuple(terms))
        own = shape_of(other)
        lead = len(shape) - len(own)
        constant = [k for k in range(len(shape)) if k < lead or own[k - lead] == 1]
        labels, where = offset.as_labels(), each_position(shape, constant)
        mixed = torch.where(labels == 0, 0, labels * (int(where.max()) + 1) + where)
        return Offset(labels=mixed, is_masked=offset.is_masked)

    def _negated(self, node: Node) -> Offset:
        offset: Offset = self._of(given(node)[0])
        return offset.then(Step("scale", factor=-1.0))

    def _mean(self, node: Node) -> Offset:
        offset, dims = self._of(given(node)[0]), argument(node, 1, None)
        if dims is None or not offset.is_uniform(*([dims] if isinstance(dims, int) else dims)):
            raise Seen
        several, is_kept = [dims] if isinstance(dims, int) else list(dims), bool(argument(node, 2, False))
        before = shape_of(given(node)[0])
        number = torch.Size([before[d] for d in several]).numel() if operator_name(node) == "sum" else 1

        def narrow(array: Tensor) -> Tensor:
            for d in several:
                array = array.narrow(d, 0, 1)
            return array if is_kept else array.reshape(shape_of(node))

        found: Offset = offset.move(narrow)
        return found if number == 1 else found.then(Step("scale", factor=float(number)))

    def _pool(self, node: Node) -> Offset:
        """A pool without padding, of an offset that is the same everywhere that it looks at."""
        offset, shape = self._of(given(node)[0]), shape_of(node)
        spatial = [k - len(shape) for k in range(2, len(shape))]
        if any(argument(node, 3, ()) or ()) if operator_name(node).startswith("avg") else False:
            raise Seen
        if not offset.is_uniform(*spatial):
            raise Seen

        def spread(array: Tensor) -> Tensor:
            for d in spatial:
                array = array.narrow(d, 0, 1)
            return array.expand(shape)

        found: Offset = offset.move(spread)
        return found

    def _softmax(self, node: Node) -> None:
        if not self._of(given(node)[0]).is_uniform(int(given(node)[1])):
            raise Seen

    def _topk(self, node: Node) -> tuple[Offset, None]:
        offset, dim = self._of(given(node)[0]), int(argument(node, 2, -1))
        if not offset.is_uniform(dim) or offset.is_masked:
            raise Seen
        shape = tuple(node.meta["val"][0].shape)
        return offset.move(lambda array: array.narrow(dim, 0, 1).expand(shape)), None

    def _argmax(self, node: Node) -> None:
        dim = argument(node, 1, None)
        if dim is None or self._of(given(node)[0]).is_masked or not self._of(given(node)[0]).is_uniform(int(dim)):
            raise Seen

    def _masked(self, node: Node) -> Offset:
        """A mask that takes entries out of a softmax."""
        x, mask, value = given(node)[:3]
        if operator_name(node) == "where":
            x, mask, value = mask, x, value
        offset = self._of(x)
        if offset is None or self._of(mask) is not None or self._of(value) is not None or not self._hides(value):
            raise Seen
        shape = shape_of(node)
        found: Offset = offset.move(lambda array: array.expand(shape))
        return replace(found, is_masked=True)

    def _hides(self, value: Any) -> bool:
        """Whether a mask writes a very negative number."""
        while isinstance(value, Node) and operator_name(value) in SAME:
            value = given(value)[0]
        if isinstance(value, Node) and operator_name(value) in words("full full_like scalar_tensor"):
            value = given(value)[0 if operator_name(value) == "scalar_tensor" else 1]
        if isinstance(value, Node) and value.op == "placeholder":
            held = self.graph.program.constants.get(value.name)
            value = float(held) if held is not None and held.numel() == 1 and not held.is_meta else None
        return isinstance(value, int | float) and value < HIDDEN

    def _layer_norm(self, node: Node) -> Offset | None:
        offset, shape = self._of(given(node)[0]), shape_of(node)
        axes = len(given(node)[1])
        self._require_unseen(offset, lambda array: array.flatten(-axes))
        if self._of(argument(node, 2, None)) is not None:
            raise Seen
        bias = self._of(argument(node, 3, None))
        return None if bias is None else bias.move(lambda array: array.expand(shape))

    def _native_layer_norm(self, node: Node) -> tuple[Offset | None, None, None]:
        if any(len(user.users) and given(user)[1] != 0 for user in node.users):
            raise Seen
        axes, shape = len(given(node)[1]), tuple(node.meta["val"][0].shape)
        offset, bias = self._of(given(node)[0]), self._of(given(node)[3])
        self._require_unseen(offset, lambda array: array.flatten(-axes))
        if self._of(given(node)[2]) is not None:
            raise Seen
        return None if bias is None else bias.move(lambda array: array.expand(shape)), None, None

    def _group_norm(self, node: Node) -> Offset | None:
        offset, shape = self._of(given(node)[0]), shape_of(node)
        groups = int(given(node)[1])
        self._require_unseen(offset, lambda array: array.reshape(shape[0], groups, -1))
        return self._channel_bias(node, 2, 3)

    @staticmethod
    def _require_unseen(offset: Offset | None, together: Callable[[Tensor], Tensor]) -> None:
        """Raise unless an offset is constant along all axes together that a norm takes together, which are the last."""
        if offset is not None and (offset.is_masked or not offset.move(together).is_uniform(-1)):
            raise Seen

    def _channel_bias(self, node: Node, gain: int, bias: int) -> Offset | None:
        """The offset of a bias that is added to each channel."""
        if self._of(argument(node, gain, None)) is not None:
            raise Seen
        shift, shape = self._of(argument(node, bias, None)), shape_of(node)
        return None if shift is None else shift.move(lambda array: along(array, 1, shape))

    def _batch_norm(self, node: Node) -> Offset | None:
        x, _, _, mean, variance, uses_batch = given(node)[:6]
        offset = self._of(x)
        if self._of(mean) is not None or self._of(variance) is not None:
            raise Seen
        if offset is not None:
            if not offset.is_uniform(*(k for k in range(len(shape_of(x))) if k != 1)):
                raise Seen
            if not uses_batch and self._require_statistic(mean):
                for term in offset.known():
                    steps, size = channel_vector(term, 1)
                    self.images.append(Image(Entries(str(self.graph.parameter(mean)), (size,), (1,)), (), steps))
        return self._channel_bias(node, 1, 2)

    def _require_statistic(self, mean: Any) -> bool:
        name = self.graph.parameter(mean)
        if name is None or name not in self.takers or not self.graph.is_single(name):
            raise Seen
        return True

    def _instance_norm(self, node: Node) -> Offset | None:
        offset = self._of(given(node)[0])
        dims = range(2, len(shape_of(node)))
        if not bool(given(node)[5]) or (offset is not None and not offset.is_uniform(*dims)):
            raise Seen
        return self._channel_bias(node, 1, 2)

    def _attention(self, node: Node) -> Offset | None:
        query, key, value = given(node)[:3]
        if self._of(query) is not None:
            raise Seen
        for operand, dim in ((key, -2), (argument(node, 3, None), -1)):
            offset = self._of(operand)
            if offset is not None and not offset.is_uniform(dim):
                raise Seen
        offset = self._of(value)
        if offset is None:
            return None
        if not offset.is_uniform(-2) or offset.is_masked:
            raise Seen
        shape = shape_of(node)

        def spread(array: Tensor) -> Tensor:
            row = array.narrow(-2, 0, 1)
            if row.ndim > 2 and row.shape[-3] != shape[-3]:
                row = row.repeat_interleave(shape[-3] // row.shape[-3], -3)
            return row.expand(shape)

        found: Offset = offset.move(spread)
        return found

    def _product(self, node: Node) -> Offset | None:
        base = 1 if operator_name(node) == "baddbmm" else 0
        left, right = given(node)[base : base + 2]
        found = self._product_of(node, left, right) if {left, right} & self.offsets.keys() else None
        offset = self._of(given(node)[0]) if base else None
        if offset is None:
            return found
        shape, beta = shape_of(node), float(given_by_name(node, "beta", 1))
        return self._added(shape, [offset, found], [beta, 1.0])

    def _product_of(self, node: Node, left: Any, right: Any) -> Any:
        first, second, shape = self._of(left), self._of(right), shape_of(node)
        if first is not None and second is not None:
            raise Seen
        if second is None:
            weights = self.graph.entries(right)
            if weights is not None and len(weights.sizes) == 2 and len(shape_of(left)) > 1:
                sizes, strides = weights.sizes[::-1], weights.strides[::-1]
                weights = replace(weights, sizes=(1, *sizes), strides=(0, *strides))
                terms = [self._through(term, weights, len(shape) - 1, shape) for term in first.known()]
                return Offset(tuple(terms))
            if not first.is_uniform(-2):
                raise Seen
            return Offset(labels=each_position(shape, [len(shape) - 2]))
        if second.is_uniform(-2) and self.graph.sums_to_one(left) and second.labels is None:
            return second.move(lambda array: array.narrow(-2, 0, 1).expand(shape))
        if not second.is_uniform(-1) or second.is_masked:
            raise Seen
        return Offset(labels=each_position(shape, [len(shape) - 1]))

    def _recurrent(self, node: Node) -> None:
        """The bias of the state is added to that of the input, except where a gate of a GRU multiplies it."""
        weights = self._recurrent_weights(node)
        if any(source in self.offsets for source in node.all_input_nodes if source not in weights):
            raise Seen
        for k, weight in enumerate(weights):
            offset = self._of(weight)
            if offset is None:
                continue
            other = self.graph.parameter(weights[k - 1])
            if k % 4 != 3 or other not in self.takers or not self.graph.is_single(str(other)):
                raise Seen
            (term,) = offset.known()
            third = term.places.numel() // 3
            if operator_name(node) == "gru" and bool(term.places[2 * third :].any()):
                raise Seen
            taker = Taker(Entries.whole(str(other), term.places.shape), (), each_position(term.places.shape, ()))
            if (image := self._image(term, taker, term.places)) is not None:
                self.images.append(image)

    @staticmethod
    def _recurrent_weights(node: Node) -> list[Any]:
        """The weights of a recurrent layer with biases, four for each direction of each layer."""
        found: list[list[Any]] = [list(a) for a in given(node)[2:4] if isinstance(a, list | tuple)]
        if not found or given(node)[3] is not True:
            raise Seen
        return found[0]

    def _take_back(self, operand: Any, offset: Offset, spread: Callable[[Tensor], Tensor]) -> Offset | None:
        """What is left of an offset: nothing, if parameters that are added in an operand take it back everywhere."""
        if not offset.terms:
            return None
        if offset.is_masked or not (takers := [taker.move(spread) for taker in self._takers(operand)]):
            return offset
        if not self.is_eager:
            self.is_missed = True
            return offset
        images = []
        for taker in takers:
            is_there = taker.places != 0
            for term in offset.terms:
                given = torch.zeros(int(taker.places.max()) + 1, dtype=torch.int64)
                given[taker.places.flatten()] = term.places.flatten()
                if not torch.equal(given[taker.places][is_there], term.places[is_there]):
                    return offset
                images.append((term, taker, given[1:]))
        covered = torch.stack([taker.places != 0 for taker in takers]).any(0)
        if any(bool(((term.places != 0) & ~covered).any()) for term in offset.terms):
            return offset
        try:
            self.images += [image for one in images if (image := self._image(*one)) is not None]
        except Seen:
            return offset
        return None

    @staticmethod
    def _image(term: Term, taker: Taker, given: Tensor) -> Image | None:
        """What a parameter adds to take back a term, whose entries are numbered as they are given."""
        entries, there = taker.entries, (given != 0).nonzero().flatten()
        if not len(there):
            return None
        if len(there) < given.numel():
            first, last = int(there[0]), int(there[-1])
            if len(entries.sizes) != 1 or last - first + 1 != len(there):
                raise Seen
            entries = Entries(entries.parameter, (len(there),), (1,), first)
            given = given[first : last + 1]
        steps, _ = picked(term, given)
        return Image(entries, taker.constant, (*steps, Step("scale", factor=-1.0)))

    def _takers(self, node: Any) -> list[Taker]:
        """Parameters that are added in a value and may take an offset back: one, or one for each part of the value."""
        if not isinstance(node, Node) or node in self.offsets:
            return []
        if (name := self._free(node)) is not None:
            shape = self.graph.program.shapes[name]
            return [Taker(Entries.whole(name, shape), (), each_position(shape, ()))]
        if node.op != "call_function" or len(node.users) != 1 or node in self.graph.ends:
            return []
        kind, shape = operator_name(node), shape_of(node)
        if kind in SAME:
            return self._takers(given(node)[0])
        if kind == "cat":
            return self._side_by_side(node)
        if kind in MOVES - {"getitem"} and len(node.all_input_nodes) == 1:
            try:
                return [
                    taker.move(lambda own: call(node, {given(node)[0]: own})) for taker in self._takers(given(node)[0])
                ]
            except Seen:
                return []
        if kind in BIASES:
            dim = len(shape) - 1 if kind in ("linear", "addmm", "layer_norm") else 1
            name = self._free(argument(node, BIASES[kind], None))
            if name is None or self.graph.program.shapes[name] != (shape[dim],):
                return []
            return [Taker(Entries.whole(name, (shape[dim],)), (), along(torch.arange(1, shape[dim] + 1), dim, shape))]
        if kind == "embedding" and (name := self._free(given(node)[0])) is not None:
            whole = Entries.whole(name, self.graph.program.shapes[name])
            return [Taker(whole, (0,), along(torch.arange(1, shape[-1] + 1), len(shape) - 1, shape))]
        if kind == "add" and not node.kwargs:
            for operand in given(node)[:2]:
                if found := self._takers(operand):
                    return [taker.move(lambda own: own.expand(shape)) for taker in found]
        return []

    def _free(self, node: Any) -> str | None:
        """The parameter that a node is, if it may take offsets back and nothing else reads it."""
        name = self.graph.parameter(node)
        return name if name in self.takers and self.graph.is_single(str(name)) else None

    def _side_by_side(self, node: Node) -> list[Taker]:
        """What is added in all of several values that are put side by side."""
        parts: Any = given(node)[0]
        found = []
        for k, part in enumerate(parts):
            own = self._takers(part)
            if not own:
                return []
            for taker in own:
                arrays = [torch.zeros(shape_of(one), dtype=torch.int64) for one in parts]
                arrays[k] = taker.places.expand(shape_of(part))
                found.append(replace(taker, places=torch.cat(arrays, int(argument(node, 1, 0)))))
        return found


FOLLOWED: dict[str, Callable[[_Run, Node], Any]] = {
    **dict.fromkeys(SAME, _Run._same),
    **dict.fromkeys(MOVES, _Run._move),
    **dict.fromkeys(LAYERS, _Run._layer),
    **dict.fromkeys(words("add add_ sub"), _Run._sum),
    **dict.fromkeys(words("mul div"), _Run._scale),
    **dict.fromkeys(words("sum mean"), _Run._mean),
    **dict.fromkeys(words("avg_pool1d avg_pool2d avg_pool3d"), _Run._pool),
    **dict.fromkeys(words("adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d"), _Run._pool),
    **dict.fromkeys(words("softmax _softmax _safe_softmax log_softmax _log_softmax"), _Run._softmax),
    **dict.fromkeys(words("matmul bmm mm baddbmm"), _Run._product),
    **dict.fromkeys(words("lstm gru rnn_tanh rnn_relu"), _Run._recurrent),
    **dict.fromkeys(words("masked_fill where"), _Run._masked),
    "neg": _Run._negated,
    "topk": _Run._topk,
    "argmax": _Run._argmax,
    "embedding": _Run._embedding,
    "layer_norm": _Run._layer_norm,
    "native_layer_norm": _Run._native_layer_norm,
    "group_norm": _Run._group_norm,
    "batch_norm": _Run._batch_norm,
    "instance_norm": _Run._instance_norm,
    "scaled_dot_product_attention": _Run._attention,
}
"""The effects of operators on an offset; all other operators see it."""

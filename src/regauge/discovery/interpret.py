"""An interpreter that applies the rules of operators to a traced program."""

import operator
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from regauge.core.groups import Exponent
from regauge.discovery import laws as law
from regauge.discovery.builder import Builder
from regauge.discovery.equal_entries import EqualEntries
from regauge.discovery.largest_entries import do_ties_vanish, may_tie_on_top
from regauge.discovery.laws import Value
from regauge.discovery.layout import leaf
from regauge.discovery.movement import Stacked
from regauge.discovery.operators import COPIES, INLINED, PIECES, SAME, Call, NoRuleError, Rule, operator_name, words
from regauge.discovery.rules import RULES
from regauge.discovery.rules.reductions import sum_of_products, sum_of_squares
from regauge.discovery.trace import Program
from regauge.discovery.traceable import TraceError

HALF = frozenset({torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2})
"""Dtypes of low precision. If a model rounds parameters to a dtype of low precision, scales do not commute with the
rounding."""
NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)
RULE_ERRORS = (NoRuleError, ValueError, TypeError, KeyError, IndexError, AssertionError, ArithmeticError)
"""The errors that a rule may raise if it cannot handle a call."""
COMPARES = words("argmax argmin max min sort argsort topk kthvalue median nanmedian mode")
"""Operators that sort entries or select some of them by size, and that may return positions. If entries are equal, the
returned positions depend on the order of the entries.
"""
CASTS = {"_to_copy", "to", "type_as"}
ACCEPTS_STACK = COPIES | PIECES | {"stack", "cat"}
"""Operators whose rules accept stacked tensors (query, key, value) without joining them into one tensor."""
ZEROS = {"zeros", "zeros_like", "new_zeros", "zero"}
FILLS = {"full", "full_like", "new_full", "fill"}
CONSTANTS = FILLS | {"ones", "ones_like", "new_ones", "scalar_tensor"}
FILLED = ZEROS | CONSTANTS | {"empty_like", "new_empty", "rand_like", "randn_like"}
REFERS = SAME | words("view_as reshape_as expand_as")
"""Operators that read the entries of the first operand, but only the shape or dtype of a second operand."""
EXPANDS = words("expand expand_as broadcast_to")
DIVISIONS = words("div divide true_divide")
JOINS = words("cat concat concatenate hstack vstack pad constant_pad_nd slice_scatter select_scatter")
"""Operators that write several values, or zeros, side by side into one tensor."""
KEEPS_BLOCKS = COPIES | PIECES | EXPANDS | JOINS | {"copy"}
"""Operators that move whole blocks of equal entries, and that may put other values next to them."""
KEEPS_ZERO = COPIES | PIECES | EXPANDS | words("repeat tile cat concat stack add sub neg tanh relu sin flip roll")
"""Operators that return zero if all operands are zero."""
READS_POSITIONS = COPIES | PIECES | words("expand_as embedding index index_select gather scatter one_hot cat concat")
"""Operators that rearrange index tensors, or look up entries at the positions in them. All other operators use
positions as plain numbers.
"""


@dataclass(frozen=True)
class Summed:
    """A product of two tensors that is used only in sums over one axis. For the square of a tensor, `factors` contains
    only one tensor.

    Rotations do not change a sum of squares. Matrices that act inversely on both factors do not change a sum of
    products.
    """

    factors: tuple[Value, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Pass:
    """The results of one pass over a program: the constraints (laws) of all operators, the parameters and buffers, and
    the results of operators.
    """

    builder: Builder
    params: dict[str, Value]
    values: dict[Node, Value]


def interpret(
    program: Program,
    unrolled: frozenset[tuple[str, int]],
    extra: Mapping[str, Rule],
    sensitive: frozenset[str] = frozenset(),
) -> Pass:
    """Apply the rules of all operators in a program, given the results of earlier passes.

    Earlier passes find the axes that must be split (`unrolled`). Earlier passes also find nodes whose results have an
    unspecified order, although later operators depend on this order (`sensitive`). For example, an unsorted `topk` may
    be sensitive.
    """
    run = _Run(program, Builder(unrolled, sensitive), extra)
    run.graph(program.graph, run.placeholders())
    run.finish()
    values = {n: v for n, v in run.values.items() if n.op == "call_function" and isinstance(v, Value)}
    return Pass(run.b, run.params, values)


class _Run:
    def __init__(self, program: Program, builder: Builder, extra: Mapping[str, Rule]) -> None:
        self.program = program
        self.b = builder
        self.rules = {**RULES, **extra}
        self.params: dict[str, Value] = {}
        self.values: dict[Node, Any] = {}
        self.ties = EqualEntries()
        nodes = program.graph.graph.find_nodes(op="placeholder")
        own = {node.meta["val"].dtype for node in nodes if node.name in program.states}
        self.coarse = HALF - own if not own & HALF else frozenset()

    def placeholders(self) -> list[Any]:
        return [self._placeholder(node) for node in self.program.graph.graph.find_nodes(op="placeholder")]

    def graph(self, graph: GraphModule, arguments: list[Any]) -> Any:
        """Apply the rules to the operators of one graph. If an operator contains a nested graph, the rules are applied
        to the nested graph when the operator is reached.
        """
        values: dict[Node, Any] = {}
        pending = list(arguments)
        result: Any = None
        for node in graph.graph.nodes:
            if node.op == "placeholder":
                values[node] = pending.pop(0)
            elif node.op == "get_attr":
                values[node] = _attribute(graph, str(node.target))
            elif node.op == "output":
                result = map_arg(node.args[0], values.get)
            elif node.users or node.op != "call_function":
                try:
                    values[node] = self._call(node, values)
                except GuardOnDataDependentSymNode as error:
                    raise TraceError(
                        f"the shape of the result of {operator_name(node)} depends on values, but discovery needs this "
                        "shape; trace the part of the model before it, or write the symmetry by hand with "
                        "`regauge.Symmetry.from_axes`"
                    ) from error
        if graph is self.program.graph:
            self.values = values
        return result

    def finish(self) -> None:
        """Freeze the axes of the model's outputs.

        If the model writes a value to a buffer, all transformations must act on this value as on the earlier buffer.
        """
        b = self.b
        b.op = b.node = "output"
        is_single = len({name for _, name in self.program.outputs if name}) <= 1
        for node, name in self.program.outputs:
            value = self.values[node]
            if isinstance(value, Value | Stacked):
                value = b.whole(value)
                if not value.is_fixed:
                    b.settle(value)
                    b.freeze(
                        value, reason="output of the model" if is_single or not name else f"output {name} of the model"
                    )
        for node, name in self.program.written:
            value, buffer = self.values[node], self.params.get(name)
            b.op = f"update of {name}"
            if isinstance(value, Value | Stacked):
                value = b.use(b.whole(value))
                b.settle(value)
                if buffer is None:
                    b.freeze(value)
                else:
                    b.equate(buffer, value)

    def _placeholder(self, node: Node) -> Any:
        fake = node.meta.get("val")
        name = self.program.states.get(node.name)
        if name is not None and isinstance(fake, Tensor):
            if name not in self.params:
                self.params[name] = Value([leaf(n) for n in fake.shape], tuple(fake.shape))
            if isinstance(self.program.added.get(name), Exponent):
                return self.b.unary(self.params[name], law.positive)  # Its exponential is positive.
            return self.params[name]
        if not isinstance(fake, Tensor):
            return fake
        if node.name in self.program.inputs:
            return Value.fixed(tuple(fake.shape), has_inputs=True)
        result = _constant(tuple(fake.shape), self.program.constants.get(node.name))
        if fake.is_complex() and node.name in self.program.held:
            result.is_complex = True
        return result

    def _call(self, node: Node, values: dict[Node, Any]) -> Any:
        b = self.b
        target: Any = node.target
        operands: Any = map_arg((node.args, dict(node.kwargs)), values.get)
        args, kwargs = operands
        if target is operator.getitem:
            return args[0][args[1]]
        name = operator_name(target)
        b.op, b.node = name, node.name
        if name in INLINED:
            inner = next(k for k, a in enumerate(args) if isinstance(a, GraphModule))
            rest = [a for a in args[inner + 1 :] if not isinstance(a, str)]
            return self.graph(args[inner], rest)
        meta = node.meta.get("val")
        if isinstance(meta, NUMBERS):
            meta = torch.empty((), device="meta")  # A number that is unknown during the trace.
        shapes, floats = _results(meta, self.coarse)
        tensors = _tensors(args[0] if name in REFERS else (args, kwargs))
        if all(isinstance(t, Value) and t.is_fixed for t in tensors):
            results = _fixed_results(name, (*args, *kwargs.values()), tensors, meta)
            self._keep_blocks(node, operands, results)
            return results
        if not isinstance(target, torch._ops.OpOverload):
            return self._opaque(str(name), tensors, meta, shapes)
        if name in FILLED and len(tensors) == 1:
            return _fixed_results(name, (*args, *kwargs.values()), [], meta)  # Only the shape of the operand matters.
        arguments = _bound(target, args, kwargs)
        is_used = _used(node, len(shapes))
        call = Call(name, target._overloadname, arguments, shapes, floats, is_used, _is_divisor(node))
        full = f"{target.namespace}::{name}"
        if name not in CASTS and _rounds(arguments.get("dtype"), self.coarse):
            return self._opaque(f"{full} (rounds first)", tensors, meta, shapes)
        summed = _as_summed(node, call)
        if name not in READS_POSITIONS:
            for tensor in tensors:
                for piece in tensor.pieces if isinstance(tensor, Stacked) else [tensor]:
                    b.settle(piece)
        if summed is not None:
            return summed
        rule = self.rules.get(full) or self.rules.get(name)
        if isinstance(call.x, Summed):
            rule = sum_of_squares if len(call.x.factors) == 1 else sum_of_products
        if rule is None:
            return self._opaque(full, tensors, meta, shapes)
        if name not in ACCEPTS_STACK:
            call = replace(call, arguments=pytree.tree_map_only(Stacked, b.whole, arguments))
        start = len(b.records)
        try:
            self._freeze_ties(node, call)
            result = rule(b, call)
            if isinstance(meta, Tensor) and isinstance(result, list):
                (result,) = result
            if _shapes(result) != list(shapes):
                raise NoRuleError(f"the rule gives {_shapes(result)}, the operator {list(shapes)}")
        except RULE_ERRORS as error:
            # If a rule cannot handle its call, freezing all axes is always correct.
            return self._opaque(f"{full} ({error})", tensors, meta, shapes)
        b.keep_unread(tensors, result if isinstance(result, list | tuple) else [result], start)
        return result

    def _keep_blocks(self, node: Node, operands: Any, results: Any) -> None:
        """Allow permutations along the axes of a constant if it consists of blocks of equal entries. If all entries are
        zero, scales are allowed too.

        Each operator that uses the constant gets a copy with new axes.
        """
        target, (args, kwargs) = node.target, operands
        name = operator_name(target)
        made = [x for x in (results if isinstance(results, list) else [results]) if isinstance(x, Value)]
        tensors = _tensors(operands)
        has_blocks = any(x.made is not None for x in tensors) or (name in JOINS and any(x.uniform for x in tensors))
        is_padded = name in ("pad", "constant_pad_nd")
        if name not in KEEPS_BLOCKS or not (has_blocks or is_padded) or all(x.is_zero for x in made):
            return
        shapes, floats = _results(node.meta.get("val"), self.coarse)
        if not isinstance(target, torch._ops.OpOverload) or not all(floats):
            return
        call = Call(name, target._overloadname, _bound(target, args, kwargs), shapes, floats)

        def make(k: int) -> Value | None:
            b = self.b
            before = b.op, b.node
            b.op, b.node = name, node.name
            try:
                fresh = replace(call, arguments=pytree.tree_map_only(Value, b.use, call.arguments))
                found = self.rules[name](b, fresh)
            except RULE_ERRORS:
                return None
            finally:
                b.op, b.node = before
            return b.whole(found[k] if isinstance(found, list) else found)

        for k, value in enumerate(made):
            value.made = partial(make, k)

    def _freeze_ties(self, node: Node, call: Call) -> None:
        """Freeze the axis along which an operator compares entries, if the order of equal entries affects the
        result.
        """
        x, dim = call.x, call.arguments.get("dim", -1)
        uses_positions = call.name.startswith("arg") or (len(call.shapes) == 2 and call.is_used[1])
        if call.name not in COMPARES or not uses_positions or not isinstance(x, Value):
            return
        is_top = dim is not None and (call.name in ("max", "argmax") or (call.name == "topk" and call["largest"]))
        if (
            may_tie_on_top(self.ties, node.args[0], dim, call.get("k", 1))
            if is_top
            else self.ties.may_tie(node.args[0], dim)
        ) and not (is_top and call.name == "topk" and do_ties_vanish(self.ties, node, dim)):
            dims = range(x.ndim) if dim is None else [dim % x.ndim]
            self.b.freeze(x, dims, f"{call.name}: the order decides between equal entries")

    def _opaque(self, name: str, tensors: list[Any], meta: Any, shapes: tuple[tuple[int, ...], ...]) -> Any:
        b = self.b
        b.unknown[name] = None
        b.op = f"{b.op} (no rule)"
        results = b.opaque([b.whole(t) for t in tensors], shapes)
        if isinstance(meta, Tensor) or meta is None:
            return results[0] if results else None
        return [results.pop(0) if isinstance(m, Tensor) else m for m in meta]


def _bound(target: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of an operator, including defaults, by name and in the order of its schema."""
    schema = target._schema.arguments
    given = {**{parameter.name: value for parameter, value in zip(schema, args, strict=False)}, **kwargs}
    return {p.name: given.get(p.name, p.default_value) for p in schema if p.name in given or p.has_default_value()}


def _results(meta: Any, coarse: Container[torch.dtype]) -> tuple[tuple[tuple[int, ...], ...], tuple[bool, ...]]:
    found = [meta] if isinstance(meta, Tensor) else [m for m in meta or () if isinstance(m, Tensor)]
    floats = tuple(t.is_floating_point() and t.dtype not in coarse for t in found)
    return tuple(tuple(int(n) for n in t.shape) for t in found), floats


def _rounds(dtype: Any, coarse: Container[torch.dtype]) -> bool:
    return isinstance(dtype, torch.dtype) and (dtype in coarse or not (dtype.is_floating_point or dtype.is_complex))


def _used(node: Node, count: int) -> tuple[bool, ...]:
    keys = {user.args[1] for user in node.users if user.target is operator.getitem and user.users}
    has_all = any(user.target is not operator.getitem for user in node.users)
    return tuple(has_all or k in keys for k in range(count))


def _is_divisor(node: Node) -> bool:
    """Return whether a tensor is used only as a divisor, perhaps after it is repeated along axes."""
    return all(
        _is_divisor(user)
        if operator_name(user) in EXPANDS
        else operator_name(user) in DIVISIONS and user.args[1] is node and user.args[0] is not node
        for user in node.users
    )


def _shapes(result: Any) -> list[tuple[int, ...]]:
    return [tuple(t.shape) for t in (result if isinstance(result, list | tuple) else [result])]


def _tensors(arguments: Any) -> list[Any]:
    found = pytree.tree_leaves(arguments)
    known = [x for x in found if isinstance(x, Value | Stacked | Summed)]
    return [factor for x in known for factor in (x.factors if isinstance(x, Summed) else [x])]


def _attribute(graph: GraphModule, target: str) -> Any:
    found = operator.attrgetter(target)(graph)
    return _constant(tuple(found.shape), found) if isinstance(found, Tensor) else found


def _constant(shape: tuple[int, ...], tensor: Tensor | None) -> Value:
    """Return a constant tensor as a `Value`. If all entries of the tensor are equal, all axes of the value are marked
    as uniform.
    """
    is_readable = type(tensor) in (Tensor, torch.nn.Parameter, torch.nn.Buffer)
    if tensor is None or not is_readable or tensor.is_complex() or tensor.is_meta or tensor.numel() == 0:
        return Value.fixed(shape)
    first = tensor.flatten()[0]
    if bool((tensor == first).all()):
        return Value.fixed(shape, is_zero=not bool(first), uniform=frozenset(range(len(shape))))
    return Value.fixed(shape)


def _fixed_results(name: str, args: tuple[Any, ...], tensors: list[Value], meta: Any) -> Any:
    """Return the results of an operator if no parameter influences its operands."""
    first = tensors[0] if tensors else None
    fill = [a for a in args if isinstance(a, int | float) and not isinstance(a, bool)]
    is_zero = name in ZEROS or (name in FILLS and fill[-1:] == [0]) or (name == "mul" and _has_zero(tensors, fill))
    is_uniform = name in CONSTANTS
    if name in KEEPS_ZERO and first is not None:
        is_zero = all(x.is_zero for x in tensors) and (name not in ("add", "sub") or not any(fill))
        is_uniform = len(tensors) == 1 and len(first.uniform) == first.ndim

    def one(fake: Any) -> Any:
        if not isinstance(fake, Tensor):
            return fake
        shape = tuple(fake.shape)
        uniform = frozenset(range(len(shape))) if is_uniform else frozenset[int]()
        if name in SAME and first is not None:
            uniform |= first.uniform
        if name in (*EXPANDS, "repeat", "tile") and first is not None:
            lead = len(shape) - first.ndim
            uniform |= {k for k, n in enumerate(shape) if k < lead or first.shape[k - lead] == 1 != n}
        result = Value.fixed(shape, is_zero, uniform, has_inputs=any(tensor.has_inputs for tensor in tensors))
        result.is_complex = any(tensor.is_complex for tensor in tensors)
        return result

    return [one(m) for m in meta] if isinstance(meta, list | tuple) else one(meta)


def _has_zero(tensors: list[Value], numbers: list[int | float]) -> bool:
    return 0 in numbers or any(tensor.is_zero for tensor in tensors)


def _as_summed(node: Node, call: Call) -> Summed | None:
    """Return the factors of a product or square, if all its users sum it over an axis that every factor has."""
    values = list(call.arguments.values())
    is_square = (call.name == "pow" and len(values) > 1 and values[1] == 2) or call.name == "square"
    if not is_square and call.name not in ("mul", "multiply"):
        return None
    factors = tuple(dict.fromkeys(values[:1] if is_square else values[:2]))
    if not all(isinstance(x, Value) and not x.is_fixed for x in factors):
        return None
    for user in node.users:
        dims: Any = (user.args[1] if len(user.args) > 1 else user.kwargs.get("dim")) or [*range(len(call.shape))]
        if operator_name(user.target) not in ("mean", "sum") or not isinstance(dims, list | tuple) or len(dims) != 1:
            return None
        dim = dims[0] % len(call.shape)
        if len(factors) == 2 and not all(_varies(x, dim - len(call.shape), call.shape[dim]) for x in factors):
            return None
    return Summed(factors, call.shape)


def _varies(x: Value, dim: int, size: int) -> bool:
    """Return whether a tensor varies along an axis, which is given as a negative number counted from the last axis."""
    return x.ndim >= -dim and x.shape[dim] == size and dim % x.ndim not in x.uniform

"""Run the rules over a traced program."""

import operator
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from regauge.discovery import laws as law
from regauge.discovery.builder import Builder
from regauge.discovery.equal_entries import EqualEntries
from regauge.discovery.laws import Value
from regauge.discovery.layout import leaf
from regauge.discovery.movement import Stacked
from regauge.discovery.operator_call import Call, NoRuleError, Rule
from regauge.discovery.rules import ACCEPTS_STACK, RULES
from regauge.discovery.rules.reductions import sum_of_squares
from regauge.discovery.trace import Program, TraceError

HALF = frozenset({torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2})
"""Where parameters are finer, a conversion to one of these rounds: scales do not pass."""
NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)
COMPARES = {"argmax", "argmin", "max", "min", "sort", "argsort", "topk"}
"""Operators that return the positions of entries by their size; those of equal entries depend on their order."""
CASTS = {"_to_copy", "to", "type_as"}

INLINED = {"wrap_with_set_grad_enabled", "wrap_with_autocast", "tag_activation_checkpoint", "wrap", "invoke_subgraph"}
"""Higher-order operators that just run the graph that they hold."""

ZEROS = {"zeros", "zeros_like", "new_zeros"}
CONSTANTS = {"ones", "ones_like", "new_ones", "full", "full_like", "new_full", "scalar_tensor"}
FILLED = ZEROS | CONSTANTS | {"empty_like", "new_empty", "rand_like", "randn_like"}
KEEPS_ZERO = {"view", "_unsafe_view", "reshape", "permute", "transpose", "unsqueeze", "squeeze", "expand", "clone",
              "slice", "select", "contiguous", "_to_copy", "to", "detach", "alias", "repeat", "flatten"}  # fmt: skip


READS_POSITIONS = {
    "view", "_unsafe_view", "reshape", "flatten", "unflatten", "permute", "transpose", "squeeze", "unsqueeze", "slice",
    "select", "expand", "clone", "contiguous", "detach", "alias", "_to_copy", "to", "unbind", "split", "chunk", "t",
    "embedding", "index", "index_select", "gather", "scatter", "one_hot", "narrow", "expand_as",
}  # fmt: skip
"""Operators that move positions about, or look up what they point to; others would use them as numbers."""


@dataclass(frozen=True)
class Squared:
    """A square that is only summed: kept as its base, because its sum is invariant under rotations."""

    base: Value

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape


@dataclass(frozen=True)
class Pass:
    """One pass over a program.

    Attributes:
        builder: What the operators recorded.
        params: Parameters and buffers.
        values: What the operators of the outermost graph return, where this is one tensor.
    """

    builder: Builder
    params: dict[str, Value]
    values: dict[Node, Value]


def interpret(program: Program, unrolled: frozenset[tuple[str, int]], extra: Mapping[str, Rule]) -> Pass:
    """One pass over a program."""
    run = _Run(program, Builder(unrolled), extra)
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
        result = []
        for node in self.program.graph.graph.nodes:
            if node.op == "placeholder":
                result.append(self._placeholder(node))
        return result

    def graph(self, graph: GraphModule, arguments: list[Any]) -> Any:
        """Run one graph; nested graphs are run where they are called."""
        values: dict[Node, Any] = {}
        pending = list(arguments)
        result: Any = None
        for node in graph.graph.nodes:
            if node.op == "placeholder":
                values[node] = pending.pop(0)
            elif node.op == "get_attr":
                values[node] = _attribute(graph, str(node.target))
            elif node.op == "output":
                result = _resolved(node.args[0], values)
            elif node.users or node.op != "call_function":
                try:
                    values[node] = self._call(node, values)
                except GuardOnDataDependentSymNode as error:
                    raise TraceError(
                        f"the shape of {node.name} depends on values ({error.cond}), and discovery needs it; trace the "
                        "part of the model before it, or write the symmetry by hand with `regauge.Symmetry.from_axes`"
                    ) from error
        if graph is self.program.graph:
            self.values = values
        return result

    def finish(self) -> None:
        """Nothing may change the outputs; buffers that the model writes must move as they did."""
        b = self.b
        b.op = b.node = "output"
        for node in self.program.outputs:
            value = self.values[node]
            if isinstance(value, Value | Stacked):
                value = b.whole(value)
                if not value.is_fixed:
                    b.settle(value)
                    b.freeze(value, reason="output of the model")
        for node, name in self.program.written:
            value, buffer = self.values[node], self.params.get(name)
            b.op = f"update of {name}"
            if isinstance(value, Value | Stacked):
                value = b.use(b.whole(value))
                b.settle(value)
                if buffer is None:
                    b.freeze(value)
                    continue
                for k in range(buffer.ndim):
                    b.tie(buffer.layouts[k], value.layouts[k])
                b.record(*(law.linear(buffer.axis(k), value.axis(k)) for k in range(buffer.ndim)))

    def _placeholder(self, node: Node) -> Any:
        fake = node.meta.get("val")
        name = self.program.states.get(node.name)
        if name is not None and isinstance(fake, Tensor):
            if name not in self.params:
                self.params[name] = Value([leaf(n) for n in fake.shape], tuple(fake.shape), name=name)
            return self.params[name]
        if not isinstance(fake, Tensor):
            return fake
        return _constant(tuple(fake.shape), self.program.constants.get(node.name))

    def _call(self, node: Node, values: dict[Node, Any]) -> Any:
        b = self.b
        if node.target is operator.getitem:
            container, key = _resolved(node.args, values)
            return container[key]
        target = node.target
        args, kwargs = _resolved(node.args, values), _resolved(node.kwargs, values)
        name = _operator_name(target)
        b.op, b.node = name, node.name
        if name in INLINED:
            inner = next(k for k, a in enumerate(args) if isinstance(a, GraphModule))
            rest = [a for a in args[inner + 1 :] if not isinstance(a, str)]
            return self.graph(args[inner], rest)
        meta = node.meta.get("val")
        if isinstance(meta, NUMBERS):
            meta = torch.empty((), device="meta")  # A number that the trace does not know.
        shapes, floats = _results(meta, self.coarse)
        tensors = _tensors((args, kwargs))
        if all(isinstance(t, Value) and t.is_fixed for t in tensors):
            return _fixed_results(name, args, tensors, meta)
        if not isinstance(target, torch._ops.OpOverload):
            return self._opaque(str(name), tensors, meta, shapes)
        if name in FILLED and len(tensors) == 1:
            return _fixed_results(name, args, [], meta)  # Only the shape of the operand counts.
        arguments = _bound(target, args, kwargs)
        call = Call(name, target._overloadname, arguments, shapes, floats, _used(node, len(shapes)))
        full = f"{target.namespace}::{name}"
        if name not in CASTS and _rounds(arguments.get("dtype"), self.coarse):
            return self._opaque(f"{full} (rounds first)", tensors, meta, shapes)
        squared = _as_square(node, call)
        if name not in READS_POSITIONS:
            for tensor in tensors:
                for piece in tensor.pieces if isinstance(tensor, Stacked) else [tensor]:
                    b.settle(piece)
        if squared is not None:
            return squared
        rule = self.rules.get(full) or self.rules.get(name)
        if isinstance(call.x, Squared):
            rule = sum_of_squares
        if rule is None:
            return self._opaque(full, tensors, meta, shapes)
        if name not in ACCEPTS_STACK:
            call = replace(call, arguments={k: self._joined(v) for k, v in arguments.items()})
        try:
            if (
                name in COMPARES
                and _uses_positions(call)
                and self.ties.may_tie(node.args[0], call.arguments.get("dim", -1))
            ):
                _freeze_ties(b, call)
            result = rule(b, call)
            if isinstance(meta, Tensor) and isinstance(result, list):
                (result,) = result
            if _shapes(result) != list(shapes):
                raise NoRuleError(f"the rule gives {_shapes(result)}, the operator {list(shapes)}")
        except (NoRuleError, ValueError, TypeError, KeyError, IndexError, AssertionError, ArithmeticError) as error:
            # A rule that cannot handle its call leaves the sound answer: nothing may act there.
            return self._opaque(f"{full} ({error})", tensors, meta, shapes)
        return result

    def _joined(self, argument: Any) -> Any:
        if isinstance(argument, Stacked):
            return self.b.whole(argument)
        if isinstance(argument, list | tuple):
            return [self._joined(a) for a in argument]
        return argument

    def _opaque(self, name: str, tensors: list[Any], meta: Any, shapes: tuple[tuple[int, ...], ...]) -> Any:
        b = self.b
        b.unknown[name] = None
        b.op = f"{b.op} (no rule)"
        results = b.opaque([b.whole(t) for t in tensors], shapes)
        if isinstance(meta, Tensor) or meta is None:
            return results[0] if results else None
        return [results.pop(0) if isinstance(m, Tensor) else m for m in meta]


def _operator_name(target: Callable[..., Any] | str) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return str(target._schema.name).split("::")[-1]
    if isinstance(target, torch._ops.HigherOrderOperator):
        return str(target.name())  # type: ignore[no-untyped-call]
    return getattr(target, "__name__", str(target))


def _bound(target: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    arguments = {}
    for k, parameter in enumerate(target._schema.arguments):
        if k < len(args) and not parameter.kwarg_only:
            arguments[parameter.name] = args[k]
        elif parameter.name in kwargs:
            arguments[parameter.name] = kwargs[parameter.name]
        elif parameter.has_default_value():
            arguments[parameter.name] = parameter.default_value
    return arguments


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


def _shapes(result: Any) -> list[tuple[int, ...]]:
    return [tuple(t.shape) for t in (result if isinstance(result, list | tuple) else [result])]


def _uses_positions(call: Call) -> bool:
    return call.name.startswith("arg") or (len(call.shapes) == 2 and call.is_used[1])


def _freeze_ties(b: Builder, call: Call) -> None:
    x, dim = call.x, call.arguments.get("dim", -1)
    if isinstance(x, Value):
        dims = range(x.ndim) if dim is None else [dim % x.ndim]
        b.freeze(x, dims, f"{call.name}: the order decides between equal entries")


def _resolved(argument: Any, values: Mapping[Node, Any]) -> Any:
    if isinstance(argument, Node):
        return values.get(argument)
    if isinstance(argument, list | tuple):
        return tuple(_resolved(a, values) for a in argument)
    if isinstance(argument, Mapping):
        return {key: _resolved(a, values) for key, a in argument.items()}
    return argument


def _tensors(argument: Any) -> list[Any]:
    if isinstance(argument, Value | Stacked):
        return [argument]
    if isinstance(argument, Squared):
        return [argument.base]
    if isinstance(argument, list | tuple):
        return [t for a in argument for t in _tensors(a)]
    if isinstance(argument, Mapping):
        return [t for a in argument.values() for t in _tensors(a)]
    return []


def _attribute(graph: GraphModule, target: str) -> Any:
    found: Any = graph
    for part in target.split("."):
        found = getattr(found, part)
    return _constant(tuple(found.shape), found) if isinstance(found, Tensor) else found


def _constant(shape: tuple[int, ...], tensor: Tensor | None) -> Value:
    """A tensor that no parameter influences; uniform ones are recognized by value."""
    if tensor is None or tensor.is_meta or tensor.numel() == 0 or not _is_readable(tensor):
        return Value.fixed(shape)
    if tensor.numel() == 1 or bool((tensor == tensor.flatten()[0]).all()):
        is_zero = not bool(tensor.flatten()[0])
        return Value.fixed(shape, is_zero=is_zero, uniform=frozenset(range(len(shape))))
    return Value.fixed(shape)


def _is_readable(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, torch.nn.Parameter, torch.nn.Buffer) and not tensor.is_complex()


def _fixed_results(name: str, args: tuple[Any, ...], tensors: list[Value], meta: Any) -> Any:
    """Results of an operator whose operands no parameter influences."""

    def one(fake: Any) -> Any:
        if not isinstance(fake, Tensor):
            return fake
        shape = tuple(fake.shape)
        everywhere = frozenset(range(len(shape)))
        if name in ZEROS or (name in KEEPS_ZERO and tensors and tensors[0].is_zero):
            return Value.fixed(shape, is_zero=True)
        if name in CONSTANTS:
            fill = [a for a in args if isinstance(a, int | float) and not isinstance(a, bool)]
            is_zero = name.endswith(("full", "full_like")) and bool(fill) and fill[-1] == 0
            return Value.fixed(shape, is_zero=is_zero, uniform=everywhere)
        if name in KEEPS_ZERO and tensors and len(tensors[0].uniform) == tensors[0].ndim:
            return Value.fixed(shape, uniform=everywhere)
        if name == "expand" and tensors:
            lead = len(shape) - tensors[0].ndim
            wide = {k for k in everywhere if k < lead or tensors[0].shape[k - lead] != shape[k]}
            return Value.fixed(shape, uniform=frozenset(wide))
        return Value.fixed(shape)

    return [one(m) for m in meta] if isinstance(meta, list | tuple) else one(meta)


def _as_square(node: Node, call: Call) -> Squared | None:
    """x ** 2 whose every use sums it over one axis."""
    values = list(call.arguments.values())
    is_square = (
        (call.name == "pow" and len(values) > 1 and values[1] == 2)
        or call.name == "square"
        or (call.name == "mul" and values[0] is values[1])
    )
    if not is_square or not isinstance(call.x, Value) or call.x.is_fixed:
        return None
    for user in node.users:
        dims = user.args[1] if len(user.args) > 1 else user.kwargs.get("dim")
        if _operator_name(user.target) not in ("mean", "sum") or not isinstance(dims, list | tuple) or len(dims) != 1:
            return None
    return Squared(call.x)

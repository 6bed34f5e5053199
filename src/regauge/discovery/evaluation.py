"""Evaluation of a traced program in float64: of single operators, and of nodes that do not depend on parameters."""

import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from regauge.discovery.operators import INLINED, operator_name
from regauge.discovery.trace import Program


class UndecidedError(Exception):
    """Error if this module cannot evaluate a part of a program.

    For example, a value may be unknown, an operator may fail, or a tensor may have too many entries.
    """


class Constants:
    """The values of nodes that no parameter influences, in float64 on the CPU."""

    def __init__(self, program: Program, inputs: Sequence[Any]) -> None:
        self._program = program
        self._inputs = dict(zip(program.inputs, inputs, strict=False))
        self._known: dict[Node, Any] = {}
        self._generator = torch.Generator().manual_seed(1)
        self.parameters: list[Node] = []
        self._names: dict[Node, Node] = {}
        self._first: dict[Hashable, Node] = {}
        self._dependent: set[Node] = set()
        for node in program.graph.graph.nodes:
            if node.op == "placeholder" and node.name in program.states and node.name not in program.held:
                self.parameters.append(node)
                self._dependent.add(node)
            elif any(source in self._dependent for source in node.all_input_nodes):
                self._dependent.add(node)

    def is_dependent(self, node: Node) -> bool:
        """Return whether a parameter influences a node."""
        return node in self._dependent

    def name(self, node: Node) -> Node:
        """Return the first of all nodes that apply the same operator to the same constants."""
        if node not in self._names:
            same = node
            if node.op == "call_function":
                key = (comparable(node.target, self.name), comparable((node.args, node.kwargs), self.name))
                same = self._first.setdefault(key, node)
            self._names[node] = same
        return self._names[node]

    def draw(self, node: Node, generator: torch.Generator) -> Any:
        """Return the value of a node, or random numbers of the same shape if the node depends on parameters."""
        if node not in self._dependent:
            return self(node)
        fake = node.meta.get("val")
        if not isinstance(fake, Tensor) or not fake.is_floating_point():
            raise UndecidedError(f"{node.name} depends on parameters and is no floating-point number")
        return torch.randn(tuple(fake.shape), generator=generator, dtype=torch.float64)

    def __call__(self, node: Node) -> Any:
        """Return the value of a node that depends on no parameter."""
        waiting = [node]
        while waiting:
            last = waiting[-1]
            missing = [source for source in last.all_input_nodes if source not in self._known]
            if last in self._known or not missing:
                waiting.pop()
                if last not in self._known:
                    self._known[last] = self._value(last)
            else:
                waiting += missing
        return self._known[node]

    def _value(self, node: Node) -> Any:
        if node.op == "placeholder":
            return self._concrete(self._program.held.get(node.name, self._inputs.get(node.name)))
        if node.op == "get_attr":
            return self._concrete(operator.attrgetter(str(node.target))(self._program.graph))
        return evaluate(node, self._known)

    def _concrete(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_meta:
            # A result for random numbers holds for almost all other numbers.
            if not value.is_floating_point():
                raise UndecidedError("an integer input is on the meta device, without a value")
            return torch.rand(tuple(value.shape), generator=self._generator, dtype=torch.float64) + 0.5
        if isinstance(value, Tensor | GraphModule | int | float | bool):
            return _double(value)
        raise UndecidedError(f"a {type(value).__name__} has no known value")


def evaluate(node: Node, known: Mapping[Node, Any]) -> Any:
    """Return the result of one operator for known operands. All floating-point types are replaced by float64."""
    target: Any = node.target
    args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: known[n])
    args, kwargs = pytree.tree_map(_double, (args, kwargs))
    if isinstance(target, torch._ops.HigherOrderOperator):
        if operator_name(target) not in INLINED:
            raise UndecidedError(f"{node.name} runs other code")
        k = next(k for k, a in enumerate(args) if isinstance(a, GraphModule))
        return _run(args[k], [a for a in args[k + 1 :] if not isinstance(a, str)])
    try:
        with torch.no_grad():
            return pytree.tree_map(_double, target(*args, **kwargs))
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise UndecidedError(f"{node.name} fails on numbers in float64: {error}") from error


def _run(graph: GraphModule, arguments: list[Any]) -> Any:
    known: dict[Node, Any] = {}
    pending = list(arguments)
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            known[node] = pending.pop(0)
        elif node.op == "get_attr":
            known[node] = _double(operator.attrgetter(str(node.target))(graph))
        elif node.op == "output":
            return torch.fx.node.map_arg(node.args[0], lambda n: known[n])
        elif node.users:
            known[node] = evaluate(node, known)
    return None


def _double(value: Any) -> Any:
    if isinstance(value, Tensor):
        wide = torch.float64 if value.is_floating_point() else torch.complex128 if value.is_complex() else value.dtype
        return value.detach().to(device="cpu", dtype=wide)
    if isinstance(value, torch.dtype):
        return torch.float64 if value.is_floating_point else torch.complex128 if value.is_complex else value
    return torch.device("cpu") if isinstance(value, torch.device) else value


def like(value: Any) -> tuple[object, ...]:
    """Return a key for comparing values: the shape and dtype of a tensor, or the type of any other value."""
    return (comparable(value.shape), value.dtype) if isinstance(value, Tensor) else (type(value),)


def comparable(value: Any, told: Callable[[Node], Hashable] = id) -> Hashable:
    """Return a hashable key for arguments of an operator, in which `told(node)` replaces each node."""
    if isinstance(value, Node):
        return ("node", told(value))
    if isinstance(value, list | tuple):
        return ("list", *(comparable(x, told) for x in value))
    if isinstance(value, Mapping):
        return ("dict", *((key, comparable(x, told)) for key, x in value.items()))
    if isinstance(value, slice):
        return ("slice", *(comparable(x, told) for x in (value.start, value.stop, value.step)))
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        raise UndecidedError("a shape depends on values")
    return (type(value), value)

"""Classification of buffers as statistics of normalizations, which are transformed like parameters, or as structure.

The classification uses only the traced graph and a forward pass on the meta device. The entries of buffers are not
read.
"""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from regauge.core.outputs import SelectedOutputs
from regauge.discovery.operators import INLINED, SAME, VIEWS, operator_name, shape_of, words
from regauge.discovery.registry import leaves_as_operators
from regauge.discovery.restoring import restored
from regauge.discovery.trace import Program, trace
from regauge.discovery.traceable import TraceError

RUNNING = ("running_mean", "running_var")
"""Names of operator arguments that contain the running estimates of a normalization."""
NORMS = nn.modules.batchnorm._NormBase
"""Module classes whose buffers are statistics."""
POINTWISE = words("add sub rsub mul div neg")
PASSES = SAME | VIEWS | words("expand expand_as slice")


def structure_of(
    program: Program,
    module: nn.Module,
    inputs: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    keep: Collection[str],
    move: Collection[str],
) -> tuple[str, ...]:
    """Return the names of the structure: buffers that influence the outputs and that no normalization fills.

    Args:
        program: The traced model.
        module: The traced module.
        inputs: The example inputs.
        kwargs: Keyword arguments of the module.
        keep: Names or patterns of further tensors that are structure.
        move: Names or patterns of buffers that are not structure.

    Raises:
        ValueError: An entry of `keep` matches no parameter or buffer, or an entry of `move` matches no buffer that
            influences the outputs.
    """
    owner = {name: first for first, names in program.aliases.items() for name in names}
    nodes = program.graph.graph.find_nodes(op="placeholder")
    read = {program.origins[node.name] for node in nodes if node.users and node.name in program.origins}
    tables = [name for name in program.buffers if owner[name] in read and _is_table(program, name)]
    for patterns, every, what in ((move, tables, "buffer"), (keep, program.shapes, "parameter or buffer")):
        for one in patterns:
            if not any(fnmatchcase(name, one) for name in every):
                raise ValueError(
                    f"the model reads no {what} called {one!r}; it has {', '.join([*every][:5]) or 'none'}; name one "
                    "of these"
                )
    moved = {name for name in tables if any(fnmatchcase(name, one) for one in move)}
    named = {owner[name] for name in program.shapes if any(fnmatchcase(name, one) for one in keep)}
    kept = {name for name in program.shapes if owner[name] in named}
    statistics = _Statistics(program).names
    unclear = {name for name in tables if owner[name] not in statistics} - moved - kept
    candidates = sorted(unclear & program.floating)
    if candidates:
        unclear -= _filled(module, inputs, kwargs, candidates)
    return tuple(name for name in program.shapes if name in unclear | kept)


def find_structure(
    module: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any], names: Sequence[str]
) -> tuple[str, ...]:
    """Return the names of those buffers that are structure; no names if the module cannot be traced."""
    unclear = [name for name in names if not isinstance(module.get_submodule(name.rpartition(".")[0]), NORMS)]
    if not unclear:
        return ()
    dtype = next((t.dtype for t in module.parameters() if t.is_floating_point()), torch.get_default_dtype())
    inputs, kwargs = pytree.tree_map_only(
        Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, (inputs, kwargs)
    )
    try:
        with leaves_as_operators(module):
            program = trace(module, inputs, kwargs)
    except (TraceError, ValueError):
        return ()
    found = structure_of(program, module, inputs, kwargs, keep=(), move=())
    return tuple(name for name in found if name in unclear)


def _is_table(program: Program, name: str) -> bool:
    """Return whether a buffer has axes or a floating-point dtype. All other buffers are counters."""
    return bool(program.shapes[name]) or name in program.floating


class _Statistics:
    """The buffers that a graph uses as running estimates of a normalization. The normalization may consist of several
    operators.
    """

    def __init__(self, program: Program) -> None:
        self._sources: dict[Node, frozenset[str]] = {}
        self._deviations: set[Node] = set()
        self._nodes: list[Node] = []
        self.names: set[str] = set()
        buffers = {first for first, names in program.aliases.items() if {*names} & {*program.buffers}}
        for node in program.graph.graph.find_nodes(op="placeholder"):
            name = program.origins.get(node.name)
            if name in buffers:
                self._sources[node] = frozenset([name])
        self._follow(program.graph)
        before = -1
        while before < len(self.names):
            before = len(self.names)
            for node in self._nodes:
                self._grow(node)

    def _follow(self, graph: GraphModule) -> None:
        """Record, in graph order, the buffers from which each node is computed.

        The nodes of a nested graph are recorded at the operator that contains the graph.
        """
        for node in graph.graph.nodes:
            if node.op != "call_function":
                continue
            inner = next(
                (getattr(graph, str(one.target)) for one in node.all_input_nodes if one.op == "get_attr"), None
            )
            if operator_name(node) in INLINED and isinstance(inner, GraphModule):
                operands = [one for one in node.args if isinstance(one, Node) and one.op != "get_attr"]
                for place, operand in zip(inner.graph.find_nodes(op="placeholder"), operands, strict=False):
                    if operand in self._sources:
                        self._sources[place] = self._sources[operand]
                self._follow(inner)
                continue
            self._nodes.append(node)
            self._read(node)

    def _read(self, node: Node) -> None:
        """Collect buffers that an operator takes as running estimates, or that occur in `(buffer + eps) ** -0.5`."""
        for key in RUNNING:
            operand = _argument(node, key)
            if isinstance(operand, Node):
                self.names |= self._sources.get(operand, frozenset())
        operands = node.all_input_nodes
        if not operands or not all(one in self._sources for one in operands):
            return
        self._sources[node] = frozenset().union(*(self._sources[one] for one in operands))
        if _is_root(node) and _is_offset(node.args[0]) and _is_vector(node):
            self.names |= self._sources[node]
            self._deviations.add(node)

    def _grow(self, node: Node) -> None:
        """Collect the buffers that the model combines with a factor `(buffer + eps) ** -0.5`, such as the running mean
        or a frozen gain and bias.
        """
        name = operator_name(node)
        operands = [one for one in node.args[:2] if isinstance(one, Node)]
        if name not in POINTWISE | PASSES or not self._deviations & {*operands}:
            return
        self._deviations.add(node)
        for one in operands if name in POINTWISE else ():
            self.names |= self._vector(one)
            centered = _unwrapped(one)
            if one not in self._sources and operator_name(centered) in ("add", "sub"):
                for operand in centered.args[:2]:
                    self.names |= self._vector(operand)

    def _vector(self, node: Any) -> frozenset[str]:
        """Return the buffers from which a vector is computed. If the vector also depends on other values, return the
        empty set.
        """
        return self._sources.get(node, frozenset()) if isinstance(node, Node) and _is_vector(node) else frozenset()


def _argument(node: Node, key: str) -> Any:
    """Return an argument of an operator by its name in the operator's schema."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return None
    names = [one.name for one in schema.arguments]
    place = names.index(key) if key in names else len(node.args)
    return node.kwargs.get(key, node.args[place] if place < len(node.args) else None)


def _is_root(node: Node) -> bool:
    name = operator_name(node)
    return name in ("sqrt", "rsqrt") or (name == "pow" and len(node.args) > 1 and node.args[1] in (0.5, -0.5))


def _is_offset(node: Any) -> bool:
    """Return whether a node adds a small number, such as the eps in a normalization, to its operand."""
    if not isinstance(node, Node) or node.op != "call_function" or operator_name(node) != "add":
        return False
    return any(isinstance(one, float) and 0 < one < 1 for one in node.args[:2])


def _is_vector(node: Node) -> bool:
    return sum(n > 1 for n in shape_of(node)) <= 1


def _unwrapped(node: Node) -> Node:
    while node.op == "call_function" and operator_name(node) in PASSES and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def _filled(module: nn.Module, inputs: tuple[Any, ...], kwargs: Mapping[str, Any], names: Sequence[str]) -> set[str]:
    """Return the buffers that a forward pass in training mode overwrites or replaces.

    The forward pass runs on meta tensors and does not change the module.
    """
    mode, writes = FakeTensorMode(allow_non_fake_inputs=True), _Writes()
    wrapped, state = SelectedOutputs(module, None), torch.get_rng_state()
    with restored(module), mode, torch.no_grad(), writes:
        fakes = _without_values(module, mode)
        wrapped.train()
        given, keywords = pytree.tree_map_only(Tensor, mode.from_tensor, (inputs, dict(kwargs)))
        with suppress(Exception):  # Any error is possible without values; earlier writes are still recorded.
            wrapped(*given, **keywords)
        now = dict(module.named_buffers(remove_duplicate=False))
    torch.set_rng_state(state)
    return {n for n in names if now.get(n) is not fakes[n] or fakes[n].untyped_storage()._cdata in writes.storages}


def _without_values(module: nn.Module, mode: FakeTensorMode) -> dict[str, Tensor]:
    """Replace all tensors of a module by meta tensors, and return the buffers."""
    made: dict[int, Tensor] = {}
    for part in module.modules():
        tables: list[dict[str, Any]] = [part._parameters, part._buffers]
        for table in tables:
            for name, tensor in table.items():
                if tensor is not None:
                    table[name] = made.setdefault(id(tensor), mode.from_tensor(tensor.detach()))
    return dict(module.named_buffers(remove_duplicate=False))


class _Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that records which storages operators write to."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for k, argument in enumerate(func._schema.arguments):
            value = args[k] if k < len(args) else kwargs.get(argument.name)
            if argument.is_write and isinstance(value, Tensor):
                self.storages.add(value.untyped_storage()._cdata)
        return func(*args, **kwargs)

"""Traces of modules by torch.export: lists of operator calls in which parameters and buffers have names."""

import logging
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from functools import cache
from io import StringIO
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, OutputKind, OutputSpec
from torch.fx import GraphModule, Node
from torch.fx import config as fx_config
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.utils import _pytree as pytree

from regauge.core.behind_gains import Added
from regauge.core.outputs import Outputs, OutputsError, SelectedOutputs, evaluating
from regauge.core.params import INTEGERS
from regauge.discovery.affine_gains import take_out_exponents, take_out_numbers, take_out_of_layers
from regauge.discovery.in_place import without_mutation
from regauge.discovery.known_sizes import export_with_values, has_known_sizes, has_unknown_sizes
from regauge.discovery.operators import SAME, VIEWS, operator_name, words
from regauge.discovery.restoring import parameters_kept, restored
from regauge.discovery.traceable import OTHERWISE, TraceError, depends_on_values, require_traceable, trace_error

WRITES = (OutputKind.BUFFER_MUTATION, OutputKind.PARAMETER_MUTATION)
"""The kinds of torch.export outputs that a model writes to its own state."""
MASKING = words("mul where masked_fill")
"""Operators in which a mask only multiplies other values or selects among them."""
CASTS = words("_to_copy to")
LOGIC = words("logical_not bitwise_not logical_and logical_or bitwise_and bitwise_or __and__ __or__ eq ne gt ge lt le")
MAKING_MASKS = CASTS | LOGIC | SAME | VIEWS | words("rsub expand expand_as slice")
"""Operators that compute a mask from another mask."""


class Given(NamedTuple):
    """The inputs of a model: positional and keyword arguments."""

    inputs: tuple[Any, ...]
    kwargs: dict[str, Any]

    def beside(self, module: nn.Module) -> "Given":
        """Return the inputs, moved to the meta device if a tensor of the module is on the meta device."""
        if not any(one.is_meta for one in (*module.parameters(), *module.buffers())):
            return self
        moved: Given = pytree.tree_map_only(Tensor, lambda one: one.to("meta"), self)
        return moved


@dataclass(frozen=True)
class Program:
    """A traced model.

    Attributes:
        graph: The operators.
        states: Names of the parameters and buffers on which groups can act, by placeholder. States are floating-point
            tensors, or masks that multiply other tensors or select among them.
        constants: The tensors of masks and of placeholders that are not states, by placeholder. Buffers that the model
            updates are left out.
        held: The tensors in `constants`, and the buffers that the model updates, by placeholder.
        inputs: The placeholders of all tensors in the model's inputs, in their order.
        outputs: Nodes that the model returns, each with the name of its output; see `named_outputs`.
        written: The output node and the name of each buffer and parameter that the model updates.
        aliases: For the first name of each tensor, all its names. Tied weights have several names.
        shapes: Shapes of all parameters and buffers, by name.
        buffers: Names of the persistent buffers.
        origins: Names of all parameters and buffers in the checkpoint, by placeholder.
        floating: Names of the floating-point parameters and buffers.
        added: The numbers that the model adds to parameters before it multiplies by the sums. The graph does not
            contain the additions.
        has_known_sizes: Whether tensor sizes depend on integers in the example inputs. If sizes depend on integers, the
            program is valid only for the integers of the example.
    """

    graph: GraphModule
    states: Mapping[str, str]
    constants: Mapping[str, Tensor]
    held: Mapping[str, Tensor]
    inputs: tuple[str, ...]
    outputs: tuple[tuple[Node, str], ...]
    written: tuple[tuple[Node, str], ...]
    aliases: Mapping[str, tuple[str, ...]]
    shapes: Mapping[str, tuple[int, ...]]
    buffers: tuple[str, ...]
    origins: Mapping[str, str]
    floating: frozenset[str]
    added: Mapping[str, Added]
    has_known_sizes: bool


def trace(
    module: nn.Module,
    inputs: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    outputs: Outputs = None,
    decompose: frozenset[str] = frozenset(),
    ones: Collection[str] = (),
) -> Program:
    """Trace a module in evaluation mode and without its key-value cache. The module is not modified.

    The inputs may be on a real device although the module is on the meta device. Tensor sizes may depend on the entries
    of inputs.

    Operators named in `decompose` are replaced by other operators if torch has a decomposition for them. Parameters
    named in `ones` are replaced by constants of one.

    Raises:
        TraceError: torch.export cannot trace the module, or the module's weights are quantized or not created yet.
        ValueError: The module raises an error on these inputs, or has no parameter with a name in `ones`.
    """
    unknown = sorted(set(ones) - set(module.state_dict()))
    if unknown:
        raise ValueError(f"ones names {unknown[:3]}, which the module does not have; give names of its parameters")
    require_traceable(module)
    given = Given(inputs, dict(kwargs))
    with restored(module), evaluating(module):
        wrapped = SelectedOutputs(module, outputs).eval()
        program = _export_without_cache(wrapped, given) or _export(wrapped, given)
        if not without_mutation(program.graph_module):
            program = _decomposed(program, {})
        if decompose:
            table = {op: rule for op, rule in _decompositions().items() if operator_name(op) in decompose}
            program = _decomposed(program, table)
    return with_ones(_program(module, program), ones, module)


@cache
def _decompositions() -> dict[Any, Any]:
    """Return torch's rules for decomposing operators into other operators."""
    table: Any = torch.export.default_decompositions()
    return dict(table.items())


def _decomposed(program: ExportedProgram, table: dict[Any, Any]) -> ExportedProgram:
    try:
        with _quiet(), _no_source():
            result: ExportedProgram = program.run_decompositions(table)
    except Exception as error:  # torch raises many unrelated classes
        raise TraceError(
            f"torch.export traced the model, but cannot write it in simpler operators ({type(error).__name__}: "
            f"{' '.join(str(error).split())[:200]}); {OTHERWISE}"
        ) from error
    result.graph_module.meta |= program.graph_module.meta
    return result


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress warnings and logs of torch.export about its internals.

    Problems that matter to users are raised as errors.
    """
    logger = logging.getLogger("torch")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


@contextmanager
def _no_source() -> Iterator[None]:
    """Return a context in which exports contain no generated Python code and no source lines of operators.

    Graphs are read but never run, so they need no generated code. Generating code and source lines takes about a third
    of the export time.
    """
    before = getattr(fx_config, "do_not_emit_stack_traces", False)  # torch before 2.13 has no such switch
    fx_config.do_not_emit_stack_traces = True
    try:
        with _use_lazy_graph_module(True):
            yield
    finally:
        fx_config.do_not_emit_stack_traces = before


def _export_without_cache(wrapped: SelectedOutputs, given: Given) -> ExportedProgram | None:
    """Export without key-value caches. Return None if there are no caches, or if an output depends on them.

    Writing to a cache is an in-place operation, and a program with in-place operations would need a second export.
    Transformer decoders use a cache if `config.use_cache` is set. If the caller passes the keyword `use_cache`, the
    cache is not switched off.
    """
    found: list[Any] = [getattr(module, "config", None) for module in wrapped.modules()]
    configs = [config for config in found if getattr(config, "use_cache", None) is True]
    if not configs or "use_cache" in given.kwargs:
        return None
    try:
        expected = _output_shapes(wrapped, given)
        for config in configs:
            config.use_cache = False
        program = _export(wrapped, given)
    except (ValueError, TraceError):
        return None  # The export with the cache succeeds, or raises the error that the user should see.
    finally:
        for config in configs:
            config.use_cache = True
    outputs = {spec.arg.name for spec in program.graph_signature.output_specs if spec.kind == OutputKind.USER_OUTPUT}
    results = program.graph.output_node().args[0]
    shapes = [tuple(node.meta["val"].shape) for node in results if node.name in outputs]
    return program if shapes == expected else None


def _output_shapes(wrapped: SelectedOutputs, given: Given) -> list[tuple[int, ...]]:
    """Return the shapes of the outputs, computed on the meta device."""
    given = given.beside(wrapped)
    with restored(wrapped), _quiet(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = pytree.tree_map_only(Tensor, mode.from_tensor, given)
        found = _run_eagerly(wrapped, fakes)
        return [tuple(tensor.shape) for tensors in found.values() for tensor in tensors]


def _export(wrapped: SelectedOutputs, given: Given) -> ExportedProgram:
    try:
        with torch.no_grad(), _quiet(), _no_source():
            program = torch.export.export(wrapped, *given.beside(wrapped), strict=False)
            return (export_with_values(wrapped, *given) if has_unknown_sizes(program) else None) or program
    except OutputsError:
        raise
    except Exception as error:  # torch.export raises many unrelated classes
        with _quiet(), _no_source():
            known = export_with_values(wrapped, *given) if depends_on_values(error) else None
        if known is not None:
            return known
        _run_eagerly(wrapped, given.beside(wrapped))
        raise trace_error(error, wrapped.module, given) from error


def _run_eagerly(wrapped: nn.Module, given: Given) -> dict[str, list[Tensor]]:
    """Run the module without tracing it. Raise a ValueError if the module fails.

    The inputs are copied, and the parameters keep their entries.
    """
    inputs, kwargs = pytree.tree_map_only(Tensor, torch.clone, given)
    try:
        with torch.no_grad(), parameters_kept(wrapped):
            result: dict[str, list[Tensor]] = wrapped(*inputs, **kwargs)
    except Exception as error:  # a module can fail in any way
        raise ValueError(
            f"{type(wrapped.module).__name__} fails on the example inputs: {type(error).__name__}: {error}; "
            "give inputs of the shapes and dtypes that it takes"
            + ("; a mapping gives keyword inputs: write (mapping,) if the module takes it as one" if kwargs else "")
        ) from error
    return result


def _program(module: nn.Module, program: ExportedProgram) -> Program:
    signature = program.graph_signature
    parameters = dict(module.named_parameters(remove_duplicate=False))
    buffers = dict(module.named_buffers(remove_duplicate=False))
    persistent = module.state_dict().keys()
    kept = {**parameters, **{name: t for name, t in buffers.items() if name in persistent}}
    aliases: dict[int, list[str]] = {}
    for name, tensor in kept.items():
        aliases.setdefault(id(tensor), []).append(name)
    states: dict[str, str] = {}
    held: dict[str, Tensor] = {}
    placeholders: dict[str, str] = {}
    nodes = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
    origins: dict[str, str] = {}
    for spec in signature.input_specs:
        target, placeholder = _target(spec), getattr(spec.arg, "name", "")
        placeholders[target] = placeholder
        is_constant = spec.kind == InputKind.CONSTANT_TENSOR
        found = program.constants.get(str(spec.target)) if is_constant else {**buffers, **parameters}.get(target)
        if not isinstance(found, Tensor):
            continue
        is_stored, is_floating = target in kept and not is_constant, found.is_floating_point()
        if is_stored:
            origins[placeholder] = aliases[id(found)][0]
        if is_stored and (is_floating or _is_mask(found, nodes[placeholder])):
            states[placeholder] = aliases[id(found)][0]
        if not (is_stored and is_floating):
            held[placeholder] = found
    results: Any = program.graph.output_node().args[0]
    by_name = {node.name: node for node in results if isinstance(node, Node)}
    ends = [(by_name.get(getattr(spec.arg, "name", "")), spec) for spec in signature.output_specs]
    names, is_named = iter(_output_names(program)), OutputKind.USER_OUTPUT
    # An input that the model writes is an output, too.
    returned = [(n, next(names) if s.kind == is_named else str(s.target)) for n, s in ends if s.kind not in WRITES]
    written = [(node, _target(spec)) for node, spec in ends if node and spec.kind in WRITES]
    updated = {placeholders.get(target) for _, target in written}
    constants = {placeholder: tensor for placeholder, tensor in held.items() if placeholder not in updated}
    shapes = {name: tuple(t.shape) for name, t in kept.items()}
    trained = {place: name for place, name in states.items() if name in parameters}
    return Program(
        program.graph_module,
        states,
        constants,
        held,
        tuple(getattr(s.arg, "name", "") for s in signature.input_specs if s.kind == InputKind.USER_INPUT),
        tuple((node, name) for node, name in returned if node),
        tuple(written),
        {names[0]: tuple(names) for names in aliases.values()},
        shapes,
        tuple(name for name in kept if name not in parameters),
        origins,
        frozenset(name for name, t in kept.items() if t.is_floating_point()),
        take_out_exponents(program.graph_module, trained)
        | take_out_numbers(program.graph_module, trained, shapes)
        | take_out_of_layers(program.graph_module, trained, {p: t for p, t in constants.items() if p not in origins}),
        has_known_sizes(program),
    )


def _output_names(program: ExportedProgram) -> list[str]:
    """Return the name of each tensor that `SelectedOutputs` returns."""
    spec = program.call_spec.out_spec
    assert spec is not None
    fields: dict[str, list[int]] = pytree.tree_unflatten(range(spec.num_leaves), spec)
    return [name for name, places in fields.items() for _ in places]


def _is_mask(tensor: Tensor, node: Node) -> bool:
    """Return whether an integer tensor only multiplies other values or selects among them.

    Integers that serve as positions are not masks.
    """
    return tensor.dtype in INTEGERS and bool(tensor.ndim) and _only_masks(node)


def _only_masks(node: Node) -> bool:
    readers = [user for user in node.users if user.users or user.op == "output"]
    return bool(readers) and all(map(_masks, readers))


def _masks(user: Node) -> bool:
    name, made = operator_name(user), user.meta.get("val")
    if name in MASKING or (name in CASTS and isinstance(made, Tensor) and made.is_floating_point()):
        return True
    return name in MAKING_MASKS and _only_masks(user)


def _target(spec: InputSpec | OutputSpec) -> str:
    return (spec.target or "").removeprefix("module.")


def with_ones(program: Program, ones: Collection[str], module: nn.Module) -> Program:
    """Return the program of a module in which some parameters are replaced by constants of one."""
    tensors = module.state_dict()

    def one(name: str) -> Tensor:
        there = tensors[name]
        return torch.ones(there.shape, dtype=there.dtype, device="cpu" if there.is_meta else there.device)

    chosen = {first for first, names in program.aliases.items() if set(names) & set(ones)}
    held = {place: one(name) for place, name in program.states.items() if name in chosen}
    states = {place: name for place, name in program.states.items() if place not in held}
    return replace(program, states=states, constants={**program.constants, **held}, held={**program.held, **held})

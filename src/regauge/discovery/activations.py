"""The action of a known symmetry on the intermediate values of a model."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import ne
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from regauge.core import act as _act
from regauge.core.arguments import check_arguments
from regauge.core.behind_gains import plus
from regauge.core.element import PARTS
from regauge.core.families import move_tensor
from regauge.core.given import example_arguments
from regauge.core.groups import Group
from regauge.core.outputs import Outputs
from regauge.core.params import Params
from regauge.core.probe import away, relative_change
from regauge.core.symmetry import Symmetry
from regauge.discovery.angles import free_angles
from regauge.discovery.common_scales import common_groups
from regauge.discovery.correspond import carry_over
from regauge.discovery.discover import trace_and_record
from regauge.discovery.emit import groups_of, unplaced
from regauge.discovery.operators import COPIES, PIECES, READERS, operator_name, words
from regauge.discovery.registry import leaves_as_operators
from regauge.discovery.slots import write_out
from regauge.discovery.solve import solve
from regauge.discovery.trace import Program

Change = Callable[[Tensor], Tensor]
"""A function that changes a value before operators read it.

Pass the same function object each time, because the object is part of the key of cached graphs."""
SELECTIONS = words("index index_select gather embedding")
"""Operators that select entries of their first operand."""
ROUNDING = 0.25
"""The numerical tolerance is the machine epsilon to this power.

Networks amplify rounding errors, but wrong placements cause errors of about one.
"""


@dataclass(frozen=True, eq=False)
class IntermediateValues:
    """The intermediate values of a model that was traced for inputs of one shape.

    The name of a value is "%", followed by the name of its node in the traced graph.
    """

    module: nn.Module
    program: Program
    _graphs: dict[tuple[tuple[str, ...], tuple[tuple[str, Change], ...]], GraphModule] = field(
        default_factory=dict, repr=False
    )

    def __call__(
        self,
        params: Mapping[str, Tensor],
        inputs: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        names: Sequence[str],
    ) -> dict[str, Tensor]:
        """Run the model up to the named values, without gradients.

        The inputs must have the same shapes as in the trace.
        """
        with torch.no_grad():
            return self.run(params, inputs, kwargs, names)

    def run(
        self,
        params: Mapping[str, Tensor],
        inputs: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        names: Sequence[str],
        changes: Mapping[str, Change] | None = None,
    ) -> dict[str, Tensor]:
        """Run the model up to the named values, with gradients.

        `torch.func.vmap` works if it supports the model's operators. If `changes` has a function for a value, all
        operators that read the value get the result of the function instead.
        """
        graph = self._graph(tuple(names), tuple((changes or {}).items()))
        with leaves_as_operators(self.module):
            return dict(zip(names, graph(*self._placeholders(params, inputs, kwargs)), strict=True))

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of the model's outputs that must not change."""
        return tuple(f"%{node.name}" for node, _ in self.program.outputs)

    def products(self, parameters: Collection[str]) -> tuple[str, ...]:
        """Return the names of values that layers compute from the inputs and at least one of the given parameters.

        Values computed from a parameter alone, such as copies and slices, are treated like this parameter.
        """
        reached = {f"%{node.name}" for node in _reached(self.program)}
        held: set[Node] = set()
        found = []
        for node in self.program.graph.graph.nodes:
            if node.op == "placeholder":
                name = self.program.states.get(node.name)
                if name is not None and {*self.program.aliases.get(name, (name,))} & {*parameters}:
                    held.add(node)
            elif node.op == "call_function" and any(source in held for source in node.all_input_nodes):
                if operator_name(node) in COPIES | PIECES | SELECTIONS or f"%{node.name}" not in reached:
                    held.add(node)
                else:
                    found.append(f"%{node.name}")
        return tuple(found)

    def source(self, parameter: str, among: Collection[str]) -> str | None:
        """Return the value that is the input of the layer with this parameter.

        Only values in `among` are considered. The result is None unless exactly one value in `among` is an input of the
        layer.
        """
        nodes = {f"%{node.name}": node for node in self.program.graph.graph.nodes}
        found: set[str] = set()
        waiting = [nodes[name] for name in self.products({parameter})]
        seen = set(waiting)
        for node in waiting:
            for source in node.all_input_nodes:
                if f"%{source.name}" in among:
                    found.add(f"%{source.name}")
                elif source.op == "call_function" and source not in seen:
                    seen.add(source)
                    waiting.append(source)
        return found.pop() if len(found) == 1 else None

    def _graph(self, names: tuple[str, ...], changes: tuple[tuple[str, Change], ...] = ()) -> GraphModule:
        if (names, changes) not in self._graphs:
            graph = Graph()
            copies: dict[Node, Node] = {}
            graph.graph_copy(self.program.graph.graph, copies)
            by_name = {f"%{old.name}": new for old, new in copies.items()}
            for name, change in changes:
                with graph.inserting_after(by_name[name]):
                    changed = graph.call_function(change, (by_name[name],))
                by_name[name].replace_all_uses_with(changed, delete_user_cb=partial(ne, changed))
            graph.output(tuple(by_name[name] for name in names))
            graph.eliminate_dead_code()
            self._graphs[names, changes] = GraphModule(self.program.graph, graph)
        return self._graphs[names, changes]

    def _placeholders(
        self, params: Mapping[str, Tensor], inputs: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> list[Any]:
        given = dict(zip(self.program.inputs, pytree.tree_leaves((tuple(inputs), dict(kwargs))), strict=True))
        result = []
        for node in self.program.graph.graph.find_nodes(op="placeholder"):
            state = self.program.states.get(node.name)
            if state is None:
                held = self.program.held.get(node.name)
                result.append(given.get(node.name) if held is None else held)
            else:
                names = self.program.aliases.get(state, (state,))
                tensor = next(params[name] for name in names if name in params)
                number = self.program.added.get(state)
                result.append(tensor if number is None else plus(tensor, number))
        return result


@dataclass(frozen=True)
class Activations:
    """The intermediate values of one model on which groups act.

    The results are valid for inputs of one shape.

    Let g be an element, p the parameters, and x the inputs. The intermediate values satisfy
    `values(symmetry_of_the_model.act(g, p), x) == symmetry.act(g, values(p, x))`.

    Attributes:
        symmetry: The groups of the model's symmetry under the same names, but with intermediate values instead of
            parameters. A group that acts on no reported value has no placements.
        read: Names of the values that layers read, each listed once. Layers are matrix products, convolutions,
            attention and recurrent layers. If a layer reads a copy or a reshaped value, the original value is listed.
            If a group acts on no value that a layer reads, all values on which the group acts are listed too.
        notes: Messages about groups and values for which the action is unknown.
        intermediate: All intermediate values of the model, whether or not groups act on them.
    """

    symmetry: Symmetry
    read: tuple[str, ...]
    notes: tuple[str, ...]
    intermediate: IntermediateValues = field(repr=False)

    def values(
        self,
        params: Mapping[str, Tensor],
        inputs: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None = None,
        names: Sequence[str] | None = None,
    ) -> dict[str, Tensor]:
        """Run the model without gradients.

        Return the intermediate values with the given names (default: all reported values). The inputs must have the
        same shapes as in the trace, and keyword inputs must have the same order.
        """
        names = list(self.symmetry.shapes) if names is None else list(names)
        return self.intermediate(params, inputs, kwargs or {}, names)


@check_arguments
def activations(
    module: nn.Module,
    example_inputs: Any,
    symmetry: Symmetry,
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    outputs: Outputs = None,
    only_read: bool = False,
) -> Activations:
    """Find the intermediate values on which the groups of a symmetry act, and the action of the groups on them.

    The module is traced again for the given inputs. The operators of the model determine how transformations of
    parameters change the intermediate values. The placements of groups on axes of intermediate values then follow from
    the same equations as the placements on parameters. If the module is not on the meta device, every value is also
    checked numerically with a random element. Values that fail the numerical check are excluded.

    Args:
        module: The model. The model runs in evaluation mode and is not modified.
        example_inputs: One batch, as for `discover`.
        symmetry: A symmetry that `discover` found, part of a discovered symmetry, or a symmetry written by hand.
        example_kwargs: Keyword arguments of the model.
        outputs: The outputs that must not change, as passed to `discover`.
        only_read: Whether to report only the values that layers read (see `Activations.read`). With `only_read`,
            reporting takes less time and memory, because layers read only a fraction of all values.

    Raises:
        TraceError: `torch.export` cannot trace the module.
        ValueError: The module raises an error on the inputs.
        KeyError: The symmetry belongs to another architecture.
    """
    inputs, kwargs = example_arguments(example_inputs, example_kwargs)
    state = dict(module.state_dict())
    bound = symmetry.bind(state)
    # A symmetry written by hand lacks the shapes of tensors on which no group acts.
    bound = replace(bound, shapes={**bound.shapes, **{name: tuple(t.shape) for name, t in state.items()}})
    is_meta = any(t.is_meta for t in state.values())
    example = (inputs, kwargs)
    if is_meta:
        example = pytree.tree_map_only(Tensor, lambda t: t.to("meta"), example)
    with leaves_as_operators(module):
        program, found = trace_and_record(module, *example, outputs, bound.ones)
    nodes = _dependent(program)
    watched = {f"%{node.name}": value for node, value in found.values.items() if node in nodes}
    slots = write_out(found.builder.records, found.params, watched)
    freedoms, _ = free_angles(solve(slots), slots, program, found, pytree.tree_leaves((inputs, kwargs)))
    refused = unplaced(freedoms, slots)
    shapes = {name: value.shape for name, value in watched.items() if name not in refused}
    every = groups_of(freedoms, slots, program.aliases)
    common = found.builder.records, found.params, slots, freedoms, every, program.aliases, bound.structure
    groups, notes = carry_over(bound, (*every, *common_groups(*common, watched)), shapes)
    placed = _place(groups, shapes)
    values = IntermediateValues(module, program)
    read = _read(program, placed)
    if only_read:
        few = Activations(_place(groups, {name: placed.shapes[name] for name in read}), read, notes, values)
        if is_meta or not _failures(few, bound, inputs, kwargs):
            return few
    result = Activations(placed, read, notes, values)
    failed = set() if is_meta else _failures(result, bound, inputs, kwargs)
    if not failed:
        return result
    kept = {name: shape for name, shape in placed.shapes.items() if name not in failed}
    listed = ", ".join(sorted(failed)[:5])
    notes = (*notes, f"{len(failed)} values do not change as discovery predicts and are left out: {listed}")
    smaller = _place(groups, kept)
    return Activations(smaller, _read(program, smaller), notes, values)


def _place(groups: Sequence[Group], shapes: Mapping[str, tuple[int, ...]]) -> Symmetry:
    """Return a symmetry that contains only the placements of groups on intermediate values.

    A value is left out if a group acts on it in a way that no placement can describe.
    """
    used = dict.fromkeys(p.parameter for group in groups for p in group.placements)
    kept = {}
    for name in used:
        if name in shapes:
            try:
                _act.resolve(tuple(groups), name, shapes[name])
            except ValueError:
                continue  # The value lacks an axis for a base within which a group is repeated.
            kept[name] = shapes[name]
    only = [replace(g, placements=tuple(p for p in g.placements if p.parameter in kept)) for g in groups]
    return Symmetry(tuple(only), kept)


def _failures(found: Activations, symmetry: Symmetry, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> set[str]:
    """Return the values that do not change as predicted if a random element acts on perturbed parameters."""
    params = {name: t.detach() for name, t in found.intermediate.module.state_dict().items()}
    generator = torch.Generator().manual_seed(0)
    element = symmetry.random(generator, PARTS)  # without parts whose effect on values is unknown
    failed: set[str] = set()
    values = [node.meta.get("val") for node in _dependent(found.intermediate.program)]
    # Some models compute with coarser dtypes than their outputs have.
    tolerance = max((torch.finfo(t.dtype).eps for t in values if isinstance(t, Tensor)), default=0.0) ** ROUNDING

    def run(point: Params) -> list[Tensor]:
        return list(found.values(point, inputs, kwargs).values())

    start = away(params, set(symmetry.buffers), symmetry.unit_gains, generator, run, tolerance).params
    before = found.values(start, inputs, kwargs)
    after = found.values(symmetry.act(element, start), inputs, kwargs)
    for name in found.symmetry.shapes:  # Values are removed one by one to free their memory.
        given, moved = before.pop(name), after.pop(name)
        if not bool(given.isfinite().all()):
            continue  # Values with NaN or Inf cannot be compared.
        if not relative_change([move_tensor(found.symmetry, element, name, given)], [moved]) <= tolerance:
            failed.add(name)
    return failed


def _reached(program: Program) -> set[Node]:
    """Return the inputs of the model, and all nodes that depend on them."""
    reached: set[Node] = set()
    for node in program.graph.graph.nodes:
        is_input = node.op == "placeholder" and node.name in program.inputs
        if is_input or any(source in reached for source in node.all_input_nodes):
            reached.add(node)
    return reached


def _dependent(program: Program) -> set[Node]:
    """Return the floating-point operator results that depend on the inputs of the model."""
    reached = _reached(program)

    def is_floating(node: Node) -> bool:
        value = node.meta.get("val")
        return isinstance(value, Tensor) and value.is_floating_point()

    return {node for node in reached if node.op == "call_function" and is_floating(node)}


def _read(program: Program, placed: Symmetry) -> tuple[str, ...]:
    """Return the values that layers read. If a layer reads a copy, return the original value, if groups act on it.

    Some groups act on no value that a layer reads. For a group without values that a layer reads, all values on which
    the group acts are added, except copies.
    """
    names = placed.shapes
    found: dict[str, None] = {}
    for node in program.graph.graph.nodes:
        if node.op != "call_function" or operator_name(node) not in READERS:
            continue
        for source in node.all_input_nodes:
            last = source
            while source.op == "call_function" and operator_name(source) in COPIES:
                source = source.all_input_nodes[0]
                last = source if f"%{source.name}" in names else last
            if f"%{last.name}" in names:
                found[f"%{last.name}"] = None
    originals = {
        f"%{n.name}" for n in program.graph.graph.nodes if n.op == "call_function" and operator_name(n) not in COPIES
    }
    for group in placed.groups:
        there = dict.fromkeys(p.parameter for p in group.placements)
        if not any(name in found for name in there):
            found |= dict.fromkeys(name for name in there if name in originals)
    return tuple(found)

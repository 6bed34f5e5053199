"""Discovery of a model's symmetry: trace the model, tie its axes, and solve for the groups that act on them."""

import gc
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from regauge.core.arguments import check_arguments
from regauge.core.behind_gains import Added, gains_of
from regauge.core.chart import chart_gains
from regauge.core.given import example_arguments
from regauge.core.groups import Exponent, Frozen, Group, axes_of
from regauge.core.outputs import Outputs
from regauge.core.symmetry import BEHIND, Symmetry
from regauge.discovery.actable import cannot_act
from regauge.discovery.angles import free_angles
from regauge.discovery.common_scales import common_groups
from regauge.discovery.emit import frozen_axes, groups_of
from regauge.discovery.interpret import Pass, interpret
from regauge.discovery.open_orders import find_sensitive
from regauge.discovery.reads import read_axes
from regauge.discovery.registry import leaves_as_operators, registered_rules
from regauge.discovery.slots import write_out
from regauge.discovery.solve import solve
from regauge.discovery.structure_buffers import structure_of
from regauge.discovery.trace import Program, trace, with_ones
from regauge.discovery.traceable import TraceError
from regauge.discovery.translations.search import find_translations

MAX_PASSES = 16
"""The largest number of passes over the graph.

Each pass may find fused axes (query, key, value) that the next pass splits.
"""
SINGLE_BATCH = (
    "an example input has a first axis of length one, so the symmetry is valid for this shape; give a batch of two or "
    "more examples to find the symmetry for batches"
)
KNOWN_SIZES = (
    "sizes in the model depend on integers in the example inputs, such as a grid of patches: the symmetry is valid for "
    "these integers"
)
REFUSED = (
    "stays, because what should make up for it did not on these inputs (a token that attends to nothing, for example)."
)
"""The message about a family of translations that fails the numerical check."""
VERIFY_LIMIT = 50_000_000
"""The number of parameters up to which `discover` verifies its result by default."""


@check_arguments
def discover(
    module: nn.Module,
    example_inputs: Any,
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    outputs: Outputs = None,
    ones: Collection[str] = (),
    keep: Collection[str] = (),
    move: Collection[str] = (),
    verify: bool | None = None,
) -> Symmetry:
    """Find the transformations of a model's parameters and buffers that leave its function unchanged.

    The module is traced in evaluation mode with `torch.export`. Operators tie axes together, and tied axes become one
    group. The operators that use the axes of a group determine the transformations that are possible. An operator
    without a rule freezes the axes of its operands and results. The result holds for the shapes, branches and outputs
    of the trace. As a test, a random element acts on random tensors, one parameter at a time. A group that cannot act
    on random tensors is frozen, and the reason is recorded.

    Buffers that a normalization fills, such as running means and variances, are statistics. Groups act on statistics as
    on parameters. All other buffers that influence the outputs, such as masks, permutations and tables, are structure.
    No group scales structure tensors. Two units are exchanged only if their entries in all structure tensors are equal.
    The graph determines which buffers are structure, and `symmetry.structure` names them.

    Args:
        module: Any module that `torch.export` can trace. The module may be on the meta device. The module is not
            modified.
        example_inputs: A tuple of positional inputs, one tensor, or a mapping of keyword inputs. Batch and sequence
            lengths should be at least two.
        example_kwargs: Keyword arguments of the module.
        outputs: The outputs that must not change: one or several field names, or a function of the output. Default: all
            tensors in the output. Objects such as key-value caches are ignored.
        ones: The names of gains that are exactly one, and that no element of the symmetry changes. `rg.discovery.fold`
            sets gains to one. A residual stream that is read through RMSNorm with gains of one can be rotated. With
            LayerNorm, the rotations must also keep the vector of ones. The resulting symmetry is valid only for
            networks in which the gains in `ones` are one.
        keep: Names, or patterns such as "*.position", of further tensors that are structure. For example, tables of
            sines and fixed filters may be frozen parameters that are equal in all networks.
        move: Names or patterns of buffers on which groups act although no normalization fills them; "*" matches all
            buffers.
        verify: Whether to check the result numerically and freeze the groups that fail the check. Default: true if the
            module has at most 50 million parameters and is not on the meta device.

    Returns:
        The symmetry, including the reason for every axis on which no group acts.

    Raises:
        TypeError: `module` is not a module, or the example inputs have an unsupported form.
        TraceError: `torch.export` cannot trace the module. Quantized and lazy modules are refused.
        ValueError: The module's output contains no selected tensor, or an entry of `ones`, `keep` or `move` matches no
            tensor of the module.

    References:
        Ainsworth et al. (2023), section 3; Godfrey et al. (2022), on the groups of activations.
    """

    def structure(program: Program, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, ...]:
        return structure_of(program, module, inputs, kwargs, keep=keep, move=move)

    return _discover(module, example_inputs, example_kwargs, outputs, ones, structure, verify=verify)


def discover_with_ones(
    program: Program,
    module: nn.Module,
    example_inputs: Any,
    example_kwargs: Mapping[str, Any] | None,
    *,
    outputs: Outputs,
    ones: Collection[str],
    structure: tuple[str, ...],
) -> Symmetry:
    """Find the symmetry for gains of one, given the program of an earlier trace of the same module.

    The earlier trace must be without `ones`. The argument `structure` lists the structure tensors, so this function
    does not search for them again.
    """
    return _discover(module, example_inputs, example_kwargs, outputs, ones, lambda *_: structure, program=program)


def _discover(
    module: nn.Module,
    example_inputs: Any,
    example_kwargs: Mapping[str, Any] | None,
    outputs: Outputs,
    ones: Collection[str],
    structure: Callable[[Program, tuple[Any, ...], dict[str, Any]], tuple[str, ...]],
    *,
    verify: bool | None = None,
    program: Program | None = None,
) -> Symmetry:
    inputs, kwargs = example_arguments(example_inputs, example_kwargs)
    is_meta = any(t.is_meta for t in (*module.parameters(), *module.buffers()))
    known = pytree.tree_leaves((inputs, kwargs))
    with _collecting_later():
        with leaves_as_operators(module):
            program, result = trace_and_record(module, inputs, kwargs, outputs, ones, program)
            held = structure(program, inputs, kwargs)
        found = replace(_symmetry(program, result, known, held), ones=_all_names(program, ones))
        symmetry = _without_unscaled(find_translations(program, _without_unactable(found)))
        if not ones:
            symmetry = _with_rotations(symmetry, program, module)
    if not is_meta:
        symmetry = symmetry.given(module.state_dict())
    count = sum(p.numel() for p in module.parameters())
    notes = (SINGLE_BATCH,) * _has_single_batch(inputs, kwargs) + (KNOWN_SIZES,) * program.has_known_sizes
    symmetry = replace(symmetry, notes=(*symmetry.notes, *notes))
    if (symmetry.groups or symmetry.translations) and (
        verify or (verify is None and not is_meta and count <= VERIFY_LIMIT)
    ):
        symmetry = _without_failures(symmetry, module, inputs, kwargs, outputs)
    return symmetry


@contextmanager
def _collecting_later() -> Iterator[None]:
    """Return a context without automatic garbage collection.

    The graphs of a trace are large, and each garbage collection would visit all objects in them.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _with_rotations(symmetry: Symmetry, program: Program, module: nn.Module) -> Symmetry:
    """Return a symmetry in which each group also states the rotations that are possible if the gains on the group's
    axes are one.
    """
    gains = chart_gains(symmetry) if symmetry.gains else ()
    if not gains:
        return symmetry
    result = _run(with_ones(program, gains, module))
    slots = write_out(result.builder.records, result.params)
    slots.blocked |= {slot for slot, place in slots.places.items() if place.name in symmetry.structure}
    rotated: dict[Collection[Any], Group] = {
        _axes(group): group
        for group in groups_of(solve(slots), slots, program.aliases)
        if group.matrix == "orthogonal" and not group.is_proper and not group.within
    }
    groups = []
    for group in symmetry.groups:
        found = rotated.get(_axes(group, gains_of(symmetry, group.name)))
        if found is not None and group.matrix == "none" and not group.within:
            group = replace(group, behind_gains="centered" if found.keeps_ones else "orthogonal")
        groups.append(group)
    return replace(symmetry, groups=tuple(groups))


def _axes(group: Group, left_out: Collection[str] = ()) -> frozenset[Any]:
    """Return the axes on which a group acts, except axes of the parameters in `left_out`."""
    places = (place for place in group.placements if place.parameter not in left_out)
    return frozenset((p.parameter, p.axis, p.start, p.stride, p.repeats) for p in places)


def _has_single_batch(inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    tensors = [t for t in pytree.tree_leaves((inputs, kwargs)) if isinstance(t, torch.Tensor)]
    return any(t.ndim > 1 and t.shape[0] == 1 for t in tensors)


def trace_and_record(
    module: nn.Module,
    inputs: tuple[Any, ...],
    kwargs: dict[str, Any],
    outputs: Outputs = None,
    ones: Collection[str] = (),
    program: Program | None = None,
) -> tuple[Program, Pass]:
    """Trace a module and record the constraints (laws) of its operators. Call this function within the context
    `leaves_as_operators`.

    If a program that was traced without `ones` is given, the module is not traced again.
    """
    program = trace(module, inputs, kwargs, outputs, ones=ones) if program is None else with_ones(program, ones, module)
    result = _run(program)
    if result.builder.unknown:
        # Replace operators without a rule by other operators, and try again.
        names = frozenset(name.split(" ")[0].split("::")[-1] for name in result.builder.unknown)
        try:
            simpler = trace(module, inputs, kwargs, outputs, decompose=names, ones=ones)
        except TraceError:
            return program, result
        again = _run(simpler)
        if len(again.builder.unknown) < len(result.builder.unknown):
            return simpler, again
    return program, result


def _run(program: Program) -> Pass:
    unrolled: frozenset[tuple[str, int]] = frozenset()
    sensitive: frozenset[str] = frozenset()
    for k in range(2 * MAX_PASSES):
        result = interpret(program, unrolled, registered_rules(), sensitive)
        orders, requests = result.builder.orders, result.builder.requests if k < MAX_PASSES else frozenset()
        found = find_sensitive(orders, result.builder.records)
        if requests <= unrolled and not found:
            break
        unrolled |= requests
        sensitive |= found if k < MAX_PASSES else frozenset(one.node for one in orders)
    return result


def _symmetry(program: Program, result: Pass, inputs: list[Any], structure: tuple[str, ...]) -> Symmetry:
    builder, params = result.builder, result.params
    slots = write_out(builder.records, params)
    slots.blocked |= {slot for slot, place in slots.places.items() if place.name in structure}
    freedoms, undecided = free_angles(solve(slots), slots, program, result, inputs)
    groups = _acting(groups_of(freedoms, slots, program.aliases), structure)
    groups += common_groups(builder.records, params, slots, freedoms, groups, program.aliases, structure)
    used = {place.name for place in slots.places.values()}
    return Symmetry(
        groups,
        shapes=dict(program.shapes),
        frozen=frozen_axes({name: value for name, value in params.items() if name in used}, groups),
        unknown=tuple(builder.unknown),
        notes=undecided,
        unused=tuple(sorted(name for name, value in params.items() if name not in used and value.ndim)),
        buffers=program.buffers,
        tied=tuple(names for names in program.aliases.values() if len(names) > 1),
        readers=read_axes(builder.records, params, program.aliases, groups),
        structure=structure,
        added=_added(program, groups, structure),
    )


def _added(program: Program, groups: Sequence[Group], structure: tuple[str, ...]) -> dict[str, Added]:
    """Return the constants that the model adds to parameters, under all names of each parameter.

    A constant that differs between entries is left out if no scale, sign or matrix acts on the parameter.
    """
    scaled = {
        p.parameter
        for group in groups
        for p in group.placements
        if any(p.scale) or any(p.sign) or group.matrix != "none"
    }
    found: dict[str, Added] = {}
    for first, number in program.added.items():
        names = program.aliases.get(first, (first,))
        if first not in structure and (not isinstance(number, tuple) or scaled.intersection(names)):
            found |= dict.fromkeys(names, number)
    return found


def _without_unscaled(symmetry: Symmetry) -> Symmetry:
    """Return the symmetry without exponents of parameters that no scale changes and no translation reads."""
    needed = {p.parameter for group in symmetry.groups for p in group.placements if any(p.scale)}
    needed.update(*(family.coefficients for family in symmetry.translations))
    kept = {n: c for n, c in symmetry.added.items() if n in needed or not isinstance(c, Exponent)}
    return replace(symmetry, added=kept)


def _acting(groups: tuple[Group, ...], structure: tuple[str, ...]) -> tuple[Group, ...]:
    """Return the groups that act on at least one tensor outside the structure.

    If a returned group is repeated within other groups, such as heads, the outer groups are returned too.
    """
    acting = [group for group in groups if not all(place.parameter in structure for place in group.placements)]
    needed = {name for group in acting for name in (group.name, *group.within)}
    return tuple(group for group in groups if group.name in needed)


def _all_names(program: Program, names: Collection[str]) -> tuple[str, ...]:
    """Return all names of some parameters, including tied names."""
    tied = {name: every for every in program.aliases.values() for name in every}
    return tuple(sorted({name for one in names for name in tied[one]}))


def _without_unactable(symmetry: Symmetry) -> Symmetry:
    """Freeze every group that cannot act at its placements, until all groups of the symmetry can act."""
    while failed := cannot_act(symmetry):
        reasons = {
            name: f"a group was found here that cannot act ({reason}): please report this model"
            for name, reason in failed.items()
        }
        symmetry = _without(symmetry, reasons)
        symmetry = replace(symmetry, notes=(*symmetry.notes, *(f"{name}: {why}" for name, why in reasons.items())))
    return symmetry


def _without(symmetry: Symmetry, failed: Mapping[str, str]) -> Symmetry:
    """Freeze some groups and record the reasons. Groups that are repeated within a frozen group are frozen too."""
    cut = dict(failed)
    while more := {
        group.name: next(cut[base] for base in group.within if base in cut)
        for group in symmetry.groups
        if group.name not in cut and any(base in cut for base in group.within)
    }:
        cut |= more
    frozen = tuple(
        Frozen(p.parameter, p.axis, axes_of(symmetry.shapes[p.parameter])[p.axis], cut[group.name])
        for group in symmetry.groups
        if group.name in cut
        for p in group.placements
    )
    kept = tuple(group for group in symmetry.groups if group.name not in cut)
    return replace(symmetry, groups=kept, frozen=(*symmetry.frozen, *dict.fromkeys(frozen)))


def _without_failures(
    symmetry: Symmetry, module: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs
) -> Symmetry:
    """Freeze every group that fails the numerical check, and all groups that are repeated within it.

    If the check fails without naming a group, all groups are frozen.
    """
    generator = torch.Generator().manual_seed(0)
    try:
        quick = symmetry.verify(module, inputs, kwargs, generator=generator, outputs=outputs, each_group=False)
    except (ValueError, RuntimeError) as error:
        return replace(symmetry, notes=(*symmetry.notes, f"not verified: {error}"))
    if quick.ok:
        return replace(symmetry, notes=(*symmetry.notes, str(quick)))
    check = symmetry.verify(module, inputs, kwargs, generator=generator, outputs=outputs)
    known = {group.name for group in symmetry.groups}
    failed = set(check.failed) or {group.name for group in symmetry.groups}
    reason = "a group was found here, but the numerical check refused it: please report this model"
    groups = dict.fromkeys((name for name in failed if name in known), reason)
    smaller = _without_translations(_without(symmetry, groups), failed)
    kept = (replace(g, behind_gains="none") if f"{g.name}{BEHIND}" in failed else g for g in smaller.groups)
    smaller = replace(smaller, groups=tuple(kept))
    again = smaller.verify(module, inputs, kwargs, generator=generator, outputs=outputs)
    if again.ok:
        return replace(smaller, notes=(*smaller.notes, str(again)))
    note = "the outputs differ between two runs: nothing is kept"
    return replace(smaller, groups=(), gains=(), translations=(), notes=(*smaller.notes, note))


def _without_translations(symmetry: Symmetry, failed: Collection[str]) -> Symmetry:
    """Return a symmetry without the translation families that fail the numerical check."""
    refused = [family.name for family in symmetry.translations if family.name in failed]
    if not refused:
        return symmetry
    kept = tuple(family for family in symmetry.translations if family.name not in refused)
    notes = tuple(f"{name!r} {REFUSED}" for name in refused)
    return replace(symmetry, translations=kept, notes=(*symmetry.notes, *notes))

"""Programs whose sizes follow from whole numbers among the inputs, such as grids of patches and lengths.

`torch.export` knows no values, so that it stops where Python code takes a number out of a tensor. Where that tensor
comes from whole numbers that the model is given, and from nothing that is learned or measured, the example inputs say
what it is: the model is exported with their values, and every number in the program is what it is for them.
"""

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._functorch import config
from torch._subclasses import FakeTensorMode
from torch.export import ExportedProgram
from torch.fx import Node
from torch.utils import _pytree as pytree

from regauge.discovery.operators import operator_name, words

TAKING = words("item _local_scalar_dense")
"""Operators that take a number out of a tensor."""
CHECKS = words("_assert_scalar _assert_async _assert_tensor_metadata sym_constrain_range sym_constrain_range_for_size")
"""Operators that check what is known here."""
MARK = "regauge: sizes are those of the example inputs"
Symbols: TypeAlias = dict[Any, Any]
"""Symbols of torch for numbers that it does not know, and their values."""


def export_with_values(wrapped: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> ExportedProgram | None:
    """Export a module in which sizes follow from whole numbers among its inputs. It may be on the meta device.

    Returns:
        The program for the numbers that are given; None where it depends on other values, such as those of activations
        or weights, or where Python code branches on a tensor, or where the inputs have no values.
    """
    if any(one.is_meta for one in pytree.tree_leaves((inputs, kwargs)) if isinstance(one, Tensor)):
        return None
    try:
        with torch.no_grad(), without_memory(wrapped) as blank, _whole_numbers_known(blank):
            program = torch.export.export(wrapped, inputs, kwargs, strict=False)
    except Exception:  # torch.export raises many unrelated classes; the error without values is the one to tell.
        return None
    if any(map(_is_branch, program.graph.nodes)):
        return None
    fill_in(program)
    program.graph_module.meta[MARK] = True
    return program


def is_filled_in(program: ExportedProgram) -> bool:
    """Whether a program is for the numbers that were given."""
    return MARK in program.graph_module.meta


def fill_in(program: ExportedProgram) -> None:
    """Write numbers and sizes that depend on values as what they are, in place."""
    graph = program.graph_module.graph
    symbols = _symbols(graph.nodes)
    if not symbols:
        return
    for node in list(graph.nodes):
        if operator_name(node) in CHECKS:
            graph.erase_node(node)
            continue
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            _put(node, _number(value, symbols))
        elif value is not None:
            node.meta["val"] = pytree.tree_map_only(Tensor, lambda one: _sized(one, symbols), value)
    for node in reversed(list(graph.nodes)):
        if not node.users and node.op not in ("placeholder", "output"):
            graph.erase_node(node)


def _is_branch(node: Node) -> bool:
    """Whether Python code asks whether a tensor is true, and not only `torch._check` does."""
    asked = [one for one in node.all_input_nodes if operator_name(one) != "_is_all_true"]
    return operator_name(node) in TAKING and any(one.meta["val"].dtype == torch.bool for one in asked)


@contextmanager
def without_memory(module: nn.Module) -> Iterator[tuple[Tensor, ...]]:
    """Let a module on the meta device be one on the CPU whose tensors are zero and take no memory; yields these."""
    made: dict[int, Tensor] = {}
    with ExitStack() as stack:
        for part in module.modules():
            for own in (part._parameters, part._buffers):
                blank = {name: one for name, one in own.items() if one is not None and one.is_meta}
                for one in blank.values():
                    zeros = torch.zeros((), dtype=one.dtype).expand(one.shape)
                    is_trained = isinstance(one, nn.Parameter)
                    made.setdefault(id(one), nn.Parameter(zeros, requires_grad=False) if is_trained else zeros)
                stack.enter_context(patch.dict(own, {name: made[id(one)] for name, one in blank.items()}))
        yield tuple(made.values())


@contextmanager
def _whole_numbers_known(blank: Collection[Tensor]) -> Iterator[None]:
    """Let torch foretell values of tensors from those of whole numbers that are not blank, but from no others."""
    plain, unknown = FakeTensorMode.from_tensor, set(map(id, blank))

    def from_tensor(mode: FakeTensorMode, tensor: Tensor, **setting: Any) -> Any:
        converter = mode.fake_tensor_converter.meta_converter
        is_known = not tensor.is_floating_point() and id(tensor) not in unknown
        converter.copy_data = converter.describer.copy_data = is_known
        try:
            return plain(mode, tensor, **setting)
        finally:
            converter.copy_data = converter.describer.copy_data = True

    # Where an operator gives another dtype than torch foretells, what it gives counts.
    exact = {"fake_tensor_propagate_real_tensors": True, "generate_fake_kernels_from_real_mismatches": True}
    with config.patch(exact), patch.object(FakeTensorMode, "from_tensor", from_tensor):
        yield


def _symbols(nodes: Iterator[Node]) -> Symbols:
    """The values of all sizes that depend on values."""
    found: Symbols = {}
    for node in nodes:
        for value in pytree.tree_leaves(node.meta.get("val")):
            for one in (value,) if isinstance(value, torch.SymInt) else getattr(value, "shape", ()):
                if isinstance(one, torch.SymInt):
                    found |= one.node.shape_env.real_tensor_prop_unbacked_vals
    return found


def _number(value: Any, symbols: Symbols) -> Any:
    """A number that depends on values."""
    kind = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}.get(type(value))
    return value if kind is None else kind(value.node.expr.xreplace(symbols))


def _sized(tensor: Tensor, symbols: Symbols) -> Tensor:
    """A tensor without values of known size."""
    if not any(isinstance(one, torch.SymInt) for one in (*tensor.shape, *tensor.stride())):
        return tensor
    shape, stride = ([_number(one, symbols) for one in sizes] for sizes in (tensor.shape, tensor.stride()))
    return torch.empty_strided(shape, stride, dtype=tensor.dtype, device="meta")


def _put(node: Node, number: Any) -> None:
    """Replace a node by a number wherever it is read."""
    for user in list(node.users):
        swapped = pytree.tree_map_only(Node, lambda one: number if one is node else one, (user.args, user.kwargs))
        user.args, user.kwargs = swapped

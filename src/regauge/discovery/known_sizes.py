"""Programs whose sizes follow from whole numbers among the inputs, such as grids of patches and lengths.

`torch.export` knows no values, so that it stops where Python code takes a number out of a tensor. Where that tensor
comes from whole numbers that the model is given, and from nothing that is learned or measured, the example inputs say
what it is: the model is exported with their values, and every number in the program is what it is for them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
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
Symbols: TypeAlias = dict[Any, Any]
"""Symbols of torch for numbers that it does not know, and their values."""


def export_with_values(wrapped: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> ExportedProgram | None:
    """Export a module in which sizes follow from whole numbers among its inputs.

    Returns:
        The program for the numbers that are given; None where it depends on other values, such as those of activations
        or weights, or where Python code branches on a tensor.
    """
    if any(one.is_meta for one in pytree.tree_leaves((inputs, kwargs)) if isinstance(one, Tensor)):
        return None
    try:
        with torch.no_grad(), _whole_numbers_known():
            program = torch.export.export(wrapped, inputs, kwargs, strict=False)
    except Exception:  # torch.export raises many unrelated classes; the error without values is the one to tell.
        return None
    if any(map(_is_branch, program.graph.nodes)):
        return None
    fill_in(program)
    return program


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
    """Whether Python code asks whether a tensor is true."""
    return operator_name(node) in TAKING and any(one.meta["val"].dtype == torch.bool for one in node.all_input_nodes)


@contextmanager
def _whole_numbers_known() -> Iterator[None]:
    """Let torch foretell values of tensors from those of whole numbers, but from no others."""
    plain = FakeTensorMode.from_tensor

    def from_tensor(mode: FakeTensorMode, tensor: Tensor, **setting: Any) -> Any:
        converter = mode.fake_tensor_converter.meta_converter
        converter.copy_data = converter.describer.copy_data = not tensor.is_floating_point()
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

"""Replacement of in-place operators, such as `relu_`, by operators that return a new tensor."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree


def without_mutation(program: GraphModule) -> bool:
    """Replace in-place operators by operators that return new tensors.

    If any in-place operator cannot be replaced, the program stays unchanged, and the result is False.

    For example, `relu_(x)` becomes `relu(x)`. The operand of an in-place operator must not be an input, and no later
    operator may read the operand's memory. A second export could replace all in-place operators, but would take twice
    as long as the first export.
    """
    graphs = [part for part in program.modules() if isinstance(part, GraphModule)]
    found = [(node, _functional(node, graph)) for graph in graphs for node in graph.graph.nodes if writes(node)]
    if any(functional is None for _, functional in found):
        return False
    for node, functional in found:
        assert functional is not None
        node.target = functional
    for graph in graphs if found else ():
        graph.recompile()
    return True


def writes(node: Node) -> bool:
    """Return whether the operator of a node writes to an operand."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def _functional(node: Node, graph: GraphModule) -> OpOverload | None:
    """Return the operator that computes the same tensor as an in-place operator, but without writing to an operand.

    Return None if the replacement of the in-place operator would change the results of the program.
    """
    target, written = node.target, node.args[0] if node.args else None
    if not isinstance(target, OpOverload) or not isinstance(written, Node):
        return None
    name = target._schema.name.split("::")[-1]
    writing = [k for k, argument in enumerate(target._schema.arguments) if argument.is_write]
    packet = getattr(getattr(torch.ops, target.namespace), name[:-1], None) if name.endswith("_") else None
    functional = getattr(packet, target._overloadname, None)
    if writing != [0] or not isinstance(functional, OpOverload) or len(target._schema.returns) != 1:
        return None
    kept = next(_tensors(written)).dtype
    if name == "detach_":  # This operator writes no values.
        return functional
    others = {t.dtype for operand in node.all_input_nodes for t in _tensors(operand)}
    if others - {kept, torch.bool}:  # The result could have another dtype than the operand.
        return None
    memory = _memory(written)
    for earlier in graph.graph.nodes:
        if earlier is node:
            return functional
        if memory.isdisjoint(_memory(earlier)):
            continue
        if earlier.op in ("placeholder", "get_attr") or any(node < user for user in earlier.users):
            return None
    raise AssertionError("a node is in its own graph")


def _tensors(node: Node) -> Iterator[Tensor]:
    return (leaf for leaf in pytree.tree_leaves(node.meta.get("val")) if isinstance(leaf, Tensor))


def _memory(node: Node) -> set[int]:
    """Return ids of the storages that contain the values of a node.

    A view has the same storage as the tensor that it views.
    """
    return {int(_whole(tensor).untyped_storage()._cdata) for tensor in _tensors(node)}


def _whole(tensor: Tensor) -> Tensor:
    """Return the batched tensor, given a tensor that represents a single example within `torch.vmap`."""
    while torch._C._functorch.is_batchedtensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor

"""Operators of a traced program by name: what a node calls, and names of operators of one kind."""

from typing import Any

from torch.fx import Node


def words(text: str) -> frozenset[str]:
    """Names, given as words of one text."""
    return frozenset(text.split())


SAME = words("clone contiguous detach alias _to_copy to type_as dropout feature_dropout lift_fresh_copy")
"""Copies that leave every value where it is, in evaluation mode."""
VIEWS = words("view _unsafe_view reshape flatten unflatten permute transpose t numpy_T movedim squeeze unsqueeze")
"""The same values on other axes."""
COPIES = SAME | VIEWS | {"expand"}
"""Operators whose result has the values of their first operand."""
PIECES = words("slice select narrow unbind split split_with_sizes chunk")
"""Parts of one operand."""
READERS = words(
    "linear addmm mm bmm matmul baddbmm addbmm mv addmv dot einsum bilinear conv1d conv2d conv3d convolution "
    "_convolution conv_transpose1d conv_transpose2d conv_transpose3d scaled_dot_product_attention lstm gru rnn_tanh "
    "rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell"
)
"""Operators that are linear in each of their operands, or begin with such: layers read through them."""
INLINED = words("wrap_with_set_grad_enabled wrap_with_autocast tag_activation_checkpoint wrap invoke_subgraph")
"""Higher-order operators that just run the graph that they hold."""


def operator_name(node: Any) -> str:
    """What a node calls, without namespace and overload; of an operator its own name."""
    target = node.target if isinstance(node, Node) else node
    schema = getattr(target, "_schema", None)
    return str(getattr(target, "__name__", target) if schema is None else schema.name.split("::")[-1])


def argument(node: Node, position: int, default: Any) -> Any:
    """An argument that may be left out."""
    return node.args[position] if len(node.args) > position else default


def shape_of(node: Any) -> tuple[int, ...]:
    """The shape of what a node makes; numbers have none."""
    return tuple(int(n) for n in getattr(node.meta.get("val"), "shape", ())) if isinstance(node, Node) else ()

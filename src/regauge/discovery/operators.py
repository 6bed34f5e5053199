"""Operators of a traced program: sets of their names, and calls of operators in the form that rules read."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from regauge.discovery.builder import Builder
from regauge.discovery.laws import Value
from regauge.discovery.movement import Stacked


def words(text: str) -> frozenset[str]:
    """Return the set of names in a string, separated by spaces."""
    return frozenset(text.split())


SAME = words("clone contiguous detach alias _to_copy to type_as dropout feature_dropout lift_fresh_copy")
"""Operators that copy every value unchanged in evaluation mode."""
VIEWS = words("view _unsafe_view reshape flatten unflatten permute transpose t numpy_T movedim squeeze unsqueeze")
"""Operators that return the same entries with other axes, such as `reshape` and `permute`."""
COPIES = SAME | VIEWS | {"expand"}
"""Operators whose result has the same entries as the first operand, perhaps with other axes or repeated."""
PIECES = words("slice select narrow unbind split split_with_sizes chunk")
"""Operators that return parts of one operand."""
READERS = words(
    "linear addmm mm bmm matmul baddbmm addbmm mv addmv dot einsum bilinear conv1d conv2d conv3d convolution "
    "_convolution conv_transpose1d conv_transpose2d conv_transpose3d scaled_dot_product_attention lstm gru rnn_tanh "
    "rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell"
)
"""Operators through which layers read their inputs: matrix products, convolutions, attention, and recurrent layers."""
PRODUCTS = words("mul multiply")
NORMS = {
    "layer_norm": 2, "native_layer_norm": 2, "rms_norm": 2, "_fused_rms_norm": 2, "group_norm": 2,
    "native_group_norm": 1, "batch_norm": 1, "_native_batch_norm_legit_no_training": 1, "instance_norm": 1,
}  # fmt: skip
"""Norm operators that multiply by a gain, each with the argument position of the gain."""
INLINED = words("wrap_with_set_grad_enabled wrap_with_autocast tag_activation_checkpoint wrap invoke_subgraph")
"""Higher-order operators that only run the graph that they contain."""


def operator_name(node: Any) -> str:
    """Return the name of an operator, or of the operator that a node calls, without namespace and overload."""
    target = node.target if isinstance(node, Node) else node
    schema = getattr(target, "_schema", None)
    return str(getattr(target, "__name__", target) if schema is None else schema.name.split("::")[-1])


def argument(node: Node, position: int, default: Any) -> Any:
    """Return an argument of a node by its position. If the node omits the argument, return the default."""
    return node.args[position] if len(node.args) > position else default


def shape_of(node: Any) -> tuple[int, ...]:
    """Return the shape of the tensor that a node returns. A number has the empty shape."""
    return tuple(int(n) for n in getattr(node.meta.get("val"), "shape", ())) if isinstance(node, Node) else ()


Rule = Callable[[Builder, "Call"], Any]


class NoRuleError(Exception):
    """Error that a rule raises if it cannot handle a call of its operator.

    The call is then treated like a call of an unknown operator.
    """


@dataclass(frozen=True)
class Call:
    """A call of an operator.

    Attributes:
        name: The operator name without namespace and overload, such as "linear" or "add".
        overload: The overload of the operator, such as "default", "Tensor" or "dim_IntList".
        arguments: The arguments, including defaults, by their names in the operator's schema.
        shapes: The shapes of the tensors that the operator returns.
        is_float: For each returned tensor, whether it has a floating-point dtype at least as fine as the dtype of the
            parameters.
        is_used: For each returned tensor, whether a later operator uses it.
        is_divisor: Whether the result is used only as a divisor of other tensors.
    """

    name: str
    overload: str
    arguments: dict[str, Any]
    shapes: tuple[tuple[int, ...], ...]
    is_float: tuple[bool, ...]
    is_used: tuple[bool, ...] = ()
    is_divisor: bool = False

    def __getitem__(self, key: str) -> Any:
        return self.arguments[key]

    def get(self, key: str, default: Any = None) -> Any:
        value = self.arguments.get(key, default)
        return default if value is None else value

    def first(self, *keys: str) -> Any:
        """Return the argument under the first of the given names that occurs in the operator's schema."""
        for key in keys:
            if key in self.arguments:
                return self.arguments[key]
        raise NoRuleError(f"{self.name} has none of the arguments {keys}")

    @property
    def x(self) -> Any:
        """The first argument of the call."""
        return next(iter(self.arguments.values()))

    @property
    def shape(self) -> tuple[int, ...]:
        if not self.shapes:
            raise NoRuleError(f"{self.name} returns no tensor")
        return self.shapes[0]


def as_value(b: Builder, x: Any) -> Value:
    """Return an operand as one tensor. Stacked tensors are joined, and a fixed tensor gets new axes.

    Raise NoRuleError if the operand is a number.
    """
    if isinstance(x, Stacked):
        x = b.whole(x)
    if not isinstance(x, Value):
        raise NoRuleError(f"expected a tensor, found {type(x).__name__}")
    return b.use(x)


def ints(value: Any) -> list[int]:
    """Return a list of integers, given one integer or several."""
    if isinstance(value, int):
        return [value]
    if isinstance(value, Sequence):
        return [int(v) for v in value]
    raise NoRuleError(f"expected dimensions, found {value!r}")


def single_windows(steps: Sequence[Any], space: int) -> list[bool]:
    """Return, for each spatial axis, whether every pooling window along it is a single entry."""
    kernel, stride, padding = (ints(one) * (space if len(ints(one)) == 1 else 1) for one in steps)
    kernel = kernel or [0] * space
    return [one == (1, 1, 0) for one in zip(kernel, stride or kernel, padding or [0] * space, strict=True)]


def require_evaluation(call: Call) -> None:
    """Raise NoRuleError if the operator is in training mode, in which it uses random numbers."""
    if call.get("train", call.get("training", False)):
        raise NoRuleError("chance")


def named(rule: Rule, names: str) -> dict[str, Rule]:
    """Return a table that maps several operator names, separated by spaces, to the same rule."""
    return dict.fromkeys(names.split(), rule)

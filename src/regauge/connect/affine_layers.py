"""Affine layers of a traced model, and the parameters that determine each intermediate value, unit by unit."""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.fx import Node

from regauge.discovery.operators import COPIES, READERS, operator_name
from regauge.discovery.trace import Program

OPERATORS = {
    "linear": (1, 0, -1),
    "addmm": (2, 1, -1),
    "mm": (1, 1, -1),
    "matmul": (1, 1, -1),
    **{f"conv{k}d": (1, 0, -1 - k) for k in (1, 2, 3)},
    **{f"conv_transpose{k}d": (1, 1, -1 - k) for k in (1, 2, 3)},
}
"""Affine operators, with the argument position of the weight, and the unit axes of the weight and of the value."""


@dataclass(frozen=True)
class AffineLayer:
    """A linear map or convolution whose parameters no other layer uses, and the value that it computes.

    The layer computes `value = weight x + bias`. If the weight is multiplied along its unit axis by c and the bias b
    becomes c b + d, the value of a unit becomes c value + d.
    """

    weight: str  # name of the weight
    weight_axis: int  # its axis of units
    bias: str | None  # name of the bias; None if there is none, or none of its own
    value: str  # name of the value that it makes, bias included
    axis: int  # the axis of units of the value, from the end
    normalized: str | None = None  # name of the value after batch normalization, where nothing else reads the value
    is_interior: bool = False  # whether another layer reads what comes of the value; the last layer's is an output
    depth: int = 0  # interior layers without batch normalization on the way to the value, itself included

    @property
    def name(self) -> str:
        """The name of the weight without ".weight"."""
        return self.weight.removesuffix(".weight")

    @property
    def is_repaired(self) -> bool:
        """Whether the layer's weights determine the mean and variance of the units that later layers read."""
        return self.is_interior and self.normalized is None


def layers_of(program: Program) -> tuple[AffineLayer, ...]:
    """Return the affine layers of a traced model, in the order of the graph.

    If the weight of a layer is also used elsewhere, the layer is excluded, because a change of the weight for one use
    would be wrong for the other use.
    """
    nodes = list(program.graph.graph.nodes)
    read = _read_by_layers(program, nodes)
    uses: Counter[str] = Counter()  # operators that read each parameter, under all its names
    for node in nodes:
        if node.op == "placeholder" and node.name in program.states:
            uses[program.states[node.name]] += len(node.users)
    found = (_affine(program, node, uses) for node in nodes)
    made = dict(one for one in found if one is not None)
    depths: dict[Node, int] = {}
    result = []
    for node in nodes:
        depth = max((depths[source] for source in node.all_input_nodes), default=0)
        if node in made:
            norm = _sole_user(node, "batch_norm")
            normalized = f"%{norm.name}" if norm is not None and norm.args[0] is node else None
            is_interior = node in read
            depth += is_interior and normalized is None
            result.append(replace(made[node], normalized=normalized, is_interior=is_interior, depth=depth))
        depths[node] = depth
    return tuple(result)


def _affine(program: Program, node: Node, uses: Counter[str]) -> tuple[Node, AffineLayer] | None:
    """Return the layer to which an operator belongs, without surrounding operators, and the node of its value."""
    operator = operator_name(node)
    if operator not in OPERATORS:
        return None
    factors = {"addmm": ("alpha", "beta")}.get(operator, ("groups",) if "transpose" in operator else ())
    if any(_argument(node, name, 1) != 1 for name in factors):
        return None
    held, weight_axis, axis = OPERATORS[operator]
    source: Any = node.args[held]
    while isinstance(source, Node) and operator_name(source) in ("t", "numpy_T", "transpose", "permute"):
        if not _is_flip(source):
            return None
        source, weight_axis = source.args[0], 1 - weight_axis
    weight = _own(program, source, uses)
    if weight is None or (operator in ("mm", "matmul") and len(program.shapes[weight]) != 2):
        return None
    units = program.shapes[weight][weight_axis]

    def own_bias(candidate: Any) -> str | None:
        name = _own(program, candidate, uses)
        return name if name is not None and program.shapes[name] == (units,) else None

    given = node.args[0] if operator == "addmm" else _argument(node, "bias", None)
    value, bias, adding = node, own_bias(given), _sole_user(node, "add")
    if given is None and axis == -1 and adding is not None and _argument(adding, "alpha", 1) == 1:
        bias = next((name for one in adding.args[:2] if one is not node and (name := own_bias(one))), None)
        value = node if bias is None else adding
    return value, AffineLayer(weight, weight_axis, bias, f"%{value.name}", axis)


def _sole_user(node: Node, operator: str) -> Node | None:
    """Return the only node that reads a value, if the node calls the given operator. Otherwise, return None."""
    users = list(node.users)
    return users[0] if len(users) == 1 and operator_name(users[0]) == operator else None


def _own(program: Program, source: Any, uses: Counter[str]) -> str | None:
    """Return the name of a parameter that no other operator uses."""
    if not isinstance(source, Node) or source.op != "placeholder":
        return None
    name = program.states.get(source.name)
    return None if name is None or name in program.buffers or uses[name] != 1 else name


def _is_flip(node: Node) -> bool:
    """Return whether a node transposes a matrix and only one node uses the result."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.ndim != 2 or len(node.users) != 1:
        return False
    if operator_name(node) == "permute":
        return [int(axis) % 2 for axis in _argument(node, "dims", [])] == [1, 0]
    if operator_name(node) == "transpose":
        return int(_argument(node, "dim0", 0)) % 2 != int(_argument(node, "dim1", 0)) % 2
    return True


def _read_by_layers(program: Program, nodes: list[Node]) -> set[Node]:
    """Return the nodes on which matrix products with parameters, convolutions or recurrent layers depend."""
    read: set[Node] = set()
    for node in reversed(nodes):
        is_reader = operator_name(node) in READERS and any(_is_state(program, s) for s in node.all_input_nodes)
        if is_reader or node in read:
            read.update(node.all_input_nodes)
    return read


def _is_state(program: Program, node: Node) -> bool:
    while node.op == "call_function" and operator_name(node) in COPIES:
        node = node.all_input_nodes[0]
    return node.op == "placeholder" and node.name in program.states


def _argument(node: Node, name: str, default: Any) -> Any:
    """Return an argument of a node by its name in the operator's schema."""
    if name in node.kwargs:
        return node.kwargs[name]
    target: Any = node.target
    for position, argument in enumerate(target._schema.arguments):
        if argument.name == name and position < len(node.args):
            return node.args[position]
    return default

"""Gains of the form `1 + weight`: the graph is changed to multiply by the weight, and the constant is recorded.

The gain may also be computed by a layer, as in FiLM and AdaLN, which multiply by `1 + layer(x)`. The constant is then
recorded as an addition to the bias of the layer. A sum of the identity matrix and a matrix that a layer computes, as in
PointNet, is treated in the same way.
"""

import math
import operator
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from regauge.core.behind_gains import Added, ranges_of
from regauge.core.groups import Exponent
from regauge.discovery.operators import NORMS, PIECES, PRODUCTS, SAME, VIEWS, operator_name, shape_of, words

Number = float | Tensor
"""A constant that an operator adds: one number, or a tensor that depends neither on inputs nor on parameters."""
MULTIPLIERS = PRODUCTS | words("matmul bmm mm einsum")
"""Operators whose results are linear in each operand."""

LAYERS = {"linear": -1, "conv1d": 1, "conv2d": 1, "conv3d": 1}
"""Layers whose third argument is a bias, and the axis of the outputs along which the bias varies."""
MOVES = VIEWS | PIECES | words("expand expand_as")
"""Operators whose results consist of entries of the first operand. Some entries may be repeated or left out."""
MOST_OUTPUTS = 1 << 22
"""The largest layer, by number of outputs, for which this module determines the bias entry of each output."""


def take_out_numbers(graph: GraphModule, names: dict[str, str], shapes: dict[str, tuple[int, ...]]) -> dict[str, float]:
    """Replace each product `x * (parameter + constant)` by `x * parameter`, and return the constants.

    The replacement applies only to parameters with one axis. Every use of the parameter must add the same constant, and
    every use of the sum must be a multiplication.

    Args:
        graph: A traced program, which is modified.
        names: The name of the parameter at each placeholder of the graph.
        shapes: The shapes of the parameters.

    Returns:
        The added constants, by parameter name.
    """
    found: dict[str, float] = {}
    for name, nodes in _placeholders(graph, {k: n for k, n in names.items() if len(shapes[n]) == 1}).items():
        sums = {use: _number(use) for node in nodes for use, _ in _uses(node)}
        number = next(iter(sums.values()), None)
        if (
            number is None
            or {*sums.values()} != {number}
            or not all(_multiplies(use, by) for s in sums for use, by in _uses(s))
        ):
            continue
        found[name] = number
        for node in sums:
            node.replace_all_uses_with(node.all_input_nodes[0])
            graph.graph.erase_node(node)
    return found


def take_out_exponents(graph: GraphModule, names: dict[str, str]) -> dict[str, Exponent]:
    """Replace each exponential of a parameter by the parameter, and record the rates `c` of `exp(c * parameter)`.

    The replacement applies to a parameter only if the model uses nothing but exponentials of it, all with one rate. The
    model may rearrange the entries before it takes the exponential function.

    Args:
        graph: A traced program, which is modified.
        names: The name of the parameter at each placeholder of the graph.

    Returns:
        The rates, by parameter name.
    """
    found: dict[str, Exponent] = {}
    for name, nodes in _placeholders(graph, names).items():
        rates, factors = set[float](), dict[Node, None]()
        pending = [(node, 1.0) for node in nodes]
        while pending:
            node, rate = pending.pop()
            for user in (user for user in node.users if user.op != "call_function" or user.users):
                factor = _factor(user)
                if operator_name(user) == "exp":
                    rates.add(rate)
                    factors[user] = None
                elif factor or _is_moved(user):
                    pending.append((user, rate * (factor or 1.0)))
                    factors |= {user: None} if factor else {}
                else:
                    rates.add(math.nan)
        if len(rates) == 1 and math.isfinite(rate := rates.pop()):
            found[name] = Exponent(rate)
            for node in factors:
                node.replace_all_uses_with(node.all_input_nodes[0])
                graph.graph.erase_node(node)
    return found


def _placeholders(graph: GraphModule, names: Mapping[str, str]) -> dict[str, list[Node]]:
    """Return the placeholders of each named parameter."""
    places: dict[str, list[Node]] = {}
    for node in graph.graph.find_nodes(op="placeholder"):
        if node.name in names:
            places.setdefault(names[node.name], []).append(node)
    return places


def take_out_of_layers(
    graph: GraphModule, names: Mapping[str, str], constants: Mapping[str, Tensor]
) -> dict[str, Added]:
    """Replace each sum `layer(x) + constant` by `layer(x)`, and return the constants as additions to the biases.

    The model may use each sum `layer(x) + constant` only in multiplications. All outputs that share an entry of the
    bias must have the same constant. The bias must be a parameter that the model uses once.

    Args:
        graph: A traced program, which is modified.
        names: The names of the parameters, by placeholder.
        constants: The tensors that no checkpoint stores and that never change, by placeholder.

    Returns:
        The added constants, by parameter name.
    """
    by_layer: dict[Node, dict[Node, Number]] = {}
    changed: dict[Node, Node] = {}
    fixed = _fixed(graph, constants)
    for node in graph.graph.nodes:
        addend = _addend(node, fixed, constants)
        if addend is not None and _is_multiplied(node):
            changed[node], number = addend
            layer, factor = _layer_behind(changed[node])
            if layer is not None and factor:
                by_layer.setdefault(layer, {})[node] = number / factor
    found: dict[str, Added] = {}
    for layer, sums in by_layer.items():
        bias: Any = layer.args[2]
        name = names.get(bias.name)
        if name is None or len(bias.users) != 1 or [*names.values()].count(name) != 1:
            continue
        numbers = _taken_up(layer, sums)
        if numbers is not None:
            found[name] = ranges_of(numbers)
            for node in sums:
                node.replace_all_uses_with(changed[node])
                graph.graph.erase_node(node)
    return found


def _addend(node: Node, fixed: Collection[Node], constants: Mapping[str, Tensor]) -> tuple[Node, Number] | None:
    """Return the value to which an operator adds a constant, and the constant; None for other operators."""
    number = _number(node)
    if number is not None:
        return node.all_input_nodes[0], number
    name = operator_name(node) if node.op == "call_function" else ""
    operands = node.all_input_nodes
    if name not in ("add", "sub") or node.kwargs or len(operands) != 2 or tuple(operands) != node.args:
        return None
    for value, other in (operands, operands[::-1]) if name == "add" else (operands,):
        if shape_of(value) == shape_of(node) and other in fixed:
            tensor = _evaluate(other, constants).double().expand(shape_of(node))
            return (value, -tensor if name == "sub" else tensor) if bool(tensor.isfinite().all()) else None
    return None


def _fixed(graph: GraphModule, constants: Mapping[str, Tensor]) -> set[Node]:
    """Return the nodes whose values are small real tensors that depend neither on inputs nor on parameters."""
    fixed: set[Node] = set()
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or value.numel() > MOST_OUTPUTS or value.is_complex():
            continue
        is_random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        is_made = node.op == "call_function" and not is_random and fixed.issuperset(node.all_input_nodes)
        if is_made or (node.op == "placeholder" and node.name in constants and not constants[node.name].is_meta):
            fixed.add(node)
    return fixed


def _evaluate(node: Node, constants: Mapping[str, Tensor]) -> Tensor:
    """Return the tensor that a node computes from constants alone."""
    if node.op == "placeholder":
        return constants[node.name].cpu()
    operands = {source: _evaluate(source, constants) for source in node.all_input_nodes}
    target: Any = node.target
    kwargs = {**node.kwargs, **({"device": "cpu"} if "device" in node.kwargs else {})}
    found: Tensor = target(*map_arg(node.args, operands.__getitem__), **map_arg(kwargs, operands.__getitem__))
    return found


def _is_multiplied(node: Node) -> bool:
    """Return whether every use of a value, or of a view of it, is a multiplication."""
    users = [user for user in node.users if user.op != "call_function" or user.users]
    return bool(users) and all(
        operator_name(user) in MULTIPLIERS or (_is_moved(user) and user.args[0] is node and _is_multiplied(user))
        for user in users
    )


def _is_moved(node: Node) -> bool:
    name = operator_name(node) if node.op == "call_function" else ""
    return name in SAME or name in MOVES or node.target is operator.getitem


def _factor(node: Node) -> float | None:
    """Return the number by which an operator multiplies its first operand, or None for other operators."""
    name = operator_name(node) if node.op == "call_function" else ""
    if name == "neg":
        return -1.0
    if (name not in PRODUCTS and name != "div") or len(node.all_input_nodes) != 1 or node.kwargs:
        return None
    number = next((x for x in node.args if isinstance(x, int | float)), None)
    if number is None or (name == "div" and (node.args[1] is not number or not number)):
        return None
    return float(number) if name in PRODUCTS else 1 / number


def _layer_behind(node: Node) -> tuple[Node | None, float]:
    """Return the layer that computes a value up to a constant factor, and this factor.

    If no layer with a bias computes the value, None is returned instead of a layer.
    """
    factor = 1.0
    while node.op == "call_function":
        name, number = operator_name(node), _factor(node)
        if name in LAYERS:
            return (node if len(node.args) > 2 and isinstance(node.args[2], Node) else None), factor
        if number is None and not _is_moved(node):
            break
        factor *= 1.0 if number is None else number
        node = node.all_input_nodes[0]
    return None, factor


def _taken_up(layer: Node, sums: Mapping[Node, Number]) -> Tensor | None:
    """Return, for each entry of a layer's bias, the constant that the model adds to all outputs with this bias entry.

    Return None if two outputs with the same bias entry have different constants.
    """
    shape, axis = shape_of(layer), LAYERS[operator_name(layer)]
    if not shape or not 0 < torch.Size(shape).numel() <= MOST_OUTPUTS:
        return None
    axis %= len(shape)
    entries = torch.arange(shape[axis]).reshape([-1 if k == axis else 1 for k in range(len(shape))]).expand(shape)
    numbers, left = torch.full((shape[axis],), torch.nan, dtype=torch.float64), {*sums}
    pending: list[tuple[Node, Any]] = [(layer, entries)]
    while pending:
        node, at = pending.pop()
        for user in (user for user in node.users if user.op != "call_function" or user.users):
            if user not in sums and _factor(user) is not None:
                pending.append((user, at))
            elif user not in sums and _is_moved(user) and user.all_input_nodes == [node]:
                same = operator_name(user) in SAME
                target: Any = user.target
                pending.append((user, at if same else target(*map_arg(user.args, lambda _: at), **user.kwargs)))  # noqa: B023
            else:
                left.discard(user)
                parts = at if isinstance(at, list | tuple) else [at]
                taken = torch.cat([one.flatten() for one in parts])
                given = sums.get(user, 0.0)
                number = given.flatten() if isinstance(given, Tensor) else torch.tensor(given, dtype=torch.float64)
                is_new = numbers[taken].isnan()
                numbers[taken] = torch.where(is_new, number, numbers[taken])
                if not bool((numbers[taken] == number).all()):
                    return None
    return None if left else numbers.nan_to_num(0.0)


def _uses(node: Node) -> Iterator[tuple[Node, Node]]:
    """Yield the operators that use a value or a copy of it, each with the operand that it uses.

    Operators whose results are unused, such as assertions, are left out.
    """
    for user in node.users:
        if user.op == "call_function" and not user.users:
            continue
        if user.op == "call_function" and operator_name(user) in SAME and user.args[0] is node:
            yield from _uses(user)
        else:
            yield user, node


def _number(node: Node) -> float | None:
    """Return the constant that an operator adds to a parameter, or None if the operator adds no constant."""
    name = operator_name(node) if node.op == "call_function" else ""
    if name not in ("add", "sub") or node.kwargs or len(node.args) != 2:
        return None
    x, y = node.args
    number = y if isinstance(x, Node) else x if name == "add" else None
    return (-1.0 if name == "sub" else 1.0) * number if isinstance(number, int | float) and number else None


def _multiplies(node: Node, operand: Node) -> bool:
    """Return whether an operator multiplies another value by the given operand."""
    name = operator_name(node) if node.op == "call_function" else ""
    return name in PRODUCTS or (name in NORMS and node.args[NORMS[name] : NORMS[name] + 1] == (operand,))

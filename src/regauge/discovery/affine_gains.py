"""Gains written as `1 + weight`: the graph is rewritten to use the weight as the gain, and the constant is recorded."""

from collections.abc import Iterator

from torch.fx import GraphModule, Node

from regauge.discovery.operators import NORMS, PRODUCTS, SAME, operator_name


def take_out_numbers(graph: GraphModule, names: dict[str, str], shapes: dict[str, tuple[int, ...]]) -> dict[str, float]:
    """Replace each product with the sum of a parameter and a constant by a product with the parameter alone.

    The replacement applies only to parameters with one axis. Every use of the parameter must add the same constant, and
    every use of the sum must be a multiplication.

    Args:
        graph: A traced program, which is modified.
        names: The name of the parameter at each placeholder of the graph.
        shapes: The shapes of the parameters.

    Returns:
        The added constants, by parameter name.
    """
    places: dict[str, list[Node]] = {}
    for node in graph.graph.find_nodes(op="placeholder"):
        if node.name in names and len(shapes[names[node.name]]) == 1:
            places.setdefault(names[node.name], []).append(node)
    found: dict[str, float] = {}
    for name, nodes in places.items():
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


def _uses(node: Node) -> Iterator[tuple[Node, Node]]:
    """Yield the operators that use a value or a copy of it, each with the operand that it uses.

    Assertions do not count as uses.
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
    """Return whether an operator multiplies by an operand."""
    name = operator_name(node) if node.op == "call_function" else ""
    return name in PRODUCTS or (name in NORMS and node.args[NORMS[name] : NORMS[name] + 1] == (operand,))

"""Linear maps: matrix products, Einstein sums, convolutions."""

from collections.abc import Sequence
from typing import Any

from regauge.discovery import laws as law
from regauge.discovery.builder import Builder
from regauge.discovery.laws import Value
from regauge.discovery.operators import Call, NoRuleError, Rule, as_value, named


def apply_linear(b: Builder, x: Value, weight: Value, bias: Any) -> Value:
    """Return x W^T + b, applied to the last axis."""
    lead = list(range(x.ndim - 1))
    if weight.ndim == 1:
        result = b.multilinear([(x, [*lead, "in"]), (weight, ["in"])], lead, x.shape[:-1])
    else:
        shape = [*x.shape[:-1], weight.shape[0]]
        result = b.multilinear([(x, [*lead, "in"]), (weight, ["out", "in"])], [*lead, "out"], shape)
    return result if bias is None else b.add([result, as_value(b, bias)], result.shape)


def matmul(b: Builder, call: Call) -> Value:
    x, y = (as_value(b, v) for v in list(call.arguments.values())[:2])
    return apply_matmul(b, x, y, call.shape)


def apply_matmul(b: Builder, x: Value, y: Value, shape: Sequence[int]) -> Value:
    """Return a batched matrix product whose leading axes broadcast."""
    lead = max(x.ndim, y.ndim, 2) - 2

    def labels(v: Value, last: Sequence[str]) -> list[Any]:
        batch = []
        for k in range(v.ndim - len(last)):
            label = lead - (v.ndim - len(last)) + k
            size = v.shape[k]
            batch.append(label if size == shape[label] else None)
        return [*batch, *last]

    rows = ["row"] if x.ndim > 1 else []
    columns = ["column"] if y.ndim > 1 else []
    left = labels(x, [*rows, "in"])
    right = labels(y, ["in", *columns])
    out = [*range(len(shape) - len(rows) - len(columns)), *rows, *columns]
    return b.multilinear([(x, left), (y, right)], out, shape)


def add_product(b: Builder, call: Call) -> Value:
    """Return beta * input + alpha * product (addmm, baddbmm, addmv)."""
    x, y = (as_value(b, v) for v in list(call.arguments.values())[1:3])
    alpha, beta = call.get("alpha", 1), call.get("beta", 1)
    result = apply_matmul(b, x, y, call.shape)
    if alpha != 1:
        result = b.mul([result, alpha], result.shape)
    if beta == 0:
        return result
    offset = as_value(b, call.x)
    if beta != 1:
        offset = b.mul([offset, beta], offset.shape)
    return b.add([result, offset], call.shape)


def add_sum_of_products(b: Builder, call: Call) -> Value:
    """Return beta * input + alpha * the sum of the matrix products in a batch (addbmm)."""
    x, y = as_value(b, call["batch1"]), as_value(b, call["batch2"])
    total = b.multilinear([(x, ["n", "i", "k"]), (y, ["n", "k", "j"])], ["i", "j"], call.shape)
    offset, alpha, beta = as_value(b, call.x), call.get("alpha", 1), call.get("beta", 1)
    return b.add([b.mul([offset, beta], offset.shape), b.mul([total, alpha], call.shape)], call.shape)


def inner(b: Builder, call: Call) -> Value:
    """Return the inner products of all rows of one tensor with all rows of another tensor."""
    x, y = as_value(b, call["self"]), as_value(b, call["other"])
    rows, columns = [f"row {k}" for k in range(x.ndim - 1)], [f"column {k}" for k in range(y.ndim - 1)]
    return b.multilinear([(x, [*rows, "k"]), (y, [*columns, "k"])], [*rows, *columns], call.shape)


def inverse(b: Builder, call: Call) -> Value:
    """Return the inverse of matrices.

    A transformation of the columns of a matrix acts inversely on the rows of the inverse matrix, and vice versa.
    """
    x = as_value(b, call.x)
    *lead, rows, columns = range(x.ndim)
    result = Value([*(x.layouts[k] for k in lead), x.layouts[columns], x.layouts[rows]], call.shape)
    laws = [law.entrywise((1, 1), (1, 1))(x.axis(k), result.axis(k)) for k in lead]
    for one, other in ((rows, columns), (columns, rows)):
        laws.append(law.Law((x.axis(one), result.axis(other)), ((-1, -1),), ((1, 1),), ((0, 1, -1),)))
    b.record(*laws)
    return result


def solve(b: Builder, call: Call) -> Value:
    """Return the solution of linear systems, which is the inverse of matrices times other matrices."""
    x, y = as_value(b, call["A"]), as_value(b, call["B"])
    if y.ndim != x.ndim or y.shape[:-2] != x.shape[:-2]:
        raise NoRuleError("a system with vectors on the right, or that broadcasts")
    inverted = inverse(b, Call(call.name, call.overload, {"A": x}, (x.shape,), call.is_float))
    left, right = (inverted, y) if call["left"] else (y, inverted)
    return apply_matmul(b, left, right, call.shape)


def outer(b: Builder, call: Call) -> Value:
    x, y = (as_value(b, v) for v in list(call.arguments.values())[:2])
    return b.multilinear([(x, ["i"]), (y, ["j"])], ["i", "j"], call.shape)


def bilinear(b: Builder, call: Call) -> Value:
    x, y, weight = (as_value(b, call[key]) for key in ("input1", "input2", "weight"))
    lead = list(range(x.ndim - 1))
    result = b.multilinear(
        [(x, [*lead, "i"]), (y, [*lead, "j"]), (weight, ["out", "i", "j"])], [*lead, "out"], call.shape
    )
    bias = call.get("bias")
    return result if bias is None else b.add([result, as_value(b, bias)], call.shape)


def einsum(b: Builder, call: Call) -> Value:
    equation = call["equation"].replace(" ", "")
    operands = [as_value(b, v) for v in call["tensors"]]
    inputs, _, output = equation.partition("->")
    rows = inputs.split(",")
    if len(rows) != len(operands):
        raise NoRuleError("an Einstein sum with sublists")
    labels = []
    for row, x in zip(rows, operands, strict=True):
        before, dots, after = row.partition("...")
        missing = x.ndim - len(before) - len(after)
        labels.append([*before, *(f"...{k}" for k in range(missing, 0, -1)), *after] if dots else list(row))
    if "->" not in equation:
        counts: dict[str, int] = {}
        for name in (name for row in labels for name in row):
            counts[name] = counts.get(name, 0) + 1
        dots_out = sorted((n for n in counts if n.startswith("...")), reverse=True)
        out = [*dots_out, *sorted(n for n, c in counts.items() if c == 1 and not n.startswith("..."))]
    else:
        before, dots, after = output.partition("...")
        widest = len(call.shape) - len(before) - len(after)
        out = [*before, *(f"...{k}" for k in range(widest, 0, -1)), *after] if dots else list(output)
    if any(len(set(row)) < len(row) for row in labels):
        raise NoRuleError("an Einstein sum that takes a diagonal")
    sizes = dict(zip(out, call.shape, strict=True))
    cleaned = [
        [None if x.shape[k] == 1 and sizes.get(name, 1) != 1 else name for k, name in enumerate(row)]
        for row, x in zip(labels, operands, strict=True)
    ]
    return b.multilinear(list(zip(operands, cleaned, strict=True)), out, call.shape)


def convolution(b: Builder, call: Call) -> Value:
    """Return a convolution with any number of spatial axes. The convolution may be grouped or transposed.

    Channels are transformed as in a linear layer. Spatial axes are frozen unless the kernels have size one and every
    position is kept.
    """
    x, weight = as_value(b, call.x), as_value(b, call["weight"])
    groups, space = call.get("groups", 1), weight.ndim - 2
    is_batched = x.ndim == space + 2
    x = x if is_batched else b.unsqueeze(x, 0)
    n, channels, *size = call.shape if is_batched else (1, *call.shape)
    padding = call.get("padding", 0)
    is_unpadded = padding == "valid" or not any([padding] if isinstance(padding, int) else padding)
    inner = as_value(b, b.view(x, [n, groups, x.shape[1] // groups, *x.shape[2:]]))
    kernel = as_value(b, b.view(weight, [groups, weight.shape[0] // groups, *weight.shape[1:]]))
    if not (is_unpadded and list(weight.shape[2:]) == [1] * space and list(x.shape[2:]) == size):
        sources, reason = [0, 1, 2, *[None] * space], f"{b.op}: spatial axis"
        inner = b.carry(inner, sources, [*inner.shape[:3], *size], law.linear, ended=None, reason=reason)
        b.freeze(kernel, range(3, kernel.ndim), f"{b.op}: kernel axis")
    maps = ["in", "out"] if call.get("transposed", "transpose" in call.name) else ["out", "in"]
    places, taps = [f"place {k}" for k in range(space)], [f"tap {k}" for k in range(space)]
    operands = [(inner, ["n", "group", "in", *places]), (kernel, ["group", *maps, *taps])]
    wide = b.multilinear(operands, ["n", "group", "out", *places], [n, groups, channels // groups, *size])
    result = as_value(b, b.view(wide, [n, channels, *size]))
    bias = call.get("bias")
    if bias is not None:
        column = as_value(b, b.view(as_value(b, bias), [channels, *([1] * space)]))
        result = b.add([result, column], result.shape)
    return result if is_batched else as_value(b, b.select(result, 0, 0))


RULES: dict[str, Rule] = {
    **named(matmul, "matmul mm bmm mv dot vdot"),
    **named(add_product, "addmm baddbmm addmv"),
    **named(outer, "outer ger"),
    **named(convolution, "conv1d conv2d conv3d convolution _convolution conv_transpose1d conv_transpose2d"),
    **named(convolution, "conv_transpose3d"),
    "linear": lambda b, c: apply_linear(b, as_value(b, c["input"]), as_value(b, c["weight"]), c.get("bias")),
    "bilinear": bilinear,
    "addbmm": add_sum_of_products,
    "inner": inner,
    **named(inverse, "linalg_inv inverse"),
    "linalg_solve": solve,
    "einsum": einsum,
}

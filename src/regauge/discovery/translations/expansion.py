"""Values of a traced model, expanded as sums of products of parameters and other values.

An offset is the change of a value that is caused by adding a vector to a parameter. The model may multiply an offset by
a value that depends on the inputs. In linear attention, for example, an offset is multiplied by the sum of the
attention weights. The model later divides by the sum of the attention weights, but may compute this sum with other
operators. Two values are equal if their expansions consist of the same products, apart from the names of summed
indices.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

from torch.fx import Node

from regauge.discovery.operators import SAME, argument, operator_name, shape_of, words
from regauge.discovery.translations.graph import Graph, axis_before, given, is_same_values
from regauge.discovery.translations.offsets import Index, Monomial, Multiplicand, SeenError

MOST_PRODUCTS = 16
"""The largest number of products in an expansion; longer expansions are not used."""
MOST_FACTORS = 8
"""The largest number of factors in a product. Without a limit, powers of powers would have exponentially many
factors."""
FIXED = Index(0, 1)
"""The index of an axis of length one."""
LAYERS = {"linear": (0, 1, 2), "addmm": (1, 2, 0), "conv1d": (0, 1, 2), "conv2d": (0, 1, 2), "conv3d": (0, 1, 2)}
"""Operators that are linear in a value and in a weight, with the argument positions of value, weight and bias."""
FILLED = {"ones": None, "ones_like": None, "new_ones": None, "full": 1, "full_like": 1, "new_full": 2}
"""Operators whose result is a constant tensor. Each operator has the argument position of the constant, or None if the
constant is one.
"""
Values = list[Monomial]


class Expansion:
    """The expansion of a model's values as sums of products of factors. An index of a factor either belongs to an axis
    of the value or is summed over.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph, self._names = graph, count(1)

    def of(self, node: Any, indices: Sequence[Index], *, is_input: bool = False) -> Values:
        """Return the products whose sum equals a value. The argument `indices` contains one index for each axis of the
        value.

        The input of a layer with parameters is kept as one factor and not expanded.

        Raises:
            SeenError: The expansion has too many products, or a product has too many factors.
        """
        if not isinstance(node, Node):
            return [Monomial(float(node), ())]
        indices = tuple(FIXED if n == 1 and not k.start else k for n, k in zip(shape_of(node), indices, strict=True))
        if (entries := self.graph.entries(node)) is not None:
            return [Monomial(1.0, (Multiplicand("parameter", entries, indices),))]
        found = None
        if node.op == "call_function":
            found = self._moved(node, indices, is_input=is_input)
            if found is None and not is_input and (rule := RULES.get(operator_name(node))):
                found = rule(self, node, indices)
        if found is None:
            return [Monomial(1.0, (Multiplicand("value", self.graph.first[node], indices),))]
        if len(found) > MOST_PRODUCTS or any(len(one.factors) > MOST_FACTORS for one in found):
            raise SeenError
        return found

    def summed(self, size: int) -> Index:
        """Return a new summed index, with a name that no other index has."""
        return Index(next(self._names), size) if size > 1 else FIXED

    def aligned(self, node: Any, indices: Sequence[Index], *, is_input: bool = False) -> Values:
        """Return the expansion of an operand after the operand is broadcast to a result with the given indices."""
        return self.of(node, indices[len(indices) - len(shape_of(node)) :], is_input=is_input)

    def settle(self, products: Values) -> Values:
        """Return a simplified sum of products. Weights that sum to one are left out. If all products have one divisor,
        and their sum is a multiple of this divisor, the result is a number.
        """
        products = [self._without_weights(one) for one in products]
        divisor = next((one for one in products[0].factors if one.kind == "inverse"), None) if products else None
        if divisor is None or not all(divisor in one.factors for one in products):
            return products
        rest = [Monomial(one.number, _without(one.factors, divisor)) for one in products]
        own = [self._without_weights(one) for one in self.of(divisor.what, divisor.indices)]
        ratio = _ratio(rest, own)
        return products if ratio is None else [Monomial(ratio, ())]

    def _without_weights(self, product: Monomial) -> Monomial:
        """Return a product without weights (such as a softmax) that sum to one over an index which no other factor
        has.
        """
        number, factors = product
        used = [index.name for one in factors for index in one.indices if index.name > 0]
        for one in factors:
            if one.kind != "value":
                continue
            for axis, index in enumerate(one.indices):
                is_alone = index.name > 0 and used.count(index.name) == 1
                is_whole = index[1:] == (shape_of(one.what)[axis], 0)
                if is_alone and is_whole and self.graph.sums_to_one(one.what, axis):
                    others = [k.size for k in one.indices if k.name > 0 and k != index and used.count(k.name) == 1]
                    return self._without_weights(Monomial(number * math.prod(others), _without(factors, one)))
        return product

    def _moved(self, node: Node, indices: Sequence[Index], *, is_input: bool) -> Values | None:
        """Return the expansion of a node that rearranges or selects entries of its operand. Return None for other
        nodes.
        """
        name, source = operator_name(node), given(node)[0]
        if name == "getitem":
            cut, index = given(node)
            if operator_name(cut) == "unbind":
                axis = int(argument(cut, 1, 0)) % len(shape_of(given(cut)[0]))
                own = (*indices[:axis], Index(0, 1, index), *indices[axis:])
                return self.of(given(cut)[0], own, is_input=is_input)
            if operator_name(cut) not in words("split split_with_sizes chunk"):
                return None
            axis = int(argument(cut, 2, 0)) % len(indices)
            start = sum(part.shape[axis] for part in cut.meta["val"][:index])
            return self.of(given(cut)[0], _begun(indices, axis, start), is_input=is_input)
        if name in ("slice", "narrow"):
            axis = int(argument(node, 1, 0)) % len(indices)
            if name == "slice" and int(argument(node, 4, 1)) != 1:
                return None
            start = int(argument(node, 2, 0) or 0) % max(shape_of(source)[axis], 1)
            return self.of(source, _begun(indices, axis, start), is_input=is_input)
        if name == "select":
            axis, length = int(given(node)[1]) % len(shape_of(source)), shape_of(source)
            own = (*indices[:axis], Index(0, 1, int(given(node)[2]) % length[axis]), *indices[axis:])
            return self.of(source, own, is_input=is_input)
        if name in SAME:
            return self.of(source, indices, is_input=is_input)
        if not is_same_values(name):
            return None
        shape = shape_of(source)
        before: dict[int | None, Index] = {axis_before(node, axis): index for axis, index in enumerate(indices)}
        if any(n > 1 and axis not in before for axis, n in enumerate(shape)):
            return None
        return self.of(source, [before.get(axis, FIXED) for axis in range(len(shape))], is_input=is_input)

    def is_simple(self, operand: Any) -> bool:
        """Return whether an operand is a number, a parameter, or a tensor whose entries are one number."""
        while isinstance(operand, Node) and (operator_name(operand) in SAME or is_same_values(operator_name(operand))):
            operand = given(operand)[0]
        return not isinstance(operand, Node) or operator_name(operand) in FILLED or bool(self.graph.entries(operand))


def _begun(indices: Sequence[Index], axis: int, start: int) -> tuple[Index, ...]:
    """Return indices into an operand, given indices into a slice that begins at position `start` of `axis`."""
    own = indices[axis]
    return (*indices[:axis], own._replace(start=own.start + start), *indices[axis + 1 :])


def _without(factors: Sequence[Multiplicand], one: Multiplicand) -> tuple[Multiplicand, ...]:
    at = factors.index(one)
    return (*factors[:at], *factors[at + 1 :])


def _times(several: Sequence[Values], summed: Sequence[Index] = ()) -> Values:
    """Multiply several expansions, and sum the product over some indices."""
    found = [Monomial(1.0, ())]
    for values in several:
        if len(found) * len(values) > MOST_PRODUCTS:
            raise SeenError
        found = [Monomial(a.number * b.number, (*a.factors, *b.factors)) for a in found for b in values]
    return [one.repeated(summed) for one in found]


def _scaled(products: Values, number: float) -> Values:
    return [Monomial(number * one.number, one.factors) for one in products]


def _sum(e: Expansion, node: Node, indices: Sequence[Index]) -> Values | None:
    """Expand a sum or difference in which one operand is a number, a parameter or a constant."""
    x, y = given(node)[:2]
    if not (e.is_simple(x) or e.is_simple(y)):
        return None
    alpha = float(node.kwargs.get("alpha", 1))  # type: ignore[arg-type]
    signs = {"add": (1.0, alpha), "sub": (1.0, -alpha), "rsub": (-alpha, 1.0)}[operator_name(node).rstrip("_")]
    found = [one for operand, s in zip((x, y), signs, strict=True) for one in _scaled(e.aligned(operand, indices), s)]
    return [one for one in found if one.number]


def _product(e: Expansion, node: Node, indices: Sequence[Index]) -> Values | None:
    if node.kwargs:
        return None
    return _times([e.aligned(one, indices) for one in given(node)[:2]])


def _quotient(e: Expansion, node: Node, indices: Sequence[Index]) -> Values | None:
    x, y = given(node)[:2]
    return None if node.kwargs else _times([e.aligned(x, indices), inverse(y, indices)])


def inverse(operand: Any, indices: Sequence[Index]) -> Values:
    """Return the expansion of one divided by an operand that is broadcast to the given indices."""
    if not isinstance(operand, Node):
        return [Monomial(1 / float(operand), ())]
    shape = shape_of(operand)
    own = indices[len(indices) - len(shape) :]
    own = tuple(FIXED if n == 1 and not k.start else k for n, k in zip(shape, own, strict=True))
    return [Monomial(1.0, (Multiplicand("inverse", operand, own),))]


def _reciprocal(e: Expansion, node: Node, indices: Sequence[Index]) -> Values | None:
    is_one = operator_name(node) == "reciprocal" or argument(node, 1, None) == -1
    return inverse(given(node)[0], indices) if is_one else None


def _total(e: Expansion, node: Node, indices: Sequence[Index]) -> Values | None:
    """Expand a sum or mean along axes."""
    source, dims = shape_of(given(node)[0]), argument(node, 1, None)
    several = [dims] if isinstance(dims, int) else list(dims or range(len(source)))
    # A number has no axes, but PyTorch accepts axis 0 for it.
    axes = {int(d) % len(source) for d in several} if source else set[int]()
    is_kept = bool(argument(node, 2, False))
    summed = {axis: e.summed(source[axis]) for axis in axes}
    rest = iter(index for k, index in enumerate(indices) if not (is_kept and k in axes))
    own = [summed[axis] if axis in axes else next(rest) for axis in range(len(source))]
    found = _times([e.of(given(node)[0], own)], [*summed.values()])
    return found if operator_name(node) == "sum" else _scaled(found, 1 / math.prod(source[axis] for axis in axes))


def _cumulative(e: Expansion, node: Node, indices: Sequence[Index]) -> Values:
    """Expand a cumulative sum at position i as a sum over all positions that are at most i."""
    if not indices:  # A number.
        return e.of(given(node)[0], indices)
    axis = int(given(node)[1]) % len(indices)
    before = e.summed(shape_of(node)[axis])
    own = (*indices[:axis], before, *indices[axis + 1 :])
    return _times([up_to(indices[axis], before), e.of(given(node)[0], own)], [before])


def up_to(last: Index, index: Index) -> Values:
    """Return the factor that is one where one index is at most another, and zero elsewhere."""
    return [Monomial(1.0, (Multiplicand("before", None, (last, index)),))]


def _matrices(e: Expansion, node: Node, indices: Sequence[Index]) -> Values | None:
    left, right = given(node)[:2]
    if min(len(shape_of(left)), len(shape_of(right))) < 2:
        return None
    inner, *batch = e.summed(shape_of(left)[-1]), *indices[:-2]
    operands = (left, (*batch, indices[-2], inner)), (right, (*batch, inner, indices[-1]))
    is_layer = [e.graph.entries(one) is not None for one, _ in operands]
    return _times([e.aligned(one, own, is_input=any(is_layer)) for one, own in operands], [inner])


def _layer(e: Expansion, node: Node, indices: Sequence[Index]) -> Values | None:
    """Expand a linear layer, or a convolution with kernels of length one."""
    name = operator_name(node)
    x, w, b = (argument(node, k, None) for k in LAYERS[name])
    if node.kwargs or e.graph.entries(w) is None:
        return None
    dim = len(indices) - 1 - (int(name[-2]) if name.startswith("conv") else 0)
    if name.startswith("conv"):
        strides, pads, _, groups = (argument(node, k, default) for k, default in ((3, 1), (4, 0), (5, 1), (6, 1)))
        is_plain = all(one in (1, [1], [1, 1], [1, 1, 1]) for one in (strides, groups)) and pads != "same"
        if math.prod(shape_of(w)[2:]) > 1 or not is_plain or any([pads] if isinstance(pads, int) else pads):
            return None
    width = shape_of(x)[dim]
    inner = e.summed(width)
    kernel = (inner, indices[dim]) if name == "addmm" else (indices[dim], inner)
    own = (*indices[:dim], inner, *indices[dim + 1 :])
    found = _times([e.of(w, (*kernel, *[FIXED] * (len(shape_of(w)) - 2))), e.of(x, own, is_input=True)], [inner])
    return found if b is None else [*found, *e.of(b, [indices[dim]])]


def _table(e: Expansion, node: Node, indices: Sequence[Index]) -> Values | None:
    """Expand a lookup in a table as a sum over all rows of the table.

    Each row is multiplied by a factor that is one for the selected row and zero for all other rows.
    """
    table, index = given(node)[:2]
    if e.graph.entries(table) is None:
        return None
    row = e.summed(shape_of(table)[0])
    (one,) = e.of(index, indices[:-1], is_input=True)
    chosen = [Monomial(1.0, tuple(Multiplicand("row", k.what, (*k.indices, row)) for k in one.factors))]
    return _times([chosen, e.of(table, (row, indices[-1]))], [row])


def _einsum(e: Expansion, node: Node, indices: Sequence[Index]) -> Values | None:
    names, target = letters(node)
    if any(len(set(name)) < len(name) for name in (*names, target)):
        return None
    own = dict(zip(target, indices, strict=True))
    summed = []
    for name, operand in zip(names, given(node)[1], strict=True):
        for letter, size in zip(name, shape_of(operand), strict=True):
            if letter not in own or (own[letter].size == 1 and own[letter] in summed):
                own[letter] = e.summed(size)
                summed.append(own[letter])
    is_layer = any(e.graph.entries(one) is not None for one in given(node)[1])
    parts = [
        e.of(one, [own[letter] for letter in name], is_input=is_layer)
        for name, one in zip(names, given(node)[1], strict=True)
    ]
    return _times(parts, summed)


def letters(node: Node) -> tuple[list[list[str]], list[str]]:
    """Return the axes of the operands and of the result of an einsum, with one name for each axis.

    Raises:
        SeenError: The equation does not name the axes of the result.
    """
    text = str(given(node)[0]).replace(" ", "")
    if "->" not in text:
        raise SeenError
    operands, target = text.split("->")[0].split(","), text.split("->")[1]

    def split(name: str, ndim: int) -> list[str]:
        head, dots, tail = name.partition("...")
        several = ndim - len(head) - len(tail) if dots else 0
        return [*head, *(f".{several - k}" for k in range(several)), *tail]

    shapes = [shape_of(one) for one in given(node)[1]]
    return [split(name, len(shape)) for name, shape in zip(operands, shapes, strict=True)], split(
        target, len(shape_of(node))
    )


def _constant(e: Expansion, node: Node, indices: Sequence[Index]) -> Values | None:
    at = FILLED[operator_name(node)]
    value = 1 if at is None else argument(node, at, None)
    return [Monomial(float(value), ())] if isinstance(value, int | float) else None


RULES: dict[str, Any] = {
    **dict.fromkeys(words("add sub rsub add_"), _sum),
    "mul": _product,
    "div": _quotient,
    **dict.fromkeys(words("reciprocal pow"), _reciprocal),
    "neg": lambda e, node, indices: _scaled(e.of(given(node)[0], indices), -1.0),
    **dict.fromkeys(words("sum mean"), _total),
    "cumsum": _cumulative,
    **dict.fromkeys(words("matmul mm bmm"), _matrices),
    **dict.fromkeys(LAYERS, _layer),
    "embedding": _table,
    "einsum": _einsum,
    **dict.fromkeys(FILLED, _constant),
}
"""For each operator, the function that expands its result. Results of other operators are not expanded."""


def _ratio(one: Values, other: Values) -> float | None:
    """Return the ratio of two sums of products, or None if the first sum is not a number times the second sum."""
    if len(one) != len(other) or not one:
        return None
    rest, ratios = list(other), []
    for product in one:
        match = next((k for k, own in enumerate(rest) if renaming(product.factors, own.factors) is not None), None)
        if match is None or not rest[match].number:
            return None
        ratios.append(product.number / rest.pop(match).number)
    return ratios[0] if all(math.isclose(ratio, ratios[0], rel_tol=1e-12) for ratio in ratios) else None


def renaming(
    factors: Sequence[Multiplicand], others: Sequence[Multiplicand], names: dict[int, Index] | None = None
) -> dict[int, Index] | None:
    """Return a renaming of summed indices that makes two products equal, or None if no such renaming exists."""
    names = names or {}
    if not factors:
        return None if others else names
    for k, other in enumerate(others):
        for known in _unified(factors[0], other, names):
            found = renaming(factors[1:], [*others[:k], *others[k + 1 :]], known)
            if found is not None:
                return found
    return None


def _unified(one: Multiplicand, other: Multiplicand, names: dict[int, Index]) -> Iterator[dict[int, Index]]:
    """Extend a renaming of summed indices such that two further factors become equal.

    Yield the extended renaming, or nothing if no renaming exists.
    """
    if (one.kind, one.what, len(one.indices)) != (other.kind, other.what, len(other.indices)):
        return
    found = dict(names)
    for i, j in zip(one.indices, other.indices, strict=True):
        if i[1:] != j[1:] or (min(i.name, j.name) <= 0 and i != j):
            return
        if i.name > 0 and found.setdefault(i.name, j._replace(start=0)).name != j.name:
            return
    if len({index.name for index in found.values()}) == len(found):
        yield found

"""Products of changes (offsets) with values of the model, and the layers that can compensate for these products."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch.fx import Node

from regauge.core.translations import Entries, Image, ImageStep
from regauge.discovery.operators import SAME, operator_name, shape_of
from regauge.discovery.translations.expansion import FIXED, LAYERS, Values, renaming
from regauge.discovery.translations.graph import axis_before, given
from regauge.discovery.translations.offsets import (
    ONE,
    Addend,
    Index,
    Monomial,
    Multiplicand,
    Offset,
    SeenError,
    channels,
    each_position,
    is_constant,
    once,
    picked,
)
from regauge.discovery.translations.run import MOVES, Run

MOST_TERMS = 32
"""The largest number of terms of a change (offset) that is multiplied by other values, expanded as sums of products.
"""


def indices_of(shape: Sequence[int]) -> tuple[Index, ...]:
    """Return one index for each axis of a value."""
    return tuple(Index(k - len(shape), n) if n > 1 else FIXED for k, n in enumerate(shape))


def contracted(run: Run, shape: Sequence[int], offset: Offset, own: Sequence[int], others: Sequence[Values]) -> Offset:
    """Return the change (offset) of a product of values in which only one value changes.

    The product is summed over some indices.

    Args:
        run: The propagation of the offset.
        shape: The shape of the result.
        offset: The change of the value, whose amounts must be known.
        own: For each axis of the changed value: a negative number for an axis of the result, or a positive number for a
            summed index.
        others: The expansions of the factors that do not change.

    Raises:
        SeenError: The change varies along a summed axis, or it has too many terms.
    """
    if offset.labels is not None or offset.is_masked:
        raise SeenError
    before = offset.terms[0].places.shape
    names = {k - len(own): Index(name, n) for k, (name, n) in enumerate(zip(own, before, strict=True))}
    summed = [index for index in names.values() if index.name > 0 and index.size > 1]
    kept = sorted((name, k) for k, name in enumerate(own) if name < 0)
    grouped: list[tuple[Addend, Values]] = []
    for term in offset.terms:
        places = term.places
        for k, name in enumerate(own):
            if name > 0:
                if not is_constant(places, k):
                    raise SeenError
                places = places.narrow(k, 0, 1)
        sizes = [1] * len(shape)
        for name, k in kept:
            sizes[name] = places.shape[k]
        few = places.permute(*(k for _, k in kept), *(k for k, name in enumerate(own) if name > 0))
        places = few.reshape(sizes).expand(tuple(shape))
        products: Values = [term.product.renamed(names)]
        for values in others:
            products = [Monomial(a.number * b.number, (*a.factors, *b.factors)) for a in products for b in values]
        products = [one.repeated(summed) for one in products]
        moved = replace(term, places=places, product=ONE)
        same = next((held for known, held in grouped if _is_same(known, moved)), None)
        if same is None:
            grouped.append((moved, products))
        else:
            same += products
    if sum(len(products) for _, products in grouped) > MOST_TERMS:
        raise SeenError
    return Offset(tuple(one for term, products in grouped for one in _settled(term, run.expansion.settle(products))))


def _is_same(one: Addend, other: Addend) -> bool:
    """Return whether two addends add the same vector at the same entries."""
    return (one.steps, one.size) == (other.steps, other.size) and torch.equal(*once([one.places, other.places]))


def _settled(term: Addend, products: Values) -> list[Addend]:
    """Return a vector times each of several products. If all factors are parameters, they are stored as linear
    operations on the vector.
    """
    try:
        return [_with_steps(term, one) for one in products]
    except SeenError:
        return [replace(term, product=one) for one in products]


def _with_steps(term: Addend, product: Monomial) -> Addend:
    """Return a vector with further linear operations, which multiply it by a product of parameters."""
    if any(one.kind != "parameter" for one in product.factors):
        raise SeenError
    if product.number != 1:
        term = replace(term, steps=(*term.steps, ImageStep("scale", factor=product.number)))
    for one in product.factors:
        term = _times_factor(term, one, [k.name for f in product.factors if f is not one for k in f.indices])
    return term


def _times_factor(term: Addend, factor: Multiplicand, others: Sequence[int]) -> Addend:
    """Return a vector times entries of a parameter. The product is summed over the indices of the parameter with
    positive names, which no other factor may have.
    """
    own = [*zip(factor.indices, factor.what.strides, strict=True)]
    wide = sorted(((k, stride) for k, stride in own if k.size > 1), key=lambda one: one[0].name > 0)  # Sums come last.
    if any(index.name > 0 and index.name in others for index, _ in wide):
        raise SeenError
    start = sum(index.start * stride for index, stride in own)
    sizes, strides = tuple(index.size for index, _ in wide), tuple(stride for _, stride in wide)
    axes = [term.places.ndim + index.name for index, _ in wide if index.name < 0]
    entries = Entries(factor.what.parameter, sizes, strides, factor.what.start + start)
    return multiplied(term, "times", entries, axes)


def multiplied(term: Addend, kind: Literal["over", "times"], factors: Entries, axes: list[int]) -> Addend:
    """Return an added vector after it is multiplied or divided by entries of a parameter. The result may vary along
    more axes than the vector.

    If the parameter entries have axes that the value lacks, the result is summed over the missing axes.
    """
    shape = term.places.shape
    several = [k for k in range(len(shape)) if k in axes or not is_constant(term.places, k)]
    strides = dict(zip(axes, factors.strides, strict=False))
    sizes = (*(shape[k] for k in several), *factors.sizes[len(axes) :])
    factors = replace(
        factors, sizes=sizes, strides=(*(strides.get(k, 0) for k in several), *factors.strides[len(axes) :])
    )
    steps, size = picked(term, channels(term, *several))
    places = each_position(shape, set(range(len(shape))).difference(several))
    return Addend((*steps, ImageStep(kind, factors)), size, places)


def moved_products(node: Node, offset: Offset, move: Any) -> Offset | None:
    """Return a change (offset) after an operator has rearranged entries, if the change is a vector times values of the
    model. Return None if an axis disappears along which the values of the model vary.
    """
    shape, ndim = shape_of(node), len(shape_of(given(node)[0]))
    before = {axis_before(node, axis): axis for axis in range(len(shape))}
    names = {axis - ndim: Index(k - len(shape), 0) for axis, k in before.items() if axis is not None}
    if any(term.product.axes - names.keys() for term in offset.terms):
        return None
    terms = [replace(term, places=move(term.places), product=term.product.renamed(names)) for term in offset.terms]
    return replace(offset, terms=tuple(terms))


def take_back_by_layers(run: Run, operand: Any, offset: Offset, shape: tuple[int, ...]) -> Offset | None:
    """Return None if a layer can compensate for a change (offset) that is multiplied by values of the model.

    If no layer can compensate, return the change.

    For example, let the change be a vector times the output of layer 1, as one summand of a sum. A second layer can
    compensate if its output is a further summand of the sum, and if both layers read the same value. A parameter
    compensates for one term of the change if the model multiplies this parameter and this term by the same values.
    """
    if offset.labels is not None or offset.is_masked or run.is_missed or not _is_read_by_this_sum(run, operand):
        return offset
    try:
        options = run.expansion.aligned(operand, indices_of(shape))
        images = [_image(run, term, options) for term in offset.terms]
    except SeenError:
        return offset
    if not run.is_eager:
        run.is_missed = True
        return offset
    run.events += [("image", image) for image in images]
    return None


def _is_read_by_this_sum(run: Run, node: Any) -> bool:
    """Return whether a layer computes the node, and only one operator reads the node."""
    while isinstance(node, Node) and node.op == "call_function":
        if node in run.offsets or node in run.graph.ends or not run.graph.is_read_once(node):
            return False
        name = operator_name(node)
        if name in LAYERS or name in ("embedding", "matmul"):
            return True
        if name not in SAME | MOVES or len(node.all_input_nodes) != 1:
            return False
        node = given(node)[0]
    return False


def _image(run: Run, term: Addend, options: Values) -> Image:
    """Return the change of a parameter that compensates for one added vector (term). The model must multiply the
    parameter and the vector of the term by the same values.
    """
    mine = [one for one in term.product.factors if one.kind == "parameter"]
    rest = [one for one in term.product.factors if one.kind != "parameter"]
    for option in options:
        takers = [one for one in option.factors if one.kind == "parameter"]
        names = renaming(rest, [one for one in option.factors if one.kind != "parameter"])
        if len(takers) != 1 or names is None or not option.number:
            continue
        parameter = takers[0].what.parameter
        is_once = sum(one.kind == "parameter" and one.what.parameter == parameter for o in options for one in o.factors)
        if is_once == 1 and run.may_take(parameter):
            # The names of indices that only parameters have are kept.
            factors = Monomial(1.0, tuple(mine)).renamed(names).factors
            return _image_in(term, takers[0], factors, -term.product.number / option.number)
    raise SeenError


def _image_in(term: Addend, taker: Multiplicand, factors: Sequence[Multiplicand], number: float) -> Image:
    """Return the change of a parameter's entries that compensates for a vector, after the vector is multiplied by
    factors.
    """
    wide = [(index, stride) for index, stride in zip(taker.indices, taker.what.strides, strict=True) if index.size > 1]
    sizes = tuple(index.size for index, _ in wide) or (1,)
    start = taker.what.start + sum(k.start * s for k, s in zip(taker.indices, taker.what.strides, strict=True))
    entries = Entries(taker.what.parameter, sizes, tuple(stride for _, stride in wide) or (1,), start)
    axes = sorted(index.name for index, _ in wide if index.name < 0)
    steps, size = picked(term, channels(term, *axes))
    lengths = {index.name: index.size for index, _ in wide}
    strides, reach = {}, 1
    for name in reversed(axes):
        strides[name] = reach
        reach *= lengths[name]
    if reach != size:
        raise SeenError
    if any(index.name > 0 for index, _ in wide) or [index.name for index, _ in wide] != axes:
        spread = tuple(strides.get(index.name, 0) for index, _ in wide)
        steps = (*steps, ImageStep("take", Entries("", sizes, spread)))
    here = [index.name for index, _ in wide]
    for one in factors:
        own = [(k, s) for k, s in zip(one.indices, one.what.strides, strict=True) if k.size > 1]
        inner = [(k, s) for k, s in own if k.name not in here]
        others = {k.name for other in factors if other is not one for k in other.indices}
        if any(k.name < 0 or k.name in others for k, _ in inner):
            raise SeenError
        known = {k.name: s for k, s in own}
        begun = one.what.start + sum(k.start * s for k, s in zip(one.indices, one.what.strides, strict=True))
        along = (*(known.get(name, 0) for name in here), *(s for _, s in inner))
        whole = (*(index.size for index, _ in wide), *(k.size for k, _ in inner))
        steps = (*steps, ImageStep("times", Entries(one.what.parameter, whole or (1,), along or (1,), begun)))
    return Image(entries, (), (*steps, ImageStep("scale", factor=number)))

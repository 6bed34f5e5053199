"""The effects of linear operators (layers, tables, products, attention) on offsets, which are changes of values."""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.nn import functional

from regauge.core.translations import Entries, ImageStep
from regauge.discovery.operators import argument, operator_name, shape_of
from regauge.discovery.translations.expansion import LAYERS, letters
from regauge.discovery.translations.factored_effects import contracted
from regauge.discovery.translations.graph import given
from regauge.discovery.translations.offsets import (
    Addend,
    Index,
    Offset,
    SeenError,
    added,
    along,
    channels,
    each_position,
    is_constant,
    once,
    picked,
    varied,
)
from regauge.discovery.translations.run import Run, Taker


def through_layer(run: Run, node: Node) -> Any:
    name = operator_name(node)
    x, w, b = (argument(node, k, None) for k in LAYERS[name])
    if name == "addmm" and node.kwargs:
        raise SeenError
    dim = len(shape_of(node)) - 1 - (int(name[-2]) if name.startswith("conv") else 0)
    terms: list[Addend] = []
    if run.of(w) is not None:
        if run.of(x) is not None or run.of(b) is not None:
            raise SeenError
        found = _reweigh(run, node, x, run.of(w), dim)
        if found is None or found.labels is not None:
            return found
        terms += found.terms
    elif run.of(x) is not None:
        if run.of(x).labels is not None or run.of(x).has_products:
            return _labels_through(run, node, run.of(x), dim)
        weights = _weights(run, node, w)
        terms += [_through(run, term, weights, dim, shape_of(node)) for term in run.of(x).known()]
    if (shift := run.of(b)) is not None:
        terms += [replace(term, places=along(term.places, dim, shape_of(node))) for term in shift.known()]
    return run.take_back(b, Offset(tuple(terms)), lambda own: along(own, dim, shape_of(node)))


def _labels_through(run: Run, node: Node, offset: Offset, dim: int) -> Offset:
    """Return the change of a layer's outputs. The change of the layer's inputs may depend on the data, but is constant
    along some axes.

    The layer must map each position independently of all other positions.
    """
    shape, kernel = shape_of(node), shape_of(argument(node, LAYERS[operator_name(node)][1], None))[2:]
    constant = [k for k, n in enumerate(shape) if n > 1 and k != dim and offset.is_uniform(k)]
    is_by_position = math.prod(kernel) == 1 and shape[dim + 1 :] == offset.arrays[0].shape[dim + 1 :]
    if offset.is_masked or not constant or not is_by_position:
        raise SeenError
    return Offset(labels=each_position(shape, constant))


def _through(run: Run, term: Addend, weights: Entries, dim: int, shape: tuple[int, ...]) -> Addend:
    """Return the change of a layer's outputs, if a vector is added to its input channels.

    The vector may be added to all channels, or to a range of adjacent channels.
    """
    copies, outputs, inputs = weights.sizes[:3]
    own = channels(term, dim)
    there = own.nonzero().flatten()
    if copies == 1 and len(there) < len(own) == inputs:
        first, inputs = int(there[0]), int(there[-1] - there[0]) + 1
        own, start = own[first : first + inputs], weights.start + first * weights.strides[2]
        weights = replace(weights, sizes=(1, outputs, inputs, *weights.sizes[3:]), start=start)
    steps, size = picked(term, own)
    if size != copies * inputs:
        raise SeenError
    places = along(torch.arange(1, copies * outputs + 1), dim, shape)
    return Addend((*steps, ImageStep("through", weights)), copies * outputs, places)


def _weights(run: Run, node: Node, w: Any) -> Entries:
    """Return the weights of a layer without padding as `[copies, outputs, inputs, ...]`."""
    found, name, copies = run.graph.entries(w), operator_name(node), 1
    if found is None:
        raise SeenError
    if name.startswith("conv"):
        padding = argument(node, 4, 0)
        pads = [padding] if isinstance(padding, int | str) else list(padding)
        if any(pad not in (0, "valid") for pad in pads):
            raise SeenError
        copies = int(argument(node, 6, 1))
    elif name == "addmm":
        found = replace(found, sizes=found.sizes[::-1], strides=found.strides[::-1])
    outputs = found.sizes[0] // copies
    return replace(
        found,
        sizes=(copies, outputs, *found.sizes[1:]),
        strides=(outputs * found.strides[0], *found.strides),
    )


def _reweigh(run: Run, node: Node, x: Any, change: Offset, dim: int) -> Any:
    """Return the change of a layer's outputs that a change of its weights causes.

    Two outputs of the layer change by the same amount if their weight rows change by the same amounts.
    """
    (term,) = change.known()
    places = term.places.mT if operator_name(node) == "addmm" else term.places
    shape = shape_of(node)
    rest = range(1, places.ndim)
    if all(is_constant(places, k) for k in rest):
        found = run.graph.total(x) if operator_name(node) in ("linear", "addmm") else None
        if found is None:
            raise SeenError
        gain, total = found
        run.events.append(("read", gain))
        rows = along(_first_column(places), dim, shape)
        return Offset((Addend((*term.steps, *total), term.size, rows),)) if total else None
    groups = int(argument(node, 6, 1)) if operator_name(node).startswith("conv") else 1
    numbers = torch.ones(1, dtype=torch.int64).expand(shape[dim])
    if not is_constant(places, 0):
        (few,) = once([places])
        if len(set(_first_column(few).tolist())) == len(few):  # The usual case, found without comparing all entries.
            raise SeenError
        # Rows to which the same vector is added change by the same amounts.
        rows, numbers = torch.unique(few.flatten(1), dim=0, return_inverse=True)
        is_without = ~(rows != 0).any(1)
        numbers = torch.where(is_without[numbers], 0, numbers + 1)
    if groups > 1:  # Channels of different groups read different inputs.
        numbers = numbers * torch.arange(1, groups + 1).repeat_interleave(shape[dim] // groups)
    return Offset(labels=varied(along(numbers, dim, shape), each_position(shape, [dim])))


def _first_column(array: Tensor) -> Tensor:
    """Return the entries of an array at index zero of all axes except the first."""
    for _ in range(array.ndim - 1):
        array = array.select(1, 0)
    return array


def through_embedding(run: Run, node: Node) -> Any:
    table, index = given(node)[:2]
    offset, shape = run.of(table), shape_of(node)
    if offset is None or run.of(index) is not None:
        raise SeenError
    if offset.is_uniform(0):
        return offset.move(lambda array: along(array[0], len(shape) - 1, shape))
    known = run.graph.constant(index)
    if known is not None:
        return offset.move(lambda array: functional.embedding(known, array))
    if not offset.is_uniform(1) or not all(bool(array[:, 0].all()) for array in offset.arrays):
        raise SeenError
    return Offset(labels=each_position(shape, [len(shape) - 1]))


def through_product(run: Run, node: Node) -> Any:
    base = 1 if operator_name(node) == "baddbmm" else 0
    left, right = given(node)[base : base + 2]
    found = _product_of(run, node, left, right) if {left, right} & run.offsets.keys() else None
    offset = run.of(given(node)[0]) if base else None
    if offset is None:
        return found
    shape, beta = shape_of(node), float(node.kwargs.get("beta", 1))  # type: ignore[arg-type]
    return added(shape, [offset, found], [beta, 1.0])


def _product_of(run: Run, node: Node, left: Any, right: Any) -> Any:
    first, second, shape = run.of(left), run.of(right), shape_of(node)
    if first is not None and second is not None:
        raise SeenError
    if second is None:
        weights = run.graph.entries(right)
        if weights is not None and len(weights.sizes) == 2 and len(shape_of(left)) > 1:
            sizes, strides = weights.sizes[::-1], weights.strides[::-1]
            weights = replace(weights, sizes=(1, *sizes), strides=(0, *strides))
            terms = [_through(run, term, weights, len(shape) - 1, shape) for term in first.known()]
            return Offset(tuple(terms))
        return _contracted_or_labels(run, node, [left, right], 0)
    return _contracted_or_labels(run, node, [left, right], 1)


def _contracted_or_labels(run: Run, node: Node, operands: list[Any], changed: int) -> Offset:
    """Return the change of a product of operands, if one of the operands changes.

    If the change of the operand varies along a summed axis, the change of the product depends on the inputs. Along an
    axis that the other operands lack, the change of the product is constant if the change of the operand is constant.
    """
    offset, shape = run.of(operands[changed]), shape_of(node)
    names, target = letters(node) if operator_name(node) == "einsum" else _axes_of_product(operands, shape)
    own = names[changed]
    if offset.is_masked or any(len(set(name)) < len(name) for name in (*names, target)):
        raise SeenError
    others = [(name, operand) for k, (name, operand) in enumerate(zip(names, operands, strict=True)) if k != changed]
    inside = {x: run.expansion.summed(2).name for name in names for x in name if x not in target}
    places = inside | {letter: k - len(target) for k, letter in enumerate(target)}
    try:
        values = [
            run.expansion.of(one, [Index(places[x], n) for x, n in zip(name, shape_of(one), strict=True)])
            for name, one in others
        ]
        if all(letter in own for letter in inside):
            return contracted(run, shape, offset, [places[letter] for letter in own], values)
    except SeenError:
        pass
    seen = {letter for name, _ in others for letter in name}
    seen |= {letter for k, letter in enumerate(own) if not offset.is_uniform(k)}
    return Offset(labels=each_position(shape, [k for k, letter in enumerate(target) if letter not in seen]))


def _axes_of_product(operands: list[Any], shape: tuple[int, ...]) -> tuple[list[list[str]], list[str]]:
    """Return names for the axes of two matrices (or batches of matrices) and of their product."""
    batch = [f"{k}" for k in range(len(shape) - 2)]
    names = [
        [*batch[len(batch) - (len(shape_of(one)) - 2) :], *matrix]
        for one, matrix in zip(operands, ("ik", "kj"), strict=True)
    ]
    return names, [*batch, "i", "j"]


def through_einsum(run: Run, node: Node) -> Any:
    """Return the change of an einsum, if one of its operands changes."""
    operands = list(given(node)[1])
    changed = [k for k, operand in enumerate(operands) if run.of(operand) is not None]
    if len(changed) > 1:
        raise SeenError
    return _contracted_or_labels(run, node, operands, changed[0])


def through_bag(run: Run, node: Node) -> Any:
    """Return the change of sums or means of table rows (an embedding bag). All sums must have equally many rows."""
    table, index, starts = given(node)[:3]
    offset, known = run.of(table), run.graph.constant(starts)
    kind, weights, padding = (argument(node, k, default) for k, default in ((4, 0), (6, None), (8, None)))
    is_last, rows = bool(argument(node, 7, False)), shape_of(index)[0]
    is_plain = kind in (0, 1) and weights is None and padding in (None, -1)
    if known is None or not is_plain or offset is None or not offset.is_uniform(0):
        raise SeenError
    counts = torch.diff(known if is_last else torch.cat([known, known.new_tensor([rows])]))
    if not len(counts) or int(counts[0]) < 1 or bool((counts != counts[0]).any()):
        raise SeenError
    shape = tuple(node.meta["val"][0].shape)
    found: Offset = offset.move(lambda array: along(array[0], 1, shape))
    return (found if kind == 1 else found.then(ImageStep("scale", factor=float(counts[0])))), None, None, None


def through_attention(run: Run, node: Node) -> Any:
    query, key, value = given(node)[:3]
    if run.of(query) is not None:
        raise SeenError
    for operand, dim in ((key, -2), (argument(node, 3, None), -1)):
        offset = run.of(operand)
        if offset is not None and not offset.is_uniform(dim):
            raise SeenError
    offset = run.of(value)
    if offset is None:
        return None
    if not offset.is_uniform(-2) or offset.is_masked:
        raise SeenError
    shape = shape_of(node)

    def spread(array: Tensor) -> Tensor:
        row = array.narrow(-2, 0, 1)
        if row.ndim > 2 and row.shape[-3] != shape[-3]:
            row = row.repeat_interleave(shape[-3] // row.shape[-3], -3)
        return row.expand(shape)

    found: Offset = offset.move(spread)
    return found


def through_recurrent(run: Run, node: Node) -> None:
    """Record the changes of a recurrent layer's input biases that compensate for a change of its inputs or state
    biases.

    A recurrent layer adds the input bias, the state bias, and the product of weights and inputs. The exception is the
    third gate of a GRU, which multiplies the state bias by another gate.
    """
    weights, count, first = _recurrent_weights(node)
    x = given(node)[0]
    if any(source in run.offsets for source in node.all_input_nodes if source is not x and source not in weights):
        raise SeenError
    for k in range(0, first, count) if run.of(x) is not None else ():
        for term in run.of(x).known():
            inside, shape = _weights(run, node, weights[k]), (*shape_of(x)[:-1], shape_of(weights[k])[0])
            _compensate(run, weights[k + 2], _through(run, term, inside, len(shape) - 1, shape), shape[-1:])
    for k, weight in enumerate(weights):
        if (offset := run.of(weight)) is None:
            continue
        (term,) = offset.known()
        third = term.places.shape[0] // 3
        if k % count != 3 or (operator_name(node).startswith("gru") and bool(term.places[2 * third :].any())):
            raise SeenError
        _compensate(run, weights[k - 1], term, term.places.shape)


def _compensate(run: Run, bias: Any, term: Addend, shape: tuple[int, ...]) -> None:
    """Record the change of a bias that compensates for a vector that is added to the same values as the bias."""
    name = str(run.graph.parameter(bias))
    if not run.may_take(name):
        raise SeenError
    own = each_position(shape, ())
    places = term.places if term.places.shape == own.shape else own
    if (image := run.image(term, Taker(Entries.whole(name, tuple(shape)), (), own), places)) is not None:
        run.events.append(("image", image))


def _recurrent_weights(node: Node) -> tuple[list[Any], int, int]:
    """Return the weights of a recurrent layer with biases, how many weights each direction of a layer has, and how many
    weights belong to the first layer.

    Each direction has an input weight, a state weight, the biases of input and state, and possibly a projection.
    """
    if operator_name(node).endswith("_cell"):
        return list(given(node)[2:]), 4, 4
    found: list[list[Any]] = [list(a) for a in given(node)[2:4] if isinstance(a, list | tuple)]
    if not found or given(node)[3] is not True:
        raise SeenError
    rows, columns = shape_of(found[0][1])
    count = 5 if operator_name(node) == "lstm" and rows != 4 * columns else 4
    return found[0], count, count * (1 + bool(argument(node, 7, False)))

"""The effects of operators on changes of values (offsets).

An offset is the change of a value that is caused by adding a vector to a parameter.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.fx import Node

from regauge.core.translations import Entries, Image, ImageStep
from regauge.discovery.operators import SAME, argument, operator_name, shape_of, single_windows, words
from regauge.discovery.translations.expansion import LAYERS, inverse, up_to
from regauge.discovery.translations.factored_effects import (
    contracted,
    indices_of,
    moved_products,
    multiplied,
    take_back_by_layers,
)
from regauge.discovery.translations.graph import CELLS, MAXIMA, PADS, PAIRED, call, given, pads_zeros
from regauge.discovery.translations.linear_effects import (
    through_attention,
    through_bag,
    through_einsum,
    through_embedding,
    through_layer,
    through_product,
    through_recurrent,
)
from regauge.discovery.translations.offsets import (
    Monomial,
    Offset,
    SeenError,
    added,
    along,
    channels,
    each_position,
    picked,
    varied,
)
from regauge.discovery.translations.run import MOVES, Rules, Run

HIDDEN = -1e3
"""A softmax gives no weight to an attention score if a mask has replaced the score by a number below `HIDDEN`."""


def _move(run: Run, node: Node) -> Any:
    """Return the change (offset) of the result of an operator that rearranges entries.

    Each entry has the same change before and after the operator moves it.
    """
    first = given(node)[0]
    if operator_name(node) == "getitem":
        several = run.of(first)
        return several[given(node)[1]] if isinstance(several, list | tuple) else None
    sources = [source for source in node.all_input_nodes if source in run.offsets]
    values = first if isinstance(first, list | tuple) else [first]
    if any(source not in values for source in sources):
        raise SeenError
    indices = [one for one in node.all_input_nodes if one not in values]
    held = {one: run.graph.constant(one) for one in indices}
    if any(one is None for one in held.values()):
        offset = run.of(first)
        # If an index is unknown, the offset must be the same at all positions.
        if operator_name(node) == "index" and None not in given(node)[1]:
            dims = range(len(given(node)[1]))
        elif operator_name(node) == "index_select":
            dims = range(int(given(node)[1]), int(given(node)[1]) + 1)
        else:
            raise SeenError
        if not offset.is_uniform(*dims):
            raise SeenError
        held = {one: torch.zeros(shape_of(one), dtype=torch.int64) for one in indices}
    if len(sources) == 1 and len(values) == 1:
        offset = run.of(sources[0])

        def moved(array: Tensor) -> Any:
            return call(node, {sources[0]: array, **held})

        found = moved_products(node, offset, moved) if offset.has_products else None
        return offset.move(moved) if found is None else found
    return _joined(run, node, sources, held)


def _joined(run: Run, node: Node, sources: list[Node], held: Mapping[Node, Any]) -> Any:
    """Return the change of a concatenation, given the changes of the concatenated values."""

    def joined(arrays: Mapping[Node, Tensor]) -> Tensor:
        blanks = {one: torch.zeros(shape_of(one), dtype=torch.int64) for one in node.all_input_nodes}
        found: Tensor = call(node, {**blanks, **held, **arrays})
        return found

    offsets = [run.offsets[source] for source in sources]
    is_masked = any(offset.is_masked for offset in offsets)
    if all(offset.labels is None and not offset.has_products for offset in offsets):
        terms = [
            replace(term, places=joined({source: term.places}))
            for source, offset in zip(sources, offsets, strict=True)
            for term in offset.terms
        ]
        return Offset(tuple(terms), is_masked=is_masked)
    labels, last = {}, 0
    for source, offset in zip(sources, offsets, strict=True):
        own = offset.as_labels()
        labels[source] = torch.where(own == 0, 0, own + last)
        last = int(labels[source].max())
    return Offset(labels=joined(labels), is_masked=is_masked)


def _pad(run: Run, node: Node) -> Any:
    """Return the change of a padded value. The padding must consist of zeros, or of repeated entries of the same
    channel.
    """
    if pads_zeros(node):
        return _move(run, node)
    if argument(node, 2, "constant") not in ("reflect", "replicate", "circular"):
        raise SeenError
    return _resampled(run, node)


def _sum(run: Run, node: Node) -> Any:
    shape, alpha = shape_of(node), float(node.kwargs.get("alpha", 1))  # type: ignore[arg-type]
    operands = list(given(node)[:2])
    factors = [1.0, -alpha if operator_name(node) == "sub" else alpha]
    offsets = [run.of(operand) for operand in operands]
    total = added(shape, offsets, factors)
    if total is None or total.labels is not None:
        return total
    for operand, offset, factor in zip(operands, offsets, factors, strict=True):
        if offset is None and factor == 1.0:
            if total.has_products:
                total = take_back_by_layers(run, operand, total, shape)
            else:
                total = run.take_back(operand, total, lambda own: own.expand(shape))
            if total is None:
                return None
    return total


def _scale(run: Run, node: Node) -> Any:
    x, y = given(node)[:2]
    if run.of(x) is not None and run.of(y) is not None:
        raise SeenError
    if node.kwargs:  # a quotient that is rounded
        raise SeenError
    changed, other = (x, y) if run.of(x) is not None else (y, x)
    offset, is_quotient = run.of(changed), operator_name(node) == "div"
    if is_quotient and changed is y:
        raise SeenError
    if not isinstance(other, Node):
        factor = 1 / float(other) if is_quotient else float(other)
        return offset if factor == 1 else offset.then(ImageStep("scale", factor=factor))
    shape = shape_of(node)
    offset = offset.expand(shape)
    entries = run.graph.entries(other)
    if entries is not None:
        wide = [k for k, n in enumerate(entries.sizes) if n > 1]
        axes = [len(shape) - len(entries.sizes) + k for k in wide]
        # A gain of shape [channel, 1, 1] is a vector along its channels.
        strides = tuple(entries.strides[k] for k in wide)
        entries = replace(entries, sizes=tuple(entries.sizes[k] for k in wide), strides=strides)
        if entries.parameter in run.graph.ones and len(axes) == 1 and offset.is_uniform(*axes):
            run.events.append(("passed", entries))
            return offset
        if offset.labels is None and not offset.has_products:
            kind: Literal["over", "times"] = "over" if is_quotient else "times"
            return Offset(tuple(multiplied(term, kind, entries, axes) for term in offset.known()))
    own = shape_of(other)
    lead = len(shape) - len(own)
    if offset.labels is None and not offset.is_masked:
        try:
            indices = indices_of(shape)
            values = inverse(other, indices) if is_quotient else run.expansion.aligned(other, indices)
            return contracted(run, shape, offset, range(-len(shape), 0), [values])
        except SeenError:
            pass
    constant = [k for k in range(len(shape)) if k < lead or own[k - lead] == 1]
    return Offset(labels=varied(offset.as_labels(), each_position(shape, constant)), is_masked=offset.is_masked)


def _largest(run: Run, node: Node) -> Any:
    """Return the change of a maximum, minimum or smooth maximum over entries that all change by the same amount."""
    offset, dims = run.of(given(node)[0]), argument(node, 1, [])
    several = [dims] if isinstance(dims, int) else dims
    if isinstance(dims, Node) or not several or offset.is_masked or not offset.is_uniform(*several):
        raise SeenError
    value = node.meta["val"]
    if isinstance(value, Tensor):
        return _without(offset, several, value.shape, is_kept=bool(argument(node, 2, False)))
    return _without(offset, several, value[0].shape, is_kept=bool(argument(node, 2, False))), None


def _larger(run: Run, node: Node) -> Any:
    """Return the change of the larger or smaller of two values that change by the same amount."""
    shape = shape_of(node)
    offsets = [run.of(one) for one in given(node)[:2]]
    if None in offsets:
        raise SeenError
    one, other = (offset.expand(shape) for offset in offsets)
    if one.is_masked or other.is_masked or not one.is_equal(other):
        raise SeenError
    return one


def _without(offset: Offset, dims: Sequence[int], shape: Sequence[int], *, is_kept: bool) -> Offset:
    """Return the change of a reduction, such as a maximum, over entries that all change by the same amount."""

    def narrow(array: Tensor) -> Tensor:
        for d in dims:
            array = array.narrow(d, 0, 1)
        return array if is_kept else array.reshape(tuple(shape))

    found: Offset = offset.move(narrow)
    return found


def _resampled(run: Run, node: Node) -> Any:
    """Return the change of means or maxima over positions of one channel, if the entries at all positions change by the
    same amount.
    """
    name, value = operator_name(node), node.meta["val"]
    space = len(given(node)[1]) // 2 if name in PADS else int(next(one for one in name if one.isdigit()))
    first = value if isinstance(value, Tensor) else value[0]
    if run.of(given(node)[0]).is_masked:
        raise SeenError
    found = _spread(run.of(given(node)[0]), range(-space, 0), first.shape)
    return found if first is value else (found, None)


def _spread(offset: Offset, dims: Iterable[int], shape: Sequence[int]) -> Offset:
    """Return the change of a value, broadcast to a result in which the axes `dims` have other lengths.

    Raise `SeenError` unless the change is constant along `dims`.
    """
    if not offset.is_uniform(*dims):
        raise SeenError

    def spread(array: Tensor) -> Tensor:
        for d in dims:
            array = array.narrow(d, 0, 1)
        return array.expand(tuple(shape))

    found: Offset = offset.move(spread)
    return found


def _mean(run: Run, node: Node) -> Any:
    offset, dims = run.of(given(node)[0]), argument(node, 1, None)
    if dims in (None, []):
        raise SeenError
    several, is_kept = [dims] if isinstance(dims, int) else list(dims), bool(argument(node, 2, False))
    if offset.has_products and (found := _summed(run, node, offset, several, is_kept=is_kept)):
        return found
    if not offset.is_uniform(*several):
        return _mixed(offset, several, shape_of(node))
    before = shape_of(given(node)[0])
    number = torch.Size([before[d] for d in several]).numel() if operator_name(node) == "sum" else 1
    found = _without(offset, several, shape_of(node), is_kept=is_kept)
    return found if number == 1 else found.then(ImageStep("scale", factor=float(number)))


def _summed(run: Run, node: Node, offset: Offset, dims: list[int], *, is_kept: bool) -> Offset | None:
    """Return the change of a sum or mean of values. Each summed value must change by the product of a vector and other
    values of the model. Return None if the change is unknown.
    """
    before, shape = shape_of(given(node)[0]), shape_of(node)
    kept = [k for k in range(len(before)) if k not in {d % len(before) for d in dims}]
    names = {k: k - len(before) if is_kept else number - len(kept) for number, k in enumerate(kept)}
    own = [names[k] if k in names else run.expansion.summed(2).name for k in range(len(before))]
    number = 1.0 if operator_name(node) == "sum" else math.prod(before[k] for k in kept) / math.prod(before)
    try:
        return contracted(run, shape, offset, own, [[Monomial(number, ())]])
    except SeenError:
        return None


def _cumulative(run: Run, node: Node) -> Offset:
    """Return the change of a cumulative sum. The change of the operand must be constant along the axis of the sum."""
    shape = shape_of(node)
    axis = int(given(node)[1]) % len(shape)
    inner, last = run.expansion.summed(shape[axis]), indices_of(shape)[axis]
    own = [inner.name if k == axis else k - len(shape) for k in range(len(shape))]
    return contracted(run, shape, run.of(given(node)[0]), own, [up_to(last, inner)])


def _mixed(offset: Offset, dims: list[int], shape: tuple[int, ...]) -> Offset:
    """Return the change of a mean, if the averaged entries change by different amounts.

    Two means change by the same amount if their entries change by the same amounts.
    """
    if offset.is_masked:
        raise SeenError
    columns = offset.as_labels().movedim(dims, list(range(len(dims)))).flatten(0, len(dims) - 1).flatten(1)
    numbers = torch.unique(columns, dim=1, return_inverse=True)[1] + 1
    return Offset(labels=torch.where((columns == 0).all(0), 0, numbers).reshape(shape))


def _pool(run: Run, node: Node) -> Any:
    """Return the change of pooled values.

    The pooling must have no padding. The change of the operand must be constant over the pooled positions, or a single
    window must cover all positions.
    """
    offset, shape = run.of(given(node)[0]), shape_of(node)
    space = int(operator_name(node)[-2])
    is_adaptive = operator_name(node).startswith("adaptive")
    steps = [() if is_adaptive else argument(node, k, ()) for k in (1, 2, 3)]
    spatial = [k - space for k, is_single in enumerate(single_windows(steps, space)) if not is_single]
    if not is_adaptive and (any(argument(node, 3, ()) or ()) or argument(node, 6, None)):  # the divisor would change
        raise SeenError
    if not offset.is_uniform(*spatial):
        if is_adaptive and all(shape[d] == 1 for d in spatial):
            return _mixed(offset, spatial, shape)
        raise SeenError
    return _spread(offset, spatial, shape)


def _softmax(run: Run, node: Node) -> None:
    if not run.of(given(node)[0]).is_uniform(int(given(node)[1])):
        raise SeenError


def _topk(run: Run, node: Node) -> Any:
    offset, dim = run.of(given(node)[0]), int(argument(node, 2, -1))
    if not offset.is_uniform(dim) or offset.is_masked:
        raise SeenError
    shape = tuple(node.meta["val"][0].shape)
    return offset.move(lambda array: array.narrow(dim, 0, 1).expand(shape)), None


def _argmax(run: Run, node: Node) -> None:
    dim = argument(node, 1, None)
    if dim is None or run.of(given(node)[0]).is_masked or not run.of(given(node)[0]).is_uniform(int(dim)):
        raise SeenError


def _masked(run: Run, node: Node) -> Any:
    """Return the change of attention scores after a mask has excluded some of them from a softmax."""
    x, mask, value = given(node)[:3]
    if operator_name(node) == "where":
        x, mask, value = mask, x, value
    offset = run.of(x)
    if offset is None or run.of(mask) is not None or run.of(value) is not None or not _hides(run, value):
        raise SeenError
    shape = shape_of(node)
    found: Offset = offset.move(lambda array: array.expand(shape))
    return replace(found, is_masked=True)


def _hides(run: Run, value: Any) -> bool:
    """Return whether the value that a mask writes is a very negative number, which excludes entries from a softmax."""
    while isinstance(value, Node) and operator_name(value) in SAME:
        value = given(value)[0]
    if isinstance(value, Node) and operator_name(value) in words("full full_like scalar_tensor"):
        value = given(value)[0 if operator_name(value) == "scalar_tensor" else 1]
    if isinstance(value, Node) and value.op == "placeholder":
        held = run.graph.program.constants.get(value.name)
        value = float(held) if held is not None and held.numel() == 1 and not held.is_meta else None
    return isinstance(value, int | float) and value < HIDDEN


def _layer_norm(run: Run, node: Node) -> Any:
    x, sizes, gain, bias = (argument(node, k, None) for k in range(4))
    is_native = operator_name(node).startswith("native")
    if run.of(gain) is not None or (is_native and any(user.users and given(user)[1] for user in node.users)):
        raise SeenError
    _require_unseen(run.of(x), lambda array: array.flatten(-len(sizes)))
    offset, shape = run.of(bias), shape_of(x)
    found = None if offset is None else offset.move(lambda array: array.expand(shape))
    return (found, None, None) if is_native and found else found


def _group_norm(run: Run, node: Node) -> Any:
    offset, shape = run.of(given(node)[0]), shape_of(node)
    groups = int(given(node)[1])
    _require_unseen(offset, lambda array: array.reshape(shape[0], groups, -1))
    return _channel_bias(run, node, 2, 3)


def _require_unseen(offset: Offset | None, together: Callable[[Tensor], Tensor]) -> None:
    """Raise an error unless all entries that a norm combines change by the same amount.

    The function `together` reshapes an array. After reshaping, the last axis contains the entries that the norm
    combines.
    """
    if offset is not None and (offset.is_masked or not offset.move(together).is_uniform(-1)):
        raise SeenError


def _channel_bias(run: Run, node: Node, gain: int, bias: int) -> Any:
    """Return the change of the result of a channel-wise layer whose bias changes."""
    if run.of(argument(node, gain, None)) is not None:
        raise SeenError
    shift, shape = run.of(argument(node, bias, None)), shape_of(node)
    return None if shift is None else shift.move(lambda array: along(array, 1, shape))


def _batch_norm(run: Run, node: Node) -> Any:
    x, _, _, mean, variance, uses_batch = given(node)[:6]
    offset = run.of(x)
    if run.of(mean) is not None or run.of(variance) is not None:
        raise SeenError
    if offset is not None:
        if not offset.is_uniform(*(k for k in range(len(shape_of(x))) if k != 1)):
            raise SeenError
        if not uses_batch and _require_statistic(run, mean):
            for term in offset.known():  # Some of several concatenated values may have no offset.
                own = channels(term, 1)
                there = own.nonzero().flatten()
                steps, size = picked(term, own[there[0] : there[-1] + 1])
                image = Image(Entries(str(run.graph.parameter(mean)), (size,), (1,), int(there[0])), (), steps)
                run.events.append(("image", image))
    return _channel_bias(run, node, 1, 2)


def _require_statistic(run: Run, mean: Any) -> bool:
    name = run.graph.parameter(mean)
    if name is None or not run.may_take(name):
        raise SeenError
    return True


def _instance_norm(run: Run, node: Node) -> Any:
    offset = run.of(given(node)[0])
    dims = range(2, len(shape_of(node)))
    if not bool(given(node)[5]) or (offset is not None and not offset.is_uniform(*dims)):
        raise SeenError
    return _channel_bias(run, node, 1, 2)


EFFECTS: Rules = {
    **dict.fromkeys(SAME, lambda run, node: run.of(given(node)[0])),
    **dict.fromkeys(MOVES, _move),
    **dict.fromkeys(PADS, _pad),
    **dict.fromkeys(LAYERS, through_layer),
    **dict.fromkeys(words("add add_ sub"), _sum),
    **dict.fromkeys(words("mul div"), _scale),
    **dict.fromkeys(words("sum mean"), _mean),
    "cumsum": _cumulative,
    **dict.fromkeys(words("avg_pool1d avg_pool2d avg_pool3d"), _pool),
    **dict.fromkeys(words("adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d"), _pool),
    **dict.fromkeys(words("softmax _softmax _safe_softmax log_softmax _log_softmax"), _softmax),
    **dict.fromkeys(MAXIMA, _largest),
    **dict.fromkeys(PAIRED, _larger),
    **dict.fromkeys(words("max_pool1d max_pool2d max_pool3d adaptive_max_pool1d adaptive_max_pool2d"), _resampled),
    **dict.fromkeys(words("adaptive_max_pool3d max_pool2d_with_indices max_pool3d_with_indices"), _resampled),
    **dict.fromkeys(words("upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d"), _resampled),
    **dict.fromkeys(words("upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d"), _resampled),
    **dict.fromkeys(words("_upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_bilinear2d_aa"), _resampled),
    **dict.fromkeys(words("matmul bmm mm baddbmm"), through_product),
    "einsum": through_einsum,
    "embedding_bag": through_bag,
    **dict.fromkeys(words("lstm gru rnn_tanh rnn_relu"), through_recurrent),
    **dict.fromkeys(CELLS, through_recurrent),
    **dict.fromkeys(words("masked_fill where"), _masked),
    "neg": lambda run, node: run.of(given(node)[0]).then(ImageStep("scale", factor=-1.0)),
    # These operators use only the shape of their operand.
    **dict.fromkeys(words("zeros_like ones_like full_like new_zeros new_ones new_full"), lambda run, node: None),
    "topk": _topk,
    "argmax": _argmax,
    "embedding": through_embedding,
    "layer_norm": _layer_norm,
    "native_layer_norm": _layer_norm,
    "group_norm": _group_norm,
    "batch_norm": _batch_norm,
    "instance_norm": _instance_norm,
    "scaled_dot_product_attention": through_attention,
}
"""For each operator, the function that returns the change (offset) of the result, given the changes of the operands.

For operators that are not in `EFFECTS`, the change of the result is unknown. If an operand of an operator without an
effect changes, the search assumes that the outputs of the model change.
"""

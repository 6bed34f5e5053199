"""Operators that only move values: views, permutations, slices, concatenation, repetition."""

from collections.abc import Sequence
from typing import Any

from regauge.discovery import laws as law
from regauge.discovery.builder import Builder
from regauge.discovery.laws import LawOf, Value
from regauge.discovery.layout import leaf
from regauge.discovery.movement import Stacked
from regauge.discovery.operator_call import Call, NoRuleError, Rule, as_value, ints, named

Moved = Value | Stacked


def view(b: Builder, call: Call) -> Moved:
    if call.overload == "dtype":
        raise NoRuleError("bits read as another type")
    return b.view(call.x, call.shape)


def permute(b: Builder, call: Call) -> Moved:
    return b.permute(call.x, ints(call["dims"]))


def transpose(b: Builder, call: Call) -> Moved:
    x, first, second = call.x, call.first("dim0", "axis0"), call.first("dim1", "axis1")
    order = list(range(len(x.shape)))
    order[first], order[second] = order[second], order[first]
    return b.permute(x, order)


def transpose_last(b: Builder, call: Call) -> Moved:
    order = list(range(len(call.x.shape)))
    if len(order) > 1:
        order[-1], order[-2] = order[-2], order[-1]
    return b.permute(call.x, order)


def reverse_axes(b: Builder, call: Call) -> Moved:
    return b.permute(call.x, range(len(call.x.shape))[::-1])


def movedim(b: Builder, call: Call) -> Moved:
    x, source, target = call.x, ints(call["source"]), ints(call["destination"])
    ndim = len(x.shape)
    source, target = [d % ndim for d in source], [d % ndim for d in target]
    order: list[int] = [-1] * ndim
    for s, t in zip(source, target, strict=True):
        order[t] = s
    rest = iter(d for d in range(ndim) if d not in source)
    return b.permute(x, [next(rest) if d < 0 else d for d in order])


def unsqueeze(b: Builder, call: Call) -> Moved:
    return b.unsqueeze(call.x, call["dim"])


def squeeze(b: Builder, call: Call) -> Moved:
    x: Moved = call.x
    ndim = len(x.shape)
    dims = range(ndim) if "dim" not in call.arguments else [d % ndim for d in ints(call["dim"])]
    for dim in sorted(dims, reverse=True):
        if x.shape[dim] == 1:
            x = b.squeeze(x, dim)
    return x


def expand(b: Builder, call: Call) -> Value:
    return b.expand(as_value(b, call.x), call.shape)


def broadcast_tensors(b: Builder, call: Call) -> list[Value]:
    return [b.expand(as_value(b, x), shape) for x, shape in zip(call.x, call.shapes, strict=True)]


def repeat(b: Builder, call: Call) -> Moved:
    """Tile: a new uniform axis before each repeated one, merged with it."""
    x, times = as_value(b, call.x), ints(call.first("repeats", "dims"))
    times = [1] * (x.ndim - len(times)) + times
    for _ in range(len(times) - x.ndim):
        x = as_value(b, b.unsqueeze(x, 0))
    for dim, count in enumerate(times):
        if count != 1:
            wide = b.expand(as_value(b, b.unsqueeze(x, dim)), [*x.shape[:dim], count, *x.shape[dim:]])
            x = as_value(b, b.view(wide, [*x.shape[:dim], count * x.shape[dim], *x.shape[dim + 1 :]]))
    return x


def repeat_interleave(b: Builder, call: Call) -> Moved:
    """Each index repeated in place: a new uniform axis after it, merged with it."""
    x, count, dim = as_value(b, call.x), call["repeats"], call.arguments.get("dim")
    if not isinstance(count, int):
        raise NoRuleError("repeat_interleave with a tensor of counts")
    if dim is None:
        x, dim = as_value(b, b.view(x, [_numel(x.shape)])), 0
    dim %= x.ndim
    wide = b.expand(as_value(b, b.unsqueeze(x, dim + 1)), [*x.shape[: dim + 1], count, *x.shape[dim + 1 :]])
    return b.view(wide, [*x.shape[:dim], count * x.shape[dim], *x.shape[dim + 1 :]])


def narrow(b: Builder, call: Call) -> Moved:
    start = call["start"] % call.x.shape[call["dim"]]
    return b.slice(call.x, call["dim"], start, start + call["length"])


def slice_(b: Builder, call: Call) -> Moved:
    x, dim, step = call.x, call["dim"], call["step"]
    size = x.shape[dim]
    start, stop = _range(call.arguments.get("start"), call.arguments.get("end"), size)
    if step == 1:
        return b.slice(x, dim, start, max(start, stop))
    if start < step and size % step == 0 and stop > size - step + start:
        dim %= len(x.shape)
        wide = b.view(x, [*x.shape[:dim], size // step, step, *x.shape[dim + 1 :]])
        return b.select(wide, dim + 1, start)
    return _rearranged(b, as_value(b, x), [dim], call.shape)


def select(b: Builder, call: Call) -> Moved:
    return b.select(call.x, call["dim"], call["index"])


def unbind(b: Builder, call: Call) -> list[Moved]:
    x, dim = call.x, call["dim"]
    return [b.select(x, dim, k) for k in range(x.shape[dim])]


def split(b: Builder, call: Call) -> list[Moved]:
    x = call.x
    named = {"hsplit": min(1, len(x.shape) - 1), "dsplit": 2}
    dim = named.get(call.name, call.get("dim", 0)) % len(x.shape)
    result, start = [], 0
    for shape in call.shapes:
        result.append(b.slice(x, dim, start, start + shape[dim]))
        start += shape[dim]
    return result


def cat(b: Builder, call: Call) -> Value:
    return b.cat([as_value(b, x) if not isinstance(x, Value) else x for x in call["tensors"]], call.get("dim", 0))


def stack(b: Builder, call: Call) -> Stacked:
    pieces = [b.use(x) if isinstance(x, Value) else b.whole(x) for x in call["tensors"]]
    return Stacked(call.get("dim", 0) % (pieces[0].ndim + 1), pieces)


def pad(b: Builder, call: Call) -> Value:
    """Constant padding with zero is a concatenation with zeros; anything else freezes the padded axes."""
    x, widths = as_value(b, call.x), ints(call.first("pad", "padding"))
    dims = [x.ndim - 1 - k for k in range(len(widths) // 2)]
    is_constant = call.get("mode", "constant") == "constant" and not call.name.startswith(("refl", "repl"))
    is_zero = is_constant and call.get("value", 0) == 0
    if not is_zero or min(widths) < 0:
        moved = [d for k, d in enumerate(dims) if widths[2 * k] or widths[2 * k + 1]]
        along = law.linear if is_zero else law.fixed if is_constant else law.same
        return _rearranged(b, x, moved, call.shape, along)
    for k, dim in enumerate(dims):
        parts = [
            Value.fixed([width if d == dim else n for d, n in enumerate(x.shape)], is_zero=True)
            for width in (widths[2 * k], widths[2 * k + 1])
        ]
        pieces = [part for part in (parts[0], x, parts[1]) if part.shape[dim]]
        x = b.cat(pieces, dim) if len(pieces) > 1 else x
    return x


def slice_scatter(b: Builder, call: Call) -> Value:
    """A write to a range of one axis."""
    x, source = as_value(b, call["self"]), as_value(b, call["src"])
    dim, step = call["dim"] % x.ndim, call["step"]
    start, stop = _range(call.arguments.get("start"), call.arguments.get("end"), x.shape[dim])
    if step != 1:
        raise NoRuleError("a write with a stride")
    parts = [b.slice(x, dim, 0, start) if start else None, source]
    parts.append(b.slice(x, dim, stop, x.shape[dim]) if stop < x.shape[dim] else None)
    pieces = [as_value(b, part) for part in parts if part is not None]
    return b.cat(pieces, dim) if len(pieces) > 1 else pieces[0]


def select_scatter(b: Builder, call: Call) -> Value:
    """A write to one index of one axis."""
    x, dim = as_value(b, call["self"]), call["dim"]
    dim %= x.ndim
    index = call["index"] % x.shape[dim]
    source = as_value(b, b.unsqueeze(as_value(b, call["src"]), dim))
    before = [as_value(b, b.slice(x, dim, 0, index))] if index else []
    after = [as_value(b, b.slice(x, dim, index + 1, x.shape[dim]))] if index + 1 < x.shape[dim] else []
    return b.cat([*before, source, *after], dim)


def copy_into(b: Builder, call: Call) -> Value:
    """All values replaced by another tensor's."""
    wide = b.expand(as_value(b, call["src"]), call.shape)
    return wide if all(call.is_float) else b.unary(wide, law.fixed)


def rearrange(b: Builder, call: Call) -> Value:
    """Positions moved within some axes by a fixed rule: flip, roll, triangular parts."""
    x = as_value(b, call.x)
    if call.name in ("tril", "triu"):
        return _rearranged(b, x, [x.ndim - 2, x.ndim - 1], call.shape, law.linear)
    return _rearranged(b, x, ints(call.get("dims", [])) or range(x.ndim), call.shape)


def pixel_shuffle(b: Builder, call: Call) -> Moved:
    x, r = as_value(b, call.x), call["upscale_factor"]
    *lead, c, h, w = x.shape
    n = len(lead)
    wide = b.view(x, [*lead, c // (r * r), r, r, h, w])
    moved = b.permute(wide, [*range(n), n, n + 3, n + 1, n + 4, n + 2])
    return b.view(moved, call.shape)


def pixel_unshuffle(b: Builder, call: Call) -> Moved:
    x, r = as_value(b, call.x), call["downscale_factor"]
    *lead, c, h, w = x.shape
    n = len(lead)
    wide = b.view(x, [*lead, c, h // r, r, w // r, r])
    moved = b.permute(wide, [*range(n), n, n + 2, n + 4, n + 1, n + 3])
    return b.view(moved, call.shape)


def channel_shuffle(b: Builder, call: Call) -> Moved:
    x, groups = as_value(b, call.x), call["groups"]
    n, c, *rest = x.shape
    wide = b.view(x, [n, groups, c // groups, *rest])
    order = [0, 2, 1, *range(3, 3 + len(rest))]
    return b.view(b.permute(wide, order), call.shape)


def unfold_patches(b: Builder, call: Call) -> Moved:
    """im2col: N C H W to N (C K) L, where positions are frozen and channels pass."""
    x = as_value(b, call.x)
    lead, channels = list(x.shape[:-3]), x.shape[-3]
    kernel, length = call.shape[-2] // channels, call.shape[-1]
    reason = f"{b.op}: spatial axis"
    layouts = [*x.layouts[: len(lead) + 1], leaf(kernel, reason), leaf(length, reason)]
    result = Value(layouts, [*lead, channels, kernel, length])
    b.record(*(law.linear(x.axis(k), result.axis(k)) for k in range(len(lead) + 1)))
    return b.view(result, call.shape)


def _rearranged(b: Builder, x: Value, dims: Sequence[int], shape: Sequence[int], along: LawOf = law.same) -> Value:
    dims = [d % x.ndim for d in dims]
    reason = f"{b.op}: positions are moved by a fixed rule"
    layouts = [leaf(shape[k], reason) if k in dims else x.layouts[k] for k in range(x.ndim)]
    result = Value(layouts, shape, index_of=x.index_of)
    b.record(
        *(along(x.axis(k), result.axis(k)) for k in range(x.ndim) if k not in dims),
        *(law.fixed(result.axis(k), mixes=True) for k in dims),
    )
    for k in dims:
        b.freeze(x, [k], reason)
    return result


def view_as_complex(b: Builder, call: Call) -> Value:
    """The pairs of the last axis as complex numbers."""
    x = as_value(b, call.x)
    b.freeze(x, [x.ndim - 1], "real and imaginary parts")
    return b.reduce(x, [x.ndim - 1], keepdim=False)


def view_as_real(b: Builder, call: Call) -> Value:
    """Complex numbers as pairs along a new last axis."""
    x = as_value(b, call.x)
    result = Value([*x.layouts, leaf(2)], call.shape, virtual=x.virtual)
    b.record(*(law.linear(x.axis(k), result.axis(k)) for k in range(x.ndim)))
    b.freeze(result, [x.ndim], "real and imaginary parts")
    return result


def _range(start: Any, stop: Any, size: int) -> tuple[int, int]:
    first, last, _ = slice(start, stop).indices(size)
    return first, last


def _numel(shape: Sequence[int]) -> int:
    result = 1
    for n in shape:
        result *= n
    return result


RULES: dict[str, Rule] = {
    **named(view, "view _unsafe_view reshape flatten unflatten view_as reshape_as _reshape_alias"),
    **named(permute, "permute"),
    **named(transpose, "transpose swapaxes swapdims"),
    **named(transpose_last, "t mT matrix_H adjoint"),
    **named(movedim, "movedim moveaxis"),
    **named(squeeze, "squeeze"),
    **named(expand, "expand expand_as broadcast_to"),
    **named(repeat, "repeat tile"),
    **named(split, "split split_with_sizes chunk tensor_split hsplit vsplit dsplit unsafe_split unsafe_chunk"),
    **named(cat, "cat concat concatenate"),
    **named(pad, "pad constant_pad_nd reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d"),
    **named(rearrange, "flip roll tril triu"),
    "numpy_T": reverse_axes,
    "unsqueeze": unsqueeze,
    "broadcast_tensors": broadcast_tensors,
    "repeat_interleave": repeat_interleave,
    "narrow": narrow,
    "slice": slice_,
    "select": select,
    "unbind": unbind,
    "stack": stack,
    "slice_scatter": slice_scatter,
    "select_scatter": select_scatter,
    "copy": copy_into,
    "pixel_shuffle": pixel_shuffle,
    "pixel_unshuffle": pixel_unshuffle,
    "channel_shuffle": channel_shuffle,
    "native_channel_shuffle": channel_shuffle,
    "im2col": unfold_patches,
    "view_as_complex": view_as_complex,
    "view_as_real": view_as_real,
}

ACCEPTS_STACK = {
    "view", "_unsafe_view", "reshape", "flatten", "unflatten", "permute", "transpose", "swapaxes", "movedim",
    "squeeze", "unsqueeze", "slice", "select", "unbind", "split", "split_with_sizes", "chunk", "narrow",
    "clone", "contiguous", "detach", "alias", "dropout", "_to_copy", "to", "stack", "cat",
}  # fmt: skip

"""Operators that only rearrange entries: views, permutations, slices, concatenation, repetition."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from regauge.discovery import laws as law
from regauge.discovery.builder import Builder
from regauge.discovery.laws import LawOf, Value
from regauge.discovery.movement import Stacked
from regauge.discovery.operators import Call, NoRuleError, Rule, as_value, ints, named


def view(b: Builder, call: Call) -> Any:
    if call.overload == "dtype":
        raise NoRuleError("bits read as another type")
    return b.view(call.x, call.shape)


def permute(b: Builder, call: Call) -> Any:
    """Return the result of an operator that permutes axes, such as transpose.

    To find the permutation, the operator is run on a tensor with axes of sizes 1, 2, 3 and so on.
    """
    _, *rest = call.arguments.items()
    numbers = torch.empty([*range(1, len(call.x.shape) + 1)], device="meta")
    moved = getattr(torch.ops.aten, call.name)(numbers, **dict(rest))
    return b.permute(call.x, [n - 1 for n in moved.shape])


def squeeze(b: Builder, call: Call) -> Any:
    x: Value | Stacked = call.x
    ndim = len(x.shape)
    dims = range(ndim) if "dim" not in call.arguments else [d % ndim for d in ints(call["dim"])]
    for dim in sorted(dims, reverse=True):
        if x.shape[dim] == 1:
            x = b.select(x, dim, 0)
    return x


def repeat(b: Builder, call: Call) -> Value:
    """Repeat axes as a whole (repeat, tile)."""
    x, times = as_value(b, call.x), ints(call.first("repeats", "dims"))
    times = [1] * (x.ndim - len(times)) + times
    for _ in range(len(times) - x.ndim):
        x = b.unsqueeze(x, 0)
    for dim, count in enumerate(times):
        x = x if count == 1 else b.repeat(x, dim, count, is_inner=False)
    return x


def repeat_interleave(b: Builder, call: Call) -> Value:
    """Repeat each index of an axis in place (repeat_interleave)."""
    x, count, dim = as_value(b, call.x), call["repeats"], call.arguments.get("dim")
    if not isinstance(count, int):
        raise NoRuleError("repeat_interleave with a tensor of counts")
    if dim is None:
        x, dim = as_value(b, b.view(x, [math.prod(x.shape)])), 0
    return b.repeat(x, dim % x.ndim, count, is_inner=True)


def narrow(b: Builder, call: Call) -> Any:
    start = call["start"] % call.x.shape[call["dim"]]
    return b.slice(call.x, call["dim"], start, start + call["length"])


def slice_(b: Builder, call: Call) -> Any:
    x, dim, step = call.x, call["dim"] % len(call.x.shape), call["step"]
    size = x.shape[dim]
    start, stop = _range(call, size)
    if step == 1:
        return b.slice(x, dim, start, max(start, stop))
    if start < step and size % step == 0 and stop > size - step + start:
        wide = b.view(x, [*x.shape[:dim], size // step, step, *x.shape[dim + 1 :]])
        return b.select(wide, dim + 1, start)
    return _rearrange(b, as_value(b, x), [dim], call.shape)


def split(b: Builder, call: Call) -> list[Any]:
    x, result, start = call.x, [], 0
    dim = {"hsplit": min(1, len(x.shape) - 1), "dsplit": 2}.get(call.name, call.get("dim", 0)) % len(x.shape)
    for shape in call.shapes:
        result.append(b.slice(x, dim, start, start + shape[dim]))
        start += shape[dim]
    return result


def cat(b: Builder, call: Call) -> Value:
    return b.cat([as_value(b, x) if not isinstance(x, Value) else x for x in call["tensors"]], call.get("dim", 0))


def cat_wide(b: Builder, call: Call) -> Value:
    """Concatenate tensors after adding the axes that the tensors lack (hstack, vstack, dstack, column_stack)."""
    first = {"vstack": [0], "dstack": [0, 2], "column_stack": [1]}.get(call.name, [])
    dim = {"vstack": 0, "dstack": 2, "column_stack": 1}.get(call.name)
    pieces = []
    for tensor in call["tensors"]:
        x = as_value(b, tensor)
        if not x.ndim:
            raise NoRuleError("numbers side by side")
        if x.ndim == 1:
            for new in first:
                x = b.unsqueeze(x, new)
        elif x.ndim == 2 and call.name == "dstack":
            x = b.unsqueeze(x, 2)
        pieces.append(x)
    return b.cat(pieces, min(1, pieces[0].ndim - 1) if dim is None else dim)


def stack(b: Builder, call: Call) -> Stacked:
    pieces = [b.use(x) if isinstance(x, Value) else b.whole(x) for x in call["tensors"]]
    return Stacked(call.get("dim", 0) % (pieces[0].ndim + 1), pieces)


def pad(b: Builder, call: Call) -> Value:
    """Pad a tensor. Padding with a number is a concatenation; any other padding freezes the padded axes."""
    x, widths = as_value(b, call.x), ints(call.first("pad", "padding"))
    dims = [x.ndim - 1 - k for k in range(len(widths) // 2)]
    is_constant = call.get("mode", "constant") == "constant" and not call.name.startswith(("refl", "repl"))
    is_zero = is_constant and not call.get("value", 0)
    if not is_constant or min(widths) < 0:
        moved = [d for k, d in enumerate(dims) if widths[2 * k] or widths[2 * k + 1]]
        return _rearrange(b, x, moved, call.shape, law.linear if is_zero else law.fixed if is_constant else law.same)
    for k, dim in enumerate(dims):
        before, after = (
            Value.fixed([width if d == dim else n for d, n in enumerate(x.shape)], is_zero, frozenset(range(x.ndim)))
            for width in (widths[2 * k], widths[2 * k + 1])
        )
        x = _join(b, [before, x, after], dim)
    return x


def write(b: Builder, call: Call) -> Value:
    """Write a tensor into a range of one axis, or at one index of the axis."""
    x, source = as_value(b, call["self"]), as_value(b, call["src"])
    dim = call["dim"] % x.ndim
    size = x.shape[dim]
    if call.name == "select_scatter":
        source, start = b.unsqueeze(source, dim), call["index"] % size
        stop = start + 1
    elif call["step"] == 1:
        start, stop = _range(call, size)
    else:
        raise NoRuleError("a write with a stride")
    return _join(b, [b.slice(x, dim, 0, start), source, b.slice(x, dim, stop, size)], dim)


def copy_into(b: Builder, call: Call) -> Value:
    """Replace all entries of a tensor by the entries of another tensor."""
    wide = b.expand(as_value(b, call["src"]), call.shape)
    return wide if all(call.is_float) else b.unary(wide, law.fixed)


def rearrange(b: Builder, call: Call) -> Value:
    """Rearrange positions along some axes by a fixed rule (flip, roll, triangular parts)."""
    x = as_value(b, call.x)
    if call.name in ("tril", "triu"):
        return _rearrange(b, x, [x.ndim - 2, x.ndim - 1], call.shape, law.linear)
    return _rearrange(b, x, ints(call.get("dims", [])) or range(x.ndim), call.shape)


def shuffle(b: Builder, call: Call) -> Any:
    """Rearrange channels and pixels (pixel_shuffle, pixel_unshuffle, channel_shuffle): split, permute and merge
    axes.
    """
    x = as_value(b, call.x)
    if call.name.endswith("channel_shuffle"):
        n, (c, *space), groups = 1, x.shape[1:], call["groups"]
        wide, order = [groups, c // groups, *space], [1, 0, *range(2, 2 + len(space))]
    else:
        n, (c, h, w) = x.ndim - 3, x.shape[-3:]
        r = call.first("upscale_factor", "downscale_factor")
        if call.name == "pixel_shuffle":
            wide, order = [c // (r * r), r, r, h, w], [0, 3, 1, 4, 2]
        else:
            wide, order = [c, h // r, r, w // r, r], [0, 2, 4, 1, 3]
    split: Any = b.view(x, [*x.shape[:n], *wide])
    return b.view(b.permute(split, [*range(n), *(n + k for k in order)]), call.shape)


def unfold_patches(b: Builder, call: Call) -> Any:
    """Return the patches of images of shape N C H W, with the shape N (C K) L (im2col).

    Spatial positions are frozen, and transformations of channels also act on the result.
    """
    x = as_value(b, call.x)
    *lead, channels = x.shape[:-2]
    shape = [*lead, channels, call.shape[-2] // channels, call.shape[-1]]
    sources = [*range(x.ndim - 2), None, None]
    return b.view(b.carry(x, sources, shape, law.linear, ended=None, reason=f"{b.op}: spatial axis"), call.shape)


def unfold_windows(b: Builder, call: Call) -> Any:
    """Return sliding windows along one axis of a tensor. A new last axis indexes the positions within a window.

    If the windows cover the axis without overlap, the axis is split by a view.
    """
    x, size, step = call.x, call["size"], call["step"]
    ndim = len(x.shape)
    if not ndim:
        raise NoRuleError("windows of a number")
    dim = call["dimension"] % ndim
    if size == step and x.shape[dim] % size == 0:
        wide: Any = b.view(x, [*x.shape[:dim], x.shape[dim] // size, size, *x.shape[dim + 1 :]])
        return b.permute(wide, [k for k in range(ndim + 1) if k != dim + 1] + [dim + 1])
    sources = [*(None if k == dim else k for k in range(ndim)), None]
    reason = f"{b.op}: positions are moved by a fixed rule"
    return b.carry(as_value(b, x), sources, call.shape, law.same, ended=None, reason=reason)


def view_as_complex(b: Builder, call: Call) -> Value:
    """Return complex numbers whose real and imaginary parts are the pairs along the last axis."""
    x = as_value(b, call.x)
    return b.carry(x, range(x.ndim - 1), call.shape, law.linear, ended=None, reason="real and imaginary parts")


def complex_of(b: Builder, call: Call) -> Value:
    """Return complex numbers with given real and imaginary parts."""
    return b.add([as_value(b, call["real"]), as_value(b, call["imag"])], call.shape)


def view_as_real(b: Builder, call: Call) -> Value:
    """Return the real and imaginary parts of complex numbers along a new last axis."""
    x = as_value(b, call.x)
    return b.carry(x, [*range(x.ndim), None], call.shape, law.linear, reason="real and imaginary parts")


def _join(b: Builder, pieces: Sequence[Value], dim: int) -> Value:
    kept = [piece for piece in pieces if piece.shape[dim]]
    return b.cat(kept, dim) if len(kept) > 1 else kept[0]


def _rearrange(b: Builder, x: Value, dims: Sequence[int], shape: Sequence[int], along: LawOf = law.same) -> Value:
    sources = [None if k in {d % x.ndim for d in dims} else k for k in range(x.ndim)]
    return b.carry(x, sources, shape, along, ended=None, reason=f"{b.op}: positions are moved by a fixed rule")


def _range(call: Call, size: int) -> tuple[int, int]:
    start, stop, _ = slice(call.arguments.get("start"), call.arguments.get("end")).indices(size)
    return start, stop


RULES: dict[str, Rule] = {
    **named(view, "view _unsafe_view reshape flatten unflatten view_as reshape_as _reshape_alias"),
    **named(permute, "permute transpose swapaxes swapdims t mT matrix_H adjoint movedim moveaxis"),
    **named(squeeze, "squeeze"),
    **named(lambda b, call: b.expand(as_value(b, call.x), call.shape), "expand expand_as broadcast_to"),
    **named(repeat, "repeat tile"),
    **named(split, "split split_with_sizes chunk tensor_split hsplit vsplit dsplit unsafe_split unsafe_chunk"),
    **named(cat, "cat concat concatenate"),
    **named(cat_wide, "hstack vstack dstack column_stack"),
    **named(pad, "pad constant_pad_nd reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d"),
    **named(rearrange, "flip roll tril triu"),
    **named(write, "slice_scatter select_scatter"),
    **named(shuffle, "pixel_shuffle pixel_unshuffle channel_shuffle native_channel_shuffle"),
    "numpy_T": lambda b, call: b.permute(call.x, range(len(call.x.shape))[::-1]),
    "unsqueeze": lambda b, call: b.unsqueeze(call.x, call["dim"]),
    "broadcast_tensors": lambda b, call: [b.expand(as_value(b, x), call.shape) for x in call.x],
    "repeat_interleave": repeat_interleave,
    "narrow": narrow,
    "slice": slice_,
    "select": lambda b, call: b.select(call.x, call["dim"], call["index"]),
    "unbind": lambda b, call: [b.select(call.x, call["dim"], k) for k in range(call.x.shape[call["dim"]])],
    "stack": stack,
    "copy": copy_into,
    "im2col": unfold_patches,
    "unfold": unfold_windows,
    "complex": complex_of,
    "view_as_complex": view_as_complex,
    "view_as_real": view_as_real,
}

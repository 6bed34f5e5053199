"""Pooling, resampling and patches.

Transformations of channels also act on the result. Spatial positions are frozen unless each window is a single entry.
"""

from regauge.discovery import laws as law
from regauge.discovery.builder import Builder
from regauge.discovery.laws import LawOf, Value
from regauge.discovery.layout import leaf
from regauge.discovery.operators import Call, Rule, as_value, named, single_windows


def pool(along: LawOf) -> Rule:
    """Return a rule for pooling or resampling, given the constraint (law) on channels. Spatial axes are frozen."""

    def rule(b: Builder, call: Call) -> list[Value]:
        x = as_value(b, call.x)
        digits = [c for c in call.name if c.isdigit()]
        space = int(digits[-1]) if digits else x.ndim - 2
        lead = x.ndim - space
        steps = [call.get(key, []) for key in ("kernel_size", "stride", "padding")]
        places = [lead + k if is_single else None for k, is_single in enumerate(single_windows(steps, space))]
        results = []
        for k, shape in enumerate(call.shapes):
            is_global = all(n == 1 for n in shape[lead:]) and "adaptive" in call.name and k == 0
            results.append(
                b.carry(
                    x, [*range(lead), *places], shape, law.compared if k else along,
                    ended=law.fixed if is_global else None, reason=f"{b.op}: spatial axis",
                )
            )  # fmt: skip
        return results

    return rule


def unpool(b: Builder, call: Call) -> Value:
    """Return a tensor of zeros in which pooled maxima are written to their original positions."""
    x, positions = as_value(b, call["self"]), as_value(b, call["indices"])
    lead = x.ndim - (3 if call.name.endswith("3d") else 2)
    reason = f"{b.op}: spatial axis"
    for k in range(lead):
        b.tie(x.layouts[k], positions.layouts[k])
    result = Value([*x.layouts[:lead], *(leaf(n, reason) for n in call.shape[lead:])], call.shape)
    laws = [law.masked(positions.axis(k), x.axis(k), result.axis(k)) for k in range(lead)]
    b.record(*laws, *(law.mixed(result.axis(k)) for k in range(lead, x.ndim)))
    for value in (x, positions):
        b.freeze(value, range(lead, x.ndim), reason)
    return result


def sample(b: Builder, call: Call) -> Value:
    """Return the entries of an image or volume, sampled at the positions of a grid."""
    x, grid = as_value(b, call["input"]), as_value(b, call["grid"])
    reason = f"{b.op}: positions are read from a grid"
    b.freeze(grid, reason=reason)
    sources = [None, 1, *[None] * (x.ndim - 2)]
    return b.carry(x, sources, call.shape, law.linear, ended=None, reason=reason)


def affine_grid(b: Builder, call: Call) -> Value:
    """Return the positions of a regular grid, transformed by a matrix."""
    sources = [0, *[None] * (len(call.shape) - 2), 1]
    return b.carry(as_value(b, call.x), sources, call.shape, law.linear, ended=None, reason=f"{b.op}: positions")


def fold_patches(b: Builder, call: Call) -> Value:
    """Return images of shape N C H W, assembled from patches of shape N (C K) L (col2im).

    Spatial positions are frozen, and transformations of channels also act on the result.
    """
    x = as_value(b, call.x)
    *lead, rows, places = x.shape
    channels = call.shape[-3]
    wide = as_value(b, b.view(x, [*lead, channels, rows // channels, places]))
    sources = [*range(len(lead) + 1), None, None]
    return b.carry(wide, sources, call.shape, law.linear, ended=None, reason=f"{b.op}: spatial axis")


RULES: dict[str, Rule] = {
    **named(pool(law.positive), "max_pool1d max_pool2d max_pool3d adaptive_max_pool1d adaptive_max_pool2d"),
    **named(pool(law.positive), "max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool3d"),
    **named(pool(law.linear), "avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d"),
    **named(pool(law.linear), "adaptive_avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d"),
    **named(pool(law.linear), "upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d"),
    **named(pool(law.linear), "upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d"),
    **named(pool(law.linear), "_upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d"),
    **named(pool(law.linear), "_upsample_bilinear2d_aa _upsample_bicubic2d_aa"),
    **named(unpool, "max_unpool2d max_unpool3d"),
    **named(sample, "grid_sampler grid_sampler_2d grid_sampler_3d"),
    "affine_grid_generator": affine_grid,
    "col2im": fold_patches,
}

"""Copies with moved running statistics: found where all scales are balanced, and only they take over statistics.

A scale of a filter that gamma takes back while sigma stays moves the running mean and leaves the variance, against what
the activations do. It keeps the function with statistics as stored, and statistics that are computed anew undo a part
of it. So the second network keeps its statistics, unless these are those of the first network, moved in just this way.
The variances tell: in a copy they are those of the first network, whereas in a network that was trained they follow the
scales of its own filters.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from regauge.alignment.engine.frames import Frame, Scales, balances_of
from regauge.alignment.problem import Problem
from regauge.alignment.result import Results
from regauge.core.symmetry import Symmetry

EQUAL_TENSORS = 1e-5
"""Tensors whose distance is below this share of their norm are equal within rounding; so much is lost in float32."""
MOVED = 0.25
"""Statistics are those of the first network, moved, if taking these over leaves less than this share of their gap."""


def match_frames(problem: Problem, scales: Scales, match: Callable[[Frame], Results]) -> Results:
    """Match pairs where running statistics stay, and copies with moved statistics where these are balanced, too.

    Args:
        problem: The pairs.
        scales: As in `WeightMatching`.
        match: Matches the pairs in a frame.
    """
    symmetry = problem.symmetry
    found = match(Frame.of(problem.a, problem.b, symmetry, scales))
    if "move" not in balances_of(symmetry, scales, problem.task):
        return found
    may_be_copies = have_equal_variances(symmetry, problem.a, problem.b) & ~are_equal(problem.a, found.params)
    if not bool(may_be_copies.any()):
        return found
    other = match(Frame.of(problem.a, problem.b, symmetry, scales, "move"))
    is_copy = may_be_copies & are_moved_copies(symmetry, problem.a, found.params, other.params)
    return replace(found.but(is_copy, other), notes=other.notes if bool(is_copy.all()) else found.notes)


def are_moved_copies(
    symmetry: Symmetry, a: Mapping[str, Tensor], kept: Mapping[str, Tensor], moved: Mapping[str, Tensor]
) -> Bool[Tensor, " pair"]:
    """Whether second networks have the statistics of the first ones, moved against their activations.

    Args:
        symmetry: The symmetry of all networks.
        a: The first networks, `[pair, ...]`.
        kept: The second ones, aligned with their own statistics.
        moved: The second ones with the statistics of the first taken over.
    """
    before, after = (statistics_gap(symmetry, a, other) for other in (kept, moved))
    return (after < MOVED * before) | are_equal(a, moved)


def have_equal_variances(symmetry: Symmetry, a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Bool[Tensor, " pair"]:
    """Whether the statistics that are reordered at most are nearly those of the first networks, in any order."""
    moved = {p.parameter for group in symmetry.groups for p in group.placements if any((*p.scale, *p.sign))}
    kept = [name for name in symmetry.buffers if name in symmetry.sites and name not in moved]
    ordered = [{name: one[name].flatten(1).sort(1).values for name in kept} for one in (a, b)]
    return _measure_gap(*ordered) < MOVED


def statistics_gap(symmetry: Symmetry, a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Float64[Tensor, " pair"]:
    """The distance of running statistics from those of the first networks, as a share of their size."""
    names = [name for name in symmetry.buffers if name in symmetry.sites]
    return _measure_gap(*({name: one[name] for name in names} for one in (a, b)))


def _measure_gap(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Float64[Tensor, " pair"]:
    """The root of the mean squared distance of tensors `[pair, ...]`, each as a share of the first one's norm."""
    shares = [torch.zeros(1, dtype=torch.float64)] * (not a)
    for name, tensor in a.items():
        x, y = (one.detach().cpu().double().flatten(1) for one in (tensor, b[name]))
        square = x.square().sum(1)
        shares.append((x - y).square().sum(1) / torch.where(square == 0, 1.0, square))
    return torch.stack(shares).mean(0).sqrt()


def are_equal(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Bool[Tensor, " pair"]:
    """Whether networks `[pair, ...]` are equal within rounding: all their values, running statistics included."""
    pairs = len(next(iter(b.values())))
    result = torch.ones(pairs, dtype=torch.bool)
    for name, x in a.items():
        if x.is_floating_point():
            wide = torch.promote_types(x.dtype, torch.float32)
            first, second = x.detach().to(wide), b[name].detach().to(x.device, wide)
            result &= _norms(first - second) <= share_of_rounding((x.dtype, b[name].dtype)) * _norms(first)
    return result


def share_of_rounding(dtypes: Iterable[torch.dtype]) -> float:
    """The share of the norm of a tensor that rounding may change, in the coarsest of some dtypes."""
    return max(EQUAL_TENSORS, *(2 * torch.finfo(dtype).eps for dtype in dtypes))


def _norms(tensor: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(tensor.flatten(1), dim=1)
    return norms.double().cpu()

"""Matching of two networks in memory, and measurement of their outputs and of the effect of rounding."""

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from regauge.alignment import align
from regauge.alignment.methods.weight_matching import WeightMatching
from regauge.alignment.problem import bind_networks
from regauge.alignment.representatives import has_representatives, in_coordinates_of
from regauge.alignment.result import Result
from regauge.canonical.null_spaces import without_null_spaces
from regauge.comparison.fingerprints import fingerprint
from regauge.comparison.matched import Matched
from regauge.comparison.pair import Pair
from regauge.comparison.strangers import estimate_chance
from regauge.comparison.verdicts import MOVED
from regauge.connect import line
from regauge.core.balance import balance, has_balance
from regauge.core.behind_gains import zero_gains
from regauge.core.element import Element
from regauge.core.interpolation import distance
from regauge.core.params import Params
from regauge.core.symmetry import Symmetry
from regauge.core.task import Task

ROTATED = 0.8
"""A rotation is accepted if the distance after the rotation is less than this fraction of the distance after
permutations.

The bound is below one because a rotation brings any two networks somewhat closer.
"""
FUNCTION_POINTS = 11
"""The number of networks on a linear path that are evaluated, including both endpoints and the midpoint."""


def match_whole(
    a: Mapping[str, Tensor],
    b: Mapping[str, Tensor],
    symmetry: Symmetry,
    *,
    task: Task | None,
    references: Sequence[Mapping[str, Tensor]],
) -> Matched:
    """Align two networks in memory by their weights or by their function.

    Networks that differ only by translations and gains have the same representatives. Therefore representatives are
    aligned instead of networks. If a matrix product does not have full rank, its factors contain components that do not
    affect the product. Two networks with the same function can differ in components that do not affect a product, and
    then no element maps one network to the other. If a distance remains after alignment, the factors are therefore
    aligned again without components that do not affect a product. Residual streams are rotated if rotations bring the
    networks much closer than permutations.

    Raises:
        KeyError: A parameter on which the symmetry acts is missing.
        ValueError: The networks do not fit the symmetry, contain NaN or Inf, or are populations.
    """
    symmetry = bind_networks([a, b], symmetry, "compare single networks, two at a time")
    given, behind, is_factorized = (dict(a), dict(b)), symmetry, False
    first, second = given
    if has_representatives(symmetry):
        (first, second), behind = (symmetry.split(one)[0] for one in given), symmetry.on_representatives()
    ignored = {*symmetry.buffers, *(name for names in symmetry.tied for name in names[1:])}
    result, left = _align(first, second, behind, ignored)
    control = behind
    if left > MOVED * distance(*given, ignored):
        whole = [without_null_spaces(one, behind) for one in (first, second)]
        if any(two[n] is not one[n] for one, two in zip((first, second), whole, strict=True) for n in one):
            # All tensors in float64, the dtype of those without null spaces, because products need one dtype.
            first, second = ({n: t.double() if t.is_floating_point() else t for n, t in one.items()} for one in whole)
            is_factorized = True
            result, left = _align(first, second, behind, ignored)
        names = symmetry.rotatable
        is_free = not any(bool(zero) for one in (first, second) for zero in zero_gains(symmetry, one, names).values())
        if left > MOVED * distance(*given, ignored) and names and is_free:
            # Somebody may have rotated the streams of B, so rotations are tried too.
            control = symmetry.on_representatives(rotate=True)
            other, less = _align(first, second, control, ignored)
            if less < ROTATED * left:
                result, behind = other, control
    own, *numbers = (fingerprint(one, symmetry) for one in (*given, *references))
    is_same = first is given[0]
    element = result.element if is_same or is_factorized else in_coordinates_of(symmetry, result.element, given)
    moved = (first, result.params) if is_same or is_factorized else (given[0], symmetry.act(element, given[1]))
    return Matched(
        Pair(first, second, behind),
        result.element,
        chance=lambda: estimate_chance(second, control, lambda other: (first, other), control),
        tested=Pair(*given, symmetry),
        stored=None if is_same else Pair(*given, symmetry),
        noise=lambda precisions: rounding_noise(given, precisions, symmetry, behind, result.element, ignored),
        is_factorized=is_factorized,
        distances=[float((own - other).norm()) for other in numbers],
        balanced=_measure_balanced(first, result.params, behind, ignored),
        function=None if task is None else measure_function(*given, moved, task),
        whole=(symmetry, element),
        notes=result.notes,
    )


def measure_function(a: Params, b: Params, aligned: tuple[Params, Params], task: Task) -> dict[str, float]:
    """Measure the agreement of outputs, losses, barriers before and after alignment, and the midpoint loss on data.

    Args:
        a: The first network.
        b: The second network.
        aligned: The first network, and the second network aligned to it. The barrier after alignment is measured
            between the networks in `aligned`.
        task: Model, data and loss.

    Returns: "change of outputs" is `|f_b - f_a| / |f_a|` over all outputs. "same predictions" is the fraction of
        examples with the same largest output, if targets are class labels. Losses are in the unit of the criterion.
    """
    before, after = line(a, b, task, FUNCTION_POINTS), line(*aligned, task, FUNCTION_POINTS)
    metrics = [{n: v for n, v in row.items() if n != "t"} for row in (before.table[0], before.table[-1])]
    result = _agreement(a, b, task)
    result |= {f"{name} of {which}": one[name] for name in metrics[0] for which, one in zip("AB", metrics, strict=True)}
    result |= {"barrier as stored": before.barrier, "barrier after alignment": after.barrier}
    result["loss of the merge"] = after.table[FUNCTION_POINTS // 2]["loss"]
    return result


def rounding_noise(
    networks: Sequence[Mapping[str, Tensor]],
    precisions: Sequence[float],
    symmetry: Symmetry,
    behind: Symmetry,
    element: Element,
    ignored: set[str],
) -> float:
    """Estimate how much rounding changes the distance between the representatives of two networks, from which
    translations and gains are removed.

    If a translation is large compared with the weights, rounding errors of the stored weights are proportional to the
    translation. The rounding errors remain after the translation is removed. For the estimate, each entry of a network
    is perturbed at random by up to half the spacing of its format. The estimate is the change of the representative
    that the perturbation causes.

    Args:
        networks: The first and the second network as stored.
        precisions: For each network, the spacing of numbers near one in its format.
        symmetry: The symmetry of both networks.
        behind: The symmetry of the representatives.
        element: The element that aligns the second representative to the first.
        ignored: The names of tensors that the distance ignores.

    Returns:
        The Euclidean distance, in the coordinates of the first network's representative.
    """
    blank, total = behind.identity(), 0.0
    for params, precision, mover in zip(networks, precisions, (blank, element), strict=True):
        wide = {n: t.double() if t.is_floating_point() else t for n, t in params.items()}
        near = {n: perturb(n, t, precision) for n, t in wide.items()}
        here, there = (behind.act(mover, symmetry.split(one)[0]) for one in (wide, near))
        total += distance(here, there, ignored) ** 2
    return float(total**0.5)


def perturb(name: str, tensor: Tensor, precision: float) -> Tensor:
    """Return a float64 tensor with random errors as large as the errors of rounding to a format of a given
    precision.
    """
    if not tensor.is_floating_point():
        return tensor
    source = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    part = torch.rand(tensor.shape, generator=source, dtype=torch.float64).to(tensor.device) - 0.5
    return tensor.double() * (1 + precision * part)


def _measure_balanced(first: Params, second: Params, behind: Symmetry, ignored: set[str]) -> tuple[float, float, float]:
    """Return the distance between two aligned networks after both are balanced, and the norms of both."""
    if has_balance(behind):
        element = balance(first, behind)
        first, second = behind.act(element, first), behind.act(element, second)
        # The scales of the second network fit the unbalanced first network, so it is balanced too.
        second = behind.act(balance(second, behind), second)
    blank = {n: t.new_zeros(t.shape) for n, t in first.items()}
    return distance(first, second, ignored), distance(first, blank, ignored), distance(second, blank, ignored)


def _align(first: Params, second: Params, behind: Symmetry, ignored: set[str]) -> tuple[Result[Params], float]:
    """Align networks without translations and gains (representatives) by their weights. Return the result and the
    remaining distance.
    """
    result = align(first, second, behind, method=WeightMatching())
    return result, distance(first, result.params, ignored)


def _agreement(a: Mapping[str, Tensor], b: Mapping[str, Tensor], task: Task) -> dict[str, float]:
    gap = size = same = count = 0.0
    with torch.no_grad():
        for inputs, targets in task.batches:
            first, second = task.run(a, inputs).double(), task.run(b, inputs).double()
            gap, size = gap + float((second - first).square().sum()), size + float(first.square().sum())
            if _are_classes(first, targets):
                same += float((first.argmax(-1) == second.argmax(-1)).sum())
                count += targets.numel()
    result = {"change of outputs": (gap / size) ** 0.5 if size else float(gap > 0)}
    return result | ({"same predictions": same / count} if count else {})


def _are_classes(outputs: Tensor, targets: Any) -> bool:
    return isinstance(targets, Tensor) and not targets.is_floating_point() and outputs.shape[:-1] == targets.shape

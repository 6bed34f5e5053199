"""How far apart two orbits are."""

from collections.abc import Mapping

import torch
from torch import Tensor

from regauge.alignment import Method
from regauge.canonical.canonicalize import canonicalize, match_canonical
from regauge.core.interpolation import distance
from regauge.core.params import require_same_shapes
from regauge.core.symmetry import Symmetry
from regauge.core.task import Task


def orbit_distance(
    params_a: Mapping[str, Tensor],
    params_b: Mapping[str, Tensor],
    symmetry: Symmetry,
    *,
    method: Method | None = None,
    task: Task | None = None,
    generator: torch.Generator | None = None,
) -> float:
    """How far apart two networks are when their symmetry does not count.

    Both are canonicalized, the second is aligned to the first, and the Euclidean distance of their parameters is
    taken (without buffers; scales are fixed by unit norms, not chosen to bring the networks together). It is zero
    for two networks on one orbit, and the same wherever on their orbits the networks are, up to rounding. Since
    matching ends in a local optimum, it is an upper bound of the smallest such distance.

    Args:
        params_a: One network.
        params_b: Another network of the same architecture.
        symmetry: The symmetry of the architecture.
        method: How the second is aligned; `WeightMatching(scales="keep")` unless given.
        task: For methods that use one.
        generator: For methods that use chance.

    Raises:
        KeyError: A parameter that the symmetry moves is missing.
        ValueError: The networks have different parameters, do not fit the symmetry, hold NaN or Inf, or are
            populations.
    """
    require_same_shapes(params_a, params_b)
    symmetry = symmetry.bind(params_a)
    first, second = canonicalize(params_a, symmetry), canonicalize(params_b, symmetry)
    element = match_canonical(first, second, symmetry, method=method, task=task, generator=generator)
    ignored = {*symmetry.buffers, *(name for names in symmetry.tied for name in names[1:])}
    return min(distance(first, b, ignored) for b in (second, symmetry.act(element, second)))

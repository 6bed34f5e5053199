"""Matching of two networks whose values are all equal, by the identity."""

from collections.abc import Mapping

import torch
from torch import Tensor

from regauge.checkpoints.checkpoint import Checkpoint
from regauge.comparison.matched import Matched
from regauge.comparison.pair import Pair
from regauge.core.params import require_finite
from regauge.core.symmetry import Symmetry


def match_equal(
    a: Mapping[str, Tensor] | Checkpoint, b: Mapping[str, Tensor] | Checkpoint, symmetry: Symmetry
) -> Matched | None:
    """Match two networks by the identity if all compared values are equal; return None at the first difference.

    Raises:
        KeyError: A parameter that the symmetry moves is missing.
        ValueError: The networks do not fit the symmetry, or hold NaN or Inf.
    """
    symmetry = symmetry.bind(a.on_meta() if isinstance(a, Checkpoint) else a)
    pair = Pair(a, b, symmetry)
    is_single = all(len(pair.shapes.get(name, shape)) == len(shape) for name, shape in symmetry.shapes.items())
    if Pair(b, a, symmetry).shapes != pair.shapes or not is_single:
        return None
    for name in pair.shapes:
        for x, y in pair.pieces(name):
            if not torch.equal(x, y):
                return None
            require_finite({name: x}, "the first network", symmetry.structure)
    return Matched(pair, symmetry.identity(), lambda: None, tested=pair, distances=(0.0,))

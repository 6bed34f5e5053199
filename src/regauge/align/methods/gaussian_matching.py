"""Gaussian matching: the element that brings one diagonal Gaussian posterior closest to another's."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from regauge.align.matching import Matching, Method
from regauge.align.methods.stack_matching import Role, Stack, StackMatching
from regauge.align.methods.weight_matching import WeightMatching
from regauge.core.symmetry import Symmetry
from regauge.core.task import Task


@dataclass(frozen=True)
class GaussianMatching:
    """Match two diagonal Gaussians over parameters, given as pairs (means, standard deviations).

    The Wasserstein distance between two such Gaussians is

        W2(q_a, g q_b)^2 = |m_a - g m_b|^2 + |s_a - |g| s_b|^2,

    where |g| reorders and scales like g, and has no signs and no shifts. Where g keeps norms, minimizing it is
    maximizing `<m_a, g m_b> + <s_a, |g| s_b>`: weight matching with two dictionaries in the cost. It is the
    `StackMatching` of ("parameters", "magnitudes").

    Orthogonal and linear groups stay at the identity, because a rotated diagonal Gaussian is not diagonal.
    Means are a whole network with its buffers; standard deviations may be left out for parameters that are
    certain, and are not needed for buffers.

    Attributes:
        cost: "wasserstein", or "mean" to compare means alone and only move the standard deviations.
        method: What matches the pair: one that compares parameters, without data. Unless given, weight matching
            that leaves positive scales as they are, so that the distance itself is minimized; `WeightMatching()`
            makes the outcome independent of how the posteriors are scaled.

    References:
        Rossi et al. (2023), On permutation symmetries in Bayesian neural network posteriors, equations 17 to 19
        and algorithm 1.
    """

    cost: Literal["wasserstein", "mean"] = "wasserstein"
    method: Method = field(default_factory=lambda: WeightMatching(scales="keep"))

    def __post_init__(self) -> None:
        if self.cost not in ("wasserstein", "mean"):
            raise ValueError(f"cost is {self.cost!r}; choose 'wasserstein' or 'mean'")

    @property
    def roles(self) -> tuple[Role, ...]:
        """How the two dictionaries are moved."""
        return ("parameters", "magnitudes")

    def match(
        self,
        params_a: Stack,
        params_b: Stack,
        symmetry: Symmetry,
        *,
        task: Task | None,
        generator: torch.Generator | None,
    ) -> Matching:
        """See `align`; the task is not looked at.

        Raises:
            ValueError: A standard deviation is not positive.
        """
        for params, label in ((params_a, "first"), (params_b, "second")):
            _require_positive(params[1], symmetry, label)
        weights = (1.0, 1.0 if self.cost == "wasserstein" else 0.0)
        stacked = StackMatching(self.roles, weights, self.method)
        return stacked.match(params_a, params_b, symmetry, task=task, generator=generator)


def _require_positive(std: Mapping[str, Tensor], symmetry: Symmetry, label: str) -> None:
    for name, tensor in std.items():
        if name not in symmetry.buffers and not bool((tensor > 0).all()):
            raise ValueError(
                f"the standard deviations {name!r} of the {label} posterior hold {int((tensor <= 0).sum())} numbers "
                f"(of {tensor.numel()}) that are not positive; give standard deviations, not their logarithms or "
                "another parametrization, and leave out parameters that are certain"
            )

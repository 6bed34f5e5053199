"""Gaussian matching: the element that brings one diagonal Gaussian posterior closest to another's."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from regauge.alignment.many import ManyMatching, ManyMethod
from regauge.alignment.matching import Matching, Method
from regauge.alignment.methods.stack_matching import Role, Stack, StackMatching, match_stacks
from regauge.core.element import Element
from regauge.core.groups import Group
from regauge.core.params import Params
from regauge.core.symmetry import Symmetry
from regauge.core.task import Task

GaussianCost = Literal["wasserstein", "mean", "kl", "symmetric kl"]
"""What `GaussianMatching` compares."""


@dataclass(frozen=True)
class GaussianMatching:
    """Match two diagonal Gaussians over parameters, given as pairs (means, standard deviations).

    With g the element that moves the second Gaussian N(m_b, s_b^2), and |g| what reorders and scales like g but has
    no signs and no shifts, a cost is one of these:

    | cost | what is made small | what is maximized, up to constants |
    | --- | --- | --- |
    | wasserstein | `W2^2 = abs(m_a - g m_b)^2 + w abs(s_a - abs(g) s_b)^2` | `<m_a, g m_b> + w <s_a, abs(g) s_b>` |
    | mean | `abs(m_a - g m_b)^2` | `<m_a, g m_b>` |
    | kl | `KL(g q_b, q_a)` | `<m_a / s_a^2, g m_b> - <1 / (2 s_a^2), abs(g) (m_b^2 + s_b^2)>` |
    | symmetric kl | `KL(g q_b, q_a) + KL(q_a, g q_b)` | that, and the same with the networks exchanged |

    where w is `std_weight`. Each is weight matching with two dictionaries or four: a `StackMatching` of "parameters"
    and "magnitudes". What is maximized grows by as much as the divergence falls, and by half of what W2^2 falls.

    Departures from the paper. Its appendix B says that the divergence becomes a distance of means because nothing
    else depends on the permutation. That is not so: the trace `sum abs(g) s_b^2 / s_a^2` depends on it, and the
    distance of the means is weighted by precisions; both are kept here. On trained networks no divergence was found
    to give lower barriers than the Wasserstein cost, nor did that give lower ones than means alone. Equation 16
    prints covariances where roots of covariances belong; equation 17, with standard deviations, is what is meant.

    Orthogonal and linear groups stay at the identity, because a rotated diagonal Gaussian is not diagonal. With a
    divergence, which is linear only in elements that keep every magnitude, positive scales and shifts stay there too.
    Means are a whole network with its buffers; standard deviations may be left out for parameters that are certain,
    and are not needed for buffers. A divergence needs all of them, since it is infinite between certain values.

    Attributes:
        cost: What is compared.
        std_weight: What standard deviations count under the Wasserstein cost; means count 1.
        method: What matches the Gaussians: one that compares parameters, without data. Unless given, weight matching
            for two and `MergeMany` for many, which bring each to the Wasserstein barycenter of the others. Both leave
            positive scales as they are, so that the distance itself is minimized; `WeightMatching()` makes the
            outcome independent of how the posteriors are scaled.

    Raises:
        ValueError: The cost is unknown, or the weight is negative, not finite, or has nothing to weigh.

    References:
        Rossi et al. (2023), On permutation symmetries in Bayesian neural network posteriors, equations 17 to 19,
        algorithm 1 and appendix B.
    """

    cost: GaussianCost = "wasserstein"
    std_weight: float = 1.0
    method: Method | ManyMethod | None = None

    def __post_init__(self) -> None:
        if self.cost not in get_args(GaussianCost):
            raise ValueError(f"cost is {self.cost!r}; choose one of {', '.join(map(repr, get_args(GaussianCost)))}")
        if not 0 <= self.std_weight < float("inf"):
            raise ValueError(f"std_weight is {self.std_weight}; it must not be negative, and 0 leaves the means alone")
        if self.std_weight != 1 and self.cost != "wasserstein":
            raise ValueError(
                f"std_weight={self.std_weight} belongs to the Wasserstein cost; {self.cost!r} has no weights"
            )

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
            ValueError: A standard deviation is negative, or zero or missing where the cost is a divergence.
        """
        _require_std((params_a, params_b), symmetry)
        if self.cost in ("wasserstein", "mean"):
            return match_stacks(self._stacked, params_a, params_b, symmetry, generator)
        for pair, label in ((params_a, "first"), (params_b, "second")):
            _require_uncertain(pair, symmetry, label)
        left, right = _kl_stack(params_a, params_b, symmetry)
        if self.cost == "symmetric kl":
            more_right, more_left = _kl_stack(params_b, params_a, symmetry)
            left, right = left + more_left, right + more_right
        settings = StackMatching(self.roles * (len(left) // 2), method=self.method)
        found = match_stacks(settings, left, right, _keeping_magnitudes(symmetry), generator)
        return replace(found, element=_completed(found.element, symmetry), moved={})

    def match_many(
        self,
        stacks: Sequence[Stack],
        symmetry: Symmetry,
        *,
        task: Task | None,
        generator: torch.Generator | None,
    ) -> ManyMatching:
        """See `align_many`; the task is not looked at.

        Raises:
            ValueError: A standard deviation is negative, or the cost is a divergence.
        """
        if self.cost not in ("wasserstein", "mean"):
            raise ValueError(
                f"cost={self.cost!r} has no common universe for many posteriors: what the mean of others is under a "
                "divergence depends on where each of them is; choose 'wasserstein' or 'mean'"
            )
        _require_std(stacks, symmetry)
        return self._stacked.match_many(stacks, symmetry, task=task, generator=generator)

    @property
    def _stacked(self) -> StackMatching:
        weights = (1.0, self.std_weight if self.cost == "wasserstein" else 0.0)
        return StackMatching(self.roles, weights, self.method)


def _kl_stack(a: Stack, b: Stack, symmetry: Symmetry) -> tuple[Stack, Stack]:
    """Coefficients of `-KL(g q_b, q_a)` and what they multiply: two dictionaries each."""

    def each(function: Callable[[Tensor, Tensor], Tensor], pair: Stack) -> Params:
        mean, std = pair
        exact = {n: torch.promote_types(mean[n].dtype, torch.float32) for n in std if n not in symmetry.buffers}
        return {name: function(mean[name].to(dtype), std[name].to(dtype)) for name, dtype in exact.items()}

    coefficients = (each(lambda m, s: m / s.square(), a), each(lambda m, s: -0.5 / s.square(), a))
    return coefficients, (each(lambda m, s: m, b), each(lambda m, s: m.square() + s.square(), b))


def _keeping_magnitudes(symmetry: Symmetry) -> Symmetry:
    """Without positive scales and shifts."""

    def kept(group: Group) -> Group:
        places = tuple(replace(place, scale=(), parity=(), shift=()) for place in group.placements)
        return replace(group, placements=places, scales=0, shifts=0)

    return replace(symmetry, groups=tuple(kept(group) for group in symmetry.groups))


def _completed(element: Element, symmetry: Symmetry) -> Element:
    """With the identity for scales and shifts."""
    rest = symmetry.identity()
    return Element({n: replace(v, scale=rest[n].scale, shift=rest[n].shift) for n, v in element.items()})


def _require_std(stacks: Sequence[Stack], symmetry: Symmetry) -> None:
    for k, stack in enumerate(stacks):
        label = ("the first posterior", "the second posterior")[k] if k < 2 else f"posterior {k + 1}"
        for name, tensor in stack[1].items():
            if name not in symmetry.buffers and bool((tensor < 0).any()):
                raise ValueError(
                    f"the standard deviations {name!r} of {label} hold {int((tensor < 0).sum())} negative numbers "
                    f"(of {tensor.numel()}); give standard deviations, not their logarithms or another parametrization"
                )


def _require_uncertain(stack: Stack, symmetry: Symmetry, label: str) -> None:
    mean, std = stack
    for name in symmetry.sites:
        if (
            name not in symmetry.buffers
            and mean[name].is_floating_point()
            and not (name in std and bool((std[name] > 0).all()))
        ):
            raise ValueError(
                f"{name!r} of the {label} posterior has no positive standard deviation everywhere, and the divergence "
                "between certain values is infinite; choose cost='wasserstein'"
            )

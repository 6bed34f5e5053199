"""Gaussian matching, which finds the element that brings one diagonal Gaussian posterior closest to another."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from regauge.alignment.joint import Role, dictionary_of, joint_name
from regauge.alignment.method import Method
from regauge.alignment.methods.joint_matching import JointMatching, require_magnitudes
from regauge.alignment.methods.weight_matching import WeightMatching
from regauge.alignment.problem import ManyProblem, Problem
from regauge.alignment.result import ManyResult, Results
from regauge.core.groups import Group
from regauge.core.params import Params, label
from regauge.core.symmetry import Symmetry

GaussianCost = Literal["wasserstein", "mean", "kl", "symmetric kl"]
"""The cost that `GaussianMatching` minimizes."""
ROLES: tuple[Role, ...] = ("parameters", "magnitudes")


@dataclass(frozen=True)
class GaussianMatching(Method):
    """A method that matches two diagonal Gaussians over parameters, given as pairs (means, standard deviations).

    Let g be the element that acts on the second Gaussian N(m_b, s_b^2). Let |g| be the element that permutes and scales
    like g, but without signs and shifts. The cost is one of the following:

    | cost | what is made small | what is maximized, up to constants |
    | --- | --- | --- |
    | wasserstein | `W2^2 = abs(m_a - g m_b)^2 + w abs(s_a - abs(g) s_b)^2` | `<m_a, g m_b> + w <s_a, abs(g) s_b>` |
    | mean | `abs(m_a - g m_b)^2` | `<m_a, g m_b>` |
    | kl | `KL(g q_b, q_a)` | `<m_a / s_a^2, g m_b> - <1 / (2 s_a^2), abs(g) (m_b^2 + s_b^2)>` |
    | symmetric kl | `KL(g q_b, q_a) + KL(q_a, g q_b)` | the expression for kl, plus kl with the networks exchanged |

    Here w is `std_weight`. Minimizing each cost is weight matching with two or four dictionaries: a `JointMatching` of
    "parameters" and "magnitudes". If the cost is a divergence and decreases by some amount, the objective increases by
    the same amount. If W2^2 decreases, the objective increases by half as much.

    `GaussianMatching` departs from the paper. Appendix B of the paper states that the divergence reduces to a distance
    between means, because no other term depends on the permutation. The statement in appendix B of the paper is wrong.
    The trace term `sum abs(g) s_b^2 / s_a^2` depends on the permutation, and the distance between means is weighted by
    precisions. `GaussianMatching` includes both the trace term and the weights. On trained networks, the divergences
    did not give lower barriers than the Wasserstein cost. The Wasserstein cost did not give lower barriers than means
    alone. Equation 16 of the paper prints covariances in place of their square roots. Equation 17, with standard
    deviations, is correct.

    Orthogonal and linear groups stay at the identity, because a rotated diagonal Gaussian is not diagonal. A divergence
    is linear only in elements that keep all magnitudes. Therefore positive scales and shifts also stay at the identity
    if the cost is a divergence. The dictionary of means is a complete network, including buffers. Standard deviations
    can be omitted for parameters without uncertainty, and are not needed for buffers. A divergence needs standard
    deviations for all parameters, because it is infinite between parameters without uncertainty.

    Attributes:
        cost: The cost to minimize.
        std_weight: The weight of standard deviations in the Wasserstein cost. The weight of means is 1.
        method: The method that matches the Gaussians. The method must compare parameters and use no data. Default:
            weight matching for two networks, and `MergeMany` for more, which matches each network to the Wasserstein
            barycenter of the other networks. The default methods leave positive scales unchanged and therefore minimize
            the distance itself. With `WeightMatching()`, the result does not depend on how the posteriors are scaled.

    Raises:
        ValueError: The cost is unknown, or the weight is negative, not finite, or given for a cost that does not use
            it.

    References:
        Rossi et al. (2023), On permutation symmetries in Bayesian neural network posteriors, equations 17 to 19,
        algorithm 1 and appendix B.
    """

    cost: GaussianCost = "wasserstein"
    std_weight: float = 1.0
    method: Method | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.std_weight < float("inf"):
            raise ValueError(f"std_weight is {self.std_weight}; it must not be negative, and 0 leaves the means alone")
        if self.std_weight != 1 and self.cost != "wasserstein":
            raise ValueError(
                f"std_weight={self.std_weight} belongs to the Wasserstein cost; {self.cost!r} has no weights"
            )

    @property
    def joint_roles(self) -> tuple[Role, ...]:
        """The roles of means and standard deviations. Signs and shifts do not act on standard deviations."""
        return ROLES

    def match(self, problem: Problem) -> Results:
        """Match each pair of Gaussians; see `align`. A task, if there is one, is not used.

        Raises:
            ValueError: A standard deviation is negative, or it is zero or missing although the cost is a divergence.
        """
        for k, params in enumerate((problem.a, problem.b)):
            require_magnitudes(params, problem.symmetry, ROLES, label(k, "posterior"))
            if self.cost not in ("wasserstein", "mean"):
                _require_uncertain(params, problem.symmetry, label(k, "posterior"))
        if self.cost in ("wasserstein", "mean"):
            return self._joint.match(problem)
        method = WeightMatching(scales="keep") if self.method is None else self.method
        found = method.match(_divergence_problem(problem, is_symmetric=self.cost == "symmetric kl"))
        element = found.element.fill(problem.symmetry.identity(found.element.batch))
        return replace(found, symmetry=problem.symmetry, element=element, params=problem.move(element))

    def match_many(self, problem: ManyProblem) -> ManyResult:
        """Align several Gaussians with one another; see `align_many`. A task, if there is one, is not used.

        Raises:
            ValueError: A standard deviation is negative, or the cost is a divergence.
        """
        if self.cost not in ("wasserstein", "mean"):
            raise ValueError(
                f"cost={self.cost!r} cannot align many posteriors to their mean, because their mean under this "
                "divergence depends on each of them; choose 'wasserstein' or 'mean'"
            )
        for k, params in enumerate(problem.networks):
            require_magnitudes(params, problem.symmetry, ROLES, label(k, "posterior"))
        return self._joint.match_many(problem)

    @property
    def _joint(self) -> JointMatching:
        weights = (1.0, self.std_weight if self.cost == "wasserstein" else 0.0)
        return JointMatching(ROLES, weights, self.method)


def _divergence_problem(problem: Problem, *, is_symmetric: bool) -> Problem:
    """Return dictionaries whose inner products are negative divergences: two for each network, or four if the
    divergence is symmetric.

    The negative divergence `-KL(g q_b, q_a)` is linear in g. The coefficients of this linear function are dictionaries
    of the first network, which are multiplied by dictionaries of the second network. The divergence is linear only for
    elements that keep all magnitudes, that is, elements without scales and shifts.
    """
    # -KL(N(m, v), N(m_a, v_a)) = <m_a / v_a, m> - <1 / (2 v_a), m^2 + v> + terms that no permutation or sign changes.
    # The second product contains the trace and the squared means, which also depend on the permutation.
    left, right = (_each(COEFFICIENTS, problem.a, problem.symmetry), _each(MOMENTS, problem.b, problem.symmetry))
    if is_symmetric:
        more = _each(MOMENTS, problem.a, problem.symmetry), _each(COEFFICIENTS, problem.b, problem.symmetry)
        left, right = ({**two, **_further(others)} for two, others in zip((left, right), more, strict=True))

    def keep(group: Group) -> Group:
        places = [replace(p, scale=(), parity=(), shift=()) for p in group.placements if p.parameter in left]
        if is_symmetric:
            places += [replace(p, parameter=next(iter(_further({p.parameter: 0})))) for p in places]
        return replace(group, placements=tuple(places), scales=0, shifts=0)

    groups = tuple(keep(group) for group in problem.symmetry.groups)
    shapes = {p.parameter: tuple(left[p.parameter].shape[1:]) for group in groups for p in group.placements}
    symmetry = Symmetry(groups, shapes)
    return Problem(left, right, symmetry, None, problem.generator)


Moment = Callable[[Tensor, Tensor], Tensor]
COEFFICIENTS: tuple[Moment, Moment] = (lambda m, s: m / s.square(), lambda m, s: -0.5 / s.square())
"""Functions of means and standard deviations, which a divergence multiplies by the other network's means and second
moments."""
MOMENTS: tuple[Moment, Moment] = (lambda m, s: m, lambda m, s: m.square() + s.square())


def _each(functions: tuple[Moment, Moment], params: Mapping[str, Tensor], symmetry: Symmetry) -> Params:
    """Return two dictionaries of tensors, each computed by a function of means and deviations."""
    result = {}
    for k, function in enumerate(functions):
        for joint in params:
            number, name = dictionary_of(joint)
            if number == 1 and joint not in symmetry.buffers:
                mean, std = params[joint_name(0, name)], params[joint]
                dtype = torch.promote_types(mean.dtype, torch.float32)
                result[joint_name(k, name)] = function(mean.to(dtype), std.to(dtype))
    return result


def _further(names: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of the first two dictionaries of a network, under the names of the third and fourth."""
    split = ((*dictionary_of(joint), value) for joint, value in names.items())
    return {joint_name(k + 2, name): value for k, name, value in split}


def _require_uncertain(params: Mapping[str, Tensor], symmetry: Symmetry, of: str) -> None:
    for joint in symmetry.sites:
        k, name = dictionary_of(joint)
        if k or joint in symmetry.buffers or not params[joint].is_floating_point():
            continue
        std = params.get(joint_name(1, name))
        if std is None or not bool((std > 0).all()):
            raise ValueError(
                f"{name!r} of {of} has no positive standard deviation everywhere, and the divergence "
                "between certain values is infinite; choose cost='wasserstein'"
            )

"""Joint matching of several dictionaries of parameters.

One group element acts on all dictionaries, on each according to its role.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import get_args

import torch
from torch import Tensor

from regauge.alignment.joint import Role, dictionary_of
from regauge.alignment.method import Method
from regauge.alignment.methods.merge_many import MergeMany
from regauge.alignment.methods.weight_matching import WeightMatching
from regauge.alignment.problem import ManyProblem, Problem
from regauge.alignment.result import ManyResult, Results
from regauge.core.params import Params, label
from regauge.core.symmetry import Symmetry


@dataclass(frozen=True)
class JointMatching(Method):
    """A method for networks that are given as tuples of parameter dictionaries.

    One element acts on all dictionaries of a tuple, and each dictionary has a weight.

    `method` maximizes `sum_k weights[k] <a_k, g b_k>`, where `g` acts on dictionary k according to its role:

    | role | permutations | positive scales | signs | shifts | rotations |
    | --- | --- | --- | --- | --- | --- |
    | parameters | move it | multiply it | multiply it | are added | rotate it |
    | magnitudes | move it | multiply it | - | - | not possible |

    If a dictionary contains magnitudes, orthogonal and linear groups stay at the identity. The reason is that a rotated
    diagonal Gaussian has correlations, which standard deviations cannot represent.

    The first dictionary is complete and includes buffers. The other dictionaries may lack some names of the first
    dictionary. Names that a dictionary lacks contribute nothing to the cost. A task is not used, because it evaluates
    networks, not tuples of dictionaries.

    Attributes:
        roles: The role of each dictionary, in order. The first role must be "parameters".
        weights: The nonnegative weight of each dictionary. Default: all dictionaries have weight 1. The element also
            acts on dictionaries of weight 0, which do not contribute to the objective.
        method: The method that matches the dictionaries. The method must compare parameters and use no data. Default:
            weight matching for two networks and, for more, matching of each network to the mean of the others
            (`MergeMany`). The default methods leave positive scales unchanged. A method for pairs aligns all networks
            to the first one.

    Raises:
        ValueError: A role is unknown, the first role is not "parameters", or the number of weights differs from the
            number of roles.
    """

    roles: tuple[Role, ...]
    weights: tuple[float, ...] | None = None
    method: Method | None = None

    def __post_init__(self) -> None:
        unknown = [role for role in self.roles if role not in get_args(Role)]
        if unknown or not self.roles or self.roles[0] != "parameters":
            raise ValueError(
                f"roles is {self.roles!r}; give 'parameters' for the first dictionary and 'parameters' or 'magnitudes' "
                "for each further one"
            )
        if self.weights is not None and len(self.weights) != len(self.roles):
            raise ValueError(f"{len(self.roles)} roles need as many weights, not {len(self.weights)}")
        if self.weights is not None and not (min(self.weights) >= 0 < max(self.weights) < float("inf")):
            raise ValueError(f"weights is {self.weights}; they must not be negative, and one must be positive")

    @property
    def joint_roles(self) -> tuple[Role, ...]:
        """The role of each dictionary."""
        return self.roles

    def match(self, problem: Problem) -> Results:
        """Match each pair of tuples; see `align`.

        Raises:
            ValueError: A dictionary of magnitudes contains a negative number.
        """
        for k, params in enumerate((problem.a, problem.b)):
            require_magnitudes(params, problem.symmetry, self.roles, label(k))
        a, b = (self._weigh(params) for params in (problem.a, problem.b))
        method = WeightMatching(scales="keep") if self.method is None else self.method
        found = method.match(Problem(a, b, self._weigh_symmetry(problem.symmetry), None, problem.generator))
        return replace(
            found, symmetry=problem.symmetry, params=problem.move(found.element, self._as_given(found.params))
        )

    def match_many(self, problem: ManyProblem) -> ManyResult:
        """Align several tuples with one another; see `align_many`.

        Raises:
            ValueError: A dictionary of magnitudes contains a negative number.
        """
        for k, params in enumerate(problem.networks):
            require_magnitudes(params, problem.symmetry, self.roles, label(k))
        networks = [self._weigh(params) for params in problem.networks]
        method = MergeMany(inner=WeightMatching(scales="keep")) if self.method is None else self.method
        symmetry = self._weigh_symmetry(problem.symmetry)
        found = method.match_many(ManyProblem(networks, symmetry, None, problem.generator))
        moved = []
        for element, network, there in zip(found.elements, problem.networks, found.params, strict=True):
            done = self._as_given(there)
            moved.append({**problem.symmetry.act(element, network, skip=done), **done})
        return replace(found, symmetry=problem.symmetry, params=(dict(problem.networks[0]), *moved[1:]))

    def _weight(self, name: str) -> float:
        return 1.0 if self.weights is None else self.weights[dictionary_of(name)[0]]

    def _weigh(self, params: Mapping[str, Tensor]) -> Params:
        """Multiply dictionaries by the square roots of their weights.

        Both networks of a pair contribute a square root, so inner products are multiplied by the weights.
        """
        result = {}
        for name, tensor in params.items():
            weight = self._weight(name)
            if weight not in (0.0, 1.0) and tensor.is_floating_point():
                tensor = tensor.to(torch.promote_types(tensor.dtype, torch.float32)) * weight**0.5
            result[name] = tensor
        return result

    def _weigh_symmetry(self, symmetry: Symmetry) -> Symmetry:
        """Return the symmetry for dictionaries that are multiplied by their weights.

        Dictionaries of weight 0 are treated like buffers.
        """
        buffers = dict.fromkeys((*symmetry.buffers, *(name for name in symmetry.shapes if not self._weight(name))))
        groups = []
        for group in symmetry.groups:
            roots = ((p, (self._weight(p.parameter) or 1.0) ** 0.5) for p in group.placements)
            places = tuple(replace(p, shift=tuple(amount * root for amount in p.shift)) for p, root in roots)
            groups.append(replace(group, placements=places))
        return replace(symmetry, groups=tuple(groups), buffers=tuple(buffers))

    def _as_given(self, params: Mapping[str, Tensor]) -> Params:
        """Return the original tensors of dictionaries with weight 1."""
        return {name: tensor for name, tensor in params.items() if self._weight(name) == 1}


def require_magnitudes(params: Mapping[str, Tensor], symmetry: Symmetry, roles: tuple[Role, ...], of: str) -> None:
    """Raise an error if a dictionary of magnitudes contains negative numbers.

    Raises:
        ValueError: A magnitude is negative. The message contains `of`, the name of the network.
    """
    for joint, tensor in params.items():
        k, name = dictionary_of(joint)
        if roles[k] == "magnitudes" and joint not in symmetry.buffers and bool((tensor < 0).any()):
            raise ValueError(
                f"{name!r} of {of} holds {int((tensor < 0).sum())} negative numbers (of {tensor.numel()}) in a "
                "dictionary of magnitudes; give standard deviations, not their logarithms or another parametrization, "
                "or the role 'parameters'"
            )

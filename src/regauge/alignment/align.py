"""`align`: bring one network as close as its symmetry allows to another."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar, overload

import torch
from torch import Tensor

from regauge.alignment.joint import Dictionaries, JointView, require_dictionaries
from regauge.alignment.method import Method
from regauge.alignment.methods.activation_matching import MixedMatching
from regauge.alignment.methods.weight_matching import WeightMatching
from regauge.alignment.problem import Problem, batch_of_one, bind_networks
from regauge.alignment.result import Result
from regauge.core.params import Params
from regauge.core.symmetry import Symmetry
from regauge.core.task import Task

Joined = TypeVar("Joined", bound=Dictionaries)
POPULATIONS = "these are populations; align them with `regauge.align_pairs`, all pairs at once"


@overload
def align(
    params_a: Mapping[str, Tensor],
    params_b: Mapping[str, Tensor],
    symmetry: Symmetry,
    *,
    method: Method | None = None,
    task: Task | None = None,
    generator: torch.Generator | None = None,
) -> Result[Params]: ...


@overload
def align(
    params_a: Joined,
    params_b: Joined,
    symmetry: Symmetry,
    *,
    method: Method,
    task: Task | None = None,
    generator: torch.Generator | None = None,
) -> Result[Joined]: ...


def align(
    params_a: Mapping[str, Tensor] | Dictionaries,
    params_b: Mapping[str, Tensor] | Dictionaries,
    symmetry: Symmetry,
    *,
    method: Method | None = None,
    task: Task | None = None,
    generator: torch.Generator | None = None,
) -> Result[Any]:
    """Move the second network along its orbit, as close to the first as the method gets.

    The result is never worse than the identity on the method's own objective, and `params` computes the same
    function as `params_b`.

    Args:
        params_a: The network that stays; a tuple of dictionaries for methods that move several together
            (`GaussianMatching`, `JointMatching`).
        params_b: The network that moves, unchanged itself. Buffers move with it.
        symmetry: The symmetry of both networks.
        method: `MixedMatching()` unless given where there is a task, else `WeightMatching()`.
        task: Model, data and loss, for methods that use them.
        generator: The source of chance, for methods that use it. The same generator state gives the same result.

    Raises:
        KeyError: A parameter that the symmetry moves is missing.
        TypeError: The method takes tuples of dictionaries and got single ones, or the other way around.
        ValueError: The networks have different parameters, do not fit the symmetry, hold NaN or Inf, or are
            populations; or the method needs a task or a generator.
    """
    if method is None:
        method = WeightMatching() if task is None else MixedMatching()
    roles = method.joint_roles
    networks = [require_dictionaries(method, roles, network) for network in (params_a, params_b)]
    symmetry = bind_networks([network[0] for network in networks], symmetry, POPULATIONS)
    view = JointView.of(roles, symmetry, networks)
    a, b = (batch_of_one(view.join(network)) for network in networks)
    found = method.match(Problem(a, b, view.symmetry, task, generator)).item(0)
    if not roles:
        return found
    params = view.split(found.params, params_b)
    return replace(found, symmetry=symmetry, element=view.element(found.element), params=params)

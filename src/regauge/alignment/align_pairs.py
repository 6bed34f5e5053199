"""`align_pairs`: bring each of many networks as close as its symmetry allows to its partner."""

from collections.abc import Mapping

import torch
from torch import Tensor

from regauge.alignment.method import Method
from regauge.alignment.methods.weight_matching import WeightMatching
from regauge.alignment.problem import Problem, bind_pairs
from regauge.alignment.result import Results
from regauge.core.symmetry import Symmetry
from regauge.core.task import Task


def align_pairs(
    params_a: Mapping[str, Tensor],
    params_b: Mapping[str, Tensor],
    symmetry: Symmetry,
    *,
    method: Method | None = None,
    task: Task | None = None,
    generator: torch.Generator | None = None,
) -> Results:
    """Move every network of a population along its orbit, as close to its partner as the method gets.

    Pair k is network k of the first population and network k of the second; a single first network is the
    partner of all. For every pair the outcome is as from `align`: never worse than the identity on the method's
    own objective, computing the same function. Methods that work on tensors with a leading axis of pairs (such as
    `WeightMatching`) take all pairs at once, which for small networks is many times faster than a loop; others run
    pair by pair.

    Args:
        params_a: The networks that stay, with one leading model axis on every tensor, or a single one without.
        params_b: The networks that move, with one leading model axis on every tensor, unchanged themselves.
            Buffers move with them.
        symmetry: The symmetry of all networks.
        method: `WeightMatching()` unless given.
        task: Model, data and loss, for methods that use them.
        generator: The source of chance, for methods that use it.

    Raises:
        KeyError: A parameter that the symmetry moves is missing.
        TypeError: The method takes tuples of dictionaries.
        ValueError: The networks have different parameters, do not fit the symmetry or one another in number, or
            hold NaN or Inf; or the method needs a task or a generator.
    """
    method = WeightMatching() if method is None else method
    if method.joint_roles:
        raise TypeError(f"{type(method).__name__} aligns tuples of dictionaries; align them one by one with `align`")
    params_a, symmetry = bind_pairs(params_a, params_b, symmetry)
    return method.match(Problem(params_a, dict(params_b), symmetry, task, generator))

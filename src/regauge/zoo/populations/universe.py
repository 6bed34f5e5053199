"""Common coordinates (a universe) of a population: networks are aligned to their mean, and the mean is updated."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from regauge.alignment.methods.merge_many import Gathered, MergeMany, gather
from regauge.alignment.methods.weight_matching import WeightMatching
from regauge.core.arguments import check_arguments
from regauge.core.balance import balance
from regauge.core.element import Element
from regauge.core.params import Params, count_models, require_finite
from regauge.core.symmetry import Symmetry


@dataclass(frozen=True)
class Universe:
    """A population whose networks are aligned to their common mean.

    Attributes:
        element: A batch of group elements, each of which transforms one network.
        params: The transformed population, `act(element, params)`. Each network has the smallest norm that scales and
            matrices can produce.
        mean: The mean of the transformed networks, a single network to which other networks can be aligned.
        spread: The mean squared distance from the mean, over all parameters.
        initial: The spread before alignment, after scales and matrices were determined. The final spread is never
            larger than `initial`.
        history: The spread after the initial alignment and after each round. The spread never increases.
        is_converged: Whether the last round's improvement was below the tolerance.
    """

    element: Element
    params: Params
    mean: Params
    spread: float
    initial: float
    history: tuple[float, ...]
    is_converged: bool

    @property
    def report(self) -> str:
        """Return a text with the result, and suggestions for improving it."""
        gained = (
            f"{count_models(self.params)} networks: mean squared distance from the mean {self.initial:.6g} -> "
            f"{self.spread:.6g} in {len(self.history) - 1} rounds"
        )
        return gained if self.is_converged else f"{gained}; stopped before convergence: allow more rounds"

    def __str__(self) -> str:
        return self.report


@check_arguments
def universe(
    params: Mapping[str, Tensor],
    symmetry: Symmetry,
    *,
    method: WeightMatching | None = None,
    rounds: int = 20,
    tolerance: float = 1e-3,
    generator: torch.Generator | None = None,
) -> Universe:
    """Align the networks of a population of any size, such that all networks are close to their mean.

    The common coordinates are called a universe. `align_many` uses the same algorithm for more than 16 networks. Unlike
    `align_many`, this function reads a population that is stacked along a leading axis, and the common coordinates may
    differ from the coordinates of the first network. The spread 1/n sum_i |x_i - m|^2 of the transformed networks
    around their mean m never increases (`regauge.alignment.methods.merge_many.gather`).

    First, positive scales and invertible matrices minimize the norm of every network (`regauge.core.balance`). In all
    later steps, matrices only rotate networks.

    Args:
        params: The population, with one leading model axis on every tensor. The population is not changed.
        symmetry: The symmetry of the architecture.
        method: The method that aligns networks; `WeightMatching()` by default. The setting `scales` of the method has
            no effect.
        rounds: The largest number of rounds.
        tolerance: The smallest relative improvement. If a round lowers the spread by less, no further round follows.
        generator: The source of randomness, for methods with restarts.

    Raises:
        KeyError: A parameter that the symmetry transforms is missing.
        ValueError: The networks do not fit the symmetry or are not finite, or `rounds` is less than 1.

    References:
        Ainsworth et al. (2023), Git Re-Basin, appendix A.10; Crisostomi et al. (2024), C2M3, for universes.
    """
    if rounds < 1:
        raise ValueError(f"rounds={rounds}: at least one round")
    symmetry, count = symmetry.bind(params), count_models(params)
    require_finite(params, "the population", symmetry.structure)
    factors = balance(params, symmetry, buffers="keep")
    start = symmetry.act(factors, params)
    settings = MergeMany(inner=method or WeightMatching(), max_rounds=rounds, tolerance=tolerance)
    *before, found = gather(start, symmetry, settings, generator=generator)
    element = symmetry.compose(found.element, factors)
    return Universe(
        element=element,
        params=symmetry.act(element, params),
        mean=found.mean,
        spread=found.spread,
        initial=Gathered.of(symmetry, symmetry.identity((count,)), start).spread,
        history=tuple(one.spread for one in (*before, found)),
        is_converged=found.is_converged,
    )

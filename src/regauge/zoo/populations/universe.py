"""A universe for a whole population: all networks aligned to their mean, and the mean taken anew, in turns."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from regauge.alignment.methods.merge_many import Gathered, MergeMany, gather
from regauge.alignment.methods.weight_matching import WeightMatching
from regauge.core.arguments import check_arguments
from regauge.core.balance import balance, has_balance
from regauge.core.element import Element
from regauge.core.params import Params, count_models, require_finite
from regauge.core.symmetry import Symmetry


@dataclass(frozen=True)
class Universe:
    """A population in one universe.

    Attributes:
        element: A batch of elements; each moves its network.
        params: The moved population, `act(element, params)`: all at the smallest norm that scales and matrices reach.
        mean: The mean of the moved networks, a single network to which others can be aligned.
        spread: Mean squared distance from the mean, over all parameters.
        initial: The objective before any network was moved, but for its scales and matrices; never smaller.
        history: The spread after the networks were placed and after each round; it never rises.
        is_converged: Whether the last round gained less than the tolerance.
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
        """The outcome in words, and what to try for more."""
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
    """Bring a population of any size into one universe, in which all networks are close to their mean.

    It is what `align_many` does with more than 16 networks, for a population that is stacked along a leading axis, and
    without moving all of them back to where the first one was. The spread 1/n sum_i |x_i - m|^2 of the moved networks
    around their mean m never rises (`regauge.alignment.methods.merge_many.gather`).

    Positive scales and invertible matrices are fixed before: every network is moved to the smallest norm on its orbit
    under them (`regauge.core.balance`), and only rotated from there.

    Args:
        params: The population, with one leading model axis on every tensor; unchanged itself.
        symmetry: The symmetry of the architecture.
        method: The method that aligns networks; `WeightMatching()` by default. Scales of the reference are not used.
        rounds: Largest number of rounds.
        tolerance: A round must lower the spread by this share, or it is the last.
        generator: The source of chance for a method with restarts.

    Raises:
        KeyError: A parameter that the symmetry moves is missing.
        ValueError: The networks do not fit the symmetry or are not finite, or a number makes no sense.

    References:
        Ainsworth et al. (2023), Git Re-Basin, appendix A.10; Crisostomi et al. (2024), C2M3, for universes.
    """
    if rounds < 1:
        raise ValueError(f"rounds={rounds}: at least one round")
    symmetry, count = symmetry.bind(params), count_models(params)
    require_finite(params, "the population", symmetry.structure)
    factors = balance(params, symmetry, buffers="keep") if has_balance(symmetry) else symmetry.identity((count,))
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

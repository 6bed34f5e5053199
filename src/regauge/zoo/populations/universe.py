"""A universe for a whole population: all networks aligned to their mean, and the mean taken anew, in turns."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from regauge.alignment import align_many, align_pairs
from regauge.alignment.methods.merge_many import MergeMany
from regauge.alignment.methods.weight_matching import WeightMatching
from regauge.core.element import Element, stack
from regauge.core.params import Params, count_models, select
from regauge.core.scales import balance
from regauge.core.symmetry import Symmetry
from regauge.zoo.populations.orbit_distances import squares

CORE = 16
"""Networks that are aligned with one another first, by `MergeMany`; all others are aligned to their mean."""
AT_ONCE = 512
"""Networks whose distances from the mean are computed together."""


@dataclass(frozen=True)
class Universe:
    """A population in one universe.

    Attributes:
        element: A batch of elements; each moves its network.
        params: The moved population, `act(element, params)`: all at the smallest norm that positive scales reach.
        mean: The mean of the moved networks, a single network to which others can be aligned.
        spread: Mean squared distance from the mean, over all parameters.
        initial: The same before any network was moved, but for its scales; never smaller.
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

    With x_i the moved networks and m their mean, it lowers the spread 1/n sum_i |x_i - m|^2, which is half the mean
    squared distance over all ordered pairs. Aligning every network to m lowers each term, and no other point than the
    new mean lowers the sum more: so the spread never rises. Each round is one call of `align_pairs`, whereas
    `MergeMany`, which visits the networks one by one, takes the mean of the others instead; for many networks the two
    are nearly the same. `MergeMany` aligns the first 16 networks, all are aligned to their mean, and rounds follow.

    Positive scales are fixed before: every network is moved to the smallest norm on its orbit under them
    (`regauge.core.scales.balance`), and stays there.

    Args:
        params: The population, with one leading model axis on every tensor; unchanged itself.
        symmetry: The symmetry of the architecture.
        method: The method that aligns networks; `WeightMatching()` unless given. Its scales are not used.
        rounds: Most rounds.
        tolerance: A round must lower the spread by this share, or it is the last.
        generator: The source of chance for a method with restarts.

    Raises:
        KeyError: A parameter that the symmetry moves is missing.
        ValueError: The networks do not fit the symmetry or are not finite, or a number makes no sense.

    References:
        Ainsworth et al. (2023), Git Re-Basin, appendix A.10; Crisostomi et al. (2024), C2M3, for universes.
    """
    if rounds < 1 or tolerance < 0:
        raise ValueError(f"rounds={rounds}, tolerance={tolerance}: at least one round, and no negative tolerance")
    symmetry, count = symmetry.bind(params), count_models(params)
    scaled = any(group.scales for group in symmetry.groups)
    factors = balance(params, symmetry, buffers="keep") if scaled else symmetry.identity((count,))
    start = symmetry.act(factors, params)
    method = replace(method or WeightMatching(), scales="keep")
    unmoved = _Placed.of(symmetry, symmetry.identity((count,)), start)
    placed = _place(start, symmetry, method, generator)
    if placed.spread > unmoved.spread:
        placed = unmoved
    history, is_converged = [placed.spread], False
    onwards = replace(method, start="identity", restarts=0, init=None)
    while not is_converged and len(history) <= rounds:
        found = align_pairs(placed.mean, placed.params, symmetry, method=onwards)
        after = _Placed.of(symmetry, symmetry.compose(found.element, placed.element), found.params)
        is_converged = not after.spread < (1 - tolerance) * placed.spread
        if after.spread < placed.spread:
            placed = after
        history.append(placed.spread)
    element = symmetry.compose(placed.element, factors)
    return Universe(
        element=element,
        params=symmetry.act(element, params),
        mean=placed.mean,
        spread=placed.spread,
        initial=unmoved.spread,
        history=tuple(history),
        is_converged=is_converged,
    )


@dataclass(frozen=True)
class _Placed:
    """Where networks are, and how far from their mean."""

    element: Element
    params: Params
    mean: Params = field(default_factory=dict)
    spread: float = 0.0

    @classmethod
    def of(cls, symmetry: Symmetry, element: Element, params: Params) -> "_Placed":
        mean = {
            name: tensor.mean(0, dtype=torch.float64).to(tensor.dtype) if tensor.is_floating_point() else tensor[0]
            for name, tensor in params.items()
        }
        parts = torch.split(torch.arange(count_models(params)), AT_ONCE)
        spread = float(torch.cat([squares(symmetry, mean, select(params, part)) for part in parts]).mean())
        return cls(element, params, mean, spread)


def _place(params: Params, symmetry: Symmetry, method: WeightMatching, generator: torch.Generator | None) -> _Placed:
    """A few networks aligned with one another, and the others to their mean."""
    count = count_models(params)
    core = [select(params, k) for k in range(min(CORE, count))]
    many = MergeMany(inner=replace(method, restarts=0, init=None))
    found = align_many(core, symmetry, method=many, generator=generator)
    element = stack(list(found.elements))
    placed = _Placed.of(symmetry, element, symmetry.act(element, select(params, torch.arange(len(core)))))
    if count == len(core):
        return placed
    moved = align_pairs(placed.mean, params, symmetry, method=method, generator=generator)
    return _Placed.of(symmetry, moved.element, moved.params)

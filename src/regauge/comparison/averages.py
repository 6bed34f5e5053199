"""Networks that are averages of other networks, recognized by distances or by provenance records."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float64
from scipy.optimize import nnls
from torch import Tensor

RESIDUAL = 0.1
"""The largest squared distance between an average and the average of its parents, relative to the squared distance that
independent training steps would leave.
"""
NEEDLESS = 0.25
"""A network counts as a parent only if the squared distance to the average grows enough without the network. The growth
must exceed this fraction of the growth that an independent training step would cause.
"""
IMPRECISE = 0.5
"""A network counts as a parent only if the squared distance to the average grows without it by more than this fraction.
A smaller growth is within the error of the distances.
"""
FAINT_WEIGHT = 0.01
"""A network whose weight in the average is at most this number does not count as a parent."""
SUM = 1e3
"""The weight of the equation "all weights sum to one" in the least-squares fit of the weights. The equations for
distances have weight one.
"""


@dataclass(frozen=True)
class Average:
    """A network that is an average of other networks, its parents.

    Attributes:
        child: The name of the average.
        parents: The compared networks that were averaged.
        weights: The weights of the parents, computed from distances. The weights of all parents sum to one.
        is_told: Whether the provenance of the average names its parents. If the provenance does not name the parents,
            they were found from distances between networks.
    """

    child: str
    parents: tuple[str, ...]
    weights: tuple[float, ...]
    is_told: bool

    def __str__(self) -> str:
        made = ", ".join(f"{name} ({weight:.0%})" for name, weight in zip(self.parents, self.weights, strict=True))
        why = "its provenance names them" if self.is_told else "its weights lie between theirs"
        return f"{self.child} is made of {made}: {why}"


def find_averages(
    names: Sequence[str],
    squares: Float64[Tensor, "n n"],
    related: Collection[str],
    parents: Mapping[str, Sequence[str]],
    twins: Collection[Collection[str]] = (),
) -> tuple[Average, ...]:
    """Return the networks that are averages of two or more other networks.

    An average lies exactly between its parents. A common ancestor does not lie between its descendants, because the
    steps of separate training runs are nearly orthogonal. If the steps to the parents are orthogonal, with weights `w`
    and squared distances `c`, the squared distance from the weighted mean is the sum of `w^2 c`. Distances up to
    symmetry are not exactly Euclidean distances of points. Therefore even an average has a small computed distance to
    the mean of its parents. A network does not count as a parent if the mean of the other parents is about as close to
    the average. For example, the other parents may include the network's own parent.

    Args:
        names: The names of all networks.
        squares: The squared distances between whole networks up to symmetry, not divided by norms. NaN if a distance is
            unknown.
        related: The networks that are related to at least one other network. Only related networks can be averages.
        parents: For each network, the parents that its provenance names.
        twins: Pairs of copies. A network does not count as an average of its copies.
    """
    found: dict[str, Average] = {}

    def look(child: str) -> tuple[float, Average] | None:
        told = tuple(parents.get(child, ()))
        others = told or tuple(n for n in names if n != child and n not in found and {n, child} not in twins)
        rows = torch.tensor([names.index(name) for name in (child, *others)])
        near = squares[rows][:, rows]
        # Networks without a distance to the child are left out first, then those without most other distances.
        while not told and bool((gaps := near.isnan().sum(1)).any()):
            worst = 1 + int(torch.where(near[0, 1:].isnan(), len(gaps), gaps[1:]).argmax())
            kept = [k for k in range(len(near)) if k != worst]
            others, near = tuple(others[k - 1] for k in kept[1:]), near[kept][:, kept]
        return _average(child, others, near.numpy(), is_told=bool(told)) if len(others) > 1 else None

    rest = [name for name in names if name in related or name in parents]
    # The clearest average first, because a parent also lies between its average and other networks.
    while seen := [one for one in map(look, rest) if one is not None]:
        _, best = min(seen, key=lambda one: (not one[1].is_told, one[0]))
        found[best.child] = best
        rest.remove(best.child)
    return tuple(found[name] for name in names if name in found)


def _average(child: str, others: Sequence[str], squares: np.ndarray, *, is_told: bool) -> tuple[float, Average] | None:
    """Describe a network as an average of other networks, according to its provenance or distances.

    The first result is the squared distance to the average, divided by the squared distance that would be expected for
    independent training steps.
    """
    if np.isnan(squares).any():
        return (0.0, Average(child, tuple(others), (1 / len(others),) * len(others), True)) if is_told else None
    chosen = [*range(1, len(squares))]
    fit = _weigh(squares, chosen)
    if not is_told:
        if fit.gap > RESIDUAL * fit.steps.sum() or not squares[0, 1:].min():
            return None
        while len(chosen) > 1:  # Remove networks that are not needed.
            fits = {k: _weigh(squares, [one for one in chosen if one != k]) for k in chosen}
            gone = min(chosen, key=lambda k: fits[k].gap)
            place = chosen.index(gone)
            growth = max(NEEDLESS * fit.steps[place], IMPRECISE * fit.gap)
            if fit.weights[place] > FAINT_WEIGHT and fits[gone].gap - fit.gap > growth:
                break
            chosen, fit = [one for one in chosen if one != gone], fits[gone]
        if fit.gap > RESIDUAL * fit.steps.sum():
            return None
    if len(chosen) < 2:
        return None
    parents = tuple(others[k - 1] for k in chosen)
    found = Average(child, parents, tuple(float(w) for w in fit.weights / fit.weights.sum()), is_told)
    return fit.gap / (float(fit.steps.sum()) or 1.0), found


class _Fit(NamedTuple):
    """The weighted average of some networks that is nearest to one other network (the point with index 0).

    Attributes:
        weights: The weights of the averaged networks.
        gap: The squared distance from point 0 to the average.
        steps: The squared distance that would be expected if the steps from point 0 to the averaged networks were
            independent.
    """

    weights: np.ndarray
    gap: float
    steps: np.ndarray


def _weigh(squares: np.ndarray, chosen: Sequence[int]) -> _Fit:
    """Return the average of some networks that is nearest to the network with index 0, given all squared distances."""
    own = squares[np.ix_([0, *chosen], [0, *chosen])]
    n = len(own)
    center = np.eye(n) - 1 / n
    values, vectors = np.linalg.eigh(-center @ own @ center / 2)
    points = vectors * np.sqrt(np.clip(values, 0, None))
    scale = np.sqrt(own.max()) or 1.0
    rows = np.vstack([points[1:].T / scale, np.full((1, n - 1), SUM)])
    weights, _ = nnls(rows, np.append(points[0] / scale, SUM))
    # Computed from the distances, which need not be distances of points. A network of weight zero has no effect.
    gap = weights @ own[0, 1:] - weights @ own[1:, 1:] @ weights / 2
    return _Fit(weights, max(0.0, float(gap)), weights**2 * own[0, 1:])

"""Quality and novelty of generated networks, compared with networks that were made without a flow."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from regauge.core import sphere
from regauge.core.arguments import check_arguments
from regauge.core.given import given_or_seed
from regauge.core.params import Params, count_models
from regauge.core.symmetry import Symmetry
from regauge.core.task import Judge
from regauge.flow.alignment import align_points, find_reference
from regauge.flow.answers import find_one_answer, measure_quality, predict_classes
from regauge.flow.judgement import Bins, Judgement, Score
from regauge.flow.manifold import Points
from regauge.flow.novelty import NEAR, NEARER, count_near, nearest, spread
from regauge.flow.representation import Representation
from regauge.flow.space import Space

MANY_COORDINATES = 2000
"""The largest number of coordinates at which the principal axes of the map are computed from all networks. With more
coordinates, fewer networks are used."""
KNOWN = 500
"""The largest number of training networks with whose wrong predictions generated networks are compared."""
MAPPED = 300
"""The largest number of networks of each kind on the map."""
Scored = tuple[Score, tuple[float, ...], Mapping[str, Bins]]
"""The score of one kind of networks, the loss of each network, and the confidence bins."""
BISECTIONS = 12
"""The number of bisection steps in the search for the noise level."""


@check_arguments
def judge(
    samples: Mapping[str, Tensor],
    train: Mapping[str, Tensor],
    held_out: Mapping[str, Tensor],
    symmetry: Symmetry,
    evaluate: Judge,
    *,
    generator: torch.Generator | None = None,
) -> Judgement:
    """Judge generated networks by quality and novelty, compared with held-out networks and controls.

    All networks are made canonical and aligned to the mean of the training networks. After alignment to the mean, the
    distances of similar networks are too large, but these distances show which networks may be close to one another.
    Therefore only networks that may be close are aligned to each other, pair by pair. The number of control networks of
    each kind equals the number of samples. Some controls are copies of training networks, noisy copies at the distance
    of held-out networks, and means of 2 and of 16 aligned training networks. Other controls are sampled from normal
    distributions, with the standard deviations or the full covariance of aligned training networks.

    Args:
        samples: At least two generated networks, with a leading model axis.
        train: The networks to which the flow was fitted. If the training networks are checkpoints, `held_out` must not
            contain checkpoints of the same runs.
        held_out: At least two networks of the same kind to which the flow was not fitted.
        symmetry: The symmetry of the networks.
        evaluate: A task, or a function that maps the parameters of one network to its metrics, including "loss".
        generator: The random generator of the controls. By default, a fixed generator.

    Raises:
        ValueError: There are fewer than two networks of a kind, or the networks have different architectures.
    """
    count = _require_two("samples", samples)
    return KnownNetworks.of(train, held_out, symmetry, evaluate, count, generator=generator).judge(samples)


@dataclass(frozen=True, eq=False)
class KnownNetworks:
    """The networks with which generated networks are compared.

    The known networks are evaluated once for any number of judgements.

    Attributes:
        evaluate: A task, or a function that maps the parameters of one network to its metrics.
        middle: The point to which all networks are aligned.
        distances: Distances to the known networks, and between held-out networks.
        answers: The class probabilities of some training networks, and the class labels of the examples.
        scored: The scores of held-out networks, followed by the scores of the controls.
        dtypes: A training network. Generated networks are converted to the dtypes of the training network.
    """

    evaluate: Judge
    middle: Tensor
    distances: "_Distances"
    answers: tuple[Tensor, Tensor] | None
    scored: tuple[Scored, ...]
    dtypes: Params

    @classmethod
    @torch.no_grad()
    def of(
        cls,
        train: Mapping[str, Tensor],
        held_out: Mapping[str, Tensor],
        symmetry: Symmetry,
        evaluate: Judge,
        count: int,
        *,
        generator: torch.Generator | None = None,
    ) -> "KnownNetworks":
        """Evaluate held-out networks and `count` controls of each kind; see `judge` for all other arguments."""
        for name, population in {"train": train, "held_out": held_out}.items():
            _require_two(name, population)
        space = Space.of(train, symmetry, Representation("sphere"))
        middle = find_reference(space, points := space.enter(train))
        distances = _Distances.of(
            space, align_points(space, middle, points), align_points(space, middle, space.enter(held_out))
        )
        some = torch.linspace(0, len(points) - 1, min(KNOWN, len(points))).long()
        answers = predict_classes(evaluate, {name: tensor[some] for name, tensor in train.items()})
        known = cls(evaluate, middle, distances, answers, (), {name: tensor[:1] for name, tensor in train.items()})
        controls = make_controls(
            space, distances.train, float(distances.known.median()), count, given_or_seed(generator)
        )
        scored = [known._score("held-out", held_out, distances.held_out)]
        scored += [known._score(name, space.leave(own), own) for name, own in controls.items()]
        return replace(known, scored=tuple(scored))

    @torch.no_grad()
    def judge(self, samples: Mapping[str, Tensor]) -> Judgement:
        """Return the judgement of generated networks, compared with the known networks; see `judge`.

        Raises:
            ValueError: There are fewer than two networks, or the networks have another architecture.
        """
        _require_two("samples", samples)
        space = self.distances.space
        points = align_points(space, self.middle, space.enter(samples))
        scores, losses, bins = zip(self._score("generated", samples, points), *self.scored, strict=True)
        names = [score.name for score in scores]
        places, share = _map(
            {"training": self.distances.train, "held-out": self.distances.held_out, "generated": points}
        )
        reliability = {
            f"{name}, {kind}": rows for name, own in zip(names[:2], bins, strict=False) for kind, rows in own.items()
        }
        return Judgement(
            scores, find_one_answer(self.answers), dict(zip(names, losses, strict=True)), reliability, places, share
        )

    def _score(self, name: str, params: Mapping[str, Tensor], points: Points) -> Scored:
        given = {key: tensor.to(self.dtypes[key].dtype) for key, tensor in params.items()}
        quality, losses, bins = measure_quality(self.evaluate, given, self.answers)
        score = Score(name=name, networks=len(points), **quality, **self.distances.describe(points))
        return score, losses, bins


def make_controls(
    space: Space, train: Points, distance: float, count: int, generator: torch.Generator
) -> dict[str, Points]:
    """Return the points of all controls by name, computed from aligned training networks.

    Args:
        space: The space of the points.
        train: Aligned training networks.
        distance: The median distance of held-out networks to the nearest training network, which determines the noise.
        count: The number of networks per control.
        generator: The random generator.
    """

    def some(size: int) -> Tensor:
        return train[torch.randint(len(train), (count, size), generator=generator)]

    copies = some(1)[:, 0]
    noise = torch.randn(count, space.dim, generator=generator).to(train)
    centered = train - train.mean(0)
    weights = torch.randn(count, len(train), generator=generator).to(train) / max(1, len(train) - 1) ** 0.5
    drawn = torch.randn(count, space.dim, generator=generator).to(train)
    return {
        "copies": copies,
        "copies with noise": _add_noise(space, train, copies, noise, distance),
        "means of 2": _mean(space, some(2)),
        "means of 16": _mean(space, some(16)),
        "normal, each value by itself": space.project(train.mean(0) + drawn * train.std(0)),
        "normal, all covariances": space.project(train.mean(0) + weights @ centered),
    }


def _require_two(name: str, population: Mapping[str, Tensor]) -> int:
    """Return the number of networks. Raise a ValueError if there are fewer than two networks."""
    if (count := count_models(population)) < 2:
        raise ValueError(f"`{name}` has {count} networks; distances need two at least")
    return count


@dataclass(frozen=True, eq=False)
class _Distances:
    """Distances between networks, divided by the distances of held-out networks."""

    space: Space
    train: Points
    held_out: Points
    known: Tensor
    spread: float
    width: float

    @classmethod
    def of(cls, space: Space, train: Points, held_out: Points) -> "_Distances":
        known, _ = nearest(space, held_out, train)
        return cls(space, train, held_out, known, spread(space, held_out), _mean_distance(space, held_out, held_out))

    def describe(self, own: Points) -> dict[str, Any]:
        """Return the entries of a `Score` that measure distances, for some networks."""
        distance, sources = nearest(self.space, own, self.train)
        few = own[: max(2, len(self.train))]  # as many as for training: distances depend on the number
        others, _ = nearest(self.space, few, few, is_same=True)
        # The energy distance 2 E|X - Y| - E|X - X'| - E|Y - Y'| is zero only for equal distributions (Szekely and
        # Rizzo 2013); without bias, since no point is paired with itself, it may come out negative.
        energy = (
            2 * _mean_distance(self.space, own, self.held_out, is_same=False)
            - _mean_distance(self.space, own, own)
            - self.width
        )
        return {
            "distance": float(distance.median() / self.known.median()),
            "copied": count_near(distance, self.known, NEAR),
            "sources": int(sources.bincount().count_nonzero()),
            "repeated": count_near(others, self.known, NEARER),
            "spread": spread(self.space, own) / self.spread,
            "two_sample": max(0.0, energy) / self.width,
        }


def _map(points: Mapping[str, Points]) -> tuple[dict[str, tuple[tuple[float, float], ...]], float]:
    """Project networks to the first two principal axes of training networks; also return the explained variance."""
    train = points["training"].double()
    middle = train.mean(0)
    values, axes = (
        torch.linalg.eigh(torch.cov(train.T)) if train.shape[1] <= MANY_COORDINATES else _first_axes(train - middle)
    )
    total = float((train - middle).square().sum() / (len(train) - 1))
    found = {}
    for name, own in points.items():
        flat = (own[:MAPPED].double() - middle) @ axes[:, -2:].flip(1)
        found[name] = tuple((x, y) for x, y in flat.tolist())
    return found, float(values[-2:].sum()) / max(total, 1e-30)


def _first_axes(centered: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest eigenvalues and their eigenvectors of the covariance, with less work than `eigh` needs."""
    few = centered[torch.linspace(0, len(centered) - 1, min(1000, len(centered))).long()]
    _, sizes, axes = torch.linalg.svd(few, full_matrices=False)
    return sizes.flip(0).square() / max(1, len(few) - 1), axes.T.flip(1)


def _mean_distance(space: Space, first: Points, second: Points, *, is_same: bool = True) -> float:
    """Return the mean distance between points of two kinds, or between the points of one kind, without further
    alignment.
    """
    total = sum(float(space.distance(point.unsqueeze(0), second).sum()) for point in first)
    return total / (len(first) * (len(second) - is_same))


def _add_noise(space: Space, train: Points, copies: Points, noise: Points, distance: float) -> Points:
    """Return noisy copies with about the same distance to training networks as held-out networks."""
    scaled = noise * train.std(0)
    low, high = 0.0, 4.0
    few = slice(0, 32)
    for _ in range(BISECTIONS):
        size = (low + high) / 2
        found = float(nearest(space, space.project(copies[few] + size * scaled[few]), train)[0].median())
        low, high = (size, high) if found < distance else (low, size)
    return space.project(copies + low * scaled)


def _mean(space: Space, groups: Tensor) -> Points:
    """Return the mean of each group of points, `[count, group, values]`, projected to the spheres."""
    return space.map(groups.mean(1), euclidean=lambda x: x, spherical=sphere.normalize)

"""Quality and novelty of generated networks, always compared with networks that are made without a flow."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regauge.core.arguments import check_arguments
from regauge.core.chance import given_or_seed
from regauge.core.params import Params, count_models, select
from regauge.core.symmetry import Symmetry
from regauge.core.task import Judge, Task
from regauge.flow.alignment import align_points, find_reference
from regauge.flow.controls import make_controls
from regauge.flow.judgement import Bins, Judgement, Score
from regauge.flow.manifold import Points
from regauge.flow.novelty import NEAR, NEARER, count_near, nearest, spread
from regauge.flow.representation import Representation
from regauge.flow.space import Space

BINS = 15
"""Bins of the calibration error."""
RUN_AT_ONCE = 64
"""Networks that are run at a time."""
MANY_COORDINATES = 2000
"""Coordinates beyond which the axes of the map are those of fewer networks."""
KNOWN = 500
"""Most training networks whose wrong answers are looked at."""
MAPPED = 300
"""Most networks of a kind on the map."""


@check_arguments
@torch.no_grad()
def judge(
    samples: Mapping[str, Tensor],
    train: Mapping[str, Tensor],
    held_out: Mapping[str, Tensor],
    symmetry: Symmetry,
    evaluate: Judge,
    *,
    generator: torch.Generator | None = None,
) -> Judgement:
    """Judge generated networks by quality and novelty, next to held-out networks and controls.

    All networks are made canonical and aligned to one middle of the training networks. Distances in this common gauge
    say which networks may be near one another; these few are aligned pair by pair, since in the common gauge small
    distances come out too large. There are as many controls of each kind as samples: copies, copies with as much noise
    as brings them to the distance of held-out networks, means of 2 and of 16 aligned training networks, and normal
    distributions with the deviations and with all covariances of aligned training networks.

    Args:
        samples: Generated networks with a leading model axis; two at least.
        train: The networks that the flow was fitted to; if they are checkpoints, of runs that `held_out` has none of.
        held_out: Networks of the same kind that it never saw; two at least.
        symmetry: The symmetry of the networks.
        evaluate: A task, or a function from the parameters of one network to its metrics, with "loss" among them.
        generator: Source of the controls; a fixed one unless given.

    Raises:
        ValueError: There are fewer than two networks of a kind, or they are of different architectures.
    """
    kinds = {"samples": samples, "train": train, "held_out": held_out}
    for name, population in kinds.items():
        if count_models(population) < 2:
            raise ValueError(f"`{name}` has {count_models(population)} networks; distances need two at least")
    chance = given_or_seed(generator)
    space = Space.of(train, symmetry, Representation())
    points = {name: space.enter(population) for name, population in kinds.items()}
    middle = find_reference(space, points["train"])
    points = {name: align_points(space, middle, own) for name, own in points.items()}
    controls = make_controls(space, points["train"], points["held_out"], len(points["samples"]), chance)
    judged = {"generated": points["samples"], "held-out": points["held_out"], **controls}
    known = {"generated": samples, "held-out": held_out}
    distances = _Distances.of(space, points["train"], points["held_out"])
    some = torch.linspace(0, len(points["train"]) - 1, min(KNOWN, len(points["train"]))).long()
    answers = _predictions(evaluate, {name: tensor[some] for name, tensor in train.items()})
    scores, losses = [], {}
    reliability: dict[str, Bins] = {}
    for name, own in judged.items():
        quality, losses[name], bins = _quality(evaluate, _as_given(known.get(name) or space.leave(own), train), answers)
        if name in known:
            reliability |= {f"{name}, {kind}": rows for kind, rows in bins.items()}
        scores.append(Score(name=name, networks=len(own), **quality, **distances.describe(own)))
    places, share = _map(points)
    one_answer = None if answers is None else float(answers[1].bincount().max()) / len(answers[1])
    return Judgement(tuple(scores), one_answer, losses, reliability, places, share)


def _as_given(params: Mapping[str, Tensor], train: Mapping[str, Tensor]) -> Params:
    """Networks in the dtypes of those that the flow was fitted to, in which the task runs."""
    return {name: tensor.to(train[name].dtype) for name, tensor in params.items()}


@dataclass(frozen=True, eq=False)
class _Distances:
    """Distances between networks, in units of those of held-out networks."""

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
        """The distances of some networks, for their score."""
        distance, sources = nearest(self.space, own, self.train)
        few = own[: max(2, len(self.train))]  # Among more networks than those for training, each has nearer ones.
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
    """Networks in the plane of the training networks' largest variance, and the share of it that the plane shows."""
    train = points["train"].double()
    middle = train.mean(0)
    values, axes = (
        torch.linalg.eigh(torch.cov(train.T)) if train.shape[1] <= MANY_COORDINATES else _first_axes(train - middle)
    )
    total = float((train - middle).square().sum() / (len(train) - 1))
    names = {"train": "training", "held_out": "held-out", "samples": "generated"}
    found = {}
    for name, label in names.items():
        flat = (points[name][:MAPPED].double() - middle) @ axes[:, -2:].flip(1)
        found[label] = tuple((x, y) for x, y in flat.tolist())
    return found, float(values[-2:].sum()) / max(total, 1e-30)


def _first_axes(centered: Tensor) -> tuple[Tensor, Tensor]:
    """Like `eigh` of the covariance, but only the largest eigenvalues, for many coordinates."""
    few = centered[torch.linspace(0, len(centered) - 1, min(1000, len(centered))).long()]
    _, sizes, axes = torch.linalg.svd(few, full_matrices=False)
    return sizes.flip(0).square() / max(1, len(few) - 1), axes.T.flip(1)


def _mean_distance(space: Space, first: Points, second: Points, *, is_same: bool = True) -> float:
    """The mean distance in the common gauge of a point of one kind to a different one of another."""
    total = sum(float(space.distance(point.unsqueeze(0), second).sum()) for point in first)
    return total / (len(first) * (len(second) - is_same))


def _predictions(evaluate: Judge, params: Mapping[str, Tensor]) -> tuple[Tensor, Tensor] | None:
    """The class probabilities of networks, `[models, examples, classes]`, and the classes of the examples."""
    if not isinstance(evaluate, Task):
        return None
    made, wanted = [], []
    for inputs, targets in evaluate.batches:
        if not isinstance(targets, Tensor) or targets.is_floating_point() or targets.ndim != 1:
            return None
        run = torch.func.vmap(evaluate.run, in_dims=(0, None), chunk_size=RUN_AT_ONCE)
        outputs = run(dict(params), inputs)
        if outputs.ndim != 3:
            return None
        made.append(outputs.softmax(-1))
        wanted.append(targets)
    return (torch.cat(made, 1), torch.cat(wanted)) if made else None


def _quality(
    evaluate: Judge, params: Mapping[str, Tensor], train: tuple[Tensor, Tensor] | None
) -> tuple[dict[str, Any], tuple[float, ...], dict[str, Bins]]:
    """The scores of outputs, the loss of each network, and the bins of confidence."""
    losses, accuracy = _metrics(evaluate, params)
    found: dict[str, Any] = {
        "loss": float(losses.mean()),
        "loss_deviation": float(losses.std()),
        "accuracy": None if accuracy is None else float(accuracy.mean()),
    }
    blank = ("calibration", "average_loss", "average_accuracy", "disagreement", "divergence", "overlap")
    own = _predictions(evaluate, params)
    if own is None or train is None:
        return found | dict.fromkeys(blank), tuple(losses.tolist()), {}
    probabilities, classes = own
    average = probabilities.double().mean(0)
    right = average[torch.arange(len(classes)), classes]
    answers, known = probabilities.argmax(-1), train[0].argmax(-1)
    scores = found | {
        "calibration": float(torch.stack([_calibration(p, classes) for p in probabilities]).mean()),
        "average_loss": float(-right.clamp_min(1e-30).log().mean()),
        "average_accuracy": float((average.argmax(-1) == classes).double().mean()),
        "disagreement": _over_pairs(answers.unsqueeze(-1), lambda a, b: (a != b).double().mean((-2, -1))),
        "divergence": _divergence(probabilities.double()),
        "overlap": float(_overlap(answers != classes, known != classes).mean()),
    }
    bins = {
        "single": _reliability(probabilities.flatten(0, 1), classes.repeat(len(probabilities))),
        "average": _reliability(average, classes),
    }
    return scores, tuple(losses.tolist()), bins


def _reliability(probabilities: Tensor, classes: Tensor) -> Bins:
    """Mean confidence, accuracy and share of the answers of each bin of confidence that has any."""
    confidence, answer = probabilities.double().max(-1)
    places = (confidence * BINS).long().clamp_max(BINS - 1)
    counts = torch.bincount(places, minlength=BINS)
    sums = [torch.bincount(places, one, BINS) for one in (confidence, (answer == classes).double())]
    kept = counts > 0
    rows = torch.stack([*(one[kept] / counts[kept] for one in sums), counts[kept] / len(classes)], 1)
    return tuple((first, second, third) for first, second, third in rows.tolist())


def _metrics(evaluate: Judge, params: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    """Loss and accuracy of each network."""
    if isinstance(evaluate, Task):
        count = count_models(params)
        parts = [
            evaluate.evaluate_each(select(params, slice(k, k + RUN_AT_ONCE))) for k in range(0, count, RUN_AT_ONCE)
        ]
        metrics = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        return metrics["loss"], metrics.get("accuracy")
    each = [evaluate(select(params, k)) for k in range(count_models(params))]
    losses = torch.tensor([one["loss"] for one in each], dtype=torch.float64)
    has_accuracy = all("accuracy" in one for one in each)
    return losses, torch.tensor([one["accuracy"] for one in each]).double() if has_accuracy else None


def _calibration(probabilities: Tensor, classes: Tensor) -> Tensor:
    """The expected calibration error of one network: confidence against accuracy in bins of confidence."""
    confidence, answer = probabilities.double().max(-1)
    places = (confidence * BINS).long().clamp_max(BINS - 1)
    gap = torch.zeros(BINS, dtype=torch.float64).index_add(0, places, (answer == classes).double() - confidence)
    return gap.abs().sum() / len(classes)


def _over_pairs(values: Tensor, compare: Callable[[Tensor, Tensor], Tensor]) -> float:
    """The mean over all pairs of networks."""
    total, count = 0.0, len(values)
    for k in range(1, count):
        total += float(compare(values[k:], values[: count - k]).sum())
    return total / (count * (count - 1) / 2)


def _divergence(probabilities: Tensor) -> float:
    """Jensen and Shannon's divergence, mean over examples and pairs: entropies of pairs' means, less those of one."""

    def entropy(p: Tensor) -> Tensor:
        terms: Tensor = torch.special.xlogy(p, p)
        return -terms.sum(-1).mean(-1)

    return _over_pairs(probabilities, lambda p, q: entropy((p + q) / 2)) - float(entropy(probabilities).mean())


def _overlap(wrong: Tensor, known: Tensor) -> Tensor:
    """The largest intersection over union of each network's wrong answers with those of a training network."""
    first, second = wrong.double(), known.double()
    shared = first @ second.T
    union = first.sum(1, keepdim=True) + second.sum(1) - shared
    return torch.where(union > 0, shared / union.clamp_min(1), 1.0).amax(1)

"""How good and how new generated networks are, always beside what is made without a flow."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from regauge.core.arguments import check_arguments
from regauge.core.params import count_models, select
from regauge.core.symmetry import Symmetry
from regauge.core.task import Judge, Task
from regauge.flow.alignment import align_points, find_reference
from regauge.flow.controls import make_controls, nearest
from regauge.flow.manifold import Points
from regauge.flow.space import Representation, Space

COPIES = 0.8
"""Networks whose nearest training network is nearer than this share of what it is for held-out ones are copies."""
BINS = 15
"""Of the calibration error."""
AT_ONCE = 64
"""Networks that are run at a time."""
LARGE = 2000
"""Coordinates beyond which the axes of the map are those of fewer networks."""
KNOWN = 500
"""Most training networks whose wrong answers are looked at."""
MAPPED = 300
"""Most networks of a kind on the map."""


@dataclass(frozen=True)
class Score:
    """What is known about some networks. Numbers that need class probabilities are None without a task of classes.

    Attributes:
        name: What they are.
        networks: How many.
        loss: Mean over networks.
        loss_deviation: Over networks.
        accuracy: Mean over networks.
        calibration: Expected calibration error of single networks, mean over them.
        average_loss: Of the average of all class probabilities.
        average_accuracy: As above.
        distance: Median distance to the nearest training network, in units of that of held-out networks: about 1 for
            new networks, 0 for copies.
        sources: Number of different training networks that are the nearest of one.
        spread: Mean distance of two networks, in units of that of held-out networks.
        disagreement: Share of examples on which two networks name different classes, mean over pairs.
        divergence: Jensen-Shannon divergence of two networks' probabilities, in nats, mean over examples and pairs.
        overlap: Largest share of wrong answers (intersection over union) that is shared with a training network; mean
            over networks.
        two_sample: Energy distance to held-out networks, in units of their spread: 0 for the same distribution.
    """

    name: str
    networks: int
    loss: float
    loss_deviation: float
    accuracy: float | None
    calibration: float | None
    average_loss: float | None
    average_accuracy: float | None
    distance: float
    sources: int
    spread: float
    disagreement: float | None
    divergence: float | None
    overlap: float | None
    two_sample: float


@dataclass(frozen=True)
class Judgement:
    """Scores of generated networks, of held-out ones, and of what is made of training networks without a flow.

    Attributes:
        scores: The generated networks first, held-out ones second.
        is_copier: Whether the generated networks are copies of training networks: their median distance to the nearest
            one is less than 0.8 of what it is for held-out networks.
        losses: Of each network, by the names of the scores.
        reliability: For single networks and for the average of all, generated and held out: confidence, accuracy and
            share of the answers in bins of confidence. Empty without a task of classes.
        places: Training, held-out and generated networks in the plane of the training networks' largest variance.
        share: What that plane shows of the variance.
    """

    scores: tuple[Score, ...]
    is_copier: bool
    losses: Mapping[str, tuple[float, ...]]
    reliability: Mapping[str, "Bins"]
    places: Mapping[str, tuple[tuple[float, float], ...]]
    share: float

    def __getitem__(self, name: str) -> Score:
        return next(score for score in self.scores if score.name == name)

    def __str__(self) -> str:
        names = [part.name for part in fields(Score)]
        rows = [[_text(value) for value in asdict(score).values()] for score in self.scores]
        widths = [max(len(row[k]) for row in [names, *rows]) for k in range(len(names))]
        lines = ["  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in [names, *rows]]
        verdict = "copies of training networks" if self.is_copier else "no copies of training networks"
        return "\n".join([*lines, "", f"the generated networks are {verdict}"])


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
    """Judge generated networks by quality and novelty, beside held-out networks and controls.

    All networks are made canonical and aligned to one middle of the training networks first, so that in distances no
    symmetry counts. There are as many controls of each kind as samples: copies, copies with as much noise as brings
    them to the distance of held-out networks, means of 2 and of 16 aligned training networks, and normal distributions
    the deviations and with all covariances of aligned training networks.

    Args:
        samples: Generated networks with a leading model axis; two at least.
        train: The networks that the flow was fitted to; if they are checkpoints, of runs that `held_out` has none of.
        held_out: Networks of the same kind that it never saw; two at least.
        symmetry: Of the networks.
        evaluate: A task, or a function from the parameters of one network to its metrics, with "loss" among them.
        generator: Source of the controls; a fixed one unless given.

    Raises:
        ValueError: There are fewer than two networks of a kind, or they are of different architectures.
    """
    kinds = {"samples": samples, "train": train, "held_out": held_out}
    for name, population in kinds.items():
        if count_models(population) < 2:
            raise ValueError(f"`{name}` has {count_models(population)} networks; distances need two at least")
    chance = torch.Generator().manual_seed(0) if generator is None else generator
    space = Space.of(train, symmetry, Representation())
    points = {name: space.enter(population) for name, population in kinds.items()}
    middle = find_reference(space, points["train"])
    points = {name: align_points(space, middle, own) for name, own in points.items()}
    controls = make_controls(space, points["train"], points["held_out"], len(points["samples"]), chance)
    judged = {"generated": points["samples"], "held-out": points["held_out"], **controls}
    known = {"generated": samples, "held-out": held_out}
    unit = float(nearest(space, points["held_out"], points["train"])[0].median())
    width = _spread(space, points["held_out"], points["held_out"])
    some = torch.linspace(0, len(points["train"]) - 1, min(KNOWN, len(points["train"]))).long()
    answers = _predictions(evaluate, {name: tensor[some] for name, tensor in train.items()})
    scores, losses = [], {}
    reliability: dict[str, Bins] = {}
    for name, own in judged.items():
        params = known.get(name) or space.leave(own)
        quality, losses[name], bins = _quality(evaluate, params, answers)
        if name in known:
            reliability |= {f"{name}, {kind}": rows for kind, rows in bins.items()}
        distance, sources = nearest(space, own, points["train"])
        spread = _spread(space, own, own)
        energy = 2 * _spread(space, own, points["held_out"], is_same=False) - spread - width
        scores.append(
            Score(
                name=name,
                networks=len(own),
                **quality,
                distance=float(distance.median()) / unit,
                sources=int(sources.bincount().count_nonzero()),
                spread=spread / width,
                two_sample=max(0.0, energy) / width,
            )
        )
    places, share = _map(points)
    return Judgement(tuple(scores), scores[0].distance < COPIES, losses, reliability, places, share)


def _map(points: Mapping[str, Points]) -> tuple[dict[str, tuple[tuple[float, float], ...]], float]:
    """Networks in the plane of the training networks' largest variance, and the share of it that the plane shows."""
    train = points["train"].double()
    middle = train.mean(0)
    values, axes = torch.linalg.eigh(torch.cov(train.T)) if train.shape[1] <= LARGE else _first_axes(train - middle)
    total = float((train - middle).square().sum() / (len(train) - 1))
    names = {"train": "training", "held_out": "held-out", "samples": "generated"}
    found = {}
    for name, label in names.items():
        flat = (points[name][:MAPPED].double() - middle) @ axes[:, -2:].flip(1)
        found[label] = tuple((x, y) for x, y in flat.tolist())
    return found, float(values[-2:].sum()) / max(total, 1e-30)


def _first_axes(centered: Tensor) -> tuple[Tensor, Tensor]:
    """As `eigh` of the covariance, but only the largest ones, for many coordinates."""
    few = centered[torch.linspace(0, len(centered) - 1, min(1000, len(centered))).long()]
    _, sizes, axes = torch.linalg.svd(few, full_matrices=False)
    return sizes.flip(0).square() / max(1, len(few) - 1), axes.T.flip(1)


def _spread(space: Space, first: Points, second: Points, *, is_same: bool = True) -> float:
    """The mean distance of a point of one kind to a different one of another."""
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
        run = torch.func.vmap(evaluate.run, in_dims=(0, None), chunk_size=AT_ONCE)
        outputs = run(dict(params), inputs)
        if outputs.ndim != 3:
            return None
        made.append(outputs.softmax(-1))
        wanted.append(targets)
    return (torch.cat(made, 1), torch.cat(wanted)) if made else None


Bins = tuple[tuple[float, float, float], ...]
"""Confidence, accuracy and share of the answers, bin by bin."""


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
        parts = [evaluate.evaluate_each(select(params, slice(k, k + AT_ONCE))) for k in range(0, count, AT_ONCE)]
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


def _text(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)

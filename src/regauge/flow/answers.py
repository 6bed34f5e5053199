"""Quality of networks, measured by their outputs: loss, accuracy, calibration, and disagreement."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from regauge.core.params import count_models, select
from regauge.core.task import Judge, Task, over_networks
from regauge.flow.judgement import Bins

BINS = 15
"""The number of bins of the calibration error."""


def predict_classes(evaluate: Judge, params: Mapping[str, Tensor]) -> tuple[Tensor, Tensor] | None:
    """Return networks' class probabilities, `[models, examples, classes]`, and the class labels of the examples."""
    if not isinstance(evaluate, Task):
        return None
    made, wanted = [], []
    for inputs, targets in evaluate.batches:
        if not isinstance(targets, Tensor) or targets.is_floating_point() or targets.ndim != 1:
            return None
        outputs = over_networks(partial(evaluate.run, inputs=inputs), params, inputs)
        if outputs.ndim != 3:
            return None
        made.append(outputs.softmax(-1))
        wanted.append(targets)
    return (torch.cat(made, 1), torch.cat(wanted)) if made else None


def find_one_answer(answers: tuple[Tensor, Tensor] | None) -> float | None:
    """Return the accuracy of the best constant prediction, given the result of `predict_classes`."""
    return None if answers is None else float(answers[1].bincount().max()) / len(answers[1])


def find_means(evaluate: Judge, params: Mapping[str, Tensor]) -> tuple[float, float | None]:
    """Return the mean loss and the mean accuracy of networks."""
    losses, accuracy = find_metrics(evaluate, params)
    return float(losses.mean()), None if accuracy is None else float(accuracy.mean())


def measure_quality(
    evaluate: Judge, params: Mapping[str, Tensor], train: tuple[Tensor, Tensor] | None
) -> tuple[dict[str, Any], tuple[float, ...], dict[str, Bins]]:
    """Return the scores of the networks' outputs, the loss of each network, and the confidence bins."""
    losses, accuracy = find_metrics(evaluate, params)
    found: dict[str, Any] = {
        "loss": float(losses.mean()),
        "loss_deviation": float(losses.std()),
        "accuracy": None if accuracy is None else float(accuracy.mean()),
    }
    blank = ("calibration", "average_loss", "average_accuracy", "disagreement", "divergence", "overlap")
    own = predict_classes(evaluate, params)
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
    """Return the mean confidence, the accuracy and the share of predictions in each non-empty confidence bin."""
    confidence, answer = probabilities.double().max(-1)
    places = (confidence * BINS).long().clamp_max(BINS - 1)
    counts = torch.bincount(places, minlength=BINS)
    sums = [torch.bincount(places, one, BINS) for one in (confidence, (answer == classes).double())]
    kept = counts > 0
    rows = torch.stack([*(one[kept] / counts[kept] for one in sums), counts[kept] / len(classes)], 1)
    return tuple((first, second, third) for first, second, third in rows.tolist())


def find_metrics(evaluate: Judge, params: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    """Return the loss and accuracy of each network."""
    if isinstance(evaluate, Task):
        metrics = evaluate.evaluate_each(params)
        return metrics["loss"], metrics.get("accuracy")
    each = [evaluate(select(params, k)) for k in range(count_models(params))]
    losses = torch.tensor([one["loss"] for one in each], dtype=torch.float64)
    has_accuracy = all("accuracy" in one for one in each)
    return losses, torch.tensor([one["accuracy"] for one in each]).double() if has_accuracy else None


def _calibration(probabilities: Tensor, classes: Tensor) -> Tensor:
    """Return the expected calibration error of one network, from confidence and accuracy in confidence bins."""
    confidence, answer = probabilities.double().max(-1)
    places = (confidence * BINS).long().clamp_max(BINS - 1)
    gap = torch.zeros(BINS, dtype=torch.float64).index_add(0, places, (answer == classes).double() - confidence)
    return gap.abs().sum() / len(classes)


def _over_pairs(values: Tensor, compare: Callable[[Tensor, Tensor], Tensor]) -> float:
    """Return the mean over all pairs of networks."""
    total, count = 0.0, len(values)
    for k in range(1, count):
        total += float(compare(values[k:], values[: count - k]).sum())
    return total / (count * (count - 1) / 2)


def _divergence(probabilities: Tensor) -> float:
    """Return the Jensen-Shannon divergence, averaged over examples and pairs of networks."""

    def entropy(p: Tensor) -> Tensor:
        terms: Tensor = torch.special.xlogy(p, p)
        return -terms.sum(-1).mean(-1)

    return _over_pairs(probabilities, lambda p, q: entropy((p + q) / 2)) - float(entropy(probabilities).mean())


def _overlap(wrong: Tensor, known: Tensor) -> Tensor:
    """Return, for each network, the largest overlap (IoU) between its wrong predictions and the wrong predictions of a
    training network.
    """
    first, second = wrong.double(), known.double()
    shared = first @ second.T
    union = first.sum(1, keepdim=True) + second.sum(1) - shared
    return torch.where(union > 0, shared / union.clamp_min(1), 1.0).amax(1)

"""The judgement of generated networks: their scores, scores of held-out and control networks, and a verdict."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from regauge.flow.novelty import NEAR, find_chance
from regauge.names import VERSION

MANY, RARE = 0.2, 0.02
"""Thresholds for copies: the largest share of networks near training networks, and the largest probability that chance
causes this share."""
WORKING, HALF = 0.9, 0.5
"""Two shares of the held-out networks' performance. Generated networks work if they reach the first share, and work
less well if they reach only the second share."""
Bins = tuple[tuple[float, float, float], ...]
"""Confidence, accuracy and share of the predictions, for each bin."""


@dataclass(frozen=True)
class Score:
    """The scores of one kind of networks. Scores that need class probabilities are None without a classification task.

    Distances are measured after two networks are aligned to each other. To save time, only the few pairs that are
    closest after alignment to one common mean are aligned to each other.

    Attributes:
        name: The kind of networks.
        networks: The number of networks.
        loss: The mean loss over networks.
        loss_deviation: The standard deviation of the loss over networks.
        accuracy: The mean accuracy over networks.
        calibration: The mean expected calibration error over networks.
        average_loss: The loss of the average of all class probabilities.
        average_accuracy: The accuracy of the average of all class probabilities.
        distance: The median distance to the nearest training network, divided by the median distance of held-out
            networks to their nearest training network. The ratio is about 1 for new networks and 0 for copies.
        copied: The share of networks that are copies of a training network. The distance of a copy is below that of 95%
            of the held-out networks, and below 0.8 of the held-out median distance.
        sources: The number of different training networks that are the nearest training network of at least one
            network.
        repeated: The share of networks that are copies of another network of the same kind. The bounds are those of
            `copied`, with 0.5 instead of 0.8.
        spread: The mean distance between two networks of the kind `name`, divided by the mean distance between two
            held-out networks.
        disagreement: The share of examples for which two networks predict different classes, averaged over pairs.
        divergence: The Jensen-Shannon divergence of two networks' class probabilities in nats, averaged over examples
            and pairs.
        overlap: The largest intersection over union between the wrong predictions of a network and of a training
            network, averaged over networks.
        two_sample: The energy distance to held-out networks after alignment to one mean, divided by the spread of the
            held-out networks; 0 for equal distributions.
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
    copied: float
    sources: int
    repeated: float
    spread: float
    disagreement: float | None
    divergence: float | None
    overlap: float | None
    two_sample: float


@dataclass(frozen=True)
class Judgement:
    """Scores of generated networks, of held-out networks, and of controls made from training networks without a flow.

    Attributes:
        scores: The scores of generated networks, of held-out networks, and of the controls, in this order.
        one_answer: The accuracy of the best constant prediction; None without a classification task.
        losses: The loss of each network, by the names of the scores.
        reliability: Confidence, accuracy and share of the predictions in confidence bins. There are bins for single
            networks and for the average prediction, of generated and of held-out networks. `reliability` is empty
            without a classification task.
        places: Training, held-out and generated networks, projected to the first two principal axes of the training
            networks.
        share: The share of the variance that the two principal axes explain.
    """

    scores: tuple[Score, ...]
    one_answer: float | None
    losses: Mapping[str, tuple[float, ...]]
    reliability: Mapping[str, Bins]
    places: Mapping[str, tuple[tuple[float, float], ...]]
    share: float

    def results(self) -> dict[str, Any]:
        """Return the judgement as JSON, which `regauge.report.write_page` renders together with facts on the flow."""
        return {
            "format": "regauge.judgement",
            "version": VERSION,
            "scores": [asdict(score) for score in self.scores],
            "verdict": list(self.verdict),
            "is_working": self.is_working,
            "is_copier": self.is_copier,
            "is_collapsed": self.is_collapsed,
            "one_answer": self.one_answer,
            "losses": self.losses,
            "reliability": self.reliability,
            "places": self.places,
            "share": self.share,
        }

    @property
    def is_working(self) -> bool | None:
        """Whether generated networks have 90% of held-out networks' performance; None if held-out networks fail the
        task.

        The performance is the accuracy minus the accuracy of the best constant prediction. If accuracies are missing
        and losses are positive, the performance is the inverse of the loss.
        """
        return None if (kept := self._kept) is None else kept >= WORKING

    @property
    def is_collapsed(self) -> bool:
        """Whether the generated networks are copies of one another, that is, more than a fifth of them are repeated."""
        return self.scores[0].repeated > MANY

    @property
    def is_copier(self) -> bool:
        """Whether the generated networks are copies of training networks or of one another.

        Generated networks count as copies in three cases. First, more than a fifth of the networks are repeated.
        Second, more networks are copies of training networks than chance explains, given the number of held-out
        networks. Third, the median distance to the nearest training network is less than 0.8 of the median distance for
        held-out networks.
        """
        return self._is_copied or self.is_collapsed

    @property
    def verdict(self) -> tuple[str, ...]:
        """Messages that state whether the generated networks work, and whether they are new."""
        return self._quality(), *self._novelty()

    def __getitem__(self, name: str) -> Score:
        return next(score for score in self.scores if score.name == name)

    def __str__(self) -> str:
        names = [part.name for part in fields(Score)]
        rows = [[_text(value) for value in asdict(score).values()] for score in self.scores]
        widths = [max(len(row[k]) for row in [names, *rows]) for k in range(len(names))]
        lines = ["  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in [names, *rows]]
        return "\n".join([*self.verdict, "", *lines])

    @property
    def _is_copied(self) -> bool:
        own, known = self.scores[:2]
        near, held_out = (round(one.copied * one.networks) for one in (own, known))
        chance = find_chance(near, own.networks, held_out, known.networks)
        return (own.copied > MANY and chance < RARE) or own.distance < NEAR

    @property
    def _kept(self) -> float | None:
        """The performance of generated networks, as a share of the held-out networks' performance."""
        own, known = ((score.loss, score.accuracy) for score in self.scores[:2])
        return find_kept(own, known, self.one_answer)

    def _quality(self) -> str:
        """Return the first sentence of the verdict, about the loss and accuracy of the networks."""
        own, known = self.scores[:2]
        loss = f"a loss of {own.loss:.3g} against {known.loss:.3g}"
        if own.accuracy is None or known.accuracy is None:
            numbers = f"they have {loss} of held-out networks"
        else:
            numbers = f"{own.accuracy:.1%} accuracy against {known.accuracy:.1%} of held-out networks, and {loss}"
        if (kept := self._kept) is None:
            return f"Whether the sampled networks work is unknown, because held-out networks do not work: {numbers}."
        if kept >= WORKING:
            return f"The sampled networks work: {numbers}."
        if kept >= HALF:
            return f"The sampled networks work worse than trained ones: {numbers}."
        answer = "" if self.one_answer is None else f"; a constant answer has {self.one_answer:.1%}"
        return f"The sampled networks do not work: {numbers}{answer}."

    def _novelty(self) -> Iterator[str]:
        """Yield sentences about copies of training networks, and about copies among the generated networks."""
        own = self.scores[0]
        numbers = f"{own.copied:.0%} of them are nearer to one than nearly all held-out networks are, and their median "
        numbers += f"distance is {own.distance:.2f} times that of held-out networks"
        if self._is_copied:
            yield f"They are copies of training networks: {numbers}."
        elif self.is_collapsed:
            yield f"They are not copies of training networks: {numbers}."
        else:
            yield f"They are new, not copies of training networks: {numbers}."
        if self.is_collapsed:
            yield (f"They are copies of one another: {own.repeated:.0%} of them are repeated by another sample.")
        elif self._kept is not None and self._kept < HALF and not self.is_copier:
            yield "But networks that do not work are new in any case."


def find_kept(
    own: tuple[float, float | None], known: tuple[float, float | None], one_answer: float | None
) -> float | None:
    """Return the performance of networks relative to reference networks, or None if the reference networks do not solve
    the task.

    `one_answer` is the accuracy of the best constant prediction; see `Judgement.is_working`.
    """
    (loss, accuracy), (least_loss, most) = own, known
    if accuracy is not None and most is not None:
        least = one_answer or 0.0
        return (accuracy - least) / (most - least) if most > least else None
    if math.isnan(loss):
        return 0.0
    return least_loss / loss if min(loss, least_loss) > 0 else None


def _text(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)

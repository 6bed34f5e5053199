"""Figure 5 of paper 001: networks that were trained on different halves of the classes."""

from dataclasses import dataclass, replace

from regauge.report.pictures import Chart, Series
from regauge.zoo.presets import cifar10_halves, mnist_mlps
from regauge.zoo.training.config import ClassHalves
from regauge_papers.experiment import Experiment, Run, Scale
from regauge_papers.learned import mlps
from regauge_papers.learned.study import (
    Lessons,
    Networks,
    Population,
    align_pairs,
    describe_training,
    learned_ways,
    notes_of,
    train_matcher,
    untrained_ways,
)
from regauge_papers.populations import SECONDS
from regauge_papers.table import AREA, BARRIER, MIDPOINT, Quantity, Row, Table, halfway

ACCURACY = Quantity("accuracy halfway", of=halfway("accuracy"))
ENDS = Quantity("loss of both", of=lambda record: (record["line"][0]["loss"] + record["line"][-1]["loss"]) / 2)
ENDS_RIGHT = Quantity(
    "accuracy of both", of=lambda record: (record["line"][0]["accuracy"] + record["line"][-1]["accuracy"]) / 2
)
SHOWN = ("Weight Matching", "Mixed Matching", "Weight Matching + scales", "Deep-Align", "Deep-Align + scales")
"""The rows in the picture of accuracies. Rows with much lower accuracies, such as the rows without alignment, would
make all other rows look equal, and are left out."""
COLUMNS = (BARRIER, AREA, MIDPOINT, ENDS, ACCURACY, ENDS_RIGHT, SECONDS)


@dataclass(frozen=True)
class Study:
    """Settings: networks of both halves of the classes, and the training of a matcher on these networks."""

    lessons: Lessons
    notes: tuple[str, ...]


def config(scale: Scale) -> Study:
    """Return the settings: MLPs on MNIST; at the paper's scale, the paper's CNNs on CIFAR-10."""
    if scale == "paper":
        population = Population("cifar10-halves", cifar10_halves(), 100)
        return Study(mlps.lessons(scale, population), ())
    halves = replace(mnist_mlps(), subset=ClassHalves(0.95))
    note = f"{mlps.REDUCED}; here MLPs on MNIST stand in for the paper's CNNs on CIFAR-10"
    count = 128 if scale == "cpu" else None
    return Study(mlps.lessons(scale, mlps.population(scale, "mnist-halves", halves, count=count)), (note,))


def measure(study: Study, run: Run) -> Table:
    """Align pairs with one network of each half, and evaluate the lines between them on all classes."""
    lessons = study.lessons
    networks = Networks.of(lessons.populations[0], run)
    matcher = train_matcher(lessons, [networks], run)
    without, trained = untrained_ways(has_classes=True), learned_ways(matcher, has_classes=True)
    found = align_pairs(networks, without, lessons.examples, run)
    found += align_pairs(networks, trained, lessons.examples, run, lessons)
    rows = tuple(
        Row.of(way.label, [records], COLUMNS) for way, records in zip((*without, *trained), found, strict=True)
    )
    accuracies = tuple(
        Series(row.label, [point["t"] for point in row.curve], [point["accuracy"] for point in row.curve])
        for row in rows
        if row.label in SHOWN
    )
    notes = (
        "one half of the networks was trained on 95% of the examples of the first half of the classes and 5% of the "
        "others, the other one on the rest; pairs are one network of each, losses and accuracies those of all classes",
        f"{describe_training(matcher, lessons)}; the two of a pair in training are of the same half or not",
        *notes_of(networks),
        "loss of both, accuracy of both: the means of both networks, at the ends of the line; a barrier is measured "
        "against them, so that it is zero where the line lies below",
        *study.notes,
        "the paper shows curves without numbers: with Deep-Align, Sinkhorn and activation matching the middle of the "
        "line has a lower loss than its ends",
    )
    pictures = {"accuracy": (Chart("Accuracy on all classes", "t", "accuracy", accuracies),)}
    title = f"Networks of different halves of the classes: {networks.store.architecture.name}"
    return Table(title, notes, COLUMNS, rows, "loss on all classes", pictures, paired="Weight Matching")


EXPERIMENTS = {"learned-halves": Experiment("networks of different halves of the classes (figure 5)", config, measure)}

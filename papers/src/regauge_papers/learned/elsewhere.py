"""Matchers used on networks for which they were not trained: networks of other widths, of other data, or with a
different width in each layer.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from regauge.core.progress import Progress, no_progress
from regauge.data.images import ImageData, digits, mnist
from regauge.learn import LearnedMatching
from regauge.weightspace import Metanet
from regauge.zoo import PopulationConfig
from regauge.zoo.presets import fashion_mlps, mlp_architecture, mnist_mlps
from regauge.zoo.training.examples import Examples, image_classes
from regauge_papers.experiment import Experiment, Run, Scale
from regauge_papers.learned import mlps
from regauge_papers.learned.study import (
    QUANTITIES,
    Lessons,
    Networks,
    Population,
    align_pairs,
    describe_training,
    learned_ways,
    notes_of,
    rows_of,
    train_matcher,
    untrained_ways,
)
from regauge_papers.table import Table

NARROW = 96
"""The number of networks of each width below 128, at the scale `cpu`."""
MOST_DEGREES = 45.0
TABLE_3 = (
    "the paper's table 3 is of CNNs: a matcher of CIFAR-10 has barriers of 0.769 on rotated CIFAR-10 and 0.686 on "
    "STL10, weight matching 0.945 and 0.859, Sinkhorn 0.596 and 0.366, and from the matcher 0.430 and 0.357"
)


@dataclass(frozen=True)
class Study:
    """Settings: matchers, and the populations on which all matchers are used."""

    title: str
    matchers: Mapping[str, Lessons]  # by what they were trained on, in words
    tested: Mapping[str, Population]  # by what they are, in words
    is_refined: bool  # whether there are rows for Sinkhorn
    notes: tuple[str, ...] = ()


def widths(scale: Scale) -> Study:
    """Return the settings: a matcher of MLPs of widths 32 and 64 used at 128, and a matcher trained at width 128."""
    count = NARROW if scale == "cpu" else None
    narrow = {
        width: mlps.population(scale, f"mnist-mlps-{width}", _mnist(width, width, width), count=count)
        for width in (32, 64)
    }
    wide = mlps.mnist(scale)
    matchers = {"of 32 and 64": mlps.lessons(scale, *narrow.values()), "of 128": mlps.lessons(scale, wide)}
    tested = {f"width {width}": one for width, one in {**narrow, 128: wide}.items()}
    return Study("Matchers of MLPs of some widths, used at others", matchers, tested, is_refined=False)


def transfer(scale: Scale) -> Study:
    """Return the settings: a matcher of MLPs on MNIST, used on networks of other data, and on networks whose layers
    have different widths.
    """
    data = "digits" if scale == "smoke" else "mnist"
    rotated = replace(mnist_mlps(), data=f"{__name__}:rotated_{data}")
    few = partial(mlps.population, scale, count=2 * mlps.PAIRS[scale])
    tested = {
        "rotated MNIST": few("rotated-mnist-mlps", rotated),
        "Fashion-MNIST": few("fashion-mlps", fashion_mlps()),
        "784-96-160-64-10": few("mnist-mlps-96-160-64", _mnist(96, 160, 64)),
    }
    matchers = {"of MNIST": mlps.lessons(scale, mlps.mnist(scale))}
    return Study("A matcher of MLPs on MNIST, used elsewhere", matchers, tested, is_refined=True, notes=(TABLE_3,))


def _mnist(*units: int) -> PopulationConfig:
    """Return MLPs on MNIST with the given hidden layers."""
    return replace(mnist_mlps(), architecture=mlp_architecture(784, *units, 10))


def measure(study: Study, run: Run) -> Table:
    """Train the matchers, and align pairs of every population with each matcher."""
    known: dict[Population, Networks] = {}

    def networks_of(population: Population) -> Networks:
        if population not in known:
            known[population] = Networks.of(population, run)
        return known[population]

    def train(_: Progress, lessons: Lessons) -> LearnedMatching:
        return train_matcher(lessons, [networks_of(one) for one in lessons.populations], run)

    silent = replace(run, progress=no_progress)  # each training shows its own progress
    trained = silent.grid("matchers", train, list(study.matchers.values()))
    made = dict(zip(study.matchers, trained, strict=True))
    rows = []
    for place, population in study.tested.items():
        networks = networks_of(population)
        without = untrained_ways(has_classes=True, is_refined=study.is_refined)
        examples = next(iter(study.matchers.values())).examples
        rows += rows_of(without, align_pairs(networks, without, examples, run), group=place)
        for label, lessons in study.matchers.items():
            adapt(made[label].net, networks)
            ways = learned_ways(made[label], is_refined=study.is_refined)
            found = align_pairs(networks, ways, examples, run, lessons)
            rows += rows_of([replace(way, label=f"{way.label}, {label}") for way in ways], found, group=place)
    notes = (
        *(f"{label}: {describe_training(made[label], lessons)}" for label, lessons in study.matchers.items()),
        *notes_of(networks),
        "data are those of the networks that are aligned; what vectors say alone does not depend on any",
        mlps.REDUCED,
        *study.notes,
    )
    return Table(study.title, notes, QUANTITIES, tuple(rows), paired="Weight Matching")


def adapt(net: Metanet, networks: Networks) -> None:
    """Adapt a net to networks of other widths."""
    if not net.reads(networks.tested):
        net.adapt(networks.store.require_symmetry(), networks.store.architecture.module())


def rotated_mnist() -> Examples:
    """Return MNIST with each image rotated by a random angle between -45 and 45 degrees."""
    return image_classes(_turned(mnist()), 0.1307, 0.3081)


def rotated_digits() -> Examples:
    """Return the digits of scikit-learn, each rotated by a random angle between -45 and 45 degrees."""
    return image_classes(_turned(digits()), 0.0, 1.0)


def _turned(data: ImageData) -> ImageData:
    train, test = (turn(images, seed) for seed, images in enumerate((data.train_images, data.test_images)))
    return replace(data, name=f"rotated {data.name}", train_images=train, test_images=test)


def turn(images: Tensor, seed: int) -> Tensor:
    """Rotate each image `[n, channel, y, x]` about its center; pixels from outside are black."""
    chance = torch.Generator().manual_seed(seed)
    angles = torch.deg2rad(MOST_DEGREES * (2 * torch.rand(len(images), generator=chance) - 1))
    cosines, sines = angles.cos(), angles.sin()
    maps = torch.stack([cosines, -sines, torch.zeros_like(angles), sines, cosines, torch.zeros_like(angles)], 1)
    grid = functional.affine_grid(maps.reshape(-1, 2, 3), list(images.shape), align_corners=False)
    return functional.grid_sample(images, grid, align_corners=False)


EXPERIMENTS = {
    "learned-widths": Experiment("MLPs on MNIST: a matcher of two widths, used at a third", widths, measure),
    "learned-transfer": Experiment(
        "MLPs: a matcher of MNIST, used on other data and another shape (table 3)", transfer, measure
    ),
}

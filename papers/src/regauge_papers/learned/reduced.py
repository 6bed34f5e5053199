"""Tables 1, 2 and 5 on CIFAR-10: networks that are smaller at the scale "cpu", with a matcher for each kind.

References:
    Navon et al. (2024), tables 1, 2 and 5, figure 6, and appendices E and F.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from regauge.learn import MatchingConfig
from regauge.storage.architecture import Architecture
from regauge.training.initialization import Initialization
from regauge.training.optimizers import Adam
from regauge.training.schedules import OneCycle
from regauge.zoo import PopulationConfig
from regauge.zoo.presets import (
    TABLE_4,
    VGG11,
    cifar10_cnns,
    cifar10_mlps,
    cifar10_vggs,
    convolutional_architecture,
    mlp_architecture,
)
from regauge_papers.experiment import Experiment, Scale
from regauge_papers.learned.study import FROM_IDENTITY, Lessons, Population
from regauge_papers.learned.tables import Study, measure

PAPER: Mapping[str, Mapping[str, str]] = {
    "learned-cifar10": {
        "Naive": "0.927", "Weight Matching": "0.156", "Sinkhorn": "0.183", "Deep-Align": "0.078",
        "Deep-Align + Sinkhorn": "0.037",
    },
    "learned-cnn": {
        "Naive": "1.124", "Weight Matching": "0.661", "Sinkhorn": "0.313", "Deep-Align": "0.237",
        "Deep-Align + Sinkhorn": "0.081",
    },
    "learned-vgg": {"Naive": "1.273", "Sinkhorn": "0.368", "Deep-Align": "0.310", "Deep-Align + Sinkhorn": "0.099"},
}  # fmt: skip
"""The paper's barriers, by the label of the row."""


def short(architecture: Architecture, count: int, *, steps: int, data: str = "cifar10-16") -> PopulationConfig:
    """Return convolutional networks with a short training, with initial values from which networks learn without
    delay.
    """
    return PopulationConfig(
        architecture,
        data,
        count,
        steps=steps,
        batch=64,
        optimizer=Adam(lr=4e-3),
        schedule=OneCycle(rise=0.2, start=0.1, end=0.01),
        initialization=Initialization(("he",)),
    )


CNN = convolutional_architecture(
    "CNN of table 4, a quarter of the channels", TABLE_4, image=16, in_channels=3, narrow=4
)
VGG = convolutional_architecture("VGG11, an eighth of the channels", VGG11[:-1], image=16, in_channels=3, narrow=8)
TRAINING = "Adam with up to 4e-3 and down again from the initial values of He et al."
REDUCED: Mapping[str, tuple[Population, str]] = {
    "learned-cifar10": (
        Population("cifar10-mlps", replace(cifar10_mlps(48), epochs=1), 8, judged=2000),
        "reduced: 48 networks (the paper: 10,000), 1 epoch (5)",
    ),
    "learned-cnn": (
        Population("cifar10-cnns", short(CNN, 40, steps=300), 8, judged=2000),
        "reduced: 40 networks (the paper: 5,000) with a quarter of the channels, images of 16 x 16 pixels, 300 steps "
        f"of 64 images (20 epochs), {TRAINING} (1e-4 throughout)",
    ),
    "learned-vgg": (
        Population("cifar10-vggs", short(VGG, 40, steps=600), 8, judged=2000),
        "reduced: 40 networks (the paper: 4,700) with an eighth of the channels, images of 16 x 16 pixels and one "
        f"pooling less, 600 steps of 64 images, {TRAINING}; the paper does not say how its networks are trained",
    ),
}
"""The populations at the scale "cpu", each with a description of what is reduced compared with the paper."""
TINY_CNN = convolutional_architecture("CNN", [4, "pool", 4, "pool"], image=8, in_channels=1)
TINY: Mapping[str, PopulationConfig] = {
    "learned-cifar10": replace(cifar10_mlps(12), architecture=mlp_architecture(64, 8, 8, 10), data="digits", epochs=1),
    "learned-cnn": short(TINY_CNN, 12, steps=5, data="digits"),
    "learned-vgg": short(TINY_CNN, 12, steps=5, data="digits"),
}
"""The populations for test runs."""
WHOLE = {"learned-cifar10": cifar10_mlps(), "learned-cnn": cifar10_cnns(), "learned-vgg": cifar10_vggs()}
SECONDS = 60.0
"""The CPU seconds for training a matcher at the scale "cpu"."""
WHAT = {
    "learned-cifar10": "MLPs 3072-128-128-128-10 on CIFAR-10",
    "learned-cnn": "CNNs of table 4 on CIFAR-10",
    "learned-vgg": "VGG11s on CIFAR-10",
}


def config(scale: Scale, *, name: str) -> Study:
    """Return the settings: the networks of a table, or small networks on the digits for test runs."""
    what, paper, further = WHAT[name], PAPER[name], (FROM_IDENTITY,)
    if scale == "smoke":
        matching = MatchingConfig(width=8, depth=1, vectors=8, epochs=1, batch=4, checked=2)
        population = Population(f"{name}-smoke", TINY[name], 1)
        return Study(what, Lessons((population,), matching, 128), paper, further=further)
    matching = MatchingConfig(depth=2, probes=128, lr=3e-3, epochs=100)
    if scale == "paper":
        population = Population(REDUCED[name][0].folder, WHOLE[name], 100)
        return Study(what, Lessons((population,), matching, 8192), paper, further=further)
    matching = replace(matching, batch=8, epochs=100_000, seconds=SECONDS, is_cpu_time=True)
    population, reduced = REDUCED[name]
    note = f"{reduced}; {SECONDS:.0f} CPU seconds of training for the matcher"
    return Study(what, Lessons((population,), matching, 2048), paper, (note,), further)


EXPERIMENTS = {
    name: Experiment(f"{what}: a net learns to align, beside methods that do not", partial(config, name=name), measure)
    for name, what in WHAT.items()
}

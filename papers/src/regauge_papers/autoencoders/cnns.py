"""Paper 002, table 2: autoencoders of small CNNs, evaluated by the classes that decoded networks predict.

The published code distills on the same images on which it evaluates. The table has a separate column for distillation
on the evaluation images.
"""

from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regauge import learn
from regauge import weightspace as ws
from regauge.core.params import Params, count_models, select
from regauge.core.task import Task
from regauge.learn.layer_statistics import boosted_trees, layer_statistics
from regauge.learn.populations import Parts
from regauge.learn.running import Runner
from regauge.learn.targets import Target
from regauge.storage import Store
from regauge.zoo import PopulationConfig
from regauge.zoo.presets import cnn_architecture, cnn_zoo, small_cnns_relu
from regauge.zoo.training.examples import load_examples
from regauge_papers.autoencoders.encoders import Coder
from regauge_papers.experiment import Run, Scale
from regauge_papers.table import Quantity, Record, Row, Table
from regauge_papers.zoo_populations import split_runs, train_population

QUANTITIES = (
    Quantity("L1", 4),
    Quantity("tau"),
    Quantity("R2"),
    Quantity("agreement"),
    Quantity("L1, leaky", 4),
    Quantity("tau, leaky"),
    Quantity("R2, leaky"),
)
PAPER = {
    "relu": {"whole group": ("0.0111", "0.9100"), "permutations": ("0.0142", "0.8914")},
    "tanh": {"whole group": ("0.0090", "0.9160"), "permutations": ("0.0113", "0.8905")},
}
"""The L1 error and Kendall's tau of the paper's encoders: ScaleGMN (whole group) and Neural Graphs (permutations)."""
PIECE = 64
"""The number of networks that are evaluated at a time."""


@dataclass(frozen=True)
class Study:
    """Settings: populations of small CNNs by activation, and the training of their autoencoders."""

    populations: tuple[tuple[str, PopulationConfig], ...]
    coders: tuple[Coder, ...]  # the first is trained on leaked images too
    images: int  # for distillation, and as many for evaluation


def config(scale: Scale) -> Study:
    """Return the settings: 1,024 networks per activation on small images, or 15,000 on CIFAR-10 at the paper's
    scale.
    """
    if scale == "paper":
        return Study(_both("small-cnns", small_cnns_relu(15_000)), coders(10_800, 32, 64), 10_000)
    if scale == "cpu":
        small = replace(cnn_zoo(1024), data="fashion-mnist-16", steps=100, batch=32, checkpoints=None)
        return Study(_both("cnn-zoo-16", small), coders(75, 16, 32), 1000)
    tiny = replace(cnn_zoo(48), architecture=cnn_architecture("relu", 1, 8, 8), data="digits", steps=20)
    return Study(_both("cnn-zoo", replace(tiny, checkpoints=None)), coders(0.2, 8, 4), 64)


def coders(seconds: float, width: int, latent: int) -> tuple[Coder, ...]:
    """Return autoencoders with the same budget of CPU seconds."""
    whole = learn.AutoencoderConfig(
        layer=ws.Propagation(),
        width=width,
        depth=2,
        values=ws.Logarithms(),
        reads_moments=True,
        latent=latent,
        decoder=ws.MLPDecoder((4 * latent, 4 * latent)),
        loss=learn.Distillation(),
        examples=32,
        batch=16,
        epochs=300,
        lr=4e-3,
        seconds=seconds,
        is_cpu_time=True,
    )
    return Coder("whole group", whole), Coder("permutations", replace(whole, parts=("permutation",)))


def measure(study: Study, run: Run) -> Table:
    """Train the populations and their autoencoders, and evaluate the decoded test networks."""
    rows, counts = [], []
    for name, settings in study.populations:
        networks = Networks.of(train_population(name, settings, run), settings, study.images, run)
        low, high = networks.measured.min(), networks.measured.max()
        counts.append(f"{name}: {sum(map(len, networks.parts.values()))} networks, accuracies {low:.2f} to {high:.2f}")
        label = settings.architecture.settings["activation"]
        judged = partial(judge, networks, study, run)
        found = run.records(f"autoencoders {label}", (settings, study.images), judged, study.coders)
        for coder, record in zip(study.coders, found, strict=True):
            paper = dict(zip(("L1", "tau"), PAPER[label][coder.label], strict=True))
            rows.append(Row.of(f"{label}: {coder.label}", [[record]], QUANTITIES, paper=paper))
        known = networks.accuracies(networks.read("train"))
        for other, predicted in (
            ("statistics of layers, accuracy by boosted trees", networks.predict(known)),
            ("the mean accuracy, for all", np.full(len(networks.measured), known.mean())),
        ):
            rows.append(Row.of(f"{label}: {other}", [[score(predicted, networks.measured)]], QUANTITIES))
    notes = (
        f"the ends of trainings of {study.populations[0][1].architecture.name} and its like with tanh, each with "
        f"settings of its own; {'; '.join(counts)}; 70% of the runs for training, 10% for validation, 20% for testing",
        f"L1: mean absolute difference of the accuracies of a network and its decoded twin on {study.images} images "
        "that no network was trained on; tau: Kendall's (b) between the two, R2: of the one by the other; agreement: "
        "share of the images for distillation that both classify alike",
        f"decoded networks are distilled on {study.images} images that the networks were trained on; leaky: on the "
        "images that they are evaluated on, as in the published code",
        "trees and the mean predict accuracies without a network; each autoencoder is trained for "
        f"{study.coders[0].config.seconds:g} CPU seconds",
    )
    return Table("Autoencoders of small CNNs", notes, QUANTITIES, tuple(rows))


def _both(name: str, settings: PopulationConfig) -> tuple[tuple[str, PopulationConfig], ...]:
    """Return the population with ReLU and the same population with tanh."""
    channels = settings.architecture.settings["channels"]
    tanh = replace(settings, architecture=cnn_architecture("tanh", *channels))
    return (name, settings), (f"{name}-tanh", tanh)


def judge(networks: "Networks", study: Study, run: Run, coder: Coder) -> Record:
    """Train an autoencoder and score the networks that it decodes. Train the first autoencoder also on the evaluation
    images.
    """
    record: Record = {}
    for is_leaky in (False, True) if coder == study.coders[0] else (False,):
        auto = networks.trained(coder, run, is_leaky=is_leaky)
        twins = {name: tensor.float() for name, tensor in auto.canonicalize(networks.read("test")).items()}
        found = score(networks.accuracies(twins), networks.measured)
        record |= {f"{key}, leaky" if is_leaky else key: value for key, value in found.items()}
        if not is_leaky:
            record["agreement"] = auto.about["scores"]["autoencoder"]["agreement"]
    return record


def score(found: NDArray[np.float64], measured: NDArray[np.float64]) -> Record:
    """Score predicted accuracies by their differences from measured accuracies."""
    scores = Target("accuracy", "fractions").score(found, measured)
    return {"L1": scores["absolute error"], "tau": scores["tau"], "R2": scores["R2"]}


@dataclass(frozen=True, eq=False)
class Networks:
    """The final networks of a population, divided by run, with images for distillation and for evaluation."""

    settings: PopulationConfig
    store: Store
    parts: Parts
    distilled: Tensor
    images: Tensor
    labels: Tensor

    @classmethod
    def of(cls, store: Store, settings: PopulationConfig, images: int, run: Run) -> "Networks":
        """Return the networks of a store, with images of their training data set."""
        rows = store.rows
        chosen = np.intersect1d(rows.final(), rows.where(is_diverged=False, is_finite=True))
        parts = split_runs(rows["id"][chosen], run.generator("split"))
        data = load_examples(settings.data)
        kept = data.validation_inputs[:images].float(), data.validation_targets[:images]
        divided = {name: chosen[part] for name, part in parts.items()}
        return cls(settings, store, divided, data.inputs[:images].float(), *kept)

    def trained(self, coder: Coder, run: Run, *, is_leaky: bool = False) -> learn.Autoencoder:
        """Return an autoencoder that was distilled on images for distillation, or on images for evaluation."""
        images = self.images if is_leaky else self.distilled
        known = (self.settings, len(images), is_leaky, coder)
        return coder.trained(self.store, images, run, known, self.parts)

    @cached_property
    def measured(self) -> NDArray[np.float64]:
        """The accuracies of the test networks."""
        return self.accuracies(self.read("test"))

    def read(self, part: str) -> Params:
        """Return the networks of a part."""
        return self.store.read(self.parts[part])

    def accuracies(self, networks: Params) -> NDArray[np.float64]:
        """Return the accuracy of every network on the images for evaluation, `[models]`."""
        runner = Runner(Task(self.store.architecture.module(), ()))
        found = []
        with torch.no_grad():
            for start in range(0, count_models(networks), PIECE):
                outputs = runner.outputs(select(networks, slice(start, start + PIECE)), self.images)
                found.append((outputs.argmax(-1) == self.labels).double().mean(1))
        return torch.cat(found).numpy()

    def predict(self, known: NDArray[np.float64]) -> NDArray[np.float64]:
        """Predict the accuracies of the test networks by boosted trees on statistics of layers."""
        target = Target.of("accuracy", known, known, "fractions")
        learned, others = (layer_statistics(self.read(part)) for part in ("train", "test"))
        return np.asarray(boosted_trees(learned, known, target, seed=0)(others), np.float64)

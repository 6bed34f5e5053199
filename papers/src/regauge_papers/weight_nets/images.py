"""Classification of images that sine networks represent, from the weights of the networks."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from regauge import learn
from regauge import weightspace as ws
from regauge.core.params import select
from regauge.learn.populations import Parts
from regauge.report.pictures import Chart, Series
from regauge.zoo import PopulationConfig
from regauge.zoo.presets import fashion_inrs, mnist_inrs, siren_architecture
from regauge_papers.experiment import Run, Scale
from regauge_papers.table import Quantity, Record, Row, Table
from regauge_papers.weight_nets.classifiers import Activations, Classifier, KnownCoordinates, Net, Plain, Same, Trees
from regauge_papers.zoo_populations import train_population

QUANTITIES = (Quantity("accuracy"), Quantity("million products", 2), Quantity("epochs", 1), Quantity("CPU s", 0))
VALIDATION = 0.1
"""The share of the training networks that is used for validation, which selects the epoch."""
WHOLE = ("permutation", "sign", "shift")


@dataclass(frozen=True)
class Study:
    """Settings: a population of image networks, and its classifiers."""

    what: str
    name: str  # of the folder of the population
    population: PopulationConfig
    classifiers: tuple[Classifier, ...]
    sizes: tuple[int, ...]  # numbers of networks to learn from, for the picture of what the symmetry is worth
    worth: tuple[Classifier, ...]  # what is drawn over these
    paper: str


def mnist(scale: Scale) -> Study:
    """Return the study of digits."""
    paper = (
        "published, all 60,000 networks, weights alone: NFN .791, DWS .857, Neural Graphs .914, ScaleGMN .966, "
        "DNG .966 (.985 after pretraining on images); with probes: Neural Graphs .973, ProbeGen .984"
    )
    return _study("MNIST's digits", "mnist-inrs", mnist_inrs(20_480), scale, paper)


def fashion(scale: Scale) -> Study:
    """Return the study of garments."""
    paper = (
        "published, all 60,000 networks, weights alone: NFN .689, DWS .671, Neural Graphs .680, ScaleGMN .808, "
        "DNG .784 (.895 after pretraining on images); with probes: Neural Graphs .748, ProbeGen .877"
    )
    return _study("Fashion-MNIST's garments", "fashion-inrs", fashion_inrs(20_480), scale, paper)


def _study(what: str, name: str, config: PopulationConfig, scale: Scale, paper: str) -> Study:
    if scale == "smoke":
        small = siren_architecture(2, 8, 1, depth=2)
        config = replace(config, architecture=small, data="digits-signals", count=140, steps=20)
        what, name = "scikit-learn's digits", f"digits-for-{name}"
        return Study(what, name, config, classifiers(0.02, width=8), (40, 80), worth(0.02, width=8), "")
    if scale == "paper":
        config = replace(config, count=70_000)
        return Study(what, name, config, classifiers(7200), (1000, 4000, 16_000, 54_000), worth(3600), paper)
    return Study(what, name, config, classifiers(60), (500, 2000, 8000), worth(40), paper)


def classifiers(seconds: float, width: int = 128) -> tuple[Classifier, ...]:
    """Return classifiers with the same CPU budget: nets with every kind of layer, nets with less symmetry, nets with
    probes, and baselines.
    """
    passes = _config(seconds, width)
    random = replace(passes, layer=ws.Propagation(channels=1, expansion=1, is_pass=False))
    fixed = replace(passes, layer=ws.Propagation(channels=1, expansion=1, is_signed=False), depth=3)
    # Layers that keep vectors of pairs take a hundred times as long for a step, so that they are narrower.
    pairs = replace(passes, width=max(8, width // 4), depth=3)
    probes, side = replace(passes, depth=0, probes=width, hidden=4 * width, lr=1e-3), 20 if width > 8 else 4
    others = {name: kind for name, kind in ws.LAYERS.items() if name != "propagation"}
    return (
        Net("propagation", passes),
        Net("propagation and rendering", replace(passes, render=1.0)),
        Net("propagation, maps begin at random", random),
        Net("propagation, canonical form of signs and half periods", fixed),
        Net("propagation, no half periods", replace(passes, parts=("permutation", "sign"))),
        Net("propagation, permutations only", replace(passes, parts=("permutation",), depth=3)),
        *(Net(name.replace("_", " "), replace(pairs, layer=kind())) for name, kind in others.items()),
        Net(f"propagation and {side}x{side} probes", replace(passes, probes=(side, side))),
        Net(f"{width} probes alone", probes),
        Net(f"{side}x{side} probes alone, on a sheet", replace(probes, probes=(side, side))),
        Trees(),
        Activations("MLP on units' activations, moved at random", seconds, WHOLE),
        Plain("MLP on weights, moved at random", seconds, WHOLE),
        Same(),
    )


def worth(seconds: float, width: int = 128) -> tuple[Classifier, ...]:
    """Return nets that respect more and more of the symmetry, and MLPs trained with or without random elements of the
    group.
    """
    whole = _config(seconds, width)
    return (
        Net("whole group", whole),
        Net("permutations and signs", replace(whole, parts=("permutation", "sign"))),
        Net("permutations", replace(whole, parts=("permutation",), depth=3)),
        Activations("sines, no group (MLP on activations)", seconds, WHOLE),
        Plain("MLP, moved at random", seconds, WHOLE),
    )


def _config(seconds: float, width: int) -> learn.PredictorConfig:
    return learn.PredictorConfig(
        layer=ws.Propagation(channels=1, expansion=1),
        width=width,
        depth=1,
        hidden=2 * width,
        dropout=0.2,
        changes=(learn.Translation(0.1), learn.Rotation(10.0), learn.Scaling(0.1)),
        seconds=seconds,
        is_cpu_time=True,
        kind="classes",
        epochs=200,
        linear=False,
        statistics=False,
    )


@dataclass(frozen=True, eq=False)
class Images:
    """The networks of a study; training networks are in the order of the population."""

    networks: KnownCoordinates
    train: NDArray[np.int64]
    test: NDArray[np.int64]

    def parts(self, size: int | None) -> Parts:
        """Return a split: the first networks are for training, and a share of the training networks is for
        validation.
        """
        train = self.train[:size]
        cut = round(len(train) * (1 - VALIDATION))
        return {"train": train[:cut], "validation": train[cut:], "test": self.test}


def measure(study: Study, run: Run) -> Table:
    """Train the population and every classifier, on all networks and on subsets of the networks."""
    images = read(study, run)
    judged = partial(judge, images, run)
    found = run.records("classes", study.population, judged, study.classifiers, (None,))
    rows = [Row.of(one.label, [records], QUANTITIES) for one, records in zip(study.classifiers, found, strict=True)]
    curves = run.records("worth", study.population, judged, study.worth, study.sizes)
    lines = [
        Series(one.label, study.sizes, [record["accuracy"] for record in records])
        for one, records in zip(study.worth, curves, strict=True)
    ]
    title = "Test accuracy at an equal budget"
    chart = Chart(title, "networks to learn from", "accuracy", tuple(lines), is_log_x=True, y_limits=(0, 1))
    count = len(images.train) + len(images.test)
    notes = (
        f"the first {count} networks ({study.population.architecture.name}) of the population, one for each of "
        f"{study.what}, fitted independently; {len(images.train)} to learn from (a tenth for validation), "
        f"{len(images.test)} of test images",
        "million products: multiplications for the class of one network; epochs: of the training; CPU s: of training "
        "with validation and test, of which the training of nets has the same budget",
        "inputs of the networks are moved in training (shifts up to .1, rotations up to 10 degrees, scales up to 10%)",
        *((study.paper,) if study.paper else ()),
    )
    return Table(f"Classes of {study.what}, from weights", notes, QUANTITIES, tuple(rows), pictures={"worth": (chart,)})


def read(study: Study, run: Run) -> Images:
    """Train the missing networks of the population in the folder of the run, and read the population."""
    store = train_population(study.name, study.population, run)
    usable = store.rows.where(is_finite=True)
    labels = np.asarray(store.rows["label"], np.int64)[usable]
    is_test = np.asarray(store.rows["split"])[usable] == "test"
    module: Callable[[], torch.nn.Module] = store.architecture.module
    known = KnownCoordinates(store.read(usable), labels, store.require_symmetry(), {}, module())
    return Images(known, np.flatnonzero(~is_test), np.flatnonzero(is_test))


def judge(images: Images, run: Run, classifier: Classifier, size: int | None) -> Record:
    """Train a classifier, and measure the share of test networks that it classifies correctly."""
    parts = images.parts(size)
    began = time.process_time()
    known = replace(images.networks, parts=parts)
    learned = classifier.fit(known, run.generator("classifier", size))
    test = torch.from_numpy(images.test)
    right = learned.predict(select(known.networks, test)) == known.values[images.test]
    return {
        "accuracy": statistics.fmean(right.tolist()),
        "million products": learned.products / 1e6,
        "epochs": learned.epochs,
        "CPU s": time.process_time() - began,
    }

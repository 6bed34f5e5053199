"""Paper 002, table 1 and figure 2: autoencoders of sine networks of digits, evaluated by rendered images."""

import time
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from regauge import learn
from regauge.core.params import Params
from regauge.core.task import Task
from regauge.learn.running import Runner
from regauge.report.pictures import Images
from regauge.storage import Store
from regauge.zoo import PopulationConfig
from regauge.zoo.presets import mnist_inrs, siren_architecture
from regauge_papers.autoencoders.encoders import Coder, sine_coders, spread
from regauge_papers.experiment import Run, Scale
from regauge_papers.table import Quantity, Record, Row, Table
from regauge_papers.zoo_populations import train_population

QUANTITIES = (
    Quantity("test error", 4),
    Quantity("train error", 4),
    Quantity("orbit", 4),
    Quantity("epochs", 1),
    Quantity("parameters, thousands", 0),
    Quantity("CPU s", 0),
)
SAMPLE = 512
"""The number of networks on which training errors and distances within orbits are measured."""
SIDE = 28


@dataclass(frozen=True)
class Study:
    """Settings: a population of digit networks, and autoencoders of these networks."""

    name: str  # of the folder of the population
    population: PopulationConfig
    coders: tuple[Coder, ...]
    share: int  # every how many of the networks for training are used in one more row of the first coder


def population(scale: Scale) -> tuple[str, PopulationConfig]:
    """Return the settings of the digit networks: one for each of 20,480 of the 70,000 digits on a CPU."""
    if scale == "smoke":
        small = siren_architecture(2, 8, 1, depth=2)
        return "digits", replace(mnist_inrs(140), architecture=small, data="digits-signals", steps=20)
    return "mnist-inrs", mnist_inrs(20_480 if scale == "cpu" else 70_000)


def config(scale: Scale) -> Study:
    """Return the settings: half a minute of training for each autoencoder on a CPU, or three hours at the paper's
    scale.
    """
    seconds = {"smoke": 0.3, "cpu": 30.0, "paper": 10_800.0}[scale]
    coders = sine_coders(seconds, *((8, 4) if scale == "smoke" else ()))
    return Study(*population(scale), tuple(coders.values()), 10)


def measure(study: Study, run: Run) -> Table:
    """Train every autoencoder, and decode test networks."""
    store = train_population(study.name, study.population, run)
    parts = split(store)
    labels, firsts = np.unique(np.asarray(store.rows["label"])[parts["test"]], return_index=True)
    shown = store.read(parts["test"][firsts])

    def judge(coder: Coder, step: int) -> Record:
        began = time.process_time()
        chosen = {**parts, "train": parts["train"][::step]}
        auto = coder.fit(store, run.generator("autoencoder", coder.label, step), learn.grid((SIDE, SIDE)), chosen)
        seconds = time.process_time() - began
        test = store.read(parts["test"][:SAMPLE])
        moves = run.generator("moves")
        assert auto.trained is not None
        return {
            "test error": auto.about["scores"]["autoencoder"]["squared error"],
            "train error": error(auto, store, chosen["train"][:SAMPLE]),
            "orbit": float(np.mean(spread(auto, test, store.require_symmetry(), moves))),
            "epochs": len(auto.trained.history),
            "parameters, thousands": sum(p.numel() for m in (auto.encoder, auto.decoder) for p in m.parameters()) / 1e3,
            "CPU s": seconds,
            "mean": auto.about["scores"]["the mean output, for all"]["squared error"],
            "decoded": draw(store, auto.canonicalize(shown)),
        }

    found = run.records("decoded digits", study.population, judge, study.coders, (1,))
    few = run.records("decoded digits", study.population, judge, study.coders[:1], (study.share,))
    paper = {"whole group": ("0.0106", "0.0096"), "permutations, message passing": ("0.0135", "0.0068")}
    rows = [
        Row.of(
            coder.label,
            [records],
            QUANTITIES,
            paper=dict(zip(("test error", "train error"), paper.get(coder.label, ()), strict=False)),
        )
        for coder, records in zip(study.coders, found, strict=True)
    ]
    rows.insert(1, Row.of(f"{study.coders[0].label}, 1/{study.share} of the networks", few, QUANTITIES))
    rows.append(Row("the mean image, for all", {"test error": [[found[0][0]["mean"]]]}))
    counts = ", ".join(f"{len(part)} for {name}" for name, part in parts.items())
    notes = (
        f"networks {study.population.architecture.name}, one for each digit, fitted independently: {counts}; the "
        f"paper has 55,000, 5,000 and 10,000, and trains for 300 epochs; its rows are ScaleGMN and Neural Graphs",
        "error: mean squared difference between what a network and its decoded twin render on 28 x 28 pixels; train "
        f"error: of {SAMPLE} networks for training",
        "orbit: how far random elements of the whole group (permutations, signs, half periods) move the latent vector "
        "of a test network, as a share of the mean distance between two of them",
        "every autoencoder is trained for the same CPU seconds; CPU s: of training, validation and test; latent "
        f"vectors of {study.coders[0].config.latent} numbers, the MLP decoder has hidden layers of 256 and 512 units",
    )
    sheet = Images(
        "Test networks, and what autoencoders decode",
        ("test networks", *(coder.label for coder in study.coders)),
        tuple(str(label) for label in labels),
        SIDE,
        (draw(store, shown), *(tuple(records[0]["decoded"]) for records in found)),
    )
    title = "Autoencoders of networks of digits"
    return Table(title, notes, QUANTITIES, tuple(rows), pictures={"decoded": (sheet,)})


def split(store: Store) -> dict[str, np.ndarray]:
    """Return a split with the test networks of the store, and a tenth of the other networks for validation."""
    test = store.rows.where(split="test")
    rest = np.setdiff1d(np.arange(len(store)), test)
    cut = round(0.9 * len(rest))
    return {"train": rest[:cut], "validation": rest[cut:], "test": test}


def error(auto: learn.Autoencoder, store: Store, numbers: np.ndarray) -> float:
    """Return the mean squared error of decoded networks on the pixels."""
    networks = store.read(numbers)
    return float((render(store, auto.canonicalize(networks)) - render(store, networks)).square().mean())


def render(store: Store, networks: Params) -> Tensor:
    """Return the outputs of networks of a store at all pixels, `[models, pixels, 1]`."""
    with torch.no_grad():
        return Runner(Task(store.architecture.module(), ())).outputs(networks, learn.grid((SIDE, SIDE)))


def draw(store: Store, networks: Params) -> tuple[str, ...]:
    """Return one row of a picture, as `Images`: the image that each network renders."""
    values = render(store, networks).reshape(1, -1, SIDE, SIDE).float()
    return Images.of("", [""], [""] * values.shape[1], values).pixels[0]

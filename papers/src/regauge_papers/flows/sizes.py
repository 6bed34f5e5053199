"""Paper 000, figure 7.7: the quality of flows whose nets are larger, after the same number of training steps."""

import time
from dataclasses import dataclass, replace

from regauge import flow
from regauge.report.pictures import Chart, Series
from regauge.weightspace import RelationalAttention
from regauge.zoo import Checkpoints, PopulationConfig
from regauge.zoo.presets import mlp_architecture, mnist_tiny_mlps, uci_mlps
from regauge_papers.experiment import Run, Scale
from regauge_papers.flows.networks import Networks, fewer
from regauge_papers.table import Quantity, Record, Row, Table

QUANTITIES = (
    Quantity("accuracy", 4),
    Quantity("loss", 4),
    Quantity("parameters, thousands", 1),
    Quantity("CPU s", 0),
)


@dataclass(frozen=True)
class Study:
    """Settings: a population, and nets of several widths."""

    what: str
    name: str  # of the folder of the population
    population: PopulationConfig
    sizes: tuple[int, ...]
    depth: int
    epochs: int
    head: str  # the last layer, without ".weight"
    drawn: int
    steps: int


def config(scale: Scale) -> Study:
    """Return the settings: UCI breast cancer and some hundred steps on a CPU, or MNIST at the paper's scale."""
    cancer = replace(uci_mlps(2500), checkpoints=Checkpoints(every=80, warmup=160))
    if scale == "smoke":
        small = replace(fewer(cancer, 40, 2), architecture=mlp_architecture(30, 4, 4, 2))
        return Study("breast cancer", "uci", small, (4, 8), 1, 1, "layers.2", 6, 2)
    if scale == "cpu":
        return Study("breast cancer", "uci", cancer, (8, 16, 32), 5, 3, "layers.2", 200, 50)
    population = fewer(mnist_tiny_mlps(), 3000, 25)
    return Study("MNIST", "mnist", population, (8, 16, 32), 5, 100, "layers.1", 200, 100)


def measure(study: Study, run: Run) -> Table:
    """Fit a flow of every kind with every net, and sample from the flow."""
    networks = Networks.of(study.name, study.population, run)
    task = networks.task()

    def score(kind: str, width: int) -> Record:
        settings = _settings(study, kind, width)
        began = time.process_time()
        made = networks.fit(f"{kind} {width}", settings)
        seconds = time.process_time() - began
        chance = run.generator("sizes", kind, width)
        solver = "thesis" if "its sampler" in kind else "euler"
        metrics = task.evaluate_each(made.sample(study.drawn, generator=chance, steps=study.steps, solver=solver))  # type: ignore[arg-type]
        count = sum(parameter.numel() for parameter in made.velocity.parameters())
        found: Record = {name: float(values.mean()) for name, values in metrics.items()}
        return found | {"parameters, thousands": count / 1000, "CPU s": seconds}

    kinds = ("thesis' euclidean flow, its sampler", "thesis' geometric flow, its sampler", "flow of velocities")
    found = run.records("sizes", study, score, kinds, study.sizes)
    rows = [
        Row.of(f"{kind}, width {width}", [[record]], QUANTITIES)
        for kind, records in zip(kinds, found, strict=True)
        for width, record in zip(study.sizes, records, strict=True)
    ]
    trained = task.evaluate_each(networks.read("test", study.drawn))
    record = {name: float(values.mean()) for name, values in trained.items()}
    rows.append(Row.of("held-out networks", [[record]], QUANTITIES))
    counts = {name: len(part) for name, part in networks.parts.items()}
    notes = (
        f"{networks.store.architecture.name} on {study.what}; {counts['train']} networks for training, {study.epochs} "
        f"epochs with batches of 32, {study.depth} layers of relational attention with one head; {study.drawn} "
        f"networks drawn in {study.steps} steps of Euler's method",
        "the thesis has MNIST and 8 to 32 features, and shows its numbers in a picture alone; geometric flows have a "
        "last layer of norm one, so that their losses are of other functions",
    )
    panels = tuple(
        Chart(
            name.capitalize(),
            "width of the net",
            name,
            tuple(
                Series(kind, study.sizes, [record[name] for record in records])
                for kind, records in zip(kinds, found, strict=True)
            ),
            is_log_x=True,
        )
        for name in ("accuracy", "loss")
    )
    return Table("Flows by the width of their nets", notes, QUANTITIES, tuple(rows), pictures={"sizes": panels})


def _settings(study: Study, kind: str, width: int) -> flow.FlowConfig:
    net = flow.Metanetwork(RelationalAttention(heads=1, expansion=1), width, study.depth)
    if kind == "flow of velocities":
        keep = flow.Representation("keep")
        return flow.FlowConfig(
            representation=keep,
            prior=flow.MatchedGaussian(),
            net=net,
            is_aligned=False,
            epochs=study.epochs,
            batch=32,
            balance=1.0,
        )
    if "euclidean" in kind:
        return flow.thesis_config("euclidean", net=net, epochs=study.epochs)
    names = {"head": f"{study.head}.weight", "head_bias": f"{study.head}.bias"}
    return flow.thesis_config("geometric", **names, net=net, epochs=study.epochs)

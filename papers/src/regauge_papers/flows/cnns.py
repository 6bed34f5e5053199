"""Flows over small CNNs, evaluated like the flows over MLPs in paper 000, which has only MLPs."""

from dataclasses import replace

from regauge import flow
from regauge.training.initialization import Initialization
from regauge.training.optimizers import Adam
from regauge.zoo import PopulationConfig
from regauge.zoo.presets import SMALL, cnn_architecture
from regauge_papers.experiment import Scale
from regauge_papers.flows.networks import IMAGES
from regauge_papers.flows.studies import STEPS, Study, in_all_values, in_components


def config(scale: Scale, *, is_common: bool = False) -> Study:
    """Return the settings: 1,000 CNNs on small images and four CPU minutes per flow, or 10,000 CNNs and two hours in
    full.
    """
    count, steps, seconds = {"smoke": (30, 10, 0.3), "cpu": (1000, 150, 240.0), "paper": (10_000, 2000, 7200.0)}[scale]
    population = PopulationConfig(
        cnn_architecture("relu", *SMALL),
        "mnist" if scale == "paper" else "mnist-16",
        count,
        steps=steps,
        batch=64 if scale == "paper" else 32,
        optimizer=Adam(lr=3e-3),
        initialization=Initialization(("he",), is_common=is_common),
    )
    if is_common:  # only their batches make them different
        population = replace(population, group=1)
    if scale == "smoke":
        population = replace(population, architecture=cnn_architecture("relu", 1, 4, 4), data="digits")
    flows = in_components(seconds, scale), in_all_values(seconds, scale, flow.MatchedGaussian())
    drawn, shown = (4, (2,)) if scale == "smoke" else (50, STEPS)
    start = "one start, with batches" if is_common else "starts"
    note = f"the ends of {steps} steps of Adam from {start} of their own; judged on the first {IMAGES} test images"
    what = f"{population.data} (CNNs {'-'.join(map(str, population.architecture.settings['channels']))}-10)"
    name = "cnns-one-start" if is_common else "cnns"
    return Study(what, name, population, flows, drawn, "output", shown, (), (note,))


def from_one_start(scale: Scale) -> Study:
    """Return the study of `config` for CNNs with one shared initialization."""
    return config(scale, is_common=True)

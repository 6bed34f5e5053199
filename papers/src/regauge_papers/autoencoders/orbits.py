"""Paper 002, figures 3 and 6 to 8: lines between copies of digit networks, and latent positions of orbits.

References:
    Paper 002, section 5 (INR interpolation), section 6.1 (collapse of orbits), appendices D.1 and D.2.
"""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

import regauge as rg
from regauge import learn
from regauge.connect import Curve
from regauge.connect.paths import Path, Straight
from regauge.core.params import Params, select
from regauge.core.task import Task
from regauge.inr.fitting import image_inr
from regauge.inr.orbits import orbit, recovery
from regauge.inr.rendering.field_values import evaluate
from regauge.inr.rendering.strips import Strip, render_strip, save_strips
from regauge.learn.running import Runner
from regauge.report.pictures import Chart, Series
from regauge.zoo import PopulationConfig
from regauge_papers.autoencoders.digits import SIDE, population
from regauge_papers.autoencoders.encoders import Coder, sine_coders
from regauge_papers.autoencoders.lines import decoded_lines
from regauge_papers.digit_orbits import ORBITS, WAYS
from regauge_papers.experiment import Run, Scale
from regauge_papers.table import Quantity, Record, Row, Table, mean_curve
from regauge_papers.zoo_populations import train_population

QUANTITIES = (
    Quantity("barrier", 4),
    Quantity("of naive", 3),
    Quantity("AUC", 4),
    Quantity("end loss", 4),
    Quantity("barrier, clean", 5),
    Quantity("of naive, clean", 3),
)
KEPT = ("naive", "generalized Git Re-Basin", "weight matching, the whole symmetry")
"""The methods of `digit_orbits` with which autoencoders are compared."""
MAPPED = 500
"""The number of test networks in the map of latent vectors."""
PATH = 7
"""The number of pictures along a path."""


@dataclass(frozen=True)
class Study:
    """Settings: a population, its autoencoders, and copies of its test networks."""

    name: str  # of the folder of the population
    population: PopulationConfig
    coders: tuple[Coder, ...]
    images: int  # test networks
    copies: int  # of each, for every kind of orbit
    noise: float  # standard deviation, as a share of each tensor's
    line: int  # points on each line


def config(scale: Scale) -> Study:
    """Return the settings: 10 digits on a CPU, with an encoder for the whole group and an encoder for permutations."""
    long, short = {"smoke": (0.3, 0.3), "cpu": (480.0, 60.0), "paper": (10_800.0, 10_800.0)}[scale]
    sizes = (8, 4) if scale == "smoke" else ()
    coders = sine_coders(long, *sizes)["whole"], sine_coders(short, *sizes)["permutations"]
    counts = (2, 2) if scale == "smoke" else (10, 5) if scale == "cpu" else (100, 50)
    return Study(*population(scale), coders, *counts, 0.05, 3 if scale == "smoke" else 25)


def measure(study: Study, run: Run) -> Table:
    """Measure the lines from every network to its copies, as unaligned weights, aligned weights, decoded weights and
    latent vectors.
    """
    store = train_population(study.name, study.population, run)
    pixels = learn.grid((SIDE, SIDE))
    known = study.name, study.population
    autos = {coder.label: coder.trained(store, pixels, run, (*known, coder)) for coder in study.coders}
    numbers = store.rows.where(split="test")[: study.images]
    networks, symmetry, module = store.read(numbers), store.require_symmetry(), store.architecture.module()
    with torch.no_grad():
        images = Runner(Task(module, ())).outputs(networks, pixels)
    ways = [way for way in WAYS if way.label in KEPT]

    def recover(kind: str, noise: float, image: int) -> Record:
        parts = ORBITS[kind]
        original = select(networks, image)
        chance = run.generator("copies", parts, noise, image)
        copies = orbit(original, symmetry, study.copies, generator=chance, parts=parts, noise=noise, reach=3)
        task = rg.Task(module, [(pixels, images[image])], torch.nn.functional.mse_loss)
        made: dict[str, tuple[Curve, ...]] = {}
        for way in ways:
            found = recovery(
                original,
                copies,
                symmetry,
                method=way.method,
                within=way.restrict(symmetry),
                task=task,
                points=study.line,
            )
            made[way.label] = found.curves
        for label, auto in autos.items():
            single = {name: tensor.unsqueeze(0) for name, tensor in original.items()}
            made |= decoded_lines(label, auto, single, copies.params, task, study.line)
        return {label: [list(curve.table) for curve in curves] for label, curves in made.items()}

    noises = (study.noise, 0.0)
    found = run.records("lines", study, recover, list(ORBITS), noises, range(len(numbers)))
    rows = [row for kind, records in zip(ORBITS, found, strict=True) for row in rows_of(kind, records)]
    copies = orbit(
        select(networks, 0), symmetry, 50, generator=run.generator("collapse"), parts=("permutation", "sign"), reach=3
    )
    sample = store.read(store.rows.where(split="test")[:MAPPED])
    collapse = tuple(map_of(label, auto, sample, copies.params) for label, auto in autos.items())
    strips = {
        "paths": save_strips(list(strips_of(study, autos, networks, run)), run.file("-paths.npz"), overwrite=True)
    }
    notes = (
        f"{len(numbers)} test networks {study.population.architecture.name} of digits, {study.copies} copies of each "
        f"for every kind of orbit; noise of {study.noise:g} of each tensor's standard deviation on the copies, or none "
        "(clean); ± is the standard error over images, each the mean of its copies",
        f"mean squared error against what the original renders, at {study.line} points of the line from the original "
        "to its copy; barrier: of each curve; of naive: the mean barrier as a share of that of the line between the "
        "networks as they are",
        "decoded: the line between the weights of the decoded original and the decoded copy; latent: the networks "
        "decoded from the line between the latent vectors; by the encoders that are named",
        "; ".join(
            f"{coder.label}: {coder.config.seconds:g} CPU s of training, test error "
            f"{autos[coder.label].about['scores']['autoencoder']['squared error']:.4f}"
            for coder in study.coders
        ),
        "the paper's noise is 0.005 on all parameters, about 8%, 27% and 4% of the standard deviations of its layers; "
        "it shows curves without numbers, against the digit and not the original's rendering",
    )
    return Table(
        "Lines between copies of networks of digits",
        notes,
        QUANTITIES,
        tuple(rows),
        f"mean squared error of the image, noise {study.noise:g}",
        pictures={"collapse": collapse},
        strips=strips,
        unit="image",
    )


def strips_of(study: Study, autos: dict[str, learn.Autoencoder], networks: Params, run: Run) -> Iterator[Strip]:
    """Return pictures along paths between two test networks: as unaligned weights, aligned weights, decoded weights and
    latent vectors.
    """
    inr = image_inr(SIDE, SIDE, units=study.population.architecture.settings["width"])
    first, second = select(networks, 0), select(networks, 1)
    middle = (evaluate(inr, networks, learn.grid((SIDE, SIDE)))[:2]).mean(0)
    task = rg.Task(inr.module(), [(learn.grid((SIDE, SIDE)), middle)], torch.nn.functional.mse_loss)
    symmetry = rg.discover(inr.module(), (learn.grid((2, 2)),))
    aligned = rg.align(first, second, symmetry, method=rg.WeightMatching()).params
    paths: list[tuple[str, Params, Params, Path]] = [
        ("naive", first, second, Straight()),
        ("weight matching, the whole symmetry", first, aligned, Straight()),
    ]
    for label, auto in autos.items():
        twins = auto.canonicalize({name: tensor[:2] for name, tensor in networks.items()})
        paths.append((f"decoded, {label}", select(twins, 0), select(twins, 1), Straight()))
        paths.append((f"latent, {label}", first, second, learn.LatentPath(auto)))
    for label, a, b, path in paths:
        chance = run.generator("strips")
        yield render_strip(inr, a, b, task.evaluate, label=label, points=PATH, path=path, generator=chance)


def rows_of(kind: str, records: list[list[Record]]) -> list[Row]:
    """Return the rows of one kind of orbit from records with and without noise; each image has a list of values."""
    rows = []
    naive = [_barriers(own, "naive") for own in records]
    for label in records[0][0]:
        noisy, clean = (_barriers(own, label) for own in records)
        curves = [record[label] for record in records[0]]
        values = {
            "barrier": noisy,
            "of naive": [[_mean(noisy) / max(_mean(naive[0]), 1e-12)]],
            "AUC": [[max(0.0, Curve(tuple(line)).auc) for line in own] for own in curves],
            "end loss": [[line[-1]["loss"] for line in own] for own in curves],
            "barrier, clean": clean,
            "of naive, clean": [[_mean(clean) / max(_mean(naive[1]), 1e-12)]],
        }
        rows.append(Row(f"{kind}: {label}", values, {}, mean_curve([line for own in curves for line in own])))
    return rows


def map_of(label: str, auto: learn.Autoencoder, sample: Params, copies: Params) -> Chart:
    """Return latent vectors of test networks and of copies of one test network, in the plane of largest variance."""
    latents, own = auto.encode(sample).double(), auto.encode(copies).double()
    middle = latents.mean(0)
    axes = torch.linalg.svd(latents - middle, full_matrices=False)[2][:2].T

    def series(name: str, points: Tensor) -> Series:
        x, y = ((points - middle) @ axes).T.tolist()
        return Series(name, x, y, style="points")

    typical = torch.pdist(latents).mean()
    share = float(torch.pdist(own).mean() / typical)
    title = f"{label}: copies are {share:.0e} as far apart as networks" if share < 1e-3 else f"{label}: {share:.2f}"
    return Chart(title, "", "", (series("test networks", latents), series("copies of one", own)))


def _barriers(records: list[Record], label: str) -> list[list[float]]:
    return [[Curve(tuple(line)).barrier for line in record[label]] for record in records]


def _mean(values: list[list[float]]) -> float:
    return statistics.fmean(value for own in values for value in own)

"""Paper 002, figures 3 and 7: digit networks, and noisy copies of digit networks under permutations, signs, or both.

References:
    Paper 002, section 5 (INR interpolation), appendices A (the generalized matching) and D.1 (without noise).
"""

from dataclasses import dataclass
from statistics import fmean

from torch.nn.functional import mse_loss

import regauge as rg
from regauge.connect import Curve
from regauge.core.params import Params
from regauge.data.images import digits, has_mnist, mnist
from regauge.inr.fields.signal_samples import image_samples
from regauge.inr.fit_config import FitConfig
from regauge.inr.fitting import fit_images, image_inr
from regauge.inr.orbits import orbit, recovery
from regauge.training import Adam
from regauge_papers.experiment import Experiment, Run, Scale
from regauge_papers.table import Quantity, Record, Row, Table, mean_curve
from regauge_papers.ways import Way, permutations_only, without_shifts

Parts = tuple[str, ...] | None
ORBITS: dict[str, Parts] = {
    "permutations": ("permutation",),
    "signs": ("sign",),
    "permutations and signs": ("permutation", "sign"),
    "the whole symmetry": None,
}
"""For each kind of orbit, the parts of the symmetry that transform the copies. The paper calls signs "scaling", and
does not consider half periods."""

QUANTITIES = (
    Quantity("barrier", 4),
    Quantity("AUC", 4),
    Quantity("recovered", 2),
    Quantity("distance", 2),
    Quantity("end loss", 4),
    Quantity("CPU ms", 2),
)
"""The columns of the table, measured at the noise level `Orbits.shown`, whose curves are plotted."""


WAYS = (
    Way("naive"),
    Way("weight matching, permutations", rg.WeightMatching(), permutations_only),
    Way("generalized Git Re-Basin", rg.WeightMatching(start="identity"), without_shifts),
    Way("weight matching, permutations and signs", rg.WeightMatching(), without_shifts),
    Way("weight matching, the whole symmetry", rg.WeightMatching()),
)
"""The methods. The paper's generalization of Git Re-Basin begins at the identity."""
PAPER = {
    "naive": "high",
    "generalized Git Re-Basin": "near 0, scattered",
}
"""Descriptions of the paper's curves in words, because its figures contain no numbers."""


@dataclass(frozen=True)
class Orbits:
    """Settings: digit networks and their copies."""

    images: int  # digits, each fitted by one network
    copies: int  # of each network, for every kind of orbit and every noise
    noises: tuple[float, ...]  # standard deviations, as shares of those of each tensor
    shown: float  # the noise of the curves along the line
    fit: FitConfig
    line: int  # points on each line
    reach: int = 3  # largest shift, in half periods


def config(scale: Scale) -> Orbits:
    """Return the settings: 20 digits on a CPU, or 100 at the paper's scale (the paper names no number)."""
    if scale == "smoke":
        return Orbits(1, 2, (0.0, 0.05), 0.05, FitConfig(steps=30, batch=None, optimizer=Adam(5e-4)), 3)
    images, copies = (20, 5) if scale == "cpu" else (100, 10)
    return Orbits(
        images, copies, (0.0, 0.01, 0.05, 0.1, 0.2), 0.05, FitConfig(steps=1000, batch=None, optimizer=Adam(5e-4)), 25
    )


def measure(config: Orbits, run: Run) -> Table:
    """Align copies of each network with the network itself, for each kind of orbit, noise level and method."""
    data = mnist() if has_mnist() else digits()
    images = data.train_images[: config.images]
    inr = image_inr(*images.shape[2:])

    def fit() -> Params:
        seed = int(run.generator("networks").initial_seed() % 2**31)
        return fit_images(images, inr, config.fit, bias="siren", seed=seed)

    networks = run.network((config.images, config.fit, data.name), "digits", fit)
    module = inr.module()
    symmetry = rg.discover(module, (image_samples(images[0]).points,))

    def recover(kind: str, way: Way, noise: float, image: int) -> Record:
        parts = ORBITS[kind]
        original = {name: tensor[image] for name, tensor in networks.items()}
        samples = image_samples(images[image])
        task = rg.Task(module, [(samples.points, samples.labels)], mse_loss)
        chance = run.generator("copies", parts, noise, image)
        copies = orbit(
            original, symmetry, config.copies, generator=chance, parts=parts, noise=noise, reach=config.reach
        )
        allowed = way.restrict(symmetry)
        found = recovery(original, copies, symmetry, method=way.method, within=allowed, task=task, points=config.line)
        return {
            "lines": [list(curve.table) for curve in found.curves],
            "distances": found.distances.tolist(),
            "recovered": found.is_recovered.double().tolist(),
            "seconds": found.seconds / config.copies,
        }

    axes = (list(ORBITS), WAYS, config.noises, range(config.images))
    found = run.records("aligning", (config, data.name), recover, *axes)
    rows = [
        _row(kind, way, dict(zip(config.noises, records, strict=True)), config.shown)
        for kind, ways in zip(ORBITS, found, strict=True)
        for way, records in zip(WAYS, ways, strict=True)
    ]
    quantities = tuple(
        Quantity(f"{what}, {noise:g}", digits)
        for what, digits in (("barrier", 4), ("recovered", 2), ("distance", 2))
        for noise in config.noises
        if noise != config.shown
    )
    start = rows[0].curve[0]["loss"]
    notes = (
        f"{config.images} images of {data.name}, each fitted by a network {'-'.join(map(str, inr.widths))} with "
        f"sin(30 z), {config.fit.steps:,} steps of Adam with {config.fit.optimizer.lr:g} on all pixels, then a mean "
        f"squared error of {start:.2g}; {config.copies} copies of each for every orbit and every noise; ± is the "
        "standard error over images, each the mean of its copies",
        "a row is an orbit and how its copies were aligned; a column is a quantity and the noise, its standard "
        f"deviation as a share of each tensor's: {config.shown:g} unless another is named, since the paper does not "
        "say how large its noise was",
        f"barrier, AUC and curves of the mean squared error at {config.line} points of the line from the network to "
        "its copy; end loss: at the copy",
        "recovered: share of the copies whose every parameter is where it belongs, that is at the original's with the "
        "copy's own noise; distance: Euclidean, to the original",
        f"the whole symmetry has shifts up to {config.reach} half periods too, which the paper does not consider",
        "generalized Git Re-Basin begins at the identity as published and visits groups in a fixed order instead of a "
        "random one; the other rows begin at the barycenter, see `WeightMatching`",
        "the paper shows this experiment as figures, without numbers; its autoencoders are not part of it here",
    )
    return Table(
        "Copies of networks of digits",
        notes,
        (*QUANTITIES, *quantities),
        tuple(rows),
        f"mean squared error of the image, noise {config.shown:g}",
        unit="image",
    )


def _row(kind: str, way: Way, found: dict[float, list[Record]], shown: float) -> Row:
    """Return the row of one orbit and one method at every noise level, with the mean over the copies of each image."""
    values: dict[str, list[list[float]]] = {}
    for noise, records in found.items():
        which = "" if noise == shown else f", {noise:g}"
        curves = [[Curve(tuple(line)) for line in record["lines"]] for record in records]
        values[f"barrier{which}"] = [[fmean(curve.barrier for curve in own)] for own in curves]
        for name, key in (("distance", "distances"), ("recovered", "recovered")):
            values[f"{name}{which}"] = [[fmean(record[key])] for record in records]
        if noise == shown:
            values["AUC"] = [[fmean(max(0.0, curve.auc) for curve in own)] for own in curves]
            values["end loss"] = [[fmean(curve.table[-1]["loss"] for curve in own)] for own in curves]
    if way.method is not None:
        values["CPU ms"] = [[1000 * record["seconds"]] for record in found[shown]]
    paper = {"barrier": PAPER[way.label]} if ORBITS[kind] is not None and way.label in PAPER else {}
    lines = [line for record in found[shown] for line in record["lines"]]
    return Row(f"{kind}: {way.label}", values, paper, mean_curve(lines))


EXPERIMENTS = {
    "orbits": Experiment("copies of digit networks under permutations, signs, shifts and noise", config, measure),
}

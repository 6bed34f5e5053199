"""Merging of ensemble members and of posteriors into one Gaussian, which paper 004 leaves open."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

import regauge as rg
from regauge.alignment import Method
from regauge.bayes.matching import align_many_posteriors, barycenter
from regauge.bayes.posteriors.gaussian import GaussianPosterior, Posterior
from regauge.bayes.posteriors.particles import ParticlePosterior
from regauge.bayes.prediction.predict import predict
from regauge.core.params import Params
from regauge.nets.classification import ClassifierConfig
from regauge.training.optimizers import Adam
from regauge_papers.bayesian.barrier_figures import converged, tiny
from regauge_papers.bayesian.inference import Family, batches, posteriors
from regauge_papers.experiment import Run, Scale
from regauge_papers.table import Quantity, Record, Row, Table

REPAIR = 5000
"""The number of training images on which repair measures statistics."""
SPREADS = (0.0, 0.1, 0.3, 1.0)
"""The factors by which the members' standard deviations are multiplied. With factor 0, the merged Gaussian is the mean
network."""
QUANTITIES = tuple(Quantity(name) for name in ("loss", "accuracy", "calibration error", "entropy"))


@dataclass(frozen=True)
class Ensembles:
    """Settings: networks without uncertainty, and posteriors of the same architecture."""

    members: Family
    member_count: int
    posteriors: Family
    posterior_count: int
    samples: int  # of each Gaussian
    test: int  # test images


class MergingWay(NamedTuple):
    """A method that aligns networks and posteriors before they are merged. If the method is None, networks and
    posteriors are not aligned.
    """

    label: str
    networks: Method | None
    gaussians: Method | None


WAYS = (
    MergingWay("not aligned", None, None),
    MergingWay(
        "aligned to the first",
        rg.WeightMatching(),
        rg.GaussianMatching(method=rg.WeightMatching(scales="keep")),
    ),
    MergingWay("aligned to one another", rg.alignment.MergeMany(), rg.GaussianMatching()),
)


def config(scale: Scale) -> Ensembles:
    """Return the settings: sixteen members, and eight posteriors at T = 0.1."""
    points = ClassifierConfig(epochs=5, batch=256, optimizer=Adam(1e-3))
    width = 512 if scale == "paper" else 128
    members = Family("MNIST, normalized", "mlp", width, points, 60_000)
    bayesian = Family("MNIST, normalized", "mlp", width, converged(scale), 60_000)
    if scale == "smoke":
        return Ensembles(tiny(members), 3, tiny(bayesian), 2, 4, 100)
    return Ensembles(members, 16, bayesian, 8, 32 if scale == "cpu" else 128, 10_000)


def measure(config: Ensembles, run: Run) -> Table:
    """Merge the members after each alignment, and compare the result with the members and their ensemble."""
    members = posteriors(config.members, config.member_count, run)
    bayesian = posteriors(config.posteriors, config.posterior_count, run)
    module, symmetry = config.members.module(), config.members.symmetry()
    networks = [member.mean for member in members]
    together = ParticlePosterior({name: torch.stack([one[name] for one in networks]) for name in networks[0]})
    each = max(1, config.samples // len(bayesian))
    drawn = [q.at(q.draw(each, run.generator("samples", k))) for k, q in enumerate(bayesian)]
    mixed = ParticlePosterior({name: torch.cat([one[name] for one in drawn]) for name in drawn[0]})
    candidates: dict[str, list[tuple[Posterior, int]]] = {
        "a member": [(one, 0) for one in members],
        "the ensemble of members": [(together, len(members))],
        "a posterior": [(one, config.samples) for one in bayesian],
        "the ensemble of posteriors": [(mixed, each * len(bayesian))],
    }
    inputs = [images for images, _ in batches(config.members, REPAIR, is_test=False)]
    for way in WAYS:
        merged, moved = _merge(way, members, symmetry)
        label = f"one Gaussian, members {way.label}"
        repaired = rg.repair(merged.mean, module, moved, inputs).params
        candidates[f"{label}, its mean repaired"] = [(GaussianPosterior(repaired, {}), 0)]
        for spread in SPREADS:
            wide = GaussianPosterior(merged.mean, {name: spread * std for name, std in merged.std.items()})
            words = f"spread {spread:g}" if spread else "its mean"
            candidates[f"{label}, {words}"] = [(wide, config.samples if spread else 0)]
        candidates[f"one Gaussian, posteriors {way.label}"] = [(_merge(way, bayesian, symmetry)[0], config.samples)]

    def judge(cell: tuple[str, int]) -> Record:
        """Evaluate a posterior on the test images by its samples, or only by its mean if there are no samples."""
        label, k = cell
        posterior, samples = candidates[label][k]
        data = batches(config.members, config.test, is_test=True)
        if samples:
            found = predict(posterior, module, data, samples=samples, generator=run.generator("judging"))
        else:
            found = predict(posterior.moments().mean, module, data)
        values = (found.loss, found.accuracy, found.calibration().error, float(found.entropy.predictive.mean()))
        return {quantity.name: value for quantity, value in zip(QUANTITIES, values, strict=True)}

    cells = [(label, k) for label, own in candidates.items() for k in range(len(own))]
    found = iter(run.records("judging", config, judge, cells))
    rows = [Row.of(label, [[next(found) for _ in own]], QUANTITIES) for label, own in candidates.items()]
    notes = (
        "the paper asks whether aligned posteriors can be one; it has no numbers",
        f"{config.members.name}: {config.member_count} members, {config.members.shown_settings}; "
        f"{config.posterior_count} posteriors, {config.posteriors.shown_settings}",
        f"the first {config.test:,} test images; {config.samples} samples of each Gaussian; loss: negative log "
        "predictive likelihood per example, in nats, of averaged probabilities; calibration error "
        "in 15 bins, expected; entropy of the prediction in nats; ± over members or posteriors",
        "members are merged with their mean and standard deviation, posteriors into their Wasserstein barycenter; "
        f"repair restores statistics of {REPAIR:,} training images",
    )
    return Table("One Gaussian from many", notes, QUANTITIES, tuple(rows))


def _merge(
    way: MergingWay, gaussians: Sequence[GaussianPosterior], symmetry: rg.Symmetry
) -> tuple[GaussianPosterior, list[Params]]:
    """Return the Gaussian, and the aligned means from which the Gaussian is computed."""
    moved: Sequence[GaussianPosterior] = gaussians
    if gaussians[0].std:
        if way.gaussians is not None:
            moved = align_many_posteriors(gaussians, symmetry, method=way.gaussians).posteriors
        return barycenter(moved), [one.mean for one in moved]
    networks = [one.mean for one in gaussians]
    if way.networks is not None:
        networks = list(rg.align_many(networks, symmetry, method=way.networks).params)
    stack = {name: torch.stack([one[name] for one in networks]) for name in networks[0]}
    return ParticlePosterior(stack).moments(), networks

"""One Gaussian from many: ensemble members and posteriors merged into one, which paper 004 leaves open."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

import regauge as rg
from regauge.alignment import Method
from regauge.bayes.matching import align_many, barycenter
from regauge.bayes.posteriors.gaussian import GaussianPosterior
from regauge.bayes.posteriors.particles import ParticlePosterior
from regauge.bayes.posteriors.posterior import Posterior
from regauge.bayes.prediction.predict import predict
from regauge.core.params import Params
from regauge.nets.classification import Training
from regauge.papers.bayesian.barrier_figures import converged, tiny
from regauge.papers.bayesian.inference import Family, batches, posteriors
from regauge.papers.experiment import Run, Scale
from regauge.papers.table import Quantity, Record, Row, Table
from regauge.training.optimizers import Adam

REPAIR = 5000
"""Training images whose statistics repair restores."""
SPREADS = (0.0, 0.1, 0.3, 1.0)
"""Factors of the members' standard deviations; 0 is the mean network."""
QUANTITIES = tuple(Quantity(name) for name in ("loss", "accuracy", "calibration error", "entropy"))


@dataclass(frozen=True)
class Ensembles:
    """The settings.

    Attributes:
        members: Networks trained as points.
        member_count: Number of members.
        posteriors: Posteriors of the same architecture.
        posterior_count: Number of posteriors.
        samples: Number of samples of each Gaussian.
        test: Number of test images.
        notes: Departures of the scale.
    """

    members: Family
    member_count: int
    posteriors: Family
    posterior_count: int
    samples: int
    test: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Way:
    """A way to align networks before they are merged.

    Attributes:
        label: In words.
        networks: The method that aligns the members; None leaves them as they are.
        gaussians: The method that aligns posteriors.
    """

    label: str
    networks: Method | None
    gaussians: Method | None


WAYS = (
    Way("not aligned", None, None),
    Way(
        "aligned to the first",
        rg.WeightMatching(),
        rg.GaussianMatching(method=rg.WeightMatching(scales="keep")),
    ),
    Way("aligned to one another", rg.MergeMany(), rg.GaussianMatching()),
)


def config(scale: Scale) -> Ensembles:
    """Sixteen members, and eight posteriors at T = 0.1."""
    points = Training(epochs=5, batch=256, optimizer=Adam(1e-3))
    width = 512 if scale == "paper" else 128
    members = Family("MNIST, normalized", "mlp", width, points, 60_000)
    bayesian = Family("MNIST, normalized", "mlp", width, converged(scale), 60_000)
    if scale == "smoke":
        notes = ("a test run on networks that are hardly trained",)
        return Ensembles(tiny(members), 3, tiny(bayesian), 2, 4, 100, notes)
    return Ensembles(members, 16, bayesian, 8, 32 if scale == "cpu" else 128, 10_000)


def measure(config: Ensembles, run: Run) -> Table:
    """Merge after each way of aligning, and compare with the members and their ensemble."""
    members = posteriors(config.members, config.member_count, run)
    bayesian = posteriors(config.posteriors, config.posterior_count, run)
    networks = [member.mean for member in members]
    together = ParticlePosterior({name: torch.stack([one[name] for one in networks]) for name in networks[0]})
    noise_of = functools.partial(run.generator, "samples")
    each = max(1, config.samples // len(bayesian))
    drawn = [q.at(q.draw(each, noise_of(k))) for k, q in enumerate(bayesian)]
    mixed = ParticlePosterior({name: torch.cat([one[name] for one in drawn]) for name in drawn[0]})
    steps: dict[str, list[Callable[[], Record]]] = {
        "a member": [functools.partial(_judge, config, f"member-{k}", m, 0, run) for k, m in enumerate(members)],
        "the ensemble of members": [functools.partial(_judge, config, "ensemble", together, len(members), run)],
        "a posterior": [
            functools.partial(_judge, config, f"posterior-{k}", q, config.samples, run) for k, q in enumerate(bayesian)
        ],
        "the ensemble of posteriors": [functools.partial(_judge, config, "mixture", mixed, each * len(bayesian), run)],
    }
    symmetry = rg.discover(config.members.module(), (config.members.images().test_images[:4],))
    for way in WAYS:
        merged, moved = _merge(way, members, symmetry)
        repaired = functools.partial(_repair, config, merged.mean, moved)
        label = f"one Gaussian, members {way.label}, its mean repaired"
        steps[label] = [functools.partial(_judge, config, f"{way.label}-repaired", repaired, 0, run, way)]
        for spread in SPREADS:
            label = f"one Gaussian, members {way.label}, {'its mean' if spread == 0 else f'spread {spread:g}'}"
            wide = GaussianPosterior(merged.mean, {name: spread * std for name, std in merged.std.items()})
            samples = config.samples if spread else 0
            steps[label] = [functools.partial(_judge, config, f"{way.label}-{spread}", wide, samples, run, way)]
        one, _ = _merge(way, bayesian, symmetry)
        label = f"one Gaussian, posteriors {way.label}"
        steps[label] = [functools.partial(_judge, config, f"{way.label}-posteriors", one, config.samples, run, way)]
    found = iter(run.each("judging", [step for row in steps.values() for step in row]))
    rows = [Row.of(label, [[next(found) for _ in row]], QUANTITIES) for label, row in steps.items()]
    notes = (
        "the paper asks whether aligned posteriors can be one; it has no numbers",
        f"{config.members.name}: {config.member_count} members, {config.members.settings}; {config.posterior_count} "
        f"posteriors, {config.posteriors.settings}",
        f"the first {config.test:,} test images; {config.samples} samples of each Gaussian; loss: negative log "
        "predictive likelihood per example, in nats, of averaged probabilities; calibration error "
        "in 15 bins, expected; entropy of the prediction in nats; ± over members or posteriors",
        "members are merged with their mean and standard deviation, posteriors into their Wasserstein barycenter; "
        f"repair restores statistics of {REPAIR:,} training images",
        *config.notes,
    )
    return Table("One Gaussian from many", notes, QUANTITIES, tuple(rows))


def _merge(
    way: Way, gaussians: Sequence[GaussianPosterior], symmetry: rg.Symmetry
) -> tuple[GaussianPosterior, list[Params]]:
    """The Gaussian, and the means that it is made of where they were moved to."""
    moved: Sequence[GaussianPosterior] = gaussians
    if gaussians[0].std:
        if way.gaussians is not None:
            moved = align_many(gaussians, symmetry, method=way.gaussians).posteriors
        return barycenter(moved), [one.mean for one in moved]
    networks = [one.mean for one in gaussians]
    if way.networks is not None:
        networks = list(rg.align_many(networks, symmetry, method=way.networks).params)
    stack = {name: torch.stack([one[name] for one in networks]) for name in networks[0]}
    return ParticlePosterior(stack).moments(), networks


def _repair(config: Ensembles, mean: Params, moved: Sequence[Params]) -> Params:
    inputs = [images for images, _ in batches(config.members, REPAIR, is_test=False)]
    return rg.repair(mean, config.members.module(), moved, inputs).params


def _judge(
    config: Ensembles,
    key: str,
    posterior: Posterior | Callable[[], Params],
    samples: int,
    run: Run,
    way: Way | None = None,
) -> Record:
    """A posterior on the test images; by its mean alone without samples, or what makes a network."""

    def make() -> Record:
        data = batches(config.members, config.test, is_test=True)
        generator = run.generator("judging")
        module = config.members.module()
        if not isinstance(posterior, Posterior):
            found = predict(module, posterior(), data)
        elif samples:
            found = predict(module, posterior, data, samples=samples, generator=generator)
        else:
            found = predict(module, posterior.moments().mean, data)
        values = (found.loss, found.accuracy, found.calibration().error, float(found.entropy.predictive.mean()))
        return {quantity.name: value for quantity, value in zip(QUANTITIES, values, strict=True)}

    settings = (config.members, config.posteriors, config.member_count, config.posterior_count, samples, config.test)
    return run.record(("one Gaussian", way, *settings), key, make)

"""The settings of the comparisons of barriers, at every scale."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Literal

from regauge.bayes.variational.mean_field import Variational
from regauge.nets.classification import Training
from regauge.papers.bayesian.inference import Family
from regauge.papers.bayesian.posterior_barriers import ALIGNED, BALANCED, NAIVE, PERMUTED, SIGNED, Barriers, Case
from regauge.papers.experiment import Scale
from regauge.papers.populations import DataName
from regauge.papers.ways import Way
from regauge.training import SGD, Adam, Constant

Norm = Literal["filter", "layer"]
NORMS: tuple[Norm, ...] = ("filter", "layer")

PAPER_LR = 1e-6
"""Learning rate of table 1, for the evidence lower bound summed over the training images."""
TRAIN = 60_000
"""Training images of MNIST and Fashion-MNIST; CIFAR-10 has 50,000."""


def as_published(examples: int, prior_var: float, epochs: int) -> Variational:
    """Inference as in table 1 of the paper, its learning rate converted to the bound per example."""
    rate = PAPER_LR * examples
    optimizer = SGD(rate, momentum=0.9)
    return Variational(epochs=epochs, prior_std=prior_var**0.5, optimizer=optimizer, lr_std=rate, schedule=Constant())


def converged(scale: Scale, prior_var: float = 0.01, temperature: float = 0.1) -> Variational:
    """Adam until the bound no longer changes: 30 epochs, as many as the paper at its scale."""
    return Variational(epochs=1000 if scale == "paper" else 30, prior_std=prior_var**0.5, temperature=temperature)


def figure4(scale: Scale) -> Barriers:
    """MLPs on three data sets and a residual network, which on a CPU is in figure 11."""

    def case(data: DataName, pairs: int, prior_var: float) -> Case:
        examples = 50_000 if data == "CIFAR-10" else TRAIN
        inference = as_published(examples, prior_var, 1000 if scale == "paper" else 25)
        return Case(data, Family(data, "mlp", 512, inference, examples), 5 if scale == "paper" else pairs)

    cases = (case("MNIST", 5, 0.0025), case("Fashion-MNIST", 1, 0.0025), case("CIFAR-10", 1, 0.0025))
    convolutional = residual(scale, "filter")
    return _barriers(
        scale,
        "Figure 4: barriers with and without alignment",
        cases if scale == "cpu" else (*cases, Case(convolutional.name, convolutional, _pairs(scale))),
        claim="the paper shows bars without numbers: none to be seen for aligned MLPs, a small one for ResNet20",
    )


def figure5(scale: Scale) -> Barriers:
    """Widths of an MLP and, at the paper's scale, of ResNet20."""
    return _barriers(
        scale,
        "Figure 5: barriers by width",
        (*_widths(scale, "MLP", converged(scale)), *_multipliers(scale, "ResNet20")),
        axis="units of a layer, or multiplier of channels",
        claim="the paper: wider MLPs have lower barriers, aligned or not; wider ResNet20 only if they are aligned",
    )


def figure7(scale: Scale) -> Barriers:
    """Variances of the prior."""
    variances = (0.001, 0.01, 0.1, 1.0)
    cases = [
        Case(f"{data}, prior variance {variance:g}", _mlp(scale, converged(scale, variance), data), 2, variance, data)
        for data in _small_data(scale)
        for variance in variances
    ]
    if scale == "paper":
        for variance in variances:
            family = Family("CIFAR-10", "filter", 8, as_published(50_000, variance, 1000), 50_000)
            cases.append(Case(f"ResNet20 x8, prior variance {variance:g}", family, 5, variance, "ResNet20 x8"))
    return _barriers(
        scale,
        "Figure 7: barriers by the prior's variance",
        cases,
        axis="variance of the prior",
        claim="the paper: aligned, the variance has no measurable effect; without alignment wide priors lower barriers",
    )


def figure8(scale: Scale) -> Barriers:
    """Temperatures."""
    cases = [
        Case(f"T = {t:g}", _mlp(scale, converged(scale, 0.01, t)), 5 if t == 0.1 else 2, t)
        for t in (0.01, 0.1, 0.3, 1.0, 2.0)
    ]
    return _barriers(
        scale,
        "Figure 8: barriers by temperature",
        cases,
        axis="temperature",
        claim="the paper: aligned cold posteriors have barriers marginally closer to zero than warm ones",
    )


def figure9(scale: Scale) -> Barriers:
    """Posteriors and points."""
    points = Training(epochs=100 if scale == "paper" else 10, batch=500, optimizer=Adam(1e-3))
    return _barriers(
        scale,
        "Figure 9: posteriors and points",
        (
            *_widths(scale, "posterior", converged(scale)),
            *_widths(scale, "point", points),
            *_multipliers(scale, "ResNet20, posterior"),
            *_multipliers(scale, "ResNet20, point", points),
        ),
        axis="units of a layer, or multiplier of channels",
        claim="the paper: alike for narrow networks; for wide ones the points' barriers are lower",
    )


def figure11(scale: Scale) -> Barriers:
    """Normalizations, and the gains from their symmetries."""
    families = [residual(scale, norm) for norm in NORMS]
    cases = [Case(family.name, family, 2 if scale == "cpu" else _pairs(scale)) for family in families]
    if scale == "cpu":
        small = [small_residual(norm, width) for width in (1, 4) for norm in NORMS]
        cases += [Case(family.name, family, 3) for family in small]
    config = _barriers(
        scale,
        "Figure 11: filter response and layer normalization, and what their symmetries are worth",
        cases,
        (NAIVE, PERMUTED, SIGNED, BALANCED),
        claim="the paper: barriers with LayerNorm are lower than with FRN, both aligned by permutations; it does not "
        "use the signs and scales that FRN and ReLU bring",
    )
    # Convolutions make an image many times as dear as it is for an MLP.
    return replace(config, samples=8, train=1000, test=1000) if scale == "cpu" else config


def _pairs(scale: Scale) -> int:
    return 5 if scale == "paper" else 1


def _small_data(scale: Scale) -> tuple[DataName, ...]:
    return ("MNIST",) if scale == "smoke" else ("MNIST", "Fashion-MNIST")


def _mlp(scale: Scale, inference: Variational | Training, data: DataName = "MNIST", width: int | None = None) -> Family:
    width = (512 if scale == "paper" else 128) if width is None else width
    return Family(data, "mlp", width, inference, TRAIN)


def _widths(scale: Scale, series: str, inference: Variational | Training) -> list[Case]:
    return [
        Case(f"{series}{' ' * bool(series)}{width}", _mlp(scale, inference, width=width), 2, width, series)
        for width in (32, 64, 128, 256, 512)
    ]


def _multipliers(scale: Scale, series: str, inference: Training | None = None) -> list[Case]:
    """ResNet20 of several widths: days of a GPU, so at the paper's scale only."""
    if scale != "paper":
        return []
    how = as_published(50_000, 0.01, 1000) if inference is None else inference
    return [
        Case(f"{series} x{width}", Family("CIFAR-10", "filter", width, how, 50_000), 5, width, series)
        for width in (1, 2, 4, 8)
    ]


def residual(scale: Scale, norm: Norm) -> Family:
    """ResNet20 at the paper's scale; on a CPU ResNet8 with a cold posterior, which is not pruned so soon.

    Its standard deviations begin at 0.003: where they begin at 0.01, a fifth of the weights, noise keeps the means from
    being learned in ten epochs.
    """
    if scale == "paper":
        return Family("CIFAR-10", norm, 1, as_published(50_000, 0.01, 1000), 50_000)
    inference = Variational(epochs=10, batch=125, prior_std=0.1, temperature=0.1, initial_std=0.003, lr_std=1e-3)
    return Family("CIFAR-10", norm, 1, inference, 20_000, blocks=1)


def small_residual(norm: Norm, width: int) -> Family:
    """ResNet8 of small images, which a CPU trains to the end, also where it is wide."""
    inference = Variational(epochs=20, batch=50, prior_std=0.1, temperature=0.001, initial_std=0.003, lr_std=1e-3)
    return Family("digits", norm, width, inference, 1400, blocks=1)


def _barriers(
    scale: Scale,
    title: str,
    cases: Iterable[Case],
    ways: tuple[Way, ...] = (NAIVE, ALIGNED),
    *,
    claim: str,
    axis: str = "",
) -> Barriers:
    if scale == "paper":
        return Barriers(title, tuple(replace(c, pairs=5) for c in cases), ways, 25, 128, 10_000, 10_000, axis, claim)
    if scale == "cpu":
        return Barriers(title, tuple(cases), ways, 11, 32, 2000, 2000, axis, claim)
    small = tuple(
        replace(case, label=case.label.replace(case.family.data, "digits"), pairs=1, family=tiny(case.family))
        for case in cases
    )
    return Barriers(title, small, ways, 3, 4, 100, 100, axis, claim)


def tiny(family: Family) -> Family:
    """The same kind of posterior, of digits and in seconds."""
    inference = replace(family.inference, epochs=1, batch=50)
    width = 1 if family.kind != "mlp" else max(4, family.width // 16)
    return Family("digits", family.kind, width, inference, 200, blocks=1)


CONFIGS: dict[str, Callable[[Scale], Barriers]] = {
    "figure4": figure4,
    "figure5": figure5,
    "figure7": figure7,
    "figure8": figure8,
    "figure9": figure9,
    "figure11": figure11,
}

"""Comparisons of barriers: a table of figures, and the posteriors of each figure at every scale."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal

from regauge.bayes.variational.mean_field import VariationalConfig
from regauge.nets.augmentation import Augmentation
from regauge.nets.classification import ClassifierConfig
from regauge.training import SGD, Adam, Constant
from regauge_papers.bayesian.inference import Family, Kind
from regauge_papers.bayesian.posterior_barriers import ALIGNED, BALANCED, NAIVE, PERMUTED, SIGNED, Barriers, Case
from regauge_papers.experiment import Scale
from regauge_papers.populations import DataName
from regauge_papers.ways import Way

Norm = Literal["filter", "layer"]
NORMS: tuple[Norm, ...] = ("filter", "layer")

PAPER_LR = 1e-6
"""The learning rate in table 1, for the evidence lower bound summed over the training images."""
FOR_DIGITS = Augmentation(shift=1, mirrors=False)
"""Random changes of images of 8 x 8 pixels. Images are not mirrored, because mirroring would change the class of a
digit."""
WIDTHS = "units of a layer, or multiplier of channels"


@dataclass(frozen=True)
class Figure:
    """A comparison of barriers, with its settings for a laptop and for the paper's budget; see `Barriers`."""

    summary: str  # in the list of experiments
    title: str
    claim: str
    cases: Callable[[Scale], Iterable[Case]]
    axis: str = ""
    ways: tuple[Way, ...] = (NAIVE, ALIGNED)

    def config(self, scale: Scale) -> Barriers:
        """Return the settings at a scale."""
        cases = tuple(self.cases(scale))
        if scale == "paper":
            cases, sizes = tuple(replace(case, pairs=5) for case in cases), (25, 128, 10_000)
        elif scale == "cpu":
            # Convolutions make an image many times as dear as it is for an MLP.
            sizes = (11, 32, 2000) if any(case.family.kind == "mlp" for case in cases) else (11, 8, 1000)
        else:
            sizes = (3, 4, 100)
            cases = tuple(replace(case, label=_tiny_label(case), pairs=1, family=tiny(case.family)) for case in cases)
        return Barriers(self.title, cases, self.ways, *sizes, self.axis, self.claim)


def as_published(
    scale: Scale, data: DataName, kind: Kind = "mlp", width: int = 512, prior_var: float = 0.0025
) -> Family:
    """Return the inference settings of table 1 of the paper, or fewer epochs on a CPU.

    The paper's learning rate is multiplied by the number of examples, because the loss in regauge is the bound per
    example.
    """
    examples = 50_000 if data in ("CIFAR-10", "CIFAR-100") else 60_000
    rate, epochs = PAPER_LR * examples, 1000 if scale == "paper" else 25
    optimizer = SGD(rate, momentum=0.9)
    inference = VariationalConfig(
        epochs=epochs, prior_std=prior_var**0.5, optimizer=optimizer, lr_std=rate, schedule=Constant()
    )
    return Family(data, kind, width, inference, examples)


def converged(scale: Scale, prior_var: float = 0.01, temperature: float = 0.1) -> VariationalConfig:
    """Return the settings of inference by Adam until the bound is constant: 30 epochs on a CPU, or as many as in the
    paper.
    """
    return VariationalConfig(epochs=1000 if scale == "paper" else 30, prior_std=prior_var**0.5, temperature=temperature)


def _by_data(scale: Scale) -> list[Case]:
    """Return MLPs on three data sets and a residual network; on a CPU, figure 11 shows the residual network instead."""
    names: tuple[DataName, ...] = ("MNIST", "Fashion-MNIST", "CIFAR-10")
    cases = [Case(data, as_published(scale, data), 5 if data == "MNIST" else 1) for data in names]
    convolutional = residual(scale, "filter")
    return cases if scale == "cpu" else [*cases, Case(convolutional.name, convolutional, 1)]


def _by_classes(scale: Scale) -> list[Case]:
    """Return MLPs on CIFAR-10 and CIFAR-100, and at the paper's scale also ResNet20 x8."""
    names: tuple[DataName, ...] = ("CIFAR-10", "CIFAR-100")
    families = [as_published(scale, data) for data in names]
    if scale == "paper":
        families += [as_published(scale, data, "filter", 8, 0.01) for data in names]
    return [Case(family.name, family, 2) for family in families]


def _by_width(scale: Scale) -> list[Case]:
    """Return several widths of an MLP and, at the paper's scale, several widths of ResNet20."""
    return [*_widths(scale, "MLP", converged(scale)), *_multipliers(scale, "ResNet20")]


def _by_prior(scale: Scale) -> list[Case]:
    """Return posteriors with several variances of the prior."""
    variances = (0.001, 0.01, 0.1, 1.0)
    data: tuple[DataName, ...] = ("MNIST",) if scale == "smoke" else ("MNIST", "Fashion-MNIST")
    families: dict[tuple[str, float], Family] = {
        (name, v): _mlp(scale, converged(scale, v), name) for name in data for v in variances
    }
    if scale == "paper":
        families |= {("ResNet20 x8", v): as_published(scale, "CIFAR-10", "filter", 8, v) for v in variances}
    return [Case(f"{name}, prior variance {v:g}", family, 2, v, name) for (name, v), family in families.items()]


def _by_temperature(scale: Scale) -> list[Case]:
    return [
        Case(f"T = {t:g}", _mlp(scale, converged(scale, 0.01, t)), 5 if t == 0.1 else 2, t)
        for t in (0.01, 0.1, 0.3, 1.0, 2.0)
    ]


def _posteriors_and_points(scale: Scale) -> list[Case]:
    points = ClassifierConfig(epochs=100 if scale == "paper" else 10, batch=500, optimizer=Adam(1e-3))
    return [
        *_widths(scale, "posterior", converged(scale)),
        *_widths(scale, "point", points),
        *_multipliers(scale, "ResNet20, posterior"),
        *_multipliers(scale, "ResNet20, point", points),
    ]


def _by_norm(scale: Scale) -> list[Case]:
    cases = {residual(scale, norm): 2 for norm in NORMS}
    if scale == "cpu":
        cases |= {small_residual(norm, width): 3 for width in (1, 4) for norm in NORMS}
    return [Case(family.name, family, pairs) for family, pairs in cases.items()]


def _by_augmentation(scale: Scale) -> list[Case]:
    """Return posteriors of the same images with and without random changes in every step."""
    if scale == "paper":
        families = [as_published(scale, "CIFAR-10"), as_published(scale, "CIFAR-10", "filter", 8, 0.01)]
    else:
        families = [as_published(scale, "CIFAR-10"), small_residual("filter", 4)]
    cases = []
    for family in families:
        change = FOR_DIGITS if family.data == "digits" else Augmentation()
        for one in (family, replace(family, augmentation=change)):
            cases.append(Case(one.name, one, 2 if family.kind == "mlp" else 3))
    return cases


def _residual_widths(scale: Scale) -> list[Case]:
    """Return ResNet20 of widths 1 and 2 on a CPU, with a cold posterior as in figure 11, inferred in bfloat16."""
    if scale == "paper":
        return _multipliers(scale, "ResNet20")
    families = [replace(residual(scale, "filter"), width=width, blocks=3, is_bfloat16=True) for width in (1, 2)]
    return [Case(family.name, family, 1) for family in families]


def _mlp(
    scale: Scale, inference: VariationalConfig | ClassifierConfig, data: DataName = "MNIST", width: int | None = None
) -> Family:
    width = (512 if scale == "paper" else 128) if width is None else width
    return Family(data, "mlp", width, inference, 60_000)


def _widths(scale: Scale, series: str, inference: VariationalConfig | ClassifierConfig) -> list[Case]:
    return [
        Case(f"{series} {width}", _mlp(scale, inference, width=width), 2, width, series)
        for width in (32, 64, 128, 256, 512)
    ]


def _multipliers(scale: Scale, series: str, inference: ClassifierConfig | None = None) -> list[Case]:
    """Return ResNet20 of several widths at the paper's scale. At smaller scales, return nothing, because the training
    takes days of a GPU.
    """
    families = [as_published(scale, "CIFAR-10", "filter", width, 0.01) for width in (1, 2, 4, 8) if scale == "paper"]
    if inference is not None:
        families = [replace(family, inference=inference) for family in families]
    return [Case(f"{series} x{family.width}", family, 5, family.width, series) for family in families]


def residual(scale: Scale, norm: Norm) -> Family:
    """Return ResNet20 at the paper's scale; on a CPU, ResNet8 with a cold posterior, in which fewer weights have the
    distribution of the prior.

    The standard deviations of ResNet8 begin at 0.003. If standard deviations begin at 0.01, a fifth of the size of the
    weights, ten epochs do not suffice for the means, because of the noise.
    """
    if scale == "paper":
        return as_published(scale, "CIFAR-10", norm, 1, 0.01)
    inference = VariationalConfig(epochs=10, batch=125, prior_std=0.1, temperature=0.1, initial_std=0.003, lr_std=1e-3)
    return Family("CIFAR-10", norm, 1, inference, 20_000, blocks=1)


def small_residual(norm: Norm, width: int) -> Family:
    """Return ResNet8 on small images, for which a CPU can finish the training even if the network is wide."""
    inference = VariationalConfig(epochs=20, batch=50, prior_std=0.1, temperature=0.001, initial_std=0.003, lr_std=1e-3)
    return Family("digits", norm, width, inference, 1400, blocks=1)


def tiny(family: Family) -> Family:
    """Return a small version of a family, which is trained on digits in seconds."""
    return replace(
        family,
        data="digits",
        width=min(family.width, 2) if family.kind != "mlp" else max(4, family.width // 16),
        inference=replace(family.inference, epochs=1, batch=50),
        examples=200,
        blocks=1,
        augmentation=None if family.augmentation is None else FOR_DIGITS,
    )


def _tiny_label(case: Case) -> str:
    """Return the label of a case in which small networks replace the networks of the paper."""
    if case.label == case.family.name:
        return tiny(case.family).name
    return case.label.replace(case.family.data, "digits")


FIGURES = {
    "figure4": Figure(
        "barriers of posteriors with and without alignment, on three data sets",
        "Figure 4: barriers with and without alignment",
        "the paper shows bars without numbers: none to be seen for aligned MLPs, a small one for ResNet20",
        _by_data,
    ),
    "figure5": Figure(
        "barriers by width",
        "Figure 5: barriers by width",
        "the paper: wider MLPs have lower barriers, aligned or not; wider ResNet20 only if they are aligned",
        _by_width,
        WIDTHS,
    ),
    "figure7": Figure(
        "barriers by the prior's variance",
        "Figure 7: barriers by the prior's variance",
        "the paper: aligned, the variance has no measurable effect; without alignment wide priors lower barriers",
        _by_prior,
        "variance of the prior",
    ),
    "figure8": Figure(
        "barriers by temperature",
        "Figure 8: barriers by temperature",
        "the paper: aligned cold posteriors have barriers marginally closer to zero than warm ones",
        _by_temperature,
        "temperature",
    ),
    "figure9": Figure(
        "posteriors beside points, by width",
        "Figure 9: posteriors and points",
        "the paper: alike for narrow networks; for wide ones the points' barriers are lower",
        _posteriors_and_points,
        WIDTHS,
    ),
    "figure12": Figure(
        "data augmentation",
        "Figure 12: data augmentation",
        "the paper: barriers of aligned posteriors are as low with augmentation as without it",
        _by_augmentation,
    ),
    "resnet20": Figure(
        "ResNet20 by width, what figures 4 and 5 have of it",
        "ResNet20 with filter response normalization, by width",
        "the paper, of ResNet20 on CIFAR-10: aligned by permutations its barriers are small and fall with width",
        _residual_widths,
        ways=(NAIVE, PERMUTED, BALANCED),
    ),
    "figure11": Figure(
        "filter response and layer normalization, and what their symmetries are worth",
        "Figure 11: filter response and layer normalization, and what their symmetries are worth",
        "the paper: barriers with LayerNorm are lower than with FRN, both aligned by permutations; it does not use the "
        "signs and scales that FRN and ReLU bring",
        _by_norm,
        ways=(NAIVE, PERMUTED, SIGNED, BALANCED),
    ),
    "figureA15": Figure(
        "CIFAR-100, where the paper finds barriers after alignment",
        "Figure A15: CIFAR-100 beside CIFAR-10",
        "the paper: on CIFAR-100 posteriors that converge well keep a barrier after alignment; it does not say which "
        "networks they are of",
        _by_classes,
    ),
}

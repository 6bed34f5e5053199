"""Cost of aligning posteriors, relative to aligning single networks of the same architecture.

The benchmark fits mean-field posteriors of an MLP 784-512-512-512-10 on MNIST and of a ResNet20 with filter response
normalization on digits, two of each from different seeds, for a few epochs. In one process with one thread, it aligns
in alternating order the means as networks, the posteriors as distributions and, for the MLP, several posteriors with
one another. Times are CPU seconds (`time.process_time`), as medians of several rounds. A ratio is the median of the
ratios of all rounds.

    REGAUGE_DATA=... python benchmarks/posteriors.py
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import regauge as rg
from regauge.bayes.matching import align_many_posteriors, align_posteriors
from regauge.bayes.posteriors.gaussian import GaussianPosterior
from regauge.bayes.variational.mean_field import VariationalConfig, fit
from regauge.data.images import digits, mnist
from regauge.nets.mlp import mlp
from regauge.nets.resnet import resnet20

ROUNDS = 9


@dataclass(frozen=True)
class Case:
    """Posteriors of one architecture, and the settings of their inference."""

    name: str
    make: Callable[[], nn.Module]
    images: Tensor
    labels: Tensor
    config: VariationalConfig
    count: int


def cases() -> list[Case]:
    """Return the measured cases."""
    large, small = mnist(), digits()
    return [
        Case(
            "MLP 784-512-512-512-10, MNIST",
            lambda: mlp(784, 512, 512, 512, 10),
            large.train_images.flatten(1),
            large.train_labels,
            VariationalConfig(epochs=3, prior_std=0.05, temperature=0.1),
            4,
        ),
        Case(
            "ResNet20 with FRN, digits",
            lambda: resnet20(norm="filter", in_channels=1),
            small.train_images,
            small.train_labels,
            VariationalConfig(epochs=4, batch=128, prior_std=0.1, temperature=0.1),
            2,
        ),
    ]


def posteriors(case: Case) -> list[GaussianPosterior]:
    """Return posteriors with different initializations and orders of the data."""
    result = []
    for seed in range(case.count):
        torch.manual_seed(seed)
        module = case.make()
        start = {key: tensor.detach().clone() for key, tensor in module.state_dict().items()}
        chance = torch.Generator().manual_seed(seed)
        result.append(fit(start, module, case.images, case.labels, case.config, generator=chance))
    return result


def measure(case: Case) -> None:
    """Print the rows of one architecture."""
    fitted = posteriors(case)
    symmetry = rg.discover(case.make(), (case.images[:2],))
    means = [q.mean for q in fitted]
    programs: dict[str, Callable[[], str]] = {}
    for scales in ("keep", "balance"):
        plain = rg.WeightMatching(scales=scales)  # type: ignore[arg-type]
        programs |= {
            f"means, {scales}": lambda m=plain: str(rg.align(*means[:2], symmetry, method=m)),
            f"Wasserstein, {scales}": lambda m=plain: str(
                rg.align(*fitted[:2], symmetry, method=rg.GaussianMatching(method=m))
            ),
        }
    programs["Wasserstein, keep, moved and measured"] = lambda: str(align_posteriors(*fitted[:2], symmetry))
    programs["KL, keep"] = lambda: str(rg.align(*fitted[:2], symmetry, method=rg.GaussianMatching(cost="kl")))
    if case.count > 2:
        merging = rg.alignment.MergeMany(inner=rg.WeightMatching(scales="keep"))
        programs[f"means of {case.count}, keep"] = lambda: str(rg.align_many(means, symmetry, method=merging))
        programs[f"Wasserstein of {case.count}, keep"] = lambda: str(align_many_posteriors(fitted, symmetry))
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    reports: dict[str, str] = {}
    for _ in range(ROUNDS):
        for name, program in programs.items():
            start = time.process_time()
            reports[name] = program()
            seconds[name].append(time.process_time() - start)
    print(f"\n{case.name}\n")
    print("| what | CPU s | / means | outcome |\n| --- | --- | --- | --- |")
    for name, times in seconds.items():
        base = next(b for b in programs if b.startswith("means") and (" of " in b) == (" of " in name))
        if "balance" in name:
            base = "means, balance"
        ratio = statistics.median(t / b for t, b in zip(times, seconds[base], strict=True))
        print(f"| {name} | {statistics.median(times):.3f} | {ratio:.2f} | {reports[name].split(';')[0]} |")


def main() -> None:
    """Measure all architectures."""
    torch.set_num_threads(1)
    for case in cases():
        measure(case)


if __name__ == "__main__":
    main()

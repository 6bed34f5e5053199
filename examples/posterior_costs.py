"""Alignment of posteriors with and without standard deviations, and the divergence from the prior when scales change.

    OMP_NUM_THREADS=1 python examples/posterior_costs.py

The example fits five disjoint pairs of mean-field posteriors of MLPs 64-32-32-10 on scikit-learn's digits, with prior
N(0, 0.3^2) and temperature 0.1. The example prints the table in docs/measurements/bayes.md.
"""

from statistics import fmean, stdev
from typing import Any

import torch

import regauge as rg
from regauge.bayes import compare_with_prior
from regauge.data import digits
from regauge.nets import initialize, mlp, split_batches

PAIRS, SAMPLES, POINTS = 5, 32, 11
CONFIG = rg.bayes.VariationalConfig(epochs=40, batch=100, prior_std=0.3, temperature=0.1)
METHODS: dict[str, Any] = {
    "as inferred": None,
    "Wasserstein: means and standard deviations": rg.GaussianMatching(),
    "means alone": rg.GaussianMatching(cost="mean"),
    "KL": rg.GaussianMatching(cost="kl"),
    "Wasserstein, scales balanced": rg.GaussianMatching(method=rg.WeightMatching()),
}


def words(values: list[float], digits: int = 3) -> str:
    """Return the mean over pairs and its standard error as text."""
    return f"{fmean(values):.{digits}f} ± {stdev(values) / len(values) ** 0.5:.{digits}f}"


def main() -> None:
    """Infer the posteriors, align them under every cost, and print the table."""
    data, module = digits(), mlp(64, 32, 32, 10)
    symmetry = rg.discover(module, (data.test_images[:4],))
    test, count = split_batches(data.test_images, data.test_labels), len(data.train_labels)
    posteriors = []
    for seed in range(2 * PAIRS):
        generator = torch.Generator().manual_seed(seed)
        start = initialize(module, generator)
        found = rg.bayes.fit(start, module, data.train_images, data.train_labels, CONFIG, generator=generator)
        posteriors.append(found)
    print("| cost | barrier | less as inferred | less Wasserstein | KL from the prior, nats per example |")
    print("| --- | ---: | ---: | ---: | ---: |")
    barriers: dict[str, list[float]] = {}
    for label, method in METHODS.items():
        own, divergences = [], []
        for pair in range(PAIRS):
            q_0, q_1 = posteriors[2 * pair : 2 * pair + 2]
            noise = q_1.draw(SAMPLES, torch.Generator().manual_seed(100 + pair))
            if method is not None:
                element = rg.bayes.align_posteriors(q_0, q_1, symmetry, method=method).element
                q_1, noise = q_1.push(symmetry, element), q_1.push_noise(symmetry, element, noise)
            own.append(rg.bayes.posterior_line(q_0, q_1, module, test, noise=noise, points=POINTS).barrier)
            divergences.append(compare_with_prior(q_1, CONFIG.prior_std, count).kl_per_example)
        barriers[label] = own
        gaps = [
            words([a - b for a, b in zip(own, barriers[other], strict=True)])
            if other in barriers and other != label
            else ""
            for other in list(METHODS)[:2]
        ]
        print(f"| {label} | {words(own)} | {gaps[0]} | {gaps[1]} | {words(divergences)} |", flush=True)


if __name__ == "__main__":
    main()

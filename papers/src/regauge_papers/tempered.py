"""Lines evaluated with a fitted softmax temperature, which show the part of a barrier caused by confidence.

The mean of two networks has smaller outputs than either network, so its probabilities are too uniform. A temperature
for each network of the line makes the probabilities confident again, without any alignment.

References:
    arXiv 2510.08023, which finds that wide networks with a fitted temperature need no permutation; Guo et al. (2017),
    On calibration of modern neural networks, for the temperature.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

import regauge as rg
from regauge.core.given import as_pair
from regauge.core.task import cross_entropy

LIMIT = 6.0
"""The largest absolute value of the logarithm of a temperature."""


@dataclass(frozen=True)
class TemperedJudge:
    """A judge that divides outputs of a classifier by the temperature that is best on other examples."""

    judge: rg.Task  # evaluates: the mean cross entropy of its batches
    fitting: rg.Task  # examples that the temperature is fitted to

    def __call__(self, params: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the loss in nats, and the accuracy, which does not depend on the temperature."""
        with torch.no_grad():
            pairs = [as_pair(batch) for batch in self.fitting.batches]
            outputs = torch.cat([self.fitting.run(params, inputs) for inputs, _ in pairs])
            temperature = fit_temperature(outputs, torch.cat([targets for _, targets in pairs]))
        tempered = replace(self.judge, criterion=lambda outputs, targets: cross_entropy(outputs / temperature, targets))
        return tempered.evaluate(params)


def fit_temperature(outputs: Tensor, targets: Tensor) -> float:
    """Return the divisor of logits `[..., classes]` with the smallest mean cross entropy.

    The loss is convex in the inverse temperature. The temperature is searched between exp(-6) and exp(6).
    """
    logits = outputs.double()

    def loss(log: float) -> float:
        return float(cross_entropy(logits * math.exp(-log), targets))

    found = minimize_scalar(loss, bounds=(-LIMIT, LIMIT), method="bounded", options={"xatol": 1e-4})
    return math.exp(float(found.x))

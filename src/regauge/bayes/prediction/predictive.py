"""The predictive distribution of a posterior, and its scores on data."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from regauge.core.params import Params


@dataclass(frozen=True)
class Bin:
    """A group of examples whose most probable class has a probability in `(low, high]`.

    Confidence is the mean probability of the most probable class. Accuracy is the share of examples whose most probable
    class is the target. Confidence and accuracy are NaN if a bin has no examples.
    """

    low: float
    high: float
    count: int
    confidence: float
    accuracy: float


@dataclass(frozen=True)
class Calibration:
    """A reliability table with one row per bin of probabilities.

    References:
        Guo et al. (2017), On Calibration of Modern Neural Networks, section 2.
    """

    table: tuple[Bin, ...]

    @property
    def error(self) -> float:
        """The expected calibration error: the mean over examples of |accuracy - confidence| in their bins."""
        total = sum(row.count for row in self.table)
        return sum(row.count * abs(row.accuracy - row.confidence) for row in self.table if row.count) / total


@dataclass(frozen=True, eq=False)
class Predictive:
    """Predictions of posterior samples on some examples, combined by Bayesian model averaging.

    The loss is the negative log predictive likelihood per example, in nats, `-(1/N) sum_i log (1/S) sum_s p(y_i | x_i,
    theta_s)`. The average is inside the logarithm: probabilities are averaged, and logits are not. The loss is computed
    by log-sum-exp. All numbers are float64. Classification scores raise a ValueError if targets are not class labels,
    and regression scores raise a ValueError for class labels.

    Attributes:
        log_likelihoods: The log likelihood of every sample on every example, in nats, `[samples, examples]`.
        targets: The targets of the examples, `[examples, ...]`.
        averages: The `statistics` of the likelihood, averaged over samples, `[examples, ...]`, and the average
            "log_likelihood".
        is_exact: Whether the samples are the whole distribution, as for one network. The scores of a whole distribution
            are exact.

    References:
        Rossi et al. (2023), equation 5. The equation is a sum over examples and is not negated.
    """

    log_likelihoods: Tensor
    targets: Tensor
    averages: Params
    is_exact: bool = False

    @property
    def loss(self) -> float:
        """The negative log predictive likelihood per example, in nats.

        The loss is an estimate from S samples. On average, the estimate is larger than the loss of infinitely many
        samples, by about the mean over examples of `Var(p_i) / (2 S E(p_i)^2)`. For a single sample, the expectation of
        the loss is the expected loss of one network (`gibbs`). `corrected` removes most of the bias.
        """
        return -float(log_mean_exp(self.log_likelihoods).mean())

    @property
    def influences(self) -> Tensor:
        """The influence of each sample on the loss, `[samples]`: `-(1/N) sum_i (p_is / mean_s p_is - 1)`. The
        influences sum to 0.
        """
        ratios = (self.log_likelihoods - log_mean_exp(self.log_likelihoods)).exp()
        return 1 - ratios.mean(1)

    @property
    def error(self) -> float:
        """The Monte Carlo standard error of the loss, by the delta method; NaN for a single sample.

        The error measures the effect of the random samples, but not of the random choice of examples.
        """
        return 0.0 if self.is_exact else standard_error(self.influences)

    @property
    def corrected(self) -> float:
        """The jackknife estimate `S loss - (S - 1) mean_s loss without s`, whose bias decreases like 1 / S^2.

        If few samples contribute most of the likelihood of an example, the estimate is noisier than the loss. The
        estimate is NaN for a single sample.

        References:
            Quenouille (1956), Notes on bias in estimation.
        """
        if self.is_exact:
            return self.loss
        samples = len(self.log_likelihoods)
        if samples < 2:
            return math.nan
        without = -_log_means_without(self.log_likelihoods).mean(1)
        return samples * self.loss - (samples - 1) * float(without.mean())

    @property
    def bias(self) -> float:
        """The jackknife estimate of the bias of the loss: `loss - corrected`."""
        return self.loss - self.corrected

    @property
    def gibbs(self) -> float:
        """The expected loss of one sample, in nats per example. `gibbs` is never below `loss`."""
        return -float(self.averages["log_likelihood"].mean())

    @property
    def probabilities(self) -> Tensor:
        """The class probabilities, averaged over samples, `[examples, classes]`."""
        return self._average("probabilities", "classes")

    @property
    def accuracy(self) -> float:
        """The share of examples whose most probable class is the target."""
        return float((self.probabilities.argmax(-1) == self.targets).double().mean())

    @property
    def entropy(self) -> "Entropy":
        """The entropies of the predicted class of each example."""
        return Entropy(
            predictive=torch.special.entr(self.probabilities).sum(-1), expected=self._average("entropy", "classes")
        )

    def calibration(self, bins: int = 15) -> Calibration:
        """Compare the probability of the most probable class with the accuracy, in bins of equal width.

        Raises:
            ValueError: The targets are not class labels, or there are no bins.
        """
        if bins < 1:
            raise ValueError(f"bins={bins}; at least one is needed")
        confidences, found = self.probabilities.double().max(-1)
        places = ((confidences * bins).ceil().long() - 1).clamp(0, bins - 1)
        counts = torch.bincount(places, minlength=bins)
        confidence = torch.bincount(places, confidences, minlength=bins) / counts
        accuracy = torch.bincount(places, (found == self.targets).double(), minlength=bins) / counts
        rows = zip(counts.tolist(), confidence.tolist(), accuracy.tolist(), strict=True)
        return Calibration(tuple(Bin(k / bins, (k + 1) / bins, *row) for k, row in enumerate(rows)))

    @property
    def mean(self) -> Tensor:
        """The predicted mean of the targets, `[examples, ...]`."""
        return self._average("mean", "numbers")

    @property
    def std(self) -> Tensor:
        """The predicted standard deviation of targets, `[examples, ...]`, which combines the noise and the differences
        between samples.
        """
        return (self._average("square", "numbers") - self.mean.square()).clamp(min=0).sqrt()

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics: "loss", "error" (of the loss), "gibbs", "corrected"; "accuracy" and "ece" for classes, or "rmse"."""
        found = {"loss": self.loss, "error": self.error, "gibbs": self.gibbs, "corrected": self.corrected}
        if "probabilities" in self.averages:
            found |= {"accuracy": self.accuracy, "ece": self.calibration().error}
        if "mean" in self.averages:
            found["rmse"] = float((self.mean - self.targets.double()).square().mean().sqrt())
        return found

    def _average(self, name: str, targets: str) -> Tensor:
        if name not in self.averages:
            raise ValueError(
                f"the likelihood is not for {targets} (its averages are {sorted(self.averages)}); predict with a "
                f"likelihood for {targets}"
            )
        return self.averages[name]

    def __str__(self) -> str:
        rest = {name: value for name, value in self.metrics.items() if name not in ("loss", "error")}
        return f"loss {self.loss:.4g} +- {self.error:.2g}, " + ", ".join(f"{k} {v:.4g}" for k, v in rest.items())


@dataclass(frozen=True, eq=False)
class Entropy:
    """Entropies of the predicted class, in nats, `[examples]`.

    Attributes:
        predictive: The entropy of the averaged probabilities, which measures the total uncertainty.
        expected: The average entropy of the samples, which is the uncertainty that remains if the parameters are known.

    References:
        Depeweg et al. (2018), Decomposition of Uncertainty in Bayesian Deep Learning, section 3.
    """

    predictive: Tensor
    expected: Tensor

    @property
    def mutual_information(self) -> Tensor:
        """The mutual information of class and parameters, `predictive - expected`, which is never negative."""
        return (self.predictive - self.expected).clamp(min=0)


def log_mean_exp(values: Tensor) -> Tensor:
    """Return `log mean exp` over the first axis, without overflow."""
    return torch.logsumexp(values, 0) - math.log(len(values))


def standard_error(influences: Tensor) -> float:
    """Return the standard error of a mean from the influence of each sample, or NaN for one sample."""
    count = len(influences)
    return float(influences.std() / count**0.5) if count > 1 else math.nan


def _log_means_without(values: Tensor) -> Tensor:
    """Return, for every sample, `log mean exp` over all other samples, without loss of precision by cancellation."""
    nothing = values.new_full((1, values.shape[1]), -math.inf)
    before = torch.cat([nothing, torch.logcumsumexp(values, 0)[:-1]])
    after = torch.cat([torch.logcumsumexp(values.flip(0), 0)[:-1].flip(0), nothing])
    return torch.logaddexp(before, after) - math.log(len(values) - 1)

"""The log posterior over the plane through three networks, likelihood and prior apart."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from regauge.bayes.posteriors.posterior import Posterior
from regauge.bayes.prediction.likelihoods import Likelihood
from regauge.bayes.prediction.predict import predict
from regauge.connect.plane import Plane, plane
from regauge.core.outputs import Outputs
from regauge.core.params import Params
from regauge.core.task import Batch


@dataclass(frozen=True, eq=False)
class PosteriorSlice:
    """Logarithms of likelihood and prior over a plane of networks, in nats.

    Attributes:
        plane: Its grids and its values at the three networks: "log_likelihood" and "log_prior", sums over all examples
            and parameters, their sum "log_posterior" (without the unknown constant), and "loss", the negative log
            likelihood per example. Axes are orthonormal; `plane.points` marks the three networks.
        examples: By their number totals are divided to compare them with losses.
    """

    plane: Plane
    examples: int

    def per_example(self, name: str) -> Tensor:
        """A total over the number of examples, `[rows, columns]`.

        Raises:
            KeyError: There is no such surface.
        """
        return self.plane.values[name] / (1 if name == "loss" else self.examples)


def posterior_slice(
    module: nn.Module,
    first: Posterior | Mapping[str, Tensor],
    second: Posterior | Mapping[str, Tensor],
    third: Posterior | Mapping[str, Tensor],
    batches: Iterable[Batch],
    *,
    prior_std: float,
    likelihood: Likelihood | None = None,
    outputs: Outputs = None,
    resolution: int = 21,
    margin: float = 0.2,
) -> PosteriorSlice:
    """The log posterior over the plane through the means of three posteriors, or through three networks.

    With `q_0`, `q_1` and `q_1.push(s, g)`, the second moved to the first, it shows how deep the valleys between them
    are. The prior alone is often *higher* between networks, whose norms are smaller there; that is why likelihood and
    prior are apart. For the plane through samples give one network of each, `{n: t[0] for n, t in q.at(noise).items()}`
    (with `push_noise` for the moved one, so that it is the same function).

    Args:
        module: The module that runs the parameters; its own are not used.
        first: The origin: a posterior, for its mean, or parameters.
        second: A network on the positive x axis.
        third: A network off the x axis.
        prior_std: Standard deviation of the prior of every parameter of the module; buffers have none.
        batches, likelihood, outputs: See `predict`.
        resolution, margin: See `regauge.connect.plane`.

    Raises:
        ValueError: The standard deviation of the prior is not positive, or as for `predict` and `regauge.plane`.

    References:
        Rossi et al. (2023), appendix D and figure A16 (means), figure 6 (samples).
    """
    if not 0 < prior_std < math.inf:
        raise ValueError(f"the prior has standard deviation {prior_std}; it must be positive and finite")
    data = list(batches)
    counted = {name: tensor.numel() for name, tensor in module.named_parameters()}
    count = sum(counted.values())
    found = 0

    def judge(params: Params) -> dict[str, float]:
        nonlocal found
        log_likelihoods = predict(module, params, data, likelihood=likelihood, outputs=outputs).log_likelihoods
        found = log_likelihoods.numel()
        total = float(log_likelihoods.sum())
        squares = sum(float(params[name].double().square().sum()) for name in counted)
        prior = -squares / (2 * prior_std**2) - count * (math.log(prior_std) + math.log(2 * math.pi) / 2)
        return {"log_likelihood": total, "log_prior": prior, "log_posterior": total + prior, "loss": -total / found}

    a, b, c = (q if isinstance(q, Mapping) else q.moments().mean for q in (first, second, third))
    buffers = [name for name, _ in module.named_buffers()]
    found_plane = plane(a, b, c, judge, resolution=resolution, margin=margin, buffers=buffers)
    return PosteriorSlice(found_plane, found)

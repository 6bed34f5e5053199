"""Predictions of a posterior's samples on data."""

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from regauge.bayes.posteriors.gaussian import GaussianPosterior, Noise, Posterior
from regauge.bayes.prediction.likelihoods import Categorical, Likelihood
from regauge.bayes.prediction.predictive import Predictive
from regauge.core.arguments import check_arguments
from regauge.core.outputs import Outputs, evaluating, output_tensors
from regauge.core.params import Params, require_finite
from regauge.core.task import Batch, call

TOGETHER = 2**21
"""Samples are evaluated together if their parameters and intermediate results have at most this number of entries.

Evaluating small networks together saves the overhead of each call. With more entries, evaluating networks together
saves no time on a CPU, and batched convolutions become several times slower than single convolutions."""


@check_arguments
def predict(
    posterior: Posterior | Mapping[str, Tensor],
    module: nn.Module,
    batches: Iterable[Batch],
    *,
    noise: Noise | None = None,
    samples: int | None = None,
    generator: torch.Generator | None = None,
    likelihood: Likelihood | None = None,
    outputs: Outputs = None,
    chunk: int | None = None,
) -> Predictive:
    """Return the predictive distribution on data: by Monte Carlo for a posterior, exactly for one network.

    All noise is held in memory, but only `chunk` samples of parameters are held at a time. Small samples are evaluated
    together (`torch.func.vmap`), unless the module's control flow depends on values. By default, samples are small if
    they have at most `TOGETHER` entries in their parameters and in the largest intermediate result. The size of the
    largest intermediate result is measured on the first sample. The number of samples that are evaluated together
    changes the result only by rounding.

    Args:
        posterior: Any posterior (for example an ensemble), or the parameters of one network.
        module: The module that is called with the parameters, in evaluation mode. The parameters in the module are not
            used.
        batches: Pairs (inputs, targets), as for `Task`. The batches are read once and held in memory. Integer targets
            may have any shape, and each integer is one example. Negative targets (such as -100) are ignored.
        noise: The noise of the samples. Differences between posteriors are far more precise with shared noise than with
            independent noise.
        samples: The number of samples, if `noise` is not given.
        generator: The random generator of the samples.
        likelihood: The likelihood of a target given the outputs; `Categorical()` by default.
        outputs: The output that is compared with the targets. Default: the first tensor.
        chunk: The number of samples that are evaluated together.

    Raises:
        ValueError: Noise and a number of samples are both given or both missing. Noise or a number of samples is given
            for a single network. The batches contain no examples. The error is also raised if parameters are NaN or
            Inf.

    References:
        Rossi et al. (2023), section 3, equation 5 and appendix C (128 samples).
    """
    likelihood = Categorical() if likelihood is None else likelihood
    data = list(batches)
    is_network = isinstance(posterior, Mapping)
    if is_network != (noise is None and samples is None) or (noise is not None and samples is not None):
        raise ValueError(
            "give `noise`, or `samples` and `generator` to draw it; give none of them for the parameters of one "
            f"network (noise {'is' if noise is None else 'is not'} None, samples is {samples})"
        )
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk={chunk}, but must be at least 1")
    if isinstance(posterior, Mapping):
        # One network is a posterior that is certain, with a single sample.
        posterior, noise = GaussianPosterior(dict(posterior), {}), {"": torch.zeros(1)}
    elif noise is None:
        noise = draw_noise(posterior, samples, generator)
    assert noise is not None
    count = len(next(iter(noise.values())))
    rows: list[Tensor] = []
    totals: Params = {}
    targets: list[Tensor] = []
    done, together = 0, chunk or 1
    with torch.no_grad(), evaluating(module):
        while done < count:
            params = posterior.at({name: tensor[done : done + together] for name, tensor in noise.items()})
            if not done:
                require_finite(params, "the network" if is_network else "the first sample")
            largest = _Largest()
            with nullcontext() if done or chunk else largest:
                found = [_judge(module, params, batch, likelihood, outputs) for batch in data]
            if not sum(len(target) for _, _, target in found):
                raise ValueError("there are no examples to predict; give batches of inputs and targets")
            rows.append(torch.cat([log_likelihoods for log_likelihoods, _, _ in found], 1))
            for name in found[0][1]:
                total = torch.cat([sums[name] for _, sums, _ in found])
                totals[name] = totals[name] + total if name in totals else total
            targets = [target for _, _, target in found]
            done += together
            if not (chunk or largest.values == 0):
                together = max(1, TOGETHER // (sum(t.numel() for t in params.values()) + largest.values))
    log_likelihoods = torch.cat(rows)
    averages = {name: total / count for name, total in totals.items()}
    averages["log_likelihood"] = log_likelihoods.mean(0)
    return Predictive(log_likelihoods, torch.cat(targets), averages, is_exact=is_network)


def draw_noise(posterior: Posterior, samples: int | None, generator: torch.Generator | None) -> Noise:
    """Sample noise; raise a ValueError if the number of samples or the generator is missing."""
    if samples is None or samples < 1 or generator is None:
        raise ValueError(
            f"samples={samples} and generator={generator}; to draw samples, give a positive number of them and a "
            "torch.Generator"
        )
    return posterior.draw(samples, generator)


def _judge(
    module: nn.Module, params: Params, batch: Batch, likelihood: Likelihood, outputs: Outputs
) -> tuple[Tensor, Params, Tensor]:
    """Return log likelihoods `[samples, examples]`, statistics summed over samples `[examples, ...]`, and targets."""
    inputs, targets = batch

    def run(one: Params) -> Tensor:
        return output_tensors(call(module, one, inputs), outputs)[0]

    if len(next(iter(params.values()))) == 1:
        results = run({name: tensor[0] for name, tensor in params.items()}).unsqueeze(0)
    else:
        results = torch.func.vmap(run)(params)
    targets = torch.as_tensor(targets, device=results.device)
    if not targets.is_floating_point() and (targets.ndim > 1 or bool((targets < 0).any())):
        counted = targets >= 0
        results, targets = results[:, counted], targets[counted]
    statistics = likelihood.statistics(results, targets)
    sums = {name: tensor.sum(0) for name, tensor in statistics.items()}
    return likelihood.log_likelihood(results, targets), sums, targets


class _Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that measures the number of entries in an operator's largest result."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.values = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.values = max(self.values, result.numel())
        return result

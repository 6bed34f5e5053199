"""Mean-field variational inference: the diagonal Gaussian that comes closest to the posterior of a network."""

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from regauge.bayes.posteriors.gaussian import GaussianPosterior
from regauge.bayes.prediction.likelihoods import Categorical, Likelihood
from regauge.core.params import Params, require_finite
from regauge.core.progress import Progress, no_progress


@dataclass(frozen=True)
class Variational:
    """How a diagonal Gaussian is fitted to the posterior of a network.

    The target is the tempered posterior (likelihood x prior)^(1/T) with the prior N(0, prior_std^2) on every uncertain
    parameter. Minimized is the negative evidence lower bound per example, in nats,

        -(1/N) ( E_q[log likelihood + log prior] + T entropy(q) ),

    with the likelihood estimated by samples of the weights on a batch, and the rest in closed form. Weighting the
    Kullback-Leibler divergence from the prior instead, likelihood - T KL(q, prior), is the same with the prior's
    standard deviation divided by sqrt(T).

    Learning rates belong to this bound per example. One for the bound summed over N examples becomes N times as large:
    the 1e-6 of Rossi et al. (2023), table 1, is 0.06 for 60,000 examples and makes no sense otherwise. It is small: the
    divergence moves the logarithm of a standard deviation by at most 1e-5 in a step (with momentum 0.9), so that
    standard deviations stay near their start unless there are 10^5 steps and more. `Variational(optimizer="sgd",
    lr=0.06, lr_std=0.06)` trains in this way; the defaults let them arrive at their optimum in a few thousand steps.

    Attributes:
        epochs: Passes over the data.
        batch: Examples per step.
        prior_std: Standard deviation of the prior.
        temperature: T; below 1 the posterior is cold.
        initial_std: Standard deviation of every uncertain parameter at the start.
        optimizer: Adam, or stochastic gradient descent with momentum.
        momentum: Of either optimizer.
        lr: Largest learning rate of the means.
        lr_std: Largest learning rate of the logarithms of the standard deviations. Adam needs about ten times that of
            the means, since all of its steps are about as large as the learning rate.
        schedule: Whether the learning rates fall to zero along half a cosine, or stay.
        samples: Samples of the weights per step.

    References:
        Rossi et al. (2023), section 2, equation 3, appendices C and E; Blundell et al. (2015), section 3.
    """

    epochs: int = 30
    batch: int = 500
    prior_std: float = 0.1
    temperature: float = 1.0
    initial_std: float = 0.01
    optimizer: Literal["adam", "sgd"] = "adam"
    momentum: float = 0.9
    lr: float = 1e-3
    lr_std: float = 1e-2
    schedule: Literal["cosine", "constant"] = "cosine"
    samples: int = 1

    def __post_init__(self) -> None:
        positive = (self.prior_std, self.temperature, self.initial_std, self.lr, self.lr_std)
        if min(self.epochs, self.batch, self.samples) < 1 or not all(0 < value < math.inf for value in positive):
            raise ValueError(
                f"{self} cannot train: epochs, batch and samples must be at least 1, standard deviations, temperature "
                "and learning rates positive"
            )
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum is {self.momentum}; give a number from 0 to below 1")
        if self.optimizer not in ("adam", "sgd") or self.schedule not in ("cosine", "constant"):
            raise ValueError(
                f"optimizer {self.optimizer!r} and schedule {self.schedule!r}: the optimizers are 'adam' and 'sgd', "
                "the schedules 'cosine' and 'constant'"
            )

    def steps(self, examples: int) -> int:
        """Number of steps; a smaller last batch counts."""
        return self.epochs * -(-examples // self.batch)


def fit(
    module: nn.Module,
    start: Mapping[str, Tensor],
    inputs: Tensor,
    targets: Tensor,
    config: Variational,
    *,
    generator: torch.Generator,
    likelihood: Likelihood | None = None,
    certain: Collection[str] = (),
    progress: Progress = no_progress,
) -> GaussianPosterior:
    """Fit a diagonal Gaussian over the parameters of a network.

    Gradients are those of sampled weights (the reparametrization theta = mean + std * noise), so that any module can
    be trained. It runs in training mode, and its buffers end up in the mean.

    Args:
        module: How to run the parameters; its own are not used.
        start: Means at the start.
        inputs: `[n, ...]`.
        targets: `[n, ...]`, as the likelihood reads them.
        config: Prior, temperature, and how to train.
        generator: Draws the order of the examples and the samples.
        likelihood: Of a target, given the outputs; of classes, given logits, unless given.
        certain: Names of parameters that are trained as points, without a prior.
        progress: Shows the steps, with the mean negative log likelihood of each batch under the weights drawn.

    Returns:
        Means and standard deviations. A tensor that the module has under several names comes under the first.

    Raises:
        ValueError: Nothing is uncertain, `certain` has names that are no parameters, the parameters have several
            dtypes or devices, inputs and targets are not as many, or training diverges.
    """
    if not len(inputs) == len(targets) > 0:
        raise ValueError(f"{len(inputs)} inputs and {len(targets)} targets: give one target for every input")
    criterion = Categorical() if likelihood is None else likelihood
    names, buffers = _split_names(module, start, certain)
    layout = _Layout.of({name: start[name] for name in names}, len(names) - len(set(certain)))
    mean = torch.cat([start[name].detach().reshape(-1) for name in names])
    log_std = mean.new_full((layout.uncertain,), math.log(config.initial_std))
    pull = 1 / (config.prior_std**2 * len(targets))
    entropy_pull = config.temperature / len(targets)
    optimizer = _optimizer(config, mean, log_std)
    total = config.steps(len(targets))

    # Vectors as long as the network are written to again and again: making new ones takes longer.
    mean.grad, log_std.grad = torch.zeros_like(mean), torch.zeros_like(log_std)
    theta, slope, std = torch.empty_like(mean), torch.empty_like(mean), torch.empty_like(log_std)
    noise = torch.empty(len(std), dtype=std.dtype, device=generator.device)

    def gradient(index: Tensor) -> float:
        params = layout.views(theta.detach())
        leaves = [tensor.requires_grad_() for tensor in params.values()]
        outputs = torch.func.functional_call(module, {**params, **buffers}, (inputs[index],))
        loss = -criterion.log_likelihood(outputs, targets[index]).mean()
        grads = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
        torch.cat([grad.reshape(-1) for grad in grads], out=slope)
        return loss.item()

    step, advance = 0, progress("fitting", total)
    with _training(module):
        for _ in range(config.epochs):
            order = torch.randperm(len(targets), generator=generator, device=generator.device).to(inputs.device)
            for index in torch.split(order, config.batch):
                torch.exp(log_std, out=std)
                mean.grad.zero_()
                log_std.grad.zero_()
                loss = 0.0
                for _ in range(config.samples):
                    deviation = noise.normal_(generator=generator).to(std.device)
                    theta.copy_(mean)[: layout.uncertain].addcmul_(std, deviation)
                    loss += gradient(index) / config.samples
                    mean.grad.add_(slope, alpha=1 / config.samples)
                    log_std.grad.addcmul_(slope[: layout.uncertain], deviation, value=1 / config.samples)
                if not math.isfinite(loss):
                    raise ValueError(
                        f"training diverged: in step {step + 1} of {total} the loss is {loss}; lower lr ({config.lr}) "
                        f"and lr_std ({config.lr_std}), or start with smaller standard deviations "
                        f"({config.initial_std})"
                    )
                # Closed form: -log prior gives pull (mean^2 + std^2) / 2, the entropy -entropy_pull log std.
                mean.grad[: layout.uncertain].add_(mean[: layout.uncertain], alpha=pull)
                log_std.grad.add_(std, alpha=pull).mul_(std).sub_(entropy_pull)
                factor = (1 + math.cos(math.pi * step / total)) / 2 if config.schedule == "cosine" else 1.0
                for group, lr in zip(optimizer.param_groups, (config.lr, config.lr_std), strict=True):
                    group["lr"] = lr * factor
                optimizer.step()
                step += 1
                advance(loss=loss)
    means, stds = layout.views(mean), layout.views(log_std.exp())
    fitted = {name: means[name] if name in means else buffers[name] for name in start if name in {**means, **buffers}}
    for part, label in ((fitted, "the fitted means"), (stds, "the fitted standard deviations")):
        require_finite(part, label)
    return GaussianPosterior(fitted, {name: stds[name] for name in fitted if name in stds})


@contextmanager
def _training(module: nn.Module) -> Iterator[None]:
    """Training mode for a while."""
    was_training = module.training
    module.train()
    try:
        yield
    finally:
        module.train(was_training)


@dataclass(frozen=True)
class _Layout:
    """Where each parameter lies in one flat vector; the uncertain ones come first."""

    shapes: Mapping[str, torch.Size]
    uncertain: int

    @classmethod
    def of(cls, params: Mapping[str, Tensor], count: int) -> "_Layout":
        kinds = {(tensor.dtype, tensor.device) for tensor in params.values()}
        if len(kinds) > 1:
            raise ValueError(f"the parameters have several dtypes or devices, {sorted(map(str, kinds))}; convert them")
        sizes = [tensor.numel() for tensor in params.values()]
        return cls({name: tensor.shape for name, tensor in params.items()}, sum(sizes[:count]))

    def views(self, flat: Tensor) -> Params:
        """The parameters that the vector reaches, without copies."""
        found, begin = {}, 0
        for name, shape in self.shapes.items():
            end = begin + shape.numel()
            if end > len(flat):
                break
            found[name] = flat[begin:end].view(shape)
            begin = end
        return found


def _split_names(
    module: nn.Module, start: Mapping[str, Tensor], certain: Collection[str]
) -> tuple[list[str], dict[str, Tensor]]:
    """Names of the parameters, uncertain ones first, and copies of the buffers."""
    parameters = [name for name, _ in module.named_parameters()]
    everywhere = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    wrong = sorted(set(certain) - set(parameters))
    if wrong:
        raise ValueError(f"{wrong[:4]} are to be certain but are no parameters; the parameters are {parameters[:8]}")
    missing = [name for name in parameters if name not in start]
    if missing:
        raise ValueError(f"the start lacks {missing[:4]}; give all parameters and buffers of the module")
    uncertain = [name for name in parameters if name not in certain]
    if not uncertain:
        raise ValueError(
            "all parameters are to be certain, so that nothing is left to fit; leave some out of `certain`"
        )
    buffers = {name: tensor.clone() for name, tensor in start.items() if name not in everywhere}
    return [*uncertain, *(name for name in parameters if name in certain)], buffers


def _optimizer(config: Variational, mean: Tensor, log_std: Tensor) -> torch.optim.Optimizer:
    groups = [{"params": [mean], "lr": config.lr}, {"params": [log_std], "lr": config.lr_std}]
    if config.optimizer == "adam":
        return torch.optim.Adam(groups, betas=(config.momentum, 0.999), fused=True)
    return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, fused=True)

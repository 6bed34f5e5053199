"""Mean-field variational inference, which fits a diagonal Gaussian to the posterior of a network."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from regauge.bayes.posteriors.gaussian import GaussianPosterior
from regauge.bayes.prediction.likelihoods import Categorical, Likelihood
from regauge.checkpoints.state_file import StateFile
from regauge.core.arguments import check_arguments
from regauge.core.given import given_or_seed
from regauge.core.params import Params, require_finite
from regauge.core.progress import Progress, no_progress
from regauge.nets.augmentation import Augmentation
from regauge.training import Adam, Cosine, DescentConfig, Optimizer, Schedule, minimize
from regauge.training.descent import OnStep, shuffle, training_mode


@dataclass(frozen=True, kw_only=True)
class VariationalConfig(DescentConfig):
    """Settings for fitting a diagonal Gaussian to the posterior of a network.

    The target is the tempered posterior (likelihood x prior)^(1/T) with the prior N(0, prior_std^2) on every uncertain
    parameter. The fit minimizes the negative evidence lower bound per example, in nats,

        -(1/N) ( E_q[log likelihood + log prior] + T entropy(q) ),

    The likelihood is estimated on batches, with samples of the weights. The prior and the entropy have closed forms.
    Some papers weight the Kullback-Leibler divergence instead: likelihood - T KL(q, prior). The bound of `fit` and this
    bound are equivalent if the standard deviation of the prior is divided by sqrt(T).

    Learning rates refer to the bound per example. A learning rate for the bound summed over N examples must therefore
    be multiplied by N. The rate 1e-6 in table 1 of Rossi et al. (2023) therefore becomes 0.06 for 60,000 examples. The
    published rate is small: the divergence changes the logarithm of a standard deviation by at most 1e-5 per step (with
    momentum 0.9). Standard deviations stay close to their initial values unless there are at least 10^5 steps.
    `VariationalConfig(optimizer=SGD(0.06, momentum=0.9), lr_std=0.06)` trains with the published rate. With the
    defaults, standard deviations reach their optimum in a few thousand steps.

    Attributes:
        prior_std: Standard deviation of the prior.
        temperature: The temperature T. A posterior with T below 1 is called cold.
        initial_std: Standard deviation of every uncertain parameter at the start.
        lr_std: Largest learning rate of the logarithms of the standard deviations. The learning rate of the optimizer
            is for the means. With Adam, `lr_std` should be about ten times larger, because every step of Adam is about
            as large as its learning rate.
        samples: Samples of the weights per step.

    References:
        Rossi et al. (2023), section 2, equation 3, appendices C and E; Blundell et al. (2015), section 3.
    """

    epochs: float | None = 30
    batch: int | None = 500
    optimizer: Optimizer = field(default_factory=lambda: Adam(lr=1e-3))
    schedule: Schedule = field(default_factory=Cosine)
    prior_std: float = 0.1
    temperature: float = 1.0
    initial_std: float = 0.01
    lr_std: float = 1e-2
    samples: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        positive = (self.prior_std, self.temperature, self.initial_std, self.lr_std)
        if self.samples < 1 or not all(0 < value < math.inf for value in positive):
            raise ValueError(
                f"{self} cannot train: samples must be at least 1, standard deviations, temperature and lr_std positive"
            )


@check_arguments
def fit(
    start: Mapping[str, Tensor],
    module: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    config: VariationalConfig,
    *,
    generator: torch.Generator | None = None,
    likelihood: Likelihood | None = None,
    certain: Collection[str] = (),
    augmentation: Augmentation | None = None,
    state: Path | None = None,
    progress: Progress = no_progress,
    on_step: OnStep | None = None,
) -> GaussianPosterior:
    """Fit a diagonal Gaussian to the posterior over a network's parameters.

    Gradients are computed at sampled weights (the reparametrization theta = mean + std * noise), so any module can be
    trained. The module is in training mode, and its final buffers become part of the mean.

    Args:
        start: The initial means.
        module: The module that is called with the means and sampled weights as its parameters. The parameters in the
            module are not used.
        inputs: The training inputs, `[n, ...]`.
        targets: The targets, `[n, ...]`, in the form that the likelihood requires.
        config: The prior, the temperature, and the settings of training.
        generator: The random generator for the order of examples, samples and augmentation. Default: a generator with
            seed 0.
        likelihood: The likelihood of a target given the outputs; `Categorical()` by default.
        certain: Names of parameters that have no uncertainty and no prior, and are only optimized.
        augmentation: Random changes of the images in every batch; none by default. Each changed image counts as one
            example in the bound.
        state: A `.safetensors` file in which the state of a long fit is saved. If the file exists, the fit continues
            from the state in it. The result is bitwise identical to the result of an uninterrupted fit.
        progress: Displays the steps, with the mean negative log likelihood of each batch under the sampled weights.
        on_step: A function that is called after each step with a `regauge.training.State`: the number of the step, the
            loss that `progress` displays, and the learning rate.

    Returns:
        The fitted means and standard deviations. If the module has a tensor under several names, the result contains
        this tensor under the first name.

    Raises:
        ValueError: No parameter is uncertain, `certain` contains a name that is not a parameter, or the parameters have
            several dtypes or devices. The numbers of inputs and targets differ. The training diverges. The error is
            also raised if the file does not contain a state of this fit.
    """
    generator = given_or_seed(generator)
    if not len(inputs) == len(targets) > 0:
        raise ValueError(f"{len(inputs)} inputs and {len(targets)} targets: give one target for every input")
    criterion = Categorical() if likelihood is None else likelihood
    shapes = {name: start[name].shape for name in _order(module, start, certain)}
    uncertain = {name: shape for name, shape in shapes.items() if name not in certain}
    count = sum(shape.numel() for shape in uncertain.values())
    learned = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    buffers = {name: tensor.clone() for name, tensor in start.items() if name not in learned}
    mean = torch.cat([start[name].detach().reshape(-1) for name in shapes])
    log_std = mean.new_full((count,), math.log(config.initial_std))
    pull = 1 / (config.prior_std**2 * len(targets))
    entropy_pull = config.temperature / len(targets)

    # Vectors as long as the network are reused, because allocating new ones takes longer.
    mean_slope, std_slope = torch.empty_like(mean), torch.empty_like(log_std)
    theta, slope, std = torch.empty_like(mean), torch.empty_like(mean), torch.empty_like(log_std)
    noise = torch.empty(len(std), dtype=std.dtype, device=generator.device)

    def sample(index: Tensor) -> Tensor:
        """Return the loss at the weights `theta`, and write its gradient to `slope`."""
        params = _cut(theta.detach(), shapes)
        leaves = [tensor.requires_grad_() for tensor in params.values()]
        seen = inputs[index] if augmentation is None else augmentation(inputs[index], generator)
        outputs = torch.func.functional_call(module, {**params, **buffers}, (seen,))
        loss = -criterion.log_likelihood(outputs, targets[index]).mean()
        grads = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
        torch.cat([grad.reshape(-1) for grad in grads], out=slope)
        return loss.detach()

    def gradient(params: Params, index: Tensor) -> tuple[Tensor, list[Tensor]]:
        mean, log_std = params["mean"], params["log_std"]
        torch.exp(log_std, out=std)
        mean_slope.zero_()
        std_slope.zero_()
        loss = mean.new_zeros(())
        for _ in range(config.samples):
            deviation = noise.normal_(generator=generator).to(std.device)
            theta.copy_(mean)[:count].addcmul_(std, deviation)
            loss += sample(index.to(inputs.device)) / config.samples
            mean_slope.add_(slope, alpha=1 / config.samples)
            std_slope.addcmul_(slope[:count], deviation, value=1 / config.samples)
        # Closed form: -log prior gives pull (mean^2 + std^2) / 2, the entropy -entropy_pull log std. The derivative by
        # log std is std times that by std.
        mean_slope[:count].add_(mean[:count], alpha=pull)
        std_slope.add_(std, alpha=pull).mul_(std).sub_(entropy_pull)
        return loss, [mean_slope, std_slope]

    with training_mode(module):
        found = minimize(
            gradient,
            {"mean": mean, "log_std": log_std},
            shuffle(len(targets), config.batch, generator),
            config,
            examples=len(targets),
            lrs={"log_std": config.lr_std},
            state_file=None if state is None else StateFile(state, generator=generator, buffers=buffers),
            progress=progress,
            label="fitting",
            on_step=on_step,
        )
    mean, log_std = found.params["mean"], found.params["log_std"]
    means, stds = _cut(mean, shapes), _cut(log_std.exp(), uncertain)
    fitted = {name: means[name] if name in means else buffers[name] for name in start if name in {**means, **buffers}}
    for part, label in ((fitted, "the fitted means"), (stds, "the fitted standard deviations")):
        require_finite(part, label)
    return GaussianPosterior(fitted, {name: stds[name] for name in fitted if name in stds})


def _cut(flat: Tensor, shapes: Mapping[str, torch.Size]) -> Params:
    """Return the tensors that are concatenated in a vector, as views."""
    pieces = torch.split(flat, [shape.numel() for shape in shapes.values()])
    return {name: piece.view(shape) for (name, shape), piece in zip(shapes.items(), pieces, strict=True)}


def _order(module: nn.Module, start: Mapping[str, Tensor], certain: Collection[str]) -> list[str]:
    """Return the validated names of the parameters, uncertain parameters first."""
    names = [name for name, _ in module.named_parameters()]
    wrong = sorted(set(certain) - set(names))
    if wrong:
        raise ValueError(
            f"`certain` names {wrong[:4]}, which are not parameters; the parameters are {names[:8]}; name some of these"
        )
    missing = [name for name in names if name not in start]
    if missing:
        raise ValueError(f"the start lacks {missing[:4]}; give all parameters and buffers of the module")
    if len(set(certain)) == len(names):
        raise ValueError("`certain` names all parameters, so none remains to be fitted; leave some out")
    kinds = {(start[name].dtype, start[name].device) for name in names}
    if len(kinds) > 1:
        raise ValueError(f"the parameters have several dtypes or devices, {sorted(map(str, kinds))}; convert them")
    return sorted(names, key=lambda name: name in certain)

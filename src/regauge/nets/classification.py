"""Initialization and training of classifiers, and batches of their examples."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from regauge.checkpoints.state_file import StateFile
from regauge.core.given import given_or_seed
from regauge.core.params import Params
from regauge.core.progress import Progress, no_progress
from regauge.core.task import cross_entropy
from regauge.nets.augmentation import Augmentation
from regauge.nets.norm import ChannelLayerNorm, FilterResponseNorm
from regauge.training.descent import OnStep, differentiate, minimize, shuffle, training_mode
from regauge.training.optimizers import AdamW, Optimizer
from regauge.training.schedules import OneCycle, Schedule
from regauge.training.training_configs import DescentConfig

_NORMS = (_BatchNorm, nn.LayerNorm, nn.GroupNorm, ChannelLayerNorm, FilterResponseNorm)


@dataclass(frozen=True, kw_only=True)
class ClassifierConfig(DescentConfig):
    """Settings for training a classifier: AdamW with a one-cycle learning rate, in epochs over shuffled data."""

    epochs: float | None = 5
    batch: int | None = 256
    optimizer: Optimizer = field(default_factory=lambda: AdamW(lr=2e-3))
    schedule: Schedule = field(default_factory=lambda: OneCycle(momentum=(0.85, 0.95)))


def initialize(module: nn.Module, generator: torch.Generator | None = None) -> Params:
    """Sample the parameters of linear and convolutional layers as torch does, but with the given generator.

    Weights and biases are uniformly random with bound 1/sqrt(fan in). Normalization layers keep their default
    initialization: weights and running variances are one, and all other tensors are zero.

    Returns:
        New parameters. The parameters of the given module are not changed.

    Raises:
        ValueError: The module has parameters outside of linear, convolutional and normalization layers.
    """
    generator = given_or_seed(generator)
    params = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    drawn: Params = {}
    for prefix, layer in module.named_modules():
        is_linear = isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d)
        is_known = is_linear or isinstance(layer, _NORMS)
        tensors = chain(layer.named_parameters(recurse=False), layer.named_buffers(recurse=False))
        for own, tensor in tensors if is_known else ():
            name = f"{prefix}.{own}".removeprefix(".")
            if is_linear:
                bound = layer.weight[0].numel() ** -0.5
                drawn[name] = params[name].uniform_(-bound, bound, generator=generator)
            else:
                drawn[name] = torch.full_like(tensor, own in ("weight", "running_var"))
    others = [name for name, _ in module.named_parameters() if name not in drawn]
    if others:
        raise ValueError(
            "only linear and convolutional layers, and batch, layer, group and filter response normalization can be "
            f"initialized, but the module has {others[:4]}"
        )
    return params | drawn


def train(
    module: nn.Module,
    params: Mapping[str, Tensor],
    inputs: Tensor,
    labels: Tensor,
    training: ClassifierConfig,
    *,
    generator: torch.Generator | None = None,
    augmentation: Augmentation | None = None,
    state: Path | None = None,
    progress: Progress = no_progress,
    on_step: OnStep | None = None,
) -> Params:
    """Train a classifier by minimizing the cross entropy.

    Args:
        module: The module that is called with the parameters; the parameters in the module are not used.
        params: The initial parameters and buffers.
        inputs: The training inputs, `[n, ...]`.
        labels: Class indices, `[n]`. For sequences, there is one label for each output, `[n, ...]`.
        training: The settings: epochs, batch size, optimizer and schedule.
        generator: The random generator for the order and the augmentation of examples. Default: a generator with seed
            0.
        augmentation: Random changes of the images in every batch; by default, images stay unchanged.
        state: A `.safetensors` file in which the state of long training is saved. If the file exists, training
            continues from the saved state. The trained parameters are bitwise identical to the parameters after
            uninterrupted training.
        progress: A function that displays the steps, with the loss of each batch in nats.
        on_step: A function that is called after each step with a `regauge.training.State`: the number of the step, the
            loss and the learning rate.

    Returns:
        The trained parameters.

    Raises:
        ValueError: The loss becomes NaN or Inf, or the file does not contain a state of this training.
    """
    generator = given_or_seed(generator)
    learned = {name: params[name] for name, _ in module.named_parameters()}
    buffers = {name: tensor.clone() for name, tensor in params.items() if name not in learned}

    def loss(learned: Params, index: Tensor) -> Tensor:
        seen = inputs[index] if augmentation is None else augmentation(inputs[index], generator)
        outputs = torch.func.functional_call(module, {**learned, **buffers}, (seen,))
        return cross_entropy(outputs, labels[index])

    with training_mode(module):
        found = minimize(
            differentiate(loss),
            learned,
            shuffle(len(labels), training.batch, generator),
            training,
            examples=len(labels),
            state_file=None if state is None else StateFile(state, generator=generator, buffers=buffers),
            progress=progress,
            on_step=on_step,
        )
    trained = {**found.params, **buffers}
    return {name: trained[name] for name in params}


def split_batches(inputs: Tensor, labels: Tensor, size: int = 250) -> list[tuple[Tensor, Tensor]]:
    """Split examples into batches for a `Task`. The last batch may be smaller."""
    return list(zip(torch.split(inputs, size), torch.split(labels, size), strict=True))

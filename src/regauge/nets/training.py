"""Train a classifier: what the demo, the examples, the experiments and the tests need of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from regauge.core.params import Params
from regauge.core.progress import Progress, no_progress
from regauge.core.task import cross_entropy
from regauge.nets.norm import ChannelLayerNorm, FilterResponseNorm

_NORMS = (_BatchNorm, nn.LayerNorm, nn.GroupNorm, ChannelLayerNorm, FilterResponseNorm)


@dataclass(frozen=True)
class Training:
    """How a classifier is trained: Adam, in epochs over shuffled data.

    Attributes:
        epochs: Passes over the data.
        batch: Examples per step.
        lr: Largest learning rate.
        weight_decay: Decoupled from the gradient (AdamW); plain Adam without it.
        schedule: Whether the learning rate rises and falls once over the whole training, or stays.
    """

    epochs: int = 5
    batch: int = 256
    lr: float = 2e-3
    weight_decay: float = 1e-2
    schedule: Literal["cycle", "constant"] = "cycle"

    def __post_init__(self) -> None:
        if min(self.epochs, self.batch) < 1 or self.lr <= 0 or self.weight_decay < 0:
            raise ValueError(
                f"{self} cannot train: epochs and batch must be at least 1, lr positive and weight_decay not negative"
            )

    def steps(self, examples: int) -> int:
        """Number of steps; a smaller last batch counts."""
        return self.epochs * -(-examples // self.batch)


def initialize(module: nn.Module, generator: torch.Generator) -> Params:
    """Draw linear and convolutional layers anew, as torch does but from `generator`.

    Weights and biases are uniform with bound 1/sqrt(fan in). Normalizations start as they are made: weights and running
    variances one, everything else zero.

    Returns:
        New parameters; the module keeps its own.

    Raises:
        ValueError: The module has parameters outside such layers.
    """
    params = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    drawn = set()
    for prefix, layer in module.named_modules():
        if isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
            bound = layer.weight[0].numel() ** -0.5
            for field, _ in layer.named_parameters(recurse=False):
                name = f"{prefix}.{field}".removeprefix(".")
                params[name].uniform_(-bound, bound, generator=generator)
                drawn.add(name)
        elif isinstance(layer, _NORMS):
            for field, tensor in layer.state_dict().items():
                name = f"{prefix}.{field}".removeprefix(".")
                params[name] = torch.full_like(tensor, field in ("weight", "running_var"))
                drawn.add(name)
    others = [name for name, _ in module.named_parameters() if name not in drawn]
    if others:
        raise ValueError(
            "only linear and convolutional layers, and batch, layer, group and filter response normalization can be "
            f"drawn, but the module has {others[:4]}"
        )
    return params


def train(
    module: nn.Module,
    params: Mapping[str, Tensor],
    inputs: Tensor,
    labels: Tensor,
    training: Training,
    *,
    generator: torch.Generator,
    progress: Progress = no_progress,
) -> Params:
    """Minimize the cross entropy.

    Args:
        module: How to run the parameters; its own are not used.
        params: Where to start.
        inputs: `[n, ...]`.
        labels: Classes, `[n]`; of sequences `[n, ...]`, as many as the outputs have.
        training: Epochs, batch size, learning rate.
        generator: Draws the order of the examples.
        progress: Shows the steps, with the loss of each batch in nats.

    Returns:
        Trained parameters.
    """
    learned = {name: params[name].detach().clone().requires_grad_() for name, _ in module.named_parameters()}
    buffers = {name: tensor.clone() for name, tensor in params.items() if name not in learned}
    optimizer = torch.optim.AdamW(learned.values(), lr=training.lr, weight_decay=training.weight_decay)
    total = training.steps(len(labels))
    schedule: torch.optim.lr_scheduler.LRScheduler
    if training.schedule == "cycle":
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=training.lr, total_steps=total)
    else:
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1, total_iters=0)
    was_training, advance = module.training, progress("training", total)
    module.train()
    for _ in range(training.epochs):
        for index in torch.split(torch.randperm(len(labels), generator=generator), training.batch):
            outputs = torch.func.functional_call(module, {**learned, **buffers}, (inputs[index],))
            loss = cross_entropy(outputs, labels[index])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            advance(loss=loss.item())
    module.train(was_training)
    return {name: {**learned, **buffers}[name].detach() for name in params}


def split_batches(inputs: Tensor, labels: Tensor, size: int = 250) -> list[tuple[Tensor, Tensor]]:
    """Examples in batches, as a `Task` takes them; the last one may be smaller."""
    return list(zip(torch.split(inputs, size), torch.split(labels, size), strict=True))

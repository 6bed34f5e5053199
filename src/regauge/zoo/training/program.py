"""What a back end is: a program that trains the networks of a stack, and how it is chosen."""

from collections.abc import Mapping
from typing import Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from regauge.core.params import Params

Backend = Literal["stacked", "compiled", "loop"]
"""One program for all networks of a stack; the same, compiled; or one network after the other."""

PIECE_BYTES = 4 * 2**20
"""Of the largest hidden tensor of a piece of a batch, where a batch may be read in pieces."""


class Program(Protocol):
    """The networks of a stack while they are trained."""

    def step(self, inputs: Tensor, targets: Tensor, factor: float) -> Tensor:
        """One step of all networks.

        Args:
            inputs: A batch for each group of consecutive networks, `[groups, examples, ...]`.
            targets: Classes `[groups, examples]`, or values `[groups or networks, examples, out]`.
            factor: What all learning rates are multiplied with.

        Returns:
            The losses before the step, `[networks]`.
        """

    def outputs(self, inputs: Tensor) -> Tensor:
        """What every network says, in evaluation mode, of a batch that all read, `[networks, examples, out]`."""

    def params(self) -> Params:
        """Parameters and buffers now, `[networks, ...]`, as new tensors."""

    def keep(self, index: Tensor) -> None:
        """Go on with the networks at `index` alone."""


def mean_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """The loss of one network: cross entropy in nats for classes, mean squared error for values."""
    if targets.is_floating_point():
        return functional.mse_loss(outputs, targets)
    return functional.cross_entropy(outputs, targets)


def learned_and_buffers(module: nn.Module, params: Mapping[str, Tensor]) -> tuple[Params, Params]:
    """What is trained, and the rest: buffers, and parameters without `requires_grad`.

    Raises:
        ValueError: The module ties parameters, or draws random numbers while it is trained.
    """
    names = [name for name, _ in module.named_parameters()]
    tied = sorted({name for name, _ in module.named_parameters(remove_duplicate=False)} - set(names))
    if tied:
        raise ValueError(f"{tied[:3]} are names of tensors with other names too; untie them to train a population")
    dropping = [
        name for name, part in module.named_modules() if isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0
    ]
    if dropping:
        raise ValueError(
            f"{dropping[:3]} drop at random from torch's global generator, so that a network would depend on its "
            "neighbors; set their p to 0"
        )
    learned = {name: params[name] for name in learned_names(module)}
    return learned, {name: tensor for name, tensor in params.items() if name not in learned}


def learned_names(module: nn.Module) -> list[str]:
    """Names of the parameters that are trained."""
    return [name for name, tensor in module.named_parameters() if tensor.requires_grad]


def is_convolutional(module: nn.Module) -> bool:
    """Whether stacking would turn convolutions into grouped ones."""
    return any(isinstance(part, nn.modules.conv._ConvNd) for part in module.modules())


def is_recurrent(module: nn.Module) -> bool:
    """Whether there are layers that `torch.func.vmap` does not know."""
    return any(isinstance(part, nn.RNNBase) for part in module.modules())


def channels_last(tensor: Tensor) -> Tensor:
    """Images in the layout that convolutions and pooling on a CPU are fast in."""
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor

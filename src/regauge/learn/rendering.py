"""Outputs of networks at fixed inputs, called renderings: targets that need no labels."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from regauge.core.params import Params
from regauge.core.task import Task
from regauge.learn.running import Runner


@dataclass(frozen=True)
class Rendering:
    """The standardized outputs of networks at fixed inputs, such as an image at all of its pixels.

    Attributes:
        module: The module that evaluates the networks.
        inputs: The inputs of the networks: a tensor, a tuple of positional arguments, or a dictionary of keyword
            arguments.
        mean: The mean of each output over some networks, `[outputs]`. Until `standardize` is called, the mean is zero.
        deviation: The standard deviation of all outputs around their means.

    References:
        INR2JLS, which reads networks of images by decoding the images.
    """

    module: nn.Module
    inputs: Any
    mean: Tensor | float = 0.0
    deviation: float = 1.0

    @torch.no_grad()
    def __call__(self, params: Mapping[str, Tensor]) -> Tensor:
        """Return the standardized outputs, `[models, outputs]`, without gradients."""
        made = self._runner.outputs(params, self.inputs).flatten(1)
        return (made - self.mean) / self.deviation

    @cached_property
    def _runner(self) -> Runner:
        return Runner(Task(self.module, ()))

    def standardize(self, params: Params) -> "Rendering":
        """Return a copy of the rendering that standardizes outputs by their mean and deviation over some networks.

        Raises:
            ValueError: The networks cannot be evaluated on the inputs, or their outputs are not finite or all equal.
        """
        try:
            made = replace(self, mean=0.0, deviation=1.0)(params)
        except (RuntimeError, TypeError, IndexError) as error:
            reason = str(error).split("\n")[0]
            raise ValueError(
                f"the networks cannot be run on the inputs for `render` ({reason}); give inputs for the module"
            ) from error
        mean = made.mean(0)
        deviation = float((made - mean).square().mean().sqrt())
        if not 0 < deviation < float("inf"):
            raise ValueError(
                f"the outputs of the networks at these inputs have the standard deviation {deviation}; give inputs at "
                "which outputs differ, or leave `render` out"
            )
        return replace(self, mean=mean, deviation=deviation)


def grid(size: Sequence[int]) -> Tensor:
    """Return the cell centers of a grid over `[-1, 1]` on each axis, `[cells, axes]`; the last axis varies fastest."""
    axes = [(2 * torch.arange(n) + 1) / n - 1 for n in size]
    return torch.cartesian_prod(*axes).reshape(-1, len(axes))

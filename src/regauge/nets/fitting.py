"""Fit many small networks to many signals at once."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regauge.core.params import Params
from regauge.core.progress import Progress, no_progress


@dataclass(frozen=True)
class Fitting:
    """How networks are fitted: Adam on all points in every step.

    Attributes:
        steps: How many.
        lr: Learning rate.
    """

    steps: int = 1000
    lr: float = 5e-4

    def __post_init__(self) -> None:
        if self.steps < 1 or self.lr <= 0:
            raise ValueError(f"{self} cannot fit: at least one step and a positive learning rate are needed")


def fit_signals(
    module: nn.Module,
    params: Mapping[str, Tensor],
    inputs: Tensor,
    targets: Tensor,
    fitting: Fitting,
    *,
    progress: Progress = no_progress,
) -> Params:
    """Minimize each network's mean squared error; the networks do not see one another.

    One stacked call per step serves all of them: networks this small are otherwise slowed down by the overhead of
    their operators.

    Args:
        module: How to run the parameters of one network; its own are not used.
        params: Where to start, with a leading model axis.
        inputs: The points that all share, `[n, in]`.
        targets: Each network's values there, `[models, n, out]`.
        fitting: Steps and learning rate.
        progress: Shows the steps.

    Returns:
        Fitted parameters, with a leading model axis.
    """
    learned = {name: tensor.detach().clone().requires_grad_() for name, tensor in params.items()}
    optimizer = torch.optim.Adam(learned.values(), lr=fitting.lr, fused=True)

    def loss(one: Params, target: Tensor) -> Tensor:
        outputs: Tensor = torch.func.functional_call(module, one, (inputs,))
        return (outputs - target).square().mean()

    losses, advance = torch.func.vmap(loss), progress("fitting", fitting.steps)
    for _ in range(fitting.steps):
        optimizer.zero_grad()
        losses(learned, targets).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        advance()
    return {name: tensor.detach() for name, tensor in learned.items()}

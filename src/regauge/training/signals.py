"""Fit many small networks to many signals at once."""

import itertools
from collections.abc import Mapping

from torch import Tensor, nn

from regauge.core.params import Params
from regauge.core.progress import Progress, no_progress
from regauge.training.descent import Descent, descend
from regauge.training.optimizers import require_numbers
from regauge.training.stacks import Stack, VmapEngine


def fit_signals(
    module: nn.Module,
    params: Mapping[str, Tensor],
    inputs: Tensor,
    targets: Tensor,
    descent: Descent,
    *,
    progress: Progress = no_progress,
) -> Params:
    """Minimize each network's mean squared error on all points; the networks do not touch one another.

    Args:
        module: How to run the parameters of one network; its own are not used.
        params: The parameters at the start, with a leading model axis.
        inputs: The points that all share, `[n, in]`.
        targets: Each network's values there, `[models, n, out]`.
        descent: Steps, optimizer, schedule.
        progress: Shows the steps.

    Returns:
        Fitted parameters, with a leading model axis.
    """
    settings = {name: [value] * len(targets) for name, value in require_numbers(descent.optimizer).items()}
    stack = Stack(module, params, descent.optimizer, settings, VmapEngine(module, is_compiled=False))
    steps = descent.count_steps(len(inputs))
    advance = progress("fitting", steps)
    batches = itertools.repeat((inputs.unsqueeze(0), targets))
    for _ in descend(stack, batches, steps=steps, schedule=descent.schedule):
        advance()
    return stack.params()

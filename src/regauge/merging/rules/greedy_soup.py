"""The greedy soup: the mean of networks that are chosen one by one."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from regauge.core.params import Params
from regauge.core.task import Task
from regauge.merging.rules.average import Average


@dataclass(frozen=True)
class GreedySoup(Average):
    """The mean of networks that are added one by one, except networks that would raise the loss of a task.

    The networks are visited in order of increasing loss. The network with the least loss is always included. A later
    network is included if it does not raise the loss of the mean. Therefore, on the task, the result is never worse
    than the best network. The guarantee requires that the task has no `prepare` function, because `prepare` changes
    means but not single networks.

    References:
        Wortsman et al. (2022), Model soups, algorithm 1.
    """

    needs_task = True

    def choose(
        self, networks: Sequence[Mapping[str, Tensor]], soup: Callable[[Sequence[int]], Params], task: Task | None
    ) -> Sequence[int]:
        """Return the indices of the networks that are averaged.

        Raises:
            ValueError: There is no task, or the loss of a network is NaN.
        """
        if task is None:
            raise ValueError(
                "GreedySoup chooses by the loss of a task; give `task=regauge.Task(module, batches, criterion)`, or "
                "use Average"
            )
        losses = [task.evaluate(network)["loss"] for network in networks]
        if any(math.isnan(loss) for loss in losses):
            raise ValueError(
                f"the losses of the networks are {losses}; leave out the networks whose loss is NaN, or correct the "
                "task"
            )
        order = sorted(range(len(networks)), key=losses.__getitem__)
        chosen, best = order[:1], losses[order[0]]
        for k in order[1:]:
            tried = [*chosen, k]
            loss = task.evaluate_average(soup(tried))["loss"]
            if loss <= best:
                chosen, best = tried, loss
        return sorted(chosen)

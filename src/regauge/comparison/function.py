"""A comparison of two networks on data: the agreement of their outputs, and the line between them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from regauge.connect import line
from regauge.core.params import Params
from regauge.core.task import Task

FUNCTION_POINTS = 11
"""Networks on a line, both ends included; one of them is halfway."""


def measure_function(a: Params, b: Params, aligned: tuple[Params, Params], task: Task) -> dict[str, float]:
    """Agreement of outputs, losses, barriers as stored and aligned, and the loss halfway, on the data of a task.

    Args:
        a: The first network.
        b: The second network.
        aligned: The first network, and the second one aligned to it: those of the barrier after alignment.
        task: Module, data and loss.

    Returns:
        "change of outputs": `|f_b - f_a| / |f_a|` over all outputs; "same predictions": how often the largest
        output is the same, where targets are classes; losses, in the unit of the criterion.
    """
    before, after = line(a, b, task, FUNCTION_POINTS), line(*aligned, task, FUNCTION_POINTS)
    metrics = [{n: v for n, v in row.items() if n != "t"} for row in (before.table[0], before.table[-1])]
    result = _agreement(a, b, task)
    result |= {f"{name} of {which}": one[name] for name in metrics[0] for which, one in zip("AB", metrics, strict=True)}
    result |= {"barrier as stored": before.barrier, "barrier after alignment": after.barrier}
    result["loss of the merge"] = after.table[FUNCTION_POINTS // 2]["loss"]
    return result


def _agreement(a: Mapping[str, Tensor], b: Mapping[str, Tensor], task: Task) -> dict[str, float]:
    gap = size = same = count = 0.0
    with torch.no_grad():
        for inputs, targets in task.batches:
            first, second = task.run(a, inputs).double(), task.run(b, inputs).double()
            gap, size = gap + float((second - first).square().sum()), size + float(first.square().sum())
            if _are_classes(first, targets):
                same += float((first.argmax(-1) == second.argmax(-1)).sum())
                count += targets.numel()
    result = {"change of outputs": (gap / size) ** 0.5 if size else float(gap > 0)}
    return result | ({"same predictions": same / count} if count else {})


def _are_classes(outputs: Tensor, targets: Any) -> bool:
    return isinstance(targets, Tensor) and not targets.is_floating_point() and outputs.shape[:-1] == targets.shape

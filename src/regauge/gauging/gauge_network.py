"""`gauge`: another point of a network's orbit, chosen for a purpose."""

from collections.abc import Mapping

import torch
from torch import Tensor

from regauge.core.arguments import check_arguments
from regauge.core.params import require_finite
from regauge.core.symmetry import Symmetry
from regauge.core.task import Task
from regauge.gauging.certificate import certify
from regauge.gauging.method import GaugeMethod, GaugeProblem, to_work
from regauge.gauging.methods.best_gauge import BestGauge
from regauge.gauging.moves import Move, apply_moves
from regauge.gauging.result import GaugeResult


@check_arguments
def gauge(
    params: Mapping[str, Tensor],
    symmetry: Symmetry,
    *,
    method: GaugeMethod | None = None,
    task: Task | None = None,
    test: Task | None = None,
    generator: torch.Generator | None = None,
) -> GaugeResult:
    """Move a network along its orbit to where it is easier to quantize: other weights, the same function.

    What other tools write by hand for each architecture (cross-layer equalization, SmoothQuant, AWQ, QuaRot, SpinQuant)
    are elements of the symmetry that `discover` finds, chosen by one of the methods here.

    | method | what it moves | needs |
    | --- | --- | --- |
    | `BestGauge` | what the best of several methods moves, or nothing | nothing else |
    | `Equalize` | every family of positive scales, until ranges agree | nothing else |
    | `Hadamard`, `RandomRotation` | every orthogonal and linear group | a task, to see behind gains |
    | `LearnedRotation` | the same, by descent on the error of rounding | a task, to see behind gains |
    | `LearnedRotation(by="function")` | scales, too, by descent on what rounding does to the outputs | a task |
    | `Smooth` | scales between activations and the weights that read them | a task |
    | `Chain` | several methods, one after the other | what these need |

    Where gains of norms stand in the way of rotations and there is a task, they are brought to one first by the scales
    of the symmetry; with a symmetry that was discovered behind `regauge.fold` that is done already.

    Args:
        params: One network, unchanged itself. Buffers move with it.
        symmetry: The symmetry of its architecture.
        method: `BestGauge()` unless given: with a task its loss decides, with weights rounded to four bits; without one
            the rounding error of weights. Other methods go by their own objectives.
        task: The model and data, on which methods choose and the result is certified. Only `BestGauge` uses the loss.
        test: A task with other data, which choose nothing; `BestGauge` judges what it kept on them. Half of the
            examples of `task` where its loss decides, unless given (`Task.split`).
        generator: The source of chance. The same state gives the same result.

    Returns:
        The moved network, of the same names, shapes, dtypes and devices, what moved it, and what was left as it is.

    Raises:
        KeyError: A parameter that the symmetry moves is missing.
        TraceError: `torch.export` cannot trace the task's model.
        ValueError: The parameters do not fit the symmetry, are not finite, or are a population; the method needs a task
            or a generator.

    References:
        Nagel et al. (2019), Data-free quantization; Xiao et al. (2023), SmoothQuant; Lin et al. (2023), AWQ; Ashkboos
        et al. (2024), QuaRot; Liu et al. (2024), SpinQuant.
    """
    method = BestGauge() if method is None else method
    bound = symmetry.bind(params)
    for name in bound.sites:
        if params[name].ndim != len(bound.shapes[name]):
            raise ValueError(f"{name!r} has a leading model axis; choose the gauges of a population one by one")
    if method.needs_task and task is None:
        raise ValueError(f"{type(method).__name__} looks at what layers read: give a task with a module and batches")
    require_finite(params, "the network", bound.structure)
    dtypes = {name: tensor.dtype for name, tensor in params.items()}
    problem = GaugeProblem(to_work(params), bound, task, generator, test, dtypes)
    chosen = method.choose(problem)
    moves = chosen.moves or (Move(bound, bound.identity()),)
    certificate = None
    if task is not None:
        inputs, kwargs = problem.inputs
        certificate = certify(params, moves, task.module, inputs, kwargs, outputs=task.outputs)
    return GaugeResult(
        apply_moves(moves, params),
        moves,
        chosen.objective,
        chosen.initial,
        chosen.history,
        chosen.unit,
        chosen.fixed,
        chosen.notes,
        certificate,
        chosen.trials,
    )

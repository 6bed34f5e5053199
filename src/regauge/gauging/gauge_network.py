"""The function `gauge`, which replaces the weights of a network by equivalent weights, chosen for a purpose."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regauge.checkpoints.checkpoint import Checkpoint
from regauge.checkpoints.job import Network, open_call, with_files
from regauge.checkpoints.memory_limit import MemoryLimit
from regauge.checkpoints.output import Output
from regauge.core.arguments import check_arguments
from regauge.core.given import given_or_seed, require_instance
from regauge.core.params import require_finite
from regauge.core.progress import Progress, no_progress
from regauge.core.symmetry import Symmetry
from regauge.core.task import Task
from regauge.gauging.certificate import certify
from regauge.gauging.choose_streamed import choose_streamed
from regauge.gauging.gauge_method import GaugeMethod, GaugeProblem, to_work
from regauge.gauging.gauge_report import write_gauge
from regauge.gauging.methods.best_gauge import BestGauge
from regauge.gauging.methods.learned_rotation import LearnedRotation
from regauge.gauging.methods.spreading_rotations import Rotation
from regauge.gauging.moves import Move, apply_moves
from regauge.gauging.result import Chosen, GaugeResult

HADAMARD = ", or use the method Hadamard without data"
"""Advice that is printed if a gauge cannot be chosen in memory."""


@check_arguments
@with_files
def gauge(
    params: Network,
    symmetry: Symmetry,
    *,
    method: GaugeMethod | None = None,
    task: Task | None = None,
    test: Task | None = None,
    generator: torch.Generator | None = None,
    out: Output | str | Path | None = None,
    memory: int | str | MemoryLimit | None = None,
    progress: Progress = no_progress,
) -> GaugeResult:
    """Transform the weights of a network such that they are easier to quantize, without changing its function.

    Cross-layer equalization, SmoothQuant, AWQ, QuaRot and SpinQuant also transform weights to make quantization easier,
    but their tools program the transformations separately for each architecture. The transformations of all five
    methods are elements of the symmetry that `discover` finds. One of the following methods chooses the element:

    | method | what it moves | needs |
    | --- | --- | --- |
    | `BestGauge` | what the best of several methods moves, or nothing | nothing else |
    | `Equalize` | every family of positive scales, until ranges agree | nothing else |
    | `Hadamard`, `RandomRotation` | every orthogonal and linear group | a task, if gains prevent rotations |
    | `LearnedRotation` | groups as for `Hadamard`, by descent on errors | a task, if gains prevent rotations |
    | `LearnedRotation(by="function")` | groups and scales, by descent on the change of outputs | a task |
    | `Smooth` | scales between activations and the weights that read them | a task |
    | `Chain` | what several methods move, one after the other | what these methods need |

    The default methods start at the network without translations (its representative). A method that you pass starts at
    the given network. The methods that you pass in `BestGauge(methods=(...,))` also start at the given network.

    Gains of norms can prevent rotations. If a task is given, scales of the symmetry first set the gains of norms to
    one. After `regauge.discovery.fold`, the gains are already one.

    A checkpoint is transformed tensor by tensor if it needs more than `memory`, or if its model is on the meta device.
    If a checkpoint is transformed tensor by tensor, only rotations are sampled, and the model is not evaluated.

    Args:
        params: One network, as parameters by name or the path of a checkpoint. The argument itself is not changed.
            Buffers are transformed with the parameters.
        symmetry: The symmetry of its architecture.
        method: The method; `BestGauge()` by default. With a task, `BestGauge` compares losses after the weights are
            rounded to four bits. Without a task, `BestGauge` compares rounding errors of the weights. Methods other
            than `BestGauge` have other objectives.
        task: The model and data, by which methods choose the gauge and the result is certified. Only `BestGauge` uses
            the loss.
        test: A task with held-out data, which are not used to choose the gauge. `BestGauge` evaluates its chosen
            network on the held-out data. If networks are compared by the loss, and `test` is None, half of the examples
            of `task` are held out (`Task.split`).
        generator: The random generator. Equal generator states give equal results.
        out: The path or `Output` for the transformed network, next to which a report is written. `out`, `memory` and
            `progress` are for checkpoints only.
        memory: The memory limit: bytes, or a string such as "2GB". By default, the limit is half of the machine's
            memory.
        progress: A function that shows the progress of writing.

    Returns:
        The transformed network with the same names, shapes, dtypes and devices, the moves, and the groups and gains
        that were not changed.

    Raises:
        FileExistsError: The output exists and may not be replaced.
        KeyError: A parameter that the symmetry transforms is missing.
        TraceError: `torch.export` cannot trace the task's model.
        ValueError: The parameters do not fit the symmetry, are not finite, or are a population. The method needs a
            task, a generator, or more memory than is allowed. The error is also raised if the transformed network would
            compute another function.

    References:
        Nagel et al. (2019), Data-free quantization; Xiao et al. (2023), SmoothQuant; Lin et al. (2023), AWQ; Ashkboos
        et al. (2024), QuaRot; Liu et al. (2024), SpinQuant.
    """
    method = BestGauge() if method is None else method
    require_instance(method, GaugeMethod, "method", {"best": "regauge.BestGauge()"})
    settings = {"method": repr(method)}
    ways: Any = {"symmetry": symmetry, "generator": generator, "work": "choosing a gauge"}
    job = open_call("rg.gauge", settings, {"checkpoint": params}, out=out, memory=memory, **ways)
    if job is None:
        assert isinstance(params, Mapping)
        result = _choose(params, symmetry, method, task, test, generator)
        return replace(result, params=apply_moves(result.moves, params))
    source, can_learn = job.source, replace(job, work="learning a gauge by function").fits
    is_meta = task is not None and any(tensor.is_meta for tensor in task.module.state_dict().values())
    if source.is_lazy and (is_meta or not job.fits):
        result = _draw(source, symmetry, method, task, generator)
    else:
        job.require_memory(HADAMARD)
        methods = (method, *(getattr(method, "methods", None) or ()))
        if any(isinstance(one, LearnedRotation) and one.by == "function" for one in methods):
            replace(job, work="learning a gauge by function").require_memory(HADAMARD)
        result = _choose(source.params, symmetry, method, task, test, generator, source.label, can_learn=can_learn)
    if job.out is None:
        return replace(result, params=apply_moves(result.moves, source.params))
    symmetry = symmetry.bind(source.on_meta())
    return replace(result, params=write_gauge(job, symmetry, method, result, progress))


def _draw(
    checkpoint: Checkpoint,
    symmetry: Symmetry,
    method: GaugeMethod,
    task: Task | None,
    generator: torch.Generator | None,
) -> GaugeResult:
    """Sample rotations for a checkpoint that stays on the disk. The result contains no parameters."""
    if isinstance(method, Rotation):
        method = BestGauge(method.scheme, (method,), "weights", is_kept_always=method.is_kept_always)
    if not isinstance(method, BestGauge):
        raise ValueError(f"{type(method).__name__} needs all values in memory: allow more memory, or use Hadamard()")
    generator = given_or_seed(generator)
    return _result(choose_streamed(checkpoint, symmetry, method, task=task, generator=generator), symmetry)


def _result(chosen: Chosen, symmetry: Symmetry) -> GaugeResult:
    return GaugeResult({}, **vars(chosen) | {"moves": chosen.moves or (Move(symmetry, symmetry.identity()),)})


def _choose(
    params: Mapping[str, Tensor],
    symmetry: Symmetry,
    method: GaugeMethod,
    task: Task | None,
    test: Task | None,
    generator: torch.Generator | None,
    label: str = "the network",
    *,
    can_learn: bool = True,
) -> GaugeResult:
    """Choose the gauge of a network in memory. The result contains no parameters."""
    bound = symmetry.bind(params)
    for name in bound.sites:
        if params[name].ndim != len(bound.shapes[name]):
            raise ValueError(f"{name!r} has a leading model axis; choose the gauges of a population one by one")
    if method.needs_task and task is None:
        raise ValueError(f"{type(method).__name__} needs the inputs of layers: give a task with a module and batches")
    require_finite(params, label, bound.structure)
    dtypes = {name: tensor.dtype for name, tensor in params.items()}
    problem = GaugeProblem(to_work(params), bound, task, generator, test, dtypes, can_learn)
    chosen = method.choose(problem)
    result = _result(chosen, bound)
    if task is not None:
        inputs, kwargs = problem.inputs
        certificate = certify(params, result.moves, task.module, inputs, kwargs, outputs=task.outputs)
        result = replace(result, certificate=certificate)
    return result

"""`align`: bring one network as close as its symmetry allows to another."""

from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, overload

import torch

from regauge.alignment.joint import Dictionaries, JointView, require_dictionaries
from regauge.alignment.method import Method
from regauge.alignment.methods.activation_matching import MixedMatching
from regauge.alignment.methods.weight_matching import WeightMatching
from regauge.alignment.problem import Problem, batch_of_one, bind_networks
from regauge.alignment.result import Result
from regauge.alignment.streamed.aligning import align_streamed_files
from regauge.alignment.streamed.job import FileJob, Network, open_job
from regauge.core.params import Params
from regauge.core.progress import Progress, no_progress
from regauge.core.symmetry import Symmetry
from regauge.core.task import Task
from regauge.storage.checkpoints.alignments import Alignment, alignment_path, save_alignment
from regauge.storage.checkpoints.memory_limit import MemoryLimit

Joined = TypeVar("Joined", bound=Dictionaries)
POPULATIONS = "these are populations; align them with `regauge.align_pairs`, all pairs at once"


@overload
def align(
    params_a: Network,
    params_b: Network,
    symmetry: Symmetry,
    *,
    method: Method | None = None,
    task: Task | None = None,
    generator: torch.Generator | None = None,
    out: str | Path | None = None,
    memory: int | str | MemoryLimit | None = None,
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress = no_progress,
) -> Result[Params]: ...


@overload
def align(
    params_a: Joined,
    params_b: Joined,
    symmetry: Symmetry,
    *,
    method: Method,
    task: Task | None = None,
    generator: torch.Generator | None = None,
) -> Result[Joined]: ...


def align(
    params_a: Network | Dictionaries,
    params_b: Network | Dictionaries,
    symmetry: Symmetry,
    *,
    method: Method | None = None,
    task: Task | None = None,
    generator: torch.Generator | None = None,
    out: str | Path | None = None,
    memory: int | str | MemoryLimit | None = None,
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress = no_progress,
) -> Result[Any]:
    """Move the second network along its orbit, as close to the first as the method gets.

    The result is never worse than the identity on the method's own objective, and `params` computes the same
    function as `params_b`.

    Networks may be checkpoints on the disk. Those that need more than `memory`, and folders of which the result is a
    folder, are streamed: weights are matched, and `params` are read from `out` when they are asked for.

    Args:
        params_a: The network that stays: parameters by name, or the path of a checkpoint; a tuple of dictionaries for
            methods that move several together (`GaussianMatching`, `JointMatching`).
        params_b: The network that moves, unchanged itself. Buffers move with it.
        symmetry: The symmetry of both networks.
        method: `MixedMatching()` unless given where there is a task, else `WeightMatching()`.
        task: Model, data and loss, for methods that use them.
        generator: The source of chance, for methods that use it. The same generator state gives the same result.
        out: Where the moved network is written, with the names, dtypes and header of the second one: a `.safetensors`
            file, or a folder for networks in folders. The alignment is written beside it. For networks on the disk
            only, as are the following.
        memory: How much may be held: bytes, or text such as "2GB"; half of the machine's memory unless given.
        resume: Whether to continue what an interrupted run left.
        overwrite: Whether the output may be replaced.
        progress: Shows each pass over streamed files.

    Raises:
        FileExistsError: The output exists, and `overwrite` is false.
        KeyError: A parameter that the symmetry moves is missing.
        TypeError: The method takes tuples of dictionaries and got single ones, or the other way around.
        ValueError: The networks have different parameters, do not fit the symmetry, hold NaN or Inf, or are
            populations; the method needs a task or a generator; or the memory does not suffice.
    """
    if not isinstance(params_a, tuple) and not isinstance(params_b, tuple):
        job = open_job(
            (params_a, params_b),
            source=1,
            out=out,
            beside=alignment_path,
            memory=memory,
            resume=resume,
            overwrite=overwrite,
            progress=progress,
        )
        if job is not None:
            return _align_files(job, symmetry, method, task, generator)
    if method is None:
        method = WeightMatching() if task is None else MixedMatching()
    roles = method.joint_roles
    networks = [require_dictionaries(method, roles, network) for network in (params_a, params_b)]
    symmetry = bind_networks([network[0] for network in networks], symmetry, POPULATIONS)
    view = JointView.of(roles, symmetry, networks)
    a, b = (batch_of_one(view.join(network)) for network in networks)
    found = method.match(Problem(a, b, view.symmetry, task, generator)).item(0)
    if not roles:
        return found
    params = view.split(found.params, params_b)
    return replace(found, symmetry=symmetry, element=view.element(found.element), params=params)


def _align_files(
    job: FileJob,
    symmetry: Symmetry,
    method: Method | None,
    task: Task | None,
    generator: torch.Generator | None,
) -> Result[Params]:
    """Align networks that are on the disk, in memory or streamed, and write the result."""
    job.require_output()
    if job.is_streamed:
        return align_streamed_files(job, symmetry, method=method, task=task)
    params_a, params_b = job.params
    result = align(params_a, params_b, symmetry, method=method, task=task, generator=generator)
    if job.out is not None:
        job.write(result.params)
        alignment = Alignment(result.symmetry, result.element)
        save_alignment(alignment, alignment_path(job.out), overwrite=job.overwrite)
    return result

"""Alignment of networks with different vocabularies. Rows of missing tokens are copied between the networks."""

from dataclasses import replace
from functools import partial

import torch

from regauge.alignment import Method, Result, align
from regauge.alignment.align_networks import with_learning
from regauge.alignment.representatives import Rotate, as_given
from regauge.alignment.streamed.job import StreamedJob, align_job, plan_job
from regauge.checkpoints.job import FileJob
from regauge.checkpoints.writing import Pieces
from regauge.core.arguments import check_arguments
from regauge.core.element import Element
from regauge.core.params import Params
from regauge.core.progress import Progress, no_progress
from regauge.core.symmetry import Symmetry
from regauge.core.task import Task
from regauge.hub.tokens import TokenPlan
from regauge.merging.assembly import Assembly, take_over


def plan_alignment(
    job: FileJob,
    symmetry: Symmetry,
    tokens: TokenPlan | None = None,
    method: Method | None = None,
    task: Task | None = None,
    rotate: Rotate = "auto",
) -> StreamedJob:
    """Plan the alignment of the second checkpoint to the first while both stay on the disk; see `align_tokens`.

    Raises:
        ValueError: The checkpoints cannot be aligned while they stay on the disk, or the memory does not suffice.
    """
    plain = symmetry if tokens is None or tokens.is_complete else as_given(symmetry)[0]
    return plan_job(job, plain, method, task, rotate)


@check_arguments
def align_tokens(
    job: FileJob,
    symmetry: Symmetry,
    tokens: TokenPlan,
    *,
    method: Method | None = None,
    task: Task | None = None,
    generator: torch.Generator | None = None,
    rotate: Rotate = "auto",
    progress: Progress = no_progress,
) -> Result[Params]:
    """Align the second checkpoint of a job to the first, and add rows for tokens that only the first checkpoint has.

    The added rows are copied from the first network after the alignment, when both networks have the same coordinates.

    Args:
        job: Two checkpoints under a common vocabulary, and the output path.
        symmetry: The symmetry of both networks.
        tokens: The embedding rows that the second network copies from the first.
        method: The alignment method. `method` and the following arguments are as in `rg.align`.
        task: Model, data and loss, for methods that use a task.
        generator: The source of randomness.
        rotate: Whether residual streams are rotated, as in `rg.align`. Networks with different tokens are never
            rotated. If `rotate` is "always", a note states that the networks are not rotated.
        progress: A function that shows each pass over streamed files.

    Raises:
        ValueError: The networks cannot be aligned, or the memory does not suffice.
    """
    a, b = job.checkpoints
    job = with_learning(job, method, task)

    def make(element: Element) -> Pieces:
        return Assembly(take_over(b, 1), (a, b), symmetry, (None, element), tokens).pieces

    # Rows of missing tokens are filled in one tensor at a time, which is impossible with translations and rotations.
    plain, told = as_given(symmetry)
    if job.is_streamed:
        streamed = align_job(plan_alignment(job, symmetry, tokens, method, task, rotate), progress, make=make)
        return replace(streamed, notes=(*streamed.notes, *told))
    result: Result[Params] = align(
        a.params, b.params, plain, method=method, task=task, generator=generator, rotate=rotate
    )
    job.write(make(result.element), partial(result.save, overwrite=True), progress)
    return replace(result, notes=(*result.notes, *told, *job.source.notes))

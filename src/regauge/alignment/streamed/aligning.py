"""Alignment of a checkpoint to another one while both stay on the disk."""

from dataclasses import replace
from typing import cast

from regauge.alignment.streamed.climb import StreamedResult
from regauge.alignment.streamed.job import FileJob, plan_job
from regauge.alignment.streamed.pieces import move_pieces
from regauge.core.params import Params
from regauge.core.symmetry import Symmetry
from regauge.core.task import Task
from regauge.storage.checkpoints.alignments import Alignment, alignment_path, save_alignment


def align_streamed_files(job: FileJob, symmetry: Symmetry, *, method: object, task: Task | None) -> StreamedResult:
    """Align the second checkpoint to the first one, and write it with its alignment beside it.

    Raises:
        ValueError: There is a task, or the checkpoints cannot be streamed; see `plan_job`.
    """
    if task is not None:
        raise ValueError("a task runs the model and needs it in memory; leave it out, or allow more memory")
    streamed = plan_job(job, symmetry, method)
    with streamed.begin({"command": "align"}) as staging:
        found = streamed.match(1, staging)
        alignment = Alignment(streamed.symmetry, found.element)
        save_alignment(alignment, staging.content / alignment_path(staging.out).name, overwrite=True)
        moved = streamed.publish(staging, move_pieces(job.checkpoints[1], streamed.symmetry, found.element))
    return replace(found, params=cast(Params, moved))

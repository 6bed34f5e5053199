"""`apply`: the application of a saved alignment to another checkpoint."""

from pathlib import Path
from typing import Any

from regauge.alignment.streamed.source import move_pieces
from regauge.checkpoints.alignments import Alignment, load_alignment
from regauge.checkpoints.checkpoint import Checkpoint
from regauge.checkpoints.job import open_call
from regauge.checkpoints.output import Output
from regauge.core.params import require_movable
from regauge.core.progress import Progress, no_progress


def apply(
    alignment: Alignment | str | Path,
    checkpoint: str | Path | Checkpoint,
    out: Output | str | Path,
    *,
    inverse: bool = False,
    progress: Progress = no_progress,
) -> Checkpoint:
    """Apply a saved alignment to a checkpoint, and write the transformed checkpoint tensor by tensor.

    The checkpoint may be larger than the memory.

    Args:
        alignment: The alignment that `load_alignment` returned, or the path of its file.
        checkpoint: A checkpoint of the same architecture.
        out: The path to which the transformed checkpoint is written. The written checkpoint has the names, dtypes and
            header of the given checkpoint.
        inverse: Whether to apply the inverse of the alignment instead of the alignment itself.
        progress: A function that shows the progress of writing.

    Returns:
        The transformed checkpoint, opened with the tensor names of the alignment's symmetry.

    Raises:
        FileExistsError: The output exists and may not be replaced.
        KeyError: A parameter on which the symmetry acts is missing.
        ValueError: The checkpoint does not fit the symmetry of the alignment.
    """
    found = alignment if isinstance(alignment, Alignment) else load_alignment(alignment)
    ways: Any = {"networks": [checkpoint], "symmetry": found.symmetry, "work": "applying an alignment"}
    named = {"alignment": None if isinstance(alignment, Alignment) else alignment, "checkpoint": checkpoint}
    job = open_call("rg.alignment.apply", {"inverse": inverse}, named, out=out, **ways)
    assert job is not None
    like = job.source.on_meta()
    symmetry = found.symmetry.bind(like)
    require_movable(symmetry.groups, like, symmetry.buffers)
    symmetry.require_ones({name: job.source[name] for name in symmetry.ones if name in like})
    element = symmetry.inverse(found.element) if inverse else found.element
    return job.write(move_pieces(job.source, symmetry, element), progress=progress)

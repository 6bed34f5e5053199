"""`regauge apply`: a stored alignment on another checkpoint, or undone; tensor by tensor, however large it is."""

from regauge.alignment.streamed.source import move_pieces
from regauge.checkpoints.alignments import alignment_path, load_alignment
from regauge.cli.checkpoint_jobs import open_checkpoints
from regauge.cli.options import Apply
from regauge.cli.output import show_progress, tell_notes, tell_written
from regauge.cli.provenance import provenance_of
from regauge.core.movable import require_movable


def run(options: Apply) -> None:
    """Write the moved checkpoint."""
    place = alignment_path(options.alignment)
    job = open_checkpoints(options, [options.checkpoint], provenance=provenance_of(options, alignment=place))
    alignment = load_alignment(place)
    job = job.named_by(alignment.symmetry)
    like = job.source.on_meta()
    symmetry = alignment.symmetry.bind(like)
    require_movable(symmetry.groups, like, symmetry.buffers)
    symmetry.require_ones({name: job.source[name] for name in symmetry.ones if name in like})
    element = symmetry.inverse(alignment.element) if options.inverse else alignment.element
    with show_progress(is_counted=False) as progress:
        job.write(move_pieces(job.source, symmetry, element), progress=progress)
    tell_notes(job.source.notes)
    tell_written(options.output)

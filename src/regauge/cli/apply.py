"""`regauge apply`: apply a stored alignment to another checkpoint, or undo it, tensor by tensor."""

import regauge as rg
from regauge.checkpoints import alignment_path
from regauge.cli.checkpoint_jobs import output_of, provenance_of
from regauge.cli.checkpoint_options import Apply
from regauge.cli.output import show_progress, tell_notes, tell_written


def run(options: Apply) -> None:
    """Write the transformed checkpoint."""
    place = alignment_path(options.alignment)
    out = output_of(options, provenance_of(options, alignment=place))
    with show_progress(is_counted=False) as progress:
        written = rg.alignment.apply(place, options.checkpoint, out, inverse=options.inverse, progress=progress)
    tell_notes(written.notes)
    tell_written(options.output)

"""`regauge apply`: a stored alignment on another checkpoint, or undone."""

from regauge.cli.options import Apply
from regauge.cli.output import form_of
from regauge.cli.provenance import provenance_of
from regauge.storage.checkpoints.alignments import alignment_path, load_alignment
from regauge.storage.checkpoints.checkpoint import Checkpoint
from regauge.storage.checkpoints.writing import require_writable


def run(options: Apply) -> None:
    """Write the moved checkpoint."""
    require_writable(options.output, overwrite=options.overwrite)
    alignment = load_alignment(alignment_path(options.alignment))
    checkpoint = Checkpoint.open(options.checkpoint).written_as(form_of(options.written))
    symmetry = alignment.symmetry.bind(checkpoint.params)
    element = symmetry.inverse(alignment.element) if options.inverse else alignment.element
    moved = checkpoint.with_params(symmetry.act(element, checkpoint.params))
    provenance = provenance_of(options, alignment=alignment_path(options.alignment))
    moved.write(options.output, overwrite=options.overwrite, provenance=provenance.to_json())
    print(f"written: {options.output}")

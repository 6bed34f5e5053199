"""`regauge apply`: a stored alignment on another checkpoint, or undone."""

from regauge.cli.matching import header_of
from regauge.cli.options import Apply
from regauge.storage.checkpoints.alignments import alignment_path, load_alignment
from regauge.storage.checkpoints.reading import load
from regauge.storage.checkpoints.writing import require_writable, save


def run(options: Apply) -> None:
    """Write the moved checkpoint."""
    require_writable(options.output, overwrite=options.overwrite)
    alignment = load_alignment(alignment_path(options.alignment))
    params = load(options.checkpoint)
    symmetry = alignment.symmetry.bind(params)
    element = symmetry.inverse(alignment.element) if options.inverse else alignment.element
    header = header_of(options.checkpoint)
    save(symmetry.act(element, params), options.output, overwrite=options.overwrite, metadata=header)
    print(f"written: {options.output}")

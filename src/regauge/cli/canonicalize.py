"""`regauge canonicalize`: the canonical form of a checkpoint, and the element that brings it there beside it."""

import regauge as rg
from regauge.cli.models import compare_files, read_networks
from regauge.cli.options import Canonicalize
from regauge.cli.output import form_of, show_status
from regauge.cli.provenance import provenance_of
from regauge.storage.checkpoints.alignments import Alignment, alignment_label, alignment_path, save_alignment
from regauge.storage.checkpoints.checkpoint import Checkpoint
from regauge.storage.checkpoints.writing import require_writable


def run(options: Canonicalize) -> None:
    """Write the canonical checkpoint and its element, and print the manifold on which it lies."""
    beside = alignment_path(options.output)
    require_writable(options.output, overwrite=options.overwrite)
    require_writable(beside, overwrite=options.overwrite)
    first = Checkpoint.open(options.checkpoint).written_as(form_of(options.written))
    others = [] if options.reference is None else [Checkpoint.open(options.reference)]
    compare_files([first, *others], 0)
    found = read_networks(options, [first, *others])
    checkpoint, *references = found.checkpoints
    with show_status("canonicalizing"):
        reference = references[0].params if references else None
        element = rg.canonical.canonical_element(checkpoint.params, found.symmetry, reference=reference)
    canonical = checkpoint.with_params(found.symmetry.act(element, checkpoint.params))
    provenance = provenance_of(options, element=alignment_label(options.output))
    canonical.write(options.output, overwrite=options.overwrite, provenance=provenance.to_json())
    save_alignment(Alignment(found.symmetry, element), beside, overwrite=options.overwrite)
    print(rg.canonical.canonical_manifold(found.symmetry))
    print(f"written: {options.output} and {beside.name}")

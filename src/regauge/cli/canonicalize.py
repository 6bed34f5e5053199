"""`regauge canonicalize`: the canonical form of a checkpoint, and next to it the element that brings it there."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from torch import Tensor

import regauge as rg
from regauge.alignment.engine.frames import moves_statistics
from regauge.alignment.streamed.source import move_pieces
from regauge.checkpoints.alignments import Alignment, alignment_label, alignment_path, save_alignment
from regauge.checkpoints.formats.state_dicts import shorten
from regauge.checkpoints.job import FileJob
from regauge.checkpoints.memory_limit import size_text
from regauge.cli.checkpoint_jobs import open_checkpoints
from regauge.cli.models import read_networks
from regauge.cli.options import Canonicalize, UsageError
from regauge.cli.output import show_status, tell, tell_notes, tell_written
from regauge.cli.provenance import provenance_of
from regauge.core.counted import count
from regauge.core.pieces import move_tensor
from regauge.hub import bring_together

WORDS: dict[str, Callable[[rg.Group], bool]] = {
    "order": lambda group: group.is_permuted,
    "scales": lambda group: group.scales > 0,
    "signs": lambda group: group.signs > 0,
    "half periods": lambda group: group.shifts > 0,
    "matrices": lambda group: group.matrix != "none",
}
"""The freedom of a group that is fixed, in words."""
HELD = 2
"""Copies in float64 that canonicalizing holds of each network: its compared values, and what one step makes of them."""


def run(options: Canonicalize) -> None:
    """Write the canonical checkpoint and its element, and print the manifold on which it lies."""
    paths = [options.checkpoint, *([] if options.reference is None else [options.reference])]
    provenance = provenance_of(options, element=alignment_label(options.output))
    job = open_checkpoints(options, paths, alignment_path, provenance=provenance)
    job = replace(job, checkpoints=bring_together(job.checkpoints).networks)
    _require_memory(job)
    found = read_networks(options, job.checkpoints)
    job = replace(job, checkpoints=found.checkpoints)
    checkpoint, *references = found.checkpoints
    with show_status("canonicalizing"):
        reference = references[0].params if references else None
        element = rg.canonical.canonical_element(checkpoint.params, found.symmetry, reference=reference)
        alignment = Alignment(found.symmetry, element)
        whole = rg.canonical.factorize(checkpoint.params, found.symmetry)
        changed = {name: tensor for name, tensor in whole.items() if tensor is not checkpoint.params[name]}
        # What acts goes tensor by tensor, so that the canonical network is never in memory as a whole.
        plain = move_pieces(checkpoint, found.symmetry, element)

        def pieces(name: str) -> Iterator[Tensor]:
            if name not in changed:
                yield from plain(name)
                return
            yield move_tensor(found.symmetry, element, name, changed[name]).to(checkpoint.params[name].dtype)

        job.write(pieces, lambda path: save_alignment(alignment, path, overwrite=True))
    manifold = rg.canonical.canonical_manifold(found.symmetry)
    spheres = [{"count": one.count, "dimension": one.dim, "label": one.label} for one in manifold.spheres]
    fixed = [word for word, has in WORDS.items() if any(map(has, found.symmetry.groups))]
    tell(
        f"this network computes what {checkpoint.label} computes, and is the same for all networks on its orbit, up to "
        f"rounding; fixed: {', '.join(fixed) or 'nothing'} of {count(found.symmetry.groups, 'group')}. It lies on"
    )
    tell(manifold, spheres=spheres, left=list(manifold.left))
    if moves_statistics(found.symmetry):
        tell(
            "running statistics of batch normalization have canonical scales, too: evaluate the network with these as "
            "stored, since computing them again changes what it does"
        )
    if changed:
        tell(
            f"products of matrices have less than full rank: {shorten([*changed])}. What only one of both sides has is "
            "zero here; the function is the same, but no element of the group leads here, and --inverse does not lead "
            "back to the same values",
            factorized=[*changed],
        )
    tell_notes(checkpoint.notes)
    tell_written(options.output, alignment_path(options.output))


def _require_memory(job: FileJob) -> None:
    """Refuse checkpoints whose values do not fit: sorting and scaling need all of them at once."""
    values = sum(
        one.nbytes // one.dtype.itemsize for checkpoint in job.checkpoints for one in checkpoint.stored.values()
    )
    needed = sum(checkpoint.nbytes for checkpoint in job.checkpoints) + 8 * HELD * values
    if needed > job.limit.nbytes:
        raise UsageError(
            f"canonicalizing needs all values in memory, in float64, which takes {size_text(needed)}, more than the "
            f"{size_text(job.limit.nbytes)} that are allowed: allow more --memory"
        )

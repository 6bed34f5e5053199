"""`regauge canonicalize`: write the canonical form of a checkpoint, and the element that was applied to it."""

import regauge as rg
from regauge.checkpoints import alignment_path
from regauge.checkpoints.output import alignment_label
from regauge.cli.checkpoint_jobs import open_checkpoints, output_of
from regauge.cli.checkpoint_options import Canonicalize
from regauge.cli.models import read_networks
from regauge.cli.output import show_status, tell, tell_notes, tell_written
from regauge.core.counted import count, shorten
from regauge.hub import bring_together


def run(options: Canonicalize) -> None:
    """Write the canonical checkpoint and the applied element, and print the manifold of canonical networks."""
    paths = [options.checkpoint, *([] if options.reference is None else [options.reference])]
    out = output_of(options, element=alignment_label(options.output))
    job = open_checkpoints(paths, out, memory=options.memory, work="canonicalizing")
    job.require_memory()
    found = read_networks(options, bring_together(job.checkpoints).networks)
    checkpoint, *references = found.checkpoints
    with show_status("canonicalizing"):
        reference = next(iter(references), None)
        rg.canonicalize(checkpoint, found.symmetry, reference=reference, out=out, memory=job.limit)
        whole = rg.canonical.factorize(checkpoint.params, found.symmetry)
    changed = [name for name, tensor in whole.items() if tensor is not checkpoint.params[name]]
    manifold = rg.canonical.canonical_manifold(found.symmetry)
    spheres = [{"count": one.count, "dimension": one.dim, "label": one.label} for one in manifold.spheres]
    groups = count(found.symmetry.groups, "group")
    tell(
        f"this network computes the same function as {checkpoint.label}; all its symmetric copies have the same "
        f"canonical form, up to rounding; fixed: {', '.join(manifold.fixed) or 'nothing'} of {groups}. It lies on"
    )
    tell(manifold, spheres=spheres, left=list(manifold.left))
    if found.symmetry.moves_statistics:
        tell(
            "running statistics of batch normalization have canonical scales, too. Evaluate the network with the "
            "stored statistics; new statistics would change its function"
        )
    if changed:
        tell(
            f"these products of matrices have less than full rank: {shorten(changed)}. Entries that do not influence "
            "the product are zero in the result. The function is the same, but no element of the group transforms the "
            "input into the result, and --inverse does not restore the same values",
            factorized=changed,
        )
    tell_notes(checkpoint.notes)
    tell_written(options.output, alignment_path(options.output))

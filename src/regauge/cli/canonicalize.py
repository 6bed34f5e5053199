"""`regauge canonicalize`: the canonical form of a checkpoint, and the element that brings it there beside it."""

from rich.console import Console

import regauge as rg
from regauge.cli.discover import find
from regauge.cli.errors import UsageError
from regauge.cli.models import load_model, self_described
from regauge.cli.options import Canonicalize
from regauge.core.params import require_same_shapes
from regauge.storage.checkpoints.alignments import Alignment, alignment_path, save_alignment
from regauge.storage.checkpoints.checkpoint import Checkpoint, load
from regauge.storage.checkpoints.names import match
from regauge.storage.checkpoints.writing import require_writable


def run(options: Canonicalize) -> None:
    """Write the canonical checkpoint and its element, and print the manifold on which it lies."""
    console = Console(stderr=True)
    beside = alignment_path(options.output)
    require_writable(options.output, overwrite=options.overwrite)
    require_writable(beside, overwrite=options.overwrite)
    name = options.model or (self_described(options.checkpoint) if options.symmetry is None else None)
    if name is None and options.symmetry is None:
        raise UsageError("the symmetry is unknown: name the model with --model, or give --symmetry FILE.json")
    with console.status("reading the checkpoints"):
        checkpoint = Checkpoint.open(options.checkpoint)
        params = checkpoint.params
        reference = None if options.reference is None else load(options.reference)
    if name is not None:
        with console.status("building the model"):
            model = load_model(name, options.inputs)
        state = model.module.state_dict()
        params = match(params, state, str(options.checkpoint))
        reference = None if reference is None else match(reference, state, str(options.reference))
    if reference is not None:
        require_same_shapes(reference, params)
    if options.symmetry is not None:
        if not options.symmetry.is_file():
            raise UsageError(
                f"there is no symmetry {str(options.symmetry)!r}; `regauge discover MODEL -o {options.symmetry.name}` "
                "writes one"
            )
        symmetry = rg.Symmetry.from_json(options.symmetry.read_text(encoding="utf-8"))
    else:
        with console.status("tracing the model"):
            symmetry = find(model, options.inputs)
    symmetry = symmetry.bind(params)
    with console.status("canonicalizing"):
        element = rg.canonical.canonical_element(params, symmetry, reference=reference)
    canonical = symmetry.act(element, params)
    checkpoint.with_params(canonical).write(options.output, overwrite=options.overwrite)
    save_alignment(Alignment(symmetry, element), beside, overwrite=options.overwrite)
    print(rg.canonical.canonical_manifold(symmetry))
    print(f"written: {options.output} and {beside.name}")

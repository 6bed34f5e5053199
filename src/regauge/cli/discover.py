"""`regauge discover`: the symmetry of a model as a table, verified, and as JSON."""

import json

from regauge.checkpoints.writing import require_writable, save_text
from regauge.cli.options import Discover
from regauge.cli.output import show_status, tell, tell_notes, tell_written
from regauge.hub import Values, open_model


def run(options: Discover) -> None:
    """Print the table, with the outcome of the verification or why there was none."""
    if options.output is not None:
        require_writable(options.output, overwrite=options.overwrite, suffixes=(".json",))
    values: Values = "never" if options.meta else "if small"
    verify = not options.skip_verification
    model = open_model(options.model, **vars(options.inputs), values=values, verify=verify)
    with show_status("building and tracing the model, and verifying what is found"):
        found = model.traced
    tell_notes(found.notes)
    symmetry = found.symmetry
    order, dimension = symmetry.log10_order, symmetry.dimension
    tell(symmetry, symmetry=json.loads(symmetry.to_json()), log10_order=order, dimension=dimension)
    if options.skip_verification:
        tell("\nnot verified: --skip-verification")
    elif found.was_meta:
        tell("\nnot verified: the model has no values (meta device); verify a smaller one of the same architecture")
    if options.output is not None:
        save_text(symmetry.to_json() + "\n", options.output)
        tell_written(options.output)

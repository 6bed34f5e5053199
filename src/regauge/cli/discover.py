"""`regauge discover`: find and verify the symmetry of a model, print it as a table, and write it as JSON."""

import json

from regauge.checkpoints.writing import require_writable, save_text
from regauge.cli.options import Discover
from regauge.cli.output import show_status, tell, tell_notes, tell_written
from regauge.hub import Values, open_model


def run(options: Discover) -> None:
    """Print the table, and the result of the verification or the reason why it was not verified."""
    for path, ending in ((options.output, ".json"), (options.page, ".html")):
        if path is not None:
            require_writable(path, overwrite=options.overwrite, suffixes=(ending,))
    values: Values = "never" if options.meta else "if small"
    model = open_model(options.model, **vars(options.inputs), values=values, verify=not options.skip_verification)
    with show_status("building and tracing the model, and verifying its symmetry"):
        found = model.traced
    tell_notes(found.notes)
    symmetry = found.symmetry
    sizes = {"log10_order": symmetry.log10_order, "dimension": symmetry.dimension}
    tell(symmetry, symmetry=json.loads(symmetry.to_json()), **sizes)
    if options.skip_verification:
        tell("\nnot verified: --skip-verification")
    elif found.was_meta:
        tell("\nnot verified: the model has no values (meta device); verify a smaller one of the same architecture")
    if options.output is not None:
        tell_written(save_text(symmetry.to_json() + "\n", options.output))
    if options.page is not None:
        from regauge.report.symmetry_page import symmetry_page

        tell_written(save_text(symmetry_page(symmetry, options.model), options.page))

"""`regauge discover`: the symmetry of a model as a table, verified, and as JSON."""

from regauge.cli.models import trace_model
from regauge.cli.options import Discover
from regauge.cli.transformers_models import Values
from regauge.storage.checkpoints.writing import require_writable, save_text


def run(options: Discover) -> None:
    """Print the table, with the outcome of the verification or why there was none."""
    if options.output is not None:
        require_writable(options.output, overwrite=options.overwrite, suffixes=(".json",))
    values: Values = "never" if options.meta else "if small"
    found = trace_model(options.model, options.inputs, values=values, verify=not options.skip_verification)
    symmetry = found.symmetry
    print(symmetry)
    if options.skip_verification:
        print("\nnot verified: --skip-verification")
    elif found.was_meta:
        print("\nnot verified: the model has no values (meta device); verify a smaller one of the same architecture")
    if options.output is not None:
        save_text(symmetry.to_json() + "\n", options.output)
        print(f"\nwritten: {options.output}")

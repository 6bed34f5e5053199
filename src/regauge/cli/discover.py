"""`regauge discover`: the symmetry of a model as a table, verified, and as JSON."""

from regauge.cli.models import find_symmetry, load_model
from regauge.cli.options import Discover
from regauge.cli.output import show_status
from regauge.storage.checkpoints.writing import require_writable, save_text


def run(options: Discover) -> None:
    """Print the table, with the outcome of the verification or why there was none."""
    if options.output is not None:
        require_writable(options.output, overwrite=options.overwrite, suffixes=(".json",))
    with show_status("building the model"):
        model = load_model(options.model, options.inputs, values="never" if options.meta else "if small")
    is_verified = not (options.skip_verification or model.is_meta)
    with show_status("tracing the model" + (" and verifying what is found" if is_verified else "")):
        symmetry = find_symmetry(model, options.inputs.outputs, verify=is_verified)
    print(symmetry)
    if options.skip_verification:
        print("\nnot verified: --skip-verification")
    elif model.is_meta:
        print("\nnot verified: the model has no values (meta device); verify a smaller one of the same architecture")
    if options.output is not None:
        save_text(symmetry.to_json() + "\n", options.output)
        print(f"\nwritten: {options.output}")

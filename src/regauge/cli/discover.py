"""`regauge discover`: the symmetry of a model as a table, verified, and as JSON."""

from rich.console import Console

import regauge as rg
from regauge.cli.errors import UsageError
from regauge.cli.models import Model, load_model
from regauge.cli.options import Discover, ExampleInputs
from regauge.storage.checkpoints.writing import require_writable, save_text


def run(options: Discover) -> None:
    """Print the table, with the outcome of the verification or why there was none."""
    console = Console(stderr=True)
    if options.output is not None:
        require_writable(options.output, overwrite=options.overwrite, suffixes=(".json",))
    with console.status("building the model"):
        model = load_model(options.model, options.inputs, values="never" if options.meta else "if small")
    is_verified = not (options.skip_verification or model.is_meta)
    with console.status("tracing the model" + (" and verifying what is found" if is_verified else "")):
        symmetry = find(model, options.inputs, verify=is_verified)
    print(symmetry)
    if options.skip_verification:
        print("\nnot verified: --skip-verification")
    elif model.is_meta:
        print("\nnot verified: the model has no values (meta device); verify a smaller one of the same architecture")
    if options.output is not None:
        save_text(symmetry.to_json() + "\n", options.output)
        print(f"\nwritten: {options.output}")


def find(model: Model, inputs: ExampleInputs, *, verify: bool | None = None) -> rg.Symmetry:
    """The symmetry of a model whose outputs were chosen on the command line.

    Raises:
        UsageError: The model cannot be traced.
    """
    try:
        return rg.discover(model.module, model.inputs, model.kwargs, outputs=inputs.outputs or None, verify=verify)
    except rg.TraceError as error:
        raise UsageError(str(error)) from error

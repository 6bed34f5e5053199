"""`regauge discover`: the symmetry of a model as a table, verified, and as JSON."""

import os
from pathlib import Path

import torch
from rich.console import Console

import regauge as rg
from regauge.checkpoints.writing import require_writable
from regauge.cli.models import Model, load_model
from regauge.cli.options import Discover, ExampleInputs


def run(options: Discover) -> None:
    """Print the table; exit code 1 where the verification fails."""
    console = Console(stderr=True)
    if options.output is not None:
        require_writable(options.output, overwrite=options.overwrite, suffixes=(".json",))
    with console.status("building the model"):
        model = load_model(options.model, options.inputs, on_meta=options.meta)
    with console.status("tracing the model"):
        symmetry = find(model, options.inputs)
    print(symmetry)
    print()
    is_refuted = False
    if options.skip_verification:
        print("not verified: --skip-verification")
    elif model.is_meta:
        print("not verified: the model has no values (meta device); verify a smaller one of the same architecture")
    else:
        with console.status("verifying in float64"):
            check = symmetry.verify(
                model.module,
                model.inputs,
                model.kwargs,
                generator=torch.Generator().manual_seed(options.seed),
                outputs=options.inputs.outputs or None,
            )
        print(check)
        is_refuted = not check.ok
    if options.output is not None and not is_refuted:
        _write(options.output, symmetry.to_json() + "\n")
        print(f"written: {options.output}")
    if is_refuted:
        raise SystemExit(1)


def find(model: Model, inputs: ExampleInputs) -> rg.Symmetry:
    """The symmetry of a model whose outputs were chosen on the command line."""
    return rg.discover(model.module, model.inputs, model.kwargs, outputs=inputs.outputs or None)


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)

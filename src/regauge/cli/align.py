"""`regauge align`: checkpoint B next to checkpoint A, and the alignment beside it."""

from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import regauge as rg
from regauge.checkpoints.alignments import Alignment, alignment_path, save_alignment
from regauge.checkpoints.reading import load, match
from regauge.checkpoints.writing import require_writable, save
from regauge.cli.discover import find
from regauge.cli.errors import UsageError
from regauge.cli.models import load_model
from regauge.cli.options import Align
from regauge.core.params import Params, require_same_shapes


def run(options: Align) -> None:
    """Write the aligned checkpoint and its alignment, and print what they gained."""
    console = Console(stderr=True)
    beside = alignment_path(options.output)
    require_writable(options.output, overwrite=options.overwrite)
    require_writable(beside, overwrite=options.overwrite)
    with console.status("reading the checkpoints"):
        params_a, params_b = load(options.a), load(options.b)
    symmetry, params_a, params_b = _symmetry(options, params_a, params_b, console)
    with console.status("aligning"):
        result = rg.align(
            params_a,
            params_b,
            symmetry,
            method=rg.WeightMatching(restarts=options.restarts),
            generator=torch.Generator().manual_seed(options.seed),
        )
    save(result.params, options.output, overwrite=options.overwrite)
    save_alignment(Alignment(symmetry, result.element), beside, overwrite=options.overwrite)
    table = Table("", "before", "after", box=None, pad_edge=False)
    before, after = distance(params_a, params_b), distance(params_a, result.params)
    table.add_row("distance between A and B", f"{before:.6g}", f"{after:.6g}")
    Console().print(table)
    print(result.report)
    print(f"written: {options.output} and {beside.name}")


def _symmetry(
    options: Align, params_a: Params, params_b: Params, console: Console
) -> tuple[rg.Symmetry, Params, Params]:
    if options.symmetry is not None:
        symmetry = rg.Symmetry.from_json(_text(options.symmetry))
        require_same_shapes(params_a, params_b)
        return symmetry.bind(params_a), params_a, params_b
    if options.model is None:
        raise UsageError("the symmetry is unknown: name the model with --model, or give --symmetry FILE.json")
    with console.status("building the model"):
        model = load_model(options.model, options.inputs)
    state = model.module.state_dict()
    params_a, params_b = match(params_a, state, str(options.a)), match(params_b, state, str(options.b))
    with console.status("tracing the model"):
        return find(model, options.inputs).bind(params_a), params_a, params_b


def distance(params_a: Params, params_b: Params) -> float:
    """Euclidean distance between two networks, over all floating-point parameters and buffers."""
    squares = [
        float((tensor.double() - params_b[name].double()).square().sum())
        for name, tensor in params_a.items()
        if tensor.is_floating_point()
    ]
    return float(sum(squares) ** 0.5)


def _text(path: Path) -> str:
    if not path.is_file():
        raise UsageError(f"there is no symmetry {str(path)!r}; `regauge discover MODEL -o {path.name}` writes one")
    return path.read_text(encoding="utf-8")

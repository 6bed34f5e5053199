"""`regauge align`: checkpoint B next to checkpoint A, and the alignment beside it."""

from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import regauge as rg
from regauge.align import Method
from regauge.checkpoints.alignments import Alignment, alignment_path, save_alignment
from regauge.checkpoints.reading import load, match
from regauge.checkpoints.writing import require_writable, save
from regauge.cli.batches import dtype_of, load_batches, task_of, with_reset
from regauge.cli.discover import find
from regauge.cli.errors import UsageError
from regauge.cli.models import load_model
from regauge.cli.options import Align
from regauge.core.params import Params, require_same_shapes

NEED_DATA = ("activations", "mixed", "straight-through")


def run(options: Align) -> None:
    """Write the aligned checkpoint and its alignment, and print what they gained."""
    console = Console(stderr=True)
    beside = alignment_path(options.output)
    require_writable(options.output, overwrite=options.overwrite)
    require_writable(beside, overwrite=options.overwrite)
    with console.status("reading the checkpoints"):
        params_a, params_b = load(options.a), load(options.b)
    symmetry, module, params_a, params_b = _symmetry(options, params_a, params_b, console)
    task = _task(options, module, params_a)
    method = method_of(options)
    with console.status("aligning"):
        generator = torch.Generator().manual_seed(options.seed)
        result = rg.align(params_a, params_b, symmetry, method=method, task=task, generator=generator)
    save(result.params, options.output, overwrite=options.overwrite)
    save_alignment(Alignment(symmetry, result.element), beside, overwrite=options.overwrite)
    table = Table("", "before", "after", box=None, pad_edge=False)
    before, after = distance(params_a, params_b), distance(params_a, result.params)
    table.add_row("distance between A and B", f"{before:.6g}", f"{after:.6g}")
    if task is not None:
        before, after = (task.midpoint_loss(params_a, b) for b in (params_b, result.params))
        table.add_row("loss halfway", f"{before:.6g}", f"{after:.6g}")
    Console().print(table)
    print(result.report)
    print(f"written: {options.output} and {beside.name}")


def method_of(options: Align) -> Method | None:
    """The method that the options ask for; None leaves it to `align`."""
    if options.restarts and options.method not in ("auto", "weights", "frank-wolfe"):
        raise UsageError(f"--restarts is for matching weights; the method {options.method!r} has none")
    if options.scales == "keep" and options.method not in ("auto", "weights"):
        raise UsageError(f"--scales is for matching weights; the method {options.method!r} keeps them anyhow")
    if options.data is None and options.method in NEED_DATA:
        raise UsageError(f"the method {options.method!r} needs data: give --data, or choose another one with --method")
    if options.refine and options.data is None:
        raise UsageError("--refine lowers the loss halfway between A and B, which needs data: give --data")
    method = _chosen(options)
    return rg.Sinkhorn(loss="midpoint", init=method or rg.MixedMatching()) if options.refine else method


def _chosen(options: Align) -> Method | None:
    match options.method:
        case "auto" if options.data is not None and not options.restarts:
            return None
        case "auto" | "weights":
            return rg.WeightMatching(restarts=options.restarts, scales=options.scales)
        case "activations":
            return rg.ActivationMatching()
        case "mixed":
            return rg.MixedMatching()
        case "frank-wolfe":
            return rg.FrankWolfe(restarts=options.restarts)
        case "straight-through":
            return rg.StraightThrough()
        case "sinkhorn":
            return rg.Sinkhorn(loss="l2" if options.data is None else "midpoint")


def _task(options: Align, module: nn.Module | None, params: Params) -> rg.Task | None:
    if options.data is None:
        return None
    if module is None:
        raise UsageError("--data needs the model that runs on them: name it with --model")
    batches = load_batches(options.data, options.batch)
    outputs = options.inputs.outputs
    return with_reset(task_of(module, batches, loss=options.loss, outputs=outputs, dtype=dtype_of(params)))


def _symmetry(
    options: Align, params_a: Params, params_b: Params, console: Console
) -> tuple[rg.Symmetry, nn.Module | None, Params, Params]:
    module = None
    if options.model is not None:
        with console.status("building the model"):
            model = load_model(options.model, options.inputs, values="if small" if options.data is None else "always")
        module = model.module
        state = module.state_dict()
        params_a, params_b = match(params_a, state, str(options.a)), match(params_b, state, str(options.b))
    if options.symmetry is not None:
        symmetry = rg.Symmetry.from_json(_text(options.symmetry))
        require_same_shapes(params_a, params_b)
    elif options.model is None:
        raise UsageError("the symmetry is unknown: name the model with --model, or give --symmetry FILE.json")
    else:
        with console.status("tracing the model"):
            symmetry = find(model, options.inputs)
    return symmetry.bind(params_a), module, params_a, params_b


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

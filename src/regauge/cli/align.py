"""`regauge align`: checkpoint B next to checkpoint A, and the alignment beside it."""

import torch
from rich.console import Console
from rich.table import Table

import regauge as rg
from regauge.checkpoints.alignments import Alignment, alignment_path, save_alignment
from regauge.checkpoints.writing import require_writable, save
from regauge.cli.matching import checkpoints_of, method_of, task_for
from regauge.cli.options import Align
from regauge.core.params import Params


def run(options: Align) -> None:
    """Write the aligned checkpoint and its alignment, and print what they gained."""
    console = Console(stderr=True)
    beside = alignment_path(options.output)
    require_writable(options.output, overwrite=options.overwrite)
    require_writable(beside, overwrite=options.overwrite)
    symmetry, module, (params_a, params_b) = checkpoints_of(options, (options.a, options.b), console)
    task = task_for(options, module, params_a)
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


def distance(params_a: Params, params_b: Params) -> float:
    """Euclidean distance between two networks, over all floating-point parameters and buffers."""
    squares = [
        float((tensor.double() - params_b[name].double()).square().sum())
        for name, tensor in params_a.items()
        if tensor.is_floating_point()
    ]
    return float(sum(squares) ** 0.5)

"""Gauges of checkpoints that do not fit in memory.

Only rotations are used, and they are sampled without reading the weights.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from regauge.checkpoints.checkpoint import Checkpoint
from regauge.checkpoints.writing import Pieces
from regauge.core.arguments import check_arguments
from regauge.core.families import row_ranges
from regauge.core.params import require_finite
from regauge.core.symmetry import Symmetry
from regauge.core.task import Task, arguments
from regauge.gauging.gauge_method import fixed_reasons
from regauge.gauging.measures import LayerMeasures
from regauge.gauging.methods.best_gauge import NOTHING_BETTER, OF_WEIGHTS, BestGauge
from regauge.gauging.methods.spreading_rotations import Hadamard, Rotation
from regauge.gauging.moves import Move, Uncovered, apply_moves, move_tensor, rotating, uncover_rotations
from regauge.gauging.result import AS_IT_IS, Chosen, Trials
from regauge.gauging.rounding import REPORTED, layer_rows

STREAMED_BYTES = 1 << 23
"""The size in bytes, as float32, of the chunks in which tensors are transformed if tensors can be split."""


@check_arguments
def choose_streamed(
    checkpoint: Checkpoint,
    symmetry: Symmetry,
    method: BestGauge,
    *,
    task: Task | None = None,
    generator: torch.Generator,
) -> Chosen:
    """Sample rotations for a checkpoint on the disk, and keep them if the rounding error of layers does not grow.

    Either all rotations are kept, or no rotation is kept. Translations are not removed, because they add products of
    tensors. The mean over layers of the relative squared rounding error must not grow. The rounding error must not grow
    for the method's rounding scheme, nor for 8, 4 and 3 bits per row. In large layers, the error is measured on a
    subset of the rows.

    Args:
        checkpoint: The network.
        symmetry: The symmetry of its architecture.
        method: The method, whose first rotation is sampled. If the method is a `BestGauge` without a list of methods,
            the rotation is a Hadamard matrix.
        task: The module, which may be on the meta device, example inputs for tracing, and the outputs to preserve.
            Without a task, gains that prevent rotations are not changed.
        generator: The random generator.

    Raises:
        ValueError: The method contains no rotation, or compares networks by a loss.
    """
    methods = (Hadamard(method.scheme),) if method.methods is None else method.methods
    rotation = next((one for one in methods if isinstance(one, Rotation)), None)
    if rotation is None or method.by == "loss":
        raise ValueError("tensor by tensor, only rotations are possible, and the loss is not measured")
    uncovered = Uncovered(None, rotating(symmetry), {})
    if task is not None and not symmetry.ones:
        inputs, kwargs = arguments(next(iter(task.batches))[0])
        read = _reader(checkpoint, symmetry)
        uncovered = uncover_rotations(read, symmetry, task.module, inputs, kwargs, task.outputs)
    before = () if uncovered.before is None else (uncovered.before,)
    moves = (*before, Move(uncovered.symmetry, rotation.rotate(uncovered.symmetry, generator)))
    measures = LayerMeasures(symmetry, [*dict.fromkeys((method.scheme, *REPORTED))])
    pieces = moved_pieces(checkpoint, moves, measures)
    for name in layer_rows(symmetry):
        for _ in pieces(name) if name in checkpoint.stored else ():
            pass
    rows = measures.totals()
    is_better = bool(rows) and all(row["after"] <= row["before"] for row in rows)
    kept = rotation.label if is_better or method.is_kept_always else AS_IT_IS
    values = {AS_IT_IS: rows[0]["before"], rotation.label: rows[0]["after"]} if rows else {}
    trials = Trials(f"mean relative squared error of weights rounded to {method.scheme}", values, kept)
    notes = ["only all rotations together were tried, because the checkpoint is transformed tensor by tensor"]
    if kept == AS_IT_IS:
        moves = (Move(symmetry, symmetry.identity()),)
        notes.append(NOTHING_BETTER)
    after, before_it = (-values.get(name, 0.0) for name in (kept, AS_IT_IS))
    return Chosen(moves, after, before_it, (), OF_WEIGHTS, fixed_reasons(symmetry, uncovered), tuple(notes), trials)


def _reader(checkpoint: Checkpoint, symmetry: Symmetry) -> Callable[[str], Tensor]:
    """Return a function that reads a parameter by any of its names."""
    alias = {name: names for names in symmetry.tied for name in names}

    def read(name: str) -> Tensor:
        known = next((one for one in (name, *alias.get(name, ())) if one in checkpoint.stored), name)
        return checkpoint.read(known) if known in checkpoint.stored else checkpoint.params[name]

    return read


def moved_pieces(checkpoint: Checkpoint, moves: tuple[Move, ...], measures: LayerMeasures) -> Pieces:
    """Return a function that yields transformed tensors in chunks, and passes them to `measures`.

    If the moves contain translations, all tensors are computed together instead of in chunks.
    """
    made = apply_moves(moves, checkpoint.params) if any(move.element.translation for move in moves) else {}

    def pieces(name: str) -> Iterator[Tensor]:
        if made:
            measures.add(name, checkpoint.read(name), made[name])
            yield made[name]
            return
        shape = checkpoint.stored[name].shape
        ranges = [row_ranges(move.symmetry, name, shape, STREAMED_BYTES) for move in moves]
        for rows in next((one for one in ranges if one == [None]), ranges[0]):
            tensor = checkpoint.read(name, rows=rows)
            require_finite({name: tensor}, checkpoint.label, moves[0].symmetry.structure)
            moved = move_tensor(moves, name, tensor)
            measures.add(name, tensor, moved)
            yield moved

    return pieces

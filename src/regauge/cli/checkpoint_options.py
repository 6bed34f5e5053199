"""Options of `regauge canonicalize`, `regauge apply` and `regauge info`."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from regauge.cli.options import CHECKPOINT, Checkpoint, Json, ModelOptions, Output, Overwrite, OverwriteAll, Written


@dataclass(frozen=True)
class Canonicalize(ModelOptions):
    """Bring a checkpoint to its canonical form: the same for all networks on its orbit, and of the same function.

    The element that does it is stored next to the output, as OUT.alignment.safetensors, for `regauge apply`.
    """

    checkpoint: Checkpoint
    output: Output
    """The canonical checkpoint: a .safetensors file or a folder."""
    reference: Annotated[Path | None, CHECKPOINT, arg(metavar="CHECKPOINT")] = None
    """Fix signs and order by alignment to this checkpoint of the same architecture, instead of sums and sorting."""
    overwrite: OverwriteAll = False
    memory: Annotated[str, arg(metavar="SIZE")] = ""
    """Limit on memory, for example 3GB; half of the machine's where left out. All values, in float64, must fit."""
    written: Annotated[Written, arg(name="")] = field(default_factory=Written)


@dataclass(frozen=True)
class Apply:
    """Apply a stored alignment to another checkpoint of the same architecture, or undo it.

    The checkpoint is read, moved and written tensor by tensor: it may be larger than memory.
    """

    alignment: Positional[Path]
    """File that `regauge align` stored next to its output: OUT.alignment.safetensors, or OUT.safetensors for short."""
    checkpoint: Checkpoint
    output: Output
    """The moved checkpoint: a .safetensors file or a folder."""
    inverse: bool = False
    """Undo the alignment instead."""
    overwrite: Overwrite = False
    written: Annotated[Written, arg(name="")] = field(default_factory=Written)
    json: Json = False


@dataclass(frozen=True)
class Info:
    """Say what a checkpoint is: tensors, dtypes, sizes, the strings in its header, and where it comes from."""

    checkpoint: Checkpoint
    tensors: bool = False
    """List every tensor with its shape and dtype."""
    json: Json = False

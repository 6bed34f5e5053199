"""Options of `regauge canonicalize`, `regauge apply` and `regauge info`."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from regauge.cli.options import CHECKPOINT, Checkpoint, Json, ModelOptions, Output, Overwrite, OverwriteAll, Written


@dataclass(frozen=True)
class Canonicalize(ModelOptions):
    """Bring a checkpoint to canonical form: the same function, and the same weights for all symmetric copies.

    The applied element is stored next to the output, as OUT.alignment.safetensors, for `regauge apply`.
    """

    checkpoint: Checkpoint
    output: Output
    """The canonical checkpoint: a .safetensors file or a folder."""
    reference: Annotated[Path | None, CHECKPOINT, arg(metavar="CHECKPOINT")] = None
    """Choose signs and order by alignment to this checkpoint of the same architecture, instead of by fixed rules."""
    overwrite: OverwriteAll = False
    memory: Annotated[str, arg(metavar="SIZE")] = ""
    """Limit on memory, for example 3GB; by default half of the machine's memory. All values must fit in float64."""
    written: Annotated[Written, arg(name="")] = field(default_factory=Written)


@dataclass(frozen=True)
class Apply:
    """Apply a stored alignment to another checkpoint of the same architecture, or undo it.

    The checkpoint is read, transformed and written tensor by tensor, so it may be larger than memory.
    """

    alignment: Positional[Path]
    """The alignment that `regauge align` stored: OUT.alignment.safetensors. You may also give OUT.safetensors."""
    checkpoint: Checkpoint
    output: Output
    """The transformed checkpoint: a .safetensors file or a folder."""
    inverse: bool = False
    """Apply the inverse, which undoes the alignment."""
    overwrite: Overwrite = False
    written: Annotated[Written, arg(name="")] = field(default_factory=Written)
    json: Json = False


@dataclass(frozen=True)
class Info:
    """Print the tensors, dtypes and sizes of a checkpoint, the strings in its header, and how it was made."""

    checkpoint: Checkpoint
    tensors: bool = False
    """List every tensor with its shape and dtype."""
    json: Json = False

"""Options of `regauge prune`. Nothing here imports torch, so that `--help` answers at once."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from tyro.conf import arg

from regauge.cli.options import BATCHES_HELP, Batch, Checkpoint, JudgedOptions, Output, OverwriteAll, Written


@dataclass(frozen=True)
class Prune(JudgedOptions):
    """Remove hidden units, channels and heads from all tensors of a checkpoint, and write a smaller checkpoint.

    Units without influence on the outputs are removed first; without --share, the function therefore stays the same. A
    report is written next to OUT: OUT.prune.json and the page OUT.prune.html, or regauge.prune.json and .html in OUT.
    """

    checkpoint: Checkpoint
    output: Output
    """The smaller checkpoint: a .safetensors file, or a folder with an updated config.json."""
    share: float = 0.0
    """Share of the units of each group that is removed, including unneeded units; from 0 to below 1."""
    criterion: Literal["magnitude", "taylor", "output", "random"] | None = None
    """Which units are removed: those with the smallest magnitude (sum of squared weights), taylor (gradient times
    weight), or output (change of the next layer's outputs, after refitting the layer to the kept units). By default
    output with --data, and magnitude without (page "pruning" of the documentation)."""
    groups: tuple[str, ...] = ()
    """Groups from which --share is removed, by their names in `regauge discover`; by default all possible groups."""
    data: Annotated[str | None, arg(metavar="DATA", help=BATCHES_HELP + "Criteria and losses use these data.")] = None
    batch: Batch = 64
    overwrite: OverwriteAll = False
    memory: Annotated[str, arg(metavar="SIZE")] = ""
    """Limit on memory, for example 4GB; by default half of the machine's memory."""
    written: Annotated[Written, arg(name="")] = field(default_factory=Written)

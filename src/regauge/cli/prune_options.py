"""Options of `regauge prune`. Nothing here imports torch, so that `--help` answers at once."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from tyro.conf import arg

from regauge.cli.options import BATCHES_HELP, Batch, Checkpoint, JudgedOptions, Output, OverwriteAll, Written


@dataclass(frozen=True)
class Prune(JudgedOptions):
    """Remove units of a checkpoint everywhere at once: hidden units, channels, heads; a smaller checkpoint that runs.

    Units that the network does not need are removed first, checked on outputs: without --share, the function stays. The
    report is next to the output: OUT.prune.json and the page OUT.prune.html, in a folder regauge.prune.json and .html.
    """

    checkpoint: Checkpoint
    output: Output
    """The smaller checkpoint: a .safetensors file or a folder, whose config.json is changed, too."""
    share: float = 0.0
    """Share of the units of each group that are removed in all, from 0 to below 1."""
    criterion: Literal["magnitude", "taylor", "output", "random"] | None = None
    """Criterion by which units are removed. Where left out: output with --data, and magnitude without. magnitude: sums
    of squares. taylor: gradient times weight. output: the change of what layers put out, with the weights that read the
    other units fitted (page "pruning" of the documentation)."""
    groups: tuple[str, ...] = ()
    """Groups that the share is for, as `regauge discover` names them; all that can be cut where left out."""
    data: Annotated[str | None, arg(metavar="DATA", help=BATCHES_HELP + "They serve criteria and the loss.")] = None
    batch: Batch = 64
    overwrite: OverwriteAll = False
    memory: Annotated[str, arg(metavar="SIZE")] = ""
    """Limit on memory, for example 4GB; half of the machine's memory where left out."""
    written: Annotated[Written, arg(name="")] = field(default_factory=Written)

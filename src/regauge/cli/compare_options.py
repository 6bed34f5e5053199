"""Options of `regauge compare`. Nothing here imports torch, so that `--help` answers at once."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from regauge.cli.options import DATA_HELP, Batch, Checkpoints, JudgedOptions, MaybeOutput, Overwrite


@dataclass(frozen=True, kw_only=True)
class Compare(JudgedOptions):
    """Judge whether B is the same network as A, in another gauge, its descendant, or neither.

    B is aligned to A. Then distances are measured, the share of each layer of A that B explains, and whether units
    correspond in their order as stored. The p-value of that order is exact unless the order was chosen. Order alone
    makes no descendant: a network may have been aligned to A. The page "comparison" of the documentation explains the
    verdicts. For three or more checkpoints, or all in a folder, every pair is compared, related ones make a tree, and
    averages of others are listed.
    """

    checkpoints: Positional[Checkpoints]
    output: MaybeOutput = None
    """Write a page to this file, .html: with the picture of all layers, or with the matrix and the trees."""
    data: Annotated[str | None, arg(metavar="DATA", help=DATA_HELP)] = None
    batch: Batch = 512
    draws: int = 999
    """Random elements of the test of independence; the smallest p-value is 1 / (1 + draws)."""
    memory: Annotated[str, arg(metavar="SIZE")] = ""
    """Limit on memory, for example 3GB; half of the machine's memory where left out. Networks that need more
    are read in sweeps over their files, and have no fingerprints."""
    exact: bool = False
    """Compare all values of two large networks in any case. Otherwise a sample decides where it can."""
    database: Annotated[Path | None, arg(metavar="FILE")] = None
    """A file of fingerprints, .safetensors: each checkpoint is compared with its nearest networks."""
    add: bool = False
    """Add the checkpoints to the database, which is made where it is not there."""
    nearest: int = 5
    """Networks of the database that each checkpoint is compared with."""
    overwrite: Overwrite = False

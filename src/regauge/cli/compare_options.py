"""Options of `regauge compare`. Nothing here imports torch, so that `--help` answers at once."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from regauge.cli.options import DATA_HELP, Batch, Checkpoints, JudgedOptions, MaybeOutput, Overwrite


@dataclass(frozen=True, kw_only=True)
class Compare(JudgedOptions):
    """Find out whether B is a symmetric copy of A, a descendant of A, or an unrelated network.

    The command aligns B to A. The command measures distances, the share of each layer of A that B explains, and whether
    units correspond in the stored order. The p-value of the correspondence is exact, unless somebody chose the order,
    for example by aligning B to A. The page "comparison" of the documentation explains the verdicts. For three or more
    checkpoints, or a folder of them, the command compares every pair, draws related networks as trees, and lists
    networks that are averages of others.
    """

    checkpoints: Positional[Checkpoints]
    output: MaybeOutput = None
    """Write a page about the comparison to this .html file."""
    data: Annotated[str | None, arg(metavar="DATA", help=DATA_HELP)] = None
    batch: Batch = 512
    draws: int = 999
    """Number of random transformations in the test of independence. The smallest p-value is 1 / (1 + draws)."""
    memory: Annotated[str, arg(metavar="SIZE")] = ""
    """Limit on memory, for example 3GB; by default half of the machine's memory. Larger networks are read in passes
    over their files, and get no fingerprints."""
    exact: bool = False
    """Compare all values of two large networks. By default, a sample of them is used if it is enough for a verdict."""
    database: Annotated[Path | None, arg(metavar="FILE")] = None
    """A .safetensors file of fingerprints. Each checkpoint is compared with the nearest networks of this database."""
    add: bool = False
    """Add the checkpoints to the database; create it if it does not exist."""
    nearest: int = 5
    """Number of networks in the database with which each checkpoint is compared."""
    overwrite: Overwrite = False

"""The options of `regauge reproduce`, free of torch: the command line finds them by an entry point."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg


@dataclass(frozen=True)
class Reproduce:
    """Run an experiment of a paper: a table with the paper's numbers next to ours, and a picture.

    Without EXPERIMENT, the command lists all experiments. An interrupted run continues where it stopped, and the same
    command in a second terminal shares the steps.
    """

    paper: Annotated[Positional[str], arg(metavar="[PAPER]", help="000 to 004, or another group in the list.")] = ""
    experiment: Annotated[Positional[str], arg(metavar="[EXPERIMENT]", help="A name in the list.")] = ""
    scale: Literal["smoke", "cpu", "paper"] = "smoke"
    """smoke: a test that takes a minute. cpu: minutes or hours on a laptop. paper: the full experiment of the paper."""
    seed: Annotated[tuple[int, ...], arg(metavar="SEED ...")] = (0,)
    """Seed of all random numbers. Several seeds give one joint table; each seed has its own networks."""
    out: Path = Path("out/reproduce")
    """Folder for tables and pictures, and for networks and finished steps, which later runs reuse."""
    device: str = "cpu"
    """Device of training and evaluation: cpu, cuda or another device of torch; not for all experiments."""
    draw: Annotated[tuple[Path, ...], arg(metavar="RUN.json ...")] = ()
    """Write the table and the pictures of an earlier run again, from its .json file. Several runs of one experiment
    with different seeds are joined to one table and one .json file."""
    by_group: str = ""
    """With `--draw`: show only this column, as a table. A row `GROUP: WAY` goes to the row GROUP and the column WAY."""
    columns: Annotated[tuple[str, ...], arg(metavar="COLUMN ...")] = ()
    """With `--draw`: show only the columns with these headings."""

"""The options of `regauge reproduce`, free of torch: the command line finds them by an entry point."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg


@dataclass(frozen=True)
class Reproduce:
    """Run an experiment of a paper: a table with the paper's numbers next to ours, and a picture.

    Without an experiment: the list of all. An interrupted run continues where it stopped, and the same command in a
    second terminal takes a share of the steps.
    """

    paper: Annotated[Positional[str], arg(metavar="[PAPER]", help="000 to 004, or another group in the list.")] = ""
    experiment: Annotated[Positional[str], arg(metavar="[EXPERIMENT]", help="Its name in the list.")] = ""
    scale: Literal["smoke", "cpu", "paper"] = "smoke"
    """To see that it works, in a minute; what a laptop does in minutes or hours; everything that the paper did."""
    seed: Annotated[tuple[int, ...], arg(metavar="SEED ...")] = (0,)
    """Seed of all random numbers; several seeds make one table of all, each with networks of its own."""
    out: Path = Path("out/reproduce")
    """Folder for the tables and pictures, and for networks and finished steps, which later runs use again."""
    device: str = "cpu"
    """Where networks are trained and evaluated: cpu, cuda or another device of torch; not every experiment takes it."""
    draw: Annotated[tuple[Path, ...], arg(metavar="RUN.json ...")] = ()
    """Write the table and the pictures again from the numbers of an earlier run, its .json file; of several runs of one
    experiment with different seeds one table and one .json file are written."""
    by_group: str = ""
    """With `--draw`: of rows `GROUP: WAY` only this column, with a row for each group and a column for each way."""
    columns: Annotated[tuple[str, ...], arg(metavar="COLUMN ...")] = ()
    """With `--draw`: only these columns, by their headings."""

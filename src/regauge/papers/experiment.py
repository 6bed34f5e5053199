"""What an experiment is: a function from a frozen config to a table, with a config for every scale."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from regauge.papers.run import Run, Scale
from regauge.papers.table import Table


@dataclass(frozen=True)
class Experiment:
    """One experiment.

    Attributes:
        summary: One line for the list.
        config: The settings at a scale.
        measure: Runs the experiment with such settings.
    """

    summary: str
    config: Callable[[Scale], Any]
    measure: Callable[[Any, Run], Table]

    def __call__(self, run: Run) -> Table:
        return self.measure(self.config(run.scale), run)


Experiments = Mapping[str, Experiment]

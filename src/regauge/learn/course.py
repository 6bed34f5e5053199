"""The history of a training run: the epochs with their validations, and the weights of the best epoch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from regauge.core.params import Params


class Validation(NamedTuple):
    """The result of a validation. The field `order` is smaller for better nets, and `facts` contains numbers to
    print.
    """

    order: tuple[float, ...]
    facts: dict[str, float]


@dataclass(frozen=True)
class Trained:
    """The history of a finished training run.

    Attributes:
        history: One row per epoch: the epoch, the total number of steps, the mean training loss, the final learning
            rate, the elapsed seconds, and the facts of the validation.
        best: The epoch whose weights were kept, as in `history`.
        ended: The reason for the end of training: "epochs", "patience" or "seconds".
    """

    history: tuple[Mapping[str, float], ...]
    best: int
    ended: str

    def after(self, earlier: Sequence[Mapping[str, float]]) -> "Trained":
        """Return the history of an earlier run, followed by the history of this run."""
        if not earlier:
            return self
        last = earlier[-1]
        added = {"epoch": last["epoch"] + 1, "step": last["step"], "seconds": last["seconds"]}
        rows = ({name: value + added.get(name, 0) for name, value in row.items()} for row in self.history)
        return Trained((*earlier, *rows), self.best + len(earlier), self.ended)


@dataclass
class Course:
    """The state of a training run that has not ended.

    Attributes:
        best: The weights with the best validation. Before the first validation, the initial weights.
        order: The `order` of the best validation; empty before the first validation.
        best_epoch: The epoch in which `best` was found.
        history: The rows of the completed epochs; see `Trained`.
        step: The number of completed steps.
        total: The sum of the losses in the current epoch.
        count: The number of losses in the current epoch.
        rate: The learning rate of the last step.
        seconds: The number of seconds spent on training.
        ended: The reason for the end of training; empty while training continues.
    """

    best: Params
    order: list[float] = field(default_factory=list)
    best_epoch: int = 0
    history: list[dict[str, float]] = field(default_factory=list)
    step: int = 0
    total: float = 0.0
    count: int = 0
    rate: float = 0.0
    seconds: float = 0.0
    ended: str = ""

    @property
    def known(self) -> dict[str, Any]:
        """The state of the training run without the weights, as JSON."""
        return {name: value for name, value in vars(self).items() if name != "best"}

    @property
    def trained(self) -> Trained:
        """The history of a training run that has ended."""
        return Trained(tuple(self.history), self.best_epoch, self.ended)

    def add(self, loss: float, rate: float) -> None:
        """Record the loss and the learning rate of a step."""
        self.step, self.total, self.count, self.rate = self.step + 1, self.total + loss, self.count + 1, rate

    def is_better(self, found: Validation) -> bool:
        """End an epoch with its validation, and return whether this validation is the best so far.

        Raises:
            ValueError: The validation is not finite.
        """
        if not all(map(math.isfinite, found.order)):
            raise ValueError(
                f"the validation loss was {found.order[-1]} after step {self.step}; lower the learning rate, or look "
                "for networks with huge values"
            )
        row = {"epoch": len(self.history), "step": self.step, "loss": self.total / self.count, "lr": self.rate}
        self.history.append({**row, **found.facts})
        self.total, self.count = 0.0, 0
        if self.order and found.order >= tuple(self.order):
            return False
        self.order, self.best_epoch = list(found.order), len(self.history) - 1
        return True

    def is_stale(self, patience: int | None) -> bool:
        """Return whether `patience` epochs have passed since the best epoch."""
        return patience is not None and len(self.history) - 1 - self.best_epoch >= patience

"""The course of a training: its epochs with their validations, and the weights of the best one."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from regauge.core.params import Params


class Validation(NamedTuple):
    """The result of a validation: `order` is smaller for better nets, and `facts` are values to print."""

    order: tuple[float, ...]
    facts: dict[str, float]


@dataclass(frozen=True)
class Trained:
    """The record of a training.

    Attributes:
        history: One row for each epoch: its number, the steps so far, the mean training loss, the final learning rate,
            the seconds so far, and the facts of the validation.
        best: The epoch whose weights were kept, as in `history`.
        ended: Why the training ended: "epochs", "patience" or "seconds".
    """

    history: tuple[Mapping[str, float], ...]
    best: int
    ended: str

    def after(self, earlier: Sequence[Mapping[str, float]]) -> "Trained":
        """Return this training appended to another one: epochs, steps and seconds continue those of the other
        history."""
        if not earlier:
            return self
        last = earlier[-1]
        added = {"epoch": last["epoch"] + 1, "step": last["step"], "seconds": last["seconds"]}
        rows = ({name: value + added.get(name, 0) for name, value in row.items()} for row in self.history)
        return Trained((*earlier, *rows), self.best + len(earlier), self.ended)


@dataclass
class Course:
    """The state of a training.

    Attributes:
        best: The weights with the best validation; the initial weights before the first validation.
        order: The `order` of the best validation; empty before the first validation.
        best_epoch: The epoch of `best`.
        history: Rows of the completed epochs; see `Trained`.
        step: The number of completed steps.
        total: Sum of the losses in the current epoch.
        count: Number of losses in the current epoch.
        rate: Learning rate of the last step.
        seconds: Seconds of training.
        ended: Why the training ended; empty while it goes on.
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
        """The state without the weights, as JSON."""
        return {name: value for name, value in vars(self).items() if name != "best"}

    @property
    def trained(self) -> Trained:
        """The result of a training that has ended."""
        return Trained(tuple(self.history), self.best_epoch, self.ended)

    def add(self, loss: float, rate: float) -> None:
        """Record the loss and the learning rate of a step."""
        self.step, self.total, self.count, self.rate = self.step + 1, self.total + loss, self.count + 1, rate

    def is_better(self, found: Validation) -> bool:
        """End an epoch with its validation, and return whether this validation is the best one so far.

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
        """Return whether the given number of epochs has passed since the best one."""
        return patience is not None and len(self.history) - 1 - self.best_epoch >= patience

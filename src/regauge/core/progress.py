"""Progress of long work: one protocol, which the command line shows as bars with an estimate of the time left."""

from typing import Protocol


class Advance(Protocol):
    """Advances one piece of work, from any thread."""

    def __call__(self, amount: float = 1, /, *, loss: float | None = None) -> object:
        """Count `amount` of the total as done.

        Args:
            amount: In the unit of the total.
            loss: Of the step that was done, where the work is a training that knows it.
        """


class Progress(Protocol):
    """Shows pieces of work that take long."""

    def __call__(self, label: str, total: float, /) -> Advance:
        """Begin a piece of work.

        Args:
            label: What is done, or the plural of what is counted: "training", "shards".
            total: Sum of all amounts that the work will advance by.

        Returns:
            A function that advances the work.
        """


def no_advance(amount: float = 1, /, *, loss: float | None = None) -> None:
    """Show nothing."""


def no_progress(label: str, total: float, /) -> Advance:
    """A `Progress` that shows nothing."""
    return no_advance

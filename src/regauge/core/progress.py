"""Progress of long work: one protocol, which the command line shows as bars with an estimate of the time left."""

from typing import Protocol


class Advance(Protocol):
    """Advances one piece of work, from any thread."""

    def __call__(self, amount: float = 1, /, *, loss: float | None = None) -> object:
        """Count an amount of the total as done, with the loss of the step where a training knows it."""


class Progress(Protocol):
    """Shows pieces of work that take long."""

    def __call__(self, label: str, total: float, /) -> Advance:
        """Begin a piece of work, labelled by what is done ("training") or counted ("shards"), of a total amount."""


def no_advance(amount: float = 1, /, *, loss: float | None = None) -> None:
    """Show nothing."""


def no_progress(label: str, total: float, /) -> Advance:
    """A `Progress` that shows nothing."""
    return no_advance

"""Progress of long work, which the command line shows as bars with an estimate of the time left; and who does it."""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
Made = TypeVar("Made")


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
    """Return a `Progress` that shows nothing."""
    return no_advance


class Unit:
    """A `Progress` of one unit of a piece of work, which advances the piece by the parts of the unit.

    The last hundredth of the unit is counted when it is finished, not when the last of its parts is done.

    Args:
        advance: Shows the progress of the piece.
    """

    def __init__(self, advance: Advance) -> None:
        self._advance, self._done = advance, 0.0

    def __call__(self, label: str, total: float, /) -> Advance:
        def advance(amount: float = 1, /, *, loss: float | None = None) -> None:
            share = min(amount / total, 0.99 - self._done)
            if share > 0:
                self._done += share
                self._advance(share, loss=loss)

        return advance

    def finish(self) -> None:
        """Count what is left of the unit."""
        self._advance(1 - self._done)


class Crew:
    """The processes that make an output together: here this one alone."""

    rank, size = 0, 1

    def first(self, make: Callable[[], T]) -> T:
        """Call a function in the first process, and send its result to all."""
        return make()

    def map(self, make: Callable[[T], Made], items: Iterable[T]) -> list[Made]:
        """Call a function of every item, each in one process, and send all results to all."""
        return [make(one) for one in items]

    def sum(self, tensors: "Mapping[Any, Tensor]") -> "dict[Any, Tensor]":
        """Sum tensors over all processes, by their keys; those that a process lacks count as zeros."""
        return dict(tensors)


ALONE = Crew()
"""One process."""

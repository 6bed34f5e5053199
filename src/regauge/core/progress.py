"""Progress of long work, shown as bars with the estimated time left, and groups of processes that work together."""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
Made = TypeVar("Made")


class Advance(Protocol):
    """A function that reports progress on one piece of work. Any thread may call the function."""

    def __call__(self, amount: float = 1, /, *, loss: float | None = None) -> object:
        """Report that an amount of the total work is done. A training loop also passes the loss of the step."""


class Progress(Protocol):
    """A function that starts to show the progress of a long piece of work."""

    def __call__(self, label: str, total: float, /) -> Advance:
        """Begin a piece of work of the given total amount, and return the function that reports its progress.

        The label names the activity, such as "training", or the items, such as "shards".
        """


def no_advance(amount: float = 1, /, *, loss: float | None = None) -> None:
    """Do nothing: a progress function that shows nothing."""


def no_progress(label: str, total: float, /) -> Advance:
    """Return a `Progress` that shows nothing."""
    return no_advance


class Crew:
    """The processes that compute an output together. The base class `Crew` represents a single process."""

    rank, size = 0, 1

    def first(self, make: Callable[[], T]) -> T:
        """Call a function in the first process, and send its result to all processes."""
        return make()

    def map(self, make: Callable[[T], Made], items: Iterable[T]) -> list[Made]:
        """Call a function for every item, spread over the processes, and send all results to all processes."""
        return [make(one) for one in items]

    def sum(self, tensors: "Mapping[Any, Tensor]") -> "dict[Any, Tensor]":
        """Sum tensors that have the same key over all processes.

        A process that lacks a tensor contributes zeros to the sum.
        """
        return dict(tensors)


ALONE = Crew()
"""A crew of one process."""

"""Progress of long work, which the command line shows as bars with the estimated time left; crews of processes."""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
Made = TypeVar("Made")


class Advance(Protocol):
    """A function that reports progress on one piece of work. Any thread may call it."""

    def __call__(self, amount: float = 1, /, *, loss: float | None = None) -> object:
        """Count an amount of the total as done. A training loop also passes the loss of the step."""


class Progress(Protocol):
    """A function that starts to show the progress of a long piece of work."""

    def __call__(self, label: str, total: float, /) -> Advance:
        """Begin a piece of work that has a total amount.

        The label names the activity ("training") or the items ("shards").
        """


def no_advance(amount: float = 1, /, *, loss: float | None = None) -> None:
    """Show nothing: a progress function without effect."""


def no_progress(label: str, total: float, /) -> Advance:
    """Return a `Progress` that shows nothing."""
    return no_advance


class Crew:
    """The processes that compute an output together. This base class represents a single process."""

    rank, size = 0, 1

    def first(self, make: Callable[[], T]) -> T:
        """Call a function in the first process, and send its result to all processes."""
        return make()

    def map(self, make: Callable[[T], Made], items: Iterable[T]) -> list[Made]:
        """Call a function for every item, each item in one of the processes, and send all results to all processes."""
        return [make(one) for one in items]

    def sum(self, tensors: "Mapping[Any, Tensor]") -> "dict[Any, Tensor]":
        """Sum tensors that have the same key over all processes. A process that lacks a tensor contributes zero."""
        return dict(tensors)


ALONE = Crew()
"""A crew of one process."""

"""How long work on populations tells its progress."""

from collections.abc import Callable

Watch = Callable[[int], Callable[[], None]]
"""Is told how many parts there are, and returns what to call after each."""


Told = Callable[[float], object]
"""Is told how much was done since."""


def untold(amount: float) -> None:
    """A `Told` that tells nobody."""


def unwatched(total: int) -> Callable[[], None]:
    """A `Watch` that tells nobody."""
    return lambda: None

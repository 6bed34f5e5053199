"""A cache for results that depend only on a symmetry, kept as long as the symmetry exists."""

from collections.abc import Callable, Hashable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar


class Remembering(Protocol):
    """A protocol: a symmetry with a memory for computed results."""

    @property
    def memory(self) -> dict[Hashable, Any]:
        """The results computed from the symmetry, by function and arguments."""


Owner = TypeVar("Owner", bound=Remembering)
Result = TypeVar("Result")
Given = ParamSpec("Given")


def remembered(compute: Callable[Concatenate[Owner, Given], Result]) -> Callable[Concatenate[Owner, Given], Result]:
    """Keep the results of a function of a symmetry and hashable arguments as long as the symmetry exists.

    Finding the places where groups act can take longer than aligning small networks. Results are shared by all callers,
    so callers must not change them.
    """
    name = f"{compute.__module__}.{compute.__qualname__}"

    @wraps(compute)
    def known(owner: Owner, /, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        key: tuple[Hashable, ...] = (name, args, *kwargs.items())
        if key not in owner.memory:
            owner.memory[key] = compute(owner, *args, **kwargs)
        found: Result = owner.memory[key]
        return found

    return known

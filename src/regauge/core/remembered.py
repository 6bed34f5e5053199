"""A cache for results that depend only on a symmetry. The results are kept as long as the symmetry exists."""

from collections.abc import Callable, Hashable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar


class Remembering(Protocol):
    """A protocol for symmetries that store computed results."""

    @property
    def memory(self) -> dict[Hashable, Any]:
        """The results computed from the symmetry, with function and arguments as keys."""


Owner = TypeVar("Owner", bound=Remembering)
Result = TypeVar("Result")
Given = ParamSpec("Given")


def remembered(compute: Callable[Concatenate[Owner, Given], Result]) -> Callable[Concatenate[Owner, Given], Result]:
    """Cache the results of a function of a symmetry and hashable arguments, as long as the symmetry exists.

    Finding the sites where groups act can take longer than aligning small networks. All callers share the results, so
    callers must not modify them.
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

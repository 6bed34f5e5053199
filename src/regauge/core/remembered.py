"""A cache for results that depend on a symmetry alone, kept as long as the symmetry."""

from collections.abc import Callable, Hashable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar


class Remembering(Protocol):
    """A symmetry, as far as it matters here."""

    @property
    def memory(self) -> dict[Hashable, Any]:
        """The results that were computed from it, by function and arguments."""


Owner = TypeVar("Owner", bound=Remembering)
Result = TypeVar("Result")
Given = ParamSpec("Given")


def remembered(compute: Callable[Concatenate[Owner, Given], Result]) -> Callable[Concatenate[Owner, Given], Result]:
    """Keep what a function of a symmetry and hashable arguments returns as long as the symmetry lives.

    Aligning small networks takes less time than finding out where their groups act. Results are shared by all callers,
    who must not change them.
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

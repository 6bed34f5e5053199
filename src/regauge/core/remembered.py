"""What follows from a symmetry alone, computed once for each symmetry."""

from collections.abc import Callable, Hashable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from regauge.core.symmetry import Symmetry

Result = TypeVar("Result")
Given = ParamSpec("Given")


def remembered(
    compute: Callable[Concatenate[Symmetry, Given], Result],
) -> Callable[Concatenate[Symmetry, Given], Result]:
    """Keep what a function of a symmetry and hashable arguments returns as long as the symmetry lives.

    Aligning small networks takes less time than finding out where their groups act. Results are shared by all callers,
    who must not change them.
    """
    name = f"{compute.__module__}.{compute.__qualname__}"

    @wraps(compute)
    def known(symmetry: Symmetry, /, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        key: tuple[Hashable, ...] = (name, args, *kwargs.items())
        if key not in symmetry.memory:
            symmetry.memory[key] = compute(symmetry, *args, **kwargs)
        found: Result = symmetry.memory[key]
        return found

    return known

"""Checks of the arguments of public functions.

An argument is checked according to its name, before the function runs.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar, get_args, get_origin

from torch import nn

from regauge.core.given import describe, is_plain, require_generator, require_module, require_plain
from regauge.core.symmetry import Symmetry
from regauge.core.task import Task

P = ParamSpec("P")
R = TypeVar("R")

RENAMED = {"inputs": "example_inputs", "kwargs": "example_kwargs"}
"""The old names of arguments, which are still accepted, and their present names."""
FIND = "symmetry = regauge.discover(module, example_inputs)"
TASK = "regauge.Task(module, [(inputs, targets), ...])"
JUDGE = f"{TASK}, or a function of parameters that returns {{'loss': ...}}"


def check_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Check the arguments of a public function before each call.

    A typical mistake in a call, such as a missing argument, raises an error of one sentence.

    Arguments with plain annotations (numbers, strings, booleans, paths, lists) are checked against the annotation.
    `CHECKS` contains the required class of each argument that must be an object of this package. If an argument is a
    sequence, each of its items is checked. Arguments named in `NEEDED` may not be missing. If a function takes
    networks, they must be its first arguments. Several networks must be given as one list, followed by the module.

    Raises:
        TypeError: An argument is missing, has another class, or stands in the position of another argument.
    """
    signature = inspect.signature(function)
    parameters = signature.parameters
    checked = {name: check for name, check in CHECKS.items() if name in parameters}
    several = {name for name in checked if _takes_several(parameters[name].annotation)}
    positional = [name for name, one in parameters.items() if one.kind is one.POSITIONAL_OR_KEYWORD]
    plain = {
        name: one.annotation
        for name, one in parameters.items()
        if name not in checked
        and is_plain(one.annotation)
        and not (name == "params" and _takes_several(one.annotation))
    }
    needed = {
        name: way
        for name, way in NEEDED.items()
        if name in parameters and parameters[name].default is inspect.Parameter.empty
    }

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for old in [old for old in kwargs if RENAMED.get(old) in parameters and old not in parameters]:
            kwargs[RENAMED[old]] = kwargs.pop(old)
        if len(args) > len(positional) > 1 and _takes_several(parameters[positional[0]].annotation):
            raise TypeError(
                f"{len(args)} positional arguments were given, but all networks together are one argument: write them "
                "as a list, [params_a, params_b], and then the symmetry"
            )
        if args and isinstance(args[0], nn.Module) and "module" in positional[1:]:
            behind = args[positional.index("module") :][:1]
            if not any(isinstance(one, nn.Module) for one in behind):
                raise TypeError(
                    "the module is the first argument, but networks come before it: write "
                    f"{function.__name__}({', '.join(positional)})"
                )
        try:
            given = signature.bind_partial(*args, **kwargs).arguments
        except TypeError:
            return function(*args, **kwargs)  # Python's error names the unexpected argument.
        missing = next((name for name in needed if name not in given), None)
        if missing is not None:
            raise TypeError(f"{function.__name__}() is missing {missing!r}; write {needed[missing]}")
        for name, check in checked.items():
            if name in given and not (given[name] is None and parameters[name].default is None):
                is_several = name in several and isinstance(given[name], list | tuple)
                for one in given[name] if is_several else (given[name],):
                    check(one)
        for name, annotation in plain.items():
            if name in given:
                require_plain(name, given[name], annotation)
        return function(*args, **kwargs)

    return call


def _takes_several(annotation: object) -> bool:
    return any(get_origin(one) is Sequence for one in (annotation, *get_args(annotation)))


def require_symmetry(symmetry: object) -> None:
    """Raise a TypeError unless the argument is a symmetry."""
    if isinstance(symmetry, Symmetry):
        return
    way = f"write {FIND}"
    if isinstance(symmetry, str) or hasattr(symmetry, "__fspath__"):
        way = "read a file of one with regauge.Symmetry.from_json(path.read_text())"
    elif isinstance(getattr(symmetry, "symmetry", None), Symmetry):
        way = "write .symmetry behind it"
    raise TypeError(f"the symmetry is {describe(symmetry)}, but a regauge.Symmetry is expected: {way}")


def require_task(task: object) -> None:
    """Raise a TypeError unless the argument is a task."""
    if isinstance(task, Task):
        return
    raise TypeError(f"the task is {describe(task)}, but a regauge.Task is expected: write {TASK}")


def require_judge(judge: object) -> None:
    """Raise a TypeError unless the argument is a task, or a function that evaluates parameters."""
    if isinstance(judge, nn.Module) or not (isinstance(judge, Task) or callable(judge)):
        raise TypeError(f"the judge is {describe(judge)}, but a task or a function is expected: write {JUDGE}")


CHECKS: dict[str, Callable[[Any], None]] = {
    "module": require_module,
    "symmetry": require_symmetry,
    "task": require_task,
    "judge": require_judge,
    "generator": require_generator,
}
NEEDED = {
    "symmetry": FIND,
    "example_inputs": "a tuple of inputs that the module accepts, as in (torch.randn(2, 3),)",
    "task": TASK,
    "judge": JUDGE,
}
"""For each required argument, the expression that error messages suggest if this argument is missing."""

"""One operator call as a rule sees it: arguments by name, tensors as values, shapes of the results."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from regauge.discovery.builder import Builder
from regauge.discovery.laws import Value
from regauge.discovery.movement import Stacked

Rule = Callable[[Builder, "Call"], Any]


class NoRuleError(Exception):
    """A rule's way to say that it does not cover this call; the call is then treated as unknown."""


@dataclass(frozen=True)
class Call:
    """An operator call.

    Attributes:
        name: The operator without namespace and overload: "linear", "add".
        overload: Its overload: "default", "Tensor", "dim_IntList".
        arguments: Arguments by the names of the operator's schema, defaults included.
        shapes: Shapes of the tensors that it returns.
        is_float: Whether each returned tensor holds floating-point values, no coarser than the parameters are.
        is_used: Whether something uses each returned tensor.
    """

    name: str
    overload: str
    arguments: dict[str, Any]
    shapes: tuple[tuple[int, ...], ...]
    is_float: tuple[bool, ...]
    is_used: tuple[bool, ...] = ()

    def __getitem__(self, key: str) -> Any:
        return self.arguments[key]

    def get(self, key: str, default: Any = None) -> Any:
        value = self.arguments.get(key, default)
        return default if value is None else value

    def first(self, *keys: str) -> Any:
        """The first of these arguments that the schema has."""
        for key in keys:
            if key in self.arguments:
                return self.arguments[key]
        raise NoRuleError(f"{self.name} has none of the arguments {keys}")

    @property
    def x(self) -> Any:
        """The first argument."""
        return next(iter(self.arguments.values()))

    @property
    def shape(self) -> tuple[int, ...]:
        if not self.shapes:
            raise NoRuleError(f"{self.name} returns no tensor")
        return self.shapes[0]


def as_value(b: Builder, x: Any) -> Value:
    """An operand as one tensor with axes of its own if it is fixed."""
    if isinstance(x, Stacked):
        x = b.whole(x)
    if not isinstance(x, Value):
        raise NoRuleError(f"expected a tensor, found {type(x).__name__}")
    return b.use(x)


def ints(value: Any) -> list[int]:
    """A dimension or a list of dimensions."""
    if isinstance(value, int):
        return [value]
    if isinstance(value, Sequence):
        return [int(v) for v in value]
    raise NoRuleError(f"expected dimensions, found {value!r}")


def require_evaluation(call: Call) -> None:
    """Raise NoRuleError if the operator draws random numbers."""
    if call.get("train", call.get("training", False)):
        raise NoRuleError("chance")


def named(rule: Rule, names: str) -> dict[str, Rule]:
    """One rule under several operator names, given as words of one text."""
    return dict.fromkeys(names.split(), rule)

"""Settings of a rule whose values may differ between tensors, by depth and by name."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, Union

from regauge.checkpoints.names.prefixes import LAYER
from regauge.core.given import require_plain

Number: TypeAlias = Union[float, "Setting"]
"""One number for all tensors, or a setting that differs between tensors."""
Numbers: TypeAlias = Number | tuple[Number, ...]
"""One number or setting for all networks, or one for each network."""


@dataclass(frozen=True, repr=False)
class Setting:
    """A setting of a rule that gives a number for each tensor of a network.

    Several `values` form a gradient over the depth. The values apply at equidistant depths from the first layer to the
    last layer, with linear interpolation in between. Tensors outside of layers have depth zero and get the first value.

    The text form is a number such as `0.5`, a gradient such as `0,0.5,1`, or a list such as `mlp=0.5/attn=0,1/0.3`. A
    list first gives values for tensors whose names contain a substring. The last item of the list gives the values for
    all other tensors.

    Attributes:
        values: At least one number, for tensors whose names contain no substring in `where`.
        where: Pairs of a substring of tensor names and the values for these tensors. The first substring that occurs in
            a tensor's name applies.

    References:
        Goddard et al. (2024), mergekit: conditional parameters with filters, and gradients.
    """

    values: tuple[float, ...]
    where: tuple[tuple[str, tuple[float, ...]], ...] = ()

    def __post_init__(self) -> None:
        for values in (self.values, *(values for _, values in self.where)):
            if not values or not all(math.isfinite(x) for x in values):
                raise ValueError(f"the values of a setting are {list(values)}; give one finite number at least")
        if not all(pattern for pattern, _ in self.where):
            raise ValueError(
                "a part of a name in a setting is empty; give a part of a name, and the value for all other "
                "tensors last"
            )

    @classmethod
    def parse(cls, text: str) -> "Setting":
        """Read a setting from its text form.

        Raises:
            ValueError: The text cannot be read, or has no value for tensors whose names contain no given substring.
        """
        where: list[tuple[str, tuple[float, ...]]] = []
        *named, last = text.split("/")
        for part in named:
            pattern, equals, values = part.rpartition("=")
            if not equals:
                raise ValueError(_unreadable(text))
            where.append((pattern, _read_values(values, text)))
        return cls(_read_values(last, text), tuple(where))

    def at(self, name: str, depth: float = 0.0) -> float:
        """Return the number for the tensor `name` at a depth in [0, 1], as `find_depths` returns it."""
        values = next((own for pattern, own in self.where if pattern in name), self.values)
        position = depth * (len(values) - 1)
        first = min(int(position), len(values) - 1)
        share = position - first
        if not share:
            return values[first]
        return (1 - share) * values[first] + share * values[first + 1]

    @property
    def numbers(self) -> tuple[float, ...]:
        """All numbers in the setting."""
        return (*self.values, *(x for _, values in self.where for x in values))

    def __str__(self) -> str:
        parts = [*(f"{pattern}={_text(values)}" for pattern, values in self.where), _text(self.values)]
        return "/".join(parts)

    def __repr__(self) -> str:
        return f"Setting.parse({str(self)!r})"


def find_depths(names: Iterable[str]) -> dict[str, float]:
    """Return the relative depth of each tensor, from 0 in the first layer to 1 in the last layer; 0 outside of layers.

    The first number between two dots in a name is the layer index, such as the 7 in `model.layers.7.mlp.up_proj`.
    Layers with the same name before the index form one stack, ordered by index. An encoder and a decoder therefore have
    separate depths, and experts within a layer have the depth of the layer. A stack of one layer has depth 1.

    References:
        Goddard et al. (2024), mergekit, which interpolates over the layers in the same way.
    """
    found = {name: LAYER.search(name) for name in names}
    stacks: dict[str, set[int]] = {}
    for name, match in found.items():
        if match is not None:
            stacks.setdefault(name[: match.start()], set()).add(int(match[1]))
    order = {prefix: {layer: k for k, layer in enumerate(sorted(layers))} for prefix, layers in stacks.items()}
    depths = {}
    for name, match in found.items():
        if match is None:
            depths[name] = 0.0
        else:
            layers = order[name[: match.start()]]
            depths[name] = layers[int(match[1])] / (len(layers) - 1) if len(layers) > 1 else 1.0
    return depths


def numbers_of(value: Numbers) -> tuple[float, ...]:
    """Return every number in a setting of a rule."""
    if isinstance(value, tuple):
        return tuple(x for one in value for x in numbers_of(one))
    return value.numbers if isinstance(value, Setting) else (float(value),)


def require_numbers(what: str, value: Numbers, is_valid: Callable[[float], bool], meaning: str) -> None:
    """Raise a ValueError unless every number of a setting is valid; `meaning` describes the setting and its range."""
    for x in numbers_of(value):
        if not is_valid(x):
            raise ValueError(f"{what} is {x}; it is {meaning}")


def read_number(text: str) -> Number:
    """Return the number or the setting that a string describes."""
    found = Setting.parse(text)
    return found.values[0] if len(found.values) == 1 and not found.where else found


def read_numbers(texts: Sequence[str]) -> Numbers:
    """Return the numbers or settings that strings describe, one for all networks or one for each network."""
    found = tuple(read_number(text) for text in texts)
    return found[0] if len(found) == 1 else found


def as_weights(weights: "Sequence[Number | str] | None") -> tuple[Number, ...] | None:
    """Return the weights of networks; parse weights that are strings."""
    if weights is None:
        return None
    for one in weights:
        require_plain("a weight", one, float | str | Setting)
    return tuple(read_number(one) if isinstance(one, str) else one for one in weights)


def _read_values(text: str, whole: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(_unreadable(whole)) from None


def _unreadable(text: str) -> str:
    return (
        f"the setting {text!r} cannot be read; write a number (0.5), values to interpolate over the depth (0,0.5,1), "
        "or parts of names with their values, and the value for all other tensors last (mlp=0.5/attn=0,1/0.3)"
    )


def _text(values: Sequence[float]) -> str:
    return ",".join(f"{x!r}".removesuffix(".0") for x in values)


def require_scale(scale: Number) -> None:
    """Raise a ValueError unless every number of a scale is finite."""
    require_numbers("scale", scale, math.isfinite, "a factor and must be finite")

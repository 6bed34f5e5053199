"""The architecture of a population: a recipe for building its module, and the tensors of each network."""

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import nn

from regauge.checkpoints.formats.headers import TensorSpec, layout_of
from regauge.core.params import Params
from regauge.core.symmetry_text import read_versioned
from regauge.core.typed_json import require_fields

FORMAT = "regauge.architecture"
VERSION = 1
MOVED = {"regauge.nets.residual_mlp:ResidualMLP": "regauge.nets.mlp:ResidualMLP"}
"""Factories that old stores name, with their current names."""


@dataclass(frozen=True)
class Architecture:
    """A text description of a population's module, and the tensors of each network.

    `module()` calls the factory with the settings. A setting is a JSON value. The setting `{"import": "torch:tanh"}`
    stands for the object `torch.tanh`. A variadic parameter (`*widths`) has a list as its setting, under the
    parameter's name:

        >>> small = Architecture("MLP 4-3-2", "regauge.nets.mlp:mlp", {"widths": [4, 3, 2]})
        >>> small.layout[0].name, small.layout[0].shape
        ('layers.0.weight', (3, 4))
        >>> Architecture.from_json(small.to_json()) == small
        True

    The factory is imported and called only to build a module, never to read the text form. If an architecture comes
    from somebody else, call `module()` only if you trust the factory.

    Attributes:
        name: The name of the architecture, in words.
        factory: `package.module:name` of a function or class that returns a `torch.nn.Module`. None if only the tensors
            of the networks are known.
        settings: The arguments of the factory, by name.
        layout: The tensors of one network, including buffers, in the order of the state dictionary. By default, the
            tensors are found by building the module on the meta device.

    Raises:
        ValueError: The factory's name or a setting is malformed. The factory cannot be imported or called, or does not
            return a module. The error is also raised if there is neither a factory nor a layout.
    """

    name: str
    factory: str | None
    settings: Mapping[str, Any] = field(default_factory=dict)
    layout: tuple[TensorSpec, ...] = ()

    def __post_init__(self) -> None:
        try:
            plain = json.loads(json.dumps(dict(self.settings), allow_nan=False))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"the settings of {self.name!r} are not plain JSON ({error}); give numbers, texts, lists and mappings, "
                'and {"import": "package.module:name"} for an object'
            ) from error
        object.__setattr__(self, "settings", plain)
        if not self.layout:
            if self.factory is None:
                raise ValueError(f"architecture {self.name!r} has neither a factory nor a layout; give one of them")
            with torch.device("meta"):
                module = self.module()
            object.__setattr__(self, "layout", layout_of(module.state_dict()))

    def __hash__(self) -> int:
        # The hash leaves out the settings, because equal settings may differ in order, or have 1 instead of 1.0.
        return hash((self.name, self.factory, self.layout))

    @property
    def size(self) -> int:
        """The number of entries of one network, including buffers."""
        return sum(spec.size for spec in self.layout)

    def on_meta(self) -> Params:
        """Return the tensors of one network, uninitialized on the meta device."""
        return {spec.name: torch.empty(spec.shape, dtype=spec.dtype, device="meta") for spec in self.layout}

    def module(self) -> nn.Module:
        """Build the module, initialized by the factory.

        Raises:
            ValueError: There is no factory, or the factory cannot be imported or called, or does not return a module.
        """
        if self.factory is None:
            raise ValueError(
                f"architecture {self.name!r} lists only tensors; build one with a factory to run its networks"
            )
        function = import_object(self.factory)
        if not callable(function):
            raise ValueError(
                f"{self.factory!r} is a {type(function).__name__}, not a function or class; name a factory"
            )
        settings = {key: _resolve(value) for key, value in self.settings.items()}
        try:
            module = _call(function, settings)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self.factory!r} cannot be called with {dict(self.settings)}: {error}") from error
        if not isinstance(module, nn.Module):
            raise ValueError(f"{self.factory!r} returns a {type(module).__name__}; it must return a torch.nn.Module")
        return module

    def to_json(self) -> str:
        """Return the architecture as JSON text that includes the layout. Reading the text builds no module."""
        document = {
            "format": FORMAT,
            "version": VERSION,
            "name": self.name,
            "factory": self.factory,
            "settings": self.settings,
            "layout": [[name, list(shape), str(dtype).removeprefix("torch.")] for name, shape, dtype in self.layout],
        }
        return json.dumps(document)

    @classmethod
    def from_json(cls, text: str) -> "Architecture":
        """Read an architecture from its JSON text.

        Raises:
            ValueError: The text is not an architecture, or has another version.
        """
        document = read_versioned(text, FORMAT, VERSION)
        try:
            layout = tuple(_spec(*row) for row in document["layout"])
            if not layout:  # without one, the factory would be called, which may be any function
                raise ValueError("its layout names no tensor")
            found = cls(document["name"], document["factory"], document["settings"], layout)
            require_fields(vars(found), cls, "the architecture")
            if len({spec.name for spec in layout}) < len(layout):
                raise ValueError("two tensors of its layout have one name")
            return found
        except (KeyError, TypeError, RuntimeError, OverflowError) as error:
            reason = str(error).split("\n")[0]  # torch adds lines about its own code
            raise ValueError(f"this architecture is malformed: {type(error).__name__}: {reason}") from error


def import_object(text: str) -> Any:
    """Return the object with the name `package.module:name`. Names in old stores are mapped to their current names."""
    place, colon, name = MOVED.get(text, text).rpartition(":")
    if not (place and colon and name):
        raise ValueError(f"{text!r} does not name an object; write package.module:name")
    is_own = place.startswith("regauge.")
    try:
        module = import_module(place)
    except ImportError as error:
        if not (is_own and place == error.name):
            raise ValueError(f"{text!r} cannot be imported ({error}); is its package installed?") from error
        module = None
    if is_own and not hasattr(module, name):
        raise ValueError(
            f"{text!r} is no longer part of regauge, or never was; put it into a package of your own and name that, "
            'for the networks of a store as "factory" in its store.json'
        )
    if not hasattr(module, name):
        raise ValueError(f"{place!r} has no {name!r}; correct the name")
    return getattr(module, name)


def _resolve(value: Any) -> Any:
    """Return a setting in which names of objects are replaced by the objects."""
    if isinstance(value, dict):
        if value.keys() == {"import"}:
            return import_object(value["import"])
        return {key: _resolve(inner) for key, inner in value.items()}
    return [_resolve(inner) for inner in value] if isinstance(value, list) else value


def _call(function: Callable[..., Any], settings: dict[str, Any]) -> Any:
    """Call a function with arguments by name. The arguments of a variadic parameter are passed one by one."""
    parameters = inspect.signature(function).parameters.values()
    variadic = next((p.name for p in parameters if p.kind is inspect.Parameter.VAR_POSITIONAL), None)
    rest = dict(settings)
    values = rest.pop(variadic, ()) if variadic is not None else ()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    before = [rest.pop(p.name) for p in parameters if p.kind in positional and p.name in rest and values]
    return function(*before, *values, **rest)


def _spec(name: str, shape: list[int], text: str) -> TensorSpec:
    """Return the specification of one tensor of the layout. Raise an error for an invalid name, shape or dtype."""
    dtype = getattr(torch, text, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{text!r} is not a dtype of torch, such as 'float32'")
    if not isinstance(name, str) or any(type(size) is not int for size in shape):
        raise ValueError(
            f"{name!r} of shape {shape} is not a tensor; give floating-point or integer tensors of ordinary sizes"
        )
    return TensorSpec(name, tuple(torch.empty(shape, dtype=dtype, device="meta").shape), dtype)

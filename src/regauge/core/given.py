"""Checks of arguments of public functions: networks, settings, example inputs, batches and plain annotations."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import numpy as np
import torch
from torch import Generator, Tensor, nn

from regauge.core.params import Params

DICTIONARY = "a network is a dictionary from names to tensors, as `module.state_dict()` returns it"
LISTS = (Sequence, Collection, Iterable)
WORDS: dict[Any, str] = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "text",
    Mapping: "a mapping",
    Callable: "a function",
    NoneType: "None",
    **dict.fromkeys(LISTS, "a list"),
}
"""Words for plain types in error messages."""


def as_params(network: Any, what: str = "the network") -> Params:
    """Return the network that a caller gave, without gradients. The returned tensors share memory with the argument.

    This function raises the same errors as `require_tensors`.
    """
    require_tensors(network, what)
    return {name: tensor.detach() if tensor.requires_grad else tensor for name, tensor in network.items()}


def require_tensors(network: object, what: str = "the network") -> None:
    """Raise a TypeError unless the network that a caller gave is a dictionary of tensors."""
    if not isinstance(network, Mapping):
        raise TypeError(f"{what} is {describe(network)}, but {DICTIONARY}{_way_to_params(network)}")
    for name, value in network.items():
        if isinstance(value, Tensor) and (value.layout != torch.strided or value.is_nested):
            raise TypeError(f"{name!r} of {what} is nested or sparse; give a dense tensor, such as `.to_dense()`")
        if isinstance(value, Tensor) and isinstance(name, str):
            continue
        if isinstance(value, Tensor):
            raise TypeError(f"the name {name!r} in {what} is {describe(name)}, but {DICTIONARY}")
        inner = next((key for key, one in network.items() if _holds_tensors(one)), None)
        way = "" if inner is None else f"; this looks like a training checkpoint: give its entry {inner!r}"
        raise TypeError(f"{name!r} of {what} is {describe(value)}, but {DICTIONARY}{way}")


def as_networks(networks: object) -> list[Any]:
    """Return the networks in a list that a caller gave.

    Raises:
        TypeError: The networks are not a list.
    """
    if isinstance(networks, Mapping | str) or not isinstance(networks, Sequence):
        raise TypeError(f"the networks are {describe(networks)}; give a list of them: [params_a, params_b]")
    return list(networks)


def require_instance(value: object, kind: type, what: str, named: Mapping[str, str]) -> None:
    """Raise a TypeError unless an argument is an object of the required class.

    Args:
        value: The caller's argument.
        kind: The class that the argument must have.
        what: The name of the argument.
        named: For each possible object, its name on the command line and a Python expression that makes it.
    """
    if isinstance(value, kind):
        return
    if isinstance(value, type) and issubclass(value, kind):
        raise TypeError(f"{what} is the class {value.__name__}, not an object of it: write {what}={value.__name__}()")
    if isinstance(value, str) and value in named:
        raise TypeError(f"{what} is the text {value!r}, which is its name on the command line: write {named[value]}")
    raise TypeError(
        f"{what} is {describe(value)}, but a {kind.__name__} is expected, such as {next(iter(named.values()))}"
    )


def require_module(module: object) -> None:
    """Raise a TypeError unless the model that a caller gave is a module."""
    if isinstance(module, nn.Module):
        return
    what = f"the class {module.__name__}" if isinstance(module, type) else describe(module)
    way = f"; write {module.__name__}(...)" if isinstance(module, type) else ""
    if isinstance(module, tuple | list) and module and isinstance(module[0], nn.Module):
        way = "; its first entry is one: unpack it, as in `module, inputs = ...`"
    raise TypeError(f"the model is {what}, but a torch.nn.Module is expected{way}")


def require_generator(generator: object) -> None:
    """Raise a TypeError unless the argument is a `torch.Generator`."""
    if isinstance(generator, torch.Generator):
        return
    seed = generator if isinstance(generator, int) and not isinstance(generator, bool) else 0
    raise TypeError(
        f"the generator is {describe(generator)}, but a torch.Generator is expected: "
        f"write generator=torch.Generator().manual_seed({seed})"
    )


def example_arguments(
    example_inputs: Any, example_kwargs: Mapping[str, Any] | None = None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the example inputs as positional and keyword arguments.

    The caller may give example inputs as a tuple, a list, one tensor, or a mapping from keywords to inputs.

    Raises:
        TypeError: The example inputs are of a type other than tuple, list, tensor or mapping.
    """
    kwargs = dict(example_kwargs or {})
    if isinstance(example_inputs, Tensor):
        return (example_inputs,), kwargs
    if isinstance(example_inputs, Mapping):
        return (), {**example_inputs, **kwargs}
    if isinstance(example_inputs, tuple | list):
        return tuple(example_inputs), kwargs
    raise TypeError(
        f"the example inputs are {describe(example_inputs)}; write a tuple of positional inputs, as in (x,), or give "
        "a tensor or a mapping of keyword inputs"
    )


def as_pair(batch: Any) -> tuple[Any, Any]:
    """Return a batch as a pair of inputs and targets.

    Raises:
        TypeError: The batch is not a pair.
    """
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    raise TypeError(
        f"a batch of the task is {describe(batch)}, but a task reads a list (or a data loader) of pairs, as in "
        "[(inputs, targets), ...]; several inputs are a tuple or a mapping: ((first, second), targets)"
    )


def inputs_of(batch: Any) -> Any:
    """Return the inputs of a batch whose targets are not needed. A batch is a pair as in `Task`, or only inputs.

    Raises:
        TypeError: The batch is a tuple, but not a pair.
    """
    if not isinstance(batch, tuple | list):
        return batch
    if len(batch) in (1, 2):
        return batch[0]
    raise TypeError(
        f"a batch is {describe(batch)}, but batches are pairs (inputs, targets), or inputs alone: a tensor or a "
        "mapping; several positional inputs are a tuple in a pair: ((first, second), None)"
    )


def require_batches(batches: object) -> None:
    """Raise an error unless the batches are a collection that can be iterated several times.

    Raises:
        TypeError: The argument is a single batch.
        ValueError: The batches are an iterator, which can be read only once.
    """
    if isinstance(batches, Tensor | Mapping):
        raise TypeError(f"the batches are {describe(batches)}; give a list of batches, or a data loader")
    if hasattr(batches, "__next__"):
        raise ValueError(
            f"the batches are a {type(batches).__name__}, which can be read only once; give a list of them or a data "
            "loader"
        )


def _holds_tensors(value: object) -> bool:
    return isinstance(value, Mapping) and any(isinstance(one, Tensor) for one in value.values())


def _way_to_params(value: object) -> str:
    """Return the Python expression that converts an object to parameters, or an empty string if none is known."""
    if isinstance(value, type):
        return ""
    if callable(getattr(value, "state_dict", None)):
        return ": write module.state_dict()"
    return ": write .params behind it" if isinstance(getattr(value, "params", None), Mapping) else ""


def describe(value: object) -> str:
    """Return a description of a value for an error message: its class, the text of a string, or shapes of tensors."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, str):
        return f"the text {value!r}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    name = f"class {value.__name__}" if isinstance(value, type) else type(value).__name__
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


def is_plain(annotation: Any) -> bool:
    """Return whether `require_plain` can check values against an annotation."""
    kinds = [_base(kind) for kind in _kinds(annotation)]
    return any(kind in WORDS and kind is not NoneType for kind in kinds) and all(
        kind in WORDS or kind is Literal or isinstance(kind, type) for kind in kinds
    )


def require_plain(name: str, value: object, annotation: Any) -> None:
    """Raise a TypeError unless a value has one of the plain types that an annotation allows.

    Args:
        name: The name of the argument.
        value: The value that the caller passed.
        annotation: An annotation for which `is_plain` is true.
    """
    kinds = _kinds(annotation)
    is_network = any(get_args(kind) == (str, Tensor) for kind in kinds)
    if any(_accepts(kind, value) for kind in kinds):
        if is_network and isinstance(value, Mapping):
            first = next(iter(value.values()), None)
            if isinstance(value, dict) or not isinstance(first, Tensor):
                require_tensors(value, name)
        return
    if is_network:
        require_tensors(value, name)
    if isinstance(value, str) and any(_base(kind) in LISTS and get_args(kind)[:1] == (str,) for kind in kinds):
        raise TypeError(f"{name} is {describe(value)}; give a list of names: {name}=[{value!r}]")
    words = [WORDS.get(_base(kind)) or _name(_base(kind)) for kind in kinds]
    *others, last = dict.fromkeys(words)
    expected = f"{', '.join(others)} or {last}" if others else last
    raise TypeError(f"{name} is {'None' if value is None else describe(value)}, but {expected} is expected")


def given_or_seed(generator: torch.Generator | None) -> torch.Generator:
    """Return the given generator.

    If the generator is None, return a new generator with seed 0. Results are therefore reproducible.
    """
    return torch.Generator().manual_seed(0) if generator is None else generator


def _kinds(annotation: Any) -> tuple[Any, ...]:
    if get_origin(annotation) in (Union, UnionType):
        return tuple(kind for one in get_args(annotation) for kind in _kinds(one))
    return (NoneType,) if annotation is None else (annotation,)


def _base(kind: Any) -> Any:
    return get_origin(kind) or kind


def _name(base: Any) -> str:
    if hasattr(base, "__fspath__"):
        return "a path"
    return f"a {base.__name__}" if isinstance(base, type) else "one of its choices"


def _accepts(kind: Any, value: object) -> bool:
    base = _base(kind)
    if base is Literal:  # The function that uses the argument checks its choices.
        return isinstance(value, tuple(type(choice) for choice in get_args(kind)))
    if base is bool:
        return isinstance(value, bool | np.bool_)
    if base is int:
        return isinstance(value, Integral)
    if base is float:
        return isinstance(value, Real) or (isinstance(value, Tensor) and value.ndim == 0)
    if hasattr(base, "__fspath__"):
        return hasattr(value, "__fspath__")
    if base is Callable:
        return callable(value)
    if base in LISTS:
        if isinstance(value, str | bytes | type | nn.Module | Generator) or not hasattr(value, "__iter__"):
            return False
        (entry,) = get_args(kind)[:1] or (Any,)
        if isinstance(value, Tensor):
            return value.ndim > 0 and entry is not str
        is_known = isinstance(value, list | tuple | dict) and entry in (str, int, float)
        return not is_known or all(_accepts(entry, one) for one in value)
    if base is Mapping and isinstance(value, Mapping) and get_args(kind)[1:] in ((float,), (int,), (str,)):
        return all(_accepts(get_args(kind)[1], one) for one in value.values())
    return isinstance(value, base)

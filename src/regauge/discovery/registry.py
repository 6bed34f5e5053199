"""Rules that users register for operators, and module classes that are traced as one operator."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regauge.discovery.builder import Builder
from regauge.discovery.laws import Value
from regauge.discovery.operators import Call, Rule

LEAF = "regauge_leaf::call"


@dataclass(frozen=True)
class Leaf:
    """A module class whose modules are traced as one operator, with its rule."""

    rule: Rule | None
    results: Callable[..., Any] | None


_RULES: dict[str, Rule] = {}
_LEAVES: dict[type[nn.Module], Leaf] = {}
_ACTIVE: list[nn.Module] = []


def register_rule(name: str, rule: Rule) -> None:
    """Register a rule for an operator. If the operator already has a rule, the new rule replaces it.

    Args:
        name: The name "namespace::operator" as in `torch.ops` ("mylib::fused_gate"), or only the operator name.
        rule: A function `rule(builder, call)` that composes the operator's computation from the builder's primitives.
            The rule returns one value for each tensor that the operator returns. The rule may allow only
            transformations that commute with the operator. Axes that the rule does not mention are frozen.

    Raises:
        TypeError: `rule` is not callable.
    """
    if not callable(rule):
        raise TypeError(f"the rule for {name!r} must be a function of (builder, call), not {type(rule).__name__}")
    _RULES[name] = rule


def register_leaf(
    kind: type[nn.Module], rule: Rule | None = None, *, results: Callable[..., Any] | None = None
) -> None:
    """Trace every module of a class as one operator, without tracing the module's forward pass.

    Use this function for module classes that `torch.export` cannot trace. Without a rule, the parameters, inputs and
    outputs of the module are frozen, which is always correct.

    Args:
        kind: The class of the modules.
        rule: A function `rule(builder, call)`, where `call["inputs"]` lists the tensors that are passed to the module.
            `call` also contains the module's parameters and buffers, under their names within the module.
        results: A function `results(module, *inputs)` that returns tensors with the shapes of the module's outputs.
            The argument `results` is needed if the module cannot run on fake tensors. By default, the forward pass of
            the module is run.

    Raises:
        TypeError: `kind` is not a module class.
    """
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise TypeError(f"register_leaf needs a class of modules, not {kind!r}")
    _LEAVES[kind] = Leaf(rule, results)


def registered_rules() -> dict[str, Rule]:
    """Return all rules that users registered, including the rule for modules that are traced as one operator."""
    return {**_RULES, LEAF: _leaf_rule} if _LEAVES else dict(_RULES)


@contextmanager
def leaves_as_operators(module: nn.Module) -> Iterator[None]:
    """Return a context in which one operator replaces the forward pass of every registered module."""
    found = [part for part in module.modules() if type(part) in _LEAVES]
    start = len(_ACTIVE)
    _ACTIVE.extend(found)
    own = [(part, part.__dict__.get("forward")) for part in found]
    for index, part in enumerate(found, start):
        part.forward = _as_operator(part, index)
    try:
        yield
    finally:
        for part, forward in own:
            if forward is None:
                del part.forward
            else:
                part.forward = forward
        del _ACTIVE[start:]


def _as_operator(part: nn.Module, index: int) -> Callable[..., Any]:
    def forward(*inputs: Any) -> Any:
        tensors = [x for x in inputs if isinstance(x, Tensor)]
        if len(tensors) != len(inputs):
            raise ValueError(
                f"the leaf module {type(part).__name__} is called with something that is not a tensor; "
                "wrap it in a module that takes tensors only and register that"
            )
        result = _call(index, tensors, list(_state(part).values()))
        return result[0] if len(result) == 1 else tuple(result)

    return forward


def _state(part: nn.Module) -> dict[str, Tensor]:
    return {**dict(part.named_parameters()), **dict(part.named_buffers())}


@torch.library.custom_op(LEAF, mutates_args=())
def _call(index: int, inputs: list[Tensor], state: list[Tensor]) -> list[Tensor]:
    return [t.clone() for t in _run(_ACTIVE[index], inputs, state)]


@_call.register_fake
def _(index: int, inputs: list[Tensor], state: list[Tensor]) -> list[Tensor]:
    return [torch.empty_like(t) for t in _run(_ACTIVE[index], inputs, state)]


def _run(part: nn.Module, inputs: Sequence[Tensor], state: Sequence[Tensor]) -> list[Tensor]:
    results = _LEAVES[type(part)].results
    if results is not None:
        out = results(part, *inputs)
    else:
        values = dict(zip(_state(part), state, strict=True))
        replaced = part.__dict__.pop("forward")
        try:
            out = torch.func.functional_call(part, values, tuple(inputs))
        finally:
            part.__dict__["forward"] = replaced
    return list(out) if isinstance(out, tuple | list) else [out]


def _leaf_rule(b: Builder, call: Call) -> Any:
    part = _ACTIVE[call["index"]] if call["index"] < len(_ACTIVE) else None
    inputs, state = call["inputs"], call["state"]
    rule = None if part is None else _LEAVES[type(part)].rule
    if part is None or rule is None:
        b.op = "registered leaf"
        return b.opaque([v for v in [*inputs, *state] if isinstance(v, Value)], call.shapes)
    arguments = {"inputs": list(inputs), **dict(zip(_state(part), state, strict=True))}
    result = rule(b, Call(type(part).__name__, "leaf", arguments, call.shapes, call.is_float))
    return result if isinstance(result, list | tuple) else [result]

"""Certificates: measured changes of a network's outputs by a transformation, in float64 and in the network's dtype."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regauge.core.arguments import check_arguments
from regauge.core.counted import count
from regauge.core.given import example_arguments
from regauge.core.outputs import Outputs
from regauge.core.params import Params
from regauge.core.probe import InDouble, Probe, exact_probe, relative_change
from regauge.gauging.moves import Move, apply_moves


@dataclass(frozen=True)
class Certificate:
    """Changes of a network's outputs after a transformation, relative to the largest entry of each output.

    Attributes:
        exact: The change with both networks in float64. The change in float64 shows whether the symmetry is exact.
        tolerance: The largest allowed value of `exact`: 1e-9, or 1e-5 if the model rounds to float32 internally.
        stored: The change with the transformed network in its stored dtype, which includes rounding. None if the model
            cannot be evaluated in its stored dtype.
        dtype: The dtype in which the transformed network is stored.
        per_group: The exact change if only one group transforms the network, for each group.
    """

    exact: float
    tolerance: float
    stored: float | None
    dtype: str
    per_group: Mapping[str, float] = field(default_factory=dict, repr=False)

    @property
    def ok(self) -> bool:
        """Whether the exact change is within the tolerance."""
        return self.exact <= self.tolerance and all(change <= self.tolerance for change in self.per_group.values())

    def __str__(self) -> str:
        verdict = "the same function" if self.ok else "NOT the same function"
        rounded = "" if self.stored is None else f"; as written in {self.dtype} they change by {self.stored:.1e}"
        exact = f"outputs change by {self.exact:.1e} in float64, where {self.tolerance:.0e} is allowed"
        each = f", and not more by any one of {count(self.per_group, 'group')}" if self.per_group and self.ok else ""
        return f"{verdict}: {exact}{each}{rounded}"


@check_arguments
def certify(
    params: Mapping[str, Tensor],
    moves: Sequence[Move],
    module: nn.Module,
    example_inputs: Any,
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    outputs: Outputs = None,
) -> Certificate:
    """Evaluate a network before and after it is transformed, and compare the outputs.

    Args:
        params: The network before the transformation.
        moves: The moves that transform the network.
        module: The module of the network, not on the meta device.
        example_inputs: Example inputs; see `discover`.
        example_kwargs: Keyword inputs.
        outputs: The names of the outputs that are compared.
    """
    model = _Model(module, *example_arguments(example_inputs, example_kwargs), outputs)
    try:
        with InDouble():
            exact = _exact_changes(params, moves, model)
    except (RuntimeError, TypeError):  # Some models need the precision that they ask for.
        exact = _exact_changes(params, moves, model)
    dtype = next((t.dtype for t in params.values() if t.is_floating_point()), torch.float32)
    stored = _stored_change(params, moves, model, dtype)
    return Certificate(exact.total, exact.tolerance, stored, str(dtype).removeprefix("torch."), exact.per_group)


class _Model(NamedTuple):
    """A module and its example inputs."""

    module: nn.Module
    inputs: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: Outputs


class _Changes(NamedTuple):
    """Changes of the outputs, for all groups together and for each group separately, and the tolerance for rounding."""

    total: float
    tolerance: float
    per_group: dict[str, float]


def _exact_changes(params: Mapping[str, Tensor], moves: Sequence[Move], model: _Model) -> _Changes:
    probe, tolerance = exact_probe(*model)
    start = _complete(params, probe, probe.dtype)
    reference = probe(start)
    total = relative_change(reference, probe(apply_moves(moves, start)))
    per_group: dict[str, float] = {}
    current = start
    for move in moves:
        before, blank = probe(current), move.symmetry.identity()
        for group in move.moved_groups():
            alone = move.symmetry.act(blank.replace(group.name, move.element[group.name]), current)
            per_group[group.name] = max(per_group.get(group.name, 0.0), relative_change(before, probe(alone)))
        current = move(current)
    return _Changes(total, tolerance, per_group)


def _stored_change(
    params: Mapping[str, Tensor], moves: Sequence[Move], model: _Model, dtype: torch.dtype
) -> float | None:
    try:
        probe = Probe(*model, dtype=dtype)
        start = {**probe.params, **{name: t for name, t in params.items() if name in probe.params}}
        return relative_change(_double(probe(start)), _double(probe(apply_moves(moves, start))))
    except RuntimeError:  # Operators that have no kernel in half precision on this device.
        return None


def _double(tensors: list[Tensor]) -> list[Tensor]:
    return [t.double() if t.is_floating_point() else t for t in tensors]


def _complete(params: Mapping[str, Tensor], probe: Probe, dtype: torch.dtype) -> Params:
    own = {name: t.to(dtype) if t.is_floating_point() else t for name, t in params.items() if name in probe.params}
    return {**probe.params, **own}

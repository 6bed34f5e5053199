"""The base class of gauge methods, and the problem that a method solves."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from regauge.core.params import Params
from regauge.core.symmetry import Symmetry
from regauge.core.task import Task, arguments
from regauge.gauging.moves import Move, Uncovered, apply_moves, rotating, uncover_rotations
from regauge.gauging.result import Chosen


@dataclass(frozen=True)
class GaugeProblem:
    """A network whose gauge is chosen.

    Attributes:
        params: The parameters on the CPU, in float32 or float64.
        symmetry: The symmetry, with every size known.
        task: The model and data, for methods that evaluate the model; otherwise None.
        generator: The random generator; it is None for methods without random numbers.
        test: A task with held-out data, which are not used to choose the gauge; it is None if there are no such data.
        dtypes: The original dtypes of tensors whose dtype in `params` differs.
        can_learn: Whether memory suffices for parameters and gradients, which learning from outputs requires.
    """

    params: Params
    symmetry: Symmetry
    task: Task | None = None
    generator: torch.Generator | None = None
    test: Task | None = None
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    can_learn: bool = True

    def moved(self, moves: Sequence[Move]) -> Params:
        """Return the network after some moves, rounded to its original dtypes."""
        whole = apply_moves(moves, self.params)
        return {n: t.to(self.dtypes[n]).to(t.dtype) if n in self.dtypes else t for n, t in whole.items()}

    @property
    def inputs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword inputs of the first batch of the task."""
        assert self.task is not None
        for inputs, _ in self.task.batches:
            return arguments(inputs)
        raise ValueError("the task has no batches to run; give at least one")

    @cached_property
    def uncovered(self) -> Uncovered:
        """The possible rotations. If the task has a model that can be traced, gains of norms are first set to one."""
        if self.symmetry.ones:
            self.symmetry.require_ones(self.params)
        if self.task is None or self.symmetry.ones:
            return Uncovered(None, rotating(self.symmetry), {})
        inputs, kwargs = self.inputs
        return uncover_rotations(
            self.params.__getitem__, self.symmetry, self.task.module, inputs, kwargs, self.task.outputs
        )


class GaugeMethod(ABC):
    """A method of choosing a gauge. Subclasses are frozen dataclasses and define `choose`."""

    needs_task = False
    """Whether the method evaluates the model on data."""
    label = ""
    """The name, in tables, of a network that the method transformed."""

    @abstractmethod
    def choose(self, problem: GaugeProblem) -> Chosen:
        """Return moves that do not lower the method's objective."""


def fixed_reasons(symmetry: Symmetry, uncovered: Uncovered) -> tuple[tuple[str, str], ...]:
    """Return the groups that cannot rotate, and the gains that prevent rotations, each with the reason."""
    rotated = {(p.parameter, p.axis) for g in uncovered.symmetry.groups if g.matrix != "none" for p in g.placements}
    found = [(name, f"the gain is kept: {reason}") for name, reason in uncovered.reasons.items()]
    for group in symmetry.groups:
        if group.matrix == "none" and not any((p.parameter, p.axis) in rotated for p in group.placements):
            found.append((group.name, REASONS[group.kind]))
    return tuple(found)


REASONS: Mapping[str, str] = {
    "permutation": "only its order can change, which changes no range",
    "signed": "only its order and its signs can change, which changes no range",
    "dihedral": "only order, signs and half periods can change, which changes no range of weights",
    "scaled": "its units can be scaled but not mixed: a nonlinearity or a gain acts on each alone",
    "nested": "its blocks can only be reordered, which changes no range",
}
"""The reason why groups of each kind do not rotate."""


def to_work(params: Mapping[str, Tensor]) -> Params:
    """Return a network on the CPU in float32; float64 tensors stay in float64."""
    return {
        name: tensor.detach().to("cpu", torch.promote_types(tensor.dtype, torch.float32))
        if tensor.is_floating_point()
        else tensor.detach().cpu()
        for name, tensor in params.items()
    }

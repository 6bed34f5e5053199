"""The numerical proof of a symmetry: random elements must leave the outputs unchanged."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from regauge.core import element as _element
from regauge.core.element import Element
from regauge.core.groups import Group
from regauge.core.outputs import Outputs
from regauge.core.params import Params
from regauge.core.probe import away, exact_probe, relative_change


@dataclass(frozen=True)
class Check:
    """The outcome of a verification.

    Attributes:
        max_error: Largest relative change of an output, over all groups and all together.
        per_group: The same for each group alone.
        tolerance: What was accepted: 1e-9, 1e-5 where the model itself rounds to float32, 1e-4 where it cannot
            run in float64.
    """

    max_error: float
    per_group: Mapping[str, float]
    tolerance: float

    @property
    def ok(self) -> bool:
        """Whether every error is within the tolerance."""
        return self.max_error <= self.tolerance

    @property
    def failed(self) -> tuple[str, ...]:
        """Groups that change the function."""
        return tuple(name for name, error in self.per_group.items() if not error <= self.tolerance)

    def __str__(self) -> str:
        if self.ok:
            count = f"{len(self.per_group)} groups, each alone and all together," if self.per_group else "all groups"
            return (
                f"verified: {count} leave the outputs unchanged "
                f"(largest relative error {self.max_error:.1e}, tolerance {self.tolerance:.0e})"
            )
        if not self.failed:
            return (
                f"NOT a symmetry: each group alone leaves the outputs unchanged, but all together change them by "
                f"{self.max_error:.1e} (tolerance {self.tolerance:.0e}); two groups claim the same axis"
            )
        worst = sorted(self.failed, key=lambda name: -self.per_group[name])[:5]
        listed = ", ".join(f"{name} ({self.per_group[name]:.1e})" for name in worst)
        return (
            f"NOT a symmetry: {len(self.failed)} of {len(self.per_group)} groups change the outputs: {listed}; "
            "an axis is missing from their placements or tied to the wrong group. Remove the group, or correct "
            "its placements; if `discover` found it, report the model"
        )


def verify(
    act: Callable[[Element, Params], Params],
    groups: Sequence[Group],
    module: nn.Module,
    inputs: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    generator: torch.Generator,
    outputs: Outputs = None,
    ones: Collection[str] = (),
    each_group: bool = True,
) -> Check:
    """Compare outputs before and after an action; see `Symmetry.verify`.

    Args:
        act: The action of an element on parameters.
        groups: The groups that it has values for, with every size known.
        module: The model, on a real device.
        inputs: Positional inputs.
        kwargs: Keyword inputs.
        generator: Source of the elements and of the perturbation of the parameters.
        outputs: Outputs that are compared.
        ones: Names of gains that are set to one.
        each_group: Whether every group is tried alone, too; otherwise two evaluations are enough.
    """
    if any(t.is_meta for t in module.state_dict().values()):
        raise ValueError(
            "the module is on the meta device, where nothing can be computed; verify a small configuration of the "
            "same architecture, or materialize the module with `module.to_empty(device='cpu')`"
        )
    probe, tolerance = exact_probe(module, inputs, kwargs, outputs)
    trial = away(probe.params, set(probe.buffers), ones, generator, probe, tolerance)
    if not trial.is_finite:
        raise ValueError(
            "the model's outputs are NaN or Inf on these inputs, so nothing can be compared; give example inputs "
            "that it can handle"
        )
    element = _element.random(tuple(groups), generator)
    total = relative_change(trial.reference, probe(act(element, trial.params)))
    blank = _element.identity(tuple(groups))
    per_group = {}
    for group in groups if each_group else ():
        alone = blank.replace(group.name, element[group.name])
        per_group[group.name] = relative_change(trial.reference, probe(act(alone, trial.params)))
    return Check(max([total, *per_group.values()]), per_group, tolerance)

"""The evaluation of networks on probes: the traced program, and the intermediate values that a metanetwork reads."""

import copy
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regauge.core.groups import Placement
from regauge.core.outputs import Outputs
from regauge.core.params import Params, select
from regauge.core.probe import perturb
from regauge.discovery.activations import Activations, IntermediateValues, activations
from regauge.weightspace.layout.compile import Layout
from regauge.weightspace.probes.readings import Along, ProbeReading, find_examples, find_readings, flatten_outputs, roll

MOST_OUTPUTS = 2**14
"""The largest number of outputs of one network that are read individually."""


class MismatchError(ValueError):
    """An error for a module with which the networks of a symmetry cannot be evaluated on probes.

    If a net was loaded from a file, the file is not damaged.
    """


@dataclass(frozen=True, eq=False)
class Probed:
    """The values that are read when networks of one layout are evaluated on probes.

    Attributes:
        values: The program that evaluates the networks, in the module's dtype and on the module's device.
        readings: Intermediate values that belong to units.
        outputs: The names of the outputs, each with the axis that contains the examples.
        is_stacked: Whether several networks are evaluated as one program (`torch.func.vmap`) instead of one after the
            other.
        dtype: The dtype of the module.
        device: The device of the module.
    """

    values: IntermediateValues
    readings: tuple[ProbeReading, ...]
    outputs: tuple[tuple[str, Along | None], ...]
    is_stacked: bool
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(
        cls,
        module: nn.Module,
        layout: Layout,
        inputs: Mapping[str, Any],
        per_example: Sequence[str],
        *,
        count: int,
        outputs: Outputs,
        reads_units: bool = True,
    ) -> "Probed":
        """Trace a module and find the intermediate values that are read.

        Discovery determines which values belong to which units. A random element checks the assignment numerically, in
        float64 too if the module can be evaluated in float64.

        Args:
            module: The module, not on the meta device.
            layout: The layout that was compiled from the symmetry of the module.
            inputs: The arguments: positional arguments by index, keyword arguments by name.
            per_example: Names of the arguments that have `count` examples on their first axis.
            count: The number of examples.
            outputs: The outputs that are compared; see `discover`.
            reads_units: Whether values that belong to units are read in addition to the outputs.

        Raises:
            KeyError: The symmetry belongs to another architecture.
            MismatchError: The module is on the meta device, or its outputs change under the symmetry.
        """
        if any(tensor.is_meta for tensor in module.state_dict().values()):
            raise MismatchError(
                "the module of the probes is on the meta device, where nothing can be run; make it on a real one, such "
                "as with `module.to_empty(device='cpu')`"
            )
        first = next((t for t in module.state_dict().values() if t.is_floating_point()), torch.zeros(()))
        args, kwargs = arguments(inputs, first.dtype, first.device)
        check = layout.symmetry.verify(
            module, args, kwargs, generator=torch.Generator().manual_seed(0), outputs=outputs, each_group=False
        )
        if not check.ok:
            raise MismatchError(
                f"the outputs of the probes' module change by {check.max_error:.1e} of their size under the symmetry "
                "that the net was made for; give the module that this symmetry was found on, and the same `outputs`"
            )
        found = activations(module, args, layout.symmetry, kwargs, outputs=outputs)
        names = _confirmed(found, module, layout, args, kwargs, outputs) if reads_units else []
        params = perturb(
            {name: t.detach() for name, t in module.state_dict().items()},
            {*layout.symmetry.buffers},
            torch.Generator().manual_seed(0),
        )
        wanted = (*names, *found.intermediate.outputs)
        before = found.values(params, args, kwargs, wanted)
        other, others = arguments(roll(dict(inputs), per_example), first.dtype, first.device)
        after = found.values(params, other, others, wanted)
        along = {name: find_examples(before[name], after[name], count) for name in wanted}
        readings = tuple(
            reading
            for name in names
            for reading in find_readings(
                name, found.symmetry.shapes[name], found.symmetry.sites[name], layout, along[name]
            )
        )
        floating = [name for name in found.intermediate.outputs if before[name].is_floating_point()]
        known = tuple((name, along[name]) for name in floating)
        made = cls(found.intermediate, readings, known, is_stacked=True, dtype=first.dtype, device=first.device)
        return made if made._stacks(params, inputs) else cls(**{**vars(made), "is_stacked": False})

    def __deepcopy__(self, memo: dict[int, Any]) -> "Probed":
        return self  # nothing changes it, and traced values cannot be copied

    @property
    def key(self) -> str:
        """A key that is equal for architectures that can use the same learned parameters."""
        return repr(([(r.units, r.channels, r.piece.labels) for r in self.readings], self.outputs))

    def run(
        self, params: Mapping[str, Tensor], inputs: Mapping[str, Any], *, reads_units: bool = True
    ) -> tuple[list[Tensor], Tensor]:
        """Evaluate the networks of a population, and return the values of units if `reads_units`.

        Returns:
            For each of `readings`, its values `[models, *sizes, channels]`, and the outputs `[models, numbers]`.

        Raises:
            ValueError: The networks lack a tensor that the module has.
        """
        args, kwargs = arguments(inputs, self.dtype, self.device)
        readings = self.readings if reads_units else ()
        names = list(dict.fromkeys([*(r.value for r in readings), *(name for name, _ in self.outputs)]))
        states = self._states(params)

        def one(state: Params) -> dict[str, Tensor]:
            return self.values.run(state, args, kwargs, names)

        if self.is_stacked:
            values: dict[str, Tensor] = torch.func.vmap(one)(states)
        else:
            count = len(next(iter(states.values())))
            each = [one(select(states, k)) for k in range(count)]
            values = {name: torch.stack([made[name] for made in each]) for name in names}
        numbers = [flatten_outputs(values[name], along, MOST_OUTPUTS) for name, along in self.outputs]
        return [reading(values[reading.value]) for reading in readings], torch.cat(numbers, 1)

    def _states(self, params: Mapping[str, Tensor]) -> Params:
        """Return the tensors of a population that the program uses."""
        program, states = self.values.program, {}
        for state in program.states.values():
            name = next((name for name in program.aliases.get(state, (state,)) if name in params), None)
            if name is None:
                raise ValueError(
                    f"the networks lack {state!r}, which is needed to run them on probes; give all parameters and "
                    "buffers, or make a net without probes"
                )
            is_value = params[name].is_floating_point()
            states[name] = params[name].to(device=self.device, dtype=self.dtype if is_value else None)
        return states

    def _stacks(self, params: Params, inputs: Mapping[str, Any]) -> bool:
        """Return whether two networks can be evaluated as one program."""
        both = {name: torch.stack([tensor, tensor]) for name, tensor in params.items()}
        try:
            with warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter("error")  # operators that run in a hidden loop warn
                self.run(both, inputs)
        except (RuntimeError, NotImplementedError, UserWarning):
            return False
        return True


def arguments(
    inputs: Mapping[str, Any], dtype: torch.dtype, device: torch.device
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and keyword arguments from inputs by name; floating-point tensors are converted to a dtype."""
    given = {
        name: x.to(device=device, dtype=dtype if x.is_floating_point() else x.dtype) if isinstance(x, Tensor) else x
        for name, x in inputs.items()
    }
    positional = tuple(x for name, x in given.items() if name.isdigit())
    return positional, {name: x for name, x in given.items() if not name.isdigit()}


def _confirmed(
    found: Activations,
    module: nn.Module,
    layout: Layout,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    outputs: Outputs,
) -> list[str]:
    """Return the values on which groups act as predicted, checked in float64 if the module works in float64."""
    if next((t.dtype for t in module.state_dict().values() if t.is_floating_point()), None) == torch.float64:
        return list(found.read)
    doubled, keywords = arguments(
        {**{f"{k}": x for k, x in enumerate(args)}, **kwargs}, torch.float64, torch.device("cpu")
    )
    try:
        exact = activations(copy.deepcopy(module).double().cpu(), doubled, layout.symmetry, keywords, outputs=outputs)
    except (RuntimeError, ValueError):  # the model creates float32 tensors
        return list(found.read)
    there = {f"%{node.name}" for node in exact.intermediate.program.graph.graph.nodes}
    return [name for name in found.read if name not in there or _moves(found, name) == _moves(exact, name)]


def _moves(found: Activations, name: str) -> set[tuple[str, Placement]]:
    """Return the groups that act on a value, with their placements."""
    return {(group.name, p) for group in found.symmetry.groups for p in group.placements if p.parameter == name}

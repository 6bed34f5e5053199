"""How the networks of one architecture are read, and changes of them brought back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regauge.core.element import Element
from regauge.core.params import Params, count_models
from regauge.weightspace.frames import Frame
from regauge.weightspace.layout import Layout
from regauge.weightspace.probes import Probed
from regauge.weightspace.shares import divide, find_shares


@dataclass(frozen=True, eq=False)
class Reader:
    """One architecture that a net reads: `number` is that of the parameters that are its own.

    `probed` says how its networks are run on probes, if there are any.
    """

    layout: Layout
    frame: Frame
    number: int
    probed: Probed | None = None

    def fits(self, population: Mapping[str, Tensor]) -> bool:
        """Whether a population has the tensors of this architecture."""
        shapes = self.layout.symmetry.shapes
        return all(
            name in population and tuple(population[name].shape[1:]) == tuple(shapes[name])
            for name in self.layout.parameters
        )

    def read(self, canonical: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The values of blocks, and what units count for."""
        values = self.layout.read(canonical)
        if not self.layout.is_weighed:
            return values, {}
        shares = find_shares(values, self.layout)
        return divide(values, self.layout, shares), shares

    def canonicalize(self, population: Mapping[str, Tensor]) -> tuple[Mapping[str, Tensor], Element | None]:
        """The canonical networks, and the element that made them so, if any was needed."""
        element = self.frame(population)
        return (population, None) if element is None else (self.layout.symmetry.act(element, population), element)

    def complete(
        self, population: Mapping[str, Tensor], changes: Params, element: Element | None, count: int
    ) -> Params:
        """The changes of the networks as they were, and zeros for what does not change."""
        full = {}
        for name, tensor in population.items():
            if name in changes:
                full[name] = changes[name]
            elif tensor.is_floating_point():
                full[name] = tensor.new_zeros(tensor.shape if count == 1 else (len(tensor), count, *tensor.shape[1:]))
        for names in self.layout.symmetry.tied:
            known = next((full[name] for name in names if name in changes), None)
            full.update({name: known for name in names if name in population and known is not None})
        if element is None:
            return full
        if count == 1:
            return self.frame.undo(element, full)
        rows = torch.arange(element.batch[0]).repeat_interleave(count)
        undone = self.frame.undo(element.rows(rows), {name: tensor.flatten(0, 1) for name, tensor in full.items()})
        return {name: tensor.reshape(-1, count, *tensor.shape[1:]) for name, tensor in undone.items()}


def require_values(population: Mapping[str, Tensor], names: Sequence[str]) -> None:
    """Raise a ValueError unless the tensors that are read hold numbers, of equally many networks."""
    count_models({name: population[name] for name in names})
    wrong = [name for name in names if not population[name].is_floating_point()]
    if wrong:
        raise ValueError(
            f"{wrong[0]!r} is {population[wrong[0]].dtype}, but weights are read as floating-point values; convert "
            "quantized networks back first"
        )

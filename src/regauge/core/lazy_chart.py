"""The representative of a network whose tensors are read one at a time."""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from regauge.core.added_numbers import sums
from regauge.core.chart import Charted, chart_gains, charted, widen
from regauge.core.translations import Addition
from regauge.core.unit_gains import unit_element


class LazyRepresentative(Mapping[str, Tensor]):
    """The tensors that differ in a representative, each read and made when it is asked for, in the next wider dtype.

    Numbers that the model adds to gains are added here; `parameter` is without them. Coordinates and what they add are
    vectors, which are held; each of the tensors that images are computed from is read once more for that.

    Args:
        symmetry: With every size known.
        read: Reads a tensor of the network.
    """

    def __init__(self, symmetry: Charted, read: Callable[[str], Tensor]) -> None:
        self._symmetry, self._read, self._gains = symmetry, read, chart_gains(symmetry)
        self._first: dict[str, list[Addition]] = {}
        for family in (one for one in symmetry.translations if one.eps is not None):
            home = {family.entries.parameter: self._sum(family.entries.parameter)}
            for one in family.additions(home, family.read(home), sign=-1.0):
                self._first.setdefault(one.entries.parameter, []).append(one)
        self._element = unit_element(symmetry, {name: self._sum(name) for name in self._gains}, symmetry.gains)
        self._added: dict[str, list[Addition]] = {}
        for family in (one for one in symmetry.translations if one.eps is None):
            for one in family.additions(self, family.read(self), sign=-1.0):
                self._added.setdefault(one.entries.parameter, []).append(one)

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._sum(name)
        if name in self._gains:
            tensor = torch.where(tensor == 0, 0.0, 1.0).to(tensor)
        elif name in charted(self._symmetry):
            tensor = self._symmetry.on_sums._act_on(self._element, {name: tensor}).get(name, tensor)
        for one in self._added.get(name, ()):
            tensor = one.to(tensor)
        return tensor

    def parameter(self, name: str) -> Tensor:
        """A tensor as it is in a network."""
        return self[name] - self._symmetry.added.get(name, 0.0)

    def _sum(self, name: str) -> Tensor:
        tensor = sums(self._symmetry.added, {name: widen(self._read(name))})[name]
        for one in self._first.get(name, ()):
            tensor = one.to(tensor)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(charted(self._symmetry))

    def __len__(self) -> int:
        return len(charted(self._symmetry))

"""A network whose tensors are read one at a time: its representative, its coordinates, and its image under an element.

Memory holds only the coordinates and the vectors that families add. If an image is computed from a tensor, this tensor
is read twice.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from regauge.core.behind_gains import gains_of, on_representatives, sums, turn
from regauge.core.chart import Charted, Coordinates, chart_gains, charted, scaled_by_gains, widen
from regauge.core.element import Element
from regauge.core.translations import Addition
from regauge.core.unit_gains import unit_element

Rows = tuple[int, int] | None
"""A range of the first axis of a tensor, or None for the whole axis."""
Read = Callable[[str, Rows], Tensor]
"""A function that reads a tensor, or a range of its first axis."""


class LazyTensors(Mapping[str, Tensor]):
    """The tensors of a network that a chart changes. Each tensor is computed on request, in a wider dtype.

    The tensors include the constants that the model adds to gains. `parameter` returns tensors without these constants.

    Args:
        symmetry: The symmetry. All its sizes must be known.
    """

    def __init__(self, symmetry: Charted) -> None:
        self.symmetry, self._gains = symmetry, dict.fromkeys(chart_gains(symmetry), torch.empty(0))
        self._scaling: Element | None = None
        self._added: dict[str, list[Addition]] = {}
        self._variances: dict[str, list[Addition]] = {}

    def rows(self, name: str, rows: Rows) -> Tensor:
        """Return a tensor, or a range of its first axis if no group acts on this axis."""
        several = (*self._added.get(name, ()), *self._variances.get(name, ()))
        length = math.prod(self.symmetry.shapes[name][1:]) if several else 1
        if rows is not None and any(one.rows(rows, length) is None for one in several):
            return self._make(name, None)[rows[0] : rows[1]]
        return self._make(name, rows)

    def parameter(self, name: str, rows: Rows = None) -> Tensor:
        """Return a tensor as the network stores it, or a range of its first axis if no group acts on this axis."""
        return self.rows(name, rows) - self.symmetry.added.get(name, 0.0)

    def __getitem__(self, name: str) -> Tensor:
        return self.rows(name, None)

    def __iter__(self) -> Iterator[str]:
        return iter(charted(self.symmetry))

    def __len__(self) -> int:
        return len(charted(self.symmetry))

    def _make(self, name: str, rows: Rows) -> Tensor:
        raise NotImplementedError

    def _scale(self, name: str, tensor: Tensor) -> Tensor:
        """Return a tensor after the gains have been changed."""
        if self._scaling is None:
            return tensor
        if name in self._gains:
            return torch.where(tensor == 0, 0.0, self._gains[name]).to(tensor)
        if name in scaled_by_gains(self.symmetry):
            return self.symmetry.on_sums._act_on(self._scaling, {name: tensor})[name]
        return tensor

    def _scale_by(self, gains: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
        """Scale later results as if gains were brought to one and nonzero gains were then set to `wanted`."""
        self._scaling = unit_element(self.symmetry, gains, self.symmetry.gains)
        self._gains = dict(wanted)


def _note(known: dict[str, list[Addition]], several: Iterable[Addition]) -> None:
    for one in several:
        known.setdefault(one.entries.parameter, []).append(one)


def _add(several: Mapping[str, list[Addition]], name: str, tensor: Tensor, rows: Rows) -> Tensor:
    """Return a tensor, or a range of its first axis, after all vectors have been added to it."""
    for one in several.get(name, ()):
        part = one if rows is None else one.rows(rows, math.prod(tensor.shape[1:]))
        assert part is not None
        tensor = part.to(tensor)
    return tensor


class LazyRepresentative(LazyTensors):
    """The tensors of a representative that differ from those of the network, in the next wider dtype.

    Args:
        symmetry: The symmetry. All its sizes must be known.
        read: A function that reads a tensor of the network.

    Attributes:
        coordinates: The coordinates of the network, as `Symmetry.split` returns them.
    """

    def __init__(self, symmetry: Charted, read: Read) -> None:
        super().__init__(symmetry)
        self._read, self.coordinates = read, dict[str, Tensor]()
        for family in (one for one in symmetry.translations if one.eps is not None):
            own = self.coordinates[family.name] = family.read(self)
            _note(self._variances, family.additions(self, own, sign=-1.0))
        gains = {name: self[name] for name in self._gains}
        self.coordinates |= {name: torch.where(gain == 0, 1.0, gain) for name, gain in gains.items()}
        self._scale_by(gains, {name: torch.ones_like(gain) for name, gain in gains.items()})
        for family in (one for one in symmetry.translations if one.eps is None):
            own = self.coordinates[family.name] = family.read(self)
            _note(self._added, family.additions(self, own, sign=-1.0))

    def _make(self, name: str, rows: Rows) -> Tensor:
        tensor = sums(self.symmetry.added, {name: widen(self._read(name, rows))})[name]
        return _add(self._added, name, self._scale(name, _add(self._variances, name, tensor, rows)), rows)


class LazyNetwork(LazyTensors):
    """The tensors of a network that differ from those of its representative, in float64.

    Args:
        symmetry: The symmetry. All its sizes must be known.
        read: A function that reads a tensor of the representative, including the constants that the model adds.
        coordinates: The coordinates, in the form that `Symmetry.join` takes.
    """

    def __init__(self, symmetry: Charted, read: Read, coordinates: Coordinates) -> None:
        super().__init__(symmetry)
        self._read = read
        wide = {name: coordinate.double() for name, coordinate in coordinates.items()}
        for family in reversed([one for one in symmetry.translations if one.eps is None]):
            _note(self._added, family.additions(self, wide[family.name]))
        wanted = {name: wide[name] for name in self._gains}
        self._scale_by({name: 1 / one for name, one in wanted.items()}, wanted)
        for family in (one for one in symmetry.translations if one.eps is not None):
            _note(self._variances, family.additions(self, wide[family.name]))

    def _make(self, name: str, rows: Rows) -> Tensor:
        tensor = _add(self._added, name, self._read(name, rows).double(), rows)
        return _add(self._variances, name, self._scale(name, tensor), rows)


def move_lazily(symmetry: Charted, element: Element, read: Read) -> LazyNetwork:
    """Return the tensors of a network after translations or rotations of an element have acted; see `translate`.

    Args:
        symmetry: The symmetry. All its sizes must be known.
        element: A single element, without a batch.
        read: A function that reads a tensor of the network. The linear part of the element has already acted on the
            tensor.
    """
    behind = LazyRepresentative(symmetry, read)
    coordinates = dict(behind.coordinates)
    for name, vector in element.translation.items():
        coordinates[name] = coordinates[name] + vector.to(coordinates[name])
    turned = on_representatives(symmetry, tuple(element.rotation))
    gains = {gain: behind.parameter(gain) for name in element.rotation for gain in gains_of(symmetry, name)}
    rotation = turn(symmetry, turned, element.rotation, gains)
    places = {place.parameter for name in element.rotation for place in turned[name].placements}

    def rotated(name: str, rows: Rows) -> Tensor:
        tensor = behind.rows(name, rows)
        return turned._act_on(rotation, {name: tensor})[name] if name in places else tensor

    return LazyNetwork(symmetry, rotated, coordinates)

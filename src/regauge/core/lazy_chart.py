"""Networks whose tensors are computed one at a time: representatives, or networks transformed by an element. A
representative has the same function and gains of one; see `chart`.

Only the network's coordinates, and the vectors that translation families add to parameters, are kept in memory. A
tensor that determines vectors for other tensors is read twice. Networks on disk, and large networks in memory, are
transformed one tensor at a time.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from regauge.core.behind_gains import gains_of, on_representatives, plus, sums, turn
from regauge.core.chart import (
    Charted,
    Coordinates,
    changed_by,
    chart_gains,
    charted,
    require_parameters,
    require_shapes,
    scaled_by_gains,
    widen,
)
from regauge.core.element import Element
from regauge.core.params import Params, batch_of_one, round_to, select, work_dtype
from regauge.core.translations import Addition
from regauge.core.unit_gains import unit_element

Rows = tuple[int, int] | None
"""A range of the first axis of a tensor, or None for the whole axis."""
Read = Callable[[str, Rows], Tensor]
"""A function that reads a tensor, or a range of its first axis."""


class LazyTensors(Mapping[str, Tensor]):
    """The tensors that differ between a network and its representative (translations removed, gains of one); see
    `regauge.core.chart`.

    Each tensor is computed on request, in a wider dtype.

    The tensors include constants that the model adds to gains, such as the 1 in `1 + weight`. The method `parameter`
    returns tensors without added constants.

    Args:
        symmetry: The symmetry. All sizes of groups must be known.
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
        tensor = self.rows(name, rows)
        return plus(tensor, self.symmetry.added[name], -1) if name in self.symmetry.added else tensor

    def __getitem__(self, name: str) -> Tensor:
        return self.rows(name, None)

    def __iter__(self) -> Iterator[str]:
        return iter(charted(self.symmetry))

    def __len__(self) -> int:
        return len(charted(self.symmetry))

    def _make(self, name: str, rows: Rows) -> Tensor:
        raise NotImplementedError

    def _scale(self, name: str, tensor: Tensor) -> Tensor:
        """Return a tensor after the change of gains that `_scale_by` sets: a gain with its new entries, or a tensor
        that compensates for them.
        """
        if self._scaling is None:
            return tensor
        if name in self._gains:
            return torch.where(tensor == 0, 0.0, self._gains[name]).to(tensor)
        if name in scaled_by_gains(self.symmetry):
            return self.symmetry.on_sums._act_on(self._scaling, {name: tensor})[name]
        return tensor

    def _scale_by(self, gains: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
        """Apply the element that sets `gains` to one to all tensors that are computed later. The gains themselves get
        the entries of `wanted`, but gains of zero stay zero.
        """
        self._scaling = unit_element(self.symmetry, gains, self.symmetry.gains)
        self._gains = dict(wanted)


def _note(known: dict[str, list[Addition]], several: Iterable[Addition]) -> None:
    for one in several:
        known.setdefault(one.entries.parameter, []).append(one)


def _add(several: Mapping[str, list[Addition]], name: str, tensor: Tensor, rows: Rows) -> Tensor:
    """Return a tensor, or a range of its first axis, after all translation vectors have been added to it."""
    for one in several.get(name, ()):
        part = one if rows is None else one.rows(rows, math.prod(tensor.shape[1:]))
        assert part is not None
        tensor = part.to(tensor)
    return tensor


class LazyRepresentative(LazyTensors):
    """The tensors of a network's representative (translations removed, gains of one) that differ from the network's own
    tensors, in the next wider dtype.

    Args:
        symmetry: The symmetry. All sizes of groups must be known.
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
    """The tensors of a network that differ from those of its representative, computed from the representative and the
    coordinates, in float64.

    Args:
        symmetry: The symmetry. All sizes of groups must be known.
        read: A function that reads a tensor of the representative, including constants that the model adds before use.
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
    """Return the tensors of a network after translations or rotations of an element have acted; see `chart.translate`.

    Args:
        symmetry: The symmetry. All sizes of groups must be known.
        element: A single element, without a batch.
        read: A function that reads a tensor of the network. The tensors that `read` returns must already be transformed
            by the permutations, signs and scales of the element.
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


LARGE = 1 << 22
"""Single networks with at least this many entries are transformed one tensor after the other, to save memory.

For smaller networks, transforming all tensors at once is faster.
"""


def is_large(params: Mapping[str, Tensor], lead: int, batch: tuple[int, ...] = ()) -> bool:
    """Return whether a single network, or a population of size one, is transformed one tensor after the other."""
    is_single = not lead or (lead == 1 and all(t.ndim and len(t) == 1 for t in params.values()))
    return batch in ((), (1,)) and is_single and sum(t.numel() for t in params.values()) >= LARGE


def split_in_turn(symmetry: Charted, params: Mapping[str, Tensor], lead: int) -> tuple[Params, dict[str, Tensor]]:
    """Return the result of `Symmetry.split` for one network, computed one tensor after the other.

    Only one tensor at a time is held in a wider dtype.
    """
    given = select(params, 0) if lead else params
    tensors = LazyRepresentative(symmetry, lambda name, _: given[name])
    dtypes = {name: work_dtype(given[name].dtype) for name in charted(symmetry) & given.keys()}
    result = {**given, **_in_turn(symmetry, tensors, dtypes)}
    return (batch_of_one(result), batch_of_one(tensors.coordinates)) if lead else (result, tensors.coordinates)


def act_in_turn(
    symmetry: Charted, element: Element, params: Mapping[str, Tensor], skip: Collection[str], lead: int
) -> Params:
    """Return the result of `Symmetry.act` for one network and an element with translations or rotations."""
    require_parameters(symmetry, params)
    require_shapes(symmetry, element)
    given, one = select(params, 0) if lead else params, element.item(0) if element.batch else element
    changed = changed_by(symmetry, one) & given.keys()
    tensors = move_lazily(symmetry, one, lambda name, _: symmetry._act_on(one, {name: given[name]})[name])
    made = _in_turn(symmetry, tensors, {name: given[name].dtype for name in given if name in changed - {*skip}})
    plain = symmetry._act_on(one, {name: t for name, t in given.items() if name not in changed | {*skip}})
    result = {**given, **plain, **made}
    return batch_of_one(result) if lead or element.batch else result


def _in_turn(symmetry: Charted, tensors: LazyTensors, dtypes: Mapping[str, torch.dtype]) -> Params:
    """Compute tensors one after the other, and convert each of them to its dtype.

    Tied names share one computed tensor.
    """
    first = {name: next(n for n in every if n in dtypes) for every in symmetry.tied for name in every if name in dtypes}
    made = dict[str, Tensor]()
    for name in (name for name in dtypes if first.get(name, name) == name):
        made[name] = round_to(tensors.parameter(name), dtypes[name], name)
    return {name: made[first.get(name, name)] for name in dtypes}

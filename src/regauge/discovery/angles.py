"""The angles that fixed turns leave free: rotary positions commute with rotations of each pair of coordinates.

What may act on a single axis index is solved elsewhere, and of a pair of coordinates that positions turn by fixed
angles it finds a common scale and a common sign. Both belong to more: all rotations of the plane commute with the
turns, so that queries and keys may be turned by one angle. Which of the pairs are such planes no operator says by its
name, and halves, neighbors and complex numbers are written in many ways. So every pair that shares a sign is tried: the
operators between the parameters and the first values that do not have the axis any more are evaluated on random
numbers in float64, with the constants of the trace in their places, before and after random turns. As everything
else is random there, what does not change these values changes no output.
"""

import operator
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from regauge.core import act as _act
from regauge.core.element import random
from regauge.core.groups import Group, Placement
from regauge.core.probe import relative_change
from regauge.discovery.emit import needed_bases
from regauge.discovery.freedom import Freedom, Plane, Planes, ScaleFamily
from regauge.discovery.interpret import INLINED, Pass
from regauge.discovery.layout import Atom, leaves
from regauge.discovery.slots import Place, Slots
from regauge.discovery.trace import Program

TOLERANCE = 1e-9
"""Largest relative change of what the operators return, in float64."""
LARGEST = 1 << 26
"""Parameters with more entries are not tried, unless a linear layer reads them: its inputs are then few."""
FEW = 3
"""Inputs of a linear layer when its outputs are all that counts."""


class _UnknownError(Exception):
    """Something has no known value: it depends on parameters, or is on the meta device."""


def with_angles(
    freedoms: Sequence[Freedom], slots: Slots, program: Program, found: Pass, inputs: Sequence[Any]
) -> list[Freedom]:
    """The freedoms with a rotation instead of the sign wherever all rotations of a pair pass.

    Args:
        freedoms: What may act on single indices.
        slots: Where.
        program: The traced model.
        found: What its operators recorded.
        inputs: Values of the example inputs, leaf by leaf; those on the meta device count as unknown.
    """
    constants = _Constants(program, inputs)
    bases = needed_bases(freedoms)
    places = {**slots.places, **slots.watched}
    where = {f.atom: [places[slot].placement() for slot in f.slots] for f in freedoms if f.atom in bases}
    return [_turned(f, places, where, program, found, constants) if _may_turn(f, bases) else f for f in freedoms]


def _may_turn(freedom: Freedom, bases: set[Atom]) -> bool:
    return bool(freedom.signs) and not (freedom.is_permuted or freedom.matrices or freedom.atom in bases)


def _turned(
    freedom: Freedom,
    places: Mapping[int, Place],
    where: Mapping[Atom, Sequence[Placement]],
    program: Program,
    found: Pass,
    constants: "_Constants",
) -> Freedom:
    signs, scales, planes = [], list(freedom.scales), list(freedom.planes)
    for family, bases in freedom.signs:
        own = [slot for slot in freedom.slots if slot in family]
        for k, pairs in _pairings(own, bases, places):
            groups = _groups(pairs, freedom.atom, {base: where[base] for base in bases})
            if _commutes(pairs, groups, freedom.atom, program, found, constants):
                seen = [slot for slot in freedom.watched if slot in family]
                everywhere = [*pairs, *_watched(seen, k, bases, places)]
                with_planes = [scale for scale in scales if _is_scale_of(scale, everywhere, bases, freedom.slots)]
                scales = [scale for scale in scales if scale not in with_planes]
                unread = {places[slot].name for slot in seen} - {plane.name for plane in everywhere}
                planes.append(Planes(tuple(everywhere), bases, tuple(with_planes), frozenset(unread)))
                break
        else:
            signs.append((family, bases))
    return replace(freedom, signs=signs, scales=scales, planes=planes)


def _is_scale_of(scale: ScaleFamily, planes: Sequence[Plane], bases: frozenset[Atom], own: Sequence[int]) -> bool:
    """Whether a family multiplies both coordinates of each plane alike, and no other parameters."""
    family, within = scale
    covered = {slot for plane in planes for slot in plane.slots}
    is_alike = all(family.get(plane.slots[0], 0) == family.get(plane.slots[1], 0) for plane in planes)
    return within == bases and all(slot in covered for slot in own if slot in family) and is_alike


# --- which pairs ----------------------------------------------------------------------------------------------


def _pairings(
    slots: Sequence[int], bases: frozenset[Atom], places: Mapping[int, Place]
) -> Iterator[tuple[int | None, list[Plane]]]:
    """Ways to read slots with a common sign as pairs of coordinates; with the number of the piece that is the pair."""
    found = [_pieces(places[slot], bases) for slot in slots]
    for k in range(min(map(len, found), default=0)):
        yield k, _neighbors(slots, k, bases, places)
    halves = _halves(slots, places)
    if halves:
        yield None, halves


def _pieces(place: Place, bases: frozenset[Atom]) -> list[Atom]:
    """Pieces of an axis that may be the two coordinates of a pair, those with the nearest entries first."""
    near = sorted(zip(place.mates, place.others, strict=True), key=lambda piece: piece[1][1])
    return [atom for atom, _ in near if atom.size == 2 and atom not in bases]


def _neighbors(slots: Sequence[int], k: int, bases: frozenset[Atom], places: Mapping[int, Place]) -> list[Plane]:
    """The two indices of another axis piece of each block: entries beside each other, complex numbers."""
    result = []
    for slot in slots:
        place = places[slot]
        pair = place.mates.index(_pieces(place, bases)[k])
        others = place.others[:pair] + place.others[pair + 1 :]
        result.append(_plane((slot, slot), place, place.others[pair][1], others))
    return result


def _halves(slots: Sequence[int], places: Mapping[int, Place]) -> list[Plane]:
    """Blocks of one axis that are alike, two by two; nothing where they are not."""
    by_axis: dict[tuple[str, int], list[int]] = {}
    for slot in slots:
        by_axis.setdefault((places[slot].name, places[slot].axis), []).append(slot)
    result = []
    for along in by_axis.values():
        along.sort(key=lambda slot: places[slot].start)
        for one, two in zip(along[::2], along[1::2], strict=False):
            first, second = places[one], places[two]
            if (first.stride, first.others, first.mates) == (second.stride, second.others, second.mates):
                result.append(_plane((one, two), first, second.start - first.start, first.others))
    return result if 2 * len(result) == len(slots) else []


def _plane(slots: tuple[int, int], place: Place, distance: int, others: tuple[tuple[int, int], ...]) -> Plane:
    return Plane(slots, place.name, place.axis, place.start, place.stride or 1, distance, others)


def _watched(slots: Sequence[int], k: int | None, bases: frozenset[Atom], places: Mapping[int, Place]) -> list[Plane]:
    """The planes of intermediate values, read as those of the parameters; those that cannot be read so are left out."""
    result = []
    for name in dict.fromkeys(places[slot].name for slot in slots):
        here = [slot for slot in slots if places[slot].name == name]
        result += dict(_pairings(here, bases, places)).get(k, [])
    return result


# --- whether they turn ----------------------------------------------------------------------------------------


def _groups(planes: Sequence[Plane], atom: Atom, bases: Mapping[Atom, Sequence[Placement]]) -> tuple[Group, ...]:
    """An angle for every unit of the atom and every index of its bases."""
    names = {plane.name for plane in planes}
    groups = []
    for k, (base, placements) in enumerate(bases.items()):
        here = tuple(p for p in placements if p.parameter in names)
        groups.append(Group(f"base {k}", base.size, here, is_permuted=False, is_base=True))
    pairs = tuple(plane.pairs for plane in planes)
    groups.append(Group("pairs", atom.size, pairs, is_permuted=False, is_base=True))
    within = tuple(group.name for group in groups)
    turns = tuple(plane.turn(atom.size) for plane in planes)
    last = Group("turns", 2, turns, is_permuted=False, matrix="orthogonal", is_proper=True, within=within)
    return (*groups, last)


def _commutes(
    planes: Sequence[Plane],
    groups: tuple[Group, ...],
    atom: Atom,
    program: Program,
    found: Pass,
    constants: "_Constants",
) -> bool:
    """Whether random turns leave alone all values behind the axis, and turning one place alone does not."""
    generator = torch.Generator().manual_seed(0)
    only_first = (*groups[:-1], replace(groups[-1], placements=groups[-1].placements[:1]))
    try:
        region = _Region(program, found, atom, planes, constants)
        like = (region.shape(), _geometry(region.names, planes, groups))
        if like in constants.tried:
            return constants.tried[like]
        region.draw(generator)
        before = region.ends(region.params)
        after = region.ends(_moved(groups, region.params, generator))
        alone = region.ends(_moved(only_first, region.params, generator))
    except Exception:  # Operators can fail in any way, and what cannot be tried is not claimed.
        return False
    is_finite = all(bool(t.isfinite().all()) for t in before)
    is_free = is_finite and relative_change(before, after) <= TOLERANCE
    constants.tried[like] = is_free and relative_change(before, alone) > 1000 * TOLERANCE
    return constants.tried[like]


def _geometry(names: Sequence[str], planes: Sequence[Plane], groups: Sequence[Group]) -> Hashable:
    """Where planes and groups act, with the numbers of the parameters instead of their names."""
    numbers = {name: k for k, name in enumerate(names)}
    own = tuple((numbers[p.name], p.axis, p.start, p.stride, p.distance, p.others) for p in planes)
    sites = tuple(
        (group.size, tuple(replace(p, parameter=str(numbers.get(p.parameter))) for p in group.placements))
        for group in groups
    )
    return own, sites


def _moved(groups: tuple[Group, ...], params: Mapping[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    sites = {name: _act.resolve(groups, name, tuple(t.shape)) for name, t in params.items()}
    return dict(_act.act(groups, sites, random(groups, generator), params, {n: t.ndim for n, t in params.items()}))


class _Region:
    """The operators from some parameters to the first values that do not have an axis piece any more.

    Everything else that they read is constant, with the value that it has, or random.
    """

    def __init__(
        self,
        program: Program,
        found: Pass,
        atom: Atom,
        planes: Sequence[Plane],
        constants: "_Constants",
    ) -> None:
        self._constants = constants
        self._axes = {plane.name: plane.axis for plane in planes}
        self._starts = [n for n in constants.parameters if program.states[n.name] in self._axes]
        self.names = [program.states[node.name] for node in self._starts]
        self._inside: dict[Node, str | None] = dict(zip(self._starts, self.names, strict=True))
        self._ends: list[Node] = []
        for node in program.graph.graph.nodes:
            if node in self._inside or not any(source in self._inside for source in node.all_input_nodes):
                continue
            if node.op == "output":
                raise _UnknownError("the axis is an output")
            if node.users:
                value = found.values.get(node)
                is_inside = value is None or any(atom in leaves(layout) for layout in value.layouts)
                if is_inside:
                    self._inside[node] = None
                else:
                    self._ends.append(node)
        self._given: dict[Node, Any] = {}
        self.params: dict[str, Tensor] = {}

    def shape(self) -> Hashable:
        """What decides its values besides chance: the layers of a deep model are alike."""
        inside = {node: k for k, node in enumerate([*self._inside, *self._ends])}

        def told(node: Node) -> Hashable:
            if node in inside:
                return inside[node]
            return _like(node.meta.get("val")) if self._constants.is_dependent(node) else self._constants.name(node)

        return tuple(
            (node.op, _like(node.meta.get("val")), _frozen(node.target, told), _frozen((node.args, node.kwargs), told))
            if name is None
            else (node.op, _like(node.meta.get("val")), len(node.users))
            for node, name in {**self._inside, **dict.fromkeys(self._ends)}.items()
        )

    def draw(self, generator: torch.Generator) -> None:
        """Give everything that it reads a value."""
        for node, name in zip(self._starts, self.names, strict=True):
            shape = tuple(node.meta["val"].shape)
            x = _read_by(node) if self._axes[name] == 0 else None
            if x is not None and x not in self._inside:
                shape = (shape[0], FEW)
                few = (*x.meta["val"].shape[:-1], FEW)
                self._given[x] = torch.randn(few, generator=generator, dtype=torch.float64)
            if torch.Size(shape).numel() > LARGEST:
                raise _UnknownError("too large")
            self.params[name] = torch.randn(shape, generator=generator, dtype=torch.float64)
        for node in [*self._inside, *self._ends]:
            for source in node.all_input_nodes:
                if source not in self._inside and source not in self._given:
                    self._given[source] = self._constants.drawn(source, generator)

    def ends(self, params: Mapping[str, Tensor]) -> list[Tensor]:
        """The first values that do not have the axis piece."""
        known: dict[Node, Any] = dict(self._given)
        for node, name in self._inside.items():
            known[node] = _evaluated(node, known) if name is None else params[name]
        results = [_evaluated(node, known) for node in self._ends]
        return [t for t in pytree.tree_leaves(results) if isinstance(t, Tensor)]


def _like(value: Any) -> tuple[object, ...]:
    return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else (type(value),)


def _frozen(value: Any, told: Callable[[Node], Hashable]) -> Hashable:
    """Arguments of an operator as something that can be compared; nodes as they are told."""
    if isinstance(value, Node):
        return ("node", told(value))
    if isinstance(value, list | tuple):
        return ("list", *(_frozen(x, told) for x in value))
    if isinstance(value, Mapping):
        return ("dict", *((key, _frozen(x, told)) for key, x in value.items()))
    if isinstance(value, slice):
        return ("slice", *(_frozen(x, told) for x in (value.start, value.stop, value.step)))
    return (type(value), value)


def _read_by(weight: Node) -> Node | None:
    """What a linear layer reads with this weight, if that is all it is used for."""
    reader = next(iter(weight.users), None)
    if reader is None or len(weight.users) > 1 or reader.target is not torch.ops.aten.linear.default:
        return None
    x, matrix = reader.args[:2]
    return x if isinstance(x, Node) and matrix is weight else None


class _Constants:
    """Values of the nodes that no parameter influences, in float64 on the CPU."""

    def __init__(self, program: Program, inputs: Sequence[Any]) -> None:
        self._program = program
        self._inputs = dict(zip(program.inputs, inputs, strict=False))
        self._known: dict[Node, Any] = {}
        self._generator = torch.Generator().manual_seed(1)
        self.parameters: list[Node] = []
        self.tried: dict[Hashable, bool] = {}
        self._names: dict[Node, Node] = {}
        self._first: dict[Hashable, Node] = {}
        self._dependent: set[Node] = set()
        for node in program.graph.graph.nodes:
            if node.op == "placeholder" and node.name in program.states:
                self.parameters.append(node)
                self._dependent.add(node)
            elif any(source in self._dependent for source in node.all_input_nodes):
                self._dependent.add(node)

    def is_dependent(self, node: Node) -> bool:
        """Whether parameters influence it."""
        return node in self._dependent

    def name(self, node: Node) -> Node:
        """The first node that applies the same operator to the same constants."""
        if node not in self._names:
            same = node
            if node.op == "call_function":
                key = (_frozen(node.target, self.name), _frozen((node.args, node.kwargs), self.name))
                same = self._first.setdefault(key, node)
            self._names[node] = same
        return self._names[node]

    def drawn(self, node: Node, generator: torch.Generator) -> Any:
        """The value of a node, or random numbers in its place where it depends on parameters."""
        if node not in self._dependent:
            return self(node)
        like = node.meta.get("val")
        if not isinstance(like, Tensor) or not like.is_floating_point():
            raise _UnknownError(f"{node.name} depends on parameters")
        return torch.randn(tuple(like.shape), generator=generator, dtype=torch.float64)

    def __call__(self, node: Node) -> Any:
        """The value of a node that depends on no parameter."""
        waiting = [node]
        while waiting:
            last = waiting[-1]
            missing = [source for source in last.all_input_nodes if source not in self._known]
            if last in self._known or not missing:
                waiting.pop()
                if last not in self._known:
                    self._known[last] = self._value(last)
            else:
                waiting += missing
        return self._known[node]

    def _value(self, node: Node) -> Any:
        if node.op == "placeholder":
            held = self._program.held.get(node.name, self._inputs.get(node.name))
            return self._concrete(held)
        if node.op == "get_attr":
            found = operator.attrgetter(str(node.target))(self._program.graph)
            return self._concrete(found)
        return _evaluated(node, self._known)

    def _concrete(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_meta:
            # What holds for random numbers holds for all others but exceptions.
            if not value.is_floating_point():
                raise _UnknownError("an integer on the meta device")
            return torch.rand(tuple(value.shape), generator=self._generator, dtype=torch.float64) + 0.5
        if isinstance(value, Tensor | GraphModule | int | float | bool):
            return _double(value)
        raise _UnknownError("no value")


def _evaluated(node: Node, known: Mapping[Node, Any]) -> Any:
    """One operator on known operands, with float64 in the place of other floating-point types."""
    target: Any = node.target
    args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: known[n])
    args, kwargs = pytree.tree_map(_double, (args, kwargs))
    if isinstance(target, torch._ops.HigherOrderOperator):
        if str(target.name()) not in INLINED:  # type: ignore[no-untyped-call]
            raise _UnknownError(f"{node.name} runs other code")
        k = next(k for k, a in enumerate(args) if isinstance(a, GraphModule))
        return _run(args[k], [a for a in args[k + 1 :] if not isinstance(a, str)])
    with torch.no_grad():
        return pytree.tree_map(_double, target(*args, **kwargs))


def _run(graph: GraphModule, arguments: list[Any]) -> Any:
    known: dict[Node, Any] = {}
    pending = list(arguments)
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            known[node] = pending.pop(0)
        elif node.op == "get_attr":
            known[node] = _double(operator.attrgetter(str(node.target))(graph))
        elif node.op == "output":
            return torch.fx.node.map_arg(node.args[0], lambda n: known[n])
        elif node.users:
            known[node] = _evaluated(node, known)
    return None


def _double(value: Any) -> Any:
    if isinstance(value, Tensor):
        wide = torch.float64 if value.is_floating_point() else torch.complex128 if value.is_complex() else value.dtype
        return value.detach().to(device="cpu", dtype=wide)
    if isinstance(value, torch.dtype):
        return torch.float64 if value.is_floating_point else torch.complex128 if value.is_complex else value
    return torch.device("cpu") if isinstance(value, torch.device) else value

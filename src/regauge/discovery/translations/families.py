"""The families of translations of a traced model: candidates, followed in the order of the chart."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from regauge.core.act import covered
from regauge.core.chart import chart_gains
from regauge.core.symmetry import Symmetry
from regauge.core.translations import Entries, Translation
from regauge.discovery.operators import operator_name
from regauge.discovery.rewrites.gains import gains
from regauge.discovery.trace import Program
from regauge.discovery.translations.following import LAYERS, Graph, follow
from regauge.discovery.translations.offsets import Term, pattern_of


def find_translations(program: Program, symmetry: Symmetry) -> Symmetry:
    """A symmetry with its families of translations, and the gains that are one in a representative.

    Families are found one by one, in the order in which the chart takes them out: first means of matrices, then single
    biases, then means of biases. No family may change what an earlier one made zero or centered, so that
    the homes of earlier families take nothing back; and what two families of one parameter share belongs to the first.
    """
    found = replace(symmetry, gains=tuple(name for name in gains(program) if name not in symmetry.ones))
    ones = frozenset((*chart_gains(found), *symmetry.ones))
    search = _Search(Graph(program, ones), found, frozenset(gains(program)) | ones)
    return replace(found, translations=tuple(search.run()))


class _Search:
    """The families so far, and the parameters that may still take offsets back."""

    def __init__(self, graph: Graph, symmetry: Symmetry, factors: frozenset[str]) -> None:
        self.graph, self.symmetry = graph, symmetry
        fixed = frozenset((*symmetry.structure, *factors, *symmetry.unused))
        self.names = [name for name in self._in_order() if name not in fixed]
        self.statistics = frozenset(symmetry.buffers) - fixed
        self.found: list[Translation] = []

    def run(self) -> list[Translation]:
        parameters = [name for name in self.names if name not in self.statistics]
        matrices = [name for name in parameters if self._ndim(name) > 1]
        vectors = [name for name in parameters if self._ndim(name) == 1]
        for name in sorted(matrices, key=lambda name: not self._is_position(name)):
            for axis in range(self._ndim(name)):
                self._try(name, (axis,))
        for name in vectors:
            self._try(name, ())
        for name in vectors:
            self._try(name, (0,))
        return self.found

    def _gain(self, name: str, axis: int) -> Entries | None:
        """The gain of the LayerNorm behind which layers read through an axis of a parameter, if it stays as it is."""
        found = set()
        for node in self.graph.placeholders[name]:
            for user in node.users:
                kind = operator_name(user)
                if kind not in ("linear", "addmm") or axis != (1 if kind == "linear" else 0):
                    return None
                found.add(self.graph.norm_gain(user.args[LAYERS[kind][0]]))
        return found.pop() if len(found) == 1 else None

    def _ndim(self, name: str) -> int:
        return len(self.graph.program.shapes[name])

    def _in_order(self) -> list[str]:
        """Parameters in the order in which operators use them."""
        used: dict[str, None] = {}
        for node in self.graph.order:
            for source in node.all_input_nodes if node.op == "call_function" else ():
                if (name := self.graph.parameter(source)) is not None:
                    used[name] = None
        return list(used)

    def _is_position(self, name: str) -> bool:
        """Whether a table is looked up, or added, alike for all inputs."""
        users = [user for node in self.graph.placeholders[name] for user in node.users]
        return all(len(user.args) > 1 and self.graph.constant(user.args[1]) is not None for user in users)

    def _try(self, name: str, constant: tuple[int, ...]) -> None:
        """Follow what is added alike along some axes of a parameter: to all of it, or else to each of its pieces."""
        if any(self.graph.program.shapes[name][axis] < 2 for axis in constant):
            return
        shape = self.graph.program.shapes[name]
        if constant and any(self._follow(*blocks) for blocks in self._blocks(name, *constant)):
            return
        gain = self._gain(name, *constant) if constant and len(shape) == 2 else None
        for entries in self._pieces(name, constant):
            for own in (None, gain) if gain else (None,):
                if self._follow(entries, constant, own):
                    if entries.sizes == shape:
                        return
                    break

    def _blocks(self, name: str, axis: int) -> Iterator[tuple[Entries, tuple[int, ...]]]:
        """A parameter with an axis cut into the groups of a group normalization, which is blind to each of them."""
        whole = Entries.whole(name, self.graph.program.shapes[name])
        length, stride = whole.sizes[axis], whole.strides[axis]
        for count in self.graph.norm_groups:
            if length % count == 0 and 1 < count < length:
                sizes = (*whole.sizes[:axis], count, length // count, *whole.sizes[axis + 1 :])
                strides = (*whole.strides[:axis], stride * length // count, stride, *whole.strides[axis + 1 :])
                yield Entries(name, sizes, strides), (axis + 1,)

    def _follow(self, entries: Entries, constant: tuple[int, ...], gain: Entries | None = None) -> bool:
        name = entries.parameter
        centered = self._centered(entries, constant)
        if centered is None:
            return False
        family = Translation(
            _name(entries, constant, self.graph.program.shapes[name]), entries, constant, gain, centered
        )
        takers = frozenset(self.names) - {one.entries.parameter for one in self.found}
        places = _places(family, self.graph.program.shapes[name])
        start = Term((), int(places.max()), places)
        images = follow(self.graph, start, name, self.statistics, gain)
        images = follow(self.graph, start, name, takers, gain) if images is None else images
        if images is None:
            return False
        family = replace(family, images=images)
        if set(family.coefficients) & set(family.parameters) or not family.size:
            return False
        self.found.append(family)
        return True

    def _centered(self, entries: Entries, constant: tuple[int, ...]) -> tuple[int, ...] | None:
        """Axes of the vector along which earlier families of a parameter leave a sum of zero; None if they overlap."""
        free = [k for k in range(len(entries.sizes)) if k not in constant]
        axes: list[int] = []
        for other in self.found:
            if other.entries.parameter != entries.parameter:
                continue
            if other.entries != entries:
                if _overlap(other.entries, entries):
                    return None
                continue
            if not other.constant or other.constant == constant:
                return None
            axes += [free.index(axis) for axis in other.constant if axis in free]
        return tuple(axes)

    def _pieces(self, name: str, constant: tuple[int, ...]) -> Iterator[Entries]:
        """All of a parameter, then the pieces of an axis on which groups act (fused queries, keys and values)."""
        shape = self.graph.program.shapes[name]
        whole = Entries.whole(name, shape)
        yield whole
        free = [axis for axis in range(len(shape)) if axis not in constant]
        if not free:
            return
        axis, seen = free[0], set()
        for group in self.symmetry.groups:
            for place in group.placements:
                if place.parameter != name or place.axis != axis:
                    continue
                positions = covered(group, place, shape)[0].sort().values
                if len(positions) == shape[axis] or tuple(positions.tolist()) in seen:
                    continue
                seen.add(tuple(positions.tolist()))
                if (piece := _along_axis(whole, axis, positions)) is not None:
                    yield piece


def _along_axis(whole: Entries, axis: int, positions: Tensor) -> Entries | None:
    """The entries at some positions of the axis of a parameter, which become one axis if they are evenly spread."""
    pattern = pattern_of(positions)
    if pattern is None or (len(pattern.sizes) > 1 and len(whole.sizes) > 1):
        return None
    stride = whole.strides[axis]
    sizes = (*whole.sizes[:axis], *pattern.sizes, *whole.sizes[axis + 1 :])
    strides = (*whole.strides[:axis], *(stride * one for one in pattern.strides), *whole.strides[axis + 1 :])
    return Entries(whole.parameter, sizes, strides, pattern.start * stride)


def _places(family: Translation, shape: tuple[int, ...]) -> Tensor:
    """For each entry of the home 1 plus the number of the vector's entry that is added there, or zero."""
    sizes = [1 if k in family.constant else n for k, n in enumerate(family.entries.sizes)]
    numbers = torch.arange(1, torch.Size(sizes).numel() + 1).reshape(sizes).expand(family.entries.sizes)
    if family.entries.sizes == shape:
        return numbers
    places = torch.zeros(shape, dtype=torch.int64)
    family.entries.of(places).copy_(numbers)
    return places


def _overlap(one: Entries, other: Entries) -> bool:
    """Whether two arrays of entries of one parameter share some."""
    if one.last < other.start or other.last < one.start:
        return False
    numbers = torch.zeros(max(one.last, other.last) + 1, dtype=torch.int8)
    for entries in (one, other):
        view = entries.of(numbers)
        view.copy_(view + 1)
    return bool((numbers > 1).any())


def _name(entries: Entries, constant: tuple[int, ...], shape: tuple[int, ...]) -> str:
    piece = "" if entries.sizes == shape else f"[{entries.start}:{entries.last + 1}]"
    return entries.parameter + piece + (f".mean({constant[0]})" if constant else "")

"""An offset on its way through a traced model, and the parameters that take it back."""

import heapq
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils import _pytree as pytree

from regauge.core.translations import Entries, Image, ImageStep
from regauge.discovery.operators import PIECES, SAME, VIEWS, argument, operator_name, shape_of, words
from regauge.discovery.translations.graph import Graph, call, given
from regauge.discovery.translations.offsets import Addend, Offset, SeenError, along, each_position, once, picked

MOVES = (
    VIEWS | PIECES | words("mT adjoint expand cat stack index_select roll flip repeat repeat_interleave getitem index")
)
"""Operators whose results are entries of their operands."""
BIASES = {"layer_norm": 3, "group_norm": 3, "batch_norm": 2, "instance_norm": 2, "linear": 2, "addmm": 0}
BIASES |= dict.fromkeys(words("conv1d conv2d conv3d"), 2)
"""Operators that add a parameter to each channel, and which of their arguments it is."""


@dataclass(frozen=True, eq=False)
class Taker:
    """A parameter that is added in a value, and may take an offset back.

    Attributes:
        entries: Its entries.
        constant: The axes of these along which an offset must be the same: rows of a table that are looked up.
        places: For each entry of the value 1 plus the number of the parameter's entry that is added there, counted
            without constant axes; zero where none is.
    """

    entries: Entries
    constant: tuple[int, ...]
    places: Tensor

    @property
    def count(self) -> int:
        """The number of entries, counted without constant axes."""
        return math.prod(size for axis, size in enumerate(self.entries.sizes) if axis not in self.constant)

    def move(self, function: Callable[[Tensor], Tensor]) -> "Taker":
        """The parameter in what an operator makes that only moves values."""
        return replace(self, places=function(self.places))


Rules = Mapping[str, Callable[["Run", Node], Any]]
"""The effect of each operator on an offset, by its name; an operator that is not there sees it."""


class Run:
    """One offset on its way through the model.

    Operators act on it by rules. Parameters take it back if `is_eager`; otherwise `is_missed` says that some could.
    """

    def __init__(self, graph: Graph, takers: frozenset[str], rules: Rules, *, is_eager: bool) -> None:
        self.graph, self.takers, self.rules, self.is_eager = graph, takers, rules, is_eager
        self.is_missed = False
        self.passed: set[Entries] = set()
        self.read: set[Entries | None] = set()
        self.images: list[Image] = []
        self.offsets: dict[Node, Any] = {}

    def follow(self, home: str, start: Addend) -> tuple[Image, ...]:
        waiting: list[tuple[int, Node]] = []
        queued: set[Node] = set()

        def arrive(node: Node, offset: Any) -> None:
            if node in self.graph.ends and not self._is_of(self.graph.written.get(node), offset):
                raise SeenError
            self.offsets[node] = offset
            for user in node.users:
                if user not in queued and (user.users or user in self.graph.ends):
                    queued.add(user)
                    heapq.heappush(waiting, (self.graph.order[user], user))

        for node in self.graph.placeholders.get(home, ()):
            arrive(node, Offset((start,)))
        while waiting:
            node = heapq.heappop(waiting)[1]
            name = operator_name(node)
            rule = self.rules.get(name) if node.op == "call_function" else None
            if rule is None:
                raise SeenError
            found = rule(self, node)
            if isinstance(found, Offset) and found.is_nothing:
                found = None
            if found is not None:
                if self._rounds(node, home):
                    raise SeenError
                arrive(node, found)
        if any(gain and gain.parameter not in self.graph.ones for gain in self.read):
            # What is added is divided by a gain that stays, so that all that reads it must do so behind that gain.
            users = [user for node in self.graph.placeholders[home] for user in node.users]
            if len(self.read) > 1 or any(operator_name(user) not in ("linear", "addmm") for user in users):
                raise SeenError
        self.passed.update(gain for gain in self.read if gain)
        return tuple(self.images)

    def _is_of(self, name: str | None, offset: Any) -> bool:
        """Whether a parameter that the model writes has an offset already."""
        places = self.graph.placeholders.get(name, ()) if name else ()
        return any(known.is_equal(offset) for known in map(self.of, places) if known)

    def _rounds(self, node: Node, home: str) -> bool:
        """Whether a value has a coarser dtype than a parameter; of several results the first one counts."""
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            value = next((one for one in pytree.tree_leaves(value) if isinstance(one, Tensor)), None)
        kept = self.graph.placeholders[home][0].meta["val"].dtype
        return value is None or not value.is_floating_point() or value.dtype.itemsize < kept.itemsize

    def of(self, operand: Any) -> Any:
        return self.offsets.get(operand) if isinstance(operand, Node) else None

    def take_back(self, operand: Any, offset: Offset, spread: Callable[[Tensor], Tensor]) -> Offset | None:
        """The rest of an offset: none, if parameters that are added in an operand take it back everywhere."""
        if not offset.terms:
            return None
        if offset.is_masked or self.is_missed or not (found := self._takers(operand)):
            return offset
        if not self.is_eager:
            self.is_missed = True
            return offset
        takers = [taker.move(spread) for taker in found]
        arrays = once([*(taker.places for taker in takers), *(term.places for term in offset.terms)])
        places, terms = arrays[: len(takers)], arrays[len(takers) :]
        images = []
        for taker, own in zip(takers, places, strict=True):
            is_there = own != 0
            for term, there in zip(offset.terms, terms, strict=True):
                given = torch.zeros(taker.count + 1, dtype=torch.int64)  # Of a table, some rows may not be read.
                given[own.flatten()] = there.flatten()
                if not torch.equal(given[own][is_there], there[is_there]):
                    return offset
                images.append((term, taker, given[1:]))
        covered = torch.stack([own != 0 for own in places]).any(0)
        if any(bool(((there != 0) & ~covered).any()) for there in terms):
            return offset
        try:
            self.images += [image for one in images if (image := self.image(*one)) is not None]
        except SeenError:
            return offset
        return None

    @staticmethod
    def image(term: Addend, taker: Taker, given: Tensor) -> Image | None:
        """The image of a vector in a parameter that takes it back, where its entries are numbered as given."""
        entries, there = taker.entries, (given != 0).nonzero().flatten()
        if not len(there):
            return None
        if len(there) < given.numel():
            first, last = int(there[0]), int(there[-1])
            if len(entries.sizes) != 1 or last - first + 1 != len(there):
                raise SeenError
            entries = Entries(entries.parameter, (len(there),), (1,), first)
            given = given[first : last + 1]
        steps, _ = picked(term, given)
        return Image(entries, taker.constant, (*steps, ImageStep("scale", factor=-1.0)))

    def _takers(self, node: Any) -> list[Taker]:
        """Parameters that are added in a value and may take an offset back: one, or one for each part of the value."""
        if not isinstance(node, Node) or node in self.offsets:
            return []
        if (name := self.free_parameter(node)) is not None:
            shape = self.graph.program.shapes[name]
            return [Taker(Entries.whole(name, shape), (), each_position(shape, ()))]
        if node.op != "call_function" or len(node.users) != 1 or node in self.graph.ends:
            return []
        kind, shape = operator_name(node), shape_of(node)
        if kind in SAME:
            return self._takers(given(node)[0])
        if kind == "cat":
            return self._side_by_side(node)
        if kind in MOVES - {"getitem"} and len(node.all_input_nodes) == 1:
            try:
                return [
                    taker.move(lambda own: call(node, {given(node)[0]: own})) for taker in self._takers(given(node)[0])
                ]
            except SeenError:
                return []
        if kind in BIASES:
            dim = 1 if kind.endswith("_norm") and kind != "layer_norm" else len(shape) - 1
            dim -= int(kind[-2]) if kind.startswith("conv") else 0
            name = self.free_parameter(argument(node, BIASES[kind], None))
            if name is None or self.graph.program.shapes[name] != (shape[dim],):
                return []
            return [Taker(Entries.whole(name, (shape[dim],)), (), along(torch.arange(1, shape[dim] + 1), dim, shape))]
        if kind == "embedding" and (name := self.free_parameter(given(node)[0])) is not None:
            whole = Entries.whole(name, self.graph.program.shapes[name])
            return [Taker(whole, (0,), along(torch.arange(1, shape[-1] + 1), len(shape) - 1, shape))]
        if kind == "add" and not node.kwargs:
            for operand in given(node)[:2]:
                if found := self._takers(operand):
                    return [taker.move(lambda own: own.expand(shape)) for taker in found]
        return []

    def free_parameter(self, node: Any) -> str | None:
        """The parameter that a node is, if it may take offsets back and nothing else reads it."""
        name = self.graph.parameter(node)
        return name if name in self.takers and self.graph.is_single(str(name)) else None

    def _side_by_side(self, node: Node) -> list[Taker]:
        """Parameters that are added in some of several values that are put side by side."""
        parts: Any = given(node)[0]
        found = []
        for k, part in enumerate(parts):
            for taker in self._takers(part):
                arrays = [torch.zeros(shape_of(one), dtype=torch.int64) for one in parts]
                arrays[k] = taker.places.expand(shape_of(part))
                found.append(replace(taker, places=torch.cat(arrays, int(argument(node, 1, 0)))))
        return found

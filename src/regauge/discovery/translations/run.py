"""The propagation of a change of values (offset) through a traced model, and the parameters that can compensate for the
change.
"""

import heapq
import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils import _pytree as pytree

from regauge.core.translations import Entries, Image, ImageStep
from regauge.discovery.operators import PIECES, SAME, VIEWS, argument, operator_name, shape_of, words
from regauge.discovery.translations.expansion import Expansion
from regauge.discovery.translations.graph import BIASES, Graph, call, given
from regauge.discovery.translations.offsets import Addend, Offset, SeenError, along, each_position, once, picked

MOVES = (
    VIEWS | PIECES | words("mT adjoint expand cat stack index_select roll flip repeat repeat_interleave getitem index")
)
"""Operators whose result entries are entries of their operands."""


@dataclass(frozen=True, eq=False)
class Taker:
    """A parameter that is added to a value and can therefore compensate for an offset of the value.

    Attributes:
        entries: The entries of the parameter.
        constant: The axes of `entries` along which an offset must be constant, such as the rows of a lookup table.
        places: For each entry of the value: one plus the index of the parameter entry that is added to it, or zero if
            nothing is added. Constant axes are not counted in the index.
        factors: Entries of other parameters. The model multiplies the parameter by the factors before it adds the
            product to the value.
    """

    entries: Entries
    constant: tuple[int, ...]
    places: Tensor
    factors: tuple[Entries, ...] = ()

    @property
    def count(self) -> int:
        """The number of entries of the parameter at each index of the constant axes."""
        return math.prod(size for axis, size in enumerate(self.entries.sizes) if axis not in self.constant)

    def move(self, function: Callable[[Tensor], Tensor]) -> "Taker":
        """Return the parameter after `function` has rearranged the value that contains it as a summand."""
        return replace(self, places=function(self.places))

    def behind(self, factors: Entries, shape: tuple[int, ...]) -> "Taker | None":
        """Return the parameter after the model has multiplied it by a number, or by one factor for each entry.

        Return None for other factors.
        """
        places = self.places.expand(shape)
        wide = [k for k, n in enumerate(factors.sizes) if n > 1]
        strides = (0,)
        for k in wide:
            axis = len(shape) - len(factors.sizes) + k
            own = along(torch.arange(1, self.count + 1), axis, shape) if shape[axis] == self.count else None
            if len(wide) > 1 or own is None or not torch.equal(*once([own, places])):
                return None
            strides = (factors.strides[k],)
        one = Entries(factors.parameter, (self.count,), strides, factors.start)
        return None if self.constant else replace(self, places=places, factors=(*self.factors, one))


Rules = Mapping[str, Callable[["Run", Node], Any]]
"""For each operator name, the function that returns the change (offset) of the operator's result.

If an operator without a rule reads an offset, the offset is assumed to change the outputs of the model.
"""


Event = tuple[Literal["image", "divided", "passed", "read", "asked"], Any]
"""The kind of an event during the propagation of an offset, and the object of the event.

The object of "image" is the change of a parameter that compensates for the offset. A compensating change that divides
by a factor of the model, which may be zero, is also the object of "divided". The object of "passed" is a gain of one
that multiplies the offset. The object of "read" is a gain that divides the offset, or None. The object of "asked" is
the name of a parameter. Results that were cached after an "asked" event do not apply if the vector is added to the
named parameter.
"""


class Onward(NamedTuple):
    """The cached effects of the change of a node's value: which parameters compensate for the change, and whether an
    output may change.

    The effects are cached, because vectors that are added to parameters of different layers often change a later value
    equally.
    """

    events: list[Event]
    is_missed: bool
    is_seen: bool


class Run:
    """The propagation of a change (offset) of the parameter `home` through the model.

    Rules define how operators act on the offset. With `is_eager`, the first parameter that can compensate for the
    offset does so. Without `is_eager`, no parameter that is added to a value compensates, but `is_missed` records
    whether some parameter could. With `may_divide`, a parameter may compensate although the model multiplies it by
    factors. The vector is then divided by the factors.
    """

    def __init__(
        self,
        graph: Graph,
        home: str,
        takers: frozenset[str],
        rules: Rules,
        *,
        is_eager: bool,
        may_divide: bool = False,
    ) -> None:
        self.may_divide = may_divide
        self.graph, self.home, self.takers, self.rules, self.is_eager = graph, home, takers, rules, is_eager
        self.expansion, self.is_missed = Expansion(graph), False
        self.events: list[Event] = []
        self.offsets: dict[Node, Any] = {}
        self.coarsest = graph.placeholders[home][0].meta["val"].dtype.itemsize if home in graph.placeholders else 0

    def follow(self, start: Addend) -> tuple[Image, ...]:
        points: list[tuple[Hashable, int]] = []
        is_seen = True
        try:
            self._advance(start, points)
            is_seen = False
        finally:
            for key, count in points:
                if ("asked", self.home) not in self.events[count:]:
                    self.graph.onward[key] = Onward(self.events[count:], self.is_missed, is_seen)
        read = set(self._met("read"))
        if any(gain and gain.parameter not in self.graph.ones for gain in read):
            # The vector is divided by a gain. Every use of the parameter must then be a layer that reads this gain's
            # output.
            users = [user for node in self.graph.placeholders[self.home] for user in node.users]
            if len(read) > 1 or any(operator_name(user) not in ("linear", "addmm") for user in users):
                raise SeenError
        return self._images()

    def _images(self) -> tuple[Image, ...]:
        """Return the changes of parameters that compensate for the offset.

        Several steps of a recurrent layer may add the same bias. A repeated bias must compensate in each step, but the
        change of the bias is returned only once.
        """
        met = self._met("image")
        for image in met:
            name = image.entries.parameter
            if not self.graph.is_single(name) and met.count(image) != len(self.graph.placeholders[name][0].users):
                raise SeenError
        return tuple(met if all(self.graph.is_single(one.entries.parameter) for one in met) else dict.fromkeys(met))

    @property
    def divided(self) -> list[Image]:
        """The compensating changes of parameters that the model multiplies by factors. In each change, the added vector
        is divided by the factors.
        """
        return self._met("divided")

    @property
    def gains(self) -> frozenset[Entries]:
        """The gains that multiplied or divided the offset."""
        return frozenset([*self._met("passed"), *(gain for gain in self._met("read") if gain)])

    def _met(self, kind: str) -> list[Any]:
        return [what for one, what in self.events if one == kind]

    def _advance(self, start: Addend, points: list[tuple[Hashable, int]]) -> None:
        """Apply the rules of operators in graph order.

        The list `points` receives the keys under which results are cached. Each key comes with the number of events
        that were recorded before it.
        """
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

        for node in self.graph.placeholders.get(self.home, ()):
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
            if found is None:
                continue
            if self._rounds(node):
                raise SeenError
            content = found.content() if isinstance(found, Offset) and not waiting else None
            if content is not None:  # All further effects of the offset pass through this node.
                key = (node, content, self.takers, self.is_eager, self.may_divide, self.is_missed, self.coarsest)
                onward = self.graph.onward.get(key)
                if onward is not None and ("asked", self.home) not in onward.events:
                    self.events += onward.events
                    self.is_missed = onward.is_missed
                    if onward.is_seen:
                        raise SeenError
                    return
                points.append((key, len(self.events)))
            arrive(node, found)

    def _is_of(self, name: str | None, offset: Any) -> bool:
        """Return whether the model writes a value into a tensor, such as a running mean, and the value and the tensor
        change by the same amount.
        """
        self.events.append(("asked", name))
        places = self.graph.placeholders.get(name, ()) if name else ()
        return any(known.is_equal(offset) for known in map(self.of, places) if known)

    def _rounds(self, node: Node) -> bool:
        """Return whether a value has a coarser dtype than the parameter.

        If an operator has several results, only the first is checked.
        """
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            value = next((one for one in pytree.tree_leaves(value) if isinstance(one, Tensor)), None)
        return value is None or not value.is_floating_point() or value.dtype.itemsize < self.coarsest

    def of(self, operand: Any) -> Any:
        return self.offsets.get(operand) if isinstance(operand, Node) else None

    def take_back(self, operand: Any, offset: Offset, spread: Callable[[Tensor], Tensor]) -> Offset | None:
        """Return None if parameters that are added in the computation of `operand` compensate for the whole offset;
        otherwise return the offset.
        """
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
                given = torch.zeros(taker.count + 1, dtype=torch.int64)  # The model may not read all rows of a table.
                given[own.flatten()] = there.flatten()
                if not torch.equal(given[own][is_there], there[is_there]):
                    return offset
                images.append((term, taker, given[1:]))
        covered = torch.stack([own != 0 for own in places]).any(0)
        if any(bool(((there != 0) & ~covered).any()) for there in terms):
            return offset
        try:
            made = [(image, one[1]) for one in images if (image := self.image(*one)) is not None]
        except SeenError:
            return offset
        divided = [image for image, taker in made if taker.factors and _is_divided(image)]
        if divided and not self.may_divide:
            return offset
        self.events += [("image", image) for image, _ in made]
        self.events += [("divided", image) for image in divided]
        return None

    @staticmethod
    def image(term: Addend, taker: Taker, given: Tensor) -> Image | None:
        """Return the change of the parameter `taker` that compensates for the vector of `term`, if the parameter and
        the vector are added to one value.

        The array `given` has one number for each entry of the parameter. An entry of `given` is one plus the index of
        the vector entry that is added to the same entry of the value, or zero.
        """
        entries, there = taker.entries, (given != 0).nonzero().flatten()
        if not len(there):
            return None
        if len(there) < given.numel():
            first, last = int(there[0]), int(there[-1])
            if len(entries.sizes) != 1 or last - first + 1 != len(there):
                raise SeenError
            entries = Entries(entries.parameter, (len(there),), (1,), first)
            given = given[first : last + 1]
            if taker.factors:
                raise SeenError
        steps, _ = picked(term, given)
        for factor in reversed(taker.factors):
            is_undone = steps[-1:] == (ImageStep("times", factor),)
            steps = steps[:-1] if is_undone else (*steps, ImageStep("over", factor))
        return Image(entries, taker.constant, (*steps, ImageStep("scale", factor=-1.0)))

    def _takers(self, node: Any) -> list[Taker]:
        """Return the parameters that are added to a value and can therefore compensate for a change of the value. Each
        part of a concatenation may have a different parameter that can compensate.
        """
        if not isinstance(node, Node) or node in self.offsets:
            return []
        if (name := self.free_parameter(node)) is not None:
            shape = self.graph.program.shapes[name]
            return [Taker(Entries.whole(name, shape), (), each_position(shape, ()))]
        if node.op != "call_function" or not self.graph.is_read_once(node) or node in self.graph.ends:
            return []
        kind = operator_name(node)
        if kind == "getitem":
            return self._piece(node)
        shape = shape_of(node)
        if kind in SAME:
            return self._takers(given(node)[0])
        if kind == "cat":
            return self._side_by_side(node)
        if kind in MOVES and len(node.all_input_nodes) == 1:
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
        if kind == "mul":
            for operand, other in (given(node), given(node)[::-1]):
                factors = self.graph.entries(other)
                if factors is not None:
                    behind = [taker.behind(factors, shape) for taker in self._takers(operand)]
                    if behind and None not in behind:
                        return [taker for taker in behind if taker is not None]
        if kind == "add" and not node.kwargs:
            for operand in given(node)[:2]:
                if found := self._takers(operand):
                    return [taker.move(lambda own: own.expand(shape)) for taker in found]
        return []

    def _piece(self, node: Node) -> list[Taker]:
        """Return the parameters that are added to one part of a value that an operator cuts into parts."""
        cut, index = given(node)
        if operator_name(cut) not in PIECES or not self.graph.is_read_once(cut) or cut in self.graph.ends:
            return []
        source = given(cut)[0]
        return [taker.move(lambda own: call(cut, {source: own})[index]) for taker in self._takers(source)]

    def free_parameter(self, node: Any) -> str | None:
        """Return the parameter that a node represents, if this parameter may change to compensate for changes of values
        (offsets).
        """
        name = self.graph.parameter(node)
        return name if name is not None and self.may_take(name) else None

    def may_take(self, name: str) -> bool:
        """Return whether a parameter may change to compensate for changes of values (offsets). One operator must read
        the parameter once, or all uses of the parameter must be biases in steps of one recurrent cell.
        """
        if name not in self.takers or not (self.graph.is_single(name) or self.graph.is_of_steps(name)):
            return False
        self.events.append(("asked", name))
        return name != self.home

    def _side_by_side(self, node: Node) -> list[Taker]:
        """Return parameters that are added to some of the values in a concatenation."""
        parts: Any = given(node)[0]
        found = []
        for k, part in enumerate(parts):
            for taker in self._takers(part):
                arrays = [torch.zeros(shape_of(one), dtype=torch.int64) for one in parts]
                arrays[k] = taker.places.expand(shape_of(part))
                found.append(replace(taker, places=torch.cat(arrays, int(argument(node, 1, 0)))))
        return found


def _is_divided(image: Image) -> bool:
    """Return whether the compensating change of a parameter divides the vector of the family by a factor."""
    return any(step.kind == "over" for step in image.steps)

"""Search for the translations of a traced model, by following the effect of added vectors through the model."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from regauge.core.act import covered
from regauge.core.chart import chart_gains
from regauge.core.groups import Exponent, Group, Placement
from regauge.core.symmetry import Symmetry
from regauge.core.translations import Entries, Image, ImageStep, TranslationFamily
from regauge.discovery.operators import SAME, VIEWS, operator_name
from regauge.discovery.rewrites.gains import gains
from regauge.discovery.trace import Program
from regauge.discovery.translations.effects import EFFECTS
from regauge.discovery.translations.expansion import LAYERS
from regauge.discovery.translations.graph import Graph, given
from regauge.discovery.translations.offsets import Addend, SeenError, pattern_of
from regauge.discovery.translations.run import Run


def find_translations(program: Program, symmetry: Symmetry) -> Symmetry:
    """Return the symmetry with its families of translations.

    The result also names the gains that are one in representatives, which are rescaled networks of the same function.

    Families are found in a fixed order. First, vectors change the means of matrices, then single biases, then the means
    of biases. Each family uses its vector to set entries of one parameter, its home parameter, to zero or to mean zero.
    No later family may change entries that an earlier family has set to zero or to mean zero. Therefore home parameters
    of earlier families cannot compensate for later families. If two families could change the same entries of a
    parameter, only the first family changes them.
    """
    found = replace(symmetry, gains=tuple(name for name in gains(program) if name not in symmetry.ones))
    ones = frozenset((*(chart_gains(found) if found.gains else ()), *symmetry.ones))
    exponents = frozenset(name for name, number in program.added.items() if isinstance(number, Exponent))
    search = _Search(Graph(program, ones), found, frozenset(gains(program)) | ones | exponents)
    return replace(found, translations=tuple(search.run()))


def follow(
    graph: Graph, start: Addend, home: str, takers: frozenset[str], *, may_divide: bool = False
) -> tuple[tuple[Image, ...], frozenset[Entries], list[Image]] | None:
    """Find changes of other parameters that compensate for a vector that is added to a parameter, or return None.

    Args:
        graph: The traced model.
        start: The vector that is added, with `places` in the shape of the whole parameter.
        home: The parameter to which the vector is added.
        takers: The parameters that may compensate for offsets.
        may_divide: Whether a parameter may compensate although the model multiplies it by factors. The vector is then
            divided by the factors.

    Returns:
        First, the changes of other parameters that compensate. Second, the gains that must divide the vector along its
        constant axis. A dividing gain stands before a layer that reads the parameter, or it multiplies a change that is
        equal for all units. Third, the compensating changes that divide the vector by a factor of the model.
    """
    for is_eager in (False, True):
        run = Run(graph, home, takers, EFFECTS, is_eager=is_eager, may_divide=may_divide)
        try:
            return run.follow(start), run.gains, run.divided
        except (SeenError, RuntimeError, ValueError, IndexError):
            # If an operator cannot be called on offsets, the outputs may change.
            if not run.is_missed:
                return None
    return None


class _Search:
    """A search for translation families that do not conflict with each other, through one traced model."""

    def __init__(self, graph: Graph, symmetry: Symmetry, factors: frozenset[str]) -> None:
        self.graph, self.symmetry = graph, symmetry
        fixed = frozenset((*symmetry.structure, *factors, *symmetry.unused))
        self.names = [name for name in self._in_order() if name not in fixed]
        self.takers = frozenset(self.names)
        self.statistics = frozenset(symmetry.buffers) - fixed
        self.candidates: list[tuple[TranslationFamily, Tensor]] = []
        self.found: list[TranslationFamily] = []
        self.cuts: dict[str, tuple[int, tuple[int, ...]]] = {}
        self.placements: dict[tuple[str, int], list[tuple[Group, Placement]]] = {}
        for group in symmetry.groups:
            for place in group.placements:
                self.placements.setdefault((place.parameter, place.axis), []).append((group, place))

    def run(self) -> list[TranslationFamily]:
        parameters = [name for name in self.names if name not in self.statistics]
        matrices = [name for name in parameters if self._ndim(name) > 1]
        vectors = [name for name in parameters if self._ndim(name) == 1]
        for name in matrices:  # tables that the model adds to values, as it adds biases
            if self._is_added(name) and not self._is_position(name):
                self._try(name, ())
        biases, self.candidates = self.candidates, []
        whole = {family.entries.parameter for family, _ in biases}
        matrices = [name for name in matrices if name not in whole]
        for name in sorted(matrices, key=lambda name: not self._is_position(name)):
            for axis in range(self._ndim(name)):
                self._try(name, (axis,))
        # Families for which another table compensates come before families that center this other table.
        self.candidates.sort(key=lambda one: not any(self._ndim(name) > 1 for name in one[0].parameters[1:]))
        self.candidates += biases
        means = {family.images[0].entries.parameter: family for family in self._statistics("mean")}
        for name in vectors:
            if name in means:  # before the family of the bias itself
                self.candidates.append((means[name], torch.zeros(0)))
            self._try(name, ())
        for name in vectors if self.graph.has_factors else ():
            self.candidates += [(family, torch.zeros(0)) for family in self._behind_factors(name)]
        self._accept_all()
        whole, changed = {family.name for family in self.found}, {n for one in self.found for n in one.parameters}
        for name in vectors:
            if name not in whole:
                self._try(name, (0,))
        for name in matrices:  # single rows, such as the query of attention that pools tokens
            if self._is_row(name) and name not in changed:
                self._try(name, ())
        self._accept_all()
        # Variances come first, so that gains no longer depend on them.
        self.found = [*self._statistics("variance"), *self.found]
        return self.found

    def _statistics(self, kind: Literal["mean", "variance"]) -> Iterator[TranslationFamily]:
        """Yield families that change running means together with biases, or running variances together with gains.

        Families of running statistics leave the function unchanged only as long as the model uses its stored running
        statistics.
        """
        for node in self.graph.order:
            if node.op != "call_function" or operator_name(node) != "batch_norm" or given(node)[5]:
                continue
            names = [self.graph.parameter(one) for one in given(node)[1:5]]
            if any(name is None or not self.graph.is_single(name) for name in names):
                continue
            weight, bias, mean, variance = (Entries.whole(str(n), self.graph.program.shapes[str(n)]) for n in names)
            is_free = bias.parameter in self.names and weight.parameter not in self.symmetry.structure
            if not is_free or {bias.parameter, weight.parameter} & self.statistics:
                continue
            if not {mean.parameter, variance.parameter} <= self.statistics:
                continue
            eps = float(given(node)[7])
            if kind == "mean":
                steps = (ImageStep("times", weight), ImageStep("over root", variance, eps))
                yield TranslationFamily(mean.parameter, mean, images=(Image(bias, (), steps),), is_stored_only=True)
            else:
                half = Image(weight, (), (ImageStep("scale", factor=0.5),))
                yield TranslationFamily(variance.parameter, variance, images=(half,), is_stored_only=True, eps=eps)

    def _ndim(self, name: str) -> int:
        return len(self.graph.program.shapes[name])

    def _in_order(self) -> list[str]:
        """Return parameters in the order in which operators use them."""
        used: dict[str, None] = {}
        for node in self.graph.order:
            for source in node.all_input_nodes if node.op == "call_function" else ():
                if (name := self.graph.parameter(source)) is not None:
                    used[name] = None
        return list(used)

    def _is_position(self, name: str) -> bool:
        """Return whether a table is looked up or added in the same way for all inputs, as position tables are."""
        users = [user for node in self.graph.placeholders[name] for user in node.users]
        return all(len(user.args) > 1 and self.graph.constant(user.args[1]) is not None for user in users)

    def _is_added(self, name: str) -> bool:
        """Return whether a table is added to a value directly, or is looked up in the same way for all inputs."""
        users = [user for node in self.graph.placeholders[name] for user in node.users]
        for user in users:
            if operator_name(user) in SAME | VIEWS:
                users += user.users
        return self._is_position(name) or any(operator_name(user) == "add" for user in users)

    def _is_weight(self, name: str) -> bool:
        """Return whether a matrix is the weight of a layer."""
        users = [(user, node) for node in self.graph.placeholders[name] for user in node.users if user.users]
        layers = [(user, node) for user, node in users if operator_name(user) in LAYERS]
        return any(given(user)[LAYERS[operator_name(user)][1]] is node for user, node in layers)

    def _is_row(self, name: str) -> bool:
        """Return whether a table has one row, and is not the weight of a layer."""
        shape = self.graph.program.shapes[name]
        return math.prod(shape) == shape[-1] and not self._is_weight(name)

    def _try(self, name: str, constant: tuple[int, ...]) -> None:
        """Propagate a vector that is constant along some axes of a parameter through the model.

        First, the vector is added to all entries of the parameter. If other parameters cannot compensate for this
        vector, vectors on parts of the parameter are tried.
        """
        shape = self.graph.program.shapes[name]
        if any(shape[axis] < 2 for axis in constant):
            return
        if constant and self._try_stretches(name, *constant):
            return
        for entries, own in self._blocks(name, *constant) if constant else ():
            blocks = TranslationFamily(entries.family_name(own, shape), entries, own)
            if self._follow(blocks, _numbers(entries, own).reshape(shape)):
                return
        for entries, places in self._pieces(name, constant):
            family = TranslationFamily(entries.family_name(constant, shape), entries, constant)
            if self._follow(family, places) and entries.sizes == shape:
                return

    def _try_stretches(self, name: str, axis: int) -> bool:
        """Propagate a separate vector through the model for each range of a position table.

        Return whether the table has several ranges.

        A table is often added to a concatenation. Each concatenated value may then compensate for the vector that is
        added to one range of the table.
        """
        shape = self.graph.program.shapes[name]
        whole = Entries.whole(name, shape)
        cut, lengths = self.cuts.get(name, (axis, ()))
        for known in [lengths] if lengths else self.graph.joined if self._is_added(name) else ():
            if sum(known) != shape[cut]:
                continue
            found, start = [], 0
            for length in known:
                sizes = (*whole.sizes[:cut], length, *whole.sizes[cut + 1 :])
                entries = replace(whole, sizes=sizes, start=start * whole.strides[cut])
                places = torch.zeros(shape, dtype=torch.int64)
                places.narrow(cut, start, length).copy_(_numbers(entries, (axis,)))
                family = TranslationFamily(entries.family_name((axis,), shape), entries, (axis,))
                found.append((self._with_images(family, places, self.takers), places))
                start += length
            if lengths or all(family is not None for family, _ in found):
                self.cuts[name] = cut, known
                self.candidates += [(family, places) for family, places in found if family is not None]
                return True
        return False

    def _blocks(self, name: str, axis: int) -> Iterator[tuple[Entries, tuple[int, ...]]]:
        """Yield a view of a parameter with one axis split in two, and the new axis along which an offset may be
        constant.

        A group norm subtracts the mean of each group, and therefore removes a vector that is constant within each
        group. A maximum of several values increases by the amount that is added to all values.
        """
        whole = Entries.whole(name, self.graph.program.shapes[name])
        length, stride = whole.sizes[axis], whole.strides[axis]
        if axis and self._is_weight(name):  # The rows of a weight differ, and each row belongs to one channel.
            return
        widths = (width for width in self.graph.norm_widths if width < length)
        counts = dict.fromkeys((*self.graph.norm_groups, *(length // width for width in widths)))
        pairs = [(count, length // count, axis + 1) for count in counts if length % count == 0]
        pairs += [(abs(a), abs(b), axis + (b < 0)) for a, b in sorted(self.graph.maxima) if abs(a * b) == length]
        for first, second, constant in pairs:
            if 1 < first < length:
                sizes = (*whole.sizes[:axis], first, second, *whole.sizes[axis + 1 :])
                strides = (*whole.strides[:axis], stride * second, stride, *whole.strides[axis + 1 :])
                yield Entries(name, sizes, strides), (constant,)

    def _follow(self, family: TranslationFamily, places: Tensor) -> bool:
        """Propagate the vector of a family through the model. If the outputs stay the same, keep the family as a
        candidate.

        Return whether the family was kept.

        `places` gives, for each entry of the home parameter, one plus the index of the vector entry that is added to
        it.
        """
        known = self._with_images(family, places, self.takers)
        if known is not None:
            self.candidates.append((known, places))
        return known is not None

    def _behind_factors(self, name: str) -> Iterator[TranslationFamily]:
        """Yield translation families of parameters that the model multiplies by factors.

        A change of the given parameter compensates for each yielded family.

        For example, a residual branch may end in a bias that the model multiplies by a parameter (LayerScale). A bias
        earlier in the network may then compensate for a vector that is added to the bias of the branch.
        """
        whole, takers = Entries.whole(name, self.graph.program.shapes[name]), self.takers
        while True:
            start = Addend((), math.prod(whole.sizes), _numbers(whole, ()))
            found = follow(self.graph, start, name, takers, may_divide=True)
            if found is None or len(found[2]) != 1 or found[1]:
                return
            images, _, (divided,) = found
            family = _from_behind(whole, images, divided)
            if family is None:
                return
            yield family
            takers -= {divided.entries.parameter}

    def _with_images(
        self, family: TranslationFamily, places: Tensor, takers: frozenset[str]
    ) -> TranslationFamily | None:
        """Return a copy of a family with the changes of other parameters that compensate for the family's vector.

        The copy also contains the gain that divides the vector.

        Return None if the vector changes the outputs, or if the gains do not have the length of the family's constant
        axis.
        """
        start = Addend((), math.prod(family.vector_shape), places)
        found = follow(self.graph, start, family.entries.parameter, takers)
        if found is None:
            return None
        images, passed, _ = found
        lengths = [family.entries.sizes[axis] for axis in family.constant]
        if len(passed) > 1 or any(lengths != [math.prod(gain.sizes)] for gain in passed):
            return None
        return replace(family, images=images, gain=next(iter(passed), None))

    def _accept_all(self) -> None:
        """Accept candidates for translation families, except those that change parameter entries that earlier families
        set to zero or centered.
        """
        for candidate in self.candidates:
            self._accept(*candidate)
        self.candidates.clear()

    def _accept(self, family: TranslationFamily, places: Tensor) -> None:
        """Accept a translation family if it changes no parameter entries that accepted families set to zero or
        centered.
        """
        centered = self._centered(family.entries, family.constant)
        if centered is None or not self._is_kept_by_groups(family):
            return
        homes = {one.entries.parameter for one in self.found}
        if homes & {image.entries.parameter for image in family.images}:
            known = self._with_images(replace(family, images=()), places, self.takers - homes)
            if known is None:
                return
            family = known
        family = replace(family, centered=centered)
        if family.size and not any(_overlap(one, other) for one in family.read_entries for other in family.placements):
            self.found.append(family)

    def _is_kept_by_groups(self, family: TranslationFamily) -> bool:
        """Return whether a vector of the family stays constant along the family's constant axes when the groups act on
        it.

        Scales, signs or matrices on a constant axis would make the vector vary along the axis, unless a gain divides
        the vector.
        """
        entries = family.entries
        shape = self.graph.program.shapes[entries.parameter]
        for along in () if family.gain else family.constant:
            axis, which = along, torch.zeros(shape[along % len(shape)], dtype=torch.int64)
            if len(entries.sizes) > len(shape):  # One axis is split in two.
                axis = next(k for k, n in enumerate((*shape, 0)) if n != entries.sizes[k])
                first, second = entries.sizes[axis : axis + 2]
                positions = torch.arange(first * second)
                which = positions // second if along > axis else positions % second
            here = self.placements.get((entries.parameter, axis), ())
            for group, place in here:
                is_matrix = group.matrix != "none" and not group.keeps_ones
                if not (is_matrix or any(place.scale) or any(place.sign)):
                    continue
                for one, its in here:
                    positions, units = covered(one, its, shape)
                    known = torch.full((shape[axis],), -1).index_copy(0, which[positions], units)
                    is_varying = bool((known[which[positions]] != units).any())
                    if (one is group or one.name in group.within) and is_varying:
                        return False
        return True

    def _centered(self, entries: Entries, constant: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the axes along which the vector of a new family must sum to zero.

        Along the returned axes, an earlier family already adds constants. Return None if families share entries in any
        other way.
        """
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

    def _pieces(self, name: str, constant: tuple[int, ...]) -> Iterator[tuple[Entries, Tensor]]:
        """Yield the whole parameter, then parts of an axis on which groups act, such as fused queries, keys and values.

        Each part comes with an array in the shape of the parameter. For each entry of the parameter, the array contains
        one plus the index of the vector entry that is added to it.
        """
        shape = self.graph.program.shapes[name]
        whole = Entries.whole(name, shape)
        yield whole, _numbers(whole, constant)
        free = [axis for axis in range(len(shape)) if axis not in constant]
        for positions in self._parts(name, free[0]) if free else ():
            if (piece := _along_axis(whole, free[0], positions)) is not None:
                few = [1 if axis in constant else n for axis, n in enumerate(shape)]
                own = [len(positions) if axis == free[0] else n for axis, n in enumerate(few)]
                numbers = torch.arange(1, math.prod(own) + 1).reshape(own)
                places = torch.zeros(few, dtype=torch.int64).index_copy(free[0], positions, numbers)
                yield piece, places.expand(shape)

    def _parts(self, name: str, axis: int) -> list[Tensor]:
        """Return parts of a parameter's axis: the parts on which groups act, and the parts into which operators cut the
        axis.
        """
        shape = self.graph.program.shapes[name]
        found: dict[Any, Tensor] = {}
        for group, place in self.placements.get((name, axis), ()):
            key = (group.size, place.start, place.stride, place.repeats)
            if key not in found and group.size * math.prod(n for n, _ in place.repeats) < shape[axis]:
                found[key] = covered(group, place, shape)[0].sort().values
        for start, length in (cut for cut in self.graph.cuts.get(shape[axis], ()) if cut[1]):
            found[start, length] = torch.arange(start, start + length)
        kept: list[Tensor] = []
        for positions in found.values():
            if not any(torch.equal(positions, other) for other in kept):
                kept.append(positions)
        return kept


def _from_behind(whole: Entries, images: tuple[Image, ...], divided: Image) -> TranslationFamily | None:
    """Return a translation family whose vector is added to a parameter that the model multiplies by factors.

    The argument `divided` is a compensating change in which a vector is divided by these factors. In the result, the
    vector itself is added to the parameter, and all other changes are multiplied by the factors.
    """
    steps, number = list[ImageStep](), 1.0
    for step in divided.steps:
        if step.kind == "over":
            steps.append(replace(step, kind="times"))
        elif step.kind == "scale":
            number *= step.factor
        else:
            return None
    home = divided.entries
    if divided.constant or math.prod(home.sizes) != math.prod(whole.sizes):
        return None
    back = (*steps, ImageStep("scale", factor=1 / number))
    rest = [replace(image, steps=(*back, *image.steps)) for image in images if image is not divided]
    return TranslationFamily(home.parameter, home, images=(Image(whole, (), back), *rest))


def _along_axis(whole: Entries, axis: int, positions: Tensor) -> Entries | None:
    """Return the entries at some positions along a parameter's axis, or None if they are not evenly spaced."""
    pattern = pattern_of(positions)
    if pattern is None or (len(pattern.sizes) > 1 and len(whole.sizes) > 1):
        return None
    stride = whole.strides[axis]
    sizes = (*whole.sizes[:axis], *pattern.sizes, *whole.sizes[axis + 1 :])
    strides = (*whole.strides[:axis], *(stride * one for one in pattern.strides), *whole.strides[axis + 1 :])
    return Entries(whole.parameter, sizes, strides, pattern.start * stride)


def _numbers(entries: Entries, constant: tuple[int, ...]) -> Tensor:
    """Return, for each array entry, one plus the index of the vector entry that is added to it."""
    sizes = [1 if k in constant else n for k, n in enumerate(entries.sizes)]
    return torch.arange(1, math.prod(sizes) + 1).reshape(sizes).expand(entries.sizes)


def _overlap(one: Entries, other: Entries) -> bool:
    """Return whether two arrays of entries share an entry of one parameter."""
    if one.parameter != other.parameter or one.last < other.start or other.last < one.start:
        return False
    is_read = torch.zeros(max(one.last, other.last) + 1, dtype=torch.bool)
    one.once.of(is_read).fill_(True)
    return bool(other.once.of(is_read).any())

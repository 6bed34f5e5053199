"""Matching of networks by their representatives, and conversion of results to the first network's coordinates.

In a representative, all translation coordinates are zero and all gains are one (`Symmetry.split`). Networks that differ
only by translations and gains have the same representative. Gains of layers with running statistics are not set to one
(`on_matched`). Gains prevent rotations of the units that they multiply. Without gains, the residual stream of a
transformer can be rotated, and not only permuted. A linear path between representatives is a linear path in the
coordinates of either network.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Generic, Literal, TypeVar, get_args

import torch
from torch import Tensor

from regauge.alignment.engine.frames import Frame, FramedProblem, Scales, are_isometric
from regauge.alignment.engine.paired_networks import dots
from regauge.alignment.engine.refit import is_near_copy, refit, squared_distances
from regauge.alignment.method import Method
from regauge.alignment.methods.weight_matching import MISSED, WeightMatching
from regauge.alignment.problem import ManyProblem, Problem
from regauge.alignment.result import ManyResult, Results, join
from regauge.core.balance import has_balance
from regauge.core.behind_gains import gains_of, lift, lower, on_representatives, zero_gains
from regauge.core.chart import Coordinates, chart_gains, into_coordinates
from regauge.core.counted import count
from regauge.core.element import Element, stack
from regauge.core.families import compared
from regauge.core.params import Params, batch_of_one, select
from regauge.core.remembered import remembered
from regauge.core.symmetry import Symmetry

Known = TypeVar("Known")
Ends = tuple[Coordinates, Coordinates]
Rotate = Literal["auto", "always", "never"]
"""Whether to rotate residual streams where this is possible, or to permute them.

With "auto", streams are rotated if permutations match them poorly.
"""
EXPLAINED = 0.9
"""Permutations count as sufficient if the cosine between the matched tensors of a stream is at least this large."""
NOT_ROTATED = "nothing is rotated: no group of the symmetry has `behind_gains`, or the method does not rotate"
COPY = 1e-12
"""The largest squared distance of the representatives of a network and its copy, relative to the squared norm."""
SMALLEST_GAIN = {2: 2.0**-5, 4: 2.0**-10, 8: 2.0**-20}
"""Other networks get the gains of the first network, except gains below this fraction of the median gain. The keys are
the bytes per entry.

The parameters behind a gain are divided by it, so a smaller gain would enlarge their rounding errors.
"""


def has_representatives(symmetry: Symmetry) -> bool:
    """Return whether networks can differ from their representatives, that is, whether there are translations or
    gains.
    """
    return bool(symmetry.translations or (symmetry.gains and chart_gains(symmetry)))


@remembered
def on_matched(symmetry: Symmetry) -> Symmetry:
    """Return the symmetry for matching representatives: `on_data`, in which no gain is set to one if running statistics
    are translated and no stream can be rotated.

    If the gains of layers with running statistics were set to one, fewer units would be matched correctly
    (docs/measurements/alignment.md). Balancing treats gains that are not set to one like other scales. If a stream can
    be rotated, gains are nevertheless set to one, because they prevent rotations.
    """
    data = symmetry.on_data
    has_statistics = any(family.is_stored_only for family in symmetry.translations)
    return replace(data, gains=()) if has_statistics and not data.rotatable else data


def as_given(symmetry: Symmetry) -> tuple[Symmetry, tuple[str, ...]]:
    """Return the symmetry for matching the networks as given, and a note if they have translations or gains."""
    told = "the networks are matched as given: differences by translations and by rotations behind gains remain"
    return replace(symmetry, translations=(), gains=()), (told,) if has_representatives(symmetry) else ()


def require_choice(rotate: str) -> None:
    """Raise a ValueError unless `rotate` is "auto", "always" or "never"."""
    if rotate not in get_args(Rotate):
        raise ValueError(f"rotate is {rotate!r}; choose 'auto', 'always' or 'never'")


def match_pairs(method: Method, problem: Problem, rotate: Rotate) -> Results:
    """Match pairs by their representatives (networks without translations and gains), if the method reads
    representatives.

    Return results in the coordinates of the first networks.
    """
    require_choice(rotate)
    whole, symmetry = problem.symmetry, on_matched(problem.symmetry)
    has_task = problem.task is not None
    if not (has_representatives(whole) and method.reads_representatives(whole, has_task=has_task)):
        found = method.match(problem)
        return replace(found, notes=(*found.notes, NOT_ROTATED)) if rotate == "always" else found
    problem, parts = replace(problem, symmetry=symmetry), []
    behind, notes = _match_behind(method, problem, rotate)
    for rows, names, found, ends in behind:
        element, params, told = _in_coordinates(method, found.element, problem[rows], names, ends, whole)
        parts.append(replace(found, symmetry=whole, element=element, params=params, notes=(*found.notes, *told)))
    order = torch.cat([rows for rows, *_ in behind]).argsort()
    found = parts[0] if len(parts) == 1 else join(parts).rows(order)
    return replace(found, notes=tuple(dict.fromkeys((*found.notes, *notes))))


def _match_behind(
    method: Method, problem: Problem, rotate: Rotate
) -> tuple[list[tuple[Tensor, tuple[str, ...], Results, Ends]], tuple[str, ...]]:
    """Match representatives (networks without translations and gains): some pairs by rotations, and all other pairs by
    permutations.

    Returns:
        Up to two parts: the pairs that were matched by permutations, and the pairs that were matched by rotations. A
        part consists of its pairs, the names of the rotated groups, the results, and the coordinates of the second and
        the first networks. The results contain no parameters, so no representative stays in memory. The second item
        lists notes on the choice between rotations and permutations.
    """
    symmetry, has_task = problem.symmetry, problem.task is not None
    (first, wanted), (second, own) = (_split(symmetry, one, has_task) for one in (problem.a, problem.b))
    behind = replace(problem, a=first, b=second, symmetry=on_representatives(symmetry))
    choice = _choose(symmetry, behind, rotate)
    frame = None if choice.known is None else choice.known[1]
    parts: list[tuple[Tensor, tuple[str, ...], Results, Ends]] = []
    for some in (False, True):
        rows = ((choice.is_wanted & choice.is_free) == some).nonzero().flatten()
        if not len(rows):
            continue
        names = symmetry.rotatable if some else ()
        here = replace(behind[rows], symmetry=on_representatives(symmetry, names))
        if choice.known is not None and not some and method == WeightMatching() and problem.task is None:
            found = choice.known[0].rows(rows)
        else:
            if frame is not None and isinstance(method, WeightMatching):
                here = _framed(here, frame.rows(rows).under(here.symmetry.on_sums))
            found = restrict_method(method, symmetry, names).match(here)
        parts.append((rows, names, replace(found, params={}), (select(own, rows), select(wanted, rows))))
    return parts, choice.notes


def match_many(method: Method, problem: ManyProblem, rotate: Rotate) -> ManyResult:
    """Match many networks by their representatives. The results are in the coordinates of the first network.

    Either all networks are rotated, or none. Networks are rotated if most of them are not similar to the first one.
    """
    require_choice(rotate)
    whole, symmetry = problem.symmetry, on_matched(problem.symmetry)
    has_task = problem.task is not None
    if not (has_representatives(whole) and method.reads_representatives(whole, has_task=has_task)):
        several = method.match_many(problem)
        return replace(several, notes=(*several.notes, NOT_ROTATED)) if rotate == "always" else several
    first, *others = map(batch_of_one, problem.networks)
    charts = [_split(symmetry, one, has_task) for one in (first, *others)]
    behind, coordinates = on_representatives(symmetry), [own for _, own in charts]
    choices = [
        replace(_choose(symmetry, Problem(charts[0][0], one, behind), rotate), known=None) for one, _ in charts[1:]
    ]
    names = symmetry.rotatable if are_rotated(choices) else ()
    networks = [select(one, 0) for one, _ in charts]
    here = replace(problem, networks=networks, symmetry=on_representatives(symmetry, names))
    found = replace(restrict_method(method, symmetry, names).match_many(here), params=())
    del charts, networks, here  # Representatives are not needed any more, and results take the same memory.
    elements, moved, notes = [symmetry.identity()], [dict(problem.networks[0])], list(found.notes)
    for k, other in enumerate(others, 1):
        pair = Problem(first, other, symmetry)
        part, ends = found.element.rows(slice(k, k + 1)), (coordinates[k], coordinates[0])
        element, params, told = _in_coordinates(method, part, pair, names, ends, whole)
        elements.append(element.item(0))
        moved.append(select(params, 0))
        notes += told
    return replace(
        found,
        symmetry=whole,
        element=stack(elements),
        params=tuple(moved),
        notes=tuple(dict.fromkeys([*notes, *(note for one in choices for note in one.notes)])),
    )


def in_coordinates_of(
    symmetry: Symmetry, element: Element, pair: tuple[Mapping[str, Tensor], Mapping[str, Tensor]]
) -> Element:
    """Convert an element that acts on representatives (networks without translations and gains) to an element that maps
    a network to the first network's coordinates.

    The converted element rotates only the groups for which the given element has no permutation.
    """
    problem = Problem(batch_of_one(pair[0]), batch_of_one(pair[1]), symmetry)
    names = [name for name in symmetry.rotatable if element[name].matrix is not None]
    ends = symmetry.split(problem.b)[1], symmetry.split(problem.a)[1]
    return write(symmetry, element.expand(1), names, problem.a, ends)[0].item(0)


def _split(symmetry: Symmetry, params: Mapping[str, Tensor], is_run: bool) -> tuple[Params, Coordinates]:
    """Return the representatives and the coordinates of networks.

    If a task runs the representatives, they get the dtypes of the networks.
    """
    representative, coordinates = symmetry.split(params)
    if is_run:
        representative = {name: tensor.to(params[name].dtype) for name, tensor in representative.items()}
    return representative, coordinates


@dataclass(frozen=True)
class RotationChoice(Generic[Known]):
    """The choice, for each pair, between rotations and permutations of the residual streams.

    Attributes:
        is_wanted: The pairs in which streams should be rotated, bool `[pairs]`.
        is_free: The pairs in which streams can be rotated, bool `[pairs]`. A stream cannot be rotated if one of its
            channels has a gain of zero.
        known: The result of matching by permutations; None if the choice did not require this matching.
        notes: A message that explains why some pairs were not rotated although the caller asked for it.
    """

    is_wanted: Tensor
    is_free: Tensor
    known: Known | None = None
    notes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        symmetry: Symmetry,
        networks: tuple[Mapping[str, Tensor], Mapping[str, Tensor]],
        rotate: Rotate,
        explain: Callable[[], tuple[tuple[Tensor, Tensor, Tensor], Known]],
    ) -> "RotationChoice[Known]":
        """Choose between rotations and permutations, by `rotate` or by the cosine that permutations reach.

        Args:
            symmetry: The whole symmetry.
            networks: The representatives, whose gains are read.
            rotate: The caller's choice: "auto", "always" or "never".
            explain: A function that matches the networks by permutations and returns the result of the match. `explain`
                also returns squared norms and inner products of the tensors on which rotatable groups act, after the
                networks are balanced.
        """
        names = symmetry.rotatable
        a, b = (zero_gains(symmetry, one, names) for one in networks)
        zero = {gain: (a[gain] | b[gain]).reshape(-1) for gain in a}
        if not names:
            nothing = torch.zeros(1, dtype=torch.bool)
            return cls(nothing, ~nothing, notes=(NOT_ROTATED,) if rotate == "always" else ())
        is_free = ~torch.stack([*zero.values()]).any(0)
        every = torch.ones_like(is_free)
        if rotate == "never":
            return cls(~every, every)
        if rotate == "always":
            told = (f"not rotated: {gain!r} is zero in a channel" for gain, there in zero.items() if bool(there.any()))
            return cls(every, is_free, notes=tuple(told))
        if not bool(is_free.any()):
            return cls(~every, is_free)
        (x, y, both), known = explain()
        return cls(both < EXPLAINED * (x * y).sqrt(), is_free, known)


def are_rotated(choices: Sequence[RotationChoice[Any]]) -> bool:
    """Return whether several networks are rotated; the decision is the same for all of them."""
    is_most = sum(bool(one.is_wanted) for one in choices) > len(choices) / 2
    return all(bool(one.is_free) for one in choices) and is_most


def rotated_tensors(symmetry: Symmetry, names: Sequence[str], compared: Collection[str]) -> list[str]:
    """Return the compared tensors on which the named groups act."""
    places = (place.parameter for name in names for place in symmetry[name].placements)
    return [name for name in dict.fromkeys(places) if name in compared]


def _choose(symmetry: Symmetry, problem: Problem, rotate: Rotate) -> RotationChoice[tuple[Results, Frame]]:
    """Choose between rotations and permutations of residual streams, after matching the balanced networks by
    permutations.
    """

    def explain() -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Results, Frame]]:
        # Balanced networks are compared, so the result does not depend on the scales of the given networks.
        frame = Frame.of(problem.a, problem.b, problem.symmetry, "balance")
        known = WeightMatching().match(_framed(replace(problem, task=None), frame))
        shared = rotated_tensors(problem.symmetry, symmetry.rotatable, frame.a)
        known, sums = replace(known, params={}), []
        for name, moved in frame.second(known.element, shared):
            tensor = frame.a[name]
            sums.append(torch.stack([dots(tensor, tensor), dots(moved, moved), dots(tensor, moved)]))
        x, y, both = torch.stack(sums).sum(0)
        # A rotated copy that permutations do not match gets the cosine zero, and is therefore rotated.
        is_copy = are_isometric(on_representatives(symmetry, symmetry.rotatable), frame.a, frame.b)
        is_missed = x + y - 2 * both > 2 * MISSED * x
        return (x, y, torch.where(is_copy & is_missed, 0.0, both)), (known, frame)

    choice = RotationChoice.of(symmetry, (problem.a, problem.b), rotate, explain)
    size = (problem.pairs,)
    return replace(choice, is_wanted=choice.is_wanted.expand(size), is_free=choice.is_free.expand(size))


def _framed(problem: Problem, frame: Frame) -> FramedProblem:
    return FramedProblem(**{field.name: getattr(problem, field.name) for field in fields(problem)}, frame=frame)


def notes_on_ties(symmetry: Symmetry, a: Any, moved: Any, rotate: Rotate) -> tuple[str, ...]:
    """Return notes on tied output heads that prevent rotations of streams, if permutations match these streams
    poorly.
    """
    notes = []
    for names in symmetry.tied if isinstance(a, Mapping) and rotate != "never" else ():
        for group in symmetry.groups:
            places = [name for name in dict.fromkeys(place.parameter for place in group.placements) if name in a]
            if group.name in symmetry.rotatable or not gains_of(symmetry, group.name) or not {*names} & {*places}:
                continue
            x, y, both = (
                sum(float((u[name].double() * v[name].double()).sum()) for name in places)
                for u, v in ((a, a), (moved, moved), (a, moved))
            )
            if both < EXPLAINED * (x * y) ** 0.5:
                notes.append(
                    f"{group.name!r} is not rotated, because {names[-1]!r} and {names[0]!r} are one tensor, and "
                    "reordering is not enough here: `untie=True` may separate them"
                )
    return tuple(notes)


def _distances(problem: Problem, params: Params) -> tuple[Tensor, Tensor]:
    """Return, for each pair, the squared distance from the first network to the transformed second, and the first's
    squared norm.
    """
    a, b = compared([problem.a, params], problem.symmetry)
    if not a:  # A symmetry of only translations has no tensors to compare.
        return (nothing := torch.zeros(problem.pairs, dtype=torch.float64)), nothing
    return squared_distances(a, b), torch.stack([dots(x, x) for x in a.values()]).sum(0)


def restrict_method(method: Method, symmetry: Symmetry, names: Sequence[str]) -> Any:
    """Return a method in which every initial element `init` is converted to an element for representatives."""

    def restrict(value: Any) -> Any:
        if isinstance(value, Element):
            return lower(symmetry, value, names)
        if isinstance(value, tuple) and any(isinstance(one, Method | Element) for one in value):
            return tuple(map(restrict, value))
        return restrict_method(value, symmetry, names) if isinstance(value, Method) else value

    if not is_dataclass(method):
        return method
    own = {field.name: restrict(getattr(method, field.name)) for field in fields(method) if field.init}
    return replace(method, **own) if any(value is not getattr(method, name) for name, value in own.items()) else method


def _in_coordinates(
    method: Method, element: Element, problem: Problem, names: Sequence[str], ends: Ends, whole: Symmetry
) -> tuple[Element, Params, tuple[str, ...]]:
    """Convert elements that act on representatives to elements that act on the given networks.

    Return the elements, the transformed networks, and notes.

    Args:
        method: The method that found the elements.
        element: One element for each pair.
        problem: The networks, and the symmetry that defines their representatives.
        names: The groups that are rotated.
        ends: The coordinates of the second networks before the elements act, and those of the first networks.
        whole: The symmetry, including elements that keep the function only with the stored statistics.
    """
    element, notes = write(problem.symmetry, element, names, problem.a, ends)
    moved = problem.move(element)
    near = torch.zeros(0, dtype=torch.int64) if names else is_near_copy(*_distances(problem, moved)).nonzero().flatten()
    if len(near):
        element = _put(_settle(method, problem[near], element.rows(near), select(moved, near)), near, element)
        moved = problem.move(element)
    if whole != problem.symmetry:
        pairs, there = replace(problem, symmetry=whole), whole.split(moved)
        if element.translation:
            before = whole.split(problem.move(element.translated({}).rotated({})))[1]
            element = add_difference(element, (before, there[1]))
            moved = pairs.move(element)
        element, moved = _take_over_statistics(pairs, element, moved, there)
    return element, moved, notes


def add_difference(element: Element, ends: Ends) -> Element:
    """Return the element with translations for another symmetry, which defines the coordinates of networks in another
    way.

    If gains absorb running variances, a network has different coordinates under the two symmetries.

    Args:
        element: An element with translations.
        ends: The coordinates of networks under the other symmetry, before and after the element acts.
    """
    before, after = ends
    return element.translated({name: (after[name] - before[name]).double() for name in element.translation})


def _take_over_statistics(
    problem: Problem, element: Element, moved: Params, there: tuple[Params, Coordinates]
) -> tuple[Element, Params]:
    """Return elements that also transform stored statistics if the second network of a pair is a copy.

    For a network that is not a copy, a later recomputation of the statistics would undo part of the transformation. The
    argument `there` contains the representatives and the coordinates of the second networks after the elements have
    acted.
    """
    symmetry = problem.symmetry
    (first, wanted), (second, own) = symmetry.split(problem.a), there
    square, norm = _distances(replace(problem, a=first), second)
    rows = (square <= COPY * norm).nonzero().flatten()
    if not len(rows):
        return element, moved
    kept = {name: torch.zeros_like(wanted[name], dtype=torch.bool) for name in chart_gains(symmetry)}
    further = into_coordinates(symmetry, symmetry.identity((problem.pairs,)), own, wanted, kept)
    element = _put(symmetry.compose(further, element).rows(rows), rows, element)
    return element, problem.move(element)


def _settle(method: Method, problem: Problem, there: Element, moved: Params) -> Element:
    """Return elements for near copies that minimize the distance to the first networks.

    A representative contains weights divided by gains, so noise in a small gain amplifies the noise of weights.
    Therefore the given networks are also matched, with scales fitted to the first network. Matching the given networks
    is best if they do not differ by translations, because biases and gains help to distinguish similar units. Networks
    that differ by translations are matched once more after their coordinates were set to those of the first network. If
    there are no gains, nothing amplifies noise, and fitting the scales is sufficient.
    """
    symmetry = problem.symmetry
    scales: Scales = getattr(method, "scales", "balance")
    if scales != "keep" and has_balance(symmetry) and not chart_gains(symmetry):
        further, is_closer = refit(symmetry.on_sums, "keep", symmetry.sums(problem.a), symmetry.sums(moved))
        return symmetry.compose(further, there).where(is_closer, there)
    again = WeightMatching(scales=scales)
    given = again.match(replace(problem, task=None))
    left = _distances(problem, moved)[0]
    is_best = _distances(problem, given.params)[0] <= left
    if not bool(is_best.all()):
        other = again.match(replace(problem, b=moved, task=None))
        is_closer = _distances(problem, other.params)[0] < left
        there = symmetry.compose(other.element, there).where(is_closer, there)
    return given.element.where(is_best, there)


def _put(part: Element, rows: Tensor, whole: Element) -> Element:
    """Return a batch of elements in which the selected rows are replaced by those of `part`."""
    mask, places = torch.zeros(whole.batch, dtype=torch.bool), torch.zeros(whole.batch, dtype=torch.int64)
    mask[rows], places[rows] = True, torch.arange(len(rows))
    return part.rows(places).where(mask, whole)


def write(
    symmetry: Symmetry, element: Element, names: Sequence[str], first: Mapping[str, Tensor], ends: Ends
) -> tuple[Element, tuple[str, ...]]:
    """Convert an element that acts on representatives to an element that maps networks to the coordinates of the first
    networks. Also return notes.

    Args:
        symmetry: The symmetry that defines the representatives.
        element: One element for each pair, or a single element.
        names: The groups that the element rotates.
        first: The first networks, whose gains are read.
        ends: The coordinates of the second networks before the element acts, and those of the first networks.
    """
    kept = dict[str, Tensor]()
    notes = [f"rotated behind gains: {', '.join(map(repr, names))}"] if names else []
    for gain in chart_gains(symmetry):
        own = first[gain]
        sizes = symmetry.sums({gain: own})[gain].double().abs()
        kept[gain] = sizes <= SMALLEST_GAIN[own.itemsize] * sizes.median(-1, keepdim=True).values
        if bool(kept[gain].any()):
            which = count(kept[gain].nonzero(), "channel")
            notes.append(f"{gain!r}: gains of {which} are kept, because those of the first network are nearly zero")
    return into_coordinates(symmetry, lift(symmetry, element, names), *ends, kept), tuple(notes)

"""Networks matched as representatives, and what was found in the coordinates of the first network.

A representative has no translations left and gains of one (`Symmetry.split`), so that networks that differ by these are
one there, and what a gain forbids is free: the residual stream of a transformer may be rotated and not only reordered.
A line between representatives is a line in the coordinates of either network.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from regauge.alignment.engine.frames import Frame
from regauge.alignment.engine.paired_networks import dots
from regauge.alignment.engine.refit import is_near_copy, squared_distances
from regauge.alignment.method import Method
from regauge.alignment.methods.weight_matching import WeightMatching
from regauge.alignment.problem import ManyProblem, Problem, batch_of_one
from regauge.alignment.result import ManyResult, Results, join
from regauge.core.behind_gains import gains_of, lift, lower, on_representatives
from regauge.core.chart import Coordinates, chart_gains, into_coordinates
from regauge.core.element import Element, stack
from regauge.core.families import compared
from regauge.core.params import Params, select
from regauge.core.symmetry import Symmetry

Rotate = Literal["auto", "always", "never"]
"""Whether a residual stream is rotated where it may be, or reordered; "auto" asks how much orders explain."""
EXPLAINED = 0.9
"""Cosine of the tensors of a stream after matching from which orders suffice."""
COPY = 1e-12
"""Squared distance of representatives of a network and its copy at most, as a share of the squared norm."""
SMALLEST_GAIN = {2: 2.0**-5, 4: 2.0**-10, 8: 2.0**-20}
"""Share of the median gain below which a channel of the first network gives no gain to others, by bytes of a value:
what reads behind it would be divided by it, and rounded."""


def has_representatives(symmetry: Symmetry) -> bool:
    """Whether networks differ from their representatives."""
    return bool(symmetry.translations or (symmetry.gains and chart_gains(symmetry)))


def require_memory_for(rotate: Rotate) -> None:
    """Raise unless streamed networks, which are matched as they are, can be moved as wanted.

    Raises:
        ValueError: They cannot be rotated.
    """
    if rotate == "always":
        raise ValueError(
            "the networks are streamed, and are reordered as they are then; give more memory for rotate='always', or "
            "leave it out"
        )


def notes_as_given(symmetry: Symmetry) -> tuple[str, ...]:
    """A sentence on streamed networks that differ from their representatives."""
    told = "streamed networks are matched as they are: translations, and rotations behind gains, stay between them"
    return (told,) if has_representatives(symmetry) else ()


def match_representatives(method: Method, problem: Problem, rotate: Rotate) -> Results:
    """Match pairs as representatives, if they have any and the method reads them; each result in A's coordinates."""
    whole, symmetry = problem.symmetry, problem.symmetry.on_data
    if not (has_representatives(whole) and method.reads_representatives):
        return method.match(problem)
    problem = replace(problem, symmetry=symmetry)
    (first, wanted), (second, _) = (_split(symmetry, one, problem.task is not None) for one in (problem.a, problem.b))
    behind = replace(problem, a=first, b=second, symmetry=on_representatives(symmetry))
    known, is_rotated = _explain(symmetry, behind, rotate)
    parts, rows = [], []
    for some in (False, True):
        chosen = (is_rotated == some).nonzero().flatten()
        if not len(chosen):
            continue
        names = symmetry.rotatable if some else ()
        here = replace(behind[chosen], symmetry=on_representatives(symmetry, names))
        if known is not None and not some and method == WeightMatching() and problem.task is None:
            found = known.rows(chosen)
        else:
            found = _restrict(method, symmetry, names).match(here)
        parts.append(_in_coordinates(method, found, problem[chosen], names, select(wanted, chosen)))
        rows.append(chosen)
    found = replace(join(parts).rows(torch.cat(rows).argsort()), symmetry=whole)
    return found if whole == symmetry else _take_over_statistics(replace(problem, symmetry=whole), found)


def match_many_representatives(method: Method, problem: ManyProblem, rotate: Rotate) -> ManyResult:
    """Match many networks as representatives; each is written in the coordinates of the first one."""
    whole, symmetry = problem.symmetry, problem.symmetry.on_data
    if not (has_representatives(symmetry) and method.reads_representatives):
        return method.match_many(problem)
    charts = [_split(symmetry, one, problem.task is not None) for one in map(batch_of_one, problem.networks)]
    networks, wanted = [select(one, 0) for one, _ in charts], charts[0][1]
    others = {name: torch.stack([one[name] for one in networks[1:]]) for name in networks[0]}
    first = {name: tensor.expand(len(networks) - 1, *tensor.shape) for name, tensor in networks[0].items()}
    _, is_rotated = _explain(symmetry, Problem(first, others, on_representatives(symmetry)), rotate)
    names = symmetry.rotatable if bool(is_rotated.double().mean() > 0.5) else ()
    here = replace(problem, networks=networks, symmetry=on_representatives(symmetry, names))
    found = _restrict(method, symmetry, names).match_many(here)
    elements, notes = [symmetry.identity()], list(found.notes)
    for k, other in enumerate(problem.networks[1:], 1):
        element, told = _write(
            symmetry,
            found.element.rows(slice(k, k + 1)),
            batch_of_one(other),
            names,
            wanted,
            batch_of_one(problem.networks[0]),
        )
        elements.append(element.item(0))
        notes += told
    moved = [symmetry.act(e, other) for e, other in zip(elements[1:], problem.networks[1:], strict=True)]
    return replace(
        found,
        symmetry=whole,
        element=stack(elements),
        params=(dict(problem.networks[0]), *moved),
        notes=tuple(dict.fromkeys(notes)),
    )


def in_coordinates_of(
    symmetry: Symmetry, element: Element, pair: tuple[Mapping[str, Tensor], Mapping[str, Tensor]]
) -> Element:
    """The element that moves the second network of a pair as one moves its representative, to the first's coordinates.

    Groups that the element rotates are those that it has no order of.
    """
    first, second = map(batch_of_one, pair)
    names = [name for name in symmetry.rotatable if element[name].matrix is not None]
    return _write(symmetry, element.expand(1), second, names, symmetry.split(first)[1], first)[0].item(0)


def _split(symmetry: Symmetry, params: Mapping[str, Tensor], is_run: bool) -> tuple[Params, Coordinates]:
    """Representatives and coordinates; those that a task runs have the dtypes of the networks, as its inputs do."""
    representative, coordinates = symmetry.split(params)
    if is_run:
        representative = {name: tensor.to(params[name].dtype) for name, tensor in representative.items()}
    return representative, coordinates


def _explain(symmetry: Symmetry, problem: Problem, rotate: Rotate) -> tuple[Results | None, Tensor]:
    """Match representatives by orders, if that decides; and which pairs are rotated, bool `[pairs]`."""
    names, count = symmetry.rotatable, problem.pairs
    if not names or rotate == "never":
        return None, torch.zeros(count, dtype=torch.bool)
    is_free = torch.ones(count, dtype=torch.bool)
    for gain in (gain for name in names for gain in gains_of(symmetry, name)):
        for params in (problem.a, problem.b):  # What a gain of zero hides cannot be rotated.
            is_free &= (symmetry.sums({gain: params[gain]})[gain] != 0).all(-1).cpu()
    if rotate == "always" or not bool(is_free.any()):
        return None, is_free
    found = WeightMatching().match(replace(problem, task=None))
    # Between balanced networks, so that it does not matter where on its orbit either of them happens to be.
    frame = Frame.of(problem.a, found.params, problem.symmetry, "balance")
    places = (place.parameter for name in names for place in symmetry[name].placements)
    shared = [name for name in dict.fromkeys(places) if name in frame.a]
    x, y, both = (
        torch.stack([dots(u[name], v[name]) for name in shared]).sum(0)
        for u, v in ((frame.a, frame.a), (frame.b, frame.b), (frame.a, frame.b))
    )
    return found, is_free & (both < EXPLAINED * (x * y).sqrt())


def _distances(problem: Problem, params: Params) -> tuple[Tensor, Tensor]:
    """Squared distance of each first network and the second one that was moved, and squared norm: float64 `[pairs]`."""
    a, b = compared([problem.a, params], problem.symmetry)
    return squared_distances(a, b), torch.stack([dots(x, x) for x in a.values()]).sum(0)


def _restrict(method: Method, symmetry: Symmetry, names: Sequence[str]) -> Any:
    """A method whose elements, and those of methods within it, are elements of the symmetry of representatives."""

    def restrict(value: Any) -> Any:
        if isinstance(value, Element):
            return lower(symmetry, value, names)
        return _restrict(value, symmetry, names) if isinstance(value, Method) else value

    if not is_dataclass(method):
        return method
    own = {field.name: getattr(method, field.name) for field in fields(method) if field.init}
    changed = {name: new for name, value in own.items() if (new := restrict(value)) is not value}
    return replace(method, **changed) if changed else method


def _in_coordinates(
    method: Method, found: Results, problem: Problem, names: Sequence[str], wanted: Coordinates
) -> Results:
    """Results on representatives as results on the networks."""
    element, notes = _write(problem.symmetry, found.element, problem.b, names, wanted, problem.a)
    moved = problem.move(element)
    if not names:
        near = is_near_copy(*_distances(problem, moved)).nonzero().flatten()
        if len(near):
            settled = _settle(method, problem[near], element.rows(near), select(moved, near))
            element = _put(settled, near, element)
            moved = problem.move(element)
    return replace(
        found,
        symmetry=problem.symmetry,
        element=element,
        params=moved,
        notes=tuple(dict.fromkeys((*found.notes, *notes))),
    )


def _take_over_statistics(problem: Problem, found: Results) -> Results:
    """Results in which copies of the first networks take over what holds with statistics as stored only.

    Of other networks statistics computed anew would undo one half of such a move.
    """
    symmetry = problem.symmetry
    (first, wanted), (second, _) = symmetry.split(problem.a), symmetry.split(found.params)
    square, norm = _distances(replace(problem, a=first), second)
    rows = (square <= COPY * norm).nonzero().flatten()
    if not len(rows):
        return found
    kept = {name: torch.zeros_like(wanted[name], dtype=torch.bool) for name in chart_gains(symmetry)}
    moved = into_coordinates(symmetry, symmetry.identity((problem.pairs,)), found.params, wanted, kept)
    element = _put(symmetry.compose(moved, found.element).rows(rows), rows, found.element)
    return replace(found, element=element, params=problem.move(element))


def _settle(method: Method, problem: Problem, there: Element, moved: Params) -> Element:
    """Elements for near copies that leave the least distance to the first networks.

    In the coordinates of the first network noise in a small gain, or in a bias, enlarges that of what reads behind it.
    So networks are also matched as they are, with scales fitted to the first one, which is best where translations do
    not set them apart: biases and gains, which a representative lacks, tell units apart that noise has confused.
    Otherwise they are matched once more in these coordinates.
    """
    again = WeightMatching(scales=getattr(method, "scales", "balance"))
    given = again.match(replace(problem, task=None))
    left = _distances(problem, moved)[0]
    is_best = _distances(problem, given.params)[0] <= left
    if not bool(is_best.all()):
        other = again.match(replace(problem, b=moved, task=None))
        is_closer = _distances(problem, other.params)[0] < left
        there = problem.symmetry.compose(other.element, there).where(is_closer, there)
    return given.element.where(is_best, there)


def _put(part: Element, rows: Tensor, whole: Element) -> Element:
    """A batch with other elements in some rows."""
    mask, places = torch.zeros(whole.batch, dtype=torch.bool), torch.zeros(whole.batch, dtype=torch.int64)
    mask[rows], places[rows] = True, torch.arange(len(rows))
    return part.rows(places).where(mask, whole)


def _write(
    symmetry: Symmetry,
    element: Element,
    params: Mapping[str, Tensor],
    names: Sequence[str],
    wanted: Coordinates,
    first: Mapping[str, Tensor],
) -> tuple[Element, list[str]]:
    """An element on representatives as one that moves networks to the coordinates of the first ones, and notes."""
    kept, notes = {}, []
    for gain in chart_gains(symmetry):
        sizes = symmetry.sums({gain: first[gain]})[gain].double().abs()
        kept[gain] = sizes <= SMALLEST_GAIN[first[gain].itemsize] * sizes.median(-1, keepdim=True).values
        if count := int(kept[gain].sum()):
            notes.append(
                f"{gain!r}: {count} channels keep their own gain, since that of the first network is nearly zero"
            )
    if names:
        notes.append(f"rotated, since orders alone explain little: {', '.join(map(repr, names))}")
    return into_coordinates(symmetry, lift(symmetry, element, names), dict(params), wanted, kept), notes

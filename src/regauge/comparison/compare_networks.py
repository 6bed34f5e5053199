"""`compare`: are two networks the same, one the other's descendant, or neither?"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import cast

import torch
from torch import Tensor

from regauge.alignment import align
from regauge.alignment.methods.weight_matching import WeightMatching
from regauge.alignment.problem import bind_networks
from regauge.alignment.streamed.job import plan_job
from regauge.alignment.streamed.match import align_streamed
from regauge.alignment.streamed.memory import row_ranges
from regauge.alignment.streamed.source import Moved
from regauge.canonical.null_spaces import without_null_spaces
from regauge.checkpoints.checkpoint import Checkpoint
from regauge.checkpoints.job import FileJob, Network, open_job
from regauge.checkpoints.memory_limit import MemoryLimit, size_text
from regauge.comparison.common import Common, find_common
from regauge.comparison.comparison import Comparison, mean_share
from regauge.comparison.fingerprints import fingerprint
from regauge.comparison.function import measure_function
from regauge.comparison.independence import DRAWS, Independence, Load, measure_independence
from regauge.comparison.origins import Origins
from regauge.comparison.shares import FORMATS, Read, TensorShare, measure_shares
from regauge.comparison.strangers import scramble, stranger_of
from regauge.comparison.units import Units, choose_units
from regauge.comparison.verdicts import MOVED, Evidence, by_chance, judge, needs_chance, precision_of
from regauge.core.arguments import check_arguments
from regauge.core.element import Element
from regauge.core.interpolation import distance
from regauge.core.movable import VALUES
from regauge.core.params import Params, work_dtype
from regauge.core.progress import Progress, no_progress
from regauge.core.symmetry import Symmetry
from regauge.core.task import Task

STRANGERS = 4
"""Strangers that say what alignment explains by chance, of small networks; for large ones, where chance matters less,
one is enough."""
SMALL = 1 << 14
"""Most values of a small network."""
PIECE = 1 << 26
"""Bytes of a piece of a tensor that nothing moves along its first axis."""

MOVED_ORDER = "the p-value is of the order as stored, which an element changes: of a moved copy it says nothing"
NO_ORDER = "no p-value: it compares the order of units, and no group has the same number of them in both networks"


@check_arguments
def compare(
    params_a: Network,
    params_b: Network,
    symmetry: Symmetry,
    *,
    task: Task | None = None,
    references: Sequence[Mapping[str, Tensor]] = (),
    draws: int = DRAWS,
    generator: torch.Generator | None = None,
    memory: int | str | MemoryLimit | None = None,
    progress: Progress = no_progress,
) -> Comparison:
    """Compare two networks as they are stored and modulo their symmetry.

    The weights of the second network are matched to those of the first. What is left then, what the second explains of
    each tensor beyond chance, and whether units correspond in their order as stored give a verdict:

    | verdict | when |
    | --- | --- |
    | identical | all values are equal, but for rounding to the coarser of both formats |
    | same network in another gauge | an element of the group takes one to the other, up to rounding |
    | descended | after alignment more is explained than by any stranger, aligned ones included |
    | aligned to A, or a distant descendant | less is explained, but units correspond as stored beyond chance |
    | unrelated | neither |
    | undecided | between the two |

    What alignment explains by chance is measured: of strangers, made of the second network by moving each tensor by an
    element of its own. "Descended" is symmetric: one from the other, or both from a third. Thresholds are those of
    `regauge.comparison.verdicts`, which were fixed on other networks than those that `docs/comparison.md` reports.

    The p-value and the z-score test the order of units as stored. They are exact where nobody chose that order. After
    an alignment somebody did, so that order alone never makes a descendant. Where a network in a file says that
    regauge aligned it, and the element is stored with it, that is undone first; otherwise a note says so.

    Networks with other widths, vocabularies or numbers of layers are compared in what they have in common: tensors of
    the same shape, and those that are longer along an axis that nothing moves, such as that of tokens, up to the
    shorter length. Of groups whose units can be reordered, and of which one network has more, those of its units are
    compared that match the other network's best (`Comparison.units`), as in a network that `regauge.prune` made. The
    notes name the rest; such networks are not "identical" but "descended" if that part is.

    Args:
        params_a: The network that stays: parameters by name, or the path of a checkpoint.
        params_b: The network that is moved.
        symmetry: The symmetry of both; of the first one where shapes differ.
        task: Data by which outputs, barriers and the loss of the merge are compared.
        references: Networks that are known to be independent of the first one, trained as the second one would be if
            it were independent, too. Then `reference_p_value` is exact wherever on their orbits the networks are: the
            rank of the second network's fingerprint among theirs, by distance from the first one's.
        draws: Random elements of the test of independence.
        generator: Their source; one with seed 0 unless given, so that the outcome is always the same.
        memory: How much networks in files may hold: bytes, or text such as "2GB"; half of the machine's unless given.
            Those that need more are streamed, without fingerprints.
        progress: Shows each pass over streamed files.

    Raises:
        KeyError: A parameter that the symmetry moves is missing.
        TypeError: One network is in a file and the other one is not.
        ValueError: The networks have nothing in common that the symmetry moves, or one lacks single tensors; they do
            not fit the symmetry, hold NaN or Inf, or are populations; the memory does not suffice; networks that are
            streamed come with a task or references, or networks of different shapes with a task.
    """
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    if draws < 1:
        raise ValueError(f"draws is {draws}; a test needs at least one random element, and 999 are usual")
    job = open_job((params_a, params_b), 1, memory=memory)
    if job is not None:
        job = job.named_by(symmetry)
        params_a, params_b = job.checkpoints
    assert isinstance(params_a, Mapping)
    assert isinstance(params_b, Mapping)
    origins = Origins.read(params_a, params_b)
    common = find_common(params_a, params_b, symmetry)
    if common is not None and common.widths is not None and job is not None and job.is_streamed:
        common = _without_widths(params_a, params_b, symmetry, job)
    if common is not None and task is not None and not common.is_whole:
        raise ValueError(f"a task runs both networks by one model, but they differ: {common.notes[0]}; leave it out")
    if common is not None and not common.is_whole:
        origins = origins.cut
    if common is not None and common.widths is not None:
        a, b = (one.params if isinstance(one, Checkpoint) else one for one in (params_a, params_b))
        return _compare_widths(a, b, symmetry, common, references, draws, generator, origins)
    if common is not None:
        symmetry, params_a, params_b = common.symmetry, common.of(params_a), common.of(params_b)
        references = [cast(Params, common.of(one)) for one in references]
    if job is not None and isinstance(params_a, Checkpoint) and isinstance(params_b, Checkpoint):
        job = replace(job, checkpoints=(params_a, params_b))
        if job.is_streamed:
            if references:
                raise ValueError(f"references are compared by fingerprints, which {job.needs_memory}")
            streamed = plan_job(job, symmetry, None, task)
            a, b = job.checkpoints
            found = align_streamed(a, b, streamed.plan, streamed.method, progress=progress)

            def estimate() -> float | None:
                stranger = Moved(b, partial(scramble, found.symmetry, seed=0))
                other = align_streamed(a, stranger, streamed.plan, streamed.method, progress=progress)
                return by_chance([_share(a, stranger, found.symmetry, other.element)])

            test = partial(_test, a, b, found.symmetry, draws, generator, origins)
            return _weigh(
                a, b, found.symmetry, found.element, estimate, test, draws, origins, common=common, notes=found.notes
            )
    params_a, params_b = (one.params if isinstance(one, Checkpoint) else one for one in (params_a, params_b))
    symmetry = bind_networks([params_a, params_b], symmetry, "compare single networks, two at a time")
    given = dict(params_a), dict(params_b)
    first, second = (without_null_spaces(one, symmetry) for one in given)
    result = align(*given, symmetry, method=WeightMatching())
    is_factorized = any(two[n] is not one[n] for one, two in zip(given, (first, second), strict=True) for n in one)
    ignored = {*symmetry.buffers, *(name for names in symmetry.tied for name in names[1:])}
    if is_factorized and distance(given[0], result.params, ignored) > MOVED * distance(*given, ignored):
        result = align(first, second, symmetry, method=WeightMatching())
    else:
        (first, second), is_factorized = given, False
    own, *numbers = (fingerprint(one, symmetry) for one in (*given, *references))
    return _weigh(
        first,
        second,
        symmetry,
        result.element,
        lambda: estimate_chance(second, symmetry, lambda other: _explain(first, other, symmetry)),
        partial(_test, *given, symmetry, draws, generator, origins),
        draws,
        origins,
        given=given if is_factorized else None,
        distances=[float((own - other).norm()) for other in numbers],
        function=None if task is None else measure_function(*given, (first, result.params), task),
        common=common,
        notes=result.notes,
    )


def _without_widths(a: Mapping[str, Tensor], b: Mapping[str, Tensor], symmetry: Symmetry, job: FileJob) -> Common:
    """The common part of streamed networks without the tensors of different widths, whose units are not matched.

    Raises:
        ValueError: Nothing is left without them.
    """
    need = (
        f"matching units of networks of different widths takes {size_text(job.nbytes)}, and "
        f"{size_text(job.limit.nbytes)} of memory are allowed"
    )
    common = find_common(a, b, symmetry, has_widths=False)
    if common is None:
        raise ValueError(f"no tensor has the same shape in both networks, and {need}; allow more")
    return replace(common, notes=(*common.notes, f"{need}: with more, what was left out would be compared"))


def _compare_widths(
    a: Mapping[str, Tensor],
    b: Mapping[str, Tensor],
    symmetry: Symmetry,
    common: Common,
    references: Sequence[Mapping[str, Tensor]],
    draws: int,
    generator: torch.Generator,
    origins: Origins,
) -> Comparison:
    """Compare the units that two networks of different widths have in common.

    Choosing them explains something of any network, so that strangers and references are compared with the whole first
    network, too, by units of their own. The order of units is tested where both have the same number of them.
    """
    chosen = choose_units(common, a, b)
    first, second = chosen.params
    symmetry_of_units = bind_networks(chosen.params, common.symmetry, "compare single networks, two at a time")
    result = align(first, second, symmetry_of_units, method=WeightMatching())
    pairs = [chosen.params, *(choose_units(common, a, other).params for other in references)]
    numbers = [[fingerprint(one, symmetry_of_units) for one in pair] for pair in pairs]
    part, side = common.part_of(b, 1)

    def test() -> Independence | None:
        tested = find_common(a, b, symmetry, has_widths=False)
        return None if tested is None else _test(tested.of(a), tested.of(b), tested.symmetry, draws, generator, origins)

    found = _weigh(
        first,
        second,
        symmetry_of_units,
        result.element,
        lambda: estimate_chance(
            part, side, lambda other: _explain(*choose_units(common, a, other).params, symmetry_of_units)
        ),
        test,
        draws,
        origins,
        distances=[float((one - other).norm()) for one, other in numbers],
        common=common,
        units=chosen.units,
        notes=result.notes,
    )
    return found if found.p_value is not None else replace(found, notes=(*found.notes, NO_ORDER))


def _test(
    a: Mapping[str, Tensor] | Checkpoint,
    b: Mapping[str, Tensor] | Checkpoint,
    symmetry: Symmetry,
    draws: int,
    generator: torch.Generator,
    origins: Origins,
) -> Independence | None:
    """The test of independence, by all tensors that are compared, in the order before known alignments."""
    _, load = _readers(a, b, symmetry)

    def load_before(name: str) -> tuple[Tensor, Tensor]:
        (x, y), (first, second) = load(name), origins.undo
        return x if first is None else first(name, x), y if second is None else second(name, y)

    names = tuple(compared_shapes(a, symmetry))
    return measure_independence(load_before, symmetry, names, generator=generator, draws=draws)


def _explain(a: Mapping[str, Tensor], b: Mapping[str, Tensor], symmetry: Symmetry) -> float | None:
    """The mean share of the first network's matrices that the second one explains after alignment."""
    return _share(a, b, symmetry, align(a, b, symmetry, method=WeightMatching()).element)


def _weigh(
    a: Mapping[str, Tensor] | Checkpoint,
    b: Mapping[str, Tensor] | Checkpoint,
    symmetry: Symmetry,
    element: Element,
    estimate: Callable[[], float | None],
    measure: Callable[[], Independence | None],
    draws: int,
    origins: Origins,
    *,
    given: tuple[Params, Params] | None = None,
    distances: Sequence[float] = (),
    function: Mapping[str, float] | None = None,
    common: Common | None = None,
    units: Mapping[str, tuple[Units, Units]] = MappingProxyType({}),
    notes: tuple[str, ...] = (),
) -> Comparison:
    """Measure what the verdict rests on, tensor by tensor.

    Args:
        estimate: Says what strangers explain, if that decides.
        measure: Tests independence.
        origins: Where both networks come from.
        given: Both networks as they are stored, if what is compared is their function alone.
        distances: Distances of the fingerprints of the second network and the references from the first one's.
    """
    shapes = compared_shapes(a, symmetry)
    read, _ = _readers(a, b, symmetry)
    shares, test = tuple(measure_shares(read, symmetry, element, shapes)), measure()
    modulo = math.sqrt(sum(share.squares[1] for share in shares))
    known = shares
    if given is not None:
        known = tuple(measure_shares(_readers(*given, symmetry)[0], symmetry, symmetry.identity(), shapes))
    stored, norm = (math.sqrt(sum(share.squares[k] for share in known)) for k in (0, 2))
    size = norm or stored or 1.0
    p_value, z_score = (None, None) if test is None else (test.p_value, test.z_score)
    is_equal, precision = _rounding(known)
    evidence = Evidence(
        is_equal,
        precision,
        stored / size,
        modulo / size,
        free=sum(math.prod(shape) for shape in shapes.values()) - symmetry.dimension,
        share=mean_share(shares),
        chance=None,
        p_value=p_value if origins.is_order_free else None,
        z_score=z_score if origins.is_order_free else None,
        is_whole=common is None or common.is_whole,
        is_factorized=given is not None,
        parent=origins.parent,
    )
    if needs_chance(evidence):
        evidence = replace(evidence, chance=estimate())
    verdict, reason = judge(evidence)
    moved = (MOVED_ORDER,) if verdict == "same network in another gauge" and p_value is not None else ()
    nearer = sum(other <= distances[0] for other in distances[1:])
    return Comparison(
        verdict=verdict,
        reason=reason,
        distance=stored,
        orbit_distance=min(stored, modulo),
        norm=norm,
        compared=1.0 if common is None else common.share,
        shares=shares,
        share_by_chance=evidence.chance,
        p_value=p_value,
        z_score=z_score,
        tested_groups=() if test is None else test.groups,
        draws=draws,
        reference_p_value=(1 + nearer) / len(distances) if len(distances) > 1 else None,
        fingerprint_distance=distances[0] if distances else None,
        element=element,
        symmetry=symmetry,
        units=units,
        function=function,
        notes=(*origins.notes, *moved, *notes, *(() if common is None else common.notes)),
    )


def estimate_chance(
    b: Mapping[str, Tensor], symmetry: Symmetry, explain: Callable[[Params], float | None]
) -> float | None:
    """The share of the first network's matrices that alignment alone explains, from strangers of the second one."""
    values = sum(tensor.numel() for tensor in b.values())
    seeds = range(STRANGERS if values <= SMALL else 1)
    return by_chance([explain(stranger_of(b, symmetry, seed)) for seed in seeds])


def _share(
    a: Mapping[str, Tensor] | Checkpoint, b: Mapping[str, Tensor] | Checkpoint, symmetry: Symmetry, element: Element
) -> float | None:
    """The mean share of the first network's matrices that the second one explains after it is moved."""
    read, _ = _readers(a, b, symmetry)
    return mean_share(tuple(measure_shares(read, symmetry, element, compared_shapes(a, symmetry))))


def compared_shapes(params: Mapping[str, Tensor] | Checkpoint, symmetry: Symmetry) -> dict[str, tuple[int, ...]]:
    """The tensors that are compared, and their shapes: values, no buffers, one of several names of one tensor."""
    ignored = {*symmetry.buffers, *(name for names in symmetry.tied for name in names[1:])}
    meta: Params = params.on_meta() if isinstance(params, Checkpoint) else dict(params)
    return {
        name: tuple(tensor.shape)
        for name, tensor in meta.items()
        if name not in ignored and tensor.dtype in VALUES and tensor.numel()
    }


def _readers(
    a: Mapping[str, Tensor] | Checkpoint, b: Mapping[str, Tensor] | Checkpoint, symmetry: Symmetry
) -> tuple[Read, Load]:
    """Readers of pairs of tensors, one from each network: in pieces, and as a whole."""

    def load(name: str, rows: tuple[int, int] | None = None) -> tuple[Tensor, Tensor]:
        pair = []
        for one in (a, b):
            if isinstance(one, Checkpoint):
                pair.append(one.read(name, rows=rows))
            else:
                pair.append(one[name].detach() if rows is None else one[name].detach()[rows[0] : rows[1]])
        dtype = work_dtype(*(tensor.dtype for tensor in pair))
        return pair[0].to("cpu", dtype), pair[1].to("cpu", dtype)

    def read(name: str) -> Iterator[tuple[Tensor, Tensor]]:
        shape = a.stored[name].shape if isinstance(a, Checkpoint) else a[name].shape
        for rows in row_ranges(symmetry, name, shape, PIECE):
            yield load(name, rows)

    return read, load


def _rounding(shares: Sequence[TensorShare]) -> tuple[bool, float]:
    """Whether both networks are equal in the coarser of their formats, and how finely that is spaced."""
    everywhere = [frozenset(FORMATS).intersection(*(share.formats[k] for share in shares)) for k in range(2)]
    own = [next((one for one in FORMATS if one in formats), torch.float64) for formats in everywhere]
    is_equal = any(all(one in share.equal for share in shares) for one in own)
    return is_equal, precision_of(tuple(own))

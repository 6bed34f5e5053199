"""Two networks in memory that have the same tensors, or were cut to them."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from regauge.alignment import align
from regauge.alignment.methods.weight_matching import WeightMatching
from regauge.alignment.problem import bind_networks
from regauge.canonical.null_spaces import without_null_spaces
from regauge.comparison.fingerprints import fingerprint
from regauge.comparison.function import measure_function
from regauge.comparison.matched import Matched
from regauge.comparison.pair import Pair
from regauge.comparison.strangers import estimate_chance, explain
from regauge.comparison.verdicts import MOVED
from regauge.core.interpolation import distance
from regauge.core.symmetry import Symmetry
from regauge.core.task import Task


def match_whole(
    a: Mapping[str, Tensor],
    b: Mapping[str, Tensor],
    symmetry: Symmetry,
    *,
    task: Task | None,
    references: Sequence[Mapping[str, Tensor]],
) -> Matched:
    """Align two networks in memory, by their weights or by their function.

    Factors of a matrix product that has not its full rank hold numbers that their product does not, so that two
    networks of one function may differ by no element. Where alignment leaves a distance, the factors are therefore
    aligned again without those numbers. Likewise networks that differ by translations are the same behind them: the
    representatives are aligned.

    Raises:
        KeyError: A parameter that the symmetry moves is missing.
        ValueError: The networks do not fit the symmetry, hold NaN or Inf, or are populations.
    """
    symmetry = bind_networks([a, b], symmetry, "compare single networks, two at a time")
    given = dict(a), dict(b)
    (first, second), is_factorized = given, False
    result = align(*given, symmetry, method=WeightMatching())
    ignored = {*symmetry.buffers, *(name for names in symmetry.tied for name in names[1:])}
    if distance(given[0], result.params, ignored) > MOVED * distance(*given, ignored):
        behind = [symmetry.split(one)[0] if symmetry.translations else one for one in given]
        whole = [without_null_spaces(one, symmetry) for one in behind]
        is_factorized = any(two[n] is not one[n] for one, two in zip(behind, whole, strict=True) for n in one)
        if is_factorized or symmetry.translations:
            (first, second) = whole
            result = align(first, second, symmetry, method=WeightMatching())
    own, *numbers = (fingerprint(one, symmetry) for one in (*given, *references))
    stored = Pair(*given, symmetry)
    return Matched(
        Pair(first, second, symmetry),
        result.element,
        chance=lambda: estimate_chance(second, symmetry, lambda other: explain(Pair(first, other, symmetry))),
        tested=stored,
        stored=None if first is given[0] else stored,
        is_factorized=is_factorized,
        distances=[float((own - other).norm()) for other in numbers],
        function=None if task is None else measure_function(*given, (first, result.params), task),
        notes=result.notes,
    )

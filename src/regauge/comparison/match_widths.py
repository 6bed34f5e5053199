"""Matching of two networks in memory that have different numbers of units in some layers."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from regauge.alignment import align
from regauge.alignment.methods.weight_matching import WeightMatching
from regauge.alignment.problem import bind_networks
from regauge.comparison.common import Common, find_common
from regauge.comparison.fingerprints import fingerprint
from regauge.comparison.matched import Matched
from regauge.comparison.pair import Pair
from regauge.comparison.strangers import estimate_chance
from regauge.comparison.units import choose_units
from regauge.core.symmetry import Symmetry


def match_widths(
    a: Mapping[str, Tensor],
    b: Mapping[str, Tensor],
    symmetry: Symmetry,
    common: Common,
    *,
    references: Sequence[Mapping[str, Tensor]],
) -> Matched:
    """Select the matching units of two networks with different widths, and align them.

    Because the best matching units are selected, the explained share (squared correlation) is positive even for
    unrelated networks. Scrambled networks and references are therefore compared in the same way, each with its own
    selection of units. The order of units is tested for groups in which both networks have the same number of units.

    Args:
        a: The first network, which stays unchanged.
        b: The second network, which is aligned to the first.
        symmetry: The symmetry of the first network.
        common: The compared part of both networks, with the groups whose number of units differs.
        references: Networks that are independent of the first network.
    """
    chosen = choose_units(common, a, b)
    narrow = bind_networks(chosen.params, common.symmetry, "compare single networks, two at a time")
    first, second = chosen.params
    if chosen.stored is not None:  # Means over the chosen units differ from those over all units.
        first, second = (narrow.split(one)[0] for one in chosen.params)
    behind = narrow.on_representatives()
    result = align(first, second, behind, method=WeightMatching())
    pairs = [chosen.params, *(choose_units(common, a, other).params for other in references)]
    numbers = [[fingerprint(one, narrow) for one in pair] for pair in pairs]
    ordered = find_common(a, b, symmetry, has_widths=False)
    return Matched(
        Pair(first, second, behind),
        result.element,
        chance=lambda: estimate_chance(*common.part_of(b, 1), lambda x: choose_units(common, a, x).params, behind),
        stored=None if chosen.stored is None else Pair(*chosen.stored, narrow),
        tested=None if ordered is None else Pair(ordered.of(a), ordered.of(b), ordered.symmetry),
        distances=[float((one - other).norm()) for one, other in numbers],
        units=chosen.units,
        notes=result.notes,
    )

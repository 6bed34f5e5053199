"""Pairs of aligned networks, and the measurement of the evidence for a verdict."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from regauge.comparison.common import Common
from regauge.comparison.comparison import Comparison
from regauge.comparison.independence import Independence, measure_independence
from regauge.comparison.origins import Origins
from regauge.comparison.pair import FORMATS, Pair, TensorShare, measure_shares
from regauge.comparison.units import Units
from regauge.comparison.verdicts import Evidence, judge, lean_of, needs_chance, needs_noise, precision_of
from regauge.core.element import Element
from regauge.core.interpolation import mean_share
from regauge.core.symmetry import Symmetry

MOVED_ORDER = "the p-value belongs to the stored order of units, so it says nothing about a copy with another order"


@dataclass(frozen=True)
class Matched:
    """Two networks that were aligned to each other, and further data for their comparison.

    Attributes:
        pair: The networks to compare.
        element: The element that aligns the second network of the pair.
        chance: A function that measures the share by chance: the explained share of scrambled networks after alignment.
            `chance` is called only if the verdict depends on the share by chance.
        tested: The networks whose order of units is tested; None if no tensor has an order of units.
        stored: The networks as stored, if the pair contains converted networks with the same functions.
        noise: A function that returns how much rounding increases the distance of the pair, given the precisions of
            both formats.
        is_factorized: Whether the factors of matrix products lack the components that do not affect the products.
        distances: The distances from the first network's fingerprint to the fingerprints of the second network and of
            the references.
        balanced: The distance between the balanced networks of the pair, and their norms.
        function: The agreement of outputs, losses and barriers on the data of a task.
        units: For each group whose number of units differs between the networks, the compared units.
        whole: The symmetry of the networks as stored, and the element for the second stored network. Default: the
            symmetry and the element of the pair.
        notes: Notes on the match.
    """

    pair: Pair
    element: Element
    chance: Callable[[], float | None]
    tested: Pair | None
    stored: Pair | None = None
    noise: Callable[[Sequence[float]], float] | None = None
    is_factorized: bool = False
    distances: Sequence[float] = ()
    balanced: tuple[float, float, float] | None = None
    function: Mapping[str, float] | None = None
    units: Mapping[str, tuple[Units, Units]] = field(default_factory=dict)
    whole: tuple[Symmetry, Element] | None = None
    notes: tuple[str, ...] = ()

    @property
    def reference_p_value(self) -> float | None:
        """The p-value of the second network: the rank of its fingerprint distance among the distances of the
        references.
        """
        # A Monte Carlo p-value counts the second network itself so that it is never zero (Phipson and Smyth, 2010).
        nearer = sum(other <= self.distances[0] for other in self.distances[1:])
        return (1 + nearer) / len(self.distances) if len(self.distances) > 1 else None


def weigh(
    matched: Matched, common: Common | None, origins: Origins, *, draws: int, generator: torch.Generator
) -> Comparison:
    """Measure the evidence tensor by tensor, and return the comparison with the verdict that follows.

    Args:
        matched: The matched networks.
        common: The compared part of both networks, unless both networks are compared completely.
        origins: The origins of both networks, as recorded in their provenance.
        draws: The number of random permutations in the independence test.
        generator: The source of randomness for the permutations.
    """
    pair = matched.pair
    symmetry, element = (pair.symmetry, matched.element) if matched.whole is None else matched.whole
    shares = tuple(measure_shares(pair, matched.element))
    test = None if matched.tested is None else _test(matched.tested, origins, draws, generator)
    modulo = math.sqrt(sum(share.squares[1] for share in shares))
    known, given = shares, matched.stored
    if given is not None:
        known = tuple(measure_shares(given, given.symmetry.identity()))
    stored, norm = (math.sqrt(sum(share.squares[k] for share in known)) for k in (0, 2))
    size = norm or stored or 1.0
    p_value, z_score = (None, None) if test is None else (test.p_value, test.z_score)
    is_equal, precisions = _rounding(known)
    here = math.sqrt(sum(share.squares[2] for share in shares)) or size
    evidence = Evidence(
        is_equal,
        max(precisions),
        stored / size,
        modulo / here,
        free=sum(math.prod(shape) for shape in pair.shapes.values()) - symmetry.dimension,
        share=mean_share(shares),
        chance=None,
        p_value=p_value if origins.is_order_free else None,
        z_score=z_score if origins.is_order_free else None,
        is_whole=common is None or common.is_whole,
        is_factorized=matched.is_factorized,
        lean=lean_of(matched.balanced) if common is None or common.is_whole else None,
        parent=origins.parent,
    )
    for _ in range(2):  # Each of the two measurements may decide whether the other one is needed.
        if given is not None and matched.noise is not None and needs_noise(evidence):
            evidence = replace(evidence, noise=matched.noise(precisions) / here)
        if needs_chance(evidence):
            evidence = replace(evidence, chance=matched.chance())
    verdict, reason = judge(evidence)
    moved = (MOVED_ORDER,) if verdict == "same network in another gauge" and p_value is not None else ()
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
        reference_p_value=matched.reference_p_value,
        fingerprint_distance=matched.distances[0] if matched.distances else None,
        element=element,
        symmetry=symmetry,
        balanced=matched.balanced,
        lean=evidence.lean,
        units=matched.units,
        function=matched.function,
        notes=(*origins.notes, *moved, *matched.notes, *(() if common is None else common.notes)),
    )


def _test(pair: Pair, origins: Origins, draws: int, generator: torch.Generator) -> Independence | None:
    """Test independence on all compared tensors. Known alignments are undone first."""

    def load_before(name: str) -> tuple[Tensor, Tensor]:
        (x, y), (first, second) = pair.load(name), origins.undo
        return x if first is None else first(name, x), y if second is None else second(name, y)

    return measure_independence(load_before, pair.symmetry, tuple(pair.shapes), generator=generator, draws=draws)


def _rounding(shares: Sequence[TensorShare]) -> tuple[bool, list[float]]:
    """Return whether both networks are equal after rounding to the coarser of their formats, and the precisions of both
    formats.
    """
    # If all values of a float32 tensor fit bfloat16, the tensor was once stored in bfloat16. Therefore the format
    # depends on values, not on dtypes. A network has the coarsest format that fits all its tensors.
    everywhere = [frozenset(FORMATS).intersection(*(share.formats[k] for share in shares)) for k in range(2)]
    own = [next((one for one in FORMATS if one in formats), torch.float64) for formats in everywhere]
    is_equal = any(all(one in share.equal for share in shares) for one in own)
    return is_equal, [precision_of((one,)) for one in own]

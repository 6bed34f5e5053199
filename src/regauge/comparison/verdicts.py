"""Verdicts of comparisons and their thresholds, which were chosen on networks that the evaluation does not use.

`benchmarks/aligned_strangers.py` contains the hard cases: independent networks that were trained on the same data and
then aligned, fully or partly, some with further training. `benchmarks/lineage.py` contains the remaining networks for
choosing thresholds, and `benchmarks/lineage_pairs.py` the networks for evaluation.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

Verdict = Literal[
    "identical",
    "same network in another gauge",
    "descended",
    "aligned to A, or a distant descendant",
    "unrelated",
    "undecided",
]

ALIGNED: Verdict = "aligned to A, or a distant descendant"
"""The verdict if only the order of units indicates a relation."""
UNKNOWN = "one was aligned to the other, or they have a common ancestor; the order of units cannot show which"
"""The reason for a verdict if only the order of units corresponds."""

BOTH = "both seem to descend from a third network"
"""The beginning of a sentence on networks that descend from a third network."""

IDENTICAL = 1e-6
"""The relative distance below which networks count as identical, for any format."""
REGAUGED = 1.0
"""The largest relative distance after alignment at which a network counts as a transformed copy, in units of the
precision of the coarser format.

The bound is never smaller than `MOVED`.
"""
NOISE = 2.0
"""The largest distance after alignment at which a network counts as a transformed copy, in units of the measured effect
of rounding."""
LEGIBLE = 0.1
"""If rounding alone can cause this relative distance, no network counts as the same in another gauge."""
BLURRED = 1.0
"""If rounding alone can cause this relative distance, no network is called unrelated, because rounding may hide a
copy."""
MOVED = 1e-5
"""The smallest value of the bound on the relative distance of a transformed copy after alignment.

In fine formats, the rounding errors of the alignment itself dominate.
"""
CERTAIN = 6.0
"""Units count as corresponding in their stored order if the test statistic is this many standard deviations (of the
null distribution) above its mean."""
SURPRISING = 0.001
"""Networks with at most this p-value are not called unrelated."""
RELATED = 0.3
"""The smallest share beyond chance (see `beyond_chance`) from which one network counts as a descendant of the other.

No unrelated network reaches this share by alignment.
"""
STRANGE = 0.2
"""The largest share beyond chance of independent networks. The share is not zero, because independent networks may be
trained on the same data.
"""
FAINT_SHARE = 0.02
"""Up to this share beyond chance, the order of units is not used as evidence, because every descendant has a larger
share.
"""
LINE, SIBLINGS = 1.5, 0.25
"""Two thresholds for the lean of a pair, which is the change of the squared norm divided by the squared distance.

One network descends from the other if this ratio is at least the first threshold. Both networks descend from a third
network if the ratio is at most the second threshold.
"""
EVERYTHING = 0.85
"""If the share by chance (of scrambled networks) is at least this number, the explained share is not used as
evidence.
"""
ENOUGH = 200
"""The smallest number of degrees of freedom (compared entries minus the dimension of the group) for a comparison.

With fewer degrees of freedom, unrelated networks resemble one another too often.
"""


@dataclass(frozen=True)
class Evidence:
    """The measurements that determine a verdict.

    Attributes:
        is_equal: Whether all entries are equal, possibly after rounding to the coarser format of both networks.
        precision: The spacing of numbers near one, in the coarser of the two formats of the networks.
        stored: The distance as stored, relative to the first network's norm.
        modulo: The distance after alignment, relative to the first network's norm.
        free: The number of compared entries minus the dimension of the group.
        share: The mean explained share (squared correlation) of the matrices after alignment; None if there are no
            matrices.
        chance: An upper estimate of the share by chance, that is, of scrambled copies; see `by_chance`. None if it was
            not measured.
        p_value: The p-value of independence, from the stored order of units; None if no group can be tested. The
            p-value is exact unless the stored order of units was chosen, for example by an alignment.
        z_score: The test statistic of the p-value.
        noise: The relative distance that rounding of the stored entries causes; zero if it was not measured.
        is_whole: Whether both networks are compared completely.
        is_factorized: Whether distances are measured between products of matrices without full rank. If the products
            are equal, an element that maps one network to the other need not exist.
        lean: The change of the squared norm divided by the squared distance (see `kinship`); None if it is unknown.
        parent: A sentence if one network's provenance names the other as a parent, otherwise empty.
    """

    is_equal: bool
    precision: float
    stored: float
    modulo: float
    free: int
    share: float | None
    chance: float | None
    p_value: float | None
    z_score: float | None
    noise: float = 0.0
    is_whole: bool = True
    is_factorized: bool = False
    lean: float | None = None
    parent: str = ""


def needs_noise(evidence: Evidence) -> bool:
    """Return whether the verdict depends on the effect of rounding after translations and gains are removed, and this
    effect was not measured.
    """
    if evidence.noise:
        return False
    same = replace(evidence, noise=LEGIBLE)
    is_near = _judge_same_gauge(same) is not None and _judge_same_gauge(evidence) is None
    return is_near or _judge_weights(evidence)[0] == "unrelated"


def needs_chance(evidence: Evidence) -> bool:
    """Return whether the verdict depends on the share by chance (of scrambled networks), and this share was not
    measured.
    """
    is_open = evidence.chance is None and evidence.share is not None and evidence.free >= ENOUGH
    return is_open and _judge_weights(evidence)[0] == "undecided"


def judge(evidence: Evidence) -> tuple[Verdict, str]:
    """Return the verdict and a sentence with the reason."""
    verdict, reason = _judge_weights(evidence)
    if evidence.parent and verdict in (ALIGNED, "unrelated", "undecided"):
        return "descended", f"{evidence.parent}. By weights alone it is {verdict}: {reason}"
    return verdict, reason


def _judge_weights(evidence: Evidence) -> tuple[Verdict, str]:
    verdict, reason = _judge_clear(evidence)
    if verdict == "unrelated" and evidence.noise >= BLURRED:
        return "undecided", (
            f"{reason}. But rounding changes the compared values by {evidence.noise:.2g} of A's norm, because "
            "translations are large relative to the weights, and this may hide a copy"
        )
    return verdict, reason


def _judge_clear(e: Evidence) -> tuple[Verdict, str]:
    """Return the verdict from the weights if rounding is negligible."""
    if e.is_equal or e.stored <= IDENTICAL:
        how = "all values are equal" if e.is_equal else f"they differ by {e.stored:.1e} of the norm, which is rounding"
        return _judge_same("identical", how, e)
    same = _judge_same_gauge(e)
    if same is not None:
        return same
    order = _order(e)
    beyond = beyond_chance(e.share, e.chance)
    if e.free < ENOUGH:
        few = f"modulo the group, only {max(0, e.free)} numbers remain, too few to recognize unrelated networks"
        return ("undecided", few) if order is None else (ALIGNED, f"{order}, and {few}: {UNKNOWN}")
    if e.share is None or e.chance is None or beyond is None:  # Chance is measured only if it may decide.
        return "undecided", "no matrix distinguishes units, so nothing can be aligned"
    explained = (
        f"after alignment B explains {e.share:.0%} of A's matrices, and unrelated networks up to {e.chance:.0%} "
        f"({beyond:.0%} beyond chance; descendants have {RELATED:.0%} or more)"
    )
    if e.chance >= EVERYTHING:
        large = f"{explained}: the group is so large that this share decides nothing"
        return ("undecided", large) if order is None else (ALIGNED, f"{large}. {_upper(order)}: {UNKNOWN}")
    if beyond >= RELATED:
        return "descended", f"{explained}: {kinship(e.lean)}"
    if order is not None and beyond > FAINT_SHARE:
        return ALIGNED, f"{explained}, which is less than for near descendants. {_upper(order)}: {UNKNOWN}"
    if beyond > STRANGE:
        return (
            "undecided",
            f"{explained}: more than for networks with common data, and less than for descendants",
        )
    if e.p_value is None:
        return "unrelated", explained
    if e.p_value > SURPRISING:
        return (
            "unrelated",
            f"{explained}, and the order of units is as in independent networks (p = {e.p_value:.2g})",
        )
    if beyond > FAINT_SHARE:
        return "undecided", (
            f"units correspond in the stored order more than by chance (p = {e.p_value:.2g}), but this is not certain, "
            f"and {explained}"
        )
    return "unrelated", (
        f"{explained}. Units correspond in the stored order (p = {e.p_value:.2g}), as after an alignment of B to A"
    )


def _judge_same_gauge(e: Evidence) -> tuple[Verdict, str] | None:
    """Return the verdict if an element maps one network to the other up to rounding, and None otherwise."""
    tolerance = max(MOVED, REGAUGED * e.precision, NOISE * e.noise if e.noise <= LEGIBLE else 0.0)
    if e.modulo > tolerance or e.modulo > e.stored / 2:
        return None
    how = (
        f"an element of the group reduces the distance from {e.stored:.3g} to {e.modulo:.2g} of A's norm, which is "
        f"within rounding ({tolerance:.2g})"
    )
    if e.is_factorized:
        how += (
            ". Products of matrices have less than full rank; values that do not influence them are not compared. The "
            "function is the same, but perhaps no element maps one network to the other"
        )
    return _judge_same("same network in another gauge", how, e)


def _order(evidence: Evidence) -> str | None:
    """Return a clause that states that units correspond in their stored order, or None if this is not certain."""
    if evidence.z_score is None or evidence.z_score < CERTAIN:
        return None
    return (
        f"units correspond in the stored order, {evidence.z_score:.1f} standard deviations more than in networks whose "
        "order was not chosen"
    )


def _upper(sentence: str) -> str:
    return sentence[0].upper() + sentence[1:]


def _judge_same(verdict: Verdict, reason: str, evidence: Evidence) -> tuple[Verdict, str]:
    """Return the verdict for networks that match exactly: the given verdict, or "descended" if the networks have
    different shapes.
    """
    if evidence.is_whole:
        return verdict, reason
    return "descended", f"in their common part, {reason}; the rest, which only one of them has, was added or removed"


def kinship(lean: float | None) -> str:
    """Return a sentence that states whether one of two networks descends from the other, or both from a third network.

    Further training increases the norm: the squared norm grows by more than the squared distance. If training steps
    were orthogonal to the weights, the squared norm would grow by the squared distance. Two networks that were trained
    in the same way from a third network have nearly equal norms. Values of `lean` between `SIBLINGS` and `LINE` are
    inconclusive. Pruning, rounding, and unequally long trainings from a third network also give inconclusive values.

    Args:
        lean: The squared norm of the second network minus that of the first, relative to their squared distance, for
            balanced networks.
    """
    if lean is None or SIBLINGS < abs(lean) < LINE:
        return "one descends from the other, or both from a third"
    if abs(lean) >= LINE:
        how = f"the squared norm changes by {abs(lean):.2g} of the squared distance"
        return f"one seems to descend from the other, because {how}"
    return f"{BOTH}, because their squared norms differ little (by {abs(lean):.2g} of the squared distance)"


def lean_of(balanced: tuple[float, float, float] | None) -> float | None:
    """Return the change of the squared norm relative to the squared distance, given the distance and the norms of both
    networks.
    """
    if balanced is None or not balanced[0]:
        return None
    distance, first, second = balanced
    return (second - first) * (second + first) / distance**2


def by_chance(shares: Sequence[float | None]) -> float | None:
    """Return an upper estimate of the share by chance: the largest explained share of a scrambled copy, plus the
    difference between the largest and the smallest share.

    The estimate is at most one. With few units, the shares of scrambled copies vary much.
    """
    known = [share for share in shares if share is not None]
    return min(1.0, 2 * max(known) - min(known)) if known else None


def beyond_chance(share: float | None, chance: float | None) -> float | None:
    """Return the share beyond chance, (share - chance) / (1 - chance), or zero if it is below chance."""
    if share is None or chance is None:
        return None
    return max(0.0, share - chance) / (1 - chance) if chance < 1 else 0.0


def precision_of(formats: tuple[torch.dtype, ...]) -> float:
    """Return the spacing of numbers near one in the coarsest of some formats."""
    return max((torch.finfo(one).eps for one in formats), default=torch.finfo(torch.float64).eps)

"""What a comparison says in words, by thresholds that `benchmarks/lineage.py` fixed on other networks."""

from dataclasses import dataclass
from typing import Literal

import torch

Verdict = Literal["identical", "same network in another gauge", "descended", "unrelated", "undecided"]

EQUAL = 1e-6
"""Relative distance up to which networks are identical but for rounding, whatever their format."""
REGAUGED = 1.0
"""Relative distance modulo the group of a moved copy, in units of the coarser format's precision; at least `MOVED`."""
MOVED = 1e-5
"""The same for formats so fine that the alignment's own rounding decides."""
CERTAIN = 6.0
"""Standard deviations of the null above which units correspond in the order in which they are stored."""
SURPRISING = 0.01
"""A p-value below which networks are not called unrelated."""
RELATED = 0.5
"""Mean share of the matrices that a descendant explains at least, after alignment."""
STRANGE = 0.4
"""Mean share up to which independent networks come by alignment and by common data."""


@dataclass(frozen=True)
class Evidence:
    """What a verdict rests on.

    Attributes:
        is_equal: Whether all values are equal, or are after rounding to the coarser of both formats.
        precision: Spacing of the numbers around one in the coarser format in which one of the networks can be written.
        stored: Distance as stored, relative to the first network's norm.
        modulo: The same modulo the group.
        share: Mean share of the first network's matrices that the second one explains after alignment, if any can be.
        p_value: Of independence, by the order of units as stored; None where no group can be tested.
        z_score: The statistic behind it.
    """

    is_equal: bool
    precision: float
    stored: float
    modulo: float
    share: float | None
    p_value: float | None
    z_score: float | None


def judge(evidence: Evidence) -> tuple[Verdict, str]:
    """The verdict, and a sentence that gives the reason."""
    e = evidence
    if e.is_equal or e.stored <= EQUAL:
        how = "all values are equal" if e.is_equal else f"they differ by {e.stored:.1e} of the norm, which is rounding"
        return "identical", how
    tolerance = max(MOVED, REGAUGED * e.precision)
    if e.modulo <= tolerance and e.modulo <= e.stored / 2:
        return "same network in another gauge", (
            f"an element of the group brings B from {e.stored:.3g} of A's norm to {e.modulo:.2g}, which the rounding "
            f"of their format explains ({tolerance:.2g})"
        )
    if e.p_value is not None and e.z_score is not None and e.z_score >= CERTAIN:
        return "descended", (
            f"units correspond in the order in which they are stored, {e.z_score:.1f} standard deviations beyond "
            f"independent networks (p = {e.p_value:.2g}): one descends from the other, or both from a third"
        )
    if e.share is None:
        return "undecided", "no matrix tells units apart, so that there is nothing to align"
    if e.share >= RELATED:
        return "descended", (
            f"after alignment B explains {e.share:.0%} of A's matrices, more than independent networks do (up to "
            f"{STRANGE:.0%}): one descends from the other, or both from a third, and one was moved"
        )
    if e.share <= STRANGE and (e.p_value is None or e.p_value > SURPRISING):
        order = "" if e.p_value is None else f", and units do not correspond as stored (p = {e.p_value:.2g})"
        return (
            "unrelated",
            f"after alignment B explains {e.share:.0%} of A's matrices, as independent networks do{order}",
        )
    return "undecided", (
        f"after alignment B explains {e.share:.0%} of A's matrices, between independent networks (up to "
        f"{STRANGE:.0%}) and descendants ({RELATED:.0%} and more)"
        if e.share > STRANGE
        else f"units correspond as stored more than chance does (p = {e.p_value:.2g}), but not for certain"
    )


def precision_of(formats: tuple[torch.dtype, ...]) -> float:
    """The spacing of numbers around one in the coarsest of some formats."""
    return max((torch.finfo(one).eps for one in formats), default=torch.finfo(torch.float64).eps)

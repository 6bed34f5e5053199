"""The result of comparing two networks."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod, sqrt
from typing import Any

from jaxtyping import Int
from torch import Tensor

from regauge.comparison.pair import TensorShare
from regauge.comparison.verdicts import Verdict, beyond_chance
from regauge.core.element import Element
from regauge.core.interpolation import mean_share
from regauge.core.symmetry import Symmetry


@dataclass(frozen=True)
class Comparison:
    """The result of comparing two networks, as stored and up to symmetry.

    Attributes:
        verdict: "identical", "same network in another gauge", "descended", "aligned to A, or a distant descendant",
            "unrelated" or "undecided".
        reason: A sentence with the evidence for the verdict.
        distance: The Euclidean distance of the parameters as stored, without buffers.
        orbit_distance: The distance after the second network was aligned to the first. `orbit_distance` is an upper
            bound on the smallest distance between the first network, as stored, and the orbit of the second.
        norm: The norm of the compared parameters in the first network.
        compared: The fraction of the first network's entries that is compared. The share is 1 unless the networks have
            different shapes.
        shares: For each tensor, the explained share before and after alignment: the squared correlation between both
            networks.
        share_by_chance: The explained share that alignment reaches by chance: the largest share of a scrambled copy,
            plus the range of the shares over all scrambled copies. None if the verdict does not depend on the share by
            chance, for example if both networks are the same.
        p_value: The probability that the units of independently trained networks correspond at least as well in their
            stored order, estimated with random elements; see `measure_independence`. None if no group permutes units.
            The p-value is exact unless somebody chose the order of units. If the files record an alignment and contain
            its element, the p-value refers to the order before the alignment.
        z_score: The deviation of the test statistic from its mean, in standard deviations of the null distribution.
        tested_groups: The groups whose units the independence test permutes.
        draws: The number of random elements that the independence test sampled.
        reference_p_value: The probability that an independent network is at least as close to the first network, up to
            symmetry, as the second network. The probability is estimated from the references; None without references.
        fingerprint_distance: The distance between the fingerprints of the two networks; None for streamed networks.
        element: The element that aligns the second network to the first.
        symmetry: The symmetry to which the element belongs. All sizes of its groups are known.
        balanced: The distance after alignment between the balanced networks, and the norms of both. A balanced network
            is the network of smallest norm that scales and invertible matrices produce. Unlike `orbit_distance`,
            `balanced` does not depend on the scales of the first network. None for networks that are streamed, sampled,
            equal or of different widths.
        lean: The squared norm of the second network minus that of the first, divided by their squared distance, for
            balanced networks. `lean` is above one if the second network was trained further from the first, and around
            minus one if it was pruned. `lean` is around zero if both networks were trained in the same way from a third
            network; see `kinship`. None if `balanced` is None, or if only a part of the networks is compared.
        units: For networks of different widths, the indices of the compared units in the first and second network, for
            each group whose number of units differs. The indices ascend within each copy of the group. All other
            measurements use both networks cut to the compared units.
        function: If there is a task: the agreement of outputs, losses, barriers before and after alignment, and the
            loss of the merged network.
        is_sampled: Whether a sample of both networks determined the verdict. In a sampled comparison, all numbers are
            measured on the sample, and `units` lists the sampled units.
        notes: Notes on parts that were excluded, cut, or could not be transferred.
    """

    verdict: Verdict
    reason: str
    distance: float
    orbit_distance: float
    norm: float
    compared: float
    shares: tuple[TensorShare, ...]
    share_by_chance: float | None
    p_value: float | None
    z_score: float | None
    tested_groups: tuple[str, ...]
    draws: int
    reference_p_value: float | None
    fingerprint_distance: float | None
    element: Element
    symmetry: Symmetry
    balanced: tuple[float, float, float] | None = None
    lean: float | None = None
    units: Mapping[str, tuple[Int[Tensor, "*bases units"], Int[Tensor, "*bases units"]]] = field(default_factory=dict)
    function: Mapping[str, float] | None = None
    is_sampled: bool = False
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        rows = [f"{self.verdict}: {self.reason}", ""]
        rows += [f"{name}: {value:.6g}" for name, value in self.numbers.items() if value is not None]
        return "\n".join(rows)

    @property
    def share_before(self) -> float | None:
        """Return the mean explained share (squared correlation) of the matrices as stored."""
        return mean_share(self.shares, is_after=False)

    @property
    def share_after(self) -> float | None:
        """Return the mean explained share (squared correlation) of the matrices after alignment."""
        return mean_share(self.shares)

    @property
    def share_beyond_chance(self) -> float | None:
        """Return the share beyond chance, (share - chance) / (1 - chance), on which the verdict depends."""
        return beyond_chance(self.share_after, self.share_by_chance)

    @property
    def relative_distance(self) -> float:
        """Return the distance up to symmetry, relative to the norm of the first network without translations."""
        norm = sqrt(sum(one.squares[2] for one in self.shares))
        return self.orbit_distance / norm if norm else 0.0

    @property
    def numbers(self) -> dict[str, float | None]:
        """Return all numbers of the comparison under the names that reports use."""
        return {
            "distance as stored": self.distance,
            "distance modulo the group": self.orbit_distance,
            "norm of A": self.norm,
            "share of A that is compared": self.compared if self.compared < 1 else None,
            "share explained as stored": self.share_before,
            "share explained after alignment": self.share_after,
            "share explained by chance": self.share_by_chance,
            "share beyond chance": self.share_beyond_chance,
            "change of squared norms over squared distance": self.lean if self.verdict == "descended" else None,
            "p-value of independence, as stored": self.p_value,
            "z-score": self.z_score,
            "p-value among references": self.reference_p_value,
            "distance of fingerprints": self.fingerprint_distance,
            **(self.function or {}),
        }

    @property
    def facts(self) -> dict[str, Any]:
        """Return the whole comparison as plain values for JSON and HTML pages."""
        return {
            "verdict": self.verdict,
            "reason": self.reason,
            "numbers": {name: value for name, value in self.numbers.items() if value is not None},
            "layers": self.layers,
            "tensors": [
                {"tensor": one.name, "size": prod(one.shape), "before": one.before, "after": one.after}
                for one in self.shares
            ],
            "tested_groups": list(self.tested_groups),
            "draws": self.draws,
            "is_sampled": self.is_sampled,
            "notes": list(self.notes),
        }

    @property
    def layers(self) -> list[dict[str, Any]]:
        """Return the explained share of each layer before and after alignment, as a weighted mean over its tensors."""
        result: dict[str, list[TensorShare]] = {}
        for share in self.shares:
            if share.after is not None:
                result.setdefault(share.layer, []).append(share)
        return [
            {"layer": layer, "before": _weighted(own, is_after=False), "after": _weighted(own, is_after=True)}
            for layer, own in result.items()
        ]


def _weighted(shares: list[TensorShare], *, is_after: bool) -> float:
    weights = sum(share.weight for share in shares)
    values = ((share.after if is_after else share.before) or 0.0 for share in shares)
    return sum(value * share.weight for value, share in zip(values, shares, strict=True)) / weights

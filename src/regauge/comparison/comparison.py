"""The outcome of comparing two networks."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod, sqrt
from typing import Any

from jaxtyping import Int
from torch import Tensor

from regauge.comparison.tensor_shares import TensorShare
from regauge.comparison.verdicts import Verdict, beyond_chance
from regauge.core.element import Element
from regauge.core.interpolation import mean_share
from regauge.core.symmetry import Symmetry


@dataclass(frozen=True)
class Comparison:
    """Two networks, compared as they are and modulo their symmetry.

    Attributes:
        verdict: "identical", "same network in another gauge", "descended", "aligned to A, or a distant descendant",
            "unrelated" or "undecided".
        reason: The evidence for it, in a sentence.
        distance: Euclidean distance of the parameters as stored, without buffers.
        orbit_distance: The distance after the second network was aligned to the first: an upper bound of the smallest
            distance along its orbit, measured where the first network is.
        norm: The norm of the first network's parameters, as far as they are compared.
        compared: The share of the first network's values that is compared: 1 unless the networks have other shapes.
        shares: The share of each tensor of the first network that the second one explains.
        share_by_chance: The share that alignment alone explains: the largest share of a stranger plus their range.
            None where the verdict rests on something else, as where both networks are the same.
        p_value: The probability, by random elements, that independently trained networks correspond as much in the
            order of their units as stored; None where no group has an order. It is exact unless that order was chosen.
            Where files name and hold an alignment, it is of the order before that. See `measure_independence`.
        z_score: The statistic behind it, in standard deviations of the null.
        tested_groups: The groups that the test reorders.
        draws: Random elements that were drawn for it.
        reference_p_value: The probability, by the references, that an independent network is as near as the second one
            modulo the group; None without references.
        fingerprint_distance: Distance of both fingerprints; None for networks that are streamed.
        element: The element that aligns the second network to the first.
        symmetry: The symmetry that it belongs to, with every size known.
        balanced: The distance after alignment where both networks have their smallest norms under scales and matrices,
            and these norms. Unlike `orbit_distance` it does not depend on where on its orbit the first network is. None
            for networks that are streamed, sampled, equal or of different widths.
        lean: The change of the squared norm from the first to the second network, relative to the squared distance,
            where both are balanced: above one where one was trained on from the other, around minus one where it was
            pruned, and around zero for siblings that were trained alike; see `kinship`. None without `balanced`, and
            where a part is compared.
        units: For networks of different widths: the units that are compared, for each group with other numbers of units
            in both, of the first network and of the second one, ascending, copy by copy of the group. All else is
            measured on both networks cut to these, in their order.
        function: With a task: agreement of outputs, losses, barriers before and after, and the loss of the merge.
        is_sampled: Whether a sample of both networks decided. Then all numbers are those of the sample, and `units` has
            its units.
        notes: Sentences about parts that are left out, cut or could not be taken over.
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
        """Mean share of the first network's matrices that the second one explains as stored."""
        return mean_share(self.shares, is_after=False)

    @property
    def share_after(self) -> float | None:
        """The mean share of the first network's matrices that the second one explains after alignment."""
        return mean_share(self.shares)

    @property
    def share_beyond_chance(self) -> float | None:
        """The share beyond chance, (share - chance) / (1 - chance), on which verdicts rest."""
        return beyond_chance(self.share_after, self.share_by_chance)

    @property
    def relative_distance(self) -> float:
        """The distance modulo the group, relative to the norm of the first network without translations."""
        norm = sqrt(sum(one.squares[2] for one in self.shares))
        return self.orbit_distance / norm if norm else 0.0

    @property
    def numbers(self) -> dict[str, float | None]:
        """All numbers, by their names in reports."""
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
        """The whole comparison in plain values, for JSON and pages."""
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
        """The share of each layer that is explained before and after alignment, as a weighted mean over its tensors."""
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

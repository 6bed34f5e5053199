"""The numerical proof of a symmetry: random elements must leave the outputs unchanged."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """The outcome of a verification: the largest relative change of an output, in total and by each group alone.

    Accepted are 1e-9, 1e-5 where the model itself rounds to float32, and 1e-4 where it cannot run in float64.
    """

    max_error: float
    per_group: Mapping[str, float]
    tolerance: float

    @property
    def ok(self) -> bool:
        """Whether every error is within the tolerance."""
        return self.max_error <= self.tolerance

    @property
    def failed(self) -> tuple[str, ...]:
        """Groups that change the function."""
        return tuple(name for name, error in self.per_group.items() if not error <= self.tolerance)

    def __str__(self) -> str:
        if self.ok:
            count = f"{len(self.per_group)} groups, each alone and all together," if self.per_group else "all groups"
            return (
                f"verified: {count} leave the outputs unchanged "
                f"(largest relative error {self.max_error:.1e}, tolerance {self.tolerance:.0e})"
            )
        if not self.failed:
            return (
                f"NOT a symmetry: each group alone leaves the outputs unchanged, but all together change them by "
                f"{self.max_error:.1e} (tolerance {self.tolerance:.0e}); two groups claim the same axis"
            )
        worst = sorted(self.failed, key=lambda name: -self.per_group[name])[:5]
        listed = ", ".join(f"{name} ({self.per_group[name]:.1e})" for name in worst)
        return (
            f"NOT a symmetry: {len(self.failed)} of {len(self.per_group)} groups change the outputs: {listed}; "
            "an axis is missing from their placements or tied to the wrong group. Remove the group, or correct "
            "its placements; if `discover` found it, report the model"
        )

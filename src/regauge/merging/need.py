"""Whether networks must be aligned before they are combined: fine-tunes of one base share its coordinates."""

from dataclasses import dataclass

from regauge.core.element import Element
from regauge.core.symmetry import Symmetry

SHARE = 0.1
"""Alignment is needed if it gives this share of the units of a group another place or sign."""
CLOSER = 0.5
"""It is needed if it makes the distance smaller than this share of what it was."""


@dataclass(frozen=True)
class Need:
    """The changes that aligning a network to another one would make.

    Attributes:
        moved: The number of units that get another place or sign.
        units: The number of all units.
        worst: The largest share of moved units in a group.
        before: The distance of the networks as they are.
        after: Their distance when they are aligned.
    """

    moved: int
    units: int
    worst: float
    before: float
    after: float

    @classmethod
    def of(cls, symmetry: Symmetry, element: Element, before: float, after: float) -> "Need":
        """Compare an element with the identity."""
        identity, moved, units, worst = symmetry.identity(), 0, 0, 0.0
        for name, value in element.items():
            changed = None
            for field in ("perm", "sign"):
                own, stays = getattr(value, field), getattr(identity[name], field)
                if own is not None:
                    differs = (own != stays).flatten(0, -2).any(0) if own.ndim > 1 else own != stays
                    changed = differs if changed is None else changed | differs
            if changed is not None and changed.numel():
                count = int(changed.sum())
                moved, units, worst = moved + count, units + changed.numel(), max(worst, count / changed.numel())
        return cls(moved, units, worst, before, after)

    @property
    def is_there(self) -> bool:
        """Whether the networks differ by more than fine-tuning."""
        return self.worst >= SHARE or self.after < CLOSER * self.before

    def explain(self, label: str, reference: str) -> str:
        """The answer in a sentence."""
        numbers = f"{self.moved} of {self.units} units move, distance {self.before:.4g} -> {self.after:.4g}"
        if self.is_there:
            return f"{label} is aligned to {reference}: {numbers}"
        return f"alignment is not needed for {label}: it has the coordinates of {reference} ({numbers})"

"""A progress display that records all calls."""

from dataclasses import dataclass, field

from regauge.core.progress import Advance


@dataclass
class Recorded:
    """All calls of a `Progress`: labels, totals, and the amounts and losses of all steps."""

    labels: list[str] = field(default_factory=list)
    totals: list[float] = field(default_factory=list)
    amounts: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def __call__(self, label: str, total: float, /) -> Advance:
        self.labels.append(label)
        self.totals.append(total)
        return self.advance

    def advance(self, amount: float = 1, /, *, loss: float | None = None) -> None:
        self.amounts.append(amount)
        if loss is not None:
            self.losses.append(loss)

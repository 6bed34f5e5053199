"""Measures of aligned networks that predict, before a flow is fitted, whether sampled networks will solve the task."""

import warnings
from dataclasses import dataclass

from regauge.flow.judgement import HALF, WORKING
from regauge.flow.manifold import Points

WIDE = 1.1
"""A limit on `Outlook.spread`. If the spread is above the limit, sampled networks are not expected to solve the
task."""
HELP = "one initialization, more networks, or a task that selects or guides samples (sample(task=...), Guidance) help"


@dataclass(frozen=True)
class Outlook:
    """Measures of the similarity of a population's aligned networks.

    Attributes:
        networks: The number of training networks.
        values: The number of parameters of a network.
        aligned: The root mean square distance of two aligned networks, divided by the root mean square distance of two
            unaligned networks.
        spread: The root mean square distance of aligned networks to their mean, divided by the norm of the mean.
        kept: The performance of networks sampled from the prior, divided by the performance of the validation networks;
            see `Judgement.is_working`. None without a task.
    """

    networks: int
    values: int
    aligned: float
    spread: float
    kept: float | None = None

    @classmethod
    def of(cls, given: Points, aligned: Points) -> "Outlook":
        """Return the outlook for training networks, given their points before and after alignment."""
        points = aligned.double()
        within, common = points.var(0).sum(), points.mean(0).square().sum().clamp_min(1e-30)
        before = given.double().var(0).sum()
        count, values = aligned.shape
        return cls(count, values, float((within / before).sqrt()), float((within / common).sqrt()))

    def warn(self) -> None:
        """Warn if sampled networks are not expected to solve the task, by `kept` or, without a task, by `spread`."""
        if self.kept is not None and self.kept < WORKING:
            warnings.warn(
                "samples from the normal distribution of aligned networks, from which the flow starts, "
                f"{'work worse than trained ones' if self.kept >= HALF else 'do not work'}: on the task they have "
                f"{max(0, self.kept):.0%} of the performance of validation networks; {HELP}",
                stacklevel=2,
            )
        elif self.kept is None and self.spread > WIDE:
            warnings.warn(
                f"aligned networks have little in common: their distance to their mean is {self.spread:.2f} times its "
                f"norm. Sampled networks will work worse than trained ones; {HELP}. With a task, fit measures this "
                "before it trains",
                stacklevel=2,
            )

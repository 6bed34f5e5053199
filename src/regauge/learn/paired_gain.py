"""The gain of a learned component over a control that needs no training, measured case by case."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class PairedGain:
    """The mean amount by which the loss of a learned component is below the loss of its control, over the same cases.

    A learned component replaces its control only if the gain is clear, that is, above one standard error. A smaller
    gain is not evidence, because the learned component is the best of several epochs on the same validation data, and
    the control is not.

    Attributes:
        mean: The mean of the loss of the control minus the loss of the learned component.
        error: The standard error of the mean difference; infinite for a single case.
        count: The number of cases.

    References:
        Breiman et al. (1984), Classification and Regression Trees, section 3.4.3: the rule of one standard error.
    """

    mean: float
    error: float
    count: int

    @classmethod
    def of(cls, learned: Tensor, control: Tensor) -> "PairedGain":
        """Return the gain from the losses of all cases, `[cases]` each, in the same order."""
        gains = control.double() - learned.double()
        error = float(gains.std()) / math.sqrt(len(gains)) if len(gains) > 1 else math.inf
        return cls(float(gains.mean()), error, len(gains))

    @property
    def is_clear(self) -> bool:
        """Whether the gain is above one standard error."""
        return self.mean > self.error

    def __str__(self) -> str:
        return f"a gain of {self.mean:.3g} ± {self.error:.3g}"

    def to_json(self) -> dict[str, Any]:
        """Return the mean, the error and the count as JSON. An infinite error becomes None."""
        return asdict(self) | {"error": self.error if math.isfinite(self.error) else None}

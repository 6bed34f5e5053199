"""Networks and what is known about them, from which it is to be learned."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from regauge.core.params import Params, select
from regauge.core.symmetry import Symmetry
from regauge.learn.populations import Parts


@dataclass(frozen=True, eq=False)
class Known:
    """Networks, a class or an accuracy of each, and which of them are for what."""

    networks: Params
    values: NDArray[Any]
    symmetry: Symmetry
    parts: Parts

    def read(self, indices: NDArray[np.int64]) -> Params:
        """Some of the networks."""
        return select(self.networks, torch.from_numpy(indices))

    @property
    def fit(self) -> NDArray[np.int64]:
        """Networks for training and validation, which ways without validation are fitted to."""
        return np.concatenate([self.parts["train"], self.parts["validation"]])

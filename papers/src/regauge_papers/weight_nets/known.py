"""Networks with known properties, from which readers learn."""

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
    """Networks, each with a class or an accuracy, divided into parts."""

    networks: Params
    values: NDArray[Any]
    symmetry: Symmetry
    parts: Parts

    def read(self, indices: NDArray[np.int64]) -> Params:
        """Return some of the networks."""
        return select(self.networks, torch.from_numpy(indices))

    @property
    def fit(self) -> NDArray[np.int64]:
        """The indices for training and validation together, to which methods without validation are fitted."""
        return np.concatenate([self.parts["train"], self.parts["validation"]])

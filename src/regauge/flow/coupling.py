"""Couplings (pairings of start points with endpoints), which make the paths of a flow shorter and their
crossings rare.
"""

from dataclasses import dataclass

import torch
from scipy.optimize import linear_sum_assignment

from regauge.flow.alignment import move_near
from regauge.flow.manifold import Manifold, Points
from regauge.flow.moments import Moments
from regauge.flow.space import Space

PARTS = ("assignment", "alignment")


@dataclass(frozen=True)
class Coupling:
    """A rule that pairs start points (prior samples) with endpoints (networks) of a batch; by default, random pairs.

    Attributes:
        assignment: Whether the start points and endpoints of a batch are paired by optimal assignment, which minimizes
            the sum of squared distances. Coordinates are divided by their standard deviations.
        alignment: Whether an element of the symmetry brings each endpoint as close to its start point as weight
            matching can. With alignment, the flow does not have to learn random permutations of units.

    References:
        Pooladian et al. (2023) and Tong et al. (2024) for assignments in batches. In regauge, assignments are exact and
        without replacement.
    """

    assignment: bool = False
    alignment: bool = False

    @property
    def is_independent(self) -> bool:
        """Whether start points and endpoints are paired independently."""
        return not (self.assignment or self.alignment)

    @torch.no_grad()
    def pair(self, space: Manifold, x0: Points, x1: Points, moments: Moments) -> tuple[Points, Points]:
        """Return start points and endpoints, paired row by row."""
        if self.assignment:
            unit = moments.deviation.to(x0)
            unit[: space.flat_start] = 1.0
            cost = space.distance((x0 / unit).unsqueeze(1), (x1 / unit).unsqueeze(0)).square()
            rows, columns = linear_sum_assignment(cost.double().cpu().numpy())
            order = torch.empty(len(rows), dtype=torch.int64)
            order[torch.from_numpy(columns)] = torch.from_numpy(rows)
            x0 = x0[order.to(x0.device)]
        if self.alignment:
            assert isinstance(space, Space)
            x1 = move_near(space, x0, x1)
        return x0, x1

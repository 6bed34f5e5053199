"""One network that is brought close to another again and again, while the other moves."""

import torch
from torch import Tensor

from regauge.alignment.engine.climbs import make_ascent
from regauge.core import act as _act
from regauge.core.element import Element
from regauge.core.families import Tensors
from regauge.core.symmetry import Symmetry


class Pursuit:
    """An ascent of a single pair of which the first network moves.

    Every climb begins where the last one ended, from its potentials, and looks only at what the first network moved.
    The tensors are those that are compared, without a leading axis; `start` may be any element. `changed` names the
    tensors of the second network that the last climb moved.
    """

    def __init__(self, symmetry: Symmetry, a: Tensors, b: Tensors, start: Element, tolerance: float = 1e-9) -> None:
        self._symmetry, self._start = symmetry, start
        sites = {name: symmetry.sites[name] for name in b}
        placed = _act.act(symmetry.groups, sites, start, b, {name: t.ndim for name, t in b.items()})
        self._ascent = make_ascent(symmetry, _batch(a), _batch(placed), tolerance=tolerance)
        self.changed: set[str] = set()

    def aim_at(self, a: Tensors) -> None:
        """Move tensors of the first network; the names that `a` lacks stay as they are."""
        self._ascent.aim_at(_batch(a))

    def climb(self, max_sweeps: int) -> float:
        """Sweep until nothing moves; what that gains."""
        before, writes = float(self._ascent.gained), dict(self._ascent.networks.writes)
        self._ascent.climb(torch.arange(1), max_sweeps)
        moved = {name for name, count in self._ascent.networks.writes.items() if count != writes[name]}
        sites = self._ascent.networks.sites.items()
        self.changed = {name for name, local in sites if any(site.group.name in moved for site in local)}
        return float(self._ascent.gained) - before

    @property
    def element(self) -> Element:
        """What moves the second network from where it is given."""
        found = self._ascent.networks.element.fill(self._symmetry.identity((1,))).item(0)
        return self._symmetry.compose(found, self._start)

    @property
    def first(self) -> dict[str, Tensor]:
        """The first network as it was aimed at last."""
        return {name: tensor[0] for name, tensor in self._ascent.networks.a.items()}

    @property
    def second(self) -> dict[str, Tensor]:
        """The second network as it is now; later climbs may write into it."""
        return {name: tensor[0] for name, tensor in self._ascent.networks.second().items()}


def _batch(tensors: Tensors) -> dict[str, Tensor]:
    return {name: tensor.unsqueeze(0) for name, tensor in tensors.items()}

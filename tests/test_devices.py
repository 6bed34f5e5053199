"""Devices: while a batch climbs, nothing as large as a cost leaves its device, but for the assignment itself."""

import sys
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from symmetries import BY_HAND, drawn, mlp_symmetry
from torch import Tensor
from torch.overrides import TorchFunctionMode

from regauge.alignment.engine.climbs import make_ascent
from regauge.core.families import compared
from regauge.core.symmetry import Symmetry

LEAVING = (Tensor.cpu, Tensor.numpy, Tensor.tolist, Tensor.__array__)
SYMMETRIES = {
    **{kind: mlp_symmetry(4, 20, 20, 3, kind=kind) for kind in ("permutation", "signed", "dihedral")},
    "stream": BY_HAND["stream"],
    "recurrent": BY_HAND["recurrent"],
}


class Transfers(TorchFunctionMode):
    """Counts the entries of tensors that leave their device, outside of the assignment."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in LEAVING and not is_assigning():
            self.sizes.append(args[0].numel())
        return func(*args, **(kwargs or {}))


def is_assigning() -> bool:
    """Whether the module of assignments is among the callers."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_globals["__name__"] == "regauge.core.assignment":
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


@pytest.mark.parametrize("pairs", [1, 3])
@pytest.mark.parametrize("name", SYMMETRIES)
def test_only_the_assignment_takes_costs_from_their_device(name: str, pairs: int) -> None:
    """What else reaches the CPU is a few numbers for each unit: the values of elements, objectives."""
    symmetry: Symmetry = SYMMETRIES[name]
    drawings = [[drawn(symmetry, seed + k) for k in range(pairs)] for seed in (0, 10)]
    a, b = compared([{n: torch.stack([p[n] for p in many]) for n in many[0]} for many in drawings], symmetry)
    with Transfers() as transfers:
        ascent = make_ascent(symmetry, a, b)
        ascent.start_from_barycenter()
        ascent.climb(torch.arange(pairs), 100)
        ascent.objectives()
    units = max(group.size for group in symmetry.groups)
    assert transfers.sizes
    assert max(transfers.sizes) <= pairs * 2 * units < pairs * units**2

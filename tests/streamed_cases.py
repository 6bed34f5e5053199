"""Pairs of networks in files, which are matched from the disk and in memory."""

from dataclasses import dataclass
from pathlib import Path

import torch
from models import CASES, symmetry_of

import regauge as rg
from regauge.alignment.engine.frames import Scales, balances_of
from regauge.alignment.methods.weight_matching import random_isometry
from regauge.alignment.streamed.plan import Plan, make_plan
from regauge.checkpoints.checkpoint import Checkpoint
from regauge.checkpoints.writing import save
from regauge.core.params import Params
from regauge.core.symmetry import Symmetry

BY_NAME = {case.name: case for case in CASES}
UNLIMITED = 1 << 40


@dataclass(frozen=True)
class Pair:
    """Two networks in memory and on the disk."""

    symmetry: Symmetry
    params: tuple[Params, Params]
    files: tuple[Checkpoint, Checkpoint]

    def plan(self, memory: int, scales: Scales = "recompute") -> Plan:
        dtypes = {name: entry.dtype for name, entry in self.files[0].stored.items()}
        balances = balances_of(self.symmetry, scales, None)
        return make_plan(self.symmetry, [dtypes, dtypes], memory=memory, balances=balances)

    def smaller(self) -> Plan:
        """The first plan that does not hold everything in memory."""
        return self.plan(self.plan(UNLIMITED).peak - 1)


def pair_of(name: str, folder: Path, noise: float = 0.02, dtype: torch.dtype = torch.float64) -> Pair:
    """Return a network and a noisy copy that a hidden element has transformed. With infinite noise, the networks are
    unrelated.
    """
    case, generator = BY_NAME[name], torch.Generator().manual_seed(1)
    torch.manual_seed(0)
    module = case.module().eval()
    symmetry = symmetry_of(case)

    def noisy(params: Params, amount: float) -> Params:
        return {
            n: t + amount * torch.randn(t.shape, generator=generator, dtype=t.dtype)
            if t.is_floating_point() and n not in symmetry.buffers
            else t
            for n, t in params.items()
        }

    plain = {n: t.to(dtype) if t.is_floating_point() else t for n, t in module.state_dict().items()}
    a = noisy(plain, 0.1)
    symmetry = symmetry.bind(a)
    hidden = random_isometry(symmetry, generator)
    b = symmetry.act(symmetry.inverse(hidden), noisy(a, noise) if noise < 1 else noisy(plain, 0.1))
    for letter, params in (("a", a), ("b", b)):
        save(params, folder / f"{letter}.safetensors", overwrite=True)
    files = (Checkpoint.open(folder / "a.safetensors"), Checkpoint.open(folder / "b.safetensors"))
    return Pair(symmetry, (a, b), files)


def require_same(left: rg.Element, right: rg.Element) -> None:
    for name, value in left.items():
        for field in ("perm", "sign", "shift"):
            mine, theirs = getattr(value, field), getattr(right[name], field)
            assert (mine is None) == (theirs is None)
            assert mine is None or torch.equal(mine, theirs), (name, field)
        for field, tolerance in (("scale", 1e-6), ("matrix", 1e-4)):
            if getattr(value, field) is not None:
                torch.testing.assert_close(getattr(value, field), getattr(right[name], field), rtol=0, atol=tolerance)

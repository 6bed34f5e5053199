"""Every public method with settings, and networks to match."""

import torch
from symmetries import drawn, generator
from torch import nn

import regauge as rg
from regauge import Params, Symmetry


def two_students(seed: int, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Symmetry, Params, Params, rg.Task]:
    """Two networks that fit the same teacher, and the task that they share."""
    module = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 2)).to(dtype)
    symmetry = rg.discover(module, (torch.zeros(1, 3, dtype=dtype),), verify=False)
    a = drawn(symmetry, seed, dtype)
    moved = symmetry.act(symmetry.random(generator(seed), ("permutation", "sign", "linear")), a)
    b = {n: t + 0.2 * drawn(symmetry, seed + 1, dtype)[n] for n, t in moved.items()}
    inputs = torch.randn((40, 3), generator=generator(seed), dtype=torch.float64).to(dtype)
    targets = torch.func.functional_call(module, a, (inputs,)).detach()
    batches = list(zip(inputs.split(10), targets.split(10), strict=True))
    return module, symmetry, a, b, rg.Task(module, batches, nn.functional.mse_loss)

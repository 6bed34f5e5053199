"""Two Markov chains of a small network: R-hat and effective sample sizes of all entries, and modulo symmetry."""

import sys
import warnings
from pathlib import Path

import torch
from torch import nn

import regauge as rg

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of a library below it, about versions to come
    from posteriors.sgmcmc import baoa

folder = Path(sys.argv[1])
steps = 400 if "--quick" in sys.argv else 60_000
torch.manual_seed(0)
x = torch.linspace(-2, 2, 40, dtype=torch.float64)[:, None]
y = torch.sin(2 * x) + 0.1 * torch.randn(40, 1, dtype=torch.float64)
module = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)).double()
target = rg.bayes.log_posterior(module, rg.bayes.Normal(0.1), 1.0, len(x))
dynamics = baoa.build(target, lr=0.06, alpha=1.0, temperature=1 / len(x))


def sample(seed: int) -> rg.bayes.ParticlePosterior:
    torch.manual_seed(seed)
    state = dynamics.init({name: 0.5 * torch.randn_like(value) for name, value in module.named_parameters()})
    kept = []
    for step in range(steps):
        state, _ = dynamics.update(state, (x, y))
        if step >= steps / 2 and (step + 1) % (steps // 200) == 0:
            kept.append({name: value.detach().clone() for name, value in state.params.items()})
    return rg.bayes.from_samples(kept)


symmetry = rg.discover(module, (x,))
found = rg.bayes.diagnose([sample(0), sample(1)], symmetry, module=module, inputs=x)
found.plot().savefig(folder / "chains.png", dpi=150)

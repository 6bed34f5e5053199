"""R-hat and effective sample sizes of Markov chains: of parameters, of parameters up to symmetry, and of functions.

    OMP_NUM_THREADS=1 python examples/chain_diagnostics.py [FOLDER]

Each case has two chains of underdamped Langevin dynamics with separate starts (`posteriors.sgmcmc.baoa`, with all data
in every step). The cases are an MLP 1-8-1 with tanh on 40 points of a sine, and a CNN on the digits 0 to 3 of
scikit-learn. The example needs `pip install 'regauge[posteriors,chains]'`. The example prints the tables in
docs/measurements/bayes.md.
"""

import sys
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

import regauge as rg
from regauge.data import digits

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Of a library below it, about versions to come.
    import posteriors

BURN_IN, DRAWS = 0.5, 500
"""The share of the steps that is discarded at the beginning, and the number of networks that are sampled from the
remaining steps."""


def sample(
    module: nn.Module,
    likelihood: rg.bayes.Likelihood,
    batch: tuple[Tensor, Tensor],
    *,
    seed: int,
    steps: int,
    lr: float,
    prior_std: float,
) -> rg.bayes.ParticlePosterior:
    """Sample one chain from its own start."""
    torch.manual_seed(seed)
    count = len(batch[0])
    start = {name: 0.5 * prior_std * torch.randn_like(value) for name, value in module.named_parameters()}
    target = rg.bayes.log_posterior(module, likelihood, prior_std, count)
    transform = posteriors.sgmcmc.baoa.build(target, lr=lr, alpha=1.0, temperature=1 / count)
    state, kept = transform.init(start), []
    every = int((1 - BURN_IN) * steps) // DRAWS
    for step in range(steps):
        state, _ = transform.update(state, batch)
        if step >= steps - every * DRAWS and (step + 1) % every == 0:
            kept.append({name: value.detach().clone() for name, value in state.params.items()})
    return rg.bayes.from_samples(kept[-DRAWS:])


def mlp_case() -> tuple[nn.Module, rg.bayes.Likelihood, tuple[Tensor, Tensor], Tensor]:
    """Return a small MLP, its likelihood, its data, and inputs for predictions."""
    torch.manual_seed(0)
    inputs = torch.linspace(-2, 2, 40, dtype=torch.float64)[:, None]
    targets = torch.sin(2 * inputs) + 0.1 * torch.randn(40, 1, dtype=torch.float64)
    module = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    return module, rg.bayes.Normal(0.1), (inputs, targets), inputs


def cnn_case() -> tuple[nn.Module, rg.bayes.Likelihood, tuple[Tensor, Tensor], Tensor]:
    """Return a small CNN, its likelihood, its data, and inputs for predictions."""
    data = digits()
    few = data.train_labels < 4
    images, labels = data.train_images[few].double()[:200], data.train_labels[few][:200]
    first, second = nn.Conv2d(1, 4, 3, stride=2), nn.Conv2d(4, 6, 2)
    module = nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), nn.Flatten(), nn.Linear(24, 4)).double()
    test = data.test_images[data.test_labels < 4].double()[:50]
    return module, rg.bayes.Categorical(), (images, labels), test


CASES = {"mlp": (mlp_case, 60_000, 6e-2, 1.0), "cnn": (cnn_case, 40_000, 1.5e-1, 0.5)}
"""The case, the number of steps, the step size, and the standard deviation of the prior."""


def main() -> None:
    """Sample, diagnose and print the tables. If a folder is given, also draw the figures."""
    for name, (case, steps, lr, prior_std) in CASES.items():
        module, likelihood, batch, inputs = case()
        symmetry = rg.discover(module, (inputs[:4],))
        settings = {"steps": steps, "lr": lr, "prior_std": prior_std}
        chains = [sample(module, likelihood, batch, seed=seed, **settings) for seed in (0, 1)]  # type: ignore[arg-type]
        found = rg.bayes.diagnose(chains, symmetry, module=module, inputs=inputs)
        print(f"{name}:\n{found}\n", flush=True)
        if len(sys.argv) > 1:
            found.plot().savefig(Path(sys.argv[1]) / f"chains-{name}.png", dpi=120)


if __name__ == "__main__":
    main()

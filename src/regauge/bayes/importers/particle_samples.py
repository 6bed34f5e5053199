"""Posteriors that are samples: Markov chains, such as SGLD and SGHMC, and deep ensembles."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from regauge.bayes.importers.gaussians import detach
from regauge.bayes.posteriors.particles import ParticlePosterior
from regauge.core.params import require_finite, require_same_shapes
from regauge.storage.checkpoints.checkpoint import load


def from_samples(
    samples: Sequence[Mapping[str, Tensor] | str | Path] | Mapping[str, Tensor], *, buffers: Collection[str] = ()
) -> ParticlePosterior:
    """Equally likely samples.

    Args:
        samples: Networks, or the files that hold them, or one stack with a leading axis of samples on every tensor.
        buffers: Names that are no parameters, such as running statistics.

    Raises:
        FileNotFoundError: A file is not there.
        ValueError: There are no samples, they are of different architectures, one is not finite, or a buffer is named
            that they do not have.
    """
    if isinstance(samples, Mapping):
        stack = detach(samples)
        require_finite(stack, "the stack of samples")
    else:
        loaded = [load(sample) if isinstance(sample, str | Path) else dict(sample) for sample in samples]
        if not loaded:
            raise ValueError("there are no samples; give at least one")
        for k, sample in enumerate(loaded):
            require_same_shapes(loaded[0], sample)
            require_finite(sample, f"sample {k}")
        stack = {name: torch.stack([sample[name].detach() for sample in loaded]) for name in loaded[0]}
    unknown = sorted(set(buffers) - stack.keys())
    if unknown:
        raise ValueError(f"the samples have no buffers {unknown[:4]}; their names are {list(stack)[:6]}, ...")
    return ParticlePosterior(stack, tuple(name for name in stack if name in buffers))


def from_ensemble(modules: Sequence[nn.Module]) -> ParticlePosterior:
    """A deep ensemble: its members are equally likely, each with its own buffers.

    Members trained apart lie in different copies of the same basin: align them before moments of the posterior are
    used.

    Raises:
        ValueError: There are no members, they are of different architectures, or one is not finite.

    References:
        Lakshminarayanan et al. (2017), Simple and scalable predictive uncertainty estimation using deep ensembles.
    """
    states = [module.state_dict() for module in modules]
    learned = dict(modules[0].named_parameters(remove_duplicate=False)) if modules else {}
    return from_samples(states, buffers=[name for name in states[0] if name not in learned] if states else ())

"""The default source of random numbers for calls without a generator."""

import torch


def given_or_seed(generator: torch.Generator | None) -> torch.Generator:
    """Return the given generator, or one with seed 0 if none is given so that a call always has the same result."""
    return torch.Generator().manual_seed(0) if generator is None else generator

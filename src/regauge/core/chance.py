"""The source of random numbers of a call that was given none."""

import torch


def given_or_seed(generator: torch.Generator | None) -> torch.Generator:
    """Return the generator, or one with seed 0 where none is given, so that a call has the same outcome every time."""
    return torch.Generator().manual_seed(0) if generator is None else generator

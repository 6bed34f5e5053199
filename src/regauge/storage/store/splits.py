"""Splits by trajectory: all checkpoints of one training run fall on the same side."""

import hashlib
import math
from collections.abc import Mapping

import numpy as np

from regauge.storage.store.columns import Array
from regauge.storage.store.rows import Indices

STANDARD = {"train": 0.8, "validation": 0.1, "test": 0.1}


def uniform(ids: Array, salt: str) -> Array:
    """A number in [0, 1) for each trajectory, a fixed function of its id and the salt.

    The mixing function of SplitMix64, applied to the id plus a hash of the salt.

    References:
        Steele, Lea and Flood (2014), Fast splittable pseudorandom number generators, figure 17.
    """
    offset = int.from_bytes(hashlib.blake2b(salt.encode(), digest_size=8).digest(), "little")
    with np.errstate(over="ignore"):
        x = ids.astype(np.int64).view(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(offset)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = x ^ (x >> np.uint64(31))
    result: Array = (x >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return result


def split(ids: Array, fractions: Mapping[str, float] | None = None, *, salt: str = "") -> dict[str, Indices]:
    """Numbers of the rows of each part.

    A trajectory keeps its part when others are added, and in every subset of the rows.

    Args:
        ids: Trajectory of each row, `[rows]`.
        fractions: Expected shares by name, which add up to one; 80, 10 and 10% for training, validation and test
            unless given.
        salt: Another salt gives another split.

    Raises:
        ValueError: The fractions are negative or do not add up to one.
    """
    fractions = STANDARD if fractions is None else fractions
    shares = list(fractions.values())
    if not shares or min(shares) < 0 or not math.isclose(sum(shares), 1.0, abs_tol=1e-9):
        raise ValueError(f"the fractions {dict(fractions)} must not be negative and must add up to one")
    bounds = np.cumsum(shares)[:-1]
    part = np.searchsorted(bounds, uniform(ids, salt), side="right")
    return {name: np.flatnonzero(part == k) for k, name in enumerate(fractions)}

"""Fingerprints of all networks in a store: 256 numbers per network, for finding copies and related networks."""

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float32
from numpy.typing import NDArray
from torch import Tensor

from regauge.checkpoints.checkpoint import Checkpoint
from regauge.checkpoints.formats.state_dicts import match
from regauge.comparison.fingerprints import SIZE, fingerprint
from regauge.core.progress import Progress, no_progress
from regauge.storage import Store, cache
from regauge.storage.store.shard_file import Shard

KIND = "fingerprints"
"""The name under which the user's cache stores fingerprints."""
VERSION = 3
"""The version of the fingerprints. Fingerprints with earlier versions are computed again."""
FINGERPRINTED_BYTES = 1 << 25
"""The size in bytes of the networks that are processed at once."""


@dataclass(frozen=True)
class Fingerprints:
    """The fingerprints of all networks in a store.

    Attributes:
        store: The store.
        numbers: The fingerprints in the order of the networks' indices. Fingerprints are NaN for networks with NaN or
            Inf.
    """

    store: Store
    numbers: Float32[Tensor, "networks numbers"]

    @classmethod
    def of(cls, store: Store, *, progress: Progress = no_progress) -> "Fingerprints":
        """Return the fingerprints of all networks. The user's cache stores the fingerprints of each shard.

        Raises:
            ValueError: The symmetry of the store is not known.
        """
        store.require_symmetry()
        advance, start, found = progress("fingerprints", len(store)), 0, [np.zeros((0, SIZE), np.float32)]
        for shard in store.shards:
            origin = [store.key, shard.path.name, shard.checksum, VERSION]
            known = cache.recall(KIND, origin)
            if known is None:
                numbers = _measure(store, shard, start)
                cache.keep(KIND, origin, base64.b64encode(numbers.tobytes()).decode())
            else:
                numbers = np.frombuffer(base64.b64decode(known), np.float32).reshape(shard.count, SIZE)
            found.append(numbers)
            start += shard.count
            advance(shard.count)
        return cls(store, torch.from_numpy(np.concatenate(found)))

    def nearest(self, params: Mapping[str, Tensor], count: int = 10) -> list[tuple[int, float]]:
        """Return the networks whose fingerprints are nearest to a given network's fingerprint, and the distances.

        The Euclidean distance between fingerprints is zero if one network is a copy of the other in any gauge. The
        distance between fingerprints of similar networks is below the relative change of the parameters.

        Args:
            params: A network with the store's architecture.
            count: The number of networks to return.

        Raises:
            KeyError: A parameter is missing.
            ValueError: Parameters do not fit the architecture, or contain NaN or Inf.
        """
        own = fingerprint(params, self.store.require_symmetry())
        distances = (self.numbers - own.float()).norm(dim=1).nan_to_num(torch.inf)
        least = distances.topk(min(count, len(distances)), largest=False)
        rows = zip(least.indices.tolist(), least.values.tolist(), strict=True)
        return [(number, distance) for number, distance in rows if distance < torch.inf]

    def find_nearest(self, path: str | Path, count: int = 10) -> list[dict[str, Any]]:
        """Return a table of the networks nearest to the checkpoint at a path: index, id, step and distance.

        Raises:
            ValueError: `count` is less than 1, or the tensors of the checkpoint differ from the tensors of the store's
                networks.
        """
        if count < 1:
            raise ValueError(f"`count={count}`: it is at least 1")
        with Checkpoint.open(Path(path)) as checkpoint:
            params = match(checkpoint.params, self.store.architecture.on_meta(), checkpoint.label, "the store")
        return [
            {"number": number, **{key: self.store.rows[key][number].item() for key in ("id", "step")}, "distance": far}
            for number, far in self.nearest(params, count)
        ]


def _measure(store: Store, shard: Shard, start: int) -> NDArray[np.float32]:
    """Return the fingerprints of a shard whose first network has the index `start`."""
    result = np.full((shard.count, SIZE), np.nan, np.float32)
    fine = np.flatnonzero(store.rows["is_finite"][start : start + shard.count])
    block = max(1, FINGERPRINTED_BYTES // (8 * store.architecture.size))
    for first in range(0, len(fine), block):
        rows = fine[first : first + block]
        params = store.read(start + rows)
        result[rows] = fingerprint(params, store.require_symmetry()).numpy()
    return result

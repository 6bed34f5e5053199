"""Statistics for standardizing populations: one mean and one standard deviation for each tensor."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from regauge.core.params import Params
from regauge.storage import cache
from regauge.storage.collection import Collection, Networks
from regauge.storage.store.store import Store

KIND = "statistics"
"""The name under which the user's cache stores statistics."""
BLOCK_BYTES = 64 * 2**20
"""The size in bytes of each block of networks that is read."""


@dataclass(frozen=True)
class Statistics:
    """Mean and standard deviation of each tensor's entries, over all networks and positions.

    All positions of a tensor share one mean and one deviation, because permutations exchange the positions. If signs of
    weights are flipped randomly, a nonzero mean is meaningless. For random signs, compute the statistics with
    `is_centered=False`.

    Attributes:
        mean: The mean by tensor name, for floating-point tensors.
        std: The standard deviation by tensor name; one if all entries are equal.
    """

    mean: Mapping[str, float]
    std: Mapping[str, float]

    @classmethod
    def of(
        cls,
        networks: Networks | Sequence[Networks] | Collection,
        indices: Sequence[int] | NDArray[Any] | None = None,
        *,
        is_centered: bool = True,
    ) -> "Statistics":
        """Return the statistics of networks in float64. A store is read in blocks.

        Statistics of a store are stored in the user's cache. The key consists of the store's key and the indices of the
        networks. Stored statistics stay valid because shards never change.

        Args:
            networks: A store or a population, or a list of stores and populations with one layout.
            indices: Indices of the networks to read; by default, all networks.
            is_centered: Whether means are subtracted. Without subtraction, means are zero, and deviations are root mean
                squares.

        Raises:
            ValueError: There are no networks, the networks have several layouts, or an entry is not finite.
        """
        collection = Collection(networks)
        chosen = collection.resolve(indices)
        if not len(chosen):
            raise ValueError("statistics need at least one network; give more")
        is_stored = len(collection.stores) == len(collection.members)
        origin = _origin(collection.stores, chosen, is_centered=is_centered) if is_stored else None
        known = None if origin is None else cache.recall(KIND, origin)
        if known is not None:
            return cls(**json.loads(known))
        one = collection.read(chosen[:1])
        block = max(1, BLOCK_BYTES // max(1, sum(tensor.nbytes for tensor in one.values())))
        total = {name: np.zeros(3) for name, tensor in one.items() if tensor.is_floating_point()}
        for start in range(0, len(chosen), block):
            params = collection.read(chosen[start : start + block])
            for name in total:
                total[name] = _join(total[name], params[name].double())
        mean = {name: float(sums[1]) if is_centered else 0.0 for name, sums in total.items()}
        std = {}
        for name, (count, center, square) in total.items():
            variance = square / count + (0.0 if is_centered else center**2) if count else 1.0
            if not np.isfinite(variance):
                raise ValueError(f"{name!r} has values that are NaN or Inf; leave out the networks that are not finite")
            std[name] = float(variance**0.5) or 1.0
        found = cls(mean, std)
        if origin is not None:
            cache.keep(KIND, origin, json.dumps(asdict(found)))
        return found

    def standardize(self, params: Mapping[str, Tensor]) -> Params:
        """Subtract each tensor's mean from its entries, and divide the differences by the standard deviation."""
        return {n: (t - self.mean[n]) / self.std[n] if n in self.std else t for n, t in params.items()}

    def restore(self, params: Mapping[str, Tensor]) -> Params:
        """Return the inverse of `standardize`."""
        return {n: t * self.std[n] + self.mean[n] if n in self.std else t for n, t in params.items()}


def _origin(stores: Sequence[Store], chosen: NDArray[np.int64], *, is_centered: bool) -> list[Any]:
    """Return everything that determines the statistics of some networks in stores, as a key for the cache."""
    shards = [[[shard.path.name, shard.checksum] for shard in store.shards] for store in stores]
    digest = blake2b(json.dumps(shards).encode())
    digest.update(np.ascontiguousarray(chosen).data)
    return [*(store.key for store in stores), digest.hexdigest(), is_centered]


def _join(sums: NDArray[np.float64], values: Tensor) -> NDArray[np.float64]:
    """Update count, mean and sum of squared deviations by further values (Chan et al., 1983)."""
    if not values.numel():
        return sums
    mean = float(values.mean())
    more = np.array([values.numel(), mean, float((values - mean).square().sum())])
    count, gap = sums[0] + more[0], more[1] - sums[1]
    return np.array([count, sums[1] + gap * more[0] / count, sums[2] + more[2] + gap**2 * sums[0] * more[0] / count])

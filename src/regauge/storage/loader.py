"""Networks in shuffled batches: what networks that read networks are trained on."""

import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from regauge.core.element import FIELD_OF_PART, Element, Value, require_parts
from regauge.core.params import Params, count_models, select
from regauge.core.random_moves import RandomMoves
from regauge.core.symmetry import Symmetry
from regauge.storage import cache
from regauge.storage.store import Store
from regauge.storage.store.listing import resolve

Networks = Store | Mapping[str, Tensor]
"""A store, which is read batch by batch, or a population in memory: parameters with a leading model axis."""
MOVED_AT_ONCE = 1 << 22
"""Values of a batch up to which all are moved by one gather; larger tensors are moved axis by axis."""
KIND = "statistics"
"""Of entries of the user's cache."""
BLOCK_BYTES = 64 * 2**20
"""Bytes of the blocks in which networks are read for statistics."""


class Batch(NamedTuple):
    """Some networks of an epoch: their numbers in the store or the population, `[networks]`, and stacked parameters.

    What is known about them is in the rows of the store, such as `store.rows["loss"][batch.indices]`.
    """

    indices: NDArray[np.int64]
    params: Params


class Loader(IterableDataset[Batch]):
    """Batches of networks in random order, each network once in every epoch.

        loader = Loader(store, batch=64, augment=("permutation", "sign"), generator=torch.Generator().manual_seed(0))
        for epoch in range(10):
            for batch in loader:
                train_on(batch.params, store.rows["accuracy"][batch.indices])

    An iteration gives the rest of the present epoch; the next one gives the next epoch, and `stream()` never ends. What
    batch k of epoch e holds follows from the generator, e and k alone. So two loaders with equal generators give equal
    batches; a loader that is given the state of another one continues it (`state_dict`, `load_state_dict`); and workers
    that take one share each (`rank`, `world`) give together what a single loader gives.

    It is a data set of torch, too: the workers of `torch.utils.data.DataLoader(loader, batch_size=None, num_workers=n)`
    share the batches of an epoch, none twice. They work on copies, so that `set_epoch` says which epoch comes next
    (unless they are persistent), and the numbers of the networks arrive as tensors.

    Args:
        networks: A store, or parameters with a leading model axis. A store keeps the networks that it lists now.
        batch: Networks of a batch; the last batch of an epoch may have fewer.
        indices: Numbers of the networks to take, such as `store.split()["train"]`, or a mask; all unless given.
        augment: Parts of the random element that moves each network, anew in every batch: some of "permutation",
            "sign", "scale", "shift" and "linear". The networks still compute the same functions.
        symmetry: The symmetry of the architecture, for `augment`; that of the store unless given.
        statistics: Statistics by which the networks are standardized after they were moved; see `Statistics.of`.
        is_last_dropped: Whether a last batch with fewer networks is left out.
        rank: Which share of the batches this loader gives: those whose number is `rank` modulo `world`.
        world: Number of loaders that share the batches.
        prefetch: Batches that a thread prepares meanwhile; none unless given.
        generator: The source of chance, from which one number is drawn.

    Raises:
        IndexError: There is no network of some number.
        ValueError: There are no networks, a number makes no sense, a part is unknown, or the symmetry is not known.
    """

    def __init__(
        self,
        networks: Networks,
        *,
        generator: torch.Generator,
        batch: int = 64,
        indices: Sequence[int] | NDArray[Any] | None = None,
        augment: Sequence[str] = (),
        symmetry: Symmetry | None = None,
        statistics: "Statistics | None" = None,
        is_last_dropped: bool = False,
        rank: int = 0,
        world: int = 1,
        prefetch: int = 0,
    ) -> None:
        self.networks = networks
        self.indices = _resolve(networks, indices)
        self.batch, self.is_last_dropped = batch, is_last_dropped
        self.rank, self.world, self.prefetch = rank, world, prefetch
        self.augment, self.statistics = tuple(augment), statistics
        self.symmetry = networks.symmetry if symmetry is None and isinstance(networks, Store) else symmetry
        self.seed = int(torch.randint(1 << 62, (), generator=generator, device=generator.device))
        self.epoch, self.number = 0, 0
        self._moves: RandomMoves | None = None
        require_parts(self.augment)
        if self.augment and self.symmetry is None:
            raise ValueError("random elements need the symmetry of the networks; give `symmetry`, or no `augment`")
        if batch < 1 or prefetch < 0 or not 0 <= rank < world:
            raise ValueError(
                f"batch={batch}, rank={rank}, world={world}, prefetch={prefetch}: a batch has networks, ranks count "
                "from 0, and no fewer than 0 batches are prepared"
            )
        if not len(self.indices) or (is_last_dropped and len(self.indices) < batch):
            raise ValueError(f"{len(self.indices)} networks make no batch of {batch}; take more networks")

    def __len__(self) -> int:
        """Number of batches of an epoch, those of all shares."""
        full, rest = divmod(len(self.indices), self.batch)
        return full + (rest > 0 and not self.is_last_dropped)

    def __iter__(self) -> Iterator[Batch]:
        """The batches of the present epoch that are left."""
        worker, order = get_worker_info(), self._order()
        rank, world = (
            (self.rank, self.world)
            if worker is None
            else (self.rank * worker.num_workers + worker.id, self.world * worker.num_workers)
        )
        for number, batch in self._prepare([k for k in range(self.number, len(self)) if k % world == rank], order):
            self.number = number + 1  # before the batch is given, so that a state that is saved then does not repeat it
            yield batch
        self.epoch, self.number = self.epoch + 1, 0

    def stream(self) -> Iterator[Batch]:
        """Batches of this epoch, the next one, and so on without end."""
        while True:
            yield from self

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch from its first batch, as copies in the workers of a `DataLoader` need to be told."""
        self.epoch, self.number = epoch, 0

    def state_dict(self) -> dict[str, Any]:
        """Where the loader is, as plain JSON: what `load_state_dict` continues from."""
        over, number = divmod(self.number, len(self))  # behind the last batch the next epoch begins
        return {"seed": self.seed, "epoch": self.epoch + over, "number": number, "networks": self._digest()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where another loader of the same networks and settings was.

        Raises:
            ValueError: The other one had other networks or batches of another size.
        """
        if state["networks"] != self._digest():
            raise ValueError(
                "the state is of a loader of other networks or of batches of another size, so the rest of its epoch is "
                "not known here; give the same networks, indices and batch"
            )
        self.seed, self.epoch, self.number = state["seed"], state["epoch"], state["number"]

    def _order(self) -> NDArray[np.int64]:
        """The networks in the order of the present epoch."""
        order: NDArray[np.int64] = torch.randperm(len(self.indices), generator=self._chance("order")).numpy()
        return np.take(self.indices, order)

    def _prepare(self, numbers: Sequence[int], order: NDArray[np.int64]) -> Iterator[tuple[int, Batch]]:
        """Batches by their numbers; a thread prepares the next ones, if that is wanted."""
        if not self.prefetch:
            for number in numbers:
                yield number, self._load(number, order)
            return
        waiting: deque[tuple[int, Future[Batch]]] = deque()
        remaining = iter(numbers)
        with ThreadPoolExecutor(1) as thread:
            try:
                for number in remaining:
                    waiting.append((number, thread.submit(self._load, number, order)))
                    if len(waiting) > self.prefetch:
                        first, made = waiting.popleft()
                        yield first, made.result()
                while waiting:
                    first, made = waiting.popleft()
                    yield first, made.result()
            finally:
                thread.shutdown(cancel_futures=True)

    def _load(self, number: int, order: NDArray[np.int64]) -> Batch:
        indices = order[number * self.batch : (number + 1) * self.batch]
        params = _read(self.networks, indices)
        if self.augment and self.symmetry is not None:
            params = self._move(params, self._chance(number), len(indices))
        return Batch(indices, params if self.statistics is None else self.statistics.standardize(params))

    def _move(self, params: Params, chance: torch.Generator, count: int) -> Params:
        """Move each network by a random element."""
        assert self.symmetry is not None
        symmetry = self.symmetry.bind(params)
        has_matrices = "linear" in self.augment and any(group.matrix != "none" for group in symmetry.groups)
        if not has_matrices and count * sum(params[name][0].numel() for name in symmetry.sites) <= MOVED_AT_ONCE:
            if self._moves is None or self._moves.symmetry is not symmetry:
                self._moves = RandomMoves(symmetry, self.augment)
            return self._moves(params, chance)
        element = symmetry.random(chance, self.augment, (count,))
        # Fields that are the identity are left out, which halves the work of permutations alone.
        fields = [FIELD_OF_PART[part] for part in self.augment]
        drawn = {name: Value(**{f: t for f, t in v.items() if f in fields}) for name, v in element.items()}
        return symmetry.act(Element(drawn, element.batch), params)

    def _chance(self, purpose: object) -> torch.Generator:
        """A generator of its own for each purpose in each epoch."""
        digest = blake2b(f"{self.seed} {self.epoch} {purpose}".encode(), digest_size=7).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest, "big"))

    def _digest(self) -> str:
        key = self.networks.key if isinstance(self.networks, Store) else ""
        digest = blake2b(f"{key} {self.batch} {self.is_last_dropped}".encode(), digest_size=16)
        digest.update(np.ascontiguousarray(self.indices).data)
        return digest.hexdigest()


@dataclass(frozen=True)
class Statistics:
    """Mean and standard deviation of the values of each tensor, over all networks and positions.

    One number for a tensor rather than one for each of its values, because a permutation exchanges the positions. Where
    signs are flipped at random, a mean other than zero has no meaning: take the statistics with
    `is_centered=False`.

    Attributes:
        mean: By the name of the tensor; floating-point tensors only.
        std: The same; one where all values are equal.
    """

    mean: Mapping[str, float]
    std: Mapping[str, float]

    @classmethod
    def of(
        cls, networks: Networks, indices: Sequence[int] | NDArray[Any] | None = None, *, is_centered: bool = True
    ) -> "Statistics":
        """The statistics of networks, in float64; a store is read in blocks.

        Those of a store are kept in the user's cache, for the store's key and the networks that are taken: shards never
        change.

        Args:
            networks: As for `Loader`.
            indices: Numbers of the networks to take; all unless given.
            is_centered: Whether means are subtracted; else they are zero, and deviations are root mean squares.

        Raises:
            ValueError: There are no networks, or a value is not finite.
        """
        chosen = _resolve(networks, indices)
        if not len(chosen):
            raise ValueError("no networks have no statistics; take more")
        origin = _origin(networks, chosen, is_centered=is_centered) if isinstance(networks, Store) else None
        known = None if origin is None else cache.recall(KIND, origin)
        if known is not None:
            return cls(**json.loads(known))
        one = _read(networks, chosen[:1])
        block = max(1, BLOCK_BYTES // max(1, sum(tensor.nbytes for tensor in one.values())))
        total = {name: np.zeros(3) for name, tensor in one.items() if tensor.is_floating_point()}
        for start in range(0, len(chosen), block):
            params = _read(networks, chosen[start : start + block])
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
        """Values less their mean, divided by their deviation."""
        return {n: (t - self.mean[n]) / self.std[n] if n in self.std else t for n, t in params.items()}

    def restore(self, params: Mapping[str, Tensor]) -> Params:
        """The opposite of `standardize`."""
        return {n: t * self.std[n] + self.mean[n] if n in self.std else t for n, t in params.items()}


def _origin(store: Store, chosen: NDArray[np.int64], *, is_centered: bool) -> list[Any]:
    """What the statistics of some networks of a store follow from, whatever was appended since."""
    digest = blake2b(json.dumps([[shard.path.name, shard.checksum] for shard in store.shards]).encode())
    digest.update(np.ascontiguousarray(chosen).data)
    return [store.key, digest.hexdigest(), is_centered]


def _join(sums: NDArray[np.float64], values: Tensor) -> NDArray[np.float64]:
    """Number, mean and sum of squared deviations of some values and more values (Chan et al., 1983)."""
    if not values.numel():
        return sums
    mean = float(values.mean())
    more = np.array([values.numel(), mean, float((values - mean).square().sum())])
    count, gap = sums[0] + more[0], more[1] - sums[1]
    return np.array([count, sums[1] + gap * more[0] / count, sums[2] + more[2] + gap**2 * sums[0] * more[0] / count])


def _resolve(networks: Networks, indices: Sequence[int] | NDArray[Any] | None) -> NDArray[np.int64]:
    chosen = slice(None) if indices is None else indices
    if isinstance(networks, Store):
        return resolve(chosen, len(networks))
    return resolve(chosen, count_models(networks), "the population")


def _read(networks: Networks, indices: NDArray[np.int64]) -> Params:
    return networks.read(indices) if isinstance(networks, Store) else select(networks, torch.from_numpy(indices))

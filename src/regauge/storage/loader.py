"""A loader of shuffled batches of networks, for training metanetworks."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, get_worker_info

from regauge.core.element import FIELD_OF_PART, ROTATION, TRANSLATION, Element, Value, require_parts
from regauge.core.given import given_or_seed
from regauge.core.moving.moved_values import LARGEST_PLACE
from regauge.core.moving.random_draws import Source
from regauge.core.moving.random_moves import RandomMoves
from regauge.core.params import Params, select
from regauge.core.symmetry import Symmetry
from regauge.storage.collection import Collection, Networks, tensors_of
from regauge.storage.statistics import Statistics
from regauge.storage.store.rows import Indices

LOADED_VALUES_AT_ONCE = 1 << 20
"""The number of entries that are read and transformed at once. Reading many small networks at once saves most of the
time."""
SHARING = 8
"""The largest number of batches that share random elements. Element k then transforms network k of each batch."""
FEWEST = 8
"""The smallest batch size for sharing, divided by the number of batches that share elements."""


class Batch(NamedTuple):
    """A batch of networks of one layout.

    Attributes:
        indices: The indices of the networks, `[networks]`, in the store or population. If there are several stores or
            populations, the indices run consecutively through all stores and populations.
        params: The stacked parameters of the networks.
        layout: The index of the layout; see `Collection`.
        state: The position of the loader after the batch, which `load_state_dict` accepts.
    """

    indices: NDArray[np.int64]
    params: Params
    layout: int
    state: Mapping[str, Any]


class Loader(IterableDataset[Batch]):
    """Batches of networks in random order. Every epoch contains each network once.

        loader = Loader(store, batch=64, augment=("permutation", "sign"), generator=torch.Generator().manual_seed(0))
        for epoch in range(10):
            for batch in loader:
                train_on(batch.params, store.rows["accuracy"][batch.indices])

    The loader also reads several stores, of one or several architectures. Each batch has networks of one layout, so no
    padding is needed. Batches of all layouts come in random order. `collection.locate(batch.indices)` returns the store
    of each network and the network's index in this store.

    An iteration yields the remaining batches of the current epoch, and the next iteration yields the next epoch.
    `stream()` never ends. Batch k of epoch e depends only on the generator, e and k. Two loaders with equal generators
    therefore yield equal batches. A loader that loads the state of another loader continues at the position of the
    other loader (`state_dict`, `batch.state`, `load_state_dict`). Several processes can share the batches, if each
    process makes an equal loader with another `rank`.

    The loader is also a torch data set. The workers of `torch.utils.data.DataLoader(loader, batch_size=None,
    num_workers=n)` share the batches, in the same order as without workers. The workers use copies of the loader.
    Therefore call `set_epoch` before each epoch, unless the workers are persistent. `batch.state` contains the workers'
    position. The network indices are returned as tensors.

    Args:
        networks: A store, or parameters with a leading model axis, or a list of stores and populations. Networks that
            are later added to a store are not read.
        batch: The batch size. For each layout, the last batch of an epoch may be smaller.
        indices: Indices of the networks to read, such as `store.split()["train"]`, or a mask; by default, all networks.
        augment: Parts of the symmetry from which random elements are sampled: some of "permutation", "sign", "scale",
            "shift", "linear", "translation" and "rotation". The elements transform the networks without changing their
            functions. The elements within a batch are independent. If batches are large and networks are small, up to 8
            consecutive batches share their elements, because sampling elements costs as much as transforming several
            batches.
        symmetry: The symmetry of the networks, or a list with one symmetry per store and population, for `augment`.
            Default: the symmetries of the stores.
        statistics: Statistics for each layout, which standardize the networks after the transformation; see
            `Statistics.of`.
        is_last_dropped: Whether the last batch of an epoch is skipped if it is smaller than `batch`.
        rank: The index of this process. Process `rank` reads the batches whose index is `rank` modulo `world`.
        world: The number of processes that share the batches.
        prefetch: The number of batches that a thread prepares in advance. By default, batches are not prepared in
            advance.
        generator: The source of randomness, from which one number is sampled.

    Raises:
        IndexError: An index is out of range.
        ValueError: There are no networks, an argument is invalid, a part is unknown, or a symmetry is not known.
    """

    def __init__(
        self,
        networks: Networks | Sequence[Networks] | Collection,
        *,
        generator: torch.Generator | None = None,
        batch: int = 64,
        indices: Sequence[int] | NDArray[Any] | None = None,
        augment: Sequence[str] = (),
        symmetry: Symmetry | Sequence[Symmetry | None] | None = None,
        statistics: Statistics | Sequence[Statistics] | None = None,
        is_last_dropped: bool = False,
        rank: int = 0,
        world: int = 1,
        prefetch: int = 0,
    ) -> None:
        generator = given_or_seed(generator)
        self.collection = Collection(networks, symmetry)
        self.indices = self.collection.resolve(indices)
        self.batch, self.is_last_dropped = batch, is_last_dropped
        self.rank, self.world, self.prefetch = rank, world, prefetch
        self.augment = tuple(augment)
        self.statistics = (statistics,) if isinstance(statistics, Statistics) else tuple(statistics or ())
        self.seed = int(torch.randint(1 << 62, (), generator=generator, device=generator.device))
        self.epoch, self.number = 0, 0
        self._moves: dict[int, RandomMoves | Symmetry] = {}
        require_parts(self.augment)
        layouts = self.collection.layout_of(self.indices)
        self._by_layout = {int(k): self.indices[layouts == k] for k in np.unique(layouts)}
        if self.augment and any(self.collection.symmetries[self.collection.first(k)] is None for k in self._by_layout):
            raise ValueError("random elements need the symmetry of the networks; give `symmetry`, or no `augment`")
        if self.statistics and len(self.statistics) <= max(self._by_layout, default=0):
            raise ValueError(
                f"there are statistics for {len(self.statistics)} layouts, but networks of {len(self._by_layout)}; "
                "give one `Statistics.of(...)` for each, in the order of the stores"
            )
        if batch < 1 or prefetch < 0 or not 0 <= rank < world:
            raise ValueError(
                f"batch={batch}, rank={rank}, world={world}, prefetch={prefetch}: a batch has networks, ranks count "
                "from 0, and no fewer than 0 batches are prepared"
            )
        if not len(self):
            raise ValueError(f"{len(self.indices)} networks are fewer than a batch of {batch}; give more networks")
        digest = blake2b(f"{self.collection.key} {batch} {is_last_dropped}".encode(), digest_size=16)
        digest.update(np.ascontiguousarray(self.indices).data)
        self._digest = digest.hexdigest()

    def __len__(self) -> int:
        """Return the number of batches in an epoch, over all processes together."""
        return sum(self._count_batches(len(own)) for own in self._by_layout.values())

    def __iter__(self) -> Iterator[Batch]:
        """Yield the remaining batches of the current epoch."""
        for batch in self._prepare(self._share()):
            # Set before the batch is returned, so that a state saved afterwards does not repeat the batch.
            self.number = batch.state["number"] or len(self)
            yield batch
        self.epoch, self.number = self.epoch + 1, 0

    def stream(self) -> Iterator[Batch]:
        """Yield the batches of the current epoch and of all later epochs, endlessly."""
        while True:
            yield from self

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch at its first batch. Call this method before each epoch if a `DataLoader` has workers."""
        self.epoch, self.number = epoch, 0

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the loader as JSON, from which `load_state_dict` continues."""
        return self._state_at(self.number)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the position of another loader with the same networks and settings.

        Raises:
            ValueError: The other loader has different networks or a different batch size.
        """
        if state["networks"] != self._digest:
            raise ValueError(
                "the state belongs to a loader with other networks or another batch size; give the same networks, "
                "indices and batch"
            )
        seed, epoch, number = (int(state[name]) for name in ("seed", "epoch", "number"))
        if epoch < 0 or not 0 <= number <= len(self):
            raise ValueError(
                f"the state belongs to batch {number} of epoch {epoch}, but an epoch has {len(self)} batches; give a "
                "state of this loader"
            )
        self.seed, self.epoch, self.number = seed, epoch, number

    def _share(self) -> list[int]:
        """Return the indices of the batches that this process, or this worker of a `DataLoader`, yields."""
        mine = [number for number in range(self.number, len(self)) if number % self.world == self.rank]
        worker = get_worker_info()
        return mine if worker is None else mine[worker.id :: worker.num_workers]

    def _count_batches(self, networks: int) -> int:
        full, rest = divmod(networks, self.batch)
        return full + (rest > 0 and not self.is_last_dropped)

    def _plan(self) -> list[tuple[int, Indices]]:
        """Return the layout and the networks of each batch of the current epoch."""
        plan = []
        for layout, own in self._by_layout.items():
            order = torch.randperm(len(own), generator=self._chance("order")).numpy()
            starts = [k * self.batch for k in range(self._count_batches(len(own)))]
            plan += [(layout, own[order[start : start + self.batch]]) for start in starts]
        if len(self._by_layout) > 1:
            plan = [plan[k] for k in torch.randperm(len(plan), generator=self._chance("layouts")).tolist()]
        return plan

    def _prepare(self, numbers: Sequence[int]) -> Iterator[Batch]:
        """Yield batches by their indices. If `prefetch` is set, a thread prepares the next batches."""
        plan = self._plan()
        blocks = self._blocks(numbers, plan)
        if not self.prefetch:
            for block in blocks:
                yield from self._load(block, plan)
            return
        waiting: deque[tuple[int, Future[list[Batch]]]] = deque()
        with ThreadPoolExecutor(1) as thread:
            try:
                for block in blocks:
                    waiting.append((len(block), thread.submit(self._load, block, plan)))
                    while sum(size for size, _ in waiting) > self.prefetch:
                        yield from waiting.popleft()[1].result()
                while waiting:
                    yield from waiting.popleft()[1].result()
            finally:
                thread.shutdown(cancel_futures=True)

    def _blocks(self, numbers: Sequence[int], plan: Sequence[tuple[int, Indices]]) -> Iterator[list[int]]:
        """Yield groups of consecutive batches that are read together."""
        block: list[int] = []
        for number in numbers:
            if block:
                layout, sharing = plan[block[0]][0], self._sharing(plan[block[0]][0])
                is_other = sharing > 1 and number // sharing != block[0] // sharing
                if is_other or plan[number][0] != layout or len(block) >= self._most(layout):
                    yield block
                    block = []
            block.append(number)
        if block:
            yield block

    def _most(self, layout: int) -> int:
        """Return the number of batches of a layout that are read together."""
        values = sum(spec.size for spec in tensors_of(self.collection.members[self.collection.first(layout)]))
        return max(1, LOADED_VALUES_AT_ONCE // max(1, values * self.batch))

    def _sharing(self, layout: int) -> int:
        """Return the number of batches of a layout that share their random elements."""
        return max(1, min(SHARING, self._most(layout), self.batch // FEWEST)) if self.augment else 1

    def _load(self, block: Sequence[int], plan: Sequence[tuple[int, Indices]]) -> list[Batch]:
        layout = plan[block[0]][0]
        indices = [plan[number][1] for number in block]
        params = self.collection.read(np.concatenate(indices))
        if self.augment:
            params = self._move(params, layout, block, [len(own) for own in indices])
        if self.statistics:
            params = self.statistics[layout].standardize(params)
        batches, start = [], 0
        for number, own in zip(block, indices, strict=True):
            part = params if len(block) == 1 else select(params, slice(start, start + len(own)))
            batches.append(Batch(own, part, layout, self._state_at((number // self.world + 1) * self.world)))
            start += len(own)
        return batches

    def _state_at(self, number: int) -> dict[str, Any]:
        """Return the state before a batch. After the last batch, the next epoch begins."""
        epoch, number = (self.epoch + 1, 0) if number >= len(self) else (self.epoch, number)
        return {"seed": self.seed, "epoch": epoch, "number": number, "networks": self._digest}

    def _move(self, params: Params, layout: int, block: Sequence[int], counts: Sequence[int]) -> Params:
        """Transform each network by a random element."""
        if layout not in self._moves:
            symmetry = self.collection.symmetry(layout).bind(params)
            has_matrices = "linear" in self.augment and any(group.matrix != "none" for group in symmetry.groups)
            is_added = TRANSLATION in self.augment and bool(symmetry.translations)
            is_added |= ROTATION in self.augment and bool(symmetry.rotatable)
            is_large = sum(params[name][0].numel() for name in symmetry.sites) > LARGEST_PLACE
            self._moves[layout] = (
                symmetry if has_matrices or is_added or is_large else RandomMoves(symmetry, self.augment)
            )
        moves = self._moves[layout]
        if isinstance(moves, RandomMoves):
            return moves(params, self._sources(layout, block, counts))
        moved, start = [], 0
        # Fields that are the identity are left out, which halves the work of permutations alone.
        fields = [FIELD_OF_PART[part] for part in self.augment if part in FIELD_OF_PART]
        for number, count in zip(block, counts, strict=True):
            element = moves.random(self._chance(number), self.augment, (count,))
            drawn = {name: Value(**{f: t for f, t in v.items() if f in fields}) for name, v in element.items()}
            own = select(params, slice(start, start + count))
            moved.append(moves.act(Element(drawn, element.batch, element.translation, element.rotation), own))
            start += count
        return moved[0] if len(moved) == 1 else {n: torch.cat([one[n] for one in moved]) for n in moved[0]}

    def _sources(self, layout: int, block: Sequence[int], counts: Sequence[int]) -> list[Source]:
        """Return the networks and the random generator of each group of batches that share elements."""
        sharing = self._sharing(layout)
        runs: dict[int, list[int]] = {}
        for number, count in zip(block, counts, strict=True):
            runs.setdefault(number // sharing, []).append(count)
        return [(shared, self._chance(f"elements {run}")) for run, shared in runs.items()]

    def _chance(self, purpose: object) -> torch.Generator:
        """Return the random generator for one purpose in the current epoch. Each purpose has a separate generator."""
        digest = blake2b(f"{self.seed} {self.epoch} {purpose}".encode(), digest_size=7).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest, "big"))

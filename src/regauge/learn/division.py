"""The networks of a training, and their division into parts for training, validation and test."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch
from numpy.typing import NDArray

from regauge.core.given import given_or_seed
from regauge.core.params import Params
from regauge.core.progress import Progress
from regauge.learn.populations import Indices, Parts, digest, find_usable, split_networks, spread
from regauge.storage.collection import Collection, Kept
from regauge.storage.loader import Loader
from regauge.training.descent import OnStep
from regauge.training.settings import derive_seed


class FitArguments(TypedDict, total=False):
    """Arguments of every function that trains a net on networks, such as `learn.fit_predictor` and `flow.fit`.

    Attributes:
        indices: Indices of the networks to use, or a mask; all by default. Networks that are not finite are left out.
        split: Indices of the networks for "train", "validation" and "test". By default, a store is divided by run so
            that all checkpoints of a run are in the same part. If the store has a column "split" with test networks,
            these networks are the test part. A population in memory is divided at random, but always in the same way:
            80%, 10% and 10%.
        split_by: Column by which stores are divided instead of by run. All networks with the same value are in the same
            part. An example is a column of images to which several networks were fitted.
        checkpoints: The checkpoints of each run of a store that are used if neither `indices` nor `split` is given:
            "last" (the default) or "all".
        state: A `.safetensors` file that keeps the state of the training while it runs. If an interrupted call is
            repeated, it continues from the file. The result equals that of an uninterrupted training bit by bit.
        progress: Shows the steps.
        on_step: Called after each step with a `regauge.training.State`: the number of the step, the loss and the
            learning rate.
    """

    indices: Sequence[int] | NDArray[Any] | None
    split: Mapping[str, Sequence[int] | NDArray[Any]] | None
    split_by: str | None
    checkpoints: Kept
    state: Path | None
    progress: Progress
    on_step: OnStep | None


@dataclass(frozen=True, eq=False)
class Division:
    """Networks, divided for a training.

    Attributes:
        collection: All networks.
        parts: Indices of the networks for "train", "validation" and "test".
        seed: The seed of all random numbers in the training.
        given: The seed of the generator from which `seed` was drawn.
        checkpoints: The checkpoints of each run that are used; None if the networks were given by index.
    """

    collection: Collection
    parts: Parts
    seed: int
    given: int
    checkpoints: Kept | None

    @classmethod
    def of(
        cls,
        collection: Collection,
        generator: torch.Generator | None,
        usable: Indices | None = None,
        *,
        by: str | None = None,
        **arguments: Unpack[FitArguments],
    ) -> "Division":
        """Divide networks, and draw one seed from the generator; by default a generator with seed 0.

        Args:
            usable: Indices of the networks that can be used; by default the finite networks.
            by: Column by which stores are divided if the arguments name no column.
        """
        generator = given_or_seed(generator)
        split, indices = arguments.get("split"), arguments.get("indices")
        usable = find_usable(collection, **arguments) if usable is None else usable
        parts = split_networks(collection, usable, split, arguments.get("split_by") or by)
        seed = int(torch.randint(1 << 62, (), generator=generator, device=generator.device))
        checkpoints = arguments.get("checkpoints", "last") if indices is None and split is None else None
        return cls(collection, parts, seed, generator.initial_seed(), checkpoints)

    def chance(self, purpose: str) -> torch.Generator:
        """Return a separate random generator for each purpose."""
        return torch.Generator().manual_seed(derive_seed(self.seed, purpose))

    def samples(self, count: int, train: Indices | None = None) -> list[Params]:
        """Return at most `count` networks of each layout, evenly spread over the training networks.

        Raises:
            ValueError: No training network has one of the layouts.
        """
        train = self.parts["train"] if train is None else train
        there, layouts = self.collection.layout_of(train), range(max(self.collection.layouts) + 1)
        if missing := [k for k in layouts if not (there == k).any()]:
            raise ValueError(
                f"none of the networks for training has the architecture of store or population "
                f"{self.collection.first(missing[0]) + 1}; take more of its networks, or leave it out"
            )
        return [self.collection.read(spread(train[there == k], count)) for k in layouts]

    def loader(self, batch: int, train: Indices | None = None, augment: Sequence[str] = ()) -> Loader:
        """Return batches of the networks for training, in random order."""
        indices = self.parts["train"] if train is None else train
        return Loader(self.collection, generator=self.chance("order"), batch=batch, indices=indices, augment=augment)

    def describe(self, config: object, **others: Any) -> dict[str, Any]:
        """Return all that a training depends on, as JSON; `train` compares it with a saved state."""
        return {
            "settings": repr(config),
            "networks": self.collection.key,
            "parts": digest(*self.parts.values()),
            "seed": self.seed,
            **others,
        }

    def about(self, config: object) -> dict[str, Any]:
        """Return facts about the training, as JSON: numbers of networks, settings, and the given seed."""
        return {
            "networks": {name: len(part) for name, part in self.parts.items()},
            "settings": repr(config),
            "seed": self.given,
        }

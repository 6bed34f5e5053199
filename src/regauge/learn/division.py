"""The networks of a training run, split into training, validation and test networks."""

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
        indices: Indices of the networks to use, or a mask. By default, all networks are used. Networks with NaN or Inf
            are left out.
        split: Indices of the networks for "train", "validation" and "test". By default, a store is split by run: all
            checkpoints of a run are in the same split. If the store has a column "split", the networks that this column
            marks are the test split. A population in memory is split randomly, but always in the same way: 80%, 10% and
            10%.
        split_by: The column by which stores are split, instead of by run. All networks with one value in this column
            are in the same split. For example, the column may name the image to which a network was fitted.
        checkpoints: The checkpoints of each run in a store that are used if neither `indices` nor `split` is given:
            "last" (the default) or "all".
        state: A `.safetensors` file in which the training state is saved during training. If an interrupted call is
            repeated, training continues from the saved state. The result is bitwise identical to the result of an
            uninterrupted training run.
        progress: Displays the steps.
        on_step: A function that is called after each step with a `regauge.training.State`: the number of the step, the
            loss and the learning rate.
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
    """Networks that are split for training.

    Attributes:
        collection: All networks.
        parts: The indices of the networks for "train", "validation" and "test".
        seed: The seed of all random numbers in the training.
        given: The seed of the generator from which `seed` was sampled.
        checkpoints: The checkpoints of each run that are used; None if the caller gave the indices of networks.
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
        """Split networks, and sample one seed from the generator. Default: a generator with seed 0.

        Args:
            usable: Indices of the networks that can be used; by default the finite networks.
            by: The column by which stores are split if the arguments name no column.
        """
        generator = given_or_seed(generator)
        split, indices = arguments.get("split"), arguments.get("indices")
        usable = find_usable(collection, **arguments) if usable is None else usable
        parts = split_networks(collection, usable, split, arguments.get("split_by") or by)
        seed = int(torch.randint(1 << 62, (), generator=generator, device=generator.device))
        checkpoints = arguments.get("checkpoints", "last") if indices is None and split is None else None
        return cls(collection, parts, seed, generator.initial_seed(), checkpoints)

    def chance(self, purpose: str) -> torch.Generator:
        """Return the random generator for one purpose. Each purpose has a separate generator."""
        return torch.Generator().manual_seed(derive_seed(self.seed, purpose))

    def samples(self, count: int, train: Indices | None = None) -> list[Params]:
        """Return up to `count` training networks of each layout (names and shapes of tensors), evenly spaced.

        Raises:
            ValueError: A layout has no training networks.
        """
        train = self.parts["train"] if train is None else train
        there, layouts = self.collection.layout_of(train), range(max(self.collection.layouts) + 1)
        if missing := [k for k in layouts if not (there == k).any()]:
            raise ValueError(
                "no training network has the architecture of store or population "
                f"{self.collection.first(missing[0]) + 1}; give more of its networks, or leave it out"
            )
        return [self.collection.read(spread(train[there == k], count)) for k in layouts]

    def loader(self, batch: int, train: Indices | None = None, augment: Sequence[str] = ()) -> Loader:
        """Return batches of the training networks in random order."""
        indices = self.parts["train"] if train is None else train
        return Loader(self.collection, generator=self.chance("order"), batch=batch, indices=indices, augment=augment)

    def describe(self, config: object, **others: Any) -> dict[str, Any]:
        """Return everything on which the training depends, as JSON. `train` compares this description with the
        description in a saved state.
        """
        return {
            "settings": repr(config),
            "networks": self.collection.key,
            "parts": digest(*self.parts.values()),
            "seed": self.seed,
            **others,
        }

    def about(self, config: object) -> dict[str, Any]:
        """Return facts about the training run, as JSON: numbers of networks, settings, and the given seed."""
        return {
            "networks": {name: len(part) for name, part in self.parts.items()},
            "settings": repr(config),
            "seed": self.given,
        }

"""Fitting of flows: the settings, and one function from networks to a flow."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regauge.core.arguments import check_arguments
from regauge.core.progress import Progress, no_progress
from regauge.core.symmetry import Symmetry
from regauge.flow.alignment import align_points, find_reference
from regauge.flow.components import Components
from regauge.flow.design import Design, build_velocity
from regauge.flow.flow import Flow
from regauge.flow.manifold import Manifold, Points
from regauge.flow.moments import Moments, count_share, find_factor
from regauge.flow.nets import OverNetworks
from regauge.flow.priors import FullGaussian, Prior
from regauge.flow.space import Space
from regauge.flow.times import Times, UniformTime
from regauge.flow.velocity import Velocity
from regauge.learn.populations import describe_run, digest, find_usable, kept_unless, read_blocks, split_networks
from regauge.learn.training import Training, Validation, train
from regauge.storage.collection import Collection, Kept, Networks
from regauge.storage.loader import Batch, Loader
from regauge.storage.store import Store
from regauge.training.settings import derive_seed

SAMPLE = 256
"""Networks by which a net's inputs are standardized."""


@dataclass(frozen=True, kw_only=True)
class Config(Design, Training):
    """Settings of a flow and of its training.

    Attributes:
        times: The distribution of times in training.
        balance: How much a tensor counts in the loss, or where there are any in the principal components: the number of
            its values to this power. 1: all values alike; 0: all tensors alike. Components count by their deviations.
        is_standardized: Whether errors count in units of what they would be without the net; else as they are.
        labels: Name of a column; samples are then drawn for one of its values. None: no column.
    """

    lr: float = 2e-3
    weight_decay: float = 1e-3
    average: float | None = 0.999
    times: Times = field(default_factory=UniformTime)
    balance: float = 0.5
    is_standardized: bool = True
    labels: str | None = None

    def __post_init__(self) -> None:
        Design.__post_init__(self)
        Training.__post_init__(self)
        if not 0 <= self.balance <= 1:
            raise ValueError(f"balance={self.balance} is no power from 0 to 1")


@check_arguments
def fit(
    population: Networks | Sequence[Networks] | Collection,
    symmetry: Symmetry | None = None,
    config: Config | None = None,
    *,
    generator: torch.Generator,
    indices: Sequence[int] | NDArray[Any] | None = None,
    split: Mapping[str, Sequence[int] | NDArray[Any]] | None = None,
    split_by: str | None = None,
    checkpoints: Kept = "last",
    starts: Mapping[str, Tensor] | None = None,
    state: Path | None = None,
    progress: Progress = no_progress,
) -> Flow:
    """Fit a flow from simple random networks to those of a population; the weights with the best validation are kept.

    Args:
        population: Parameters with a leading model axis, or a store, or several of one architecture. They are read
            once, and their points are kept in memory.
        symmetry: The symmetry of the networks; that of the store unless given.
        config: Settings; `seconds` limits the training alone.
        generator: The source of all chance, from which one number is drawn.
        indices: Numbers of the networks to use, or a mask; those that are not finite are left out.
        split: Numbers of the networks for "train", "validation" and "test". Unless given, a store is divided by run, so
            that two checkpoints of one run are never in two parts; of a population random networks are taken: 80%, 10%
            and 10%. The last ones are not read.
        split_by: Name of a column by which the store is divided, instead of by run.
        checkpoints: Of each run of a store "last", its last checkpoint, or "all"; where neither `indices` nor `split`
            names networks.
        starts: Networks such as the population began with; a prior of independent values is then matched to them
            instead of to those at which the flow ends.
        state: File in which the training is kept while it runs, and from which the same call continues.

    Raises:
        IndexError: There is no network of some number.
        KeyError: The store has no such column of labels.
        ValueError: Networks are of several architectures or cannot be represented as asked, or a part of the split is
            empty.
    """
    config = config or Config()
    collection = Collection(population, symmetry)
    if count := max(collection.layouts):
        raise ValueError(f"the networks have {count + 1} architectures, but a flow makes networks of one; fit one each")
    parts = divide(collection, indices, split=split, split_by=split_by, checkpoints=checkpoints)
    seed = int(torch.randint(1 << 62, (), generator=generator, device=generator.device))
    sample = collection.read(parts["train"][:SAMPLE])
    space = Space.of(sample, collection.symmetry(0), config.representation)
    points = {name: _enter(collection, parts[name], space) for name in ("train", "validation")}
    reference = find_reference(space, points["train"]) if config.is_aligned else None
    if reference is not None:
        points = {name: align_points(space, reference, own) for name, own in points.items()}
    manifold: Space | Components = space
    if config.representation.components is not None:
        manifold = Components.of(space, points["train"], config.representation.components, config.balance)
        points = {name: manifold.reduce(own) for name, own in points.items()}
    moments = Moments.of([points["train"]], manifold, is_pooled=not config.is_aligned)
    begin = moments if starts is None else Moments.of([space.enter(starts)], space)
    if isinstance(config.prior, FullGaussian):
        begin = replace(begin, factor=find_factor(points["train"], space, moments.deviation))
    prior = config.prior.build(manifold, begin)
    chance = torch.Generator().manual_seed(derive_seed(seed, "net"))
    classes, numbers = _labels(collection, config, parts)
    velocity = build_velocity(manifold, prior, moments, config, len(classes), chance).to(config.device)
    fitting = _Fitting(manifold, prior, moments, velocity, config, seed, points, numbers)
    fitting.standardize()
    loader = Loader(
        {"points": points["train"]},
        generator=torch.Generator().manual_seed(derive_seed(seed, "order")),
        batch=config.batch,
    )
    trained = train(
        velocity,
        loader,
        fitting.loss,
        fitting.validate,
        config,
        seed=seed,
        state=state,
        inputs=describe_run(
            config, collection, parts, seed, starts=None if starts is None else digest(*starts.values())
        ),
        progress=progress,
    )
    member = collection.members[0]
    best = trained.history[trained.best]["validation_loss"] if trained.history else None
    about = {
        "settings": repr(config),
        "networks": {name: len(part) for name, part in parts.items()},
        "checkpoints": checkpoints if indices is None and split is None else None,
        "seed": generator.initial_seed(),
        "scores": {"flow": {"validation loss": best}},
        "history": [dict(row) for row in trained.history],
        "best": trained.best,
        "ended": trained.ended,
        "architecture": member.architecture.to_json() if isinstance(member, Store) else None,
    }
    design = Design(**{part.name: getattr(config, part.name) for part in fields(Design)})
    return Flow(velocity.cpu().eval(), manifold, prior, moments, design, tuple(classes), about, trained, reference)


def divide(
    population: Networks | Sequence[Networks] | Collection,
    indices: Sequence[int] | NDArray[Any] | None = None,
    *,
    split: Mapping[str, Sequence[int] | NDArray[Any]] | None = None,
    split_by: str | None = None,
    checkpoints: Kept = "last",
) -> dict[str, NDArray[np.int64]]:
    """Numbers of the networks for "train", "validation" and "test", as `fit` divides them with the same arguments."""
    collection = Collection(population)
    return split_networks(
        collection,
        find_usable(collection, indices, kept_unless(split, checkpoints), reads_memory=True),
        split,
        split_by,
    )


@dataclass(frozen=True, eq=False)
class _Fitting:
    """Everything that a training needs."""

    space: Manifold
    prior: Prior
    moments: Moments
    velocity: Velocity
    config: Config
    seed: int
    points: dict[str, Points]
    labels: dict[str, Tensor]

    def standardize(self) -> None:
        """Have a net over networks take the statistics of points at random times."""
        net, space = self.velocity.net, self.space
        if not isinstance(net, OverNetworks):
            return
        assert isinstance(space, Space)
        chance = torch.Generator().manual_seed(derive_seed(self.seed, "statistics"))
        x1 = self.points["train"][:SAMPLE].to(self.config.device)
        t = torch.rand(len(x1), generator=chance).to(x1)
        at, _ = space.path(self.prior.sample(len(x1), chance, x1.dtype, x1.device), x1, t)
        net.net.standardize(space.arrange(self.velocity.standard(at, t)))

    def loss(self, batch: Batch, chance: torch.Generator) -> Tensor:
        """The mean loss of a batch."""
        x1 = batch.params["points"].to(self.config.device)
        labels = self.labels["train"][torch.from_numpy(batch.indices)] if self.labels else None
        return self._compare(x1, labels, chance)

    def validate(self) -> Validation:
        """The loss on held-out networks, always at the same times from the same starts."""
        chance = torch.Generator().manual_seed(derive_seed(self.seed, "validation"))
        total, points = 0.0, self.points["validation"]
        for start in range(0, len(points), self.config.batch):
            part = slice(start, start + self.config.batch)
            x1 = points[part].to(self.config.device)
            labels = self.labels["validation"][part] if self.labels else None
            total += float(self._compare(x1, labels, chance)) * len(x1)
        loss = total / len(points)
        return Validation((loss,), {"validation_loss": loss})

    def _compare(self, x1: Points, labels: Tensor | None, chance: torch.Generator) -> Tensor:
        """The mean squared error of predictions."""
        config, space = self.config, self.space
        x0 = self.prior.sample(len(x1), chance, x1.dtype, x1.device)
        x0, x1 = config.coupling.pair(space, x0, x1, self.moments)
        t = config.times.draw(len(x1), chance).to(x1)
        at, rate = space.path(x0, x1, t)
        labels = None if labels is None else labels.to(x1.device)
        if config.predicts == "velocity":
            error, unit = self.velocity(at, t, labels) - rate, self.velocity.unit(t)
        else:
            error = space.log(self.velocity.predict_end(at, t, labels), x1)
            unit = self.moments.deviation.to(x1)
        if config.is_standardized:
            error = error / unit
        loss: Tensor = (error.square() @ self.weights.to(error)).mean()
        return loss

    @property
    def weights(self) -> Tensor:
        """The weight of each coordinate in the loss; the weights sum to one."""
        space = self.space
        share = space.sizes if isinstance(space, Components) else count_share(space, self.config.balance)
        return share / share.sum()


def _enter(collection: Collection, indices: NDArray[np.int64], space: Space) -> Points:
    points = torch.empty(len(indices), space.dim)
    for places, params in read_blocks(collection, indices):
        points[torch.from_numpy(places)] = space.enter(params)
    return points


def _labels(
    collection: Collection, config: Config, parts: Mapping[str, NDArray[np.int64]]
) -> tuple[list[Any], dict[str, Tensor]]:
    """The classes of a column, and the number of each network's class."""
    if config.labels is None:
        return [], {}
    column = collection.column(config.labels)
    classes = sorted(set(np.asarray(column)[parts["train"]].tolist()))
    known = {value: number for number, value in enumerate(classes)}
    numbers = {}
    for name in ("train", "validation"):
        values = np.asarray(column)[parts[name]].tolist()
        if new := [value for value in values if value not in known]:
            raise ValueError(f"{config.labels!r} is {new[0]!r} for a network for {name}, but for none for training")
        numbers[name] = torch.tensor([known[value] for value in values])
    return classes, numbers

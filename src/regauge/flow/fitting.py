"""Training of flows: one function that fits a flow to networks."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Any, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regauge.core.arguments import check_arguments
from regauge.core.devices import to_device
from regauge.core.params import Params, select
from regauge.core.progress import Progress
from regauge.core.symmetry import Symmetry
from regauge.core.task import Task
from regauge.flow.alignment import align_points, find_reference
from regauge.flow.answers import find_means, find_one_answer, predict_classes
from regauge.flow.choosing import finite_losses, require_fit
from regauge.flow.components import Components
from regauge.flow.design import build_velocity
from regauge.flow.flow import Flow
from regauge.flow.flow_config import Design, FlowConfig
from regauge.flow.judgement import find_kept
from regauge.flow.manifold import Points
from regauge.flow.moments import Moments, count_share, find_covariance
from regauge.flow.nets import OverNetworks
from regauge.flow.outlook import Outlook
from regauge.flow.priors import FullGaussian, Prior
from regauge.flow.space import Space
from regauge.flow.velocity import Velocity
from regauge.learn.course import Trained, Validation
from regauge.learn.division import Division, FitArguments
from regauge.learn.fitting import Fitting
from regauge.learn.paired_gain import PairedGain
from regauge.learn.populations import digest, find_usable, read_blocks, split_networks
from regauge.storage import Store
from regauge.storage.collection import Collection, Kept, Networks
from regauge.storage.loader import Batch, Loader

SAMPLE = 256
"""The number of networks whose statistics standardize a net's inputs."""
DRAWN, STEPS = 64, 10
"""The number of networks that are sampled to evaluate the prior or an epoch on a task, and the number of solver
steps."""
SHARES = (1.0, 0.5, 0.25, 0.0)
"""Candidate factors by which the net's output is multiplied. The factors are compared after the training."""
TIMES = 8
"""The number of random times at which each held-out network is evaluated when the candidate factors are compared."""


@check_arguments
def fit(
    population: Networks | Sequence[Networks] | Collection,
    symmetry: Symmetry | None = None,
    config: FlowConfig | None = None,
    *,
    task: Task | None = None,
    starts: Mapping[str, Tensor] | None = None,
    generator: torch.Generator | None = None,
    **arguments: Unpack[FitArguments],
) -> Flow:
    """Fit a flow that transforms simple random networks to networks like those of a population.

    The fit returns the weights with the best validation loss. By default, networks are aligned before the flow is
    fitted. The flow begins at the normal distribution with the mean and covariances of the aligned networks. The net
    learns the difference between the population and the normal distribution. After the training, the output of the net
    is multiplied by a factor from 0 to 1 (the share), which is chosen by validation. The flow is compared with the
    normal distribution on held-out networks or, with a task, on sampled networks. The share is 0 unless the flow is
    better than the normal distribution by more than one standard error. Therefore, on the compared networks, a flow is
    not worse than the normal distribution. Before the training, a warning is issued if sampled networks are not
    expected to solve the task. With a task, the warning depends on the performance of networks sampled from the normal
    distribution. Without a task, the warning depends on the distance of aligned networks to their mean.

    Args:
        population: Parameters with a leading model axis, or a store, or a list of populations and stores with one
            architecture. The networks are read once, and their points are kept in memory.
        symmetry: The symmetry of the networks; by default the symmetry of the store.
        config: Settings. `seconds` limits only the training time, by the clock unless `is_cpu_time`.
        task: Examples and the loss by which sampled networks are judged. With a task, the training keeps the epoch
            whose sampled networks have the smallest loss, among the epochs that are not worse than the normal
            distribution on held-out networks. Pass examples on which the networks were trained, or examples that are
            reserved for choosing the epoch. Never pass test examples.
        starts: Initial networks of the population. If initial networks are given, a prior of independent values is
            matched to the initial networks instead of the trained networks.
        generator: The random generator from which one seed is sampled; by default a generator with seed 0.
        arguments: `indices`, `split`, `split_by`, `checkpoints`, `state` and `progress`; see
            `regauge.learn.division.FitArguments`. The test networks are not read.

    Raises:
        IndexError: An index is out of range.
        KeyError: The store lacks the column of labels.
        ValueError: The networks have several architectures, the networks cannot be represented as requested, or a part
            of the split is empty.
    """
    config, collection = config or FlowConfig(), Collection(population, symmetry)
    if count := max(collection.layouts):
        raise ValueError(f"the networks have {count + 1} architectures, but a flow is for one; fit a flow for each")
    usable = find_usable(collection, **arguments, reads_memory=True)
    division = Division.of(collection, generator, usable, **arguments)
    return FlowFitting.prepare(division, config, starts, task).fit(arguments)


def divide(
    population: Networks | Sequence[Networks] | Collection,
    indices: Sequence[int] | NDArray[Any] | None = None,
    *,
    split: Mapping[str, Sequence[int] | NDArray[Any]] | None = None,
    split_by: str | None = None,
    checkpoints: Kept = "last",
) -> dict[str, NDArray[np.int64]]:
    """Return the indices of the networks for "train", "validation" and "test", as `fit` splits them."""
    collection = Collection(population)
    usable = find_usable(collection, indices=indices, split=split, checkpoints=checkpoints, reads_memory=True)
    return split_networks(collection, usable, split, split_by)


@dataclass(frozen=True, eq=False)
class FlowFitting(Fitting[Flow]):
    """The training of a flow.

    Attributes:
        points: The training and validation networks, as points of the space.
        labels: The class index of each network, if there are classes.
        reference: The network to which points are aligned, if points are aligned.
        known: Further facts on which the training depends: a hash of the initial networks to which the prior is
            matched, if given, and whether there is a task.
        task: The task that evaluates sampled networks, if a task was given.
        outlook: Measures that predict whether sampled networks solve the task.
    """

    division: Division
    config: FlowConfig
    net: Velocity
    loader: Loader
    space: Space | Components
    prior: Prior
    moments: Moments
    points: Mapping[str, Points]
    classes: Sequence[Any]
    labels: Mapping[str, Tensor]
    reference: Tensor | None
    known: Mapping[str, Any]
    task: Task | None
    outlook: Outlook | None

    @classmethod
    def prepare(
        cls, division: Division, config: FlowConfig, starts: Mapping[str, Tensor] | None, task: Task | None
    ) -> "FlowFitting":
        """Convert the networks to points, and return a training run with a new net."""
        collection, parts = division.collection, division.parts
        space = Space.of(collection.read(parts["train"][:SAMPLE]), collection.symmetry(0), config.representation)
        if task is not None:
            require_fit(task, space.symmetry)
        points = {name: _enter(collection, parts[name], space) for name in ("train", "validation")}
        reference = find_reference(space, points["train"]) if config.is_aligned else None
        outlook = None
        if reference is not None:
            given, points = points, {name: align_points(space, reference, own) for name, own in points.items()}
            outlook = Outlook.of(given["train"], points["train"])
        validation = space.leave(points["validation"][:DRAWN])
        manifold: Space | Components = space
        if config.representation.components is not None:
            manifold = Components.of(space, points["train"], config.representation.components, config.balance)
            points = {name: manifold.reduce(own) for name, own in points.items()}
        moments = Moments.of([points["train"]], manifold, is_pooled=not config.is_aligned)
        begin = moments if starts is None else Moments.of([space.enter(starts)], space)
        assert config.prior is not None  # A design always has a prior.
        if isinstance(config.prior, FullGaussian):
            found = find_covariance(points["train"], manifold, moments, config.prior.shrink)
            begin = replace(begin, covariance=found)
        prior = config.prior.build(manifold, begin)
        classes, labels = _labels(collection, config, parts)
        net = build_velocity(manifold, prior, moments, config, len(classes), division.chance("net")).to(config.device)
        loader = Loader({"points": points["train"]}, generator=division.chance("order"), batch=config.batch)
        known = {"starts": None if starts is None else digest(*starts.values()), "has_task": task is not None}
        made = cls(
            *(division, config, net, loader, manifold, prior, moments, points, classes, labels, reference),
            *(known, task, outlook),
        )
        made.standardize()
        if outlook is not None:
            kept = None if task is None else made._find_kept(task, validation)
            outlook = replace(outlook, kept=kept)
            outlook.warn()
            made = replace(made, outlook=outlook)
        return made

    def standardize(self) -> None:
        """Initialize a net over networks with the statistics of points at random times."""
        net, space = self.net.net, self.space
        if not isinstance(net, OverNetworks):
            return
        assert isinstance(space, Space)
        chance = self.division.chance("statistics")
        x1 = self.points["train"][:SAMPLE].to(self.config.device)
        t = torch.rand(len(x1), generator=chance).to(x1)
        at, _ = space.path(self.prior.sample(len(x1), chance, x1.dtype, x1.device), x1, t)
        net.net.standardize(space.arrange(self.net.standard(at, t)))

    def loss(self, batch: Batch, chance: torch.Generator) -> Tensor:
        """Return the mean loss of a batch."""
        x1 = batch.params["points"].to(self.config.device)
        labels = self.labels["train"][torch.from_numpy(batch.indices)] if self.labels else None
        return self._compare(x1, labels, chance).mean()

    def validate(self) -> Validation:
        """Return the loss on held-out networks and, with a task, the loss of sampled networks."""
        loss = float(self._held_out_losses().mean())
        facts = {"validation_loss": loss}
        if self.task is None:
            return Validation((loss,), facts)
        drawn = float(self._drawn_losses(self.task).mean())
        # If velocities fit held-out networks worse than a normal distribution does, the model has overfitted.
        is_worse = self.config.has_gaussian and loss > self._normal_loss
        return Validation((float(is_worse), drawn), {**facts, "drawn_loss": drawn})

    @cached_property
    def _normal_loss(self) -> float:
        """The loss of the normal distribution (the flow without the net's output) on held-out networks."""
        share = float(self.net.share)
        self.net.share.zero_()
        loss = float(self._held_out_losses().mean())
        self.net.share.fill_(share)
        return loss

    def _find_kept(self, task: Task, validation: Params) -> float | None:
        """Return the performance of networks sampled from the prior, divided by the performance of the validation
        networks.
        """
        drawn = self._make(None, {}).draw_starts(DRAWN, self.division.chance("outlook"))
        finite_losses(task, drawn := to_device(drawn, self.config.device))  # raises an error if no loss is finite
        known = to_device(validation, self.config.device)
        one_answer = find_one_answer(predict_classes(task, select(known, slice(0, 1))))
        return find_kept(find_means(task, drawn), find_means(task, known), one_answer)

    def _drawn_losses(self, task: Task) -> Tensor:
        """Return the losses of sampled networks, whose start points are the same in every epoch."""
        chance, flow = self.division.chance("drawn"), self._make(None, {})
        classes = self.classes or [None]
        count = -(-DRAWN // len(classes))
        drawn = (flow.sample(count, generator=chance, steps=STEPS, label=label) for label in classes)
        return torch.cat([finite_losses(task, networks) for networks in drawn])

    @torch.no_grad()
    def _held_out_losses(self, times: int = 1) -> Tensor:
        """Return the loss of each held-out network, always at the same times and from the same start points."""
        chance, points = self.division.chance("validation"), self.points["validation"]
        total = torch.zeros(len(points), dtype=torch.float64)
        for _ in range(times):
            for start in range(0, len(points), self.config.batch):
                part = slice(start, start + self.config.batch)
                labels = self.labels["validation"][part] if self.labels else None
                total[part] += self._compare(points[part].to(self.config.device), labels, chance).double().cpu()
        return total / times

    def _choose_share(self) -> tuple[float, PairedGain | None]:
        """Set the share of the net's output; return the share, and the gain of the best share over a share of 0.

        The share is 0 if the gain is at most one standard error.
        """
        if not self.config.has_gaussian:
            return 1.0, None
        judged: dict[float, tuple[bool, Tensor]] = {}
        for share in SHARES:
            self.net.share.fill_(share)
            losses, is_worse = self._held_out_losses(TIMES), False
            if self.task is not None:
                is_worse = float(self._held_out_losses().mean()) > self._normal_loss
                losses = self._drawn_losses(self.task)
            judged[share] = is_worse, losses
        best = min(SHARES, key=lambda share: (judged[share][0], float(judged[share][1].mean())))
        gain = PairedGain.of(judged[best][1], judged[0.0][1])
        best = best if gain.is_clear else 0.0
        self.net.share.fill_(best)
        return best, gain

    def conclude(self, trained: Trained, progress: Progress) -> Flow:
        """Return the flow, after the best factor of the net's output is chosen."""
        config, division = self.config, self.division
        member, (share, gain) = division.collection.members[0], self._choose_share()
        scores = {name.replace("_", " "): value for name, value in self.validate().facts.items()}
        about = {
            **division.about(config),
            "checkpoints": division.checkpoints,
            "scores": {"flow": scores},
            "share": share,
            "gain": None if gain is None else gain.to_json(),
            "outlook": None if self.outlook is None else asdict(self.outlook),
            "history": [dict(row) for row in trained.history],
            "best": trained.best,
            "ended": trained.ended,
            "architecture": member.architecture.to_json() if isinstance(member, Store) else None,
        }
        self.net.cpu().eval()
        return self._make(trained, about)

    def _make(self, trained: Trained | None, about: Mapping[str, Any]) -> Flow:
        """Return the flow with the current weights of the net."""
        design = Design(**{part.name: getattr(self.config, part.name) for part in fields(Design)})
        classes = tuple(self.classes)
        return Flow(self.net, self.space, self.prior, self.moments, design, classes, about, trained, self.reference)

    def _compare(self, x1: Points, labels: Tensor | None, chance: torch.Generator) -> Tensor:
        """Return the weighted mean squared error of the prediction for each network."""
        config, space = self.config, self.space
        x0 = self.prior.sample(len(x1), chance, x1.dtype, x1.device)
        x0, x1 = config.coupling.pair(space, x0, x1, self.moments)
        t = config.times.draw(len(x1), chance).to(x1)
        at, rate = space.path(x0, x1, t)
        labels = None if labels is None else labels.to(x1.device)
        if config.predicts == "velocity":
            error, unit = self.net(at, t, labels) - rate, self.net.unit(t)
        else:
            error = space.log(self.net.predict_end(at, t, labels), x1)
            unit = self.moments.deviation.to(x1)
        if config.is_standardized:
            error = error / unit
        losses: Tensor = error.square() @ self.weights.to(error)
        return losses

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
    collection: Collection, config: FlowConfig, parts: Mapping[str, NDArray[np.int64]]
) -> tuple[list[Any], dict[str, Tensor]]:
    """Return the class labels in a column, and the class index of each network."""
    if config.labels is None:
        return [], {}
    column = collection.column(config.labels)
    classes = sorted(set(np.asarray(column)[parts["train"]].tolist()))
    known = {value: number for number, value in enumerate(classes)}
    numbers = {}
    for name in ("train", "validation"):
        values = np.asarray(column)[parts[name]].tolist()
        if new := [value for value in values if value not in known]:
            raise ValueError(
                f"{config.labels!r} is {new[0]!r} for a network for {name}, but for none for training; take more "
                "networks"
            )
        numbers[name] = torch.tensor([known[value] for value in values])
    return classes, numbers

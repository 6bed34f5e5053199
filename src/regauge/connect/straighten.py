"""Training for a low loss between two networks, by changing one network (straightening) or inner points of a path."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from regauge.connect.comparable import require_comparable
from regauge.connect.line import Curve, line
from regauge.connect.paths import ControlledPath
from regauge.core.arguments import check_arguments
from regauge.core.given import given_or_seed
from regauge.core.interpolation import combine, distance
from regauge.core.params import Params, require_same_shapes, round_alike
from regauge.core.progress import Progress, no_progress
from regauge.core.task import Batch, Task
from regauge.training import Adam, AdamW, Cosine, DescentConfig, OneCycle, Optimizer, Schedule, differentiate, minimize
from regauge.training.descent import OnStep, cycle


@dataclass(frozen=True, kw_only=True)
class LineTrainingConfig(DescentConfig):
    """Settings for training one endpoint of a linear path until the path has no loss barrier.

    Each training batch is sampled with replacement from a batch of the task. With `batch=None`, each step uses a whole
    batch of the task.

    References:
        Paper 003, section 3.4, for loss, optimizer and schedule.
    """

    schedule: Schedule = field(default_factory=lambda: OneCycle(momentum=(0.85, 0.95)))
    segments: int = 4  # equal parts of the line; each step evaluates one random point in each
    points: int = 25  # points of the lines that are measured before and after training

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps is None or self.segments < 1 or self.points < 3:
            raise ValueError(
                f"{self} cannot train: it needs steps, and not epochs, at least one segment, and a line has at least "
                "three points"
            )


@dataclass(frozen=True)
class FlatLine:
    """A network that was trained until the loss on the linear path from another network is small.

    Unlike an aligned network, the trained network does not compute its original function.

    Attributes:
        params: The second network after training.
        before: The curve from the first network to the second network before training.
        after: The curve from the first network to `params`.
        moved: The Euclidean distance between the second network before training and `params`.
        distance: The Euclidean distance between the first network and `params`.
        distance_before: The Euclidean distance between the first and the second network before training.
        losses: The training loss of every step, `[steps]`.
    """

    params: Params
    before: Curve
    after: Curve
    moved: float
    distance: float
    distance_before: float
    losses: Tensor

    @property
    def approach(self) -> float:
        """The relative decrease of the distance to the first network: 1 means that the two networks became equal, and 0
        means no change.
        """
        return 1 - self.distance / self.distance_before if self.distance_before else 0.0

    def __str__(self) -> str:
        return (
            f"barrier {self.before.barrier:.4g} -> {self.after.barrier:.4g}, end loss "
            f"{self.before.table[-1]['loss']:.4g} -> {self.after.table[-1]['loss']:.4g}, moved {self.moved:.4g}, "
            f"distance {self.distance_before:.4g} -> {self.distance:.4g}"
        )


@dataclass(frozen=True, kw_only=True)
class StraightenConfig(LineTrainingConfig):
    """Settings of `straighten`; see `LineTrainingConfig`.

    The default learning rate of 3e-4 suits networks with widths from 64 to 512. For widths up to 128, a rate of 1e-3
    lowers the loss more in the same number of steps.
    """

    steps: int | None = 200
    batch: int | None = 2_000
    optimizer: Optimizer = field(default_factory=lambda: AdamW(lr=3e-4))


@check_arguments
def straighten(
    params_a: Mapping[str, Tensor],
    params_b: Mapping[str, Tensor],
    task: Task,
    config: StraightenConfig | None = None,
    *,
    generator: torch.Generator | None = None,
    progress: Progress = no_progress,
    on_step: OnStep | None = None,
) -> FlatLine:
    """Train the second network until the loss on the linear path from the first network is small.

    The function `hyper_match` uses the same loss, but trains a hypernetwork. For a single pair of networks, a
    hypernetwork only parametrizes the weights in another way. Align the second network to the first beforehand; the
    training then makes only small changes. The result may end far from the initial second network, because moving the
    second network onto the first network also gives a low loss. `FlatLine.approach` measures how far the result has
    collapsed onto the first network.

    Parameters are trained, and buffers are not changed. Any model and loss can be used.

    Args:
        params_a: The network at the fixed endpoint. The given network is not modified.
        params_b: The network from which training starts. The given network is not modified.
        generator: The generator that samples examples and points on the path. Default: a generator with seed 0.
        on_step: A function that is called after each step with a `regauge.training.State`: the step number, loss and
            learning rate.

    Raises:
        ValueError: The networks have different parameters, lack a parameter of the task's module, or contain NaN or
            Inf. There are no batches, or the loss is not finite.

    References:
        Paper 003, section 3.4, for the method, which is used here without encoder and hypernetwork.
    """
    generator = given_or_seed(generator)
    config = config or StraightenConfig()
    require_comparable((params_a, params_b), task)
    first = first_names(task, params_b)

    def complete(learned: Params) -> Params:
        return {name: learned.get(first.get(name, name), tensor) for name, tensor in params_b.items()}

    start = {name: params_b[name] for name in first.values()}
    return train_end(
        *(params_a, params_b, task, config, start, complete), generator=generator, progress=progress, on_step=on_step
    )


def train_end(
    params_a: Mapping[str, Tensor],
    params_b: Mapping[str, Tensor],
    task: Task,
    config: LineTrainingConfig,
    start: Mapping[str, Tensor],
    complete: Callable[[Params], Params],
    *,
    generator: torch.Generator,
    progress: Progress,
    on_step: OnStep | None = None,
) -> FlatLine:
    """Train from `start` until the linear path from `params_a` to the network that `complete` builds has no barrier."""
    fixed = {name: tensor.detach() for name, tensor in params_a.items()}

    def loss(learned: Params, batch: Batch) -> Tensor:
        return line_loss(task, fixed, complete(learned), batch, segments=config.segments, generator=generator)

    assert config.steps is not None
    found = minimize(
        differentiate(loss),
        start,
        minibatches(task, config.batch, generator),
        config,
        progress=progress,
        on_step=on_step,
    )
    with torch.no_grad():
        params = complete(found.params)
    before, after = (line(params_a, end, task, config.points) for end in (params_b, params))
    return FlatLine(
        params,
        before,
        after,
        moved=distance(params_b, params),
        distance=distance(params_a, params),
        distance_before=distance(params_a, params_b),
        losses=found.losses,
    )


def first_names(task: Task, params: Mapping[str, Tensor]) -> dict[str, str]:
    """Return a map from every parameter name of the task's module to the parameter's first name.

    A tied parameter has several names.

    Raises:
        ValueError: The network lacks the first name of a parameter.
    """
    first: dict[int, str] = {}
    named = task.module.named_parameters(remove_duplicate=False)
    names = {name: first.setdefault(id(parameter), name) for name, parameter in named}
    missing = [name for name in first.values() if name not in params]
    if missing:
        raise ValueError(
            f"the networks lack {missing[:5]}, which the task's module has; they must be of its architecture"
        )
    return names


def line_loss(
    task: Task,
    params_a: Mapping[str, Tensor],
    params: Mapping[str, Tensor],
    batch: Batch,
    *,
    segments: int,
    generator: torch.Generator,
) -> Tensor:
    """Return the mean loss at `params` and at random points on the linear path from `params_a` to `params`.

        (loss(p) + sum_i loss((1 - l_i) a + l_i p)) / (segments + 1)

    Each of `segments` equal parts of the path has one random point l_i, uniform in [i / segments, (i + 1) / segments).
    """
    offsets = torch.rand(segments, generator=generator, dtype=torch.float64)
    total = task.loss(params, batch)
    for k in range(segments):
        t = (k + float(offsets[k])) / segments
        total = total + task.loss(task.prepare_average(combine((params_a, params), (1 - t, t))), batch)
    return total / (segments + 1)


def minibatches(task: Task, examples: int | None, generator: torch.Generator) -> Iterator[Batch]:
    """Yield the task's batches forever. Unless `examples` is None, each batch is reduced to random rows, sampled with
    replacement.

    Raises:
        ValueError: There are no batches, or the tensors of a batch have different numbers of rows.
    """
    for batch in cycle(task):
        if examples is None:
            yield batch
            continue
        counts = {len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)}
        if len(counts) != 1:
            raise ValueError(
                f"the tensors of a batch have {sorted(counts)} rows, so its examples cannot be told apart; give "
                "examples=None to use whole batches"
            )
        index = torch.randint(counts.pop(), (examples,), generator=generator)

        def select(leaf: Any, index: Tensor = index) -> Any:
            return leaf.index_select(0, index.to(leaf.device)) if isinstance(leaf, Tensor) else leaf

        yield tree_map(select, batch)


Trained = TypeVar("Trained", bound=ControlledPath)


@check_arguments
def train_path(
    params_a: Mapping[str, Tensor],
    params_b: Mapping[str, Tensor],
    task: Task,
    path: Trained,
    *,
    generator: torch.Generator | None = None,
    steps: int = 300,
    optimizer: Optimizer | None = None,
    schedule: Schedule | None = None,
    progress: Progress = no_progress,
    on_step: OnStep | None = None,
) -> Trained:
    """Optimize the inner control points of a path to minimize the expected loss at a uniformly random point of the
    path.

    Every step uses one batch and one random t. Align the networks first. Between unaligned networks, the curve mostly
    learns a detour around a symmetry, which an alignment removes at no cost.

    Only parameters are trained. Buffers are combined with the same weights as parameters. If a model has batch
    normalization, the task needs a `prepare` function that recomputes the statistics. The `prepare` function should use
    few batches, because it runs in every step. Gradients do not flow through `prepare`.

    Args:
        params_a: The network at t = 0. The given network is not modified.
        params_b: The network at t = 1. The given network is not modified.
        task: The task, with module, batches and loss. The batches are used in their order, repeatedly.
        path: The initial path, such as `Bezier.between(a, b)`. The given path is not modified.
        generator: The generator that samples t, on the CPU. Default: a generator with seed 0.
        optimizer: The optimizer. Default: Adam with a learning rate of 0.01.
        schedule: The schedule of the learning rate. Default: half a cosine that decreases to zero.
        on_step: A function that is called after each step with a `regauge.training.State`: the step number, loss and
            learning rate.

    Returns:
        A path of the same class with new inner points, in the dtypes of the given points.

    Raises:
        ValueError: The networks or the inner points have different parameters or contain NaN or Inf, there are no
            batches, the number of steps is zero, or the loss is not finite.

    References:
        Garipov et al. (2018), equation 2; Navon et al. (2024), section 6, for curves after alignment.
    """
    generator = given_or_seed(generator)
    if steps < 1:
        raise ValueError(f"steps={steps} cannot train a path: at least one is needed")
    require_comparable((params_a, params_b), task)
    for point in path.inner:
        require_same_shapes(params_a, point)
    first = first_names(task, params_a)
    ends = [{name: tensor.detach() for name, tensor in end.items()} for end in (params_a, params_b)]
    learned = {
        _key(k, name): point[name].detach().to(torch.promote_types(point[name].dtype, torch.float32))
        for k, point in enumerate(path.inner)
        for name in first.values()
    }

    def complete(learned: Params) -> list[Params]:
        """Return the inner points with trained parameters inserted under all names of each parameter."""
        return [
            {name: learned[_key(k, first[name])] if name in first else tensor for name, tensor in point.items()}
            for k, point in enumerate(path.inner)
        ]

    def loss(learned: Params, batch: Batch) -> Tensor:
        t = float(torch.rand((), generator=generator, dtype=torch.float64))
        params = combine((ends[0], *complete(learned), ends[1]), path.weights(t))
        return task.loss(task.prepare_average(params), batch)

    found = minimize(
        differentiate(loss),
        learned,
        cycle(task),
        DescentConfig(steps=steps, optimizer=optimizer or Adam(1e-2), schedule=schedule or Cosine()),
        progress=progress,
        label="training the path",
        on_step=on_step,
    ).params
    return type(path)(
        tuple(round_alike(moved, point) for point, moved in zip(path.inner, complete(found), strict=True))
    )


def _key(point: int, name: str) -> str:
    return f"{point}.{name}"

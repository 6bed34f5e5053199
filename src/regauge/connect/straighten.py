"""Training for a low loss between two networks, by moving one network (straightening) or the inner points of a path."""

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
    """Settings for training one end of a line until the line is flat.

    A batch is drawn from a batch of the task, with replacement; `batch=None` takes the task's batches whole.

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
    """A network that was trained until the loss on the line from another network is small.

    Unlike an aligned network, it computes a different function than the initial network of the training.

    Attributes:
        before: The line from the first network to the second one, before training.
        after: The line from the first network to `params`.
        moved: Euclidean distance between the second network and `params`.
        distance: Euclidean distance between the first network and `params`.
        distance_before: Euclidean distance between the first and the second network.
        losses: The training loss in every step, `[steps]`.
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
        """The relative decrease of the distance to the first network: 1 is a collapse onto it, and 0 is no change."""
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

    The default learning rate, 3e-4, suits networks 64 to 512 wide; up to 128, 1e-3 gets further in as many steps.
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
    """Train the second network until the loss on the line from the first network is small.

    This is the loss of `hyper_match` without the hypernetwork, which only reparametrizes the result if there is a
    single pair. Align the second network first so that training needs to move it only a little. Nothing keeps the
    result close to the initial network, and the first network itself is also a minimum. `FlatLine.approach` measures
    how far the result collapsed onto the first network.

    Parameters are trained, and buffers are kept. Any model and loss can be used.

    Args:
        params_a: The network at the fixed end, unchanged.
        params_b: The start of training, unchanged.
        generator: The generator that samples examples and points on the line; one with seed 0 by default.
        on_step: Called after each step with its number, loss and rate, as a `regauge.training.State`.

    Raises:
        ValueError: The networks have different parameters, lack a parameter of the task's module, or hold NaN or Inf.
            There are no batches, or the loss is not finite.

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
    """Train parameters from `start` until the line from `params_a` to the network built by `complete` is flat."""
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
    """Map every name of a parameter of the task's module to its first name; tied parameters have several.

    Raises:
        ValueError: The network lacks a first name.
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
    """Return the mean loss at `params` and at one random point in each of `segments` equal parts of the line from
    `params_a`.

        (loss(p) + sum_i loss((1 - l_i) a + l_i p)) / (segments + 1)

    with l_i uniform in [i / segments, (i + 1) / segments).
    """
    offsets = torch.rand(segments, generator=generator, dtype=torch.float64)
    total = task.loss(params, batch)
    for k in range(segments):
        t = (k + float(offsets[k])) / segments
        total = total + task.loss(task.prepare_average(combine((params_a, params), (1 - t, t))), batch)
    return total / (segments + 1)


def minibatches(task: Task, examples: int | None, generator: torch.Generator) -> Iterator[Batch]:
    """Yield the task's batches forever, each reduced to `examples` random rows with replacement, unless None.

    Raises:
        ValueError: There are no batches, or tensors of a batch have different numbers of rows.
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
    """Minimize the expected loss at a uniformly random point of a path, over the inner control points of the path.

    Every step uses one batch and one t. Align the networks first. Otherwise the curve mostly learns a detour around a
    symmetry, which an alignment removes at no cost.

    Only parameters are trained; buffers are combined like weights. For models with batch normalization, give the task a
    `prepare` that recomputes the statistics. It should use few batches, because it runs in every step. Gradients do not
    flow through `prepare`.

    Args:
        params_a: The network at t = 0, unchanged.
        params_b: The network at t = 1, unchanged.
        task: Module, batches, loss. Batches are used in their order, again and again.
        path: The initial path, such as `Bezier.between(a, b)`; it is not changed.
        generator: The generator that samples t, on the CPU; one with seed 0 by default.
        optimizer: Adam with a learning rate of 0.01 by default.
        schedule: The schedule of the learning rate; half a cosine down to zero by default.
        on_step: Called after each step with its number, loss and rate, as a `regauge.training.State`.

    Returns:
        A path of the same kind with new inner points, in the dtypes of the old points.

    Raises:
        ValueError: The networks or the inner points have different parameters or hold NaN or Inf, there are no
            batches, there is no step, or the loss is not finite.

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
        """Put trained parameters into the inner points, under all names of each parameter."""
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

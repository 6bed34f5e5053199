"""Problems for alignment methods: pairs of networks, or many networks, with a symmetry, a task and a generator."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor

from regauge.alignment.result import ManyResult, Result, Results
from regauge.core.element import Element, materialize, stack
from regauge.core.interpolation import interpolate
from regauge.core.params import (
    Params,
    count_models,
    require_alike,
    require_finite,
    require_movable,
    require_same_shapes,
    select,
)
from regauge.core.symmetry import Symmetry
from regauge.core.task import Task, between_ends

NOTHING: Mapping[str, Tensor] = MappingProxyType({})
NOTHING_KEPT = "there are too few examples to keep some: the same examples were used to learn and to choose elements"


class _Setting:
    """The task and the generator of an alignment problem, for methods that use them."""

    task: Task | None
    generator: torch.Generator | None

    def require_task(self, method: object) -> Task:
        """Return the task, or raise an error if there is none. Methods that need a task call `require_task`.

        Raises:
            ValueError: The caller gave no task.
        """
        if self.task is None:
            raise ValueError(
                f"{type(method).__name__} needs data: give align a `task=regauge.Task(module, batches, criterion)`, or "
                "choose a method that needs no data, such as WeightMatching"
            )
        return self.task

    def require_generator(self, why: str) -> torch.Generator:
        """Return the generator, or raise an error if there is none. Methods that use random numbers call
        `require_generator`.

        Raises:
            ValueError: The caller gave no generator.
        """
        if self.generator is None:
            raise ValueError(f"{why}; give align a torch.Generator as `generator`")
        return self.generator


@dataclass(frozen=True)
class Problem(_Setting):
    """Pairs of networks to align: an element should bring the second network of each pair close to the first.

    Attributes:
        a: The first networks, with a leading pair axis on every tensor. A single pair is a batch of size one. If all
            pairs share the first network, its tensors may be expanded (stride zero along the pair axis).
        b: The second networks, with the same names and shapes.
        symmetry: The symmetry of all networks. All sizes of its groups are known.
        task: Model, data and loss, for methods that need a task.
        generator: The random number generator, for methods that use random numbers.
        judge: The task that selects among elements, on examples outside `task`; see `divided`. Default: the examples of
            `task` itself.
    """

    a: Mapping[str, Tensor]
    b: Mapping[str, Tensor]
    symmetry: Symmetry
    task: Task | None = None
    generator: torch.Generator | None = None
    judge: Task | None = None

    @property
    def pairs(self) -> int:
        """The number of pairs of networks."""
        return next((len(tensor) for tensor in self.b.values()), 1)

    def pair(self, k: int) -> tuple[Params, Params]:
        """Return both networks of one pair, without the leading pair axis."""
        return select(self.a, k), select(self.b, k)

    def __getitem__(self, rows: slice | Tensor) -> "Problem":
        """Return the problem with only the selected pairs. If all pairs are selected in order, no tensor is copied."""
        if isinstance(rows, Tensor) and torch.equal(rows, torch.arange(self.pairs)):
            return self
        return replace(self, a=select(self.a, rows), b=select(self.b, rows))

    def move(self, element: Element, moved: Mapping[str, Tensor] = NOTHING) -> Params:
        """Return the second networks after a batch of elements was applied.

        Tensors in `moved` are already transformed, and are not computed again.
        """
        alike = {n: t for n, t in moved.items() if t.dtype == self.b[n].dtype and t.device == self.b[n].device}
        done = {name: tensor for name, tensor in alike.items() if name not in self.symmetry.added}
        return {**self.symmetry.act(element, self.b, skip=done), **done}

    def divided(self, kept: float) -> tuple["Problem", tuple[str, ...]]:
        """Return the problem with a fraction of the examples held out to select among elements, and notes.

        If examples are already held out, the problem is returned unchanged. Therefore a method and the methods in its
        settings use the same held-out examples.

        Args:
            kept: The fraction of the examples to hold out. If zero, all examples are used both for learning and for
                selection.
        """
        if self.task is None or self.judge is not None or not kept:
            return self, ()
        try:
            seen, judge = self.task.split(1 - kept)
        except ValueError:
            return replace(self, judge=self.task), (NOTHING_KEPT,)
        return replace(self, task=seen, judge=judge), ()

    def line_losses(self, params: Mapping[str, Tensor], points: Sequence[float] = (0.5,)) -> Tensor:
        """Return the mean loss at points of the linear paths from the first to transformed second networks, `[pairs]`.

        The loss is computed by the task `judge`, in float64. If `judge` has no targets, the outputs are compared with
        the interpolated outputs of both endpoints, `(1 - t) f(a) + t f(b)`. The loss is the mean squared difference.
        """
        task = self.task if self.judge is None else self.judge
        assert task is not None
        found: list[list[float]] = []
        for k in range(self.pairs):
            a, b = select(self.a, k), select(params, k)
            found.append([])
            for t in points:
                judge = task if task.has_targets else between_ends(task, a, b, t)
                found[-1].append(judge.evaluate_average(interpolate(a, b, t))["loss"])
        return torch.tensor(found, dtype=torch.float64).mean(1)

    def result(
        self,
        element: Element,
        *,
        objective: Tensor | float,
        initial: Tensor | float,
        history: Tensor | Sequence[float] = (),
        starts: Tensor | Sequence[float] = (),
        is_converged: Tensor | bool | None = None,
        moved: Mapping[str, Tensor] = NOTHING,
        notes: tuple[str, ...] = (),
    ) -> Results:
        """Return the result of a method for given elements, with the transformed second networks.

        The documentation of `Result` describes all arguments that are not listed below. For a single pair, numbers may
        be floats. A method omits the arguments that do not apply to it.

        Args:
            element: One element for each pair, or one element for all pairs.
            moved: Tensors of the second networks that are already transformed, with the same bits as `Symmetry.act`
                returns.
            notes: Messages about properties of the first network that the second network could not adopt.
        """

        def numbers(values: Tensor | Sequence[float] | float) -> Tensor:
            return torch.as_tensor(values, dtype=torch.float64, device="cpu")

        element = materialize(element, self.symmetry.groups)
        element = element if element.batch else element.expand(self.pairs)
        return Result(
            symmetry=self.symmetry,
            element=element,
            params=self.move(element, moved),
            objective=numbers(objective).reshape(self.pairs),
            initial=numbers(initial).reshape(self.pairs),
            history=numbers(history).reshape(-1, self.pairs),
            starts=numbers(starts).reshape(-1, self.pairs),
            is_converged=None if is_converged is None else torch.as_tensor(is_converged).reshape(self.pairs),
            is_judged=self.task is not None,
            notes=notes,
        )


@dataclass(frozen=True)
class ManyProblem(_Setting):
    """Two or more networks to align with one another.

    Attributes:
        networks: The networks, with the same names and shapes.
        symmetry: The symmetry of all networks. All sizes of its groups are known.
        task: Model, data and loss, for methods that need a task.
        generator: The random number generator, for methods that use random numbers.
    """

    networks: Sequence[Mapping[str, Tensor]]
    symmetry: Symmetry
    task: Task | None = None
    generator: torch.Generator | None = None

    def result(
        self,
        elements: Sequence[Element],
        *,
        objective: float,
        initial: float,
        history: Sequence[float] = (),
        starts: Sequence[float] = (),
        is_converged: bool | None = None,
        params: Sequence[Params] = (),
        notes: tuple[str, ...] = (),
    ) -> ManyResult:
        """Return the result of a method, with one element for each network. The first element is the identity.

        The elements are applied to the networks unless `params` contains the transformed networks.
        """
        elements = [materialize(element, self.symmetry.groups) for element in elements]
        first, rest = dict(self.networks[0]), zip(elements[1:], self.networks[1:], strict=True)
        return Result(
            symmetry=self.symmetry,
            element=stack(elements),
            params=tuple(params) or (first, *(self.symmetry.act(element, network) for element, network in rest)),
            objective=objective,
            initial=initial,
            history=tuple(history),
            starts=tuple(starts),
            is_converged=is_converged,
            is_judged=self.task is not None,
            notes=notes,
        )


def bind_networks(networks: Sequence[Mapping[str, Tensor]], symmetry: Symmetry, hint: str) -> Symmetry:
    """Return the symmetry with all sizes known, after checking that the networks can be aligned with it.

    If a network is a population, an error is raised whose message ends with `hint`.

    Raises:
        KeyError: A parameter on which the symmetry acts is missing.
        ValueError: The networks have different parameters, do not fit the symmetry, contain NaN or Inf, or are
            populations.
    """
    first = networks[0]
    require_alike(*networks, structure=symmetry.structure)
    symmetry = symmetry.bind(first).stored_in(first)
    for network in networks:
        require_movable(symmetry.groups, network, symmetry.buffers)
        symmetry.require_ones(network)
    for name in symmetry.sites:
        if first[name].ndim != len(symmetry.shapes[name]):
            raise ValueError(f"{name!r} has shape {tuple(first[name].shape)}, with a leading model axis; {hint}")
    return symmetry


def bind_pairs(a: Mapping[str, Tensor], b: Mapping[str, Tensor], symmetry: Symmetry) -> tuple[Params, Symmetry]:
    """Return the first networks with a leading pair axis, and the symmetry with all sizes known, after all checks.

    The second networks must have a leading axis. The first networks must have a leading axis too, unless there is a
    single first network.

    Raises:
        KeyError: A parameter on which the symmetry acts is missing.
        ValueError: The networks have different parameters, do not fit the symmetry, differ in number, or contain NaN or
            Inf.
    """
    symmetry = symmetry.bind(b).stored_in(b)
    for name in symmetry.sites:
        if b[name].ndim != len(symmetry.shapes[name]) + 1:
            raise ValueError(
                f"{name!r} of the second networks has shape {tuple(b[name].shape)}, without one leading model "
                "axis; stack the networks along a new first axis, or align a single pair with `regauge.align`"
            )
    pairs = count_models(b)
    first = next((name for name in (*symmetry.sites, *b) if name in a), None)
    if first is not None and a[first].ndim == b[first].ndim - 1:
        require_same_shapes(a, select(b, 0))
        require_finite(a, "the first network", symmetry.structure)
        a = {name: tensor.expand(pairs, *tensor.shape) for name, tensor in a.items()}
    elif first is not None and a[first].ndim and len(a[first]) != pairs:
        raise ValueError(
            f"there are {len(a[first])} first networks and {pairs} second ones (along the leading axis of "
            f"{first!r}); give as many of both, or a single first network without a model axis"
        )
    require_same_shapes(a, b)
    require_movable(symmetry.groups, a, symmetry.buffers)
    for which, params in (("first", a), ("second", b)):
        for name, tensor in params.items():
            if tensor.is_floating_point() and not math.isfinite(tensor.sum()):
                for k in range(pairs):
                    require_finite({name: tensor[k]}, f"network {k} of the {which} population", symmetry.structure)
        symmetry.require_ones(params)
    return dict(a), symmetry

"""Tasks: the data and the loss with which methods evaluate networks of one architecture."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from regauge.core.counted import count
from regauge.core.given import as_pair, describe, given_or_seed, require_batches, require_module, require_tensors
from regauge.core.interpolation import interpolate
from regauge.core.outputs import Outputs, evaluating, output_tensors
from regauge.core.params import Params
from regauge.core.split import split_batches

Batch = tuple[Any, Any]
"""Inputs (a tensor, a tuple of positional or a mapping of keyword arguments) and targets."""


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy, in nats, of logits `[..., classes]` and classes `[...]`; targets of -100 are
    ignored.

    Raises:
        ValueError: The targets are not class indices of these logits.
    """
    if not isinstance(targets, Tensor):
        raise ValueError(
            f"the targets of a batch are {'None' if targets is None else describe(targets)}, but cross entropy needs a "
            "tensor of classes: give batches [(inputs, classes), ...], or a criterion that reads outputs alone, as in "
            "Task(module, batches, criterion=lambda outputs, _: ...)"
        )
    logits = outputs.reshape(-1, outputs.shape[-1])
    try:
        return functional.cross_entropy(logits, targets.reshape(-1))
    except (IndexError, RuntimeError, ValueError) as error:
        bounds = f", from {targets.min():g} to {targets.max():g}," if targets.numel() else ""
        raise ValueError(
            f"targets of shape {tuple(targets.shape)} and {targets.dtype}{bounds} do not fit the outputs of the task, "
            f"whose shape is {tuple(outputs.shape)}. Cross entropy needs one class for each row, an integer from 0 to "
            f"{outputs.shape[-1] - 1}, or -100 for rows that are left out; for other targets give Task(..., criterion=)"
        ) from error


@dataclass(frozen=True, repr=False)
class Task:
    """The module, the batches and the criterion with which networks of one architecture are evaluated.

    Attributes:
        module: The module that is called with the parameters of each network, always in evaluation mode. The parameters
            stored in the module are not used.
        batches: Pairs (inputs, targets); inputs are a tensor, a tuple of positional or a mapping of keyword
            arguments. Batches are read several times, so pass a list, a data loader, or another collection.
        criterion: A differentiable function that returns the mean loss of a batch from the output and the targets.
        outputs: The output that is compared with the targets: a field name of the module's result, or a function of the
            result. By default it is the first tensor of the result.
        prepare: A function that prepares an average of networks before it is evaluated, such as `reset_batchnorm`. The
            function also prepares the networks that the average is compared with: the ends of a line, or the merged
            networks. By default no network is prepared.
        name: The name of the data in model cards and reports.
        has_targets: Whether the batches have targets. Without targets, the task only compares outputs of networks, and
            no loss is reported.

    Raises:
        TypeError: `module` is not a module, or `batches` is not a collection of pairs.
        ValueError: `batches` is an iterator, which can be read only once.
    """

    module: nn.Module
    batches: Iterable[Batch]
    criterion: Callable[[Tensor, Any], Tensor] = cross_entropy
    outputs: Outputs = None
    prepare: Callable[[Params], Params] | None = None
    name: str = ""
    has_targets: bool = True

    def __post_init__(self) -> None:
        require_module(self.module)
        require_batches(self.batches)
        for batch in self.batches if isinstance(self.batches, list | tuple) else ():
            as_pair(batch)

    def __repr__(self) -> str:
        size = count(self.batches, "batch", "batches") if isinstance(self.batches, Sized) else "batches"
        return f"Task({type(self.module).__name__}, {size})"

    def split(self, share: float = 0.5, *, generator: torch.Generator | None = None) -> "tuple[Task, Task]":
        """Split the examples at random into a task for choosing and a task for evaluating the choice.

        Both tasks keep the `prepare` function of this task, which computes statistics from the data that it holds. If
        the tensors of a batch differ in the length of their first axis, single examples cannot be separated, and whole
        batches are sampled.

        Args:
            share: The share of the examples in the first task, between 0 and 1. Each task gets at least one example.
            generator: Source of randomness for sampling the examples; a generator with seed 0 by default.

        Raises:
            ValueError: The share is not between 0 and 1, or there is only one example.
        """
        generator = given_or_seed(generator)
        first, second = split_batches(self.batches, share, generator)
        told = f"the examples of {self.name or 'the data'}"
        return (
            replace(self, batches=first, name=f"{100 * share:.3g}% of {told}, drawn at random"),
            replace(self, batches=second, name=f"the other {100 * (1 - share):.3g}% of {told}"),
        )

    def run(self, params: Mapping[str, Tensor], inputs: Any) -> Tensor:
        """Return the output of the network with these parameters. The call is differentiable and works under
        `torch.func.vmap`.
        """
        with evaluating(self.module):
            result = call(self.module, params, inputs)
        return output_tensors(result, self.outputs)[0]

    def loss(self, params: Mapping[str, Tensor], batch: Batch) -> Tensor:
        """Return the mean loss of one batch."""
        inputs, targets = as_pair(batch)
        return self.criterion(self.run(params, inputs), targets)

    def midpoint_loss(self, params_a: Mapping[str, Tensor], params_b: Mapping[str, Tensor]) -> float:
        """Return the mean loss, over all batches, of the network halfway between two networks."""
        return self.evaluate_average(interpolate(params_a, params_b))["loss"]

    def prepare_average(self, average: Params) -> Params:
        """Prepare an average of networks with `prepare`, if it is given."""
        return average if self.prepare is None else self.prepare(average)

    def evaluate_average(self, average: Params) -> dict[str, float]:
        """Prepare an average of networks with `prepare` and evaluate it."""
        return self.evaluate(self.prepare_average(average))

    def evaluate(self, params: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the mean "loss" over all batches, each weighted by its number of targets, for `rg.line`.

        If targets are classes and the output has one more axis than the targets, "accuracy" is also returned.

        Raises:
            TypeError: `params` is not a dictionary of tensors.
            ValueError: There are no batches.
        """
        require_tensors(params)
        with torch.no_grad():
            metrics = self._average(lambda inputs, targets: self._judge(params, inputs, targets), lead=0)
        return {name: float(value) for name, value in metrics.items()}

    def evaluate_each(self, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Evaluate all networks of a population in the same calls and return metrics as float64 `[models]`.

        Args:
            params: Parameters with a leading model axis on every tensor.

        Raises:
            ValueError: There are no batches.
        """
        run = torch.func.vmap(self._judge, in_dims=(0, None, None))
        with torch.no_grad():
            return self._average(lambda inputs, targets: run(dict(params), inputs, targets), lead=1)

    def _judge(self, params: Mapping[str, Tensor], inputs: Any, targets: Any) -> tuple[Tensor, Tensor]:
        output = self.run(params, inputs)
        return self.criterion(output, targets), output

    def _average(self, judge: Callable[[Any, Any], tuple[Tensor, Tensor]], lead: int) -> dict[str, Tensor]:
        """Return the metrics, over all batches, of one network or of many networks on a leading axis."""
        loss, correct = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
        count = classified = 0
        for inputs, targets in map(as_pair, self.batches):
            losses, outputs = judge(inputs, targets)
            counted = math.prod(outputs.shape[lead : lead + 1]) if targets is None else _count_targets(targets)
            loss = loss + torch.as_tensor(losses).double() * counted
            count += counted
            is_class = isinstance(targets, Tensor) and not targets.is_floating_point()
            if is_class and outputs.shape[lead:-1] == targets.shape:
                correct = correct + (outputs.argmax(-1) == targets).flatten(lead).sum(-1)
                classified += counted
        if not count:
            raise ValueError("the task has no batches to evaluate on; give at least one")
        return {"loss": loss / count} | ({"accuracy": correct / classified} if classified else {})


@dataclass(frozen=True)
class _BetweenEnds:
    """Batches whose targets lie between the outputs of two networks. The targets are computed when a batch is read."""

    task: Task
    a: Mapping[str, Tensor]
    b: Mapping[str, Tensor]
    t: float

    def __iter__(self) -> Iterator[Batch]:
        for inputs, _ in map(as_pair, self.task.batches):
            with torch.no_grad():
                targets = torch.lerp(self.task.run(self.a, inputs), self.task.run(self.b, inputs), self.t)
            yield inputs, targets


def between_ends(task: Task, a: Mapping[str, Tensor], b: Mapping[str, Tensor], t: float) -> Task:
    """Return a task without labels whose targets interpolate the outputs of two networks: `(1 - t) f(a) + t f(b)`."""
    batches = _BetweenEnds(task, a, b, t)
    return replace(task, batches=batches, criterion=functional.mse_loss, has_targets=True)


Judge = Task | Callable[[Params], Mapping[str, float]]
"""A judge of networks: a task, or a function from parameters to metrics, such as {"loss": 0.1}."""


def choose_and_judge(
    task: Task, test: Task | None = None, *, generator: torch.Generator | None = None
) -> tuple[Task, Task]:
    """Return the task for choosing and the task for evaluating: both as given, or two halves of the given task.

    Args:
        task: The task for choosing: methods match, compute or train on its data.
        test: The task that evaluates the choice. By default half of the examples of `task` are used for this and are
            not used for choosing.
        generator: Source of randomness for sampling the halves; a generator with seed 0 by default.

    Raises:
        ValueError: `test` is not given, and the task cannot be split.
    """
    return task.split(generator=generator) if test is None else (task, test)


def choose_and_try_to_judge(task: Task, test: Task | None = None) -> tuple[Task, Task | None]:
    """Call `choose_and_judge`. If the examples cannot be split, use all of them for choosing, and return no task for
    evaluating.
    """
    try:
        return choose_and_judge(task, test)
    except ValueError:
        return task, None


def evaluate(params: Any, judge: Task | Callable[[Any], Mapping[str, float]]) -> dict[str, float]:
    """Return the metrics of a network, computed by a task or a function.

    Raises:
        TypeError: The function does not return a mapping.
    """
    metrics = judge.evaluate(params) if isinstance(judge, Task) else judge(params)
    if not isinstance(metrics, Mapping):
        raise TypeError(f"the judge returned {describe(metrics)}; return a mapping of metrics, as in {{'loss': 0.1}}")
    return {name: float(value) for name, value in metrics.items()}


def arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the inputs of a batch as positional and keyword arguments."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,), {}


def call(module: nn.Module, params: Mapping[str, Tensor], inputs: Any) -> Any:
    """Run a module with parameters on the inputs of a batch. Tied tensors may be given under all their names."""
    args, kwargs = arguments(inputs)
    # Torch refuses several names of a tied tensor, unless tying is turned off.
    is_partial = not module.state_dict(keep_vars=True).keys() <= params.keys()
    try:
        return torch.func.functional_call(module, dict(params), args, kwargs, tie_weights=is_partial)
    except RuntimeError as error:
        own, given = _floats(params.values()), _floats([*args, *kwargs.values()])
        if not given or own == given or not any(part in str(error) for part in ("dtype", "type (")):
            raise
        raise ValueError(
            f"the parameters are {_list_dtypes(own)} and the inputs {_list_dtypes(given)}, which "
            f"{type(module).__name__} cannot compute with; convert one of them, as in "
            "{name: tensor.float() for name, tensor in params.items()}"
        ) from error


def _floats(values: Iterable[Any]) -> set[torch.dtype]:
    """Return the floating-point dtypes among some values."""
    return {value.dtype for value in values if isinstance(value, Tensor) and value.is_floating_point()}


def _list_dtypes(dtypes: set[torch.dtype]) -> str:
    return " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))


def _count_targets(targets: Any) -> int:
    """Return the number of targets over which the loss of a batch is a mean; negative targets (-100) are not
    counted.
    """
    if isinstance(targets, Tensor) and not targets.is_floating_point():
        return int((targets >= 0).sum())
    return len(targets)

"""Tasks: the data and the loss that are used to evaluate networks of one architecture."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from regauge.core.counted import count
from regauge.core.given import as_pair, describe, given_or_seed, require_batches, require_module, require_tensors
from regauge.core.interpolation import interpolate
from regauge.core.outputs import Outputs, evaluating, output_tensors
from regauge.core.params import Params
from regauge.core.split import split_batches

NUMBERS_AT_ONCE = 1 << 19
"""The number of networks that are evaluated together without gradients, times the number of entries in the inputs.

The activations of larger groups of small CNNs do not fit in a processor's cache, and take more time and memory.
"""
Batch = tuple[Any, Any]
"""A batch: a pair of inputs and targets.

Inputs are a tensor, a tuple of positional arguments, or a mapping of keyword arguments.
"""


def over_networks(function: Callable[[Params], Any], params: Mapping[str, Tensor], inputs: Any) -> Any:
    """Apply a function, which runs one network on the given inputs, to all networks of a population.

    Without gradients, only some networks are evaluated together, so that their activations need little memory.
    """
    size: int | None = None
    if not torch.is_grad_enabled():
        numbers = sum(one.numel() for one in pytree.tree_leaves(inputs) if isinstance(one, Tensor))
        size = max(1, NUMBERS_AT_ONCE // max(1, numbers))
    with sdpa_kernel(SDPBackend.MATH):  # the other kernels of attention are not batched over networks
        return torch.func.vmap(function, chunk_size=size)(dict(params))


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy in nats of logits `[..., classes]`; labels `[...]` of -100 are ignored.

    Raises:
        ValueError: The targets are not valid class labels for the logits.
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
    """The module, the batches and the criterion that evaluate networks of one architecture.

    Attributes:
        module: The module that is called with the parameters of each network, in evaluation mode. Parameters that are
            stored in the module are not used.
        batches: Pairs (inputs, targets). Inputs are a tensor, a tuple of positional arguments, or a mapping of keyword
            arguments. Batches are iterated several times. Therefore pass a list of batches, a data loader, or another
            collection.
        criterion: A differentiable function of output and targets that returns the mean loss of a batch.
        outputs: The output that is compared with the targets: a field name of the module's result, or a function of the
            result. Default: the first tensor in the module's result.
        prepare: A function that prepares an average of networks before evaluation, such as `reset_batchnorm`. Networks
            with which an average is compared, such as the endpoints of a path, are prepared in the same way. Default:
            averages are evaluated without preparation.
        name: The name of the data in model cards and reports.
        has_targets: Whether the batches have targets. Without targets, the task only compares the outputs of networks,
            and reports no loss.

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
        """Split the examples at random into two tasks: one for making a choice, and one for evaluating the choice.

        The two new tasks have the `prepare` function of the original task. The data of the `prepare` function are not
        split. If the first axes of a batch's tensors differ in length, whole batches instead of examples are assigned
        at random.

        Args:
            share: The fraction of the examples that go to the first task, between 0 and 1. Each task gets at least one
                example.
            generator: The source of randomness. Default: a generator with seed 0.

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
        """Return the output of the network with given parameters.

        The call is differentiable and works under `torch.func.vmap`.
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
        """Prepare an average of networks with `prepare`. If the task has no `prepare`, return the average unchanged."""
        return average if self.prepare is None else self.prepare(average)

    def evaluate_average(self, average: Params) -> dict[str, float]:
        """Prepare an average of networks with `prepare`, and evaluate it."""
        return self.evaluate(self.prepare_average(average))

    def evaluate(self, params: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the mean "loss" over all batches, weighted by their number of targets, as `rg.line` expects.

        The "accuracy" is also returned if targets are class labels, and the output has one more axis than the targets.

        Raises:
            TypeError: `params` is not a dictionary of tensors.
            ValueError: There are no batches.
        """
        require_tensors(params)
        with torch.no_grad():
            metrics = self._average(lambda inputs, targets: self._judge(params, inputs, targets), lead=0)
        return {name: float(value) for name, value in metrics.items()}

    def evaluate_each(self, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Evaluate all networks of a population, several at a time, and return each metric as float64 `[models]`.

        Args:
            params: The parameters, with a leading model axis on every tensor.

        Raises:
            ValueError: There are no batches.
        """
        with torch.no_grad():
            return self._average(lambda x, y: over_networks(lambda one: self._judge(one, x, y), params, x), lead=1)

    def _judge(self, params: Mapping[str, Tensor], inputs: Any, targets: Any) -> tuple[Tensor, Tensor]:
        output = self.run(params, inputs)
        return self.criterion(output, targets), output

    def _average(self, judge: Callable[[Any, Any], tuple[Tensor, Tensor]], lead: int) -> dict[str, Tensor]:
        """Return the metrics over all batches, for one network or for all networks along a leading axis."""
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
    """Batches whose targets interpolate between the outputs of two networks.

    The targets of a batch are computed when the batch is read.
    """

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
    """Return a task that needs no labels: its targets interpolate the outputs of two networks.

    The targets are `(1 - t) f(a) + t f(b)`, where f(a) and f(b) are the outputs of the two networks.
    """
    batches = _BetweenEnds(task, a, b, t)
    return replace(task, batches=batches, criterion=functional.mse_loss, has_targets=True)


Judge = Task | Callable[[Params], Mapping[str, float]]
"""A task, or a function that maps parameters to metrics such as `{"loss": 0.1}`."""


def choose_and_judge(
    task: Task, test: Task | None = None, *, generator: torch.Generator | None = None
) -> tuple[Task, Task]:
    """Return a task for making a choice and a task for evaluating it: the given tasks, or halves of one task.

    Args:
        task: The task with the data for making the choice: for matching, for statistics, or for training.
        test: The task that evaluates the result. If None, half of the examples of `task` are held out for the
            evaluation.
        generator: The source of randomness for splitting the examples of `task`. Default: a generator with seed 0.

    Raises:
        ValueError: `test` is None, and `task` cannot be split.
    """
    return task.split(generator=generator) if test is None else (task, test)


def choose_and_try_to_judge(task: Task, test: Task | None = None) -> tuple[Task, Task | None]:
    """Return a task for making a choice and a task for evaluating it, as `choose_and_judge` does, if examples can be
    split.

    If the examples cannot be split, return the given task for making a choice, and None for evaluating it.
    """
    try:
        return choose_and_judge(task, test)
    except ValueError:
        return task, None


def evaluate(params: Any, judge: Task | Callable[[Any], Mapping[str, float]]) -> dict[str, float]:
    """Return the metrics of a network, computed by a task or by a function of its parameters.

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
    """Call a module with the given parameters on the inputs of a batch.

    A tied tensor may appear in the parameters under all its names.
    """
    args, kwargs = arguments(inputs)
    # If tying is on, torch refuses parameters that contain several names of a tied tensor.
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
    """Return the number of targets in the mean loss of a batch. Negative targets (-100) do not count."""
    if isinstance(targets, Tensor) and not targets.is_floating_point():
        return int((targets >= 0).sum())
    return len(targets)


def largest_batch(task: Task) -> Batch | None:
    """Return the batch whose inputs have the most entries, or None if there are no batches."""

    def entries(batch: Batch) -> int:
        return sum(leaf.numel() for leaf in pytree.tree_leaves(batch[0]) if isinstance(leaf, Tensor))

    return max(map(as_pair, task.batches), key=entries, default=None)

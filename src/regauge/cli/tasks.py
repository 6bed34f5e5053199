"""What DATA means: batches from a factory or a file, or a signal; the task of a model on them, and networks judged."""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

import regauge as rg
from regauge.checkpoints.array_files import SUFFIXES, read_arrays
from regauge.checkpoints.checkpoint import Checkpoint
from regauge.checkpoints.formats.state_dicts import match
from regauge.checkpoints.names.extra import share_extra
from regauge.checkpoints.names.from_transformers import expected_of, name_for
from regauge.cli.compare_options import Compare
from regauge.cli.models import (
    Model,
    Networks,
    call_factory,
    described_networks,
    find_symmetry,
    load_module,
    name_model,
)
from regauge.cli.options import Between, ExampleInputs, Held, Judging, Line, Matching, UsageError
from regauge.cli.output import show_status, tell
from regauge.cli.user_code import users_code
from regauge.cli.vocabulary import bring_together
from regauge.core.params import Params
from regauge.core.task import Batch, arguments, choose_and_judge, cross_entropy

IGNORED = -100
"""The class of targets that the cross entropy leaves out."""


@dataclass(frozen=True)
class Judged:
    """Checkpoints of one architecture with the names of their model, and the task that judges them.

    The task recomputes the statistics of batch normalization where the model has any.

    Attributes:
        choosing: The data that statistics and paths come from; those of `task` where nothing comes from data.
        statistics: The data that statistics of batch normalization come from; empty where there are none.
    """

    model: Model
    checkpoints: tuple[Checkpoint, ...]
    task: rg.Task
    choosing: rg.Task
    statistics: str

    @property
    def networks(self) -> tuple[Params, ...]:
        """The parameters of the checkpoints."""
        return tuple(checkpoint.params for checkpoint in self.checkpoints)

    def tell_data(self) -> None:
        """Tell which data chose and which judged."""
        if self.statistics:
            tell(
                "in every network, the ends too, the statistics of batch normalization were recomputed from "
                f"{self.statistics}"
            )
        if self.choosing is not self.task:
            tell(f"judged by {self.task.name}")

    def symmetry(self, held: Held) -> rg.Symmetry:
        """The symmetry of the model, traced with the first batch."""
        inputs = next(iter(self.task.batches))[0]
        args, kwargs = convert(arguments(inputs), dtype_of(self.model.module.state_dict()))
        model = replace(self.model, inputs=args, kwargs=kwargs)
        chosen: Any = self.task.outputs or ()  # Those of the command line, which are names.
        return find_symmetry(model, ExampleInputs(held.keep, held.move, outputs=chosen)).bind(self.networks[0])


def read(options: Judging, paths: Sequence[Path | Checkpoint]) -> Judged:
    """Build the model and read the checkpoints and the data."""
    with show_status("building the model and reading the checkpoints"):
        opened = bring_together([Checkpoint.open(path) for path in paths]).networks
        name = name_model(options.model, opened[0])
        if name is None:
            raise UsageError(f"{opened[0].label!r} does not say what network it holds: name the model with --model")
        model = load_module(name, values="always")
        named = share_extra([name_for(one, model.module) for one in opened])
        checkpoints = tuple(
            one.with_params(match(one.params, expected_of(model.module, one), one.label)) for one in named
        )
        dtype = dtype_of(checkpoints[0].params)
        choosing, judging = _divide(options, model, dtype)
        source = _statistics(options, model) or choosing
    task = with_reset(judging, source.batches)
    return Judged(
        model,
        checkpoints,
        task,
        task if choosing is judging else choosing,
        "" if task.prepare is None else source.name,
    )


def _divide(options: Judging, model: Model, dtype: torch.dtype) -> tuple[rg.Task, rg.Task]:
    """The data that choose and the data that judge: DATA for both where nothing is chosen by DATA."""
    data = task_on(options, model, options.data, dtype)
    if options.test is not None:
        return data, task_on(options, model, options.test, dtype)
    is_elsewhere = isinstance(options, Between) and (options.statistics is not None or not has_statistics(model.module))
    if is_elsewhere and not (isinstance(options, Line) and options.trains_on_data):
        return data, data
    seed = options.seed if isinstance(options, Line) else 0
    return choose_and_judge(data, generator=torch.Generator().manual_seed(seed))


def load_batches(text: str, size: int) -> list[Batch]:
    """Load the batches that `text` names: those of a factory, or from a file, of `size` examples each."""
    if size < 1:
        raise UsageError(f"--batch is {size}; a batch has at least one example")
    if not text.endswith(SUFFIXES):
        found = call_factory(text, "DATA")
        if not isinstance(found, Iterable):
            raise UsageError(f"the factory {text!r} returned a {type(found).__name__}, but batches are needed")
        batches = [_batch(item, text) for item in found]
        if not batches:
            raise UsageError(f"the factory {text!r} returned no batches")
        _require_values(batches, text)
        return batches
    arrays = read_arrays(text)
    if not {"inputs", "targets"} <= arrays.keys():
        raise UsageError(f"{text!r} has the arrays {sorted(arrays)}, but needs 'inputs' and 'targets'")
    inputs, targets = arrays["inputs"], _signed(arrays["targets"])
    if not inputs.ndim or not targets.ndim:
        raise UsageError(f"the arrays of {text!r} are single numbers; their first axis must count the examples")
    if len(inputs) != len(targets) or len(inputs) == 0:
        raise UsageError(f"{text!r} has {len(inputs)} inputs and {len(targets)} targets; it needs one for each")
    _require_values([(inputs, targets)], text)
    return list(zip(torch.split(inputs, size), torch.split(targets, size), strict=True))


def _require_values(batches: Sequence[Batch], text: str) -> None:
    """Raise unless there are examples and all their numbers are finite."""
    for pair in batches:
        for tensor in pytree.tree_leaves(pair):
            if isinstance(tensor, Tensor) and tensor.numel() == 0:
                raise UsageError(f"{text!r} has a batch without examples")
            if isinstance(tensor, Tensor) and tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                raise UsageError(f"{text!r} has examples with NaN or Inf; leave them out")


def task_on(options: Matching | Judging | Compare, model: Model, data: str, dtype: torch.dtype) -> rg.Task:
    """The task of a model on what the user gave for DATA, with the loss, the batches and the outputs of the options.

    Floating-point inputs are converted to the dtype of the parameters.
    """
    task: rg.Task | None = None
    if model.checkpoint is not None:
        task = described_networks(model.checkpoint).find_task(model, data, loss=options.loss, dtype=dtype)
    if task is None:
        task = task_of(model.module, load_batches(data, options.batch), options.loss, dtype, options.outputs)
    return replace(task, name=data)


def matching_tasks(
    options: Matching | Compare, networks: Networks, *, is_matched: bool = True
) -> tuple[rg.Task | None, rg.Task | None]:
    """The tasks that choose and that judge for a command that aligns; statistics come from the data that choose.

    Where data match nothing, and no statistics come from them, all of them judge.
    """
    if options.data is None:
        if options.test is not None:
            raise UsageError("--test judges what is chosen by --data: give --data too")
        return None, None
    if networks.model is None:
        raise UsageError("--data needs the model that runs on them: name it with --model")
    dtype = dtype_of(networks.checkpoints[0].params)
    task, test = (
        None if text is None else task_on(options, networks.model, text, dtype) for text in (options.data, options.test)
    )
    assert task is not None
    if not is_matched and not has_statistics(networks.model.module):
        return task, test or task
    choosing, judging = choose_and_judge(task, test, generator=torch.Generator().manual_seed(options.seed))
    return with_reset(choosing), with_reset(judging, choosing.batches)


def task_of(
    module: nn.Module, batches: list[Batch], loss: str, dtype: torch.dtype, outputs: tuple[str, ...] = ()
) -> rg.Task:
    """The task of a model on these batches; floating-point inputs are converted to the dtype of its parameters."""
    converted = [(convert(inputs, dtype), targets) for inputs, targets in batches]
    task = rg.Task(module, converted, _squared_error if loss == "mse" else _cross_entropy, outputs or None)
    blank = {name: t.to(dtype) if t.is_floating_point() else t for name, t in module.state_dict().items()}
    with users_code("the model fails on the data"), torch.no_grad():
        for batch in converted:  # in whatever batch: later it would be after hours of work
            task.loss(blank, batch)
    if loss == "mse":
        return task
    # From here on the loss is that of Python, which methods recognize.
    classes = [(inputs, targets.long()) for inputs, targets in converted]
    return rg.Task(module, classes, outputs=outputs or None)


def example_task(model: Model, kwargs: Mapping[str, Any], outputs: tuple[str, ...] = ()) -> rg.Task:
    """A model on its example inputs, which have no targets; the loss is the mean square of the output."""
    inputs: Any = dict(kwargs) if kwargs else model.inputs
    if model.inputs and kwargs:
        inputs = inspect.signature(model.module.forward).bind(*model.inputs, **kwargs).arguments
    return rg.Task(model.module, [(inputs, torch.zeros(1))], _size, outputs or None, has_targets=False)


def _size(output: Tensor, _: Any) -> Tensor:
    return output.float().square().mean()


def convert(inputs: Any, dtype: torch.dtype) -> Any:
    """Inputs with their floating-point tensors in some dtype."""
    return pytree.tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, inputs)


def with_reset(task: rg.Task, data: Iterable[Batch] | None = None) -> rg.Task:
    """A task that recomputes the statistics of batch normalization for averages of networks, from data or its own."""
    if not has_statistics(task.module):
        return task
    batches = list(task.batches if data is None else data)
    return replace(task, prepare=partial(rg.reset_batchnorm, module=task.module, batches=batches))


def has_statistics(module: nn.Module) -> bool:
    """Whether a module has statistics of batch normalization."""
    return any(name.endswith("running_mean") for name in module.state_dict())


def _statistics(options: Judging, model: Model) -> rg.Task | None:
    """The data that statistics are recomputed from where the options name others than those of the task."""
    if not isinstance(options, Between) or options.statistics is None:
        return None
    if not has_statistics(model.module):
        raise UsageError("--statistics is for models with batch normalization; this one has none: leave it out")
    return task_on(options, model, options.statistics, dtype_of(model.module.state_dict()))


def dtype_of(params: Mapping[str, Tensor]) -> torch.dtype:
    """The first floating-point dtype of some parameters."""
    return next((t.dtype for t in params.values() if t.is_floating_point()), torch.float32)


def _signed(targets: Tensor) -> Tensor:
    """Targets in a dtype in which torch can compare them; what is too large becomes negative, which is no class."""
    return targets.long() if targets.dtype in (torch.uint16, torch.uint32, torch.uint64) else targets


def _batch(item: Any, text: str) -> Batch:
    if isinstance(item, tuple | list) and len(item) == 2 and isinstance(item[1], Tensor):
        return item[0], _signed(item[1])
    raise UsageError(
        f"the factory {text!r} returned a {type(item).__name__} as a batch; a batch is (inputs, targets), where "
        "targets is a tensor"
    )


def _squared_error(output: Tensor, targets: Tensor) -> Tensor:
    if output.shape != targets.shape:
        raise UsageError(
            f"the model's output has shape {tuple(output.shape)}, but the targets have {tuple(targets.shape)}; "
            "choose another output with --outputs, or other data"
        )
    return functional.mse_loss(output.float(), targets.float())


def _cross_entropy(output: Tensor, targets: Tensor) -> Tensor:
    classes = output.shape[-1]
    if output.shape[:-1] != targets.shape:
        raise UsageError(
            f"the model's output has shape {tuple(output.shape)}, with {classes} logits in each row, but the "
            f"targets have {tuple(targets.shape)}; choose another output with --outputs, or other data"
        )
    chosen = targets.long()
    if targets.is_floating_point() and not torch.equal(chosen.to(targets), targets):
        raise UsageError("the targets are no numbers of classes; for values say --loss mse")
    strange = chosen[((chosen < 0) & (chosen != IGNORED)) | (chosen >= classes)]
    if len(strange):
        raise UsageError(f"a target is class {int(strange[0])}, but the model has {classes} outputs")
    return cross_entropy(output.float(), chosen)

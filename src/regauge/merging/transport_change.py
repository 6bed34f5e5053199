"""Transfer of a fine-tune's weight change from one base to another base."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from regauge.alignment import Method, align
from regauge.alignment.align_networks import with_learning
from regauge.alignment.representatives import Rotate
from regauge.checkpoints.checkpoint import Checkpoint
from regauge.checkpoints.job import Network, open_call, with_files
from regauge.checkpoints.memory_limit import MemoryLimit
from regauge.checkpoints.names.from_transformers import name_by
from regauge.checkpoints.output import Output
from regauge.core.arguments import check_arguments
from regauge.core.counted import count, shorten
from regauge.core.element import Element
from regauge.core.given import as_params, require_batches, require_module
from regauge.core.outputs import Outputs, evaluating, output_tensors
from regauge.core.params import Params, require_alike, require_finite, require_same_names
from regauge.core.progress import Progress, no_progress
from regauge.core.split import example_counts
from regauge.core.symmetry import Symmetry
from regauge.core.task import Task, call
from regauge.merging.activation_maps import carry_by_maps
from regauge.merging.carried_adapter import GivenAdapter, loose_adapter
from regauge.merging.carried_change import CarriedChange, carry_by, expectation, plan_transport, transport_job
from regauge.merging.extract_adapter import publish_adapter

SCALES = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0)
"""The first scales of a line search; scale zero gives the second base."""
HALVINGS = 3
"""The number of times that a line search halves the distance between the best scale and its neighbors."""
ENOUGH = 24
"""The smallest number of examples of which some are held out. With fewer examples, the change is chosen and evaluated
on the same examples.
"""
NOTHING = "no transferred change lowers the loss on held-out examples: base B is returned unchanged"
FEW = f"fewer than {ENOUGH} examples: the same examples choose the scale of the change and test the change"
KEPT = 1 / 3
"""The share of the examples that is held out to evaluate the change and to choose the number of training steps."""
LOOKS = 20
"""The number of evaluations on the held-out examples during training."""
RATES = (1e-4, 1e-3)
"""Candidate learning rates; the held-out examples determine the best one."""

Mode = Literal["weights", "inputs", "task"]


@dataclass(frozen=True, repr=False)
class TransportResult:
    """The result of transferring a fine-tune's weight change to another base.

    Attributes:
        params: The second base plus the change, in the coordinates and dtypes of the second base. If the networks are
            streamed, a mapping that reads tensors on access.
        element: The element that aligns the first base to the second; None if linear maps transferred the change.
        scale: The factor of the transferred change; zero if no change lowers the loss.
        mode: The kind of data used: "weights" for no data, "inputs" for inputs without labels, or "task".
        cosine: The cosine between the change of B's outputs before training and the change of A's outputs, on the
            inputs. The change of A's outputs is the effect of the fine-tuning. None if there are no inputs.
        steps: The number of training steps after the change was added.
        notes: Remarks on tensors whose change could not be transferred, and on a change that does not lower the loss.
        adapter: The tensors of the adapter for base B, if the fine-tune is an adapter; else None.
        losses: The loss of base B, and the loss of the result, on the held-out examples. The loss of the result is not
            larger, unless `scale` is given. None without data.
    """

    params: Params = field(repr=False)
    element: Element | None
    scale: float
    mode: Mode
    cosine: float | None = None
    steps: int = 0
    notes: tuple[str, ...] = ()
    adapter: Params | None = field(default=None, repr=False)
    losses: tuple[float, float] | None = None

    def __str__(self) -> str:
        data = {"weights": "no data", "inputs": "inputs without labels", "task": "labels"}[self.mode]
        carrier = "linear maps between activations" if self.element is None else "an element of the symmetry"
        told = [f"transferred {f'by {carrier}, times {self.scale:.3g}' if self.scale else 'nothing'}, with {data}"]
        if self.cosine is not None:
            told.append(f"cosine of the change of the outputs with that of the fine-tune: {self.cosine:.4f}")
        if self.steps:
            told.append(f"then trained for {self.steps} steps")
        if self.losses is not None:
            told.append("loss on held-out examples: {:.4g} for base B, {:.4g} for the result".format(*self.losses))
        if self.adapter is not None:
            told.append(f"kept as an adapter of {count(self.adapter, 'tensor')}")
        return "\n".join([*told, *self.notes])

    def __repr__(self) -> str:
        return f"TransportResult(mode={self.mode!r}, scale={self.scale:.6g}, steps={self.steps})"


@check_arguments
@with_files
def transport(
    base_a: Network,
    tuned_a: Network,
    base_b: Network,
    symmetry: Symmetry,
    *,
    inputs: Tensor | Sequence[Any] | None = None,
    task: Task | None = None,
    module: nn.Module | None = None,
    module_a: nn.Module | None = None,
    logits: bool = True,
    scale: float | None = None,
    steps: int = 0,
    method: Method | None = None,
    rotate: Rotate = "auto",
    generator: torch.Generator | None = None,
    out: Output | str | Path | None = None,
    memory: int | str | MemoryLimit | None = None,
    progress: Progress = no_progress,
) -> TransportResult:
    """Transfer the change that fine-tuning made in base A to base B, without repeating the fine-tuning.

    Without data, `align` finds the element g that aligns A to B. The result is `base_b + scale (act(g, tuned_a) -
    act(g, base_a))`. The difference is computed after both networks are transformed, because a translation adds the
    same constant to each of them. If B is a copy of A in another gauge, the result is exactly `act(g, tuned_a)`. If the
    aligned bases have little in common, like networks from two random seeds, a note in the result states that most of
    the effect will probably be lost.

    If `inputs` are given, ridge regression between the activations of the bases yields a second candidate change. The
    aim is that B gives the same outputs on the inputs as the fine-tune of A. The loss is the Kullback-Leibler
    divergence of the predicted probabilities, or the mean squared difference of outputs that are no logits. A line
    search finds the scale of each candidate on two thirds of the inputs. The candidates and base B itself are evaluated
    on the third of the inputs that the line search does not use. If no candidate has a smaller loss than base B, the
    scale is zero, and a note in the result states this.

    If a `task` is given, the loss of the task on its labels is used instead. After the line search, Adam trains for at
    most `steps` steps on two thirds of the examples. The third of the examples that Adam does not use determines the
    learning rate and the number of steps, which may be zero. Without a task, the training reproduces the outputs of A's
    fine-tune. If there is no task, pass inputs of the task for which A was fine-tuned.

    If the fine-tune is a LoRA adapter, the result is an adapter with the same names and ranks. The change `B A` is
    multiplied from both sides, `L B A R`, and therefore keeps its rank. If a transformed matrix reads shifted inputs,
    the bias also changes, and the factors get a bias (`lora_bias` of PEFT). If the fine-tune is an adapter, training
    changes only the factors.

    Networks may be checkpoints on the disk. If the checkpoints need more than `memory`, they are streamed: weights are
    matched, and the result is written tensor by tensor.

    Args:
        base_a: The network that was fine-tuned: parameters by name, or the path of a checkpoint.
        tuned_a: The fine-tune: a network, or a LoRA adapter for `W + B A`. A LoRA adapter is a folder in PEFT's format,
            or a dictionary of factors by their names in that format. A path BASE+ADAPTER counts as a network.
        base_b: The network to which the change is added; it is not modified. The result has the structure tensors,
            integer counters and dtypes of base B.
        symmetry: The symmetry of B. If A has other widths than B, only ridge regression can transfer the change. Ridge
            regression requires `module_a`, and either `inputs` or a task.
        inputs: Batches of inputs without labels, as in `Task`, or one tensor. Default: the inputs of the task.
        task: A task with a few labeled examples, for which A was fine-tuned.
        module: The model of B, required with `inputs`. Default: the model of the task.
        module_a: The model of A, if A has other widths.
        logits: Whether outputs are logits, with the classes on the last axis. `logits` has an effect only without a
            task.
        scale: The factor of the change. By default, data choose the factor, and the factor is one without data.
        steps: The largest number of training steps, on the task or on the outputs of A's fine-tune.
        method: The method of alignment, `WeightMatching()` by default. A method may also use the inputs.
        rotate: Whether residual streams are rotated, as in `align`.
        generator: The source of randomness, which also splits the examples.
        out: The output path, or an `Output`. The result has the names, dtypes and header of base B. If the result is an
            adapter, the output is a folder. `out` and the following arguments are for networks on the disk only.
        memory: The memory limit: bytes, or a string such as "2GB". By default, half of the machine's memory.
        progress: A function that shows each pass over streamed files.

    Raises:
        FileExistsError: The output exists and may not be replaced.
        TypeError: A network is not a dictionary of tensors.
        ValueError: The networks have different parameters, or contain NaN or Inf. The bases have different widths and
            inputs are missing. Inputs are given without a module, or steps without inputs or a task. An adapter is not
            a LoRA adapter, defines a change only together with its base, or cannot store all tensors that change. The
            memory does not suffice.

    References:
        Ainsworth et al. (2023), Git Re-Basin, section 3, for the element; Ilharco et al. (2023), Editing models with
        task arithmetic, for changes that are added; Theseus (arXiv 2602.12952), for the transfer of changes by maps
        between activations. The maps of Theseus are orthogonal. The maps here come from ridge regression and have
        offsets, which preserved more of the change on digits.
    """
    if steps < 0 or (steps and task is None and inputs is None):
        raise ValueError(
            f"`steps={steps}`: training needs a task or inputs, and a number of steps that is not negative"
        )
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"scale is {scale}; give a finite factor of the change")
    named = {"base_a": base_a, "tuned_a": tuned_a, "base_b": base_b}
    settings = {"method": repr(method), "scale": scale, "steps": steps}
    files: Any = {"work": "transporting", "symmetry": symmetry, "generator": generator}
    loose = loose_adapter(tuned_a, base_a)
    order = [base_b, base_a, *([] if loose is not None else [tuned_a])]
    job = open_call("rg.transport", settings, named, networks=order, out=out, memory=memory, **files)
    given = loose if job is None else job.adapter
    if job is not None:
        job = with_learning(job, method, task)
        if job.is_streamed:
            if inputs is not None or task is not None:
                raise ValueError(f"running the model on data {job.needs_memory}")
            streamed = plan_transport(job, symmetry, method=method, rotate=rotate)
            factor, kept = 1.0 if scale is None else scale, None
            if given is not None:
                kept = GivenAdapter.of(given, job.checkpoints[1].on_meta(), streamed.symmetry)
            params, element, notes = transport_job(job, streamed, factor, progress, kept)
            if kept is None:
                return TransportResult(params, element, factor, "weights", notes=notes)
            whole = name_by(Checkpoint.open(f"{job.source.label}+{job.out}"), symmetry)
            return TransportResult(cast(Params, whole), element, factor, "weights", notes=notes, adapter=params)
        base_b, base_a, *others = (one.params for one in job.checkpoints)
        tuned_a = others[-1]
    networks = tuple(as_params(one, what) for one, what in ((base_a, "base A"), (base_b, "base B")))
    adapter = None if given is None else GivenAdapter.of(given, networks[0], symmetry)
    if adapter is not None:
        wide = {n: t.double() if n in adapter.touched else t for n, t in networks[0].items()}
        tuned_a = adapter.network(wide, adapter.params)
    tuned = as_params(tuned_a, "the fine-tune of base A")
    data = _Data.of(inputs, task, module, module_a, logits)
    made = _carry((networks[0], tuned, networks[1]), symmetry, data, scale, steps, method, rotate, generator, adapter)
    if job is not None:
        made = replace(made, notes=(*made.notes, *job.source.notes))
        if job.out is not None and adapter is not None:
            assert made.adapter is not None
            with job.stage(None) as staging:
                publish_adapter(staging, made.adapter, adapter.describe(job.source.label, made.adapter), progress)
        elif job.out is not None:
            job.write(made.params, progress=progress)
    return made


@dataclass(frozen=True)
class _Data:
    """The inputs, the models that compute outputs from these inputs, and the task; each may be missing.

    Attributes:
        batches: Inputs without targets.
        modules: The models of A and B.
        task: The task, which has the labels.
        is_other: Whether A has a model of its own.
        is_apart: Whether the inputs differ from the inputs of the task.
        logits: Whether outputs are logits.
    """

    batches: tuple[Any, ...] = ()
    modules: tuple[nn.Module, nn.Module] | None = None
    task: Task | None = None
    is_other: bool = False
    is_apart: bool = False
    logits: bool = True

    @classmethod
    def of(
        cls, inputs: Any, task: Task | None, module: nn.Module | None, module_a: nn.Module | None, logits: bool
    ) -> "_Data":
        """Return the data of a call.

        Raises:
            ValueError: Inputs are given without a module.
        """
        if inputs is None and task is None:
            return cls()
        module = task.module if module is None and task is not None else module
        if module is None:
            raise ValueError("inputs need a model: give `module`, or a task, which has one")
        is_apart = inputs is not None and task is not None
        if inputs is None:
            assert task is not None
            inputs = [one for one, _ in task.batches]
        elif isinstance(inputs, Tensor | Mapping):
            inputs = [inputs]
        require_batches(inputs)
        if not len(inputs):
            raise ValueError("there are no batches of inputs; give one at least, or leave `inputs` out")
        for one in (module, module_a or module):
            require_module(one)
        return cls(tuple(inputs), (module_a or module, module), task, module_a is not None, is_apart, logits)

    @property
    def outputs(self) -> Outputs:
        """The model output that is compared."""
        return None if self.task is None else self.task.outputs

    def taught_by(self, tuned: Mapping[str, Tensor]) -> Task:
        """Return the task of reproducing, with the model of B, the outputs of the fine-tune of A.

        Raises:
            ValueError: The outputs cannot be logits.
        """
        assert self.modules is not None
        teacher, learner = (Task(one, (), _divergence if self.logits else mse_loss) for one in self.modules)
        with torch.no_grad():
            pairs = [(batch, teacher.run(tuned, batch).detach()) for batch in self.batches]
        if self.logits and any(not wanted.ndim or wanted.shape[-1] < 2 for _, wanted in pairs):
            raise ValueError(
                f"outputs of shape {tuple(pairs[0][1].shape)} are not logits of two or more classes; give "
                "`logits=False`"
            )
        return replace(learner, batches=pairs)

    def parts(self, tuned: Mapping[str, Tensor], steps: int, generator: torch.Generator | None) -> tuple[Task, Task]:
        """Return two tasks: one with the examples for choosing a change, and one with the examples for evaluating it.
        With few examples, both tasks have the same examples.
        """
        task = self.taught_by(tuned) if self.task is None else self.task
        count = sum(example_counts(task.batches))
        if not count:
            raise ValueError("the batches hold no examples; give one at least")
        if not steps and count < ENOUGH:
            return task, task
        return task.split(1 - KEPT, generator=generator)

    def run(self, params: Mapping[str, Tensor], number: int) -> Tensor:
        """Return the outputs of a network as one vector, computed by the model with the index `number`."""
        assert self.modules is not None
        module = self.modules[number]
        with torch.no_grad(), evaluating(module):
            made = [output_tensors(call(module, params, batch), self.outputs)[0] for batch in self.batches]
        return torch.cat([one.double().flatten() for one in made])


def _carry(
    networks: tuple[Params, Params, Params],
    symmetry: Symmetry,
    data: _Data,
    scale: float | None,
    steps: int,
    method: Method | None,
    rotate: Rotate,
    generator: torch.Generator | None,
    adapter: GivenAdapter | None,
) -> TransportResult:
    """Transfer the change of networks in memory."""
    base_a, tuned_a, base_b = networks
    require_same_names(base_b, base_a)
    require_alike(base_a, tuned_a, structure=symmetry.structure, labels=("base A", "tuned A"))
    require_finite(base_b, "base B", symmetry.structure)
    symmetry = symmetry.bind(base_b)
    is_wider = any(tensor.shape != base_b[name].shape for name, tensor in base_a.items())
    if is_wider and not data.is_other:
        raise ValueError(
            "the bases have different widths, so no element maps one to the other: give `inputs` or a task, and "
            "`module_a`, the model of base A"
        )
    same = all(torch.equal(tensor, tuned_a[name]) for name, tensor in base_a.items())
    told: tuple[str, ...] = ("the fine-tune equals its base: there is no change to transfer",) if same else ()
    ways = [] if is_wider else [_by_element(networks, symmetry, data, method, rotate, generator)]

    def result(way: CarriedChange, factor: float, mode: Mode, alike: float | None = None) -> TransportResult:
        notes = (*way.notes, *told)
        if adapter is None:
            return TransportResult(way.on(base_b, factor), way.element, factor, mode, alike, notes=notes)
        own = adapter.carry(lambda name: (way.change[name],), base_b, factor, way.change)
        params = adapter.network(base_b, own)
        return TransportResult(params, way.element, factor, mode, alike, notes=notes, adapter=own)

    if data.modules is None:
        told += expectation(ways[0].products)
        return result(ways[0], 1.0 if scale is None else scale, "weights")
    given = {name: tensor.to(base_a[name].dtype) for name, tensor in tuned_a.items()}
    choosing, judging = data.parts(given, steps, generator)
    told += (FEW,) if choosing is judging and scale is None else ()
    seen = data.batches if data.is_apart else [batch for batch, _ in choosing.batches]
    maps, left = carry_by_maps(networks, data.modules, seen, symmetry)
    if left and is_wider:
        maps = replace(maps, notes=(f"there is no map for the change of {shorten(left)}: it is not transferred",))
    elif left:  # Both changes are in the coordinates of B.
        rest = {name: ways[0].change[name] for name in left if name in ways[0].change}
        told_left = f"the change of {shorten(left)} is transferred by an element, because there is no map"
        shrunk = {name: one for name, one in ways[0].shrunk.items() if name in rest}
        maps = CarriedChange({**maps.change, **rest}, None, {**maps.shrunk, **shrunk}, (told_left,))
    ways.append(maps)

    def loss(task: Task, way: CarriedChange, factor: float) -> float:
        return task.evaluate(way.on(base_b, factor))["loss"]

    before = judging.evaluate(base_b)["loss"]
    if not math.isfinite(before):
        raise ValueError(
            f"the loss of base B on the examples is {before}; check that the inputs, the targets and the outputs of "
            "all networks on these inputs are finite"
        )
    tried = [(way, _line_search(partial(loss, choosing, way)) if scale is None else scale) for way in ways]
    # The maps are fitted on the examples for choosing. If the inputs are others, all labels compare the candidates.
    comparing = replace(judging, batches=[*choosing.batches, *judging.batches]) if data.is_apart else judging
    way, factor = min(tried, key=lambda one: loss(comparing, *one))
    after = loss(judging, way, factor)
    if scale is None and not (factor and after < before):
        told, factor, after = (*told, *(() if same else (NOTHING,))), 0.0, before
    start, wanted = data.run(base_b, 1), data.run(given, 0) - data.run(base_a, 0)
    found = data.run(way.on(base_b, factor), 1) - start
    cosine = float(found @ wanted / (found.norm() * wanted.norm()).clamp_min(1e-300))
    made = replace(result(way, factor, "inputs" if data.task is None else "task", cosine), losses=(before, after))
    if not steps:
        return made
    if adapter is not None and made.adapter is not None:
        own, taken = _train(made.adapter, partial(adapter.network, base_b), choosing, judging, steps)
        made = replace(made, params=adapter.network(base_b, own), steps=taken, adapter=own)
    else:
        free, network = _untied(made.params, symmetry)
        own, taken = _train(free, network, choosing, judging, steps)
        made = replace(made, params=network(own), steps=taken)
    return replace(made, losses=(before, judging.evaluate(made.params)["loss"]))


def _divergence(outputs: Tensor, wanted: Tensor) -> Tensor:
    """Return the mean Kullback-Leibler divergence between wanted and predicted probabilities."""
    made, target = (one.double().log_softmax(-1) for one in (outputs, wanted))
    return (target.exp() * (target - made)).sum(-1).mean()


def _line_search(loss: Callable[[float], float]) -> float:
    """Return the scale with the smallest loss, among `SCALES` and scales between the best scale and its neighbors."""
    found = {scale: loss(scale) for scale in SCALES}
    for _ in range(HALVINGS):
        known = sorted(found)
        place = known.index(min(found, key=found.__getitem__))
        for other in known[max(place - 1, 0) : place] + known[place + 1 : place + 2]:
            middle = (known[place] + other) / 2
            found[middle] = loss(middle)
    return min(found, key=found.__getitem__)


def _by_element(
    networks: tuple[Params, Params, Params],
    symmetry: Symmetry,
    data: _Data,
    method: Method | None,
    rotate: Rotate,
    generator: torch.Generator | None,
) -> CarriedChange:
    """Return the change, transformed by the element that aligns the first base to the second."""
    base_a, tuned_a, base_b = networks
    task = None
    if method is not None and data.modules is not None:
        pairs = [(batch, None) for batch in data.batches]
        task = data.task or Task(data.modules[1], pairs, has_targets=False)
    found = align(base_b, base_a, symmetry, method=method, task=task, rotate=rotate, generator=generator)
    return replace(carry_by(found.symmetry, found.element, (base_a, tuned_a), base_b), notes=found.notes)


def _untied(params: Params, symmetry: Symmetry) -> tuple[Params, Callable[[Params], Params]]:
    """Return the trainable tensors of a network, and a function that rebuilds the network with tied tensors."""
    fixed = {*symmetry.buffers, *symmetry.structure}
    first = {name: names[0] for names in symmetry.tied for name in names if names[0] in params}
    names = {
        name: first.get(name, name)
        for name, tensor in params.items()
        if tensor.is_floating_point() and not {name, first.get(name, name)} & fixed
    }
    free = {name: params[name] for name in dict.fromkeys(names.values())}
    return free, lambda now: {**params, **{name: now[own] for name, own in names.items()}}


def _train(
    start: Params, network: Callable[[Params], Params], training: Task, keeping: Task, steps: int
) -> tuple[Params, int]:
    """Train tensors with Adam; keep the learning rate and the number of steps with the lowest held-out loss."""
    batches = list(training.batches)
    best, least, taken = dict(start), keeping.evaluate(network(start))["loss"], 0
    for rate in RATES:
        free = {name: tensor.detach().clone().requires_grad_() for name, tensor in start.items()}
        optimizer = torch.optim.Adam(free.values(), lr=rate)
        for step in range(1, steps + 1):
            optimizer.zero_grad()
            training.loss(network(free), batches[step % len(batches)]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if step % max(1, steps // LOOKS) == 0 or step == steps:
                now = {name: tensor.detach().clone() for name, tensor in free.items()}
                loss = keeping.evaluate(network(now))["loss"]
                if loss < least:
                    best, least, taken = now, loss, step
    return best, taken

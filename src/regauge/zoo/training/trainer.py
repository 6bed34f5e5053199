"""Train populations: stacks of networks, from their seeds to blocks of parameters with a row for each network."""

import logging
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from regauge.core.params import Params
from regauge.zoo.training.chains.images import ImageChain
from regauge.zoo.training.chains.steps import steps_of
from regauge.zoo.training.chains.vectors import VectorChain, links_of
from regauge.zoo.training.config import Config, Discard
from regauge.zoo.training.examples import Examples, load_examples
from regauge.zoo.training.feeds import Batches, half_of, reads_everything, share_of
from regauge.zoo.training.initialization import Start, built, initialized, start_of
from regauge.zoo.training.loop import Loop
from regauge.zoo.training.program import Backend, Program, is_convolutional, is_recurrent, require_trainable
from regauge.zoo.training.settings import drawn
from regauge.zoo.training.stack import Stack, VmapEngine

Row = dict[str, Any]
Told = Callable[[float], object]
"""Is told how much was done since."""

ACTIVATION_BYTES = 8 * 2**20
"""Of the hidden layers of a stack, forward and backward, so that they stay in the cache."""
CACHE_BYTES = 18 * 2**20
"""Of all that a step of a stack reads and writes: hidden layers, parameters, gradients, moments."""
DEVICE_BYTES = 2 * 2**30
"""The same on other devices than CPUs, which want many networks at once."""
MOMENTS = 2
"""Tensors of the size of the parameters that an optimizer keeps, at most."""
STACK = 512
"""Networks of a stack at most."""
STACK_BY_VMAP = 64
COMPILED_WORK = 1e12
"""Multiplications from which on compiling pays: some minutes on one core, of which it saves a third."""
COMPILED_SIZE = 50_000
"""Networks with more values are bound by matrix products, which are the same when compiled."""
EVALUATED = 1000
"""Examples per call of an evaluation."""

_log = logging.getLogger(__name__)


class Block(NamedTuple):
    """Networks of one step.

    Attributes:
        params: `[networks, ...]`, parameters and buffers.
        rows: For each network plain values: "id", "step", "seed", "group", what it drew, "train_loss" of the last
            batch, "validation_loss", "validation_accuracy" of classes as a fraction, "is_diverged" and "is_discarded".
            Losses of networks that diverged are None. A network that is marked by one of the two was given up at this
            step; one that diverged is not also discarded.
    """

    params: Params
    rows: list[Row]


@dataclass(frozen=True)
class Member:
    """One network of a stack.

    Attributes:
        id: Its number in the population.
        group: Whose batches it reads.
        start: Seed and initialization.
        settings: What the optimizer does for it.
    """

    id: int
    group: int
    start: Start
    settings: dict[str, float]


def untold(amount: float) -> None:
    """Tells nobody."""


def train(
    config: Config,
    *,
    ids: Sequence[int] | None = None,
    data: Examples | None = None,
    backend: Backend | None = None,
    stack: int | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    watch: Told = untold,
) -> Iterator[Block]:
    """Train a population, or some networks of it.

    Networks are trained in stacks, on one thread: for more cores, train other ids in other processes. What a network
    becomes depends on the config and on its id, not on the stack, the back end or the other ids: every step is the same
    to rounding, however the population is cut. In float32 differences of rounding grow along a training, so that the
    parameters after a long one depend on the stack, the library of matrix products and the kind of processor, too; in
    float64 they are equal to 1e-9 in all tests.

    A network that diverges does not touch its neighbors. It is handed out once, at the next checkpoint or discard,
    marked "is_diverged", and given up. A network that is discarded is handed out at that step, whether or not it is a
    checkpoint, marked "is_discarded", and not again. So every network has one last row, at the end or with one of the
    two marks.

    Args:
        config: Of the whole population.
        ids: Which networks; all if None. Discarding a share needs whole groups.
        data: Examples to train on instead of those that `config.data` names.
        backend: How they are trained; what is fastest for the architecture and the device if None. Chains of layers,
            fully connected or (on a CPU) convolutional, have programs of their own in place of the stacked one.
        stack: Networks of a stack at most.
        device: Where.
        dtype: Of parameters and examples.
        watch: Is told after every step how many whole trainings it was worth; all are worth the number of networks.

    Yields:
        For each stack a block at every checkpoint, and at the end; and one of the networks that are given up where
        networks are discarded at another step.

    Raises:
        ValueError: Ids are not those of the population or repeat, a discarded share would be of an incomplete group, or
            the module cannot be trained this way.
    """
    for _, blocks in train_stacks(
        config, ids=ids, data=data, backend=backend, stack=stack, device=device, dtype=dtype, watch=watch
    ):
        yield from blocks


def train_stacks(
    config: Config,
    *,
    ids: Sequence[int] | None = None,
    data: Examples | None = None,
    backend: Backend | None = None,
    stack: int | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    watch: Told = untold,
) -> Iterator[tuple[list[int], Iterator[Block]]]:
    """The same, stack by stack: the ids of each, and its blocks, which are to be taken before the next stack.

    Stacks come in the order of their ids.
    """
    chosen = list(range(config.count)) if ids is None else sorted(ids)
    if len(set(chosen)) < len(chosen) or (chosen and not 0 <= chosen[0] <= chosen[-1] < config.count):
        raise ValueError(f"ids are {list(ids or ())}, but must be different and from 0 to {config.count - 1}")
    examples = (data if data is not None else load_examples(config.data)).to(device, dtype)
    _require_whole_groups(config, chosen)
    total = config.total_steps(examples)
    late = [discard for discard in config.discards if discard.step > total]
    if late:
        raise ValueError(f"{late[0]} never comes: trainings have {total} steps; discard at the last one or before")
    module = built(config.architecture, config.seed).to(dtype)
    require_trainable(module, examples)
    maker = _Maker(config, module, examples, torch.device(device), dtype, backend, len(chosen))
    size = stack if stack is not None else maker.stack_size()
    for part in cut(config, chosen, size, is_one_group=reads_everything(config, examples)):
        yield part, _trained(config, maker, examples, [member_of(config, k) for k in part], watch)


def member_of(config: Config, network: int) -> Member:
    """What the network with this id draws."""
    settings = {
        name: drawn(getattr(config.optimizer, name), config.seed, name, network)
        for name in config.optimizer.per_network
    }
    start = start_of(config.initialization, config.seed, network)
    return Member(network, network // config.group, start, settings)


def cut(config: Config, ids: Sequence[int], size: int, *, is_one_group: bool) -> list[list[int]]:
    """Ids of each stack: at most `size`, and as many of each group where groups read their own batches."""
    if size < 1:
        raise ValueError(f"a stack of {size} networks is none; give at least 1")
    if any(discard.worst is not None for discard in config.discards):
        size = max(size, config.group) // config.group * config.group
    if is_one_group:
        return [list(ids[k : k + size]) for k in range(0, len(ids), size)]
    stacks: list[list[int]] = []
    length = 0
    for _, run in groupby(ids, key=lambda k: k // config.group):
        own = list(run)
        for k in range(0, len(own), size):
            piece = own[k : k + size]
            if stacks and len(piece) == length and len(stacks[-1]) + length <= size and k == 0:
                stacks[-1].extend(piece)
            else:
                stacks.append(piece)
                length = len(piece)
    return stacks


class _Maker:
    """Makes the program of a stack; the same engine serves all stacks, so that it is compiled once."""

    def __init__(
        self,
        config: Config,
        module: nn.Module,
        examples: Examples,
        device: torch.device,
        dtype: torch.dtype,
        backend: Backend | None,
        networks: int,
    ) -> None:
        self.config, self.module, self.examples = config, module.to(device), examples
        self.device, self.dtype = device, dtype
        self.chain = self._chain()
        self.backend: Backend = backend if backend is not None else self._fastest(networks)
        if self.backend == "compiled" and not _has_compiler():
            _log.warning("there is no C++ compiler for torch.compile, so the stacked program runs as it is")
            self.backend = "stacked"
        self.vmap = VmapEngine(module, is_compiled=self.backend == "compiled")

    def make(self, members: Sequence[Member]) -> Program:
        """The program of these networks at their start."""
        starts = [member.start for member in members]
        params = initialized(self.config.architecture, starts, self.dtype)
        params = {name: tensor.to(self.device) for name, tensor in params.items()}
        settings = {name: [member.settings[name] for member in members] for name in members[0].settings}
        if self.backend == "loop":
            return Loop(self.module, params, self.config.optimizer, settings)
        engine = self.chain if self.chain is not None and self.backend == "stacked" else self.vmap
        return Stack(self.module, params, self.config.optimizer, settings, engine)

    def stack_size(self) -> int:
        """How many networks fit the cache, or another device: whole groups, or equal parts of one."""
        group = self.config.group
        if not isinstance(self.chain, VectorChain) or self.backend != "stacked":
            return max(group, STACK_BY_VMAP // group * group)
        shapes = {spec.name: spec.shape for spec in self.config.architecture.layout}
        width = sum(shapes[link.weight][0] for link in self.chain.links)
        count = len(self.examples.inputs)
        batch = count if self.config.batch is None else min(self.config.batch, count)
        hidden = 2 * width * batch * self.dtype.itemsize
        values = sum(math.prod(shape) for shape in shapes.values())
        whole = hidden + (2 + MOMENTS) * values * self.dtype.itemsize
        is_cpu = self.device.type == "cpu"
        fitting = min(ACTIVATION_BYTES // hidden, CACHE_BYTES // whole) if is_cpu else DEVICE_BYTES // whole
        size = max(1, min(STACK, fitting))
        if reads_everything(self.config, self.examples):
            return size
        return size // group * group if size >= group else math.ceil(group / math.ceil(group / size))

    def _chain(self) -> VectorChain | ImageChain | None:
        """The program by hand, if the module is a chain and that is faster than vectorizing it."""
        if not all(tensor.requires_grad for tensor in self.module.parameters()):
            return None
        steps = steps_of(self.module, reads_vectors=self.examples.inputs.ndim == 2)
        if steps is None:
            return None
        links = links_of(steps)
        if links is not None:
            return VectorChain(links)
        return ImageChain(steps) if self.device.type == "cpu" else None

    def _fastest(self, networks: int) -> Backend:
        if self.chain is not None:
            return "stacked"
        if is_recurrent(self.module):
            return "loop"
        if is_convolutional(self.module):
            return "loop" if self.device.type == "cpu" else "stacked"
        config, size = self.config, self.config.architecture.size
        count = len(self.examples.inputs)
        batch = count if config.batch is None else min(config.batch, count)
        work = float(networks) * config.total_steps(self.examples) * batch * size * 3
        pays = work >= COMPILED_WORK and size <= COMPILED_SIZE and not config.discards
        return "compiled" if pays and _has_compiler() else "stacked"


def _has_compiler() -> bool:
    names = (os.environ.get("CXX"), "g++", "c++", "clang++", "cl")
    return any(name is not None and shutil.which(name) is not None for name in names)


def _require_whole_groups(config: Config, ids: Sequence[int]) -> None:
    if all(discard.worst is None for discard in config.discards):
        return
    chosen = set(ids)
    for group in {k // config.group for k in ids}:
        whole = range(group * config.group, min(config.count, (group + 1) * config.group))
        if not chosen.issuperset(whole):
            raise ValueError(
                f"the worst of group {group} can only be told from the whole group, ids {whole.start} to "
                f"{whole.stop - 1}; train all of them, or discard by a loss (`above`)"
            )


def _trained(config: Config, maker: _Maker, examples: Examples, members: list[Member], watch: Told) -> Iterator[Block]:
    """Train one stack."""
    total = config.total_steps(examples)
    worth = len(members) / total
    with _one_thread():
        stack = _Running(config, maker, examples, members)
    checkpoints = {total} | (config.checkpoints.steps(total) if config.checkpoints else set())
    discards = {discard.step: discard for discard in config.discards if discard.step <= total}
    reached = 0
    for event in sorted(checkpoints | discards.keys()):
        with _one_thread():
            losses: Tensor | None = None
            for step in range(reached, event):
                losses = stack.program.step(*stack.batches.at(step), config.schedule.factor(step, total))
                watch(worth)
            reached = event
            params = stack.program.params()
            rows = stack.judge(event, losses, params, discards.get(event))
            block = stack.block(rows, params, is_checkpoint=event in checkpoints)
            stack.give_up(rows)
        if block.rows:
            yield block
        if not any(stack.is_alive):
            watch(worth * (total - reached))
            return


def _is_given_up(row: Row) -> bool:
    return bool(row["is_diverged"] or row["is_discarded"])


@contextmanager
def _one_thread() -> Iterator[None]:
    """One thread of torch for a while: the operators are so small that threads would wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class _Running:
    """A stack while it is trained: some of its places may hold networks that were given up."""

    def __init__(self, config: Config, maker: _Maker, examples: Examples, members: list[Member]) -> None:
        self.config, self.examples = config, examples
        self.members = members
        self.is_alive = [True] * len(members)
        self.has_groups = not reads_everything(config, examples)
        self.is_fixed = maker.backend == "compiled"
        groups = list(dict.fromkeys(member.group for member in members))
        signals = len(examples.targets) if examples.is_signals else 1
        own = [member.id // config.copies % signals for member in members]
        self.batches = Batches(config, examples, groups, own)
        self.program = maker.make(members)

    def judge(self, step: int, losses: Tensor | None, params: Params, discard: Discard | None) -> list[Row]:
        """A row for each place, given up or not."""
        finite = torch.stack([t.isfinite().flatten(1).all(1) for t in params.values() if t.is_floating_point()]).all(0)
        loss, accuracy = self._validation()
        finite &= loss.isfinite()
        last = [None] * len(self.members) if losses is None else losses.tolist()
        rows = []
        for k, member in enumerate(self.members):
            is_fine = bool(finite[k])
            row: Row = {
                "id": member.id,
                "step": step,
                "seed": member.start.seed,
                "group": member.group,
            } | member.settings
            row |= {"initialization": member.start.kind, "scale": member.start.scale}
            row |= {} if (share := share_of(self.config, member.group)) is None else {"share": share}
            row |= {} if (half := half_of(self.config, member.group)) is None else {"half": half}
            if self.examples.is_signals:
                row["signal"] = member.id // self.config.copies % len(self.examples.targets)
            if self.examples.labels is not None:
                row["label"] = int(self.examples.labels[row["signal"]])
            row["train_loss"] = last[k] if is_fine else None
            row["validation_loss"] = float(loss[k]) if is_fine else None
            if accuracy is not None:
                row["validation_accuracy"] = float(accuracy[k]) if is_fine else None
            row["is_diverged"] = not is_fine
            rows.append(row)
        discarded = set() if discard is None else self._discarded(rows, discard)
        for k, row in enumerate(rows):
            row["is_discarded"] = k in discarded
        return rows

    def block(self, rows: Sequence[Row], params: Params, *, is_checkpoint: bool) -> Block:
        """The networks that are alive, or between checkpoints those of them that are given up now."""
        index = [k for k, alive in enumerate(self.is_alive) if alive and (is_checkpoint or _is_given_up(rows[k]))]
        if len(index) < len(self.members):
            params = {name: tensor[index] for name, tensor in params.items()}
        return Block(params, [rows[k] for k in index])

    def give_up(self, rows: Sequence[Row]) -> None:
        """Give up what diverged or is discarded, and free its places."""
        self.is_alive = [alive and not _is_given_up(row) for alive, row in zip(self.is_alive, rows, strict=True)]
        if not all(self.is_alive) and not self.is_fixed:
            self._compact()

    def _discarded(self, rows: Sequence[Row], discard: Discard) -> set[int]:
        """The places of the networks that the rule says, without those that diverged or were given up before."""
        losses = [
            math.inf if row["is_diverged"] or not alive else row["validation_loss"]
            for row, alive in zip(rows, self.is_alive, strict=True)
        ]
        found: set[int] = set()
        if discard.above is not None:
            found = {k for k, loss in enumerate(losses) if loss > discard.above}
        if discard.worst is not None:
            for group in {member.group for member in self.members}:
                own = [k for k, member in enumerate(self.members) if member.group == group]
                first = group * self.config.group
                whole = min(self.config.group, self.config.count - first)
                kept = whole - int(discard.worst * whole)
                found |= set(sorted(own, key=lambda k: (losses[k], k))[kept:])
        return {k for k in found if losses[k] < math.inf}

    def _compact(self) -> None:
        """Keep the living, and as many others as make all groups equally large."""
        places = range(len(self.members))
        groups = sorted({member.group for member in self.members}) if self.has_groups else [-1]
        own = {g: [k for k in places if not self.has_groups or self.members[k].group == g] for g in groups}
        living = {g: [k for k in own[g] if self.is_alive[k]] for g in groups}
        size = max(map(len, living.values()))
        kept_groups = [k for k, g in enumerate(groups) if living[g]]
        index: list[int] = []
        for k in kept_groups:
            g = groups[k]
            fillers = [place for place in own[g] if not self.is_alive[place]]
            index += sorted(living[g] + fillers[: size - len(living[g])])
        if not index or len(index) == len(self.members):
            return
        chosen = torch.tensor(index, device=self.examples.inputs.device)
        self.program.keep(chosen)
        self.batches.keep(torch.tensor(kept_groups), chosen)
        self.members = [self.members[k] for k in index]
        self.is_alive = [self.is_alive[k] for k in index]

    def _validation(self) -> tuple[Tensor, Tensor | None]:
        """Mean losses and accuracies of the networks on what is kept for validation, float64."""
        examples = self.examples
        targets = examples.validation_targets
        if examples.is_signals:
            targets = targets[[row % len(targets) for row in self._signals()]]
        count = len(examples.validation_inputs)
        loss: Tensor | float = 0.0
        correct: Tensor | float = 0.0
        for begin in range(0, count, EVALUATED):
            outputs = self.program.outputs(examples.validation_inputs[begin : begin + EVALUATED])
            if examples.is_classification:
                wanted = targets[begin : begin + EVALUATED].expand(len(outputs), -1)
                entropies = functional.cross_entropy(outputs.transpose(1, 2), wanted, reduction="none")
                loss = loss + entropies.double().sum(1)
                correct = correct + (outputs.argmax(2) == wanted).double().sum(1)
            else:
                wanted = targets[..., begin : begin + EVALUATED, :]
                loss = loss + (outputs - wanted).square().double().mean(2).sum(1)
        accuracy = torch.as_tensor(correct) / count if examples.is_classification else None
        return torch.as_tensor(loss) / count, accuracy

    def _signals(self) -> list[int]:
        return [member.id // self.config.copies for member in self.members]

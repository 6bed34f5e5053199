"""Training of populations in stacks, which yields blocks of parameters with one row per network."""

import logging
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, islice

import torch
from torch import Tensor, nn

from regauge.core.progress import Advance, no_advance
from regauge.training.chains.vector_chain import VectorChain
from regauge.training.descent import OnStep, State, descend
from regauge.training.initialization import build, draw_start, initialize
from regauge.training.programs import Backend
from regauge.training.settings import draw
from regauge.training.stacks import Engine, LoopEngine, Stack, VmapEngine, chain_of
from regauge.training.threads import one_thread
from regauge.zoo.training.config import PopulationConfig
from regauge.zoo.training.examples import Examples, load_examples, require_trainable
from regauge.zoo.training.stack_state import Member, Running, SavedNetworks

ACTIVATION_BYTES = 8 * 2**20
"""The size in bytes of a stack's activations, forward and backward, chosen to fit the cache."""
CACHE_BYTES = 18 * 2**20
"""The largest number of bytes that a step of a stack reads and writes: activations, parameters, gradients, moments."""
DEVICE_BYTES = 2 * 2**30
"""The largest number of bytes that a step reads and writes on other devices than the CPU. Only many networks together
make full use of a GPU."""
MOMENTS = 2
"""The largest number of parameter-sized tensors that an optimizer keeps."""
STACK = 512
"""The largest number of networks in a stack."""
STACK_BY_VMAP = 64
COMPILED_WORK = 1e12
"""A program is compiled if training needs more multiplications than this limit. Above the limit, training takes minutes
on one core, and compiling saves a third of the time."""
COMPILED_SIZE = 50_000
"""Networks with more parameters than this limit are not compiled. In large networks, matrix products take most of the
time, and compiling does not accelerate matrix products."""

_log = logging.getLogger(__name__)


def train(
    config: PopulationConfig,
    *,
    ids: Sequence[int] | None = None,
    data: Examples | None = None,
    backend: Backend | None = None,
    stack: int | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    advance: Advance = no_advance,
    on_step: OnStep | None = None,
) -> Iterator[SavedNetworks]:
    """Train a population or some of its networks.

    Networks are trained in stacks, on one thread. To use more cores, train different ids in different processes. A
    network depends only on the config and the id. The stack, the back end and the other ids change each step only by
    rounding. In float32, rounding differences grow during training. After long training, parameters therefore also
    depend on the stack, the library of matrix products and the processor. In float64, the differences are at most 1e-9
    in all tests.

    A network that diverges does not affect other networks. At the next checkpoint or discard, a diverged network is
    yielded once, with the mark "is_diverged", and then dropped. A discarded network is yielded at the step of the
    discard, with the mark "is_discarded", and then dropped. The step of a discard need not be a checkpoint. The last
    row of every network is therefore the end of its training, or has the mark "is_diverged" or "is_discarded".

    Args:
        config: The configuration of the whole population.
        ids: The ids of the networks; all networks if None. If a share of each group is discarded, the ids of each group
            must be complete.
        data: Examples that replace the examples named by `config.data`.
        backend: The back end for training. By default, the fastest back end for the architecture and the device is
            used. Fully connected chains and (on a CPU) convolutional chains have special programs, which replace the
            general program for stacks.
        stack: The largest number of networks in a stack.
        device: The device for training.
        dtype: The dtype of parameters and examples.
        advance: A function that is called after every step with the number of trained networks. Networks in training
            count as fractions.
        on_step: A function that is called after each step of a stack with a `regauge.training.State`: the number of the
            step, the losses and ids of the networks, and the learning rate. The ids may still include stopped networks.

    Yields:
        For each stack, one block at every checkpoint and at the end. If networks are discarded at a step without a
        checkpoint, an additional block contains the discarded networks.

    Raises:
        ValueError: Ids are repeated or do not belong to the population. A share of an incomplete group would be
            discarded. Several networks would be equal. The error is also raised if the module cannot be trained in
            stacks.
    """
    chosen = list(range(config.count)) if ids is None else sorted(ids)
    if len(set(chosen)) < len(chosen) or (chosen and not 0 <= chosen[0] <= chosen[-1] < config.count):
        raise ValueError(f"ids are {list(ids or ())}, but must be different and from 0 to {config.count - 1}")
    examples = (data if data is not None else load_examples(config.data)).to(device, dtype)
    _require_whole_groups(config, chosen)
    require_distinct(config, examples, chosen)
    total = config.total_steps(examples)
    late = [discard for discard in config.discards if discard.step > total]
    if late:
        raise ValueError(
            f"{late[0]} never happens, because trainings have {total} steps; discard at the last step or before"
        )
    module = build(config.architecture, config.seed).to(dtype)
    require_trainable(module, examples)
    maker = _Maker(config, module.to(device), examples, backend, len(chosen))
    size = stack if stack is not None else maker.stack_size()
    for part in cut(config, chosen, size, is_one_group=config.reads_everything(examples)):
        yield from _train_stack(maker, [_draw(config, examples, k) for k in part], advance, on_step)


def cut(config: PopulationConfig, ids: Sequence[int], size: int, *, is_one_group: bool) -> list[list[int]]:
    """Return the ids of each stack, with at most `size` ids for each stack. If groups have different batches, a stack
    has equally many ids of each group.
    """
    if size < 1:
        raise ValueError(f"the size of a stack is {size}, but must be at least 1")
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


def _draw(config: PopulationConfig, examples: Examples, network: int) -> Member:
    """Sample the initialization, the signal and the settings of the network with a given id."""
    settings = {
        name: draw(getattr(config.optimizer, name), config.seed, name, network) for name in config.optimizer.per_network
    }
    start = draw_start(config.initialization, config.seed, network)
    signal = network // config.copies % len(examples.targets)
    return Member(network, network // config.group, signal, start, settings)


class _Maker:
    """A builder of training programs for stacks. All stacks share one engine, which is compiled only once."""

    def __init__(
        self, config: PopulationConfig, module: nn.Module, examples: Examples, backend: Backend | None, networks: int
    ) -> None:
        self.config, self.module, self.examples = config, module, examples
        self.device, self.dtype = examples.inputs.device, next(module.parameters()).dtype
        self.batch = config.batch_of(len(examples.inputs))
        self.chain = chain_of(module, reads_vectors=examples.inputs.ndim == 2, device=self.device)
        self.backend: Backend = backend if backend is not None else self._fastest(networks)
        if self.backend == "compiled" and not _has_compiler():
            _log.warning("there is no C++ compiler for torch.compile, so the stacked program runs as it is")
            self.backend = "stacked"
        self.vmap = VmapEngine(module, is_compiled=self.backend == "compiled")

    def make(self, members: Sequence[Member]) -> Stack:
        """Return the program that trains given networks, with their initial parameters."""
        starts = [member.start for member in members]
        params = initialize(self.config.architecture, starts, self.dtype)
        params = {name: tensor.to(self.device) for name, tensor in params.items()}
        settings = {name: [member.settings[name] for member in members] for name in members[0].settings}
        engine: Engine = self.vmap
        if self.backend == "loop":
            engine = LoopEngine(self.module)
        elif self.chain is not None and self.backend == "stacked":
            engine = self.chain
        return Stack(self.module, params, self.config.optimizer, settings, engine)

    def stack_size(self) -> int:
        """Return the number of networks in a stack, limited by cache or device: whole groups, or equal parts of one."""
        group = self.config.group
        if not isinstance(self.chain, VectorChain) or self.backend != "stacked":
            return max(group, STACK_BY_VMAP // group * group)
        shapes = {spec.name: spec.shape for spec in self.config.architecture.layout}
        width = sum(shapes[link.weight][0] for link in self.chain.links)
        hidden = 2 * width * int(self.batch) * self.dtype.itemsize
        values = sum(math.prod(shape) for shape in shapes.values())
        whole = hidden + (2 + MOMENTS) * values * self.dtype.itemsize
        is_cpu = self.device.type == "cpu"
        fitting = min(ACTIVATION_BYTES // hidden, CACHE_BYTES // whole) if is_cpu else DEVICE_BYTES // whole
        size = max(1, min(STACK, fitting))
        if self.config.reads_everything(self.examples):
            return size
        return size // group * group if size >= group else math.ceil(group / math.ceil(group / size))

    def _fastest(self, networks: int) -> Backend:
        if self.chain is not None:
            return "stacked"
        parts, config, size = tuple(self.module.modules()), self.config, self.config.architecture.size
        if any(isinstance(part, nn.RNNBase) for part in parts):  # torch.func.vmap does not support them
            return "loop"
        if any(isinstance(part, nn.modules.conv._ConvNd) for part in parts):  # their stacks become grouped convolutions
            return "loop" if self.device.type == "cpu" else "stacked"
        work = float(networks) * config.total_steps(self.examples) * self.batch * size * 3
        pays = work >= COMPILED_WORK and size <= COMPILED_SIZE and not config.discards
        return "compiled" if pays and _has_compiler() else "stacked"


def _has_compiler() -> bool:
    names = (os.environ.get("CXX"), "g++", "c++", "clang++", "cl")
    return any(name is not None and shutil.which(name) is not None for name in names)


def require_distinct(config: PopulationConfig, examples: Examples, ids: Iterable[int]) -> None:
    """Raise a ValueError if networks would be equal, because initialization, examples and settings are equal."""
    if not config.initialization.is_common:
        return
    known: dict[object, int] = {}
    for network in ids:
        member = _draw(config, examples, network)
        signal = member.signal if examples.is_signals else None
        group = None if config.reads_everything(examples) else member.group
        other = known.setdefault((signal, group, *member.settings.items()), network)
        if other != network:
            raise ValueError(
                f"networks {other} and {network} have the same initial weights and examples, so they would be equal; "
                "give each its own batches (group=1 and a batch that is not all examples)"
            )


def _require_whole_groups(config: PopulationConfig, ids: Sequence[int]) -> None:
    if all(discard.worst is None for discard in config.discards):
        return
    chosen = set(ids)
    for group in {k // config.group for k in ids}:
        whole = range(group * config.group, min(config.count, (group + 1) * config.group))
        if not chosen.issuperset(whole):
            raise ValueError(
                f"the worst of group {group} can only be found in the whole group, ids {whole.start} to "
                f"{whole.stop - 1}; train all of them, or discard by a loss (`above`)"
            )


def _train_stack(
    maker: _Maker, members: list[Member], advance: Advance, on_step: OnStep | None
) -> Iterator[SavedNetworks]:
    """Train one stack."""
    config, examples = maker.config, maker.examples
    total = config.total_steps(examples)
    worth = len(members) / total
    with one_thread():
        stack = Running(config, examples, members, maker.make(members), is_fixed=maker.backend == "compiled")
    checkpoints = {total} | (config.checkpoints.steps(total) if config.checkpoints else set())
    discards = {discard.step: discard for discard in config.discards}
    reached = 0

    def show(state: State) -> None:
        if on_step is not None:  # Abandoned networks free memory.
            on_step(state._replace(networks=tuple(member.id for member in stack.members)))

    batches = map(stack.batches.at, range(total))
    states = descend(stack.program, batches, steps=total, schedule=config.schedule, on_step=show)
    for event in sorted(checkpoints | discards.keys()):
        with one_thread():
            losses: Tensor | None = None
            for state in islice(states, event - reached):
                losses = state.loss
                advance(worth)
            reached = event
            params = stack.program.params()
            rows = stack.judge(event, losses, params, discards.get(event))
            block = stack.block(rows, params, is_checkpoint=event in checkpoints)
            stack.give_up(rows)
        if block.rows:
            yield block
        if not any(stack.is_alive):
            advance(worth * (total - reached))
            return

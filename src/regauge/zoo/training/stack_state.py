"""The state of a stack (networks that are trained together): batches, rows, and the stopped networks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from regauge.core.params import Params
from regauge.training.initialization import Start
from regauge.training.stacks import Stack
from regauge.zoo.training.config import Discard, PopulationConfig, generator_of
from regauge.zoo.training.examples import Examples

Row = dict[str, Any]
EVALUATED = 1000
"""The number of examples in one call of an evaluation."""


class Feed:
    """The batches of one group: consecutive random permutations of its examples, split into batches of equal size."""

    def __init__(self, config: PopulationConfig, examples: Examples, group: int) -> None:
        self.seed, self.group = config.seed, group
        self.subset = None if config.subset is None else config.subset.choose(examples, config.seed, group)
        self.count = len(examples.inputs) if self.subset is None else len(self.subset)
        self.batch = int(config.batch_of(self.count))
        self.orders: dict[int, Tensor] = {}

    def indices(self, step: int) -> Tensor:
        """Return the example indices of a step, `[batch]`."""
        begin, end = step * self.batch, (step + 1) * self.batch
        pieces = []
        for epoch in range(begin // self.count, -(-end // self.count)):
            offset = epoch * self.count
            pieces.append(self._order(epoch)[max(0, begin - offset) : end - offset])
        return torch.cat(pieces) if len(pieces) > 1 else pieces[0]

    def _order(self, epoch: int) -> Tensor:
        if epoch not in self.orders:
            self.orders = {k: order for k, order in self.orders.items() if k == epoch - 1}
            order = torch.randperm(self.count, generator=generator_of(self.seed, "order", self.group, epoch))
            self.orders[epoch] = order if self.subset is None else self.subset[order]
        return self.orders[epoch]


class Batches:
    """The batches of a stack with equal group sizes, and one signal per network if there are signals."""

    def __init__(
        self, config: PopulationConfig, examples: Examples, groups: Sequence[int], signals: Sequence[int]
    ) -> None:
        self.examples = examples
        is_all = config.reads_everything(examples)
        self.feeds = None if is_all else [Feed(config, examples, group) for group in groups]
        sizes = {feed.batch for feed in self.feeds or ()}
        if len(sizes) > 1:
            raise ValueError(
                f"groups read batches of {sorted(sizes)} examples, which one stack cannot hold; make batch smaller "
                "than the smallest subset"
            )
        device = examples.inputs.device
        self.signals = torch.tensor(signals, device=device)
        self.targets = examples.targets[self.signals] if examples.is_signals else examples.targets

    def at(self, step: int) -> tuple[Tensor, Tensor]:
        """Return inputs `[groups, batch, ...]` and targets of a step. There is one group if every step reads all
        examples.
        """
        if self.feeds is None:
            targets = self.targets if self.examples.is_signals else self.targets.unsqueeze(0)
            return self.examples.inputs.unsqueeze(0), targets
        rows = [feed.indices(step) for feed in self.feeds]
        indices = torch.stack(rows).to(self.examples.inputs.device)
        flat = self.examples.inputs.index_select(0, indices.flatten())
        inputs = flat.reshape(*indices.shape, *flat.shape[1:])
        if not self.examples.is_signals:
            return inputs, self.targets[indices]
        members = len(self.targets) // len(rows)
        own = [self.targets[k * members : (k + 1) * members, index] for k, index in enumerate(indices)]
        return inputs, torch.cat(own)

    def keep(self, groups: Tensor, index: Tensor) -> None:
        """Keep only some groups, and the networks with the indices `index`."""
        if self.feeds is not None:
            self.feeds = [self.feeds[k] for k in groups.tolist()]
        if self.examples.is_signals:
            self.targets = self.targets[index]


class SavedNetworks(NamedTuple):
    """The networks of a stack after one step.

    Attributes:
        params: Parameters and buffers, `[networks, ...]`.
        rows: Plain values for each network: "id", "step", "seed", "group", the sampled settings, "train_loss" of the
            last batch, "validation_loss", "validation_accuracy" for classes as a fraction, "is_diverged" and
            "is_discarded". Losses of networks that diverged are None. If "is_diverged" or "is_discarded" is true, the
            training of the network stopped at this step. A network that diverged is not marked as discarded.
        stack: The ids of all networks that are trained together.
    """

    params: Params
    rows: list[Row]
    stack: Sequence[int] = ()


@dataclass(frozen=True)
class Member:
    """One network of a stack: its id in the population, the group of its batches, its signal, and sampled settings."""

    id: int
    group: int
    signal: int
    start: Start
    settings: dict[str, float]


class Running:
    """A stack in training, which may also hold stopped networks."""

    def __init__(
        self, config: PopulationConfig, examples: Examples, members: list[Member], program: Stack, *, is_fixed: bool
    ) -> None:
        self.config, self.examples = config, examples
        self.members = members
        self.is_alive = [True] * len(members)
        self.ids = [member.id for member in members]
        self.has_groups = not config.reads_everything(examples)
        self.is_fixed = is_fixed
        groups = list(dict.fromkeys(member.group for member in members))
        self.batches = Batches(config, examples, groups, [member.signal for member in members])
        self.program = program

    def judge(self, step: int, losses: Tensor | None, params: Params, discard: Discard | None) -> list[Row]:
        """Return a row for each position, including positions of stopped networks."""
        finite = torch.stack([t.isfinite().flatten(1).all(1) for t in params.values() if t.is_floating_point()]).all(0)
        loss, accuracy = self._validation()
        # Copy each list from the device at once instead of number by number.
        fine, validation = (finite & loss.isfinite()).tolist(), loss.tolist()
        correct = None if accuracy is None else accuracy.tolist()
        last = [None] * len(self.members) if losses is None else losses.tolist()
        rows = []
        for k, (member, is_fine) in enumerate(zip(self.members, fine, strict=True)):
            row: Row = {"id": member.id, "step": step, "seed": member.start.seed, "group": member.group}
            row |= {**member.settings, "initialization": member.start.kind, "scale": member.start.scale}
            if self.config.subset is not None:
                row |= self.config.subset.describe(self.config.seed, member.group)
            if self.examples.is_signals:
                row["signal"] = member.signal
            if self.examples.labels is not None:
                row["label"] = int(self.examples.labels[member.signal])
            if self.examples.is_test is not None:
                row["split"] = "test" if self.examples.is_test[member.signal] else "train"
            row["train_loss"] = last[k] if is_fine else None
            row["validation_loss"] = validation[k] if is_fine else None
            if correct is not None:
                row["validation_accuracy"] = correct[k] if is_fine else None
            row["is_diverged"] = not is_fine
            rows.append(row)
        discarded = set() if discard is None else self._find_discarded(rows, discard)
        for k, row in enumerate(rows):
            row["is_discarded"] = k in discarded
        return rows

    def block(self, rows: Sequence[Row], params: Params, *, is_checkpoint: bool) -> SavedNetworks:
        """Return the networks of the stack at a step. Between checkpoints, return only the networks whose training
        stops at the given step.
        """
        index = [k for k, alive in enumerate(self.is_alive) if alive and (is_checkpoint or _is_given_up(rows[k]))]
        if len(index) < len(self.members):
            params = {name: tensor[index] for name, tensor in params.items()}
        return SavedNetworks(params, [rows[k] for k in index], self.ids)

    def give_up(self, rows: Sequence[Row]) -> None:
        """Stop the training of networks that diverged or are discarded, and free their positions in the stack."""
        self.is_alive = [alive and not _is_given_up(row) for alive, row in zip(self.is_alive, rows, strict=True)]
        if not all(self.is_alive) and not self.is_fixed:
            self._compact()

    def _find_discarded(self, rows: Sequence[Row], discard: Discard) -> set[int]:
        """Return the positions that the rule discards, excluding networks that diverged or were stopped before."""
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
        """Remove stopped networks, except those that are needed to keep all groups equally large."""
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
        """Return the networks' mean losses and accuracies on the validation examples, float64."""
        examples = self.examples
        targets = examples.validation_targets
        if examples.is_signals:
            targets = targets[[member.signal for member in self.members]]
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


def _is_given_up(row: Row) -> bool:
    return bool(row["is_diverged"] or row["is_discarded"])

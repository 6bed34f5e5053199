"""Which examples a network reads at which step: a function of the seed, its group and the step alone."""

from collections.abc import Sequence

import torch
from torch import Tensor

from regauge.zoo.training.config import Config, generator_of
from regauge.zoo.training.examples import Examples


class Feed:
    """The batches of one group: a random order of its examples, then another one, cut into pieces of equal size."""

    def __init__(self, config: Config, examples: Examples, group: int) -> None:
        self.seed, self.group = config.seed, group
        self.subset = None if config.subset is None else config.subset.choose(examples, config.seed, group)
        self.count = len(examples.inputs) if self.subset is None else len(self.subset)
        self.batch = int(config.batch_of(self.count))
        self.orders: dict[int, Tensor] = {}

    def indices(self, step: int) -> Tensor:
        """Numbers of the examples of a step, `[batch]`."""
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
    """The batches of a stack of networks, of as many networks in each group, with a signal for each where there are."""

    def __init__(self, config: Config, examples: Examples, groups: Sequence[int], signals: Sequence[int]) -> None:
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
        """Inputs `[groups, batch, ...]` and targets of a step; one group if all read everything."""
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
        """Go on with some groups, and with the networks at `index`."""
        if self.feeds is not None:
            self.feeds = [self.feeds[k] for k in groups.tolist()]
        if self.examples.is_signals:
            self.targets = self.targets[index]

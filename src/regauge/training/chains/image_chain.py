"""Training of convolutional networks without autograd, in which many networks share the small layers at the end.

Stacked convolutions are grouped convolutions, which are slow on a CPU. Unfolded convolutions are batched products,
which are slower than oneDNN's convolutions. Therefore convolutions and max pooling are computed network by network. The
layers after the last convolution are so small that separate calls would be mostly overhead. Therefore one program
computes the last layers for as many networks as fit the cache. If the activations of a batch do not fit the cache, the
batch is split, and the gradients of the parts are summed.

If matrix products use oneDNN (`core/products.py`), activations have oneDNN's layout from the first convolution to the
last. The layout of oneDNN consists of blocks of 8 or 16 channels. Without oneDNN's products, images have channels-last
layout. Results in the two layouts are rounded differently, so the choice of the layout must be reproducible. The choice
does not depend on measured times, but only on the steps and on the library of matrix products, which is recorded with a
run.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from regauge.core.params import Params
from regauge.core.products import library
from regauge.training.chains.chain_steps import Activation, Convolution, Linear, MaxPooling, Passed, Step
from regauge.training.programs import PIECE_BYTES, channels_last, mean_losses
from regauge.training.threads import keep_freed_memory

HELD_BYTES = 48 * 2**20
"""The size in bytes of the activations that are in memory at once, which is less than the memory that
`keep_freed_memory` keeps."""
LARGEST_VALUE = 1e37
"""A bound on activations. Activations below the bound do not overflow. Overflow must be excluded because the ReLU and
the maxima of oneDNN remove NaN."""


@dataclass(frozen=True)
class HeldNetworks:
    """Consecutive networks of a stack, from `start` to `stop`, that are evaluated at once.

    Attributes:
        start: The index of the first network.
        stop: The index after the last network.
        networks: The parameters of each network in the range.
        batches: For each network in the range, the parts of its batch.
    """

    start: int
    stop: int
    networks: Sequence[Params]
    batches: Sequence[Sequence[Tensor]]


class ImageChain:
    """Losses and gradients of a stack of chains with convolutions; an `Engine`."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = _maxima_first(steps)
        self.first = next(k for k, step in enumerate(self.steps) if step.names)
        # No other code uses the outputs of these steps, so they are overwritten. Maxima are recovered from their
        # positions.
        fresh = (Convolution, Linear, MaxPooling)
        self.is_free = [k > 0 and isinstance(self.steps[k - 1], fresh) for k in range(len(self.steps))]
        # The first step that runs for several networks at once.
        self.cut = max(
            (k + 1 for k, step in enumerate(self.steps) if isinstance(step, Convolution | MaxPooling)), default=0
        )
        self.fits_blocks = all(map(_fits_blocks, self.steps[: self.cut]))
        self.sizes: dict[tuple[int, ...], tuple[int, int]] = {}
        keep_freed_memory()

    def gradients(self, params: Mapping[str, Tensor], inputs: Tensor, targets: Tensor) -> tuple[Tensor, list[Tensor]]:
        """See `Engine`."""
        networks, examples = len(next(iter(params.values()))), inputs.shape[1]
        losses = torch.zeros(networks, dtype=torch.float64, device=inputs.device)
        found: dict[str, list[Tensor]] = {name: [] for name in params}
        for unit in self._units(params, inputs):
            index = [k * len(targets) // networks for k in range(unit.start, unit.stop)]
            wanted = targets[index[:1] if index[0] == index[-1] else index]
            pieces = len(unit.batches[0])
            total: dict[str, Tensor] = {}
            for piece, answers in enumerate(wanted.chunk(pieces, 1)):
                share = answers.shape[1] / examples
                batches = [batch[piece] for batch in unit.batches]
                loss, gradients = self._gradients(unit, params, batches, answers, share)
                total = {name: total[name].add_(g) if total else g for name, g in gradients.items()}
                losses[unit.start : unit.stop] += loss * share
            for name, gradient in total.items():
                found[name].append(gradient)
        return losses.to(inputs.dtype), [torch.cat(found[name]) for name in params]

    def outputs(self, params: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
        """See `Engine`."""
        found = []
        for unit in self._units(params, inputs):
            rows = [self._forward(unit, params, batches)[0] for batches in zip(*unit.batches, strict=True)]
            found.append(torch.cat(rows, 1))
        return torch.cat(found)

    def _units(self, params: Mapping[str, Tensor], inputs: Tensor) -> Iterator[HeldNetworks]:
        """Yield the networks in stack order, converted to the memory layouts in which they are evaluated."""
        count = len(next(iter(params.values())))
        groups = [k * len(inputs) // count for k in range(count)]
        are_blocked = self._are_blocked(params, inputs, groups)
        start = 0
        for is_blocked, run in groupby(are_blocked):
            end = start + len(list(run))
            pieces, held = self._counts(params, inputs[0], is_blocked=is_blocked)
            used = dict.fromkeys(groups[start:end])
            batches = {group: self._cut_batch(inputs[group], pieces, is_blocked=is_blocked) for group in used}
            networks = unstack({name: tensor[start:end] for name, tensor in params.items()}, is_blocked=is_blocked)
            for k in range(start, end, held):
                stop = min(k + held, end)
                yield HeldNetworks(
                    k, stop, networks[k - start : stop - start], [batches[group] for group in groups[k:stop]]
                )
            start = end

    def _are_blocked(self, params: Mapping[str, Tensor], inputs: Tensor, groups: Sequence[int]) -> list[bool]:
        """Choose oneDNN's layout for the networks whose activations cannot overflow."""
        if not self.fits_blocks or inputs.dtype != torch.float32 or inputs.is_cuda or library() != "onednn":
            return [False] * len(groups)
        bound = inputs.flatten(1).abs().amax(1)[groups]
        for step in self.steps[: self.cut]:
            if step.names:
                weight, bias = (params[name].flatten(1) for name in step.names)
                # Fewer products are summed up for a value than a layer has weights.
                bound = bound * weight.shape[1] * weight.abs().amax(1) + bias.abs().amax(1)
        return (bound < LARGEST_VALUE).tolist()

    def _counts(self, params: Mapping[str, Tensor], batch: Tensor, *, is_blocked: bool) -> tuple[int, int]:
        """Return the number of parts of a batch, and the number of networks that are evaluated at once."""
        shape = tuple(batch.shape[1:])
        if shape not in self.sizes:
            x, passed = batch[:1], []
            own = {name: tensor[:1] for name, tensor in params.items()}
            for k, step in enumerate(self.steps):
                passed.append(
                    step.forward(x, own if k >= self.cut else {n: own[n][0] for n in step.names}, is_free=False)
                )
                x = passed[-1].wrote
            counts = [one.wrote.numel() for one in passed]
            self.sizes[shape] = max(counts), sum(counts)
        largest, total = (size * len(batch) * batch.element_size() for size in self.sizes[shape])
        pieces = min(len(batch), -(-largest // (PIECE_BYTES * (2 if is_blocked else 1))))
        return pieces, max(1, HELD_BYTES // total)

    def _cut_batch(self, batch: Tensor, pieces: int, *, is_blocked: bool) -> list[Tensor]:
        """Split a batch into parts, in the memory layout in which networks are evaluated."""
        if is_blocked:
            return [piece.to_mkldnn() for piece in batch.chunk(pieces)]
        return list(channels_last(batch).chunk(pieces))

    def _gradients(
        self, unit: HeldNetworks, params: Mapping[str, Tensor], batches: Sequence[Tensor], targets: Tensor, share: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the mean losses on a part of a batch, and gradients of this part's contribution to the loss of the
        batch.
        """
        outputs, trunks, passed = self._forward(unit, params, batches)
        # The derivative overwrites the outputs, but an activation in the last step still needs them.
        outputs = outputs if isinstance(self.steps[-1], Linear) else outputs.clone()
        losses, deltas = mean_losses(outputs.mT, targets)
        delta = deltas.mT.flatten(0, 1)
        if share < 1:
            delta = delta.mul_(share)
        heads = {name: tensor[unit.start : unit.stop] for name, tensor in params.items()}
        delta, found = self._backward(delta, passed, heads, self.cut, len(self.steps))
        rows: dict[str, list[Tensor]] = {}
        if self.first < self.cut:
            for own, trunk, part in zip(unit.networks, trunks, delta.chunk(len(trunks)), strict=True):
                part = part.to_mkldnn() if trunk[0].read.is_mkldnn else part
                for name, gradient in self._backward(part, trunk, own, 0, self.cut)[1].items():
                    rows.setdefault(name, []).append(gradient)
        return losses, found | {name: torch.stack(tensors) for name, tensors in rows.items()}

    def _forward(
        self, unit: HeldNetworks, params: Mapping[str, Tensor], batches: Sequence[Tensor]
    ) -> tuple[Tensor, list[list[Passed]], list[Passed]]:
        """Return outputs `[networks, examples, out]`, and the tensors that steps save for the backward pass."""
        trunks = [self._run(x, own, 0, self.cut) for own, x in zip(unit.networks, batches, strict=True)]
        ends = [passed[-1].wrote if passed else x for passed, x in zip(trunks, batches, strict=True)]
        ends = [x.to_dense() if x.is_mkldnn else x for x in ends]
        heads = {name: tensor[unit.start : unit.stop] for name, tensor in params.items()}
        passed = self._run(ends[0] if len(ends) == 1 else torch.cat(ends), heads, self.cut, len(self.steps))
        outputs = passed[-1].wrote
        return outputs.view(len(ends), -1, outputs.shape[1]), trunks, passed

    def _run(self, x: Tensor, params: Params, start: int, stop: int) -> list[Passed]:
        passed: list[Passed] = []
        for step, is_free in zip(self.steps[start:stop], self.is_free[start:stop], strict=True):
            passed.append(step.forward(x, params, is_free=is_free))
            x = passed[-1].wrote
        return passed

    def _backward(
        self, delta: Tensor, passed: Sequence[Passed], params: Params, start: int, stop: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the derivatives of several steps with respect to their parameters, and to the input of the
        first step.
        """
        found: dict[str, Tensor] = {}
        for k in range(stop - 1, max(start, self.first) - 1, -1):
            step = self.steps[k]
            delta, gradients = step.backward(delta, passed[k - start], params, goes_on=k > self.first)
            found |= dict(zip(step.names, gradients, strict=True))
        return delta, found


def _maxima_first(steps: Sequence[Step]) -> tuple[Step, ...]:
    """Move max pooling before nondecreasing functions, which are then computed for fewer values.

    Moving max pooling does not change the outputs. The derivatives change only if a function rounds different values to
    one value.
    """
    order: list[Step] = []
    for step in steps:
        place = len(order)
        while isinstance(step, MaxPooling) and place and _never_falls(order[place - 1]):
            place -= 1
        order.insert(place, step)
    return tuple(order)


def _never_falls(step: Step) -> bool:
    return isinstance(step, Activation) and step.name != "sin"


def _fits_blocks(step: Step) -> bool:
    """Return whether a step reads and writes oneDNN's layout."""
    match step:
        case Convolution() | Activation("relu") | Activation("identity") | MaxPooling(dilation=(1, 1)):
            return True
        case _:
            return False


def unstack(params: Mapping[str, Tensor], *, is_blocked: bool = False) -> list[Params]:
    """Return the networks of a stack. Kernels get channels-last layout, or stay unchanged for oneDNN's layout."""
    # Kernels of one channel fit both memory layouts, and convolutions would choose the other one.
    apart = {
        name: tensor.permute(0, 1, 3, 4, 2).clone(memory_format=torch.contiguous_format).permute(0, 1, 4, 2, 3).unbind()
        if tensor.ndim == 5 and not is_blocked
        else tensor.unbind()
        for name, tensor in params.items()
    }
    return [dict(zip(apart, own, strict=True)) for own in zip(*apart.values(), strict=True)]

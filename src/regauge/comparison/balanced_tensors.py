"""The tensors of a checkpoint on the disk, balanced when they are read, for its fingerprint."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from regauge.alignment.streamed.balancing import balance_streamed
from regauge.alignment.streamed.memory import BASE, SLACK
from regauge.alignment.streamed.passes import Passes
from regauge.alignment.streamed.source import Moved
from regauge.canonical.null_spaces import has_null_spaces
from regauge.checkpoints.checkpoint import Checkpoint
from regauge.checkpoints.job import FileJob
from regauge.checkpoints.memory_limit import size_text
from regauge.checkpoints.representative_checkpoint import RepresentativeCheckpoint
from regauge.core.act import Site
from regauge.core.balance import has_balance
from regauge.core.behind_gains import gains_of
from regauge.core.chart import charted
from regauge.core.element import Element
from regauge.core.families import move_tensor
from regauge.core.movable import VALUES, require_movable
from regauge.core.params import require_finite, work_dtype
from regauge.core.progress import Progress
from regauge.core.symmetry import Symmetry

HELD = 5
"""Copies of the largest tensor that measuring it holds."""


class BalancedTensors(Mapping[str, Tensor]):
    """The compared tensors of a checkpoint, each with a leading model axis of length one.

    Attributes:
        symmetry: The symmetry, with every size known: `seen_by_fingerprints`.
    """

    def __init__(self, source: Checkpoint, whole: Symmetry, names: Sequence[str], passes: Passes) -> None:
        self.symmetry, self._whole = seen_by_fingerprints(whole), whole
        self.element = self.symmetry.identity()
        self._source, self._names, self._passes = source, tuple(names), passes

    def __getitem__(self, name: str) -> Tensor:
        stored = self._source.stored[name]
        tensor = self._source.read(name, dtype=work_dtype(stored.dtype))
        require_finite({name: tensor}, str(self._source.path), self.symmetry.structure)
        self._passes.advance(stored.nbytes)
        moved = move_tensor(self.symmetry, self.element, name, tensor).unsqueeze(0)
        return without_marks(self.symmetry.sums({name: moved})[name], name, self._whole)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@contextmanager
def balanced_tensors(job: FileJob, symmetry: Symmetry, progress: Progress) -> Iterator[BalancedTensors]:
    """Return the balanced tensors of a checkpoint for its fingerprint, which reads each tensor twice.

    Raises:
        KeyError: A parameter that the symmetry moves is missing.
        ValueError: The memory does not suffice, parameters do not fit the symmetry, or a product of matrices lacks full
            rank.
    """
    source, limit = job.source, job.limit
    symmetry = symmetry.bind(source.on_meta())
    require_movable(symmetry.groups, source.on_meta(), symmetry.buffers)
    symmetry.require_ones({name: source[name] for name in symmetry.ones if name in source.stored})
    ignored = {*symmetry.buffers, *(name for names in symmetry.tied for name in names[1:])}
    stored = {n: one for n, one in source.stored.items() if n not in ignored and one.dtype in VALUES and one.nbytes}
    is_split = bool(symmetry.translations or symmetry.rotatable)
    wide = charted(symmetry) if is_split else ()
    sizes = {name: work_dtype(one.dtype).itemsize * math.prod(one.shape) for name, one in stored.items()}
    largest = max(size * (1 + (name in wide)) for name, size in sizes.items())
    peak = int(HELD * SLACK * largest) + BASE + limit.held()
    if peak > limit.nbytes:
        raise ValueError(
            f"a fingerprint holds {size_text(peak)} at once, for the largest tensor of {source.label!r}, more than the "
            f"{size_text(limit.nbytes)} that memory allows; allow {size_text(peak)} or more"
        )
    nbytes = sum(one.nbytes for one in stored.values())
    if is_split:
        source = RepresentativeCheckpoint(source, symmetry)
        job = replace(job, checkpoints=(source,))
    passes = Passes((source,), [], progress)
    tensors = BalancedTensors(source, symmetry, list(stored), passes)
    if has_balance(tensors.symmetry):
        tensors.element = _balance(job, tensors.symmetry, passes, nbytes)
    with passes.timed("measuring", 2 * nbytes):
        yield tensors


def _balance(job: FileJob, symmetry: Symmetry, passes: Passes, nbytes: int) -> Element:
    if has_null_spaces(Moved(job.source, lambda _, tensor: tensor.double()), symmetry):
        raise ValueError(
            f"a product of matrices in {job.source.label!r} has less than full rank, and its fingerprint "
            f"{job.needs_memory}"
        )
    with passes.timed("balancing", nbytes):
        (element,), _ = balance_streamed((job.source,), symmetry, "move", passes)
    return element


def seen_by_fingerprints(symmetry: Symmetry) -> Symmetry:
    """Return the symmetry under which fingerprints are invariant: that of representatives, if their streams are
    rotated.
    """
    return symmetry.on_representatives(rotate=True) if symmetry.rotatable else symmetry


def without_marks(tensor: Tensor, name: str, symmetry: Symmetry) -> Tensor:
    """Return a tensor `[models, ...]` without the marks that reorderings of gains and half periods leave on it.

    Gains of rotated streams are one. If some gains are zero, the stream is reordered instead of rotated, so its gains
    are sorted. Biases to which half periods are added are replaced by `_without_shifts`.
    """
    if any(name in gains_of(symmetry, group) for group in symmetry.rotatable):
        return tensor.sort(-1).values
    return _without_shifts(tensor, symmetry.sites.get(name, ()))


def _without_shifts(tensor: Tensor, sites: Sequence[Site]) -> Tensor:
    """Return `sin(pi x / c)` of a tensor to which half periods c are added, because a half period only changes the sign
    of the sine.
    """
    amounts = {abs(amount) for site in sites for amount in site.placement.shift if amount}
    if not amounts:
        return tensor
    step = min(amounts)
    if any(abs(amount / step - round(amount / step)) > 1e-9 for amount in amounts):
        return torch.zeros_like(tensor)
    return (math.pi / step * tensor).sin()

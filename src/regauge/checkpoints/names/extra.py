"""Tensors in files that no class of their model has.

In all networks, tensors of the first network replace the tensors that no class has.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from regauge.checkpoints.checkpoint import Checkpoint, CheckpointView
from regauge.checkpoints.form import Form
from regauge.checkpoints.names.conversion import Conversion
from regauge.checkpoints.names.converted import Converted, ranges_of
from regauge.core.counted import shorten

ALONE = "the model has no {names}, which {are} copied without changes and may not match the transformed tensors"
SAME = "the model has no {names}, which {are} the same in all networks and copied without changes"
FIRST = "the model has no {names}, which {are} copied from {first} without changes"
LEFT = "left out: {names} of {label}, which neither the model nor {first} has"


class Sharing(CheckpointView):
    """A checkpoint in files, with some of its tensors replaced by those of another checkpoint, and some left out.

    Attributes:
        source: The checkpoint.
        other: The checkpoint that provides the replaced tensors.
        shared: The names of the replaced tensors.
    """

    def __init__(self, source: Checkpoint, other: Checkpoint, shared: Sequence[str], left: Sequence[str]) -> None:
        stored = {name: one for name, one in source.stored.items() if name not in left}
        last = next(reversed(stored.values()))
        for name in shared:
            like = stored.get(name, last)
            stored[name] = other.stored[name]._replace(file=like.file, start=like.start)
        super().__init__(source, stored)
        self.other, self.shared = other, frozenset(shared)

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype in which a tensor is read."""
        return (self.other if name in self.shared else self.source).dtype_of(name)

    def read(self, name: str, *, rows: tuple[int, int] | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """Return a copy of one tensor, or of a range of its first axis."""
        return (self.other if name in self.shared else self.source).read(name, rows=rows, dtype=dtype)

    def written_as(self, form: Form) -> "Sharing":
        """Return a copy whose output is written in another form."""
        result = Sharing(self.source.written_as(form), self.other, (), ())
        result.stored, result.shared = self.stored, self.shared
        return result


def share_extra(checkpoints: Sequence[Checkpoint]) -> tuple[Checkpoint, ...]:
    """Return the checkpoints, in which tensors that the model lacks are replaced by those of the first checkpoint.

    An output that is written from one of the returned checkpoints also has the extra tensors. The notes of each
    checkpoint list the replaced tensors, and the checkpoint's own tensors that are left out.
    """
    first, *others = checkpoints
    wanted = first.unknown
    if not others:
        return (_settle(first, _source(first), wanted, [_say(ALONE, wanted)]),)
    same = [name for name in wanted if all(_is_same(name, _source(first), _source(one)) for one in others)]
    notes = [_say(SAME, same)] if same else []
    differing = [name for name in wanted if name not in same]
    notes += [_say(FIRST, differing, first=first.label)] if differing else []
    sources = [_source(first)]
    for one in others:
        left = [name for name in one.unknown if name not in wanted]
        sources.append(Sharing(_source(one), sources[0], differing, left) if differing or left else _source(one))
        notes += [_say(LEFT, left, label=one.label, first=first.label)] if left else []
    return tuple(_settle(one, own, wanted, notes) for one, own in zip(checkpoints, sources, strict=True))


def _settle(checkpoint: Checkpoint, source: Checkpoint, wanted: Sequence[str], notes: Sequence[str]) -> Checkpoint:
    """Decide for each extra tensor whether the model ignores it, and add notes about these tensors."""
    if isinstance(checkpoint, Converted):
        known = checkpoint.conversion
    else:
        known = Conversion({name: name for name in checkpoint.stored})
    extra = (*known.ignored, *wanted)
    result = Converted(source, replace(known, extra=extra, ignored=extra)).written_as(checkpoint.form)
    result.notes, result.replaced = (*checkpoint.notes, *notes), checkpoint.replaced
    return result


def _source(checkpoint: Checkpoint) -> Checkpoint:
    return checkpoint.source if isinstance(checkpoint, Converted) else checkpoint


def _is_same(name: str, first: Checkpoint, other: Checkpoint) -> bool:
    """Return whether a tensor is equal in two networks in files, compared chunk by chunk."""
    x, y = first.stored[name], other.stored.get(name)
    if y is None or (x.shape, x.dtype) != (y.shape, y.dtype):
        return False
    return all(torch.equal(first.read(name, rows=r), other.read(name, rows=r)) for r in ranges_of(x))


def _say(text: str, names: Sequence[str], **words: str) -> str:
    is_one = len(names) == 1
    return text.format(names=shorten(names), are="is" if is_one else "are", they="it" if is_one else "they", **words)

"""Conversion of tensor names and tensor parts between the files of a network and its module.

A library may store a network under names that differ from the module's names. A library may also store the experts of a
layer one by one instead of stacked, or three matrices as one. For every tensor of the module, a `Conversion` lists the
entries in the files of which the tensor consists. A conversion works in both directions: tensors are assembled when
they are read, and are written with the names and shapes of the files.
"""

import json
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass, field
from functools import cached_property, reduce

import torch
from torch import Tensor

from regauge.checkpoints.names.boxes import Box, Boxes, cut, is_whole

KEPT = 4
"""The number of module tensors that are kept in memory while a file tensor that combines several of them is written."""


@dataclass(frozen=True)
class Blank:
    """The shape and dtype of a tensor without its data."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Return the number of entries of a tensor."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Conversion:
    """The sources, in the files, of all tensors of a module.

    Attributes:
        renamed: For every tensor that the files hold unchanged, its name in the files, by its name in the module.
        made: The source entries of every other tensor of the module.
        blanks: Shapes and dtypes of the tensors in `made`.
        files: Shapes and dtypes of the file tensors from which the tensors in `made` are assembled.
        extra: Names of file tensors that the module does not have.
        ignored: Extra names that are known to be unused, such as positions that the module recomputes.
    """

    renamed: Mapping[str, str]
    made: Mapping[str, Boxes] = field(default_factory=dict)
    blanks: Mapping[str, Blank] = field(default_factory=dict)
    files: Mapping[str, Blank] = field(default_factory=dict)
    extra: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check that every entry occurs exactly once, which makes a conversion invertible."""
        used = dict.fromkeys(self.files, 0)
        for name, boxes in self.made.items():
            for box in boxes:
                used[box.source] += box.numel
            if sum(box.numel for box in boxes) != self.blanks[name].numel:
                raise ValueError(f"the files hold a part of {name!r} only; they are not complete: fetch them again")
        for source, count in used.items():
            if count != self.files[source].numel:
                raise ValueError(
                    f"the model takes over only a part of {source!r}, which cannot be written again; load the folder "
                    "with transformers, and save it again"
                )

    @property
    def is_identity(self) -> bool:
        """Whether the files have exactly the names and tensors of the module."""
        return not self.made and not self.extra and all(name == stored for name, stored in self.renamed.items())

    @property
    def unknown(self) -> tuple[str, ...]:
        """Names of file tensors whose purpose is unknown."""
        return tuple(name for name in self.extra if name not in self.ignored)

    def to_json(self) -> str:
        """Return the conversion as JSON text."""
        made = {name: [astuple(box) for box in boxes] for name, boxes in self.made.items()}
        document = {"renamed": dict(self.renamed), "made": made, "extra": self.extra, "ignored": self.ignored}
        for field_name in ("blanks", "files"):
            blanks: Mapping[str, Blank] = getattr(self, field_name)
            document[field_name] = {name: [one.shape, _name(one.dtype)] for name, one in blanks.items()}
        return json.dumps(document)

    @classmethod
    def from_json(cls, text: str) -> "Conversion":
        """Read a conversion from its JSON text."""
        document = json.loads(text)
        made = {
            name: tuple(Box(source, start, there, *map(tuple, axes)) for source, start, there, *axes in boxes)
            for name, boxes in document["made"].items()
        }
        blanks, files = (
            {name: Blank(tuple(shape), getattr(torch, dtype)) for name, (shape, dtype) in document[key].items()}
            for key in ("blanks", "files")
        )
        return cls(document["renamed"], made, blanks, files, tuple(document["extra"]), tuple(document["ignored"]))

    @cached_property
    def names(self) -> dict[str, str]:
        """The module's names of all tensors that the files hold unchanged, by the names in the files."""
        return {stored: name for name, stored in self.renamed.items()}

    @cached_property
    def users(self) -> dict[str, tuple[str, ...]]:
        """For each file tensor in `files`, the module tensors that contain its entries."""
        found: dict[str, dict[str, None]] = {}
        for name, boxes in self.made.items():
            for box in boxes:
                found.setdefault(box.source, {})[name] = None
        return {source: tuple(names) for source, names in found.items()}

    def make(
        self,
        name: str,
        read: Callable[[str, tuple[int, int] | None], Tensor],
        *,
        rows: tuple[int, int] | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Return a module tensor that is assembled from the files, or a range of its first axis.

        Args:
            name: The name of the tensor in the module.
            read: A function that reads a file tensor, or a range of its first axis.
            rows: The range of the first axis.
            dtype: The dtype to which the tensor is converted.
        """
        blank = self.blanks[name]
        shape, boxes, skipped = blank.shape, self.made[name], 0
        if rows is not None:
            row = blank.numel // shape[0] if shape[0] else 0
            skipped, shape = rows[0] * row, (rows[1] - rows[0], *shape[1:])
            boxes = cut(boxes, skipped, rows[1] * row)
        result = torch.empty(shape, dtype=dtype or blank.dtype)
        for source in dict.fromkeys(box.source for box in boxes):
            own = [box for box in boxes if box.source == source]
            stored, first, end = self.files[source], min(b.there for b in own), max(b.end_there for b in own)
            if stored.shape:
                row = stored.numel // stored.shape[0]
                first, last = first // row, -(-end // row)
                values, passed = read(source, (first, last)), first * row
            else:
                values, passed = read(source, None), 0
            for box in own:
                box.copy(values.reshape(-1), result.view(-1), skipped_there=passed, skipped=skipped)
        return result

    def take_apart(self, source: str, values: Callable[[str], Tensor]) -> Tensor:
        """Return a tensor of the files, computed from the module tensors that `values` returns."""
        parts = {name: values(name).reshape(-1) for name in self.users[source]}
        dtype = reduce(torch.promote_types, (part.dtype for part in parts.values()))
        result = torch.empty(self.files[source].shape, dtype=dtype)
        for name, flat in parts.items():
            for box in self.made[name]:
                if box.source == source:
                    box.copy_back(flat, result.view(-1))
        return result


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def name_as_stored(
    conversion: Conversion, pieces: Callable[[str], Iterator[Tensor]], extra: Callable[[str], Iterator[Tensor]]
) -> Callable[[str], Iterator[Tensor]]:
    """Convert chunks of module tensors to chunks of file tensors, by the names in the files.

    Args:
        conversion: The sources of the module's tensors.
        pieces: A function that maps a module tensor's name to the tensor's chunks along axis 0.
        extra: A function that yields chunks of a tensor that the module does not have, by its name in the files.
    """
    kept: OrderedDict[str, Tensor] = OrderedDict()

    def value(name: str) -> Tensor:
        if name not in kept:
            kept[name] = join(pieces(name))
        kept.move_to_end(name)
        return kept[name]

    def stored_pieces(source: str) -> Iterator[Tensor]:
        if source in conversion.names:
            yield from pieces(conversion.names[source])
        elif source in conversion.files:
            yield conversion.take_apart(source, value)
            while len(kept) > max(KEPT, len(conversion.users[source])):
                kept.popitem(last=False)
        else:
            yield from extra(source)

    return stored_pieces


def join(pieces: Iterable[Tensor]) -> Tensor:
    """Concatenate the chunks of a tensor along axis 0."""
    parts = list(pieces)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def conversion_of(
    stored: Mapping[str, Blank],
    made: Mapping[str, tuple[tuple[int, ...], Boxes]],
    extra: tuple[str, ...],
    ignored: tuple[str, ...],
) -> Conversion:
    """Return the conversion that assembles module tensors, each with a shape and boxes, from stored tensors."""
    renamed, rest, blanks = {}, {}, {}
    files: dict[str, Blank] = {}
    for name, (shape, boxes) in made.items():
        sources = list(dict.fromkeys(box.source for box in boxes))
        if len(sources) == 1 and stored[sources[0]].shape == shape and is_whole(boxes, math.prod(shape)):
            renamed[name] = sources[0]
            continue
        files |= {source: stored[source] for source in sources}
        dtype = reduce(torch.promote_types, (stored[source].dtype for source in sources))
        rest[name], blanks[name] = boxes, Blank(shape, dtype)
    return Conversion(renamed, rest, blanks, files, extra, ignored)

"""Conversion of names and pieces of tensors that differ between the files of a network and its module.

A library may store a network under other names than those of its module, the experts of a layer one by one instead of
stacked, or three matrices as one. A `Conversion` lists, for every tensor of the module, the entries of tensors in the
files of which it consists. It applies in both directions: tensors are assembled when they are read, and written tensors
have the names and shapes of the files.
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
"""Tensors of the module that are kept while files are written that hold parts of several of them."""


@dataclass(frozen=True)
class Blank:
    """A tensor without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Return the number of entries of a tensor."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Conversion:
    """The sources in the files of all tensors of a module.

    Attributes:
        renamed: The name in the files of every tensor that is there as it is, by its name in the module.
        made: The entries of every other tensor of the module.
        blanks: Shapes and dtypes of the tensors in `made`.
        files: Shapes and dtypes of the tensors in the files that those consist of.
        extra: Names in the files of tensors that the module does not have.
        ignored: The extra names that are known to be of no use, such as positions that the module makes anew.
    """

    renamed: Mapping[str, str]
    made: Mapping[str, Boxes] = field(default_factory=dict)
    blanks: Mapping[str, Blank] = field(default_factory=dict)
    files: Mapping[str, Blank] = field(default_factory=dict)
    extra: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Require that every entry is somewhere, once: a conversion can be undone."""
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
        """Whether the files have the names and tensors of the module, and no others."""
        return not self.made and not self.extra and all(name == stored for name, stored in self.renamed.items())

    @property
    def unknown(self) -> tuple[str, ...]:
        """Names in the files of tensors of which nothing says what they are for, or what becomes of them."""
        return tuple(name for name in self.extra if name not in self.ignored)

    def to_json(self) -> str:
        """Return the text form."""
        made = {name: [astuple(box) for box in boxes] for name, boxes in self.made.items()}
        document = {"renamed": dict(self.renamed), "made": made, "extra": self.extra, "ignored": self.ignored}
        for field_name in ("blanks", "files"):
            blanks: Mapping[str, Blank] = getattr(self, field_name)
            document[field_name] = {name: [one.shape, _name(one.dtype)] for name, one in blanks.items()}
        return json.dumps(document)

    @classmethod
    def from_json(cls, text: str) -> "Conversion":
        """Read the text form."""
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
        """The name in the module of every tensor that is in the files as it is."""
        return {stored: name for name, stored in self.renamed.items()}

    @cached_property
    def users(self) -> dict[str, tuple[str, ...]]:
        """The tensors of the module that entries of each other tensor in the files belong to."""
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
        """Return a tensor of the module that the files do not hold as it is, or a range of its first axis.

        Args:
            name: Its name in the module.
            read: Reads a tensor of the files, or a range of its first axis.
            rows: The range.
            dtype: The dtype to which the values are converted.
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
        """Return a tensor of the files that the module has not as it is, from those of the module that `values`
        gives."""
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
    """Turn pieces of the module's tensors into pieces of those in the files, by their names there.

    Args:
        conversion: The sources of the module's tensors.
        pieces: Function from the name of a tensor of the module to its values, in pieces along axis 0.
        extra: Pieces of a tensor that the module does not have, by its name in the files.
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
    """Return a tensor from its pieces along axis 0."""
    parts = list(pieces)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def conversion_of(
    stored: Mapping[str, Blank],
    made: Mapping[str, tuple[tuple[int, ...], Boxes]],
    extra: tuple[str, ...],
    ignored: tuple[str, ...],
) -> Conversion:
    """Return the conversion that makes tensors of a module, each with its shape and its boxes, of stored ones."""
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

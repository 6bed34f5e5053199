"""One shard: a safetensors file with the weights and metadata rows of some networks, written once.

The page "store" of the documentation specifies the layout of the file. The header is read without memory-mapping the
file, which makes it fast to open thousands of shards. Other programs can read a shard as an ordinary safetensors file.
"""

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regauge.checkpoints.disk import PARTIAL
from regauge.checkpoints.formats.headers import StoredTensor, encode_header, layout_of, read_header
from regauge.checkpoints.writing import SUFFIX, bytes_of, whole_file
from regauge.core.progress import Progress, no_progress
from regauge.core.typed_json import parse_json
from regauge.storage.store.columns import Array, Column, describe, narrow, require_codes, require_described
from regauge.storage.store.manifest import FOLDER, require_manifest
from regauge.storage.store.packing import Segment

FORMAT = "regauge.shard"
VERSION = 1
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.=-]*")
"""A pattern of valid shard names."""
IDENTITY = ("id", "step")
"""The columns that identify each network."""
BLANK = "0" * 64
"""The placeholder for the checksum while the checksum is computed."""


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """The header of a shard: a description of each column, and the location of each tensor in the file.

    Two shards are equal only if they are the same object. `start` is the offset of the first byte after the header, and
    `size` is the size of the whole file.
    """

    path: Path
    count: int
    columns: Mapping[str, Any]
    places: Mapping[str, StoredTensor]
    checksum: str
    start: int
    size: int

    @classmethod
    def open(cls, path: Path) -> "Shard":
        """Read the header of a shard."""
        try:
            places, metadata, start, size = read_header(path)
            if metadata["format"] != FORMAT:
                raise ValueError(f"its format is {metadata['format']!r}, not {FORMAT!r}")
            if metadata["version"] != str(VERSION):
                raise ValueError(f"it is of version {metadata['version']}, but this regauge reads version {VERSION}")
            count = int(metadata["rows"])
            if any(place.shape[:1] != (count,) for place in places.values()) or not 0 <= count <= size:
                raise ValueError(f"a tensor does not have {count} rows")
            columns = parse_json(metadata["columns"])
            dtypes = {name: dtype_name(place.dtype) for name, place in places.items() if len(place.shape) == 1}
            for name, entry in columns.items():
                require_described(name, entry, dtypes)
            if count and any(columns[name]["kind"] != "int" or f"null/{name}" in places for name in IDENTITY):
                raise ValueError(f"it lacks the {' and '.join(IDENTITY)} of each network")
            return cls(path, count, columns, places, metadata["checksum"], start, size)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            reason = str(error) if isinstance(error, ValueError) else f"its header is malformed: {error!r}"
            raise ValueError(damage_message(path, reason)) from error

    def require_segments(self, segments: Iterable[Segment]) -> "Shard":
        """Return the shard. Raise a ValueError if its networks are stored in other dtypes or sizes than expected."""
        for segment in segments:
            place, shape = self.places.get(segment.name), (self.count, segment.size)
            if place is None or (place.dtype, place.shape) != (segment.dtype, shape):
                raise ValueError(
                    f"the shard {str(self.path)!r} has no {segment.name} of shape {shape}, so it belongs to another "
                    "store; move it away"
                )
        return self

    def map(self) -> Array:
        """Return the bytes of the file as a memory map, if the file was not replaced since it was opened."""
        if not self.path.exists():
            raise FileNotFoundError(
                f"the shard {str(self.path)!r} was deleted; shards must not be deleted while they are read"
            )
        try:
            tensor = torch.from_file(str(self.path), shared=False, size=self.size, dtype=torch.uint8)
        except RuntimeError as error:
            reason = f"it cannot be mapped ({str(error).splitlines()[0]})"
            raise ValueError(damage_message(self.path, reason)) from error
        content: Array = tensor.numpy()
        content.flags.writeable = False
        if self.checksum.encode() not in content[: self.start].tobytes():
            raise ValueError(damage_message(self.path, "it was replaced by another file after it was listed"))
        return content

    def column(self, name: str, content: Array) -> Column | None:
        """Return one column, given the bytes of the file, or None if no network has a value in the column."""
        described = self.columns.get(name)
        if described is None:
            return None
        distinct = tuple(described.get("distinct", ()))
        if "value" in described:
            return Column(described["kind"], narrow(np.array([described["value"]])), None, distinct)
        values, null = (self._values(part, content) for part in (f"rows/{name}", f"null/{name}"))
        assert values is not None
        if described["kind"] == "json":
            try:
                require_codes(name, values, distinct)
            except ValueError as error:
                raise ValueError(damage_message(self.path, str(error))) from error
        return Column(described["kind"], values, null, distinct)

    def _values(self, name: str, content: Array) -> Array | None:
        place = self.places.get(name)
        if place is None:
            return None
        return np.frombuffer(content, dtype_name(place.dtype), math.prod(place.shape), place.start or 0).copy()


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, which equals numpy's name if numpy has the dtype."""
    return str(dtype).removeprefix("torch.")


def path_of(folder: Path, name: str) -> Path:
    """Return the path of a shard with the given name in the store of a folder. The file need not exist."""
    if not NAME.fullmatch(name):
        raise ValueError(f"a shard cannot be named {name!r}; use letters, digits, '-', '_', '=' and '.'")
    return folder / FOLDER / f"{name}{SUFFIX}"


def list_shards(folder: Path) -> list[Path]:
    """Return the paths of the shards in the store of a folder, sorted by name."""
    with os.scandir(folder / FOLDER) as entries:
        names = sorted(e.name for e in entries if e.name.endswith(SUFFIX) and not e.name.startswith("."))
    return [folder / FOLDER / name for name in names]


def write(path: Path, weights: Mapping[str, Tensor], columns: Mapping[str, Column], count: int) -> Path:
    """Write a new shard with weights `[networks, values]` and metadata, atomically."""
    tensors = dict(weights)
    described = {name: describe(column) for name, column in columns.items()}
    for name, column in columns.items():
        if "value" not in described[name]:
            tensors[f"rows/{name}"] = torch.from_numpy(column.values)
            if column.null is not None:
                tensors[f"null/{name}"] = torch.from_numpy(column.null)
    tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))  # every tensor is aligned
    metadata = {"format": FORMAT, "version": str(VERSION), "checksum": BLANK, "rows": str(count)}
    header = encode_header(layout_of(tensors), metadata | {"columns": json.dumps(described)})
    pieces = [bytes_of(tensor) for tensor in tensors.values()]
    digest = hashlib.sha256(header)
    for piece in pieces:
        digest.update(piece)
    with whole_file(path, is_new=True) as temporary, open(temporary, "wb") as file:
        file.write(header.replace(BLANK.encode(), digest.hexdigest().encode(), 1))
        file.writelines(pieces)
    return path


@dataclass(frozen=True)
class Verification:
    """The numbers of intact shards and of their networks, and a message for each damaged shard.

    `leftovers` are incomplete files of interrupted writers, which do no harm. Leftovers can be deleted when no process
    is writing.
    """

    shards: int
    networks: int
    damaged: Mapping[Path, str]
    leftovers: tuple[Path, ...]

    @property
    def ok(self) -> bool:
        """Whether all shards are intact."""
        return not self.damaged


def verify(folder: str | Path, *, progress: Progress = no_progress) -> Verification:
    """Read every shard of the store in a folder, and compare the checksums. Damaged shards do not end the check.

    Raises:
        FileNotFoundError: There is no store in the folder.
    """
    folder = require_manifest(Path(folder)).parent
    paths = list_shards(folder)
    advance, networks, damaged = progress("shards", len(paths)), 0, {}
    for path in paths:
        try:
            networks += _check(path)
        except ValueError as error:
            damaged[path] = str(error)
        advance()
    leftovers = tuple(sorted(path for path in (folder / FOLDER).iterdir() if path.name.endswith(PARTIAL)))
    return Verification(len(paths) - len(damaged), networks, damaged, leftovers)


def _check(path: Path) -> int:
    """Read a whole shard, and return the number of its networks."""
    shard = Shard.open(path)
    with open(path, "rb") as file:
        digest = hashlib.sha256(file.read(shard.start).replace(shard.checksum.encode(), BLANK.encode(), 1))
        while piece := file.read(1 << 22):
            digest.update(piece)
    if digest.hexdigest() != shard.checksum:
        raise ValueError(damage_message(path, "its checksum does not match its bytes"))
    return shard.count


def damage_message(path: Path, reason: str) -> str:
    """Return an error message about a file that cannot be read as a shard."""
    return (
        f"{str(path)!r} cannot be read as a shard: {reason}; `regauge zoo verify` lists all such files, and the store "
        "is intact without them"
    )

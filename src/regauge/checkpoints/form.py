"""The form in which a network is written: the dtype of tensors, and the size of files."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from regauge.checkpoints.formats.file_formats import CHUNKS, METADATA
from regauge.checkpoints.formats.headers import TensorSpec
from regauge.checkpoints.memory_limit import read_size
from regauge.checkpoints.plain_files import parse_object
from regauge.checkpoints.writing import SUFFIX, Shard

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
"""Dtypes in which a network can be written, by name."""
INDEX_SUFFIX = SUFFIX + ".index.json"
SETTINGS = ("dtype", "torch_dtype")
"""Names of the entry in config.json that sets the dtype."""


@dataclass(frozen=True)
class Form:
    """The form in which a network is written. If a field is None, the output is like the original files.

    Attributes:
        dtype: The dtype of all floating-point tensors, to which each entry is rounded once.
        shard_size: The largest total size in bytes of the tensors in one file. A tensor larger than `shard_size` is
            stored in a separate file.

    Raises:
        ValueError: The dtype is not in `DTYPES`, or the size is not positive.
    """

    dtype: torch.dtype | None = None
    shard_size: int | None = None

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in DTYPES.values():
            raise ValueError(f"a network cannot be written as {self.dtype}; choose one of {', '.join(DTYPES)}")
        if self.shard_size is not None and self.shard_size <= 0:
            raise ValueError(f"the shard size is {self.shard_size} bytes; it must be positive, for example 5GB")

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that differ from the form of the original files, ready for JSON."""
        given = {"dtype": None if self.dtype is None else _name(self.dtype), "shard-size": self.shard_size}
        return {key: value for key, value in given.items() if value is not None}

    @classmethod
    def of(cls, dtype: str | torch.dtype | None = None, shard_size: int | str | None = None) -> "Form":
        """Return a form. The dtype may be given by name, and the size in bytes or as a string such as "5GB"."""
        if isinstance(dtype, str):
            if dtype not in DTYPES:
                raise ValueError(f"the dtype {dtype!r} is unknown; choose one of {', '.join(DTYPES)}")
            dtype = DTYPES[dtype]
        return cls(dtype, read_size(shard_size, "shard size") if isinstance(shard_size, str) else shard_size)

    def dtype_of(self, stored: torch.dtype) -> torch.dtype:
        """Return the dtype in which a tensor is written."""
        return stored if self.dtype is None or not stored.is_floating_point else self.dtype

    def work_dtype(self, stored: torch.dtype) -> torch.dtype:
        """Return the dtype in which a tensor is read.

        The dtype is wide enough that the tensor is rounded only once, when it is written.
        """
        return torch.promote_types(stored, self.dtype_of(stored)) if stored.is_floating_point else stored

    def layout(self, shards: Sequence[Shard], stem: str, count: int = 0) -> list[Shard]:
        """Return the files to write for a network, given its original files. Names of new files begin with `stem`.

        A distributed checkpoint has about `count` files of equal sizes, unless this form requires more files.
        """
        cast = [
            replace(one, tensors=tuple(spec._replace(dtype=self.dtype_of(spec.dtype)) for spec in one.tensors))
            for one in shards
        ]
        if self.shard_size is None and not count:
            return cast
        size = self.shard_size or -(-sum(one.nbytes for one in cast) // count)
        parts = list(_fill([spec for one in cast for spec in one.tensors], size))
        if stem == METADATA:
            names = [f"__{k}_0{CHUNKS}" for k in range(len(parts))]
        elif len(parts) == 1:
            names = [stem + SUFFIX]
        else:
            names = [f"{stem}-{k + 1:05}-of-{len(parts):05}{SUFFIX}" for k in range(len(parts))]
        return [
            replace(shards[0], file=name, tensors=tuple(sorted(part, key=lambda spec: -spec.dtype.itemsize)))
            for name, part in zip(names, parts, strict=True)
        ]

    def index(self, shards: Sequence[Shard], known: str) -> str:
        """Return the name of the index of some files, given the name of the original network's index."""
        named = re.fullmatch(r"(.+)-\d{5}-of-\d{5}" + re.escape(SUFFIX), shards[0].file)
        if known.endswith(INDEX_SUFFIX) and (self.shard_size is None or named is None):
            return known
        return ("model" if named is None else named[1]) + INDEX_SUFFIX

    def describe(self, content: bytes, config: Path) -> bytes:
        """Return the content of a config.json in which every dtype is replaced by this form's dtype."""
        if self.dtype is None:
            return content
        named = _rename(parse_object(content, config), _name(self.dtype))
        return (json.dumps(named, indent=2, ensure_ascii=False) + "\n").encode()


AS_STORED = Form()
"""The form with the dtypes and file sizes of the original files."""


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _fill(specs: Sequence[TensorSpec], size: int) -> Iterator[list[TensorSpec]]:
    """Yield groups of consecutive tensors, each of which fills one file."""
    part: list[TensorSpec] = []
    for spec in specs:
        if part and sum(one.nbytes for one in part) + spec.nbytes > size:
            yield part
            part = []
        part.append(spec)
    yield part


def _rename(value: Any, name: str) -> Any:
    if isinstance(value, list):
        return [_rename(one, name) for one in value]
    if not isinstance(value, dict):
        return value
    return {key: name if key in SETTINGS and isinstance(one, str) else _rename(one, name) for key, one in value.items()}

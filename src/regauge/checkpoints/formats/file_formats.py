"""The formats of files that hold networks: their suffixes, and the functions that open and write them.

Nothing here imports torch. Other packages add formats by the entry point `regauge.checkpoint_formats`, which names a
`FileFormat`.
"""

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

GROUP = "regauge.checkpoint_formats"
"""Entry points of other packages that are formats, too."""


@dataclass(frozen=True)
class FileFormat:
    """A format of files that hold networks.

    Attributes:
        suffixes: Endings of its files.
        opener: `package.module:function`, from a path and the name of an entry, or None, to an `OpenedFile`; a
            ValueError says what is wrong with a file. Empty for formats that are known and not read.
        writer: `package.module:function`, from a `Shard` and its `Pieces` to the bytes of a file, one part after the
            other; empty for formats that are not written.
        names: Names by which a folder is read, in this order, before those of the formats behind it.
        alone: Patterns of names of which a folder is read if a single file has one.
        has_entries: Whether a file may hold several networks, of which `FILE:NAME` is one.
        magic: The first bytes of its files, if any; they tell the format whatever the name is.
        is_refused: Whether the opener says in a sentence why such files are not read, and what to do.
        is_folder: Whether its files are one checkpoint together, which is read and written as a folder alone.
    """

    suffixes: tuple[str, ...]
    opener: str = ""
    writer: str = ""
    names: tuple[str, ...] = ()
    alone: tuple[str, ...] = ()
    has_entries: bool = False
    magic: bytes = b""
    is_refused: bool = False
    is_folder: bool = False


METADATA = ".metadata"
"""The file of a folder of `torch.distributed.checkpoint` that says where its tensors are."""
CHUNKS = ".distcp"
"""The ending of the files that hold them."""

FORMATS: dict[str, FileFormat] = {
    "safetensors": FileFormat(
        (".safetensors",),
        opener="regauge.checkpoints.formats.headers:open_safetensors",
        writer="regauge.checkpoints.writing:encode_safetensors",
        names=("model.safetensors.index.json", "model.safetensors"),
        alone=("*.safetensors.index.json", "*.safetensors"),
    ),
    "torch": FileFormat(
        (".pt", ".pth", ".bin", ".ckpt"),
        opener="regauge.checkpoints.formats.state_dicts:open_torch_file",
        names=("pytorch_model.bin.index.json", "pytorch_model.bin"),
        has_entries=True,
    ),
    "torch.distributed.checkpoint": FileFormat(
        (METADATA, CHUNKS),
        opener="regauge.checkpoints.formats.distributed:open_metadata",
        writer="regauge.checkpoints.writing_distributed:encode_chunks",
        names=(METADATA,),
        has_entries=True,
        is_folder=True,
    ),
    "gguf": FileFormat(
        (".gguf",),
        opener="regauge.checkpoints.formats.quantized:refuse_gguf",
        alone=("*.gguf",),
        magic=b"GGUF",
        is_refused=True,
    ),
    "of other programs": FileFormat((".h5", ".msgpack", ".onnx", ".npz", ".pkl")),
}
"""The formats by their names, in the order in which a folder is searched."""

INDEX = ".index.json"
"""Ending of the index of shards, behind that of their format."""


@cache
def every_format() -> dict[str, FileFormat]:
    """Return the formats of this package, and those of others that are installed."""
    return FORMATS | {point.name: point.load() for point in entry_points(group=GROUP)}


def weight_suffixes(*, is_read: bool = False, is_written: bool = False, has_entries: bool = False) -> tuple[str, ...]:
    """Endings of files of weights: of all formats, or of those that are read, are written or have entries.

    A file that is read or written is a checkpoint, and no part of a folder.
    """
    wanted = [
        one
        for one in every_format().values()
        if (not is_read or (one.opener and not one.is_refused and not one.is_folder))
        and (not is_written or (one.writer and not one.is_folder))
        and (not has_entries or one.has_entries)
    ]
    return tuple(suffix for one in wanted for suffix in one.suffixes)


def format_of(path: Path, begin: bytes = b"") -> FileFormat | None:
    """Return the format of a file that is read, by its first bytes or else by its name; None if it is none."""
    known = [one for one in every_format().values() if one.opener]
    told = (one for one in known if one.magic and begin.startswith(one.magic))
    return next(told, None) or next((one for one in known if path.name.endswith(one.suffixes)), None)


def is_single_file(out: Path) -> bool:
    """Return whether an output of this name is one file of weights, and no folder."""
    return out.name.endswith(weight_suffixes(is_written=True))


def writer_of(name: str) -> Any:
    """Return the writer of the format that files of this name have.

    Raises:
        ValueError: No format that is written has such names.
    """
    found = next((one for one in every_format().values() if one.writer and name.endswith(one.suffixes)), None)
    if found is None:
        written = " or ".join(weight_suffixes(is_written=True))
        raise ValueError(f"{name!r} cannot be written; a file of weights ends in {written}")
    return load(found.writer)


def load(text: str) -> Any:
    """Return the function that `package.module:function` names."""
    module, _, name = text.partition(":")
    return getattr(import_module(module), name)

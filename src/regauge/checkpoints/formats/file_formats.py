"""The file formats of networks: their suffixes, and the functions that open and write such files.

This module does not import torch. Other packages add formats by the entry point `regauge.checkpoint_formats`, which
names a `FileFormat`.
"""

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

GROUP = "regauge.checkpoint_formats"
"""The entry point group by which other packages add formats."""


@dataclass(frozen=True)
class FileFormat:
    """A file format of networks.

    Attributes:
        suffixes: The suffixes of files in this format.
        opener: A function `package.module:function` that opens a file. The arguments of the function are a path, and
            the name of an entry or None; the function returns an `OpenedFile`. For a damaged file, the function raises
            a ValueError. The text is empty for formats that are recognized but not read.
        writer: A function `package.module:function` that yields the bytes of a file in chunks. The arguments of the
            function are a `Shard` (one file with its tensors) and `Pieces` (the chunks of each tensor). The text is
            empty for formats that are not written.
        names: File names that are searched in a folder, in this order. All names of one format are searched before the
            names of the next format.
        alone: Patterns of file names. A folder is read in this format if exactly one file has a matching name.
        has_entries: Whether a file may contain several networks, selected by `FILE:NAME`.
        magic: The first bytes of files in this format, if all files begin with the same bytes. The first bytes identify
            the format for any file name.
        is_refused: Whether the opener only raises an error, which explains why such files are not read and what to do.
        is_folder: Whether a checkpoint is a whole folder of such files. If `is_folder`, a single file is never read or
            written.
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
"""The file in a folder of `torch.distributed.checkpoint` that lists the locations of tensors."""
CHUNKS = ".distcp"
"""The suffix of the files that contain the tensors' chunks."""

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
"""The formats by name, in the order in which a folder is searched."""

INDEX = ".index.json"
"""The suffix of an index of shards, for example in `model.safetensors.index.json`."""


@cache
def every_format() -> dict[str, FileFormat]:
    """Return the formats of this package and of other installed packages."""
    return FORMATS | {point.name: point.load() for point in entry_points(group=GROUP)}


def weight_suffixes(*, is_read: bool = False, is_written: bool = False, has_entries: bool = False) -> tuple[str, ...]:
    """Return suffixes of weight files: of all formats, or of formats that are read, are written or have entries.

    Suffixes for reading or writing leave out formats whose checkpoints are folders.
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
    """Return the format of a file, from its first bytes or, failing that, from its name; None if no format matches."""
    known = [one for one in every_format().values() if one.opener]
    told = (one for one in known if one.magic and begin.startswith(one.magic))
    return next(told, None) or next((one for one in known if path.name.endswith(one.suffixes)), None)


def is_single_file(out: Path) -> bool:
    """Return whether an output of this name is one weight file instead of a folder."""
    return out.name.endswith(weight_suffixes(is_written=True))


def writer_of(name: str) -> Any:
    """Return the writer of the format that is written to files of a given name.

    Raises:
        ValueError: No format that can be written has the suffix of the given name.
    """
    found = next((one for one in every_format().values() if one.writer and name.endswith(one.suffixes)), None)
    if found is None:
        written = " or ".join(weight_suffixes(is_written=True))
        raise ValueError(f"{name!r} cannot be written; a file of weights ends in {written}")
    return load(found.writer)


def load(text: str) -> Any:
    """Return the function with the name `package.module:function`."""
    module, _, name = text.partition(":")
    return getattr(import_module(module), name)

"""The header of a safetensors file: where each of its tensors lies, and the strings that it holds."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Names of dtypes in safetensors headers."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file.

    Attributes:
        name: Its name.
        file: The file that holds it.
        dtype: The dtype of its values.
        shape: Its shape.
        start: Its first byte in the file; None in torch files, which are read as a whole.
        nbytes: Its length in bytes.
    """

    name: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int | None
    nbytes: int


def read_header(file: Path) -> tuple[list[StoredTensor], dict[str, str]]:
    """The tensors of a safetensors file in the order in which they lie there, and its metadata.

    Raises:
        ValueError: The file is damaged or not complete, or holds a dtype that torch lacks.
    """
    try:
        with safe_open(file, framework="pt"):  # The library checks offsets and the length of the file.
            pass
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header: dict[str, Any] = json.loads(stream.read(length))
    except SafetensorError as error:
        raise ValueError(
            f"{str(file)!r} is not a readable safetensors file ({error}); it is damaged or was not copied "
            "completely: fetch it again"
        ) from error
    metadata = header.pop("__metadata__", {})
    found = []
    for name, what in header.items():
        if what["dtype"] not in DTYPES:
            raise ValueError(
                f"{name!r} of {str(file)!r} has dtype {what['dtype']}; only {', '.join(DTYPES)} can be read"
            )
        first, end = what["data_offsets"]
        dtype, shape = DTYPES[what["dtype"]], tuple(what["shape"])
        found.append(StoredTensor(name, file, dtype, shape, 8 + length + first, end - first))
    return sorted(found, key=lambda one: one.start or 0), metadata

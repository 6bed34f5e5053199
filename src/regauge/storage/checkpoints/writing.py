"""Write files whole or not at all; checkpoints as safetensors."""

import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

SUFFIX = ".safetensors"
PARTIAL = ".partial"
"""How the names of files end that are not complete."""


@contextmanager
def whole_file(path: str | Path, *, is_new: bool = False) -> Iterator[Path]:
    """The name under which a file is written: it gets its own when the block ends well and all of it is on the disk.

    No other writer has that name, on this machine or another one.

    Args:
        path: The file's own name.
        is_new: Whether a file of that name stays if there is one at the end; it is replaced otherwise.

    Raises:
        FileExistsError: Another writer was first, and `is_new`.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}{PARTIAL}")
    try:
        yield temporary
        flush(temporary)
        if is_new:
            _link(temporary, path)
        else:
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    flush(path.parent)


def _link(temporary: Path, path: Path) -> None:
    """Give a file its name unless another one has it."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise FileExistsError(f"{str(path)!r} was written by somebody else meanwhile, and stays as it is") from None
    except OSError:  # a file system without hard links, on which two writers in the same instant are not told apart
        if path.exists():
            raise FileExistsError(f"{str(path)!r} was written by somebody else meanwhile, and stays") from None
        os.replace(temporary, path)


def save(
    params: Mapping[str, Tensor],
    path: str | Path,
    *,
    overwrite: bool = False,
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """Write parameters to a safetensors file: `load(save(params, path))` has the same bits, shapes and dtypes.

    The file appears under its name only when it is complete and on the disk. Tensors that share memory (tied
    parameters, views) are written in full under every name.

    Args:
        params: Parameters and buffers by name.
        path: Ends in `.safetensors`, in a folder that exists.
        overwrite: Whether a file of that name may be replaced.
        metadata: Strings to store in the file's header.

    Returns:
        The path.

    Raises:
        FileExistsError: The file exists, and `overwrite` is false.
        FileNotFoundError: Its folder does not exist.
        ValueError: The name does not end in `.safetensors`, or a tensor holds no values (meta device).
    """
    path = Path(path)
    require_writable(path, overwrite=overwrite)
    for name, tensor in params.items():
        if tensor.is_meta:
            raise ValueError(f"{name!r} is on the meta device and has no values to write; materialize the model first")
    with whole_file(path) as temporary:
        temporary.touch()
        mode = temporary.stat().st_mode
        save_file(_separate(params), temporary, metadata=dict(metadata or {}) | {"format": "pt"})
        temporary.chmod(mode)  # safetensors leaves a file that only its owner can read, whatever the umask
    return path


def save_text(text: str, path: str | Path, *, is_new: bool = False) -> Path:
    """Write a text file whole or not at all; see `whole_file`."""
    with whole_file(path, is_new=is_new) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return Path(path)


def save_bytes(content: bytes, path: str | Path) -> Path:
    """Write a file whole or not at all; see `whole_file`."""
    with whole_file(path) as temporary:
        temporary.write_bytes(content)
    return Path(path)


def require_writable(path: str | Path, *, overwrite: bool, suffixes: tuple[str, ...] = (SUFFIX,)) -> None:
    """Refuse a name that cannot be written, before any work is done for it.

    Raises:
        FileExistsError: The file exists, and `overwrite` is false.
        FileNotFoundError: Its folder does not exist.
        ValueError: The name has another suffix.
    """
    path = Path(path)
    if path.suffix not in suffixes:
        raise ValueError(f"the output {str(path)!r} must end in {' or '.join(suffixes)}")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"the folder {str(path.parent)!r} of the output does not exist; create it first")
    if path.is_dir() or (path.exists() and not overwrite):
        raise FileExistsError(f"the output {str(path)!r} exists already; choose another name, or say --overwrite")


def _separate(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous tensors, none of which shares memory with another."""
    seen: set[int] = set()
    result = {}
    for name, tensor in params.items():
        tensor = tensor.detach().contiguous()
        storage = tensor.untyped_storage()
        if storage.data_ptr() in seen or storage.nbytes() != tensor.numel() * tensor.element_size():
            tensor = tensor.clone()
        seen.add(tensor.untyped_storage().data_ptr())
        result[name] = tensor
    return result


def flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    if os.name == "nt" and path.is_dir():  # Windows does not open folders.
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

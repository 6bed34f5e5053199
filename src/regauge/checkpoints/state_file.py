"""The state of interrupted work, stored in one safetensors file.

Resumed work has bitwise identical results to uninterrupted work.
"""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regauge.checkpoints.checkpoint import Checkpoint
from regauge.checkpoints.described import DAMAGE
from regauge.checkpoints.writing import bytes_of, save
from regauge.core.params import Params, below

SECONDS = 60.0
"""The number of seconds between two states. A killed run loses at most this much work, and shorter work writes no
state."""
BEGINNING = 1 << 20
"""The number of bytes of a damaged file that are searched for its kind."""
VERSION = "2"
CHECKED = ("version", "known", "inputs")
"""Header strings that the checksum covers in addition to the tensors."""


class StateError(ValueError):
    """An error about a state file from which work cannot be resumed.

    `can_be_deleted` is true if the file contains only interrupted work.
    """

    def __init__(self, sentence: str, *, can_be_deleted: bool = True) -> None:
        super().__init__(sentence)
        self.can_be_deleted = can_be_deleted


class StateFile:
    """A file that stores the state of running work, from which the same work can be resumed.

    Args:
        path: A path that ends in `.safetensors`, in an existing folder.
        work: The name of the work, for errors and the header.
        generator: The random generator of the work; its state is stored and restored.
        buffers: Tensors that the work changes in place. Buffers are also stored and restored.
    """

    def __init__(
        self,
        path: Path,
        *,
        work: str = "training",
        generator: torch.Generator | None = None,
        buffers: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.path, self.work = path, work
        self._generator, self._buffers = generator, buffers or {}
        self._written = time.monotonic()

    @property
    def is_due(self) -> bool:
        """Whether enough time has passed since the last state to write a new state."""
        return time.monotonic() - self._written >= SECONDS

    @property
    def is_state(self) -> bool:
        """Whether the file is a state of the same kind of work as this object, or a damaged file that still names this
        kind of work.
        """
        try:
            with Checkpoint.open(self.path) as file:
                return file.header.get("kind") == self._kind
        except ValueError:
            with self.path.open("rb") as stream:
                return self._kind.encode() in stream.read(BEGINNING)

    def write(self, tensors: Mapping[str, Tensor], known: Mapping[str, Any], inputs: Mapping[str, Any]) -> None:
        """Write a state, which replaces an earlier state.

        Args:
            tensors: All tensors that the work changes, by name.
            known: All other values that the work changes, ready for JSON.
            inputs: All values on which the work depends, ready for JSON.
        """
        whole = {f"own/{name}": tensor for name, tensor in tensors.items()}
        whole |= {f"buffer/{name}": tensor for name, tensor in self._buffers.items()}
        if self._generator is not None:
            whole["generator"] = self._generator.get_state()
        header = {"version": VERSION, "known": json.dumps(dict(known)), "inputs": json.dumps(dict(inputs))}
        metadata = {**header, "kind": self._kind, "checksum": _checksum(header, whole)}
        save(whole, self.path, overwrite=True, metadata=metadata)
        self._written = time.monotonic()

    def read(self, inputs: Mapping[str, Any]) -> tuple[Params, dict[str, Any]] | None:
        """Return the tensors and the other values of a state; return None if there is no file.

        The generator and the buffers are restored from the state.

        Raises:
            StateError: The file is not a state of this kind of work, is damaged, or belongs to work with other inputs.
        """
        if not self.path.exists():
            return None
        header, tensors = self._read()
        before, wanted = self._inputs(header), json.loads(json.dumps(dict(inputs)))
        if before != wanted:
            changed = sorted(k for k in before.keys() | wanted.keys() if before.get(k) != wanted.get(k))
            raise StateError(
                f"{self._label} had other settings or networks ({', '.join(changed)}); give the same to continue it, "
                "or delete it"
            )
        with self.continuing():
            copy_exactly(below("buffer/", tensors), self._buffers)
            if self._generator is not None:
                self._generator.set_state(tensors["generator"])
            known = dict(json.loads(header["known"]))
        return below("own/", tensors), known

    @contextmanager
    def continuing(self) -> Iterator[None]:
        """Return a context, for restoring work from a file, that converts errors to an error about a damaged file."""
        try:
            yield
        except StateError:
            raise
        except DAMAGE as error:
            reason = str(error).strip().split("\n")[0]  # torch adds lines about its own code
            raise StateError(f"{self._label} is damaged ({type(error).__name__}: {reason}); delete it") from error

    def read_inputs(self) -> dict[str, Any]:
        """Read the inputs of the work from the file; return an empty dictionary if there is no file.

        Raises:
            StateError: The file is not a state of this kind of work, or is damaged.
        """
        return self._inputs(self._read()[0]) if self.path.exists() else {}

    def _inputs(self, header: Mapping[str, str]) -> dict[str, Any]:
        with self.continuing():
            return dict(json.loads(header["inputs"]))

    @property
    def _kind(self) -> str:
        return f"regauge {self.work}"

    @property
    def _label(self) -> str:
        return f"the interrupted {self.work} in {str(self.path)!r}"

    def _read(self) -> tuple[Mapping[str, str], Params]:
        """Return the strings and the tensors of a state after verifying the checksum."""
        try:
            with Checkpoint.open(self.path) as file:
                header, tensors = file.header, file.params
        except ValueError as error:
            raise StateError(f"{self._label} is damaged ({error}); delete it") from error
        if header.get("kind") != self._kind:
            raise StateError(
                f"{str(self.path)!r} is not the state of a {self.work}; give another name, or move it away",
                can_be_deleted=False,
            )
        if header.get("version") != VERSION:
            raise StateError(f"{self._label} was written by another version of regauge; delete it")
        if header.get("checksum") != _checksum(header, tensors):
            raise StateError(f"{self._label} is damaged: its checksum is wrong; delete it")
        return header, tensors


def copy_exactly(tensors: Mapping[str, Tensor], into: Mapping[str, Tensor]) -> None:
    """Copy tensors into other tensors; raise a ValueError unless the names and shapes are equal."""
    if tensors.keys() != into.keys() or any(tensor.shape != into[name].shape for name, tensor in tensors.items()):
        raise ValueError("it has tensors of other names or shapes")
    for name, tensor in tensors.items():
        into[name].copy_(tensor)


def _checksum(header: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    """Return a checksum of all values from which the work is resumed."""
    digest = blake2b("\0".join(header.get(name, "") for name in CHECKED).encode(), digest_size=16)
    for name, tensor in sorted(tensors.items()):
        digest.update(f"\0{name} {tensor.dtype} {[*tensor.shape]}\0".encode())
        digest.update(bytes_of(tensor.detach()))
    return digest.hexdigest()

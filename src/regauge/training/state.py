"""The state of a descent on the disk: one safetensors file, written whole, from which the same bits follow."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from regauge.checkpoints.checkpoint import Checkpoint
from regauge.checkpoints.writing import save
from regauge.core.params import Params, below

SECONDS = 60.0
"""Time between two states of a descent, so that short ones write none."""


class StateFile:
    """A file in which a descent is kept while it runs, and from which the same descent continues.

    It is written between two epochs, where nothing else changes than tensors of the program, buffers, and the state of
    the generator: a descent that was stopped ends with the bits of one that was not.

    Args:
        path: Ends in `.safetensors`, in a folder that exists.
        generator: Draws the batches, and whatever else is random.
        buffers: Tensors that the descent changes in place, in addition to those of its program.
    """

    def __init__(self, path: Path, generator: torch.Generator, buffers: Mapping[str, Tensor]) -> None:
        self.path, self._generator, self._buffers = path, generator, buffers
        self._saved = time.monotonic()

    def save_if_due(self, program: Mapping[str, Tensor], losses: Sequence[float], settings: str) -> None:
        """Write the state after an epoch, in place of an earlier one, unless that was written just now.

        Args:
            program: The tensors of the program.
            losses: The losses of the steps that are done.
            settings: Everything that the descent depends on, in words.
        """
        if time.monotonic() - self._saved < SECONDS:
            return
        tensors = {f"program/{name}": tensor for name, tensor in program.items()}
        tensors |= {f"buffer/{name}": tensor for name, tensor in self._buffers.items()}
        tensors["generator"] = self._generator.get_state()
        tensors["losses"] = torch.tensor(losses, dtype=torch.float64)
        save(tensors, self.path, overwrite=True, metadata={"settings": settings})
        self._saved = time.monotonic()

    def read(self, settings: str) -> tuple[Params, list[float]]:
        """Bring buffers and generator to the state in the file, if there is one.

        Returns:
            The tensors of the program, none if there is no file, and the losses of the steps that are done.

        Raises:
            ValueError: The file is damaged, or holds something else.
        """
        if not self.path.exists():
            return {}, []
        try:
            with Checkpoint.open(self.path) as file:
                before, tensors = file.header.get("settings", "unknown"), file.params
        except ValueError as error:
            raise ValueError(
                f"the interrupted training in {str(self.path)!r} is damaged; delete it to begin anew ({error})"
            ) from error
        if before != settings:
            raise ValueError(
                f"{str(self.path)!r} is no state of this training: its settings are {before}, not {settings}; give "
                "another name, or delete it"
            )
        for name, tensor in below("buffer/", tensors).items():
            self._buffers[name].copy_(tensor)
        self._generator.set_state(tensors["generator"])
        losses: list[float] = tensors["losses"].tolist()
        return below("program/", tensors), losses

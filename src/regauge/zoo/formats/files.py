"""Checkpoints in a folder or a zip file: found by their names, read without running what they hold."""

import io
import zipfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from regauge.checkpoints.torch_files import read_torch_file
from regauge.core.params import Params


class Tree:
    """The files below a folder, or in a zip file.

    Raises:
        FileNotFoundError: There is neither.
        ValueError: The file is no zip file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._archive: zipfile.ZipFile | None = None
        if self.path.is_dir():
            files = (file for file in self.path.rglob("*") if file.is_file())
            self.names = sorted(file.relative_to(self.path).as_posix() for file in files)
        elif zipfile.is_zipfile(self.path):
            self._archive = zipfile.ZipFile(self.path)  # open as long as it is used: its list of files is long
            self.names = sorted(name for name in self._archive.namelist() if not name.endswith("/"))
        elif self.path.exists():
            raise ValueError(f"{str(self.path)!r} is neither a folder nor a zip file; unpack it, and give the folder")
        else:
            raise FileNotFoundError(f"there is no folder or zip file {str(self.path)!r}; check the path")

    def read(self, name: str) -> bytes:
        """The content of one file."""
        return (self.path / name).read_bytes() if self._archive is None else self._archive.read(name)

    def checkpoint(self, name: str, beside: Collection[str] = ()) -> tuple[Params, dict[str, Any]]:
        """A state dictionary, and what lies beside its tensors.

        Args:
            name: Of a safetensors or torch file; whatever does not end in `.safetensors` is read as the latter, with
                `weights_only=True`.
            beside: Names of entries that are no parameters, such as "label"; absent ones are ignored.

        Raises:
            ValueError: It is something else, or damaged, or has other entries that are no tensors.
        """
        label = str(self.path / name)
        if name.endswith(".safetensors"):
            try:
                return safetensors.torch.load(self.read(name)), {}
            except SafetensorError as error:
                raise ValueError(f"{label!r} is not a readable safetensors file ({error}); fetch it again") from error
        content = read_torch_file(io.BytesIO(self.read(name)), label)
        params = {str(key): value for key, value in content.items() if key not in beside}
        strange = [key for key, value in params.items() if not isinstance(value, Tensor)]
        if strange:
            raise ValueError(
                f"{label!r} has entries that are no tensors ({strange[:4]}); name them as lying beside the parameters"
            )
        extras = {key: _plain(content[key]) for key in beside if key in content}
        return {key: value.detach() for key, value in params.items()}, extras


def _plain(value: Any) -> Any:
    """A JSON value from a tensor or a number."""
    return value.tolist() if isinstance(value, Tensor) else value

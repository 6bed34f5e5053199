"""Checkpoints in a folder or a zip file: found by their names, read without running what they hold."""

import io
import json
import zipfile
import zlib
from collections.abc import Collection, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from regauge.core.params import Params
from regauge.storage.checkpoints.torch_files import read_torch_file

ROW = "row"
"""Entry of a safetensors file's metadata with what is known of its network, as JSON."""
MACOS = "__MACOSX"
"""Folder that macOS adds to zip files, with a file of its own for each that was packed."""


class Tree:
    """The files below a folder, or in a zip file, without hidden ones and those that macOS adds to zip files.

    Raises:
        FileNotFoundError: There is neither.
        ValueError: The file is no zip file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._archive: zipfile.ZipFile | None = None
        if self.path.is_dir():
            files = (file for file in self.path.rglob("*") if file.is_file())
            names = [file.relative_to(self.path).as_posix() for file in files]
        elif self.path.exists():
            try:
                self._archive = zipfile.ZipFile(self.path)  # open as long as it is used: its list of files is long
            except zipfile.BadZipFile as error:
                raise ValueError(
                    f"{str(self.path)!r} is neither a folder nor a zip file ({error}); unpack it, and give the folder"
                ) from error
            names = [name for name in self._archive.namelist() if not name.endswith("/")]
        else:
            raise FileNotFoundError(f"there is no folder or zip file {str(self.path)!r}; check the path")
        parts = {name: PurePosixPath(name).parts for name in names}
        self.names = sorted(n for n in names if not any(part == MACOS or part.startswith(".") for part in parts[n]))

    def read(self, name: str) -> bytes:
        """The content of one file."""
        if self._archive is None:
            return (self.path / name).read_bytes()
        try:
            return self._archive.read(name)
        except (zipfile.BadZipFile, zlib.error, EOFError) as error:
            raise ValueError(f"{name!r} in {str(self.path)!r} is damaged ({error}); fetch it again") from error

    def checkpoint(self, name: str, beside: Collection[str] = ()) -> tuple[Params, dict[str, Any]]:
        """A state dictionary, and what else the file says: some entries, and the row that `export` wrote.

        What does not end in `.safetensors` is read as a torch file, with `weights_only=True`. Entries that are no
        parameters, such as "label", are named by `beside`, whether or not they are there.
        """
        label = str(self.path / name)
        if name.endswith(".safetensors"):
            content, known = _read_safetensors(self.read(name), label)
        else:
            content, known = read_torch_file(io.BytesIO(self.read(name)), label), {}
        params = {str(key): value for key, value in content.items() if key not in beside}
        strange = [key for key, value in params.items() if not isinstance(value, Tensor)]
        if strange:
            raise ValueError(f"{label!r} has entries that are no tensors ({strange[:4]}); name them with --beside")
        extras = {key: _plain(content[key]) for key in beside if key in content}
        return {key: value.detach() for key, value in params.items()}, known | extras


def _read_safetensors(content: bytes, label: str) -> tuple[Mapping[Any, Any], dict[str, Any]]:
    """The tensors, and the row in the header; nothing where another program wrote something else there."""
    try:
        params = safetensors.torch.load(content)
    except SafetensorError as error:
        raise ValueError(f"{label!r} is not a readable safetensors file ({error}); fetch it again") from error
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    try:
        row = json.loads(header.get("__metadata__", {}).get(ROW, "{}"))
    except json.JSONDecodeError:
        row = {}
    return params, row if isinstance(row, dict) else {}


def _plain(value: Any) -> Any:
    """A JSON value from a tensor or a number."""
    return value.tolist() if isinstance(value, Tensor) else value

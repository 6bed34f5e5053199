"""Populations from outside of regauge, as importers return them, and their import into a store."""

import hashlib
import io
import json
import os
import shutil
import struct
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from regauge.checkpoints.array_files import require_modest
from regauge.checkpoints.formats.headers import TensorSpec, layout_of
from regauge.checkpoints.formats.state_dicts import dense_tensors, read_torch_file
from regauge.core.arguments import check_arguments
from regauge.core.params import Params
from regauge.core.progress import Progress, no_progress
from regauge.core.symmetry import Symmetry
from regauge.core.typed_json import parse_json
from regauge.discovery import discover
from regauge.storage import Store
from regauge.storage.architecture import Architecture
from regauge.storage.store.packing import require_networks

ROW = "row"
"""The entry in a safetensors file's metadata that contains a network's row as JSON."""
MACOS = "__MACOSX"
"""The folder that macOS adds to zip files, with an additional file for each packed file."""
MOST_ENTRY_VALUES = 1 << 16
"""The largest size of an entry that is not a parameter."""
BLOCK_NETWORKS = 512
"""The largest number of networks that are written as one block."""
BLOCK_BYTES = 64 * 2**20
"""The largest size in bytes of the networks that are written as one block."""


class Tree:
    """The files in a folder or zip file, without hidden files and without files that macOS adds to zip files.

    Raises:
        FileNotFoundError: The folder or file does not exist.
        ValueError: The file is not a zip file, or contains two files with the same name.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._archive: zipfile.ZipFile | None = None
        if self.path.is_dir():
            files = (file for file in self.path.rglob("*") if file.is_file())
            names = [file.relative_to(self.path).as_posix() for file in files]
        elif self.path.exists():
            try:
                self._archive = zipfile.ZipFile(self.path)  # stays open, because reading its list of files is slow
            except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error, OverflowError) as error:
                raise ValueError(
                    f"{str(self.path)!r} is neither a folder nor a zip file ({error}); unpack it, and give the folder"
                ) from error
            names = [name for name in self._archive.namelist() if not name.endswith("/")]
            if len(set(names)) < len(names):
                ((twice, _),) = Counter(names).most_common(1)
                raise ValueError(f"{str(self.path)!r} contains two files {twice!r}; rename one")
        else:
            raise FileNotFoundError(f"there is no folder or zip file {str(self.path)!r}; check the path")
        parts = {name: PurePosixPath(name).parts for name in names}
        self.names = sorted(n for n in names if not any(part == MACOS or part.startswith(".") for part in parts[n]))

    def read(self, name: str) -> bytes:
        """Return the content of one file."""
        if self._archive is None:
            return (self.path / name).read_bytes()
        try:
            member = self._archive.getinfo(name)
            require_modest([member], member.compress_size, "unpack it, and look at it first")
            return self._archive.read(member)
        except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, RuntimeError, OSError, struct.error) as error:
            raise ValueError(f"{name!r} in {str(self.path)!r} is damaged ({error}); fetch it again") from error

    def checkpoint(self, name: str, beside: Collection[str] = ()) -> tuple[Params, dict[str, Any]]:
        """Return the state dictionary in a file, and a dictionary of other values: selected entries, and the row that
        `export` wrote.

        A file that does not end in `.safetensors` is read as a torch file, with `weights_only=True`. `beside` lists
        entries that are not parameters, such as "label". The entries in `beside` may be missing.
        """
        label = str(self.path / name)
        if name.endswith(".safetensors"):
            content, known = _read_safetensors(self.read(name), label)
        else:
            content, known = read_torch_file(io.BytesIO(self.read(name)), label), {}
        strange = [str(key) for key, value in content.items() if key not in beside and not isinstance(value, Tensor)]
        if strange:
            raise ValueError(f"{label!r} has entries that are no tensors ({strange[:4]}); name them with `beside=`")
        extras = {key: content[key] for key in beside if key in content}
        for key, value in dense_tensors({k: v for k, v in extras.items() if isinstance(v, Tensor)}, label).items():
            if value.numel() > MOST_ENTRY_VALUES:
                raise ValueError(
                    f"{label!r} has {value.numel()} values as {key!r}, which is no parameter; leave it out with "
                    "`beside=`"
                )
            extras[key] = value.tolist()
        return dense_tensors({key: value for key, value in content.items() if key not in beside}, label), known | extras


def _read_safetensors(content: bytes, label: str) -> tuple[Mapping[Any, Any], dict[str, Any]]:
    """Return the tensors, and the row in the header (empty if another program wrote the header)."""
    try:
        params = safetensors.torch.load(content)
        header = parse_json(content[8 : 8 + int.from_bytes(content[:8], "little")])
    except (SafetensorError, KeyError, ValueError) as error:
        raise ValueError(f"{label!r} is not a readable safetensors file ({error}); fetch it again") from error
    try:
        row = parse_json((header.get("__metadata__") or {}).get(ROW, "{}"))
    except ValueError:
        row = {}
    return params, row if isinstance(row, dict) else {}


class Imported(NamedTuple):
    """Networks that an importer has read, stacked, with one row of metadata per network."""

    params: Params
    rows: list[dict[str, Any]]


@dataclass(frozen=True)
class Source:
    """A population from outside regauge that can be imported.

    Attributes:
        path: The folder or file from which the population is read.
        architecture: The architecture of all networks.
        rows: The values that are known for each network before it is read, including "id" and "step".
        read: A function that maps increasing indices in `rows` to networks.
        inputs: Example inputs of the module, needed for discovering its symmetry; None if unknown.
        about: Information about the whole population, as plain JSON.
        named_by: The column with the name that the source gives to a network or to its training run. The rows may lack
            this column.

    Raises:
        ValueError: Two networks have the same id and step.
    """

    path: str | Path
    architecture: Architecture
    rows: Sequence[Mapping[str, Any]]
    read: Callable[[Sequence[int]], Imported]
    inputs: tuple[Any, ...] | None = None
    about: Mapping[str, Any] = field(default_factory=dict)
    named_by: str = "file"

    def __post_init__(self) -> None:
        seen: dict[tuple[int, int], Any] = {}
        for row in self.rows:
            key, name = (row["id"], row["step"]), row.get(self.named_by)
            if key in seen:
                raise ValueError(
                    f"{seen[key]!r} and {name!r} of {str(self.path)!r} are both step {key[1]} of trajectory {key[0]}, "
                    "but these two numbers must name one network. In a template, put all parts in which trajectories "
                    "differ into braces, none of them as {id}: the trajectories are then numbered"
                )
            seen[key] = name

    @classmethod
    def of_files(
        cls,
        tree: Tree,
        architecture: Architecture,
        rows: Sequence[Mapping[str, Any]],
        inputs: tuple[Any, ...] | None,
        about: Mapping[str, Any],
        *,
        beside: Collection[str] = (),
        convert: Callable[[Params, str], Params] = lambda params, name: params,
    ) -> "Source":
        """Return a population with one file per network, which the column "file" names.

        File entries that are listed in `beside` are not parameters. `convert` maps all other entries and the file name
        to the architecture's parameters. Reading raises a ValueError if a network's tensors differ from the
        architecture's tensors.
        """
        layout = {spec.name: spec for spec in architecture.layout}

        def read(numbers: Sequence[int]) -> Imported:
            networks, known = [], []
            for row in (rows[k] for k in numbers):
                network, extras = tree.checkpoint(row["file"], beside)
                network = convert(network, row["file"])
                found = {spec.name: spec for spec in layout_of(network)}
                if found != layout:
                    name = next(n for n in (*layout, *found) if layout.get(n) != found.get(n))
                    raise ValueError(
                        f"{row['file']!r} has {_words(found.get(name))} as {name!r}, but the first network or the "
                        f"model has {_words(layout.get(name))}; import networks of one architecture at a time"
                    )
                networks.append(network)
                known.append({**extras, **row})
            return Imported({name: torch.stack([network[name] for network in networks]) for name in layout}, known)

        return cls(tree.path, architecture, rows, read, inputs, about)


@check_arguments
def import_zoo(
    source: Source,
    folder: str | Path,
    *,
    symmetry: Symmetry | None = None,
    storage: str | None = None,
    progress: Progress = no_progress,
) -> Store:
    """Write a population to a store. A repeated call reads only networks that are not in the store.

    Networks whose id and step are already in the store are not read again. A network with NaN or Inf is stored and
    marked in the column "is_finite".

    Args:
        source: The source that an importer returned.
        folder: The folder of the store.
        symmetry: The symmetry of the architecture. By default, the symmetry is discovered if the architecture has a
            module and example inputs.
        storage: The storage dtype; see `Store.create`.
        progress: Displays the number of networks imported by this call.

    Raises:
        FileExistsError: The folder contains the networks of another source, another store, or other files.
        ValueError: Networks have different tensors, or the source has other names for networks in the store.
    """
    about = {**source.about, "path": os.path.abspath(source.path)}
    known = Store.find(folder)
    before = None if known is None else known.about.get("path")
    if before not in (None, about["path"]):
        raise FileExistsError(
            f"{str(folder)!r} holds the networks of {before!r}, not of {about['path']!r}; choose another folder"
        )
    if symmetry is None and source.inputs is not None and source.architecture.factory is not None:
        with naming(source.path):
            if source.rows and (known is None or known.architecture != source.architecture):
                first = source.read([0])  # before a module is built, which may need more memory than there is
                require_networks(source.architecture, first.params, first.rows)
            symmetry = discover(source.architecture.module().eval(), source.inputs)
    is_there = Path(folder).exists()
    store = Store.create(folder, source.architecture, symmetry, storage=storage, about=about)
    try:
        with naming(source.path):
            return _append(source, store, progress)
    except ValueError:
        if not is_there and not len(Store.open(folder)):
            shutil.rmtree(folder)
        raise


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Return a context in which a ValueError names the path from which a population is read."""
    try:
        yield
    except ValueError as error:
        if str(path) in str(error):
            raise
        raise ValueError(f"{str(path)!r} cannot be imported: {error}; check the format") from error


def _append(source: Source, store: Store, progress: Progress) -> Store:
    """Read the networks of a population that a store lacks, and append them."""
    missing = _missing(source, store)
    advance = progress("networks", sum(missing))
    size = max(1, min(BLOCK_NETWORKS, BLOCK_BYTES // max(1, 4 * source.architecture.size)))
    for number, start in enumerate(range(0, len(source.rows), size)):
        part = [k for k in range(start, min(start + size, len(source.rows))) if missing[k]]
        if part:
            block = source.read(part)
            with suppress(FileExistsError):  # another import did the same
                digest = hashlib.sha256(json.dumps([(row["id"], row["step"]) for row in block.rows]).encode())
                store.append(block.params, block.rows, name=f"import-{number:06d}-{digest.hexdigest()[:8]}")
            advance(len(part))
    store.refresh()
    return store


def _missing(source: Source, store: Store) -> list[bool]:
    """Return, for each network of a source, whether the store lacks it."""
    there: dict[tuple[int, int], Any] = {}
    if len(store):
        ids, steps = (store.rows[name].tolist() for name in ("id", "step"))
        is_named = source.named_by in store.rows.names
        names = store.rows[source.named_by].tolist() if is_named else [None] * len(store)
        there = dict(zip(zip(ids, steps, strict=True), names, strict=True))
    missing = []
    for row in source.rows:
        key, name = (row["id"], row["step"]), row.get(source.named_by)
        missing.append(key not in there)
        if there.get(key, name) != name:
            raise ValueError(
                f"step {key[1]} of trajectory {key[0]} is {there[key]!r} in the store {str(store.folder)!r}, but "
                f"{name!r} in {str(source.path)!r} as it is now, which has other networks than at the first import; "
                "import it into another folder"
            )
    return missing


def _words(spec: TensorSpec | None) -> str:
    return "nothing" if spec is None else f"shape {spec.shape} of {str(spec.dtype).removeprefix('torch.')}"

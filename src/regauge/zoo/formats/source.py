"""The outcome of an importer, networks in blocks with a row for each, and its way into a store."""

import hashlib
import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from regauge.core.params import Params
from regauge.core.progress import Progress, no_progress
from regauge.core.symmetry import Symmetry
from regauge.discovery import discover
from regauge.storage.architecture import Architecture, TensorSpec, layout_of
from regauge.storage.store import Store
from regauge.zoo.formats.checkpoint_tree import Tree

BLOCK = 512
"""Networks of a block at most."""
BLOCK_BYTES = 64 * 2**20
"""Values of a block at most, in bytes."""


class Imported(NamedTuple):
    """Networks that an importer has read, stacked, and a row for each."""

    params: Params
    rows: list[dict[str, Any]]


@dataclass(frozen=True)
class Source:
    """A population that comes from somewhere else.

    Attributes:
        path: The folder or file that it is read from.
        architecture: The architecture of all networks.
        rows: Known values of each network before it is read, "id" and "step" at least.
        read: A function from increasing numbers in `rows` to networks.
        inputs: Example inputs of the module, with which its symmetry is found; None if they are not known.
        about: Facts about the whole, as plain JSON.
        named_by: The column with the source's own name of a network or of its trajectory, if it has any.

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
                    "but these two numbers name one network for good; where a template reads them from names, put all "
                    "in which trajectories differ into braces, none of it as {id}, and the trajectories are numbered"
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
        """A population with a file for each network, which the column "file" names.

        Entries of a file that are listed in `beside` are no parameters, and `convert` makes those of the architecture
        from the others and the name of the file. Reading raises ValueError where a network has other tensors.
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


def import_zoo(
    source: Source,
    folder: str | Path,
    *,
    symmetry: Symmetry | None = None,
    storage: str | None = None,
    progress: Progress = no_progress,
) -> Store:
    """Write a population into a store; a second call reads what is missing: the rest, or what the source gained since.

    Networks whose id and step are in the store are not read again. A network with NaN or Inf is kept and marked in
    the column "is_finite".

    Args:
        source: The outcome of an importer.
        folder: Folder of the store.
        symmetry: The symmetry of the architecture; it is discovered unless given, where the architecture has a module
            and example inputs.
        storage: The dtype of `Store.create`.
        progress: Shows how many networks are imported now.

    Raises:
        FileExistsError: The folder holds the networks of another source, another store, or other files.
        ValueError: A network does not fit the others, or the source has other names for what is in the store.
    """
    about = {**source.about, "path": os.path.abspath(source.path)}
    known = Store.find(folder)
    before = None if known is None else known.about.get("path")
    if before not in (None, about["path"]):
        raise FileExistsError(
            f"{str(folder)!r} holds the networks of {before!r}, not of {about['path']!r}; choose another folder"
        )
    if symmetry is None and source.inputs is not None and source.architecture.factory is not None:
        symmetry = discover(source.architecture.module().eval(), source.inputs)
    store = Store.create(folder, source.architecture, symmetry, storage=storage, about=about)
    missing = _missing(source, store)
    advance = progress("networks", sum(missing))
    size = max(1, min(BLOCK, BLOCK_BYTES // max(1, 4 * source.architecture.size)))
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
    """Whether the store lacks a network, for each network of a source."""
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

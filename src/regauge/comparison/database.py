"""Databases: files with fingerprints of many networks, in which relatives of a network can be found."""

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float32
from torch import Tensor

from regauge.checkpoints.checkpoint import Checkpoint
from regauge.checkpoints.described import describe_kind
from regauge.checkpoints.memory_limit import MemoryLimit
from regauge.checkpoints.names.from_transformers import name_by
from regauge.checkpoints.writing import SUFFIX, require_writable, save
from regauge.comparison.compare_networks import compare
from regauge.comparison.comparison import Comparison
from regauge.comparison.fingerprints import SIZE, fingerprint
from regauge.comparison.independence import DRAWS
from regauge.comparison.relatives import NO_TRACING, open_relatives
from regauge.core.arguments import check_arguments
from regauge.core.given import given_or_seed
from regauge.core.progress import Progress, no_progress
from regauge.core.symmetry import Symmetry
from regauge.hub import Model

FORMAT = "regauge.database"
VERSION = "1"
SAVED_SECONDS = 60
"""The interval in seconds at which a database is written while fingerprints are still being computed."""


class Fingerprinted(NamedTuple):
    """A network in a database: the sizes and times of its files, its architecture, and its fingerprint."""

    stamp: str
    architecture: str
    numbers: Float32[Tensor, " numbers"]


class Neighbor(NamedTuple):
    """A network in a database, and the distance between its fingerprint and the fingerprint of the queried network."""

    path: str
    distance: float


@dataclass(frozen=True)
class _Architecture:
    """The symmetry of networks of one architecture, and the shapes of their tensors under the names of the symmetry."""

    symmetry: Symmetry
    shapes: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, checkpoint: Checkpoint, symmetry: Symmetry) -> "_Architecture":
        return cls(symmetry, {name: tuple(one.shape) for name, one in checkpoint.stored.items()})

    @cached_property
    def text(self) -> str:
        return json.dumps({"symmetry": self.symmetry.to_json(), "shapes": self.shapes}, sort_keys=True)

    @cached_property
    def key(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    def names(self, checkpoint: Checkpoint) -> Checkpoint | None:
        """Return a checkpoint under this architecture's tensor names, or None if it has another architecture."""
        try:
            named = name_by(checkpoint, self.symmetry)
        except ValueError:
            return None
        return named if {n: tuple(one.shape) for n, one in named.stored.items()} == self.shapes else None


@dataclass(frozen=True)
class Search:
    """The networks in a database that are nearest to a queried network, and their comparisons with it.

    Attributes:
        neighbors: The nearest networks, sorted by distance.
        comparisons: For each neighbor, its comparison with the queried network, which is network A. An entry is None if
            files of the neighbor are missing or damaged.
        notes: Notes on files that are missing or damaged, or that changed after they were added.
    """

    neighbors: tuple[Neighbor, ...]
    comparisons: tuple[Comparison | None, ...]
    notes: tuple[str, ...]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Return a table of the networks, as rows."""
        return [
            {
                "network": one.path,
                "fingerprints": one.distance,
                "verdict": "" if found is None else found.verdict,
                "distance": None if found is None else found.relative_distance,
                "explained": None if found is None else found.share_after,
                "p-value": None if found is None else found.p_value,
            }
            for one, found in zip(self.neighbors, self.comparisons, strict=True)
        ]


class Database:
    """A collection of fingerprints of networks, stored in one safetensors file.

    A search first computes only the fingerprint of the queried network, and reads no other network. Next, `rg.compare`
    compares the queried network with the nearest networks. One database can contain networks of many architectures. A
    search considers only networks that have the same tensors as the queried network. `compare_files` also finds
    relatives with other widths, depths or vocabularies.

    The file also contains the symmetry of each architecture. Therefore a search needs no model.

    Args:
        path: The path of the file, which must end in `.safetensors`. If the file exists, it is read. If the file does
            not exist, the first `add` creates it.

    Raises:
        ValueError: The file is damaged, is not a database, or has a newer version.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._networks: dict[str, Fingerprinted] = {}
        self._architectures: dict[str, _Architecture] = {}
        if self.path.exists():
            self._networks, self._architectures = self._read()

    def __len__(self) -> int:
        return len(self._networks)

    def __repr__(self) -> str:
        return f"Database({str(self.path)!r}: {len(self)} networks of {len(self._architectures)} architectures)"

    @property
    def networks(self) -> Mapping[str, Fingerprinted]:
        """Return the networks in the database, by path.

        The path of a network in the folder of the database is relative to this folder.
        """
        return dict(self._networks)

    @check_arguments
    def add(
        self,
        paths: Sequence[str | Path],
        model: Model | str | Path | None = None,
        *,
        symmetry: Symmetry | None = None,
        tracing: Mapping[str, Any] = NO_TRACING,
        memory: int | str | MemoryLimit | None = None,
        progress: Progress = no_progress,
    ) -> list[Exception]:
        """Add networks to the database, and write the file.

        A network that is already in the database is not read again if its files are unchanged. The file is written
        every minute and at the end, even after an error or an interrupt. Networks that another process adds at the same
        time are kept.

        Args:
            paths: The checkpoints: files, folders, or BASE+ADAPTER.
            model: The model of the checkpoints, or its name. Default: the model is found as in `rg.open_networks`. No
                model is needed if the database already has an architecture with the same tensors.
            symmetry: The symmetry of the networks. Default: the symmetry of the model.
            tracing: Further settings of `rg.open_model`, if the model is given by name.
            memory: The memory limit, as in `rg.compare`.
            progress: A function that shows how many networks are done.

        Returns:
            The names and errors of networks that could not be added. All other networks are added.

        Raises:
            FileNotFoundError: The folder of the database does not exist.
            ValueError: The name of the database file does not end in `.safetensors`.
        """
        require_writable(self.path, overwrite=True, suffixes=(SUFFIX,))
        is_given = model is not None or symmetry is not None
        failures, written = list[Exception](), time.monotonic()
        advance = progress("fingerprints", len(paths))
        try:
            for path in paths:
                try:
                    with Checkpoint.open(path) as checkpoint:
                        self._add(
                            checkpoint, None if is_given else self._known(checkpoint), model, symmetry, tracing, memory
                        )
                except (OSError, ValueError, KeyError) as error:
                    reason = (
                        error.args[0] if isinstance(error, KeyError) else error
                    )  # Only `str` of a KeyError is not a sentence.
                    failures.append(ValueError(f"{str(path)!r} is not added: {reason}"))
                advance()
                if time.monotonic() - written > SAVED_SECONDS:
                    self._write()
                    written = time.monotonic()
        finally:
            self._write()
        return failures

    @check_arguments
    def nearest(
        self, network: str | Path, count: int = 10, *, memory: int | str | MemoryLimit | None = None
    ) -> list[Neighbor]:
        """Return the networks whose fingerprints are nearest to a checkpoint's fingerprint, except this checkpoint.

        The distance is zero for symmetric copies, up to the rounding of their format. If the parameters of a network
        differ slightly, the distance is below the relative change of the parameters.

        Args:
            network: The path of the checkpoint.
            count: The largest number of networks to return.
            memory: The memory limit, as in `rg.comparison.fingerprint`.

        Raises:
            FileNotFoundError: The checkpoint or the database does not exist.
            ValueError: No network in the database has the tensors of the checkpoint, or the checkpoint contains NaN or
                Inf.
        """
        with Checkpoint.open(network) as checkpoint:
            return [one for _, one in self._nearest(checkpoint, count, memory)]

    @check_arguments
    def search(
        self,
        network: str | Path,
        count: int = 5,
        *,
        draws: int = DRAWS,
        generator: torch.Generator | None = None,
        memory: int | str | MemoryLimit | None = None,
        exact: bool = False,
        progress: Progress = no_progress,
    ) -> Search:
        """Find the networks nearest to a checkpoint, and compare each of them with the checkpoint.

        Args:
            network: The path of the checkpoint, which is network A in the comparisons.
            count: The largest number of networks to compare.
            draws: The number of random elements in each independence test.
            generator: The source of randomness. The test of each pair starts from the same generator state. Default: a
                generator with seed 0.
            memory: The memory limit, as in `rg.compare`.
            exact: Whether to compare all entries in any case, as in `rg.compare`.
            progress: A function that shows how many comparisons are done.

        Raises:
            FileNotFoundError: The checkpoint or the database does not exist.
            ValueError: An error of `nearest` or of `rg.compare`.
        """
        if draws < 1:
            raise ValueError(f"draws is {draws}; a test needs at least one random element, and 999 are usual")
        state = given_or_seed(generator).get_state()
        with Checkpoint.open(network) as checkpoint:
            near = self._nearest(checkpoint, count, memory)
            comparisons, notes = list[Comparison | None](), list[str]()
            advance = progress("comparing", len(near))
            for symmetry, one in near:
                chance, found = torch.Generator().set_state(state), None
                ways: dict[str, Any] = {"draws": draws, "generator": chance, "memory": memory, "exact": exact}
                try:
                    with Checkpoint.open(self.path.parent / one.path) as other:
                        if _stamp(other) != self._networks[one.path].stamp:
                            notes.append(f"the files of {one.path!r} changed since it was added; add it again")
                        found = compare(copy(checkpoint), other, symmetry, **ways)
                except FileNotFoundError:
                    notes.append(f"{one.path!r} no longer exists; only its fingerprint was compared")
                except (OSError, ValueError, KeyError) as error:
                    notes.append(f"{one.path!r} is not compared: {error}")
                comparisons.append(found)
                advance()
        return Search(tuple(one for _, one in near), tuple(comparisons), tuple(notes))

    def _known(self, checkpoint: Checkpoint) -> _Architecture | None:
        """Return the architecture of a checkpoint, if the database contains it."""
        return next((one for one in self._architectures.values() if one.names(checkpoint) is not None), None)

    def _add(
        self,
        checkpoint: Checkpoint,
        architecture: _Architecture | None,
        model: Model | str | Path | None,
        symmetry: Symmetry | None,
        tracing: Mapping[str, Any],
        memory: int | str | MemoryLimit | None,
    ) -> None:
        name, stamp = self._name(checkpoint), _stamp(checkpoint)
        if architecture is None:
            ways: dict[str, Any] = {"symmetry": symmetry, "tracing": tracing, "memory": memory}
            opened = open_relatives([checkpoint.label], model, **ways).networks
            architecture = _Architecture.of(opened.checkpoints[0], opened.symmetry)
        known = self._networks.get(name)
        if known is not None and (known.stamp, known.architecture) == (stamp, architecture.key):
            return
        numbers = fingerprint(copy(checkpoint), architecture.symmetry, memory=memory).float()
        self._architectures[architecture.key] = architecture
        self._networks[name] = Fingerprinted(stamp, architecture.key, numbers)

    def _nearest(
        self, checkpoint: Checkpoint, count: int, memory: int | str | MemoryLimit | None
    ) -> list[tuple[Symmetry, Neighbor]]:
        if count < 1:
            raise ValueError(f"`count={count}`: it is at least 1")
        if not self._networks:
            raise FileNotFoundError(f"the database {str(self.path)!r} contains no networks; add some first")
        own, found = self._name(checkpoint), list[tuple[Symmetry, Neighbor]]()
        alike = [one for one in self._architectures.values() if one.names(checkpoint) is not None]
        if not alike:
            raise ValueError(
                f"none of the {len(self)} networks of {str(self.path)!r} has the tensors of {checkpoint.label!r}; "
                "compare it with single networks, which may have other shapes"
            )
        for architecture in alike:
            numbers = fingerprint(copy(checkpoint), architecture.symmetry, memory=memory).float()
            names = [n for n, one in self._networks.items() if one.architecture == architecture.key and n != own]
            if names:
                distances = (torch.stack([self._networks[name].numbers for name in names]) - numbers).norm(dim=1)
                least = distances.topk(min(count, len(names)), largest=False)
                for number, distance in zip(least.indices.tolist(), least.values.tolist(), strict=True):
                    found.append((architecture.symmetry, Neighbor(names[number], distance)))
        return sorted(found, key=lambda row: row[1].distance)[:count]

    def _name(self, checkpoint: Checkpoint) -> str:
        """Return the path under which a network is stored: relative if it is in the database's folder, or absolute."""
        path, home = Path(checkpoint.label).resolve(), self.path.resolve().parent
        return path.relative_to(home).as_posix() if path.is_relative_to(home) else str(path)

    def _read(self) -> tuple[dict[str, Fingerprinted], dict[str, _Architecture]]:
        with Checkpoint.open(self.path) as checkpoint:
            header, tensors = checkpoint.header, checkpoint.params
        if header.get("kind") != FORMAT:
            raise ValueError(
                f"{str(self.path)!r} is not a database but {describe_kind(header)}; name the file that fingerprints "
                "were added to"
            )
        if header.get("version") != VERSION:
            raise ValueError(
                f"the database {str(self.path)!r} has version {header.get('version')}, but this regauge reads version "
                f"{VERSION}; upgrade regauge, or add the networks to a new file"
            )
        try:
            architectures = {}
            for row in json.loads(header["architectures"]):
                shapes = {name: tuple(shape) for name, shape in row["shapes"].items()}
                one = _Architecture(Symmetry.from_json(row["symmetry"]), shapes)
                architectures[one.key] = one
            keys, numbers = list(architectures), tensors["numbers"]
            rows = json.loads(header["networks"])
            if numbers.shape != (len(rows), SIZE) or numbers.dtype != torch.float32:
                raise ValueError(f"{len(rows)} networks have fingerprints of shape {tuple(numbers.shape)}")
            networks = {
                str(row["path"]): Fingerprinted(str(row["stamp"]), keys[int(row["architecture"])], own)
                for row, own in zip(rows, numbers, strict=True)
            }
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise ValueError(
                f"the database {str(self.path)!r} is damaged ({error}); remove it and add the networks again"
            ) from error
        return networks, architectures

    def _write(self) -> None:
        """Write all networks to the database, including those that another process added since the file was read."""
        if self.path.exists():
            networks, architectures = self._read()
            self._networks, self._architectures = networks | self._networks, architectures | self._architectures
        if not self._networks:
            return
        used = {one.architecture for one in self._networks.values()}
        keys = {key: number for number, key in enumerate(key for key in self._architectures if key in used)}
        rows = [
            {"path": name, "stamp": one.stamp, "architecture": keys[one.architecture]}
            for name, one in self._networks.items()
        ]
        header = {
            "kind": FORMAT,
            "version": VERSION,
            "architectures": f"[{', '.join(self._architectures[key].text for key in keys)}]",
            "networks": json.dumps(rows),
        }
        numbers = torch.stack([one.numbers for one in self._networks.values()])
        save({"numbers": numbers}, self.path, overwrite=True, metadata=header)


def _stamp(checkpoint: Checkpoint) -> str:
    """Return the sizes and times of a checkpoint's files."""
    states = [file.stat() for file in checkpoint.metadata]
    return f"{sum(one.st_size for one in states)} {max(one.st_mtime_ns for one in states)}"

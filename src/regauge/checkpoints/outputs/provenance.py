"""The provenance of a checkpoint: the command that wrote it, the settings, and the SHA-256 of every input.

A folder stores the provenance in the file `regauge.json`. A single `.safetensors` file stores the provenance in the
header string `regauge`. Equal runs write equal texts, because the record contains no times, no output name and no
memory limit. Absolute paths are stored relative to their common folder.
"""

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regauge.checkpoints.checkpoint import Checkpoint
from regauge.checkpoints.formats.file_formats import METADATA, weight_suffixes
from regauge.checkpoints.formats.headers import PROVENANCE, read_header
from regauge.checkpoints.location import files_of, find_cached, locate, split_sum
from regauge.checkpoints.plain_files import leads_out, short_paths
from regauge.checkpoints.writing import SUFFIX
from regauge.core.escaping import escape, escape_code
from regauge.core.progress import Advance, Crew, Progress, no_advance, no_progress
from regauge.core.typed_json import parse_json
from regauge.names import VERSION

IN_FOLDER = "regauge.json"
"""The file name of the provenance in a folder."""
DESCRIBING = (".json", ".txt", ".model", ".jinja", ".py", ".yml", ".yaml")
"""Suffixes of files that describe the weights or the tokenizer in a folder."""
HASHED_AT_ONCE = 1 << 20
"""The number of bytes that are hashed at once."""
NEAR = 1 << 20
"""The largest gap in bytes between two reads that is filled by an extra read for the hash. After a larger gap, the rest
of the file is hashed at the end."""

LOG = logging.getLogger(__name__)
_KNOWN: dict[tuple[int, ...], str] = {}
"""Known hashes of files. The key contains properties that change whenever a file is written, such as its time."""


@dataclass(frozen=True)
class Input:
    """An input of a command: the name of the option, and the path as the user gave it.

    Attributes:
        role: The name of the option, such as `base`.
        path: A file, a folder, or `file.py:factory`.
        place: The path on the disk, if it differs from `path`.
    """

    role: str
    path: str
    place: Path | None = None

    @property
    def source(self) -> Path:
        """The file or folder to read."""
        path = find_cached(self.path) or Path(self.path) if self.place is None else self.place
        module = self.path.rpartition(":")[0]
        return Path(module) if module and not path.exists() else path

    @property
    def files(self) -> list[Path]:
        """The files of the input: a checkpoint's weights and, in a folder, the files that describe the weights."""
        path, parts = self.source, split_sum(self.path)
        if parts is not None:
            return [file for part in parts for file in Input(self.role, part).files]
        if path.is_file() and not path.name.endswith(".index.json"):
            return files_of(path)
        if not path.exists():
            return []
        beside = path.iterdir() if path.is_dir() else ()
        found = {p for p in beside if p.is_file() and p.suffix in DESCRIBING}
        found = {p for p in found if p.name != IN_FOLDER and not p.name.startswith(".")}
        with suppress(FileNotFoundError, ValueError):  # a folder may contain only a configuration
            found.update(files_of(locate(path)))
        return sorted(found)


@dataclass(frozen=True)
class Provenance:
    """The provenance of a checkpoint.

    Attributes:
        command: The name of the command, such as `align`.
        settings: The settings that affect the output, ready for JSON.
        inputs: The files and folders that were read.
        seed: The seed of all random numbers; None if the command uses no random numbers.
        element: The file with the group element that transformed the checkpoint; `*` stands for the name of the output.
    """

    command: str
    settings: Mapping[str, Any]
    inputs: tuple[Input, ...]
    seed: int | None = None
    element: str | None = None

    def to_json(self, progress: Progress = no_progress, *, has_weights: bool = True) -> str:
        """Return the text for `regauge.json` or a header. Every file is read once to compute its hash.

        The entry `ancestors` maps the SHA-256 of each input to the provenance of this input. Indirect inputs (inputs of
        inputs, and so on) are included.

        Args:
            progress: A function that shows the number of hashed bytes.
            has_weights: Whether weight files are also hashed.
        """
        ancestors: dict[str, Any] = {}
        of_weights = weight_suffixes()
        files = {
            one: [path for path in one.files if has_weights or not path.name.endswith(of_weights)]
            for one in self.inputs
        }
        unknown = {path for own in files.values() for path in own if _stamp(path) not in _KNOWN}
        advance = progress("hashing", sum(path.stat().st_size for path in unknown)) if unknown else no_advance
        inputs = []
        for (one, own), path in zip(files.items(), short_paths([one.path for one in files]), strict=True):
            entry: dict[str, Any] = {"as": one.role, "path": path}
            is_one = len({path.parent for path in own}) == 1
            names = {path: escape(path.name if is_one else f"{path.parent.name}/{path.name}") for path in own}
            entry["sha256"] = {names[path]: hash_file(path, advance) for path in own}
            known = read_provenance(one.source)
            if known is not None:
                ancestors |= known.pop("ancestors", {})
                entry["provenance"] = hashlib.sha256(_encode(known).encode()).hexdigest()
                ancestors[entry["provenance"]] = known
            inputs.append(entry)
        document: dict[str, Any] = {"regauge": VERSION, "command": self.command, "settings": dict(self.settings)}
        document |= {} if self.seed is None else {"seed": self.seed}
        document |= {"inputs": inputs}
        document |= {} if self.element is None else {"element": self.element}
        document |= {"ancestors": dict(sorted(ancestors.items()))} if ancestors else {}
        return _encode(document)

    def facts(self, progress: Progress = no_progress) -> tuple[tuple[str, str], ...]:
        """Return a summary of the provenance, for a model card."""
        return summarize(json.loads(self.to_json(progress)))


def summarize(document: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Return a summary of a provenance: version, command, and each input with the hashes of its weights."""
    of_weights = weight_suffixes()
    facts = [(escape(f"regauge {document['regauge']}, {document['command']}"), "")]
    for one in document["inputs"]:
        digests: Mapping[str, str] = one["sha256"]
        named = [(n, digest[:12]) for n, digest in digests.items() if n.endswith(of_weights) or len(digests) == 1]
        weights = [f"{escape_code(name)} {escape(digest)}" for name, digest in named[:4]]
        facts.append((escape(f"{one['as']} {one['path']}"), ", ".join(weights) + (" ..." if len(named) > 4 else "")))
    return tuple(facts)


def name_networks(**networks: object) -> tuple[Input, ...]:
    """Return an input for each network in files, by role; networks in memory are left out."""
    named = []
    for role, given in networks.items():
        for network in given if isinstance(given, list | tuple) else [given]:
            if isinstance(network, str | Path | Checkpoint):
                named.append(Input(role, network.label if isinstance(network, Checkpoint) else str(network)))
    return tuple(named)


def read_provenance(path: str | Path) -> dict[str, Any] | None:
    """Read the provenance of a checkpoint; return None if it is absent or malformed."""
    path = Path(path)
    try:
        beside = path / IN_FOLDER if path.is_dir() else path.with_name(IN_FOLDER) if _is_index(path) else None
        if beside is not None and beside.is_file() and not leads_out(beside, beside.parent):
            text = beside.read_text(encoding="utf-8")
        else:
            main = locate(path)
            text = read_header(main).metadata.get(PROVENANCE, "") if main.suffix == SUFFIX else ""
        found = parse_json(text) if text else None
    except (OSError, ValueError):
        return None
    if not isinstance(found, dict) or "command" not in found:
        return None
    if not all(map(_is_whole, (found, *_ancestors(found)))):
        LOG.info(f"the provenance in {str(path)!r} is malformed and is ignored")
        return None
    return found


def _ancestors(document: Mapping[str, Any]) -> Iterable[Any]:
    found = document.get("ancestors", {})
    return found.values() if isinstance(found, dict) else (found,)


def _is_whole(document: Any) -> bool:
    """Return whether the provenance of one checkpoint has all required entries."""
    if not isinstance(document, dict):
        return False
    inputs = document.get("inputs")
    texts = [document.get("regauge"), document.get("command")]
    for one in inputs if isinstance(inputs, list) else [None]:
        if not isinstance(one, dict) or not isinstance(hashes := one.get("sha256"), dict):
            return False
        texts += [one.get("as"), one.get("path"), one.get("provenance", ""), *hashes.values()]
    return all(isinstance(text, str) for text in texts)


def hash_file(path: Path, advance: Advance = no_advance) -> str:
    """Return the SHA-256 of a file as hexadecimal digits. The file is read again only if it has changed."""
    stamp = _stamp(path)
    if stamp not in _KNOWN:
        digest = hashlib.sha256()
        with path.open("rb") as stream:
            while block := stream.read(HASHED_AT_ONCE):
                digest.update(block)
                advance(len(block))
        _KNOWN[stamp] = digest.hexdigest()
    return _KNOWN[stamp]


def hash_together(provenance: Provenance, crew: Crew) -> None:
    """Hash the files of all inputs, distributed over several processes, and store the hashes for `hash_file`."""
    files = sorted({path for one in provenance.inputs for path in one.files})
    for path, digest in zip(files, crew.map(hash_file, files), strict=True):
        _KNOWN[_stamp(path)] = digest


@contextmanager
def hashed_on_the_way(checkpoints: Iterable[Checkpoint]) -> Iterator[None]:
    """Return a context that hashes the files of checkpoints while tensors are read, as long as the reads follow the
    order of the file.

    When the context ends, the remaining bytes are read and hashed. `hash_file` returns the stored hashes.
    """
    given = list(checkpoints)
    files = {path for one in given for path in one.metadata if path.is_file() and _stamp(path) not in _KNOWN}
    hashes, readings = {path: _RunningHash(path) for path in files}, [one.read_so_far for one in given]

    def see(path: Path, start: int, part: memoryview) -> None:
        if path in hashes:
            hashes[path].see(start, part)

    for reading in readings:
        reading.seen = see
    try:
        yield
    finally:
        for reading in readings:
            reading.seen = None
    for one in hashes.values():
        one.finish()


class _RunningHash:
    """The running SHA-256 of the bytes of a file that have been read so far."""

    def __init__(self, path: Path) -> None:
        self._path, self._stamp, self._digest, self._end = path, _stamp(path), hashlib.sha256(), 0

    def see(self, start: int, part: memoryview) -> None:
        """Add bytes that were read to the hash, unless the gap after the hashed bytes is too large."""
        if self._end < start <= self._end + NEAR:
            self._read(start)
        if start <= self._end < start + len(part):
            self._digest.update(part[self._end - start :])
            self._end = start + len(part)

    def finish(self) -> None:
        """Hash the rest of the file, and store the hash unless the file has changed in the meantime."""
        self._read(self._stamp[2])
        if _stamp(self._path) == self._stamp:
            _KNOWN[self._stamp] = self._digest.hexdigest()

    def _read(self, end: int) -> None:
        with self._path.open("rb") as stream:
            stream.seek(self._end)
            while block := stream.read(min(HASHED_AT_ONCE, end - self._end)):
                self._digest.update(block)
                self._end += len(block)


def _stamp(path: Path) -> tuple[int, ...]:
    status = path.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _is_index(path: Path) -> bool:
    return path.name.endswith((".index.json", METADATA))


def _encode(document: Mapping[str, Any]) -> str:
    return json.dumps(document, indent=1, ensure_ascii=False)

"""An output that appears completely or not at all. Interrupted writing can be resumed.

All files are written into a staging folder next to the output, `OUT.partial`. When all files are on the disk, they are
moved to the output's path. `OUT.partial/run.json` lists the finished shards and the inputs. An error is raised if a
folder `OUT.partial` exists that regauge has not created.
"""

import json
import logging
import os
import shutil
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from torch import Tensor

from regauge.checkpoints.checkpoint import Checkpoint, index_metadata
from regauge.checkpoints.disk import PARTIAL, TEMPORARY, FullDiskError, full_disks_told, require_space
from regauge.checkpoints.formats.file_formats import METADATA, is_single_file
from regauge.checkpoints.formats.headers import PROVENANCE
from regauge.checkpoints.output import Output
from regauge.checkpoints.outputs.ledger import (
    CONTENT,
    LEDGER,
    LOCK,
    OWN_LEDGER,
    PROGRESS,
    REPLACED,
    empty_own,
    read_ledger,
    remove_own,
    require_own,
    write_ledger,
)
from regauge.checkpoints.outputs.provenance import IN_FOLDER, Provenance, hash_together, hashed_on_the_way
from regauge.checkpoints.outputs.replacing import finish_replacing, own_files, replace_files, replace_folder
from regauge.checkpoints.state_file import StateError
from regauge.checkpoints.writing import (
    INDEX,
    Pieces,
    Shard,
    flush,
    require_folder,
    require_writable,
    save_bytes,
    save_text,
    write_index,
    write_shard,
)
from regauge.core.counted import shorten
from regauge.core.progress import Crew, Progress, no_progress

REFUSALS = (ValueError, KeyError, TypeError)
"""Errors about inputs. After an error about inputs, the written files are useless for a later run."""
IN_USE = "another process is writing {!r}; wait for it, or end it"
LOG = logging.getLogger(__name__)


class Staging:
    """The staging folder of an output, which is a `.safetensors` file or a folder.

    The staging folder lies next to the output.

    A run is resumed only if `inputs` equals the inputs of the interrupted run. `inputs` contains everything on which
    the output depends, ready for JSON. If `inputs` is None, a run cannot be resumed, and a later run removes its files.
    The output's files are written into `content`. The caller may store a state for a later run in the file `progress`.
    The provenance is stored in the header of a single file, or as a file of the folder. `beside` maps the names of
    copied files to new contents, or to None for files that are left out. If several processes write the output, only
    the first one opens the staging folder and moves the output to its path. Each process writes its share of the files
    and a separate ledger (the list of finished files).

    Raises:
        FileExistsError: The output exists and may not be replaced, or it contains files but no checkpoint. The error is
            also raised if an interrupted run left files, and neither `resume` nor `overwrite` is set. The error is also
            raised if regauge has not created the folder `OUT.partial`.
        FileNotFoundError: The parent folder of the output does not exist.
        OSError: The disk has no space for the output.
        ValueError: The interrupted run had other inputs, or another process is writing the output.
    """

    def __init__(
        self,
        out: Path,
        inputs: Any,
        *,
        resume: bool,
        overwrite: bool,
        provenance: Provenance | None = None,
        nbytes: int = 0,
        crew: Crew | None = None,
    ) -> None:
        require_folder(out)
        self.out = out.resolve() if out.is_symlink() and out.is_dir() else out
        self.folder, self.provenance = partial_of(self.out), provenance
        self.content, self.progress = self.folder / CONTENT, self.folder / PROGRESS
        self._replaced = self.folder / REPLACED
        self.beside: dict[str, bytes | None] = {}
        self._inputs = json.loads(json.dumps(inputs))
        self._shards: dict[str, list[int]] = {}
        self._nbytes = nbytes
        self._lock: FileLock | None = None
        self._crew = crew or Crew()
        self._shards = self._crew.first(lambda: self._open(resume=resume, overwrite=overwrite))

    def _open(self, *, resume: bool, overwrite: bool) -> dict[str, list[int]]:
        """Acquire the lock, begin or continue the work, and return the files that an earlier run finished."""
        self._lock = _lock(self.out)
        is_left = True
        try:
            _finish(self.out)
            is_left = self.content.exists() and self._is_of_use()
            _require_name(self.out, overwrite=overwrite)
            if is_left and not (resume or overwrite):
                raise FileExistsError(
                    f"an interrupted run left {str(self.folder)!r}; add `resume=True` to continue it, or "
                    "`overwrite=True` to start again"
                )
            self._begin(resume=resume and is_left)
            require_space(self.out, self._needed())
        except BaseException:
            self.close(is_kept=is_left)
            raise
        return self._shards

    @property
    def is_first(self) -> bool:
        """Whether this process writes the files that only one process writes, such as a model card."""
        return self._crew.rank == 0

    def __enter__(self) -> "Staging":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *where: object) -> None:
        is_refused = isinstance(error, REFUSALS) and not isinstance(error, StateError)
        is_kept = self._inputs is not None and not is_refused
        self.close(is_kept=is_kept)
        if isinstance(error, FullDiskError):
            needed = self._needed() or None
            if not is_kept:
                raise FullDiskError(self.out, needed) from error
            kept = f"finished work is kept in {str(self.folder)!r}: free space, and add `resume=True`"
            raise FullDiskError(self.out, needed, kept) from error

    def write(
        self,
        shards: Sequence[Shard],
        pieces: Pieces,
        progress: Progress = no_progress,
        sources: Iterable[Checkpoint] = (),
    ) -> list[str]:
        """Write the files of a checkpoint; return the names of files that an earlier run finished and this run kept.

        The provenance of a folder is written last, because the `sources` of the chunks are hashed while they are read.
        """
        if self.provenance is None:
            return self._write(shards, pieces, progress)
        if is_single_file(self.out):
            text = self.provenance.to_json(progress)
            headed = [replace(shard, metadata={**shard.metadata, PROVENANCE: text}) for shard in shards]
            return self._write(headed, pieces, progress)
        with hashed_on_the_way(sources if self._crew.size == 1 else ()):
            kept = self._write(shards, pieces, progress)
        if self._crew.size > 1:
            hash_together(self.provenance, self._crew)
        if self.is_first:
            save_text(self.provenance.to_json(progress), self.content / IN_FOLDER)
        return kept

    def _write(self, shards: Sequence[Shard], pieces: Pieces, progress: Progress) -> list[str]:
        sizes = {shard.file: sum(spec.size for spec in shard.tensors) for shard in shards}
        advance = progress("writing", sum(sizes.values()))

        def count(name: str) -> Iterator[Tensor]:
            for piece in pieces(name):
                yield piece
                advance(piece.numel())

        def write(shard: Shard) -> bool:
            path, known = self.content / shard.file, self._shards.get(shard.file)
            if known is not None and path.exists() and [path.stat().st_size, _crc_of(path)] == known:
                advance(sizes[shard.file])
                return True
            self._shards[shard.file] = list(write_shard(shard, self.content, count))
            self._save()
            return False

        is_kept = self._crew.map(write, shards)
        return [shard.file for shard, kept in zip(shards, is_kept, strict=True) if kept]

    def publish(self, shards: Sequence[Shard], source: Checkpoint | None = None) -> Checkpoint:
        """Move the output to its final path. A folder also gets an index and the source's other files."""
        self._crew.first(lambda: self._put(shards, source))
        self.close(is_kept=False)
        found = Checkpoint.open(self.out)
        return found if source is None else source.view_alike(found)

    def _put(self, shards: Sequence[Shard], source: Checkpoint | None) -> None:
        if is_single_file(self.out):
            for path in self.content.iterdir():
                flush(path)
            self._save(is_complete=True)
            replace_files(self.content, self.out)
            shutil.rmtree(self.content)
        else:
            with full_disks_told(self.out):
                self._complete(shards, source)
            replaced, kept = replace_folder(self.content, self.out, self._replaced)
            if replaced:
                also = f", kept {shorten(kept)}" if kept else ""
                LOG.info(f"in {str(self.out)!r}: replaced {shorten(replaced)}{also}")
        flush(self.out.parent)

    def _complete(self, shards: Sequence[Shard], source: Checkpoint | None) -> None:
        """Write the index of a folder, and copy the files that describe the network."""
        from regauge.checkpoints.outputs.carrying import Carried, carry_files  # only for folders

        found = Carried() if source is None else carry_files(source, self.content, self.out)
        for names, what in (
            (found.copied, "copied from"),
            (found.left, "left in"),
            (found.outward, "left, as links to other places, in"),
        ):
            if names and source is not None:
                LOG.info(f"{what} {str(source.path.parent)!r}: {shorten(names, 12)}")
        for name, content in self.beside.items():
            if content is None:
                (self.content / name).unlink(missing_ok=True)
            else:
                save_bytes(content, self.content / name)
        config = self.content / "config.json"
        if source is not None and config.is_file():
            save_bytes(source.form.describe(config.read_bytes(), source.path.with_name(config.name)), config)
        if source is not None and source.path.name == METADATA:
            from regauge.checkpoints.writing_distributed import encode_metadata  # imports torch.distributed

            inside = {name: one.inside for name, one in source.stored.items()}
            save_bytes(encode_metadata(shards, self.content, inside), self.content / METADATA)
        elif len(shards) > 1:
            name = INDEX if source is None else source.form.index(shards, source.path.name)
            write_index(shards, self.content, name, {} if source is None else index_metadata(source))
        for folder, _, files in os.walk(self.content):
            for file in files:
                flush(Path(folder, file))
            flush(Path(folder))

    def close(self, *, is_kept: bool = True) -> None:
        """Release the lock, and either keep the partial output for `--resume` or remove it."""
        if self._lock is None:  # another process holds it
            return
        if not (is_kept or os.path.lexists(self._replaced) or _is_complete(self.folder)):
            remove_own(self.folder)
        self._lock.release()

    def _is_of_use(self) -> bool:
        """Return whether an interrupted run can be resumed."""
        document = read_ledger(self.folder)
        return document is not None and document["inputs"] is not None

    def _begin(self, *, resume: bool) -> None:
        """Keep the files of an interrupted run if the run is resumed; otherwise remove them and start again."""
        document = read_ledger(self.folder) if resume else None
        if document is not None:
            if document["inputs"] != self._inputs:
                changed = sorted(k for k in self._inputs if document["inputs"].get(k) != self._inputs[k])
                raise ValueError(
                    f"the interrupted run in {str(self.folder)!r} had other inputs or settings ({', '.join(changed)}); "
                    "give the same, or start again with `overwrite=True` and without `resume=True`"
                )
            self._shards = document["shards"]
            for path in self.folder.glob(OWN_LEDGER.format("*")):
                self._shards |= (read_ledger(self.folder, path.name) or document)["shards"]
        else:
            empty_own(self.folder)
        self._save()
        for path in self.folder.glob(OWN_LEDGER.format("*")):
            path.unlink()
        self.content.mkdir(exist_ok=True)
        for path in self.content.iterdir():
            if TEMPORARY.fullmatch(path.name) or path.is_symlink():
                path.unlink()

    def _needed(self) -> int:
        """Return the number of bytes that are still to be written."""
        found = self.content.iterdir() if self.content.exists() else ()
        return max(0, self._nbytes - sum(path.stat().st_size for path in found))

    def _save(self, *, is_complete: bool = False) -> None:
        name = LEDGER if self.is_first else OWN_LEDGER.format(self._crew.rank)
        write_ledger(self.folder, {"inputs": self._inputs, "shards": self._shards, "is_complete": is_complete}, name)


def partial_of(out: Path) -> Path:
    """Return the staging folder of an output, `OUT.partial`; raise a ValueError if the output has no name."""
    if out.name in ("", ".."):
        raise ValueError(f"the output {str(out)!r} is not the name of a new file or folder; give one")
    return out.with_name(out.name + PARTIAL)


def require_place(out: Path, *, overwrite: bool) -> None:
    """Raise an error, before any work is done, unless an output (a file or a folder) can be written to a given path."""
    out = out.resolve() if out.is_symlink() and out.is_dir() else out
    if partial_of(out).is_dir():
        lock = _lock(out)
        _finish(out)
        if {path.name for path in partial_of(out).iterdir()} == {LOCK}:
            remove_own(partial_of(out))
        lock.release()
    _require_name(out, overwrite=overwrite)


def require_new_folder(place: Output, what: str) -> None:
    """Raise an error, before any work is done, unless a single process can write a folder of this kind.

    Args:
        place: The output.
        what: The kind of the folder with its article, such as "an adapter".
    """
    place.require_alone(f"making {what}")
    if place.is_file:
        raise ValueError(f"{str(place.path)!r} is one file, but {what} is a folder; give a folder as the output")
    require_place(place.path, overwrite=place.overwrite)


def _finish(out: Path) -> None:
    """Finish the work of a run that ended while it moved the output to its final path. The caller holds the lock."""
    folder = partial_of(out)
    finish_replacing(out, folder / REPLACED)
    if _is_complete(folder):
        replace_files(folder / CONTENT, out)
        LOG.info(f"{str(out)!r} is the output of an interrupted run, which has been completed")
        shutil.rmtree(folder / CONTENT)
        (folder / LEDGER).unlink()


def _is_complete(folder: Path) -> bool:
    """Return whether a run ended while it moved a complete file to its final path."""
    document = read_ledger(folder)
    return document is not None and (folder / CONTENT).exists() and bool(document.get("is_complete"))


def _require_name(out: Path, *, overwrite: bool) -> None:
    """Raise an error unless the path of an output does not exist or may be replaced."""
    if is_single_file(out):
        return require_writable(out, overwrite=overwrite)
    require_folder(out)
    if os.path.lexists(out) and not (overwrite and out.is_dir()):
        raise FileExistsError(f"the output {str(out)!r} exists already; choose another name, or give `overwrite=True`")
    if out.exists() and any(out.iterdir()) and not own_files(out):
        raise FileExistsError(f"the folder {str(out)!r} holds files but no checkpoint; choose another name")
    return None


def _lock(out: Path) -> FileLock:
    """Return an acquired lock on an output. The lock file lies in the staging folder."""
    folder = partial_of(out)
    while True:
        require_own(folder)
        folder.mkdir(exist_ok=True)
        lock = FileLock(folder / LOCK, timeout=0)
        try:
            lock.acquire()
        except Timeout as error:
            raise ValueError(IN_USE.format(str(out))) from error
        except FileNotFoundError:
            continue
        if (folder / LOCK).exists():
            return lock
        lock.release()  # the process that held the lock ended and removed its folder


def _crc_of(path: Path) -> int:
    """Return the CRC-32 of a file."""
    crc = 0
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            crc = zlib.crc32(block, crc)
    return crc

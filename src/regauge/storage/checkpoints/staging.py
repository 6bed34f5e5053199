"""An output that appears whole or not at all, and that an interrupted run can go on with.

Everything is written into a folder beside the output, `OUT.partial`. When all of it is on the disk it takes the place
of the output in one step, so that whoever looks sees the old output or the new one. What is there already, and what it
was made from, is kept in `OUT.partial/run.json`.
"""

import ctypes
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from regauge.storage.checkpoints.shards import Pieces, Shard, crc_of, write_index, write_shard
from regauge.storage.checkpoints.writing import flush, save_text

_EXCHANGE = 2
_HERE = -100


class Staging:
    """The folder beside an output in which it is made.

    Args:
        out: The output: a `.safetensors` file, or a folder.
        inputs: Everything that the output depends on, ready for JSON: a run goes on only with the same.
        resume: Whether to go on with what an interrupted run left.
        overwrite: Whether the output, and what an interrupted run left, may be replaced.

    Raises:
        FileExistsError: The output is there and may not be replaced, or holds files that are not of a checkpoint; or
            an interrupted run left something and neither `resume` nor `overwrite` says what to do with it.
        FileNotFoundError: The folder of the output is not there.
        ValueError: What is to be resumed was made from other inputs, or another process is at work on it.
    """

    def __init__(self, out: Path, inputs: Any, *, resume: bool, overwrite: bool) -> None:
        require_place(out, overwrite=overwrite)
        self.out, self.folder = out, partial_of(out)
        self._inputs = json.loads(json.dumps(inputs))
        if self.folder.exists() and not (resume or overwrite):
            raise FileExistsError(
                f"an interrupted run left {str(self.folder)!r}; say --resume to go on with it, or --overwrite to begin "
                "anew"
            )
        self.folder.mkdir(exist_ok=True)
        self._lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise ValueError(f"another process is writing {str(out)!r}; wait for it, or end it") from error
        self._shards: dict[str, list[int]] = {}
        if resume and self._ledger.exists():
            try:
                self._load()
            except ValueError:
                self.close()
                raise
        else:
            self._clear()
        self.content.mkdir(exist_ok=True)
        self._save()

    def __enter__(self) -> "Staging":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def content(self) -> Path:
        """Where the files of the output are written."""
        return self.folder / "output"

    @property
    def progress(self) -> Path:
        """Where the caller may keep what it needs to go on."""
        return self.folder / "progress.safetensors"

    def write(self, shards: Sequence[Shard], pieces: Pieces) -> list[str]:
        """Write all files of a checkpoint but those that an earlier run finished; these are checked and named."""
        kept = []
        for shard in shards:
            if self._is_done(shard.file):
                kept.append(shard.file)
            else:
                self._shards[shard.file] = list(write_shard(shard, self.content, pieces))
                self._save()
        return kept

    def publish(self, shards: Sequence[Shard], *, index: str | None = None, extras: Sequence[Path] = ()) -> None:
        """Put the output in its place.

        Args:
            shards: Of the checkpoint.
            index: Name of the index file; none for a single file in a folder.
            extras: Files to copy beside the shards of a folder.
        """
        if self.out.suffix == ".safetensors":
            # The checkpoint comes last: what lies beside it belongs to it.
            names = sorted(p.name for p in self.content.iterdir() if p.name != self.out.name)
            for name in [*names, self.out.name]:
                flush(self.content / name)
                os.replace(self.content / name, self.out.parent / name)
        else:
            for extra in extras:
                shutil.copyfile(extra, self.content / extra.name)
            if index is not None:
                write_index(shards, self.content, index)
            for path in self.content.iterdir():
                flush(path)
            flush(self.content)
            replace_folder(self.content, self.out, self.folder / "replaced")
        flush(self.out.parent)
        shutil.rmtree(self.folder)
        self.close()

    def close(self) -> None:
        """Let others at it; what is there stays for a later run."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    @property
    def _ledger(self) -> Path:
        return self.folder / "run.json"

    def _load(self) -> None:
        document = json.loads(self._ledger.read_text(encoding="utf-8"))
        if document["inputs"] != self._inputs:
            changed = sorted(k for k in self._inputs if document["inputs"].get(k) != self._inputs[k])
            raise ValueError(
                f"the interrupted run in {str(self.folder)!r} had other inputs or settings ({', '.join(changed)}); "
                "give the same, or begin anew with --overwrite and without --resume"
            )
        self._shards = document["shards"]

    def _save(self) -> None:
        save_text(json.dumps({"inputs": self._inputs, "shards": self._shards}, indent=1), self._ledger)

    def _clear(self) -> None:
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != "lock":
                path.unlink()

    def _is_done(self, file: str) -> bool:
        path = self.content / file
        known = self._shards.get(file)
        return known is not None and path.exists() and [path.stat().st_size, crc_of(path)] == known


def partial_of(out: Path) -> Path:
    """Where an output is made: the folder `OUT.partial` beside it."""
    return out.with_name(out.name + ".partial")


def require_place(out: Path, *, overwrite: bool) -> None:
    """Refuse an output that cannot be written, before any work is done for it.

    Raises:
        FileExistsError: Something is there and may not be replaced.
        FileNotFoundError: Its folder does not exist.
    """
    if not out.parent.is_dir():
        raise FileNotFoundError(f"the folder {str(out.parent)!r} of the output does not exist; create it first")
    if not out.exists():
        return
    is_folder = out.suffix != ".safetensors"
    if not overwrite or out.is_dir() != is_folder:
        raise FileExistsError(f"the output {str(out)!r} exists already; choose another name, or say --overwrite")
    if is_folder and any(out.iterdir()) and not (*out.glob("*.safetensors"), *out.glob("*.index.json")):
        raise FileExistsError(f"the folder {str(out)!r} holds files but no checkpoint; choose another name")


def replace_folder(new: Path, out: Path, aside: Path) -> None:
    """Put a folder where another may be, in one step where the system can exchange two names.

    Elsewhere the old folder is moved aside first; between the two steps nothing is there.
    """
    if not out.exists():
        os.rename(new, out)
    elif not _exchange(new, out):
        os.rename(out, aside)
        os.rename(new, out)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names at once; whether the system could."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(other))

"""An output that appears whole or not at all, and that an interrupted run can resume.

Everything is written into a folder beside the output, `OUT.partial`. When all of it is on the disk it takes the place
of the output. The finished shards, and what they were made from, are listed in `OUT.partial/run.json`.
"""

import json
import os
import shutil
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from torch import Tensor

from regauge.core.progress import Progress, no_progress
from regauge.storage.checkpoints.checkpoint import Checkpoint
from regauge.storage.checkpoints.headers import PROVENANCE
from regauge.storage.checkpoints.provenance import IN_FOLDER, Provenance
from regauge.storage.checkpoints.writing import (
    INDEX,
    PARTIAL,
    SUFFIX,
    Pieces,
    Shard,
    flush,
    require_writable,
    save_text,
    write_index,
    write_shard,
)

NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json", ".md")
"""Files of a folder that are not copied beside new weights."""


class Staging:
    """The folder beside an output, a `.safetensors` file or a folder, in which it is made.

    A run is resumed only with the same inputs: everything that the output depends on, ready for JSON. `content` is
    where the files of the output are written, and `progress` where the caller may keep what it needs to go on. The
    provenance goes into the header of a file, or is a file of the folder.

    Raises:
        FileExistsError: The output is there and may not be replaced, or holds files that are not of a checkpoint; or
            an interrupted run left something and neither `resume` nor `overwrite` says what to do with it.
        FileNotFoundError: The folder of the output is not there.
        ValueError: What is to be resumed was made from other inputs, or another process is at work on it.
    """

    def __init__(
        self, out: Path, inputs: Any, *, resume: bool, overwrite: bool, provenance: Provenance | None = None
    ) -> None:
        require_place(out, overwrite=overwrite)
        self.out, self.folder, self.provenance = out, partial_of(out), provenance
        self.content, self.progress = self.folder / "output", self.folder / "progress.safetensors"
        self._replaced, self._ledger = self.folder / "replaced", self.folder / "run.json"
        self._inputs = json.loads(json.dumps(inputs))
        self._shards: dict[str, list[int]] = {}
        if self.folder.exists() and not (resume or overwrite):
            raise FileExistsError(
                f"an interrupted run left {str(self.folder)!r}; say --resume to go on with it, or --overwrite to begin "
                "anew"
            )
        self.folder.mkdir(exist_ok=True)
        self._lock = FileLock(self.folder / "lock", timeout=0)
        try:
            self._lock.acquire()
        except Timeout as error:
            raise ValueError(f"another process is writing {str(out)!r}; wait for it, or end it") from error
        try:
            self._begin(resume=resume)
        except ValueError:
            self.close()
            raise

    def __enter__(self) -> "Staging":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def write(self, shards: Sequence[Shard], pieces: Pieces, progress: Progress = no_progress) -> list[str]:
        """Write all files of a checkpoint but those that an earlier run finished; these are checked and named."""
        if self.provenance is not None and self.out.suffix == SUFFIX:
            text = self.provenance.to_json(progress)
            shards = [replace(shard, metadata={**shard.metadata, PROVENANCE: text}) for shard in shards]
        elif self.provenance is not None:
            save_text(self.provenance.to_json(progress), self.content / IN_FOLDER)
        sizes = {shard.file: sum(spec.size for spec in shard.tensors) for shard in shards}
        kept, advance = [], progress("writing", sum(sizes.values()))

        def count(name: str) -> Iterator[Tensor]:
            for piece in pieces(name):
                yield piece
                advance(piece.numel())

        for shard in shards:
            path, known = self.content / shard.file, self._shards.get(shard.file)
            if known is not None and path.exists() and [path.stat().st_size, _crc_of(path)] == known:
                kept.append(shard.file)
                advance(sizes[shard.file])
            else:
                self._shards[shard.file] = list(write_shard(shard, self.content, count))
                self._save()
        return kept

    def publish(self, shards: Sequence[Shard], source: Checkpoint | None = None) -> Checkpoint:
        """Put the output in its place, a folder with the name of the index and the further files of another one."""
        if self.out.suffix == SUFFIX:
            # The checkpoint comes last: what lies beside it belongs to it.
            names = sorted(p.name for p in self.content.iterdir() if p.name != self.out.name)
            for name in [*names, self.out.name]:
                flush(self.content / name)
                os.replace(self.content / name, self.out.parent / name)
        else:
            if source is not None and (source.path.parent / "config.json").is_file():
                for path in source.path.parent.iterdir():
                    is_own = path.name == IN_FOLDER or path.name.startswith(".") or path.name.endswith(NOT_COPIED)
                    if path.is_file() and not is_own:
                        shutil.copyfile(path, self.content / path.name)
                config = self.content / "config.json"
                save_text(source.form.describe(config.read_text(encoding="utf-8")), config)
            if len(shards) > 1:
                index = INDEX if source is None else source.form.index(shards, source.path.name)
                write_index(shards, self.content, index)
            for path in self.content.iterdir():
                flush(path)
            flush(self.content)
            replace_folder(self.content, self.out, self._replaced)
        flush(self.out.parent)
        shutil.rmtree(self.folder)
        self.close()
        found = Checkpoint.open(self.out)
        return found if source is None else source.view_alike(found)

    def close(self) -> None:
        """Release the lock; partial output is kept for `--resume`."""
        self._lock.release()

    def _begin(self, *, resume: bool) -> None:
        """Mend what a run that was killed left, and keep of it what is to be resumed."""
        if self._replaced.exists():  # A run ended within `replace_folder`, or right after it.
            if self.out.exists():
                shutil.rmtree(self._replaced)
            else:
                os.rename(self._replaced, self.out)
        if resume and self._ledger.exists():
            document = json.loads(self._ledger.read_text(encoding="utf-8"))
            if document["inputs"] != self._inputs:
                changed = sorted(k for k in self._inputs if document["inputs"].get(k) != self._inputs[k])
                raise ValueError(
                    f"the interrupted run in {str(self.folder)!r} had other inputs or settings ({', '.join(changed)}); "
                    "give the same, or begin anew with --overwrite and without --resume"
                )
            self._shards = document["shards"]
        else:
            for path in self.folder.iterdir():
                if path.is_dir():
                    shutil.rmtree(path)
                elif path.name != "lock":
                    path.unlink()
        self.content.mkdir(exist_ok=True)
        for path in self.content.glob(f".*{PARTIAL}"):
            path.unlink()
        self._save()

    def _save(self) -> None:
        save_text(json.dumps({"inputs": self._inputs, "shards": self._shards}, indent=1), self._ledger)


def partial_of(out: Path) -> Path:
    """Where an output is made: the folder `OUT.partial` beside it."""
    return out.with_name(out.name + PARTIAL)


def require_place(out: Path, *, overwrite: bool) -> None:
    """Raise unless an output, a file or a folder, can be written there, before any work is done for it."""
    if out.suffix == SUFFIX:
        return require_writable(out, overwrite=overwrite)
    if not out.parent.is_dir():
        raise FileNotFoundError(f"the folder {str(out.parent)!r} of the output does not exist; create it first")
    if out.exists() and not (overwrite and out.is_dir()):
        raise FileExistsError(f"the output {str(out)!r} exists already; choose another name, or say --overwrite")
    if out.exists() and any(out.iterdir()) and not (*out.glob("*.safetensors"), *out.glob("*.index.json")):
        raise FileExistsError(f"the folder {str(out)!r} holds files but no checkpoint; choose another name")
    return None


def replace_folder(new: Path, out: Path, aside: Path) -> None:
    """Put a folder where another may be, which is moved aside first; between the two steps nothing is there."""
    if out.exists():
        os.rename(out, aside)
    os.rename(new, out)


def _crc_of(path: Path) -> int:
    """The CRC-32 of a file."""
    crc = 0
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            crc = zlib.crc32(block, crc)
    return crc

"""Whether every byte of a store is what was written."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from regauge.core.progress import Progress, no_progress
from regauge.storage.checkpoints.writing import PARTIAL
from regauge.storage.store import shard_file
from regauge.storage.store.manifest import MANIFEST
from regauge.storage.store.shard_file import FOLDER


@dataclass(frozen=True)
class Verification:
    """The outcome of a verification.

    Attributes:
        shards: Number of whole shards.
        networks: Number of networks in them.
        damaged: The damage of each other shard, in a sentence.
        leftovers: Files that writers did not complete. They do no harm; delete them when no process writes.
    """

    shards: int
    networks: int
    damaged: Mapping[Path, str]
    leftovers: tuple[Path, ...]

    @property
    def ok(self) -> bool:
        """Whether no shard is damaged."""
        return not self.damaged


def verify(folder: str | Path, *, progress: Progress = no_progress) -> Verification:
    """Read every shard of a store and compare the checksums; a damaged one does not stop it.

    Args:
        folder: Folder of the store.
        progress: Shows how many shards are checked.

    Raises:
        FileNotFoundError: There is no store.
    """
    folder = Path(folder)
    if not (folder / MANIFEST).is_file():
        raise FileNotFoundError(f"there is no store in {str(folder)!r}: it has no {MANIFEST}; check the path")
    paths = shard_file.list_shards(folder)
    advance, networks, damaged = progress("shards", len(paths)), 0, {}
    for path in paths:
        try:
            networks += shard_file.check(path).count
        except ValueError as error:
            damaged[path] = str(error)
        advance()
    leftovers = tuple(sorted(path for path in (folder / FOLDER).iterdir() if path.name.endswith(PARTIAL)))
    return Verification(len(paths) - len(damaged), networks, damaged, leftovers)

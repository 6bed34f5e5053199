"""Shards as memory: their files are mapped, as many as the system allows."""

import threading

import torch

from regauge.storage.store.columns import Array
from regauge.storage.store.shard_file import Shard, damage_message

MAPPED_SHARDS = 4096
"""Shards that a reader keeps mapped. No file stays open, but a process has 65,530 mappings on Linux."""


class MappedShards:
    """The bytes of listed shards, for any number of threads; a forked process may use them too."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.mapped: dict[int, Array] = {}

    def get(self, number: int, shard: Shard) -> Array:
        """The bytes of a shard, read from the disk when they are looked at; mapped as long as they are referenced.

        Args:
            number: Its place in the listing.
            shard: Its header.

        Raises:
            FileNotFoundError: The file is gone.
            ValueError: It is no longer the file that was listed.
        """
        content = self.mapped.get(number)
        if content is None:
            content = _map(shard)
            with self.lock:
                self.mapped[number] = content
                if len(self.mapped) > MAPPED_SHARDS:
                    del self.mapped[next(iter(self.mapped))]
        return content


def _map(shard: Shard) -> Array:
    if not shard.path.exists():
        raise FileNotFoundError(f"the shard {str(shard.path)!r} is gone; shards are never deleted while they are read")
    try:
        tensor = torch.from_file(str(shard.path), shared=False, size=shard.size, dtype=torch.uint8)
    except RuntimeError as error:
        raise ValueError(damage_message(shard.path, f"it cannot be mapped ({str(error).splitlines()[0]})")) from error
    content: Array = tensor.numpy()
    content.flags.writeable = False
    if shard.checksum.encode() not in content[: shard.start].tobytes():
        raise ValueError(damage_message(shard.path, "it was replaced by another file after it was listed"))
    return content

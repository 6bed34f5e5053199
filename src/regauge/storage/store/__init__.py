"""The on-disk format for populations: immutable shards, rows of metadata, splits by trajectory."""

from regauge.storage.store.listing import Place
from regauge.storage.store.rows import Rows
from regauge.storage.store.shard_file import Verification, path_of, verify
from regauge.storage.store.store import Store

__all__ = ["Place", "Rows", "Store", "Verification", "path_of", "verify"]

"""The on-disk format for populations: immutable shards, rows of metadata, splits by trajectory."""

from regauge.storage.store.rows import Rows
from regauge.storage.store.shard import path_of
from regauge.storage.store.store import Place, Store
from regauge.storage.store.verification import Verification, verify

__all__ = ["Place", "Rows", "Store", "Verification", "path_of", "verify"]

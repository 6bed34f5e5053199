"""The on-disk format for populations: immutable shards, rows of metadata, splits by trajectory."""

from regauge.zoo.store.rows import Rows
from regauge.zoo.store.shard import path_of
from regauge.zoo.store.store import Place, Store
from regauge.zoo.store.verification import Verification, verify

__all__ = ["Place", "Rows", "Store", "Verification", "path_of", "verify"]

"""The on-disk format for populations: immutable shards, rows of metadata, and splits by trajectory."""

from regauge.storage.store.store import Store as Store  # Where it was in earlier versions.

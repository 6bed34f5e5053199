"""The format of populations on the disk: files that never change (shards), rows of metadata, and splits by run."""

from regauge.storage.store.store import Store as Store  # its place in earlier versions

"""The files of a store's shards: their names while they are written, and those that are open for reading."""

import os
import threading
import uuid
from collections import OrderedDict
from pathlib import Path

OPEN_FILES = 128
"""How many shards a reader keeps open."""


class ShardNames:
    """Names for the shards of one writer, in their order; a forked process is another writer."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.process, self.prefix, self.count = -1, "", 0

    def next(self) -> str:
        """A name that no other writer uses."""
        with self.lock:
            if self.process != os.getpid():
                self.process, self.prefix, self.count = os.getpid(), uuid.uuid4().hex[:12], 0
            self.count += 1
            return f"{self.prefix}-{self.count - 1:06d}"


class OpenFiles:
    """Files that are open for reading, the last ones that were asked for; for any number of threads."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.files: OrderedDict[Path, OpenFile] = OrderedDict()

    def get(self, path: Path) -> "OpenFile":
        """The file, which stays open while it is held."""
        with self.lock:
            file = self.files.get(path)
            if file is None:
                file = self.files[path] = OpenFile(path)
                if len(self.files) > OPEN_FILES:
                    self.files.popitem(last=False)
            else:
                self.files.move_to_end(path)
            return file


class OpenFile:
    """A file that is open for reading until nobody uses it."""

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)

"""The manifest of a store, `store.json`, which is written before the first shard. Only the manifest's entry `about` may
change.
"""

import json
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from regauge.checkpoints.location import MANIFEST
from regauge.checkpoints.writing import save_text
from regauge.core.symmetry import Symmetry
from regauge.core.symmetry_text import read_versioned
from regauge.storage.architecture import Architecture
from regauge.storage.store.packing import STORAGE

FOLDER = "shards"
FORMAT = "regauge.store"
VERSION = 1


@dataclass(frozen=True)
class Manifest:
    """The settings of a store; see `Store` for the attributes."""

    architecture: Architecture
    symmetry: Symmetry | None
    storage: str | None
    about: Mapping[str, Any]
    key: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __post_init__(self) -> None:
        if self.storage is not None and self.storage not in STORAGE:
            raise ValueError(
                f"values can be stored as {' or '.join(STORAGE)}, or as they are (None), not {self.storage!r}"
            )
        object.__setattr__(self, "about", json.loads(json.dumps(dict(self.about), allow_nan=False)))

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Read the manifest of the store in a folder."""
        path = require_manifest(folder)
        try:
            document = read_versioned(path.read_text(encoding="utf-8"), FORMAT, VERSION)
            symmetry = document["symmetry"]
            if not isinstance(document["key"], str) or not isinstance(document["about"], dict):
                raise ValueError("its key is no text, or what it tells is no object")
            return cls(
                Architecture.from_json(json.dumps(document["architecture"])),
                None if symmetry is None else Symmetry.from_json(json.dumps(symmetry)),
                document["storage"],
                document["about"],
                document["key"],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{str(path)!r} does not describe a store ({error}); restore it from a copy") from error

    def write(self, folder: Path) -> None:
        """Make a folder a store. An existing store does not change if the manifests are equal except for the key."""
        path = folder / MANIFEST
        if path.exists():
            self._require_same(folder)
            return
        own = (FOLDER, MANIFEST)  # another process may be creating the same store right now
        if folder.exists() and any(not name.startswith(".") for name in os.listdir(folder) if name not in own):
            raise FileExistsError(f"{str(folder)!r} holds other files; choose a new or empty folder for a store")
        (folder / FOLDER).mkdir(parents=True, exist_ok=True)
        try:
            save_text(self._to_json(), path, is_new=True)
        except FileExistsError:  # another process was first
            self._require_same(folder)

    def tell(self, folder: Path, about: Mapping[str, Any]) -> None:
        """Replace the entry `about` in the manifest of the store in a folder."""
        save_text(replace(self, about=about)._to_json(), folder / MANIFEST)

    def _to_json(self) -> str:
        document = {
            "format": FORMAT,
            "version": VERSION,
            "architecture": json.loads(self.architecture.to_json()),
            "symmetry": None if self.symmetry is None else json.loads(self.symmetry.to_json()),
            "storage": self.storage,
            "about": self.about,
            "key": self.key,
        }
        return json.dumps(document, indent=1, allow_nan=False) + "\n"

    def _require_same(self, folder: Path) -> None:
        there = Manifest.read(folder)
        other = _differences(there._identity, self._identity) + _differences(there.about, self.about)
        if other:
            raise FileExistsError(
                f"{str(folder)!r} holds a store of other networks or settings ({', '.join(other[:5])}); open it, "
                "or choose another folder"
            )

    @property
    def _identity(self) -> dict[str, Any]:
        """The fields that are equal in all stores with the same settings. Notes on checks of the symmetry are left out,
        because notes can differ.
        """
        groups = None if self.symmetry is None else self.symmetry.groups
        return {"architecture": self.architecture, "storage": self.storage, "symmetry": groups}


def require_manifest(folder: Path) -> Path:
    """Return the path of the manifest of the store in a folder; raise a FileNotFoundError if there is no store."""
    if not (folder / MANIFEST).is_file():
        raise FileNotFoundError(f"there is no store in {str(folder)!r}: it has no {MANIFEST}; check the path")
    return folder / MANIFEST


def _differences(first: Any, second: Any, path: str = "") -> list[str]:
    """Return the keys, as paths, at which two JSON values differ."""
    if isinstance(first, dict) and isinstance(second, dict):
        keys = dict.fromkeys((*first, *second))
        return [found for key in keys for found in _differences(first.get(key), second.get(key), f"{path}.{key}")]
    return [] if first == second else [path.removeprefix(".")]

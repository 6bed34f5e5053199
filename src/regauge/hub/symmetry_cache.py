"""A cache of symmetries. Later runs read from the cache instead of tracing a folder's model again.

The symmetry depends on the folder's configuration and on the code that builds and traces the model. Therefore the key
of a cached result consists of the content of config.json, the installed packages, the source of regauge, and the
options. Models of factories are traced every time, because their code may have changed. Models with an incomplete
configuration are also traced every time. A configuration is incomplete if the folder contains code, or if the
configuration refers to quantized weights or other files.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from regauge.checkpoints.checkpoint import Checkpoint
from regauge.checkpoints.formats.state_dicts import memory_of
from regauge.core.params import Params
from regauge.core.symmetry import Symmetry
from regauge.hub.build_model import folder_of
from regauge.storage.cache import keep, recall

KIND, NAMES = "symmetries", "names"
"""Kinds of cache entries: symmetries, and conversions of tensor names for files whose tensor names differ from the
names in the model."""
Named: TypeAlias = tuple[Checkpoint, Mapping[str, Tensor]]
"""A checkpoint under the names of its model, and the tensors that the checkpoint must have."""
INERT = ("_name_or_path", "transformers_version")
"""Settings of a configuration that only describe its origin."""
INCOMPLETE = ("auto_map", "quantization_config", "configuration_files")
"""Settings whose presence means that a model depends on more than its configuration."""


@dataclass(frozen=True)
class Tracing:
    """The settings of tracing a model; see `open_model`."""

    input_shape: tuple[str, ...] = ()
    input_dtype: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    move: tuple[str, ...] = ()


@dataclass(frozen=True)
class Traced:
    """The result of tracing a model.

    Attributes:
        symmetry: The symmetry of the model.
        state: The `state_dict()` of the model. The tensors are on the meta device if the model was built on it, or is
            known from an earlier run.
        was_meta: Whether the model was built on the meta device.
        kwargs: Keyword inputs of the trace. None without keyword inputs, or if the result is from an earlier run.
        notes: Messages about submodels that tracing left out, or about the earlier run that found the symmetry.
    """

    symmetry: Symmetry
    state: Params
    was_meta: bool
    kwargs: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()

    def to_json(self) -> str:
        """Return the result as JSON text."""
        owners: dict[Any, str] = {}
        rows = [
            [name, list(one.shape), str(one.dtype).removeprefix("torch."), owners.setdefault(memory_of(one), name)]
            for name, one in self.state.items()
        ]
        return json.dumps({"symmetry": self.symmetry.to_json(), "state": rows, "was_meta": self.was_meta})

    @classmethod
    def from_json(cls, text: str) -> "Traced":
        """Read a result from its JSON text. Tied names share one tensor on the meta device."""
        document = json.loads(text)
        state: Params = {}
        for name, shape, dtype, owner in document["state"]:
            known = state.get(owner)
            state[name] = torch.empty(shape, dtype=getattr(torch, dtype), device="meta") if known is None else known
        return cls(Symmetry.from_json(document["symmetry"]), state, document["was_meta"])


def trace_once(name: str, tracing: Tracing, settings: Any, trace: Callable[[], Traced], *, retrace: bool) -> Traced:
    """Trace a model, or return the cached result of an earlier run.

    Args:
        name: The name of the model.
        tracing: The settings of tracing.
        settings: All other settings on which the result depends.
        trace: A function that traces the model.
        retrace: Whether the model is traced even if a result is cached.
    """
    origin = _origin_of(name, tracing, settings)
    if origin is None:
        return trace()
    known = None if retrace else recall(KIND, origin)
    if known is not None:
        told = f"the symmetry of {name} is known from an earlier run (`retrace=` finds it anew)"
        return replace(Traced.from_json(known), notes=(told,))
    found = trace()
    keep(KIND, origin, found.to_json())
    return found


def name_once(name: str, checkpoint: Checkpoint, state: Params, find: Callable[[], Named], *, retrace: bool) -> Named:
    """Return a checkpoint under a model's names, which are read from the cache if an earlier run stored them.

    Args:
        name: The name of the model.
        checkpoint: The checkpoint under its original names.
        state: The tensors of the model.
        find: A function that finds the names, and the tensors that the checkpoint must have.
        retrace: Whether the names are determined again even if a result is cached.
    """
    from regauge.checkpoints.names.conversion import Conversion
    from regauge.checkpoints.names.converted import Converted

    stored = [[one.name, one.shape, str(one.dtype)] for one in checkpoint.stored.values()]
    origin = _origin_of(name, Tracing(), stored)
    known = None if origin is None or retrace else recall(NAMES, origin)
    if known is not None:
        document = json.loads(known)
        conversion = document["conversion"]
        named = checkpoint if conversion is None else Converted(checkpoint, Conversion.from_json(conversion))
        return named, {one: state[one] for one in document["expected"]}
    named, expected = find()
    if origin is not None:
        found = named.conversion.to_json() if isinstance(named, Converted) else None
        keep(NAMES, origin, json.dumps({"conversion": found, "expected": list(expected)}))
    return named, expected


def _origin_of(name: str, tracing: Tracing, settings: Any) -> dict[str, Any] | None:
    """Return all facts on which the symmetry of a folder's model depends, or None if some facts are unknown."""
    folder = folder_of(name)
    if folder is None:
        return None
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    registry = sys.modules.get("regauge.discovery.registry")
    if not isinstance(config, dict) or any(setting in config for setting in INCOMPLETE) or not _is_released():
        return None
    if registry is not None and registry.registered_rules():
        return None
    return {
        "tensors": _tensors_in(folder),
        "config": {key: value for key, value in config.items() if key not in INERT},
        "inputs": [tracing.input_shape, tracing.input_dtype, tracing.outputs, tracing.keep, tracing.move],
        "settings": settings,
        "packages": _installed(),
        "source": _source(),
        "python": sys.version,
    }


def _tensors_in(folder: Path) -> str | None:
    """Return the SHA-256 of the list of a folder's checkpoint tensors, which determines the model's class."""
    try:
        stored = Checkpoint.open(folder).stored
    except (OSError, ValueError):
        return None
    return hashlib.sha256(repr(sorted((name, one.shape) for name, one in stored.items())).encode()).hexdigest()


def _is_released() -> bool:
    """Return whether the installed transformers is a released version instead of a development copy."""
    try:
        found, spec = distribution("transformers"), find_spec("transformers")
    except PackageNotFoundError:
        return False
    return spec is not None and Path(str(found.locate_file("transformers/__init__.py"))) == Path(spec.origin or "")


def _installed() -> list[str]:
    """Return the installed packages with their versions, because optional packages may change a model's computation."""
    folders = [Path(entry) for entry in dict.fromkeys(sys.path) if entry and Path(entry).is_dir()]
    return sorted(path.name for folder in folders for path in folder.glob("*.dist-info"))


def _source() -> str:
    """Return the SHA-256 of regauge's source."""
    root, content = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        content.update(f"{path.relative_to(root)}\0".encode())
        content.update(path.read_bytes())
    return content.hexdigest()

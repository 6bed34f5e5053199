"""Where a streamed alignment is, and the file that keeps it for a later run."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from regauge.core.element import Element, Value
from regauge.storage.checkpoints.checkpoint import Checkpoint
from regauge.storage.checkpoints.writing import save


@dataclass
class State:
    """Everything that a streamed alignment has found between two readings.

    Attributes:
        element: The element so far, between the balanced networks.
        left: The element that balances the first network; None before that, or if scales are kept.
        right: The element that balances the second network.
        is_anchored: Whether the spread groups have their first values.
        is_from_identity: Whether this climb began at the identity because the first one ended below it.
        matched: Working sets in which something was chosen already.
        history: Objective after each sweep.
        initial: Objective of the identity, as history counts it.
        quiet: Rounds of spread groups in a row that could not be improved.
        sweeps: How many sweeps are done, of all climbs.
        before: The element before the last step of spread groups, while that has not proved itself.
    """

    element: Element
    left: Element | None = None
    right: Element | None = None
    is_anchored: bool = False
    is_from_identity: bool = False
    matched: set[int] = field(default_factory=set)
    history: list[float] = field(default_factory=list)
    initial: float | None = None
    offset: float = 0.0
    quiet: int = 0
    sweeps: int = 0
    before: Element | None = None


NUMBERS = ("is_anchored", "is_from_identity", "history", "initial", "offset", "quiet", "sweeps")
ELEMENTS = ("element", "left", "right", "before")


def save_state(state: State, path: Path) -> None:
    """Write a state in place of an earlier one."""
    tensors: dict[str, Tensor] = {}
    for kind in ELEMENTS:
        element = getattr(state, kind)
        for group, value in () if element is None else element.items():
            tensors |= {f"{kind}/{group}/{name}": tensor for name, tensor in value.items()}
    numbers = {name: getattr(state, name) for name in NUMBERS} | {"matched": sorted(state.matched)}
    save(tensors, path, overwrite=True, metadata={"state": json.dumps(numbers)})


def load_state(path: Path, groups: Sequence[str]) -> State:
    """Read what `save_state` wrote, for a symmetry with these groups."""
    with Checkpoint.open(path) as file:
        numbers = json.loads(file.metadata[path]["state"])
        tensors = {name: file.read(name) for name in file.stored}
    found: dict[str, dict[str, dict[str, Tensor]]] = {}
    for key, tensor in tensors.items():
        kind, rest = key.split("/", 1)
        group, name = rest.rsplit("/", 1)
        found.setdefault(kind, {}).setdefault(group, {})[name] = tensor
    elements = {kind: Element({g: Value(**values.get(g, {})) for g in groups}) for kind, values in found.items()}
    numbers["matched"] = set(numbers["matched"])
    return State(
        element=elements["element"],
        left=elements.get("left"),
        right=elements.get("right"),
        before=elements.get("before"),
        **numbers,
    )

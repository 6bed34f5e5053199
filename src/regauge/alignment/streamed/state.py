"""Where a streamed alignment is, and the file that keeps it for a later run."""

import json
from collections.abc import Iterable
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
        left: The element that balances the first network; None before that, or if networks are compared as they are.
        right: The element that balances the second network.
        before: The element before the last step of spread groups, while that has not proved itself.
        is_anchored: Whether the spread groups have their first values.
        is_from_identity: Whether this climb began at the identity because the first one ended below it.
        matched: The number of working sets in which something was chosen already.
        history: Objective after each sweep.
        initial: Objective of the identity.
        quiet: Rounds of spread groups in a row that could not be improved.
        is_converged: Whether the climb ended by itself; None before it ends.
        notes: A sentence about each group of matrices that is only rotated.
        timings: A sentence about each pass over the files: how long it took, and how much was read how fast.
    """

    element: Element
    left: Element | None = None
    right: Element | None = None
    before: Element | None = None
    is_anchored: bool = False
    is_from_identity: bool = False
    matched: int = 0
    history: list[float] = field(default_factory=list)
    initial: float | None = None
    quiet: int = 0
    is_converged: bool | None = None
    notes: list[str] = field(default_factory=list)
    timings: list[str] = field(default_factory=list)


def save_state(state: State, path: Path) -> None:
    """Write a state in place of an earlier one."""
    elements = {kind: found for kind, found in vars(state).items() if isinstance(found, Element)}
    tensors = {
        f"{kind}/{group}/{part}": tensor
        for kind, element in elements.items()
        for group, value in element.items()
        for part, tensor in value.items()
    }
    rest = {name: value for name, value in vars(state).items() if name not in elements}
    save(tensors, path, overwrite=True, metadata={"state": json.dumps(rest)})


def load_state(path: Path, groups: Iterable[str]) -> State:
    """Read what `save_state` wrote, for a symmetry with these groups."""
    with Checkpoint.open(path) as file:
        rest, tensors = json.loads(file.header["state"]), file.params
    found: dict[str, dict[str, dict[str, Tensor]]] = {}
    for key, tensor in tensors.items():
        kind, group = key.split("/", 1)
        group, part = group.rsplit("/", 1)
        found.setdefault(kind, {name: {} for name in groups})[group][part] = tensor
    elements = {kind: Element({g: Value(**parts) for g, parts in of.items()}) for kind, of in found.items()}
    return State(**{**rest, **elements})

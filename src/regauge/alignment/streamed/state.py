"""The state of a streamed alignment, and the file that keeps it for a later run."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regauge.checkpoints.state_file import StateFile
from regauge.core.element import Element, Value
from regauge.core.symmetry import Symmetry
from regauge.core.typed_json import require_fields


@dataclass
class ClimbState:
    """Everything that one climb has found between two readings.

    Attributes:
        element: The element so far, between the balanced networks.
        left: The element that balances the first network; None if networks are compared as they are.
        right: The element that balances the second network.
        before: The element before the last step of spread groups, while that has not paid off.
        is_anchored: Whether the spread groups have their first values.
        is_from_identity: Whether this climb began at the identity because the first one ended below it.
        matched: The number of working sets in which something was chosen already.
        history: Objective after each sweep.
        initial: Objective of the identity.
        quiet: Rounds of spread groups in a row that could not be improved.
        is_converged: Whether the climb ended by itself; None before it ends.
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

    def begin_at_identity(self, symmetry: Symmetry) -> None:
        """Begin anew where the second network is moved by what balances the first."""
        self.is_from_identity, self.before = True, None
        self.history, self.quiet, self.element = [], 0, symmetry.identity()
        if self.left is not None and self.right is not None:
            self.element = symmetry.compose(self.left, symmetry.inverse(self.right))

    def found(self, symmetry: Symmetry) -> Element:
        """Return the element so far, between the networks as they are."""
        if self.left is None or self.right is None:
            return self.element
        return symmetry.compose(symmetry.inverse(self.left), symmetry.compose(self.element, self.right))


@dataclass
class State:
    """Everything that a streamed alignment has found between two readings.

    Attributes:
        climbs: A climb for each way in which the networks are balanced; empty before that.
        chosen: The number of the climb that is kept, when all have ended.
        found: The element that it found, between the networks as they are.
        fits: The number of steps of fitting scales that are done.
        notes: Sentences about what could not be taken over from the first network.
        timings: A sentence about each pass over the files: how long it took, and how much was read how fast.
    """

    climbs: list[ClimbState] = field(default_factory=list)
    chosen: int = 0
    found: Element | None = None
    fits: int = 0
    notes: list[str] = field(default_factory=list)
    timings: list[str] = field(default_factory=list)


WORK = "streamed alignment"


def save_state(state: State, path: Path) -> None:
    """Write a state in place of an earlier one."""
    tensors: dict[str, Tensor] = {}

    def document(part: State | ClimbState, place: str) -> dict[str, Any]:
        own = {one.name: getattr(part, one.name) for one in fields(part) if one.name != "climbs"}
        for kind, found in own.items():
            if isinstance(found, Element):
                tensors.update({f"{place}.{kind}/{group}": tensor for group, tensor in _flat(found)})
        return {kind: value for kind, value in own.items() if not isinstance(value, Element)}

    climbs = [document(climb, str(k)) for k, climb in enumerate(state.climbs)]
    whole = {**document(state, ""), "climbs": climbs}
    StateFile(path, work=WORK).write(tensors, whole, {})


def load_state(path: Path, symmetry: Symmetry) -> State | None:
    """Read what `save_state` wrote, for a symmetry; None without a file.

    Raises:
        StateError: The file is damaged, or none.
    """
    file = StateFile(path, work=WORK)
    kept = file.read({})
    if kept is None:
        return None
    with file.continuing():
        return _read_state(*kept, symmetry)


def _read_state(tensors: Mapping[str, Tensor], whole: Mapping[str, Any], symmetry: Symmetry) -> State:
    """Return the state of what `save_state` wrote; whatever is not of such a state is an error of any of several
    types."""
    groups = [group.name for group in symmetry.groups]
    found: dict[str, dict[str, dict[str, dict[str, Tensor]]]] = {}
    for key, tensor in tensors.items():
        place, group = key.split("/", 1)
        place, kind = place.split(".")
        group, part = group.rsplit("/", 1)
        found.setdefault(place, {}).setdefault(kind, {name: {} for name in groups})[group][part] = tensor

    def elements(place: str) -> dict[str, Any]:
        own = found.get(place, {}).items()
        made = {kind: Element({g: Value(**parts) for g, parts in of.items()}) for kind, of in own}
        for kind, element in made.items():
            _require_element(symmetry, element, kind)
        return made

    climbs = [ClimbState(**{**rest, **elements(str(k))}) for k, rest in enumerate(whole["climbs"])]
    state = State(**{**whole, **elements(""), "climbs": climbs})
    for climb in climbs:
        require_fields(vars(climb), ClimbState, "a climb")
    require_fields({**vars(state), "climbs": []}, State, "the alignment")
    if not 0 <= state.chosen < max(1, len(climbs)):
        raise ValueError(f"there is no climb {state.chosen}")
    return state


def _require_element(symmetry: Symmetry, element: Element, kind: str) -> None:
    """Raise a ValueError unless the values of an element have the shapes of a symmetry's, and orders are such."""
    with torch.device("meta"):
        identity = symmetry.identity()
    for name, value in identity.items():
        own, expected = dict(element[name].items()), dict(value.items())
        if own.keys() != expected.keys() or any(own[field].shape != one.shape for field, one in expected.items()):
            raise ValueError(
                f"the values of group {name!r} in {kind!r} have other names or shapes; delete the state, and start "
                "again"
            )
        order = own["perm"].sort(-1).values if "perm" in own else torch.arange(0)
        if not torch.equal(order, torch.arange(order.shape[-1]).expand_as(order)):
            raise ValueError(
                f"the order of group {name!r} in {kind!r} is no permutation; delete the state, and start again"
            )


def _flat(element: Element) -> Iterator[tuple[str, Tensor]]:
    for group, value in element.items():
        for part, tensor in value.items():
            yield f"{group}/{part}", tensor

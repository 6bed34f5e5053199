"""The state of a streamed alignment, and the file that stores it for a later run."""

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
    """The current results of one coordinate ascent, as stored between two sweeps.

    Attributes:
        element: The current element, which maps one balanced network towards the other.
        left: The element that balances the first network, or None if the networks are not balanced.
        right: The element that balances the second network.
        before: The element before the last step of the groups that act on several working sets. `before` is kept until
            the next sweep shows that the step raised the objective.
        is_anchored: Whether the groups that act on several working sets have their initial values.
        is_from_identity: Whether the ascent started at the identity, because a first ascent ended with a worse
            objective.
        matched: The number of working sets in which values have already been chosen.
        history: The objective after each sweep.
        initial: The objective of the identity.
        quiet: The number of consecutive rounds in which no group that acts on several working sets could be improved.
        is_converged: Whether the ascent ended because no step raises the objective; None while the ascent runs.
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
        """Start the ascent again from the identity, with both networks as the caller passed them."""
        self.is_from_identity, self.before = True, None
        self.history, self.quiet, self.element = [], 0, symmetry.identity()
        if self.left is not None and self.right is not None:
            self.element = symmetry.compose(self.left, symmetry.inverse(self.right))

    def found(self, symmetry: Symmetry) -> Element:
        """Return the current element, converted to act between the networks as given."""
        if self.left is None or self.right is None:
            return self.element
        return symmetry.compose(symmetry.inverse(self.left), symmetry.compose(self.element, self.right))


@dataclass
class State:
    """The current results of a streamed alignment, as stored between two sweeps.

    Attributes:
        climbs: One ascent for each kind of balancing. The list is empty before the networks are balanced.
        chosen: The index of the ascent that is kept, once all ascents have ended.
        found: The element that the kept ascent found, between the networks as given.
        fits: The number of completed fitting steps.
        notes: Messages about properties of the first network that the second network could not adopt.
        timings: A message about each pass over the files: its duration, the amount of data read, and the speed.
    """

    climbs: list[ClimbState] = field(default_factory=list)
    chosen: int = 0
    found: Element | None = None
    fits: int = 0
    notes: list[str] = field(default_factory=list)
    timings: list[str] = field(default_factory=list)


WORK = "streamed alignment"


def save_state(state: State, path: Path) -> None:
    """Write a state to a file, and replace an earlier state in this file."""
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
    """Return the state that `save_state` wrote for a symmetry, or None if there is no file.

    Raises:
        StateError: The file is damaged, or does not contain a state.
    """
    file = StateFile(path, work=WORK)
    kept = file.read({})
    if kept is None:
        return None
    with file.continuing():
        return _read_state(*kept, symmetry)


def _read_state(tensors: Mapping[str, Tensor], whole: Mapping[str, Any], symmetry: Symmetry) -> State:
    """Return the state that tensors written by `save_state` represent. Tensors that `save_state` did not write may
    raise various errors.
    """
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
    """Raise a ValueError unless an element's shapes fit the symmetry and its permutations are valid."""
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

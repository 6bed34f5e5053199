"""The origin of a network in a file: facts from its provenance that affect a comparison."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from regauge.checkpoints.alignments import Alignment, alignment_path, load_alignment
from regauge.checkpoints.checkpoint import Checkpoint
from regauge.checkpoints.formats.file_formats import weight_suffixes
from regauge.checkpoints.outputs.provenance import Input, hash_file, read_provenance
from regauge.core.counted import shorten
from regauge.core.element import Element
from regauge.core.escaping import escape
from regauge.core.families import move_tensor
from regauge.core.symmetry import Symmetry

CHOOSING = ("align", "canonicalize", "apply", "merge")
"""Commands whose outputs have an order of units that somebody chose, for example by alignment."""
NO_PARENTS = ("model", "symmetry", "data", "test", "reference", "matcher", "alignment", "tokenizer", "statistics")
"""Names of command inputs whose weights do not become part of the output."""


@dataclass(frozen=True)
class Origin:
    """The origin of one of two compared networks.

    Attributes:
        label: The label of the network, "A" or "B".
        command: The command that wrote the network, such as "align"; empty if the provenance of the network names no
            command.
        parents: The networks from which this network was made, according to its provenance: path, and SHA-256 of the
            weights.
        is_chosen: Whether somebody chose the order of units in this network, or in a network from which it was made.
        alignment: The element that was applied to the network, if its file contains the element.
    """

    label: str
    command: str = ""
    parents: tuple[tuple[str, frozenset[str]], ...] = ()
    is_chosen: bool = False
    alignment: Alignment | None = None

    @classmethod
    def of(cls, network: Mapping[str, Tensor] | Checkpoint, label: str) -> "Origin":
        """Read the origin of a network from its provenance. The origin of a network in memory is empty."""
        document = read_provenance(network.home) if isinstance(network, Checkpoint) else None
        if document is None:
            return cls(label)
        command = _word(document)
        documents = [document, *document.get("ancestors", {}).values()]
        is_chosen = any(_word(one) in CHOOSING for one in documents)
        assert isinstance(network, Checkpoint)
        has_element = "element" in document and not any(_word(one) in CHOOSING for one in documents[1:])
        alignment = _element_beside(Path(network.home)) if has_element else None
        return cls(label, command, tuple(_parents(document, command)), is_chosen, alignment)

    def knows(self, other: Mapping[str, Tensor] | Checkpoint) -> bool:
        """Return whether the provenance names another network as a parent, which is recognized by the hash of its
        weights.
        """
        if not self.parents or not isinstance(other, Checkpoint):
            return False
        files = [path for path in Input("", other.home).files if path.name.endswith(weight_suffixes(is_read=True))]
        own = frozenset(map(hash_file, files))
        return any(own and own == hashes for _, hashes in self.parents)

    def undo(self, network: Mapping[str, Tensor] | Checkpoint) -> "Undo | None":
        """Return a function that undoes the alignment of tensors, or None if the element is unknown."""
        if self.alignment is None or self.alignment.element.rotation:  # Rotations mix units: they have no order.
            return None
        try:
            symmetry = self.alignment.symmetry.bind(network.on_meta() if isinstance(network, Checkpoint) else network)
        except (KeyError, ValueError):  # The element of another network, or tensors under other names.
            return None
        return Undo(symmetry, symmetry.inverse(self.alignment.element))

    def note(self, *, is_undone: bool) -> str | None:
        """Return a sentence that states how the order of units arose, and what follows for the p-value."""
        if not self.command:
            return None
        made = f"{self.label} says that `regauge {escape(self.command)}` wrote it"
        if self.parents:
            made += f", of {shorten([escape(path) for path, _ in self.parents])}"
        if not self.is_chosen:
            return made
        if is_undone:
            return f"{made}; its element is stored with it, so the p-value and the z-score use the order before that"
        return (
            f"{made}, and that the order of units was chosen. Therefore, the p-value and the z-score of the stored "
            "order say nothing about descent, and the verdict does not use them"
        )


@dataclass(frozen=True)
class Undo:
    """A function that undoes an alignment: it applies the inverse of an element to single tensors."""

    symmetry: Symmetry
    element: Element

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        """Return a tensor as it was before the element acted."""
        return move_tensor(self.symmetry, self.element, name, tensor) if name in self.symmetry.sites else tensor


@dataclass(frozen=True)
class Origins:
    """The origins of both networks in a comparison.

    Attributes:
        of: The origin of each network.
        undo: For each network, a function that undoes its alignment, if the element is known and the whole network is
            compared.
        parent: A sentence if the provenance of one network names the other as a parent; otherwise empty.
    """

    of: tuple[Origin, Origin]
    undo: tuple[Undo | None, Undo | None]
    parent: str = ""

    @classmethod
    def read(cls, a: Mapping[str, Tensor] | Checkpoint, b: Mapping[str, Tensor] | Checkpoint) -> "Origins":
        """Read the origins of two networks. The origin of a network in memory is empty."""
        first, second = Origin.of(a, "A"), Origin.of(b, "B")
        parent = ""
        for child, label, other in ((second, "A", a), (first, "B", b)):
            if not parent and child.knows(other):
                parent = f"{child.label} says that `regauge {escape(child.command)}` made it of {label}"
        return cls((first, second), (first.undo(a), second.undo(b)), parent)

    @property
    def cut(self) -> "Origins":
        """Return a copy in which no alignment is undone, for networks that are compared only in part."""
        return replace(self, undo=(None, None))

    @property
    def is_order_free(self) -> bool:
        """Whether nothing indicates that somebody chose the tested order of units."""
        return all(undo is not None or not one.is_chosen for one, undo in zip(self.of, self.undo, strict=True))

    @property
    def notes(self) -> tuple[str, ...]:
        """Return sentences that state how the order of units in each network arose."""
        told = (one.note(is_undone=undo is not None) for one, undo in zip(self.of, self.undo, strict=True))
        return tuple(note for note in told if note is not None)


def named_parents(checkpoints: Mapping[str, Checkpoint]) -> dict[str, tuple[str, ...]]:
    """Return, for each checkpoint, the names of other checkpoints that its provenance lists as parents."""
    origins = {name: Origin.of(one, name) for name, one in checkpoints.items()}
    told = {}
    for name, origin in origins.items():
        own = tuple(other for other, one in checkpoints.items() if other != name and origin.knows(one))
        if own:
            told[name] = own
    return told


def _word(document: Mapping[str, Any]) -> str:
    return str(document["command"]).removeprefix("rg.")


def _parents(document: Mapping[str, Any], command: str) -> Iterator[tuple[str, frozenset[str]]]:
    """Yield the networks from which an output was made, without networks that only served as a reference."""
    for one in document["inputs"]:
        is_reference = one["as"] in NO_PARENTS or (command == "align" and one["as"] == "a")
        of_weights = weight_suffixes(is_read=True)
        hashes = frozenset(digest for name, digest in one["sha256"].items() if name.endswith(of_weights))
        if hashes and not is_reference:
            yield str(one["path"]), hashes


def _element_beside(path: Path) -> Alignment | None:
    try:
        return load_alignment(alignment_path(path))
    except (OSError, ValueError, KeyError):  # The file is missing, or contains no alignment.
        return None

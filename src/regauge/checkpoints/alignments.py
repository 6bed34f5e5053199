"""The alignment of a checkpoint, stored in a file next to it: a group element, and the symmetry of this element.

An alignment is a safetensors file. The names of its tensors are `group/field` for the fields of `Value`,
`translation/family` and `rotation/group`. The header holds the symmetry as JSON. The element can be applied to another
checkpoint of the same architecture, or inverted.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from regauge.checkpoints.checkpoint import Checkpoint
from regauge.checkpoints.described import describe_kind
from regauge.checkpoints.location import ALIGNMENT
from regauge.checkpoints.writing import path_beside, save
from regauge.core.element import ROTATION, TRANSLATION, Element, Value
from regauge.core.given import describe
from regauge.core.symmetry import Symmetry

FORMAT = "regauge.alignment"
VERSION = "1"
ORTHOGONAL = 1e-6
"""The largest error of the product of a rotation matrix and its transpose."""


class Aligned(Protocol):
    """An object with an element and the element's symmetry: an `Alignment`, or the result of `regauge.align`."""

    @property
    def symmetry(self) -> Symmetry: ...

    @property
    def element(self) -> Element: ...


@dataclass(frozen=True)
class Alignment:
    """The element that aligned network B to network A, by `symmetry.act(element, params_b)`, and the symmetry."""

    symmetry: Symmetry
    element: Element

    def save(self: Aligned, path: str | Path, *, overwrite: bool = False) -> Path:
        """Write the element and its symmetry to a safetensors file, atomically. `regauge apply` can read this file.

        Args:
            path: The path of the file, which must end in `.safetensors`.
            overwrite: Whether an existing file of this name may be replaced.

        Raises:
            FileExistsError: The file exists, and `overwrite` is false.
            TypeError: The alignment has no element of the group.
            ValueError: The element is a batch of elements.
        """
        if not isinstance(getattr(self, "element", None), Element):
            raise TypeError(
                f"the alignment is {describe(self)}, but the result of `regauge.align` is expected, which has the "
                "element and its symmetry; give the result itself, not its parameters"
            )
        if self.element.batch:
            raise ValueError(
                f"the element is a batch of shape {self.element.batch}; store one alignment per file, "
                "`element.item(k)` picks one"
            )
        values = self.element.items()
        tensors = {f"{group}/{field}": tensor for group, value in values for field, tensor in value.items()}
        tensors |= {f"{TRANSLATION}/{name}": vector for name, vector in self.element.translation.items()}
        tensors |= {f"{ROTATION}/{name}": matrix for name, matrix in self.element.rotation.items()}
        header = {"kind": FORMAT, "version": VERSION, "symmetry": self.symmetry.to_json()}
        return save(tensors, path, overwrite=overwrite, metadata=header)


def alignment_path(checkpoint: str | Path) -> Path:
    """Return the path of a checkpoint's alignment: `b.alignment.safetensors` for `b.safetensors`, or a file in its
    folder.
    """
    path = Path(checkpoint)
    return path if path.name.endswith(ALIGNMENT) else path_beside(path, ALIGNMENT)


def load_alignment(path: str | Path) -> Alignment:
    """Read an alignment file written by `.save` or `regauge align`; apply it with `symmetry.act(element, params)`.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is damaged, is not an alignment, or has a newer version. The error is also raised if the
            element does not fit the symmetry.
    """
    path = Path(path)
    if not path.exists():
        if path.parent.is_file():
            raise ValueError(
                f"{str(path.parent)!r} is not an alignment; name the file that `regauge align` wrote next to its "
                f"output, which ends in {ALIGNMENT}, and then the checkpoint"
            )
        raise FileNotFoundError(f"there is no alignment {str(path)!r}; `regauge align` writes it next to its output")
    with Checkpoint.open(path) as checkpoint:
        header, tensors = checkpoint.header, checkpoint.params
    if header.get("kind") != FORMAT or "symmetry" not in header:
        raise ValueError(
            f"{str(path)!r} is not an alignment but {describe_kind(header)}; `regauge align` writes one next to its "
            f"output, named ...{ALIGNMENT}"
        )
    if header.get("version") != VERSION:
        raise ValueError(
            f"the alignment {str(path)!r} has version {header.get('version')}, but this regauge reads version "
            f"{VERSION}; upgrade regauge, or align again"
        )
    try:
        symmetry = Symmetry.from_json(header["symmetry"])
        with torch.device("meta"):  # A symmetry of a few bytes may have groups of a trillion units.
            blanks = dict(symmetry.identity())
    except ValueError as error:  # also for a symmetry without sizes
        raise ValueError(f"the alignment {str(path)!r} is damaged ({error}); align again") from error
    return Alignment(symmetry, _element(symmetry, blanks, tensors, path))


def _element(symmetry: Symmetry, blanks: Mapping[str, Value], tensors: dict[str, Tensor], path: Path) -> Element:
    values = {}
    for name, blank in blanks.items():
        found = {}
        for field, expected in blank.items():
            tensor = tensors.get(f"{name}/{field}")
            if tensor is None or tensor.shape != expected.shape or tensor.dtype != expected.dtype:
                raise ValueError(
                    f"the alignment {str(path)!r} does not fit its own symmetry: {field} of group {name!r} should "
                    f"have shape {tuple(expected.shape)} and {expected.dtype}; align again"
                )
            if field == "perm" and not bool((tensor.sort(-1).values == torch.arange(tensor.shape[-1])).all()):
                raise ValueError(
                    f"the alignment {str(path)!r} is damaged: the order of group {name!r} is not a permutation; align "
                    "again"
                )
            found[field] = tensor
        values[name] = Value(**found)
    translations = {family.name: family.shape for family in symmetry.translations}
    rotations = {group.name: (group.size,) * 2 for group in symmetry.groups if group.behind_gains != "none"}
    added = [
        _named(part, shapes, tensors, path) for part, shapes in ((TRANSLATION, translations), (ROTATION, rotations))
    ]
    for name, matrix in added[1].items():
        fixed = torch.full_like(matrix[0], float(symmetry[name].behind_gains == "centered"))
        gaps = matrix @ matrix.mT - torch.eye(len(matrix), dtype=matrix.dtype), matrix @ fixed - fixed
        if not all(bool(gap.abs().max() < ORTHOGONAL) for gap in gaps):
            raise ValueError(
                f"the alignment {str(path)!r} is damaged: the matrix of group {name!r} is not a rotation; align again"
            )
    return Element(values, (), *added)


def _named(
    part: str, shapes: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Tensor], path: Path
) -> dict[str, Tensor]:
    """Return the tensors of an optional field of an element, which files of earlier versions lack."""
    found = {name: tensors[f"{part}/{name}"] for name in shapes if f"{part}/{name}" in tensors}
    for name, tensor in found.items():
        if tensor.shape != shapes[name] or tensor.dtype != torch.float64:
            raise ValueError(
                f"the alignment {str(path)!r} does not fit its own symmetry: {part} {name!r} should have shape "
                f"{shapes[name]} and torch.float64; align again"
            )
    return found

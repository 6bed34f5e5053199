"""The conversion of new values for units and pairs of units back to tensors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, Num
from torch import Tensor

from regauge.core.params import Params
from regauge.core.symmetry import Symmetry
from regauge.weightspace.layout.blocks import Block, Label, find_ends
from regauge.weightspace.layout.cut import Piece


@dataclass(frozen=True, eq=False)
class WrittenValues:
    """A piece of a tensor to which new values `[models, *units, *matrices, values]` are written.

    Attributes:
        piece: The piece of the tensor.
        block: The block whose features determine the new values. The block has the axes of units, and the unit sets
            that index these axes.
        units: The axes of the piece that index sets of units.
        matrices: The axes of the piece on which contracted matrices act.
        fixed: The axes of the piece along which entries count as separate values of a unit.
        group: The axis on which matrices act, if matrices act on exactly one axis.
        bases: The indices of the unit axes within which the group of `group` is repeated.
    """

    piece: Piece
    block: Block
    units: tuple[int, ...]
    matrices: tuple[int, ...]
    fixed: tuple[int, ...]
    group: Label | None
    bases: tuple[int, ...]

    @property
    def values(self) -> int:
        """The number of values for each combination of units."""
        count = self.piece.channels
        for k in self.fixed:
            count *= self.piece.sizes[k]
        return count

    def read(self, params: Mapping[str, Tensor]) -> Num[Tensor, "models *shape"]:
        """Return the piece's values in a population, `[models, *units, *matrices, values]`."""
        found = self.piece.read(params[self.piece.parameter])
        order = (*self.units, *self.matrices, *self.fixed)
        found = found.permute(0, *(1 + k for k in order), found.ndim - 1)
        return found.flatten(1 + len(self.units) + len(self.matrices))

    def pool(self, values: Float[Tensor, "models *units size rank changes values"]) -> Tensor:
        """Average over all axes except those of the matrix and its bases: `[models, *bases, size, rank, changes]`."""
        away = tuple(1 + k for k in range(len(self.units)) if k not in self.bases)
        mean = values.mean((*away, values.ndim - 1))
        order = sorted(self.bases)
        return mean.permute(0, *(1 + order.index(k) for k in self.bases), *range(1 + len(order), mean.ndim))

    def unpool(self, pooled: Float[Tensor, "models *bases size rank changes"]) -> Tensor:
        """Restore the axes over which `pool` averaged, with length one: `[models, *units, size, rank, changes, 1]`."""
        order = sorted(range(len(self.bases)), key=lambda k: self.bases[k])
        rest = range(1 + len(order), pooled.ndim)
        moved = pooled.permute(0, *(1 + k for k in order), *rest)
        shape = [self.block.sizes[k] if k in self.bases else 1 for k in range(len(self.units))]
        return moved.reshape(len(pooled), *shape, *pooled.shape[1 + len(order) :], 1)


class Writer:
    """A writer that converts new values of parts of tensors (pieces) to whole tensors. Buffers are not written.

    Args:
        pieces: The pieces by name.
        symmetry: The symmetry of the networks.
        units: The names of the groups whose units form sets.
        contracted: Names of the groups of matrices whose axes were contracted.
        fixed: The names of the groups of matrices whose axes were not contracted.
    """

    def __init__(
        self, pieces: Mapping[str, Piece], symmetry: Symmetry, units: set[str], contracted: set[str], fixed: set[str]
    ) -> None:
        self.shapes = symmetry.shapes
        self.written: list[WrittenValues] = []
        self.places: dict[str, list[int]] = {}
        for name, piece in pieces.items():
            if piece.parameter not in symmetry.buffers:
                self.places.setdefault(piece.parameter, []).append(len(self.written))
                self.written.append(_written(name, piece, units, contracted, fixed))
        self.inverse: dict[str, Int[Tensor, " values"] | None] = {}
        for parameter, places in self.places.items():
            index = torch.cat([self.written[k].piece.flat_index().flatten() for k in places])
            is_in_order = bool((index.diff() == 1).all())
            self.inverse[parameter] = None if is_in_order else index.argsort()

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of the tensors that are written."""
        return tuple(self.places)

    def write(self, values: Sequence[Float[Tensor, "models *units_matrices changes values"]]) -> Params:
        """Return tensors `[models, changes, *shape]`, given new values of every part of a tensor (piece), in the order
        of `written`.
        """
        result: Params = {}
        for name, places in self.places.items():
            parts = [self._flat(self.written[k], values[k]) for k in places]
            flat = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
            inverse = self.inverse[name]
            if inverse is not None:
                flat = flat[..., inverse.to(flat.device)]
            result[name] = flat.reshape(*flat.shape[:2], *self.shapes[name])
        return result

    def _flat(self, written: WrittenValues, values: Tensor) -> Tensor:
        piece = written.piece
        values = values.movedim(-2, 1)
        fixed = tuple(piece.sizes[k] for k in written.fixed)
        values = values.reshape(*values.shape[:-1], *fixed, piece.channels)
        order = (*written.units, *written.matrices, *written.fixed)
        back = sorted(range(len(order)), key=lambda k: order[k])
        return values.permute(0, 1, *(2 + k for k in back), values.ndim - 1).flatten(2)


def _written(name: str, piece: Piece, sets: set[str], contracted: set[str], folded: set[str]) -> WrittenValues:
    groups = [label.group for label in piece.labels]
    matrices = tuple(k for k, group in enumerate(groups) if group in contracted)
    fixed = tuple(k for k, group in enumerate(groups) if group in folded)
    units = tuple(k for k, group in enumerate(groups) if group in sets)
    bases = tuple(tuple(units.index(base) for base in piece.bases[k]) for k in units)
    ends = find_ends(tuple(groups[k] for k in units), bases)
    sizes = tuple(piece.sizes[k] for k in units)
    labels = tuple(piece.labels[k] for k in units)
    whole = "" if matrices else _folded_name(name, fixed)
    block = Block(whole, (piece.parameter,), labels, sizes, 0, ends)
    alone = piece.labels[matrices[0]] if len(matrices) == 1 else None
    own = tuple(units.index(base) for base in piece.bases[matrices[0]]) if alone is not None else ()
    return WrittenValues(piece, block, units, matrices, fixed, alone, own)


def _folded_name(name: str, fixed: tuple[int, ...]) -> str:
    """Return the name that `elimination.fold` gives to a block whose axes it merged with the channels."""
    return "fold(" * len(fixed) + name + ")" * len(fixed)

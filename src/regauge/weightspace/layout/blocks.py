"""The parts of a layout: sets of units, and blocks of values over one or more of them."""

from dataclasses import dataclass

from regauge.core.groups import Group


@dataclass(frozen=True)
class UnitSet:
    """The units of one group, in every copy of it.

    Attributes:
        name: The name of the group.
        axes: Names of the groups that contain copies of this group, then the name of this group.
        sizes: Number of units along each of them.
        is_permuted: Whether its units are permuted; units of other sets are identified by their positions.
    """

    name: str
    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    is_permuted: bool


@dataclass(frozen=True)
class Label:
    """One axis of a block: the units of a group, and what the group's families multiply the block by.

    Attributes:
        group: Name of the group.
        scale: Exponent of each family of positive scales.
        sign: Exponent (0 or 1) of each family of signs.
        parity: Exponent (0 or 1) of the sign of odd half periods, for each family of shifts.
        shift: The amount that one half period adds to the values, for each family of shifts.
        is_inverse: For groups of matrices: whether the axis carries the inverse transpose.
        reads: The number of factors of a unit in the values: one where a parameter sums over the units.
    """

    group: str
    scale: tuple[int, ...] = ()
    sign: tuple[int, ...] = ()
    parity: tuple[int, ...] = ()
    shift: tuple[float, ...] = ()
    is_inverse: bool = False
    reads: int = 0


@dataclass(frozen=True)
class End:
    """A set of units that a block is connected to, and the block's axes that index these units.

    Attributes:
        units: Name of the set.
        axes: Indices of the block's axes, in the order of the set's axes; the model axis is not counted.
    """

    units: str
    axes: tuple[int, ...]


@dataclass(frozen=True)
class Block:
    """Values of a network over the units of some sets: `[models, *labels, channels]`.

    Blocks with one end give features of units (biases, gains, layers next to the input or output). Blocks with two ends
    give features of pairs of units (weights between hidden layers). Blocks without ends give features of the network.

    Attributes:
        name: Unique within a layout.
        parameters: Names of the tensors of the block: one, or two for each product over a group of matrices.
        labels: The axes of the block.
        sizes: Length of each axis.
        channels: Number of values that no group moves: input pixels, classes, positions of kernels.
        ends: The sets that it is connected to.
    """

    name: str
    parameters: tuple[str, ...]
    labels: tuple[Label, ...]
    sizes: tuple[int, ...]
    channels: int
    ends: tuple[End, ...]


@dataclass(frozen=True)
class Grid:
    """The axes of values or of vectors.

    Attributes:
        groups: Names of the groups that their units belong to.
        bases: For each axis the axes that contain it, outermost first.
        sizes: Length of each axis.
    """

    groups: tuple[str, ...]
    bases: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]

    def keep(self, axes: tuple[int, ...]) -> "Grid":
        """Return some of the axes, with all that they are repeated within."""
        bases = (tuple(axes.index(base) for base in self.bases[k]) for k in axes)
        return Grid(tuple(self.groups[k] for k in axes), tuple(bases), tuple(self.sizes[k] for k in axes))


def find_ends(labels: tuple[str, ...], bases: tuple[tuple[int, ...], ...]) -> tuple[End, ...]:
    """Return the ends of a block: its labels that are no base of another one, each with its bases before it."""
    inner = {base for own in bases for base in own}
    return tuple(End(group, (*bases[k], k)) for k, group in enumerate(labels) if k not in inner)


def unit_sets(groups: tuple[Group, ...]) -> dict[str, UnitSet]:
    """Return the sets of units of groups that act by no matrices."""
    sizes = {group.name: group.size for group in groups}
    return {
        group.name: UnitSet(
            group.name,
            (*group.within, group.name),
            tuple(sizes[name] for name in (*group.within, group.name)),
            group.is_permuted,
        )
        for group in groups
        if group.matrix == "none"
    }

"""The components of a layout: sets of units, and blocks of values that these units index."""

from dataclasses import dataclass

from regauge.core.groups import Group


@dataclass(frozen=True)
class UnitSet:
    """All units of one group. If the group is repeated within another group, the set contains the units of every copy.

    Attributes:
        name: The name of the group.
        axes: The names of the groups that contain copies of this group, then the name of this group.
        sizes: The number of units along each axis.
        is_permuted: Whether the units are permuted. Units that are not permuted are identified by their positions.
    """

    name: str
    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    is_permuted: bool


@dataclass(frozen=True)
class Label:
    """One axis of a block: the units of a group, and the exponents with which the group's factors multiply the block.

    Attributes:
        group: The name of the group.
        scale: The exponent of each family of positive scales.
        sign: The exponent (0 or 1) of each family of signs.
        parity: For each family of shifts, one if an odd number of half periods changes the sign of the values, and
            otherwise zero.
        shift: For each family of shifts, the amount that one half period adds to the values.
        is_inverse: For groups of matrices, whether the inverse transpose acts on the axis.
        reads: For values of one parameter: one if a layer sums over the group's units along this axis of the parameter,
            and otherwise zero. For a product of two parameters, the sum of the numbers of the two parameters.
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
    """One end of a block: a unit set, and the axes of the block that index the units of this set.

    Attributes:
        units: The name of the set.
        axes: The block's axes, in the order of the unit set's axes, counted without the model axis.
    """

    units: str
    axes: tuple[int, ...]


@dataclass(frozen=True)
class Block:
    """Values of networks that are indexed by the units of some sets: `[models, *labels, channels]`.

    The unit sets that index a block are called its ends. A block with one end gives features of units (biases, gains,
    layers next to the input or output). A block with two ends gives features of pairs of units (weights between hidden
    layers). A block without ends gives features of the network.

    Attributes:
        name: The name, which is unique within a layout.
        parameters: Names of the tensors in the block. There is one name, or two for a product over a group of matrices.
        labels: The axes of the block.
        sizes: The length of each axis.
        channels: The number of values that no group permutes: input pixels, classes, kernel positions.
        ends: The unit sets whose units index the values, each with its axes of the block.
    """

    name: str
    parameters: tuple[str, ...]
    labels: tuple[Label, ...]
    sizes: tuple[int, ...]
    channels: int
    ends: tuple[End, ...]


@dataclass(frozen=True)
class Grid:
    """The axes of a block of values or of feature vectors.

    Attributes:
        groups: Names of the groups to which the axes' units belong.
        bases: For each axis, the axes that contain it, outermost first.
        sizes: The length of each axis.
    """

    groups: tuple[str, ...]
    bases: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]

    def keep(self, axes: tuple[int, ...]) -> "Grid":
        """Return a grid with only some of the axes, and with the axes that contain these axes."""
        bases = (tuple(axes.index(base) for base in self.bases[k]) for k in axes)
        return Grid(tuple(self.groups[k] for k in axes), tuple(bases), tuple(self.sizes[k] for k in axes))


def find_ends(labels: tuple[str, ...], bases: tuple[tuple[int, ...], ...]) -> tuple[End, ...]:
    """Return the ends of a block: each axis that contains no other axis, preceded by the axes that contain it."""
    inner = {base for own in bases for base in own}
    return tuple(End(group, (*bases[k], k)) for k, group in enumerate(labels) if k not in inner)


def unit_sets(groups: tuple[Group, ...]) -> dict[str, UnitSet]:
    """Return the unit sets of all groups that do not act by matrices."""
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

"""The features that a metanetwork computes in every layer: vectors of units, of pairs of units, and of networks."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from jaxtyping import Float
from torch import Tensor

from regauge.weightspace.layout.blocks import Block, End
from regauge.weightspace.layout.characters import Character
from regauge.weightspace.layout.compile import Layout
from regauge.weightspace.shares import Shares, average


@dataclass(frozen=True)
class Odd:
    """Features whose signs change if the symmetry changes signs of weights.

    A `Character` contains, for each axis and each family of signs, the exponent of the sign that multiplies a vector.

    Attributes:
        units: For each set of units and each character (exponents of signs) of their values: vectors `[models, *sizes,
            width]`.
        pairs: Vectors of each block of values between units that signs change, `[models, *labels, width]`.
        values: The original values of each block of `pairs`, `[models, *labels, channels]`, and their root mean square,
            if layers multiply features by the values. Layers do not change `values`.
        given: The part of `units` that comes from values of single units, without sines and cosines of angles. Layers
            do not change `given`.
        waves: The sine and cosine of each unit's angle, for each unit set with angles (such as phases of sine units):
            `[models, *sizes, 1]`.
    """

    units: dict[str, dict[Character, Float[Tensor, "models *sizes width"]]] = field(default_factory=dict)
    pairs: dict[str, Float[Tensor, "models *labels width"]] = field(default_factory=dict)
    values: dict[str, tuple[Float[Tensor, "models *labels channels"], Tensor]] = field(default_factory=dict)
    given: dict[str, dict[Character, Float[Tensor, "models *sizes width"]]] = field(default_factory=dict)
    waves: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)


@dataclass(frozen=True)
class Features:
    """Vectors of units, pairs and the network, all of the same width.

    Attributes:
        units: For each set of units, their vectors `[models, *sizes, width]`.
        pairs: For each block of values between units, vectors `[models, *labels, width]`.
        network: The vector of each network, `[models, width]`.
        values: For each block of `pairs`, some functions of its values, `[models, *labels, functions]`, if layers
            multiply features by these functions. Layers do not change `values`.
        odd: The features that signs change, or None if signs are canonicalized. All features outside of `odd` are
            invariant to signs.
        shares: The weights of units in means, called shares; see `weightspace.shares`. Units of groups without shares
            have equal weights.
    """

    units: dict[str, Float[Tensor, "models *sizes width"]]
    pairs: dict[str, Float[Tensor, "models *labels width"]]
    network: Float[Tensor, "models width"]
    values: dict[str, Float[Tensor, "models *labels functions"]]
    odd: Odd = field(default_factory=Odd)
    shares: Shares = field(default_factory=dict)

    def change(
        self, units: dict[str, Tensor], pairs: dict[str, Tensor], network: Tensor, odd: Odd | None = None
    ) -> "Features":
        """Return features with new vectors for the same networks."""
        return replace(self, units=units, pairs=pairs, network=network, odd=self.odd if odd is None else odd)


@dataclass(frozen=True)
class Read:
    """The input of a head, which computes outputs from the features of the last layer.

    Attributes:
        features: The features of the last layer.
        layout: The layout of the networks.
        number: The index of the layout, among the layouts for which the net has separate parameters.
        params: The canonical networks.
        sizes: The root mean square of each tensor over the networks on which the net was standardized.
    """

    features: Features
    layout: Layout
    number: int
    params: Mapping[str, Tensor]
    sizes: Mapping[str, float]


def turn(
    wave: tuple[Float[Tensor, "models *sizes 1"], Float[Tensor, "models *sizes 1"]],
    by: Float[Tensor, "models *sizes width"],
) -> tuple[Float[Tensor, "models *sizes width"], Float[Tensor, "models *sizes width"]]:
    """Return the sine and cosine of the sum of two angles, given the sine and cosine of each angle."""
    (sine, cosine), along, across = wave, by.cos(), by.sin()
    return sine * along + cosine * across, cosine * along - sine * across


def spread(units: Float[Tensor, "models *sizes width"], end: End, block: Block) -> Float[Tensor, "models *ones width"]:
    """Return vectors of units, arranged at the axes of a block. Axes of the block for other units have length one."""
    order = sorted(range(len(end.axes)), key=lambda k: end.axes[k])
    shape = [1] * len(block.sizes)
    for axis in end.axes:
        shape[axis] = block.sizes[axis]
    if order != list(range(len(order))):
        units = units.permute(0, *(1 + k for k in order), units.ndim - 1)
    return units.reshape(len(units), *shape, units.shape[-1])


def others(end: End, block: Block) -> tuple[int, ...]:
    """Return the axes of a block, counted with the model axis, except those that index one given unit set."""
    return tuple(1 + axis for axis in range(len(block.sizes)) if axis not in end.axes)


def order_as(units: Float[Tensor, "models *sizes width"], end: End) -> Float[Tensor, "models *sizes width"]:
    """Permute the axes of vectors: the axes of a unit set can have different orders in blocks and in the set itself."""
    order = sorted(end.axes)
    place = [order.index(axis) for axis in end.axes]
    if place == list(range(len(place))):
        return units
    return units.permute(0, *(1 + k for k in place), units.ndim - 1)


def at_units(
    network: Float[Tensor, "models width"], units: Float[Tensor, "models *sizes _"]
) -> Float[Tensor, "models *ones width"]:
    """Return one vector for each network, reshaped to broadcast over units."""
    return network.reshape(len(network), *([1] * (units.ndim - 2)), -1)


def from_nested(
    name: str, units: Mapping[str, Tensor], layout: Layout, shares: Shares
) -> Iterator[tuple[bool, Tensor]]:
    """Yield vectors for the units of one set, if units are nested: vectors of the units that contain the set's units,
    and means over the units inside the set's units.

    Yields:
        Whether the vectors belong to containing units, and the vectors, which broadcast over the units of the set.
    """
    own = layout.units[name].axes
    for other, x in units.items():
        axes = layout.units[other].axes
        if other == name:
            continue
        if other in own:
            shape = [1] * len(own)
            for axis, size in zip(axes, layout.units[other].sizes, strict=True):
                shape[own.index(axis)] = size
            yield True, x.reshape(len(x), *shape, -1)
        elif name in axes:
            inner = (1 + k for k, axis in enumerate(axes) if axis not in own)
            yield False, average(x, inner, layout.grids[other], shares)

"""The encoder from weights to features: entries are standardized, encoded, and mapped linearly, for each tensor."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from regauge.weightspace.features import Features, Odd, turn
from regauge.weightspace.layers.dense import Dense
from regauge.weightspace.layout.blocks import Block
from regauge.weightspace.layout.characters import at_end, has_scale, has_sign
from regauge.weightspace.layout.compile import Layout
from regauge.weightspace.shares import Shares

CONSTANT_VALUES = 1e-5
"""Values count as constant if their standard deviation is below this fraction of their size."""

MOMENTS = 6
"""The number of statistics that describe the values of a block; see `_moments`."""
SMALLEST = 1e-12
"""A lower bound on the size of values when moments are computed."""


@dataclass(frozen=True)
class Scalars:
    """The trivial encoding, which does not change standardized values."""

    is_centered: ClassVar[bool] = True

    def encode(self, values: Tensor, frequencies: Tensor | None) -> Tensor:
        """Return the values `[..., channels]` unchanged."""
        return values

    def count(self) -> int:
        """Return the number of features into which each value is encoded."""
        return 1


@dataclass(frozen=True)
class Fourier:
    """An encoding of each value by sines and cosines of random multiples of the value, which makes close values
    distinct.

    Attributes:
        frequencies: The number of random multiples of each value.
        scale: The standard deviation of the random factors, in radians per standard deviation of the values.

    References:
        Zhou et al. (2023), section 4; Kofinas et al. (2024), appendix.
    """

    frequencies: int = 8
    scale: float = 3.0

    is_centered: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.frequencies < 1 or not self.scale > 0:
            raise ValueError(f"frequencies={self.frequencies} and scale={self.scale} must be positive")

    def encode(self, values: Tensor, frequencies: Tensor | None) -> Tensor:
        """Encode `[..., channels]` as `[..., channels * count]`."""
        assert frequencies is not None
        phases = values.unsqueeze(-1) * frequencies
        return torch.cat([values.unsqueeze(-1), phases.sin(), phases.cos()], -1).flatten(-2)

    def count(self) -> int:
        """Return the number of features into which each value is encoded."""
        return 1 + 2 * self.frequencies


@dataclass(frozen=True)
class Logarithms:
    """An encoding of each value v by `sign(v) log(1 + f |v|) / log(1 + f)`, for f = 1 and f = `factor`.

    Logarithms suit values of very different sizes. Values differ by orders of magnitude if networks were trained with
    different hyperparameters. In canonical networks, values differ by even larger factors, because the canonical form
    moves the scales of all tensors into one tensor. Values are not centered. Values are divided by the median over
    networks of their root mean squares.

    Attributes:
        factor: The second factor f by which values are multiplied. A large factor makes small values distinct.
    """

    factor: float = 30.0

    is_centered: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 0 < self.factor < math.inf:
            raise ValueError(f"factor={self.factor} must be positive")

    def encode(self, values: Tensor, frequencies: Tensor | None) -> Tensor:
        """Encode `[..., channels]` as `[..., channels * count]`."""
        sizes, signs = values.abs(), values.sign()
        found = [(factor * sizes).log1p() * signs / math.log1p(factor) for factor in (1.0, self.factor)]
        return torch.stack(found, -1).flatten(-2)

    def count(self) -> int:
        """Return the number of features into which each value is encoded."""
        return 2


Values = Scalars | Fourier | Logarithms

VALUES: dict[str, type[Values]] = {"scalars": Scalars, "fourier": Fourier, "logarithms": Logarithms}
"""Classes of value encodings by their names on the command line."""


class Encoder(nn.Module):
    """The map from weights to features, with separate parameters for every block (the values of one tensor, or of a
    part of it).

    Values are standardized by one mean and one deviation for each block, which `standardize` sets. Axes that no group
    permutes (pixels, classes, kernel positions) become input channels, so the encoder distinguishes their positions.
    Every unit with a fixed position gets a learned vector. Weights from a unit to itself get a separate learned vector.
    If signs still act on values, the encoder reads these values in two ways. Features that no sign changes are computed
    from absolute values. Features that signs change are computed from the signed values, by linear maps without biases.
    If positive scales act on values, the encoder also computes both invariant features and features that change with
    the values. If half-period shifts still act on a bias, the bias is read as an angle. The features of the bias are
    then the sine and cosine of a sum: the angle plus a linear map of the values that are added to the bias. The
    coefficients of the linear map of added values are initially at most one radian for each value, times the frequency.
    One value that is added to the angle is a learned multiple of the sine of twice the angle.

    Args:
        has_pairs: Whether blocks with values between two or more units get feature vectors.
        channels: The number of additional functions of each value between units.
        multiplied: Names of the blocks whose values signs change, and by which layers multiply features.
        reads_moments: Whether the moments of all blocks also enter the initial vectors of networks.
    """

    mean: Tensor
    std: Tensor
    frequencies: Tensor | None

    def __init__(
        self,
        layout: Layout,
        width: int,
        values: Values,
        *,
        has_pairs: bool,
        channels: int,
        multiplied: Collection[str] = (),
        reads_moments: bool = False,
        generator: torch.Generator | None,
    ) -> None:
        super().__init__()
        self.values, self.has_pairs = values, has_pairs
        count = len(layout.blocks)
        self.register_buffer("mean", torch.zeros(count))
        self.register_buffer("std", torch.ones(count))
        drawn = None
        if isinstance(values, Fourier):
            drawn = values.scale * torch.randn(values.frequencies, generator=generator)
        self.register_buffer("frequencies", drawn)
        self.maps, self.functions, self.odd_maps = nn.ModuleDict(), nn.ModuleDict(), nn.ModuleDict()
        self.odd_functions = nn.ModuleDict()
        self.odd = [block.name in layout.signs for block in layout.blocks]
        self.is_signed = [has_sign(layout.signs.get(block.name, ())) for block in layout.blocks]
        self.is_scaled = [has_scale(layout.signs.get(block.name, ())) for block in layout.blocks]
        if any(self.is_scaled):
            self.register_buffer("sizes", torch.ones(count))
        self.frequencies_of = {k: _frequency(block, layout) for k, block in enumerate(layout.blocks)}
        for k, block in enumerate(layout.blocks):
            if len(block.ends) > 1 and channels:
                self.functions[f"{k}"] = Dense(block.channels * values.count(), channels, generator=generator)
            if block.name in multiplied:
                self.odd_functions[f"{k}"] = _one_function(block.channels, generator)
            if has_pairs or len(block.ends) < 2:
                self._add_maps(k, block, layout, width, generator)
        self._add_vectors(layout, width, generator)
        # Half periods change values that add to an angle. The sines and cosines of such angles form separate blocks.
        self.moments = nn.ModuleDict(
            {
                f"{k}": Dense(MOMENTS, width, gain=1 / math.sqrt(count), generator=generator)
                for k in range(count if reads_moments else 0)
                if self.frequencies_of[k] is None
            }
        )

    def _add_maps(self, k: int, block: Block, layout: Layout, width: int, generator: torch.Generator | None) -> None:
        """Create the linear maps from the weights in a block to feature vectors."""
        is_pair = len(block.ends) > 1
        gain = 1.0 if is_pair else 1 / math.sqrt(_count_sharing(block, layout))
        waves = {name for wave in (layout.waves or {}).values() for name in (wave.sine, wave.cosine)}
        if block.name in layout.signs and block.name not in waves:
            odd = Dense(block.channels, width, is_biased=False, gain=gain, generator=generator)
            if self.frequencies_of[k] is not None:  # the largest frequency, in radians per unit of an input
                nn.init.uniform_(odd.weight, -1.0, 1.0, generator=generator)
            self.odd_maps[f"{k}"] = odd
        dense = Dense(block.channels * self.values.count(), width, gain=gain, generator=generator)
        if is_pair and dense.bias is not None:
            nn.init.normal_(dense.bias, generator=generator)
        self.maps[f"{k}"] = dense

    def _add_vectors(self, layout: Layout, width: int, generator: torch.Generator | None) -> None:
        """Create the learned vectors of unit sets, positions, weights from a unit to itself, and networks."""
        self.kinds = nn.ParameterDict({f"{k}": _vector(width, generator) for k in range(len(layout.units))})
        self.positions = nn.ParameterDict(
            {
                f"{k}": nn.Parameter(torch.randn(units.sizes[-1], width, generator=generator))
                for k, units in enumerate(layout.units.values())
                if not units.is_permuted
            }
        )
        self.diagonals = nn.ParameterDict(
            {
                f"{k}": _vector(width, generator)
                for k, block in enumerate(layout.blocks)
                if self.has_pairs and not layout.is_weighed and _is_square(block)
            }
        )
        self.doubles = nn.ModuleDict(
            {
                f"{k}": Dense(1, width, is_biased=False, generator=generator)
                for k, name in enumerate(layout.units)
                if name in (layout.waves or {})
            }
        )
        self.network = _vector(width, generator)

    @torch.no_grad()
    def standardize(self, values: Mapping[str, Tensor], layout: Layout) -> None:
        """Set the mean and deviation by which the values of each block are standardized. The statistics are computed
        over networks and positions.
        """
        for k, block in enumerate(layout.blocks):
            found = self._even(k, values[block.name].double())
            if not found.numel():
                continue
            if self.is_scaled[k]:
                self.get_buffer("sizes")[k] = float(values[block.name].double().square().mean().sqrt()) or 1.0
            mean, spread = float(found.mean()), float(found.std(unbiased=False))
            if not self.values.is_centered:
                sizes = found.flatten(1).square().mean(1).sqrt()
                mean, spread = 0.0, float(sizes.median()) or float(sizes.max())
            is_constant = spread <= CONSTANT_VALUES * (abs(mean) + spread)
            self.mean[k] = 0.0 if is_constant else mean
            self.std[k] = (abs(mean) or 1.0) if is_constant else spread

    def forward(self, values: Mapping[str, Tensor], layout: Layout, shares: Shares | None = None) -> Features:
        dtype, models = self.mean.dtype, len(next(iter(values.values())))
        units = {}
        for k, (name, known) in enumerate(layout.units.items()):
            x = self.kinds[f"{k}"].expand(models, *known.sizes, -1)
            units[name] = x + self.positions[f"{k}"] if f"{k}" in self.positions else x
        zeros = {name: dict.fromkeys(found, units[name] * 0) for name, found in layout.unit_signs.items()}
        odd = Odd(zeros, given={name: {} for name in zeros})
        pairs, functions = {}, {}
        network = self.network.expand(models, -1)
        for k, block in enumerate(layout.blocks):
            found = values[block.name].to(dtype)
            if self.odd[k]:
                size = (self.mean[k].square() + self.std[k].square()).sqrt()
                if self.is_scaled[k]:
                    size = self.get_buffer("sizes")[k]
                frequency = self.frequencies_of[k]
                if f"{k}" in self.odd_maps:
                    scaled = found / size if frequency is None else found * frequency
                    self._add_odd(odd, block, layout, self.odd_maps[f"{k}"](scaled))
                if f"{k}" in self.odd_functions:
                    odd.values[block.name] = self.odd_functions[f"{k}"](found), size
            found = self._even(k, found)
            standard = (found - self.mean[k]) / self.std[k]
            if f"{k}" in self.moments and found.numel():
                network = network + self.moments[f"{k}"](_moments(standard))
            encoded = self.values.encode(standard, self.frequencies)
            if f"{k}" in self.functions:
                functions[block.name] = self.functions[f"{k}"](encoded)
            if f"{k}" not in self.maps:
                continue
            x = self.maps[f"{k}"](encoded)
            if not block.ends:
                network = network + x
            elif len(block.ends) > 1:
                if f"{k}" in self.diagonals:
                    x = x + _diagonal(block).to(x).unsqueeze(-1) * self.diagonals[f"{k}"]
                pairs[block.name] = x
            else:
                (end,) = block.ends
                units[end.units] = units[end.units] + x.permute(0, *(1 + axis for axis in end.axes), x.ndim - 1)
        for name, wave in (layout.waves or {}).items():
            sine, cosine = (values[block].to(dtype) for block in (wave.sine, wave.cosine))
            odd.waves[name] = sine, cosine
            turned = turn(odd.waves[name], odd.units[name][wave.addend])
            odd.units[name].update(zip(layout.wave_signs(name), turned, strict=True))
            added = self.doubles[f"{list(layout.units).index(name)}"](2 * sine * cosine)
            odd.units[name][wave.addend] = odd.units[name][wave.addend] + added
        return Features(
            units, pairs, network, functions, odd, {name: x.to(dtype) for name, x in (shares or {}).items()}
        )

    def _even(self, k: int, found: Tensor) -> Tensor:
        """Return functions of a block's values that signs and scales do not change, such as absolute values."""
        if self.is_scaled[k]:
            norm = torch.linalg.vector_norm(found, dim=-1, keepdim=True).clamp_min(torch.finfo(found.dtype).tiny)
            found = found / norm * math.sqrt(found.shape[-1])
        return found.abs() if self.is_signed[k] else found

    def _add_odd(self, odd: Odd, block: Block, layout: Layout, x: Tensor) -> None:
        if len(block.ends) > 1:
            odd.pairs[block.name] = x
            return
        (end,) = block.ends
        known = odd.units[end.units]
        own, given = at_end(layout.signs[block.name], end), odd.given[end.units]
        x = x.permute(0, *(1 + axis for axis in end.axes), x.ndim - 1)
        known[own] = known[own] + x
        given[own] = given[own] + x if own in given else x


def _frequency(block: Block, layout: Layout) -> float | None:
    """Return the factor that converts a block's values to radians, if the values are added to angles of units."""
    if len(block.ends) != 1 or block.name not in layout.signs:
        return None
    (end,) = block.ends
    wave = (layout.waves or {}).get(end.units)
    is_addend = wave is not None and at_end(layout.signs[block.name], end) == wave.addend
    return wave.frequency if wave is not None and is_addend else None


def _count_sharing(block: Block, layout: Layout) -> int:
    """Return the number of blocks of weights whose vectors are summed to the vector of one unit, or of the network."""
    if not block.ends:
        return len(layout.network_blocks)
    return sum(any(end.units == block.ends[0].units for end in one.ends) for one in layout.unit_blocks)


def _one_function(channels: int, generator: torch.Generator | None) -> Dense:
    """Return a linear map from the values of a pair of units to one number. If there is a single value, the map is
    initialized as the identity.
    """
    dense = Dense(channels, 1, is_biased=False, generator=generator)
    if channels == 1:
        nn.init.ones_(dense.weight)
    return dense


def _moments(values: Tensor) -> Tensor:
    """Return permutation-invariant statistics of each network's values, `[models, MOMENTS]`.

    The first statistic is the logarithm of the root mean square. Next, the values are divided by the root mean square.
    Five statistics of the divided values follow: mean, mean absolute value, largest value, smallest value, and log mean
    fourth power.
    """
    flat = values.flatten(1)
    largest = flat.abs().amax(1).clamp_min(SMALLEST)  # whose square may be too large for the precision
    unit = flat / largest.unsqueeze(1)
    share = unit.square().mean(1).sqrt().clamp_min(SMALLEST)
    size, unit = largest * share, unit / share.unsqueeze(1)
    fourth = unit.square().square().mean(1).clamp_min(SMALLEST)
    found = (size.log(), unit.mean(1), unit.abs().mean(1), unit.amax(1), unit.amin(1), fourth.log())
    return torch.stack(found, 1)


def _is_square(block: Block) -> bool:
    return len(block.ends) == 2 and block.ends[0].units == block.ends[1].units


def _diagonal(block: Block) -> Tensor:
    """Return a mask `[*labels]` that is one for weights from a unit to itself, and zero elsewhere."""
    first, second = block.ends
    same = torch.ones((), dtype=torch.bool)
    for one, other in zip(first.axes, second.axes, strict=True):
        if one != other:
            rows = torch.arange(block.sizes[one]).reshape([-1 if k == one else 1 for k in range(len(block.sizes))])
            columns = torch.arange(block.sizes[other]).reshape(
                [-1 if k == other else 1 for k in range(len(block.sizes))]
            )
            same = same & (rows == columns)
    return same


def _vector(width: int, generator: torch.Generator | None) -> nn.Parameter:
    return nn.Parameter(torch.randn(width, generator=generator))

"""Random elements of one symmetry that move small networks: compiled once, drawn and applied in a few operations."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regauge.core.act import LONG_ROW, Site, broadcastable
from regauge.core.groups import Group
from regauge.core.movable import VALUES
from regauge.core.params import Params
from regauge.core.symmetry import Symmetry

Factors = tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""A group, and the exponents of its scales, its signs, and the signs of its odd half periods."""
Steps = tuple[str, int]
"""A group, and by how much the place of a value changes from one unit to the next."""
Shifts = tuple[str, tuple[float, ...]]
"""A group, and what its half periods add."""


EXACT = torch.float32
"""In which displacements are added up, several times as fast as integers; it holds those up to `MOST`."""
MOST = 1 << 24
"""Whole numbers up to this are exact in single precision."""
Layers = tuple[Int[Tensor, " N"], ...]
"""For each of N values of a network one column of a table; the first column changes nothing."""


@dataclass(frozen=True, eq=False)
class _Bucket:
    """Tensors that are moved together, laid end to end, and the columns of the tables that move them.

    `run` consecutive values are moved as one: nothing acts on the axes behind the last one that a group acts on.
    """

    names: tuple[str, ...]
    run: int
    moves: Layers
    factors: Layers
    shifts: Layers


@dataclass(frozen=True, eq=False)
class RandomMoves:
    """Random elements without matrices, as `symmetry.random` draws them, for each network of a population.

    What follows from the symmetry is found once. A batch then takes one draw for each part and one sort for all
    permutations; every value finds its source by adding up a displacement for each group that moves it.

    Attributes:
        symmetry: With every size known.
        parts: Some of "permutation", "sign", "scale" and "shift".
    """

    symmetry: Symmetry
    parts: tuple[str, ...]
    _known: dict[tuple[str, ...], tuple[_Bucket, ...]] = field(default_factory=dict, repr=False)
    _segments: dict[str, slice] = field(default_factory=dict, repr=False)
    _copies: list[int] = field(default_factory=list, repr=False)
    _moves: dict[Steps, int] = field(default_factory=dict, repr=False)
    _factors: dict[Factors, int] = field(default_factory=dict, repr=False)
    _shifts: dict[Shifts, int] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        ends = {"moves": 1, "factors": 1, "shifts": 1}

        def place(table: str, known: dict[Any, int], key: Any, count: int) -> None:
            if key is not None and key not in known:
                known[key] = ends[table]
                ends[table] += count

        for group in self.symmetry.groups:
            count = self._count(group)
            if group.is_permuted and "permutation" in self.parts:
                start = sum(self._copies)
                self._segments[group.name] = slice(start, start + count)
                self._copies.extend([group.size] * (count // group.size))
            for one in group.placements:
                place("factors", self._factors, self._factor(group, one.scale, one.sign, one.parity), count)
                has_shift = "shift" in self.parts and any(one.shift)
                place("shifts", self._shifts, (group.name, one.shift) if has_shift else None, count)
        for name, sites in self.symmetry.sites.items():
            for site in sites:
                key = self._step(site, self._trim(name)) if site.group.name in self._segments else None
                place("moves", self._moves, key, self._count(site.group))

    def __call__(self, params: Mapping[str, Tensor], generator: torch.Generator) -> Params:
        """The networks, each moved by an element of its own.

        Args:
            params: With one leading model axis.
            generator: Source of the elements.

        Raises:
            ValueError: The networks have too many values.
        """
        models = len(next(iter(params.values())))
        displacements = self._draw_permutations(models, generator)
        scales, signs, shifts = self._draw_families(models, generator)
        factors, additions = self._factor_table(models, scales, signs, shifts), self._shift_table(models, shifts)
        by_kind: dict[tuple[torch.dtype, torch.device], list[str]] = {}
        for name in self.symmetry.sites:
            if name in params:
                by_kind.setdefault((params[name].dtype, params[name].device), []).append(name)
        moved = dict(params)
        for (dtype, device), names in by_kind.items():
            work = torch.float32 if dtype.itemsize == 2 else dtype
            multiply, add = (table.to(device=device, dtype=work) for table in (factors, additions))
            for bucket in self._compile(tuple(names)):
                pieces = [params[name].reshape(models, -1, bucket.run) for name in bucket.names]
                x = pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)
                x = _gather(x, _total(displacements, bucket.moves), device) if bucket.moves else x.clone()
                if dtype in VALUES and (bucket.factors or bucket.shifts):
                    x = x.to(work)
                    for columns in bucket.factors:
                        x *= multiply.index_select(1, columns.to(device)).unsqueeze(-1)
                    for columns in bucket.shifts:
                        x += add.index_select(1, columns.to(device)).unsqueeze(-1)
                    x = x.to(dtype)
                start = 0
                for name, piece in zip(bucket.names, pieces, strict=True):
                    moved[name] = x[:, start : start + piece.shape[1]].view(params[name].shape)
                    start += piece.shape[1]
        return moved

    def _trim(self, name: str) -> tuple[int, ...]:
        """The shape of a parameter, counted in rows where these are long enough to be moved as one."""
        shape = self.symmetry.shapes[name]
        last = 1 + max(site.placement.axis for site in self.symmetry.sites[name])
        return shape[:last] if math.prod(shape[last:]) >= LONG_ROW else shape

    def _step(self, site: Site, shape: tuple[int, ...]) -> Steps:
        place = site.placement
        return site.group.name, place.stride * math.prod(shape[place.axis + 1 :])

    def _count(self, group: Group) -> int:
        return self.symmetry.count_copies(group.name) * group.size

    def _factor(self, group: Group, scale: Sequence[int], sign: Sequence[int], parity: Sequence[int]) -> Factors | None:
        """The factors of a placement, as far as the parts say so; None if there are none."""

        def wanted(part: str, exponents: Sequence[int]) -> tuple[int, ...]:
            return tuple(exponents) if part in self.parts else ()

        made = (group.name, wanted("scale", scale), wanted("sign", sign), wanted("shift", parity))
        return made if any(any(exponents) for exponents in made[1:]) else None

    @cached_property
    def _copy_of_unit(self) -> Int[Tensor, " units"]:
        """Number of the copy of a group that each unit belongs to."""
        return torch.arange(len(self._copies)).repeat_interleave(torch.tensor(self._copies))

    def _draw_permutations(self, models: int, generator: torch.Generator) -> Float[Tensor, "models columns"]:
        """How much further each unit takes its values from, for each group and step."""
        columns = [torch.zeros(models, 1, dtype=EXACT)]
        if self._copies:
            copies = self._copy_of_unit
            drawn = torch.rand(models, len(copies), generator=generator, device=generator.device, dtype=torch.float64)
            # A sort keeps the copies of groups apart, so that each is permuted by itself.
            order = np.argsort((drawn.cpu() + copies).numpy(), -1) - np.arange(len(copies))
            further = torch.from_numpy(order).to(EXACT)
            columns += [further[:, self._segments[group]] * step for group, step in self._moves]
        return torch.cat(columns, 1)

    def _draw_families(
        self, models: int, generator: torch.Generator
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        """Logarithms of scales, signs and half periods of each group, `[models, families, units]`."""

        def draw(part: str, families: Mapping[str, int]) -> dict[str, Tensor]:
            shapes = {g.name: (families[g.name], self._count(g)) for g in self.symmetry.groups if families[g.name]}
            if part not in self.parts or not shapes:
                return {}
            sizes = [math.prod(shape) for shape in shapes.values()]
            size = (models, sum(sizes))
            if part == "scale":
                drawn = 2 * torch.rand(size, generator=generator, device=generator.device, dtype=torch.float64) - 1
            elif part == "sign":
                drawn = 1.0 - 2 * torch.randint(0, 2, size, generator=generator, device=generator.device)
            else:
                drawn = torch.randint(-1, 2, size, generator=generator, device=generator.device)
            pieces = torch.split(drawn.cpu().double(), sizes, 1)
            return {n: piece.reshape(models, *shapes[n]) for n, piece in zip(shapes, pieces, strict=True)}

        groups = self.symmetry.groups
        return (
            draw("scale", {group.name: group.scales for group in groups}),
            draw("sign", {group.name: group.signs for group in groups}),
            draw("shift", {group.name: group.shifts for group in groups}),
        )

    def _factor_table(
        self, models: int, scales: Mapping[str, Tensor], signs: Mapping[str, Tensor], shifts: Mapping[str, Tensor]
    ) -> Float[Tensor, "models columns"]:
        columns = [torch.ones(models, 1, dtype=torch.float64)]
        for group, scale, sign, parity in self._factors:
            factor = torch.ones((), dtype=torch.float64)
            if any(scale):
                exponents = torch.tensor(scale, dtype=torch.float64).unsqueeze(-1)
                factor = torch.exp2((scales[group] * exponents).sum(1))
            for family, exponent in enumerate(sign):
                factor = factor * signs[group][:, family] if exponent else factor
            for family, exponent in enumerate(parity):
                factor = factor * (1 - 2 * (shifts[group][:, family] % 2)) if exponent else factor
            columns.append(factor)
        return torch.cat(columns, 1)

    def _shift_table(self, models: int, shifts: Mapping[str, Tensor]) -> Float[Tensor, "models columns"]:
        columns = [torch.zeros(models, 1, dtype=torch.float64)]
        for group, amounts in self._shifts:
            columns.append((shifts[group] * torch.tensor(amounts, dtype=torch.float64).unsqueeze(-1)).sum(1))
        return torch.cat(columns, 1)

    def _compile(self, names: tuple[str, ...]) -> tuple[_Bucket, ...]:
        if names not in self._known:
            apart = [(name,) for name in names if self._trim(name) != self.symmetry.shapes[name]]
            rest = tuple(name for name in names if (name,) not in apart)
            self._known[names] = tuple(map(self._bucket, [*apart, rest] if rest else apart))
        return self._known[names]

    def _bucket(self, names: tuple[str, ...]) -> _Bucket:
        moves: list[Tensor] = []
        factors: list[Tensor] = []
        shifts: list[Tensor] = []
        shapes = [self._trim(name) for name in names]
        total = sum(math.prod(shape) for shape in shapes)
        start = 0
        for name, shape in zip(names, shapes, strict=True):
            for site in self.symmetry.sites[name]:
                group, place = site.group, site.placement
                slots, covered = _slots(site, [self.symmetry[base].size for base in group.within], shape)
                first = self._moves.get(self._step(site, shape))
                if first is not None:
                    _write(moves, start, total, slots + first, covered)
                made = self._factor(group, place.scale, place.sign, place.parity)
                if made is not None:
                    _write(factors, start, total, slots + self._factors[made], covered)
                if (group.name, place.shift) in self._shifts:
                    _write(shifts, start, total, slots + self._shifts[group.name, place.shift], covered)
            start += math.prod(shape)
        if total * len(moves) > MOST:
            raise ValueError(
                f"networks with {total} values are too large to be moved by one gather; use `symmetry.random` and "
                "`symmetry.act`"
            )
        whole = math.prod(self.symmetry.shapes[names[0]]) // max(1, math.prod(shapes[0]))
        return _Bucket(names, whole, tuple(moves), tuple(factors), tuple(shifts))


def _total(table: Float[Tensor, "models columns"], layers: Layers) -> Float[Tensor, "models N"]:
    """The sum of some columns for each value."""
    first, *rest = layers
    total = table.index_select(1, first)
    for columns in rest:
        total += table.index_select(1, columns)
    return total


def _gather(x: Tensor, further: Float[Tensor, "models N"], device: torch.device) -> Tensor:
    """Take rows from further places."""
    models, length, run = x.shape
    index = further.add_(torch.arange(length)).to(device=device, dtype=torch.int64)
    if run == 1:
        return x.squeeze(-1).gather(1, index).unsqueeze(-1)
    index += torch.arange(models, device=device).unsqueeze(1) * length
    return x.reshape(models * length, run).index_select(0, index.view(-1)).view(models, length, run)


def _slots(
    site: Site, lengths: Sequence[int], shape: tuple[int, ...]
) -> tuple[Int[Tensor, " values"], Bool[Tensor, " values"]]:
    """For each value of a parameter the unit of a site, counted over the copies of its group, and whether it has one.

    `lengths` are the numbers of units of the groups that it is repeated within.
    """
    slots, size = site.units, site.group.size
    for base, length in zip(reversed(site.base_index), reversed(lengths), strict=True):
        slots, size = slots + base * size, size * length
    axes = tuple(shape[axis] for axis in site.axes)
    whole, covered = torch.zeros(axes, dtype=torch.int64), torch.zeros(axes, dtype=torch.bool)
    whole[..., site.positions], covered[..., site.positions] = slots, True

    def everywhere(values: Tensor) -> Tensor:
        return broadcastable(values, site.axes, 0, 0, len(shape)).expand(shape).reshape(-1)

    return everywhere(whole), everywhere(covered)


def _write(layers: list[Tensor], start: int, total: int, columns: Tensor, covered: Tensor) -> None:
    """Write the columns of some values into the first layer that has none there yet."""
    part = slice(start, start + len(columns))
    layer = next((layer for layer in layers if not bool(layer[part][covered].any())), None)
    if layer is None:
        layer = torch.zeros(total, dtype=torch.int64)
        layers.append(layer)
    layer[part][covered] = columns[covered]

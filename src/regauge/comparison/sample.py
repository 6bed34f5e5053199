"""Samples of two large networks: some layers, and some units of each large group together with their counterparts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import normalize

from regauge.comparison.common import numbered_parts, restrict
from regauge.core.act import Site, take
from regauge.core.assignment import assign_rows
from regauge.core.closest import character
from regauge.core.families import has_choice, unfold
from regauge.core.params import Params
from regauge.core.symmetry import Symmetry
from regauge.pruning import cut_symmetry

UNITS = 256
"""The number of units of each group that are sampled.

At least twice the size of the largest matrix group is sampled, which is enough to determine the matrices.
"""
LAYERS = 4
"""The number of layers that are sampled from a stack of equal layers."""
ENTRIES = 2048
"""The number of sampled entries along an axis on which no group acts, such as the token axis."""
TOLD = 8
"""Units are matched by the direction of their weights in a tensor only if each unit has at least this number of entries
in the tensor.
"""

Indices = Mapping[int, Int[Tensor, " entries"]]
"""The indices at which a tensor is read, for some of its axes."""
Read = Callable[[str, Indices], Tensor]
"""A function that reads part of a tensor, given its name and indices."""
Units = Mapping[str, Int[Tensor, " units"]]
"""The sampled units of each group."""


@dataclass(frozen=True)
class Sample:
    """The tensors, entries and units of a network that a sample contains.

    Attributes:
        symmetry: The symmetry of the network as it acts on the sampled tensors, with all units of its groups.
        entries: The sampled indices along axes on which no group acts, unless all indices are read.
        units: The sampled units of the first network, in ascending order, for each group that has more units.
        layers: The number of sampled layers, and the number of layers from which they were sampled.
    """

    symmetry: Symmetry
    shapes: Mapping[str, tuple[int, ...]]
    entries: Mapping[str, Indices]
    units: Units
    layers: tuple[int, int]

    @classmethod
    def of(cls, symmetry: Symmetry, shapes: Mapping[str, tuple[int, ...]], generator: torch.Generator) -> "Sample":
        """Sample layers, entries and units for networks of given shapes.

        Args:
            symmetry: The symmetry. All sizes of its groups must be known.
            shapes: The shapes of all tensors.
            generator: The source of randomness.
        """
        kept, layers = _choose_layers(shapes)
        moved = {(place.parameter, place.axis) for group in symmetry.groups for place in group.placements}
        entries: dict[str, dict[int, Tensor]] = {}
        sizes = dict[str, tuple[int, ...]]()
        for name in kept:
            for axis, length in enumerate(shapes[name]):
                if length > ENTRIES and (name, axis) not in moved:
                    entries.setdefault(name, {})[axis] = torch.arange(ENTRIES) * length // ENTRIES
            own = entries.get(name, {})
            sizes[name] = tuple(len(own[axis]) if axis in own else n for axis, n in enumerate(shapes[name]))
        part = restrict(symmetry, sizes)
        bases = {base for group in part.groups for base in group.within}
        count = max([UNITS, *(2 * group.size for group in part.groups if group.matrix != "none")])
        units = {
            group.name: torch.randperm(group.size, generator=generator, device=generator.device)[:count].sort()[0].cpu()
            for group in part.groups
            if group.is_permuted and not (group.within or group.classes or group.name in bases) and group.size > count
        }
        return cls(part, sizes, entries, units, layers)

    @cached_property
    def narrow(self) -> Symmetry:
        """The symmetry of networks that have only the sampled units."""
        return cut_symmetry(self.symmetry, {name: len(own) for name, own in self.units.items()})

    @property
    def values(self) -> int:
        """Return the number of entries of one network in the sample."""
        return sum(map(prod, (self.narrow.shapes.get(name, shape) for name, shape in self.shapes.items())))

    def indices(self, name: str, units: Units) -> Indices:
        """Return the indices of a tensor at which it is read: sampled entries, and the given units in their order."""
        found = dict(self.entries.get(name, {}))
        masks: dict[int, Tensor] = {}
        for site in self.symmetry.sites.get(name, ()):
            if site.group.name in units:
                own, axis = units[site.group.name], site.placement.axis
                length = self.symmetry.shapes[name][axis]
                order = found.setdefault(axis, torch.arange(length))
                mask = masks.setdefault(axis, torch.ones(length, dtype=torch.bool))
                places = site.positions.reshape(site.group.size, -1)
                order[places[: len(own)]] = places[own]
                mask[places[len(own) :]] = False
        return found | {axis: found[axis][mask] for axis, mask in masks.items()}

    def cut(self, read: Read, units: Units) -> Params:
        """Return the sampled tensors of a network, restricted to the given units of each sampled group, in the given
        order.
        """
        return {name: read(name, self.indices(name, units)) for name in self.shapes}

    def match(self, first: Read, second: Read) -> tuple[Units, int]:
        """Find the units of the second network that are most similar to those of the first, group by group.

        The units of a group are compared in tensors on whose other axes no groups act, or only groups that are already
        matched. The first matched group, such as a residual stream, is matched by tensors on which no other group acts.
        Each sampled unit may match any unit of the second network, so two sampled units may match the same unit. For
        unrelated networks, the explained share of a sample is therefore larger than the share after a permutation of
        all units.

        Returns:
            The units, and the smallest number of entries per unit with which any group was matched.
        """
        found: dict[str, Tensor] = {}
        least, waiting = ENTRIES if self.units else 0, list(self.units)
        while waiting:
            known = {name: self._telling(name, found) for name in waiting}
            counts = {name: sum(count for *_, count in places) for name, places in known.items()}
            name = max(waiting, key=counts.__getitem__)
            waiting.remove(name)
            least = min(least, counts[name])
            found[name] = self._nearest(name, known[name], first, second, found) if counts[name] else self.units[name]
        return found, least

    def _telling(self, name: str, known: Units) -> list[tuple[str, Site, int]]:
        """Return the axes of tensors by which the units of a group can be matched, each with the number of entries that
        one unit has there.
        """
        places, group = [], self.symmetry[name]
        for tensor in dict.fromkeys(place.parameter for place in group.placements):
            sites, shape = self.symmetry.sites[tensor], list(self.symmetry.shapes[tensor])
            own = [site for site in sites if site.group.name == name]
            others = {site.group.name for site in sites if site.group.name != name and has_choice(site.group)}
            is_coupled = len({site.placement.axis for site in own}) > 1
            if is_coupled or tensor in self.symmetry.buffers or not others <= known.keys():
                continue
            for axis, index in self.indices(tensor, known).items():
                shape[axis] = len(index)
            for site in own:
                count = prod(shape) // shape[site.placement.axis] * site.positions.numel() // group.size
                places += [(tensor, site, count)] if count >= TOLD else []
        return places

    def _nearest(
        self, name: str, places: list[tuple[str, Site, int]], first: Read, second: Read, known: Units
    ) -> Int[Tensor, " units"]:
        """Return the units of the second network whose weights have the largest cosine with units of the first."""
        own = self.units[name]
        cosines: dict[tuple[int, ...], Float[Tensor, "sampled units"]] = {}
        for tensor, site, _ in places:
            here, there = (self.indices(tensor, units) for units in (self._firsts(known), known))
            x, y = (unfold(one(tensor, at).float(), site) for one, at in ((first, here), (second, there)))
            if self._has_free_signs(tensor, name):
                x, y = (one.abs() - one.abs().mean(-1, keepdim=True) for one in (x, y))
            term = normalize(x[own], dim=-1) @ normalize(y, dim=-1).mT
            key = (0,) if self._has_free_signs(tensor, name) else character(site.placement)
            cosines[key] = cosines[key] + term if key in cosines else term
        # Signs of different characters (products of signs) are chosen independently, which can only improve the match.
        score = torch.stack([term.abs() if any(key) else term for key, term in cosines.items()]).sum(0)
        return torch.from_numpy(assign_rows(score.numpy()))

    def _has_free_signs(self, tensor: str, name: str) -> bool:
        """Return whether other groups multiply the entries of a unit by signs that are still unknown."""
        return any(any(character(s.placement)) for s in self.symmetry.sites[tensor] if s.group.name != name)

    def _firsts(self, known: Units) -> Units:
        """Return the sampled units of the first network, for those groups that are already matched."""
        return {name: self.units[name] for name in known}


def select(tensor: Tensor, indices: Indices) -> Tensor:
    """Return the entries of a tensor at some indices of its axes."""
    for axis, index in sorted(indices.items(), key=lambda one: len(one[1]) / tensor.shape[one[0]]):
        tensor = take(tensor, axis, index)
    return tensor


def layer_of(name: str) -> str | None:
    """Return the outermost numbered part of a tensor's name, such as "layers.7", or None if no part is numbered."""
    return next(iter(numbered_parts(name)), None)


def _choose_layers(shapes: Mapping[str, tuple[int, ...]]) -> tuple[list[str], tuple[int, int]]:
    """Return the tensors of evenly spaced layers, and all tensors outside of layers. Also return the numbers of chosen
    layers and of all layers.
    """
    stacks: dict[str, dict[str, None]] = {}
    for name in shapes:
        layer = layer_of(name)
        if layer is not None:
            stacks.setdefault(layer.rpartition(".")[0], {})[layer] = None
    chosen, count = set[str](), 0
    for layers in map(list, stacks.values()):
        count += len(layers)
        places = torch.linspace(0, len(layers) - 1, min(LAYERS, len(layers))).round().long().tolist()
        chosen |= {layers[k] for k in places}
    return [name for name in shapes if layer_of(name) is None or layer_of(name) in chosen], (len(chosen), count)

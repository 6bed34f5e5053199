"""The choice of the units to compare in networks of different widths: the units that best match the narrower
network.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from regauge.alignment import align
from regauge.alignment.methods.weight_matching import WeightMatching
from regauge.comparison.common import Common
from regauge.core.balance import balance, has_balance
from regauge.core.element import select_parts
from regauge.core.families import unit_values
from regauge.core.params import VALUES, Params, require_finite, require_movable, work_dtype
from regauge.core.symmetry import Symmetry
from regauge.pruning import cut_params
from regauge.pruning.extension import pad_params

Units = Int[Tensor, "*bases units"]


@dataclass(frozen=True)
class CommonUnits:
    """Two networks, cut to matching units.

    Attributes:
        params: Both networks with only the chosen units, in stored order. Translations are removed if they are known
            for both networks.
        stored: Both networks as stored, cut to the chosen units; None if the result would equal `params`.
        units: For each group whose number of units differs, the chosen units of the first and of the second network.
    """

    params: tuple[Params, Params]
    stored: tuple[Params, Params] | None
    units: Mapping[str, tuple[Units, Units]]


def choose_units(common: Common, a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> CommonUnits:
    """Choose matching units of two networks with different widths, and cut both networks to these units.

    Translations are removed first, because the translation of a removed unit would remain in the biases of other units.
    Translations are unknown, and cannot be removed, if a network has more units than the network on which the symmetry
    was found. Next, both networks are balanced. In each group, units of zeros are added to the network with fewer
    units, and the second network is aligned to the first. Finally, units that are aligned to units of zeros are
    removed.

    Args:
        common: The common part of both networks, with the widths that differ.
        a: The first network.
        b: The second network.

    Raises:
        KeyError: A parameter on which the symmetry acts is missing.
        ValueError: Tensors contain NaN or Inf, or have no entries.
    """
    assert common.widths is not None
    whole = common.extend(common.widths.whole)
    sizes = {group.name: common.widths.sizes[group.name] for group in whole.groups if group.name in common.widths.sizes}
    counts = [{name: pair[k] for name, pair in sizes.items()} for k in range(2)]
    parts, wholes, padded, marks = list[Params](), list[Params](), list[Params](), list[Params]()
    known = [{family.name for family in side.translations} for side in common.widths.sides]
    for k, (label, network) in enumerate((("first", a), ("second", b))):
        part, symmetry = common.part_of(network, k)
        require_movable(symmetry.groups, part, symmetry.buffers)
        symmetry.require_ones(part)
        require_finite(part, f"the {label} network", symmetry.structure)
        wholes.append(part)
        families = tuple(family for family in symmetry.translations if all(family.name in one for one in known))
        symmetry = replace(symmetry, translations=families)
        part = symmetry.split(part)[0] if families else part
        parts.append(part)
        padded.append(pad_params(_balanced(part, symmetry), whole, counts[k]))
        marks.append(pad_params({name: torch.ones(symmetry.shapes[name]) for name in symmetry.sites}, whole, counts[k]))
    rigid = _without_stretching(whole)
    element = align(padded[0], padded[1], rigid, method=WeightMatching()).element
    element = select_parts(element, rigid.groups, ("permutation",))
    met = rigid.act(element, marks[1]), rigid.act(rigid.inverse(element), marks[0])
    units, cut, stored = list[dict[str, Units]](), list[Params](), list[Params]()
    for k, (part, given, moved) in enumerate(zip(parts, wholes, met, strict=True)):
        symmetry = whole.bind(moved)
        units.append({name: _first(_is_met(symmetry, name, moved, counts[k]), min(sizes[name])) for name in sizes})
        wider = {name: own for name, own in units[k].items() if own.shape[-1] < counts[k][name]}
        side = common.part_of(part, k)[1]
        cut.append(cut_params(part, side, wider))
        stored.append(cut[k] if part is given else cut_params(given, side, wider))
    raw = None if all(one is two for one, two in zip(cut, stored, strict=True)) else (stored[0], stored[1])
    return CommonUnits((cut[0], cut[1]), raw, {name: (units[0][name], units[1][name]) for name in sizes})


def _balanced(params: Mapping[str, Tensor], symmetry: Symmetry) -> Params:
    """Return the network of smallest norm on the orbit of a network, in the precision of the comparison."""
    values = {n: t.detach().to("cpu", work_dtype(t.dtype)) if t.dtype in VALUES else t for n, t in params.items()}
    return symmetry.act(balance(values, symmetry), values) if has_balance(symmetry) else values


def _without_stretching(symmetry: Symmetry) -> Symmetry:
    """Return the symmetry of balanced networks without translations and gains: no scales, and rotations instead of
    other matrices.
    """
    groups = (
        replace(
            group,
            scales=0,
            matrix="orthogonal" if group.matrix == "linear" else group.matrix,
            placements=tuple(replace(place, scale=()) for place in group.placements),
        )
        for group in symmetry.groups
    )
    return replace(symmetry, groups=tuple(groups), ones=(), translations=())


def _is_met(symmetry: Symmetry, name: str, marks: Params, counts: Mapping[str, int]) -> Bool[Tensor, "*bases units"]:
    """Return a mask of the units in one network that are matched with real units of the other, not with added units of
    zeros.
    """
    tensor, site = next((n, s) for n, local in symmetry.sites.items() for s in local if s.group.name == name)
    is_met = unit_values(symmetry, tensor, site, marks[tensor]).ne(0).any(-1)
    bases = (*symmetry[name].within, name)
    return is_met[tuple(slice(counts.get(base, symmetry[base].size)) for base in bases)]


def _first(is_met: Bool[Tensor, "*bases units"], number: int) -> Units:
    """Return the ascending indices of matched units.

    A group that is repeated within another group has several copies. If one copy has too few matched units, further
    units are added.
    """
    order = is_met.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return order[..., :number].sort(-1).values

"""Splitting of a network into a representative, which computes the same function, and coordinates, to which
translations add vectors.

First, all gains of the network are set to one. Afterwards, the vectors of the translation families are subtracted one
after another, first from weights and then from biases. Subtracting the vector of a later family leaves the coordinates
of all earlier families at zero. The coordinates of a network are one vector for each translation family. A translation
adds vectors to the coordinates, in any order. If vectors were added to the network itself, the result could depend on
the order. For example, a translation that a LayerNorm removes changes the output weights of attention. However, the
output weights determine the output bias that compensates for an added value bias.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from regauge.core.act import ReadValues, Site, act
from regauge.core.behind_gains import (
    Gained,
    carry_rotation,
    from_sums,
    matrices,
    rotatable,
    rotate,
    rotated_group,
    sums,
)
from regauge.core.element import Element, random
from regauge.core.params import Params, round_to
from regauge.core.remembered import remembered
from regauge.core.translations import TranslationFamily
from regauge.core.unit_gains import gain_scales, unit_element, without_gains

ROUNDED = 8 * torch.finfo(torch.float64).eps
"""The relative difference up to which coordinates count as equal."""
Coordinates = Mapping[str, Tensor]
"""Coordinates of a network: one tensor for each translation family and for each gain, by name."""


class Charted(Gained, Protocol):
    """A protocol: the properties of a symmetry with gains, translations and tied names that this module needs."""

    @property
    def translations(self) -> tuple[TranslationFamily, ...]:
        """The translation families, in the order in which their vectors are subtracted."""

    @property
    def tied(self) -> tuple[tuple[str, ...], ...]:
        """For each tensor with several names, the tuple of these names."""

    def translation(self, name: str) -> TranslationFamily:
        """Return the translation family with a given name."""

    def compose(self, left: Element, right: Element) -> Element:
        """Return the product of two elements."""

    @property
    def on_sums(self) -> "Charted":
        """The symmetry that acts on parameters plus the constants that the model adds to them before use."""


def split(symmetry: Charted, params: Params, lead: int) -> tuple[Params, dict[str, Tensor]]:
    """Split networks `[*lead, ...]` into representatives and coordinates; see `Symmetry.split`."""
    wide = _widen(symmetry, params)
    current, coordinates = _without_variances(symmetry, sums(symmetry.added, wide), lead)
    gains = chart_gains(symmetry)
    if gains:
        is_zero = {name: current[name] == 0 for name in gains}
        for name in gains:
            coordinates[name] = torch.where(is_zero[name], 1.0, current[name])
        current |= _scale(symmetry, current, current, lead)
        current |= {name: torch.where(is_zero[name], 0.0, 1.0).to(current[name]) for name in gains}
    for family in symmetry.translations:
        if family.eps is None:
            coordinates[family.name] = family.read(current, lead)
            current = family.add(current, coordinates[family.name], lead, sign=-1.0)
    return _tie(symmetry, from_sums(symmetry.added, current, wide)), coordinates


def join(symmetry: Charted, representative: Params, coordinates: Coordinates, lead: int) -> Params:
    """Join representatives `[*lead, ...]` and coordinates into networks; see `Symmetry.join`."""
    wide = _widen(symmetry, representative)
    current = sums(symmetry.added, wide)
    for family in reversed(symmetry.translations):
        if family.eps is None:
            current = family.add(current, coordinates[family.name].to(current[family.entries.parameter]), lead)
    if gains := chart_gains(symmetry):
        wanted = {name: coordinates[name].to(current[name]) for name in gains}
        is_zero = {name: current[name] == 0 for name in gains}
        current |= _scale(symmetry, current, {name: 1 / one for name, one in wanted.items()}, lead)
        current |= {name: torch.where(is_zero[name], 0.0, one) for name, one in wanted.items()}
    for family in symmetry.translations:
        if family.eps is not None:
            current = family.add(current, coordinates[family.name].to(current[family.entries.parameter]), lead)
    return _tie(symmetry, from_sums(symmetry.added, current, wide))


def _without_variances(symmetry: Charted, params: Params, lead: int) -> tuple[Params, dict[str, Tensor]]:
    """Set running variances to one, and change gains such that the function stays the same. Return the networks and the
    logarithms of the variances.

    The gains of the returned networks are not yet one.
    """
    coordinates = {}
    for family in symmetry.translations:
        if family.eps is not None:
            coordinates[family.name] = family.read(params, lead)
            params = family.add(params, coordinates[family.name], lead, sign=-1.0)
    return params, coordinates


class Carrier:
    """The action of an element on the coordinates of translation families, `[*batch, *shape]`.

    Each family of translations has a home parameter. To transform a coordinate, `carry` writes the coordinate into a
    home parameter whose other entries are zero. The element acts on the home parameter, and the new coordinate is read
    from the result. In a representative, gains are one. Therefore `carry` neither multiplies gains by scales and signs,
    nor adds half periods to biases.
    """

    def __init__(self, symmetry: Charted, element: Element) -> None:
        self._symmetry, self._batch = symmetry, len(element.batch)
        self._read = ReadValues(without_gains(symmetry, element, symmetry.gains))

    def carry(self, name: str, coordinate: Tensor) -> Tensor:
        """Return the coordinate of a network for one translation family after the element has acted on the network."""
        family = self._symmetry.translation(name)
        home = family.entries.parameter
        if home not in self._symmetry.sites:
            return coordinate
        sites, shape = {home: _sites_of(self._symmetry, name)}, self._symmetry.shapes[home]

        def moved(tensor: Tensor) -> Tensor:
            groups, read = self._symmetry.groups, self._read
            return act(groups, sites, read.element, {home: tensor}, {home: len(shape)}, read)[home]

        held = family.embed(coordinate, shape, self._batch)
        is_shifted = any(any(site.placement.shift) for site in sites[home])
        there = moved(held) - moved(torch.zeros_like(held)) if is_shifted else moved(held)
        return family.shorten(family.vector(there, self._batch), self._batch)


@remembered
def _sites_of(symmetry: Charted, name: str) -> list[Site]:
    """Return where groups act on the home parameter of a translation family.

    Some translation families divide their vector by a gain. Along the axis of the dividing gain, scales and signs are
    left out, because the factors of the parameter and of the gain cancel.
    """
    family = symmetry.translation(name)
    sites = symmetry.sites[family.entries.parameter]
    if family.gain is None:
        return sites
    return [
        replace(site, placement=replace(place, scale=(0,) * len(place.scale), sign=(0,) * len(place.sign)))
        if (place := site.placement).axis in family.constant
        else site
        for site in sites
    ]


@remembered
def chart_gains(symmetry: Charted) -> tuple[str, ...]:
    """Return the gains that are one in the representative of a network."""
    return tuple(name for one in gain_scales(symmetry, symmetry.gains) for name in one.sites)


@remembered
def scaled_by_gains(symmetry: Charted) -> tuple[str, ...]:
    """Return the parameters whose entries are multiplied or divided when gains are set to one."""
    places = [place for one in gain_scales(symmetry, symmetry.gains) for place in one.group.placements]
    return tuple(dict.fromkeys(place.parameter for place in places if any(place.scale) or any(place.sign)))


@remembered
def charted(symmetry: Charted) -> frozenset[str]:
    """Return the parameters that may differ between a network and its representative, including all tied names."""
    families = {name for family in symmetry.translations for name in family.parameters}
    found = frozenset(scaled_by_gains(symmetry)) | families
    return found | {name for names in symmetry.tied if found & {*names} for name in names}


@remembered
def _needed(symmetry: Charted) -> frozenset[str]:
    """Return the parameters that change if translations act or gains are set to one, and the parameters from which
    these changes are computed.
    """
    return charted(symmetry) | {name for family in symmetry.translations for name in family.coefficients}


def _widen(symmetry: Charted, params: Mapping[str, Tensor]) -> Params:
    """Return networks in which all tensors that translations or gains change or read have the next wider dtype."""
    needed = _needed(symmetry)
    return {name: widen(tensor) if name in needed else tensor for name, tensor in params.items()}


def widen(tensor: Tensor) -> Tensor:
    """Return a tensor in the next wider dtype, such as float64 for float32."""
    wider = {torch.float32: torch.float64, torch.float16: torch.float32, torch.bfloat16: torch.float32}
    return tensor.to(wider.get(tensor.dtype, tensor.dtype))


def _scale(symmetry: Charted, params: Params, gains: Mapping[str, Tensor], lead: int) -> Params:
    """Return the parameters that compensate for gains, scaled as if the given gains were set to one.

    Parameters and gains must include the constants that the model adds to them before use.
    """
    element = unit_element(symmetry, gains, symmetry.gains, lead)
    scaled = scaled_by_gains(symmetry)
    return symmetry.on_sums._act_on(element, {name: params[name] for name in scaled if name in params})


def _tie(symmetry: Charted, params: Params) -> Params:
    """Assign one tensor to all names that share it."""
    for names in symmetry.tied if charted(symmetry) else ():
        there = [name for name in names if name in params]
        params |= dict.fromkeys(there, params[there[0]]) if there else {}
    return params


def compose_rotations(symmetry: Charted, left: Element, right: Element, batch: tuple[int, ...]) -> dict[str, Tensor]:
    """Return the rotations of a product: the rotations of `right`, transformed by `left`, and then those of `left`."""
    wide = left if left.batch == batch else left.expand(*batch)
    composed = dict(wide.rotation)
    for name, matrix in right.rotation.items():
        carried = carry_rotation(symmetry, wide, name, matrix.expand(*batch, *matrix.shape[-2:]))
        composed[name] = composed[name] @ carried if name in composed else carried
    return composed


def random_rotation(symmetry: Charted, generator: torch.Generator, batch: tuple[int, ...]) -> dict[str, Tensor]:
    """Return uniformly random rotations, including reflections, for the groups that may rotate networks with gains of
    one.
    """
    groups = tuple(rotated_group(symmetry, name) for name in rotatable(symmetry))
    return matrices(random(groups, generator, ("linear",), batch), rotatable(symmetry))


def compose_translations(symmetry: Charted, left: Element, right: Element, batch: tuple[int, ...]) -> dict[str, Tensor]:
    """Return the translations of a product: the vectors of `left`, plus those of `right` transformed by `left`."""
    wide = left if left.batch == batch else left.expand(*batch)
    carried, carrier = {}, Carrier(symmetry, wide)
    for name, vector in right.translation.items():
        shape = vector.shape[len(right.batch) :]
        carried[name] = carrier.carry(name, vector.expand((*batch, *shape)))
    added = dict(carried)
    for name, vector in wide.translation.items():
        added[name] = vector + carried[name] if name in carried else vector
    return added


def onto_representative(symmetry: Charted, element: Element, params: Mapping[str, Tensor]) -> Element:
    """Return an element that maps each network to its representative, transformed by the given element.

    The coordinates of all mapped networks are zero.
    """
    params = {name: tensor.detach() for name, tensor in params.items()}
    lead = count_lead(symmetry, params)
    coordinates = split(symmetry, dict(params), lead)[1]
    gains = _without_variances(symmetry, sums(symmetry.added, _widen(symmetry, params)), lead)[0]
    whole = symmetry.compose(element, unit_element(symmetry, gains, symmetry.gains, lead))
    names, carrier = (family.name for family in symmetry.translations), Carrier(symmetry, whole)
    return whole.translated({name: -carrier.carry(name, coordinates[name].double()) for name in names})


def into_coordinates(
    symmetry: Charted, element: Element, own: Coordinates, wanted: Coordinates, kept: Mapping[str, Tensor]
) -> Element:
    """Return an element that acts on representatives like `element`, and maps the coordinates of networks to the
    coordinates `wanted`.

    Args:
        symmetry: The whole symmetry.
        element: An element that leaves gains unchanged and does not translate.
        own: The coordinates of the networks before the element acts, `[*batch, ...]`.
        wanted: The coordinates of the networks after the element acts.
        kept: For each channel of a gain, whether the network keeps this gain and the bias that is added after it.
    """
    gains = chart_gains(symmetry)
    moved = symmetry.on_sums._act_on(element, {name: own[name] for name in gains})
    # The ratio is computed first: equal gains then give a factor of exactly one, without rounding.
    ratio = {name: torch.where(kept[name], 1.0, moved[name] / wanted[name].to(moved[name])) for name in gains}
    whole = symmetry.compose(unit_element(symmetry, ratio, symmetry.gains, len(element.batch)), element)
    added, carrier = {}, Carrier(symmetry, element)
    for family in symmetry.translations:
        carried = carrier.carry(family.name, own[family.name].double())
        there = wanted[family.name].to(carried)
        # Transforming a coordinate rounds it. Without this test, the last bits of a copy's tensors would change.
        is_same = (there - carried).abs() <= ROUNDED * torch.maximum(there.abs(), carried.abs())
        vector = torch.where(is_same, 0.0, there - carried)
        for name in gains:
            if _is_beside(symmetry, family, name):
                vector = torch.where(kept[name], 0.0, vector)
        if bool(vector.any()):
            added[family.name] = vector
    return whole.translated(added)


@remembered
def _is_beside(symmetry: Charted, family: TranslationFamily, gain: str) -> bool:
    """Return whether a translation family adds vectors to the bias that follows a gain. Scales multiply a gain and the
    bias that follows it together.
    """
    home = family.entries.parameter
    scales = [
        {(site.group.name, site.placement.scale) for site in symmetry.sites.get(name, ())} for name in (home, gain)
    ]
    return family.shape == tuple(symmetry.shapes[gain]) and scales[0] == scales[1]


def random_translation(
    symmetry: Charted, generator: torch.Generator, batch: tuple[int, ...], *, is_stored: bool = False
) -> dict[str, Tensor]:
    """Return random translation vectors, about as large as weights, which keep the function for any running statistics.

    If `is_stored`, also use translation families that keep the function only with the stored running statistics.
    """
    found = {}
    for family in symmetry.translations:
        if family.is_stored_only and not is_stored:
            continue
        source: dict[str, Any] = {"generator": generator, "device": generator.device, "dtype": torch.float64}
        shape = symmetry.shapes[family.entries.parameter]
        size = 0.3 if len(shape) < 2 else math.prod(shape[1:]) ** -0.5
        found[family.name] = size * torch.randn((*batch, *family.shape), **source).cpu()
    return found


def count_lead(symmetry: Charted, params: Mapping[str, Tensor]) -> int:
    """Return the number of leading model axes of the parameters."""
    return max((params[n].ndim - len(symmetry.shapes[n]) for n in charted(symmetry) if n in params), default=0)


def require_parameters(symmetry: Charted, params: Mapping[str, Tensor]) -> None:
    """Raise an error unless all parameters that translations change or read are present in the expected shapes."""
    for name in sorted(_needed(symmetry)):
        shape = tuple(symmetry.shapes[name])
        if name not in params:
            raise KeyError(
                f"the parameters lack {name!r}, which translations change or read; load the checkpoint of the model "
                "that the symmetry was found on"
            )
        there = tuple(params[name].shape)
        if there[len(there) - len(shape) :] != shape:
            raise ValueError(
                f"{name!r} has shape {there}, but the symmetry expects {shape} (after an optional model axis); the "
                "parameters are of another architecture: discover the symmetry of their model"
            )


def require_coordinates(symmetry: Charted, coordinates: Coordinates) -> None:
    """Raise an error unless coordinates of all translation families and gains are present in the expected shapes."""
    shapes = {family.name: family.shape for family in symmetry.translations}
    shapes |= {name: symmetry.shapes[name] for name in chart_gains(symmetry)}
    for name, shape in shapes.items():
        if name not in coordinates:
            raise KeyError(f"the coordinates lack {name!r}; give all that `split` returned")
        there = tuple(coordinates[name].shape)
        if there[len(there) - len(shape) :] != shape:
            raise ValueError(
                f"the coordinate {name!r} has shape {there}, but {shape} is expected; give what `split` returned"
            )


def translate(symmetry: Charted, element: Element, params: Params, skip: Collection[str] = ()) -> Params:
    """Apply the rotations and translations of an element, whose permutations, signs and scales have already acted.

    The rotations act on the representative. The translation vectors are added to the coordinates of the network.
    """
    batch = element.batch
    require_parameters(symmetry, params)
    require_shapes(symmetry, element)
    lead = max(count_lead(symmetry, params), len(batch))
    rotated = {place.parameter for name in element.rotation for place in rotated_group(symmetry, name).placements}
    whole = {
        name: params[name].expand(*batch, *params[name].shape)
        if params[name].ndim < len(symmetry.shapes[name]) + lead
        else params[name]
        for name in _needed(symmetry) | (rotated & params.keys())
    }
    representative, coordinates = split(symmetry, dict(whole), lead)
    if element.rotation:
        wide = {name: tensor.to(widen(whole[name]).dtype) for name, tensor in representative.items()}
        outer = next(iter(whole.values())).shape[:lead]
        representative = _tie(symmetry, rotate(symmetry, element.rotation, wide, tuple(outer)))
    for name, vector in element.translation.items():
        coordinates[name] = coordinates[name] + vector.to(coordinates[name])
    joined = join(symmetry, representative, coordinates, lead)
    changed = changed_by(symmetry, element) & params.keys()
    rounded = round_alike_given(joined, whole, [name for name in changed if name not in skip])
    return {**params, **{name: rounded[name] for name in changed if name not in skip}}


def changed_by(symmetry: Charted, element: Element) -> set[str]:
    """Return the parameters that the translations and rotations of an element change, including all tied names."""
    changed = {name for family in element.translation for name in symmetry.translation(family).parameters}
    for name in element.rotation:
        changed |= {place.parameter for place in rotated_group(symmetry, name).placements} | charted(symmetry)
    return changed | {name for names in symmetry.tied if changed & {*names} for name in names}


def require_shapes(symmetry: Charted, element: Element) -> None:
    """Raise an error unless an element's translations and rotations have the shapes of their families and groups."""
    shapes = {("translation", name): symmetry.translation(name).shape for name in element.translation}
    for name in element.rotation:
        if name not in rotatable(symmetry):
            raise ValueError(
                f"the element rotates {name!r}, which this symmetry does not rotate; it belongs to another symmetry: "
                "draw it from this one"
            )
        shapes["rotation", name] = (symmetry[name].size,) * 2
    for (part, name), shape in shapes.items():
        there = tuple((element.translation if part == "translation" else element.rotation)[name].shape)
        if there != (*element.batch, *shape):
            raise ValueError(
                f"the {part} {name!r} of the element has shape {there}, but {(*element.batch, *shape)} is expected; "
                "draw it from this symmetry"
            )


def round_alike_given(wide: Params, given: Mapping[str, Tensor], changed: Collection[str]) -> Params:
    """Convert networks to the dtypes of the networks in `given`.

    Tensors that did not change are taken from `given`.
    """
    return {**given, **{name: round_to(wide[name], given[name].dtype, name) for name in changed if name in given}}

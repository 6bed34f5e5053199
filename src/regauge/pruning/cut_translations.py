"""Families of translations (constants that can be added to parameters) of a network whose axes have been cut."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import torch
from jaxtyping import Bool
from torch import Tensor

from regauge.core.translation_text import require_translation
from regauge.core.translations import Entries, Image, ImageStep, TranslationFamily

Shape = tuple[int, ...]
Masks = Mapping[str, Mapping[int, Bool[Tensor, " length"]]]
"""For each cut parameter and axis, a mask of the kept indices."""


def cut_translations(
    families: Sequence[TranslationFamily], shapes: Mapping[str, Shape], masks: Masks
) -> dict[str, TranslationFamily]:
    """Return the families of translations that remain if only some indices of axes are kept, under their old names.

    A family is dropped in three cases: its entries after the cut are not regularly spaced, one of its parameters is
    removed, or the family's vector and the compensating vectors of other parameters lose different entries.

    Args:
        families: The families of the whole network.
        shapes: The shapes of the parameters, except removed parameters.
        masks: Masks of the kept indices.
    """
    after = {
        name: tuple(int(masks.get(name, {}).get(axis, torch.ones(n)).sum()) for axis, n in enumerate(shape))
        for name, shape in shapes.items()
    }
    found = {}
    for family in families:
        try:
            one = _cut_family(family, shapes, masks, after)
            require_translation(one, after)
        except (KeyError, ValueError):
            continue
        found[family.name] = one
    return found


def _cut_family(
    family: TranslationFamily, shapes: Mapping[str, Shape], masks: Masks, after: Mapping[str, Shape]
) -> TranslationFamily:
    parameter, constant = family.entries.parameter, family.constant
    home = _cut(family.entries, shapes[parameter], masks.get(parameter, {}))
    is_named = family.name == family.entries.family_name(constant, shapes[parameter])
    name = home.entries.family_name(constant, after[parameter]) if is_named else family.name
    vector = home.mask(family.constant)
    images = tuple(_cut_image(image, vector, shapes, masks) for image in family.images)
    gain = _cut_known(family.gain, shapes, masks)
    return replace(family, name=name, entries=home.entries, gain=gain, images=images)


def _cut_image(image: Image, vector: Tensor, shapes: Mapping[str, Shape], masks: Masks) -> Image:
    """Return the change of a parameter that compensates for a family's vector, after only the masked entries
    are kept.
    """
    steps = list[ImageStep]()
    for step in image.steps:
        name = step.entries.parameter
        if step.kind == "scale":
            steps.append(step)
            continue
        own = _cut(step.entries, *((shapes[name], masks.get(name, {})) if name else ((len(vector),), {0: vector})))
        steps.append(replace(step, entries=own.entries, by=_cut_known(step.by, shapes, masks)))
        if step.kind == "through":
            _require_alike(vector, own.mask(range(1, len(own.kept)), but=(2,)))
            vector = own.mask(range(2, len(own.kept)))
        elif step.kind == "take":
            vector = own.mask(())
        elif step.kind != "total":
            ahead = next(k for k in range(len(own.kept) + 1) if math.prod(step.entries.sizes[:k]) == len(vector))
            _require_alike(vector, own.mask(range(ahead, len(own.kept))))
    name = image.entries.parameter
    there = _cut(image.entries, shapes[name], masks.get(name, {}))
    _require_alike(vector, there.mask(image.constant))
    return replace(image, entries=there.entries, steps=tuple(steps))


def _cut_known(entries: Entries | None, shapes: Mapping[str, Shape], masks: Masks) -> Entries | None:
    if entries is None:
        return None
    return _cut(entries, shapes[entries.parameter], masks.get(entries.parameter, {})).entries


def _require_alike(one: Tensor, other: Tensor) -> None:
    if not torch.equal(one, other):
        raise ValueError("a vector and its image lose different entries")


@dataclass(frozen=True)
class _Cut:
    """The remaining entries of an array after a cut, with a mask of the kept indices along each axis."""

    entries: Entries
    kept: tuple[Bool[Tensor, " length"], ...]

    def mask(self, without: Sequence[int], but: Sequence[int] = ()) -> Bool[Tensor, " entries"]:
        """Return the flat mask of the array's kept entries, without some of the axes."""
        axes = (kept for k, kept in enumerate(self.kept) if k not in without or k in but)
        return reduce(lambda a, b: (a.unsqueeze(-1) & b).flatten(), axes, torch.ones(1, dtype=torch.bool))


def _cut(entries: Entries, shape: Shape, masks: Mapping[int, Tensor]) -> _Cut:
    """Return the entries of a tensor at the masked indices; raise a ValueError if they do not form an array."""
    steps = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    lengths = [int(masks[axis].sum()) if axis in masks else n for axis, n in enumerate(shape)]
    new_steps = [math.prod(lengths[axis + 1 :]) for axis in range(len(shape))]
    kept = [torch.ones(n, dtype=torch.bool) for n in entries.sizes]
    strides, start = [0] * len(kept), 0
    along: dict[int, list[int]] = {axis: [] for axis in range(len(shape))}
    for k, (n, stride) in enumerate(zip(entries.sizes, entries.strides, strict=True)):
        if n > 1 and stride:
            along[next(axis for axis, step in enumerate(steps) if stride >= step)].append(k)
    for axis, own in along.items():
        # Positions along one axis of the tensor, by those axes of the array that step along it.
        places = torch.tensor(entries.start // steps[axis] % shape[axis])
        for k in own:
            if entries.strides[k] % steps[axis]:
                raise ValueError("an axis of the array steps along several of the tensor")
            places = places.unsqueeze(-1) + torch.arange(entries.sizes[k]) * (entries.strides[k] // steps[axis])
        if int(places.max()) >= shape[axis]:
            raise ValueError("an axis of the array steps along several of the tensor")
        mask = masks.get(axis, torch.ones(shape[axis], dtype=torch.bool))
        stays, new = mask[places], (mask.cumsum(0) - 1)[places]
        for number, k in enumerate(own):
            kept[k] = stays.movedim(number, 0).flatten(1).any(1) if len(own) > 1 else stays
            stays, new = (one.index_select(number, kept[k].nonzero().flatten()) for one in (stays, new))
        if not stays.numel() or not bool(stays.all()):
            raise ValueError("the remaining entries form no array")
        first = int(new.flatten()[0])
        again = torch.tensor(first)
        for number, k in enumerate(own):
            line = new.movedim(number, 0).flatten(1)[:, 0] if len(own) > 1 else new
            step = int(line[1] - line[0]) if len(line) > 1 else 1
            strides[k] = step * new_steps[axis]
            again = again.unsqueeze(-1) + torch.arange(len(line)) * step
        if not torch.equal(again, new):
            raise ValueError("the remaining entries are not evenly spaced")
        start += first * new_steps[axis]
    for k, (n, stride) in enumerate(zip(entries.sizes, entries.strides, strict=True)):
        strides[k] = strides[k] if n > 1 and stride else min(stride, 1)
    return _Cut(Entries(entries.parameter, tuple(int(one.sum()) for one in kept), tuple(strides), start), tuple(kept))

"""A symmetry: the groups of a model, where they act, and the operations on their elements."""

import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from regauge.core import act as _act
from regauge.core import chart, symmetry_text
from regauge.core import element as _element
from regauge.core.behind_gains import (
    Added,
    carry_rotation,
    constant,
    from_sums,
    on_representatives,
    plus,
    rotatable,
    sums,
)
from regauge.core.counted import count, shorten
from regauge.core.element import ALL_PARTS, DeferredElement, Element, Make, materialize
from regauge.core.exchangeable import classes_of
from regauge.core.given import example_arguments, require_generator, require_module, require_plain, require_tensors
from regauge.core.groups import Exponent, Frozen, Group, Kind, Placement, groups_from_axes, readers_from_axes, set_sizes
from regauge.core.lazy_chart import act_in_turn, is_large, split_in_turn
from regauge.core.outputs import Outputs
from regauge.core.params import Params, require_movable
from regauge.core.probe import Check, Probe, Trial, away, exact_probe, first_trial, relative_change
from regauge.core.remembered import remembered
from regauge.core.symmetry_text import render
from regauge.core.translation_text import read_translations, write_translations
from regauge.core.translations import TranslationFamily
from regauge.core.typed_json import require_fields

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from regauge.core.compiled import CompiledElement

BEHIND = " behind gains"
"""The suffix of a group's name in numerical checks, for rotations that need gains of one."""
SHOWN = 6
"""The number of groups that the one-line form of a symmetry names."""
ADDED = ("scales and signs of {} act on the weight plus a number", "scales of {} act on the exponential of the weight")
"""Notes on parameters that a model changes before it multiplies by them: by adding a number, or by an exponential."""


@dataclass(frozen=True, repr=False)
class Symmetry:
    """The symmetry of a model: groups of transformations of its parameters, and the axes on which they act.

    For elements g and h and parameters p, three laws hold: `act(identity(), p) == p`,
    `act(g, act(h, p)) == act(compose(g, h), p)`, and `act(inverse(g), act(g, p)) == p`. The networks p and `act(g, p)`
    compute the same function.

    Attributes:
        groups: The groups, which are the factors of the symmetry.
        shapes: The shapes of the parameters and buffers of the network on which the symmetry was found. In a symmetry
            written by hand, unknown sizes are 0.
        frozen: The axes of parameters on which no group acts, each with the reason.
        unknown: The operators for which discovery has no rule. The axes of tensors that enter an unknown operator are
            frozen.
        unused: The parameters that do not influence the compared outputs.
        notes: Notes that are printed below the table of the symmetry.
        buffers: The names of buffers on which groups act (running statistics). Matching does not compare buffers.
        structure: Buffers that training does not change (masks, permutations, tables), and parameters that the user
            declared as structure. A group exchanges two units only if the entries of both units in all structure
            tensors are equal. `Group.classes` gives the classes of exchangeable units.
        tied: For each tensor with several names in the model, the tuple of these names. A checkpoint may store a tied
            tensor under only one of its names.
        ones: The gains that must be exactly one for the symmetry to hold (`rg.discovery.fold` sets gains to one). No
            group acts on a gain that must be one. Some groups of a symmetry exist only because certain gains are one.
        readers: The axes (parameter, axis) on which groups act and along which a layer sums over units. Along a reader
            axis, the layer multiplies its input by the parameter. The set is empty if reader axes are not known.
        gains: The parameters that multiply activations unit by unit, in graph order.
        translations: The families of vectors that can be added to parameters, in the order in which `split` subtracts
            them.
        added: Constants that the model adds to parameters with one axis before it multiplies by them. The constant is 1
            for gains that are stored as `weight` and used as `1 + weight`. If the model multiplies by `1 + layer(x)`,
            the constant belongs to the bias of the layer, or to ranges (start, stop, constant) of the bias. All groups
            act on the sums of parameter and constant. If the model uses only exponentials `exp(rate * weight)` of a
            parameter of any shape, groups act on the exponentials, and `Exponent(rate)` takes the place of the
            constant.
    """

    groups: tuple[Group, ...]
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    frozen: tuple[Frozen, ...] = ()
    unknown: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    tied: tuple[tuple[str, ...], ...] = ()
    ones: tuple[str, ...] = ()
    readers: tuple[tuple[str, int], ...] = ()
    structure: tuple[str, ...] = ()
    gains: tuple[str, ...] = ()
    translations: tuple[TranslationFamily, ...] = ()
    added: Mapping[str, Added] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = [group.name for group in self.groups]
        for what, several in {"group": names, "translation": [family.name for family in self.translations]}.items():
            if len(set(several)) < len(several):
                twice = sorted({name for name in several if several.count(name) > 1})
                raise ValueError(f"{what} names must be unique, but {twice} occur more than once")
        for group in self.groups:
            for base in group.within:
                if base not in names:
                    raise ValueError(
                        f"group {group.name!r} is repeated within {base!r}, which is not a group; add that group"
                    )
                missing = set(self[base].within) - set(group.within)
                if missing:
                    raise ValueError(
                        f"group {group.name!r} is repeated within {base!r}, which is itself within {sorted(missing)}; "
                        "name those in its `within` too"
                    )

    def __getitem__(self, name: str) -> Group:
        for group in self.groups:
            if group.name == name:
                return group
        raise KeyError(
            f"there is no group {name!r}; the groups are {[g.name for g in self.groups][:20]}; name one of them"
        )

    def __repr__(self) -> str:
        listed = ", ".join(f"{group.name} ({group.kind}, {group.size or '?'})" for group in self.groups[:SHOWN])
        more = ", ..." if len(self.groups) > SHOWN else ""
        return f"Symmetry({count(self.groups, 'group')}{': ' if listed else ''}{listed}{more})"

    def __str__(self) -> str:
        notes = self.notes
        for is_exponent, what in enumerate(ADDED):
            if names := [n for n, number in self.added.items() if isinstance(number, Exponent) == bool(is_exponent)]:
                listed = ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
                notes = (f"{what.format(count(names, 'gain'))}: {listed}", *notes)
        return render(self.groups, self.frozen, self.unknown, self.unused, self.structure, notes, self.translations)

    def plot(self) -> "Figure":
        """Plot the symmetry: layers as rows, groups as colored lines across the rows, and frozen axes in gray.

        `regauge discover MODEL --page PAGE` writes the same plot as a page, together with sizes and the reason for each
        frozen axis.

        Raises:
            ValueError: The symmetry has neither groups nor frozen axes.
        """
        from regauge.report.thread_figures import threads_figure

        if not self.groups and not self.frozen:
            raise ValueError(
                "the symmetry has no groups and no frozen axes: there is nothing to draw; look at it with "
                "`print(symmetry)`"
            )
        return threads_figure(self.groups, self.shapes, self.frozen, self.readers)

    @property
    def log10_order(self) -> float:
        """Return log10 of the number of discrete elements: permutations, signs and half-period shifts of all copies."""
        return sum(group.log10_order * self.count_copies(group.name) for group in self.groups)

    def count_copies(self, group: str) -> int:
        """Return the number of independent copies of a group: one for each index of the groups in `group.within`."""
        return math.prod(self[base].size for base in self[group].within)

    @property
    def moves_statistics(self) -> bool:
        """Return whether scales change running statistics, which then depend on the choice of scales."""
        places = [place for group in self.groups for place in group.placements if any(place.scale)]
        return any(place.parameter in self.buffers for place in places)

    @property
    def dimension(self) -> int:
        """Return the number of continuous degrees of freedom: scales, rotations and matrices, and translations."""
        total = sum(family.size for family in self.translations if not family.is_stored_only)
        for group in self.groups:
            n = group.size - group.keeps_ones
            one = {"linear": n * n, "orthogonal": n * (n - 1) // 2, "none": group.scales * n}[group.matrix]
            total += one * self.count_copies(group.name)
        for name in self.rotatable if self.is_sized else ():
            n = self[name].size - (self[name].behind_gains == "centered")
            total += n * (n - 1) // 2
        return total

    def identity(self, batch: Sequence[int] = ()) -> Element:
        """Return the identity element, which changes no parameter."""
        return self._make(lambda groups: _element.identity(groups, tuple(batch)), tuple(batch))

    def random(
        self, generator: torch.Generator, parts: Sequence[str] | None = None, batch: Sequence[int] = ()
    ) -> Element:
        """Return a random element of the whole symmetry.

        Every part of the element preserves the function for any running statistics. Permutations, signs and rotations
        are uniformly random. Scales and singular values lie in [1/2, 2]. The vectors that translations add are sampled
        from a normal distribution with the scale of typical weights.

        Args:
            generator: The source of randomness.
            parts: The parts that may differ from the identity: some of "permutation", "sign", "scale", "shift",
                "linear", "translation" and "rotation". Default: all parts. In 16-bit networks, translations and
                rotations lose precision. `Symmetry.compile` and the transformation of single tensors do not support
                translations and rotations.
            batch: The leading batch shape of the element.

        Raises:
            TypeError: `generator` is not a `torch.Generator`.
            ValueError: A part name is unknown.
        """
        require_generator(generator)
        require_plain("parts", parts, Sequence | None)
        chosen = ALL_PARTS if parts is None else tuple(parts)
        _element.require_parts(chosen)
        if self.is_sized and not self._unmet:
            found = _element.random(self.groups, generator, chosen, tuple(batch))
        else:
            seed = int(torch.randint(1 << 62, (), generator=generator, device=generator.device))
            found = DeferredElement(
                lambda groups: _element.random(groups, torch.Generator().manual_seed(seed), chosen, tuple(batch)),
                tuple(batch),
            )
        if _element.TRANSLATION in chosen and self.translations:
            found = found.translated(chart.random_translation(self, generator, tuple(batch)))
        if _element.ROTATION in chosen and self.rotatable:
            found = found.rotated(chart.random_rotation(self, generator, tuple(batch)))
        return found

    def compose(self, left: Element, right: Element) -> Element:
        """Return the product: `act(compose(left, right), p) == act(left, act(right, p))`."""
        _element.require_elements(left, right)
        batch = np.broadcast_shapes(left.batch, right.batch)
        found = self._make(
            lambda groups: _element.compose(groups, materialize(left, groups), materialize(right, groups)),
            batch,
            left,
            right,
        )
        if left.translation or right.translation:
            found = found.translated(chart.compose_translations(self, left, right, batch))
        if left.rotation or right.rotation:
            found = found.rotated(chart.compose_rotations(self, left, right, batch))
        return found

    def inverse(self, element: Element) -> Element:
        """Return the element that undoes `element`."""
        _element.require_elements(element)
        found = self._make(
            lambda groups: _element.inverse(groups, materialize(element, groups)), element.batch, element
        )
        if element.translation:
            carrier = chart.Carrier(self, found)
            back = {name: -carrier.carry(name, vector) for name, vector in element.translation.items()}
            found = found.translated(back)
        if element.rotation:
            undone = {name: carry_rotation(self, found, name, q.mT) for name, q in element.rotation.items()}
            found = found.rotated(undone)
        return found

    @property
    def is_sized(self) -> bool:
        """Return whether the sizes of all groups are known.

        If a user wrote a symmetry by hand, its sizes are taken from the first parameters that are passed to it.
        """
        return all(group.size for group in self.groups)

    @cached_property
    def _unmet(self) -> bool:
        """Return whether a group permutes structure tensors (such as masks) whose entries are not known yet."""
        return any(not group.classes for group in self._keeping)

    @cached_property
    def _keeping(self) -> tuple[Group, ...]:
        """Return the groups that permute the units of structure tensors, such as masks."""
        held = frozenset(self.structure)
        return tuple(
            g for g in self.groups if g.is_permuted and g.size > 1 and any(p.parameter in held for p in g.placements)
        )

    def act(self, element: Element, params: Mapping[str, Tensor], *, skip: Collection[str] = ()) -> Params:
        """Apply an element to a network.

        An element never changes the function that a network computes.

        The action is a left action. If the element has a batch shape, each element acts on one network of a population
        (one leading model axis on every tensor). A single element acts on all networks of a population.

        Args:
            element: The element, with one value per group.
            params: Parameters and buffers, which are not modified. Tensors on which no group acts are not copied.
            skip: The names of tensors that are left out of the result, because the caller already has them.

        Returns:
            New parameters with the same names, shapes, dtypes and devices. Tensors on which no group acts share memory
            with `params`.

        Raises:
            KeyError: `element` lacks the value of a group, or a parameter on which a group acts is missing.
            ValueError: A parameter has another shape than the symmetry expects, or is not of a floating-point dtype.
        """
        _element.require_elements(element)
        bound = self._fit(params)
        if isinstance(element, DeferredElement):
            element = materialize(element, bound.given(params).groups)
        for group in bound.groups:
            if group.name not in element:
                raise KeyError(
                    f"the element has no value for group {group.name!r}; it belongs to another symmetry: draw it from "
                    "this one"
                )
        is_charted = bool(element.translation or element.rotation)
        lead = chart.count_lead(bound, params) if is_charted else 0
        if is_charted and is_large(params, lead, element.batch):
            return act_in_turn(bound, element, params, skip, lead)
        moved = {**params, **bound._act_on(element, {name: t for name, t in params.items() if name not in skip})}
        return chart.translate(bound, element, moved, skip) if is_charted else moved

    def split(self, params: Mapping[str, Tensor]) -> tuple[Params, dict[str, Tensor]]:
        """Split a network into its representative and its coordinates.

        The representative computes the same function as the network. In the representative, the parameter entries that
        a translation family can change are zero, or have mean zero. A gain of the representative is one if all later
        layers are linear in this gain. Networks that differ only by translations and gains have the same
        representative, but different coordinates.

        Args:
            params: One network, or a population (one leading model axis on every tensor). The tensors are not modified.

        Returns:
            The representative and the coordinates. The representative has the dtypes of the network, except that 16-bit
            tensors become float32, because rounding would change the function. The coordinates map names to tensors in
            the next wider dtype. The coordinates are the vector that was subtracted for each translation family, and
            the original entries of each gain.

        Raises:
            KeyError: A parameter on which the symmetry acts is missing.
            ValueError: The network has another architecture.
        """
        bound = self._fit(params)
        chart.require_parameters(bound, params)
        lead = chart.count_lead(bound, params)
        if is_large(params, lead):
            return split_in_turn(bound, params, lead)
        wide, coordinates = chart.split(bound, dict(params), lead)
        kept = {name: t.float() if t.is_floating_point() and t.itemsize < 4 else t for name, t in params.items()}
        rounded = chart.round_alike_given(wide, kept, chart.charted(bound))
        return {name: rounded[name] if name in chart.charted(bound) else t for name, t in params.items()}, coordinates

    def join(self, representative: Mapping[str, Tensor], coordinates: Mapping[str, Tensor]) -> Params:
        """Return the network that has a given representative and given coordinates; the inverse of `split`.

        For given coordinates, the network is an affine function of the representative, unless two parameters in
        succession multiply the vector that a translation adds. A linear path between two representatives therefore
        becomes a linear path between the networks. The joined network has the dtypes of the representative.

        Raises:
            KeyError: A coordinate or a parameter is missing.
            ValueError: The shape of a coordinate differs from the shape of its translation family.
        """
        bound = self._fit(representative)
        chart.require_parameters(bound, representative)
        chart.require_coordinates(bound, coordinates)
        wide = chart.join(bound, dict(representative), coordinates, chart.count_lead(bound, representative))
        return chart.round_alike_given(wide, representative, chart.charted(bound))

    def on_representatives(self, *, rotate: bool = False) -> "Symmetry":
        """Return the symmetry of the representatives that `split` returns.

        Representatives have gains of one, and no translations act on them.

        Args:
            rotate: Whether groups with a value in `behind_gains` act on representatives by rotations instead of
                permutations. Rotations of representatives are not valid for networks in which a gain is zero.
        """
        return on_representatives(self, self.rotatable if rotate else ())

    def stored_in(self, names: Collection[str]) -> "Symmetry":
        """Return this symmetry without the translation families that change or read a parameter outside `names`.

        Checkpoints do not store tensors that models recompute, such as tables of sines.
        """
        kept = tuple(
            family
            for family in self.translations
            if all(n in names for n in (*family.parameters, *family.coefficients))
        )
        return self if len(kept) == len(self.translations) else replace(self, translations=kept)

    @property
    def rotatable(self) -> tuple[str, ...]:
        """Return the names of the groups that act by rotations once all gains are one.

        Groups that act on structure tensors are not rotatable.
        """
        return rotatable(self) if any(group.behind_gains != "none" for group in self.groups) else ()

    def translation(self, name: str) -> TranslationFamily:
        """Return the translation family with a given name.

        Raises:
            KeyError: The symmetry has no translation family with this name.
        """
        for family in self.translations:
            if family.name == name:
                return family
        raise KeyError(f"there is no translation {name!r}; they are {[one.name for one in self.translations][:20]}")

    def act_(self, element: Element, params: Params) -> None:
        """Apply an element in place, one tensor at a time, for models that fit in memory only once.

        This method raises the same errors as `act`.
        """
        bound = self._fit(params)
        if isinstance(element, DeferredElement):
            element = materialize(element, bound.given(params).groups)
        for name in bound.sites:
            params[name].copy_(bound._act_on(element, {name: params[name]})[name])
        if element.translation or element.rotation:
            for name, tensor in chart.translate(bound, element, params).items():
                if tensor is not params[name]:
                    params[name].copy_(tensor)

    def compile(self, element: Element) -> "CompiledElement":
        """Compile an element without matrices into one gather over all parameters, for repeated use.

        Raises:
            ValueError: The element has matrices. Matrices of orthogonal and linear groups mix entries, which a gather
                cannot do.
        """
        if element.translation or element.rotation:
            raise ValueError(
                "the element translates or rotates, which a compiled element cannot do; use `symmetry.act`, or compile "
                "the element without: `element.translated({}).rotated({})`"
            )
        rotated = [group.name for group in self.groups if group.matrix != "none"]
        if rotated:
            raise ValueError(
                f"groups {rotated[:3]} act by matrices, which a compiled element cannot do; use `symmetry.act`, or "
                "compile the symmetry without them"
            )
        from regauge.core.compiled import compile_element

        return compile_element(self.sites, element, self.shapes)

    def _act_on(self, element: Element, params: Mapping[str, Tensor]) -> Params:
        sites = {name: local for name, local in self.sites.items() if name in params}
        return _act.act(self.groups, sites, element, params, {name: len(self.shapes[name]) for name in sites})

    @cached_property
    def memory(self) -> dict[Hashable, Any]:
        """Return the cache of results that depend only on this symmetry, as `regauge.core.remembered` explains."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @cached_property
    def sites(self) -> dict[str, list[_act.Site]]:
        """Return, for each parameter, its placements resolved to axis indices."""
        if not self.is_sized:
            raise ValueError(
                "the sizes of this hand-written symmetry are not known yet; call `symmetry.bind(params)` first and use "
                "its result"
            )
        touched = dict.fromkeys(p.parameter for group in self.groups for p in group.placements)
        return {name: _act.resolve(self.groups, name, self.shapes[name], self._constant(name)) for name in touched}

    def _constant(self, name: str) -> float | Tensor | Exponent:
        added = self.added.get(name, 0.0)
        return constant(added, math.prod(self.shapes[name])) if isinstance(added, tuple) else added

    @cached_property
    def on_sums(self) -> "Symmetry":
        """Return this symmetry in a form that acts linearly on `sums(params)`."""
        return replace(self, added={}) if self.added else self

    @cached_property
    def on_changes(self) -> "Symmetry":
        """Return this symmetry in the form that acts on changes of parameters.

        Scales add a number to a parameter of which the model uses the exponential. Therefore such scales leave changes
        of the parameter unchanged.
        """

        def place(one: Placement) -> Placement:
            is_kept = isinstance(self.added.get(one.parameter), Exponent)
            return replace(one, scale=(0,) * len(one.scale)) if is_kept else one

        groups = tuple(replace(group, placements=tuple(map(place, group.placements))) for group in self.groups)
        return replace(self.on_sums, groups=groups)

    @cached_property
    def on_data(self) -> "Symmetry":
        """Return this symmetry without the translations that keep the function only with the stored running statistics.

        Elements of the returned symmetry keep a network's function even if running statistics are recomputed.
        """
        kept = tuple(family for family in self.translations if not family.is_stored_only)
        return self if len(kept) == len(self.translations) else replace(self, translations=kept)

    def sums(self, params: Mapping[str, Tensor]) -> Params:
        """Return the parameters, plus the constants that the model adds to some of them before use; see `added`."""
        return sums(self.added, params) if self.added else dict(params)

    def from_sums(self, summed: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> Params:
        """Return the parameters, computed from sums of parameters and the constants that the model adds to them.

        If a parameter in `given` has the same sum, that parameter itself is returned.
        """
        return from_sums(self.added, summed, given) if self.added else dict(summed)

    @property
    def unit_gains(self) -> dict[str, float]:
        """Return the required value of each parameter in `ones`: 1, or 0 if the model adds 1 to the parameter."""
        one = torch.ones((), dtype=torch.float64)
        return {name: float(plus(one, self.added.get(name, 0.0), -1)) for name in self.ones}

    def bind(self, params: Mapping[str, Tensor]) -> "Symmetry":
        """Return this symmetry with the sizes and unit classes that parameters have, after checking the parameters.

        Raises:
            KeyError: A parameter on which a group acts is missing.
            ValueError: Shapes do not match, or a group acts on a tensor without floating-point weights, such as
                quantized weights.
        """
        return self._fit(params).given(params)

    def _fit(self, params: Mapping[str, Tensor]) -> "Symmetry":
        """Return this symmetry with the sizes that parameters have, after checking the parameters.

        This method raises the same errors as `bind`.
        """
        if not isinstance(params, Mapping):
            require_tensors(params)  # the error names its type
        touched = dict.fromkeys(p.parameter for group in self.groups for p in group.placements)
        missing = {name for name in touched if name not in params}
        spared = {name for names in self.tied if any(n in params for n in names) for name in names} & missing
        if spared:
            return self._without(frozenset(spared))._fit(params)
        if missing:
            if any(isinstance(value, Mapping) for value in params.values()):
                require_tensors(params)  # the error names the key of the network in a training checkpoint
            raise KeyError(
                f"the parameters lack {shorten(sorted(missing))}, which the symmetry moves; they have "
                f"{shorten(list(params)) or 'no tensors'}; load the checkpoint of the symmetry's model"
            )
        shapes, leads = dict(self.shapes), set()
        for name in touched:
            known = self.shapes[name]
            if not isinstance(params[name], Tensor):
                require_tensors(params)  # the error names its type
            there = tuple(params[name].shape)
            lead = len(there) - len(known)
            here = there[max(lead, 0) :]
            if lead < 0 or any(a not in (0, b) for a, b in zip(known, here, strict=True)):
                raise ValueError(
                    f"{name!r} has shape {there}, but the symmetry expects {known} (after an optional model axis); "
                    "the parameters are of another architecture: discover the symmetry of their model"
                )
            leads.add(lead)
            shapes[name] = here
        require_movable(self.groups, params, self.buffers)
        if len(leads) > 1:
            raise ValueError("some parameters have a leading model axis and others do not; stack all or none")
        if shapes == dict(self.shapes) and self.is_sized:
            return self
        return self._with_shapes(tuple((name, tuple(shape)) for name, shape in shapes.items()))

    def given(self, params: Mapping[str, Tensor]) -> "Symmetry":
        """Return this symmetry with the classes of exchangeable units, computed from one network or a population.

        Tensors on the meta device have no entries, so the classes of units stay unchanged.
        """
        held = [name for name in self.structure if name in self.sites and name in params] if self._keeping else []
        if any(params[name].is_meta for name in held):
            return self
        sites, ndims = {name: self.sites[name] for name in held}, {name: len(self.shapes[name]) for name in held}
        return self._with_classes(tuple((g.name, classes_of(g, sites, params, ndims)) for g in self._keeping))

    @remembered
    def _with_classes(self, items: tuple[tuple[str, tuple[int, ...]], ...]) -> "Symmetry":
        """Return this symmetry with the given classes of exchangeable units."""
        classes = {group.name: group.classes for group in self.groups} | dict(items)
        if all(group.classes == classes[group.name] for group in self.groups):
            return self
        return replace(self, groups=tuple(replace(group, classes=classes[group.name]) for group in self.groups))

    @remembered
    def _without(self, spared: frozenset[str]) -> "Symmetry":
        """Return this symmetry without the placements on tied names that a checkpoint omits."""
        kept = [tuple(p for p in group.placements if p.parameter not in spared) for group in self.groups]
        groups = (replace(group, placements=p) for group, p in zip(self.groups, kept, strict=True))
        names = {name: next(n for n in every if n not in spared) for every in self.tied for name in every}
        translations = tuple(family.renamed(names) for family in self.translations)
        added = {names.get(name, name): number for name, number in self.added.items()}
        return replace(self, groups=tuple(groups), tied=(), translations=translations, added=added)

    @remembered
    def _with_shapes(self, items: tuple[tuple[str, tuple[int, ...]], ...]) -> "Symmetry":
        """Return this symmetry with the given shapes of parameters, from which the sizes of all groups follow."""
        shapes = dict(items)
        return replace(self, groups=tuple(set_sizes(group, shapes) for group in self.groups), shapes=shapes)

    def require_ones(self, params: Mapping[str, Tensor]) -> None:
        """Raise an error if a gain that the symmetry requires to be one is not one.

        Raises:
            ValueError: A gain that the symmetry requires to be one is not one.
        """
        wrong = [n for n, one in self.unit_gains.items() if n in params and not bool((params[n] == one).all())]
        if wrong:
            raise ValueError(
                f"this symmetry holds for networks whose gains are one, but {wrong[0]!r} is not ({len(wrong)} gains in "
                "all); fold the gains into the layers behind them with `rg.discovery.fold`, or discover the symmetry "
                "without `ones`"
            )

    def verify(
        self,
        module: nn.Module,
        example_inputs: Any,
        example_kwargs: Mapping[str, Any] | None = None,
        *,
        generator: torch.Generator,
        outputs: Outputs = None,
        each_group: bool = True,
    ) -> Check:
        """Check the symmetry numerically: a random element must leave the module's outputs unchanged.

        The check runs in float64 on a copy of the module in evaluation mode. First, parameters and buffers are
        perturbed, because many wrong groups change nothing if biases are zero and gains are one.

        Next, all groups of the symmetry act together, with independent random values. Correct groups do not change the
        outputs, so a wrong group is detected even if it acts together with correct groups. The effects of two wrong
        groups cancel only if their random values match by chance. Therefore groups with few possible values are also
        tested alone. If the outputs change, every group is tested alone.

        Args:
            module: The model. The model must not be on the meta device.
            example_inputs: Example inputs, as for `discover`. Floating-point inputs are converted to float64.
            example_kwargs: Example keyword arguments of the model.
            generator: The source of randomness for the elements and for the perturbation of the parameters.
            outputs: The outputs of the model that are compared. Pass the same `outputs` as to `discover`.
            each_group: Whether groups are also tested alone. If False, only an element of all groups together is
                tested, which takes two evaluations of the module.

        Returns:
            The largest relative change of the outputs: in total, for each group, and for each translation family.
        """
        require_module(module)
        require_generator(generator)
        bound = self.bind(module.state_dict())
        if any(t.is_meta for t in (*module.parameters(), *module.buffers())):
            raise ValueError(
                "the module is on the meta device, where nothing can be computed; verify a small configuration of the "
                "same architecture, or materialize the module with `module.to_empty(device='cpu')`"
            )
        model = (module, *example_arguments(example_inputs, example_kwargs), outputs)
        element, blank = bound.random(generator), bound.identity()
        if bound.translations != bound.on_data.translations:
            element = element.translated(chart.random_translation(bound, generator, (), is_stored=True))

        parts = {name: blank.replace(name, value) for name, value in element.items()}
        parts |= {name: blank.translated({name: vector}) for name, vector in element.translation.items()}
        parts |= {f"{name}{BEHIND}": blank.rotated({name: q}) for name, q in element.rotation.items()}
        few = {group.name for group in bound.groups if not group.has_many_values}

        def compare(probe: Probe, tolerance: float, trial: Trial, *, is_last: bool) -> Check:
            def change(one: Element) -> float:
                return relative_change(trial.reference, probe(bound.act(one, trial.params)))

            total = change(element)
            chosen = parts.keys() & few if total <= tolerance else parts.keys() if is_last else ()
            alone = {name: change(parts[name]) for name in (chosen if each_group else ())}
            per_group = {name: alone.get(name, total) for name in (parts if each_group else ())}
            return Check(max([total, *alone.values()]), per_group, tolerance, frozenset(alone), probe.evaluations)

        first = first_trial(*model, self.unit_gains, generator)
        check = compare(*first, is_last=False) if first is not None else None
        if check is not None and check.ok:
            return check
        del first  # Frees a copy of the model and of its parameters before new copies are made.
        # If a model amplifies rounding errors, as chains of sines do, outputs change although the function does not.
        probe, tolerance = exact_probe(*model)
        trial = away(probe.params, set(probe.buffers), self.unit_gains, generator, probe, tolerance)
        if not trial.is_finite:
            raise ValueError(
                "the model's outputs are NaN or Inf on these inputs, so nothing can be compared; give example inputs "
                "that it can handle"
            )
        last = compare(probe, tolerance, trial, is_last=True)
        return replace(last, evaluations=last.evaluations + (0 if check is None else check.evaluations))

    def to_json(self) -> str:
        """Return the symmetry as JSON text in a stable format.

        Fields with default values are omitted, which makes the text easy to edit.
        """
        values = {field.name: getattr(self, field.name) for field in fields(self)[1:]}
        late = ("ones", "readers", "structure", "gains", "translations", "added")
        rest = {name: value for name, value in values.items() if value or name not in late}
        if self.translations:
            rest["translations"] = write_translations(self.translations)
        if self.added:
            rest["added"] = {n: asdict(c) if isinstance(c, Exponent) else c for n, c in self.added.items()}
        return symmetry_text.write(self.groups, {**rest, "frozen": [astuple(row) for row in self.frozen]})

    @classmethod
    def from_json(cls, text: str) -> "Symmetry":
        """Read a symmetry from the text that `to_json` returned.

        Raises:
            ValueError: The text does not describe a symmetry, or comes from a newer version of the format.
        """
        require_plain("the text", text, str)
        groups, rest = symmetry_text.read(text)
        rest["translations"] = read_translations(rest.get("translations", ()), rest.get("shapes", {}))
        if isinstance(rest.get("added"), dict):
            made = {n: Exponent(c["rate"]) for n, c in rest["added"].items() if _is_exponent(c)}
            rest["added"] = {**rest["added"], **made}
        require_fields({name: value for name, value in rest.items() if name != "groups"}, cls, "the symmetry")
        negative = [name for name, shape in rest.get("shapes", {}).items() if any(length < 0 for length in shape)]
        if negative:
            raise ValueError(
                f"the shape of {negative[0]!r} is {rest['shapes'][negative[0]]}, but lengths are at least 0"
            )
        shapes = rest.get("shapes", {})
        mixed = {p.parameter for g in groups for p in g.placements if g.matrix != "none" or any(p.sign)}
        for name, number in rest.get("added", {}).items():
            length = math.prod(shapes.get(name, ()))
            if isinstance(number, Exponent):
                fits = name in shapes and name not in mixed
            else:
                ranges = number if isinstance(number, tuple) else ((0, length, number),)
                fits = all(0 <= start < stop <= length and math.isfinite(c) for start, stop, c in ranges)
                fits &= len(shapes.get(name, ())) == 1
            if not fits:
                raise ValueError(f"{number} cannot be added to {name!r}, which is no gain of this symmetry")
        known = {field.name: rest[field.name] for field in fields(cls)[1:] if field.name in rest}
        return cls(groups, **{**known, "frozen": tuple(Frozen(*row) for row in rest.get("frozen", ()))})

    @classmethod
    def from_axes(
        cls,
        axes: Mapping[str, Sequence[str | None]],
        *,
        kinds: Mapping[str, Kind] | None = None,
        omegas: Mapping[str, float] | None = None,
        buffers: Sequence[str] = (),
    ) -> "Symmetry":
        """Return a symmetry from a dictionary that gives, for each axis of each parameter, the name of a group or None.

        The element acts on axis 0 of a parameter, and its inverse acts on every other axis, as in torch's (out, in,
        ...) weights. A suffix such as `"h^-1"` or `"h^+1"` chooses whether the inverse of the group acts on an axis.
        For example, the feature axis of an embedding is `"h^+1"`. If a flattened axis repeats each unit k times in a
        row, write `"h*k"`. The sizes of groups are taken from the first parameters that are passed to the symmetry.

        Args:
            axes: The groups of the axes, for example
                `{"fc1.weight": ("h1", None), "fc1.bias": ("h1",), "fc2.weight": (None, "h1")}`.
            kinds: The kind of each group. Default: every group is of kind "permutation". For attention heads and other
                nested groups, build `Group` and `Placement` objects instead.
            omegas: The frequency of the sine activation for each group of kind "dihedral". Default: frequency 1.
            buffers: The names of buffers on which the symmetry acts, such as "bn.running_mean".

        Raises:
            ValueError: A kind or name is unknown, or the text of an axis is malformed.
        """
        require_plain("axes", axes, Mapping)
        for name, row in axes.items():
            require_plain(f"the name {name!r} in axes", name, str)
            require_plain(f"the entry {name!r} of axes", row, Sequence)
            for entry in row:
                require_plain(f"an entry of {name!r} in axes", entry, str | None)
        require_plain("kinds", kinds, Mapping | None)
        shapes = {name: (0,) * len(row) for name, row in axes.items()}
        groups = groups_from_axes(axes, dict(kinds or {}), dict(omegas or {}))
        return cls(groups, shapes, buffers=tuple(buffers), readers=readers_from_axes(axes))

    def _make(self, make: Make, batch: tuple[int, ...], *given: Element) -> Element:
        is_known = self.is_sized and not any(isinstance(one, DeferredElement) for one in given)
        return make(self.groups) if is_known else DeferredElement(make, batch)


def _is_exponent(value: object) -> bool:
    """Return whether a JSON value describes an `Exponent`."""
    rate = value.get("rate") if isinstance(value, dict) and len(value) == 1 else None
    return isinstance(rate, float) and math.isfinite(rate) and rate != 0

"""A symmetry: the groups of a model, where they act, and the operations on their elements."""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from regauge.core import act as _act
from regauge.core import element as _element
from regauge.core.element import PARTS, Element
from regauge.core.groups import Group, Kind, Placement
from regauge.core.params import Params
from regauge.core.table import render
from regauge.core.verification import Check, verify

FORMAT = "regauge.symmetry"
VERSION = 1


@dataclass(frozen=True)
class Frozen:
    """An axis that no group moves, and why."""

    parameter: str
    axis: int
    size: int
    reason: str


@dataclass(frozen=True)
class Symmetry:
    """The groups of a model and the axes that they act on.

    Its laws, for elements g and h and parameters p:
    `act(identity(), p) == p`, `act(g, act(h, p)) == act(compose(g, h), p)`,
    `act(inverse(g), act(g, p)) == p`, and the network computes the same function before and after.

    Attributes:
        groups: The factors.
        shapes: Shapes of the parameters and buffers that the symmetry was found on; sizes that a
            specification by hand does not know are 0.
        frozen: Axes that nothing moves, each with the reason.
        unknown: Operators without a rule; they froze what they touch.
        unused: Parameters that do not influence the outputs that count.
        notes: Sentences that a reader of the table should see.
        buffers: Names that move with the network but are no parameters (running statistics): matching does
            not compare them.
    """

    groups: tuple[Group, ...]
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    frozen: tuple[Frozen, ...] = ()
    unknown: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = [group.name for group in self.groups]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"group names must be unique, but {twice} occur more than once")
        for group in self.groups:
            for base in group.within:
                if base not in names:
                    raise ValueError(f"group {group.name!r} is repeated within {base!r}, which is not a group")
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
        raise KeyError(f"there is no group {name!r}; the groups are {[g.name for g in self.groups][:20]}")

    def __str__(self) -> str:
        return render(self.groups, self.frozen, self.unknown, self.unused, self.notes)

    @property
    def log10_order(self) -> float:
        """log10 of the number of discrete elements: permutations, signs, half-period shifts, of all copies."""
        sizes = {group.name: group.size for group in self.groups}
        return sum(group.log10_order * math.prod(sizes[b] for b in group.within) for group in self.groups)

    @property
    def dimension(self) -> int:
        """Number of continuous parameters: scales, rotations and invertible matrices, of all copies."""
        sizes = {group.name: group.size for group in self.groups}
        total = 0
        for group in self.groups:
            n = group.size
            one = {"linear": n * n, "orthogonal": n * (n - 1) // 2, "none": group.scales * n}[group.matrix]
            total += one * math.prod(sizes[b] for b in group.within)
        return total

    def identity(self, batch: Sequence[int] = ()) -> Element:
        """The element that changes nothing."""
        self._require_sizes()
        return _element.identity(self.groups, tuple(batch))

    def random(
        self, generator: torch.Generator, parts: Sequence[str] | None = None, batch: Sequence[int] = ()
    ) -> Element:
        """A random element: uniform permutations, signs and rotations; scales and singular values in [1/2, 2].

        Args:
            generator: Where chance comes from.
            parts: Restricts it to some of "permutation", "sign", "scale", "shift", "linear".
            batch: Leading batch shape of the element.

        Raises:
            ValueError: A part is unknown.
        """
        self._require_sizes()
        return _element.random(self.groups, generator, PARTS if parts is None else tuple(parts), tuple(batch))

    def compose(self, left: Element, right: Element) -> Element:
        """The product: `act(compose(left, right), p) == act(left, act(right, p))`."""
        return _element.compose(self.groups, left, right)

    def inverse(self, element: Element) -> Element:
        """The element that undoes `element`."""
        return _element.inverse(self.groups, element)

    def act(self, element: Element, params: Mapping[str, Tensor]) -> Params:
        """Move a network along its orbit: the result computes the same function.

        This is a left action. A batched element moves a population (one leading model axis on every
        tensor), each network by its own element; a single element moves all networks of a population alike.

        Args:
            element: One value per group.
            params: Parameters and buffers, unchanged. Names that no group touches pass through.

        Returns:
            New parameters of the same names, shapes, dtypes and devices. Tensors that nothing moves are shared.

        Raises:
            KeyError: A group has no value in `element`, or a parameter that a group moves is missing.
            ValueError: A parameter does not have the shape that the symmetry expects.
        """
        bound = self.bind(params)
        for group in bound.groups:
            if group.name not in element:
                raise KeyError(f"the element has no value for group {group.name!r}; it belongs to another symmetry")
        ndims = {name: len(bound.shapes[name]) for name in bound.sites}
        return _act.act(bound.groups, bound.sites, element, params, ndims)

    @cached_property
    def sites(self) -> dict[str, list[_act.Site]]:
        """Every placement resolved to axis indices, by parameter."""
        self._require_sizes()
        touched = dict.fromkeys(p.parameter for group in self.groups for p in group.placements)
        return {name: _act.resolve(self.groups, name, self.shapes[name]) for name in touched}

    def bind(self, params: Mapping[str, Tensor]) -> "Symmetry":
        """This symmetry with every size known, checked against parameters.

        Raises:
            KeyError: A parameter that a group moves is missing.
            ValueError: Shapes do not match.
        """
        touched = dict.fromkeys(p.parameter for group in self.groups for p in group.placements)
        missing = [name for name in touched if name not in params]
        if missing:
            raise KeyError(
                f"the parameters lack {missing[:5]} ({len(missing)} in all), which the symmetry moves; "
                f"they have {list(params)[:5]}, ...; load the checkpoint of the model that the symmetry was found on"
            )
        shapes, leads = dict(self.shapes), set()
        for name in touched:
            known = self.shapes[name]
            there = tuple(params[name].shape)
            lead = len(there) - len(known)
            here = there[max(lead, 0) :]
            if lead < 0 or any(a not in (0, b) for a, b in zip(known, here, strict=True)):
                raise ValueError(
                    f"{name!r} has shape {there}, but the symmetry expects {known} (after an optional model axis); "
                    "the parameters are of another architecture"
                )
            leads.add(lead)
            shapes[name] = here
        if len(leads) > 1:
            raise ValueError("some parameters have a leading model axis and others have not; stack all or none")
        if shapes == dict(self.shapes) and all(group.size for group in self.groups):
            return self
        return replace(self, groups=tuple(_sized(group, shapes) for group in self.groups), shapes=shapes)

    def verify(
        self,
        module: nn.Module,
        example_inputs: tuple[Any, ...],
        example_kwargs: Mapping[str, Any] | None = None,
        *,
        generator: torch.Generator,
        outputs: "Callable[[Any], Any] | str | Sequence[str] | None" = None,
    ) -> Check:
        """Prove the symmetry numerically: random elements must leave the module's outputs unchanged.

        Works in float64 on a copy of the module in evaluation mode, with parameters and buffers moved away
        from their initial values (at initialization many tests are vacuous: zero biases, unit gains).

        Args:
            module: The model, on a real device.
            example_inputs: Positional inputs; floating-point tensors are converted to float64.
            example_kwargs: Keyword inputs.
            generator: Where the elements and the perturbation come from.
            outputs: Which outputs count; give what was given to `discover`.

        Returns:
            The largest relative change of the outputs, in total and per group.
        """
        state = dict(module.state_dict())
        bound = self.bind(state)
        return verify(bound, module, example_inputs, dict(example_kwargs or {}), generator, outputs)

    def to_json(self) -> str:
        """The stable text form. Fields with default values are left out, so that people can edit it."""
        groups = [_compact(asdict(group), Group(name="", size=0, placements=())) for group in self.groups]
        for group in groups:
            group["placements"] = [_compact(p, Placement("", 0)) for p in group["placements"]]
        document = {
            "format": FORMAT,
            "version": VERSION,
            "groups": groups,
            "shapes": {name: list(shape) for name, shape in self.shapes.items()},
            "frozen": [[f.parameter, f.axis, f.size, f.reason] for f in self.frozen],
            "unknown": list(self.unknown),
            "unused": list(self.unused),
            "notes": list(self.notes),
            "buffers": list(self.buffers),
        }
        text = json.dumps(document, indent=1)
        # Innermost lists on one line each: a placement list stays readable.
        return re.sub(r"\[[^\[\]{}]*\]", lambda m: re.sub(r"\s*\n\s*", " ", m.group()), text)

    @classmethod
    def from_json(cls, text: str) -> "Symmetry":
        """Read what `to_json` wrote.

        Raises:
            ValueError: The text is not a symmetry, or is of a newer version.
        """
        try:
            document = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"this is not JSON ({error}); give the text that `to_json` wrote") from error
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise ValueError(f"this JSON is not a symmetry: it lacks 'format': '{FORMAT}'")
        if document.get("version") != VERSION:
            raise ValueError(
                f"this symmetry has version {document.get('version')}, but this regauge reads version {VERSION}; "
                "write it again with this version, or upgrade regauge"
            )
        try:
            groups = tuple(
                Group(**{**_tuples(g), "placements": tuple(Placement(**_tuples(p)) for p in g["placements"])})
                for g in document["groups"]
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"a group or placement of this symmetry is malformed: {error}") from error
        return cls(
            groups,
            {name: tuple(shape) for name, shape in document.get("shapes", {}).items()},
            tuple(Frozen(*row) for row in document.get("frozen", [])),
            tuple(document.get("unknown", [])),
            tuple(document.get("unused", [])),
            tuple(document.get("notes", [])),
            tuple(document.get("buffers", [])),
        )

    @classmethod
    def from_axes(
        cls,
        axes: Mapping[str, Sequence[str | None]],
        *,
        kinds: Mapping[str, Kind] | None = None,
        omegas: Mapping[str, float] | None = None,
        buffers: Sequence[str] = (),
    ) -> "Symmetry":
        """A symmetry written by hand: for each parameter, the group of each of its axes or None.

        Axis 0 of a parameter carries the element and every other axis carries its inverse, as in torch's
        (out, in, ...) weights; `"h^-1"` and `"h^+1"` say otherwise (an embedding's feature axis is `"h^+1"`).
        A flattened axis that repeats each unit k times in a row is `"h*k"`. Sizes are taken from the first
        parameters that the symmetry meets.

        Args:
            axes: `{"fc1.weight": ("h1", None), "fc1.bias": ("h1",), "fc2.weight": (None, "h1")}`.
            kinds: Kind of each group; "permutation" where it is left out. For attention heads and other
                nested groups build `Group` and `Placement` objects.
            omegas: Frequency of the sine for groups of kind "dihedral" (default 1).
            buffers: Names that move but are no parameters, such as "bn.running_mean".

        Raises:
            ValueError: A kind or a name is unknown, or an axis cannot be read.
        """
        kinds, omegas = dict(kinds or {}), dict(omegas or {})
        found: dict[str, list[Placement]] = {}
        shapes = {}
        for parameter, row in axes.items():
            shapes[parameter] = (0,) * len(row)
            for axis, text in enumerate(row):
                if text is None:
                    continue
                match = re.fullmatch(r"(.+?)(?:\*(\d+))?(\^[+-]1)?", text)
                if match is None:
                    raise ValueError(f"axis {axis} of {parameter!r} is {text!r}; write 'name', 'name*4' or 'name^-1'")
                name, inner, power = match[1], int(match[2] or 1), match[3]
                is_inverse = axis > 0 if power is None else power == "^-1"
                kind = kinds.get(name, "permutation")
                omega = omegas.get(name, 1.0)
                found.setdefault(name, []).append(
                    _placement_by_hand(kind, parameter, axis, inner, is_inverse, len(row) == 1, omega)
                )
        for name in {*kinds, *omegas} - found.keys():
            raise ValueError(f"group {name!r} has a kind but no axis; the axes name {sorted(found)}")
        groups = tuple(_group_by_hand(name, kinds.get(name, "permutation"), tuple(p)) for name, p in found.items())
        return cls(groups, shapes, buffers=tuple(buffers))

    def _require_sizes(self) -> None:
        if any(group.size == 0 for group in self.groups):
            raise ValueError(
                "the sizes of this hand-written symmetry are not known yet; call `symmetry.bind(params)` first "
                "and use what it returns"
            )


def _sized(group: Group, shapes: Mapping[str, tuple[int, ...]]) -> Group:
    if group.size:
        return group
    sizes = {}
    for p in group.placements:
        length = shapes[p.parameter][p.axis]
        if length % p.stride:
            raise ValueError(
                f"group {group.name!r} repeats each unit {p.stride} times on axis {p.axis} of {p.parameter!r}, "
                f"whose length {length} is no multiple of that; fix the spec"
            )
        sizes[p] = length // p.stride
    first, size = next(iter(sizes.items()))
    for p, other in sizes.items():
        if other != size:
            raise ValueError(
                f"group {group.name!r} has {size} units on axis {first.axis} of {first.parameter!r}, but axis {p.axis} "
                f"of {p.parameter!r} (shape {shapes[p.parameter]}) has {other}; these layers do not share a group: "
                "fix the spec"
            )
    return replace(group, size=size)


def _placement_by_hand(
    kind: Kind, parameter: str, axis: int, inner: int, is_inverse: bool, is_bias: bool, omega: float
) -> Placement:
    place = Placement(parameter, axis, stride=inner, repeats=((inner, 1),) if inner > 1 else ())
    if kind == "permutation":
        return place
    if kind == "signed":
        return replace(place, sign=(1,))
    if kind == "scaled":
        return replace(place, scale=(-1 if is_inverse else 1,))
    if kind == "dihedral":
        shift = math.pi / omega if is_bias and not is_inverse else 0.0
        return replace(place, sign=(1,), parity=(int(is_inverse),), shift=(shift,))
    if kind in ("orthogonal", "linear"):
        return replace(place, is_inverse=is_inverse)
    raise ValueError(
        f"kind {kind!r} cannot be written as axes; choose permutation, signed, dihedral, scaled, orthogonal or linear, "
        "or build Group and Placement objects for nested groups"
    )


def _group_by_hand(name: str, kind: Kind, placements: tuple[Placement, ...]) -> Group:
    if kind in ("orthogonal", "linear"):
        return Group(name, 0, placements, is_permuted=False, matrix="orthogonal" if kind == "orthogonal" else "linear")
    return Group(
        name,
        0,
        placements,
        scales=int(kind == "scaled"),
        signs=int(kind in ("signed", "dihedral")),
        shifts=int(kind == "dihedral"),
    )


def _compact(fields: dict[str, Any], default: Group | Placement) -> dict[str, Any]:
    required = {"name", "size", "placements", "parameter", "axis"}
    return {key: value for key, value in fields.items() if key in required or value != getattr(default, key)}


def _tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    def convert(value: Any) -> Any:
        return tuple(convert(v) for v in value) if isinstance(value, list) else value

    return {key: value if key == "placements" else convert(value) for key, value in fields.items()}

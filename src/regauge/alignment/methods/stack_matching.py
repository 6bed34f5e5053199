"""Matching of stacks: several dictionaries of parameters that one element moves together, each in its own way.

A role says how a dictionary is moved. The stack becomes one dictionary with one name for each tensor of each
entry, on a symmetry with the placements of all of them; any method that compares parameters can match it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, Protocol, get_args, runtime_checkable

import torch
from torch import Tensor

from regauge.alignment.many import ManyMatching, ManyMethod, match_to_first
from regauge.alignment.matching import Matching, Method
from regauge.alignment.methods.merge_many import MergeMany
from regauge.alignment.methods.weight_matching import WeightMatching
from regauge.core.element import Element
from regauge.core.groups import Group, Placement
from regauge.core.params import Params, require_finite, require_same_shapes
from regauge.core.symmetry import Symmetry
from regauge.core.task import Task

Role = Literal["parameters", "magnitudes"]
"""How a dictionary is moved: as parameters, or as numbers that keep no sign (standard deviations)."""
Stack = tuple[Mapping[str, Tensor], ...]


@runtime_checkable
class StackMethod(Protocol):
    """A way to align stacks: what a method is for two networks and for many, and a role for each dictionary."""

    @property
    def roles(self) -> tuple[Role, ...]:
        """How each dictionary is moved."""
        ...

    def match(
        self,
        params_a: Stack,
        params_b: Stack,
        symmetry: Symmetry,
        *,
        task: Task | None,
        generator: torch.Generator | None,
    ) -> Matching:
        """The element that brings one stack close to the other; both are checked and the symmetry is bound."""
        ...

    def match_many(
        self,
        stacks: Sequence[Stack],
        symmetry: Symmetry,
        *,
        task: Task | None,
        generator: torch.Generator | None,
    ) -> ManyMatching:
        """One element for each of two stacks or more; all are checked and the symmetry is bound."""
        ...


@dataclass(frozen=True)
class StackMatching:
    """Match stacks of parameter dictionaries: one element moves all of them, and each counts with its weight.

    It hands `sum_k weights[k] <a_k, g b_k>` to `method`, where `g` acts on dictionary k according to its role:

    | role | permutations | positive scales | signs | shifts | rotations |
    | --- | --- | --- | --- | --- | --- |
    | parameters | move it | multiply it | multiply it | are added | rotate it |
    | magnitudes | move it | multiply it | - | - | not possible |

    Orthogonal and linear groups therefore stay at the identity as soon as one dictionary has magnitudes: the
    standard deviations of a rotated diagonal Gaussian depend on its correlations, which are gone.

    The first dictionary is complete, with buffers. The others may lack names of it; what they lack does not count.

    Attributes:
        roles: Of each dictionary, in order; the first is "parameters".
        weights: Of each dictionary, not negative, 1 unless given. A dictionary of weight 0 is moved only.
        method: What matches the stacks: one that compares parameters, without data. Unless given, weight matching
            for two stacks and, for many, matching of each to the mean of the others (`MergeMany`), both leaving
            positive scales as they are. A method for pairs aligns many to the first.

    Raises:
        ValueError: A role is unknown, the first is not "parameters", or the weights do not fit the roles.
    """

    roles: tuple[Role, ...]
    weights: tuple[float, ...] | None = None
    method: Method | ManyMethod | None = None

    def __post_init__(self) -> None:
        unknown = [role for role in self.roles if role not in get_args(Role)]
        if unknown or not self.roles or self.roles[0] != "parameters":
            raise ValueError(
                f"roles is {self.roles!r}; give 'parameters' for the first dictionary and 'parameters' or 'magnitudes' "
                "for each further one"
            )
        if self.weights is not None and len(self.weights) != len(self.roles):
            raise ValueError(f"{len(self.roles)} roles need as many weights, not {len(self.weights)}")
        if self.weights is not None and not (min(self.weights) >= 0 < max(self.weights) < float("inf")):
            raise ValueError(f"weights is {self.weights}; they must not be negative, and one must be positive")

    def match(
        self,
        params_a: Stack,
        params_b: Stack,
        symmetry: Symmetry,
        *,
        task: Task | None,
        generator: torch.Generator | None,
    ) -> Matching:
        """See `align`; the task is not looked at, since it runs networks and not stacks.

        Raises:
            ValueError: A dictionary of magnitudes has a negative number.
        """
        self._require_magnitudes((params_a, params_b), symmetry)
        return match_stacks(self, params_a, params_b, symmetry, generator)

    def match_many(
        self,
        stacks: Sequence[Stack],
        symmetry: Symmetry,
        *,
        task: Task | None,
        generator: torch.Generator | None,
    ) -> ManyMatching:
        """See `align_many`; the task is not looked at.

        Raises:
            ValueError: A dictionary of magnitudes has a negative number.
        """
        self._require_magnitudes(stacks, symmetry)
        stacked, networks = _one_symmetry(self, symmetry, stacks)
        method = MergeMany(inner=WeightMatching(scales="keep")) if self.method is None else self.method
        if isinstance(method, ManyMethod):
            found = method.match_many(networks, stacked, task=None, generator=generator)
        else:
            found = match_to_first(method, networks, stacked, task=None, generator=generator)
        return replace(found, elements=tuple(_whole(element, symmetry) for element in found.elements))

    def _require_magnitudes(self, stacks: Sequence[Stack], symmetry: Symmetry) -> None:
        for k, stack in enumerate(stacks):
            label = ("the first network", "the second network")[k] if k < 2 else f"network {k + 1}"
            for role, params in zip(self.roles, stack, strict=True):
                if role == "magnitudes":
                    _require_magnitudes(params, symmetry, label)


def match_stacks(
    settings: StackMatching, a: Stack, b: Stack, symmetry: Symmetry, generator: torch.Generator | None
) -> Matching:
    """`StackMatching.match` for dictionaries of any numbers: magnitudes that are coefficients may be negative.

    What it returns as `moved` has the names that `move_stack` takes.

    Raises:
        TypeError: The method is one for many networks only.
    """
    method = WeightMatching(scales="keep") if settings.method is None else settings.method
    if not isinstance(method, Method):
        raise TypeError(
            f"{type(method).__name__} aligns many networks at once; use `regauge.align_many`, or give a method for "
            "pairs such as `regauge.WeightMatching(scales='keep')`"
        )
    stacked, (one, other) = _one_symmetry(settings, symmetry, (a, b))
    found = method.match(one, other, stacked, task=None, generator=generator)
    # Dictionaries of another weight than one were matched multiplied by its root.
    as_given = {_name(k, name) for k, weight in enumerate(_weights(settings)) if weight == 1 for name in b[k]}
    moved = {name: tensor for name, tensor in found.moved.items() if name in as_given}
    return replace(found, element=_whole(found.element, symmetry), moved=moved)


def require_stack(stack: Mapping[str, Tensor] | Stack, method: StackMethod) -> Stack:
    """A tuple of as many dictionaries as the method has roles.

    Raises:
        TypeError: It is something else.
    """
    count = len(method.roles)
    if not isinstance(stack, tuple) or len(stack) != count:
        given = f"a tuple of {len(stack)}" if isinstance(stack, tuple) else f"a {type(stack).__name__}"
        raise TypeError(
            f"{type(method).__name__} aligns tuples of {count} dictionaries ({', '.join(method.roles)}), not "
            f"{given}; give all networks as such tuples"
        )
    return stack


def require_entries(first: Stack, stack: Stack, label: str) -> None:
    """Refuse further entries of a stack that do not fit its first one, or the first stack, or are not finite.

    Raises:
        ValueError: They hold NaN or Inf, or other names or shapes.
    """
    for k in range(1, len(stack)):
        require_same_shapes(first[k], stack[k])
        require_finite(stack[k], f"entry {k} of the stack of {label}")
        for name, tensor in stack[k].items():
            if name not in stack[0] or tensor.shape != stack[0][name].shape:
                known = f"shape {tuple(stack[0][name].shape)}" if name in stack[0] else "no tensor of that name"
                raise ValueError(
                    f"{name!r} has shape {tuple(tensor.shape)} in entry {k} of the stacks, but entry 0 has {known}; "
                    "all dictionaries of a stack belong to one architecture"
                )


def role_symmetry(symmetry: Symmetry, role: Role, params: Mapping[str, Tensor]) -> Symmetry:
    """The symmetry as it acts on a dictionary of some role that may lack names.

    Elements of the whole symmetry act through it; what it leaves out of them does nothing to such a dictionary.
    """
    groups = symmetry.groups
    if role == "magnitudes":
        groups = tuple(_unsigned(group) for group in groups if group.matrix == "none")
    present = tuple(
        replace(group, placements=tuple(p for p in group.placements if p.parameter in params)) for group in groups
    )
    return replace(symmetry, groups=present, buffers=tuple(n for n in symmetry.buffers if n in params), tied=())


def move_stack(
    symmetry: Symmetry,
    roles: Sequence[Role],
    element: Element,
    stack: Stack,
    *,
    moved: Mapping[str, Tensor] = MappingProxyType({}),
) -> Stack:
    """Every dictionary moved by one element according to its role; a named tuple stays what it is.

    Args:
        symmetry: With every size known, or of all names.
        roles: How each dictionary is moved.
        element: Of the whole symmetry.
        stack: The dictionaries.
        moved: Tensors that are moved already, under "k/name" for a name of dictionary k.
    """
    result: list[Params] = []
    for k, (role, params) in enumerate(zip(roles, stack, strict=True)):
        rest = {name: tensor for name, tensor in params.items() if _name(k, name) not in moved}
        done = {name: moved[_name(k, name)] for name in params if name not in rest}
        result.append({**params, **role_symmetry(symmetry, role, rest).act(element, rest), **done})
    return stack._make(result) if hasattr(stack, "_make") else tuple(result)


def _one_symmetry(
    settings: StackMatching, symmetry: Symmetry, stacks: Sequence[Stack]
) -> tuple[Symmetry, list[Params]]:
    """The stacks as single dictionaries, and the symmetry that acts on these."""
    weights = _weights(settings)
    views = [role_symmetry(symmetry, role, one) for role, one in zip(settings.roles, stacks[0], strict=True)]
    is_fixed = "magnitudes" in settings.roles
    free = tuple(group for group in symmetry.groups if not (is_fixed and group.matrix != "none"))
    return _stacked_symmetry(free, views, weights), [_stacked(stack, weights) for stack in stacks]


def _weights(settings: StackMatching) -> tuple[float, ...]:
    return (1.0,) * len(settings.roles) if settings.weights is None else settings.weights


def _whole(element: Element, symmetry: Symmetry) -> Element:
    """With the identity for the groups that matching left out."""
    rest = symmetry.identity()
    return Element({g.name: (element if g.name in element else rest)[g.name] for g in symmetry.groups})


def _unsigned(group: Group) -> Group:
    """The group without what its signs and shifts do; their families stay, so that its elements fit."""
    return replace(
        group,
        placements=tuple(
            replace(p, sign=(0,) * group.signs, parity=(0,) * group.shifts, shift=(0.0,) * group.shifts)
            for p in group.placements
        ),
    )


def _stacked_symmetry(free: Sequence[Group], views: Sequence[Symmetry], weights: Sequence[float]) -> Symmetry:
    """One symmetry for all dictionaries; weights are shared evenly between both networks."""
    placements: dict[str, list[Placement]] = {group.name: [] for group in free}
    shapes: dict[str, tuple[int, ...]] = {}
    buffers: list[str] = []
    for k, (view, weight) in enumerate(zip(views, weights, strict=True)):
        names = dict.fromkeys(p.parameter for group in view.groups for p in group.placements)
        shapes.update({_name(k, name): view.shapes[name] for name in names})
        buffers.extend(_name(k, name) for name in (view.buffers if weight else names))
        for group in view.groups:
            if group.name in placements:
                placements[group.name].extend(
                    replace(
                        p,
                        parameter=_name(k, p.parameter),
                        shift=tuple(amount * (weight**0.5 if weight else 1.0) for amount in p.shift),
                    )
                    for p in group.placements
                )
    groups = tuple(replace(group, placements=tuple(placements[group.name])) for group in free)
    return Symmetry(groups, shapes, buffers=tuple(buffers))


def _stacked(stack: Stack, weights: Sequence[float]) -> Params:
    result = {}
    for k, (params, weight) in enumerate(zip(stack, weights, strict=True)):
        for name, tensor in params.items():
            if weight not in (0.0, 1.0) and tensor.is_floating_point():
                tensor = tensor.to(torch.promote_types(tensor.dtype, torch.float32)) * weight**0.5
            result[_name(k, name)] = tensor
    return result


def _name(k: int, name: str) -> str:
    return f"{k}/{name}"


def _require_magnitudes(params: Mapping[str, Tensor], symmetry: Symmetry, label: str) -> None:
    for name, tensor in params.items():
        if name not in symmetry.buffers and bool((tensor < 0).any()):
            raise ValueError(
                f"{name!r} of a dictionary of magnitudes of {label} holds "
                f"{int((tensor < 0).sum())} negative numbers (of {tensor.numel()}); give that dictionary the role "
                "'parameters', or its absolute values"
            )

"""What two networks of different widths must share, and which of their axes sum over units."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from regauge.core.act import Site
from regauge.core.groups import Placement
from regauge.core.symmetry import Symmetry

Axis = tuple[str, int]
"""A parameter and one of its axes."""


def require_same_architecture(
    params_a: Mapping[str, Tensor], params_b: Mapping[str, Tensor], symmetry_a: Symmetry, symmetry_b: Symmetry
) -> None:
    """Refuse networks that differ in more than the sizes of groups.

    Raises:
        ValueError: Parameters, groups or what groups act on differ, or an axis that no group moves.
    """
    only_a, only_b = (sorted(x.keys() - y.keys()) for x, y in ((params_a, params_b), (params_b, params_a)))
    if only_a or only_b:
        raise ValueError(
            f"the two networks have different parameters: only the first has {only_a[:5]}, only the second "
            f"has {only_b[:5]}; they may differ in widths, not in layers"
        )
    names_a, names_b = ([group.name for group in s.groups] for s in (symmetry_a, symmetry_b))
    if names_a != names_b:
        raise ValueError(
            f"the groups of the first network are {names_a[:10]}, those of the second {names_b[:10]}; networks of one "
            "architecture have the same groups in the same order"
        )
    for one, other in zip(symmetry_a.groups, symmetry_b.groups, strict=True):
        if (one.kind, one.scales, one.signs, one.shifts) != (other.kind, other.scales, other.signs, other.shifts):
            raise ValueError(
                f"group {one.name!r} has kind {one.kind} in the first network and {other.kind} in the second, or other "
                "families of scales, signs or shifts"
            )
        if [_action(p) for p in one.placements] != [_action(p) for p in other.placements]:
            raise ValueError(
                f"group {one.name!r} does not act alike in both networks; they may differ in widths, not in layers or "
                "kernel sizes"
            )
    for name, tensor in params_a.items():
        both = ((tensor.shape, symmetry_a), (params_b[name].shape, symmetry_b))
        free = [[len(uncovered(s.sites.get(name, []), k, n)) for k, n in enumerate(shape)] for shape, s in both]
        if free[0] != free[1]:
            raise ValueError(
                f"{name!r} has shape {tuple(tensor.shape)} in the first network and {tuple(params_b[name].shape)} in "
                "the second, and that is more than groups of other widths: outside of groups its axes have "
                f"{free[0]} and {free[1]} entries"
            )


def default_readers(symmetry: Symmetry) -> frozenset[Axis]:
    """The axes that sum over units, for the layouts of torch's layers.

    Axis 1 of weights (out, in, ...), axis 0 of transposed convolutions (in, out, ...), none of vectors and of
    embeddings. Embeddings and transposed convolutions are told by what discovery says about their other axes.
    """
    operators = {frozen.parameter: set[str]() for frozen in symmetry.frozen}
    for frozen in symmetry.frozen:
        operators[frozen.parameter].add(frozen.reason.split(":")[0])
    readers = set()
    for group in symmetry.groups:
        for p in group.placements:
            known = operators.get(p.parameter, set())
            is_transposed = any(operator.startswith("conv_transpose") for operator in known)
            if "embedding" not in known and p.axis == (0 if is_transposed else 1):
                readers.add((p.parameter, p.axis))
    return frozenset((name, axis) for name, axis in readers if len(symmetry.shapes[name]) > 1)


def require_readers(symmetry_a: Symmetry, symmetry_b: Symmetry, readers: frozenset[Axis]) -> None:
    """Refuse groups of unequal widths that nothing reads, or that nothing gives its values.

    Raises:
        ValueError: There is one, or a reader is no axis that a group acts on.
    """
    axes = {(p.parameter, p.axis) for group in symmetry_a.groups for p in group.placements}
    if readers - axes:
        raise ValueError(
            f"readers {sorted(readers - axes)[:5]} are no axes on which a group acts; they are {sorted(axes)[:10]}"
        )
    for group in symmetry_a.groups:
        if group.size == symmetry_b[group.name].size:
            continue
        roles = {(p.parameter, p.axis) in readers for p in group.placements}
        if len(roles) < 2:
            missing = "sums over its units" if True not in roles else "gives its units their values"
            raise ValueError(
                f"of the axes of group {group.name!r} none {missing}; name the axes that sum over units in `readers`, "
                "as (parameter, axis)"
            )


def uncovered(sites: Sequence[Site], axis: int, length: int) -> Tensor:
    """The indices of an axis on which none of the sites acts."""
    is_free = torch.ones(length, dtype=torch.bool)
    for site in sites:
        if site.placement.axis == axis:
            is_free[site.positions] = False
    return is_free.nonzero().flatten()


def _action(p: Placement) -> tuple[object, ...]:
    """What a placement does, apart from where its units lie."""
    values = math.prod(size for size, _ in p.repeats)
    return (p.parameter, p.axis, values, p.scale, p.sign, p.parity, p.shift)

"""Networks of different widths: which axes sum over units, and plans between units by optimal transport."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import csr_array
from torch import Tensor

from regauge.core.act import Site
from regauge.core.assignment import Floats, assign
from regauge.core.groups import Placement
from regauge.core.symmetry import Symmetry
from regauge.relaxed.sinkhorn_layer import normalize

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
    """The axes that sum over units, as discovery saw them.

    A symmetry that does not say (made of `Group` objects, say) has those of torch's layers: axis 1 of weights (out, in,
    ...), axis 0 of transposed convolutions (in, out, ...), none of vectors and of embeddings, which are told apart by
    what it says about frozen axes.
    """
    if symmetry.readers:
        return frozenset(symmetry.readers)
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
    """A key of what a placement does, apart from the positions of its units."""
    values = math.prod(size for size, _ in p.repeats)
    return (p.parameter, p.axis, values, p.scale, p.sign, p.parity, p.shift)


SignCharacter = tuple[int, ...]
"""Exponents, 0 or 1, of the families of signs at a place."""


REPLICAS = 4
"""Units are split until both sides have equally many if that makes them at most this many times more."""
PRICED = 8
"""A linear program begins with this many pairs for each unit, and grows by at most as many at a time."""
PRICE_TOLERANCE = 1e-9
"""Pairs that would gain less than this share of the largest profit are left out."""


@dataclass(frozen=True)
class UnitPlan:
    """A transport plan between the units of two layers.

    Attributes:
        mass: The mass of each pair, float64 `[n_a, n_b]`; rows sum to 1/n_a and columns to 1/n_b.
        sign: The sign with which each pair is joined, int8 `[families, n_a, n_b]`.
    """

    mass: Tensor
    sign: Tensor

    def signed(self, exponents: SignCharacter) -> Tensor:
        """The masses, multiplied by the families of signs that act at a place."""
        result = self.mass
        for family, exponent in enumerate(exponents):
            if exponent:
                result = result * self.sign[family]
        return result


def map_tensor(
    tensor: Tensor,
    pairs: Sequence[tuple[Site, Site]],
    shape: Sequence[int],
    plans: Mapping[str, UnitPlan],
    readers: Collection[Axis],
) -> Tensor:
    """A tensor of the second network taken to the shape that it has in the first, axis by axis."""
    for axis in sorted({site.placement.axis for site, _ in pairs}):
        own = [pair for pair in pairs if pair[0].placement.axis == axis]
        there = uncovered([b for _, b in own], axis, tensor.shape[axis]).to(tensor.device)
        here = uncovered([a for a, _ in own], axis, shape[axis]).to(tensor.device)
        result = tensor.new_empty([shape[k] if k == axis else n for k, n in enumerate(tensor.shape)])
        result.index_copy_(axis, here, tensor.index_select(axis, there))
        for site_a, site_b in own:
            plan = plans[site_a.group.name]
            is_read = (site_a.placement.parameter, axis) in readers
            matrix = plan.signed(sign_character(site_a)) / plan.mass.sum(0 if is_read else 1, keepdim=True)
            last = tensor.index_select(axis, site_b.positions.to(tensor.device)).movedim(axis, 0)
            units = matrix.to(tensor) @ last.reshape(site_b.group.size, -1)
            moved = units.reshape(site_a.positions.numel(), *last.shape[1:]).movedim(0, axis)
            result.index_copy_(axis, site_a.positions.to(tensor.device), moved)
        tensor = result
    return tensor


def sign_character(site: Site) -> SignCharacter:
    """The exponents, modulo two, of the families of signs at a site."""
    return tuple(exponent % 2 for exponent in site.placement.sign)


def transport(
    profit: Tensor, regularization: float = 0.0, *, tolerance: float = 1e-9, max_iterations: int = 5000
) -> Tensor:
    """The plan T that maximizes `<T, profit> + regularization * entropy(T)`.

    Rows of T sum to 1/n and columns to 1/m, `entropy(T) = -sum T log T`. Without regularization the optimum is
    exact: an assignment where n = m, so that n T is a permutation; an assignment of split units where n and m have
    a small common multiple; else a linear program. With it, Sinkhorn's iteration in logarithms at falling
    regularization, then the nearby plan whose marginals are right.

    Args:
        profit: `[n, m]`.
        regularization: Not negative.
        tolerance: Sinkhorn's iteration ends when the marginals are wrong by less than this share.
        max_iterations: Most iterations at each regularization.

    Returns:
        The plan, float64 `[n, m]`.

    Raises:
        ValueError: The profits are no matrix or not finite, or the regularization is negative.

    References:
        Cuturi (2013), Sinkhorn distances; Schmitzer (2019), stabilized scaling; Altschuler et al. (2017), algorithm 2.
    """
    if profit.ndim != 2 or not bool(profit.isfinite().all()):
        raise ValueError(
            f"the profits of a transport must be a matrix of finite numbers; these have shape {tuple(profit.shape)} "
            f"and {int((~profit.isfinite()).sum())} entries that are NaN or Inf"
        )
    if not 0 <= regularization < math.inf:
        raise ValueError(f"regularization is {regularization}; it must be finite and not negative")
    profit = profit.detach().double().cpu()
    if regularization:
        rows_of_one = normalize(profit / regularization, tolerance, max_iterations)
        return _marginals_corrected(rows_of_one / len(profit))
    n, m = profit.shape
    common = math.lcm(n, m)
    if common <= REPLICAS * max(n, m):
        return _split_units(profit.numpy(), common)
    return _marginals_corrected(_linear_program(profit.numpy()))


def in_order(n: int, m: int) -> Tensor:
    """The plan that pairs the units of both sides in their order: `eye(n) / n` where n = m."""
    cuts = [torch.arange(size + 1) * other for size, other in ((n, m), (m, n))]  # In units of 1 / (n m).
    upper = torch.minimum(cuts[0][1:].unsqueeze(1), cuts[1][1:].unsqueeze(0))
    lower = torch.maximum(cuts[0][:-1].unsqueeze(1), cuts[1][:-1].unsqueeze(0))
    return (upper - lower).clamp_min(0).double() / (n * m)


def entropy(plan: Tensor) -> float:
    """`-sum T log T` in nats, with `0 log 0 = 0`."""
    return -float(torch.xlogy(plan, plan).sum())


def _split_units(profit: Floats, common: int) -> Tensor:
    n, m = profit.shape
    rows, columns = np.arange(common) // (common // n), np.arange(common) // (common // m)
    taken = columns[assign(profit[rows][:, columns])]
    counts = np.zeros((n, m))
    np.add.at(counts, (rows, taken), 1.0)
    return torch.from_numpy(counts / common)


def _linear_program(profit: Floats) -> Tensor:
    """Exact by pricing: solved on few pairs, to which those are added that the dual solution says would gain."""
    n, m = profit.shape
    cost = -profit / (np.abs(profit).max() or 1.0)
    masses = np.concatenate([np.full(n, 1 / n), np.full(m, 1 / m)])
    is_used = in_order(n, m).numpy() > 0  # These alone carry a plan, so that every program has a solution.
    reduced = cost - cost.min(axis=1, keepdims=True)
    reduced -= reduced.min(axis=0)
    is_used |= _cheapest(reduced, PRICED)
    while True:
        rows, columns = np.nonzero(is_used)
        at = np.arange(len(rows))
        marginals = csr_array(
            (np.ones(2 * len(rows)), (np.concatenate([rows, n + columns]), np.concatenate([at, at]))),
            shape=(n + m, len(rows)),
        )
        solved = linprog(  # type: ignore[call-overload]  # The stubs admit no sparse constraints.
            cost[is_used], A_eq=marginals, b_eq=masses, method="highs-ds"
        )
        dual = np.asarray(solved.eqlin.marginals, dtype=np.float64)
        reduced = np.where(is_used, np.inf, cost - dual[:n, None] - dual[n:])
        gains = reduced < -PRICE_TOLERANCE
        if not gains.any():
            plan = np.zeros((n, m))
            plan[is_used] = np.maximum(solved.x, 0)
            return torch.from_numpy(plan)
        is_used |= gains & _cheapest(reduced, PRICED)


def _cheapest(cost: Floats, count: int) -> NDArray[np.bool_]:
    """The `count` smallest entries of every row and of every column."""
    rows, columns = (min(count, size) - 1 for size in (cost.shape[1], cost.shape[0]))
    in_row = cost <= np.partition(cost, rows, axis=1)[:, rows, None]
    in_column = cost <= np.partition(cost, columns, axis=0)[columns]
    return np.asarray(in_row | in_column)


def _marginals_corrected(plan: Tensor) -> Tensor:
    """The plan scaled down to at most the right marginals, and what is missing added as a product."""
    n, m = plan.shape
    plan = plan * (1 / (n * plan.sum(1, keepdim=True))).clamp_max(1)
    plan = plan * (1 / (m * plan.sum(0, keepdim=True))).clamp_max(1)
    rows, columns = 1 / n - plan.sum(1, keepdim=True), 1 / m - plan.sum(0, keepdim=True)
    missing = float(rows.sum())
    return plan if missing <= 0 else plan + rows.clamp_min(0) * columns.clamp_min(0) / missing

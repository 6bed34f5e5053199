"""The group element g that maximizes `<g, C>` for a matrix C of inner products, computed exactly."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, reduce
from itertools import product

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from regauge.core.assignment import assign_many
from regauge.core.element import Value
from regauge.core.groups import Group, Placement, forbid_between_classes
from regauge.core.rotations import keeping_ones, without_reflection, zero_sum_basis

ENUMERATED_AT_ONCE = 1 << 22
"""The largest number of values that are computed at once: entries of the cost times patterns of signs and parities."""
PULL = 1e-9
"""The weight of a term that favors rotations near the identity, as a fraction of the norm of the cost.

For n units, the term lowers the objective by at most 2 n times this weight.
"""

Character = tuple[int, ...]
"""Exponents at a placement: for each family of signs, whether its sign multiplies the entries, and for each family of
shifts, whether an odd shift flips the entries."""


@dataclass(frozen=True)
class ShiftCost:
    """The objective for a tensor to which each step of a shift adds a constant c, such as the bias of sine units.

    Suppose that a unit has m entries b in the tensor, which are compared with m entries a. After k steps of the shift,
    the objective is `-|a - (chi b + k c)|^2 / 2`, where chi is the sign of the unit. Without the terms that do not
    depend on k, the objective is `k c (sum a - chi sum b) - m (k c)^2 / 2`. The field `amounts` holds the added
    constant c for each family of shifts. The fields `target` and `source` hold the sums of a and b, `[..., n]`.
    """

    character: Character
    amounts: tuple[float, ...]
    target: Float[Tensor, "*lead unit"]
    source: Float[Tensor, "*lead unit"]
    count: int


@dataclass(frozen=True)
class Cost:
    """A linear objective over the elements of a group: the profit of assigning source unit j to target unit i.

    A character is a product of signs that multiplies a tensor. For every character, `matrices` holds the inner products
    `[..., target, source]`. If the group does not permute units, `matrices` holds only the inner product of each unit
    with itself, `[..., target, 1]`. Shifts add a quadratic term to the linear objective.
    """

    matrices: Mapping[Character, Float[Tensor, "*lead target source"]]
    shifts: tuple[ShiftCost, ...] = ()

    def __add__(self, other: "Cost") -> "Cost":
        """Return the sum of two objectives."""
        matrices = dict(self.matrices)
        for key, matrix in other.matrices.items():
            matrices[key] = matrices[key] + matrix if key in matrices else matrix
        return Cost(matrices, (*self.shifts, *other.shifts))

    def at_identity(self) -> Float64[Tensor, "*lead"]:
        """Return the objective of the identity."""
        return torch.stack([diagonal(m).sum(-1, dtype=torch.float64) for m in self.matrices.values()]).sum(0).cpu()

    def at(self, value: Value) -> Float64[Tensor, "*lead"]:
        """Return the objective at an element of the group. The element must not have positive factors."""
        if value.matrix is not None:
            matrices = torch.stack([m.double() for m in self.matrices.values()]).sum(0)
            return (matrices * value.matrix.to(matrices)).sum((-1, -2)).cpu()
        picked = self if value.perm is None else _picked(self, value.perm)
        total: Tensor | None = None
        for key, matrix in picked.matrices.items():
            own = matrix.squeeze(-1).double()
            factor = unit_signs(key, value)
            own = own if factor is None else own * factor.to(own)
            total = own if total is None else total + own
        assert total is not None
        for s in picked.shifts:
            assert value.shift is not None
            factor = unit_signs(s.character, value)
            source = s.source.double() if factor is None else s.source.double() * factor.to(s.source.device)
            moved = sum(amount * value.shift[..., f, :].double() for f, amount in enumerate(s.amounts))
            assert isinstance(moved, Tensor)
            moved = moved.to(source)
            total = total + moved * (s.target.double() - source) - s.count * moved**2 / 2
        return total.sum(-1).cpu()


@dataclass(frozen=True)
class Closest:
    """The best element of a group, its objective, and the dual variables (potentials) of the assignment."""

    value: Value
    objective: Float64[Tensor, "*lead"]
    potentials: Float[Tensor, "*lead source"] | None = None


def character(placement: Placement) -> Character:
    """Return the character of a placement: which signs multiply its entries, and which odd half-period shifts flip its
    entries.
    """
    return (*(e % 2 for e in placement.sign), *placement.parity)


def closest(
    group: Group,
    cost: Cost | Tensor,
    *,
    potentials: Float[Tensor, "*lead source"] | None = None,
    current: Int64[Tensor, "*lead target"] | None = None,
    slack: Float64[Tensor, "*lead"] | None = None,
    is_repeated: bool = False,
) -> Closest:
    """Return the element g of one group that maximizes `<g, C>`.

    | kind | solution |
    | --- | --- |
    | permutation, scaled | assignment on C; positive factors stay at one (the objective is unbounded over them) |
    | signed | assignment on the best sign pattern of each pair: `abs(C)` if all placements share one character |
    | dihedral | as for signed; for each pair, pattern and parity, the best shift is an integer of that parity |
    | orthogonal | `U V^T` of `C = U S V^T` (Procrustes) |
    | rotation | `U V^T`; if this is a reflection, the sign of the smallest singular value is flipped (Kabsch) |
    | centered | `U V^T`, restricted to vectors whose sum is zero; the vector of ones is kept |
    | linear | the best *orthogonal* matrix, because the objective is unbounded over all invertible matrices |

    If a group has several families of signs, the characters are split into independent components (`SignCode`). Each
    component is solved by enumeration of its signs if this is feasible. If a group is repeated within another group,
    `align` first solves the inner group for every pair of outer units.

    Args:
        group: The group. If the group is repeated within other groups, each of them is a leading axis of the cost.
        cost: The objective, or a single matrix `[..., n, n]` if all placements share one character.
        potentials: The potentials that a previous call returned for similar problems.
        current: The permutations to keep if they are optimal within `slack`.
        slack: The current permutation is kept unless another permutation gains more than `slack`. Default: 0.
        is_repeated: Whether potentials should be returned.

    Raises:
        ValueError: A single matrix was given to a group with several families, or a cost is not finite.

    References:
        Ainsworth et al. (2023), section 3.2; Schonemann (1966) for the orthogonal case.
    """
    if isinstance(cost, Tensor):
        cost = _single(group, cost)
    lead = next(iter(cost.matrices.values())).shape[:-2]
    if group.matrix != "none":
        return _procrustes(group, torch.stack([matrix.double() for matrix in cost.matrices.values()]).sum(0))
    if not group.is_permuted:
        return Closest(*_signs_and_shifts(group, cost))
    n = group.size
    # Each pair of units has its own signs and shifts, so they can be optimized pair by pair before the assignment: the
    # maximum over orders and signs together is the best order for these maxima.
    solved = assign_many(
        profits(group, cost).reshape(-1, n, n),
        None if potentials is None else potentials.reshape(-1, n),
        current=None if current is None else current.reshape(-1, n),
        slack=None if slack is None else slack.flatten(),
        is_repeated=is_repeated,
    )
    perm = solved.columns.reshape(*lead, n)
    value, objective = _signs_and_shifts(group, _picked(cost, perm))
    known = None if solved.potentials is None else solved.potentials.reshape(*lead, n)
    return Closest(replace(value, perm=perm), objective, known)


def _single(group: Group, matrix: Tensor) -> Cost:
    if group.signs + group.shifts > 1 and not (group.signs == 1 and group.shifts == 1):
        raise ValueError(
            f"group {group.name!r} has {group.signs} families of signs and {group.shifts} of shifts, which act "
            "differently at different placements; give a Cost with one matrix for each combination of signs and shifts"
        )
    key = (1,) * group.signs + (0,) * group.shifts
    return Cost({key: matrix if group.is_permuted or group.matrix != "none" else diagonal(matrix).unsqueeze(-1)})


def _procrustes(group: Group, c: Float64[Tensor, "*lead n n"]) -> Closest:
    if not bool(c.isfinite().all()):
        raise ValueError(
            f"the cost of group {group.name!r} holds NaN or Inf; the weights or activations that it was computed "
            "from are not finite, or overflowed: check the networks, or use a wider dtype"
        )
    if group.keeps_ones:
        # Every rotation that keeps the ones is 1 1^T / n + H^T R H, so <g, C> is a constant plus <R, H C H^T>.
        basis = zero_sum_basis(group.size).to(c)
        matrix = keeping_ones(_nearest_rotation(basis @ c @ basis.mT))
    else:
        matrix = _nearest_rotation(c, is_proper=group.is_proper)
    return Closest(Value(matrix=matrix.cpu()), (matrix * c).sum((-1, -2)).cpu())


def _nearest_rotation(c: Float64[Tensor, "*lead n n"], *, is_proper: bool = False) -> Float64[Tensor, "*lead n n"]:
    # If C does not have full rank, many rotations are equally good. A small multiple of the identity selects the
    # rotation nearest to the identity.
    pull = PULL * torch.linalg.matrix_norm(c)[..., None, None] * torch.eye(c.shape[-1], dtype=c.dtype, device=c.device)
    u, _, vh = torch.linalg.svd(c + pull)
    if is_proper:
        u, vh = without_reflection(u), without_reflection(vh.mT).mT
    matrix: Tensor = u @ vh
    return matrix


def profits(group: Group, cost: Cost) -> Float[Tensor, "*lead target source"]:
    """Return the profit of each pair of units, with the best signs and shifts for this pair. The profit is a large loss
    if the classes of the two units differ.
    """
    if group.shifts:
        found = _best_profits(group, cost)
    elif group.signs:
        from regauge.core.signs import SignCode

        found = SignCode.of(*cost.matrices).best(list(cost.matrices.values()))
    else:
        found = cost.matrices[()]
    return forbid_between_classes(group, found) if group.classes else found


def _signs_and_shifts(group: Group, cost: Cost) -> tuple[Value, Float64[Tensor, "*lead"]]:
    """Return the best signs and shifts of units that are already paired, from a cost of shape `[..., n, 1]`."""
    cost = replace(cost, matrices={key: matrix.double() for key, matrix in cost.matrices.items()})
    if group.shifts:
        best, bits, steps = _enumerate(group, cost)
        sign = (1 - 2 * bits[: group.signs].squeeze(-1)).movedim(0, -2).to(torch.int8).cpu() if group.signs else None
        return Value(sign=sign, shift=steps.squeeze(-1).movedim(0, -2).cpu()), best.squeeze(-1).sum(-1).cpu()
    if not group.signs:
        return Value(), cost.matrices[()].squeeze(-1).sum(-1).cpu()
    from regauge.core.signs import SignCode

    code, matrices = SignCode.of(*cost.matrices), list(cost.matrices.values())
    best = code.best(matrices).squeeze(-1).sum(-1).cpu()
    return Value(sign=code.signs(matrices, group.signs).squeeze(-1).movedim(0, -2).cpu()), best


def _best_profits(group: Group, cost: Cost) -> Tensor:
    """Return, for each pair of units, the best profit over all sign patterns and shifts."""
    like = next(iter(cost.matrices.values()))
    parts = torch.split(_patterns(group.signs + group.shifts), max(1, ENUMERATED_AT_ONCE // max(1, like.numel())))
    return reduce(torch.maximum, (_by_shift(group, cost, part.to(like.device))[0].amax(0) for part in parts))


def _enumerate(group: Group, cost: Cost) -> tuple[Tensor, Tensor, Tensor]:
    """Return, for each pair of units, the best profit over all sign patterns and shifts, with its sign bits and shifts.

    The sign bits and the shifts have shape `[families, ..., n, m]`.
    """
    like = next(iter(cost.matrices.values()))
    patterns = _patterns(group.signs + group.shifts)
    portion = max(1, ENUMERATED_AT_ONCE // max(1, like.numel()))
    found = [_best_of(group, cost, part.to(like.device)) for part in torch.split(patterns, portion)]
    best, chosen, steps = found[0]
    for first, (value, here, k) in zip(range(portion, len(patterns), portion), found[1:], strict=True):
        better = value > best
        best, chosen = torch.where(better, value, best), torch.where(better, here + first, chosen)
        steps = torch.where(better, k, steps)
    return best, patterns.to(like.device)[chosen].movedim(-1, 0), steps.to(torch.int64)


def _best_of(group: Group, cost: Cost, patterns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return, for each pair of units, the best of several sign patterns: its profit, its index, its shifts `[family,
    ..., n, m]`.
    """
    total, steps = _by_shift(group, cost, patterns)
    best, chosen = total.max(0)
    return best, chosen, torch.stack([k.gather(0, chosen.unsqueeze(0)).squeeze(0) for k in steps])


def _by_shift(group: Group, cost: Cost, patterns: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return, for each pattern of signs, the profit with the best shifts, `[pattern, ...]`. Also return the best shifts
    for each family of shifts.

    For given signs, the objective is a parabola in the shift. The best shift is the integer nearest to its vertex that
    is even or odd, as the pattern requires. Rounding is exact unless two families of shifts add to the same entries.
    Families that add to the same entries are optimized alternately.
    """
    total = _by_pattern(cost.matrices, patterns)
    parity = patterns[:, group.signs :].T.to(total)  # [families, pattern]
    parity = parity.reshape(*parity.shape, *[1] * (total.ndim - 1))
    is_square, places = total.shape[-1] == total.shape[-2], []
    for s in cost.shifts:
        source = s.source.to(total).unsqueeze(-2 if is_square else -1)
        places.append((s, s.target.to(total).unsqueeze(-1) - _by_pattern({s.character: source}, patterns)))
    is_coupled = any(sum(a != 0 for a in s.amounts) > 1 for s, _ in places)
    steps = list(parity.expand(-1, *total.shape))
    for _ in range(4 if is_coupled else 1):
        for f in range(group.shifts):
            curvature = sum(s.count * s.amounts[f] ** 2 for s, _ in places)
            if not curvature:
                continue
            slope: Tensor | float = 0.0
            for s, difference in places:
                if s.amounts[f]:
                    others = sum(s.amounts[o] * steps[o] for o in range(group.shifts) if o != f and s.amounts[o])
                    slope = slope + (s.amounts[f] / curvature) * (difference - s.count * others)
            assert isinstance(slope, Tensor)
            # In one family the objective is a parabola with its top at `slope`; the best whole number with parity p
            # is the nearest one, p + 2 round((slope - p) / 2).
            steps[f] = slope.sub(parity[f]).mul_(0.5).round_().mul_(2).add_(parity[f])
    for s, difference in places:
        moved = sum(amount * steps[f] for f, amount in enumerate(s.amounts) if amount)
        total = total + moved * (difference - (s.count / 2) * moved)
    return total, steps


def _by_pattern(terms: Mapping[Character, Tensor], patterns: Tensor) -> Tensor:
    """Return, for every pattern of signs and parities, the sum of all terms, multiplied by the signs that the pattern
    determines.
    """
    tensors = torch.stack(list(terms.values())).flatten(1)
    characters = torch.tensor(list(terms), dtype=tensors.dtype, device=tensors.device)
    odd = (patterns.to(tensors) @ characters.T) % 2  # CUDA multiplies only matrices of floats
    total = (1 - 2 * odd) @ tensors
    return total.reshape(-1, *next(iter(terms.values())).shape)


@cache
def _patterns(bits: int) -> Int64[Tensor, "pattern bit"]:
    """Return all rows of zeros and ones of the given length."""
    return torch.tensor(list(product((0, 1), repeat=bits)), dtype=torch.int64).reshape(-1, bits)


def _picked(cost: Cost, perm: Int64[Tensor, "*lead target"]) -> Cost:
    """Return the costs of the pairs `(i, perm[i])` only, `[..., n, 1]`, from the costs of all pairs of units."""
    matrices = {key: matrix.gather(-1, perm.unsqueeze(-1).to(matrix.device)) for key, matrix in cost.matrices.items()}
    return Cost(matrices, tuple(replace(s, source=s.source.gather(-1, perm.to(s.source.device))) for s in cost.shifts))


def unit_signs(key: Character, value: Value) -> Tensor | None:
    """Return the product of signs that multiplies each unit, given its exponents, `[..., n]`, or None if all
    are one.
    """
    signs = 0 if value.sign is None else value.sign.shape[-2]
    factor: Tensor | None = None
    for k, exponent in enumerate(key):
        if not exponent % 2:
            continue
        if k < signs:
            assert value.sign is not None
            row = value.sign[..., k, :].double()
        else:
            assert value.shift is not None
            row = 1.0 - 2 * (value.shift[..., k - signs, :] % 2).double()
        factor = row if factor is None else factor * row
    return factor


def diagonal(matrix: Float[Tensor, "*lead n column"]) -> Float[Tensor, "*lead n"]:
    """Return the profit of pairing each unit with itself."""
    return matrix.squeeze(-1) if matrix.shape[-1] == 1 else matrix.diagonal(dim1=-2, dim2=-1)

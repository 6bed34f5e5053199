"""Balanced networks: networks of the smallest norm that positive scales and invertible matrices can produce."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool
from numpy.typing import NDArray
from scipy.optimize import linprog
from torch import Tensor

from regauge.core.element import Element, Value
from regauge.core.families import balanced_matrices, connected
from regauge.core.matrices import root_of
from regauge.core.params import Params, are_copies, select
from regauge.core.remembered import remembered
from regauge.core.scales import directions
from regauge.core.squared_norm import Array, Limits, SquaredNorm, Steps
from regauge.core.symmetry import Symmetry

EXACT = 1e-12, (1e-13, 1e-11)
"""Tolerances in double precision. The first tolerance is for logarithms of factors. Eigenvalues below the second number
count as zero, and eigenvalues above the third number as nonzero."""
ROUNDED = 1e-7, (1e-11, 1e-6)
"""Tolerances in lower precision. The first tolerance is for logarithms of factors. Eigenvalues below the second number
count as zero, and eigenvalues above the third number as nonzero."""
LARGEST_LOGARITHM = 30.0
"""The largest logarithm of a factor. If the logarithm of a factor would exceed this limit, the sum of squares is
treated as having no minimum."""
JOINED = 1 << 20
"""Networks with at most this number of entries in total are balanced together, which takes as long as balancing one
network."""

Exponents = tuple[tuple[int, int], ...]
"""The action of scales on some entries of a tensor: pairs of a family index and an exponent."""
Terms = tuple[tuple[str, Exponents], ...]

LENGTH_COST = 1e-4
"""The penalty on the length of a direction of scales in the search for a direction along which sums of squares (rows)
shrink. The reward for each row that shrinks is one."""
Buffers = Literal["move", "keep"]
"""Whether balancing may change running statistics."""
NEWTON_STEPS = 60
"""The largest number of Newton steps that balancing takes.

Without a limit on steps, balancing would not end for networks whose norm has no minimum."""
PRODUCTS = 500
"""The largest number of products with the Hessian in one Newton step."""
ALL_PRODUCTS = 1500
"""The largest number of products with the Hessian in all Newton steps together.

Chains of 256 layers need 1,150 such products. Uninitialized parameters could need any number.
"""
LONGEST_STEP = 2.0
"""The largest change of a factor's logarithm in one Newton step."""
FAR = 0.1
"""If a Newton step is longer than this, groups with singular matrices first take an exact step."""
LARGEST_SHARE, SMALLEST_SHARE = 0.25, 1e-5
"""The largest and the smallest relative tolerance of conjugate gradients in a Newton step. The iteration stops if the
largest entry of the preconditioned residual falls below the tolerance times its initial value.
"""
FLOOR = 1e-14
"""Changes of a factor's logarithm below this number are lost in rounding."""
FLAT = 1e-9
"""A direction counts as flat if the norm's curvature along it is below this fraction of the curvature that the
preconditioner (the diagonal of the Hessian) has."""
HALVINGS = 30
"""The largest number of times that a Newton step is halved if it increases the norm."""


@dataclass(frozen=True)
class Balance:
    """The scales and matrices that balance one network, or each network of a population.

    Attributes:
        element: The scales and symmetric matrices. All permutations and signs of the element are the identity.
        rigid: For each group of matrices, the networks whose matrix stays the identity, as a mask. A matrix stays the
            identity if rounding makes the rank of a Gram matrix uncertain.
    """

    element: Element
    rigid: Mapping[str, Tensor]


def has_balance(symmetry: Symmetry) -> bool:
    """Return whether a symmetry has scales or matrices to balance."""
    return any(group.scales or group.matrix == "linear" for group in symmetry.groups)


def balance(params: Mapping[str, Tensor], symmetry: Symmetry, *, buffers: Buffers = "move") -> Element:
    """Return the scales and matrices that map a network to the network of smallest norm on its orbit.

    `act(balance(p), p)` minimizes the sum of squares of all parameters. The minimum is taken over a positive factor for
    every unit and an invertible matrix for every linear group. The logarithm of the sum of squares is convex along
    geodesics of the group of scales and matrices. Networks that differ only by scales are therefore balanced to the
    same network. Networks that differ only by invertible matrices are balanced to networks that agree up to rotations.
    All matrices that `balance` returns are symmetric. In a plain ReLU network, balancing makes the norm of each unit's
    incoming weights and bias equal to the norm of its outgoing weights. For an attention head, balancing makes the Gram
    matrices of queries and keys equal.

    Newton's method optimizes all scales and matrices at once (`minimize`).

    If all incoming or all outgoing weights of a unit are zero, the norm has no minimum at finite scales. For a unit
    with only zero incoming or only zero outgoing weights, a linear term in the logarithm of the factor makes the
    minimum finite. At the minimum, the squared weights of the unit, each weighted by its exponent, sum to one. If all
    weights of a unit are zero, the factors of this unit stay one. On a subspace where only one of the two Gram matrices
    of a linear group is nonzero, balancing makes this Gram matrix the identity. If the rank of a group's Gram matrices
    is uncertain because of rounding, the matrices of the group stay the identity; see `balance_alike`.

    Args:
        symmetry: The symmetry of the architecture.
        params: One network, or a population with a leading model axis.
        buffers: How balancing treats buffers, such as running statistics. Buffers do not contribute to the norm, except
            gains of frozen normalization (`count_frozen_gains`). In evaluation mode, a factor can multiply a filter and
            the running mean of the batch normalization after it, and divide the gain. With "move", balancing scales
            buffers too, and filters before batch normalization get norm one. Filters of norm one have equal weight in
            comparisons; in training, the norm of a filter before batch normalization has no effect. With "keep",
            balancing uses only combinations of scales that leave every buffer unchanged. Use "keep" for networks whose
            running statistics will be recomputed, because recomputing statistics would undo a change of the statistics.

    Raises:
        KeyError: A parameter on which the symmetry acts is missing.
        ValueError: Shapes do not match, or the norm of the parameters is not finite.

    References:
        Stock et al. (2019), Equi-normalization of neural networks, section 3, for plain ReLU networks; Kempf and Ness
        (1979), The length of vectors in representation spaces, for points of smallest norm on orbits.
    """
    return balance_alike([params], symmetry, buffers=buffers)[0].element


def balance_alike(
    networks: Sequence[Mapping[str, Tensor]], symmetry: Symmetry, *, buffers: Buffers = "move"
) -> list[Balance]:
    """Balance several networks before they are compared.

    If the matrix of a group cannot be determined in one of the networks, the matrix stays the identity in all networks.
    The networks may also be populations. In populations, the networks with the same index are compared with one
    another.
    """
    symmetry = count_frozen_gains(symmetry.bind(networks[0]), buffers)
    joined = _join(networks, symmetry)
    if joined is None:
        return agree(len(networks), lambda k, rigid: balance_but(networks[k], symmetry, buffers, rigid))
    count = len(networks)

    def balance_joined(_: int, rigid: Mapping[str, Tensor]) -> Balance:
        found = balance_but(joined, symmetry, buffers, {name: flags.repeat(count) for name, flags in rigid.items()})
        return replace(found, rigid={n: flags.reshape(count, -1).any(0) for n, flags in found.rigid.items()})

    (found,) = agree(1, balance_joined)
    return [replace(found, element=found.element.first(k)) for k in range(count)]


def _join(networks: Sequence[Mapping[str, Tensor]], symmetry: Symmetry) -> Params | None:
    """Return small networks, or populations, as one population; return None if the networks cannot be joined, or if
    balancing them together takes more time.

    Networks can be joined if their tensors have the same shapes, dtypes and devices.
    """
    names = [name for name in symmetry.sites if name not in symmetry.buffers]
    if len(networks) < 2 or sum(params[name].numel() for params in networks for name in names) > JOINED:
        return None
    first, *others = networks
    kinds = [(params[name].shape, params[name].dtype, params[name].device) for params in others for name in names]
    if kinds != [(t.shape, t.dtype, t.device) for t in (first[name] for name in names)] * len(others):
        return None
    return {name: torch.stack([params[name] for params in networks]) for name in names}


def agree(count: int, balance: Callable[[int, Mapping[str, Tensor]], Balance]) -> list[Balance]:
    """Balance networks repeatedly, until the matrices that stay the identity are the same in all networks.

    Args:
        count: The number of networks.
        balance: A function that balances the network with a given index, given the matrices that must stay the
            identity.
    """
    rigid: dict[str, Tensor] = {}
    while True:
        found = [balance(k, rigid) for k in range(count)]
        joint = {name: torch.stack([one.rigid[name] for one in found]).any(0) for name in found[0].rigid}
        if not any(bool((flags & ~rigid.get(name, torch.zeros_like(flags))).any()) for name, flags in joint.items()):
            return found
        rigid = joint


def balance_but(
    params: Mapping[str, Tensor], symmetry: Symmetry, buffers: Buffers, rigid: Mapping[str, Tensor]
) -> Balance:
    """Balance a network or a population, except the matrices in `rigid`, which stay the identity.

    All sizes of the symmetry's groups must be known."""
    leads = (tuple(t.shape[: t.ndim - len(symmetry.shapes[n])]) for n, t in params.items() if n in symmetry.sites)
    lead: tuple[int, ...] = next(leads, ())
    element = symmetry.identity(lead)
    scaled, linear = directions(symmetry, buffers), balanced_matrices(symmetry)
    if not scaled and not linear:
        return Balance(element, {})
    names = {place.name for direction in scaled for place in direction.places}.union(*linear.values())
    tensors = {name: params[name] for name in symmetry.sites if name in names}
    batch = torch.Size(lead).numel()
    if lead and not rigid and are_copies(tensors):
        one = balance_but(select(tensors, slice(0, 1)), symmetry, buffers, {})
        rows = torch.zeros(batch, dtype=torch.int64)
        return Balance(one.element.rows(rows), {name: flags[rows] for name, flags in one.rigid.items()})
    flat = {name: t.reshape(batch, *symmetry.shapes[name]) for name, t in symmetry.sums(tensors).items()}
    norm = SquaredNorm(symmetry, buffers, flat)
    if not np.isfinite(norm.norm).all():
        raise ValueError(
            "the squares of the parameters are not finite, so no scales balance them; check the network for NaN, Inf "
            "and huge values"
        )
    is_double = all(tensor.dtype == torch.float64 for tensor in tensors.values())
    kept = {name: rigid.get(name, torch.zeros(batch, dtype=torch.bool)).numpy().copy() for name in linear}
    minimize(norm, kept, *(EXACT if is_double else ROUNDED))
    for part in connected(linear.values()):
        # The best matrix of a group depends on the matrices of connected groups: if one of them stays the identity, all
        # do.
        groups = [name for name, names in linear.items() if names <= part]
        stays: NDArray[np.bool_] = np.any([kept[name] for name in groups], axis=0)
        kept |= dict.fromkeys(groups, stays)
    if buffers == "move" and not bool((np.abs(norm.logs) <= LARGEST_LOGARITHM).all()):
        # If entries are zero or almost zero, the norm may have no minimum at finite scales.
        return balance_but(params, symmetry, "keep", rigid)
    logs = [*np.split(norm.logs, np.cumsum([each.count for each in scaled]), axis=1)[:-1], *norm.normalize()]
    scaled = (*scaled, *(filters.direction for filters in norm.plan.filters))
    sizes = {group.name: group.size for group in symmetry.groups}
    for group in symmetry.groups:
        own = [(d.weights, t) for d, t in zip(scaled, logs, strict=True) if d.group == group.name]
        if own:
            shape = (*lead, *(sizes[base] for base in group.within), group.size)
            rows = torch.stack([torch.tensor(weights, dtype=torch.float64) for weights, _ in own])
            steps = torch.stack([torch.from_numpy(t).reshape(shape) for _, t in own], dim=-2)
            scale = (rows.T @ steps).exp()
            element = element.replace(group.name, replace(element[group.name], scale=scale))
    for name, found in norm.found.items():
        matrix = root_of(torch.from_numpy(found.swapaxes(-1, -2) @ found))
        bases = (sizes[base] for base in symmetry[name].within)
        element = element.replace(name, Value(matrix=matrix.reshape(*lead, *bases, *matrix.shape[-2:])))
    return Balance(element, {name: torch.from_numpy(flags) for name, flags in kept.items()})


def balanced_parts(symmetry: Symmetry, *, buffers: Buffers = "move") -> list[frozenset[str]]:
    """Divide the parameters of a symmetry into sets that can be balanced independently of one another.

    The sizes of all groups of the symmetry must be known.

    Balancing one of the sets alone gives the same factors as balancing all sets together. If `buffers` is "keep", each
    set of parameters also contains all buffers.
    """
    symmetry = count_frozen_gains(symmetry, buffers)
    scaled = (frozenset(place.name for place in direction.places) for direction in directions(symmetry, buffers))
    return connected([*scaled, *balanced_matrices(symmetry).values()])


@remembered
def count_frozen_gains(symmetry: Symmetry, buffers: Buffers) -> Symmetry:
    """Return the symmetry in which gains of frozen normalization are treated as parameters.

    A normalization that is not trained stores its gains as buffers. The filters around a frozen gain could shrink
    without limit while the gain grows. Gains of frozen normalization must therefore contribute to the norm. A direction
    is a vector t that holds the logarithm of a factor for each family of scales. Along some directions t, parameters
    shrink and no parameter grows: `E t <= 0` for the exponents E. A buffer contributes to the norm exactly if it grows
    along a direction t that shrinks parameters and enlarges none. Which buffers contribute depends only on the
    exponents of the scales, not on the entries of the buffers. Running statistics of trained normalization neither grow
    nor shrink along a direction t that shrinks parameters and enlarges none. If balancing keeps buffers unchanged, no
    buffer needs to contribute to the norm.
    """
    families = [(group.name, k) for group in symmetry.groups for k in range(group.scales)]
    number = {family: k for k, family in enumerate(families)}
    acting: dict[str, dict[int, list[Exponents]]] = {}
    for group in symmetry.groups:
        for place in group.placements:
            if any(place.scale):
                found = tuple((number[group.name, k], e) for k, e in enumerate(place.scale) if e)
                acting.setdefault(place.parameter, {}).setdefault(place.axis, []).append(found)
    if buffers == "keep" or not acting.keys() & set(symmetry.buffers):
        return symmetry
    # One term for each choice of one placement on every axis of a tensor.
    terms = tuple(
        dict.fromkeys((name, sum(each, ())) for name, axes in acting.items() for each in product(*axes.values()))
    )
    needed = _frozen_gains(terms, frozenset(symmetry.buffers), len(families))
    return replace(symmetry, buffers=tuple(n for n in symmetry.buffers if n not in needed)) if needed else symmetry


def minimize(
    norm: SquaredNorm, rigid: Mapping[str, Bool[np.ndarray, " batch"]], tolerance: float, limits: Limits
) -> None:
    """Change the scales and matrices of a network until its norm is minimal.

    First, each group takes one exact step while all other groups are fixed. The exact step also detects singular
    matrices. Newton steps follow until the squared length of the last step is below the tolerance. The squared length
    of a Newton step estimates the error that remains after the step.

    Args:
        norm: The squared norm as a function of scales and matrices, and their current values.
        rigid: For each group of matrices, the networks in which the matrix stays the identity. The function adds to
            `rigid` the networks whose matrix may be singular, or whose norm has no minimum.
        tolerance: The approximate error to allow in the logarithms of the factors.
        limits: Two fractions of the largest eigenvalue of a Gram matrix. Eigenvalues below the first fraction count as
            zero, and eigenvalues above the second fraction as nonzero.

    References:
        Cohen, Madry, Tsipras and Vladu (2017), Matrix scaling and balancing via box constrained Newton's method;
        Burgisser, Franks, Garg, Oliveira, Walter and Wigderson (2019), Towards a theory of non-commutative
        optimization; Eisenstat and Walker (1996), Choosing the forcing terms in an inexact Newton method.
    """
    is_left = np.ones(len(norm.logs), dtype=bool)
    norm.sweep()
    for group, flags in rigid.items():
        norm.balance(group, flags, is_left, limits)
    norm.sweep()
    step, length, products = norm.slopes()[0], np.full((len(is_left), 1), np.inf), 0
    for _ in range(NEWTON_STEPS if step.size else 0):
        if products >= ALL_PRODUCTS:
            break
        for group in norm.singular:
            # Far from the minimum, the norm may have negative curvature in these matrices. Their rank is known.
            norm.balance(group, rigid[group], is_left & (length[:, 0] > FAR), (limits[1], limits[1]))
        objective = norm.objective()
        gradient, diagonal = norm.slopes()
        step, count = _solve(norm, -gradient * is_left[:, None], diagonal)
        products += count
        length = _longest(step)
        taken = step * np.minimum(1.0, LONGEST_STEP / np.maximum(length, LONGEST_STEP))
        norm.move(taken)
        for _ in range(HALVINGS):
            is_worse = norm.objective() > objective + 1e-12 * norm.norm
            if not is_worse.any():
                break
            taken = taken / 2 * is_worse[:, None]
            norm.move(-taken)
        is_left &= (length * np.maximum(length, SMALLEST_SHARE))[:, 0] > tolerance
        if not is_left.any():
            return
    for group, matrices in norm.matrices(step).items():
        rigid[group][...] |= np.abs(matrices).reshape(len(matrices), -1).max(1) ** 2 > tolerance


def _frozen_gains(terms: Terms, buffers: frozenset[str], count: int) -> frozenset[str]:
    needed: frozenset[str] = frozenset()
    while True:
        compared = _exponents_of([term for term in terms if term[0] not in buffers - needed], count)
        way = _shrinking_way(compared)
        rest = [term for term in terms if term[0] in buffers - needed]
        found = {
            name for (name, _), change in zip(rest, _exponents_of(rest, count) @ way, strict=True) if abs(change) > 1e-6
        }
        if not found:
            return needed
        needed |= found


def _exponents_of(terms: Sequence[tuple[str, Exponents]], count: int) -> NDArray[np.float64]:
    rows = np.zeros((len(terms), count))
    for row, (_, exponents) in zip(rows, terms, strict=True):
        for family, exponent in exponents:
            row[family] += exponent
    return rows


def _shrinking_way(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return a short direction of scales along which no sum of squares (row) grows. Among directions along which no row
    grows, choose one along which as many rows as possible shrink by at least one.

    If another row grows along every direction that shrinks a row, return zero.
    """
    terms, count = rows.shape
    # Maximize sum s over 0 <= s <= 1 with rows (up - down) + s <= 0: at the optimum every s is zero or one.
    costs = np.concatenate([np.full(2 * count, LENGTH_COST), -np.ones(terms)])
    limits = np.concatenate([rows, -rows, np.eye(terms)], 1)
    bounds = [(0, None)] * (2 * count) + [(0, 1)] * terms
    found = linprog(costs, A_ub=limits, b_ub=np.zeros(terms), bounds=bounds).x
    if found is None or found[2 * count :].max(initial=0) < 0.5:
        return np.zeros(count)
    return found[:count] - found[count : 2 * count]


def _solve(norm: SquaredNorm, right: Steps, diagonal: Steps) -> tuple[Steps, int]:
    """Return the x with `H x = right` by conjugate gradients, preconditioned by the diagonal of the Hessian.

    The second result is the number of products with the Hessian H. If matrices are singular, the norm may have almost
    no curvature, or negative curvature, along a direction. If the curvature along a direction is tiny or negative,
    conjugate gradients stop and the current x is returned.
    """
    inverse = np.divide(1.0, diagonal, out=np.zeros_like(diagonal), where=diagonal > 0)
    x, residual, scaled = np.zeros_like(right), right, inverse * right
    direction, square, length = scaled, _dot(right, scaled), _longest(scaled)
    limit = np.maximum(length * np.clip(length, SMALLEST_SHARE, LARGEST_SHARE), FLOOR)
    is_done = length <= FLOOR
    for k in range(PRODUCTS):
        product = norm.product(direction)
        curvature = _dot(direction, product)
        is_flat = curvature <= FLAT * _dot(direction, diagonal * direction)
        if k == 0:
            x = np.where(is_flat, direction, x)
        is_done |= is_flat
        share = np.divide(square, curvature, out=np.zeros_like(square), where=~is_done)
        x, residual = x + share * direction, residual - share * product
        scaled = inverse * residual
        is_done |= _longest(scaled) <= limit
        if is_done.all():
            break
        before, square = square, _dot(residual, scaled)
        direction = scaled + np.divide(square, before, out=np.zeros_like(square), where=~is_done) * direction
    return x, 1 + k


def _dot(x: Steps, y: Steps) -> Array:
    found: Array = np.einsum("bk,bk->b", x, y)[:, None]
    return found


def _longest(x: Steps) -> Array:
    found: Array = np.abs(x).max(1, keepdims=True)
    return found

"""Invertible matrices of a network balanced: both sides of every product get equal Gram matrices."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from regauge.core import act as _act
from regauge.core.act import Site
from regauge.core.element import Element, Value
from regauge.core.families import balanced_matrices, unit_values
from regauge.core.groups import Group
from regauge.core.scales import Squares
from regauge.core.symmetry import Symmetry

ZERO = {torch.float64: 1e-13}
"""Eigenvalues of a Gram matrix below this share of the largest one are zero; 1e-11 for less precision."""
CERTAIN = {torch.float64: 1e-11}
"""Eigenvalues above this share are not zero; 1e-6 for less precision. Between the two shares it is in doubt."""

FAINT_ENTRY = 1e-100
"""Entries of a Gram matrix below this share of the largest one are zero."""

Gram = Float64[Tensor, "*lead n n"]


def balancing(forward: Gram, inverse: Gram, zero: float, certain: float) -> tuple[Gram, Bool[Tensor, "*lead"]]:
    """The matrix A that makes `A F A'` and `A^-T G A^-1` equal and diagonal, and where rounding leaves no doubt of it.

    F is the Gram matrix of what A multiplies, G of what its inverse transpose does. With `F = L L'` and
    `L' G L = V D^2 V'` it is `sqrt(D) V' L^-1`, which minimizes `tr A F A' + tr A^-T G A^-1`.

    Where F or G is singular there is no such matrix. What one side has and the other annihilates then gets the
    identity as Gram matrix, orthogonal to the rest; together with the balanced rest these are all that a rotation has
    left to choose.
    """
    n = forward.shape[-1]
    forward, inverse = _flushed(forward), _flushed(inverse)
    values, vectors = torch.linalg.eigh(forward)
    others = torch.linalg.eigvalsh(inverse)
    is_regular = torch.stack([_ratio(values) > certain, _ratio(others) > certain]).all(0)
    is_good, one = is_regular.clone(), torch.eye(n, dtype=forward.dtype)
    roots = values.clamp_min(torch.finfo(values.dtype).tiny).sqrt()
    left = torch.where(is_regular[..., None, None], vectors * roots.unsqueeze(-2), one)
    # L comes from the eigenvectors of F, not from Cholesky's factorization, which fails within rounding of singular.
    # The eigenvalues of L' G L are D^2, so sqrt(D) is their fourth root.
    squares, turned = torch.linalg.eigh(left.mT @ torch.where(is_regular[..., None, None], inverse, one) @ left)
    undone = (vectors / roots.unsqueeze(-2)).mT
    matrix = squares.clamp_min(torch.finfo(squares.dtype).tiny).pow(0.25).unsqueeze(-1) * (turned.mT @ undone)
    matrix = torch.where(is_regular[..., None, None], matrix, one)
    for index in (~is_regular).nonzero().tolist():
        found = _singular(forward[tuple(index)], inverse[tuple(index)], zero, certain)
        if found is not None:
            matrix[tuple(index)], is_good[tuple(index)] = found, True
    return matrix, is_good


def _singular(forward: Gram, inverse: Gram, zero: float, certain: float) -> Gram | None:
    """`balancing` of matrices of any rank; None where a rank is in doubt."""
    left, right = (_root(gram, zero, certain) for gram in (forward, inverse))
    if left is None or right is None:
        return None
    squares, turned = torch.linalg.eigh(left.mT @ inverse @ left)
    others, turned_back = torch.linalg.eigh(right.mT @ forward @ right)
    largest = float(forward.diagonal().sum() * inverse.diagonal().sum())
    ranks = [int((each > zero * largest).sum()) for each in (squares, others)]
    if ranks[0] != ranks[1] or bool(((squares > zero * largest) & (squares <= certain * largest)).any()):
        return None
    # Coordinates that both sides have, that only the first has, that only the second has, and that none has.
    dead, unread = left.shape[1] - ranks[0], right.shape[1] - ranks[0]
    both, alone = turned[:, dead:], turned[:, :dead]
    size = squares[dead:].sqrt()
    rows = [((left @ both).mT @ inverse) * size.pow(-1.5).unsqueeze(-1), (right @ turned_back[:, :unread]).mT]
    columns = [(left @ both) / size.sqrt(), left @ alone]
    fixed = torch.cat(rows)
    _, _, spanned = torch.linalg.svd(fixed)
    free = spanned[len(fixed) :].mT  # What the second side annihilates; the first side's own coordinates are in it.
    rest, _, _ = torch.linalg.svd(free.mT @ columns[1])
    back = torch.linalg.pinv(fixed)[:, ranks[0] :]
    matrix: Tensor = torch.linalg.inv(torch.cat([*columns, back, free @ rest[:, dead:]], 1))
    return matrix if bool(matrix.isfinite().all()) else None


def _flushed(gram: Gram) -> Gram:
    """A Gram matrix without entries so small that LAPACK's eigenvalues do not converge: null spaces shrink forever."""
    return torch.where(gram.abs() > FAINT_ENTRY * gram.abs().amax((-1, -2), keepdim=True), gram, 0.0)


def _root(gram: Gram, zero: float, certain: float) -> Gram | None:
    """L with as many columns as the rank, `gram = L L'`; None where the rank is in doubt."""
    values, vectors = torch.linalg.eigh(gram)
    share = values / values[-1].clamp_min(torch.finfo(values.dtype).tiny)
    if bool(((share > zero) & (share <= certain)).any()):
        return None
    root: Tensor = vectors[:, share > zero] * values[share > zero].sqrt()
    return root


def _ratio(values: Float64[Tensor, "*lead n"]) -> Float64[Tensor, "*lead"]:
    """The smallest eigenvalue as a share of the largest; zero for a zero matrix."""
    return values[..., 0] / values[..., -1].clamp_min(torch.finfo(values.dtype).tiny)


@dataclass(frozen=True)
class _Own:
    """A group of invertible matrices, its sites on compared parameters, and on how many axes of one it acts."""

    group: Group
    sites: Mapping[str, Sequence[Site]]
    shared: int
    is_alone: bool

    @classmethod
    def of(cls, symmetry: Symmetry, name: str, owners: Mapping[str, frozenset[str]]) -> "_Own":
        sites = {n: [s for s in symmetry.sites[n] if s.group.name == name] for n in owners[name]}
        shared = max(len({site.placement.axis for site in local}) for local in sites.values())
        is_alone = not any(owners[name] & names for other, names in owners.items() if other != name)
        return cls(symmetry[name], sites, shared, is_alone)


class Matrices:
    """The invertible matrices of a network that is being balanced.

    Args:
        symmetry: With every size known.
        params: The compared parameters, `[batch, ...]`.
        rigid: For groups that keep the identity, where: `[batch]`.

    Attributes:
        names: The parameters that they act on.
        rigid: The given flags, and those of groups found to have no certain balance.
    """

    def __init__(self, symmetry: Symmetry, params: Mapping[str, Tensor], rigid: Mapping[str, Tensor]) -> None:
        self._symmetry, owners = symmetry, balanced_matrices(symmetry)
        self.names = tuple(dict.fromkeys(name for names in owners.values() for name in names))
        self._tensors = {name: params[name].detach().to(device="cpu", dtype=torch.float64) for name in self.names}
        self._batch = len(next(iter(self._tensors.values()))) if self.names else 1
        is_double = all(params[name].dtype == torch.float64 for name in self.names)
        self._zero, self._certain = (table[torch.float64] if is_double else low for table, low in _LIMITS)
        self.rigid = {name: rigid.get(name, torch.zeros(self._batch, dtype=torch.bool)) for name in owners}
        self._own = [_Own.of(symmetry, key, owners) for key in owners]
        blank = symmetry.identity((self._batch,))
        self._found = {own.group.name: blank[own.group.name].matrix for own in self._own}
        self._moved = {own.group.name: [torch.zeros(self._batch, dtype=torch.float64)] for own in self._own}

    def step(self, squares: Squares) -> float:
        """Take the best step of each group at the present scales; how far groups that depend on others moved."""
        for own in self._own:
            grams = self._grams(own, squares)
            matrix, is_good = balancing(*grams, self._zero, self._certain)
            is_rigid = self.rigid[own.group.name] | ~is_good.reshape(self._batch, -1).all(1)
            self.rigid[own.group.name] = is_rigid
            product = matrix.mT @ matrix
            if own.shared > 1:
                # The group acts on d axes of one tensor, and the step assumes that only one of them moves; its d-th
                # root does not go too far when all of them do.
                values, vectors = torch.linalg.eigh(product)
                product = (vectors * values.pow(1 / own.shared).unsqueeze(-2)) @ vectors.mT
                matrix = root_of(product)
            one = torch.eye(own.group.size, dtype=torch.float64)
            matrix = torch.where(is_rigid.reshape(-1, *[1] * (matrix.ndim - 1)), one, matrix)
            if own.shared > 1 or not own.is_alone:  # All others are at their best at once.
                self._moved[own.group.name] += [(matrix.mT @ matrix - one).abs().reshape(self._batch, -1).amax(1)]
            self._move(own, matrix, squares)
        return max(float(moved[-1].max()) for moved in self._moved.values())

    def give_up(self, tolerance: float, last: int) -> None:
        """Leave groups alone that would still move in step `last`: their norm has no smallest value.

        What they would move is what they move now, times the rate of the last half of the steps for each that is left.
        """
        for name, moved in self._moved.items():
            half, tiny = len(moved) // 2, torch.finfo(torch.float64).tiny
            rate = (moved[-1] / moved[half].clamp_min(tiny)).pow(1 / max(len(moved) - 1 - half, 1))
            self.rigid[name] = self.rigid[name] | (moved[-1] * rate.pow(max(last + 1 - len(moved), 0)) > tolerance)

    def _move(self, own: _Own, matrix: Gram, squares: Squares) -> None:
        known = self._found[own.group.name]
        assert known is not None
        self._found[own.group.name] = matrix @ known
        element = Element({own.group.name: Value(matrix=matrix)}, (self._batch,))
        tensors = {name: self._tensors[name] for name in own.sites}
        ndims = {name: len(self._symmetry.shapes[name]) for name in own.sites}
        sites = {name: list(local) for name, local in own.sites.items()}
        self._tensors |= _act.act((own.group,), sites, element, tensors, ndims)
        for name in own.sites:
            squares.put(name, self._tensors[name])

    def _grams(self, own: _Own, squares: Squares) -> tuple[Gram, Gram]:
        bases = tuple(self._symmetry[base].size for base in own.group.within)
        n = own.group.size
        sums = [torch.zeros(self._batch, *bases, n, n, dtype=torch.float64) for _ in range(2)]
        for name, local in own.sites.items():
            tensor = squares.scale(name, self._tensors[name])
            for site in local:
                values = unit_values(self._symmetry, name, site, tensor, 1)
                sums[site.placement.is_inverse] += values @ values.mT
        return sums[0], sums[1]

    def found(self) -> dict[str, Gram]:
        """The symmetric matrix that balances each group; the rotations that balance leaves free are dropped."""
        return {name: root_of(matrix.mT @ matrix) for name, matrix in self._found.items() if matrix is not None}


_LIMITS = ((ZERO, 1e-11), (CERTAIN, 1e-6))


def root_of(product: Gram) -> Gram:
    """The symmetric root of a positive definite matrix."""
    values, vectors = torch.linalg.eigh(product)
    root: Tensor = (vectors * values.clamp_min(0).sqrt().unsqueeze(-2)) @ vectors.mT
    return root

"""The squared norm of networks as a function of scales and matrices, its gradient, and products with its Hessian."""

from collections.abc import Iterator, Mapping
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64
from numpy.typing import NDArray
from torch import Tensor

from regauge.core.act import Site
from regauge.core.families import unit_values
from regauge.core.matrices import balancing, root_of
from regauge.core.norm_plan import Axes, Incidence, Pool, Table, plan_of
from regauge.core.symmetry import Symmetry

Array = NDArray[np.float64]
Steps = Float64[np.ndarray, "batch unknown"]
"""Changes of all unknowns: the logarithms of all scales, then one symmetric matrix per copy of each group."""
COLUMNS = 1 << 12
"""The number of columns of a matrix that are multiplied at once, to save memory."""
NOTHING = 1e-13
"""If the squared norms of two coordinates sum to less than this fraction of the largest squared norm, the curvature of
the pair is set to zero. The squared norms are the diagonal entries of the sum of the two Gram matrices of a group.
"""
Limits = tuple[float, float]
"""Two shares of the largest eigenvalue of a Gram matrix, by which the other eigenvalues are classified.

Eigenvalues below the first share count as zero, and eigenvalues above the second count as nonzero.
"""
Gram = Float64[np.ndarray, "batch copies n n"]


class SquaredNorm:
    """The squared norm of networks as a function of scales and matrices, at the current scales and matrices.

    Scales and symmetric matrices map a tensor T to `exp(L) T`. The symmetric linear map L depends linearly on the
    logarithms of scales and matrices. Along `exp(t L) T` the squared norm has the slope `2 <T, L T>` and the curvature
    `4 |L T|^2`. The curvature is never negative, so the squared norm is convex.

    Args:
        symmetry: The symmetry. All sizes of groups must be known.
        buffers: Whether scales may change running statistics.
        params: The compared parameters, `[batch, *shape]`.

    Attributes:
        logs: The logarithms of all scales, ordered by direction (combination of scale families), `[batch, unit]`.
        found: The product of all matrix steps so far, for each copy of each group.
        norm: The squared norm of all entries that scales or matrices affect.
    """

    def __init__(self, symmetry: Symmetry, buffers: Literal["move", "keep"], params: Mapping[str, Tensor]) -> None:
        self._symmetry, self.plan = symmetry, plan_of(symmetry, buffers)
        plan, self._batch = self.plan, len(next(iter(params.values())))
        rows, units = plan.incidence.rows.shape
        self.logs, self._fields = np.zeros((self._batch, units)), np.zeros((rows, self._batch))
        sums = [_squares(params[name], axes).reshape(self._batch, -1).T for name, axes in plan.entries.items()]
        self._entries = np.concatenate([np.zeros((0, self._batch)), *sums])
        self._tables = [self._table(params, table) for table in plan.tables]
        self._pools = [self._pool(params, pool) for pool in plan.pools]
        self._loose = [params[one.name].detach().cpu().double().flatten(1).numpy().copy() for one in plan.loose]
        self._alone = {name: self._sum_grams(params, name) for name in plan.grams}
        self.found = {name: np.zeros_like(gram[0]) + np.eye(gram.shape[-1]) for name, gram in self._alone.items()}
        self._places, self.size = dict[str, slice](), units
        for name in plan.coupled:
            self._places[name] = slice(self.size, self.size + self.found[name][0].size)
            self.size += self.found[name][0].size
        self._free = np.ones((self._batch, self.size))
        self._linear, self._volumes = np.zeros_like(self.logs), np.zeros(self._batch)
        self._single: dict[str, list[tuple[int, int, list[Array]]]] = {name: [] for name in plan.coupled}
        self._measure()
        # If a factor only multiplies, or only divides, nonzero entries, a linear term of slope two is added for it.
        up, down = ((part @ self._rows).T for part in (plan.incidence.rising, plan.incidence.falling))
        self._linear = 2.0 * (down <= 0) * (up > 0) - 2.0 * (up <= 0) * (down > 0)

    def _table(self, params: Mapping[str, Tensor], table: Table) -> Array:
        squares = np.empty((len(table.axes), self._batch, *table.shape))
        for into, (name, (up, out)) in zip(squares, table.axes.items(), strict=True):
            into[...] = _squares(params[name], (*up, *out)).reshape(into.shape)
        return squares

    def _pool(self, params: Mapping[str, Tensor], pool: Pool) -> Array:
        n, copies, first = self._symmetry[pool.group].size, self._symmetry.count_copies(pool.group), 0
        pooled = np.empty((self._batch, copies, n, (pool.rows.stop - pool.rows.start) // copies))
        for each in pool.sites:
            values = self._values(params, *each)
            pooled[..., first : first + values.shape[-1]] = values
            first += values.shape[-1]
        return pooled

    def _values(self, params: Mapping[str, Tensor], name: str, site: Site) -> Array:
        """Return the entries of a tensor on which a group acts, `[batch, copies, n, columns]`."""
        found: Array = self._units(params, name, site).cpu().numpy()
        return found

    def _units(self, params: Mapping[str, Tensor], name: str, site: Site) -> Tensor:
        """Return the entries of a tensor on which a group acts, `[batch, copies, n, columns]`, on the device of the
        parameters.
        """
        values = unit_values(self._symmetry, name, site, params[name].detach(), 1)
        return values.reshape(self._batch, -1, *values.shape[-2:]).double()

    def _sum_grams(self, params: Mapping[str, Tensor], group: str) -> Array:
        """Return the Gram matrices of the entries on which only this group acts, `[2, batch, copies, n, n]`.

        The first Gram matrix belongs to entries that the group's matrix multiplies, the second to entries that the
        inverse multiplies.
        """
        n, copies = self._symmetry[group].size, self._symmetry.count_copies(group)
        sums = np.zeros((2, self._batch, copies, n, n))
        for name, site in self.plan.grams[group]:
            units = self._units(params, name, site)
            if units.device.type == "cpu":
                values: Array = units.numpy()
                sums[int(site.placement.is_inverse)] += values @ values.swapaxes(-1, -2)
            else:  # only the small product is copied from the device
                sums[int(site.placement.is_inverse)] += (units @ units.mT).cpu().numpy()
        return sums

    def _side(self, rows: Array, table: Table, side: int) -> Array:
        """Arrange numbers, one for each sum of squares, in the order of the rows or columns of a table's matrices:
        `[tensor, batch, length]`.
        """
        parts = rows[table.sides[side]].reshape(len(table.axes), table.shape[side], self._batch)
        return np.ascontiguousarray(parts.swapaxes(1, 2))

    def _columns(self, rows: Array, pool: slice, copies: int) -> Array:
        """Arrange numbers, one for each sum of squares, in the order of the columns of a pool (entries that matrices
        multiply): `[batch, copies, 1, columns]`.
        """
        return rows[pool].T.reshape(self._batch, copies, 1, -1)

    def _measure(self) -> None:
        """Compute all sums of squares (rows) at the current scales and matrices."""
        self._factors = np.exp(self._fields)
        self._rows = np.empty_like(self._fields)
        self._rows[: len(self._entries)] = self._entries * self._factors[: len(self._entries)]
        self.norm = self._rows[: len(self._entries)].sum(0)
        for table, squares in zip(self.plan.tables, self._tables, strict=True):
            one, other = (self._side(self._factors, table, k) for k in (0, 1))
            sums = one * _times(squares, other), other * _times(squares.swapaxes(-1, -2), one)
            for rows, each in zip(table.sides, sums, strict=True):
                self._rows[rows] = each.swapaxes(1, 2).reshape(-1, self._batch)
            self.norm = self.norm + sums[0].sum((0, 2))
        for pool, values in zip(self.plan.pools, self._pools, strict=True):
            self._rows[pool.rows] = np.einsum("bkic,bkic->bkc", values, values).reshape(self._batch, -1).T
            self.norm = self.norm + self._rows[pool.rows].sum(0)
        for loose, values in zip(self.plan.loose, self._loose, strict=True):
            self._rows[loose.rows] = np.square(values).T
            self.norm = self.norm + self._rows[loose.rows].sum(0)
        for gram in self._alone.values():
            self.norm = self.norm + np.trace(gram, axis1=-2, axis2=-1).sum((0, 2))

    def objective(self) -> Float64[np.ndarray, " batch"]:
        """Return the squared norm plus terms that are linear in the logarithms of factors.

        Linear terms belong to units whose factor only multiplies, or only divides, entries that are not zero, and to
        singular matrices. Without linear terms, the norm would have no minimum.
        """
        found: Array = self.norm - (self._linear * self.logs).sum(1) - 2 * self._volumes
        return found

    def _meet(self, incidence: Incidence) -> Array:
        """Return the step of scales that minimizes an upper bound of the squared norm.

        The upper bound is a sum of one function for each unit: `sum W exp(e t)` of the step t, with weights W and
        exponents e. The function of a unit has a rising and a falling part, and is smallest where the slopes of both
        parts have the same size. If t changes by one, the logarithms of the two slopes approach each other at most by
        the sum of the largest exponents. The step is the difference of the two logarithms divided by the sum of the
        largest exponents. Therefore the step never goes beyond the minimum. If k units scale one entry, its square is
        bounded by the mean of k terms, each with k times the exponent. If the function of a unit only rises or only
        falls, the step ends where the slope equals the slope of the linear term.
        """
        up, down = ((part @ self._rows).T for part in (incidence.rising, incidence.falling))
        is_one, is_other = up > 0, down > 0
        gap = np.log(np.where(is_other, down, 2.0)) - np.log(np.where(is_one, up, 2.0))
        steepest = is_one * incidence.steepest[0] + is_other * incidence.steepest[1]
        step: Array = np.divide(gap, steepest, out=np.zeros_like(gap), where=steepest > 0)
        return step

    def sweep(self) -> None:
        """Change all scales at once to the minimum of an upper bound of the norm."""
        step = self._meet(self.plan.incidence)
        self._shift(self.plan.incidence, step)
        self.logs += step
        self._measure()

    def normalize(self) -> list[Array]:
        """Scale filters to norm one, up to a constant, and return the steps. Filters that several normalizers scale
        stay unchanged.

        A normalizer is a direction of scales that changes buffers, for example the scale of a filter before batch
        normalization.
        """
        steps, moved = [], set[str]()
        for filters in self.plan.filters:
            own = {place.name for place in filters.direction.own}
            if moved & own:
                self._measure()
            moved |= {place.name for place in filters.direction.places}
            steps.append(self._meet(filters.own))
            self._shift(filters.moves, steps[-1])
        return steps

    def grams(self, group: str) -> tuple[Gram, Gram]:
        """Return two Gram matrices: one of the entries that the group's matrix multiplies, and one of the entries that
        the inverse multiplies.
        """
        sums = self._alone[group].copy()
        for sign, values in self._acted_on(group):
            sums[int(sign < 0)] += values @ values.swapaxes(-1, -2)
        return sums[0], sums[1]

    def _acted_on(self, group: str) -> Iterator[tuple[int, Array]]:
        """Yield the entries on which scales or other groups act in addition to the given group. The entries come with
        the number 1 if the group's matrix acts on them, or with -1 if its inverse acts.
        """
        for pool, values in zip(self.plan.pools, self._pools, strict=True):
            if pool.group == group:
                yield pool.sign, values
        for loose, values in zip(self.plan.loose, self._loose, strict=True):
            yield from ((sign, values[:, index]) for name, sign, index in loose.slots if name == group)

    def multiply(self, group: str, matrix: Gram) -> None:
        """Multiply all entries on which a group acts by a matrix.

        Entries on which the inverse acts are multiplied by the inverse transpose.
        """
        both = {1: matrix, -1: np.linalg.inv(matrix).swapaxes(-1, -2)}
        for k, copy, bases in self._single.get(group, []):
            for side, each in enumerate(both.values()):
                bases[side], triangle = np.linalg.qr(each[k, copy] @ bases[side])
                self._volumes[k] += np.log(np.abs(np.diagonal(triangle))).sum()
        self.found[group] = matrix @ self.found[group]
        for gram, each in zip(self._alone[group], both.values(), strict=True):
            gram[...] = each @ gram @ each.swapaxes(-1, -2)
        for pool, values in zip(self.plan.pools, self._pools, strict=True):
            for part in _parts(values) if pool.group == group else ():
                part[...] = both[pool.sign] @ part
        for loose, values in zip(self.plan.loose, self._loose, strict=True):
            for name, sign, index in loose.slots:
                if name == group:
                    values[:, index] = both[sign] @ values[:, index]

    def _shift(self, incidence: Incidence, step: Array) -> None:
        """Change the scales by a step in their logarithms: multiply the entries by the exponentials."""
        fields = incidence.rows @ step.T
        self._fields += fields
        roots = np.exp(fields / 2)
        for pool, values in zip(self.plan.pools, self._pools, strict=True):
            values *= self._columns(roots, pool.rows, values.shape[1])
        for loose, values in zip(self.plan.loose, self._loose, strict=True):
            values *= roots[loose.rows].T

    def balance(
        self, group: str, is_rigid: Bool[np.ndarray, " batch"], is_chosen: Bool[np.ndarray, " batch"], limits: Limits
    ) -> None:
        """Take the best step of the matrices of one group, while all scales and other groups are fixed.

        Networks outside of `is_chosen` do not change. Networks in which the group must stay the identity (is rigid) do
        not change either. If the group acts on d axes of one tensor, the step is the d-th root of the best step for a
        single axis. The root is a shorter step, which does not go beyond the minimum. If a copy is singular, one of its
        two Gram matrices may be zero on a subspace on which the other is nonzero. For a singular copy, the objective
        gets a linear term in the logarithm of the volume of the subspace. If the rank of a copy's Gram matrices is
        uncertain, the group becomes rigid in this network.
        """
        forward, inverse = self.grams(group)
        found, is_good = balancing(torch.from_numpy(forward), torch.from_numpy(inverse), *limits)
        is_rigid |= is_chosen & ~is_good.numpy().all(1)
        is_moved = (is_chosen & ~is_rigid)[:, None]
        shared = max([sum(name == group for name, *_ in one.slots) for one in self.plan.loose], default=1)
        matrix = found.numpy() if shared <= 1 else root_of(found.mT @ found, 1 / shared).numpy()
        self.multiply(group, np.where(is_moved[..., None, None], matrix, np.eye(matrix.shape[-1])))
        if group in self._places:
            self._free[is_chosen, self._places[group]] = ~is_rigid[is_chosen, None]
            self._single[group] = [one for one in self._single[group] if not is_chosen[one[0]]]
            grams = np.stack(self.grams(group))
            for k, copy in np.argwhere(is_moved & ~_are_regular(grams, limits[1])):
                one, other = grams[:, k, copy]
                bases = [_beyond(one, other, limits[0]), _beyond(other, one, limits[0])]
                self._single[group].append((k, copy, bases))

    @property
    def singular(self) -> list[str]:
        """The names of the groups that have a copy with singular Gram matrices."""
        return [group for group, copies in self._single.items() if copies]

    def matrices(self, step: Steps) -> dict[str, Array]:
        """Return the symmetric matrices of a step, by group, as writable views."""
        return {name: step[:, part].reshape(self.found[name].shape) for name, part in self._places.items()}

    def slopes(self) -> tuple[Steps, Steps]:
        """Return the gradient of the squared norm, and the diagonal of its Hessian.

        The diagonal of the Hessian refers to coordinates in which Gram matrices are diagonal.
        """
        gradient, diagonal = np.zeros((2, self._batch, self.size))
        # Products with the Hessian need only single precision.
        self._rounded = [values.astype(np.float32) for values in self._pools]
        units = self.logs.shape[1]
        gradient[:, :units] = (self.plan.incidence.columns @ self._rows).T - self._linear
        diagonal[:, :units] = (self.plan.incidence.columns.power(2) @ self._rows).T
        places = self.matrices(gradient), self.matrices(diagonal)
        for name in self._places:
            forward, inverse = self.grams(name)
            one, other = self._projectors(name)
            places[0][name][...] = 2 * (forward - one - inverse + other)
            sizes = np.diagonal(forward + inverse, axis1=-2, axis2=-1)
            sums = sizes[..., :, None] + sizes[..., None, :]
            # Where both Gram matrices are zero, entries are rounding errors, and the step must be zero.
            places[1][name][...] = 2 * np.where(sums > NOTHING * sizes.max(-1)[..., None, None], sums, 0.0)
        return gradient * self._free, diagonal * self._free

    def _projectors(self, group: str) -> tuple[Array, Array]:
        """Return the projections to the two subspaces on which only one of the two Gram matrices of a copy is nonzero.

        On the first subspace, only the Gram matrix of the group is nonzero. On the second subspace, only the Gram
        matrix of its inverse is nonzero.
        """
        found = np.zeros((2, *self.found[group].shape))
        for k, copy, bases in self._single[group]:
            for into, basis in zip(found, bases, strict=True):
                into[k, copy] = basis @ basis.T
        return found[0], found[1]

    def product(self, step: Steps) -> Steps:
        """Return the product of the Hessian and a step."""
        result = np.zeros_like(step)
        units = self.logs.shape[1]
        fields = self.plan.incidence.rows @ step[:, :units].T
        rows = self._rows * fields
        for table, squares in zip(self.plan.tables, self._tables, strict=True):
            (one, other), (u, v) = ([self._side(each, table, k) for k in (0, 1)] for each in (self._factors, fields))
            sums = one * _times(squares, other * v), other * _times(squares.swapaxes(-1, -2), one * u)
            for part, each in zip(table.sides, sums, strict=True):
                rows[part] += each.swapaxes(1, 2).reshape(-1, self._batch)
        matrices, results = self.matrices(step), self.matrices(result)
        for name in self._places:
            _add_both(results[name], 2, matrices[name] @ self._alone[name].sum(0))
            if self._single[name]:
                for each in self._projectors(name):
                    _add_both(results[name], -2, matrices[name] @ each - each @ matrices[name] @ each)
        for pool, values in zip(self.plan.pools, self._rounded, strict=True):
            matrix = (pool.sign * matrices[pool.group]).astype(np.float32)
            halves = (self._columns(fields, pool.rows, values.shape[1]) / 2).astype(np.float32)
            columns = np.empty(halves.shape)
            for piece, half, into in zip(_parts(values), _parts(halves), _parts(columns), strict=True):
                moved = matrix @ piece
                moved += piece * half
                into[..., 0, :] = np.einsum("bkic,bkic->bkc", piece, moved)
                _add_both(results[pool.group], 2 * pool.sign, moved @ piece.swapaxes(-1, -2))
            rows[pool.rows] = 2 * columns.reshape(self._batch, -1).T
        for loose, values in zip(self.plan.loose, self._loose, strict=True):
            moved = values * (fields[loose.rows].T / 2)
            for name, sign, index in loose.slots:
                moved[:, index] += (sign * matrices[name]) @ values[:, index]
            rows[loose.rows] = 2 * (values * moved).T
            for name, sign, index in loose.slots:
                _add_both(results[name], 2 * sign, moved[:, index] @ values[:, index].swapaxes(-1, -2))
        result[:, :units] = (self.plan.incidence.columns @ rows).T
        return result * self._free

    def move(self, step: Steps) -> None:
        """Take a step: change the scales and matrices, and update the sums of squares."""
        units = self.logs.shape[1]
        for name, matrix in self.matrices(step).items():
            values, vectors = np.linalg.eigh(matrix)
            self.multiply(name, (vectors * np.exp(values)[..., None, :]) @ vectors.swapaxes(-1, -2))
        self._shift(self.plan.incidence, step[:, :units])
        self.logs += step[:, :units]
        self._measure()


def _add_both(total: Array, factor: float, product: Array) -> None:
    total += factor * (product + product.swapaxes(-1, -2))


def _parts(values: NDArray[np.floating]) -> list[NDArray[np.floating]]:
    """Return views of consecutive blocks of columns of a matrix."""
    return [values[..., first : first + COLUMNS] for first in range(0, values.shape[-1], COLUMNS)]


def _times(matrices: Array, vectors: Array) -> Array:
    found: Array = np.matmul(matrices, vectors[..., None])[..., 0]
    return found


def _squares(tensor: Float[Tensor, "batch *shape"], axes: Axes) -> NDArray[np.floating]:
    """Return a tensor's squares, summed over all axes except the given ones, which keep their given order."""
    work = torch.promote_types(tensor.dtype, torch.float32)
    squares = tensor.detach().to(work).square()
    squares = squares if squares.ndim > 1 else squares.unsqueeze(-1)
    free = tuple(1 + axis for axis in range(squares.ndim - 1) if axis not in axes)
    squares = squares.sum(free, dtype=torch.float64) if free else squares
    left = sorted(axes)
    found: NDArray[np.floating] = squares.permute(0, *(1 + left.index(axis) for axis in axes)).cpu().numpy()
    return found


def _beyond(gram: Array, other: Array, zero: float) -> Array:
    """Return an orthonormal basis of the subspace on which `gram` is nonzero and `other` is zero."""
    values, vectors = np.linalg.eigh(other)
    null = vectors[:, values <= zero * values[-1]]
    values, vectors = np.linalg.eigh(null.T @ gram @ null)
    basis: Array = null @ vectors[:, values > zero * np.linalg.eigvalsh(gram)[-1]]
    return basis


def _are_regular(
    grams: Float64[np.ndarray, "side batch copies n n"], certain: float
) -> Bool[np.ndarray, "batch copies"]:
    """Return, for each copy, whether the Gram matrices of the group and of its inverse both have full rank."""
    values = np.linalg.eigvalsh(grams)
    found: NDArray[np.bool_] = np.all(values[..., 0] > certain * values[..., -1], axis=0)
    return found

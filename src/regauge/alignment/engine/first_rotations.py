"""Initial rotations, computed from tensors that no other group changes, and from products of two tensors.

Besides rotations, other groups act on the tensors of a residual stream: permutations of hidden units and heads, and
matrices within heads. The elements of the other groups are unknown at first, but they cancel in certain products of
tensors. One kind of product multiplies weights that read the stream by weights that write to it. Another kind
multiplies query weights by key weights. A rotation of the stream acts on both sides of each product. A rotation that is
found from products of tensors depends only on the function of the layers. A rotation from single tensors would depend
on the matching of hidden units, and would fit the noise of this matching.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from regauge.alignment.engine.paired_networks import dots, norms
from regauge.core.act import Site
from regauge.core.closest import closest
from regauge.core.element import Value
from regauge.core.families import Sites, Tensors, has_choice, unfold
from regauge.core.groups import Group
from regauge.core.products import matmul

SHARE = 0.3
"""The total weight of all products of tensors, relative to the total weight of the tensors that no other group
changes."""
STEPS = 8
"""The largest number of steps that improve a rotation on products of tensors."""
LEAST = 1e-9
"""The smallest gain of a rotation step, as a fraction of the objective."""


@dataclass(frozen=True)
class Side:
    """Part of a matrix. The fields are the axis on which a rotation acts, some indices along the other axis, and the
    groups that act on the other axis.
    """

    name: str
    axis: int
    positions: Int64[Tensor, " m"]
    sites: Mapping[str, Site]

    def of(self, tensors: Tensors) -> Float[Tensor, "pair n m"]:
        """Return the entries of the matrix that belong to the part. The first axis indexes the units of the
        rotation.
        """
        tensor = tensors[self.name] if self.axis == 0 else tensors[self.name].mT
        positions = self.positions.to(tensor.device)
        return tensor if len(positions) == tensor.shape[-1] else tensor.index_select(-1, positions)


@dataclass(frozen=True)
class TwoSided:
    """Two parts of matrices whose product changes only with the rotation. In the product, all other groups cancel.

    The product is summed over an inner index. For each inner index of the first part, `index` contains the
    corresponding index of the second part. Indices can repeat, because several heads may share keys and values.
    """

    first: Side
    second: Side
    index: Int64[Tensor, " m"]

    def of(self, tensors: Tensors) -> Float[Tensor, "pair n n"]:
        """Return the product of the two matrix parts, given tensors `[pair, ...]`."""
        second = self.second.of(tensors)
        return matmul(self.first.of(tensors), second.index_select(-1, self.index.to(second.device)).mT)


def chosen_sites(sites: Sites) -> dict[str, list[Site]]:
    """Return the axes of tensors on which optimized groups act. Groups with only positive scales stay at one."""
    return {name: [site for site in local if has_choice(site.group)] for name, local in sites.items()}


def find_products(name: str, sites: Sites, shapes: Mapping[str, Sequence[int]]) -> list[TwoSided]:
    """Return pairs of tensors whose product only the named group changes, by acting on both sides of the product."""
    parts = [part for tensor, local in sites.items() for part in _parts(name, tensor, local, shapes[tensor])]
    pairs = ((one, other) for k, one in enumerate(parts) for other in parts[:k])
    return [found for pair in pairs if (found := _product(*pair) or _product(*pair[::-1])) is not None]


def _parts(name: str, tensor: str, local: Sequence[Site], shape: Sequence[int]) -> Iterator[Side]:
    own, others = ([site for site in local if (site.group.name == name) == is_own] for is_own in (True, False))
    if len(shape) != 2 or len(own) != 1 or not own[0].is_plain or own[0].group.size != shape[own[0].placement.axis]:
        return
    axis, seen = own[0].placement.axis, list[Tensor]()
    if any(site.placement.axis == axis or any(base is not None for base, _ in site.bases) for site in others):
        return
    for site in others:
        positions = site.positions.sort().values
        near = [other for other in others if bool(torch.isin(other.positions, positions).any())]
        acting = {other.group.name: other for other in near}
        is_whole = all(bool(torch.isin(positions, other.positions).all()) for other in near)
        if is_whole and len(acting) == len(near) and not any(torch.equal(positions, one) for one in seen):
            seen.append(positions)
            yield Side(tensor, axis, positions, acting)


def _product(first: Side, second: Side) -> TwoSided | None:
    """Return the product of two matrix parts if all actions of other groups cancel in it, otherwise None."""
    shared = [(first.sites.get(name), site) for name, site in second.sites.items()]
    alone = [site for name, site in first.sites.items() if name not in second.sites]
    if any(site.group.matrix != "none" or _turns(site) for site in alone):
        return None
    keys = [torch.zeros(len(part.positions), dtype=torch.int64) for part in (first, second)]
    for one, other in shared:
        if one is None or not _cancels(one, other):
            return None
        for columns in zip(_owners(one, first.positions), _owners(other, second.positions), strict=True):
            size = 1 + max(int(column.max()) for column in columns)
            keys = [key * size + column for key, column in zip(keys, columns, strict=True)]
    order = keys[1].argsort()
    known = keys[1][order]
    index = torch.searchsorted(known, keys[0]).clamp(max=len(known) - 1)
    is_found = torch.equal(known[index], keys[0]) and bool((known[1:] > known[:-1]).all())
    return TwoSided(first, second, order[index]) if is_found else None


def _owners(site: Site, positions: Tensor) -> list[Tensor]:
    """Return the unit, and the indices of the bases, that own each position on an axis."""
    order = site.positions.argsort()
    place = order[torch.searchsorted(site.positions[order], positions)]
    return [column[place] for column in (*(index for _, index in site.bases), site.units)]


def _turns(site: Site) -> bool:
    place = site.placement
    return any(e % 2 for e in place.sign) or any((*place.parity, *place.shift))


def _cancels(one: Site, other: Site) -> bool:
    """Return whether a group's actions on two tensors cancel in their product.

    Positive scales count as cancelling, because they are balanced and matching does not change them.
    """
    x, y = one.placement, other.placement
    is_signed_alike = [e % 2 for e in x.sign] == [e % 2 for e in y.sign] and x.parity == y.parity
    is_opposite = x.is_inverse != y.is_inverse
    return is_signed_alike and not any((*x.shift, *y.shift)) and is_opposite == (one.group.matrix == "linear")


@dataclass
class FirstRotation:
    """An iteration for the rotation R that maximizes `<R, C> + sum_k w_k <A_k, R B_k R'>`, where A and B are products
    of tensors.

    C is the sum of the inner products of tensors that no other group changes. Each inner product is divided by the
    square root of the product of both tensors' norms. Without the division, large tensors would dominate, although most
    large tensors stay near their initialization. The weights of all products sum to a fixed number.

    Attributes:
        group: The name of the group that rotates.
        count: The number of products.
        steps: The number of steps taken.
        matrix: The current rotation.
        best: The rotation with the largest objective so far.
    """

    group: Group
    count: int
    steps: int = field(default=0, init=False)
    matrix: Float64[Tensor, "pair n n"] = field(init=False)
    best: Float64[Tensor, "pair n n"] = field(init=False)

    def __post_init__(self) -> None:
        self._cost: Tensor | float = 0.0
        self._reach: Tensor | float = 0.0
        self._reached = torch.tensor(-torch.inf, dtype=torch.float64)
        self._linear: Tensor | float = 0.0
        self._gained: Tensor | float = 0.0

    def add(self, cost: Float64[Tensor, "pair n n"], size: Float64[Tensor, " pair"]) -> None:
        """Add the term of one tensor to the objective. `cost` contains the inner products between the units of both
        networks, and `size` the product of the tensor's norms in both networks.
        """
        self._cost = self._cost + cost * torch.where(size > 0, size, 1.0).rsqrt()[:, None, None].to(cost)
        self._reach = self._reach + size.sqrt()

    def start(self) -> bool:
        """Choose the rotation that is best for the terms of single tensors. Return whether the objective has terms of
        single tensors.
        """
        if not (isinstance(self._cost, Tensor) and isinstance(self._reach, Tensor) and bool((self._reach > 0).all())):
            return False
        self.matrix = self.best = self._solve(self._cost)
        return True

    def see(self, a: Float[Tensor, "pair n n"], b: Float[Tensor, "pair n n"]) -> None:
        """Add a product of two tensors to the objective. The product is `a` in the first networks, and `b` in the
        second networks after rotation by `matrix`.
        """
        size = norms(a) * norms(b)
        weight = SHARE / self.count * self._reach / torch.where(size > 0, size, 1.0)
        linear = (matmul(a, b.mT) + matmul(a.mT, b)).double()
        self._linear = self._linear + weight[:, None, None].to(linear) * linear
        self._gained = self._gained + weight * dots(a, b)

    def step(self) -> bool:
        """Replace the current rotation by the one that maximizes the linearized objective.

        Return whether the previous step had raised the objective.
        """
        assert isinstance(self._cost, Tensor)
        assert isinstance(self._linear, Tensor)
        here = self.matrix.to(self._cost)
        reached = self._gained + (self._cost * here).sum((-1, -2)).cpu()
        is_better = reached - self._reached > LEAST * reached.abs()
        self.best = torch.where(is_better[:, None, None], self.matrix, self.best)
        self._reached = torch.where(is_better, reached, self._reached)
        self.matrix = self._solve(self._cost + self._linear @ here)
        self._linear, self._gained, self.steps = 0.0, 0.0, self.steps + 1
        return bool(is_better.any())

    def _solve(self, cost: Tensor) -> Tensor:
        found = closest(self.group, cost).value.matrix
        assert found is not None
        return found


def first_rotations(
    groups: Sequence[Group], sites: Mapping[str, Sequence[Site]], a: Tensors, b: Tensors
) -> dict[str, Value]:
    """Return initial rotations for the groups that have suitable products of tensors, for networks `[pair, ...]`."""
    result, sites = {}, chosen_sites(sites)
    for group in groups:
        own = {name: local for name, local in sites.items() if any(s.group.name == group.name for s in local)}
        found = find_products(group.name, own, {name: a[name].shape[1:] for name in own})
        turning = FirstRotation(group, len(found))
        for name, local in own.items():
            if len(local) == 1:
                x, y = (unfold(tensors[name], local[0], 1) for tensors in (a, b))
                turning.add(matmul(x, y.mT).double(), norms(x) * norms(y))
        if not found or not turning.start():
            continue
        products, is_better = [(product.of(a), product.of(b)) for product in found], True
        while is_better and turning.steps < STEPS:
            for x, y in products:
                turn = turning.matrix.to(y)
                turning.see(x, matmul(matmul(turn, y), turn.mT))
            is_better = turning.step()
        result[group.name] = Value(matrix=turning.best)
    return result

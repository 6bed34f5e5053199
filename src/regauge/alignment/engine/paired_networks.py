"""Pairs of networks along a leading axis, and the current element that acts on the second network of each pair."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float64, Int8
from torch import Tensor

from regauge.core import act as _act
from regauge.core import element as _element
from regauge.core.act import Site
from regauge.core.closest import character
from regauge.core.element import Element, Value
from regauge.core.families import Family, Tensors
from regauge.core.groups import Group

IN_PLACE = 0.6
"""The largest fraction of changed units for which a tensor is updated in place.

If more units change, computing a new tensor is faster.
"""
PerPair = Float64[Tensor, " pair"]


class PairedNetworks:
    """Pairs of networks, and for each pair the current element that acts on the second network.

    The transformed tensors of the second networks are computed on access.

    Tensors stay on their device, and the costs for comparisons are computed there. Elements and numbers for each pair
    are on the CPU.

    Args:
        families: The families of groups to optimize. Axes on which the groups act are numbered without the leading axis
            of the tensors.
        a: The first networks, `[pair, ...]`.
        b: The second networks.
        start: A batch of initial elements without positive scales. Default: the identity.

    Attributes:
        pairs: The number of pairs.
        sites: For each tensor, the axes on which optimized groups act (sites).
        writes: How often the value of each group was set. The count is zero for a group that is at the identity and was
            never set.
    """

    def __init__(self, families: Sequence[Family], a: Tensors, b: Tensors, start: Element | None = None) -> None:
        self.families, self.a, self.b = list(families), dict(a), dict(b)
        self.pairs = len(next(iter(b.values()))) if b else 1
        groups = {group.name: group for family in families for group in family.fixed}
        groups |= {group.name: group for family in families for group in family.members}
        self._groups = tuple(groups.values())
        blank = _element.identity(self._groups, (self.pairs,))
        given = blank if start is None else start
        # Positive factors stay at one and are left out.
        self.values = {n: replace(given[n], scale=None).map(lambda t: t.contiguous().clone()) for n in blank}
        self.sites: dict[str, list[Site]] = {}
        for family in self.families:
            for name, local in family.own_sites.items():
                known = self.sites.setdefault(name, [])
                known.extend(site for site in local if not any(site is other for other in known))
        self.writes = dict.fromkeys(self.values, 0 if start is None else 1)
        self._given = _Kept({}, dict(blank.items()), dict.fromkeys(self.values, 0))
        self._kept: dict[str, _Kept] = {}

    @property
    def element(self) -> Element:
        """Return the current element of each pair, without groups that are not optimized."""
        return Element(self.values, (self.pairs,))

    def value(self, name: str, rows: Tensor | None = None) -> Value:
        """Return the current value of one group, for the selected pairs."""
        return self.values[name] if self._is_every(rows) else self.values[name].map(lambda t: t[rows])

    def write(self, name: str, rows: Tensor, value: Value) -> None:
        """Set the current value of one group for the selected pairs."""
        known = dict(self.values[name].items())
        if self._is_every(rows):
            self.values[name] = replace(self.values[name], **{p: new.to(known[p].dtype) for p, new in value.items()})
        else:
            for part, new in value.items():
                known[part][rows] = new
        self.writes[name] += 1

    def compose(self, family: Family, rows: Tensor, relative: Element, moved: Tensors) -> None:
        """Multiply the current values of one family by an element.

        Args:
            family: The family whose groups take the step.
            rows: The selected pairs of networks.
            relative: The element by which the current values are multiplied.
            moved: The tensors of the selected pairs after the step, if they are already known.
        """
        groups = (*family.members, *family.fixed)
        current = Element({group.name: self.value(group.name, rows) for group in groups}, (len(rows),))
        now = _element.compose(groups, relative, current)
        for group in family.members:
            self.write(group.name, rows, now[group.name])
        if self.pairs == 1:
            self._keep(moved)

    def moved(self, names: Iterable[str] | None = None, rows: Tensor | None = None) -> dict[str, Tensor]:
        """Return tensors of the second networks after the current element was applied.

        For a single pair, the tensors are cached, and the next call updates them in place. If the current element is
        the identity, the given tensors themselves are returned, without a copy.
        """
        names = self.sites if names is None else names
        if self.pairs > 1:
            return {name: self.moved_by(name, self.sites[name], rows) for name in names}
        return {name: self._follow(name) for name in names}

    def second(self) -> dict[str, Tensor]:
        """Return all tensors of the second networks in their current state."""
        moved = self.moved()
        return {name: moved.get(name, tensor) for name, tensor in self.b.items()}

    def _follow(self, name: str) -> Tensor:
        """Return a cached tensor of a single second network, after bringing it up to date.

        Only units that changed since the last call are written.
        """
        sites, kept = self.sites[name], self._kept.get(name, self._given)
        stale = [site for site in sites if any(kept.writes[group] != self.writes[group] for group in _names(site))]
        tensor = kept.tensors.get(name, self.b[name])
        if not stale:
            return tensor
        if any(site.bases or site.group.matrix != "none" or any(site.placement.shift) for site in sites):
            tensor = self.moved_by(name, sites)
        else:
            for site in stale:
                before, now = kept.values[site.group.name], self.values[site.group.name]
                tensor = _move_on(tensor, site, before, now, is_ours=tensor is not self.b[name])
        self._keep({name: tensor})
        return tensor

    def _keep(self, tensors: Tensors) -> None:
        """Cache tensors of a single second network, to which the current values have been applied."""
        now = _Kept(tensors, dict(self.values), dict(self.writes))
        self._kept |= dict.fromkeys(tensors, now)

    def moved_by(self, name: str, sites: Sequence[Site], rows: Tensor | None = None) -> Tensor:
        """Return a tensor of the second networks after the current element has acted on the axes in `sites` only.

        If the current element is the identity, the given tensor itself is returned, without a copy.
        """
        tensor = at(self.b[name], rows)
        sites = [site for site in sites if any(self.writes.get(group, 1) for group in _names(site))]
        if not sites:
            return tensor
        chosen = {site.group.name for site in sites}
        element = Element({group: self.value(group, rows) for group in chosen}, (len(tensor),))
        return act_on(self._groups, {name: sites}, element, {name: tensor})[name]

    def objectives(self, moved: Tensors, rows: Tensor | None = None) -> PerPair:
        """Return the objective `<a, moved> - (|moved|^2 - |b|^2) / 2`, summed over the tensors in `moved`.

        Only half-period shifts make the second term nonzero.
        """
        total = torch.zeros(self.pairs if rows is None else len(rows), dtype=torch.float64)
        for name, y in moved.items():
            total += dots(at(self.a[name], rows), y)
            if any(any(site.placement.shift) for site in self.sites.get(name, ())):
                z = at(self.b[name], rows)
                total -= (dots(y, y) - dots(z, z)) / 2
        return total

    def _is_every(self, rows: Tensor | None) -> bool:
        return rows is None or rows.shape[0] == self.pairs


@dataclass(frozen=True)
class _Kept:
    """A cache of tensors of a second network on which the current values of groups have acted. The cache also holds the
    values with which its tensors were computed, and how often each value had been set when the tensors were computed.
    """

    tensors: Tensors
    values: Mapping[str, Value]
    writes: Mapping[str, int]


def _names(site: Site) -> tuple[str, ...]:
    """Return the names of the groups that determine how an axis of a tensor (a site) is transformed."""
    return (site.group.name, *site.group.within)


def _move_on(tensor: Tensor, site: Site, before: Value, now: Value, *, is_ours: bool) -> Tensor:
    """Return a tensor `[1, ...]` on which a group acts by the value `now` instead of `before`, if possible in place."""
    units = torch.arange(site.group.size)
    # Unit i of the tensor is b[before[i]] and must become b[now[i]], which is unit before^-1[now[i]] of the tensor.
    # Signs are their own inverses, so the signs of both values are multiplied.
    source = units if before.perm is None or now.perm is None else before.perm[0].argsort()[now.perm[0]]
    changed, factor = source != units, None
    if any(character(site.placement)):
        factor = unit_factors(site, now, 1)[0] * unit_factors(site, before, 1)[0][source]
        changed |= factor != 1
    moved = changed.nonzero().flatten()
    if not len(moved):
        return tensor
    if len(moved) <= IN_PLACE * len(units):
        units, source, factor = moved, source[moved], None if factor is None else factor[moved]
    rows, axis = site.positions.reshape(site.group.size, -1), 1 + site.placement.axis
    new = _act.take(tensor, axis, rows[source].flatten().to(tensor.device))
    if factor is not None:
        shape = [-1 if k == axis else 1 for k in range(new.ndim)]
        new *= factor.repeat_interleave(rows.shape[1]).to(new).reshape(shape)
    if rows[units].numel() == tensor.shape[axis] and site.is_sorted:
        return new
    return (tensor if is_ours else tensor.clone()).index_copy_(axis, rows[units].flatten().to(tensor.device), new)


def unit_factors(site: Site, value: Value, count: int) -> Int8[Tensor, "pair unit"]:
    """Return the signs by which `count` values of a group multiply the units along an axis of a tensor."""
    factor = torch.ones(count, site.group.size, dtype=torch.int8)
    signs = 0 if value.sign is None else value.sign.shape[-2]
    for k, exponent in enumerate(character(site.placement)):
        if exponent and k < signs:
            assert value.sign is not None
            factor *= value.sign[:, k]
        elif exponent:
            assert value.shift is not None
            factor *= (1 - 2 * (value.shift[:, k - signs] % 2)).to(torch.int8)
    return factor


def act_on(
    groups: Collection[Group], sites: Mapping[str, Sequence[Site]], element: Element, tensors: Tensors
) -> dict[str, Tensor]:
    """Apply a batch of elements to tensors `[pair, ...]`, and return the results. The elements act only on the axes in
    `sites`.
    """
    local = {name: list(own) for name, own in sites.items()}
    ndims = {name: tensors[name].ndim - 1 for name in sites}
    own = {name: tensors[name] for name in sites}
    if element.batch != (1,):
        return _act.act(tuple(groups), local, element, own, ndims)
    moved = _act.act(tuple(groups), local, element.item(0), {name: t[0] for name, t in own.items()}, ndims)
    return {name: tensor.unsqueeze(0) for name, tensor in moved.items()}


def at(tensor: Tensor, rows: Tensor | None) -> Tensor:
    """Return the selected pairs of a tensor. If all pairs are selected, the tensor is not copied."""
    return tensor if rows is None or rows.shape[0] == tensor.shape[0] else tensor[rows]


def put(into: Tensor, rows: Tensor, new: Tensor) -> None:
    """Overwrite the entries of the selected pairs in a tensor."""
    if rows.shape[0] == into.shape[0]:
        into.copy_(new)
    else:
        into[rows] = new


def dots(x: Float64[Tensor, "pair *shape"], y: Float64[Tensor, "pair *shape"]) -> PerPair:
    """Return the inner product of the two tensors for each pair.

    Each row is summed in its own precision, and the row sums are added in float64.
    """
    if x.ndim > 3:
        x, y = x.flatten(2), y.flatten(2)
    products: Tensor = torch.linalg.vecdot(x, y) if x.ndim > 1 else x * y
    return (products.sum(1, dtype=torch.float64) if products.ndim > 1 else products.double()).cpu()


def norms(x: Float64[Tensor, "pair *shape"]) -> PerPair:
    """Return the norm of a tensor, separately for each pair of networks."""
    found: Tensor = torch.linalg.vector_norm(x.reshape(len(x), -1), dim=1)
    return found.double().cpu()

"""Pairs of networks along a leading axis, and where the second network of each pair is."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from regauge.core import act as _act
from regauge.core import element as _element
from regauge.core.act import Site
from regauge.core.element import Element, Value
from regauge.core.families import Family, Tensors


class Stacks:
    """Both networks of every pair, and an element for each. Tensors stay where they are; they are moved when asked for.

    Args:
        families: What is chosen; their sites are relative to the tensors without their leading axis.
        a: First networks, `[pair, ...]`.
        b: Second networks.
        start: Where to begin, a batch of elements; the identity unless given.

    Attributes:
        pairs: Their number.
        groups: All groups of the families, also those that stay.
        sites: For each tensor the number of the family and the site of every group that is chosen.
        rest: What tensors contribute for which nothing is chosen, float64 `[pair]`.
    """

    def __init__(self, families: Sequence[Family], a: Tensors, b: Tensors, start: Element | None = None) -> None:
        self.families, self.a, self.b = list(families), dict(a), dict(b)
        self.pairs = len(next(iter(b.values())))
        groups = {group.name: group for family in families for group in family.fixed}
        groups |= {group.name: group for family in families for group in family.members}
        self.groups = tuple(groups.values())
        blank = _element.identity(self.groups, (self.pairs,))
        given = blank if start is None else start
        # Positive factors stay at one and are left out.
        self.values = {n: replace(given[n], scale=None).map(lambda t: t.contiguous().clone()) for n in blank}
        self.sites: dict[str, list[tuple[int, Site]]] = {}
        for k, family in enumerate(self.families):
            names = {group.name for group in family.members}
            for name, local in family.sites.items():
                self.sites.setdefault(name, []).extend((k, site) for site in local if site.group.name in names)
        self.rest = torch.zeros(self.pairs, dtype=torch.float64)
        for name in a.keys() - self.sites.keys():
            self.rest += dots(a[name], b[name])

    # --- where the second networks are --------------------------------------------------------------------------

    @property
    def element(self) -> Element:
        """Where every pair is; groups outside the families are not in it."""
        return Element(self.values, (self.pairs,))

    def value(self, name: str, rows: Tensor | None = None) -> Value:
        """Of one group, for some pairs."""
        if rows is None or len(rows) == self.pairs:
            return self.values[name]
        return self.values[name].map(lambda t: t[rows])

    def element_at(self, names: Iterable[str], rows: Tensor | None = None) -> Element:
        """Of some groups, for some pairs."""
        count = self.pairs if rows is None else len(rows)
        return Element({name: self.value(name, rows) for name in names}, (count,))

    def write(self, name: str, rows: Tensor, value: Value) -> None:
        """Set the value of one group for some pairs."""
        own = dict(self.values[name].items())
        for part, new in value.items():
            put(own[part], rows, new)

    def compose(self, k: int, rows: Tensor, relative: Element) -> None:
        """Move the groups of one family by an element, seen from where they are."""
        moved = _element.compose(self.groups, relative, self.element_at([g.name for g in self.groups], rows))
        for group in self.families[k].members:
            self.write(group.name, rows, moved[group.name])

    # --- tensors and objectives ---------------------------------------------------------------------------------

    def own_sites(self, k: int) -> dict[str, list[Site]]:
        """Where the groups that one family chooses act."""
        return {name: [s for o, s in self.sites[name] if o == k] for name in self.families[k].sites}

    def moved(self, rows: Tensor | None = None) -> dict[str, Tensor]:
        """The tensors of the second networks that anything is chosen for, moved by the current element."""
        return self.moved_by(self.sites, rows)

    def moved_by(
        self, sites: Mapping[str, Sequence[tuple[int, Site]]], rows: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Tensors of the second networks as the current values move them at the given places alone."""
        element = self.element_at({site.group.name for local in sites.values() for _, site in local}, rows)
        result = {}
        for name, local in sites.items():
            own = [site for _, site in local]
            tensor = at(self.b[name], rows)
            moved = _act.act(self.groups, {name: own}, element, {name: tensor}, {name: tensor.ndim - 1})
            result[name] = moved[name]
        return result

    def objectives(self, rows: Tensor | None = None) -> Tensor:
        """The objective, summed anew from tensors that are moved by the current element, float64 `[pair]`."""
        return self.objectives_of(self.moved(rows), rows) + at(self.rest, rows)

    def objectives_of(self, moved: Tensors, rows: Tensor | None = None) -> Tensor:
        """`<a, moved> - (|moved|^2 - |b|^2) / 2` over the tensors in `moved`; only shifts change the second part."""
        total = torch.zeros(self.pairs if rows is None else len(rows), dtype=torch.float64)
        for name, y in moved.items():
            total += dots(at(self.a[name], rows), y)
            if any(any(site.placement.shift) for _, site in self.sites[name]):
                z = at(self.b[name], rows)
                total -= (dots(y, y) - dots(z, z)) / 2
        return total


def at(tensor: Tensor, rows: Tensor | None) -> Tensor:
    """Some pairs of a tensor."""
    return tensor if rows is None or len(rows) == len(tensor) else tensor[rows]


def put(into: Tensor, rows: Tensor, new: Tensor) -> None:
    """Overwrite some pairs of a tensor."""
    if len(rows) == len(into):
        into.copy_(new)
    else:
        into[rows] = new


def dots(x: Tensor, y: Tensor) -> Tensor:
    """Inner products of each pair: rows in their own precision, the sum over rows in float64."""
    rows = 1 if x.ndim < 3 else 2
    products: Tensor = torch.linalg.vecdot(x.flatten(rows), y.flatten(rows))
    return products.flatten(1).sum(1, dtype=torch.float64) if rows == 2 else products.double()

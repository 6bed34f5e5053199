"""Mixtures: means of a network over random elements of its symmetry, called relaxed networks.

A relaxed element is a distribution over elements, independent for every family of groups. A relaxed tensor is the mean
of the tensor over the random elements. For permutations, the mean of the drawn permutation matrices is a doubly
stochastic matrix P. A weight between two relaxed layers becomes `P W Q^T`. Signed permutations, rotations and nested
groups are relaxed to convex combinations in the same way. If a group acts on two axes of one tensor, both axes are
drawn independently, and the result is `P W P^T`.

The code never builds a doubly stochastic matrix. A step moves every distribution part of the way toward a single (hard)
element. Each step mixes the means with tensors on which the hard element has acted. A gather computes each tensor on
which a hard element has acted. Therefore a mixture only stores some means for every tensor: one for each subset of the
axes on which random elements act. For a weight between two layers, the mixture stores four tensors.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import comb

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regauge.alignment.engine.nested_blocks import solve_family
from regauge.core import act as _act
from regauge.core.act import Site
from regauge.core.closest import closest
from regauge.core.element import Element
from regauge.core.families import Family, Tensors, average, complete, coupled_tensors, dot, group_cost

Vertex = Mapping[str, Element]
"""A hard (not relaxed) element of every family, by the name of the family's outermost group."""


@dataclass(frozen=True)
class _Draw:
    """Axes of one tensor on which the same random element of one family of groups acts."""

    family: Family
    sites: list[Site]

    def act(self, element: Element, name: str, tensor: Tensor) -> Tensor:
        groups = (*self.family.members, *self.family.fixed)
        return _act.act(groups, {name: self.sites}, element, {name: tensor}, {name: tensor.ndim})[name]

    @property
    def is_shifted(self) -> bool:
        return any(any(site.placement.shift) for site in self.sites)


class Mixture:
    """One relaxed network, with a distribution over elements for some families of groups.

    Initially, all elements are the identity.
    """

    def __init__(self, families: Sequence[Family], tensors: Tensors) -> None:
        self.families = {family.root.name: family for family in families}
        self._places: dict[str, list[_Draw]] = {name: [] for name in tensors}
        for family in families:
            coupled = coupled_tensors(family) if not family.is_nested else frozenset()
            for name, local in family.sites.items():
                members = {group.name for group in family.members}
                own = [site for site in local if site.group.name in members]
                axes = {site.placement.axis for site in own} if name in coupled else {None}
                for axis in sorted(axes, key=lambda axis: axis or 0):
                    self._places[name].append(_Draw(family, [s for s in own if axis in (None, s.placement.axis)]))
        # The entry at mask S is the mean of the tensor over random elements on the axes whose bits are in S.
        self._means = {name: [t] * (1 << len(self._places[name])) for name, t in tensors.items()}
        self._excess = {name: [0.0] * len(places) for name, places in self._places.items()}
        self._potentials: dict[str, Tensor | None] = dict.fromkeys(self.families)

    def mean(self, name: str) -> Tensor:
        """Return the relaxed tensor, which is its mean over all random elements."""
        return self._means[name][-1]

    @property
    def degree(self) -> int:
        """The degree of the relaxed tensors as polynomials in the step size. The degree is at least one."""
        return max((1, *(len(places) for places in self._places.values())))

    @property
    def excess(self) -> float:
        """The amount by which random half-period shifts increase the network's mean squared norm."""
        return sum(sum(values) for values in self._excess.values())

    def start_from_barycenter(self) -> None:
        """Make all distributions uniform: each tensor becomes its average over the groups, and shifts stay zero."""
        for name, means in self._means.items():
            for mask in range(1, len(means)):
                bit = mask & -mask
                mean = means[mask ^ bit]
                for site in self._places[name][bit.bit_length() - 1].sites:
                    mean = average(mean, site)
                means[mask] = mean

    def closest(self, root: str, aims: Tensors) -> Element:
        """Return the element of a family for which the network has the largest inner product with the tensors `aims`,
        while all other families are fixed.
        """
        family = self.families[root]
        sites: dict[str, list[Site]] = {}
        a, b = {}, {}
        for name in family.sites:
            for k, place in enumerate(self._places[name]):
                if place.family is family:
                    key = f"{name}@{k}"
                    held = [s for s in family.sites[name] if s.group.name in {group.name for group in family.fixed}]
                    sites[key], a[key], b[key] = [*place.sites, *held], aims[name], self._without(name, k)
        if family.is_nested:
            first, second = ({key: t.unsqueeze(0) for key, t in tensors.items()} for tensors in (a, b))
            return solve_family(replace(family, sites=sites), first, second)[0].item(0)
        cost = group_cost(family.root, sites, a, b)
        found = closest(family.root, cost, potentials=self._potentials[root], is_repeated=True)
        self._potentials[root] = found.potentials
        return complete(family, {root: found.value}, ())

    def line(self, name: str, vertex: Vertex) -> list[Tensor]:
        """Return a relaxed tensor on the linear path to hard elements, as coefficients of powers of the step size."""
        terms, m = self._terms(name, len(self._means[name]) - 1, vertex), len(self._places[name])
        powers = [torch.zeros_like(terms[0]) for _ in terms]
        # The coefficients of powers of t in sum_j t^j (1 - t)^(m - j) T_j, where T_j sums over all choices of j draws
        # that take the hard element.
        for j, term in enumerate(terms):
            for k in range(m - j + 1):
                powers[j + k] += (-1) ** k * comb(m - j, k) * term
        return powers

    def excess_of(self, vertex: Vertex) -> float:
        """Return the amount by which shifts would increase the expected squared norm at the given hard elements."""
        return sum(
            self._excess_at(name, k, vertex) for name, places in self._places.items() for k in range(len(places))
        )

    def step(self, vertex: Vertex, size: float) -> None:
        """Move every distribution towards one element: mix it with this element, which gets the weight `size`."""
        for name, means in self._means.items():
            for mask in reversed(range(1, len(means))):  # Larger sets use the old means of smaller sets.
                terms, count = self._terms(name, mask, vertex), mask.bit_count()
                weights = [size**j * (1 - size) ** (count - j) for j in range(count + 1)]
                means[mask] = torch.stack([w * term for w, term in zip(weights, terms, strict=True)]).sum(0)
            for k, before in enumerate(self._excess[name]):
                self._excess[name][k] = (1 - size) * before + size * self._excess_at(name, k, vertex)

    def settle(self, root: str, element: Element) -> None:
        """Replace the distribution of a family by one element with probability one."""
        for name in self.families[root].sites:
            places, means = self._places[name], self._means[name]
            own = sum(1 << k for k, place in enumerate(places) if place.family.root.name == root)
            for mask in range(1, len(means)):
                if mask & own:
                    means[mask] = self._image(name, mask & own, means[mask & ~own], {root: element})
            for k, place in enumerate(places):
                if place.family.root.name == root:
                    self._excess[name][k] = self._excess_at(name, k, {root: element})

    def _without(self, name: str, place: int) -> Tensor:
        means = self._means[name]
        return means[(len(means) - 1) ^ (1 << place)]

    def _terms(self, name: str, mask: int, vertex: Vertex) -> list[Tensor]:
        """Return the coefficients of a tensor on a linear path, as a polynomial in the step size.

        Coefficient j is a sum over all choices of j axes in `mask` on which the hard element acts. On all other axes of
        the tensor, the relaxed element acts.
        """
        means = self._means[name]
        terms = [means[mask], *[torch.zeros_like(means[mask])] * mask.bit_count()]
        part = mask
        while part:
            terms[part.bit_count()] = terms[part.bit_count()] + self._image(name, part, means[mask ^ part], vertex)
            part = (part - 1) & mask
        return terms

    def _image(self, name: str, mask: int, tensor: Tensor, vertex: Vertex) -> Tensor:
        for k, place in enumerate(self._places[name]):
            if mask >> k & 1:
                tensor = place.act(vertex[place.family.root.name], name, tensor)
        return tensor

    def _excess_at(self, name: str, k: int, vertex: Vertex) -> float:
        place = self._places[name][k]
        if not place.is_shifted:
            return 0.0
        start = self._means[name][0]
        moved = place.act(vertex[place.family.root.name], name, start)
        return dot(moved, moved) - dot(start, start)


class RelaxedUniverse:
    """Several relaxed networks and their similarity to one another; the first network is not relaxed.

    The objective is that of `universe_objective`, evaluated at the relaxed tensors. The objective is linear in each
    distribution over elements, separately for each axis on which they act. On a linear path, the objective is therefore
    a polynomial in the step size.
    """

    def __init__(self, networks: Sequence[Tensors], families: Sequence[Family]) -> None:
        self.mixtures = [Mixture(families if k else (), tensors) for k, tensors in enumerate(networks)]
        self._names = list(networks[0])
        self.scale = 0.0
        for name in self._names:
            norms = [float(torch.linalg.vector_norm(tensors[name])) for tensors in networks]
            self.scale += (sum(norms) ** 2 - sum(norm**2 for norm in norms)) / 2

    def start_from_barycenter(self) -> None:
        """Set every network except the first to its average over the groups."""
        for mixture in self.mixtures:
            mixture.start_from_barycenter()

    def aims(self, k: int) -> dict[str, Tensor]:
        """Return, for one network, the mean of all other networks."""
        others = [mixture for j, mixture in enumerate(self.mixtures) if j != k]
        return {name: torch.stack([m.mean(name) for m in others]).mean(0) for name in self._names}

    def vertices(self) -> list[Vertex]:
        """Return, for every network and family, the single element towards which the objective rises fastest."""
        result: list[Vertex] = [{}]
        for k, mixture in enumerate(self.mixtures[1:], start=1):
            aims = self.aims(k)
            result.append({root: mixture.closest(root, aims) for root in mixture.families})
        return result

    def line(self, vertices: Sequence[Vertex]) -> NDArray[np.float64]:
        """Return the objective on the linear path to hard (not relaxed) elements, as a polynomial in the step size."""
        total = np.zeros(1 + 2 * max(mixture.degree for mixture in self.mixtures))
        for name in self._names:
            before = [self.mixtures[0].mean(name)]
            for mixture, vertex in zip(self.mixtures[1:], vertices[1:], strict=True):
                here = mixture.line(name, vertex)
                for i, x in enumerate(before):
                    for j, y in enumerate(here):
                        total[i + j] += dot(x, y)
                if mixture is not self.mixtures[-1]:
                    longer = max(len(before), len(here))
                    before = [
                        sum((c[j] for c in (before, here) if j < len(c)), start=torch.zeros_like(here[0]))
                        for j in range(longer)
                    ]
        now = sum(mixture.excess for mixture in self.mixtures)
        then = sum(m.excess_of(vertex) for m, vertex in zip(self.mixtures, vertices, strict=True))
        share = (len(self.mixtures) - 1) / 2
        total[:2] -= share * now, share * (then - now)
        return total

    def step(self, vertices: Sequence[Vertex], size: float) -> None:
        """Move every network towards its hard elements, by a fraction `size` (from 0 to 1) of the way."""
        for mixture, vertex in zip(self.mixtures, vertices, strict=True):
            mixture.step(vertex, size)

    def settle(self) -> list[Vertex]:
        """Round every relaxed element to the best hard element, one family after another, while all others are fixed.

        The objective is linear in the distribution of a family. The best hard element is therefore at least as good as
        the relaxed one. Rounding can lower the objective only if a group acts on two axes of one tensor.
        """
        settled: list[Vertex] = [{}]
        for k, mixture in enumerate(self.mixtures[1:], start=1):
            aims, chosen = self.aims(k), {}
            for root in mixture.families:
                chosen[root] = mixture.closest(root, aims)
                mixture.settle(root, chosen[root])
            settled.append(chosen)
        return settled


def highest(line: NDArray[np.float64]) -> tuple[float, float]:
    """Return the smallest point in [0, 1] at which a polynomial is largest, and its value there."""
    # On an interval, a polynomial is largest at an end or where its derivative is zero, so no line search is needed.
    derivative = line[1:] * np.arange(1, len(line))
    roots = np.asarray(np.polynomial.polynomial.polyroots(derivative), dtype=np.complex128)
    inner = sorted(float(r.real) for r in roots if abs(r.imag) < 1e-9 and 0 < r.real < 1)
    places = [0.0, *inner, 1.0]
    values = [float(np.polynomial.polynomial.polyval(place, line)) for place in places]
    best = int(np.argmax(values))
    return places[best], values[best]

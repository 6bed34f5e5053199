"""Soft correspondences, by optimal transport, between the units of networks of different widths."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regauge.alignment.transport_plans import entropy, in_order, transport
from regauge.core.act import Site
from regauge.core.assignment import assign
from regauge.core.families import barycenter, compared, dot, unfold
from regauge.core.groups import Group, Placement
from regauge.core.params import Params, require_finite, say_different
from regauge.core.signs import SignCode
from regauge.core.symmetry import Symmetry
from regauge.core.unit_plans import (
    Axis,
    SignCharacter,
    UnitPlan,
    default_readers,
    map_tensor,
    sign_character,
    uncovered,
)


@dataclass(frozen=True)
class Correspondence:
    """The result of `correspond`: transport plans between the units of two networks.

    Attributes:
        plans: One transport plan for each group.
        objective: The objective of the plans, which `correspond` maximizes.
        initial: The objective if units are paired in their given order; never above `objective`. For equal widths,
            pairing units in their given order is the identity.
        history: The objective before the first sweep and after each sweep of the best ascent. The objective never
            decreases.
        is_converged: Whether the ascent ended because no change of a single plan improves the objective.
        symmetry_a: The symmetry of the first network, with all sizes known.
        symmetry_b: The symmetry of the second network, with all sizes known.
        readers: The axes along which layers sum over units.
    """

    plans: Mapping[str, UnitPlan]
    objective: float
    initial: float
    history: tuple[float, ...]
    is_converged: bool
    symmetry_a: Symmetry
    symmetry_b: Symmetry
    readers: frozenset[Axis]

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name} {'x'.join(map(str, plan.mass.shape))}" for name, plan in self.plans.items())
        end = "" if self.is_converged else "; it was stopped before convergence"
        return f"Correspondence({sizes}: objective {self.initial:.6g} -> {self.objective:.6g}{end})"

    @property
    def hard(self) -> dict[str, Tensor]:
        """For each group of equal widths, the permutation closest to its transport plan.

        Unit `perm[i]` of B corresponds to unit i of A.
        """
        return {
            name: torch.from_numpy(assign(plan.mass.numpy()))
            for name, plan in self.plans.items()
            if plan.mass.shape[0] == plan.mass.shape[1]
        }

    def apply(self, params_b: Mapping[str, Tensor]) -> Params:
        """Return the second network, mapped to the widths of the first network.

        Let T be the transport plan of a group. The plan acts on two kinds of axes. Along the axis of a layer's own
        units, the weights of corresponding units are averaged, using `T / rows`. Along an axis over which a layer sums,
        weights are distributed among the corresponding units, using `T / columns`. If T is a permutation, the plan only
        permutes the units along every axis. The second network B may contain several copies of every unit of the first
        network A, with outgoing weights divided among the copies. The network that is converted from such a network B
        computes the same function as A. If A is wider by an integer factor and every unit of B corresponds to several
        units of A, the converted network computes the same function as B.

        Args:
            params_b: A network with the shapes of the second network. The given tensors are not modified. Buffers are
                converted like parameters.

        Raises:
            KeyError: A parameter is missing.
            ValueError: A parameter has another shape.
        """
        symmetry_b = self.symmetry_b.bind(params_b)
        result = dict(params_b)
        for name, sites in self.symmetry_a.sites.items():
            tensor = params_b[name]
            if tensor.ndim != len(symmetry_b.shapes[name]):
                raise ValueError(
                    f"{name!r} has shape {tuple(tensor.shape)}, with a leading model axis: this is a population; "
                    "apply the correspondence to one network at a time"
                )
            if not tensor.is_floating_point():
                raise ValueError(f"{name!r} holds {tensor.dtype}, which cannot be averaged; convert the network first")
            work = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
            pairs = list(zip(sites, symmetry_b.sites[name], strict=True))
            there = map_tensor(work, pairs, self.symmetry_a.shapes[name], self.plans, self.readers)
            result[name] = there.to(tensor.dtype)
        return result


def correspond(
    params_a: Mapping[str, Tensor],
    params_b: Mapping[str, Tensor],
    symmetry_a: Symmetry,
    symmetry_b: Symmetry,
    *,
    regularization: float = 0.0,
    readers: Collection[Axis] | None = None,
    max_sweeps: int = 100,
    tolerance: float = 1e-9,
) -> Correspondence:
    """Find which units of B correspond to which units of A in networks of different widths.

    Every group of units gets a transport plan T `[n_a, n_b]` with uniform marginals. If all other plans are applied to
    the weights of B, the cost of pairing two units is the squared distance between their weights. Let a be the weights
    of A, and `map(b)` the weights of B after all plans are applied. Because the marginals are fixed, the total cost is
    smallest where the inner product `<a, map(b)>` is largest. The inner product `<a, map(b)>` is linear in each plan.
    For equal widths, `<a, map(b)>` is the objective of weight matching. For equal widths and without regularization,
    every plan is a permutation. The sign of each pair of units is also optimized. Scales are not optimized. Therefore
    balance the networks before calling `correspond`. Shifts of periodic units stay zero.

    As in weight matching, coordinate ascent finds the plans. Until a plan is computed, a uniform plan is used instead.
    The next group is always the one whose plan depends least on plans that are not computed yet. Each step finds the
    exact optimum of one plan.

    `correspond` departs from the paper in two ways. First, plans use incoming and outgoing weights and are improved in
    sweeps. In the paper, each plan is computed once, layer by layer from the input to the output. Second, the outgoing
    weights of B are not averaged, but distributed among the corresponding units of A. Because weights are distributed,
    `correspond` recognizes networks of different widths that compute the same function.

    Args:
        params_a: The first network, which stays unchanged.
        params_b: The second network, which is to be converted. The second network must have the same architecture with
            other widths.
        symmetry_a: The symmetry of the first network. In both networks, the same groups must act on the same
            parameters.
        symmetry_b: The symmetry of the second network.
        regularization: The strength of the entropy term, which makes plans soft. The strength is a multiple of the
            typical product of the weight norms of two units. At a strength of 0.01, a pair whose cosine is lower by
            0.01 gets a mass that is lower by a factor of e. The average of several different units has less variance
            than each of them. Soft plans average more units and therefore make the converted network worse. Exact plans
            average as few units as the widths allow.
        readers: The axes (parameter, axis) along which layers sum over the units of a group. Default: the axes that
            discovery recorded. If a symmetry does not record the axes, the default is axis 1 of linear and
            convolutional weights, axis 0 of transposed convolutions, and no axis of embeddings.
        max_sweeps: The largest number of sweeps over the groups.
        tolerance: A step is taken only if it gains more than this fraction of `sum |a| |b|`.

    Raises:
        KeyError: A parameter on which a symmetry acts is missing.
        ValueError: The architectures differ in more than widths, a group is nested or rotates, a parameter is not
            finite, or the axes along which layers sum over the units of a group are unclear.

    References:
        Singh and Jaggi (2020), Model fusion via optimal transport, section 4 and algorithm 1.
    """
    if not 0 <= regularization < math.inf or max_sweeps < 1 or tolerance < 0:
        raise ValueError(
            f"regularization={regularization}, max_sweeps={max_sweeps}, tolerance={tolerance}: regularization and "
            "tolerance must not be negative, and at least one sweep is needed"
        )
    require_finite(params_a, "the first network")
    require_finite(params_b, "the second network")
    symmetry_a, symmetry_b = (_reordering(s.bind(p)) for s, p in ((symmetry_a, params_a), (symmetry_b, params_b)))
    held = next((name for name in symmetry_a.structure if name in symmetry_a.sites), None)
    if held is not None:
        raise ValueError(
            f"plans average units, but {held!r} is a structure tensor, which has no average; align networks of equal "
            f"widths, or discover the symmetries with move=[{held!r}]"
        )
    _require_same_architecture(params_a, params_b, symmetry_a, symmetry_b)
    read = default_readers(symmetry_a) if readers is None else frozenset(readers)
    _require_readers(symmetry_a, symmetry_b, read)
    problem = _Problem(params_a, params_b, symmetry_a, symmetry_b, read, regularization)
    plans, history, is_converged = problem.climb(problem.first_plans(), max_sweeps, tolerance)
    ordered = {group.name: problem.plan(group, in_order(*problem.sizes[group.name])) for group in symmetry_a.groups}
    initial = problem.objective(ordered)
    if history[-1] < initial:
        plans, history, is_converged = problem.climb(ordered, max_sweeps, tolerance)
    return Correspondence(plans, history[-1], initial, history, is_converged, symmetry_a, symmetry_b, read)


class _Problem:
    """The objective of `correspond` as a function of all transport plans, and coordinate ascent on it."""

    def __init__(
        self,
        params_a: Mapping[str, Tensor],
        params_b: Mapping[str, Tensor],
        symmetry_a: Symmetry,
        symmetry_b: Symmetry,
        readers: frozenset[Axis],
        regularization: float,
    ) -> None:
        self._readers, self._groups = readers, {group.name: group for group in symmetry_a.groups}
        self.sizes = {name: (group.size, symmetry_b[name].size) for name, group in self._groups.items()}
        self._a, self._b = compared([params_a, params_b], symmetry_a)
        self._pairs = {name: list(zip(symmetry_a.sites[name], symmetry_b.sites[name], strict=True)) for name in self._a}
        self._norms = {n: float(x.double().norm() * self._b[n].double().norm()) for n, x in self._a.items()}
        self._touched = {
            group: [n for n, pairs in self._pairs.items() if any(a.group.name == group for a, _ in pairs)]
            for group in self._groups
        }
        self._softness = {group: regularization * self._typical_profit(group) for group in self._groups}

    def plan(self, group: Group, mass: Tensor, sign: int = 1) -> UnitPlan:
        """Return a transport plan with one sign for all pairs of units."""
        return UnitPlan(mass, torch.full((group.signs, *mass.shape), sign, dtype=torch.int8))

    def first_plans(self) -> dict[str, UnitPlan]:
        """Compute every plan once, beginning with the plans that depend least on other plans.

        Until a plan is computed, a uniform plan without signs is used instead.
        """
        plans = {}
        for name, group in self._groups.items():
            n, m = self.sizes[name]
            plans[name] = self.plan(group, torch.full((n, m), 1 / (n * m), dtype=torch.float64), sign=0)
        unknown, scores = set(plans), dict[str, float]()
        while unknown:
            scores |= {name: self._anchored(name, unknown) for name in unknown if name not in scores}
            best = max((name for name in plans if name in unknown), key=scores.__getitem__)
            plans[best] = self._best(best, plans)
            unknown.remove(best)
            for name in self._neighbors(best):
                scores.pop(name, None)
        return plans

    def objective(self, plans: Mapping[str, UnitPlan], group: str | None = None) -> float:
        """Return the inner product of both networks plus the entropies of the plans.

        If a group is given, return only those terms of the objective that depend on this group's plan.
        """
        inner = sum(self._inner_product(name, plans) for name in (self._a if group is None else self._touched[group]))
        soft = [name for name in (plans if group is None else [group]) if self._softness[name]]
        return inner + sum(self._softness[name] * entropy(plans[name].mass) for name in soft)

    def climb(
        self, plans: Mapping[str, UnitPlan], max_sweeps: int, tolerance: float
    ) -> tuple[dict[str, UnitPlan], tuple[float, ...], bool]:
        """Improve one plan after the other until no step raises the objective.

        Return the plans, the history, and whether the ascent converged.
        """
        plans, least = dict(plans), tolerance * sum(self._norms.values())
        history, dirty = [self.objective(plans)], set(plans)
        while dirty and len(history) <= max_sweeps:
            history.append(history[-1])
            for name in [name for name in plans if name in dirty]:
                dirty.remove(name)
                tried = {**plans, name: self._best(name, plans)}
                gain = self.objective(tried, name) - self.objective(plans, name)
                if gain > least:
                    plans, dirty = tried, dirty | self._neighbors(name)
                    history[-1] += gain
        drift = self.objective(plans) - history[-1]  # the accumulated rounding error
        return plans, tuple(value + drift for value in history), not dirty

    def _inner_product(self, name: str, plans: Mapping[str, UnitPlan]) -> float:
        shape = tuple(self._a[name].shape)
        return dot(self._a[name], map_tensor(self._b[name], self._pairs[name], shape, plans, self._readers))

    def _best(self, name: str, plans: Mapping[str, UnitPlan]) -> UnitPlan:
        """Return the best plan of a group while all other plans are fixed."""
        group, profits = self._groups[name], self._profits(name, plans)
        if not group.signs:
            return self.plan(group, transport(profits[()], self._softness[name]))
        code, matrices = SignCode.of(*profits), list(profits.values())
        return UnitPlan(transport(code.best(matrices), self._softness[name]), code.signs(matrices, group.signs))

    def _profits(self, group: str, plans: Mapping[str, UnitPlan]) -> dict[SignCharacter, Tensor]:
        """Return, for each pair of units and each product of signs, the gain of the objective for each unit of mass on
        this pair.
        """
        result = {(0,) * self._groups[group].signs: torch.zeros(*self.sizes[group], dtype=torch.float64)}
        for name, site_a, site_b in self._places(group):
            axis, shape = site_a.placement.axis, list(self._a[name].shape)
            shape[axis] = self._b[name].shape[axis]
            others = [pair for pair in self._pairs[name] if pair[0].placement.axis != axis]
            b = map_tensor(self._b[name], others, shape, plans, self._readers)
            product = (unfold(self._a[name], site_a) @ unfold(b, site_b).mT).double().cpu()
            key = sign_character(site_a)
            result[key] = result.get(key, 0) + self._reach(group, name, axis) * product
        return result

    def _typical_profit(self, group: str) -> float:
        """Return the profit of a pair of units that have parallel weights of average norm."""
        places = ((name, site.placement.axis) for name, site, _ in self._places(group))
        mean_size = math.sqrt(math.prod(self.sizes[group]))
        return sum(self._reach(group, name, axis) * self._norms[name] / mean_size for name, axis in places)

    def _reach(self, group: str, name: str, axis: int) -> int:
        """Return the factor that converts the masses of a plan to weights. The factor is the number of units of B on
        axes over which layers sum, and the number of units of A on all other axes.
        """
        return self.sizes[group][1 if (name, axis) in self._readers else 0]

    def _places(self, group: str) -> list[tuple[str, Site, Site]]:
        """Return the tensors on which a group acts, each with the positions of the group's units along its axes in both
        networks.
        """
        return [(n, a, b) for n in self._touched[group] for a, b in self._pairs[n] if a.group.name == group]

    def _neighbors(self, group: str) -> set[str]:
        """Return the groups whose best plan depends on the given group's plan.

        A group that acts on two axes of one tensor is included, because its best plan depends on itself.
        """
        return {
            site.group.name
            for name, own, _ in self._places(group)
            for site, _ in self._pairs[name]
            if site.placement.axis != own.placement.axis
        }

    def _anchored(self, group: str, unknown: set[str]) -> float:
        """Return the fraction of a group's tensors that does not depend on plans that are still unknown."""
        known = 0.0
        for name in self._touched[group]:
            hidden = [pair for pair in self._pairs[name] if pair[0].group.name in unknown - {group}]
            a, b = (barycenter(x[name], [p[k] for p in hidden]) for k, x in enumerate((self._a, self._b)))
            if a is not None and b is not None:
                known += float(a.norm() * b.norm())
        return known / (sum(self._norms[name] for name in self._touched[group]) or 1.0)


def _reordering(symmetry: Symmetry) -> Symmetry:
    """Return the symmetry without groups that only scale or flip units.

    Groups that only scale or flip units stay at the identity.
    """
    for group in symmetry.groups:
        if group.matrix != "none":
            raise ValueError(
                f"group {group.name!r} is {group.matrix}, so it has no single units that can be paired; a "
                "correspondence needs elementwise nonlinearities between the layers"
            )
        if group.is_base or group.within:
            place = "has other groups repeated within it" if group.is_base else f"is repeated within {group.within}"
            raise ValueError(
                f"group {group.name!r} {place}: correspondences of nested groups (heads, experts, normalization "
                "groups) are not supported; with equal widths `regauge.align` matches them"
            )
    return replace(symmetry, groups=tuple(group for group in symmetry.groups if group.is_permuted))


def _require_same_architecture(
    params_a: Mapping[str, Tensor], params_b: Mapping[str, Tensor], symmetry_a: Symmetry, symmetry_b: Symmetry
) -> None:
    """Raise an error if networks differ in more than the sizes of groups.

    Raises:
        ValueError: Parameters, groups, placements, or the length of an axis on which no group acts differ.
    """
    if params_a.keys() != params_b.keys():
        raise ValueError(
            f"the two networks have different parameters: {say_different(params_a, params_b)}; give networks that "
            "differ only in widths"
        )
    names_a, names_b = ([group.name for group in s.groups] for s in (symmetry_a, symmetry_b))
    if names_a != names_b:
        raise ValueError(
            f"the groups of the first network are {names_a[:10]}, but those of the second are {names_b[:10]}; networks "
            "of one architecture have the same groups in the same order; discover both with the same settings"
        )
    for one, other in zip(symmetry_a.groups, symmetry_b.groups, strict=True):
        if (one.kind, one.scales, one.signs, one.shifts) != (other.kind, other.scales, other.signs, other.shifts):
            raise ValueError(
                f"group {one.name!r} has kind {one.kind} in the first network and {other.kind} in the second, or other "
                "families of scales, signs or shifts; give networks that differ only in widths"
            )
        if [_action(p) for p in one.placements] != [_action(p) for p in other.placements]:
            raise ValueError(
                f"group {one.name!r} acts differently in both networks; give networks that differ only in widths, not "
                "in layers or kernel sizes"
            )
    for name, tensor in params_a.items():
        both = ((tensor.shape, symmetry_a), (params_b[name].shape, symmetry_b))
        free = [[len(uncovered(s.sites.get(name, []), k, n)) for k, n in enumerate(shape)] for shape, s in both]
        if free[0] != free[1]:
            raise ValueError(
                f"{name!r} has shape {tuple(tensor.shape)} in the first network and {tuple(params_b[name].shape)} in "
                "the second, and that is more than groups of other widths: outside of groups its axes have "
                f"{free[0]} and {free[1]} entries; give networks that differ in widths alone"
            )


def _require_readers(symmetry_a: Symmetry, symmetry_b: Symmetry, readers: frozenset[Axis]) -> None:
    """Raise an error unless layers sum over some but not all axes of each group of unequal widths.

    Raises:
        ValueError: A group of unequal widths has axes of only one kind, or a reader is not an axis on which a group
            acts.
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
                f"none of the axes of group {group.name!r} {missing}; name the axes that sum over units in `readers`, "
                "as (parameter, axis)"
            )


def _action(p: Placement) -> tuple[object, ...]:
    """Return a key for the effect of a placement, apart from the positions of its units."""
    values = math.prod(size for size, _ in p.repeats)
    return (p.parameter, p.axis, values, p.scale, p.sign, p.parity, p.shift)

"""The plan of a streamed alignment: memory bounds and the order of reading.

A group is *spread* if all tensors on which it acts together exceed the memory limit. For example, the group of a
transformer's residual stream is spread. All groups that are not spread form components that share no tensor. The
components are called *working sets*. For example, a layer's attention or its MLP is a working set. Working sets are
read one after the other. Some sign families of a spread group act within a single working set, such as the signs of one
norm's gain. The signs of a family within one working set are chosen while this working set is in memory.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from regauge.alignment.engine.ascent import Neighborhoods
from regauge.alignment.engine.refit import fitted_groups, fitted_parts
from regauge.alignment.streamed.memory import Sizes
from regauge.core.act import resolve
from regauge.core.balance import Buffers, balanced_parts, count_frozen_gains
from regauge.core.closest import character
from regauge.core.counted import shorten
from regauge.core.element import Element, Value
from regauge.core.families import Family, coupled_tensors, families
from regauge.core.groups import Group
from regauge.core.signs import SignCode
from regauge.core.symmetry import Symmetry

MAX_SHARED = 4
"""The largest number of sign families that are chosen for a group although these families act in several working sets.

All further families keep their signs.
"""
MARGIN = 1.1
"""The factor by which a working set with added signs may exceed the largest set. The added signs belong to a group that
acts on several working sets."""


@dataclass(frozen=True)
class WorkingSet:
    """Tensors that are in memory together, with the groups and the signs of spread groups that act only on them.

    If `is_blocked`, there is at most one group, and the tensors are read one after another; see `BlockedClimb`.
    """

    names: tuple[str, ...]
    families: tuple[Family, ...]
    signs: Mapping[str, tuple[int, ...]]
    is_blocked: bool = False

    def sign_families(self, symmetry: Symmetry) -> list[Family]:
        """Return the spread groups whose signs belong to this working set, restricted to these signs."""
        groups = tuple(_keep_signs(symmetry[name], chosen, self.names) for name, chosen in self.signs.items())
        return families(groups, {name: resolve(groups, name, symmetry.shapes[name]) for name in self.names})

    def whole_value(self, symmetry: Symmetry, name: str, value: Value) -> Value:
        """Return the complete value of a group, given a value with only the signs that belong to this working set.

        The value of a group that acts only on this working set is returned unchanged.
        """
        if name not in self.signs:
            return value
        sign = symmetry.identity()[name].sign
        assert sign is not None
        assert value.sign is not None
        return Value(sign=sign.index_copy(0, torch.tensor(self.signs[name]), value.sign))

    def own_values(self, element: Element) -> dict[str, Value]:
        """Return the values of all groups, and of all signs of spread groups, that act only on this working set."""
        names = {group.name for family in self.families for group in family.members}
        return {name: element[name] for name in (*names, *self.signs)}

    def take_over(self, element: Element, values: Mapping[str, Value]) -> Element:
        """Return an element in which values of this working set are replaced.

        Get the new values by applying `own_values` to another element.
        """
        for name, value in values.items():
            if name in self.signs:
                assert value.sign is not None
                own, sign = torch.tensor(self.signs[name]), element[name].sign
                assert sign is not None
                value = replace(element[name], sign=sign.index_copy(0, own, value.sign[own]))
            element = element.replace(name, value)
        return element


@dataclass(frozen=True)
class Plan:
    """The plan of a streamed alignment: working sets, families of groups that act on several working sets, and memory
    bounds.

    Attributes:
        symmetry: The symmetry, with the tensor names of the checkpoints. All sizes of its groups are known.
        sizes: The sizes of the compared tensors.
        sets: The working sets, in the order of their parameters.
        loose: Tensors that belong to no working set, because only spread groups act on them. Loose tensors are read in
            chunks.
        spread: Families whose values are chosen from summed costs after a sweep ("spread families"), by the names of
            their outermost groups.
        rounds: The names of the spread families, divided into rounds such that families of one round share no tensor.
            Each sweep chooses the values of one round.
        fitted: The sets of tensors whose scales and matrices are fitted together, including gains of frozen
            normalization.
        sweep_bytes: The number of bytes that one sweep reads from both checkpoints.
        peak: A bound on the memory in use at any time, in bytes. The bound includes `held`.
        held: The bytes within `peak` that the process already used when the plan was made.
    """

    symmetry: Symmetry
    sizes: Sizes
    sets: tuple[WorkingSet, ...]
    loose: tuple[str, ...]
    spread: Mapping[str, Family]
    rounds: tuple[tuple[str, ...], ...]
    fitted: tuple[frozenset[str], ...]
    sweep_bytes: int
    peak: int = 0
    held: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all compared tensors."""
        return (*(name for one in self.sets for name in one.names), *self.loose)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """A table of the working sets (tensors that are in memory together). Working sets of the same sizes appear in
        one row.
        """
        alike: dict[tuple[int, ...], list[str]] = {}
        for one in self.sets:
            values = sum(self.sizes.numel(name) for name in one.names)
            alike.setdefault((len(one.names), values, len(one.families), len(one.signs)), []).append(one.names[0])
        rows: list[dict[str, Any]] = []
        for (tensors, values, groups, signs), (name, *others) in alike.items():
            label = f"{len(others) + 1} like that of {name}" if others else f"that of {name}"
            chosen = f"{groups}" + (f", signs of {signs} spread" if signs else "")
            rows.append({"working sets": label, "tensors": tensors, "values": values, "groups chosen": chosen})
        return rows

    def shared_signs(self, group: Group) -> tuple[int, ...]:
        """Return those sign families of a spread group that are chosen together with the group's permutation."""
        local = {f for one in self.sets for f in one.signs.get(group.name, ())}
        reach = [sum(place.sign[f] % 2 for place in group.placements) for f in range(group.signs)]
        free = sorted((f for f in range(group.signs) if f not in local), key=lambda f: -reach[f])
        return tuple(sorted(free[:MAX_SHARED]))

    def parts(self, name: str) -> list[tuple[tuple[str, ...], tuple[int, ...]]]:
        """Return the parts of a family that acts on several working sets. A part consists of its tensors and of the
        sign families that are chosen in this part.

        The tensors of one part are in memory together.
        """
        own = self.spread[name].sites
        parts = [(tuple(n for n in one.names if n in own), one.signs.get(name, ())) for one in self.sets]
        return [part for part in [*parts, *(((n,), ()) for n in self.loose if n in own)] if part[0]]


def make_plan(
    symmetry: Symmetry,
    dtypes: Sequence[Mapping[str, torch.dtype]],
    *,
    memory: int,
    balances: Sequence[Buffers],
    held: int = 0,
    chart: Symmetry | None = None,
) -> Plan:
    """Return a plan that needs at most `memory` bytes at any time.

    Args:
        symmetry: The symmetry. All sizes of its groups must be known.
        dtypes: For each checkpoint, the dtype of every tensor.
        memory: The memory limit in bytes.
        balances: The kinds of balancing; see `balances_of`.
        held: The bytes that the process already uses, for example after tracing the model.
        chart: The symmetry whose representatives are matched. `chart` is None if networks are matched as given.

    Raises:
        ValueError: Every plan needs more memory than the limit.
    """
    names = [n for n in symmetry.sites if n not in symmetry.buffers and dtypes[0][n].is_floating_point]
    waiting = {f.root.name: f for f in families(symmetry.groups, {name: symmetry.sites[name] for name in names})}
    balanced = [part for way in balances for part in balanced_parts(symmetry, buffers=way)]
    fitted = _fitted(symmetry, balances[-1], dtypes[0]) if balances else ()
    sizes = Sizes(symmetry, {n: max(own[n].itemsize for own in dtypes) for n in names}, chart)
    first, *others = ({n: own[n].itemsize * sizes.numel(n) for n in names} for own in dtypes)
    sweep_bytes = sum(first.values()) + max((sum(other.values()) for other in others), default=0)
    spread: dict[str, Family] = {}
    is_blocked, least = False, math.inf
    while True:
        sets = _working_sets(symmetry, waiting, spread, sizes)
        if is_blocked:
            sets = tuple(replace(one, is_blocked=can_be_blocked(symmetry, one)) for one in sets)
        together = {name for one in sets for name in one.names}
        loose = tuple(name for name in names if name not in together)
        plan = Plan(symmetry, sizes, sets, loose, spread, _rounds(spread), fitted, sweep_bytes)
        shared = {name: len(plan.shared_signs(family.root)) for name, family in spread.items()}
        parts = [(one.names, one.families, one.is_blocked) for one in sets]
        peak, worst = sizes.total_peak(parts, loose, shared, balanced, fitted)
        if peak + held <= memory:
            return replace(plan, peak=peak + held, held=held)
        least = min(least, peak + held)
        # The costs of a family can be summed over a sweep if no group is nested in it. The family that acts on the most
        # bytes becomes a spread family.
        if not is_blocked and worst is not None and can_be_blocked(symmetry, sets[worst]):
            is_blocked = True
            continue
        deciding = () if worst is None else sets[worst].families
        is_open = worst is not None and not sets[worst].is_blocked
        plain = [family for family in deciding if is_open and not family.is_nested]
        widest = max(plain, key=lambda family: sizes.nbytes(family.sites), default=None)
        if widest is None:
            needed = "" if worst is None else f"; these tensors are needed together: {shorten(sets[worst].names, 3)}"
            already = f", of which {held / 1e9:.3g} GB are in use" if held else ""
            raise ValueError(
                f"aligning these checkpoints needs up to {least / 1e9:.3g} GB of memory{already}, but only "
                f"{memory / 1e9:.3g} GB are allowed{needed}; allow {least / 1e9:.3g} GB or more"
            )
        spread[widest.root.name] = waiting.pop(widest.root.name)


def _fitted(symmetry: Symmetry, buffers: Buffers, dtypes: Mapping[str, torch.dtype]) -> tuple[frozenset[str], ...]:
    counted = count_frozen_gains(symmetry, buffers)
    names = [n for n in counted.sites if n not in counted.buffers and dtypes[n].is_floating_point]
    return tuple(fitted_parts(counted, fitted_groups(counted, buffers), names))


def _keep_signs(group: Group, chosen: Sequence[int], names: Sequence[str]) -> Group:
    placements = []
    for place in group.placements:
        sign = tuple(place.sign[f] for f in chosen)
        if place.parameter in names and any(e % 2 for e in sign):
            placements.append(replace(place, sign=sign, scale=(), parity=(), shift=(), is_inverse=False))
    return Group(group.name, group.size, tuple(placements), is_permuted=False, signs=len(chosen))


def _working_sets(
    symmetry: Symmetry, own: Mapping[str, Family], spread: Iterable[str], sizes: Sizes
) -> tuple[WorkingSet, ...]:
    """Return the working sets: connected components of those families of groups whose tensors fit in memory together.

    Signs of groups that act on several working sets are assigned to a working set if the memory limit allows it.
    """
    parts: list[tuple[set[str], set[tuple[str, int]]]] = []

    def join(names: set[str], signs: set[tuple[str, int]]) -> None:
        for part in [p for p in parts if p[0] & names]:
            parts.remove(part)
            names, signs = names | part[0], signs | part[1]
        parts.append((names, signs))

    def inside(names: set[str]) -> tuple[Family, ...]:
        return tuple(family for family in own.values() if family.sites.keys() <= names)

    for family in own.values():
        join(set(family.sites), set())
    largest = max((sizes.set_peak(names, inside(names)) for names, _ in parts), default=0)
    reach: dict[tuple[str, int], set[str]] = {}
    for group in (symmetry[name] for name in spread if not symmetry[name].shifts):
        for place in group.placements:
            for f, exponent in enumerate(place.sign):
                if exponent % 2 and sizes.has(place.parameter):
                    reach.setdefault((group.name, f), set()).add(place.parameter)
    for key, names in sorted(reach.items(), key=lambda item: sizes.nbytes(item[1])):
        touched = names.union(*(part[0] for part in parts if part[0] & names))
        if sizes.set_peak(touched, inside(touched)) <= MARGIN * largest:
            join(names, {key})
    order = {name: k for k, name in enumerate(symmetry.sites)}
    result = []
    for names, signs in parts:
        by_group: dict[str, tuple[int, ...]] = {}
        for name, f in sorted(signs):
            by_group[name] = (*by_group.get(name, ()), f)
        result.append(WorkingSet(tuple(sorted(names, key=order.__getitem__)), inside(names), by_group))
    return tuple(sorted(result, key=lambda one: order[one.names[0]]))


def can_be_blocked(symmetry: Symmetry, one: WorkingSet) -> bool:
    """Return whether a working set can be read one tensor at a time.

    A working set that is read tensor by tensor may have at most one group, which is a plain permutation group.
    """
    groups = [*one.sign_families(symmetry), *one.families]
    return len(one.families) <= 1 and not Neighborhoods.of(groups).sign_pairs and all(map(_is_plain, one.families))


def _is_plain(family: Family) -> bool:
    """Return whether the cost of a family is one matrix once the signs of each pair of units are chosen."""
    root = family.root
    is_simple = root.is_permuted and root.matrix == "none" and not (root.shifts or root.classes)
    characters = {character(site.placement) for local in family.own_sites.values() for site in local}
    is_alone = not (family.is_nested or family.fixed or coupled_tensors(family))
    return is_simple and is_alone and SignCode.of(*characters).is_independent


def _rounds(spread: Mapping[str, Family]) -> tuple[tuple[str, ...], ...]:
    rounds: list[tuple[str, ...]] = []
    for name, family in spread.items():
        for k, one in enumerate(rounds):
            if not any(family.sites.keys() & spread[other].sites.keys() for other in one):
                rounds[k] = (*one, name)
                break
        else:
            rounds.append((name,))
    return tuple(rounds)

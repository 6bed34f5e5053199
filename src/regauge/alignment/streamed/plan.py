"""What an alignment that streams will hold in memory, and in which order it reads.

Groups whose tensors together exceed the memory are *spread*: a transformer's residual stream. Without them the other
groups fall into components that share no tensor, the *working sets* (a layer's attention, its MLP), which are read one
after the other. Families of signs of a spread group that act within one working set alone (the signs of one norm's
gain) are chosen there, too.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import torch

from regauge.alignment.streamed.memory import Sizes, total_peak
from regauge.core.families import Family, families
from regauge.core.groups import Group
from regauge.core.symmetry import Symmetry
from regauge.storage.checkpoints.names import shorten

MAX_SHARED = 4
"""How many of the families of signs that act in several working sets are chosen; the others keep their signs."""
MARGIN = 1.1
"""Signs of a spread group join working sets as long as none becomes larger than the largest one by this factor."""


@dataclass(frozen=True)
class WorkingSet:
    """Tensors that are in memory together, and the groups that are chosen meanwhile.

    Attributes:
        names: The tensors.
        roots: Groups that act on these tensors alone, without those that are repeated within them.
        signs: The families of signs of each spread group that act on these tensors alone.
    """

    names: tuple[str, ...]
    roots: tuple[str, ...]
    signs: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Plan:
    """How an alignment streams.

    Attributes:
        symmetry: The symmetry, with every size known, on the names of the checkpoints.
        names: The tensors that are compared.
        sets: The working sets, in the order of the parameters.
        loose: Tensors on which only spread groups act; they are read in pieces.
        spread: The groups that are chosen after a sweep, from the costs that it summed up.
        rounds: The spread groups in rounds that share no tensor; each sweep chooses one round.
        sweep_bytes: Bytes that one sweep reads from both checkpoints.
        peak: Bound on the memory that is held at once, in bytes, with what is held already.
        sizes: The sizes from which the bound was computed.
        held: Bytes in `peak` that the process held when the plan was made.
    """

    symmetry: Symmetry
    names: tuple[str, ...]
    sets: tuple[WorkingSet, ...]
    loose: tuple[str, ...]
    spread: tuple[str, ...]
    rounds: tuple[tuple[str, ...], ...]
    sweep_bytes: int
    peak: int
    sizes: Sizes
    held: int = 0

    def shared_signs(self, group: Group) -> tuple[int, ...]:
        """The families of signs of a spread group that are chosen with its order."""
        local = {f for one in self.sets for f in one.signs.get(group.name, ())}
        reach = [sum(place.sign[f] % 2 for place in group.placements) for f in range(group.signs)]
        free = sorted((f for f in range(group.signs) if f not in local), key=lambda f: -reach[f])
        return tuple(sorted(free[:MAX_SHARED]))


def make_plan(
    symmetry: Symmetry,
    dtypes: Mapping[str, Sequence[torch.dtype]],
    *,
    memory: int,
    is_balanced: bool,
    held: int = 0,
) -> Plan:
    """The plan that holds at most `memory` bytes at once.

    Args:
        symmetry: The symmetry, with every size known.
        dtypes: The dtypes of every tensor in both checkpoints.
        memory: Bytes that may be held.
        is_balanced: Whether the positive scales are balanced first.
        held: Bytes of them that the process holds already, such as what tracing the model left behind.

    Raises:
        ValueError: No plan holds so little.
    """
    names = tuple(
        name
        for name in symmetry.sites
        if name not in symmetry.buffers and all(dtype.is_floating_point for dtype in dtypes[name])
    )
    work = {name: reduce(torch.promote_types, dtypes[name], torch.float32).itemsize for name in names}
    sizes = Sizes(symmetry, work)
    all_families = {f.root.name: f for f in families(symmetry.groups, {name: symmetry.sites[name] for name in names})}
    bytes_of = {name: sum(dtype.itemsize for dtype in dtypes[name]) * sizes.numel(name) for name in names}
    spread: list[str] = []
    while True:
        sets = _working_sets(symmetry, all_families, spread, sizes)
        together = {name for one in sets for name in one.names}
        plan = Plan(
            symmetry=symmetry,
            names=names,
            sets=sets,
            loose=tuple(name for name in names if name not in together),
            spread=tuple(spread),
            rounds=_rounds(all_families, spread),
            sweep_bytes=sum(bytes_of.values()),
            peak=0,
            sizes=sizes,
        )
        shared = {name: len(plan.shared_signs(symmetry[name])) for name in spread}
        parts = [(one.names, [all_families[r] for r in one.roots]) for one in sets]
        peak, worst = total_peak(sizes, parts, plan.loose, shared, is_balanced=is_balanced)
        peak += held
        if peak <= memory:
            return replace(plan, peak=peak, held=held)
        found = _widest(all_families, sets[worst].roots if worst is not None else (), sizes)
        if found is None:
            needed = "" if worst is None else f"; together are needed {shorten(sets[worst].names, 3)}"
            already = f", {held / 1e9:.3g} GB of them already" if held else ""
            raise ValueError(
                f"aligning these checkpoints holds up to {peak / 1e9:.3g} GB at once{already}, more than the "
                f"{memory / 1e9:.3g} GB that memory allows{needed}; allow {peak / 1e9:.3g} GB or more"
            )
        spread.append(found)


def restricted(symmetry: Symmetry, names: Collection[str], groups: Collection[str] | None = None) -> Symmetry:
    """The symmetry on some parameters alone, and of some groups alone (with what they are repeated within)."""
    kept = []
    for group in symmetry.groups:
        placements = tuple(p for p in group.placements if p.parameter in names)
        if placements and (groups is None or group.name in groups):
            kept.append(replace(group, placements=placements))
    shapes = {name: shape for name, shape in symmetry.shapes.items() if name in names}
    buffers = tuple(name for name in symmetry.buffers if name in names)
    return Symmetry(tuple(kept), shapes, buffers=buffers)


def sign_group(group: Group, chosen: Sequence[int], names: Collection[str]) -> Group:
    """The part of a spread group that a working set chooses: some families of signs, without its order."""
    placements = []
    for place in group.placements:
        sign = tuple(place.sign[f] for f in chosen)
        if place.parameter in names and any(e % 2 for e in sign):
            placements.append(replace(place, sign=sign, scale=(), parity=(), shift=(), is_inverse=False))
    return Group(group.name, group.size, tuple(placements), is_permuted=False, signs=len(chosen))


def _working_sets(
    symmetry: Symmetry, all_families: Mapping[str, Family], spread: Collection[str], sizes: Sizes
) -> tuple[WorkingSet, ...]:
    """Connected components of the groups that are not spread, joined by signs of spread ones where memory allows."""
    parts: list[tuple[set[str], set[str], set[tuple[str, int]]]] = []

    def join(names: set[str], roots: set[str], signs: set[tuple[str, int]]) -> None:
        for part in [p for p in parts if p[0] & names]:
            parts.remove(part)
            names, roots, signs = names | part[0], roots | part[1], signs | part[2]
        parts.append((names, roots, signs))

    for name, family in all_families.items():
        if name not in spread:
            join(set(family.sites), {name}, set())
    largest = max((sizes.set_peak(p[0], [all_families[r] for r in p[1]]) for p in parts), default=0)
    reach: dict[tuple[str, int], set[str]] = {}
    for name in spread:
        group = symmetry[name]
        for place in group.placements:
            for f, exponent in enumerate(place.sign):
                if exponent % 2 and not group.shifts and sizes.has(place.parameter):
                    reach.setdefault((name, f), set()).add(place.parameter)
    for key, names in sorted(reach.items(), key=lambda item: sizes.nbytes(item[1])):
        touched = names.union(*(p[0] for p in parts if p[0] & names))
        roots = [all_families[r] for p in parts if p[0] & names for r in p[1]]
        if sizes.set_peak(touched, roots) <= MARGIN * largest:
            join(set(names), set(), {key})
    order = {name: k for k, name in enumerate(symmetry.sites)}
    result = []
    for names, chosen, signs in parts:
        by_group: dict[str, tuple[int, ...]] = {}
        for name, f in sorted(signs):
            by_group[name] = (*by_group.get(name, ()), f)
        listed = tuple(sorted(names, key=order.__getitem__))
        result.append(WorkingSet(listed, tuple(r for r in all_families if r in chosen), by_group))
    return tuple(sorted(result, key=lambda one: order[one.names[0]]))


def _rounds(all_families: Mapping[str, Family], spread: Iterable[str]) -> tuple[tuple[str, ...], ...]:
    rounds: list[list[str]] = []
    for name in spread:
        for one in rounds:
            if not any(all_families[name].sites.keys() & all_families[other].sites.keys() for other in one):
                one.append(name)
                break
        else:
            rounds.append([name])
    return tuple(tuple(one) for one in rounds)


def _widest(all_families: Mapping[str, Family], roots: Iterable[str], sizes: Sizes) -> str | None:
    """The family with the largest tensors among those whose costs can be summed up over a sweep."""
    plain = [all_families[root] for root in roots if not all_families[root].is_nested]
    widest = max(plain, key=lambda family: sizes.nbytes(family.sites), default=None)
    return None if widest is None else widest.root.name

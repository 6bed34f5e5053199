"""Partial merges: networks of different tasks share their first layers and keep their heads."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from regauge.alignment.activations.costs import Traces
from regauge.alignment.activations.statistics import CrossMoments
from regauge.alignment.widths.axes import default_readers
from regauge.canonical import canonical_element
from regauge.core.act import Site
from regauge.core.element import Element
from regauge.core.params import Params, require_finite
from regauge.core.symmetry import Symmetry
from regauge.core.task import Task
from regauge.merging.record import Metrics, metric_cells, table
from regauge.merging.zip import zip_units

Axis = tuple[str, int]
"""A parameter and one of its axes."""
Units = dict[str, Tensor]
"""For each group the merged unit of each unit of each network, `[networks, units]`."""

TIE = 1e-3
"""Share of the cosines beside correlations: they decide between units that vary alike on the data."""


@dataclass(frozen=True)
class TrunkMerge:
    """The outcome of `merge_trunk`.

    Attributes:
        params: One for each network: the merged trunk and the network's own head. Run each with its own module.
        shared: Names of the trunk: these are one and the same tensor in all of `params`.
        units: For each merged group the merged unit of each unit of each network, `[networks, units]`.
        metrics: What each network reached on its task before; empty without tasks.
        merged_metrics: What it reaches with the trunk; means are prepared first as the task says.
    """

    params: tuple[Params, ...]
    shared: tuple[str, ...]
    units: Mapping[str, Tensor]
    metrics: tuple[Metrics, ...]
    merged_metrics: tuple[Metrics, ...]

    @property
    def card(self) -> str:
        """What was merged, as Markdown."""
        sizes = [sum(t.numel() for t in params.values()) for params in self.params]
        trunk = sum(self.params[0][name].numel() for name in self.shared)
        lines = [
            "# Merged trunk",
            "",
            f"{len(self.params)} networks share {len(self.shared)} tensors; {sum(sizes)} values became "
            f"{sum(sizes) - (len(sizes) - 1) * trunk}.",
            "",
        ]
        rows = []
        for name, places in self.units.items():
            counts = torch.stack([torch.bincount(own, minlength=places.shape[1]) for own in places])
            owners = (counts > 0).sum(0)
            numbers = [places.shape[1], int((owners > 1).sum()), int((owners == 1).sum()), int((counts > 1).sum())]
            rows.append([name, *map(str, numbers)])
        header = ["group", "units", "of several networks", "of one network", "with several units of a network"]
        lines += table(header, rows)
        if self.metrics:
            names = list(self.metrics[0])
            header = ["network", *names, *(f"{name} with the trunk" for name in names)]
            pairs = enumerate(zip(self.metrics, self.merged_metrics, strict=True))
            rows = [[str(k + 1), *metric_cells(own, names), *metric_cells(now, names)] for k, (own, now) in pairs]
            lines += ["", *table(header, rows)]
        return "\n".join(lines) + "\n"

    def __str__(self) -> str:
        return self.card


def groups_before(symmetry: Symmetry, layer: str) -> tuple[str, ...]:
    """The groups of units that a layer reads, directly or through others: a trunk for `merge_trunk`.

    Args:
        symmetry: With sizes.
        layer: The name of a module or of a parameter, such as "head" or "layers.4".

    Raises:
        ValueError: The layer reads no group.
    """
    readers = default_readers(symmetry)
    writes, reads = _by_tensor(symmetry, readers)
    waiting = [name for name in symmetry.sites if name == layer or name.startswith(f"{layer}.")]
    found: set[str] = set()
    while waiting:
        new = reads.get(waiting.pop(), set()) - found
        found |= new
        waiting += [name for name, groups in writes.items() if groups & new]
    if not found:
        raise ValueError(
            f"no parameter of {layer!r} sums over the units of a group; name the first layer of the heads, one of "
            f"{sorted({name.rpartition('.')[0] for name in reads})[:20]}"
        )
    return tuple(group.name for group in symmetry.groups if group.name in found)


def merge_trunk(
    params: Sequence[Mapping[str, Tensor]],
    symmetry: Symmetry | Sequence[Symmetry],
    groups: Collection[str],
    *,
    tasks: Sequence[Task] | None = None,
    alpha: float = 0.3,
    beta: float = 1.0,
) -> TrunkMerge:
    """Merge the units of networks up to some layer, and keep what follows apart.

    Units of all networks are merged, across networks and within one, until each group has its size again: always the
    two most similar ones, by correlation of their activations or, without tasks, by the cosine of their incoming
    weights (in coordinates of merged units, group after group). Weights also decide between units that never vary on
    the data. A merged unit has the mean of its units' incoming
    weights; what reads it in a network gets the sum of that network's outgoing weights. So copies of one network
    merge into it, permuted, scaled and with signs turned or not, and units of a network that are equal cost nothing.

    On two halves of the handwritten digits (0 to 4, 5 to 9; MLPs 64-128-128-64-5, one seed) a trunk of all three hidden
    layers classifies 98.0% and 98.8% right, where the networks themselves have 98.4% and 98.8%; without merges within a
    network (beta = 0, alpha = 0) 86.5% and 68.8%.

    Scales, signs and half periods are made canonical first and are those of the first network in the end. The networks
    need not be aligned. What no merged group moves stays each network's own, also where it comes before the heads.

    Args:
        params: The networks, two at least. They have the same trunk; their heads may differ.
        symmetry: Of all networks, or one for each. The merged groups act on the same parameters in all.
        groups: The groups to merge; `groups_before` finds those before a layer. With a group, all that its units read
            are merged too.
        tasks: One for each network. The activations of all networks are compared on the inputs of all tasks.
        alpha: How soon units that were merged are merged again: from 0 (last) to 1 (like all others).
        beta: Share of merges that may join units of one network, from 0 to 1.

    Raises:
        KeyError: There is no such group, or a parameter that it moves is missing.
        ValueError: There is one network only, the trunks differ, a group cannot be merged, or a group reads another
            one that is not merged.

    References:
        Stoica et al. (2024), ZipIt! Merging models from different tasks without training, sections 4 and 5.
    """
    symmetries = _parts(params, symmetry, groups, alpha, beta)
    if tasks is not None and len(tasks) != len(params):
        raise ValueError(f"there are {len(tasks)} tasks for {len(params)} networks; give one for each")
    whole = (symmetry if isinstance(symmetry, Symmetry) else symmetry[0]).bind(params[0])
    readers = default_readers(whole)
    writes, reads = _by_tensor(symmetries[0], readers)
    _require_trunk(params, whole, symmetries, readers)
    elements = [
        canonical_element(p, s, parts=("scale", "sign", "shift")) for p, s in zip(params, symmetries, strict=True)
    ]
    networks = [s.act(e, p) for s, e, p in zip(symmetries, elements, params, strict=True)]
    similar = None if tasks is None else _correlations(networks, symmetries, tasks)
    units: Units = {}
    remaining = [group.name for group in symmetries[0].groups]
    while remaining:
        name = max(remaining, key=lambda group: _known(group, networks, symmetries[0], writes, reads, set(units)))
        remaining.remove(name)
        matrix = _cosines(name, networks, symmetries, writes, reads, readers, units)
        if similar is not None:
            correlations = similar[name].to(matrix)
            is_constant = correlations.diagonal() == 0
            both = torch.outer(is_constant, is_constant)
            matrix = torch.where(both, matrix, (1 - TIE) * correlations + TIE * matrix)
        size, count = symmetries[0][name].size, len(params)
        owners = np.repeat(np.arange(count), size)
        labels = zip_units(matrix.cpu().numpy(), owners, size, alpha=alpha, beta=beta)
        units[name] = torch.from_numpy(labels).reshape(count, size)
    merged, shared = _applied(networks, symmetries, writes, readers, units)
    back = symmetries[0].inverse(elements[0])
    results = _moved_back(params, merged, shared, symmetries, back)
    prepared = [
        result if task.prepare is None else task.prepare(result)
        for task, result in zip(tasks or (), results, strict=False)
    ]
    return TrunkMerge(
        params=results,
        shared=shared,
        units={group.name: units[group.name] for group in symmetries[0].groups},
        metrics=tuple(task.evaluate(p) for task, p in zip(tasks or (), params, strict=False)),
        merged_metrics=tuple(task.evaluate(p) for task, p in zip(tasks or (), prepared, strict=True)),
    )


def _parts(
    params: Sequence[Mapping[str, Tensor]],
    symmetry: Symmetry | Sequence[Symmetry],
    groups: Collection[str],
    alpha: float,
    beta: float,
) -> list[Symmetry]:
    """The groups to be merged, for each network."""
    if len(params) < 2:
        raise ValueError(f"there are {len(params)} networks; give two at least")
    given = [symmetry] * len(params) if isinstance(symmetry, Symmetry) else list(symmetry)
    if len(given) != len(params):
        raise ValueError(f"there are {len(given)} symmetries for {len(params)} networks; give one for each, or one")
    if not 0 <= alpha <= 1 or not 0 <= beta <= 1:
        raise ValueError(f"alpha is {alpha} and beta {beta}; both are between 0 and 1")
    if not groups or isinstance(groups, str):
        raise ValueError(f"groups are {groups!r}; give the names of those to merge, as groups_before finds them")
    result = []
    for one, network in zip(given, params, strict=True):
        require_finite(network, "a network")
        bound = one.bind(network)
        for name in groups:
            group = bound[name]
            if not group.is_permuted or group.within or group.is_base:
                raise ValueError(
                    f"group {name!r} is {group.kind}: its units cannot be merged one by one; merge up to a layer "
                    "before it"
                )
        result.append(replace(bound, groups=tuple(g for g in bound.groups if g.name in groups)))
    return result


def _require_trunk(
    params: Sequence[Mapping[str, Tensor]], whole: Symmetry, symmetries: Sequence[Symmetry], readers: Collection[Axis]
) -> None:
    """Refuse trunks that differ, and groups that are no trunk."""
    first = symmetries[0]
    for other in symmetries[1:]:
        for group in first.groups:
            same = other[group.name]
            if same.size != group.size or set(same.placements) != set(group.placements):
                raise ValueError(
                    f"group {group.name!r} has {group.size} units in the first network and {same.size} in another, or "
                    "acts on other parameters there; networks with one trunk are needed"
                )
    names = {group.name for group in first.groups}
    tied = {name for one in first.tied for name in one}
    for name, sites in whole.sites.items():
        written = {s.group.name for s in sites if (name, s.placement.axis) not in readers} & names
        if not written:
            continue
        if name in tied and len(written) < len({s.group.name for s in sites}):
            raise ValueError(f"{name!r} is tied to another parameter; untie them before merging")
        own = {s.group.name for s in sites if (name, s.placement.axis) in readers} - names
        if own:
            raise ValueError(
                f"{name!r} gives values to the merged group {sorted(written)[0]!r} and reads {sorted(own)}, which "
                "are not merged; merge them too, see groups_before"
            )
        if len({s.placement.axis for s in sites if s.group.name in written}) > 1 and not any(
            (name, s.placement.axis) in readers for s in sites
        ):
            raise ValueError(f"{name!r} gives values to merged groups along several axes, which has no mean")
        if any(network[name].shape != params[0][name].shape for network in params):
            shapes = [tuple(network[name].shape) for network in params]
            raise ValueError(f"{name!r} of the trunk has the shapes {shapes}; networks with one trunk are needed")


def _by_tensor(symmetry: Symmetry, readers: Collection[Axis]) -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """For each tensor the groups to whose units it gives values, and those over whose units it sums."""
    writes: dict[str, set[str]] = {}
    reads: dict[str, set[str]] = {}
    for name, sites in symmetry.sites.items():
        for site in sites:
            into = reads if (name, site.placement.axis) in readers else writes
            into.setdefault(name, set()).add(site.group.name)
    return writes, reads


def _known(
    group: str,
    networks: Sequence[Mapping[str, Tensor]],
    symmetry: Symmetry,
    writes: Mapping[str, set[str]],
    reads: Mapping[str, set[str]],
    done: set[str],
) -> float:
    """The share of a group's incoming weights, without vectors, that read merged groups or inputs only."""
    total = known = 0.0
    for name, groups in writes.items():
        if group in groups and networks[0][name].ndim > 1:
            square = sum(float(network[name].double().square().sum()) for network in networks)
            total += square
            known += square if reads.get(name, set()) <= done else 0.0
    return known / total if total else 0.0


def _cosines(
    group: str,
    networks: Sequence[Mapping[str, Tensor]],
    symmetries: Sequence[Symmetry],
    writes: Mapping[str, set[str]],
    reads: Mapping[str, set[str]],
    readers: Collection[Axis],
    units: Units,
) -> Tensor:
    """Cosines of the incoming weights of all units, as far as what they read is merged."""
    rows = []
    for k, (network, symmetry) in enumerate(zip(networks, symmetries, strict=True)):
        found = []
        for name, groups in writes.items():
            if group not in groups or name in symmetry.buffers or not reads.get(name, set()) <= units.keys():
                continue
            tensor = _read(network[name].double(), name, symmetry, readers, units, k)
            for site in symmetry.sites[name]:
                if site.group.name == group and (name, site.placement.axis) not in readers:
                    last = tensor.movedim(site.placement.axis, -1)[..., _positions(site)]
                    found.append(last.reshape(-1, site.group.size).T)
        size = symmetry[group].size
        rows.append(torch.cat(found, 1) if found else torch.zeros(size, 0, dtype=torch.float64))
    features = torch.nn.functional.normalize(torch.cat(rows), dim=1)
    return features @ features.T


def _correlations(
    networks: Sequence[Params], symmetries: Sequence[Symmetry], tasks: Sequence[Task]
) -> dict[str, Tensor]:
    """Correlations of the activations of all units on the inputs of all tasks, a mean over places."""
    dtypes = [t.dtype for network in networks for t in network.values() if t.is_floating_point()]
    dtype = torch.float64 if torch.float64 in dtypes else torch.float32
    runs = [Traces(s, task.module, dtype, task.outputs) for s, task in zip(symmetries, tasks, strict=True)]
    floats = [{n: t.to(dtype) if t.is_floating_point() else t for n, t in network.items()} for network in networks]
    moments: dict[tuple[str, int], CrossMoments] = {}
    for inputs in (inputs for task in tasks for inputs, _ in task.batches):
        samples: list[dict[tuple[str, int], Tensor]] = []
        for run, network in zip(runs, floats, strict=True):
            found, parts, args, kwargs = run.prepared(inputs)
            parts = [part for part in parts if len(part.groups) == 1]
            values = found.values(network, args, kwargs, list(dict.fromkeys(part.name for part in parts)))
            here: dict[tuple[str, int], Tensor] = {}
            for part in parts:
                owner = part.groups[0][0]
                here[owner, sum(name == owner for name, _ in here)] = part.samples(values[part.name])
            samples.append(here)
        if any(one.keys() != samples[0].keys() for one in samples):
            raise ValueError("the networks compute different values with the merged groups; they need one trunk")
        for key in samples[0]:
            joint = torch.cat([one[key] for one in samples])
            moments.setdefault(key, CrossMoments()).update(joint, joint)
    result: dict[str, Tensor] = {}
    for group in symmetries[0].groups:
        size = len(networks) * group.size
        places = [moment for (name, _), moment in moments.items() if name == group.name]
        if not places:
            raise ValueError(f"no activations of group {group.name!r} are known; leave the tasks out, to use weights")
        result[group.name] = sum(
            (moment.correlation(torch.arange(size, device=moment.products.device)).matrix for moment in places),
            torch.zeros((), dtype=torch.float64),
        ) / len(places)
    return result


def _applied(
    networks: Sequence[Params],
    symmetries: Sequence[Symmetry],
    writes: Mapping[str, set[str]],
    readers: Collection[Axis],
    units: Units,
) -> tuple[list[Params], tuple[str, ...]]:
    """What reads merged units gets sums, what gives them their values is the mean over all networks."""
    results = [dict(network) for network in networks]
    for k, (network, symmetry) in enumerate(zip(networks, symmetries, strict=True)):
        for name in symmetry.sites:
            results[k][name] = _read(_wide(network[name]), name, symmetry, readers, units, k)
    shared = []
    for name in writes:
        tensor = networks[0][name]
        sites = [s for s in symmetries[0].sites[name] if (name, s.placement.axis) not in readers]
        own = [result[name] for result in results]
        for site in sites:
            places = units[site.group.name]
            counts = torch.bincount(places.flatten(), minlength=site.group.size)
            total = sum(
                (_along(x, site, _indicator(places[k]) / counts.unsqueeze(1)) for k, x in enumerate(own)),
                torch.zeros((), dtype=own[0].dtype, device=own[0].device),
            )
            own = [_with(x, total, site) for x in own]
        covered = len(set(torch.cat([site.positions for site in sites]).tolist()))
        is_whole = covered == tensor.shape[sites[0].placement.axis]
        if is_whole:
            shared.append(name)
        for k, result in enumerate(results):
            result[name] = own[0] if is_whole else own[k]
    return results, tuple(shared)


def _moved_back(
    params: Sequence[Mapping[str, Tensor]],
    merged: Sequence[Params],
    shared: Collection[str],
    symmetries: Sequence[Symmetry],
    back: Element,
) -> tuple[Params, ...]:
    """In the scales of the first network and the dtypes as given; the trunk is one set of tensors."""
    results: list[Params] = []
    for given, network, symmetry in zip(params, merged, symmetries, strict=True):
        result = {name: tensor.to(given[name].dtype) for name, tensor in symmetry.act(back, network).items()}
        results.append(result if not results else {**result, **{name: results[0][name] for name in shared}})
    return tuple(results)


def _read(
    tensor: Tensor, name: str, symmetry: Symmetry, readers: Collection[Axis], units: Units, network: int
) -> Tensor:
    """Weights that sum over units as weights that sum over merged units."""
    for site in symmetry.sites[name]:
        if (name, site.placement.axis) in readers:
            tensor = _along(tensor, site, _indicator(units[site.group.name][network]))
    return tensor


def _indicator(places: Tensor) -> Tensor:
    """`[merged unit, unit]`: which unit became which."""
    return torch.nn.functional.one_hot(places, len(places)).T.double()


def _along(tensor: Tensor, site: Site, matrix: Tensor) -> Tensor:
    """A matrix on the units of a site."""
    positions, axis = _positions(site).to(tensor.device), site.placement.axis
    last = tensor.movedim(axis, -1)
    result = last.clone()
    result[..., positions] = last[..., positions] @ matrix.to(tensor).mT
    return result.movedim(-1, axis)


def _with(tensor: Tensor, other: Tensor, site: Site) -> Tensor:
    """A tensor with the values of another one where a site acts."""
    index, axis = site.positions.to(tensor.device), site.placement.axis
    return tensor.index_copy(axis, index, other.index_select(axis, index))


def _positions(site: Site) -> Tensor:
    """Axis indices, `[copies, units]`."""
    return site.positions[site.units.argsort(stable=True)].reshape(site.group.size, -1).T


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32)) if tensor.is_floating_point() else tensor

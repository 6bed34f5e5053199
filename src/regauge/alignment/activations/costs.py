"""Costs of matching units, computed from the activations of two networks on the same inputs."""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from regauge.core.act import Site
from regauge.core.given import as_pair
from regauge.core.groups import Placement
from regauge.core.outputs import Outputs
from regauge.core.products import matmul
from regauge.core.symmetry import Symmetry
from regauge.core.task import Task, arguments, largest_batch
from regauge.discovery.activations import Activations, activations

COPIED = 4
"""The number of copies of the largest activation tensor that are in memory while statistics are updated: plain and
centered, of two networks."""
READING = ("mm", "convolution", "attention", "rnn", "lstm", "gru", "linear")
"""Parts of the names of operators through which layers read their inputs."""
CONSTANT_ACTIVATION = 1e-6
"""A unit counts as constant if its standard deviation is below this fraction of its mean."""


@dataclass
class CrossMoments:
    """Running means, variances and cross products of the units of two networks, accumulated over batches.

    Batches are merged by the pairwise update of Chan et al. (1983). Products of centered activations have the precision
    of the activations, and sums over batches are in float64. Up to rounding, the result does not depend on how the data
    are split into batches. No batch is kept in memory after it has been added.

    Attributes:
        count: The number of samples so far.
        means: The mean of every unit in both networks, `[2, units]`.
        squares: The sums of squared deviations from the means, `[2, units]`.
        products: The sums of products of the deviations, `[units of the first network, units of the second]`.

    References:
        Chan, Golub and LeVeque (1983), Algorithms for computing the sample variance, equations 1.5 and 3.1.
    """

    count: int = 0
    means: Tensor = field(default_factory=lambda: torch.zeros(2, 0, dtype=torch.float64))
    squares: Tensor = field(default_factory=lambda: torch.zeros(2, 0, dtype=torch.float64))
    products: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.float64))

    def update(self, a: Tensor, b: Tensor) -> None:
        """Add one batch of activations, `[units, samples]` for each network. Both networks must see the same inputs."""
        samples = a.shape[1]
        if not samples:
            return
        means = torch.stack([t.mean(1, dtype=torch.float64) for t in (a, b)])
        x, y = (t - mean.to(t.dtype).unsqueeze(1) for t, mean in zip((a, b), means, strict=True))
        squares = torch.stack([torch.linalg.vecdot(t, t).double() for t in (x, y)])
        products = matmul(x, y.mT).double()
        if not self.count:
            self.count, self.means, self.squares, self.products = samples, means, squares, products
            return
        total = self.count + samples
        weight, change = self.count * samples / total, means - self.means
        self.products += products
        self.products.addr_(change[0], change[1], alpha=weight)
        self.squares += squares + weight * change.square()
        self.means += change * (samples / total)
        self.count = total

    def covariance(self) -> tuple[Tensor, Tensor]:
        """Return the covariances of all pairs of units, and the variances, in the form that `correlation` uses."""
        return self.products / self.count, (self.squares / self.count).cpu()

    def product(self) -> tuple[Tensor, Tensor]:
        """Return the mean products of all pairs of units, without centering, and the mean squares of all units."""
        products = self.products / self.count + torch.outer(self.means[0], self.means[1])
        return products, (self.squares / self.count + self.means.square()).cpu()

    def correlation(self, classes: Tensor) -> tuple[Tensor, Tensor]:
        """Return the correlations of all pairs of units. The correlation with a constant unit is zero.

        Args:
            classes: The class index of each unit. All units of a class are normalized by their mean variance. With one
                class per unit, the results are Pearson's correlations. Units that a rotation mixes must belong to one
                class.

        Returns:
            The inner products of normalized units, `[units of the first network, units of the second]`, and the squared
            norms of normalized units, `[2, units]` on the CPU.
        """
        sums = torch.zeros_like(self.squares).index_add(1, classes, self.squares)
        deviations = (sums / torch.bincount(classes, minlength=len(classes)).clamp(min=1)).sqrt()[:, classes]
        # Rounding makes the variance of a constant unit nonzero, in proportion to its mean.
        is_live = deviations > CONSTANT_ACTIVATION * self.count**0.5 * self.means.abs()
        factors = torch.where(is_live, 1 / deviations, 0.0)
        return factors[0].unsqueeze(1) * self.products * factors[1], (factors.square() * self.squares).cpu()


Statistic = Literal["correlation", "covariance", "product"]


@dataclass(frozen=True)
class ValuePart:
    """A part of an intermediate value, and the groups that act together on this part.

    Attributes:
        name: The name of the intermediate value.
        axes: The axes on which the groups act, with the range of indices on each axis: first index and length.
        units: The indices of each unit's entries, `[units, m]`, if the groups act on a single axis and no group is
            nested.
        groups: The names of the groups, with their placements on the joint axis. The joint axis is the axis of the
            units or, for several axes, the product of their index ranges.
        size: The length of the joint axis.
    """

    name: str
    axes: tuple[tuple[int, int, int], ...]
    units: Tensor | None
    groups: tuple[tuple[str, Placement], ...]
    size: int

    def samples(self, value: Tensor) -> Tensor:
        """Return the part of an intermediate value as `[joint axis, samples]`."""
        axes = [axis for axis, _, _ in self.axes]
        for axis, start, length in self.axes:
            value = value.narrow(axis, start, length)
        if self.units is None:
            return value.movedim(axes, list(range(len(axes)))).reshape(self.size, -1)
        return value.movedim(axes[0], 0).index_select(0, self.units.flatten().to(value.device)).reshape(self.size, -1)


@dataclass(frozen=True)
class ActivationCosts:
    """Statistics of activations, in the form of tensors on which groups act in the same way as on parameters.

    The objective is the inner product of `a` and `b`. The matrix `b` is an identity matrix on which an element has
    acted.

    Attributes:
        symmetry: The symmetry of the networks, whose groups also have placements on the tensors in `a` and `b`.
        a: Correlations, covariances or mean products between the units of both networks. Each tensor is a sum over
            activations on which groups act in the same way.
        b: The identity matrices on which elements act.
        reach: An upper bound of the objective. The objective reaches the bound if every unit has a perfectly correlated
            partner in the other network.
    """

    symmetry: Symmetry
    a: dict[str, Tensor]
    b: dict[str, Tensor]
    reach: float


def activation_costs(
    params_a: Mapping[str, Tensor],
    params_b: Mapping[str, Tensor],
    traces: "Traces",
    task: Task,
    statistic: Statistic = "correlation",
) -> ActivationCosts:
    """Run both networks once over the data of a task, and return the statistics of their activations.

    Raises:
        TraceError: The task's module cannot be traced.
        ValueError: There are no batches, the module raises an error for a batch, the traces for different batch shapes
            disagree, or activations are not finite.
    """
    networks = [
        {name: t.detach().to(traces.dtype) if t.is_floating_point() else t for name, t in params.items()}
        for params in (params_a, params_b)
    ]
    moments: list[CrossMoments] = []
    parts: list[ValuePart] = []
    for inputs, _ in map(as_pair, task.batches):
        found, here, args, kwargs = traces.prepare(inputs)
        if not parts:
            parts, moments = here, [CrossMoments() for _ in here]
        elif [(p.name, p.groups) for p in parts] != [(p.name, p.groups) for p in here]:
            raise ValueError(
                "the module computes other intermediate values for batches of another shape, so batches cannot be "
                "combined; give batches of one shape"
            )
        names = list(dict.fromkeys(part.name for part in here))
        a, b = (found.values(p, args, kwargs, names) for p in networks)
        _require_finite(a, "first")
        _require_finite(b, "second")
        for part, moment in zip(here, moments, strict=True):
            moment.update(part.samples(a[part.name]), part.samples(b[part.name]))
    if not traces.is_used:
        raise ValueError("the task has no batches, and activations are compared on data; give at least one batch")
    return _collect(traces.symmetry, parts, moments, statistic)


class _ReadValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that counts the bytes of tensors that layers read, such as operands of products and convolutions.

    Several views of one tensor count once.

    Attributes:
        held: The bytes of all tensors that layers read.
        largest: The bytes of the largest tensor that any operator makes.
    """

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.held = self.largest = 0
        # Weak references, because torch reuses freed memory for other tensors.
        self._seen = WeakIdKeyDictionary({t.untyped_storage(): True for t in params.values()})

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        is_read = any(word in function.__name__ for word in READING)
        for tensor in pytree.tree_leaves((made, args if is_read else ())):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.largest = max(self.largest, storage.nbytes())
                if is_read and storage not in self._seen and tensor.is_floating_point():
                    self._seen[storage] = True
                    self.held += storage.nbytes()
        return made


def held_by_values(task: Task, params: Mapping[str, Tensor]) -> int:
    """Return the bytes that a comparison of activations holds, for the batch with the most inputs.

    A comparison holds the activations of two networks, and copies of the largest activation tensor. This function
    counts the bytes in one run of the model, without gradients.
    """
    batch = largest_batch(task)
    if batch is None:
        return 0  # the method raises an error
    read = _ReadValues(params)
    with torch.no_grad(), read:
        task.run(params, batch[0])
    return 2 * read.held + COPIED * read.largest


class Traces:
    """Traces of a module in one precision, with one trace for each batch shape.

    A trace records the activations that layers read. With `only_read=False`, a trace records all activations on which
    groups act.
    """

    def __init__(
        self,
        symmetry: Symmetry,
        module: nn.Module,
        dtype: torch.dtype,
        outputs: Outputs = None,
        *,
        only_read: bool = True,
    ) -> None:
        is_alike = all(t.dtype == dtype for t in module.state_dict().values() if t.is_floating_point())
        self._module = module if is_alike else copy.deepcopy(module).to(dtype)
        self.symmetry, self.dtype, self._outputs, self._only_read = symmetry, dtype, outputs, only_read
        self._known: dict[tuple[Any, ...], tuple[Activations, list[ValuePart]]] = {}

    def prepare(self, inputs: Any) -> tuple[Activations, list[ValuePart], tuple[Any, ...], dict[str, Any]]:
        """Return the trace for inputs of given shapes, the parts of its activations, and the inputs as arguments."""

        def cast(value: Any) -> Any:
            return value.to(self.dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

        args, kwargs = pytree.tree_map(cast, arguments(inputs))
        leaves, structure = pytree.tree_flatten((args, kwargs))
        key = (structure, *(tuple(x.shape) if isinstance(x, Tensor) else x for x in leaves))
        if key not in self._known:
            found = activations(
                self._module, args, self.symmetry, kwargs, outputs=self._outputs, only_read=self._only_read
            )
            self._known[key] = found, parts_of(found.symmetry, found.read)
        return *self._known[key], args, kwargs

    @property
    def is_used(self) -> bool:
        """Whether at least one trace was used."""
        return bool(self._known)


def parts_of(symmetry: Symmetry, names: Sequence[str]) -> list[ValuePart]:
    """Return the parts of activations on which groups act jointly.

    An activation tensor is left out if groups act independently on several of its axes. If groups act independently on
    several axes of a tensor, its cross products would be too large for the information that they contain. Activations
    to which a shift adds a constant are also left out.
    """
    result: list[ValuePart] = []
    for name in names:
        sites = symmetry.sites[name]
        parts = _components(sites)
        axes = {frozenset(site.placement.axis for site in part) for part in parts}
        places = {(site.group.name, site.placement.axis) for site in sites}
        is_twice = len(places) > len({group for group, _ in places})
        if len(axes) == 1 and not is_twice and not any(any(site.placement.shift) for site in sites):
            result += [_part(name, part, symmetry.shapes[name]) for part in parts]
    return result


def _components(sites: Sequence[Site]) -> list[list[Site]]:
    """Divide the sites (places where groups act) of an activation tensor into parts.

    Two sites belong to the same part if they have positions of an axis in common, or if the group of one site is
    repeated within the group of the other site.
    """

    def is_linked(x: Site, y: Site) -> bool:
        if x.placement.axis == y.placement.axis:
            return bool(torch.isin(x.positions, y.positions).any())
        return x.group.name in y.group.within or y.group.name in x.group.within

    parts: list[list[Site]] = []
    for site in sites:
        linked = [any(is_linked(site, other) for other in part) for part in parts]
        joined = [other for part, is_near in zip(parts, linked, strict=True) if is_near for other in part]
        parts = [*(part for part, is_near in zip(parts, linked, strict=True) if not is_near), [*joined, site]]
    return parts


def _part(name: str, sites: Sequence[Site], shape: tuple[int, ...]) -> ValuePart:
    if len(sites) == 1:
        (site,), axis = sites, sites[0].placement.axis
        units = site.positions.reshape(site.group.size, -1)
        places = ((site.group.name, _bare(site.placement, 0, 1, ())),)
        return ValuePart(name, ((axis, 0, shape[axis]),), units, places, site.group.size)
    axes = []
    for axis in sorted({site.placement.axis for site in sites}):
        positions = torch.cat([site.positions for site in sites if site.placement.axis == axis])
        first = int(positions.min())
        axes.append((axis, first, int(positions.max()) - first + 1))
    size = math.prod(length for _, _, length in axes)
    groups = []
    for site in sites:
        place, inner, own, first = site.placement, 1, 1, 0
        others: list[tuple[int, int]] = []
        for axis, start, length in reversed(axes):
            if axis == place.axis:
                own, first = inner, start
            else:
                others.append((length, inner))
            inner *= length
        repeats = (*((n, stride * own) for n, stride in place.repeats), *others)
        groups.append((site.group.name, _bare(place, (place.start - first) * own, place.stride * own, repeats)))
    return ValuePart(name, tuple(axes), None, tuple(groups), size)


def _bare(place: Placement, start: int, stride: int, repeats: tuple[tuple[int, int], ...]) -> Placement:
    """Return a placement, changed such that it acts on the joint axis of an activation part.

    The new placement has no scales. The matrix of the group acts instead of its inverse transpose, because a rotation
    equals its inverse transpose.
    """
    scale = (0,) * len(place.scale)
    return Placement("", 0, start, stride, repeats, False, scale, place.sign, place.parity, place.shift)


def _collect(
    symmetry: Symmetry, parts: Sequence[ValuePart], moments: list[CrossMoments], statistic: Statistic
) -> ActivationCosts:
    """Combine activations on which groups act in the same way into one tensor, and place the groups on this tensor."""
    names = {groups: f"%{k}" for k, groups in enumerate(dict.fromkeys(part.groups for part in parts))}
    more: dict[str, list[Placement]] = {group.name: [] for group in symmetry.groups}
    for places, name in names.items():
        for group, place in places:
            more[group].append(replace(place, parameter=name))
    placed = replace(
        symmetry,
        groups=tuple(replace(g, placements=(*g.placements, *more[g.name])) for g in symmetry.groups),
        shapes={**symmetry.shapes, **{names[part.groups]: (part.size, part.size) for part in parts}},
    )
    a: dict[str, Tensor] = {}
    reach = 0.0
    for part in parts:
        name, moment = names[part.groups], moments.pop(0)  # The caller's moments are not needed any more.
        classes, is_covered = _classes(placed.sites[name], part.size)
        on_device = classes.to(moment.products.device)
        if statistic == "correlation":
            matrix, squares = moment.correlation(on_device)
        else:
            matrix, squares = moment.covariance() if statistic == "covariance" else moment.product()
        mask = is_covered.double()
        matrix = matrix * torch.outer(mask, mask).to(matrix)
        a[name] = a[name] + matrix if name in a else matrix
        reach += float((squares * mask).sum(-1).prod()) ** 0.5
    b = {name: torch.eye(len(t), dtype=t.dtype, device=t.device) for name, t in a.items()}
    return ActivationCosts(placed, a, b, reach)


def _classes(sites: Sequence[Site], size: int) -> tuple[Tensor, Tensor]:
    """Return the class of each index of a joint axis, and a mask of the indices on which a group acts. All indices that
    one copy of a matrix mixes form one class.
    """
    classes, is_covered = torch.arange(size), torch.zeros(size, dtype=torch.bool)
    for site in sites:
        is_covered[site.positions] = True
        if site.group.matrix != "none":
            order = site.units.argsort(stable=True)
            copies = site.positions[order].reshape(site.group.size, -1)
            classes[copies] = copies[0].expand_as(copies).clone()
    return classes, is_covered


def _require_finite(values: Mapping[str, Tensor], which: str) -> None:
    for name, value in values.items():
        if not bool(value.isfinite().all()):
            raise ValueError(
                f"the activation {name} (shape {tuple(value.shape)}) of the {which} network is NaN or Inf for some "
                "inputs and cannot be compared; leave these inputs out, or run the network in a wider dtype"
            )


def precision_of(*networks: Mapping[str, Tensor]) -> torch.dtype:
    """Return the dtype in which the networks run: float64 if a network has a float64 tensor, and otherwise float32."""
    dtypes = [t.dtype for params in networks for t in params.values() if t.is_floating_point()]
    return torch.float64 if torch.float64 in dtypes else torch.float32

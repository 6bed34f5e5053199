"""The tensors of network A, prepared for the search, and the search for vectors of network B among their vectors."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from difflib import SequenceMatcher
from re import findall

import numpy as np
import torch
from scipy.spatial import KDTree
from torch import Tensor

from regauge.comparison.conversion.fibers import (
    TIGHT,
    Floats,
    Ints,
    Marks,
    Owners,
    equal_fibers,
    fibers_of,
    nearest,
    unit,
)
from regauge.comparison.conversion.tensor_map import ROUNDED, MadeTensor, SourceTensor

SHORT = 4
"""Vectors shorter than this length are searched only if a tensor has no longer vectors."""
NEAR = 0.5
"""The nearest tensor is reported only up to this relative difference."""
Found = tuple[list[SourceTensor], Ints, Ints, Ints | None, float | Floats]
"""The result of a search: the source tensors; for each fiber, its source and its index there; the order of entries; the
factors."""


def is_measured(name: str, tensor: Tensor, label: str) -> bool:
    """Return whether the entries of a tensor are searched one vector at a time. Integers, and masks with -Inf, are
    compared only as whole tensors.

    Raises:
        ValueError: The tensor contains NaN.
    """
    if not tensor.is_floating_point() or not tensor.numel():
        return False
    if bool(torch.isnan(tensor).any()):
        raise ValueError(f"{name!r} of {label} holds NaN, and cannot be compared; repair the checkpoint first")
    return bool(torch.isfinite(tensor).all())


def squeeze(tensor: Tensor) -> Tensor:
    """Return a tensor without gradients and without axes of length one."""
    return tensor.detach().squeeze()


def is_constant(tensor: Tensor) -> bool:
    """Return whether all entries are equal."""
    return bool((tensor == tensor.reshape(-1)[0]).all())


class GivenTensors:
    """The tensors of network A, with the features that the search uses.

    Attributes:
        params: The tensors.
        shapes: The shapes of the tensors.
        constants: For each tensor whose entries are all equal, its value.
        vectors: The tensors with one axis, squeezed and in float64.
        integers: The names of tensors that are compared only as whole tensors.
        marks: For each fiber length, the tensors and axes with this length, and their features.
        used: The names of tensors that formulas for B use.
    """

    def __init__(self, params: Mapping[str, Tensor], label: str, advance: Callable[[], object]) -> None:
        self.params = params
        self.shapes = {name: tuple(params[name].shape) for name in params}
        self.constants: dict[str, float] = {}
        self.vectors: dict[str, Tensor] = {}
        self.integers: list[str] = []
        self.marks: dict[int, dict[tuple[str, int], Marks]] = {}
        self.used: set[str] = set()
        self._precision = 0.0
        self._owners: dict[tuple[int, str], tuple[Owners, KDTree]] = {}
        for name in params:
            self._read(name, params[name], label)
            advance()

    def _read(self, name: str, tensor: Tensor, label: str) -> None:
        if not is_measured(name, tensor, label):
            self.integers.append(name)
            return
        self._precision = max(self._precision, torch.finfo(tensor.dtype).eps)
        flat = squeeze(tensor)
        if is_constant(flat):
            self.constants[name] = float(flat.reshape(-1)[0])
            return
        if flat.ndim == 1:
            self.vectors[name] = flat.double()
        for axis in range(flat.ndim):
            self.marks.setdefault(flat.shape[axis], {})[name, axis] = Marks.of(flat, axis)

    def precision(self, tensor: Tensor) -> float:
        """Return the precision of the coarsest format among the tensors of A and the given tensor."""
        return max(self._precision, torch.finfo(tensor.dtype).eps)

    def owners(self, length: int, kind: str) -> tuple[Owners, KDTree]:
        """Return all fibers (vectors along one axis) of one length, and a search tree for them. The arguments choose
        the features by which fibers are found: ordered or unordered, scaled or not.
        """
        if (length, kind) not in self._owners:
            read = self.marks[length].items()
            found = Owners.of([(key, one.unordered if kind == "unordered" else one.ordered) for key, one in read])
            self._owners[length, kind] = found, found.tree(scaled=kind == "scaled")
        return self._owners[length, kind]

    def likeness(self, name: str) -> Callable[[str], tuple[bool, bool, float]]:
        """Return a sort key for tensors of A that have equal entries.

        Tensors with similar names, and unused tensors, come first.
        """
        numbers = findall(r"\d+", name)

        def key(other: str) -> tuple[bool, bool, float]:
            likeness = SequenceMatcher(None, name, other, autojunk=False).ratio()
            return findall(r"\d+", other) != numbers, other in self.used, -likeness

        return key

    def use(self, origin: MadeTensor) -> MadeTensor:
        """Record which tensors of A the formula for a tensor of B uses."""
        self.used |= {one.name for one in origin.sources if one.name is not None}
        return origin

    def is_equal(self, one: str, two: str) -> bool:
        """Return whether two tensors of A are equal, for example an output layer that is tied to its embedding."""
        return self.shapes[one] == self.shapes[two] and torch.equal(self.params[one], self.params[two])


def match_matrix(given: GivenTensors, name: str, tensor: Tensor) -> MadeTensor:
    """Return the formula for a tensor of B with at least two axes, or the reason why there is none."""
    flat, shape = squeeze(tensor), tuple(tensor.shape)
    axes = sorted(range(flat.ndim), key=lambda axis: (-flat.shape[axis], -axis))
    axes = [axis for axis in axes if flat.shape[axis] >= min(SHORT, flat.shape[axes[0]])]
    best = MadeTensor(name, shape)
    for kind in ("ordered", "unordered", "scaled"):
        for axis in axes:
            if flat.shape[axis] not in given.marks:
                continue
            found = _fibers(given, name, flat, axis, kind)
            if found is None:
                continue
            sources, owner, index, inner, factor = found
            origin = MadeTensor(name, shape, tuple(sources), axis, owner, index, inner, factor)
            if origin.found > best.found:
                best = origin
            if best.is_complete:
                return measure(best, tensor, given.params)
    if best.sources:
        best = complete(best, fibers_of(flat, best.axis or 0))
        return measure(best, tensor, given.params)
    return replace(best, reason=_nearest_reason(given, flat, axes))


def match_row(given: GivenTensors, name: str, tensor: Tensor) -> MadeTensor | None:
    """Return the formula for a vector of B that is a row or column of a tensor of A, or None.

    For example, A may stack the vectors of all layers.
    """
    flat = squeeze(tensor)
    found = None if len(flat) not in given.marks else _fibers(given, name, flat, 0, "ordered")
    return None if found is None else MadeTensor(name, tuple(tensor.shape), tuple(found[0]), 0, found[1], found[2])


def _fibers(given: GivenTensors, name: str, flat: Tensor, axis: int, kind: str) -> Found | None:
    """Return the vectors of A that equal the vectors along one axis of a tensor of B, or None."""
    rows, precision = fibers_of(flat, axis).double(), given.precision(flat)
    own = Marks.of(flat, axis)
    owners, tree = given.owners(flat.shape[axis], kind)
    sources: list[SourceTensor] = []
    owner, index = np.full(len(rows), -1), np.zeros(len(rows), dtype=np.int64)
    inner: Ints | None = None
    factors = np.ones(len(rows))
    for key, at, taken in _candidates(given, name, own, owners, tree, kind, precision):
        at, taken = at[owner[at] < 0], taken[owner[at] < 0]
        if not len(at):
            continue
        source = SourceTensor(key[0], key[1], given.shapes[key[0]])
        if kind != "unordered":
            taken = _settled(own.ordered[at], at, taken, given.marks[flat.shape[axis]][key].ordered, precision)
        made = source.rows(given.params[key[0]]).double()[torch.from_numpy(taken)]
        these = rows[torch.from_numpy(at)]
        if kind == "unordered":
            order = inner if inner is not None else _order_of(made, these)
            made = made[:, torch.from_numpy(order)]
        factor = torch.ones(len(at), dtype=torch.float64)
        if kind == "scaled":
            factor = (these * made).sum(1) / made.square().sum(1).clamp(min=1e-300)
            made = made * factor[:, None]
        equal = equal_fibers(these, made, precision).numpy()
        if not equal.any():
            continue
        if kind == "unordered":
            inner = order
        owner[at[equal]], index[at[equal]] = len(sources), taken[equal]
        factors[at[equal]] = factor.numpy()[equal]
        sources.append(source)
        if (owner >= 0).all():
            break
    if not sources:
        return None
    return sources, owner, index, inner, _one_factor(factors, owner, precision) if kind == "scaled" else 1.0


def _candidates(
    given: GivenTensors, name: str, own: Marks, owners: Owners, tree: KDTree, kind: str, precision: float
) -> Iterator[tuple[tuple[str, int], Ints, Ints]]:
    """Yield the tensors of A that may contain the vectors, the most likely tensor first."""
    marks = own.unordered if kind == "unordered" else own.ordered
    if kind != "scaled":
        everything = np.arange(len(marks))
        same = []
        for place, key in enumerate(owners.keys):
            mine = owners.marks[owners.key == place]
            if len(mine) == len(marks) and _looks_like(marks[:1], mine[:1], precision):
                same += [key] if _looks_like(marks, mine, precision) else []
        likeness = given.likeness(name)
        for key in sorted(same, key=lambda one: likeness(one[0])):
            yield key, everything, everything
        yield from nearest(marks, owners, tree, precision)
        return
    yield from nearest(unit(marks), owners, tree, precision)
    negative = unit(marks)
    negative[:, :-1] *= -1
    yield from nearest(negative, owners, tree, precision)


def _nearest_reason(given: GivenTensors, flat: Tensor, axes: list[int]) -> str:
    """Return a message about the tensor of A that is nearest to a tensor of B without a formula."""
    for axis in axes:
        if flat.shape[axis] not in given.marks:
            continue
        owners, tree = given.owners(flat.shape[axis], "ordered")
        own = Marks.of(flat, axis).ordered
        found = np.asarray(tree.query(own, k=1)[1], dtype=np.int64)
        key = np.bincount(owners.key[found]).argmax()
        mine = owners.key[found] == key
        name, along = owners.keys[key]
        rows = fibers_of(flat, axis).double()[torch.from_numpy(mine)]
        there = fibers_of(squeeze(given.params[name]), along).double()
        made = there[torch.from_numpy(owners.index[found[mine]])]
        difference = float((rows - made).norm() / rows.norm())
        if difference < NEAR:
            return f"the nearest tensor is {name!r}, which differs by {difference:.2g} of its norm: values were changed"
    return "no tensor of A has these values"


def _looks_like(one: Floats, two: Floats, precision: float) -> bool:
    return bool((np.abs(one - two).max(1) <= 8 * precision * one[:, -1]).all())


def _settled(own: Floats, at: Ints, taken: Ints, marks: Floats, precision: float) -> Ints:
    """Return the indices of the vectors that were found. Among equal vectors, such as zeros, prefer consecutive
    indices.
    """
    result = taken.copy()
    for place in range(1, len(at)):
        wanted = result[place - 1] + 1
        if at[place] != at[place - 1] + 1 or result[place] == wanted or wanted >= len(marks):
            continue
        if _looks_like(own[place : place + 1], marks[wanted : wanted + 1], precision * 1e-6):
            result[place] = wanted
    return result


def _order_of(made: Tensor, rows: Tensor) -> Ints:
    """Return the permutation of columns that maps one matrix to another, if there is one."""
    weights = torch.randn(len(rows), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    here, there = torch.argsort(weights @ rows, stable=True), torch.argsort(weights @ made, stable=True)
    order = torch.empty_like(here)
    order[here] = there
    return order.numpy()


def _one_factor(factors: Floats, owner: Ints, precision: float) -> float | Floats:
    """Return the factor of each vector that was found, or one number if all factors are equal."""
    found = factors[owner >= 0]
    middle = float(np.median(found))
    if (np.abs(found - middle) <= TIGHT * precision * abs(middle)).all():
        return middle
    return np.where(np.abs(factors - 1) <= TIGHT * precision, 1.0, factors)


def complete(origin: MadeTensor, rows: Tensor) -> MadeTensor:
    """Return a formula in which missing vectors are filled by a constant, or give a reason why they are missing."""
    missing = origin.owner < 0
    if not missing.any():
        return origin
    rest = rows[torch.from_numpy(missing)]
    value = float(rest.reshape(-1)[0])
    if bool((rest == value).all()):
        owner = np.where(missing, len(origin.sources), origin.owner)
        index = np.where(missing, 0, origin.index)
        return replace(origin, sources=(*origin.sources, SourceTensor(None, value=value)), owner=owner, index=index)
    places = np.flatnonzero(missing)
    what = "values" if origin.axis is None else "fibers along its longest axis"
    return replace(origin, reason=f"{len(places)} of its {len(origin.owner)} {what} are not in A, from {places[0]} on")


def measure(origin: MadeTensor, tensor: Tensor, params: Mapping[str, Tensor]) -> MadeTensor:
    """Return a formula, with the measured difference between its result and the tensor of B."""
    made = origin.make(params)
    flat = squeeze(tensor).double()
    rows = flat.reshape(-1, 1) if origin.axis is None else fibers_of(flat, origin.axis)
    found = torch.from_numpy(origin.owner >= 0)
    difference = float((made - rows)[found].norm() / rows[found].norm().clamp(min=1e-300))
    return replace(origin, difference=0.0 if difference <= ROUNDED else difference)

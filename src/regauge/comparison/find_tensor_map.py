"""The search for the tensors of which another implementation of a model made its own."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from difflib import SequenceMatcher
from math import prod
from pathlib import Path
from re import findall

import numpy as np
import torch
from scipy.spatial import KDTree
from torch import Tensor, nn

from regauge.checkpoints.checkpoint import Checkpoint
from regauge.checkpoints.output import Output
from regauge.comparison.comparison_report import require_page
from regauge.comparison.fibers import TIGHT, Floats, Ints, Marks, Owners, equal_fibers, fibers_of, nearest, unit
from regauge.comparison.tensor_map import ROUNDED, MadeTensor, SourceTensor, TensorMap
from regauge.core.arguments import check_arguments
from regauge.core.counted import count
from regauge.core.progress import Progress, no_progress

SHORT = 4
"""Fibers of fewer values than that are searched only where a tensor has no longer ones."""
SEEDS = 64
"""Places at which a run of equal values is tried to begin."""
FEW = 4
"""Tensors that are searched first; only if all of them are found are the others."""
NEAR = 0.5
"""Relative difference up to which another tensor is named as the nearest one."""
Found = tuple[list[SourceTensor], Ints, Ints, Ints | None, float | Floats]
"""Sources, and for each fiber its source and its number there; the order inside fibers, and their factor."""


@check_arguments
def find_tensor_map(
    a: Mapping[str, Tensor] | nn.Module | str | Path,
    b: Mapping[str, Tensor] | nn.Module | str | Path,
    *,
    out: Output | str | Path | None = None,
    progress: Progress = no_progress,
) -> TensorMap:
    """Find how the tensors of one implementation of a model are made of those of another one, by their values.

    Tensors may be renamed, transposed, reshaped, packed and split (queries, keys and values; gates and ups; experts),
    interleaved by head, reordered (the halves of rotary pairs; permuted units), multiplied by a number, and one plus
    the other. The result has a formula of torch for each tensor, says what prevents one, and converts other
    networks of A's implementation.

    Vectors along one axis are found again by random projections in trees of nearest neighbors. Then all values are
    compared: nothing is reported as made of A that differs by more than the rounding of the coarser format.

    Args:
        a: The network that is given: tensors by name, a module, or the path of a checkpoint.
        b: The network whose tensors are explained.
        out: The page of the conversion, a self-contained `.html` file: a path, or an `Output`.
        progress: Counts tensors.

    Raises:
        FileExistsError: The page exists and may not be replaced.
        FileNotFoundError: A checkpoint does not exist.
        ValueError: A network holds NaN, or no tensors with values.
    """
    require_page(out)
    one, two = _opened(a), _opened(b)
    advance = progress("tensors", len(one) + len(two))
    labels = getattr(one, "label", "A"), getattr(two, "label", "B")
    found = replace(_Finder(one, "A", advance).explain(two, advance), labels=labels)
    found.write_page(out)
    return found


def find_layout(a: str | Path, b: str | Path, *, progress: Progress = no_progress) -> TensorMap | None:
    """Find a conversion of two checkpoints whose tensors differ in names, but for prefixes, or in shapes; else None."""
    with Checkpoint.open(a) as one, Checkpoint.open(b) as two:
        shapes = [{name: place.shape for name, place in network.stored.items()} for network in (one, two)]
    is_other = any(not _is_among(*pair, other) for own, other in (shapes, shapes[::-1]) for pair in own.items())
    return find_tensor_map(a, b, progress=progress) if is_other else None


def _is_among(name: str, shape: tuple[int, ...], shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether a name stands among others with its shape, without or with a prefix."""
    shorter = (name[at:] for at in (0, *(at + 1 for at, letter in enumerate(name) if letter == ".")))
    if any(shapes.get(one) == shape for one in shorter):
        return True
    return any(there == shape and other.endswith(f".{name}") for other, there in shapes.items())


def find_reordered(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> str:
    """A sentence on tensors of B that hold the values of A's in another order; empty if there are none."""
    names = [
        name
        for name in a
        if name in b
        and a[name].ndim > 1
        and a[name].shape == b[name].shape
        and all(one[name].is_floating_point() and bool(one[name].isfinite().all()) for one in (a, b))
        and not torch.equal(a[name], b[name])
    ]
    if not names:
        return ""
    few = sorted(names, key=lambda name: a[name].numel())[:FEW]
    for some in (few, names):
        found = find_tensor_map({name: a[name] for name in some}, {name: b[name] for name in some})
        if found.missing:
            return ""
    name, one = next(iter(found.origins.items()))
    return (
        f"B holds A's values of {count(names, 'tensor')} in another order, for example {name!r} as {one.formula}: "
        "a conversion of one of them went wrong, or the code that reads them differs"
    )


def _opened(network: Mapping[str, Tensor] | nn.Module | str | Path) -> Mapping[str, Tensor]:
    if isinstance(network, nn.Module):
        network = network.state_dict()
    opened = Checkpoint.open(network) if isinstance(network, str | Path) else network
    if not isinstance(opened, Mapping) or not opened:
        raise ValueError("a network without tensors cannot be compared; give a state dict, a module or a checkpoint")
    wrong = next((name for name, one in opened.items() if not isinstance(one, Tensor) or one.is_meta), None)
    if wrong is not None:
        raise ValueError(f"{wrong!r} is no tensor with values; give a state dict of tensors that are loaded")
    return opened


def _is_measured(name: str, tensor: Tensor, label: str) -> bool:
    """Whether a tensor is searched by its values; others, such as integers and masks with -Inf, are compared whole.

    Raises:
        ValueError: It holds NaN.
    """
    if not tensor.is_floating_point() or not tensor.numel():
        return False
    if bool(torch.isnan(tensor).any()):
        raise ValueError(f"{name!r} of {label} holds NaN, and cannot be compared; repair the checkpoint first")
    return bool(torch.isfinite(tensor).all())


def _squeezed(tensor: Tensor) -> Tensor:
    return tensor.detach().squeeze()


class _Finder:
    """The tensors of A, with the marks of their fibers."""

    def __init__(self, params: Mapping[str, Tensor], label: str, advance: Callable[[], object]) -> None:
        self.params = params
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.precision = 0.0
        self.constants: dict[str, float] = {}
        self.vectors: dict[str, Tensor] = {}
        self.integers: list[str] = []
        self.used: set[str] = set()
        marks: dict[int, list[tuple[tuple[str, int], Marks]]] = {}
        for name in params:
            self.shapes[name] = tuple(params[name].shape)
            self._read(name, params[name], label, marks)
            advance()
        self.marks = marks
        self._owners: dict[tuple[int, str], tuple[Owners, KDTree]] = {}

    def _read(
        self, name: str, tensor: Tensor, label: str, marks: dict[int, list[tuple[tuple[str, int], Marks]]]
    ) -> None:
        if not _is_measured(name, tensor, label):
            self.integers.append(name)
            return
        self.precision = max(self.precision, torch.finfo(tensor.dtype).eps)
        flat = _squeezed(tensor)
        if bool((flat == flat.reshape(-1)[0]).all()):
            self.constants[name] = float(flat.reshape(-1)[0])
            return
        if flat.ndim == 1:
            self.vectors[name] = flat.double()
        for axis in range(flat.ndim):
            marks.setdefault(flat.shape[axis], []).append(((name, axis), Marks.of(flat, axis)))

    def owners(self, length: int, kind: str) -> tuple[Owners, KDTree]:
        """The fibers of one length with their tree; of marks that are ordered, unordered or scaled."""
        if (length, kind) not in self._owners:
            marks = [(key, one.unordered if kind == "unordered" else one.ordered) for key, one in self.marks[length]]
            found = Owners.of(marks)
            self._owners[length, kind] = found, found.tree(scaled=kind == "scaled")
        return self._owners[length, kind]

    def explain(self, params: Mapping[str, Tensor], advance: Callable[[], object]) -> TensorMap:
        """The origins of all tensors of B: of matrices first, which vectors then follow."""
        origins: dict[str, MadeTensor] = {}
        flat = {}
        for name in params:
            tensor = params[name]
            if _is_measured(name, tensor, "B"):
                squeezed = _squeezed(tensor)
                if squeezed.ndim > 1 and bool((squeezed != squeezed.reshape(-1)[0]).any()):
                    origins[name] = self._matrix(name, tensor)
                    self._use(origins[name])
                else:
                    flat[name] = tensor
            elif tensor.numel():
                flat[name] = tensor
            advance()
        for name, tensor in sorted(flat.items(), key=lambda item: bool((item[1] == item[1].reshape(-1)[0]).all())):
            origins[name] = self._small(name, tensor, origins)
            self._use(origins[name])
        ordered = {name: origins[name] for name in params if name in origins}
        floats = [name for name in self.params if name not in self.integers and self.params[name].numel()]
        used = [name for name in floats if name in self.used]
        unused = tuple(
            name for name in floats if name not in self.used and not any(self._is_equal(name, one) for one in used)
        )
        return TensorMap(ordered, unused, tuple(self._parted(ordered)))

    def _is_equal(self, one: str, two: str) -> bool:
        """Whether two tensors of A are the same, such as a tied head and the embedding."""
        return self.shapes[one] == self.shapes[two] and torch.equal(self.params[one], self.params[two])

    def _parted(self, origins: Mapping[str, MadeTensor]) -> Iterator[str]:
        """Tensors of A of which some fibers are used, but not all."""
        taken: dict[str, set[int]] = {}
        for origin in origins.values():
            for place, source in enumerate(origin.sources):
                if source.name is not None:
                    own = taken.setdefault(source.name, set())
                    own.update(origin.index[origin.owner == place].tolist())
        for name, own in taken.items():
            size = prod(self.shapes[name])
            lengths = [1, *(one for one in self.shapes[name] if one > 1)]
            if not any(len(own) == size // length for length in lengths):
                yield name

    def _use(self, origin: MadeTensor) -> None:
        self.used |= {one.name for one in origin.sources if one.name is not None}

    def _likeness(self, name: str) -> Callable[[str], tuple[bool, bool, float]]:
        """The order in which tensors of A are taken of which all have the same values."""
        numbers = findall(r"\d+", name)

        def key(other: str) -> tuple[bool, bool, float]:
            likeness = SequenceMatcher(None, name, other, autojunk=False).ratio()
            return findall(r"\d+", other) != numbers, other in self.used, -likeness

        return key

    def _matrix(self, name: str, tensor: Tensor) -> MadeTensor:
        """The origin of a tensor of two axes or more."""
        flat, shape = _squeezed(tensor), tuple(tensor.shape)
        precision = max(self.precision, torch.finfo(tensor.dtype).eps)
        axes = sorted(range(flat.ndim), key=lambda axis: (-flat.shape[axis], -axis))
        axes = [axis for axis in axes if flat.shape[axis] >= min(SHORT, flat.shape[axes[0]])]
        best = MadeTensor(name, shape)
        for kind in ("ordered", "unordered", "scaled"):
            for axis in axes:
                if flat.shape[axis] not in self.marks:
                    continue
                found = self._fibers(name, flat, axis, kind, precision)
                if found is None:
                    continue
                sources, owner, index, inner, factor = found
                origin = MadeTensor(name, shape, tuple(sources), axis, owner, index, inner, factor)
                if origin.found > best.found:
                    best = origin
                if best.is_complete:
                    return _measured(best, tensor, self.params)
        if best.sources:
            best = _completed(best, fibers_of(flat, best.axis or 0))
            return _measured(best, tensor, self.params)
        return replace(best, reason=self._nearest_reason(flat, axes))

    def _fibers(self, name: str, flat: Tensor, axis: int, kind: str, precision: float) -> Found | None:
        """Fibers of A that the fibers along one axis equal; None if none do."""
        rows = fibers_of(flat, axis).double()
        own = Marks.of(flat, axis)
        owners, tree = self.owners(flat.shape[axis], kind)
        sources: list[SourceTensor] = []
        owner, index = np.full(len(rows), -1), np.zeros(len(rows), dtype=np.int64)
        inner: Ints | None = None
        factors = np.ones(len(rows))
        for key, at, taken in self._candidates(name, own, owners, tree, kind, precision):
            at, taken = at[owner[at] < 0], taken[owner[at] < 0]
            if not len(at):
                continue
            source = SourceTensor(key[0], key[1], self.shapes[key[0]])
            if kind != "unordered":
                taken = _settled(own.ordered[at], at, taken, dict(self.marks[flat.shape[axis]])[key].ordered, precision)
            made = source.rows(self.params[key[0]]).double()[torch.from_numpy(taken)]
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
        self, name: str, own: Marks, owners: Owners, tree: KDTree, kind: str, precision: float
    ) -> Iterator[tuple[tuple[str, int], Ints, Ints]]:
        """Tensors of A that may hold fibers: those that hold all in the same order first, then by the number."""
        marks = own.unordered if kind == "unordered" else own.ordered
        if kind != "scaled":
            everything = np.arange(len(marks))
            same = []
            for place, key in enumerate(owners.keys):
                mine = owners.marks[owners.key == place]
                if len(mine) == len(marks) and _looks_like(marks[:1], mine[:1], precision):
                    same += [key] if _looks_like(marks, mine, precision) else []
            likeness = self._likeness(name)
            for key in sorted(same, key=lambda one: likeness(one[0])):
                yield key, everything, everything
            yield from nearest(marks, owners, tree, precision)
            return
        yield from nearest(unit(marks), owners, tree, precision)
        negative = unit(marks)
        negative[:, :-1] *= -1
        yield from nearest(negative, owners, tree, precision)

    def _nearest_reason(self, flat: Tensor, axes: list[int]) -> str:
        """A sentence on the tensor of A that is nearest to one of which nothing was found."""
        for axis in axes:
            if flat.shape[axis] not in self.marks:
                continue
            owners, tree = self.owners(flat.shape[axis], "ordered")
            own = Marks.of(flat, axis).ordered
            found = np.asarray(tree.query(own, k=1)[1], dtype=np.int64)
            key = np.bincount(owners.key[found]).argmax()
            mine = owners.key[found] == key
            name, along = owners.keys[key]
            rows = fibers_of(flat, axis).double()[torch.from_numpy(mine)]
            there = fibers_of(_squeezed(self.params[name]), along).double()
            made = there[torch.from_numpy(owners.index[found[mine]])]
            difference = float((rows - made).norm() / rows.norm())
            if difference < NEAR:
                return f"nearest is {name!r}, which differs by {difference:.2g} of its norm: values were changed"
        return "no tensor of A has these values"

    def _small(self, name: str, tensor: Tensor, origins: Mapping[str, MadeTensor]) -> MadeTensor:
        """The origin of a vector, of a constant, or of integers."""
        shape, values = tuple(tensor.shape), tensor.detach().reshape(-1)
        size, zeros, places = len(values), np.zeros(values.numel(), dtype=np.int64), np.arange(values.numel())
        likeness = self._likeness(name)
        if not _is_measured(name, tensor, "B"):
            same = [
                one
                for one in self.integers
                if self.params[one].numel() == size and torch.equal(self.params[one].reshape(-1), values)
            ]
            if not same:
                is_one = bool((values == values[0]).all())
                source = SourceTensor(None, value=float(values[0]))
                reason = "" if is_one else "values that A does not hold"
                return MadeTensor(name, shape, (source,) if is_one else (), None, zeros, places, reason=reason)
            source = SourceTensor(min(same, key=likeness), None)
            return MadeTensor(name, shape, (replace(source, shape=self.shapes[str(source.name)]),), None, zeros, places)
        if bool((values == values[0]).all()):
            value = float(values[0])
            equal = [
                one
                for one, there in self.constants.items()
                if there == value and prod(self.shapes[one]) == size and len(self.shapes[one]) == len(shape)
            ]
            chosen = min(equal, key=likeness) if equal else None
            source = SourceTensor(chosen, None, self.shapes[chosen] if chosen else (), value)
            return MadeTensor(name, shape, (source,), None, zeros, places)
        vector = values.double()
        precision = max(self.precision, torch.finfo(tensor.dtype).eps)
        origin = (
            self._like_sibling(name, shape, vector, origins, precision)
            or self._scaled_vector(name, shape, vector, precision)
            or self._row(name, tensor, precision)
            or self._runs(name, shape, vector, precision)
        )
        if origin is None:
            return MadeTensor(name, shape, reason="no tensor of A has these values")
        origin = _completed(origin, vector[:, None])
        return _measured(origin, tensor, self.params)

    def _row(self, name: str, tensor: Tensor, precision: float) -> MadeTensor | None:
        """A vector that is a fiber of a tensor, such as one of stacked layers."""
        flat = _squeezed(tensor)
        found = None if len(flat) not in self.marks else self._fibers(name, flat, 0, "ordered", precision)
        return None if found is None else MadeTensor(name, tuple(tensor.shape), tuple(found[0]), 0, found[1], found[2])

    def _like_sibling(
        self, name: str, shape: tuple[int, ...], vector: Tensor, origins: Mapping[str, MadeTensor], precision: float
    ) -> MadeTensor | None:
        """A vector that is put together as the fibers of the matrix in the same module are."""
        module, _, last = name.rpartition(".")
        for sibling, made in origins.items():
            if sibling.rpartition(".")[0] != module or made.axis is None or len(made.owner) != len(vector):
                continue
            sources: list[SourceTensor] = []
            owner = np.full(len(vector), -1)
            factor = torch.as_tensor(made.factor, dtype=torch.float64).expand(len(vector))
            for place, source in enumerate(made.sources):
                if source.name is None:
                    continue
                prefix, count = (
                    source.name.rpartition(".")[0],
                    prod(source.squeezed) // source.squeezed[source.axis or 0],
                )
                there = [
                    one for one in self.vectors if one.rpartition(".")[0] == prefix and len(self.vectors[one]) == count
                ]
                there.sort(key=lambda one: one.rpartition(".")[2] != last)
                at = made.owner == place
                for one in there:
                    taken = factor[torch.from_numpy(at)] * self.vectors[one][torch.from_numpy(made.index[at])]
                    if _is_close(vector[torch.from_numpy(at)], taken, precision):
                        owner[at] = len(sources)
                        sources.append(SourceTensor(one, None, self.shapes[one]))
                        break
            origin = MadeTensor(name, shape, tuple(sources), None, owner, made.index, factor=made.factor)
            if sources and _completed(origin, vector[:, None]).is_complete:
                return origin
        return None

    def _scaled_vector(self, name: str, shape: tuple[int, ...], vector: Tensor, precision: float) -> MadeTensor | None:
        """A vector that is another one, times a number, plus a number."""
        likeness, places = self._likeness(name), np.arange(len(vector))
        zeros = np.zeros(len(vector), dtype=np.int64)
        found: list[tuple[bool, tuple[bool, bool, float], MadeTensor]] = []
        for other, there in self.vectors.items():
            if len(there) != len(vector):
                continue
            factor, offset = 1.0, 0.0
            if not _is_close(vector, there, precision):
                if len(vector) < SHORT:
                    continue
                centered = there - there.mean()
                factor = float(((vector - vector.mean()) * centered).sum() / centered.square().sum())
                offset = float(vector.mean() - factor * there.mean())
                factor = round(factor) if abs(factor - round(factor)) < 1e-3 else factor
                offset = round(offset) if abs(offset - round(offset)) < 1e-3 else offset
                if factor == 0 or not _is_close(vector, there * factor + offset, precision):
                    continue
            source = SourceTensor(other, None, self.shapes[other])
            origin = MadeTensor(name, shape, (source,), None, zeros, places, None, float(factor), float(offset))
            found.append(((factor, offset) != (1, 0), likeness(other), origin))
        return min(found, key=lambda one: one[:2])[2] if found else None

    def _runs(self, name: str, shape: tuple[int, ...], vector: Tensor, precision: float) -> MadeTensor | None:
        """A vector that is put together of runs of others, the longest first; what is not found stays out."""
        if not self.vectors:
            return None
        names = sorted(self.vectors, key=self._likeness(name))
        everything = torch.cat([self.vectors[one] for one in names]).numpy()
        which = np.repeat(np.arange(len(names)), [len(self.vectors[one]) for one in names])
        number = np.concatenate([np.arange(len(self.vectors[one])) for one in names])
        order = np.argsort(everything, kind="stable")
        values, ascending = vector.numpy(), everything[order]
        slack = TIGHT * precision
        owner, index = np.full(len(values), -1), np.zeros(len(values), dtype=np.int64)
        at = 0
        while at < len(values):
            near = slack * abs(values[at])
            first, last = np.searchsorted(ascending, [values[at] - near, values[at] + near], side="left")
            last = max(last, np.searchsorted(ascending, values[at], side="right"))
            runs = []
            for start in np.sort(order[first:last])[:SEEDS]:
                length = min(len(values) - at, len(self.vectors[names[which[start]]]) - number[start])
                pair = values[at : at + length], everything[start : start + length]
                wrong = np.flatnonzero(np.abs(pair[0] - pair[1]) > slack * np.maximum(*map(np.abs, pair)))
                runs.append((int(wrong[0]) if len(wrong) else length, -int(start)))
            if runs:
                length, start = max(runs)
                owner[at : at + length], index[at : at + length] = which[-start], number[-start] + np.arange(length)
            at += max(1, max(runs)[0] if runs else 1)
        used = [one for one in dict.fromkeys(owner.tolist()) if one >= 0]
        if (owner < 0).mean() > NEAR or not used:
            return None
        places = np.full(len(names) + 1, -1)
        places[used] = np.arange(len(used))
        sources = tuple(SourceTensor(names[one], None, self.shapes[names[one]]) for one in used)
        return MadeTensor(name, shape, sources, None, places[owner], index)


def _looks_like(one: Floats, two: Floats, precision: float) -> bool:
    return bool((np.abs(one - two).max(1) <= 8 * precision * one[:, -1]).all())


def _is_close(one: Tensor, two: Tensor, precision: float) -> bool:
    return bool(((one - two).abs() <= TIGHT * precision * torch.maximum(one.abs(), two.abs()).amax()).all())


def _settled(own: Floats, at: Ints, taken: Ints, marks: Floats, precision: float) -> Ints:
    """Numbers of fibers of which several are equal, such as rows of zeros, so that they go on where others end."""
    result = taken.copy()
    for place in range(1, len(at)):
        wanted = result[place - 1] + 1
        if at[place] != at[place - 1] + 1 or result[place] == wanted or wanted >= len(marks):
            continue
        if _looks_like(own[place : place + 1], marks[wanted : wanted + 1], precision * 1e-6):
            result[place] = wanted
    return result


def _order_of(made: Tensor, rows: Tensor) -> Ints:
    """The order of columns that takes one matrix to another one, if there is one."""
    weights = torch.randn(len(rows), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    here, there = torch.argsort(weights @ rows, stable=True), torch.argsort(weights @ made, stable=True)
    order = torch.empty_like(here)
    order[here] = there
    return order.numpy()


def _one_factor(factors: Floats, owner: Ints, precision: float) -> float | Floats:
    """One number, if all fibers that were found have the same factor."""
    found = factors[owner >= 0]
    middle = float(np.median(found))
    if (np.abs(found - middle) <= TIGHT * precision * abs(middle)).all():
        return middle
    return np.where(np.abs(factors - 1) <= TIGHT * precision, 1.0, factors)


def _completed(origin: MadeTensor, rows: Tensor) -> MadeTensor:
    """An origin whose fibers that were not found are a constant, if they are; or with the reason that they are not."""
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


def _measured(origin: MadeTensor, tensor: Tensor, params: Mapping[str, Tensor]) -> MadeTensor:
    """An origin with the difference between the tensor and what is made so; of the fibers that were found."""
    made = origin.make(params)
    flat = _squeezed(tensor).double()
    rows = flat.reshape(-1, 1) if origin.axis is None else fibers_of(flat, origin.axis)
    found = torch.from_numpy(origin.owner >= 0)
    difference = float((made - rows)[found].norm() / rows[found].norm().clamp(min=1e-300))
    return replace(origin, difference=0.0 if difference <= ROUNDED else difference)

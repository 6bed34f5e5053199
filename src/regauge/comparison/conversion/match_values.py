"""The search for vectors, constants and integers of network B in the tensors of network A."""

from collections.abc import Mapping
from dataclasses import replace
from math import prod

import numpy as np
import torch
from torch import Tensor

from regauge.comparison.conversion.fibers import TIGHT
from regauge.comparison.conversion.match_fibers import (
    NEAR,
    SHORT,
    GivenTensors,
    complete,
    is_constant,
    is_measured,
    match_row,
    measure,
)
from regauge.comparison.conversion.tensor_map import MadeTensor, SourceTensor

SEEDS = 64
"""The number of positions that are tried as the beginning of a run of equal entries."""


def match_values(given: GivenTensors, name: str, tensor: Tensor, origins: Mapping[str, MadeTensor]) -> MadeTensor:
    """Return the formula for a vector, a constant, or integers of B, or the reason why there is none."""
    shape, values = tuple(tensor.shape), tensor.detach().reshape(-1)
    size, zeros, places = len(values), np.zeros(values.numel(), dtype=np.int64), np.arange(values.numel())
    likeness = given.likeness(name)
    if not is_measured(name, tensor, "B"):
        same = [
            one
            for one in given.integers
            if given.params[one].numel() == size and torch.equal(given.params[one].reshape(-1), values)
        ]
        if not same:
            is_one = is_constant(values)
            source = SourceTensor(None, value=float(values[0]))
            reason = "" if is_one else "values that A does not hold"
            return MadeTensor(name, shape, (source,) if is_one else (), None, zeros, places, reason=reason)
        source = SourceTensor(min(same, key=likeness), None)
        return MadeTensor(name, shape, (replace(source, shape=given.shapes[str(source.name)]),), None, zeros, places)
    if is_constant(values):
        value = float(values[0])
        equal = [
            one
            for one, there in given.constants.items()
            if there == value and prod(given.shapes[one]) == size and len(given.shapes[one]) == len(shape)
        ]
        chosen = min(equal, key=likeness) if equal else None
        source = SourceTensor(chosen, None, given.shapes[chosen] if chosen else (), value)
        return MadeTensor(name, shape, (source,), None, zeros, places)
    origin = (
        _like_sibling(given, name, tensor, origins)
        or _scaled_vector(given, name, tensor)
        or match_row(given, name, tensor)
        or _runs(given, name, tensor)
    )
    if origin is None:
        return MadeTensor(name, shape, reason="no tensor of A has these values")
    return measure(complete(origin, values.double()[:, None]), tensor, given.params)


def _like_sibling(
    given: GivenTensors, name: str, tensor: Tensor, origins: Mapping[str, MadeTensor]
) -> MadeTensor | None:
    """Return the formula for a vector that is assembled in the same way as the matrix of its module, or None."""
    vector, precision = tensor.detach().reshape(-1).double(), given.precision(tensor)
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
            prefix = source.name.rpartition(".")[0]
            count = prod(source.squeezed) // source.squeezed[source.axis or 0]
            there = [
                one for one in given.vectors if one.rpartition(".")[0] == prefix and len(given.vectors[one]) == count
            ]
            there.sort(key=lambda one: one.rpartition(".")[2] != last)
            at = made.owner == place
            for one in there:
                taken = factor[torch.from_numpy(at)] * given.vectors[one][torch.from_numpy(made.index[at])]
                if _is_close(vector[torch.from_numpy(at)], taken, precision):
                    owner[at] = len(sources)
                    sources.append(SourceTensor(one, None, given.shapes[one]))
                    break
        origin = MadeTensor(name, tuple(tensor.shape), tuple(sources), None, owner, made.index, factor=made.factor)
        if sources and complete(origin, vector[:, None]).is_complete:
            return origin
    return None


def _scaled_vector(given: GivenTensors, name: str, tensor: Tensor) -> MadeTensor | None:
    """Return the formula for a vector that equals another vector times a number, plus a number, or None."""
    vector, precision = tensor.detach().reshape(-1).double(), given.precision(tensor)
    likeness, places = given.likeness(name), np.arange(len(vector))
    zeros = np.zeros(len(vector), dtype=np.int64)
    found: list[tuple[bool, tuple[bool, bool, float], MadeTensor]] = []
    for other, there in given.vectors.items():
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
        source = SourceTensor(other, None, given.shapes[other])
        origin = MadeTensor(
            name, tuple(tensor.shape), (source,), None, zeros, places, None, float(factor), float(offset)
        )
        found.append(((factor, offset) != (1, 0), likeness(other), origin))
    return min(found, key=lambda one: one[:2])[2] if found else None


def _runs(given: GivenTensors, name: str, tensor: Tensor) -> MadeTensor | None:
    """Return the formula for a vector assembled from the longest runs of entries in vectors of A, or None."""
    if not given.vectors:
        return None
    vector = tensor.detach().reshape(-1).double()
    names = sorted(given.vectors, key=given.likeness(name))
    everything = torch.cat([given.vectors[one] for one in names]).numpy()
    which = np.repeat(np.arange(len(names)), [len(given.vectors[one]) for one in names])
    number = np.concatenate([np.arange(len(given.vectors[one])) for one in names])
    order = np.argsort(everything, kind="stable")
    values, ascending = vector.numpy(), everything[order]
    slack = TIGHT * given.precision(tensor)
    owner, index = np.full(len(values), -1), np.zeros(len(values), dtype=np.int64)
    at = 0
    while at < len(values):
        near = slack * abs(values[at])
        first, last = np.searchsorted(ascending, [values[at] - near, values[at] + near], side="left")
        last = max(last, np.searchsorted(ascending, values[at], side="right"))
        runs = []
        for start in np.sort(order[first:last])[:SEEDS]:
            length = min(len(values) - at, len(given.vectors[names[which[start]]]) - number[start])
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
    sources = tuple(SourceTensor(names[one], None, given.shapes[names[one]]) for one in used)
    return MadeTensor(name, tuple(tensor.shape), sources, None, places[owner], index)


def _is_close(one: Tensor, two: Tensor, precision: float) -> bool:
    return bool(((one - two).abs() <= TIGHT * precision * torch.maximum(one.abs(), two.abs()).amax()).all())

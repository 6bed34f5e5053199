"""Orbits: transformed copies of a network that compute the same function, and alignment back to the original."""

import hashlib
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from regauge.alignment import Method, align_pairs
from regauge.connect.line import Curve
from regauge.core.arguments import check_arguments
from regauge.core.element import FIELD_OF_PART, ROTATION, TRANSLATION, Element
from regauge.core.given import given_or_seed
from regauge.core.interpolation import interpolate
from regauge.core.params import Params
from regauge.core.symmetry import Symmetry
from regauge.core.task import Task
from regauge.storage import Store
from regauge.storage.architecture import Architecture

RECOVERED = 1e-4
"""A copy counts as recovered if no parameter deviates by more than this share of the largest entry of its tensor."""


@dataclass(frozen=True)
class Orbit:
    """Copies of a network, transformed by random elements of its symmetry.

    Attributes:
        params: The copies, a population `[count, ...]`.
        element: A batch of the elements that transformed the copies: copy k is `act(element.item(k), original +
            noise)`.
        parts: The parts of the symmetry from which the elements were sampled; None for all parts.
        noise: The standard deviation of the noise, relative to the standard deviation of each tensor.
        reach: The largest shift, in half periods.
    """

    params: Params
    element: Element
    parts: tuple[str, ...] | None
    noise: float
    reach: int

    def __len__(self) -> int:
        return int(self.element.batch[0])

    def undo(self, symmetry: Symmetry) -> Params:
        """Transform the copies back by the inverse elements. Each result is the original plus noise, up to rounding."""
        return symmetry.act(symmetry.inverse(self.element), self.params)


@check_arguments
def orbit(
    params: Mapping[str, Tensor],
    symmetry: Symmetry,
    count: int,
    *,
    generator: torch.Generator | None = None,
    parts: Sequence[str] | None = None,
    noise: float = 0.0,
    reach: int = 1,
) -> Orbit:
    """Transform a network by random elements of its symmetry. Without noise, every copy computes the same function.

    Permutations and signs are uniformly random, and factors lie in [1/2, 2]. Shifts are uniformly random integers of
    half periods up to `reach`. Normal noise is added before the network is transformed. Therefore the noise is relative
    to the tensors of the original, even if factors and shifts change the sizes of entries. With only permutations and
    signs, noise could also be added after the transformation, with the same distribution. A tensor with a single entry
    gets no noise, because it has no standard deviation.

    Args:
        params: One network, which is not changed.
        parts: Some of "permutation", "sign", "scale", "shift", "linear", "translation" and "rotation". Default: all
            parts.
        noise: The standard deviation of the noise, relative to the standard deviation of each tensor.
        reach: The largest shift, in half periods of a sine.

    Raises:
        KeyError: A parameter that the symmetry transforms is missing.
        ValueError: `count`, `noise` or `reach` is out of range, a part is unknown, or the network does not fit the
            symmetry.

    References:
        Paper 002, section 5.1, whose orbits of sine networks are "permutation", "sign" or both.
    """
    generator = given_or_seed(generator)
    if count < 1 or not 0 <= noise < math.inf or reach < 1:
        raise ValueError(
            f"count={count}, noise={noise} and reach={reach} make no copies: count and reach must be at least 1 and "
            "noise not negative"
        )
    symmetry = symmetry.bind(params)
    element = symmetry.random(generator, parts, (count,))
    fields = {name for value in element.values() for name, _ in value.items()}
    there = {part for part, field in FIELD_OF_PART.items() if field in fields}
    there |= {part for part, found in ((TRANSLATION, element.translation), (ROTATION, element.rotation)) if found}
    lacking = [part for part in parts or () if part not in there]
    if lacking:
        raise ValueError(
            f"the symmetry of this network has no {', '.join(lacking)}, so it would change no copy; leave that part out"
        )
    if reach > 1 and (parts is None or "shift" in parts):
        element = _draw_shifts(element, reach, generator)
    originals = {name: _add_noise(tensor, count, noise, generator) for name, tensor in params.items()}
    moved = symmetry.act(element, originals)
    return Orbit(moved, element, None if parts is None else tuple(parts), noise, reach)


@check_arguments
def write_orbit(
    folder: str | Path,
    copies: Orbit,
    architecture: Architecture,
    symmetry: Symmetry,
    *,
    seed: int | None = None,
    about: Mapping[str, object] | None = None,
) -> Store:
    """Write the copies to a new store, with their settings but without the elements.

    Rows have the columns "id", "step" (zero), "noise", "reach" and "parts"; `store.about` contains the seed, if a seed
    is given.

    Args:
        folder: The folder of the new store; see `Store.create`.
        copies: The copies, which are written as one shard.
        seed: The seed from which the copies can be reproduced.
        about: Additional facts to store, as plain JSON.

    Raises:
        FileExistsError: The folder contains other files, or other copies.
        ValueError: The copies have another architecture.
    """
    parts = "all" if copies.parts is None else " ".join(copies.parts)
    settings = {"kind": "orbit", "count": len(copies), "parts": parts, "noise": copies.noise, "reach": copies.reach}
    settings["sha256"] = _digest(copies.params)
    if seed is not None:
        settings["seed"] = seed
    store = Store.create(folder, architecture, symmetry, about={**(about or {}), **settings})
    rows = [
        {"id": k, "step": 0, "noise": copies.noise, "reach": copies.reach, "parts": parts} for k in range(len(copies))
    ]
    with suppress(FileExistsError):  # already written
        store.append(copies.params, rows, name="orbit")
    return Store.open(folder)


@dataclass(frozen=True)
class Recovery:
    """The result of aligning copies to their original network.

    Attributes:
        params: The aligned copies, `[count, ...]`.
        errors: For each copy, the largest deviation of a parameter from its target, relative to the largest entry of
            its tensor, float64 `[count]`. The target is the original plus the noise of the copy. Therefore noisy copies
            also have errors of zero if they are recovered exactly.
        distances: The Euclidean distance of each aligned copy from the original, including the noise, float64
            `[count]`.
        curves: The loss on the linear path from the original to each aligned copy; empty without a task.
        seconds: The CPU time of aligning all copies.
    """

    params: Params
    errors: Tensor
    distances: Tensor
    curves: tuple[Curve, ...]
    seconds: float

    @property
    def is_recovered(self) -> Tensor:
        """Whether each copy equals its target up to rounding, bool `[count]`."""
        return self.errors <= RECOVERED

    @property
    def share(self) -> float:
        """The share of recovered copies."""
        return float(self.is_recovered.double().mean())

    @property
    def max_error(self) -> float:
        """The largest error over all copies."""
        return float(self.errors.max())

    def __str__(self) -> str:
        text = (
            f"{int(self.is_recovered.sum())} of {len(self.errors)} copies recovered, largest error {self.max_error:.2g}"
        )
        if self.curves:
            text += f", largest barrier {max(curve.barrier for curve in self.curves):.3g}"
        return text


@check_arguments
def recovery(
    params: Mapping[str, Tensor],
    copies: Orbit,
    symmetry: Symmetry,
    *,
    method: Method | None,
    within: Symmetry | None = None,
    task: Task | None = None,
    points: int = 25,
    generator: torch.Generator | None = None,
) -> Recovery:
    """Align every copy to the original, and compare the result with its target.

    With scales (ReLU) and noise, the errors are as large as the noise even if every unit is matched correctly. The
    reason is that the matching sets the scales of copies to the scales of the original.

    Args:
        symmetry: The symmetry from which the elements of the copies were sampled.
        method: The alignment method; None leaves the copies unaligned.
        within: The symmetry that the method may use. Default: the whole symmetry.
        task: Model, data and loss, for the curves and for methods that use a task.
        generator: The random generator, for random methods.

    Raises:
        ValueError: The copies do not fit the original or the symmetry, or there are fewer than three points.
    """
    if points < 3:
        raise ValueError(f"a line needs both ends and at least one point between them, but points={points}")
    began = time.process_time()
    moved = copies.params
    if method is not None:
        moved = align_pairs(
            params, copies.params, within or symmetry, method=method, task=task, generator=generator
        ).params
    seconds = time.process_time() - began
    expected = copies.undo(symmetry)
    errors = torch.zeros(len(copies), dtype=torch.float64)
    squares = torch.zeros(len(copies), dtype=torch.float64)
    for name, tensor in moved.items():
        found, right = tensor.double().flatten(1), expected[name].double().flatten(1)
        largest = right.abs().amax(1).clamp(min=torch.finfo(tensor.dtype).tiny)
        errors = torch.maximum(errors, (found - right).abs().amax(1) / largest)
        squares += (found - params[name].double().flatten()).square().sum(1)
    curves = () if task is None else lines(params, moved, task, points)
    return Recovery(moved, errors, squares.sqrt(), curves, seconds)


def lines(params: Mapping[str, Tensor], copies: Mapping[str, Tensor], task: Task, points: int) -> tuple[Curve, ...]:
    """Return the losses on the linear paths from one network to every network of a population."""
    count = len(next(iter(copies.values())))
    starts = {name: tensor.expand(count, *tensor.shape) for name, tensor in params.items()}
    ts = [k / (points - 1) for k in range(points)]
    losses = torch.stack([task.evaluate_each(interpolate(starts, copies, t))["loss"] for t in ts])
    return tuple(
        Curve(tuple({"t": t, "loss": float(loss)} for t, loss in zip(ts, losses[:, k], strict=True)))
        for k in range(count)
    )


def _digest(params: Params) -> str:
    """Return a hash of all entries."""
    digest = hashlib.sha256()
    for name, tensor in sorted(params.items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _draw_shifts(element: Element, reach: int, generator: torch.Generator) -> Element:
    for name, value in element.items():
        if value.shift is not None:
            steps = torch.randint(-reach, reach + 1, value.shift.shape, generator=generator)
            element = element.replace(name, replace(value, shift=steps))
    return element


def _add_noise(tensor: Tensor, count: int, noise: float, generator: torch.Generator) -> Tensor:
    """Return `count` copies of the tensor with independent noise."""
    copies = tensor.detach().expand(count, *tensor.shape)
    if not noise or not tensor.is_floating_point():
        return copies.clone()
    values = torch.randn(copies.shape, generator=generator, dtype=tensor.dtype)
    return copies + noise * tensor.detach().std(correction=0) * values.to(tensor.device)

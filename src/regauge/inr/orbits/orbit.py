"""Data sets of orbit copies: one network moved by many random elements of its symmetry, with noise if wanted."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from regauge.core.element import Element
from regauge.core.params import Params
from regauge.core.symmetry import Symmetry
from regauge.storage.architecture import Architecture
from regauge.storage.store import Store


@dataclass(frozen=True)
class Orbit:
    """Copies of a network.

    Attributes:
        params: The copies, a population `[count, ...]`.
        element: The elements that moved the copies, a batch: copy k is `act(element.item(k), original + noise)`.
        parts: Parts of the symmetry that the elements were drawn from; None for all.
        noise: Standard deviation of the noise, as a share of each tensor's own.
        reach: Largest shift, in half periods.
    """

    params: Params
    element: Element
    parts: tuple[str, ...] | None
    noise: float
    reach: int

    def __len__(self) -> int:
        return int(self.element.batch[0])

    def undo(self, symmetry: Symmetry) -> Params:
        """The copies moved back: the original with nothing but each copy's noise, up to rounding, `[count, ...]`."""
        return symmetry.act(symmetry.inverse(self.element), self.params)


def orbit(
    params: Mapping[str, Tensor],
    symmetry: Symmetry,
    count: int,
    *,
    generator: torch.Generator,
    parts: Sequence[str] | None = None,
    noise: float = 0.0,
    reach: int = 1,
) -> Orbit:
    """Move a network by random elements of its symmetry: without noise, every copy computes the same function.

    Permutations and signs are uniform, factors lie in [1/2, 2], and shifts are uniform among the whole numbers of half
    periods up to `reach`. Noise is normal and added before the network moves, so that it is relative to the original's
    tensors also where factors and shifts change how large the copy's are; for permutations and signs the distribution
    is that of noise which is added afterwards. A tensor that holds a single value gets none: it has no standard
    deviation.

    Args:
        params: One network, unchanged.
        symmetry: Symmetry of its architecture.
        count: Number of copies.
        generator: Random generator.
        parts: Some of "permutation", "sign", "scale", "shift" and "linear"; all unless given.
        noise: Standard deviation of the noise, as a share of each tensor's own.
        reach: Largest shift, in half periods of a sine.

    Raises:
        KeyError: A parameter that the symmetry moves is missing.
        ValueError: Count, noise or reach make no sense, a part is unknown, or the network does not fit the symmetry.

    References:
        Paper 002, section 5.1, whose orbits of sine networks are "permutation", "sign" or both.
    """
    if count < 1 or not 0 <= noise < math.inf or reach < 1:
        raise ValueError(
            f"count={count}, noise={noise} and reach={reach} make no copies: count and reach must be at least 1 and "
            "noise not negative"
        )
    symmetry = symmetry.bind(params)
    element = symmetry.random(generator, parts, (count,))
    if reach > 1 and (parts is None or "shift" in parts):
        element = _draw_shifts(element, reach, generator)
    originals = {name: _add_noise(tensor, count, noise, generator) for name, tensor in params.items()}
    moved = symmetry.act(element, originals)
    return Orbit(moved, element, None if parts is None else tuple(parts), noise, reach)


def write_orbit(
    folder: str | Path,
    copies: Orbit,
    architecture: Architecture,
    symmetry: Symmetry,
    *,
    seed: int | None = None,
    about: Mapping[str, object] | None = None,
) -> Store:
    """A store of the copies, with how they were made; the elements that moved them are not written.

    Rows have the columns "id", "step" (zero), "noise", "reach" and "parts"; `store.about` has the seed if it is given.

    Args:
        folder: Folder of the new store, see `Store.create`.
        copies: The copies, written as one shard.
        architecture: Architecture of the network.
        symmetry: Symmetry of the architecture.
        seed: Seed from which the copies can be made again.
        about: Anything else to remember, as plain JSON.

    Raises:
        FileExistsError: The folder holds something else, or other copies.
        ValueError: The copies are not of this architecture.
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
    with suppress(FileExistsError):  # they are there
        store.append(copies.params, rows, name="orbit")
    return Store.open(folder)


def _digest(params: Params) -> str:
    """Digest of all values."""
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
    """Return `count` independently noised copies of the tensor."""
    copies = tensor.detach().expand(count, *tensor.shape)
    if not noise or not tensor.is_floating_point():
        return copies.clone()
    values = torch.randn(copies.shape, generator=generator, dtype=tensor.dtype)
    return copies + noise * tensor.detach().std(correction=0) * values.to(tensor.device)

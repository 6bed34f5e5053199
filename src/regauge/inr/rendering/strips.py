"""Strips of networks, such as networks on a path: renderings, losses, and histograms of labels."""

import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any
from zipfile import is_zipfile

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regauge.checkpoints.array_files import read_npz
from regauge.checkpoints.described import DAMAGE, damage
from regauge.checkpoints.writing import require_writable, save_bytes
from regauge.connect.paths import Path, Straight
from regauge.core.arguments import check_arguments
from regauge.core.given import given_or_seed
from regauge.core.params import Params, require_same_shapes
from regauge.core.symmetry_text import read_versioned
from regauge.inr.rendering.field_values import evaluate as values_at
from regauge.inr.rendering.field_values import render_image
from regauge.inr.rendering.mesh import Mesh, NoSurfaceError, extract_mesh
from regauge.inr.rendering.points import PointCloud, Projection, extract_points
from regauge.inr.representation import Inr, Signal

FORMAT, VERSION = "regauge.strips", 2
BINS = 40
"""The number of bins in a histogram of labels, which split [0, 1] equally."""

Picture = Tensor | Mesh | PointCloud | None
"""An image `[height, width, channels]`, the surface of a shape, or None if there is no surface."""


@dataclass(frozen=True)
class Detail:
    """The resolution of rendered shapes."""

    projection: Projection = field(default_factory=lambda: Projection(count=8192))  # for unsigned distances
    resolution: int = 64  # of meshes


@dataclass(frozen=True, eq=False)
class Strip:
    """A row of networks with names, losses, renderings, and histograms of labels.

    Labels are the sigmoids of outputs. `counts` contains the numbers of labels in equal bins of [0, 1], `[networks,
    bins]`. `counts` is None for images, or if no points were passed.
    """

    label: str  # what the networks of this row have in common, such as the alignment of their path
    signal: Signal
    names: tuple[str, ...]  # of the networks, such as their places on the path
    losses: tuple[float, ...]
    pictures: tuple[Picture, ...]
    counts: NDArray[np.int64] | None


@check_arguments
def render_strip(
    inr: Inr,
    params_a: Mapping[str, Tensor],
    params_b: Mapping[str, Tensor],
    evaluate: Callable[[Params], Mapping[str, float]],
    *,
    label: str,
    points: int = 7,
    path: Path | None = None,
    queries: Tensor | None = None,
    detail: Detail | None = None,
    generator: torch.Generator | None = None,
) -> Strip:
    """Render networks on a path from the first to the second network. Align the networks before you call
    `render_strip`.

    Args:
        inr: The architecture of both networks.
        params_a: The network at t = 0, with the name A.
        params_b: The network at t = 1, with the name B.
        evaluate: A function from parameters to metrics that include "loss"; see `line`.
        label: The name of the strip.
        points: The number of equally spaced values of t, including both endpoints.
        path: The path. Default: the linear path.
        queries: Points at which labels are counted, `[points, in]`; not for images.
        detail: The resolution of shapes.
        generator: The random generator for points, from which one seed is sampled for any number of networks. Default:
            a generator with seed 0.

    Raises:
        ImportError: scikit-image is not installed, but meshes are needed.
        ValueError: The networks have different parameters, there are fewer than two points, or `evaluate` returns
            no loss.

    References:
        De Luigi et al. (2023), figures 3.9 to 3.11.
    """
    generator = given_or_seed(generator)
    if points < 2:
        raise ValueError(f"a strip needs both ends, but points={points}; give two at least")
    require_same_shapes(params_a, params_b)
    path = path or Straight()
    ts = [k / (points - 1) for k in range(points)]
    networks = {_name(t): path.at(params_a, params_b, t) for t in ts}
    return render_networks(inr, networks, evaluate, label=label, queries=queries, detail=detail, generator=generator)


@check_arguments
def render_networks(
    inr: Inr,
    networks: Mapping[str, Mapping[str, Tensor]],
    evaluate: Callable[[Params], Mapping[str, float]],
    *,
    label: str,
    queries: Tensor | None = None,
    detail: Detail | None = None,
    generator: torch.Generator | None = None,
) -> Strip:
    """Render several networks as a strip.

    Every network is rendered with the same random points. Therefore equal networks look the same.

    Args:
        inr: The architecture of all networks.
        networks: The networks, by the names that are displayed above them.
        evaluate: A function from parameters to metrics that include "loss"; see `line`.
        label: The name of the strip.
        queries: Points at which labels are counted, `[points, in]`; not for images.
        detail: The resolution of shapes.
        generator: The random generator for points, from which one seed is sampled for any number of networks. Default:
            a generator with seed 0.

    Raises:
        ImportError: scikit-image is not installed, but meshes are needed.
        ValueError: `evaluate` returns no loss, or parameters do not fit the architecture.

    References:
        De Luigi et al. (2023), figure 3.12.
    """
    generator = given_or_seed(generator)
    seed = int(torch.randint(2**62, (1,), generator=generator, device=generator.device))
    losses: list[float] = []
    pictures: list[Picture] = []
    counts: list[NDArray[np.int64]] = []
    for params in map(dict, networks.values()):
        metrics = evaluate(params)
        if "loss" not in metrics:
            raise ValueError(f"evaluate returned {sorted(metrics)}, but a strip shows the metric 'loss'")
        losses.append(float(metrics["loss"]))
        chance = torch.Generator(generator.device).manual_seed(seed)
        pictures.append(_picture(inr, params, detail or Detail(), chance))
        if queries is not None and inr.signal != "image":
            labels = values_at(inr, params, queries).double().sigmoid()
            counts.append(torch.histc(labels[labels.isfinite()], BINS, 0, 1).long().cpu().numpy())
    heights = np.stack(counts) if counts else None
    return Strip(label, inr.signal, tuple(networks), tuple(losses), tuple(pictures), heights)


def save_strips(strips: Sequence[Strip], path: str | FilePath, *, overwrite: bool = False) -> FilePath:
    """Write strips to one `.npz` file, atomically.

    The file contains the arrays `STRIP/counts` and `STRIP/PICTURE/NAME`, and `about`, a JSON text with all other data.

    Raises:
        FileExistsError: The file exists and `overwrite` is false.
        FileNotFoundError: The folder of `path` does not exist.
        ValueError: The name does not end in `.npz`.
    """
    path = FilePath(path)
    require_writable(path, overwrite=overwrite, suffixes=(".npz",))
    arrays: dict[str, NDArray[np.generic]] = {}
    about = []
    for s, strip in enumerate(strips):
        if strip.counts is not None:
            arrays[f"{s}/counts"] = strip.counts
        for k, picture in enumerate(strip.pictures):
            parts = {"image": picture} if isinstance(picture, Tensor) else vars(picture) if picture is not None else {}
            tensors = {name: value for name, value in parts.items() if isinstance(value, Tensor)}
            arrays |= {f"{s}/{k}/{name}": tensor.cpu().numpy() for name, tensor in tensors.items()}
        losses = [loss if math.isfinite(loss) else None for loss in strip.losses]
        found = [[one.wanted, one.draws] if isinstance(one, PointCloud) else None for one in strip.pictures]
        about.append(
            {"label": strip.label, "signal": strip.signal, "names": strip.names, "loss": losses, "points": found}
        )
    text = json.dumps({"format": FORMAT, "version": VERSION, "strips": about})
    buffer = io.BytesIO()
    np.savez_compressed(buffer, about=np.array(text), **arrays)  # type: ignore[arg-type]
    return save_bytes(buffer.getvalue(), path)


def load_strips(path: str | FilePath) -> tuple[Strip, ...]:
    """Read the strips that `save_strips` wrote. A loss that was not finite is NaN.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file does not contain strips, or has another version.
    """
    path = FilePath(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {str(path)!r}; check the path")
    if not is_zipfile(path):
        raise ValueError(f"{str(path)!r} is damaged or holds no strips; write it again")
    arrays = read_npz(path)
    if "about" not in arrays:
        raise ValueError(
            f"{str(path)!r} holds the arrays {sorted(arrays)[:5]}, but no strips; give a file that `Strips.save` wrote"
        )
    try:
        document = read_versioned(str(arrays["about"]), FORMAT, VERSION)
        return tuple(_strip(str(s), own, arrays) for s, own in enumerate(document["strips"]))
    except DAMAGE as error:
        raise damage("file of strips", path, error, "write it again") from error


def _name(t: float) -> str:
    """Return the name of a position on the path."""
    return {0.0: "A", 1.0: "B"}.get(t, f"{t:.2f}".lstrip("0"))


def _strip(key: str, own: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> Strip:
    pictures: list[Picture] = []
    for k, numbers in enumerate(own["points"]):
        begin = f"{key}/{k}/"
        parts = {n.removeprefix(begin): torch.from_numpy(a) for n, a in arrays.items() if n.startswith(begin)}
        if numbers is not None:
            pictures.append(PointCloud(parts["points"], *numbers))
        else:
            pictures.append(Mesh(**parts) if "faces" in parts else parts.get("image"))
    losses = tuple(math.nan if loss is None else loss for loss in own["loss"])
    return Strip(own["label"], own["signal"], tuple(own["names"]), losses, tuple(pictures), arrays.get(f"{key}/counts"))


def _picture(inr: Inr, params: Mapping[str, Tensor], detail: Detail, generator: torch.Generator) -> Picture:
    if inr.signal == "image":
        assert inr.pixels is not None
        return render_image(inr, params, *inr.pixels)
    if inr.signal == "unsigned":
        return extract_points(inr, params, detail.projection, generator=generator)
    try:
        return extract_mesh(inr, params, resolution=detail.resolution)
    except NoSurfaceError:
        return None

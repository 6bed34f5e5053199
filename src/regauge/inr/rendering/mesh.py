"""Meshes from signed distances and occupancies: marching cubes."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from regauge.inr.fields.labels import labels_of
from regauge.inr.rendering.field_values import evaluate, module_of, require_one
from regauge.inr.representation import Inr


@dataclass(frozen=True)
class Mesh:
    """Triangles of a surface.

    Attributes:
        vertices: float32, `[vertices, 3]`.
        faces: Numbers of their vertices, int64, `[faces, 3]`; counterclockwise seen from outside.
    """

    vertices: Tensor
    faces: Tensor


class NoSurfaceError(ValueError):
    """A field has one sign everywhere."""


def extract_mesh(inr: Inr, params: Mapping[str, Tensor], *, resolution: int = 128) -> Mesh:
    """The surface in [-1, 1]^3 where a signed distance is zero, or an occupancy one half.

    The field is evaluated at `resolution^3` points, and taken as linear between neighbors. A surface that leaves the
    cube ends open there.

    Args:
        inr: An INR with signal "signed" or "occupancy".
        params: Parameters of one network.
        resolution: Points along each axis.

    Raises:
        ImportError: scikit-image is not installed.
        NoSurfaceError: The field has one sign everywhere.
        ValueError: The signal is another, the resolution is below 2, a value is NaN, or the parameters are not
            those of one such network.

    References:
        Lewiner et al. (2003), Efficient implementation of marching cubes' cases with topological guarantees.
    """
    if inr.signal not in ("signed", "occupancy"):
        raise ValueError(
            f"an INR of {inr.signal!r} has no inside and no outside, which marching cubes need; "
            + ("draw it as an image" if inr.signal == "image" else "extract points from unsigned distances")
        )
    if resolution < 2:
        raise ValueError(f"a grid of {resolution} points along each axis has no cell; take at least 2")
    try:
        measure: Any = import_module("skimage.measure")
    except ImportError as error:
        raise ImportError("marching cubes need scikit-image: pip install 'regauge[shapes]'") from error
    require_one(module_of(inr), params)
    field = _field(inr, params, resolution)
    low, high = field.min().item(), field.max().item()
    if low != low:
        raise ValueError("the network's output is NaN at points of the grid; check its training")
    if not low < 0 < high:
        side = "outside" if low >= 0 else "inside"
        raise NoSurfaceError(
            f"there is no surface: by this network all {resolution}^3 points of [-1, 1]^3 lie {side}; it may be "
            "broken, or the shape is smaller than a cell of the grid"
        )
    vertices, faces, _, _ = measure.marching_cubes(field.numpy(), 0.0, gradient_direction="descent")
    scaled = torch.from_numpy(vertices.copy()) * (2 / (resolution - 1)) - 1
    return Mesh(scaled, torch.from_numpy(faces.astype("int64")))


def _field(inr: Inr, params: Mapping[str, Tensor], resolution: int) -> Tensor:
    """Negative inside: the distance, or one half less the occupancy; float32, `[resolution] * 3`."""
    ticks = torch.linspace(-1, 1, resolution, dtype=torch.float64)
    plane = torch.cartesian_prod(ticks, ticks)
    slabs = []
    for x in ticks:
        points = torch.cat([x.expand(len(plane), 1), plane], 1)
        logits = evaluate(inr, params, points).squeeze(-1)
        values = labels_of(inr).from_logits(logits) if inr.is_distance else 0.5 - logits.sigmoid()
        slabs.append(values.float().cpu().reshape(resolution, resolution))
    return torch.stack(slabs)

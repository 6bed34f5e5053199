"""Signals by name: shapes and grids of the data sets, and files with meshes, point clouds and images."""

import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from regauge.checkpoints.array_files import read_arrays
from regauge.data.shapes import SHAPES_SHA256, shape, voxels
from regauge.inr.fields.fields import CloudField, Field, MeshField, sample_surface
from regauge.inr.fields.signal_samples import Queries, Samples, field_samples, image_samples, voxel_samples
from regauge.inr.rendering.mesh import (
    MESH_FORMATS,
    POINT_FORMATS,
    UNREADABLE,
    Mesh,
    load_mesh,
    load_points,
    require_mesh,
)
from regauge.inr.representation import Inr

IMAGE_FORMATS = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp")
MESH_POINTS = 2048
"""The number of points that are sampled from a mesh if distances are measured to points; from paper 003."""
SURFACE = 100_000
"""The number of mesh points around which queries are sampled if distances are measured to the mesh."""


@dataclass(frozen=True)
class ImageSignal:
    """An image `[channels, height, width]` in [0, 1]."""

    values: Tensor


@dataclass(frozen=True)
class GridSignal:
    """The occupied cells of a grid in the cube [-1, 1]^3, booleans `[x, y, z]`."""

    cells: Tensor


@dataclass(frozen=True)
class ShapeSignal:
    """A point cloud, or a mesh, in the unit ball.

    Distances are measured to points (sampled from the surface of a mesh), or to the mesh. If `to` is not given,
    unsigned distances are measured to points, and signed distances to the mesh.
    """

    vertices: Tensor  # or points, `[n, 3]`
    faces: Tensor | None  # numbers of vertices, `[faces, 3]`; None for points
    to: Literal["points", "mesh"] | None = None

    def field(self, inr: Inr, *, generator: torch.Generator) -> Field:
        """Return the field of distances that a network learns.

        Raises:
            ValueError: Distances to a mesh, or signed distances, are requested, but the signal has only points.
        """
        is_to_mesh = self.to == "mesh" or (self.to is None and inr.signal != "unsigned")
        if self.faces is None:
            if self.to == "mesh":
                raise ValueError("the file has only points, without faces; leave out :mesh, or give a mesh")
            return CloudField(self.vertices)
        count = SURFACE if is_to_mesh else MESH_POINTS
        surface = sample_surface(self.vertices, self.faces, count, generator=generator)
        return MeshField(self.vertices, self.faces, surface) if is_to_mesh else CloudField(surface)


Signal = ImageSignal | GridSignal | ShapeSignal


def is_signal(text: str) -> bool:
    """Return whether a string has the form of a signal's name. The file need not exist."""
    name, tail = _split_tail(text)
    known = name in SHAPES_SHA256 or name.lower().endswith((*IMAGE_FORMATS, *MESH_FORMATS, *POINT_FORMATS))
    return known or (name in ("chair", "monitor") and tail.isdecimal())


def read_signal(text: str) -> Signal:
    """Read the signal with a given name.

    `spot` is one of the shapes in `regauge.data.shapes`, and `chair:7` is a grid of ModelNet10. Any other name is a
    file. The file may contain an image, a mesh (`.ply`, `.obj`, `.stl`, or `.npz` with `vertices` and `faces`), or
    points (`.ply`, `.xyz`, or `.npz` with `points`). Shapes in files are translated and scaled into the unit ball, with
    the centroid at the origin. A word after a colon selects distances to points (`spot:points`) or to the mesh
    (`spot:mesh`).

    Raises:
        FileNotFoundError: The file does not exist.
        ImportError: trimesh is not installed, which is needed for a file with a mesh or points.
        ValueError: The string does not name a signal, or the file is damaged.
    """
    name, tail = _split_tail(text)
    if name in ("chair", "monitor") and tail.isdecimal():
        grids = voxels("chair" if name == "chair" else "monitor")
        if int(tail) >= len(grids):
            raise ValueError(f"there are {len(grids)} grids of a {name}, from {name}:0; there is no {text}")
        return GridSignal(grids[int(tail)])
    if not is_signal(text):
        raise ValueError(
            f"{text!r} is not a signal: give a shape ({', '.join(sorted(SHAPES_SHA256))}), a grid (chair:0, "
            "monitor:0), or a file of an image, a mesh or points"
        )
    if name.lower().endswith(IMAGE_FORMATS):
        return ImageSignal(read_image(name))
    if name in SHAPES_SHA256:
        known = shape(name)
        found = ShapeSignal(known.vertices, known.faces)
    else:
        found = _fit_unit_ball(_read_shape(Path(name)), name)
    return replace(found, to="mesh") if tail == "mesh" else replace(found, to="points") if tail == "points" else found


def read_image(path: str | Path) -> Tensor:
    """Return an image file as `[channels, height, width]` in [0, 1], with one channel (gray) or three (RGB).

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file is not an image.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {str(path)!r}; check the path")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path) as image:
                is_gray = image.mode in ("1", "L", "LA")
                pixels = np.array(image.convert("L" if is_gray else "RGB"))
    except (*UNREADABLE, SyntaxError, Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ValueError(f"{str(path)!r} is damaged or not an image ({error}); save it again as PNG") from error
    values = torch.from_numpy(pixels).float() / 255
    return values.unsqueeze(0) if is_gray else values.permute(2, 0, 1).contiguous()


def signal_samples(signal: Signal, inr: Inr, queries: Queries, *, generator: torch.Generator) -> Samples:
    """Return samples of any signal: all pixels, all cells, or queries of a shape's field.

    Raises:
        ValueError: The network does not represent a signal of the given class.
    """
    match signal, inr.signal:
        case ImageSignal(), "image":
            return image_samples(signal.values)
        case GridSignal(), "occupancy":
            return voxel_samples(signal.cells)
        case ShapeSignal(), "unsigned" | "signed" | "occupancy":
            return field_samples(signal.field(inr, generator=generator), inr, queries, generator=generator)
    kind = {ImageSignal: "an image", GridSignal: "a grid of cells", ShapeSignal: "a shape"}[type(signal)]
    raise ValueError(f"a network of signal {inr.signal!r} cannot represent {kind}")


def _split_tail(text: str) -> tuple[str, str]:
    """Split a name at its colon if the word after the colon is known. Return the name and the word."""
    name, colon, tail = text.rpartition(":")
    return (name, tail) if colon and (tail in ("points", "mesh") or tail.isdecimal()) else (text, "")


def _read_shape(path: Path) -> ShapeSignal:
    if path.suffix == ".npz" and path.is_file():
        arrays = read_arrays(path)
        if {"vertices", "faces"} <= arrays.keys():
            found = require_mesh(Mesh(arrays["vertices"].float(), arrays["faces"].long()), path)
            return ShapeSignal(found.vertices, found.faces)
    if path.suffix in MESH_FORMATS:
        try:
            mesh = load_mesh(path)
        except ValueError:
            if path.suffix not in POINT_FORMATS:
                raise
        else:
            return ShapeSignal(mesh.vertices, mesh.faces)
    return ShapeSignal(load_points(path).float(), None)


def _fit_unit_ball(found: ShapeSignal, name: str) -> ShapeSignal:
    vertices = found.vertices.double()
    if not bool(vertices.isfinite().all()):
        raise ValueError(f"the shape in {name!r} has coordinates that are NaN or Inf; repair the file")
    if found.faces is None:
        center = vertices.mean(0)
    else:
        a, b, c = (vertices[found.faces[:, k]] for k in range(3))
        areas = torch.linalg.cross(b - a, c - a).norm(dim=1, keepdim=True)
        center = ((a + b + c) / 3 * areas).sum(0) / areas.sum()
    radius = (vertices - center).norm(dim=1).max()
    if not radius > 0 or not bool(center.isfinite().all()):
        raise ValueError(
            f"the shape in {name!r} has no extent: all its points are equal, or its faces have no area; give "
            "another file"
        )
    return replace(found, vertices=((vertices - center) / radius).float())

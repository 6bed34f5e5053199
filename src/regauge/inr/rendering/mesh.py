"""Meshes extracted from signed distances and occupancies by marching cubes; files of meshes and point clouds."""

import io
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regauge.checkpoints.array_files import read_arrays
from regauge.checkpoints.described import DAMAGE
from regauge.checkpoints.writing import require_writable, save_bytes
from regauge.inr.fields.signal_samples import labels_of
from regauge.inr.rendering.field_values import evaluate, module_of, require_one
from regauge.inr.representation import Inr

MESH_FORMATS = (".ply", ".obj", ".stl")
"""PLY stores float32 exactly, and OBJ stores eight decimals. STL stores no vertex indices, so reading merges equal
vertices."""
POINT_FORMATS = (".ply", ".xyz", ".npz")
"""PLY stores float32 exactly, XYZ stores eight decimals, and NPZ stores any dtype exactly, under the name `points`."""

UNREADABLE = (*DAMAGE, OSError, EOFError, MemoryError, struct.error)
"""Errors that readers of meshes raise for damaged files."""


@dataclass(frozen=True)
class Mesh:
    """A surface that consists of triangles.

    Attributes:
        vertices: float32, `[vertices, 3]`.
        faces: The vertex indices of each triangle, int64, `[faces, 3]`; counterclockwise seen from outside.
    """

    vertices: Tensor
    faces: Tensor


class NoSurfaceError(ValueError):
    """An error for a field that has the same sign everywhere."""


def extract_mesh(inr: Inr, params: Mapping[str, Tensor], *, resolution: int = 128) -> Mesh:
    """Return the surface in [-1, 1]^3 on which a signed distance is zero or an occupancy is one half.

    The field is evaluated at `resolution^3` points and interpolated linearly between neighbors. If a surface leaves the
    cube, the mesh is open at the boundary of the cube.

    Args:
        inr: An INR whose signal is "signed" or "occupancy".

    Raises:
        ImportError: scikit-image is not installed.
        NoSurfaceError: The field has the same sign everywhere.
        ValueError: The INR has another signal, the resolution is below 2, or an output is NaN. The error is also raised
            if the parameters are not the parameters of a single INR.

    References:
        Lewiner et al. (2003), Efficient implementation of marching cubes' cases with topological guarantees.
    """
    if inr.signal not in ("signed", "occupancy"):
        raise ValueError(
            f"an INR of {inr.signal!r} has no inside and no outside, which marching cubes need; "
            + ("draw it as an image" if inr.signal == "image" else "extract points from unsigned distances")
        )
    if resolution < 2:
        raise ValueError(f"a grid of {resolution} points along each axis has no cell; give at least 2")
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


def save_mesh(mesh: Mesh, path: str | Path, *, overwrite: bool = False) -> Path:
    """Write a mesh in the format of `MESH_FORMATS` that the suffix selects, atomically.

    Raises:
        FileExistsError: The file exists and `overwrite` is false.
        FileNotFoundError: The folder of `path` does not exist.
        ImportError: trimesh is not installed.
        ValueError: The suffix is unknown, or the mesh has no faces.
    """
    path = Path(path)
    require_writable(path, overwrite=overwrite, suffixes=MESH_FORMATS)
    if not len(mesh.faces):
        raise ValueError(f"the mesh has no faces, so {str(path)!r} is not written; extract it at a finer resolution")
    return _export(_trimesh().Trimesh(mesh.vertices.cpu().numpy(), mesh.faces.cpu().numpy(), process=False), path)


def load_mesh(path: str | Path) -> Mesh:
    """Read a mesh in one of the `MESH_FORMATS`.

    Raises:
        FileNotFoundError: The file does not exist.
        ImportError: trimesh is not installed.
        ValueError: The suffix is unknown, or the file does not contain a mesh.
    """
    path = _existing(path, MESH_FORMATS)
    trimesh = _trimesh()
    try:
        mesh = trimesh.load_mesh(io.BytesIO(path.read_bytes()), file_type=path.suffix[1:], process=False)
    except UNREADABLE as error:
        raise ValueError(f"{str(path)!r} is damaged or not a mesh ({error}); write it again") from error
    if not isinstance(mesh, trimesh.Trimesh) or not len(mesh.faces):
        raise ValueError(f"{str(path)!r} is damaged or contains no mesh; give a file with faces, not a point cloud")
    if path.suffix == ".stl":
        with np.errstate(invalid="ignore"):  # callers check that vertices are finite
            mesh.merge_vertices()
    vertices = torch.from_numpy(np.array(mesh.vertices, np.float32))
    return require_mesh(Mesh(vertices, torch.from_numpy(np.array(mesh.faces, np.int64))), path)


def require_mesh(mesh: Mesh, path: Path) -> Mesh:
    """Return a mesh; raise a ValueError unless its vertices are points in space and its faces are valid indices."""
    vertices, faces = mesh.vertices, mesh.faces
    is_mesh = vertices.ndim == faces.ndim == 2 and vertices.shape[1] == faces.shape[1] == 3 and len(faces)
    if not is_mesh or not 0 <= int(faces.min()) <= int(faces.max()) < len(vertices):
        raise ValueError(
            f"{str(path)!r} has vertices of shape {list(vertices.shape)} and faces of shape {list(faces.shape)}, which "
            "form no mesh; write it again"
        )
    return mesh


def save_points(points: Tensor, path: str | Path, *, overwrite: bool = False) -> Path:
    """Write a point cloud `[points, 3]` in the format of `POINT_FORMATS` that the suffix selects.

    The file appears at its path only when it is complete.

    Raises:
        FileExistsError: The file exists and `overwrite` is false.
        FileNotFoundError: The folder of `path` does not exist.
        ImportError: trimesh is not installed and the suffix is not `.npz`.
        ValueError: The suffix is unknown, or there are no points.
    """
    path = Path(path)
    require_writable(path, overwrite=overwrite, suffixes=POINT_FORMATS)
    if points.ndim != 2 or points.shape[1] != 3 or not len(points):
        raise ValueError(
            f"a point cloud is [points, 3] with at least one point, not {list(points.shape)}; {str(path)!r} is not "
            "written"
        )
    array = points.detach().cpu().numpy()
    if path.suffix == ".npz":
        buffer = io.BytesIO()
        np.savez(buffer, points=array)
        return save_bytes(buffer.getvalue(), path)
    return _export(_trimesh().PointCloud(array), path)


def load_points(path: str | Path) -> Tensor:
    """Read a point cloud in one of the `POINT_FORMATS`, or the vertices of a mesh in `.ply`.

    Raises:
        FileNotFoundError: The file does not exist.
        ImportError: trimesh is not installed and the suffix is not `.npz`.
        ValueError: The suffix is unknown, or the file does not contain points.
    """
    path = _existing(path, POINT_FORMATS)
    try:
        if path.suffix == ".npz":
            points = read_arrays(path)["points"]
        else:
            loaded = _trimesh().load(io.BytesIO(path.read_bytes()), file_type=path.suffix[1:], process=False)
            points = torch.from_numpy(np.array(loaded.vertices, np.float32))
    except UNREADABLE as error:
        raise ValueError(f"{str(path)!r} is damaged or not a point cloud ({error}); write it again") from error
    if points.ndim != 2 or points.shape[1] != 3 or not len(points):
        raise ValueError(f"{str(path)!r} holds an array {list(points.shape)}, not points [points, 3]; write it again")
    return points


def _field(inr: Inr, params: Mapping[str, Tensor], resolution: int) -> Tensor:
    """Return the distance, or one half minus the occupancy (negative inside), as float32 `[resolution] * 3`."""
    ticks = torch.linspace(-1, 1, resolution, dtype=torch.float64)
    plane = torch.cartesian_prod(ticks, ticks)
    slabs = []
    for x in ticks:
        points = torch.cat([x.expand(len(plane), 1), plane], 1)
        logits = evaluate(inr, params, points).squeeze(-1)
        values = labels_of(inr).from_logits(logits) if inr.is_distance else 0.5 - logits.sigmoid()
        slabs.append(values.float().cpu().reshape(resolution, resolution))
    return torch.stack(slabs)


def _trimesh() -> Any:
    try:
        return import_module("trimesh")
    except ImportError as error:
        raise ImportError("files of meshes and points need trimesh: pip install 'regauge[shapes]'") from error


def _existing(path: str | Path, suffixes: tuple[str, ...]) -> Path:
    path = Path(path)
    if path.suffix not in suffixes:
        raise ValueError(f"{str(path)!r} must end in {', '.join(suffixes)}")
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {str(path)!r}; check the path")
    return path


def _export(shape: Any, path: Path) -> Path:
    content = shape.export(file_type=path.suffix[1:])
    return save_bytes(content if isinstance(content, bytes) else content.encode(), path)

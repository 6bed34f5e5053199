"""Fields of shapes: exact distances to a point cloud or to a mesh.

The distance to sampled points of a surface is larger than the distance to the surface itself, except at the sampled
points. A network learns the distance of the field from which its samples come.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import Any

import numpy as np
import torch
from scipy.spatial import cKDTree
from torch import Tensor


class Field(ABC):
    """A shape with functions for the unsigned and the signed distance of points."""

    surface: Tensor
    """Points on the surface, around which query points are sampled, `[points, 3]`."""

    @abstractmethod
    def distances(self, queries: Tensor) -> Tensor:
        """Return the exact distance of every query `[n, 3]` to the shape, `[n]`, in the dtype of the queries."""

    def signed_distances(self, queries: Tensor) -> Tensor:
        """Return signed distances, which are negative inside; see `distances`.

        Raises:
            ValueError: The shape has no interior.
        """
        raise ValueError("points have no inside; fit their unsigned distance, or give a mesh")


@dataclass(frozen=True)
class CloudField(Field):
    """The distance to the nearest point of a point cloud, found with a k-d tree.

    Attributes:
        surface: The points, `[points, 3]`.

    Raises:
        ValueError: The point cloud is empty, or a point is not finite.
    """

    surface: Tensor

    def __post_init__(self) -> None:
        _require_points(self.surface, "a point cloud")

    def distances(self, queries: Tensor) -> Tensor:
        """Return distances to the nearest point."""
        distances, _ = self._tree.query(_exact(queries))
        return torch.from_numpy(distances).to(queries)

    @cached_property
    def _tree(self) -> cKDTree:
        return cKDTree(_exact(self.surface))


@dataclass(frozen=True)
class MeshField(Field):
    """The distance to the triangles of a mesh, from libigl.

    If the mesh is closed, the sign is exact and is computed from the pseudonormal of the nearest feature. If the mesh
    has holes, the generalized winding number determines the interior. If all triangles of a mesh are oriented inwards,
    the orientation is corrected.

    Attributes:
        vertices: `[vertices, 3]`.
        faces: Indices of the vertices of each triangle, `[faces, 3]`.
        surface: Points on the surface, around which query points are sampled, `[points, 3]`.

    Raises:
        ValueError: The mesh has no triangle, a vertex index is out of range, or a coordinate is not finite.

    References:
        Baerentzen and Aanaes (2005); Jacobson et al. (2013); Barill et al. (2018).
    """

    vertices: Tensor
    faces: Tensor
    surface: Tensor

    def __post_init__(self) -> None:
        _require_points(self.vertices, "a mesh")
        _require_points(self.surface, "the surface of a mesh")
        if self.faces.ndim != 2 or self.faces.shape[1] != 3 or not len(self.faces):
            raise ValueError(f"a mesh has faces [faces, 3], at least one, not {list(self.faces.shape)}")
        if self.faces.min() < 0 or self.faces.max() >= len(self.vertices):
            raise ValueError(f"a face names vertex {int(self.faces.max())}, but there are {len(self.vertices)}")

    @cached_property
    def is_closed(self) -> bool:
        """Whether every edge has one triangle on each side, with consistent orientations."""
        faces = self.faces.numpy()
        edges = np.concatenate([faces[:, [0, 1]], faces[:, [1, 2]], faces[:, [2, 0]]]).astype(np.int64)
        there = np.sort(edges[:, 0] * len(self.vertices) + edges[:, 1])
        back = np.sort(edges[:, 1] * len(self.vertices) + edges[:, 0])
        return bool((np.diff(there) > 0).all() and np.array_equal(there, back))

    def distances(self, queries: Tensor) -> Tensor:
        """Return distances to the nearest point of any triangle."""
        squares, *_ = _igl().point_mesh_squared_distance(_exact(queries), *self._arrays)
        return torch.from_numpy(np.sqrt(squares)).to(queries)

    def signed_distances(self, queries: Tensor) -> Tensor:
        """Return signed distances, which are negative inside. The mesh need not be closed."""
        igl, points = _igl(), _exact(queries)
        if self.is_closed:
            kind = igl.SIGNED_DISTANCE_TYPE_PSEUDONORMAL
            distances, *_ = igl.signed_distance(points, *self._arrays, sign_type=kind)
            return torch.from_numpy(np.asarray(distances)).to(queries)
        # The library's signed distance by winding numbers w is multiplied by 1 - 2 w, which is 1 or -1 only if closed.
        is_inside = torch.from_numpy(igl.fast_winding_number(*self._arrays, points) > 0.5)
        found = self.distances(queries)
        return torch.where(is_inside, -found, found)

    @cached_property
    def _arrays(self) -> "tuple[np.ndarray[Any, np.dtype[np.float64]], np.ndarray[Any, np.dtype[np.int64]]]":
        """Return vertices and faces, oriented such that the volume is positive."""
        vertices, faces = _exact(self.vertices), self.faces.numpy().astype(np.int64)
        a, b, c = (vertices[faces[:, k]] for k in range(3))
        volume = (a * np.cross(b, c)).sum()
        return vertices, np.ascontiguousarray(faces if volume >= 0 else faces[:, ::-1])


def sample_surface(vertices: Tensor, faces: Tensor, count: int, *, generator: torch.Generator) -> Tensor:
    """Sample points on a mesh, uniformly by area, `[count, 3]`, in the dtype of the vertices."""
    a, b, c = (vertices[faces[:, k]].double() for k in range(3))
    areas = torch.linalg.cross(b - a, c - a).norm(dim=1)
    # Sample by the inverse distribution function: torch.multinomial accepts at most 2^24 triangles, and is inexact for
    # float32 weights.
    bounds = areas.cumsum(0)
    places = torch.rand(count, generator=generator, dtype=torch.float64) * bounds[-1]
    chosen = torch.searchsorted(bounds, places, right=True).clamp_(max=len(faces) - 1)
    first, second = torch.rand(2, count, 1, generator=generator, dtype=torch.float64)
    root = first.sqrt()
    points: Tensor = (1 - root) * a[chosen] + root * (1 - second) * b[chosen] + root * second * c[chosen]
    return points.to(vertices.dtype)


def _igl() -> Any:
    try:
        return import_module("igl")
    except ImportError as error:
        raise ImportError("distances to meshes need libigl: pip install 'regauge[shapes]'") from error


def _exact(points: Tensor) -> "np.ndarray[Any, np.dtype[np.float64]]":
    return np.ascontiguousarray(points.detach().cpu().double().numpy())


def _require_points(points: Tensor, label: str) -> None:
    if points.ndim != 2 or points.shape[1] != 3 or not len(points):
        raise ValueError(f"{label} has points [points, 3], at least one, not {list(points.shape)}")
    if not bool(points.isfinite().all()):
        raise ValueError(f"{label} has coordinates that are NaN or Inf; repair the file")

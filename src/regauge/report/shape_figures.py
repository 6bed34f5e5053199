"""Figures of shapes, drawn without a graphics engine."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from numpy.typing import NDArray
from scipy.spatial import cKDTree

from regauge.inr.rendering.mesh import Mesh
from regauge.inr.rendering.points import PointCloud
from regauge.report.figures import COLORS, draw_figure

Floats = NDArray[np.floating[Any]]

NEIGHBORS = 16
"""The number of neighbors from which the normal of a point is estimated."""
LIGHT = np.array([-0.35, 0.65, 0.68]) / np.linalg.norm([-0.35, 0.65, 0.68])
"""The direction of the light: right, up and toward the viewer."""
REACH = 1.02
"""Half the width of a picture. Shapes lie in the unit ball."""


@dataclass(frozen=True)
class View:
    """The direction of the parallel projection of a shape: azimuth about its upward axis and elevation, in degrees.

    At azimuth zero, the axis after the upward axis points to the viewer. `up` is the index of the upward axis, 0 to 2.
    The upward axis is usually 1 (y) in graphics and 2 (z) in engineering.
    """

    azimuth: float = -35.0
    elevation: float = 18.0
    up: int = 1

    def __post_init__(self) -> None:
        if self.up not in (0, 1, 2):
            raise ValueError(f"the upward axis is 0, 1 or 2, not {self.up}")

    @property
    def matrix(self) -> Floats:
        """Return the matrix whose rows point right, up, and toward the viewer."""
        a, e = np.radians([self.azimuth, self.elevation])
        turn = np.array([[np.cos(a), 0, -np.sin(a)], [0, 1, 0], [np.sin(a), 0, np.cos(a)]])
        tilt = np.array([[1, 0, 0], [0, np.cos(e), -np.sin(e)], [0, np.sin(e), np.cos(e)]])
        return np.asarray(np.roll(tilt @ turn, self.up - 1, axis=1))


def shape_figure(shape: Mesh | PointCloud, view: View) -> Figure:
    """Return a figure of a single shape."""
    with draw_figure(3.2, 3.2, "none") as figure:
        draw_shape(figure.add_axes((0.0, 0.0, 1.0, 1.0)), shape, view, COLORS[1])
        return figure


def draw_shape(axes: Axes, shape: Mesh | PointCloud, view: View, color: str) -> None:
    """Draw a shape in an empty square with the size of the unit ball."""
    axes.set(xlim=(-REACH, REACH), ylim=(-REACH, REACH), aspect="equal")
    axes.set_axis_off()
    if isinstance(shape, Mesh):
        _draw_mesh(axes, shape.vertices.double().numpy() @ view.matrix.T, shape.faces.numpy(), color)
    elif len(shape.points):
        _draw_points(axes, shape.points.double().numpy() @ view.matrix.T, color)


def _draw_points(axes: Axes, seen: Floats, color: str) -> None:
    """Draw a point cloud. Each point is shaded by a normal estimated from its neighbors, and far points are paler.

    Markers are about as wide as the distance between points. Therefore the front hides the back.
    """
    seen = seen[np.argsort(seen[:, 2])]
    normals, spacing = _normals(seen)
    colors = _shade(normals, seen[:, 2], color)
    box = axes.get_window_extent()
    per_unit = 72 / axes.figure.dpi * min(box.width, box.height) / (2 * REACH)
    diameter = float(np.clip(1.8 * spacing * per_unit, 0.8, 4.0))
    style: Any = {"s": diameter**2, "c": colors, "linewidths": 0, "rasterized": True}
    axes.scatter(seen[:, 0], seen[:, 1], **style)


def _draw_mesh(axes: Axes, seen: Floats, faces: NDArray[np.int64], color: str) -> None:
    """Draw triangles from the farthest to the nearest. Each triangle is shaded by its normal."""
    corners = seen[faces]
    normals = np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0])
    normals /= np.maximum(np.linalg.norm(normals, axis=1, keepdims=True), 1e-12)
    depths = corners[:, :, 2].mean(1)
    order = np.argsort(depths)
    colors = _shade(normals, depths, color)[order]
    shape: Any = PolyCollection(
        list(corners[order][:, :, :2]), facecolors=colors, edgecolors=colors, linewidths=0.25, rasterized=True
    )
    axes.add_collection(shape)


def _normals(points: Floats) -> tuple[Floats, float]:
    """Return directions of least variance among neighbors, and the typical distance between points."""
    count = min(NEIGHBORS, len(points))
    distances, near = cKDTree(points).query(points, k=[*range(1, count + 1)])
    centered = points[near] - points[near].mean(1, keepdims=True)
    _, vectors = np.linalg.eigh(np.einsum("nki,nkj->nij", centered, centered))
    spacing = float(np.median(np.asarray(distances)[:, min(4, count - 1)]))
    return vectors[:, :, 0], spacing


def _shade(normals: Floats, depths: Floats, color: str) -> Floats:
    """Return diffuse light on two-sided surfaces. Normals that point away from the viewer are reversed."""
    facing = normals * np.where(normals[:, 2:] < 0, -1.0, 1.0)
    light = np.clip(facing @ LIGHT, 0, 1)
    base, paper = np.array(to_rgb(color)), np.ones(3)
    shade = (0.35 + 0.65 * light)[:, None] * base
    shine = (0.35 * light**12)[:, None]
    fog = np.clip(0.16 - 0.2 * depths, 0, 0.4)[:, None]
    return np.asarray((shade * (1 - shine) + shine * paper) * (1 - fog) + fog * paper)

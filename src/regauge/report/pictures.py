"""Descriptions of pictures: charts, surfaces and images, given as numbers and words. `picture_figure` plots them."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Style = Literal["line", "dashed", "points"]


@dataclass(frozen=True)
class Series:
    """Values at positions, with a band around the values if there are limits."""

    label: str  # in the legend; those without one follow the rest, thinner, in the same colors
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    style: Style = "line"


@dataclass(frozen=True)
class Chart:
    """Several series that share one axis."""

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]  # in the order of the legend
    is_log_x: bool = False
    is_log_y: bool = False
    y_limits: tuple[float, float] | None = None  # the values that are shown; all by default


@dataclass(frozen=True)
class Surface:
    """A function on a plane, with marked points."""

    title: str
    xs: Sequence[float]  # of the columns
    ys: Sequence[float]  # of the rows
    values: Sequence[Sequence[float]]  # one row for each of `ys`; low is good
    points: Sequence[tuple[float, float]]
    labels: tuple[str, ...]  # of the points
    about: str = ""  # what the points are, in words


@dataclass(frozen=True)
class Images:
    """Grayscale images, arranged in rows and columns.

    Attributes:
        title: The title above the images.
        rows: The labels of the rows.
        columns: The labels of the columns.
        height: The height of each image in pixels.
        pixels: For each row and column, the bytes of an image (from black to white), encoded in base 64.
    """

    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    height: int
    pixels: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, title: str, rows: Sequence[str], columns: Sequence[str], values: Tensor) -> "Images":
        """Return images, given values `[rows, columns, height, width]` between 0 and 1."""
        levels = (values.clamp(0, 1) * 255).round().byte().numpy()
        pixels = tuple(tuple(base64.b64encode(one.tobytes()).decode() for one in row) for row in levels)
        return cls(title, tuple(rows), tuple(columns), values.shape[2], pixels)

    def image(self, row: int, column: int) -> NDArray[np.uint8]:
        """Return the image at a row and column, `[height, width]`."""
        return np.frombuffer(base64.b64decode(self.pixels[row][column]), np.uint8).reshape(self.height, -1)

    @classmethod
    def from_json(cls, known: Mapping[str, Any]) -> "Images":
        """Return images from the JSON data that `asdict` gives."""
        names = {name: tuple(known[name]) for name in ("rows", "columns")}
        return cls(known["title"], **names, height=known["height"], pixels=tuple(map(tuple, known["pixels"])))


Panel = Chart | Surface | Images
Picture = tuple[Panel, ...]
"""A picture: panels of one class, placed side by side."""

"""Training samples of a network: points and their labels."""

from dataclasses import dataclass

import torch
from torch import Tensor

from regauge.data.images import pixel_centers
from regauge.inr.fields.fields import Field
from regauge.inr.fields.labels import labels_of
from regauge.inr.fields.queries import Queries, draw_queries
from regauge.inr.representation import Inr


@dataclass(frozen=True)
class Samples:
    """Points and labels.

    Attributes:
        points: `[n, in]`.
        labels: `[n, out]`: values of an image, or probabilities, see `regauge.inr.fields.labels`.

    Raises:
        ValueError: Their numbers differ, or there is none.
    """

    points: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        if self.points.ndim != 2 or self.labels.ndim != 2 or len(self.points) != len(self.labels) or not len(self):
            raise ValueError(
                f"samples are points [n, in] and labels [n, out], at least one, not {list(self.points.shape)} and "
                f"{list(self.labels.shape)}"
            )

    def __len__(self) -> int:
        return len(self.points)

    def to(self, dtype: torch.dtype) -> "Samples":
        """Convert to a dtype; nothing is copied if it is the dtype already."""
        return Samples(self.points.to(dtype), self.labels.to(dtype))


def field_samples(field: Field, inr: Inr, queries: Queries, *, generator: torch.Generator) -> Samples:
    """Queries of a field with the labels that a network learns: of distances, with signs or without, or of the inside.

    Raises:
        ValueError: The network is an image, or the field has no inside and the network needs one.
    """
    if inr.signal == "image":
        raise ValueError("an INR of an image learns from pixels, not from the field of a shape; use `image_samples`")
    points = draw_queries(field.surface, queries, generator=generator)
    if inr.signal == "occupancy":
        labels = (field.signed_distances(points) <= 0).to(points.dtype)
    else:
        distances = field.distances(points) if inr.signal == "unsigned" else field.signed_distances(points)
        labels = labels_of(inr).of(distances)
    return Samples(points, labels.unsqueeze(1))


def voxel_samples(grid: Tensor) -> Samples:
    """Centers of all cells of a grid that fills the cube [-1, 1]^3, labelled one where they are occupied.

    Args:
        grid: Booleans, `[x, y, z]`.

    Raises:
        ValueError: It is no such grid.

    References:
        De Luigi et al. (2023), appendix A.
    """
    if grid.ndim != 3 or grid.dtype != torch.bool:
        raise ValueError(f"a grid of cells is booleans [x, y, z], not {grid.dtype} {list(grid.shape)}")
    points = torch.cartesian_prod(*((torch.arange(size) + 0.5) / size * 2 - 1 for size in grid.shape))
    return Samples(points, grid.reshape(-1, 1).float())


def image_samples(image: Tensor) -> Samples:
    """All pixels of an image: their centers as (row, column) in [-1, 1]^2 and their channels.

    Args:
        image: `[channels, height, width]`.

    Raises:
        ValueError: It is no such image.
    """
    if image.ndim != 3 or not image.is_floating_point():
        raise ValueError(
            f"an image is floating-point values [channels, height, width], not {image.dtype} {list(image.shape)}"
        )
    points = pixel_centers(*image.shape[1:]).to(image.dtype)
    return Samples(points, image.flatten(1).t().contiguous())

"""Training samples of networks: points with labels. For shapes, most points are close to the surface.

The label for a distance is a probability, and the output of a network is a logit.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy

from regauge.core.arguments import check_arguments
from regauge.core.given import given_or_seed
from regauge.data.images import pixel_centers
from regauge.inr.fields.fields import Field
from regauge.inr.representation import Inr


@dataclass(frozen=True)
class Samples:
    """Points with labels, for training.

    Attributes:
        points: `[n, in]`.
        labels: Labels, `[n, out]`: pixel values of an image, or probabilities; see `DistanceLabels`.

    Raises:
        ValueError: The numbers of points and labels differ, or there are no samples.
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
        """Convert the samples to a dtype. Nothing is copied if the samples already have the dtype."""
        return Samples(self.points.to(dtype), self.labels.to(dtype))


@dataclass(frozen=True)
class Queries:
    """The numbers of query points by their distance from the surface, 500,000 in total in paper 003.

    Near, middle and far points are surface points plus normal noise. All surface points are used equally often.

    Attributes:
        near: The number of points with noise of standard deviation `near_sigma`.
        middle: The number of points with noise of standard deviation `middle_sigma`.
        far: The number of points with noise of standard deviation `far_sigma`.
        uniform: The number of uniformly random points in the cube [-1, 1]^3.
        near_sigma: The standard deviation for `near`, in units of the radius of the ball that contains the shape.
        middle_sigma: The standard deviation for `middle`.
        far_sigma: The standard deviation for `far`.

    Raises:
        ValueError: The total number of points is zero, or a count or standard deviation is negative.

    References:
        Paper 003, chapter 3; the standard deviations are those of De Luigi et al. (2023), in their program.
    """

    near: int = 250_000
    middle: int = 200_000
    far: int = 25_000
    uniform: int = 25_000
    near_sigma: float = 0.003
    middle_sigma: float = 0.01
    far_sigma: float = 0.1

    def __post_init__(self) -> None:
        counts = (self.near, self.middle, self.far, self.uniform)
        if min(counts) < 0 or not self.total or min(self.near_sigma, self.middle_sigma, self.far_sigma) < 0:
            raise ValueError(f"{self} cannot be drawn: give counts that are not negative, and at least one point")

    @property
    def total(self) -> int:
        """The total number of points."""
        return self.near + self.middle + self.far + self.uniform


EVALUATION = Queries(5_000, 4_000, 500, 500)
"""The 10,000 points on which a loss is measured. The shares of near, middle, far and uniform points are the same as in
training samples."""


def draw_queries(surface: Tensor, queries: Queries, *, generator: torch.Generator) -> Tensor:
    """Return points around a surface `[points, 3]`, clipped to the cube: near points first, uniform points last."""
    if surface.ndim != 2 or not len(surface):
        raise ValueError(f"a surface is given by at least one point [points, 3], not by {list(surface.shape)}")
    parts = []
    for count, sigma in (
        (queries.near, queries.near_sigma),
        (queries.middle, queries.middle_sigma),
        (queries.far, queries.far_sigma),
    ):
        order = torch.randperm(len(surface), generator=generator)
        around = surface[order[torch.arange(count) % len(surface)]]
        noise = torch.randn(around.shape, generator=generator, dtype=surface.dtype)
        parts.append((around + sigma * noise).clamp_(-1, 1))
    parts.append(torch.rand(queries.uniform, surface.shape[1], generator=generator, dtype=surface.dtype) * 2 - 1)
    return torch.cat(parts)


@dataclass(frozen=True)
class DistanceLabels:
    """A conversion between clipped distances and labels in [0, 1].

    For unsigned distances, the label is `1 - min(d, limit) / limit`, which is one on the surface and zero far away. For
    signed distances (negative inside), the label is `(clip(d, -limit, limit) + limit) / (2 limit)`. For signed
    distances, the label is one half on the surface and zero far inside.

        >>> labels = DistanceLabels(0.1, is_signed=False)
        >>> labels.of(torch.tensor([0.0, 0.05, 0.3]))
        tensor([1.0000, 0.5000, 0.0000])

    Attributes:
        limit: The magnitude at which distances are clipped.
        is_signed: Whether distances are signed.

    References:
        De Luigi et al. (2023), appendix A.
    """

    limit: float
    is_signed: bool

    def __post_init__(self) -> None:
        if not 0 < self.limit < math.inf:
            raise ValueError(f"the limit of distances must be positive and finite, not {self.limit}")

    def of(self, distances: Tensor) -> Tensor:
        """Convert distances to labels."""
        if self.is_signed:
            return (distances.clamp(-self.limit, self.limit) + self.limit) / (2 * self.limit)
        return 1 - distances.clamp(max=self.limit) / self.limit

    def distances(self, labels: Tensor) -> Tensor:
        """Convert labels to distances, which are clipped at the limit."""
        return (2 * labels - 1) * self.limit if self.is_signed else (1 - labels) * self.limit

    def from_logits(self, logits: Tensor) -> Tensor:
        """Convert network outputs (logits) to distances. The result is differentiable, and exact for very small and
        very large logits.
        """
        if self.is_signed:
            return torch.tanh(logits / 2) * self.limit
        return torch.sigmoid(-logits) * self.limit


def labels_of(inr: Inr) -> DistanceLabels:
    """Return the labels that a network learns.

    Raises:
        ValueError: The network does not represent a distance.
    """
    if inr.limit is None:
        raise ValueError(f"an INR of {inr.signal!r} has no distances; give an INR of 'unsigned' or 'signed'")
    return DistanceLabels(inr.limit, is_signed=inr.signal == "signed")


def entropy_floor(labels: Tensor) -> float:
    """Return the smallest possible cross entropy on the labels, in nats, which is their mean binary entropy.

    If labels lie strictly between zero and one, even a perfect network has a positive loss, the mean entropy. Therefore
    report the difference between the loss and the mean entropy.
    """
    exact = labels.double()
    return binary_cross_entropy(exact, exact).item()


@check_arguments
def field_samples(field: Field, inr: Inr, queries: Queries, *, generator: torch.Generator | None = None) -> Samples:
    """Sample queries of a field with the labels that a network learns: unsigned or signed distances, or occupancy.

    Raises:
        ValueError: The network represents an image, or needs the interior of a shape without an interior.
    """
    generator = given_or_seed(generator)
    if inr.signal == "image":
        raise ValueError("an INR of an image learns from pixels, not from a shape; use `image_samples`")
    points = draw_queries(field.surface, queries, generator=generator)
    if inr.signal == "occupancy":
        labels = (field.signed_distances(points) <= 0).to(points.dtype)
    else:
        distances = field.distances(points) if inr.signal == "unsigned" else field.signed_distances(points)
        labels = labels_of(inr).of(distances)
    return Samples(points, labels.unsqueeze(1))


def voxel_samples(grid: Tensor) -> Samples:
    """Return the centers of all grid cells in the cube [-1, 1]^3, where occupied cells have the label one.

    Args:
        grid: A boolean grid, `[x, y, z]`.

    Raises:
        ValueError: The tensor is not a boolean grid with three axes.

    References:
        De Luigi et al. (2023), appendix A.
    """
    if grid.ndim != 3 or grid.dtype != torch.bool:
        raise ValueError(f"a grid of cells is booleans [x, y, z], not {grid.dtype} {list(grid.shape)}; convert it")
    points = torch.cartesian_prod(*((torch.arange(size) + 0.5) / size * 2 - 1 for size in grid.shape))
    return Samples(points, grid.reshape(-1, 1).float())


def image_samples(image: Tensor) -> Samples:
    """Return all pixels of an image: their centers as (row, column) in [-1, 1]^2, and their channels.

    Args:
        image: `[channels, height, width]`.

    Raises:
        ValueError: The tensor is not an image `[channels, height, width]`.
    """
    if image.ndim != 3 or not image.is_floating_point():
        raise ValueError(
            f"an image is floating-point values [channels, height, width], not {image.dtype} {list(image.shape)}; "
            "convert it"
        )
    points = pixel_centers(*image.shape[1:]).to(image)
    return Samples(points, image.flatten(1).t().contiguous())

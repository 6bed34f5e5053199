"""Images from networks that are images."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from regauge.inr.architecture import Inr
from regauge.inr.rendering.evaluation import evaluate


def pixel_grid(height: int, width: int) -> Tensor:
    """Coordinates (row, column) of pixels, row by row: from -1 for the first to 1 for the last, `[height * width, 2]`.

    Raises:
        ValueError: There is no pixel.
    """
    if height < 1 or width < 1:
        raise ValueError(f"an image of {height} x {width} pixels has none; both must be at least 1")
    rows, columns = (_ticks(size) for size in (height, width))
    return torch.cartesian_prod(rows, columns)


def render_image(network: Inr | nn.Module, params: Mapping[str, Tensor], height: int, width: int) -> Tensor:
    """The picture that a network is, at any resolution.

    Args:
        network: How to run the parameters.
        params: Of one network, or of a population with a leading model axis.
        height: Rows of pixels.
        width: Columns of pixels.

    Returns:
        `[height, width, channels]`, of a population `[models, height, width, channels]`; values outside [0, 1] are
        clipped, NaN stays.

    Raises:
        ValueError: There is no pixel, or the parameters are not those of the network.
    """
    values = evaluate(network, params, pixel_grid(height, width))
    return values.reshape(*values.shape[:-2], height, width, values.shape[-1]).clamp(0, 1)


def _ticks(size: int) -> Tensor:
    """Equally spaced from -1 to 1; one alone lies in the middle."""
    return torch.linspace(-1, 1, size, dtype=torch.float64) if size > 1 else torch.zeros(1, dtype=torch.float64)

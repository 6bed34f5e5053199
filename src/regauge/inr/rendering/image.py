"""Images from networks that are images."""

from collections.abc import Mapping

from torch import Tensor, nn

from regauge.data.images import pixel_centers
from regauge.inr.rendering.field_values import evaluate
from regauge.inr.representation import Inr


def render_image(network: Inr | nn.Module, params: Mapping[str, Tensor], height: int, width: int) -> Tensor:
    """The picture that a network is, at any resolution.

    Args:
        network: The module or INR that runs the parameters.
        params: Parameters of one network, or of a population with a leading model axis.
        height: Rows of pixels.
        width: Columns of pixels.

    Returns:
        `[height, width, channels]`, of a population `[models, height, width, channels]`; values outside [0, 1] are
        clipped, NaN stays.

    Raises:
        ValueError: There is no pixel, or the parameters are not those of the network.
    """
    if height < 1 or width < 1:
        raise ValueError(f"an image of {height} x {width} pixels has none; both must be at least 1")
    values = evaluate(network, params, pixel_centers(height, width))
    return values.reshape(*values.shape[:-2], height, width, values.shape[-1]).clamp(0, 1)

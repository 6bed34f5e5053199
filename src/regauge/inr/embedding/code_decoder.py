"""The implicit decoder of inr2vec: from a code and a point to the signal there."""

import torch
from torch import Tensor, nn


class CodeDecoder(nn.Module):
    """`f(code, x)`: an MLP with ReLU that reads the code next to sines and cosines of the point.

    The point comes as (x, sin(2^k x), cos(2^k x)) for k below `octaves`. The input comes again, through a layer of its
    own, halfway.

    Args:
        coordinates: Number of coordinates of a point.
        outputs: Number of outputs of the signal.
        code: Length of a code.
        width: Units of every layer.
        octaves: Frequencies of each coordinate.

    References:
        De Luigi et al. (2023), section 3 and appendix: 2,165,249 parameters for points in space.
    """

    def __init__(self, coordinates: int, outputs: int, code: int = 1024, width: int = 512, octaves: int = 10) -> None:
        super().__init__()
        inputs = code + coordinates * (1 + 2 * octaves)
        self.octaves = octaves
        self.first = nn.Linear(inputs, width)
        self.before = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.again = nn.Linear(inputs, width)
        self.after = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.last = nn.Linear(width, outputs)

    def forward(self, codes: Tensor, points: Tensor) -> Tensor:
        """`[networks, code]` and `[networks, points, coordinates]` to `[networks, points, outputs]`."""
        angles = points.unsqueeze(-1) * 2.0 ** torch.arange(self.octaves, dtype=points.dtype, device=points.device)
        places = torch.cat([points, angles.sin().flatten(-2), angles.cos().flatten(-2)], -1)
        inputs = torch.cat([codes.unsqueeze(1).expand(-1, points.shape[1], -1), places], -1)
        x = torch.relu(self.first(inputs))
        for layer in self.before:
            x = torch.relu(layer(x))
        x = x + torch.relu(self.again(inputs))
        for layer in self.after:
            x = torch.relu(layer(x))
        outputs: Tensor = self.last(x)
        return outputs

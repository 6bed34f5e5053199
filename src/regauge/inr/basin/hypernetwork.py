"""A network that reads the weights of a network and makes new ones."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from regauge.core.params import Params
from regauge.inr.embedding.encoder import RowEncoder, draw_linear, linear_layers, weight_rows

TANH = 0.6276
"""Root mean square of tanh of a standard normal number."""


class RowDecoder(nn.Module):
    """From one code to the rows of a matrix: a small network, the same for all rows, that knows each by an embedding.

        row_r = V tanh(A code + E e_r + c) + d

    Outputs begin with mean square one, nearly uncorrelated between rows. The matrix has at most rank `hidden` + 1.

    Args:
        rows: Of the matrix.
        columns: Of the matrix.
        code: Length of the code.
        embedding: Length of the embeddings of rows.
        hidden: Units.
        generator: Where the initialization comes from.

    References:
        Ha et al. (2017), section 3.1: weights from learned embeddings of their place.
    """

    def __init__(
        self, rows: int, columns: int, code: int, embedding: int, hidden: int, *, generator: torch.Generator | None
    ) -> None:
        super().__init__()
        self.embeddings = nn.Parameter(torch.randn(rows, embedding, generator=generator))
        self.from_code = _linear(code, hidden, 1.0, generator)
        self.from_row = _linear(embedding, hidden, 1.0, generator)
        self.last = _linear(hidden, columns, 1 / TANH, generator)

    def forward(self, code: Tensor) -> Tensor:
        """`[code]` to `[rows, columns]`."""
        rows: Tensor = self.last(torch.tanh(self.from_row(self.embeddings) + self.from_code(code)))
        return rows


class HyperNetwork(nn.Module):
    """From the weights of an MLP to those of another one of the same sizes.

    The encoder of inr2vec reads one row (w, b) for every unit; what the decoder makes is multiplied by the root mean
    square of each tensor of the network that the sizes are taken from. The decoder of paper 003 is not specified; one
    linear layer from its code of 1024 to its 790,529 weights would have 810 million.

    Args:
        like: An MLP with hidden layers of one width: sizes of rows and of numbers.
        is_residual: Whether the output is added to the input, and begins as zero. The paper's is not.
        code: Length of the code.
        widths: Units of the encoder's layers.
        embedding: Length of the decoder's embeddings.
        hidden: Units of the decoder.
        generator: Where the initialization comes from.

    References:
        Paper 003, section 3.4.
    """

    def __init__(
        self,
        like: Mapping[str, Tensor],
        *,
        is_residual: bool,
        code: int,
        widths: tuple[int, ...],
        embedding: int,
        hidden: int,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        rows, columns = weight_rows(like, "all").shape
        self.is_residual = is_residual
        self.encoder = RowEncoder(columns, code, widths)
        self.decoder = RowDecoder(rows, columns, code, embedding, hidden, generator=generator)
        draw_linear([self.encoder], generator)
        if is_residual:
            nn.init.zeros_(self.decoder.last.weight)
        pairs = linear_layers(like)
        self.shapes = [(weight, bias, like[weight].shape) for weight, bias in pairs]
        sizes = {}
        for weight, bias in pairs:
            sizes[weight] = like[weight].square().mean().sqrt()
            own = like[bias].square().mean().sqrt()
            sizes[bias] = torch.where(own > 0, own, sizes[weight])
        self.sizes = sizes

    def forward(self, params: Mapping[str, Tensor]) -> Params:
        """One network to one network."""
        rows = weight_rows(params, "all")
        made = self.decoder(self.encoder(rows.unsqueeze(0)).squeeze(0))
        result: Params = {}
        start = 0
        for weight, bias, shape in self.shapes:
            part = made[start : start + shape[0]]
            result[weight] = part[:, : shape[1]] * self.sizes[weight]
            result[bias] = part[:, -1] * self.sizes[bias]
            start += shape[0]
        if self.is_residual:
            result = {name: params[name] + tensor for name, tensor in result.items()}
        return result


def _linear(inputs: int, outputs: int, size: float, generator: torch.Generator | None) -> nn.Linear:
    """A layer whose outputs have this mean square root where its inputs have mean square one."""
    layer = nn.Linear(inputs, outputs)
    nn.init.normal_(layer.weight, 0.0, size / math.sqrt(inputs), generator=generator)
    nn.init.zeros_(layer.bias)
    return layer

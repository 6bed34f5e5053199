"""A hypernetwork, which reads the weights of one network and generates the weights of another network."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from regauge.core.params import Params
from regauge.nets.classification import initialize
from regauge.weightspace.row_encoder import RowEncoder, linear_layers, weight_rows

TANH = 0.6276
"""The root mean square of `tanh(x)` for a standard normal variable x."""

SHARE = 0.1
"""The initial size of the part of the output that depends on the code, relative to the smallest generated weights."""


class RowDecoder(nn.Module):
    """A decoder from one code to the rows of a matrix: one small network for all rows, with an embedding for each row.

        row_r = size V tanh(A code + E e_r + c) + d_r

    At initialization, the products `V tanh(...)` have root mean square `size` and are nearly uncorrelated between rows.
    The rank of the products `V tanh(...)` is at most `hidden`. The decoder has fewer parameters than one linear layer
    from the code to all entries.

    References:
        Ha et al. (2017), section 3.1: weights that are generated from learned embeddings of their positions.
    """

    def __init__(
        self,
        rows: int,
        columns: int,
        code: int,
        embedding: int,
        hidden: int,
        *,
        size: float,
        generator: torch.Generator | None,
    ) -> None:
        super().__init__()
        self.size = size
        self.embeddings = nn.Parameter(torch.randn(rows, embedding, generator=generator))
        self.from_code = _linear(code, hidden, generator)
        self.from_row = _linear(embedding, hidden, generator)
        self.last = nn.Linear(hidden, columns, bias=False)
        nn.init.normal_(self.last.weight, 0.0, 1 / TANH / math.sqrt(hidden), generator=generator)
        self.bias = nn.Parameter(torch.zeros(rows, columns))

    def forward(self, code: Tensor) -> Tensor:
        """Decode a code `[code]` to the rows of a matrix, `[rows, columns]`."""
        rows: Tensor = self.last(torch.tanh(self.from_row(self.embeddings) + self.from_code(code)))
        return self.size * rows + self.bias


class HyperNetwork(nn.Module):
    """A hypernetwork that maps the weights of an MLP to the weights of another MLP of the same sizes.

    The encoder of inr2vec reads one row (w, b) for every unit. At initialization, the generated network hardly depends
    on the code. The generated network consists mainly of the decoder's biases, which are uniformly random with the root
    mean square of each tensor of `like`. The part of the output that depends on the code is smaller than the weights
    between hidden units by the factor `SHARE`. Therefore steps with one learning rate change all tensors by similar
    amounts, as in ordinary training. In an experiment, training failed if outputs were scaled to the size of each
    tensor, because the phases of the first sines jumped. Paper 003 does not specify the decoder of its hypernetwork. In
    the paper, a linear layer from the code (1024 numbers) to the 790,529 weights would have 810 million parameters. For
    the networks of the paper, `HyperNetwork` has 5,159,489 parameters, of which the encoder has 3,156,480.

    Args:
        like: An MLP whose hidden layers have equal widths. The MLP determines the sizes of rows and the scales of
            weights.
        is_residual: Whether the decoded weights are added to the input weights. A residual hypernetwork decodes weights
            of zero at initialization. The hypernetwork of the paper is not residual.
        embedding: The length of the decoder's embeddings.

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
        self.pairs = linear_layers(like)
        step = SHARE * min(_size(like[weight]) for weight, _ in self.pairs)
        self.encoder = RowEncoder(columns, code, widths)
        self.decoder = RowDecoder(rows, columns, code, embedding, hidden, size=step, generator=generator)
        if generator is not None:
            self.encoder.load_state_dict(initialize(self.encoder, generator))
        if is_residual:
            nn.init.zeros_(self.decoder.last.weight)
            return
        drawn = {}
        for weight, bias in self.pairs:
            for name in (weight, bias):
                bound = math.sqrt(3) * _size(like[name])
                drawn[name] = torch.empty(like[name].shape).uniform_(-bound, bound, generator=generator)
        self.decoder.bias.data.copy_(weight_rows(drawn, "all"))

    def forward(self, params: Mapping[str, Tensor]) -> Params:
        """Encode one network, and decode another network from the code."""
        rows = weight_rows(params, "all")
        made = self.decoder(self.encoder(rows.unsqueeze(0)).squeeze(0))
        result: Params = {}
        start = 0
        for weight, bias in self.pairs:
            units, inputs = params[weight].shape
            part = made[start : start + units]
            result[weight], result[bias] = part[:, :inputs], part[:, -1]
            start += units
        if self.is_residual:
            result = {name: params[name] + tensor for name, tensor in result.items()}
        return result


def _size(tensor: Tensor) -> float:
    """Return the root mean square of a tensor, or one for a tensor on the meta device."""
    return 1.0 if tensor.is_meta else float(tensor.detach().square().mean().sqrt())


def _linear(inputs: int, outputs: int, generator: torch.Generator | None) -> nn.Linear:
    """Return a linear layer whose outputs have the root mean square of its inputs."""
    layer = nn.Linear(inputs, outputs)
    nn.init.normal_(layer.weight, 0.0, 1 / math.sqrt(inputs), generator=generator)
    nn.init.zeros_(layer.bias)
    return layer

"""The encoder of inr2vec: it maps every row of a weight matrix separately, and takes the maximum over rows."""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn

Layers = Literal["hidden", "all"]


class RowEncoder(nn.Module):
    """An encoder from rows `[networks, rows, columns]` to codes `[networks, code]`.

    Four layers act on every row separately (512, 512, 1024 and 1024 units, batch normalization over the rows of all
    networks, ReLU). The last steps are one linear layer and the maximum over rows. The order of rows does not change
    the code, so the code is invariant if the units of only *one* layer are permuted. The order of columns changes the
    code, so the code is not invariant under general permutations of units.

    Args:
        widths: The numbers of units in the four layers.

    References:
        De Luigi et al. (2023), section 3 and appendix. With 512 columns, the encoder has 3,155,968 parameters.
    """

    def __init__(self, columns: int, code: int = 1024, widths: tuple[int, ...] = (512, 512, 1024, 1024)) -> None:
        super().__init__()
        if min(columns, code, *widths) < 1:
            raise ValueError(f"columns={columns}, code={code} and widths={widths} must be positive")
        self.columns = columns
        self.layers = nn.ModuleList()
        self.norms = nn.ModuleList()
        before = columns
        for width in widths:
            self.layers.append(nn.Linear(before, width))
            self.norms.append(nn.BatchNorm1d(width))
            before = width
        self.last = nn.Linear(before, code)

    def forward(self, rows: Tensor) -> Tensor:
        x = rows.flatten(0, 1)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = torch.relu(norm(layer(x)))
        codes: Tensor = self.last(x)
        return codes.reshape(*rows.shape[:2], -1).amax(1)


def linear_layers(params: Mapping[str, Tensor]) -> list[tuple[str, str]]:
    """Return the names of the weight and bias of every layer of an MLP, in order.

    Raises:
        ValueError: The parameters do not belong to linear layers with biases, or hidden layers differ in width.
    """
    weights = [name for name in params if name.endswith("weight")]
    pairs = [(name, f"{name.removesuffix('weight')}bias") for name in weights]
    is_mlp = len(params) == 2 * len(pairs) >= 4 and all(bias in params for _, bias in pairs)
    if is_mlp:
        shapes = [params[name].shape[-2:] for name in weights]
        width = shapes[0][0]
        is_mlp = all(shape[0] == width for shape in shapes[:-1]) and all(shape[1] == width for shape in shapes[1:])
    if not is_mlp:
        raise ValueError(
            f"the parameters {list(params)[:6]} are not those of an MLP with biases and hidden layers of one width, of "
            "which rows can be made"
        )
    return pairs


def weight_rows(params: Mapping[str, Tensor], layers: Layers) -> Tensor:
    """Return the matrix that the encoder reads, for one network or for each network of a population.

    With `hidden`, as in inr2vec, the matrix contains every layer between two hidden layers of width H. The rows of W
    and then b are stacked, `[..., (L - 2) (H + 1), H]` for L linear layers. With `all`, as in hyper-matching, the
    matrix has one row (w, b) for every unit of every layer, `[..., (L - 1) H + out, H + 1]`. Rows of the first layer
    are padded with zeros.

    Raises:
        ValueError: The network is not an MLP with biases and with hidden layers of equal width.

    References:
        Paper 003, section 3.4 and figure 3.7.
    """
    pairs = linear_layers(params)
    width = params[pairs[-1][0]].shape[-1]
    if layers == "hidden":
        inner = [(params[weight], params[bias]) for weight, bias in pairs[1:-1]]
        if not inner:
            raise ValueError("a network with one hidden layer has no layer between hidden layers; read all its layers")
        return torch.cat([part for weight, bias in inner for part in (weight, bias.unsqueeze(-2))], -2)
    rows = []
    for name, bias in pairs:
        weight = nn.functional.pad(params[name], (0, width - params[name].shape[-1]))
        rows.append(torch.cat([weight, params[bias].unsqueeze(-1)], -1))
    return torch.cat(rows, -2)

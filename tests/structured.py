"""Networks with buffers that training does not change: masks, permutations, tables, and indices."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

DEGREES = torch.arange(8) % 3
UNEQUAL = torch.tensor([0, 2, 1])


class Masked(nn.Linear):
    """A layer whose weight is multiplied by a mask."""

    mask: Tensor

    def __init__(self, mask: Tensor) -> None:
        super().__init__(mask.shape[1], mask.shape[0])
        self.register_buffer("mask", mask)

    def masked(self) -> Tensor:
        return self.mask * self.weight

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.masked(), self.bias)


class Chosen(Masked):
    """A layer like `Masked`, with a mask that selects entries."""

    def masked(self) -> Tensor:
        return self.weight.masked_fill(~self.mask, 0.0)


def made(
    degrees: Tensor = DEGREES,
    layer: Callable[[Tensor], nn.Module] = Masked,
    activation: Callable[[], nn.Module] = nn.ReLU,
    dtype: torch.dtype = torch.float32,
) -> nn.Module:
    """Return a masked autoencoder of four variables, whose output k depends only on inputs before k."""
    inputs = torch.arange(4)
    masks = (degrees[:, None] >= inputs, degrees[:, None] >= degrees, inputs[:, None] > degrees)
    layers = [layer(mask.to(dtype)) for mask in masks]
    return nn.Sequential(layers[0], activation(), layers[1], activation(), layers[2])


class Coupling(nn.Module):
    """A coupling layer of RealNVP after a permutation of the variables."""

    order: Tensor

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.register_buffer("order", torch.randperm(4, generator=torch.Generator().manual_seed(seed)))
        self.net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        kept, changed = x[:, self.order].chunk(2, -1)
        scale, shift = self.net(kept).chunk(2, -1)
        return torch.cat([kept, changed * scale.tanh().exp() + shift], -1)


class Triangular(nn.Module):
    """The invertible linear map of Glow, given by triangular factors."""

    order: Tensor
    lower: Tensor
    signs: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("order", torch.eye(width).roll(1, 0))
        self.register_buffer("lower", torch.tril(torch.ones(width, width), -1))
        self.register_buffer("signs", (-1.0) ** torch.arange(width))
        self.left, self.right = (nn.Parameter(torch.randn(width, width) / width) for _ in range(2))
        self.logs = nn.Parameter(torch.randn(width) / 4)

    def forward(self, x: Tensor) -> Tensor:
        one = torch.eye(len(self.logs), dtype=x.dtype)
        left, right = self.left * self.lower + one, self.right * self.lower.T + one * (self.signs * self.logs.exp())
        return x @ (self.order @ left @ right).T


class Positions(nn.Module):
    """Tokens with a table of positions, and a residual layer."""

    table: Tensor

    def __init__(self, *, is_parameter: bool = False) -> None:
        super().__init__()
        angles = torch.arange(6)[:, None] / 10 ** torch.arange(4)
        table = torch.cat([angles.sin(), angles.cos()], 1)
        if is_parameter:
            self.table = nn.Parameter(table, requires_grad=False)
        else:
            self.register_buffer("table", table)
        self.tokens, self.norm, self.head = nn.Embedding(7, 8), nn.LayerNorm(8), nn.Linear(8, 3)
        self.hidden = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.table[: tokens.shape[1]]
        y: Tensor = self.head(x + self.hidden(self.norm(x)))
        return y


class Indexed(nn.Module):
    """Outputs that an index reorders, and fixed frequencies of the inputs."""

    index: Tensor
    frequencies: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("index", torch.tensor([2, 0, 1, 1]))
        self.register_buffer("frequencies", torch.tensor([[1.0, 2.0, 1.0, 2.0], [0.5, 1.0, 0.5, 1.0]]))
        self.net = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.net((x @ self.frequencies).sin())
        return y[:, self.index]


class Recurrent(nn.Module):
    """A recurrent layer without self-connections: one group acts along both axes of its mask."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", 1 - torch.eye(6))
        self.first, self.last = nn.Linear(3, 6), nn.Linear(6, 2)
        self.again = nn.Parameter(torch.randn(6, 6) / 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        for _ in range(2):
            h = (self.first(x) + h @ (self.again * self.mask).T).tanh()
        y: Tensor = self.last(h)
        return y


def pruned() -> nn.Module:
    """Return a network with an unstructured mask and a mask of whole units."""
    some = (torch.rand((8, 4), generator=torch.Generator().manual_seed(0)) < 0.6).float()
    units = (torch.arange(8) % 3 > 0).float().unsqueeze(1).expand(8, 8).clone()
    return nn.Sequential(Masked(some), nn.ReLU(), Masked(units), nn.ReLU(), nn.Linear(8, 2))


def masked_convolutions() -> nn.Module:
    """Return a PixelCNN with masks over positions, and batch normalization with statistics."""
    return nn.Sequential(Convolution(1, 6), nn.BatchNorm2d(6), nn.ReLU(), Convolution(6, 6), nn.ReLU(), nn.Flatten())


class Convolution(nn.Conv2d):
    mask: Tensor

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, 3)
        mask = torch.ones_like(self.weight)
        mask[:, :, 1, 1:], mask[:, :, 2] = 0, 0
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        return functional.conv2d(x, self.weight * self.mask, self.bias)


class Causal(nn.Module):
    """Attention with a mask of minus infinity, and a mask of units after a cast."""

    mask: Tensor
    units: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.full((5, 5), -torch.inf).triu(1))
        self.register_buffer("units", torch.arange(8) % 3 > 0)
        self.first, self.queries, self.keys, self.values = (nn.Linear(k, 8) for k in (3, 8, 8, 8))
        self.out = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.where(self.units.to(torch.bool)[None, None], self.first(x).relu(), 0.0)
        scores = self.queries(x) @ self.keys(x).mT + self.mask
        y: Tensor = self.out(scores.softmax(-1) @ self.values(x))
        return y


class Scaled(nn.Module):
    """Constants for each unit, and statistics of a normalization that training replaces."""

    factors: Tensor
    mean: Tensor
    var: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factors", torch.tensor([1.0, 2.0, 1.0, 2.0, 0.0, 0.0, 1.0, 2.0]))
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("var", torch.ones(8))
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.training:
            self.mean, self.var = 0.9 * self.mean + 0.1 * x.mean(0), 0.9 * self.var + 0.1 * x.var(0)
        y: Tensor = self.last(((x - self.mean) / (self.var + 1e-5).sqrt()).relu() * self.factors)
        return y


Case = tuple[Callable[[], nn.Module], Callable[[torch.Generator], Tensor]]


def _rows(width: int) -> Callable[[torch.Generator], Tensor]:
    return lambda chance: torch.randn((5, width), generator=chance, dtype=torch.float64)


STRUCTURED: dict[str, Case] = {
    "made": (made, _rows(4)),
    "made of unequal degrees": (lambda: made(UNEQUAL), _rows(4)),
    "made with odd units": (lambda: made(activation=nn.Tanh), _rows(4)),
    "made with masks that choose": (lambda: made(layer=Chosen, dtype=torch.bool), _rows(4)),
    "made with integer masks": (lambda: made(dtype=torch.int64), _rows(4)),
    "coupling flow": (lambda: nn.Sequential(Coupling(0), Coupling(1)), _rows(4)),
    "triangular factors": (
        lambda: nn.Sequential(Triangular(4), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4), Triangular(4)),
        _rows(4),
    ),
    "triangular hidden layer": (
        lambda: nn.Sequential(nn.Linear(4, 6), Triangular(6), nn.ReLU(), nn.Linear(6, 2)),
        _rows(4),
    ),
    "table of positions": (Positions, lambda chance: torch.randint(0, 7, (3, 5), generator=chance)),
    "index": (Indexed, _rows(2)),
    "recurrent": (Recurrent, _rows(3)),
    "pruned": (pruned, _rows(4)),
    "causal attention": (Causal, lambda chance: torch.randn((3, 5, 3), generator=chance, dtype=torch.float64)),
    "constants of units": (Scaled, _rows(4)),
    "masked convolutions": (
        masked_convolutions,
        lambda chance: torch.randn((3, 1, 6, 6), generator=chance, dtype=torch.float64),
    ),
}
"""Networks with their inputs."""

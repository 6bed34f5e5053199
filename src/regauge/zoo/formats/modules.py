"""Modules for the networks of public zoos. If a zoo publishes parameter names, the parameters have the published
names."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from regauge.nets.siren import Siren

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "leakyrelu": nn.LeakyReLU,
    "relu": nn.ReLU,
    "selu": nn.SELU,
    "sigmoid": nn.Sigmoid,
    "silu": nn.SiLU,
    "tanh": nn.Tanh,
}
MOST_INPUT_VALUES = 1 << 24
"""The largest number of entries of an example input."""
EPSILON = 1e-6
"""The constant in the layer normalizations of vision transformers."""
MIDDLE = 0.5
"""The middle gray value, which `ImageSiren` adds to the output."""


class ImageSiren(Siren):
    """A SIREN whose output is shifted by one half, the middle gray value: x -> siren(x) + 1/2.

    References:
        Navon et al. (2023), Equivariant architectures for learning in deep weight spaces; their released networks.
    """

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + MIDDLE


class SmallCNN(nn.Module):
    """A network of 3 x 3 convolutions with stride two and no padding, a mean over positions, and a linear layer.

    References:
        Unterthiner et al. (2020), Predicting neural network accuracy from weights, section 4.
    """

    def __init__(
        self, channels: Sequence[int] = (1, 16, 16, 16), classes: int = 10, *, activation: str = "relu"
    ) -> None:
        super().__init__()
        pairs = pairwise(channels)
        self.convolutions = nn.ModuleList(nn.Conv2d(before, after, 3, stride=2) for before, after in pairs)
        self.output = nn.Linear(channels[-1], classes)
        self.activation = _activation(activation)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.convolutions:
            x = self.activation(layer(x))
        logits: Tensor = self.output(functional.adaptive_avg_pool2d(x, 1).flatten(1))
        return logits


class Listed(nn.Module):
    """A sequence of layers in a module list named `module_list`.

    Args:
        layers: Each layer is `["conv", in, out, kernel]`, `["linear", in, out]`, `["pool"]`, `["flatten"]`,
            `["dropout"]` or the name of an activation. Dropout has no effect in evaluation mode, but has an index in
            the list.

    References:
        Schürholt et al. (2022), Model zoos: a dataset of diverse populations of neural network models, appendix A.
    """

    def __init__(self, layers: Sequence[Sequence[Any]]) -> None:
        super().__init__()
        self.module_list = nn.ModuleList(_layer(*layer) for layer in layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.module_list:
            x = layer(x)
        return x


class SmallTransformer(nn.Module):
    """A transformer without residual connections, for images or for sequences of embedded tokens.

    Each block applies LayerNorm without gains, attention without biases, LayerNorm again, and an MLP with ReLU. The
    classifier reads the mean over the tokens.

    Args:
        width: The features of each token.
        hidden: The hidden units of each MLP.
        classes: The number of classes.
        layers: The number of blocks.
        heads: The number of attention heads.
        image: `[channels, size, patch]` for square images that are divided into patches. None for networks that read
            embedded tokens `[batch, token, width]`.

    References:
        Tran et al. (2025), Equivariant neural functional networks for transformers, and the released program.
    """

    def __init__(
        self, width: int, hidden: int, classes: int, layers: int, heads: int, *, image: Sequence[int] | None = None
    ) -> None:
        super().__init__()
        self.embedding = nn.Identity() if image is None else _PatchEmbedding(width, *image)
        self.encoder = nn.ModuleList(_PlainBlock(width, hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.classifier = _feed_forward(width, width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.encoder:
            x = block(x)
        x = self.norm(x).mean(1)
        logits: Tensor = self.classifier["fc2"](functional.relu(self.classifier["fc1"](x)))
        return logits


class _PatchEmbedding(nn.Module):
    """A linear map of the patches of an image, plus a fixed position code for each patch."""

    def __init__(self, width: int, channels: int, size: int, patch: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, patch, stride=patch)
        self.register_buffer("pos_embedding", torch.zeros((size // patch) ** 2, width))

    def forward(self, x: Tensor) -> Tensor:
        embedded: Tensor = self.conv1(x).flatten(2).transpose(1, 2) + self.pos_embedding
        return embedded


class _PlainBlock(nn.Module):
    """Attention and an MLP, each after LayerNorm without gains, and no residual connections."""

    def __init__(self, width: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.attention = _SeparateAttention(width, heads)
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.attention(self.norm(x)))
        written: Tensor = self.fc2(functional.relu(self.fc1(x)))
        return written


class _SeparateAttention(nn.Module):
    """Attention without biases, with a linear map each for queries, keys and values."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        _require_heads(width, heads)
        self.queries, self.keys, self.values, self.out_projection = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        written: Tensor = self.out_projection(_attend(self.queries(x), self.keys(x), self.values(x), heads=self.heads))
        return written


class NamedViT(nn.Module):
    """A vision transformer with a class token, with the parameter names of timm below `vit`.

    Args:
        width: The features of each token.
        hidden: The hidden units of each MLP.
        classes: The number of classes.
        layers: The number of blocks.
        heads: The number of attention heads.
        image: `[channels, size, patch]` of square images.
        head: The hidden units of the classifier; None for a linear classifier.

    References:
        Dosovitskiy et al. (2021), An image is worth 16x16 words; Falk et al. (2025), A model zoo of vision
        transformers, and the released program.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        classes: int,
        layers: int,
        heads: int,
        *,
        image: Sequence[int],
        head: int | None = None,
    ) -> None:
        super().__init__()
        classifier: nn.Module = nn.Linear(width, classes)
        if head is not None:
            classifier = nn.Sequential(nn.Linear(width, head), nn.ReLU(), nn.Linear(head, classes))
        self.vit = _ClassTokenViT(width, layers, lambda: _ResidualBlock(width, hidden, heads), image, classifier)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.vit(x)
        return logits


class _ClassTokenViT(nn.Module):
    """Patches and a class token with learned positions, blocks, and a head that reads the class token."""

    def __init__(
        self, width: int, layers: int, block: Callable[[], nn.Module], image: Sequence[int], head: nn.Module
    ) -> None:
        super().__init__()
        channels, size, patch = image
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.zeros(1, (size // patch) ** 2 + 1, width))
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(channels, width, patch, stride=patch)})
        self.blocks = nn.Sequential(*(block() for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width, eps=EPSILON), head

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed["proj"](x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed
        logits: Tensor = self.head(self.norm(self.blocks(x))[:, 0])
        return logits


class _ResidualBlock(nn.Module):
    """`x -> x + attention(norm1(x))`, then `x -> x + mlp(norm2(x))`; queries, keys and values are one linear map."""

    def __init__(self, width: int, hidden: int, heads: int) -> None:
        super().__init__()
        _require_heads(width, heads)
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=EPSILON), nn.LayerNorm(width, eps=EPSILON)
        self.attn = nn.ModuleDict({"qkv": nn.Linear(width, 3 * width), "proj": nn.Linear(width, width)})
        self.mlp = _feed_forward(width, hidden, width)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn["proj"](_attend(*self.attn["qkv"](self.norm1(x)).chunk(3, -1), heads=self.heads))
        after: Tensor = x + self.mlp["fc2"](functional.gelu(self.mlp["fc1"](self.norm2(x))))
        return after


def _feed_forward(width: int, hidden: int, out: int) -> nn.ModuleDict:
    return nn.ModuleDict({"fc1": nn.Linear(width, hidden), "fc2": nn.Linear(hidden, out)})


def _require_heads(width: int, heads: int) -> None:
    if heads < 1 or width % heads:
        raise ValueError(f"{heads} heads do not divide the width {width}; give a width that is a multiple of them")


def _attend(query: Tensor, key: Tensor, value: Tensor, *, heads: int) -> Tensor:
    """Return the outputs of attention `[batch, token, width]`, in which the heads are concatenated."""
    query, key, value = (one.reshape(*one.shape[:2], heads, -1).transpose(1, 2) for one in (query, key, value))
    return functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)


LAYERS: dict[str, Callable[..., nn.Module]] = {
    "conv": nn.Conv2d,
    "linear": nn.Linear,
    "pool": lambda: nn.MaxPool2d(2, 2),
    "flatten": nn.Flatten,
    "dropout": nn.Identity,
}
"""The layers of `Listed` by name."""


def _layer(kind: str, *sizes: int) -> nn.Module:
    return LAYERS[kind](*sizes) if kind in LAYERS else _activation(kind)


def _activation(name: str) -> nn.Module:
    if name not in ACTIVATIONS:
        raise ValueError(f"the activation {name!r} is unknown; there are {sorted(ACTIVATIONS)}")
    return ACTIVATIONS[name]()


def examples(*shape: int) -> tuple[Tensor]:
    """Return a fixed batch of two example inputs. Raise a ValueError if the batch would need too much memory."""
    if math.prod(shape) > MOST_INPUT_VALUES:
        raise ValueError(f"inputs of shape {shape} are too large for finding a symmetry; give smaller ones")
    return (torch.randn(2, *shape, generator=torch.Generator().manual_seed(0)),)

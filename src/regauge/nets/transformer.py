"""Small transformers: a GPT-2 style and a Llama style language model, and a vision transformer."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from regauge.core.given import given_or_seed
from regauge.core.params import Params


class Attention(nn.Module):
    """Multi-head attention of tokens `[batch, token, width]` to themselves, or to a context with `context` features.

    Each query head has `width / heads` dimensions, and each key-value head serves `heads / kv_heads` query heads. With
    a causal mask, each token attends only to itself and to earlier tokens. A rotary embedding rotates queries and keys
    by angles that grow with their position.

    References:
        Vaswani et al. (2017), section 3.2; Su et al. (2021), RoFormer, section 3.2; Ainslie et al. (2023), GQA.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        is_causal: bool = False,
        is_rotary: bool = False,
        context: int | None = None,
        bias: bool = True,
        is_out_biased: bool | None = None,
    ) -> None:
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        if width % heads or heads % kv_heads or (is_rotary and (width // heads) % 2):
            raise ValueError(
                f"attention of width {width} with {heads} heads and {kv_heads} key-value heads: the width must be a "
                "multiple of the heads, and these of the key-value heads; rotary positions need heads of even size"
            )
        self.size, self.is_causal, self.is_rotary = width // heads, is_causal, is_rotary
        self.query = nn.Linear(width, width, bias=bias)
        self.key = nn.Linear(context or width, kv_heads * self.size, bias=bias)
        self.value = nn.Linear(context or width, kv_heads * self.size, bias=bias)
        self.out = nn.Linear(width, width, bias=bias if is_out_biased is None else is_out_biased)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        source = x if context is None else context
        pairs = ((self.query, x), (self.key, source), (self.value, source))
        q, k, v = (layer(read).unflatten(-1, (-1, self.size)).transpose(1, 2) for layer, read in pairs)
        if self.is_rotary:
            q, k = rotary(q), rotary(k)
        is_grouped = q.shape[1] != k.shape[1]
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal, enable_gqa=is_grouped)
        return self.out(mixed.transpose(1, 2).flatten(2))


def rotary(x: Tensor, base: float = 10_000.0) -> Tensor:
    """Rotate the pair (i, i + d/2) on the last axis of `[batch, head, token, d]` by `token * base ** (-2 i / d)`."""
    half = x.shape[-1] // 2
    frequencies = base ** (-torch.arange(half, dtype=x.dtype, device=x.device) / half)
    angles = torch.arange(x.shape[-2], dtype=x.dtype, device=x.device).unsqueeze(-1) * frequencies
    cos, sin = angles.cos(), angles.sin()
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class FeedForward(nn.Module):
    """`x -> down gelu(up x)`."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.gelu(self.up(x)))


class GatedFeedForward(nn.Module):
    """`x -> down (silu(gate x) * up x)`, without biases.

    References:
        Shazeer (2020), GLU variants improve transformer.
    """

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class PreNormBlock(nn.Module):
    """`x -> x + attention(norm(x))`, then `x -> x + feed_forward(norm(x))`."""

    def __init__(
        self, width: int, attention: nn.Module, feed_forward: nn.Module, norm: Callable[[int], nn.Module]
    ) -> None:
        super().__init__()
        self.attention_norm, self.attention = norm(width), attention
        self.feed_forward_norm, self.feed_forward = norm(width), feed_forward

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class GPT(nn.Module):
    """A language model in the style of GPT-2 with an untied head: token ids `[batch, token]` to logits.

    The model has learned positions and GELU. A LayerNorm precedes each attention layer, each MLP layer, and the head.

    References:
        Radford et al. (2019), Language models are unsupervised multitask learners, section 2.3.
    """

    def __init__(self, symbols: int, context: int, *, width: int = 64, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(symbols, width)
        self.positions = nn.Parameter(torch.zeros(context, width))
        self.blocks = nn.Sequential(
            *(
                PreNormBlock(
                    width, Attention(width, heads, is_causal=True), FeedForward(width, 4 * width), nn.LayerNorm
                )
                for _ in range(layers)
            )
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, symbols, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


class Llama(nn.Module):
    """A language model in the style of Llama with an untied head: token ids `[batch, token]` to logits.

    The model has RMSNorm, rotary embeddings, gated MLPs (SwiGLU), grouped-query attention, and no biases.

    References:
        Touvron et al. (2023), Llama 2, section 2.2.
    """

    def __init__(self, symbols: int, *, width: int = 64, layers: int = 2, heads: int = 4, kv_heads: int = 2) -> None:
        super().__init__()
        hidden = 8 * width // 3
        self.embedding = nn.Embedding(symbols, width)
        self.blocks = nn.Sequential(
            *(
                PreNormBlock(
                    width,
                    Attention(width, heads, kv_heads=kv_heads, is_causal=True, is_rotary=True, bias=False),
                    GatedFeedForward(width, hidden),
                    rms_norm,
                )
                for _ in range(layers)
            )
        )
        self.norm = rms_norm(width)
        self.head = nn.Linear(width, symbols, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embedding(tokens))))


def rms_norm(width: int) -> nn.RMSNorm:
    """Return RMSNorm with the constant under the root that LayerNorm has by default."""
    return nn.RMSNorm(width, eps=1e-5)


class ViT(nn.Module):
    """A vision transformer with a class token: images `[batch, channel, y, x]` to logits.

    Images have sides of `image` pixels and are split into square patches with sides of `patch` pixels.

    References:
        Dosovitskiy et al. (2021), An image is worth 16x16 words, section 3.1.
    """

    def __init__(
        self,
        image: int = 28,
        patch: int = 7,
        *,
        channels: int = 1,
        classes: int = 10,
        width: int = 64,
        layers: int = 2,
        heads: int = 4,
    ) -> None:
        super().__init__()
        if image % patch:
            raise ValueError(f"images of {image} pixels cannot be cut into patches of {patch}; choose a divisor")
        self.patches = nn.Conv2d(channels, width, patch, stride=patch)
        self.start = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1 + (image // patch) ** 2, width))
        self.blocks = nn.Sequential(
            *(
                PreNormBlock(width, Attention(width, heads), FeedForward(width, 4 * width), nn.LayerNorm)
                for _ in range(layers)
            )
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.start.expand(len(x), -1, -1), x], 1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])


def initialize_transformer(module: GPT | Llama | ViT, generator: torch.Generator | None = None) -> Params:
    """Sample the initial parameters of a transformer.

    Weights are normal with standard deviation 1/sqrt(fan in). Weights of layers that write to the residual stream are
    divided by the square root of the number of such layers. Embeddings and positions are normal with standard deviation
    0.1. Biases are zero, and gains are one.

    Returns:
        New parameters. The parameters of the given module are not changed.
    """
    generator = given_or_seed(generator)
    params = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    writers = 2 * len(module.blocks)
    for prefix, layer in module.named_modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            is_writer = prefix.endswith((".out", ".down"))
            deviation = 1 / math.sqrt(layer.weight[0].numel() * (writers if is_writer else 1))
            params[f"{prefix}.weight"].normal_(0, deviation, generator=generator)
            if layer.bias is not None:
                params[f"{prefix}.bias"].zero_()
        elif isinstance(layer, nn.LayerNorm | nn.RMSNorm):
            params[f"{prefix}.weight"].fill_(1)
            if isinstance(layer, nn.LayerNorm):
                params[f"{prefix}.bias"].zero_()
    for name in ("embedding.weight", "positions", "start"):
        if name in params:
            params[name].normal_(0, 0.1, generator=generator)
    return params

"""A diffusion UNet: residual blocks with group normalization, attention, and skip concatenations."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from regauge.nets.transformer import Attention


class TimeEmbedding(nn.Module):
    """Cosines and sines of the time step at geometric frequencies, then two linear layers."""

    def __init__(self, channels: int, features: int) -> None:
        super().__init__()
        self.channels = channels
        self.expand = nn.Linear(channels, features)
        self.project = nn.Linear(features, features)

    def forward(self, time: Tensor) -> Tensor:
        half = self.channels // 2
        steps = torch.arange(half, dtype=self.expand.weight.dtype, device=time.device)
        angles = time[:, None].to(steps.dtype) * torch.exp(-math.log(10_000) * steps / half)
        waves = torch.cat([angles.cos(), angles.sin()], -1)
        return self.project(functional.silu(self.expand(waves)))


class ResBlock(nn.Module):
    """Two convolutions after group normalization and SiLU, where the time embedding is added between the
    convolutions.
    """

    def __init__(self, in_channels: int, out_channels: int, features: int, groups: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(groups, in_channels)
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, padding=1)
        self.time = nn.Linear(features, out_channels)
        self.norm2 = nn.GroupNorm(groups, out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1)
        self.shortcut = nn.Conv2d(in_channels, out_channels, 1) if in_channels != out_channels else nn.Identity()

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        inner = self.conv1(functional.silu(self.norm1(x)))
        inner = inner + self.time(functional.silu(embedding))[:, :, None, None]
        return self.shortcut(x) + self.conv2(functional.silu(self.norm2(inner)))


class TransformerBlock(nn.Module):
    """Self-attention, attention to a context if there is one, and a gated feed-forward layer (GEGLU)."""

    def __init__(self, features: int, heads: int, context: int | None) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(features)
        self.attend = Attention(features, heads, bias=False, is_out_biased=True)
        self.norm2 = nn.LayerNorm(features) if context is not None else None
        self.cross = None
        if context is not None:
            self.cross = Attention(features, heads, context=context, bias=False, is_out_biased=True)
        self.norm3 = nn.LayerNorm(features)
        self.expand = nn.Linear(features, 8 * features)
        self.project = nn.Linear(4 * features, features)

    def forward(self, x: Tensor, context: Tensor | None) -> Tensor:
        x = x + self.attend(self.norm1(x))
        if self.norm2 is not None and self.cross is not None:
            x = x + self.cross(self.norm2(x), context)
        value, gate = self.expand(self.norm3(x)).chunk(2, -1)
        return x + self.project(value * functional.gelu(gate))


class SpatialTransformer(nn.Module):
    """Transformer blocks on the positions of an image, between two linear layers. The result is added to the image."""

    def __init__(self, channels: int, heads: int, depth: int, context: int | None, groups: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(groups, channels)
        self.proj_in = nn.Linear(channels, channels)
        self.blocks = nn.ModuleList(TransformerBlock(channels, heads, context) for _ in range(depth))
        self.proj_out = nn.Linear(channels, channels)

    def forward(self, x: Tensor, context: Tensor | None) -> Tensor:
        tokens = self.proj_in(self.norm(x).flatten(2).transpose(1, 2))
        for block in self.blocks:
            tokens = block(tokens, context)
        return x + self.proj_out(tokens).transpose(1, 2).unflatten(2, x.shape[2:])


class UNet(nn.Module):
    """Predicts an image from a noisy image, the time step and optionally a context of tokens.

    Args:
        in_channels: Channels of the image, in and out.
        channels: Width of each resolution, from fine to coarse.
        blocks: Residual blocks per resolution on the way down (one more on the way up).
        depths: Transformer blocks after each residual block of a resolution; 0 for none.
        head_size: Features of an attention head.
        context: Features of the context tokens, or None for self-attention only.
        groups: Groups of group normalization.

    References:
        Ho et al. (2020), appendix B; Podell et al. (2023), section 2.1, for the transformer depths of SDXL.
    """

    def __init__(
        self,
        in_channels: int = 3,
        *,
        channels: Sequence[int] = (64, 128, 256),
        blocks: int = 2,
        depths: Sequence[int] = (0, 1, 1),
        head_size: int = 32,
        context: int | None = None,
        groups: int = 32,
    ) -> None:
        super().__init__()
        if len(channels) != len(depths):
            raise ValueError(
                f"channels names {len(channels)} resolutions and depths {len(depths)}; give one depth per resolution"
            )
        features = 4 * channels[0]
        self.time = TimeEmbedding(channels[0], features)
        self.stem = nn.Conv2d(in_channels, channels[0], 3, padding=1)

        def attention(width: int, depth: int) -> nn.Module | None:
            return SpatialTransformer(width, width // head_size, depth, context, groups) if depth else None

        self.down, self.down_attention = nn.ModuleList(), nn.ModuleList()
        self.shrink, self.grow = nn.ModuleList(), nn.ModuleList()
        self.up, self.up_attention = nn.ModuleList(), nn.ModuleList()
        here, skips = channels[0], [channels[0]]
        last = len(channels) - 1
        for k, (width, depth) in enumerate(zip(channels, depths, strict=True)):
            for _ in range(blocks):
                self.down.append(ResBlock(here, width, features, groups))
                self.down_attention.append(attention(width, depth) or nn.Identity())
                here = width
                skips.append(here)
            if k < last:
                self.shrink.append(nn.Conv2d(here, here, 3, 2, padding=1))
                skips.append(here)
        self.middle1 = ResBlock(here, here, features, groups)
        self.middle_attention = attention(here, depths[-1]) or nn.Identity()
        self.middle2 = ResBlock(here, here, features, groups)
        for k in reversed(range(len(channels))):
            for _ in range(blocks + 1):
                self.up.append(ResBlock(here + skips.pop(), channels[k], features, groups))
                self.up_attention.append(attention(channels[k], depths[k]) or nn.Identity())
                here = channels[k]
            if k > 0:
                self.grow.append(nn.Conv2d(here, here, 3, padding=1))
        self.norm = nn.GroupNorm(groups, here)
        self.head = nn.Conv2d(here, in_channels, 3, padding=1)
        self.blocks, self.levels = blocks, len(channels)

    def forward(self, x: Tensor, time: Tensor, context: Tensor | None = None) -> Tensor:
        embedding = self.time(time)
        x = self.stem(x)
        skips = [x]
        for k in range(self.levels):
            for i in range(k * self.blocks, (k + 1) * self.blocks):
                x = _attend(self.down_attention[i], self.down[i](x, embedding), context)
                skips.append(x)
            if k < self.levels - 1:
                x = self.shrink[k](x)
                skips.append(x)
        x = _attend(self.middle_attention, self.middle1(x, embedding), context)
        x = self.middle2(x, embedding)
        for k in range(self.levels):
            for i in range(k * (self.blocks + 1), (k + 1) * (self.blocks + 1)):
                x = self.up[i](torch.cat([x, skips.pop()], 1), embedding)
                x = _attend(self.up_attention[i], x, context)
            if k < self.levels - 1:
                x = self.grow[k](functional.interpolate(x, scale_factor=2.0, mode="nearest"))
        return self.head(functional.silu(self.norm(x)))


def _attend(block: nn.Module, x: Tensor, context: Tensor | None) -> Tensor:
    return block(x, context) if isinstance(block, SpatialTransformer) else x

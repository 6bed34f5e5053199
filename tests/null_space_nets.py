"""Architectures with few parameters, whose null space is compared with the discovered group."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import transformers
from models import Recurrent
from torch import Tensor, nn
from torch.nn import functional
from translation_nets import NETS

from regauge.nets.siren import Siren
from regauge.nets.transformer import GPT, Llama


@dataclass(frozen=True)
class NullSpaceCase:
    """A network, its inputs, and its family of architectures in the table.

    Attributes:
        limit: The part of the null space that discovery is known not to find, and its number of dimensions.
    """

    family: str
    module: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Any, ...]]
    kwargs: dict[str, Any] = field(default_factory=dict)
    outputs: Any = None
    limit: tuple[str, int] = ("", 0)


def normal(*shape: int) -> Callable[[], tuple[Any, ...]]:
    return lambda: (torch.randn(shape),)


def words(count: int = 21, length: int = 5) -> Callable[[], tuple[Any, ...]]:
    return lambda: (
        torch.randint(0, count, (2, length))
        .index_fill(0, torch.tensor(0), 0)
        .index_fill(1, torch.tensor(0), count - 1),
    )


class Residual(nn.Module):
    """The stem and a residual block of a CNN, with a norm after each convolution."""

    def __init__(self, norm: Callable[[], nn.Module], act: Callable[[Tensor], Tensor] = functional.relu) -> None:
        super().__init__()
        self.stem, self.first = nn.Conv2d(2, 4, 3, padding=1), norm()
        self.one, self.second = nn.Conv2d(4, 4, 3, padding=1), norm()
        self.two, self.third = nn.Conv2d(4, 4, 3, padding=1), norm()
        self.head, self.act = nn.Linear(4, 3), act

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.first(self.stem(x)))
        x = self.act(x + self.third(self.two(self.act(self.second(self.one(x))))))
        out: Tensor = self.head(x.mean((-2, -1)))
        return out


class Inverted(nn.Module):
    """An inverted residual with expansion, depthwise convolution, squeeze-and-excitation and projection, as in mobile
    networks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 3, 3, padding=1)
        self.up, self.wise, self.down = nn.Conv2d(3, 6, 1), nn.Conv2d(6, 6, 3, padding=1, groups=6), nn.Conv2d(6, 3, 1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(n) for n in (3, 6, 6, 3))
        self.squeeze, self.excite, self.head = nn.Linear(6, 4), nn.Linear(4, 6), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.hardswish(self.norms[0](self.stem(x)))
        y = functional.hardswish(self.norms[2](self.wise(functional.hardswish(self.norms[1](self.up(x))))))
        y = y * self.excite(functional.silu(self.squeeze(y.mean((-2, -1))))).sigmoid()[..., None, None]
        out: Tensor = self.head(functional.silu(x + self.norms[3](self.down(y))).mean((-2, -1)))
        return out


class ConvNext(nn.Module):
    """A block of ConvNeXt: depthwise convolution, LayerNorm over channels, two layers, layer scale."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.wise = nn.Conv2d(3, 6, 2, 2), nn.Conv2d(6, 6, 3, padding=1, groups=6)
        self.first, self.norm, self.last = nn.LayerNorm(6), nn.LayerNorm(6), nn.LayerNorm(6)
        self.up, self.down, self.scale = nn.Linear(6, 8), nn.Linear(8, 6), nn.Parameter(torch.randn(6))
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.stem(x).permute(0, 2, 3, 1))
        y = self.norm(self.wise(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1))
        x = x + self.scale * self.down(functional.gelu(self.up(y)))
        out: Tensor = self.head(self.last(x.mean((1, 2))))
        return out


class Dense(nn.Module):
    """Concatenated features of all earlier layers, as in DenseNet."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(2 + 3 * k, 3, 3, padding=1) for k in range(3))
        self.head = nn.Linear(11, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cat([x, functional.elu(layer(x))], 1)
        out: Tensor = self.head(x.mean((-2, -1)))
        return out


class UNet(nn.Module):
    """A small U-Net with group norm, a time embedding and a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.norm, self.time = nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Linear(3, 4)
        self.down, self.middle = nn.Conv2d(4, 4, 2, 2), nn.Conv2d(4, 4, 3, padding=1)
        self.second, self.up, self.out = (
            nn.GroupNorm(2, 4),
            nn.ConvTranspose2d(4, 4, 2, 2),
            nn.Conv2d(8, 2, 3, padding=1),
        )

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        x = self.into(x) + self.time(time)[..., None, None]
        y = functional.silu(self.norm(x))
        y = functional.silu(self.second(self.middle(self.down(y))))
        out: Tensor = self.out(torch.cat([functional.silu(self.up(y)), x], 1))
        return out


class Film(nn.Module):
    """A neural field whose units are scaled and shifted by a code."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.out = nn.Linear(2, 6), nn.Linear(6, 6), nn.Linear(6, 1)
        self.scale, self.shift = nn.Linear(3, 6), nn.Linear(3, 6)

    def forward(self, x: Tensor, code: Tensor) -> Tensor:
        x = torch.sin(self.one(x))
        out: Tensor = self.out(torch.sin(self.scale(code) * self.two(x) + self.shift(code)))
        return out


class Adaptive(nn.Module):
    """A block of a diffusion transformer, where a code determines shifts, factors and gates."""

    def __init__(self) -> None:
        super().__init__()
        self.code, self.last = nn.Linear(3, 24), nn.Linear(3, 8)
        self.start, self.qkv, self.back = nn.Linear(2, 4), nn.Linear(4, 12), nn.Linear(4, 4)
        self.up, self.down, self.out = nn.Linear(4, 5), nn.Linear(5, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, code: Tensor) -> Tensor:
        def normed(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
            return functional.layer_norm(x, (4,), eps=1e-6) * (1 + scale) + shift

        code, x = functional.silu(code).unsqueeze(1), self.start(x)
        shift, scale, gate, shift_2, scale_2, gate_2 = self.code(code).chunk(6, -1)
        q, k, v = self.qkv(normed(x, scale, shift)).chunk(3, -1)
        x = x + gate * self.back((q @ k.mT / 2).softmax(-1) @ v)
        x = x + gate_2 * self.down(functional.gelu(self.up(normed(x, scale_2, shift_2))))
        shift, scale = self.last(code).chunk(2, -1)
        out: Tensor = self.out(normed(x, scale, shift))
        return out


class Gabor(nn.Module):
    """A neural field of sines multiplied by Gaussian bells, as in WIRE."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.out = nn.Linear(2, 6), nn.Linear(6, 6), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.one, self.two):
            x = layer(x)
            x = torch.sin(2 * x) * torch.exp(-x.square())
        out: Tensor = self.out(x)
        return out


class Fourier(nn.Module):
    """A neural field of random Fourier features with ReLU layers and a skip connection, as for radiance fields."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.randn(2, 4))
        self.one, self.two, self.out = nn.Linear(8, 6), nn.Linear(14, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.frequencies
        x = torch.cat([x.sin(), x.cos()], -1)
        out: Tensor = self.out(functional.softplus(self.two(torch.cat([x, functional.softplus(self.one(x))], -1))))
        return out


class Mixer(nn.Module):
    """A layer over tokens and a layer over channels."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(6, 5), nn.Linear(5, 3)
        self.tokens = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4))
        self.channels = nn.Sequential(nn.Linear(5, 6), nn.GELU(), nn.Linear(6, 5))
        self.one, self.two, self.three = nn.LayerNorm(5), nn.LayerNorm(5), nn.LayerNorm(5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        x = x + self.tokens(self.one(x).mT).mT
        x = x + self.channels(self.two(x))
        out: Tensor = self.out(self.three(x).mean(1))
        return out


class DeepSet(nn.Module):
    """A function of a set: it reads each element separately, their mean, and their maximum."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.Sequential(nn.Linear(3, 6), nn.GELU(), nn.Linear(6, 5))
        self.whole = nn.Sequential(nn.Linear(5, 6), nn.GELU(), nn.Linear(6, 2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.whole(self.each(x).mean(1))
        return out


class Messages(nn.Module):
    """Two rounds of messages over the edges of a graph, which is given as a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.other = (
            nn.ModuleList([nn.Linear(4, 5), nn.Linear(5, 5)]),
            nn.ModuleList([nn.Linear(4, 5), nn.Linear(5, 5)]),
        )
        self.out = nn.Linear(5, 2)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        for own, other in zip(self.own, self.other, strict=True):
            x = functional.silu(own(x) + edges @ other(x))
        out: Tensor = self.out(x)
        return out


class LinearAttention(nn.Module):
    """Attention without softmax, with positive features of queries and keys."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(6, 6) for _ in range(4))
        self.norm, self.out = nn.LayerNorm(6), nn.Linear(6, 7)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = functional.elu(self.q(y)) + 1, functional.elu(self.k(y)) + 1, self.v(y)
        y = (q @ (k.mT @ v)) / (q * k.sum(1, keepdim=True)).sum(-1, keepdim=True)
        out: Tensor = self.out(x + self.o(y))
        return out


class DecayingStates(nn.Module):
    """States that decay by a factor of each head, where a convolution along time reads one projection (Mamba-2)."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(4, 12, bias=False), nn.Linear(4, 4, bias=False)
        self.conv = nn.Conv1d(10, 10, 2, groups=10, padding=1)
        self.speed, self.skip = nn.Parameter(torch.randn(2)), nn.Parameter(torch.randn(2))

    def forward(self, x: Tensor) -> Tensor:
        joined, steps = self.into(x).split([10, 2], -1)
        joined = functional.silu(self.conv(joined.mT)[..., : x.shape[1]].mT)
        values, keys, queries = joined.split([4, 3, 3], -1)
        values, steps = values.unflatten(-1, (2, 2)), functional.softplus(steps)
        state, read = x.new_zeros(len(x), 2, 2, 3), []
        for t in range(x.shape[1]):
            written = torch.einsum("bh,bhp,bn->bhpn", steps[:, t], values[:, t], keys[:, t])
            state = state * (-steps[:, t] * self.speed.exp()).exp()[..., None, None] + written
            read.append(torch.einsum("bhpn,bn->bhp", state, queries[:, t]))
        out: Tensor = self.out((torch.stack(read, 1) + self.skip[:, None] * values).flatten(-2))
        return out


class ExponentialFactors(nn.Module):
    """Factors of a branch, of channels and of the outputs, which are exponentials of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.out = nn.Linear(6, 5), nn.Linear(5, 6), nn.Linear(6, 5), nn.Linear(5, 3)
        self.branch, self.gain, self.temperature = (nn.Parameter(torch.zeros(n)) for n in ((5,), (5,), ()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        x = x + (3 * self.branch).exp() * self.c(functional.silu(self.b(x)))
        out: Tensor = self.out((x * (-self.gain).exp()).tanh()) * self.temperature.exp()
        return out


class CrossAttention(nn.Module):
    """Attention of a few latent rows to a sequence, as in Perceiver."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.q, self.k, self.v, self.o = (
            nn.Parameter(torch.randn(3, 6)),
            *(nn.Linear(6, 6) for _ in range(4)),
        )
        self.out = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(self.rows), self.k(x), self.v(x)
        out: Tensor = self.out(self.o((q @ k.mT / 2).softmax(-1) @ v))
        return out


class Gated(nn.Module):
    """A gated layer after a norm, as in SwiGLU blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.norm = nn.Linear(7, 6), nn.RMSNorm(6, eps=1e-6)
        self.gate, self.up, self.down, self.out = nn.Linear(6, 5), nn.Linear(6, 5), nn.Linear(5, 6), nn.Linear(6, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        y = self.norm(x)
        out: Tensor = self.out(x + self.down(functional.silu(self.gate(y)) * self.up(y)))
        return out


def mlp(act: Callable[[], nn.Module], widths: tuple[int, ...] = (4, 6, 5, 3)) -> nn.Module:
    layers: list[nn.Module] = []
    for one, two in pairwise(widths):
        layers += [nn.Linear(one, two), act()]
    return nn.Sequential(*layers[:-1])


TEXT: dict[str, Any] = {"vocab_size": 21, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
DECODER = TEXT | {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "max_position_embeddings": 5,
    "tie_word_embeddings": False,
}
VISION = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "num_channels": 3}
VISION |= {"image_size": 4, "patch_size": 2, "num_labels": 10}
ROUTED = {"moe_intermediate_size": 4, "num_experts_per_tok": 2, "num_local_experts": 3, "num_experts": 3}
PAIR = TEXT | {
    "vocab_size": 13,
    "pad_token_id": 0,
    "d_model": 8,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
}
PAIR |= {"decoder_attention_heads": 2, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "max_position_embeddings": 5}
PAIR |= {"decoder_start_token_id": 0}


def hugging(model: str, config: str, **settings: Any) -> nn.Module:
    built = getattr(transformers, model)(getattr(transformers, config)(**settings, attn_implementation="eager")).eval()
    if hasattr(built, "set_experts_implementation"):
        built.set_experts_implementation("batched_mm")
    module: nn.Module = built
    return module


def causal(family: str, **settings: Any) -> NullSpaceCase:
    make = partial(hugging, f"{family}ForCausalLM", f"{family}Config", **(DECODER | settings))
    inputs = words(settings.get("vocab_size", 21))
    return NullSpaceCase("decoders of transformers", make, inputs, {"use_cache": False}, "logits")


def own(family: str, module: Callable[[], nn.Module], *inputs: Callable[[], tuple[Any, ...]]) -> NullSpaceCase:
    return NullSpaceCase(family, module, lambda: tuple(one for make in inputs for one in make()))


def image(family: str, **settings: Any) -> NullSpaceCase:
    make = partial(hugging, f"{family}ForImageClassification", f"{family}Config", **settings)
    return NullSpaceCase(
        "vision transformers", make, normal(2, 3, settings["image_size"], settings["image_size"]), {}, "logits"
    )


def _example(name: str) -> tuple[Any, ...]:
    return (NETS[name][1](),)


SMALL = (
    *(("attention", name) for name in ("decoder", "tied decoder", "sink", "patches", "relative positions")),
    *(("attention", name) for name in ("fused attention", "encoder", "encoder, norms first")),
    *(("attention", name) for name in ("causal linear attention", "performer", "talking heads")),
    *(
        ("plain networks", name)
        for name in ("linear layers", "parallel", "two biases", "two norms", "means", "writes weights")
    ),
    *(("vision transformers", name) for name in ("windows",)),
    *(("mixtures", name) for name in ("mixture", "mixture of the largest")),
    *(("plain networks", name) for name in ("rows of classes", "maxout", "FiLM")),
    *(("CNNs", name) for name in ("batch norm", "group norm", "fused FiLM", "context")),
)
"""Networks from the test of translations, each with its family of architectures."""
PICTURES = normal(2, 2, 5, 5)
# Each is small, so that all of its values can be varied.
CASES: dict[str, NullSpaceCase] = {
    **{f"small {name}": own(family, NETS[name][0], partial(_example, name)) for family, name in SMALL},
    "MLP, tanh": own("plain networks", lambda: mlp(nn.Tanh), normal(4, 4)),
    "MLP, GELU": own("plain networks", lambda: mlp(nn.GELU), normal(4, 4)),
    "MLP, leaky ReLU": own("plain networks", lambda: mlp(nn.LeakyReLU), normal(4, 4)),
    "linear bottleneck": own("plain networks", lambda: mlp(nn.Identity, (5, 3, 5)), normal(4, 5)),
    "gated layer, RMSNorm": own("plain networks", Gated, normal(5, 7)),
    "mixer": own("plain networks", Mixer, normal(3, 4, 6)),
    "set": own("sets and graphs", DeepSet, normal(3, 5, 3)),
    "messages": own("sets and graphs", Messages, normal(2, 5, 4), normal(2, 5, 5)),
    "CNN, ReLU": own(
        "CNNs",
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(20, 3)
        ),
        normal(2, 2, 6, 6),
    ),
    "ResNet, batch norm": own("CNNs", lambda: Residual(partial(nn.BatchNorm2d, 4)), PICTURES),
    "ResNet, group norm": own("CNNs", lambda: Residual(partial(nn.GroupNorm, 2, 4), functional.silu), PICTURES),
    "ResNet, instance norm": own(
        "CNNs", lambda: Residual(partial(nn.InstanceNorm2d, 4, affine=True), functional.silu), PICTURES
    ),
    "inverted residual with excitation": own("CNNs", Inverted, PICTURES),
    "ConvNeXt": own("CNNs", ConvNext, normal(2, 3, 6, 6)),
    "DenseNet": own("CNNs", Dense, PICTURES),
    "U-Net": own("U-Nets", UNet, normal(2, 2, 8, 8), normal(2, 3)),
    "RNN, tanh": own("recurrent networks", lambda: Recurrent(nn.RNN, 4), normal(2, 5, 5)),
    "RNN, ReLU": own("recurrent networks", lambda: Recurrent(nn.RNN, 4, nonlinearity="relu"), normal(2, 5, 5)),
    "LSTM of two layers": own("recurrent networks", lambda: Recurrent(nn.LSTM, 4), normal(2, 5, 5)),
    "GRU both ways": own("recurrent networks", lambda: Recurrent(nn.GRU, 3, bidirectional=True), normal(2, 5, 5)),
    "SIREN": own("neural fields", lambda: Siren(2, 6, 1, depth=3), normal(7, 2)),
    "field with a code": own("neural fields", Film, normal(7, 2), normal(7, 3)),
    "block of a diffusion transformer": own("vision transformers", Adaptive, normal(2, 3, 2), normal(2, 3)),
    "WIRE": own("neural fields", Gabor, normal(7, 2)),
    "random features with a skip": own("neural fields", Fourier, normal(7, 2)),
    "linear attention": own("attention", LinearAttention, normal(3, 5, 6)),
    "exponential factors": own("plain networks", ExponentialFactors, normal(5, 6)),
    "decaying states": own("state space models", DecayingStates, normal(2, 4, 4)),
    "cross attention": own("attention", CrossAttention, normal(3, 5, 6)),
    "GPT": own("attention", lambda: GPT(21, 5, width=8, layers=1, heads=2), words()),
    "Llama": own("attention", lambda: Llama(21, width=8, layers=1, heads=2, kv_heads=1), words()),
    "GPT-2, tied": NullSpaceCase(
        "decoders of transformers",
        partial(
            hugging, "GPT2LMHeadModel", "GPT2Config", **TEXT, n_embd=8, n_layer=1, n_head=2, n_inner=8, n_positions=5
        ),
        words(),
        {"use_cache": False},
        "logits",
    ),
    "GPT-2, untied": NullSpaceCase(
        "decoders of transformers",
        partial(
            hugging,
            "GPT2LMHeadModel",
            "GPT2Config",
            **TEXT,
            n_embd=8,
            n_layer=1,
            n_head=2,
            n_inner=8,
            n_positions=5,
            tie_word_embeddings=False,
        ),
        words(),
        {"use_cache": False},
        "logits",
    ),
    "Llama of transformers": causal("Llama"),
    "Llama, tied": causal("Llama", tie_word_embeddings=True),
    "Qwen2": causal("Qwen2"),
    "Qwen3": causal("Qwen3"),
    "Gemma2": causal("Gemma2"),
    "Phi": causal("Phi", vocab_size=40, num_attention_heads=1),
    "GPT-NeoX": causal("GPTNeoX", vocab_size=40, num_attention_heads=1, rotary_pct=0.5),
    "BLOOM": NullSpaceCase(
        "decoders of transformers",
        partial(hugging, "BloomForCausalLM", "BloomConfig", **TEXT, hidden_size=8, n_layer=1, n_head=2),
        words(),
        {"use_cache": False},
        "logits",
    ),
    "OPT": causal("OPT", ffn_dim=8, word_embed_proj_dim=8),
    "Cohere": causal("Cohere", vocab_size=40),
    "OLMo2": causal("Olmo2"),
    "StableLM": causal("StableLm", head_dim=8, num_attention_heads=1, partial_rotary_factor=0.5),
    "Mixtral": causal("Mixtral", **ROUTED),
    "Qwen3 of experts": causal("Qwen3Moe", **ROUTED),
    "gpt-oss": causal("GptOss", **ROUTED),
    "DeepSeek-V3": causal(
        "DeepseekV3",
        num_key_value_heads=2,
        kv_lora_rank=4,
        q_lora_rank=4,
        qk_nope_head_dim=4,
        qk_rope_head_dim=4,
        v_head_dim=4,
        moe_intermediate_size=4,
        num_experts_per_tok=2,
        n_routed_experts=4,
        n_shared_experts=1,
        first_k_dense_replace=0,
        n_group=1,
        topk_group=1,
    ),
    "Mamba": NullSpaceCase(
        "state space models",
        partial(
            hugging,
            "MambaForCausalLM",
            "MambaConfig",
            **TEXT,
            hidden_size=8,
            num_hidden_layers=1,
            state_size=2,
            expand=1,
            time_step_min=0.5,
            time_step_max=2.0,
        ),
        words(),
        {"use_cache": False},
        "logits",
    ),
    "Mamba2": NullSpaceCase(
        "state space models",
        partial(
            hugging,
            "Mamba2ForCausalLM",
            "Mamba2Config",
            **TEXT,
            hidden_size=8,
            num_hidden_layers=1,
            state_size=2,
            expand=1,
            num_heads=2,
            head_dim=4,
            n_groups=1,
            chunk_size=4,
        ),
        words(),
        {"use_cache": False},
        "logits",
    ),
    "RWKV": NullSpaceCase(
        "state space models",
        partial(
            hugging,
            "RwkvForCausalLM",
            "RwkvConfig",
            **TEXT,
            hidden_size=8,
            num_hidden_layers=2,
            attention_hidden_size=8,
            intermediate_size=8,
            context_length=5,
        ),
        words(),
        {"use_cache": False},
        "logits",
    ),
    "BERT": NullSpaceCase(
        "encoders of transformers",
        partial(hugging, "BertForMaskedLM", "BertConfig", **(DECODER | {"type_vocab_size": 1})),
        words(),
        {},
        "logits",
    ),
    "ModernBERT": NullSpaceCase(
        "encoders of transformers",
        partial(
            hugging, "ModernBertForMaskedLM", "ModernBertConfig", **(DECODER | {"pad_token_id": 0, "vocab_size": 40})
        ),
        words(40),
        {},
        "logits",
    ),
    "T5": NullSpaceCase(
        "encoders with decoders",
        partial(
            hugging,
            "T5ForConditionalGeneration",
            "T5Config",
            **(TEXT | {"pad_token_id": 0}),
            d_model=8,
            d_kv=4,
            d_ff=8,
            num_layers=1,
            num_heads=2,
            decoder_start_token_id=0,
            relative_attention_num_buckets=4,
        ),
        words(),
        {"decoder_input_ids": torch.arange(10).reshape(2, 5) * 2, "use_cache": False},
        "logits",
    ),
    "BART": NullSpaceCase(
        "encoders with decoders",
        partial(hugging, "BartForConditionalGeneration", "BartConfig", **PAIR),
        words(13),
        {"decoder_input_ids": torch.arange(10).reshape(2, 5) + 3, "use_cache": False},
        "logits",
    ),
    "ViT of transformers": image("ViT", **VISION),
    "Swin": image(
        "Swin",
        image_size=8,
        patch_size=2,
        num_channels=3,
        embed_dim=6,
        depths=[1],
        num_heads=[2],
        window_size=2,
        num_labels=8,
    ),
}
GAIN = "of a gain that is written onto the stream, and of rotations before and behind it"
PAIR = "of a scale and an angle of a rotary pair that is the only one of its head"
LIMITS = {
    "Cohere": ("of rotations behind the gain of a norm that the model writes itself", 21),
    "gpt-oss": ("of factors of units that are inside of a clamp", 24),
    "Phi": (PAIR, 2),
    "GPT-NeoX": (PAIR, 2),
    "ModernBERT": (GAIN, 1),
    "Swin": (GAIN, 1),
}
"""The numbers of dimensions, by architecture, that have a known cause but that discovery does not find."""
CASES |= {name: replace(CASES[name], limit=limit) for name, limit in LIMITS.items()}

"""Small networks with every family of translations, and with traps that resemble a family."""

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import regauge as rg
from regauge.core.chart import random_translation
from regauge.core.params import Params

EVERY = ("permutation", "sign", "scale", "shift", "linear", "translation")
"""All parts of an element except rotations behind gains."""


class Attention(nn.Module):
    """Attention written without torch's attention, before or after its norm. With a sink, the weights of values do not
    sum to one.
    """

    def __init__(self, *, is_post: bool = False, has_sink: bool = False, has_table: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))
        self.norm = nn.LayerNorm(8)
        self.is_post = is_post
        self.sink = nn.Parameter(torch.randn(2)) if has_sink else None
        self.table = nn.Parameter(torch.randn(9, 2)) if has_table else None
        self.register_buffer("index", torch.arange(5).unsqueeze(1) - torch.arange(5) + 4)

    def forward(self, x: Tensor) -> Tensor:
        read = x if self.is_post else self.norm(x)
        q, k, v = (part(read).unflatten(-1, (2, 4)).transpose(1, 2) for part in (self.q, self.k, self.v))
        scores = q @ k.mT / 2
        if self.table is not None:
            scores = scores + self.table[self.index].permute(2, 0, 1)
        if self.sink is not None:
            sink = self.sink.reshape(1, 2, 1, 1).expand(len(x), -1, x.shape[1], 1)
            weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        x = x + self.o((weights @ v).transpose(1, 2).flatten(2))
        return self.norm(x) if self.is_post else x


class Feedforward(nn.Module):
    """Two layers before or after a norm."""

    def __init__(self, *, is_post: bool = False) -> None:
        super().__init__()
        self.up, self.down, self.norm, self.is_post = nn.Linear(8, 12), nn.Linear(12, 8), nn.LayerNorm(8), is_post

    def forward(self, x: Tensor) -> Tensor:
        if self.is_post:
            return self.norm(x + self.down(functional.gelu(self.up(x))))
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Tokens(nn.Module):
    """Token and position embeddings, blocks, and a separate or tied head."""

    def __init__(self, *blocks: nn.Module, is_post: bool = False, is_tied: bool = False) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(9, 8), nn.Embedding(5, 8)
        self.blocks, self.norm = nn.Sequential(*blocks), nn.Identity() if is_post else nn.LayerNorm(8)
        self.head = nn.Linear(8, 9, bias=not is_tied)
        if is_tied:
            self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.blocks(self.tokens(x) + self.positions(torch.arange(x.shape[1])))))
        return out


class Patches(nn.Module):
    """A vision transformer: patches and a class token are concatenated, and positions are added to both."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.first = nn.Conv2d(2, 8, 2, 2), nn.Parameter(torch.randn(1, 1, 8))
        self.positions, self.block = nn.Parameter(torch.randn(1, 5, 8)), nn.Sequential(Attention(), Feedforward())
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patch(x).flatten(2).mT
        x = torch.cat([self.first.expand(len(x), -1, -1), patches], 1) + self.positions
        out: Tensor = self.head(self.norm(self.block(x)))
        return out


class Mixture(nn.Module):
    """Experts weighted by a softmax of a router."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(6, 3)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(6, 4), nn.GELU(), nn.Linear(4, 2)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        return torch.stack([weights[:, k, None] * expert(x) for k, expert in enumerate(self.experts)]).sum(0)


class TopMixture(Mixture):
    """Two experts of each row, weighted by a softmax of the largest scores alone."""

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x)
        largest, chosen = scores.topk(2, dim=-1)
        weights = torch.zeros_like(scores).scatter(1, chosen, largest.softmax(-1))
        return torch.stack([weights[:, k, None] * expert(x) for k, expert in enumerate(self.experts)]).sum(0)


class Parallel(nn.Module):
    """Two biases that are added before any layer reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(4, 5), nn.Linear(4, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(functional.gelu(self.first(x) + self.second(x.square())))
        return out


class NormByHand(nn.Module):
    """A LayerNorm written with means, whose gain is a parameter plus a number."""

    def __init__(self, added: float = 0.0) -> None:
        super().__init__()
        self.added = added
        self.into, self.out = nn.Linear(4, 6), nn.Linear(6, 3)
        self.gain, self.bias = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        x = x - x.mean(-1, keepdim=True)
        x = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        gain = self.added + self.gain if self.added else self.gain
        out: Tensor = self.out(x * gain + self.bias)
        return out


class LayerScale(nn.Module):
    """A block whose outputs are multiplied by a gain before they are added to a stream."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.block, self.scale = nn.Linear(4, 8), nn.Linear(8, 8), nn.Parameter(torch.randn(8))
        self.inner, self.norm, self.out = nn.LayerNorm(8), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        out: Tensor = self.out(self.norm(x + self.scale * self.block(functional.gelu(self.inner(x)))))
        return out


class Residual(nn.Module):
    """Convolutions with batch normalization, one of them at a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 1), nn.Conv2d(2, 4, 3)
        self.norms, self.out = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(3)), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.norms
        y = second(self.second(functional.relu(first(self.first(x))))) + third(self.third(x))
        out: Tensor = self.out(functional.relu(y).mean((2, 3)))
        return out


class Pooled(nn.Module):
    """Means over positions between a writer and its norm, and between a norm and its reader."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.first, self.reader = nn.Linear(9, 6), nn.LayerNorm(6), nn.Linear(6, 3)
        self.down, self.second, self.out = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.into(x))
        out: Tensor = self.reader(x.mean(1)) + self.out(self.second(self.down(functional.gelu(x)).mean(1)))
        return out


class Recurrent(nn.Module):
    """A recurrent layer with two biases for each gate."""

    def __init__(self, layer: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.layer, self.out = layer(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.layer(x)[0][:, -1])
        return out


class Rows(nn.Module):
    """Rows of a table before a recurrent layer and a cell. Optionally, rows are also the first state of the layer, a
    function changes the rows that the layer reads, or the cell reads zeros first.
    """

    def __init__(
        self, *, are_states: bool = False, has_start: bool = False, change: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        super().__init__()
        self.are_states, self.has_start, self.table = are_states, has_start, nn.Embedding(9, 3)
        self.change = change or nn.Identity()
        self.layer = nn.GRU(3, 3, batch_first=True, bidirectional=True)
        self.cell, self.out = nn.LSTMCell(9, 4), nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.table(x)
        first_state = rows[:, :2].transpose(0, 1).contiguous() if self.are_states else None
        states = self.layer(self.change(rows), first_state)[0][:, -x.shape[1] :]
        read = torch.cat([rows, states], -1)
        first, *others = [*[torch.zeros_like(read[:, 0])] * self.has_start, *read.unbind(1)]
        state = self.cell(first)
        for step in others:
            state = self.cell(step, state)
        out: Tensor = self.out(state[0])
        return out


class SelfAttention(nn.Module):
    """torch's own attention with fused queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.attention(x, x, x)[0]
        return out


class Stream(nn.Module):
    """A residual stream of RMS norms, which only linear layers read."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(5, 8, bias=False), nn.Linear(8, 3)
        self.norms = nn.ModuleList(nn.RMSNorm(8) for _ in range(3))
        self.ups = nn.ModuleList(nn.Linear(8, 12) for _ in range(2))
        self.downs = nn.ModuleList(nn.Linear(12, 8, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for norm, up, down in zip(self.norms, self.ups, self.downs, strict=False):
            x = x + down(up(norm(x)).relu())
        result: Tensor = self.head(self.norms[2](x))
        return result


def _words() -> Tensor:
    return torch.randint(0, 9, (6, 5))


def _encoder(*, norm_first: bool) -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True, norm_first=norm_first)
    return nn.Sequential(layer, nn.LayerNorm(8), nn.Linear(8, 2)) if norm_first else layer


def _convolutions() -> nn.Module:
    first = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.GELU())
    second = nn.Sequential(nn.Conv2d(4, 3, 3, padding=1), nn.BatchNorm2d(3), nn.GELU())
    return nn.Sequential(first, second, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2))


def _group_norms() -> nn.Module:
    first = nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.GELU())
    second = nn.Sequential(nn.Conv2d(4, 3, 3), nn.InstanceNorm2d(3, affine=True), nn.GELU())
    return nn.Sequential(first, second, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2))


class Windows(nn.Module):
    """A layer that reads windows of padded tokens after a norm, and a head that reads their means."""

    def __init__(self, *, has_bias: bool = False, widths: tuple[int, ...] = (0, 0, 0, 1)) -> None:
        super().__init__()
        self.widths = widths
        self.patch, self.norm = nn.Linear(7, 6), nn.LayerNorm(6, bias=has_bias)
        self.mix, self.last, self.head = nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        padded = functional.pad(self.norm(self.patch(x)), self.widths).roll(1, 1)
        mixed = functional.gelu(self.mix(padded.reshape(-1, 2, 6)))
        read = self.last(mixed.reshape(len(x), 6, 5)).transpose(1, 2)
        out: Tensor = self.head(functional.adaptive_avg_pool1d(read, 1).flatten(1))
        return out


class WritesWeights(nn.Module):
    """A module that writes a layer's weights in each call, like RWKV."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.out, self.norm, self.head = nn.Linear(7, 5), nn.Linear(5, 6), nn.LayerNorm(6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.out.weight.div_(1)
        out: Tensor = self.head(self.norm(self.out(functional.gelu(self.up(x)))))
        return out


class TwoBiases(nn.Module):
    """Two parallel layers, whose sum is normalized."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.norm, self.head = nn.Linear(4, 5), nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.one(x.tanh()) + self.two(x)))
        return out


class Written(nn.Module):
    """Layers, and a function that computes the output with them."""

    def __init__(self, function: Callable[..., Tensor], **parts: nn.Module | Tensor) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, nn.Parameter(part) if isinstance(part, Tensor) else part)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def _heads(m: Any, x: Tensor) -> list[Tensor]:
    return [layer(x).unflatten(-1, (2, -1)).transpose(-2, -3) for layer in (m.q, m.k, m.v)]


def pooled_by_query(m: Any, x: Tensor) -> Tensor:
    """Compute attention of one learned query to all tokens."""
    scores = m.q(m.query) @ m.k(x).mT
    out: Tensor = m.o((scores.softmax(-1) @ m.v(x)).tanh()).squeeze(1)
    return out


def positive(m: Any, x: Tensor, eps: float = 0.0, *, is_by_k: bool = True) -> Tensor:
    """Compute linear attention, whose weights are features of queries and keys divided by their sum."""
    q, k, v = _heads(m, x)
    q, k = functional.elu(q) + 1, functional.elu(k) + 1
    y = (q @ (k.mT @ v)) / (q @ (k if is_by_k else q).sum(-2).unsqueeze(-1) + eps)
    out: Tensor = m.o(y.transpose(1, 2).flatten(2))
    return out


def causal_features(m: Any, x: Tensor, *, is_causal: bool = True) -> Tensor:
    """Compute linear attention to earlier positions, by cumulative sums of states."""
    q, k, v = functional.softplus(m.q(x)), functional.softplus(m.k(x)), m.v(x)
    states, total = (k[..., None] * v[..., None, :]).cumsum(-3), k.cumsum(-2)
    if not is_causal:
        total = k.sum(-2, keepdim=True)
    read = torch.einsum("btd,btde->bte", q, states)
    out: Tensor = m.o(read / (q * total).sum(-1, keepdim=True))
    return out


def performer(m: Any, x: Tensor) -> Tensor:
    """Compute attention by features, as in Performer: the inverse of the sum is a factor of a product of three."""
    q, k, v = functional.softplus(m.q(x)), functional.softplus(m.k(x)), m.v(x)
    inverse = 1.0 / torch.einsum("...nd,...d->...n", q, k.sum(-2))
    context = torch.einsum("...nd,...ne->...de", k, v)
    out: Tensor = m.o(torch.einsum("...de,...nd,...n->...ne", context, q, inverse))
    return out


def talking(m: Any, x: Tensor, *, is_dynamic: bool = False) -> Tensor:
    """Compute attention whose heads are mixed before and after the softmax, optionally with a factor that depends on
    inputs.
    """
    q, k, v = _heads(m, x)
    weights = m.first((q @ k.mT).permute(0, 2, 3, 1)).softmax(-2)
    weights = m.second(weights).permute(0, 3, 1, 2)
    if is_dynamic:
        weights = weights * x[..., :1].sigmoid().unsqueeze(1)
    out: Tensor = m.o((weights @ v).transpose(1, 2).flatten(2))
    return out


def film(m: Any, x: Tensor, added: float = 1.0, code: slice = slice(4, 6)) -> Tensor:
    """Compute a layer whose units are scaled and shifted by another layer's outputs, which a code determines."""
    scale, shift = m.scale(x[..., 4:6]), m.shift(x[..., code])
    out: Tensor = m.o(functional.gelu((added + scale) * m.a(x[..., :4]) + shift))
    return out


def fused_film(m: Any, x: Tensor) -> Tensor:
    """Compute a layer whose channels are scaled and shifted by one other layer."""
    scale, shift = m.code(x[:, 0, 0, :3]).chunk(2, -1)
    y = scale[..., None, None] * m.a(x) + shift[..., None, None]
    out: Tensor = m.o(functional.gelu(y).mean((2, 3)))
    return out


def by_class(m: Any, x: Tensor) -> Tensor:
    """Compute a layer whose units are scaled and shifted by rows of two tables."""
    y = m.a(m.words(x[:, 0]))
    out: Tensor = m.o(functional.gelu(m.scale(x[:, 1]) * y + m.shift(x[:, 1])))
    return out


def maxout(m: Any, x: Tensor, steps: Tensor | float = 1.0) -> Tensor:
    """Compute the maximum of three linear pieces, and the maximum of two."""
    y = (m.a(x).unflatten(-1, (4, 3)) * steps).amax(-1)
    first, second = m.b(y).chunk(2, -1)
    out: Tensor = m.o(functional.gelu(torch.maximum(first, second)))
    return out


def context(m: Any, x: Tensor) -> Tensor:
    """Compute convolutions, with the result of attention over all positions added, as in GCNet."""
    h = m.a(x)
    read = (h.flatten(2) @ m.k(h).flatten(2).softmax(-1).mT)[..., 0]
    out: Tensor = m.o((h + m.t(m.n(m.u(read)).relu())[..., None, None]).relu().mean((2, 3)))
    return out


def dense(m: Any, x: Tensor) -> Tensor:
    """Concatenate features of an earlier and a later layer, with a batch norm before each reader."""
    h = m.i(x)
    h = torch.cat([h, m.c(m.n(h).relu())], 1)
    out: Tensor = m.o(m.e(h).relu().mean((2, 3)))
    return out


def qkvo(width: int = 4) -> dict[str, nn.Module]:
    """Return layers for queries, keys, values and outputs."""
    return {**{name: nn.Linear(5, width) for name in "qkv"}, "o": nn.Linear(width, 4)}


def film_layers(*, has_bias: bool = True) -> dict[str, nn.Module]:
    """Return the layers of `film`."""
    return {
        **{"a": nn.Linear(4, 5), "scale": nn.Linear(2, 5), "shift": nn.Linear(2, 5, bias=has_bias)},
        "o": nn.Linear(5, 3),
    }


def branches(m: Any, x: Tensor) -> Tensor:
    """Compute residual branches behind factors, with a bounded reader at the end."""
    h = m.a(x)
    h = h + m.s * m.c(m.b(h).relu())
    h = h + m.t * m.e(m.d(h).relu())
    out: Tensor = m.o(h.sigmoid())
    return out


def branch_layers(first: Tensor, second: Tensor) -> dict[str, nn.Module | Tensor]:
    """Return the layers and factors of `branches`."""
    names = {name: nn.Linear(4, 4) for name in "abcde"}
    return {**names, "s": first, "t": second, "o": nn.Linear(4, 3)}


NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], int]] = {
    "decoder": (lambda: Tokens(Attention(), Feedforward()), _words, 128),
    "tied decoder": (lambda: Tokens(Attention(), Feedforward(), is_tied=True), _words, 95),
    "sink": (lambda: Tokens(Attention(has_sink=True), Feedforward()), _words, 112),
    "post-norm": (
        lambda: Tokens(Attention(is_post=True), Feedforward(is_post=True), is_post=True), _words, 91
    ),
    "patches": (Patches, lambda: torch.randn(3, 2, 4, 4), 131),
    "relative positions": (lambda: Attention(has_table=True), lambda: torch.randn(3, 5, 8), 50),
    "mixture": (Mixture, lambda: torch.randn(5, 6), 7),
    "mixture of the largest": (TopMixture, lambda: torch.randn(5, 6), 7),
    "linear layers": (
        lambda: nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 6), nn.Linear(6, 3), nn.GELU(), nn.Linear(3, 2)),
        lambda: torch.randn(5, 4), 11,
    ),
    "parallel": (Parallel, lambda: torch.randn(5, 4), 5),
    "two biases": (TwoBiases, lambda: torch.randn(5, 4), 21),
    "writes weights": (WritesWeights, lambda: torch.randn(5, 7), 14),
    "windows": (Windows, lambda: torch.randn(3, 5, 7), 20),
    "windows of shifted channels": (lambda: Windows(widths=(1, -1, 0, 1)), lambda: torch.randn(3, 5, 7), 15),
    "windows, padded beside a beta": (lambda: Windows(has_bias=True), lambda: torch.randn(3, 5, 7), 15),
    "norm by hand": (NormByHand, lambda: torch.randn(5, 4), 14),
    "gain plus one": (lambda: NormByHand(1.0), lambda: torch.randn(5, 4), 14),
    "two norms": (
        lambda: nn.Sequential(nn.Linear(7, 6), nn.LayerNorm(6), nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 2)),
        lambda: torch.randn(5, 7), 32,
    ),
    "batch norm": (_convolutions, lambda: torch.randn(4, 2, 7, 7), 21),
    "residual": (Residual, lambda: torch.randn(4, 2, 5, 5), 40),
    "group norm": (_group_norms, lambda: torch.randn(4, 2, 7, 7), 5),
    "layer scale": (LayerScale, lambda: torch.randn(5, 4), 25),
    "means": (Pooled, lambda: torch.randn(3, 5, 9), 32),
    "LSTM": (lambda: Recurrent(nn.LSTM), lambda: torch.randn(2, 5, 3), 16),
    "GRU": (lambda: Recurrent(nn.GRU), lambda: torch.randn(2, 5, 3), 8),
    "rows before recurrent layers": (Rows, _words, 31),
    "fused attention": (SelfAttention, lambda: torch.randn(3, 5, 8), 16),
    "encoder": (lambda: _encoder(norm_first=False), lambda: torch.randn(3, 5, 8), 58),
    "encoder, norms first": (lambda: _encoder(norm_first=True), lambda: torch.randn(3, 5, 8), 100),
    "convolutions": (
        lambda: nn.Sequential(nn.Conv1d(2, 3, 3), nn.Conv1d(3, 4, 3), nn.GELU(), nn.Conv1d(4, 3, 1, padding=1)),
        lambda: torch.randn(3, 2, 10), 3,
    ),
    "linear attention": (lambda: Written(positive, **qkvo()), lambda: torch.randn(3, 6, 5), 4),
    "causal linear attention": (lambda: Written(causal_features, **qkvo()), lambda: torch.randn(3, 6, 5), 4),
    "performer": (lambda: Written(performer, **qkvo()), lambda: torch.randn(3, 6, 5), 4),
    "talking heads": (
        lambda: Written(talking, **qkvo(), first=nn.Linear(2, 2), second=nn.Linear(2, 2)),
        lambda: torch.randn(3, 6, 5), 10,
    ),
    "FiLM": (lambda: Written(film, **film_layers()), lambda: torch.randn(7, 6), 5),
    "fused FiLM": (
        lambda: Written(fused_film, a=nn.Conv2d(2, 4, 2), code=nn.Linear(3, 8), o=nn.Linear(4, 3)),
        lambda: torch.randn(5, 2, 3, 3), 4,
    ),
    "rows of classes": (
        lambda: Written(
            by_class, words=nn.Embedding(9, 4), a=nn.Linear(4, 5), scale=nn.Embedding(9, 5), shift=nn.Embedding(9, 5),
            o=nn.Linear(5, 3),
        ),
        lambda: torch.randint(0, 9, (30, 2)), 9,
    ),
    "maxout": (
        lambda: Written(maxout, a=nn.Linear(3, 12), b=nn.Linear(4, 6), o=nn.Linear(3, 2)),
        lambda: torch.randn(9, 3), 4,
    ),
    "dense": (
        lambda: Written(
            dense, i=nn.Conv2d(2, 3, 1), n=nn.BatchNorm2d(3), c=nn.Conv2d(3, 2, 3, padding=1), e=nn.BatchNorm2d(5),
            o=nn.Linear(5, 2),
        ),
        lambda: torch.randn(3, 2, 4, 4), 21,
    ),
    "branches with numbers": (
        lambda: Written(branches, **branch_layers(torch.ones(()), torch.ones(()))), lambda: torch.randn(9, 4), 8,
    ),
    "branches with a number and a gain": (
        lambda: Written(branches, **branch_layers(torch.ones(()), torch.ones(4))), lambda: torch.randn(9, 4), 8,
    ),
    "one number of two layers": (
        lambda: Written(
            lambda m, x: m.o((m.t * m.a(x) + m.b(x.tanh()) * m.t).tanh()),
            a=nn.Linear(4, 5), b=nn.Linear(4, 5), o=nn.Linear(5, 3), t=torch.ones(()),
        ),
        lambda: torch.randn(9, 4), 5,
    ),
    "query that pools tokens": (
        lambda: Written(pooled_by_query, **qkvo(), query=torch.ones(1, 1, 5)), lambda: torch.randn(3, 6, 5), 9,
    ),
    "context": (
        lambda: Written(
            context, a=nn.Conv2d(2, 4, 2), k=nn.Conv2d(4, 1, 1), u=nn.Linear(4, 4), n=nn.LayerNorm(4),
            t=nn.Linear(4, 4), o=nn.Linear(4, 2),
        ),
        lambda: torch.randn(3, 2, 4, 4), 10,
    ),
}  # fmt: skip
"""A network, its inputs, and the number of dimensions of its translations."""


def network(name: str) -> tuple[nn.Module, Tensor, rg.Symmetry, Params]:
    """Return a copy of a network far from its initialization, in float64, with its inputs and its symmetry."""
    module, x, symmetry = _discovered(name)
    module = copy.deepcopy(module)
    torch.manual_seed(len(name))
    return module, x, symmetry, {key: tensor.detach() for key, tensor in module.state_dict().items()}


@cache
def _discovered(name: str) -> tuple[nn.Module, Tensor, rg.Symmetry]:
    torch.manual_seed(0)
    make, inputs, _ = NETS[name]
    module, x = make().double().eval(), inputs()
    x = x.double() if x.is_floating_point() else x
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        for key, buffer in module.named_buffers():
            if key.endswith(("running_mean", "running_var")):
                buffer.uniform_(0.5, 2)
    return module, x, rg.discover(module, (x,))


def stream(seed: int = 0) -> tuple[nn.Module, Tensor, rg.Symmetry, Params]:
    """Return a residual stream far from its initialization, like `network`."""
    torch.manual_seed(seed)
    module, x = Stream().double().eval(), torch.randn(7, 5, dtype=torch.float64)
    with torch.no_grad():
        for tensor in module.parameters():
            tensor += 0.3 * torch.randn_like(tensor)
    return module, x, rg.discover(module, (x,)), {name: t.detach() for name, t in module.state_dict().items()}


def stranger(params: Params, symmetry: rg.Symmetry, size: float, seed: int = 5) -> Params:
    """Return a network with noise on its parameters."""
    chance = generator(seed)
    return {
        name: t + size * torch.randn(t.shape, generator=chance, dtype=t.dtype)
        if t.is_floating_point() and name not in symmetry.buffers
        else t
        for name, t in params.items()
    }


def gap(one: Params, other: Params) -> float:
    """Return the largest difference of two networks."""
    return max(float((one[name] - other[name]).abs().max()) for name in one if one[name].is_floating_point())


def drawn(symmetry: rg.Symmetry, seed: int, batch: tuple[int, ...] = ()) -> rg.Element:
    """Return a random element with all parts, including translations that are exact only with stored statistics."""
    element = symmetry.random(generator(seed), EVERY, batch=batch)
    return element.translated(random_translation(symmetry, generator(seed), batch, is_stored=True))


def outputs(module: nn.Module, params: Params, x: Tensor) -> Tensor:
    """Return the outputs of a network."""
    found: Tensor = torch.func.functional_call(module, params, (x,), tie_weights=False)
    return found


def generator(seed: int) -> torch.Generator:
    """Return a random generator."""
    return torch.Generator().manual_seed(seed)

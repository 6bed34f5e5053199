"""Modules that are designed to mislead the rules: equal-looking bases, positions used as numbers, zeros, and ties.

`ROWS` are functions of the module and of rows, and `TOKENS` are functions of rows of tokens. The groups that discovery
finds in these modules must be correct.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as fn

ops: Any = torch.ops.aten
Forward = Callable[[Any, Tensor], Any]


class Seen:
    """A module that records the names by which its parts are accessed."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.names = module, set[str]()

    def __getattr__(self, name: str) -> Any:
        self.names.add(name)
        return getattr(self.module, name)


class Trap(nn.Module):
    """Parameters of many shapes. A forward pass, written as a function, uses some of them, and all other parameters are
    removed.

    Tracing takes time for each parameter.
    """

    def __init__(self, forward: Forward, inputs: Tensor) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def drawn(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator))

        self.written = forward
        self.fc1, self.fc2, self.head = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.router, self.conv = nn.Linear(5, 4), nn.Conv1d(5, 8, 1)
        self.gain, self.square, self.gathered = drawn(8), drawn(8, 8), drawn(3, 4)
        self.cube, self.cube2 = drawn(4, 6, 5), drawn(4, 6, 5)
        self.table, self.deep = drawn(4, 3), drawn(4, 6)
        self.q, self.k, self.v, self.o = drawn(8, 5), drawn(8, 5), drawn(8, 5), drawn(3, 8)
        self.kk, self.vv = drawn(4, 5), drawn(4, 5)
        self.mix, self.ph, self.ph2 = drawn(4, 4), drawn(4), drawn(4, 1, 1)
        self.b8, self.b4, self.rm, self.w88 = drawn(8), drawn(4), drawn(8), drawn(8, 8)
        self.w42, self.w422, self.emb = drawn(4, 2), drawn(4, 2, 2), drawn(8, 4)
        self.c, self.gc, self.dw, self.o3 = drawn(8, 5, 1), drawn(8, 2, 3), drawn(8, 1, 3), drawn(3, 8, 1)
        self.one, self.scalar = drawn(1), drawn()
        self.e3, self.d3 = drawn(4, 6, 5), drawn(4, 3, 6)
        self.register_buffer("mean8", torch.randn(8, generator=generator))
        self.register_buffer("var8", torch.rand(8, generator=generator) + 0.5)
        self.double()
        seen = Seen(self)
        with torch.no_grad():
            forward(seen, inputs)
        for parts in (self._parameters, self._buffers, self._modules):
            for name in [name for name in parts if name not in seen.names]:
                del parts[name]

    def forward(self, x: Tensor) -> Any:
        return self.written(self, x)


def heads(m: Any, x: Tensor, weight: Tensor, count: int = 4) -> Tensor:
    return fn.linear(x, weight).unflatten(-1, (count, -1)).transpose(1, 2)


def out(m: Any, y: Tensor) -> Tensor:
    return fn.linear(y.transpose(1, 2).flatten(2), m.o)


def expert_dot(m: Any, x: Tensor) -> Any:
    r = m.router(x)
    i, j = r.argmax(-1), r.argmin(-1)
    h = torch.einsum("thd,td->th", m.cube[i], x)
    g = torch.einsum("thd,td->th", m.cube[j], x)
    return (h * g).sum(-1), torch.einsum("th,th->t", h, g)


def expert_dot2(m: Any, x: Tensor) -> Any:
    r = m.router(x)
    i, j = r.argmax(-1), r.argmin(-1)
    h = torch.einsum("thd,td->th", m.cube[i], x)
    g = torch.einsum("thd,td->th", m.cube[j], x)
    return torch.einsum("th,th->t", h, g)


def expert_cross(m: Any, x: Tensor) -> Any:
    r = m.router(x)
    i = r.argmax(-1)
    h = torch.einsum("thd,td->th", m.cube[i], x)
    return torch.einsum("th,sh->ts", h, h)


def expert_cross2(m: Any, x: Tensor) -> Any:
    r = m.router(x)
    i = r.argmax(-1)
    h = torch.einsum("thd,td->th", m.cube[i], x)
    g = torch.einsum("thd,td->th", m.cube2[i], x)
    return torch.einsum("th,sh->ts", h, g)


def expert_direct(m: Any, x: Tensor) -> Any:
    r = m.router(x)
    i = r.argmax(-1)
    h = torch.einsum("thd,td->th", m.cube[i], x)
    return torch.einsum("th,eh,te->t", h, m.deep, r.softmax(-1))


def expert_direct2(m: Any, x: Tensor) -> Any:
    r = m.router(x)
    i = r.argmax(-1)
    h = torch.einsum("thd,td->th", m.cube[i], x)
    return (torch.einsum("th,eh->te", h, m.deep)).logsumexp(-1)


def cos_pad(m: Any, x: Tensor) -> Any:
    h = m.fc1(x)
    h = torch.stack([h, h.tanh() * 0 + h], -1)
    return m.head(torch.cos(fn.pad(m.conv(x[..., None].expand(-1, -1, 3)), (1, 1))).sum(-1))


def cos_scatter(m: Any, x: Tensor) -> Any:
    h = m.fc1(x)
    z = torch.zeros(6, 3, 8, dtype=x.dtype)
    z[:, 1] = h
    return m.head(torch.cos(z).sum(1))


def argmax_relu(m: Any, x: Tensor) -> Any:
    h = m.router(x).relu()
    return m.table[h.argmax(-1)]


def topk_relu(m: Any, x: Tensor) -> Any:
    h = m.router(x).relu()
    return m.table[h.topk(2, -1).indices[:, 1]]


def sort_sign(m: Any, x: Tensor) -> Any:
    h = m.router(x).sign()
    return m.table[h.argsort(-1)[:, 0]]


def argmax_zero_gain(m: Any, x: Tensor) -> Any:
    h = m.router(x) * 0
    return m.table[h.argmax(-1)]


def squared_positions(m: Any, x: Tensor) -> Any:
    i = m.router(x).topk(2, -1).indices
    return (i * i).sum(-1).to(x.dtype) * m.one


def gather_part(m: Any, x: Tensor) -> Any:
    i = m.router(x).topk(2, -1).indices
    return torch.gather(m.gathered, 1, i[:3])


def positions_step(m: Any, x: Tensor) -> Any:
    i = m.router(x).topk(3, -1).indices
    return i[:, ::2].to(x.dtype)


def cond_positions(m: Any, x: Tensor) -> Any:
    i = m.router(x).argmax(-1)
    return torch.cond(x.sum() > 0, lambda i: i * 2, lambda i: i + 1, (i,)).to(x.dtype)


def square_sum_int(m: Any, x: Tensor) -> Any:
    h = fn.linear(x, m.square[:, :5])
    return ops.sum.dim_IntList(h * h, [1], False, dtype=torch.int64).to(x.dtype)


def batch_sum_int(m: Any, x: Tensor) -> Any:
    h = m.fc1(x)
    return m.head(ops.sum.dim_IntList(h * 3, [0], False, dtype=torch.int64).to(x.dtype))


def norm0(m: Any, x: Tensor) -> Any:
    h = m.fc1(x).relu()
    h = torch.stack([h, h - 1.0 * m.gain], -1).relu()
    return m.head(torch.linalg.vector_norm(h, 0, -1))


def bits(m: Any, x: Tensor) -> Any:
    h = m.fc1(x).relu()
    return m.head(h.view(torch.int64).to(x.dtype) * 1e-18)


def clamp_rev2(m: Any, x: Tensor) -> Any:
    return m.head(m.fc1(x).clamp(1.0, -1.0))


def cummax_idx(m: Any, x: Tensor) -> Any:
    h = m.fc1(x)
    h = torch.stack([h, h.abs(), 2 * h], 1).relu()
    return m.head(h.cummax(1).indices.to(x.dtype).sum(1))


def prelu_inplace(m: Any, x: Tensor) -> Any:
    h = m.fc1(x).clone()
    h.mul_(2.0)
    return m.head(fn.prelu(h, m.gain))


def prelu_kernel(m: Any, x: Tensor) -> Any:
    h = m.fc1(x)
    return m.head(ops._prelu_kernel(h, m.gain[None]))


def ln_stats(m: Any, x: Tensor) -> Any:
    h = m.fc1(x).reshape(-1, 4, 2)
    y, mean, rstd = ops.native_layer_norm(h, [2], None, None, 1e-5)
    return m.head((y).flatten(1)), (mean.flatten(1) * m.gain[:4]), rstd.flatten(1) @ m.square[:4]


def gn_stats(m: Any, x: Tensor) -> Any:
    h = m.fc1(x)
    _, mean, _ = ops.native_group_norm(h, None, None, 6, 8, 1, 4, 1e-5)
    return mean @ m.square[:4]


def copy_int(m: Any, x: Tensor) -> Any:
    h = m.fc1(x) * 3
    z = torch.zeros(6, 8, dtype=torch.int64)
    z.copy_(h)
    return m.head(z.to(x.dtype))


def copy_int2(m: Any, x: Tensor) -> Any:
    h = m.fc1(x).relu() * 3
    z = torch.zeros(6, 8, dtype=torch.int64)
    z[:] = h
    return m.head(z.to(x.dtype))


def half(m: Any, x: Tensor) -> Any:
    return m.head(m.fc1(x).relu().half().to(x.dtype))


def topk_unsorted(m: Any, x: Tensor) -> Any:
    h = m.fc1(x)
    return torch.topk(h, 5, -1, sorted=False).values


def set_first(m: Any, x: Tensor) -> Any:
    return m.table[m.router(x).topk(3, -1, sorted=False).indices[:, 0]]


def set_weighted(m: Any, x: Tensor) -> Any:
    return (m.fc1(x).topk(4, -1, sorted=False).values * m.ph).sum(-1)


def set_summed_up(m: Any, x: Tensor) -> Any:
    return m.fc1(x).topk(5, -1, sorted=False).values.cumsum(-1).relu().sum(-1)


def set_of_other_rows(m: Any, x: Tensor) -> Any:
    return m.fc1(x).topk(5, -1, sorted=False).values.mean(0).exp().sum(-1)


def set_halves(m: Any, x: Tensor) -> Any:
    return m.fc1(x).topk(6, -1, sorted=False).values.unflatten(-1, (2, 3)).sum(-1).exp().sum(-1)


def set_crossed(m: Any, x: Tensor) -> Any:
    one, two = (layer(x).topk(4, -1, sorted=False).values for layer in (m.fc1, m.router))
    return (one * two).sum(-1)


def left(m: Any, x: Tensor, count: int, fill: float) -> Tensor:
    """Return scores of which all but the largest are masked."""
    h = m.router(x)
    chosen = torch.zeros_like(h).scatter(-1, h.topk(count, -1).indices, 1)
    return h.masked_fill(~chosen.bool(), fill)


def too_few_left(m: Any, x: Tensor) -> Any:
    return m.table[left(m, x, 1, -torch.inf).topk(2, -1).indices].sum(1)


def filled_between(m: Any, x: Tensor) -> Any:
    return m.table[left(m, x - 3, 2, 0.0).topk(2, -1).indices].sum(1)


def overwritten_too_often(m: Any, x: Tensor) -> Any:
    h = m.router(x)
    return m.table[h.scatter(-1, h.topk(2, -1).indices, -torch.inf).topk(3, -1).indices].sum(1)


def equal_sums_of_blocks(m: Any, x: Tensor) -> Any:
    h = m.router(x).relu().view(-1, 2, 2).sum(-1)
    return m.table.view(2, 2, 3)[h.topk(1, -1).indices[:, 0]].sum(1)


def scalar_softmax(m: Any, x: Tensor) -> Any:
    return m.head(m.fc1(x)) * m.scalar.softmax(0) * m.scalar.sum(0)


def inf_sin(m: Any, x: Tensor) -> Any:
    return m.head(torch.sin((m.fc1(x) * float("inf")).clamp(-1, 1)))


def item_input(m: Any, x: Tensor) -> Any:
    return m.head(m.fc1(x).relu() * x.sum().item())


def item_param(m: Any, x: Tensor) -> Any:
    return m.head(m.fc1(x).relu() * m.gain.sum().item())


def softmax_heads(m: Any, x: Tensor) -> Any:
    q, k, v = (heads(m, x, w) for w in (m.q, m.k, m.v))
    return out(m, (q @ k.mT).softmax(1) @ v)


def talking(m: Any, x: Tensor) -> Any:
    q, k, v = (heads(m, x, w) for w in (m.q, m.k, m.v))
    s = (q @ k.mT).softmax(-1)
    s = torch.einsum("bhij,hg->bgij", s, m.mix)
    return out(m, s @ v)


def talking_same(m: Any, x: Tensor) -> Any:
    q, k, v = (heads(m, x, w) for w in (m.q, m.k, m.v))
    s = torch.einsum("bhij,hg->bgij", q @ k.mT, m.mix).softmax(-1)
    s = torch.einsum("bhij,gh->bgij", s, m.mix)
    return out(m, s @ v)


def per_head_scale(m: Any, x: Tensor) -> Any:
    q, k, v = (heads(m, x, w) for w in (m.q, m.k, m.v))
    return out(m, ((q @ k.mT) * m.ph2).softmax(-1) @ v * m.ph[:, None, None])


def per_head_bias(m: Any, x: Tensor) -> Any:
    q, k, v = (heads(m, x, w) for w in (m.q, m.k, m.v))
    return out(m, ((q @ k.mT) + m.ph2).relu() @ v)


def gqa_repeat(m: Any, x: Tensor) -> Any:
    q = heads(m, x, m.q)
    k, v = (heads(m, x, w, 2) for w in (m.kk, m.vv))
    k, v = k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1)
    return out(m, (q @ k.mT).softmax(-1) @ v)


def gqa_inter(m: Any, x: Tensor) -> Any:
    q = heads(m, x, m.q)
    k, v = (heads(m, x, w, 2).repeat_interleave(2, 1) for w in (m.kk, m.vv))
    return out(m, (q @ k.mT).softmax(-1) @ v)


def gqa_mixed(m: Any, x: Tensor) -> Any:
    q = heads(m, x, m.q)
    k, v = heads(m, x, m.kk, 2).repeat_interleave(2, 1), heads(m, x, m.vv, 2).repeat(1, 2, 1, 1)
    return out(m, (q @ k.mT).softmax(-1) @ v)


def gqa_sdpa(m: Any, x: Tensor) -> Any:
    q = heads(m, x, m.q)
    k, v = (heads(m, x, w, 2) for w in (m.kk, m.vv))
    return out(m, fn.scaled_dot_product_attention(q, k, v, enable_gqa=True, is_causal=True))


def same_qk(m: Any, x: Tensor) -> Any:
    q = heads(m, x, m.q)
    v = heads(m, x, m.v)
    return out(m, (q @ q.mT).softmax(-1) @ v)


def qk_heads_crossed(m: Any, x: Tensor) -> Any:
    q, k, v = (heads(m, x, w) for w in (m.q, m.k, m.v))
    return out(m, torch.einsum("bhid,bgjd->bhij", q, k).softmax(-1) @ v)


def qk_heads_rolled(m: Any, x: Tensor) -> Any:
    q, k, v = (heads(m, x, w) for w in (m.q, m.k, m.v))
    return out(m, (q @ k.roll(1, 1).mT).softmax(-1) @ v)


def heads_batch_crossed(m: Any, x: Tensor) -> Any:
    q, k, v = (heads(m, x, w) for w in (m.q, m.k, m.v))
    return out(
        m,
        (q.reshape(-1, x.shape[1], 2) @ k.transpose(0, 1).reshape(-1, x.shape[1], 2).mT)
        .reshape(q.shape[0], 4, x.shape[1], -1)
        .softmax(-1)
        @ v,
    )


def linear_attn(m: Any, x: Tensor) -> Any:
    q, k, v = (heads(m, x, w) for w in (m.q, m.k, m.v))
    return out(m, q.softmax(-1) @ (k.softmax(-2).mT @ v))


def qk_norm(m: Any, x: Tensor) -> Any:
    q, k, v = (heads(m, x, w) for w in (m.q, m.k, m.v))
    q = fn.rms_norm(q, (2,))
    k = fn.normalize(k, dim=-1)
    return out(m, (q @ k.mT).softmax(-1) @ v)


def qk_norm_all(m: Any, x: Tensor) -> Any:
    q = fn.rms_norm(fn.linear(x, m.q), (8,)).unflatten(-1, (4, 2)).transpose(1, 2)
    k, v = (heads(m, x, w) for w in (m.k, m.v))
    return out(m, (q @ k.mT).softmax(-1) @ v)


def ln_v(m: Any, x: Tensor) -> Any:
    q, k, v = (heads(m, x, w) for w in (m.q, m.k, m.v))
    y = (q @ k.mT).softmax(-1) @ v
    y = fn.layer_norm(y, (2,))
    return out(m, y)


def rms_two(m: Any, x: Tensor) -> Any:
    y = fn.linear(x, m.q).unflatten(-1, (4, 2))
    y = fn.rms_norm(y, (4, 2), m.w42)
    return fn.linear(y.flatten(-2), m.o)


def rms_inner_gelu(m: Any, x: Tensor) -> Any:
    y = fn.linear(x, m.q).unflatten(-1, (4, 2))
    y = fn.gelu(fn.rms_norm(y, (2,)))
    return fn.linear(y.flatten(-2), m.o)


def rms_outer_gelu(m: Any, x: Tensor) -> Any:
    y = fn.gelu(fn.linear(x, m.q)).unflatten(-1, (4, 2)).transpose(-1, -2)
    y = fn.rms_norm(y, (4,))
    return fn.linear(y.transpose(-1, -2).flatten(-2), m.o)


def gn_grouped(m: Any, x: Tensor) -> Any:
    y = fn.conv1d(x.mT, m.c)
    y = fn.conv1d(y, m.gc, padding=1, groups=4)
    y = fn.group_norm(y, 2, m.b8, m.rm).relu()
    return fn.conv1d(y, m.o3)


def gn_grouped8(m: Any, x: Tensor) -> Any:
    y = fn.conv1d(x.mT, m.c)
    y = fn.conv1d(y, m.gc, padding=1, groups=4)
    y = fn.group_norm(y, 8).relu()
    return fn.conv1d(y, m.o3)


def shuffle_dw(m: Any, x: Tensor) -> Any:
    y = fn.conv1d(x.mT, m.c)
    y = fn.conv1d(y, m.gc, padding=1, groups=4)[..., None]
    y = fn.channel_shuffle(y, 4)[..., 0]
    y = fn.conv1d(y, m.dw, groups=8).relu()
    y = fn.conv1d(y, m.gc, padding=1, groups=4)
    return fn.conv1d(y, m.o3)


def shuffle_grouped(m: Any, x: Tensor) -> Any:
    y = fn.conv1d(x.mT, m.c)
    y = fn.conv1d(y, m.gc, padding=1, groups=4)[..., None]
    y = fn.channel_shuffle(y, 2)[..., 0]
    y = fn.conv1d(y, m.gc, groups=4).tanh()
    return fn.conv1d(y, m.o3)


def transposed_grouped(m: Any, x: Tensor) -> Any:
    y = fn.conv1d(x.mT, m.c).relu()
    y = fn.conv_transpose1d(y, m.gc, groups=4, stride=2, output_padding=1)
    return y.relu().mean(-1) @ m.mix.flatten()[:8] if y.shape[1] == 8 else y.relu().sum(-1)


def square_batch(m: Any, x: Tensor) -> Any:
    h = fn.linear(x, m.q)
    return fn.linear(h * (h * h).sum(0, keepdim=True), m.o)


def square_both(m: Any, x: Tensor) -> Any:
    h = fn.linear(x, m.q)
    return fn.linear(h, m.o) * (h * h).sum((1, 2))[:, None, None]


def square_two_steps(m: Any, x: Tensor) -> Any:
    h = fn.linear(x, m.q)
    return fn.linear(h, m.o) * (h * h).sum(1).sum(1)[:, None, None]


def square_then(m: Any, x: Tensor) -> Any:
    h = fn.linear(x, m.q)
    s = h * h
    return fn.linear(h, m.o) * s.sum(2, keepdim=True) + s.sum(1, keepdim=True).sum(-1, keepdim=True)


def square_heads(m: Any, x: Tensor) -> Any:
    h = fn.linear(x, m.q).unflatten(-1, (4, 2))
    return fn.linear((h * h.square().sum(-1, keepdim=True)).flatten(2), m.o)


def square_heads_outer(m: Any, x: Tensor) -> Any:
    h = fn.linear(x, m.q).unflatten(-1, (4, 2))
    return fn.linear((h * h.square().sum(-2, keepdim=True)).flatten(2), m.o)


def stack_both(m: Any, x: Tensor) -> Any:
    a, b = fn.linear(x, m.q), fn.linear(x, m.k)
    s = torch.stack([a, b], -1)
    return fn.linear(s.relu().sum(-1) + a * b.tanh(), m.o)


def stack_mixed(m: Any, x: Tensor) -> Any:
    a, b = fn.linear(x, m.q), fn.linear(x, m.k)
    s = torch.stack([a, b], 0)
    return fn.linear((s[0] + s.flip(0)[0]).relu(), m.o)


def stack_view(m: Any, x: Tensor) -> Any:
    a, b = fn.linear(x, m.q).tanh(), fn.linear(x, m.k)
    s = torch.stack([a, b], -1).flatten(-2)
    return fn.linear(s[..., ::2] + s[..., 1::2], m.o)


def stack_view2(m: Any, x: Tensor) -> Any:
    a, b = fn.linear(x, m.q).tanh(), fn.linear(x, m.k)
    s = torch.stack([a, b], -1).flatten(-2)
    return fn.linear(s[..., :8] * s[..., 8:], m.o)


def stack_same(m: Any, x: Tensor) -> Any:
    a = fn.linear(x, m.q)
    s = torch.stack([a, a.relu()], 0)
    return fn.linear(s.prod(0), m.o)


def expand_twice(m: Any, x: Tensor) -> Any:
    h = fn.linear(x, m.q).mean(-1, keepdim=True).expand(-1, -1, 8)
    h2 = m.b8.mean().expand(8)
    return fn.linear(h * h2, m.o)


def expand_flat(m: Any, x: Tensor) -> Any:
    h = fn.linear(x, m.kk).relu().unsqueeze(-1).expand(-1, -1, -1, 2).flatten(2)
    return fn.linear(h * m.b8, m.o)


def expand_flat2(m: Any, x: Tensor) -> Any:
    h = fn.linear(x, m.kk).relu().unsqueeze(-2).expand(-1, -1, 2, -1).flatten(2)
    return fn.linear(h + m.b8, m.o)


def uniform_sum(m: Any, x: Tensor) -> Any:
    u = torch.ones(8, dtype=x.dtype)
    return fn.linear((fn.linear(x, m.q) + u).relu(), m.o) + (u * m.b8).sum()


def uniform_mul_sum(m: Any, x: Tensor) -> Any:
    u = torch.full((8, 8), 0.5, dtype=x.dtype)
    h = fn.linear(x, m.q)
    return fn.linear((h @ u) * h, m.o)


def uniform_cat(m: Any, x: Tensor) -> Any:
    h = fn.linear(x, m.kk)
    u = torch.ones_like(h)
    return fn.linear(torch.cat([h, u], -1).exp(), m.o)


def zero_cat_exp(m: Any, x: Tensor) -> Any:
    h = fn.linear(x, m.kk)
    return fn.linear(torch.cat([h, torch.zeros_like(h)], -1).exp(), m.o)


def zero_cat_relu(m: Any, x: Tensor) -> Any:
    h = fn.linear(x, m.kk)
    return fn.linear(torch.cat([h, torch.zeros_like(h)], -1).relu() + m.b8, m.o)


def zero_pad_softmax(m: Any, x: Tensor) -> Any:
    h = fn.linear(x, m.kk)
    return fn.linear(fn.pad(h, (2, 2)).softmax(-1), m.o)


def zero_pad_argsort(m: Any, x: Tensor) -> Any:
    h = fn.pad(fn.linear(x, m.kk), (0, 4))
    return m.emb[h.argsort(-1)[..., 0]]


def zero_weights(m: Any, x: Tensor) -> Any:
    w = torch.zeros(8, 5, dtype=x.dtype)
    w[:4] = m.kk
    return fn.linear(fn.linear(x, w).cos(), m.o)


def zero_state(m: Any, x: Tensor) -> Any:
    h = torch.zeros(x.shape[0], 8, dtype=x.dtype)
    for t in range(3):
        h = torch.cos(fn.linear(x[:, t], m.q) + fn.linear(h, m.w88) + m.b8)
    return fn.linear(h, m.o)


def expert_topk(m: Any, x: Tensor) -> Any:
    x = x[:, 0]
    r = fn.linear(x, m.kk).softmax(-1)
    w, i = r.topk(2, -1)
    y = 0
    for j in range(2):
        h = torch.einsum("thd,td->th", m.e3[i[:, j]], x).relu()
        y = y + torch.einsum("toh,th->to", m.d3[i[:, j]], h) * w[:, j : j + 1]
    return y


def set_attended(m: Any, x: Tensor) -> Any:
    values = fn.linear(x, m.q).topk(5, -1, sorted=False).values
    return ((x @ x.mT) @ values).exp().sum(-1)


def set_of_experts(m: Any, x: Tensor) -> Any:
    x = x[:, 0]
    w, i = fn.linear(x, m.kk).softmax(-1).topk(2, -1, sorted=False)
    h = torch.einsum("tkhd,td->tkh", m.e3[i], x).relu()
    return (torch.einsum("tkoh,tkh->tko", m.d3[i], h) * w[..., None]).sum(1)


def set_of_experts_and_the_first(m: Any, x: Tensor) -> Any:
    x = x[:, 0]
    w, i = fn.linear(x, m.kk).softmax(-1).topk(2, -1, sorted=False)
    h = torch.einsum("tkhd,td->tkh", m.e3[i], x).relu()
    return (torch.einsum("tkoh,tkh->tko", m.d3[i], h) * w[:, :1, None]).sum(1)


def expert_topk_crossed(m: Any, x: Tensor) -> Any:
    x = x[:, 0]
    r = fn.linear(x, m.kk).softmax(-1)
    i = r.topk(2, -1).indices
    h = torch.einsum("thd,td->th", m.e3[i[:, 0]], x).relu()
    return torch.einsum("toh,th->to", m.d3[i[:, 1]], h)


def expert_tokens_mixed(m: Any, x: Tensor) -> Any:
    x = x[:, 0]
    r = fn.linear(x, m.kk)
    i = r.argmax(-1)
    h = torch.einsum("thd,td->th", m.e3[i], x).relu()
    h = h + h.mean(0, keepdim=True)
    return torch.einsum("toh,th->to", m.d3[i], h)


def expert_tokens_cumsum(m: Any, x: Tensor) -> Any:
    x = x[:, 0]
    i = fn.linear(x, m.kk).argmax(-1)
    h = torch.einsum("thd,td->th", m.e3[i], x).relu().cumsum(0)
    return torch.einsum("toh,th->to", m.d3[i], h)


def expert_tokens_flip(m: Any, x: Tensor) -> Any:
    x = x[:, 0]
    i = fn.linear(x, m.kk).argmax(-1)
    h = torch.einsum("thd,td->th", m.e3[i], x).relu().flip(0)
    return torch.einsum("toh,th->to", m.d3[i], h)


def expert_slice(m: Any, x: Tensor) -> Any:
    x = x[:, 0]
    i = fn.linear(x, m.kk).argmax(-1)
    h = torch.einsum("thd,td->th", m.e3[i], x).relu()
    return torch.einsum("toh,th->to", m.d3[i[1:]], h[:-1])


def expert_eq(m: Any, x: Tensor) -> Any:
    x = x[:, 0]
    i = fn.linear(x, m.kk).argmax(-1)
    return sum((i == e)[:, None] * fn.linear(fn.linear(x, m.e3[e]).relu(), m.d3[e]) for e in range(4))


def expert_onehot(m: Any, x: Tensor) -> Any:
    x = x[:, 0]
    r = fn.linear(x, m.kk)
    g = fn.one_hot(r.argmax(-1), 4).to(x.dtype) * r.softmax(-1)
    h = torch.einsum("ehd,td->teh", m.e3, x).relu()
    return torch.einsum("teh,eoh,te->to", h, m.d3, g)


def positions_max(m: Any, x: Tensor) -> Any:
    x = x[:, 0]
    return m.emb[fn.linear(x, m.q).max(-1).indices]


def positions_gather(m: Any, x: Tensor) -> Any:
    h = fn.linear(x, m.q)
    i = h.topk(3, -1).indices
    return fn.linear(torch.gather(fn.linear(x, m.k), -1, i), m.o[:, :3])


def positions_scatter(m: Any, x: Tensor) -> Any:
    h = fn.linear(x, m.q)
    v, i = h.topk(3, -1)
    z = torch.zeros_like(h).scatter(-1, i, v)
    return fn.linear(z * fn.linear(x, m.k), m.o)


def positions_parity(m: Any, x: Tensor) -> Any:
    h = fn.linear(x, m.q)
    i = h.argmax(-1)
    return (i % 2).to(x.dtype)[..., None] * fn.linear(h, m.o)


def positions_cat(m: Any, x: Tensor) -> Any:
    h = fn.linear(x, m.q)
    i = h.topk(2, -1).indices
    j = torch.cat([i, i + 0], -1)
    return m.emb[j].sum(-2)


def positions_stack(m: Any, x: Tensor) -> Any:
    h = fn.linear(x, m.q)
    i = h.argmax(-1)
    j = torch.stack([i, i], -1)
    return m.emb[j].sum(-2)


def positions_other(m: Any, x: Tensor) -> Any:
    h = fn.linear(x, m.q)
    i = h.argmax(-1)
    return fn.linear(fn.linear(x, m.k), m.o)[..., :1] * fn.embedding(i, m.w88)[..., :3]


def positions_crosstalk(m: Any, x: Tensor) -> Any:
    h = fn.linear(x, m.q).unflatten(-1, (4, 2))
    i = h.argmax(-2)
    return m.mix[i].flatten(2)


def positions_flat(m: Any, x: Tensor) -> Any:
    h = fn.linear(x, m.q).unflatten(-1, (4, 2))
    i = h.flatten(-2).argmax(-1)
    return m.emb[i] + m.mix[i // 2]


def bn_train(m: Any, x: Tensor) -> Any:
    return fn.linear(fn.batch_norm(fn.linear(x, m.q).mT, None, None, m.b8, m.rm, True).mT.relu(), m.o)


def bn_noaffine(m: Any, x: Tensor) -> Any:
    return fn.linear(fn.batch_norm(fn.linear(x, m.q).mT, m.mean8, m.var8).mT.relu(), m.o)


def bn_const(m: Any, x: Tensor) -> Any:
    return fn.linear(
        fn.batch_norm(fn.linear(x, m.q).mT, torch.zeros(8, dtype=x.dtype), torch.ones(8, dtype=x.dtype)).mT.relu(), m.o
    )


def in_running(m: Any, x: Tensor) -> Any:
    return fn.linear(
        fn.instance_norm(fn.linear(x, m.q).mT, m.mean8, m.var8, m.b8, m.rm, use_input_stats=False).mT.tanh(), m.o
    )


def in_plain(m: Any, x: Tensor) -> Any:
    return fn.linear(fn.instance_norm(fn.linear(x, m.q).mT).mT.tanh(), m.o)


def softmax_flat(m: Any, x: Tensor) -> Any:
    h = fn.linear(x, m.q).unflatten(-1, (4, 2))
    return fn.linear(h.flatten(1).softmax(-1).view(h.shape).flatten(2), m.o)


def softmax_tokens(m: Any, x: Tensor) -> Any:
    return fn.linear(fn.linear(x, m.q).softmax(1), m.o)


def view_cross(m: Any, x: Tensor) -> Any:
    return fn.linear(fn.linear(x, m.q).flatten(1).view(x.shape[0], -1, 5)[..., :5].relu(), m.q).sum(1) @ m.o.T


def inner_product_with_a_repeated_number(m: Any, x: Tensor) -> Any:
    h = fn.linear(x, m.q)
    return m.head((h * h.sum(-1, keepdim=True).expand_as(h)).sum(-1, keepdim=True) * x.new_ones(8))


def inner_product_within_blocks(m: Any, x: Tensor) -> Any:
    h, g = fn.linear(x, m.q).unflatten(-1, (4, 2)), fn.linear(x, m.k).unflatten(-1, (4, 2))
    return fn.linear(torch.cat([(h * g).sum(-1), (h * g.flip(1)).sum(-1)], -1), m.o)


def inner_product_of_an_axis_with_itself(m: Any, x: Tensor) -> Any:
    return m.head(fn.linear(x, (m.square * m.square.T).sum(1)[:, None] * m.q).relu())


def normalized_rows_of_zeros(m: Any, x: Tensor) -> Any:
    h = fn.linear(x * (x[..., :1] > 0), m.q).relu()
    return fn.linear(fn.normalize(h, dim=-1) + fn.normalize(h.unflatten(-1, (4, 2)), dim=-1).flatten(-2), m.o)


def norm_with_a_bound_read_twice(m: Any, x: Tensor) -> Any:
    h = fn.linear(x * (x[..., :1] > 0), m.q).unflatten(-1, (4, 2))
    norm = h.norm(dim=-1, keepdim=True).clamp_min(1e-7)
    return fn.linear((h / norm + norm.log()).flatten(-2), m.o)


def cosine_heads(m: Any, x: Tensor) -> Any:
    h, g = fn.linear(x, m.q).unflatten(-1, (4, 2)), fn.linear(x, m.k).unflatten(-1, (4, 2))
    return fn.linear(fn.cosine_similarity(h, g, -1).softmax(-1), m.mix)


def wn(m: Any, x: Tensor) -> Any:
    return fn.linear(fn.linear(x, torch._weight_norm(m.q, m.b8[:, None], 0)).relu(), m.o)


def wn1(m: Any, x: Tensor) -> Any:
    return fn.linear(
        fn.linear(x, torch._weight_norm(m.q, m.one.expand(1, 5), 1)).relu(), torch._weight_norm(m.o, m.b8[None], 1)
    )


def wn_heads(m: Any, x: Tensor) -> Any:
    w = torch._weight_norm(m.q.view(4, 2, 5), m.ph2, 0)
    return fn.linear(fn.linear(x, w.flatten(0, 1)).relu(), m.o)


def mul_dup(m: Any, x: Tensor) -> Any:
    h = fn.linear(x, m.q)
    return fn.linear(h * h * h, m.o)


def div_self(m: Any, x: Tensor) -> Any:
    h = fn.linear(x, m.q)
    return fn.linear(h / h.abs().sum(-1, keepdim=True), m.o)


def add_self(m: Any, x: Tensor) -> Any:
    h = fn.linear(x, m.q)
    return fn.linear((h + h).relu() - h, m.o)


def bil_self(m: Any, x: Tensor) -> Any:
    h = fn.linear(x, m.q)
    return fn.bilinear(h, h, m.w88.view(1, 8, 8).expand(3, 8, 8))


def w_sym(m: Any, x: Tensor) -> Any:
    h = fn.linear(x, m.q).tanh()
    return fn.linear(h @ (m.w88 + m.w88.T), m.o)


def w_power(m: Any, x: Tensor) -> Any:
    h = fn.linear(x, m.q)
    return fn.linear(h @ m.w88 @ m.w88, m.o)


def wwT_units(m: Any, x: Tensor) -> Any:
    h = fn.linear(x, m.q).relu()
    return fn.linear(h @ (m.w88 @ m.w88.T).relu(), m.o)


def outer_heads(m: Any, x: Tensor) -> Any:
    h = fn.linear(x, m.q).unflatten(-1, (4, 2))
    return torch.einsum("bthd,btgd->bthg", h, h).logsumexp((-1, -2))


def outer_heads2(m: Any, x: Tensor) -> Any:
    h = fn.linear(x, m.q).unflatten(-1, (4, 2))
    k = fn.linear(x, m.k).unflatten(-1, (4, 2))
    return fn.linear(torch.einsum("bthd,btge->bthd", h, k).flatten(2), m.o)


def diag_heads(m: Any, x: Tensor) -> Any:
    h = fn.linear(x, m.q).unflatten(-1, (4, 2))
    return torch.einsum("bthd,hde,bthe->bt", h, m.w422, h)


def kv_shared(m: Any, x: Tensor) -> Any:
    q = heads(m, x, m.q)
    kv = heads(m, x, m.k)
    return out(m, (q @ kv.mT).softmax(-1) @ kv)


def half_w(m: Any, x: Tensor) -> Any:
    return fn.linear(fn.linear(x, m.q.half().to(x.dtype)).relu(), m.o)


def int_w(m: Any, x: Tensor) -> Any:
    return fn.linear(fn.linear(x, m.q.mul(4).round().to(torch.int32).to(x.dtype)).tanh(), m.o)


def cplx(m: Any, x: Tensor) -> Any:
    z = torch.view_as_complex(fn.linear(x, m.q).unflatten(-1, (4, 2)))
    return fn.linear(torch.view_as_real(z * m.b4).flatten(2), m.o)


def cplx_param(m: Any, x: Tensor) -> Any:
    z = torch.polar(fn.linear(x, m.kk).abs(), fn.linear(x, m.vv))
    return torch.cat([z.real, z.imag], -1) @ m.o.T


def sin_two(m: Any, x: Tensor) -> Any:
    h = fn.linear(x, m.q, m.b8)
    return fn.linear(torch.sin(2 * h), m.o) + fn.linear(torch.cos(3 * h), m.o)


def sin_shared_bias(m: Any, x: Tensor) -> Any:
    return fn.linear(torch.sin(fn.linear(x, m.q, m.b8)) * m.b8, m.o)


def sin_bias_sum(m: Any, x: Tensor) -> Any:
    return fn.linear(torch.sin(fn.linear(x, m.q, m.b8)) + m.b8.sum(), m.o)


def sin_pad_feature(m: Any, x: Tensor) -> Any:
    return fn.linear(torch.cos(fn.pad(fn.linear(x, m.kk, m.b4), (2, 2))), m.o)


def sin_expand(m: Any, x: Tensor) -> Any:
    h = (fn.linear(x, m.kk, m.b4)).unsqueeze(-1).expand(-1, -1, -1, 2)
    return fn.linear(torch.cos(h).flatten(2), m.o)


def sin_bias_table(m: Any, x: Tensor) -> Any:
    return fn.linear(torch.sin(fn.linear(x, m.kk) + m.mix[:1] + m.b4), m.o[:, :4])


def sin_mask(m: Any, x: Tensor) -> Any:
    h = fn.linear(x, m.q, m.b8)
    return fn.linear(torch.cos(torch.where(x[..., :1] > 0, h, 0.0)), m.o)


def sin_mask2(m: Any, x: Tensor) -> Any:
    h = fn.linear(x, m.q, m.b8)
    return fn.linear(torch.cos(h.masked_fill(x[..., :1] > 0, 0.0)), m.o)


def sin_dropzero(m: Any, x: Tensor) -> Any:
    h = fn.linear(x, m.q, m.b8)
    return fn.linear(torch.cos(h * (x[..., :1] > 0)), m.o)


def sin_max(m: Any, x: Tensor) -> Any:
    h = fn.linear(x, m.q, m.b8)
    return fn.linear(torch.cos(torch.maximum(h, fn.linear(x, m.k, m.b8))), m.o)


def sin_mean(m: Any, x: Tensor) -> Any:
    h = fn.linear(x, m.q, m.b8)
    return fn.linear(torch.cos(h - h.mean(1, keepdim=True)), m.o)


def sin_cum(m: Any, x: Tensor) -> Any:
    h = fn.linear(x, m.q, m.b8)
    return fn.linear(torch.cos(h.cumsum(1)), m.o)


def sin_tril(m: Any, x: Tensor) -> Any:
    h = fn.linear(x, m.q, m.b8).transpose(1, 2)
    return fn.linear(torch.cos(torch.stack([h, h], 1).tril()[:, 0].mT), m.o)


def sin_half(m: Any, x: Tensor) -> Any:
    h = fn.linear(x, m.q, m.b8) * 0.5
    return fn.linear(torch.sin(h) * torch.cos(3 * h), m.o)


def sin_sum2(m: Any, x: Tensor) -> Any:
    return fn.linear(torch.sin(fn.linear(x, m.q, m.b8) + fn.linear(x, m.k, m.rm)), m.o)


def sin_sum3(m: Any, x: Tensor) -> Any:
    return fn.linear(torch.sin(fn.linear(x, m.q, m.b8) + 2 * fn.linear(x, m.k, m.rm)), m.o)


def sin_bn(m: Any, x: Tensor) -> Any:
    return fn.linear(torch.sin(fn.batch_norm(fn.linear(x, m.q, m.b8).mT, m.mean8, m.var8).mT), m.o)


def sin_norm_b(m: Any, x: Tensor) -> Any:
    return fn.linear(torch.sin(fn.layer_norm(fn.linear(x, m.q), (8,), m.rm, m.b8)), m.o)


def rows_of_dead_units(m: Any, x: Tensor) -> Any:
    h = fn.linear(x, m.q).relu().transpose(1, 2)
    g = fn.linear(h, m.mix.repeat(2, 2)[:5, :5], m.b8[:5])
    return m.emb[g.argmax(1)]


def repeated_weight(m: Any, x: Tensor) -> Any:
    return m.emb[fn.linear(x, m.kk.repeat(2, 1)).argmax(-1)]


def expanded_bias(m: Any, x: Tensor) -> Any:
    return m.emb[fn.linear(x.relu(), m.q.relu(), m.one.expand(8)).argmax(-1)]


def written_buffer(m: Any, x: Tensor) -> Any:
    h = fn.linear(x, m.q)
    m.mean8.mul_(0.9).add_(h.mean((0, 1)))
    return fn.linear((h - m.mean8).relu(), m.o)


def padded_with_number(m: Any, x: Tensor) -> Any:
    return fn.linear(fn.pad(fn.linear(x, m.q), (0, 0, 1, 1), value=0.7), m.o)


def product_with_itself(m: Any, x: Tensor) -> Any:
    return fn.linear(x @ (m.q.T @ m.k) @ (m.q.T @ m.k), m.q) @ (m.w88 @ m.w88.T) @ m.o.T


def norm_within_block(m: Any, x: Tensor) -> Any:
    y = fn.rms_norm(fn.elu(fn.linear(x, m.q)).unflatten(-1, (4, 2)), (2,), m.b8[:2])
    return fn.linear(y.flatten(-2), m.o)


def constant_of_a_type(m: Any, x: Tensor) -> Any:
    h = m.fc1(x)
    return m.head(h + torch.arange(8.0).type_as(h))


def constant_of_a_device(m: Any, x: Tensor) -> Any:
    h = m.fc1(x)
    return m.head(h + torch.arange(8.0).to(h))


def constant_of_a_view(m: Any, x: Tensor) -> Any:
    h = m.fc1(x)
    return m.head(h + torch.arange(48.0).view_as(h) + torch.arange(48.0).reshape_as(h))


def constant_of_a_shape(m: Any, x: Tensor) -> Any:
    h = m.fc1(x)
    return m.head(h + torch.arange(8.0).expand_as(h))


def rows_put_at_units(m: Any, x: Tensor) -> Any:
    h = m.fc1(x)
    return m.head(h.index_put([h.argmax(-1) % 6], m.square[:6] + h).tanh())


def units_added_at_units(m: Any, x: Tensor) -> Any:
    h = m.fc1(x)
    return m.head(h.T.index_add(0, h[0].argsort(), m.square[:, :6]).T.tanh())


def scattered_from_units(m: Any, x: Tensor) -> Any:
    h = m.fc1(x)
    mask = (torch.arange(6) % 2 == 0)[:, None].expand_as(h)
    return m.head(h.masked_scatter(mask, m.square.T).tanh())


def windows_of_units(m: Any, x: Tensor) -> Any:
    """Combine windows of units with the first units of the windows."""
    h = m.fc1(x).relu()
    return m.head(h * h.unfold(-1, 2, 1)[..., 0].sum(-1, keepdim=True) + m.gain)


def overlapping_windows(m: Any, x: Tensor) -> Any:
    h = m.fc1(x).relu()
    windows = fn.pad(h, (0, 1)).unfold(-1, 2, 1)
    return m.head(windows.amax(-1) + windows.mean(-1))


def blocks_and_units(m: Any, x: Tensor) -> Any:
    """Read the same units as blocks without overlap, and one by one."""
    h = m.fc1(x).relu()
    return m.head(h * h.unfold(-1, 2, 2).sum(-1).repeat_interleave(2, -1))


def filtered_units(m: Any, x: Tensor) -> Any:
    """Filter units along their own axis."""
    h = m.fc1(x).tanh()
    return m.head(torch.fft.irfft(torch.fft.rfft(h) * m.gain[:5], n=8))


def magnitudes_of_frequencies(m: Any, x: Tensor) -> Any:
    """Compute spectra over rows. Absolute values preserve the order of units, but not the signs of two units in a
    product.
    """
    spectrum = torch.fft.fft(m.fc1(x), dim=0)
    return m.head(spectrum.abs() + (spectrum * spectrum.roll(1, -1)).abs())


def mixed_frequencies(m: Any, x: Tensor) -> Any:
    """Compute real parts of a transform of two axes, as in FNet."""
    h = m.fc1(x)
    return m.head(fn.layer_norm(h + torch.fft.fftn(h, dim=(-2, -1)).real, (8,)))


def frequencies_of_phases(m: Any, x: Tensor) -> Any:
    """Compute angles, which do not depend on positive scales, but on signs."""
    return m.head(torch.fft.fft(m.fc1(x).tanh() * m.gain, dim=0).angle())


def zeros_beside_part(m: Any, x: Tensor) -> Tensor:
    """Use zeros first as a state, and later as parts of another layout."""
    h = m.fc2(torch.cat([x[:, :3], x.new_zeros(6, 5)], 1)).tanh()
    result: Tensor = m.head(m.fc2(torch.cat([x[:, :3], h[:, :5]], 1)).tanh())
    return result


def zeros_plus_one(m: Any, x: Tensor) -> Tensor:
    start = x.new_zeros(6, 3) + torch.arange(3, dtype=x.dtype)
    return m.head(m.fc2(torch.cat([x, start], 1)) + m.fc1(x).relu())


def zeros_written_into(m: Any, x: Tensor) -> Tensor:
    start = x.new_zeros(6, 8)
    start[:, 2] = 1.0
    return m.head(m.fc2(torch.cat([x, start[:, :3]], 1)).relu() + m.fc2(start))


def zeros_cosine(m: Any, x: Tensor) -> Tensor:
    return m.head(m.fc2(torch.cat([x, x.new_zeros(6, 3)], 1).cos()).relu())


def zeros_normed(m: Any, x: Tensor) -> Tensor:
    return m.head(m.fc2(fn.layer_norm(torch.cat([x, x.new_zeros(6, 3)], 1), (8,))).relu())


def zeros_sorted(m: Any, x: Tensor) -> Tensor:
    joined = torch.cat([x, x.new_zeros(6, 3)], 1)
    return m.head(m.fc2(joined.sort(-1).values).relu() + m.emb[joined.argmin(-1)].repeat(1, 2))


def zeros_to_a_power(m: Any, x: Tensor) -> Tensor:
    h = m.fc1(x).relu()
    return m.head((h * x.new_zeros(6, 8)).exp() * h + 0.0 * m.fc1(x))


def zeros_divided_into(m: Any, x: Tensor) -> Tensor:
    h = m.fc1(x).relu()
    return m.head(h / (x.new_zeros(6, 8) + 1.0) + (m.fc1(x) / 0.0).clamp(-1, 1))


def zeros_twice(m: Any, x: Tensor) -> Tensor:
    """Use one constant in two layers whose states are mixed in different ways."""
    start = torch.cat([x[:, :4], x.new_zeros(6, 4)], 1)
    a, b = m.fc2(start).tanh(), torch.nn.functional.linear(start, m.w88).relu()
    return m.head(torch.cat([a[:, :4], b[:, 4:]], 1) + m.fc2(torch.cat([x[:, :4], a[:, 4:]], 1)))


def _rows_to(x: Tensor, rows: tuple[int, ...] = (0, 2, 1, 0, 2, 0)) -> Tensor:
    return torch.tensor(rows).view(-1, 1).expand(-1, 8)


def scatter_product(m: Any, x: Tensor) -> Any:
    """Multiply three, one and two factors, such that no common scale and no common sign exists."""
    h = m.fc1(x).relu() + 0.1
    return m.head(torch.ones(3, 8, dtype=x.dtype).scatter_reduce(0, _rows_to(x), h, "prod"))


def scatter_largest_of_signed(m: Any, x: Tensor) -> Any:
    h = m.fc1(x).tanh()
    return m.head(x.new_zeros(3, 8).scatter_reduce(0, _rows_to(x), h, "amax", include_self=False))


def scatter_smallest_of_ones(m: Any, x: Tensor) -> Any:
    h = m.fc1(x).relu()
    return m.head(torch.ones(3, 8, dtype=x.dtype).scatter_reduce(0, _rows_to(x), h, "amin"))


def scatter_mean_with_number(m: Any, x: Tensor) -> Any:
    h = m.fc1(x).relu()
    return m.head(torch.full((3, 8), 0.3, dtype=x.dtype).scatter_reduce(0, _rows_to(x), h, "mean"))


def scatter_rows_by_unit(m: Any, x: Tensor) -> Any:
    """Scatter each unit to different rows."""
    index = torch.arange(48).view(6, 8) % 3
    return m.head(x.new_zeros(3, 8).scatter_add(0, index, m.fc1(x).relu()))


def scatter_multiplied(m: Any, x: Tensor) -> Any:
    h = m.fc1(x).relu() + 0.1
    return m.head(m.fc1(x).tanh().scatter(0, _rows_to(x), -2.0, reduce="multiply") + h)


def scatter_by_values(m: Any, x: Tensor) -> Any:
    """Scatter rows to positions that depend on the units."""
    h = m.fc1(x)
    index = (h > 0.3).long().sum(1, keepdim=True).clamp(max=2).expand(-1, 8)
    return m.head(x.new_zeros(3, 8).scatter_add(0, index, h.relu()))


def scatter_to_chosen_units(m: Any, x: Tensor) -> Any:
    h = m.fc1(x)
    best = h.topk(2).indices
    return m.head(torch.zeros_like(h).scatter_add(1, best, m.router(x)[:, :2]) * m.fc1(x).tanh())


def scatter_part_of_rows(m: Any, x: Tensor) -> Any:
    h = m.fc1(x).relu()
    return m.head(m.fc1(x).tanh().scatter_add(0, _rows_to(x)[:3, :5], h[:, :5]))


def filled_with_units(m: Any, x: Tensor) -> Any:
    return m.head(m.fc1(x).relu().index_fill(0, torch.tensor([1, 4]), m.scalar))


def reduced_by_index(m: Any, x: Tensor) -> Any:
    return m.head(m.fc1(x).tanh().index_copy(0, torch.tensor([1, 4]), m.w88[:2]))


def segments_with_start(m: Any, x: Tensor) -> Any:
    h = m.fc1(x).relu()
    return m.head(torch.segment_reduce(h, "sum", lengths=torch.tensor([2, 4]), initial=0.5))


def bag_of_largest(m: Any, x: Tensor) -> Any:
    bags = torch.arange(12).view(6, 2) % 8
    return m.head(fn.embedding_bag(bags, m.w88, mode="max").tanh() + fn.embedding_bag(bags, m.w88))


def bag_weighted_by_units(m: Any, x: Tensor) -> Any:
    bags = torch.arange(48).view(6, 8) % 8
    return m.head(fn.embedding_bag(bags, m.w88, mode="sum", per_sample_weights=m.fc1(x)).relu())


def bag_of_chosen_units(m: Any, x: Tensor) -> Any:
    chosen = m.fc1(x).topk(2).indices
    return fn.embedding_bag(chosen, m.emb, mode="sum") @ m.mix @ m.table


def city_blocks(m: Any, x: Tensor) -> Any:
    """Compute sums of magnitudes, which signs preserve and rotations do not."""
    return torch.cdist(m.fc1(x), m.w88, p=1.0) @ m.o.T


def codebook(m: Any, x: Tensor) -> Any:
    z = m.fc1(x)
    return m.head(m.square[torch.cdist(z, m.square).argmin(-1)].tanh())


def codebook_used_twice(m: Any, x: Tensor) -> Any:
    z = m.fc1(x)
    return m.square.T[torch.cdist(z, m.square).argmin(-1)] @ m.o.T


def distances_of_rectified(m: Any, x: Tensor) -> Any:
    return torch.cdist(m.fc1(x).relu(), m.w88).relu() @ m.o.T


def distances_to_itself(m: Any, x: Tensor) -> Any:
    return torch.cdist(m.w88, m.w88.T) @ m.o.T + torch.dist(m.w88, m.square)


def distance_of_vectors(m: Any, x: Tensor) -> Any:
    return m.head(m.fc1(x)) * torch.dist(m.b8, m.rm) + m.router(x)[:, :3]


def distances_of_pairs(m: Any, x: Tensor) -> Any:
    return torch.nn.functional.pdist(m.fc1(x)) * torch.nn.functional.pdist(m.fc1(x).tanh(), p=3.0)


def normed_as_a_whole(m: Any, x: Tensor) -> Any:
    """Compute one norm of all rows, which scales of single rows change."""
    weight = torch._weight_norm(m.w88, m.scalar, -1)
    return m.head(fn.linear(m.fc1(x).relu(), weight).relu())


def normed_as_a_whole_and_by_rows(m: Any, x: Tensor) -> Any:
    weight = torch._weight_norm(m.w88, m.scalar, -1)
    return m.head(fn.linear(fn.linear(m.fc1(x), weight), torch._weight_norm(m.w88, m.square[:, :1], 0)))


def inverse_and_itself(m: Any, x: Tensor) -> Any:
    return m.head(fn.linear(m.fc1(x), m.w88).relu() @ torch.linalg.inv(m.w88))


def inverse_of_a_square(m: Any, x: Tensor) -> Any:
    return m.head(m.fc1(x).relu() @ torch.linalg.inv(m.w88 @ m.w88.T + torch.eye(8, dtype=x.dtype)))


def inverses_of_blocks(m: Any, x: Tensor) -> Any:
    return m.head((m.fc1(x).view(6, 4, 1, 2) @ torch.linalg.inv(m.w422)).flatten(1).relu())


def solved(m: Any, x: Tensor) -> Any:
    return m.head(torch.linalg.solve(m.w88, m.fc1(x).relu().T).T)


def middle_of_dead_units(m: Any, x: Tensor) -> Any:
    """Compute the median of equal entries, whose order decides."""
    return m.emb[m.fc1(x).relu().median(1).indices] @ m.table


def rank_of_dead_units(m: Any, x: Tensor) -> Any:
    return m.emb[m.fc1(x).relu().kthvalue(3, 1).indices] @ m.table


def lower_middle(m: Any, x: Tensor) -> Any:
    """Compute the median of an even number of entries, which is the lower one, so signs do not pass."""
    return m.head(m.fc1(x).median(0).values.tanh() + m.fc1(x).tanh().mode(0).values)


def ranges(m: Any, x: Tensor) -> Any:
    bounds = torch.tensor([-1.0, 0.0, 1.0], dtype=x.dtype)
    return m.head(m.fc1(x).relu() * torch.bucketize(m.fc1(x).relu(), bounds))


def learned_ranges(m: Any, x: Tensor) -> Any:
    return m.head(torch.bucketize(m.fc1(x), m.b8.sort().values) * m.fc1(x).tanh())


def signs_copied(m: Any, x: Tensor) -> Any:
    return m.head(torch.copysign(m.fc1(x), m.router(x).repeat(1, 2)) + m.fc1(x).tanh().signbit())


def doubled_by_units(m: Any, x: Tensor) -> Any:
    return m.head(torch.ldexp(m.fc1(x), m.b8))


def singular_values(m: Any, x: Tensor) -> Any:
    return m.head(torch.linalg.svdvals(m.w88) * m.fc1(x).relu()) + torch.linalg.matrix_norm(m.w88 @ m.square, 2)


def stacked_vectors(m: Any, x: Tensor) -> Any:
    both = torch.vstack([m.b8, m.rm.tanh()])
    return m.head(m.fc1(x).relu() @ both.T @ torch.column_stack([m.b8, m.gain]).T)


def sampled_at_units(m: Any, x: Tensor) -> Any:
    image = m.fc1(x).tanh().view(6, 2, 2, 2)
    grid = m.router(x).tanh().view(6, 2, 1, 2)
    return fn.grid_sample(image, grid, align_corners=False).flatten(1) @ m.mix @ m.table


ROWS: tuple[Forward, ...] = (
    scatter_product,
    scatter_largest_of_signed,
    scatter_smallest_of_ones,
    scatter_mean_with_number,
    scatter_rows_by_unit,
    scatter_multiplied,
    scatter_by_values,
    scatter_to_chosen_units,
    scatter_part_of_rows,
    filled_with_units,
    reduced_by_index,
    segments_with_start,
    bag_of_largest,
    bag_weighted_by_units,
    bag_of_chosen_units,
    city_blocks,
    codebook,
    codebook_used_twice,
    distances_of_rectified,
    distances_to_itself,
    distance_of_vectors,
    distances_of_pairs,
    normed_as_a_whole,
    normed_as_a_whole_and_by_rows,
    inverse_and_itself,
    inverse_of_a_square,
    inverses_of_blocks,
    solved,
    middle_of_dead_units,
    rank_of_dead_units,
    lower_middle,
    ranges,
    learned_ranges,
    signs_copied,
    doubled_by_units,
    singular_values,
    stacked_vectors,
    sampled_at_units,
    zeros_beside_part,
    zeros_plus_one,
    zeros_written_into,
    zeros_cosine,
    zeros_normed,
    zeros_sorted,
    zeros_to_a_power,
    zeros_divided_into,
    zeros_twice,
    windows_of_units,
    overlapping_windows,
    blocks_and_units,
    filtered_units,
    frequencies_of_phases,
    constant_of_a_type,
    constant_of_a_device,
    constant_of_a_view,
    constant_of_a_shape,
    rows_put_at_units,
    units_added_at_units,
    scattered_from_units,
    expert_dot,
    expert_dot2,
    expert_cross,
    expert_cross2,
    expert_direct,
    expert_direct2,
    cos_pad,
    cos_scatter,
    argmax_relu,
    topk_relu,
    sort_sign,
    argmax_zero_gain,
    squared_positions,
    gather_part,
    positions_step,
    cond_positions,
    square_sum_int,
    batch_sum_int,
    norm0,
    bits,
    clamp_rev2,
    cummax_idx,
    prelu_inplace,
    prelu_kernel,
    ln_stats,
    gn_stats,
    copy_int,
    copy_int2,
    half,
    topk_unsorted,
    set_first,
    set_weighted,
    set_summed_up,
    set_of_other_rows,
    set_halves,
    set_crossed,
    too_few_left,
    filled_between,
    overwritten_too_often,
    equal_sums_of_blocks,
    scalar_softmax,
    inf_sin,
    item_input,
    item_param,
)
TOKENS: tuple[Forward, ...] = (
    mixed_frequencies,
    magnitudes_of_frequencies,
    softmax_heads,
    talking,
    talking_same,
    per_head_scale,
    per_head_bias,
    gqa_repeat,
    gqa_inter,
    gqa_mixed,
    gqa_sdpa,
    same_qk,
    qk_heads_crossed,
    qk_heads_rolled,
    heads_batch_crossed,
    linear_attn,
    qk_norm,
    qk_norm_all,
    ln_v,
    rms_two,
    rms_inner_gelu,
    rms_outer_gelu,
    gn_grouped,
    gn_grouped8,
    shuffle_dw,
    shuffle_grouped,
    transposed_grouped,
    square_batch,
    square_both,
    square_two_steps,
    square_then,
    square_heads,
    square_heads_outer,
    stack_both,
    stack_mixed,
    stack_view,
    stack_view2,
    stack_same,
    expand_twice,
    expand_flat,
    expand_flat2,
    uniform_sum,
    uniform_mul_sum,
    uniform_cat,
    zero_cat_exp,
    zero_cat_relu,
    zero_pad_softmax,
    zero_pad_argsort,
    zero_weights,
    zero_state,
    expert_topk,
    set_attended,
    set_of_experts,
    set_of_experts_and_the_first,
    expert_topk_crossed,
    expert_tokens_mixed,
    expert_tokens_cumsum,
    expert_tokens_flip,
    expert_slice,
    expert_eq,
    expert_onehot,
    positions_max,
    positions_gather,
    positions_scatter,
    positions_parity,
    positions_cat,
    positions_stack,
    positions_other,
    positions_crosstalk,
    positions_flat,
    bn_train,
    bn_noaffine,
    bn_const,
    in_running,
    in_plain,
    softmax_flat,
    softmax_tokens,
    view_cross,
    wn,
    wn1,
    wn_heads,
    mul_dup,
    div_self,
    add_self,
    bil_self,
    w_sym,
    w_power,
    wwT_units,
    outer_heads,
    outer_heads2,
    diag_heads,
    kv_shared,
    half_w,
    int_w,
    cplx,
    cplx_param,
    sin_two,
    sin_shared_bias,
    sin_bias_sum,
    sin_pad_feature,
    sin_expand,
    sin_bias_table,
    sin_mask,
    sin_mask2,
    sin_dropzero,
    sin_max,
    sin_mean,
    sin_cum,
    sin_tril,
    sin_half,
    sin_sum2,
    sin_sum3,
    sin_bn,
    sin_norm_b,
    rows_of_dead_units,
    repeated_weight,
    expanded_bias,
    written_buffer,
    padded_with_number,
    product_with_itself,
    inner_product_with_a_repeated_number,
    inner_product_within_blocks,
    inner_product_of_an_axis_with_itself,
    normalized_rows_of_zeros,
    norm_with_a_bound_read_twice,
    cosine_heads,
    norm_within_block,
)

"""Modules that were written to find omissions: each null space is spanned, elements compose, and copies are
recovered.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import regauge as rg


class Written(nn.Module):
    """Submodules and parameters with a given forward function. Boolean and integer tensors are buffers."""

    def __init__(self, run: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)
        self.run = run

    def forward(self, *inputs: Tensor) -> Any:
        return self.run(self, *inputs)


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape, dtype=torch.float64))


def linear(*sizes: int, bias: bool = True) -> nn.Linear:
    return nn.Linear(*sizes, bias=bias, dtype=torch.float64)


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (2, -1)).transpose(1, 2)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2)


def _biases_of_heads(m: Any, x: Tensor) -> Tensor:
    q, k, v = (heads(part(x)) for part in (m.q, m.k, m.v))
    y: Tensor = m.o(attend(q, k + m.bk[:, None], v + m.bv[:, None]))
    return y


def _norm_of_each_head(m: Any, x: Tensor) -> Tensor:
    q, k, v = (heads(part(x)) for part in (m.q, m.k, m.v))
    q, k = (functional.layer_norm(t, (4,)) * g[:, None] + b[:, None] for t, g, b in ((q, m.gq, m.bq), (k, m.gk, m.bk)))
    y: Tensor = m.o(attend(q, k, v))
    return y


def _norm_of_all_heads(m: Any, x: Tensor) -> Tensor:
    y: Tensor = m.o(attend(heads(m.nq(m.q(x))), heads(m.nk(m.k(x))), heads(m.v(x))))
    return y


def _scales_of_edges(m: Any, x: Tensor) -> Tensor:
    for coefficients, scales in ((m.c0, m.s0), (m.c1, m.s1), (m.c2, m.s2)):
        basis = (-((x[..., None] - torch.linspace(-2, 2, 4, dtype=x.dtype)) ** 2)).exp()
        x = torch.einsum("bin,oin->bo", basis, coefficients * scales[..., None])
    return x


def _weight_of_unit_rows(m: Any, x: Tensor) -> Tensor:
    rows = m.w + m.b @ m.a
    y: Tensor = m.o(functional.linear(x, m.size[:, None] * rows / rows.norm(dim=1, keepdim=True)).tanh())
    return y


def _cell(m: Any, x: Tensor) -> Tensor:
    h = torch.zeros(x.shape[0], 5, dtype=x.dtype)
    for t in range(x.shape[1]):
        h = m.cell(x[:, t], h)
    y: Tensor = m.o(h)
    return y


def _long_cell(m: Any, x: Tensor) -> Tensor:
    state = (torch.zeros(x.shape[0], 5, dtype=x.dtype),) * 2
    for t in range(x.shape[1]):
        state = m.cell(x[:, t], state)
    y: Tensor = m.o(state[0])
    return y


def _written_gru(m: Any, x: Tensor) -> Tensor:
    h = torch.zeros(x.shape[0], 5, dtype=x.dtype)
    for t in range(x.shape[1]):
        a, b = m.x(x[:, t]), m.h(h)
        gate, rate = (a[:, :10] + b[:, :10]).sigmoid().chunk(2, 1)
        h = rate * h + (1 - rate) * (a[:, 10:] + gate * b[:, 10:]).tanh()
    y: Tensor = m.o(h)
    return y


def _written_gates(m: Any, x: Tensor) -> Tensor:
    h = torch.zeros(x.shape[0], 5, dtype=x.dtype)
    for t in range(x.shape[1]):
        (a, b), (c, d) = m.x(x[:, t]).chunk(2, 1), m.h(h).chunk(2, 1)
        h = (a + c).sigmoid() * h + (b + d).tanh()
    y: Tensor = m.o(h)
    return y


def _steps(m: Any, x: Tensor) -> Tensor:
    for _ in range(3):
        x = (m.x(x) + m.h(x.tanh())).tanh()
    return x


def _bias_of_one_step(m: Any, x: Tensor) -> Tensor:
    return (m.x(x) + m.h(x)).tanh() + m.x(x.cos()).tanh()


def _unlike_steps(m: Any, x: Tensor) -> Tensor:
    return (m.x(x) + m.h(x)).tanh() + (m.x(x.cos()) + 2 * m.h(x.sin())).tanh()


def _masked(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    y: Tensor = m.o(torch.where(m.mask, h.relu(), functional.leaky_relu(h, 0.5)))
    return y


def _largest(m: Any, x: Tensor, *, is_sorted: bool, add: float = 0.0) -> Tensor:
    h = m.a(x).relu()
    values, positions = h.topk(3, -1, sorted=is_sorted)
    y: Tensor = m.o(torch.zeros_like(h).scatter(-1, positions, values + add if add else values))
    return y


def _written_over(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).unflatten(-1, (4, 2))
    best = h.argmax(-1)
    y: Tensor = m.o(torch.zeros_like(h[..., 0, :]).scatter(-1, best, h.sum(-1)))
    return y


def _projected(m: Any, x: Tensor) -> Tensor:
    y: Tensor = m.o(m.layer(x)[0])
    return y


def _mixed_heads(m: Any, x: Tensor) -> Tensor:
    """Compute attention by einsum, with scores that the heads mix, and with a gain for each head."""
    q, k, v = (part(x).unflatten(-1, (2, -1)) for part in (m.q, m.k, m.v))
    scores = torch.einsum("b i h d, b j h d -> b h i j", q, k)
    weights = torch.einsum("bhij,hg->bgij", scores, m.mix).softmax(-1)
    y: Tensor = m.o((torch.einsum("bhij,bjhd->bihd", weights, v) * m.gain[:, None]).flatten(2))
    return y


def _pooled_by_columns(m: Any, x: Tensor) -> Tensor:
    """Compute attention of one query whose weights are the right factor, as in blocks of global context."""
    y: Tensor = m.o((m.v(x).mT @ m.s(x).softmax(1)).flatten(1))
    return y


def _largest_of_positions(m: Any, x: Tensor) -> Tensor:
    y: Tensor = m.o(torch.cat([m.a(x).amax(1), m.b(x).min(1).values, m.c(x).logsumexp(1)], -1))
    return y


def _resampled(m: Any, x: Tensor) -> Tensor:
    h = functional.pad(m.a(x), (1, 1), mode="reflect")
    h = functional.interpolate(functional.max_pool1d(h, 2, padding=1), scale_factor=2, mode="linear")
    y: Tensor = m.o(functional.adaptive_max_pool1d(h, 3).flatten(1))
    return y


def _padded(m: Any, x: Tensor, value: float) -> Tensor:
    y: Tensor = m.o(functional.pad(m.a(x), (1, 1), value=value).mean(-1))
    return y


def _another_divisor(m: Any, x: Tensor) -> Tensor:
    y: Tensor = m.o(functional.avg_pool2d(m.a(x), (1, 2), divisor_override=3).mean((-2, -1)))
    return y


def _bag(m: Any, x: Tensor, starts: list[int], mode: str) -> Tensor:
    rows, offsets = (3 * x.abs()).long().clamp(max=5).flatten(), torch.tensor(starts)
    y: Tensor = m.o(m.h(functional.embedding_bag(rows, m.table, offsets, mode=mode)).tanh())
    return y


def _beside(m: Any, x: Tensor, *, is_between: bool) -> Tensor:
    """Concatenate a feature with the input, as in radiance fields: before the input, or on both sides."""
    h, rest = m.a(x[..., :2]), x[..., 2:]
    y: Tensor = m.o(m.c(torch.cat([h, rest, h] if is_between else [h, rest], -1)).tanh())
    return y


QKV = {"q": linear(5, 8), "k": linear(5, 8), "v": linear(5, 6), "o": linear(6, 3)}
EDGES = {"c0": weight(6, 3, 4), "s0": weight(6, 3), "c1": weight(5, 6, 4), "s1": weight(5, 6), "c2": weight(2, 5, 4)}
STEP = {"x": linear(4, 4), "h": linear(4, 4)}
BIASES = {name: weight(2, 4) for name in ("gq", "bq", "gk", "bk")}
FLAT = {name: linear(*sizes, bias=False) for name, sizes in {"q": (5, 6), "k": (5, 6), "v": (5, 6)}.items()}
DOUBLE: Any = {"dtype": torch.float64}


def _bags(starts: list[int], mode: str) -> Callable[[], nn.Module]:
    run = partial(_bag, starts=starts, mode=mode)
    return lambda: Written(run, table=weight(6, 3), h=linear(3, 4), o=linear(4, 2))


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "biases of heads": (
        lambda: Written(_biases_of_heads, **FLAT, bk=weight(2, 3), bv=weight(2, 3), o=linear(6, 3)),
        (2, 4, 5),
        12,
    ),
    "norm of each head": (lambda: Written(_norm_of_each_head, **QKV, **BIASES), (3, 4, 5), 38),
    "norm of all heads": (
        lambda: Written(_norm_of_all_heads, **QKV, nq=nn.LayerNorm(8, **DOUBLE), nk=nn.LayerNorm(8, **DOUBLE)),
        (3, 4, 5),
        26,
    ),
    "scales of edges": (lambda: Written(_scales_of_edges, **EDGES, s2=weight(2, 5)), (6, 3), 0),
    "rows of length one": (
        lambda: Written(
            _weight_of_unit_rows, w=weight(6, 5), a=weight(2, 5), b=weight(6, 2), size=weight(6), o=linear(6, 2)
        ),
        (9, 5),
        0,
    ),
    "cells": (lambda: Written(_cell, cell=nn.RNNCell(3, 5, **DOUBLE), o=linear(5, 2)), (3, 3, 3), 5),
    "gated cells": (lambda: Written(_cell, cell=nn.GRUCell(3, 5, **DOUBLE), o=linear(5, 2)), (3, 3, 3), 10),
    "long cells": (lambda: Written(_long_cell, cell=nn.LSTMCell(3, 5, **DOUBLE), o=linear(5, 2)), (3, 3, 3), 20),
    "written gates": (lambda: Written(_written_gates, x=linear(3, 10), h=linear(5, 10), o=linear(5, 2)), (4, 3, 3), 10),
    "written gru": (lambda: Written(_written_gru, x=linear(3, 15), h=linear(5, 15), o=linear(5, 2)), (4, 3, 3), 10),
    "projections": (
        lambda: Written(
            _projected,
            layer=nn.LSTM(3, 4, proj_size=2, batch_first=True, bidirectional=True, **DOUBLE),
            o=linear(4, 2),
        ),
        (3, 5, 3),
        32,
    ),
    "steps": (lambda: Written(_steps, **STEP), (6, 4), 4),
    "a bias of one step": (lambda: Written(_bias_of_one_step, **STEP), (6, 4), 0),
    "unlike steps": (lambda: Written(_unlike_steps, **STEP), (6, 4), 0),
    "the largest": (lambda: Written(partial(_largest, is_sorted=True), a=linear(4, 8), o=linear(8, 3)), (9, 4), 0),
    "the largest, unsorted": (
        lambda: Written(partial(_largest, is_sorted=False), a=linear(4, 8), o=linear(8, 3)),
        (9, 4),
        0,
    ),
    "the largest, shifted": (
        lambda: Written(partial(_largest, is_sorted=False, add=1.0), a=linear(4, 8), o=linear(8, 3)),
        (9, 4),
        0,
    ),
    "one over another": (lambda: Written(_written_over, a=linear(3, 8), o=linear(2, 3)), (9, 3), 0),
    "a boolean mask": (
        lambda: Written(_masked, a=linear(3, 6), o=linear(6, 2), mask=torch.arange(6) % 2 == 0),
        (6, 3),
        0,
    ),
    "mixed heads": (
        lambda: Written(
            _mixed_heads,
            q=linear(3, 4),
            k=linear(3, 4),
            v=linear(3, 4),
            o=linear(4, 4),
            mix=weight(2, 2),
            gain=weight(2),
        ),
        (3, 4, 3),
        8,
    ),
    "weights on the right": (
        lambda: Written(_pooled_by_columns, v=linear(3, 4), s=linear(3, 1), o=linear(4, 4)),
        (5, 4, 3),
        5,
    ),
    "the largest of positions": (
        lambda: Written(_largest_of_positions, a=linear(3, 2), b=linear(3, 2), c=linear(3, 2), o=linear(6, 6)),
        (5, 4, 3),
        6,
    ),
    "resampled": (
        lambda: Written(_resampled, a=nn.Conv1d(2, 3, 2, **DOUBLE), o=linear(9, 9)),
        (4, 2, 6),
        3,
    ),
    "sums of three rows": (_bags([0, 3, 6], "sum"), (3, 3), 3),
    "features before the input": (
        lambda: Written(partial(_beside, is_between=False), a=linear(2, 2), c=linear(5, 4), o=linear(4, 2)),
        (9, 5),
        2,
    ),
    "states of a recurrent layer as the output": (
        lambda: Written(lambda m, x: m.layer(x)[1], layer=nn.GRU(3, 2, 2, bidirectional=True, **DOUBLE)),
        (4, 2, 3),
        16,
    ),
}
"""Modules, the shape of their input, and the dimension of their translations."""
OFFSETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "padded with zeros": (
        lambda: Written(partial(_padded, value=0.0), a=nn.Conv1d(2, 3, 1, **DOUBLE), o=linear(3, 3)),
        (9, 2, 4),
        0,
    ),
    "padded with ones": (
        lambda: Written(partial(_padded, value=1.0), a=nn.Conv1d(2, 3, 1, **DOUBLE), o=linear(3, 3)),
        (9, 2, 4),
        0,
    ),
    "another divisor": (
        lambda: Written(_another_divisor, a=nn.Conv2d(2, 3, 1, **DOUBLE), o=linear(3, 3)),
        (9, 2, 2, 4),
        0,
    ),
    "means of any rows": (_bags([0, 2, 5], "mean"), (3, 3), 0),
    "sums of empty bags": (_bags([0, 0, 9], "sum"), (3, 3), 0),
    "features around the input": (
        lambda: Written(partial(_beside, is_between=True), a=linear(2, 2), c=linear(7, 4), o=linear(4, 2)),
        (9, 5),
        0,
    ),
    "the largest of units": (
        lambda: Written(lambda m, x: m.o(m.a(x).amax(-1, keepdim=True)), a=linear(3, 4), o=linear(1, 2)),
        (9, 3),
        1,
    ),
}
"""Modules like `MODULES`, in which an offset ends at an operator through which similar operators pass it, fully or
partly."""
LARGEST = ("the largest", "the largest, unsorted")
"""Modules whose 8 units can be permuted, which no null space shows."""
BEYOND = dict.fromkeys(LARGEST, 8) | {"rows of length one": 18, "norm of each head": 4}
"""Directions without a rule. Examples are a weight that compensates a product of two other weights, and two directions
for each head with its own norms, such as the inverse of the keys' gain on the bias of the queries. Small scales do not
change which entries are the largest."""
HELD = {"the largest, shifted": 8, "one over another": 4}
"""Indices of units that must keep their positions, because the choice between equal units, or the order of writing,
matters."""


@pytest.mark.parametrize("name", MODULES)
def test_the_group_is_complete_composes_and_brings_copies_back(name: str) -> None:
    torch.manual_seed(0)
    make, shape, count = MODULES[name]
    module, x = make(), torch.randn(shape, dtype=torch.float64)
    symmetry = rg.discover(module, x)
    assert not any("refused" in note or "stays" in note for note in symmetry.notes)
    assert sum(family.size for family in symmetry.translations) == count
    if name in HELD:
        assert HELD[name] not in [group.size for group in symmetry.groups]
        return
    assert rg.discovery.nullity(module, (x,), symmetry=symmetry).unexplained == BEYOND.get(name, 0)
    assert name not in LARGEST or [group.size for group in symmetry.groups] == [8]
    if not symmetry.groups and not symmetry.translations:
        return
    generator = torch.Generator().manual_seed(1)
    params = {k: v.detach().clone() for k, v in module.state_dict().items()}
    with torch.no_grad():
        params |= {k: v + torch.randn(v.shape, generator=generator) * 0.3 for k, v in module.named_parameters()}
    first, second = symmetry.random(generator), symmetry.random(generator)
    moved, bound = symmetry.act(first, params), symmetry.bind(params)
    _require_alike(symmetry.act(second, moved), symmetry.act(bound.compose(second, first), params))
    _require_alike(symmetry.act(bound.inverse(first), moved), params)
    before, after = (torch.func.functional_call(module, p, (x,)) for p in (params, moved))
    assert float((after - before).abs().max() / before.abs().max()) < 1e-12
    _require_alike(rg.canonicalize(moved, symmetry), rg.canonicalize(params, symmetry), 1e-8)
    _require_alike(rg.align(params, moved, symmetry).params, params, 1e-7)
    report = rg.compare(params, moved, symmetry, generator=generator)
    assert "gauge" in str(report.verdict)
    assert report.orbit_distance < 1e-6


@pytest.mark.parametrize("name", OFFSETS)
def test_offsets_end_where_an_operator_does_not_pass_them_as_they_are(name: str) -> None:
    torch.manual_seed(0)
    make, shape, count = OFFSETS[name]
    module, x = make(), torch.randn(shape, dtype=torch.float64)
    symmetry = rg.discover(module, x)
    assert not any("refused" in note or "stays" in note for note in symmetry.notes)
    assert sum(family.size for family in symmetry.translations) == count
    assert symmetry.verify(module, (x,), generator=torch.Generator().manual_seed(1)).ok


def _require_alike(one: dict[str, Tensor], other: dict[str, Tensor], bound: float = 1e-9) -> None:
    for name, tensor in other.items():
        torch.testing.assert_close(one[name], tensor, rtol=bound, atol=bound, msg=name)

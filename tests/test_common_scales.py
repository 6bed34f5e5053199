"""Common scales: one factor for all units, if separate factors for the units are not possible."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as fn

import regauge as rg
from regauge import weightspace as ws
from regauge.discovery.common_scales import _solved

Forward = Callable[..., Any]
BATCH = {"rows": (6, 4), "tokens": (3, 5, 4), "image": (3, 2, 8, 8)}


class Net(nn.Module):
    """Submodules and a forward function `(parts, x)`."""

    def __init__(self, forward: Forward, **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.run = forward

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


class Case(NamedTuple):
    """A network for one kind of inputs, and the exponents of its common scales (up to sign) by parameter."""

    make: Callable[[], Net]
    where: str
    scales: list[dict[str, int]]


def lin(i: int, o: int, *, bias: bool = True) -> nn.Linear:
    return nn.Linear(i, o, bias=bias)


def number(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


def layers(**parts: nn.Module | nn.Parameter) -> dict[str, Any]:
    return {"a": lin(4, 5), "o": lin(5, 3), **parts}


def squeeze(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).relu()
    s = m.c(h.mean((2, 3))[:, None])[:, 0].sigmoid()
    return m.o((h * s[..., None, None]).mean((2, 3)))


def attend(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).relu()
    h = h * (m.e(m.s(h.amax((2, 3))).relu())).sigmoid()[..., None, None]
    s = m.c(torch.stack([h.mean(1), h.amax(1)], 1)).sigmoid()
    return m.o((h * s).mean((2, 3)))


def fused(m: Any, x: Tensor) -> Tensor:
    q, k, v = m.a(x).relu().chunk(3, -1)
    scores = fn.normalize(q, dim=-1) @ fn.normalize(k, dim=-1).mT
    return m.o(scores.softmax(-1) @ v.cumsum(-1).tanh())


def angular(m: Any, x: Tensor) -> Tensor:
    c = fn.linear(fn.normalize(m.b(m.a(x).relu())), fn.normalize(m.w)).clamp(-1 + 1e-7, 1 - 1e-7)
    return 30 * torch.cos(torch.acos(c) + 0.2)


def branches(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    h = h + m.s * m.c(m.b(h).relu())
    return m.o(h.tanh())


def remember(m: Any, x: Tensor) -> Tensor:
    """Compute a memory that the delta rule writes, and that is read after each of two tokens."""
    keys, values, memory, read = m.k(x), m.v(x), m.w.expand(len(x), -1, -1), []
    for t in range(2):
        error = (memory @ keys[:, t, :, None])[..., 0] - values[:, t]
        memory = memory - error[..., None] * keys[:, t, None, :]
        read.append((memory @ m.q(x)[:, t, :, None])[..., 0])
    return torch.stack(read, 1)


def rezero(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    h = h + m.s * m.c(m.b(h).relu())
    h = h + m.t * m.e(m.d(h).relu())
    return m.o(h)


def cooled(m: Any, x: Tensor) -> Tensor:
    """Compute attention whose scores are divided by a learned temperature."""
    q, k, v = m.q(x), m.k(x), m.v(x)
    return m.o(((q @ k.mT).relu().cumsum(-1) / m.t).softmax(-1) @ v.tanh())


def shared(m: Any, x: Tensor) -> Tensor:
    return m.o((m.t * m.a(x) + m.b(x).tanh() * m.t).tanh())


A = {"a.weight": 1, "a.bias": 1}
FOUND: dict[str, Case] = {
    "the exponential of a factor": Case(
        lambda: Net(lambda m, x: m.o(m.a(x).relu()) * m.t.exp(), **layers(t=number(1))),
        "rows",
        [{"t": 1, "o.weight": -1, "o.bias": -1}],
    ),
    "normalized": Case(lambda: Net(lambda m, x: m.o(fn.normalize(m.a(x).relu(), dim=-1)), **layers()), "rows", [A]),
    "normalized by the largest": Case(
        lambda: Net(lambda m, x: m.a(x).relu().sort(-1).values / m.a(x).relu().amax(), a=lin(4, 5)), "rows", [A]
    ),
    "cosines": Case(
        lambda: Net(
            lambda m, x: 10 * fn.linear(fn.normalize(m.a(x).relu()), fn.normalize(m.w)), a=lin(4, 5), w=number(3, 5)
        ),
        "rows",
        [A],
    ),
    "angular margin": Case(
        lambda: Net(angular, a=lin(4, 5), b=lin(5, 3), w=number(4, 3)), "rows", [{"b.weight": 1, "b.bias": 1}]
    ),
    "factor of the outputs": Case(
        lambda: Net(lambda m, x: m.o(m.a(x).relu()) * m.t, **layers(t=number(1))),
        "rows",
        [{"t": 1, "o.weight": -1, "o.bias": -1}],
    ),
    "factor of a branch": Case(
        lambda: Net(branches, a=lin(4, 5), b=lin(5, 5), c=lin(5, 5), o=lin(5, 3), s=number(1)),
        "rows",
        [{"s": 1, "c.weight": -1, "c.bias": -1}],
    ),
    "ranks": Case(
        lambda: Net(lambda m, x: m.o(m.a(x).relu().sort(-1).values), **layers()),
        "rows",
        [{**A, "o.weight": -1}],
    ),
    "squares of ranks": Case(
        lambda: Net(lambda m, x: m.o(m.a(x).square().sort(-1).values), **layers()),
        "rows",
        [{**A, "o.weight": -2}],
    ),
    "beside the inputs": Case(
        lambda: Net(lambda m, x: m.o(torch.cat([x, m.a(x).relu().sort(-1).values], -1)), a=lin(4, 5), o=lin(9, 3)),
        "rows",
        [{**A, "o.weight": -1}],
    ),
    "gain before tokens are mixed": Case(
        lambda: Net(lambda m, x: m.o((m.a(x) + m.g * m.t(m.a(x).mT).mT).tanh()), **layers(g=number(5), t=lin(5, 5))),
        "tokens",
        [{"g": 1, "t.weight": -1, "t.bias": -1}],
    ),
    "channel attention": Case(
        lambda: Net(squeeze, a=nn.Conv2d(2, 4, 3), c=nn.Conv1d(1, 1, 3, padding=1), o=lin(4, 2)),
        "image",
        [{**A, "c.weight": -1, "o.weight": -1}],
    ),
    "channel and spatial attention": Case(
        lambda: Net(
            attend, a=nn.Conv2d(2, 4, 3), s=lin(4, 3), e=lin(3, 4), c=nn.Conv2d(2, 1, 3, padding=1), o=lin(4, 2)
        ),
        "image",
        [{**A, "s.weight": -1, "c.weight": -1, "o.weight": -1}],
    ),
    "fused queries and keys": Case(lambda: Net(fused, a=lin(4, 9), o=lin(3, 2)), "tokens", [A, A]),
    "number that multiplies the outputs": Case(
        lambda: Net(lambda m, x: m.o(m.a(x).relu()) * m.t, **layers(t=number())),
        "rows",
        [{"t": 1, "o.weight": -1, "o.bias": -1}],
    ),
    "number that divides": Case(
        lambda: Net(lambda m, x: (m.o(m.a(x).relu()) / m.t).softmax(-1), **layers(t=number())),
        "rows",
        [{"t": 1, "o.weight": 1, "o.bias": 1}],
    ),
    "number that cools scores": Case(
        lambda: Net(cooled, **{name: lin(4, 3) for name in "qkv"}, o=lin(3, 2), t=number()),
        "tokens",
        [{"t": 1, "q.weight": 1, "q.bias": 1}],
    ),
    "numbers of two branches": Case(
        lambda: Net(rezero, a=lin(4, 5), o=lin(5, 3), **{n: lin(5, 5) for n in "bcde"}, s=number(), t=number()),
        "rows",
        [{"s": 1, "c.weight": -1, "c.bias": -1}, {"t": 1, "e.weight": -1, "e.bias": -1}],
    ),
    "number of two layers": Case(
        lambda: Net(lambda m, x: m.o((m.t * m.a(x) + m.t * m.b(x.tanh())).tanh()), **layers(b=lin(4, 5), t=number())),
        "rows",
        [{"t": 1, "a.weight": -1, "a.bias": -1, "b.weight": -1, "b.bias": -1}],
    ),
    "two numbers": Case(
        lambda: Net(lambda m, x: m.o((m.s * (m.t * m.a(x)).relu()).sort(-1).values), **layers(s=number(), t=number())),
        "rows",
        [{"s": 1, "t": -1}, {"s": 1, "o.weight": -1}, {"t": 1, "a.weight": -1, "a.bias": -1}],
    ),
    "number that is written beside units": Case(
        lambda: Net(written, **layers(t=number())), "rows", [{"t": 1, **A, "o.weight": -1}]
    ),
    "memory of the delta rule": Case(
        lambda: Net(remember, **{name: lin(4, 3, bias=False) for name in "kvq"}, w=number(3, 3)),
        "tokens",
        [{"w": 1, "v.weight": 1, "q.weight": -1}],
    ),
}
"""Networks with common scales."""


def beside_number(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).relu()
    return m.o(h / (h.square().sum(-1, keepdim=True) + 1e-3).sqrt())


def written(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).relu().clone()
    h[..., 0] = m.t
    return m.o(h.sort(-1).values)


def written_and_added(m: Any, x: Tensor) -> Tensor:
    return written(m, x) + m.t


NONE: dict[str, Callable[[], Net]] = {
    "an eps inside of the norm": lambda: Net(beside_number, **layers()),
    "an eps that is added": lambda: Net(
        lambda m, x: m.o(m.a(x).relu() / (m.a(x).relu().norm(dim=-1, keepdim=True) + 1e-6)), **layers()
    ),
    "a bound on the norm that is reached": lambda: Net(
        lambda m, x: m.o(m.a(x).relu() / m.a(x).relu().norm(dim=-1, keepdim=True).clamp_min(1.0)), **layers()
    ),
    "layer norm": lambda: Net(lambda m, x: m.o(fn.layer_norm(m.a(x).relu(), (5,))), **layers()),
    "softmax": lambda: Net(lambda m, x: m.o(m.a(x).relu().softmax(-1)), **layers()),
    "sigmoid": lambda: Net(lambda m, x: m.o(m.a(x).sigmoid().sort(-1).values), **layers()),
    "a number that is added": lambda: Net(lambda m, x: m.o((m.a(x).relu().sort(-1).values + 1).tanh()), **layers()),
    "a number beside": lambda: Net(
        lambda m, x: m.o(fn.pad(m.a(x).relu(), (1, 1), value=1.0).sort(-1).values), a=lin(4, 5), o=lin(7, 3)
    ),
    "the input is added": lambda: Net(lambda m, x: fn.normalize(x + m.a(x).relu(), dim=-1), a=lin(4, 4)),
    "an upper bound": lambda: Net(lambda m, x: m.o(m.a(x).relu().clamp(max=1.0).sort(-1).values), **layers()),
    "products of many": lambda: Net(lambda m, x: m.o(m.a(x).cumprod(-1)), **layers()),
    "a number that is compared": lambda: Net(
        lambda m, x: m.o(torch.where(m.a(x) > m.t, 1.0, 0.5) * x.sum()), **layers(t=number())
    ),
    "a number that is written": lambda: Net(written_and_added, **layers(t=number())),
    "a number that is an output": lambda: Net(lambda m, x: (m.a(x).relu().sum(), m.t), a=lin(4, 5), t=number()),
    "a number that also multiplies bounded units": lambda: Net(shared, **layers(b=lin(4, 5), t=number())),
    "a number inside of a bounded function": lambda: Net(
        lambda m, x: m.o(m.a(x).relu()) * m.t.tanh() + m.s.sigmoid() * x[..., :3], **layers(t=number(), s=number())
    ),
    "the exponential of a number that is also a factor": lambda: Net(
        lambda m, x: m.o(m.a(x).relu()) * m.t.exp() + m.t * x[..., :3], **layers(t=number())
    ),
    "a number that multiplies the inputs": lambda: Net(
        lambda m, x: m.o((x[..., :5] * m.t).tanh()), o=lin(4, 3), t=number()
    ),
    "a number to a power that depends on inputs": lambda: Net(
        lambda m, x: m.o(m.a(x).relu()) * m.t.abs() ** x.sum(), **layers(t=number())
    ),
    "a number beside a number": lambda: Net(lambda m, x: m.o(m.a(x).relu()) * (m.t + 1), **layers(t=number())),
    "a factor that is also added": lambda: Net(lambda m, x: m.o(m.a(x).relu()) * m.t + m.t, **layers(t=number(1))),
    "units that each have a factor": lambda: Net(lambda m, x: m.o(m.b(m.a(x).relu()).relu()), **layers(b=lin(5, 5))),
    "rows of a table that are not read": lambda: Net(
        lambda m, x: m.o(m.a(x) + m.t[: len(x)]).tanh(), **layers(t=number(9, 5))
    ),
    "units with an invertible matrix": lambda: Net(lambda m, x: m.o(m.b(m.a(x))), **layers(b=lin(5, 5))),
}
"""Networks without common scales."""


def made(make: Callable[[], Net], where: str) -> tuple[Net, Tensor, rg.Symmetry]:
    torch.manual_seed(0)
    net = make().double().eval()
    x = torch.randn(BATCH[where], dtype=torch.float64)
    return net, x, rg.discover(net, x)


def moved(net: Net) -> dict[str, Tensor]:
    """Return parameters far from their initial values."""
    generator = torch.Generator().manual_seed(2)
    state = net.state_dict()
    return {k: t + 0.3 * torch.randn(t.shape, generator=generator, dtype=t.dtype) for k, t in state.items()}


def common(symmetry: rg.Symmetry) -> list[rg.Group]:
    return [group for group in symmetry.groups if group.size == 1]


def changed(before: Any, after: Any) -> float:
    return float((before - after).abs().max() / before.abs().max())


@pytest.mark.parametrize("name", FOUND)
def test_common_scales_are_found_with_their_exponents(name: str) -> None:
    net, x, symmetry = made(FOUND[name].make, FOUND[name].where)
    found = [{p.parameter: p.scale[0] for p in group.placements} for group in common(symmetry)]
    expected = FOUND[name].scales
    assert len(found) == len(expected), str(symmetry)
    for one in found:
        assert one in expected or {k: -e for k, e in one.items()} in expected, str(symmetry)
    report = rg.discovery.nullity(net, x, symmetry=symmetry)
    assert not report.unexplained, str(report)


@pytest.mark.parametrize("seed", range(20))
def test_solved_equations_hold_and_leave_as_many_unknowns_free_as_they_have(seed: int) -> None:
    """Unknowns that are zero in every solution are not free. Some unknowns occur in several equations, and some in
    one.
    """
    generator = torch.Generator().manual_seed(seed)
    count = 3 + seed % 5
    matrix = torch.randint(-1, 2, (count, 6), generator=generator)
    rows = [{k: int(c) for k, c in enumerate(row) if c} for row in matrix]
    rows = [row for row in rows if row]
    solved = _solved(rows, dict.fromkeys(range(6), 1))
    used = {x for row in rows for x in row}
    free = {y for x in used for y in solved.get(x, {x: 1})}
    assert len(free) == len(used) - int(torch.linalg.matrix_rank(matrix.double()))
    for one in free:
        value = {x: solved.get(x, {x: 1}).get(one, 0) for x in used}
        assert all(sum(c * value[x] for x, c in row.items()) == 0 for row in rows)


@pytest.mark.parametrize("name", NONE)
def test_where_nothing_scales_along_no_common_scale_is_found(name: str) -> None:
    net, x, symmetry = made(NONE[name], "rows")
    assert common(symmetry) == [], str(symmetry)
    assert not any("please report" in f.reason for f in symmetry.frozen), str(symmetry)
    assert symmetry.verify(net, x, generator=torch.Generator().manual_seed(1)).ok


@pytest.mark.parametrize("name", FOUND)
def test_the_laws_hold(name: str) -> None:
    net, x, symmetry = made(FOUND[name].make, FOUND[name].where)
    params = moved(net)
    generator = torch.Generator().manual_seed(0)
    g, h = symmetry.random(generator), symmetry.random(generator)
    both = symmetry.act(g, symmetry.act(h, params))
    run = torch.func.functional_call
    with torch.no_grad():
        assert changed(run(net, params, (x,)), run(net, both, (x,))) < 1e-12
    torch.testing.assert_close(symmetry.act(symmetry.compose(g, h), params), both)
    torch.testing.assert_close(symmetry.act(symmetry.inverse(g), symmetry.act(g, params)), params)
    again = rg.Symmetry.from_json(symmetry.to_json())
    assert again.to_json() == symmetry.to_json()
    torch.testing.assert_close(again.act(g, params), symmetry.act(g, params), rtol=0, atol=0)
    several = symmetry.random(generator, batch=(3,))
    stacked = symmetry.act(several, params)
    for k in range(3):
        one = symmetry.act(several.item(k), params)
        torch.testing.assert_close(
            {key: stacked[key][k] for key in symmetry.sites}, {key: one[key] for key in symmetry.sites}
        )
    torch.testing.assert_close(rg.canonicalize(both, symmetry), rg.canonicalize(params, symmetry))
    aligned = rg.align(params, both, symmetry, generator=generator).params
    assert max(changed(params[key], aligned[key]) for key in params) < 1e-6
    report = rg.compare(params, both, symmetry, generator=generator)
    assert "gauge" in str(report.verdict)
    assert report.orbit_distance < 1e-6


def test_intermediate_values_move_along() -> None:
    net, x, symmetry = made(FOUND["ranks"].make, "rows")
    found = rg.discovery.activations(net, x, symmetry)
    assert not found.notes, found.notes
    (group,) = common(found.symmetry)
    assert {place.parameter for place in group.placements} >= {"%linear", "%relu"}


@pytest.mark.parametrize("layer", ws.LAYERS)
def test_metanets_hold_what_they_say(layer: str) -> None:
    net, _, symmetry = made(FOUND["cosines"].make, "rows")
    generator = torch.Generator().manual_seed(0)
    meta = ws.Metanet(
        symmetry, layer=ws.LAYERS[layer](), head=ws.Invariant(outputs=2), width=8, depth=2, generator=generator
    )
    meta = meta.double()
    params = {key: torch.stack([t, t + 0.1]) for key, t in moved(net).items()}
    element = symmetry.random(generator, parts=sorted(meta.parts), batch=(2,))
    with torch.no_grad():
        torch.testing.assert_close(meta(symmetry.act(element, params)), meta(params), rtol=1e-8, atol=1e-8)

"""Gains of the form `1 + weight`: scales and signs act on the sum, and the sum is folded into the following layers."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from translation_nets import gap, generator, outputs

import regauge as rg
from regauge import weightspace as ws
from regauge.alignment.engine.frames import balances_of
from regauge.alignment.streamed.match import align_streamed
from regauge.alignment.streamed.plan import make_plan
from regauge.canonical import orbit_distance
from regauge.core.element import PARTS
from regauge.core.groups import Exponent
from regauge.core.moving.random_moves import RandomMoves
from regauge.core.params import Params
from regauge.core.probe import InDouble
from regauge.gauging import scale_pairs
from regauge.pruning import cut_symmetry
from regauge.pruning.extension import extend_symmetry

EVERY = ("permutation", "sign", "scale", "linear", "translation")
FACTORS = ("sign", "scale")


class Norm(nn.Module):
    """Normalize by the mean square, and multiply by a parameter plus a number, written in several ways."""

    def __init__(self, gain: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.gain = nn.Parameter(torch.randn(6)), gain

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.gain(self.weight)


def plus_one(gain: Callable[[Tensor], Tensor] = lambda w: 1.0 + w) -> tuple[nn.Module, Tensor, rg.Symmetry, Params]:
    """Return a small network after such a norm."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 6), Norm(gain), nn.Linear(6, 4), nn.GELU(), nn.Linear(4, 2)).double()
    x = torch.randn(5, 3, dtype=torch.float64)
    return module, x, rg.discover(module, (x,)), {key: t.detach() for key, t in module.state_dict().items()}


def gemma(kind: str = "", **settings: object) -> tuple[nn.Module, Tensor, Params]:
    """Return a small language model with gains of the form `1 + weight`, far from its initialization."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 11, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "head_dim": 4}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": 0}
    config = getattr(transformers, f"Gemma{kind}Config")(**{**sizes, "tie_word_embeddings": False, **settings})
    torch.manual_seed(0)
    module = getattr(transformers, f"Gemma{kind}ForCausalLM")(config).double().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return module, torch.randint(1, 11, (2, 5)), {key: t.detach() for key, t in module.state_dict().items()}


def logits(module: nn.Module, params: Params, x: Tensor) -> Tensor:
    """Return the outputs of a language model whose norms compute in double precision."""
    with InDouble(), torch.no_grad():
        found: Tensor = torch.func.functional_call(module, params, (x,), tie_weights=False).logits
    return found


@pytest.mark.parametrize("kind", ["", "2"])
def test_gains_of_gemma_are_scaled_and_folded(kind: str) -> None:
    module, x, params = gemma(kind, num_hidden_layers=1)
    symmetry, before = rg.discover(module, (x,)), logits(module, params, x)
    norms = [name for name in params if name.endswith("norm.weight")]
    assert symmetry.added == dict.fromkeys(norms, 1.0)
    written = [name for name in norms if kind and "post_" in name]  # onto the stream, where signs act alone
    for parts in (FACTORS, EVERY):
        moved = symmetry.act(symmetry.random(generator(1), parts), params)
        assert all(gap({"": moved[name]}, {"": params[name]}) > 0.1 for name in norms)
        assert torch.allclose(logits(module, moved, x), before, atol=1e-9)
        assert orbit_distance(params, moved, symmetry) < 1e-7
        assert "gauge" in str(rg.compare(params, moved, symmetry, generator=generator(0)).verdict)
    representative, coordinates = symmetry.split(params)
    assert torch.allclose(logits(module, representative, x), before, atol=1e-9)
    assert gap(symmetry.join(representative, coordinates), params) < 1e-14
    folded = rg.fold(params, module, (x,), symmetry=symmetry)
    assert set(folded.ones) == set(norms) - set(written)
    assert all(bool((folded.params[name] == 0).all()) for name in folded.ones)
    assert torch.allclose(logits(module, folded.params, x), before, atol=1e-9)
    turned = rg.discover(module, (x,), ones=folded.ones)
    assert ("orthogonal" in [group.kind for group in turned.groups]) == (not kind)
    rotated = turned.act(turned.random(generator(2)), folded.params)
    assert torch.allclose(logits(module, rotated, x), before, atol=1e-9)
    with pytest.raises(ValueError, match="whose gains are one"):
        rg.align(params, params, turned)


def test_a_tied_head_keeps_the_gain_that_it_reads_behind() -> None:
    module, x, params = gemma(tie_word_embeddings=True)
    folded = rg.fold(params, module, (x,))
    assert "model.norm.weight" not in folded.ones
    assert len(folded.ones) == 4
    assert torch.allclose(logits(module, folded.params, x), logits(module, params, x), atol=1e-9)


@pytest.mark.parametrize(
    ("gain", "number"),
    [
        (lambda w: 1.0 + w, 1.0),
        (lambda w: w + 2, 2.0),
        (lambda w: w - 0.5, -0.5),
        (lambda w: (w.clone() + 1).contiguous(), 1.0),
        (lambda w: 1.0 - w, None),
        (lambda w: 1 + 2 * w, None),
        (lambda w: (1 + w).exp(), None),
        (lambda w: (1 + w) * (2 + w), None),
        (lambda w: (1 + w) * w, None),
        (lambda w: torch.add(w, 1, alpha=2), None),
    ],
)
def test_a_number_is_known_where_every_use_adds_it_and_multiplies(
    gain: Callable[[Tensor], Tensor], number: float | None
) -> None:
    module, x, symmetry, params = plus_one(gain)
    assert symmetry.added == ({} if number is None else {"1.weight": number})
    assert (symmetry["0"].kind == "scaled") == (number is not None)
    moved = symmetry.act(symmetry.random(generator(1)), params)
    assert torch.allclose(outputs(module, moved, x), outputs(module, params, x), atol=1e-12)


def test_elements_are_a_group_that_acts_on_sums() -> None:
    _, _, symmetry, params = plus_one()
    g, h = (symmetry.random(generator(seed), PARTS) for seed in (1, 2))
    moved = symmetry.act(g, params)
    assert gap(symmetry.act(h, moved), symmetry.act(symmetry.compose(h, g), params)) < 1e-14
    assert gap(symmetry.act(symmetry.inverse(g), moved), params) < 1e-14
    assert gap(symmetry.compile(g)(params), moved) < 1e-14
    sums = symmetry.on_sums.act(g, symmetry.sums(params))
    assert gap(symmetry.from_sums(sums, params), moved) < 1e-14
    again = rg.Symmetry.from_json(symmetry.to_json())
    assert again == symmetry
    assert "act on the weight plus a number: 1.weight" in str(again)
    elements = symmetry.random(generator(3), PARTS, (2,))
    both, one = symmetry.act(elements, params), symmetry.act(elements.item(1), params)
    assert gap({key: both[key][1] for key in symmetry.sites}, one) == 0
    in_place = {key: t.clone() for key, t in params.items()}
    symmetry.act_(g, in_place)
    assert gap(in_place, moved) == 0


def test_what_a_scale_of_one_moves_keeps_its_bits() -> None:
    _, _, symmetry, params = plus_one()
    blank = symmetry.identity()
    scale = torch.ones(1, 6, dtype=torch.float64)
    scale[0, 2] = 3
    one = blank.replace("0", replace(blank["0"], scale=scale))
    moved = symmetry.act(one, params)["1.weight"]
    is_moved = moved != params["1.weight"]
    assert is_moved.tolist() == [False, False, True, False, False, False]
    exponent = next(p.scale[0] for p in symmetry["0"].placements if p.parameter == "1.weight")
    assert float(moved[2]) == pytest.approx(3.0**exponent * (float(params["1.weight"][2]) + 1) - 1)


def test_sixteen_bits_are_computed_wider() -> None:
    _, _, symmetry, params = plus_one()
    half = {key: t.bfloat16() for key, t in params.items()}
    element = symmetry.random(generator(1), FACTORS)
    wide = symmetry.act(element, {key: t.double() for key, t in half.items()})
    assert torch.allclose(symmetry.act(element, half)["1.weight"].double(), wide["1.weight"], rtol=2**-8, atol=2**-12)


def test_the_canonical_form_sees_the_sums() -> None:
    module, x, symmetry, params = plus_one()
    canonical = rg.canonicalize(params, symmetry)
    assert torch.allclose(outputs(module, canonical, x), outputs(module, params, x), atol=1e-12)
    moved = symmetry.act(symmetry.random(generator(2)), params)
    assert gap(rg.canonicalize(moved, symmetry), canonical) < 1e-11
    prints = [rg.comparison.fingerprint(one, symmetry) for one in (params, moved)]
    assert torch.allclose(*prints, atol=1e-8)


def test_balancing_reaches_one_point_of_the_orbit() -> None:
    torch.manual_seed(0)

    class Gated(nn.Module):
        """A gain before a ReLU, whose sign cannot change, so the gain is not in the chart."""

        def __init__(self) -> None:
            super().__init__()
            self.into, self.out, self.gain = nn.Linear(3, 5), nn.Linear(5, 2), nn.Parameter(torch.rand(5))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.out(torch.relu(self.into(x) * (1 + self.gain)))
            return out

    module, x = Gated().double(), torch.randn(4, 3, dtype=torch.float64)
    symmetry = rg.discover(module, (x,))
    assert symmetry["gain"].scales == 2
    params = {key: t.detach() for key, t in module.state_dict().items()}
    moved = symmetry.act(symmetry.random(generator(1), ("scale",)), params)
    assert torch.allclose(outputs(module, moved, x), outputs(module, params, x), atol=1e-12)
    assert orbit_distance(params, moved, symmetry) < 1e-11
    balanced = [symmetry.act(rg.canonical.canonical_element(one, symmetry), one) for one in (params, moved)]
    assert gap(*balanced) < 1e-11


def test_random_moves_of_populations_keep_functions() -> None:
    module, x, symmetry, params = plus_one()
    population = {key: t.expand(3, *t.shape).clone() for key, t in params.items()}
    moved = RandomMoves(symmetry, ("permutation", *FACTORS))(population, [((3,), generator(1))])
    for k in range(3):
        one = {key: t[k] for key, t in moved.items()}
        assert gap(one, params) > 0.1
        assert torch.allclose(outputs(module, one, x), outputs(module, params, x), atol=1e-6)


def test_nets_over_networks_read_the_sums() -> None:
    _, _, symmetry, params = plus_one()
    net = ws.Metanet(symmetry, layer=ws.MessagePassing(), head=ws.Invariant(outputs=3), width=8, depth=1,
                     generator=generator(0)).double()  # fmt: skip
    elements = symmetry.random(generator(1), tuple(part for part in FACTORS if part in net.parts), batch=(2,))
    read = net(symmetry.act(elements, {key: t.expand(2, *t.shape) for key, t in params.items()}))
    assert torch.allclose(read[0], read[1], atol=1e-8)


def test_tables_for_other_tools_leave_such_gains_out() -> None:
    _, _, symmetry, _ = plus_one()
    pairs, others = scale_pairs(symmetry)
    assert not any(pair.smooth == "1" for pair in pairs)
    assert any("adds a number" in reason for _, reason in others)


@pytest.mark.parametrize(
    "added",
    [
        '{"1.weight": {"rate": 0.0}}',
        '{"1.weight": {"rate": "1"}}',
        '{"nothing": {"rate": 1.0}}',
        '{"1.weight": "one"}',
        '{"nothing": 1.0}',
        '{"0.weight": 1.0}',
        '{"1.weight": NaN}',
        '["1.weight"]',
    ],
)
def test_damaged_numbers_are_refused(added: str) -> None:
    _, _, symmetry, _ = plus_one()
    text = symmetry.to_json()
    start = text.index('"added"')
    end = text.index("}", start) + 1
    with pytest.raises(ValueError, match=r"added"):
        rg.Symmetry.from_json(text[:start] + f'"added": {added}' + text[end:])


def test_streaming_finds_what_matching_in_memory_finds(tmp_path: Path) -> None:
    module, x, params = gemma(num_hidden_layers=1)
    symmetry = rg.discover(module, (x,), verify=False)
    near = {key: t + 0.02 * torch.randn_like(t) for key, t in params.items()}
    moved = symmetry.act(symmetry.random(generator(1), PARTS), near)
    for letter, one in (("a", params), ("b", moved)):
        rg.save(one, tmp_path / f"{letter}.safetensors")
    files = tuple(rg.Checkpoint.open(tmp_path / f"{letter}.safetensors") for letter in "ab")
    symmetry, method = symmetry.bind(params), rg.WeightMatching()
    dtypes = [{name: entry.dtype for name, entry in one.stored.items()} for one in files]
    ways = {"balances": balances_of(symmetry, method.scales, None)}
    whole = make_plan(symmetry, dtypes, memory=1 << 40, **ways)
    streamed = align_streamed(*files, make_plan(symmetry, dtypes, memory=whole.peak - 1, **ways), method)
    aligned = rg.align(params, moved, symmetry, method=method)
    assert gap(symmetry.act(streamed.element, moved), aligned.params) < 1e-4
    assert gap(aligned.params, params) < 0.2 < gap(moved, params)


class Modulated(nn.Module):
    """A function of an input and a code. The code determines factors of the units."""

    def __init__(self, forward: Callable[[Any, Tensor, Tensor], Tensor], **layers: nn.Module | nn.Parameter) -> None:
        super().__init__()
        for name, layer in {"a": nn.Linear(3, 4), "o": nn.Linear(4, 2), **layers}.items():
            setattr(self, name, layer)
        self.run = forward

    def forward(self, x: Tensor, code: Tensor) -> Tensor:
        return self.run(self, x, code)


def adaptive(m: Any, x: Tensor, code: Tensor) -> Tensor:
    """Return a block of a diffusion transformer: one layer computes shifts, factors plus one and gates for two
    branches.
    """
    x = m.a(x)
    shift, scale, gate, shift_2, scale_2, gate_2 = m.code(functional.silu(code)).chunk(6, -1)
    x = x + gate * m.b(functional.gelu(m.c(functional.layer_norm(x, (4,)) * (1 + scale) + shift)))
    out: Tensor = m.o(x + gate_2 * (functional.layer_norm(x, (4,)) * (scale_2 + 1) + shift_2).tanh())
    return out


def pixels(m: Any, x: Tensor, code: Tensor) -> Tensor:
    """Return channels of an image, scaled and shifted."""
    scale, shift = m.code(code)[:, :, None, None].chunk(2, 1)
    h = m.conv(x[:, :, None, None].expand(-1, -1, 3, 3) + 1) * (1 + scale) + shift
    out: Tensor = m.o(h.relu().mean((2, 3)))
    return out


def frequencies(m: Any, x: Tensor, code: Tensor) -> Tensor:
    """Return a layer of sines whose frequencies and phases depend on a code."""
    h = m.code(code)
    out: Tensor = m.o(torch.sin((h[..., :4] * 15.0 + 30.0) * m.a(x) + h[..., 4:]))
    return out


def transformed(m: Any, x: Tensor, code: Tensor) -> Tensor:
    """Return coordinates times a matrix that a layer computes, plus the identity, as in PointNet."""
    t = m.code(m.h(code).relu()).unflatten(-1, (3, 3)) + torch.eye(3, dtype=x.dtype)
    out: Tensor = m.o(m.a((x[:, None] @ t)[:, 0]).relu())
    return out


def mixed(m: Any, x: Tensor, code: Tensor) -> Tensor:
    """Return features times a computed matrix, to which the identity is added in flattened form."""
    t = m.code(code.tanh()) + torch.eye(4, dtype=x.dtype).flatten()
    out: Tensor = m.o(torch.einsum("bi,bij->bj", m.a(x).relu(), t.view(-1, 4, 4)))
    return out


Layered = tuple[Callable[[], Modulated], dict[str, Any], dict[str, int]]
LAYERED: dict[str, Layered] = {
    "a layer for factors": (
        lambda: Modulated(lambda m, x, c: m.o(((1 + m.code(c)) * m.a(x)).relu()), code=nn.Linear(3, 4)),
        {"code.bias": 1.0},
        {"code.weight[0]": 1, "code.bias[0]": 1, "a.weight[0]": -1, "a.bias[0]": -1},
    ),
    "diffusion transformer": (
        lambda: Modulated(adaptive, code=nn.Linear(3, 24), b=nn.Linear(5, 4), c=nn.Linear(4, 5)),
        {"code.bias": ((4, 8, 1.0), (16, 20, 1.0))},
        {"code.weight[0]": 1, "code.bias[0]": 1, "c.weight[1]": -1},
    ),
    "channels": (
        lambda: Modulated(pixels, code=nn.Linear(3, 8), conv=nn.Conv2d(3, 4, 1)),
        {"code.bias": ((0, 4, 1.0),)},
        {"code.weight[0]": 1, "code.bias[0]": 1, "conv.weight[0]": -1, "conv.bias[0]": -1},
    ),
    "frequencies": (
        lambda: Modulated(frequencies, code=nn.Linear(3, 8)),
        {"code.bias": ((0, 4, 2.0),)},
        {"code.weight[0]": 1, "code.bias[0]": 1, "a.weight[0]": -1, "a.bias[0]": -1},
    ),
    "coordinates times a matrix beside the identity": (
        lambda: Modulated(transformed, h=nn.Linear(3, 5), code=nn.Linear(5, 9)),
        {"code.bias": ((0, 1, 1.0), (4, 5, 1.0), (8, 9, 1.0))},
        {"h.weight[0]": 1, "h.bias[0]": 1, "code.weight[1]": -1},
    ),
    "features times a matrix beside the identity": (
        lambda: Modulated(mixed, code=nn.Linear(3, 16)),
        {"code.bias": ((0, 1, 1.0), (5, 6, 1.0), (10, 11, 1.0), (15, 16, 1.0))},
        {"a.weight[0]": 1, "a.bias[0]": 1, "code.weight[0]": -1, "code.bias[0]": -1},
    ),
    "factors by a convolution": (
        lambda: Modulated(
            lambda m, x, c: m.o(((1 + m.code(c[..., None])[..., 0]) * m.a(x)).relu()), code=nn.Conv1d(3, 4, 1)
        ),
        {"code.bias": 1.0},
        {"code.weight[0]": 1, "code.bias[0]": 1, "a.weight[0]": -1, "a.bias[0]": -1},
    ),
}
"""Networks with factors of the form one plus the outputs of a layer, the added number, and the exponents of one
family."""

EXPONENTIALS: dict[str, tuple[Callable[[], Modulated], dict[str, Any], dict[str, int]]] = {
    "a learned temperature": (
        lambda: Modulated(lambda m, x, c: m.o(m.a(x).tanh()) * m.t.exp(), t=nn.Parameter(torch.randn(()))),
        {"t": Exponent(1.0)},
        {"t[0]": 1, "o.weight[0]": -1, "o.bias[0]": -1},
    ),
    "factors of a branch": (
        lambda: Modulated(
            lambda m, x, c: m.o((m.a(x) + (3 * m.t).exp() * m.code(functional.gelu(m.b(c)))).tanh()),
            t=nn.Parameter(torch.randn(4)),
            b=nn.Linear(3, 5),
            code=nn.Linear(5, 4, bias=False),
        ),
        {"t": Exponent(3.0)},
        {"t[0]": 1, "code.weight[0]": -1},
    ),
    "positive weights": (
        lambda: Modulated(
            lambda m, x, c: m.o(functional.linear(m.a(x).relu(), (-m.t).exp()).tanh()),
            t=nn.Parameter(torch.randn(4, 4)),
        ),
        {"t": Exponent(-1.0)},
        {"t[1]": 1, "a.weight[0]": -1, "a.bias[0]": -1},
    ),
    "channels by an exponential": (
        lambda: Modulated(
            lambda m, x, c: m.o((m.conv(x[..., None]) * (m.t / 2)[:, None].exp()).tanh().sum(-1)),
            t=nn.Parameter(torch.randn(4)),
            conv=nn.Conv1d(3, 4, 1),
        ),
        {"t": Exponent(0.5)},
        {"t[0]": 1, "conv.weight[0]": -1, "conv.bias[0]": -1},
    ),
    "a step size and speeds": (
        lambda: Modulated(
            lambda m, x, c: m.o((-(m.t.exp() * m.s.exp()) * m.a(x).square()).exp()),
            t=nn.Parameter(torch.randn(())),
            s=nn.Parameter(torch.randn(4)),
        ),
        {"t": Exponent(1.0), "s": Exponent(1.0)},
        {"a.weight[0]": 1, "a.bias[0]": 1, "s[0]": -2},
    ),
}
"""Networks with exponentials of parameters, the rates of the exponents, and the exponents of one family."""
LAYERED |= EXPONENTIALS

UNLAYERED: dict[str, Callable[[], Modulated]] = {
    "no bias": lambda: Modulated(
        lambda m, x, c: m.o(((1 + m.code(c)) * m.a(x)).relu()), code=nn.Linear(3, 4, bias=False)
    ),
    "an exponential": lambda: Modulated(lambda m, x, c: m.o((1 + m.code(c)).exp() * m.a(x)), code=nn.Linear(3, 4)),
    "an exponential that is also read": lambda: Modulated(
        lambda m, x, c: m.o(m.a(x).tanh()) * m.t.exp() + m.t, t=nn.Parameter(torch.randn(2))
    ),
    "two rates": lambda: Modulated(
        lambda m, x, c: m.o((m.a(x) * m.t.exp()).tanh() * (2 * m.t).exp()), t=nn.Parameter(torch.randn(4))
    ),
    "an exponential that is also an output": lambda: Modulated(
        lambda m, x, c: torch.cat([m.o(m.a(x).tanh()) * m.t.exp(), m.t.expand(5, 2)]), t=nn.Parameter(torch.randn(2))
    ),
    "an exponential less one": lambda: Modulated(
        lambda m, x, c: m.o(m.a(x).tanh()) * m.t.expm1(), t=nn.Parameter(torch.randn(2))
    ),
    "an exponential of a square": lambda: Modulated(
        lambda m, x, c: m.o(m.a(x).tanh()) * (m.t * m.t).exp(), t=nn.Parameter(torch.randn(2))
    ),
    "an exponential of a clamp": lambda: Modulated(
        lambda m, x, c: m.o(m.a(x).tanh()) * m.t.clamp(max=1.0).exp(), t=nn.Parameter(torch.randn(2))
    ),
    "a bound": lambda: Modulated(lambda m, x, c: m.o((1 + m.code(c).tanh()) * m.a(x)), code=nn.Linear(3, 4)),
    "one minus": lambda: Modulated(lambda m, x, c: m.o((1 - m.code(c).sigmoid()) * m.a(x)), code=nn.Linear(3, 4)),
    "also without the number": lambda: Modulated(
        lambda m, x, c: m.o((1 + m.code(c)) * m.a(x) + m.code(c).tanh()), code=nn.Linear(3, 4)
    ),
    "two numbers": lambda: Modulated(
        lambda m, x, c: m.o(((1 + (h := m.code(c))) * m.a(x)).tanh() + ((2 + h) * m.a(x)).tanh()), code=nn.Linear(3, 4)
    ),
    "part of it also otherwise": lambda: Modulated(
        lambda m, x, c: m.o((1 + (h := m.code(c))) * m.a(x) + h[..., :2].sum(-1, keepdim=True).tanh()),
        code=nn.Linear(3, 4),
    ),
    "a bias of two layers": lambda: Modulated(
        lambda m, x, c: m.o((1 + functional.linear(c, m.w, m.a.bias)) * m.a(x)), w=nn.Parameter(torch.randn(4, 3))
    ),
    "a bounded matrix beside the identity": lambda: Modulated(
        lambda m, x, c: m.o(torch.einsum("bi,bij->bj", m.a(x), (m.code(c).view(-1, 4, 4) + torch.eye(4)).tanh())),
        code=nn.Linear(3, 16),
    ),
    "a matrix whose entries are also summed": lambda: Modulated(
        lambda m, x, c: m.o(
            torch.einsum("bi,bij->bj", m.a(x), t := m.code(c).view(-1, 4, 4) + torch.eye(4)) + t.sum(-1).tanh()
        ),
        code=nn.Linear(3, 16),
    ),
    "other numbers for each example": lambda: Modulated(
        lambda m, x, c: m.o((m.code(c) + torch.arange(5.0)[:, None]) * m.a(x)), code=nn.Linear(3, 4)
    ),
    "numbers that a checkpoint stores": lambda: Modulated(
        lambda m, x, c: m.o((m.code(c) + m.t) * m.a(x)), code=nn.Linear(3, 4), t=nn.Buffer(torch.tensor([1, 2, 2, 3]))
    ),
    "numbers without a bound": lambda: Modulated(
        lambda m, x, c: m.o(((m.code(c) + torch.tensor([0.0, 0.0, 0.0, torch.inf])) * m.a(x)).tanh()),
        code=nn.Linear(3, 4),
    ),
    "a number that inputs choose": lambda: Modulated(
        lambda m, x, c: m.o((m.code(c) + torch.ones(4) * x.mean()) * m.a(x)), code=nn.Linear(3, 4)
    ),
    "a sum that is added": lambda: Modulated(
        lambda m, x, c: m.o(((1 + m.code(c)) + m.a(x)).relu()), code=nn.Linear(3, 4)
    ),
}
"""Networks in which a number next to a layer does not make a gain of the layer."""


def modulated(make: Callable[[], Modulated]) -> tuple[Modulated, tuple[Tensor, Tensor], rg.Symmetry, Params]:
    torch.manual_seed(0)
    module = make().double().eval()
    x = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    state = module.state_dict()
    params = {key: t + 0.3 * torch.randn_like(t) if t.is_floating_point() else t for key, t in state.items()}
    return module, x, rg.discover(module, x), params


def changed(module: nn.Module, x: tuple[Tensor, ...], one: Params, other: Params) -> float:
    with torch.no_grad():
        before, after = (torch.func.functional_call(module, params, x) for params in (one, other))
    return float((before - after).abs().max() / before.abs().max())


@pytest.mark.parametrize("name", LAYERED)
def test_the_bias_of_a_layer_takes_up_what_is_added(name: str) -> None:
    make, added, exponents = LAYERED[name]
    module, x, symmetry, _ = modulated(make)
    assert symmetry.added == added
    families = [
        {f"{p.parameter}[{p.axis}]": p.scale[k] for p in group.placements if p.scale[k]}
        for group in symmetry.groups
        for k in range(group.scales)
    ]
    signed = [{key: s * e for key, e in exponents.items()} for s in (1, -1)]
    assert any(one.items() <= family.items() for one in signed for family in families), str(symmetry)
    report = rg.discovery.nullity(module, x, symmetry=symmetry)
    assert not report.unexplained, str(report)


@pytest.mark.parametrize("name", UNLAYERED)
def test_numbers_beside_a_layer_stay_where_they_are_no_gain(name: str) -> None:
    module, x, symmetry, params = modulated(UNLAYERED[name])
    assert not symmetry.added
    assert not any("please report" in f.reason for f in symmetry.frozen), str(symmetry)
    assert changed(module, x, params, symmetry.act(symmetry.random(generator(1)), params)) < 1e-11


@pytest.mark.parametrize("name", LAYERED)
def test_the_laws_hold_for_biases_with_numbers(name: str) -> None:
    module, x, symmetry, params = modulated(LAYERED[name][0])
    g, h = (symmetry.random(generator(seed)) for seed in (1, 2))
    moved = symmetry.act(g, params)
    both = symmetry.act(h, moved)
    assert changed(module, x, params, both) < 1e-10
    torch.testing.assert_close(both, symmetry.act(symmetry.compose(h, g), params))
    torch.testing.assert_close(symmetry.act(symmetry.inverse(g), moved), params)
    again = rg.Symmetry.from_json(symmetry.to_json())
    assert again == symmetry
    torch.testing.assert_close(again.act(g, params), moved, rtol=0, atol=0)
    if not any(group.matrix != "none" for group in symmetry.groups):
        linear = symmetry.random(generator(3), PARTS)
        torch.testing.assert_close(symmetry.compile(linear)(params), symmetry.act(linear, params))
    several = symmetry.random(generator(3), batch=(2,))
    stacked, one = symmetry.act(several, params), symmetry.act(several.item(1), params)
    assert gap({key: stacked[key][1] for key in symmetry.sites}, one) < 1e-11
    representative, coordinates = symmetry.split(params)
    assert changed(module, x, params, representative) < 1e-10
    assert gap(symmetry.join(representative, coordinates), params) < 1e-12
    torch.testing.assert_close(rg.canonicalize(both, symmetry), rg.canonicalize(params, symmetry), rtol=1e-6, atol=1e-8)
    aligned = rg.align(params, both, symmetry, generator=generator(0)).params
    assert gap(aligned, params) < 1e-6
    report = rg.compare(params, both, symmetry, generator=generator(0))
    assert "gauge" in str(report.verdict)
    population = {key: t.expand(2, *t.shape).clone() for key, t in params.items()}
    drawn = RandomMoves(symmetry, ("permutation", *FACTORS))(population, [((2,), generator(1))])
    assert changed(module, x, params, {key: t[1] for key, t in drawn.items()}) < 1e-6
    net = ws.Metanet(symmetry, layer=ws.MessagePassing(), head=ws.Invariant(outputs=3), width=8, depth=1,
                     generator=generator(0)).double()  # fmt: skip
    elements = symmetry.random(generator(1), tuple(part for part in FACTORS if part in net.parts), batch=(2,))
    read = net(symmetry.act(elements, {key: t.expand(2, *t.shape) for key, t in params.items()}))
    assert torch.allclose(read[0], read[1], atol=1e-8)


@pytest.mark.parametrize("name", ["plus one", *LAYERED])
def test_nets_change_networks_as_elements_move_them(name: str) -> None:
    """Signs and scales act on changes of sums. Changes of parameters inside an exponential stay the same."""
    _, _, symmetry, params = plus_one() if name == "plus one" else modulated(LAYERED[name][0])
    for layer in ws.LAYERS.values():
        net = ws.Metanet(symmetry, layer=layer(), head=ws.Equivariant(scale=0.3), width=8, depth=1,
                         generator=generator(0)).double()  # fmt: skip
        linear = symmetry.random(generator(1), tuple(p for p in ("permutation", *FACTORS, "linear") if p in net.parts))
        with torch.no_grad():
            own, moved = (net({k: t[None] for k, t in one.items()}) for one in (params, symmetry.act(linear, params)))
        assert gap(moved, {key: torch.zeros_like(t) for key, t in moved.items()}) > 0.01
        expected = symmetry.on_changes.act(linear, {key: t[0] for key, t in own.items()})
        assert gap({key: t[0] for key, t in moved.items()}, expected) < 1e-12


def test_cut_and_extended_layers_keep_the_numbers_of_their_ranges() -> None:
    _, _, symmetry, _ = modulated(LAYERED["diffusion transformer"][0])
    (units,) = (g.name for g in symmetry.groups if any(p.parameter == "code.weight" for p in g.placements))
    smaller = cut_symmetry(symmetry, {units: 3})
    assert smaller.added == {"code.bias": ((3, 6, 1.0), (12, 15, 1.0))}
    assert extend_symmetry(smaller, {units: 4}).added == symmetry.added

"""Balanced scales: a stationary point with the smallest norm of the orbit, equal for every copy of a network."""

from unittest import mock

import pytest
import torch
from models import GatedMLP
from symmetries import drawn, generator, mlp_symmetry
from torch import Tensor, nn

import regauge as rg
from regauge import Element, Group, Params, Placement, Symmetry, WeightMatching
from regauge.alignment.engine.frames import Frame
from regauge.core.balance import balance
from regauge.core.squared_norm import SquaredNorm
from regauge.nets.resnet import resnet20
from regauge.nets.transformer import GPT


def recurrent(units: int) -> Symmetry:
    """Return a symmetry with one family on both axes of a tensor."""
    axes = {"ih": ("h", None), "hh": ("h", "h"), "out": (None, "h")}
    bound = Symmetry.from_axes(axes, kinds={"h": "scaled"})
    shapes = {"ih": (units, 5), "hh": (units, units), "out": (2, units)}
    return bound.bind({n: torch.zeros(s) for n, s in shapes.items()})


def experts(count: int, units: int, features: int) -> Symmetry:
    """Return a symmetry with separate scales in every expert, on two axes of a tensor with three axes."""
    base = Group("e", count, tuple(Placement(n, 0) for n in ("w1", "w2", "router")), is_base=True)
    places = (Placement("w1", 1, scale=(1,)), Placement("w2", 2, scale=(-1,)))
    inner = Group("i", units, places, scales=1, within=("e",))
    shapes = {"w1": (count, units, features), "w2": (count, features, units), "router": (count, features)}
    return Symmetry((base, inner), shapes)


def three_exponents(units: int) -> Symmetry:
    """Return a symmetry with a squared activation: outgoing weights are divided by the square, and two families share
    an axis.
    """
    places = (
        Placement("in", 0, scale=(1, 0)),
        Placement("gate", 0, scale=(0, 1)),
        Placement("mixed", 1, scale=(-3, -1)),
        Placement("out", 1, scale=(-2, -1)),
    )
    shapes = {"in": (units, 4), "gate": (units, 3), "mixed": (2, units), "out": (5, units)}
    return Symmetry((Group("h", units, places, scales=2),), shapes)


def fused(units: int) -> Symmetry:
    """Return a symmetry with two families on blocks of one axis, as in a fused gate."""
    places = (
        Placement("w", 0, scale=(1, 0)),
        Placement("w", 0, start=units, scale=(0, 1)),
        Placement("v", 1, scale=(-1, -1)),
    )
    return Symmetry((Group("h", units, places, scales=2),), {"w": (2 * units, 3), "v": (4, units)})


SYMMETRIES = {
    "chain": mlp_symmetry(4, 9, 7, 8, 3, kind="scaled"),
    "recurrent": recurrent(7),
    "experts": experts(3, 5, 4),
    "three exponents": three_exponents(6),
    "fused": fused(5),
}


def norm(symmetry: Symmetry, params: Params) -> float:
    return sum(float(params[n].square().sum()) for n in symmetry.sites if n not in symmetry.buffers)


def scaled_by(symmetry: Symmetry, share: float, seed: int) -> Element:
    """Return random scales whose logarithms have the size `share`."""
    element = symmetry.random(generator(seed), ("scale",))
    for group in symmetry.groups:
        value = element[group.name]
        if value.scale is not None:
            element = element.replace(group.name, rg.Value(perm=value.perm, sign=value.sign, scale=value.scale**share))
    return element


@pytest.mark.parametrize("name", SYMMETRIES)
def test_no_other_scales_have_a_smaller_norm_and_nearby_ones_differ_in_second_order(name: str) -> None:
    symmetry = SYMMETRIES[name]
    params = drawn(symmetry, 1)
    best = symmetry.act(balance(params, symmetry), params)
    smallest = norm(symmetry, best)
    for seed in range(20):
        for share in (1e-3, 0.1, 1.0, 3.0):
            assert norm(symmetry, symmetry.act(scaled_by(symmetry, share, seed), best)) >= smallest
        step = scaled_by(symmetry, 1e-5, seed)
        there, back = symmetry.act(step, best), symmetry.act(symmetry.inverse(step), best)
        assert abs(norm(symmetry, there) - norm(symmetry, back)) < 1e-11 * smallest


@pytest.mark.parametrize("name", SYMMETRIES)
def test_all_copies_are_balanced_to_the_same_point(name: str) -> None:
    symmetry = SYMMETRIES[name]
    params = drawn(symmetry, 2)
    best = symmetry.act(balance(params, symmetry), params)
    for seed in range(5):
        copy = symmetry.act(scaled_by(symmetry, 3.0, seed), params)
        again = symmetry.act(balance(copy, symmetry), copy)
        assert all(torch.allclose(again[n], best[n], rtol=1e-9, atol=1e-9) for n in best)


@pytest.mark.parametrize("name", SYMMETRIES)
def test_a_population_is_balanced_network_by_network(name: str) -> None:
    symmetry = SYMMETRIES[name]
    networks = [drawn(symmetry, seed) for seed in range(3)]
    together = balance({n: torch.stack([p[n] for p in networks]) for n in networks[0]}, symmetry)
    assert together.batch == (3,)
    for k, params in enumerate(networks):
        alone = balance(params, symmetry)
        for group in symmetry.groups:
            one, many = alone[group.name].scale, together[group.name].scale
            if one is not None:
                assert many is not None
                assert torch.allclose(many[k], one, rtol=1e-9)


def test_norms_of_what_comes_in_and_goes_out_are_equal_in_a_plain_network() -> None:
    symmetry = mlp_symmetry(4, 9, 7, 3, kind="scaled")
    params = drawn(symmetry, 0)
    best = symmetry.act(balance(params, symmetry), params)
    for k in (0, 1):
        incoming = best[f"{k}.weight"].square().sum(1) + best[f"{k}.bias"].square()
        assert torch.allclose(incoming, best[f"{k + 1}.weight"].square().sum(0))


def test_deep_chains_take_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regauge.core.balance.NEWTON_STEPS", 10)
    symmetry = mlp_symmetry(3, *[6] * 20, 2, kind="scaled")
    params = symmetry.act(scaled_by(symmetry, 3.0, 0), drawn(symmetry, 0))
    best = symmetry.act(balance(params, symmetry), params)
    incoming = best["9.weight"].square().sum(1) + best["9.bias"].square()
    assert torch.allclose(incoming, best["10.weight"].square().sum(0), rtol=1e-9)


def uninitialized(symmetry: Symmetry, seed: int) -> Params:
    """Return mostly zeros, and values over thirty orders of magnitude, as in uninitialized memory."""
    chance, params = generator(seed), {}
    for name, shape in symmetry.shapes.items():
        size = 10 ** (30 * torch.rand(shape, generator=chance, dtype=torch.float64) - 15)
        values = size * torch.randn(shape, generator=chance, dtype=torch.float64)
        params[name] = torch.where(torch.rand(shape, generator=chance) < 0.95, 0.0, values)
    return params


def test_values_that_nobody_initialized_are_balanced_with_bounded_work(monkeypatch: pytest.MonkeyPatch) -> None:
    symmetry = rg.discover(GPT(16, 8, width=16, layers=1), (torch.zeros(2, 8, dtype=torch.int64),), verify=False)
    monkeypatch.setattr("regauge.core.balance.ALL_PRODUCTS", 100)
    monkeypatch.setattr("regauge.core.balance.PRODUCTS", 50)
    for seed in range(8):  # In some the null spaces of both Gram matrices do not fit together.
        with mock.patch.object(SquaredNorm, "product", autospec=True, side_effect=SquaredNorm.product) as products:
            element = balance(uninitialized(symmetry, seed), symmetry, buffers="keep")
        assert products.call_count < 150
        assert all(bool(tensor.isfinite().all()) for value in element.values() for _, tensor in value.items())


def test_units_with_one_side_get_norm_one_and_units_without_weights_keep_their_factors() -> None:
    symmetry = mlp_symmetry(3, 6, 5, 2, kind="scaled")
    params = drawn(symmetry, 0)
    for name, row in (("0.weight", 1), ("0.bias", 1), ("0.weight", 2), ("0.bias", 2)):
        params[name][row] = 0
    params["1.weight"][:, 2] = 0
    params["2.weight"][:, 4] = 0
    copy = symmetry.act(scaled_by(symmetry, 3.0, 1), params)
    one, two = (symmetry.act(balance(p, symmetry), p) for p in (params, copy))
    assert float(one["1.weight"][:, 1].norm()) == pytest.approx(1)
    assert float(one["1.weight"][4].square().sum() + one["1.bias"][4].square()) == pytest.approx(1)
    assert float(balance(params, symmetry)["h1"].scale[0, 2]) == 1  # type: ignore[index]
    assert all(torch.allclose(one[n], two[n], rtol=1e-9, atol=1e-9) for n in one)


def normalized_filters(free: tuple[int, int], gain: tuple[int, int]) -> Symmetry:
    """Return two layers of filters (`f1`, `f2`) with normalizations, for which no norm is best, and gains."""
    less = (-gain[0], -gain[1])
    first = (Placement("f1", 0, scale=free), Placement("n1", 0, scale=gain), Placement("f2", 1, scale=less))
    second = (Placement("f2", 0, scale=free), Placement("n2", 0, scale=gain), Placement("out", 1, scale=less))
    shapes = {"f1": (6, 3), "n1": (6,), "f2": (2, 6), "n2": (2,), "out": (4, 2)}
    return Symmetry((Group("h1", 6, first, scales=2), Group("h2", 2, second, scales=2)), shapes)


def test_tensors_without_a_best_norm_are_balanced_alike_for_every_basis_of_the_scales() -> None:
    ways = (((1, 0), (0, 1)), ((0, 1), (1, 0)), ((0, -1), (1, 0)), ((1, -1), (1, 0)), ((1, 0), (-1, 1)))
    params = drawn(normalized_filters(*ways[0]), 0)
    found = [symmetry.act(balance(params, symmetry), params) for symmetry in (normalized_filters(*w) for w in ways)]
    first, *others = found
    assert torch.allclose(first["f1"].norm(dim=1), torch.ones(6, dtype=torch.float64))
    for other in others:
        assert all(torch.allclose(other[n], first[n], rtol=1e-9, atol=1e-9) for n in first)


def batch_normalized() -> tuple[nn.Module, Symmetry, Params, Tensor]:
    module = resnet20(in_channels=1, blocks=1).double().eval()
    images = torch.randn(4, 1, 8, 8, generator=generator(0), dtype=torch.float64)
    symmetry = rg.discover(module, (images,), verify=False)
    g = generator(1)
    params = {
        n: t + 0.1 * torch.rand(t.shape, generator=g, dtype=torch.float64) if t.is_floating_point() else t
        for n, t in module.state_dict().items()
    }
    return module, symmetry, params, images


@pytest.mark.parametrize("buffers", ["move", "keep"])
def test_batch_normalization_computes_the_same_and_statistics_stay_where_asked(buffers: str) -> None:
    module, symmetry, params, images = batch_normalized()
    moved = symmetry.act(balance(params, symmetry, buffers=buffers), params)  # type: ignore[arg-type]
    before, after = (torch.func.functional_call(module, p, (images,)) for p in (params, moved))
    assert torch.allclose(before, after, rtol=1e-9)
    assert norm(symmetry, moved) < norm(symmetry, params)
    is_kept = all(torch.allclose(moved[n], params[n], rtol=1e-12) for n in symmetry.buffers)
    assert is_kept == (buffers == "keep")
    assert not torch.allclose(moved["stem.1.weight"], params["stem.1.weight"])


def test_gates_have_scales_of_their_own() -> None:
    module, x = GatedMLP().double(), torch.randn(3, 5, dtype=torch.float64, generator=generator(0))
    symmetry = rg.discover(module, (x,), verify=False)
    params = dict(module.state_dict())
    moved = symmetry.act(balance(params, symmetry), params)
    assert torch.allclose(module(x), torch.func.functional_call(module, moved, (x,)))
    assert norm(symmetry, moved) < norm(symmetry, params)


def test_norms_that_are_not_finite_are_refused() -> None:
    symmetry = mlp_symmetry(2, 3, 2, kind="scaled")
    params = drawn(symmetry, 0)
    params["1.weight"][0, 0] = 1e200
    with pytest.raises(ValueError, match="squares of the parameters are not finite"):
        balance(params, symmetry)


def test_where_nothing_scales_or_buffers_forbid_it_the_identity_is_left() -> None:
    for symmetry in (mlp_symmetry(2, 3, 2), mlp_symmetry(2, 3, 2, kind="signed")):
        params = drawn(symmetry, 0)
        assert all(torch.equal(t, params[n]) for n, t in symmetry.act(balance(params, symmetry), params).items())
    axes = {"w": ("h", None), "v": (None, "h"), "mean": ("h",)}
    shapes = {"w": (4, 3), "v": (2, 4), "mean": (4,)}
    frozen = Symmetry.from_axes(axes, kinds={"h": "scaled"}, buffers=["mean"])
    frozen = frozen.bind({n: torch.zeros(s) for n, s in shapes.items()})
    a, b = drawn(frozen, 0), drawn(frozen, 1)
    assert bool((balance(a, frozen, buffers="keep")["h"].scale == 1).all())  # type: ignore[union-attr]
    assert bool((balance(a, frozen)["h"].scale != 1).all())  # type: ignore[union-attr]
    copy = frozen.act(scaled_by(frozen, 3.0, 5), a)
    for scales, second, is_moved in (("balance", b, False), ("recompute", copy, False), ("balance", copy, True)):
        found = rg.align(a, second, frozen, method=WeightMatching(scales=scales))
        assert bool((found.element["h"].scale != 1).all()) is is_moved  # type: ignore[union-attr]


# --- matching --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SYMMETRIES)
def test_the_aligned_network_does_not_depend_on_the_scales_of_the_second_one(name: str) -> None:
    symmetry = SYMMETRIES[name]
    a, b = drawn(symmetry, 3), drawn(symmetry, 4)
    first = rg.align(a, b, symmetry)
    second = rg.align(a, symmetry.act(scaled_by(symmetry, 3.0, 5), b), symmetry)
    assert second.objective == pytest.approx(first.objective)
    assert all(torch.allclose(first.params[n], second.params[n], rtol=1e-8, atol=1e-8) for n in b)


@pytest.mark.parametrize("name", SYMMETRIES)
def test_the_second_network_takes_over_the_scales_of_the_first(name: str) -> None:
    """Scales of the first network transform the whole line, so values computed on the line do not change."""
    symmetry = SYMMETRIES[name]
    a, b, scales = drawn(symmetry, 6), drawn(symmetry, 7), scaled_by(symmetry, 3.0, 8)
    plain = rg.align(a, b, symmetry).params
    moved = rg.align(symmetry.act(scales, a), b, symmetry).params
    expected = symmetry.act(scales, plain)
    assert all(torch.allclose(moved[n], expected[n], rtol=1e-8, atol=1e-8) for n in b)


def test_planted_scales_are_undone() -> None:
    symmetry = mlp_symmetry(4, 12, 3, kind="scaled")
    a = drawn(symmetry, 0)
    b = symmetry.act(symmetry.random(generator(1)), a)
    assert all(torch.allclose(t, a[n], rtol=1e-9) for n, t in rg.align(a, b, symmetry).params.items())
    kept = rg.align(a, b, symmetry, method=WeightMatching(scales="keep"))
    assert kept.element["h1"].scale is not None
    assert bool((kept.element["h1"].scale == 1).all())
    assert not torch.allclose(kept.params["0.weight"], a["0.weight"], rtol=0.1)


def test_it_is_never_worse_than_the_identity() -> None:
    """Single units agree on one side only. Balancing moves them apart, so the identity is returned."""
    symmetry = mlp_symmetry(2, 1, 2, kind="scaled")
    is_worse = []
    for seed in range(20):
        a, b = drawn(symmetry, seed), drawn(symmetry, seed + 100)
        frame = Frame.of(*({n: t.unsqueeze(0) for n, t in params.items()} for params in (a, b)), symmetry, "balance")
        result = rg.align(a, b, symmetry)
        assert result.initial == pytest.approx(float(frame.identity_objective()))
        assert result.objective >= result.initial
        is_worse.append(result.initial > sum(float((frame.a[n] * frame.b[n]).sum()) for n in frame.a) + 1e-9)
        assert is_worse[-1] == all(torch.allclose(result.params[n], b[n], rtol=1e-12) for n in b)
        assert len(result.starts) == 1 + is_worse[-1]
    assert any(is_worse)
    assert not all(is_worse)


def test_the_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="choose 'balance', 'recompute' or 'keep'"):
        WeightMatching(scales="match")  # type: ignore[arg-type]

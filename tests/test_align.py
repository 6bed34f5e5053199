"""Alignment is exact where it can be, never worse than the identity, deterministic, and strict about its input."""

import itertools

import pytest
import torch
from coverings import every_other
from hypothesis import given, settings
from hypothesis import strategies as st
from models import CASES, symmetry_of
from symmetries import (
    BY_HAND,
    KINDS,
    PARTS,
    WIDE,
    attention,
    closeness,
    drawn,
    every_element,
    experts,
    generator,
    mlp_symmetry,
    normalized_groups,
    recurrent,
    stream,
    three_levels,
)
from torch import Tensor

import regauge as rg
from regauge import Params, Symmetry, WeightMatching
from regauge.alignment.engine.climbs import Pursuit, climb, make_ascent
from regauge.alignment.engine.nested_blocks import solve_family
from regauge.core.families import compared, families

# --- laws ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("symmetry", [*BY_HAND.values(), WIDE], ids=[*BY_HAND, "wide"])
def test_it_never_falls_nor_ends_below_the_identity_and_reports_what_it_reaches(symmetry: Symmetry) -> None:
    for seed in range(1 if symmetry is WIDE else 3):
        a, b = drawn(symmetry, seed), drawn(symmetry, seed + 100)
        kept = {key: tensor.clone() for key, tensor in b.items()}
        result = rg.align(a, b, symmetry)
        assert all(torch.equal(b[key], kept[key]) for key in b)
        assert result.objective >= result.initial
        assert all(x <= y for x, y in itertools.pairwise(result.history))
        assert result.initial == pytest.approx(closeness(symmetry, a, b, b), abs=1e-9)
        assert result.objective == pytest.approx(closeness(symmetry, a, result.params, b), abs=1e-8)
        moved = symmetry.act(result.element, b)
        assert all(torch.equal(moved[key], result.params[key]) for key in b)


@settings(deadline=None, derandomize=True, max_examples=25)
@given(kind=st.sampled_from(KINDS[:4]), n=st.integers(1, 40), seed=st.integers(0, 10**6))
def test_one_hidden_layer_recovers_what_was_planted(kind: str, n: int, seed: int) -> None:
    symmetry = mlp_symmetry(3, n, 2, kind=kind)
    a = drawn(symmetry, seed)
    planted = symmetry.random(generator(seed), PARTS.get(kind, ("permutation", "sign")))
    result = rg.align(a, symmetry.act(planted, a), symmetry)
    assert all(torch.allclose(result.params[key], a[key], atol=1e-9) for key in a)


@settings(deadline=None, derandomize=True, max_examples=25)
@given(kind=st.sampled_from(KINDS[:7]), n=st.integers(1, 20), seed=st.integers(0, 10**6))
def test_moving_the_second_network_first_changes_nothing(kind: str, n: int, seed: int) -> None:
    """If the optimum is unique, align(a, g b) equals align(a, b)."""
    symmetry = mlp_symmetry(3, n, 4, kind=kind)
    a, b = drawn(symmetry, seed), drawn(symmetry, seed + 1)
    moved = symmetry.act(symmetry.random(generator(seed), PARTS.get(kind, ("permutation", "sign"))), b)
    first, second = rg.align(a, b, symmetry), rg.align(a, moved, symmetry)
    assert all(torch.allclose(first.params[key], second.params[key], atol=1e-6) for key in b)


@pytest.mark.parametrize(
    "symmetry",
    [
        mlp_symmetry(2, 6, 3),
        mlp_symmetry(2, 3, 3, kind="signed"),
        experts(2, 3, 3),
        experts(3, 2, 2),
        experts(2, 2, 2, signs=1),
        normalized_groups(2, 3, 2),
        normalized_groups(3, 2, 2),
        three_levels(),
    ],
    ids=["units", "signs", "experts", "more experts", "signed experts", "groups", "more groups", "three levels"],
)
def test_a_single_family_is_solved_exactly(symmetry: Symmetry) -> None:
    for seed in range(2):
        a, b = drawn(symmetry, seed), drawn(symmetry, seed + 50)
        best = max(closeness(symmetry, a, symmetry.act(g, b), b) for g in every_element(symmetry))
        assert rg.align(a, b, symmetry).objective == pytest.approx(best, abs=1e-8)


def test_rotations_of_heads_are_chosen_for_every_pair_of_heads() -> None:
    symmetry = attention(3, 4, 10)
    a, b = drawn(symmetry, 0), drawn(symmetry, 1)
    blocks = {n: (a[n].reshape(3, 4, 10), b[n].reshape(3, 4, 10)) for n in ("q", "k", "v")}
    blocks["o"] = (a["o"].T.reshape(3, 4, 10), b["o"].T.reshape(3, 4, 10))

    def reached(u: int, v: int) -> float:
        costs = [
            sum((blocks[n][0][u] @ blocks[n][1][v].T for n in names), torch.zeros(4, 4).double())
            for names in (("q", "k"), ("v", "o"))
        ]
        return sum(float(torch.linalg.matrix_norm(c, "nuc")) for c in costs)

    best = max(sum(reached(u, p[u]) for u in range(3)) for p in itertools.permutations(range(3)))
    assert rg.align(a, b, symmetry).objective == pytest.approx(best)


@pytest.mark.parametrize(
    "name", ["attention", "rotary", "grouped convolution", "recurrent", "experts", "normalized groups"]
)
def test_blocks_are_recovered_under_noise(name: str) -> None:
    symmetry = BY_HAND[name]
    for seed in range(5):
        a = drawn(symmetry, seed)
        moved = symmetry.act(symmetry.random(generator(seed)), a)
        noise = drawn(symmetry, seed + 1000)
        result = rg.align(a, {key: t + 0.02 * noise[key] for key, t in moved.items()}, symmetry)
        assert all(bool(((result.params[key] - a[key]).abs() < 0.2).all()) for key in a)


def test_a_step_of_a_nested_family_does_not_lose_what_is_reached() -> None:
    symmetry = BY_HAND["grouped convolution"]
    (family,) = families(symmetry.groups, symmetry.sites)
    for seed in range(20):
        a = {key: t.unsqueeze(0) for key, t in drawn(symmetry, seed).items()}
        b = {key: t.unsqueeze(0) for key, t in drawn(symmetry, seed + 100).items()}
        element, gain = solve_family(family, a, b)
        moved = symmetry.act(element.item(0), {key: t[0] for key, t in b.items()})
        difference = sum(float((a[key][0] * (moved[key] - b[key][0])).sum()) for key in a)
        assert float(gain) == pytest.approx(difference, abs=1e-9)
        assert float(gain) >= 0


def test_residual_streams_need_the_barycenter() -> None:
    """A hidden permutation is recovered under noise as large as the weights, in a weakly anchored stream."""
    symmetry = stream(48, 64, 6)
    recovered = {"barycenter": 0, "identity": 0}
    for seed in range(4):
        a, noise = drawn(symmetry, seed, torch.float32), drawn(symmetry, seed + 100, torch.float32)
        planted = symmetry.random(generator(seed))
        b = {key: t + 0.7 * noise[key] for key, t in symmetry.act(planted, a).items()}
        for start in recovered:
            found = rg.align(a, b, symmetry, method=WeightMatching(start=start)).element  # type: ignore[arg-type]
            undone = symmetry.inverse(planted)
            recovered[start] += all(torch.equal(found[n].perm, undone[n].perm) for n in found)  # type: ignore[arg-type]
    assert recovered["barycenter"] == 4
    assert recovered["identity"] < 4


def test_restarts_never_hurt_and_are_counted() -> None:
    symmetry = recurrent(10)
    a, b = drawn(symmetry, 3), drawn(symmetry, 4)
    once = rg.align(a, b, symmetry)
    many = rg.align(a, b, symmetry, method=WeightMatching(restarts=8), generator=generator(0))
    assert many.objective >= once.objective
    assert len(many.starts) == len(once.starts) + 8
    assert f"best of {len(many.starts)};" in str(many)


def test_restarts_of_a_symmetry_without_groups() -> None:
    a, b = {"w": torch.ones(3)}, {"w": torch.zeros(3)}
    found = rg.align(a, b, Symmetry((), {"w": (3,)}), method=WeightMatching(restarts=3), generator=generator(0))
    assert torch.equal(found.params["w"], b["w"])
    assert len(found.starts) == 1


def test_a_start_that_ends_below_the_identity_falls_back_to_it() -> None:
    """The networks are already close, and a chain without anchors rotates. The barycenter contains no information."""
    symmetry = mlp_symmetry(1, 12, 12, 12, 1, kind="orthogonal")
    a, noise = drawn(symmetry, 23), drawn(symmetry, 24)
    result = rg.align(a, {key: t + 0.1 * noise[key] for key, t in a.items()}, symmetry)
    assert len(result.starts) == 2
    assert result.starts[0] < result.initial < result.starts[1]
    assert result.objective == result.starts[1]


BY_NAME = {case.name: case for case in CASES}


@pytest.mark.parametrize("name", every_other(BY_NAME, part=0))
def test_every_architecture(name: str) -> None:
    """Hidden elements are recovered, other networks come closer, and the reported objective is correct."""
    case = BY_NAME[name]
    torch.manual_seed(0)
    symmetry = symmetry_of(case)
    g, state = generator(0), dict(case.module().state_dict())
    a, b = _perturbed(state, g), _perturbed(state, g)
    counted = [n for n in symmetry.sites if n not in symmetry.buffers and a[n].is_floating_point()]
    result = rg.align(a, b, symmetry, method=WeightMatching(max_sweeps=3))
    assert result.objective >= result.initial
    assert all(x <= y for x, y in itertools.pairwise(result.history))
    first, moved, second = (symmetry.split(one)[0] for one in (a, result.params, b))
    behind = symmetry.on_representatives(rotate=bool(result.element.rotation))
    compared = {n: first[n] for n in counted if n in behind.sites}
    reached = closeness(behind, compared, moved, second) if not symmetry.buffers else None
    scale = sum(float(first[n].double().norm() * second[n].double().norm()) for n in compared)
    if reached is not None:
        assert result.objective == pytest.approx(reached, abs=1e-5 * scale)
    planted = symmetry.act(symmetry.random(g, ("permutation", "sign", "shift")), a)
    found = rg.align(a, planted, symmetry, method=WeightMatching(max_sweeps=30))
    distance = sum(float((found.params[n].double() - a[n].double()).square().sum()) for n in counted)
    assert distance <= 1e-6 * sum(float(a[n].double().square().sum()) for n in counted)


def _perturbed(state: Params, g: torch.Generator) -> Params:
    """Return weights, biases and gains far from their initial values. Tied names stay tied."""
    seen: dict[int, Tensor] = {}
    for tensor in state.values():
        if tensor.is_floating_point() and tensor.data_ptr() not in seen:
            noise = torch.randn(tensor.shape, generator=g)
            spread = float(tensor.std()) if tensor.numel() > 1 else 1.0
            seen[tensor.data_ptr()] = tensor + (0.3 * spread + 0.1) * noise
    return {n: seen[t.data_ptr()].reshape(t.shape) if t.is_floating_point() else t for n, t in state.items()}


# --- what counts, and what is refused --------------------------------------------------------------------------


def test_buffers_move_but_do_not_count() -> None:
    axes = {"w": ("h", None), "v": (None, "h"), "mean": ("h",)}
    symmetry = Symmetry.from_axes(axes, buffers=["mean"])
    g = generator(0)
    a = {"w": torch.randn(6, 4, generator=g), "v": torch.randn(3, 6, generator=g), "mean": torch.zeros(6)}
    planted = torch.randperm(6, generator=g)
    b = {"w": a["w"][planted], "v": a["v"][:, planted], "mean": 1000 * torch.arange(6.0)}
    result = rg.align({**a, "mean": 1000 * torch.arange(6.0)}, b, symmetry)
    assert torch.equal(result.params["w"], a["w"])
    assert torch.equal(result.params["mean"], b["mean"][planted.argsort()])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_matched_in_single_and_kept(dtype: torch.dtype) -> None:
    symmetry = mlp_symmetry(20, 60, 5)
    a = drawn(symmetry, 0, dtype)
    result = rg.align(a, symmetry.act(symmetry.random(generator(1)), a), symmetry)
    assert all(t.dtype == dtype and torch.equal(t, a[n]) for n, t in result.params.items())


def test_two_dtypes_meet_in_the_wider_one() -> None:
    symmetry = mlp_symmetry(4, 9, 5)
    a = drawn(symmetry, 0, torch.bfloat16)
    b = symmetry.act(symmetry.random(generator(1)), {n: t.double() for n, t in a.items()})
    result = rg.align(a, b, symmetry)
    assert all(t.dtype == torch.float64 and torch.equal(t, a[n].double()) for n, t in result.params.items())


def test_limits_width_one_dead_and_duplicate_units_equal_networks() -> None:
    one = mlp_symmetry(2, 1, 1, kind="signed")
    a = drawn(one, 0)
    assert rg.align(a, {n: t.clone() for n, t in a.items()}, one).objective == pytest.approx(closeness(one, a, a, a))
    dead = mlp_symmetry(2, 5, 2)
    a = {n: torch.zeros_like(t) for n, t in drawn(dead, 0).items()}
    assert rg.align(a, a, dead).objective == 0
    twins = {n: torch.ones_like(t) for n, t in a.items()}
    assert rg.align(twins, twins, dead).element["h1"].perm.tolist() == [0, 1, 2, 3, 4]  # type: ignore[union-attr]
    nothing = Symmetry((), {"w": (2,)})
    assert torch.equal(rg.align({"w": torch.ones(2)}, {"w": torch.zeros(2)}, nothing).params["w"], torch.zeros(2))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("which", ["first", "second"])
def test_networks_that_are_not_finite_are_refused(bad: float, which: str) -> None:
    symmetry = mlp_symmetry(2, 3, 2)
    a, b = drawn(symmetry, 0), drawn(symmetry, 1)
    (a if which == "first" else b)["0.weight"][1, 1] = bad
    with pytest.raises(ValueError, match=rf"'0.weight' of the {which} network holds NaN or Inf in 1 of"):
        rg.align(a, b, symmetry)


def test_large_half_precision_values_are_finite_although_their_sum_is_not() -> None:
    symmetry = mlp_symmetry(2, 3, 2)
    a = {n: torch.full_like(t, 60000, dtype=torch.float16) for n, t in drawn(symmetry, 0).items()}
    assert rg.align(a, a, symmetry).objective > 0


def test_other_architectures_are_refused() -> None:
    symmetry = mlp_symmetry(2, 3, 2)
    a, other = drawn(symmetry, 0), drawn(mlp_symmetry(2, 4, 2), 0)
    with pytest.raises(ValueError, match=r"'0.weight' has shape \(3, 2\) in the first network and \(4, 2\)"):
        rg.align(a, other, symmetry)
    with pytest.raises(ValueError, match="the parameters are of another architecture"):
        rg.align(other, other, symmetry)
    with pytest.raises(ValueError, match=r"only the first has '1.bias'"):
        rg.align(a, {n: t for n, t in a.items() if n != "1.bias"}, symmetry)
    fewer = {n: t for n, t in a.items() if n != "1.weight"}
    with pytest.raises(KeyError, match=r"lack '1\.weight', which the symmetry moves; they have '0\.weight'"):
        rg.align(fewer, fewer, symmetry)
    with pytest.raises(KeyError, match="which the symmetry moves; they have no tensors; load the checkpoint"):
        rg.align({}, {}, symmetry)


def test_populations_are_refused() -> None:
    symmetry = mlp_symmetry(2, 3, 2)
    many = {n: t.expand(4, *t.shape) for n, t in drawn(symmetry, 0).items()}
    with pytest.raises(ValueError, match=r"these are populations; align them with `regauge.alignment.align_pairs`"):
        rg.align(many, many, symmetry)


def test_methods_are_checked() -> None:
    symmetry = mlp_symmetry(2, 3, 2)
    a = drawn(symmetry, 0)
    with pytest.raises(ValueError, match=r"restarts=2 begin at random elements; give align a torch.Generator"):
        rg.align(a, a, symmetry, method=WeightMatching(restarts=2))
    with pytest.raises(ValueError, match="start is 'middle'; choose 'barycenter' or 'identity'"):
        WeightMatching(start="middle")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least one sweep is needed"):
        WeightMatching(max_sweeps=0)


def test_the_report_says_what_to_do() -> None:
    symmetry = mlp_symmetry(4, 20, 20, 20, 3)
    a, b = drawn(symmetry, 0), drawn(symmetry, 1)
    short = rg.align(a, b, symmetry, method=WeightMatching(max_sweeps=1))
    assert not short.is_converged
    assert "stopped before convergence: allow the method more sweeps or steps" in short.report
    assert "`regauge line` and `rg.line` measure the barrier" in rg.align(a, b, symmetry).report


def rotated_and_permuted() -> Symmetry:
    """Return a chain of a rotated layer and a permuted layer."""
    axes: dict[str, tuple[str | None, ...]] = {"in": ("h1", None), "between": ("h2", "h1"), "out": (None, "h2")}
    bound = Symmetry.from_axes(axes, kinds={"h1": "orthogonal", "h2": "signed"})
    return bound.bind({"in": torch.zeros(6, 4), "between": torch.zeros(9, 6), "out": torch.zeros(3, 9)})


def test_large_tensors_in_float64_do_not_hide_what_small_ones_in_float32_say() -> None:
    symmetry = rg.Symmetry.from_axes({"small": ("h", None), "large": ("q", None)}, kinds={"h": "signed"})
    small, large = (torch.randn(1, 8, 8, generator=torch.Generator().manual_seed(k)) for k in (0, 1))
    a = {"small": small, "large": 1e4 * large.double()}
    symmetry = symmetry.bind({name: t[0] for name, t in a.items()})
    found = climb(symmetry, a, {**a, "small": -small}, tolerance=1e-11).element["h"].sign
    assert found is not None
    assert bool((found == -1).all())


@pytest.mark.parametrize("name", ["stream", "recurrent", "signed", "dihedral", "rotated and permuted"])
def test_costs_that_are_corrected_stay_true(name: str) -> None:
    """After many steps, the updated cost of a family equals a newly computed cost, for one pair and for several
    pairs.
    """
    symmetry = BY_HAND.get(name) or rotated_and_permuted()
    for pairs in (1, 3):
        drawings = ([drawn(symmetry, seed + k) for k in range(pairs)] for seed in (0, 10))
        a, b = compared([{n: torch.stack([p[n] for p in many]) for n in many[0]} for many in drawings], symmetry)
        ascent, rows = make_ascent(symmetry, a, b), torch.arange(pairs)
        ascent.climb(rows, 100)
        fresh = make_ascent(symmetry, a, b, start=ascent.networks.element)
        for k, kept in ascent._costs.items():
            new = fresh._costs[k].cost(rows)
            for key, matrix in kept.cost(rows).matrices.items():
                assert torch.allclose(matrix, new.matrices[key], atol=1e-10)


def test_costs_follow_a_first_network_that_moves() -> None:
    symmetry = BY_HAND["stream"]
    a, b, c = (compared([drawn(symmetry, seed)], symmetry)[0] for seed in range(3))
    pursuit = Pursuit(symmetry, a, b, symmetry.identity())
    pursuit.climb(100)
    pursuit.aim_at({name: c[name] for name in list(c)[:3]})
    gain = pursuit.climb(100)
    aim = {**a, **{name: c[name] for name in list(c)[:3]}}
    assert gain > 0
    moved = symmetry.act(pursuit.element, b)
    assert all(torch.allclose(pursuit.second[name], moved[name]) for name in b)
    again = Pursuit(symmetry, aim, b, pursuit.element)
    assert again.climb(100) <= 1e-9 * sum(float(aim[name].norm() * b[name].norm()) for name in aim)
    assert not again.changed

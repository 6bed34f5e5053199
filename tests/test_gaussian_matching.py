"""Gaussian matching: means and standard deviations are transformed together, and both determine the result."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from symmetries import BY_HAND, drawn, every_element, experts, generator, mlp_symmetry, normalized_groups

import regauge as rg
from regauge import (
    Element,
    FrankWolfe,
    GaussianMatching,
    Group,
    Params,
    Placement,
    Symmetry,
    WeightMatching,
)
from regauge.alignment import JointMatching, MergeMany, Method, Problem, Results
from regauge.alignment.methods.gaussian_matching import GaussianCost

Pair = tuple[Params, Params]
ROTATING = ["orthogonal", "centered", "rotation", "linear", "attention", "rotary"]
DISCRETE = [name for name in BY_HAND if name not in ROTATING]


class Posterior(NamedTuple):
    mean: Params
    std: Params


def gaussian(symmetry: Symmetry, seed: int) -> Pair:
    noise = drawn(symmetry, seed + 10**6)
    return drawn(symmetry, seed), {name: 0.1 + tensor.abs() for name, tensor in noise.items()}


def moved(symmetry: Symmetry, g: Element, pair: Pair) -> Pair:
    """Return the transformed Gaussian by its definition: standard deviations are multiplied by the magnitudes of the
    factors.
    """
    unsigned = {
        name: rg.Value(
            v.perm, v.scale, None if v.sign is None else v.sign.abs(), None if v.shift is None else 0 * v.shift
        )
        for name, v in g.items()
    }
    return symmetry.act(g, pair[0]), symmetry.act(Element(unsigned), pair[1])


def wasserstein(a: Pair, b: Pair) -> float:
    return sum(float((x[name] - y[name]).square().sum()) for x, y in zip(a, b, strict=True) for name in x)


def is_close(a: Pair, b: Pair, atol: float = 1e-9) -> bool:
    return all(torch.allclose(x[name], y[name], atol=atol) for x, y in zip(a, b, strict=True) for name in x)


@pytest.mark.parametrize("name", DISCRETE)
def test_it_never_falls_and_the_distance_falls_by_twice_what_it_gains(name: str) -> None:
    symmetry = BY_HAND[name]
    for seed in range(3):
        a, b = gaussian(symmetry, seed), gaussian(symmetry, seed + 100)
        result = rg.align(a, b, symmetry, method=GaussianMatching())
        assert result.objective >= result.initial
        assert all(x <= y for x, y in itertools.pairwise(result.history))
        fallen = wasserstein(a, b) - wasserstein(a, result.params)
        assert result.objective - result.initial == pytest.approx(fallen / 2, abs=1e-8)
        expected = moved(symmetry, result.element, b)
        assert all(torch.equal(x[n], y[n]) for x, y in zip(result.params, expected, strict=True) for n in x)


def divergence(a: Pair, b: Pair) -> float:
    """Return KL(N(b), N(a)) of diagonal Gaussians, computed by torch."""
    normal = torch.distributions.Normal
    return sum(
        float(torch.distributions.kl_divergence(normal(b[0][n], b[1][n]), normal(a[0][n], a[1][n])).sum()) for n in a[0]
    )


def symmetric_divergence(a: Pair, b: Pair) -> float:
    return divergence(a, b) + divergence(b, a)


@pytest.mark.parametrize("name", DISCRETE)
@pytest.mark.parametrize("cost", ["kl", "symmetric kl"])
def test_a_divergence_falls_by_what_it_gains(name: str, cost: GaussianCost) -> None:
    symmetry = BY_HAND[name]
    measure = divergence if cost == "kl" else symmetric_divergence
    for seed in range(2):
        a, b = gaussian(symmetry, seed), gaussian(symmetry, seed + 100)
        result = rg.align(a, b, symmetry, method=GaussianMatching(cost=cost))
        assert result.objective > result.initial
        assert all(x <= y for x, y in itertools.pairwise(result.history))
        fallen = measure(a, b) - measure(a, result.params)
        assert result.objective - result.initial == pytest.approx(fallen, rel=1e-9)
        for value in result.element.values():
            assert value.scale is None or bool((value.scale == 1).all())
            assert value.shift is None or not bool(value.shift.any())


@pytest.mark.parametrize("cost", ["kl", "symmetric kl"])
@pytest.mark.parametrize("symmetry", [mlp_symmetry(2, 5, 3), mlp_symmetry(2, 3, 3, kind="signed"), experts(2, 3, 3)])
def test_a_single_family_has_the_smallest_divergence_of_all(symmetry: Symmetry, cost: GaussianCost) -> None:
    measure = divergence if cost == "kl" else symmetric_divergence
    for seed in range(2):
        a, b = gaussian(symmetry, seed), gaussian(symmetry, seed + 50)
        best = min(measure(a, moved(symmetry, g, b)) for g in every_element(symmetry))
        found = rg.align(a, b, symmetry, method=GaussianMatching(cost=cost))
        assert measure(a, found.params) == pytest.approx(best, rel=1e-9)


def test_the_divergence_is_no_distance_of_means() -> None:
    """The trace of the divergence depends on the permutation: even with equal means, it distinguishes units."""
    symmetry = mlp_symmetry(3, 12, 2)
    means, std = gaussian(symmetry, 0)
    means = {name: torch.ones_like(tensor) for name, tensor in means.items()}
    b = moved(symmetry, symmetry.random(generator(1)), (means, std))
    assert is_close(rg.align((means, std), b, symmetry, method=GaussianMatching(cost="kl")).params, (means, std))


@pytest.mark.parametrize("name", DISCRETE)
def test_the_weight_of_standard_deviations_is_that_of_their_distance(name: str) -> None:
    symmetry = BY_HAND[name]
    a, b = gaussian(symmetry, 1), gaussian(symmetry, 101)
    result = rg.align(a, b, symmetry, method=GaussianMatching(std_weight=5.0))
    gains = [
        sum(float((x[n] - y[n]).square().sum() - (x[n] - z[n]).square().sum()) for n in x) / 2
        for x, y, z in zip(a, b, result.params, strict=True)
    ]
    assert result.objective - result.initial == pytest.approx(gains[0] + 5 * gains[1], abs=1e-8)
    assert is_close(result.params, moved(symmetry, result.element, b), atol=0)


def squared_distances(pairs: Sequence[Pair]) -> float:
    return sum(wasserstein(x, y) for x, y in itertools.combinations(pairs, 2))


@pytest.mark.parametrize("method", [None, FrankWolfe(max_steps=5, scales="keep")], ids=["merge", "frank-wolfe"])
@pytest.mark.parametrize("name", DISCRETE)
def test_many_come_closer_by_twice_what_it_gains(name: str, method: FrankWolfe | None) -> None:
    symmetry = BY_HAND[name]
    pairs = [Posterior(*gaussian(symmetry, seed)) for seed in (0, 100, 200)]
    result = rg.align_many(pairs, symmetry, method=GaussianMatching(method=method))
    assert result.objective >= result.initial
    assert all(x <= y for x, y in itertools.pairwise(result.history))
    assert result.history[-1] == pytest.approx(result.objective)
    assert result.params[0] is pairs[0]
    for element, before, after in zip(result.elements, pairs, result.params, strict=True):
        assert isinstance(after, Posterior)
        assert is_close(after, moved(symmetry, element, before), atol=0)
    fallen = squared_distances(pairs) - squared_distances(result.params)
    assert result.objective - result.initial == pytest.approx(fallen / 2, abs=1e-6)


def test_no_single_one_of_many_can_come_closer_to_the_barycenter_of_the_others() -> None:
    symmetry = mlp_symmetry(3, 9, 8, 2)
    pairs = [gaussian(symmetry, seed) for seed in range(5)]
    found = rg.align_many(pairs, symmetry, method=GaussianMatching()).params
    for k, pair in enumerate(found):
        others = [x for j, x in enumerate(found) if j != k]
        a, s = ({n: torch.stack([x[i][n] for x in others]).mean(0) for n in pair[i]} for i in range(2))
        again = rg.align((a, s), pair, symmetry, method=GaussianMatching(method=WeightMatching(start="identity")))
        assert again.objective == pytest.approx(again.initial, abs=1e-9)


def test_many_that_are_one_coincide_and_scales_are_recovered_where_these_are_balanced() -> None:
    symmetry = mlp_symmetry(3, 9, 8, 2, kind="scaled")
    first = gaussian(symmetry, 0)
    copies = [first, *(moved(symmetry, symmetry.random(generator(seed)), first) for seed in range(3))]
    found = rg.align_many(copies, symmetry, method=GaussianMatching(method=MergeMany())).params
    assert all(is_close(one, first, atol=1e-8) for one in found)
    kept = rg.align_many(copies, symmetry, method=GaussianMatching()).params
    assert not all(is_close(one, first, atol=1e-2) for one in kept)


def test_many_to_the_first_and_a_single_one() -> None:
    symmetry = mlp_symmetry(3, 6, 2, kind="signed")
    pairs = [gaussian(symmetry, seed) for seed in range(3)]
    found = rg.align_many(pairs, symmetry, method=GaussianMatching(method=WeightMatching()))
    for one, pair in zip(found.params[1:], pairs[1:], strict=True):
        assert is_close(one, rg.align(pairs[0], pair, symmetry, method=GaussianMatching()).params, atol=0)
    (alone,) = rg.align_many(pairs[:1], symmetry, method=GaussianMatching()).params
    assert alone is pairs[0]


def test_posteriors_that_differ_by_scales_are_recovered_where_these_are_balanced() -> None:
    symmetry = mlp_symmetry(3, 9, 8, 2, kind="scaled")
    a = gaussian(symmetry, 0)
    b = moved(symmetry, symmetry.random(generator(1)), a)
    assert is_close(rg.align(a, b, symmetry, method=GaussianMatching(method=WeightMatching())).params, a)
    assert not is_close(rg.align(a, b, symmetry, method=GaussianMatching()).params, a)


def test_the_distance_does_not_change_when_both_move() -> None:
    for kind in ("permutation", "signed", "dihedral"):
        symmetry = mlp_symmetry(3, 6, 5, 2, kind=kind)
        a, b = gaussian(symmetry, 0), gaussian(symmetry, 1)
        g = symmetry.random(generator(2), ("permutation", "sign", "shift"))
        both = wasserstein(moved(symmetry, g, a), moved(symmetry, g, b))
        assert both == pytest.approx(wasserstein(a, b))


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_uncertainty_tells_units_apart_that_have_one_mean(value: float) -> None:
    symmetry = mlp_symmetry(3, 12, 2)
    means, std = gaussian(symmetry, 0)
    means = {name: torch.full_like(tensor, value) for name, tensor in means.items()}
    b = moved(symmetry, symmetry.random(generator(1)), (means, std))
    assert is_close(rg.align((means, std), b, symmetry, method=GaussianMatching()).params, (means, std))
    blind = rg.align((means, std), b, symmetry, method=GaussianMatching(cost="mean")).params
    assert not is_close(blind, (means, std))


def test_equal_uncertainty_everywhere_leaves_weight_matching() -> None:
    symmetry = mlp_symmetry(4, 15, 3, kind="signed")
    for seed in range(5):
        a, b = drawn(symmetry, seed), drawn(symmetry, seed + 50)
        std = {name: torch.full_like(tensor, 0.3) for name, tensor in a.items()}
        with_std = rg.align((a, std), (b, std), symmetry, method=GaussianMatching())
        alone = rg.align(a, b, symmetry)
        assert all(torch.equal(with_std.params[0][name], alone.params[name]) for name in a)


@pytest.mark.parametrize("name", ["signed", "stream", "normalized groups"])
def test_the_mean_alone_is_weight_matching_and_moves_the_rest(name: str) -> None:
    symmetry = BY_HAND[name]
    a, b = gaussian(symmetry, 3), gaussian(symmetry, 4)
    result = rg.align(a, b, symmetry, method=GaussianMatching(cost="mean"))
    alone = rg.align(a[0], b[0], symmetry)
    assert result.history == alone.history
    assert all(torch.equal(result.params[0][key], alone.params[key]) for key in a[0])
    assert is_close(result.params, moved(symmetry, alone.element, b), atol=0)


@pytest.mark.parametrize(
    "symmetry",
    [mlp_symmetry(2, 5, 3), mlp_symmetry(2, 3, 3, kind="signed"), experts(2, 3, 3), normalized_groups(2, 3, 2)],
    ids=["units", "signs", "experts", "groups"],
)
def test_a_single_family_is_solved_exactly(symmetry: Symmetry) -> None:
    for seed in range(3):
        a, b = gaussian(symmetry, seed), gaussian(symmetry, seed + 50)
        best = min(wasserstein(a, moved(symmetry, g, b)) for g in every_element(symmetry))
        found = rg.align(a, b, symmetry, method=GaussianMatching())
        assert wasserstein(a, found.params) == pytest.approx(best, abs=1e-8)


def test_scales_multiply_standard_deviations_and_signs_do_not() -> None:
    """The inner method may choose any element, and the chosen element transforms both dictionaries."""
    places = (Placement("w", 0, scale=(1,), sign=(1,)), Placement("v", 1, scale=(-1,), sign=(1,)))
    symmetry = Symmetry((Group("h", 3, places, scales=1, signs=1),), {"w": (3, 4), "v": (2, 3)})
    planted = symmetry.random(generator(0))

    class Planted(Method):
        def match(self, problem: Problem) -> Results:
            return problem.result(planted, objective=0.0, initial=0.0)

    a = gaussian(symmetry, 0)
    result = rg.align(a, a, symmetry, method=GaussianMatching(method=Planted()))
    assert is_close(result.params, moved(symmetry, planted, a), atol=0)
    assert all(bool((tensor > 0).all()) for tensor in result.params[1].values())


@pytest.mark.parametrize("name", ROTATING)
def test_rotations_stay_at_the_identity(name: str) -> None:
    symmetry = BY_HAND[name]
    a, b = gaussian(symmetry, 0), gaussian(symmetry, 1)
    result = rg.align(a, b, symmetry, method=GaussianMatching())
    for value in result.element.values():
        if value.matrix is not None:
            assert torch.equal(value.matrix, torch.eye(value.matrix.shape[-1]).double().expand_as(value.matrix))
    assert wasserstein(a, result.params) <= wasserstein(a, b)
    rotated = rg.align((a[0],), (b[0],), symmetry, method=JointMatching(("parameters",)))
    alone = rg.align(a[0], b[0], symmetry, method=WeightMatching(scales="keep"))
    assert rotated.objective == pytest.approx(alone.objective)


def test_three_dictionaries_with_weights() -> None:
    """A mean, its standard deviations and a second sample are matched. The objective is their weighted sum."""
    for kind in ("permutation", "signed", "dihedral"):
        symmetry = mlp_symmetry(3, 9, 8, 2, kind=kind)
        (a, s), (b, t), c, d = gaussian(symmetry, 0), gaussian(symmetry, 1), drawn(symmetry, 2), drawn(symmetry, 3)
        method = JointMatching(("parameters", "magnitudes", "parameters"), weights=(1.0, 0.5, 3.0))
        result = rg.align((a, s, c), (b, t, d), symmetry, method=method)
        fallen = [
            sum(float((x[n] - y[n]).square().sum() - (x[n] - z[n]).square().sum()) for n in x) / 2
            for x, y, z in zip((a, s, c), (b, t, d), result.params, strict=True)
        ]
        expected = fallen[0] + 0.5 * fallen[1] + 3.0 * fallen[2]
        assert result.objective - result.initial == pytest.approx(expected, abs=1e-8)
        assert expected > 0


def test_named_tuples_stay_what_they_are() -> None:
    symmetry = mlp_symmetry(3, 6, 2)
    a, b = Posterior(*gaussian(symmetry, 0)), Posterior(*gaussian(symmetry, 1))
    result = rg.align(a, b, symmetry, method=GaussianMatching())
    assert isinstance(result.params, Posterior)
    assert all(bool((tensor > 0).all()) for tensor in result.params.std.values())


def test_buffers_and_certain_parameters_need_no_standard_deviation() -> None:
    symmetry = Symmetry.from_axes({"w": ("h", None), "v": (None, "h"), "mean": ("h",)}, buffers=["mean"])
    g = generator(0)
    mean = {"w": torch.randn(6, 4, generator=g), "v": torch.randn(3, 6, generator=g), "mean": torch.arange(6.0)}
    std = {"w": torch.rand(6, 4, generator=g) + 0.1}
    perm = torch.randperm(6, generator=g)
    b = {"w": mean["w"][perm], "v": mean["v"][:, perm], "mean": mean["mean"][perm]}, {"w": std["w"][perm]}
    result = rg.align((mean, std), b, symmetry, method=GaussianMatching())
    assert all(torch.equal(x[n], y[n]) for x, y in zip(result.params, (mean, std), strict=True) for n in y)


def test_what_does_not_fit_is_refused() -> None:
    symmetry = mlp_symmetry(2, 3, 2)
    mean, std = gaussian(symmetry, 0)
    pair = (mean, std)
    with pytest.raises(TypeError, match=r"WeightMatching aligns single dictionaries of parameters, not a tuple"):
        rg.align(pair, pair, symmetry, method=WeightMatching())  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"GaussianMatching aligns tuples of 2 dictionaries .*, not a dict"):
        rg.align(mean, mean, symmetry, method=GaussianMatching())  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"not a tuple of 3"):
        rg.align((mean, std, std), (mean, std, std), symmetry, method=GaussianMatching())
    wrong = {**std, "0.weight": torch.full_like(std["0.weight"], -1.0)}
    with pytest.raises(ValueError, match=r"'0.weight' of the second posterior holds 6 negative numbers"):
        rg.align(pair, (mean, wrong), symmetry, method=GaussianMatching())
    certain = {**std, "0.weight": torch.zeros_like(std["0.weight"])}
    missing = {name: tensor for name, tensor in std.items() if name != "0.weight"}
    for one in (certain, missing):
        assert rg.align((mean, one), (mean, one), symmetry, method=GaussianMatching()).is_converged
        with pytest.raises(ValueError, match=r"'0.weight' of the first posterior has no positive standard deviation"):
            rg.align((mean, one), (mean, one), symmetry, method=GaussianMatching(cost="kl"))
    negative = {**std, "0.weight": -std["0.weight"]}
    with pytest.raises(ValueError, match=r"of the first network holds 6 negative numbers"):
        rg.align((mean, negative), pair, symmetry, method=JointMatching(("parameters", "magnitudes")))
    nan = {**std, "0.weight": std["0.weight"] * float("nan")}
    with pytest.raises(
        ValueError, match=r"'0.weight' of entry 1 of the stack of the first network holds NaN or Inf in 6 of 6 entries"
    ):
        rg.align((mean, nan), pair, symmetry, method=GaussianMatching())
    other = {**std, "fc": torch.ones(2)}
    with pytest.raises(ValueError, match=r"'fc' has shape \(2,\) in entry 1 .* no tensor of this name"):
        rg.align((mean, other), (mean, other), symmetry, method=GaussianMatching())
    with pytest.raises(ValueError, match="cost is 'tv'; choose 'wasserstein', 'mean', 'kl' or 'symmetric kl'"):
        GaussianMatching(cost="tv")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"std_weight is -1.0; it must not be negative"):
        GaussianMatching(std_weight=-1.0)
    with pytest.raises(ValueError, match=r"std_weight=2.0 belongs to the Wasserstein cost; 'kl' has no weights"):
        GaussianMatching(cost="kl", std_weight=2.0)
    with pytest.raises(ValueError, match="cost='kl' cannot align many posteriors to their mean"):
        rg.align_many([pair, pair], symmetry, method=GaussianMatching(cost="kl"))
    assert rg.align(pair, pair, symmetry, method=GaussianMatching(method=MergeMany())).is_converged
    with pytest.raises(TypeError, match=r"MergeMany aligns single dictionaries of parameters, not a tuple"):
        rg.align_many([pair, pair], symmetry)  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"GaussianMatching aligns tuples of 2 dictionaries .*, not a dict"):
        rg.align_many([mean, mean], symmetry, method=GaussianMatching())  # type: ignore[type-var]
    with pytest.raises(ValueError, match=r"'0.weight' of the third posterior holds 6 negative numbers"):
        rg.align_many([pair, pair, (mean, wrong)], symmetry, method=GaussianMatching())
    with pytest.raises(ValueError, match="give 'parameters' for the first dictionary"):
        JointMatching(("magnitudes",))
    with pytest.raises(ValueError, match="2 roles need as many weights, not 1"):
        JointMatching(("parameters", "parameters"), weights=(1.0,))
    with pytest.raises(ValueError, match="they must not be negative, and one must be positive"):
        JointMatching(("parameters", "parameters"), weights=(0.0, 0.0))

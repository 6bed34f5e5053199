"""Transport between posteriors: distances and geodesics compared with closed forms, and mixtures sample by sample."""

import itertools
from dataclasses import replace

import pytest
import torch
from posterior_cases import (
    KINDS,
    NETS,
    dense,
    each_kind,
    each_pair,
    flat,
    gaussian,
    generator,
    is_close,
    kronecker,
    low_rank,
    network,
    normal,
    particles,
    uncertain,
)
from torch import Tensor

from regauge.bayes.posteriors.gaussian import GaussianPosterior, Posterior
from regauge.bayes.posteriors.kronecker import KroneckerPosterior, KroneckerTerm
from regauge.bayes.posteriors.low_rank import LowRankPosterior
from regauge.bayes.posteriors.particles import ParticlePosterior
from regauge.bayes.transport.posterior_mixtures import MixturePosterior, mixture
from regauge.bayes.transport.wasserstein import distance, geodesic
from regauge.core.element import PARTS

GAUSSIAN = [kind for kind in KINDS if kind != "particles"]
STRAIGHT = [kind for kind in GAUSSIAN if kind != "low rank"]
"""Kinds whose paths are geodesics. The remaining kind does not mix its two components."""
ONE_COPY = ("permutation", "sign", "shift")


def symmetric_root(matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values.clamp(min=0).sqrt()) @ vectors.mT


def covariance(posterior: Posterior, name: str) -> tuple[Tensor, Tensor]:
    mean, root = dense(posterior, uncertain(name))
    return mean, root @ root.mT


def closed_form(a: Posterior, b: Posterior, name: str) -> tuple[float, float]:
    """Return the two terms of the first line of equation 16."""
    (mean_a, cov_a), (mean_b, cov_b) = covariance(a, name), covariance(b, name)
    root = symmetric_root(cov_a)
    spread = (cov_a + cov_b - 2 * symmetric_root(root @ cov_b @ root)).trace()
    return float((mean_a - mean_b).square().sum()), float(spread)


def w2(a: Posterior, b: Posterior, name: str) -> float:
    return distance(a, b, skip=network(name)[2].buffers).total


@pytest.mark.parametrize("name", ["tanh", "batch norm"])
@pytest.mark.parametrize("kind", GAUSSIAN)
def test_distances_are_those_of_full_covariances(name: str, kind: str) -> None:
    a, b = KINDS[kind](name, 1), KINDS[kind](name, 50)
    found = distance(a, b, skip=network(name)[2].buffers)
    mean, spread = closed_form(a, b, name)
    assert found.mean == pytest.approx(mean)
    assert found.spread == pytest.approx(spread, abs=1e-6)
    assert found.total == found.mean + found.spread
    assert found.spread > 0.1


@each_pair(0, 2)
def test_distances_are_distances(name: str, kind: str) -> None:
    a, b, c = (KINDS[kind](name, seed) for seed in (1, 50, 99))
    assert w2(a, a, name) == pytest.approx(0, abs=1e-9)
    assert w2(a, b, name) == pytest.approx(w2(b, a, name))
    assert w2(a, c, name) ** 0.5 <= w2(a, b, name) ** 0.5 + w2(b, c, name) ** 0.5


@each_pair(1, 2)
def test_distances_do_not_change_when_both_move(name: str, kind: str) -> None:
    _, _, symmetry = network(name)
    a, b = KINDS[kind](name, 1), KINDS[kind](name, 50)
    for seed in range(3):
        g = symmetry.random(generator(seed), ONE_COPY)
        moved = w2(a.push(symmetry, g), b.push(symmetry, g), name)
        assert moved == pytest.approx(w2(a, b, name))
        assert w2(a, b.push(symmetry, g), name) != pytest.approx(w2(a, b, name), rel=1e-6)


def test_the_second_line_of_equation_16_is_wrong_and_equation_17_is_right() -> None:
    a, b = gaussian("tanh", 1), gaussian("tanh", 50)
    (_, cov_a), (_, cov_b) = covariance(a, "tanh"), covariance(b, "tanh")
    assert torch.allclose(cov_a @ cov_b, cov_b @ cov_a, atol=1e-14)
    _, exact = closed_form(a, b, "tanh")
    printed = float((cov_a - cov_b).square().sum())
    with_roots = float((symmetric_root(cov_a) - symmetric_root(cov_b)).square().sum())
    of_deviations = sum(float((a.std[n] - b.std[n]).square().sum()) for n in a.std)
    assert with_roots == pytest.approx(exact)
    assert of_deviations == pytest.approx(exact)
    assert printed < 0.5 * exact


@pytest.mark.parametrize("t", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("kind", ["gaussian", "kronecker"])
def test_points_of_geodesics_have_the_covariance_of_equation_7(kind: str, t: float) -> None:
    """The equation is corrected: its right side lacks indices, and the indices 0 and 1 replace 1 and 2."""
    a, b = KINDS[kind]("tanh", 1), KINDS[kind]("tanh", 50)
    (mean_a, cov_a), (mean_b, cov_b) = covariance(a, "tanh"), covariance(b, "tanh")
    mean, cov = covariance(geodesic(a, b).at(t), "tanh")
    root = symmetric_root(cov_a)
    inner = (1 - t) * cov_a + t * symmetric_root(root @ cov_b @ root)
    expected = torch.linalg.inv(root) @ inner @ inner @ torch.linalg.inv(root)
    assert torch.allclose(mean, (1 - t) * mean_a + t * mean_b)
    assert torch.allclose(cov, expected, atol=1e-7)


def test_the_map_between_kronecker_gaussians_is_a_product_of_maps_and_the_middle_is_none() -> None:
    a, b = kronecker("tanh", 1), kronecker("tanh", 50)
    path = geodesic(a, b)
    assert isinstance(path.last, KroneckerPosterior)
    roots = zip(*(q.terms["2.weight"][0] for q in (a, path.last, b)), strict=True)
    for first, last, target in roots:
        mapping = last @ torch.linalg.inv(first)
        assert torch.allclose(mapping, mapping.mT, atol=1e-8)
        assert float(torch.linalg.eigvalsh((mapping + mapping.mT) / 2)[0]) > 0
        assert torch.allclose(mapping @ first @ first.mT @ mapping, target @ target.mT)
    _, root = dense(path.at(0.5), ["2.weight"])
    blocks = (root @ root.mT).view(4, 5, 4, 5).transpose(1, 2).reshape(16, 25)
    singular = torch.linalg.svdvals(blocks)
    assert singular[1] > 0.01 * singular[0]
    _, root = dense(a, ["2.weight"])
    assert torch.linalg.matrix_rank((root @ root.mT).view(4, 5, 4, 5).transpose(1, 2).reshape(16, 25)) == 1


@each_kind
@pytest.mark.parametrize("name", ["sine", "batch norm"])
def test_geodesics_end_where_they_should(name: str, kind: str) -> None:
    a, b = KINDS[kind](name, 1), KINDS[kind](name, 50)
    path = geodesic(a, b)
    noise = a.draw(4, generator(0))
    assert is_close(path.at(0).at(noise), a.at(noise), atol=0)
    assert w2(path.at(1), b, name) == pytest.approx(0, abs=1e-9)
    assert is_close(path.at(1).moments().mean, b.moments().mean, atol=1e-12)
    assert is_close(path.at(1).moments().std, b.moments().std)
    if kind != "particles":
        assert all(torch.equal(path.at(1).mean[n], b.mean[n]) for n in b.mean)  # type: ignore[attr-defined]
    if kind == "gaussian":
        assert path.at(0) is a
        assert path.at(1) is b


@each_kind
def test_samples_move_along_straight_lines_at_the_expense_of_the_distance(kind: str) -> None:
    a, b = KINDS[kind]("tanh", 1), KINDS[kind]("tanh", 50)
    path = geodesic(a, b)
    count = 5 if kind == "particles" else 20000
    noise = a.draw(count, generator(0))
    first, middle, last = (path.at(t).at(noise) for t in (0, 0.3, 1))
    assert is_close({n: 0.7 * first[n] + 0.3 * last[n] for n in first}, middle)
    squares = sum((first[n] - last[n]).square().flatten(1).sum(1) for n in first)
    assert isinstance(squares, Tensor)
    error = 5 * float(squares.std()) / count**0.5 if kind != "particles" else 1e-9
    exact = distance(a, b).total
    if kind == "low rank":
        assert exact < float(squares.mean())
    else:
        assert float(squares.mean()) == pytest.approx(exact, abs=error)


@pytest.mark.parametrize("kind", [*STRAIGHT, "particles"])
def test_geodesics_have_constant_speed(kind: str) -> None:
    a, b = KINDS[kind]("tanh", 1), KINDS[kind]("tanh", 50)
    path = geodesic(a, b)
    whole = distance(a, b).total
    for s, t in ((0.0, 0.25), (0.25, 0.75), (0.5, 1.0)):
        x, y = path.at(s), path.at(t)
        part = distance(x, y).total if kind == "particles" else sum(closed_form(x, y, "tanh"))
        assert part == pytest.approx((t - s) ** 2 * whole, rel=1e-5)


def test_the_low_rank_path_is_longer_than_the_distance_only_where_both_parts_are_there() -> None:
    a, b = low_rank("tanh", 1), low_rank("tanh", 50)
    path = geodesic(a, b)
    middle = path.at(0.5)
    steps = sum(closed_form(a, middle, "tanh")) ** 0.5 + sum(closed_form(middle, b, "tanh")) ** 0.5
    assert steps > distance(a, b).total ** 0.5 + 1e-4
    zeros = [replace(q, deviations={n: 0 * t for n, t in q.deviations.items()}) for q in (a, b)]
    diagonal = [GaussianPosterior(q.mean, q.std) for q in (a, b)]
    assert distance(*zeros) == pytest.approx(distance(*diagonal))


def test_points_between_kronecker_posteriors_move_like_others() -> None:
    for name in NETS:
        _, _, symmetry = network(name)
        a, b = kronecker(name, 1), kronecker(name, 50)
        q = geodesic(a, b).at(0.4)
        noise = q.draw(4, generator(1))
        _, root = dense(q, uncertain(name))
        std = torch.cat([q.moments().std[n].flatten() for n in uncertain(name)])
        assert torch.allclose(root.square().sum(1).sqrt(), std)
        for seed in range(3):
            g = symmetry.random(generator(seed), PARTS)
            assert is_close(q.push(symmetry, g).at(q.push_noise(symmetry, g, noise)), symmetry.act(g, q.at(noise)))


@pytest.mark.parametrize("kind", [*STRAIGHT, "particles"])
def test_geodesics_move_with_their_ends(kind: str) -> None:
    _, _, symmetry = network("sine")
    a, b = KINDS[kind]("sine", 1), KINDS[kind]("sine", 50)
    g = symmetry.random(generator(2), ONE_COPY)
    noise = a.draw(4, generator(0))
    there = geodesic(a.push(symmetry, g), b.push(symmetry, g)).at(0.3)
    here = geodesic(a, b).at(0.3)
    assert is_close(there.at(a.push_noise(symmetry, g, noise)), symmetry.act(g, here.at(noise)))


def test_particles_are_paired_as_the_best_of_all_permutations() -> None:
    for seed in range(3):
        a, b = particles("relu", seed), particles("relu", seed + 10)
        x, y = (torch.cat([q.stack[n].flatten(1) for n in uncertain("relu")], 1) for q in (a, b))
        costs = [float((x - y[list(p)]).square().sum() / 5) for p in itertools.permutations(range(5))]
        assert distance(a, b).total == pytest.approx(min(costs))
        assert distance(a, b).mean == pytest.approx(float((x.mean(0) - y.mean(0)).square().sum()))
        shuffled = ParticlePosterior({n: t.flip(0) for n, t in a.stack.items()})
        assert distance(a, shuffled).total == pytest.approx(0, abs=1e-12)


def test_buffers_do_not_count_if_they_are_named() -> None:
    for kind in ("gaussian", "particles"):
        a = KINDS[kind]("batch norm", 1)
        if isinstance(a, ParticlePosterior):
            b: Posterior = replace(a, stack={**a.stack, "1.running_mean": a.stack["1.running_mean"] + 1})
            assert distance(a, b).total == 0
            bare = (ParticlePosterior(a.stack), ParticlePosterior(b.stack))  # type: ignore[attr-defined]
            assert distance(*bare).total == pytest.approx(5)
            assert distance(*bare, skip=["1.running_mean"]).total == 0
        else:
            assert isinstance(a, GaussianPosterior)
            b = GaussianPosterior({**a.mean, "1.running_mean": a.mean["1.running_mean"] + 1}, a.std)
            assert distance(a, b).total == pytest.approx(5)
            assert distance(a, b, skip=["1.running_mean"]).total == 0
            assert distance(a, b, skip=a.mean).total == 0


def test_what_does_not_count_does_not_choose_the_coupling() -> None:
    a, b = particles("batch norm", 1), particles("batch norm", 50)
    far = {name: 1e4 * normal(3, 5, 5) for name in ("1.running_mean", "1.running_var")}
    c, d = replace(a, stack={**a.stack, **far}), replace(b, stack={**b.stack, **far})
    assert distance(c, d) == distance(a, b)
    assert distance(ParticlePosterior(c.stack), ParticlePosterior(d.stack), skip=far) == distance(a, b)
    assert distance(ParticlePosterior(c.stack), ParticlePosterior(d.stack)) != distance(a, b)
    x, y = flat("tanh", 1), flat("tanh", 50)
    rows = {"2.weight": 100 * x.deviations["2.weight"]}
    z = replace(y, deviations={**y.deviations, **rows})
    assert distance(x, z, skip=["2.weight"]) == distance(x, y, skip=["2.weight"])
    assert distance(x, z) != distance(x, y)


def test_what_one_posterior_is_certain_of_has_no_width_there() -> None:
    a, b = gaussian("tanh", 1), gaussian("tanh", 50)
    few = GaussianPosterior(a.mean, {"0.bias": a.std["0.bias"]})
    zeros = {n: a.std[n] if n == "0.bias" else torch.zeros_like(t) for n, t in a.std.items()}
    assert distance(few, b) == distance(GaussianPosterior(a.mean, zeros), b)
    middle = geodesic(few, b).at(0.5)
    assert is_close(middle.moments().std, {n: (zeros[n] + t) / 2 for n, t in b.std.items()})
    thin, wide = flat("tanh", 1), low_rank("tanh", 50)
    thin = LowRankPosterior(thin.mean, {}, {"0.bias": thin.deviations["0.bias"][:1]})
    path = geodesic(thin, wide)
    noise = path.at(0.5).draw(3, generator(0))
    assert w2(path.at(0), thin, "tanh") == pytest.approx(0, abs=1e-6)
    assert w2(path.at(1), wide, "tanh") == pytest.approx(0, abs=1e-6)
    both = zip(path.at(0).at(noise).values(), path.at(1).at(noise).values(), strict=True)
    assert all(torch.allclose((x + y) / 2, z) for (x, y), z in zip(both, path.at(0.5).at(noise).values(), strict=True))


def test_roots_of_other_ranks_can_be_coupled() -> None:
    a, b = kronecker("tanh", 1, columns=2), kronecker("tanh", 50)
    mean, spread = closed_form(a, b, "tanh")
    assert distance(a, b) == pytest.approx((mean, spread))
    assert w2(geodesic(a, b).at(1), b, "tanh") == pytest.approx(0, abs=1e-9)
    assert w2(geodesic(b, a).at(1), a, "tanh") == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(
    ("kind", "other"), [("gaussian", "gaussian"), ("kronecker", "particles"), ("low rank", "kronecker")]
)
def test_mixtures_take_their_shares_from_both(kind: str, other: str) -> None:
    _, _, symmetry = network("sine")
    a, b = KINDS[kind]("sine", 1), KINDS[other]("sine", 50)
    path = mixture(a, b)
    noise = path.at(0.5).draw(8, generator(0))
    both = [q.at({name[2:]: t for name, t in noise.items() if name.startswith(k)}) for q, k in ((a, "0/"), (b, "1/"))]
    before = torch.zeros(8, dtype=torch.bool)
    for t, count in ((0.0, 0), (0.05, 0), (0.25, 2), (0.3, 2), (0.5, 4), (0.99, 8), (1.0, 8)):
        samples = path.at(t).at(noise)
        is_last = (samples["0.bias"] == both[1]["0.bias"]).all(1)
        assert int(is_last.sum()) == count
        assert bool((before <= is_last).all())
        before = is_last
        chosen = {n: torch.where(is_last.view(-1, *[1] * (x.ndim - 1)), both[1][n], x) for n, x in both[0].items()}
        assert all(torch.allclose(samples[n], chosen[n]) for n in samples)
    q = path.at(0.4)
    for seed in range(3):
        g = symmetry.random(generator(seed))
        assert is_close(q.push(symmetry, g).at(q.push_noise(symmetry, g, noise)), symmetry.act(g, q.at(noise)))


def test_mixtures_have_the_moments_of_their_samples() -> None:
    a, b = gaussian("tanh", 1), kronecker("tanh", 50)
    q = mixture(a, b).at(0.3)
    samples = q.at(q.draw(20000, generator(0)))
    mean, std = q.moments()
    for name in uncertain("tanh"):
        assert torch.allclose((samples[name].mean(0) - mean[name]) / std[name], torch.zeros(()).double(), atol=0.04)
        assert torch.allclose(samples[name].std(0) / std[name], torch.ones(()).double(), atol=0.04)
    a, c = gaussian("batch norm", 1), gaussian("batch norm", 50)
    for share, likelier in ((0.3, a), (0.7, c)):
        found = mixture(a, c).at(share).moments().mean
        assert all(torch.equal(found[name], likelier.mean[name]) for name in network("batch norm")[2].buffers)
    a = gaussian("tanh", 1)
    assert is_close(mixture(a, b).at(0).moments().std, a.std)
    assert is_close(mixture(a, b).at(1).moments().mean, b.mean)


def test_what_cannot_be_compared_is_refused() -> None:
    a = gaussian("tanh", 1)
    both = itertools.permutations([a, kronecker("tanh", 1), low_rank("tanh", 1), particles("tanh", 1)], 2)
    mixed = MixturePosterior(a, a, 0.5)
    for x, y in [*both, (mixed, mixed)]:
        for function in (distance, geodesic):
            with pytest.raises(ValueError, match="two posteriors of one kind"):
                function(x, y)
    q = particles("tanh", 1)
    fewer = ParticlePosterior({name: t[:4] for name, t in q.stack.items()})
    with pytest.raises(ValueError, match="5 particles cannot be paired with 4"):
        distance(q, fewer)
    one, other = kronecker("tanh", 1), kronecker("tanh", 2)
    with pytest.raises(ValueError, match="not a Kronecker product"):
        distance(one, geodesic(one, other).at(0.5))
    fewer_terms = KroneckerPosterior(one.mean, {"2.weight": one.terms["2.weight"]}, one.std)
    with pytest.raises(ValueError, match="in only one posterior"):
        geodesic(one, fewer_terms)
    for drawn in KINDS.values():
        with pytest.raises(ValueError, match="architecture"):
            distance(drawn("tanh", 1), drawn("batch norm", 1))
    mixed = mixture(a, gaussian("batch norm", 1)).at(0.5)
    noise = mixed.draw(4, generator(0))
    with pytest.raises(ValueError, match="architecture"):
        mixed.at(noise)
    for t in (-0.1, 1.1, float("nan")):
        for path_of in (geodesic, mixture):
            with pytest.raises(ValueError, match="must be from 0"):
                path_of(a, a).at(t)
    wide = {"w": normal(0, 50, 50)}
    large = LowRankPosterior(wide, {"w": torch.ones(50, 50).double()}, {"w": normal(1, 2, 50, 50)})
    with pytest.raises(ValueError, match="full covariances of 2500 parameters"):
        distance(large, large)
    alone = replace(large, std={})
    assert distance(alone, alone).total == pytest.approx(0, abs=1e-9)


def test_equal_posteriors_have_distance_zero_in_single_precision() -> None:
    mean = {"w": torch.randn(30, 20, generator=generator(0))}
    q = KroneckerPosterior(
        mean, {"w": (KroneckerTerm(torch.randn(30, 30, generator=generator(1)), torch.eye(20)),)}, {}
    )
    assert distance(q, q).total < 1e-9

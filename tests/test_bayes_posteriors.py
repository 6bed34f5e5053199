"""Posteriors as values: sampling, moments and transformations obey the same laws for every kind."""

import itertools
import math

import pytest
import torch
from posterior_cases import (
    GAUSSIAN,
    KINDS,
    dense,
    each_kind,
    each_pair,
    factor,
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
from torch import nn
from torch.func import functional_call, vmap

import regauge as rg
from regauge import Params, Symmetry
from regauge.bayes.importers.gaussians import from_swag
from regauge.bayes.posteriors.gaussian import GaussianPosterior, Noise, Posterior
from regauge.bayes.posteriors.kronecker import KroneckerPosterior, KroneckerTerm
from regauge.bayes.posteriors.low_rank import LowRankPosterior
from regauge.bayes.posteriors.particles import ParticlePosterior
from regauge.core.element import PARTS


@each_pair(0)
def test_pushing_commutes_with_sampling(name: str, kind: str) -> None:
    _, _, symmetry = network(name)
    q = KINDS[kind](name, 1)
    noise = q.draw(7, generator(2))
    samples = q.at(noise)
    for seed in range(5):
        g = symmetry.random(generator(seed), PARTS)
        assert is_close(q.push(symmetry, g).at(q.push_noise(symmetry, g, noise)), symmetry.act(g, samples))
    assert not is_close(q.at(noise), symmetry.act(g, samples))


@each_pair(1)
def test_pushing_is_an_action(name: str, kind: str) -> None:
    _, _, symmetry = network(name)
    q = KINDS[kind](name, 1)
    noise = q.draw(4, generator(2))
    assert is_close(q.push(symmetry, symmetry.identity()).at(noise), q.at(noise), atol=0)
    assert is_close(q.push_noise(symmetry, symmetry.identity(), noise), noise, atol=0)
    g, h = symmetry.random(generator(3), PARTS), symmetry.random(generator(4), PARTS)
    once, twice = q.push(symmetry, symmetry.compose(h, g)), q.push(symmetry, g).push(symmetry, h)
    assert is_close(once.at(noise), twice.at(noise))
    moved = q.push(symmetry, g).push_noise(symmetry, h, q.push_noise(symmetry, g, noise))
    assert is_close(q.push_noise(symmetry, symmetry.compose(h, g), noise), moved, atol=0)


@each_pair(2)
def test_the_predictive_law_does_not_change(name: str, kind: str) -> None:
    module, inputs, symmetry = network(name)
    q = KINDS[kind](name, 1)
    noise = q.draw(4, generator(2))
    g = symmetry.random(generator(3), PARTS)
    moved = q.push(symmetry, g).at(q.push_noise(symmetry, g, noise))
    run = vmap(lambda params: functional_call(module, params, (inputs,)))
    assert torch.allclose(run(q.at(noise)), run(moved), atol=1e-9)


@each_pair(1)
def test_samples_have_the_moments(name: str, kind: str) -> None:
    q = KINDS[kind](name, 1)
    count = 5 if kind == "particles" else 4000
    samples = q.at(q.draw(count, generator(0)))
    mean, std = q.moments()
    assert mean.keys() == samples.keys()
    assert std.keys() <= set(uncertain(name))
    for key, tensor in samples.items():
        assert tensor.shape == (count, *mean[key].shape)
        assert tensor.dtype == mean[key].dtype
        if kind == "particles":
            assert torch.allclose(tensor.double().mean(0), mean[key].double())
            assert key not in std or torch.allclose(tensor.std(0, correction=0), std[key])
        elif key in std:
            assert torch.allclose(
                (tensor.mean(0) - mean[key]) / std[key], torch.zeros(()).double(), atol=5 / count**0.5
            )
            assert torch.allclose(tensor.std(0) / std[key], torch.ones(()).double(), atol=5 / (2 * count) ** 0.5)
        else:
            assert torch.equal(tensor, mean[key].expand_as(tensor))


@pytest.mark.parametrize("kind", GAUSSIAN)
def test_moments_are_the_diagonal_of_the_covariance(kind: str) -> None:
    q = KINDS[kind]("filter response", 1)
    names = uncertain("filter response")
    mean, root = dense(q, names)
    expected, std = q.moments()
    variance = torch.cat([std.get(n, torch.zeros_like(expected[n])).flatten() for n in names]).square()
    assert torch.allclose(mean, torch.cat([expected[n].flatten() for n in names]))
    assert torch.allclose(root.square().sum(1), variance)


@each_kind
def test_one_seed_gives_one_sample_in_the_dtype_of_the_network(kind: str) -> None:
    q = KINDS[kind]("tanh", 1)
    a, b, other = (q.at(q.draw(3, generator(seed))) for seed in (5, 5, 6))
    assert is_close(a, b, atol=0)
    assert not is_close(a, other)
    assert all(tensor.dtype == torch.float64 for tensor in a.values())
    single = {name: tensor.float() for name, tensor in a.items()}
    samples = ParticlePosterior(single)
    assert all(
        t.dtype == torch.float32
        for t in (*samples.at(samples.draw(9, generator(0))).values(), *samples.moments().std.values())
    )


def test_single_precision_is_kept() -> None:
    mean = {"w": torch.ones(3, 2), "b": torch.ones(3)}
    std = {"b": torch.ones(3)}
    kfac = KroneckerPosterior.from_kfac(
        mean, {"w": (factor(0, 3), factor(1, 2))}, examples=10, prior_precision=1, std=std
    )
    swag = from_swag(mean, {"b": std["b"] + 1}, {name: torch.ones(2, *t.shape) for name, t in mean.items()})
    for q in (kfac, swag, GaussianPosterior(mean, std)):
        noise = q.draw(2, generator(0))
        assert all(
            t.dtype == torch.float32 for t in (*noise.values(), *q.at(noise).values(), *q.moments().std.values())
        )


def test_every_particle_comes_once_before_any_comes_twice() -> None:
    q = particles("relu", 1)
    for count in (0, 3, 5, 12):
        chosen = next(iter(q.draw(count, generator(count)).values())).tolist()
        assert len(chosen) == count
        for start in range(0, count, 5):
            assert len(set(chosen[start : start + 5])) == len(chosen[start : start + 5])
    orders = {tuple(next(iter(q.draw(5, generator(seed)).values())).tolist()) for seed in range(10)}
    assert len(orders) > 1


def test_each_particle_can_have_its_own_element() -> None:
    _, _, symmetry = network("tanh")
    q = particles("tanh", 1)
    g = symmetry.random(generator(0), batch=(5,))
    moved = q.push(symmetry, g)
    for k in range(5):
        alone = symmetry.act(g.item(k), {name: t[k] for name, t in q.stack.items()})
        assert is_close({name: t[k] for name, t in moved.stack.items()}, alone)


def linear_network() -> tuple[Symmetry, Params]:
    module = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 2, bias=False)).double()
    symmetry = rg.discover(module, (torch.randn(5, 3, dtype=torch.float64),))
    assert [group.kind for group in symmetry.groups] == ["linear"]
    return symmetry, {name: t.detach() for name, t in module.state_dict().items()}


def test_what_is_not_diagonal_can_be_rotated() -> None:
    symmetry, mean = linear_network()
    terms = {n: (KroneckerTerm(normal(1, *t.shape), normal(2, t.shape[1], t.shape[1])),) for n, t in mean.items()}
    rows = {name: normal(3, 3, *tensor.shape) for name, tensor in mean.items()}
    posteriors: list[Posterior] = [
        KroneckerPosterior(mean, terms, {}),
        LowRankPosterior(mean, {}, rows),
        ParticlePosterior(rows),
    ]
    for q, seed in itertools.product(posteriors, range(3)):
        g = symmetry.random(generator(seed))
        noise = q.draw(4, generator(5))
        assert is_close(q.push(symmetry, g).at(q.push_noise(symmetry, g, noise)), symmetry.act(g, q.at(noise)))


def test_what_is_diagonal_cannot_be_rotated() -> None:
    symmetry, mean = linear_network()
    std = {"1.weight": torch.ones_like(mean["1.weight"])}
    terms = {"0.weight": (KroneckerTerm(normal(1, 4, 4), normal(2, 3, 3)),)}
    posteriors: list[Posterior] = [
        GaussianPosterior(mean, std),
        KroneckerPosterior(mean, terms, std),
        LowRankPosterior(mean, std, {name: t[None] for name, t in mean.items()}),
    ]
    for q in posteriors:
        with pytest.raises(ValueError, match="not diagonal"):
            q.push(symmetry, symmetry.random(generator(0)))
        assert is_close(q.push(symmetry, symmetry.identity()).moments().std, q.moments().std)


def test_hand_written_symmetries_learn_their_sizes_from_the_mean() -> None:
    symmetry = Symmetry.from_axes(
        {"0.weight": ("a", None), "0.bias": ("a",), "2.weight": ("b", "a"), "2.bias": ("b",), "4.weight": (None, "b")},
        kinds={"b": "signed"},
    )
    _, std = gaussian("tanh", 1)
    few = {name: tensor for name, tensor in std.items() if name.startswith("4")}
    q = low_rank("tanh", 1)
    posteriors: list[Posterior] = [
        GaussianPosterior(q.mean, few),
        kronecker("tanh", 1),
        LowRankPosterior(q.mean, few, {name: t for name, t in q.deviations.items() if name.startswith("2")}),
        particles("tanh", 1),
    ]
    for one, seed in itertools.product(posteriors, range(3)):
        g = symmetry.random(generator(seed))
        noise = one.draw(3, generator(7))
        assert is_close(one.push(symmetry, g).at(one.push_noise(symmetry, g, noise)), symmetry.act(g, one.at(noise)))


def test_shifts_move_means_and_not_deviations() -> None:
    places = (
        rg.Placement("first", 0, sign=(1,), parity=(0,), shift=(math.pi,)),
        rg.Placement("second", 1, sign=(1,), parity=(1,), shift=(0.0,)),
    )
    group = rg.Group("h", 4, places, signs=1, shifts=1)
    symmetry = Symmetry((group,), {"first": (4, 3), "second": (2, 4)})
    mean = {"first": normal(0, 4, 3), "second": normal(1, 2, 4)}
    terms = {n: (KroneckerTerm(normal(2, len(t), len(t)), normal(3, t.shape[1], 2)),) for n, t in mean.items()}
    posteriors: list[Posterior] = [
        KroneckerPosterior(mean, terms, {}),
        LowRankPosterior(mean, {}, {n: normal(4, 2, *t.shape) for n, t in mean.items()}),
    ]
    for q, seed in itertools.product(posteriors, range(3)):
        g, noise = symmetry.random(generator(seed)), q.draw(4, generator(5))
        assert is_close(q.push(symmetry, g).at(q.push_noise(symmetry, g, noise)), symmetry.act(g, q.at(noise)))


def test_rows_in_memory_order_have_the_kronecker_covariance() -> None:
    q = kronecker("filter response", 1)
    rows, columns = q.terms["2.weight"][0]
    _, root = dense(q, ["2.weight"])
    assert torch.allclose(root @ root.mT, torch.kron(rows @ rows.mT, columns @ columns.mT))


def test_curvature_with_a_prior_gives_the_damped_factors() -> None:
    mean = {"w": normal(0, 3, 4)}
    g, a = factor(1, 3), 5 * factor(2, 4)
    count, prior = 50.0, 2.0
    q = KroneckerPosterior.from_kfac(mean, {"w": (g, a)}, examples=count, prior_precision=prior)
    _, root = dense(q, ["w"])
    pi = math.sqrt((a.trace() / 4) / (g.trace() / 3))
    c = math.sqrt(prior / count)
    damped = count * torch.kron(g + c / pi * torch.eye(3), a + c * pi * torch.eye(4))
    assert torch.allclose(root @ root.mT, torch.linalg.inv(damped))
    exact = count * torch.kron(g, a) + prior * torch.eye(12)
    assert float(torch.linalg.eigvalsh(damped - exact)[0]) > 0
    nothing = {"w": (torch.zeros(3, 3), a)}
    _, root = dense(KroneckerPosterior.from_kfac(mean, nothing, examples=count, prior_precision=prior), ["w"])
    assert torch.allclose(root @ root.mT, torch.linalg.inv(count * torch.kron(c * torch.eye(3), a + c * torch.eye(4))))


def test_swag_has_half_its_diagonal_and_half_the_covariance_of_its_deviations() -> None:
    mean = {"w": normal(0, 3, 2), "b": normal(1, 3)}
    variance = {name: normal(2, *t.shape).square() for name, t in mean.items()}
    columns = {name: normal(3, 4, *t.shape) for name, t in mean.items()}
    _, root = dense(from_swag(mean, {n: v + mean[n].square() for n, v in variance.items()}, columns), ["w", "b"])
    diagonal = torch.cat([variance["w"].flatten(), variance["b"]])
    d = torch.cat([columns["w"].flatten(1), columns["b"]], 1)
    assert torch.allclose(root @ root.mT, torch.diag(diagonal) / 2 + d.mT @ d / (2 * 3))


def test_groups_that_differ_between_columns_leave_no_kronecker_product() -> None:
    module = nn.Sequential(
        nn.Conv2d(2, 4, 1), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 4, 1, groups=2), nn.Tanh(), nn.Conv2d(4, 2, 1)
    ).double()
    symmetry = rg.discover(module, (torch.randn(2, 2, 3, 3, dtype=torch.float64),))
    mean = {name: t.detach() for name, t in module.state_dict().items()}
    crossed = [
        name
        for name, sites in symmetry.sites.items()
        if any(axis is not None and axis != site.placement.axis for site in sites for axis, _ in site.bases)
    ]
    assert crossed == ["3.weight"]
    terms = {
        n: (KroneckerTerm(normal(1, len(t), len(t)), normal(2, t[0].numel(), t[0].numel())),)
        for n, t in mean.items()
        if t.ndim > 1
    }
    with pytest.raises(ValueError, match="no Kronecker factors"):
        KroneckerPosterior(mean, terms, {}).push(symmetry, symmetry.random(generator(0)))
    std = {"3.weight": torch.ones_like(mean["3.weight"])}
    q = KroneckerPosterior(mean, {n: t for n, t in terms.items() if n not in crossed}, std)
    g, noise = symmetry.random(generator(0)), q.draw(3, generator(1))
    assert is_close(q.push(symmetry, g).at(q.push_noise(symmetry, g, noise)), symmetry.act(g, q.at(noise)))


def test_bad_input_is_refused() -> None:
    mean = {"w": torch.ones(3, 2), "b": torch.ones(3)}
    good = (torch.eye(3), torch.eye(2))
    fits = {"w": (KroneckerTerm(*good),)}
    with pytest.raises(ValueError, match="give one of the two"):
        KroneckerPosterior(mean, fits, {"w": torch.ones(3, 2)})
    with pytest.raises(ValueError, match="no weight has Kronecker factors"):
        KroneckerPosterior(mean, {}, {"b": torch.ones(3)})
    for name, terms in (
        ("w", (KroneckerTerm(torch.eye(2), torch.eye(3)),)),
        ("w", (KroneckerTerm(*good), KroneckerTerm(torch.ones(3, 1), torch.eye(2)))),
        ("b", (KroneckerTerm(torch.eye(3), torch.eye(1)),)),
    ):
        with pytest.raises(ValueError, match="the roots of the factors of"):
            KroneckerPosterior(mean, {name: terms}, {})
    for factors, message in (
        ((torch.eye(3), torch.tensor([[1.0, 2.0], [0.0, 1.0]])), "not a symmetric matrix"),
        ((-torch.eye(3), torch.eye(2)), "has the eigenvalue -1"),
    ):
        with pytest.raises(ValueError, match=message):
            KroneckerPosterior.from_kfac(mean, {"w": factors}, examples=1, prior_precision=1)
    for examples, precision in ((0, 1), (1, 0), (1, float("nan"))):
        with pytest.raises(ValueError, match="both must be positive"):
            KroneckerPosterior.from_kfac(mean, {"w": good}, examples=examples, prior_precision=precision)
    for rows in ({}, {"w": torch.ones(2, 3, 2), "b": torch.ones(1, 3)}):
        with pytest.raises(ValueError, match="the same leading axis"):
            LowRankPosterior(mean, {}, rows)
    with pytest.raises(ValueError, match="at least two of them"):
        from_swag(mean, {}, {"b": torch.ones(1, 3)})
    with pytest.raises(ValueError, match="below the squares"):
        from_swag(mean, {"b": -torch.ones(3)}, {"b": torch.ones(2, 3)})
    for stack in ({}, {"w": torch.ones(2, 2), "b": torch.ones(3)}, {"n": torch.tensor(3)}):
        with pytest.raises(ValueError, match="over the same particles"):
            ParticlePosterior(stack)
    with pytest.raises(ValueError, match="at least two"):
        ParticlePosterior({"b": torch.ones(1, 3)}).moments()


def test_nothing_that_is_given_is_written_to() -> None:
    _, _, symmetry = network("sine")
    for kind in KINDS:
        q = KINDS[kind]("sine", 1)
        noise: Noise = q.draw(3, generator(0))
        before = {name: t.clone() for name, t in noise.items()}
        first = q.at(noise)
        q.push(symmetry, symmetry.random(generator(0)))
        q.push_noise(symmetry, symmetry.random(generator(0)), noise)
        assert is_close(noise, before, atol=0)
        assert is_close(q.at(noise), first, atol=0)
        assert isinstance(q, Posterior)


def test_samples_do_not_depend_on_the_order_of_names() -> None:
    mean = {"b": torch.zeros(2), "a": torch.zeros(3)}
    std = {name: torch.ones_like(tensor) for name, tensor in mean.items()}
    first = GaussianPosterior(mean, std)
    second = GaussianPosterior(dict(sorted(mean.items())), dict(sorted(std.items())))
    noises = [q.draw(4, torch.Generator().manual_seed(0)) for q in (first, second)]
    assert all(torch.equal(noises[0][name], noises[1][name]) for name in mean)


@pytest.mark.parametrize("name", ["a", "unknown"])
def test_standard_deviations_that_do_not_fit_the_mean_are_named(name: str) -> None:
    q = GaussianPosterior({"a": torch.zeros(3)}, {name: torch.ones(2)})
    with pytest.raises(ValueError, match=f"standard deviations '{name}' have shape"):
        q.at(q.draw(2, torch.Generator().manual_seed(0)))

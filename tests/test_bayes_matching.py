"""Posteriors aligned as distributions: every kind obeys its laws, and many posteriors can be aligned."""

import itertools

import pytest
import torch
from posterior_cases import KINDS, NETS, each_kind, each_pair, gaussian, generator, is_close, mean_of, network

import regauge as rg
from regauge import Element, FrankWolfe, GaussianMatching, MergeMany, Symmetry, WeightMatching
from regauge.alignment.methods.gaussian_matching import GaussianCost
from regauge.bayes.matching import align_many_posteriors, align_posteriors, barycenter, one_gaussian
from regauge.bayes.posteriors.gaussian import GaussianPosterior, Posterior
from regauge.bayes.transport.wasserstein import distance
from regauge.core.element import PARTS
from regauge.nets.resnet import resnet20

ISOMETRIES = ("permutation", "sign", "shift")


@each_pair(0)
def test_the_whole_posterior_moves_and_comes_closer(name: str, kind: str) -> None:
    _, _, symmetry = network(name)
    a, b = KINDS[kind](name, 1), KINDS[kind](name, 50)
    found = align_posteriors(a, b, symmetry)
    noise = b.draw(5, generator(3))
    there = found.posterior.at(b.push_noise(symmetry, found.element, noise))
    assert is_close(there, symmetry.act(found.element, b.at(noise)))
    assert type(found.posterior) is type(b)
    assert found.before == distance(a.moments(), b.moments(), skip=symmetry.buffers)
    moments = distance(a.moments(), found.posterior.moments(), skip=symmetry.buffers)
    assert found.after.mean == pytest.approx(moments.mean)
    assert found.after.spread == pytest.approx(moments.spread)
    assert found.after.total <= found.before.total
    gained = found.matching.objective - found.matching.initial
    assert gained == pytest.approx((found.before.total - found.after.total) / 2, abs=1e-9)
    assert f"{found.before.total:.6g} -> {found.after.total:.6g}" in str(found)


@each_pair(1)
def test_a_copy_of_a_posterior_is_brought_back(name: str, kind: str) -> None:
    _, _, symmetry = network(name)
    q = KINDS[kind](name, 1)
    copy = q.push(symmetry, symmetry.random(generator(2), ISOMETRIES))
    found = align_posteriors(q, copy, symmetry)
    assert found.before.total > 0.1
    assert found.after.total == pytest.approx(0, abs=1e-9)
    again = distance(q, found.posterior, skip=symmetry.buffers) if kind != "low rank" else found.after
    assert again.total == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("cost", ["wasserstein", "mean", "kl", "symmetric kl"])
@each_kind
def test_every_cost_takes_every_kind(kind: str, cost: GaussianCost) -> None:
    _, _, symmetry = network("tanh")
    q = KINDS[kind]("tanh", 1)
    copy = q.push(symmetry, symmetry.random(generator(2), ISOMETRIES))
    if "kl" in cost and kind == "deviations alone":
        with pytest.raises(ValueError, match="no positive standard deviation everywhere"):
            align_posteriors(q, copy, symmetry, method=GaussianMatching(cost=cost))
        return
    matching = WeightMatching(scales="keep", restarts=20)
    found = align_posteriors(
        q, copy, symmetry, method=GaussianMatching(cost=cost, method=matching), generator=generator(0)
    )
    assert found.after.total == pytest.approx(0, abs=1e-9)


def test_posteriors_of_two_kinds_are_matched_by_their_moments() -> None:
    _, _, symmetry = network("tanh")
    kinds = {kind: make("tanh", 1) for kind, make in KINDS.items()}
    for (_, a), (_, b) in itertools.permutations(kinds.items(), 2):
        found = align_posteriors(a, b, symmetry)
        assert type(found.posterior) is type(b)
        assert found.after.total <= found.before.total


def two_modes() -> tuple[Symmetry, GaussianPosterior, GaussianPosterior]:
    """Return the Gaussians of figure A13: two Gaussians over the plane, mirror images in y = x, with means on this
    line.
    """
    symmetry = Symmetry.from_axes({"w": ("h",)})
    mean = {"w": torch.tensor([1.0, 1.0], dtype=torch.float64)}
    a = GaussianPosterior(mean, {"w": torch.tensor([0.2, 1.0], dtype=torch.float64)})
    b = GaussianPosterior(mean, {"w": torch.tensor([1.0, 0.2], dtype=torch.float64)})
    return symmetry, a, b


def test_the_toy_is_recovered_by_distributions_and_not_by_means() -> None:
    """The paper's printed divergence, a distance of means, stays constant. The actual divergence does not."""
    symmetry, a, b = two_modes()
    means = align_posteriors(a, b, symmetry, method=GaussianMatching(cost="mean"))
    assert means.element["h"].perm is not None
    assert means.element["h"].perm.tolist() == [0, 1]
    assert means.after == means.before == (0.0, pytest.approx(2 * 0.8**2))
    costs: tuple[GaussianCost, ...] = ("wasserstein", "kl", "symmetric kl")
    for cost in costs:
        found = align_posteriors(a, b, symmetry, method=GaussianMatching(cost=cost))
        assert found.after.total == 0
        assert torch.equal(found.posterior.std["w"], a.std["w"])


def test_the_divergence_and_the_distance_can_disagree() -> None:
    """A small standard deviation makes the mean of the first posterior important for the divergence. The distance
    weighs both posteriors equally.
    """
    symmetry, _, _ = two_modes()
    equal = {"w": torch.tensor([0.5, 0.5]).double()}
    a = GaussianPosterior({"w": torch.tensor([1.0, 5.0]).double()}, {"w": torch.tensor([0.1, 10.0]).double()})
    b = GaussianPosterior({"w": torch.tensor([1.0, 0.5]).double()}, equal)
    near = align_posteriors(a, b, symmetry)
    assert near.posterior.mean["w"].tolist() == [0.5, 1.0]
    assert near.after.total < near.before.total
    likely = align_posteriors(a, b, symmetry, method=GaussianMatching(cost="kl"))
    assert likely.posterior.mean["w"].tolist() == [1.0, 0.5]


# --- many --------------------------------------------------------------------------------------------------------


@each_pair(2)
def test_many_come_closer_to_their_barycenter(name: str, kind: str) -> None:
    _, _, symmetry = network(name)
    given = [KINDS[kind](name, seed) for seed in (1, 50, 90, 130)]
    found = align_many_posteriors(given, symmetry)
    assert found.posteriors[0] is given[0]
    for element, before, after in zip(found.elements, given, found.posteriors, strict=True):
        assert is_close(after.moments().mean, before.push(symmetry, element).moments().mean)
        assert is_close(after.moments().std, before.push(symmetry, element).moments().std)
    center = barycenter(found.posteriors)
    each = [distance(center, q.moments(), skip=symmetry.buffers).total for q in found.posteriors]
    assert found.after.total == pytest.approx(sum(each) / 4)
    gained = found.matching.objective - found.matching.initial
    assert found.before.total - found.after.total == pytest.approx(2 * gained / 16, abs=1e-9)
    assert gained >= 0
    assert "4 networks" in str(found)


@each_pair(0)
def test_copies_of_one_posterior_coincide(name: str, kind: str) -> None:
    _, _, symmetry = network(name)
    q = KINDS[kind](name, 1)
    copies = [q.push(symmetry, symmetry.random(generator(seed), ISOMETRIES)) for seed in range(4)]
    found = align_many_posteriors(copies, symmetry)
    assert found.before.total > 0.1
    assert found.after.total == pytest.approx(0, abs=1e-9)
    merged = one_gaussian(copies, symmetry, spread=0.5)
    assert is_close(merged.posterior.mean, copies[0].moments().mean)
    halved = {name: std / 2 for name, std in copies[0].moments().std.items()}
    assert is_close(merged.posterior.std, halved)


def test_other_methods_can_be_given() -> None:
    _, _, symmetry = network("tanh")
    given = [gaussian("tanh", seed) for seed in (1, 50, 90)]
    universe = align_many_posteriors(given, symmetry)
    many = [GaussianMatching(method=m) for m in (FrankWolfe(max_steps=5), MergeMany(restarts=2), WeightMatching())]
    for method in many:
        found = align_many_posteriors(given, symmetry, method=method, generator=generator(0))
        assert found.after.total <= found.before.total
    best = align_many_posteriors(given, symmetry, method=many[1], generator=generator(0))
    assert best.after.total <= universe.after.total + 1e-12
    first = align_many_posteriors(given, symmetry, method=many[2])
    assert is_close(first.posteriors[1].mean, align_posteriors(given[0], given[1], symmetry).posterior.mean)


def test_the_barycenter_minimizes_the_weighted_distances() -> None:
    given = [gaussian("tanh", seed) for seed in (1, 50, 90)]
    weights = [1.0, 2.0, 5.0]
    center = barycenter(given, weights)

    def cost(q: GaussianPosterior) -> float:
        return sum(w * distance(q, one).total for w, one in zip(weights, given, strict=True))

    lowest = cost(center)
    for part, seed in itertools.product(range(2), range(5)):
        noise = generator(seed)
        other = {n: t + 0.01 * torch.randn(t.shape, generator=noise, dtype=t.dtype) for n, t in center[part].items()}
        moved = GaussianPosterior(other, center.std) if part == 0 else GaussianPosterior(center.mean, other)
        assert cost(moved) > lowest
    alone = barycenter([given[0], given[1]], [0.0, 3.0])
    assert is_close(alone.mean, given[1].mean)
    assert is_close(alone.std, given[1].std)


def test_the_barycenter_of_two_is_the_middle_of_their_geodesic() -> None:
    a, b = gaussian("tanh", 1), gaussian("tanh", 50)
    middle = rg.connect.WassersteinGeodesic().at(a, b, 0.5)
    assert is_close(barycenter([a, b]).mean, middle[0])
    assert is_close(barycenter([a, b]).std, middle[1])


def test_members_become_the_gaussian_of_their_mean_and_deviation() -> None:
    for name in NETS:
        _, _, symmetry = network(name)
        members = [mean_of(name, seed) for seed in (1, 50, 90)]
        found = one_gaussian(members, symmetry, spread=2.0)
        moved = found.alignment.params  # type: ignore[union-attr]
        for key in found.posterior.std:
            stack = torch.stack([one[key] for one in moved])
            assert torch.allclose(found.posterior.mean[key], stack.mean(0))
            assert torch.allclose(found.posterior.std[key], 2 * stack.std(0, correction=0))
        assert found.posterior.std.keys() == dict(network(name)[0].named_parameters()).keys()
        assert found.posterior.mean.keys() == members[0].keys()


# --- filter response normalization -------------------------------------------------------------------------------


def test_signs_and_scales_of_filter_response_normalization_are_used() -> None:
    """A copy with other signs and scales is recovered if the match includes signs and scales, and only then."""
    module = resnet20(norm="filter", blocks=1).double()
    symmetry = rg.discover(module, (torch.randn(2, 3, 8, 8, dtype=torch.float64),))
    streams = sorted(group.signs for group in symmetry.groups)
    assert streams == [1, 1, 1, 2, 2, 2]
    assert all(group.scales == 1 for group in symmetry.groups)
    noise = generator(0)
    mean = {n: t + 0.3 * torch.randn(t.shape, generator=noise, dtype=t.dtype) for n, t in module.state_dict().items()}
    q = GaussianPosterior(
        mean, {n: 0.02 + 0.1 * torch.rand(t.shape, generator=noise).double() for n, t in mean.items()}
    )
    signed = q.push(symmetry, symmetry.random(generator(1), ISOMETRIES))
    scaled = q.push(symmetry, symmetry.random(generator(1), PARTS))
    assert align_posteriors(q, signed, symmetry).after.total == pytest.approx(0, abs=1e-9)
    balanced = GaussianMatching(method=WeightMatching())
    assert align_posteriors(q, scaled, symmetry, method=balanced).after.total == pytest.approx(0, abs=1e-6)
    assert align_posteriors(q, scaled, symmetry).after.total > 1
    permutations = Symmetry.from_axes(
        {
            name: tuple(
                next(
                    (g.name for g in symmetry.groups for p in g.placements if (p.parameter, p.axis) == (name, k)), None
                )
                for k in range(t.ndim)
            )
            for name, t in mean.items()
        }
    )
    assert align_posteriors(q, signed, permutations).after.total > 1


def test_the_scale_of_a_filter_is_found_where_nothing_is_added_to_its_power() -> None:
    """The scale is exact only for eps = 0. With 1e-6, it changes the function, and is not reported."""
    _, _, exact = network("filter response")
    assert [group.scales for group in exact.groups] == [2, 2]


# --- what is refused ---------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused() -> None:
    _, _, symmetry = network("tanh")
    q, members = gaussian("tanh", 1), [mean_of("tanh", seed) for seed in (1, 2)]
    with pytest.raises(ValueError, match="there is no posterior; give at least one"):
        barycenter([])
    with pytest.raises(ValueError, match=r"weights are \[1.0\] for 2 networks"):
        barycenter([q, q], [1.0])
    with pytest.raises(ValueError, match="different parameters"):
        barycenter([q, gaussian("batch norm", 1)])
    with pytest.raises(ValueError, match="there is no network to align"):
        align_many_posteriors([], symmetry)
    with pytest.raises(ValueError, match="no network to align"):
        one_gaussian([], symmetry)
    with pytest.raises(ValueError, match=r"spread is -1.0; it multiplies standard deviations"):
        one_gaussian(members, symmetry, spread=-1.0)
    with pytest.raises(TypeError, match=r"1 of 2 members are networks and 1 are posteriors"):
        one_gaussian([members[0], q], symmetry)  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"MergeMany aligns networks; for posteriors give GaussianMatching\(method="):
        one_gaussian([q, q], symmetry, method=MergeMany())
    with pytest.raises(ValueError, match="one particle has no standard deviations"):
        one_gaussian(members[:1], symmetry)
    assert isinstance(align_posteriors(q, q, symmetry).element, Element)
    assert isinstance(align_posteriors(q, q, symmetry).posterior, Posterior)

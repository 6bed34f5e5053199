"""Frank-Wolfe: relaxed tensors are expectations, the line search is exact, and the hard result is never worse."""

import itertools

import numpy as np
import pytest
import torch
from symmetries import BY_HAND, closeness, drawn, every_element, experts, generator, mlp_symmetry, stream
from torch import Tensor

import regauge as rg
from regauge import FrankWolfe, Params, Symmetry, WeightMatching
from regauge.alignment.mixtures import Mixture, RelaxedUniverse, Vertex, highest
from regauge.core.families import families

UNSCALED = [name for name in BY_HAND if name != "scaled"]


def relaxed(symmetry: Symmetry, networks: list[Params]) -> RelaxedUniverse:
    return RelaxedUniverse(networks, [f for f in families(symmetry.groups, symmetry.sites) if not f.fixed])


def random_vertices(symmetry: Symmetry, universe: RelaxedUniverse, seed: int) -> list[Vertex]:
    parts = ("permutation", "sign", "shift", "linear")
    elements = [symmetry.random(generator(seed + k), parts) for k in range(len(universe.mixtures))]
    return [dict.fromkeys(m.families, g) for m, g in zip(universe.mixtures, elements, strict=True)]


def objective(universe: RelaxedUniverse, names: list[str]) -> float:
    """Return the objective of relaxed tensors, pair by pair."""
    pairs = itertools.combinations(universe.mixtures, 2)
    total = sum(float((x.mean(n) * y.mean(n)).sum()) for x, y in pairs for n in names)
    return total - (len(universe.mixtures) - 1) / 2 * sum(m.excess for m in universe.mixtures)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("name", UNSCALED)
def test_the_line_is_the_exact_polynomial_of_the_objective(name: str, count: int) -> None:
    symmetry = BY_HAND[name]
    networks = [drawn(symmetry, seed) for seed in range(count)]
    universe = relaxed(symmetry, networks)
    universe.start_from_barycenter()
    universe.step(random_vertices(symmetry, universe, 5), 0.3)
    vertices = random_vertices(symmetry, universe, 50)
    line = universe.line(vertices)
    reached = 0.0
    for step in (0.0, 0.25, 0.5):  # One after the other: together they are at 1 - (1 - 0.25) (1 - 0.5).
        universe.step(vertices, step)
        reached = 1 - (1 - reached) * (1 - step)
        value = float(np.polynomial.polynomial.polyval(reached, line))
        assert objective(universe, list(networks[0])) == pytest.approx(value, abs=1e-9)
    assert reached == 0.625


@pytest.mark.parametrize(
    "line", [[1.0, 2.0, -3.0], [0.0, 1.0, 5.0], [2.0, -1.0, 0.0], [0.0, 1.0, -4.0, 4.5, -1.0], [3.0, 0.0, 0.0]]
)
def test_the_search_finds_the_highest_point(line: list[float]) -> None:
    size, value = highest(np.array(line))
    grid = np.linspace(0, 1, 2001)
    assert 0 <= size <= 1
    assert value == pytest.approx(float(np.polynomial.polynomial.polyval(size, np.array(line))))
    assert value >= float(np.polynomial.polynomial.polyval(grid, np.array(line)).max()) - 1e-12


def test_relaxed_layers_are_products_with_doubly_stochastic_matrices() -> None:
    symmetry = mlp_symmetry(4, 5, 6, 3)
    b = drawn(symmetry, 0)
    mixture = Mixture(families(symmetry.groups, symmetry.sites), b)
    mixture.start_from_barycenter()
    matrices = {"h1": torch.full((5, 5), 0.2).double(), "h2": torch.full((6, 6), 1 / 6).double()}
    for seed, size in ((1, 0.7), (2, 0.4), (3, 0.5)):
        g = symmetry.random(generator(seed))
        mixture.step(dict.fromkeys(mixture.families, g), size)
        for name, matrix in matrices.items():
            perm = g[name].perm
            assert perm is not None
            matrices[name] = (1 - size) * matrix + size * torch.eye(len(matrix)).double()[perm]
    p, q = matrices["h1"], matrices["h2"]
    expected: dict[str, Tensor] = {
        "0.weight": p @ b["0.weight"],
        "0.bias": p @ b["0.bias"],
        "1.weight": q @ b["1.weight"] @ p.T,
        "1.bias": q @ b["1.bias"],
        "2.weight": b["2.weight"] @ q.T,
        "2.bias": b["2.bias"],
    }
    for name in symmetry.sites:
        assert torch.allclose(mixture.mean(name), expected[name], atol=1e-12)


@pytest.mark.parametrize("name", ["permutation", "signed", "dihedral", "experts", "attention", "rotary", "stream"])
def test_the_best_vertex_rises_fastest(name: str) -> None:
    """The slope towards the vertices is at least the slope towards any other elements."""
    symmetry = BY_HAND[name]
    universe = relaxed(symmetry, [drawn(symmetry, seed) for seed in range(2)])
    universe.start_from_barycenter()
    universe.step(random_vertices(symmetry, universe, 5), 0.4)
    slope = universe.line(universe.vertices())[1]
    assert slope >= 0
    for seed in range(20):
        assert slope >= universe.line(random_vertices(symmetry, universe, 100 + seed))[1] - 1e-9


@pytest.mark.parametrize("name", [name for name in UNSCALED if name not in ("recurrent", "grouped convolution")])
def test_making_it_hard_costs_nothing_where_the_objective_is_linear_in_each_group(name: str) -> None:
    symmetry = BY_HAND[name]
    for seed in range(3):
        networks = [drawn(symmetry, seed), drawn(symmetry, seed + 30), drawn(symmetry, seed + 60)]
        universe = relaxed(symmetry, networks)
        universe.start_from_barycenter()
        universe.step(random_vertices(symmetry, universe, 5), 0.4)
        before = objective(universe, list(networks[0]))
        vertices = universe.settle()
        assert objective(universe, list(networks[0])) >= before - 1e-9
        for mixture, vertex, network in zip(universe.mixtures[1:], vertices[1:], networks[1:], strict=True):
            element = symmetry.identity()
            for part in vertex.values():
                for group, value in part.items():
                    element = element.replace(group, value)
            moved = symmetry.act(element, network)
            assert all(torch.allclose(moved[n], mixture.mean(n), atol=1e-9) for n in network)


@pytest.mark.parametrize("start", ["barycenter", "identity"])
@pytest.mark.parametrize("name", UNSCALED)
def test_it_never_falls_nor_ends_below_the_identity_and_reports_what_it_reaches(name: str, start: str) -> None:
    symmetry = BY_HAND[name]
    a, b = drawn(symmetry, 0), drawn(symmetry, 100)
    result = rg.align(a, b, symmetry, method=FrankWolfe(start=start, max_steps=10))  # type: ignore[arg-type]
    assert result.objective >= result.initial
    assert all(x <= y for x, y in itertools.pairwise(result.history))
    assert result.initial == pytest.approx(closeness(symmetry, a, b, b), abs=1e-9)
    assert result.objective == pytest.approx(closeness(symmetry, a, result.params, b), abs=1e-7)
    moved = symmetry.act(result.element, b)
    assert all(torch.equal(moved[key], result.params[key]) for key in b)


@pytest.mark.parametrize(
    "symmetry", [mlp_symmetry(2, 4, 3), mlp_symmetry(2, 3, 3, kind="signed"), experts(2, 3, 3)], ids=str
)
def test_a_single_family_is_solved_exactly(symmetry: Symmetry) -> None:
    for seed in range(2):
        a, b = drawn(symmetry, seed), drawn(symmetry, seed + 50)
        best = max(closeness(symmetry, a, symmetry.act(g, b), b) for g in every_element(symmetry))
        assert rg.align(a, b, symmetry, method=FrankWolfe()).objective == pytest.approx(best, abs=1e-8)


def test_residual_streams_are_recovered_from_the_barycenter() -> None:
    """A hidden permutation is recovered under noise as large as the weights, in a weakly anchored stream."""
    symmetry = stream(24, 40, 4)
    for seed in range(2):
        a, noise = drawn(symmetry, seed, torch.float32), drawn(symmetry, seed + 100, torch.float32)
        planted = symmetry.random(generator(seed))
        b = {key: t + 0.7 * noise[key] for key, t in symmetry.act(planted, a).items()}
        found, undone = rg.align(a, b, symmetry, method=FrankWolfe()).element, symmetry.inverse(planted)
        assert all(torch.equal(found[n].perm, undone[n].perm) for n in found)  # type: ignore[arg-type]


def test_a_group_on_two_axes_draws_for_each() -> None:
    symmetry = BY_HAND["recurrent"]
    a = drawn(symmetry, 0)
    planted = symmetry.random(generator(1))
    result = rg.align(a, symmetry.act(planted, a), symmetry, method=FrankWolfe())
    assert all(torch.allclose(result.params[key], a[key]) for key in a)


def test_restarts_never_hurt() -> None:
    symmetry = stream(6, 9, 3)
    a, b = drawn(symmetry, 3), drawn(symmetry, 4)
    once = rg.align(a, b, symmetry, method=FrankWolfe())
    many = rg.align(a, b, symmetry, method=FrankWolfe(restarts=4), generator=generator(0))
    assert many.objective >= once.objective
    assert many.starts[0] == once.starts[0]
    assert len(set(many.starts)) > 1


def test_scales_are_balanced_first_as_in_weight_matching() -> None:
    symmetry = mlp_symmetry(4, 8, 3, kind="scaled")
    a, b = drawn(symmetry, 0), drawn(symmetry, 1)
    one, other = (rg.align(a, b, symmetry, method=method) for method in (FrankWolfe(), WeightMatching()))
    assert one.objective == pytest.approx(other.objective)
    assert one.initial == pytest.approx(other.initial)
    assert all(torch.allclose(one.params[key], other.params[key]) for key in b)
    kept = rg.align(a, b, symmetry, method=FrankWolfe(scales="keep"))
    assert kept.element["h1"].scale is not None
    assert bool((kept.element["h1"].scale == 1).all())


def test_settings_are_checked() -> None:
    symmetry = mlp_symmetry(2, 3, 2)
    a = drawn(symmetry, 0)
    with pytest.raises(ValueError, match=r"restarts=2 begin at random elements; give align a torch.Generator"):
        rg.align(a, a, symmetry, method=FrankWolfe(restarts=2))
    with pytest.raises(ValueError, match="start is 'middle'; choose 'barycenter' or 'identity'"):
        FrankWolfe(start="middle")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="scales is 'none'; choose 'balance', 'recompute' or 'keep'"):
        FrankWolfe(scales="none")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least one step is needed"):
        FrankWolfe(max_steps=0)

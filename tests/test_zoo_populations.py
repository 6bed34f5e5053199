"""Populations modulo their symmetry: transformations along the orbits change no distance and no barrier."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from regauge.alignment import WeightMatching, align, align_pairs
from regauge.canonical import canonicalize, orbit_distance
from regauge.checkpoints.checkpoint import load
from regauge.connect import line
from regauge.core.params import Params
from regauge.core.symmetry import Symmetry
from regauge.core.task import Task
from regauge.discovery import discover
from regauge.nets.mlp import mlp
from regauge.storage import Store
from regauge.storage.architecture import Architecture
from regauge.zoo import (
    Barriers,
    OrbitDistances,
    clusters,
    flat_map,
    mean_barrier,
    medoid,
    plan_population,
    reference,
    run_jobs,
    sample,
    universe,
)
from regauge.zoo.jobs.compare_blocks import plan_comparison

ACTIVATIONS = {"scaled": torch.relu, "signed": torch.tanh, "permutation": torch.sigmoid, "dihedral": torch.sin}


@cache
def module(kind: str) -> nn.Module:
    return mlp(3, 5, 4, 2, activation=ACTIVATIONS[kind]).double()


@cache
def symmetry(kind: str) -> Symmetry:
    return discover(module(kind), (torch.randn(2, 3, dtype=torch.float64),))


def population(kind: str, count: int, seed: int = 0) -> Params:
    generator = torch.Generator().manual_seed(seed)
    state = module(kind).state_dict()
    networks = [
        {name: torch.randn(tensor.shape, generator=generator, dtype=torch.float64) for name, tensor in state.items()}
        for _ in range(count)
    ]
    return {name: torch.stack([network[name] for network in networks]) for name in state}


def task(kind: str) -> Task:
    """Return a task: the first network of every population of seed 0 classifies all inputs correctly."""
    generator = torch.Generator().manual_seed(9)
    inputs = [torch.randn(n, 3, generator=generator, dtype=torch.float64) for n in (6, 4)]
    single = one(population(kind, 1), 0)
    return Task(module(kind), [(x, Task(module(kind), []).run(single, x).argmax(-1)) for x in inputs])


def one(params: Params, k: int) -> Params:
    return {name: tensor[k] for name, tensor in params.items()}


def moved(kind: str, params: Params, seed: int) -> Params:
    """Return every network at another position on its orbit."""
    count = len(next(iter(params.values())))
    element = symmetry(kind).random(torch.Generator().manual_seed(seed), batch=(count,))
    return symmetry(kind).act(element, params)


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_distances_are_those_of_orbits(kind: str) -> None:
    first, second, compare = population(kind, 3), population(kind, 2, seed=1), OrbitDistances(symmetry(kind))
    matrix = compare(first, second)
    assert matrix.shape == (3, 2)
    torch.testing.assert_close(compare(second, first), matrix.T)
    torch.testing.assert_close(compare(moved(kind, first, 2), moved(kind, second, 3)), matrix, rtol=1e-8, atol=1e-8)
    for i, j in ((0, 1), (2, 0)):
        single = orbit_distance(one(first, i), one(second, j), symmetry(kind))
        assert float(matrix[i, j]) == pytest.approx(single, rel=1e-8)
    itself = compare(first, first)
    separate = compare(first, dict(first))
    torch.testing.assert_close(separate, itself, rtol=0, atol=1e-6)
    assert torch.equal(itself, itself.T)
    assert (itself.diagonal() == 0).all()
    assert (itself + torch.eye(3) > 0.1).all()
    assert float(compare(first, moved(kind, first, 4)).diagonal().max()) < 1e-6


def test_distances_are_symmetric_where_matching_has_many_optima() -> None:
    deep, generator = mlp(3, 10, 10, 10, 10, 2), torch.Generator().manual_seed(0)
    of_deep = discover(deep, (torch.randn(2, 3),))
    first, second = (
        {name: torch.randn(3, *t.shape, generator=generator).double() for name, t in deep.state_dict().items()}
        for _ in range(2)
    )
    plain = OrbitDistances(of_deep)(first, second)
    torch.testing.assert_close(OrbitDistances(of_deep)(second, first), plain.T)
    restarts = WeightMatching(scales="keep", restarts=2)
    found = OrbitDistances(of_deep, restarts)(first, second)
    assert (found <= plain + 1e-9).all()
    assert (found < plain - 1e-3).any()
    # Distances are compared with what matching gains in the better direction: |a - g b|^2 = |a|^2 + |b|^2 - 2 <a, g b>.
    pair = [{name: t[:1] for name, t in p.items()} for p in (first, second)]
    ends, chance = [canonicalize(p, of_deep) for p in pair], torch.Generator().manual_seed(0)
    ways = [align_pairs(*both, of_deep, method=restarts, generator=chance) for both in (ends, ends[::-1])]
    product = max(float(way.objective) for way in ways)
    product += sum(float((t * ends[1][name]).sum()) for name, t in ends[0].items() if name not in of_deep.sites)
    size = sum(float((t**2).sum()) for p in ends for t in p.values())
    assert float(OrbitDistances(of_deep, restarts)(*pair)) ** 2 == pytest.approx(size - 2 * product, rel=1e-9)


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_barriers_are_those_of_lines(kind: str) -> None:
    networks, judge = population(kind, 4), task(kind)
    matrix = Barriers(judge, points=5)(networks, networks)
    assert torch.equal(matrix, matrix.T)
    assert (matrix.diagonal() == 0).all()
    assert matrix.max() > 0.01
    for i in range(4):
        for j in range(4):
            curve = line(one(networks, i), one(networks, j), judge, points=5)
            assert float(matrix[i, j]) == pytest.approx(curve.barrier, abs=1e-12)
    blocks = Barriers(judge, points=5)(networks, {name: t[1:3] for name, t in networks.items()})
    torch.testing.assert_close(blocks, matrix[:, 1:3])
    alone = Barriers(replace(judge, prepare=lambda params: params), points=5)(networks, networks)
    torch.testing.assert_close(alone, matrix)


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_barriers_after_alignment(kind: str) -> None:
    networks, judge, s = population(kind, 3), task(kind), symmetry(kind)
    matrix = Barriers(judge, s, points=4)(networks, networks)
    for i, j in ((0, 1), (0, 2), (1, 2)):
        a, b = one(networks, i), one(networks, j)
        there, back = align(a, b, s), align(b, a, s)
        ends = (a, there.params) if there.objective >= back.objective else (back.params, b)
        assert float(matrix[i, j]) == pytest.approx(line(*ends, judge, points=4).barrier, abs=1e-9)
    exchanged = {name: tensor.flip(0) for name, tensor in networks.items()}
    flipped = Barriers(judge, s, points=4)(exchanged, exchanged)
    torch.testing.assert_close(flipped.flip(0, 1), matrix, rtol=0, atol=1e-9)
    copies = moved(kind, networks, 5)
    assert float(Barriers(judge, s)(networks, copies).diagonal().max()) < 1e-9
    assert float(Barriers(judge)(networks, copies)[0, 0]) > 1e-3


def test_what_cannot_be_compared_is_told() -> None:
    judge, networks = task("signed"), population("signed", 2)
    with pytest.raises(ValueError, match="needs both ends"):
        Barriers(judge, points=2)
    with pytest.raises(ValueError, match="needs a symmetry"):
        Barriers(judge, method=WeightMatching())
    with pytest.raises(ValueError, match="only the first has"):
        OrbitDistances(symmetry("signed"))(networks, {"x": torch.zeros(2, 1)})
    networks["layers.0.bias"][1, 0] = torch.nan
    matrix = Barriers(judge)(networks, networks)
    assert matrix[0, 1].isnan()
    with pytest.raises(ValueError, match="NaN or Inf"):
        Barriers(judge, symmetry("signed"))(networks, networks)
    assert mean_barrier(torch.tensor([[0, 1, torch.nan], [1, 0, 3], [torch.nan, 3, 0]])) == (2.0, 1.0)


@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize("count", [1, 5, 40])
def test_a_universe_is_never_worse_and_its_spread_never_rises(kind: str, count: int) -> None:
    networks = population(kind, count)
    found = universe(networks, symmetry(kind))
    assert found.spread <= found.initial
    assert all(later <= earlier for earlier, later in zip(found.history, found.history[1:], strict=False))
    assert found.is_converged
    assert (found.spread < 0.9 * found.initial) == (count > 1)
    again = symmetry(kind).act(found.element, networks)
    for name, tensor in found.params.items():
        assert torch.equal(tensor, again[name])
        torch.testing.assert_close(found.mean[name], tensor.mean(0))
    deviations = sum(((t - found.mean[name]) ** 2).flatten(1).sum(1) for name, t in found.params.items())
    assert found.spread == pytest.approx(float(torch.as_tensor(deviations).mean()))
    x = torch.randn(7, 3, dtype=torch.float64)
    for k in (0, count - 1):
        before, after = (task(kind).run(one(p, k), x) for p in (networks, found.params))
        torch.testing.assert_close(before, after, rtol=1e-9, atol=1e-9)
    if count == 40:
        plain = align_pairs(
            found.mean, found.params, symmetry(kind), method=WeightMatching(start="identity", scales="keep")
        )
        short = universe(networks, symmetry(kind), rounds=1, tolerance=0)
        assert len(short.history) == 2
        assert not short.is_converged
        assert "allow more rounds" in str(short)
        assert float((plain.objective - plain.initial).mean()) < 0.01 * found.spread
        assert found.history[-1] < found.history[0]


def test_a_universe_finds_copies_of_one_network() -> None:
    single = population("signed", 1)
    copies = moved("signed", {name: tensor.expand(30, *tensor.shape[1:]) for name, tensor in single.items()}, 3)
    found = universe(copies, symmetry("signed"))
    assert found.initial > 1
    assert found.spread < 1e-12
    with pytest.raises(ValueError, match="at least one round"):
        universe(copies, symmetry("signed"), rounds=0)
    copies["layers.0.bias"][3, 0] = torch.inf
    for kind in ("signed", "scaled"):
        with pytest.raises(ValueError, match="of the population holds NaN or Inf in 1 of 150 entries"):
            universe(copies, symmetry(kind))


def test_a_map_shows_distances_and_clusters_tell_planted_groups_apart() -> None:
    """There are two networks, each with slightly perturbed copies at random positions on their orbits."""
    centers, generator = population("scaled", 2), torch.Generator().manual_seed(4)
    kinds = np.array([0, 1, 1, 0, 1, 0, 0, 1])
    near = {
        name: tensor[kinds] + 0.05 * torch.randn(8, *tensor.shape[1:], generator=generator, dtype=torch.float64)
        for name, tensor in centers.items()
    }
    networks = moved("scaled", near, 5)
    distances = OrbitDistances(symmetry("scaled"))(networks, networks).numpy()
    assert clusters(distances, 2).tolist() == kinds.tolist()
    assert clusters(distances, 1).tolist() == [0] * 8
    drawn = flat_map(distances)
    sides = drawn.points[:, 0] > 0
    assert (sides == (kinds == kinds[sides.argmax()])).all()
    assert drawn.share > 0.8
    plain = torch.cat([tensor.flatten(1) for tensor in networks.values()], 1)
    assert clusters(torch.cdist(plain, plain), 2).tolist() != kinds.tolist()


def test_a_map_of_points_in_a_plane_is_exact() -> None:
    points = np.random.default_rng(0).normal(size=(7, 2))
    distances = np.linalg.norm(points[:, None] - points[None], axis=-1)
    drawn = flat_map(distances)
    np.testing.assert_allclose(np.linalg.norm(drawn.points[:, None] - drawn.points[None], axis=-1), distances)
    assert drawn.share == pytest.approx(1)
    assert drawn.points.var(0)[0] > drawn.points.var(0)[1]
    assert flat_map(distances, dims=1).share < 1
    assert flat_map(np.zeros((3, 3))).share == 1
    with pytest.raises(ValueError, match="not finite"):
        flat_map([[0, np.nan], [np.nan, 0]])
    with pytest.raises(ValueError, match="these are not"):
        clusters([[0, 1], [2, 0]], 1)
    with pytest.raises(ValueError, match="square matrix"):
        clusters([[0, 1, 2]], 1)
    with pytest.raises(ValueError, match="3 dimensions"):
        flat_map(np.zeros((3, 3)), dims=3)
    with pytest.raises(ValueError, match="into 9 clusters"):
        clusters(distances, 9)


MLP = Architecture("MLP 3-5-4-2", "regauge.nets.mlp:mlp", {"widths": [3, 5, 4, 2]})


def stored(folder: Path, count: int = 12) -> Store:
    """Return two checkpoints for each of some trajectories, with NaN in one network. The first network is the medoid of
    the final networks.
    """
    single = discover(MLP.module(), (torch.randn(2, 3),))
    store = Store.create(folder, MLP, single)
    generator = torch.Generator().manual_seed(0)
    for start in range(0, count, 5):
        ids = range(start, min(start + 5, count))
        params = {spec.name: torch.randn(2 * len(ids), *spec.shape, generator=generator) for spec in MLP.layout}
        if start == 0:
            params["layers.0.bias"][3, 0] = torch.nan
        store.append(params, [{"id": k, "step": step} for k in ids for step in (1, 2)], name=f"part-{start:03d}")
    return store


def test_samples_are_last_checkpoints_that_are_finite(tmp_path: Path) -> None:
    store = stored(tmp_path / "zoo")
    drawn = sample(store, 100)
    assert store.rows["id"][drawn].tolist() == [0, *range(2, 12)]
    assert set(store.rows["step"][drawn].tolist()) == {2}
    assert len(sample(store, 100, among=np.arange(24))) == 23
    # Finite values may have an infinite loss.
    wild = {spec.name: torch.randn(2, *spec.shape) for spec in MLP.layout}
    store.append(wild, [{"id": 50 + k, "step": 2, "is_diverged": k == 1} for k in range(2)], name="wild")
    store.refresh()
    assert store.rows["id"][sample(store, 100)].tolist() == [0, *range(2, 12), 50]
    few = sample(store, 4, seed=1)
    assert len(few) == 4
    assert np.array_equal(few, sample(store, 4, seed=1))
    assert not np.array_equal(few, sample(store, 4, seed=2))


def test_the_medoid_is_nearest_to_all() -> None:
    kind = "signed"
    center = population(kind, 1)
    steps = torch.tensor([3.0, -2.0, 0.1, 2.5], dtype=torch.float64)
    direction = population(kind, 1, seed=2)
    networks = {
        name: tensor + 0.05 * steps.view(-1, *[1] * (tensor.ndim - 1)) * direction[name]
        for name, tensor in center.items()
    }
    assert medoid(moved(kind, networks, 1), symmetry(kind)) == 2


@pytest.mark.parametrize("to", [7, "medoid", "universe"])
def test_a_store_is_aligned_to_what_was_named(to: int | str, tmp_path: Path) -> None:
    store = stored(tmp_path / "zoo")
    target, jobs = plan_population(tmp_path / "zoo", tmp_path / "out" / "aligned", to=to, count=6)  # type: ignore[arg-type]
    run_jobs(jobs)
    target.refresh()
    assert len(target) == 23
    anchor = load(jobs.reference)
    before = store.rows.where(is_finite=True)
    rows = list(zip(store.rows["id"][before], store.rows["step"][before], strict=True))
    order = [rows.index(pair) for pair in zip(target.rows["id"], target.rows["step"], strict=True)]
    given, found = store.read(before[order]), target.read(range(23))
    assert (target.rows["objective"] >= target.rows["objective_before"]).all()
    x = torch.randn(5, 3)
    module_of = Task(MLP.module(), [])
    for k in (0, 22):
        torch.testing.assert_close(
            module_of.run(one(given, k), x), module_of.run(one(found, k), x), rtol=1e-3, atol=1e-4
        )
    if to == 7:
        own = int(target.rows.where(id=7, step=2)[0])
        for name, tensor in anchor.items():
            torch.testing.assert_close(tensor, found[name][own])
    again, jobs = plan_population(tmp_path / "zoo", tmp_path / "out" / "aligned", to=to, count=6)  # type: ignore[arg-type]
    assert run_jobs(jobs) == 0
    assert len(again) == 23
    with pytest.raises(FileExistsError, match="other networks or settings"):
        plan_population(tmp_path / "zoo", tmp_path / "out" / "aligned", to=5, count=6)


def test_references_that_are_not_there(tmp_path: Path) -> None:
    store = stored(tmp_path / "zoo")
    for absent in (1, 99):
        with pytest.raises(ValueError, match=f"the id {absent} and a last network"):
            reference(store, absent)
    unknown = Store.create(tmp_path / "plain", MLP)
    with pytest.raises(ValueError, match="symmetry of the store"):
        reference(unknown, "medoid")
    with pytest.raises(ValueError, match="none of the 0 networks"):
        sample(unknown, 3)
    with pytest.raises(ValueError, match="must be at least 1"):
        sample(store, 0)


def test_blocks_of_a_store_are_the_matrix_in_memory(tmp_path: Path) -> None:
    store = stored(tmp_path / "zoo")
    chosen = sample(store, 7)
    params = store.read(chosen)
    assert store.symmetry is not None
    compare = OrbitDistances(store.symmetry)
    jobs = plan_comparison(tmp_path / "zoo", tmp_path / "parts", chosen, compare, size=3)
    run_jobs(jobs)
    whole: Tensor = compare(params, params)
    np.testing.assert_allclose(jobs.matrix(), whole.numpy(), rtol=1e-4, atol=1e-4)
    assert (np.diag(jobs.matrix()) == 0).all()

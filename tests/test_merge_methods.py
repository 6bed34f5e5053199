"""Merging: soups, task vectors relative to a base, and the record of a merge."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import regauge as rg
from regauge import Params, Symmetry, WeightMatching
from regauge.merging import Average, Dare, GreedySoup, TaskArithmetic, Ties

SYMMETRY = Symmetry.from_axes({"0.weight": ("h", None), "0.bias": ("h",), "2.weight": (None, "h")})
MODULE = nn.Sequential(nn.Linear(3, 9), nn.Tanh(), nn.Linear(9, 4, bias=False)).double()
VECTOR_RULES = [TaskArithmetic(), Ties(0.4), Ties(1.0, scale=0.5), Dare(0.5), Dare(0.3, Ties(1.0))]


def chance(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def network(seed: int, dtype: torch.dtype = torch.float64) -> Params:
    g = chance(seed)
    return {n: torch.randn(t.shape, generator=g, dtype=torch.float64).to(dtype) for n, t in MODULE.state_dict().items()}


def near(base: Params, seed: int, distance: float = 0.05) -> Params:
    g = chance(seed)
    return {n: (t.double() + distance * torch.randn(t.shape, generator=g).double()).to(t) for n, t in base.items()}


def orbit(params: Params, seed: int) -> Params:
    symmetry = SYMMETRY.bind(params)
    return symmetry.act(symmetry.random(chance(seed)), params)


def task_of(teacher: Params) -> rg.Task:
    """Return the task of regression on a teacher, for which networks near the teacher are good."""
    inputs = torch.randn(64, 3, generator=chance(100), dtype=torch.float64)
    with torch.no_grad():
        targets = torch.func.functional_call(MODULE, teacher, (inputs,))
    return rg.Task(MODULE, [(inputs, targets)], nn.functional.mse_loss)


def close(a: Params, b: Params) -> bool:
    return a.keys() == b.keys() and all(torch.allclose(a[n], b[n], atol=1e-12) for n in a)


@pytest.mark.parametrize("rule", [TaskArithmetic(), Ties(1.0), Dare(0.0), Dare(0.0, Ties(1.0))], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_network_at_full_density_comes_back(rule: rg.merging.Ties, dtype: torch.dtype) -> None:
    base = network(0, dtype)
    one = near(base, 1)
    merged = rg.merge([orbit(one, 2)], SYMMETRY, rule=rule, base=base).params
    assert all(torch.equal(merged[n], one[n]) and merged[n].dtype == dtype for n in one)


def test_ties_of_identical_networks_is_the_identity() -> None:
    base = network(0)
    one = near(base, 1)
    merged = rg.merge([one, orbit(one, 2), orbit(one, 3)], SYMMETRY, rule=Ties(1.0), base=base).params
    assert close(merged, one)


@pytest.mark.parametrize("rule", VECTOR_RULES, ids=str)
def test_orbits_do_not_matter(rule: rg.merging.Ties) -> None:
    base = network(0)
    networks = [near(base, seed) for seed in (1, 2, 3)]
    merged = rg.merge(networks, SYMMETRY, rule=rule, base=base, generator=chance(0)).params
    moved = [orbit(p, seed) for seed, p in enumerate(networks, 10)]
    assert close(rg.merge(moved, SYMMETRY, rule=rule, base=base, generator=chance(0)).params, merged)
    assert not close(rg.merge(moved, Symmetry(()), rule=rule, base=base, generator=chance(0)).params, merged)


def test_task_arithmetic_is_the_weighted_sum() -> None:
    base = network(0)
    a, b = near(base, 1), near(base, 2)
    merged = rg.merge([a, b], SYMMETRY, rule=TaskArithmetic(0.5), base=base, weights=[1, -2]).params
    assert close(merged, {n: t + 0.5 * (a[n] - t) - (b[n] - t) for n, t in base.items()})
    assert close(rg.merge([a, b], SYMMETRY, rule=TaskArithmetic(0), base=base).params, base)


def ties_by_hand(vectors: list[list[float]], weights: list[float], density: float) -> list[float]:
    """Compute TIES entry by entry, without equal magnitudes."""
    kept = max(1, round(density * len(vectors[0])))
    trimmed = []
    for vector in vectors:
        largest = sorted(range(len(vector)), key=lambda i: -abs(vector[i]))[:kept]
        trimmed.append([x if i in largest else 0.0 for i, x in enumerate(vector)])
    result = []
    for entries in zip(*trimmed, strict=True):
        mass = sum(w * x for w, x in zip(weights, entries, strict=True))
        agreeing = [(w, x) for w, x in zip(weights, entries, strict=True) if x * mass > 0]
        result.append(sum(w * x for w, x in agreeing) / sum(w for w, _ in agreeing) if agreeing else 0.0)
    return result


@pytest.mark.parametrize("density", [0.05, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("size", [1, 2, 3, 10])
def test_ties_is_its_definition(density: float, size: int) -> None:
    g = chance(size)
    vectors = torch.randn(3, size, generator=g, dtype=torch.float64)
    networks = [{"w": v} for v in vectors]
    base, weights = {"w": torch.zeros(size, dtype=torch.float64)}, [0.5, 0.2, 0.3]
    merged = rg.merge(networks, Symmetry(()), rule=Ties(density, scale=2.0), base=base, weights=[5, 2, 3]).params
    expected = 2 * torch.tensor(ties_by_hand(vectors.tolist(), weights, density), dtype=torch.float64)
    assert torch.allclose(merged["w"], expected)
    assert bool(merged["w"].any()), "a tiny tensor must not lose all of its entries"


def test_ties_keeps_scalars_and_drops_what_cancels() -> None:
    base = {"s": torch.tensor(1.0), "w": torch.zeros(2)}
    networks = [{"s": torch.tensor(2.0), "w": torch.tensor([1.0, 2.0])}, {"s": torch.tensor(4.0), "w": -torch.ones(2)}]
    merged = rg.merge(networks, Symmetry(()), rule=Ties(1.0), base=base).params
    assert float(merged["s"]) == 3
    assert merged["w"].tolist() == [0, 2]


def test_dare_is_unbiased() -> None:
    base = network(0)
    networks = [near(base, 1), near(base, 2)]
    expected = rg.merge(networks, SYMMETRY, rule=TaskArithmetic(), base=base).params
    assert close(rg.merge(networks, SYMMETRY, rule=Dare(0.0), base=base).params, expected)
    g, runs, drop = chance(0), 400, 0.6
    drawn = [rg.merge(networks, Symmetry(()), rule=Dare(drop), base=base, generator=g).params for _ in range(runs)]
    for name, tensor in expected.items():
        values = torch.stack([one[name] for one in drawn])
        # The variance of a sum of dropped and enlarged entries: sum_k tau_k^2 p / (1 - p).
        squares = torch.stack([(p[name] - base[name]).square() for p in networks]).sum(0)
        deviation = (squares * drop / (1 - drop) / runs).sqrt()
        assert float(((values.mean(0) - tensor) / deviation).abs().max()) < 4.5
        assert float((values.var(0) / (deviation.square() * runs)).mean()) == pytest.approx(1, abs=0.1)


def test_dare_drops_the_share_that_it_says_and_is_reproducible() -> None:
    base, one = {"w": torch.zeros(10_000)}, {"w": torch.ones(10_000)}
    merged = rg.merge([one], Symmetry(()), rule=Dare(0.75), base=base, generator=chance(0)).params["w"]
    assert set(merged.tolist()) == {0.0, 4.0}
    assert float((merged == 0).double().mean()) == pytest.approx(0.75, abs=0.02)
    again = rg.merge([one], Symmetry(()), rule=Dare(0.75), base=base, generator=chance(0)).params["w"]
    assert torch.equal(merged, again)


def test_tied_tensors_stay_tied_under_chance() -> None:
    symmetry = Symmetry((), tied=(("a", "b"),))
    tensor = torch.randn(50, generator=chance(0))
    base, one = ({"a": t, "b": t} for t in (torch.zeros(50), tensor))
    merged = rg.merge([one], symmetry, rule=Dare(0.5), base=base, generator=chance(1)).params
    assert torch.equal(merged["a"], merged["b"])
    assert not torch.equal(merged["a"], tensor)


def test_statistics_are_averaged_and_integers_are_those_of_the_base() -> None:
    module = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2))
    symmetry = rg.discover(module, (torch.ones(4, 3),))
    networks = []
    for seed in range(3):
        g = chance(seed)
        drawn = {n: torch.randn(t.shape, generator=g) for n, t in module.state_dict().items()}
        state = {n: t + seed if not t.is_floating_point() else drawn[n].abs() if t.ndim == 1 else drawn[n] for n, t in
                 module.state_dict().items()}  # fmt: skip
        networks.append(state)
    base, *others = networks
    aligned = [rg.align(base, other, symmetry).params for other in others]
    merged = rg.merge(others, symmetry, rule=TaskArithmetic(-10.0), base=base).params
    for name in ("1.running_mean", "1.running_var"):
        assert torch.allclose(merged[name], (aligned[0][name] + aligned[1][name]) / 2)
    assert int(merged["1.num_batches_tracked"]) == int(base["1.num_batches_tracked"])


def test_a_greedy_soup_takes_what_helps_and_nothing_else() -> None:
    teacher = network(0)
    offset = near({n: torch.zeros_like(t) for n, t in teacher.items()}, 1, 1.0)
    plus, minus = ({n: t + sign * 0.1 * offset[n] for n, t in teacher.items()} for sign in (1, -1.05))
    networks, task = [orbit(plus, 2), network(5), orbit(minus, 3)], task_of(teacher)
    result = rg.merge(networks, SYMMETRY, rule=GreedySoup(), task=task)
    assert result.record.weights == (0.5, 0.0, 0.5)
    assert close(result.params, rg.merge(networks, SYMMETRY, weights=[1, 0, 1]).params)
    metrics = result.record
    assert metrics.merged_metrics is not None
    assert metrics.merged_metrics["loss"] < min(m["loss"] for m in metrics.metrics) / 10
    only = rg.merge([plus, network(5)], SYMMETRY, rule=GreedySoup(), task=task, method=WeightMatching())
    assert only.record.weights == (1.0, 0.0)


@pytest.mark.parametrize("seed", range(4))
def test_a_greedy_soup_is_never_worse_than_its_best_network(seed: int) -> None:
    teacher = network(0)
    networks = [near(teacher, 10 * seed + k, 0.1 * (k + 1)) for k in range(4)]
    task = task_of(teacher)
    merged = rg.merge(networks, SYMMETRY, rule=GreedySoup(), task=task, test=task).params
    best = min(task.evaluate(p)["loss"] for p in networks)
    assert task.evaluate(merged)["loss"] <= best * (1 + 1e-12)


def test_the_record_says_what_was_done() -> None:
    teacher = network(0)
    a, b = near(teacher, 1), orbit(near(teacher, 2), 3)
    task = task_of(teacher)
    result = rg.merge([a, b], SYMMETRY, weights=[1, 3], task=task, test=task, labels=["one", "a|b"])
    record = result.record
    aligned = rg.align_many([a, b], SYMMETRY, task=task)
    assert close(result.params, {n: 0.25 * a[n] + 0.75 * aligned.params[1][n] for n in a})
    assert record.weights == (0.25, 0.75)
    assert (record.initial, record.objective) == (aligned.initial, aligned.objective)
    for moved, found in ((b, record.before[1]), (aligned.params[1], record.after[1])):
        assert found == pytest.approx(float(torch.cat([(a[n] - moved[n]).flatten() for n in a]).norm()))
    assert record.after[1] < record.before[1]
    assert record.before[0] == 0
    assert record.metrics == (task.evaluate(a), task.evaluate(b))
    assert record.merged_metrics == task.evaluate(result.params)
    naive = {n: 0.25 * a[n] + 0.75 * b[n] for n in a}
    assert record.unaligned_metrics is not None
    assert record.unaligned_metrics["loss"] == pytest.approx(task.evaluate(naive)["loss"])
    card = record.card
    rows = [line for line in card.splitlines() if line.startswith("|")]
    for text in ("Average()", "DataMatching(", f"{record.objective:.6g} after", "a\\|b", "0.75", "**merged**",
                 f"{record.merged_metrics['loss']:.6g}"):  # fmt: skip
        assert text in card
    assert len({line.replace("\\|", "").count("|") for line in rows[9:]}) == 1


def test_elements_move_the_networks_to_where_they_are_combined() -> None:
    base, one, two = network(0), orbit(near(network(0), 1), 2), orbit(near(network(0), 3), 4)
    mean = rg.merge([one, two], SYMMETRY)
    moved = [mean.symmetry.act(g, p) for g, p in zip(mean.elements, (one, two), strict=True)]
    assert close(mean.params, {n: (moved[0][n] + moved[1][n]) / 2 for n in base})
    total = rg.merge([one, two], SYMMETRY, rule=TaskArithmetic(), base=base)
    moved = [total.symmetry.act(g, p) for g, p in zip(total.elements, (one, two), strict=True)]
    assert close(total.params, {n: moved[0][n] + moved[1][n] - base[n] for n in base})


def test_the_result_is_prepared_and_judged_as_the_task_says() -> None:
    teacher = network(0)
    name = next(iter(teacher))
    task = replace(task_of(teacher), prepare=lambda params: {**params, name: teacher[name]})
    result = rg.merge([near(teacher, 1), near(teacher, 2)], SYMMETRY, task=task, test=task)
    assert torch.equal(result.params[name], teacher[name])
    assert result.record.merged_metrics == task.evaluate(result.params)


def test_the_record_of_task_vectors_names_the_base() -> None:
    base = network(0)
    result = rg.merge([near(base, 1)], SYMMETRY, rule=Ties(), base=base, task=task_of(base), test=task_of(base))
    assert result.record.base == "base"
    assert result.record.base_metrics == {"loss": 0.0}
    assert result.record.unaligned_metrics is None
    assert "| base | base | 0 | 0 | 0 |" in result.record.card
    without = rg.merge([base, near(base, 1)], SYMMETRY).record
    assert without.merged_metrics is None
    assert "loss" not in without.card


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Ties(0.0), "density is 0.0"),
        (lambda: Ties(1.5), "density is 1.5"),
        (lambda: Dare(1.0), "drop is 1.0"),
        (lambda: TaskArithmetic(float("nan")), "scale is nan"),
    ],
)
def test_settings_that_make_no_sense_are_refused(make: object, sentence: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=sentence):
        make()


def test_what_a_rule_lacks_is_named() -> None:
    base = network(0)
    with pytest.raises(ValueError, match="give it as `base`"):
        rg.merge([base], SYMMETRY, rule=Ties())
    with pytest.raises(ValueError, match=r"Average\(\) combines the networks themselves, without a base"):
        rg.merge([base], SYMMETRY, rule=Average(), base=base)
    with pytest.raises(ValueError, match="GreedySoup chooses by the loss of a task"):
        rg.merge([base, base], SYMMETRY, rule=GreedySoup())
    with pytest.raises(ValueError, match=r"drops entries at random; give a torch\.Generator"):
        rg.merge([base], SYMMETRY, rule=Dare(0.5), base=base)
    with pytest.raises(ValueError, match="give one finite weight for each"):
        rg.merge([base], SYMMETRY, rule=TaskArithmetic(), base=base, weights=[1, 1])
    with pytest.raises(ValueError, match="not all zero"):
        rg.merge([base], SYMMETRY, rule=Ties(), base=base, weights=[0])
    with pytest.raises(ValueError, match="2 networks need one each"):
        rg.merge([base], SYMMETRY, rule=Ties(), base=base, labels=["one"])

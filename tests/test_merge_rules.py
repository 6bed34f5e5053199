"""Laws of every rule in the table, and every rule compared with a small separate implementation."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

import regauge as rg
from regauge import Params, Symmetry
from regauge.alignment.streamed.memory import SLACK
from regauge.checkpoints.checkpoint import Checkpoint, load
from regauge.checkpoints.memory_limit import large_blocks_returned
from regauge.checkpoints.writing import save
from regauge.core.groups import Group, Placement
from regauge.merging import RULES, Breadcrumbs, Dare, Della, ElectedMean, Rule, Setting, TaskArithmetic, Ties
from regauge.merging.blend import Blend
from regauge.merging.rule import Target, draw_seed

Array = NDArray[np.float64]
NOTHING = Symmetry(())
SHAPES = {"layers.0.weight": (9, 6), "layers.0.bias": (9,), "layers.1.weight": (4, 3, 3), "scalar": ()}


@dataclass(frozen=True)
class Case:
    """A rule by its name in the table, with its settings, and whether it has a base."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    has_base: bool = False
    weights: tuple[float, ...] | None = (0.5, 0.2, 0.3)

    @property
    def rule(self) -> Rule:
        return RULES[self.name].build(**self.settings)

    def __str__(self) -> str:
        text = ", ".join(f"{key}={value}" for key, value in self.settings.items())
        return f"{self.name}({text}){' with base' * self.has_base}"


CASES = [
    Case("average"),
    Case("sum", weights=(0.5, -0.2, 2.0)),
    Case("passthrough", {"scale": 0.7}, weights=None),
    Case("slerp", weights=(0.3, 0.7)),
    Case("slerp", has_base=True, weights=(0.6, 0.4)),
    Case("slerp", {"axis": -1}, weights=(0.3, 0.7)),
    Case("slerp", {"axis": 0}, True, (0.6, 0.4)),
    Case("karcher"),
    Case("karcher", has_base=True),
    Case("multislerp"),
    Case("multislerp", has_base=True),
    Case("task-arithmetic", {"scale": 0.5}, True, (0.5, -0.2, 1.0)),
    Case("task-arithmetic", {"is_normalized": True}, True),
    Case("ties", {"density": 0.4, "scale": 2.0}, True),
    Case("ties", {"density": (0.3, 0.9, 0.5), "is_normalized": False}, True),
    Case("ties", {"density": 0.4, "keeps_norm": 1}, True, (0.5, -0.2, 1.0)),
    Case("ties", {"density": 0.4, "keeps_norm": math.inf}, True),
    Case("ties", {"density": 1.0, "is_normalized": False}, True, (-0.5, -0.2, 0.5)),
    Case("dare", {"drop": 0.3, "scale": 0.5}, True),
    Case("dare", {"drop": 0.3, "is_rescaled": False}, True),
    Case("dare-ties", {"drop": (0.3, 0.5, 0.0)}, True),
    Case("dare-ties", {"drop": 0.3, "density": 0.5, "is_normalized": False}, True),
    Case("della", {"density": 0.6, "epsilon": 0.2}, True),
    Case("della", {"density": 0.6, "epsilon": 0.2, "is_rescaled": False}, True, (1.0, -1.0, 1.0)),
    Case("della-linear", {"density": (0.6, 0.5, 1.0), "epsilon": 0.1}, True),
    Case("breadcrumbs", {"density": 0.5, "gamma": 0.1}, True),
    Case("breadcrumbs", {"density": 0.5, "gamma": 0.1, "keeps_norm": 1}, True),
    Case("breadcrumbs", {"density": 0.5, "gamma": 0.3, "keeps_norm": 2}, True),
    Case("breadcrumbs-ties", {"density": 0.7, "gamma": (0.1, 0.2, 0.5)}, True),
    Case("model-stock", has_base=True, weights=None),
    Case("model-stock", {"by_rows": True}, True, None),
    Case("sce", has_base=True, weights=None),
    Case("sce", {"density": 0.4}, True, None),
    Case("nearswap", {"reach": 0.05}, True, None),
    Case("ram", {"least_change": 0.1}, True, None),
    Case("ram", {"least_change": 0.1, "gain": 0.5, "most_overlap": 3.0}, True, None),
    Case("arcee-fusion", weights=None),
]


def chance(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def network(seed: int, dtype: torch.dtype = torch.float64) -> Params:
    g = chance(seed)
    return {n: torch.randn(s, generator=g, dtype=torch.float64).to(dtype) for n, s in SHAPES.items()}


def networks_of(case: Case, dtype: torch.dtype = torch.float64) -> tuple[list[Params], Params | None]:
    """Return the number of networks that the rule accepts (three if possible) and a base. The networks share a part of
    their changes.
    """
    common, base = network(50), network(100)
    made = [
        {n: (base[n] + 0.1 * (common[n] + t)).to(dtype) for n, t in network(seed).items()}
        for seed in range(min(3, case.rule.most or 3))
    ]
    return made, {n: t.to(dtype) for n, t in base.items()} if case.has_base else None


def merge(case: Case, networks: Sequence[Params], base: Params | None, **more: Any) -> Params:
    settings = {"weights": case.weights, "generator": chance(7)} | more
    return rg.merge(networks, NOTHING, rule=case.rule, base=base, **settings).params


def close(a: Params, b: Params, tolerance: float = 1e-12) -> bool:
    return a.keys() == b.keys() and all(torch.allclose(a[n], b[n], rtol=0, atol=tolerance) for n in a)


# Small implementations: loops and sorted lists, tensor by tensor.


def shares(weights: Sequence[float] | None, count: int) -> list[float]:
    given = [1.0] * count if weights is None else list(weights)
    return [w / sum(given) for w in given]


def slerp(a: Array, b: Array, t: float) -> Array:
    cosine = float((a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b))
    angle = math.acos(max(-1.0, min(1.0, cosine)))
    if abs(math.sin(angle)) < 1e-7:
        return (1 - t) * a + t * b
    return (math.sin((1 - t) * angle) * a + math.sin(t * angle) * b) / math.sin(angle)


def slerp_along(a: Array, b: Array, t: float, axis: int | None) -> Array:
    """Apply spherical interpolation separately to every vector along an axis."""
    if axis is None or a.ndim < 2:
        return slerp(a, b, t)
    pairs = [np.moveaxis(one, axis, -1) for one in (a, b)]
    made = np.stack([slerp(pairs[0][place], pairs[1][place], t) for place in np.ndindex(pairs[0].shape[:-1])])
    return np.moveaxis(made.reshape(pairs[0].shape), -1, axis)


def karcher(points: Sequence[Array], weights: Sequence[float], steps: int) -> Array:
    """Minimize the weighted sum of squared angles by descent in short steps."""
    norms = [float(np.linalg.norm(p)) for p in points]
    units = [p / n for p, n in zip(points, norms, strict=True)]
    mean = sum(w * u for w, u in zip(weights, units, strict=True))
    mean = mean / np.linalg.norm(mean)
    for _ in range(steps):
        move = np.zeros_like(mean)
        for w, u in zip(weights, units, strict=True):
            cosine = float((mean * u).sum())
            angle, tangent = math.acos(max(-1.0, min(1.0, cosine))), u - cosine * mean
            reach = float(np.linalg.norm(tangent))
            move = move + (w * angle / reach * tangent if reach > 1e-12 else 0)
        mean = mean + 0.2 * move
        mean = mean / np.linalg.norm(mean)
    return mean * sum(w * n for w, n in zip(weights, norms, strict=True))


def between(vector: Array, density: float, gamma: float) -> Array:
    """Return the entries that are selected by their ranks in a sorted list."""
    flat = vector.flatten()
    kept = max(1, round(density * len(flat)))
    largest = min(round(gamma * len(flat)), len(flat) - kept)
    order = sorted(range(len(flat)), key=lambda i: -abs(flat[i]))[largest : largest + kept]
    return np.array([x if i in set(order) else 0.0 for i, x in enumerate(flat)]).reshape(vector.shape)


def elected(vectors: Sequence[Array], weights: Sequence[float], scale: float, *, is_normalized: bool) -> Array:
    result = np.zeros(vectors[0].size)
    for i, entries in enumerate(zip(*(v.flatten() for v in vectors), strict=True)):
        total = sum(w * x for w, x in zip(weights, entries, strict=True))
        agreeing = [(w, x) for w, x in zip(weights, entries, strict=True) if w * x * total > 0]
        mass = sum(w for w, _ in agreeing)
        result[i] = sum(w * x for w, x in agreeing) / (mass if is_normalized and mass else 1)
    return scale * result.reshape(vectors[0].shape)


def stock(vectors: Sequence[Array]) -> Array:
    pairs = [(a, b) for i, a in enumerate(vectors) for b in vectors[i + 1 :]]
    cosines = [float((a * b).sum() / (np.linalg.norm(a) * np.linalg.norm(b))) for a, b in pairs]
    n, cosine = len(vectors), max(0.0, float(np.mean(cosines)))
    return np.asarray(n * cosine / (1 + (n - 1) * cosine) * sum(vectors) / n)


def restored(kept: Array, vector: Array, order: float) -> Array:
    return np.asarray(kept * np.linalg.norm(vector.ravel(), order) / np.linalg.norm(kept.ravel(), order))


def sce(vectors: Sequence[Array], density: float) -> Array:
    stack = np.stack(vectors)
    if density < 1:
        variance = stack.var(0).flatten()
        kept = np.argsort(-variance)[: int((variance > 1e-15).sum() * density)]
        stack = stack * np.isin(np.arange(variance.size), kept).reshape(vectors[0].shape)
    squares = (stack.reshape(len(stack), -1) ** 2).mean(1)
    weights = squares / squares.sum() if squares.sum() >= 1e-6 else np.full(len(stack), 1 / len(stack))
    agrees = np.sign(stack) == np.sign(stack.sum(0))
    weights = weights.reshape(-1, *[1] * vectors[0].ndim) * (agrees & (stack != 0))
    return np.asarray((weights * stack).sum(0) / np.maximum(weights.sum(0), 1e-6))


def ram(vectors: Sequence[Array], least: float, gain: float, most: float) -> Array:
    result = np.zeros(vectors[0].size)
    columns = [[abs(x) > least for x in entries] for entries in zip(*(v.flatten() for v in vectors), strict=True)]
    for k, vector in enumerate(vectors):
        alone = sum(column[k] and sum(column) == 1 for column in columns)
        shared = sum(column[k] and sum(column) > 1 for column in columns)
        for i, x in enumerate(vector.flatten()):
            if columns[i][k]:
                own = 1 + gain * min(shared / max(alone, 1), most) if sum(columns[i]) == 1 else 1
                result[i] += own * x / sum(columns[i])
    return result.reshape(vectors[0].shape)


def fusion(first: Array, second: Array) -> Array:
    importance = np.abs(second - first)
    for place in np.ndindex(first.shape[:-1]):
        p, q = (np.exp(one[place]) / np.exp(one[place]).sum() + 1e-8 for one in (second, first))
        importance[place] *= (p * np.log(p / q)).sum()
    order = np.sort(importance.flatten())
    quarter, median, three = (order[int(q * (order.size - 1))] for q in (0.25, 0.5, 0.75))
    return np.where(importance >= median + 1.5 * (three - quarter), second, first)


def ranked(vector: Array, density: float, epsilon: float, noise: Array, *, is_rescaled: bool) -> Array:
    if density == 1:
        return vector
    result = []
    for row, draws in zip(vector.reshape(len(vector) if vector.ndim > 1 else 1, -1), noise, strict=True):
        order = sorted(range(len(row)), key=lambda i: abs(row[i]))
        for i, x in enumerate(row):
            place = order.index(i) / (len(row) - 1) if len(row) > 1 else 0.5
            keep = density - epsilon + 2 * epsilon * place
            result.append(x / (keep if is_rescaled else 1) if draws[i] < keep else 0.0)
    return np.array(result).reshape(vector.shape)


def by_hand(case: Case, name: str, points: Sequence[Array], base: Array | None, seed: int | None) -> Array:
    count, settings = len(points), case.settings
    vectors = list(points) if base is None else [p - base for p in points]
    given = [1.0] * count if case.weights is None else list(case.weights)
    weights = given if min(given) < 0 else shares(case.weights, count)
    scale, target = settings.get("scale", 1.0), Target(name, seed=seed)
    is_rescaled = settings.get("is_rescaled", True)

    def setting(key: str) -> list[float]:
        value = settings[key]
        return list(value) if isinstance(value, tuple) else [value] * count

    def draws(k: int, rows: int | None = None) -> Array:
        like = torch.empty(points[0].shape if rows is None else (rows, points[0].size // rows))
        return target.draw(k, like).numpy()

    if case.name in ("average", "sum"):
        return np.asarray(sum(w * p for w, p in zip(weights if case.name == "average" else given, points, strict=True)))
    if case.name == "passthrough":
        return scale * points[0]
    start = 0 if base is None else base
    if case.name == "slerp":
        return start + slerp_along(*vectors, weights[1], settings.get("axis"))
    if case.name in ("karcher", "multislerp"):
        return start + karcher(vectors, weights, 300 if case.name == "karcher" else 0)
    if case.name == "model-stock":
        if settings.get("by_rows") and points[0].ndim > 1:
            return start + np.stack([stock(rows) for rows in zip(*vectors, strict=True)])
        return start + stock(vectors)
    if case.name == "sce":
        return start + sce(vectors, settings.get("density", 1.0))
    if case.name == "ram":
        ratios = settings.get("gain", 0.0), settings.get("most_overlap", 0.2)
        return start + ram(vectors, settings["least_change"], *ratios)
    if case.name == "nearswap":
        return start + np.clip(vectors[0], -settings["reach"], settings["reach"])
    if case.name == "arcee-fusion":
        return fusion(points[0], points[1]) if points[0].ndim else points[1]
    if case.name.startswith("dare"):
        pairs = zip(vectors, setting("drop"), strict=True)
        vectors = [np.where(draws(k) < p, 0, v / (1 - p * is_rescaled)) for k, (v, p) in enumerate(pairs)]
    if case.name.startswith("della"):
        rows = len(points[0]) if points[0].ndim > 1 else 1
        pairs = zip(vectors, setting("density"), setting("epsilon"), strict=True)
        vectors = [
            ranked(v, d, e, draws(k, rows), is_rescaled=is_rescaled) if d < 1 else v
            for k, (v, d, e) in enumerate(pairs)
        ]
    whole = vectors
    if case.name == "ties" or (case.name == "dare-ties" and "density" in settings):
        vectors = [between(v, d, 0) for v, d in zip(vectors, setting("density"), strict=True)]
    if case.name.startswith("breadcrumbs"):
        vectors = [between(v, d, g) for v, d, g in zip(vectors, setting("density"), setting("gamma"), strict=True)]
    if settings.get("keeps_norm"):
        vectors = [restored(kept, vector, settings["keeps_norm"]) for kept, vector in zip(vectors, whole, strict=True)]
    if case.name in ("ties", "dare-ties", "della", "breadcrumbs-ties"):
        is_normalized = settings.get("is_normalized", True)
        return start + elected(vectors, weights if is_normalized else given, scale, is_normalized=is_normalized)
    used = weights if settings.get("is_normalized", False) else given
    return start + scale * np.asarray(sum(w * v for w, v in zip(used, vectors, strict=True)))


def test_every_rule_of_the_table_is_here() -> None:
    assert {case.name for case in CASES} == RULES.keys() - {"greedy"}  # which needs a task, test_merge_methods.py
    for name, row in RULES.items():
        assert row.build() is not None, name
        assert row.help


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_rule_is_its_definition(case: Case) -> None:
    networks, base = networks_of(case)
    merged, seed = merge(case, networks, base), draw_seed(case.rule, chance(7))
    for name, tensor in merged.items():
        points = [one[name].numpy() for one in networks]
        expected = by_hand(case, name, points, None if base is None else base[name].numpy(), seed)
        np.testing.assert_allclose(tensor.numpy(), expected, rtol=0, atol=1e-9, err_msg=name)
    assert any(not torch.equal(merged[n], t) for n, t in networks[0].items())


@pytest.mark.parametrize("case", [c for c in CASES if c.rule.has_shares], ids=str)
def test_all_weight_on_one_network_is_that_network(case: Case) -> None:
    networks, base = networks_of(case)
    for k in range(len(networks)):
        weights = [float(j == k) for j in range(len(networks))]
        assert close(merge(case, networks, base, weights=weights), networks[k], 1e-14)
    if base is None:
        exact = merge(case, networks, base, weights=[1.0, *[0.0] * (len(networks) - 1)])
        assert all(torch.equal(t, networks[0][n]) for n, t in exact.items())


ORDERED = ("passthrough", "arcee-fusion")
"""Rules for which the first and the second network have different roles."""


@pytest.mark.parametrize("case", [c for c in CASES if not c.rule.is_random and c.name not in ORDERED], ids=str)
def test_the_order_of_the_networks_does_not_matter(case: Case) -> None:
    networks, base = networks_of(case)
    settings = {k: v[::-1] if isinstance(v, tuple) else v for k, v in case.settings.items()}
    back = Case(case.name, settings, case.has_base, None if case.weights is None else case.weights[::-1])
    assert close(merge(case, networks, base), merge(back, networks[::-1], base), 1e-9)


@pytest.mark.parametrize("case", [c for c in CASES if c.name != "sum" and c.rule.most != 1], ids=str)
def test_equal_networks_give_that_network(case: Case) -> None:
    """If nothing is dropped and the weights sum to one, the merge of equal networks is that network."""
    settings = {
        k: {"density": 1.0, "drop": 0.0, "scale": 1.0, "least_change": 0.0}.get(k, v) for k, v in case.settings.items()
    }
    settings |= {"epsilon": 0.0} if "epsilon" in settings else {}
    settings |= {"gamma": 0.0} if "gamma" in settings else {}
    whole = Case(case.name, settings, case.has_base, None if case.weights is None else (0.25, 0.75))
    networks, base = networks_of(whole)
    assert close(merge(whole, [networks[0]] * 2, base), networks[0], 1e-12)


def test_slerp_of_parallel_tensors_is_linear() -> None:
    a = {"w": torch.tensor([1.0, 2.0, -1.0], dtype=torch.float64), "z": torch.zeros(2)}
    for factor in (3.0, -2.0, 1 + 1e-9, 0.0):
        b = {"w": factor * a["w"], "z": torch.ones(2)}
        merged = rg.merge([a, b], NOTHING, rule=RULES["slerp"].build(), weights=[3, 1]).params
        assert torch.allclose(merged["w"], 0.75 * a["w"] + 0.25 * b["w"])
        assert merged["z"].tolist() == [0.25, 0.25]


def test_slerp_is_linear_from_the_cosine_that_is_given() -> None:
    a = {"w": torch.tensor([1.0, 0.0], dtype=torch.float64)}
    for degrees, is_linear in ((20, True), (40, False), (140, False), (160, True)):
        angle = math.radians(degrees)
        b = {"w": torch.tensor([math.cos(angle), math.sin(angle)], dtype=torch.float64)}
        found = rg.merge([a, b], NOTHING, rule=RULES["slerp"].build(linear_from=0.9)).params["w"]
        mean = (a["w"] + b["w"]) / 2
        torch.testing.assert_close(found, mean if is_linear else mean / mean.norm())


def test_moves_towards_the_mean_of_directions_end_at_the_tolerance() -> None:
    networks, _ = networks_of(Case("karcher"))
    start = rg.merge(networks, NOTHING, rule=RULES["multislerp"].build()).params
    loose = rg.merge(networks, NOTHING, rule=RULES["karcher"].build(tolerance=10.0)).params
    near = rg.merge(networks, NOTHING, rule=RULES["karcher"].build(tolerance=1e-3)).params
    exact = rg.merge(networks, NOTHING, rule=RULES["karcher"].build()).params
    for name, tensor in exact.items():
        torch.testing.assert_close(loose[name], start[name])
        assert float((near[name] - tensor).norm()) <= 2e-3 * float(tensor.norm())
    assert any(not torch.equal(near[name], exact[name]) for name in exact)


def test_signs_are_elected_with_negative_weights() -> None:
    """A network with negative weight agrees if its entry has the opposite sign. Weights that cancel are not used as
    divisors.
    """
    base, entries = {"w": torch.zeros(4, dtype=torch.float64)}, ([1.0, 1.0, -1.0, 2.0], [0.5, -0.5, -4.0, -3.0])
    networks = [{"w": torch.tensor(one, dtype=torch.float64)} for one in entries]
    for weights, expected in (
        ((1.0, -0.5), [1.0, (1 + 0.25) / 0.5, -4.0, (2 + 1.5) / 0.5]),
        ((1.0, -1.0), [1.0, 1.5, -4.0, 5.0]),
        ((0.3, 0.6), [(0.3 + 0.3) / 0.9, 0.0, (-0.3 - 2.4) / 0.9, -3.0]),
    ):
        found = rg.merge(networks, NOTHING, rule=ElectedMean(), base=base, weights=weights).params["w"]
        assert torch.allclose(found, torch.tensor(expected, dtype=torch.float64), atol=1e-12)


def test_slerp_keeps_the_length_and_divides_the_angle() -> None:
    a, b = torch.tensor([1.0, 0.0], dtype=torch.float64), torch.tensor([0.0, 1.0], dtype=torch.float64)
    for t in (0.0, 0.2, 0.5, 1.0):
        for name in ("slerp", "karcher"):
            found = rg.merge([{"w": a}, {"w": b}], NOTHING, rule=RULES[name].build(), weights=[1 - t, t]).params["w"]
            expected = torch.tensor([math.cos(t * math.pi / 2), math.sin(t * math.pi / 2)], dtype=torch.float64)
            assert torch.allclose(found, expected, atol=1e-9)


def test_means_of_directions_that_cancel_are_plain_means() -> None:
    a = {"w": torch.tensor([1.0, 0.0])}
    b = {"w": torch.tensor([-3.0, 0.0])}
    assert rg.merge([a, b], NOTHING, rule=RULES["karcher"].build()).params["w"].tolist() == [-1, 0]


@pytest.mark.parametrize(("name", "setting"), [("dare", {"drop": 0.6}), ("della-linear", {"density": 0.5})])
def test_random_drops_are_unbiased(name: str, setting: dict[str, float]) -> None:
    case = Case(name, setting, True, None)
    networks, base = networks_of(case)
    assert base is not None
    expected = rg.merge(networks, NOTHING, rule=TaskArithmetic(), base=base).params
    drawn = [merge(case, networks, base, generator=chance(seed)) for seed in range(300)]
    for tensor_name, tensor in expected.items():
        values = torch.stack([one[tensor_name] for one in drawn])
        deviation = values.std(0) / len(drawn) ** 0.5
        assert float(((values.mean(0) - tensor) / deviation).abs().max()) < 4.5
        assert bool((values.std(0) > 0).all())


@pytest.mark.parametrize(
    ("name", "setting", "plain"),
    [
        ("ties", {"density": 1.0}, ElectedMean()),
        ("dare", {"drop": 0.0}, TaskArithmetic()),
        ("dare-ties", {"drop": 0.0}, ElectedMean()),
        ("della", {"density": 1.0}, ElectedMean()),
        ("della-linear", {"density": 1.0}, TaskArithmetic()),
        ("breadcrumbs", {"density": 1.0}, TaskArithmetic()),
        ("breadcrumbs-ties", {"density": 1.0, "gamma": 0.0}, ElectedMean()),
    ],
)
def test_rules_that_drop_nothing_are_the_plain_rule(name: str, setting: dict[str, float], plain: Rule) -> None:
    case = Case(name, setting, True)
    networks, base = networks_of(case)
    expected = rg.merge(networks, NOTHING, rule=plain, base=base, weights=case.weights).params
    assert all(torch.equal(t, expected[n]) for n, t in merge(case, networks, base, generator=None).items())


def test_model_stock_stays_at_the_base_where_networks_disagree() -> None:
    base = {"w": torch.zeros(2), "v": torch.zeros(2)}
    one, two = ({"w": torch.tensor([sign, 0.1]), "v": torch.tensor([1.0, 2.0])} for sign in (1.0, -1.0))
    merged = rg.merge([one, two], NOTHING, rule=RULES["model-stock"].build(), base=base).params
    assert merged["w"].tolist() == [0, 0]
    assert torch.allclose(merged["v"], one["v"])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_pieces_of_tensors_give_the_same_as_whole_ones(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    networks, base = networks_of(case)
    expected = merge(case, networks, base)
    monkeypatch.setattr("regauge.merging.blend.PIECE", 64)
    assert close(merge(case, networks, base), expected, 0)


@pytest.mark.usefixtures("streamed")
def in_one_dtype(part: int) -> list[Any]:
    """Return every rule in one of two dtypes, by turns. `make thorough` runs the other dtype."""
    return [
        pytest.param(case, dtype, marks=() if (k + j) % 2 == part else pytest.mark.thorough, id=f"{case}-{dtype}")
        for k, case in enumerate(CASES)
        for j, dtype in enumerate((torch.float32, torch.bfloat16))
    ]


@pytest.mark.usefixtures("streamed")
@pytest.mark.parametrize(("case", "dtype"), in_one_dtype(0))
def test_streamed_networks_give_the_same_as_those_in_memory(case: Case, dtype: torch.dtype, tmp_path: Path) -> None:
    """The results are equal bit by bit, for networks that are transformed by hidden orders and signs."""
    names = {"layers.0.weight": ("h", None), "layers.0.bias": ("h",)}
    symmetry = Symmetry.from_axes(names, kinds={"h": "signed"}).bind(network(0))
    networks, base = networks_of(case, dtype)
    moved = [symmetry.act(symmetry.random(chance(k)), one) for k, one in enumerate(networks)]
    paths = [save(one, tmp_path / f"{k}.safetensors") for k, one in enumerate(moved)]
    place = None if base is None else save(base, tmp_path / "base.safetensors")
    settings: dict[str, Any] = {"method": rg.WeightMatching(), "rule": case.rule, "weights": case.weights}
    expected = rg.merge(moved, symmetry, base=base, generator=chance(7), **settings)
    out, memory = tmp_path / "out.safetensors", "150MB"
    found = rg.merge(paths, symmetry, base=place, generator=chance(7), out=out, memory=memory, **settings)
    assert "streamed" in found.record.alignment
    written = load(out)
    assert {n: t.dtype for n, t in written.items()} == {n: t.dtype for n, t in networks[0].items()}
    assert all(torch.equal(written[n], t) for n, t in expected.params.items())
    assert found.record.weights == expected.record.weights


@pytest.mark.usefixtures("streamed")
def test_the_memory_of_a_rule_is_in_the_plan(tmp_path: Path) -> None:
    sizes = {"layers.0.weight": (2000, 1500)}
    paths = []
    for k in range(3):
        tensors = {n: torch.randn(s, generator=chance(k)) for n, s in sizes.items()}
        paths.append(save(tensors, tmp_path / f"{k}.safetensors"))
    out = tmp_path / "out.safetensors"
    rg.merge(paths, NOTHING, out=out, memory="250MB")
    karcher_mean = RULES["karcher"].build()
    with pytest.raises(
        ValueError, match=r"combining 3 networks by KarcherMean\(steps=100, tolerance=1e-09\) needs 3\d\d MB of memory"
    ):
        rg.merge(paths, NOTHING, rule=karcher_mean, out=rg.Output(out, overwrite=True), memory="250MB")
    rg.merge(paths, NOTHING, rule=karcher_mean, out=rg.Output(out, overwrite=True), memory="400MB")


def test_settings_of_a_rule_may_differ_from_tensor_to_tensor() -> None:
    base = network(100)
    networks = [network(seed) for seed in range(2)]
    setting = Setting.parse("bias=0.9/0.2,0.6")
    merged = rg.merge(networks, NOTHING, rule=RULES["ties"].build(density=setting), base=base).params
    for name, density in {"layers.0.weight": 0.2, "layers.1.weight": 0.6, "layers.0.bias": 0.9, "scalar": 0.2}.items():
        expected = rg.merge(networks, NOTHING, rule=RULES["ties"].build(density=density), base=base).params
        assert torch.equal(merged[name], expected[name])
    weights = (Setting.parse("0,1"), Setting.parse("weight=1,0/0.5"))
    result = rg.merge(networks, NOTHING, weights=weights)
    assert torch.equal(result.params["layers.0.weight"], networks[1]["layers.0.weight"])
    assert torch.equal(result.params["layers.1.weight"], networks[0]["layers.1.weight"])
    assert torch.equal(result.params["layers.0.bias"], networks[1]["layers.0.bias"])
    assert result.record.weights == weights
    assert "| weight=1,0/0.5 |" in result.record.card


@pytest.mark.parametrize(
    ("name", "settings", "sentence"),
    [
        ("ties", {"density": 0.0}, "density is 0.0; it is the share of entries that are kept"),
        ("ties", {"density": Setting.parse("mlp=2/0.5")}, "density is 2.0"),
        ("dare", {"drop": 1.0}, "drop is 1.0; it is the probability"),
        ("breadcrumbs", {"gamma": -0.1}, "gamma is -0.1; it is the share of the largest entries"),
        ("della", {"epsilon": math.nan}, "epsilon is nan"),
        ("passthrough", {"scale": math.inf}, "scale is inf"),
        ("karcher", {"steps": -1}, "steps is -1"),
        ("average", {"density": 0.5}, "Average has no setting 'density'; it has: none"),
        ("dare", {"density": 0.5}, "Dare has no setting 'density'; it has: drop, is_rescaled, scale, is_normalized"),
        ("slerp", {"axis": 1}, "axis is 1; it is 0 or -1"),
        ("slerp", {"linear_from": 0.0}, "linear_from is 0.0; it is a cosine"),
        ("karcher", {"tolerance": -1.0}, "tolerance is -1.0; it is an angle in radians"),
        ("ties", {"keeps_norm": 3}, "keeps_norm is 3; it is the order of a norm"),
        ("breadcrumbs", {"keeps_norm": 0}, "keeps_norm is 0; it is the order of a norm"),
        ("sce", {"density": 0.0}, "density is 0.0; it is the share"),
        ("sce", {"density": (0.1, 0.2)}, "Sce selects the same entries of all networks; give one"),
        ("ram", {"gain": -1.0}, "gain is -1.0; it is finite and not negative"),
        ("nearswap", {"reach": -1.0}, "reach is -1.0; it is how far an entry moves at most"),
    ],
)
def test_settings_that_make_no_sense_are_refused(name: str, settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        RULES[name].build(**settings)


def test_what_is_kept_and_how_it_is_added_are_two_choices() -> None:
    networks, base = networks_of(Case("breadcrumbs", has_base=True))
    twice = Breadcrumbs(0.9, 0.05, Ties(0.5))
    merged = rg.merge(networks, NOTHING, rule=twice, base=base).params
    assert base is not None
    for name, start in base.items():
        vectors = [between((one[name] - start).numpy(), 0.9, 0.05) for one in networks]
        vectors = [between(vector, 0.5, 0) for vector in vectors]
        expected = start.numpy() + elected(vectors, [1 / 3] * 3, 1.0, is_normalized=True)
        np.testing.assert_allclose(merged[name].numpy(), expected, rtol=0, atol=1e-12)
    for make in (lambda: Dare(0.5, Dare(0.5)), lambda: Della(0.5, 0.1, Dare(0.5))):
        with pytest.raises(ValueError, match="drops entries at random, and so does its inner rule"):
            make()


def test_what_does_not_fit_a_rule_is_refused() -> None:
    a, b, c = (network(k) for k in range(3))

    def refused(sentence: str, networks: list[Params], name: str, **more: Any) -> None:
        settings = more.pop("settings", {})
        with pytest.raises(ValueError, match=sentence):
            rg.merge(networks, NOTHING, rule=RULES[name].build(**settings), **more)

    refused("there is only one network to merge, but KarcherMean", [a], "karcher")
    refused("combines 2 networks or more; give more", [a], "model-stock", base=b)
    refused(r"Slerp\(axis=None, linear_from=1.0\) takes two networks, but there are 3", [a, b, c], "slerp")
    refused("takes one network, but there are 2", [a, b], "passthrough")
    refused("combines the differences of networks from a base", [a, b], "della")
    refused("combines the networks themselves, without a base", [a, b], "sum", base=c)
    refused("drops entries at random; give a torch.Generator", [a, b], "della", base=c)
    refused("ModelStock computes the shares of the networks", [a, b], "model-stock", base=c, weights=[1, 2])
    refused("Sce computes the shares of the networks", [a, b], "sce", base=c, weights=[1, 2])
    refused(r"NearSwap\(reach=0.0001\) takes one network, but there are 2", [a, b], "nearswap", base=c)
    refused(r"ArceeFusion\(\) combines the networks themselves, without a base", [a, b], "arcee-fusion", base=c)
    refused("sum to 0.0 and cannot be normalized", [a, b], "task-arithmetic", base=c, weights=[1, -1],
            settings={"is_normalized": True})  # fmt: skip
    refused("there are 3 settings for 2 networks", [a, b], "ties", base=c, settings={"density": (0.1, 0.2, 0.3)})
    refused("the density 0.1 with the epsilon 0.15 makes probabilities from -0.05 to 0.25", [a, b], "della", base=c,
            settings={"density": 0.1}, generator=chance(0))  # fmt: skip
    refused("at 'layers.1.weight' weights are", [a, b], "average", weights=[Setting.parse("1,0"), 0.0])


def test_one_network_and_a_base_make_sense_where_task_vectors_do() -> None:
    base, one = network(100), network(0)
    for case in (case for case in CASES if case.rule.least == 1 and case.has_base):
        settings = {k: v[0] if isinstance(v, tuple) else v for k, v in case.settings.items()}
        merged = merge(Case(case.name, settings, True, None), [one], base)
        assert all(bool(t.isfinite().all()) for t in merged.values())


@pytest.mark.parametrize("shape", [(7,), (5, 4), (3, 2, 2), ()])
def test_random_numbers_depend_on_the_seed_the_name_and_the_network_alone(shape: tuple[int, ...]) -> None:
    like = torch.empty(shape)

    def drawn(name: str, seed: int, k: int) -> Tensor:
        return Target(name, seed=seed).draw(k, like)

    first = drawn("a", 0, 0)
    assert torch.equal(first, drawn("a", 0, 0))
    for other in (drawn("b", 0, 0), drawn("a", 1, 0), drawn("a", 0, 1)):
        assert not torch.equal(first, other)
    if shape:
        target = Target("a", seed=0)
        parts = [target.draw(0, like[:2]), target.draw(0, like[2:])]
        assert torch.equal(torch.cat(parts), first)


@pytest.mark.parametrize(("case", "dtype"), in_one_dtype(1))
def test_a_rule_holds_no_more_than_it_tells(
    case: Case, dtype: torch.dtype, tmp_path: Path, resident: Callable[[str], int]
) -> None:
    """Networks are streamed and all are transformed. Tensors are larger than the memory that the allocator keeps."""
    shape, chosen = (1200, 1000), chance(0)
    for k in range(4):
        save({"w": torch.randn(shape, generator=chosen).to(dtype)}, tmp_path / f"{k}.safetensors")
    opened = [Checkpoint.open(tmp_path / f"{k}.safetensors") for k in range(4)]
    networks = tuple(opened[: min(3, case.rule.most or 3)])
    sides = (Group(f"g{k}", n, (Placement("w", k, scale=(1,)),), scales=1) for k, n in enumerate(shape))
    symmetry = Symmetry(tuple(sides), {"w": shape})
    elements = tuple(symmetry.random(chance(k)) for k in range(len(networks)))
    blend = Blend(case.rule, symmetry, networks, opened[3] if case.has_base else None, case.weights, elements, 5)
    blend.check()
    with large_blocks_returned():
        Path("/proc/self/clear_refs").write_text("5")
        before = resident("VmRSS")
        for piece in blend.pieces("w"):
            piece.to(dtype)
        assert resident("VmHWM") - before <= SLACK * blend.held() + (1 << 23)

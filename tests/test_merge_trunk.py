"""Partial merges: one trunk for networks of several tasks."""

import numpy as np
import pytest
import torch
from models import CASES
from torch import Tensor, nn

import regauge as rg
from regauge import Params
from regauge.merging.zip import zip_units


def chance(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def mlp(classes: int = 4) -> nn.Module:
    layers = (nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 6), nn.ReLU(), nn.Linear(6, classes))
    return nn.Sequential(*layers).double()


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Conv2d(5, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 6),
        nn.ReLU(), nn.Linear(6, 3),
    ).double()  # fmt: skip


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.down, self.head = (nn.Linear(*s) for s in ((5, 6), (6, 8), (8, 6), (6, 3)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).relu()
        return self.head((x + self.down(self.up(x).relu())).relu())  # type: ignore[no-any-return]


MODELS = {
    "mlp": (mlp, (5,), "4"),
    "cnn": (cnn, (2, 6, 6), "6"),
    "cnn, all": (cnn, (2, 6, 6), "8"),
    "residual": (lambda: Residual().double(), (5,), "head"),
}


def network(module: nn.Module, seed: int) -> Params:
    g = chance(seed)
    return {
        n: torch.rand(t.shape, generator=g, dtype=t.dtype) + 0.5
        if "running" in n
        else torch.randn(t.shape, generator=g, dtype=t.dtype)
        if t.is_floating_point()
        else t
        for n, t in module.state_dict().items()
    }


def task_of(module: nn.Module, shape: tuple[int, ...], seed: int) -> rg.Task:
    g = chance(seed)
    inputs = torch.randn(50, *shape, generator=g, dtype=torch.float64)
    return rg.Task(module, [(inputs, torch.randint(0, 3, (50,), generator=g))])


def output(module: nn.Module, params: Params, shape: tuple[int, ...]) -> Tensor:
    return rg.Task(module, []).run(params, torch.randn(9, *shape, generator=chance(9), dtype=torch.float64)).detach()


@pytest.mark.parametrize("has_data", [False, True], ids=["weights", "data"])
@pytest.mark.parametrize("model", MODELS)
def test_orbit_copies_merge_into_the_first(model: str, has_data: bool) -> None:
    make, shape, layer = MODELS[model]
    module = make()
    symmetry = rg.discover(module, (torch.ones(2, *shape, dtype=torch.float64),))
    a = network(module, 0)
    copies = [a, *(symmetry.act(symmetry.random(chance(seed)), a) for seed in (1, 2))]
    tasks = [task_of(module, shape, seed) for seed in range(3)] if has_data else None
    result = rg.merge_trunk(copies, symmetry, rg.groups_before(symmetry, layer), tasks=tasks)
    expected = output(module, a, shape)
    for params in result.params:
        assert torch.allclose(output(module, params, shape), expected, atol=1e-9)
        assert all(params[name] is result.params[0][name] for name in result.shared)
    assert all(torch.allclose(result.params[0][n], t, atol=1e-9) for n, t in a.items())
    if has_data:
        assert result.merged_metrics[0]["loss"] == pytest.approx(result.metrics[0]["loss"])


@pytest.mark.parametrize(
    "name",
    ["mlp_sine", "rnn_relu", "pixel_shuffle", "concatenation", "called_twice", "depthwise_conv", "skip_nerf",
     "squeeze_excite"],
)  # fmt: skip
def test_copies_of_other_architectures(name: str) -> None:
    case = next(case for case in CASES if case.name == name)
    module = case.module().double()
    inputs = tuple(x.double() for x in case.inputs())
    symmetry = rg.discover(module, inputs)
    a = network(module, 0)
    result = rg.merge_trunk(
        [a, symmetry.act(symmetry.random(chance(1)), a)], symmetry, [g.name for g in symmetry.groups]
    )
    expected = rg.Task(module, []).run(a, inputs)
    for params in result.params:
        assert torch.allclose(rg.Task(module, []).run(params, inputs), expected, rtol=1e-8, atol=1e-9)


def test_two_copies_are_exact() -> None:
    module = mlp()
    symmetry = rg.Symmetry.from_axes({"0.weight": ("a", None), "0.bias": ("a",), "2.weight": ("b", "a"),
                                      "2.bias": ("b",), "4.weight": (None, "b")})  # fmt: skip
    a = {n: t.float() for n, t in network(module, 0).items()}
    for params in rg.merge_trunk([a, a], symmetry, ["a", "b"]).params:
        assert all(torch.equal(params[n], t) and params[n].dtype == t.dtype for n, t in a.items())


def test_heads_of_different_sizes() -> None:
    """Networks of two tasks: one trunk, two heads."""
    modules, shape = [mlp(4), mlp(3)], (5,)
    symmetries = [rg.discover(m, (torch.ones(2, 5, dtype=torch.float64),)) for m in modules]
    trunk = network(modules[0], 0)
    first, second = (
        trunk,
        {**network(modules[1], 1), **{n: trunk[n] for n in ("0.weight", "0.bias", "2.weight", "2.bias")}},
    )
    tasks = [task_of(m, shape, k) for k, m in enumerate(modules)]
    groups = rg.groups_before(symmetries[0], "4")
    moved = symmetries[1].act(symmetries[1].random(chance(3)), second)
    result = rg.merge_trunk([first, moved], symmetries, groups, tasks=tasks)
    assert set(result.shared) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    for module, given, params in zip(modules, (first, second), result.params, strict=True):
        assert torch.allclose(output(module, params, shape), output(module, given, shape), atol=1e-9)
    assert "2 networks share 4 tensors" in result.card
    assert str(result) == result.card
    assert f"{result.merged_metrics[1]['loss']:.6g}" in result.card


def test_units_that_a_network_has_twice_make_room() -> None:
    """Each network uses half of its units, twice: merged within, both fit into one trunk without any loss."""
    module = mlp()
    halves = [network(nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 7)).double(), seed) for seed in (0, 1)]
    wide = [
        {**network(module, 2), "0.weight": torch.cat([p["0.weight"]] * 2), "0.bias": torch.cat([p["0.bias"]] * 2),
         "2.weight": torch.cat([p["2.weight"]] * 2, 1) / 2}
        for p in halves
    ]  # fmt: skip
    symmetry = rg.discover(module, (torch.ones(2, 5, dtype=torch.float64),))
    groups = rg.groups_before(symmetry, "2")
    result = rg.merge_trunk(wide, symmetry, groups, beta=1.0)
    for given, params in zip(wide, result.params, strict=True):
        assert torch.allclose(output(module, params, (5,)), output(module, given, (5,)), atol=1e-9)
    strict = rg.merge_trunk(wide, symmetry, groups, beta=0.0)
    assert all(len(set(own.tolist())) == 8 for own in strict.units[groups[0]])
    assert not torch.allclose(output(module, strict.params[0], (5,)), output(module, wide[0], (5,)), atol=1e-3)


def by_hand(similarity: np.ndarray, owners: list[int], target: int, alpha: float, budget: int) -> set[frozenset[int]]:
    """Greedy merging as the definition says, with all pairs searched every time."""
    clusters = {i: frozenset([i]) for i in range(len(owners))}
    table = {(i, j): float(similarity[i, j]) for i in clusters for j in clusters if i < j}
    while len(clusters) > target:

        def is_within(pair: tuple[int, int]) -> bool:
            left, right = ({owners[u] for u in clusters[k]} for k in pair)
            return bool(left & right)

        allowed = [pair for pair in table if budget > 0 or not is_within(pair)] or list(table)
        i, j = max(allowed, key=lambda pair: table[pair])
        budget -= is_within((i, j))
        clusters[i] |= clusters.pop(j)
        networks = [owners[u] for u in clusters[i]]
        is_full = len(set(networks)) == max(owners) + 1
        factor = alpha if is_full or len(set(networks)) < len(networks) else 1.0
        for k in clusters:
            if k != i:
                s = min(table[min(i, k), max(i, k)], table[min(j, k), max(j, k)])
                table[min(i, k), max(i, k)] = factor * s if s > 0 else s
        table = {pair: s for pair, s in table.items() if j not in pair}
    return set(clusters.values())


@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 1.0), (0.5, 0.25), (0.1, 0.0), (0.7, 0.5)])
@pytest.mark.parametrize(("count", "size"), [(2, 6), (3, 5), (2, 1)])
def test_zip_is_its_definition(alpha: float, beta: float, count: int, size: int) -> None:
    random = np.random.default_rng(count * size)
    for _ in range(5):
        similarity = random.uniform(-1, 1, (count * size, count * size))
        similarity = (similarity + similarity.T) / 2
        owners = np.repeat(np.arange(count), size)
        labels = zip_units(similarity, owners, size, alpha=alpha, beta=beta)
        assert sorted(set(labels.tolist())) == list(range(size))
        found = {frozenset(np.flatnonzero(labels == c).tolist()) for c in range(size)}
        assert found == by_hand(similarity, owners.tolist(), size, alpha, int(beta * (count - 1) * size + 1e-9))
        for c in range(size):
            own = [u for u in np.flatnonzero(labels == c) if u < size]
            assert not own or c == own[0]
        if count == 2 and beta == 0:
            assert all(len({owners[u] for u in cluster}) == 2 for cluster in found)


def test_groups_before_a_layer() -> None:
    module = mlp()
    symmetry = rg.discover(module, (torch.ones(2, 5, dtype=torch.float64),))
    sizes = [
        tuple(symmetry[name].size for name in rg.groups_before(symmetry, layer)) for layer in ("2", "4.weight", "6")
    ]
    assert sizes == [(8,), (8, 7), (8, 7, 6)]
    with pytest.raises(ValueError, match="no parameter of '0' sums over the units of a group"):
        rg.groups_before(symmetry, "0")


def test_what_is_no_trunk_is_refused() -> None:
    module = mlp()
    symmetry = rg.discover(module, (torch.ones(2, 5, dtype=torch.float64),))
    networks = [network(module, seed) for seed in (0, 1)]
    first, second, _ = (group.name for group in sorted(symmetry.groups, key=lambda group: -group.size))
    with pytest.raises(ValueError, match=r"which are not merged; merge them too, see groups_before"):
        rg.merge_trunk(networks, symmetry, [second])
    with pytest.raises(KeyError, match="there is no group 'x'"):
        rg.merge_trunk(networks, symmetry, ["x"])
    with pytest.raises(ValueError, match="give two at least"):
        rg.merge_trunk(networks[:1], symmetry, [first])
    with pytest.raises(ValueError, match="beta 2"):
        rg.merge_trunk(networks, symmetry, [first], beta=2)
    with pytest.raises(ValueError, match="there are 1 tasks for 2 networks"):
        rg.merge_trunk(networks, symmetry, [first], tasks=[task_of(module, (5,), 0)])
    with pytest.raises(ValueError, match="1 symmetries for 2 networks"):
        rg.merge_trunk(networks, [symmetry], [first])
    other = nn.Sequential(
        nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 6), nn.ReLU(), nn.Linear(6, 4)
    )
    wider = rg.discover(other.double(), (torch.ones(2, 5, dtype=torch.float64),))
    with pytest.raises(ValueError, match="8 units in the first network and 9 in another"):
        rg.merge_trunk([networks[0], network(other, 0)], [symmetry, wider], [first])

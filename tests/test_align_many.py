"""Many networks in common coordinates: cycle consistent, never worse than before, and exact where exactness can be
checked.
"""

import itertools

import pytest
import torch
from coverings import covering
from symmetries import BY_HAND, PARTS, drawn, every_element, experts, generator, mlp_symmetry, recurrent

import regauge as rg
from regauge import Element, FrankWolfe, Params, Symmetry, WeightMatching
from regauge.alignment import MergeMany, Method
from regauge.core.balance import balance_alike
from regauge.core.element import Value

METHODS: dict[str, Method] = {
    "merge": MergeMany(max_rounds=20),
    "merge from the identity": MergeMany(start="identity", max_rounds=20),
    "merge at once": MergeMany(core=2, max_rounds=20),
    "frank-wolfe": FrankWolfe(max_steps=10),
    "frank-wolfe from the identity": FrankWolfe(max_steps=10, start="identity"),
}
ISOMETRIES = ("permutation", "sign", "shift", "linear")


def closeness(symmetry: Symmetry, moved: tuple[Params, ...], networks: list[Params]) -> float:
    """Return the objective by its definition, pair by pair."""
    total = 0.0
    for (x, p), (y, q) in itertools.combinations(zip(moved, networks, strict=True), 2):
        for name in symmetry.sites:
            gap, before = (x[name] - y[name]).square().sum(), p[name].square().sum() + q[name].square().sum()
            total += float(before - gap) / 2
    return total


def orbit(symmetry: Symmetry, network: Params, seed: int, kind: str) -> Params:
    parts = PARTS.get(kind, ISOMETRIES)
    return symmetry.act(symmetry.random(generator(seed), parts), network)


def is_close(x: Element, y: Element) -> bool:
    """Return whether values are equal, up to rounding for values that are not integers."""
    fields = ("perm", "sign", "shift", "scale", "matrix")
    for name in x:
        for left, right in ((getattr(x[name], f), getattr(y[name], f)) for f in fields):
            if left is not None and not torch.allclose(left.double(), right.double(), atol=1e-9):
                return False
    return True


@pytest.mark.parametrize(("name", "method"), covering([name for name in BY_HAND if name != "scaled"], METHODS, of=5))
def test_it_never_falls_nor_ends_below_the_identity_and_reports_what_it_reaches(name: str, method: str) -> None:
    symmetry = BY_HAND[name]
    networks = [drawn(symmetry, seed) for seed in (0, 100, 200)]
    kept = [{key: t.clone() for key, t in network.items()} for network in networks]
    result = rg.align_many(networks, symmetry, method=METHODS[method])
    assert all(torch.equal(n[key], k[key]) for n, k in zip(networks, kept, strict=True) for key in n)
    assert result.objective >= result.initial
    assert all(x <= y for x, y in itertools.pairwise(result.history))
    assert result.history[-1] == pytest.approx(result.objective)
    found = [one.element for one in balance_alike(networks, symmetry)]
    balanced = [symmetry.act(element, network) for element, network in zip(found, networks, strict=True)]
    given, moved = (tuple(symmetry.act(found[0], one) for one in several) for several in (networks, result.params))
    assert result.initial == pytest.approx(closeness(symmetry, given, balanced), abs=1e-8)
    assert result.objective == pytest.approx(closeness(symmetry, moved, balanced), abs=1e-7)
    for element, before, after in zip(result.elements, networks, result.params, strict=True):
        moved = symmetry.act(element, before)
        assert all(torch.equal(moved[key], after[key]) for key in before)
    assert all(torch.equal(networks[0][key], result.params[0][key]) for key in networks[0])


@pytest.mark.parametrize(("name", "method"), covering(BY_HAND, ["merge", "frank-wolfe"], of=2))
def test_moving_between_networks_is_cycle_consistent(name: str, method: str) -> None:
    symmetry = BY_HAND[name]
    result = rg.align_many([drawn(symmetry, seed) for seed in range(3)], symmetry, method=METHODS[method])
    for i, j, k in itertools.permutations(range(3)):
        through = symmetry.compose(result.pairwise(i, j), result.pairwise(j, k))
        direct = result.pairwise(i, k)
        assert is_close(through, direct)
        if name in ("permutation", "signed", "dihedral", "experts", "three levels"):
            for group in direct:
                for field in ("perm", "sign", "shift"):
                    left, right = getattr(through[group], field), getattr(direct[group], field)
                    assert left is None or torch.equal(left, right)
    assert is_close(result.pairwise(2, 2), symmetry.identity())
    assert is_close(result.pairwise(0, 2), result.elements[2])


PLANTED = {
    **{kind: mlp_symmetry(6, 9, 3, kind=kind) for kind in ("permutation", "signed", "dihedral", "orthogonal")},
    "scaled": mlp_symmetry(6, 9, 3, kind="scaled"),
    "experts": BY_HAND["experts"],
    "normalized groups": BY_HAND["normalized groups"],
    "attention": BY_HAND["attention"],
    "stream": BY_HAND["stream"],
}


@pytest.mark.parametrize(("name", "method"), covering(PLANTED, ["merge", "frank-wolfe"], part=1, of=2))
def test_copies_of_one_network_coincide_in_the_universe(name: str, method: str) -> None:
    symmetry = PLANTED[name]
    first = drawn(symmetry, 7)
    parts = ("permutation", "sign", "scale") if name == "scaled" else ISOMETRIES
    copies = [symmetry.act(symmetry.random(generator(seed), parts), first) for seed in range(3)]
    result = rg.align_many([first, *copies], symmetry, method=METHODS[method])
    for moved in result.params:
        assert all(torch.allclose(moved[key], first[key], atol=1e-5) for key in first)


@pytest.mark.parametrize("method", ["merge", "frank-wolfe"])
def test_the_order_of_the_networks_does_not_matter_on_planted_problems(method: str) -> None:
    symmetry = BY_HAND["signed"]
    first, noise = drawn(symmetry, 1), [drawn(symmetry, seed + 50) for seed in range(4)]
    networks = [orbit(symmetry, {n: t + 0.1 * noise[k][n] for n, t in first.items()}, k, "signed") for k in range(4)]
    one = rg.align_many(networks, symmetry, method=METHODS[method])
    other = rg.align_many([networks[k] for k in (2, 0, 3, 1)], symmetry, method=METHODS[method])
    assert one.objective == pytest.approx(other.objective)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["permutation", "signed"])
def test_two_networks_and_one_group_are_solved_exactly(kind: str, method: str) -> None:
    symmetry = mlp_symmetry(2, 3, 2, kind=kind)
    for seed in range(3):
        networks = [drawn(symmetry, seed), drawn(symmetry, seed + 50)]
        result = rg.align_many(networks, symmetry, method=METHODS[method])
        pair = rg.align(*networks, symmetry)
        assert result.objective == pytest.approx(pair.objective, abs=1e-9)
        assert all(torch.allclose(result.params[1][key], pair.params[key]) for key in pair.params)


def best_of_all(symmetry: Symmetry, networks: list[Params]) -> float:
    orbits = [[symmetry.act(g, network) for g in every_element(symmetry)] for network in networks[1:]]
    return max(closeness(symmetry, (networks[0], *moved), networks) for moved in itertools.product(*orbits))


@pytest.mark.parametrize("symmetry", [mlp_symmetry(2, 3, 2), experts(2, 2, 3)], ids=["units", "experts"])
def test_restarts_reach_the_best_of_all_elements_of_three_networks(symmetry: Symmetry) -> None:
    for seed in range(3):
        networks = [drawn(symmetry, seed + k) for k in (0, 20, 40)]
        result = rg.align_many(networks, symmetry, method=MergeMany(restarts=8), generator=generator(0))
        assert len(result.starts) == 9
        assert result.objective == pytest.approx(best_of_all(symmetry, networks))


def test_the_mean_of_copies_beats_the_noise_of_each() -> None:
    """For three noisy copies with a weak anchor, matching to the mean of the others uses more information than any
    pair.
    """
    symmetry = mlp_symmetry(3, 20, 3)
    first = drawn(symmetry, 0)
    networks = []
    for k in range(8):
        noise = drawn(symmetry, 10 + k)
        networks.append(orbit(symmetry, {n: t + 0.9 * noise[n] for n, t in first.items()}, k, "permutation"))
    together = rg.align_many(networks, symmetry)
    alone = rg.align_many(networks, symmetry, method=WeightMatching())
    assert closeness(symmetry, together.params, networks) > closeness(symmetry, alone.params, networks)


def test_rounds_of_all_networks_at_once_end_near_where_visits_one_by_one_end() -> None:
    symmetry = mlp_symmetry(3, 20, 3)
    first = drawn(symmetry, 0)
    noisy = [{n: t + 0.5 * drawn(symmetry, 10 + k)[n] for n, t in first.items()} for k in range(24)]
    networks = [orbit(symmetry, network, k, "permutation") for k, network in enumerate(noisy)]
    at_once, visited = (rg.align_many(networks, symmetry, method=MergeMany(core=core)) for core in (16, 24))
    assert at_once.objective > visited.objective - 0.05 * (visited.objective - visited.initial)


def test_a_method_for_pairs_aligns_everything_to_the_first() -> None:
    symmetry = mlp_symmetry(3, 6, 5, 2)
    networks = [drawn(symmetry, seed) for seed in range(3)]
    result = rg.align_many(networks, symmetry, method=WeightMatching())
    pairs = [rg.align(networks[0], other, symmetry) for other in networks[1:]]
    assert result.objective == pytest.approx(sum(pair.objective for pair in pairs))
    for moved, pair in zip(result.params[1:], pairs, strict=True):
        assert all(torch.equal(moved[key], pair.params[key]) for key in moved)


def test_one_network_stays_and_buffers_move_along() -> None:
    symmetry = Symmetry.from_axes({"w": ("h", None), "mean": ("h",)}, buffers=["mean"])
    a = {"w": drawn(mlp_symmetry(4, 6, 2), 0)["0.weight"], "mean": torch.arange(6.0), "count": torch.tensor(3)}
    alone = rg.align_many([a], symmetry)
    assert (alone.objective, alone.is_converged) == (0.0, True)
    assert all(torch.equal(alone.params[0][key], a[key]) for key in a)
    perm = torch.randperm(6, generator=generator(1))
    b = {"w": a["w"][perm], "mean": a["mean"][perm] + 100, "count": torch.tensor(4)}
    moved = rg.align_many([a, b], symmetry).params[1]
    assert torch.equal(moved["w"], a["w"])
    assert torch.equal(moved["mean"], a["mean"] + 100)
    assert int(moved["count"]) == 4


def test_scales_are_those_of_the_first_network() -> None:
    """The result does not depend on the scales of the other networks."""
    symmetry = mlp_symmetry(4, 6, 5, 3, kind="scaled")
    networks = [drawn(symmetry, seed) for seed in range(3)]
    scaled = [networks[0], *(symmetry.act(symmetry.random(generator(k), ("scale",)), networks[k]) for k in (1, 2))]
    first, second = (rg.align_many(n, symmetry) for n in (networks, scaled))
    for x, y in zip(first.params, second.params, strict=True):
        assert all(torch.allclose(x[key], y[key], rtol=1e-6) for key in x)
    assert first.objective >= first.initial


def test_networks_that_are_aligned_already_stay() -> None:
    symmetry = BY_HAND["orthogonal"]
    first = drawn(symmetry, 4)
    networks = [{n: t + 0.05 * drawn(symmetry, 30 + k)[n] for n, t in first.items()} for k in range(3)]
    result = rg.align_many(networks, symmetry)
    assert result.objective >= result.initial > 0
    for group in result.elements[1]:
        matrix = result.elements[1][group].matrix
        assert matrix is not None
        assert torch.allclose(matrix, torch.eye(len(matrix)).double(), atol=0.3)


def test_the_mean_network_chooses_between_restarts_when_there_is_a_task() -> None:
    symmetry = recurrent(8)
    networks = [drawn(symmetry, seed) for seed in range(3)]
    target = {n: torch.stack([p[n] for p in networks]).mean(0) for n in networks[0]}

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for key, tensor in target.items():
                self.register_parameter(key, torch.nn.Parameter(tensor))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ (self.out @ self.hh @ self.ih).T

    inputs = torch.randn(20, 5, generator=generator(9), dtype=torch.float64)
    task = rg.Task(Net(), [(inputs, torch.zeros(20, 2).double())], torch.nn.functional.mse_loss)
    method = MergeMany(restarts=6)

    def loss(moved: tuple[Params, ...]) -> float:
        return task.evaluate({n: torch.stack([p[n] for p in moved]).mean(0) for n in moved[0]})["loss"]

    chosen = rg.align_many(networks, symmetry, method=method, task=task, generator=generator(0))
    best = rg.align_many(networks, symmetry, method=method, generator=generator(0))
    assert chosen.starts == best.starts
    assert best.objective == max(best.starts)
    assert chosen.objective >= chosen.initial
    assert loss(chosen.params) < loss(best.params)


def test_wrong_input_is_refused() -> None:
    symmetry = mlp_symmetry(2, 3, 2)
    a = drawn(symmetry, 0)
    with pytest.raises(ValueError, match="there is no network to align"):
        rg.align_many([], symmetry)
    broken = {**a, "0.bias": torch.full((3,), float("nan")).double()}
    with pytest.raises(ValueError, match=r"'0.bias' of the third network holds NaN or Inf in 3 of"):
        rg.align_many([a, a, broken], symmetry)
    with pytest.raises(ValueError, match="both must come from the same architecture"):
        rg.align_many([a, drawn(mlp_symmetry(2, 4, 2), 0)], symmetry)
    population = {n: t.expand(4, *t.shape) for n, t in a.items()}
    with pytest.raises(ValueError, match="give a list of single networks, not populations"):
        rg.align_many([population, population], symmetry)
    with pytest.raises(
        ValueError, match=r"restarts=1 visit the networks in random order; give align a torch.Generator"
    ):
        rg.align_many([a, a], symmetry, method=MergeMany(restarts=1))
    with pytest.raises(ValueError, match="start is 'first'; choose 'sequence' or 'identity'"):
        MergeMany(start="first")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least one round is needed"):
        MergeMany(max_rounds=0)
    with pytest.raises(ValueError, match="core=1"):
        MergeMany(core=1)
    with pytest.raises(ValueError, match="tolerance=-1"):
        MergeMany(tolerance=-1)
    with pytest.raises(ValueError, match=r"inner.init is an element for one pair"):
        MergeMany(inner=WeightMatching(init=Element({"h1": Value(torch.arange(3))})))


def test_the_report_says_what_to_do() -> None:
    symmetry = mlp_symmetry(4, 20, 20, 3)
    networks = [drawn(symmetry, seed) for seed in range(4)]
    assert "a local optimum" in str(rg.align_many(networks, symmetry))
    short = rg.align_many(networks, symmetry, method=MergeMany(start="identity", max_rounds=1))
    assert not short.is_converged
    assert "stopped before convergence" in short.report

"""Many networks at once: families, trees, and networks that cannot be compared."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from symmetries import drawn, generator, mlp_symmetry
from torch import Tensor

import regauge as rg
from regauge.checkpoints.writing import save
from regauge.cli.main import main
from regauge.comparison import Lineage, compare_many, tree_lines
from regauge.comparison.averages import Average, find_averages
from regauge.comparison.one_gauge import _find_pruned, in_one_gauge
from regauge.comparison.trees import Branch, Points, _conductances, grow_tree, join_neighbors, span
from regauge.pruning import cut_params, cut_symmetry

WIDE = mlp_symmetry(20, 40, 10, kind="scaled")


def path_lengths(branches: list[Branch], names: list[str]) -> Tensor:
    """Return the lengths of the paths between networks, as sums of branches."""
    nodes = list(dict.fromkeys([*names, *(node for one in branches for node in (one.parent, one.child))]))
    lengths = torch.full((len(nodes), len(nodes)), torch.inf, dtype=torch.float64).fill_diagonal_(0)
    for one in branches:
        i, j = nodes.index(one.parent), nodes.index(one.child)
        lengths[i, j] = lengths[j, i] = one.length
    for k in range(len(nodes)):
        lengths = torch.minimum(lengths, lengths[:, k : k + 1] + lengths[k : k + 1])
    return lengths[: len(names), : len(names)]


@pytest.mark.parametrize("count", [2, 3, 4, 7, 12])
def test_distances_of_a_tree_give_that_tree(count: int) -> None:
    source, names = generator(count), [f"n{k}" for k in range(count)]
    nodes, branches = ["root"], []
    for k in range(count):  # Networks hang on ancestors, or on one another: a branch of length zero then.
        parent = nodes[int(torch.randint(len(nodes), (), generator=source))]
        inner = f"inner {k}"
        branches.append(Branch(parent, inner, float(torch.rand((), generator=source)) + 0.1))
        branches.append(Branch(inner, names[k], 0.0 if k % 3 == 0 else float(torch.rand((), generator=source))))
        nodes.append(inner)
    distances = path_lengths(branches, names)
    found = join_neighbors(names, distances)
    assert torch.allclose(path_lengths(found, names), distances, atol=1e-10)
    assert {name for name in names if any(name in (one.parent, one.child) for one in found)} == {*names}
    text = "\n".join(tree_lines(found))
    assert all(name in text for name in names)


def walked(seed: int, parents: dict[int, int], *, drift: float = 0.0) -> Tensor:
    """Return points of a random walk along a tree. With a drift, all steps have a component in one direction."""
    source = generator(seed)
    along, start = torch.linalg.qr(torch.randn(3000, 2, generator=source, dtype=torch.float64)).Q.T
    points = [20 * start + 5 * along]
    for parent in parents.values():
        length = float(torch.randint(10, 60, (), generator=source))
        noise = torch.randn(3000, generator=source, dtype=torch.float64) * (length / 3000) ** 0.5
        points.append(points[parent] + noise + drift * length * along)
    return torch.stack(points)


def random_parents(seed: int, count: int = 20) -> dict[int, int]:
    return {k: int(torch.randint(k, (), generator=generator(1000 * seed + k))) for k in range(1, count)}


def points_of(values: Tensor, names: list[str], pruned: Tensor | None = None) -> Points:
    """Return points with three tensors of four blocks each."""
    pieces = values.tensor_split(12, 1)
    cut = torch.zeros(len(names), len(names), dtype=torch.bool) if pruned is None else pruned
    rounding = 1e-5 * values.norm(dim=1)
    products = torch.stack([piece @ piece.T for piece in pieces])
    sizes = [values.shape[1]] * len(names)
    return Points(names, products, torch.arange(12) // 4, cut, rounding, values.shape[1], sizes)


def hung(tree: list[Branch]) -> dict[str, str]:
    return {one.child: one.parent for one in tree}


TREES = {
    "two networks": {1: 0},
    "three": {1: 0, 2: 0},
    "a chain": {k: k - 1 for k in range(1, 9)},
    "a star": dict.fromkeys(range(1, 9), 0),
    "a binary tree": {k: (k - 1) // 2 for k in range(1, 15)},
    **{f"random {seed}": random_parents(seed) for seed in range(3)},
}


@pytest.mark.parametrize("kind", TREES)
@pytest.mark.parametrize("drift", [0.0, 0.1])
def test_each_network_hangs_on_its_parent(kind: str, drift: float) -> None:
    parents = TREES[kind]
    names = [f"n{k:02}" for k in range(len(parents) + 1)]
    values = walked(len(parents), parents, drift=drift)
    tree = grow_tree(points_of(values, names))
    true = {names[c]: names[p] for c, p in parents.items()}
    assert all(true[one.child] == one.parent for one in tree if one.is_certain)
    assert tree[-1].parent == "n00"
    right = sum(hung(tree)[child] == parent for child, parent in true.items())
    if not drift:
        assert right == len(true) == sum(one.is_certain for one in tree)
    assert right >= 0.6 * len(true)
    for one in tree:
        i, j = names.index(one.parent), names.index(one.child)
        assert one.length == pytest.approx(float((values[i] - values[j]).square().sum()), rel=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_exact_path_lengths_give_the_tree_exactly(seed: int) -> None:
    """With exactly orthogonal steps, the conductances of pairs without a branch are zero."""
    parents = random_parents(seed)
    lengths = torch.rand(19, generator=generator(seed), dtype=torch.float64) + 0.1
    values = torch.zeros(20, 20, dtype=torch.float64)
    values[0, 0] = 10
    for child, parent in parents.items():
        values[child] = values[parent]
        values[child, child] += lengths[child - 1].sqrt()
    conductances = _conductances(torch.cdist(values, values).square().numpy())
    expected = torch.zeros(20, 20, dtype=torch.float64)
    for child, parent in parents.items():
        expected[child, parent] = expected[parent, child] = 1 / lengths[child - 1]
    assert torch.allclose(torch.from_numpy(conductances), expected, atol=1e-6)


def test_shared_drift_misleads_distances_and_not_conductances() -> None:
    wrong = 0
    for seed in range(3):
        parents = random_parents(seed)
        values = walked(seed, parents, drift=0.2)
        squares = torch.cdist(values, values).square().numpy()
        true = {frozenset(pair) for pair in parents.items()}
        assert {frozenset(one) for one in span(_conductances(squares))} == true
        wrong += len(true - {frozenset(one) for one in span(-squares)})
    assert wrong > 3


def test_the_order_of_networks_changes_no_tree() -> None:
    names = [f"n{k:02}" for k in range(20)]
    values = walked(3, random_parents(3), drift=0.1)
    order = torch.randperm(20, generator=generator(5)).tolist()
    tree = grow_tree(points_of(values, names))
    again = grow_tree(points_of(values[order], [names[k] for k in order]))
    assert hung(tree) == hung(again)
    supports = [{one.child: one.support for one in found} for found in (tree, again)]
    assert supports[0] == pytest.approx(supports[1], abs=0.03)


def test_copies_hang_on_one_network_and_say_so() -> None:
    names = ["base", "child", "copy", "grandchild"]
    values = walked(1, {1: 0, 2: 1})
    values = torch.stack([values[0], values[1], values[1] * (1 + 1e-8), values[2]])
    tree = grow_tree(points_of(values, names))
    assert hung(tree) == {"child": "base", "copy": "child", "grandchild": "child"}
    assert [one.child for one in tree if one.is_copy] == ["copy"]
    assert any("copy  (" in line and "a copy, or the original" in line for line in tree_lines(tree))


def test_pruned_networks_hang_on_the_network_that_was_pruned() -> None:
    """A network that was trained further from the pruned network is placed below it, although norms decrease on the
    way.
    """
    values = walked(2, {1: 0, 2: 0, 3: 2})
    pruned = torch.where(values[0].abs() > values[0].abs().quantile(0.4), values[0], 0.0)
    other = torch.where(values[2].abs() > values[2].abs().quantile(0.4), values[2], 0.0)
    tuned = pruned + 0.05 * torch.randn(3000, generator=generator(9), dtype=torch.float64)
    values = torch.cat([values, torch.stack([pruned, other, tuned])])
    names = ["base", "a", "b", "c", "pruned base", "pruned b", "tuned"]
    tree = grow_tree(points_of(values, names, _find_pruned(values)))
    assert hung(tree) == {
        "a": "base", "b": "base", "c": "b", "pruned base": "base", "pruned b": "b", "tuned": "pruned base",
    }  # fmt: skip


def test_averages_hang_on_their_heaviest_parent_and_have_children() -> None:
    values = walked(4, {1: 0, 2: 0, 3: 0})
    merge = 0.6 * values[1] + 0.4 * values[2]
    child = merge + 0.1 * torch.randn(3000, generator=generator(9), dtype=torch.float64)
    names = ["base", "a", "b", "c", "merge", "child"]
    average = Average("merge", ("a", "b"), (0.6, 0.4), False)
    tree = grow_tree(points_of(torch.cat([values, torch.stack([merge, child])]), names), [average])
    assert hung(tree) == {"a": "base", "b": "base", "c": "base", "merge": "a", "child": "merge"}


def grown(seed: int, *, drift: float = 0.0) -> tuple[Tensor, dict[int, int], list[Average], set[int]]:
    """Return a random walk with pruned networks, averages and copies, from which further networks are trained.

    The results are the points, the parents of all networks except averages, the averages, and the networks that were
    trained.
    """
    source = generator(seed)
    along, start = torch.linalg.qr(torch.randn(3000, 2, generator=source, dtype=torch.float64)).Q.T
    points, parents, averages, trained = [20 * start + 5 * along], dict[int, int](), list[Average](), set[int]()
    originals = [0]
    for k in range(1, 16):
        parent, other = (originals[int(torch.randint(k, (), generator=source))] for _ in range(2))
        kind = int(torch.randint(9, (), generator=source)) if k > 2 else 9
        originals.append(k)
        parents[k] = parent
        if kind == 0 and not (points[parent] == 0).any():
            limit = points[parent].abs().quantile(0.2 + 0.01 * k)
            points.append(points[parent].where(points[parent].abs() > limit, 0.0))
        elif kind == 1 and other != parent:
            share = 0.3 + 0.4 * float(torch.rand((), generator=source))
            points.append(share * points[parent] + (1 - share) * points[other])
            averages.append(Average(f"n{k:02}", (f"n{parent:02}", f"n{other:02}"), (share, 1 - share), False))
            del parents[k]
        elif kind == 2:
            points.append(points[parent] * (1 + 1e-8))
            originals[k] = parent
        else:
            length = float(torch.randint(10, 60, (), generator=source))
            noise = torch.randn(3000, generator=source, dtype=torch.float64) * (length / 3000) ** 0.5
            points.append(points[parent] + noise + drift * length * along)
            trained.add(k)
    return torch.stack(points), parents, averages, trained


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("drift", [0.0, 0.1])
def test_children_of_pruned_networks_and_averages_hang_on_them(seed: int, drift: float) -> None:
    """The children get the correct parent at any depth, with and without a drift, and no certain branch is wrong."""
    values, parents, averages, trained = grown(seed, drift=drift)
    names = [f"n{k:02}" for k in range(len(values))]
    tree = grow_tree(points_of(values, names, _find_pruned(values)), averages)
    true = {names[c]: names[p] for c, p in parents.items()}
    steps = [one for one in tree if one.child in {names[k] for k in trained}]
    assert all(true[one.child] == one.parent for one in tree if one.child in true and one.is_certain)
    right = sum(true[one.child] == one.parent for one in steps)
    assert right == len(trained) if not drift else right >= 0.8 * len(trained)
    assert sum(one.is_certain for one in steps) >= (0.8 if not drift else 0.5) * len(trained)


def test_networks_between_two_others_are_not_children_of_their_average() -> None:
    """A network on the way from one parent of an average to the other parent, and a common parent of both, are close to
    the average.
    """
    values = walked(6, {1: 0, 2: 1, 3: 2, 4: 0, 5: 4})
    merges = [0.5 * (values[0] + values[3]), 0.5 * (values[1] + values[5])]
    names = [*(f"n{k:02}" for k in range(6)), "merge", "other"]
    averages = [
        Average("merge", ("n00", "n03"), (0.5, 0.5), False),
        Average("other", ("n01", "n05"), (0.5, 0.5), False),
    ]
    tree = grow_tree(points_of(torch.cat([values, torch.stack(merges)]), names), averages)
    own = {child: parent for child, parent in hung(tree).items() if child in names[:6]}
    assert own == {"n01": "n00", "n02": "n01", "n03": "n02", "n04": "n00", "n05": "n04"}


def test_of_two_networks_that_may_have_been_pruned_none_is_certain() -> None:
    values = walked(2, {1: 0, 2: 0})
    cut = [values[1].where(values[1].abs() > values[1].abs().quantile(share), 0.0) for share in (0.2, 0.4)]
    names = ["base", "a", "b", "pruned", "pruned more"]
    values = torch.cat([values, torch.stack(cut)])
    found = {one.child: one for one in grow_tree(points_of(values, names, _find_pruned(values)))}
    assert (found["pruned"].parent, found["pruned"].is_certain) == ("a", True)
    assert (found["pruned more"].parent, found["pruned more"].support) == ("pruned", 0.5)


def test_siblings_of_a_missing_base_get_an_ancestor() -> None:
    values = walked(5, {1: 0, 2: 0})[1:]
    values *= 30 / values.norm(dim=1, keepdim=True)  # Trained for equally long.
    tree = grow_tree(points_of(values, ["a", "b"]))
    assert hung(tree) == {"a": "ancestor 1", "b": "ancestor 1"}
    assert tree[-1].parent == "ancestor 1"


def test_doubt_is_written_next_to_a_branch() -> None:
    lines = tree_lines([Branch("a", "b", 1.0, 0.75), Branch("a", "c", 2.0, 0.95), Branch("a", "d", 3.0)])
    assert lines[1:] == ["├─ b  (1, uncertain: 75%)", "├─ c  (2)", "└─ d  (3, uncertain)"]


def test_no_branch_by_distances_alone_is_certain() -> None:
    distances = torch.tensor([[0.0, 2, 3], [2, 0, 3], [3, 3, 0]], dtype=torch.float64)
    assert not any(one.is_certain for one in join_neighbors(["a", "b", "c"], distances))


def family() -> dict[str, rg.Params]:
    """Return a base with two children, one of which is transformed and has a child, and a stranger."""
    steps = [drawn(WIDE, seed) for seed in range(5)]

    def on(params: rg.Params, k: int, share: float) -> rg.Params:
        return {name: tensor + share * steps[k][name] for name, tensor in params.items()}

    base = steps[0]
    first, second = on(base, 1, 0.1), on(base, 2, 0.2)
    grandchild = WIDE.act(WIDE.random(generator(1), ("permutation",)), on(second, 3, 0.1))
    return {"base": base, "first": first, "second": second, "grandchild": grandchild, "stranger": steps[4]}


def test_families_and_their_trees() -> None:
    networks = family()
    found = compare_many(list(networks), lambda a, b: rg.compare(networks[a], networks[b], WIDE, draws=99))
    assert found.families == (("base", "first", "second", "grandchild"), ("stranger",))
    again = compare_many(
        list(networks), lambda a, b: rg.compare(networks[a], networks[b], WIDE, draws=9), read=networks.__getitem__
    )
    assert again.families == found.families
    assert hung(list(again.trees[0])) == {"first": "base", "second": "base", "grandchild": "second"}
    (tree,) = found.trees
    names = list(found.families[0])
    lengths = path_lengths(list(tree), names)
    assert torch.allclose(lengths, found.distances[:4, :4].square(), rtol=0.2, atol=2e-3)
    assert lengths[2, 3] < lengths[0, 3]  # The grandchild hangs on its parent.
    with pytest.raises(ValueError, match="with different names"):
        compare_many(["a", "a"], lambda a, b: rg.compare(networks["base"], networks["base"], WIDE))


def compared(networks: dict[str, rg.Params]) -> Lineage:
    """Return the lineage of networks with the symmetry `WIDE`."""
    return compare_many(list(networks), lambda a, b: rg.compare(networks[a], networks[b], WIDE, draws=9))


def test_a_merge_names_its_parents_wherever_all_are_on_their_orbits() -> None:
    """Distances between stored networks would weight units by their scales."""
    shares, networks = (0.5, 0.3, 0.2), {"base": drawn(WIDE, 0)}
    for k in range(3):
        noise = drawn(WIDE, 10 + k)
        networks[f"parent {k}"] = {name: t + 0.1 * noise[name] for name, t in networks["base"].items()}
    parents = [networks[f"parent {k}"] for k in range(3)]
    merge = {
        name: torch.stack([w * one[name] for w, one in zip(shares, parents, strict=True)]).sum(0) for name in parents[0]
    }
    for seed in range(3):
        moved = {
            name: WIDE.act(WIDE.random(generator(100 * seed + k)), one)
            for k, (name, one) in enumerate({**networks, "merge": merge}.items())
        }
        found = compared(moved)
        (average,) = found.averages
        assert (average.child, average.parents) == ("merge", ("parent 0", "parent 1", "parent 2"))
        assert average.weights == pytest.approx(shares, abs=0.02)
        if seed == 0:  # A copy of the merge is one, too.
            moved["again"] = WIDE.act(WIDE.random(generator(9)), moved["merge"])
            pair = compared(moved).averages
            assert {one.child: one.parents for one in pair} == dict.fromkeys(("merge", "again"), average.parents)
            del moved["again"]
        del moved["merge"]
        assert not compared(moved).averages


@pytest.mark.parametrize("larger", [(), ("n4", "n5")])
def test_a_merge_names_its_parents_also_among_unrelated_networks(larger: tuple[str, ...]) -> None:
    """Distances to unrelated networks are not distances between points, and are not used.

    Networks with additional tokens are not used either, because some of their distances cover only a part of the
    parameters.
    """
    source = generator(4)
    base, *steps = torch.randn(6, 600, generator=source, dtype=torch.float64)
    points = [base, *(base + 0.2 * step for step in steps)]
    points.append(0.5 * points[1] + 0.3 * points[2] + 0.2 * points[3])
    names = [*(f"n{k}" for k in range(7)), *(f"stranger {k}" for k in range(6))]
    lengths = 35 * (0.5 + torch.rand(13, 13, generator=source, dtype=torch.float64))

    def compare(a: str, b: str) -> Any:
        i, j = names.index(a), names.index(b)
        is_one = j < 7
        length = float((points[i] - points[j]).norm()) if is_one else float(lengths[i, j])
        norms = [float(points[k].norm()) if k < 7 else 24.0 for k in (i, j)]
        return SimpleNamespace(
            verdict="descended" if is_one else "unrelated",
            orbit_distance=length,
            relative_distance=length / norms[0],
            balanced=(length, *norms),
            compared=0.9 if a in larger and b != "n6" else 1,
        )

    found = compare_many(names, compare)
    (average,) = found.averages
    assert (average.child, average.parents) == ("n6", ("n1", "n2", "n3"))
    assert average.weights == pytest.approx((0.5, 0.3, 0.2), abs=0.05)
    assert [len(family) for family in found.families] == [7, *[1] * 6]


@pytest.mark.parametrize("shares", [{4: 0.5, 7: 0.5}, {2: 0.2, 4: 0.5, 7: 0.3}])
def test_inexact_distances_add_no_parents(shares: dict[int, float]) -> None:
    """Distances up to symmetry have errors of one percent. A relative with a weight of this size is not a parent."""
    right = 0
    for seed in range(12):
        source = generator(seed)
        steps = torch.randn(11, 2000, generator=source, dtype=torch.float64)
        points = [20 * steps[0]]
        for k in range(1, 9):
            points.append(points[int(torch.randint(k, (), generator=source))] + steps[k])
        points.append(sum(share * points[k] for k, share in shares.items()))
        values = torch.stack([*points, points[9] + 0.4 * steps[10]])
        error = torch.randn(11, 11, generator=source, dtype=torch.float64)
        squares = torch.cdist(values, values).square() * (1 + 0.01 * (error + error.T) / 2**0.5)
        names = [f"n{k}" for k in range(11)]
        found = find_averages(names, squares.fill_diagonal_(0), names, {})
        right += [one.parents for one in found] == [tuple(f"n{k}" for k in shares)]
    assert right >= 11


def test_moved_copies_change_no_inner_product() -> None:
    """Points in one gauge do not depend on the positions of the networks on their orbits."""
    networks = {name: one for name, one in family().items() if name != "stranger"}
    names = [*networks]
    steps = {"base": 0.0, "first": 0.1, "second": 0.2, "grandchild": 0.3}
    distances = torch.tensor([[9 * abs(steps[a] - steps[b]) + 9 for a in names] for b in names], dtype=torch.float64)
    found = in_one_gauge(names, networks.__getitem__, WIDE, distances)
    moved = {n: WIDE.act(WIDE.random(generator(k)), one) for k, (n, one) in enumerate(networks.items())}
    again = in_one_gauge(names, moved.__getitem__, WIDE, distances)
    assert found is not None
    assert again is not None
    first, second = (one.products.sum(0) for one in (found, again))
    assert torch.allclose(first, second, rtol=1e-6)
    assert in_one_gauge(names, networks.__getitem__, WIDE, distances / 1e3) is None  # Not the gauge of these distances.


@pytest.mark.parametrize("format", [torch.bfloat16, torch.float16])
def test_rounding_is_measured_in_common_coordinates(format: torch.dtype) -> None:
    """Invertible matrices enlarge the rounding errors of a transformed copy, which is still recognized as a copy."""
    net = torch.nn.Sequential(torch.nn.Linear(40, 32), torch.nn.Linear(32, 40)).double()
    symmetry = rg.discover(net, (torch.zeros(2, 40, dtype=torch.float64),)).bind(net.state_dict())
    base = {n: torch.randn(t.shape, generator=generator(1), dtype=t.dtype) for n, t in net.state_dict().items()}
    steps = {n: torch.randn(t.shape, generator=generator(2), dtype=t.dtype) for n, t in base.items()}
    eps = torch.finfo(format).eps
    networks = {"base": base, "copy": base, "tuned": {n: t + 4 * eps * steps[n] for n, t in base.items()}}
    ratios = list[float]()
    for seed in range(4):
        moved = dict[str, rg.Params]()
        for k, (name, one) in enumerate(networks.items(), 10 * seed):
            three = [symmetry.random(generator(100 * k + draw)) for draw in range(3)]
            far = symmetry.act(symmetry.compose(three[0], symmetry.compose(*three[1:])), one)
            moved[name] = {n: t.to(format).double() for n, t in far.items()}
        found = compare_many(
            [*moved], lambda a, b, p=moved: rg.compare(p[a], p[b], symmetry, draws=9), read=moved.__getitem__
        )
        (tree,) = found.trees
        copies = {frozenset((one.parent, one.child)) for one in tree if one.is_copy}
        assert copies == {frozenset(("base", "copy"))}
        length = next(one.length for one in tree if one.is_copy)
        ratios.append(length**0.5 / eps)
    assert max(ratios) > 0.45  # More than rounding where the networks are stored.


def test_a_network_with_more_tokens_hangs_on_the_copy_that_has_them() -> None:
    values = walked(3, {1: 0, 2: 1})
    values = torch.cat([values, values[1:2]])
    names = ["base", "a", "tuned", "extended a"]
    points = replace(points_of(values, names), sizes=[3000, 3000, 3100, 3100])
    tree = grow_tree(points)
    assert hung(tree) == {"a": "base", "tuned": "extended a", "extended a": "a"}
    assert hung(grow_tree(replace(points, sizes=[3000] * 4)))["tuned"] == "a"


def test_siblings_of_a_missing_base_do_not_hang_on_a_copy_of_one_of_them() -> None:
    values = walked(5, {1: 0, 2: 0})[1:]
    values *= 30 / values.norm(dim=1, keepdim=True)  # Trained for equally long.
    points = points_of(torch.cat([values, values]), ["a", "b", "extended a", "cut b"])
    tree = grow_tree(replace(points, sizes=[3000, 3100, 3100, 3000]))
    assert hung(tree) == {"a": "ancestor 1", "b": "ancestor 1", "extended a": "a", "cut b": "b"}


def convolutions(*widths: int) -> rg.Params:
    """Return a network of another architecture, whose tensors have the same names."""
    return {name: tensor.unsqueeze(-1) for name, tensor in drawn(mlp_symmetry(*widths), 0).items()}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("symmetry.json").write_text(WIDE.to_json())
    Path("all").mkdir()
    for name, params in family().items():
        save({key: tensor.float() for key, tensor in params.items()}, Path("all") / f"{name}.safetensors")
    save(convolutions(20, 41, 10), Path("all/other.safetensors"))
    return tmp_path


@pytest.mark.usefixtures("folder")
def test_a_folder_of_networks(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["compare", "all", "--symmetry", "symmetry.json", "--draws", "99"]
    main([*args, "-o", "page.html"])
    assert "left out, because they cannot be compared with any other network: other.safetensors" in (
        out := capsys.readouterr().out
    )
    assert "unrelated to all others: stranger.safetensors" in out
    page = Path("page.html").read_text()
    assert page.count("data:image") == 2  # The matrix and one tree.
    main([*args, "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["left_out"] == ["other.safetensors"]
    assert {*found["trees"][0][0]} == {"parent", "child", "length", "support", "is_copy", "is_certain"}
    assert len(found["pairs"]) == 10
    names = {row["child"] for row in found["trees"][0]} | {row["parent"] for row in found["trees"][0]}
    assert {"base.safetensors", "grandchild.safetensors"} < names


@pytest.mark.usefixtures("folder")
def test_python_finds_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    main(["compare", "all", "--symmetry", "symmetry.json", "--draws", "99", "--json"])
    printed = json.loads(capsys.readouterr().out)
    paths = rg.comparison.find_checkpoints(["all"])
    symmetry = rg.Symmetry.from_json(Path("symmetry.json").read_text())
    found = rg.comparison.compare_files(paths, symmetry=symmetry, draws=99)
    for name in ("pairs", "families", "averages", "trees", "left_out"):
        assert json.loads(json.dumps(found.facts[name])) == printed[name]


@pytest.mark.usefixtures("folder")
def test_an_error_between_two_of_many_files_names_both(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **settings: object) -> None:
        raise ValueError("the second network is odd")

    monkeypatch.setattr("regauge.comparison.relatives.Relatives.compare", fail)
    symmetry, paths = rg.Symmetry.from_json(Path("symmetry.json").read_text()), rg.comparison.find_checkpoints(["all"])
    with pytest.raises(ValueError, match=r"comparing '.*' with '.*': the second network is odd"):
        rg.comparison.compare_files(paths, symmetry=symmetry)


@pytest.mark.usefixtures("folder")
def test_unusable_files_are_left_out_with_their_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    symmetry = rg.Symmetry.from_json(Path("symmetry.json").read_text())
    usable = rg.comparison.find_checkpoints(["all"])
    expected = rg.comparison.compare_files(usable, symmetry=symmetry, draws=19)
    Path("all/0 empty.safetensors").touch()
    lost = {name: tensor / 0 for name, tensor in rg.load(usable[0]).items()}
    save(lost, Path("all/0 lost.safetensors"))
    found = rg.comparison.compare_files(rg.comparison.find_checkpoints(["all"]), symmetry=symmetry, draws=19)
    assert found.left_out == ("0 empty.safetensors", "0 lost.safetensors", *expected.left_out)
    assert found.facts | {"left_out": list(expected.left_out)} == expected.facts
    reasons = [str(failure) for failure in found.failures]
    assert len(reasons) == 2
    assert "'all/0 empty.safetensors' is not a readable safetensors file" in reasons[0]
    assert "of all/0 lost.safetensors holds NaN or Inf in" in reasons[1]
    main(["compare", "all", "--symmetry", "symmetry.json", "--draws", "19"])
    told = capsys.readouterr().out
    assert all(f"not compared: {reason}" in told for reason in reasons)


@pytest.mark.usefixtures("folder")
def test_networks_with_more_outputs_join_a_family(capsys: pytest.CaptureFixture[str]) -> None:
    base = family()["base"]
    more = {n: torch.cat([t, t[:2]]) if n.startswith("1.") else t for n, t in base.items()}
    for name, params in (("more", more), ("more noise", {n: t + 0.05 * torch.randn_like(t) for n, t in more.items()})):
        save({key: tensor.float() for key, tensor in params.items()}, Path("all") / f"{name}.safetensors")
    main(["compare", "all", "--symmetry", "symmetry.json", "--draws", "99", "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert {"more.safetensors", "more noise.safetensors", "base.safetensors"} <= {*found["families"][0]}
    assert found["left_out"] == ["other.safetensors"]
    assert {*found["trees"][0][0]} == {"parent", "child", "length", "support", "is_copy", "is_certain"}
    pairs = {(row["a"], row["b"]): row for row in found["pairs"]}
    assert pairs["base.safetensors", "more.safetensors"]["verdict"] == "descended"
    assert len(found["trees"][0]) >= 6


@pytest.mark.usefixtures("folder")
def test_networks_with_fewer_units_join_a_family(capsys: pytest.CaptureFixture[str]) -> None:
    """Two networks of equal shapes, which differ from the shapes of the symmetry, join too."""
    small = cut_symmetry(WIDE, {"h1": 24})
    units = torch.randperm(40, generator=generator(7))[:24].sort().values
    narrow = cut_params(family()["second"], WIDE, {"h1": units})
    tuned = {name: tensor + 0.05 * drawn(small, 8)[name] for name, tensor in narrow.items()}
    for name, params in (("narrow", small.act(small.random(generator(2)), narrow)), ("tuned", tuned)):
        save({key: tensor.float() for key, tensor in params.items()}, Path("all") / f"{name}.safetensors")
    main(["compare", "all", "--symmetry", "symmetry.json", "--draws", "99", "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert {"narrow.safetensors", "tuned.safetensors", "second.safetensors"} <= {*found["families"][0]}
    assert "stranger.safetensors" not in found["families"][0]
    pairs = {(row["a"], row["b"]): row for row in found["pairs"]}
    assert pairs["narrow.safetensors", "second.safetensors"]["verdict"] == "descended"
    assert pairs["narrow.safetensors", "tuned.safetensors"]["compared"] == 1
    assert pairs["second.safetensors", "tuned.safetensors"]["compared"] < 0.65


def test_mistakes_get_a_sentence(folder: Path, refused: Callable[..., str]) -> None:
    save(convolutions(20, 42, 10), folder / "another.safetensors")
    files = ["all/base.safetensors", "all/other.safetensors", "another.safetensors"]
    sentence = refused("compare", *files, "--symmetry", "symmetry.json")
    assert "no two of the 3 checkpoints have tensors of the same names and shapes" in sentence
    (folder / "empty").mkdir()
    (folder / "empty" / "notes.txt").write_text("nothing")
    assert "there is no checkpoint in the folder 'empty'" in refused("compare", "empty", "all/base.safetensors")
    assert "is given more than once" in refused("compare", *["all/base.safetensors"] * 3)
    (folder / "x.npz").write_bytes(b"")
    assert "--data is for two checkpoints" in refused("compare", "all", "--data", "x.npz")

"""Many networks at once: families, trees, and what cannot be compared."""

import json
from collections.abc import Callable
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
from regauge.comparison import compare_many, tree_lines
from regauge.comparison.trees import Branch, grow_tree, join_neighbors
from regauge.pruning import cut_params, cut_symmetry

WIDE = mlp_symmetry(20, 40, 10, kind="scaled")


def path_lengths(branches: list[Branch], names: list[str]) -> Tensor:
    """Lengths of the paths between networks, by adding up branches."""
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


def trained(seed: int, count: int = 20, *, drift: float = 0.0, bend: float = 0.0) -> tuple[Tensor, dict[int, int]]:
    """Points that are trained on from earlier ones with orthogonal steps and a drift that all share; their parents."""
    source = generator(seed)
    along, across, start = torch.linalg.qr(torch.randn(600, 3, generator=source, dtype=torch.float64)).Q.T
    points, times, parents = [20 * start + 5 * along], [0.0], dict[int, int]()
    for k in range(1, count):
        parents[k] = int(torch.randint(k, (), generator=source))
        steps = float(torch.randint(10, 60, (), generator=source))
        before, now = times[parents[k]], times[parents[k]] + steps
        noise = torch.randn(600, generator=source, dtype=torch.float64) * (steps / 600) ** 0.5
        shared = drift * steps * along + bend * (now**2 - before**2) / 100 * across
        points.append(points[parents[k]] + noise + shared)
        times.append(now)
    return torch.stack(points), parents


def divisions(branches: list[Branch], names: list[str]) -> dict[frozenset[str], Branch]:
    """The branches between groups of networks, by the side without the first network."""
    found = {}
    children = dict[str, list[str]]()
    for one in branches:
        children.setdefault(one.parent, []).append(one.child)

    def beyond(name: str) -> set[str]:
        return {name}.union(*map(beyond, children.get(name, [])))

    for one in branches:
        side = frozenset(beyond(one.child) & {*names})
        side = frozenset(names) - side if names[0] in side else side
        if 1 < len(side) < len(names) - 1:
            found[side] = one
    return found


def grown(points: Tensor, kept: list[int]) -> tuple[list[Branch], list[Branch], list[str]]:
    """The tree of some points, that by joining neighbors, and the names."""
    names = [f"n{k:02}" for k in kept]
    squares = torch.cdist(points[kept], points[kept]).square()
    return grow_tree(names, squares, points[kept].norm(dim=1)), join_neighbors(names, squares), names


@pytest.mark.parametrize(("drift", "bend"), [(0.0, 0.0), (0.1, 0.0), (0.1, 0.05)])
def test_branches_that_are_certain_are_right_also_where_trainings_share_a_drift(drift: float, bend: float) -> None:
    certain = drawn_right = all_true = joined_right = 0
    for seed in range(6):
        points, parents = trained(seed, drift=drift, bend=bend)
        for kept in ([*range(20)], [0, 1, 2, 3, *range(6, 20, 2), 19]):  # The second one lacks ancestors.
            tree, joined, names = grown(points, kept)
            edges = [Branch(f"n{p:02}", f"n{c:02}", 1.0) for c, p in parents.items()]
            whole = [Branch("root", "n00", 0.0), *(Branch("root", c, 0.0) if p == "n00" else Branch(p, c, 0.0)
                     for p, c in ((one.parent, one.child) for one in edges))]  # fmt: skip
            true = divisions(whole, names)
            found = divisions(tree, names)
            assert all(side in true for side, one in found.items() if one.is_certain)
            assert {name for name in names if any(name == one.child for one in tree)} == {*names}
            assert tree[-1].child == "n00"  # The root.
            assert all(0.5 < one.support <= 1 for one in found.values() if one.support is not None)
            certain += sum(one.is_certain for one in found.values())
            drawn_right += len(found.keys() & true.keys())
            joined_right += len(divisions(joined, names).keys() & true.keys())
            all_true += len(true)
    assert certain > 0.3 * all_true
    assert drawn_right > 0.6 * all_true
    if drift:
        assert drawn_right > joined_right


def test_the_order_of_networks_changes_no_tree() -> None:
    points, _ = trained(3, drift=0.1)
    order = torch.randperm(20, generator=generator(5)).tolist()
    tree, _, names = grown(points, [*range(20)])
    again, _, _ = grown(points, order)
    first, second = (divisions(one, names) for one in (tree, again))
    assert {side: one.support for side, one in first.items()} == {side: one.support for side, one in second.items()}
    for side, one in first.items():
        assert second[side].length == pytest.approx(one.length, rel=1e-6, abs=1e-6)


def test_doubt_is_written_next_to_a_branch() -> None:
    lines = tree_lines([Branch("a", "b", 1.0, 0.75), Branch("a", "c", 2.0, 0.95), Branch("a", "d", 3.0)])
    assert lines[1:] == ["├─ b  (1, uncertain: 75%)", "├─ c  (2)", "└─ d  (3)"]


def family() -> dict[str, rg.Params]:
    """A base with two children, of which one was moved and has a child of its own; and a stranger."""
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
    (tree,) = found.trees
    names = list(found.families[0])
    lengths = path_lengths(list(tree), names)
    assert torch.allclose(lengths, found.distances[:4, :4].square(), rtol=0.2, atol=2e-3)
    assert lengths[2, 3] < lengths[0, 3]  # The grandchild hangs on its parent.
    assert tree[-1].child == "base"
    with pytest.raises(ValueError, match="names of their own"):
        compare_many(["a", "a"], lambda a, b: rg.compare(networks["base"], networks["base"], WIDE))


def test_a_merge_names_its_parents_wherever_all_are_on_their_orbits() -> None:
    """Distances where a network is stored would weigh its units by their scales."""
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
        found = compare_many(list(moved), lambda a, b, at=moved: rg.compare(at[a], at[b], WIDE, draws=9))  # type: ignore[misc]
        (average,) = found.averages
        assert (average.child, average.parents) == ("merge", ("parent 0", "parent 1", "parent 2"))
        assert average.weights == pytest.approx(shares, abs=0.02)
        del moved["merge"]
        assert not compare_many(list(moved), lambda a, b, at=moved: rg.compare(at[a], at[b], WIDE, draws=9)).averages  # type: ignore[misc]


def test_a_merge_names_its_parents_also_among_unrelated_networks() -> None:
    """Distances to unrelated networks, which are no distances of points, have no part in it."""
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
            compared=1,
        )

    found = compare_many(names, compare)
    (average,) = found.averages
    assert (average.child, average.parents) == ("n6", ("n1", "n2", "n3"))
    assert average.weights == pytest.approx((0.5, 0.3, 0.2), abs=0.05)
    assert [len(family) for family in found.families] == [7, *[1] * 6]


def convolutions(*widths: int) -> rg.Params:
    """A network of another architecture, with tensors of the same names."""
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
    assert "left out, because no other network that was compared has their tensors: other.safetensors" in (
        out := capsys.readouterr().out
    )
    assert "unrelated to all others: stranger.safetensors" in out
    page = Path("page.html").read_text()
    assert page.count("data:image") == 2  # The matrix and one tree.
    main([*args, "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["left_out"] == ["other.safetensors"]
    assert {*found["trees"][0][0]} == {"parent", "child", "length", "support", "is_certain"}
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
def test_networks_with_more_outputs_join_a_family(capsys: pytest.CaptureFixture[str]) -> None:
    base = family()["base"]
    more = {n: torch.cat([t, t[:2]]) if n.startswith("1.") else t for n, t in base.items()}
    for name, params in (("more", more), ("more noise", {n: t + 0.05 * torch.randn_like(t) for n, t in more.items()})):
        save({key: tensor.float() for key, tensor in params.items()}, Path("all") / f"{name}.safetensors")
    main(["compare", "all", "--symmetry", "symmetry.json", "--draws", "99", "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert {"more.safetensors", "more noise.safetensors", "base.safetensors"} <= {*found["families"][0]}
    assert found["left_out"] == ["other.safetensors"]
    assert {*found["trees"][0][0]} == {"parent", "child", "length", "support", "is_certain"}
    pairs = {(row["a"], row["b"]): row for row in found["pairs"]}
    assert pairs["base.safetensors", "more.safetensors"]["verdict"] == "descended"
    assert len(found["trees"][0]) >= 6


@pytest.mark.usefixtures("folder")
def test_networks_with_fewer_units_join_a_family(capsys: pytest.CaptureFixture[str]) -> None:
    """Also two of the same shapes, which the symmetry does not have."""
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

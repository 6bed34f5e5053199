"""Many networks at once: families, trees, and what cannot be compared."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from symmetries import drawn, generator, mlp_symmetry
from torch import Tensor

import regauge as rg
from regauge.checkpoints.writing import save
from regauge.cli.main import main
from regauge.comparison import compare_many, tree_lines
from regauge.comparison.trees import Branch, join_neighbors
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

"""`regauge zoo align`, `compare` and `map`, with their pictures."""

import csv
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from regauge.cli.main import main
from regauge.discovery import discover
from regauge.report.population_figures import map_figure, matrices_figure
from regauge.storage import Store
from regauge.storage.architecture import Architecture
from regauge.zoo.jobs.compare_blocks import CompareBlocks

MLP = Architecture("MLP 30-5-2", "regauge.nets.mlp:mlp", {"widths": [30, 5, 2]})


@pytest.fixture
def zoo(tmp_path: Path) -> str:
    """Return ten networks: permuted copies of two networks. The last network is broken."""
    symmetry = discover(MLP.module(), (torch.randn(2, 30),))
    store = Store.create(tmp_path / "zoo", MLP, symmetry)
    generator = torch.Generator().manual_seed(0)
    pair = {spec.name: torch.randn(2, *spec.shape, generator=generator) for spec in MLP.layout}
    params = {name: tensor[torch.arange(10) % 2] for name, tensor in pair.items()}
    params = symmetry.act(symmetry.random(generator, ("permutation",), batch=(10,)), params)
    params["layers.0.bias"][9, 0] = torch.nan
    rows = [{"id": k, "step": 5, "kind": ("red, bright", "blue")[k % 2], "lr": k / 10} for k in range(10)]
    store.append(params, rows, name="part")
    return str(tmp_path / "zoo")


def table(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def data(zoo: str, tmp_path: Path) -> str:
    """Return inputs, with the classes that the networks with even indices predict."""
    inputs = torch.randn(40, 30, generator=torch.Generator().manual_seed(1))
    network = {name: tensor[0] for name, tensor in Store.open(zoo).read([0]).items()}
    targets = torch.func.functional_call(MLP.module(), network, (inputs,)).argmax(-1)
    np.savez(tmp_path / "data.npz", inputs=inputs.numpy(), targets=targets.numpy())
    return str(tmp_path / "data.npz")


@pytest.mark.parametrize("to", ["medoid", "universe", "3"])
def test_a_store_is_aligned_and_a_second_run_goes_on(
    zoo: str, to: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["zoo", "align", zoo, "-o", str(tmp_path / "aligned"), "--to", to, "--sample", "6"]
    main(command)
    said = capsys.readouterr().out
    assert "9 networks of 'MLP 30-5-2'; 1 of 1 shards were aligned now" in said
    assert "1 networks with NaN or Inf were left out" in said
    assert Path(said.split("aligned to: ")[1].strip()).is_file()
    main(command)
    assert "0 of 1 shards" in capsys.readouterr().out
    found = Store.open(tmp_path / "aligned")
    weights = found.read(range(9))["layers.0.weight"]
    kinds = found.rows["id"] % 2
    for kind in (0, 1):
        same = weights[np.flatnonzero(kinds == kind)]
        torch.testing.assert_close(same, same[:1].expand_as(same))


def test_barriers_fall_where_pairs_are_copies(
    zoo: str, data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "m.svg"
    for align in ("pairs", "universe", "medoid"):
        main(
            [
                "zoo",
                "compare",
                zoo,
                "--data",
                data,
                "-o",
                str(picture),
                "--align",
                align,
                "--overwrite",
                "--batch",
                "16",
            ]
        )
        said = capsys.readouterr().out
        assert "over 36 pairs" in said
        rows = table(tmp_path / "m.csv")
        assert len(rows) == 36
        copies = [row for row in rows if (int(row["id_a"]) - int(row["id_b"])) % 2 == 0]
        assert max(float(row["barrier_aligned"]) for row in copies) < 1e-4
        assert max(float(row["barrier"]) for row in copies) > 1e-2
        assert picture.read_text().startswith("<?xml")
    main(["zoo", "compare", zoo, "--data", data, "-o", str(tmp_path / "n.png"), "--align", "no", "--networks", "4"])
    rows = table(tmp_path / "n.csv")
    assert len(rows) == 6
    assert "barrier_aligned" not in rows[0]


@pytest.mark.parametrize("align", ["pairs", "medoid"])
def test_a_comparison_goes_on_where_it_was_interrupted(
    align: str, zoo: str, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The matrix is computed block by block, the remaining blocks by another worker, and the final matrix is the
    same.
    """
    command = ["zoo", "compare", zoo, "--data", data, "--align", align, "--points", "5", "-o"]
    main([*command, str(tmp_path / "whole.svg")])
    monkeypatch.setattr("regauge.zoo.populations.stored_pairs.BLOCK_SIDE", 4)
    blocks: list[tuple[int, int]] = []
    do = CompareBlocks.__call__

    def counted(self: CompareBlocks, key: tuple[int, int]) -> None:
        blocks.append(key)
        if len(blocks) == 9:  # of 6 in each matrix
            raise ArithmeticError("a power cut")
        do(self, key)

    monkeypatch.setattr(CompareBlocks, "__call__", counted)
    with pytest.raises(ArithmeticError):
        main([*command, str(tmp_path / "parts.svg")])
    assert sorted(path.name for path in tmp_path.glob("parts*")) == ["parts.svg.parts"]
    before = len(blocks)
    monkeypatch.setattr("regauge.zoo.executor_of", lambda on: lambda: ThreadPoolExecutor(1))
    main([*command, str(tmp_path / "parts.svg"), "--on", "processes"])
    assert len(blocks) - before == 6 * (2 if align == "pairs" else 3) - (before - 1)
    assert sorted(path.name for path in tmp_path.glob("parts*")) == ["parts.csv", "parts.svg"]
    for found, expected in zip(table(tmp_path / "parts.csv"), table(tmp_path / "whole.csv"), strict=True):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert float(found[name]) == pytest.approx(float(value), abs=1e-5)


def test_barriers_on_the_examples_that_were_kept_from_training(
    zoo: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["zoo", "compare", zoo, "--data", "breast-cancer", "-o", str(tmp_path / "m.png"), "--networks", "3"])
    assert "over 3 pairs" in capsys.readouterr().out


def test_an_unknown_data_set_is_refused_with_those_that_there_are(
    zoo: str, tmp_path: Path, refused: Callable[..., str]
) -> None:
    text = refused("zoo", "compare", zoo, "--data", "brest", "-o", str(tmp_path / "m.png"))
    assert "'brest' is no data set for populations; did you mean 'breast-cancer'? choose from ['breast-cancer'" in text


@pytest.mark.parametrize("by", ["orbits", "universe"])
def test_a_map_tells_copies_of_two_networks_apart(
    zoo: str, by: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "map.png"
    main(["zoo", "map", zoo, "-o", str(picture), "--by", by, "--clusters", "2"])
    said = capsys.readouterr().out
    assert "2 clusters of 5, 4 networks" in said
    assert "the plane shows 100.0%" in said
    rows = table(tmp_path / "map.csv")
    assert {(int(row["id"]) % 2, row["cluster"]) for row in rows} == {(0, "0"), (1, "1")}
    main(
        ["zoo", "map", zoo, "-o", str(picture), "--by", "weights", "--clusters", "2", "--overwrite", "--color", "kind"]
    )
    rows = table(tmp_path / "map.csv")
    assert "the plane shows 100.0%" not in capsys.readouterr().out
    assert rows[0]["kind"] == "red, bright"
    main(
        ["zoo", "map", zoo, "-o", str(picture), "--overwrite", "--color", "lr", "--where", "step=5", "--networks", "4"]
    )
    assert len(table(tmp_path / "map.csv")) == 4


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (["align", "ZOO", "-o", "OUT", "--to", "best"], "--to 'best' is not a network of the store"),
        (["align", "ZOO", "-o", "OUT", "--to", "77"], "no trajectory of the store has the id 77"),
        (["compare", "ZOO", "--data", "sine-waves", "-o", "OUT.png"], "every network has its own data"),
        (["compare", "ZOO", "--data", "no.npz", "-o", "OUT.png"], "there is no data file"),
        (["compare", "ZOO", "--data", "breast-cancer", "-o", "OUT.txt"], "must end in .svg or .png or .pdf"),
        (["compare", "ZOO", "--data", "no.npz", "-o", "OUT.txt"], "must end in .svg or .png or .pdf"),
        (["map", "ZOO", "-o", "OUT.png", "--color", "size"], "no column 'size'"),
        (["map", "ZOO", "-o", "OUT.png", "--networks", "2"], "at least three"),
        (["map", "ZOO", "-o", "OUT.png", "--clusters", "99"], "--clusters is 99, but must be from 1 to 9"),
        (["map", "ZOO", "-o", "OUT.png", "--where", "step=6"], "none of the 10 networks"),
    ],
)
def test_what_is_wrong_is_one_sentence(
    zoo: str, command: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main_args = [zoo if word == "ZOO" else word.replace("OUT", str(tmp_path / "out")) for word in command]
    with pytest.raises(SystemExit):
        main(["zoo", *main_args])
    error = capsys.readouterr().err.strip().splitlines()
    assert told in error[-1]
    assert not list(tmp_path.glob("out*"))


def test_pictures_show_what_they_are_given() -> None:
    before = np.array([[0, 2.0, np.nan], [2.0, 0, 4.0], [np.nan, 4.0, 0]])
    figure = matrices_figure({"before": before, "after": before / 4}, "barrier")
    left, right, bar = figure.axes
    assert left.get_xlabel() == "network\nmean 3, deviation 1"
    assert right.get_xlabel() == "network\nmean 0.75, deviation 0.25"
    own, drawn = left.images
    assert np.array_equal(np.isfinite(np.asarray(own.get_array())), np.eye(3, dtype=bool)), (
        "a network and itself are no pair"
    )
    assert drawn.get_clim() == right.images[1].get_clim()
    assert bar.get_ylabel() == "barrier"
    with pytest.raises(ValueError, match="nothing to draw"):
        matrices_figure({"one": np.zeros((1, 1))}, "barrier")
    points = np.arange(8.0).reshape(4, 2)
    drawn = map_figure(points, ["a", "b", "a", "a"], title="two", share=0.05, what="kind")
    assert "5% of the squared distances;\n95% lie in directions that it leaves out" in drawn.axes[0].get_xlabel()
    first, second = drawn.axes[0].collections
    assert np.array_equal(np.asarray(first.get_offsets()), points[[0, 2, 3]])
    assert np.array_equal(np.asarray(second.get_offsets()), points[[1]])
    shaded = map_figure(points, [0] * 4, title="values", share=1.0, values=np.array([1, np.nan, 2, 3.0]), what="loss")
    missing, known = shaded.axes[0].collections
    assert np.array_equal(np.asarray(missing.get_offsets()), points[[1]])
    assert known.get_clim() == (1, 3)

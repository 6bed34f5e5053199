"""`regauge line --path`, `regauge plane` and `regauge repair`: their outputs, and one sentence for every mistake."""

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import regauge as rg
from regauge.checkpoints.checkpoint import load
from regauge.checkpoints.writing import save
from regauge.cli.main import main

MODELS = """
import torch
from torch import nn

WIDTH = 6


def model():
    return nn.Sequential(nn.Linear(4, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 3))


def normed():
    return nn.Sequential(nn.Linear(4, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, 3))


def batches():
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        x = torch.randn(40, 4, generator=generator)
        yield x, x[:, :3].argmax(1)


def others():
    return [(x + 1, y) for x, y in batches()]


def wholes():
    return [(x, torch.zeros(40, 3)) for x, _ in batches()]


def branching():
    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = model()

        def forward(self, x):
            y = self.layers(x)
            return y if y.sum() > 1e9 else -y

    return Branching()
"""


def module(*, is_normed: bool = False) -> nn.Sequential:
    """Return the model of a given name, in Python."""
    middle = [nn.BatchNorm1d(6), nn.ReLU()] if is_normed else [nn.ReLU(), nn.Linear(6, 6), nn.ReLU()]
    return nn.Sequential(nn.Linear(4, 6), *middle, nn.Linear(6, 3)).eval()


def inputs() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.cat([torch.randn(40, 4, generator=generator) for _ in range(3)])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a working directory with models, data and checkpoints: a, b, c of `model`, na and nb of `normed`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nets.py").write_text(MODELS)
    for seed, name in enumerate(["a", "b", "c", "na", "nb"]):
        torch.manual_seed(seed)
        params = module(is_normed=len(name) == 2).state_dict()
        save({k: t * 2 if t.is_floating_point() else t for k, t in params.items()}, tmp_path / f"{name}.safetensors")
    return tmp_path


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def files(*names: str) -> list[str]:
    return [f"{name}.safetensors" for name in names]


MODEL = ["--model", "nets.py:model", "--data", "nets.py:batches"]
NORMED = ["--model", "nets.py:normed", "--data", "nets.py:batches"]


# --- line -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["straight", "geodesic", "bezier", "chain"])
def test_every_path_ends_at_the_networks(folder: Path, path: str, capsys: pytest.CaptureFixture[str]) -> None:
    trained = path in ("bezier", "chain")
    more = ["--steps", "20", "--test", "nets.py:batches"] if trained else []
    main(["line", *files("a", "b"), *MODEL, "--path", path, "--points", "5", "-o", "line.svg", *more])
    found = rows(folder / "line.csv")
    assert [float(row["t"]) for row in found] == [0, 0.25, 0.5, 0.75, 1]
    targets = inputs()[:, :3].argmax(1)
    for row, name in ((found[0], "a"), (found[-1], "b")):
        with torch.no_grad():
            logits = torch.func.functional_call(module(), load(folder / f"{name}.safetensors"), (inputs(),))
        assert float(row["loss"]) == pytest.approx(float(nn.functional.cross_entropy(logits, targets)), rel=1e-5)
    out = capsys.readouterr().out
    assert ("trained for 20 steps on nets.py:batches" in out) == trained
    assert ("unit spheres in 4 dimensions: 0.weight" in out) == (path == "geodesic")
    assert (folder / "line.svg").read_text().startswith("<?xml")


def test_two_lines_are_measured_and_drawn_in_one_plot(
    folder: Path, refused: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    for names, ways in ((("a", "b"), MODEL), (("na", "nb"), NORMED)):
        main(["line", *files(*names), *ways, "--align", "--points", "5", "-o", "line.svg", "--overwrite", "--json"])
        report = json.loads(capsys.readouterr().out)
        main(["line", *files(*names), *ways, "--points", "5", "--json"])
        trained = json.loads(capsys.readouterr().out)
        assert report["unaligned_barrier"] == trained["barrier"] != report["barrier"]
        assert trained["unaligned_barrier"] is None
        main(
            ["align", *files(*names), "--model", ways[1], "--input-shape", "2x4", "-o", "al.safetensors", "--overwrite"]
        )
        capsys.readouterr()
        main(["line", *files(names[0], "al"), *ways, "--points", "5", "--json"])
        aligned = json.loads(capsys.readouterr().out)
        assert report["barrier"] == pytest.approx(aligned["barrier"], rel=1e-5)
        assert [row["loss as trained"] for row in report["table"]] == [row["loss"] for row in trained["table"]]
        # The function of B does not depend on whether it was aligned, with new statistics too.
        assert report["table"][-1]["loss"] == pytest.approx(trained["table"][-1]["loss"], rel=1e-4)
    assert [*rows(folder / "line.csv")[0]] == ["t", "loss", "accuracy", "loss as trained", "accuracy as trained"]
    wrong = refused("line", *files("a", "b"), *MODEL, "--path", "geodesic", "--align")
    assert "--align is only for the straight path; for --path geodesic, run `regauge align` first" in wrong
    # A frozen parameter that is said to be structure is structure for the alignment, too.
    kept = [*files("a", "b"), *MODEL, "--keep", "4.bias"]
    assert "the networks differ in '4.bias', a structure tensor" in refused("line", *kept, "--align")
    assert "--keep is only for --path geodesic and --align" in refused("line", *kept)


def test_geodesics_keep_scales_of_one(folder: Path) -> None:
    main(["line", *files("a", "b"), *MODEL, "--path", "geodesic", "--points", "3", "-o", "line.svg"])
    straight, a, b = module(), load(folder / "a.safetensors"), load(folder / "b.safetensors")
    symmetry = rg.discover(straight, (inputs(),))
    a, b = (rg.canonicalize(params, symmetry, parts=("scale",)) for params in (a, b))
    middle = rg.canonical.canonical_manifold(symmetry).geodesic(a, b, 0.5)
    with torch.no_grad():
        logits = torch.func.functional_call(straight, middle, (inputs(),))
    expected = float(nn.functional.cross_entropy(logits, inputs()[:, :3].argmax(1)))
    assert float(rows(folder / "line.csv")[1]["loss"]) == pytest.approx(expected, rel=1e-5)


def test_trained_paths_are_lower_and_depend_on_the_seed_and_the_data(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["line", *files("a", "b"), *MODEL, "--points", "9", "-o", "line.svg", "--overwrite"]
    heights = {}
    runs = {
        "straight": [],
        "bezier": ["--path", "bezier", "--lr", "0.1", "--steps", "100"],
        "again": ["--path", "bezier", "--lr", "0.1", "--steps", "100"],
        "seed": ["--path", "bezier", "--lr", "0.1", "--steps", "100", "--seed", "1"],
        "others": ["--path", "bezier", "--lr", "0.1", "--steps", "100", "--train", "nets.py:others"],
        "bends": ["--path", "chain", "--lr", "0.1", "--steps", "100", "--bends", "3"],
    }
    for name, options in runs.items():
        main([*line, *options])
        heights[name] = max(float(row["loss"]) for row in rows(folder / "line.csv")[1:-1])
    assert heights["bezier"] == heights["again"] < 0.9 * heights["straight"]
    assert heights["bends"] < 0.9 * heights["straight"]
    assert len(set(heights.values())) == 5
    assert "steps on nets.py:others" in capsys.readouterr().out


def test_paths_of_networks_with_batch_normalization(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["line", *files("na", "nb"), *NORMED, "--path", "bezier", "--steps", "5", "--points", "3"])
    assert "statistics of batch normalization were recomputed" in capsys.readouterr().out
    assert sorted(path.suffix for path in folder.glob("*.*")) == [".py", *[".safetensors"] * 5]


# --- plane ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("metric", ["loss", "accuracy"])
def test_plane(folder: Path, metric: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["plane", *files("a", "b", "c"), *MODEL, "-o", "plane.png", "--resolution", "5", "--metric", metric])
    found = rows(folder / "plane.csv")
    three, grid = found[:3], found[3:]
    assert [row["network"] for row in three] == ["A", "B", "C"]
    assert {row["network"] for row in grid} == {""}
    assert len({row["x"] for row in grid}) * len({row["y"] for row in grid}) == len(grid)
    a, b, c = (load(folder / name) for name in files("a", "b", "c"))
    apart = float(sum((a[k].double() - b[k].double()).square().sum() for k in a)) ** 0.5
    assert (float(three[0]["x"]), float(three[0]["y"])) == (0, 0)
    assert float(three[1]["x"]) == pytest.approx(apart)
    plane = rg.connect.plane(a, b, c, lambda params: {"loss": 0.0}, resolution=5)
    for row in (three[2], grid[0], grid[-1]):
        params = plane.at(float(row["x"]), float(row["y"]))
        with torch.no_grad():
            logits = torch.func.functional_call(module(), params, (inputs(),))
        expected = float(nn.functional.cross_entropy(logits, inputs()[:, :3].argmax(1)))
        assert float(row["loss"]) == pytest.approx(expected, rel=1e-4)
    assert "least of" in capsys.readouterr().out
    assert (folder / "plane.png").read_bytes()[1:4] == b"PNG"


def test_planes_of_networks_with_batch_normalization(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(9)
    save(module(is_normed=True).state_dict(), folder / "nc.safetensors")
    main(["plane", *files("na", "nb", "nc"), *NORMED, "-o", "plane.svg", "--resolution", "2"])
    assert "statistics of batch normalization were recomputed" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["line", "plane"])
def test_statistics_come_from_the_data_for_them_at_the_ends_too(
    folder: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A network whose statistics come from other data is not worse at an endpoint than next to the endpoint."""
    third = {
        name: tensor + 1 if tensor.is_floating_point() else tensor for name, tensor in load("na.safetensors").items()
    }
    save(third, folder / "nc.safetensors")
    names = ["na", "nb", *(["nc"] if command == "plane" else [])]
    size = ["--points", "3"] if command == "line" else ["--resolution", "2"]
    common = [command, *files(*names), "--model", "nets.py:normed", "--data", "nets.py:batches", *size]
    main([*common, "-o", "same.png"])
    main([*common, "-o", "other.png", "--statistics", "nets.py:others"])
    main([*common, "-o", "tested.png", "--test", "nets.py:others"])
    task = rg.Task(module(is_normed=True), [(x, x[:, :3].argmax(1)) for x in inputs().split(40)])
    others = rg.Task(task.module, [(x + 1, y) for x, y in task.batches])
    # By default half of the data gives statistics, and the other half judges.
    for name, (own, judge) in {
        "same.csv": task.split(),
        "other.csv": (others, task),
        "tested.csv": (task, others),
    }.items():
        prepared = rg.connect.reset_batchnorm(load("na.safetensors"), task.module, own.batches)
        expected = judge.evaluate(prepared)["loss"]
        assert float(rows(folder / name)[0]["loss"]) == pytest.approx(expected, rel=1e-5)
    told = capsys.readouterr()
    assert (
        "in every network, including the given ones, the statistics of batch normalization were recomputed" in told.out
    )
    assert command == "line" or "networks takes about" in told.err


def test_statistics_need_batch_normalization(folder: Path, refused: Callable[..., str]) -> None:
    common = ["--model", "nets.py:model", "--data", "nets.py:batches", "--statistics", "nets.py:others"]
    assert "is for models with batch normalization" in refused("line", *files("a", "b"), *common)


def test_planes_of_models_that_run_one_network_at_a_time_only(folder: Path) -> None:
    for name in "abc":
        params = load(folder / f"{name}.safetensors")
        save({f"layers.{k}": t for k, t in params.items()}, folder / f"l{name}.safetensors")
    plane = ["plane", *files("la", "lb", "lc"), "--model", "nets.py:branching", "--data", "nets.py:batches"]
    main([*plane, "-o", "plane.svg", "--resolution", "2"])
    with torch.no_grad():
        logits = -torch.func.functional_call(module(), load(folder / "a.safetensors"), (inputs(),))
    expected = float(nn.functional.cross_entropy(logits, inputs()[:, :3].argmax(1)))
    assert float(rows(folder / "plane.csv")[0]["loss"]) == pytest.approx(expected, rel=1e-5)


# --- repair -----------------------------------------------------------------------------------------------------


def test_repair_gives_units_the_statistics_of_the_endpoints(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = load(folder / "a.safetensors"), load(folder / "b.safetensors")
    save({name: (a[name] + 3 * b[name]) / 4 for name in a}, folder / "m.safetensors")
    main(
        [
            "repair",
            "m.safetensors",
            "--endpoints",
            *files("a", "b"),
            *MODEL,
            "-o",
            "out.safetensors",
            "--weights",
            "1",
            "3",
            "--test",
            "nets.py:others",
        ]
    )
    result = load(folder / "out.safetensors")
    std = {}
    for name, params in (("a", a), ("b", b), ("m", load(folder / "m.safetensors")), ("out", result)):
        std[name] = (inputs() @ params["0.weight"].T).std(0)
    torch.testing.assert_close(std["out"], (std["a"] + 3 * std["b"]) / 4, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(std["m"], std["out"], rtol=1e-2)
    out = capsys.readouterr().out
    assert next(line.split() for line in out.splitlines() if line.startswith("0 "))[-1] == "1.000"
    assert "note:" not in out


def test_repair_aligns_endpoints_that_were_aligned_for_merging(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    symmetry = rg.discover(module(), (inputs(),))
    a = load(folder / "a.safetensors")
    moved = symmetry.act(symmetry.random(torch.Generator().manual_seed(1), parts=("permutation",)), a)
    save(moved, folder / "moved.safetensors")
    options = ["repair", "a.safetensors", "--endpoints", *files("a", "moved"), *MODEL, "-o", "out.safetensors"]
    main([*options, "--align"])
    assert "note:" not in capsys.readouterr().out
    for name, tensor in load(folder / "out.safetensors").items():
        torch.testing.assert_close(tensor, a[name])
    main([*options, "--overwrite"])
    assert "Give them as they were aligned for the merge, or align them to it" in capsys.readouterr().out
    assert not torch.allclose(load(folder / "out.safetensors")["0.weight"], a["0.weight"])


def test_repair_without_endpoints_recomputes_statistics(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    repair = ["repair", "na.safetensors", *NORMED, "-o", "out.safetensors", "--test", "nets.py:others"]
    main(repair)
    assert "raises the loss on the data that choose" in capsys.readouterr().out
    assert all(torch.equal(t, load(folder / "na.safetensors")[n]) for n, t in load(folder / "out.safetensors").items())
    main([*repair, "--always", "--overwrite"])
    before, after = load(folder / "na.safetensors"), load(folder / "out.safetensors")
    values = inputs() @ before["0.weight"].T + before["0.bias"]
    torch.testing.assert_close(after["1.running_mean"], values.mean(0))
    assert after["1.num_batches_tracked"].dtype == torch.int64
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert capsys.readouterr().out.count("repaired") == 1


# --- refusals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["line", *files("a", "b"), *MODEL, "--train", "nets.py:others"], "bezier and chain; straight is not"),
        (["line", *files("a", "b"), *MODEL, "--points", "2"], "at least one point between them"),
        (["line", *files("a", "b"), *MODEL, "--path", "chain", "--bends", "0"], "give at least one"),
        (
            ["line", *files("a", "b"), *MODEL, "--path", "bezier", "--steps", "0"],
            "steps=0 cannot train a path: at least one is needed",
        ),
        (["line", *files("a", "b"), *MODEL, "--path", "bezier", "--train", "absent.npz"], "no data file 'absent.npz'"),
        (["line", *files("a", "na"), *MODEL], "give the checkpoint and the model of the same architecture"),
        (["line", *files("a", "b"), *MODEL, "-o", "line.txt"], "must end in .svg or .png or .pdf"),
        (["line", *files("a", "b"), *MODEL, "-o", "taken.svg"], "'taken.csv' exists already"),
        (["plane", *files("a", "b", "b"), *MODEL, "-o", "plane.svg"], "the three networks lie on one line"),
        (["plane", *files("a", "b", "c"), *MODEL, "-o", "plane.svg", "--resolution", "1"], "at least 2 points"),
        (["plane", *files("a", "b", "c"), *MODEL, "-o", "absent/plane.svg"], "the folder 'absent' of the output"),
        (["plane", *files("a", "b", "c"), *MODEL, "-o", "taken.svg"], "'taken.csv' exists already"),
        (["repair", *files("a"), *MODEL, "-o", "out.safetensors"], "give the networks that were merged as endpoints"),
        (
            ["repair", *files("a"), *MODEL, "-o", "out.safetensors", "--align"],
            "--weights and --align need the endpoints",
        ),
        (["repair", *files("a"), *MODEL, "-o", "a.safetensors"], "'a.safetensors' exists already"),
        (
            ["repair", *files("a"), *MODEL, "-o", "out.safetensors", "--endpoints", *files("b", "c"), "--weights", "1"],
            "for 2 networks; give one finite weight for each",
        ),
        (
            ["repair", *files("a"), *MODEL, "-o", "out.safetensors", "--endpoints", "absent.safetensors"],
            "there is no checkpoint 'absent.safetensors'",
        ),
    ],
)
def test_refusals(folder: Path, refused: Callable[..., str], args: list[str], sentence: str) -> None:
    (folder / "taken.csv").write_text("")
    assert sentence in refused(*args)


def test_accuracy_needs_classes(folder: Path, refused: Callable[..., str]) -> None:
    plane = ["plane", *files("a", "b", "c"), "--model", "nets.py:model", "--data", "nets.py:wholes", "--loss", "mse"]
    assert "there is no accuracy with --loss mse" in refused(*plane, "-o", "plane.svg", "--metric", "accuracy")


def test_models_that_cannot_be_traced_have_no_geodesics(folder: Path, refused: Callable[..., str]) -> None:
    for name in ("a", "b"):
        params = load(folder / f"{name}.safetensors")
        save({f"layers.{k}": t for k, t in params.items()}, folder / f"l{name}.safetensors")
    line = ["line", *files("la", "lb"), "--model", "nets.py:branching", "--data", "nets.py:batches"]
    main([*line, "--points", "3"])
    assert "depends on the values of a tensor" in refused(*line, "--path", "geodesic").lower()


def test_an_interrupted_picture_leaves_the_old_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = ["line", *files("a", "b"), *MODEL, "--points", "3", "-o", "line.svg"]
    main(line)
    old = (folder / "line.svg").read_bytes()

    def fails(*names: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr("os.replace", fails)
    with pytest.raises(SystemExit):
        main([*line, "--overwrite"])
    assert (folder / "line.svg").read_bytes() == old
    assert not list(folder.glob(".*"))


# --- the same numbers in Python ---------------------------------------------------------------------------------


def test_the_command_and_the_function_measure_the_same_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The endpoints are prepared like the middle, and their losses as stored are reported."""
    main(["line", *files("na", "nb"), *NORMED, "--statistics", "nets.py:others", "--points", "5", "--json"])
    report = json.loads(capsys.readouterr().out)
    runner = module(is_normed=True)
    statistics = [x + 1 for x in inputs().split(40)]
    task = rg.Task(
        runner,
        [(x, x[:, :3].argmax(1)) for x in inputs().split(40)],
        prepare=lambda params: rg.connect.reset_batchnorm(params, runner, statistics),
    )
    a, b = (load(folder / name) for name in files("na", "nb"))
    curve = rg.line(a, b, task, points=5)
    assert [row["loss"] for row in report["table"]] == pytest.approx([row["loss"] for row in curve.table], rel=1e-6)
    assert report["barrier"] == pytest.approx(curve.barrier, rel=1e-5)
    assert curve.table[0]["loss"] == pytest.approx(task.evaluate_average(a)["loss"])
    assert [one["loss"] for one in report["stored"]] == pytest.approx([task.evaluate(one)["loss"] for one in (a, b)])
    assert curve.barrier == max(curve.excess)
    assert "as stored, not prepared" in str(curve)


def test_an_aligned_network_has_the_ends_and_the_barrier_of_its_copy(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["align", *files("na", "nb"), "--model", "nets.py:normed", "--input-shape", "2x4", "-o", "al.safetensors"])
    capsys.readouterr()
    ends = []
    for name in ("nb", "al"):
        main(["line", *files("na", name), *NORMED, "--points", "3", "--json"])
        report = json.loads(capsys.readouterr().out)
        ends.append((report["table"][-1]["loss"], report["stored"][-1]["loss"]))
    assert ends[0] == pytest.approx(ends[1], rel=1e-4)


@pytest.mark.parametrize("is_tested", [False, True])
def test_a_merge_card_measures_on_data_that_chose_nothing(
    folder: Path, is_tested: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command and the function use the same data. Statistics come from the data for choices, and the card names
    both sets of data.
    """
    more = ["--test", "nets.py:others"] if is_tested else []
    main(["merge", *files("na", "nb"), *NORMED, "--input-shape", "2x4", "-o", "merged.safetensors", *more])
    capsys.readouterr()
    runner = module(is_normed=True)
    batches = [(x, x[:, :3].argmax(1)) for x in inputs().split(40)]
    data, others = rg.Task(runner, batches), rg.Task(runner, [(x + 1, y) for x, y in batches])
    choosing, judging = (data, others) if is_tested else data.split()
    task, test = (
        replace(one, prepare=lambda p: rg.connect.reset_batchnorm(p, runner, choosing.batches))
        for one in (choosing, judging)
    )
    networks = [load(folder / name) for name in files("na", "nb")]
    symmetry = rg.discover(runner, (inputs(),))
    result = rg.merge(networks, symmetry, task=task, test=test)
    merged = load(folder / "merged.safetensors")
    assert all(torch.allclose(result.params[n], merged[n], atol=1e-6) for n in merged)
    assert result.record.merged_metrics == judging.evaluate(result.params)
    assert result.record.metrics[0] == test.evaluate_average(networks[0])
    card = (folder / "merged.md").read_text()
    assert f"{judging.evaluate(merged)['loss']:.6g}" in card
    chosen, judged = ("nets.py:batches", "nets.py:others") if is_tested else ("drawn at random", "the other 50%")
    facts = {row.split("|")[1].strip(): row.split("|")[2] for row in card.splitlines() if row.count("|") == 3}
    assert chosen in facts["chosen by"]
    assert judged in facts["judged by"]


def test_a_test_without_data_is_refused(folder: Path, refused: Callable[..., str]) -> None:
    given = ["--model", "nets.py:model", "--input-shape", "2x4", "--test", "nets.py:others", "-o", "m.safetensors"]
    assert "--test measures the result of a choice on --data" in refused("merge", *files("a", "b"), *given)
    networks = [load(folder / name) for name in files("a", "b")]
    task = rg.Task(module(), [(x, x[:, :3].argmax(1)) for x in inputs().split(40)])
    with pytest.raises(ValueError, match="give task, too"):
        rg.merge(networks, rg.discover(module(), (inputs(),)), test=task)


def test_the_data_that_choose_and_judge_are_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = "losses were measured on the other 50% of the examples of nets.py:batches"
    main(["align", *files("na", "nb"), *NORMED, "--input-shape", "2x4", "-o", "o.safetensors"])
    assert told in capsys.readouterr().out
    main(["line", *files("na", "nb"), *NORMED, "--points", "3"])
    assert told in capsys.readouterr().out
    main(["line", *files("a", "b"), *MODEL, "--points", "3"])  # Nothing is chosen.
    assert "losses were measured on" not in capsys.readouterr().out

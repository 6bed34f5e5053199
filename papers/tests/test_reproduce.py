"""`regauge reproduce`: every experiment from end to end in small size, resumption, tables, and printed output."""

import io
import json
import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import make_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from progress import Recorded
from torch import nn

import regauge as rg
from regauge.bayes.variational.mean_field import VariationalConfig
from regauge.checkpoints.writing import save_text
from regauge.cli.main import main
from regauge.core.progress import Advance, Progress
from regauge.nets.classification import ClassifierConfig
from regauge.nets.siren import Siren
from regauge.training import SGD, Adam, AdamW, Constant, Cosine, OneCycle
from regauge_papers import experiment, populations, transformers
from regauge_papers.bayesian.inference import name_inference
from regauge_papers.experiment import Name, Run, make_once
from regauge_papers.experiments import EXPERIMENTS
from regauge_papers.populations import name_training
from regauge_papers.seeds import join_seeds
from regauge_papers.settings import describe
from regauge_papers.table import Quantity, Row, Table, mean_curve, summarize
from regauge_papers.tempered import TemperedJudge, fit_temperature
from regauge_papers.ways import permutations_only, without_shifts

NAMES = [(paper, name) for paper, experiments in EXPERIMENTS.items() for name in experiments]


pytestmark = pytest.mark.usefixtures("without_data")


TWINS = {
    ("001", "learned-start-sines"): "learned-start",
    ("001", "learned-vgg"): "learned-cnn",
    ("weightspace", "fashion"): "mnist",
    ("003", "alignment-512"): "alignment",
    ("003", "variants-512"): "variants",
    ("003", "basin-512"): "basin",
    ("001", "learned-ablation-cifar10"): "learned-ablation",
    ("004", "figure2"): "figure6",
    ("004", "figureA15"): "figure4",
}
"""Experiments that, in small size, equal another experiment of the paper."""
SIBLINGS = {
    ("000", "mnist"): "uci",
    ("000", "mnist-long"): "uci",
    ("000", "cnns-one-start"): "cnns",
    ("001", "table1-cifar10"): "table1",
    ("001", "sinkhorn-cifar10"): "sinkhorn",
    ("001", "learned-sines"): "learned-mnist",
    ("001", "learned-cifar10"): "learned-cnn",
    ("001", "learned-transfer"): "learned-widths",
    ("004", "figure8"): "figure4",
    ("004", "figure9"): "figure5",
    ("004", "figure7"): "figure5",
    ("004", "figure11"): "figure12",
    ("merging", "cifar10"): "mnist",
    ("transformers", "llama"): "gpt",
    ("transformers", "vit-cifar10"): "vit",
    ("transformers", "basin-llama"): "basin-gpt",
    ("transformers", "causes-gpt"): "causes-vit",
    ("weightspace", "vits"): "cnns",
}
"""Experiments with the measurements of another experiment of the paper, on other networks. `make thorough` runs
them."""
IN_SMALL = [
    pytest.param(*pair, id="-".join(pair), marks=pytest.mark.thorough if pair in SIBLINGS else ())
    for pair in NAMES
    if pair not in TWINS
]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], tuple[Path, str]]:
    """Run an experiment in small size from end to end, once. Return its folder, and the printed output."""
    known: dict[tuple[str, str], tuple[Path, str]] = {}

    def run(paper: str, name: str) -> tuple[Path, str]:
        if (paper, name) not in known:
            folder = tmp_path_factory.mktemp("experiment")
            with redirect_stdout(io.StringIO()) as printed:
                main(["reproduce", paper, name, "--out", str(folder), "--seed", "1"])
            known[paper, name] = folder, printed.getvalue()
        return known[paper, name]

    return run


def results(folder: Path, paper: str, name: str) -> dict[str, Any]:
    return dict(json.loads((folder / f"{paper}-{name}-smoke.json").read_text()))


# --- from end to end --------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("unsaved")
@pytest.mark.parametrize(("paper", "name"), IN_SMALL)
def test_every_experiment_runs_in_small(paper: str, name: str, ran: Callable[[str, str], tuple[Path, str]]) -> None:
    tmp_path, printed = ran(paper, name)
    found = results(tmp_path, paper, name)
    markdown = (tmp_path / f"{paper}-{name}-smoke.md").read_text()
    assert f"regauge reproduce {paper} {name} --scale smoke --seed 1" in found["notes"][0]
    assert (found["paper"], found["experiment"], found["scale"], found["seeds"]) == (paper, name, "smoke", [1])
    for row in found["rows"]:
        assert row["label"] in printed
        assert f"| {row['label']} |" in markdown
        assert all(number in markdown for number in row["paper"].values())
        for values in row["values"].values():
            assert all(torch.tensor(values).isfinite().flatten())
        if row["curve"]:
            assert row["curve"][0]["t"] == 0
            assert row["curve"][-1]["t"] == 1
            assert row["summary"]["barrier"]["mean"] >= 0
            assert row["summary"]["AUC"]["mean"] >= 0
    has_curves = any(row["curve"] for row in found["rows"])
    assert (tmp_path / f"{paper}-{name}-smoke.svg").is_file() == has_curves
    assert not list(tmp_path.rglob("*.partial"))
    assert Table.from_json(found).markdown() == markdown
    again = json.loads(json.dumps(Table.from_json(found).to_json()))
    assert again == {name: found[name] for name in again}


@pytest.mark.parametrize(("paper", "name"), TWINS)
def test_twins_are_measured_alike_and_differ_at_scale(paper: str, name: str) -> None:
    own, other = EXPERIMENTS[paper][name], EXPERIMENTS[paper][TWINS[paper, name]]
    assert own.measure is other.measure
    assert type(own.config("smoke")) is type(other.config("smoke"))
    assert own.config("cpu") != other.config("cpu")


@pytest.mark.parametrize(("paper", "name"), SIBLINGS)
def test_siblings_are_measured_alike(paper: str, name: str) -> None:
    own, other = EXPERIMENTS[paper][name], EXPERIMENTS[paper][SIBLINGS[paper, name]]
    assert (paper, SIBLINGS[paper, name]) not in {*SIBLINGS, *TWINS}
    assert own.measure is other.measure
    assert type(own.config("smoke")) is type(other.config("smoke"))


def test_numbers_of_a_paper_belong_to_rows_of_its_table() -> None:
    for family, printed in transformers.PAPER.items():
        assert set(printed) <= {way.label for way in transformers.config(family, "cpu").ways}


def test_decoded_digits_stand_below_the_test_networks(ran: Callable[[str, str], tuple[Path, str]]) -> None:
    (sheet,) = results(ran("002", "digits")[0], "002", "digits")["pictures"]["decoded"]
    assert sheet["rows"][:2] == ["test networks", "whole group"]
    assert len(sheet["rows"]) == len(sheet["pixels"])
    assert {len(row) for row in sheet["pixels"]} == {len(sheet["columns"])}
    assert len({tuple(row) for row in sheet["pixels"]}) == len(sheet["rows"])


def test_the_digits_stand_in_and_the_table_says_so(ran: Callable[[str, str], tuple[Path, str]]) -> None:
    found = results(ran("001", "table1")[0], "001", "table1")
    assert found["title"].endswith("on digits")
    assert any("say nothing about the methods" in note for note in found["notes"])
    naive = found["rows"][0]
    assert naive["label"] == "Naive"
    assert naive["paper"] == {"barrier": "2.007 ± 0.00", "AUC": "0.835 ± 0.00"}
    assert "CPU s" not in naive["values"]


def test_only_the_whole_group_finds_copies_of_sine_networks_again(ran: Callable[[str, str], tuple[Path, str]]) -> None:
    rows = results(ran("001", "figure4a")[0], "001", "figure4a")["rows"]
    recovered = {row["label"]: row["summary"]["copies recovered"]["mean"] for row in rows}
    assert recovered["as fitted"] == 0
    assert recovered["weight matching, permutations"] == 0
    assert recovered["weight matching, permutations and signs"] == 0
    assert recovered["weight matching, all that discovery finds"] == 1


def test_several_seeds_are_one_table_and_one_record(tmp_path: Path) -> None:
    def run(*args: str) -> dict[str, Any]:
        main(["reproduce", "004", "figureA14", "--out", str(tmp_path), *args])
        return results(tmp_path, "004", "figureA14")

    alone = [run("--seed", seed) for seed in ("3", "4")]
    both = run("--seed", "3", "4")
    assert both["seeds"] == [3, 4]
    assert "--seed 3 4" in both["notes"][0]
    for *parts, row in zip(*(one["rows"] for one in alone), both["rows"], strict=True):
        assert row["values"]["ratio"] == [values for one in parts for values in one["values"]["ratio"]]
    assert "| over seeds |" in (tmp_path / "004-figureA14-smoke.md").read_text()
    records = [tmp_path / f"seed{one['seeds'][0]}.json" for one in alone]
    for record, one in zip(records, alone, strict=True):
        record.write_text(json.dumps(one))
    main(["reproduce", "--draw", *map(str, records), "--out", str(tmp_path / "joined")])
    joined = json.loads((tmp_path / "joined" / "seed3.json").read_text())
    assert joined["notes"] != both["notes"]  # there are two commands
    assert joined | {"notes": both["notes"]} == both


def test_only_different_seeds_of_one_experiment_are_joined(tmp_path: Path, refused: Callable[..., str]) -> None:
    table = Table("t", (), (Quantity("barrier"),), (Row("ours", {"barrier": [[1.0]]}),))

    def told(*runs: dict[str, Any]) -> str:
        paths = [tmp_path / f"{k}.json" for k in range(len(runs))]
        for path, run in zip(paths, runs, strict=True):
            path.write_text(
                json.dumps({"paper": "001", "experiment": "table1", "scale": "cpu"} | run | table.to_json())
            )
        return refused("reproduce", "--draw", *map(str, paths), "--out", str(tmp_path / "out"))

    assert "not of 001 table1 cpu, 001 table1 smoke" in told({"seed": 0}, {"seeds": [1], "scale": "smoke"})
    assert "these have the seeds [0, 0]" in told({"seed": 0}, {"seeds": [0]})
    assert "these have the seeds [0, 1, 2]" in told({"seed": 0}, {"seeds": [1, 2]})
    assert not (tmp_path / "out").exists()
    told({"seed": 0}, {"seeds": [0]})  # writes the files
    (tmp_path / "1.json").write_text((tmp_path / "0.json").read_text().replace('"seed": 0', '"seed": 1'))
    both = [str(tmp_path / f"{k}.json") for k in (0, 1)]
    (tmp_path / "2.json").write_text(
        (tmp_path / "0.json").read_text().replace('"seed": 0', '"seed": 2').replace("ours", "theirs")
    )
    assert "rows of different seeds are 'ours', 'theirs'" in refused(
        "reproduce", "--draw", both[0], str(tmp_path / "2.json")
    )
    assert "would replace" in refused("reproduce", "--draw", *both, "--out", str(tmp_path))
    main(["reproduce", "--draw", *both, "--columns", "barrier", "--out", str(tmp_path / "out")])
    assert json.loads((tmp_path / "out" / "0.json").read_text())["rows"][0]["values"] == {"barrier": [[1.0], [1.0]]}


def test_a_record_is_drawn_with_the_columns_that_are_asked_for(
    ran: Callable[[str, str], tuple[Path, str]], tmp_path: Path
) -> None:
    record = ran("001", "figure4a")[0] / "001-figure4a-smoke.json"
    main(["reproduce", "--draw", str(record), "--columns", "AUC", "barrier", "--out", str(tmp_path)])
    headings = (tmp_path / f"{record.stem}.md").read_text().splitlines()[2]
    assert [one.strip() for one in headings.split("|") if one.strip() not in ("", "n")] == ["AUC", "barrier"]


# --- resumption -------------------------------------------------------------------------------------------------


def interrupting(label: str, after: int) -> Progress:
    """Return a progress display that interrupts a part of the run after a number of steps."""
    done = 0.0

    def begin(name: str, steps: float, /) -> Advance:
        def advance(amount: float = 1, /, *, loss: float | None = None) -> None:
            nonlocal done
            done += amount * name.startswith(label)
            if done > after - 1e-9:
                raise KeyboardInterrupt

        return advance

    return begin


@pytest.mark.parametrize(("part", "after", "left"), [("training", 3, (1, 4)), ("aligning", 3, (0, 1))])
def test_an_interrupted_run_goes_on_where_it_stopped(
    part: str, after: int, left: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = EXPERIMENTS["001"]["table1"]
    config = experiment.config("smoke")
    config = replace(config, ways=(config.ways[0], config.ways[2]))  # as trained, and matched by weights
    whole = experiment.measure(config, Run("smoke", 0, tmp_path / "whole"))
    with pytest.raises(KeyboardInterrupt):
        experiment.measure(config, Run("smoke", 0, tmp_path / "cut", progress=interrupting(part, after)))

    counts = {"train": 0, "line": 0}
    train, line = populations.train, rg.line

    def counted_train(*args: Any, **kwargs: Any) -> Any:
        counts["train"] += 1
        return train(*args, **kwargs)

    def counted_line(*args: Any, **kwargs: Any) -> Any:
        counts["line"] += 1
        return line(*args, **kwargs)

    monkeypatch.setattr(populations, "train", counted_train)
    monkeypatch.setattr(rg, "line", counted_line)
    again = experiment.measure(config, Run("smoke", 0, tmp_path / "cut"))
    assert (counts["train"], counts["line"]) == left
    for one, other in zip(whole.rows, again.rows, strict=True):
        assert one.values["barrier"] == other.values["barrier"]
        assert one.curve == other.curve


def hold(path: Path, connection: Any) -> None:
    """Make a file slowly in a separate process, until the other end of the connection is closed."""

    def write() -> None:
        connection.send("begun")
        connection.poll(60)
        path.write_text('{"by": "other"}', encoding="utf-8")

    make_once(path, write)


@pytest.fixture
def other(tmp_path: Path) -> Iterator[tuple[Path, Any, Callable[[], None]]]:
    """Return the place of the record "1", which another process is making, the process, and a function that lets it
    end.
    """
    run = Run("smoke", 0, tmp_path)
    run.record("settings", "0", lambda: {"by": "before"})
    (known,) = tmp_path.glob("steps/*/0.json")
    path, spawn = known.with_name("1.json"), multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=hold, args=(path, there))
    process.start()
    there.close()
    assert here.poll(60)
    yield path, process, here.close
    here.close()
    process.join()


def test_steps_that_another_process_is_doing_are_put_off_and_not_done_twice(
    tmp_path: Path, other: tuple[Path, Any, Callable[[], None]]
) -> None:
    path, process, let_end = other
    run, made, told = Run("smoke", 0, tmp_path), [], []

    def step(_: Progress, key: str) -> dict[str, Any]:
        def make() -> dict[str, Any]:
            made.append(key)
            if key == "3":
                let_end()
            return {"by": "this"}

        return run.record("settings", key, make)

    run = replace(run, progress=lambda label, total: lambda amount, loss=None: told.append(amount))
    assert [one["by"] for one in run.grid("steps", step, "0123")] == ["before", "other", "this", "this"]
    assert made == ["2", "3"]
    assert sum(told) == pytest.approx(4)
    process.join()
    assert process.exitcode == 0
    assert not list(path.parent.glob("*.lock"))


def test_steps_of_steps_are_put_off_by_the_outer_ones(
    tmp_path: Path, other: tuple[Path, Any, Callable[[], None]]
) -> None:
    run, made = Run("smoke", 0, tmp_path), []

    def step(_: Progress, outer: str) -> list[dict[str, Any]]:
        def inner(_: Progress, key: str) -> dict[str, Any]:
            def make() -> dict[str, Any]:
                made.append(key)
                if outer == "b":
                    other[2]()
                return {"by": "this"}

            return run.record("settings", key, make)

        return run.grid("inner", inner, {"a": "01", "b": "23"}[outer])

    found = run.grid("outer", step, "ab")
    assert [one["by"] for one in (*found[0], *found[1])] == ["before", "other", "this", "this"]
    assert made == ["2", "3"]


def test_who_waits_for_another_process_says_so(
    tmp_path: Path,
    other: tuple[Path, Any, Callable[[], None]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["reproduce"])  # the command line prints what is said from now on
    capsys.readouterr()
    monkeypatch.setattr(experiment.LOG, "filters", [lambda _: other[2]() or True])  # the other ends when it is said
    assert Run("smoke", 0, tmp_path).record("settings", "1", lambda: {"by": "this"}) == {"by": "other"}
    said = f"waiting for another process, which is making {str(other[0])!r}, to end or be stopped\n"
    assert capsys.readouterr().err == said


def test_a_process_that_is_killed_sets_its_step_free(
    tmp_path: Path, other: tuple[Path, Any, Callable[[], None]]
) -> None:
    path, process, _ = other
    process.kill()
    process.join()
    assert Run("smoke", 0, tmp_path).record("settings", "1", lambda: {"by": "this"}) == {"by": "this"}
    assert not list(path.parent.glob("*.lock"))


def test_steps_are_kept_by_seed_settings_and_key(tmp_path: Path) -> None:
    run, calls = Run("smoke", 0, tmp_path), []

    def step(value: int) -> dict[str, Any]:
        calls.append(value)
        return {"value": value}

    assert run.record(("a", 1), "x", lambda: step(1)) == {"value": 1}
    assert run.record(("a", 1), "x", lambda: step(2)) == {"value": 1}
    assert run.record(("a", 1), "y", lambda: step(3)) == {"value": 3}
    assert run.record(("a", 2), "x", lambda: step(4)) == {"value": 4}
    assert Run("smoke", 1, tmp_path).record(("a", 1), "x", lambda: step(5)) == {"value": 5}
    assert calls == [1, 3, 4, 5]


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    save_text("old", path)
    with pytest.raises(UnicodeEncodeError):
        save_text("\ud800", path)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_chance_depends_on_the_seed_and_the_purpose(tmp_path: Path) -> None:
    draws = [
        torch.rand(4, generator=Run("smoke", seed, tmp_path).generator(*names))
        for seed, names in [(0, ("a", 1)), (0, ("a", 1)), (0, ("a", 2)), (1, ("a", 1))]
    ]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    assert not torch.equal(draws[0], draws[3])


# --- tables -----------------------------------------------------------------------------------------------------


def test_summaries() -> None:
    several = summarize([[1.0, 3.0], [5.0, 7.0]])
    assert (several.mean, several.count) == (4.0, 4)
    assert several.standard_error == pytest.approx((20 / 3) ** 0.5 / 2)
    assert (several.deviation, several.print_seeds(1)) == (None, "2.0 and 6.0")
    three = summarize([[1.0], [2.0, 4.0], [8.0]])
    assert (three.deviation, three.print_seeds(1)) == (pytest.approx(13**0.5), "3.6")
    assert summarize([[1.0], [3.0], [8.0]]).print_seeds(1) == ""  # the error is theirs already
    assert several.span == (4 - several.standard_error, 4 + several.standard_error)
    one = summarize([[2.0]])
    assert (one.mean, one.standard_error, one.deviation, one.print_seeds(1)) == (2.0, None, None, "")
    assert summarize([[3.0], [2.0]]).print_seeds(1) == ""  # both are printed already
    two = summarize([[3.0, 2.0]])
    assert (two.standard_error, two.span, two.print_mean(1)) == (None, (2.0, 3.0), "3.0 and 2.0")


def test_errors_are_those_of_independent_units_and_of_differences_in_pairs() -> None:
    rows = (
        Row("ours", {"barrier": [[1.0, 3.0], [2.0, 4.0], [4.0, 6.0]]}),
        Row("theirs", {"barrier": [[2.0, 4.0], [3.0, 5.0], [6.0, 8.0]]}),
        Row("others", {"barrier": [[2.0], [3.0], [7.0]]}),
    )
    quantities = (Quantity("barrier", 3),)
    by_pair = Table("t", (), quantities, rows, paired="ours").cells()
    assert by_pair[0] == ["", "n", "barrier", "over seeds", "less ours, paired"]
    assert [line[-1] for line in by_pair[1:]] == ["", "1.333 ± 0.211", ""]
    by_shape = Table("t", (), quantities, rows, unit="shape", paired="ours").cells()
    assert by_shape[0] == ["", "n shapes", "barrier", "less ours, paired"]
    # Means of the shapes are 2, 3, 5, whose deviation is 1.528, divided by the root of three shapes.
    assert by_shape[1] == ["ours", "3", "3.333 ± 0.882", ""]
    assert by_shape[2] == ["theirs", "3", "4.667 ± 1.202", "1.333 ± 0.333"]


def test_n_counts_the_first_quantity_of_a_row() -> None:
    rows = (
        Row("as trained", {"barrier": [[1.0, 2.0]], "loss of the ends": [[1.0, 2.0, 3.0, 4.0]]}),
        Row("ends alone", {"loss of the ends": [[1.0, 2.0, 3.0, 4.0]]}),
        Row("nothing", {}),
    )
    table = Table("t", (), (Quantity("barrier", 0), Quantity("loss of the ends", 1)), rows)
    assert [line[:3] for line in table.cells()] == [
        ["", "n", "barrier"],
        ["as trained", "2", "1 and 2"],
        ["ends alone", "4", ""],
        ["nothing", "0", ""],
    ]


def test_an_excerpt_has_the_columns_that_are_named_in_their_order() -> None:
    rows = (Row("ours", {"a": [[1.0]], "b": [[2.0]], "c": [[3.0]]}),)
    table = Table("t", (), tuple(Quantity(name, 0) for name in "abc"), rows)
    assert table.excerpt(("c", "a")).cells() == [["", "c", "a"], ["ours", "3", "1"]]
    with pytest.raises(ValueError, match="no column 'd'; it has: a; b; c"):
        table.excerpt(("a", "d"))


def test_a_quantity_by_group_has_a_column_for_each_way() -> None:
    rows = (
        Row("MNIST: none", {"barrier": [[1.0]], "s": [[9.0]]}, {"barrier": "1.1"}),
        Row("MNIST: ours", {"barrier": [[2.0]]}),
        Row("CIFAR: 10: ours", {"barrier": [[4.0]]}),
    )
    table = Table("t", (), (Quantity("barrier", 1), Quantity("s", 1)), rows, paired="ours")
    assert table.by_group("barrier").cells() == [
        ["", "none", "paper", "ours"],
        ["MNIST", "1.0", "1.1", "2.0"],
        ["CIFAR: 10", "", "", "4.0"],
    ]
    with pytest.raises(ValueError, match="no column 'loss'"):
        table.by_group("loss")
    with pytest.raises(ValueError, match="row 'alone' is of no group"):
        replace(table, rows=(*rows, Row("alone", {}))).by_group("barrier")


def test_tables_of_seeds_are_joined_value_by_value() -> None:
    first = Table("t", ("how", "lr 1"), (Quantity("barrier", 1),), (Row("ours", {"barrier": [[1.0, 2.0]]}),))
    second = Table("t", ("how", "lr 2"), (Quantity("barrier", 1),), (Row("ours", {"barrier": [[3.0, 6.0]]}),))
    joined = join_seeds({0: first, 7: second})
    assert joined.rows[0].values == {"barrier": [[1.0, 2.0], [3.0, 6.0]]}
    assert joined.cells() == [["", "n", "barrier", "over seeds"], ["ours", "4", "3.0 ± 1.1", "1.5 and 4.5"]]
    assert joined.notes == ("how", "lr 1", "seed 7: lr 2")
    assert join_seeds({0: first}) is first
    with pytest.raises(ValueError, match="rows of different seeds are 'ours', 'theirs'"):
        join_seeds({0: first, 1: replace(second, rows=(Row("theirs", {"barrier": [[1.0]]}),))})


def test_a_unit_has_the_values_of_all_seeds() -> None:
    def table(values: list[list[float]]) -> Table:
        return Table("t", (), (Quantity("barrier", 1),), (Row("ours", {"barrier": values}),), unit="shape")

    joined = join_seeds({0: table([[1.0, 2.0], [5.0], [7.0]]), 1: table([[3.0], [6.0], [9.0]])})
    assert joined.rows[0].values == {"barrier": [[1.0, 2.0, 3.0], [5.0, 6.0], [7.0, 9.0]]}
    # Of the means 2, 5.5 and 8: there are three shapes, however often each was measured.
    assert joined.cells()[1][1:] == ["3", "5.2 ± 1.7"]


def test_curves_of_seeds_are_averaged() -> None:
    def table(loss: float) -> Table:
        curve = ({"t": 0.0, "loss": loss}, {"t": 1.0, "loss": 2 * loss})
        return Table("t", (), (), (Row("ours", {}, curve=curve),))

    assert [row["loss"] for row in join_seeds({0: table(1.0), 1: table(3.0)}).rows[0].curve] == [2.0, 4.0]


def test_a_table_as_markdown() -> None:
    rows = (
        Row("Naive", {"barrier": [[1.0, 2.0], [3.0, 4.0]]}, {"barrier": "2.007"}),
        Row("other", {"barrier": [[0.5, 0.5], [0.5, 0.5]], "s": [[1.0, 1.0], [1.0, 1.0]]}),
    )
    table = Table("Title", ("a note",), (Quantity("barrier", 2), Quantity("s", 1)), rows)
    assert table.markdown().splitlines() == [
        "## Title",
        "",
        "|  | n | barrier | over seeds | paper | s | over seeds |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| Naive | 4 | 2.50 ± 0.65 | 1.50 and 3.50 | 2.007 |  |  |",
        "| other | 4 | 0.50 ± 0.00 | 0.50 and 0.50 |  | 1.0 ± 0.0 | 1.0 and 1.0 |",
        "",
        "- a note",
    ]
    assert json.loads(json.dumps(table.to_json(), allow_nan=False))["rows"][0]["summary"]["barrier"]["mean"] == 2.5


def test_a_fitted_temperature_undoes_any_scale_of_the_outputs() -> None:
    generator = torch.Generator().manual_seed(0)
    module, x = nn.Linear(4, 3).double(), torch.randn(400, 4, generator=generator).double()
    params = {"weight": torch.randn(3, 4, generator=generator).double(), "bias": torch.zeros(3).double()}
    logits = x @ params["weight"].T
    y = torch.multinomial(torch.softmax(logits / 2, dim=1), 1, generator=generator)[:, 0]
    temperature = fit_temperature(logits, y)
    assert temperature == pytest.approx(2, rel=0.2)
    assert fit_temperature(100 * logits, y) == pytest.approx(100 * temperature, rel=1e-3)
    judge = TemperedJudge(rg.Task(module, [(x, y)]), rg.Task(module, [(x, y)]))
    scaled = {name: tensor / 5 for name, tensor in params.items()}
    assert judge(scaled)["loss"] == pytest.approx(judge(params)["loss"], rel=1e-6)
    assert judge(params)["loss"] < judge.judge.evaluate(params)["loss"]


def test_mean_curves() -> None:
    lines = [[{"t": 0.0, "loss": x}, {"t": 0.5, "loss": 2 * x}, {"t": 1.0, "loss": x}] for x in (1.0, 3.0)]
    assert [row["loss"] for row in mean_curve(lines)] == [2.0, 4.0, 2.0]


def test_rows_leave_out_what_a_record_lacks() -> None:
    records = [[{"loss": 1.0, "CPU s": None}, {"loss": 3.0, "CPU s": None}]]
    quantities = (Quantity("loss"), Quantity("double", of=lambda record: 2 * record["loss"]), Quantity("CPU s"))
    assert Row.of("a", records, quantities).values == {"loss": [[1.0, 3.0]], "double": [[2.0, 6.0]]}


def test_a_step_of_a_grid_advances_it_by_its_parts(tmp_path: Path) -> None:
    told = Recorded()

    def train(unit: Progress, k: int) -> int:
        if k:  # the other one was finished by an earlier run
            advance = unit("training", 4)
            for _ in range(4):
                advance(loss=0.5)
        return k

    assert Run("smoke", 0, tmp_path, told).grid("training networks", train, [0, 1]) == [0, 1]
    assert (told.labels, told.totals) == (["training networks"], [2])
    assert sum(told.amounts) == pytest.approx(2)
    assert sorted(told.amounts) == pytest.approx([0.01, 0.24, 0.25, 0.25, 0.25, 1])


def test_a_grid_is_nested_as_its_axes(tmp_path: Path) -> None:
    found = Run("smoke", 0, tmp_path).grid("products", lambda _, a, b: a * b, [1, 2], [3, 4, 5])
    assert found == [[3, 4, 5], [6, 8, 10]]
    assert Run("smoke", 0, tmp_path).grid("none", lambda _, a, b: a, [1, 2], []) == [[], []]


def test_smaller_symmetries_are_subgroups() -> None:
    module, x = Siren(1, 8, 1, generator=torch.Generator().manual_seed(0)).double(), torch.linspace(-1, 1, 9).double()
    whole = rg.discover(module, (x[:, None],))
    params = dict(module.state_dict())
    for smaller, kind in ((without_shifts(whole), "signed"), (permutations_only(whole), "permutation")):
        assert {group.kind for group in smaller.groups} == {kind}
        moved = smaller.act(smaller.random(torch.Generator().manual_seed(1)), params)
        outputs = [torch.func.functional_call(module, p, (x[:, None],)) for p in (params, moved)]
        assert torch.allclose(*outputs, atol=1e-12)
        assert not torch.equal(moved["layers.1.weight"], params["layers.1.weight"])


# --- what it says -----------------------------------------------------------------------------------------------


def test_without_an_experiment_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    main(["reproduce"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(NAMES)
    for (paper, name), line in zip(NAMES, lines, strict=True):
        assert line.startswith(f"regauge reproduce {paper} {name} ")
        assert line.endswith(EXPERIMENTS[paper][name].summary)
    main(["reproduce", "extra"])
    assert len(capsys.readouterr().out.splitlines()) == len(EXPERIMENTS["extra"])


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["001", "tabel1"], r"paper '001' has no experiment 'tabel1'; did you mean 'table1'? there are table1, "),
        (["001", "zzz"], r"paper '001' has no experiment 'zzz'; there are table1, "),
        (["007", "table1"], r"there are no experiments of paper '007'; there are those of 000, 001, "),
        (["007"], r"there are no experiments of paper '007'"),
        (["001", "table1", "--seed", "1", "1"], r"--seed takes one seed or several different ones, not [1, 1]"),
        (["001", "table1", "--columns", "AUC"], r"--columns and --by-group are for a table that --draw reads"),
        (["000", "uci", "--device", "cuda"], r"000 uci runs on the CPU only; --device cuda is for 001 table1; "),
        (["001", "table1", "--device", "there"], r"device 'there' cannot be used here"),
        (["001", "table1", "--scale", "cpu"], r"MNIST is not part of regauge: set REGAUGE_DATA"),
    ],
)
def test_what_cannot_run_is_one_sentence(
    args: list[str], sentence: str, tmp_path: Path, refused: Callable[..., str]
) -> None:
    assert sentence in refused("reproduce", *args, "--out", str(tmp_path))


@pytest.mark.parametrize(
    "text",
    [
        "[1]",
        "{}",
        "3",
        "not JSON",
        '{"title": "t", "notes": [], "quantities": [], "rows": 3, "pictures": {}, "loss": ""}',
        '{"title": "t", "notes": [], "loss": "", "pictures": {}, "quantities": [{"name": "a", "digits": "x"}],'
        ' "rows": [{"label": "b", "values": {"a": [["?"]]}, "paper": {}, "curve": []}]}',
        '{"title": "t", "notes": [], "loss": "", "pictures": {}, "quantities": [{"name": "a", "digits": 1}],'
        ' "rows": [{"label": "b", "values": {"a": [[]]}, "paper": {}, "curve": []}]}',
        '{"title": "t", "notes": [], "loss": "", "pictures": {}, "quantities": [{"name": "a", "digits": 1}],'
        ' "rows": [{"label": "b", "values": {"a": [[1]]}, "paper": {}, "curve": [{"t": 0}]}]}',
        '{"title": "t", "notes": [], "loss": "", "pictures": {"p": [{"title": "x"}]}, "quantities": [], "rows": []}',
    ],
)
def test_a_file_that_is_no_record_is_not_drawn(text: str, tmp_path: Path, refused: Callable[..., str]) -> None:
    record, out = tmp_path / "x.json", tmp_path / "out"
    record.write_text(text)
    told = refused("reproduce", "--draw", str(record), "--out", str(out))
    assert f"{str(record)!r} cannot be drawn: " in told
    assert not out.exists() or not list(out.iterdir())


def test_a_column_that_a_record_lacks_is_named(tmp_path: Path, refused: Callable[..., str]) -> None:
    table = Table("t", (), (Quantity("barrier"),), (Row("ours", {"barrier": [[1.0]]}),))
    record = tmp_path / "x.json"
    record.write_text(json.dumps(table.to_json()))
    told = refused("reproduce", "--draw", str(record), "--columns", "AUC", "--out", str(tmp_path / "out"))
    assert "the table has no column 'AUC'; it has: barrier" in told


# --- names of steps ---------------------------------------------------------------------------------------------


def settings_class(**defaults: Any) -> Any:
    """Return a class of settings with some fields, as in another version of the code."""
    return make_dataclass("Settings", [("steps", int), *((k, type(v), v) for k, v in defaults.items())], frozen=True)


def test_further_settings_repeat_no_step_while_they_have_their_defaults(tmp_path: Path) -> None:
    made: list[str] = []

    def measure(run: Run, settings: Any, cell: Any, name: str) -> Any:
        def step(_: Any) -> dict[str, Any]:
            made.append(name)
            return {"name": name}

        (record,) = run.records("label", (settings, "more"), step, [cell])
        network = run.network({"population": settings}, "0", lambda: {"w": torch.tensor([float(len(made))])})
        return record["name"], float(network["w"])

    run = Run("smoke", 0, tmp_path)
    old, new, other = settings_class(lr=0.1), settings_class(lr=0.1, clip=1.0), settings_class(lr=0.2, clip=1.0)
    first = measure(run, old(5), old(7), "old")
    assert measure(run, new(5), new(7), "new") == first == ("old", 1.0)
    assert measure(run, new(5, clip=2.0), new(7), "another value")[0] == "another value"
    assert measure(run, new(5), new(7, clip=2.0), "another cell")[0] == "another cell"
    # A default that was changed is another setting, and the former value stays what it was.
    assert measure(run, other(5), other(7), "default")[0] == "default"
    assert measure(run, other(5), other(7), "again")[0] == "default"
    assert measure(run, old(5), old(7), "back") == first
    assert measure(run, new(5), new(7), "back") == first
    assert made == ["old", "another value", "another cell", "default"]


def test_settings_of_a_class_with_its_own_words_are_these_words() -> None:
    assert describe(Name("mine")) == "mine"
    assert describe((settings_class(lr=0.1)(5, lr=0.3), [1.5, "a"])) == [
        {"kind": "Settings", "fields": {"steps": "5", "lr": "0.3"}},
        ["1.5", "'a'"],
    ]


TRAININGS = (
    ClassifierConfig(optimizer=AdamW(0.1, weight_decay=0.2)),
    ClassifierConfig(optimizer=AdamW(0.1, betas=(0.8, 0.999), weight_decay=0.2)),
    ClassifierConfig(optimizer=Adam(0.1, weight_decay=0.2)),
    ClassifierConfig(optimizer=SGD(0.1, weight_decay=0.2)),
    ClassifierConfig(optimizer=SGD(0.1, momentum=0.9, weight_decay=0.2)),
    ClassifierConfig(optimizer=SGD(0.1, momentum=0.9, weight_decay=0.2, is_nesterov=True)),
    ClassifierConfig(optimizer=AdamW(0.1, weight_decay=0.2), schedule=OneCycle()),
    ClassifierConfig(optimizer=AdamW(0.1, weight_decay=0.2), schedule=Cosine()),
    ClassifierConfig(optimizer=AdamW(0.1, weight_decay=0.2), schedule=Constant()),
)
INFERENCES = (
    VariationalConfig(),
    VariationalConfig(optimizer=AdamW(1e-3, weight_decay=0.0)),
    VariationalConfig(optimizer=Adam(1e-3, betas=(0.9, 0.99))),
    VariationalConfig(optimizer=SGD(1e-3, momentum=0.9)),
    VariationalConfig(optimizer=SGD(1e-3, momentum=0.9, is_nesterov=True)),
    VariationalConfig(schedule=OneCycle()),
    VariationalConfig(schedule=Constant()),
)


def test_trainings_have_names_of_their_own() -> None:
    names = [*map(name_training, TRAININGS), *map(name_inference, INFERENCES)]
    assert len({*names}) == len(names)
    # By these the chance of every documented number is drawn.
    assert names[0] == "Training(epochs=5, batch=256, lr=0.1, weight_decay=0.2, schedule='cycle')"
    assert names[len(TRAININGS)] == (
        "Variational(epochs=30, batch=500, prior_std=0.1, temperature=1.0, initial_std=0.01, optimizer='adam', "
        "momentum=0.9, lr=0.001, lr_std=0.01, schedule='cosine', samples=1)"
    )

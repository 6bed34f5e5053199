"""The demo with narrow networks: its outputs are consistent, repeatable and correct."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from damage import LIMITED, Kind, check_kind

import regauge as rg
from regauge.checkpoints.alignments import load_alignment
from regauge.checkpoints.checkpoint import load
from regauge.cli.main import main
from regauge.core.symmetry import Symmetry
from regauge.data.images import digits
from regauge.nets.classification import split_batches
from regauge.report.demo_page import demo_page
from regauge.report.figures import data_uri, data_uris, permutation_figure, weights_figures
from regauge.report.line_figures import CHORD, line_figure, path_figure
from regauge.zoo.demo import cases

SIZES = {"mlp": [24, 24], "cnn": [4, 8, 16]}


@pytest.fixture
def results(demo_folder: Path) -> dict[str, Any]:
    return dict(json.loads((demo_folder / "results.json").read_text()))


def test_the_symmetry_is_found_and_verified(demo_folder: Path, results: dict[str, Any]) -> None:
    for model in results["models"]:
        symmetry = model["symmetry"]
        assert [group["size"] for group in symmetry["groups"]] == SIZES[model["key"]]
        assert {group["kind"] for group in symmetry["groups"]} == {"scaled"}
        assert symmetry["is_verified"]
        assert symmetry["check"].startswith("Verified")
        stored = Symmetry.from_json((demo_folder / f"{model['key']}-symmetry.json").read_text())
        assert [group.size for group in stored.groups] == SIZES[model["key"]]


def test_the_files_give_the_numbers(demo_folder: Path, results: dict[str, Any]) -> None:
    data = digits()
    for model, case in zip(results["models"], cases(data, is_quick=True), strict=True):
        evaluate = rg.Task(case.module, split_batches(data.test_images, data.test_labels)).evaluate
        a, b, c, moved, merged = (
            load(demo_folder / f"{case.key}-{name}.safetensors") for name in ("a", "b", "c", "b-aligned", "merged")
        )
        for params, network in zip((a, b, c), model["networks"], strict=True):
            assert evaluate(params) == pytest.approx({k: network[k] for k in ("loss", "accuracy")}, rel=1e-5)
        assert evaluate(merged) == pytest.approx(model["merged"]["aligned"], rel=1e-5)
        assert evaluate(moved)["loss"] == pytest.approx(evaluate(b)["loss"], rel=1e-4)
        alignment = load_alignment(demo_folder / f"{case.key}-b-aligned.alignment.safetensors")
        again = alignment.symmetry.act(alignment.element, b)
        assert all(torch.equal(again[name], moved[name]) for name in moved)
        middle = {name: (a[name] + moved[name]) / 2 for name in a}
        assert evaluate(middle)["loss"] == pytest.approx(model["midpoints"]["aligned"]["loss"], rel=1e-4)
        assert model["distance"]["after"] < model["distance"]["before"]
        for key in ("naive", "aligned"):
            rows = model["curves"]["as trained" if key == "naive" else "aligned"]
            ends = rows[0]["loss"], rows[-1]["loss"]
            above = [row["loss"] - (1 - row["t"]) * ends[0] - row["t"] * ends[1] for row in rows]
            assert model["barriers"][key] == pytest.approx(max(above), abs=1e-6)


def test_the_page_stands_alone(demo_folder: Path, results: dict[str, Any]) -> None:
    page = (demo_folder / "report.html").read_text(encoding="utf-8")
    assert page == demo_page(demo_folder)
    sources = re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?([^"'\s>)]+)""", page)
    assert sources
    assert all(source.startswith("data:") for source in sources)
    assert "@import" not in page
    assert "<script" not in page
    for model in results["models"]:
        for key in ("naive", "aligned"):
            assert f"{model['barriers'][key]:.3f}" in page
            assert f"{100 * model['midpoints'][key]['accuracy']:.1f}%" in page
        for group in model["symmetry"]["groups"]:
            assert f"<code>{group['name']}</code>" in page


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make pages without figures, which take most of the time."""
    empty: dict[str, list[str]] = {"line": [], "permutations": [], "weights": []}
    monkeypatch.setattr("regauge.report.demo_page._figures", lambda *args: empty)


@pytest.mark.usefixtures("undrawn")
def test_the_same_seed_gives_the_same_numbers(
    tmp_path: Path, results: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    main(["demo", "--quick", "--data", "digits", "--out", str(tmp_path)])
    again = json.loads((tmp_path / "results.json").read_text())
    assert again["models"] == results["models"]
    printed = capsys.readouterr().out
    assert "mean of A and B, aligned" in printed
    assert f"{results['models'][0]['barriers']['naive']:.3f}" in printed


@pytest.mark.usefixtures("undrawn")
def test_text_in_results_is_escaped(demo_folder: Path, tmp_path: Path) -> None:
    results = json.loads((demo_folder / "results.json").read_text())
    results["data"]["name"] = "<script>alert(1)</script>"
    (tmp_path / "results.json").write_text(json.dumps(results))
    (tmp_path / "pictures.safetensors").write_bytes((demo_folder / "pictures.safetensors").read_bytes())
    assert "<script" not in demo_page(tmp_path)


@LIMITED
@pytest.mark.parametrize("examples", [pytest.param(6), pytest.param(60, marks=pytest.mark.thorough)])
def test_changed_results_are_shown_or_refused(examples: int, demo_folder: Path, tmp_path: Path) -> None:
    """The test uses the results of one network, because figures take most of the time."""

    def right(folder: Path) -> Any:
        (folder / "pictures.safetensors").write_bytes((demo_folder / "pictures.safetensors").read_bytes())
        found = json.loads((demo_folder / "results.json").read_text())
        return found | {"models": found["models"][:1]}

    def read(folder: Path, document: Any) -> str:
        (folder / "results.json").write_text(json.dumps(document))
        return demo_page(folder)

    check_kind(Kind(read, right, "results.json", use=str), tmp_path, examples)


@pytest.mark.parametrize("name", ["results.json", "pictures.safetensors"])
def test_damaged_files_of_the_demo_are_named(name: str, demo_folder: Path, tmp_path: Path) -> None:
    for one in ("results.json", "pictures.safetensors"):
        content = (demo_folder / one).read_bytes()
        (tmp_path / one).write_bytes(content[:-9] if one == name else content)
    with pytest.raises(ValueError, match=name):
        demo_page(tmp_path)


def test_figures_are_the_same_bytes_every_time() -> None:
    rows = [{"t": t / 4, "loss": 1 + t * (4 - t), "accuracy": 0.5} for t in range(5)]
    perm = torch.tensor([2, 0, 1]).numpy()
    images = torch.eye(3).expand(2, 3, 3).numpy()
    for draw in (
        lambda: data_uri(line_figure({"one": rows, "two": rows}), "svg"),
        lambda: data_uri(line_figure({"one": rows}, "accuracy"), "svg"),
        lambda: data_uri(permutation_figure("h", perm), "svg"),
        lambda: "".join(data_uris(weights_figures({"a": images, "b": -images}), "png")),
    ):
        assert draw() == draw()


def test_figures_show_the_data() -> None:
    rows = [{"t": t / 4, "loss": 1.0 + t * (4 - t)} for t in range(5)]
    axes = line_figure({"one": rows}).axes[0]
    assert list(axes.lines[0].get_ydata()) == [row["loss"] for row in rows]
    assert "barrier 4.00" in [text.get_text() for text in axes.texts]
    flat = line_figure({"one": [{"t": 0.0, "loss": 1.0}, {"t": 1.0, "loss": 1.0}]}).axes[0]
    assert not flat.texts
    assert [flat.lines[-1].get_label(), *flat.lines[-1].get_ydata()] == [CHORD, 1.0, 1.0]
    dots = permutation_figure("h", torch.tensor([2, 0, 1]).numpy()).axes[0].lines[-1]
    assert list(dots.get_xdata()) == [2, 0, 1]


def test_a_path_shows_files_chord_barrier_and_accuracy() -> None:
    rows = [{"t": t / 4, "loss": 7 + t + t * (4 - t), "accuracy": 0.9 + 0.01 * t} for t in range(5)]
    figure = path_figure({"": rows}, "cross entropy (nats)", ("A: first.safetensors", "B: second.safetensors"))
    loss, accuracy = figure.axes
    assert loss.get_title(loc="left") == "cross entropy (nats): barrier 4; axis not from 0"
    assert accuracy.get_title(loc="left") == "accuracy; axis not from 0"
    assert list(accuracy.lines[0].get_ydata()) == [row["accuracy"] for row in rows]
    (chord,) = (line for line in loss.lines if line.get_label() == CHORD)
    assert list(chord.get_ydata()) == [7, 11]
    assert [tick.get_text() for tick in loss.get_xticklabels()] == [
        "A: first.safetensors",
        "midpoint",
        "B: second.safetensors",
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("key", ["mlp", pytest.param("cnn", marks=pytest.mark.thorough)])
def test_alignment_removes_the_barrier(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test uses one architecture of the demo, because training a convolutional network takes 45 seconds."""
    monkeypatch.setattr(
        "regauge.zoo.demo.cases", lambda *args, **options: [c for c in cases(*args, **options) if c.key == key]
    )
    main(["demo", "--data", "digits", "--out", str(tmp_path)])
    (model,) = json.loads((tmp_path / "results.json").read_text())["models"]
    assert model["key"] == key
    assert model["barriers"]["naive"] > 0.3
    assert model["barriers"]["aligned"] < 0.06
    assert model["midpoints"]["aligned"]["accuracy"] > 0.95
    assert model["merged"]["aligned"]["loss"] < model["merged"]["naive"]["loss"] / 4

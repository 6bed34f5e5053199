"""`regauge flow`: flows are fitted, sampled, judged and guided on the command line."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import regauge as rg
from regauge import flow
from regauge.cli.main import main
from regauge.core.task import Task
from regauge.nets.mlp import mlp
from regauge.storage import Store
from regauge.storage.architecture import Architecture
from regauge.training.settings import derive_seed

INPUTS = torch.randn(40, 3, generator=torch.Generator().manual_seed(9))
DATA = """import torch


def batches():
    inputs = torch.randn(40, 3, generator=torch.Generator().manual_seed(9))
    return [(part, (part[:, 0] > 0).long()) for part in inputs.split(20)]
"""


def write_store(folder: Path, *widths: int, is_common: bool = False) -> None:
    """Write networks of two kinds around one teacher, in random orders."""
    architecture = Architecture("MLP", "regauge.nets.mlp:mlp", {"widths": list(widths)})
    symmetry = rg.discover(mlp(*widths), (INPUTS[:, : widths[0]],))
    chance = torch.Generator().manual_seed(0)
    initialization = {"kind": "Initialization", "kinds": ["normal"], "scale": 0.5, "is_common": is_common}
    store = Store.create(folder, architecture, symmetry, about={"training": {"initialization": initialization}})
    teacher = {spec.name: torch.randn(spec.shape, generator=chance) for spec in architecture.layout}
    drawn = {n: t + 0.3 * torch.randn(80, *t.shape, generator=chance) for n, t in teacher.items()}
    rows = [{"id": k, "step": 0, "kind": "even" if k % 2 == 0 else "odd"} for k in range(80)]
    store.append(symmetry.act(symmetry.random(chance, batch=(80,)), drawn), rows)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a store, data, and flows that were fitted to the store."""
    folder = tmp_path_factory.mktemp("flows")
    write_store(folder / "zoo", 3, 5, 2)
    write_store(folder / "wide", 3, 8, 2)
    write_store(folder / "wrong", 2, 5, 2)
    (folder / "task.py").write_text(DATA)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        small = ["--width", "8", "--depth", "1", "--epochs", "2", "--batch", "32"]
        main(["flow", "fit", "zoo", "-o", "flow.safetensors", *small, "--net", "message_passing", "--unaligned"])
        main(["flow", "fit", "zoo", "-o", "kinds.safetensors", *small, "--labels", "kind", "--prior", "initialization"])
        plain = ["--net", "perceptron", "--aligned", "--scales", "keep", "--prior", "full"]
        main(["flow", "fit", "zoo", "-o", "plain.safetensors", *small, *plain])
        main(
            [
                "flow",
                "fit",
                "zoo",
                "-o",
                "thesis.safetensors",
                *small,
                "--thesis",
                "geometric",
                "--head",
                "layers.1.weight",
            ]
        )
    return folder


@pytest.fixture
def place(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use a new current folder, with links to the shared files."""
    for path in made.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def drawn(folder: str) -> dict[str, torch.Tensor]:
    return Store.open(folder).read(slice(None))


def test_a_store_is_drawn_that_other_commands_read(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["flow", "sample", "flow.safetensors", "--networks", "12", "--steps", "4"]
    main([*arguments, "-o", "new", "--json"])
    assert json.loads(capsys.readouterr().out)["written"] == ["new"]
    store = Store.open("new")
    assert len(store) == 12
    assert store.symmetry == Store.open("zoo").symmetry
    task = Task(store.architecture.module(), [(INPUTS, (INPUTS[:, 0] > 0).long())])
    assert task.evaluate_each(drawn("new"))["loss"].isfinite().all()
    main(["zoo", "info", "new"])
    main(["zoo", "map", "new", "-o", "map.png"])
    main([*arguments, "-o", "again"])
    assert all(torch.equal(tensor, drawn("again")[name]) for name, tensor in drawn("new").items())
    before = [path.stat().st_mtime_ns for path in (place / "new").rglob("*.safetensors")]
    main([*arguments, "-o", "new"])  # Nothing is missing.
    assert before == [path.stat().st_mtime_ns for path in (place / "new").rglob("*.safetensors")]


def test_an_interrupted_sampling_is_continued(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regauge.flow.stored_samples.NETWORKS_OF_SHARD", 5)
    arguments = ["flow", "sample", "plain.safetensors", "--networks", "12", "--steps", "2"]
    main([*arguments, "-o", "whole"])
    main([*arguments, "-o", "part"])
    first, second, third = sorted((place / "part").rglob("*.safetensors"))
    kept = first.stat().st_mtime_ns, third.stat().st_mtime_ns
    second.unlink()
    main([*arguments, "-o", "part"])
    assert kept == (first.stat().st_mtime_ns, third.stat().st_mtime_ns)
    assert all(torch.equal(tensor, drawn("part")[name]) for name, tensor in drawn("whole").items())


def test_networks_are_drawn_for_labels_widths_and_as_the_thesis_did(place: Path) -> None:
    main(["flow", "sample", "kinds.safetensors", "--networks", "3", "--steps", "2", "--label", "odd", "-o", "odd"])
    main(["flow", "sample", "kinds.safetensors", "--networks", "3", "--steps", "2", "--label", "even", "-o", "even"])
    assert Store.open("odd").rows["label"].tolist() == ["odd"] * 3
    assert not torch.equal(drawn("odd")["layers.0.weight"], drawn("even")["layers.0.weight"])
    main(["flow", "sample", "flow.safetensors", "--networks", "2", "--steps", "2", "--like", "wide", "-o", "wider"])
    assert drawn("wider")["layers.0.weight"].shape == (2, 8, 3)
    main(
        ["flow", "sample", "thesis.safetensors", "--networks", "2", "--solver", "thesis", "--noise", "0.1", "-o", "old"]
    )
    assert flow.load_flow("thesis.safetensors").design.representation.head_form == "unit"
    assert drawn("old")["layers.0.weight"].isfinite().all()


def test_data_choose_epochs_and_networks(place: Path) -> None:
    """The command and Python select the same 4 of 40 samples. A flow that is fitted with data records the loss of its
    samples.
    """
    few = ["--networks", "4", "--steps", "2", "--data", "task.py:batches"]
    main(["flow", "sample", "plain.safetensors", "-o", "chosen", *few])
    made = flow.load_flow("plain.safetensors")
    inputs = torch.randn(40, 3, generator=torch.Generator().manual_seed(9))
    task = rg.Task(mlp(3, 5, 2), [(part, (part[:, 0] > 0).long()) for part in inputs.split(20)])
    chance = torch.Generator().manual_seed(derive_seed(0, "sample", 0))
    expected = made.sample(4, generator=chance, steps=2, task=task)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in drawn("chosen").items())
    main(["flow", "fit", "zoo", "-o", "told.safetensors", "--width", "8", "--depth", "1", "--epochs", "1", *few[4:]])
    assert flow.load_flow("told.safetensors").about["scores"]["flow"]["drawn loss"] > 0


def test_drawn_networks_are_judged_on_a_page(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["flow", "sample", "plain.safetensors", "--networks", "10", "--steps", "4", "-o", "new"])
    capsys.readouterr()
    main(["flow", "judge", "plain.safetensors", "new", "zoo", "--data", "task.py:batches", "-o", "page.html", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in told["scores"]][:2] == ["generated", "held-out"]
    assert told["written"] == ["page.html", "page.json"]
    page, numbers = (place / "page.html").read_text(), json.loads((place / "page.json").read_text())
    assert "http" not in page.replace("http://www.w3.org", "")
    assert told["verdict"] == numbers["verdict"]
    assert told["verdict"][0].startswith("The sampled networks ")
    assert f"<strong>{told['verdict'][0]}</strong>" in page
    assert page.count("data:image") == 1 + 1 + 2 + 1
    assert len(numbers["losses"]["generated"]) == 10
    Store.create("copies", Store.open("zoo").architecture, Store.open("zoo").symmetry).append(
        Store.open("zoo").read(range(60)), [{"id": k, "step": 0} for k in range(60)]
    )
    main(["flow", "judge", "plain.safetensors", "copies", "zoo", "--data", "task.py:batches", "-o", "copies.html"])
    said = capsys.readouterr().out
    assert said.startswith("The sampled networks work: ")
    assert "They are copies of training networks" in said.replace("\n", " ")
    assert "They are copies of training networks" in (place / "copies.html").read_text()


def test_the_last_checkpoint_of_each_run_is_read_unless_asked(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known = Store.open("zoo")
    runs = Store.create("runs", known.architecture, known.symmetry)
    rows = [{"id": k // 2, "step": k % 2, "kind": "odd"} for k in range(80)]
    runs.append(known.read(range(80)), rows)
    small = ["--width", "8", "--depth", "1", "--epochs", "1", "--json"]
    judge = ["--data", "task.py:batches", "--json"]
    for name, more, count in (("last", [], 40), ("all", ["--checkpoints", "all"], 80)):
        main(["flow", "fit", "runs", "-o", f"{name}.safetensors", *small, *more])
        said = capsys.readouterr()
        assert sum(json.loads(said.out)["networks"].values()) == count
        assert ("40 of 80 stored networks are read: the last checkpoint" in said.err) == (count == 40)
        assert flow.load_flow(f"{name}.safetensors").about["seed"] == 0
        main(["flow", "sample", f"{name}.safetensors", "--networks", "4", "--steps", "2", "-o", f"from-{name}"])
        capsys.readouterr()
        main(["flow", "judge", f"{name}.safetensors", f"from-{name}", "runs", "-o", f"{name}.html", *judge])
        assert json.loads(capsys.readouterr().out)["verdict"]
    made = flow.fit(
        runs, config=flow.FlowConfig(net=flow.Metanetwork(width=8, depth=1), epochs=1), generator=torch.Generator()
    )
    assert sum(made.about["networks"].values()) == 40  # As the command does.
    made.save("python.safetensors")
    main(["flow", "judge", "python.safetensors", "from-last", "runs", "-o", "python.html", *judge])
    main(["flow", "fit", "runs", "--where", "step=0", "-o", "first.safetensors", *small])
    assert "40" in capsys.readouterr().out
    assert sum(flow.load_flow("first.safetensors").about["networks"].values()) == 40


def test_a_loss_pulls_networks(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["flow", "guide", "flow.safetensors", "--networks", "6", "--steps", "5", "--strength", "3"]
    main([*arguments, "--data", "task.py:batches", "-o", "pulled", "--json"])
    rows = {row["name"]: row["loss"] for row in json.loads(capsys.readouterr().out)["scores"]}
    assert rows["guided"] < rows["without guidance"]
    assert rows["without guidance, then 5 gradient steps"] < rows["without guidance"]
    assert len(Store.open("pulled")) == 6
    main([*arguments, "--data", "task.py:batches", "-o", "dropped", "--dropout", "0.5", "--json"])
    others = {row["name"]: row["loss"] for row in json.loads(capsys.readouterr().out)["scores"]}
    assert {name for name in rows if others[name] == rows[name]} == {"without guidance"}


def test_what_cannot_be_done_is_told(place: Path, refused: Callable[..., str]) -> None:
    sample = ["flow", "sample", "flow.safetensors", "-o", "new"]
    judge = ["--data", "task.py:batches", "-o", "page.html"]
    assert "no store is named" in refused("flow", "fit", "-o", "x.safetensors")
    assert "there is no net 'gru'" in refused("flow", "fit", "zoo", "-o", "x.safetensors", "--net", "gru")
    assert "drop --unaligned" in refused("flow", "fit", "zoo", "-o", "x.safetensors", "--net", "tokens", "--unaligned")
    assert "is_aligned=True" in refused(
        *("flow", "fit", "zoo", "-o", "x.safetensors", "--prior", "full", "--net", "message_passing", "--unaligned")
    )
    write_store(Path("alike"), 3, 5, 2, is_common=True)
    start = ["--prior", "initialization"]
    assert "the same initial weights" in refused("flow", "fit", "alike", "-o", "x.safetensors", *start)
    assert "2 architectures" in refused("flow", "fit", "zoo", "wide", "-o", "x.safetensors")
    assert "--networks is 0" in refused(*sample, "--networks", "0")
    assert "none of no labels" in refused(*sample, "--label", "odd")
    assert "predicts='end'" in refused(*sample, "--solver", "thesis")
    assert "had 3" in refused(*sample, "--like", "wrong")
    assert "no flow" in refused("flow", "sample", "other.safetensors", "-o", "new")
    assert "name the stores that it was fitted to" in refused(
        "flow", "judge", "flow.safetensors", "zoo", "zoo", "zoo", *judge
    )
    assert not {"x.safetensors", "page.html"} & {path.name for path in place.iterdir()}

"""Buffers that training does not change, on the command line: every command preserves them in its output files."""

from pathlib import Path

import pytest
import torch
from structured import Positions
from two_faces import Case

from regauge.checkpoints.checkpoint import load
from regauge.checkpoints.writing import save
from regauge.cli.main import main
from regauge.core.params import Params

pytestmark = pytest.mark.usefixtures("unsaved")
POSITIONS = """
from structured import Positions
import torch


def positions():
    return Positions(is_parameter=True), (torch.tensor([[0, 1, 2], [6, 4, 3]]),)
"""


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    made = Case.make("masked", tmp_path_factory.mktemp("masked"))
    other = dict(made.params("c"))
    other["2.mask"] = 1 - other["2.mask"]
    save(other, made.folder / "other.safetensors")
    return made


@pytest.fixture(autouse=True)
def folder(case: Case, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(case.folder)
    return case.folder


def keeps(case: Case, name: str) -> bool:
    made, given = load(case.folder / name), case.params("a")
    return all(torch.equal(made[key], given[key]) for key in given if key.endswith("mask"))


WRITING = {
    "align": ("align", "a.safetensors", "b.safetensors"),
    "align by activations": ("align", "a.safetensors", "b.safetensors", "--method", "activations"),
    "merge": ("merge", "a.safetensors", "b.safetensors", "c.safetensors"),
    "merge by signs": ("merge", "a.safetensors", "b.safetensors", "--base", "c.safetensors", "--rule", "ties"),
    "canonicalize": ("canonicalize", "a.safetensors"),
    **{
        f"gauge by {method}": ("gauge", "a.safetensors", "--method", method, "--always", "--steps", "2")
        for method in ("best", "equalize", "smooth", "hadamard", "random", "learned")
    },
}


@pytest.mark.parametrize("verb", WRITING)
def test_what_is_written_keeps_it(case: Case, verb: str) -> None:
    out, words = f"{verb.replace(' ', '-')}.safetensors", WRITING[verb]
    case.run(*words, "-o", out, *case.options(data=words[0] != "canonicalize"))
    assert keeps(case, out)
    if verb == "align":
        main(["apply", "align.alignment.safetensors", "b.safetensors", "-o", "applied.safetensors"])
        main(["apply", "align.alignment.safetensors", "applied.safetensors", "-o", "back.safetensors", "--inverse"])
        assert keeps(case, "applied.safetensors")
        assert keeps(case, "back.safetensors")
    if verb == "merge":
        ends = ("--endpoints", "a.safetensors", "b.safetensors", "c.safetensors", "--align")
        case.run("repair", out, *ends, "-o", "repaired.safetensors", *case.judged())
        assert keeps(case, "repaired.safetensors")


def test_an_aligned_or_merged_network_is_autoregressive(case: Case) -> None:
    for verb in ("align", "merge"):
        out = f"triangular-{verb}.safetensors"
        case.run(verb, "a.safetensors", "b.safetensors", "-o", out, *case.options(data=False))
        params: Params = load(case.folder / out)
        jacobian: torch.Tensor = torch.autograd.functional.jacobian(
            lambda x, params=params: torch.func.functional_call(case.module, params, x), torch.randn(4)
        )
        assert float(jacobian.triu().abs().max()) == 0
        assert float(jacobian.tril(-1).abs().max()) > 0


REFUSING = {
    "align": ("align", "a.safetensors", "other.safetensors", "-o", "x.safetensors"),
    "merge": ("merge", "a.safetensors", "other.safetensors", "-o", "x.safetensors"),
    "compare": ("compare", "a.safetensors", "other.safetensors"),
    "line": ("line", "a.safetensors", "other.safetensors"),
    "plane": ("plane", "a.safetensors", "b.safetensors", "other.safetensors", "-o", "x.svg"),
}


@pytest.mark.parametrize("verb", REFUSING)
def test_networks_of_other_structure_are_refused_by_name(
    case: Case, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rest = case.judged() if verb in ("line", "plane") else case.options(data=False)
    with pytest.raises(SystemExit):
        main([*REFUSING[verb], *rest])
    assert "the networks differ in '2.mask', a structure tensor" in capsys.readouterr().err


def test_what_is_kept_is_told_and_can_be_moved(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    model = ("nets.py:masked", "--input-shape", "2x4")
    main(["discover", *model])
    told = capsys.readouterr().out
    assert (
        "which are not changed (no normalization computes them, or `keep` names them): 0.mask, 2.mask, 4.mask" in told
    )
    assert "order in 3 classes" in told
    found = case.run("discover", *model, "--move", "0.*", "2.mask")["symmetry"]
    assert found["structure"] == ["4.mask"]
    case.run(
        "align",
        "a.safetensors",
        "other.safetensors",
        "-o",
        "moved.safetensors",
        *case.options(data=False),
        "--move",
        "*",
    )
    assert not keeps(case, "moved.safetensors")
    with pytest.raises(SystemExit):
        main(["discover", *model, "--move", "mask"])
    assert "the model reads no buffer called 'mask'; it has 0.mask" in capsys.readouterr().err


def test_frozen_parameters_are_kept_where_they_are_named(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "positions.py").write_text(POSITIONS)
    networks = []
    for k in range(2):
        torch.manual_seed(k)
        networks.append({n: t.detach() for n, t in Positions(is_parameter=True).state_dict().items()})
        save(networks[-1], tmp_path / f"{k}.safetensors")
    model = ("--model", "positions.py:positions")
    case.run("align", "0.safetensors", "1.safetensors", "-o", "free.safetensors", *model)
    assert not torch.equal(load(tmp_path / "free.safetensors")["table"], networks[0]["table"])
    for verb in ("align", "merge"):
        case.run(verb, "0.safetensors", "1.safetensors", "-o", f"{verb}.safetensors", *model, "--keep", "table")
        assert torch.equal(load(tmp_path / f"{verb}.safetensors")["table"], networks[0]["table"])


def test_options_that_nothing_reads_are_refused(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    for words, told in (
        (("line", "a.safetensors", "b.safetensors"), "--keep is only for --path geodesic"),
        (("repair", "a.safetensors", "-o", "x.safetensors"), "--keep and --move are only for --align"),
    ):
        with pytest.raises(SystemExit):
            main([*words, "--model", "nets.py:masked", "--data", "nets.py:batches", "--keep", "4.weight"])
        assert told in capsys.readouterr().err
    for more in (("--path", "geodesic", "--keep", "0.mask"), ("--move", "2.mask")):
        end = "b.safetensors" if more[0] == "--path" else "other.safetensors"
        case.run("line", "a.safetensors", end, *more, *case.judged())

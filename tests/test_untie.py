"""Tied heads of folders become separate tensors, so that streams can rotate: in the library and on the command line."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from folder_cases import SMALL_LLAMA, FolderCase, logits, open_clean
from translation_nets import gap

import regauge as rg
from regauge.cli.main import main

TIED = FolderCase(
    "LlamaForCausalLM", "LlamaConfig", SMALL_LLAMA | {"num_hidden_layers": 1, "tie_word_embeddings": True}
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], list[Any], rg.Symmetry]:
    """Return two tied folders with separate initializations, their models, and the symmetry without the tie."""
    place = tmp_path_factory.mktemp("untie")
    models = [TIED.save(place / name, seed) for seed, name in enumerate("ab")]
    names = [str(place / name) for name in "ab"]
    with rg.hub.untie(names[0], rg.Checkpoint.open(names[0])) as (untied, _):
        symmetry = rg.open_model(untied).symmetry
    return names, models, symmetry


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


Folders = tuple[list[str], list[Any], rg.Symmetry]


def test_both_faces_align_without_the_tie(folders: Folders, capsys: pytest.CaptureFixture[str]) -> None:
    (a, b), (_, model), symmetry = folders
    assert symmetry.rotatable
    main(["align", a, b, "-o", "tied"])
    tied = capsys.readouterr().out
    assert "and reordering is not enough here: --untie may separate them" in tied.replace("\n", " ")
    main(["align", a, b, "-o", "out", "--untie"])
    assert "rotated behind gains" in capsys.readouterr().out
    found = rg.align(a, b, symmetry, untie=True, out="library")
    assert found.element.rotation
    assert gap(rg.load("out"), rg.load("library")) == 0
    for out in ("out", "library"):
        assert json.loads(Path(out, "config.json").read_text())["tie_word_embeddings"] is False
        before, after = logits(model), logits(open_clean(out))
        assert torch.allclose(after, before, rtol=0, atol=1e-5 * float(before.abs().max()))
    assert not torch.equal(rg.load("out")["lm_head.weight"], rg.load("out")["model.embed_tokens.weight"])
    assert "lm_head.weight" not in rg.load("tied")


def test_both_faces_merge_without_the_tie(folders: Folders) -> None:
    (a, b), _, symmetry = folders
    main(["merge", a, b, "-o", "out", "--untie"])
    found = rg.merge([a, b], symmetry, untie=True, out="library")
    assert gap(rg.load("out"), rg.load("library")) == 0
    assert gap(rg.load("out"), dict(found.params)) == 0
    assert open_clean("out").config.tie_word_embeddings is False
    assert "rotated behind gains" in Path("out", "regauge.md").read_text()


def test_a_near_copy_is_not_told_to_untie(folders: Folders) -> None:
    (a, b), _, _ = folders
    symmetry = rg.open_model(a).symmetry
    params = rg.load(a)
    near = {name: t + 0.001 * t.std() * torch.randn(t.shape) for name, t in params.items()}
    assert not any("untie" in note for note in rg.align(params, near, symmetry).notes)
    for found in (rg.align(a, b, symmetry), rg.merge([a, b], symmetry).record):
        assert any("untie" in note for note in found.notes)
    assert not any("untie" in note for note in rg.align(a, b, symmetry, rotate="never").notes)


def test_what_cannot_be_untied_is_refused(folders: Folders, capsys: pytest.CaptureFixture[str]) -> None:
    (a, b), _, symmetry = folders
    params = rg.load(a)
    with pytest.raises(
        ValueError, match="`untie=True` is for folders; networks in memory have a tensor under each name"
    ):
        rg.align(params, params, symmetry, untie=True)
    with pytest.raises(ValueError, match="is for folders"):
        rg.merge([params, params], symmetry, untie=True)
    with pytest.raises(ValueError, match="the output must be a folder"):
        rg.align(a, b, symmetry, untie=True, out="out.safetensors")
    rg.align(a, b, symmetry, untie=True, out="out")
    with pytest.raises(ValueError, match="has no tied tensors"):
        rg.align("out", "out", symmetry, untie=True)
    with pytest.raises(SystemExit):
        main(["align", a, b, "-o", "out.safetensors", "--untie"])
    assert "--untie changes config.json" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["merge", a, b, "-o", "other", "--untie", "--tokenizer", "union"])
    assert "leave --rotate and --untie out" in capsys.readouterr().err.replace("\n", " ")

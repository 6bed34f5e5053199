"""Other tools read the outputs: transformers loads aligned, merged and canonical folders like the originals."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from regauge.checkpoints.checkpoint import load
from regauge.cli.main import main

transformers = pytest.importorskip("transformers")

from folder_cases import SMALL, SMALL_LLAMA, logits, open_clean  # noqa: E402

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", SMALL_LLAMA | {"tie_word_embeddings": False}),
    "llama, tied": ("Llama", SMALL_LLAMA | {"tie_word_embeddings": True}),
    "gpt2": (
        "GPT2",
        SMALL | {"n_layer": 2, "n_embd": 8, "n_head": 2, "n_positions": 16, "bos_token_id": 0, "eos_token_id": 1},
    ),
    "bert": (
        "Bert",
        SMALL
        | {
            "hidden_size": 8,
            "intermediate_size": 12,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "max_position_embeddings": 16,
        },
    ),
}
CLASSES = {"Llama": "LlamaForCausalLM", "GPT2": "GPT2LMHeadModel", "Bert": "BertForMaskedLM"}


def make(kind: str, folder: Path, seed: int, *, dtype: torch.dtype = torch.float32, shard: str = "1GB") -> Any:
    """Return a random model, saved by transformers."""
    name, settings = KINDS[kind]
    torch.manual_seed(seed)
    model = getattr(transformers, CLASSES[name])(getattr(transformers, f"{name}Config")(**settings)).eval().to(dtype)
    model.save_pretrained(folder, max_shard_size=shard)
    return model


def folder_for(name: str) -> str:
    """Return a folder with the configuration of `two`, and the value for -o."""
    Path(name).mkdir()
    shutil.copy("two/config.json", name)
    return f"{name}/model.safetensors"


def loaded(folder: str, like: Any) -> Any:
    """Return the model that transformers reads, in the dtypes of another model."""
    model = open_clean(folder, type(like))
    assert {name: t.dtype for name, t in model.state_dict().items()} == {
        name: t.dtype for name, t in like.state_dict().items()
    }
    return model


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_reads_what_is_written(kind: str) -> None:
    one, two = (make(kind, Path(name), seed) for seed, name in enumerate(("one", "two")))
    options = ["--model", "one", "--outputs", "logits"]
    main(["align", "one", "two", *options, "-o", folder_for("aligned")])
    main(["canonicalize", "two", *options, "-o", folder_for("canonical")])
    main(["merge", "one", "two", *options, "-o", folder_for("merged")])
    scale = float(logits(two).abs().max())
    for folder in ("aligned", "canonical"):
        assert float((logits(loaded(folder, two)) - logits(two)).abs().max()) < 1e-5 * scale
        assert any(not torch.equal(t, load("two")[name]) for name, t in load(folder).items())
    aligned = loaded("aligned", two).state_dict()
    merged = loaded("merged", two)
    for name, tensor in one.state_dict().items():
        torch.testing.assert_close(merged.state_dict()[name], (tensor + aligned[name]) / 2)
    for folder in ("aligned", "canonical", "merged"):
        with safe_open(f"{folder}/model.safetensors", "pt") as file, safe_open("two/model.safetensors", "pt") as source:
            assert set(file.keys()) == set(source.keys())
            assert file.metadata()["format"] == source.metadata()["format"] == "pt"


def test_shards_are_read_and_dtypes_kept() -> None:
    one, two = (make("llama", Path(n), k, dtype=torch.bfloat16, shard="2KB") for k, n in enumerate(("one", "two")))
    assert Path("two/model.safetensors.index.json").is_file()
    main(["align", "one", "two", "--model", "one", "--outputs", "logits", "-o", folder_for("aligned")])
    found, expected = logits(loaded("aligned", two)).float(), logits(two).float()
    # The stream is rotated, so that each of its weights is rounded to 16 bits once more.
    assert float((found - expected).abs().max()) < 0.08 * float(expected.abs().max())
    assert {tensor.dtype for tensor in load("aligned").values()} == {torch.bfloat16}
    assert float((logits(one).float() - expected).abs().max()) > 0.5 * float(expected.abs().max())


def test_a_stored_alignment_moves_a_folder_with_tied_weights() -> None:
    _, two = (make("gpt2", Path(name), seed) for seed, name in enumerate(("one", "two")))
    main(["align", "one", "two", "--model", "one", "--outputs", "logits", "-o", folder_for("aligned")])
    main(["apply", "aligned/model.safetensors", "two", "-o", folder_for("again")])
    assert load("again").keys() == load("two").keys()
    torch.testing.assert_close(logits(loaded("again", two)), logits(loaded("aligned", two)))
    main(["apply", "aligned/model.safetensors", "again", "--inverse", "-o", folder_for("back")])
    for name, tensor in load("two").items():
        torch.testing.assert_close(load("back")[name], tensor)


def test_torch_files_keep_all_their_names() -> None:
    for seed, name in enumerate(("one", "two")):
        model = make("gpt2", Path(name), seed)
        torch.save(model.state_dict(), f"{name}.pt")
    main(["align", "one.pt", "two.pt", "--model", "one", "--outputs", "logits", "-o", "out.safetensors"])
    assert load("out.safetensors").keys() == load("two.pt").keys()
    assert torch.equal(load("out.safetensors")["lm_head.weight"], load("out.safetensors")["transformer.wte.weight"])

"""Tokens of folders that are combined: equal ones are carried, differing ones refused with the difference."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from regauge.cli.main import main
from regauge.storage.checkpoints.vocabularies import Difference

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

WORDS = ["<unk>", "<s>", "</s>", *"abcdefghijklmnopqrstu"]


def write_tokens(folder: Path, words: list[str], kind: str = "WordLevel") -> None:
    """A tokenizer in which the words have their places as numbers."""
    vocabulary = {word: k for k, word in enumerate(words)}
    if kind == "WordLevel":
        model = tokenizers.models.WordLevel(vocabulary, unk_token="<unk>")
    else:
        model = tokenizers.models.BPE(vocabulary, [], unk_token="<unk>")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, **special).save_pretrained(folder)


def write_model(name: str, seed: int, words: list[str], kind: str = "WordLevel", **settings: Any) -> Any:
    """A random model with its tokenizer."""
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        **{"vocab_size": len(words), "max_position_embeddings": 16, "initializer_range": 0.3, **sizes, **settings}
    )
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(name)
    write_tokens(Path(name), words, kind)
    return model


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


COMMANDS = {
    "align": ["align", "a", "b", "-o", "out"],
    "merge": ["merge", "a", "b", "-o", "out"],
    "merge into a file": ["merge", "a", "b", "-o", "out.safetensors"],
    "canonicalize": ["canonicalize", "a", "--reference", "b", "-o", "out.safetensors"],
}


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert not list(Path().glob("out*"))
    return capsys.readouterr().err


@pytest.mark.parametrize("kind", ["WordLevel", "BPE"])
@pytest.mark.parametrize("name", COMMANDS)
def test_other_tokens_are_refused_with_the_difference(name: str, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_model("a", 0, WORDS, kind)
    write_model("b", 1, [*WORDS[:4], "y", WORDS[6], WORDS[5], *WORDS[7:]], kind)
    said = refused(COMMANDS[name], capsys)
    assert "1 tokens are only in a ('b')" in said
    assert "1 tokens are only in b ('y')" in said
    assert "2 tokens have other numbers ('c' is 5 and 6, 'd' is 6 and 5)" in said


def test_the_same_tokens_in_another_format_are_carried(capsys: pytest.CaptureFixture[str]) -> None:
    for seed, name in enumerate("ab"):
        write_model(name, seed, WORDS)
    path = Path("b/tokenizer.json")
    path.write_text(json.dumps(json.loads(path.read_text()), indent=7, sort_keys=True))
    main(["merge", "a", "b", "-o", "out"])
    assert "differ" not in capsys.readouterr().err
    assert Path("out/tokenizer.json").read_bytes() == Path("a/tokenizer.json").read_bytes()


def test_what_else_differs_is_named_with_its_side(capsys: pytest.CaptureFixture[str]) -> None:
    write_model("a", 0, WORDS)
    write_model("b", 1, WORDS, rms_norm_eps=1e-3)
    Path("b/chat_template.jinja").write_text("{{ messages }}")
    Path("a/generation_config.json").write_text("{}")
    main(["align", "a", "b", "-o", "out"])
    said = capsys.readouterr().err
    assert "a and b differ in chat_template.jinja, generation_config.json, config.json (rms_norm_eps)" in said
    assert "taken from b" in said
    assert Path("out/chat_template.jinja").read_text() == "{{ messages }}"


def test_differences_of_vocabularies() -> None:
    assert not Difference.of({"a": 0, "b": 1}, {"b": 1, "a": 0})
    found = Difference.of({"a": 0, "b": 1}, {"b": 0, "c": 1})
    assert (found.first, found.second, found.moved) == (("a",), ("c",), (("b", 1, 0),))

"""Tokenizers with random damage: networks are converted to one vocabulary, or refused in a sentence."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from damage import LIMITED, Kind, check_kind, damage_bytes
from folder_cases import SMALL_LLAMA

from regauge.checkpoints.checkpoint import Checkpoint
from regauge.hub.tokenizers import read_vocabulary
from regauge.hub.vocabulary import bring_together, choose_template, template_files

tokenizers = pytest.importorskip("tokenizers")

EXAMPLES = [pytest.param(12), pytest.param(300, marks=pytest.mark.thorough)]
"""The number of tokenizers that are tried."""
GENERATION = "generation_config.json"
"""A file in which all values except token ids stay unchanged."""
WORDS = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]", *"abcdef", "##b"]


def _write_json(folder: Path, words: list[str]) -> None:
    """Write a tokenizer with all of its files."""
    model = tokenizers.models.WordLevel({word: k for k, word in enumerate(words)}, unk_token="[UNK]")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]", bos_token="[CLS]")
    fast.chat_template = "{{ messages }}"
    fast.save_pretrained(folder)


def _write_pieces(folder: Path, words: list[str]) -> None:
    """Write a tokenizer of words and their pieces, one per line."""
    (folder / "vocab.txt").write_text("\n".join(words))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))


def _write_pairs(folder: Path, words: list[str]) -> None:
    """Write a tokenizer of letters and the pairs that are merged."""
    (folder / "vocab.json").write_text(json.dumps({word: k for k, word in enumerate([*words, "ab"])}))
    (folder / "merges.txt").write_text("#version: 0.2\na b")
    settings = {"tokenizer_class": "GPT2Tokenizer", "unk_token": "[UNK]", "bos_token": "[CLS]", "eos_token": "[SEP]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "special_tokens_map.json").write_text(json.dumps({"pad_token": "[PAD]", "extra_special_tokens": ["c"]}))
    (folder / "added_tokens.json").write_text(json.dumps({"<new>": len(words) + 1}))


FORMATS: dict[str, Callable[[Path, list[str]], None]] = {
    "tokenizer.json": _write_json,
    "tokenizer_config.json": _write_json,
    GENERATION: _write_json,
    "config.json": _write_json,
    "vocab.json": _write_pairs,
    "special_tokens_map.json": _write_pairs,
    "added_tokens.json": _write_pairs,
    "vocab.txt": _write_pieces,
    "merges.txt": _write_pairs,
}
"""Files of tokenizers, with functions that write their folders."""


def _folders(name: str, folder: Path) -> Path:
    """Return two networks with tokens in two orders, and the file of the second network."""
    for label, words in (("a", WORDS), ("b", [*WORDS[:5], *reversed(WORDS[5:])])):
        config = transformers.LlamaConfig(**SMALL_LLAMA | {"vocab_size": len(WORDS) + 4, "bos_token_id": 1})
        transformers.LlamaForCausalLM(config).save_pretrained(folder / label)
        FORMATS[name](folder / label, words)
        numbered = {"bos_token_id": 1, "suppress_tokens": [2], "forced_decoder_ids": [[1, 2]]}
        (folder / label / GENERATION).write_text(json.dumps(numbered))
    return folder / "b" / name


def _unite(folder: Path) -> None:
    """Run all operations on the tokens of two networks."""
    read_vocabulary(folder / "b")
    choose_template("auto", [folder / "a", folder / "b"])
    template_files("{{ one }}", {}, folder / "b")
    for wanted in ("union", str(folder / "b")):
        for source in (0, 1):
            with Checkpoint.open(folder / "a") as a, Checkpoint.open(folder / "b") as b:
                united = bring_together([a, b], source, tokenizer=wanted)
                for network in united.networks:
                    embedding = network.read("model.embed_tokens.weight")
                    assert united.plan is None or len(embedding) == united.plan.size


def _document(name: str) -> Kind:
    def read(folder: Path, document: Any) -> bool:
        (folder / "b" / name).write_text(json.dumps(document))
        _unite(folder)
        return True

    return Kind(read, lambda folder: json.loads(_folders(name, folder).read_text()), "/b", name != GENERATION)


@LIMITED
@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize("name", [name for name in FORMATS if name.endswith(".json")])
def test_a_changed_tokenizer_is_read_or_refused(name: str, examples: int, tmp_path: Path) -> None:
    check_kind(_document(name), tmp_path, examples)


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("tokenizer_config.json", {"vocab": "FILE"}, "sets 'vocab'"),
        ("tokenizer_config.json", {"init_inputs": ["FILE"]}, "sets 'init_inputs'"),
        ("special_tokens_map.json", {"vocab_file": "FILE"}, "sets 'vocab_file'"),
        ("special_tokens_map.json", {"vocab": "FILE"}, "sets 'vocab'"),
        ("vocab.txt", None, "is a link out of its folder"),
    ],
)
def test_a_file_outside_of_the_folder_gives_no_tokens(name: str, settings: Any, said: str, tmp_path: Path) -> None:
    """Otherwise transformers would read the outside file, and a union would write its lines to the output."""
    _folders("vocab.txt", tmp_path)
    (tmp_path / "key").write_text("secret")
    if settings is None:
        (tmp_path / "b" / name).unlink()
        (tmp_path / "b" / name).symlink_to(tmp_path / "key")
    else:
        text = json.dumps({"tokenizer_class": "BertTokenizer"} | settings)
        (tmp_path / "b" / name).write_text(text.replace("FILE", str(tmp_path / "key")))
    with pytest.raises(ValueError, match=rf"b/{name}' {said}"):
        _unite(tmp_path)


def test_numbers_of_tokens_take_no_memory(tmp_path: Path) -> None:
    _folders("vocab.json", tmp_path)
    far = {word: k + 10**8 for k, word in enumerate([*WORDS, "ab"])}
    (tmp_path / "a" / "vocab.json").write_text(json.dumps(far))
    with (
        Checkpoint.open(tmp_path / "a") as a,
        Checkpoint.open(tmp_path / "b") as b,
        pytest.raises(ValueError, match=r"the tokens of .*/a would need 100,000,\d+ rows of embeddings, but there are"),
    ):
        bring_together([a, b], tokenizer="union")


def test_tokens_without_a_common_one_are_refused(tmp_path: Path) -> None:
    _folders("tokenizer.json", tmp_path)
    for label in "ab":
        made = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"{label}1": 0, f"{label}2": 1}))
        transformers.PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(tmp_path / label)
    with (
        Checkpoint.open(tmp_path / "a") as a,
        Checkpoint.open(tmp_path / "b") as b,
        pytest.raises(ValueError, match=r"/a and .*/b have no token in common"),
    ):
        bring_together([a, b], is_shared=True)


@LIMITED
@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.txt", "merges.txt"])
def test_a_tokenizer_with_other_bytes_is_read_or_refused(name: str, examples: int, tmp_path: Path) -> None:
    path = _folders(name, tmp_path)
    _unite(tmp_path)
    refused = damage_bytes(lambda _: _unite(tmp_path), path, examples)
    assert all("/b" in told for told in refused), [told for told in refused if "/b" not in told][:3]

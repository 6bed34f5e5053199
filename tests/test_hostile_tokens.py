"""Tokenizers with random damage: networks are brought under one vocabulary, or refused in a sentence."""

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
"""How many tokenizers are tried."""
WORDS = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]", *"abcdef", "##b"]


def _write_json(folder: Path, words: list[str]) -> None:
    """A tokenizer with all of its files."""
    model = tokenizers.models.WordLevel({word: k for k, word in enumerate(words)}, unk_token="[UNK]")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]", bos_token="[CLS]")
    fast.chat_template = "{{ messages }}"
    fast.save_pretrained(folder)


def _write_pieces(folder: Path, words: list[str]) -> None:
    """A tokenizer of words and their pieces, one a line."""
    (folder / "vocab.txt").write_text("\n".join(words))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))


def _write_pairs(folder: Path, words: list[str]) -> None:
    """A tokenizer of letters and the pairs that become one."""
    (folder / "vocab.json").write_text(json.dumps({word: k for k, word in enumerate([*words, "ab"])}))
    (folder / "merges.txt").write_text("#version: 0.2\na b")
    settings = {"tokenizer_class": "GPT2Tokenizer", "unk_token": "[UNK]", "bos_token": "[CLS]", "eos_token": "[SEP]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "special_tokens_map.json").write_text(json.dumps({"pad_token": "[PAD]", "extra_special_tokens": ["c"]}))
    (folder / "added_tokens.json").write_text(json.dumps({"<new>": len(words) + 1}))


FORMATS: dict[str, Callable[[Path, list[str]], None]] = {
    "tokenizer.json": _write_json,
    "tokenizer_config.json": _write_json,
    "generation_config.json": _write_json,
    "config.json": _write_json,
    "vocab.json": _write_pairs,
    "special_tokens_map.json": _write_pairs,
    "added_tokens.json": _write_pairs,
    "vocab.txt": _write_pieces,
    "merges.txt": _write_pairs,
}
"""Files of tokenizers, and how their folders are written."""


def _folders(name: str, folder: Path) -> Path:
    """Two networks with tokens in two orders; the file of the second one."""
    for label, words in (("a", WORDS), ("b", [*WORDS[:5], *reversed(WORDS[5:])])):
        config = transformers.LlamaConfig(**SMALL_LLAMA | {"vocab_size": len(WORDS) + 4, "bos_token_id": 1})
        transformers.LlamaForCausalLM(config).save_pretrained(folder / label)
        FORMATS[name](folder / label, words)
        numbered = {"bos_token_id": 1, "suppress_tokens": [2], "forced_decoder_ids": [[1, 2]]}
        (folder / label / "generation_config.json").write_text(json.dumps(numbered))
    return folder / "b" / name


def _unite(folder: Path) -> None:
    """Whatever is done with the tokens of two networks."""
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

    return Kind(read, lambda folder: json.loads(_folders(name, folder).read_text()), "/b")


@LIMITED
@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize("name", [name for name in FORMATS if name.endswith(".json")])
def test_a_changed_tokenizer_is_read_or_refused(name: str, examples: int, tmp_path: Path) -> None:
    check_kind(_document(name), tmp_path, examples)


@LIMITED
@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.txt", "merges.txt"])
def test_a_tokenizer_with_other_bytes_is_read_or_refused(name: str, examples: int, tmp_path: Path) -> None:
    path = _folders(name, tmp_path)
    _unite(tmp_path)
    refused = damage_bytes(lambda _: _unite(tmp_path), path, examples)
    assert all("/b" in told for told in refused), [told for told in refused if "/b" not in told][:3]

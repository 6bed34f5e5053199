"""Tokens of combined folders: equal vocabularies are accepted, and different vocabularies are refused with the
difference.
"""

import json
from pathlib import Path
from typing import Any

import jinja2
import pytest
import torch

import regauge as rg
from regauge.checkpoints.checkpoint import load
from regauge.cli.main import main
from regauge.core.element import PARTS
from regauge.hub.chat_templates import TEMPLATES
from regauge.hub.tokenizers import Difference

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

from folder_cases import open_clean  # noqa: E402

WORDS = ["<unk>", "<s>", "</s>", *"abcdefghijklmnopqrstu"]


def write_tokens(folder: Path, words: list[str], kind: str = "WordLevel") -> None:
    """Write a tokenizer in which the index of a word is its id."""
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
    """Write a random model with its tokenizer."""
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2}
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


@pytest.mark.parametrize(
    ("name", "kind"), [*((name, "WordLevel") for name in COMMANDS), ("align", "BPE"), ("merge", "BPE")]
)
def test_other_tokens_are_refused_with_the_difference(name: str, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_model("a", 0, WORDS, kind)
    write_model("b", 1, [*WORDS[:4], "y", WORDS[6], WORDS[5], *WORDS[7:]], kind)
    said = refused(COMMANDS[name], capsys)
    assert "1 tokens are only in a ('b')" in said
    assert "1 tokens are only in b ('y')" in said
    assert "2 tokens have other ids ('c' is 5 and 6, 'd' is 6 and 5)" in said


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


OTHER = ["<unk>", "<s>", "</s>", *"bacdxyz", *WORDS[10:], "w"]


def rows_of(folder: str, token: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of a token in the embedding and in the head."""
    tensors = load(folder)
    row = transformers.AutoTokenizer.from_pretrained(folder).get_vocab()[token]
    embedding = tensors["model.embed_tokens.weight"]
    return embedding[row], tensors.get("lm_head.weight", embedding)[row]


@pytest.mark.parametrize(
    ("kind", "is_tied", "shard"),
    [("WordLevel", False, "2KB"), ("WordLevel", True, "1GB"), ("BPE", False, "1GB"), ("BPE", True, "2KB")],
)
def test_vocabularies_are_united(kind: str, is_tied: bool, shard: str) -> None:
    """Common tokens are averaged. A token of only one network has this network's row, which the other network
    copies.
    """
    for seed, (name, words) in enumerate((("a", WORDS), ("b", OTHER))):
        write_model(name, seed, words, kind, tie_word_embeddings=is_tied).save_pretrained(name, max_shard_size=shard)
    Path("r.yml").write_text(
        "merge_method: linear\nmodels: [{model: a, parameters: {weight: 1}}, {model: b, parameters: {weight: 3}}]\n"
        "tokenizer_source: union\nregauge: {align: false}\n"
    )
    main(["merge", "--recipe", "r.yml", "-o", "out"])
    vocabulary = transformers.AutoTokenizer.from_pretrained("out").get_vocab()
    assert vocabulary.keys() == {*WORDS, *OTHER}
    assert [token for token, row in sorted(vocabulary.items(), key=lambda item: item[1])][: len(WORDS)] == WORDS
    for token in vocabulary:
        one, two = (rows_of(name, token) if token in words else None for name, words in (("a", WORDS), ("b", OTHER)))
        for k, row in enumerate(rows_of("out", token)):
            parts = [(w, rows[k]) for w, rows in ((0.25, one), (0.75, two)) if rows is not None]
            expected = sum(w * r for w, r in parts) / sum(w for w, _ in parts)
            torch.testing.assert_close(row, expected)
    assert open_clean("out").config.vocab_size == len(vocabulary)


def test_the_base_gives_tokens_that_a_network_lacks() -> None:
    for name, words in (("base", WORDS), ("a", OTHER), ("b", OTHER)):
        write_model(name, 0, words)
    Path("r.yml").write_text(
        "merge_method: task_arithmetic\nbase_model: base\nparameters: {weight: 1}\n"
        "models: [{model: a}, {model: b}]\nregauge: {align: false}\n"
        "tokenizer: {source: union, pad_to_multiple_of: 16}\n"
    )
    main(["merge", "--recipe", "r.yml", "-o", "out"])
    torch.testing.assert_close(rows_of("out", "e")[0], rows_of("base", "e")[0])
    torch.testing.assert_close(rows_of("out", "x")[0], rows_of("a", "x")[0])
    model = open_clean("out")
    assert model.config.vocab_size == 32
    known = load("out")["lm_head.weight"]
    torch.testing.assert_close(known[-1], known[: len({*WORDS, *OTHER})].mean(0))


def test_tokens_are_said_one_by_one() -> None:
    for seed, (name, words) in enumerate((("a", WORDS), ("b", OTHER))):
        write_model(name, seed, words)
    Path("r.yml").write_text(
        "merge_method: linear\nparameters: {weight: 1}\nmodels: [{model: a}, {model: b}]\nregauge: {align: false}\n"
        "tokenizer:\n  source: a\n  tokens:\n"
        "    c: {source: b, force: true}\n    <zero>: {source: {kind: zero}}\n"
        "    <again>: {source: {kind: model_token, model: b, token: x}}\n"
        "    <fifth>: {source: {kind: model_token, model: a, token_id: 5}}\n"
    )
    main(["merge", "--recipe", "r.yml", "-o", "out"])
    for token, (name, there) in {"c": ("b", "c"), "<again>": ("b", "x"), "<fifth>": ("a", WORDS[5])}.items():
        torch.testing.assert_close(rows_of("out", token), rows_of(name, there))
    assert not any(row.any() for row in rows_of("out", "<zero>"))
    assert "y" not in transformers.AutoTokenizer.from_pretrained("out").get_vocab()


def test_moved_networks_with_other_tokens_are_aligned_first() -> None:
    """Tokens and units are permuted. If both permutations are undone, the merge is the identity."""
    model = write_model("a", 0, WORDS)
    main(["discover", "a", "-o", "symmetry.json"])
    symmetry = rg.Symmetry.from_json(Path("symmetry.json").read_text()).bind(load("a"))
    moved = symmetry.act(symmetry.random(torch.Generator().manual_seed(1), PARTS), load("a"))
    order = torch.randperm(len(WORDS), generator=torch.Generator().manual_seed(2))
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        moved[name] = moved[name][order]
    model.load_state_dict(moved)
    model.save_pretrained("b")
    write_tokens(Path("b"), [WORDS[k] for k in order])
    main(["merge", "a", "b", "--tokenizer", "base", "-o", "out"])
    one, two = load("a"), load("out")
    assert all(float((two[name] - tensor).abs().max()) < 1e-5 for name, tensor in one.items())
    assert Path("out/tokenizer.json").read_bytes() == Path("a/tokenizer.json").read_bytes()
    main(["merge", "a", "b", "--tokenizer", "b", "-o", "other"])
    embedding = load("other")["model.embed_tokens.weight"]
    torch.testing.assert_close(embedding, one["model.embed_tokens.weight"][order], rtol=0, atol=1e-5)
    assert open_clean("other").config.bos_token_id == order.tolist().index(1)


def test_padded_rows_and_equal_tokens() -> None:
    """Rows after the last token are kept if all networks have them, and dropped if vocabularies are unified."""
    for seed, name in enumerate("ab"):
        write_model(name, seed, WORDS, vocab_size=32)
    main(["merge", "a", "b", "--tokenizer", "union", "-o", "same"])
    assert load("same")["lm_head.weight"].shape == (32, 8)
    write_tokens(Path("b"), OTHER)
    main(["merge", "a", "b", "--tokenizer", "union", "-o", "out"])
    assert load("out")["lm_head.weight"].shape == (len({*WORDS, *OTHER}), 8)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--tokenizer", "union", "-o", "out.safetensors"], "give a folder as the output"),
        (["--tokenizer", "nowhere", "-o", "out"], "there is union, base (the first one), or one of the folders"),
        (["-o", "out"], "--tokenizer union"),
    ],
)
def test_a_union_is_asked_for_and_has_a_place(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_model("a", 0, WORDS)
    write_model("b", 1, OTHER)
    assert said in refused(["merge", "a", "b", *options], capsys)


def test_other_families_have_axes_of_tokens() -> None:
    """Biases of heads, and heads under other names, are found by building the model with one additional token."""
    for seed, (name, words) in enumerate((("a", WORDS), ("b", OTHER))):
        torch.manual_seed(seed)
        sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2}
        transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=len(words), **sizes)).save_pretrained(name)
        write_tokens(Path(name), words)
    main(["merge", "a", "b", "--tokenizer", "union", "-o", "out"])
    open_clean("out", transformers.BertForMaskedLM)
    assert load("out")["cls.predictions.bias"].shape == (len({*WORDS, *OTHER}),)


@pytest.mark.parametrize(("wanted", "found"), [("auto", "{{ b }}"), ("'{{ mine }}'", "{{ mine }}")])
def test_chat_templates_are_chosen(wanted: str, found: str) -> None:
    for seed, (name, template) in enumerate((("a", "{{ a }}"), ("b", "{{ b }}"), ("c", "{{ b }}"))):
        write_model(name, seed, WORDS)
        Path(name, "chat_template.jinja").write_text(template)
    models = "models: [{model: a}, {model: b}, {model: c}]\nparameters: {weight: 1}\nregauge: {align: false}\n"
    Path("r.yml").write_text(f"merge_method: linear\n{models}chat_template: {wanted}\n")
    main(["merge", "--recipe", "r.yml", "-o", "out"])
    assert transformers.AutoTokenizer.from_pretrained("out").chat_template == found


TALK = [("system", "Be short."), ("user", "One?"), ("assistant", "Two."), ("user", " Three?")]
RENDERED = {
    "alpaca": "Be short.\n\n### Instruction:\nOne?\n\n### Response:\nTwo.\n\n### Instruction:\nThree?"
    "\n\n### Response:\n",
    "chatml": "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nOne?<|im_end|>\n"
    "<|im_start|>assistant\nTwo.<|im_end|>\n<|im_start|>user\n Three?<|im_end|>\n<|im_start|>assistant\n",
    "exaone": "[|system|]Be short.[|endofturn|]\n[|user|]One?\n[|assistant|]Two.[|endofturn|]\n[|user|] Three?\n"
    "[|assistant|]",
    "llama3": "<s><|start_header_id|>system<|end_header_id|>\n\nBe short.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nOne?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    "Two.<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nThree?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "mistral": "<s> [INST] Be short.\n\nOne? [/INST] Two.</s> [INST]  Three? [/INST]",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_with_names_render_their_formats(name: str) -> None:
    write_model("a", 0, WORDS)
    Path("r.yml").write_text(
        f"merge_method: passthrough\nmodels: [{{model: a}}]\nchat_template: {name}\nregauge: {{align: false}}\n"
    )
    main(["merge", "--recipe", "r.yml", "-o", "out"])
    tokenizer = transformers.AutoTokenizer.from_pretrained("out", bos_token="<s>", eos_token="</s>")
    talk = [{"role": role, "content": content} for role, content in TALK]
    assert tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True) == RENDERED[name]
    without = {"exaone": "[|system|][|endofturn|]\n[|user|]One?\n", "mistral": "<s> [INST] One? [/INST]"}
    if name in without:
        assert tokenizer.apply_chat_template(talk[1:2], tokenize=False) == without[name]
    if name == "mistral":
        with pytest.raises(jinja2.TemplateError, match="user and assistant take turns here"):
            tokenizer.apply_chat_template(talk[2:], tokenize=False)


def test_trained_subwords_are_united() -> None:
    """Every token of the union has its row, and special tokens stay special."""
    texts = {"a": "low lower lowest new newer", "b": "wide wider widest new now"}
    for seed, (name, text) in enumerate(texts.items()):
        made = tokenizers.Tokenizer(tokenizers.models.BPE())
        made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = tokenizers.decoders.ByteLevel()
        special = ["<s>", "</s>", f"<{name}>"]
        trainer = tokenizers.trainers.BpeTrainer(vocab_size=40, special_tokens=special, show_progress=False)
        made.train_from_iterator([text] * 3, trainer)
        write_model(name, seed, list(made.get_vocab()))
        fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")
        fast.save_pretrained(name)
    main(["merge", "a", "b", "--tokenizer", "union", "-o", "out"])
    one, two, out = (transformers.AutoTokenizer.from_pretrained(name) for name in ("a", "b", "out"))
    assert out.get_vocab().keys() == one.get_vocab().keys() | two.get_vocab().keys()
    assert all(out.get_vocab()[token] == row for token, row in one.get_vocab().items())
    assert out("<b>")["input_ids"] == [out.get_vocab()["<b>"]]
    assert out.get_added_vocab().keys() >= {"<a>", "<b>"}
    torch.testing.assert_close(rows_of("out", "<a>"), rows_of("a", "<a>"))
    assert open_clean("out").config.vocab_size == len(out)


def test_networks_without_tokens_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for seed, name in enumerate("ab"):
        torch.manual_seed(seed)
        sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = transformers.ViTConfig(image_size=8, patch_size=4, **sizes)
        transformers.ViTForImageClassification(config).save_pretrained(name)
    assert "does not set the number of tokens" in refused(
        ["merge", "a", "b", "--tokenizer", "union", "-o", "out"], capsys
    )


def logits_of(folder: str, tokens: list[str], cls: Any = None) -> torch.Tensor:
    """Return the logits of a network for a text, with the tokens in the network's order."""
    known = transformers.AutoTokenizer.from_pretrained(folder).get_vocab()
    model = (cls or transformers.AutoModelForCausalLM).from_pretrained(folder).eval()
    with torch.no_grad():
        found = model(torch.tensor([[known[token] for token in tokens]])).logits
    return found[..., [known[token] for token in sorted(known)]]


def write_moved(order: torch.Tensor, **settings: Any) -> None:
    """Write network a, and network b: a moved along its orbit, with little noise, and with its tokens in another
    order.
    """
    model = write_model("a", 0, WORDS, **settings)
    main(["discover", "a", "-o", "symmetry.json", "--overwrite"])
    params = dict(model.state_dict())
    symmetry = rg.Symmetry.from_json(Path("symmetry.json").read_text()).bind(params)
    torch.manual_seed(3)
    near = {name: tensor + 1e-3 * torch.randn_like(tensor) for name, tensor in params.items()}
    moved = symmetry.act(symmetry.random(torch.Generator().manual_seed(1), PARTS), near)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        moved[name] = torch.cat([moved[name][order], moved[name][len(order) :]])
    model.load_state_dict(moved)
    model.save_pretrained("b", max_shard_size="2KB")
    write_tokens(Path("b"), [WORDS[k] for k in order])
    for name in ("config.json", "generation_config.json"):
        path = Path("b", name)
        document = json.loads(path.read_text()) | {"bos_token_id": order.tolist().index(1), "suppress_tokens": [0, 3]}
        path.write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("settings", "is_streamed"), [({}, False), ({"vocab_size": 40}, True)], ids=["in memory", "padded and streamed"]
)
def test_tokens_in_another_order_are_brought_to_the_first(
    settings: dict[str, Any], is_streamed: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The aligned network has the tokens of A, computes the function of B for every text, and is close to A."""
    order = torch.randperm(len(WORDS), generator=torch.Generator().manual_seed(2))
    write_moved(order, **settings)
    if is_streamed:
        monkeypatch.setattr("regauge.checkpoints.job.FileJob.is_streamed", True)
    main(["align", "a", "b", "-o", "out"])
    count = int((order != torch.arange(len(order))).sum())
    assert f"tokens were reordered to their ids in a: {count} of b" in capsys.readouterr().err
    one, two = load("a"), load("out")
    assert one.keys() == two.keys()
    assert all(float((two[name] - tensor).abs().max()) < 2e-2 for name, tensor in one.items())
    text = ["<s>", "c", "a", "u", "b"]
    torch.testing.assert_close(logits_of("out", text), logits_of("b", text), rtol=1e-4, atol=1e-5)
    assert Path("out/tokenizer.json").read_bytes() == Path("a/tokenizer.json").read_bytes()
    for name in ("config.json", "generation_config.json"):
        found = json.loads(Path("out", name).read_text())
        assert (found["bos_token_id"], found["suppress_tokens"]) == (1, [int(order[0]), int(order[3])])
    main(["merge", "a", "b", "-o", "merged.safetensors"])
    assert all(float((load("merged.safetensors")[name] - t).abs().max()) < 1e-2 for name, t in one.items())
    main(["align", "a", "b", "--tokenizer", "b", "-o", "own"])
    torch.testing.assert_close(logits_of("own", text), logits_of("b", text), rtol=1e-4, atol=1e-5)
    assert Path("own/tokenizer.json").read_bytes() == Path("b/tokenizer.json").read_bytes()
    main(["canonicalize", "b", "--reference", "a", "-o", "canonical"])
    torch.testing.assert_close(logits_of("canonical", text), logits_of("b", text), rtol=1e-4, atol=1e-5)


def test_a_new_order_of_tokens_has_a_place(capsys: pytest.CaptureFixture[str]) -> None:
    write_model("a", 0, WORDS)
    write_model("b", 1, [*WORDS[:3], *reversed(WORDS[3:])])
    said = refused(["align", "a", "b", "-o", "out.safetensors"], capsys)
    assert "the tokenizer of the result is written to a folder: give a folder" in said


@pytest.mark.parametrize(("is_tied", "is_streamed"), [(False, True), (True, False)])
def test_networks_are_aligned_under_a_union(is_tied: bool, is_streamed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of tokens that B lacks come from A, and all other rows compute the function of B."""
    write_model("a", 0, WORDS, tie_word_embeddings=is_tied)
    write_model("b", 1, OTHER, tie_word_embeddings=is_tied)
    if is_streamed:
        monkeypatch.setattr("regauge.checkpoints.job.FileJob.is_streamed", True)
    main(["align", "a", "b", "--tokenizer", "union", "-o", "out"])
    for row, own in zip(rows_of("out", "e"), rows_of("a", "e"), strict=True):
        torch.testing.assert_close(row, own)
    known = sorted(transformers.AutoTokenizer.from_pretrained("out").get_vocab())
    assert known == sorted({*WORDS, *OTHER})
    there = [token in OTHER for token in known]
    text = ["<s>", "x", "a", "u", "b"]
    torch.testing.assert_close(logits_of("out", text)[..., there], logits_of("b", text), rtol=1e-4, atol=1e-5)
    main(["merge", "a", "out", "--tokenizer", "union", "-o", "merged"])
    assert open_clean("merged").config.vocab_size == len(known)


def test_networks_with_other_tokens_are_compared_by_those_that_both_have(capsys: pytest.CaptureFixture[str]) -> None:
    model = write_model("a", 0, WORDS)
    words = ["<unk>", "<new>", *WORDS[1:20]]  # One token more, two fewer, and all others at another row.
    other = write_model("b", 0, words)
    rows = [WORDS.index(word) if word in WORDS else 3 for word in words]
    state = {n: t[rows] if t.shape[0] == len(WORDS) else t for n, t in model.state_dict().items()}
    other.load_state_dict(state)
    other.save_pretrained("b")
    capsys.readouterr()
    main(["compare", "a", "b", "--json"])
    out, told = capsys.readouterr()
    found = json.loads(out)
    assert found["verdict"] == "identical", found["reason"]
    assert {row["tensor"]: row["size"] for row in found["tensors"]}["lm_head.weight"] == 8 * (len(words) - 1)
    assert "only tokens that all networks have are compared" in told
    assert any("<new>" in note for note in found["notes"])

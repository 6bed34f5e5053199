"""Mixtures of dense networks: with equal experts, they compute the dense network, and routers follow their names."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import regauge as rg
from regauge.checkpoints.checkpoint import load
from regauge.cli.main import main
from regauge.merging import Expert, assemble_mixture, merge_recipe

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

SIZES = {
    "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 3, "vocab_size": 12, "max_position_embeddings": 64, "head_dim": 4,
}  # fmt: skip
WORDS = ("the", "doctor", "says", "no", "dragon", "flies", "home", "again", "one", "two", "three")
DENSE = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": 3}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"tie_word_embeddings": True}),
}
SHARING = {"llama": DENSE["llama"], "mistral": DENSE["mistral"], "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {})}
PROMPTS = (("the doctor says no", "one two"), ("dragon flies home again the", "dragon"))


def write(folder: Path, kind: str, seed: int, **own: Any) -> Any:
    """Write a dense network in float64, with a tokenizer of words."""
    config, model, settings = (DENSE | SHARING)[kind]
    torch.manual_seed(seed)
    made = getattr(transformers, model)(getattr(transformers, config)(**SIZES | settings | own)).double().eval()
    for name, tensor in made.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(tensor, 0.5, 1.5)
    made.save_pretrained(folder)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: k for k, word in enumerate((*WORDS, "?"))}, "?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(folder)
    return made


def logits(folder: Path) -> Tensor:
    # The fast kernels for experts are for float32 at most.
    settings: Any = {"dtype": torch.float64, "experts_implementation": "eager"}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, **settings).eval()
    with torch.no_grad():
        found: Tensor = model(torch.arange(24).reshape(2, 12) % 11).logits
    return found


@pytest.mark.parametrize("kind", DENSE)
@pytest.mark.parametrize("chosen", [1, 2, 3])
def test_equal_experts_are_the_dense_network(tmp_path: Path, kind: str, chosen: int) -> None:
    write(tmp_path / "base", kind, 1)
    generator = torch.Generator().manual_seed(0)
    settings: Any = {"router": "random", "chosen": chosen, "generator": generator}
    made = assemble_mixture(tmp_path / "base", [tmp_path / "base"] * 3, tmp_path / "out", **settings)
    # transformers makes the weights of experts in float32; that of one expert is one.
    torch.testing.assert_close(
        logits(tmp_path / "out"), logits(tmp_path / "base"), rtol=0, atol=1e-12 if chosen == 1 else 1e-7
    )
    assert (made.experts, made.chosen) == (3, chosen)
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    write(tmp_path / "other", kind, 2)
    assemble_mixture(tmp_path / "base", [tmp_path / "base", tmp_path / "other", tmp_path / "base"],
                     tmp_path / "mixed", **settings)  # fmt: skip
    assert (logits(tmp_path / "mixed") - logits(tmp_path / "base")).abs().max() > 1e-3


@pytest.mark.parametrize("kind", DENSE)
def test_one_expert_is_the_network_with_its_mlps(tmp_path: Path, kind: str) -> None:
    base, other = (write(tmp_path / name, kind, seed) for name, seed in (("base", 1), ("other", 2)))
    generator = torch.Generator().manual_seed(0)
    assemble_mixture(tmp_path / "base", [tmp_path / "other"], tmp_path / "out", router="uniform_random", chosen=1,
                     generator=generator)  # fmt: skip
    for mine, theirs in zip(base.model.layers, other.model.layers, strict=True):
        mine.mlp = theirs.mlp
    base.save_pretrained(tmp_path / "base", safe_serialization=True)
    torch.testing.assert_close(logits(tmp_path / "out"), logits(tmp_path / "base"), rtol=0, atol=1e-12)


def routers(folder: Path) -> Tensor:
    tensors = load(folder)
    return torch.stack([tensors[name] for name in sorted(tensors) if name.endswith(".gate.weight")])


@pytest.mark.parametrize("router", ["hidden", "hidden_avg", "cheap_embed"])
def test_routers_are_unit_vectors_of_prompts(tmp_path: Path, router: Any) -> None:
    base = write(tmp_path / "base", "llama", 1)
    write(tmp_path / "other", "llama", 2)
    experts = [Expert(tmp_path / "base", PROMPTS[0]), Expert(tmp_path / "other", PROMPTS[1], ("no",))]
    made = assemble_mixture(tmp_path / "base", experts, tmp_path / "out", router=router)

    def vector(prompt: str, layer: int) -> Tensor:
        tokens = torch.tensor([[WORDS.index(word) for word in prompt.split()]])
        embedded: Tensor = base.model.embed_tokens(tokens)
        if router == "cheap_embed":
            return embedded[0].sum(0)
        with torch.no_grad():
            states = base(tokens, output_hidden_states=True).hidden_states[layer][0]
        return states[-1] if router == "hidden" else states.sum(0) / len(states)

    found = routers(tmp_path / "out").double()
    for layer in range(3):
        first, second = (sum(vector(one, layer) for one in prompts) for prompts in PROMPTS)
        share = 1 if router == "cheap_embed" else 2
        expected = torch.stack([first, second / share - vector("no", layer)])
        expected = (expected / expected.norm(dim=1, keepdim=True)).detach()
        torch.testing.assert_close(found[layer], expected, rtol=0, atol=1e-6)
        assert made.conditions[layer] == pytest.approx(float(torch.linalg.cond(expected)), rel=1e-4)


def test_random_routers_have_the_generator_and_the_scale_of_a_linear_layer(tmp_path: Path) -> None:
    write(tmp_path / "base", "llama", 1)
    for name, router in (("a", "random"), ("b", "random"), ("c", "uniform_random")):
        generator = torch.Generator().manual_seed(7)
        experts = [tmp_path / "base"] * 8
        assemble_mixture(tmp_path / "base", experts, tmp_path / name, router=router, generator=generator)  # type: ignore[arg-type]
    assert torch.equal(routers(tmp_path / "a"), routers(tmp_path / "b"))
    assert 0.9 < float(routers(tmp_path / "a").std()) < 1.1
    assert 0.2 < float(routers(tmp_path / "c").abs().max()) <= 0.25


def test_prompts_that_are_much_alike_are_told() -> None:
    mixture = rg.merging.AssembledMixture(Path("out"), 3, 2, (1.5, 7.0, float("inf")))
    assert str(mixture) == (
        "3 experts in every layer, 2 for every token; in 2 of 3 layers, some are hardly used, because their "
        "prompts are similar"
    )
    assert str(rg.merging.AssembledMixture(Path("out"), 3, 2, (1.5,))) == "3 experts in every layer, 2 for every token"


def test_what_makes_no_mixture_is_refused(tmp_path: Path) -> None:
    for name, kind, own in (
        ("base", "llama", {}),
        ("wide", "llama", {"intermediate_size": 32}),
        ("mistral", "mistral", {}),
        ("gelu", "llama", {"hidden_act": "gelu"}),
        ("bias", "llama", {"attention_bias": True}),
    ):
        write(tmp_path / name, kind, 1, **own)
    (tmp_path / "gpt").mkdir()
    (tmp_path / "gpt" / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    base, out, generator = tmp_path / "base", tmp_path / "out", torch.Generator()
    ways: Any = {"router": "random", "generator": generator}
    for networks, said in (
        ((tmp_path / "gpt", base, base), "is of type 'gpt2'; mixtures can be made of llama, mistral, qwen3"),
        ((tmp_path / "bias", base, base), "has 'attention_bias', unlike any mixtral"),
        ((base, base, tmp_path / "wide"), "or has another shape there than"),
        ((base, base, tmp_path / "mistral"), "has model_type 'mistral', but"),
        ((base, base, tmp_path / "gelu"), "has hidden_act 'gelu', but"),
        ((base, base), "every token chooses 2 of 1 experts"),
    ):
        with pytest.raises(ValueError, match=said):
            assemble_mixture(networks[0], networks[1:], out, **ways)
    with pytest.raises(ValueError, match=r"needs random numbers; give a torch.Generator as `generator`"):
        assemble_mixture(base, [base, base], out, router="random")
    with pytest.raises(ValueError, match=r"is made of prompts, but .* has none"):
        assemble_mixture(base, [base, Expert(base, ("the",))], out)
    with pytest.raises(ValueError, match="all experts have the same prompts"):
        assemble_mixture(base, [Expert(base, ("the",)), Expert(base, ("the",))], out)
    with pytest.raises(ValueError, match="has no tokens; give a text"):
        assemble_mixture(base, [Expert(base, ("",)), Expert(base, ("the",))], out)
    assert not out.exists()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (base / name).unlink()
    with pytest.raises(ValueError, match=r"it is needed because it reads the prompts: add tokenizer\.json"):
        assemble_mixture(base, [Expert(base, ("no",)), Expert(base, ("the",))], out)


@pytest.mark.parametrize("kind", SHARING)
def test_a_shared_expert_adds_its_share_of_every_token(tmp_path: Path, kind: str) -> None:
    """A shared expert adds its output times its gate, and without its last matrix it adds nothing."""
    base = write(tmp_path / "base", kind, 1)
    write(tmp_path / "other", kind, 2)
    ways: Any = {"router": "random", "generator": torch.Generator().manual_seed(0)}
    experts = [tmp_path / "base"] * 2
    silent = Expert(tmp_path / "other", residual_scale=0.0)
    made = assemble_mixture(tmp_path / "base", experts, tmp_path / "silent", shared=silent, **ways)
    assert "and one shared expert" in str(made)
    expected = logits(tmp_path / "base")
    torch.testing.assert_close(logits(tmp_path / "silent"), expected, rtol=0, atol=1e-7)
    assemble_mixture(tmp_path / "base", experts, tmp_path / "loud", shared=tmp_path / "other", **ways)
    settings: Any = {"dtype": torch.float64, "experts_implementation": "eager"}
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "loud", **settings).eval()
    other = load(tmp_path / "other")
    stream = torch.randn(1, 5, 16, dtype=torch.float64)
    mlp, dense = model.model.layers[0].mlp, base.model.layers[0].mlp
    gate = torch.sigmoid(stream @ load(tmp_path / "loud")["model.layers.0.mlp.shared_expert_gate.weight"].T)
    up, down = (other[f"model.layers.0.mlp.{name}_proj.weight"] for name in ("up", "down"))
    inner = torch.nn.functional.silu(stream @ other["model.layers.0.mlp.gate_proj.weight"].T) * (stream @ up.T)
    with torch.no_grad():
        found = mlp(stream)
        found = found[0] if isinstance(found, tuple) else found
        torch.testing.assert_close(found, dense(stream) + gate * (inner @ down.T), rtol=0, atol=1e-6)


RECIPE = """
base_model: base
gate_mode: hidden
experts_per_token: 1
dtype: float32
experts:
  - source_model: base
    positive_prompts: ["the doctor says no", "one two"]
  - source_model: other
    positive_prompts: ["dragon flies home again the"]
    negative_prompts: ["one two"]
    residual_scale: 0.5
"""


def test_a_recipe_of_mergekit_moe_makes_what_python_makes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, seed in (("base", 1), ("other", 2)):
        write(tmp_path / name, "llama", seed)
    (tmp_path / "mixture.yml").write_text(RECIPE)
    main(["merge", "--recipe", str(tmp_path / "mixture.yml"), "-o", str(tmp_path / "out")])
    assert "2 experts in every layer, 1 for every token" in capsys.readouterr().out
    experts = [
        Expert(tmp_path / "base", ("the doctor says no", "one two")),
        Expert(tmp_path / "other", ("dragon flies home again the",), ("one two",), residual_scale=0.5),
    ]
    assemble_mixture(tmp_path / "base", experts, rg.Output(tmp_path / "python", dtype=torch.float32), chosen=1)
    ours, theirs = load(tmp_path / "out"), load(tmp_path / "python")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) and ours[name].dtype == torch.float32 for name in ours)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("gate_mode: loud", r"'gate_mode' is 'loud'; choose from hidden_last, hidden"),
        ("architecture: deepseek", r"'deepseek' is not supported; choose from mixtral, qwen, qwen3"),
        ("architecture: qwen", r"needs one shared expert"),
        ("experts_per_tokens: 1", r"line \d+: 'experts_per_tokens' is unknown"),
        ("experts_per_token: 3", r"every token chooses 3 of 2 experts"),
    ],
)
def test_what_a_recipe_says_wrong_is_refused_by_its_line(tmp_path: Path, line: str, message: str) -> None:
    for name, seed in (("base", 1), ("other", 2)):
        write(tmp_path / name, "llama", seed)
    text = RECIPE.replace("gate_mode: hidden\nexperts_per_token: 1\n", f"{line}\n")
    (tmp_path / "mixture.yml").write_text(text)
    with pytest.raises(ValueError, match=message):
        merge_recipe(tmp_path / "mixture.yml", tmp_path / "out")
    assert not (tmp_path / "out").exists()

"""Recipes that cover the methods and options of mergekit's documentation, and the small models that they name."""

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from safetensors.torch import save_file

THREE = "models: [{model: one, parameters: {%s}}, {model: two, parameters: {%s}}, {model: three, parameters: {%s}}]\n"
WEIGHED = THREE % ("weight: 0.3", "weight: 0.9", "weight: 0.5")
PLAIN = "models: [{model: one}, {model: two}, {model: three}]\n"
TWO = "models: [{model: one, parameters: {weight: 0.6}}, {model: two, parameters: {weight: 0.4}}]\n"
BOTH = "models: [{model: one}, {model: two}]\n"
BASE = "base_model: base\n"
TOKENS = "models: [{model: one, parameters: {weight: 1}}, {model: more, parameters: {weight: 1}}]\nbase_model: one\n"


def _with(method: str, body: str, parameters: str = "") -> str:
    return f"merge_method: {method}\n{body}" + (f"parameters: {{{parameters}}}\n" if parameters else "")


def _slice(*sources: str, parameters: str = "", more: str = "") -> str:
    listed = ", ".join(f"{{{one}}}" for one in sources)
    return f"  - sources: [{listed}]\n" + (f"    parameters: {{{parameters}}}\n" if parameters else "") + more


def _of(model: str, first: int, end: int, parameters: str = "") -> str:
    return f"model: {model}, layer_range: [{first}, {end}]" + (f", parameters: {{{parameters}}}" if parameters else "")


RECIPES = {
    # linear
    "linear": _with("linear", WEIGHED),
    "linear, normalize false": _with("linear", WEIGHED, "normalize: false"),
    "linear, a negative weight": _with("linear", THREE % ("weight: 0.3", "weight: 0.9", "weight: -0.5")),
    "linear, weight of the recipe": _with("linear", PLAIN, "weight: 0.25"),
    "linear, weight as text": _with("linear", THREE % ('weight: "0.5"', "weight: 1", 'weight: "1e-1"')),
    "linear, gradients": _with("linear", THREE % ("weight: [0, 1]", "weight: [1, 0.5, 0]", "weight: 0.1")),
    "linear, filters": _with(
        "linear", THREE % ("weight: [{filter: mlp, value: [0.2, 2]}, {value: 1}]", "weight: 0.7", "weight: 0.5")
    ),
    "linear, a filter of all": _with(
        "linear", THREE % ('weight: [{filter: "*", value: 0.4}]', "weight: 0.7", "weight: 0.5")
    ),
    "linear, one filter instead of a list": _with(
        "linear", THREE % ("weight: {filter: mlp, value: 2}", "weight: 0.7", "weight: 0.5"), "weight: 0.1"
    ),
    "linear, a filter and the recipe for all else": _with(
        "linear", THREE % ("weight: [{filter: self_attn, value: 1}]", "", ""), "weight: 0.3"
    ),
    "linear, one model": _with("linear", "models: [{model: one, parameters: {weight: 0.7}}]\n"),
    "linear, base among the models": _with("linear", WEIGHED + "base_model: one\n"),
    "linear, base not among the models": _with("linear", BASE + PLAIN, "weight: 0.5"),
    "linear, dtype bfloat16": _with("linear", WEIGHED + "dtype: bfloat16\n"),
    "linear, dtype float16": _with("linear", WEIGHED + "dtype: float16\n"),
    "linear, dtype float32, out_dtype bfloat16": _with("linear", WEIGHED + "dtype: float32\nout_dtype: bfloat16\n"),
    "linear, bfloat16 models without dtype": _with(
        "linear", "models: [{model: narrow_one}, {model: narrow_two}]\n", "weight: 0.5"
    ),
    "linear, bfloat16 and float32 models": _with(
        "linear", "models: [{model: narrow_one}, {model: two}]\n", "weight: 0.5"
    ),
    "linear, tied embeddings": _with("linear", "models: [{model: tied_one}, {model: tied_two}]\n", "weight: 0.5"),
    # slerp
    "slerp": _with("slerp", "base_model: one\n" + BOTH, "t: 0.35"),
    "slerp, base second": _with("slerp", "base_model: two\n" + BOTH, "t: 0.35"),
    "slerp, base not among the models": _with("slerp", BASE + "models: [{model: one}]\n", "t: 0.35"),
    "slerp of strangers": _with("slerp", "base_model: one\nmodels: [{model: one}, {model: stranger}]\n", "t: 0.35"),
    "slerp, t outside": _with("slerp", "base_model: one\n" + BOTH, "t: 1.3"),
    "slerp, filters and gradients": _with(
        "slerp",
        "base_model: one\n" + BOTH,
        "t: [{filter: self_attn, value: [0, 0.5, 0.3, 0.7, 1]}, {filter: mlp, value: [1, 0.5, 0]}, {value: 0.5}]",
    ),
    "slerp of GPT-2": _with("slerp", "base_model: gpt_one\nmodels: [{model: gpt_one}, {model: gpt_two}]\n", "t: 0.4"),
    # nuslerp, multislerp, karcher
    "nuslerp": _with("nuslerp", TWO),
    "nuslerp, base": _with("nuslerp", BASE + TWO),
    "nuslerp, flatten false": _with("nuslerp", TWO, "nuslerp_flatten: false"),
    "nuslerp, row wise": _with("nuslerp", TWO, "nuslerp_flatten: false, nuslerp_row_wise: true"),
    "nuslerp, row wise, base": _with("nuslerp", BASE + TWO, "nuslerp_flatten: false, nuslerp_row_wise: true"),
    "nuslerp, row wise but flat": _with("nuslerp", TWO, "nuslerp_row_wise: true"),
    "nuslerp, weights that cancel": _with(
        "nuslerp", "models: [{model: one, parameters: {weight: -0.5}}, {model: two, parameters: {weight: 0.5}}]\n"
    ),
    "multislerp": _with("multislerp", WEIGHED),
    "multislerp, base": _with("multislerp", BASE + WEIGHED),
    "multislerp, normalize_weights false": _with("multislerp", BASE + WEIGHED, "normalize_weights: false"),
    "multislerp, eps": _with("multislerp", WEIGHED, "eps: 1.0e-6"),
    "multislerp of strangers": _with(
        "multislerp", "models: [{model: one, parameters: {weight: 1}}, {model: stranger, parameters: {weight: 2}}]\n"
    ),
    "karcher": _with("karcher", PLAIN),
    "karcher of strangers": _with("karcher", "models: [{model: one}, {model: two}, {model: stranger}]\n"),
    "karcher, max_iter": _with("karcher", "models: [{model: one}, {model: two}, {model: stranger}]\n", "max_iter: 2"),
    "karcher, tol": _with(
        "karcher", "models: [{model: one}, {model: two}, {model: stranger}]\n", "max_iter: 50, tol: 1.0e-7"
    ),
    "karcher, a large tol": _with("karcher", "models: [{model: one}, {model: two}, {model: stranger}]\n", "tol: 0.1"),
    "karcher, base": _with("karcher", BASE + BOTH),
    # task vectors
    "task_arithmetic": _with("task_arithmetic", BASE + WEIGHED),
    "task_arithmetic, lambda": _with("task_arithmetic", BASE + WEIGHED, "lambda: 0.7"),
    "task_arithmetic, lambda by filter": _with(
        "task_arithmetic", BASE + WEIGHED, "lambda: [{filter: mlp, value: 0.2}, {value: 1.1}]"
    ),
    "task_arithmetic, normalize": _with("task_arithmetic", BASE + WEIGHED, "normalize: true"),
    "task_arithmetic, weights that cancel, normalize": _with(
        "task_arithmetic", BASE + THREE % ("weight: 0.5", "weight: -0.5", "weight: 0"), "normalize: true"
    ),
    "task_arithmetic, rescale": _with("task_arithmetic", BASE + WEIGHED, "rescale: true"),
    "task_arithmetic, one model": _with(
        "task_arithmetic", BASE + "models: [{model: one, parameters: {weight: -0.5}}]\n"
    ),
    "task_arithmetic, base among the models": _with(
        "task_arithmetic", BASE + "models: [{model: base}, {model: one, parameters: {weight: 0.5}}]\n"
    ),
    "task_arithmetic, bfloat16 base": _with("task_arithmetic", "base_model: narrow_base\n" + WEIGHED),
    "ties": _with("ties", BASE + THREE % ("weight: 0.3, density: 0.4", "weight: 0.9, density: 0.7", "weight: 0.5")),
    "ties, density by gradient": _with("ties", BASE + WEIGHED, "density: [1, 0.7, 0.1]"),
    "ties, normalize false": _with("ties", BASE + WEIGHED, "density: 0.5, normalize: false"),
    "ties, lambda": _with("ties", BASE + WEIGHED, "density: 0.5, lambda: 1.3"),
    "ties, int8_mask": _with("ties", BASE + WEIGHED, "density: 0.5, int8_mask: true"),
    "ties, rescale": _with("ties", BASE + WEIGHED, "density: 0.5, rescale: true"),
    "ties, density 1": _with("ties", BASE + WEIGHED),
    "ties, a small density": _with("ties", BASE + WEIGHED, "density: 0.01"),
    "ties, density 0": _with("ties", BASE + THREE % ("weight: 1, density: 0", "weight: 1", "weight: 1")),
    "ties, a negative weight": _with("ties", BASE + THREE % ("weight: 0.3", "weight: 0.9", "weight: -0.5")),
    "ties, dtype bfloat16": _with("ties", BASE + WEIGHED + "dtype: bfloat16\n", "density: 0.5"),
    "dare_linear, density 1": _with("dare_linear", BASE + WEIGHED),
    "dare_linear": _with("dare_linear", BASE + WEIGHED, "density: 0.6"),
    "dare_linear, rescale false": _with("dare_linear", BASE + WEIGHED, "density: 0.6, rescale: false"),
    "dare_ties, density 1": _with("dare_ties", BASE + WEIGHED),
    "dare_ties": _with("dare_ties", BASE + WEIGHED, "density: 0.6"),
    "dare_ties, rescale false": _with("dare_ties", BASE + WEIGHED, "density: 0.6, rescale: false"),
    "dare_ties, normalize": _with("dare_ties", BASE + WEIGHED, "normalize: true"),
    "della, density 1": _with("della", BASE + WEIGHED),
    "della": _with("della", BASE + WEIGHED, "density: 0.6, epsilon: 0.1"),
    "della, rescale false": _with("della", BASE + WEIGHED, "density: 0.6, epsilon: 0.1, rescale: false"),
    "della_linear, density 1, lambda": _with("della_linear", BASE + WEIGHED, "lambda: 0.5"),
    "della_linear": _with("della_linear", BASE + WEIGHED, "density: 0.6, epsilon: 0.1"),
    "breadcrumbs": _with("breadcrumbs", BASE + WEIGHED, "density: 0.6, gamma: 0.2"),
    "breadcrumbs, defaults": _with("breadcrumbs", BASE + WEIGHED),
    "breadcrumbs, more gamma than there is place": _with(
        "breadcrumbs", BASE + WEIGHED, "density: 0.75, gamma: 0.5"
    ),
    "breadcrumbs, rescale": _with("breadcrumbs", BASE + WEIGHED, "density: 0.6, gamma: 0.2, rescale: true"),
    "breadcrumbs_ties": _with("breadcrumbs_ties", BASE + WEIGHED, "density: 0.6, gamma: 0.2"),
    "breadcrumbs_ties, normalize": _with("breadcrumbs_ties", BASE + WEIGHED, "density: 0.6, normalize: true"),
    "sce": _with("sce", BASE + PLAIN),
    "sce, select_topk": _with("sce", BASE + PLAIN, "select_topk: 0.4"),
    "sce, select_topk by gradient, int8_mask": _with("sce", BASE + PLAIN, "select_topk: [0.2, 0.8], int8_mask: true"),
    "sce, small changes": _with("sce", BASE + "models: [{model: near_one}, {model: near_two}]\n"),
    "ram": _with("ram", BASE + PLAIN, "epsilon: 0.03"),
    "ram, defaults": _with("ram", BASE + PLAIN),
    "ramplus_tl": _with("ramplus_tl", BASE + PLAIN, "epsilon: 0.03, r: 0.4, alpha: 1.5"),
    "ramplus_tl, defaults": _with("ramplus_tl", BASE + PLAIN),
    # others
    "model_stock": _with("model_stock", BASE + PLAIN),
    "model_stock, filter_wise": _with("model_stock", BASE + PLAIN, "filter_wise: true"),
    "model_stock of strangers": _with("model_stock", "base_model: stranger\n" + PLAIN),
    "nearswap": _with("nearswap", BASE + "models: [{model: one}]\n", "t: 0.02"),
    "nearswap, base among the models": _with("nearswap", BASE + "models: [{model: base}, {model: one}]\n", "t: 0.0001"),
    "arcee_fusion": _with("arcee_fusion", BASE + "models: [{model: base}, {model: one}]\n"),
    "arcee_fusion, base not among the models": _with("arcee_fusion", BASE + "models: [{model: one}]\n"),
    "passthrough": _with("passthrough", "models: [{model: one}]\n"),
    "passthrough, scale": _with(
        "passthrough", "models: [{model: one, parameters: {scale: [{filter: o_proj, value: 0}, {value: 1}]}}]\n"
    ),
    # slices
    "slices of two models": _with("passthrough", "slices:\n" + _slice(_of("one", 0, 2)) + _slice(_of("two", 1, 3))),
    "slices, scale of one source": _with(
        "passthrough", "slices:\n" + _slice(_of("one", 0, 2)) + _slice(_of("two", 1, 3, "scale: 0.5"))
    ),
    "slices of GPT-2, twice the same": _with(
        "passthrough", "slices:\n" + _slice(_of("gpt_one", 0, 2)) + _slice(_of("gpt_one", 0, 2))
    ),
    "slices, linear of shifted layers": _with(
        "linear",
        "slices:\n"
        + _slice(_of("one", 0, 2, "weight: 0.3"), _of("two", 1, 3, "weight: 0.7"))
        + _slice(_of("one", 1, 3), _of("two", 0, 2), parameters="weight: 0.5"),
    ),
    "slices, slerp, t of a slice": _with(
        "slerp",
        "base_model: one\nslices:\n"
        + _slice(_of("one", 0, 2), _of("two", 0, 2), parameters="t: 0.2")
        + _slice(_of("one", 2, 3), _of("two", 2, 3)),
        "t: 0.8",
    ),
    "slices, base_model of a slice": _with(
        "slerp",
        "base_model: one\nslices:\n"
        + _slice(_of("one", 0, 2), _of("two", 0, 2), more="    base_model: two\n")
        + _slice(_of("one", 2, 3), _of("two", 2, 3)),
        "t: 0.3",
    ),
    "slices, base_model of every slice": _with(
        "task_arithmetic",
        "slices:\n"
        + _slice(_of("one", 0, 2), _of("base", 0, 2), more="    base_model: base\n")
        + _slice(_of("three", 2, 3), _of("one", 2, 3), more="    base_model: one\n"),
        "weight: 0.5",
    ),
    "slices, residual_weight": _with(
        "linear",
        "slices:\n"
        + _slice(_of("one", 0, 3), _of("two", 0, 3), parameters="weight: 0.5", more="    residual_weight: 0.5\n"),
    ),
    "modules, models": _with("linear", "modules:\n  default:\n    " + BOTH, "weight: 0.5"),
    "modules, slices": _with(
        "passthrough",
        "modules:\n  default:\n    slices:\n" + _slice(_of("one", 0, 2)).replace("  -", "      -"),
    ),
    # tokens and templates
    "tokenizer_source base": _with("linear", TOKENS + "tokenizer_source: base\n"),
    "tokenizer_source of a model": _with("linear", TOKENS + "tokenizer_source: more\n"),
    "tokenizer_source union": _with("linear", TOKENS + "tokenizer_source: union\n"),
    "tokenizer, pad_to_multiple_of": _with("linear", TOKENS + "tokenizer: {source: base, pad_to_multiple_of: 16}\n"),
    "tokenizer, tokens zero": _with(
        "linear", TOKENS + "tokenizer: {source: base, tokens: {t5: {source: {kind: zero}, force: true}}}\n"
    ),
    "tokenizer, tokens of a model, forced": _with(
        "linear", TOKENS + "tokenizer: {source: base, tokens: {t5: {source: more, force: true}}}\n"
    ),
    "tokenizer, a token of another one": _with(
        "linear",
        TOKENS + "tokenizer: {source: base, tokens: {t6: {source: {kind: model_token, model: more, token: t4}, "
        "force: true}}}\n",
    ),
    "tokenizer, a token by its number": _with(
        "linear",
        TOKENS + "tokenizer: {source: base, tokens: {t6: {source: {kind: model_token, model: more, token_id: 25}, "
        "force: true}}}\n",
    ),
    **{
        f"chat_template {name}": _with("linear", TWO + f"base_model: one\nchat_template: {name}\n")
        for name in ("auto", "alpaca", "chatml", "exaone", "llama3", "mistral")
    },
    "chat_template as text": _with(
        "linear", TWO + "base_model: one\nchat_template: \"{% for m in messages %}{{m['content']}}{% endfor %}\"\n"
    ),
    # models
    "a model as a mapping": _with(
        "linear", "models: [{model: {model: one}}, {model: {model: {path: two}}}]\n", "weight: 0.5"
    ),
    "a model with an adapter": _with(
        "linear", "models: [{model: base+adapter}, {model: two}]\n", "weight: 0.5"
    ),
    "a model with an adapter, as a mapping": _with(
        "linear", "models: [{model: {model: base, lora: adapter}}, {model: two}]\n", "weight: 0.5"
    ),
}  # fmt: skip
"""By name, recipes as mergekit reads them; folders are those of `make_models`."""

REFUSED = {
    "an unknown method": _with("average", WEIGHED),
    "a missing weight": _with("linear", BOTH),
    "ties without a base": _with("ties", WEIGHED),
    "slerp of three": _with("slerp", "base_model: one\n" + PLAIN, "t: 0.5"),
    "passthrough of two": _with("passthrough", BOTH),
    "slices of other lengths": _with(
        "linear", "slices:\n" + _slice(_of("one", 0, 2), _of("two", 0, 3), parameters="weight: 1")
    ),
    "models and slices": _with("passthrough", BOTH + "slices:\n" + _slice(_of("one", 0, 2))),
    "tokenizer and tokenizer_source": _with("linear", TOKENS + "tokenizer_source: base\ntokenizer: {source: base}\n"),
    "della, epsilon too large": _with("della", BASE + WEIGHED, "density: 0.66, epsilon: 1.35"),
    "other vocabularies, no tokenizer": _with("linear", TOKENS),
}
"""Recipes that mergekit refuses."""


def make_models(place: Path) -> None:
    """Write the small models that the recipes name into a folder."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "max_position_embeddings": 32}

    def llama(seed: int, **own: Any) -> Any:
        torch.manual_seed(seed)
        given = {"vocab_size": 24, "num_hidden_layers": 3, "initializer_range": 0.3, "tie_word_embeddings": False}
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes | given | own)).eval()

    def tune(model: Any, start: dict[str, torch.Tensor], size: float, seed: int) -> Any:
        torch.manual_seed(seed)
        shared = [0.6 * size * torch.randn(t.shape, generator=torch.Generator().manual_seed(7)) for t in start.values()]
        model.load_state_dict(
            {n: t + s + size * torch.randn_like(t) for (n, t), s in zip(start.items(), shared, strict=True)}
        )
        return model

    base = llama(0)
    start = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    made = {"base": base, "stranger": llama(9)}
    made |= {name: tune(llama(0), start, 0.04, 10 + k) for k, name in enumerate(("one", "two", "three"))}
    made |= {name: tune(llama(0), start, 2e-4, 20 + k) for k, name in enumerate(("near_one", "near_two"))}
    for name, model in made.items():
        model.save_pretrained(place / name)
        write_tokenizer(place / name, 24)
    for name in ("base", "one", "two"):
        model = transformers.LlamaForCausalLM.from_pretrained(place / name, dtype=torch.bfloat16)
        model.save_pretrained(place / f"narrow_{name}")
        write_tokenizer(place / f"narrow_{name}", 24)
    for k, name in enumerate(("tied_one", "tied_two")):
        llama(30 + k, tie_word_embeddings=True).save_pretrained(place / name)
    llama(40, vocab_size=26).save_pretrained(place / "more")
    write_tokenizer(place / "more", 24, "<|im_start|>", "<|im_end|>")
    for k, name in enumerate(("gpt_one", "gpt_two")):
        torch.manual_seed(50 + k)
        config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=32, vocab_size=24)
        transformers.GPT2LMHeadModel(config).save_pretrained(place / name)
    for k, name in enumerate(("deep_one", "deep_two", "deep_three", "deep_base")):
        llama(60 + k, num_hidden_layers=40, hidden_size=8, intermediate_size=12).save_pretrained(place / name)
    _write_adapter(place / "adapter", sizes["hidden_size"])


def write_tokenizer(folder: Path, size: int, *added: str) -> None:
    """Write a tokenizer of so many tokens, and of the added ones."""
    vocabulary = {name: k for k, name in enumerate(["<unk>", "<s>", "</s>", *(f"t{k}" for k in range(3, size))])}
    model = {"type": "BPE", "vocab": vocabulary, "merges": []}
    fast = tokenizers.Tokenizer.from_str(json.dumps({"version": "1.0", "model": model, "added_tokens": []}))
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=fast, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    made.add_tokens(list(added))
    made.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    made.save_pretrained(folder)


def _write_adapter(folder: Path, width: int) -> None:
    folder.mkdir()
    generator = torch.Generator().manual_seed(70)
    factors = {}
    for layer in range(3):
        for name in ("q_proj", "v_proj"):
            module = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            factors[f"{module}.lora_A.weight"] = 0.1 * torch.randn(2, width, generator=generator)
            factors[f"{module}.lora_B.weight"] = 0.1 * torch.randn(width, 2, generator=generator)
    save_file(factors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"],
        "base_model_name_or_path": "base", "bias": "none",
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))

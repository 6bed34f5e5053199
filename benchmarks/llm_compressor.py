"""Scales of llm-compressor next to the scales of regauge, for the same trained Llama, text and rounding, as a Markdown
table.

    PYTHONPATH=FOLDER REGAUGE_DATA=... .venv/bin/python benchmarks/llm_compressor.py

FOLDER contains llmcompressor 0.14, compressed-tensors 0.19 and their dependencies, which are not dependencies of
regauge. The SmoothQuant and AWQ modifiers of llm-compressor, with their own table for Llama, change the weights of the
Llama of `benchmarks/quantization.py`, which is converted to a Llama of transformers. Afterwards, the weights of all
methods are rounded to nearest in the same way.
"""

import sys
import tempfile
import warnings
from unittest import mock

import torch
import transformers
from quantization import BATCH, BATCHES, CONTEXT, WIDTH, choose, fit, rounded_loss, show, spread
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor, nn
from torch.utils.data import DataLoader

import regauge as rg
from regauge.core.params import Params
from regauge.data.packaged import help_topics, windows
from regauge.gauging import GaugeMethod, RoundToNearest
from regauge.nets.transformer import Llama

SEEDS = 2
SCHEMES = {str(scheme): scheme for scheme in (RoundToNearest(4), RoundToNearest(3))}
NAMES = {
    "embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head", "attention_norm": "input_layernorm",
    "feed_forward_norm": "post_attention_layernorm", "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj", "attention.value": "self_attn.v_proj", "attention.out": "self_attn.o_proj",
    "feed_forward.gate": "mlp.gate_proj", "feed_forward.up": "mlp.up_proj", "feed_forward.down": "mlp.down_proj",
}  # fmt: skip
"""Names of modules in `regauge.nets.transformer.Llama`, with their names in transformers."""


def main() -> None:
    warnings.simplefilter("ignore")
    text = help_topics()
    train, validation = windows(text.train, CONTEXT), windows(text.validation, CONTEXT)

    def make() -> nn.Module:
        return Llama(len(text.symbols), width=WIDTH, layers=2, heads=4)

    rows: dict[str, dict[str, list[float]]] = {}
    losses = []
    for seed in range(SEEDS):
        module = fit(make, train, seed, lr=3e-3)
        params = {name: tensor.detach() for name, tensor in module.state_dict().items()}
        task = rg.Task(module, [(validation[0][:256], validation[1][:256])])
        symmetry = rg.discover(module, (train[0][:2],))
        chosen = torch.randperm(len(train[0]), generator=torch.Generator().manual_seed(seed))[: BATCH * BATCHES]
        calibration = rg.Task(module, [(train[0][some], train[1][some]) for some in chosen.split(BATCH)])
        losses.append(task.evaluate(params)["loss"])
        for label, scheme in SCHEMES.items():
            methods: dict[str, GaugeMethod | None] = {
                "as trained": None,
                "Smooth, as SmoothQuant": rg.gauging.Smooth(
                    scheme, alpha=0.5, statistic="max", is_against_weights=True
                ),
                "Smooth, as AWQ": rg.gauging.Smooth(scheme),
            }
            networks = {name: choose(params, symmetry, method, calibration, seed) for name, method in methods.items()}
            for name in ("SmoothQuant", "AWQ"):
                networks[f"{name} of llm-compressor"] = moved(name, params, len(text.symbols), train[0][chosen], scheme)
            for name, network in networks.items():
                change = abs(task.evaluate(network)["loss"] - losses[-1])
                found = rounded_loss(network, symmetry, scheme, None, task)["loss"] - losses[-1]
                rows.setdefault(name, {}).setdefault(label, []).append(found)
                print(f"{seed} {label} {name}: {found:.5f}, not rounded {change:.1e}", file=sys.stderr, flush=True)
    show(f"Llama; loss {spread(losses, 3)} nats, rises by", rows, list(SCHEMES), 4)


def moved(name: str, params: Params, symbols: int, tokens: Tensor, scheme: RoundToNearest) -> Params:
    """Return the network as llm-compressor scales it, not rounded."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier
    from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier

    model = as_transformers(params, symbols)
    if name == "SmoothQuant":
        recipe: list[object] = [SmoothQuantModifier(smoothing_strength=0.5)]
    else:
        weights = QuantizationArgs(num_bits=scheme.bits, symmetric=True, strategy="channel")
        one = QuantizationScheme(targets=["Linear"], weights=weights)
        recipe = [AWQModifier(), QuantizationModifier(config_groups={"group_0": one}, ignore=["lm_head"])]
    examples = [{"input_ids": one, "attention_mask": torch.ones_like(one)} for one in tokens]
    data = DataLoader(examples, batch_size=BATCH)  # type: ignore[arg-type]
    unused = transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"": 0}, unk_token="")))
    # It looks for the configuration in the model's folder, and pins memory, which needs an accelerator.
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(Tensor, "pin_memory", lambda tensor: tensor):
        model.save_pretrained(folder)
        model = transformers.LlamaForCausalLM.from_pretrained(folder)
        oneshot(
            model=model, processor=unused, dataset=data, recipe=recipe, max_seq_length=CONTEXT,
            num_calibration_samples=len(tokens), shuffle_calibration_samples=False, tie_word_embeddings=False,
        )  # fmt: skip
    state = model.state_dict()
    return {one: state[there(one)].detach().float().clone() for one in params}


def as_transformers(params: Params, symbols: int) -> transformers.LlamaForCausalLM:
    """Convert a `regauge.nets.transformer.Llama` to a model of transformers that computes the same function."""
    config = transformers.LlamaConfig(
        vocab_size=symbols, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=8 * WIDTH // 3, rms_norm_eps=1e-5, tie_word_embeddings=False, rope_theta=10_000.0,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    model.load_state_dict({there(name): tensor for name, tensor in params.items()})
    return model.float().eval()


def there(name: str) -> str:
    """Return the name of a parameter in transformers."""
    module, _, last = name.rpartition(".")
    if not module.startswith("blocks."):
        return f"{NAMES[module]}.{last}"
    _, number, inner = module.split(".", 2)
    return f"model.layers.{number}.{NAMES[inner]}.{last}"


if __name__ == "__main__":
    main()

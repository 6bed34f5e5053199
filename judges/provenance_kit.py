"""The benchmark of Cisco's model provenance kit, rebuilt in small, on regauge.

    PEERS=FOLDER .venv/bin/python judges/provenance_kit.py [PIECE-OF-A-NAME ...]

Its benchmark lists 111 pairs of published models, which cannot be had here. Each pair is rebuilt from tiny models of
the same classes of transformers with random values, the second by what the list says of its provenance: a copy, a
fine-tune (a change of 2% of the norm), quantization to 4 bits, further training (10%), with other or more rows of
embeddings; models without relation have other seeds. A case passes if `regauge compare` of the two
folders says what the list says: a relation, or none.

Students of distillation and models with fewer layers are not rebuilt. Such a case does not pass.
"""

import contextlib
import io
import json
import tempfile
from collections.abc import Iterable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from judge import Case, Failed, Peer, judge
from scale_tables import make_tiny
from torch import Tensor

from regauge.cli.main import main

PEER = Peer(
    "model-provenance-kit",
    "https://github.com/cisco-ai-defense/model-provenance-kit",
    "9991417767c0bb42d7e0ca376dc9a8843c5569b9",
    (),
    ("transformers",),
)
CLASSES = {
    "Llama-2": "Llama", "Llama-3": "Llama", "CodeLlama": "Llama", "Yi-": "Llama", "deepseek-coder": "Llama",
    "open_llama": "Llama", "bloom": "Bloom", "Mistral": "Mistral", "mistral": "Mistral", "zephyr": "Mistral",
    "mbart": "MBartForConditionalGeneration", "bart": "BartForConditionalGeneration", "zembed": "Qwen3",
    "Qwen3-Coder-30B": "Qwen3Moe", "Qwen2.5-VL": "Qwen2_5_VLForConditionalGeneration",
    "DeepEyes": "Qwen2_5_VLForConditionalGeneration",
    "Qwen3": "Qwen3", "T-pro": "Qwen3", "chuck": "Qwen3", "WeDLM-8B": "Qwen3", "WeDLM-7B": "Qwen2",
    "NextCoder": "Qwen2",
    "longvideo": "Qwen2", "qwen2": "Qwen2", "Qwen2": "Qwen2", "falcon-mamba": "FalconMamba", "falcon": "Falcon",
    "gemma-3-12b": "Gemma3", "gemma-3": "Gemma3", "Gemma-3": "Gemma3", "gemma-2-": "Gemma2", "Pawa": "Gemma2",
    "gemma": "Gemma", "opt": "OPT", "Prompt-Guard": "DebertaV2ForMaskedLM", "Arch-Guard": "DebertaV2ForMaskedLM",
    "deberta": "DebertaV2ForMaskedLM", "mt5": "MT5ForConditionalGeneration", "t5": "T5ForConditionalGeneration",
    "distilbert": "DistilBertForMaskedLM", "scibert": "BertForMaskedLM", "TinyBERT": "BertForMaskedLM",
    "SecureBERT": "RobertaForMaskedLM", "xlm-roberta": "XLMRobertaForMaskedLM", "roberta": "RobertaForMaskedLM",
    "albert": "AlbertForMaskedLM", "MiniLM": "BertForMaskedLM", "bert": "BertForMaskedLM", "HY-MT": "HunYuanDenseV1",
    "agi-ds": "DeepseekV2", "DeepSeek-Coder-V2": "DeepseekV2", "DeepSeek-V2": "DeepseekV2", "gpt2": "GPT2LMHeadModel",
    "Phi-3": "Phi3", "MediPhi": "Phi3", "phi-4": "Phi3", "Phi-4": "Phi3", "Phi-1": "Phi", "phi-": "Phi",
    "GLM-4.5": "Glm4Moe", "GLM-Z1": "Glm4", "stablelm-2": "StableLm", "stablelm-base": "GPTNeoX", "pythia": "GPTNeoX",
    "RedPajama": "GPTNeoX", "nllb": "M2M100ForConditionalGeneration", "marian": "MarianMTModel",
    "opus": "MarianMTModel", "gpt-j": "GPTJ", "gpt-neo": "GPTNeo", "codegen": "CodeGen", "starcoder": "GPTBigCode",
}  # fmt: skip
"""Classes of transformers by parts of names of published models, the first that fits."""
NOT_THERE = ("chatglm", "HY-MT")
"""Parts of names of models whose code lies with their weights, or of which no tiny configuration can be built."""
EXPLAINED: dict[str, str] = {}
"""Sentences for cases that do not pass."""
SHARES = {"fine": 0.02, "continued": 0.1, "scaled": 0.1, "distillation": 0.1, "layer": 0.1}
"""Norms of changes relative to that of each tensor, by the first word of a provenance."""


def cases(checkout: Path) -> Iterable[Case]:
    """Every case, in the order of the record."""
    table = json.loads((checkout / "benchmarks" / "Benchmark_All.json").read_text())
    for label, rows in table.items():
        for row in rows:
            first, second = (one.partition("/")[2] for one in row["pair"])
            if not any(piece in name for piece in NOT_THERE for name in (first, second)):
                name = f"{label}: {first} and {second}, {row['provenance']}"
                yield Case(name, partial(try_pair, label, first, second, row["provenance"]))


def try_pair(label: str, first: str, second: str, provenance: str) -> str | None:
    """Rebuild a pair, and compare the verdict of regauge with what the list says."""
    word = provenance.partition(" ")[0].partition("-")[0]
    with tempfile.TemporaryDirectory() as folder:
        a, b = Path(folder) / "a", Path(folder) / "b"
        base = network(class_of(first))
        if label == "similar" and provenance != "none":
            derived(base, word, provenance, class_of(second), seed=1).save_pretrained(b)
            base.save_pretrained(a)
        elif label == "similar":
            # Two models of one list entry without a direct descent: both descend from a third.
            for seed, where in ((1, a), (2, b)):
                derived(base, "fine", provenance, class_of(first), seed=seed).save_pretrained(where)
        else:
            base.save_pretrained(a)
            network(class_of(second), 1).save_pretrained(b)
        verdict, reason = compare(a, b)
    is_related = verdict in ("identical", "same network in another gauge", "descended")
    if is_related != (label == "similar"):
        raise Failed(f"regauge says '{verdict}': {reason}")
    return None


def compare(a: Path, b: Path) -> tuple[str, str]:
    """The verdict of the command, and its reason; its refusal where nothing in the two can be compared."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            main(["compare", str(a), str(b), "--json"])
        except SystemExit:
            return "refused", out.getvalue().strip()[-300:]
    found = json.loads(out.getvalue()[out.getvalue().index("{") :])
    return found["verdict"], found["reason"]


def class_of(name: str) -> str:
    """The class of transformers of a published model."""
    found = next(value for key, value in CLASSES.items() if key in name)
    return found if "For" in found or "Model" in found else f"{found}ForCausalLM"


@cache
def network(name: str, seed: int = 0) -> Any:
    """A tiny network of a class; those of other seeds share nothing but the architecture."""
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny(name, folder).model.module
    generator = torch.Generator().manual_seed(1000 + seed)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * drawn if parameter.ndim == 1 else 0.1 * drawn)
    return model


def derived(base: Any, word: str, provenance: str, name: str, *, seed: int) -> Any:
    """A network made of another one, of the class of the second model of a pair."""
    generator = torch.Generator().manual_seed(seed)
    start = {key: tensor.clone() for key, tensor in base.state_dict().items()}
    if word == "distillation" or word == "layer":
        raise Failed("students of distillation, and models with fewer layers, are not rebuilt here")
    model = type(base)(base.config)
    model.load_state_dict(start)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.copy_(_changed(start[key], word, generator))
            if "vocabulary rebuild" in provenance and "embed" in key and parameter.ndim == 2:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    if "vocabulary extension" in provenance:
        model.resize_token_embeddings(model.config.vocab_size + 4)
    return model


def _changed(tensor: Tensor, word: str, generator: torch.Generator) -> Tensor:
    if word == "quantization" and tensor.ndim == 2:
        step = tensor.abs().amax(1, keepdim=True) / 7
        return (tensor / step).round() * step
    noise = torch.randn(tensor.shape, generator=generator)
    return tensor + SHARES.get(word, 0.0) * noise * tensor.norm() / noise.norm().clamp(min=1e-30)


if __name__ == "__main__":
    judge(PEER, cases, EXPLAINED)

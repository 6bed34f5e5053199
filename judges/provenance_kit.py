"""The benchmark of Cisco's model provenance kit, rebuilt in small, on regauge.

    PEERS=FOLDER .venv/bin/python judges/provenance_kit.py [PIECE-OF-A-NAME ...]

Its benchmark lists 111 pairs of published models, which cannot be had here. Each pair is rebuilt from tiny models of
the same classes of transformers with random values, the second by what the list says of its provenance: a copy, a
fine-tune (a change of 2% of the norm), quantization to 4 bits, further training (10%), with other or more rows of
embeddings; models without relation have other seeds. Students of distillation and models with fewer layers get every
other layer of their teacher, as DistilBERT and DistilGPT2 did, and are trained further (10%). A student of another
width (TinyBERT) starts from random values. A case passes if `regauge compare` of the two folders says what the list
says: a relation, or none.
"""

import contextlib
import copy
import io
import json
import re
import tempfile
from collections.abc import Iterable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from judge import Case, Failed, NotRun, Peer, judge
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
NOT_THERE = ("chatglm",)
"""Parts of names of models whose code is published with their weights."""
SIZES = {"HunYuanDenseV1ForCausalLM": {"head_dim": 8}}
"""Settings without which a model cannot be built."""
EXPLAINED = {
    "similar: bert-base-uncased and distilbert-base-uncased, distillation": (
        "DistilBERT names its tensors unlike BERT and has fewer of them, and training has changed all: regauge finds a "
        "descendant by the names of tensors, and renamed tensors by equal values"
    ),
    "similar: bert-base-uncased and TinyBERT_General_4L_312D, distillation": (
        "TinyBERT starts from random values at another width and learns from the outputs of BERT: regauge compares "
        "weights, and no weight of one comes from the other"
    ),
}
"""Sentences for cases that do not pass."""
SHARES = {"fine": 0.02, "continued": 0.1, "scaled": 0.1, "distillation": 0.1, "layer": 0.1}
"""Norms of changes relative to that of each tensor, by the first word of a provenance."""
STUDENTS = ("distillation", "layer")
"""First words of provenances of networks with fewer layers than the one that they are made of."""
DISTILBERT = (
    ("^distilbert.transformer", "bert.encoder"), ("^distilbert", "bert"), ("attention.q_lin", "attention.self.query"),
    ("attention.k_lin", "attention.self.key"), ("attention.v_lin", "attention.self.value"),
    ("attention.out_lin", "attention.output.dense"), ("sa_layer_norm", "attention.output.LayerNorm"),
    ("ffn.lin1", "intermediate.dense"), ("ffn.lin2", "output.dense"), ("output_layer_norm", "output.LayerNorm"),
    ("^vocab_transform", "cls.predictions.transform.dense"),
    ("^vocab_layer_norm", "cls.predictions.transform.LayerNorm"), ("^vocab_projector", "cls.predictions.decoder"),
)  # fmt: skip
"""Parts of names of tensors of DistilBERT, with the names of the same tensors of BERT."""


def cases(checkout: Path) -> Iterable[Case]:
    """Every case, in the order of the record."""
    table = json.loads((checkout / "benchmarks" / "Benchmark_All.json").read_text())
    for label, rows in table.items():
        for row in rows:
            first, second = (one.partition("/")[2] for one in row["pair"])
            name = f"{label}: {first} and {second}, {row['provenance']}"
            yield Case(name, partial(try_pair, label, first, second, row["provenance"]))


def try_pair(label: str, first: str, second: str, provenance: str) -> str | None:
    """Rebuild a pair, and compare the verdict of regauge with what the list says."""
    if any(piece in name for piece in NOT_THERE for name in (first, second)):
        raise NotRun("transformers has no class for one of the two: its code is published with its weights")
    word = provenance.partition(" ")[0].partition("-")[0]
    with tempfile.TemporaryDirectory() as folder:
        a, b = Path(folder) / "a", Path(folder) / "b"
        base = network(class_of(first), layers=4 if word in STUDENTS else None)
        if label == "similar" and provenance != "none":
            start = student(base, second) if word in STUDENTS else base
            derived(start, word, provenance, seed=1).save_pretrained(b)
            base.save_pretrained(a)
        elif label == "similar":
            # Two models of one list entry without a direct descent: both descend from a third.
            for seed, where in ((1, a), (2, b)):
                derived(base, "fine", provenance, seed=seed).save_pretrained(where)
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
    out, said = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(said):
        try:
            main(["compare", str(a), str(b), "--json"])
        except SystemExit:
            return "refused", said.getvalue().strip().splitlines()[-1][-300:]
    found = json.loads(out.getvalue()[out.getvalue().index("{") :])
    return found["verdict"], found["reason"]


def class_of(name: str) -> str:
    """The class of transformers of a published model."""
    found = next(value for key, value in CLASSES.items() if key in name)
    return found if "For" in found or "Model" in found else f"{found}ForCausalLM"


@cache
def network(name: str, seed: int = 0, layers: int | None = None) -> Any:
    """A tiny network of a class; those of other seeds share nothing but the architecture."""
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny(
            name, folder, SIZES.get(name, {}) if layers is None else {"num_hidden_layers": layers}
        ).model.module
    generator = torch.Generator().manual_seed(1000 + seed)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * drawn if parameter.ndim == 1 else 0.1 * drawn)
    return model


def student(teacher: Any, name: str) -> Any:
    """A network with every other layer of its teacher, under the names of its own class."""
    if "TinyBERT" in name:
        return network(class_of(name), 1)
    config = teacher.config
    half = config.num_hidden_layers // 2
    if "distilbert" in name:
        from transformers import DistilBertConfig, DistilBertForMaskedLM

        config = DistilBertConfig(
            vocab_size=config.vocab_size, max_position_embeddings=config.max_position_embeddings, n_layers=half,
            n_heads=config.num_attention_heads, dim=config.hidden_size, hidden_dim=config.intermediate_size,
        )  # fmt: skip
        model = DistilBertForMaskedLM(config).eval()
    else:
        model = type(teacher)(type(config)(**config.to_dict() | {"num_hidden_layers": half})).eval()
    known = teacher.state_dict()
    model.load_state_dict({own: known[_in_teacher(own)].clone() for own in model.state_dict()})
    return model


def _in_teacher(name: str) -> str:
    """The name of a student's tensor in its teacher."""
    for own, other in DISTILBERT:
        name = re.sub(own, other, name)
    return re.sub(r"(?<=\.)(h|layer)\.(\d+)\.", lambda found: f"{found[1]}.{2 * int(found[2])}.", name)


def derived(base: Any, word: str, provenance: str, *, seed: int) -> Any:
    """A network made of another one."""
    generator = torch.Generator().manual_seed(seed)
    start = {key: tensor.clone() for key, tensor in base.state_dict().items()}
    model = type(base)(copy.deepcopy(base.config))  # A longer vocabulary is noted in it.
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

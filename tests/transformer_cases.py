"""Transformers with the inputs on which they are traced, and the kind of their streams."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import regauge as rg
from regauge.core.params import Params
from regauge.core.probe import Probe, perturb, relative_change
from regauge.nets.transformer import GPT, Llama, ViT


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@dataclass(frozen=True)
class Case:
    """A model, its inputs, and the kind of its stream after gains are folded."""

    make: Callable[[], nn.Module]
    inputs: tuple[Tensor, ...]
    stream: str
    kwargs: tuple[tuple[str, Any], ...] = ()
    outputs: Any = None
    tolerance: float = 1e-9


TOKENS = torch.randint(0, 17, (2, 6), generator=generator(0))


IMAGES = torch.randn(2, 1, 8, 8, generator=generator(1))


def hf_gpt2(*, is_tied: bool = True) -> nn.Module:
    config = GPT2Config(
        vocab_size=17,
        n_positions=8,
        n_embd=12,
        n_layer=1,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=is_tied,
    )
    return GPT2LMHeadModel(config)


def hf_llama() -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=17,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=8,
            tie_word_embeddings=False,
        )
    )


HF: Any = {"kwargs": (("use_cache", False),), "outputs": "logits"}


CASES = {
    "GPT": Case(lambda: GPT(17, 6, width=12, layers=1, heads=2), (TOKENS,), "centered"),
    "Llama": Case(lambda: Llama(17, width=16, layers=1, heads=4), (TOKENS,), "orthogonal"),
    "ViT": Case(lambda: ViT(8, 4, width=12, layers=1, heads=2), (IMAGES,), "centered"),
    "transformers GPT-2": Case(lambda: hf_gpt2(is_tied=False), (TOKENS,), "centered", **HF),
    "transformers Llama": Case(hf_llama, (TOKENS,), "orthogonal", tolerance=1e-5, **HF),
}


def network(case: Case, seed: int = 0) -> tuple[nn.Module, Params]:
    """Return a module and parameters far from initialization, in float64."""
    module = case.make().eval()
    params = {name: tensor.detach().double() for name, tensor in module.state_dict().items()}
    return module, perturb(params, {key for key, _ in module.named_buffers()}, generator(seed))


def folded(case: Case, module: nn.Module, params: Params) -> rg.discovery.Folded:
    return rg.discovery.fold(params, module, case.inputs, dict(case.kwargs), outputs=case.outputs)


def discovered(case: Case, module: nn.Module, ones: tuple[str, ...]) -> rg.Symmetry:
    return rg.discover(module, case.inputs, dict(case.kwargs), outputs=case.outputs, ones=ones)


def change(case: Case, module: nn.Module, params: Params, moved: Params) -> float:
    probe = Probe(module, case.inputs, dict(case.kwargs), case.outputs)
    return relative_change(probe(params), probe(moved))

"""Decoders are traced without their caches of keys and values, and are not changed."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import LLAMA, TEXT, hugging
from torch import Tensor, nn
from torch.export import ExportedProgram

import regauge as rg

CACHED = LLAMA | {"use_cache": True}
DECODERS = {
    "llama": hugging("LlamaForCausalLM", **CACHED),
    "gpt2": hugging("GPT2LMHeadModel", "GPT2Config", n_embd=24, n_layer=2, n_head=4, **TEXT),
    "t5": hugging("T5ForConditionalGeneration", d_model=16, d_kv=4, d_ff=24, num_layers=1, num_heads=4, **TEXT),
}


def inputs_of(name: str) -> dict[str, Any]:
    ids = torch.arange(3, 15).reshape(2, 6)
    return {"input_ids": ids, **({"decoder_input_ids": ids} if name == "t5" else {})}


@pytest.mark.parametrize("name", DECODERS)
def test_the_groups_are_those_of_the_model_without_cache(name: str) -> None:
    module, inputs = DECODERS[name](), inputs_of(name)
    assert module.config.use_cache is True
    plain = rg.discover(module, (), inputs, outputs="logits", verify=False)
    for use_cache in (False, True):
        told = rg.discover(module, (), {**inputs, "use_cache": use_cache}, outputs="logits", verify=False)
        assert told == plain
    assert module.config.use_cache is True


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_decoders_are_exported_once(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("exported a second time")

    with torch.device(device):
        module = DECODERS[name]()
        inputs = inputs_of(name)
    monkeypatch.setattr(ExportedProgram, "run_decompositions", refuse)
    assert rg.discover(module, (), inputs, outputs="logits", verify=False).groups


class Cached(nn.Module):
    """A decoder that returns its hidden units as a cache, if it has one."""

    def __init__(self, *, is_fragile: bool = False) -> None:
        super().__init__()
        self.config = SimpleNamespace(use_cache=True)
        self.first, self.second = nn.Linear(3, 5), nn.Linear(5, 2)
        self.is_fragile = is_fragile

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.first(x).relu()
        result = {"y": self.second(hidden)}
        if self.config.use_cache:
            result["cache"] = hidden
        elif self.is_fragile:
            raise KeyError("cache")
        return result


@pytest.mark.parametrize("is_fragile", [False, True])
def test_caches_that_are_outputs_stay(is_fragile: bool) -> None:
    module, x = Cached(is_fragile=is_fragile), torch.randn(4, 3)
    assert rg.discover(module, (x,)).groups == ()
    assert rg.discover(module, (x,), outputs="cache").groups == ()
    assert [group.size for group in rg.discover(module, (x,), outputs="y").groups] == [5]
    assert module.config.use_cache is True


def test_a_module_that_fails_keeps_its_configuration() -> None:
    module = Cached()
    with pytest.raises(ValueError, match="fails on the example inputs"):
        rg.discover(module, (torch.randn(4, 7),))
    assert module.config.use_cache is True

"""CPU time and memory of discovery on large models whose parameters are on the meta device.

Each model runs in a separate process. `python benchmarks/discovery.py` prints a Markdown table. `python
benchmarks/discovery.py --only NAME` measures one model in this process. With `--base FOLDER`, a checkout of an earlier
commit, each model is also measured with the earlier sources, and the table contains the ratio.

One model has values, so discovery verifies its result, and `Symmetry.verify` follows.

The measured time is the time of `rg.discover`, including tracing and solving. The time excludes the imports of torch
and of the model's library, but includes the imports of `torch.export` at its first call. Targets apply to CPU seconds
of the process (one thread). Wall-clock seconds are also reported, and agree with CPU seconds on an idle machine. Memory
is the largest resident set of the process.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

import regauge as rg


@dataclass(frozen=True)
class Task:
    """A model on the meta device, with its inputs.

    Attributes:
        make: A function that returns the module, its positional inputs and its keyword inputs, all on the meta device.
        seconds: The target in seconds for tracing and solving together.
        outputs: The outputs that the symmetry must preserve.
        has_values: Whether the model has values, so that the symmetry is verified.
    """

    make: Callable[[], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]
    seconds: float
    outputs: str | None = None
    has_values: bool = False


def resnet50() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    from resnet50 import resnet50

    return resnet50(), (torch.randn(2, 3, 224, 224),), {}


def gpt2_xl() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=1600, n_layer=48, n_head=25)
    return GPT2LMHeadModel(config), (torch.zeros(2, 64, dtype=torch.long),), {"use_cache": False}


def llama_7b() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig()), (torch.zeros(2, 64, dtype=torch.long),), {"use_cache": False}


def vit_large() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
    return ViTModel(config, add_pooling_layer=False), (torch.randn(2, 3, 224, 224),), {}


def swin_base() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    from transformers import SwinConfig, SwinModel

    config = SwinConfig(embed_dim=128, depths=[2, 2, 18, 2], num_heads=[4, 8, 16, 32])
    return SwinModel(config), (torch.randn(2, 3, 224, 224),), {}


def t5_base() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(d_model=768, d_ff=3072, num_layers=12, num_heads=12)
    tokens = {"decoder_input_ids": torch.zeros(2, 48, dtype=torch.long), "use_cache": False}
    return T5ForConditionalGeneration(config), (torch.zeros(2, 64, dtype=torch.long),), tokens


class Crepe(nn.Module):
    """Six convolutions with batch normalization and max pooling, and a classifier, with random weights.

    References:
        Kim et al. (2018), CREPE: a convolutional representation for pitch estimation, section 2.1.
    """

    def __init__(self) -> None:
        super().__init__()
        widths = (1, 1024, 128, 128, 128, 256, 512)
        self.blocks = nn.Sequential()
        for k, (fan, width) in enumerate(pairwise(widths)):
            size, step, pads = (512, 4, (254, 254)) if k == 0 else (64, 1, (31, 32))
            layers = [nn.ConstantPad1d(pads, 0.0), nn.Conv1d(fan, width, size, step), nn.ReLU(), nn.BatchNorm1d(width)]
            self.blocks.extend([*layers, nn.MaxPool1d(2)])
        self.classifier = nn.Linear(4 * widths[-1], 360)

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.blocks(samples[:, None]).mT.flatten(1)).sigmoid()


def crepe_full() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    torch.manual_seed(0)
    return Crepe(), (torch.randn(2, 1024),), {}


def llama3_70b() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128_256,
        hidden_size=8192,
        intermediate_size=28_672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
    )
    return LlamaForCausalLM(config), (torch.zeros(2, 64, dtype=torch.long),), {"use_cache": False}


def sdxl_unet() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    from diffusers import UNet2DConditionModel

    unet = UNet2DConditionModel(
        sample_size=128,
        in_channels=4,
        out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        block_out_channels=(320, 640, 1280),
        layers_per_block=2,
        transformer_layers_per_block=(1, 2, 10),
        attention_head_dim=(5, 10, 20),
        cross_attention_dim=2048,
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=256,
        projection_class_embeddings_input_dim=2816,
    )
    more = {"text_embeds": torch.randn(2, 1280), "time_ids": torch.randn(2, 6)}
    inputs = (torch.randn(2, 4, 32, 32), torch.zeros(2), torch.randn(2, 77, 2048))
    return unet, inputs, {"added_cond_kwargs": more, "return_dict": False}


def plain_unet() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    from unet import UNet

    unet = UNet(4, channels=(320, 640, 1280), depths=(0, 2, 10), head_size=64, context=2048)
    return unet, (torch.randn(2, 4, 32, 32), torch.zeros(2), torch.randn(2, 77, 2048)), {}


TASKS: dict[str, Task] = {
    "ResNet50": Task(resnet50, 5),
    "ViT-L": Task(vit_large, 5),
    "Swin-B": Task(swin_base, 6),
    "T5 base": Task(t5_base, 5, "logits"),
    "GPT-2 XL": Task(gpt2_xl, 5, "logits"),
    "Llama 7B": Task(llama_7b, 7, "logits"),
    "SDXL UNet (diffusers)": Task(sdxl_unet, 15),
    "SDXL-sized UNet (regauge.nets)": Task(plain_unet, 15),
    "Llama-3-70B": Task(llama3_70b, 15, "logits"),
    "CREPE full, verified twice": Task(crepe_full, 6, has_values=True),
}
GIGABYTE = 1.0
"""The memory target in bytes, for models without values."""
SLOWER = {True: 1.3, False: 1.1}
"""The largest allowed ratio to the time of the base, for models with and without translations."""


def measure(name: str) -> dict[str, Any]:
    """Discover the symmetry of one model in this process."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    task = TASKS[name]
    with torch.device("cpu" if task.has_values else "meta"):
        module, inputs, kwargs = task.make()
    module.eval()
    start, start_cpu = time.perf_counter(), time.process_time()
    symmetry = rg.discover(module, inputs, kwargs, outputs=task.outputs)
    if task.has_values:
        assert symmetry.verify(module, inputs, kwargs, generator=torch.Generator().manual_seed(1)).ok
    seconds, cpu = time.perf_counter() - start, time.process_time() - start_cpu
    return {
        "name": name,
        "parameters": sum(p.numel() for p in module.parameters()),
        "seconds": seconds,
        "cpu": cpu,
        "gigabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
        "permuted": sum(group.is_permuted for group in symmetry.groups),
        "matrices": sum(group.matrix != "none" for group in symmetry.groups),
        "unknown": len(symmetry.unknown),
        "has_translations": bool(getattr(symmetry, "translations", ())),
    }


def measured(name: str, sources: Path | None = None) -> dict[str, Any] | str:
    """Discover one model in a separate process, optionally with other sources. Return the error if discovery fails."""
    env = os.environ | ({"PYTHONPATH": str(sources)} if sources is not None else {})
    run = subprocess.run([sys.executable, __file__, "--only", name], capture_output=True, text=True, env=env)
    row: dict[str, Any] = {} if run.returncode else json.loads(run.stdout.splitlines()[-1])
    return row or run.stderr.strip().splitlines()[-1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=list(TASKS), help="measure one model in this process and print JSON")
    parser.add_argument("--base", type=Path, help="a checkout of an earlier commit, to compare with")
    given = parser.parse_args()
    if given.only:
        print(json.dumps(measure(given.only)))
        return 0
    print("| model | parameters | permuted groups | matrix groups | CPU s | target | wall s | GB | times base |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    is_reached = True
    for name, task in TASKS.items():
        before = measured(name, given.base / "src") if given.base else None
        row = measured(name)
        if isinstance(row, str):
            print(f"| {name} | failed: {row} | | | | | | | |", flush=True)
            is_reached = False
            continue
        is_reached &= row["cpu"] < task.seconds and (task.has_values or row["gigabytes"] < GIGABYTE)
        ratio = "failed" if before else ""
        if isinstance(before, dict):
            is_reached &= row["cpu"] <= SLOWER[row["has_translations"]] * before["cpu"]
            ratio = f"{row['cpu'] / before['cpu']:.2f}"
        print(
            f"| {name} | {row['parameters'] / 1e9:.3g} B | {row['permuted']} | {row['matrices']} | {row['cpu']:.1f} "
            f"| < {task.seconds:g} | {row['seconds']:.1f} | {row['gigabytes']:.2f} | {ratio} |",
            flush=True,
        )
    return 0 if is_reached else 1


if __name__ == "__main__":
    sys.exit(main())

"""How long discovery takes on large models whose parameters live on the meta device, and in how much memory.

Each model runs in a process of its own. `python benchmarks/discovery.py` prints a Markdown table;
`python benchmarks/discovery.py --only NAME` measures one model in this process.

Time is that of `rg.discover`, tracing and solving together, after the imports of torch and of the model's library but
with what `torch.export` imports at its first call: CPU seconds of the process (one thread), which are judged, and
wall-clock seconds, which agree with them on an idle machine. Memory is the largest resident set of the process.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import regauge as rg


@dataclass(frozen=True)
class Task:
    """A model on the meta device and inputs for it.

    Attributes:
        make: Makes the module, its positional and its keyword inputs, all on the meta device.
        seconds: The target for tracing and solving together.
        outputs: Which outputs count.
    """

    make: Callable[[], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]
    seconds: float
    outputs: str | None = None


def resnet50() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    from resnet50 import resnet50

    return resnet50(), (torch.randn(2, 3, 224, 224),), {}


def gpt2_xl() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=1600, n_layer=48, n_head=25)
    return GPT2LMHeadModel(config), (torch.zeros(2, 64, dtype=torch.long),), {"use_cache": False}


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
    "GPT-2 XL": Task(gpt2_xl, 5, "logits"),
    "SDXL UNet (diffusers)": Task(sdxl_unet, 15),
    "SDXL-sized UNet (regauge.nets)": Task(plain_unet, 15),
    "Llama-3-70B": Task(llama3_70b, 15, "logits"),
}
GIGABYTE = 1.0
"""The target for memory."""


def measure(name: str) -> dict[str, Any]:
    """Discover one model in this process."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    task = TASKS[name]
    with torch.device("meta"):
        module, inputs, kwargs = task.make()
    module.eval()
    start, start_cpu = time.perf_counter(), time.process_time()
    symmetry = rg.discover(module, inputs, kwargs, outputs=task.outputs)
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
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=list(TASKS), help="measure one model in this process and print JSON")
    only = parser.parse_args().only
    if only:
        print(json.dumps(measure(only)))
        return 0
    print("| model | parameters | permuted groups | matrix groups | CPU s | target | wall s | GB |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    is_reached = True
    for name, task in TASKS.items():
        run = subprocess.run([sys.executable, __file__, "--only", name], capture_output=True, text=True)
        if run.returncode:
            print(f"| {name} | failed: {run.stderr.strip().splitlines()[-1]} | | | | | | |")
            is_reached = False
            continue
        row = json.loads(run.stdout.splitlines()[-1])
        is_reached &= row["cpu"] < task.seconds and row["gigabytes"] < GIGABYTE
        print(
            f"| {name} | {row['parameters'] / 1e9:.3g} B | {row['permuted']} | {row['matrices']} "
            f"| {row['cpu']:.1f} | < {task.seconds:g} | {row['seconds']:.1f} | {row['gigabytes']:.2f} |",
            flush=True,
        )
    return 0 if is_reached else 1


if __name__ == "__main__":
    sys.exit(main())

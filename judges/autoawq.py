"""AutoAWQ's tables of layers on regauge.

    PEERS=FOLDER .venv/bin/python judges/autoawq.py [PIECE-OF-A-NAME ...]

Cases are the entries of its map of model types. On a tiny model of each, its `get_layers_for_scaling` says for every
block which layers are scaled against which. A case passes if `rg.gauging.audit` says of each of these pairs what its
own functions for scaling (`scale_ln_fcs`, `scale_fc_fc`, `scale_fc_fcs`) do to the outputs by random factors in
float64: it holds (to 1e-9), changes them, or cannot be done; of a pair that changes them it says why.

Its code is taken function by function, since it no longer imports beside today's transformers. Mixtures are scaled
under the names of their files, which that code expects. Types whose classes are not in transformers (`NOT_THERE`) have
no model to be tried on, and are not run.
"""

import __future__

import ast
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from judge import Case, NotRun, Peer, judge
from scale_tables import Tiny, compare, make_tiny, plain
from torch import Tensor, nn

from regauge.gauging import ScalePair

PEER = Peer(
    "AutoAWQ",
    "https://github.com/casper-hansen/AutoAWQ",
    "88e4c76b20755db275574e6a03c83c84ba3bece5",
    (),
    ("transformers",),
)
CLASSES = {
    "mpt": "MptForCausalLM", "llama": "LlamaForCausalLM", "opt": "OPTForCausalLM", "RefinedWeb": "FalconForCausalLM",
    "RefinedWebModel": "FalconForCausalLM", "falcon": "FalconForCausalLM", "bloom": "BloomForCausalLM",
    "gptj": "GPTJForCausalLM", "gpt_bigcode": "GPTBigCodeForCausalLM", "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM", "gpt_neox": "GPTNeoXForCausalLM", "aquila": "LlamaForCausalLM",
    "llava": "LlavaForConditionalGeneration", "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM", "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM", "stablelm": "StableLmForCausalLM", "starcoder2": "Starcoder2ForCausalLM",
    "llava_next": "LlavaNextForConditionalGeneration", "phi3": "Phi3ForCausalLM", "cohere": "CohereForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM", "minicpm3": "MiniCPM3ForCausalLM",
    "qwen2_vl": "Qwen2VLForConditionalGeneration", "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen2_5_omni": "Qwen2_5OmniThinkerForConditionalGeneration",
}  # fmt: skip
"""Classes of transformers for its model types; that of Aquila has the names of Llama."""
NOT_THERE = ("Yi", "exaone", "qwen", "baichuan", "phi3_v", "minicpm", "internlm2")
"""Types whose code lies with their weights."""
FALCON_7B = {"num_attention_heads": 71, "hidden_size": 142, "new_decoder_architecture": False}
FALCON_40B = {"new_decoder_architecture": True, "num_kv_heads": 2}
SIZES = {"falcon": FALCON_7B, "RefinedWebModel": FALCON_7B, "RefinedWeb": FALCON_40B}
"""Settings on which the rows of a type depend."""
MIXTURES = ("mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3")
EXPLAINED: dict[str, str] = {}
"""Sentences for cases that do not pass."""


def cases(checkout: Path) -> Iterable[Case]:
    """Every case, in the order of the record."""
    models = checkout / "awq" / "models"
    tree = ast.parse((models / "auto.py").read_text())
    table = next(n.value for n in tree.body if isinstance(n, ast.Assign) and isinstance(n.value, ast.Dict))
    owners = {}
    for path in models.glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                owners[node.name] = path
    assert isinstance(table, ast.Dict)
    for key, value in zip(table.keys, table.values, strict=True):
        kind, owner = ast.literal_eval(key), value.id  # type: ignore[arg-type, attr-defined]
        yield Case(kind, partial(try_table, checkout, owners[owner], kind))


def try_table(checkout: Path, path: Path, kind: str) -> str | None:
    """Compare the verdicts on the table of a type with what the peer's scaling does."""
    if kind in NOT_THERE:
        raise NotRun("transformers has no class of this type: its code is published with its weights")
    with tempfile.TemporaryDirectory() as folder:
        tiny = make_tiny(CLASSES[kind], folder, SIZES.get(kind, {}))
        if kind in MIXTURES:
            tiny = ByFiles(tiny.model, folder)
        return compare(tiny, AutoAwq(checkout, path, tiny))


class AutoAwq:
    """The table of a type for a model, and the peer's scaling."""

    def __init__(self, checkout: Path, path: Path, tiny: Tiny) -> None:
        self.scaling = functions(
            checkout / "awq" / "quantize" / "scale.py", "scale_ln_fcs", "scale_fc_fc", "scale_fc_fcs"
        )
        own = functions(path, "get_model_layers", "get_layers_for_scaling")
        module = tiny.again()
        names = {one: name for name, one in module.named_modules()}
        files = {plain(name): name for name in tiny.files()}  # A table names layers as the files do.
        self.own: dict[str, str] = {}
        for one in names.values():
            self.own.setdefault(files.get(plain(f"{one}.weight"), f"{one}.weight").removesuffix(".weight"), one)
        known = {own: name for name, own in self.own.items()}
        self.table = []
        for block in _blocks(own["get_model_layers"], module):
            for row in own["get_layers_for_scaling"](block, defaultdict(lambda: None), {}):
                behind = tuple(f"re:^{known[names[one]]}$" for one in row["layers"])
                self.table.append(ScalePair(f"re:^{known[names[row['prev_op']]]}$", behind))

    def prepare(self, model: nn.Module) -> None:
        """Nothing is changed before."""

    def resolve(self, row: int, model: nn.Module) -> Iterable[ScalePair]:
        """The modules of a row, which it names."""
        pair = self.table[row]
        return [ScalePair(self.own[_name(pair.smooth)], tuple(self.own[_name(one)] for one in pair.balance))]

    def scale(self, pair: ScalePair, model: nn.Module, factors: Tensor) -> None:
        """Scale a pair as `apply_scale` chooses."""
        first, behind = model.get_submodule(pair.smooth), [model.get_submodule(one) for one in pair.balance]
        if not hasattr(first, "weight"):
            raise AttributeError("the activation would get a parameter")
        is_linear = isinstance(first, nn.Linear)
        self.scaling["scale_fc_fcs" if is_linear else "scale_ln_fcs"](first, behind, factors)


class ByFiles(Tiny):
    """A tiny mixture whose layers are scaled under the names that its files have, expert by expert."""

    def again(self) -> nn.Module:
        """Layers and norms under the names of the files."""
        from safetensors.torch import load_file

        root = nn.Module()
        for name, tensor in load_file(Path(self.folder) / "model.safetensors").items():
            *path, leaf = name.split(".")
            module = root
            for k, part in enumerate(path):
                if part not in module._modules:
                    is_leaf = k == len(path) - 1
                    is_list = not is_leaf and path[k + 1].isdigit()
                    module.add_module(part, _layer(tensor) if is_leaf else _Blocks() if is_list else nn.Module())
                module = module._modules[part]
            module.register_parameter(leaf, nn.Parameter(tensor.double(), requires_grad=False))
        return root

    def run(self, module: nn.Module) -> list[Tensor]:
        """Run the model that is loaded from these layers."""
        from safetensors.torch import save_file

        with tempfile.TemporaryDirectory() as folder:
            for path in Path(self.folder).glob("*.json"):
                (Path(folder) / path.name).write_bytes(path.read_bytes())
            save_file(
                {n: t.contiguous() for n, t in module.state_dict().items()},
                Path(folder) / "model.safetensors",
                {"format": "pt"},
            )
            return super().run(Tiny(self.model, folder).again())


class _Blocks(nn.Module):
    """Modules by number."""

    def __iter__(self) -> Any:
        return iter(self._modules.values())


class _RMSNorm(nn.Module):
    """A norm of the files."""


def _layer(tensor: Tensor) -> nn.Module:
    if tensor.ndim != 2:
        return _RMSNorm()
    made = nn.Linear(1, 1, bias=False)
    return made


def _blocks(find: Any, module: nn.Module) -> Iterable[nn.Module]:
    try:
        return list(find(module))
    except AttributeError:  # Models of images and text have their language model elsewhere today.
        return list(module.model.language_model.layers)


def _name(pattern: str) -> str:
    return pattern.removeprefix("re:^").removesuffix("$")


def functions(path: Path, *names: str) -> dict[str, Any]:
    """Functions of a file of the peer, of its first class or of itself, without what the file imports."""
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm

    space: dict[str, Any] = {"torch": torch, "nn": nn, "GemmaRMSNorm": GemmaRMSNorm, "Gemma2RMSNorm": Gemma2RMSNorm}
    nodes = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef) and n.name in names]
    flags = __future__.annotations.compiler_flag
    exec(compile(ast.Module([*nodes], []), str(path), "exec", flags=flags), space)
    return {name: space[name] for name in names}


if __name__ == "__main__":
    judge(PEER, cases, EXPLAINED)

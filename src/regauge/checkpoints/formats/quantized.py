"""Detection of quantized checkpoints, which are refused, by their configuration or by their additional tensors.

The tensors of a quantized checkpoint are integer codes, packed and scaled in specific formats. Transforming or
averaging integer codes would destroy the weights.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Never

import torch

PACKED = frozenset((torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32))
"""Integer dtypes in which codes are packed. int64 is not included, because it is used for indices."""
UNPACKED = frozenset((torch.float64, torch.float32, torch.float16, torch.bfloat16))
CONFIGURATIONS = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}
"""Files that some tools write next to the weights, and the quantization method of each tool."""


class Sign(NamedTuple):
    """A pattern of tensor names by which the format of a checkpoint with packed tensors is recognized."""

    pattern: str
    is_packed: bool
    method: str
    title: str


SIGNS = (
    Sign(r"\.quant_state\.bitsandbytes__\w+$", False, "bitsandbytes", "bitsandbytes with 4 bits"),
    Sign(r"\.(nested_)?(absmax|quant_map)$", False, "bitsandbytes", "bitsandbytes with 4 bits"),
    Sign(r"\.SCB$", False, "bitsandbytes", "bitsandbytes with 8 bits"),
    Sign(r"\.g_idx$", True, "gptq", "GPTQ"),
    Sign(r"\.(qweight|qzeros)$", True, "awq", "AWQ or GPTQ"),
    Sign(r"[._]weight_scale_inv$", False, "fp8", "FP8 with scales of blocks"),
    Sign(r"[._]weight_packed$", True, "compressed-tensors", "compressed-tensors"),
    Sign(r"_qdata$", True, "torchao", "torchao"),
    Sign(r"_blocks$", True, "mxfp4", "MXFP4"),
    Sign(r"\.W_q$", True, "hqq", "HQQ"),
    Sign(r"\._data$", True, "quanto", "quanto"),
    Sign(r"\.codes$", True, "aqlm", "AQLM"),
)
BESIDE = r"[._](\w*_?scales?(_inv|_\d)?|\w*_?zeros?(_points?)?|quant\w*|absmax|shape|offset)$"
"""Suffixes of the names of tensors that are needed to decode a packed tensor, such as scales and zero points."""
LOADED = {
    "bitsandbytes": "AutoModel.from_pretrained(FOLDER).dequantize()",
    "fp8": "AutoModel.from_pretrained(FOLDER, quantization_config=FineGrainedFP8Config(dequantize=True))",
    "mxfp4": "AutoModel.from_pretrained(FOLDER, quantization_config=Mxfp4Config(dequantize=True))",
    "compressed-tensors": "AutoModel.from_pretrained(FOLDER, quantization_config=CompressedTensorsConfig("
    "dequantize=True))",
    "gguf": "AutoModel.from_pretrained(FOLDER, gguf_file=FILE)",
}
"""Calls by which transformers loads the dequantized weights."""


def require_unquantized(label: str, file: Path, dtypes: Mapping[str, torch.dtype]) -> None:
    """Raise an error that names the format if a checkpoint is quantized.

    Args:
        label: The name of the checkpoint in the error.
        file: One file of the checkpoint. A configuration is searched for in the same folder.
        dtypes: The dtype of every tensor.

    Raises:
        ValueError: The checkpoint is quantized.
    """
    packed = [n for n, d in dtypes.items() if d in PACKED or (d.is_floating_point and d not in UNPACKED)]
    if not packed:
        return
    for sign in SIGNS:
        found = next((name for name in (packed if sign.is_packed else dtypes) if re.search(sign.pattern, name)), None)
        if found is not None:
            raise ValueError(refusal(label, f"{sign.title}: it holds {found!r}", sign.method))
    method = _configured(file.parent)
    for name in packed:
        beside = next((n for n in dtypes if n.startswith(name) and re.match(BESIDE, n[len(name) :])), None)
        if beside is not None or method is not None:
            more = "" if beside is None else f" and needs {beside!r}"
            raise ValueError(
                refusal(label, f"{method or 'codes with scales'}: {name!r} is {dtypes[name]}{more}", method)
            )


def refuse_gguf(file: Path, entry: str | None) -> Never:
    """Raise a ValueError, because GGUF files hold quantized codes."""
    raise ValueError(refusal(str(file), "a GGUF file", "gguf"))


def refusal(label: str, found: str, method: str | None) -> str:
    """Return an error sentence about a quantized checkpoint, with advice."""
    how = f"`{LOADED[method]}`" if method in LOADED else "the tool that quantized it, or use the original network"
    return (
        f"{label!r} is quantized ({found}), so its values can be neither transformed nor averaged; dequantize it first "
        f"with {how}, and save it in bfloat16"
    )


def _configured(folder: Path) -> str | None:
    """Return the quantization method that the configuration files of a folder name."""
    for name, method in CONFIGURATIONS.items():
        if (folder / name).is_file():
            return method
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    for part in [config, *config.values()] if isinstance(config, dict) else []:
        for key in ("quantization_config", "compression_config"):
            if isinstance(part, dict) and isinstance(part.get(key), dict):
                return str(part[key].get("quant_method") or "a method without a name")
    return None

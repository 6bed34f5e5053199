"""LoRA adapters in PEFT's format, extracted from the difference between a network and its base."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regauge.checkpoints.checkpoint import Checkpoint
from regauge.checkpoints.formats.adapters import PREFIX
from regauge.checkpoints.formats.headers import TensorSpec
from regauge.checkpoints.location import ADAPTER_CONFIG
from regauge.checkpoints.names.from_transformers import name_for
from regauge.checkpoints.output import Output
from regauge.checkpoints.outputs.provenance import Input, Provenance
from regauge.checkpoints.outputs.staging import Staging, require_new_folder
from regauge.checkpoints.writing import Shard, save_text
from regauge.core.arguments import check_arguments
from regauge.core.params import round_to
from regauge.core.progress import Progress, no_progress
from regauge.hub import open_model
from regauge.hub.build_model import name_model

WEIGHTS = "adapter_model.safetensors"
DUST = 1e-13
"""A share of a change's norm. Smaller singular values are rounding errors in float64."""
MATRICES = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d
"""Modules whose weights PEFT adapters change by low-rank factors."""


@dataclass(frozen=True)
class ModuleChange:
    """The low-rank change of one matrix.

    Attributes:
        name: The name of the module.
        rank: The rank of the factors.
        left: The share of the change's squared norm that the factors leave out.
    """

    name: str
    rank: int
    left: float


@dataclass(frozen=True)
class ExtractedAdapter:
    """An adapter that was extracted from the difference of two networks.

    Attributes:
        path: The folder of the adapter.
        modules: The matrices that the adapter changes by low-rank factors.
        whole: The tensors that the adapter stores in full: embeddings, norms and biases.
    """

    path: Path
    modules: tuple[ModuleChange, ...]
    whole: tuple[str, ...]

    @property
    def left(self) -> float:
        """Return the largest share, over all matrices, of a weight change that the adapter leaves out."""
        return max((one.left for one in self.modules), default=0.0)

    def __str__(self) -> str:
        ranks = sorted({one.rank for one in self.modules})
        span = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}" if ranks else "no rank"
        return (
            f"{len(self.modules)} matrices in {span}, which lose at most {self.left:.2%} of a change; "
            f"{len(self.whole)} whole tensors"
        )


@check_arguments
def extract_adapter(
    base: str | Path,
    tuned: str | Path,
    out: Output | str | Path,
    *,
    rank: int = 16,
    least: float = 0.0,
    model: str | None = None,
    progress: Progress = no_progress,
) -> ExtractedAdapter:
    """Extract an adapter from the difference of two networks, such that `BASE+ADAPTER` approximates the tuned network.

    The weight change of every linear layer and convolution is truncated to its largest singular values, which gives the
    closest matrix of the given rank. Other tensors that differ are stored in full, so only the truncation loses
    information. Both networks are read one tensor at a time. If the tuned network was not fine-tuned from the given
    base, or is in other coordinates, the difference has full rank. Align a network in other coordinates to the base
    first.

    Args:
        base: A folder, or a file with a `model`.
        tuned: A network that was fine-tuned from the base.
        out: The folder of the adapter.
        rank: The largest rank.
        least: A threshold. Singular values that do not exceed the threshold are also left out.
        model: The name of the model of both networks. Default: the model of the base's folder.
        progress: A function that shows the tensors as they are processed.

    Raises:
        FileExistsError: The output exists and may not be replaced.
        ValueError: The rank is not positive, the networks have different names or shapes, no tensor differs, or a
            tensor that differs is tied to another tensor.

    References:
        Eckart and Young (1936), The approximation of one matrix by another of lower rank; Hu et al. (2022), LoRA,
        section 4.1.
    """
    if rank < 1 or not least >= 0:
        raise ValueError(f"rank is {rank} and least {least}; a rank is positive, and a singular value is not negative")
    place, inputs = Output.of(out), (Input("base", str(base)), Input("tuned", str(tuned)))
    provenance = Provenance("rg.merging.extract_adapter", {"rank": rank, "least": least}, inputs)
    require_new_folder(place, "an adapter")
    opened = [Checkpoint.open(path) for path in (base, tuned)]
    named = model or name_model(opened[0])
    if named is None:
        raise ValueError(f"the model of {opened[0].label} is unknown: name it with `model=`")
    module = open_model(named, values="never").module
    first, second = (name_for(one, module) for one in opened)
    if first.stored.keys() != second.stored.keys():
        raise ValueError(
            f"{first.label} and {second.label} have different tensors; an adapter changes one architecture: give a "
            "network and its fine-tune"
        )
    kinds = dict(module.named_modules())
    tensors: dict[str, Tensor] = {}
    modules: list[ModuleChange] = []
    whole: list[str] = []
    turned: set[bool] = set()
    advance = progress("extracting", len(first.stored))
    for name in first.stored:
        change = _difference(first, second, name)
        advance(1)
        if change is None:
            continue
        owner, _, part = name.rpartition(".")
        is_turned = type(kinds.get(owner)).__name__ == "Conv1D"  # a layer of GPT-2, which stores W^T
        is_matrix = is_turned or isinstance(kinds.get(owner), MATRICES)
        if part == "weight" and is_matrix:
            turned.add(is_turned)
            down, up, left = cut_off((change.T if is_turned else change).flatten(1), rank, least)
            down = down if is_turned else down.reshape(len(down), *change.shape[1:])
            up = up.reshape(*up.shape, *[1] * (change.ndim - 2))
            kept = second.stored[name].dtype
            tensors[f"{PREFIX}{owner}.lora_A.weight"] = round_to(down, kept, name)
            tensors[f"{PREFIX}{owner}.lora_B.weight"] = round_to(up, kept, name)
            modules.append(ModuleChange(owner, len(down), left))
        else:
            _require_free(name, module)
            whole.append(name)
            is_inside = part == "bias" and is_matrix  # PEFT wraps the layer with its bias
            tensors[f"{PREFIX}{owner}.base_layer.bias" if is_inside else f"{PREFIX}{name}"] = second.read(name)
    if not tensors:
        raise ValueError(
            f"{first.label} and {second.label} are equal; there is nothing to extract: give a network and its fine-tune"
        )
    config = _configuration(base, modules, whole, kinds, is_turned=turned == {True})
    write_adapter(place, tensors, config, provenance, progress)
    return ExtractedAdapter(place.path, tuple(modules), tuple(whole))


def write_adapter(
    place: Output,
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    provenance: Provenance,
    progress: Progress = no_progress,
) -> None:
    """Write the folder of an adapter atomically: either the whole folder or nothing."""
    nbytes = sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
    settings: Any = {"resume": place.resume, "overwrite": place.overwrite, "nbytes": nbytes}
    with Staging(place.path, None, provenance=place.provenance or provenance, **settings) as staging:
        publish_adapter(staging, tensors, config, progress)


def publish_adapter(
    staging: Staging, tensors: Mapping[str, Tensor], config: Mapping[str, Any], progress: Progress = no_progress
) -> None:
    """Write the tensors and the configuration of an adapter to a staged output, and move it to its final path."""
    shard = Shard(WEIGHTS, tuple(TensorSpec(n, tuple(t.shape), t.dtype) for n, t in tensors.items()), {"format": "pt"})
    staging.write([shard], lambda name: iter([tensors[name].detach()]), progress)
    save_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", staging.content / ADAPTER_CONFIG)
    staging.publish([shard])


def _difference(base: Checkpoint, tuned: Checkpoint, name: str) -> Tensor | None:
    """Return the difference of a tensor between both networks, in float64; None if it is zero."""
    if base.stored[name].shape != tuned.stored[name].shape:
        raise ValueError(f"{name!r} has shape {tuple(base.stored[name].shape)} in {base.label}, but in {tuned.label} "
                         f"{tuple(tuned.stored[name].shape)}; give networks of one architecture")  # fmt: skip
    if not base.stored[name].dtype.is_floating_point:
        return None
    change = tuned.read(name, dtype=torch.float64).sub_(base.read(name, dtype=torch.float64))
    return change if bool(change.count_nonzero()) else None


def cut_off(change: Tensor, rank: int, least: float = 0.0) -> tuple[Tensor, Tensor, float]:
    """Return factors A and B of the closest matrix of a given rank, each scaled by roots of singular values.

    The last return value is the share of the squared norm that the factors leave out.
    """
    u, s, v = torch.linalg.svd(change, full_matrices=False)
    count = max(1, min(rank, int((s > least).sum())))
    root, total = s[:count].sqrt(), float(s.square().sum())
    left = float(s[count:].square().sum()) / total if total else 0.0
    return (root[:, None] * v[:count]).contiguous(), (u[:, :count] * root).contiguous(), left


def cut_off_product(up: Tensor, down: Tensor, rank: int) -> tuple[Tensor, Tensor, float]:
    """Return factors A and B of the closest matrix of a given rank to `up @ down`, and the share that they omit."""
    left, right = torch.linalg.qr(up), torch.linalg.qr(down.T)
    core = left.R @ right.R.T
    a, b, rest = cut_off(core, rank, DUST * float(core.norm()))
    return a @ right.Q.T, left.Q @ b, rest


def _require_free(name: str, module: nn.Module) -> None:
    """Raise an error if a tensor that is stored in full is tied to a tensor that the adapter would not change."""
    tensors = module.state_dict(keep_vars=True)
    others = [other for other, tensor in tensors.items() if other != name and tensor is tensors.get(name)]
    if others:
        raise ValueError(
            f"{name!r} differs, and is one tensor with {others[0]!r}: no adapter can change both; untie them in both "
            "networks first"
        )


def _configuration(
    base: str | Path,
    modules: Sequence[ModuleChange],
    whole: Sequence[str],
    kinds: Mapping[str, nn.Module],
    *,
    is_turned: bool,
) -> dict[str, Any]:
    """Return the content of adapter_config.json. Alpha equals the rank, which makes the change equal to B A."""
    ranks = {one.name: one.rank for one in modules}
    most = max(ranks.values(), default=1)
    other = {name: rank for name, rank in ranks.items() if rank != most}
    owners = {name.rpartition(".")[0] for name in whole}
    outside = sorted(owner for owner in owners if not isinstance(kinds.get(owner), MATRICES) and owner)
    return {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": str(base),
        "inference_mode": True,
        "r": most,
        "lora_alpha": most,
        "lora_dropout": 0.0,
        "rank_pattern": other,
        "alpha_pattern": other,
        "target_modules": sorted(ranks),
        "modules_to_save": outside or None,
        "fan_in_fan_out": is_turned,
        "bias": "all" if len(owners) > len(outside) else "none",
        "init_lora_weights": True,
        "use_rslora": False,
        "use_dora": False,
    }

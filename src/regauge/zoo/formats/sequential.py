"""Deep weight spaces' networks: checkpoints of `seq`, a chain of linear layers, each in a file of its own.

Two layouts were published. DWSNets' sine networks are folders `..._{split}_{label}_{number}/checkpoints/
model_final.pth`; Deep-Align's are zip files of state dictionaries with an extra entry "label". A chain whose layers are
numbered one by one has its sine inside of each layer; one with every second number has a ReLU between them.
"""

import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

from torch import Tensor

from regauge.core.params import Params
from regauge.storage.architecture import Architecture
from regauge.zoo.formats.checkpoint_tree import Tree
from regauge.zoo.formats.folder import find_checkpoints
from regauge.zoo.formats.modules import examples
from regauge.zoo.formats.source import Source

DWSNETS = "**_{split}_{label}_{number}/checkpoints/model_final.pth"
DEEP_ALIGN = "**.pth"
LABEL = ("label",)
"""Entries of a file that are no parameters."""
OMEGA = 30.0
"""Frequency of the published sine networks."""


def read_dwsnets(path: str | Path) -> Source:
    """DWSNets' sine networks in a folder or zip file, with split and label from the names of their folders.

    Raises:
        FileNotFoundError: There are no such files.
        ValueError: They hold something else.

    References:
        Navon et al. (2023), Equivariant architectures for learning in deep weight spaces, section 6.
    """
    return _read(Tree(path), DWSNETS, "DWSNets' folders")


def read_deep_align(path: str | Path) -> Source:
    """Deep-Align's networks in a zip file or folder, with the label that lies in each file.

    Raises:
        FileNotFoundError: There are no such files.
        ValueError: They hold something else than chains of linear layers; `read_folder` reads those with a model.

    References:
        Navon et al. (2024), Equivariant deep weight space alignment, section 6.
    """
    return _read(Tree(path), DEEP_ALIGN, "Deep-Align's state dictionaries")


def chain_architecture(params: Mapping[str, Tensor], label: str) -> tuple[Architecture, dict[str, str]]:
    """The module of a chain `seq`, and its name for each tensor; other networks are refused."""
    numbers = sorted({int(number) for name in params for number in re.findall(r"^seq\.(\d+)\.", name)})
    wanted = [f"seq.{k}.{kind}" for k in numbers for kind in ("weight", "bias")]
    step = numbers[1] - numbers[0] if len(numbers) > 1 else 0
    if set(wanted) != params.keys() or step not in (1, 2) or numbers != list(range(0, step * len(numbers), step)):
        raise ValueError(
            f"{label} has the tensors {list(params)[:4]}, but a chain has seq.0.weight, seq.0.bias and so on; import "
            "it as a folder, with its model"
        )
    weights = [params[f"seq.{k}.weight"] for k in numbers]
    widths = [weights[0].shape[1], *(weight.shape[0] for weight in weights)]
    if any(weight.ndim != 2 or weight.shape[1] != before for weight, before in zip(weights, widths, strict=False)):
        raise ValueError(f"{label} is no chain of linear layers: its weights are {[tuple(w.shape) for w in weights]}")
    names = {f"seq.{k}.{kind}": f"layers.{i}.{kind}" for i, k in enumerate(numbers) for kind in ("weight", "bias")}
    text = "-".join(map(str, widths))
    if step == 2:
        return Architecture(f"ReLU MLP {text}", "regauge.nets.mlp:mlp", {"widths": widths}), names
    if any(a != b for a, b in pairwise(widths[1:-1])):
        raise ValueError(f"{label} is a sine network of different widths {widths}; import it as a folder, with a model")
    settings = {
        "in_features": widths[0],
        "width": widths[1],
        "out_features": widths[-1],
        "depth": len(widths) - 2,
        "omega": OMEGA,
    }
    return Architecture(f"SIREN {text}", "regauge.zoo.formats.modules:ImageSiren", settings), names


def _read(tree: Tree, template: str, what: str) -> Source:
    rows = find_checkpoints(tree, template, f"files of {what} below {str(tree.path)!r}, {template!r}")
    first = rows[0]["file"]
    architecture, names = chain_architecture(tree.checkpoint(first, LABEL)[0], repr(first))
    inputs = examples(architecture.layout[0].shape[1])

    def rename(params: Params, name: str) -> Params:
        return {names.get(own, own): tensor for own, tensor in params.items()}

    return Source.of_files(tree, architecture, rows, inputs, {"imported": what}, beside=LABEL, convert=rename)

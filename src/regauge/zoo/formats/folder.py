"""Importers of a folder or zip file with one checkpoint for each network, identified by the file name.

Three published layouts are known by name. In the layouts of DWSNets and Deep-Align, the checkpoints contain a chain of
linear layers named `seq`. DWSNets' sine networks are folders
`..._{split}_{label}_{number}/checkpoints/model_final.pth`; Deep-Align's networks are zip files of state dictionaries
with an extra entry "label". If the layers of a chain have consecutive numbers, the network has sines. If the numbers of
the layers increase by two, there are ReLUs between the layers. NFN's sine networks (with a chain named `net`) are files
`randinit_smaller_{label}s/net{number}.pth`, whose number determines the split.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch import Tensor

from regauge.checkpoints.formats.headers import layout_of
from regauge.checkpoints.formats.state_dicts import match
from regauge.core.params import Params
from regauge.storage.architecture import Architecture
from regauge.zoo.formats.modules import examples
from regauge.zoo.formats.zoo_source import Source, Tree, naming

DWSNETS = "**_{split}_{label}_{number}/checkpoints/model_final.pth"
DEEP_ALIGN = "**.pth"
NFN = "**randinit_smaller_{label}s/net{number}.pth"
PARTS = ((45_000, "train"), (50_000, "validation"))
"""The split of NFN. Networks with numbers below the first limit are for training, networks below the second limit for
validation, and all others for testing."""
LABEL = ("label",)
"""Entries of a file that are not parameters."""
MOST_DIGITS = 18
"""The largest number of digits of a number in a name. Longer numbers become strings, because integer columns have 64
bits."""
OMEGA = 30.0
"""The frequency of the published sine networks."""


def read_folder(
    path: str | Path,
    template: str = "{id}.pt",
    *,
    architecture: Architecture | None = None,
    inputs: tuple[Any, ...] | None = None,
    beside: Sequence[str] = (),
) -> Source:
    """Return the checkpoints whose names match a template, such as "{id}/step{step}.pt".

    A second example of a template is "lr{lr}/seed{seed}/**.safetensors". A field in braces matches a substring of the
    name without a slash and becomes a column. If all values of a column are integers or numbers, the column is
    converted to integers or numbers. The field "id" numbers the training run (trajectory), and "step" numbers the
    checkpoint of the run. If the template has no integer id, all checkpoints that differ only in their step form a
    trajectory, and trajectories are numbered. No two checkpoints may have the same id and step. `*` matches any
    characters except slashes, and `**` matches any characters. The column "file" contains the whole name. Files that
    `export` wrote contain all their columns in the header. If the header and the file name give different values, the
    file name takes precedence.

    Args:
        path: The path of the folder or zip file.
        template: The pattern of the names, relative to the folder.
        architecture: The architecture of all networks. If None, only the tensors of the networks are known.
        inputs: Example inputs of the architecture's module.
        beside: Names of checkpoint entries that are not parameters, such as "label". Each listed entry becomes a
            column.

    Raises:
        FileNotFoundError: The folder does not exist, or no name matches.
        ValueError: The template is malformed or gives two checkpoints the same id and step. The error is also raised if
            `beside` contains a name that identifies networks.
    """
    taken = [name for name in ("id", "step", "file") if name in beside]
    if taken:
        raise ValueError(
            f"{taken} cannot be read from files next to the parameters, because the names of the files say which "
            "network is which; write {id} and {step} into the template"
        )
    tree = Tree(path)
    rows = find_checkpoints(tree, template, f"file below {str(tree.path)!r} fits {template!r}")
    if architecture is None:
        layout = layout_of(tree.checkpoint(rows[0]["file"], beside)[0])
        architecture = Architecture(f"networks of {tree.path.name}", None, layout=layout)
    factory = architecture.factory
    expected = architecture.on_meta()

    def convert(params: Params, name: str) -> Params:
        return params if factory is None or params.keys() == expected.keys() else match(params, expected, name)

    about = {"imported": "folder", "template": template}
    return Source.of_files(tree, architecture, rows, inputs, about, beside=beside, convert=convert)


def find_checkpoints(tree: Tree, template: str, what: str) -> list[dict[str, Any]]:
    """Return a row for each file that matches a template of `read_folder`, in sorted order."""
    pattern = compile_template(template)
    found = {name: fitting.groupdict() for name in tree.names if (fitting := pattern.fullmatch(name))}
    if not found:
        raise FileNotFoundError(f"no {what}; there are for example {tree.names[:3]}")
    with naming(tree.path):
        return _number(found)


def compile_template(template: str) -> re.Pattern[str]:
    """Return the regular expression for names that match a template."""
    parts = []
    for piece in re.split(r"(\{[^{}]*\}|\*\*|\*)", template):
        if piece.startswith("{") and piece.endswith("}"):
            if not piece[1:-1].isidentifier():
                raise ValueError(f"{piece!r} in the template {template!r} is not a name; write for example {{id}}")
            parts.append(f"(?P<{piece[1:-1]}>[^/]+?)")
        else:
            parts.append({"*": "[^/]*", "**": ".*"}.get(piece, re.escape(piece)))
    try:
        return re.compile("".join(parts))
    except re.error as error:
        raise ValueError(f"the template {template!r} is malformed: {error}; use each name once") from error


def _number(found: dict[str, dict[str, str]]) -> list[dict[str, Any]]:
    """Return sorted rows of the matched substrings, with integers as "id" and "step"."""
    columns = {key: [fields[key] for fields in found.values()] for key in next(iter(found.values()), {})}
    readers = {key: _reader(values) for key, values in columns.items()}
    rows = {name: {key: readers[key](value) for key, value in fields.items()} for name, fields in found.items()}
    if readers.get("step", int) is not int:
        raise ValueError(f"the steps in the names are {sorted(set(columns['step']))[:4]}, but must be integers")
    trajectories: dict[Any, int] = {}
    for name, row in rows.items():
        row.setdefault("step", 0)
        if readers.get("id") is not int:
            if "id" in row:
                row["name"] = row.pop("id")
            key = tuple(value for field, value in row.items() if field != "step") if "step" in columns else name
            row["id"] = trajectories.setdefault(key, len(trajectories))
        row["file"] = name
    return sorted(rows.values(), key=lambda row: (row["id"], row["step"]))


def _reader(values: list[str]) -> type:
    if all(re.fullmatch(r"-?\d+", value) for value in values):
        return int if all(len(value) <= MOST_DIGITS for value in values) else str
    return float if all(re.fullmatch(r"-?\d*\.?\d+([eE]-?\d+)?", value) for value in values) else str


def read_dwsnets(path: str | Path) -> Source:
    """Return DWSNets' sine networks from a folder or zip file, with split and label from their folder names.

    Raises:
        FileNotFoundError: The path contains no files with the published names.
        ValueError: The files do not contain sine networks of the published layout.

    References:
        Navon et al. (2023), Equivariant architectures for learning in deep weight spaces, section 6.
    """
    return _read(Tree(path), DWSNETS, "DWSNets' folders")


def read_nfn(path: str | Path) -> Source:
    """Return NFN's sine networks in a folder or zip file, with label and split from the names.

    The outputs of the networks lie in [-1, 1]. Unlike in `read_dwsnets`, 1/2 is not added to the outputs.

    Raises:
        FileNotFoundError: The path contains no files with the published names.
        ValueError: The files do not contain sine networks of the published layout.

    References:
        Zhou et al. (2023), Permutation equivariant neural functionals, section 4.1, and their configurations.
    """
    source = _read(Tree(path), NFN, "NFN's folders", named=_name_in_chain, part_of=_part)
    return replace(source, architecture=replace(source.architecture, factory="regauge.nets.siren:Siren"))


def _part(number: int) -> str:
    """Return the part of NFN's split to which a network belongs, given its number."""
    return next((name for end, name in PARTS if number < end), "test")


def _name_in_chain(name: str) -> str:
    """Return the name that a tensor of NFN's networks, such as `net.0.linear.weight`, has in a chain."""
    return re.sub(r"^net\.(\d+)\.(?:linear\.)?", r"seq.\1.", name)


def read_deep_align(path: str | Path) -> Source:
    """Return Deep-Align's networks from a zip file or folder, with the label that each file stores.

    Raises:
        FileNotFoundError: The path contains no files with the published names.
        ValueError: The networks are not chains of linear layers. For other networks, use `read_folder` with a model.

    References:
        Navon et al. (2024), Equivariant deep weight space alignment, section 6.
    """
    return _read(Tree(path), DEEP_ALIGN, "Deep-Align's state dictionaries")


def chain_architecture(params: Mapping[str, Tensor], label: str) -> tuple[Architecture, dict[str, str]]:
    """Return the module of a chain `seq`, and the module's name for each tensor; raise an error for other networks."""
    numbers = sorted({int(number) for name in params for number in re.findall(r"^seq\.(\d{1,9})\.", name)})
    wanted = [f"seq.{k}.{kind}" for k in numbers for kind in ("weight", "bias")]
    step = numbers[1] - numbers[0] if len(numbers) > 1 else 0
    if set(wanted) != params.keys() or step not in (1, 2) or numbers != list(range(0, step * len(numbers), step)):
        raise ValueError(
            f"{label} has the tensors {list(params)[:4]}, but a chain has seq.0.weight, seq.0.bias and so on; import "
            "it as a folder, with its model"
        )
    weights = [params[f"seq.{k}.weight"] for k in numbers]
    if any(one.ndim != 2 for one in weights) or any(a.shape[0] != b.shape[1] for a, b in pairwise(weights)):
        raise ValueError(
            f"{label} is not a chain of linear layers: its weights are {[tuple(w.shape) for w in weights]}; import it "
            "as a folder, with its model"
        )
    widths = [weights[0].shape[1], *(weight.shape[0] for weight in weights)]
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


def _read(
    tree: Tree,
    template: str,
    what: str,
    *,
    named: Callable[[str], str] = str,
    part_of: Callable[[int], str] | None = None,
) -> Source:
    """Return the chains in the files that fit a template.

    `named` maps the names of tensors to names in a chain. `part_of` maps the number of a network to its part of the
    split.
    """
    rows = find_checkpoints(tree, template, f"files of {what} below {str(tree.path)!r}, {template!r}")
    if part_of is not None:
        rows = [{**row, "split": part_of(row["number"])} for row in rows]
    first = rows[0]["file"]
    with naming(tree.path / first):
        params = {named(name): tensor for name, tensor in tree.checkpoint(first, LABEL)[0].items()}
        architecture, names = chain_architecture(params, repr(str(tree.path / first)))
        inputs = examples(architecture.layout[0].shape[1])

    def rename(params: Params, name: str) -> Params:
        return {names.get(named(own), own): tensor for own, tensor in params.items()}

    return Source.of_files(tree, architecture, rows, inputs, {"imported": what}, beside=LABEL, convert=rename)

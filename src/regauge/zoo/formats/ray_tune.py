"""The formats of ModelZooDataset and ViTModelZoo: Ray Tune experiments with a folder per trial.

The folder of a trial contains the settings, and `result.json` with one line of JSON per epoch. The settings are in
`params.json`, or for vision transformers in `config.json`. The checkpoints are `checkpoint_{epoch}/checkpoints` (the
epoch may have leading zeros). A checkpoint is a state dictionary with the names `module_list.{i}.weight` and `.bias`,
or with timm's names below `vit`. States of optimizers, which are next to the checkpoints, are not read.
"""

import math
import re
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from regauge.checkpoints.claims import Claims
from regauge.checkpoints.plain_files import parse_object
from regauge.core.params import Params
from regauge.core.typed_json import parse_json
from regauge.storage.architecture import Architecture
from regauge.zoo.formats.folder import compile_template
from regauge.zoo.formats.modules import examples
from regauge.zoo.formats.zoo_source import Source, Tree, naming

Described = TypeVar("Described")
CHECKPOINT = re.compile(r"(?P<trial>.*)/checkpoint_(?P<epoch>\d{1,18})/checkpoints")
BLOCK = re.compile(r"vit\.blocks\.(\d{1,9})\.")
HEADS = 6
"""The number of attention heads of the vision transformers (ViT-S), which the shapes of tensors do not determine."""
IGNORED = ("config", "hist_stats")
"""Entries of a result that repeat the settings, or that are not single values."""


def read_ray_tune(path: str | Path, template: str = "**") -> Source:
    """Return the trials of an experiment in a folder or zip file, with settings and the metrics of each epoch.

    Args:
        path: The path of the folder or zip file.
        template: A pattern that the names of the checkpoints must match, as in `read_folder`, for example
            "**seed=1**".

    Raises:
        FileNotFoundError: The path contains no trials.
        ValueError: The settings describe an architecture that was not published.

    References:
        Schürholt et al. (2022), Model zoos: a dataset of diverse populations of neural network models.
    """
    tree = Tree(path)
    settings, layers, rows = _rows(tree, template, "params.json", layers_of)
    kind = str(settings["model::type"])
    shape = {"CNN": (layers[0][1], 28, 28), "CNN2": (layers[0][1], 28, 28), "CNN3": (layers[0][1], 32, 32)}
    with naming((tree.path / rows[0]["file"]).parents[1]), Claims(tree.checkpoint(rows[0]["file"])[0]):
        architecture = Architecture(
            f"{kind} {settings.get('model::nlin', 'leakyrelu')}",
            "regauge.zoo.formats.modules:Listed",
            {"layers": layers},
        )
        inputs = examples(*shape.get(kind, (layers[0][1],)))
    return Source.of_files(tree, architecture, rows, inputs, {"imported": "ModelZooDataset"})


def read_vit_model_zoo(path: str | Path, template: str = "**") -> Source:
    """Return the vision transformers of ViTModelZoo in a folder or zip file, one checkpoint in memory at a time.

    The settings in `config.json` are columns. "pretraining::model" names the network from which a network was
    fine-tuned. The zoo has classifiers with and without a hidden layer, which are different architectures.

    Args:
        path: The path of the folder or zip file.
        template: A pattern that the names of the checkpoints must match, as in `read_folder`. For example,
            "**FCMLP_True**" selects classifiers with a hidden layer.

    Raises:
        FileNotFoundError: The path contains no trials.
        ValueError: The networks are not vision transformers of this zoo, or have several architectures.

    References:
        Falk et al. (2025), A model zoo of vision transformers.
    """
    tree = Tree(path)
    _, (classes, head), rows = _rows(tree, template, "config.json", head_of)
    first = tree.checkpoint(rows[0]["file"])[0]
    with naming((tree.path / rows[0]["file"]).parents[1]), Claims(first):
        sizes = _sizes(first)
        architecture = Architecture(
            f"ViT {sizes['width']}x{sizes['layers']}, {classes} classes",
            "regauge.zoo.formats.modules:NamedViT",
            {**sizes, "classes": classes, "heads": HEADS, "head": head},
        )
        channels, size, _ = sizes["image"]
        inputs = examples(channels, size, size)
    return Source.of_files(tree, architecture, rows, inputs, {"imported": "ViTModelZoo"})


def head_of(settings: Mapping[str, Any]) -> tuple[int, int | None]:
    """Return the number of classes of a vision transformer, and the hidden units of its classifier or None."""
    if settings.get("model::type") != "vit_s_16":
        raise ValueError(
            f"the trials have the model {settings.get('model::type')!r}, but 'vit_s_16' is known; import them as a "
            "folder, with their model"
        )
    is_deep = settings.get("model::head::mlp", False)
    return int(settings["model::o_dim"]), int(settings["model::head::hidden_dim"]) if is_deep else None


def _sizes(params: Params) -> dict[str, Any]:
    """Return the sizes of a vision transformer, given its tensors."""
    names = ("patch_embed.proj.weight", "pos_embed", "blocks.0.mlp.fc1.weight")
    try:
        patches, positions, up = (params[f"vit.{name}"] for name in names)
        width, channels, patch, _ = patches.shape
        size = patch * math.isqrt(positions.shape[1] - 1)
        if not size * width * channels:
            raise ValueError("images, patches and tokens must not be empty")
    except (KeyError, IndexError, ValueError) as error:
        raise ValueError(
            f"{list(params)[:4]} are not the tensors of a vision transformer ({error}); import them as a folder"
        ) from error
    layers = len({found[1] for name in params if (found := BLOCK.match(name))})
    return {"width": width, "hidden": up.shape[0], "layers": layers, "image": [channels, size, patch]}


def layers_of(settings: Mapping[str, Any]) -> list[list[Any]]:
    """Return the layers of a published architecture in the form that `Listed` accepts."""
    kind = settings.get("model::type")
    activation = [str(settings.get("model::nlin", "leakyrelu"))]
    dropout = [["dropout"]] if float(settings.get("model::dropout", 0.2)) > 0 else []
    layers: list[list[Any]] = []
    if kind == "MLP":
        hidden = settings["model::h_dim"]
        widths = [settings["model::i_dim"], *(hidden if isinstance(hidden, list) else [hidden])]
        for before, after in pairwise(widths):
            layers += [["linear", before, after], activation, *dropout]
        return [*layers, ["linear", widths[-1], settings["model::o_dim"]]]
    if kind in ("CNN", "CNN2"):
        a, b, c = (8, 6, 4) if kind == "CNN" else (6, 9, 6)
        layers += [["conv", int(settings["model::channels_in"]), a, 5], ["pool"], activation, *dropout]
        layers += [["conv", a, b, 5], ["pool"], activation, *dropout]
        layers += [["conv", b, c, 2], activation, ["flatten"]]
        return [*layers, ["linear", 9 * c, 20], activation, *dropout, ["linear", 20, 10]]
    if kind == "CNN3":
        channels = [int(settings["model::channels_in"]), 16, 32, 15]
        for before, after in pairwise(channels):
            layers += [["conv", before, after, 3], ["pool"], activation, ["dropout"]]
        return [*layers, ["flatten"], ["linear", 60, 20], activation, *dropout, ["linear", 20, 10]]
    raise ValueError(
        f"the trials have the model {kind!r}, but CNN, CNN2, CNN3 and MLP are known; import them as a folder, with "
        "their model"
    )


def _rows(
    tree: Tree, template: str, file: str, describe: Callable[[Mapping[str, Any]], Described]
) -> tuple[dict[str, Any], Described, list[dict[str, Any]]]:
    """Return the settings of a trial, the description of the architecture, and a row for each checkpoint.

    Args:
        tree: All files.
        template: The pattern that the names of checkpoints must match.
        file: The name of the files with the settings.
        describe: A function from settings to the description of the architecture.
    """
    pattern = compile_template(template)
    trials: dict[str, dict[int, str]] = {}
    for name in tree.names:
        if (fitting := CHECKPOINT.fullmatch(name)) and pattern.fullmatch(name):
            trials.setdefault(fitting["trial"], {})[int(fitting["epoch"])] = name
    if not trials:
        chosen = "" if template == "**" else f" that fit {template!r}"
        raise FileNotFoundError(
            f"{str(tree.path)!r} has no trials of Ray Tune, TRIAL/checkpoint_EPOCH/checkpoints{chosen}; there are for "
            f"example {tree.names[:3]}"
        )
    first, whole = _settings(tree, min(trials), file, describe)
    rows = []
    for number, (trial, checkpoints) in enumerate(sorted(trials.items())):
        settings, own = _settings(tree, trial, file, describe)
        if own != whole:
            raise ValueError(
                f"trial {trial!r} of {str(tree.path)!r} has another architecture; import trials of one architecture at "
                "a time, which `template` can select by their names"
            )
        results = _results(tree, trial)
        known = {key: value for key, value in settings.items() if _is_plain(value)}
        for epoch, name in sorted(checkpoints.items()):
            rows.append(known | results.get(epoch, {}) | {"id": number, "step": epoch, "file": name})
    return first, whole, rows


def _settings(
    tree: Tree, trial: str, file: str, describe: Callable[[Mapping[str, Any]], Described]
) -> tuple[dict[str, Any], Described]:
    """Return the settings of a trial, and the description of its architecture."""
    name = f"{trial}/{file}"
    if name not in tree.names:
        raise FileNotFoundError(
            f"trial {trial!r} of {str(tree.path)!r} has no {file}, so its architecture is not known; import it as "
            "a folder, with its model"
        )
    settings = parse_object(tree.read(name), tree.path / name)
    try:
        return settings, describe(settings)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        reason = f"{error!r} is missing" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{str(tree.path / name)!r} describes no architecture: {reason}") from error


def _results(tree: Tree, trial: str) -> dict[int, dict[str, Any]]:
    """Return the metrics of all recorded epochs."""
    name = f"{trial}/result.json"
    if name not in tree.names:
        return {}
    results = {}
    for line in tree.read(name).splitlines():
        try:
            found = parse_json(line)
        except ValueError:  # a trial that was stopped while writing
            continue
        if not isinstance(found, dict) or type(found.get("training_iteration")) is not int:
            raise ValueError(f"{str(tree.path / name)!r} has a line without the number of its epoch; fetch it again")
        metrics = {key: value for key, value in found.items() if key not in IGNORED and _is_plain(value)}
        results[found["training_iteration"]] = metrics
    return results


def _is_plain(value: Any) -> bool:
    return isinstance(value, bool | int | float | str)

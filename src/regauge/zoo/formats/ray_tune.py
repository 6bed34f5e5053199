"""The format of ModelZooDataset: a Ray Tune experiment with one folder per trial and one checkpoint per epoch.

The folder of a trial contains `params.json` with the settings, and `result.json` with one line of JSON per epoch. The
checkpoints are `checkpoint_{epoch}/checkpoints` (the epoch may have leading zeros). A checkpoint is a state dictionary
with the names `module_list.{i}.weight` and `.bias`.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from regauge.checkpoints.claims import Claims
from regauge.checkpoints.plain_files import parse_object
from regauge.core.typed_json import parse_json
from regauge.storage.architecture import Architecture
from regauge.zoo.formats.modules import examples
from regauge.zoo.formats.zoo_source import Source, Tree, naming

CHECKPOINT = re.compile(r"(?P<trial>.*)/checkpoint_(?P<epoch>\d{1,18})/checkpoints")
IGNORED = ("config", "hist_stats")
"""Entries of a result that repeat the settings or are not single values."""


def read_ray_tune(path: str | Path) -> Source:
    """Return the trials of an experiment in a folder or zip file, with settings and the metrics of each epoch.

    Raises:
        FileNotFoundError: There are no trials.
        ValueError: The settings describe an architecture that was not published.

    References:
        Schürholt et al. (2022), Model zoos: a dataset of diverse populations of neural network models.
    """
    tree = Tree(path)
    trials: dict[str, dict[int, str]] = {}
    for name in tree.names:
        if fitting := CHECKPOINT.fullmatch(name):
            trials.setdefault(fitting["trial"], {})[int(fitting["epoch"])] = name
    if not trials:
        raise FileNotFoundError(
            f"{str(tree.path)!r} has no trials of Ray Tune, TRIAL/checkpoint_EPOCH/checkpoints; there are for example "
            f"{tree.names[:3]}"
        )
    settings, layers = _settings(tree, min(trials))
    rows = _rows(tree, trials, layers)
    kind = str(settings["model::type"])
    shape = {"CNN": (layers[0][1], 28, 28), "CNN2": (layers[0][1], 28, 28), "CNN3": (layers[0][1], 32, 32)}
    with naming(tree.path / min(trials)), Claims(tree.checkpoint(rows[0]["file"])[0]):
        architecture = Architecture(
            f"{kind} {settings.get('model::nlin', 'leakyrelu')}",
            "regauge.zoo.formats.modules:Listed",
            {"layers": layers},
        )
        inputs = examples(*shape.get(kind, (layers[0][1],)))
    return Source.of_files(tree, architecture, rows, inputs, {"imported": "ModelZooDataset"})


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


def _rows(tree: Tree, trials: Mapping[str, Mapping[int, str]], layers: Sequence[Sequence[Any]]) -> list[dict[str, Any]]:
    rows = []
    for number, (trial, checkpoints) in enumerate(sorted(trials.items())):
        settings, own = _settings(tree, trial)
        if own != layers:
            raise ValueError(
                f"trial {trial!r} of {str(tree.path)!r} has another architecture; import trials of one architecture at "
                "a time"
            )
        results = _results(tree, trial)
        known = {key: value for key, value in settings.items() if _is_plain(value)}
        for epoch, name in sorted(checkpoints.items()):
            rows.append(known | results.get(epoch, {}) | {"id": number, "step": epoch, "file": name})
    return rows


def _settings(tree: Tree, trial: str) -> tuple[dict[str, Any], list[list[Any]]]:
    """Return the settings of a trial, and the layers of its networks."""
    name = f"{trial}/params.json"
    if name not in tree.names:
        raise FileNotFoundError(
            f"trial {trial!r} of {str(tree.path)!r} has no params.json, so its architecture is not known; import it as "
            "a folder, with its model"
        )
    settings = parse_object(tree.read(name), tree.path / name)
    try:
        return settings, layers_of(settings)
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
        except ValueError:  # a trial that was stopped while it wrote
            continue
        if not isinstance(found, dict) or type(found.get("training_iteration")) is not int:
            raise ValueError(f"{str(tree.path / name)!r} has a line without the number of its epoch; fetch it again")
        metrics = {key: value for key, value in found.items() if key not in IGNORED and _is_plain(value)}
        results[found["training_iteration"]] = metrics
    return results


def _is_plain(value: Any) -> bool:
    return isinstance(value, bool | int | float | str)

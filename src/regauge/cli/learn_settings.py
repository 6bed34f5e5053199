"""Settings of a net that reads networks, from options: its layers, its inputs, and its training networks."""

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regauge import learn
from regauge import weightspace as ws
from regauge.cli.config_options import settings_of
from regauge.cli.learn_options import LearnAutoencoder, LearnNet, LearnPredictor, LearnRun, Varied
from regauge.cli.options import UsageError
from regauge.cli.output import show_progress
from regauge.cli.training_output import TrainingOutput, tell_chosen
from regauge.core.typed_json import require_fields
from regauge.hub import open_batches
from regauge.learn.random_changes import Change
from regauge.storage import Collection

EXAMPLES = 512
"""The number of examples of DATA on which networks are evaluated."""


def networks_of(options: LearnRun) -> tuple[Collection, NDArray[np.int64]]:
    """Return the stores, and the indices of the networks that the user selected."""
    if not options.stores:
        raise UsageError("no store is named; give the folders of one or more stores")
    with show_progress() as progress:
        collection = Collection.open(options.stores, progress=progress)
    chosen = collection.find(options.where, options.checkpoints)
    tell_chosen(len(chosen), len(collection), options.checkpoints)
    return collection, chosen


def run_of(options: LearnRun, chosen: NDArray[np.int64], place: TrainingOutput) -> dict[str, Any]:
    """Return the arguments that `learn.fit_predictor`, `flow.fit` and similar functions have in common."""
    return {
        "generator": torch.Generator().manual_seed(options.seed),
        "indices": chosen,
        "split_by": options.split_by or None,
        "state": place.state,
    }


def net_settings_of(options: LearnPredictor | LearnAutoencoder, config: type) -> dict[str, Any]:
    """Return the net that reads networks, for the settings of a predictor or an autoencoder."""
    return {
        **settings_of(options, config),
        "layer": layer_of(options.layer, options.layer_settings),
        "values": values_of(options),
        "parts": options.parts or None,
        "augment": options.varied.augment,
        "changes": changes_of(options.varied),
    }


def values_of(options: LearnNet) -> ws.Fourier | ws.Logarithms | None:
    """Return the encoding of values; None if values are not encoded."""
    if options.fourier and options.logarithms:
        raise UsageError("--fourier and --logarithms are two ways to encode values; choose one")
    return ws.Fourier(options.fourier) if options.fourier else ws.Logarithms() if options.logarithms else None


def changes_of(varied: Varied) -> tuple[Change, ...]:
    """Return the random changes of networks in each training step."""
    kinds: tuple[tuple[Callable[[float], Change], float], ...] = (
        (learn.Translation, varied.translate),
        (learn.Rotation, varied.rotate),
        (learn.Scaling, varied.scale),
        (learn.Noise, varied.noise),
        (learn.Dropout, varied.drop),
    )
    return tuple(kind(value) for kind, value in kinds if value)


def layer_of(name: str, typed: str) -> Any:
    """Return the layer with the settings that the user typed."""
    if name not in ws.LAYERS:
        raise UsageError(f"there is no layer {name!r}; choose from {', '.join(ws.LAYERS)}")
    kind = ws.LAYERS[name]
    try:
        settings = json.loads(typed)
        require_fields(settings, kind, f"layer {name}")
        return kind(**settings)
    except (json.JSONDecodeError, TypeError, AttributeError) as error:
        known = ", ".join(asdict(kind()))
        raise UsageError(
            f"--layer-settings {typed!r} cannot be used ({error}); write JSON with some of {known}, "
            "for example '{\"expansion\": 2}'"
        ) from error


def inputs_of(text: str) -> Tensor | Any:
    """Return the inputs at which networks are evaluated."""
    kind, _, size = text.partition(":")
    if kind not in ("grid", "points"):
        return open_batches(text, EXAMPLES)[0][0]
    sizes = sizes_of(size)
    if not sizes or not all(sizes) or (kind == "points" and len(sizes) != 2):
        wanted = "the number of pixels along each axis, for example grid:28x28"
        wanted = wanted if kind == "grid" else "the numbers of points and coordinates, for example points:4096x3"
        raise UsageError(f"--inputs {text!r} cannot be read; after {kind!r}, write {wanted}")
    if kind == "grid":
        return learn.grid(sizes)
    return 2 * torch.rand(*sizes, generator=torch.Generator().manual_seed(0)) - 1


def sizes_of(text: str) -> tuple[int, ...]:
    """Return integers that are separated by x, or an empty tuple if the text contains anything else."""
    sizes = text.split("x")
    return tuple(map(int, sizes)) if all(size.isdecimal() for size in sizes) else ()

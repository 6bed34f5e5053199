"""`regauge learn`: nets that read networks, trained and used."""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regauge import learn
from regauge import weightspace as ws
from regauge.cli.learn_options import Learn, LearnPredict, LearnPredictor
from regauge.cli.models import load_module
from regauge.cli.options import UsageError
from regauge.cli.output import show_progress, show_status, tell, tell_table, tell_written, write_rows
from regauge.cli.tasks import load_batches
from regauge.cli.training_output import training_output
from regauge.cli.zoo_populations import conditions_of
from regauge.core.typed_json import require_fields
from regauge.learn.changes import Change
from regauge.names import VERSION
from regauge.report.predictor_page import predictor_page
from regauge.storage.checkpoints.checkpoint import Checkpoint
from regauge.storage.checkpoints.writing import require_writable, save_text
from regauge.storage.collection import Collection
from regauge.storage.store import Store

GRID = "grid:"
EXAMPLES = 512
"""Examples of DATA that networks are run on."""


def run(options: Learn) -> None:
    """Run the command."""
    if "" not in sys.path:
        sys.path.insert(0, "")  # packages in the folder where the command is typed
    commands: dict[type, Callable[[Any], None]] = {LearnPredictor: predictor, LearnPredict: predict}
    commands[type(options.command)](options.command)


def predictor(options: LearnPredictor) -> None:
    """Train a predictor, and write it with a report."""
    if not options.stores:
        raise UsageError("no store is named; give the folder of one, or of several")
    config = config_of(options)
    with training_output(
        options.output, beside=(".html", ".json"), resume=options.resume, overwrite=options.overwrite
    ) as place:
        with show_status("reading the columns"):
            collection, chosen = networks_of(options)
            inputs = inputs_of(options.inputs) if options.inputs else None
        with show_progress() as progress:
            made = learn.fit_predictor(
                collection,
                options.target,
                config=config,
                generator=torch.Generator().manual_seed(options.seed),
                indices=chosen,
                split_by=options.split_by or None,
                inputs=inputs,
                state=place.state,
                progress=progress,
            )
        page, numbers = place.beside
        save_text(json.dumps(results_of(made, options), indent=1) + "\n", numbers)
        save_text(predictor_page(numbers), page)
        made.save(place.path, overwrite=place.overwrite)
    counts = ", ".join(f"{count} for {name}" for name, count in made.about["networks"].items())
    tell(f"{options.target!r} of networks: {counts}", networks=made.about["networks"])
    tell_table("scores", [{"": name, **scores} for name, scores in made.about["scores"].items()])
    if made.trained is not None:
        last = len(made.trained.history)
        tell(
            f"epoch {made.trained.best + 1} of {last} is kept; the training ended by its {made.trained.ended}",
            history=[dict(row) for row in made.trained.history],
            best=made.trained.best,
            ended=made.trained.ended,
        )
    tell_written(options.output, page, numbers)


def networks_of(options: LearnPredictor) -> tuple[Collection, NDArray[np.int64]]:
    """The stores, and the numbers of the networks that are wanted."""
    collection = Collection([Store.open(folder) for folder in options.stores])
    chosen = []
    for store, start in zip(collection.stores, collection.starts.tolist(), strict=False):
        own = store.rows.where(**conditions_of(options.where))
        chosen.append(start + (np.intersect1d(own, store.rows.final()) if options.final else own))
    return collection, np.concatenate(chosen)


def predict(options: LearnPredict) -> None:
    """Print or write predictions."""
    if options.output is not None:
        require_writable(options.output, overwrite=options.overwrite, suffixes=(".csv",))
    if not options.networks:
        raise UsageError("no networks are named; give folders of stores, or checkpoints")
    with show_status("reading"):
        rows = [row for path in options.networks for row in _predictions(options, path)]
    if options.output is None:
        tell_table("predictions", rows)
    else:
        write_rows(rows, options.output)
        tell_written(options.output)


def _predictions(options: LearnPredict, path: Path) -> Iterator[dict[str, Any]]:
    """A row for each network of a store, or for a checkpoint."""
    store = Store.find(path) if path.is_dir() else None
    if store is not None and not len(store):
        raise UsageError(f"the store {str(path)!r} has no networks")
    module = None
    if has_probes(options.predictor):
        if store is None and options.model is None:
            raise UsageError(
                f"{str(options.predictor)!r} runs the networks on probes; name their architecture: --model"
            )
        is_named = options.model is not None
        module = load_module(str(options.model)).module if is_named or store is None else store.architecture.module()
    made = learn.load_predictor(options.predictor, module=module)
    if store is None:
        with Checkpoint.open(path) as checkpoint:
            networks: Any = {name: tensor.unsqueeze(0) for name, tensor in checkpoint.params.items()}
        known: list[dict[str, Any]] = [{"network": str(path)}]
    else:
        networks = store
        ids, steps = (store.rows[name].tolist() for name in ("id", "step"))
        known = [{"network": str(path), "id": k, "step": step} for k, step in zip(ids, steps, strict=True)]
    try:
        predicted = made.predict(networks).tolist()
    except ValueError as error:
        raise UsageError(f"{str(path)!r}: {error}") from error
    sure = made.probabilities(networks).amax(1).tolist() if made.target.kind == "classes" else None
    for k, row in enumerate(known):
        yield {**row, made.target.name: predicted[k], **({} if sure is None else {"probability": sure[k]})}


def has_probes(path: Path) -> bool:
    """Whether a file holds a net that runs the networks that it reads."""
    if not path.is_file():
        return False  # what is wrong with it is told where it is loaded
    with Checkpoint.open(path) as checkpoint:
        return bool(json.loads(checkpoint.header.get("net", "{}")).get("probes"))


def config_of(options: LearnPredictor) -> learn.PredictorConfig:
    """The settings that were typed."""
    if options.layer not in ws.LAYERS:
        raise UsageError(f"there is no layer {options.layer!r}; there are {', '.join(ws.LAYERS)}")
    if options.fourier and options.logarithms:
        raise UsageError("--fourier and --logarithms are two ways to encode values; choose one")
    values = ws.Fourier(options.fourier) if options.fourier else ws.Logarithms() if options.logarithms else None
    varied = options.varied
    kinds: tuple[tuple[Callable[[float], Change], float], ...] = (
        (learn.Translation, varied.translate),
        (learn.Rotation, varied.rotate),
        (learn.Scaling, varied.scale),
        (learn.Noise, varied.noise),
        (learn.Dropout, varied.drop),
    )
    return learn.PredictorConfig(
        layer=layer_of(options),
        width=options.width,
        depth=options.depth,
        values=values,
        reads_moments=options.moments,
        parts=options.parts or None,
        widening=options.widening,
        dropout=options.dropout,
        kind=options.kind,
        augment=varied.augment,
        changes=tuple(kind(value) for kind, value in kinds if value),
        render=options.render,
        probes=probes_of(options.probes),
        statistics=options.statistics == "yes",
        epochs=options.epochs,
        batch=options.batch,
        lr=options.lr,
        weight_decay=options.weight_decay,
        patience=options.patience,
        seconds=options.seconds,
        device=options.device,
    )


def layer_of(options: LearnPredictor) -> Any:
    """The layer with its settings."""
    kind = ws.LAYERS[options.layer]
    try:
        settings = json.loads(options.layer_settings)
        require_fields(settings, kind, f"layer {options.layer}")
        return kind(**settings)
    except (json.JSONDecodeError, TypeError, AttributeError) as error:
        known = ", ".join(asdict(kind()))
        raise UsageError(
            f"--layer-settings {options.layer_settings!r} cannot be used ({error}); write JSON with some of {known}, "
            "for example '{\"expansion\": 2}'"
        ) from error


def inputs_of(text: str) -> Tensor | Any:
    """What networks are run on."""
    if not text.startswith(GRID):
        return load_batches(text, EXAMPLES)[0][0]
    sizes = sizes_of(text.removeprefix(GRID))
    if not sizes or not all(sizes):
        raise UsageError(f"--inputs {text!r} is no grid; write the number of pixels along each axis: grid:28x28")
    return learn.grid(sizes)


def probes_of(text: str) -> int | tuple[int, ...]:
    """A number of probes, or the axes of a sheet."""
    sizes = sizes_of(text)
    if not sizes:
        raise UsageError(f"--probes {text!r} is no number of inputs; write one, or the axes of a sheet: 16x16")
    return sizes if len(sizes) > 1 else sizes[0]


def sizes_of(text: str) -> tuple[int, ...]:
    """Whole numbers with x between them; none if these are not all numbers."""
    sizes = text.split("x")
    return tuple(map(int, sizes)) if all(size.isdecimal() for size in sizes) else ()


def results_of(made: learn.Predictor, options: LearnPredictor) -> dict[str, Any]:
    """Everything that the report shows, as JSON."""
    assert made.trained is not None
    assert made.tested is not None
    return {
        "format": "regauge.predictor",
        "version": VERSION,
        "store": ", ".join(str(folder) for folder in options.stores),
        "target": made.target.to_json(),
        "parts": list(made.net.parts),
        "parameters": sum(parameter.numel() for parameter in made.net.parameters()),
        **made.about,
        "history": [dict(row) for row in made.trained.history],
        "best": made.trained.best,
        "ended": made.trained.ended,
        "tested": {name: values.tolist() for name, values in made.tested.items()},
    }

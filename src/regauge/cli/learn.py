"""`regauge learn`: nets that read networks, trained and used."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from regauge import learn
from regauge.cli.autoencoder import COMMANDS as AUTOENCODER
from regauge.cli.learn_matching import matching
from regauge.cli.learn_options import Learn, LearnMatching, LearnPredict, LearnPredictor
from regauge.cli.learn_settings import changes_of, inputs_of, layer_of, networks_of, sizes_of, values_of
from regauge.cli.models import load_module
from regauge.cli.options import UsageError
from regauge.cli.output import show_progress, show_status, tell, tell_table, tell_written, write_rows
from regauge.cli.training_output import training_output
from regauge.names import VERSION
from regauge.report.predictor_page import predictor_page
from regauge.storage.checkpoints.checkpoint import Checkpoint
from regauge.storage.checkpoints.writing import require_writable, save_text
from regauge.storage.store import Store
from regauge.weightspace.files import needs_modules


def run(options: Learn) -> None:
    """Run the command."""
    if "" not in sys.path:
        sys.path.insert(0, "")  # packages in the folder where the command is typed
    commands: dict[type, Callable[[Any], None]] = {
        LearnPredictor: predictor,
        LearnPredict: predict,
        LearnMatching: matching,
        **AUTOENCODER,
    }
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
    if options.predictor.is_file() and needs_modules(options.predictor):
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


def config_of(options: LearnPredictor) -> learn.PredictorConfig:
    """The settings that were typed."""
    return learn.PredictorConfig(
        layer=layer_of(options),
        width=options.width,
        depth=options.depth,
        values=values_of(options),
        reads_moments=options.moments,
        parts=options.parts or None,
        widening=options.widening,
        dropout=options.dropout,
        kind=options.kind,
        augment=options.varied.augment,
        changes=changes_of(options.varied),
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


def probes_of(text: str) -> int | tuple[int, ...]:
    """A number of probes, or the axes of a sheet."""
    sizes = sizes_of(text)
    if not sizes:
        raise UsageError(f"--probes {text!r} is no number of inputs; write one, or the axes of a sheet: 16x16")
    return sizes if len(sizes) > 1 else sizes[0]


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

"""`regauge learn`: nets that read networks, trained and used."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from regauge import learn
from regauge.checkpoints.writing import require_writable, save_text
from regauge.cli.learn_autoencoder import COMMANDS as AUTOENCODER
from regauge.cli.learn_matching import matching
from regauge.cli.learn_networks import read_networks, require_named
from regauge.cli.learn_options import Learn, LearnMatching, LearnPredict, LearnPredictor
from regauge.cli.learn_settings import inputs_of, net_settings_of, networks_of, run_of, sizes_of
from regauge.cli.options import UsageError
from regauge.cli.output import show_progress, show_status, tell, tell_table, tell_written, warn, write_rows
from regauge.cli.training_output import tell_training, training_output
from regauge.hub import open_model
from regauge.names import VERSION
from regauge.report.predictor_page import predictor_page
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
                **run_of(options, chosen, place),
                inputs=inputs,
                progress=progress,
            )
        page, numbers = place.beside
        save_text(json.dumps(results_of(made, options), indent=1) + "\n", numbers)
        save_text(predictor_page(numbers), page)
        made.save(place.path, overwrite=place.overwrite)
    tell(made.verdict, verdict=made.verdict, is_informed=made.is_informed)
    tell_training(made.about, made.trained, of=f"{options.target!r} of ")
    tell_written(options.output, page, numbers)


def predict(options: LearnPredict) -> None:
    """Print or write predictions."""
    if options.output is not None:
        require_writable(options.output, overwrite=options.overwrite, suffixes=(".csv",))
    with show_status("reading"):
        rows = [row for path in require_named(options.networks) for row in _predictions(options, path)]
    if options.output is None:
        tell_table("predictions", rows)
    else:
        write_rows(rows, options.output)
        tell_written(options.output)


def _predictions(options: LearnPredict, path: Path) -> Iterator[dict[str, Any]]:
    """A row for each network of a store, or for a checkpoint."""
    named = read_networks(path, options.checkpoints)
    networks = named.networks
    module = None
    if options.predictor.is_file() and needs_modules(options.predictor):
        if options.model is not None:
            module = open_model(options.model).module
        elif named.store is not None:
            module = named.store.architecture.module()
        else:
            raise UsageError(
                f"{str(options.predictor)!r} runs the networks on probes; name their architecture: --model"
            )
    made = learn.load_predictor(options.predictor, module=module)
    if not made.is_informed:
        warn(made.verdict)
    try:
        predicted = made.predict(networks).tolist()
    except ValueError as error:
        raise UsageError(f"{str(path)!r}: {error}") from error
    sure = made.probabilities(networks).amax(1).tolist() if made.target.kind == "classes" else None
    for k, row in enumerate(named.rows):
        yield {**row, made.target.name: predicted[k], **({} if sure is None else {"probability": sure[k]})}


def config_of(options: LearnPredictor) -> learn.PredictorConfig:
    """The settings that were typed."""
    return learn.PredictorConfig(**net_settings_of(options, learn.PredictorConfig), probes=probes_of(options.probes))


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
        "verdict": made.verdict,
        "is_informed": made.is_informed,
        "history": [dict(row) for row in made.trained.history],
        "best": made.trained.best,
        "ended": made.trained.ended,
        "tested": {name: values.tolist() for name, values in made.tested.items()},
    }

"""`regauge learn`: train nets that read networks, and use the trained nets."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

from regauge import learn
from regauge.cli.learn_autoencoder import COMMANDS as AUTOENCODER
from regauge.cli.learn_matching import matching
from regauge.cli.learn_options import LearnMatching, LearnPredictor
from regauge.cli.learn_settings import inputs_of, net_settings_of, networks_of, run_of, sizes_of
from regauge.cli.options import UsageError
from regauge.cli.output import show_progress, show_status, tell, tell_written, warn
from regauge.cli.result_files import require_table, tell_or_write_rows
from regauge.cli.trained_net_options import LearnPredict
from regauge.cli.training_output import require_named, tell_chosen, tell_training, training_output
from regauge.hub import open_model
from regauge.report import write_page
from regauge.storage import Store, read_networks


def predictor(options: LearnPredictor) -> None:
    """Train a predictor, and write it with a report."""
    config = config_of(options)
    with training_output(options, beside=(".html", ".json")) as place:
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
        write_page({"store": ", ".join(map(str, options.stores)), **made.results()}, place.beside[0])
        made.save(place.path, overwrite=place.overwrite)
    tell(made.verdict, verdict=made.verdict, is_informed=made.is_informed)
    tell_training(made, of=f"{options.target!r} of ")
    tell_written(options.output, *place.beside)


def predict(options: LearnPredict) -> None:
    """Print or write predictions."""
    require_table(options.output, overwrite=options.overwrite)
    with show_status("reading"):
        rows = [row for path in require_named(options.networks) for row in _predictions(options, path)]
    tell_or_write_rows("predictions", rows, options.output)


def _predictions(options: LearnPredict, path: Path) -> Iterator[dict[str, Any]]:
    """Yield a row with the prediction for each network of a store, or for a checkpoint."""
    named = read_networks(path, options.checkpoints)
    tell_chosen(len(named.rows), None if named.store is None else len(named.store), options.checkpoints)
    made = learn.load_predictor(options.predictor, make_module=lambda: _module(options, named.store))
    if not made.is_informed:
        warn(made.verdict)
    try:
        predicted = made.predict(named.networks).tolist()
    except ValueError as error:
        raise UsageError(f"{str(path)!r}: {error}") from error
    sure = made.probabilities(named.networks).amax(1).tolist() if made.target.kind == "classes" else None
    for k, row in enumerate(named.rows):
        yield {**row, made.target.name: predicted[k], **({} if sure is None else {"probability": sure[k]})}


def _module(options: LearnPredict, store: Store | None) -> nn.Module:
    """Return the module of networks that a net runs on probes."""
    if options.model is not None:
        return open_model(options.model).module
    if store is None:
        raise UsageError(f"{str(options.predictor)!r} runs networks on probes; name their architecture: --model")
    return store.architecture.module()


def config_of(options: LearnPredictor) -> learn.PredictorConfig:
    """Return the settings of a predictor that the user typed."""
    sizes = sizes_of(options.probes)
    if not sizes:
        raise UsageError(
            f"--probes {options.probes!r} cannot be read; give a number of inputs, or a grid such as 16x16"
        )
    probes = sizes if len(sizes) > 1 else sizes[0]
    return learn.PredictorConfig(**net_settings_of(options, learn.PredictorConfig), probes=probes)


COMMANDS = {LearnPredictor: predictor, LearnPredict: predict, LearnMatching: matching, **AUTOENCODER}

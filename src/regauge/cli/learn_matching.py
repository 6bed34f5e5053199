"""`regauge learn matching`: train a matcher on stores, as a method for `regauge align` and `regauge merge`."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

import regauge as rg
from regauge import learn
from regauge import weightspace as ws
from regauge.cli.align_options import Matching
from regauge.cli.config_options import settings_of
from regauge.cli.learn_options import LearnMatching
from regauge.cli.learn_settings import networks_of, run_of
from regauge.cli.options import UsageError
from regauge.cli.output import show_progress, show_status, tell, tell_written
from regauge.cli.training_output import tell_training, training_output
from regauge.connect import prepare_statistics
from regauge.hub import make_task, open_batches, open_model
from regauge.storage import Collection


def matching(options: LearnMatching) -> None:
    """Train a matcher, and write the matcher."""
    config = config_of(options)
    if config.probes and not options.data:
        raise UsageError("--probes needs inputs from --data, with which the probes are initialized: give --data")
    with training_output(options) as place:
        with show_status("reading the stores"):
            collection, chosen = networks_of(options)
            tasks = tasks_of(options, collection) if options.data else []
        with show_progress() as progress:
            made = learn.fit_matching(
                collection,
                config=config,
                task=tasks or None,
                **run_of(options, chosen, place),
                pair_by=options.pair_by or None,
                inputs=next(iter(tasks[0].batches))[0] if config.probes else None,
                progress=progress,
            )
        made.save(place.path, overwrite=place.overwrite)
    tell_training(made)
    tell(made.about["verdict"], sweeps=made.sweeps, share=made.share, verdict=made.about["verdict"])
    tell_written(options.output)


def tasks_of(options: LearnMatching, collection: Collection) -> list[rg.Task]:
    """Return a task for each set of tensor shapes in the stores."""
    batches = open_batches(options.data, options.examples)
    modules = [store.architecture.module() for store in collection.first_stores]
    tasks = (make_task(module, batches, loss=options.loss, dtype=torch.float32) for module in modules)
    return [prepare_statistics(task) for task in tasks]


def config_of(options: LearnMatching) -> learn.MatchingConfig:
    """Return the settings that the user typed."""
    settings: dict[str, Any] = settings_of(options, learn.MatchingConfig)
    if options.layer not in ws.LAYERS:
        raise UsageError(f"there is no layer {options.layer!r}; choose from {', '.join(ws.LAYERS)}")
    if options.layer != "propagation":  # which has a default of its own here
        settings["layer"] = ws.LAYERS[options.layer]()
    return learn.MatchingConfig(**settings)


def read_matcher(path: Path | None, options: Matching) -> learn.LearnedMatching:
    """Return the matcher in a file, with the model of the networks if the matcher runs them on probes."""
    if path is None:
        raise UsageError("the method 'learned' needs a trained matcher: give --matcher FILE (`regauge learn matching`)")

    def module() -> nn.Module:
        if options.model is None:
            raise UsageError(f"{str(path)!r} runs networks on probes; name their architecture: --model")
        return open_model(options.model).module

    return learn.load_matching(path, make_module=module)

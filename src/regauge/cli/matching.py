"""What commands that align have in common: checkpoints with their symmetry, the task, and the method."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from torch import nn

import regauge as rg
from regauge.alignment import Method
from regauge.cli.batches import dtype_of, load_batches, task_of, with_reset
from regauge.cli.discover import find
from regauge.cli.errors import UsageError
from regauge.cli.models import inr_of, load_model, self_described
from regauge.cli.options import Matching
from regauge.cli.signals import is_signal_data, signal_task
from regauge.core.params import Params, require_same_shapes
from regauge.storage.checkpoints.checkpoint import Checkpoint
from regauge.storage.checkpoints.names import match

NEED_DATA = ("activations", "mixed", "straight-through")


def read_checkpoints(
    options: Matching, paths: Sequence[Path], console: Console
) -> tuple[rg.Symmetry, nn.Module | None, list[Checkpoint]]:
    """Read checkpoints of one architecture, with its symmetry and, where the options name it, its model."""
    module = None
    with console.status("reading the checkpoints"):
        networks = [Checkpoint.open(path) for path in paths]
        for network in networks:
            network.params  # noqa: B018 (reads them)
    name = model_of(options, networks[0])
    if name is not None:
        with console.status("building the model"):
            model = load_model(name, options.inputs, values="if small" if options.data is None else "always")
        module = model.module
        state = module.state_dict()
        networks = [one.with_params(match(one.params, state, one.label)) for one in networks]
    if options.symmetry is not None:
        symmetry = symmetry_file(options.symmetry)
        for network in networks[1:]:
            require_same_shapes(networks[0].params, network.params)
    elif name is None:
        raise UsageError("the symmetry is unknown: name the model with --model, or give --symmetry FILE.json")
    else:
        with console.status("tracing the model"):
            symmetry = find(model, options.inputs)
    return symmetry.bind(networks[0].params), module, networks


def model_of(options: Matching, first: Checkpoint) -> str | None:
    """MODEL, or the first checkpoint where that says itself what it is and nothing else is said."""
    if options.model is None and options.symmetry is None:
        return self_described(Path(first.label))
    return options.model


def symmetry_file(path: Path) -> rg.Symmetry:
    """The symmetry that `regauge discover -o` wrote."""
    if not path.is_file():
        raise UsageError(f"there is no symmetry {str(path)!r}; `regauge discover MODEL -o {path.name}` writes one")
    return rg.Symmetry.from_json(path.read_text(encoding="utf-8"))


def task_for(options: Matching, module: nn.Module | None, params: Params, first: Checkpoint) -> rg.Task | None:
    """The model on the data of the options, if there are any; `first` is the checkpoint that may be its own model."""
    if options.data is None:
        return None
    if module is None:
        raise UsageError("--data needs the model that runs on them: name it with --model")
    inr = inr_of(model_of(options, first))
    if inr is not None and is_signal_data(options.data):
        return signal_task(inr, module, options.data, loss=options.loss, dtype=dtype_of(params))
    batches = load_batches(options.data, options.batch)
    outputs = options.inputs.outputs
    return with_reset(task_of(module, batches, loss=options.loss, outputs=outputs, dtype=dtype_of(params)))


def method_of(options: Matching) -> Method:
    """The method that the options ask for."""
    if options.restarts and options.method not in ("auto", "weights", "frank-wolfe"):
        raise UsageError(f"--restarts is for matching weights; the method {options.method!r} has none")
    if options.data is None and options.method in NEED_DATA:
        raise UsageError(f"the method {options.method!r} needs data: give --data, or choose another one with --method")
    if options.refine and options.data is None:
        raise UsageError("--refine lowers the loss halfway between A and B, which needs data: give --data")
    method = _chosen(options)
    return rg.Sinkhorn(loss="midpoint", init=method) if options.refine else method


def _chosen(options: Matching) -> Method:
    weights = rg.WeightMatching(restarts=options.restarts, scales=options.scales)
    match options.method:
        case "auto" if options.data is None or options.restarts:
            return weights
        case "weights":
            return weights
        case "auto" | "mixed":
            return rg.MixedMatching(scales=options.scales)
        case "activations":
            return rg.ActivationMatching(scales=options.scales)
        case "frank-wolfe":
            return rg.FrankWolfe(restarts=options.restarts, scales=options.scales)
        case "straight-through":
            return rg.StraightThrough(init=weights)
        case "sinkhorn":
            return rg.Sinkhorn(loss="l2" if options.data is None else "midpoint", init=weights)

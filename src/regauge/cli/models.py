"""The model and the networks that the options of a command name."""

from collections.abc import Callable, Sequence
from pathlib import Path

from regauge import Checkpoint, Symmetry
from regauge.cli.options import ExampleInputs, ModelOptions, UsageError
from regauge.cli.output import show_status, tell_notes
from regauge.hub import Model, Networks, Values, name_model, open_model, open_networks, read_symmetry


def find_model(
    text: str | None,
    checkpoint: Checkpoint,
    inputs: ExampleInputs,
    *,
    values: Values = "if small",
) -> Model | None:
    """Return the model that the user named or that a checkpoint describes. Return None if the model is unknown."""
    name = name_model(checkpoint) if text is None else text
    if name is None:
        return None
    return open_model(name, **vars(inputs), values=values)


def require_model(
    text: str | None, checkpoint: Checkpoint, inputs: ExampleInputs, *, values: Values = "if small"
) -> Model:
    """Return the model of a command. Raise an error if the model is unknown."""
    model = find_model(text, checkpoint, inputs, values=values)
    if model is None:
        raise UsageError(f"the model of {checkpoint.label!r} is unknown: name it with --model")
    return model


def read_networks(
    options: ModelOptions,
    paths: Sequence[Path | Checkpoint],
    *,
    values: Values = "if small",
    is_streamed: bool | Callable[[Symmetry], bool] = False,
    model: Model | None = None,
) -> Networks:
    """Open checkpoints of one architecture with the tensor names of their model, and report what tracing left out."""
    checkpoints = [Checkpoint.open(path) for path in paths]
    values = "never" if is_streamed is True else values
    if model is None and (options.model is not None or options.symmetry is None):
        model = find_model(options.model, checkpoints[0], options.inputs, values=values)
    symmetry = None if options.symmetry is None else read_symmetry(options.symmetry)
    with show_status("building and tracing the model, and reading the checkpoints"):
        found = open_networks(checkpoints, model, symmetry=symmetry, streamed=is_streamed)
        if model is not None and values == "always":
            _ = model.module  # built now: its folder may be a temporary one
    tell_notes(found.notes)
    return found

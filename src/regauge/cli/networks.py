"""Checkpoints on the command line: read under the names of their model, with its symmetry."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import regauge as rg
from regauge.cli.models import Model, Values, load_model, name_model
from regauge.cli.options import Canonicalize, Matching, UsageError
from regauge.cli.progress import show_status
from regauge.core.params import require_same_shapes
from regauge.storage.checkpoints.checkpoint import Checkpoint
from regauge.storage.checkpoints.names import match

Outputs = Callable[[Any], Any] | Sequence[str] | None
"""The outputs of a model that must not change; all unless given."""


@dataclass(frozen=True)
class Networks:
    """Checkpoints of one architecture, their symmetry with every size known, and their model where it is known.

    Checkpoints in memory have the names of the model.
    """

    checkpoints: tuple[Checkpoint, ...]
    symmetry: rg.Symmetry
    model: Model | None


def read_networks(
    options: Matching | Canonicalize,
    paths: Sequence[Path | Checkpoint],
    *,
    values: Values = "if small",
    is_streamed: bool = False,
) -> Networks:
    """Read checkpoints of one architecture, or their headers if they are streamed, and find their symmetry."""
    checkpoints = [Checkpoint.open(path) for path in paths]
    name = name_model(options.model, checkpoints[0]) if options.symmetry is None else options.model
    if name is None and options.symmetry is None:
        raise UsageError("the symmetry is unknown: name the model with --model, or give --symmetry FILE.json")
    if not is_streamed:
        with show_status("reading the checkpoints"):
            checkpoints = [one.with_params(one.params) for one in checkpoints]
    built = None
    if name is not None:
        with show_status("building the model"):
            built = load_model(name, options.inputs, values="never" if is_streamed else values)
        state = built.module.state_dict()
        if is_streamed:
            match(checkpoints[0].on_meta(), state, checkpoints[0].label)
        else:
            checkpoints = [one.with_params(match(one.params, state, one.label)) for one in checkpoints]
    for other in [] if is_streamed else checkpoints[1:]:
        require_same_shapes(checkpoints[0].params, other.params)
    if options.symmetry is not None:
        found = read_symmetry(options.symmetry)
    else:
        assert built is not None
        with show_status("tracing the model"):
            found = find_symmetry(built, options.inputs.outputs)
    return Networks(tuple(checkpoints), found.bind(checkpoints[0].on_meta()), built)


def find_symmetry(model: Model, outputs: Outputs, *, verify: bool | None = None) -> rg.Symmetry:
    """The symmetry of a model whose outputs were chosen on the command line."""
    try:
        return rg.discover(model.module, model.inputs, model.kwargs, outputs=outputs or None, verify=verify)
    except rg.TraceError as error:
        raise UsageError(str(error)) from error


def read_symmetry(path: Path) -> rg.Symmetry:
    """The symmetry that `regauge discover -o` wrote."""
    if not path.is_file():
        raise UsageError(f"there is no symmetry {str(path)!r}; `regauge discover MODEL -o {path.name}` writes one")
    return rg.Symmetry.from_json(path.read_text(encoding="utf-8"))

"""Checkpoints of one architecture under equal tensor names, with their common symmetry."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

from torch import Tensor

from regauge.checkpoints.checkpoint import Checkpoint
from regauge.checkpoints.formats.state_dicts import has_names, match
from regauge.checkpoints.names.from_transformers import expected_of, name_by, name_for, share
from regauge.checkpoints.names.prefixes import unwrap
from regauge.core.arguments import check_arguments
from regauge.core.params import Params
from regauge.core.symmetry import Symmetry
from regauge.hub.build_model import name_model
from regauge.hub.model import Model, open_model
from regauge.hub.symmetry_cache import name_once

Named: TypeAlias = tuple[Checkpoint, Mapping[str, Tensor] | None]
"""A checkpoint under the names of its model, and the tensors that the checkpoint must have, if they are known."""


@dataclass(frozen=True)
class Networks:
    """Networks of one architecture, opened by `open_networks`.

    Attributes:
        checkpoints: The networks. Each network is a mapping from the names of the model to tensors.
        symmetry: The symmetry of the networks, with every size known.
        model: The model of the networks; None if the caller gave only the symmetry.
        notes: Messages about submodels that tracing left out.
    """

    checkpoints: tuple[Checkpoint, ...]
    symmetry: Symmetry
    model: Model | None
    notes: tuple[str, ...] = ()


@check_arguments
def open_networks(
    paths: Sequence[str | Path | Checkpoint],
    model: Model | str | Path | None = None,
    *,
    symmetry: Symmetry | None = None,
    streamed: bool | Callable[[Symmetry], bool] = False,
) -> Networks:
    """Open checkpoints of one architecture under the tensor names of their model, and find the symmetry.

    Args:
        paths: The checkpoints: files, folders, BASE+ADAPTER, or hub models in the cache on this machine.
        model: The model of the checkpoints, or its name. By default, the first checkpoint determines the model. If
            `model` is not given, the first checkpoint must be a folder with config.json, or have a header that
            describes the network.
        symmetry: The symmetry to use instead of the symmetry of the model.
        streamed: Whether tensors stay on the disk and are read one by one. A function decides whether tensors stay on
            the disk, given the symmetry.

    Raises:
        FileNotFoundError: A checkpoint does not exist.
        ValueError: The symmetry is unknown, a checkpoint is damaged, or a checkpoint is not a network of the model.
    """
    checkpoints = [Checkpoint.open(path) for path in paths]
    if model is None and symmetry is None:
        model = name_model(checkpoints[0])
    if model is not None and not isinstance(model, Model):
        model = open_model(model, values="never" if streamed is True else "if small")
    found = symmetry
    notes: tuple[str, ...] = ()
    if found is None and model is None:
        if not checkpoints[0].is_adapter:
            raise ValueError("the symmetry is unknown: name the model with `model=`, or give `symmetry=...`")
        from regauge.checkpoints.formats.adapters import adapter_symmetry

        found = adapter_symmetry(checkpoints[0].on_meta())
    if model is None:
        assert found is not None
        named: Sequence[Named] = [(name_by(one, found), None) for one in checkpoints]
    else:
        if found is None:
            found, state, notes = model.symmetry, model.traced.state, model.traced.notes
        else:
            state = model.module.state_dict()
        named = _name_all([_unwrap(one, state) for one in checkpoints], model, state)
    streamed = streamed(found) if callable(streamed) else streamed
    first, *others = _share(named, streamed=streamed)
    if streamed:
        match(first.on_meta(), named[0][1] or first.on_meta(), first.label)
    else:
        for other in others:
            match(other.on_meta(), first.on_meta(), other.label, first.label)
    return Networks((first, *others), found.bind(first.on_meta()), model, notes)


def read_symmetry(path: str | Path) -> Symmetry:
    """Read the symmetry that `regauge discover -o` wrote to a file.

    Raises:
        ValueError: The file does not exist, or does not contain a symmetry.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"there is no symmetry {str(path)!r}; `regauge discover MODEL -o {path.name}` writes one")
    try:
        return Symmetry.from_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        reason = "it is no text in UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
        raise ValueError(
            f"{str(path)!r} is no symmetry ({reason}); `regauge discover MODEL -o {path.with_suffix('.json').name}` "
            "writes one"
        ) from error


def open_checkpoints(paths: Sequence[str | Path | Checkpoint], model: Model) -> tuple[Checkpoint, ...]:
    """Open checkpoints under the tensor names of their model, with all tensors in memory, without tracing the model.

    Raises:
        FileNotFoundError: A checkpoint does not exist.
        ValueError: A checkpoint is damaged, or is not a network of the model.
    """
    state = model.module.state_dict()
    named = [name_for(_unwrap(Checkpoint.open(path), state), model.module) for path in paths]
    return tuple(_share([(one, expected_of(model.module, one)) for one in named]))


def _unwrap(checkpoint: Checkpoint, state: Params) -> Checkpoint:
    """Return a checkpoint without prefixes that training scripts add to tensor names, such as `module.`."""
    return checkpoint if checkpoint.stored.keys() == state.keys() else unwrap(checkpoint, state.keys())


def _share(named: Sequence[Named], *, streamed: bool = False) -> Iterator[Checkpoint]:
    """Return checkpoints with their model's tensors in the model's order. The checkpoints do not change if tensors stay
    on the disk.
    """
    for view, (_, expected) in zip(share([one for one, _ in named]), named, strict=True):
        yield view if streamed else view.with_params(match(view.params, expected or view.params, view.label))


def _name_all(checkpoints: Sequence[Checkpoint], model: Model, state: Params) -> Sequence[Named]:
    """Return checkpoints under the names of a model. The model is built only if needed."""
    if all(has_names(one.on_meta(), state) for one in checkpoints):
        return [(one, state) for one in checkpoints]

    def find(checkpoint: Checkpoint) -> tuple[Checkpoint, Mapping[str, Tensor]]:
        named = name_for(checkpoint, model.blank)
        return named, expected_of(model.blank, named)

    return [name_once(model.name, one, state, partial(find, one), retrace=model.retrace) for one in checkpoints]

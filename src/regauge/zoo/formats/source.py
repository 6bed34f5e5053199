"""What an importer finds: networks in blocks, with a row for each, and how to build their module."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regauge.core.params import Params
from regauge.core.symmetry import Symmetry
from regauge.discover import discover
from regauge.zoo.architecture import Architecture, layout_of
from regauge.zoo.store import Store

BLOCK = 512
"""Networks of a block at most."""
BLOCK_BYTES = 64 * 2**20
"""Values of a block at most, in bytes."""


class Block(NamedTuple):
    """Some networks, stacked, and a row for each."""

    params: Params
    rows: list[dict[str, Any]]


@dataclass(frozen=True)
class Source:
    """A population that comes from somewhere else.

    Attributes:
        architecture: Of all its networks.
        blocks: The networks, in an order that does not change.
        inputs: Example inputs of the module, with which its symmetry is found; None if they are not known.
        about: What is known of the whole, as plain JSON.
    """

    architecture: Architecture
    blocks: Iterable[Block]
    inputs: tuple[Any, ...] | None = None
    about: Mapping[str, Any] = field(default_factory=dict)


def import_zoo(
    source: Source,
    folder: str | Path,
    *,
    symmetry: Symmetry | None = None,
    storage: str | None = None,
    watch: Callable[[int], None] = lambda count: None,
) -> Store:
    """Write a population into a store; a second call goes on where an earlier one stopped.

    A network with NaN or Inf is kept and marked in the column "is_finite".

    Args:
        source: From one of the importers.
        folder: Of the store.
        symmetry: Of the architecture; it is discovered unless given, where the architecture has a module and example
            inputs.
        storage: As for `Store.create`.
        watch: Is told after each block how many networks it had.

    Raises:
        FileExistsError: The folder holds another store, or other files.
        ValueError: A network does not fit the others.
    """
    if symmetry is None and source.inputs is not None and source.architecture.factory is not None:
        symmetry = discover(source.architecture.module().eval(), source.inputs)
    store = Store.create(folder, source.architecture, symmetry, storage=storage, about=source.about)
    for number, block in enumerate(source.blocks):
        name = f"import-{number:06d}"
        if not store.has(name):
            store.append(block.params, block.rows, name=name)
        watch(len(block.rows))
    store.refresh()
    return store


def stacked(networks: Iterable[tuple[Params, dict[str, Any]]], architecture: Architecture) -> Iterator[Block]:
    """Blocks of single networks.

    Raises:
        ValueError: A network has not the tensors of the architecture.
    """
    size = max(1, min(BLOCK, BLOCK_BYTES // max(1, 4 * architecture.size)))
    layout = {spec.name: (spec.shape, spec.dtype) for spec in architecture.layout}
    params: list[Params] = []
    rows: list[dict[str, Any]] = []
    for network, row in networks:
        found = {spec.name: (spec.shape, spec.dtype) for spec in layout_of(network)}
        if found != layout:
            name = next(n for n in (*layout, *found) if layout.get(n) != found.get(n))
            raise ValueError(
                f"{row.get('file', row['id'])!r} has {_words(found.get(name))} as {name!r}, but the first network or "
                f"the model has {_words(layout.get(name))}; import networks of one architecture at a time"
            )
        params.append(network)
        rows.append(row)
        if len(rows) == size:
            yield Block(_stack(params, architecture), rows)
            params, rows = [], []
    if rows:
        yield Block(_stack(params, architecture), rows)


def _stack(params: list[Params], architecture: Architecture) -> Params:
    return {spec.name: torch.stack([network[spec.name] for network in params]) for spec in architecture.layout}


def _words(spec: tuple[tuple[int, ...], torch.dtype] | None) -> str:
    return "nothing" if spec is None else f"shape {spec[0]} of {str(spec[1]).removeprefix('torch.')}"


def renamed(params: Mapping[str, Tensor], names: Mapping[str, str]) -> Params:
    """The same tensors under the names of the module that computes what they are for."""
    return {names.get(name, name): tensor for name, tensor in params.items()}

"""Encoding and decoding of networks in files: tables of latent vectors, and stores of decoded networks."""

import csv
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regauge.core.params import round_to
from regauge.learn.autoencoder import Autoencoder
from regauge.storage.collection import Kept
from regauge.storage.named_networks import NamedNetworks, read_networks
from regauge.storage.store import Store
from regauge.weightspace.metanet import Metanet

COLUMNS = {"network": "", "id": "", "step": ""}
"""Columns of a table of networks. They are empty for a checkpoint, which has no id and no step."""
NETWORKS_OF_A_SHARD = 512
"""The number of decoded networks in one shard."""


def encode_paths(
    autoencoder: Autoencoder, paths: Iterable[str | Path], checkpoints: Kept = "last"
) -> list[dict[str, Any]]:
    """Return a table of latent vectors: one row per network in the paths, with columns z0, z1, ...

    Args:
        autoencoder: The autoencoder.
        paths: Folders of stores, or paths of checkpoints.
        checkpoints: The checkpoints of a store that are read; see `regauge.storage.read_networks`.

    Raises:
        ValueError: The autoencoder does not accept the networks at a path.
    """
    table = []
    for path in paths:
        named = read_networks(path, checkpoints)
        for row, latent in zip(named.rows, _encode(autoencoder, named, path).tolist(), strict=True):
            table.append({**COLUMNS, **row, **{f"z{k}": value for k, value in enumerate(latent)}})
    return table


def decode_store(autoencoder: Autoencoder, source: str | Path, output: str | Path, checkpoints: Kept = "last") -> Store:
    """Write a new store of decoded networks.

    Args:
        autoencoder: The autoencoder.
        source: The folder of a store, or a .csv table of latent vectors, such as `encode_paths` returns.
        output: The path of a new folder.
        checkpoints: The checkpoints of a store that are read.

    Raises:
        FileExistsError: The folder exists.
        ValueError: The autoencoder has no architecture, or does not accept the networks. Or the table contains no
            latent vectors.
    """
    source, output = Path(source), Path(output)
    if source.suffix == ".csv":
        if autoencoder.architecture is None or not isinstance(autoencoder.encoder, Metanet):
            raise ValueError(
                "the autoencoder was trained on networks of no store, and their architecture has no name; call "
                "`Autoencoder.decode`"
            )
        latents, rows = _read_latents(source)
        architecture, symmetry = autoencoder.architecture, autoencoder.encoder.symmetries[0]
    else:
        named = read_networks(source, checkpoints)
        store = Store.open(source) if named.store is None else named.store
        architecture, symmetry = store.architecture, store.require_symmetry()
        latents, rows = _encode(autoencoder, named, source), named.known
    if output.exists():
        raise FileExistsError(f"{str(output)!r} exists; name a new folder")
    target = Store.create(output, architecture, symmetry, about={"kind": "decoded", "from": str(source)})
    dtypes = {spec.name: spec.dtype for spec in architecture.layout}
    for start in range(0, len(rows), NETWORKS_OF_A_SHARD):
        part = slice(start, start + NETWORKS_OF_A_SHARD)
        made = autoencoder.decode(latents[part])
        target.append({name: round_to(tensor, dtypes[name], name) for name, tensor in made.items()}, rows[part])
    return target


def nearest_paths(
    autoencoder: Autoencoder,
    paths: Iterable[str | Path],
    among: str | Path,
    *,
    count: int = 5,
    checkpoints: Kept = "last",
) -> list[dict[str, Any]]:
    """Return a table of the networks most similar to each given network: `count` rows per network, nearest first.

    Raises:
        ValueError: `count` is less than 1, or the autoencoder does not accept the networks.
    """
    if count < 1:
        raise ValueError(f"`count={count}`: it is at least 1")
    others = read_networks(among, checkpoints)
    table: list[dict[str, Any]] = []
    for path in paths:
        named = read_networks(path, checkpoints)
        try:
            found = autoencoder.nearest(named.networks, others.networks, count=count)
        except ValueError as error:
            raise ValueError(f"{str(path)!r} or {str(among)!r}: {error}") from error
        for row, numbers, distances in zip(named.rows, *(one.tolist() for one in found), strict=True):
            table += [
                {**COLUMNS, **row, "rank": k + 1, **_columns_of(others.rows[number]), "distance": distance}
                for k, (number, distance) in enumerate(zip(numbers, distances, strict=True))
            ]
    return table


def _columns_of(row: Mapping[str, Any]) -> dict[str, Any]:
    return {"nearest": row["id"], "of step": row["step"]}


def _encode(autoencoder: Autoencoder, named: NamedNetworks, path: str | Path) -> Tensor:
    try:
        return autoencoder.encode(named.networks)
    except ValueError as error:
        raise ValueError(f"{str(path)!r}: {error}") from error


def _read_latents(path: Path) -> tuple[Tensor, list[dict[str, Any]]]:
    """Return the latent vectors in a table, and an id for each row."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    names = [name for name in (rows[0] if rows else {}) if name[:1] == "z" and name[1:].isdecimal()]
    if not names:
        raise ValueError(f"{str(path)!r} has no columns z0, z1 and so on; `regauge learn encode` writes such a table")
    try:
        values = torch.tensor([[float(row[name] or "") for name in names] for row in rows])
    except ValueError as error:
        raise ValueError(
            f"{str(path)!r} has a latent vector that is no row of numbers ({error}); write the table again"
        ) from error
    return values, [{"id": k, "step": 0} for k in range(len(rows))]

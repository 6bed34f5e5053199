"""Autoencoders of networks in files: training results, tables of latent vectors, and stores of decoded networks."""

import csv
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regauge.core.params import round_to
from regauge.core.task import Task
from regauge.learn.autoencoder import Autoencoder
from regauge.learn.populations import spread
from regauge.learn.running import Runner
from regauge.names import VERSION
from regauge.storage.collection import Collection, Kept
from regauge.storage.named_networks import NamedNetworks, read_networks
from regauge.storage.store import Store
from regauge.weightspace.heads.invariant import Invariant
from regauge.weightspace.metanet import Metanet

COLUMNS = {"network": "", "id": "", "step": ""}
"""Columns of a table of networks. Each column is empty by default, because a checkpoint has no id and no step."""
NETWORKS_OF_A_SHARD = 512
"""The number of decoded networks in one shard."""
SHOWN = 10
"""The number of networks whose outputs the results show next to the outputs of their reconstructions."""
SHOWN_POINTS = 3000
"""The largest number of outputs, and of latent vectors, that the results contain."""


def autoencoder_results(
    autoencoder: Autoencoder,
    collection: Collection,
    inputs: Any,
    *,
    grid: tuple[int, ...] | None = None,
    color: str | None = None,
) -> dict[str, Any]:
    """Return the results of a training run: the training history, the scores, and the decoded test networks.

    `regauge.report.write_page` renders these results as a page.

    Args:
        autoencoder: The result of `fit_autoencoder`.
        collection: The stored networks on which the autoencoder was trained.
        inputs: The inputs on which networks are compared.
        grid: The height and width of the pixel grid, if the inputs are the pixels of an image. If a grid is given, the
            outputs are shown as images.
        color: The column that determines the colors in the map of latent vectors.

    Raises:
        KeyError: The stores have no column with the name `color`.
        ValueError: The autoencoder was loaded from a file, which does not record the test networks.
    """
    trained, tested, encoder = autoencoder.trained, autoencoder.tested, autoencoder.encoder
    head = encoder.settings.head if isinstance(encoder, Metanet) else None
    if trained is None or tested is None or not isinstance(encoder, Metanet) or not isinstance(head, Invariant):
        raise ValueError(
            "an autoencoder from a file has no results; those of its training were written next to it: read that file"
        )
    modules = {"encoder": encoder, "decoder": autoencoder.decoder}
    return {
        "format": "regauge.autoencoder",
        "version": VERSION,
        "parts": list(encoder.parts),
        "latent": head.outputs,
        "loss": "divergence" if "loss" in autoencoder.about["scores"]["autoencoder"] else "squared error",
        "parameters": {name: sum(p.numel() for p in module.parameters()) for name, module in modules.items()},
        **autoencoder.about,
        "history": [dict(row) for row in trained.history],
        "best": trained.best,
        "ended": trained.ended,
        "latents": _map(autoencoder, collection, color),
        **_outputs(autoencoder, collection, inputs, grid),
    }


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
        ValueError: The autoencoder does not record an architecture, or does not accept the networks. The error is also
            raised if the table contains no latent vectors.
    """
    source, output = Path(source), Path(output)
    if source.suffix == ".csv":
        if autoencoder.architecture is None or not isinstance(autoencoder.encoder, Metanet):
            raise ValueError(
                "the autoencoder was not trained on a store, so it does not know the architecture; call "
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
            f"{str(path)!r} has a row that is not a latent vector ({error}); write the table again"
        ) from error
    return values, [{"id": k, "step": 0} for k in range(len(rows))]


def _map(autoencoder: Autoencoder, collection: Collection, color: str | None) -> dict[str, Any]:
    """Return the latent vectors of test networks, projected to their two principal axes, and the color column."""
    assert autoencoder.tested is not None
    chosen = autoencoder.tested[:SHOWN_POINTS]
    latents = autoencoder.encode(collection.read(chosen)).double()
    centered = latents - latents.mean(0)
    _, sizes, axes = torch.linalg.svd(centered, full_matrices=False)
    column = collection.column(color)[chosen].tolist() if color else []
    values = [float(v) if isinstance(v, float) else v for v in column]
    points = (centered @ axes[:2].T).tolist() if len(sizes) > 1 else [[x, 0.0] for x in centered[:, 0].tolist()]
    share = float(sizes[:2].square().sum() / sizes.square().sum().clamp_min(1e-30))
    return {"points": points, "labels": values, "share": share, "column": color or ""}


@torch.no_grad()
def _outputs(
    autoencoder: Autoencoder, collection: Collection, inputs: Any, grid: tuple[int, ...] | None
) -> dict[str, Any]:
    """Return the outputs of some test networks and of their reconstructions, as images if the inputs are a grid."""
    assert autoencoder.tested is not None
    chosen = spread(autoencoder.tested, SHOWN)
    networks = collection.read(chosen)
    member = collection.members[0]
    assert isinstance(member, Store)
    runner = Runner(Task(member.architecture.module(), ()))
    outputs = [runner.outputs(one, inputs).double() for one in (networks, autoencoder.canonicalize(networks))]
    if grid is not None and len(grid) == 2:
        originals, decoded = (one.reshape(len(chosen), *grid, -1).round(decimals=4).tolist() for one in outputs)
        return {"pictures": {"originals": originals, "decoded": decoded}, "outputs": None}
    flat = [one.flatten() for one in outputs]
    places = torch.linspace(0, len(flat[0]) - 1, min(SHOWN_POINTS, len(flat[0]))).long()
    originals, decoded = (one[places].tolist() for one in flat)
    return {"pictures": None, "outputs": {"originals": originals, "decoded": decoded}}

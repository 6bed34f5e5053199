"""Export of stores to files that other programs read."""

import gzip
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from regauge.checkpoints.writing import save, save_bytes, whole_file
from regauge.core.params import Params, select
from regauge.core.progress import Progress, no_progress
from regauge.storage import Store
from regauge.storage.architecture import Architecture
from regauge.training.chains.chain_steps import steps_of
from regauge.training.chains.vector_chain import Link, links_of
from regauge.zoo.formats.folder import OMEGA
from regauge.zoo.formats.matrix_zoos import LAYOUT, METRICS, WEIGHTS, Variable, table_bytes
from regauge.zoo.formats.modules import MIDDLE, ImageSiren
from regauge.zoo.formats.zoo_source import BLOCK_NETWORKS, ROW


def export_safetensors(
    store: Store, folder: str | Path, indices: Sequence[int], *, progress: Progress = no_progress
) -> None:
    """Write one safetensors file per network, `{id}-{step}.safetensors`, with its metadata row as JSON in the header.

    Raises:
        ValueError: Two networks have the same id and step.
    """
    chosen = np.asarray(indices, np.int64)
    keys = set(zip(*(store.rows[name][chosen].tolist() for name in ("id", "step")), strict=True))
    if len(keys) < len(chosen):
        raise ValueError(
            "two networks have the same id and step, so their files would have the same name; export them separately"
        )
    folder = _create(folder)
    for params, rows in _blocks(store, indices, progress):
        for k, row in enumerate(rows):
            save(select(params, k), folder / f"{row['id']}-{row['step']}.safetensors", metadata={ROW: json.dumps(row)})


def export_npy(store: Store, folder: str | Path, indices: Sequence[int], *, progress: Progress = no_progress) -> None:
    """Write `weights.npy` with a row per network, `layout.csv` with the columns of each tensor, and `rows.csv`.

    Raises:
        ValueError: A tensor is not floating point.
    """
    folder = _create(folder)
    rows = _write_matrix(
        store, folder, indices, [(spec.name, spec.shape) for spec in store.architecture.layout], progress
    )
    save_bytes(table_bytes(rows), folder / "rows.csv")


def export_small_cnn_zoo(
    store: Store, folder: str | Path, indices: Sequence[int], *, progress: Progress = no_progress
) -> None:
    """Write files in the format of the small CNN zoo: weights with kernels in TensorFlow's order, metrics and layout.

    Each layer has a kernel and a bias, in the order of the state dictionary. Weights with four axes are written as
    convolutions.

    Raises:
        ValueError: A tensor is neither a weight with 2 or 4 axes nor a bias, or is not floating point.
    """
    folder, named = _create(folder), []
    for spec in store.architecture.layout:
        place, _, kind = spec.name.rpartition(".")
        if (kind, len(spec.shape)) not in (("weight", 2), ("weight", 4), ("bias", 1)):
            raise ValueError(
                f"{spec.name!r} of shape {spec.shape} is not a kernel or bias of a layer, which the format of the "
                "small CNN zoo needs; export as npy instead"
            )
        shape = (*spec.shape[2:], *spec.shape[1::-1]) if kind == "weight" else spec.shape
        named.append((f"{place}/{'kernel' if kind == 'weight' else 'bias'}:0", shape))
    rows = _write_matrix(store, folder, indices, named, progress)
    activation = store.architecture.settings.get("activation")
    known = {} if not isinstance(activation, str) else {"config.activation": activation}
    metrics = table_bytes([{"modeldir": str(row["id"])} | known | row for row in rows])
    save_bytes(gzip.compress(metrics, mtime=0), folder / METRICS)  # equal rows give equal bytes


def export_dwsnets(
    store: Store, folder: str | Path, indices: Sequence[int], *, progress: Progress = no_progress
) -> None:
    """Write DWSNets' folders: `networks_{split}_{label}_{number}/checkpoints/model_final.pth`, and `splits.json`.

    Layer numbers increase by one in sine networks and by two in ReLU networks. Programs that read DWSNets' sine
    networks add 1/2 to the output of each network. If the function of a network does not include the addition of 1/2,
    1/2 is subtracted from the last bias, so the function stays the same. The label is the column "label". The split is
    the column "split" or, without a column "split", the split of the store.

    Raises:
        ValueError: The networks are not chains of linear layers with ReLU or with sines of frequency 30, or have no
            labels.
    """
    links, stride, shift = _chain(store.architecture)
    last = links[-1].bias
    names = {link.weight: f"seq.{k * stride}.weight" for k, link in enumerate(links)}
    names |= {link.bias: f"seq.{k * stride}.bias" for k, link in enumerate(links)}
    if "label" not in store.rows.names or np.isin(indices, store.rows.where(label=None)).any():
        raise ValueError(
            "the networks, or some of them, have no value in a column 'label', by which DWSNets' folders are named; "
            f"their columns are {list(store.rows.names)}"
        )
    folder = _create(folder)
    own = {int(k): name for name, part in store.split().items() for k in part}
    splits: dict[str, dict[str, list[Any]]] = {}
    done = 0
    for params, rows in _blocks(store, indices, progress):
        params = params | {last: params[last] - shift}
        for k, row in enumerate(rows):
            split = row.get("split", own[int(indices[done + k])])
            place = folder / f"networks_{split}_{row['label']}_{indices[done + k]}" / "checkpoints"
            place.mkdir(parents=True)
            content = io.BytesIO()
            torch.save({names[name]: tensor.clone() for name, tensor in select(params, k).items()}, content)
            path = place / "model_final.pth"
            save_bytes(content.getvalue(), path)
            listed = splits.setdefault(split, {"path": [], "label": []})
            listed["path"].append(path.relative_to(folder).as_posix())
            listed["label"].append(row["label"])
        done += len(rows)
    save_bytes(json.dumps(splits).encode(), folder / "splits.json")


def _chain(architecture: Architecture) -> tuple[tuple[Link, ...], int, float]:
    """Return the layers in order, the step between layer numbers, and the number to subtract from the output."""
    module = architecture.module()
    adds = type(module) is ImageSiren
    if adds:
        module = replace(architecture, factory="regauge.nets.siren:Siren").module()
    links = links_of(steps_of(module, reads_vectors=True) or ())
    if links is None or (links[-1].activation, links[-1].scale) != ("identity", 1.0):
        raise ValueError(f"{architecture.name!r} is not a chain of linear layers with biases; export as safetensors")
    between = {(link.activation, link.scale) for link in links[:-1]}
    if between == {("sin", OMEGA)}:
        return links, 1, 0.0 if adds else MIDDLE
    if between == {("relu", 1.0)}:
        return links, 2, 0.0
    found = " and ".join(f"{activation}({scale:g} h)" for activation, scale in sorted(between)) or "nothing"
    raise ValueError(
        f"{architecture.name!r} has {found} between its layers, but DWSNets' files are read as networks with "
        f"sin({OMEGA:g} h) or with relu(h); export as safetensors"
    )


def _create(folder: str | Path) -> Path:
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{str(folder)!r} holds files already; choose a new folder to export to")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _blocks(store: Store, indices: Sequence[int], progress: Progress) -> Iterator[tuple[Params, list[dict[str, Any]]]]:
    """Yield blocks of networks and their rows. Progress counts a block when the next block is requested."""
    advance = progress("networks", len(indices))
    for start in range(0, len(indices), BLOCK_NETWORKS):
        part = indices[start : start + BLOCK_NETWORKS]
        yield store.read(part), store.rows.dicts(part)
        advance(len(part))


def _write_matrix(
    store: Store,
    folder: Path,
    indices: Sequence[int],
    named: Sequence[tuple[str, tuple[int, ...]]],
    progress: Progress,
) -> list[dict[str, Any]]:
    """Write the networks as rows of one array, and the layout, and return the rows. The networks are never all in
    memory.

    `named` specifies the names and shapes that tensors have in the files.
    """
    variables: list[Variable] = []
    for spec, (name, shape) in zip(store.architecture.layout, named, strict=True):
        if not spec.dtype.is_floating_point:
            raise ValueError(
                f"{spec.name!r} holds {spec.dtype}, which a matrix of floats cannot; export as safetensors"
            )
        start = variables[-1].end if variables else 0
        variables.append(Variable(name, shape, start, start + spec.size))
    rows: list[dict[str, Any]] = []
    with whole_file(folder / WEIGHTS) as temporary:
        shape = (len(indices), store.architecture.size)
        matrix = np.lib.format.open_memmap(temporary, mode="w+", dtype=np.float32, shape=shape)
        for params, part in _blocks(store, indices, progress):
            for spec, variable in zip(store.architecture.layout, variables, strict=True):
                back = np.argsort(variable.order)
                values = params[spec.name].permute(0, *(int(axis) + 1 for axis in back)).reshape(len(part), -1)
                matrix[len(rows) : len(rows) + len(part), variable.start : variable.end] = values.float().numpy()
            rows += part
        matrix.flush()
    lines = [{"varname": v.name, "shape": str(v.shape), "start_idx": v.start, "end_idx": v.end} for v in variables]
    save_bytes(table_bytes(lines), folder / LAYOUT)
    return rows

"""Small populations of networks that regauge writes in the layouts of peers, and comparisons of what is read back."""

import json
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import chdir
from pathlib import Path
from typing import Any

import torch
from judge import Failed
from torch import Tensor, nn
from weight_nets import require_close

from regauge.core.params import select
from regauge.storage import Store
from regauge.storage.architecture import Architecture
from regauge.zoo import EXPORTERS, Imported, Source, import_zoo
from regauge.zoo.formats.folder import read_dwsnets, read_folder
from regauge.zoo.formats.matrix_zoos import read_small_cnn_zoo

COUNT = 20
"""Networks of a population."""
SPLITS = {"train": range(10), "val": range(10, 14), "test": range(14, COUNT)}
Read = Callable[[Path, str], Iterable[tuple[Sequence[Tensor], Sequence[Tensor], float]]]
"""From a folder and the name of a split to weights, biases and label of each network, as a peer reads them."""


def write_store(folder: Path, architecture: Architecture, rows: list[dict[str, Any]], inputs: Tensor) -> Store:
    """Random networks in a store."""
    generator = torch.Generator().manual_seed(0)
    params = {spec.name: 0.3 * torch.randn(len(rows), *spec.shape, generator=generator) for spec in architecture.layout}

    def read(part: Sequence[int]) -> Imported:
        return Imported({name: tensor[list(part)] for name, tensor in params.items()}, [rows[k] for k in part])

    import_zoo(Source(folder, architecture, rows, read, (inputs,), {}), folder / "made")
    return Store.open(folder / "made")


def compare_inrs(folder: Path, read: Read, module: Callable[[], nn.Module]) -> None:
    """Sine networks in the layout of DWSNets: written by regauge, read by a peer and by regauge, and run by both.

    Raises:
        Failed: A network, a label or an output differs.
    """
    settings = {"in_features": 2, "width": 32, "out_features": 1, "depth": 2, "omega": 30.0}
    architecture = Architecture("SIREN", "regauge.zoo.formats.modules:ImageSiren", settings)
    split_of = {k: name for name, part in SPLITS.items() for k in part}
    rows = [{"id": k, "step": 0, "label": k % 10, "split": split_of[k]} for k in range(COUNT)]
    store = write_store(folder, architecture, rows, torch.randn(2, 2))
    EXPORTERS["dwsnets"](store, folder / "inrs", range(COUNT))
    import_zoo(read_dwsnets(folder / "inrs"), folder / "back")
    back = Store.open(folder / "back")
    own, seen = module(), 0
    x = torch.rand(9, 2) * 2 - 1
    for split, part in SPLITS.items():
        with chdir(folder / "inrs"):  # the paths that the peer reads are from there
            found = list(read(folder / "inrs", split))
        for k, (weights, biases, label) in zip(part, found, strict=True):
            if float(label) != k % 10:
                raise Failed(f"network {k} of {split} has the label {label}")
            (row,) = [i for i in range(COUNT) if int(back.rows["number"][i]) == k]
            params, again = (select(one.read([i]), 0) for one, i in ((store, k), (back, row)))
            tensors = [t for pair in zip(weights, biases, strict=True) for t in pair]
            for name, theirs in zip(params, tensors, strict=True):
                tensor = theirs.squeeze(-1)
                tensor = tensor.T if tensor.ndim == 2 else tensor
                if not (torch.equal(params[name], tensor) and torch.equal(again[name], tensor)):
                    raise Failed(f"network {k} of {split} is read otherwise")
            state = dict(zip(own.state_dict(), params.values(), strict=True))
            outputs = torch.func.functional_call(own, state, (x,))
            require_close(torch.func.functional_call(back.architecture.module(), again, (x,)), outputs, 1e-5, "outputs")
            seen += 1
    if seen != COUNT:
        raise Failed(f"{seen} of {COUNT} networks are read")


def compare_cnns(folder: Path, read: Read, *, activation: str = "relu") -> None:
    """Convolutional networks in the layout of the small CNN zoo: written by regauge, read by a peer and by regauge.

    Args:
        read: It finds `order.csv`, the order of the networks, next to the files of the zoo.

    Raises:
        Failed: A network or an accuracy differs.
    """
    architecture = Architecture("CNN", "regauge.zoo.formats.modules:SmallCNN", {"activation": activation})
    rows = [{"id": k, "step": 86, "test_accuracy": k / COUNT} for k in range(COUNT)]
    store = write_store(folder, architecture, rows, torch.randn(2, 1, 32, 32))
    EXPORTERS["small-cnn-zoo"](store, folder / "zoo", range(COUNT))
    order = torch.randperm(COUNT, generator=torch.Generator().manual_seed(0)).tolist()
    (folder / "zoo" / "order.csv").write_text(os.linesep.join(map(str, order)))
    import_zoo(read_small_cnn_zoo(folder / "zoo"), folder / "back")
    back = Store.open(folder / "back")
    params = back.read(range(COUNT))
    accuracies = [float(value) for value in back.rows["test_accuracy"]]
    weights, biases = ([name for name in params if name.endswith(kind)] for kind in ("weight", "bias"))
    seen = 0
    for split in SPLITS:
        for w, b, score in read(folder / "zoo", split):
            row = min(range(COUNT), key=lambda k: abs(accuracies[k] - score))
            pairs = [*zip(weights, w, strict=True), *zip(biases, b, strict=True)]
            if abs(accuracies[row] - score) > 1e-6 or not all(torch.equal(params[n][row], t) for n, t in pairs):
                raise Failed(f"the network with accuracy {score} is read otherwise")
            seen += 1
    if seen != COUNT:
        raise Failed(f"{seen} of {COUNT} networks are read")


def compare_torch_files(
    folder: Path, read: Callable[[Path], Sequence[tuple[Sequence[Tensor], Sequence[Tensor]]]]
) -> None:
    """State dictionaries of convolutional networks, listed with their scores, read by a peer and by regauge.

    Raises:
        Failed: A network differs.
    """
    architecture = Architecture("CNN", "regauge.zoo.formats.modules:SmallCNN", {})
    rows = [{"id": k, "step": 0} for k in range(COUNT)]
    store = write_store(folder, architecture, rows, torch.randn(2, 1, 32, 32))
    place = folder / "files"
    place.mkdir()
    for k in range(COUNT):
        torch.save(select(store.read([k]), 0), place / f"{k}.pth")
    listed = {"path": [f"{k}.pth" for k in range(COUNT)], "score": [k / COUNT for k in range(COUNT)]}
    (place / "splits.json").write_text(json.dumps({"train": listed}))
    import_zoo(read_folder(place, "{id}.pth", architecture=architecture), folder / "back")
    params = Store.open(folder / "back").read(range(COUNT))
    for k, (weights, biases) in enumerate(read(place)):
        tensors = [t for pair in zip(weights, biases, strict=True) for t in pair]
        if not all(torch.equal(params[name][k], t) for name, t in zip(params, tensors, strict=True)):
            raise Failed(f"network {k} is read otherwise")

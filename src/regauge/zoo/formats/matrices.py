"""Zoos whose networks are the rows of one matrix: the small CNN zoo, and data sets of HDF5 files.

The small CNN zoo has its weights in TensorFlow's order, a table of metrics and a layout. `weights.npy` has a row for
each checkpoint, `metrics.csv.gz` the same rows with settings and accuracies, and `layout.csv` says which columns are
which variable: `varname`, `shape` as a tuple, `start_idx` and `end_idx`. Kernels of convolutions are stored as height,
width, in, out, and those of linear layers as in, out. Data sets of HDF5 files, as generative models of weights write
them, have the values of each network in the order of its state dictionary.
"""

import ast
import csv
import gzip
import io
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

from regauge.core.params import Params
from regauge.storage.architecture import Architecture
from regauge.storage.store.packing import Segment
from regauge.zoo.formats.modules import ACTIVATIONS, examples
from regauge.zoo.formats.source import Imported, Source

WEIGHTS, METRICS, LAYOUT = "weights.npy", "metrics.csv.gz", "layout.csv"
IMAGE = 32


@dataclass(frozen=True)
class Variable:
    """One line of the layout: a variable, its shape in the file, and its columns."""

    name: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def order(self) -> tuple[int, ...]:
        """Its axes in PyTorch's order, behind the axis of the networks."""
        if not self.name.endswith("kernel:0"):
            return tuple(range(len(self.shape)))
        return (len(self.shape) - 1, len(self.shape) - 2, *range(len(self.shape) - 2))


def read_small_cnn_zoo(path: str | Path, *, activation: str | None = None) -> Source:
    """The zoo in an unpacked folder: trajectories by "modeldir", steps in epochs, settings under "config." names.

    The activation is part of the architecture; it must be given where there are several, and chooses the networks.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: The files do not fit one another, or are not of convolutions and one linear layer.

    References:
        Unterthiner et al. (2020), Predicting neural network accuracy from weights.
    """
    path = Path(path)
    for name in (WEIGHTS, METRICS, LAYOUT):
        if not (path / name).is_file():
            raise FileNotFoundError(f"{str(path)!r} has no {name}, so it is not the small CNN zoo; check the path")
    variables = read_layout(path / LAYOUT)
    rows = read_metrics(path / METRICS)
    weights = np.load(path / WEIGHTS, mmap_mode="r", allow_pickle=False)
    if weights.shape != (len(rows), variables[-1].end):
        raise ValueError(
            f"{WEIGHTS} has shape {weights.shape}, but {METRICS} has {len(rows)} rows and {LAYOUT} ends with column "
            f"{variables[-1].end}; the files are of different zoos"
        )
    kinds = sorted({str(row.get("config.activation", "relu")) for row in rows})
    if activation is None and len(kinds) > 1:
        raise ValueError(
            f"the zoo has networks with the activations {kinds}; choose one, they are not one architecture"
        )
    activation = kinds[0] if activation is None else activation
    if activation not in kinds or activation not in ACTIVATIONS:
        raise ValueError(f"there are no networks with the activation {activation!r} that can be run, but {kinds}")
    chosen = [k for k, row in enumerate(rows) if row.get("config.activation", "relu") == activation]
    architecture, names = _architecture(variables, activation)

    def read(numbers: Sequence[int]) -> Imported:
        part = [chosen[k] for k in numbers]
        return Imported(from_matrix(weights[part], variables, names), [rows[k] for k in part])

    return Source(
        path,
        architecture,
        [rows[k] for k in chosen],
        read,
        examples(architecture.layout[0].shape[1], IMAGE, IMAGE),
        {"imported": "small CNN zoo", "activation": activation},
        "modeldir",
    )


def read_layout(path: Path) -> list[Variable]:
    """The variables in the order of their columns, of which none is left out."""
    variables = []
    try:
        with open(path, newline="", encoding="utf-8") as file:
            for line in csv.DictReader(file):
                shape = ast.literal_eval(line["shape"])
                shape = tuple(int(size) for size in (shape if isinstance(shape, tuple | list) else (shape,)))
                variables.append(Variable(line["varname"], shape, int(line["start_idx"]), int(line["end_idx"])))
    except (KeyError, ValueError, SyntaxError, TypeError) as error:
        raise ValueError(f"{str(path)!r} is no layout: {type(error).__name__}: {error}") from error
    variables.sort(key=lambda variable: variable.start)
    end = 0
    for variable in variables:
        if variable.start != end or variable.end - variable.start != int(np.prod(variable.shape)):
            raise ValueError(f"{str(path)!r} gives {variable.name!r} columns that do not fit its shape or the others")
        end = variable.end
    if not variables:
        raise ValueError(f"{str(path)!r} names no variables")
    return variables


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Rows with an integer "id" for each trajectory and "step"; numbers as such, empty cells left out."""
    try:
        with gzip.open(path, "rt", newline="", encoding="utf-8") as file:
            lines = list(csv.DictReader(file))
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{str(path)!r} is damaged ({error}); fetch it again") from error
    ids: dict[Any, int] = {}
    rows = []
    for line in lines:
        row = {key: _value(text) for key, text in line.items() if key and text not in ("", None)}
        settings = tuple(value for key, value in row.items() if key.startswith("config."))
        row["id"] = ids.setdefault(row.get("modeldir", settings), len(ids))
        if not isinstance(row.get("step"), int):
            raise ValueError(f"{str(path)!r} has a row without an integer step, but {row.get('step')!r}")
        rows.append(row)
    return rows


def from_matrix(matrix: Any, variables: Sequence[Variable], names: Mapping[str, str]) -> Params:
    """Networks from rows of values."""
    values = torch.from_numpy(np.array(matrix, np.float32))
    params = {}
    for variable in variables:
        piece = values[:, variable.start : variable.end].reshape(-1, *variable.shape)
        params[names[variable.name]] = piece.permute(0, *(axis + 1 for axis in variable.order)).contiguous()
    return params


def _architecture(variables: Sequence[Variable], activation: str) -> tuple[Architecture, dict[str, str]]:
    """The module, and its name for each variable."""
    kernels = [variable for variable in variables if variable.name.endswith("kernel:0")]
    biases = [variable for variable in variables if variable.name.endswith("bias:0")]
    dims = [len(kernel.shape) for kernel in kernels]
    if dims != [4] * (len(kernels) - 1) + [2] or len(biases) != len(kernels) or len(kernels) < 2:
        raise ValueError(
            f"the variables {[v.name for v in variables][:4]} of shapes {[v.shape for v in variables][:4]} are not "
            "convolutions and one linear layer, each with kernel:0 and bias:0"
        )
    channels = [kernels[0].shape[2], *(kernel.shape[3] for kernel in kernels[:-1])]
    settings = {"channels": channels, "classes": kernels[-1].shape[1], "activation": activation}
    architecture = Architecture(
        f"small {activation} CNN {'-'.join(map(str, channels))}", "regauge.zoo.formats.modules:SmallCNN", settings
    )
    places = [f"convolutions.{k}" for k in range(len(kernels) - 1)] + ["output"]
    names = {kernel.name: f"{place}.weight" for kernel, place in zip(kernels, places, strict=True)}
    names |= {bias.name: f"{place}.bias" for bias, place in zip(biases, places, strict=True)}
    return architecture, names


def _value(text: str) -> Any:
    """A cell as a number or a truth value where it is one."""
    if text in ("True", "False"):
        return text == "True"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def table_bytes(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Rows as a CSV file, with a column for every name."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)), restval="")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def read_hdf5(
    path: str | Path,
    *,
    architecture: Architecture | None = None,
    dataset: str = "dataset",
    inputs: tuple[Any, ...] | None = None,
) -> Source:
    """Rows of values in the order of the architecture's state dictionary; row k is trajectory k.

    Args:
        path: The file.
        architecture: The architecture of all networks, which the file does not say.
        dataset: Name of the data set `[networks, values]`.
        inputs: Example inputs of the module.

    Raises:
        FileNotFoundError: There is no such file.
        ImportError: h5py is not installed.
        ValueError: There is no architecture or no such data set, or its rows do not have the architecture's number of
            values.
    """
    if architecture is None:
        raise ValueError("an HDF5 file does not name the model of its values; give --model and its --settings")
    try:
        h5py: Any = import_module("h5py")
    except ImportError as error:
        raise ImportError("reading HDF5 needs h5py: pip install 'regauge[hdf5]'") from error
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no file {str(path)!r}; check the path")
    try:
        with h5py.File(path, "r") as file:
            if dataset not in file or not hasattr(file[dataset], "shape"):
                raise ValueError(f"{str(path)!r} has no data set {dataset!r}, but {sorted(file)[:5]}")
            shape = tuple(file[dataset].shape)
    except OSError as error:
        raise ValueError(f"{str(path)!r} is no readable HDF5 file: {error}") from error
    if len(shape) != 2 or shape[1] != architecture.size:
        raise ValueError(
            f"{dataset!r} of {str(path)!r} has shape {shape}, but networks of {architecture.name!r} have "
            f"{architecture.size} values; name the model that these rows are of"
        )

    def read(numbers: Sequence[int]) -> Imported:
        with h5py.File(path, "r") as file:
            values = torch.from_numpy(file[dataset][list(numbers)])
        return Imported(Segment(values.dtype, architecture.layout).unpack(values), [rows[k] for k in numbers])

    rows = [{"id": k, "step": 0} for k in range(shape[0])]
    return Source(path, architecture, rows, read, inputs, {"imported": "HDF5", "dataset": dataset})

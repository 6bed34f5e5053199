"""Zoos whose networks are the rows of one matrix: the small CNN zoo, and data sets in HDF5 files.

The small CNN zoo consists of weights in TensorFlow's order, a table of metrics and a layout. `weights.npy` has a row
for each checkpoint, and `metrics.csv.gz` has the same rows with settings and accuracies. `layout.csv` lists the columns
of each variable: `varname`, `shape` as a tuple, `start_idx` and `end_idx`. Kernels of convolutions are stored as
height, width, in, out, and kernels of linear layers as in, out. In HDF5 files, which generative models of weights
write, each row contains one network in the order of its state dictionary.
"""

import ast
import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from regauge.checkpoints.array_files import map_array, most_bytes, read_gzip
from regauge.core.params import Params
from regauge.storage.architecture import Architecture
from regauge.storage.store.packing import Segment
from regauge.zoo.formats.modules import ACTIVATIONS, examples
from regauge.zoo.formats.zoo_source import Imported, Source, naming

WEIGHTS, METRICS, LAYOUT = "weights.npy", "metrics.csv.gz", "layout.csv"
IMAGE = 32
HDF5_DAMAGE = (OSError, RuntimeError, KeyError, ValueError, TypeError, OverflowError, AttributeError, MemoryError)
"""Errors that h5py raises if a file is damaged."""


@dataclass(frozen=True)
class Variable:
    """One line of the layout: a variable, its shape in the file, and its columns."""

    name: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def order(self) -> tuple[int, ...]:
        """The permutation of a variable's axes to PyTorch's order, after the axis of networks."""
        if not self.name.endswith("kernel:0"):
            return tuple(range(len(self.shape)))
        return (len(self.shape) - 1, len(self.shape) - 2, *range(len(self.shape) - 2))


def read_small_cnn_zoo(path: str | Path, *, activation: str | None = None) -> Source:
    """Return the zoo in an unpacked folder. Training runs are named by "modeldir", and steps are epochs.

    Settings are columns whose names begin with "config.". The activation is part of the architecture. If the zoo has
    several activations, select the networks to read by the argument `activation`.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: The files do not fit together, or the networks do not consist of convolutions and one linear layer.

    References:
        Unterthiner et al. (2020), Predicting neural network accuracy from weights.
    """
    path = Path(path)
    for name in (WEIGHTS, METRICS, LAYOUT):
        if not (path / name).is_file():
            raise FileNotFoundError(f"{str(path)!r} has no {name}, so it is not the small CNN zoo; check the path")
    variables, weights = read_layout(path / LAYOUT), map_array(path / WEIGHTS)
    rows = read_metrics(path / METRICS, len(weights) if weights.ndim else 0)
    if not rows:
        raise ValueError(f"{str(path / METRICS)!r} has no rows, so there are no networks: check the path")
    if weights.shape != (len(rows), variables[-1].end):
        raise ValueError(
            f"{WEIGHTS} has shape {weights.shape}, but {METRICS} has {len(rows)} rows and {LAYOUT} ends with column "
            f"{variables[-1].end}; the files in {str(path)!r} belong to different zoos"
        )
    kinds = sorted({str(row.get("config.activation", "relu")) for row in rows})
    if activation is None and len(kinds) > 1:
        raise ValueError(
            f"the zoo {str(path)!r} has networks with the activations {kinds}; choose one, because these are different "
            "architectures"
        )
    activation = kinds[0] if activation is None else activation
    if activation not in kinds or activation not in ACTIVATIONS:
        raise ValueError(
            f"{str(path)!r} has no networks with the activation {activation!r} that can be run, but {kinds}"
        )
    chosen = [k for k, row in enumerate(rows) if row.get("config.activation", "relu") == activation]
    with naming(path / LAYOUT):
        architecture, names = _architecture(variables, activation)
        inputs = examples(architecture.layout[0].shape[1], IMAGE, IMAGE)

    def read(numbers: Sequence[int]) -> Imported:
        part = [chosen[k] for k in numbers]
        return Imported(from_matrix(weights[part], variables, names), [rows[k] for k in part])

    return Source(
        path,
        architecture,
        [rows[k] for k in chosen],
        read,
        inputs,
        {"imported": "small CNN zoo", "activation": activation},
        "modeldir",
    )


def read_layout(path: Path) -> list[Variable]:
    """Return the variables in the order of their columns, which must cover all columns without gaps."""
    variables = []
    try:
        with open(path, newline="", encoding="utf-8") as file:
            for line in csv.DictReader(file):
                shape = ast.literal_eval(line["shape"])
                shape = tuple(int(size) for size in (shape if isinstance(shape, tuple | list) else (shape,)))
                variables.append(Variable(str(line["varname"]), shape, int(line["start_idx"]), int(line["end_idx"])))
                if min((0, *shape)) < 0:
                    raise ValueError(f"{line['varname']!r} has the shape {shape}")
    except (
        *(KeyError, ValueError, SyntaxError, TypeError, OverflowError, RecursionError, MemoryError, csv.Error),
    ) as error:
        raise ValueError(f"{str(path)!r} is not a layout: {type(error).__name__}: {error}; fetch it again") from error
    variables.sort(key=lambda variable: variable.start)
    end = 0
    for variable in variables:
        if variable.start != end or variable.end - variable.start != math.prod(variable.shape):
            raise ValueError(
                f"{str(path)!r} gives {variable.name!r} columns that do not fit its shape or the others; fetch it again"
            )
        end = variable.end
    if not end:
        raise ValueError(f"{str(path)!r} names no variables; fetch it again")
    return variables


def read_metrics(path: Path, count: int) -> list[dict[str, Any]]:
    """Return rows with the integers "id" (the trajectory) and "step".

    Cells with numbers are converted, and empty cells are skipped.

    Args:
        path: The file.
        count: The number of networks. At most `count + 1` rows are read.
    """
    ids: dict[Any, int] = {}
    rows = []
    for row in read_table(read_gzip(path), path, count + 1):
        settings = tuple(value for key, value in row.items() if key.startswith("config."))
        row["id"] = ids.setdefault(row.get("modeldir", settings), len(ids))
        if not isinstance(row.get("step"), int):
            raise ValueError(f"{str(path)!r} has a row without an integer step, but {row.get('step')!r}")
        rows.append(row)
    return rows


def read_table(content: bytes, path: Path, most: int | None = None) -> list[dict[str, Any]]:
    """Return at most `most` rows of a CSV file. Numeric cells are converted, and empty cells are skipped."""
    try:
        lines = list(islice(csv.DictReader(io.StringIO(content.decode(), newline="")), most))
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{str(path)!r} is not a table: {error}; fetch it again") from error
    return [{key: _value(text) for key, text in line.items() if key and text not in ("", None)} for line in lines]


def from_matrix(matrix: Any, variables: Sequence[Variable], names: Mapping[str, str]) -> Params:
    """Convert rows of numbers to networks."""
    values = torch.from_numpy(np.array(matrix, np.float32))
    params = {}
    for variable in variables:
        piece = values[:, variable.start : variable.end].reshape(-1, *variable.shape)
        params[names[variable.name]] = piece.permute(0, *(axis + 1 for axis in variable.order)).contiguous()
    return params


def _architecture(variables: Sequence[Variable], activation: str) -> tuple[Architecture, dict[str, str]]:
    """Return the architecture, and the parameter name for each variable."""
    kernels = [variable for variable in variables if variable.name.endswith("kernel:0")]
    biases = [variable for variable in variables if variable.name.endswith("bias:0")]
    dims = [len(kernel.shape) for kernel in kernels]
    is_named = len({variable.name for variable in (*kernels, *biases)}) == len(variables)
    if dims != [4] * (len(kernels) - 1) + [2] or len(biases) != len(kernels) or len(kernels) < 2 or not is_named:
        raise ValueError(
            f"the variables {[v.name for v in variables][:4]} of shapes {[v.shape for v in variables][:4]} are not "
            "convolutions and one linear layer, each with kernel:0 and bias:0; import it as HDF5, with its model"
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
    """Return a cell as a number or boolean, if the cell can be parsed as a number or boolean."""
    if text in ("True", "False"):
        return text == "True"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def table_bytes(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Return rows as the bytes of a CSV file, with a column for every name."""
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
    """Read networks from the rows of a matrix, in the order of the state dictionary; row k gets the id k.

    Args:
        path: The path of the HDF5 file.
        architecture: The architecture of all networks, which the file does not record.
        dataset: The name of the HDF5 data set `[networks, values]`.
        inputs: Example inputs of the module.

    Raises:
        FileNotFoundError: The file does not exist.
        ImportError: h5py is not installed.
        ValueError: There is no architecture, the data set is unknown, or the row length differs from the architecture's
            number of entries.
    """
    if architecture is None:
        raise ValueError("an HDF5 file does not name the model of its values; give `model=` and its `settings=`")
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
            found = file[dataset]
            shape = tuple(found.shape)
            _require_inside(found, file, path)
    except HDF5_DAMAGE as error:
        if str(path) in str(error):
            raise
        raise ValueError(f"{str(path)!r} is no readable HDF5 file: {error}; fetch it again") from error
    if len(shape) != 2 or shape[1] != architecture.size:
        raise ValueError(
            f"{dataset!r} of {str(path)!r} has shape {shape}, but networks of {architecture.name!r} have "
            f"{architecture.size} values; name the model of these rows"
        )

    def read(numbers: Sequence[int]) -> Imported:
        try:
            with h5py.File(path, "r") as file:
                values = torch.from_numpy(file[dataset][list(numbers)])
        except HDF5_DAMAGE as error:
            raise ValueError(f"{str(path)!r} is no readable HDF5 file: {error}; fetch it again") from error
        return Imported(Segment(values.dtype, architecture.layout).unpack(values), [rows[k] for k in numbers])

    rows = [{"id": k, "step": 0} for k in range(shape[0])]
    return Source(Path(path), architecture, rows, read, inputs, {"imported": "HDF5", "dataset": dataset})


def _require_inside(found: Any, file: Any, path: str | Path) -> None:
    """Raise an error if a data set refers to other files, or has chunks that would be far larger than the file."""
    if found.external or found.is_virtual or found.file.filename != file.filename:
        raise ValueError(f"the values of {found.name!r} are in other files than {str(path)!r}; write them into it")
    size, most = found.dtype.itemsize, most_bytes(Path(path).stat().st_size)
    if size * max(math.prod(found.shape), math.prod(found.chunks or ())) > most or found.dtype.kind not in "biuf":
        raise ValueError(
            f"{str(path)!r} says that {found.name!r} has {found.shape} values of {found.dtype}, which it does not "
            "hold; fetch it again"
        )

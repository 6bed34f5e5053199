"""Flat networks in one data set of an HDF5 file, as generative models of weights write them."""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from regauge.storage.architecture import Architecture
from regauge.storage.store.packing import Segment
from regauge.zoo.formats.source import Imported, Source


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
        raise ValueError("an HDF5 file does not say of what its values are; name the --model and its --settings")
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

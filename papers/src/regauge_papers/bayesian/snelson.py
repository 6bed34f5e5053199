"""The Snelson set: noisy values of an unknown curve."""

import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from regauge.data.data_files import DataFile, present, read

_ADDRESS = (
    "https://raw.githubusercontent.com/GPflow/GPflow/10cfc31a38a399d7e15c93c475e251f0889c8d96"
    "/doc/sphinx/notebooks/theory/data/{}"
)
_SHA256 = {
    "snelson_train_inputs.dat": "fd745fae3686ee6b1e03feef7bf4be1b577231ec7406e0e84715fcb37731e44c",
    "snelson_train_outputs.dat": "5f8752c19dbd536ad6435eed26d3e96b0d8101fa194ca31f05d10ab2a5bd9205",
    "snelson_test_inputs.dat": "494c34d9632e896bbb1571f37e61c717c5e9ef4879a7ec3869b4717b45d3c0b0",
}
_FILES = tuple(
    DataFile("the Snelson set", "snelson1d", name, digest, (_ADDRESS.format(name),)) for name, digest in _SHA256.items()
)


@dataclass(frozen=True)
class CurveData:
    """Noisy samples of a curve.

    Attributes:
        inputs: Positions, `[n, 1]`.
        targets: Noisy function values at the positions, `[n, 1]`.
        test_inputs: Equally spaced positions that extend beyond the data, `[m, 1]`.
    """

    inputs: Tensor
    targets: Tensor
    test_inputs: Tensor


def snelson(folder: str | Path | None = None) -> CurveData:
    """Return the 200 points of Snelson and Ghahramani, a standard regression example, in float32.

    Args:
        folder: The folder of the data set's three files. By default, `snelson1d` in the folder that the environment
            variable `REGAUGE_DATA` names. Missing files are downloaded once.

    Raises:
        FileNotFoundError: A file is missing and cannot be downloaded.
        ValueError: The checksum of a file is wrong.

    References:
        Snelson and Ghahramani (2006), Sparse Gaussian processes using pseudo-inputs.
    """
    inputs, targets, test_inputs = (_read(file, folder) for file in _FILES)
    return CurveData(inputs, targets, test_inputs)


def has_snelson() -> bool:
    """Return whether the data set is on this machine and needs no download."""
    return all(present(file) is not None for file in _FILES)


def _read(file: DataFile, folder: str | Path | None) -> Tensor:
    content = read(file, folder)
    return torch.from_numpy(np.loadtxt(io.BytesIO(content))).float()[:, None]

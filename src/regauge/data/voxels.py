"""Occupancy grids of chairs and monitors: the shapes of ModelNet10 as cubes of cells."""

import io
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from regauge.data.files import DataFile, read

Category = Literal["chair", "monitor"]
VOXELS = DataFile(
    "the voxel grids of ModelNet10",
    "modelnet10_voxels",
    "modelnet10_chair_monitor_32.npz",
    "3fca4b7fa686a0d3927ab4cae7eccc4be72c92814260316427fd5005f34134f8",
)
RESOLUTION = 32
"""Cells along each edge of the cube."""


def voxels(category: Category, folder: str | Path | None = None) -> Tensor:
    """All grids of a category, true where a cell is occupied, `[shapes, 32, 32, 32]`: 889 chairs or 465 monitors.

    About 50 chairs and 14 monitors repeat another grid exactly.

    Args:
        category: Which.
        folder: Where the file is; `modelnet10_voxels` in the folder that the environment variable `REGAUGE_DATA` names
            if left out.

    Raises:
        FileNotFoundError: The file is not there; it has no public address.
        ValueError: There is no such category, or the file's checksum is wrong.

    References:
        Wu et al. (2015), 3D ShapeNets.
    """
    if category not in get_args(Category):
        raise ValueError(f"there are no voxel grids of {category!r}; choose from {', '.join(get_args(Category))}")
    content = read(VOXELS, folder)
    with np.load(io.BytesIO(content), allow_pickle=False) as archive:
        bits = np.unpackbits(archive[category], axis=1)
    return torch.from_numpy(bits.reshape(-1, RESOLUTION, RESOLUTION, RESOLUTION)).bool()

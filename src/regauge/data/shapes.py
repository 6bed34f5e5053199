"""Shapes: triangle meshes, occupancy grids of chairs and monitors, and inr2vec's initialization for fitting them."""

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch
from safetensors.torch import load
from torch import Tensor

from regauge.data.data_files import DataFile, read

SHAPES_SHA256 = {
    "beast": "ce8d4005adb8e25ce6c3042e0d75c7bc6a1967191505e4c263e6535a8c9c785f",
    "beetle": "9532e87bac5addfccd7e3600853616870c4825a6d0b2f2bd964540d60ca860cd",
    "cow": "471cbf46ee1a06542184a8f8bdb2e09405e2f25ff6010e863bfb1e75a2d24eac",
    "fandisk": "30d4893ad89d8a890ebca555f28bb3bc11f71cd21aa15d50dda1531cd282b59d",
    "horse": "a7b4c88a14c13367607fb5e213c6d20e18c6cb8e874f854fd7d36b72b8eb7b55",
    "nefertiti": "728453bccaebc4f6e1ad2d1304e4533908d88f4732827cfb2b1981f252c7b84a",
    "ogre": "ea86ff321ac06584d8eedf807c8508d13db7171a0427c07442c7f420cfaa6915",
    "rocker-arm": "4631a7a111baed3c9c14e885715cb55adbbb7aa63b0124b59c7348011deb5c0c",
    "spot": "266d882017929bf4d1462b223a67fd1982fdb7c858bb95b9e451d8f24afeafd5",
    "stanford-bunny": "9a4ea2710aad69006b0d86d12a30114c729bf13f2b7a673804ea264ae6c5f160",
    "suzanne": "114cdfb540e5800160285fb6a1d7af2929310cd9ac4fa2ac087a8b780b932031",
    "teapot": "db164479720cf67b653b31c8006ce82b26cad5f2b7a7c14853b48e9b678c2f16",
}
"""SHA-256 of the shapes' files, `shapes/NAME.npz` in the folder that `REGAUGE_DATA` names."""
Category = Literal["chair", "monitor"]
VOXELS = DataFile(
    "the voxel grids of ModelNet10",
    "modelnet10_voxels",
    "modelnet10_chair_monitor_32.npz",
    "3fca4b7fa686a0d3927ab4cae7eccc4be72c92814260316427fd5005f34134f8",
)
RESOLUTION = 32
"""The number of cells along each edge of the cube."""
SHARED_START = DataFile(
    "the shared initialization of inr2vec",
    "inr2vec_init",
    "in3_out1_h512_l4.safetensors",
    "7c7e0541185294c26d56b77148337e863cdf52d1966b7c9a00c280577dd5a57c",
)


@dataclass(frozen=True)
class Shape:
    """A mesh in the unit ball, with its centroid at the origin.

    Attributes:
        name: The usual name of the shape.
        vertices: float32, `[vertices, 3]`.
        faces: The indices of each face's vertices, int64, `[faces, 3]`.
        points: Points sampled uniformly by area from the surface, float32, `[8192, 3]`.
        is_watertight: Whether the surface encloses a volume.
    """

    name: str
    vertices: Tensor
    faces: Tensor
    points: Tensor
    is_watertight: bool


def shape(name: str, folder: str | Path | None = None) -> Shape:
    """Return one of the shapes of `SHAPES_SHA256`.

    Args:
        name: The name of a shape, a key of `SHAPES_SHA256`.
        folder: The folder that contains the shape's file. By default, `shapes` in the folder that the environment
            variable `REGAUGE_DATA` names.

    Raises:
        FileNotFoundError: The file does not exist. regauge cannot download shapes.
        ValueError: There is no shape with the given name, or the checksum of the file is wrong.
    """
    if name not in SHAPES_SHA256:
        raise ValueError(f"there is no shape {name!r}; choose from {sorted(SHAPES_SHA256)}")
    file = DataFile(f"the shape {name!r}", "shapes", f"{name}.npz", SHAPES_SHA256[name])
    content = read(file, folder)
    with np.load(io.BytesIO(content), allow_pickle=False) as archive:
        return Shape(
            name,
            torch.from_numpy(archive["vertices"]).float(),
            torch.from_numpy(archive["faces"]).long(),
            torch.from_numpy(archive["points"]).float(),
            bool(archive["watertight"]),
        )


def voxels(category: Category, folder: str | Path | None = None) -> Tensor:
    """Return all occupancy grids of a category, boolean `[shapes, 32, 32, 32]`: 889 chairs or 465 monitors.

    About 50 grids of chairs and 14 grids of monitors exactly repeat a further grid of their category. See `shape` for
    errors and `folder`. The default folder is `modelnet10_voxels` in the folder that `REGAUGE_DATA` names.

    References:
        Wu et al. (2015), 3D ShapeNets.
    """
    if category not in get_args(Category):
        raise ValueError(f"there are no voxel grids of {category!r}; choose from {', '.join(get_args(Category))}")
    content = read(VOXELS, folder)
    with np.load(io.BytesIO(content), allow_pickle=False) as archive:
        bits = np.unpackbits(archive[category], axis=1)
    return torch.from_numpy(bits.reshape(-1, RESOLUTION, RESOLUTION, RESOLUTION)).bool()


def shared_start(folder: str | Path | None = None) -> dict[str, Tensor]:
    """Return parameters of a SIREN 3-512-512-512-512-1 with omega 30, by the names of `regauge.nets.siren.Siren`.

    Args:
        folder: The folder that contains the file. By default, `inr2vec_init` in the folder that the environment
            variable `REGAUGE_DATA` names.

    Raises:
        FileNotFoundError: The file does not exist. regauge cannot download this file.
        ValueError: The checksum of the file is wrong.

    References:
        De Luigi et al. (2023), section 3.
    """
    content = read(SHARED_START, folder)
    tensors = load(content)
    # There a sine layer is a linear layer and its activation so that names have one more number: layers.0.0.weight.
    parts = {name: name.split(".") for name in tensors}
    return {f"layers.{part[1]}.{part[-1]}": tensors[name] for name, part in sorted(parts.items())}

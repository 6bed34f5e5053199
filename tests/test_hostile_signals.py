"""Files of images, meshes, points and strips with random damage: each file is read, or refused in a sentence."""

import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from damage import LIMITED, bounded, damage_bytes
from PIL import Image

from regauge.inr import Inr
from regauge.inr.named_signals import ShapeSignal, read_signal
from regauge.inr.rendering.mesh import Mesh, save_mesh, save_points
from regauge.inr.rendering.strips import Strip, load_strips, save_strips

EXAMPLES = [pytest.param(25), pytest.param(300, marks=pytest.mark.thorough)]
"""The number of files that are tried."""
SIDES = torch.tensor([[0, 2, 1], [0, 1, 3], [0, 3, 2], [1, 2, 3]])
CORNERS = torch.tensor([[0.0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1]])


def _image(path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (6, 5, 3), np.uint8)
    Image.fromarray(pixels).save(path)


def _arrays(path: Path) -> None:
    np.savez(path, vertices=CORNERS.numpy(), faces=SIDES.numpy())


def _mesh(path: Path) -> None:
    pytest.importorskip("trimesh")
    save_mesh(Mesh(CORNERS, SIDES), path)


def _points(path: Path) -> None:
    pytest.importorskip("trimesh")
    save_points(CORNERS, path)


SIGNALS: dict[str, Callable[[Path], None]] = {
    **{f"x{suffix}": _image for suffix in (".png", ".jpg", ".bmp", ".tif", ".webp")},
    **{f"mesh{suffix}": _mesh for suffix in (".ply", ".obj", ".stl")},
    **{f"points{suffix}": _points for suffix in (".ply", ".xyz", ".npz")},
    "mesh.npz": _arrays,
}
"""Names of files, with functions that write them."""


def _read(path: Path) -> None:
    """Read a signal, and sample the data that a fit uses."""
    found = read_signal(str(path))
    if isinstance(found, ShapeSignal):
        found.field(Inr(), generator=torch.Generator().manual_seed(0))


@LIMITED
@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize("name", SIGNALS)
def test_a_signal_with_other_bytes_is_read_or_refused(name: str, examples: int, tmp_path: Path) -> None:
    path = tmp_path / name
    SIGNALS[name](path)
    _read(path)
    refused = damage_bytes(_read, path, examples)
    assert all(name in told for told in refused), [told for told in refused if name not in told][:3]


@LIMITED
@pytest.mark.parametrize("examples", EXAMPLES)
def test_strips_with_other_bytes_are_read_or_refused(examples: int, tmp_path: Path) -> None:
    made = Strip("aligned", "occupancy", ("A", "B"), (0.1, float("nan")), (Mesh(CORNERS, SIDES), None), None)
    path = save_strips([made], tmp_path / "strips.npz")
    assert load_strips(path)[0].names == made.names
    refused = damage_bytes(load_strips, path, examples)
    assert all("strips.npz" in told for told in refused)


@pytest.mark.parametrize("faces", [[[0, 1, 7]], [[0, 1, -1]], [0, 1, 2], [[0, 1]]])
def test_faces_of_vertices_that_are_not_there(faces: list[object], tmp_path: Path) -> None:
    path = tmp_path / "mesh.npz"
    np.savez(path, vertices=CORNERS.numpy(), faces=np.array(faces))
    with pytest.raises(ValueError, match=r"mesh\.npz' has vertices of shape \[4, 3\] and faces"):
        read_signal(str(path))


@LIMITED
def test_images_that_claim_more_than_they_hold(tmp_path: Path) -> None:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", 12000, 12000, 8, 2, 0, 0, 0)
    image = (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(99))) + chunk(b"IEND", b"")
    )
    (tmp_path / "x.png").write_bytes(image)
    refused: list[str] = []
    with bounded(refused):
        read_signal(str(tmp_path / "x.png"))
    assert "x.png" in refused[0]

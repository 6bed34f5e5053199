"""Data sets: shapes, ranges, checksums, and error messages about missing data."""

import gzip
import hashlib
import http.server
import io
import os
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from sklearn.datasets import load_breast_cancer

from regauge.data import data_files, images
from regauge.data.curves import waves
from regauge.data.data_files import DataFile, folders, locate, present
from regauge.data.images import (
    CIFAR10_FILE,
    CIFAR10_SHA256,
    FASHION_FILES,
    MNIST_SHA256,
    ImageData,
    cifar10,
    cifar100,
    digits,
    fashion_mnist,
    has_mnist,
    mnist,
)
from regauge.data.packaged import breast_cancer, help_topics, windows
from regauge.data.shapes import SHAPES_SHA256, shape


def has_cifar10() -> bool:
    """Return whether CIFAR-10 is on this machine, in one of its two forms."""
    return present(CIFAR10_FILE) is not None or any(
        all((place / name).is_file() for name in CIFAR10_SHA256) for place in folders("cifar10")
    )


needs_cifar10 = pytest.mark.skipif(not has_cifar10(), reason="REGAUGE_DATA names no folder with cifar10/")
needs_mnist = pytest.mark.skipif(not has_mnist(), reason="REGAUGE_DATA names no folder with mnist/")


def test_digits() -> None:
    data = digits()
    assert data.train_images.shape == (1437, 1, 8, 8)
    assert data.test_images.shape == (360, 1, 8, 8)
    assert data.train_images.dtype == torch.float32
    assert (float(data.train_images.min()), float(data.train_images.max())) == (0.0, 1.0)
    assert data.train_labels.dtype == torch.int64
    assert sorted(data.test_labels.unique().tolist()) == list(range(10))


def test_digits_are_split_alike_every_time_and_without_overlap() -> None:
    one, two = digits(), digits()
    assert torch.equal(one.test_images, two.test_images)
    rows = torch.cat([one.train_images, one.test_images]).flatten(1)
    assert len(rows.unique(dim=0)) == len(rows)


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Provide an empty cache, no data folder, and no downloads."""
    monkeypatch.delenv("REGAUGE_DATA", raising=False)
    monkeypatch.setenv("REGAUGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("REGAUGE_OFFLINE", "1")
    return tmp_path / "cache"


def test_normalized_pixels() -> None:
    data = digits()
    normalized = data.normalized(0.25, 0.5)
    for before, after in ((data.train_images, normalized.train_images), (data.test_images, normalized.test_images)):
        torch.testing.assert_close(after * 0.5 + 0.25, before)
    assert torch.equal(normalized.train_labels, data.train_labels)


def test_gray_images() -> None:
    colors = torch.eye(3).view(3, 3, 1, 1).expand(3, 3, 2, 2)  # Red, green and blue.
    data = ImageData("flags", torch.cat([colors, torch.ones(1, 3, 2, 2)]), torch.arange(4), colors, torch.arange(3))
    gray = data.grayscale()
    torch.testing.assert_close(gray.train_images[:, 0, 1, 1], torch.tensor([0.299, 0.587, 0.114, 1.0]))
    assert gray.test_images.shape == (3, 1, 2, 2)
    assert torch.equal(gray.train_labels, data.train_labels)
    with pytest.raises(ValueError, match="flags in gray has 1 channels; only red, green and blue make gray"):
        gray.grayscale()


def test_smaller_images() -> None:
    pixels = torch.arange(16.0).reshape(1, 1, 4, 4)
    data = ImageData("squares", pixels, torch.zeros(1), pixels + 1, torch.zeros(1))
    small = data.pooled(2)
    assert small.train_images.flatten().tolist() == [2.5, 4.5, 10.5, 12.5]
    assert small.test_images.flatten().tolist() == [3.5, 5.5, 11.5, 13.5]
    assert small.name == "squares at 2 x 2 pixels"
    with pytest.raises(ValueError, match="images of squares have 4 x 4 pixels, which squares of 3 x 3 do not fill"):
        data.pooled(3)
    shrunk = data.shrunk(3)
    assert shrunk.name == "squares at 3 x 3 pixels"
    assert shrunk.train_images.flatten().tolist() == [2.5, 3.5, 4.5, 6.5, 7.5, 8.5, 10.5, 11.5, 12.5]
    with pytest.raises(ValueError, match="images of squares have 4 x 4 pixels and cannot be shrunk to 5 x 5; give a"):
        data.shrunk(5)


@needs_mnist
def test_mnist() -> None:
    data = mnist()
    assert data.train_images.shape == (60000, 1, 28, 28)
    assert data.test_images.shape == (10000, 1, 28, 28)
    assert (float(data.train_images.min()), float(data.train_images.max())) == (0.0, 1.0)
    assert data.train_labels[:8].tolist() == [5, 0, 4, 1, 9, 2, 1, 3]
    assert data.train_labels.bincount().tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]


def test_mnist_without_a_folder(monkeypatch: pytest.MonkeyPatch, nowhere: Path, tmp_path: Path) -> None:
    assert not has_mnist()
    with pytest.raises(
        FileNotFoundError, match=r"set REGAUGE_DATA to a folder with 'train-images-idx3-ubyte.gz' in mnist/"
    ):
        mnist()
    monkeypatch.setenv("REGAUGE_DATA", str(tmp_path))
    assert not has_mnist()
    with pytest.raises(FileNotFoundError, match="REGAUGE_OFFLINE forbids downloads"):
        mnist()
    with pytest.raises(FileNotFoundError, match=r"train-images-idx3-ubyte' does not exist \(with or without \.gz\)"):
        mnist(tmp_path)


@pytest.mark.skipif(any(present(file) is None for file in FASHION_FILES), reason="Fashion-MNIST is not here")
def test_fashion_mnist() -> None:
    data = fashion_mnist()
    assert data.name == "Fashion-MNIST"
    assert data.train_images.shape == (60000, 1, 28, 28)
    assert data.test_labels.bincount().tolist() == [1000] * 10
    assert data.train_labels[:5].tolist() == [9, 0, 0, 3, 0]


@pytest.mark.parametrize("content", [b"", b"\0\0\x08\x01" + bytes(8)], ids=["empty", "no images"])
def test_mnist_with_another_content(tmp_path: Path, content: bytes) -> None:
    for name in MNIST_SHA256:
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(content))
    with pytest.raises(ValueError, match="is not the file of MNIST: its content has SHA-256"):
        mnist(tmp_path)


ZEROS = gzip.compress(bytes(1000), mtime=0)


@pytest.mark.parametrize(
    "content", [b"no gzip", ZEROS[:20], ZEROS[:10] + b"\xff" + ZEROS[11:]], ids=["no gzip", "cut off", "corrupt"]
)
def test_mnist_that_is_damaged(tmp_path: Path, content: bytes) -> None:
    for name in MNIST_SHA256:
        (tmp_path / f"{name}.gz").write_bytes(content)
    with pytest.raises(ValueError, match=r"is damaged .*fetch it again"):
        mnist(tmp_path)


@pytest.mark.slow
@needs_cifar10
def test_cifar10() -> None:
    data = cifar10()
    assert data.train_images.shape == (50000, 3, 32, 32)
    assert data.test_images.shape == (10000, 3, 32, 32)
    assert (float(data.train_images.min()), float(data.train_images.max())) == (0.0, 1.0)
    assert data.train_labels[:10].tolist() == [6, 9, 9, 4, 1, 1, 2, 7, 8, 3]
    assert data.train_labels.bincount().tolist() == [5000] * 10
    assert data.test_labels.bincount().tolist() == [1000] * 10


def test_cifar10_that_is_not_there_or_another(nowhere: Path, tmp_path: Path) -> None:
    assert not has_cifar10()
    with pytest.raises(FileNotFoundError, match=r"CIFAR-10 is not part.*cifar-10-binary.tar.gz' in cifar10/"):
        cifar10()
    with pytest.raises(FileNotFoundError, match=r"neither cifar-10-binary.tar.gz nor cifar10_jpeg_train.npz"):
        cifar10(tmp_path)
    for name in CIFAR10_SHA256:
        (tmp_path / name).write_bytes(b"PK")
    with pytest.raises(ValueError, match="is not the file of CIFAR-10: its content has SHA-256"):
        cifar10(tmp_path)


def archive(files: dict[str, bytes], path: Path) -> str:
    """Write a gzipped archive with the given files to a folder, and return its SHA-256."""
    with tarfile.open(path, mode="w:gz") as made:
        for name, content in files.items():
            member = tarfile.TarInfo(f"folder/{name}")
            member.size = len(content)
            made.addfile(member, io.BytesIO(content))
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_original_cifar10(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The archive has the layout of the original: one byte for the class, then red, green and blue, row by row."""
    names = [*(f"data_batch_{n}.bin" for n in range(1, 6)), "test_batch.bin", "readme.html"]
    files = {
        name: b"".join(
            bytes([10 * i + k]) + bytes([k]) * 1024 + bytes([i]) * 1024 + bytes(range(256)) * 4 for i in range(2)
        )
        for k, name in enumerate(names)
    }
    digest = archive(files, tmp_path / "cifar-10-binary.tar.gz")
    with pytest.raises(ValueError, match="is not the file of CIFAR-10"):
        cifar10(tmp_path)
    monkeypatch.setattr(images, "CIFAR10_FILE", replace(images.CIFAR10_FILE, sha256=digest))
    data = cifar10(tmp_path)
    assert (data.name, data.classes) == ("CIFAR-10", 10)
    assert data.train_labels.tolist() == [0, 10, 1, 11, 2, 12, 3, 13, 4, 14]
    assert data.test_labels.tolist() == [5, 15]
    assert torch.equal(data.train_images[3, 0] * 255, torch.full((32, 32), 1.0))
    assert torch.equal(data.train_images[3, 1] * 255, torch.full((32, 32), 1.0))
    expected = torch.arange(1024).reshape(32, 32) % 256
    assert torch.equal((data.test_images[0, 2] * 255).round().long(), expected)


def test_the_original_cifar100(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The archive has the layout of the original: for each image its superclass, its class, and red, green and blue."""

    def image(superclass: int, label: int, red: int) -> bytes:
        return bytes([superclass, label]) + bytes([red]) * 1024 + bytes([9]) * 1024 + bytes(range(256)) * 4

    files = {
        "fine_label_names.txt": b"apple\n",
        "test.bin": image(4, 0, 7),
        "train.bin": image(11, 19, 1) + image(15, 99, 2),
    }
    digest = archive(files, tmp_path / "cifar-100-binary.tar.gz")
    with pytest.raises(ValueError, match="is not the file of CIFAR-100"):
        cifar100(tmp_path)
    monkeypatch.setattr(images, "CIFAR100_FILE", replace(images.CIFAR100_FILE, sha256=digest))
    data = cifar100(tmp_path)
    assert (data.name, data.classes) == ("CIFAR-100", 100)
    assert (data.train_labels.tolist(), data.test_labels.tolist()) == ([19, 99], [0])
    assert torch.equal(data.train_images[1, :2] * 255, torch.tensor([2.0, 9.0])[:, None, None].expand(2, 32, 32))
    assert torch.equal(data.test_images[0, 0] * 255, torch.full((32, 32), 7.0))
    expected = torch.arange(1024).reshape(32, 32) % 256
    assert torch.equal((data.test_images[0, 2] * 255).round().long(), expected)


def test_cifar100_that_is_not_there(nowhere: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"CIFAR-100 is not part.*cifar-100-binary.tar.gz' in cifar100/"):
        cifar100()
    with pytest.raises(FileNotFoundError, match=r"cifar-100-binary.tar.gz' does not exist"):
        cifar100(tmp_path)


def test_breast_cancer() -> None:
    data = breast_cancer()
    assert data.train_inputs.shape == (455, 30)
    assert data.test_inputs.shape == (114, 30)
    assert (data.train_inputs.dtype, data.train_labels.dtype) == (torch.float32, torch.int64)
    torch.testing.assert_close(data.train_inputs.mean(0), torch.zeros(30), atol=1e-5, rtol=0)
    torch.testing.assert_close(data.train_inputs.std(0), torch.ones(30), atol=1e-5, rtol=0)
    both = torch.cat([data.train_labels, data.test_labels])
    assert both.bincount().tolist() == [212, 357]
    assert len(torch.cat([data.train_inputs, data.test_inputs]).unique(dim=0)) == 569
    # The rows that scikit-learn's split of a fifth with seed 42 holds out, as in paper 000.
    held_out = torch.from_numpy(load_breast_cancer().data[[204, 70, 131, 431, 540]])
    heights = (data.test_inputs[:5] - data.test_inputs[0]) / (data.test_inputs[1] - data.test_inputs[0])
    expected = (held_out - held_out[0]) / (held_out[1] - held_out[0])
    torch.testing.assert_close(heights[2:].double(), expected[2:], atol=1e-2, rtol=1e-3)


def test_shapes(nowhere: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"the shape 'spot' is not part.*it has no public address"):
        shape("spot")
    with pytest.raises(FileNotFoundError, match="does not exist"):
        shape("spot", tmp_path)
    with pytest.raises(ValueError, match=r"no shape 'cube'; choose from \['beast'"):
        shape("cube")
    (tmp_path / "spot.npz").write_bytes(b"PK")
    with pytest.raises(ValueError, match="is not the file of the shape 'spot'"):
        shape("spot", tmp_path)


@pytest.mark.skipif(not os.environ.get("REGAUGE_DATA"), reason="the shapes are not here")
@pytest.mark.parametrize("name", SHAPES_SHA256)
def test_shapes_lie_in_the_unit_ball(name: str) -> None:
    mesh = shape(name)
    assert float(mesh.vertices.norm(dim=1).max()) == pytest.approx(1, abs=1e-5)
    assert float(mesh.points.norm(dim=1).max()) <= 1 + 1e-5
    assert mesh.points.shape == (8192, 3)
    assert 0 <= int(mesh.faces.min()) <= int(mesh.faces.max()) == len(mesh.vertices) - 1
    edges = mesh.faces[:, [[0, 1], [1, 2], [2, 0]]].reshape(-1, 2).sort(1).values
    uses = edges.unique(dim=0, return_counts=True)[1]
    assert bool((uses == 2).all()) or not mesh.is_watertight


class Server(http.server.BaseHTTPRequestHandler):
    content = b"the data"
    requests: list[str] = []  # noqa: RUF012

    def do_GET(self) -> None:
        self.requests.append(self.path)
        self.send_response(404 if "missing" in self.path else 200)
        self.send_header("Content-Length", str(len(self.content)))
        self.end_headers()
        self.wfile.write(self.content[:: -1 if "wrong" in self.path else 1])

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def address(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return the address of a server on this machine that sends the same bytes for any request, or reversed bytes if
    they must be wrong.
    """
    monkeypatch.delenv("REGAUGE_OFFLINE")
    Server.requests.clear()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


GOOD = hashlib.sha256(Server.content).hexdigest()


def test_a_file_is_downloaded_once(
    address: str, nowhere: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = DataFile(
        "the set", "set", "a.bin", GOOD, (f"{address}/missing", f"{address}/wrong", f"{address}/there"), ("b.bin",)
    )
    assert present(file) is None
    path = locate(file)
    assert path == nowhere / "set" / "a.bin"
    assert path.read_bytes() == Server.content
    assert Server.requests == ["/missing", "/wrong", "/there"]
    assert locate(file) == path == present(file)
    assert len(Server.requests) == 3
    # The user's folder comes first, under any of the names.
    (tmp_path / "set").mkdir()
    own = tmp_path / "set" / "b.bin"
    own.write_bytes(b"mine")
    monkeypatch.setenv("REGAUGE_DATA", str(tmp_path))
    assert locate(file) == own


def test_what_cannot_be_downloaded(address: str, nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    away = DataFile("the set", "set", "a.bin", GOOD, (f"{address}/wrong", f"{address}/missing"))
    message = r"set REGAUGE_DATA .*it could not be downloaded: .*/wrong sent another file: .*hash.*; .*/missing: 404"
    with pytest.raises(FileNotFoundError, match=message):
        locate(away)
    assert not [path for path in nowhere.rglob("*") if path.is_file()]
    count = len(Server.requests)
    monkeypatch.setenv("REGAUGE_OFFLINE", "1")
    with pytest.raises(FileNotFoundError, match="REGAUGE_OFFLINE forbids"):
        locate(away)
    assert len(Server.requests) == count


def test_the_cache_is_that_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REGAUGE_CACHE", raising=False)
    monkeypatch.delenv("REGAUGE_DATA", raising=False)
    (folder,) = data_files.folders("mnist")
    assert folder.parts[-2:] == ("regauge", "mnist")


def test_waves_are_sines_on_two_grids() -> None:
    data = waves(7, 32, generator=torch.Generator().manual_seed(0))
    assert data.targets.shape == (7, 32, 1)
    assert data.test_targets.shape == (7, 31, 1)
    assert bool(((data.frequencies >= 0.5) & (data.frequencies <= 10)).all())
    for k in range(7):
        assert torch.allclose(data.targets[k], torch.sin(data.frequencies[k] * data.inputs))
        assert torch.allclose(data.test_targets[k], torch.sin(data.frequencies[k] * data.test_inputs))
    assert float(data.inputs[-1]) == pytest.approx(torch.pi)
    assert not torch.isin(data.test_inputs, data.inputs).any()
    with pytest.raises(ValueError, match=r"sampled at both ends.*points=1"):
        waves(1, 1, generator=torch.Generator())


def test_the_corpus_is_the_text_of_pythons_help() -> None:
    from pydoc_data.topics import topics

    data = help_topics()
    assert data.decode(torch.cat([data.train, data.validation])) == "\n\n".join(topics[key] for key in sorted(topics))
    assert len(data.validation) == pytest.approx(len(data.train) / 9, rel=1e-4)
    assert data.symbols == "".join(sorted(set(data.symbols)))
    assert int(data.train.max()) < len(data.symbols)
    assert data.name == help_topics().name


def test_windows_ask_for_the_next_symbol() -> None:
    inputs, targets = windows(torch.arange(11), 3)
    assert inputs.tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert targets.tolist() == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert windows(torch.arange(10), 3)[1].tolist()[-1] == [7, 8, 9]
    with pytest.raises(ValueError, match="3 symbols, too few for one piece of 3"):
        windows(torch.arange(3), 3)

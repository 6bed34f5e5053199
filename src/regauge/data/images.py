"""Small image classification sets: scikit-learn's digits, and MNIST and CIFAR-10 where `REGAUGE_DATA` has them."""

import gzip
import hashlib
import io
import itertools
import os
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

FOLDER_VARIABLE = "REGAUGE_DATA"
"""Environment variable with the folder of data sets that do not ship with a dependency."""

MNIST_SHA256 = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}
"""Of the decompressed files, so that it does not matter who compressed them."""

CIFAR10_SHA256 = {
    "cifar10_jpeg_train.npz": "9752918826b7a7c2cfc9d018238ff2bd248088c64ecccd6b162c692e4d5e1753",
    "cifar10_jpeg_test.npz": "8c0c3af217b929cf00918c0eda116507b1d616f7b5a4a72fc19a716d0f5c16fb",
}
"""Archives of JPEG files: `jpeg` holds them one after the other, `offsets` says where each begins, `labels`."""

DIGITS_TEST = 360
"""Images of the digits that are kept for testing: 20%."""


@dataclass(frozen=True)
class ImageData:
    """Images and their classes.

    Attributes:
        name: What people call it.
        train_images: float32 in [0, 1], `[n, channels, height, width]`.
        train_labels: int64, `[n]`.
        test_images: As the training images.
        test_labels: As the training labels.
        classes: Number of classes.
    """

    name: str
    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    classes: int = 10

    def normalized(self, mean: float, std: float) -> "ImageData":
        """The same images with pixels `(x - mean) / std`."""
        return replace(self, train_images=(self.train_images - mean) / std, test_images=(self.test_images - mean) / std)


def digits() -> ImageData:
    """1,797 handwritten digits of 8 x 8 pixels, which ship with scikit-learn; the same 360 are always for testing."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = torch.from_numpy(bunch.images).float().unsqueeze(1) / 16
    labels = torch.from_numpy(bunch.target).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order[:DIGITS_TEST], order[DIGITS_TEST:]
    return ImageData("digits", images[train], labels[train], images[test], labels[test])


def mnist(folder: str | Path | None = None) -> ImageData:
    """MNIST: 60,000 handwritten digits of 28 x 28 pixels for training and 10,000 for testing.

    Args:
        folder: Where its four IDX files are, gzipped or not; `mnist` in the folder that the environment variable
            `REGAUGE_DATA` names if left out.

    Raises:
        FileNotFoundError: `REGAUGE_DATA` is not set, or a file is not there.
        ValueError: A file's checksum is wrong.

    References:
        LeCun et al. (1998), Gradient-based learning applied to document recognition.
    """
    folder = _folder(folder, "mnist", "MNIST", "its four IDX files")
    arrays = {name: _read_idx(folder, name, digest) for name, digest in MNIST_SHA256.items()}

    def images(name: str) -> Tensor:
        return torch.from_numpy(arrays[name]).float().unsqueeze(1) / 255

    def labels(name: str) -> Tensor:
        return torch.from_numpy(arrays[name]).long()

    return ImageData(
        "MNIST",
        images("train-images-idx3-ubyte"),
        labels("train-labels-idx1-ubyte"),
        images("t10k-images-idx3-ubyte"),
        labels("t10k-labels-idx1-ubyte"),
    )


def has_mnist() -> bool:
    """Whether `REGAUGE_DATA` names a folder that has MNIST."""
    root = os.environ.get(FOLDER_VARIABLE)
    return bool(root) and all(_find(Path(str(root)) / "mnist", name) is not None for name in MNIST_SHA256)


def cifar10(folder: str | Path | None = None) -> ImageData:
    """CIFAR-10: 50,000 photographs of 32 x 32 pixels for training and 10,000 for testing, recompressed as JPEG.

    The recompression loses detail (30 dB against the original), so accuracies are a little below published ones.

    Args:
        folder: Where `cifar10_jpeg_train.npz` and `cifar10_jpeg_test.npz` are; `cifar10` in the folder that the
            environment variable `REGAUGE_DATA` names if left out.

    Raises:
        FileNotFoundError: `REGAUGE_DATA` is not set, or a file is not there.
        ValueError: A file's checksum is wrong.

    References:
        Krizhevsky (2009), Learning multiple layers of features from tiny images.
    """
    folder = _folder(folder, "cifar10", "CIFAR-10", " and ".join(CIFAR10_SHA256))
    (train_images, train_labels), (test_images, test_labels) = (
        _read_jpegs(folder / name, digest) for name, digest in CIFAR10_SHA256.items()
    )
    return ImageData("CIFAR-10 (JPEG-recompressed)", train_images, train_labels, test_images, test_labels)


def has_cifar10() -> bool:
    """Whether `REGAUGE_DATA` names a folder that has CIFAR-10."""
    root = os.environ.get(FOLDER_VARIABLE)
    return bool(root) and all((Path(str(root)) / "cifar10" / name).is_file() for name in CIFAR10_SHA256)


def _folder(folder: str | Path | None, key: str, name: str, files: str) -> Path:
    """The folder that was given, or that of the data set in the folder of all."""
    if folder is not None:
        return Path(folder)
    root = os.environ.get(FOLDER_VARIABLE)
    if not root:
        raise FileNotFoundError(
            f"{name} does not ship with regauge: set {FOLDER_VARIABLE} to a folder with {files} in {key}/, or use the "
            "digits"
        )
    return Path(root) / key


def _read_jpegs(path: Path, digest: str) -> tuple[Tensor, Tensor]:
    """Images and labels of an archive with all JPEG files in one array, their offsets, and the classes."""
    from PIL import Image

    if not path.is_file():
        raise FileNotFoundError(f"{str(path)!r} is not there; CIFAR-10 has two such files")
    content = path.read_bytes()
    _check(path, content, digest, "CIFAR-10")
    with np.load(io.BytesIO(content), allow_pickle=False) as archive:
        jpeg, offsets, labels = archive["jpeg"], archive["offsets"], archive["labels"]
    pixels = np.stack(
        [np.asarray(Image.open(io.BytesIO(jpeg[begin:end].tobytes()))) for begin, end in itertools.pairwise(offsets)]
    )
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255, torch.from_numpy(labels).long()


def _check(path: Path, content: bytes, digest: str, name: str) -> None:
    found = hashlib.sha256(content).hexdigest()
    if found != digest:
        raise ValueError(
            f"{str(path)!r} is not the file of {name}: its content has SHA-256 {found[:16]}..., not {digest[:16]}...; "
            "fetch it again"
        )


def _find(folder: Path, name: str) -> Path | None:
    return next((path for path in (folder / f"{name}.gz", folder / name) if path.is_file()), None)


def _read_idx(folder: Path, name: str, digest: str) -> "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]":
    """The array of an IDX file: two zero bytes, a type code (8: unsigned bytes), the rank, the shape, the values."""
    path = _find(folder, name)
    if path is None:
        raise FileNotFoundError(f"{str(folder / name)!r} is not there (with or without .gz); MNIST has four such files")
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (gzip.BadGzipFile, EOFError) as error:
        raise ValueError(f"{str(path)!r} is damaged ({error}); fetch it again") from error
    _check(path, content, digest, "MNIST")
    rank = content[3]
    shape = np.frombuffer(content, ">i4", rank, 4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * rank).reshape(shape).copy()

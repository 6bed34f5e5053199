"""Small image classification sets: scikit-learn's digits, MNIST, Fashion-MNIST, CIFAR-10 and CIFAR-100."""

import gzip
import io
import itertools
import tarfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from regauge.data.data_files import DataFile, check, folders, in_folder, locate, present, read

MNIST_SHA256 = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}
"""SHA-256 of MNIST's decompressed files. The checksums do not depend on the compression."""

FASHION_SHA256 = {
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}
"""SHA-256 of Fashion-MNIST's decompressed files."""


def _idx_files(data: str, folder: str, addresses: Sequence[str], digests: Sequence[str]) -> tuple[DataFile, ...]:
    """Return the four gzipped files of a data set, each with its checksum and with its URLs at the given addresses."""
    return tuple(
        DataFile(data, folder, f"{name}.gz", digest, tuple(f"{address}/{name}.gz" for address in addresses), (name,))
        for name, digest in zip(MNIST_SHA256, digests, strict=True)
    )


MNIST_FILES = _idx_files(
    "MNIST",
    "mnist",
    ["https://ossci-datasets.s3.amazonaws.com/mnist", "https://storage.googleapis.com/cvdf-datasets/mnist"],
    [
        "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
    ],
)
FASHION_FILES = _idx_files(
    "Fashion-MNIST",
    "fashion_mnist",
    [
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
        "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion",
    ],
    [
        "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
        "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
        "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
        "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
    ],
)

CIFAR10_SHA256 = {
    "cifar10_jpeg_train.npz": "9752918826b7a7c2cfc9d018238ff2bd248088c64ecccd6b162c692e4d5e1753",
    "cifar10_jpeg_test.npz": "8c0c3af217b929cf00918c0eda116507b1d616f7b5a4a72fc19a716d0f5c16fb",
}
"""SHA-256 of archives of JPEG files. An archive contains `jpeg` (the concatenated files), `offsets` (the first byte of
each file) and `labels`."""

CIFAR10_FILE = DataFile(
    "CIFAR-10",
    "cifar10",
    "cifar-10-binary.tar.gz",
    "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
    ("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",),
)
"""The archive of the original images."""

CIFAR100_FILE = DataFile(
    "CIFAR-100",
    "cifar100",
    "cifar-100-binary.tar.gz",
    "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
    ("https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",),
)

DIGITS_TEST = 360
"""The number of digit images that are reserved for testing: 20%."""


LUMINANCE = (0.299, 0.587, 0.114)
"""The weights of red, green and blue in the luminance (ITU-R BT.601)."""


@dataclass(frozen=True)
class ImageData:
    """Images and their class labels.

    Attributes:
        name: The usual name of the data set.
        train_images: float32 in [0, 1], `[n, channels, height, width]`.
        train_labels: int64, `[n]`.
        test_images: Test images in the format of the training images.
        test_labels: Test labels in the format of the training labels.
        classes: The number of classes.
    """

    name: str
    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    classes: int = 10

    def normalized(self, mean: float, std: float) -> "ImageData":
        """Return a copy with normalized pixels, `(x - mean) / std`."""
        return replace(self, train_images=(self.train_images - mean) / std, test_images=(self.test_images - mean) / std)

    def grayscale(self) -> "ImageData":
        """Return the luminance of color images, one channel (ITU-R BT.601: 0.299 red, 0.587 green, 0.114 blue)."""
        channels, weights = self.train_images.shape[1], torch.tensor(LUMINANCE)
        if channels != len(weights):
            raise ValueError(f"{self.name} has {channels} channels; only red, green and blue make gray")
        both = (self.train_images, self.test_images)
        train, test = (torch.einsum("nchw,c->nhw", images, weights).unsqueeze(1) for images in both)
        return replace(self, name=f"{self.name} in gray", train_images=train, test_images=test)

    def pooled(self, size: int) -> "ImageData":
        """Return smaller images, in which each pixel is the mean of a block of `size` by `size` pixels. `size` must
        divide height and width.
        """
        height, width = self.train_images.shape[2:]
        if size < 1 or height % size or width % size:
            raise ValueError(
                f"images of {self.name} have {height} x {width} pixels, which squares of {size} x {size} do not fill; "
                "give a size that divides both"
            )
        train, test = (functional.avg_pool2d(images, size) for images in (self.train_images, self.test_images))
        name = f"{self.name} at {height // size} x {width // size} pixels"
        return replace(self, name=name, train_images=train, test_images=test)

    def shrunk(self, side: int) -> "ImageData":
        """Return smaller images of `side` by `side` pixels. Each new pixel is the mean of the original pixels that it
        overlaps.
        """
        height, width = self.train_images.shape[2:]
        if not 0 < side <= min(height, width):
            raise ValueError(
                f"images of {self.name} have {height} x {width} pixels and cannot be shrunk to {side} x {side}; give a "
                f"side from 1 to {min(height, width)}"
            )
        parts = (self.train_images, self.test_images)
        train, test = (functional.adaptive_avg_pool2d(images, side) for images in parts)
        return replace(self, name=f"{self.name} at {side} x {side} pixels", train_images=train, test_images=test)


def pixel_centers(height: int, width: int) -> Tensor:
    """Return the centers of an image's pixels as (row, column) in [-1, 1]^2, row by row, `[height * width, 2]`."""
    ys, xs = (((torch.arange(size) + 0.5) / size * 2 - 1) for size in (height, width))
    return torch.cartesian_prod(ys, xs)


def digits() -> ImageData:
    """Return 1,797 handwritten digits of 8 x 8 pixels from scikit-learn. The test set always contains the same 360
    digits.
    """
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = torch.from_numpy(bunch.images).float().unsqueeze(1) / 16
    labels = torch.from_numpy(bunch.target).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order[:DIGITS_TEST], order[DIGITS_TEST:]
    return ImageData("digits", images[train], labels[train], images[test], labels[test])


def mnist(folder: str | Path | None = None) -> ImageData:
    """Return MNIST: 60,000 handwritten digits of 28 x 28 pixels for training and 10,000 for testing.

    Args:
        folder: The folder of the four IDX files, gzipped or not. By default, `mnist` in the folder that the environment
            variable `REGAUGE_DATA` names. Missing files are downloaded once.

    Raises:
        FileNotFoundError: A file is missing and cannot be downloaded.
        ValueError: The checksum of a file is wrong.

    References:
        LeCun et al. (1998), Gradient-based learning applied to document recognition.
    """
    return _idx_images("MNIST", MNIST_FILES, MNIST_SHA256, folder)


def fashion_mnist(folder: str | Path | None = None) -> ImageData:
    """Return Fashion-MNIST: photographs of ten kinds of clothes, with the numbers, sizes and files of MNIST.

    See `mnist` for files, errors and `folder`. The default folder is `fashion_mnist` in the data folder.

    References:
        Xiao, Rasul and Vollgraf (2017), Fashion-MNIST.
    """
    return _idx_images("Fashion-MNIST", FASHION_FILES, FASHION_SHA256, folder)


def has_mnist() -> bool:
    """Return whether MNIST is on this machine and needs no download."""
    return all(present(file) is not None for file in MNIST_FILES)


def cifar10(folder: str | Path | None = None) -> ImageData:
    """Return CIFAR-10: 50,000 photographs of 32 x 32 pixels for training and 10,000 for testing.

    The files in `REGAUGE_DATA` may be the original archive, or images recompressed as JPEG. Recompression loses detail
    (30 dB against the original), so accuracies are slightly below published accuracies. The name of the returned data
    shows which version was read.

    Args:
        folder: A folder that contains `cifar-10-binary.tar.gz`, or `cifar10_jpeg_train.npz` and
            `cifar10_jpeg_test.npz`. By default, `cifar10` in the folder that the environment variable `REGAUGE_DATA`
            names. If the default folder is missing, the original archive is downloaded once.

    Raises:
        FileNotFoundError: A file is missing and cannot be downloaded.
        ValueError: The checksum of a file is wrong.

    References:
        Krizhevsky (2009), Learning multiple layers of features from tiny images.
    """
    places = [Path(folder)] if folder is not None else folders("cifar10")
    for place in places:
        original = in_folder(place, CIFAR10_FILE)
        if original is not None:
            return _read_cifar10(original)
        if all((place / name).is_file() for name in CIFAR10_SHA256):
            (train_images, train_labels), (test_images, test_labels) = (
                _read_jpegs(place / name, digest) for name, digest in CIFAR10_SHA256.items()
            )
            return ImageData("CIFAR-10 (JPEG-recompressed)", train_images, train_labels, test_images, test_labels)
    if folder is not None:
        raise FileNotFoundError(
            f"neither {CIFAR10_FILE.name} nor {' and '.join(CIFAR10_SHA256)} are in {str(folder)!r}"
        )
    return _read_cifar10(locate(CIFAR10_FILE))


def cifar100(folder: str | Path | None = None) -> ImageData:
    """Return CIFAR-100: photographs with CIFAR-10's numbers and size, in 100 classes (the fine labels).

    Args:
        folder: A folder that contains `cifar-100-binary.tar.gz`. By default, `cifar100` in the folder that the
            environment variable `REGAUGE_DATA` names. If the default folder is missing, the archive is downloaded once.

    Raises:
        FileNotFoundError: The file is missing and cannot be downloaded.
        ValueError: The checksum of the file is wrong.

    References:
        Krizhevsky (2009), Learning multiple layers of features from tiny images.
    """
    return _read_cifar(read(CIFAR100_FILE, folder), CIFAR100_FILE.data, ["train"], "test", labels=2, classes=100)


def _read_cifar10(path: Path) -> ImageData:
    content = path.read_bytes()
    check(path, content, CIFAR10_FILE.sha256, CIFAR10_FILE.data)
    parts = [f"data_batch_{k}" for k in range(1, 6)]
    return _read_cifar(content, CIFAR10_FILE.data, parts, "test_batch", labels=1, classes=10)


def _read_cifar(content: bytes, name: str, train: Sequence[str], test: str, *, labels: int, classes: int) -> ImageData:
    """Read an original archive. For each image, the archive contains `labels` bytes, of which the last is the class,
    and then 3,072 pixels.
    """
    parts: dict[str, bytes] = {}
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        for member in archive:
            stream = archive.extractfile(member)
            if stream is not None and member.name.endswith(".bin"):
                parts[Path(member.name).stem] = stream.read()

    def images(names: Sequence[str]) -> tuple[Tensor, Tensor]:
        rows = np.concatenate([np.frombuffer(parts[name], np.uint8).reshape(-1, labels + 3072) for name in names])
        pixels = torch.from_numpy(rows[:, labels:].reshape(-1, 3, 32, 32).copy()).float() / 255
        return pixels, torch.from_numpy(rows[:, labels - 1].copy()).long()

    return ImageData(name, *images(train), *images([test]), classes)


def _read_jpegs(path: Path, digest: str) -> tuple[Tensor, Tensor]:
    """Return images and labels from an archive of concatenated JPEG files, their offsets, and class labels."""
    from PIL import Image

    content = path.read_bytes()
    check(path, content, digest, "CIFAR-10")
    with np.load(io.BytesIO(content), allow_pickle=False) as archive:
        jpeg, offsets, labels = archive["jpeg"], archive["offsets"], archive["labels"]
    pixels = np.stack(
        [np.asarray(Image.open(io.BytesIO(jpeg[begin:end].tobytes()))) for begin, end in itertools.pairwise(offsets)]
    )
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255, torch.from_numpy(labels).long()


def _idx_images(
    name: str, files: tuple[DataFile, ...], contents: Mapping[str, str], folder: str | Path | None
) -> ImageData:
    """Return data from four IDX files: training images and labels, test images and labels."""
    arrays = []
    for file, digest in zip(files, contents.values(), strict=True):
        path = locate(file) if folder is None else in_folder(Path(folder), file)
        if path is None:
            place = str(Path(str(folder)) / file.others[0])
            raise FileNotFoundError(
                f"{place!r} does not exist (with or without .gz); {name} has four such files; put all of them there"
            )
        arrays.append(torch.from_numpy(_read_idx(path, digest, name)))
    images, labels, *test = (t.long() if t.ndim == 1 else t.float().unsqueeze(1) / 255 for t in arrays)
    return ImageData(name, images, labels, test[0], test[1])


def _read_idx(path: Path, digest: str, data: str) -> "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]":
    """Return the array in an IDX file: two zero bytes, a type code (8: unsigned bytes), the rank, shape and entries."""
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{str(path)!r} is damaged ({error}); fetch it again") from error
    check(path, content, digest, data)
    rank = content[3]
    shape = np.frombuffer(content, ">i4", rank, 4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * rank).reshape(shape).copy()

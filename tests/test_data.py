"""Data sets: shapes, ranges, checksums, and the sentences about what is missing."""

import gzip
from pathlib import Path

import pytest
import torch

from regauge.data.images import CIFAR10_SHA256, MNIST_SHA256, cifar10, digits, has_cifar10, has_mnist, mnist
from regauge.data.text import help_topics, windows
from regauge.data.waves import waves

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


@needs_mnist
def test_normalized_pixels() -> None:
    data = digits()
    normalized = data.normalized(0.25, 0.5)
    for before, after in ((data.train_images, normalized.train_images), (data.test_images, normalized.test_images)):
        torch.testing.assert_close(after * 0.5 + 0.25, before)
    assert torch.equal(normalized.train_labels, data.train_labels)


def test_mnist() -> None:
    data = mnist()
    assert data.train_images.shape == (60000, 1, 28, 28)
    assert data.test_images.shape == (10000, 1, 28, 28)
    assert (float(data.train_images.min()), float(data.train_images.max())) == (0.0, 1.0)
    assert data.train_labels[:8].tolist() == [5, 0, 4, 1, 9, 2, 1, 3]
    assert data.train_labels.bincount().tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]


def test_mnist_without_a_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("REGAUGE_DATA", raising=False)
    assert not has_mnist()
    with pytest.raises(FileNotFoundError, match="set REGAUGE_DATA to a folder with its four IDX files in mnist/"):
        mnist()
    monkeypatch.setenv("REGAUGE_DATA", str(tmp_path))
    assert not has_mnist()
    with pytest.raises(FileNotFoundError, match=r"train-images-idx3-ubyte' is not there \(with or without \.gz\)"):
        mnist()


@pytest.mark.parametrize("content", [b"", b"\0\0\x08\x01" + bytes(8)], ids=["empty", "no images"])
def test_mnist_with_another_content(tmp_path: Path, content: bytes) -> None:
    for name in MNIST_SHA256:
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(content))
    with pytest.raises(ValueError, match="is not the file of MNIST: its content has SHA-256"):
        mnist(tmp_path)


@pytest.mark.parametrize("content", [b"no gzip", gzip.compress(bytes(1000), mtime=0)[:20]], ids=["no gzip", "cut off"])
def test_mnist_that_is_damaged(tmp_path: Path, content: bytes) -> None:
    for name in MNIST_SHA256:
        (tmp_path / f"{name}.gz").write_bytes(content)
    with pytest.raises(ValueError, match="is damaged"):
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


def test_cifar10_that_is_not_there_or_another(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("REGAUGE_DATA", raising=False)
    assert not has_cifar10()
    with pytest.raises(FileNotFoundError, match=r"CIFAR-10 does not ship.*cifar10_jpeg_test.npz in cifar10/"):
        cifar10()
    monkeypatch.setenv("REGAUGE_DATA", str(tmp_path))
    assert not has_cifar10()
    with pytest.raises(FileNotFoundError, match=r"cifar10_jpeg_train.npz' is not there; CIFAR-10 has two such files"):
        cifar10()
    for name in CIFAR10_SHA256:
        (tmp_path / name).write_bytes(b"PK")
    with pytest.raises(ValueError, match="is not the file of CIFAR-10: its content has SHA-256"):
        cifar10(tmp_path)


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

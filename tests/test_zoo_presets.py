"""Presets: architectures of the correct size, data that fit them, and a few training steps."""

import math
from dataclasses import replace

import pytest
import torch

from regauge.data.images import ImageData
from regauge.zoo import Examples, presets, train
from regauge.zoo.training.examples import image_signals

SIZES = {
    "uci-mlps": 802,
    "mnist-tiny-mlps": 7960,
    "fashion-tiny-mlps": 7960,
    "mnist-mlps": 134_794,
    "fashion-mlps": 134_794,
    "cifar10-mlps": 427_658,
    "cifar10-cnns": 311_690,
    "cifar10-vggs": 9_225_610,
    "cifar10-halves": 311_690,
    "small-cnns-relu": 4970,  # As many as the public zoo's.
    "small-cnns-tanh": 4970,
    "cnn-zoo": 4970,
    "cnn-zoo-sgd": 4970,
    "vit-zoo": 7850,
    "sine-inrs": 1153,
    "mnist-inrs": 1185,
    "mnist-inrs-one-start": 1185,
    "fashion-inrs": 1185,
    "cifar10-inrs": 3363,
}
SHAPES = {
    "breast-cancer": (30,),
    "mnist": (1, 28, 28),
    "fashion-mnist": (1, 28, 28),
    "cifar10": (3, 32, 32),
    "cifar10-gray": (1, 32, 32),
    "sine-waves": (1,),
    "mnist-signals": (2,),
    "fashion-mnist-signals": (2,),
    "cifar10-signals": (2,),
}


def few(name: str, out: int) -> Examples:
    """Return a few random examples in the shapes of a data set."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.rand(40, *SHAPES[name], generator=generator)
    if len(SHAPES[name]) > 1 or name == "breast-cancer":
        labels = torch.arange(40) % out
        return Examples(name, inputs, labels, inputs, labels)
    values = torch.rand(3, 40, out, generator=generator)
    return Examples(name, inputs, values, inputs, values, is_signals=True)


@pytest.mark.parametrize("name", presets.PRESETS)
def test_presets_train(name: str) -> None:
    config = presets.PRESETS[name]()
    assert config.architecture.size == SIZES[name]
    data = few(config.data, config.architecture.layout[-1].shape[0])
    short = replace(config, count=2, epochs=None, steps=2, batch=4, group=1, checkpoints=None)
    rows = [row for block in train(short, data=data) for row in block.rows]
    assert [row["id"] for row in rows] == [0, 1]
    assert all(math.isfinite(row["validation_loss"]) for row in rows)
    assert (rows[0]["seed"] == rows[1]["seed"]) == config.initialization.is_common


def test_the_initialization_of_paper_000() -> None:
    config = replace(presets.uci_mlps(200), epochs=None, steps=1)
    config = replace(config, checkpoints=presets.Checkpoints(1))
    start = next(train(config))
    assert start.rows[0]["step"] == 0
    weights, biases = (
        torch.cat([t.flatten() for n, t in start.params.items() if n.endswith(kind)]) for kind in ("weight", "bias")
    )
    assert float(weights.std()) == pytest.approx(0.1, rel=0.02)
    assert float(weights.mean()) == pytest.approx(0, abs=0.01)
    assert not biases.any()


def test_the_steps_that_paper_000_keeps() -> None:
    block = presets.uci_mlps()
    assert block.checkpoints is not None
    total = block.total_steps(few("breast-cancer", 2))
    assert total == 50  # epochs of 40 examples, fewer than a batch
    assert min(block.checkpoints.steps(1000)) == 80
    assert sorted(block.checkpoints.steps(92)) == [80, 84, 88]


def test_signals_of_images_are_of_both_sets_from_the_start() -> None:
    data = ImageData(
        "images",
        torch.arange(12.0).reshape(12, 1, 1, 1),
        torch.arange(12),
        torch.arange(12.0, 14.0).reshape(2, 1, 1, 1),
        torch.arange(12, 14),
    )
    examples = image_signals(data)
    assert examples.is_test is not None
    assert examples.labels is not None
    assert examples.is_test.nonzero().flatten().tolist() == [3, 10]
    assert torch.equal(examples.is_test, examples.labels >= 12)
    assert torch.equal(examples.targets.flatten(), examples.labels.float())
    config = replace(presets.mnist_inrs(5), steps=1, architecture=presets.siren_architecture(2, 4, 1, depth=1))
    rows = [row for block in train(config, data=examples) for row in block.rows]
    assert [row["split"] for row in rows] == ["train", "train", "train", "test", "train"]

"""The studies of merging: properties that hold at any scale, even after little training."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from regauge.checkpoints.checkpoint import load
from regauge.nets.classification import ClassifierConfig
from regauge.training.optimizers import Adam
from regauge_papers import one_classifier, populations, resnets
from regauge_papers.experiment import Run
from regauge_papers.table import Table

pytestmark = pytest.mark.usefixtures("without_data")


def numbers(table: Table, name: str) -> dict[str, list[float]]:
    return {row.label: list(row.values[name][0]) for row in table.rows if name in row.values}


def test_merging_trained_networks(tmp_path: Path) -> None:
    config = one_classifier.mnist_config("smoke")
    population = replace(config.population, training=ClassifierConfig(epochs=20, batch=32, optimizer=Adam(5e-3)))
    table = one_classifier.measure(replace(config, population=population, sets=1), Run("smoke", 0, tmp_path))
    (loss,), (accuracy,) = (zip(*numbers(table, name).values(), strict=True) for name in ("loss", "accuracy"))
    labels = list(numbers(table, "loss"))
    losses = dict(zip(labels, loss, strict=True))
    assert losses["ensemble: mean of the probabilities"] <= losses["the networks, mean"]  # Jensen's inequality
    for label in one_classifier.METHODS:
        if label != "mean as trained":
            assert losses[label] < losses["mean as trained"]
            assert numbers(table, "CPU s")[label][0] > 0
    assert max(accuracy) == dict(zip(labels, accuracy, strict=True))["ensemble: mean of the probabilities"]
    assert len(table.rows) == 2 + 2 * len(one_classifier.METHODS)


def test_equal_networks_are_merged_into_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def equal(*args: Any) -> list[Any]:
        return [[network] * 6 for (network, *_) in trained(*args)]

    trained = populations.networks
    monkeypatch.setattr(one_classifier, "networks", equal)
    table = one_classifier.measure(one_classifier.cifar10_config("smoke"), Run("smoke", 0, tmp_path))
    losses = numbers(table, "loss")
    for values in losses.values():
        assert values == pytest.approx(losses["the networks, mean"], rel=1e-4)


def test_networks_of_another_precision_are_not_taken_for_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regauge_papers.experiment.multiplies_bfloat16", lambda device: True)
    population, run = one_classifier.mnist_config("smoke").population, Run("smoke", 0, tmp_path)
    data = population.read(run)
    for is_bfloat16 in (False, True):
        populations.networks(replace(population, is_bfloat16=is_bfloat16), data, run, range(1))
    single, half = (load(path) for path in sorted(tmp_path.rglob("*.safetensors"), key=lambda p: p.stat().st_mtime_ns))
    assert all(tensor.dtype == torch.float32 for tensor in half.values())
    assert all(torch.allclose(half[name], single[name], atol=0.05) for name in single)
    assert not any(torch.equal(half[name], single[name]) for name in single)


def test_lines_begin_and_end_at_the_networks_and_statistics_matter(tmp_path: Path) -> None:
    config = resnets.config("smoke")
    training = ClassifierConfig(epochs=4, batch=16, optimizer=Adam(1e-2))
    population = replace(config[1].population, training=training, examples=500)
    config = {1: replace(config[1], population=population, pairs=1)}
    table = resnets.measure(config, Run("smoke", 0, tmp_path))
    assert [row.label for row in table.rows][:2] == ["x1: as trained", "x1: as trained, new statistics"]
    first, *others, tempered = [(row.curve[0]["loss"], row.curve[-1]["loss"]) for row in table.rows]
    assert all(ends == pytest.approx(first, rel=1e-6) for ends in others)  # alignment moves the second one
    assert table.rows[-1].label == "x1: Naive, temperature fitted"
    assert all(abs(one - other) > 1e-6 for one, other in zip(tempered, first, strict=True))  # the ends have their own
    accuracies = [[point["accuracy"] for point in table.rows[k].curve] for k in (0, -1)]
    assert accuracies[0] == accuracies[1]  # which no temperature changes
    assert max(first) < 1.0  # in evaluation mode and float32 the networks are what bfloat16 trained
    middles = [row.curve[1]["loss"] for row in table.rows]
    assert len(set(middles)) == len(middles)
    assert all(torch.tensor(middles).isfinite())
    stored = [json.loads(path.read_text()) for path in tmp_path.rglob("*.json")]
    assert len(stored) == len(table.rows)
    again = resnets.measure(config, Run("smoke", 0, tmp_path))
    assert again == table


def test_networks_of_each_width_are_trained_for_their_own_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[int] = []
    train = populations.train

    def spy(module: Any, start: Any, inputs: Any, targets: Any, training: ClassifierConfig, **settings: Any) -> Any:
        trained.append(training.epochs)
        return train(module, start, inputs, targets, training, **settings)

    monkeypatch.setattr(populations, "train", spy)
    (one,) = resnets.trained_config("smoke").values()
    longer = replace(one.population, training=replace(one.population.training, epochs=2), architecture="longer")
    table = resnets.measure({1: one, 2: replace(one, population=longer)}, Run("smoke", 0, tmp_path))
    assert trained == [1, 1, 2, 2]
    assert "1 (x1), 2 (x2) epochs" in table.notes[0]
    assert "shifted by up to 1 pixel(s) and mirrored at random" in table.notes[0]
    ends = {row.label: row.curve[0]["loss"] for row in table.rows if row.curve}
    assert set(ends) == {row.label for row in table.rows if row.label.startswith("x2")}  # only the widest are drawn
    lines = numbers(table, "barrier")
    assert len(lines) == len(table.rows) == 2 * len(one.ways)

"""The experiments on learned alignment: properties of their networks and matchers that do not depend on
measurements.
"""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from filelock import FileLock

from regauge.learn import LearnedMatching
from regauge.zoo.jobs.driver import perform
from regauge.zoo.jobs.train_shards import TrainShards
from regauge.zoo.presets import mnist_mlps
from regauge_papers.experiment import Run
from regauge_papers.learned import ablation, elsewhere, halves, mlps, samples
from regauge_papers.learned.study import (
    BATCH,
    Lessons,
    Networks,
    Population,
    join_splits,
    learned_ways,
    train_matcher,
    try_matchers,
)
from regauge_papers.table import Quantity, Row, Table
from regauge_papers.zoo_populations import train_population


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run("smoke", 0, tmp_path_factory.mktemp("learned"))


@pytest.fixture(scope="module")
def networks(run: Run) -> Networks:
    return Networks.of(mlps.mnist("smoke"), run)


def test_no_network_of_the_table_is_for_training_or_validation(networks: Networks) -> None:
    parts = networks.split
    assert len(parts["test"]) == 2 * networks.population.pairs
    assert sorted(np.concatenate([*parts.values()])) == [*range(len(networks.store))]
    a, b = networks.pair(0)
    whole = networks.store.read(parts["test"])
    assert all(torch.equal(a[name], whole[name][0]) and torch.equal(b[name], whole[name][1]) for name in whole)


def test_splits_of_several_populations_are_numbered_one_after_the_other(networks: Networks) -> None:
    joined, count = join_splits([networks, networks], 5), len(networks.store)
    assert joined["train"].tolist() == [*networks.split["train"][:5], *(count + networks.split["train"][:5])]
    assert joined["test"].tolist() == [*networks.split["test"], *(count + networks.split["test"])]


def test_a_matcher_learns_from_as_many_networks_as_are_said_and_is_trained_once(networks: Networks, run: Run) -> None:
    lessons = replace(mlps.lessons("smoke", networks.population), networks=9)
    made, again = train_matcher(lessons, [networks], run), train_matcher(lessons, [networks], run)
    assert made.about["networks"]["train"] == 9
    assert made.about == again.about
    assert made.trained is None  # it was read from its file


def test_a_matcher_that_another_process_trains_is_put_off(
    networks: Networks, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    lessons = mlps.lessons("smoke", networks.population)
    several = {f"matcher {k}": replace(lessons, networks=10 + k) for k in range(3)}
    other = FileLock(f"{run.place('matchers', (several['matcher 0'], BATCH))}.lock")
    trained: list[int | None] = []

    def train(lessons: Lessons, *others: Any) -> LearnedMatching:
        made = train_matcher(lessons, *others)
        trained.append(lessons.networks)
        if len(trained) == 2:
            other.release()
        return made

    monkeypatch.setattr("regauge_papers.learned.study.train_matcher", train)
    other.acquire()
    tried = try_matchers(several, networks, lambda _, matcher: learned_ways(matcher)[:1], run)
    assert trained == [11, 12, 10]
    assert [one.label for one in tried] == list(several)
    assert [one.matcher.about["networks"]["train"] for one in tried] == [10, 11, 12]
    assert all(len(one.found) == 1 and len(one.found[0]) == networks.population.pairs for one in tried)


def test_shards_of_networks_that_another_process_trains_are_put_off(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = mlps.mnist("smoke").config
    apart = replace(run, folder=tmp_path, progress=lambda label, total: lambda amount, loss=None: told.append(amount))
    trained: list[int] = []
    told: list[float] = []

    def train(job: TrainShards, key: int) -> None:
        perform(job, key)
        trained.append(key)
        if len(trained) == 2:
            other.release()

    monkeypatch.setattr("regauge_papers.zoo_populations.perform", train)
    monkeypatch.setattr("regauge.zoo.jobs.train_shards.SHARD", config.count // 3)
    shards = tmp_path / "populations" / f"digits-{config.count}-{config.seed}" / "shards"
    shards.mkdir(parents=True)
    other = FileLock(f"{shards / 'train-000000.safetensors'}.lock")
    other.acquire()
    store = train_population("digits", config, apart)
    assert trained == [1, 2, 0]
    assert sum(told) == pytest.approx(3)
    assert sorted(path.name for path in shards.iterdir()) == [f"train-{key:06d}.safetensors" for key in range(3)]
    whole = train_population("digits", config, replace(run, folder=tmp_path / "whole"))
    assert store.rows["id"].tolist() == whole.rows["id"].tolist() == [*range(config.count)]


def test_pairs_are_one_network_of_each_half(run: Run) -> None:
    population = halves.config("smoke").lessons.populations[0]
    networks = Networks.of(population, run)
    found = {part: np.asarray(networks.store.rows["half"])[numbers] for part, numbers in networks.split.items()}
    assert found["test"].tolist() == [0, 1] * population.pairs
    assert set(found["train"].tolist()) == {0, 1}


@pytest.mark.parametrize("scale", ["smoke", "cpu", "paper"])
def test_matchers_of_the_ablation_differ_in_their_losses_alone(scale: str) -> None:
    lessons = ablation.config(scale, data="MNIST").lessons  # type: ignore[arg-type]
    kept = {label: (one.matching.supervised > 0, one.matching.line > 0, one.matching.distance > 0)
            for label, one in lessons.items()}  # fmt: skip
    assert kept == {
        "supervised and line": (True, True, False),
        "supervised and distance": (True, False, True),
        "all three": (True, True, True),
    }
    first = lessons["all three"]
    for one in lessons.values():
        matching = replace(one.matching, line=first.matching.line, distance=first.matching.distance)
        assert replace(one, matching=matching) == first


@pytest.mark.parametrize("scale", ["smoke", "cpu", "paper"])
def test_points_of_a_curve_differ_from_the_largest_matcher_in_one_setting(scale: str) -> None:
    study = samples.config(scale)  # type: ignore[arg-type]
    assert {"networks", "width", "depth"} < study.curves.keys()
    for axis, points in study.curves.items():
        for point in points:
            if axis == "networks":
                assert replace(point.lessons, networks=None) == study.largest
                assert point.lessons.networks == point.x
            else:
                pairs = ((getattr(one.matching, axis), one.matching) for one in (point.lessons, study.largest))
                (small, changed), (large, matching) = pairs
                assert small == point.x < large
                names = [one.name for one in fields(matching)]
                assert [n for n in names if getattr(changed, n) != getattr(matching, n)] == [axis]


def test_the_matcher_of_narrow_networks_has_seen_none_as_wide_as_the_widest() -> None:
    study = elsewhere.widths("cpu")
    tested = [one.config.architecture.settings["widths"][1] for one in study.tested.values()]
    seen = [one.config.architecture.settings["widths"][1] for one in study.matchers["of 32 and 64"].populations]
    assert (tested, seen) == ([32, 64, 128], [32, 64])
    assert len({lessons.matching for lessons in study.matchers.values()}) == 1


def test_the_matcher_of_mnist_sees_none_of_the_networks_that_it_is_used_on() -> None:
    study = elsewhere.transfer("cpu")
    learned = {one.config for lessons in study.matchers.values() for one in lessons.populations}
    for population in study.tested.values():
        assert population.config not in learned
        assert population.config.count == 2 * population.pairs


def test_images_are_turned_about_their_centers_by_at_most_45_degrees(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = torch.zeros(64, 1, 33, 33)
    lines[:, :, 4:17, 16] = 1.0  # from the center up
    turned = elsewhere.turn(lines, 0)
    assert (turned[:, 0, 16, 16] > 0.5).all()
    assert turned[:, :, 18:].abs().max() == 0  # none points down
    rows, columns = torch.meshgrid(torch.arange(33.0) - 16, torch.arange(33.0) - 16, indexing="ij")
    mass = turned[:, 0].sum((1, 2))
    degrees = torch.rad2deg(torch.atan2((turned[:, 0] * columns).sum((1, 2)), -(turned[:, 0] * rows).sum((1, 2))))
    assert (mass - 13).abs().max() < 2
    assert degrees.abs().max() < 46
    assert degrees.min() < -30
    assert degrees.max() > 30
    monkeypatch.setattr(elsewhere, "MOST_DEGREES", 0.0)
    assert torch.allclose(elsewhere.turn(lines, 0), lines, atol=1e-4)


def test_rows_of_groups_are_compared_with_the_reference_of_their_group() -> None:
    rows = (
        Row("one: WM", {"x": [[1.0]]}),
        Row("one: ours", {"x": [[1.5]]}),
        Row("two: WM", {"x": [[3.0]]}),
        Row("two: ours", {"x": [[2.0]]}),
    )
    header, *lines = Table("", (), (Quantity("x", 1),), rows, paired="WM").cells()
    where = header.index("less WM, paired")
    assert [line[where] for line in lines] == ["", "0.5", "", "-1.0"]
    plain = (replace(rows[0], label="WM"), rows[1])
    assert Table("", (), (Quantity("x", 1),), plain, paired="WM").cells()[2][where] == "0.5"


def test_a_population_in_small_has_the_shape_of_the_one_that_it_stands_for() -> None:
    small = mlps.population("smoke", "some", mnist_mlps())
    assert isinstance(small, Population)
    assert small.config.architecture.settings["widths"] == [64, 16, 16, 16, 10]
    assert (small.config.data, small.folder) == ("digits", "some-smoke")
    assert Path(small.folder).name == small.folder

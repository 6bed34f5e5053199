"""The experiments of paper 003: properties of their tables for any networks."""

from pathlib import Path

import pytest
import torch

from regauge.inr.rendering.strips import load_strips
from regauge.inr.representation import Inr
from regauge_papers.experiment import Run
from regauge_papers.shapes import alignment, pruning, reconstructions
from regauge_papers.shapes.alignment import joint_ranges, own_ranges
from regauge_papers.shapes.study import clouds, networks, starts, study
from regauge_papers.table import Table, summarize


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run("smoke", 0, tmp_path)


def mean(table: Table, label: str, quantity: str = "barrier") -> float:
    return summarize(next(row for row in table.rows if row.label == label).values[quantity]).mean


def test_only_the_whole_group_finds_a_hidden_copy(run: Run) -> None:
    table = alignment.measure(study("smoke", 128), run)
    same = mean(table, "same start")
    hidden = "same start, hidden copy, weights, "
    assert mean(table, f"{hidden}whole group") == pytest.approx(same, abs=1e-5)
    assert mean(table, f"{hidden}permutations") > 10 * same
    assert mean(table, f"{hidden}and signs") > 10 * same
    assert mean(table, "same start, weights, permutations", "units that stay") == 1
    assert mean(table, "weights, permutations", "units that stay") < 0.5


def test_second_networks_see_other_points_and_starts_of_their_own(run: Run) -> None:
    config = study("smoke", 128)
    (one,) = networks(config, run)
    first, second = clouds(one.name)
    assert not {tuple(point) for point in first.tolist()} & {tuple(point) for point in second.tolist()}
    begun = {kind: starts(config, kind, one.name, run) for kind in ("first", "same", "0")}
    assert all(torch.equal(begun["first"][name], begun["same"][name]) for name in begun["first"])
    assert not torch.equal(begun["first"]["layers.0.weight"], begun["0"]["layers.0.weight"])
    assert config.inr != Inr()


def test_pruned_networks_keep_their_largest_parameters(run: Run) -> None:
    (one,) = networks(study("smoke", 128), run)
    whole, pruned = (torch.cat([t.flatten() for t in params.values()]) for params in (one.first, one.prune(0.8).first))
    assert (pruned == 0).double().mean() == pytest.approx(0.8, abs=0.01)
    assert whole[pruned == 0].abs().max() < whole[pruned != 0].abs().min()
    assert one.prune(0.0) is one


def test_stretched_ranges() -> None:
    a, b = (
        {"w": torch.tensor([0.0, 2.0]), "b": torch.tensor([5.0])},
        {"w": torch.tensor([1.0, 4.0]), "b": torch.tensor([5.0])},
    )
    own, joint = own_ranges(a, b), joint_ranges(a, b)
    assert [params["w"].tolist() for params in own] == [[0, 1], [0, 1]]
    assert [params["w"].tolist() for params in joint] == [[0, 0.5], [0.25, 1]]
    assert [params["b"].tolist() for params in (*own, *joint)] == [[0], [0], [0], [0]]


def test_every_alignment_is_shown_for_every_shape(run: Run) -> None:
    config = reconstructions.config("smoke")
    table = reconstructions.measure(config, run)
    (path,) = table.strips.values()
    strips = load_strips(path)
    assert [strip.label for strip in strips] == [*alignment.PICTURED, reconstructions.REPAIRED]
    assert all(len(strip.pictures) == config.points for strip in strips)
    first = strips[0].losses[0]
    assert all(strip.losses[0] == pytest.approx(first) for strip in strips)


def test_pruned_networks_are_shown_share_by_share_and_on_paths(run: Run) -> None:
    config = pruning.config("smoke")
    table = pruning.measure(config, run)
    (one,) = networks(config.study, run)
    assert [row.label for row in table.rows] == ["0%", "50%", "90%"]
    assert mean(table, "0%", "loss") == pytest.approx(one.judge.evaluate(one.first)["loss"])
    assert mean(table, "90%", "loss") == pytest.approx(one.judge.evaluate(one.prune(0.9).first)["loss"])
    (shares,) = load_strips(table.strips["shares"])
    assert shares.names == ("0%", "50%", "90%")
    assert shares.losses == pytest.approx([mean(table, name, "loss") for name in shares.names])
    paths = load_strips(table.strips[one.name])
    assert [strip.label for strip in paths] == [way.label for way in pruning.PATHS]
    pruned, whole = paths[0].losses[0], paths[-1].losses[0]
    assert whole == pytest.approx(shares.losses[0])
    assert pruned == pytest.approx(one.judge.evaluate(one.prune(pruning.MOST).first)["loss"])

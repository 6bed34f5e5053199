"""The experiments of paper 004: properties of their tables for any networks."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from regauge.data.images import ImageData
from regauge.nets.classification import ClassifierConfig
from regauge.nets.norm import FilterResponseNorm
from regauge.training.optimizers import Adam
from regauge_papers.bayesian import (
    appendix_figures,
    between_posteriors,
    ensembles,
    posterior_barriers,
    regression,
)
from regauge_papers.bayesian.barrier_figures import FIGURES, tiny
from regauge_papers.bayesian.inference import Family, batches, posteriors
from regauge_papers.bayesian.snelson import has_snelson, snelson
from regauge_papers.experiment import Run
from regauge_papers.table import Row, Table, summarize


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run("smoke", 0, tmp_path)


def row(table: Table, label: str) -> Row:
    return next(one for one in table.rows if one.label == label)


def mean(table: Table, label: str, quantity: str) -> float:
    return summarize(row(table, label).values[quantity]).mean


def test_posteriors_are_inferred_once_and_points_have_no_standard_deviations(run: Run) -> None:
    family = tiny(FIGURES["figure4"].config("cpu").cases[0].family)
    first, again = posteriors(family, 1, run), posteriors(family, 1, run)
    assert all(torch.equal(first[0].mean[name], again[0].mean[name]) for name in first[0].mean)
    assert first[0].std.keys() == first[0].mean.keys()
    points = replace(family, inference=ClassifierConfig(epochs=1, batch=50))
    assert posteriors(points, 1, run)[0].std == {}
    with pytest.raises(TypeError, match="have no prior"):
        _ = points.variational


def test_rounding_is_not_shown_but_chance_is_drawn_by_all_digits() -> None:
    family = Family("digits", "mlp", 4, ClassifierConfig(optimizer=Adam(5e-2 - 1e-17 * 6)), 600)
    assert "lr=0.04999999999999994" in family.settings
    assert "lr=0.04999999999999994" in repr(family)
    assert family.shown_settings == family.settings.replace("0.04999999999999994", "0.05")


def test_judged_images_come_in_batches() -> None:
    family = Family("digits", "mlp", 4, ClassifierConfig(), 600)
    assert [len(labels) for _, labels in batches(family, 1000, is_test=False)] == [500, 100]
    assert sum(len(labels) for _, labels in batches(family, 50, is_test=True)) == 50
    convolutional = replace(family, kind="filter", width=1)
    assert [len(labels) for _, labels in batches(convolutional, 200, is_test=True)] == [125, 75]


@pytest.mark.parametrize("is_point", [False, True])
def test_networks_run_in_bfloat16_where_a_family_says_so(
    run: Run, monkeypatch: pytest.MonkeyPatch, *, is_point: bool
) -> None:
    family = tiny(FIGURES["resnet20"].config("cpu").cases[0].family)
    if is_point:
        family = replace(family, inference=ClassifierConfig(epochs=1, batch=50))
    monkeypatch.setattr("regauge_papers.experiment.multiplies_bfloat16", lambda device: True)
    seen: set[torch.dtype] = set()
    forward = FilterResponseNorm.forward

    def watched(self: FilterResponseNorm, x: torch.Tensor) -> torch.Tensor:
        seen.add(x.dtype)
        return forward(self, x)

    monkeypatch.setattr(FilterResponseNorm, "forward", watched)
    (found,) = posteriors(family, 1, run)
    assert seen == {torch.bfloat16}
    assert {tensor.dtype for part in found for tensor in part.values()} == {torch.float32}
    seen.clear()
    monkeypatch.setattr("regauge_papers.experiment.multiplies_bfloat16", lambda device: False)
    (elsewhere,) = posteriors(family, 1, run)  # Not taken for the same.
    assert seen == {torch.float32}
    apart = replace(run, folder=run.folder / "apart")  # where nothing is kept
    (single,) = posteriors(replace(family, is_bfloat16=False), 1, apart)
    assert all(torch.equal(elsewhere.mean[name], tensor) for name, tensor in single.mean.items())


def test_barriers_are_tabled_for_every_case_and_arm(run: Run) -> None:
    config = FIGURES["figure9"].config("smoke")
    config = replace(config, cases=(config.cases[0], config.cases[5]))
    table = posterior_barriers.measure(config, run)
    assert len(table.rows) == 4
    posterior, point = (f"{case.label}: as inferred" for case in config.cases)
    assert "KL per example" in row(table, posterior).values
    assert "KL per example" not in row(table, point).values
    assert "Monte Carlo error" not in row(table, point).values
    (chart, _), *_ = table.pictures.values()
    assert [series.label for series in chart.series] == [
        "posterior, as inferred",
        "posterior, aligned",
        "point, as inferred",
        "point, aligned",
    ]


def test_alignment_never_moves_the_ends(run: Run) -> None:
    config = FIGURES["figure11"].config("smoke")
    config = replace(config, cases=config.cases[:1], ways=(posterior_barriers.NAIVE, posterior_barriers.BALANCED))
    (naive, aligned) = (
        next(iter(posterior_barriers.measure(replace(config, ways=(way,)), run).pictures["lines"])).series[0].y
        for way in config.ways
    )
    assert aligned[-1] == pytest.approx(naive[-1], abs=1e-4)


def test_networks_have_as_many_outputs_as_the_images_have_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    images, labels = torch.rand(4, 3, 32, 32), torch.tensor([0, 99, 5, 7])
    hundred = ImageData("CIFAR-100", images, labels, images, labels, classes=100)
    monkeypatch.setattr("regauge_papers.bayesian.inference.images", lambda name: {"CIFAR-100": hundred}[name])
    (plain,) = (case.family for case in FIGURES["figureA15"].config("cpu").cases if case.family.data == "CIFAR-100")
    residual = replace(plain, kind="filter", width=1)
    for family in (plain, residual):
        assert family.module()(images).shape == (4, 100)
        assert family.symmetry().groups


def test_a_mixture_has_no_barrier(run: Run) -> None:
    table = between_posteriors.mixtures(between_posteriors.mixture_config("smoke"), run)
    assert mean(table, "mixture, as inferred", "barrier") == 0


def test_planes_pass_through_the_three_networks(run: Run) -> None:
    table = between_posteriors.planes(between_posteriors.plane_config("smoke"), run)
    assert mean(table, "means: q1", "loss") == pytest.approx(mean(table, "means: q1 aligned", "loss"), abs=1e-4)
    assert mean(table, "samples: q1", "loss") == pytest.approx(mean(table, "samples: q1 aligned", "loss"), abs=1e-4)
    for picture in table.pictures.values():
        assert [panel.title.split()[1] for panel in picture] == ["likelihood", "prior", "posterior"]
        likelihood, prior, posterior = (torch.tensor(panel.values, dtype=torch.float64) for panel in picture)
        rest = posterior - likelihood - prior  # tempering multiplies the sum as a whole
        assert torch.allclose(rest, rest.flatten()[0].expand_as(rest), atol=1e-6)
        assert prior.max() > 1e-3


def test_means_alone_leave_a_mirror_image_and_distributions_swap_it(run: Run) -> None:
    table = appendix_figures.match_mirrored(appendix_figures.mirrored_config("smoke"), run)
    assert [row.values["swapped"][0][0] for row in table.rows] == [0, 1, 1]
    assert [row.values["squared distance left"][0][0] for row in table.rows] == pytest.approx([0.72, 0, 0])


def test_one_gaussian_of_many_copies_is_the_member(run: Run) -> None:
    config = ensembles.config("smoke")
    config = replace(config, members=replace(config.members, inference=ClassifierConfig(epochs=3, batch=20)))
    table = ensembles.measure(config, run)
    labels = [row.label for row in table.rows]
    assert len(labels) == len(set(labels)) == 4 + 3 * 6
    member = mean(table, "a member", "loss")
    assert mean(table, "the ensemble of members", "loss") <= member


def test_functions_are_pictured_with_bands(run: Run) -> None:
    config = replace(regression.config("smoke"), is_small=True)
    table = regression.measure(config, run)
    left, right = table.pictures["functions"]
    assert [series.label for series in right.series][1:3] == ["halfway, as inferred", "halfway, aligned"]
    band = left.series[1]
    assert all(low < y < high for low, y, high in zip(band.low, band.y, band.high, strict=True))


def test_only_the_papers_scale_and_one_table_have_its_residual_networks() -> None:
    for name, figure in FIGURES.items():
        paper, cpu = figure.config("paper"), figure.config("cpu")
        assert (paper.points, paper.samples) == (25, 128)
        assert all(case.pairs == 5 for case in paper.cases)
        layers = {case.family.blocks for case in cpu.cases if case.family.kind != "mlp"}
        assert layers == {3} if name == "resnet20" else layers <= {1}
        widths = {case.family.width for case in paper.cases if case.family.kind == "filter"}
        by_width = {key: {1, 2, 4, 8} for key in ("figure5", "figure9", "resnet20")}
        assert widths == (by_width | {"figure7": {8}, "figure8": set(), "figure12": {8}, "figureA15": {8}}).get(
            name, {1}
        )


@pytest.mark.skipif(not has_snelson(), reason="REGAUGE_DATA names no folder with snelson1d/")
def test_snelson_has_noisy_values_of_a_curve_and_positions_beyond_them(tmp_path: Path) -> None:
    data = snelson()
    assert data.inputs.shape == data.targets.shape == (200, 1)
    assert data.test_inputs.shape == (301, 1)
    assert data.test_inputs.min() < data.inputs.min() < data.inputs.max() < data.test_inputs.max()
    assert data.inputs.dtype == torch.float32
    (tmp_path / "snelson_train_inputs.dat").write_text("0.5\n")
    with pytest.raises(ValueError, match="is not the file of the Snelson set"):
        snelson(tmp_path)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        snelson(tmp_path / "nowhere")

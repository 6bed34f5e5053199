"""Planes: distances are distances of the parameters, and values come from the task, one by one or many at a time."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import regauge as rg
from regauge.connect.plane import barycentric
from regauge.core.task import Task
from regauge.report.figures import data_uri, plane_figure


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4)).double()


MODULE = network(0)
INPUTS = torch.randn(30, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
TASK = rg.Task(MODULE, [(x, x.argmax(1)) for x in torch.split(INPUTS, 13)])
BUFFERS = [name for name, _ in MODULE.named_buffers()]


def state(seed: int) -> rg.Params:
    module = network(seed)
    reset = rg.connect.reset_batchnorm(module.state_dict(), module, [INPUTS * (seed + 1)])
    return {name: t.detach().clone() for name, t in reset.items()}


THREE = (state(1), state(2), state(3))
PARAMETERS = [name for name in THREE[0] if name not in BUFFERS]


def flat(params: rg.Params) -> Tensor:
    return torch.cat([params[name].flatten() for name in PARAMETERS])


@pytest.fixture(scope="module")
def found() -> rg.connect.Plane:
    return rg.connect.plane(*THREE, TASK, resolution=6, margin=0.25)


def test_distances_in_the_plane_are_distances_of_the_parameters(found: rg.connect.Plane) -> None:
    vectors = torch.stack([flat(p) for p in THREE])
    assert torch.allclose(torch.cdist(vectors, vectors), torch.cdist(found.points, found.points))
    assert found.points[0].tolist() == [0.0, 0.0]
    assert float(found.points[1, 1]) == 0
    assert float(found.points[2, 1]) > 0


def test_the_basis_is_orthonormal_and_leads_to_the_points(found: rg.connect.Plane) -> None:
    u, v = (flat(direction) for direction in found.basis)
    assert torch.allclose(torch.stack([u @ u, u @ v, v @ v]), torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64))
    for point, params in zip(found.points, THREE, strict=True):
        assert torch.allclose(flat(THREE[0]) + point[0] * u + point[1] * v, flat(params))
        there = found.at(float(point[0]), float(point[1]))
        assert all(torch.allclose(there[n].double(), params[n].double()) for n in params if "tracked" not in n)
    away = found.at(0.7, -1.3)
    assert torch.allclose(flat(away), flat(THREE[0]) + 0.7 * u - 1.3 * v)


def test_values_are_those_of_the_task(found: rg.connect.Plane) -> None:
    for metric in ("loss", "accuracy"):
        assert found.at_points[metric].tolist() == [TASK.evaluate(p)[metric] for p in THREE]
        for row, column in ((0, 0), (2, 3), (len(found.ys) - 1, len(found.xs) - 1)):
            there = found.at(float(found.xs[column]), float(found.ys[row]))
            assert float(found.values[metric][row, column]) == pytest.approx(TASK.evaluate(there)[metric])


def test_many_at_a_time_is_as_one_by_one(found: rg.connect.Plane) -> None:
    single = rg.connect.plane(*THREE, TASK.evaluate, resolution=6, margin=0.25, buffers=BUFFERS)
    assert torch.equal(single.points, found.points)
    assert all(torch.allclose(single.values[m], found.values[m]) for m in ("loss", "accuracy"))


def test_buffers_stay_within_the_range_of_the_three(found: rg.connect.Plane) -> None:
    inside = found.at(*found.points.mean(0).tolist())
    means = torch.stack([p["1.running_mean"] for p in THREE]).mean(0)
    assert torch.allclose(inside["1.running_mean"], means)
    far = found.at(-50.0, 80.0)
    three = torch.stack([p["1.running_var"] for p in THREE])
    assert bool((far["1.running_var"] >= three.amin(0)).all() and (far["1.running_var"] <= three.amax(0)).all())
    assert bool(found.values["loss"].isfinite().all())


def test_a_prepared_task_prepares_every_network() -> None:
    seen: list[float] = []

    def prepare(p: rg.Params) -> rg.Params:
        seen.append(float(p["0.bias"].sum()))
        return rg.connect.reset_batchnorm(p, MODULE, [INPUTS])

    task = Task(MODULE, TASK.batches, prepare=prepare)
    reset = rg.connect.plane(*THREE, task, resolution=3, margin=0.0)
    assert len(seen) == reset.values["loss"].numel() + 3
    assert reset.at_points["loss"].tolist() == [TASK.evaluate(prepare(p))["loss"] for p in THREE]
    there = prepare(reset.at(float(reset.xs[1]), float(reset.ys[1])))
    assert float(reset.values["loss"][1, 1]) == pytest.approx(TASK.evaluate(there)["loss"])


def test_the_grid_covers_the_points_with_a_margin_and_square_cells(found: rg.connect.Plane) -> None:
    low, high = found.points.amin(0), found.points.amax(0)
    longer = float((high - low).max())
    for axis, line in enumerate((found.xs, found.ys)):
        assert float(line[0]) == pytest.approx(float(low[axis]) - 0.25 * longer)
        assert float(line[-1]) == pytest.approx(float(high[axis]) + 0.25 * longer)
    assert max(len(found.xs), len(found.ys)) == 6
    assert 0.7 < float((found.xs[1] - found.xs[0]) / (found.ys[1] - found.ys[0])) < 1.4


def test_barycentric_weights() -> None:
    points = torch.tensor([[0.0, 0.0], [2.0, 0.0], [1.5, 3.0]], dtype=torch.float64)
    assert torch.allclose(barycentric(points, points), torch.eye(3, dtype=torch.float64))
    weights = torch.tensor([0.5, -0.25, 0.75], dtype=torch.float64)
    assert torch.allclose(barycentric(points, weights @ points), weights)


def test_planes_that_do_not_exist_are_refused() -> None:
    a, b, _ = THREE
    middle = {n: (a[n] + b[n]) / 2 if a[n].is_floating_point() else a[n] for n in a}
    for three in ((a, b, middle), (a, b, a), (a, a, b), (a, b, b)):
        with pytest.raises(ValueError, match="the three networks lie on one line"):
            rg.connect.plane(*three, TASK)
    with pytest.raises(ValueError, match="the two networks have different parameters"):
        rg.connect.plane(a, b, {"w": torch.ones(1)}, TASK)
    with pytest.raises(ValueError, match="of the third network holds NaN or Inf in 4 of"):
        rg.connect.plane(a, b, {**b, "3.bias": torch.full((4,), torch.nan)}, TASK)
    with pytest.raises(ValueError, match="resolution=1"):
        rg.connect.plane(*THREE, TASK, resolution=1)


def test_a_population_is_judged_as_its_members() -> None:
    stacked = {name: torch.stack([p[name] for p in THREE]) for name in THREE[0]}
    each = TASK.evaluate_each(stacked)
    for metric, values in each.items():
        assert values.tolist() == pytest.approx([TASK.evaluate(p)[metric] for p in THREE])
    with pytest.raises(ValueError, match="the task has no batches"):
        rg.Task(MODULE, []).evaluate_each(stacked)


def test_the_figure_marks_the_networks(found: rg.connect.Plane) -> None:
    loss = found.values["loss"].numpy().copy()
    loss[0, 0] = np.nan
    figure = plane_figure(found.xs.numpy(), found.ys.numpy(), loss, found.points.numpy())
    axes = figure.axes[0]
    marked = [np.asarray(line.get_xydata())[0] for line in axes.lines]
    assert np.allclose(marked, found.points.numpy())
    assert [text.get_text() for text in axes.texts] == ["A", "B", "C"]
    assert axes.get_xlabel() == "distance along the line from A to B"
    assert axes.get_ylabel() == "distance from that line"
    assert "bright: low" in figure.axes[1].get_ylabel()
    again = plane_figure(found.xs.numpy(), found.ys.numpy(), loss, found.points.numpy())
    assert data_uri(figure, "svg") == data_uri(again, "svg")
    plane_figure(np.arange(2.0), np.arange(2.0), np.ones((2, 2)), found.points.numpy())
    with pytest.raises(ValueError, match="none of the 4 values is finite"):
        plane_figure(np.arange(2.0), np.arange(2.0), np.full((2, 2), np.inf), found.points.numpy())

"""Lines: exact endpoints, the barrier by its definition, recomputed statistics, and bad input."""

import math

import pytest
import torch
from torch import Tensor, nn

import regauge as rg
from regauge import Params
from regauge.connect import Curve, interpolate


def params(*values: float) -> Params:
    return {"w": torch.tensor(values)}


def hill(p: Params) -> dict[str, float]:
    """Return the loss `1 - w^2`, a hill between -1 and 1."""
    return {"loss": 1 - float(p["w"].square().sum()), "mean": float(p["w"].mean())}


def test_a_parabola_has_the_barrier_and_area_that_calculus_says() -> None:
    curve = rg.line(params(-1.0), params(1.0), hill, points=201)
    assert curve.barrier == pytest.approx(1.0)
    assert curve.raw_barrier == pytest.approx(1.0)
    assert curve.auc == pytest.approx(2 / 3, abs=1e-4)
    assert curve.table[0] == {"t": 0.0, "loss": 0.0, "mean": -1.0}
    assert [row["t"] for row in curve.table][:3] == [0.0, 0.005, 0.01]
    assert "barrier 1 (raw 1)" in str(curve)


def test_a_valley_has_no_barrier_and_a_negative_raw_one() -> None:
    curve = rg.line(params(-1.0), params(1.0), lambda p: {"loss": float(p["w"].square().sum())}, points=5)
    assert curve.barrier == 0
    assert curve.raw_barrier == pytest.approx(-0.75)
    assert curve.auc < 0


def test_end_losses_are_interpolated() -> None:
    """A linear loss has no barrier, even if its endpoints are very different."""
    curve = rg.line(params(0.0), params(10.0), lambda p: {"loss": float(p["w"].sum())}, points=11)
    assert curve.excess == pytest.approx((0.0,) * 11, abs=1e-6)


def test_every_network_is_prepared_and_the_ends_are_measured_as_stored_too() -> None:
    seen: list[Params] = []

    def evaluate(p: Params) -> dict[str, float]:
        seen.append(p)
        return {"loss": float(p["w"].abs().sum())}

    a = {"w": torch.randn(3, generator=torch.Generator().manual_seed(0)), "count": torch.tensor(3)}
    b = {"w": torch.randn(3, generator=torch.Generator().manual_seed(1)), "count": torch.tensor(8)}
    curve = rg.line(a, b, evaluate, points=4, prepare=lambda p: {**p, "w": p["w"] * 0})
    own = [p for p in seen if bool(p["w"].any())]
    assert all(torch.equal(own[0][n], a[n]) and torch.equal(own[1][n], b[n]) for n in a)
    assert [int(p["count"]) for p in seen if not bool(p["w"].any())] == [3, 3, 3, 8]
    assert [metrics["loss"] for metrics in curve.stored] == [float(p["w"].abs().sum()) for p in (a, b)]
    assert "as stored, not prepared as all networks on the path are, the ends have losses" in str(curve)


def test_ends_that_are_the_same_as_stored_are_not_told() -> None:
    curve = rg.line(params(0.0), params(1.0), lambda p: {"loss": float(p["w"].sum())}, points=3, prepare=dict)
    assert "as stored" not in str(curve)
    assert not rg.line(params(0.0), params(1.0), lambda p: {"loss": 0.0}, points=3).stored


def test_half_precision_is_interpolated_in_single() -> None:
    a, b = {"w": torch.tensor([60000.0]).half()}, {"w": torch.tensor([59968.0]).half()}
    middle = interpolate(a, b, 1 / 3)["w"]
    exact = torch.tensor([60000.0 * (1 - 1 / 3) + 59968.0 / 3]).half()
    assert middle.dtype == torch.float16
    assert torch.equal(middle, exact)
    assert bool(interpolate(a, a, 0.5)["w"].isfinite())


def test_infinite_losses_between_the_ends_are_an_infinite_barrier() -> None:
    curve = rg.line(params(-1.0), params(1.0), lambda p: {"loss": 0.0 if abs(float(p["w"])) == 1 else math.inf}, 5)
    assert curve.barrier == math.inf


@pytest.mark.parametrize(
    ("value", "where", "message"),
    [
        (math.nan, 0.0, "the loss at t=0.5 is nan, so the barrier is undefined: the network there overflows"),
        (math.nan, -1.0, "the loss at t=0 is nan, so the barrier is undefined: this end is not a working network"),
        (math.inf, 1.0, "the loss at t=1 is inf, so the barrier is undefined: this end is not a working network"),
    ],
)
def test_undefined_losses_are_reported(value: float, where: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rg.line(params(-1.0), params(1.0), lambda p: {"loss": value if float(p["w"]) == where else 0.0}, points=5)


def test_bad_input_is_refused() -> None:
    a, b = params(0.0), params(1.0)
    with pytest.raises(ValueError, match="but points=2"):
        rg.line(a, b, hill, points=2)
    with pytest.raises(ValueError, match=r"the judge returned \['accuracy'\], but a barrier needs the metric 'loss'"):
        rg.line(a, b, lambda p: {"accuracy": 1.0})
    with pytest.raises(ValueError, match=r"'w' has shape \(1,\) in the first network and \(2,\)"):
        rg.line(a, params(1.0, 2.0), hill)
    with pytest.raises(ValueError, match="'w' of the second network holds NaN or Inf in 1 of"):
        rg.line(a, params(math.nan), hill)
    symmetry = rg.Symmetry.from_axes({"w": ("units",)}, kinds={"units": "permutation"})
    with pytest.raises(ValueError, match="symmetry= aligns the ends of a straight line between two networks"):
        rg.line(a, b, hill, symmetry=symmetry, path=rg.connect.Bezier.between(a, b))


def two_networks(seed: int) -> tuple[rg.Task, rg.Symmetry, Params, Params]:
    """Return a task, its symmetry and two networks in double precision."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 3)).double()
    inputs = torch.randn(60, 4, generator=generator, dtype=torch.float64)
    a, b = (
        {name: torch.randn(value.shape, generator=generator, dtype=value.dtype) for name, value in one.items()}
        for one in (model.state_dict(), model.state_dict())
    )
    task = rg.Task(model, [(inputs, inputs[:, :3].argmax(1))])
    return task, rg.discover(model, (inputs[:4],)), a, b


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_line_with_a_symmetry_is_two_lines(seed: int) -> None:
    """One line leads to the stored second network, and the other line to the network that `align` returns."""
    task, symmetry, a, b = two_networks(seed)
    curve = rg.line(a, b, task, 7, symmetry=symmetry)
    assert curve.unaligned is not None
    assert curve.unaligned.table == rg.line(a, b, task, 7).table
    assert curve.table == rg.line(a, rg.align(a, b, symmetry).params, task, 7).table
    assert curve.rows[3] == {
        **curve.table[3],
        "loss as trained": curve.unaligned.table[3]["loss"],
        "accuracy as trained": curve.unaligned.table[3]["accuracy"],
    }
    assert f"before B was aligned to A: barrier {curve.unaligned.barrier:.4g}" in str(curve)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_moved_copy_has_a_barrier_until_it_is_aligned(seed: int) -> None:
    task, symmetry, a, _ = two_networks(seed)
    ((inputs, _),) = task.batches
    outputs = torch.func.functional_call(task.module, a, (inputs,))
    task = rg.Task(task.module, [(inputs, outputs)], criterion=nn.functional.mse_loss)
    copy = symmetry.act(symmetry.random(torch.Generator().manual_seed(seed)), a)
    curve = rg.line(a, copy, task, 9, symmetry=symmetry)
    assert curve.unaligned is not None
    assert curve.barrier < 1e-9 < 1e-2 < curve.unaligned.barrier
    # A symmetry that ties too little, of the last hidden layer alone, does not take the first one back.
    some = symmetry.groups[-1]
    axes = {
        name: tuple(some.name if (name, axis) in places else None for axis in range(value.ndim))
        for name, value in a.items()
        if (places := {(place.parameter, place.axis) for place in some.placements})
    }
    part = rg.Symmetry.from_axes(axes, kinds={some.name: "permutation"})
    assert rg.line(a, copy, task, 9, symmetry=part).barrier > 1e-2


def test_a_curve_is_drawn_as_it_is_and_as_it_was() -> None:
    task, symmetry, a, b = two_networks(0)
    curve = rg.line(a, b, task, 7, symmetry=symmetry)
    assert curve.unaligned is not None
    loss, accuracy = curve.plot(title="cross entropy (nats)", ends=("A: a.pt", "B: b.pt")).axes
    drawn = {str(line.get_label()): list(map(float, line.get_ydata())) for line in loss.lines}
    assert drawn["as trained"] == [row["loss"] for row in curve.unaligned.table]
    assert drawn["aligned"] == [row["loss"] for row in curve.table]
    assert list(accuracy.lines[2].get_ydata()) == [row["accuracy"] for row in curve.table]
    heights = f"barrier {curve.unaligned.barrier:.3g} as trained, {curve.barrier:.3g} aligned"
    assert loss.get_title(loc="left").removesuffix("; axis not from 0") == f"cross entropy (nats):\n{heights}"
    (alone,) = rg.line(a, b, lambda p: {"loss": task.evaluate(p)["loss"]}, 7).plot().axes
    assert {str(line.get_label()) for line in alone.lines} & {"as trained", "aligned"} == set()
    assert alone.get_title(loc="left").startswith(f"loss: barrier {curve.unaligned.barrier:.3g}")


def test_a_curve_of_its_own() -> None:
    rows = ({"t": 0.0, "loss": 1.0}, {"t": 0.25, "loss": 2.0}, {"t": 1.0, "loss": 3.0})
    curve = Curve(rows)
    assert curve.barrier == pytest.approx(0.5)
    assert curve.auc == pytest.approx(0.25)


class Normalized(nn.Module):
    """A convolution with batch normalization, and dropout that must stay off."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 5, 3)
        self.norm = nn.BatchNorm2d(5)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(5, 3)
        self.last = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.head(self.drop(self.norm(self.conv(x)).relu()).mean((-2, -1))))


def batches(count: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(8, 2, 6, 6, generator=g) + 3 for _ in range(count)]


def test_statistics_are_averages_over_the_batches() -> None:
    torch.manual_seed(0)
    module = Normalized()
    before = {n: t.clone() for n, t in module.state_dict().items()}
    reset = rg.connect.reset_batchnorm(before, module, batches(4))
    outputs = [module.conv(x) for x in batches(4)]
    mean = torch.stack([y.mean((0, 2, 3)) for y in outputs]).mean(0)
    variance = torch.stack([y.var((0, 2, 3)) for y in outputs]).mean(0)
    assert torch.allclose(reset["norm.running_mean"], mean, atol=1e-5)
    assert torch.allclose(reset["norm.running_var"], variance, atol=1e-5)
    assert int(reset["norm.num_batches_tracked"]) == 4
    assert not torch.equal(reset["last.running_mean"], before["last.running_mean"])
    assert all(torch.equal(t, before[n]) for n, t in module.state_dict().items())
    assert all(layer.training for layer in module.modules())
    assert module.norm.momentum == 0.1
    assert torch.equal(reset["conv.weight"], before["conv.weight"])


def test_statistics_do_not_depend_on_the_old_ones_nor_on_the_mode() -> None:
    torch.manual_seed(0)
    module = Normalized()
    state = dict(module.state_dict())
    stale = {n: t + 7 if "running" in n else t for n, t in state.items()}
    first = rg.connect.reset_batchnorm(state, module.train(), batches(2))
    second = rg.connect.reset_batchnorm(stale, module.eval(), batches(2))
    assert all(torch.equal(first[n], second[n]) for n in state)
    assert not module.norm.training


def test_models_without_batch_normalization_pass_through() -> None:
    module = nn.Linear(2, 2)
    state = dict(module.state_dict())
    assert rg.connect.reset_batchnorm(state, module, []) == state


def test_a_used_iterator_is_refused() -> None:
    with pytest.raises(ValueError, match="which can be read only once"):
        rg.connect.reset_batchnorm(Normalized().state_dict(), Normalized(), iter([]))


def test_recomputed_statistics_lower_the_barrier_of_a_normalized_network() -> None:
    """The midpoint of unrelated filters has a smaller variance than the averaged statistics."""
    torch.manual_seed(0)
    a, b = Normalized(), Normalized()
    a_state, b_state = (rg.connect.reset_batchnorm(m.state_dict(), m, batches(4)) for m in (a, b))
    x = torch.cat(batches(4))

    def spread(p: Params) -> dict[str, float]:
        """Return the deviation of the normalized activations from unit variance."""
        with torch.no_grad():
            y = torch.func.functional_call(a.eval(), p, (x,))
        return {"loss": float((y.var(0) - 1).abs().mean())}

    plain = rg.line(a_state, b_state, spread, points=5)
    reset = rg.line(a_state, b_state, spread, points=5, prepare=lambda p: rg.connect.reset_batchnorm(p, a, batches(4)))
    assert reset.barrier < 0.2 * plain.barrier

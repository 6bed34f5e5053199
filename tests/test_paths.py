"""Paths: exact endpoints, explicit formulas, geodesics, and curves that training lowers below the straight line."""

import math

import pytest
import torch
from progress import Recorded
from torch import Tensor, nn

import regauge as rg
from regauge.connect import combine
from regauge.connect.paths import ControlledPath
from regauge.training import SGD, Adam, Optimizer


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def drawn(seed: int) -> rg.Params:
    g = generator(seed)
    return {
        "w": torch.randn(3, 2, generator=g, dtype=torch.float64),
        "half": torch.randn(4, generator=g).half(),
        "count": torch.tensor(seed),
    }


def canonical_pair() -> tuple[rg.canonical.Manifold, rg.Params, rg.Params]:
    module = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    symmetry = rg.discover(module, (torch.randn(5, 4, dtype=torch.float64),))
    params = []
    for seed in range(2):
        g = generator(seed)
        params.append({n: torch.randn(t.shape, generator=g, dtype=t.dtype) for n, t in module.state_dict().items()})
    a = rg.canonicalize(params[0], symmetry)
    return rg.canonical.canonical_manifold(symmetry), a, rg.canonicalize(params[1], symmetry, reference=a)


A, B = drawn(1), drawn(2)
PATHS = (
    rg.connect.Straight(),
    rg.connect.Bezier((drawn(3),)),
    rg.connect.Bezier((drawn(3), drawn(4))),
    rg.connect.PolygonalChain((drawn(3),)),
    rg.connect.PolygonalChain((drawn(3), drawn(4), drawn(5))),
)


@pytest.mark.parametrize("path", PATHS, ids=lambda p: type(p).__name__)
def test_the_ends_are_the_networks_bit_for_bit(path: rg.connect.Straight | ControlledPath) -> None:
    for t, end in ((0, A), (1, B), (0.0, A), (1.0, B)):
        there = path.at(A, B, t)
        assert all(torch.equal(there[n], end[n]) and there[n].dtype == end[n].dtype for n in end)
    inside = path.at(A, B, 0.3)
    assert {n: (t.shape, t.dtype) for n, t in inside.items()} == {n: (t.shape, t.dtype) for n, t in A.items()}


def test_curves_are_what_the_formulas_say() -> None:
    c, d = drawn(3), drawn(4)
    for t in (0.1, 0.25, 0.6):
        quadratic = rg.connect.Bezier((c,)).at(A, B, t)["w"]
        assert torch.allclose(quadratic, (1 - t) ** 2 * A["w"] + 2 * t * (1 - t) * c["w"] + t * t * B["w"])
    chain = rg.connect.PolygonalChain((c, d))
    assert torch.allclose(chain.at(A, B, 1 / 6)["w"], (A["w"] + c["w"]) / 2)
    assert torch.allclose(chain.at(A, B, 1 / 2)["w"], (c["w"] + d["w"]) / 2)
    assert torch.allclose(chain.at(A, B, 2 / 3)["w"], d["w"])
    assert torch.equal(rg.connect.PolygonalChain((c,)).at(A, B, 0.5)["w"], c["w"])


@pytest.mark.parametrize("kind", [rg.connect.Bezier, rg.connect.PolygonalChain])
@pytest.mark.parametrize("bends", [1, 3])
def test_between_starts_as_the_straight_line(kind: type[ControlledPath], bends: int) -> None:
    path = kind.between(A, B, bends=bends)
    assert len(path.inner) == bends
    for t in (0.1, 0.5, 0.77):
        assert sum(path.weights(t)) == pytest.approx(1)
        assert torch.allclose(path.at(A, B, t)["w"], rg.connect.Straight().at(A, B, t)["w"])


def test_geodesics_stay_canonical_and_have_constant_speed() -> None:
    manifold, a, b = canonical_pair()
    path = rg.connect.Geodesic(manifold)
    assert all(torch.equal(path.at(a, b, 0.0)[n], a[n]) and torch.equal(path.at(a, b, 1.0)[n], b[n]) for n in a)
    whole = manifold.distance(a, b)
    for t in (0.2, 0.7):
        assert torch.isclose(manifold.distance(a, path.at(a, b, t)), t * whole)
    norms: list[float] = []

    def evaluate(p: rg.Params) -> dict[str, float]:
        norms.append(float((p["0.weight"].square().sum(1)).max()))
        return {"loss": 0.0}

    rg.line(a, b, evaluate, points=5, path=path)
    assert norms == pytest.approx([1.0] * 5)
    rg.line(a, b, evaluate, points=5)
    assert min(norms[6:9]) < 1 - 1e-3
    with pytest.raises(ValueError, match="the network is not canonical"):
        rg.line({n: 2 * t for n, t in a.items()}, b, evaluate, path=path)


def test_wasserstein_geodesics_interpolate_standard_deviations() -> None:
    """W2(q_t, q_0) = t W2(q_0, q_1). With interpolated variances, the equation would not hold."""
    path = rg.connect.WassersteinGeodesic()
    a = {"w": torch.tensor([0.0, 1.0])}, {"w": torch.tensor([1.0, 0.5])}
    b = {"w": torch.tensor([2.0, 1.0])}, {"w": torch.tensor([3.0, 0.0])}

    def distance(p: tuple[rg.Params, rg.Params], q: tuple[rg.Params, rg.Params]) -> float:
        return math.sqrt(sum(float((x["w"] - y["w"]).square().sum()) for x, y in zip(p, q, strict=True)))

    for t in (0.25, 0.5):
        middle = path.at(a, b, t)
        assert distance(a, middle) == pytest.approx(t * distance(a, b))
        assert distance(middle, b) == pytest.approx((1 - t) * distance(a, b))
    curve = rg.line(a, b, lambda q: {"loss": float(q[1]["w"].sum())}, points=3, path=path)
    assert [row["loss"] for row in curve.table] == pytest.approx([1.5, 2.25, 3.0])


def test_what_is_no_gaussian_is_refused() -> None:
    one = {"w": torch.ones(2)}
    path = rg.connect.WassersteinGeodesic()
    with pytest.raises(ValueError, match="'w' of the second Gaussian has negative standard deviations"):
        rg.line((one, one), (one, {"w": -torch.ones(2)}), lambda _: {"loss": 0.0}, path=path)
    with pytest.raises(ValueError, match="the second end is a dict, but a Gaussian is a tuple of two dictionaries"):
        rg.line((one, one), one, lambda _: {"loss": 0.0}, path=path)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match=r"for Gaussians .* give path=WassersteinGeodesic\(\)"):
        rg.line((one, one), (one, one), lambda _: {"loss": 0.0})  # type: ignore[call-overload]


def test_combinations_round_once() -> None:
    three = [{"w": torch.tensor([v]).half()} for v in (60000.0, 59968.0, 60032.0)]
    exact = torch.tensor([(60000.0 + 59968.0 + 60032.0) / 3]).half()
    assert torch.equal(combine(three, (1 / 3, 1 / 3, 1 / 3))["w"], exact)


class Ring(nn.Module):
    """A network of two parameters, whose loss is the distance from the unit circle."""

    offset: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.point = nn.Parameter(torch.zeros(2))
        self.register_buffer("offset", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return (self.point.square().sum() - 1) * x + self.offset


RING = rg.Task(Ring(), [(torch.ones(1), torch.zeros(1))], lambda out, target: (out - target).square().mean())
WEST = {"point": torch.tensor([-1.0, 0.01]), "offset": torch.zeros(1)}
EAST = {"point": torch.tensor([1.0, 0.01]), "offset": torch.zeros(1)}
OPTIMIZERS = (Adam(0.03), SGD(0.03, momentum=0.9))


@pytest.mark.parametrize("kind", [rg.connect.Bezier, rg.connect.PolygonalChain])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=["adam", "sgd"])
def test_curves_go_around_the_hill(kind: type[ControlledPath], optimizer: Optimizer) -> None:
    start = kind.between(WEST, EAST, bends=2)
    seen = Recorded()
    trained = [
        rg.connect.train_path(
            WEST,
            EAST,
            RING,
            start,
            generator=generator(0),
            steps=200,
            optimizer=optimizer,
            progress=seen,
        )
        for _ in range(2)
    ]
    straight, curved = (rg.line(WEST, EAST, RING, path=p) for p in (start, trained[0]))
    assert max(row["loss"] for row in curved.table) < 0.3 * max(row["loss"] for row in straight.table)
    assert seen.losses[:200] == seen.losses[200:]
    for one, two, before in zip(trained[0].inner, trained[1].inner, start.inner, strict=True):
        assert torch.equal(one["point"], two["point"])
        assert torch.equal(one["offset"], before["offset"])
        assert not one["point"].requires_grad
    assert all(torch.equal(trained[0].at(WEST, EAST, t)["point"], e["point"]) for t, e in ((0, WEST), (1, EAST)))


def classifier(seed: int, xs: Tensor, ys: Tensor) -> tuple[nn.Module, rg.Params]:
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(2, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 2))
    optimizer = torch.optim.Adam(module.parameters(), lr=0.03)
    for _ in range(150):
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(xs), ys).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return module, {n: t.detach().clone() for n, t in module.state_dict().items()}


def test_a_curve_after_alignment_is_below_the_line_after_alignment() -> None:
    g = generator(0)
    xs = torch.randn(200, 2, generator=g)
    ys = (xs.prod(1) > 0).long()
    module, a = classifier(1, xs, ys)
    _, b = classifier(2, xs, ys)
    symmetry = rg.discover(module, (xs,))
    task = rg.Task(module, [(xs, ys)])
    moved = rg.align(a, b, symmetry).params
    path = rg.connect.train_path(
        a, moved, task, rg.connect.Bezier.between(a, moved), generator=g, steps=150, optimizer=Adam(0.03)
    )
    naive, straight = rg.line(a, b, task), rg.line(a, moved, task)
    curved = rg.line(a, moved, task, path=path)
    assert straight.barrier < naive.barrier
    assert curved.barrier < 0.2 * straight.barrier


class Tied(nn.Module):
    """One matrix under two names, with batch normalization between its two uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.last = nn.Linear(3, 3)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.norm(self.first(x)).relu())
        return out


def test_tied_weights_stay_tied_and_statistics_are_recomputed() -> None:
    torch.manual_seed(0)
    module, other = Tied(), Tied()
    x = torch.randn(20, 3)
    a, b = (rg.connect.reset_batchnorm(m.state_dict(), m, [x]) for m in (module, other))

    def prepare(p: rg.Params) -> rg.Params:
        return rg.connect.reset_batchnorm(p, module, [x])

    task = rg.Task(module, [(x, x.argmax(1))], prepare=prepare)
    start = rg.connect.PolygonalChain.between(a, b)
    path = rg.connect.train_path(a, b, task, start, generator=generator(0), steps=60, optimizer=Adam(0.05))
    assert torch.equal(path.inner[0]["first.weight"], path.inner[0]["last.weight"])
    assert not torch.equal(path.inner[0]["first.weight"], start.inner[0]["first.weight"])
    lines = [rg.line(a, b, task, path=p, prepare=prepare) for p in (start, path)]
    assert lines[1].auc < lines[0].auc


def test_what_cannot_be_trained_is_refused() -> None:
    start = rg.connect.Bezier.between(WEST, EAST)
    with pytest.raises(ValueError, match=r"steps=0 cannot train"):
        rg.connect.train_path(WEST, EAST, RING, start, generator=generator(0), steps=0)
    with pytest.raises(ValueError, match="the task has no batches"):
        rg.connect.train_path(WEST, EAST, rg.Task(Ring(), []), start, generator=generator(0))
    with pytest.raises(ValueError, match=r"in step \d+ of 300 the loss is inf; try a smaller lr"):
        rg.connect.train_path(WEST, EAST, RING, start, generator=generator(0), optimizer=SGD(1e20))
    with pytest.raises(ValueError, match="a Bezier without inner points is a straight line"):
        rg.connect.Bezier(())
    with pytest.raises(ValueError, match=r"the networks lack \['point'\], which the task's module has"):
        rg.connect.train_path({}, {}, RING, rg.connect.Bezier(({},)), generator=generator(0))
    with pytest.raises(ValueError, match="the two networks have different parameters"):
        rg.connect.train_path(WEST, EAST, RING, rg.connect.Bezier((A,)), generator=generator(0))

"""Fields of shapes: queries, exact distances and labels, and files that describe their INR."""

import math
import sys
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from regauge.checkpoints.writing import save
from regauge.data.images import pixel_centers
from regauge.data.shapes import SHARED_START, VOXELS, shared_start, voxels
from regauge.inr.fields.fields import CloudField, Field, MeshField, sample_surface
from regauge.inr.fields.signal_samples import (
    EVALUATION,
    DistanceLabels,
    Queries,
    Samples,
    draw_queries,
    entropy_floor,
    field_samples,
    image_samples,
    labels_of,
    voxel_samples,
)
from regauge.inr.representation import Inr, load_inr, read_inr
from regauge.nets.siren import Siren

INRS = [
    Inr(width=6, depth=2),
    Inr(width=6, depth=2, signal="signed", limit=0.2),
    Inr(width=6, depth=1, signal="occupancy", omega=10.0),
    Inr("siren", 2, 3, 5, 2, "image", pixels=(4, 7)),
    Inr("relu", 2, 1, 5, 3, "image", pixels=(8, 8)),
    Inr("relu", width=6, depth=2, signal="unsigned"),
]
KINDS = ["unsigned", "signed"]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=seeded(seed), dtype=torch.float64)


@dataclass(frozen=True)
class Ball:
    """A sphere around the origin, whose distances need no mesh."""

    radius: float
    surface: Tensor

    def distances(self, queries: Tensor) -> Tensor:
        return self.signed_distances(queries).abs()

    def signed_distances(self, queries: Tensor) -> Tensor:
        return queries.norm(dim=1) - self.radius


def ball(radius: float = 0.5) -> Ball:
    points = normal(200, 3)
    return Ball(radius, radius * points / points.norm(dim=1, keepdim=True))


def box(*, is_open: bool = False, is_inverted: bool = False) -> MeshField:
    """Return the cube [-1/2, 1/2]^3, optionally without one of its twelve triangles."""
    vertices = torch.tensor(list(product((-0.5, 0.5), repeat=3)), dtype=torch.float64)
    squares = [(0, 1, 3, 2), (4, 6, 7, 5), (0, 4, 5, 1), (2, 3, 7, 6), (0, 2, 6, 4), (1, 5, 7, 3)]
    faces = torch.tensor([t for a, b, c, d in squares for t in ((a, b, c), (a, c, d))])
    faces = faces.flip(1) if is_inverted else faces
    faces = faces[:-1] if is_open else faces
    return MeshField(vertices, faces, sample_surface(vertices, faces, 100, generator=seeded()))


def box_distance(queries: Tensor) -> Tensor:
    """Return the signed distance to this cube in closed form."""
    beyond = queries.abs() - 0.5
    return beyond.clamp(min=0).norm(dim=1) + beyond.max(1).values.clamp(max=0)


@pytest.mark.parametrize("inr", INRS, ids=str)
def test_a_checkpoint_says_what_it_holds(inr: Inr, tmp_path: Path) -> None:
    params = inr.start(seeded(), dtype=torch.float64)
    path = inr.save(params, tmp_path / "x.safetensors")
    found, described = load_inr(path)
    assert described == read_inr(path) == inr
    assert found.keys() == params.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in params.items())
    module = described.module(found)
    points = torch.rand(5, inr.in_features, dtype=torch.float64)
    assert module(points).shape == (5, inr.out_features)
    assert torch.equal(module(points), torch.func.functional_call(module, found, (points,)))


def test_other_files_are_refused(tmp_path: Path) -> None:
    inr = INRS[0]
    params = inr.start(seeded())
    plain = save(params, tmp_path / "plain.safetensors")
    with pytest.raises(ValueError, match="does not record which INR it holds"):
        load_inr(plain)
    torch.save(params, tmp_path / "x.pt")
    with pytest.raises(ValueError, match="does not record which INR it holds"):
        load_inr(tmp_path / "x.pt")
    (tmp_path / "broken.safetensors").write_bytes(b"12345")
    with pytest.raises(ValueError, match="not a readable safetensors file"):
        load_inr(tmp_path / "broken.safetensors")
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        load_inr(tmp_path / "absent.safetensors")
    other = replace(inr, width=7).to_json()
    wrong = save(params, tmp_path / "wrong.safetensors", metadata={"kind": "regauge.inr", "inr": other})
    with pytest.raises(ValueError, match="has shape"):
        load_inr(wrong)
    with pytest.raises(ValueError, match="has shape"):
        replace(inr, width=7).save(params, tmp_path / "new.safetensors")
    assert not (tmp_path / "new.safetensors").exists()
    with pytest.raises(FileExistsError):
        inr.save(params, plain)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"kind": "tanh"}, "siren or relu"),
        ({"depth": 0}, "empty layer or no hidden one"),
        ({"kind": "relu", "omega": 30.0}, "has no omega"),
        ({"omega": 0.0}, "omega must be positive"),
        ({"limit": math.nan}, "limit must be positive"),
        ({"signal": "occupancy", "limit": 0.1}, "has no limit"),
        ({"pixels": (3, 3)}, "exactly an image"),
        ({"signal": "image", "in_features": 2}, "exactly an image"),
        ({"signal": "image", "pixels": (3, 3)}, "two coordinates"),
        ({"out_features": 2}, "one output"),
    ],
)
def test_nonsense_is_refused(settings: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Inr(**settings)  # type: ignore[arg-type]


def test_a_description_is_checked() -> None:
    text = Inr(width=8).to_json()
    assert Inr.from_json(text) == Inr(width=8)
    with pytest.raises(ValueError, match="malformed"):
        Inr.from_json(text.replace('"width"', '"breadth"'))
    with pytest.raises(ValueError, match="width of an INR is 'eight', which is no int"):
        Inr.from_json(text.replace('"width": 8', '"width": "eight"'))
    with pytest.raises(ValueError, match="version 9"):
        Inr.from_json(text.replace('"version": 1', '"version": 9'))


def test_biases_start_differently_and_weights_alike() -> None:
    inr = Inr(width=64, depth=2)
    starts = {bias: inr.start(seeded(), bias=bias) for bias in ("torch", "siren", "zero")}
    bounds = {
        "torch": [1 / math.sqrt(3), 1 / 8, 1 / 8],
        "siren": [1 / 3, math.sqrt(6 / 64) / 30, math.sqrt(6 / 64) / 30],
        "zero": [0.0, 0.0, 0.0],
    }
    for bias, params in starts.items():
        for k, bound in enumerate(bounds[bias]):
            assert torch.equal(params[f"layers.{k}.weight"], starts["torch"][f"layers.{k}.weight"])
            largest = params[f"layers.{k}.bias"].abs().max()
            assert largest <= bound
            assert largest >= 0.9 * bound or k == 2  # one value alone
    assert starts["torch"]["layers.0.weight"].abs().max() <= 1 / 3
    assert starts["torch"]["layers.1.weight"].abs().max() <= math.sqrt(6 / 64) / 30
    again = inr.start(seeded())
    assert all(torch.equal(again[name], tensor) for name, tensor in starts["torch"].items())
    with pytest.raises(ValueError, match="no frequency"):
        INRS[-1].start(seeded(), bias="siren")
    with pytest.raises(ValueError, match="biases start as"):
        Siren(bias="ones")  # type: ignore[arg-type]


@pytest.mark.parametrize("is_signed", [False, True], ids=KINDS)
def test_labels_are_distances(is_signed: bool) -> None:
    labels = DistanceLabels(0.1, is_signed=is_signed)
    first = -0.1 if is_signed else 0.0
    distances = torch.linspace(first, 0.1, 41, dtype=torch.float64)
    y = labels.of(distances)
    assert (y[1:] - y[:-1]).sign().eq(1.0 if is_signed else -1.0).all()
    torch.testing.assert_close(labels.distances(y), distances, rtol=0, atol=1e-16)
    torch.testing.assert_close(labels.from_logits(torch.logit(y[1:-1])), distances[1:-1], rtol=0, atol=1e-15)
    assert labels.of(torch.tensor([0.0])).item() == (0.5 if is_signed else 1.0)
    assert labels.of(torch.tensor([7.0])).item() == (1.0 if is_signed else 0.0)
    assert labels.of(torch.tensor([-7.0])).item() == 0.0 if is_signed else True


def test_labels_of_what_has_no_distance() -> None:
    assert labels_of(INRS[1]) == DistanceLabels(0.2, is_signed=True)
    with pytest.raises(ValueError, match="has no distances"):
        labels_of(INRS[3])
    with pytest.raises(ValueError, match="positive and finite"):
        DistanceLabels(0.0, is_signed=True)


def test_no_prediction_beats_the_floor() -> None:
    labels = torch.rand(50, 1, generator=seeded(), dtype=torch.float64)
    floor = entropy_floor(labels)
    assert floor == pytest.approx(torch.distributions.Bernoulli(labels).entropy().mean().item(), abs=1e-12)
    assert entropy_floor(torch.tensor([0.0, 1.0, 1.0])) == 0.0
    for shift in (-0.3, 0.3):
        logits = torch.logit(labels) + shift
        assert torch.nn.functional.binary_cross_entropy_with_logits(logits, labels).item() > floor


@pytest.mark.parametrize("signal", ["unsigned", "signed", "occupancy"])
def test_samples_of_a_ball_are_exact(signal: str) -> None:
    inr = Inr(width=4, signal=signal)  # type: ignore[arg-type]
    samples = field_samples(ball(), inr, Queries(200, 150, 80, 70), generator=seeded())
    signed = samples.points.norm(dim=1) - 0.5
    expected = {
        "unsigned": 1 - signed.abs().clamp(max=0.1) / 0.1,
        "signed": ((signed + 0.1) / 0.2).clamp(0, 1),
        "occupancy": (signed <= 0).double(),
    }[signal]
    assert samples.points.shape == (500, 3)
    torch.testing.assert_close(samples.labels.squeeze(1), expected, rtol=0, atol=1e-15)
    again = field_samples(ball(), inr, Queries(200, 150, 80, 70), generator=seeded())
    assert torch.equal(samples.points, again.points)


def test_queries_lie_where_they_should() -> None:
    queries = Queries(4000, 3000, 2000, 1000)
    points = draw_queries(ball().surface, queries, generator=seeded())
    assert points.shape == (queries.total, 3)
    assert points.dtype == torch.float64
    assert points.abs().max() <= 1
    distances = (points.norm(dim=1) - 0.5).split([4000, 3000, 2000, 1000])
    # The noise along the normal is normal; that along the surface adds sigma^2 / r, which matters for the far ones.
    for found, sigma in zip(distances[:3], (0.003, 0.01, 0.1), strict=True):
        assert found.std().item() == pytest.approx(sigma, rel=0.06)
        assert found.mean().item() == pytest.approx(sigma**2 / 0.5, abs=0.1 * sigma)
    uniform = points[-1000:]
    assert uniform.mean(0).abs().max() < 0.1
    assert uniform.std().item() == pytest.approx(1 / math.sqrt(3), rel=0.05)


def test_every_point_of_the_surface_serves_equally_often() -> None:
    surface = torch.arange(30.0).reshape(10, 3) / 30
    exact = Queries(40, 15, 0, 0, near_sigma=0.0, middle_sigma=0.0)
    near, middle = draw_queries(surface, exact, generator=seeded()).split([40, 15])
    for part, bounds in ((near, {4}), (middle, {1, 2})):
        counts = (part.unsqueeze(1) == surface).all(2).sum(0)
        assert set(counts.tolist()) == bounds


def test_queries_that_make_no_sense() -> None:
    assert (Queries().total, EVALUATION.total) == (500_000, 10_000)
    with pytest.raises(ValueError, match="cannot be drawn"):
        Queries(-1)
    with pytest.raises(ValueError, match="cannot be drawn"):
        Queries(0, 0, 0, 0)
    with pytest.raises(ValueError, match="at least one point"):
        draw_queries(torch.empty(0, 3), EVALUATION, generator=seeded())


def test_distances_to_points() -> None:
    points, queries = normal(60, 3), normal(40, 3, seed=1)
    field = CloudField(points)
    torch.testing.assert_close(field.distances(queries), torch.cdist(queries, points).min(1).values)
    assert field.distances(points).max() == 0
    assert field.distances(queries.float()).dtype == torch.float32
    with pytest.raises(ValueError, match="no inside"):
        field.signed_distances(queries)
    with pytest.raises(ValueError, match="NaN or Inf"):
        CloudField(torch.full((2, 3), math.nan))
    with pytest.raises(ValueError, match="at least one"):
        CloudField(torch.empty(0, 3))


@pytest.mark.parametrize("field", [box(), box(is_inverted=True), box(is_open=True)], ids=["closed", "inverted", "open"])
def test_distances_to_a_cube(field: MeshField) -> None:
    queries = torch.rand(500, 3, generator=seeded(), dtype=torch.float64) * 2 - 1
    if not field.is_closed:  # the missing triangle is half of the side z = 1/2; only below it nothing changes
        queries = queries[queries[:, 2] < -0.1]
    expected = box_distance(queries)
    assert (expected < 0).sum() > 20
    torch.testing.assert_close(field.distances(queries), expected.abs(), rtol=0, atol=1e-12)
    torch.testing.assert_close(field.signed_distances(queries), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(
        field.distances(field.surface), torch.zeros(100, dtype=torch.float64), rtol=0, atol=1e-12
    )


def test_closed_meshes_are_told_apart() -> None:
    assert box().is_closed
    assert not box(is_open=True).is_closed
    turned = box()
    faces = turned.faces.clone()
    faces[0] = faces[0].flip(0)
    assert not replace(turned, faces=faces).is_closed


def test_points_of_a_cloud_and_of_its_mesh_are_different_targets() -> None:
    mesh = box()
    queries = draw_queries(mesh.surface, EVALUATION, generator=seeded())
    to_points, to_mesh = CloudField(mesh.surface).distances(queries), mesh.distances(queries)
    assert (to_points >= to_mesh - 1e-12).all()
    sparse = draw_queries(
        sample_surface(mesh.vertices, mesh.faces, 1000, generator=seeded(1)), EVALUATION, generator=seeded()
    )
    assert CloudField(mesh.surface).distances(sparse).mean() > 5 * mesh.distances(sparse).mean()


def test_points_of_a_mesh_are_uniform() -> None:
    field = box()
    points = sample_surface(field.vertices, field.faces, 6000, generator=seeded())
    assert points.shape == (6000, 3)
    assert (points.abs().max(1).values - 0.5).abs().max() < 1e-15
    sides = torch.stack([points[:, k // 2] == (-0.5, 0.5)[k % 2] for k in range(6)]).sum(1)
    assert sides.min() > 850
    assert sides.max() < 1150
    halves = points[points[:, 0] == 0.5]
    assert halves.mean(0)[1:].abs().max() < 0.05


@pytest.mark.parametrize(
    ("faces", "sentence"),
    [(torch.empty(0, 3, dtype=torch.long), "at least one"), (torch.tensor([[0, 1, 8]]), "names vertex 8")],
)
def test_meshes_that_are_none(faces: Tensor, sentence: str) -> None:
    field = box()
    with pytest.raises(ValueError, match=sentence):
        MeshField(field.vertices, faces, field.surface)


def test_without_the_library_of_meshes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "igl", None)
    with pytest.raises(ImportError, match=r"regauge\[shapes\]"):
        box().distances(normal(2, 3))


def test_fields_are_fields() -> None:
    fields: list[Field] = [ball(), box(), CloudField(normal(3, 3))]
    assert all(field.surface.shape[1] == 3 for field in fields)


def test_pixels_are_samples() -> None:
    image = torch.rand(3, 4, 5, generator=seeded(), dtype=torch.float64)
    samples = image_samples(image)
    assert torch.equal(samples.labels.t().reshape(3, 4, 5), image)
    assert samples.points[0].tolist() == pytest.approx([-0.75, -0.8])
    assert samples.points[1].tolist() == pytest.approx([-0.75, -0.4])
    assert torch.equal(samples.points, pixel_centers(4, 5).double())
    with pytest.raises(ValueError, match="channels, height, width"):
        image_samples(image[0])
    with pytest.raises(ValueError, match="`image_samples`"):
        field_samples(ball(), INRS[3], EVALUATION, generator=seeded())


def test_cells_are_samples() -> None:
    grid = torch.zeros(2, 3, 4, dtype=torch.bool)
    grid[1, 0, 3] = True
    samples = voxel_samples(grid)
    assert len(samples) == 24
    assert samples.labels.sum() == 1
    assert samples.points[samples.labels.squeeze(1) == 1].tolist()[0] == pytest.approx([0.5, -2 / 3, 0.75])
    with pytest.raises(ValueError, match="booleans"):
        voxel_samples(grid.float())
    with pytest.raises(ValueError, match="samples are points"):
        Samples(torch.zeros(2, 3), torch.zeros(3, 1))


def test_shared_data_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGAUGE_DATA", str(tmp_path))
    monkeypatch.setenv("REGAUGE_CACHE", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="REGAUGE_DATA"):
        voxels("chair")
    with pytest.raises(FileNotFoundError, match="does not exist"):
        shared_start(tmp_path)
    with pytest.raises(ValueError, match="no voxel grids of 'sofa'"):
        voxels("sofa")  # type: ignore[arg-type]
    for file, read in ((VOXELS, lambda: voxels("chair", tmp_path)), (SHARED_START, lambda: shared_start(tmp_path))):
        (tmp_path / file.name).write_bytes(b"something else")
        with pytest.raises(ValueError, match="SHA-256"):
            read()


def test_the_shared_start_is_that_of_a_siren() -> None:
    try:
        params = shared_start()
    except FileNotFoundError:
        pytest.skip("it is not on this machine")
    inr = Inr()
    inr.module(params)
    assert params["layers.0.weight"].abs().max().item() == pytest.approx(1 / 3, rel=2e-3)
    assert params["layers.2.weight"].abs().max().item() == pytest.approx(math.sqrt(6 / 512) / 30, rel=1e-3)
    assert params["layers.0.bias"].abs().max().item() == pytest.approx(1 / math.sqrt(3), rel=1e-2)


def test_voxels_are_grids() -> None:
    try:
        grids = voxels("monitor")
    except FileNotFoundError:
        pytest.skip("they are not on this machine")
    assert grids.shape == (465, 32, 32, 32)
    assert grids.flatten(1).any(1).all()

"""Rendering of INRs: exact spheres, files, metrics and strips. Pictures are equal along an orbit."""

import math
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from regauge.core.params import Params
from regauge.data.images import pixel_centers
from regauge.discovery import discover
from regauge.inr.rendering.field_values import EVALUATED_AT_ONCE, evaluate, psnr, render_image
from regauge.inr.rendering.mesh import (
    MESH_FORMATS,
    POINT_FORMATS,
    Mesh,
    NoSurfaceError,
    extract_mesh,
    load_mesh,
    load_points,
    save_mesh,
    save_points,
)
from regauge.inr.rendering.points import PointCloud, Projection, compare_points, extract_points
from regauge.inr.rendering.strips import Detail, load_strips, render_strip, save_strips
from regauge.inr.representation import Inr
from regauge.report.shape_figures import View

RADIUS = 0.6
FEW = Projection(count=300, steps=2)


class Ball(nn.Module):
    """A module that computes the logits of a ball's exact field."""

    def __init__(self, inr: Inr) -> None:
        super().__init__()
        self.inr = inr
        self.radius = nn.Parameter(torch.tensor(RADIUS, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        distance = x.norm(dim=-1, keepdim=True) - self.radius
        if self.inr.limit is None:
            return -20 * distance
        share = distance / self.inr.limit
        if self.inr.signal == "signed":
            return 2 * torch.atanh(share.clamp(-1 + 1e-9, 1 - 1e-9))
        return -torch.logit(share.abs().clamp(1e-9, 1 - 1e-9))


class BallInr(Inr):
    """An INR of a ball."""

    def module(self, params: Mapping[str, Tensor] | None = None) -> nn.Module:
        return Ball(self)


BALL = {"radius": torch.tensor(RADIUS, dtype=torch.float64)}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def lively(inr: Inr, seed: int = 0) -> Params:
    """Return random parameters in float64 whose outputs have both signs and are far from zero."""
    params = inr.start(generator(seed), dtype=torch.float64)
    last = f"layers.{inr.depth}"
    values = evaluate(inr, params, 2 * torch.rand(500, inr.in_features, generator=generator(), dtype=torch.float64) - 1)
    params[f"{last}.weight"] = params[f"{last}.weight"] * (4 / values.std())
    params[f"{last}.bias"] = (params[f"{last}.bias"] - values.mean(0)) * (4 / values.std())
    return params


@pytest.mark.parametrize("signal", ["signed", "occupancy"])
def test_a_ball_has_a_sphere_as_its_mesh(signal: str) -> None:
    pytest.importorskip("skimage", reason="needs the extra 'shapes'")
    mesh = extract_mesh(BallInr(signal=signal), BALL, resolution=48)
    torch.testing.assert_close(mesh.vertices.norm(dim=1), torch.full((len(mesh.vertices),), RADIUS), atol=2e-3, rtol=0)
    assert len(mesh.vertices) - len(mesh.faces) // 2 == 2, "no sphere by its Euler characteristic"
    volume = torch.linalg.det(mesh.vertices[mesh.faces].double()).sum() / 6
    assert volume.item() == pytest.approx(4 / 3 * math.pi * RADIUS**3, rel=0.01), "the faces look inward"


@pytest.mark.parametrize("steps", [1, 5])
def test_points_come_to_the_sphere(steps: int) -> None:
    cloud = extract_points(BallInr(), BALL, Projection(count=3000, steps=steps), generator=generator())
    assert cloud.is_complete
    assert str(cloud).startswith("3,000 points from ")
    assert cloud.points.dtype == torch.float64
    torch.testing.assert_close(
        cloud.points.norm(dim=1), torch.full((3000,), RADIUS, dtype=torch.float64), atol=1e-9, rtol=0
    )
    assert cloud.points.mean(0).abs().max() < 0.05, "one side was preferred"
    again = extract_points(BallInr(), BALL, Projection(count=3000, steps=steps), generator=generator())
    assert torch.equal(cloud.points, again.points)


def test_a_network_without_a_surface_ends_soon_and_says_so() -> None:
    far = {"radius": torch.tensor(9.0, dtype=torch.float64)}
    cloud = extract_points(BallInr(), far, FEW, generator=generator())
    assert cloud.points.shape == (0, 3)
    assert not cloud.is_complete
    assert cloud.draws == 65_536
    assert "only 0 of 300 points: 65,536 random ones were tried" in str(cloud)
    # A small sphere gives some points within the tries, and not all.
    small = {"radius": torch.tensor(0.05, dtype=torch.float64)}
    cloud = extract_points(BallInr(), small, Projection(count=1000, steps=2, tries=64), generator=generator())
    assert 0 < len(cloud.points) < 1000
    assert cloud.draws == 65_536
    nan = {"radius": torch.tensor(math.nan, dtype=torch.float64)}
    assert len(extract_points(BallInr(), nan, FEW, generator=generator()).points) == 0


def test_time_is_a_limit() -> None:
    thin = {"radius": torch.tensor(0.05, dtype=torch.float64)}
    cloud = extract_points(BallInr(), thin, Projection(count=10_000, seconds=1e-9), generator=generator())
    assert cloud.draws == 16_384
    assert not cloud.is_complete


def test_no_mesh_says_why() -> None:
    pytest.importorskip("skimage", reason="needs the extra 'shapes'")
    inr = BallInr(signal="signed")
    for radius, side in ((9.0, "inside"), (-1.0, "outside")):
        with pytest.raises(NoSurfaceError, match=f"all 8\\^3 points of .* lie {side}"):
            extract_mesh(inr, {"radius": torch.tensor(radius)}, resolution=8)
    with pytest.raises(ValueError, match="NaN"):
        extract_mesh(inr, {"radius": torch.tensor(math.nan)}, resolution=8)
    with pytest.raises(ValueError, match="no cell"):
        extract_mesh(inr, BALL, resolution=1)
    with pytest.raises(ValueError, match="'unsigned' has no inside"):
        extract_mesh(BallInr(), BALL)


def test_what_does_not_fit_is_refused() -> None:
    inr = Inr(width=4)
    many = {name: torch.stack([tensor, tensor]) for name, tensor in inr.start(generator()).items()}
    with pytest.raises(ValueError, match="one network at a time"):
        extract_points(inr, many, generator=generator())
    with pytest.raises(ValueError, match=r"only one of both has \['other', 'radius'\]"):
        evaluate(BallInr(), {"other": torch.zeros(1)}, torch.zeros(1, 3))
    with pytest.raises(ValueError, match=r"shape \(4, 4, 3\), but the network's has \(4, 3\)"):
        evaluate(
            inr, many | {"layers.0.weight": torch.zeros(4, 4, 3), "layers.0.bias": torch.zeros(4)}, torch.zeros(1, 3)
        )
    with pytest.raises(ValueError, match="'signed' has no unsigned"):
        extract_points(BallInr(signal="signed"), BALL, generator=generator())
    with pytest.raises(ValueError, match=r"clipped at 0\.04"):
        extract_points(BallInr(limit=0.04), BALL, generator=generator())
    for wrong in ({"count": 0}, {"steps": 0}, {"seconds": 0.0}, {"close": 0.1}):
        with pytest.raises(ValueError, match=r"must be positive|is needed"):
            Projection(**wrong)


def test_missing_libraries_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "skimage.measure", None)
    monkeypatch.setitem(sys.modules, "trimesh", None)
    with pytest.raises(ImportError, match=r"scikit-image: pip install 'regauge\[shapes\]'"):
        extract_mesh(BallInr(signal="signed"), BALL, resolution=4)
    with pytest.raises(ImportError, match=r"trimesh: pip install 'regauge\[shapes\]'"):
        save_points(torch.zeros(1, 3), tmp_path / "a.ply")
    assert not list(tmp_path.iterdir())


def test_an_image_is_drawn_where_its_pixels_are() -> None:
    network = torch.nn.Linear(2, 2)
    params = {"weight": torch.eye(2, dtype=torch.float64) / 4, "bias": torch.full((2,), 0.5, dtype=torch.float64)}
    image = render_image(network, params, 2, 4)
    torch.testing.assert_close(image[:, 0, 0], torch.tensor([0.375, 0.625], dtype=torch.float64))
    torch.testing.assert_close(image[0, :, 1], 0.5 + torch.tensor([-0.75, -0.25, 0.25, 0.75]).double() / 4)
    with pytest.raises(ValueError, match="0 x 3 pixels is empty"):
        render_image(network, params, 0, 3)


def test_a_population_of_images_is_its_images() -> None:
    inr = Inr(in_features=2, out_features=3, width=8, depth=2, signal="image", pixels=(5, 4))
    each = [lively(inr, seed) for seed in range(3)]
    many = {name: torch.stack([params[name] for params in each]) for name in each[0]}
    images = render_image(inr, many, 5, 4)
    assert images.shape == (3, 5, 4, 3)
    assert images.min() == 0
    assert images.max() == 1
    for params, image in zip(each, images, strict=True):
        torch.testing.assert_close(image, render_image(inr.module(params), params, 5, 4), atol=1e-12, rtol=0)
        points = pixel_centers(5, 4).double()
        expected = inr.module(params)(points).clamp(0, 1).reshape(5, 4, 3).detach()
        torch.testing.assert_close(image, expected, atol=1e-12, rtol=0)


def test_portions_change_nothing() -> None:
    inr = Inr(width=4, depth=1)
    params = lively(inr)
    points = torch.rand(EVALUATED_AT_ONCE + 7, 3, generator=generator(), dtype=torch.float64)
    torch.testing.assert_close(evaluate(inr, params, points), inr.module(params)(points).detach(), atol=1e-12, rtol=0)


@pytest.mark.parametrize("kind", ["siren", "relu"])
def test_pictures_do_not_change_along_the_orbit(kind: str) -> None:
    pytest.importorskip("skimage", reason="needs the extra 'shapes'")
    space = Inr(kind=kind, width=8, depth=2)  # type: ignore[arg-type]
    plane = replace(space, in_features=2, signal="image", limit=None, pixels=(6, 6))
    for inr in (space, replace(space, signal="signed"), replace(space, signal="occupancy", limit=None), plane):
        params = lively(inr)
        symmetry = discover(inr.module(params), (torch.rand(4, inr.in_features, dtype=torch.float64),))
        moved = symmetry.act(symmetry.random(generator(1)), params)
        assert not torch.allclose(moved["layers.0.weight"], params["layers.0.weight"])
        if inr.signal == "image":
            first, second = render_image(inr, params, 6, 6), render_image(inr, moved, 6, 6)
        elif inr.signal == "unsigned":
            first, second = (extract_points(inr, p, FEW, generator=generator()).points for p in (params, moved))
            assert len(first) > 0
        else:
            one, two = extract_mesh(inr, params, resolution=10), extract_mesh(inr, moved, resolution=10)
            assert torch.equal(one.faces, two.faces)
            first, second = one.vertices.double(), two.vertices.double()
        torch.testing.assert_close(first, second, atol=1e-6, rtol=0)


def test_metrics_are_those_of_brute_force() -> None:
    p = torch.rand(40, 3, generator=generator(), dtype=torch.float64) * 0.05
    q = torch.rand(30, 3, generator=generator(1), dtype=torch.float64) * 0.05
    distances = (p[:, None] - q[None]).norm(dim=-1)
    there, back = distances.amin(1), distances.amin(0)
    result = compare_points(p, q)
    assert result.chamfer == pytest.approx((there.square().mean() + back.square().mean()).item(), rel=1e-12)
    precision, recall = (there <= 0.01).double().mean().item(), (back <= 0.01).double().mean().item()
    assert 0 < precision < 1
    assert (result.precision, result.recall) == (precision, recall)
    assert result.f_score == pytest.approx(2 * precision * recall / (precision + recall))
    assert compare_points(p, p).f_score == 1
    assert compare_points(p, p).chamfer == 0
    assert compare_points(p, p + 1).f_score == 0
    nothing = compare_points(torch.empty(0, 3), q)
    assert (nothing.chamfer, nothing.f_score) == (math.inf, 0.0)
    with pytest.raises(ValueError, match="no points"):
        compare_points(p, torch.empty(0, 3))
    with pytest.raises(ValueError, match="NaN"):
        compare_points(p / 0 * 0, q)


def test_psnr() -> None:
    image = torch.zeros(2, 2, 1)
    assert psnr(image, image) == math.inf
    assert psnr(image + 0.1, image) == pytest.approx(20, abs=1e-5)
    with pytest.raises(ValueError, match="cannot be compared"):
        psnr(image, torch.zeros(2, 2, 3))


TETRAHEDRON = Mesh(
    torch.tensor([[0, 0, 0], [0.3, 0, 0], [0, 0.7, 0], [0, 0, -0.1]]),
    torch.tensor([[0, 1, 2], [0, 3, 1], [0, 2, 3], [1, 3, 2]]),
)


@pytest.mark.parametrize("suffix", MESH_FORMATS)
def test_meshes_come_back(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("trimesh", reason="needs the extra 'shapes'")
    path = save_mesh(TETRAHEDRON, tmp_path / f"a{suffix}")
    back = load_mesh(path)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    corners = TETRAHEDRON.vertices[TETRAHEDRON.faces]
    torch.testing.assert_close(back.vertices[back.faces], corners, atol=0 if suffix != ".obj" else 1e-8, rtol=0)
    assert len(back.vertices) == 4
    with pytest.raises(FileExistsError, match="exists already"):
        save_mesh(TETRAHEDRON, path)
    save_mesh(TETRAHEDRON, path, overwrite=True)
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(ValueError, match=r"damaged"):
        load_mesh(path)


@pytest.mark.parametrize("suffix", POINT_FORMATS)
def test_points_come_back(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("trimesh", reason="needs the extra 'shapes'")
    points = torch.rand(50, 3, generator=generator())
    path = save_points(points, tmp_path / f"a{suffix}")
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    torch.testing.assert_close(load_points(path), points, atol=0 if suffix != ".xyz" else 1e-8, rtol=0)
    path.write_bytes(b"x")
    with pytest.raises(ValueError, match=r"damaged|no point"):
        load_points(path)


def test_wrong_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must end in \.ply or \.obj or \.stl"):
        save_mesh(TETRAHEDRON, tmp_path / "a.off")
    with pytest.raises(FileNotFoundError, match="there is no file"):
        load_mesh(tmp_path / "a.ply")
    with pytest.raises(ValueError, match="must end in"):
        load_points(tmp_path / "a.obj")
    with pytest.raises(ValueError, match="no faces"):
        save_mesh(Mesh(torch.zeros(3, 3), torch.zeros(0, 3, dtype=torch.long)), tmp_path / "a.ply")
    with pytest.raises(ValueError, match="at least one point"):
        save_points(torch.empty(0, 3), tmp_path / "a.ply")
    assert not list(tmp_path.iterdir())


STRIPS = {
    "unsigned": Inr(width=8, depth=2),
    "signed": Inr(width=8, depth=2, signal="signed"),
    "image": Inr(in_features=2, out_features=1, width=8, depth=2, signal="image", pixels=(6, 5)),
}


@pytest.mark.parametrize("signal", STRIPS)
def test_strips_have_the_networks_at_their_ends(tmp_path: Path, signal: str) -> None:
    pytest.importorskip("skimage", reason="needs the extra 'shapes'")
    inr, detail = STRIPS[signal], Detail(FEW, 8)
    a, b = lively(inr), lively(inr, 1)

    def loss(params: Params) -> dict[str, float]:
        return {"loss": params["layers.0.bias"].square().sum().item()}

    queries = 2 * torch.rand(200, inr.in_features, generator=generator()) - 1

    def strip(first: Params, second: Params) -> "list[np.ndarray[tuple[int, ...], np.dtype[np.float64]]]":
        made = render_strip(
            inr, first, second, loss, label="a", points=3, queries=queries, detail=detail, generator=generator()
        )
        path = save_strips([made], tmp_path / "strips.npz", overwrite=True)
        (back,) = load_strips(path)
        assert (back.label, back.signal, back.names, back.losses) == ("a", signal, ("A", ".50", "B"), made.losses)
        assert made.losses[0] == loss(first)["loss"]
        assert made.losses[2] == loss(second)["loss"]
        assert (made.counts is None) == (signal == "image")
        if made.counts is not None:
            assert back.counts is not None
            assert np.array_equal(back.counts, made.counts)
            assert made.counts.sum(1).tolist() == [200] * 3
        for one, two in zip(made.pictures, back.pictures, strict=True):
            assert type(one) is type(two)
            assert [array.tolist() for array in arrays(one)] == [array.tolist() for array in arrays(two)]
        return [np.concatenate([array.ravel() for array in arrays(p)] or [np.zeros(0)]) for p in made.pictures]

    there, back = strip(a, b), strip(b, a)
    assert np.array_equal(there[0], back[2])
    assert np.array_equal(there[2], back[0])
    assert not np.array_equal(there[0], there[2])
    still = strip(a, a)
    np.testing.assert_allclose(still[1], there[0], atol=1e-6)


def arrays(picture: object) -> "list[np.ndarray[tuple[int, ...], np.dtype[np.float64]]]":
    match picture:
        case Mesh():
            return [picture.vertices.numpy(), picture.faces.numpy()]
        case PointCloud():
            return [picture.points.numpy(), np.array([picture.wanted, picture.draws])]
        case Tensor():
            return [picture.numpy()]
    return []


def test_a_strip_goes_on_where_there_is_no_surface(tmp_path: Path) -> None:
    pytest.importorskip("skimage", reason="needs the extra 'shapes'")
    inside = {"radius": torch.tensor(9.0, dtype=torch.float64)}
    rows = []
    for signal in ("signed", "unsigned"):
        rows.append(
            render_strip(
                BallInr(signal=signal),
                BALL,
                inside,
                lambda params: {"loss": math.inf if params["radius"] > 5 else 0.5},
                label=signal,
                points=2,
                detail=Detail(FEW, 12),
                generator=generator(),
            )
        )
    assert isinstance(rows[0].pictures[0], Mesh)
    assert rows[0].pictures[1] is None
    for row in load_strips(save_strips(rows, tmp_path / "a.npz")):
        assert isinstance(row.pictures[0], Mesh | PointCloud)
        assert row.pictures[1] is None or not len(row.pictures[1].points)
        assert [math.isfinite(loss) for loss in row.losses] == [True, False]


def test_wrong_strips_are_refused(tmp_path: Path) -> None:
    inr = STRIPS["image"]
    params = lively(inr)
    with pytest.raises(ValueError, match="both ends"):
        render_strip(inr, params, params, lambda _: {"loss": 0.0}, label="a", points=1, generator=generator())
    with pytest.raises(ValueError, match="metric 'loss'"):
        render_strip(inr, params, params, lambda _: {"psnr": 0.0}, label="a", generator=generator())
    two, three = (
        render_strip(inr, params, params, lambda _: {"loss": 0.0}, label="a", points=k, generator=generator())
        for k in (2, 3)
    )
    path = save_strips([two], tmp_path / "a.npz")
    with pytest.raises(FileExistsError, match="exists already"):
        save_strips([three], path)
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(ValueError, match="damaged"):
        load_strips(path)
    np.savez(path, points=np.zeros(3))
    with pytest.raises(ValueError, match="but no strips"):
        load_strips(path)
    with pytest.raises(FileNotFoundError, match="there is no file"):
        load_strips(tmp_path / "b.npz")


@pytest.mark.parametrize("up", [0, 1, 2])
def test_views_turn_and_keep_what_is_up(up: int) -> None:
    matrix = View(25.0, 0.0, up).matrix
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(3), atol=1e-12)
    assert np.linalg.det(matrix) == pytest.approx(1)
    np.testing.assert_allclose(matrix @ np.eye(3)[up], [0, 1, 0], atol=1e-12)
    above = View(0.0, 90.0, up).matrix
    np.testing.assert_allclose(above @ np.eye(3)[up], [0, 0, 1], atol=1e-12)
    with pytest.raises(ValueError, match="upward axis"):
        View(up=3)

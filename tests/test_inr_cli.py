"""`regauge inr`, and self-describing checkpoints as models of other commands."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open

from regauge.checkpoints.writing import save
from regauge.cli.main import main
from regauge.core.params import Params
from regauge.discovery import discover
from regauge.inr.fields.signal_samples import Queries
from regauge.inr.named_signals import (
    ImageSignal,
    ShapeSignal,
    is_signal,
    read_image,
    read_signal,
    signal_samples,
)
from regauge.inr.representation import Inr, load_inr
from regauge.storage import Store

SMALL = ("--width", "8", "--depth", "2", "--steps", "3")
BLOB = Inr(width=8, depth=2)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def cube() -> tuple[np.ndarray, np.ndarray]:
    """Return the cube [0, 2]^3."""
    vertices = np.array([(x, y, z) for x in (0, 2) for y in (0, 2) for z in (0, 2)], np.float32)
    squares = [(0, 1, 3, 2), (4, 6, 7, 5), (0, 4, 5, 1), (2, 3, 7, 6), (0, 2, 6, 4), (1, 5, 7, 3)]
    return vertices, np.array([t for a, b, c, d in squares for t in ((a, b, c), (a, c, d))])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a working directory with a point cloud, a mesh, two images and two networks."""
    monkeypatch.chdir(tmp_path)
    vertices, faces = cube()
    np.savez("mesh.npz", vertices=vertices, faces=faces)
    np.savez("cloud.npz", points=vertices)
    ramp = np.linspace(0, 255, 48).reshape(6, 8).round().astype(np.uint8)
    Image.fromarray(ramp).save("gray.png")
    Image.fromarray(np.stack([ramp, ramp[::-1], ramp], -1)).save("color.png")
    for seed, name in enumerate("ab"):
        BLOB.save(BLOB.start(seeded(seed)), f"{name}.safetensors")
    return tmp_path


def outputs(params: Params, inr: Inr) -> torch.Tensor:
    points = torch.rand(50, inr.in_features, generator=seeded(5), dtype=torch.float64) * 2 - 1
    with torch.no_grad():
        return inr.module({name: tensor.double() for name, tensor in params.items()})(points)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (("cloud.npz",), {"signal": "unsigned"}),
        (("mesh.npz:points",), {"signal": "unsigned"}),
        (("mesh.npz", "--signal", "signed"), {"signal": "signed"}),
        (("mesh.npz", "--signal", "occupancy", "--kind", "relu"), {"signal": "occupancy", "kind": "relu"}),
        (("gray.png",), {"signal": "image", "pixels": (6, 8), "out_features": 1}),
        (("color.png",), {"signal": "image", "pixels": (6, 8), "out_features": 3}),
    ],
    ids=str,
)
def test_fit(
    folder: Path, capsys: pytest.CaptureFixture[str], args: tuple[str, ...], expected: dict[str, object], monkeypatch
) -> None:
    monkeypatch.setattr("regauge.inr.signal_fits.Queries", lambda: Queries(50, 40, 5, 5))
    main(["inr", "fit", *args, "-o", "x.safetensors", *SMALL])
    params, inr = load_inr("x.safetensors")
    assert {name: getattr(inr, name) for name in expected} == expected
    assert (inr.width, inr.depth) == (8, 2)
    assert "loss on all" in capsys.readouterr().out
    main(["inr", "fit", *args, "-o", "y.safetensors", *SMALL])
    again, _ = load_inr("y.safetensors")
    assert all(torch.equal(again[name], tensor) for name, tensor in params.items())


def test_a_fit_goes_on(folder: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regauge.inr.signal_fits.Queries", lambda: Queries(50, 40, 5, 5))
    main(["inr", "fit", "cloud.npz", "-o", "x.safetensors", *SMALL, "--start", "a.safetensors"])
    (moved, _), (start, _) = load_inr("x.safetensors"), load_inr("a.safetensors")
    assert 0 < (moved["layers.1.weight"] - start["layers.1.weight"]).abs().max() < 4e-4  # three steps of 1e-4
    wrong = ("--width", "9", "--depth", "2", "--start", "a.safetensors")
    assert "choose --kind, --width and --depth" in refused("inr", "fit", "cloud.npz", "-o", "y.safetensors", *wrong)


def test_what_cannot_be_fitted(folder: Path, refused: Callable[..., str]) -> None:
    out = ("-o", "x.safetensors", *SMALL)
    (folder / "broken.png").write_bytes(b"no image")
    np.savez("nan.npz", points=np.full((3, 3), np.nan))
    np.savez("one.npz", points=np.ones((3, 3)))
    for target, sentence in (
        ("sphere", "is not a signal"),
        ("absent.png", "there is no file"),
        ("absent.npz", "there is no file"),
        ("broken.png", "damaged or not an image"),
        ("nan.npz", "NaN or Inf"),
        ("one.npz", "no extent"),
        ("cloud.npz:mesh", "only points"),
    ):
        assert sentence in refused("inr", "fit", target, *out)
    assert "leave it out" in refused("inr", "fit", "gray.png", *out, "--signal", "signed")
    assert "no inside" in refused("inr", "fit", "cloud.npz", *out, "--signal", "signed")
    assert "must be positive" in refused("inr", "fit", "cloud.npz", *out[:-1], "0")
    assert "the fit diverged" in refused("inr", "fit", "gray.png", *out[:-1], "1", "--lr", "1e38")
    assert "exists already" in refused("inr", "fit", "cloud.npz", "-o", "a.safetensors", *SMALL)
    assert not (folder / "x.safetensors").exists()


def test_render_an_image(folder: Path, refused: Callable[..., str]) -> None:
    main(["inr", "fit", "color.png", "-o", "x.safetensors", "--width", "32", "--depth", "2", "--lr", "3e-3"])
    main(["inr", "render", "x.safetensors", "-o", "x.png"])
    assert (read_image("x.png") - read_image("color.png")).abs().max() < 0.05
    main(["inr", "render", "x.safetensors", "-o", "large.png", "--resolution", "12"])
    assert read_image("large.png").shape == (3, 12, 16)
    assert "written as .png" in refused("inr", "render", "x.safetensors", "-o", "x.ply")
    assert "exists already" in refused("inr", "render", "x.safetensors", "-o", "x.png")


def test_render_shapes(folder: Path, refused: Callable[..., str]) -> None:
    pytest.importorskip("trimesh", reason="needs the extra 'shapes'")
    ball = {"unsigned": Inr("relu", width=6, depth=1), "signed": Inr("relu", width=6, depth=1, signal="signed")}
    eye = torch.eye(3)
    for name, inr in ball.items():  # |x| + |y| + |z| - 1/2, as a logit of a distance
        factor = -20.0 if name == "unsigned" else 20.0
        bias = torch.tensor([13.0 if name == "unsigned" else -10.0])
        params = {
            "layers.0.weight": torch.cat([eye, -eye]),
            "layers.0.bias": torch.zeros(6),
            "layers.1.weight": factor * torch.ones(1, 6),
            "layers.1.bias": bias,
        }
        inr.save(params, f"{name}.safetensors")
    main(["inr", "render", "signed.safetensors", "-o", "s.ply", "--resolution", "24"])
    mesh = read_signal("s.ply")
    assert isinstance(mesh, ShapeSignal)
    assert mesh.faces is not None
    main(["inr", "render", "unsigned.safetensors", "-o", "u.npz", "--points", "20"])
    with np.load("u.npz") as archive:
        assert archive["points"].shape == (20, 3)
    assert "written as .png, .ply, .xyz, .npz" in refused("inr", "render", "unsigned.safetensors", "-o", "u.obj")
    for name in ("signed", "unsigned"):
        main(["inr", "render", f"{name}.safetensors", "-o", f"{name}.png", "--resolution", "24", "--points", "50"])
        with Image.open(f"{name}.png") as picture:
            assert picture.size == (640, 640)
    far = {"layers.0.weight": torch.cat([eye, -eye]), "layers.0.bias": torch.zeros(6)}
    far |= {"layers.1.weight": torch.zeros(1, 6), "layers.1.bias": torch.tensor([-9.0])}
    ball["unsigned"].save(far, "far.safetensors")
    assert "no surface was found" in refused("inr", "render", "far.safetensors", "-o", "far.png", "--points", "20")
    save(BLOB.start(seeded()), "plain.safetensors")
    assert "does not record which INR" in refused("inr", "render", "plain.safetensors", "-o", "p.ply")


def test_orbit(folder: Path, capsys: pytest.CaptureFixture[str], refused: Callable[..., str]) -> None:
    main(["inr", "orbit", "a.safetensors", "-o", "copies", "--count", "4"])
    assert "4 copies, moved by all parts" in capsys.readouterr().out
    store = Store.open("copies")
    params, inr = load_inr("a.safetensors")
    assert Inr.from_json(store.about["inr"]) == inr
    many = store.read(range(4))
    for k in range(4):
        own = {name: tensor[k] for name, tensor in many.items()}
        assert not torch.equal(own["layers.0.weight"], params["layers.0.weight"])
        torch.testing.assert_close(outputs(own, inr), outputs(params, inr), rtol=0, atol=1e-4)
    assert "has no scale" in refused("inr", "orbit", "a.safetensors", "-o", "none", "--parts", "sign", "scale")
    main(["inr", "orbit", "a.safetensors", "-o", "noisy", "--count", "2", "--parts", "sign", "--noise", "0.1"])
    assert Store.open("noisy").about["parts"] == "sign"
    assert "count and reach must be at least 1" in refused("inr", "orbit", "a.safetensors", "-o", "x", "--count", "0")


def test_align_and_line_need_no_model(
    folder: Path, capsys: pytest.CaptureFixture[str], refused: Callable[..., str]
) -> None:
    params, inr = load_inr("a.safetensors")
    points = torch.rand(4, 3, generator=seeded())
    symmetry = discover(inr.module(params), (points,)).bind(params)
    inr.save(symmetry.act(symmetry.random(seeded(3)), params), "moved.safetensors")
    main(["align", "a.safetensors", "moved.safetensors", "-o", "back.safetensors", "--data", "cloud.npz"])
    back, described = load_inr("back.safetensors")
    assert described == inr
    for name, tensor in params.items():
        torch.testing.assert_close(back[name], tensor, rtol=0, atol=1e-4)
    capsys.readouterr()
    main(["line", "a.safetensors", "back.safetensors", "--data", "cloud.npz", "--points", "3"])
    assert "barrier" in capsys.readouterr().out
    main(["line", "a.safetensors", "b.safetensors", "--data", "mesh.npz:points", "--loss", "mse", "--points", "3"])
    main(["canonicalize", "a.safetensors", "-o", "canonical.safetensors"])
    assert load_inr("canonical.safetensors")[1] == inr
    save(params, "plain.safetensors")
    line = ("line", "plain.safetensors", "a.safetensors", "--data", "cloud.npz")
    assert "name it with --model" in refused(*line)
    main([*line, "--model", "a.safetensors", "--points", "3"])
    np.savez("arrays.npz", inputs=points.numpy(), targets=np.zeros((4, 1), np.float32))
    main(["line", "a.safetensors", "b.safetensors", "--data", "arrays.npz", "--loss", "mse", "--points", "3"])


def test_images_have_a_line(folder: Path, capsys: pytest.CaptureFixture[str], refused: Callable[..., str]) -> None:
    inr = Inr("siren", 2, 1, 8, 1, "image", pixels=(6, 8))
    inr.save(inr.start(seeded()), "image.safetensors")
    line = ("line", "image.safetensors", "image.safetensors", "--data", "gray.png", "--points", "3")
    assert "--loss mse" in refused(*line)
    main([*line, "--loss", "mse"])
    assert "barrier 0" in capsys.readouterr().out
    assert "cannot represent a shape" in refused(*line[:4], "cloud.npz", "--loss", "mse")


def test_what_others_write_keeps_its_header(folder: Path) -> None:
    main(["align", "a.safetensors", "b.safetensors", "-o", "c.safetensors"])
    main(["apply", "c.safetensors", "b.safetensors", "-o", "d.safetensors"])
    main(["merge", "a.safetensors", "b.safetensors", "-o", "e.safetensors"])
    for name in "cde":
        with safe_open(f"{name}.safetensors", framework="pt") as file:
            assert Inr.from_json(file.metadata()["inr"]) == BLOB


def test_shapes_of_files_lie_in_the_unit_ball(folder: Path) -> None:
    for name in ("mesh.npz", "cloud.npz"):
        found = read_signal(name)
        assert isinstance(found, ShapeSignal)
        torch.testing.assert_close(found.vertices.abs(), torch.full((8, 3), 3**-0.5), rtol=0, atol=1e-6)
    assert is_signal("spot:mesh")
    assert is_signal("chair:12")
    assert not is_signal("chair")
    assert not is_signal("package.module:factory")
    image = read_signal("color.png")
    assert isinstance(image, ImageSignal)
    assert image.values.shape == (3, 6, 8)
    assert image.values.max() == 1
    with pytest.raises(ValueError, match="cannot represent an image"):
        signal_samples(image, BLOB, Queries(1), generator=seeded())


def test_points_and_mesh_are_told_apart(folder: Path) -> None:
    pytest.importorskip("igl", reason="needs the extra 'shapes'")
    queries = Queries(300, 0, 0, 0)
    means = {}
    for name in ("mesh.npz", "mesh.npz:points", "mesh.npz:mesh"):
        means[name] = signal_samples(read_signal(name), BLOB, queries, generator=seeded()).labels.mean().item()
    assert means["mesh.npz"] == means["mesh.npz:points"] < means["mesh.npz:mesh"]

"""Orbits of INRs: the whole group of a sine layer recovers a copy exactly, and no smaller group does."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from symmetries import permutations_only, without_shifts
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import regauge as rg
from regauge.core.params import Params
from regauge.inr.orbits import Orbit, lines, orbit, recovery, write_orbit
from regauge.inr.representation import Inr
from regauge.nets.siren import Siren
from regauge.storage import Architecture, Store

PARTS = [("permutation",), ("sign",), ("permutation", "sign"), None]
SMALLER: dict[str, Callable[[rg.Symmetry], rg.Symmetry]] = {
    "permutations": permutations_only,
    "permutations and signs": without_shifts,
}


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Mixed(nn.Module):
    """Sine layers of different frequencies."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 12), nn.Linear(12, 10), nn.Linear(10, 1)])

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.sin(self.layers[1](torch.sin(30 * self.layers[0](x))))
        result: Tensor = self.layers[2](hidden)
        return result


def network(name: str, dtype: torch.dtype, seed: int = 0) -> tuple[nn.Module, Params]:
    """Return a network with random parameters, whose biases spread over several periods of the first sines."""
    if name == "mixed frequencies":
        module: nn.Module = Mixed().to(dtype)
        params = {
            n: torch.rand(t.shape, generator=seeded(seed), dtype=dtype) - 0.5 for n, t in module.named_parameters()
        }
        return module, params
    inr = {
        "image": Inr("siren", 2, 1, 32, 2, "image", pixels=(8, 8)),
        "shape": Inr(width=48),
        "wide": Inr(width=512),
        "deep": Inr(width=6, depth=6),
        "one unit": Inr(width=1, depth=2),
        "relu": Inr("relu", width=16, depth=3),
    }[name]
    params = inr.start(seeded(seed), dtype=dtype)
    return inr.module(params), params


def symmetry_of(module: nn.Module, params: Params) -> rg.Symmetry:
    first = next(iter(params.values()))
    inputs = torch.zeros(3, first.shape[1] if first.ndim == 2 else 2, dtype=first.dtype)
    return rg.discover(module, (inputs,))


def small() -> tuple[nn.Module, Params, rg.Symmetry, rg.Task]:
    """Return a network of an image with values of about one, and the squared error to its values plus a small
    offset.
    """
    module, params = network("image", torch.float64)
    params["layers.2.weight"] = 30 * params["layers.2.weight"]
    points = torch.rand(60, 2, generator=seeded(5), dtype=torch.float64) * 2 - 1
    targets = torch.func.functional_call(module, params, (points,)) + 0.1
    task = rg.Task(module, [(points, targets)], nn.functional.mse_loss)
    return module, params, symmetry_of(module, params), task


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["image", "shape", "deep", "one unit", "mixed frequencies", "relu"])
def test_copies_under_the_whole_group_are_recovered(name: str, dtype: torch.dtype) -> None:
    tolerance = 1e-4 if dtype == torch.float32 else 1e-11
    symmetry = symmetry_of(*network(name, dtype))
    for seed in range(2):
        _, params = network(name, dtype, seed)
        copies = orbit(params, symmetry, 2, generator=seeded(seed), reach=20)
        for method in (None, rg.WeightMatching()):
            for k in range(2):
                copy = {n: t[k] for n, t in copies.params.items()}
                found = rg.align(params, copy, symmetry, method=method).params
                for n, tensor in params.items():
                    assert (found[n] - tensor).abs().max() <= tolerance * tensor.abs().max()
        assert recovery(params, copies, symmetry, method=rg.WeightMatching()).max_error <= tolerance


def test_a_wide_copy_is_recovered() -> None:
    module, params = network("wide", torch.float32)
    symmetry = symmetry_of(module, params)
    copies = orbit(params, symmetry, 1, generator=seeded(), reach=6)
    found = rg.align(params, {name: t[0] for name, t in copies.params.items()}, symmetry).params
    assert all((found[name] - t).abs().max() <= 1e-5 * t.abs().max() for name, t in params.items())


@pytest.mark.parametrize("smaller", SMALLER)
def test_smaller_groups_recover_nothing(smaller: str) -> None:
    _, params, symmetry, task = small()
    copies = orbit(params, symmetry, 6, generator=seeded())
    whole = recovery(params, copies, symmetry, method=rg.WeightMatching(), task=task, points=5)
    part = recovery(
        params, copies, symmetry, method=rg.WeightMatching(), within=SMALLER[smaller](symmetry), task=task, points=5
    )
    assert whole.share == 1
    assert max(curve.barrier for curve in whole.curves) < 1e-12
    assert part.share == 0
    assert part.errors.min() > 0.1
    assert min(curve.barrier for curve in part.curves) > 1e-3


def test_permutations_do_not_recover_signs() -> None:
    _, params, symmetry, _ = small()
    copies = orbit(params, symmetry, 4, generator=seeded(), parts=("permutation", "sign"))
    within = {name: narrow(symmetry) for name, narrow in SMALLER.items()}
    shares = {
        name: recovery(params, copies, symmetry, method=rg.WeightMatching(), within=group).share
        for name, group in within.items()
    }
    assert shares == {"permutations": 0, "permutations and signs": 1}


@pytest.mark.parametrize("parts", PARTS, ids=str)
def test_copies_compute_the_same_and_are_drawn_from_their_parts(parts: tuple[str, ...] | None) -> None:
    module, params, symmetry, _ = small()
    copies = orbit(params, symmetry, 5, generator=seeded(), parts=parts, reach=9)
    points = torch.rand(20, 2, generator=seeded(1), dtype=torch.float64)
    expected = torch.func.functional_call(module, params, (points,))
    for k in range(5):
        copy = {name: t[k] for name, t in copies.params.items()}
        assert torch.allclose(torch.func.functional_call(module, copy, (points,)), expected, atol=1e-11)
    identity = symmetry.identity((5,))
    for name, value in copies.element.items():
        for part, field in (("permutation", "perm"), ("sign", "sign"), ("shift", "shift")):
            is_blank = torch.equal(getattr(value, field), getattr(identity[name], field))
            assert is_blank == (parts is not None and part not in parts)
        assert value.shift is not None
        assert (value.shift.abs().max() > 1) == (parts is None)


def test_noise_is_a_share_of_each_tensor() -> None:
    module, params = network("shape", torch.float64)
    symmetry = symmetry_of(module, params)
    copies = orbit(params, symmetry, 4, generator=seeded(), noise=0.05, reach=30)
    undone = copies.undo(symmetry)
    for name, tensor in params.items():
        deviation = (undone[name] - tensor).std(correction=0)
        if tensor.numel() == 1:
            assert deviation < 1e-12
        else:
            assert float(deviation / tensor.std(correction=0)) == pytest.approx(0.05, rel=0.25)


@pytest.mark.parametrize("noise", [1e-3, 1e-2])
def test_copies_with_noise_are_recovered_and_connected(noise: float) -> None:
    inr = Inr(width=24, depth=3)
    params = inr.start(seeded(), dtype=torch.float64)
    params["layers.3.weight"] = 30 * params["layers.3.weight"]
    module = inr.module(params)
    points = torch.rand(200, 3, generator=seeded(5), dtype=torch.float64) * 2 - 1
    labels = torch.sigmoid(torch.func.functional_call(module, params, (points,)))
    task = rg.Task(module, [(points, labels)], binary_cross_entropy_with_logits)
    symmetry = symmetry_of(module, params)
    copies = orbit(params, symmetry, 6, generator=seeded(), noise=noise, reach=6)
    found = recovery(params, copies, symmetry, method=rg.WeightMatching(), task=task, points=7)
    assert found.max_error < 1e-10
    scale = found.curves[0].table[0]["loss"]
    assert max(curve.barrier for curve in found.curves) < 1e-6 * scale
    naive = recovery(params, copies, symmetry, method=None, task=task, points=7)
    assert naive.share == 0
    assert max(curve.barrier for curve in naive.curves) > 1e-3 * scale
    size = math.sqrt(sum(float(t.std(correction=0)) ** 2 * t.numel() for t in params.values()))
    assert float(found.distances.mean()) == pytest.approx(noise * size, rel=0.1)


def test_the_lines_are_those_of_single_networks() -> None:
    _, params, symmetry, task = small()
    copies = orbit(params, symmetry, 3, generator=seeded()).params
    for k, curve in enumerate(lines(params, copies, task, 5)):
        single = rg.line(params, {name: t[k] for name, t in copies.items()}, task, points=5)
        assert [row["loss"] for row in curve.table] == pytest.approx([row["loss"] for row in single.table], rel=1e-12)


def test_a_store_of_copies_says_how_they_were_made(tmp_path: Path) -> None:
    module = Siren(2, 5, 1)
    params = dict(module.state_dict())
    symmetry = rg.discover(module, (torch.zeros(2, 2),))
    copies = orbit(params, symmetry, 4, generator=seeded(3), parts=("permutation", "sign"), noise=0.01)
    architecture = Architecture("SIREN 2-5-5-1", "regauge.nets.siren:Siren", {"in_features": 2, "width": 5})
    store = write_orbit(tmp_path / "orbit", copies, architecture, symmetry, seed=3)
    assert len(store) == 4
    assert store.about["seed"] == 3
    assert list(store.rows["noise"]) == [0.01] * 4
    assert set(store.rows["parts"]) == {"permutation sign"}
    read = Store.open(tmp_path / "orbit").read(slice(None))
    assert all(torch.equal(read[name], tensor) for name, tensor in copies.params.items())
    again = write_orbit(tmp_path / "orbit", copies, architecture, symmetry, seed=3)
    assert len(again) == 4
    others = orbit(params, symmetry, 4, generator=seeded(4), parts=("permutation", "sign"), noise=0.01)
    with pytest.raises(FileExistsError, match=r"\(sha256\)"):
        write_orbit(tmp_path / "orbit", others, architecture, symmetry, seed=3)


def test_copies_depend_on_the_generator_alone() -> None:
    _, params, symmetry, _ = small()

    def draw(seed: int) -> Orbit:
        return orbit(params, symmetry, 2, generator=seeded(seed), noise=0.1, reach=3)

    first, again, other = draw(0), draw(0), draw(1)
    assert all(torch.equal(first.params[name], again.params[name]) for name in params)
    assert not all(torch.equal(first.params[name], other.params[name]) for name in params)


def test_bad_input() -> None:
    _, params, symmetry, task = small()
    for settings in ({"count": 0}, {"noise": -1.0}, {"reach": 0}, {"noise": math.nan}):
        with pytest.raises(ValueError, match="make no copies"):
            orbit(params, symmetry, **{"count": 1, "generator": seeded(), **settings})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="part"):
        orbit(params, symmetry, 1, generator=seeded(), parts=("turn",))
    for part in ("rotation", "translation"):
        with pytest.raises(ValueError, match=f"has no {part}, so it would change no copy"):
            orbit(params, symmetry, 1, generator=seeded(), parts=(part,))
    copies = orbit(params, symmetry, 1, generator=seeded())
    with pytest.raises(ValueError, match="at least one point between"):
        recovery(params, copies, symmetry, method=None, task=task, points=2)
    with pytest.raises(ValueError, match="shape"):
        recovery(
            params, replace(copies, params={n: t[..., :1] for n, t in copies.params.items()}), symmetry, method=None
        )

"""Fingerprints are equal for a whole orbit, close for similar networks, and different for other functions."""

import json
from pathlib import Path

import pytest
import torch
from symmetries import BY_HAND, drawn, gated_units, generator, linear_heads, mlp_symmetry, twice_nested

import regauge as rg
from regauge.checkpoints.writing import save
from regauge.cli.main import main
from regauge.comparison.fingerprints import SIZE
from regauge.core.params import Params, select
from regauge.storage import Store
from regauge.storage.architecture import Architecture
from regauge.zoo import Fingerprints


def sized(made: tuple[rg.Symmetry, dict[str, tuple[int, ...]]]) -> rg.Symmetry:
    symmetry, shapes = made
    return symmetry.bind({name: torch.zeros(shape) for name, shape in shapes.items()})


EVERY = {
    **BY_HAND,
    "families": sized(gated_units(4)),
    "linear heads": sized(linear_heads(3, 4)),
    "twice nested": sized(twice_nested(3, 2)),
    "linear, wider than what it reads": mlp_symmetry(3, 9, 7, 2, kind="linear"),
}


def away(a: Params, b: Params, symmetry: rg.Symmetry) -> float:
    return float((rg.comparison.fingerprint(a, symmetry) - rg.comparison.fingerprint(b, symmetry)).norm())


def noisy(params: Params, share: float) -> Params:
    source = generator(5)
    noise = {name: torch.randn(t.shape, generator=source, dtype=t.dtype) for name, t in params.items()}
    return {name: t + share * t.square().mean().sqrt() * noise[name] for name, t in params.items()}


@pytest.mark.parametrize("name", EVERY)
def test_every_element_keeps_it_and_little_noise_changes_it_little(name: str) -> None:
    symmetry = EVERY[name]
    params = drawn(symmetry, 0)
    for seed in range(3):
        assert away(params, symmetry.act(symmetry.random(generator(seed)), params), symmetry) < 1e-10
    assert away(params, noisy(params, 1e-4), symmetry) < 3e-4
    assert away(params, drawn(symmetry, 1), symmetry) > 0.01


def test_a_population_is_taken_network_by_network() -> None:
    symmetry = EVERY["linear heads"]
    networks = [drawn(symmetry, seed) for seed in range(3)]
    population = {name: torch.stack([one[name] for one in networks]) for name in networks[0]}
    found = rg.comparison.fingerprint(population, symmetry)
    assert found.shape == (3, SIZE)
    for k in range(3):
        assert torch.allclose(found[k], rg.comparison.fingerprint(select(population, k), symmetry), atol=1e-12)
    moved = symmetry.act(symmetry.random(generator(0), batch=(3,)), population)
    assert torch.allclose(found, rg.comparison.fingerprint(moved, symmetry), atol=1e-12)


@pytest.mark.parametrize("kind", ["permutation", "scaled", "dihedral", "linear"])
def test_other_orders_of_inputs_and_outputs_are_other_networks(kind: str) -> None:
    symmetry = mlp_symmetry(5, 7, 6, 4, kind=kind)
    params = drawn(symmetry, 0)
    assert away(params, {**params, "0.weight": params["0.weight"].flip(1)}, symmetry) > 0.01
    swapped = {**params, "2.weight": params["2.weight"].flip(0), "2.bias": params["2.bias"].flip(0)}
    assert away(params, swapped, symmetry) > 0.01
    broken = {**params, "1.weight": params["1.weight"].flip(1)}  # One axis of a group without its others.
    assert away(params, broken, symmetry) > 1e-3


def test_copies_are_found_among_many() -> None:
    """With noise as large as the rounding of bfloat16, the nearest of two hundred fingerprints is the copy."""
    symmetry = mlp_symmetry(6, 12, 10, 3, kind="scaled")
    networks = [drawn(symmetry, seed) for seed in range(200)]
    known = rg.comparison.fingerprint(
        {name: torch.stack([one[name] for one in networks]) for name in networks[0]}, symmetry
    )
    moved = symmetry.act(symmetry.random(generator(1)), networks[77])
    rounded = {name: tensor.bfloat16() for name, tensor in moved.items()}
    distances = torch.cdist(rg.comparison.fingerprint(rounded, symmetry)[None], known)[0]
    near, second = distances.sort().values[:2].tolist()
    assert int(distances.argmin()) == 77
    assert 10 * near < second


@pytest.mark.usefixtures("streamed")
@pytest.mark.parametrize("name", ["attention", "experts", "families", "linear heads"])
def test_checkpoints_that_are_streamed_have_the_same_fingerprint(name: str, tmp_path: Path) -> None:
    symmetry = EVERY[name]
    params = drawn(symmetry, 0)
    for dtype, tolerance in ((torch.float64, 1e-6), (torch.bfloat16, 1e-5)):
        own = {n: t.to(dtype) for n, t in params.items()}
        path = save(own, tmp_path / f"{dtype}.safetensors")
        read = rg.comparison.fingerprint(path, symmetry, memory="2GB")
        assert read.shape == (SIZE,)
        assert float((read - rg.comparison.fingerprint(own, symmetry)).norm()) < tolerance
    with pytest.raises(ValueError, match=r"a fingerprint needs .* but only 1 kB are allowed"):
        rg.comparison.fingerprint(path, symmetry, memory=1000)


@pytest.mark.usefixtures("streamed")
def test_streamed_products_need_their_full_rank(tmp_path: Path) -> None:
    symmetry = mlp_symmetry(14, 9, 7, 8, kind="linear")
    params = drawn(symmetry, 0)
    params["1.weight"][:, 0] = params["1.weight"][:, 1]
    path = save(params, tmp_path / "low.safetensors")
    with pytest.raises(ValueError, match="has less than full rank, and its fingerprint needs the network"):
        rg.comparison.fingerprint(path, symmetry, memory="2GB")


def test_copies_are_found_in_a_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each shard is measured once. Networks with NaN are skipped."""
    architecture = Architecture("MLP", "regauge.nets.mlp:mlp", {"widths": [5, 7, 3]})
    symmetry = rg.discover(architecture.module(), (torch.zeros(2, 5),), verify=False)
    store = Store.create(tmp_path / "zoo", architecture, symmetry)
    params = {s.name: torch.randn(20, *s.shape, generator=generator(0)) for s in architecture.layout}
    params["layers.0.weight"][3] = torch.nan
    for half in (slice(0, 12), slice(12, 20)):
        rows = [{"id": k, "step": 10} for k in range(20)[half]]
        store.append({name: tensor[half] for name, tensor in params.items()}, rows)
    known = Fingerprints.of(Store.open(tmp_path / "zoo"))
    assert known.numbers.shape == (20, SIZE)
    assert int(known.numbers.isnan().any(1).sum()) == 1
    copy = symmetry.act(symmetry.random(generator(1)), select(params, 15))
    (number, distance), (_, second) = known.nearest(copy, 2)
    assert known.store.rows["id"][number] == 15
    assert distance < 1e-6 < 0.01 < second
    assert len(known.nearest(copy, 100)) == 19
    monkeypatch.setattr(
        "regauge.zoo.populations.store_fingerprints._measure", None
    )  # Everything is known from here on.
    assert torch.equal(Fingerprints.of(known.store).numbers.nan_to_num(), known.numbers.nan_to_num())
    save(copy, tmp_path / "copy.safetensors")
    main(["zoo", "nearest", str(tmp_path / "zoo"), str(tmp_path / "copy.safetensors"), "--count", "3", "--json"])
    found = json.loads(capsys.readouterr().out)["nearest"]
    assert found[0]["id"] == 15
    assert len(found) == 3


def test_bad_networks_are_refused() -> None:
    symmetry = mlp_symmetry(5, 7, 3)
    params = drawn(symmetry, 0)
    params["0.bias"][0] = float("nan")
    with pytest.raises(ValueError, match=r"'0.bias' of the network holds NaN or Inf in 1 of"):
        rg.comparison.fingerprint(params, symmetry)
    with pytest.raises(KeyError, match="lack"):
        rg.comparison.fingerprint({name: params[name] for name in ("0.weight", "0.bias")}, symmetry)

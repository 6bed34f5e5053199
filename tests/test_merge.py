"""Merging: the mean of aligned networks."""

import pytest
import torch

import regauge as rg
from regauge import Params, Symmetry, WeightMatching
from regauge.merging import TaskArithmetic

SYMMETRY = Symmetry.from_axes({"w": ("h", None), "b": ("h",), "v": (None, "h")})


def network(seed: int, dtype: torch.dtype = torch.float64) -> Params:
    g = torch.Generator().manual_seed(seed)
    shapes = {"w": (7, 3), "b": (7,), "v": (2, 7)}
    return {n: torch.randn(s, generator=g, dtype=torch.float64).to(dtype) for n, s in shapes.items()}


def orbit(params: Params, seed: int) -> Params:
    symmetry = SYMMETRY.bind(params)
    return symmetry.act(symmetry.random(torch.Generator().manual_seed(seed)), params)


def test_copies_of_one_network_merge_into_it() -> None:
    a = network(0)
    merged = rg.merge([a, orbit(a, 1), orbit(a, 2)], SYMMETRY).params
    assert all(torch.allclose(merged[n], a[n]) for n in a)


def test_weights_are_normalized_and_applied_after_alignment() -> None:
    a, b = network(0), network(1)
    aligned = rg.align(a, b, SYMMETRY).params
    merged = rg.merge([a, b], SYMMETRY, weights=[1, 3]).params
    assert all(torch.allclose(merged[n], 0.25 * a[n] + 0.75 * aligned[n]) for n in a)
    assert all(torch.equal(t, a[n]) for n, t in rg.merge([a, b], SYMMETRY, weights=[2, 0]).params.items())


def test_many_networks_are_aligned_with_one_another() -> None:
    networks = [network(seed) for seed in range(4)]
    many = rg.align_many(networks, SYMMETRY).params
    merged = rg.merge(networks, SYMMETRY).params
    to_first = [networks[0], *(rg.align(networks[0], other, SYMMETRY).params for other in networks[1:])]
    pairs = rg.merge(networks, SYMMETRY, method=WeightMatching()).params
    for n, tensor in merged.items():
        assert torch.allclose(tensor, torch.stack([p[n] for p in many]).mean(0))
        assert torch.allclose(pairs[n], torch.stack([p[n] for p in to_first]).mean(0))
    assert not torch.allclose(merged["w"], pairs["w"])


def test_one_network_is_no_merge() -> None:
    with pytest.raises(
        ValueError, match=r"there is only one network to merge, but Average\(\) combines 2 networks or more"
    ):
        rg.merge([network(0)], SYMMETRY)


def test_the_result_shares_no_memory() -> None:
    a = network(0)
    merged = rg.merge([a, network(1)], SYMMETRY, weights=[1, 0]).params
    assert all(torch.equal(merged[n], a[n]) and merged[n].data_ptr() != a[n].data_ptr() for n in a)


def test_integers_come_from_the_first_and_dtypes_are_kept() -> None:
    a = {**network(0, torch.bfloat16), "count": torch.tensor(5)}
    merged = rg.merge([a, {**orbit(network(0, torch.bfloat16), 1), "count": torch.tensor(9)}], SYMMETRY).params
    assert int(merged["count"]) == 5
    assert all(torch.equal(merged[n], a[n]) and merged[n].dtype == a[n].dtype for n in a)


def test_the_method_and_generator_are_passed_on() -> None:
    with pytest.raises(ValueError, match="restarts=1 begin at random elements"):
        rg.merge([network(0), network(1)], SYMMETRY, method=WeightMatching(restarts=1))
    generator = torch.Generator().manual_seed(0)
    rg.merge([network(0), network(1)], SYMMETRY, method=WeightMatching(restarts=1), generator=generator)


@pytest.mark.parametrize("weights", [[1.0], [1.0, -1.0], [0.0, 0.0], [1.0, float("nan")], [1.0, float("inf")]])
def test_weights_that_do_not_fit_are_refused(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="give one finite weight for each, none negative and not all zero"):
        rg.merge([network(0), network(1)], SYMMETRY, weights=weights)


def test_nothing_to_merge_is_refused() -> None:
    with pytest.raises(ValueError, match="there is no network to merge"):
        rg.merge([], SYMMETRY)


def test_a_broken_network_is_refused() -> None:
    broken = network(1)
    broken["b"][2] = float("nan")
    with pytest.raises(ValueError, match="'b' of the second network holds NaN or Inf in 1 of"):
        rg.merge([network(0), broken], SYMMETRY)
    with pytest.raises(ValueError, match="'b' of the first network holds NaN or Inf in 1 of"):
        rg.merge([broken, network(0)], SYMMETRY)
    with pytest.raises(ValueError, match="'b' of network 2 holds NaN or Inf in 1 of"):
        rg.merge([network(0), broken], SYMMETRY, base=network(2), rule=TaskArithmetic())
    with pytest.raises(ValueError, match="'b' of base holds NaN or Inf in 1 of"):
        rg.merge([network(0), network(2)], SYMMETRY, base=broken, rule=TaskArithmetic())
    with pytest.raises(ValueError, match="'b' of late holds NaN or Inf in 1 of"):
        rg.merge([network(0), broken], SYMMETRY, labels=["early", "late"])

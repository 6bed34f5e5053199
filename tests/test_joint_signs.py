"""Signs of heads and signs of the pairs within heads, which multiply the same entries, are chosen jointly."""

from itertools import product

import pytest
import torch
from symmetries import generator

import regauge as rg
from regauge.alignment.engine.joint_signs import find_sign_pairs
from regauge.core.families import families

HEADS, PAIRS, WIDTH = 3, 4, 2


def symmetry_of(*, heads: int = HEADS, pairs: int = PAIRS) -> rg.Symmetry:
    """Return a symmetry with one sign for each head and one sign for each pair in all heads. A gain depends only on
    pairs, a bias only on heads.
    """
    whole = rg.Placement("weight", 0, stride=pairs, repeats=((pairs, 1),), sign=(1,))
    bias = rg.Placement("bias", 0, sign=(1,))
    every = rg.Placement("weight", 0, repeats=((heads, pairs),), sign=(1,))
    gain = rg.Placement("gain", 0, sign=(1,))
    groups = (
        rg.Group("heads", heads, (whole, bias), is_permuted=False, signs=1),
        rg.Group("pairs", pairs, (every, gain), is_permuted=False, signs=1),
    )
    return rg.Symmetry(groups, {"weight": (heads * pairs, WIDTH), "bias": (heads,), "gain": (pairs,)})


def drawn(symmetry: rg.Symmetry, seed: int) -> rg.Params:
    chance = generator(seed)
    return {n: torch.randn(shape, generator=chance, dtype=torch.float64) for n, shape in symmetry.shapes.items()}


def inner(a: rg.Params, b: rg.Params) -> float:
    return sum(float((a[name] * b[name]).sum()) for name in a)


@pytest.mark.parametrize("seed", range(12))
def test_the_best_signs_of_random_networks_are_found(seed: int) -> None:
    symmetry = symmetry_of()
    a, b = drawn(symmetry, seed), drawn(symmetry, seed + 100)
    found = rg.align(a, b, symmetry)
    best = max(
        inner(a, symmetry.act(rg.Element({"heads": rg.Value(sign=s), "pairs": rg.Value(sign=t)}), b))
        for s in signs(HEADS)
        for t in signs(PAIRS)
    )
    assert found.objective == pytest.approx(best, rel=1e-12)


def signs(count: int) -> list[torch.Tensor]:
    return [torch.tensor([pattern], dtype=torch.int8) for pattern in product((1, -1), repeat=count)]


@pytest.mark.parametrize("pairs", [1, 5])
@pytest.mark.parametrize("noise", [0.0, 0.3])
@pytest.mark.parametrize("heads", [4, 20])
def test_planted_signs_are_recovered(heads: int, noise: float, pairs: int) -> None:
    symmetry = symmetry_of(heads=heads, pairs=32)
    networks = [drawn(symmetry, seed) for seed in range(pairs)]
    a = {name: torch.stack([network[name] for network in networks]) for name in networks[0]}
    chance = generator(7)
    b = {name: t + noise * torch.randn(t.shape, generator=chance, dtype=t.dtype) for name, t in a.items()}
    moved = symmetry.act(symmetry.random(chance, ("sign",), (pairs,)), b)
    found = rg.alignment.align_pairs(a, moved, symmetry)
    assert all(torch.equal(found.params[name], b[name]) for name in ("weight", "bias", "gain"))


def test_only_signs_that_meet_on_an_axis_are_joined() -> None:
    symmetry = symmetry_of()
    assert len(find_sign_pairs(families(symmetry.groups, symmetry.sites))) == 1
    tanh = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4), torch.nn.Tanh())
    apart = rg.discover(tanh, (torch.zeros(2, 3),), verify=False)
    assert not find_sign_pairs(families(apart.groups, apart.sites))

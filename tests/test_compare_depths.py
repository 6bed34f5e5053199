"""Networks with dropped or doubled blocks are compared block by block, at any position of the change."""

from itertools import combinations

import pytest
import torch
from torch import nn

import regauge as rg
from regauge.comparison.depths import _match_in_order
from regauge.nets.transformer import GPT, Llama, initialize_transformer

DEEP = 3


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def chain() -> nn.Module:
    """Return an MLP whose hidden layers are numbered together with its first and last layers."""
    layers = [nn.Linear(6, 20), *(nn.Linear(20, 20) for _ in range(DEEP)), nn.Linear(20, 3)]
    return nn.Sequential(*(nn.Sequential(one, nn.Tanh()) for one in layers[:-1]), nn.Sequential(layers[-1]))


MODULES = {
    "MLP": (chain, torch.zeros(2, 6, dtype=torch.float64)),
    "GPT": (lambda: GPT(20, 8, width=16, layers=DEEP, heads=2), torch.arange(8).unsqueeze(0)),
    "Llama": (lambda: Llama(20, width=16, layers=DEEP, heads=2, kv_heads=1), torch.arange(8).unsqueeze(0)),
}


@pytest.fixture(scope="module", params=MODULES)
def case(request: pytest.FixtureRequest) -> tuple[rg.Symmetry, list[rg.Params], str]:
    """Return a symmetry, two independent networks, and the prefix of the names of blocks."""
    make, inputs = MODULES[request.param]
    module = make().double().eval()
    networks = []
    for seed in range(2):
        if isinstance(module, GPT | Llama):
            networks.append(initialize_transformer(module, generator(seed)))
        else:
            source = generator(seed)
            networks.append(
                {n: torch.randn(t.shape, generator=source).double() / 4 for n, t in module.state_dict().items()}
            )
    return rg.discover(module, (inputs,)), networks, "" if request.param == "MLP" else "blocks."


def rearranged(params: rg.Params, prefix: str, order: list[int]) -> rg.Params:
    """Return a network that has the blocks of another network in some order."""
    found = {n: t for n, t in params.items() if not n.startswith(prefix)} if prefix else {}
    for new, old in enumerate(order):
        start = f"{prefix}{old}."
        found |= {f"{prefix}{new}.{n[len(start) :]}": t for n, t in params.items() if n.startswith(start)}
    return found


@pytest.mark.parametrize("place", [0, 1])
def test_a_dropped_block_may_be_anywhere(case: tuple[rg.Symmetry, list[rg.Params], str], place: int) -> None:
    symmetry, (a, stranger), prefix = case
    numbers, dropped = (range(DEEP), place) if prefix else (range(DEEP + 2), place + 1)
    order = [k for k in numbers if k != dropped]
    noise = {n: 0.1 * t.std(correction=0) * torch.randn(t.shape, generator=generator(3)) for n, t in a.items()}
    child = {n: t + noise[n] for n, t in a.items()}
    if prefix:  # One matrix of a chain with both orders unknown is too little to tell layers of 20 units apart.
        child = symmetry.act(symmetry.random(generator(2)), child)
    found = rg.compare(a, rearranged(child, prefix, order), symmetry)
    assert found.verdict == "descended", found.reason
    # In a chain the two layers next to the gap had another order in between.
    assert found.share_after is not None
    assert found.share_after > (0.95 if prefix else 0.7)
    assert f"{dropped} with {dropped + 1}" in found.notes[0]
    assert any(f"only A has them: '{prefix}{dropped}." in note for note in found.notes)
    if place == 1:  # Which block of a stranger is missing is the same to A.
        other = rg.compare(a, rearranged(stranger, prefix, order), symmetry)
        assert other.verdict in ("unrelated", "undecided"), other.reason


def test_a_doubled_block_is_named_as_it_is_stored(case: tuple[rg.Symmetry, list[rg.Params], str]) -> None:
    symmetry, (a, _), prefix = case
    if not prefix:
        pytest.skip("a doubled layer of a chain needs two orders of units for one")
    found = rg.compare(a, rearranged(a, prefix, [0, 1, 1, 2]), symmetry)
    assert found.verdict == "descended"
    assert found.share_after == pytest.approx(1)
    assert "3 with 2" in found.notes[0]
    assert any("only B has them" in note and f"'{prefix}2." in note for note in found.notes)
    # As deep as A is nothing but A.
    assert rg.compare(a, dict(a), symmetry).verdict == "identical"


def test_blocks_are_matched_in_their_order_with_the_largest_sum() -> None:
    for seed in range(20):
        table = torch.rand(5, 3, generator=generator(seed), dtype=torch.float64)
        scores = {(i, j): float(table[i, j]) for i in range(5) for j in range(3)}
        options = [
            list(zip(rows, columns, strict=True))
            for k in range(4)
            for rows in combinations(range(5), k)
            for columns in combinations(range(3), k)
        ]
        best = max(options, key=lambda pairs: sum(scores[pair] for pair in pairs))
        assert _match_in_order(scores, 5, 3) == {j: i for i, j in best}
    assert _match_in_order({}, 2, 1) == {}

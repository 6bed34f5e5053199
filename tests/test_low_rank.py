"""Products of matrices that cannot have full rank: one canonical form for each product, with the same function."""

import itertools
import math
from functools import cache
from pathlib import Path

import pytest
import torch
from symmetries import generator
from torch import Tensor, nn
from torch.func import functional_call

import regauge as rg
from regauge import Params
from regauge.canonical.null_spaces import without_null_spaces
from regauge.canonical.places import places_of
from regauge.canonical.ranks import largest_ranks
from regauge.checkpoints.checkpoint import load
from regauge.checkpoints.writing import save
from regauge.cli.main import main


class Attention(nn.Module):
    """Two heads whose size exceeds the width of the model."""

    def __init__(self, width: int = 4, heads: int = 2, size: int = 6) -> None:
        super().__init__()
        self.heads, self.size = heads, size
        self.q, self.k, self.v = (nn.Linear(width, heads * size, bias=False) for _ in range(3))
        self.o = nn.Linear(heads * size, width)

    def forward(self, x: Tensor) -> Tensor:
        """Compute attention."""
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, self.size)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        weights = (q @ k.mT / math.sqrt(self.size)).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).flatten(-2)) + x


class Adapted(nn.Module):
    """A linear layer with an adapter whose rank exceeds both of its sides."""

    def __init__(self, inputs: int = 3, rank: int = 5, outputs: int = 4) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs)
        self.down, self.up = nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Add the adapter's output, before a nonlinearity."""
        return torch.relu(self.base(x) + self.up(self.down(x)))


def chain(*sizes: int, bias: bool = True) -> nn.Module:
    """Return consecutive linear layers without nonlinearities."""
    return nn.Sequential(*(nn.Linear(a, b, bias=bias) for a, b in itertools.pairwise(sizes)))


CASES = {
    "wide": (lambda: chain(4, 6, 2), (3, 4)),
    "wide, no bias": (lambda: chain(4, 6, 2, bias=False), (3, 4)),
    "two in a row": (lambda: chain(4, 6, 8, 2), (3, 4)),
    "three in a row": (lambda: chain(3, 7, 9, 11, 2), (3, 3)),
    "four in a row, no bias": (lambda: chain(2, 4, 4, 4, 4, 2, bias=False), (3, 2)),
    "wide between narrow ones": (lambda: chain(8, 4, 9, 5, 8), (3, 8)),
    "narrow, then wide": (lambda: chain(4, 2, 6, 2), (3, 4)),
    "full rank": (lambda: chain(6, 4, 6), (3, 6)),
    "attention": (Attention, (2, 5, 4)),
    "adapter": (Adapted, (3, 3)),
}


@cache
def symmetry_of(name: str) -> rg.Symmetry:
    """The symmetry of all networks of a case."""
    return rg.discover(CASES[name][0]().double(), (torch.randn(CASES[name][1], dtype=torch.float64),))


def made(name: str, seed: int = 0) -> tuple[nn.Module, rg.Symmetry, Params, Tensor]:
    """Return a network in float64 with its symmetry and inputs."""
    build, shape = CASES[name]
    symmetry = symmetry_of(name)
    torch.manual_seed(seed)
    module = build().double()
    inputs = torch.randn(shape, dtype=torch.float64)
    return module, symmetry, {n: t.clone() for n, t in module.state_dict().items()}, inputs


@pytest.mark.parametrize("name", CASES)
def test_copies_have_one_canonical_form_of_the_same_function(name: str) -> None:
    module, symmetry, params, inputs = made(name)
    assert any(group.matrix == "linear" for group in symmetry.groups)
    canonical = rg.canonicalize(params, symmetry)
    outputs = functional_call(module, params, (inputs,))
    assert torch.allclose(functional_call(module, canonical, (inputs,)), outputs, rtol=1e-11, atol=1e-11)
    again = rg.canonicalize(canonical, symmetry)
    for seed in range(3):
        moved = symmetry.act(symmetry.random(generator(seed)), params)
        form = rg.canonicalize(moved, symmetry)
        assert all(torch.allclose(form[n], canonical[n], rtol=1e-8, atol=1e-10) for n in canonical)
        assert rg.canonical.orbit_distance(params, moved, symmetry) < 1e-10
    assert all(torch.allclose(again[n], canonical[n], rtol=1e-8, atol=1e-10) for n in canonical)
    assert rg.canonical.canonical_manifold(symmetry).left == ()


@pytest.mark.parametrize("name", CASES)
def test_other_products_are_apart(name: str) -> None:
    _, symmetry, params, _ = made(name)
    other = made(name, 1)[2]
    assert rg.canonical.orbit_distance(params, other, symmetry) > 0.3
    near = {n: t + 1e-3 * torch.randn(t.shape, generator=generator(2)).double() for n, t in params.items()}
    assert rg.canonical.orbit_distance(params, near, symmetry) > 1e-5


@pytest.mark.parametrize("name", ["wide", "attention", "adapter"])
def test_what_no_side_reads_does_not_count(name: str) -> None:
    module, symmetry, params, inputs = made(name)
    first, last = {"wide": ("0.weight", "1.weight"), "attention": ("q.weight", "k.weight")}.get(
        name, ("down.weight", "up.weight")
    )
    size = 6 if name == "attention" else len(params[first])
    reader = params[last][:size] if name == "attention" else params[last].mT  # [size, values] of the first head.
    unread = torch.linalg.svd(reader)[0][:, reader.shape[1] :]
    assert unread.shape[1] > 0
    change = torch.zeros_like(params[first])
    change[:size] = unread @ torch.randn(unread.shape[1], change.shape[1], generator=generator(0)).double()
    other = params | {first: params[first] + change}
    outputs = functional_call(module, params, (inputs,))
    assert torch.allclose(functional_call(module, other, (inputs,)), outputs, rtol=1e-10, atol=1e-10)
    assert rg.canonical.orbit_distance(params, other, symmetry) < 1e-10


def test_ranks_by_shapes() -> None:
    expected = {
        "wide": [2],
        "two in a row": [2, 2],
        "three in a row": [2, 2, 2],
        "wide between narrow ones": [4, 5, 5],
        "narrow, then wide": [2, 2],
        "full rank": [4],
        "attention": [4, 4],
        "adapter": [3],
    }
    for name, ranks in expected.items():
        symmetry = made(name)[1]
        assert [*largest_ranks(symmetry, places_of(symmetry)).values()] == ranks, name


def test_an_untrained_adapter_is_found_again() -> None:
    _, symmetry, params, _ = made("adapter")
    params["up.weight"] = torch.zeros_like(params["up.weight"])
    moved = symmetry.act(symmetry.random(generator(0)), params)
    assert rg.canonical.orbit_distance(params, moved, symmetry) < 1e-10
    assert float(rg.canonicalize(params, symmetry)["down.weight"].abs().max()) == 0


def test_a_population_is_a_loop_and_dtypes_stay() -> None:
    _, symmetry, params, _ = made("two in a row")
    other = made("two in a row", 1)[2]
    other["1.weight"][1:] = 0  # Less rank than the shapes allow.
    population = {n: torch.stack([params[n], other[n]]) for n in params}
    found = rg.canonicalize(population, symmetry)
    for k, one in enumerate((params, other)):
        own = rg.canonicalize(one, symmetry)
        assert all(torch.allclose(found[n][k], own[n], rtol=1e-9, atol=1e-11) for n in own)
    single = rg.canonicalize({n: t.float() for n, t in params.items()}, symmetry)
    assert all(t.dtype == torch.float32 for t in single.values())
    assert all(torch.allclose(single[n], found[n][0].float(), atol=1e-4) for n in single)


def test_full_rank_stays_as_it_is() -> None:
    _, symmetry, params, _ = made("full rank")
    assert all(tensor is params[name] for name, tensor in without_null_spaces(params, symmetry).items())
    element = rg.canonical.canonical_element(params, symmetry)
    canonical = rg.canonicalize(params, symmetry)
    assert all(torch.allclose(symmetry.act(element, params)[n], canonical[n], 0, 1e-12) for n in canonical)


def test_what_stays_undecided_is_named() -> None:
    places = (rg.Placement("w", 0), rg.Placement("w", 1, is_inverse=True))
    group = rg.Group("h", 3, places, is_permuted=False, matrix="linear")
    ring = rg.Symmetry((group,), {"w": (3, 3)})
    (sentence,) = rg.canonical.canonical_manifold(ring).left
    assert sentence.startswith("group 'h': its matrices are not fixed")


FACTORY = """
import torch
from torch import nn


def model():
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)), torch.ones(2, 4)
"""


def test_the_command_writes_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mynets.py").write_text(FACTORY)
    _, symmetry, params, _ = made("wide")
    params = {n: t.float() for n, t in params.items()}
    save(params, tmp_path / "a.safetensors")
    main(["canonicalize", "a.safetensors", "--model", "mynets.py:model", "-o", "one.safetensors"])
    out = capsys.readouterr().out
    assert "products of matrices have less than full rank: '0.weight'" in out
    assert "The function is the same, but no element of the group " in out
    found, expected = load(tmp_path / "one.safetensors"), rg.canonicalize(params, symmetry)
    assert all(torch.equal(found[n], expected[n]) for n in expected)


@pytest.mark.parametrize("name", CASES)
def test_compare_sees_the_same_product(name: str) -> None:
    _, symmetry, params, _ = made(name)
    moved = symmetry.act(symmetry.random(generator(0)), params)
    found = rg.compare(params, moved, symmetry, draws=9)
    assert found.verdict == "same network in another gauge", found.reason
    assert found.orbit_distance < 1e-5 * found.norm
    assert rg.compare(params, made(name, 1)[2], symmetry, draws=9).verdict in ("unrelated", "undecided")


def test_compare_calls_what_no_element_reaches_the_same_function() -> None:
    _, symmetry, params, _ = made("wide")
    other = without_null_spaces(params, symmetry)  # Of less rank than the first network, and so on no orbit of it.
    found = rg.compare(params, other, symmetry, draws=9)
    assert found.verdict == "same network in another gauge"
    assert "The function is the same, but perhaps no element maps one network to the other" in found.reason
    assert found.distance > 0.1 * found.norm
    assert found.orbit_distance < 1e-6 * found.norm

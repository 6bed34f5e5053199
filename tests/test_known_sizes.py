"""Models whose sizes follow from whole numbers among the inputs are traced for those; all else is refused."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import regauge as rg


class Pieces(nn.Module):
    """A perceptron over pieces of a sequence; `count` says from what their lengths come."""

    def __init__(self, count: Callable[["Pieces", Tensor, Tensor], list[int]]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 8), nn.Linear(8, 2)
        self.count = count

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        pieces = [self.second(self.first(piece).relu()) for piece in x.split(self.count(self, x, lengths))]
        return torch.stack([piece.mean(0) for piece in pieces])


def as_listed(module: Pieces, x: Tensor, lengths: Tensor) -> list[int]:
    return [int(n) for n in lengths.tolist()]


def from_ends(module: Pieces, x: Tensor, lengths: Tensor) -> list[int]:
    ends = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    return [int(n) for n in (ends[1:] - ends[:-1]).tolist()]


def by_halves(module: Pieces, x: Tensor, lengths: Tensor) -> list[int]:
    return [int(n) for n in (lengths.float() * 0.5).mul(2).round().long().tolist()]


def from_repeats(module: Pieces, x: Tensor, lengths: Tensor) -> list[int]:
    owner = torch.arange(len(lengths)).repeat_interleave(lengths)
    return [int(n) for n in torch.bincount(owner, minlength=len(lengths)).tolist()]


def from_activations(module: Pieces, x: Tensor, lengths: Tensor) -> list[int]:
    n = int(x.norm() > 0) + 1
    return [n, len(x) - n]


def from_weights(module: Pieces, x: Tensor, lengths: Tensor) -> list[int]:
    n = int(module.first.weight.argmax() >= 0) + 1
    return [n, len(x) - n]


def from_routes(module: Pieces, x: Tensor, lengths: Tensor) -> list[int]:
    n = int(module.first(x).argmax(1).sum() * 0) + 2
    return [n, len(x) - n]


def by_branch(module: Pieces, x: Tensor, lengths: Tensor) -> list[int]:
    return [2, 3] if (lengths > 1).all() else [5]


KNOWN = [as_listed, from_ends, by_halves, from_repeats]
UNKNOWN = [from_activations, from_weights, from_routes, by_branch]
INPUTS = (torch.randn(5, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([2, 3]))


@pytest.mark.parametrize("count", KNOWN)
def test_sizes_from_whole_numbers_that_are_given_are_known(count: Callable[..., list[int]]) -> None:
    torch.manual_seed(0)
    module = Pieces(count).double().eval()
    inputs = (INPUTS[0].double(), INPUTS[1])
    symmetry = rg.discover(module, inputs)
    plain = rg.discover(nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)), inputs[:1])
    assert [(g.kind, g.size) for g in symmetry.groups] == [(g.kind, g.size) for g in plain.groups] == [("scaled", 8)]
    check = symmetry.verify(module, inputs, generator=torch.Generator().manual_seed(1))
    assert check.ok
    assert check.max_error < 1e-12


@pytest.mark.parametrize("count", UNKNOWN)
def test_sizes_from_anything_else_are_refused(count: Callable[..., list[int]]) -> None:
    with pytest.raises(rg.TraceError, match="depends on the values of a tensor"):
        rg.discover(Pieces(count).eval(), INPUTS)


def test_a_module_without_values_needs_inputs_with_values() -> None:
    torch.manual_seed(0)
    module = Pieces(as_listed).eval()
    expected = rg.discover(module, INPUTS)
    assert any("whole numbers" in note for note in expected.notes)
    blank = Pieces(as_listed).to("meta").eval()
    found = rg.discover(blank, INPUTS)
    assert found.groups == expected.groups
    assert found.notes == expected.notes[:1]
    assert all(tensor.is_meta for tensor in blank.parameters())
    with pytest.raises((rg.TraceError, ValueError), match=r"values of a tensor|fails on the example inputs"):
        rg.discover(blank, tuple(one.to("meta") for one in INPUTS))


def test_whole_numbers_that_a_blank_module_holds_are_not_known() -> None:
    class Held(Pieces):
        def __init__(self) -> None:
            super().__init__(lambda module, x, lengths: [int(n) for n in module.held.tolist()])
            self.register_buffer("held", torch.tensor([2, 3]))

    assert rg.discover(Held().eval(), INPUTS).groups
    with pytest.raises((rg.TraceError, ValueError)):
        rg.discover(Held().to("meta").eval(), INPUTS)

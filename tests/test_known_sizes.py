"""Models whose sizes follow from integers among the inputs are traced for these integers. All other models are
refused.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import regauge as rg


class Pieces(nn.Module):
    """A perceptron over pieces of a sequence. `count` states the source of their lengths."""

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


def by_mask(module: Pieces, x: Tensor, lengths: Tensor) -> list[int]:
    return [int(n) for n in lengths[lengths > 0][lengths.nonzero()[:, 0]].tolist()]


def put_together(module: Pieces, x: Tensor, lengths: Tensor) -> list[int]:
    return [int(n) for n in torch.tensor([lengths[0], lengths[-1]]).unique_consecutive().tolist()]


def of_a_view(module: Pieces, x: Tensor, lengths: Tensor) -> list[int]:
    first = x.repeat(lengths[0], 1).view(lengths.max() - 1, lengths[0] * 5 // 2, -1)
    return [first.shape[0], first.shape[1] - 2]


def of_masked_rows(module: Pieces, x: Tensor, lengths: Tensor) -> list[int]:
    chosen = module.first(x)[torch.arange(5) < lengths[0]]
    return [len(chosen), len(x) - len(chosen)]


def written(module: Pieces, x: Tensor, lengths: Tensor) -> list[int]:
    sizes = torch.zeros_like(lengths)
    sizes[: lengths[0]] = lengths
    sizes.view(2, 1)[0].add_(1).sub_(1)
    return [int(n) for n in sizes.tolist()]


def written_over(module: Pieces, x: Tensor, lengths: Tensor) -> list[int]:
    sizes = lengths.clone()
    sizes[:1] = (x.norm() > 0).long() + 1
    return [int(n) for n in sizes.tolist()]


def written_over_in_a_view(module: Pieces, x: Tensor, lengths: Tensor) -> list[int]:
    sizes = lengths.clone()
    sizes.view(2, 1)[0].copy_((x.norm() > 0).long() + 1)
    return [int(n) for n in sizes.tolist()]


def of_rows_masked_by_activations(module: Pieces, x: Tensor, lengths: Tensor) -> list[int]:
    chosen = module.first(x)[x[:, 0] < 9]
    return [len(chosen) - 1, 1]


def by_chance(module: Pieces, x: Tensor, lengths: Tensor) -> list[int]:
    n = int(torch.randint(1, 4, (1,)))
    return [n, len(x) - n]


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


KNOWN = [as_listed, from_ends, by_halves, from_repeats, by_mask, put_together, of_a_view, of_masked_rows, written]
WRITTEN = [written_over, written_over_in_a_view]
UNKNOWN = [from_activations, from_weights, from_routes, by_branch, by_chance, of_rows_masked_by_activations, *WRITTEN]
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
    assert any("integers in the example inputs" in note for note in expected.notes)
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


def test_an_embedding_of_whole_numbers_keeps_the_order_of_its_rows() -> None:
    """The integers are known, but other inputs may have other integers. No row is free because these inputs do not read
    it.
    """

    class Read(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows, self.out = nn.Embedding(9, 6), nn.Linear(6, 2)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            pieces = x.split([int(n) for n in lengths.tolist()])
            means = torch.stack([piece.mean(0) for piece in pieces])
            return self.out(self.rows(lengths + 1).relu()) * means[:, :1]

    module = Read().double().eval()
    symmetry = rg.discover(module, (INPUTS[0].double(), INPUTS[1]))
    assert [(g.kind, g.size) for g in symmetry.groups] == [("scaled", 6)]
    check = symmetry.verify(
        module, (INPUTS[0].double(), torch.tensor([1, 4])), generator=torch.Generator().manual_seed(1)
    )
    assert check.max_error < 1e-12

"""Recurrent cells that read the concatenation of input and state, starting with zeros."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regauge as rg
from regauge.core.symmetry import Symmetry

UNITS, INPUTS, STEPS = 5, 4, 3
Joined = Callable[[Tensor, Tensor], Tensor]
Start = Callable[["Cells", Tensor], Any]


class Cells(nn.Module):
    """Some steps of a cell, and a linear map of its last state."""

    def __init__(
        self, step: Callable[..., tuple[Any, Any]], start: Start, *, gates: int, joined: Joined | None
    ) -> None:
        super().__init__()
        width = INPUTS + UNITS if joined else INPUTS
        make = nn.Conv2d if step is convolutional else nn.Linear
        kernel = (1,) if step is convolutional else ()
        self.gate = make(width, gates * UNITS, *kernel)
        self.state = make(UNITS, gates * UNITS, *kernel)
        self.new, self.out = nn.Linear(INPUTS + UNITS, UNITS), make(UNITS, 2, *kernel)
        self.first = nn.Parameter(torch.randn(UNITS, generator=torch.Generator().manual_seed(0)))
        self.step, self.start, self.joined = step, start, joined
        self.double()

    def read(self, x: Tensor, h: Tensor) -> Tensor:
        read: Tensor = self.gate(self.joined(x, h)) if self.joined else self.gate(x) + self.state(h)
        return read

    def forward(self, x: Tensor) -> Tensor:
        h = c = self.start(self, x)
        for t in range(STEPS):
            h, c = self.step(self, x[:, t], h, c)
        result: Tensor = self.out(h)
        return result


def plain(m: Cells, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    return m.read(x, h).tanh(), c


def rectified(m: Cells, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    return m.read(x, h).relu(), c


def linear(m: Cells, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    return m.read(x, h), c


def long_memory(m: Cells, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    i, f, o, g = m.read(x, h).chunk(4, 1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def convolutional(m: Cells, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    return long_memory(m, x, h, c)


def gated(m: Cells, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    z, r = m.read(x, h).sigmoid().chunk(2, 1)
    new = m.new(torch.cat([x, r * h], 1)).tanh()
    return (1 - z) * new + z * h, c


def side_by_side(x: Tensor, h: Tensor) -> Tensor:
    return torch.cat([x, h], 1)


def state_first(x: Tensor, h: Tensor) -> Tensor:
    return torch.cat([h, x], 1)


def moved(x: Tensor, h: Tensor) -> Tensor:
    return torch.cat([x, h], 1)[:, None].transpose(1, 2).squeeze(-1).to(x.dtype).clone()


def written(x: Tensor, h: Tensor) -> Tensor:
    both = x.new_zeros(len(x), INPUTS + UNITS)
    both[:, :INPUTS] = x
    both[:, INPUTS:] = h
    return both


STARTS: dict[str, Start] = {
    "zeros": lambda m, x: torch.zeros(len(x), UNITS, *x.shape[3:], dtype=x.dtype),
    "new_zeros": lambda m, x: x.new_zeros(len(x), UNITS, *x.shape[3:]),
    "full": lambda m, x: torch.full((len(x), UNITS), 0.0, dtype=x.dtype),
    "zeros_like": lambda m, x: torch.zeros_like(m.first).repeat(len(x), 1),
    "filled": lambda m, x: torch.empty(len(x), UNITS, dtype=x.dtype).fill_(0.0),
    "zero_": lambda m, x: torch.empty(len(x), UNITS, dtype=x.dtype).zero_(),
    "integer": lambda m, x: torch.zeros(1, dtype=torch.int64).expand(len(x), UNITS) * 1.0 + 0,
    "layer of several": lambda m, x: torch.zeros(2, len(x), UNITS, dtype=x.dtype)[1],
    "input times zero": lambda m, x: (0.0 * x[:, 0, :1]).expand(-1, UNITS),
    "learned": lambda m, x: m.first.expand(len(x), -1),
}
CONSTANT: dict[str, tuple[Start, set[str]]] = {
    "ones": (lambda m, x: torch.ones(len(x), UNITS, dtype=x.dtype), {"permutation"}),
    "an input for all": (lambda m, x: x[:, 0, :1].expand(-1, UNITS), {"permutation"}),
    "counted": (lambda m, x: torch.arange(UNITS, dtype=x.dtype).expand(len(x), -1), set()),
}
CELLS = {
    plain: (1, "signed"),
    rectified: (1, "scaled"),
    linear: (1, "linear"),
    long_memory: (4, "signed"),
    convolutional: (4, "signed"),
    gated: (2, "signed"),
}


def found_in(step: Any, start: Start, joined: Joined | None) -> Symmetry:
    """Return the verified result of discovery."""
    shape = (2, STEPS, INPUTS, 3, 3) if step is convolutional else (2, STEPS, INPUTS)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    net = Cells(step, start, gates=CELLS[step][0], joined=joined)
    symmetry = rg.discover(net, (x,), verify=False)
    check = symmetry.verify(net, (x,), generator=torch.Generator().manual_seed(0))
    assert check.ok, f"{check}\n{symmetry}"
    return symmetry


def kinds(symmetry: Symmetry) -> set[str]:
    return {group.kind for group in symmetry.groups if any(p.parameter == "gate.weight" for p in group.placements)}


@pytest.mark.parametrize("joined", [None, side_by_side, state_first], ids=["sum", "joined", "state first"])
@pytest.mark.parametrize("step", CELLS, ids=lambda step: step.__name__)
def test_the_units_of_a_cell_are_found(step: Any, joined: Joined | None) -> None:
    assert kinds(found_in(step, STARTS["zeros"], joined)) == {CELLS[step][1]}


@pytest.mark.parametrize("start", STARTS)
def test_zeros_are_zeros_however_they_are_written(start: str) -> None:
    assert kinds(found_in(plain, STARTS[start], side_by_side)) == {"signed"}


@pytest.mark.parametrize("joined", [moved, written], ids=lambda joined: joined.__name__)
def test_zeros_are_followed_on_their_way(joined: Joined) -> None:
    assert kinds(found_in(long_memory, STARTS["zeros"], joined)) == {"signed"}


@pytest.mark.parametrize("start", CONSTANT)
def test_other_constants_hold_the_units_or_their_signs(start: str) -> None:
    how, expected = CONSTANT[start]
    assert kinds(found_in(plain, how, side_by_side)) == expected


def test_scales_of_sums_that_begin_with_the_number_zero() -> None:
    class Average(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.key, self.value, self.out = nn.Linear(4, 5), nn.Linear(4, 5), nn.Linear(5, 2)
            self.decay = nn.Parameter(torch.randn(5))
            self.double()

        def forward(self, x: Tensor) -> Tensor:
            above: Any = 0
            below: Any = 0
            for t in range(STEPS):
                key, value = self.key(x[:, t]).exp(), self.value(x[:, t])
                above = torch.exp(-self.decay) * above + key * value
                below = torch.exp(-self.decay) * below + key
            result: Tensor = self.out(above / below)
            return result

    net, x = Average(), torch.randn(2, STEPS, 4, dtype=torch.float64)
    symmetry = rg.discover(net, (x,))
    assert [(group.kind, group.scales, group.signs) for group in symmetry.groups] == [("scaled", 1, 1)]
    assert symmetry.verify(net, (x,), generator=torch.Generator().manual_seed(0)).ok

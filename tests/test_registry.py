"""User-defined rules and leaf modules, and the numerical check that follows every rule."""

import pytest
import torch
from torch import Tensor, nn

import regauge as rg
from regauge.discovery import laws as law

pytestmark = pytest.mark.usefixtures("nothing_registered")


class Layered(nn.Module):
    """A linear layer, a middle module, and a linear layer."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 6), middle, nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)))


class Bessel(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.special.bessel_j0(x)


class Running(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cumsum(x, -1)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain if bool(x.sum() > 0) else x.relu() * self.gain


def inputs() -> tuple[Tensor]:
    return (torch.randn(5, 4, generator=torch.Generator().manual_seed(0)),)


def test_a_rule_frees_what_an_unknown_operator_freezes() -> None:
    module = Layered(Bessel())
    before = rg.discover(module, inputs())
    assert before.unknown == ("aten::special_bessel_j0",)
    assert not before.groups
    even = law.entrywise(None, (0, 1))
    rg.discovery.register_rule("aten::special_bessel_j0", lambda b, call: b.unary(call["self"], even))
    after = rg.discover(module, inputs(), verify=False)
    assert not after.unknown
    assert [(g.kind, g.size) for g in after.groups] == [("signed", 6)]
    assert after.verify(module, inputs(), generator=torch.Generator().manual_seed(0)).ok


def test_the_numbers_refuse_what_a_wrong_rule_claims() -> None:
    module = Layered(Running())
    rg.discovery.register_rule("cumsum", lambda b, call: b.unary(call["self"], law.odd))
    claimed = rg.discover(module, inputs(), verify=False)
    assert [(g.kind, g.size) for g in claimed.groups] == [("signed", 6)]
    found = rg.discover(module, inputs())
    assert not found.groups
    refused = {(row.parameter, row.axis) for row in found.frozen if "numerical check refused it" in row.reason}
    assert refused == {("first.weight", 0), ("first.bias", 0), ("last.weight", 1)}


def test_a_model_on_the_meta_device_says_that_it_is_not_verified() -> None:
    with torch.device("meta"):
        module = Layered(nn.ReLU())
    found = rg.discover(module, inputs(), verify=True)
    assert [g.kind for g in found.groups] == ["scaled"]
    assert any(note.startswith("not verified: the module is on the meta device") for note in found.notes)


def test_a_leaf_without_a_rule_freezes_what_is_around_it_and_is_left_as_it_was() -> None:
    module = Layered(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)))
    free = rg.discover(module, inputs())
    assert sorted(g.size for g in free.groups) == [6, 6, 8]
    rg.discovery.register_leaf(nn.Sequential)
    found = rg.discover(module, inputs())
    assert not found.groups
    assert any(row.reason == "registered leaf" and row.parameter == "middle.0.weight" for row in found.frozen)
    assert "forward" not in module.middle.__dict__


def test_a_leaf_that_cannot_be_traced() -> None:
    module = Layered(Branching())
    with pytest.raises(rg.TraceError, match=r"register_leaf.*Symmetry.from_axes"):
        rg.discover(module, inputs())
    rg.discovery.register_leaf(Branching, results=lambda part, x: x)
    assert not rg.discover(module, inputs()).groups
    rg.discovery.register_leaf(
        Branching, lambda b, call: b.mul([call["inputs"][0], call["gain"]], call.shape), results=_first
    )
    found = rg.discover(module, inputs(), verify=False)
    assert [g.size for g in found.groups] == [6]
    assert {p.parameter for p in found.groups[0].placements} >= {"first.weight", "middle.gain", "last.weight"}


def test_what_cannot_be_registered_is_refused() -> None:
    with pytest.raises(TypeError, match="must be a function"):
        rg.discovery.register_rule("aten::relu", "copy")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="needs a class of modules"):
        rg.discovery.register_leaf(nn.ReLU())  # type: ignore[arg-type]


def _first(part: nn.Module, x: Tensor) -> Tensor:
    return x

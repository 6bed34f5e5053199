"""The table of rules: every operator in it occurs in some module, and discovery finds exactly the correct groups
there.
"""

import sys
from functools import cache
from typing import Any

import pytest
import torch
from rule_cases import CASES, Between
from rule_traps import ROWS, TOKENS, Forward, Trap

import regauge as rg
from regauge.core.groups import Group
from regauge.core.symmetry import Symmetry
from regauge.discovery.rules import RULES
from regauge.discovery.trace import Program, TraceError, trace

pytestmark = pytest.mark.filterwarnings("ignore:index_reduce.. is in beta")
OPAQUE = {"view_as_integer", "sum_as_integer", "topk_unsorted", "einsum_diagonal"}
"""Cases with a call of an operator that its rule does not cover."""


@cache
def discovered(name: str) -> tuple[Between, Symmetry, frozenset[str]]:
    """Return a case's module, its discovered symmetry, and the operators in its traces."""
    net = Between(CASES[name].operator, CASES[name].where)
    names = set()

    def watched(*args: Any, **kwargs: Any) -> Program:
        program = trace(*args, **kwargs)
        for node in program.graph.graph.nodes:
            schema = getattr(node.target, "_schema", None)
            names.add(schema.name.split("::")[-1] if schema is not None else "")
        return program

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[rg.discover.__module__], "trace", watched)
        symmetry = rg.discover(net, (net.inputs,), verify=False)
    return net, symmetry, frozenset(names)


def kinds(symmetry: Symmetry) -> str:
    """Return the kinds of the groups that act on the units of the first layer."""
    acting = [group for group in symmetry.groups if any(p.parameter == "entry.bias" for p in group.placements)]
    return " ".join(sorted({group.kind for group in acting if not is_common(group)})) or "frozen"


def is_common(group: Group) -> bool:
    """Return whether the group is one factor for all units."""
    return group.size == 1 and not group.within


def require_true(symmetry: Symmetry, net: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
    for seed in range(2):
        check = symmetry.verify(net, inputs, generator=torch.Generator().manual_seed(seed))
        assert check.ok, f"{check}\n{symmetry}"


@pytest.mark.parametrize("name", CASES)
def test_an_operator_passes_what_it_should_and_nothing_else(name: str) -> None:
    net, symmetry, _ = discovered(name)
    require_true(symmetry, net, (net.inputs,))
    assert (symmetry.unknown != ()) == (name in OPAQUE), symmetry.unknown
    assert kinds(symmetry) == CASES[name].expected, str(symmetry)


def test_every_rule_has_a_case() -> None:
    seen = {operator for name in CASES for operator in discovered(name)[2]}
    assert set(RULES) - seen == set()


@pytest.mark.parametrize("name", ["cdist_codebook", "cdist_codebook_of_batch", "cdist_codebook_chosen"])
def test_entries_of_a_codebook_are_reordered(name: str) -> None:
    _, symmetry, _ = discovered(name)
    assert {(group.kind, group.size) for group in symmetry.groups} >= {("orthogonal", 6), ("permutation", 7)}


@pytest.mark.parametrize("name", ["counted", "rectified", "on_a_sphere"])
def test_entries_that_may_be_equally_far_stay_in_their_order(name: str) -> None:
    _, symmetry, _ = discovered(f"cdist_codebook_{name}")
    assert not any(group.size == 7 and group.is_permuted for group in symmetry.groups)


@pytest.mark.parametrize("forward", [*ROWS, *TOKENS], ids=lambda forward: forward.__name__)
def test_what_is_found_in_a_trap_is_true(forward: Forward) -> None:
    shape = (6, 5) if forward in ROWS else (3, 5, 5)
    generator = torch.Generator().manual_seed(1)
    first = torch.randn(shape, generator=generator, dtype=torch.float64)
    net = Trap(forward, first)
    symmetry = rg.discover(net, (first,), verify=False)
    for seed in range(4):
        inputs = (torch.randn(shape, generator=generator, dtype=torch.float64),)
        check = symmetry.verify(net, inputs, generator=torch.Generator().manual_seed(seed))
        assert check.ok, f"{check}\n{symmetry}"


class _Spectral(torch.nn.Module):
    """A layer whose weights multiply complex numbers, stored as complex numbers or as pairs of real numbers."""

    def __init__(self, *, is_complex: bool) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Conv1d(2, 6, 1), torch.nn.Conv1d(5, 1, 1)
        drawn = torch.randn(6, 5, 3, 2)
        self.weight = torch.nn.Parameter(torch.view_as_complex(drawn) if is_complex else drawn)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight if self.weight.is_complex() else torch.view_as_complex(self.weight)
        waves = torch.fft.rfft(self.first(x))[:, :, :3]
        mixed: torch.Tensor = torch.fft.irfft(torch.einsum("bix,iox->box", waves, weight), n=10)
        return self.last(mixed.relu())  # type: ignore[no-any-return]


def test_complex_parameters_are_named_as_what_holds_the_units() -> None:
    inputs = (torch.randn(2, 2, 10),)
    pairs, whole = (rg.discover(_Spectral(is_complex=held), inputs) for held in (False, True))
    assert sorted(group.size for group in pairs.groups) == [5, 6]
    # One factor of all units before the weight, which the layer behind it takes back.
    assert [(group.name, group.size) for group in whole.groups] == [("first.scale", 1)]
    reasons = {(row.parameter, row.axis): row.reason for row in whole.frozen}
    assert "complex numbers, which are not moved; hold pairs of real ones" in reasons["first.weight", 0]


def test_a_shape_that_depends_on_values_cannot_be_traced() -> None:
    def selected(m: Trap, x: torch.Tensor) -> torch.Tensor:
        return m.head(m.fc1(x)[x[:, 0] > 0]).sum(0)

    inputs = torch.randn(6, 5, dtype=torch.float64)
    with pytest.raises(TraceError, match="depends on values"):
        rg.discover(Trap(selected, inputs), (inputs,))

"""Verification: one element of all groups, many values for each group, and the wrong group in the message of a
failure.
"""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

import regauge as rg
from regauge.core.groups import Group
from regauge.core.probe import NOISE, perturb, relative_change
from regauge.discovery.trace import trace

WIDTH = 24
X = torch.randn(4, 5, generator=torch.Generator().manual_seed(1))


def net(widths: tuple[int, ...] = (5, WIDTH, WIDTH, WIDTH, 3)) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [part for n, m in pairwise(widths) for part in (nn.Linear(n, m), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_groups_of_many_values_are_tried_together_by_two_evaluations() -> None:
    module = net()
    symmetry = rg.discover(module, X)
    check = symmetry.verify(module, X, generator=generator())
    assert check.ok
    assert (len(check.per_group), check.alone, check.evaluations) == (3, frozenset(), 2)
    assert set(check.per_group.values()) == {check.max_error}
    assert "2 evaluations of the model" in str(check)
    assert any("2 evaluations of the model" in note for note in symmetry.notes)


def test_groups_of_few_values_are_tried_alone_too() -> None:
    module = net((5, WIDTH, 2, WIDTH, 3))
    check = rg.discover(module, X).verify(module, X, generator=generator())
    assert check.ok
    (few,) = check.alone
    assert check.evaluations == 3
    assert f"{len(check.alone)} of them alone" in str(check)
    assert few in check.per_group


@pytest.mark.parametrize("part", ["0.bias", "2.weight", "2.bias", "4.weight", "6.weight"])
@pytest.mark.parametrize("seed", range(3))
def test_a_wrong_group_behind_right_ones_is_named_alone(part: str, seed: int) -> None:
    """One placement of one of three groups is omitted. The two other groups are correct."""
    module = net()
    symmetry = rg.discover(module, X)
    guilty = next(g for g in symmetry.groups if any(p.parameter == part for p in g.placements))
    places = [p for p in guilty.placements if p.parameter == part]
    less = replace(guilty, placements=tuple(p for p in guilty.placements if p is not places[-1]))
    wrong = replace(symmetry, groups=tuple(less if g is guilty else g for g in symmetry.groups))
    check = wrong.verify(module, X, generator=generator(seed))
    assert not check.ok
    assert check.failed == (guilty.name,)
    assert len(check.alone) == len(check.per_group) == 3


@pytest.mark.parametrize("kind", ["signed", "scaled"])
def test_two_wrong_groups_that_undo_each_other_are_seen(kind: str) -> None:
    """Each group flips one side of one unit. Together they have no effect if their values agree."""
    module = nn.Sequential(nn.Linear(5, 1, bias=False), nn.Identity(), nn.Linear(1, 3)).double()
    axes = {"0.weight": ("a", None), "2.weight": (None, "b")}
    symmetry = rg.Symmetry.from_axes(axes, kinds={"a": kind, "b": kind})
    symmetry = symmetry.bind(module.state_dict())
    for seed in range(8):
        element = symmetry.random(generator(seed))
        check = symmetry.verify(module, X.double(), generator=generator(seed))
        is_still = kind == "signed" and all(bool((element[name].sign == 1).all()) for name in "ab")
        assert check.ok == is_still
        assert check.evaluations >= 4


def test_a_chain_that_multiplies_rounding_errors_is_compared_where_it_does_so_least() -> None:
    class Chain(nn.Module):
        def __init__(self, depth: int) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = torch.sin(30 * layer(x))
            return x

    module, x = Chain(6), torch.randn(4, WIDTH, generator=generator())
    check = rg.discover(module, x, verify=False).verify(module, x, generator=generator())
    assert check.ok
    assert check.evaluations > 4


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        (Group("h", 10, ()), True),  # 10! orders
        (Group("h", 9, ()), False),
        (Group("h", 19, (), signs=1), False),  # the signs could agree, if not the order
        (Group("h", 20, (), signs=1), True),
        (Group("h", 20, (), classes=(0,) * 18 + (1, 1)), True),
        (Group("h", 20, (), classes=tuple(k // 2 for k in range(20))), False),
        (Group("h", 1, (), is_permuted=False, scales=1), True),
        (Group("h", 1, (), is_permuted=False, matrix="orthogonal"), False),
        (Group("h", 2, (), is_permuted=False, matrix="linear"), True),
    ],
)
def test_many_values_are_a_million(group: Group, expected: bool) -> None:
    assert group.has_many_values == expected


def test_large_tensors_are_perturbed_everywhere_and_no_two_rows_alike() -> None:
    zeros = torch.zeros(700, 256, dtype=torch.float64)
    assert zeros.numel() > 2 * NOISE
    moved = perturb({"weight": zeros}, set(), generator())["weight"]
    assert bool((moved != 0).all())
    assert len(torch.unique(moved, dim=0)) == 700
    assert len(torch.unique(moved, dim=1).T) == 256
    assert int(torch.linalg.matrix_rank(moved)) == 256
    assert math.isclose(float(moved.std()), 0.09, rel_tol=0.05)


class Masked(nn.Module):
    """Tokens of which half are masked at random in each pass, with noise on the others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        kept = torch.rand(x.shape[:2]).argsort(1)[:, : x.shape[1] // 2]
        seen = x.gather(1, kept[..., None].expand(-1, -1, x.shape[2]))
        return self.second(self.first(seen + torch.randn_like(seen)).relu())


def test_what_a_model_draws_at_random_is_the_same_in_every_evaluation() -> None:
    torch.manual_seed(0)
    module, x = Masked().eval(), torch.randn(2, 6, 3)
    before = torch.random.get_rng_state()
    symmetry = rg.discover(module, (x,), verify=True)
    assert [(group.kind, group.size) for group in symmetry.groups] == [("scaled", 8)]
    check = symmetry.verify(module, (x,), generator=torch.Generator().manual_seed(1))
    assert check.ok
    assert check.max_error < 1e-12
    assert torch.equal(torch.random.get_rng_state(), before)
    wrong = rg.Symmetry.from_axes(
        {"first.weight": ("h", None), "second.weight": (None, "h")}, kinds={"h": "permutation"}
    )
    assert not wrong.verify(module, (x,), generator=torch.Generator().manual_seed(1)).ok


def test_outputs_of_other_shapes_are_infinitely_far() -> None:
    assert relative_change([torch.ones(3)], [torch.ones(3)]) == 0
    assert relative_change([torch.ones(3)], [torch.ones(4)]) == float("inf")
    assert relative_change([torch.ones(3)], [torch.ones(1)]) == float("inf")


def test_what_cannot_be_written_in_simpler_operators_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.last = nn.Linear(3, 6), nn.Linear(6, 5), nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.special.bessel_j0(self.second(self.first(x).relu())))

    def fail(*_: object) -> None:
        raise AttributeError("no storage")

    module, x = Model().eval(), torch.randn(2, 3)
    monkeypatch.setattr(ExportedProgram, "run_decompositions", fail)
    symmetry = rg.discover(module, (x,))
    assert [(group.kind, group.size) for group in symmetry.groups if group.size == 6] == [("scaled", 6)]
    with pytest.raises(rg.TraceError, match=r"simpler operators \(AttributeError: no storage\)"):
        trace(module, (x,), {}, decompose=frozenset({"relu"}))

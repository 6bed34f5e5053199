"""Shares of groups that an alignment changed: equal to explicit counts, zero at the identity, and plotted correctly."""

import math

import pytest
import torch
from symmetries import BY_HAND, drawn, generator, mlp_symmetry

import regauge as rg
from regauge import Element, Value
from regauge.alignment.result import SHARES, moves_of
from regauge.report.alignment_figures import LABELED, moves_figure


@pytest.mark.parametrize("name", BY_HAND)
def test_the_identity_moves_nothing_and_random_elements_move_every_part(name: str) -> None:
    symmetry = BY_HAND[name]
    still = [*moves_of(symmetry, symmetry.identity())]
    assert still
    assert not any(row[share] for row in still for share in SHARES)
    assert {row[end] for row in still for end in ("low", "high")} <= {1.0, None}
    moved = [*moves_of(symmetry, symmetry.random(generator(0)))]
    assert [row["group"] for row in moved] == [row["group"] for row in still]
    for before, after in zip(still, moved, strict=True):
        for share in SHARES:
            assert (before[share] is None) == (after[share] is None)
            # A random order of two or three units may leave all of them in their places.
            assert after[share] is None or 0 < after[share] <= 1 or after["units"] < 4
        if after["units"] == 1:  # Its only scale is the lowest and the highest.
            assert after["low"] is None or after["low"] == after["high"] != 1
        else:
            assert after["low"] is None or after["low"] < 1 < after["high"]


def test_shares_are_counted() -> None:
    symmetry = mlp_symmetry(4, 6, 8, 3, kind="signed")
    values = {
        "h1": Value(torch.tensor([1, 0, 2, 3, 4, 5]), sign=torch.tensor([[1, 1, 1, -1, -1, -1]], dtype=torch.int8)),
        "h2": Value(torch.arange(8), sign=torch.ones(1, 8, dtype=torch.int8)),
    }
    first, second = moves_of(symmetry, Element(values))
    assert (first["group"], first["units"], first["moved"], first["flipped"]) == ("h1", 6, pytest.approx(1 / 3), 0.5)
    assert (second["moved"], second["flipped"]) == (0, 0)
    assert first["turned"] is first["low"] is first["high"] is None


def test_a_turn_by_a_right_angle_and_factors_are_measured() -> None:
    """A rotation of two of n axes by an angle has distance `sqrt(8) sin(angle / 2)` from the identity."""
    turned = torch.eye(5, dtype=torch.float64)
    turned[:2, :2] = torch.tensor([[0.0, -1.0], [1.0, 0.0]])
    symmetry = mlp_symmetry(4, 5, 3, kind="orthogonal")
    (row,) = moves_of(symmetry, Element({"h1": Value(matrix=turned)}))
    assert row["turned"] == pytest.approx(math.sqrt(8) * math.sin(math.pi / 4) / math.sqrt(10))
    factors = torch.linspace(1, 2, 101, dtype=torch.float64)
    symmetry = mlp_symmetry(4, 101, 3, kind="scaled")
    (row,) = moves_of(symmetry, Element({"h1": Value(torch.arange(101), scale=factors[None])}))
    assert (row["low"], row["high"]) == (pytest.approx(1.05), pytest.approx(1.95))


def test_an_aligned_copy_says_and_draws_what_moved() -> None:
    symmetry = mlp_symmetry(4, 9, 7, 3, kind="scaled")
    a = drawn(symmetry, 0)
    element = symmetry.random(generator(1))
    result = rg.align(a, symmetry.act(symmetry.inverse(element), a), symmetry)
    assert list(result.moves) == [*moves_of(symmetry, result.element)]
    assert [row["moved"] for row in result.moves] == [row["moved"] for row in moves_of(symmetry, element)]
    shares, scales = result.plot().axes
    bars = [bar.get_width() for bar in shares.patches[: len(result.moves)]]
    assert bars == [100 * row["moved"] for row in result.moves]
    assert [text.get_text() for text in shares.get_yticklabels()] == ["h1 (9)", "h2 (7)"]
    assert scales.get_title(loc="left") == "scales"


def test_pictures_of_nothing_and_of_many_groups() -> None:
    symmetry = mlp_symmetry(4, 9, 7, 3)
    a = drawn(symmetry, 0)
    (alone,) = rg.align(a, a, symmetry).plot().axes
    assert alone.get_title(loc="left") == "no unit moved"
    row = {"group": "h", "units": 4, "moved": 0.5, "flipped": None, "turned": None, "low": None, "high": None}
    (many,) = moves_figure([row] * (LABELED + 1)).axes
    assert not many.get_yticks().size
    assert [bar.get_width() for bar in many.patches if bar.get_width()] == [50] * (LABELED + 1)
    nothing = rg.Symmetry.from_axes({"w": (None,)}).bind({"w": torch.zeros(3)})
    with pytest.raises(ValueError, match="the symmetry has no groups, so there is nothing to plot"):
        rg.align({"w": torch.ones(3)}, {"w": torch.zeros(3)}, nothing).plot()

"""`closest` equals brute force for every kind of group, and names the kinds that it does not support."""

import itertools
import math
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

import regauge as rg
from regauge.core.balance import balance
from regauge.core.closest import Cost, ShiftCost, closest
from regauge.core.element import Element, Value
from regauge.core.groups import Group, Kind
from regauge.core.signs import SignCode
from regauge.core.symmetry import Symmetry


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def group(n: int, **fields: object) -> Group:
    return Group("h", n, (), **fields)  # type: ignore[arg-type]


def permutations(n: int) -> list[Tensor]:
    return [torch.tensor(p) for p in itertools.permutations(range(n))]


def sign_patterns(families: int, n: int) -> list[Tensor]:
    return [torch.tensor(s).reshape(families, n) for s in itertools.product((1, -1), repeat=families * n)]


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6])
def test_permutation(n: int) -> None:
    c = drawn(n, n, seed=n)
    best = max(float(c[torch.arange(n), p].sum()) for p in permutations(n))
    found = closest(group(n), c)
    assert found.value.perm is not None
    assert float(c[torch.arange(n), found.value.perm].sum()) == pytest.approx(best)
    assert float(found.objective) == pytest.approx(best)


def test_scales_stay_at_one() -> None:
    found = closest(group(4, scales=1), drawn(4, 4, seed=0))
    assert found.value.perm is not None
    assert found.value.scale is None


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_signed(n: int) -> None:
    c = drawn(n, n, seed=10 + n)
    units = torch.arange(n)
    best = max(float((s[0] * c[units, p]).sum()) for p in permutations(n) for s in sign_patterns(1, n))
    found = closest(group(n, signs=1), c)
    assert found.value.perm is not None
    assert found.value.sign is not None
    assert float((found.value.sign[0] * c[units, found.value.perm]).sum()) == pytest.approx(best)


@pytest.mark.parametrize(
    "characters",
    [
        [(1, 0), (0, 1)],
        [(1, 0), (0, 1), (1, 1)],
        [(0, 0), (1, 1)],
        [(1, 0, 0), (1, 1, 0), (0, 1, 1), (1, 0, 1)],
        [(0, 0, 0), (1, 1, 0), (0, 1, 1), (1, 1, 1), (0, 0, 1)],
    ],
)
def test_several_sign_families(characters: list[tuple[int, ...]]) -> None:
    n, families = 2, len(characters[0])
    cost = Cost({c: drawn(n, n, seed=k) for k, c in enumerate(characters)})
    units = torch.arange(n)

    def value(p: Tensor, s: Tensor) -> float:
        total = 0.0
        for c, matrix in cost.matrices.items():
            factor = torch.stack([s[k].double() ** e for k, e in enumerate(c)]).prod(0)
            total += float((factor * matrix[units, p]).sum())
        return total

    best = max(value(p, s) for p in permutations(n) for s in sign_patterns(families, n))
    found = closest(group(n, signs=families), cost)
    assert found.value.perm is not None
    assert found.value.sign is not None
    assert value(found.value.perm, found.value.sign) == pytest.approx(best)
    assert float(found.objective) == pytest.approx(best)


def test_many_dependent_families_ascend_and_report_what_they_reach() -> None:
    families = 12
    characters = [tuple(int(j == k) for j in range(families)) for k in range(families)]
    characters += [tuple(int(j in (k, (k + 1) % families)) for j in range(families)) for k in range(families)]
    costs = [drawn(3, 3, seed=k) for k in range(len(characters))]
    code = SignCode(characters)
    best, signs = code.best(costs), code.signs(costs, families).double()
    reached = sum(
        torch.stack([signs[k] ** e for k, e in enumerate(c)]).prod(0) * cost
        for c, cost in zip(characters, costs, strict=True)
    )
    assert torch.allclose(best, reached)
    assert bool((best >= sum(costs) - 1e-12).all())


@pytest.mark.parametrize("seed", range(5))
def test_dihedral(seed: int) -> None:
    """The action (w, b, v) -> (s w, s b + k pi / omega, s (-1)^k v) is compared with all permutations, signs and
    shifts.
    """
    n, step = 2, math.pi / 3
    wa, wb = drawn(n, 4, seed=seed), drawn(n, 4, seed=seed + 100)
    ba, bb = 2 * drawn(n, seed=seed + 200), 2 * drawn(n, seed=seed + 300)
    va, vb = drawn(n, 3, seed=seed + 400), drawn(n, 3, seed=seed + 500)
    cost = Cost({(1, 0): wa @ wb.T + ba[:, None] * bb, (1, 1): va @ vb.T}, (ShiftCost((1, 0), (step,), ba, bb, 1),))

    def distance(p: Tensor, s: Tensor, k: Tensor) -> float:
        flip = (s * (-1.0) ** k)[:, None]
        parts = (wa - s[:, None] * wb[p], ba - (s * bb[p] + k * step), va - flip * vb[p])
        return sum(float(part.square().sum()) for part in parts)

    steps = [torch.tensor(k) for k in itertools.product(range(-8, 9), repeat=n)]
    best = min(distance(p, s[0], k) for p in permutations(n) for s in sign_patterns(1, n) for k in steps)
    found = closest(group(n, signs=1, shifts=1), cost)
    value = found.value
    assert value.perm is not None
    assert value.sign is not None
    assert value.shift is not None
    assert distance(value.perm, value.sign[0], value.shift[0]) == pytest.approx(best)
    constant = sum(float(t.square().sum()) for t in (wa, ba, va, wb, bb, vb)) / 2
    assert float(found.objective) == pytest.approx(constant - best / 2)


@pytest.mark.parametrize("kind", ["orthogonal", "linear"])
def test_procrustes_beats_every_rotation_and_reflection_of_the_plane(kind: str) -> None:
    c = drawn(2, 2, seed=7)
    found = closest(group(2, is_permuted=False, matrix=kind), c)
    assert found.value.matrix is not None
    assert torch.allclose(found.value.matrix @ found.value.matrix.mT, torch.eye(2).double())
    angles = torch.linspace(0, 2 * math.pi, 2001, dtype=torch.float64)
    rotations = torch.stack([angles.cos(), -angles.sin(), angles.sin(), angles.cos()], -1).reshape(-1, 2, 2)
    flipped = rotations * torch.tensor([1.0, -1.0]).double()
    best = max(float((m * c).sum((-1, -2)).max()) for m in (rotations, flipped))
    assert float((found.value.matrix * c).sum()) >= best
    assert float(found.objective) == pytest.approx(best, rel=1e-5)


def test_procrustes_that_keeps_the_ones_beats_every_such_rotation() -> None:
    c = drawn(3, 3, seed=8)
    centered = group(3, is_permuted=False, matrix="orthogonal", keeps_ones=True)
    found = closest(centered, c)
    assert found.value.matrix is not None
    assert torch.allclose(found.value.matrix @ found.value.matrix.mT, torch.eye(3).double())
    assert torch.allclose(found.value.matrix.sum(0), torch.ones(3).double())
    axis = torch.full((3, 3), 1 / 3).double()
    cross = torch.tensor([[0.0, -1, 1], [1, 0, -1], [-1, 1, 0]]).double() / math.sqrt(3)
    angles = torch.linspace(0, 2 * math.pi, 2001, dtype=torch.float64)[:, None, None]
    rotations = axis + angles.cos() * (torch.eye(3).double() - axis) + angles.sin() * cross
    every = torch.cat([rotations, rotations[:, [1, 0, 2]]])
    best = float((every * c).sum((-1, -2)).max())
    assert float(found.objective) >= best
    assert float(found.objective) == pytest.approx(best, rel=1e-5)
    assert float(found.objective) <= float(closest(group(3, is_permuted=False, matrix="orthogonal"), c).objective)


@pytest.mark.parametrize("seed", range(6))
def test_procrustes_without_reflection_beats_every_angle(seed: int) -> None:
    c = drawn(2, 2, seed=seed)
    found = closest(group(2, is_permuted=False, matrix="orthogonal", is_proper=True), c)
    assert found.value.matrix is not None
    assert float(torch.linalg.det(found.value.matrix)) == pytest.approx(1)
    assert torch.allclose(found.value.matrix @ found.value.matrix.mT, torch.eye(2).double())
    angles = torch.linspace(0, 2 * math.pi, 2001, dtype=torch.float64)
    rotations = torch.stack([angles.cos(), -angles.sin(), angles.sin(), angles.cos()], -1).reshape(-1, 2, 2)
    best = float((rotations * c).sum((-1, -2)).max())
    assert best - 1e-12 <= float(found.objective) == pytest.approx(best, rel=1e-5)
    assert float(found.objective) <= float(closest(group(2, is_permuted=False, matrix="orthogonal"), c).objective)


def test_procrustes_without_reflection_is_at_a_maximum_among_rotations_of_space() -> None:
    c = drawn(5, 3, 3, seed=3)
    c[0] = -torch.eye(3)  # The nearest orthogonal matrix is a reflection.
    found = closest(group(3, is_permuted=False, matrix="orthogonal", is_proper=True), c)
    q, _ = torch.linalg.qr(drawn(4000, 1, 3, 3, seed=4))
    q = q * torch.linalg.det(q).sign()[..., None, None]
    assert bool((found.objective >= (q * c).sum((-1, -2)).amax(0)).all())
    assert float(found.objective[0]) == pytest.approx(1)


def test_units_that_cannot_be_reordered_only_choose_signs() -> None:
    c = drawn(3, 4, 4, seed=1)
    found = closest(group(4, is_permuted=False, signs=1), c)
    assert found.value.perm is None
    assert found.value.sign is not None
    assert torch.equal(found.value.sign[:, 0], c.diagonal(dim1=-2, dim2=-1).sign().to(torch.int8))


def test_leading_axes_are_separate_problems() -> None:
    c = drawn(3, 2, 5, 5, seed=2)
    together = closest(group(5, signs=1), c)
    assert together.value.perm is not None
    for i in range(3):
        for j in range(2):
            alone = closest(group(5, signs=1), c[i, j])
            assert alone.value.perm is not None
            assert torch.equal(together.value.perm[i, j], alone.value.perm)
            assert float(together.objective[i, j]) == pytest.approx(float(alone.objective))


def test_one_matrix_for_two_families_is_refused() -> None:
    with pytest.raises(ValueError, match=r"2 families of signs.*give a Cost with one matrix for each combination"):
        closest(group(2, signs=2), torch.zeros(2, 2))


@pytest.mark.parametrize("kind", ["none", "orthogonal"])
def test_costs_that_are_not_finite_are_refused(kind: str) -> None:
    c = torch.full((2, 2), math.nan)
    with pytest.raises(ValueError, match="NaN or Inf"):
        closest(group(2, is_permuted=kind == "none", matrix=kind), c)


# --- weight matching of networks with one hidden layer, where one group is all there is ---------------------------


def one_layer(n: int, kind: Kind) -> Symmetry:
    axes = {"w": ("h", None), "b": ("h",), "v": (None, "h")}
    bound = Symmetry.from_axes(axes, kinds={"h": kind}, omegas={"h": 3.0})
    return bound.bind({"w": torch.zeros(n, 3), "b": torch.zeros(n), "v": torch.zeros(2, n)})


def elements(kind: Kind, n: int) -> Element:
    """Return all elements that could be chosen for a layer of n units, as one batch."""
    if kind in ("orthogonal", "linear"):
        angles = torch.linspace(0, 2 * math.pi, 1001, dtype=torch.float64)
        rotations = torch.stack([angles.cos(), -angles.sin(), angles.sin(), angles.cos()], -1).reshape(-1, 2, 2)
        both = torch.cat([rotations, rotations * torch.tensor([1.0, -1.0])])
        return Element({"h": Value(matrix=both)}, (len(both),))
    has_signs, has_shifts = kind in ("signed", "dihedral"), kind == "dihedral"
    signs = sign_patterns(1, n) if has_signs else [torch.ones(1, n)]
    shifts = [torch.tensor(k) for k in itertools.product(range(-4, 5), repeat=n)] if has_shifts else [torch.zeros(n)]
    rows = list(itertools.product(permutations(n), signs, shifts))
    value = Value(
        perm=torch.stack([p for p, _, _ in rows]),
        scale=torch.ones(len(rows), 1, n, dtype=torch.float64) if kind == "scaled" else None,
        sign=torch.stack([s for _, s, _ in rows]).to(torch.int8) if has_signs else None,
        shift=torch.stack([k for _, _, k in rows]).unsqueeze(1) if has_shifts else None,
    )
    return Element({"h": value}, (len(rows),))


@pytest.mark.parametrize(
    ("kind", "n"),
    [
        *(("permutation", n) for n in range(1, 7)),
        *(("scaled", n) for n in range(2, 7)),
        *(("signed", n) for n in range(1, 6)),
        *(("dihedral", n) for n in (1, 2, 3)),
        ("orthogonal", 2),
        ("linear", 2),
    ],
)
@pytest.mark.parametrize("seed", range(2))
def test_weight_matching_of_one_hidden_layer_is_exact(kind: Kind, n: int, seed: int) -> None:
    symmetry = one_layer(n, kind)
    a, b = ({name: drawn(*shape, seed=seed + k) for name, shape in symmetry.shapes.items()} for k in (0, 50))
    found = rg.align(a, b, symmetry)
    x, start, reached = a, b, found.params
    if kind in ("scaled", "linear"):
        frame = balance(a, symmetry)
        x, reached = symmetry.act(frame, a), symmetry.act(frame, reached)
        start = symmetry.act(balance(b, symmetry), b)

    def distances(y: Mapping[str, Tensor]) -> Tensor:
        return torch.stack([(x[k] - y[k]).square().reshape(-1, x[k].numel()).sum(-1) for k in x]).sum(0)

    every = elements(kind, n)
    everywhere = {name: tensor.expand(*every.batch, *tensor.shape) for name, tensor in start.items()}
    best = float(distances(symmetry.act(every, everywhere)).min())
    distance = float(distances(reached))
    assert distance == pytest.approx(best, rel=1e-4 if kind in ("orthogonal", "linear") else 1e-9)
    constant = sum(float(x[name].square().sum() + start[name].square().sum()) for name in x)
    assert found.objective == pytest.approx((constant - distance) / 2)

"""Relaxed elements: hard elements act as in the symmetry, and the action is linear, batched and differentiable."""

import math
from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from models import CASES, Case, symmetry_of
from symmetries import BY_HAND, drawn, generator
from torch import Tensor

import regauge as rg
from regauge import Placement, Symmetry
from regauge.relaxed.action import Key, Matrices, RelaxedAction, block_sizes, split_character

HARD = ("permutation", "sign", "linear")


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, tensor in expected.items():
        assert found[name].shape == tensor.shape
        assert torch.allclose(found[name], tensor, atol=1e-9), name


def act_relaxed(symmetry: Symmetry, matrices: Matrices, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return RelaxedAction(symmetry, tensors, {name for name, _ in matrices})(matrices, tensors)


def matrices_of(symmetry: Symmetry, element: rg.Element, keys: Iterable[Key] | None = None) -> dict[Key, Tensor]:
    """Return a hard element as matrices: its effect on the rows of an identity matrix on which the groups act by the
    key.
    """
    found = {}
    for key in RelaxedAction(symmetry, symmetry.sites).keys if keys is None else keys:
        sizes, groups = block_sizes(symmetry, key[0]), []
        for k, (name, part) in enumerate(split_character(symmetry, key).items()):
            group, inner, outer = symmetry[name], math.prod(sizes[k + 1 :]), math.prod(sizes[:k])
            repeats = tuple((n, stride) for n, stride in ((outer, sizes[k] * inner), (inner, 1)) if n > 1)
            place = Placement(
                "probe",
                0,
                stride=inner,
                repeats=repeats,
                is_inverse=group.matrix == "linear" and part == (1,),
                scale=(0,) * group.scales,
                sign=part[: group.signs] if group.matrix == "none" else (),
                parity=part[group.signs :] if group.matrix == "none" else (),
                shift=(0.0,) * group.shifts,
            )
            groups.append(replace(group, placements=(place,)))
        eye = torch.eye(math.prod(sizes), dtype=torch.float64)
        probe = Symmetry(tuple(groups), {"probe": tuple(eye.shape)})
        own = rg.Element({group.name: element[group.name] for group in groups}, element.batch)
        found[key] = probe.act(own, {"probe": eye.expand(*element.batch, *eye.shape)})["probe"]
    return found


@pytest.mark.parametrize("name", BY_HAND)
def test_hard_elements_act_as_the_symmetry_does(name: str) -> None:
    symmetry = BY_HAND[name]
    element, params = symmetry.random(generator(0), HARD), drawn(symmetry, 1)
    assert_equal(act_relaxed(symmetry, matrices_of(symmetry, element), params), symmetry.act(element, params))


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.name, marks=[pytest.mark.slow] if case.is_slow else []) for case in CASES]
)
def test_hard_elements_of_every_architecture(case: Case) -> None:
    symmetry = symmetry_of(case)
    element = symmetry.random(generator(0), HARD)
    params = {n: torch.randn(symmetry.shapes[n], generator=generator(1), dtype=torch.float64) for n in symmetry.sites}
    assert_equal(act_relaxed(symmetry, matrices_of(symmetry, element), params), symmetry.act(element, params))


@pytest.mark.parametrize("name", BY_HAND)
def test_batches_of_elements_and_of_tensors(name: str) -> None:
    symmetry = BY_HAND[name]
    elements = symmetry.random(generator(0), HARD, batch=(3,))
    matrices, params = matrices_of(symmetry, elements), drawn(symmetry, 1)
    many = {n: torch.stack([t, 2 * t, -t]) for n, t in params.items()}
    expected = [symmetry.act(elements.item(k), {n: t[k] for n, t in many.items()}) for k in range(3)]
    stacked = {n: torch.stack([one[n] for one in expected]) for n in params}
    assert_equal(act_relaxed(symmetry, matrices, many), stacked)
    assert_equal(torch.func.vmap(lambda m, t: act_relaxed(symmetry, m, t))(matrices, many), stacked)
    moved = act_relaxed(symmetry, matrices, params)
    expected = symmetry.act(elements.item(1), params)
    assert_equal({n: moved[n][1] for n in symmetry.sites}, {n: expected[n] for n in symmetry.sites})
    alike = act_relaxed(symmetry, {key: m[2] for key, m in matrices.items()}, many)
    assert_equal({n: t[0] for n, t in alike.items()}, symmetry.act(elements.item(2), params))


@pytest.mark.parametrize("name", BY_HAND)
def test_it_is_differentiable(name: str) -> None:
    symmetry, params = BY_HAND[name], drawn(BY_HAND[name], 1)
    hard = matrices_of(symmetry, symmetry.identity())
    keys = list(hard)
    noise = [torch.rand(hard[key].shape, generator=generator(k), dtype=torch.float64) for k, key in enumerate(keys)]
    start = [(hard[key] + 0.5 + x).requires_grad_() for key, x in zip(keys, noise, strict=True)]

    def total(*values: Tensor) -> Tensor:
        moved = act_relaxed(symmetry, dict(zip(keys, values, strict=True)), params)
        return torch.stack([(t * t.sin()).sum() for t in moved.values()]).sum()

    assert torch.autograd.gradcheck(total, start, fast_mode=True)


def doubly_stochastic(*shape: int, seed: int) -> Tensor:
    """Return a mean of three permutation matrices."""
    n, g = shape[-1], generator(seed)
    orders = torch.rand(3, *shape[:-1], generator=g).argsort(-1)
    return torch.nn.functional.one_hot(orders, n).double().mean(0)


def test_blocks_and_what_is_within_them() -> None:
    """In a grouped convolution, two inner groups share the matrix of the blocks, entry by entry."""
    symmetry, (blocks, before, after) = BY_HAND["grouped convolution"], (3, 2, 4)
    p = doubly_stochastic(blocks, blocks, seed=0)
    q = doubly_stochastic(blocks, blocks, before, before, seed=1)  # [target block, source block, unit, unit]
    r = doubly_stochastic(blocks, blocks, after, after, seed=2)
    matrices = {
        ("g", ()): p,
        ("i", ()): torch.einsum("bc,bcuv->bucv", p, q).reshape(blocks * before, -1),
        ("o", ()): torch.einsum("bc,bcuv->bucv", p, r).reshape(blocks * after, -1),
    }
    params = drawn(symmetry, 3)
    moved = act_relaxed(symmetry, matrices, params)
    w = params["w"].reshape(blocks, after, before, 3)
    expected = torch.einsum("bc,bcuv,bcij,cvjk->buik", p, r, q, w).reshape(params["w"].shape)
    assert torch.allclose(moved["w"], expected)
    w0 = params["w0"].reshape(blocks, before, -1)
    assert torch.allclose(moved["w0"], torch.einsum("bc,bcij,cjk->bik", p, q, w0).flatten(0, 1))


def test_positions_are_carried_along() -> None:
    """For the flattened output of a convolution, the matrix has the size of the channels."""
    symmetry = Symmetry.from_axes({"conv": ("c", None, None, None), "fc": (None, "c*6")}).bind(
        {"conv": torch.zeros(5, 2, 3, 3), "fc": torch.zeros(4, 30)}
    )
    params, matrix = drawn(symmetry, 0), doubly_stochastic(5, 5, seed=1)
    moved = act_relaxed(symmetry, {("c", ()): matrix}, params)
    expected = torch.einsum("uv,ovp->oup", matrix, params["fc"].reshape(4, 5, 6)).reshape(4, 30)
    assert torch.allclose(moved["fc"], expected)
    assert torch.allclose(moved["conv"], torch.einsum("uv,vxyz->uxyz", matrix, params["conv"]))


@pytest.mark.parametrize(
    "name", ["attention", "rotary", "three levels", "grouped convolution", "normalized groups", "signed"]
)
def test_groups_without_matrices_stay(name: str) -> None:
    symmetry, params = BY_HAND[name], drawn(BY_HAND[name], 1)
    element, blank = symmetry.random(generator(0), HARD), symmetry.identity()
    for group in symmetry.groups:
        one = blank.replace(group.name, element[group.name])
        action = RelaxedAction(symmetry, params, [group.name])
        matrices = {key: m for key, m in matrices_of(symmetry, one, action.keys).items() if key[0] == group.name}
        assert_equal(action(matrices, params), symmetry.act(one, params))
        assert_equal(act_relaxed(symmetry, matrices, params), symmetry.act(one, params))
    assert act_relaxed(symmetry, {}, params) == params


def test_names_without_groups_pass_through_and_dtypes_stay() -> None:
    symmetry = BY_HAND["permutation"]
    params = {**drawn(symmetry, 0, torch.float32), "other": torch.ones(2)}
    moved = act_relaxed(symmetry, matrices_of(symmetry, symmetry.random(generator(0))), params)
    assert moved["other"] is params["other"]
    assert all(moved[n].dtype == torch.float32 for n in params)


def test_what_does_not_fit_is_refused() -> None:
    symmetry, params = BY_HAND["permutation"], drawn(BY_HAND["permutation"], 0)
    with pytest.raises(ValueError, match=r"group 'h1' has 9 units in all its blocks, so it must end in \(9, 9\)"):
        act_relaxed(symmetry, {("h1", ()): torch.eye(4)}, params)
    signed = BY_HAND["signed"]
    with pytest.raises(KeyError, match=r"has no matrix for \('h1', \(1,\)\)"):
        act_relaxed(signed, {("h1", (0,)): torch.eye(9)}, params)


def test_groups_that_overlap_without_being_factors_are_refused() -> None:
    places = (rg.Placement("w", 0),), (rg.Placement("w", 0, stride=1),)
    symmetry = Symmetry((rg.Group("a", 4, places[0]), rg.Group("b", 4, places[1])), {"w": (4,)})
    with pytest.raises(ValueError, match=r"groups \['a', 'b'\] overlap on an axis of 'w' without being factors of it"):
        act_relaxed(symmetry, {("a", ()): torch.eye(4)}, {"w": torch.ones(4)})

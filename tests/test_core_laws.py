"""The laws of elements and of their action, for every kind of group, alone, nested and batched."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from symmetries import KINDS, cases, close, draw, gated_units, linear_heads, one_kind

import regauge as rg
from regauge.core import act as act_module
from regauge.core.element import Value, concatenate, select_parts, stack
from regauge.core.groups import Frozen

LAWS = settings(deadline=None, derandomize=True, max_examples=12)
SIZES = st.integers(1, 6)
SEEDS = st.integers(0, 2**31)


@LAWS
@given(n=SIZES, m=SIZES, seed=SEEDS)
def test_the_identity_changes_nothing(n: int, m: int, seed: int) -> None:
    for symmetry, shapes in cases(n, m):
        params = draw(shapes, seed)
        bound = symmetry.bind(params)
        moved = bound.act(bound.identity(), params)
        for name, tensor in params.items():
            assert torch.equal(moved[name], tensor)


@LAWS
@given(n=SIZES, m=SIZES, seed=SEEDS)
def test_products_act_one_after_the_other(n: int, m: int, seed: int) -> None:
    for symmetry, shapes in cases(n, m):
        params = draw(shapes, seed)
        bound = symmetry.bind(params)
        generator = torch.Generator().manual_seed(seed)
        g, h = bound.random(generator), bound.random(generator)
        close(bound.act(bound.compose(g, h), params), bound.act(g, bound.act(h, params)))


@LAWS
@given(n=SIZES, m=SIZES, seed=SEEDS)
def test_the_inverse_undoes_on_both_sides(n: int, m: int, seed: int) -> None:
    for symmetry, shapes in cases(n, m):
        params = draw(shapes, seed)
        bound = symmetry.bind(params)
        g = bound.random(torch.Generator().manual_seed(seed))
        back = bound.inverse(g)
        close(bound.act(back, bound.act(g, params)), params)
        close(bound.act(g, bound.act(back, params)), params)
        close(bound.act(bound.inverse(back), params), bound.act(g, params))
        close(bound.act(bound.compose(g, back), params), params)


@LAWS
@given(n=SIZES, m=SIZES, seed=SEEDS)
def test_products_are_associative(n: int, m: int, seed: int) -> None:
    for symmetry, shapes in cases(n, m):
        params = draw(shapes, seed)
        bound = symmetry.bind(params)
        generator = torch.Generator().manual_seed(seed)
        f, g, h = (bound.random(generator) for _ in range(3))
        left, right = bound.compose(bound.compose(f, g), h), bound.compose(f, bound.compose(g, h))
        close(bound.act(left, params), bound.act(right, params))


@LAWS
@given(n=SIZES, m=SIZES, seed=SEEDS)
def test_a_batch_is_a_loop(n: int, m: int, seed: int) -> None:
    for symmetry, shapes in cases(n, m):
        params = draw(shapes, seed, 3)
        bound = symmetry.bind(params)
        generator = torch.Generator().manual_seed(seed)
        g, h = bound.random(generator, batch=(3,)), bound.random(generator, batch=(3,))
        moved, product, back = bound.act(g, params), bound.compose(g, h), bound.inverse(g)
        for k in range(3):
            alone = {name: tensor[k] for name, tensor in params.items()}
            one = {name: tensor[k] for name, tensor in moved.items()}
            close(one, bound.act(g.item(k), alone))
            close(
                bound.act(product.item(k), alone), bound.act(bound.compose(g.item(k), h.item(k)), alone), tolerance=1e-9
            )
            close(bound.act(back.item(k), one), alone, tolerance=1e-9)
        together = bound.act(stack([g.item(k) for k in range(3)]), params)
        close(together, moved)


@LAWS
@given(n=SIZES, m=SIZES, seed=SEEDS)
def test_one_element_moves_a_population_and_a_batch_moves_one_network(n: int, m: int, seed: int) -> None:
    for symmetry, shapes in cases(n, m):
        population, alone = draw(shapes, seed, 2), draw(shapes, seed + 1)
        bound = symmetry.bind(alone)
        g = bound.random(torch.Generator().manual_seed(seed))
        moved = bound.act(g, population)
        for k in range(2):
            one = {name: tensor[k] for name, tensor in population.items()}
            close({name: tensor[k] for name, tensor in moved.items()}, bound.act(g, one))
        many = bound.random(torch.Generator().manual_seed(seed), batch=(2,))
        spread = bound.act(many, alone)
        for name in {p.parameter for group in bound.groups for p in group.placements}:
            for k in range(2):
                close({name: spread[name][k]}, {name: bound.act(many.item(k), alone)[name]})


@LAWS
@given(n=SIZES, m=SIZES, seed=SEEDS)
def test_the_text_form_holds_everything(n: int, m: int, seed: int) -> None:
    for symmetry, shapes in cases(n, m):
        params = draw(shapes, seed)
        bound = symmetry.bind(params)
        again = rg.Symmetry.from_json(bound.to_json())
        assert again == bound
        assert again.to_json() == bound.to_json()
        generator = torch.Generator()
        g, h = bound.random(generator.manual_seed(seed)), again.random(generator.manual_seed(seed))
        moved, other = bound.act(g, params), again.act(h, params)
        for name in params:
            assert torch.equal(moved[name], other[name])


@LAWS
@given(n=SIZES, m=SIZES, seed=SEEDS)
def test_arguments_are_not_written_into(n: int, m: int, seed: int) -> None:
    for symmetry, shapes in cases(n, m):
        params = draw(shapes, seed)
        kept = {name: tensor.clone() for name, tensor in params.items()}
        bound = symmetry.bind(params)
        bound.act(bound.random(torch.Generator().manual_seed(seed)), params)
        for name, tensor in params.items():
            assert torch.equal(tensor, kept[name])


@LAWS
@given(n=SIZES, m=SIZES, seed=SEEDS)
def test_large_tensors_move_axis_by_axis_to_the_same_place(n: int, m: int, seed: int) -> None:
    for symmetry, shapes in cases(n, m):
        for batch in ((), (2,)):
            params = draw(shapes, seed, *batch)
            bound = symmetry.bind(params)
            g = bound.random(torch.Generator().manual_seed(seed), batch=batch)
            flat = bound.act(g, params)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(act_module, "FLAT_LIMIT", 0)
                by_axis = bound.act(g, params)
            for name in params:
                assert torch.equal(flat[name], by_axis[name])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_the_dtype_is_kept_and_signs_and_orders_are_exact_in_it(kind: str, dtype: torch.dtype) -> None:
    symmetry, shapes = one_kind(kind, 6)
    params = {name: tensor.to(dtype) for name, tensor in draw(shapes, 0).items()}
    bound = symmetry.bind(params)
    g = bound.random(torch.Generator().manual_seed(0))
    moved = bound.act(g, params)
    exact = bound.act(g, {name: tensor.double() for name, tensor in params.items()})
    for name, tensor in moved.items():
        assert tensor.dtype == dtype
        if kind in ("permutation", "signed"):
            assert torch.equal(tensor.double(), exact[name])
        else:
            bound_on_error = 40 * torch.finfo(dtype).eps
            assert torch.allclose(tensor.double(), exact[name], rtol=bound_on_error, atol=bound_on_error)


@pytest.mark.parametrize("kind", KINDS)
def test_parts_restrict_a_random_element(kind: str) -> None:
    symmetry, shapes = one_kind(kind, 6)
    params = draw(shapes, 0)
    bound = symmetry.bind(params)
    everything = bound.random(torch.Generator().manual_seed(0))
    nothing = bound.act(bound.random(torch.Generator().manual_seed(0), parts=()), params)
    assert all(torch.equal(nothing[name], params[name]) for name in params)
    parts = {
        "permutation": ("permutation",),
        "signed": ("permutation", "sign"),
        "dihedral": ("permutation", "sign", "shift"),
        "scaled": ("permutation", "scale"),
        "orthogonal": ("linear",),
        "centered": ("linear",),
        "rotation": ("linear",),
        "linear": ("linear",),
    }[kind]
    selected = select_parts(everything, bound.groups, parts)
    assert all(torch.equal(bound.act(selected, params)[name], bound.act(everything, params)[name]) for name in params)


@pytest.mark.parametrize("kind", ["orthogonal", "centered", "rotation"])
def test_random_elements_are_orthogonal_where_they_should_be(kind: str) -> None:
    symmetry, shapes = one_kind(kind, 6)
    bound = symmetry.bind(draw(shapes, 0))
    matrix = bound.random(torch.Generator().manual_seed(0))["h"].matrix
    assert matrix is not None
    assert torch.allclose(matrix @ matrix.mT, torch.eye(6, dtype=torch.float64), atol=1e-12)
    keeps_ones = torch.allclose(matrix.sum(-1), torch.ones(6, dtype=torch.float64), atol=1e-12)
    assert keeps_ones == (kind == "centered")
    many = bound.random(torch.Generator().manual_seed(0), batch=(20,))["h"].matrix
    assert many is not None
    assert bool((torch.linalg.det(many) > 0).all()) == (kind == "rotation")


def test_rotations_that_keep_the_ones_are_a_group_of_the_next_smaller_dimension() -> None:
    symmetry, shapes = one_kind("centered", 6)
    params = draw(shapes, 0)
    bound = symmetry.bind(params)
    assert bound.dimension == one_kind("orthogonal", 5)[0].bind(draw(one_kind("orthogonal", 5)[1], 0)).dimension == 10
    moved = bound.act(bound.random(torch.Generator().manual_seed(0)), params)
    # They commute with taking the mean over the units.
    assert torch.allclose(moved["w1"].mean(0), params["w1"].mean(0), atol=1e-12)
    assert torch.allclose(moved["w2"].mean(1), params["w2"].mean(1), atol=1e-12)
    assert "centered" in str(bound)
    assert "rotation, ones kept" in str(bound)
    assert rg.Symmetry.from_json(bound.to_json()) == bound


def test_rotations_without_reflection_say_so_in_text_and_tables() -> None:
    for size, word in ((2, "angle"), (6, "rotation, no reflection")):
        symmetry, shapes = one_kind("rotation", size)
        bound = symmetry.bind(draw(shapes, 0))
        assert bound.dimension == size * (size - 1) // 2
        assert word in str(bound)
        assert rg.Symmetry.from_json(bound.to_json()) == bound
        assert bound.groups[0].kind == "rotation"


def test_only_rotations_can_be_without_reflection() -> None:
    with pytest.raises(ValueError, match=r"rotations act but no reflections.*write matrix='orthogonal'"):
        rg.Group("a", 3, (), is_permuted=False, matrix="linear", is_proper=True)
    with pytest.raises(ValueError, match="and keeps the ones"):
        rg.Group("a", 3, (), is_permuted=False, matrix="orthogonal", keeps_ones=True, is_proper=True)


def test_only_rotations_can_keep_the_ones() -> None:
    with pytest.raises(ValueError, match=r"keeps the vector of all ones.*write matrix='orthogonal'"):
        rg.Group("a", 3, (), is_permuted=False, matrix="linear", keeps_ones=True)


def test_the_same_generator_gives_the_same_element() -> None:
    symmetry, shapes = linear_heads(3, 2)
    params = draw(shapes, 0)
    first, second = (symmetry.act(symmetry.random(torch.Generator().manual_seed(5)), params) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in params)


def test_what_no_group_touches_is_shared() -> None:
    symmetry, shapes = one_kind("permutation", 4)
    params = draw(shapes, 0)
    bound = symmetry.bind(params)
    moved = bound.act(bound.random(torch.Generator().manual_seed(0)), params)
    assert moved["free"] is params["free"]


def test_sizes_and_orders_are_counted() -> None:
    symmetry, shapes = one_kind("signed", 5)
    bound = symmetry.bind(draw(shapes, 0))
    assert bound["h"].size == 5
    assert bound.log10_order == pytest.approx(math.log10(math.factorial(5) * 2**5))
    nested, _ = linear_heads(3, 2)
    assert nested.log10_order == pytest.approx(math.log10(math.factorial(3) * (math.factorial(5) * 2**5) ** 3))
    assert nested.dimension == 3 * 4 + 3 * 5
    assert [group.kind for group in nested.groups] == ["nested", "linear", "scaled"]


def test_an_element_of_another_symmetry_is_refused() -> None:
    symmetry, shapes = one_kind("permutation", 4)
    other, _ = gated_units(4)
    params = draw(shapes, 0)
    with pytest.raises(KeyError, match="no group 'x'"):
        symmetry["x"]
    renamed = replace(other, groups=(replace(other.groups[0], name="other"),))
    with pytest.raises(KeyError, match="belongs to another symmetry"):
        symmetry.act(renamed.identity(), params)
    bound = symmetry.bind(params)
    with pytest.raises(KeyError, match="belongs to another symmetry"):
        bound.compose(renamed.identity(), bound.identity())


def test_parameters_of_another_architecture_are_refused() -> None:
    symmetry, shapes = one_kind("permutation", 4)
    params = draw(shapes, 0)
    bound = symmetry.bind(params)
    g = bound.identity()
    with pytest.raises(KeyError, match="the parameters lack 'w2', which the symmetry moves"):
        bound.act(g, {name: t for name, t in params.items() if name != "w2"})
    with pytest.raises(ValueError, match="another architecture"):
        bound.act(g, {**params, "w2": torch.zeros(4, 5, dtype=torch.float64)})
    with pytest.raises(ValueError, match="do not share a group"):
        symmetry.bind({**params, "w2": torch.zeros(4, 5, dtype=torch.float64)})
    with pytest.raises(ValueError, match="no multiple"):
        symmetry.bind({**params, "wide": torch.zeros(4, 13, dtype=torch.float64)})
    with pytest.raises(ValueError, match="stack all or none"):
        bound.act(g, {**params, "w2": params["w2"].expand(3, 4, 4)})
    with pytest.raises(ValueError, match=r"call `symmetry\.bind"):
        _ = symmetry.sites
    batch = bound.identity((5,))
    with pytest.raises((ValueError, RuntimeError)):
        bound.act(batch, draw(shapes, 0, 3))


def test_elements_say_what_they_lack() -> None:
    symmetry, shapes = one_kind("permutation", 4)
    bound = symmetry.bind(draw(shapes, 0))
    with pytest.raises(ValueError, match="one index per axis"):
        bound.identity((2,)).item()
    with pytest.raises(ValueError, match=r"parts \['colour'\] are unknown"):
        bound.random(torch.Generator(), parts=("colour",))


def test_malformed_symmetries_are_refused() -> None:
    place = (rg.Placement("w", 0),)
    with pytest.raises(ValueError, match="unique"):
        rg.Symmetry((rg.Group("a", 3, place), rg.Group("a", 3, place)))
    with pytest.raises(ValueError, match="which is not a group"):
        rg.Symmetry((rg.Group("a", 3, place, within=("b",)),))
    with pytest.raises(ValueError, match="itself within"):
        rg.Symmetry(
            (
                rg.Group("a", 3, place),
                rg.Group("b", 3, place, within=("a",)),
                rg.Group("c", 3, place, within=("b",)),
            )
        )
    with pytest.raises(ValueError, match="families"):
        rg.Group("a", 3, place, scales=1)
    with pytest.raises(ValueError, match="make two groups"):
        rg.Group("a", 3, place, matrix="linear")
    with pytest.raises(ValueError, match="only 1 axes"):
        _ = rg.Symmetry((rg.Group("a", 3, (rg.Placement("w", 1),)),), {"w": (3,)}).sites
    with pytest.raises(ValueError, match="do not fit"):
        _ = rg.Symmetry((rg.Group("a", 4, place),), {"w": (3,)}).sites
    groups = (rg.Group("b", 2, (rg.Placement("v", 0),), is_base=True), rg.Group("a", 3, place, within=("b",)))
    with pytest.raises(ValueError, match="same block"):
        _ = rg.Symmetry(groups, {"w": (3,), "v": (2,)}).sites


@pytest.mark.parametrize(
    ("axes", "kinds", "message"),
    [
        ({"w": ("h", None)}, {"x": "signed"}, "has a kind but no axis"),
        ({"w": ("h", None)}, {"h": "nested"}, "cannot be written as axes"),
        ({"w": ("h", None)}, {"h": "strange"}, "cannot be written as axes"),
        ({"w": ("", None)}, None, "write 'name'"),
    ],
)
def test_specifications_by_hand_are_checked(axes: dict, kinds: dict | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rg.Symmetry.from_axes(axes, kinds=kinds)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "not a symmetry"),
        ('{"format": "regauge.symmetry", "version": 99}', "version 99"),
        ('{"format": "regauge.symmetry", "version": 1, "groups": [{"name": "a"}]}', "malformed"),
        (
            '{"format": "regauge.symmetry", "version": 1, "groups": [{"name": "a", "placements": [], "z": 1}]}',
            "malform",
        ),
        ('{"format": "regauge.symmetry", "version": 1}', "malformed"),
    ],
)
def test_malformed_text_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rg.Symmetry.from_json(text)


def test_the_printed_table_names_groups_and_reasons() -> None:
    symmetry, _ = linear_heads(3, 2)
    frozen = (Frozen("q", 1, 7, "input features"), Frozen("k", 1, 7, "input features"))
    text = str(replace(symmetry, frozen=frozen, unknown=("aten.mystery.default",), unused=("dead",), notes=("Note.",)))
    for word in ("heads", "nested", "linear", "scaled", "x3", "input features: q[1], k[1]", "aten.mystery", "dead"):
        assert word in text
    assert text.endswith("Note.")


@LAWS
@given(n=SIZES, m=SIZES, seed=SEEDS)
def test_rows_of_a_batch_join_to_the_batch(n: int, m: int, seed: int) -> None:
    for symmetry, shapes in cases(n, m):
        bound = symmetry.bind(draw(shapes, seed))
        whole = bound.random(torch.Generator().manual_seed(seed), batch=(4,))
        parts = [whole.rows(slice(0, 1)), whole.rows(torch.tensor([1])), whole.rows(torch.arange(4) >= 2)]
        assert [part.batch for part in parts] == [(1,), (1,), (2,)]
        mask = torch.tensor([True, False, True, False])
        mixed = whole.where(mask, bound.identity((4,)))
        for name, value in concatenate(parts).items():
            for field, tensor in value.items():
                assert torch.equal(tensor, getattr(whole[name], field))
                assert torch.equal(getattr(mixed[name], field)[mask], tensor[mask])
                assert torch.equal(getattr(mixed[name], field)[~mask], getattr(bound.identity((2,))[name], field))


def test_values_map_zip_and_fill_only_the_fields_that_they_have() -> None:
    value = Value(perm=torch.tensor([1, 0]), sign=torch.ones(1, 2))
    other = Value(sign=-torch.ones(1, 2), scale=torch.full((1, 2), 3.0))
    assert [name for name, _ in value.map(torch.clone).items()] == ["perm", "sign"]
    assert [name for name, _ in value.zip(other, torch.add).items()] == ["sign"]
    assert torch.equal(dict(value.zip(other, torch.add).items())["sign"], torch.zeros(1, 2))
    filled = dict(value.fill(other).items())
    assert list(filled) == ["perm", "scale", "sign"]
    assert torch.equal(filled["sign"], torch.ones(1, 2))

"""Translations: all possible additions are found, compared with explicit counts and the null space, and the chart obeys
its laws.

The numbers of dimensions in `NETS` were counted explicitly, family by family.
"""

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from translation_nets import (
    EVERY,
    NETS,
    Attention,
    Feedforward,
    Rows,
    Tokens,
    Written,
    causal_features,
    drawn,
    film,
    film_layers,
    gap,
    generator,
    maxout,
    network,
    outputs,
    positive,
    qkvo,
    talking,
)

import regauge as rg
from regauge.canonical import orbit_distance
from regauge.checkpoints import Alignment, load_alignment
from regauge.core.element import PARTS
from regauge.core.params import Params

TRAPS = {"sink": ("blocks.0.k.bias", "blocks.0.v.bias"), "tied decoder": ("positions.weight.mean(0)",)}
"""Families that similar networks have, but these networks do not."""
LEFT = {
    "decoder": 21,
    "sink": 21,
    "post-norm": 9,
    "norm by hand": 11,
    "gain plus one": 11,
    "convolutions": 2,
    "two norms": 16,
}
"""Dimensions of the null space that are not translations, scales or matrices: rotations behind gains (O(7) has 21, O(5)
and O(4) have 10 and 6), shears of a stream that attention reads without a norm, and kernels of two consecutive
convolutions."""
ROTATED = {
    "decoder": 21,
    "sink": 21,
    "patches": 21,
    "two norms": 16,
    "means": 10,
    "writes weights": 10,
    "two biases": 6,
}
ROTATED |= {"windows": 10, "windows, padded beside a beta": 10}
"""Dimensions of the rotations behind gains: O(7) has 21, O(5) and O(4) 10 and 6, and both together 16."""


@pytest.mark.parametrize("name", NETS)
def test_as_many_dimensions_are_found_as_were_counted_by_hand(name: str) -> None:
    _, _, symmetry, _ = network(name)
    assert sum(family.size for family in symmetry.translations) == NETS[name][2]
    bare = replace(symmetry, translations=(), groups=tuple(replace(g, behind_gains="none") for g in symmetry.groups))
    stored = sum(family.size for family in symmetry.translations if family.is_stored_only)
    assert symmetry.dimension == bare.dimension + NETS[name][2] - stored + ROTATED.get(name, 0)
    for trap in TRAPS.get(name, ()):
        assert trap not in [family.name for family in symmetry.translations]


def test_sums_of_shifted_channels_are_not_taken_for_zero() -> None:
    make, inputs, count = NETS["windows of shifted channels"]
    symmetry = rg.discover(make(), (inputs(),), verify=False)  # A check on values would catch it, too.
    assert sum(family.size for family in symmetry.translations) == count


@pytest.mark.parametrize("name", NETS)
def test_the_chart_keeps_functions_and_is_one_to_one(name: str) -> None:
    module, x, symmetry, params = network(name)
    before = outputs(module, params, x)
    representative, coordinates = symmetry.split(params)
    assert torch.allclose(outputs(module, representative, x), before, atol=1e-12)
    assert gap(symmetry.join(representative, coordinates), params) < 1e-13
    chance = generator(1)
    names = [family.name for family in symmetry.translations]
    anew = {
        key: torch.randn(value.shape, dtype=torch.float64, generator=chance) + 3.0 * (key not in names)
        for key, value in coordinates.items()
    }
    elsewhere = symmetry.join(representative, anew)
    assert torch.allclose(outputs(module, elsewhere, x), before, atol=1e-10)
    again, found = symmetry.split(elsewhere)
    assert gap(again, representative) < 1e-11
    assert all(torch.allclose(found[key], anew[key], atol=1e-11) for key in anew)


@pytest.mark.parametrize("name", NETS)
def test_elements_with_translations_are_a_group_that_acts(name: str) -> None:
    module, x, symmetry, params = network(name)
    g, h = (drawn(symmetry, seed) for seed in (1, 2))
    moved = symmetry.act(g, params)
    assert gap(moved, params) > 0.1
    assert torch.allclose(outputs(module, moved, x), outputs(module, params, x), atol=1e-10)
    assert gap(symmetry.act(h, moved), symmetry.act(symmetry.compose(h, g), params)) < 1e-11
    assert gap(symmetry.act(symmetry.inverse(g), moved), params) < 1e-11


@pytest.mark.parametrize("name", NETS)
def test_random_elements_are_of_the_whole_group(name: str, tmp_path: Path) -> None:
    module, x, symmetry, params = network(name)
    g, h = symmetry.random(generator(1)), symmetry.random(generator(2))
    assert [*g.translation] == [family.name for family in symmetry.translations if not family.is_stored_only]
    assert tuple(g.rotation) == symmetry.rotatable
    before, moved = outputs(module, params, x), symmetry.act(g, params)
    for key, vector in g.translation.items():
        assert gap(symmetry.act(symmetry.identity().translated({key: vector}), params), params) > 1e-3
    for key, matrix in g.rotation.items():
        assert gap(symmetry.act(symmetry.identity().rotated({key: matrix}), params), params) > 0.01
    assert torch.allclose(outputs(module, moved, x), before, atol=1e-11)
    assert gap(symmetry.act(h, moved), symmetry.act(symmetry.compose(h, g), params)) < 1e-11
    assert gap(symmetry.act(symmetry.inverse(g), moved), params) < 1e-11
    Alignment(symmetry, g).save(tmp_path / "g.safetensors")
    again = load_alignment(tmp_path / "g.safetensors")
    assert gap(again.symmetry.act(again.element, params), moved) == 0
    linear = symmetry.random(generator(1), PARTS)
    assert not linear.translation
    assert not linear.rotation
    for key, value in linear.items():
        assert all(torch.equal(tensor, dict(g[key].items())[field]) for field, tensor in value.items())


@pytest.mark.parametrize("name", NETS)
def test_pairs_of_families_add_in_any_order_and_have_one_representative(name: str) -> None:
    module, x, symmetry, params = network(name)
    before, (representative, _) = outputs(module, params, x), symmetry.split(params)
    vectors = drawn(symmetry, 1).translation
    alone = {key: symmetry.identity().translated({key: vector}) for key, vector in vectors.items()}
    moved = {key: symmetry.act(one, params) for key, one in alone.items()}
    for first in moved.values():
        assert torch.allclose(outputs(module, first, x), before, atol=1e-11)
        assert gap(symmetry.split(first)[0], representative) < 1e-11
    pairs = [(key, other) for key in vectors for other in vectors if key < other]
    networks = {key: t.expand(len(pairs), *t.shape) for key, t in params.items()}

    def one_of_each(chosen: list[str]) -> rg.Element:
        """Return, for each pair, the translation of one of its families."""
        rows = {key: torch.tensor([float(key == one) for one in chosen], dtype=torch.float64) for key in vectors}
        steps = {key: torch.tensordot(row, vectors[key], dims=0) for key, row in rows.items()}
        return symmetry.identity((len(pairs),)).translated(steps)

    if pairs:
        ones, others = (one_of_each([pair[k] for pair in pairs]) for k in (0, 1))
        both = symmetry.act(others, symmetry.act(ones, networks))
        assert gap(both, symmetry.act(ones, symmetry.act(others, networks))) < 1e-11
        assert gap(both, symmetry.act(symmetry.compose(ones, others), networks)) < 1e-11
    whole = symmetry.act(symmetry.identity().translated(vectors), params)
    assert gap(symmetry.split(whole)[0], representative) < 1e-11


BENT = ("talking heads", "branches with numbers", "branches with a number and a gain")
"""Nets that multiply an added value by two parameters of the representative, one after the other."""


@pytest.mark.parametrize("name", NETS)
def test_a_line_between_representatives_is_a_line_in_anyones_coordinates(name: str) -> None:
    _, _, symmetry, params = network(name)
    other = {key: t + 0.2 * torch.rand_like(t) if t.is_floating_point() else t for key, t in params.items()}
    (first, coordinates), (second, _) = symmetry.split(params), symmetry.split(other)
    if any(family.gain and family.gain.parameter not in coordinates for family in symmetry.translations):
        pytest.skip("a gain that stays in the representative divides what is added")
    half = symmetry.join({key: (first[key] + second[key]) / 2 for key in first}, coordinates)
    ends = symmetry.join(first, coordinates), symmetry.join(second, coordinates)
    apart = gap(half, {key: (ends[0][key] + ends[1][key]) / 2 for key in half})
    assert apart > 1e-4 if name in BENT else apart < 1e-11


@pytest.mark.parametrize("name", NETS)
def test_a_symmetry_with_translations_is_read_as_it_was_written(name: str) -> None:
    _, _, symmetry, params = network(name)
    again = rg.Symmetry.from_json(symmetry.to_json())
    assert again == symmetry
    assert "translation" in str(again)
    element = drawn(symmetry, 1)
    assert gap(again.act(element, params), symmetry.act(element, params)) == 0


@pytest.mark.parametrize("name", NETS)
def test_populations_are_split_and_moved_network_by_network(name: str) -> None:
    _, _, symmetry, params = network(name)
    elements = drawn(symmetry, 1, (3,))
    single = [symmetry.act(elements.item(k), params) for k in range(3)]
    moved = symmetry.act(elements, {key: t.expand(3, *t.shape) for key, t in params.items()})
    floating = [key for key in params if params[key].is_floating_point()]
    together, (_, coordinates) = moved, symmetry.split(moved)
    for k in range(3):
        assert gap({key: together[key][k] for key in floating}, {key: single[k][key] for key in floating}) < 1e-12
        alone = symmetry.split(single[k])[1]
        assert all(torch.allclose(coordinates[key][k], alone[key], atol=1e-12) for key in alone)
    back = symmetry.act(symmetry.inverse(elements), moved)
    assert gap({key: back[key][1] for key in floating}, {key: params[key] for key in floating}) < 1e-11


def null_space(module: nn.Module, params: Params, names: list[str], inputs: list[Tensor]) -> Tensor:
    """Return the directions in which no output changes, `[directions, values]`."""
    sizes = [params[name].numel() for name in names]

    def run(values: Tensor) -> Tensor:
        parts = {name: one.view_as(params[name]) for name, one in zip(names, values.split(sizes), strict=True)}
        return torch.cat([outputs(module, {**params, **parts}, x).flatten() for x in inputs])

    point = torch.cat([params[name].flatten() for name in names])
    with sdpa_kernel(SDPBackend.MATH):  # the only one that is differentiated for all directions at once
        jacobian = torch.func.jacrev(run)(point)
    triangle = torch.linalg.qr(jacobian, mode="r").R  # with the same null space, and fewer rows
    _, sizes_of, directions = torch.linalg.svd(triangle, full_matrices=True)
    return directions[int((sizes_of > 1e-9 * sizes_of[0]).sum()) :]


def tangents(symmetry: rg.Symmetry, params: Params, names: list[str]) -> Tensor:
    """Return the directions of the group's translations, scales and matrices, by central differences."""
    blank, rows = symmetry.identity(), []

    def add(change: rg.Element, back: rg.Element) -> None:
        one, other = symmetry.act(change, params), symmetry.act(back, params)
        rows.append(torch.cat([(one[name] - other[name]).flatten() for name in names]))

    for family in symmetry.translations:
        for unit in torch.eye(family.size, dtype=torch.float64) * 1e-4:
            step = unit.reshape(family.shape)
            add(*(blank.translated({family.name: sign * step}) for sign in (1, -1)))
    for group in symmetry.groups:
        value = blank[group.name]
        for field in ("scale", "matrix"):
            known = getattr(value, field)
            for unit in torch.eye(0 if known is None else known.numel(), dtype=torch.float64) * 1e-4:
                step = unit.reshape(known.shape)
                add(*(blank.replace(group.name, replace(value, **{field: known + sign * step})) for sign in (1, -1)))
    return torch.stack(rows) / 2e-4


COUNTED = ("decoder", "sink", "mixture", "linear layers", "parallel", "norm by hand", "two norms", "LSTM", "GRU")
COUNTED += ("linear attention", "causal linear attention", "performer", "talking heads", "FiLM")
COUNTED += ("gain plus one", "fused attention", "encoder", "encoder, norms first", "relative positions")


@pytest.mark.parametrize("name", COUNTED)
def test_nothing_of_the_null_space_is_left_that_has_no_name(name: str) -> None:
    module, x, symmetry, params = network(name)
    names = [key for key, _ in module.named_parameters()]
    torch.manual_seed(1)
    count = 1 + 2 * sum(params[key].numel() for key in names) // outputs(module, params, x).numel()
    inputs = [torch.randn_like(x) if x.is_floating_point() else torch.randint_like(x, 9) for _ in range(min(count, 40))]
    nothing = null_space(module, params, names, inputs)
    directions = tangents(symmetry, params, names)
    assert float((directions - directions @ nothing.T @ nothing).abs().max()) < 1e-5
    found = int(torch.linalg.matrix_rank(directions, atol=1e-5))
    assert len(nothing) - found == LEFT.get(name, 0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", ["decoder", "post-norm", "patches", "batch norm", "group norm", "mixture"])
def test_a_translated_copy_is_the_same_network_in_another_gauge(name: str, dtype: torch.dtype) -> None:
    _, _, symmetry, params = network(name)
    network_ = {key: t.to(dtype) if t.is_floating_point() else t for key, t in params.items()}
    for parts in (("translation",), EVERY):
        moved = symmetry.act(symmetry.random(generator(3), parts), network_)
        report = rg.compare(network_, moved, symmetry, generator=generator(0))
        assert str(report.verdict) == "same network in another gauge"
        assert report.orbit_distance < (1e-6 if dtype == torch.float64 else 1e-4)
        assert orbit_distance(network_, moved, symmetry) < (1e-11 if dtype == torch.float64 else 1e-4)


@pytest.mark.parametrize("name", ["decoder", "post-norm", "batch norm", "mixture"])
def test_the_canonical_element_leads_to_the_canonical_network(name: str) -> None:
    module, x, symmetry, params = network(name)
    canonical = rg.canonicalize(params, symmetry)
    assert torch.allclose(outputs(module, canonical, x), outputs(module, params, x), atol=1e-10)
    element = rg.canonical.canonical_element(params, symmetry)
    assert gap(symmetry.act(element, params), canonical) < 1e-11
    moved = symmetry.act(symmetry.random(generator(2), EVERY), params)
    assert gap(rg.canonicalize(moved, symmetry), canonical) < 1e-8


@pytest.mark.parametrize("name", ["decoder", "post-norm", "batch norm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_representative_fixes_at_zero_is_exactly_zero(name: str, dtype: torch.dtype) -> None:
    _, _, symmetry, params = network(name)
    params = {n: tensor.to(dtype) if tensor.is_floating_point() else tensor for n, tensor in params.items()}
    canonical, zero = rg.canonicalize(params, symmetry), symmetry.split(params)[0]
    fixed = [n for n, tensor in zero.items() if params[n].any() and not tensor.any()]
    assert fixed
    assert not [n for n in fixed if canonical[n].any()]


@pytest.mark.parametrize(
    ("name", "gain"),
    [
        ("decoder", "blocks.0.norm.weight"),
        ("post-norm", "blocks.0.norm.weight"),
        ("norm by hand", "gain"),
        ("gain plus one", "gain"),
        ("layer scale", "scale"),
        ("encoder, norms first", "0.norm1.weight"),
    ],
)
def test_gains_that_are_zero_stay_and_so_does_what_is_read_behind_them(name: str, gain: str) -> None:
    module, x, symmetry, params = network(name)
    params[gain] = params[gain].clone()
    params[gain][2] = zero = -symmetry.added.get(gain, 0.0)
    before = outputs(module, params, x)
    representative, coordinates = symmetry.split(params)
    assert float(representative[gain][2]) == zero
    assert torch.allclose(outputs(module, representative, x), before, atol=1e-12)
    assert gap(symmetry.join(representative, coordinates), params) < 1e-13
    moved = symmetry.act(symmetry.random(generator(1), EVERY), params)
    assert torch.allclose(outputs(module, moved, x), before, atol=1e-10)


def test_half_precision_is_computed_wider_and_rounded_once() -> None:
    _, _, symmetry, params = network("decoder")
    half = {key: t.bfloat16() if t.is_floating_point() else t for key, t in params.items()}
    element = symmetry.identity().translated({"blocks.0.k.bias": torch.ones(8, dtype=torch.float64)})
    moved = symmetry.act(element, half)
    assert {key for key in half if not torch.equal(moved[key], half[key])} == {"blocks.0.k.bias"}
    assert all(moved[key].dtype == half[key].dtype for key in half)


def test_representatives_of_half_precision_are_kept_wider_and_lead_back_exactly() -> None:
    module, x, symmetry, params = network("decoder")
    half = {key: t.bfloat16() if t.is_floating_point() else t for key, t in params.items()}
    representative, coordinates = symmetry.split(half)
    assert representative["blocks.0.q.weight"].dtype == torch.float32
    wide = [{key: t.to(params[key].dtype) for key, t in one.items()} for one in (half, representative)]
    assert torch.allclose(outputs(module, wide[0], x), outputs(module, wide[1], x), atol=1e-5)
    joined = symmetry.join(representative, coordinates)
    assert all(torch.equal(joined[key].to(half[key].dtype), half[key]) for key in half)


class TwoReaders(nn.Module):
    """A layer that reads after a norm with a fixed gain, and a second time after another norm or without a norm."""

    def __init__(self, second: nn.Module) -> None:
        super().__init__()
        self.norm, self.second, self.layer = nn.LayerNorm(6), second, nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        out: Tensor = self.layer(y) + self.layer(self.second(x)) + y.abs().sum()  # which keeps the gain from going
        return out


@pytest.mark.parametrize("second", [nn.LayerNorm(6), nn.LayerNorm(6, elementwise_affine=False), nn.Identity()])
def test_a_layer_that_reads_behind_two_gains_is_left_alone(second: nn.Module) -> None:
    found = rg.discover(TwoReaders(second).double(), (torch.randn(3, 6).double(),), verify=False)
    assert "layer.weight.mean(1)" not in [family.name for family in found.translations]


@pytest.mark.parametrize(
    "setting",
    [
        {"are_states": True},
        {"has_start": True},
        {"change": lambda rows: torch.cat([torch.zeros_like(rows[:, :1]), rows], 1)},
        {"change": lambda rows: torch.cat([rows, 2 * rows], 1)},
        {"change": lambda rows: rows * torch.arange(rows.shape[1], dtype=rows.dtype)[:, None]},
    ],
    ids=["states", "zeros before the cell", "zeros before the layer", "two factors", "a factor for each step"],
)
def test_a_vector_on_all_rows_needs_the_same_bias_at_every_step(setting: dict[str, Any]) -> None:
    inputs = (torch.randint(0, 9, (3, 4)),)
    kept, found = (rg.discover(Rows(**given).double(), inputs, verify=False) for given in ({}, setting))
    assert "table.weight.mean(0)" in [family.name for family in kept.translations]
    assert "table.weight.mean(0)" not in [family.name for family in found.translations]


def _read_again(m: Any, x: Tensor) -> Tensor:
    """Return a network in which the layer that shifts units has a second reader."""
    return film(m, x) + m.shift(x[..., 4:6]).sum(-1, keepdim=True)


def _difference(m: Any, x: Tensor) -> Tensor:
    """Return differences of the scores that two queries give to one key."""
    k = m.k(x).mT
    out: Tensor = m.o((m.q(x) @ k - m.v(x) @ k).tanh())
    return out


def _twice(m: Any, x: Tensor) -> Tensor:
    """Return twice the scores minus the scores."""
    scores = m.q(x) @ m.k(x).mT
    out: Tensor = m.o((2.0 * scores - scores - 1.0).tanh())
    return out


def _powers(m: Any, x: Tensor) -> Tensor:
    """Return a factor that is a power of a power, forty times."""
    factor = x[..., :4].sigmoid()
    for _ in range(40):
        factor = factor * factor
    out: Tensor = m.o(factor * m.a(x[..., :4]))
    return out


def _branch(m: Any, x: Tensor, factor: Callable[[Any, Tensor], Any]) -> Tensor:
    h = m.a(x)
    out: Tensor = m.o((h + factor(m, x) * m.c(m.b(h).relu())).sigmoid())
    return out


def _branch_twice(m: Any, x: Tensor) -> Tensor:
    """Return a branch behind a factor, which another layer also reads without the factor."""
    h = m.a(x)
    c = m.c(m.b(h).relu())
    out: Tensor = m.o((h + m.t * c).sigmoid()) + c[..., :3].tanh()
    return out


def _factor_of_branch(m: Any, x: Tensor) -> Tensor:
    """Return a factor that is added to the branch that it multiplies, for inputs without a bias."""
    h = m.a(x).tanh()
    out: Tensor = m.o((h + m.t * m.c(m.b(h).relu()) + m.t).sigmoid())
    return out


def _branch_layers(*shape: int) -> dict[str, nn.Module | Tensor]:
    return {**{name: nn.Linear(6, 6) for name in "abc"}, "o": nn.Linear(6, 3), "t": torch.randn(shape)}


UNLIKE: dict[str, tuple[Callable[..., Tensor], Callable[[], dict[str, nn.Module | Tensor]], int]] = {
    "a factor along positions": (partial(_branch, factor=lambda m, x: m.t), partial(_branch_layers, 6, 1), 6),
    "a factor that inputs choose": (
        partial(_branch, factor=lambda m, x: x.mean(-1, keepdim=True) * m.t),
        _branch_layers,
        6,
    ),
    "a bounded factor": (partial(_branch, factor=lambda m, x: m.t.tanh()), _branch_layers, 6),
    "a branch that is read twice": (_branch_twice, _branch_layers, 6),
    "a factor that is added, too": (_factor_of_branch, _branch_layers, 6),
    "a divisor with an eps": (partial(positive, eps=1e-6), qkvo, 5),
    "a divisor of other features": (partial(positive, is_by_k=False), qkvo, 5),
    "a divisor of all positions": (partial(causal_features, is_causal=False), qkvo, 5),
    "mixed heads with a factor that inputs choose": (
        partial(talking, is_dynamic=True),
        lambda: {**qkvo(), "k": nn.Linear(5, 4, bias=False), "first": nn.Linear(2, 2), "second": nn.Linear(2, 2)},
        5,
    ),
    "differences of scores": (_difference, lambda: {**qkvo(), "o": nn.Linear(6, 4)}, 5),
    "twice the scores minus the scores": (_twice, lambda: {**qkvo(), "o": nn.Linear(6, 4)}, 5),
    "powers of powers": (_powers, lambda: {"a": nn.Linear(4, 4), "o": nn.Linear(4, 3)}, 5),
    "scale and shift by other codes": (partial(film, code=slice(3, 5)), film_layers, 6),
    "a shift without a bias": (film, lambda: film_layers(has_bias=False), 6),
    "a shift that is read again": (_read_again, film_layers, 6),
    "pieces with other steps": (
        partial(maxout, steps=torch.tensor([1.0, 2.0, 3.0])),
        lambda: {"a": nn.Linear(3, 12), "b": nn.Linear(4, 6), "o": nn.Linear(3, 2)},
        3,
    ),
}
"""Networks that look like networks through which a constant passes, but do not pass it."""


@pytest.mark.parametrize("name", UNLIKE)
def test_what_only_looks_as_if_a_constant_passed_is_seen(name: str) -> None:
    function, layers, width = UNLIKE[name]
    torch.manual_seed(0)
    found = rg.discover(Written(function, **layers()).double(), (torch.randn(3, 6, width).double(),), verify=False)
    homes = {family.entries.parameter for family in found.translations}
    assert not homes & {"k.bias", "v.bias", "a.bias", "c.bias"}


def test_what_does_not_fit_is_told_before_anything_is_moved() -> None:
    _, _, symmetry, params = network("fused attention")
    element = symmetry.random(generator(1), EVERY)
    name = "attention.out_proj.bias"  # which translations change, and no group
    lacking = {key: t for key, t in params.items() if key != name}
    for act in (symmetry.split, lambda one: symmetry.act(element, one)):
        with pytest.raises(KeyError, match=f"the parameters lack '{name}', which translations change or read"):
            act(lacking)
        with pytest.raises(ValueError, match=r"has shape \(7,\), but the symmetry expects \(8,\)"):
            act({**params, name: torch.zeros(7, dtype=torch.float64)})
    wrong = symmetry.identity().translated({"attention.in_proj_bias[8:16]": torch.zeros(3)})
    with pytest.raises(ValueError, match=r"of the element has shape \(3,\), but \(8,\) is expected"):
        symmetry.act(wrong, params)
    representative, coordinates = symmetry.split(params)
    with pytest.raises(KeyError, match="the coordinates lack"):
        symmetry.join(representative, {})
    with pytest.raises(ValueError, match="the coordinate"):
        symmetry.join(representative, dict.fromkeys(coordinates, torch.zeros(5)))


def test_translations_of_an_element_are_kept_with_it(tmp_path: object) -> None:
    _, _, symmetry, params = network("mixture")
    element = symmetry.random(generator(1), EVERY)
    path = f"{tmp_path}/a.alignment.safetensors"
    Alignment(symmetry, element).save(path)
    read = load_alignment(path)
    assert gap(symmetry.act(read.element, params), symmetry.act(element, params)) == 0
    with pytest.raises(ValueError, match="translates"):
        symmetry.compile(element)
    with pytest.raises(KeyError, match="there is no translation"):
        symmetry.act(symmetry.identity().translated({"other": torch.zeros(3)}), params)


def test_the_meta_device_suffices() -> None:
    with torch.device("meta"):
        module = Tokens(Attention(), Feedforward())
    found = rg.discover(module, (torch.zeros(2, 5, dtype=torch.long),))
    assert sum(family.size for family in found.translations) == NETS["decoder"][2]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('["router.bias", [3], [1], 0]', '["router.bias", [4], [1], 0]'),
        ('["router.bias", [3], [1], 0]', '["nothing", [3], [1], 0]'),
        ('["router.bias", [3], [1], 0]', '["router.bias", [3], [1], -1]'),
        ('["router.bias", [3], [1], 0]', '["router.bias", [3], [0], 0]'),
        ('["router.bias", [3], [1], 0]', '["router.bias", [3, 1000000000000], [1, 0], 0]'),
        ('"router.bias.mean(0)"', '"router.weight.mean(0)"'),
        ('"constant": [0]', '"constant": [7]'),
        ('"constant": [0]', '"constant": "all"'),
    ],
)
def test_damaged_translations_are_refused_in_a_sentence(old: str, new: str) -> None:
    _, _, symmetry, _ = network("mixture")
    text = re.sub(r"\s+", " ", symmetry.to_json()).replace("[ ", "[").replace(" ]", "]")
    assert old in text
    with pytest.raises(ValueError, match=r"translation"):
        rg.Symmetry.from_json(text.replace(old, new))


def test_discovery_leaves_the_module_alone() -> None:
    module, x, _, _ = network("batch norm")
    before = copy.deepcopy(module.state_dict())
    rg.discover(module, (x,))
    assert all(torch.equal(before[key], tensor) for key, tensor in module.state_dict().items())


def test_values_alone_side_by_side_keep_their_offset() -> None:
    """A concatenation of a single value passes offsets like any other concatenation."""

    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.out = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.out(torch.cat([self.into(x)], -1))
            return out

    found = rg.discover(Alone(), (torch.randn(5, 3),))
    assert [family.parameters for family in found.translations] == [("into.bias", "out.bias")]


def anew(module: nn.Module, params: Params, x: Tensor) -> Params:
    """Return the network with the statistics of the given inputs."""
    copied = copy.deepcopy(module)
    copied.load_state_dict(params)
    for layer in copied.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.momentum = 1.0
    copied.train()(x)
    return {key: tensor.detach() for key, tensor in copied.state_dict().items()}


@pytest.mark.parametrize("name", ["batch norm", "residual"])
def test_statistics_tell_networks_apart_but_no_draw_moves_them_alone(name: str) -> None:
    module, x, symmetry, params = network(name)
    stored = [family.name for family in symmetry.translations if family.is_stored_only]
    assert len(stored) == 2 * sum(isinstance(layer, nn.BatchNorm2d) for layer in module.modules())
    assert "running_var plus eps is one (statistics as stored)" in str(symmetry)
    assert not {*symmetry.random(generator(1), EVERY).translation} & {*stored}
    vectors = {key: drawn(symmetry, 1).translation[key] for key in stored}
    moved = symmetry.act(symmetry.identity().translated(vectors), params)
    before = outputs(module, params, x)
    assert torch.allclose(outputs(module, moved, x), before, atol=1e-12)
    assert not torch.allclose(outputs(module, anew(module, moved, x), x), outputs(module, anew(module, params, x), x))
    assert "another gauge" in str(rg.compare(params, moved, symmetry, generator=generator(0)).verdict)
    assert orbit_distance(params, moved, symmetry) < 1e-11
    assert orbit_distance(params, moved, symmetry.on_data) > 0.01
    # What is left out moves with data, and folding keeps to it.
    follows = symmetry.act(symmetry.random(generator(1), ("translation", "sign", "permutation")), params)
    again = outputs(module, anew(module, follows, x), x)
    assert torch.allclose(again, outputs(module, anew(module, params, x), x), atol=1e-11)
    assert symmetry.on_data.dimension == symmetry.dimension
    assert all(torch.equal(symmetry.on_data.split(params)[0][key], params[key]) for key in params if "var" in key)
    folded = rg.fold(params, module, (x,), symmetry=symmetry).params
    assert all(torch.equal(folded[key], params[key]) for key in params if "running_var" in key)


def test_gains_behind_batch_norms_become_one_without_statistics() -> None:
    module, x, symmetry, params = network("residual")
    representative, coordinates = symmetry.on_data.split(params)
    assert bool((representative["norms.0.weight"] == 1).all())
    assert "norms.0.weight" in coordinates
    data = [outputs(module, anew(module, one, x), x) for one in (params, representative)]
    assert torch.allclose(*data, atol=1e-11)


@pytest.mark.parametrize(("variance", "gain"), [(0.0, 1.0), (1e-9, -1.0), (-5e-6, 0.5), (1.0, 0.0)])
def test_small_variances_and_gains_of_any_sign_are_no_harm(variance: float, gain: float) -> None:
    module, x, symmetry, params = network("residual")
    for key, value in (("norms.0.running_var", variance), ("norms.1.weight", gain), ("norms.2.weight", -1.0)):
        params[key] = params[key].clone()
        params[key][1] = value
    before = outputs(module, params, x)
    representative, coordinates = symmetry.split(params)
    assert torch.allclose(outputs(module, representative, x), before, atol=1e-10)
    assert float((representative["norms.0.running_var"] + 1e-5 - 1).abs().max()) < 1e-12
    assert gap(symmetry.join(representative, coordinates), params) < 1e-12
    moved = symmetry.act(drawn(symmetry, 1), params)
    assert torch.allclose(outputs(module, moved, x), before, atol=1e-9)
    if gain:
        assert gap(symmetry.act(symmetry.inverse(drawn(symmetry, 1)), moved), params) < 1e-8


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm1d(4, affine=False), nn.BatchNorm1d(4, track_running_stats=False), nn.InstanceNorm1d(4)]
)
def test_norms_without_gains_or_statistics_have_none_to_trade(norm: nn.Module) -> None:
    module = nn.Sequential(nn.Linear(3, 4), norm, nn.ReLU(), nn.Linear(4, 2)).double()
    found = rg.discover(module, (torch.randn(5, 3, dtype=torch.float64),), verify=False)
    assert not any(family.is_stored_only for family in found.translations)


def test_a_norm_that_is_used_twice_keeps_its_statistics() -> None:
    norm, first, second = nn.BatchNorm1d(4), nn.Linear(3, 4), nn.Linear(4, 4)
    module = nn.Sequential(first, norm, nn.ReLU(), second, norm, nn.ReLU(), nn.Linear(4, 2)).double()
    found = rg.discover(module, (torch.randn(5, 3, dtype=torch.float64),))
    assert not any(family.is_stored_only for family in found.translations)


class Places(nn.Module):
    """Tokens and a table of positions, of which short inputs read the first rows."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.table = nn.Embedding(7, 8), nn.Parameter(torch.randn(6, 8))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.norm(self.tokens(x) + self.table[: x.shape[1]]).relu())
        return result


def test_a_table_of_which_some_rows_are_not_read_is_translated_as_a_whole() -> None:
    module, x = Places().double().eval(), torch.tensor([[0, 1, 2], [6, 4, 3]])
    symmetry, params = rg.discover(module, (x,)), {n: t.detach() for n, t in module.state_dict().items()}
    assert "table.mean(0)" in [family.name for family in symmetry.translations]
    moved = symmetry.act(symmetry.random(generator(1), EVERY), params)
    whole = torch.arange(6).unsqueeze(0)
    for inputs in (x, whole):
        assert torch.allclose(outputs(module, moved, inputs), outputs(module, params, inputs), atol=1e-11)
    assert gap(symmetry.join(*symmetry.split(params)), params) < 1e-14


def test_a_layer_that_is_called_under_two_names_is_translated_under_both() -> None:
    """No gain scales the stream, so the second name of its writer has a separate translation."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(6, 6)
            self.two, self.norm, self.out = self.one, nn.LayerNorm(6), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.one(torch.nn.functional.gelu(x)) + self.two(torch.nn.functional.gelu(-x))
            out: Tensor = self.out(torch.nn.functional.gelu(self.norm(x)))
            return out

    module, x = Twice().eval(), torch.randn(5, 6)
    symmetry = rg.discover(module, (x,))
    assert ("one.weight", "two.weight") in symmetry.tied
    assert [family.name for family in symmetry.translations] == ["one.weight.mean(0)", "one.bias.mean(0)"]
    params = {name: tensor.detach().double() for name, tensor in module.state_dict().items()}
    moved = symmetry.act(symmetry.random(generator(0), parts=("translation",)), params)
    representative, _ = symmetry.split(moved)
    for one in (moved, representative):
        assert not torch.equal(one["one.weight"], params["one.weight"])
        assert torch.equal(one["one.weight"], one["two.weight"])
        assert torch.equal(one["one.bias"], one["two.bias"])
    assert torch.allclose(representative["one.bias"].mean(), torch.zeros((), dtype=torch.float64), atol=1e-12)


def test_a_layer_scale_of_channels_first_is_a_vector() -> None:
    """The gain between a writer and a norm has the shape [channel, 1, 1], as in ConvNeXt."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.down = nn.Conv2d(9, 6, 1), nn.Linear(6, 6)
            self.scale, self.norm, self.out = nn.Parameter(torch.randn(6, 1, 1)), nn.LayerNorm(6), nn.Linear(6, 7)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            y = self.down(torch.nn.functional.gelu(x.permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
            out: Tensor = self.out(self.norm((x + self.scale * y).permute(0, 2, 3, 1)))
            return out

    module, x = Block().eval(), torch.randn(2, 9, 3, 3)
    symmetry = rg.discover(module, (x,))
    sizes = {family.name: family.size for family in symmetry.translations}
    assert sizes["down.weight.mean(0)"] == 6
    assert sizes["down.bias.mean(0)"] == 1
    assert symmetry.verify(module, (x,), generator=generator(1)).ok
    assert rg.discovery.nullity(module, (x,), symmetry=symmetry, generator=generator(0)).missing == 0

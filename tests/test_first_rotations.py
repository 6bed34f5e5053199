"""Initial rotations come from products in which all other groups cancel."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn
from translation_nets import generator

import regauge as rg
from regauge.alignment.engine.climbs import climb
from regauge.alignment.engine.first_rotations import TwoSided, find_products, first_rotations
from regauge.alignment.methods.weight_matching import random_isometry
from regauge.core.element import Value
from regauge.core.params import Params, batch_of_one
from regauge.nets.transformer import GPT, Llama, ViT, initialize_transformer

BLOCK = ["attention.key * attention.query", "attention.out * attention.value", "feed_forward.down * feed_forward.up"]
"""The products of a block. Queries and values, or gates and the gated values, share at most a permutation."""
Case = tuple[rg.Symmetry, str, Params]


def modules() -> dict[str, tuple[nn.Module, Tensor]]:
    """Return modules with learned positions, with rotary positions and shared keys, and for images."""
    tokens = torch.arange(8).reshape(2, 4)
    return {
        "GPT": (GPT(11, 8, width=16, layers=2, heads=2), tokens),
        "Llama": (Llama(11, width=16, layers=2, heads=4, kv_heads=2), tokens),
        "ViT": (ViT(8, 4, width=16, layers=2, heads=2), torch.randn(2, 1, 8, 8, generator=generator(0))),
    }


def case(name: str) -> Case:
    """Return the symmetry of representatives, its rotated group, and a representative in float64."""
    module, x = modules()[name]
    assert isinstance(module, GPT | Llama | ViT)
    symmetry = rg.discover(module.eval(), (x,))
    params = {n: t.double() for n, t in initialize_transformer(module, generator(1)).items()}
    params = {n: t + 0.1 * torch.randn(t.shape, generator=generator(2)) for n, t in params.items()}
    (stream,) = symmetry.rotatable
    return symmetry.on_representatives(rotate=True), stream, symmetry.split(params)[0]


def products(symmetry: rg.Symmetry, stream: str) -> list[TwoSided]:
    own = {n: local for n, local in symmetry.sites.items() if any(site.group.name == stream for site in local)}
    return find_products(stream, own, symmetry.shapes)


def values(found: list[TwoSided], params: Mapping[str, Tensor]) -> list[Tensor]:
    return [one.of(batch_of_one(params))[0] for one in found]


@pytest.mark.parametrize("name", ["GPT", "Llama", "ViT"])
def test_products_are_those_in_which_all_else_cancels(name: str) -> None:
    symmetry, stream, params = case(name)
    found = products(symmetry, stream)
    names = [sorted(part.name.removesuffix(".weight") for part in (one.first, one.second)) for one in found]
    assert sorted(" * ".join(pair).replace("blocks.0.", "") for pair in names if "blocks.0" in pair[0]) == BLOCK
    assert len(found) == 2 * len(BLOCK)
    element = symmetry.random(generator(3), ("permutation", "sign", "linear"))
    matrix = element[stream].matrix
    assert matrix is not None
    others = element.replace(stream, symmetry.identity()[stream])
    before = values(found, params)
    for x, y, z in zip(before, *(values(found, symmetry.act(g, params)) for g in (others, element)), strict=True):
        assert torch.allclose(x, y, atol=1e-12)
        assert torch.allclose(matrix @ x @ matrix.mT, z, atol=1e-12)
        assert float((x - z).norm() / x.norm()) > 0.1


@pytest.mark.parametrize("name", ["GPT", "Llama", "ViT"])
def test_the_first_rotation_of_a_copy_is_that_which_moved_it(name: str) -> None:
    """The result does not depend on other transformations. A batch gives the same result as its pairs."""
    symmetry, stream, params = case(name)
    elements = [symmetry.random(generator(seed), ("permutation", "sign", "linear")) for seed in (4, 5)]
    moved = [symmetry.act(element, params) for element in elements]
    first = {n: t.expand(2, *t.shape) for n, t in params.items()}
    second = {n: torch.stack([one[n] for one in moved]) for n in params}
    found = first_rotations([symmetry[stream]], symmetry.sites, first, second)[stream].matrix
    assert found is not None
    for k, element in enumerate(elements):
        matrix = element[stream].matrix
        assert matrix is not None
        assert float((found[k] @ matrix - torch.eye(len(matrix))).abs().max()) < 1e-6
        alone = first_rotations([symmetry[stream]], symmetry.sites, batch_of_one(params), batch_of_one(moved[k]))
        assert alone[stream].matrix is not None
        assert torch.allclose(alone[stream].matrix[0], found[k], atol=1e-9)


def test_the_first_rotation_of_strangers_does_not_depend_on_what_else_moves_them() -> None:
    symmetry, stream, params = case("GPT")
    other = {n: t + 0.2 * torch.randn(t.shape, generator=generator(6), dtype=t.dtype) for n, t in params.items()}
    element = symmetry.random(generator(7), ("permutation", "sign", "linear"))
    element = element.replace(stream, symmetry.identity()[stream])
    x, y = (
        first_rotations([symmetry[stream]], symmetry.sites, batch_of_one(params), batch_of_one(one))[stream].matrix
        for one in (other, symmetry.act(element, other))
    )
    assert x is not None
    assert y is not None
    assert torch.allclose(x, y, atol=1e-6)


def test_a_climb_begins_at_the_first_rotation_and_one_without_products_at_the_barycenter() -> None:
    symmetry, stream, params = case("GPT")
    element = random_isometry(symmetry, generator(8))
    a, b = batch_of_one(params), batch_of_one(symmetry.act(element, params))
    assert first_rotations([symmetry[stream]], {n: symmetry.sites[n] for n in ("positions", "head.weight")}, a, b) == {}
    turned: Value = first_rotations([symmetry[stream]], symmetry.sites, a, b)[stream]
    own = [{n: one[n] for n in symmetry.sites} for one in (a, b)]
    ended = climb(symmetry, *own, is_from_barycenter=True, max_sweeps=1).element[stream]
    assert turned.matrix is not None
    assert ended.matrix is not None
    assert torch.allclose(turned.matrix, ended.matrix, atol=1e-6)

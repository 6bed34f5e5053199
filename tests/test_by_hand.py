"""An explicitly written symmetry needs no sizes: its elements are created when they act on parameters."""

import pytest
import torch
from torch import nn

import regauge as rg

AXES = {
    "0.weight": ("a", None),
    "0.bias": ("a",),
    "2.weight": ("b", "a"),
    "2.bias": ("b",),
    "4.weight": (None, "b"),
}


def setup() -> tuple[nn.Module, rg.Symmetry, rg.Params]:
    module = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    symmetry = rg.Symmetry.from_axes(AXES, kinds={"a": "scaled", "b": "signed"})
    return module, symmetry, {name: t.detach() for name, t in module.state_dict().items()}


def test_elements_act_before_any_size_is_known() -> None:
    module, symmetry, params = setup()
    generator = torch.Generator().manual_seed(0)
    g, h = symmetry.random(generator), symmetry.random(generator)
    x = torch.randn(4, 3, dtype=torch.float64)
    expected = module(x)
    for element in (g, symmetry.compose(g, h), symmetry.inverse(h), symmetry.identity()):
        found = torch.func.functional_call(module, symmetry.act(element, params), x)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    twice = symmetry.act(g, symmetry.act(h, params))
    once = symmetry.act(symmetry.compose(g, h), params)
    back = symmetry.act(symmetry.inverse(g), symmetry.act(g, params))
    for name in params:
        torch.testing.assert_close(twice[name], once[name], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(back[name], params[name], rtol=1e-12, atol=1e-12)
    assert not torch.equal(symmetry.act(g, params)["0.weight"], symmetry.act(h, params)["0.weight"])


def test_the_same_element_acts_alike_every_time_and_in_place() -> None:
    _, symmetry, params = setup()
    element = symmetry.random(torch.Generator().manual_seed(0), batch=(3,))
    first, second = symmetry.act(element, params), symmetry.act(element, params)
    assert first["0.weight"].shape == (3, 6, 3)
    assert all(torch.equal(first[name], second[name]) for name in params)
    single = symmetry.random(torch.Generator().manual_seed(1))
    moved = {name: t.clone() for name, t in params.items()}
    symmetry.act_(single, moved)
    assert all(torch.equal(moved[name], t) for name, t in symmetry.act(single, params).items())


def test_aligns_and_verifies() -> None:
    module, symmetry, params = setup()
    generator = torch.Generator().manual_seed(0)
    assert symmetry.verify(module, (torch.randn(4, 3),), generator=generator).ok
    other = symmetry.act(symmetry.random(generator, parts=["permutation", "sign"]), params)
    result = rg.align(params, other, symmetry, method=rg.WeightMatching(), generator=generator)
    for name in params:
        torch.testing.assert_close(result.params[name], params[name], rtol=1e-12, atol=1e-12)


def test_says_what_is_not_known_yet() -> None:
    _, symmetry, params = setup()
    element = symmetry.random(torch.Generator())
    with pytest.raises(ValueError, match=r"are not known yet.*symmetry.bind\(params\)"):
        element["a"]
    with pytest.raises(ValueError, match=r"parts \['size'\] are unknown"):
        symmetry.random(torch.Generator(), parts=["size"])
    bound = symmetry.bind(params)
    assert bound.is_sized
    assert [group.size for group in bound.groups] == [6, 5]

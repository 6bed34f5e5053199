"""An element that is compiled to one gather acts like the element, also in place."""

import pytest
import torch
from torch import nn

import regauge as rg


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def symmetry_of(module: nn.Module) -> rg.Symmetry:
    return rg.discover(module, (torch.randn(4, 3, dtype=torch.float64),))


def stacked(params: rg.Params, count: int) -> rg.Params:
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.randn((count, *t.shape), generator=generator, dtype=torch.float64) for name, t in params.items()
    }


@pytest.mark.parametrize("batch", [(), (7,)])
@pytest.mark.parametrize("models", [None, 7])
def test_equals_the_action(batch: tuple[int, ...], models: int | None) -> None:
    module = network()
    symmetry = symmetry_of(module)
    element = symmetry.random(torch.Generator().manual_seed(0), batch=batch)
    params = dict(module.state_dict()) if models is None else stacked(dict(module.state_dict()), models)
    expected, found = symmetry.act(element, params), symmetry.compile(element)(params)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor.expand(found[name].shape), rtol=1e-15, atol=1e-15)


def test_carries_the_shifts_of_sine_units() -> None:
    axes = {"0.weight": ("h", None), "0.bias": ("h",), "2.weight": (None, "h")}
    params = {"0.weight": torch.randn(5, 2), "0.bias": torch.randn(5), "2.weight": torch.randn(1, 5)}
    params = {name: t.double() for name, t in params.items()}
    symmetry = rg.Symmetry.from_axes(axes, kinds={"h": "dihedral"}, omegas={"h": 30.0}).bind(params)
    element = symmetry.random(torch.Generator().manual_seed(3))
    moved, expected = symmetry.compile(element)(params), symmetry.act(element, params)
    for name in params:
        torch.testing.assert_close(moved[name], expected[name], rtol=1e-14, atol=1e-14)
    assert not torch.equal(moved["0.bias"].abs().sort()[0], params["0.bias"].abs().sort()[0])


def test_refuses_matrices() -> None:
    module = nn.Sequential(nn.Linear(3, 6), nn.Linear(6, 2))
    symmetry = rg.discover(module, (torch.randn(4, 3),))
    with pytest.raises(ValueError, match=r"act by matrices.*use `symmetry.act`"):
        symmetry.compile(symmetry.identity())


def test_refuses_mixed_dtypes() -> None:
    module = network()
    symmetry = symmetry_of(module)
    params = dict(module.state_dict())
    params["0.weight"] = params["0.weight"].float()
    with pytest.raises(ValueError, match="in one dtype and on one device"):
        symmetry.compile(symmetry.identity())(params)


def test_in_place_equals_the_action_and_keeps_the_storage() -> None:
    module = network()
    symmetry = symmetry_of(module)
    params = {name: t.clone() for name, t in module.state_dict().items()}
    element = symmetry.random(torch.Generator().manual_seed(0))
    expected = symmetry.act(element, params)
    addresses = {name: t.data_ptr() for name, t in params.items()}
    symmetry.act_(element, params)
    assert {name: t.data_ptr() for name, t in params.items()} == addresses
    assert all(torch.equal(params[name], expected[name]) for name in params)


def test_a_checkpoint_may_leave_out_all_but_one_name_of_a_tied_tensor() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.read, self.hidden = nn.Embedding(7, 4), nn.Linear(4, 6)
            self.back, self.write = nn.Linear(6, 4), nn.Linear(4, 7, bias=False)
            self.write.weight = self.read.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.write(self.back(self.hidden(self.read(x)).relu()))

    module = Tied()
    symmetry = rg.discover(module, (torch.arange(6).reshape(2, 3),))
    assert ("read.weight", "write.weight") in symmetry.tied
    element = symmetry.random(torch.Generator().manual_seed(0))
    full = dict(module.state_dict())
    short = {name: t for name, t in full.items() if name != "write.weight"}
    expected, found = symmetry.act(element, full), symmetry.act(element, short)
    assert "write.weight" not in found
    assert all(torch.equal(found[name], expected[name]) for name in short)
    with pytest.raises(KeyError, match=r"lack 'back\.weight'"):
        symmetry.act(element, {name: t for name, t in full.items() if name != "back.weight"})

"""Intermediate values transform as their placements state, for every element, and no placement is reported wrongly."""

import dataclasses
from typing import Any

import pytest
import torch
from coverings import every_other
from models import CASES, Case, symmetry_of
from torch import Tensor, nn

import regauge as rg
from regauge.core.element import PARTS
from regauge.core.probe import perturb, relative_change
from regauge.discovery import Activations, activations

NAMES = (
    *("mlp_relu", "mlp_tanh", "mlp_sine", "mlp_linear", "siren", "cnn_flatten", "resnet20_batch_B", "glu", "lstm"),
    *("resnet20_group_B", "densenet", "grouped_conv", "depthwise_multiplier", "shuffle_unit", "squeeze_excite"),
    *("concatenation", "tied_autoencoder", "called_twice", "torch_transformer", "hf_gpt2", "hf_llama"),
    *("hf_mixtral",),
)
BY_NAME = {case.name: case for case in CASES}
ROUNDS = 1e-4
"""The relative error of models that compute internally in float32 (norms of language models)."""
EXACT = 1e-8
"""The relative error of all other models, in float64."""


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


@dataclasses.dataclass(frozen=True)
class Found:
    case: Case
    module: nn.Module
    symmetry: rg.Symmetry
    activations: Activations
    inputs: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def params(self) -> rg.Params:
        state = {name: t.detach() for name, t in self.module.state_dict().items()}
        return perturb(state, set(self.symmetry.buffers), generator(3), 0.2)

    @property
    def tolerance(self) -> float:
        return ROUNDS if self.case.name.startswith("hf_") else EXACT


@pytest.fixture(scope="module", params=every_other(NAMES, part=0, among=BY_NAME))
def found(request: pytest.FixtureRequest) -> Found:
    case = BY_NAME[request.param]
    torch.manual_seed(0)
    module = case.module().double().eval()
    inputs = tuple(double(x) for x in case.inputs())
    kwargs = {key: double(x) for key, x in case.kwargs().items()}
    symmetry = symmetry_of(case)
    return Found(
        case, module, symmetry, activations(module, inputs, symmetry, kwargs, outputs=case.outputs), inputs, kwargs
    )


def test_every_value_moves_as_its_placements_say(found: Found) -> None:
    params, values = found.params, found.activations
    assert not values.notes
    before = values.values(params, found.inputs, found.kwargs)
    for seed in range(2):
        element = found.symmetry.random(generator(seed), PARTS)
        after = values.values(found.symmetry.act(element, params), found.inputs, found.kwargs)
        moved = values.symmetry.act(element, before)
        errors = {name: relative_change([moved[name]], [after[name]]) for name in moved}
        assert max(errors.values()) < found.tolerance, errors


def test_values_that_layers_read_show_every_group_that_any_value_shows(found: Found) -> None:
    seen = {group.name for group in found.activations.symmetry.groups if group.placements}
    read = set(found.activations.read)
    shown = {g.name for g in found.activations.symmetry.groups if read & {p.parameter for p in g.placements}}
    assert shown == seen
    assert read <= set(found.activations.symmetry.shapes)
    # The first layers of a recurrent operator and the experts of a batch are inside of one operator.
    hidden = {"lstm": 1, "hf_mixtral": 2}.get(found.case.name, 0)
    assert len(found.symmetry.groups) - len(seen) == hidden


def test_what_layers_read_alone_moves_as_it_does_among_all_values(found: Found) -> None:
    case, full = found.case, found.activations
    few = activations(found.module, found.inputs, found.symmetry, found.kwargs, outputs=case.outputs, only_read=True)
    assert (few.read, few.notes) == (full.read, full.notes)
    assert set(few.symmetry.shapes) == set(full.read)
    for group in few.symmetry.groups:
        assert group.placements == tuple(p for p in full.symmetry[group.name].placements if p.parameter in full.read)


def test_a_value_is_the_tensor_that_the_module_computes() -> None:
    module = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3)).double()
    x = torch.randn(4, 5, dtype=torch.float64, generator=generator(0))
    found = activations(module, (x,), rg.discover(module, (x,)))
    assert found.read == ("%relu",)
    params = {name: t.detach() for name, t in module.state_dict().items()}
    assert torch.equal(found.values(params, (x,), names=["%relu"])["%relu"], module[:2](x))


def test_of_copies_only_the_first_counts_as_read() -> None:
    module = nn.Sequential(
        *(nn.Conv2d(2, 6, 3), nn.ReLU(), nn.Dropout(), nn.Flatten(), nn.Linear(6 * 4, 5), nn.Tanh(), nn.Linear(5, 2))
    ).eval()
    x = torch.randn(3, 2, 4, 4, generator=generator(0))
    found = activations(module, (x,), rg.discover(module, (x,)))
    assert found.read == ("%relu", "%tanh")
    assert set(found.symmetry.shapes) > {"%relu", "%tanh"}


def test_sine_units_are_read_behind_the_sine() -> None:
    case = BY_NAME["siren"]
    module, inputs = case.module(), case.inputs()
    found = activations(module, inputs, rg.discover(module, inputs))
    for group in found.symmetry.groups:
        read = [p for p in group.placements if p.parameter in found.read]
        assert len(read) == 1
        assert all(p.shift == (0.0,) and p.parity == (1,) for p in read)
        assert any(p.shift != (0.0,) for p in group.placements)


def mlp(dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Tensor, rg.Symmetry]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2)).to(dtype)
    x = torch.randn(3, 4, generator=generator(1)).to(dtype)
    return module, x, rg.discover(module, (x,))


AXES = {
    **{"0.weight": ("h1", None), "0.bias": ("h1",), "2.weight": ("h2", "h1"), "2.bias": ("h2",)},
    "4.weight": (None, "h2"),
}


@pytest.mark.parametrize("kinds", [{}, {"h1": "signed"}, {"h2": "scaled"}, {"h1": "signed", "h2": "scaled"}])
def test_a_symmetry_by_hand_with_other_names_and_fewer_families_acts_alike(kinds: dict[str, Any]) -> None:
    module, x, _ = mlp()
    symmetry = rg.Symmetry.from_axes(AXES, kinds=kinds).bind(dict(module.state_dict()))
    found = activations(module, (x,), symmetry)
    assert not found.notes
    assert [(g.name, g.signs, g.scales, bool(g.placements)) for g in found.symmetry.groups] == [
        ("h1", int(kinds.get("h1") == "signed"), 0, True),
        ("h2", 0, int(kinds.get("h2") == "scaled"), True),
    ]
    params = {name: t.detach() for name, t in module.state_dict().items()}
    element = symmetry.random(generator(2))
    before, after = (found.values(p, (x,)) for p in (params, symmetry.act(element, params)))
    moved = found.symmetry.act(element, before)
    assert all(torch.allclose(moved[name], after[name]) for name in moved)


def test_a_part_of_a_symmetry_moves_its_part() -> None:
    module, x, symmetry = mlp()
    part = dataclasses.replace(symmetry, groups=symmetry.groups[1:])
    found = activations(module, (x,), part)
    assert [group.name for group in found.symmetry.groups] == [symmetry.groups[1].name]
    assert not found.notes
    assert "%relu" in found.symmetry.shapes
    assert "%tanh" not in found.symmetry.shapes


def test_a_group_that_discovery_does_not_know_is_named_and_what_it_spoils_is_left_out() -> None:
    module, x, _ = mlp()
    wrong = rg.Symmetry.from_axes({**AXES, "0.bias": (None,)}).bind(dict(module.state_dict()))
    for only_read in (False, True):
        found = activations(module, (x,), wrong, only_read=only_read)
        assert "discovery does not find group 'h1'" in found.notes[0]
        assert not found.symmetry["h1"].placements
        assert "do not change as discovery predicts" in found.notes[1]
        assert "%relu" not in found.symmetry.shapes


def test_a_kind_that_discovery_does_not_find_is_not_guessed() -> None:
    module, x, _ = mlp()
    found = activations(module, (x,), rg.Symmetry.from_axes(AXES, kinds={"h1": "scaled", "h2": "signed"}))
    assert len(found.notes) >= 2
    assert not any(group.placements for group in found.symmetry.groups)


def test_a_module_on_the_meta_device_is_traced_and_runs_given_parameters() -> None:
    module, x, symmetry = mlp(torch.float32)
    params = {name: t.detach() for name, t in module.state_dict().items()}
    found = activations(module.to("meta"), (x,), symmetry)
    element = symmetry.random(generator(2))
    before, after = (found.values(p, (x,)) for p in (params, symmetry.act(element, params)))
    moved = found.symmetry.act(element, before)
    assert moved
    assert all(torch.allclose(moved[name], after[name], atol=1e-5) for name in moved)


def test_inputs_that_the_module_cannot_take_are_refused() -> None:
    module, x, symmetry = mlp()
    with pytest.raises(ValueError, match="fails on the example inputs"):
        activations(module, (x[:, :3],), symmetry)

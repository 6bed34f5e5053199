"""Architectures: built from text, identified by their tensors, and equal after a round trip."""

from pathlib import Path

import pytest
import torch
from torch import nn

from regauge.checkpoints.formats.headers import TensorSpec, layout_of
from regauge.nets.mlp import ResidualMLP, mlp
from regauge.storage import Store
from regauge.storage.architecture import MOVED, Architecture, import_object

CASES = (
    Architecture("MLP", "regauge.nets.mlp:mlp", {"widths": [5, 4, 3], "activation": {"import": "torch:tanh"}}),
    Architecture("SIREN", "regauge.nets.siren:Siren", {"in_features": 2, "width": 8, "out_features": 3, "depth": 3}),
    Architecture("BatchNorm", "torch.nn:BatchNorm2d", {"num_features": 6}),
    Architecture("only tensors", None, {}, (TensorSpec("w", (2, 3), torch.float16), TensorSpec("n", (), torch.int64))),
)


class Stack(nn.Module):
    """A user's module with a parameter before its variadic parameter."""

    def __init__(self, activation: nn.Module, *widths: int) -> None:
        super().__init__()
        self.body = mlp(*widths, activation=activation)


def not_a_module(size: int) -> int:
    return size


@pytest.mark.parametrize("architecture", CASES, ids=lambda a: a.name)
def test_round_trip(architecture: Architecture) -> None:
    text = architecture.to_json()
    again = Architecture.from_json(text)
    assert again == architecture
    assert hash(again) == hash(architecture)
    assert again.to_json() == text


def test_equal_architectures_have_equal_hashes() -> None:
    settings = {"in_features": 2, "width": 8, "out_features": 3, "depth": 3, "omega": 30}
    other = dict(reversed(settings.items())) | {"omega": 30.0}
    first, second = (Architecture("SIREN", "regauge.nets.siren:Siren", own) for own in (settings, other))
    assert list(first.settings) != list(second.settings)
    assert first == second
    assert hash(first) == hash(second)
    assert len({first, second, *CASES}) == 1 + len(CASES)


@pytest.mark.parametrize("architecture", CASES[:3], ids=lambda a: a.name)
def test_the_layout_is_that_of_the_module(architecture: Architecture) -> None:
    state = architecture.module().state_dict()
    assert architecture.layout == layout_of(state)
    assert not any(tensor.is_meta for tensor in state.values())
    assert architecture.size == sum(tensor.numel() for tensor in state.values())


def test_settings_reach_the_factory() -> None:
    x = torch.randn(7, 5)
    module = CASES[0].module()
    assert isinstance(module, type(mlp(1, 1)))
    expected = module.layers[1](torch.tanh(module.layers[0](x)))
    assert torch.equal(module(x), expected)
    other = Architecture("MLP", "regauge.nets.mlp:mlp", {"widths": [5, 4, 3]})
    assert other != CASES[0]
    stack = Architecture(
        "own", f"{__name__}:Stack", {"activation": {"import": "torch:sin"}, "widths": [3, 2, 1]}
    ).module()
    assert [spec.shape for spec in layout_of(stack.state_dict())] == [(2, 3), (2,), (1, 2), (1,)]


def test_reading_the_text_form_imports_nothing() -> None:
    text = CASES[0].to_json().replace("regauge.nets.mlp:mlp", "absent_package:make")
    architecture = Architecture.from_json(text)
    assert architecture.layout == CASES[0].layout
    with pytest.raises(ValueError, match=r"'absent_package:make' cannot be imported"):
        architecture.module()


@pytest.mark.parametrize(
    ("factory", "settings", "message"),
    [
        (None, {}, "neither a factory nor a layout"),
        ("mlp", {}, "write package.module:name"),
        ("torch:absent", {}, "'torch' has no 'absent'"),
        ("regauge.nets.mlp:absent", {}, "'regauge.nets.mlp:absent' is no longer part of regauge"),
        ("torch:pi", {}, "is a float, not a function"),
        ("regauge.nets.mlp:mlp", {"width": [3, 2]}, "cannot be called with .*width"),
        ("regauge.nets.mlp:mlp", {"widths": [3]}, "needs at least inputs and outputs"),
        ("regauge.nets.mlp:mlp", {"widths": {3, 2}}, "are not plain JSON"),
        ("regauge.nets.mlp:mlp", {"widths": [3, float("nan")]}, "are not plain JSON"),
        (f"{__name__}:not_a_module", {"size": 3}, "returns a int; it must return"),
    ],
)
def test_what_cannot_be_built(factory: str | None, settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Architecture("wrong", factory, settings)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "not an architecture"),
        ('{"format": "regauge.architecture", "version": 2}', "has version 2"),
        ('{"format": "regauge.architecture", "version": 1}', "malformed"),
        (CASES[0].to_json().replace("float32", "float33"), "'float33' is not a dtype"),
    ],
)
def test_what_cannot_be_read(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Architecture.from_json(text)


RESIDUAL = {"in_features": 4, "stream": 3, "hidden": 5, "blocks": 1, "classes": 2}


def test_factories_of_old_stores_are_found_where_they_are_now() -> None:
    for old, new in MOVED.items():
        assert import_object(old) is import_object(new)
    old = Architecture("residual", "regauge.nets.residual_mlp:ResidualMLP", RESIDUAL)
    assert old.layout == Architecture("residual", "regauge.nets.mlp:ResidualMLP", RESIDUAL).layout


class OwnMLP(ResidualMLP):
    """A user's copy of a network that regauge had in an earlier version."""


@pytest.mark.parametrize(
    "factory",
    [
        "regauge.nets.unet:UNet",
        "regauge.nets.densenet:DenseNet",
        "regauge.nets.mobilenet:MobileNetV2",
        "regauge.nets.convnext:ConvNeXt",
        "regauge.nets.siren:common_siren",
    ],
)
def test_a_store_of_a_network_that_regauge_has_no_longer(factory: str, tmp_path: Path) -> None:
    """The store can still be read. Its module is refused with a remedy, and the remedy works."""
    known = Architecture("old", "regauge.nets.mlp:ResidualMLP", RESIDUAL)
    store = Store.create(tmp_path / "store", known)
    params = {spec.name: torch.randn(2, *spec.shape) for spec in known.layout}
    store.append(params, [{"id": k, "step": 0} for k in range(2)], name="s")
    manifest = store.folder / "store.json"
    manifest.write_text(manifest.read_text().replace("regauge.nets.mlp:ResidualMLP", factory))
    old = Store.open(store.folder)
    assert torch.equal(old.read([1])["head.bias"], params["head.bias"][1:])
    with pytest.raises(ValueError, match=rf"'{factory}' is no longer part of regauge.*\"factory\" in its store.json"):
        old.architecture.module()
    manifest.write_text(manifest.read_text().replace(factory, f"{__name__}:OwnMLP"))
    new = Store.open(store.folder)
    assert isinstance(new.architecture.module(), OwnMLP)
    assert new.key == store.key
    assert torch.equal(new.read([1])["head.bias"], params["head.bias"][1:])


def test_networks_without_a_factory_have_no_module() -> None:
    assert CASES[3].size == 7
    with pytest.raises(ValueError, match="lists only tensors"):
        CASES[3].module()

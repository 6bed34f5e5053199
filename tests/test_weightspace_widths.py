"""Nets that read networks of other widths than the widths for which the nets were made."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import models
import pytest
import torch
from coverings import covering
from torch import Tensor, nn
from weightspace_cases import generator

import regauge as rg
from regauge import weightspace as ws
from regauge.core.params import Params
from regauge.nets.mlp import MLP
from regauge.nets.resnet import resnet20
from regauge.nets.siren import Siren
from regauge.nets.transformer import GPT, Llama, ViT

LLAMA = {**models.LLAMA, "num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 10}


def cnn(width: int) -> nn.Module:
    """Return two convolutions, a flatten, and two linear layers."""
    return nn.Sequential(
        *(nn.Conv2d(3, width, 3), nn.ReLU(), nn.Conv2d(width, 2 * width, 3, groups=2), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(2 * width * 4 * 4, width), nn.ReLU(), nn.Linear(width, 3)),
    )


@dataclass(frozen=True)
class Widths:
    """A family of networks: two members, and an input for both."""

    narrow: Callable[[], nn.Module]
    wide: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Any, ...]]


FAMILIES = {
    "mlp": Widths(lambda: MLP((4, 6, 6, 3)), lambda: MLP((4, 10, 8, 3)), models.normal(2, 4)),
    "siren": Widths(lambda: Siren(2, 8, 1, depth=3), lambda: Siren(2, 12, 1, depth=3), models.normal(4, 2)),
    "cnn": Widths(lambda: cnn(4), lambda: cnn(6), models.IMAGE),
    "resnet": Widths(
        lambda: resnet20(shortcut="B", blocks=1), lambda: resnet20(shortcut="B", blocks=1, width=2), models.IMAGE
    ),
    "lstm": Widths(lambda: models.Recurrent(nn.LSTM, 6), lambda: models.Recurrent(nn.LSTM, 10), models.normal(2, 6, 5)),
    "vit": Widths(
        lambda: ViT(16, 8, width=12, layers=1),
        lambda: ViT(16, 8, width=18, layers=1, heads=6),
        models.normal(2, 1, 16, 16),
    ),
    "gpt": Widths(lambda: GPT(17, 6, width=8, layers=1), lambda: GPT(17, 6, width=12, layers=1), models.tokens()),
    "llama": Widths(
        lambda: Llama(17, width=16, layers=1),
        lambda: Llama(17, width=24, layers=1, heads=6, kv_heads=3),
        models.tokens(),
    ),
    "experts": Widths(
        models.hugging("MixtralForCausalLM", **LLAMA, num_local_experts=4, _experts_implementation="batched_mm"),
        models.hugging(
            "MixtralForCausalLM",
            **{**LLAMA, "intermediate_size": 12, "num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 24},
            num_local_experts=6,
            _experts_implementation="batched_mm",
        ),
        models.tokens(),
    ),
}
HEADS: dict[str, Callable[[], Any]] = {
    "invariant": lambda: ws.Invariant(3),
    "equivariant": ws.Equivariant,
    "unit_features": lambda: ws.UnitFeatures(5),
}


@cache
def members(family: str) -> tuple[tuple[rg.Symmetry, Params], ...]:
    """Return the symmetry and random networks of both members."""
    found = []
    for make in (FAMILIES[family].narrow, FAMILIES[family].wide):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            module = make().eval()
        symmetry = rg.discover(module, FAMILIES[family].inputs(), verify=False)
        chance = generator(1)
        networks = {
            name: t + 0.3 * torch.randn(3, *t.shape, generator=chance, dtype=torch.float64)
            for name, t in module.state_dict().items()
            if t.is_floating_point()
        }
        networks = {name: t.abs() + 0.1 if name.endswith("running_var") else t for name, t in networks.items()}
        for names in symmetry.tied:
            networks.update({name: networks[names[0]] for name in names if name in networks})
        found.append((symmetry, networks))
    return tuple(found)


def far(a: Any, b: Any) -> float:
    """Return the largest difference, relative to the largest value, also for each tensor of a dictionary."""
    if isinstance(a, Tensor):
        return float((a - b).detach().abs().max() / b.detach().abs().max())
    assert a.keys() == b.keys()
    return max(far(a[name], b[name]) for name in a)


@pytest.mark.parametrize(("family", "layer", "head"), covering(FAMILIES, ws.LAYERS, HEADS, of=2))
def test_every_net_reads_other_widths(family: str, layer: str, head: str) -> None:
    (narrow, networks), (wide, others) = members(family)
    net = ws.Metanet(narrow, layer=ws.LAYERS[layer](), head=HEADS[head](), width=8, depth=2, generator=generator(0))
    net = net.double().eval()
    net.standardize(networks)
    before = net(networks)
    net.adapt(wide)
    made = net(others)
    if head == "invariant":
        moved = wide.act(wide.random(generator(2), net.parts, (3,)), others)
        assert far(net(moved), made) < 1e-9
    elif head == "equivariant":
        assert all(made[name].shape == others[name].shape for name in made)
    assert far(net(networks), before) == 0.0  # what it read first it reads as before

"""Two copies into which a unit was split count as one unit, if nets know the axes along which parameters sum over
units.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
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
from regauge.nets.transformer import ViT


def cnn(width: int) -> nn.Module:
    """Return two convolutions (the second one grouped), a flatten, and two linear layers."""
    return nn.Sequential(
        *(nn.Conv2d(3, width, 3), nn.ReLU(), nn.Conv2d(width, 2 * width, 3, groups=2), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(2 * width * 4 * 4, width), nn.Tanh(), nn.Linear(width, 3)),
    )


class Turned(nn.Module):
    """Two linear layers with weights of shape (in, out), the second one masked."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(4, width)), nn.Parameter(torch.randn(width, 3))
        self.bias = nn.Parameter(torch.randn(width))
        self.register_buffer("mask", torch.tensor([1.0, 0.0, 1.0]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.gelu(torch.addmm(self.bias, x, self.first))
        return torch.einsum("bi,io->bo", hidden, self.second * self.mask)


FAMILIES: dict[str, tuple[Callable[[int], nn.Module], Callable[[], tuple[Any, ...]]]] = {
    "mlp": (lambda k: MLP((4, 5 * k, 6 * k, 3)), models.normal(2, 4)),
    "turned": (lambda k: Turned(5 * k), models.normal(2, 4)),
    "siren": (lambda k: Siren(2, 6 * k, 2, depth=3), models.normal(4, 2)),
    "cnn": (lambda k: cnn(4 * k), models.IMAGE),
    "resnet": (lambda k: resnet20(shortcut="B", blocks=1, width=k), models.IMAGE),
    "lstm": (lambda k: models.Recurrent(nn.LSTM, 5 * k), models.normal(2, 6, 5)),
    "vit": (lambda k: ViT(16, 8, width=8 * k, heads=2 * k, layers=1), models.normal(2, 1, 16, 16)),
}
"""Members by a factor of all widths, and inputs. The stream of a vision transformer has a norm, which depends on
copies, so in this case the law holds only for nets."""
LAYERS: dict[str, Any] = {**{name: kind() for name, kind in ws.LAYERS.items()}, "dws": ws.DWS(pooling="mean")}
EVERY_LAYER = pytest.mark.parametrize("layer", list(LAYERS))
EXACT = 1e-8


@cache
def member(family: str, factor: int) -> tuple[nn.Module, rg.Symmetry]:
    """Return a network in float64, and the symmetry of its architecture."""
    make, inputs = FAMILIES[family]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = make(factor).eval()
    return module.double(), rg.discover(module, tuple(x.double() for x in inputs()), verify=False)


@cache
def networks(family: str) -> Params:
    """Return random networks of the narrow member."""
    chance = generator(1)
    found = {
        name: t + 0.3 * torch.randn(3, *t.shape, generator=chance, dtype=torch.float64)
        for name, t in member(family, 1)[0].state_dict().items()
        if t.is_floating_point()
    }
    return {name: t.abs() + 0.1 if name.endswith("running_var") else t for name, t in found.items()}


@cache
def copies(family: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return, for each unit of the wide member, the unit of which it is a copy, and its share of the outgoing
    weights.
    """
    chance, parents, parts = generator(2), {}, {}
    for one, two in zip(*(member(family, factor)[1].groups for factor in (1, 2)), strict=True):
        assert one.name == two.name
        count = two.size // one.size
        order = torch.randperm(two.size, generator=chance) if count == 2 else torch.arange(two.size)
        first = 0.1 + 0.8 * torch.rand(one.size, generator=chance, dtype=torch.float64)
        parents[one.name] = torch.arange(one.size).repeat(count)[order]
        parts[one.name] = (torch.cat([first, 1 - first]) if count == 2 else first * 0 + 1)[order]
    return parents, parts


def split(family: str, params: Params) -> Params:
    """Split every unit into two copies in a random order, whose outgoing weights are divided by random numbers."""
    parents, parts = copies(family)
    symmetries = [member(family, factor)[1] for factor in (1, 2)]
    layouts = [ws.compile_layout(one, readers=ws.find_readers(one), contracted=()) for one in symmetries]
    shapes = symmetries[1].shapes
    made = {name: torch.zeros(3, *shapes[name], dtype=torch.float64).flatten(1) for name in params}
    for name, piece in layouts[0].pieces.items():
        values, there = piece.read(params[piece.parameter]), layouts[1].pieces[name]
        for axis, label in enumerate(piece.labels):
            values = values.index_select(1 + axis, parents[label.group])
            if label.reads:
                shape = [-1 if k == axis else 1 for k in range(len(piece.labels))]
                values = values * parts[label.group].reshape(1, *shape, 1)
        made[piece.parameter][:, there.flat_index().flatten()] = values.flatten(1)
    return {name: t.reshape(3, *shapes[name]) for name, t in made.items()}


def make(family: str, layer: Any, head: Any, **options: Any) -> ws.Metanet:
    narrow, wide = (member(family, factor)[1] for factor in (1, 2))
    settings = {"readers": ws.find_readers(narrow), "width": 8, "depth": 2, "generator": generator(0), **options}
    net = ws.Metanet(narrow, layer=layer, head=head, **settings).double().eval()
    net.standardize(networks(family))
    net.adapt(wide)
    return net


def far(a: Tensor, b: Tensor) -> float:
    return float((a - b).detach().abs().max() / b.detach().abs().max())


class Reading(nn.Module):
    """Parameters that are read in many ways, and from which units get their values in many ways."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {"table": (7, 4), "gain": (4,), "left": (4, 5), "down": (2, 5), "up": (6, 2), "bank": (3, 6, 4)}
        for name, shape in (shapes | {"size": (6, 1), "rows": (6, 6), "last": (3, 6)}).items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))
        self.wide = nn.ConvTranspose1d(6, 6, 1)

    def forward(self, index: Tensor) -> Tensor:
        x = torch.tanh(self.table[index] * self.gain) @ self.left
        x = torch.tanh(x @ (self.up @ self.down).T)  # two weights that are multiplied first
        x = torch.tanh(nn.functional.linear(x, self.size * self.rows / self.rows.norm(dim=1, keepdim=True)))
        x = torch.tanh(self.wide(x.unsqueeze(-1)).squeeze(-1))
        x = torch.tanh(torch.einsum("bi,eio->bo", x, self.bank)) @ self.table.T  # the table again
        return x @ self.table @ self.left[:, :3] + (self.last @ torch.tanh(self.rows.new_ones(6) * self.wide.bias))


def test_readers_are_the_axes_that_are_summed_over() -> None:
    symmetry = rg.discover(Reading(), (torch.arange(4),), verify=False)
    read = {("left", 0), ("down", 0), ("down", 1), ("rows", 1), ("wide.weight", 0), ("bank", 1), ("last", 1)}
    assert {*symmetry.readers} == ws.find_readers(symmetry) == read


def test_readers_of_several_architectures_must_agree() -> None:
    axes: tuple[dict[str, tuple[str | None, ...]], ...] = ({"w": ("h", None)}, {"w": ("h^-1", None)})
    one, other = (rg.Symmetry.from_axes(row) for row in axes)
    assert (one.readers, other.readers) == ((), (("w", 0),))
    assert rg.Symmetry.from_json(other.to_json()) == other
    with pytest.raises(ValueError, match=r"\('w', 0\) sums over units in one architecture"):
        ws.find_readers((one, other))


@pytest.mark.parametrize("family", ["mlp", "turned", "siren", "cnn", "resnet", "lstm"])
def test_units_that_are_split_compute_what_they_did(family: str) -> None:
    before, after = (
        torch.func.functional_call(member(family, factor)[0], {name: t[0] for name, t in params.items()}, x)
        for factor, params in ((1, networks(family)), (2, split(family, networks(family))))
        for x in [tuple(x.double() for x in FAMILIES[family][1]())]
    )
    assert far(after, before) < 1e-10


@pytest.mark.parametrize(("family", "layer"), covering(FAMILIES, LAYERS, of=2))
def test_a_unit_split_in_two_counts_as_one(family: str, layer: str) -> None:
    net = make(family, LAYERS[layer], ws.Invariant(3))
    made = net(networks(family))
    assert far(net(split(family, networks(family))), made) < EXACT
    assert float(made.detach().std(0).min()) > 1e-4  # and networks are told apart


@pytest.mark.parametrize(("family", "layer"), covering(["siren", "cnn", "vit"], LAYERS, part=1, of=2))
def test_changes_of_a_split_unit_are_split(family: str, layer: str) -> None:
    net = make(family, LAYERS[layer], ws.Equivariant())
    with torch.no_grad():
        made, wanted = net(split(family, networks(family))), split(family, net(networks(family)))
    assert max(float(t.abs().max()) for t in wanted.values()) > 1e-4
    for name, change in wanted.items():
        assert float((made[name] - change).abs().max()) <= EXACT * float(change.abs().max().clamp(min=1e-12)), name


@pytest.mark.parametrize(("family", "layer"), covering(["siren", "cnn"], LAYERS, part=0, of=2))
def test_copies_have_the_features_of_the_unit(family: str, layer: str) -> None:
    net = make(family, LAYERS[layer], ws.UnitFeatures(4))
    before, after = net(networks(family)), net(split(family, networks(family)))
    parents, _ = copies(family)
    for name, x in before.items():
        axes = member(family, 1)[1][name].within
        for axis, group in enumerate((*axes, name)):
            x = x.index_select(1 + axis, parents[group])
        assert far(after[name], x) < EXACT


@EVERY_LAYER
def test_nets_that_do_not_know_readers_count_copies(layer: str) -> None:
    net = make("mlp", LAYERS[layer], ws.Invariant(3), readers=())
    assert far(net(split("mlp", networks("mlp"))), net(networks("mlp"))) > 1e-4


@EVERY_LAYER
def test_units_that_nothing_reads_count_for_nothing(layer: str) -> None:
    net = make("mlp", LAYERS[layer], ws.Invariant(3))
    wide = split("mlp", networks("mlp"))
    for name in ("layers.1.weight", "layers.2.weight"):
        wide[name][:, :, :3] = 0.0
    first = {**wide, "layers.0.weight": wide["layers.0.weight"].clone()}
    first["layers.0.weight"][:, :3] += torch.randn(3, 3, 4, generator=generator(5), dtype=torch.float64)
    assert far(net(first), net(wide)) < EXACT


@EVERY_LAYER
def test_shares_keep_the_symmetry_and_every_gradient(layer: str) -> None:
    net = make("cnn", LAYERS[layer], ws.Invariant(3))
    symmetry = member("cnn", 1)[1]
    moved = symmetry.act(symmetry.random(generator(3), net.parts, (3,)), networks("cnn"))
    made = net(networks("cnn"))
    assert far(net(moved), made) < EXACT
    (made * torch.randn(made.shape, generator=generator(4), dtype=made.dtype)).sum().backward()
    assert not [name for name, p in net.named_parameters() if p.grad is None or not bool(p.grad.any())]


def test_readers_are_saved_with_the_net(tmp_path: Path) -> None:
    net = make("mlp", ws.Propagation(), ws.Invariant(3))
    again, _ = ws.load_net(net.save(tmp_path / "net.safetensors"))
    assert again.settings == net.settings
    assert far(again(networks("mlp")), net(networks("mlp"))) == 0.0


def test_what_cannot_weigh_units_gets_a_sentence() -> None:
    symmetry = member("mlp", 1)[1]
    for layer in (ws.DWS(), ws.MessagePassing(aggregation="pna"), ws.MessagePassing(aggregation="sum")):
        with pytest.raises(ValueError, match="twice; choose means"):
            ws.Metanet(symmetry, layer=layer, head=ws.Invariant(1), readers=ws.find_readers(symmetry))
    with pytest.raises(ValueError, match="moments of tensors"):
        ws.Metanet(symmetry, head=ws.Invariant(1), readers=ws.find_readers(symmetry), reads_moments=True)
    with pytest.raises(ValueError, match=r"no group acts on \('layers.7.weight', 1\)"):
        ws.Metanet(symmetry, head=ws.Invariant(1), readers=[("layers.7.weight", 1)])

"""Laws on a device, in float64 and on small networks, each compared with the CPU."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from gpu_place import Laws, Place, require
from torch import Tensor, nn

import regauge as rg
from regauge import flow
from regauge import weightspace as ws
from regauge.alignment import METHODS
from regauge.core.params import select
from regauge.nets.mlp import ResidualMLP
from regauge.nets.resnet import resnet20
from regauge.nets.siren import Siren
from regauge.nets.transformer import GPT, Llama
from regauge.storage.architecture import Architecture
from regauge.training import Adam, LogUniform
from regauge.zoo import Examples, PopulationConfig, train

DOUBLE = torch.float64
DESCENTS = ("straight-through", "sinkhorn", "continuous-descent", "best-of")
"""Methods that take hundreds of small steps. One network is enough to test them."""
Made = tuple[nn.Module, Tensor, rg.Symmetry]


class Mixed(nn.Module):
    """A chain that has units with positive scales, units with signs, linear groups, and batch normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third, self.last = (nn.Linear(a, b) for a, b in ((5, 7), (7, 6), (6, 4), (4, 3)))
        self.norm = nn.BatchNorm1d(7)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.third(torch.tanh(self.second(torch.relu(self.norm(self.first(x)))))))
        return found


def tokens(count: int) -> Tensor:
    return torch.arange(count).reshape(1, -1) % 11


NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "chain": (Mixed, lambda: torch.randn(6, 5, dtype=DOUBLE)),
    "sine": (lambda: Siren(2, 8, 3), lambda: torch.rand(6, 2, dtype=DOUBLE)),
    "residual MLP": (lambda: ResidualMLP(4, 6, 8, 2, 3), lambda: torch.randn(6, 4, dtype=DOUBLE)),
    "GPT": (lambda: GPT(11, 6, width=8, layers=2, heads=2), lambda: tokens(6)),
    "Llama": (lambda: Llama(11, width=8, layers=2, heads=4, kv_heads=2), lambda: tokens(6)),
    "ResNet": (lambda: resnet20(blocks=1), lambda: torch.randn(2, 3, 8, 8, dtype=DOUBLE)),
}


def nets(place: Place) -> list[str]:
    """Return the networks of a run, or a few networks in a test."""
    return place.sized(list(NETS), ["chain"])


def make(name: str) -> Made:
    """Return a module, its inputs and its symmetry, on the CPU."""
    torch.manual_seed(0)
    build, inputs = NETS[name]
    module, example = build().to(DOUBLE).eval(), inputs()
    return module, example, rg.discover(module, (example,), verify=False)


def drawn(module: nn.Module, seed: int) -> rg.Params:
    """Return values far from an initialization, in which no two units are equal."""
    chance = torch.Generator().manual_seed(seed)
    made = {}
    for name, tensor in module.state_dict().items():
        noise = torch.randn(tensor.shape, generator=chance, dtype=DOUBLE)
        if not tensor.is_floating_point():
            made[name] = tensor.clone()
        else:
            made[name] = tensor.abs() + noise.abs() / 4 + 0.1 if "running_var" in name else tensor + noise / 4
    return made


def run(module: nn.Module, params: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
    """Return the outputs of a network."""
    with torch.no_grad():
        found: Tensor = torch.func.functional_call(module, dict(params), (inputs,))
    return found


def chance(seed: int = 0) -> torch.Generator:
    """Return a random generator on the CPU, from which all devices get the same random numbers."""
    return torch.Generator().manual_seed(seed)


def laws_of_action(place: Place) -> dict[str, Any]:
    """Test that elements act as a group and preserve functions, and that the device gives the result of the CPU."""
    laws = Laws(place)
    for name in nets(place):
        module, example, symmetry = make(name)
        here = drawn(module, 1)
        a, x, symmetry = place.bring(here), place.bring(example), symmetry.bind(here)
        there = place.bring(module)
        g, h = symmetry.random(chance(1)), symmetry.random(chance(2))
        many, batch = {n: torch.stack([t] * 3) for n, t in a.items()}, symmetry.random(chance(3), batch=(3,))
        with laws.law(f"{name}: identity"):
            laws.equal(symmetry.act(symmetry.identity(), a), a, 0)
        with laws.law(f"{name}: composition"):
            laws.equal(symmetry.act(g, symmetry.act(h, a)), symmetry.act(symmetry.compose(g, h), a), 1e-9)
        with laws.law(f"{name}: inverse"):
            laws.equal(symmetry.act(symmetry.inverse(g), symmetry.act(g, a)), a, 1e-9)
        with laws.law(f"{name}: function"):
            laws.equal(run(there, symmetry.act(g, a), x), run(there, a, x), 1e-9)
        with laws.law(f"{name}: as on the CPU"):
            laws.equal(symmetry.act(g, a), symmetry.act(g, here), 1e-12)
        with laws.law(f"{name}: batches"):
            moved = symmetry.act(batch, many)
            for k in range(3):
                laws.equal(select(moved, k), symmetry.act(batch.item(k), a), 1e-12)
        with laws.law(f"{name}: translations"):
            laws.equal(symmetry.join(*symmetry.split(a)), a, 1e-9)
        with laws.law(f"{name}: canonical form"):
            canonical = rg.canonicalize(a, symmetry)
            laws.equal(canonical, rg.canonicalize(here, symmetry), 1e-6)
            laws.equal(run(there, canonical, x), run(there, a, x), 1e-8)
    return laws.row()


def laws_of_alignment(place: Place) -> dict[str, Any]:
    """Test that every method reaches the objective of the CPU on the device, which is at least the objective of the
    identity.
    """
    laws = Laws(place)
    chosen = place.sized(list(METHODS), ["weights", "activations", "merge-many"])
    for name in place.sized(["chain", "sine", "GPT", "ResNet"], ["chain"]):
        module, example, symmetry = make(name)
        a, b = drawn(module, 1), drawn(module, 2)
        targets = run(module, a, example)
        task = rg.Task(module, [(example, targets)], nn.functional.mse_loss)
        aligned_here = {}
        for key in chosen:
            row = METHODS[key]
            if row.takes == "joint" or (key in DESCENTS and name != "chain"):
                continue
            method = row.load()()
            with laws.law(f"{name}, {key}: on the CPU"):
                aligned_here[key] = method, align(a, b, symmetry, method, task if row.needs_data else None)
        there = place.bring(module)
        task = rg.Task(there, [(place.bring(example), place.bring(targets))], nn.functional.mse_loss)
        x, y = place.bring(a), place.bring(b)
        for key, (method, here) in aligned_here.items():
            with laws.law(f"{name}, {key}: as on the CPU"):
                found = align(x, y, symmetry, method, task if METHODS[key].needs_data else None)
                params = found.params[-1] if METHODS[key].takes == "many" else found.params
                laws.there(params)
                require(found.objective >= found.initial, "worse than the identity")
                # Descents follow rounding, so that only exact solutions must agree closely.
                close = abs(found.objective - here.objective) <= 1e-6 * max(abs(here.objective), 1.0)
                is_exact = key in ("weights", "activations", "merge-many")
                require(close or not is_exact, f"objective {found.objective:.9g}, on the CPU {here.objective:.9g}")
        with laws.law(f"{name}: planted"):
            moved = symmetry.act(symmetry.random(chance(5), ("permutation", "sign")), x)
            found = rg.align(x, moved, symmetry, generator=chance())
            laws.equal(run(there, found.params, place.bring(example)), run(there, x, place.bring(example)), 1e-8)
        with laws.law(f"{name}: many pairs"):
            firsts, seconds = ({n: torch.stack([t] * 3) for n, t in one.items()} for one in (x, y))
            seconds = symmetry.act(symmetry.bind(a).random(chance(3), ("permutation",), batch=(3,)), seconds)
            pairs = rg.alignment.align_pairs(firsts, seconds, symmetry)
            laws.there(pairs.params)
            require(bool((pairs.objective >= pairs.initial).all()), "worse than the identity")
        with laws.law(f"{name}: merging"):
            laws.there(rg.merge([x, y], symmetry).params)
    return laws.row()


def align(a: rg.Params, b: rg.Params, symmetry: rg.Symmetry, method: Any, task: rg.Task | None) -> Any:
    """Align two networks, by a method for pairs or a method for many networks."""
    if isinstance(method, rg.alignment.ManyMethod):
        return rg.align_many([a, b], symmetry, method=method, task=task, generator=chance())
    return rg.align(a, b, symmetry, method=method, task=task, generator=chance())


def laws_of_metanets(place: Place) -> dict[str, Any]:
    """Test nets over networks: they equal the CPU's nets, and give the same result for all networks of an orbit."""
    laws = Laws(place)
    heads: dict[str, Any] = {"invariant": ws.Invariant(3), "equivariant": ws.Equivariant(), "units": ws.UnitFeatures(4)}
    for name in nets(place):
        module, _, symmetry = make(name)
        networks = [drawn(module, k) for k in range(3)]
        here = {n: torch.stack([one[n] for one in networks]) for n in networks[0]}
        population = place.bring(here)
        for layer in place.sized(list(ws.LAYERS), ["propagation"]):
            for head in heads:
                with laws.law(f"{name}, {layer}, {head}"):
                    make_layer, width = ws.LAYERS[layer](), 8
                    net = ws.Metanet(
                        symmetry, layer=make_layer, head=heads[head], width=width, depth=1, generator=chance()
                    ).double()
                    expected = net(here)
                    net = place.bring(net)
                    found = net(population)
                    laws.equal(found, expected, 1e-8)
                    if head == "invariant":
                        g = symmetry.bind(networks[0]).random(chance(7), tuple(net.parts), batch=(3,))
                        laws.equal(net(symmetry.act(g, population)), found, 1e-7)
                        sum(t.square().sum() for t in (found,)).backward()
                        gradients = [p.grad for p in net.parameters() if p.grad is not None]
                        require(all(bool(g.isfinite().all()) for g in gradients), "a gradient is not finite")
    return laws.row()


def small_population(count: int = 24) -> tuple[nn.Module, Tensor, rg.Symmetry, rg.Params]:
    """Return sine networks around one network, float32."""
    torch.manual_seed(0)
    module, inputs = Siren(2, 6, 1), torch.rand(8, 2)
    symmetry = rg.discover(module, (inputs,), verify=False)
    networks = {
        name: torch.stack([tensor + 0.1 * torch.randn_like(tensor) for _ in range(count)])
        for name, tensor in module.state_dict().items()
    }
    return module, inputs, symmetry, networks


def laws_of_flows(place: Place) -> dict[str, Any]:
    """Test a flow that was fitted on the device: it samples networks, and its density is invariant under the
    symmetry.
    """
    laws = Laws(place)
    _, _, symmetry, networks = small_population()
    net = flow.Metanetwork(ws.MessagePassing(), 8, 1)
    config = flow.Config(net=net, epochs=2, batch=8)
    with laws.law("fitted there as here"):
        there = flow.fit(networks, symmetry, replace(config, device=place.device.type), generator=chance())
        here = flow.fit(networks, symmetry, config, generator=chance())
        losses = [one.about["history"][-1]["validation_loss"] for one in (there, here)]
        require(abs(losses[0] - losses[1]) <= 1e-2 * abs(losses[1]), f"losses {losses}")
    with laws.law("density"):
        inner = {name: tensor.double() for name, tensor in networks.items()}
        density = here.log_density(inner, steps=4)
        moved = symmetry.act(symmetry.bind(select(inner, 0)).random(chance(1), batch=(24,)), inner)
        require(bool(torch.allclose(here.log_density(moved, steps=4), density, rtol=1e-6)), "it sees the symmetry")
    with laws.law("carried there as here"):
        expected = here.sample(3, generator=chance(2), steps=4)
        place.bring(here.velocity)
        found = here.sample(3, generator=chance(2), steps=4)
        laws.there(found)
        laws.equal(found, expected, 1e-3)
    with laws.law("density there as here"):
        found_density = here.log_density(place.bring(inner), steps=4)
        laws.equal(found_density, density, 1e-6)
    return laws.row()


def laws_of_populations(place: Place) -> dict[str, Any]:
    """Test that a network equals the network trained on the CPU, for any other networks in its stack."""
    laws = Laws(place)
    digits = Examples(
        "random",
        torch.randn(64, 1, 8, 8, generator=chance(1)),
        torch.randint(3, (64,), generator=chance(2)),
        torch.randn(8, 1, 8, 8, generator=chance(3)),
        torch.randint(3, (8,), generator=chance(4)),
    )
    architectures = {
        "MLP": Architecture("MLP", "regauge.nets.mlp:mlp", {"widths": [64, 6, 5, 3]}),
        "CNN": Architecture("CNN", "regauge.zoo.formats.modules:SmallCNN", {"channels": [1, 4, 4], "classes": 3}),
    }
    rates = {"one rate": Adam(lr=1e-3), "own rates": Adam(lr=LogUniform(5e-4, 2e-3))}
    for name, architecture in architectures.items():
        for kind, optimizer in rates.items():
            with laws.law(f"{name}, {kind}"):
                config = PopulationConfig(architecture, "random", 6, steps=5, batch=16, group=3, optimizer=optimizer)
                there, here = (
                    list(train(config, data=digits, device=device, dtype=DOUBLE)) for device in (place.device, "cpu")
                )
                laws.equal(joined(there), joined(here), 1e-9)
                alone = list(train(config, data=digits, device=place.device, dtype=DOUBLE, ids=[4]))
                laws.equal(select(joined(alone), 0), select(joined(here), 4), 1e-9)
    return laws.row()


def joined(blocks: list[Any]) -> rg.Params:
    """Return the networks of some blocks as one population."""
    return {name: torch.cat([block.params[name] for block in blocks]) for name in blocks[0].params}


LAWS: dict[str, Callable[[Place], dict[str, Any]]] = {
    "action": laws_of_action,
    "alignment": laws_of_alignment,
    "metanets": laws_of_metanets,
    "flows": laws_of_flows,
    "populations": laws_of_populations,
}

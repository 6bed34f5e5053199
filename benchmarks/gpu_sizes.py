"""Realistic sizes on a device, each compared with the CPU in the same run: time, peak memory, and results.

If a size takes minutes on a CPU, a smaller size is used on both devices, and the row names the reduction.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any
from unittest import mock

import numpy as np
import torch
from gpu_laws import chance
from gpu_place import Place
from torch import Tensor, nn

import regauge as rg
from regauge import flow, learn
from regauge.alignment.engine import climbs
from regauge.core import assignment
from regauge.learn import running
from regauge.nets.siren import Siren
from regauge.storage.architecture import Architecture
from regauge.training.net_program import NetProgram
from regauge.zoo import Examples, PopulationConfig, train
from regauge.zoo.presets import cnn_architecture, mlp_architecture

NOISE = 0.3
"""The standard deviation of the noise in a near copy, relative to the standard deviation of each tensor."""
WARM = 2
"""The number of training steps at the beginning that are not measured."""


@dataclass(frozen=True)
class Model:
    """An architecture of transformers.

    Attributes:
        config: Class name of the configuration.
        module: Class name of the model.
        settings: The settings of the configuration.
        depth: The name of the setting for the number of layers.
        reduced: The number of layers on both devices, if the CPU cannot run all layers; None for all layers.
        shape: The shape of an input. Inputs with two axes contain integers.
        is_near: Whether B is a transformed noisy copy of A, whose units can be matched. Otherwise, B is another random
            network.
        tiny: Settings for a test.
    """

    config: str
    module: str
    settings: Mapping[str, Any]
    depth: str
    reduced: int | None
    shape: tuple[int, ...]
    is_near: bool
    tiny: Mapping[str, Any] = field(default_factory=dict)

    def build(self, is_small: bool, layers: int | None) -> nn.Module:
        """Return the module, without values."""
        import transformers

        settings = {**self.settings, **(self.tiny if is_small else {})}
        if layers is not None:
            settings[self.depth] = layers
        config = getattr(transformers, self.config)(**settings)
        with torch.device("meta"):
            module: nn.Module = getattr(transformers, self.module)(config).eval()
        return module

    def inputs(self, is_small: bool) -> Tensor:
        """Return inputs without values, for discovery."""
        shape = (1, 3, 32, 32) if is_small and len(self.shape) == 4 else self.shape
        return torch.zeros(shape, dtype=torch.float32 if len(shape) == 4 else torch.int64, device="meta")


MODELS = {
    "ResNet50": Model(
        *("ResNetConfig", "ResNetForImageClassification", {"num_labels": 1000}, "", None, (1, 3, 224, 224), False),
        tiny={"embedding_size": 8, "hidden_sizes": [16, 24], "depths": [1, 1], "num_labels": 5},
    ),
    "ViT-B/16": Model(
        *("ViTConfig", "ViTForImageClassification", {"num_labels": 1000}, "num_hidden_layers", None, (1, 3, 224, 224)),
        is_near=True,
        tiny={"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
        | {"image_size": 32, "patch_size": 16, "num_labels": 5},
    ),
    "GPT-2 XL": Model(
        *("GPT2Config", "GPT2LMHeadModel", {"n_embd": 1600, "n_layer": 48, "n_head": 25}, "n_layer", 2, (1, 8), True),
        tiny={"n_embd": 16, "n_head": 2, "n_layer": 3, "vocab_size": 50, "n_positions": 16},
    ),
    "Llama-1B": Model(
        "LlamaConfig",
        "LlamaForCausalLM",
        {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 128_256}
        | {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": True},
        *("num_hidden_layers", 1, (1, 8), True),
        tiny={"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 50}
        | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4},
    ),
}


def random_network(module: nn.Module, generator: torch.Generator) -> rg.Params:
    """Return random values for a module without values, on the device of the generator; tied names share a tensor."""
    source: dict[str, Any] = {"generator": generator, "device": generator.device}
    known: dict[int, Tensor] = {}
    made: rg.Params = {}
    for name, blank in module.state_dict(keep_vars=True).items():
        if id(blank) not in known:
            if not blank.is_floating_point():
                tensor = torch.zeros(blank.shape, dtype=blank.dtype, device=generator.device)
            elif blank.ndim < 2:  # gains, biases and statistics
                tensor = 1 + 0.2 * torch.rand(blank.shape, **source)
            else:
                tensor = torch.randn(blank.shape, **source).div_(math.sqrt(blank[0].numel()))
            known[id(blank)] = tensor
        made[name] = known[id(blank)]
    return made


def near_copy(params: rg.Params, generator: torch.Generator) -> rg.Params:
    """Return a network with noise on its matrices."""
    known: dict[int, Tensor] = {}
    for tensor in params.values():
        if id(tensor) not in known:
            is_matrix = tensor.ndim > 1
            noise = partial(torch.randn, tensor.shape, generator=generator, device=tensor.device)
            known[id(tensor)] = tensor + NOISE * tensor.std() * noise() if is_matrix else tensor
    return {name: known[id(tensor)] for name, tensor in params.items()}


@contextmanager
def searches() -> Iterator[dict[str, float]]:
    """Count assignments, and sum their CPU seconds over all threads."""
    counted = {"assignments": 0, "assignment_seconds": 0.0}
    search = assignment._search

    def timed(reduced: Tensor) -> Tensor:
        here = reduced.cpu()
        began = time.perf_counter()
        found = search(here)
        counted["assignment_seconds"] += time.perf_counter() - began
        counted["assignments"] += len(reduced)
        return found

    with mock.patch.object(assignment, "_search", timed):
        yield counted


@cache
@cache
def discovered(name: str, is_small: bool, layers: int | None) -> tuple[nn.Module, rg.Symmetry]:
    """Return a model without values, and its symmetry. Each is discovered once, for the device and for the CPU."""
    module = MODELS[name].build(is_small, layers)
    return module, rg.discover(module, (MODELS[name].inputs(is_small),), verify=False)


def align_once(name: str, place: Place, layers: int | None) -> dict[str, Any]:
    """Align two networks of an architecture by the default call, on a device."""
    model, (module, symmetry) = MODELS[name], discovered(name, place.is_small, layers)
    symmetry = replace(symmetry)  # without results that an earlier measurement has kept with it
    generator = place.generator(0)
    a = random_network(module, generator)
    if model.is_near:
        found = symmetry.bind(a).random(chance(1), ("permutation", "sign"))
        b = symmetry.act(found, near_copy(a, generator))
    else:
        b = random_network(module, generator)
    place.forget()
    with searches() as counted:
        result, seconds = place.measure(lambda: rg.align(a, b, symmetry, generator=chance()))
    names = [name for name in symmetry.sites if name not in symmetry.buffers]
    norm = sum(float(a[n].square().sum(dtype=torch.float64)) for n in names)
    left = sum(float((a[n] - result.params[n]).square().sum(dtype=torch.float64)) for n in names)
    return {
        "values": sum(t.numel() for t in {id(t): t for t in a.values()}.values()),
        "groups": len(symmetry.groups),
        "seconds": seconds,
        "sweeps": len(result.history),
        "objective": result.objective,
        "distance": math.sqrt(left / norm),
        **counted,
        "peak_bytes": place.peak(),
    }


def align_model(name: str, place: Place) -> dict[str, Any]:
    """Measure `rg.align` at the size of a real model, on the device and on the CPU, with fewer layers on both if
    necessary.
    """
    layers = MODELS[name].reduced
    warm = align_once(name, replace(place, is_small=True), None)  # kernels are loaded at their first use
    found = align_once(name, place, None)
    row = {**found, "warm_up_seconds": warm["seconds"]}
    if layers is not None:
        there = align_once(name, place, layers)
        row |= {"device_seconds": there["seconds"], "reduced_objective": there["objective"]}
        row["reduced"] = f"ratio with {layers} of the layers on both"
    else:
        row["device_seconds"] = found["seconds"]
    place.forget()
    here = align_once(name, place.cpu, layers)
    row |= {"cpu_seconds": here["seconds"], "cpu_assignment_seconds": here["assignment_seconds"]}
    return row | {"cpu_distance": here["distance"]}


def random_examples(*shape: int, count: int = 4096) -> Examples:
    """Return random inputs of ten classes, because the values do not change the cost."""
    inputs, labels = torch.randn(count, *shape, generator=chance(1)), torch.randint(10, (count,), generator=chance(2))
    return Examples("random", inputs, labels, inputs[:8], labels[:8])


def train_networks(
    place: Place, architecture: Architecture, data: Examples, count: int, steps: int, stack: int | None = None
) -> tuple[float, int | None]:
    """Return the number of networks' steps per second, from seeds to the end, and the peak memory. The CPU samples the
    initialization.
    """
    config = PopulationConfig(architecture, "random", count, steps=steps, batch=place.sized(128, 8))
    place.forget()

    def go() -> None:
        for block in train(config, data=data, device=place.device, stack=stack):
            assert len(block.rows)

    _, seconds = place.measure(go)
    return count * steps / seconds, place.peak()


def population(
    place: Place, architecture: Architecture, data: Examples, count: int, steps: int, *, alone: int, stacks: list[int]
) -> dict[str, Any]:
    """Train a population on the device, in stacks of several sizes, and some of its networks on one core of the CPU."""
    train_networks(place, architecture, data, min(count, 64), WARM)
    row: dict[str, Any] = {"networks": count, "steps": steps}
    tried = {}
    for stack in [None, *stacks]:
        key = "default" if stack is None else str(stack)
        tried[key], peak = train_networks(
            place, architecture, data, count if stack is None else count // 4, steps, stack
        )
        if stack is None:
            row["peak_bytes"] = peak
    here, _ = train_networks(place.cpu, architecture, data, alone, steps)
    row |= {"steps_per_second": tried["default"], "steps_per_second_by_stack": tried, "cpu_steps_per_second": here}
    row |= {"device_seconds": count * steps / tried["default"], "cpu_seconds": count * steps / here}
    return row | {"reduced": f"the CPU trains {alone} networks on one core; its seconds are those of one core for all"}


def mlps(place: Place) -> dict[str, Any]:
    """Return 10,000 MLPs."""
    widths = place.sized((784, 64, 64, 10), (16, 6, 10))
    data = random_examples(*place.sized((1, 28, 28), (1, 4, 4)), count=place.sized(4096, 64))
    sizes = place.sized((10_000, 200), (64, 3))
    return population(
        place, mlp_architecture(*widths), data, *sizes, alone=place.sized(64, 32), stacks=place.sized([2048], [])
    )


def cnns(place: Place) -> dict[str, Any]:
    """Return 2,000 CNNs."""
    architecture = cnn_architecture("relu", 1, *place.sized((16, 16, 16), (4, 4)))
    data = random_examples(*place.sized((1, 28, 28), (1, 12, 12)), count=place.sized(4096, 64))
    sizes = place.sized((2_000, 50), (64, 2))
    stacks = place.sized([256, 512], [32])
    return population(place, architecture, data, *sizes, alone=place.sized(16, 4), stacks=stacks)


@contextmanager
def timed_steps(place: Place) -> Iterator[list[float]]:
    """Collect the seconds of every training step of a net."""
    seconds: list[float] = []
    step = NetProgram.step

    def timed(self: NetProgram[Any], *args: Any) -> Tensor:
        found, took = place.measure(lambda: step(self, *args))
        seconds.append(took)
        return found

    with mock.patch.object(NetProgram, "step", timed):
        yield seconds


@dataclass(frozen=True)
class Sines:
    """Networks 2-32-32-1 around one network, like networks of images, with their symmetry and pixels as inputs."""

    module: nn.Module
    pixels: Tensor
    symmetry: rg.Symmetry
    networks: rg.Params

    @classmethod
    @cache
    def of(cls, is_small: bool) -> "Sines":
        """Return random networks, with the size of a test if `is_small`."""
        width, count, side = (6, 20, 4) if is_small else (32, 512, 28)
        torch.manual_seed(0)
        module, line = Siren(2, width, 1), torch.linspace(-1, 1, side)
        pixels = torch.cartesian_prod(line, line)
        networks = {
            name: torch.stack([tensor + 0.1 * torch.randn_like(tensor) for _ in range(count)])
            for name, tensor in module.state_dict().items()
        }
        return cls(module, pixels, rg.discover(module, (pixels,), verify=False), networks)


def fit_predictor(own: Sines, **setting: Any) -> object:
    """Fit a predictor of two classes of networks from weights alone."""
    config, count = learn.PredictorConfig(statistics=False, depth=2, **setting), len(next(iter(own.networks.values())))
    return learn.fit_predictor(own.networks, torch.arange(count) % 2, own.symmetry, config, generator=chance())


def fit_matcher(own: Sines, **setting: Any) -> object:
    """Fit a matcher with the loss on the line between two networks."""
    task = rg.Task(own.module, [(own.pixels, torch.zeros(len(own.pixels), 1))], nn.functional.mse_loss)
    config, runs = learn.MatchingConfig(checked=2, depth=2, **setting), {"module": own.module, "inputs": own.pixels}
    return learn.fit_matching(own.networks, own.symmetry, config, task=task, generator=chance(), **runs)


def fit_autoencoder(own: Sines, **setting: Any) -> object:
    """Fit an autoencoder by the outputs of networks at all pixels."""
    config, runs = learn.AutoencoderConfig(**setting), {"module": own.module, "inputs": own.pixels}
    return learn.fit_autoencoder(own.networks, own.symmetry, config, generator=chance(), **runs)


def fit_flow(own: Sines, **setting: Any) -> object:
    """Fit a flow with the equivariant net."""
    net = flow.Metanetwork(width=setting.pop("width"), depth=2)
    return flow.fit(own.networks, own.symmetry, flow.Config(net=net, **setting), generator=chance())


TRAININGS: dict[str, Callable[..., object]] = {
    "autoencoder": fit_autoencoder,
    "matcher": fit_matcher,
    "predictor": fit_predictor,
    "flow": fit_flow,
}


def step_of(name: str, place: Place) -> dict[str, Any]:
    """Return the median seconds of a training step of a net over networks, without the first few steps.

    Networks that are chains run a few at a time, such that they fit the cache of a CPU. On a device, all networks also
    run at once.
    """
    networks, batch = Sines.of(place.is_small), place.sized(64, 8)
    setting = place.sized({"epochs": 1, "width": 64}, {"epochs": 2, "width": 4})

    def step(where: Place) -> float:
        where.forget()
        with timed_steps(where) as seconds:
            TRAININGS[name](networks, **setting, batch=batch, device=where.device.type)
        return float(np.median(seconds[WARM:]))

    row = {"networks": batch, "device_seconds": step(place), "peak_bytes": place.peak()}
    if name == "autoencoder":
        with mock.patch.object(running, "CHAINS_AT_ONCE", batch):
            row["all_at_once_seconds"] = step(place)
    return {**row, "cpu_seconds": step(place.cpu)}


def many_pairs(place: Place) -> dict[str, Any]:
    """Align 10,000 pairs of small networks in portions of several sizes, and some of the pairs on the CPU."""
    sines = Sines.of(place.is_small)
    count, few = place.sized((10_000, 500), (20, 20))
    index = torch.arange(count) % len(next(iter(sines.networks.values())))
    a = {name: tensor[index] for name, tensor in sines.networks.items()}
    b = {name: tensor[index.roll(1)] for name, tensor in sines.networks.items()}

    def go(where: Place, pairs: int) -> tuple[float, float]:
        first, second = (where.bring({name: t[:pairs] for name, t in one.items()}) for one in (a, b))
        where.forget()
        found, seconds = where.measure(lambda: rg.alignment.align_pairs(first, second, sines.symmetry))
        return float(found.objective.mean()), seconds

    go(place, few)
    by_portion = {}
    for pairs in place.sized((1024, 4096), (8,)):
        with mock.patch.multiple(climbs, PORTION_PAIRS=pairs, PORTION_BYTES=1 << 30):
            by_portion[pairs] = go(place, count)[1]
    (objective, seconds), (few_there, there), (few_here, here) = go(place, count), go(place, few), go(place.cpu, few)
    return {
        "seconds_by_portion": by_portion,
        "pairs": count,
        "seconds": seconds,
        "peak_bytes": place.peak(),
        "objective": objective,
        "device_seconds": there,
        "cpu_seconds": here,
        "reduced": f"ratio with {few} pairs on both",
        "objectives_of_few": [few_there, few_here],
    }


def auction(profits: Tensor, least: float, rounds: int) -> tuple[Tensor, float]:
    """Run a Jacobi auction with prices, in which all open rows bid at once, for `[n, n]` profits. Return the share of
    rows with a column.

    The step of prices falls by a factor of five down to `least`, as a share of the range of profits. The total profit
    of the assignment is then within n times that step of the optimum.

    References:
        Bertsekas (1988), The auction algorithm: a distributed relaxation method for the assignment problem.
    """
    n = len(profits)
    prices, spread = profits.new_zeros(n), float(profits.max() - profits.min())
    step, left = spread / 5, rounds
    while True:
        owner = torch.full((n,), -1, device=profits.device)
        column = torch.full((n,), -1, device=profits.device)
        while left > 0:
            left -= 1
            open_ = (column < 0).nonzero().flatten()
            if not len(open_):
                break
            best, which = (profits[open_] - prices).topk(2, dim=1)
            bids = prices[which[:, 0]] + best[:, 0] - best[:, 1] + step
            top = prices.new_full((n,), -torch.inf).scatter_reduce(0, which[:, 0], bids, "amax")
            won = bids >= top[which[:, 0]]
            # Of equal bids for one column the last one written wins, and the others bid again.
            columns = which[won, 0]
            claimed = torch.full((n,), -1, device=profits.device).index_copy(0, columns, open_[won])
            taken = (claimed >= 0).nonzero().flatten()
            before = owner[taken]
            column[before[before >= 0]] = -1
            owner[taken] = claimed[taken]
            column[claimed[taken]] = taken
            prices[taken] = top[taken]
        if step <= least * spread or left <= 0:
            return column, float((column >= 0).double().mean())
        step = max(step / 5, least * spread)


def assignments(place: Place) -> dict[str, Any]:
    """Compare exact assignments on the CPU with auctions on the device, by size: from which size a batched auction is
    faster.
    """
    rows = []
    for n in place.sized((512, 1024, 2048, 4096), (24,)):
        generator = place.generator(n)
        x, noise = (torch.randn(n, 64, generator=generator, device=place.device) for _ in range(2))
        profits = x @ (x + noise).mT
        there, seconds = place.measure(lambda p=profits: assignment.assign_many(p.unsqueeze(0)).columns[0])
        (found, share), device_seconds = place.measure(lambda p=profits: auction(p, 1e-5, place.sized(20_000, 500)))
        best = float(profits.gather(1, place.bring(there).unsqueeze(1)).double().sum())
        held = found >= 0
        reached = float(profits[held].gather(1, found[held].unsqueeze(1)).double().sum())
        rows.append({"units": n, "exact": seconds, "auction": device_seconds, "held": share, "reached": reached / best})
    return {"sizes": rows, "solver": assignment._solver().__module__, "cpu_seconds": rows[-1]["exact"]} | {
        "device_seconds": rows[-1]["auction"],
        "reduced": f"an auction against the exact assignment of {rows[-1]['units']} units, copied from the device",
    }

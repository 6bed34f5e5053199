"""Deep weight space networks: seconds and memory of a training step, for this library's layers and the published code.

The first table compares Deep-Align's net on MLPs 784-128-128-128-10: 64 features, 128 outputs, 5 layers, where each
tensor reads only neighboring tensors. As in its training, a step reads two networks three times (both ends of a pair,
and a permuted copy), and takes one step of AdamW. The second table compares the forward and backward pass of one layer
with 32 features that maps all tensors to all others, on 16 networks 2-32-...-32-1 with nine weights. Every row runs in
a separate process with one thread. Seconds are CPU time, as the median of several rounds after one warm-up round.
Megabytes are the peak memory above the memory before the net was made. Before each measurement, a tensor of some
megabytes is made and freed, so that, as in a long training, a step does not request its memory from the system each
time. `--cold` omits this tensor. Rows that compute another function than the published code are marked.

    python benchmarks/deep_weight_space.py --deep-align FOLDER --dwsnets FOLDER [--rounds 3]

The command needs checkouts of AvivNavon/deep-align and AvivNavon/DWSNets.
"""

import argparse
import multiprocessing
import os
import resource
import statistics
import sys
import time
import types
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

import regauge as rg
from regauge import weightspace as ws
from regauge.nets.mlp import MLP
from regauge.weightspace.features import Features
from regauge_papers import chains

DEEP_ALIGN = (784, 128, 128, 128, 10)
NINE = (2, *[32] * 8, 1)
WARM = 7_500_000
"""The number of entries of the tensor that is made and freed before each measurement."""

Step = Callable[[], None]


def networks(widths: tuple[int, ...], count: int) -> tuple[rg.Symmetry, rg.Params]:
    """Return the symmetry of an MLP, and some random networks."""
    module = MLP(widths)
    generator = torch.Generator().manual_seed(0)
    symmetry = rg.discover(module, (torch.randn(2, widths[0], generator=generator),), verify=False)
    params = {
        name: torch.randn(count, *tensor.shape, generator=generator) / tensor.shape[-1] ** 0.5
        for name, tensor in module.state_dict().items()
    }
    return symmetry, params


def as_published(params: rg.Params) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return weights `[networks, in, out, 1]` and biases `[networks, out, 1]`."""
    tensors = list(params.values())
    weights = tuple(weight.transpose(1, 2).unsqueeze(-1) for weight in tensors[::2])
    return weights, tuple(bias.unsqueeze(-1) for bias in tensors[1::2])


def train(net: nn.Module, read: Callable[[], list[Tensor]]) -> Step:
    """Take a training step that reads the networks three times."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=5e-4, amsgrad=True)

    def step() -> None:
        optimizer.zero_grad()
        sum(x.square().mean() for _ in range(3) for x in read()).backward()
        optimizer.step()

    return step


def differentiate(made: Callable[[], list[Tensor]]) -> Step:
    """Run the forward and the backward pass."""

    def step() -> None:
        sum(x.square().mean() for x in made()).backward()

    return step


def find_published(folder: Path) -> None:
    """Make a checkout importable without its experiments, which need packages that the nets do not need."""
    counted = types.ModuleType("experiments.utils")
    counted.count_parameters = lambda model: sum(p.numel() for p in model.parameters())  # type: ignore[attr-defined]
    sys.modules["experiments"], sys.modules["experiments.utils"] = types.ModuleType("experiments"), counted
    sys.path.insert(0, str(folder))


def deep_align_net(folder: Path) -> nn.Module:
    """Return Deep-Align's net."""
    find_published(folder)
    from deepalign.nn.models import DWSMatching

    net: nn.Module = DWSMatching(
        tuple(pairwise(DEEP_ALIGN)),
        tuple((width,) for width in DEEP_ALIGN[1:]),
        input_features=1,
        hidden_dim=64,
        n_hidden=4,
        output_features=128,
        input_dim_downsample=8,
        bn=True,
        diagonal=True,
    )
    return net


def published_net(folder: Path) -> Step:
    """Return Deep-Align's net with its training step."""
    x, net = as_published(networks(DEEP_ALIGN, 2)[1]), deep_align_net(folder)
    return train(net, lambda: list(net(x)))


def chain_net() -> Step:
    """Return the net of this library that computes the same function as the published net."""
    symmetry, params = networks(DEEP_ALIGN, 2)
    net = chains.ChainDWS(symmetry, chains.ChainConfig(inputs_to=8), head=ws.UnitFeatures(128))
    return train(net, lambda: list(net(params).values()))


def our_net(layer: ws.DWS | ws.NFN) -> Step:
    """Return a net that projects inputs and classes once."""
    symmetry, params = networks(DEEP_ALIGN, 2)
    head = ws.UnitFeatures(128)
    net = ws.Metanet(symmetry, layer=layer, head=head, width=64, depth=5, parts=("permutation",))
    return train(net, lambda: list(net(params).values()))


def published_layer(folder: Path, sets: str, pooling: str) -> Step:
    """Return one layer of DWSNets, with its normalization and nonlinearity."""
    find_published(folder)
    from nn.layers import BN, DWSLayer, ReLU

    weights, biases = (
        tuple(torch.randn(*x.shape[:-1], 32, requires_grad=True) for x in part)
        for part in as_published(networks(NINE, 16)[1])
    )
    shapes = tuple(pairwise(NINE)), tuple((width,) for width in NINE[1:])
    layer = nn.Sequential(
        BN(32, len(weights), len(biases)),
        ReLU(),
        DWSLayer(*shapes, in_features=32, out_features=32, set_layer=sets, reduction=pooling),
    )
    return differentiate(lambda: [x for part in layer((weights, biases)) for x in part])


def our_layer(layer: ws.DWS | ws.NFN) -> Step:
    """Return one layer of this library, with its normalization and nonlinearity."""
    symmetry, params = networks(NINE, 16)
    net = ws.Metanet(symmetry, layer=layer, head=ws.Invariant(1), width=32, depth=1, parts=("permutation",))
    start = net.features(params, layers=0)
    units, pairs = (
        {name: x.detach().clone().requires_grad_() for name, x in part.items()} for part in (start.units, start.pairs)
    )
    features = Features(units, pairs, start.network.detach().clone().requires_grad_(), {})
    (built,) = net.layers

    def made() -> list[Tensor]:
        out = built(features, net.layout)
        return [*out.units.values(), *out.pairs.values(), out.network]

    return differentiate(made)


def measure(make: Callable[[], Step], rounds: int, warm: int) -> tuple[float, float]:
    """Return seconds and megabytes, measured in a separate process."""
    receiver, sender = multiprocessing.get_context("fork").Pipe(duplex=False)

    def run() -> None:
        torch.set_num_threads(1)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        torch.ones(warm)
        step = make()
        times = []
        for _ in range(rounds + 1):
            start = time.process_time()
            step()
            times.append(time.process_time() - start)
        peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        sender.send((statistics.median(times[1:]), peak))

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    sender.close()
    result: tuple[float, float] = receiver.recv()
    process.join()
    return result


def table(title: str, rows: dict[str, Callable[[], Step]], rounds: int, warm: int = WARM) -> None:
    """Return a Markdown table, with ratios to the first row."""
    print(f"\n| {title} | CPU s | times faster | peak MB | share |\n| --- | --- | --- | --- | --- |", flush=True)
    base: tuple[float, float] | None = None
    for name, make in rows.items():
        seconds, megabytes = measure(make, rounds, warm)
        base = base or (seconds, megabytes)
        ratios = f"{base[0] / seconds:.1f} | {megabytes:.0f} | {megabytes / base[1]:.2f}"
        print(f"| {name} | {seconds:.3f} | {ratios} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--deep-align", type=Path, required=True)
    parser.add_argument("--dwsnets", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=("layer", "net"))
    parser.add_argument("--cold", action="store_true")
    options = parser.parse_args()
    warm = 0 if options.cold else WARM
    print(f"Load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    for widths in (DEEP_ALIGN, NINE):
        networks(widths, 1)  # What discovery holds is there before all rows.
    attention, mean = ws.DWS(is_diagonal=True), ws.DWS(sets="mean", pooling="mean", is_diagonal=True)
    layer = "one layer, nine weights, 16 networks"
    means = ws.DWS(sets="mean", pooling="mean")
    if options.only != "net":
        attentive = {
            "DWSNets, attention, largest": lambda: published_layer(options.dwsnets, "sab", "max"),
            "DWS(), another function": lambda: our_layer(ws.DWS()),
        }
        table(layer, attentive, 3 * options.rounds, warm)
        linear = {
            "DWSNets, means": lambda: published_layer(options.dwsnets, "ds", "mean"),
            'DWS(sets="mean", pooling="mean"), another function': lambda: our_layer(means),
            "NFN(), another function": lambda: our_layer(ws.NFN()),
        }
        table(layer, linear, 3 * options.rounds, warm)
    if options.only == "layer":
        return
    table(
        "784-128-128-128-10, two networks",
        {
            "Deep-Align": lambda: published_net(options.deep_align),
            "ChainDWS, the same function": chain_net,
            "DWS(is_diagonal=True), another function": lambda: our_net(attention),
            'DWS(sets="mean", pooling="mean", is_diagonal=True), another function': lambda: our_net(mean),
            "NFN(), another function": lambda: our_net(ws.NFN()),
        },
        options.rounds,
        warm,
    )


if __name__ == "__main__":
    main()

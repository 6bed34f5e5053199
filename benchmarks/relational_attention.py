"""Relational attention: a training step of this library's net and of Neural Graphs' relational transformer.

The published net has its settings for images of digits without probes: states of 64, features of edges of 32, attention
of 128, hidden layers of 128 and 64, 4 layers, 8 heads, and Fourier features of values with 128 frequencies. All units
of the published net attend to all units. In this library, units attend to connected units, to themselves and to the
network, so the function is different. Features of edges have the width of states, twice as many as in the published
net. A step consists of forward pass, backward pass and AdamW, in single precision. Every row runs in a separate process
with one thread. Seconds are CPU time, as the median of several rounds after one warm-up round. Megabytes are the peak
memory above the memory before the net was made.

    python benchmarks/relational_attention.py --neural-graphs FOLDER [--packages FOLDER] [--widths 2 32 32 1]

The command needs a checkout of mkofinas/neural-graphs. If torch_geometric, einops and random-fourier-features-pytorch
are not installed, it also needs a folder with these packages.
"""

import argparse
import functools
import importlib
import os
import sys
import types
from pathlib import Path

import torch
from deep_weight_space import Step, table
from scale_gmn import networks, train

import regauge as rg
from regauge import weightspace as ws
from regauge.nets.mlp import MLP


def find_published(folder: Path, packages: Path | None) -> None:
    """Make a checkout importable without its experiments, which need packages that the nets do not need."""
    if packages is not None:
        sys.path.insert(0, str(packages))
    importlib.import_module("torch_geometric")  # before its own look for the packages below
    hydra = types.ModuleType("hydra")
    hydra.utils = types.SimpleNamespace(instantiate=lambda make, **settings: make(**settings))  # type: ignore[attr-defined]
    loader = types.ModuleType("rff.dataloader")
    loader.rectangular_dataset = loader.to_image = None  # type: ignore[attr-defined]
    sys.modules.update({"hydra": hydra, "rff.dataloader": loader})
    sys.path.insert(0, str(folder))


def published_step(widths: tuple[int, ...], count: int) -> Step:
    from nn.graph_constructor import GraphConstructor
    from nn.relational_transformer import RelationalTransformer

    graph = functools.partial(GraphConstructor, d_in=1, d_edge_in=1, sin_emb=True, sin_emb_dim=128)
    net = RelationalTransformer(
        d_node=64,
        d_edge=32,
        d_attn_hid=128,
        d_node_hid=128,
        d_edge_hid=64,
        d_out_hid=128,
        d_out=10,
        n_layers=4,
        n_heads=8,
        layer_layout=list(widths),
        graph_constructor=graph,
        dropout=0.2,
        use_cls_token=False,
        pooling_method="cat",
    )
    tensors = list(networks(widths, count).values())
    weights = tuple(weight.transpose(1, 2).unsqueeze(-1) for weight in tensors[::2])
    biases = tuple(bias.unsqueeze(-1) for bias in tensors[1::2])
    return train(net, lambda: net((weights, biases)), count)


def our_step(symmetry: rg.Symmetry, widths: tuple[int, ...], count: int) -> Step:
    net = ws.Metanet(
        symmetry,
        layer=ws.RelationalAttention(heads=8),
        head=ws.Invariant(10),
        width=64,
        depth=4,
        values=ws.Fourier(128),
        parts=("permutation",),
    )
    params = networks(widths, count)
    return train(net, lambda: net(params), count)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--neural-graphs", type=Path, required=True)
    parser.add_argument("--packages", type=Path)
    parser.add_argument("--widths", type=int, nargs="+", default=[2, 32, 32, 1])
    parser.add_argument("--networks", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    find_published(options.neural_graphs, options.packages)
    widths, count = tuple(options.widths), options.networks
    symmetry = rg.discover(MLP(widths, torch.tanh), (torch.randn(2, widths[0]),), verify=False)
    print(f"Load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    rows = {
        "Neural Graphs, relational transformer": lambda: published_step(widths, count),
        "RelationalAttention(heads=8), another function": lambda: our_step(symmetry, widths, count),
    }
    table(f"{'-'.join(map(str, widths))}, {count} networks", rows, options.rounds)


if __name__ == "__main__":
    main()

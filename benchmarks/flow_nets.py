"""Nets of flows over weights: a training step of this library's nets and of the published net of paper 000.

The published net has its original sizes: width 64 on MLPs 30-16-16-2 and 32 on MLPs 784-10-10, five layers, one head,
and three layers that read values. The units of the published net attend to all units, even without a weight between
them. Therefore the memory of the published net grows with the square of the number of units. In this library, units
attend to connected units, to themselves and to the network. Inputs and classes, which no permutation moves, are not
units: values along such axes are features of units, read by separate maps. Therefore 30-16-16-2 has two groups of 16
units and the pairs between them, and 784-10-10 has ten units and no pairs. The two nets have the same width, depth and
symmetry, but compute different functions. `Tokens` is the net of `regauge reproduce 000 uci` and `mnist`, for aligned
networks. A step consists of forward pass, backward pass and Adam, from points and times to the mean squared error of
predicted ends, in single precision. Every row runs in a separate process with one thread. Seconds are CPU time, as the
median of several rounds after one warm-up round. Megabytes are the peak memory above the memory before the net was
made.

    python benchmarks/flow_nets.py --weightflow FOLDER [--packages FOLDER] [--only uci|mnist] [--at-once 1]

The command needs a checkout of ege-erdogan/weightflow. If einops and torch_geometric are not installed, it also needs a
folder with these packages. With batches of 8 networks 784-10-10, as in its training, the published net needs about 60
GB. `--at-once` sets the number of networks that all rows of the first table read. The second table has the rows of this
library for 8 networks.
"""

import argparse
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import torch
from deep_weight_space import Step, networks, table
from torch import Tensor, nn

from regauge import flow
from regauge.flow.design import build_velocity
from regauge.flow.flow_config import Design
from regauge.flow.moments import Moments
from regauge.weightspace import MessagePassing, RelationalAttention

ABSENT = ("h5py", "rebasin", "rebasin.loss", "torchvision", "ucimlrepo", "wandb")
"""Packages that the files of the published net import but the net does not need."""


def find_published(folder: Path, packages: Path | None) -> None:
    """Make a checkout importable without the modules that read its data."""
    if packages is not None:
        sys.path.append(str(packages))
    import torch_geometric  # noqa: F401  # before its own look for the packages below

    sys.modules.update({name: MagicMock() for name in ABSENT})
    sys.path.insert(0, str(folder))


def train(net: nn.Module, predict: Callable[[], Tensor], wanted: Tensor) -> Step:
    """Take a step on the error of the prediction."""
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.mse_loss(predict().reshape(wanted.shape), wanted).backward()
        optimizer.step()

    return step


def published_step(widths: tuple[int, ...], width: int, count: int) -> Step:
    """Return a step of the published net, with the settings of its training."""
    from nn.graph_constructor import GraphConstructor
    from nn.relational_transformer import RelationalTransformer

    layout = list(widths)
    graph = GraphConstructor(1, 1, width, width, layout, in_proj_layers=3)
    net = RelationalTransformer(
        d_node=width + 1,
        d_edge=width + 1,
        d_attn_hid=width,
        d_node_hid=width,
        d_edge_hid=width,
        d_out_hid=width,
        d_out=1,
        n_layers=5,
        n_heads=1,
        n_batch=count,
        layer_layout=layout,
        graph_constructor=graph,
        use_cls_token=False,
        device=torch.device("cpu"),
    )
    net.nodes_per_layer = np.array(layout)
    generator = torch.Generator().manual_seed(0)
    size = sum(tensor[0].numel() for tensor in networks(widths, 1)[1].values())
    x, wanted = torch.randn(2, count, size, generator=generator)
    times = torch.rand(count, 1, generator=generator).expand(count, size)
    return train(net, lambda: net(x, times), wanted)


def our_step(widths: tuple[int, ...], design: Design, count: int) -> Step:
    """Return a step of a net of this library."""
    symmetry, params = networks(widths, 256)
    space = flow.Space.of(params, symmetry, design.representation)
    points = space.enter(params)
    moments = Moments.of([points], space)
    prior = design.prior.build(space, moments)
    generator = torch.Generator().manual_seed(0)
    velocity = build_velocity(space, prior, moments, design, 0, generator)
    x, wanted = points[:count], prior.sample(count, generator)
    times = torch.rand(count, generator=generator)
    return train(velocity, lambda: velocity.predict_end(x, times), wanted)


def designs(width: int) -> dict[str, Design]:
    """Return the nets of this library by their labels in the table."""
    keep = flow.Representation("keep")
    ends = {"representation": keep, "predicts": "end", "has_gaussian": False, "prior": flow.PlainGaussian()}
    thesis = flow.Metanetwork(RelationalAttention(heads=1, expansion=1), width, 5)
    return {
        f"RelationalAttention(heads=1, expansion=1), width {width}, 5 layers": Design(net=thesis, **ends),
        f"RelationalAttention(), width {width}, 5 layers (`thesis_config`)": Design(
            net=flow.Metanetwork(RelationalAttention(), width, 5), **ends
        ),
        "MessagePassing(), width 32, 4 layers": Design(net=flow.Metanetwork(MessagePassing()), **ends),
        "Tokens(64, 3), for aligned networks": Design(net=flow.Tokens(64, 3), is_aligned=True, **ends),
    }


def tables(name: str, at_once: int) -> list[tuple[str, dict[str, Callable[[], Step]]]]:
    """Return titles and rows. The last table has the batch size of the thesis."""
    widths, width, whole = {"uci": ((30, 16, 16, 2), 64, 32), "mnist": ((784, 10, 10), 32, 8)}[name]
    counts = (whole,) if name == "uci" else (at_once, whole)
    networks(widths, 1)  # What discovery holds is there before all rows.
    made = []
    for count in counts:
        rows: dict[str, Callable[[], Step]] = {}
        if count == counts[0]:
            rows["as published"] = partial(published_step, widths, width, count)
        rows |= {label: partial(our_step, widths, design, count) for label, design in designs(width).items()}
        made.append((f"{'-'.join(map(str, widths))}, {count} at once", rows))
    return made


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--weightflow", type=Path, required=True)
    parser.add_argument("--packages", type=Path)
    parser.add_argument("--only", choices=("uci", "mnist"))
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    find_published(options.weightflow, options.packages)
    print(f"Load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    for name in ("uci", "mnist"):
        if options.only in (None, name):
            for title, rows in tables(name, options.at_once):
                table(title, rows, options.rounds)


if __name__ == "__main__":
    main()

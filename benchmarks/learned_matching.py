"""Training steps of learned matching: seconds and memory of this library and of the published code of Deep-Align.

The networks are pairs of MLPs 784-128-128-128-10, with 32 images. The published step reads both networks of each pair
and a permuted copy of the first network (a deep weight space network with 64 features, 128 outputs, 5 layers). The
published loss has three terms: the cross entropy of copies, the cross entropy at a random point between networks under
soft plans, and the mean squared distance. The step also computes the gradient, clips it, and takes one step of AdamW.
This library does the same with `DWS(is_diagonal=True)` of the same sizes, and with the default layers of
`fit_matching`. A pair consists of a network and the next network of the batch, so each network is read once. Every row
runs in a separate process with one thread. Seconds are CPU time, as the median of several rounds after one warm-up
round. Megabytes are the peak memory above the memory before the net was made.

    OMP_NUM_THREADS=1 python benchmarks/learned_matching.py --deep-align FOLDER [--rounds 3]

The command needs a checkout of AvivNavon/deep-align.
"""

import argparse
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path

import torch
from deep_weight_space import DEEP_ALIGN, Step, as_published, deep_align_net, measure, networks
from torch import nn

import regauge as rg
from regauge import learn
from regauge import weightspace as ws
from regauge.learn.matching_losses import Copies, Losses, LossWeights, Siamese
from regauge.learn.random_changes import change_values
from regauge.nets.mlp import MLP
from regauge.weightspace.layers.plan import Layer

IMAGES = 32
UNUSED = {
    "torchvision": (),
    "torchvision.utils": ("save_image",),
    "rff": (),
    "rff.layers": ("GaussianEncoding", "PositionalEncoding"),
}
"""Packages that the published code imports but its training step does not need."""


def examples() -> tuple[torch.Tensor, torch.Tensor]:
    """Return random images and labels, because their values do not change the time."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(IMAGES, DEEP_ALIGN[0], generator=generator)
    return inputs, torch.randint(DEEP_ALIGN[-1], (IMAGES,), generator=generator)


def published(folder: Path, pairs: int) -> Step:
    """Take Deep-Align's training step, with its own functions."""
    net = deep_align_net(folder)
    for name, contents in UNUSED.items():
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(dict.fromkeys(contents))
    sys.modules["experiments"].__path__ = [str(folder / "experiments")]
    from deepalign.losses.mlp_losses import calc_gt_perm_loss, calc_recon_loss
    from deepalign.utils import extract_pred, permute_weights

    optimizer = torch.optim.AdamW(net.parameters(), lr=5e-4, amsgrad=True, weight_decay=5e-4)
    params = networks(DEEP_ALIGN, 2 * pairs)[1]
    first, second = (as_published({n: t[part::2] for n, t in params.items()}) for part in range(2))
    orders = [torch.stack([torch.randperm(width) for _ in range(pairs)]) for width in DEEP_ALIGN[1:-1]]
    matrices = [torch.eye(order.shape[1])[order] for order in orders]
    copies = permute_weights(*first, matrices)

    def step() -> None:
        optimizer.zero_grad()
        own, theirs, copied = net(first), net(second), net(copies)
        known = calc_gt_perm_loss(extract_pred(own, copied), orders, device="cpu")
        between = calc_recon_loss(
            extract_pred(own, theirs), first, second, image_batch=examples(), image_flatten_size=784, device="cpu"
        )
        (known + between).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()

    return step


def ours(layer: Layer, depth: int, pairs: int) -> Step:
    """Take a step of `fit_matching` with all its losses."""
    symmetry, params = networks(DEEP_ALIGN, pairs)
    symmetry = symmetry.bind(params)
    generator = torch.Generator().manual_seed(0)
    config = learn.MatchingConfig(layer=layer, depth=depth)
    net = ws.Metanet(symmetry, layer=layer, head=ws.UnitFeatures(128), width=64, depth=depth, generator=generator)
    net.standardize(params)
    siamese = Siamese(net)
    batch = examples()
    task = rg.Task(MLP(DEEP_ALIGN), [batch])
    losses = Losses(siamese, symmetry, LossWeights(1, 1, 1), task, "loss", config.tolerance, config.max_iterations)
    optimizer = torch.optim.AdamW(siamese.parameters(), lr=5e-4, amsgrad=True, weight_decay=5e-4)

    def step() -> None:
        optimizer.zero_grad()
        copies = Copies(change_values(params, config.changes, symmetry.tied, generator), None)
        losses.step(params, None, copies, batch, generator).backward()
        nn.utils.clip_grad_norm_(siamese.parameters(), 1.0)
        optimizer.step()

    return step


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--deep-align", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print(f"Load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    symmetry, _ = networks(DEEP_ALIGN, 2)  # What discovery holds is there before all rows.
    assert symmetry.groups
    alike, default = ws.DWS(is_diagonal=True), learn.MatchingConfig()
    rows: dict[str, Callable[[], Step]] = {
        "Deep-Align, 2 pairs": lambda: published(options.deep_align, 2),
        "DWS(is_diagonal=True), 2 pairs": lambda: ours(alike, 5, 2),
        "as `fit_matching` by default, 2 pairs": lambda: ours(default.layer, default.depth, 2),
        "DWS(is_diagonal=True), 32 pairs": lambda: ours(alike, 5, 32),
        "as `fit_matching` by default, 32 pairs": lambda: ours(default.layer, default.depth, 32),
    }
    print(
        "\n| a training step | CPU s | CPU s a pair | times faster a pair | peak MB |\n| --- | --- | --- | --- | --- |"
    )
    base = None
    for name, make in rows.items():
        seconds, megabytes = measure(make, options.rounds)
        a_pair = seconds / int(name.split()[-2])
        base = base or a_pair
        print(f"| {name} | {seconds:.3f} | {a_pair:.3f} | {base / a_pair:.1f} | {megabytes:.0f} |", flush=True)


if __name__ == "__main__":
    main()

"""One pair of MLPs, aligned by the package `sinkhorn-rebasin` in a separate process.

The package installs the import name `rebasin`, like another benchmarked package, so the two packages cannot share a
process. `benchmarks/methods.py` starts this process with the package on its path. The settings are those that the
authors publish: plans of 20 Sinkhorn iterations at temperature 1, AdamW with learning rate 0.1, batches of 1,000, and
the loss at the midpoint. The package transforms network A toward B. At every step in `--at`, the plan is rounded and
the transformed network is stored, so one run gives the results for several durations.

    PYTHONPATH=FOLDER python benchmarks/peers/sinkhorn_rebasin.py PAIR.safetensors OUT.safetensors --sizes 784,128,10
"""

import argparse
import copy
import json
import time
import warnings
from itertools import pairwise
from pathlib import Path

import torch
from rebasin import RebasinNet
from rebasin.loss import MidLoss
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

BATCH = 1000


def network(sizes: list[int], params: dict[str, Tensor]) -> nn.Module:
    """Return a ReLU MLP with the given parameters."""
    layers: list[nn.Module] = []
    for inside, outside in pairwise(sizes):
        layers += [nn.Linear(inside, outside), nn.ReLU()]
    module = nn.Sequential(*layers[:-1])
    module.load_state_dict(dict(zip(module.state_dict(), (params[name] for name in names(params)), strict=True)))
    return module


def names(params: dict[str, Tensor]) -> list[str]:
    """Return parameter names in the order of the layers, each weight before its bias, because a file has no order."""
    return sorted(params, key=lambda name: (int(name.split(".")[-2]), name.endswith("bias")))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("pair", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--sizes", required=True)
    parser.add_argument("--at", default="10,20,40,80,160")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    torch.manual_seed(options.seed)
    tensors = load_file(options.pair)
    sizes = [int(size) for size in options.sizes.split(",")]
    ends = {key: {n[2:]: t for n, t in tensors.items() if n.startswith(f"{key}/")} for key in "ab"}
    a, b = network(sizes, ends["a"]), network(sizes, ends["b"])
    inputs, targets = tensors["inputs"], tensors["targets"]
    stops = [int(step) for step in options.at.split(",")]

    start = time.process_time()
    moving = RebasinNet(a, input_shape=(1, sizes[0]))
    criterion = MidLoss(copy.deepcopy(b), nn.CrossEntropyLoss())
    optimizer = torch.optim.AdamW(moving.p.parameters(), lr=0.1)
    kept: dict[str, Tensor] = {}
    seconds: dict[int, float] = {}
    order = torch.randperm(len(targets))
    for step in range(1, stops[-1] + 1):
        moving.train()
        index = order[torch.arange(BATCH).add(step * BATCH) % len(order)]
        loss = criterion(moving(), inputs[index], targets[index])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in stops:
            seconds[step] = time.process_time() - start
            moving.eval()
            state = moving().state_dict()
            kept |= {f"{step}/{n}": t.clone() for n, t in zip(names(ends["a"]), state.values(), strict=True)}
            start = time.process_time() - seconds[step]
    save_file(kept, options.out, metadata={"seconds": json.dumps(seconds)})


if __name__ == "__main__":
    main()

"""The state of a training on the disk: one safetensors file, written whole, from which the same bits follow."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regauge.core.params import Params
from regauge.storage.checkpoints.checkpoint import Checkpoint
from regauge.storage.checkpoints.writing import save
from regauge.storage.loader import Loader

KIND = "regauge training"


@dataclass
class State:
    """Where a training is.

    Attributes:
        best: Weights of the best validation; those at the start before the first one.
        order: What the best validation is compared by; empty before the first one.
        best_epoch: The epoch of `best`.
        history: Rows of the epochs that are done.
        step: Steps that are done.
        total: Sum of the losses of the present epoch.
        count: Number of them.
        rate: Learning rate of the last step.
        seconds: Seconds of training.
        ended: Why the training ended; empty while it goes on.
    """

    best: Params
    order: list[float] = field(default_factory=list)
    best_epoch: int = 0
    history: list[dict[str, float]] = field(default_factory=list)
    step: int = 0
    total: float = 0.0
    count: int = 0
    rate: float = 0.0
    seconds: float = 0.0
    ended: str = ""


def save_state(
    path: Path,
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: Loader,
    now: State,
    inputs: Mapping[str, Any],
) -> None:
    """Write the state of a training, in place of an earlier one."""
    tensors = {f"net/{name}": tensor for name, tensor in net.state_dict().items()}
    tensors |= {f"best/{name}": tensor for name, tensor in now.best.items()}
    for number, kept in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer/{number}/{name}": tensor for name, tensor in kept.items()}
    known = {name: value for name, value in vars(now).items() if name != "best"}
    header = {"kind": KIND, "state": json.dumps(known), "loader": json.dumps(loader.state_dict())}
    save(tensors, path, overwrite=True, metadata={**header, "inputs": json.dumps(dict(inputs))})


def read_state(
    path: Path, net: nn.Module, optimizer: torch.optim.Optimizer, loader: Loader, inputs: Mapping[str, Any]
) -> State:
    """Bring a net, its optimizer and its loader to the state in a file.

    Raises:
        ValueError: The file is none, or of a training with other inputs.
    """
    with Checkpoint.open(path) as checkpoint:
        header = dict(checkpoint.header)
        if header.get("kind") != KIND:
            raise ValueError(f"{str(path)!r} is no state of a training; give another name, or move it away")
        before, wanted = json.loads(header["inputs"]), json.loads(json.dumps(dict(inputs)))
        if before != wanted:
            changed = sorted(k for k in before.keys() | wanted.keys() if before.get(k) != wanted.get(k))
            raise ValueError(
                f"the interrupted training in {str(path)!r} had other settings or networks ({', '.join(changed)}); "
                "give the same to go on with it, or begin anew with --overwrite"
            )
        tensors = {name: tensor.clone() for name, tensor in checkpoint.params.items()}
    net.load_state_dict(_below("net/", tensors))
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in _below("optimizer/", tensors).items():
        number, _, key = name.partition("/")
        state.setdefault(int(number), {})[key] = tensor
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    loader.load_state_dict(json.loads(header["loader"]))
    device = next(net.parameters()).device
    return State(
        best={name: t.to(device) for name, t in _below("best/", tensors).items()}, **json.loads(header["state"])
    )


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> Params:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}

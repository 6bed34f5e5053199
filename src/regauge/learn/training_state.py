"""The state of a training on the disk: one safetensors file, written whole, from which the same bits follow."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regauge.checkpoints.checkpoint import Checkpoint
from regauge.checkpoints.writing import bytes_of, save
from regauge.core.params import Params, below
from regauge.storage.loader import Loader
from regauge.training.optimizers import load_moments, moments_of

KIND = "regauge training"
BEGINNING = 1 << 20
"""Bytes of a damaged file that are searched for it."""
VERSION = "1"
CHECKED = ("version", "state", "loader", "inputs")
"""Strings of the header that the checksum covers, in addition to the tensors."""


@dataclass
class State:
    """The state of a training.

    Attributes:
        best: Weights of the best validation; those at the start before the first one.
        average: Moving averages of the weights, if there are any.
        order: The key by which validations are compared, of the best one; empty before the first one.
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
    average: Params = field(default_factory=dict)
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
    tensors |= {f"average/{name}": tensor for name, tensor in now.average.items()}
    tensors |= {f"optimizer/{name}": tensor for name, tensor in moments_of(optimizer).items()}
    known = {name: value for name, value in vars(now).items() if name not in ("best", "average")}
    header = {
        "version": VERSION,
        "state": json.dumps(known),
        "loader": json.dumps(loader.state_dict()),
        "inputs": json.dumps(dict(inputs)),
    }
    save(tensors, path, overwrite=True, metadata={**header, "kind": KIND, "checksum": _checksum(header, tensors)})


def is_state(path: Path) -> bool:
    """Whether a file is the state of a training, or a damaged one that still says so at its beginning."""
    try:
        with Checkpoint.open(path) as checkpoint:
            return checkpoint.header.get("kind") == KIND
    except ValueError:
        with path.open("rb") as stream:
            return KIND.encode() in stream.read(BEGINNING)


def read_inputs(path: Path) -> dict[str, Any]:
    """Read what the training in a file depends on.

    Raises:
        ValueError: The file is none, or is damaged.
    """
    found: dict[str, Any] = json.loads(_read(path)[0]["inputs"])
    return found


def read_state(
    path: Path, net: nn.Module, optimizer: torch.optim.Optimizer, loader: Loader, inputs: Mapping[str, Any]
) -> State:
    """Bring a net, its optimizer and its loader to the state in a file.

    Raises:
        ValueError: The file is none, is damaged, or of a training with other inputs.
    """
    header, tensors = _read(path)
    before, wanted = json.loads(header["inputs"]), json.loads(json.dumps(dict(inputs)))
    if before != wanted:
        changed = sorted(k for k in before.keys() | wanted.keys() if before.get(k) != wanted.get(k))
        raise ValueError(
            f"the interrupted training in {str(path)!r} had other settings or networks ({', '.join(changed)}); "
            "give the same to go on with it, or begin anew with --overwrite"
        )
    net.load_state_dict(below("net/", tensors))
    load_moments(optimizer, below("optimizer/", tensors))
    loader.load_state_dict(json.loads(header["loader"]))
    device = next(net.parameters()).device
    best, average = ({name: t.to(device) for name, t in below(key, tensors).items()} for key in ("best/", "average/"))
    return State(best=best, average=average, **json.loads(header["state"]))


def _read(path: Path) -> tuple[Mapping[str, str], Params]:
    """The strings and the tensors of a state, whose bytes are as they were written."""
    remedy = "delete it, or begin anew with --overwrite"
    try:
        with Checkpoint.open(path) as checkpoint:
            header, tensors = dict(checkpoint.header), {name: t.clone() for name, t in checkpoint.params.items()}
    except ValueError as error:
        raise ValueError(f"the interrupted training in {str(path)!r} is damaged, so {remedy} ({error})") from error
    if header.get("kind") != KIND:
        raise ValueError(f"{str(path)!r} is no state of a training; give another name, or move it away")
    if header.get("version") != VERSION:
        raise ValueError(f"the interrupted training in {str(path)!r} is of another version of regauge; {remedy}")
    if header.get("checksum") != _checksum(header, tensors):
        raise ValueError(f"the interrupted training in {str(path)!r} is damaged: its checksum is wrong; {remedy}")
    return header, tensors


def _checksum(header: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    """A digest of everything from which the training goes on."""
    digest = blake2b("\0".join(header.get(name, "") for name in CHECKED).encode(), digest_size=16)
    for name, tensor in sorted(tensors.items()):
        digest.update(f"\0{name} {tensor.dtype} {[*tensor.shape]}\0".encode())
        digest.update(bytes_of(tensor.detach()))
    return digest.hexdigest()

"""Folders that torch.distributed.checkpoint writes, in one process and in four."""

import subprocess
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from regauge.core.params import Params
from regauge.core.symmetry import Symmetry

RANKS = 4


def net() -> nn.Sequential:
    """A network with two dtypes, buffers, and axes that four processes share unevenly."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.BatchNorm1d(5), nn.Linear(5, 7), nn.Linear(7, 3).bfloat16())


def symmetry() -> Symmetry:
    """Return the permutations of the hidden units of the network."""
    inner = {f"2.{name}": ("h",) for name in ("weight", "bias", "running_mean", "running_var")}
    axes = {"0.weight": ("h", None), "0.bias": ("h",), **inner, "3.weight": (None, "h")}
    return Symmetry.from_axes(axes, kinds={"h": "permutation"})


def save_alone(state: dict[str, object], folder: Path) -> Path:
    """Save a state in one process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about a single process
        dcp.save(state, checkpoint_id=str(folder))
    return folder


def load_alone(like: Params, folder: Path, inside: str | None = None) -> Params:
    """Return the tensors that torch loads from a folder, given names, shapes and dtypes."""
    state: Params = {name: torch.full_like(tensor, 7) for name, tensor in like.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if (folder / ".metadata").exists():
            dcp.load({inside: state} if inside else state, checkpoint_id=str(folder))
        else:
            dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(path=str(folder)))
    return state


def save_in_four(folder: Path) -> None:
    """Write a folder with four processes: `fully` is a training of FSDP, `mesh` is a network cut along two axes,
    `shards` is this network as safetensors, and `trained` is the state that a trainer stores at the top level.
    """
    subprocess.run([sys.executable, __file__, str(folder)], check=True, capture_output=True)


def _rank(rank: int, folder: str) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=RANKS)
    whole = net()
    mesh = init_device_mesh("cpu", (2, 2))

    def cut(tensor: Tensor) -> Tensor:
        if tensor.ndim == 0:
            return tensor
        return distribute_tensor(tensor, mesh, [Shard(0), Shard(1) if tensor.ndim == 2 else Replicate()])

    parts = {name: cut(tensor) for name, tensor in whole.state_dict().items()}
    dcp.save(parts, checkpoint_id=f"{folder}/mesh")
    files = {name: 1 + k % 2 for k, name in enumerate(parts)}
    writer = dcp.HuggingFaceStorageWriter(f"{folder}/shards", files, save_distributed=True)
    dcp.save(parts, storage_writer=writer)
    more = {"optimizer": {"state.0.weight.exp_avg": parts["0.weight"]}, "train_state": {"step": torch.tensor(3)}}
    dcp.save({**parts, **more, "lr": [0.1]}, checkpoint_id=f"{folder}/trained")
    module = fully_shard(whole, mesh=init_device_mesh("cpu", (RANKS,)))
    moments = {name: torch.zeros_like(tensor) for name, tensor in module.named_parameters()}
    state = {"model": module.state_dict(), "optim": {"state": moments, "lr": [0.1, 0.2]}, "step": 3}
    dcp.save(state, checkpoint_id=f"{folder}/fully")
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.start_processes(_rank, (sys.argv[1],), RANKS, start_method="fork")

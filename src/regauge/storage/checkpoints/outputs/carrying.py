"""What lies beside the weights of a checkpoint and goes along with them into a new folder, and what is left."""

import shutil
from pathlib import Path

from regauge.storage.checkpoints.checkpoint import Checkpoint
from regauge.storage.checkpoints.disk import PARTIAL
from regauge.storage.checkpoints.formats.adapters import CONFIG as ADAPTER_CONFIG
from regauge.storage.checkpoints.formats.state_dicts import TORCH_SUFFIXES
from regauge.storage.checkpoints.outputs.replacing import OURS
from regauge.storage.checkpoints.writing import SUFFIX

WEIGHTS = (SUFFIX, *TORCH_SUFFIXES, ".gguf", ".ckpt", ".h5", ".msgpack", ".onnx", ".npz", ".pkl", ".index.json")
"""How files end that hold values of another network or of its training; they are left."""
LARGE = 100_000_000
"""Bytes of a file from which on it is left."""


def carry_files(source: Checkpoint, folder: Path, out: Path) -> tuple[list[str], list[str]]:
    """Copy what describes a network in a folder with its configuration: settings, tokenizer, texts, subfolders.

    Subfolders go along as a whole or not at all. Hidden folders, such as those of git, are left. Where the network
    itself is replaced, all of that stays, and only its configuration is copied.

    Args:
        source: The network.
        folder: Where its files are copied to.
        out: Where they will be.

    Returns:
        The names that were copied, and those that were left; the weights, and what regauge wrote, are neither.
    """
    place = source.path.parent
    configs = [name for name in ("config.json", ADAPTER_CONFIG) if (place / name).is_file()]
    if not configs:
        return [], []
    if out.exists() and out.samefile(place):
        for name in configs:
            shutil.copyfile(place / name, folder / name)
        return [], []
    own = {source.path, *source.metadata}
    carried, left = [], []
    for path in sorted(place.iterdir()):
        if path in own or path.name in OURS or path.name.endswith(PARTIAL):
            continue
        is_hidden_folder = path.is_dir() and path.name.startswith(".")
        if is_hidden_folder or not _goes_along(path):
            left.append(path.name)
        elif path.is_dir():
            shutil.copytree(path, folder / path.name, copy_function=shutil.copyfile, dirs_exist_ok=True)
            carried.append(path.name)
        else:
            shutil.copyfile(path, folder / path.name)
            carried.append(path.name)
    return carried, left


def _goes_along(path: Path) -> bool:
    """Whether a file is small and holds no weights; whether all files of a folder do so."""
    if path.is_dir():
        return not path.is_symlink() and all(_goes_along(inner) for inner in path.iterdir())
    return path.is_file() and not path.name.endswith(WEIGHTS) and path.stat().st_size < LARGE

"""Folders in which tied parameters are stored as separate tensors, such as a head tied to an embedding."""

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Any

from torch import nn

from regauge.checkpoints.checkpoint import Checkpoint
from regauge.checkpoints.job import FileJob
from regauge.checkpoints.plain_files import read_object
from regauge.hub.build_model import name_model
from regauge.hub.folder_model import build_folder

CONFIG, TIED = "config.json", "tie_word_embeddings"


@contextmanager
def untie(name: str | None, *checkpoints: Checkpoint) -> Iterator[tuple[Any, ...]]:
    """Return a context in which the tied parameters of a folder's model are untied.

    Args:
        name: The folder. Default: the folder of the first checkpoint.
        checkpoints: Checkpoints of the folder, and other checkpoints of the same architecture.

    Yields:
        A temporary folder with the configuration of the untied model, and each checkpoint with this configuration and a
        second copy of its tied tensors.

    Raises:
        ValueError: The path is not a folder with config.json, or the model has no tied tensors. The error is also
            raised if the tied tensors cannot be untied.
    """
    name = name_model(checkpoints[0]) if name is None else name
    folder = Path(name or "")
    if name is None or not (folder / CONFIG).is_file():
        raise ValueError("`untie=True` changes config.json of a folder in Hugging Face style: give such a folder")
    tied = _tied(build_folder(folder, "never")[0])
    if not tied:
        raise ValueError(f"the model of {name!r} has no tied tensors: leave `untie=True` out")
    with tempfile.TemporaryDirectory(prefix="regauge-untied-") as place:
        for path in folder.glob("*.py"):
            shutil.copy(path, place)
        (Path(place) / CONFIG).write_bytes(_untied_configuration(folder))
        left = _tied(build_folder(Path(place), "never")[0])
        if left == tied:
            raise ValueError(
                f"{_named(tied)} are one tensor for every setting of config.json, and cannot be untied; leave "
                "`untie=True` out"
            )
        lost = [names for names in tied if names not in left]
        homes = [one.home if (Path(one.home) / CONFIG).is_file() else folder for one in checkpoints]
        yield (
            place,
            *(
                _with_copies(one, lost).replacing({CONFIG: _untied_configuration(Path(home))})
                for one, home in zip(checkpoints, homes, strict=True)
            ),
        )


def untie_job(job: FileJob | None) -> FileJob:
    """Return a job whose folders store a separate tensor for each name of a tied tensor, with an untied config.json.

    Raises:
        ValueError: The networks are in memory, the output is a file, or `untie` raises an error for a folder.
    """
    if job is None:
        raise ValueError(
            "`untie=True` is for folders; networks in memory have a tensor under each name, so leave it out and give "
            "the symmetry of a module in which nothing is tied"
        )
    if job.output is not None and job.output.is_file:
        raise ValueError("`untie=True` changes config.json, so the output must be a folder; give one")
    with untie(None, *job.checkpoints) as (_, *checkpoints):
        return job.of(*checkpoints)


def _untied_configuration(folder: Path) -> bytes:
    """Return the config.json of a folder, changed such that the model has no tied tensors."""
    return (json.dumps(_without_ties(read_object(folder / CONFIG)), indent=2) + "\n").encode()


def _tied(module: nn.Module) -> list[tuple[str, ...]]:
    """Return the names of each parameter that has several names."""
    names: dict[int, list[str]] = {}
    for name, tensor in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(tensor), []).append(name)
    return [tuple(several) for several in names.values() if len(several) > 1]


def _without_ties(config: dict[str, Any]) -> dict[str, Any]:
    nested = {key: _without_ties(value) for key, value in config.items() if isinstance(value, dict) and TIED in value}
    return config | nested | {TIED: False}


def _with_copies(checkpoint: Checkpoint, tied: list[tuple[str, ...]]) -> Checkpoint:
    """Return a checkpoint with a tensor under each name of every tied tensor that was stored once."""
    stored = dict(checkpoint.stored)
    for names in tied:
        known = next((name for name in names if name in stored), None)
        if known is None:
            raise ValueError(
                f"the checkpoint names tied tensors differently than its model ({_named([names])}); save it again with "
                "transformers"
            )
        stored |= {name: stored[known]._replace(name=name) for name in names if name not in stored}
    result = copy(checkpoint)
    result.stored, result._files = stored, {}
    return result


def _named(tied: list[tuple[str, ...]]) -> str:
    return " and ".join(repr(name) for names in tied[:2] for name in names)

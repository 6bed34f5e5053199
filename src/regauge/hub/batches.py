"""Batches of data, opened by name: from factories or from files of arrays."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from regauge.checkpoints.array_files import SUFFIXES, read_arrays
from regauge.core.task import Batch
from regauge.hub.user_code import call_factory


def open_batches(name: str | Path, batch: int = 512) -> list[Batch]:
    """Open a list of batches (inputs, targets) by name.

    Args:
        name: `package.module:factory` or `file.py:factory` that returns batches, or an .npz or .safetensors file with
            the arrays `inputs` and `targets`.
        batch: The batch size, for data from a file.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: There are no batches, an entry is not a pair of inputs and targets, or values are NaN or Inf.
    """
    name = str(name)
    if batch < 1:
        raise ValueError(f"`batch=` is {batch}; a batch has at least one example")
    if not name.endswith(SUFFIXES):
        found = call_factory(name, "DATA")
        if not isinstance(found, Iterable):
            raise ValueError(
                f"the factory {name!r} returned a {type(found).__name__}, but batches are needed: return a list of them"
            )
        batches = [_as_batch(item, name) for item in found]
        if not batches:
            raise ValueError(f"the factory {name!r} returned no batches; return at least one")
        _require_values(batches, name)
        return batches
    arrays = read_arrays(name)
    if not {"inputs", "targets"} <= arrays.keys():
        raise ValueError(f"{name!r} has the arrays {sorted(arrays)}, but needs 'inputs' and 'targets'; write both")
    inputs, targets = arrays["inputs"], _signed(arrays["targets"])
    if not inputs.ndim or not targets.ndim:
        raise ValueError(f"the arrays of {name!r} are single numbers; their first axis must count the examples")
    if len(inputs) != len(targets) or len(inputs) == 0:
        raise ValueError(
            f"{name!r} has {len(inputs)} inputs and {len(targets)} targets; it needs one for each: write as many"
        )
    _require_values([(inputs, targets)], name)
    return list(zip(torch.split(inputs, batch), torch.split(targets, batch), strict=True))


def _require_values(batches: Sequence[Batch], name: str) -> None:
    """Raise a ValueError unless every batch has examples and all values are finite."""
    for pair in batches:
        for tensor in pytree.tree_leaves(pair):
            if isinstance(tensor, Tensor) and tensor.numel() == 0:
                raise ValueError(f"{name!r} has a batch without examples; leave it out")
            if isinstance(tensor, Tensor) and tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                raise ValueError(f"{name!r} has examples with NaN or Inf; leave them out")


def _as_batch(item: Any, name: str) -> Batch:
    if isinstance(item, tuple | list) and len(item) == 2 and isinstance(item[1], Tensor):
        return item[0], _signed(item[1])
    raise ValueError(
        f"the factory {name!r} returned a {type(item).__name__} as a batch; a batch is (inputs, targets), where "
        "targets is a tensor; return these"
    )


def _signed(targets: Tensor) -> Tensor:
    """Return targets in a signed dtype, which torch can compare. Values that are too large for the dtype become
    negative, which marks them as invalid.
    """
    return targets.long() if targets.dtype in (torch.uint16, torch.uint32, torch.uint64) else targets

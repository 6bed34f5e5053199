"""Safetensors files in which `torch.distributed.checkpoint` stores chunks of tensors.

Every process writes files with names such as `shard-00001-model-00001-of-00002.safetensors`. The file header contains
the offsets of each chunk in the whole tensor.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from regauge.checkpoints.formats.headers import SHARDING, OpenedFile, StoredPart, StoredTensor
from regauge.core.typed_json import parse_json

MOST_CELLS = 1 << 22
"""The largest number of cells in the grid into which all boundaries of chunks divide a tensor."""


def require_whole(name: str, shape: tuple[int, ...], chunks: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
    """Raise a ValueError unless chunks with given offsets and sizes cover a tensor without overlaps.

    The text of the error is a clause, which the caller extends to a sentence.
    """
    if any(len(offsets) != len(shape) or len(sizes) != len(shape) for offsets, sizes in chunks):
        raise ValueError(f"a chunk of {name!r} has another number of axes than {list(shape)}")
    if any(o + s > length for offsets, sizes in chunks for o, s, length in zip(offsets, sizes, shape, strict=True)):
        raise ValueError(f"a chunk of {name!r} exceeds its shape {list(shape)}")
    if math.prod(shape) == 0:
        return
    edges = [sorted({0, length, *(o[k] for o, _ in chunks), *(o[k] + s[k] for o, s in chunks)})
             for k, length in enumerate(shape)]  # fmt: skip
    if math.prod(len(own) for own in edges) > MOST_CELLS:
        raise ValueError(f"{name!r} is cut into chunks that do not form a grid")
    at = [{edge: k for k, edge in enumerate(own)} for own in edges]
    covered = np.zeros([len(own) - 1 for own in edges], dtype=np.int32)
    for offsets, sizes in chunks:
        covered[tuple(slice(at[k][o], at[k][o + s]) for k, (o, s) in enumerate(zip(offsets, sizes, strict=True)))] += 1
    if not (covered == 1).all():
        what = "twice" if (covered > 1).any() else "in no chunk"
        raise ValueError(f"some values of {name!r} are {what}")


def gather_shards(opened: Mapping[Path, OpenedFile]) -> OpenedFile:
    """Return the tensors of a checkpoint whose files hold chunks, each tensor assembled from its chunks.

    Raises:
        ValueError: The files belong to different checkpoints, or a file is missing.
    """
    chunks: dict[str, list[StoredTensor]] = {}
    parts: dict[str, list[StoredPart]] = {}
    for file, one in opened.items():
        offsets = _offsets(file, one)
        for name, stored in one.tensors.items():
            assert stored.start is not None
            chunks.setdefault(name, []).append(stored)
            parts.setdefault(name, []).append(StoredPart(file, stored.start, offsets[name], stored.shape, None))
    found = {}
    for name, own in chunks.items():
        first = own[0]
        if len({(one.dtype, len(one.shape)) for one in own}) > 1:
            raise ValueError(
                f"{str(first.file)!r} and the files next to it have {name!r} with several dtypes or axes; put each "
                "checkpoint into a folder of its own"
            )
        ends = [[o + s for o, s in zip(one.offsets, one.sizes, strict=True)] for one in parts[name]]
        shape = tuple(max(lengths) for lengths in zip(*ends, strict=True))
        try:
            require_whole(name, shape, [(one.offsets, one.sizes) for one in parts[name]])
        except ValueError as error:
            raise ValueError(
                f"the files next to {str(first.file)!r} are not one whole checkpoint: {error}; one of them is missing, "
                "or they are of several checkpoints: fetch all again"
            ) from error
        nbytes = math.prod(shape) * first.dtype.itemsize
        found[name] = StoredTensor(name, first.file, first.dtype, shape, 0, nbytes, tuple(parts[name]))
        if len(own) == 1:  # the whole tensor
            found[name] = first
    return OpenedFile(found, next(iter(opened.values())).metadata, files=tuple(opened))


def _offsets(file: Path, opened: OpenedFile) -> dict[str, tuple[int, ...]]:
    """Return the offsets of every chunk in a file, as stored in the file's header."""
    try:
        about = parse_json(opened.metadata.get(SHARDING, "{}"))
        found = {name: tuple(about[name]["saved_offsets"]) for name in opened.tensors}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{str(file)!r} is a chunk of a distributed checkpoint, and its header does not say where its tensors "
            f"begin ({json.dumps(SHARDING)}); fetch it again"
        ) from error
    for name, own in found.items():
        if len(own) != len(opened.tensors[name].shape) or not all(type(k) is int and 0 <= k < 1 << 62 for k in own):
            raise ValueError(f"{str(file)!r} says that {name!r} begins at {list(own)}, which is no place in a tensor")
    return found

"""Networks with their targets: selection of usable networks, and splits for training, validation and test."""

import json
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from regauge.core.params import Params, count_models
from regauge.storage import Store
from regauge.storage.collection import Collection, Kept, Networks
from regauge.storage.store.columns import Array
from regauge.storage.store.listing import FINITE
from regauge.storage.store.rows import STANDARD, split

Indices = NDArray[np.int64]
Parts = dict[str, Indices]
READ_AT_ONCE = 256
"""The number of networks that are read at a time outside of training."""
SPLIT = "split"
"""The column in which a store marks its test networks."""
TESTS, VALIDATIONS = ("test", "testing"), ("validation", "val")
"""The names of the test split and of the validation split in the column `SPLIT`, as published populations write
them."""

SIGNAL = "signal"
"""The column in which a store of fitted signals names the signal of each network."""


def read_blocks(collection: Collection, indices: Indices) -> Iterator[tuple[Indices, Params]]:
    """Yield blocks of networks with the same layout: their positions in `indices`, and their parameters."""
    layouts = collection.layout_of(indices)
    for layout in np.unique(layouts):
        places = np.flatnonzero(layouts == layout)
        for start in range(0, len(places), READ_AT_ONCE):
            block = places[start : start + READ_AT_ONCE]
            yield block, collection.read(indices[block])


def to_net(params: Params, net: nn.Module) -> Params:
    """Return networks converted to the precision and the device of the net that reads them."""
    like = next(net.parameters())
    return {
        name: tensor.to(like.device, like.dtype if tensor.is_floating_point() else None)
        for name, tensor in params.items()
    }


def modules_of(collection: Collection, given: nn.Module | Sequence[nn.Module] | None) -> list[nn.Module]:
    """Return the module that evaluates the networks of each layout."""
    count = max(collection.layouts) + 1
    if given is not None:
        modules = [given] if isinstance(given, nn.Module) else list(given)
        if len(modules) != count:
            raise ValueError(f"{len(modules)} modules were given for networks of {count} layouts; give one for each")
        return modules
    modules = []
    for layout in range(count):
        member = collection.members[collection.first(layout)]
        if not isinstance(member, Store):
            raise ValueError("the networks must be run, but a population has no module; give `module`")
        modules.append(member.architecture.module())
    return modules


def spread(indices: Indices, count: int) -> Indices:
    """Select at most `count` evenly spaced indices."""
    return indices[np.linspace(0, len(indices) - 1, min(count, len(indices))).astype(np.int64)]


def digest(*arrays: Any) -> str:
    """Return a hash of the given values as a string."""
    found = blake2b(digest_size=16)
    for array in arrays:
        values = np.asarray(array)
        found.update(repr(values.tolist()).encode() if values.dtype == object else values.tobytes())
    return found.hexdigest()


def arrays_of(inputs: Any) -> list[Any]:
    """Return the tensors of a module's inputs."""
    if isinstance(inputs, Tensor):
        return [inputs.cpu()]
    return [array for one in (inputs.values() if isinstance(inputs, Mapping) else inputs) for array in arrays_of(one)]


def values_of(
    collection: Collection,
    targets: str | Sequence[Any] | Any,
    *,
    indices: Sequence[int] | NDArray[Any] | None = None,
    split: Mapping[str, Any] | None = None,
    checkpoints: Kept = "last",
    **_: object,
) -> tuple[str, NDArray[Any], Indices]:
    """Return the name and values of a target, and the indices of the finite networks that have a value.

    Args:
        collection: Stores or populations.
        targets: The name of a column of the stores, or a value for each network.
        indices: Indices of the networks to use, or a mask.
        split: Indices of networks for each split. If `split` is given, only networks without a target are left out.
        checkpoints: The checkpoints of each run in a store that are used if neither `indices` nor `split` is given; see
            `Collection.choose`.

    Raises:
        IndexError: An index is out of range.
        KeyError: The store has no column with the name `targets`.
        ValueError: The numbers of targets and networks differ, or none of the networks can be used.
    """
    count = len(collection)
    if isinstance(targets, str):
        name, values = targets, collection.column(targets)
    else:
        name = "target"
        values = targets.detach().cpu().numpy() if isinstance(targets, Tensor) else _array(targets)
    if values.shape != (count,):
        raise ValueError(f"the targets have shape {values.shape}, but there are {count} networks; give one for each")
    usable: NDArray[np.bool_] = (
        ~np.ma.getmaskarray(values) if isinstance(values, np.ma.MaskedArray) else np.ones(count, bool)
    )
    values = np.ma.getdata(values)
    usable = usable & np.isin(np.arange(count), collection.choose(indices, kept_unless(split, checkpoints)))
    if values.dtype.kind == "f":
        usable = usable & np.isfinite(values)
    usable &= are_finite(collection)
    if not usable.any():
        raise ValueError(f"no network is finite and has a value of {name!r}, so there is nothing to learn")
    return name, values, np.flatnonzero(usable)


def are_finite(collection: Collection, *, reads_memory: bool = False) -> NDArray[np.bool_]:
    """Return whether each network is finite, `[networks]`. Populations in memory are checked only on request."""
    fine = np.ones(len(collection), bool)
    for member, start in zip(collection.members, collection.starts.tolist(), strict=False):
        if isinstance(member, Store):
            fine[start : start + len(member)] = np.ma.filled(member.rows[FINITE], False).astype(bool)
        elif reads_memory:
            for tensor in member.values():
                if tensor.is_floating_point():
                    fine[start : start + len(tensor)] &= tensor.isfinite().reshape(len(tensor), -1).all(1).cpu().numpy()
    return fine


def find_usable(
    collection: Collection,
    *,
    indices: Sequence[int] | NDArray[Any] | None = None,
    split: Mapping[str, Any] | None = None,
    checkpoints: Kept = "last",
    reads_memory: bool = False,
    **_: object,
) -> Indices:
    """Return the indices of the chosen networks that are finite; see `FitArguments` and `are_finite`.

    Raises:
        IndexError: An index is out of range.
        ValueError: None of the networks is finite.
    """
    chosen = collection.choose(indices, kept_unless(split, checkpoints))
    found = np.intersect1d(np.flatnonzero(are_finite(collection, reads_memory=reads_memory)), chosen)
    if not len(found):
        raise ValueError("none of these networks is finite; give others")
    return found


def kept_unless(split: Mapping[str, Any] | None, checkpoints: Kept) -> Kept:
    """Return the checkpoints to use. If a split is given, all checkpoints are used, because the split may name any
    checkpoint.
    """
    return checkpoints if split is None else "all"


def split_networks(
    collection: Collection,
    usable: Indices,
    given: Mapping[str, Sequence[int] | NDArray[Any]] | None,
    by: str | None = None,
) -> Parts:
    """Return the indices of the networks for "train", "validation" and "test".

    Splits that the caller gives are used unchanged. If a store has a column "split", this column defines the test
    split, and optionally the validation split. All other networks of stores are split by run, or by the column `by`.
    Networks with one value in this column are in the same split. If several runs fitted one signal, stores are split by
    the column "signal" by default. A population in memory is split randomly, but always in the same way.

    Raises:
        KeyError: The stores have no column with the name `by`.
        ValueError: A required split is missing or has no networks, or networks with the same value are in two splits.
    """
    ids = np.arange(len(collection))
    if given is not None:
        if missing := STANDARD.keys() - given.keys():
            raise ValueError(f"the split lacks {sorted(missing)}; give numbers of networks for {list(STANDARD)}")
        parts = {name: np.asarray(given[name], np.int64) for name in STANDARD}
        seen = np.concatenate(list(parts.values()))
        if len(np.unique(seen)) < len(seen) or not np.isin(seen, ids).all():
            raise ValueError(f"the parts of a split must be distinct numbers from 0 to {len(ids) - 1}")
    else:
        by = by or _repeated(collection)
        whole = None if by is None else codes_of(collection.column(by))
        pieces = [
            {n: part + start for n, part in _split_one(one, None if whole is None else whole[start:end]).items()}
            for one, start, end in zip(
                collection.members, collection.starts.tolist(), collection.starts[1:].tolist(), strict=False
            )
        ]
        parts = {name: np.concatenate([piece[name] for piece in pieces]) for name in STANDARD}
        if whole is not None:
            _require_apart(parts, whole, str(by))
    parts = {name: np.intersect1d(part, usable) for name, part in parts.items()}
    empty = [name for name, part in parts.items() if not len(part)]
    if empty:
        raise ValueError(
            f"{len(usable)} networks can be used, and none is left for {' and '.join(empty)}; give more networks, or "
            "`split`"
        )
    return parts


def _split_one(networks: Networks, codes: Indices | None) -> Parts:
    """Return the splits of one store or population."""
    if not isinstance(networks, Store):
        count = count_models(networks)
        order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).numpy()
        cuts = np.cumsum([round(share * count) for share in STANDARD.values()])[:-1]
        return dict(zip(STANDARD, map(np.sort, np.split(order, cuts)), strict=True))
    runs = networks.rows.column("id").values if codes is None else codes
    if len(runs) != len(networks):
        runs = np.broadcast_to(runs, len(networks))  # all networks have one id
    if SPLIT not in networks.rows.names:
        return split(runs)
    test, validation = (
        np.concatenate([networks.rows.where(split=name) for name in names]) for names in (TESTS, VALIDATIONS)
    )
    if not len(test):
        return split(runs)
    rest = np.setdiff1d(np.arange(len(networks)), np.concatenate([test, validation]))
    if len(validation):
        return {"train": rest, "validation": validation, "test": test}
    known = {name: STANDARD[name] / (1 - STANDARD["test"]) for name in ("train", "validation")}
    return {**{name: rest[part] for name, part in split(runs[rest], known).items()}, "test": test}


def _repeated(collection: Collection) -> str | None:
    """Return the name of the signal column, if some signal has several runs."""
    if not collection.has_column(SIGNAL):
        return None
    for store in collection.stores:
        runs = np.unique(np.stack([store.rows["id"], np.ma.filled(store.rows[SIGNAL], -1)]), axis=1)
        if len(np.unique(runs[1])) < runs.shape[1]:
            return SIGNAL
    return None


def codes_of(column: Array) -> Indices:
    """Return an integer for each entry of a column; equal entries get the same integer."""
    texts = [json.dumps(value, sort_keys=True) for value in column.tolist()]
    digests = {text: blake2b(text.encode(), digest_size=7).digest() for text in set(texts)}
    return np.array([int.from_bytes(digests[text], "big") for text in texts], np.int64)


def _require_apart(parts: Parts, codes: Indices, by: str) -> None:
    """Raise an error if networks in two splits have the same value in a column."""
    for first, second in (("train", "validation"), ("train", "test"), ("validation", "test")):
        shared = np.intersect1d(codes[parts[first]], codes[parts[second]])
        if len(shared):
            raise ValueError(
                f"{len(shared)} values of {by!r} have networks for {first} and for {second}, as the column {SPLIT!r} "
                "says; correct that column, or split by another one"
            )


def _array(values: Sequence[Any]) -> NDArray[Any]:
    if isinstance(values, np.ndarray):
        return values
    made = np.asarray(values)
    if made.dtype.kind in "US":
        made = made.astype(object)
    return made

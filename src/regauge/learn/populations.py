"""Networks with their targets: which of them can be used, and the parts for training, validation and test."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from regauge.core.params import Params, count_models, select
from regauge.core.symmetry import Symmetry
from regauge.storage.collection import Networks
from regauge.storage.store import Store
from regauge.storage.store.listing import FINITE, resolve
from regauge.storage.store.rows import STANDARD, split

Indices = NDArray[np.int64]
Parts = dict[str, Indices]
AT_ONCE = 256
"""Networks that are read at a time where nothing is trained."""
SPLIT = "split"
"""The column in which a store says itself which networks are for testing."""


def count_networks(networks: Networks) -> int:
    """The number of networks of a store or a population."""
    return len(networks) if isinstance(networks, Store) else count_models(networks)


def read_networks(networks: Networks, indices: Indices) -> Params:
    """Some networks, stacked."""
    return networks.read(indices) if isinstance(networks, Store) else select(networks, torch.from_numpy(indices))


def read_blocks(networks: Networks, indices: Indices) -> Iterator[tuple[Indices, Params]]:
    """Some networks in their order, a moderate number at a time."""
    for start in range(0, len(indices), AT_ONCE):
        block = indices[start : start + AT_ONCE]
        yield block, read_networks(networks, block)


def to_device(values: Any, device: torch.device | str) -> Any:
    """Tensors, or tuples and mappings of them, on a device."""
    if isinstance(values, Mapping):
        return {name: to_device(value, device) for name, value in values.items()}
    if isinstance(values, tuple | list):
        return tuple(to_device(value, device) for value in values)
    return values.to(device) if isinstance(values, torch.Tensor) else values


def to_net(params: Params, net: nn.Module) -> Params:
    """Networks in the precision and on the device of the net that reads them."""
    like = next(net.parameters())
    return {
        name: tensor.to(like.device, like.dtype if tensor.is_floating_point() else None)
        for name, tensor in params.items()
    }


def symmetry_of(networks: Networks, symmetry: Symmetry | None) -> Symmetry:
    """The symmetry that was given, or else that of the store.

    Raises:
        ValueError: There is none.
    """
    if symmetry is not None:
        return symmetry
    if isinstance(networks, Store):
        return networks.require_symmetry()
    raise ValueError("the symmetry of a population in memory is not known; give `symmetry`")


def values_of(
    networks: Networks, targets: str | Sequence[Any] | Any, indices: Sequence[int] | NDArray[Any] | None = None
) -> tuple[str, NDArray[Any], Indices]:
    """The name and values of a target, `[networks]`, and the numbers of the networks that have one and are finite.

    Args:
        networks: A store or a population.
        targets: Name of a column of the store, or a value for each network.
        indices: Numbers of the networks to use, or a mask; all unless given.

    Raises:
        IndexError: There is no network of some number.
        KeyError: The store has no such column.
        ValueError: The targets are not one for each network, or none of the networks can be used.
    """
    count = count_networks(networks)
    if isinstance(targets, str):
        if not isinstance(networks, Store):
            raise ValueError(f"{targets!r} names a column, but a population in memory has none; give values")
        name, values = targets, networks.rows[targets]
    else:
        name = "target"
        values = targets.detach().cpu().numpy() if isinstance(targets, torch.Tensor) else _array(targets)
    if values.shape != (count,):
        raise ValueError(f"the targets have shape {values.shape}, but there are {count} networks; give one for each")
    usable = ~np.ma.getmaskarray(values) if isinstance(values, np.ma.MaskedArray) else np.ones(count, bool)
    values = np.ma.getdata(values)
    if indices is not None:
        usable = usable & np.isin(np.arange(count), resolve(indices, count, "the population"))
    if values.dtype.kind == "f":
        usable = usable & np.isfinite(values)
    if isinstance(networks, Store):
        usable = usable & np.ma.filled(networks.rows[FINITE], False).astype(bool)
    if not usable.any():
        raise ValueError(f"none of these networks is finite and has a value of {name!r}; there is nothing to learn")
    return name, values, np.flatnonzero(usable)


def split_networks(
    networks: Networks, usable: Indices, given: Mapping[str, Sequence[int] | NDArray[Any]] | None
) -> Parts:
    """Numbers of the networks for "train", "validation" and "test".

    What was given is taken. A store with a column "split" has its test part there (and perhaps its validation part),
    and what is left is divided by run; other stores are divided by run; and of a population in memory fixed random
    networks are taken.

    Raises:
        ValueError: A part that is needed is missing or has no network.
    """
    ids = np.arange(count_networks(networks))
    if given is not None:
        if missing := STANDARD.keys() - given.keys():
            raise ValueError(f"the split lacks {sorted(missing)}; give numbers of networks for {list(STANDARD)}")
        parts = {name: np.asarray(given[name], np.int64) for name in STANDARD}
        seen = np.concatenate(list(parts.values()))
        if len(np.unique(seen)) < len(seen) or not np.isin(seen, ids).all():
            raise ValueError(f"the parts of a split must be distinct numbers from 0 to {len(ids) - 1}")
    elif isinstance(networks, Store):
        parts = _split_store(networks)
    else:
        order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(0)).numpy()
        cuts = np.cumsum([round(share * len(ids)) for share in STANDARD.values()])[:-1]
        parts = dict(zip(STANDARD, map(np.sort, np.split(order, cuts)), strict=True))
    parts = {name: np.intersect1d(part, usable) for name, part in parts.items()}
    empty = [name for name, part in parts.items() if not len(part)]
    if empty:
        raise ValueError(
            f"of {len(usable)} networks that can be used, none is left for {' and '.join(empty)}; take more networks, "
            "or give `split`"
        )
    return parts


def _split_store(store: Store) -> Parts:
    runs = store.rows.column("id").values
    if SPLIT not in store.rows.names or not len(store.rows.where(split="test")):
        return store.split()
    test, validation = (store.rows.where(split=name) for name in ("test", "validation"))
    rest = np.setdiff1d(np.arange(len(store)), np.concatenate([test, validation]))
    if len(validation):
        return {"train": rest, "validation": validation, "test": test}
    known = {name: STANDARD[name] / (1 - STANDARD["test"]) for name in ("train", "validation")}
    return {**{name: rest[part] for name, part in split(runs[rest], known).items()}, "test": test}


def _array(values: Sequence[Any]) -> NDArray[Any]:
    if isinstance(values, np.ndarray):
        return values
    made = np.asarray(values)
    if made.dtype.kind in "US":
        made = made.astype(object)
    return made

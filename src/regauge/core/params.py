"""Parameters as values: a dictionary from names to tensors, exactly a module's `state_dict()`."""

import math
from collections.abc import Collection, Mapping, Sequence
from functools import reduce

import torch
from torch import Tensor

Params = dict[str, Tensor]
"""Parameters and buffers by name. A population has one leading model axis on every tensor."""


def work_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """Return the dtype for sums and comparisons: float32, or the widest of the given floating-point dtypes."""
    return reduce(torch.promote_types, dtypes, torch.float32)


def to_work(params: Mapping[str, Tensor]) -> Params:
    """Return a network whose floating-point tensors are at least as precise as float32; those in 8 bits stay as they
    are."""
    return {
        name: t.to(work_dtype(t.dtype)) if t.is_floating_point() and t.itemsize > 1 else t for name, t in params.items()
    }


def select(params: Mapping[str, Tensor], index: int | slice | Tensor) -> Params:
    """Return some networks of a population; an integer gives one of them, without a model axis."""
    if isinstance(index, Tensor):
        return {name: tensor[index.to(tensor.device)] for name, tensor in params.items()}
    return {name: tensor[index] for name, tensor in params.items()}


def are_copies(population: Mapping[str, Tensor]) -> bool:
    """Return whether the networks of a population are one, expanded along the model axis without copying."""
    return all(len(tensor) > 1 and tensor.stride(0) == 0 for tensor in population.values())


def below(prefix: str, params: Mapping[str, Tensor]) -> Params:
    """Return the tensors whose names begin with a prefix, by the rest of their names."""
    return {name.removeprefix(prefix): tensor for name, tensor in params.items() if name.startswith(prefix)}


def count_models(params: Mapping[str, Tensor]) -> int:
    """Return the number of networks of a population; a ValueError if the tensors have different numbers, or none."""
    if not params:
        raise ValueError("a population without tensors has no networks; give at least one tensor")
    (first, count), *others = ((name, len(tensor) if tensor.ndim else 0) for name, tensor in params.items())
    for name, other in ((first, count), *others):
        if other != count or other == 0:
            raise ValueError(
                f"{name!r} has {other} networks along its leading model axis and {first!r} has {count}; the tensors of "
                "a population (buffers too) have one model axis of one length, and there must be at least one network"
            )
    return count


def require_finite(params: Mapping[str, Tensor], label: str, structure: Collection[str] = ()) -> None:
    """Raise a ValueError if a floating-point tensor of a network holds NaN or Inf; Inf is fine in structure (masks)."""
    for name, tensor in params.items():
        if tensor.is_meta:
            raise ValueError(
                f"{name!r} of {label} is on the meta device, where tensors have no values; load a checkpoint first"
            )
        tensor = tensor.detach()
        if tensor.is_floating_point() and tensor.itemsize == 1:
            tensor = tensor.float()  # float8 has no sums
        # A finite sum has finite terms, and costs one reading; one that is not may only have overflowed.
        if not tensor.is_floating_point() or math.isfinite(tensor.sum()) or bool(tensor.isfinite().all()):
            continue
        bad = int((tensor.isnan() if name in structure else ~tensor.isfinite()).sum())
        if not bad:
            continue
        raise ValueError(
            f"{name!r} of {label} holds {bad} values that are NaN or Inf (of {tensor.numel()}); "
            "the network cannot be used, check its training or load another checkpoint"
        )


def require_same_names(params_a: Mapping[str, Tensor], params_b: Mapping[str, Tensor]) -> None:
    """Raise a ValueError unless two networks have parameters of the same names."""
    only_a = sorted(params_a.keys() - params_b.keys())
    only_b = sorted(params_b.keys() - params_a.keys())
    if only_a or only_b:
        raise ValueError(
            f"the two networks have different parameters: only the first has {only_a[:5]}, only the second "
            f"has {only_b[:5]}; {say_prefix(params_a, params_b) or 'both must come from the same architecture'}"
        )


def require_same_shapes(params_a: Mapping[str, Tensor], params_b: Mapping[str, Tensor]) -> None:
    """Raise a ValueError unless two networks have the same names and shapes."""
    require_same_names(params_a, params_b)
    for name, tensor in params_a.items():
        if tensor.shape != params_b[name].shape:
            raise ValueError(
                f"{name!r} has shape {tuple(tensor.shape)} in the first network and "
                f"{tuple(params_b[name].shape)} in the second; both must come from the same architecture; give such "
                "networks"
            )


def say_prefix(params_a: Collection[str], params_b: Collection[str]) -> str:
    """Return a hint for an error message if all names of one network differ from the other's by one prefix; else
    empty."""
    for which, longer, shorter in (("second", params_b, params_a), ("first", params_a, params_b)):
        ends = {name for name in shorter if any(one.endswith(name) for one in longer)}
        for lead in {one.removesuffix(name) for name in sorted(ends)[:1] for one in longer if one.endswith(name)}:
            if lead and {lead + name for name in shorter} == {*longer}:
                return (
                    f"all names of the {which} begin with {lead!r}: leave it out, as in "
                    f"{{name.removeprefix({lead!r}): tensor for name, tensor in params.items()}}"
                )
    return ""


def require_alike(*networks: Mapping[str, Tensor], structure: Collection[str] = ()) -> None:
    """Raise a ValueError unless networks are of one architecture and finite; structure may hold Inf."""
    for k, params in enumerate(networks):
        require_same_shapes(networks[0], params)
        require_finite(params, label(k), structure)


def equal_names(networks: Sequence[Mapping[str, Tensor]]) -> set[str]:
    """Return the names of the tensors that are equal in all networks."""
    first, rest = networks[0], networks[1:]
    return {n for n, tensor in first.items() if all(n in other and _is_equal(tensor, other[n]) for other in rest)}


def _is_equal(first: Tensor, other: Tensor) -> bool:
    return first is other or (first.dtype == other.dtype and first.device == other.device and torch.equal(first, other))


def label(k: int, what: str = "network") -> str:
    """Return the name of network k in error messages, such as "the first network"."""
    return f"the {('first', 'second', 'third')[k]} {what}" if k < 3 else f"{what} {k + 1}"

"""Parameters by name, as in a module's `state_dict()`, and checks of names, shapes, dtypes and entries."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import reduce

import torch
from torch import Tensor

from regauge.core.counted import shorten
from regauge.core.groups import Group

Params = dict[str, Tensor]
"""Parameters and buffers by name. A population has one leading model axis on every tensor."""
VALUES = frozenset((torch.float64, torch.float32, torch.float16, torch.bfloat16))
"""Dtypes whose entries are themselves the weights of a network.

Float8 dtypes are excluded because they store codes, whose scales are in other tensors.
"""
INTEGERS = frozenset((torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64))
"""Dtypes of masks, indices and counters. Quantized weights may also have these dtypes."""


def work_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """Return the dtype for sums and comparisons: float32, or the widest given dtype if it is wider."""
    return reduce(torch.promote_types, dtypes, torch.float32)


def to_work(params: Mapping[str, Tensor]) -> Params:
    """Convert floating-point tensors of a network to at least float32. Tensors with 8 bits per entry stay unchanged."""
    return {
        name: t.to(work_dtype(t.dtype)) if t.is_floating_point() and t.itemsize > 1 else t for name, t in params.items()
    }


def select(params: Mapping[str, Tensor], index: int | slice | Tensor) -> Params:
    """Return some networks of a population. If the index is an integer, return one network without a model axis."""
    if isinstance(index, Tensor):
        return {name: tensor[index.to(tensor.device)] for name, tensor in params.items()}
    return {name: tensor[index] for name, tensor in params.items()}


def batch_of_one(params: Mapping[str, Tensor]) -> Params:
    """Return a network as a population of size one, without copying."""
    return {name: tensor.unsqueeze(0) for name, tensor in params.items()}


def are_copies(population: Mapping[str, Tensor]) -> bool:
    """Return whether all networks of a population are one network, expanded along the model axis without copying."""
    return all(len(tensor) > 1 and tensor.stride(0) == 0 for tensor in population.values())


def below(prefix: str, params: Mapping[str, Tensor]) -> Params:
    """Return the tensors whose names begin with a prefix, and remove this prefix from their names."""
    return {name.removeprefix(prefix): tensor for name, tensor in params.items() if name.startswith(prefix)}


def count_models(params: Mapping[str, Tensor]) -> int:
    """Return the number of networks of a population.

    Raise a ValueError if tensors have different numbers of networks, or if the population is empty.
    """
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


def count_not_finite(tensor: Tensor, *, is_structure: bool = False) -> int:
    """Return the number of entries that are NaN or Inf.

    If `is_structure`, count only NaN, because structure tensors such as masks may contain Inf.
    """
    tensor = tensor.detach() if tensor.requires_grad else tensor
    if tensor.is_floating_point() and tensor.itemsize == 1:
        tensor = tensor.float()  # torch cannot sum float8
    # If the sum is finite, all terms are, and the sum takes one pass. A sum that is not finite may be an overflow.
    if not tensor.is_floating_point() or math.isfinite(tensor.sum()):
        return 0
    return int((tensor.isnan() if is_structure else ~tensor.isfinite()).sum())


def require_finite(params: Mapping[str, Tensor], label: str, structure: Collection[str] = ()) -> None:
    """Raise a ValueError if a floating-point tensor contains NaN or Inf. Structure tensors (masks) may contain Inf."""
    for name, tensor in params.items():
        if tensor.is_meta:
            raise ValueError(
                f"{name!r} of {label} is on the meta device, where tensors have no values; load a checkpoint first"
            )
        bad = count_not_finite(tensor, is_structure=name in structure)
        if not bad:
            continue
        raise ValueError(
            f"{name!r} of {label} holds NaN or Inf in {bad} of {tensor.numel()} entries; the network cannot be used: "
            "check its training or load another checkpoint"
        )


def require_same_names(params_a: Mapping[str, Tensor], params_b: Mapping[str, Tensor]) -> None:
    """Raise a ValueError unless two networks have the same parameter names."""
    if params_a.keys() != params_b.keys():
        raise ValueError(
            f"the two networks have different parameters: {say_different(params_a, params_b)}; "
            f"{say_prefix(params_a, params_b) or 'both must come from the same architecture'}"
        )


def say_different(params_a: Mapping[str, Tensor], params_b: Mapping[str, Tensor]) -> str:
    """Return a clause for an error message that lists the parameters which only one of two networks has."""
    sides = (("first", params_a.keys() - params_b.keys()), ("second", params_b.keys() - params_a.keys()))
    return ", and ".join(f"only the {which} has {shorten(sorted(names))}" for which, names in sides if names)


def require_same_shapes(params_a: Mapping[str, Tensor], params_b: Mapping[str, Tensor]) -> None:
    """Raise a ValueError unless two networks have the same parameter names and shapes."""
    require_same_names(params_a, params_b)
    for name, tensor in params_a.items():
        if tensor.shape != params_b[name].shape:
            raise ValueError(
                f"{name!r} has shape {tuple(tensor.shape)} in the first network and "
                f"{tuple(params_b[name].shape)} in the second; both must come from the same architecture; give such "
                "networks"
            )


def say_prefix(params_a: Collection[str], params_b: Collection[str]) -> str:
    """Return a hint for an error message if the names of two networks differ only by a prefix.

    If the names differ in more than a prefix, return an empty string.
    """
    for which, longer, shorter in (("second", params_b, params_a), ("first", params_a, params_b)):
        ends = {name for name in shorter if any(one.endswith(name) for one in longer)}
        for lead in {one.removesuffix(name) for name in sorted(ends)[:1] for one in longer if one.endswith(name)}:
            if lead and {lead + name for name in shorter} == {*longer}:
                return (
                    f"all names of the {which} begin with {lead!r}: leave it out, as in "
                    f"{{name.removeprefix({lead!r}): tensor for name, tensor in params.items()}}"
                )
    return ""


def require_alike(*networks: Mapping[str, Tensor], structure: Collection[str] = (), labels: Sequence[str] = ()) -> None:
    """Raise a ValueError unless networks have one architecture and finite entries.

    Structure tensors such as masks may contain Inf. The error names a network by its label, if labels are given.
    """
    for k, params in enumerate(networks):
        require_same_shapes(networks[0], params)
        require_finite(params, labels[k] if labels else label(k), structure)


def equal_names(networks: Sequence[Mapping[str, Tensor]]) -> set[str]:
    """Return the names of the tensors that are equal in all networks."""
    first, rest = networks[0], networks[1:]
    return {n for n, tensor in first.items() if all(n in other and _is_equal(tensor, other[n]) for other in rest)}


def _is_equal(first: Tensor, other: Tensor) -> bool:
    return first is other or (first.dtype == other.dtype and first.device == other.device and torch.equal(first, other))


def label(k: int, what: str = "network") -> str:
    """Return the label of the network with index k in error messages, such as "the first network"."""
    return f"the {('first', 'second', 'third')[k]} {what}" if k < 3 else f"{what} {k + 1}"


def round_to(tensor: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Convert a tensor to another dtype. This function raises the same errors as `require_held`."""
    if tensor.dtype == dtype:
        return tensor
    rounded = tensor.to(dtype)
    if dtype.is_floating_point:
        require_held(name, rounded, (tensor,))
    return rounded


def round_alike(made: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> Params:
    """Convert a network that was computed from a given network to the dtypes of the given network.

    This function raises the same errors as `require_held`.
    """
    rounded = {name: tensor.to(given[name].dtype) for name, tensor in made.items()}
    for name, tensor in rounded.items():
        if tensor is not given[name]:
            require_held(name, tensor, (given[name],))
    return rounded


def require_held(name: str, made: Tensor, given: Iterable[Tensor]) -> None:
    """Raise an error if a computed tensor contains NaN or Inf, unless one of the given tensors already does.

    The tensor was computed from the given tensors, for example by permuting an attention mask. If the given tensors are
    finite, a computed NaN or Inf means that the dtype cannot represent an entry. The given tensors are read only if the
    computed tensor contains NaN or Inf.

    Raises:
        ValueError: The dtype cannot represent the computed entries.
    """
    if not made.is_floating_point() or made.is_meta or _is_finite(made):
        return
    lost = _count(made) - sum(map(_count, given))
    if lost <= 0:
        return
    kind, largest = str(made.dtype).removeprefix("torch."), torch.finfo(made.dtype).max
    wider = "bfloat16" if largest < torch.finfo(torch.bfloat16).max else "float64"
    wide = f"wider tensors, such as {wider} (in files: `dtype={wider}`), or "
    entries = "1 entry" if lost == 1 else f"{lost} entries"
    raise ValueError(
        f"{name!r} would exceed {largest:.3g}, the largest number of {kind}, in {entries}; use "
        f"{'' if made.dtype == torch.float64 else wide}smaller weights; `scales=keep` of align and merge scales nothing"
    )


def require_movable(groups: Iterable[Group], params: Mapping[str, Tensor], buffers: Collection[str]) -> None:
    """Raise an error if a symmetry acts on tensors without floating-point weights, such as quantized weights.

    A symmetry may only permute the entries of integer buffers, such as masks and indices.

    Raises:
        ValueError: A group acts on a tensor that holds no floating-point weights.
    """
    for group in groups:
        for place in group.placements:
            dtype = params[place.parameter].dtype
            if dtype in VALUES:
                continue
            is_reordered = group.matrix == "none" and not any((*place.scale, *place.sign, *place.parity, *place.shift))
            if is_reordered and dtype in INTEGERS and place.parameter in buffers:
                continue
            raise ValueError(
                f"{place.parameter!r} is {dtype}, but group {group.name!r} acts on it, and only values in float16, "
                f"bfloat16, float32 or float64 can be moved; {_remedy(dtype)}"
            )


def require_shared(name: str, tensors: Sequence[Tensor], *, lead: int = 0) -> None:
    """Raise an error for integer or boolean tensors that differ between networks, because they have no mean.

    Counters, which are one integer in each network, may differ.

    Args:
        name: The name of the tensor.
        tensors: The tensor of each network.
        lead: The number of leading model axes.

    Raises:
        ValueError: The tensors differ.
    """
    first, *others = tensors
    if first.dtype in VALUES or (first.dtype in INTEGERS and first.ndim <= lead):
        return
    for other in others:
        if other is not first and not _is_same(first, other):
            raise ValueError(
                f"{name!r} is {first.dtype} and differs between the networks, but only values in float16, bfloat16, "
                f"float32 or float64 have a mean; {_remedy(first.dtype)}"
            )


def _is_finite(tensor: Tensor) -> bool:
    """Return whether all entries are finite.

    If the sum of all entries is finite, all entries are finite, and the sum takes only one pass over the tensor.
    """
    tensor = tensor.detach() if tensor.requires_grad else tensor
    return math.isfinite(tensor.sum(dtype=torch.float32 if tensor.itemsize < 4 else None))


def _count(tensor: Tensor) -> int:
    """Return the number of entries that are NaN or Inf."""
    return int((~tensor.detach().isfinite()).sum())


def _is_same(first: Tensor, other: Tensor) -> bool:
    if first.dtype != other.dtype or first.shape != other.shape:
        return False
    if first.dtype not in INTEGERS and not first.is_complex():
        first, other = (tensor.contiguous().view(torch.uint8) for tensor in (first, other))
    return torch.equal(first, other.to(first.device))


def _remedy(dtype: torch.dtype) -> str:
    if dtype.is_complex:
        return "hold real and imaginary parts in parameters of their own"
    if dtype in (torch.bool, torch.int64):
        return "if it is an index or a mask, register it as a buffer that is equal in all networks"
    return "quantized weights must be dequantized first: load the network, dequantize it and save it in bfloat16"

"""Values in the dtype in which they are kept: what a dtype cannot hold is refused, not turned into Inf."""

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from regauge.core.params import Params


def round_to(tensor: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Return a tensor in another dtype; it raises as `require_held` does."""
    if tensor.dtype == dtype:
        return tensor
    rounded = tensor.to(dtype)
    if dtype.is_floating_point:
        require_held(name, rounded, (tensor,))
    return rounded


def round_alike(made: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> Params:
    """Return a network that was made of a given one, in the dtypes of that; it raises as `require_held` does."""
    rounded = {name: tensor.to(given[name].dtype) for name, tensor in made.items()}
    for name, tensor in rounded.items():
        if tensor is not given[name]:
            require_held(name, tensor, (given[name],))
    return rounded


def require_held(name: str, made: Tensor, given: Iterable[Tensor]) -> None:
    """Raise if a computed tensor holds more values that are not finite than the tensors that it was made of.

    What was Inf or NaN before may be so afterwards, such as an attention mask that is moved. Other such values are
    beyond the range of the dtype. The given tensors are read only where something is not finite.

    Raises:
        ValueError: The dtype of the tensor cannot hold its values.
    """
    if not made.is_floating_point() or made.is_meta or _is_finite(made):
        return
    lost = _count(made) - sum(map(_count, given))
    if lost <= 0:
        return
    kind, largest = str(made.dtype).removeprefix("torch."), torch.finfo(made.dtype).max
    wider = "bfloat16" if largest < torch.finfo(torch.bfloat16).max else "float64"
    wide = f"a wider dtype (`dtype={wider}`, or wider tensors) or "
    raise ValueError(
        f"{name!r} would hold {lost} values that {kind} cannot hold, which ends at {largest:.3g}; use "
        f"{'' if made.dtype == torch.float64 else wide}smaller weights; `scales=keep` of "
        "align and merge multiplies nothing"
    )


def _is_finite(tensor: Tensor) -> bool:
    """Return whether all values are; a finite sum has finite terms, and costs one reading."""
    return math.isfinite(tensor.detach().sum(dtype=torch.float32 if tensor.itemsize < 4 else None))


def _count(tensor: Tensor) -> int:
    """Return the number of values that are not finite."""
    return int((~tensor.detach().isfinite()).sum())

"""Conversion of loops over the experts of a mixture, so that the loops can be traced: every expert processes all
tokens.

The usual loop visits only experts that the router chose for at least one token. The usual loop over chosen experts
cannot be traced, because the chosen experts depend on tensor values. The converted loop applies every expert to every
token, and multiplies the results of experts that were not chosen by zero. The converted loop computes the same function
as the original loop.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import MethodType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree


class EveryExpert(TorchFunctionMode):
    """A context in which a loop over chosen experts applies every expert to every token.

    In one form, the loop finds the chosen experts with `nonzero`, finds the tokens of an expert with `where`, and adds
    the results of the tokens with `index_add_`. Only the loop itself may use the result of `where`. The last `spare`
    entries of the expert masks do not represent experts. The `spare` entries represent tokens that other devices
    process.

    A second form of the loop sorts the tokens by expert. A third form splits the tokens by a list of token counts per
    expert, and concatenates the results of the experts with `cat`.
    """

    def __init__(self, spare: int = 0) -> None:
        super().__init__()
        self._spare = spare
        self._chosen: dict[int, tuple[Tensor, Tensor]] = {}
        self._counts: list[_Counts] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.nonzero, torch.nonzero) and args[0].ndim == 1:
            return [_Number([expert]) for expert in range(args[0].shape[0] - self._spare)]
        if func is torch.where and len(args) == 1 and args[0].ndim == 2:
            ranks, tokens = args[0].shape
            rank = torch.arange(ranks, device=args[0].device).repeat_interleave(tokens)
            token = torch.arange(tokens, device=args[0].device).repeat(ranks)
            self._chosen[id(token)] = (token, args[0])
            return rank, token
        if func is Tensor.index_add_ and id(args[2]) in self._chosen:
            total, dim, token, states = args
            _, mask = self._chosen.pop(id(token))
            masked = states * mask.reshape(-1, 1).to(states.dtype)
            return total.add_(masked.unflatten(dim, tuple(mask.shape)).sum(dim))
        if func in (Tensor.split, torch.split) and isinstance(args[1], _Counts):
            self._counts.append(args[1])
            return [args[0]] * len(args[1])
        if func is torch.cat and self._counts and len(args[0]) == len(self._counts[-1]):
            return self._counts.pop().choose(args[0])
        return func(*args, **(kwargs or {}))

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if error[0] is None and (self._chosen or self._counts):
            raise ValueError(
                "the model uses the choice of experts in an unknown way; call its set_experts_implementation with "
                "'batched_mm'"
            )


class _Number(list[int]):
    """The index of an expert, used in place of the one-entry tensor that `nonzero` returns."""

    def item(self) -> int:
        """Return the index as an int, like `Tensor.item` for a tensor with one entry."""
        return self[0]


class _Counts(list[int]):
    """The number of rows of each expert, for rows that are sorted by expert.

    In a trace, placeholders replace the numbers of rows.
    """

    def __init__(self, blanks: list[int], counts: Tensor) -> None:
        super().__init__(blanks)
        self._ends = counts.cumsum(0)

    def choose(self, results: Sequence[Tensor]) -> Tensor:
        """Select the result of each row's expert, given the results of all experts for all rows."""
        row = torch.arange(results[0].shape[0], device=self._ends.device)
        expert = (row.unsqueeze(1) >= self._ends).sum(1)
        masks = (expert.eq(k).unsqueeze(1).to(one.dtype) for k, one in enumerate(results))
        return sum((one * mask for one, mask in zip(results, masks, strict=True)), torch.zeros_like(results[0]))


def _is_close(before: Tensor, after: Tensor) -> bool:
    return before.shape == after.shape and torch.allclose(before, after, atol=1e-5)


def visit_every_expert(module: nn.Module, inputs: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Change a module's loops over experts so that every expert processes every token, if the outputs do not change.

    If a module is on the meta device, its outputs cannot be compared. A module on the meta device is therefore called
    only once, and `EveryExpert` is assumed to convert its loops correctly.
    """
    forward = module.forward
    is_meta = any(tensor.is_meta for tensor in module.state_dict().values())
    if is_meta:
        inputs, kwargs = pytree.tree_map_only(Tensor, lambda one: one.to("meta"), (inputs, dict(kwargs)))
    try:
        with torch.no_grad():
            before = None if is_meta else _tensors(module(*inputs, **kwargs))
    except Exception:  # The inputs do not fit; the trace raises the error.
        return False
    for spare in (0, 1):
        module.forward = MethodType(_visiting(type(module).forward, spare), module)
        try:
            with torch.no_grad():
                after = _tensors(module(*inputs, **kwargs))
        except Exception:  # A model may raise any error for tensors without entries.
            continue
        if before is None or (len(before) == len(after) and all(map(_is_close, before, after))):
            return True
    module.forward = forward
    return False


def _visiting(forward: Callable[..., Any], spare: int) -> Callable[..., Any]:
    """Return a converted forward method that uses the parameters of the module on which it is called."""

    def visiting(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Routers convert their own weights, which cannot be traced. Tensors in a trace have separate lists.
        with EveryExpert(spare), ExitStack() as patches:
            patches.enter_context(patch.object(nn.Module, "to", lambda module, *_, **__: module))
            for kind in (Tensor, FakeTensor, FunctionalTensor):
                patches.enter_context(patch.object(kind, "tolist", _counting(kind.tolist)))
            return forward(module, *args, **kwargs)

    return visiting


def _counting(tolist: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def counting(tensor: Any) -> Any:
        is_count = tensor.ndim == 1 and not tensor.is_floating_point()
        return _Counts([0] * tensor.shape[0], tensor) if is_count else tolist(tensor)

    return counting


def _tensors(output: Any) -> list[Tensor]:
    found = pytree.tree_leaves(dict(output) if isinstance(output, Mapping) else output)
    return [tensor for tensor in found if isinstance(tensor, Tensor)]

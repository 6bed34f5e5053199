"""Evaluation of many networks on the same inputs: outputs, losses, and derivatives with respect to the parameters."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from regauge.core.params import Params, count_models, select
from regauge.core.task import Task, arguments, over_networks
from regauge.training.chains.vector_chain import VectorChain
from regauge.training.stacks import chain_of

CHAINS_AT_ONCE = 16
"""The number of chains of linear layers that are evaluated together. The activations of this number of chains fit in a
processor's cache.
"""
Judge = Callable[[Tensor, slice], Tensor]
"""A function from the outputs of some networks, `[models, examples, ...]`, and their indices to losses `[models]`."""


@dataclass(frozen=True)
class Runner:
    """An evaluator of networks of one architecture. The field `task` contains the module, and selects one of the
    module's outputs.
    """

    task: Task

    def outputs(self, params: Mapping[str, Tensor], inputs: Any) -> Tensor:
        """Return the outputs of every network, `[models, examples, ...]`. The outputs are differentiable."""
        chain = self._chain_for(params, inputs)
        if chain is not None and not torch.is_grad_enabled():
            parts = [slice(start, start + CHAINS_AT_ONCE) for start in range(0, count_models(params), CHAINS_AT_ONCE)]
            return torch.cat([chain.outputs(_own(chain, params, part), inputs.unsqueeze(0)) for part in parts])
        try:
            made: Tensor = over_networks(lambda one: self.task.run(one, inputs), params, inputs)
            return made
        except RuntimeError:  # an operator that cannot be batched, such as a recurrent one; others recur
            rows = range(count_models(params))
            return torch.stack([self.task.run(select(params, k), inputs) for k in rows])

    def losses(self, params: Mapping[str, Tensor], inputs: Any, judge: Judge) -> Tensor:
        """Return the loss of every network, `[models]`, which the function `judge` computes from the outputs.

        The losses are differentiable.

        Chains of linear layers use special code, which evaluates some networks at a time and stores only derivatives.
        """
        chain = self._chain_for(params, inputs)
        if chain is None:
            return judge(self.outputs(params, inputs), slice(None))
        tensors = _own(chain, params, slice(None)).values()
        made: Tensor = _Chained.apply(chain, inputs, judge, *tensors)  # type: ignore[no-untyped-call]
        return made

    def _chain_for(self, params: Mapping[str, Tensor], inputs: Any) -> VectorChain | None:
        """Return the special code for chains of linear layers, if the code can evaluate the given networks on the given
        inputs.
        """
        is_vectors = isinstance(inputs, Tensor) and inputs.ndim == 2 and inputs.is_floating_point()
        chain = self._chain if is_vectors else None
        fits = chain is not None and all(params[name].dtype == inputs.dtype for name in _names(chain))
        return chain if fits else None

    @cached_property
    def _chain(self) -> VectorChain | None:
        """The special code for a module that is a chain of linear layers."""
        if self.task.outputs is not None:
            return None
        found = chain_of(self.task.module, reads_vectors=True)
        return found if isinstance(found, VectorChain) else None


class _Chained(torch.autograd.Function):
    """Losses of many chains of linear layers at once. The derivatives of the losses are computed in the same pass."""

    @staticmethod
    def forward(ctx: Any, chain: VectorChain, inputs: Tensor, judge: Judge, *tensors: Tensor) -> Tensor:
        wants = any(ctx.needs_input_grad)
        whole = dict(zip(_names(chain), tensors, strict=True))
        losses, gradients = [], [torch.empty_like(t) for t in tensors] if wants else []
        for start in range(0, len(tensors[0]), CHAINS_AT_ONCE):
            part = slice(start, start + CHAINS_AT_ONCE)
            params = _own(chain, whole, part)
            if not wants:
                losses.append(judge(chain.outputs(params, inputs.unsqueeze(0)), part))
                continue
            found, own = chain.pull(params, inputs.unsqueeze(0), partial(_pull, judge, part))
            losses.append(found)
            for kept, gradient in zip(gradients, own, strict=True):
                kept[part] = gradient
        ctx.save_for_backward(*gradients)
        return torch.cat(losses)

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> tuple[Tensor | None, ...]:
        found = (g * delta.reshape(-1, *[1] * (g.ndim - 1)) for g in ctx.saved_tensors)
        return None, None, None, *found


def _pull(judge: Judge, part: slice, outputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return losses for outputs `[models, out, examples]`, and the derivatives of the losses."""
    leaf = outputs.transpose(1, 2).contiguous().requires_grad_()
    with torch.enable_grad():
        losses = judge(leaf, part)
        (delta,) = torch.autograd.grad(losses.sum(), leaf)
    return losses.detach(), delta.transpose(1, 2).contiguous()


def _names(chain: VectorChain) -> list[str]:
    return [name for link in chain.links for name in (link.weight, link.bias)]


def _own(chain: VectorChain, params: Mapping[str, Tensor], part: slice) -> Params:
    """Return the tensors of some networks that the chain uses."""
    return {name: params[name][part].contiguous() for name in _names(chain)}


def count_examples(inputs: Any) -> int:
    """Return the number of examples in the inputs: the length of the first tensor among the inputs."""
    args, kwargs = arguments(inputs)
    return next((len(x) for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.ndim), 1)


def take_examples(inputs: Any, index: Tensor) -> Any:
    """Return some examples: the selected rows of every tensor that has one row per example."""
    count = count_examples(inputs)

    def take(value: Any) -> Any:
        is_each = isinstance(value, Tensor) and value.ndim and len(value) == count
        return value[index.to(value.device)] if is_each else value

    if isinstance(inputs, Mapping):
        return {name: take(value) for name, value in inputs.items()}
    return tuple(map(take, inputs)) if isinstance(inputs, tuple | list) else take(inputs)

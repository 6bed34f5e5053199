"""Training of stacks (many networks at once): by programs for chains, by `torch.func`, or one after the other.

Recurrent networks, and CNNs that are not chains, are trained network by network.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from regauge.core.arguments import check_arguments
from regauge.core.params import Params
from regauge.core.progress import Progress, no_progress
from regauge.training.chains.chain_steps import steps_of
from regauge.training.chains.image_chain import ImageChain, unstack
from regauge.training.chains.vector_chain import VectorChain, links_of
from regauge.training.descent import OnStep, descend
from regauge.training.optimizers import Optimizer, require_numbers, stack_optimizer
from regauge.training.programs import PIECE_BYTES, Batch, channels_last, learned_names, mean_loss
from regauge.training.schedules import Rate
from regauge.training.training_configs import DescentConfig


class Engine(Protocol):
    """A program that computes losses and gradients of a stack."""

    def gradients(self, params: Mapping[str, Tensor], inputs: Tensor, targets: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the loss and the gradients of every network.

        Args:
            params: Stacked parameters, `[networks, ...]`.
            inputs: One batch for each group of consecutive networks, `[groups, examples, ...]`.
            targets: Class indices `[groups, examples]`, or numbers `[networks or groups, examples, out]`.

        Returns:
            Mean losses `[networks]`: cross entropy for class indices, squared error for numbers. The result also
            contains gradients in the order of the trained parameters. The next call may overwrite the returned
            gradients.
        """

    def outputs(self, params: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
        """Return the outputs of every network, `[networks, examples, out]`.

        The inputs have the same form as in `gradients`.
        """


class Stack:
    """Stacked parameters `[networks, ...]` that are trained; a `Program` with an engine and an optimizer."""

    def __init__(
        self,
        module: nn.Module,
        params: Mapping[str, Tensor],
        optimizer: Optimizer,
        settings: Mapping[str, Sequence[float]],
        engine: Engine,
    ) -> None:
        self.order = list(params)
        self.learned = {name: params[name].clone() for name in learned_names(module)}
        self.rest = {name: tensor.clone() for name, tensor in params.items() if name not in self.learned}
        self.engine = engine
        self.optimizer = stack_optimizer(optimizer, list(self.learned.values()), settings)

    def step(self, batch: Batch, rate: Rate) -> Tensor:
        """Take a step for all networks, and return their losses before the step."""
        inputs, targets = batch
        losses, gradients = self.engine.gradients(self.learned | self.rest, inputs, targets)
        self.optimizer.update(gradients, rate)
        return losses

    def outputs(self, inputs: Tensor) -> Tensor:
        """Return the outputs of all networks in evaluation mode for one batch."""
        with torch.no_grad():
            return self.engine.outputs(self.learned | self.rest, inputs.unsqueeze(0))

    def params(self) -> Params:
        """Return copies of the current parameters and buffers."""
        both = self.learned | self.rest
        return {name: both[name].clone() for name in self.order}

    def keep(self, index: Tensor) -> None:
        """Drop all networks except the networks with the indices `index`."""
        self.learned = {name: tensor[index] for name, tensor in self.learned.items()}
        self.rest = {name: tensor[index] for name, tensor in self.rest.items()}
        self.optimizer.keep(list(self.learned.values()), index)


def chain_of(
    module: nn.Module, *, reads_vectors: bool, device: torch.device | str = "cpu"
) -> VectorChain | ImageChain | None:
    """Return the handwritten program for a chain of layers that reads vectors or images.

    The result is None if the module is not a chain, or if other programs are faster on the given device.
    """
    if not all(tensor.requires_grad for tensor in module.parameters()):
        return None
    steps = steps_of(module, reads_vectors=reads_vectors)
    if steps is None:
        return None
    links = links_of(steps)
    if links is not None:
        return VectorChain(links)
    return ImageChain(steps) if torch.device(device).type == "cpu" else None


class VmapEngine:
    """An engine for any module, by `torch.func`. Networks that share a batch are evaluated as one group.

    The computation may be compiled for stacks of one shape.
    """

    def __init__(self, module: nn.Module, *, is_compiled: bool) -> None:
        self.module = module
        self.names = learned_names(module)
        run: Callable[[Params, Tensor, Tensor], Tensor] = self._losses
        self.run = torch.compile(run, dynamic=False) if is_compiled else run

    def gradients(self, params: Mapping[str, Tensor], inputs: Tensor, targets: Tensor) -> tuple[Tensor, list[Tensor]]:
        """See `Engine`."""
        self.module.train()
        learned = {name: params[name].detach().requires_grad_() for name in self.names}
        with sdpa_kernel(SDPBackend.MATH):  # the other kernels of attention run one network after the other
            losses = self.run(dict(params) | learned, inputs, targets)
            return losses.detach(), list(torch.autograd.grad(losses.sum(), list(learned.values())))

    def outputs(self, params: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
        """See `Engine`. All networks read one batch."""
        self.module.eval()
        with sdpa_kernel(SDPBackend.MATH):
            return torch.func.vmap(self._call, in_dims=(0, None))(dict(params), inputs[0])

    def _losses(self, params: Params, inputs: Tensor, targets: Tensor) -> Tensor:
        groups = len(inputs)
        networks = len(next(iter(params.values())))
        members = networks // groups
        if members == 1:
            return torch.func.vmap(self._loss)(params, inputs, targets)
        own = len(targets) == networks and targets.is_floating_point()
        wanted = _split_groups(targets, groups) if own else targets
        parts = {name: _split_groups(tensor, groups).unbind() for name, tensor in params.items()}
        run = torch.func.vmap(self._loss, in_dims=(0, None, 0 if own else None))
        losses = [run({name: part[k] for name, part in parts.items()}, inputs[k], wanted[k]) for k in range(groups)]
        return torch.cat(losses)

    def _loss(self, params: Params, inputs: Tensor, targets: Tensor) -> Tensor:
        return mean_loss(self._call(params, inputs), targets)

    def _call(self, params: Params, inputs: Tensor) -> Tensor:
        outputs: Tensor = torch.func.functional_call(self.module, params, (inputs,))
        return outputs


@check_arguments
def fit_signals(
    module: nn.Module,
    params: Mapping[str, Tensor],
    inputs: Tensor,
    targets: Tensor,
    descent: DescentConfig,
    *,
    progress: Progress = no_progress,
    on_step: OnStep | None = None,
) -> Params:
    """Fit many networks, each to a separate signal, by minimizing mean squared errors on all points.

    Args:
        module: The module of one network; its own parameters are not used.
        params: The initial parameters, with a leading model axis.
        inputs: The inputs that all networks share, `[n, in]`.
        targets: The target outputs of each network at `inputs`, `[models, n, out]`.
        descent: The settings: steps, optimizer and schedule.
        progress: The display of the steps.
        on_step: A function that is called after each step with the step number, the losses of all networks and the
            rate.

    Returns:
        Fitted parameters, with a leading model axis.
    """
    settings = {name: [value] * len(targets) for name, value in require_numbers(descent.optimizer).items()}
    stack = Stack(module, params, descent.optimizer, settings, VmapEngine(module, is_compiled=False))
    steps = descent.count_steps(len(inputs))
    advance = progress("fitting", steps)
    batches = itertools.repeat((inputs.unsqueeze(0), targets))
    for _ in descend(stack, batches, steps=steps, schedule=descent.schedule, on_step=on_step):
        advance()
    return stack.params()


def _split_groups(tensor: Tensor, groups: int) -> Tensor:
    return tensor.reshape(groups, -1, *tensor.shape[1:])


class LoopEngine:
    """An `Engine` for any module, by automatic differentiation of one network at a time.

    Images have channels-last layout. If the activations of a batch do not fit the cache, the batch is split, and the
    gradients of the parts are summed.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.names = learned_names(module)
        self.pieces: int | None = None

    def gradients(self, params: Mapping[str, Tensor], inputs: Tensor, targets: Tensor) -> tuple[Tensor, list[Tensor]]:
        """See `Engine`."""
        self.module.train()
        networks = unstack(params)
        batches = [channels_last(images) for images in inputs]
        if self.pieces is None:
            self.pieces = self.count_pieces(networks[0], batches[0])
        found: list[list[Tensor]] = []
        losses = torch.zeros(len(networks), dtype=torch.float64, device=inputs.device)
        for k, own in enumerate(networks):
            batch, wanted = batches[k * len(batches) // len(networks)], targets[k * len(targets) // len(networks)]
            leaves = [own[name].detach().requires_grad_() for name in self.names]
            for images, answers in zip(batch.chunk(self.pieces), wanted.chunk(self.pieces), strict=True):
                outputs = self._run({**own, **dict(zip(self.names, leaves, strict=True))}, images)
                loss = mean_loss(outputs, answers) * (len(images) / inputs.shape[1])
                torch.autograd.backward(loss, inputs=leaves)
                losses[k] += loss.detach()
            found.append([torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves])
        return losses.to(inputs.dtype), [torch.stack(rows) for rows in zip(*found, strict=True)]

    def outputs(self, params: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
        """See `Engine`. All networks read one batch."""
        self.module.eval()
        batch = channels_last(inputs[0])
        return torch.stack([self._run(own, batch) for own in unstack(params)])

    def _run(self, own: Params, batch: Tensor) -> Tensor:
        outputs: Tensor = torch.func.functional_call(self.module, own, (batch,))
        return outputs

    def count_pieces(self, own: Params, batch: Tensor) -> int:
        """Return the number of parts of a batch: one if activations fit the cache or examples affect one another."""
        if next(self.module.buffers(), None) is not None or batch.device.type != "cpu":
            return 1
        sizes = [0]

        def note(_: nn.Module, __: object, output: object) -> None:
            if isinstance(output, Tensor):
                sizes.append(output.numel() * output.element_size())

        hooks = [part.register_forward_hook(note) for part in self.module.modules()]
        with torch.no_grad():
            whole = self._run(own, batch)
            for hook in hooks:
                hook.remove()
            pieces = min(len(batch), -(-max(sizes) // PIECE_BYTES))
            apart = torch.cat([self._run(own, piece) for piece in batch.chunk(pieces)])
        # A module may compare the examples of a batch, so its outputs for parts of the batch may differ.
        return pieces if torch.allclose(whole, apart, rtol=0, atol=1e-3 * float(whole.abs().max())) else 1

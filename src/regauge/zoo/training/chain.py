"""Fully connected networks as one program: forward and backward written once for all networks of a stack."""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

THIN = 16
"""Inputs with at most as many features are stored feature by feature, which matrix products with them need."""


@dataclass(frozen=True)
class Link:
    """A linear layer and what follows: `activation(scale * (W h + b))`.

    Attributes:
        weight: Name of the weights.
        bias: Name of the bias.
        scale: A constant factor, such as the frequency of a SIREN.
        activation: A key of `ACTIVATIONS`.
    """

    weight: str
    bias: str
    scale: float
    activation: str


def chain_of(module: nn.Module, *, reads_vectors: bool) -> tuple[Link, ...] | None:
    """The links of a module that is a chain of linear layers and activations.

    Args:
        module: What is read; it may flatten its input first, and must if that is no vector.
        reads_vectors: Whether an example is a vector.

    Returns:
        None if the module is anything else.
    """
    try:
        graph = fx.symbolic_trace(module).graph
    # What a module does while it is traced is its own business; one that cannot be traced is no chain.
    except (fx.proxy.TraceError, AttributeError, KeyError, RuntimeError, TypeError, ValueError):
        return None
    links: list[Link] = []
    inputs = 0
    before: fx.Node | None = None
    is_open, is_flat = False, reads_vectors
    for node in graph.nodes:
        if node.op == "placeholder":
            inputs += 1
            if inputs > 1:
                return None
        elif node.op == "output":
            if node.args != (before,):
                return None
        elif before not in node.all_input_nodes or len(node.all_input_nodes) != 1:
            return None
        elif isinstance(target := _target(node, module), nn.Linear):
            if not is_flat or target.bias is None or any(link.weight == f"{node.target}.weight" for link in links):
                return None
            links.append(Link(f"{node.target}.weight", f"{node.target}.bias", 1.0, "identity"))
            is_open = True
        elif not links:
            if not _is_flatten(node, target):
                return None
            is_flat = True
        elif is_open and target is operator.mul:
            factor = next((value for value in node.args if isinstance(value, float | int)), None)
            if factor is None:
                return None
            links[-1] = Link(links[-1].weight, links[-1].bias, links[-1].scale * factor, "identity")
        elif is_open and (name := _activation(node, target)) is not None:
            links[-1] = Link(links[-1].weight, links[-1].bias, links[-1].scale, name)
            is_open = False
        else:
            return None
        before = node
    named = {name for link in links for name in (link.weight, link.bias)}
    return tuple(links) if links and named == module.state_dict().keys() else None


class Chain:
    """Losses and gradients of a stack of chains.

    Hidden layers are stored feature by feature, `[networks, features, examples]`: then the first layer of all networks
    that read the same batch is one matrix product, and every other layer a batched one without copies. Buffers are kept
    between the steps.
    """

    def __init__(self, links: Sequence[Link]) -> None:
        self.links = tuple(links)
        self.buffers: dict[tuple[str, int], Tensor] = {}

    def gradients(self, params: Mapping[str, Tensor], inputs: Tensor, targets: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The loss of every network and its gradients.

        Args:
            params: `[networks, ...]`.
            inputs: One batch for each group of consecutive networks, `[groups, examples, ...]`.
            targets: Classes `[groups, examples]`, or values `[networks or groups, examples, out]`.

        Returns:
            Mean losses `[networks]`: cross entropy for classes, squared error for values; gradients in the order of
            the parameters, in buffers that the next call overwrites.
        """
        hidden, slopes = self._forward(params, inputs, is_training=True)
        # The derivative is written over the outputs, which the last activation would need.
        is_plain = self.links[-1].activation == "identity"
        losses, delta = _loss(hidden[-1] if is_plain else hidden[-1].clone(), targets)
        found: dict[str, Tensor] = {}
        x = _features(inputs)
        groups = len(x)
        for k in reversed(range(len(self.links))):
            link, weight = self.links[k], params[self.links[k].weight]
            delta = ACTIVATIONS[link.activation].backward(delta, hidden[k], slopes[k])
            bias = self._buffer(link.bias, params[link.bias].shape, delta)
            torch.sum(delta, 2, out=bias)
            gradient = self._buffer(link.weight, weight.shape, delta)
            if k:
                torch.bmm(delta, hidden[k - 1].transpose(1, 2), out=gradient)
            else:
                flat = delta.view(groups, -1, delta.shape[2])
                torch.bmm(flat, x.transpose(1, 2), out=gradient.view(groups, -1, x.shape[1]))
            if link.scale != 1:
                bias.mul_(link.scale)
                gradient.mul_(link.scale)
            found[link.bias], found[link.weight] = bias, gradient
            if k:
                back = self._buffer(f"delta {k}", hidden[k - 1].shape, delta)
                delta = _back(weight, delta, link.scale, back)
        return losses, [found[name] for name in params]

    def outputs(self, params: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
        """What every network says of every example, `[networks, examples, out]`; inputs as for `gradients`."""
        hidden, _ = self._forward(params, inputs, is_training=False)
        return hidden[-1].transpose(1, 2)

    def _forward(
        self, params: Mapping[str, Tensor], inputs: Tensor, *, is_training: bool
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """The values of every layer, feature by feature, and the slopes that the backward pass needs."""
        h = _features(inputs)
        groups, _, examples = h.shape
        hidden: list[Tensor] = []
        slopes: list[Tensor | None] = []
        for k, link in enumerate(self.links):
            weight, bias = params[link.weight], params[link.bias]
            shape = (len(weight), weight.shape[1], examples)
            z = self._buffer(f"hidden {k}", shape, weight) if is_training else weight.new_empty(shape)
            factor = link.scale
            if k:
                torch.baddbmm(bias.unsqueeze(2), weight, h, beta=factor, alpha=factor, out=z)
            else:
                rows, first = bias.view(groups, -1, 1), weight.view(groups, -1, weight.shape[2])
                torch.baddbmm(rows, first, h, beta=factor, alpha=factor, out=z.view(groups, -1, examples))
            slope = self._buffer(f"slope {k}", shape, weight) if is_training and link.activation == "sin" else None
            ACTIVATIONS[link.activation].forward(z, slope)
            hidden.append(z)
            slopes.append(slope)
            h = z
        return hidden, slopes

    def _buffer(self, name: str, shape: Sequence[int], like: Tensor) -> Tensor:
        """The same memory at every step, as long as the shapes stay."""
        key = (name, len(shape))
        found = self.buffers.get(key)
        if found is None or found.shape != tuple(shape) or found.dtype != like.dtype or found.device != like.device:
            found = self.buffers[key] = like.new_empty(shape)
        return found


@dataclass(frozen=True)
class _Activation:
    """An activation and its derivative, both in place.

    Attributes:
        forward: From what comes in, and the place for slopes where there is one.
        backward: From the derivative by the output, the output, and the slopes.
    """

    forward: Callable[[Tensor, Tensor | None], object]
    backward: Callable[[Tensor, Tensor, Tensor | None], Tensor]


def _sine(z: Tensor, slope: Tensor | None) -> None:
    if slope is not None:
        _elementwise(np.cos, torch.cos, z, slope)
    _elementwise(np.sin, torch.sin, z, z)


def _elementwise(by_numpy: np.ufunc, by_torch: Callable[..., Tensor], z: Tensor, out: Tensor) -> None:
    """A function of single values. In single precision on a CPU numpy takes 0.3 to 0.7 of torch's time on one thread.

    It has only one: with more than two, torch is faster.
    """
    if z.dtype == torch.float32 and z.device.type == "cpu" and torch.get_num_threads() <= 2:
        # A network that diverges is no reason to warn.
        with np.errstate(all="ignore"):
            by_numpy(z.numpy(), out=out.numpy())
    else:
        by_torch(z, out=out)


def _slope(delta: Tensor, _: Tensor, slope: Tensor | None) -> Tensor:
    assert slope is not None
    return delta.mul_(slope)


def _relu(delta: Tensor, output: Tensor, _: Tensor | None) -> Tensor:
    torch.ops.aten.threshold_backward.grad_input(delta, output, 0, grad_input=delta)
    return delta


def _tanh(delta: Tensor, output: Tensor, _: Tensor | None) -> Tensor:
    torch.ops.aten.tanh_backward.grad_input(delta, output, grad_input=delta)
    return delta


def _sigmoid(delta: Tensor, output: Tensor, _: Tensor | None) -> Tensor:
    torch.ops.aten.sigmoid_backward.grad_input(delta, output, grad_input=delta)
    return delta


ACTIVATIONS = {
    "identity": _Activation(lambda z, _: z, lambda delta, *_: delta),
    "relu": _Activation(lambda z, _: z.relu_(), _relu),
    "tanh": _Activation(lambda z, _: _elementwise(np.tanh, torch.tanh, z, z), _tanh),
    "sigmoid": _Activation(lambda z, _: z.sigmoid_(), _sigmoid),
    "sin": _Activation(_sine, _slope),
}

_FUNCTIONS: dict[Any, str] = {
    torch.relu: "relu",
    functional.relu: "relu",
    torch.tanh: "tanh",
    functional.tanh: "tanh",
    torch.sigmoid: "sigmoid",
    functional.sigmoid: "sigmoid",
    torch.sin: "sin",
    nn.ReLU: "relu",
    nn.Tanh: "tanh",
    nn.Sigmoid: "sigmoid",
    nn.Identity: "identity",
}


def _target(node: fx.Node, module: nn.Module) -> Any:
    """The submodule, the function, or the name of the method that a node calls."""
    return module.get_submodule(str(node.target)) if node.op == "call_module" else node.target


def _activation(node: fx.Node, target: Any) -> str | None:
    if node.op == "call_method":
        return target if target in ACTIVATIONS else None
    return _FUNCTIONS.get(type(target) if isinstance(target, nn.Module) else target)


def _is_flatten(node: fx.Node, target: Any) -> bool:
    """Whether a node makes one row of each example."""
    if isinstance(target, nn.Flatten):
        return (target.start_dim, target.end_dim) == (1, -1)
    return target in ("flatten", torch.flatten) and node.args[1:] == (1,) and not node.kwargs


def _features(inputs: Tensor) -> Tensor:
    """Batches feature by feature, `[groups, features, examples]`."""
    columns = inputs.flatten(2).transpose(1, 2)
    return columns.contiguous() if columns.shape[1] <= THIN else columns


def _back(weight: Tensor, delta: Tensor, scale: float, out: Tensor) -> Tensor:
    """`scale * W^T delta`, for each network."""
    if weight.shape[1] == 1:
        factor = weight.transpose(1, 2)
        return torch.mul(factor * scale if scale != 1 else factor, delta, out=out)
    return torch.baddbmm(out, weight.transpose(1, 2), delta, beta=0, alpha=scale, out=out)


def _loss(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Mean losses of the networks and their derivatives; the outputs `[networks, out, examples]` are overwritten."""
    networks, out, examples = outputs.shape
    if targets.is_floating_point():
        repeats = networks // len(targets)
        wanted = targets.transpose(1, 2)
        wanted = wanted.repeat_interleave(repeats, 0) if len(targets) not in (1, networks) else wanted
        delta = outputs.sub_(wanted)
        losses = delta.square().mean((1, 2))
        return losses, delta.mul_(2 / (out * examples))
    classes = targets.unsqueeze(1).repeat_interleave(networks // len(targets), 0)
    logs = torch.log_softmax(outputs, 1)
    losses = -logs.gather(1, classes).mean((1, 2))
    delta = logs.exp_()
    delta.scatter_add_(1, classes, delta.new_full((1, 1, 1), -1.0).expand_as(classes))
    return losses, delta.mul_(1 / examples)

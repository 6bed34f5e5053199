"""Steps of a chain of layers, in-place activations, and the conversion of a module to a chain."""

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from regauge.core.params import Params
from regauge.core.products import matmul


@dataclass(frozen=True)
class InPlace:
    """An activation and its derivative. The two functions are computed in place.

    `forward` takes the input, and either a tensor for slopes or None. `backward` takes the derivative with respect to
    the output, the output, and the slopes.
    """

    forward: Callable[[Tensor, Tensor | None], object]
    backward: Callable[[Tensor, Tensor, Tensor | None], Tensor]


def _sine(z: Tensor, slope: Tensor | None) -> None:
    if slope is not None:
        _elementwise(np.cos, torch.cos, z, slope)
    _elementwise(np.sin, torch.sin, z, z)


def _elementwise(by_numpy: np.ufunc, by_torch: Callable[..., Tensor], z: Tensor, out: Tensor) -> None:
    """Apply an elementwise function. For float32 on a CPU with at most two threads, use numpy.

    On one thread, numpy takes 0.3 to 0.7 times as long as torch. Numpy uses only one thread, so torch is faster with
    more than two threads.
    """
    if z.dtype == torch.float32 and z.device.type == "cpu" and torch.get_num_threads() <= 2:
        # Diverging networks must not cause warnings.
        with np.errstate(all="ignore"):
            by_numpy(z.numpy(), out=out.numpy())
    else:
        by_torch(z, out=out)


def _slope(delta: Tensor, _: Tensor, slope: Tensor | None) -> Tensor:
    assert slope is not None
    return delta.mul_(slope)


def _relu_backward(delta: Tensor, output: Tensor, _: Tensor | None) -> Tensor:
    if delta.is_mkldnn:
        return torch.ops.aten.threshold_backward(delta, output, 0)  # type: ignore[no-any-return]
    torch.ops.aten.threshold_backward.grad_input(delta, output, 0, grad_input=delta)
    return delta


def _by_output(operator: Any, *arguments: float) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """Return a function that computes the derivative of an activation from the activation's output, by a torch
    operator.
    """

    def backward(delta: Tensor, output: Tensor, _: Tensor | None) -> Tensor:
        operator.grad_input(delta, output, *arguments, grad_input=delta)
        return delta

    return backward


ACTIVATIONS = {
    "identity": InPlace(lambda z, _: z, lambda delta, *_: delta),
    "relu": InPlace(lambda z, _: z.relu_(), _relu_backward),
    "tanh": InPlace(lambda z, _: _elementwise(np.tanh, torch.tanh, z, z), _by_output(torch.ops.aten.tanh_backward)),
    "sigmoid": InPlace(lambda z, _: z.sigmoid_(), _by_output(torch.ops.aten.sigmoid_backward)),
    "sin": InPlace(_sine, _slope),
}

NAMES: dict[Any, str] = {
    **dict.fromkeys((torch.relu, functional.relu, nn.ReLU, "relu"), "relu"),
    **dict.fromkeys((torch.tanh, functional.tanh, nn.Tanh, "tanh"), "tanh"),
    **dict.fromkeys((torch.sigmoid, functional.sigmoid, nn.Sigmoid, "sigmoid"), "sigmoid"),
    **dict.fromkeys((torch.sin, "sin"), "sin"),
    nn.Identity: "identity",
}
"""Names of the activations that modules, functions and methods compute."""


Pair = tuple[int, int]

MAXIMA: dict[str, Any] = {
    "kernel_size": None,
    "stride": None,
    "padding": 0,
    "dilation": 1,
    "ceil_mode": False,
    "return_indices": False,
}
"""Arguments of torch's max pooling, with their defaults."""


class Passed(NamedTuple):
    """The tensors that a step saves in the forward pass: its input, its output, and slopes or positions of maxima.

    A later activation may have overwritten the saved output in place. The output of an activation is never overwritten.
    """

    read: Tensor
    wrote: Tensor
    kept: Tensor | None = None


Derivatives = tuple[Tensor, tuple[Tensor, ...]]
"""The derivatives with respect to a step's input and with respect to its parameters."""


class Step(ABC):
    """A step of a chain, by default for one network. The first axis indexes the examples, `[examples, ...]`."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the step's parameters."""
        return ()

    @abstractmethod
    def forward(self, x: Tensor, params: Params, *, is_free: bool) -> Passed:
        """Return the output. If `is_free`, the input `x` may be overwritten."""

    @abstractmethod
    def backward(self, delta: Tensor, passed: Passed, params: Params, *, goes_on: bool) -> Derivatives:
        """Return the derivatives for the input and for the parameters in `names`."""


@dataclass(frozen=True)
class WeightedStep(Step):
    """A step that has parameters."""

    weight: str
    bias: str

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the step's parameters."""
        return self.weight, self.bias


@dataclass(frozen=True)
class Linear(WeightedStep):
    """A linear layer `W h + b` of several networks: parameters `[networks, ...]`, examples grouped by network."""

    def forward(self, x: Tensor, params: Params, *, is_free: bool) -> Passed:
        weight, bias = params[self.weight], params[self.bias]
        rows = matmul(x.view(len(weight), -1, x.shape[1]), weight.mT)
        return Passed(x, rows.add_(bias.unsqueeze(1)).flatten(0, 1))

    def backward(self, delta: Tensor, passed: Passed, params: Params, *, goes_on: bool) -> Derivatives:
        weight = params[self.weight]
        x, rows = (tensor.reshape(len(weight), -1, tensor.shape[1]) for tensor in (passed.read, delta))
        before = matmul(rows, weight).flatten(0, 1) if goes_on else delta
        return before, (matmul(rows.mT, x), rows.sum(1))


@dataclass(frozen=True)
class Convolution(WeightedStep):
    """A convolution over two axes with zero padding."""

    stride: Pair
    padding: Pair
    dilation: Pair
    groups: int

    def forward(self, x: Tensor, params: Params, *, is_free: bool) -> Passed:
        run = torch.mkldnn_convolution if x.is_mkldnn else functional.conv2d
        weight, bias = params[self.weight], params[self.bias]
        window = (self.padding, self.stride) if x.is_mkldnn else (self.stride, self.padding)
        return Passed(x, run(x, weight, bias, *window, self.dilation, self.groups))

    def backward(self, delta: Tensor, passed: Passed, params: Params, *, goes_on: bool) -> Derivatives:
        weight, bias = params[self.weight], params[self.bias]
        window = (self.stride, self.padding, self.dilation, False, (0, 0), self.groups)
        before, *own = torch.ops.aten.convolution_backward(
            delta, passed.read, weight, list(bias.shape), *window, (goes_on, True, True)
        )
        return (before if goes_on else delta), tuple(own)


@dataclass(frozen=True)
class Factor(Step):
    """A constant factor, such as the frequency of a SIREN."""

    value: float

    def forward(self, x: Tensor, params: Params, *, is_free: bool) -> Passed:
        return Passed(x, x.mul_(self.value) if is_free else x * self.value)

    def backward(self, delta: Tensor, passed: Passed, params: Params, *, goes_on: bool) -> Derivatives:
        return delta.mul_(self.value), ()


@dataclass(frozen=True)
class Activation(Step):
    """An elementwise activation."""

    name: str

    def forward(self, x: Tensor, params: Params, *, is_free: bool) -> Passed:
        y = x if is_free or self.name == "identity" else x.clone()
        slope = torch.empty_like(y) if self.name == "sin" else None
        ACTIVATIONS[self.name].forward(y, slope)
        return Passed(x, y, slope)

    def backward(self, delta: Tensor, passed: Passed, params: Params, *, goes_on: bool) -> Derivatives:
        return ACTIVATIONS[self.name].backward(delta, passed.wrote, passed.kept), ()


@dataclass(frozen=True)
class MaxPooling(Step):
    """A step that computes the maximum of every window."""

    kernel: Pair
    stride: Pair
    padding: Pair
    dilation: Pair

    def forward(self, x: Tensor, params: Params, *, is_free: bool) -> Passed:
        if x.is_mkldnn:
            with torch.enable_grad():  # oneDNN keeps the positions, in the output, for inputs with gradients alone
                return Passed(x, torch.ops.aten.mkldnn_max_pool2d(x.detach().requires_grad_(), *self._window).detach())
        return Passed(x, *torch.ops.aten.max_pool2d_with_indices(x, *self._window))

    def backward(self, delta: Tensor, passed: Passed, params: Params, *, goes_on: bool) -> Derivatives:
        if delta.is_mkldnn:
            run = torch.ops.aten.mkldnn_max_pool2d_backward
            return run(delta, passed.wrote, passed.read, *self._window, False), ()
        run = torch.ops.aten.max_pool2d_with_indices_backward
        return run(delta, passed.read, *self._window, False, passed.kept), ()

    @property
    def _window(self) -> tuple[Pair, ...]:
        return self.kernel, self.stride, self.padding, self.dilation


@dataclass(frozen=True)
class Averaging(Step):
    """A step that averages over all positions. The position axes are dropped or have length one."""

    keeps_axes: bool

    def forward(self, x: Tensor, params: Params, *, is_free: bool) -> Passed:
        return Passed(x, x.mean((2, 3), keepdim=self.keeps_axes))

    def backward(self, delta: Tensor, passed: Passed, params: Params, *, goes_on: bool) -> Derivatives:
        x = passed.read
        share = delta.reshape(*x.shape[:2], 1, 1) / (x.shape[2] * x.shape[3])
        return torch.empty_like(x).copy_(share), ()


@dataclass(frozen=True)
class Flattening(Step):
    """A step that flattens each example to a vector."""

    def forward(self, x: Tensor, params: Params, *, is_free: bool) -> Passed:
        return Passed(x, x.flatten(1))

    def backward(self, delta: Tensor, passed: Passed, params: Params, *, goes_on: bool) -> Derivatives:
        return torch.empty_like(passed.read).copy_(delta.view(passed.read.shape)), ()


def steps_of(module: nn.Module, *, reads_vectors: bool) -> tuple[Step, ...] | None:
    """Return the steps of a module that is a chain of layers and activations, or None.

    The result is None if the module is not a chain, or if the module has hooks. The result is also None if the module
    overrides `forward`, or computes different functions in training and in evaluation. `reads_vectors` states whether
    an example is a vector or an image. The function leaves the module in training mode.
    """
    if any(_is_altered(part) for part in module.modules()):
        return None
    evaluated, trained = (_read(module.train(mode), reads_vectors=reads_vectors) for mode in (False, True))
    return trained if trained == evaluated else None


def _is_altered(part: nn.Module) -> bool:
    """Return whether hooks or similar changes of a module affect its output in a way that a trace does not show."""
    hooks = (part._forward_pre_hooks, part._forward_hooks, part._backward_pre_hooks, part._backward_hooks)
    return any(hooks) or "forward" in vars(part)


def _read(module: nn.Module, *, reads_vectors: bool) -> tuple[Step, ...] | None:
    """Return the steps of a module in its current mode."""
    try:
        first, *inner, last = fx.symbolic_trace(module).graph.nodes
    # A module may raise any error while it is traced. A module that cannot be traced is not a chain.
    except (fx.proxy.TraceError, AttributeError, KeyError, RuntimeError, TypeError, ValueError):
        return None
    steps: list[Step] = []
    before, is_map = first, not reads_vectors
    for node in inner:
        step = _step(node, module) if node.op != "placeholder" and node.all_input_nodes == [before] else None
        makes_map = None if step is None else _makes_map(step, is_map)
        if step is None or makes_map is None:
            return None
        steps.append(step)
        before, is_map = node, makes_map
    if first.op != "placeholder" or last.args != (before,):
        return None
    named = [name for step in steps for name in step.names]
    is_whole = len(set(named)) == len(named) and set(named) == module.state_dict().keys()
    return tuple(steps) if named and is_whole else None


def _step(node: fx.Node, module: nn.Module) -> Step | None:
    """Return the step that a node of the trace computes, or None."""
    target: Any = module.get_submodule(str(node.target)) if node.op == "call_module" else node.target
    names = (f"{node.target}.weight", f"{node.target}.bias")
    match target:
        case nn.Linear() if target.bias is not None:
            return Linear(*names)
        case nn.Conv2d() if target.bias is not None and target.padding_mode == "zeros":
            padding = (0, 0) if target.padding == "valid" else target.padding
            if isinstance(padding, str):
                return None
            return Convolution(*names, _pair(target.stride), _pair(padding), _pair(target.dilation), target.groups)
        case nn.MaxPool2d():
            return _max_pooling(*(getattr(target, key) for key in MAXIMA))
        case nn.AdaptiveAvgPool2d():
            return Averaging(keeps_axes=True) if target.output_size in (1, (1, 1)) else None
        case nn.Flatten():
            return Flattening() if (target.start_dim, target.end_dim) == (1, -1) else None
        case nn.Module():
            target = type(target)
    if target is operator.mul:
        factor = next((value for value in node.args if isinstance(value, float | int)), None)
        return None if factor is None else Factor(float(factor))
    if target is functional.max_pool2d:
        return _max_pooling(*_told(node, **MAXIMA))
    if target in ("flatten", torch.flatten):
        return Flattening() if _told(node, start_dim=0, end_dim=-1) == (1, -1) else None
    if target is functional.adaptive_avg_pool2d:
        return Averaging(keeps_axes=True) if _told(node, output_size=None)[0] in (1, (1, 1)) else None
    if target in ("mean", torch.mean):
        axes, keeps_axes = _told(node, dim=None, keepdim=False)
        return Averaging(bool(keeps_axes)) if axes in ((2, 3), [2, 3], (-2, -1), [-2, -1]) else None
    name = NAMES.get(target)
    return None if name is None else Activation(name)


def _makes_map(step: Step, is_map: bool) -> bool | None:
    """Return whether the output of a step is an image instead of a vector; None if the step cannot read its input."""
    match step:
        case Linear():
            return None if is_map else False
        case Convolution() | MaxPooling():
            return True if is_map else None
        case Averaging():
            return step.keeps_axes if is_map else None
        case Flattening():
            return False
        case _:
            return is_map


def _told(node: fx.Node, **defaults: object) -> tuple[object, ...]:
    """Return the arguments of a call except the first, in the order of the given defaults."""
    given = dict(zip(defaults, node.args[1:], strict=False)) | node.kwargs
    return tuple((defaults | given)[name] for name in defaults)


def _max_pooling(
    kernel: Any, stride: Any, padding: Any, dilation: Any, ceils: Any, gives_positions: Any
) -> MaxPooling | None:
    """Return the max pooling step for the arguments in `MAXIMA`."""
    if ceils or gives_positions:
        return None
    return MaxPooling(_pair(kernel), _pair(stride or kernel), _pair(padding), _pair(dilation))


def _pair(value: Any) -> Pair:
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[1]))

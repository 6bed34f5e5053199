"""Optimizers that update stacked tensors: all networks in one update, with separate settings for each network.

Torch's fused kernels update networks with the same settings together, and large networks one after another. Small
networks with different settings are updated by `BlockedUpdates`. Torch's kernels, applied network by network, take 6
times as long as `BlockedUpdates` for MLPs 30-16-16-2, and 1.5 times as long for MLPs 784-10-10
(`benchmarks/hand_written.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from regauge.core.params import Params
from regauge.training.schedules import Rate
from regauge.training.settings import Setting, require_setting

UPDATED_AT_ONCE = 131_072
"""The number of entries that are updated at a time. The entries stay in the cache between the operations of an
update."""

LARGE_NETWORK = 32_768
"""The number of parameters above which networks with different settings are updated one by one, by torch's fused
kernel."""


Parameters = Sequence[Tensor] | list[dict[str, Any]]
"""Tensors, or parameter groups in the format of `torch.optim`."""


class ParameterBlock(NamedTuple):
    """Views of some parameters of some networks, and the settings of the networks.

    Settings are numbers if all networks share them, otherwise tensors `[networks, 1]`.
    """

    tensor: int
    networks: slice
    values: slice
    param: Tensor
    moments: tuple[Tensor, ...]
    settings: dict[str, Tensor | float]


@dataclass(frozen=True)
class SGD:
    """Gradient descent, with or without momentum, like `torch.optim.SGD`.

    `g += weight_decay w; b = momentum b + g; w -= lr (g + momentum b if nesterov else b)`. At the first step, b equals
    g.

    Attributes:
        lr: The learning rate.
        momentum: The share of the previous direction that is kept in each step.
        weight_decay: The factor of the penalty `weight_decay |w|^2 / 2`.
        is_nesterov: Whether Nesterov momentum is used.
    """

    per_network: ClassVar[tuple[str, ...]] = ("lr", "weight_decay", "momentum")

    lr: Setting
    momentum: Setting = 0.0
    weight_decay: Setting = 0.0
    is_nesterov: bool = False

    def __post_init__(self) -> None:
        require_setting("lr", self.lr, 0, is_open=True)
        require_setting("weight_decay", self.weight_decay, 0)
        require_setting("momentum", self.momentum, 0, 1)
        if self.is_nesterov:
            require_setting("momentum of Nesterov's method", self.momentum, 0, 1, is_open=True)

    def count_moments(self, settings: Mapping[str, Sequence[float]]) -> int:
        """Return the number of state tensors, with the parameters' shapes, that an update keeps."""
        return int(any(settings["momentum"]))

    def update(self, block: ParameterBlock, gradient: Tensor, rate: Rate, _: int) -> None:
        """Update the parameters of one block."""
        lr, decay, momentum = (block.settings[name] for name in ("lr", "weight_decay", "momentum"))
        momentum = momentum if rate.momentum is None else rate.momentum
        if not _is_zero(decay):
            gradient = gradient + decay * block.param
        for buffer in block.moments:
            # In the first step, the buffer is zero and becomes the gradient.
            buffer.mul_(momentum).add_(gradient)
            gradient = gradient + momentum * buffer if self.is_nesterov else buffer
        if isinstance(lr, Tensor):
            block.param.addcmul_(gradient, lr, value=-rate.factor)
        else:
            block.param.sub_(gradient, alpha=lr * rate.factor)

    def make(
        self, params: Parameters, settings: Mapping[str, float], *, is_fused: bool = True
    ) -> torch.optim.Optimizer:
        """Return torch's optimizer for parameters that share their settings."""
        lr, momentum, decay = (settings[name] for name in ("lr", "momentum", "weight_decay"))
        return torch.optim.SGD(
            params, lr, momentum=momentum, weight_decay=decay, nesterov=self.is_nesterov, fused=is_fused
        )


@dataclass(frozen=True)
class Adam:
    """Adam, like `torch.optim.Adam`. Weight decay is added to the gradient.

    Attributes:
        lr: The learning rate.
        betas: The decay of the running means of the gradient and of the squared gradient.
        eps: A constant that is added to the root of the mean squared gradient.
        weight_decay: The factor of the penalty `weight_decay |w|^2 / 2`.

    References:
        Kingma and Ba (2015), algorithm 1.
    """

    per_network: ClassVar[tuple[str, ...]] = ("lr", "weight_decay")
    is_decoupled: ClassVar[bool] = False

    lr: Setting
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: Setting = 0.0

    def __post_init__(self) -> None:
        require_setting("lr", self.lr, 0, is_open=True)
        require_setting("weight_decay", self.weight_decay, 0)
        if not all(0 <= beta < 1 for beta in self.betas) or not self.eps >= 0:
            raise ValueError(f"betas are {self.betas} and eps is {self.eps}; betas must lie in [0, 1), eps in [0, inf)")

    def count_moments(self, _: Mapping[str, Sequence[float]]) -> int:
        """Return the number of state tensors, with the parameters' shapes, that an update keeps."""
        return 2

    def update(self, block: ParameterBlock, gradient: Tensor, rate: Rate, step: int) -> None:
        """Update the parameters of one block."""
        (first, second), (mean, square) = self.betas, block.moments
        lr, decay, factor = block.settings["lr"], block.settings["weight_decay"], rate.factor
        first = first if rate.momentum is None else rate.momentum
        if self.is_decoupled:
            if not _is_zero(decay):
                block.param.mul_(1 - lr * factor * decay)
        elif not _is_zero(decay):
            gradient = gradient + decay * block.param
        mean.lerp_(gradient, 1 - first)
        square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        # m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps), where the corrections are numbers instead of tensors.
        correction = (1 - second**step) ** 0.5
        root = square.sqrt().add_(self.eps * correction)
        factor *= correction / (1 - first**step)
        if isinstance(lr, Tensor):
            block.param.sub_(torch.div(mean, root, out=root).mul_(lr * factor))
        else:
            block.param.addcdiv_(mean, root, value=-lr * factor)

    def make(
        self, params: Parameters, settings: Mapping[str, float], *, is_fused: bool = True
    ) -> torch.optim.Optimizer:
        """Return torch's optimizer for parameters that share their settings."""
        kind = torch.optim.AdamW if self.is_decoupled else torch.optim.Adam
        lr, decay = settings["lr"], settings["weight_decay"]
        return kind(params, lr, betas=self.betas, eps=self.eps, weight_decay=decay, fused=is_fused)


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam whose weight decay shrinks the weights directly, `w *= 1 - lr weight_decay`, like `torch.optim.AdamW`.

    References:
        Loshchilov and Hutter (2019), algorithm 2.
    """

    is_decoupled: ClassVar[bool] = True

    weight_decay: Setting = 1e-2


Optimizer = SGD | Adam | AdamW
"""The optimizers that training functions accept, as settings."""


def _is_zero(setting: Tensor | float) -> bool:
    return isinstance(setting, float) and setting == 0


def require_numbers(optimizer: Optimizer) -> dict[str, float]:
    """Return an optimizer's settings that may differ between networks; raise a ValueError for distributions."""
    settings = {name: getattr(optimizer, name) for name in optimizer.per_network}
    for name, value in settings.items():
        if not isinstance(value, float | int):
            raise ValueError(f"{name} is {value}, but must be a number here; distributions are for populations")
    return {name: float(value) for name, value in settings.items()}


def set_rate(group: dict[str, Any], lr: float, rate: Rate) -> None:
    """Set the learning rate of a `torch.optim` parameter group and, if the schedule changes it, the momentum."""
    group["lr"] = lr * rate.factor
    if rate.momentum is not None and "betas" in group:
        group["betas"] = (rate.momentum, group["betas"][1])
    elif rate.momentum is not None and group["momentum"]:
        group["momentum"] = rate.momentum


def moments_of(optimizer: torch.optim.Optimizer) -> Params:
    """Return the state tensors of a torch optimizer, such as moments, by names with parameter indices: `0/exp_avg`."""
    state = optimizer.state_dict()["state"]
    return {f"{k}/{name}": tensor for k, kept in state.items() for name, tensor in kept.items() if tensor is not None}


def load_moments(optimizer: torch.optim.Optimizer, moments: Mapping[str, Tensor]) -> None:
    """Load the result of `moments_of` from another optimizer of the same parameters."""
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in moments.items():
        number, _, key = name.partition("/")
        state.setdefault(int(number), {})[key] = tensor
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


def stack_optimizer(
    method: Optimizer,
    params: Sequence[Tensor],
    settings: Mapping[str, Sequence[float]],
    *,
    is_fused: bool | None = None,
) -> "Fused | BlockedUpdates":
    """Return an optimizer that updates stacked parameters `[networks, ...]` in place, each network independently.

    The settings in `method.per_network` have one value for each network. Torch's fused kernels update all networks at
    once if their settings are equal, and otherwise update one network after another. If `is_fused` is None, fused
    kernels are used if they are faster.
    """
    if is_fused is None:
        size = sum(param[0].numel() for param in params)
        is_fused = size >= LARGE_NETWORK or all(len(set(values)) == 1 for values in settings.values())
    return (Fused if is_fused else BlockedUpdates)(method, params, settings)


class Fused:
    """Torch's fused optimizers: one optimizer for all networks if their settings are equal, otherwise one optimizer for
    each network.
    """

    def __init__(self, method: Optimizer, params: Sequence[Tensor], settings: Mapping[str, Sequence[float]]) -> None:
        self.method = method
        self.settings = {name: list(values) for name, values in settings.items()}
        self.is_split = any(len(set(values)) > 1 for values in self.settings.values())
        self._make(params)

    def update(self, gradients: Sequence[Tensor], rate: Rate) -> None:
        """Take a step at the scheduled rate."""
        # The fused kernels ignore strides, so a gradient needs the same strides as its parameter.
        plain = [gradient.contiguous() for gradient in gradients]
        for (views, optimizer, lr), own in zip(self.parts, self._views(plain), strict=True):
            for view, gradient in zip(views, own, strict=True):
                view.grad = gradient
            set_rate(optimizer.param_groups[0], lr, rate)
            optimizer.step()

    def keep(self, params: Sequence[Tensor], index: Tensor) -> None:
        """Continue with the given parameters of the networks with the indices `index`."""
        states = [[optimizer.state[view] for view in views] for views, optimizer, _ in self.parts]
        self.settings = {name: [values[k] for k in index.tolist()] for name, values in self.settings.items()}
        chosen = index.tolist() if self.is_split else [0]
        self._make(params)
        for (views, optimizer, _), k in zip(self.parts, chosen, strict=True):
            for view, state in zip(views, states[k], strict=True):
                optimizer.state[view] = {
                    name: value[index] if not self.is_split and value.ndim else value for name, value in state.items()
                }

    def _make(self, params: Sequence[Tensor]) -> None:
        self.parts = []
        for k, views in enumerate(self._views(params)):
            settings = {name: values[k] for name, values in self.settings.items()}
            self.parts.append((views, self.method.make(views, settings), settings["lr"]))

    def _views(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        """Split stacked tensors into the tensors of each optimizer."""
        if not self.is_split:
            return [list(tensors)]
        return [list(row) for row in zip(*(tensor.unbind() for tensor in tensors), strict=True)]


class BlockedUpdates:
    """Updates of stacked parameters in place, block by block, with separate settings for each network."""

    def __init__(self, method: Optimizer, params: Sequence[Tensor], settings: Mapping[str, Sequence[float]]) -> None:
        self.method = method
        self.settings = {
            name: float(values[0]) if len(set(values)) == 1 else params[0].new_tensor(values)[:, None]
            for name, values in settings.items()
        }
        self.step = 0
        self._cut(params, [[torch.zeros_like(p) for p in params] for _ in range(method.count_moments(settings))])

    def keep(self, params: Sequence[Tensor], index: Tensor) -> None:
        """Continue with the given parameters of the networks with the indices `index`."""
        self.settings = {k: v[index] if isinstance(v, Tensor) else v for k, v in self.settings.items()}
        self._cut(params, [[tensor[index] for tensor in tensors] for tensors in self.states])

    def update(self, gradients: Sequence[Tensor], rate: Rate) -> None:
        """Take a step at the scheduled rate."""
        self.step += 1
        flat = [gradient.reshape(len(gradient), -1) for gradient in gradients]
        for block in self.blocks:
            self.method.update(block, flat[block.tensor][block.networks, block.values], rate, self.step)

    def _cut(self, params: Sequence[Tensor], states: list[list[Tensor]]) -> None:
        self.states = states
        self.blocks: list[ParameterBlock] = []
        for k, param in enumerate(params):
            networks, size = len(param), param[0].numel()
            columns = size if param.is_cuda else min(size, UPDATED_AT_ONCE)
            rows = networks if param.is_cuda else max(1, UPDATED_AT_ONCE // max(1, columns))
            flat = param.view(networks, -1)
            moments = [tensors[k].view(networks, -1) for tensors in states]
            for row in range(0, networks, rows):
                some = slice(row, row + rows)
                settings = {name: v[some] if isinstance(v, Tensor) else v for name, v in self.settings.items()}
                for column in range(0, size, columns):
                    part = slice(column, column + columns)
                    views = tuple(tensor[some, part] for tensor in moments)
                    self.blocks.append(ParameterBlock(k, some, part, flat[some, part], views, settings))

"""Initialization of networks, by their factory or by sampling new parameters. Each network of a population has its own
seed.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import nn

from regauge.core.params import Params
from regauge.storage.architecture import Architecture
from regauge.training.settings import LATER, Setting, derive_seed, draw, require_setting

Kind = Literal["factory", "isotropic", "normal", "he", "glorot", "orthogonal"]
"""Distributions of initial parameters. "factory": as the factory initializes the module. "isotropic": all parameters
are normal with deviation 1. All other kinds have zero biases, and weights that are orthogonal or normal, with deviation
1 (normal), sqrt(2 / fan in) (he) or sqrt(2 / (fan in + fan out)) (glorot)."""


@dataclass(frozen=True)
class Initialization:
    """The settings for initializing every network of a population.

    Attributes:
        kinds: Kinds of initialization. For each network, one kind is sampled.
        scale: The factor by which sampled parameters are multiplied: for `isotropic` all parameters, otherwise only
            weights (parameters with at least two axes).
        is_common: Whether all networks have the initial parameters of the first network. With common initial
            parameters, networks differ only by their training.
    """

    kinds: tuple[Kind, ...] = ("factory",)
    scale: Setting = 1.0
    is_common: bool = field(default=False, metadata={LATER: True})

    def __post_init__(self) -> None:
        known = get_args(Kind)
        wrong = [kind for kind in self.kinds if kind not in known]
        if wrong or not self.kinds:
            raise ValueError(f"kinds of initialization are {self.kinds}; give at least one, all from {known}")
        require_setting("the scale of the initialization", self.scale, 0, is_open=True)


@dataclass(frozen=True)
class Start:
    """The random choices for initializing one network: seed, kind, and factor of the weights."""

    seed: int
    kind: Kind
    scale: float


def draw_start(initialization: Initialization, seed: int, network: int) -> Start:
    """Sample the initialization choices for the network with a given id."""
    network = 0 if initialization.is_common else network
    kinds = initialization.kinds
    kind = kinds[derive_seed(seed, "initialization", network) % len(kinds)]
    return Start(derive_seed(seed, "network", network), kind, draw(initialization.scale, seed, "scale", network))


def initialize(architecture: Architecture, starts: Sequence[Start], dtype: torch.dtype) -> Params:
    """Create the initial networks, `[networks, ...]`. The parameters of each network depend only on its own choices."""
    template = build(architecture, 0) if any(start.kind != "factory" for start in starts) else None
    states = []
    for start in starts:
        if template is None or start.kind == "factory":
            module = build(architecture, start.seed)
            state = {name: tensor.detach() for name, tensor in module.state_dict().items()}
            state |= {name: state[name] * start.scale for name in _weights(module) if start.scale != 1}
        else:
            state = _draw_anew(template, start)
        states.append(state)
    whole = {spec.name: torch.stack([state[spec.name] for state in states]) for spec in architecture.layout}
    return {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in whole.items()}


def build(architecture: Architecture, seed: int) -> nn.Module:
    """Build the module with torch's global generator, set to the seed `seed`."""
    with use_seed(seed):
        return architecture.module()


@contextmanager
def use_seed(seed: int) -> Iterator[None]:
    """Set the seed of torch's global generator within a context; afterwards, restore the generator."""
    with _GLOBAL_GENERATOR, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


_GLOBAL_GENERATOR = threading.Lock()


def _draw_anew(module: nn.Module, start: Start) -> Params:
    """Sample new parameters of the given kind; buffers and (except for "isotropic") gains of norms are not changed."""
    generator = torch.Generator().manual_seed(start.seed)
    state = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    weights = _weights(module)
    for name, _ in module.named_parameters():
        tensor = state[name]
        if start.kind == "isotropic":
            tensor.normal_(0, start.scale, generator=generator)
        elif name in weights:
            fan_in, fan_out = tensor[0].numel(), tensor.shape[0] * tensor[0, 0].numel()
            if start.kind == "orthogonal":
                nn.init.orthogonal_(tensor, gain=start.scale, generator=generator)
            else:
                variance = {"normal": 1.0, "he": 2 / fan_in, "glorot": 2 / (fan_in + fan_out)}[start.kind]
                tensor.normal_(0, start.scale * variance**0.5, generator=generator)
        elif name.rpartition(".")[2] == "bias":
            tensor.zero_()
    return state


def _weights(module: nn.Module) -> set[str]:
    return {name for name, tensor in module.named_parameters() if tensor.ndim >= 2}

"""Sinusoidal representation networks, which represent signals."""

import itertools
import math
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from regauge.core.params import Params

Bias = Literal["siren", "torch", "zero"]
"""Initial biases: uniformly random with the weights' bound ("siren") or 1 / sqrt(fan in) ("torch"), or zero."""


class Siren(nn.Module):
    """`x -> W_k sin(omega (W_{k-1} ... sin(omega (W_0 x + b_0)) ...)) + b_k`, with `depth` hidden layers.

    Adding `pi / omega` to a unit's bias shifts the sine by half a period. Initial weights do not depend on the
    initialization of biases.

    References:
        Sitzmann et al. (2020), sections 3.1 and 3.2. The code of the paper keeps torch's default initialization of
        biases (`torch`).
    """

    def __init__(
        self,
        in_features: int = 2,
        width: int = 32,
        out_features: int = 1,
        *,
        depth: int = 2,
        omega: float = 30.0,
        bias: Bias = "siren",
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if depth < 1 or not omega > 0:
            raise ValueError(f"a SIREN needs depth >= 1 and omega > 0, not depth={depth} and omega={omega}")
        if bias not in get_args(Bias):
            raise ValueError(f"biases start as {', '.join(get_args(Bias))}, not {bias!r}")
        self.omega = omega
        sizes = [in_features, *[width] * depth, out_features]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))
        for k, layer in enumerate(self.layers):
            assert isinstance(layer, nn.Linear)
            bound = 1 / layer.in_features if k == 0 else math.sqrt(6 / layer.in_features) / omega
            nn.init.uniform_(layer.weight, -bound, bound, generator=generator)
            own = {"siren": bound, "torch": 1 / math.sqrt(layer.in_features), "zero": 0.0}[bias]
            nn.init.uniform_(layer.bias, -own, own, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = torch.sin(self.omega * layer(x))
        return self.layers[-1](x)


def plain_population(module: Siren, count: int, *, generator: torch.Generator) -> Params:
    """Return initial parameters of many networks, as in the published data sets of sine networks for metanetworks.

    The weights of every layer, including the first, are uniformly random with bound sqrt(6 / fan in) / omega. Biases
    are zero.

    Returns:
        New parameters with a leading model axis. The parameters of the given module are not changed.

    References:
        Navon et al. (2023), appendix; the initialization of their released sine networks.
    """
    params = {}
    for name, tensor in module.state_dict().items():
        params[name] = torch.zeros(count, *tensor.shape)
        if tensor.ndim == 2:
            bound = math.sqrt(6 / tensor.shape[1]) / module.omega
            params[name].uniform_(-bound, bound, generator=generator)
    return params

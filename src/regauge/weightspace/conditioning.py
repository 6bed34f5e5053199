"""Conditioning of a metanetwork: learned functions of additional inputs scale and shift the features."""

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regauge.weightspace.features import Features, at_units
from regauge.weightspace.layers.dense import Dense


class Conditioning(nn.Module):
    """The map `(1 + a(c)) x + b(c)` of feature vectors x (of units, pairs and networks), with conditions c.

    The shift `b(c)` is not applied to features that signs change.

    References:
        Perez et al. (2018), FiLM: visual reasoning with a general conditioning layer, equation 1.
    """

    def __init__(self, conditions: int, width: int, *, has_pairs: bool, generator: torch.Generator | None) -> None:
        super().__init__()
        self.has_pairs = has_pairs
        kinds = 3 if has_pairs else 2
        self.into = Dense(conditions, 2 * kinds * width, gain=0.1, generator=generator)

    def forward(self, features: Features, conditions: Float[Tensor, "models conditions"]) -> Features:
        made: Tensor = self.into(conditions)
        scales, shifts = made.reshape(len(made), 2, -1, features.network.shape[-1]).unbind(1)

        def change(x: Tensor, kind: int) -> Tensor:
            return x * (1 + at_units(scales[:, kind], x)) + at_units(shifts[:, kind], x)

        units = {name: change(x, 0) for name, x in features.units.items()}
        pairs = {name: change(x, 2) for name, x in features.pairs.items()} if self.has_pairs else features.pairs
        network = features.network * (1 + scales[:, 1]) + shifts[:, 1]
        odd = features.odd
        turned = {
            name: {own: x * (1 + at_units(scales[:, 0], x)) for own, x in known.items()}
            for name, known in odd.units.items()
        }
        return features.change(units, pairs, network, replace(odd, units=turned))

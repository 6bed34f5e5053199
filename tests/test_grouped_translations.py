"""Translations of weights before a group normalization: one translation for each group of channels, closed under the
group.
"""

import torch
from symmetries import generator
from torch import Tensor, nn

import regauge as rg


class Embedded(nn.Module):
    """A vector that a linear layer adds to the channels of an image, followed by a group normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.time = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(5, 8)
        self.norm, self.head = nn.GroupNorm(4, 8), nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        found: Tensor = self.head(self.norm(self.stem(x) + self.time(embedding)[:, :, None, None]).tanh())
        return found


def test_weights_have_a_translation_for_each_group_of_channels() -> None:
    torch.manual_seed(0)
    module, inputs = Embedded().double(), (torch.randn(2, 3, 6, 6).double(), torch.randn(2, 5).double())
    symmetry = rg.discover(module, inputs)
    params = dict(module.state_dict())
    (family,) = (one for one in symmetry.translations if one.entries.parameter == "time.weight")
    assert family.size == 4 * 5
    parts = ("permutation", "sign", "scale", "translation")
    first, second = (symmetry.random(generator(seed), parts) for seed in (1, 2))
    moved = symmetry.act(first, symmetry.act(second, params))
    together = symmetry.act(symmetry.compose(first, second), params)
    assert all(torch.allclose(moved[name], together[name], rtol=0, atol=1e-12) for name in params)
    outputs = torch.func.functional_call(module, moved, inputs)
    assert torch.allclose(outputs, module(*inputs), rtol=0, atol=1e-11)

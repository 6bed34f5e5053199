"""The networks of Deep-Align's experiments have the published numbers of parameters."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from regauge_papers.deep_align import CNN_TRAINING, cnns, mlps


@pytest.mark.parametrize(
    ("make", "count"),
    [
        (mlps("MNIST").make, 134_794),
        # Table 4: seven 3 x 3 convolutions, three times pooled, and a linear layer on 2,048 features.
        (
            cnns("CIFAR-10", CNN_TRAINING, examples=1).make,
            28 * 16 + 145 * 32 + 289 * 32 + 289 * 64 + 577 * 64 + 577 * 128 + 1153 * 128 + 2049 * 10,
        ),
    ],
)
def test_parameters_are_counted_as_published(make: Callable[[], nn.Module], count: int) -> None:
    with torch.device("meta"):
        assert sum(p.numel() for p in make().parameters()) == count

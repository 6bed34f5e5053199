"""Completeness over architectures: the group spans all directions that do not change the outputs, or the directions
have names.
"""

import pytest
import torch
from null_space_nets import CASES

import regauge as rg

QUICK = (
    *("MLP, tanh", "gated layer, RMSNorm", "set", "CNN, ReLU", "ResNet, group norm", "ConvNeXt", "U-Net"),
    *("LSTM of two layers", "SIREN", "cross attention", "small mixture of the largest", "small means"),
    *("decaying states", "exponential factors"),
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.thorough) for name in CASES]
)
def test_the_group_spans_all_that_is_not_named(name: str) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    module = case.module().eval()
    generator = torch.Generator().manual_seed(0)
    report = rg.discovery.nullity(module, case.inputs(), case.kwargs, outputs=case.outputs, generator=generator)
    assert report.unexplained == case.limit[1], str(report)

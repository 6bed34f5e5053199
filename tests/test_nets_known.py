"""The architectures equal the published architectures: parameter counts on the meta device, and output shapes of small
versions.
"""

from collections.abc import Callable

import pytest
import torch
from convnext import ConvNeXt
from densenet import DenseNet
from mobilenet import MobileNetV2
from resnet50 import resnet50
from torch import nn
from unet import UNet
from vgg16 import vgg16

from regauge.nets.mlp import ResidualMLP
from regauge.nets.norm import ChannelLayerNorm, FilterResponseNorm
from regauge.nets.resnet import resnet20
from regauge.nets.siren import Siren, plain_population


@pytest.mark.parametrize(
    ("make", "count"),
    [
        (lambda: resnet20(shortcut="A"), 269_722),
        (lambda: resnet20(shortcut="B"), 272_474),
        (lambda: resnet20(norm="filter", shortcut="A"), 269_722 + 688),
        (resnet50, 25_557_032),
        (lambda: vgg16(1000, hidden=(4096, 4096), image=224), 138_357_544),
        (MobileNetV2, 3_504_872),
        (DenseNet, 7_978_856),
        (ConvNeXt, 28_589_128),
        (lambda: ResidualMLP(784, 128, 256, 6, 10), 785 * 128 + 6 * (129 * 256 + 257 * 128) + 129 * 10),
        # SDXL's 2,567,463,684 without its embedding of sizes and crops, 2816 -> 1280 -> 1280.
        (
            lambda: UNet(4, channels=(320, 640, 1280), depths=(0, 2, 10), head_size=64, context=2048),
            2_567_463_684 - (2816 * 1280 + 1280) - (1280 * 1280 + 1280),
        ),
    ],
)
def test_parameters_are_counted_as_published(make: Callable[[], nn.Module], count: int) -> None:
    with torch.device("meta"):
        assert sum(p.numel() for p in make().parameters()) == count


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("norm", ["batch", "layer", "group", "filter", "none"])
@pytest.mark.parametrize("shortcut", ["A", "B"])
def test_resnet20_in_all_its_variants(width: int, norm: str, shortcut: str) -> None:
    model = resnet20(7, width=width, norm=norm, shortcut=shortcut, blocks=1)
    assert model(torch.randn(2, 3, 8, 8)).shape == (2, 7)
    assert model.fc.in_features == 64 * width


def test_pooling_everything_away_is_refused() -> None:
    with pytest.raises(ValueError, match="images of 16 pixels are pooled away"):
        vgg16(image=16)


def test_a_unet_wants_one_depth_per_resolution() -> None:
    with pytest.raises(ValueError, match="one depth per resolution"):
        UNet(channels=(32, 64), depths=(0,))


def test_channel_layer_norm_standardizes_each_position() -> None:
    out = ChannelLayerNorm(8)(torch.randn(2, 8, 3, 3))
    assert torch.allclose(out.mean(1), torch.zeros(2, 3, 3), atol=1e-6)
    assert torch.allclose(out.var(1, correction=0), torch.ones(2, 3, 3), atol=1e-3)


def test_filter_response_norm_follows_its_formula() -> None:
    layer = FilterResponseNorm(4)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(0))
    x = torch.randn(2, 4, 5, 5, generator=torch.Generator().manual_seed(1))
    for c in range(4):
        power = (x[:, c] ** 2).mean((1, 2), keepdim=True)
        expected = layer.weight[c] * x[:, c] / (power + 1e-6).sqrt() + layer.bias[c]
        assert torch.allclose(layer(x)[:, c], expected.clamp(min=float(layer.threshold[c].detach())), atol=1e-6)


def test_filter_response_norm_has_the_gradient_of_its_formula_also_at_zero() -> None:
    layer, generator = FilterResponseNorm(3).double(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(generator=generator)
    x = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x[0, 1] = 0.0
    inputs = [x.requires_grad_(), *layer.parameters()]
    weight, bias, threshold = (t[:, None, None] for t in (layer.weight, layer.bias, layer.threshold))
    formula = torch.maximum(weight * x / (x.square().mean((2, 3), keepdim=True) + 1e-6).sqrt() + bias, threshold)
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    expected, found = (torch.autograd.grad((out * noise).sum(), inputs) for out in (formula, layer(x)))
    for one, other in zip(expected, found, strict=True):
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-9)


def test_filter_response_norm_stays_in_half_precision() -> None:
    x = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(1))
    layer = FilterResponseNorm(3)
    found = layer(x.bfloat16())
    assert found.dtype == torch.bfloat16
    assert torch.allclose(found.float(), layer(x), atol=0.02)


def test_residual_blocks_add_to_the_stream() -> None:
    net = ResidualMLP(4, 6, 5, 2, 3)
    x = torch.randn(2, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    stream = net.embed(x.flatten(1))
    for block in net.blocks:
        stream = stream + block.down(block.up(stream).clamp(min=0))
    assert torch.allclose(net(x), net.head(stream))


def test_plain_sirens_differ_and_stay_within_their_bounds() -> None:
    net = Siren(2, 16, 1, omega=10.0)
    params = plain_population(net, 5, generator=torch.Generator().manual_seed(0))
    for k, fan_in in enumerate((2, 16, 16)):
        weight, bias = params[f"layers.{k}.weight"], params[f"layers.{k}.bias"]
        bound = (6 / fan_in) ** 0.5 / 10
        assert weight.shape[0] == bias.shape[0] == 5
        assert 0.8 * bound < float(weight.abs().max()) <= bound
        assert not bias.any()
        assert not torch.equal(weight[0], weight[1])


def test_siren_keeps_unit_variance_inside_and_refuses_no_frequency() -> None:
    net = Siren(2, 256, 1, depth=3, generator=torch.Generator().manual_seed(0))
    x = torch.rand(500, 2, generator=torch.Generator().manual_seed(1)) * 2 - 1
    inner = net.layers[1](torch.sin(30 * net.layers[0](x))) * 30
    assert 0.7 < float(inner.detach().std()) < 1.4
    with pytest.raises(ValueError, match="omega > 0"):
        Siren(omega=0)

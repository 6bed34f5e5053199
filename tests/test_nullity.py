"""Completeness: the null space of the outputs' Jacobian, compared with the discovered continuous group."""

from collections.abc import Callable
from dataclasses import replace

import models
import pytest
import torch
from torch import Tensor, nn

import regauge as rg

EPS = "exact only at the eps of a norm, or up to it: with another eps outputs see them"
RANK = "of a rank: the weights of a layer, or the values that it reads, span fewer dimensions than the layer has inputs"
DEAD = "of values without influence: of units that are dead at this point, of what only chooses, or is unused"


class Residual(nn.Module):
    """A stem and one residual block of 4 channels with normalization."""

    def __init__(self, norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.stem, self.norm0 = nn.Conv2d(2, 4, 3, padding=1), norm()
        self.conv1, self.norm1 = nn.Conv2d(4, 4, 3, padding=1), norm()
        self.conv2, self.norm2 = nn.Conv2d(4, 4, 3, padding=1), norm()
        self.head = nn.Linear(4, 3)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm0(self.stem(x)).relu()
        x = (x + self.norm2(self.conv2(self.norm1(self.conv1(x)).relu()))).relu()
        return self.head(x.mean((-2, -1)))


def mlp(act: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), act(), nn.Linear(6, 5), act(), nn.Linear(5, 3))


def found(module: nn.Module, *inputs: Tensor) -> rg.discovery.Nullity:
    return rg.discovery.nullity(module, inputs, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("act", [nn.Tanh, nn.GELU, nn.Sigmoid])
def test_nothing_is_missing_where_nothing_is_continuous(act: Callable[[], nn.Module]) -> None:
    report = found(mlp(act), torch.randn(4, 4))
    assert (report.null, report.found, report.missing) == (0, 0, 0)
    assert str(report).endswith("complete")


def test_the_scales_of_a_relu_cnn_are_all() -> None:
    layers = (nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(20, 3))
    report = found(nn.Sequential(*layers), torch.randn(2, 2, 6, 6))
    assert (report.null, report.found, report.inert) == (9, 9, 0)


def test_a_linear_network_lacks_nothing() -> None:
    report = found(mlp(nn.Identity), torch.randn(4, 4))
    # Each layer's bias can move into the next: the function has a 3 x 4 matrix and 3 biases of 83 parameters.
    assert (report.null, report.missing) == (83 - 15, 0)


def test_batch_normalization_trades_two_more_shifts_for_each_channel() -> None:
    report = found(Residual(lambda: nn.BatchNorm2d(4)), torch.randn(2, 2, 5, 5))
    # 3 scales before and 2 after the normalizations, and bias and mean trade; with statistics as stored alone, so do
    # mean and beta, variance and gamma.
    assert (report.null, report.found) == (56, 20 + 12 + 24)


def test_group_normalization_ignores_a_common_shift_of_each_group() -> None:
    report = found(Residual(lambda: nn.GroupNorm(2, 4)), torch.randn(2, 2, 5, 5))
    assert (report.null, report.found) == (14, 14)


@pytest.mark.parametrize(("cell", "gates"), [(nn.LSTM, 4), (nn.GRU, 2)])
def test_recurrent_networks_have_two_biases_where_one_would_do(cell: type[nn.RNNBase], gates: int) -> None:
    report = found(models.Recurrent(cell, 4), torch.randn(2, 5, 5))
    assert (report.null, report.missing) == (2 * gates * 4, 0)


@pytest.mark.slow
def test_a_language_model_lacks_nothing() -> None:
    options = {**models.TEXT, "vocab_size": 9, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_inner": 8, "n_positions": 5}
    module = models.hugging("GPT2LMHeadModel", "GPT2Config", **options)()
    ids = torch.tensor([[0, 1, 2, 3, 8], [4, 5, 6, 0, 7]])
    report = rg.discovery.nullity(module, (ids,), {"use_cache": False}, generator=torch.Generator().manual_seed(0))
    # Matrices of heads, gains, and translations, among them the key biases, which have no influence.
    assert (report.found, report.missing, report.inert) == (2 * 2 * 4 * 4 + 2 * 8 + 87, 0, 8)


def test_a_symmetry_with_a_missing_group_is_caught() -> None:
    module = mlp(nn.LeakyReLU)
    inputs = (torch.randn(4, 4),)
    everything = rg.discover(module, inputs)
    half = rg.Symmetry(everything.groups[:1], everything.shapes)
    generator = torch.Generator()
    whole = rg.discovery.nullity(module, inputs, symmetry=everything, generator=generator.manual_seed(0))
    part = rg.discovery.nullity(module, inputs, symmetry=half, generator=generator.manual_seed(0))
    assert part.null == whole.null
    assert (whole.found, part.found) == (11, everything.groups[0].size)
    assert part.missing == whole.missing + 11 - part.found
    assert part.unexplained > whole.unexplained
    assert "unexplained" in str(part)


def test_directions_that_do_not_depend_on_eps_are_not_named_after_it() -> None:
    module, x = Residual(lambda: nn.BatchNorm2d(4)), torch.randn(2, 2, 5, 5)
    whole = rg.discover(module, (x,))
    bare = replace(whole, translations=tuple(one for one in whole.translations if one.is_stored_only))
    report = rg.discovery.nullity(module, (x,), symmetry=bare, generator=torch.Generator().manual_seed(0))
    # The biases before the norms, with the running means.
    assert (report.missing, report.explained, report.unexplained) == (12, (), 12)


def test_a_scale_that_only_an_eps_ends_is_named_after_it() -> None:
    layers = (nn.Linear(4, 5), nn.LayerNorm(5, eps=1e-14), nn.Tanh(), nn.Linear(5, 3))
    assert found(nn.Sequential(*layers), torch.randn(4, 4)).explained == ((EPS, 1),)


class Crossed(nn.Module):
    """Layers that read four units computed from three inputs, or a layer with two outputs that reads four units."""

    def __init__(self, *, is_narrow: bool) -> None:
        super().__init__()
        self.is_narrow, self.into, self.out = is_narrow, nn.Linear(3, 4), nn.Linear(4, 2)
        self.gate, self.other = (nn.Linear(3 if is_narrow else 4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.into(x)
        g = self.gate(x if self.is_narrow else h).sigmoid()
        found: Tensor = self.out(h + g if self.is_narrow else g * self.other(h).tanh() + (1 - g) * h)
        return found


@pytest.mark.parametrize(("is_narrow", "count"), [(False, 8), (True, 6)])
def test_directions_of_a_rank_are_named(*, is_narrow: bool, count: int) -> None:
    """The outputs do not depend on one column of two layers of four rows, and on two rows of three columns of a
    layer.
    """
    report = found(Crossed(is_narrow=is_narrow), torch.randn(6, 3))
    assert report.explained[-1] == (RANK, count)
    assert report.unexplained == 0


def test_dead_units_are_named() -> None:
    module = mlp(nn.ReLU)
    with torch.no_grad():
        module[0].bias[:2] = -1e3
    report = found(module, torch.randn(4, 4))
    assert report.inert >= 2 * (4 + 1)
    assert report.explained[0][0] == DEAD
    assert "have no influence" in str(report)


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(ValueError, match="needs between 1 and 1500"):
        found(nn.Linear(50, 50), torch.randn(2, 50))
    with pytest.raises(ValueError, match="needs between 1 and 1500"):
        found(nn.ReLU(), torch.randn(2, 5))

    class Deaf(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    with pytest.raises(ValueError, match="do not depend on any parameter"):
        found(Deaf(), torch.randn(2, 5))


class Guarded(nn.Module):
    """The identity, whose gradients are NaN if an input is larger than a limit."""

    def __init__(self, limit: float) -> None:
        super().__init__()
        self.limit = limit

    def forward(self, x: Tensor) -> Tensor:
        is_large = x.abs().amax(-1, keepdim=True) > self.limit
        return x + 0 * torch.where(is_large, 0 * x, 0 * x + 1).sqrt()


def test_inputs_with_gradients_of_nan_are_drawn_again() -> None:
    net, x = mlp(nn.Tanh), torch.randn(2, 4) / 4
    size = float(net(x).detach().abs().max())
    plain, guarded = (found(nn.Sequential(net, Guarded(limit)), x) for limit in (1e9, 4 * size))
    assert guarded.missing == plain.missing == 0
    with pytest.raises(ValueError, match="their gradients are not finite"):
        found(nn.Sequential(net, Guarded(-1.0)), x)


class Scaled(nn.Module):
    """A classifier with a learned temperature, a scalar, whose outputs have two names."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.temperature = nn.Linear(3, 4), nn.Linear(4, 2), nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.a(x).relu()
        return {"scores": self.b(h) * self.temperature.exp(), "other": h.sum(-1).tanh()}


def test_parameters_that_are_numbers_and_named_outputs_are_judged() -> None:
    report = found(Scaled(), torch.randn(5, 3))
    assert report.parameters == 16 + 10 + 1
    assert report.found == report.null - report.missing


class Positive(nn.Module):
    """A layer over a graph whose weights must be positive, and rows of bags of a table."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.table = nn.Linear(3, 4), nn.Linear(4, 2), nn.EmbeddingBag(3, 4, mode="sum")

    def forward(self, x: Tensor, weights: Tensor, rows: Tensor, starts: Tensor) -> Tensor:
        degrees = weights.sum(-1, keepdim=True).rsqrt()
        h = (degrees * (weights @ self.a(x))).relu() * self.table(rows, starts).tanh()
        result: Tensor = self.b(h)
        return result


def test_models_that_need_positive_inputs_get_inputs_near_the_examples() -> None:
    report = found(Positive(), torch.randn(3, 3), torch.rand(3, 3) + 0.1, torch.tensor([2, 0, 1]), torch.arange(3))
    assert report.found == 4
    assert report.null >= 4


def test_outputs_that_are_not_finite_are_refused() -> None:
    class Overflowing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.fc(x) + (-x.abs()).log().sum()
            return result

    with pytest.raises(ValueError, match="not finite"):
        found(Overflowing(), torch.randn(4, 3))

"""A network is transformed by a random element of its whole group and aligned with itself: the element is completely
undone.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from coverings import every_other
from models import CASES, symmetry_of
from symmetries import generator
from torch import Tensor, nn

import regauge as rg
from regauge.checkpoints.job import FileJob
from regauge.core.balance import balance, balance_alike, count_frozen_gains
from regauge.core.element import PARTS, Value
from regauge.core.matrices import balancing
from regauge.core.params import Params
from regauge.core.probe import Probe, perturb, relative_change

LEFT = 1e-6
"""The largest remaining effect of a random element, as a share of the norm."""
FAMILIES = (
    *("mlp_relu", "mlp_sine", "cnn_flatten", "glu", "rnn_relu", "lstm", "gru"),
    *("gpt", "llama", "vit", "hf_bert", "hf_gpt2", "hf_gpt_neox", "hf_llama", "hf_mixtral"),
    *("hf_t5", "hf_whisper", "hf_vit", "hf_dinov2", "hf_mamba", "densenet"),
    *("unet", "hf_clip", "hf_distilbert", "torch_transformer"),
)


@dataclass(frozen=True)
class Network:
    """A module with parameters far from initialization, and its symmetry."""

    module: nn.Module
    params: Params
    symmetry: rg.Symmetry
    probe: Probe


@cache
def network(name: str) -> Network:
    case = next(case for case in CASES if case.name == name)
    torch.manual_seed(0)
    module = case.module().eval()
    symmetry = symmetry_of(case)
    params = {n: t.detach().double() if t.is_floating_point() else t for n, t in module.state_dict().items()}
    params = perturb(params, {n for n, _ in module.named_buffers()}, generator(0))
    return Network(module, params, symmetry.bind(params), Probe(module, case.inputs(), case.kwargs(), case.outputs))


def left_of(symmetry: rg.Symmetry, a: Params, b: Params) -> float:
    """Return the distance of two networks as a share of the first network's norm, over all transformed tensors."""
    names = [name for name in symmetry.sites if a[name].is_floating_point()]
    squares = [sum(float((a[n].double() - b[n].double()).square().sum()) for n in names)]
    return float((squares[0] / sum(float(a[n].double().square().sum()) for n in names)) ** 0.5)


@pytest.mark.parametrize("name", every_other([*FAMILIES, "mobilenet_v2"], part=0))
def test_nothing_is_left_of_a_random_element(name: str) -> None:
    """The aligned copy equals the network in float64 and float32, and a merge with the copy is the network itself."""
    found = network(name)
    a, symmetry = found.params, found.symmetry
    b = symmetry.act(symmetry.random(generator(len(name)), (*PARTS, "translation")), a)
    assert left_of(symmetry, a, b) > 0.5
    assert left_of(symmetry, a, rg.align(a, b, symmetry).params) <= LEFT
    single = [{n: t.float() if t.is_floating_point() else t for n, t in params.items()} for params in (a, b)]
    # Translations divide by gains: a copy that is far larger than the network is stored with larger errors.
    rounding = torch.finfo(torch.float32).eps * left_of(symmetry, a, {n: t - b[n] for n, t in a.items()})
    assert left_of(symmetry, single[0], rg.align(*single, symmetry).params) <= max(LEFT, rounding)
    merged = rg.merge([a, b], symmetry).params
    assert relative_change(found.probe(a), found.probe(merged)) <= 1e-5


@pytest.mark.parametrize("name", every_other([*FAMILIES, "mobilenet_v2", "resnet20_batch_A"], part=1))
def test_no_more_is_left_than_the_noise(name: str) -> None:
    found = network(name)
    a, symmetry, chance = found.params, found.symmetry, generator(1)
    noisy = dict(a)
    for name in (name for name in a if name in symmetry.sites and name not in symmetry.buffers):
        noise = torch.randn(a[name].shape, generator=chance, dtype=torch.float64)
        noisy[name] = a[name] + 1e-2 * a[name].std(correction=0) * noise
    for names in symmetry.tied:
        noisy |= {name: noisy[names[0]] for name in names if name in noisy}
    b = symmetry.act(symmetry.random(generator(0), PARTS), noisy)
    result = rg.align(a, b, symmetry)
    assert left_of(symmetry, a, result.params) <= 1.02 * left_of(symmetry, a, noisy)
    assert relative_change(found.probe(b), found.probe(result.params)) <= 1e-6


class Scaled(nn.Module):
    """Residual blocks whose branches are multiplied by small gains, one for each channel."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(4, 12), nn.Linear(12, 3)
        self.up, self.down = nn.Linear(12, 20), nn.Linear(20, 12)
        self.gain = nn.Parameter(torch.linspace(-0.2, 0.2, 12))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.stem(x))
        result: Tensor = self.head(torch.tanh(x + self.gain * self.down(self.up(x).relu())))
        return result


@pytest.mark.parametrize("seed", range(3))
def test_gains_near_zero_do_not_enlarge_noise(seed: int) -> None:
    """For a unit with such a gain, balancing measures only noise, so its scale is fitted to the first network."""
    torch.manual_seed(seed)
    module, chance = Scaled().double().eval(), generator(seed)
    symmetry = rg.discover(module, (torch.randn(3, 4, dtype=torch.float64),), verify=False)
    a = {name: t.detach() for name, t in module.state_dict().items()}
    noisy = {n: t + 1e-2 * t.std() * torch.randn(t.shape, generator=chance, dtype=t.dtype) for n, t in a.items()}
    b = symmetry.act(symmetry.random(chance), noisy)
    result = rg.align(a, b, symmetry)
    assert left_of(symmetry, a, result.params) <= 1.02 * left_of(symmetry, a, noisy)
    keep = rg.align(a, b, symmetry, method=rg.WeightMatching(scales="keep"))
    assert left_of(symmetry, a, result.params) < 0.1 * left_of(symmetry, a, keep.params)


@pytest.mark.parametrize(
    "method", [rg.WeightMatching(), rg.alignment.MixedMatching(), rg.FrankWolfe(), rg.alignment.MergeMany()]
)
def test_scales_that_move_statistics_stay_where_these_are_computed_anew(method: rg.alignment.Method) -> None:
    """A task that recomputes statistics, or a setting, has the effect that filters are only permuted and flipped."""
    torch.manual_seed(0)
    module = (
        nn.Sequential(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(24, 2)).double().eval()
    )
    images = torch.randn((20, 1, 4, 4), generator=generator(0), dtype=torch.float64)
    symmetry = rg.discover(module, (images[:2],), verify=False)
    a = perturb(
        {n: t.detach() for n, t in module.state_dict().items()}, {"1.running_mean", "1.running_var"}, generator(0)
    )
    b = symmetry.act(symmetry.random(generator(1)), a)
    task = rg.Task(module, [(images, torch.zeros(20, dtype=torch.int64))])
    again = rg.Task(task.module, task.batches, prepare=lambda p: rg.connect.reset_batchnorm(p, module, [images]))

    def norms(params: Params) -> Tensor:
        return torch.linalg.vector_norm(params["0.weight"].flatten(1), dim=1).sort().values

    assert left_of(symmetry, a, rg.align(a, b, symmetry, method=method, task=task).params) <= LEFT
    kept = rg.align(a, b, symmetry, method=method, task=again).params
    assert torch.allclose(norms(kept), norms(b))
    assert not torch.allclose(norms(kept), norms(a), rtol=0.1)
    merged = rg.merge([a, b], symmetry, method=method, task=task).params
    assert torch.allclose(norms(merged), norms(a))


def test_a_setting_keeps_the_scales_that_move_statistics() -> None:
    found = network("resnet20_batch_A")
    symmetry, method = found.symmetry, rg.WeightMatching(scales="recompute")
    b = symmetry.act(symmetry.random(generator(1), ("scale",)), found.params)
    kept = rg.align(found.params, b, symmetry, method=method).params
    assert left_of(symmetry, found.params, kept) > 0.1
    assert relative_change(found.probe(found.params), found.probe(kept)) <= 1e-6
    for name in (name for name in b if name.endswith("running_mean")):
        assert torch.allclose(kept[name].abs().sort().values, b[name].abs().sort().values)


@pytest.mark.parametrize("name", ["gpt", "hf_llama", "hf_mamba"])
def test_where_the_second_network_is_on_its_orbit_makes_no_difference(name: str) -> None:
    """The position of the first network makes no difference either: its element transforms everything between the
    networks.
    """
    found = network(name)
    a, symmetry = found.params, found.symmetry
    b = perturb(a, symmetry.buffers, generator(7))
    expected = rg.align(a, b, symmetry).params
    for k in range(2):
        element = symmetry.random(generator(k), PARTS)
        moved = rg.align(a, symmetry.act(element, b), symmetry).params
        assert left_of(symmetry, expected, moved) <= LEFT
        stretched = symmetry.random(generator(k), ("scale", "linear"))
        first = rg.align(symmetry.act(stretched, a), b, symmetry).params
        assert left_of(symmetry, symmetry.act(stretched, expected), first) <= LEFT


class Frozen(nn.Module):
    """Normalization whose gain, bias and statistics are buffers."""

    gain: Tensor
    bias: Tensor
    mean: Tensor
    var: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        for name, value in {"gain": 1.0, "bias": 0.0, "mean": 0.0, "var": 1.0}.items():
            self.register_buffer(name, torch.full((width,), value))

    def forward(self, x: Tensor) -> Tensor:
        factor = self.gain * (self.var + 1e-5).rsqrt()
        return x * factor[:, None, None] + (self.bias - self.mean * factor)[:, None, None]


@pytest.mark.parametrize("is_mixed", [False, True])
def test_gains_that_are_buffers_do_not_keep_scales(
    is_mixed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without buffers as gains, the scales of the neighboring filters would have no smallest norm."""
    torch.manual_seed(0)
    middle = nn.BatchNorm2d(8) if is_mixed else Frozen(8)
    stem = nn.Sequential(nn.Conv2d(1, 6, 3), Frozen(6), nn.ReLU(), nn.Conv2d(6, 8, 3), middle, nn.ReLU())
    module = nn.Sequential(*stem, nn.Conv2d(8, 5, 1), Frozen(5), nn.ReLU(), nn.Flatten(), nn.Linear(20, 2))
    module = module.double().eval()
    images = torch.randn((4, 1, 6, 6), generator=generator(0), dtype=torch.float64)
    symmetry = rg.discover(module, (images,), verify=False)
    state = {n: t.detach() for n, t in module.state_dict().items()}
    a = perturb(state, {n for n, _ in module.named_buffers()}, generator(0))
    symmetry, chance = symmetry.bind(a), generator(1)
    assert {"1.gain", "7.gain"} <= set(symmetry.buffers) - set(count_frozen_gains(symmetry, "move").buffers)
    assert count_frozen_gains(symmetry, "keep") is symmetry
    noisy = {n: t + 1e-2 * torch.rand(t.shape, generator=chance) if t.is_floating_point() else t for n, t in a.items()}
    for seed in range(3):
        b = symmetry.act(symmetry.random(generator(seed)), a)
        assert left_of(symmetry, a, rg.align(a, b, symmetry).params) <= LEFT
        far = symmetry.act(symmetry.random(generator(seed), PARTS), noisy)
        found = rg.align(a, far, symmetry)
        assert left_of(symmetry, a, found.params) <= 1.02 * left_of(symmetry, a, noisy)
    files = [rg.save(params, tmp_path / f"{file}.safetensors") for file, params in (("a", a), ("far", far))]
    monkeypatch.setattr(FileJob, "fits", False)
    rg.align(*files, symmetry, out=tmp_path / "out.safetensors", memory="4GB")
    streamed = rg.load(tmp_path / "out.safetensors")
    assert left_of(symmetry, found.params, streamed) <= 1e-4 * left_of(symmetry, a, noisy)


def linear_mlp(*widths: int, seed: int = 0) -> tuple[rg.Symmetry, Params]:
    """Return a bottleneck between two layers, and networks of any rank."""
    axes = {"0.weight": ("h", None), "0.bias": ("h",), "1.weight": (None, "h")}
    shapes = {"0.weight": widths[1::-1], "0.bias": widths[1:2], "1.weight": widths[:0:-1]}
    params = {n: torch.randn(s, generator=generator(seed), dtype=torch.float64) for n, s in shapes.items()}
    return rg.Symmetry.from_axes(axes, kinds={"h": "linear"}).bind(params), params


@pytest.mark.parametrize("seed", range(3))
def test_a_matrix_whose_rank_is_in_doubt_is_fitted(seed: int) -> None:
    """Balancing skips it. A direction that is small in both networks does not prevent the fit of all other
    directions.
    """
    symmetry, a = linear_mlp(3, 6, 6, seed=seed)
    u, values, v = torch.linalg.svd(a["1.weight"])
    a["1.weight"] = u * torch.cat([values[:-1], values[:1] * 1e-4]) @ v
    matrix = torch.eye(6, dtype=torch.float64) + 0.1 * torch.randn((6, 6), generator=generator(seed)).double()
    moved = symmetry.act(rg.Element({"h": Value(matrix=matrix)}), a)
    single = [{n: t.float() for n, t in params.items()} for params in (a, moved)]
    assert bool(balance_alike(single, symmetry)[0].rigid["h"])
    found = rg.align(*single, symmetry)
    assert left_of(symmetry, single[0], found.params) <= LEFT
    assert not found.notes


@pytest.mark.parametrize("widths", [(8, 3, 8), (2, 7, 3), (2, 7, 9), (9, 7, 2), (5, 6, 6), (1, 6, 1)])
@pytest.mark.parametrize("dead", ["", "0.weight", "1.weight", "0.weight 0.bias", "0.weight 0.bias 1.weight"])
def test_matrices_of_any_rank_are_found(widths: tuple[int, int, int], dead: str) -> None:
    symmetry, a = linear_mlp(*widths)
    a |= {name: torch.zeros_like(a[name]) for name in dead.split()}
    for seed in range(3):
        b = symmetry.act(symmetry.random(generator(seed)), a)
        result = rg.align(a, b, symmetry)
        assert all(bool(t.isfinite().all()) for t in result.params.values())
        assert all(torch.allclose(a[n], result.params[n], atol=1e-7) for n in a)


@pytest.mark.parametrize("widths", [(3, 12, 12), (12, 12, 3), (6, 9, 9), (8, 3, 8)])
@pytest.mark.parametrize("method", [rg.WeightMatching(), rg.alignment.MergeMany(), rg.FrankWolfe()], ids=repr)
def test_matrices_of_any_rank_do_not_enlarge_noise(widths: tuple[int, int, int], method: rg.alignment.Method) -> None:
    """A nearly singular product contains little information about small directions, which are fitted to the first
    network.
    """
    symmetry, a = linear_mlp(*widths)
    for seed in range(3):
        chance = generator(seed)
        noisy = {n: t + 1e-2 * torch.randn(t.shape, generator=chance, dtype=t.dtype) for n, t in a.items()}
        b = symmetry.act(symmetry.random(chance), noisy)
        result = rg.align(a, b, symmetry, method=method)
        assert left_of(symmetry, a, result.params) <= left_of(symmetry, a, noisy)
        assert torch.allclose(product(result.params), product(b), atol=1e-9)
        assert not result.notes


def test_a_fit_changes_no_statistics_where_these_are_computed_anew() -> None:
    found = network("resnet20_batch_A")
    assert count_frozen_gains(found.symmetry, "move") is found.symmetry
    a, symmetry, chance = found.params, found.symmetry, generator(1)
    noisy = {n: t + 1e-2 * torch.rand(t.shape, generator=chance) if t.is_floating_point() else t for n, t in a.items()}
    kept = rg.align(a, noisy, symmetry, method=rg.WeightMatching(scales="recompute"))
    for name in (name for name in a if name.endswith("running_mean")):
        assert torch.allclose(kept.params[name].abs().sort().values, noisy[name].abs().sort().values)
    assert left_of(symmetry, a, rg.align(a, noisy, symmetry).params) <= left_of(symmetry, a, noisy)


def product(params: Params) -> Tensor:
    return params["1.weight"] @ torch.cat([params["0.weight"], params["0.bias"].unsqueeze(1)], 1)


@pytest.mark.parametrize("size", [1e-3, 1e-5, 1e-7, 1e-9])
def test_what_is_nearly_singular_keeps_its_function_and_never_falls_below_the_identity(size: float) -> None:
    symmetry, a = linear_mlp(6, 4, 6)
    a["0.weight"][0] = a["0.weight"][1] + size * a["0.weight"][0]
    a["0.bias"][0] = a["0.bias"][1]
    _, other = linear_mlp(6, 4, 6, seed=5)
    for b in (symmetry.act(symmetry.random(generator(0)), a), other):
        for first, second in ((a, b), (b, a)):
            result = rg.align(first, second, symmetry)
            assert all(bool(t.isfinite().all()) for t in result.params.values())
            assert torch.allclose(product(result.params), product(second), atol=1e-5)
            assert result.objective >= result.initial


def test_balanced_matrices_have_equal_and_diagonal_gram_matrices() -> None:
    x, y = (torch.randn((5, 4, 9), generator=generator(k), dtype=torch.float64) for k in range(2))
    grams = x @ x.mT, y @ y.mT
    matrix, is_good = balancing(*grams, 1e-13, 1e-11)
    back = torch.linalg.inv(matrix)
    left, right = matrix @ grams[0] @ matrix.mT, back.mT @ grams[1] @ back
    assert bool(is_good.all())
    assert torch.allclose(left, right, atol=1e-9)
    assert torch.allclose(left, torch.diag_embed(left.diagonal(dim1=-2, dim2=-1)), atol=1e-9)


def test_the_norm_cannot_be_made_smaller() -> None:
    found = network("gpt")
    start = found.symmetry.act(balance(found.params, found.symmetry), found.params)

    def norm(params: Params) -> float:
        return sum(float(params[n].square().sum()) for n in found.symmetry.sites)

    assert norm(start) < norm(found.params)
    for seed in range(10):
        element = found.symmetry.random(generator(seed), ("scale", "linear"))
        small = rg.Element(
            {
                n: v.map(lambda t: t if t.ndim < 2 or t.dtype != torch.float64 else 0.99 * _one(t) + 0.01 * t)
                for n, v in element.items()
            }
        )
        assert norm(found.symmetry.act(small, start)) > norm(start)


def _one(tensor: Tensor) -> Tensor:
    """Return the identity: factors of one, or an identity matrix."""
    is_square = tensor.shape[-1] == tensor.shape[-2]
    return torch.eye(tensor.shape[-1], dtype=tensor.dtype).expand_as(tensor) if is_square else torch.ones_like(tensor)


def test_networks_that_are_compared_keep_the_same_matrices() -> None:
    """In this test, one matrix is singular up to rounding. In a population, this affects only its pair."""
    symmetry, a = linear_mlp(6, 4, 6)
    near = {n: t.clone() for n, t in a.items()}
    near["0.weight"][0] = near["0.weight"][1] * (1 + 1e-6 * torch.arange(6).double())
    near["0.bias"][0] = near["0.bias"][1]
    both = {n: torch.stack([near[n], a[n]]) for n in a}
    first, second = balance_alike([{n: torch.stack([t, t]) for n, t in a.items()}, both], symmetry)
    assert first.rigid["h"].tolist() == second.rigid["h"].tolist() == [True, False]
    assert torch.equal(first.element["h"].matrix[0], torch.eye(4, dtype=torch.float64))  # type: ignore[index]
    pairs = rg.alignment.align_pairs({n: torch.stack([t, t]) for n, t in a.items()}, both, symmetry)
    assert "group 'h' was only rotated in 1 of 2 pairs" in pairs.report
    assert "group 'h' was only rotated" in rg.align(a, near, symmetry).report
    assert "rotated" not in rg.align(a, a, symmetry).report
    alone = balance(a, symmetry)["h"].matrix
    assert alone is not None
    assert torch.allclose(first.element["h"].matrix[1], alone)  # type: ignore[index]

"""Repair: every unit gets the interpolated mean and deviation, in any traced model. Units without a layer to repair do
not change.
"""

import itertools
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from models import CASES
from torch import Tensor, nn

import regauge as rg
from regauge.connect.unit_moments import LayerStatistics, RunningMoments
from regauge.data.images import digits
from regauge.nets.classification import ClassifierConfig, initialize, train
from regauge.nets.mlp import mlp
from regauge.training.optimizers import AdamW

BY_NAME = {case.name: case for case in CASES}


class Residual(nn.Module):
    """A stem, two blocks that write to a stream, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(5, 6)
        self.inner = nn.ModuleList(nn.Linear(6, 8) for _ in range(2))
        self.outer = nn.ModuleList(nn.Linear(8, 6) for _ in range(2))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for inner, outer in zip(self.inner, self.outer, strict=True):
            x = x + outer(inner(x.tanh()).relu())
        out: Tensor = self.head(x)
        return out


class Convolutional(nn.Module):
    """Convolutions of several kinds, a linear layer after a flatten, and a transposed convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding="same")
        self.grouped = nn.Conv2d(4, 6, 3, groups=2)
        self.up = nn.ConvTranspose2d(6, 4, 2, stride=2)
        self.hidden = nn.Linear(4 * 8 * 8, 7)
        self.head = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(self.grouped(self.first(x).relu()).tanh()).relu()
        out: Tensor = self.head(self.hidden(x.flatten(1)).relu())
        return out


class Products(nn.Module):
    """Layers written as matrix products: right factors, transposed matrices, and added biases."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.shift = nn.Parameter(torch.randn(5, 6)), nn.Parameter(torch.randn(6))
        self.two, self.three = nn.Parameter(torch.randn(7, 6)), nn.Parameter(torch.randn(7, 4))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = (self.shift + x @ self.one).relu()
        x = (x @ self.two.t()).relu()
        out: Tensor = self.head(torch.addmm(x.new_zeros(4), x, self.three).relu())
        return out


def drawn(module: nn.Module, seed: int) -> rg.Params:
    g = torch.Generator().manual_seed(seed)
    state = module.double().state_dict()
    return {n: torch.randn(t.shape, generator=g, dtype=t.dtype) * t.detach().std() for n, t in state.items()}


def data(shape: tuple[int, ...], counts: tuple[int, ...] = (7, 11, 7)) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(count, *shape, generator=g, dtype=torch.float64) + 0.3 for count in counts]


def mlp_of_three() -> nn.Module:
    return mlp(5, 8, 9, 7, 3)


MODELS: tuple[tuple[str, Any, tuple[int, ...], int], ...] = (
    ("mlp", mlp_of_three, (5,), 3),
    ("convolutional", Convolutional, (1, 6, 6), 4),
    ("residual", Residual, (5,), 5),
)


@pytest.fixture(params=MODELS, ids=lambda m: m[0])
def case(request: pytest.FixtureRequest) -> tuple[nn.Module, list[Tensor], int]:
    _, build, shape, layers = request.param
    torch.manual_seed(0)
    return build(), data(shape), layers


def by_hooks(module: nn.Module, params: rg.Params, batches: list[Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the mean and standard deviation of the outputs of all linear layers and convolutions."""
    seen: dict[str, list[Tensor]] = {}

    def watch(name: str) -> Any:
        return lambda _, __, out: seen.setdefault(name, []).append(out)

    kinds = (nn.Linear, nn.Conv2d, nn.ConvTranspose2d)
    handles = [m.register_forward_hook(watch(n)) for n, m in module.named_modules() if isinstance(m, kinds)]
    with torch.no_grad():
        for x in batches:
            torch.func.functional_call(module, params, (x,))
    for handle in handles:
        handle.remove()
    result = {}
    for name, parts in seen.items():
        units = torch.cat(parts).movedim(1, 0).flatten(1)
        result[name] = units.mean(1), units.std(1, correction=0)
    return result


def interior(module: nn.Module) -> list[str]:
    names = [n for n, m in module.named_modules() if isinstance(m, nn.Linear | nn.Conv2d | nn.ConvTranspose2d)]
    return [n for n in names if n not in ("head", "layers.3")]


@pytest.mark.parametrize("weights", [None, (0.8, 0.2)])
def test_every_unit_gets_its_mean_and_spread(
    case: tuple[nn.Module, list[Tensor], int], weights: tuple[float, float] | None
) -> None:
    module, batches, count = case
    a, b = drawn(module, 1), drawn(module, 2)
    s, t = weights or (0.5, 0.5)
    middle = rg.connect.Straight().at(a, b, t)
    repaired = rg.repair(middle, module, (a, b), batches, weights=weights).params
    first, second, before, after = (by_hooks(module, p, batches) for p in (a, b, middle, repaired))
    names = interior(module)
    assert len(names) == count
    for name in names:
        mean, std = (s * x + t * y for x, y in zip(first[name], second[name], strict=True))
        assert torch.allclose(after[name][0], mean, atol=1e-10)
        assert torch.allclose(after[name][1], std, rtol=1e-10)
        assert not torch.allclose(before[name][1], std, rtol=1e-2)
    head = "layers.3" if "layers.3.weight" in a else "head"
    assert all(torch.equal(repaired[f"{head}.{kind}"], middle[f"{head}.{kind}"]) for kind in ("weight", "bias"))


def test_a_network_between_itself_and_itself_stays(case: tuple[nn.Module, list[Tensor], int]) -> None:
    module, batches, _ = case
    a = drawn(module, 1)
    before = {n: t.clone() for n, t in a.items()}
    repaired = rg.repair(a, module, (a, a, a), batches, weights=(0.2, 0.3, 0.5)).params
    assert all(torch.equal(repaired[n], before[n]) and torch.equal(a[n], before[n]) for n in a)


def test_repair_is_done_once(case: tuple[nn.Module, list[Tensor], int]) -> None:
    module, batches, _ = case
    a, b = drawn(module, 1), drawn(module, 2)
    once = rg.repair(rg.connect.Straight().at(a, b, 0.5), module, (a, b), batches).params
    twice = rg.repair(once, module, (a, b), batches).params
    assert all(torch.allclose(once[n], twice[n], rtol=1e-9, atol=1e-12) for n in a)


def test_statistics_do_not_depend_on_the_batches(case: tuple[nn.Module, list[Tensor], int]) -> None:
    module, batches, _ = case
    a, b = drawn(module, 1), drawn(module, 2)
    middle = rg.connect.Straight().at(a, b, 0.5)
    one, two = (rg.repair(middle, module, (a, b), data).params for data in (batches, [torch.cat(batches)]))
    assert all(torch.allclose(one[n], two[n], rtol=1e-9, atol=1e-12) for n in a)


def test_layers_that_are_written_out_are_found() -> None:
    """Without a bias, the deviation is exact, and the mean is not corrected."""
    torch.manual_seed(0)
    module = Products().double()
    batches = data((5,))
    layers = LayerStatistics(module, batches, [module.state_dict()]).layers
    assert [(x.name, x.bias, x.weight_axis, x.depth, x.is_repaired) for x in layers] == [
        ("one", "shift", 1, 1, True),
        ("two", None, 0, 2, True),
        ("three", None, 1, 3, True),
        ("head", "head.bias", 0, 3, False),
    ]
    a, b = drawn(module, 1), drawn(module, 2)
    repaired = rg.repair(rg.connect.Straight().at(a, b, 0.5), module, (a, b), batches).params
    table = rg.connect.variance_collapse(repaired, module, (a, b), batches).table
    assert [row.ratio for row in table[:3]] == pytest.approx([1.0] * 3)
    x = torch.cat(batches)
    means = [(p["shift"] + x @ p["one"]).mean(0) for p in (a, b, repaired)]
    assert torch.allclose(means[2], (means[0] + means[1]) / 2)


def test_a_repaired_path_is_repaired_at_every_point(
    case: tuple[nn.Module, list[Tensor], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, batches, _ = case
    a, b = drawn(module, 1), drawn(module, 2)
    measured: list[Any] = []
    moments = LayerStatistics.moments

    def spy(
        self: LayerStatistics, params: Mapping[str, Tensor], places: Mapping[str, int]
    ) -> dict[str, RunningMoments]:
        measured.append(params)
        return moments(self, params, places)

    bent = rg.connect.Bezier((drawn(module, 3),))
    path = rg.connect.Repaired(module, batches, bent)
    expected = rg.repair(bent.at(a, b, 0.25), module, (a, b), batches, weights=(0.75, 0.25)).params
    seen: list[rg.Params] = []

    def evaluate(p: rg.Params) -> dict[str, float]:
        seen.append(p)
        return {"loss": 0.0}

    monkeypatch.setattr(LayerStatistics, "moments", spy)
    rg.line(a, b, evaluate, points=5, path=path)
    for end in (a, b):  # whose statistics all points share
        assert sum(all(torch.equal(params[n], end[n]) for n in end) for params in measured) == 1
    assert all(torch.equal(seen[0][n], a[n]) and torch.equal(seen[4][n], b[n]) for n in a)
    assert all(torch.equal(seen[1][n], expected[n]) for n in a)


@pytest.mark.parametrize("name", ["hf_gpt2", "hf_llama", "torch_transformer", "glu", "densenet"])
def test_models_of_all_sorts_are_repaired(name: str) -> None:
    model = BY_NAME[name]
    torch.manual_seed(0)
    module = model.module().double().eval()
    inputs = tuple(x.double() if x.is_floating_point() else x for x in model.inputs())
    kwargs = model.kwargs()
    batch: Any = {"input_ids": inputs[0], **kwargs} if kwargs else inputs
    g = torch.Generator().manual_seed(1)
    state = {n: t.detach().clone() for n, t in module.state_dict().items()}

    def noisy() -> rg.Params:
        return {
            n: t * (1 + 0.5 * torch.randn(t.shape, generator=g, dtype=t.dtype)) if t.is_floating_point() else t
            for n, t in state.items()
            if "running" not in n
        } | {n: t for n, t in state.items() if "running" in n}

    a, b = noisy(), noisy()
    if name == "densenet":
        a, b = (rg.connect.reset_batchnorm(p, module, [batch]) for p in (a, b))
    middle = rg.connect.Straight().at(a, b, 0.5)
    repaired = rg.repair(middle, module, (a, b), [batch]).params
    after = rg.connect.variance_collapse(repaired, module, (a, b), [batch]).table
    layers = LayerStatistics(module, [batch], [state]).layers
    wanted = [row for row, layer in zip(after, layers, strict=True) if layer.is_repaired]
    assert [row.ratio for row in wanted] == pytest.approx([1.0] * len(wanted), rel=1e-3)
    assert wanted or name == "densenet"


class Mixed(nn.Module):
    """A normalized convolution, linear layers without normalization, and a normalized layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
        self.hidden = nn.Linear(4, 6)
        self.more, self.last = nn.Linear(6, 5), nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x)).relu().mean((-2, -1))
        out: Tensor = self.head(self.last(self.more(self.hidden(x).relu())).relu())
        return out


def test_mixed_models_get_both() -> None:
    torch.manual_seed(0)
    batches = data((1, 6, 6), (64,))
    modules = [Mixed().double() for _ in range(2)]
    a, b = (rg.connect.reset_batchnorm(m.state_dict(), m, batches) for m in modules)
    middle = rg.connect.Straight().at(a, b, 0.5)
    result = rg.repair(middle, modules[0], (a, b), batches)
    repaired = result.params
    assert result.layers == ("hidden",)
    for name in ("conv.weight", "more.weight", "norm.weight", "head.weight"):
        assert torch.equal(repaired[name], middle[name])
    assert not torch.equal(repaired["hidden.weight"], middle["hidden.weight"])
    again = rg.connect.reset_batchnorm(repaired, modules[0], batches)
    assert all(torch.allclose(again[n], repaired[n]) for n in again)
    table = {row.layer: row.ratio for row in rg.connect.variance_collapse(repaired, modules[0], (a, b), batches).table}
    assert table["hidden"] == pytest.approx(1.0)
    assert table["conv"] == pytest.approx(1.0, abs=0.01)
    assert table["more"] == pytest.approx(1.0, abs=0.05)
    collapsed = {
        row.layer: row.ratio for row in rg.connect.variance_collapse(middle, modules[0], (a, b), batches).table
    }
    assert max(collapsed["conv"], collapsed["more"]) < 0.9


def test_units_that_never_vary_keep_their_weights() -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 2)).double()
    a = drawn(module, 1)
    b = {n: -t if n == "0.weight" else t for n, t in a.items()}
    middle = rg.connect.Straight().at(a, b, 0.5)
    batches = data((3,))
    repaired = rg.repair(middle, module, (a, b), batches).params
    assert torch.equal(repaired["0.weight"], torch.zeros(2, 3, dtype=torch.float64))
    assert all(bool(t.isfinite().all()) for t in repaired.values())
    assert rg.connect.variance_collapse(repaired, module, (a, b), batches).table[0].ratio < 1e-30
    silent = {n: torch.zeros_like(t) for n, t in a.items()}
    assert math.isnan(rg.connect.variance_collapse(silent, module, (silent, silent), batches).table[0].ratio)


def test_variance_collapses_as_random_weights_average() -> None:
    """The mean of two independent layers has half of the variance of each layer, and the table shows this."""
    module = nn.Sequential(nn.Linear(40, 400, bias=False), nn.ReLU(), nn.Linear(400, 2)).double()
    a, b = drawn(module, 1), drawn(module, 2)
    found = rg.connect.variance_collapse(rg.connect.Straight().at(a, b, 0.5), module, (a, b), data((40,), (300,)))
    assert found.table[0].layer == "0"
    assert found.table[0].units == 400
    assert found.table[0].ratio == pytest.approx(0.5, abs=0.05)
    assert str(found).splitlines()[0].split() == ["layer", "units", "variance", "expected", "ratio"]
    assert len(str(found).splitlines()) == 3


def test_a_single_layer_is_an_output() -> None:
    module = nn.Linear(3, 2).double()
    a, b = drawn(module, 1), drawn(module, 2)
    middle = rg.connect.Straight().at(a, b, 0.5)
    repaired = rg.repair(middle, module, (a, b), data((3,))).params
    assert all(torch.equal(repaired[n], middle[n]) for n in a)
    assert len(rg.connect.variance_collapse(middle, module, (a, b), data((3,))).table) == 1


def test_half_precision_keeps_its_dtype() -> None:
    module = mlp_of_three()
    a, b = ({n: t.to(torch.bfloat16) for n, t in drawn(module, seed).items()} for seed in (1, 2))
    module = module.to(torch.bfloat16)
    batches = [x.float() for x in data((5,))]
    repaired = rg.repair(rg.connect.Straight().at(a, b, 0.5), module, (a, b), batches).params
    assert all(t.dtype == torch.bfloat16 for t in repaired.values())
    table = rg.connect.variance_collapse(repaired, module, (a, b), batches).table
    assert [row.ratio for row in table[:3]] == pytest.approx([1.0] * 3, abs=0.05)


def test_moments_are_exact_far_from_zero() -> None:
    x = torch.randn(3, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 1e6
    moments = RunningMoments()
    for part in torch.split(x, 9, dim=1):
        moments.update(part)
    assert torch.allclose(moments.mean, x.mean(1), rtol=1e-14)
    assert torch.allclose(moments.std, x.std(1, correction=0), rtol=1e-8)


def test_repair_lowers_the_loss_of_a_midpoint() -> None:
    images = digits()
    module = mlp(64, 32, 32, 32, 10)
    ends = []
    for seed in range(2):
        g = torch.Generator().manual_seed(seed)
        training = ClassifierConfig(epochs=6, batch=64, optimizer=AdamW(1e-2))
        start = initialize(module, g)
        ends.append(train(module, start, images.train_images, images.train_labels, training, generator=g))
    symmetry = rg.discover(module, (images.train_images[:4],))
    moved = rg.align(ends[0], ends[1], symmetry).params
    evaluate = rg.Task(module, [(images.test_images, images.test_labels)]).evaluate
    batches = [images.train_images]
    losses = []
    for b in (ends[1], moved):
        middle = rg.connect.Straight().at(ends[0], b, 0.5)
        repaired = rg.repair(middle, module, (ends[0], b), batches).params
        losses += [evaluate(middle)["loss"], evaluate(repaired)["loss"]]
    naive, naive_repaired, aligned, aligned_repaired = losses
    assert naive_repaired < 0.9 * naive
    assert aligned_repaired < 0.9 * aligned
    assert aligned_repaired < naive_repaired


class Undecided(nn.Module):
    """A module that takes another branch if a value is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out.relu() if bool(out.sum() > 0) else out.tanh()


@pytest.mark.parametrize("function", [rg.repair, rg.connect.variance_collapse])
def test_bad_input_is_refused(function: Any) -> None:
    module = mlp_of_three()
    a, b = drawn(module, 1), drawn(module, 2)
    batches = data((5,))
    cases: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        ((a, (a, b), []), {}, "there are no batches, and activations are measured on data"),
        ((a, (a, b), iter(batches)), {}, "the batches are a list_iterator, which can be read only once"),
        ((a, (), batches), {}, "there are no endpoints|without endpoints only statistics"),
        ((a, (a, {"w": a["layers.0.bias"]}), batches), {}, "endpoint 1 does not fit the interpolated network"),
        ((a, (a, {**b, "layers.0.bias": a["layers.0.bias"] / 0}), batches), {}, "'layers.0.bias' of endpoint 1 holds"),
        ((a, (a, b), batches), {"weights": (1.0,)}, r"weights are \[1.0\] for 2 networks"),
        ((a, (a, b), batches), {"weights": (-1.0, 2.0)}, "none negative"),
        ((a, (a, b), [torch.full((3, 5), torch.nan)]), {}, r"the activation %linear \(shape \(3, 8\)\) is NaN or Inf"),
        ((a, (a, b), [torch.ones(3, 4)]), {}, "fails on the example inputs"),
    ]
    for args, kwargs, message in cases:
        with pytest.raises(ValueError, match=message):
            function(args[0], module, *args[1:], **kwargs)
    torch.manual_seed(0)
    undecided = Undecided()
    state = dict(undecided.state_dict())
    with pytest.raises(rg.TraceError, match="cannot trace Undecided"):
        function(state, undecided, (state, state), [torch.randn(4, 2)])


class Sized(nn.Module):
    """A module in which long batches use another layer than short batches."""

    def __init__(self) -> None:
        super().__init__()
        self.short, self.long, self.head = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head((self.long if len(x) > 5 else self.short)(x).relu())
        return out


def test_batches_that_take_different_ways_are_refused() -> None:
    state = dict(Sized().state_dict())
    for one, two in itertools.permutations((torch.randn(8, 2), torch.randn(4, 2))):
        with pytest.raises(ValueError, match="another way for a batch of another shape"):
            rg.repair(state, Sized(), (state, state), [one, two])

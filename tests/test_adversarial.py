"""Modules that are designed to mislead discovery: the result is correct, or an error states why discovery is
impossible.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import prune
from torch.utils import checkpoint

import regauge as rg
from regauge.discovery import layout
from regauge.discovery.trace import TraceError

Forward = Callable[[Any, Tensor], Any]


class Written(nn.Module):
    """Two layers `fc1` (5 to 8) and `fc2` (8 to 8), a head (8 to 3), and a forward pass written in a test."""

    def __init__(self, forward: Forward, **parts: Any) -> None:
        super().__init__()
        self.fc1, self.fc2, self.head = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.square = nn.Parameter(torch.randn(8, 8))
        self.gain = nn.Parameter(torch.randn(8))
        self.register_buffer("table", torch.rand(8))
        self.register_buffer("order", torch.tensor([3, 1, 0, 2, 5, 4, 7, 6]))
        for name, part in parts.items():
            setattr(self, name, part)
        self.written = forward

    def forward(self, x: Tensor) -> Any:
        return self.written(self, x)


def _weight_compared(m: Any, x: Tensor) -> Tensor:
    return m.head((m.fc1(x) * (m.gain > torch.linspace(-1, 1, 8, dtype=x.dtype))).relu())


def _weight_hashed(m: Any, x: Tensor) -> Tensor:
    code = (m.fc1.weight * 1000).long().sum() % 7
    return m.head(m.fc1(x).relu()) * (1 + code.to(x.dtype))


def _weight_by_table(m: Any, x: Tensor) -> Tensor:
    return m.head(functional.linear(x, m.fc1.weight[m.order]).relu())


def _positional(m: Any, x: Tensor) -> Tensor:
    return m.head((m.fc1(x) + m.table).relu())


def _gram(m: Any, x: Tensor) -> Tensor:
    return m.head(m.fc1(x) @ (m.square.T @ m.square))


def _softmax_over_heads(m: Any, x: Tensor) -> Tensor:
    heads = m.fc1(x).unflatten(-1, (4, 2))
    return m.head((heads.softmax(1) * heads).flatten(1))


def _argmax_gather(m: Any, x: Tensor) -> Tensor:
    hidden = m.fc1(x).relu()
    return m.head(m.square[hidden.argmax(-1)] + m.fc2(hidden))


def _argmax_as_number(m: Any, x: Tensor) -> Tensor:
    hidden = m.fc1(x).relu()
    return m.head(hidden) + hidden.argmax(-1, keepdim=True).to(x.dtype)


def _cumulative(m: Any, x: Tensor) -> Tensor:
    return m.head(m.fc1(x).relu().cumsum(-1))


def _sorted_units(m: Any, x: Tensor) -> Tensor:
    return m.head(m.fc1(x).relu().sort(-1).values)


def _sorted_weights(m: Any, x: Tensor) -> Tensor:
    return m.head(functional.linear(x, m.fc1.weight.sort(0).values).relu())


def _slice_written(m: Any, x: Tensor) -> Tensor:
    hidden = m.fc1(x).relu().clone()
    hidden[:, :3] = 0
    hidden[:, 3] += 1
    return m.head(hidden)


def _slice_crossed(m: Any, x: Tensor) -> Tensor:
    hidden = m.fc1(x).relu()
    out = torch.empty_like(hidden)
    out[:, ::2] = hidden[:, :4]
    out[:, 1::2] = hidden[:, 4:]
    return m.head(out)


def _rolled(m: Any, x: Tensor) -> Tensor:
    return m.head(m.fc1(x).relu().roll(1, -1))


def _rolled_and_kept(m: Any, x: Tensor) -> Tensor:
    hidden = m.fc1(x).relu()
    return m.head(hidden + hidden.roll(1, -1))


def _flipped_residual(m: Any, x: Tensor) -> Tensor:
    hidden = m.fc1(x).relu()
    return m.head(hidden + m.fc2(hidden).flip(-1))


def _transposed_tie(m: Any, x: Tensor) -> Tensor:
    hidden = functional.linear(m.fc1(x).relu(), m.square).relu()
    return m.head(functional.linear(hidden, m.square.T).relu())


def _diagonal(m: Any, x: Tensor) -> Tensor:
    return m.head((m.fc1(x) * m.square.diagonal()).relu())


def _trace(m: Any, x: Tensor) -> Tensor:
    return m.head(m.fc1(x).relu()) * torch.trace(m.square)


def _scalar_of_parameters(m: Any, x: Tensor) -> Tensor:
    return m.head(m.fc1(x).relu()) / m.fc1.weight.norm()


def _spectral_scalar(m: Any, x: Tensor) -> Tensor:
    return m.head(m.fc1(x).relu()) / torch.linalg.svdvals(m.fc1.weight)[0]


def _inverse_weight(m: Any, x: Tensor) -> Tensor:
    return m.head(torch.linalg.solve(m.square, m.fc1(x).T).T)


def _fourier(m: Any, x: Tensor) -> Tensor:
    return m.head(torch.fft.fft(m.fc1(x).relu()).abs())


def _fourier_of_inputs(m: Any, x: Tensor) -> Tensor:
    return m.head(m.fc1(torch.fft.fft(x).real).relu())


def _complex(m: Any, x: Tensor) -> Tensor:
    z = torch.complex(m.fc1(x), m.fc2(m.fc1(x)))
    return m.head((z * z).abs())


def _conditional(m: Any, x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda y: m.head(m.fc1(y).relu()), lambda y: m.head(m.fc1(y).tanh()), (x,))


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 3 * ctx.saved_tensors[0] ** 2 * g


def _custom_function(m: Any, x: Tensor) -> Tensor:
    return m.head(_Cube.apply(m.fc1(x)))


def _checkpointed(m: Any, x: Tensor) -> Tensor:
    return m.head(checkpoint.checkpoint(lambda y: m.fc2(m.fc1(y).relu()).relu(), x, use_reentrant=False))


def _dropped(m: Any, x: Tensor) -> Tensor:
    return m.head(functional.dropout(m.fc1(x).relu(), 0.5, m.training))


def _dictionary(m: Any, x: Tensor) -> dict[str, Any]:
    hidden = m.fc1(x).relu()
    return {"logits": m.head(m.fc2(hidden).relu()), "more": {"first": hidden.mean(-1)}}


def _hidden_is_output(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    hidden = m.fc1(x).relu()
    return m.head(m.fc2(hidden).relu()), hidden


def _hidden_state_escapes_by_index(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    hidden = m.fc1(x).relu()
    return m.head(hidden), hidden[:, 2]


def _distance(m: Any, x: Tensor) -> Tensor:
    return torch.cdist(m.fc1(x), m.square)


def _distance_to_fixed(m: Any, x: Tensor) -> Tensor:
    return torch.cdist(m.fc1(x), torch.arange(24, dtype=x.dtype).reshape(3, 8))


def _outer_product(m: Any, x: Tensor) -> Tensor:
    hidden = m.fc1(x).tanh()
    return (hidden.unsqueeze(-1) * hidden.unsqueeze(-2)).flatten(1)[:, :9]


def _lower_triangle(m: Any, x: Tensor) -> Tensor:
    return m.head(functional.linear(m.fc1(x).relu(), m.square.tril()).relu())


def _autoregressive_mask(m: Any, x: Tensor) -> Tensor:
    mask = torch.ones(8, 8, dtype=x.dtype).tril()
    return m.head(functional.linear(m.fc1(x).relu(), m.fc2.weight * mask).relu())


def _shared_bias(m: Any, x: Tensor) -> Tensor:
    hidden = functional.linear(x, m.fc1.weight, m.gain).relu()
    return m.head(functional.linear(hidden, m.fc2.weight, m.gain).relu())


def _two_frequencies(m: Any, x: Tensor) -> Tensor:
    hidden = m.fc1(x)
    return m.head(torch.sin(2 * hidden) + torch.sin(3 * hidden))


def _learned_frequency(m: Any, x: Tensor) -> Tensor:
    return m.head(torch.sin(m.gain * m.fc1(x)))


def _sine_of_shared(m: Any, x: Tensor) -> Tensor:
    hidden = m.fc1(x)
    return m.head(torch.sin(5 * hidden)) + m.head(hidden)


def _odd_and_even(m: Any, x: Tensor) -> Tensor:
    hidden = m.fc1(x)
    return m.head(hidden.tanh() + hidden.abs())


def _almost_homogeneous(m: Any, x: Tensor) -> Tensor:
    return m.head(torch.where(m.fc1(x) > 0.1, m.fc1(x), torch.zeros(())))


def _bent_at_one(m: Any, x: Tensor) -> Tensor:
    return m.head(functional.threshold(m.fc1(x), 1.0, 0.0))


def _max_with_constant(m: Any, x: Tensor) -> Tensor:
    return m.head(torch.maximum(m.fc1(x), torch.full((8,), 0.1, dtype=x.dtype)))


def _broadcast_unit(m: Any, x: Tensor) -> Tensor:
    hidden = m.fc1(x).relu()
    return m.head(hidden * hidden[:, :1])


def _mixed_positions(m: Any, x: Tensor) -> Tensor:
    hidden = m.fc1(x).relu()
    return m.head(hidden.reshape(-1, 4, 2).transpose(1, 2).reshape(-1, 8) + hidden)


def _viewed_as_batch(m: Any, x: Tensor) -> Tensor:
    return m.head(m.fc1(x).relu().reshape(-1, 8)[: x.shape[0]].reshape(2, -1)[:, :8])


def _batch_reversed_weight(m: Any, x: Tensor) -> Tensor:
    return functional.bilinear(m.fc1(x).relu(), m.fc2(m.fc1(x)).relu(), m.square.reshape(1, 8, 8))


def _kron(m: Any, x: Tensor) -> Tensor:
    small = torch.kron(m.square[:4, :4], m.square[:2, :2])
    return m.head(functional.linear(m.fc1(x).relu(), small).relu())


def _unused(m: Any, x: Tensor) -> Tensor:
    return m.head(m.fc1(x).relu()) + 0 * m.fc2.weight.sum()


def _python_number(m: Any, x: Tensor) -> Tensor:
    return m.head(m.fc1(x).relu()) * m.fc1.weight.shape[0]


def _histogram(m: Any, x: Tensor) -> Tensor:
    return m.head(m.fc1(x).relu()) + torch.bucketize(m.gain, m.table.sort().values).to(x.dtype).mean()


def _scatter_add(m: Any, x: Tensor) -> Tensor:
    hidden = m.fc1(x).relu()
    return m.head(torch.zeros_like(hidden).index_add(1, m.order, hidden) + hidden)


def _vmapped(m: Any, x: Tensor) -> Tensor:
    return torch.vmap(lambda row: m.head(m.fc1(row).relu()))(x)


def _layer_norm_on_two(m: Any, x: Tensor) -> Tensor:
    hidden = m.fc1(x).unflatten(-1, (2, 4))
    return m.head(functional.layer_norm(hidden, (2, 4), m.square[:2, :4]).flatten(1))


def _normalized_batch(m: Any, x: Tensor) -> Tensor:
    hidden = m.fc1(x)
    return m.head((hidden - hidden.mean(0)) / (hidden.var(0) + 1e-5).sqrt())


WRITTEN: tuple[Forward, ...] = (
    *(_weight_compared, _weight_hashed, _weight_by_table, _positional, _gram, _softmax_over_heads, _argmax_gather),
    *(_argmax_as_number, _cumulative, _sorted_units, _sorted_weights, _slice_written, _slice_crossed, _rolled),
    *(_rolled_and_kept, _flipped_residual, _transposed_tie, _diagonal, _trace, _scalar_of_parameters),
    *(_spectral_scalar, _inverse_weight, _fourier, _fourier_of_inputs, _complex, _conditional, _custom_function),
    *(_checkpointed, _dropped, _dictionary, _hidden_is_output, _hidden_state_escapes_by_index, _distance),
    *(_distance_to_fixed, _outer_product, _lower_triangle, _autoregressive_mask, _shared_bias, _two_frequencies),
    *(_learned_frequency, _sine_of_shared, _odd_and_even, _almost_homogeneous, _bent_at_one, _max_with_constant),
    *(_broadcast_unit, _mixed_positions, _viewed_as_batch, _batch_reversed_weight, _kron, _unused, _python_number),
    *(_histogram, _scatter_add, _vmapped, _layer_norm_on_two, _normalized_batch),
)

MUST_FIND = {
    **{name: {"S8"} for name in ("_checkpointed", "_custom_function", "_dropped", "_vmapped", "_fourier_of_inputs")},
    **{name: {"S8"} for name in ("_dictionary", "_hidden_is_output", "_unused", "_python_number")},
}
"""Permuted groups that discovery must find in a module."""


@pytest.mark.parametrize("forward", WRITTEN, ids=lambda f: f.__name__.strip("_"))
def test_what_is_found_in_a_misleading_module_is_true(forward: Forward) -> None:
    torch.manual_seed(0)
    module = Written(forward)
    inputs = (torch.randn(6, 5),)
    symmetry = rg.discover(module, inputs, verify=False)
    _require_true(symmetry, module, inputs)
    found = {f"S{group.size}" for group in symmetry.groups if group.is_permuted}
    assert found >= MUST_FIND.get(forward.__name__, set()), str(symmetry)


def _require_true(symmetry: rg.Symmetry, module: nn.Module, inputs: tuple[Any, ...]) -> None:
    for seed in range(2):
        check = symmetry.verify(module, inputs, generator=torch.Generator().manual_seed(seed))
        assert check.max_error < 1e-7, f"{check}\n{symmetry}"
    assert all(row.reason for row in symmetry.frozen)


def weight_normed() -> nn.Module:
    return nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(5, 8)), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)
    )


def old_weight_normed() -> nn.Module:
    with pytest.warns(FutureWarning, match="weight_norm"):
        first = nn.utils.weight_norm(nn.Linear(5, 8))
    return _run_once(nn.Sequential(first, nn.ReLU(), nn.Linear(8, 3)))


def spectral_normed() -> nn.Module:
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), layer, nn.ReLU(), nn.Linear(8, 3)).eval()


def orthogonal() -> nn.Module:
    layer = nn.utils.parametrizations.orthogonal(nn.Linear(8, 8))
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), layer, nn.ReLU(), nn.Linear(8, 3))


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


def symmetric() -> nn.Module:
    layer = nn.Linear(8, 8)
    nn.utils.parametrize.register_parametrization(layer, "weight", Symmetric())
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), layer, nn.ReLU(), nn.Linear(8, 3))


def pruned() -> nn.Module:
    layer = nn.Linear(8, 8)
    prune.random_unstructured(layer, "weight", 0.5)
    return _run_once(nn.Sequential(nn.Linear(5, 8), nn.ReLU(), layer, nn.ReLU(), nn.Linear(8, 3)))


def _run_once(module: nn.Module) -> nn.Module:
    """Run the module once, because torch cannot copy a weight with a gradient history that a hook computes."""
    with torch.no_grad():
        module(torch.randn(2, 5))
    return module


def training_mode() -> nn.Module:
    layers = (nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))
    return nn.Sequential(*layers).train()


def without_statistics() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.ReLU(), nn.Linear(8, 3))


def width_one() -> nn.Module:
    layers = (nn.Linear(5, 1), nn.ReLU(), nn.Linear(1, 1), nn.Tanh(), nn.Linear(1, 3))
    return nn.Sequential(*layers)


def dead_units() -> nn.Module:
    module = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    with torch.no_grad():
        module[0].bias[:3] = -100
        module[2].weight[:, 4] = 0
    return module


def duplicate_units() -> nn.Module:
    module = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    with torch.no_grad():
        module[0].weight[4:] = module[0].weight[:4]
    return module


def all_alike() -> nn.Module:
    """Return constant weights: equal numbers must not be interpreted as structure."""
    module = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(1.0)
    return module


def one_layer() -> nn.Module:
    return nn.Linear(5, 3)


def shared_module() -> nn.Module:
    layer = nn.Linear(8, 8)
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), layer, nn.ReLU(), layer, nn.ReLU(), nn.Linear(8, 3))


MODULES = (
    *(weight_normed, old_weight_normed, spectral_normed, orthogonal, symmetric, pruned, training_mode),
    *(without_statistics, width_one, dead_units, duplicate_units, all_alike, one_layer, shared_module),
)


@pytest.mark.parametrize("make", MODULES, ids=lambda make: make.__name__)
def test_what_is_found_in_an_unusual_module_is_true(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    module = make()
    inputs = (torch.randn(6, 5),)
    was_training = [m.training for m in module.modules()]
    kept = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    symmetry = rg.discover(module, inputs, verify=False)
    _require_true(symmetry, module, inputs)
    assert [m.training for m in module.modules()] == was_training
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, kept[name]), f"discovery changed {name}"


@pytest.mark.parametrize("make", [weight_normed, training_mode, dead_units, all_alike, duplicate_units])
def test_plain_hidden_units_are_found_in_unusual_modules(make: Callable[[], nn.Module]) -> None:
    symmetry = rg.discover(make(), (torch.randn(6, 5),))
    assert "S8" in {f"S{group.size}" for group in symmetry.groups if group.is_permuted}


def test_a_layer_has_no_symmetry_between_inputs_and_outputs() -> None:
    symmetry = rg.discover(one_layer(), (torch.randn(6, 5),))
    assert symmetry.groups == ()
    assert {(row.parameter, row.axis) for row in symmetry.frozen} == {("weight", 0), ("weight", 1), ("bias", 0)}


def test_unused_parameters_are_named() -> None:
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(5, 3), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    symmetry = rg.discover(Idle(), (torch.randn(6, 5),))
    assert set(symmetry.unused) == {"idle.weight", "idle.bias"}
    assert "idle.weight" in str(symmetry)


def test_a_module_without_parameters_has_the_trivial_symmetry() -> None:
    symmetry = rg.discover(nn.ReLU(), (torch.randn(6, 5),))
    assert symmetry.groups == ()
    assert symmetry.act(symmetry.identity(), {}) == {}


def test_outputs_decide() -> None:
    torch.manual_seed(0)
    module, inputs = Written(_dictionary), (torch.randn(6, 5),)
    sizes = lambda s: sorted(g.size for g in s.groups if g.is_permuted)  # noqa: E731
    assert sizes(rg.discover(module, inputs)) == [8, 8]
    hidden = Written(_hidden_is_output)
    assert sizes(rg.discover(hidden, inputs)) == [8]
    assert sizes(rg.discover(hidden, inputs, outputs=lambda out: out[0])) == [8, 8]
    with pytest.raises(ValueError, match="no 'logit'"):
        rg.discover(module, inputs, outputs="logit")


def test_keyword_inputs_and_inputs_that_are_no_tensors() -> None:
    class Flexible(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.head = nn.Linear(5, 8), nn.Linear(8, 3)

        def forward(
            self,
            parts: dict[str, list[Tensor]],
            depth: int,
            name: str,
            mask: Tensor | None = None,
            *,
            flip: bool = False,
        ) -> Tensor:
            x = sum(parts["x"])
            x = -x if flip else x
            hidden = self.fc1(x)
            hidden = hidden.tanh() if name == "tanh" else hidden.relu()
            return self.head(hidden) * depth

    module = Flexible()
    parts = {"x": [torch.randn(6, 5), torch.randn(6, 5)]}
    tanh = rg.discover(module, (parts, 2, "tanh"), {"flip": True})
    relu = rg.discover(module, (parts, 2, "relu", None))
    assert [group.kind for group in tanh.groups] == ["signed"]
    assert [group.kind for group in relu.groups] == ["scaled"]
    generator = torch.Generator().manual_seed(0)
    assert tanh.verify(module, (parts, 2, "tanh"), {"flip": True}, generator=generator).ok


def test_tails_of_tails_are_one_sum() -> None:
    whole = tail = layout.leaf(400)
    for _ in range(399):
        tail = layout.cut(tail, [1])[1]
    assert [layout.size_of(piece) for piece in layout.cut(whole, [396, 398])] == [396, 2, 2]


def test_a_model_that_is_finite_in_float32_alone_is_checked_there() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.head = nn.Linear(5, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            keep = torch.ones(3, dtype=torch.float32)
            return self.head(self.fc(x).relu()) + (1 - keep) * torch.finfo(x.dtype).min

    torch.manual_seed(0)
    module, inputs, generator = Masked(), (torch.randn(6, 5),), torch.Generator().manual_seed(0)
    assert module.double()(inputs[0].double()).isnan().all()
    symmetry = rg.discover(module.float(), inputs)
    assert [group.kind for group in symmetry.groups] == ["scaled"]
    assert symmetry.verify(module, inputs, generator=generator).ok
    axes = {"fc.weight": ("h", None), "fc.bias": ("h",), "head.weight": (None, "h")}
    wrong = rg.Symmetry.from_axes(axes, kinds={"h": "signed"})
    assert not wrong.verify(module, inputs, generator=generator).ok


def test_infinite_limits_are_no_reason_to_refuse() -> None:
    class Limited(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.head = nn.Linear(5, 8), nn.Linear(8, 3)
            self.register_buffer("lowest", torch.tensor(-torch.inf))

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.maximum(self.fc(x), self.lowest).tanh())

    torch.manual_seed(0)
    module, inputs, generator = Limited(), (torch.randn(6, 5),), torch.Generator().manual_seed(0)
    symmetry = rg.discover(module, inputs)
    assert [(group.size, group.is_permuted) for group in symmetry.groups] == [(8, True)]
    assert symmetry.verify(module, inputs, generator=generator).ok


def test_a_wrong_symmetry_is_called_wrong() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    axes = {"0.weight": ("h", None), "0.bias": ("h",), "2.weight": (None, "h")}
    inputs, generator = (torch.randn(6, 5),), torch.Generator().manual_seed(0)
    assert rg.Symmetry.from_axes(axes, kinds={"h": "signed"}).verify(module, inputs, generator=generator).ok
    check = rg.Symmetry.from_axes(axes, kinds={"h": "scaled"}).verify(module, inputs, generator=generator)
    assert not check.ok
    assert check.failed == ("h",)
    assert "NOT a symmetry: 1 of 1 groups change the outputs: h" in str(check)
    untied = rg.Symmetry.from_axes({name: row for name, row in axes.items() if name != "0.bias"})
    assert not untied.verify(module, inputs, generator=generator).ok


class Branching(nn.Module):
    """A module in which Python branches on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.head = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.fc1(x)
        if hidden.sum() > 0:
            return self.head(hidden.relu())
        return self.head(hidden.tanh())


class Counting(nn.Module):
    """A module with a shape that depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.head = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        total = x.new_zeros(3)
        for row in range(int((x.sum(-1) > 0).sum())):
            total = total + self.head(self.fc1(x[row]).relu())
        return total


@pytest.mark.parametrize("make", [Branching, Counting])
def test_a_model_that_cannot_be_traced_says_what_to_do(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(TraceError, match="from_axes"):
        rg.discover(make(), (torch.randn(6, 5),))


def test_wrong_inputs_are_the_callers_error() -> None:
    with pytest.raises(ValueError, match=r"Sequential fails on the example inputs: RuntimeError: mat1 and mat2 shapes"):
        rg.discover(nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)), (torch.randn(6, 4),))


def test_outputs_without_tensors_are_refused() -> None:
    class Silent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(5, 3)

        def forward(self, x: Tensor) -> dict[str, int]:
            self.fc(x)
            return {"rows": x.shape[0]}

    with pytest.raises(ValueError, match="no floating-point tensors"):
        rg.discover(Silent(), (torch.randn(6, 5),))


def test_the_meta_device_gives_the_same_symmetry_and_cannot_be_verified() -> None:
    make = lambda: nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).eval()  # noqa: E731
    with torch.device("meta"):
        module, inputs = make(), (torch.randn(6, 5),)
    symmetry = rg.discover(module, inputs)
    assert symmetry.groups == rg.discover(make(), (torch.randn(6, 5),)).groups
    with pytest.raises(ValueError, match="meta device"):
        symmetry.verify(module, inputs, generator=torch.Generator())

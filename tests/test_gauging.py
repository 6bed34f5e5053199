"""Every method preserves the function, and is never worse than the identity on its own objective."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from transformer_cases import CASES as TRANSFORMERS
from transformer_cases import Case, change, discovered, generator, hf_gpt2, network

import regauge as rg
from regauge.core.axis_products import Kronecker
from regauge.core.params import Params
from regauge.gauging import GaugeMethod, RoundToNearest, apply_moves, certify
from regauge.gauging.gauge_method import GaugeProblem
from regauge.gauging.hadamard import flat_factors, flat_rotation
from regauge.gauging.methods import learned_rotation
from regauge.gauging.methods.orbit_part import OrbitPart, Point
from regauge.gauging.methods.rounding_losses import DifferentiableStatistics, Expected, OfFunction
from regauge.gauging.rounding import layer_rows, round_network, rounded_activations, rounding_errors


class Depthwise(nn.Module):
    """An inverted residual with batch normalization, without the clipping of ReLU6."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inner, outer, kernel, groups in ((3, 8, 3, 1), (8, 8, 3, 8), (8, 6, 1, 1)):
            layers += [nn.Conv2d(inner, outer, kernel, padding=kernel // 2, groups=groups), nn.BatchNorm2d(outer)]
            layers += [nn.ReLU()]
        self.body, self.head = nn.Sequential(*layers), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.body(x).mean((-2, -1)))
        return result


CASES = {
    "ViT": TRANSFORMERS["ViT"],
    "Llama": TRANSFORMERS["Llama"],
    "depthwise": Case(Depthwise, (torch.randn(2, 3, 5, 5, generator=generator(2)),), ""),
}
METHODS: dict[str, GaugeMethod] = {
    "equalize": rg.Equalize(),
    "every Hadamard": rg.Hadamard(is_kept_always=True),
    "random rotation": rg.gauging.RandomRotation(is_kept_always=True),
    "learned rotation": rg.gauging.LearnedRotation(steps=4),
    "learned by function": rg.gauging.LearnedRotation(steps=20, lr=0.02, by="function"),
    "AWQ": rg.gauging.Smooth(grid=4),
    "SmoothQuant": rg.gauging.Smooth(
        alpha=0.5, statistic="max", is_against_weights=True, activations=RoundToNearest(8), scheme=RoundToNearest(8)
    ),
    "scales, then rotations": rg.gauging.Chain((rg.Equalize(), rg.gauging.LearnedRotation(steps=2))),
}


@cache
def prepared(name: str) -> tuple[Case, nn.Module, Params, rg.Symmetry, rg.Task]:
    case = CASES[name]
    torch.manual_seed(0)
    module, params = network(case)
    inputs = {"input_ids": case.inputs[0], **dict(case.kwargs)} if case.kwargs else case.inputs
    task = rg.Task(module, [(inputs, torch.zeros(1))], outputs=case.outputs)
    return case, module, params, discovered(case, module, ()), task


EACH = [("Llama", method) for method in METHODS]
EACH += [("ViT", method) for method in ("equalize", "AWQ", "every Hadamard")]
EACH += [("depthwise", method) for method in ("equalize", "AWQ", "SmoothQuant", "learned by function")]


@pytest.mark.parametrize(("name", "method"), EACH)
def test_the_function_stays_and_the_objective_is_never_worse(name: str, method: str) -> None:
    case, module, params, symmetry, task = prepared(name)
    copies = {key: tensor.clone() for key, tensor in params.items()}
    result = rg.gauge(params, symmetry, method=METHODS[method], task=task, generator=generator(0))
    assert change(case, module, params, result.params) <= case.tolerance
    assert all(torch.equal(params[key], copies[key]) for key in params)
    assert {k: (t.shape, t.dtype) for k, t in result.params.items()} == {
        k: (t.shape, t.dtype) for k, t in params.items()
    }
    assert list(result.history) == sorted(result.history)
    assert result.history[0] == result.initial
    if "every" not in method and "random" not in method:
        assert result.objective >= result.initial
        assert result.objective == result.history[-1]
    assert result.certificate is not None
    assert result.certificate.ok
    moved = apply_moves(result.moves, params)
    assert all(torch.equal(moved[key], result.params[key]) for key in params)
    rotated = {g.name for move in result.moves for g in move.symmetry.groups if g.matrix != "none"}
    if "every" in method and name != "depthwise":
        assert len(rotated) >= 3
        assert any(not torch.equal(result.params[key], params[key]) for key in params)
    # What is not moved is named, with a reason.
    named = {one for one, _ in result.fixed}
    if method in ("every Hadamard", "equalize", "AWQ", "SmoothQuant"):
        shown = {(p.parameter, p.axis) for move in result.moves for g in move.moved_groups() for p in g.placements}
        for group in symmetry.groups:
            assert group.name in named or any((p.parameter, p.axis) in shown for p in group.placements)


def mlp(seed: int) -> tuple[nn.Module, Params, rg.Symmetry]:
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 6), nn.LeakyReLU(), nn.Linear(6, 3)).double()
    params = {key: tensor.detach() for key, tensor in module.state_dict().items()}
    return module, params, rg.discover(module, (torch.randn(4, 5).double(),))


def test_ranges_agree_and_the_end_does_not_depend_on_where_the_network_was() -> None:
    _, params, symmetry = mlp(0)
    result = rg.gauge(params, symmetry, method=rg.Equalize())
    for first, second in (("0", "2"), ("2", "4")):
        incoming = result.params[f"{first}.weight"].abs().amax(1)
        outgoing = result.params[f"{second}.weight"].abs().amax(0)
        assert torch.allclose(incoming, outgoing, rtol=1e-5)
    assert result.objective == pytest.approx(0.0, abs=1e-4)
    scaled = symmetry.act(symmetry.random(generator(1), parts=["scale"]), params)
    again = rg.gauge(scaled, symmetry, method=rg.Equalize())
    assert again.initial < -0.1
    assert all(torch.allclose(result.params[key], again.params[key], rtol=1e-4) for key in params)
    assert all(torch.equal(result.params[k], result.symmetry.act(result.element, params)[k]) for k in params)


def test_depthwise_channels_are_equalized_through_batch_normalization() -> None:
    _, _, params, symmetry, _ = prepared("depthwise")
    spoiled = dict(params)
    spoiled["body.3.weight"] = params["body.3.weight"] * torch.logspace(-2, 2, 8).double().reshape(-1, 1, 1, 1)
    spoiled["body.4.running_var"] = params["body.4.running_var"] * torch.logspace(-4, 4, 8).double()
    result = rg.gauge(spoiled, symmetry, method=rg.Equalize())
    per_tensor = RoundToNearest(8, is_per_tensor=True)
    before = rounding_errors(spoiled, symmetry, per_tensor)
    assert result.objective > result.initial
    ranges = [p["body.3.weight"].abs().amax((1, 2, 3)) for p in (spoiled, result.params)]
    assert float(ranges[1].max() / ranges[1].min()) < 0.1 * float(ranges[0].max() / ranges[0].min())
    assert before["body.3.weight"] > 0


@pytest.mark.parametrize("n", [1, 2, 3, 7, 12, 20, 28, 36, 44, 52, 96, 100])
def test_flat_rotations(n: int) -> None:
    matrix = flat_rotation(n)
    assert torch.allclose(matrix @ matrix.mT, torch.eye(n).double(), atol=1e-12)
    assert float(matrix.abs().max()) <= (2 / n) ** 0.5 + 1e-12
    if n in (1, 2, 12, 20, 28, 36, 44, 96):
        assert torch.allclose(matrix.abs(), torch.full((n, n), n**-0.5).double())
    assert torch.allclose(matrix[:, 0], torch.full((n,), n**-0.5).double())


def test_rotations_by_factors_equal_those_by_the_matrix() -> None:
    """The test covers every size up to 140 and some larger sizes, along each axis, in chunks and as a whole."""
    sizes = [*range(1, 141), 240, 336, 384, 768, 896]
    for n in sizes:
        signs = 1.0 - 2 * torch.randint(0, 2, (n,), generator=generator(n)).double()
        rotation = Kronecker(flat_factors(n), signs)
        assert torch.equal(rotation.matrix, flat_rotation(n) * signs)
        for shape, axis in (((n,), 0), ((3, n), 1), ((n, 5), 0), ((2, n, 3), 1)):
            x = torch.randn(shape, generator=generator(n), dtype=torch.float64)
            dense = (x.movedim(axis, -1) @ rotation.matrix.mT).movedim(-1, axis)
            assert torch.allclose(rotation.times(x, axis), dense, rtol=0, atol=1e-12), (n, shape)
    assert [len(one) for one in flat_factors(2048)] == [8, 16, 16]
    assert [len(one) for one in flat_factors(5120)] == [20, 16, 16]
    x = torch.randn(1100, 256, generator=generator(0), dtype=torch.float64)  # More values than are multiplied at once.
    rotation = Kronecker(flat_factors(256), torch.ones(256, dtype=torch.float64))
    assert torch.allclose(rotation.times(x, 1), x @ rotation.matrix.mT, rtol=0, atol=1e-12)
    assert torch.allclose(rotation.times(x.mT, 0), rotation.matrix @ x.mT, rtol=0, atol=1e-12)


def test_an_element_acts_alike_with_and_without_the_factors_of_its_matrix() -> None:
    _, _, params, symmetry, task = prepared("Llama")
    result = rg.gauge(params, symmetry, method=rg.Hadamard(is_kept_always=True), task=task, generator=generator(0))
    move = result.moves[-1]
    (stream,) = (g.name for g in move.symmetry.groups if move.element[g.name].product is not None)
    assert move.symmetry[stream].kind == "orthogonal"
    dense = move.element.map(torch.clone)
    assert dense[stream].product is None
    assert torch.equal(dense[stream].matrix, move.element[stream].matrix)
    other = replace(move.element[stream], matrix=torch.eye(16).double())
    assert other.product is None
    start = apply_moves(result.moves[:-1], params)
    for name, tensor in move.symmetry.act(dense, start).items():
        assert torch.allclose(result.params[name], tensor, rtol=0, atol=1e-12), name


def test_rotations_spread_an_outlier_of_the_stream() -> None:
    _, _, params, symmetry, task = prepared("Llama")
    spoiled = {key: tensor.clone() for key, tensor in params.items()}
    for key in spoiled:
        if key.endswith(("out.weight", "down.weight")):
            spoiled[key][3] *= 30
        if key.endswith(("query.weight", "gate.weight", "up.weight")):
            spoiled[key][:, 3] *= 30
    result = rg.gauge(spoiled, symmetry, method=rg.Hadamard(), task=task, generator=generator(0))
    assert result.objective > result.initial + 2


def test_channels_with_large_activations_get_larger_weights() -> None:
    """If one channel of the stream is large, the weights that read it have large rounding errors before scaling."""
    _, _, params, symmetry, task = prepared("Llama")
    loud = {key: tensor.clone() for key, tensor in params.items()}
    loud["blocks.0.feed_forward_norm.weight"][5] *= 100
    for key in ("gate", "up"):
        loud[f"blocks.0.feed_forward.{key}.weight"][:, 5] /= 100
    result = rg.gauge(loud, symmetry, method=rg.gauging.Smooth(), task=task)
    assert result.objective > result.initial + 1
    scale = result.params["blocks.0.feed_forward_norm.weight"] / loud["blocks.0.feed_forward_norm.weight"]
    assert scale.argmin() == 5
    assert scale[5] < 0.5 * scale.median()
    # Values of attention are scaled through their invertible matrices, within each head.
    (values,) = (group.name for group in symmetry.groups if group.kind == "linear")
    matrix = result.element[values].matrix
    assert matrix is not None
    assert not torch.allclose(matrix.diagonal(dim1=-2, dim2=-1), torch.ones(()).double())
    with pytest.raises(ValueError, match="Smooth needs the inputs of layers: give a task"):
        rg.gauge(params, symmetry, method=rg.gauging.Smooth())
    with pytest.raises(ValueError, match="alpha is 2, but it is an exponent from 0 to 1"):
        rg.gauging.Smooth(alpha=2)


def test_a_tied_embedding_keeps_its_gain_and_the_report_says_so() -> None:
    case = replace(TRANSFORMERS["transformers GPT-2"], make=hf_gpt2)
    module, params = network(case)
    params["lm_head.weight"] = params["transformer.wte.weight"]
    symmetry = discovered(case, module, ())
    task = rg.Task(module, [({"input_ids": case.inputs[0], "use_cache": False}, torch.zeros(1))], outputs="logits")
    result = rg.gauge(params, symmetry, method=rg.Hadamard(is_kept_always=True), task=task)
    assert change(case, module, params, result.params) <= 1e-9
    assert result.params["lm_head.weight"].equal(result.params["transformer.wte.weight"])
    assert ("transformer.ln_f.weight", "the gain is kept: no scale of the symmetry moves it") in result.fixed
    assert "transformer.ln_f.weight" in str(result)
    # The values of attention rotate all the same.
    assert any(g.matrix == "linear" for g in result.symmetry.groups)


def test_gains_that_are_negative_or_zero() -> None:
    case, module, params, symmetry, task = prepared("Llama")
    (first, *_) = (key for key in params if key.endswith("attention_norm.weight"))
    negative = {**params, first: params[first] * torch.tensor([-1.0, 1.0] * 8).double()}
    method = rg.Hadamard(is_kept_always=True)
    result = rg.gauge(negative, symmetry, method=method, task=task)
    assert change(case, module, negative, result.params) <= case.tolerance
    assert any(g.kind == "orthogonal" for g in result.symmetry.groups)
    zero = {**params, first: params[first] * torch.tensor([0.0, *[1.0] * 15]).double()}
    result = rg.gauge(zero, symmetry, method=method, task=task)
    assert change(case, module, zero, result.params) <= case.tolerance
    assert not any(g.kind == "orthogonal" for g in result.symmetry.groups)
    assert (first, "the gain is kept: it has zeros, which no scale can make one") in result.fixed


def test_half_precision_is_rounded_once_and_reported_apart() -> None:
    _, _, params, symmetry, task = prepared("Llama")
    half = {key: tensor.bfloat16() if tensor.is_floating_point() else tensor for key, tensor in params.items()}
    result = rg.gauge(half, symmetry, method=rg.Hadamard(is_kept_always=True), task=task)
    assert {tensor.dtype for tensor in result.params.values()} == {torch.bfloat16}
    assert result.certificate is not None
    assert result.certificate.ok
    assert result.certificate.dtype == "bfloat16"
    assert result.certificate.stored is not None
    assert 1e-4 < result.certificate.stored < 0.1


def test_a_wrong_move_is_not_certified() -> None:
    case, module, params, symmetry, _ = prepared("ViT")
    move = rg.gauge(params, symmetry, method=rg.Equalize()).moves[0]
    group = next(g for g in symmetry.groups if g.scales and len(g.placements) > 2)
    reader = next(p for p in group.placements if any(p.scale) and (p.parameter, p.axis) in symmetry.readers)
    broken = replace(group, placements=tuple(p for p in group.placements if p != reader))
    groups = tuple(broken if g.name == group.name else g for g in symmetry.groups)
    wrong = replace(move, symmetry=replace(symmetry, groups=groups))
    certificate = certify(params, [wrong], module, case.inputs)
    assert not certificate.ok
    assert "NOT the same function" in str(certificate)


def test_what_is_refused_says_why() -> None:
    _, params, symmetry = mlp(0)
    with pytest.raises(ValueError, match="RandomRotation draws rotations: give a generator"):
        rg.gauge(params, symmetry, method=rg.gauging.RandomRotation())
    with pytest.raises(ValueError, match="has a leading model axis"):
        rg.gauge({key: torch.stack([tensor, tensor]) for key, tensor in params.items()}, symmetry)
    with pytest.raises(ValueError, match="holds NaN or Inf in 1 of"):
        rg.gauge({**params, "0.bias": params["0.bias"] * torch.tensor([torch.nan, *[1] * 6])}, symmetry)
    for make in (lambda: RoundToNearest(1), lambda: RoundToNearest(4, 0), lambda: rg.gauging.Chain(())):
        with pytest.raises(ValueError, match=r"bits is 1|group is 0|a chain without methods"):
            make()


@pytest.mark.parametrize("shape", [(6, 10), (4, 3, 2, 2)])
@pytest.mark.parametrize("group", [None, 4])
def test_rounding_is_to_the_nearest_level(shape: tuple[int, ...], group: int | None) -> None:
    tensor = torch.randn(shape, generator=generator(0), dtype=torch.float64)
    scheme = RoundToNearest(3, group)
    rounded = scheme(tensor)
    flat, other = tensor.flatten(1), rounded.flatten(1)
    for k in range(shape[0]):
        for start in range(0, flat.shape[1], group or flat.shape[1]):
            part, near = (t[k, start : start + (group or flat.shape[1])] for t in (flat, other))
            levels = torch.arange(-3, 4) * part.abs().max() / 3
            expected = levels[(part.unsqueeze(1) - levels).abs().argmin(1)]
            assert torch.allclose(near, expected, atol=1e-12)
    assert torch.allclose(scheme(rounded), rounded)
    whole = RoundToNearest(3, is_per_tensor=True)(tensor)
    assert len(whole.unique()) <= 7


def test_rows_are_all_that_makes_one_output() -> None:
    case = TRANSFORMERS["transformers GPT-2"]
    module, params = network(case)
    symmetry = discovered(case, module, ())
    rows = layer_rows(symmetry)
    assert rows["transformer.h.0.mlp.c_fc.weight"] == (1,)  # These layers hold their weights as [in, out].
    assert rows["lm_head.weight"] == (0,)
    assert not {"transformer.wte.weight", "transformer.wpe.weight", "transformer.ln_f.weight"} & rows.keys()
    rounded = round_network(params, symmetry, RoundToNearest(4))
    assert len(rounded["transformer.h.0.mlp.c_fc.weight"][:, 0].unique()) <= 15
    assert rounded["transformer.wte.weight"] is params["transformer.wte.weight"]


def test_layers_read_rounded_activations_within_the_context() -> None:
    layer, x = nn.Linear(4, 3, bias=False).double(), torch.randn(2, 4, generator=generator(0)).double()
    scheme = RoundToNearest(4)
    with torch.no_grad(), rounded_activations(scheme):
        found = layer(x)
    assert torch.equal(found, layer(scheme(x)))
    assert not torch.equal(found, layer(x))


def test_what_is_learned_by_function_serves_batches_that_were_not_seen() -> None:
    """The numbers of batches and bits are so large that the last digits of a processor do not change the result."""
    _, module, params, symmetry, _ = prepared("ViT")
    params = {key: tensor.float() for key, tensor in params.items()}
    images = torch.randn(28, 8, *CASES["ViT"].inputs[0].shape[1:], generator=generator(3))
    batches, scheme = [(one, torch.zeros(8)) for one in images], RoundToNearest(4)
    task, unseen = rg.Task(module, batches[:24]), batches[24:]
    method = rg.gauging.LearnedRotation(scheme, steps=45, lr=0.03, by="function")
    result = rg.gauge(params, symmetry, method=method, task=task, generator=generator(0))
    assert result.unit == "nats"
    assert result.objective > 0.7 * result.initial
    # Scales are moved as well, behind the rotations, and matrices of linear groups beyond their rotations.
    assert [move.symmetry for move in result.moves][-1] == symmetry
    assert any(group.scales for group in result.moves[-1].moved_groups())
    linear = [(m, g) for m in result.moves for g in m.moved_groups() if g.kind == "linear"]
    squares = [m.element[g.name].matrix for m, g in linear]
    assert any(
        not torch.allclose(one @ one.mT, torch.eye(one.shape[-1]).double()) for one in squares if one is not None
    )
    apart = [
        float((task.run(round_network(one, symmetry, scheme), x) - task.run(params, x)).double().square().sum())
        for one in (params, result.params)
        for x, _ in unseen
    ]
    assert sum(apart[4:]) < 0.7 * sum(apart[:4])


def test_rounding_passes_gradients_through_levels_and_ranges() -> None:
    scheme, weights = RoundToNearest(3), torch.tensor([[0.5, -0.7, 3.0], [0.0, 0.0, 0.0]], requires_grad=True)
    rounded = scheme.straight_through(weights, (0,))
    assert torch.equal(rounded, scheme(weights))
    (found,) = torch.autograd.grad(rounded[0, 0] + 2 * rounded[0, 1], weights)
    # With the range r = 3 and steps r / 3, 0.5 rounds to 0 and -0.7 to -1: d/dr is (0 - 0.5 + 2 (-1 + 0.7)) / 3.
    assert torch.allclose(found, torch.tensor([[1.0, 2.0, -1.1 / 3], [0.0, 0.0, 0.0]]))


def test_the_expected_error_is_that_of_many_levels() -> None:
    tensor, weights = (torch.rand(6, 40, 50, generator=generator(k), dtype=torch.float64) + 0.1 for k in range(2))
    for scheme, rows in ((RoundToNearest(8), (0,)), (RoundToNearest(8, 30), (0, 1)), (RoundToNearest(8, 64), (0,))):
        found = weights * (scheme(tensor, rows) - tensor).square()
        expected = scheme.expected_error(tensor, rows, weights)
        assert expected == pytest.approx(float(found.sum()), rel=0.05)
        assert scheme.expected_error(2 * tensor, rows) > 3.9 * scheme.expected_error(tensor, rows)


@cache
def away(name: str) -> tuple[OrbitPart, Point, OfFunction]:
    """Return a point of the orbit where every free parameter is nonzero, with its reach, and the distance of the
    outputs.
    """
    _, _, params, symmetry, task = prepared(name)
    problem = GaugeProblem(params, symmetry, task)
    reach = OrbitPart(problem, is_scaled=True)
    tangents, chance = reach.tangents(reach.as_it_is), generator(5)
    with torch.no_grad():
        for raw in (*tangents.turns, *tangents.stretches):
            raw += 0.2 * torch.randn(raw.shape, generator=chance, dtype=raw.dtype)
        return reach, tangents.point(), OfFunction(params, RoundToNearest(4), task)


@pytest.mark.parametrize("name", [*CASES])
def test_gradients_move_along_with_the_network(name: str) -> None:
    reach, point, _ = away(name)
    task, layers, found = prepared(name)[4], reach.layers, []
    noise = torch.randn(task.run(reach.params(point), task.batches[0][0]).shape, generator=generator(6))
    for params in (reach.start, reach.params(point)):
        leaves = {key: params[key].clone().requires_grad_() for key in layers}
        made = task.run({**params, **leaves}, task.batches[0][0])
        found.append(dict(zip(layers, torch.autograd.grad((made * noise).sum(), [*leaves.values()]), strict=True)))
    moved = reach.gradients(point, found[0])
    several = reach.gradients(point, {key: torch.stack([one, 2 * one]) for key, one in found[0].items()})
    for key in layers:
        scale = float(found[1][key].abs().max())
        assert torch.allclose(moved[key], found[1][key], rtol=0, atol=1e-4 * scale), key
        assert torch.allclose(several[key][1], 2 * moved[key], rtol=0, atol=1e-4 * scale), key


@pytest.mark.parametrize("name", ["ViT", "Llama"])
def test_the_expected_distance_is_that_of_random_errors(name: str) -> None:
    """The test uses another point of the orbit than the evaluated network, with errors that are uniform within each
    step.
    """
    reach, point, function = away(name)
    _, _, params, symmetry, task = prepared(name)
    chance = generator(8)

    class Shaken(RoundToNearest):
        def __call__(self, tensor: Tensor, rows: tuple[int, ...] = (0,)) -> Tensor:
            ranges = tensor.abs().amax([axis for axis in range(tensor.ndim) if axis not in rows], keepdim=True)
            return tensor + (torch.rand(tensor.shape, generator=chance) - 0.5) * ranges / self.levels

    expected = Expected(function, reach, RoundToNearest(6), generator(7)).descend(reach, point).exp()
    shaken, moved = OfFunction(params, Shaken(6), task), reach.params(point)
    found = [-shaken.score(moved, symmetry) for _ in range(200)]
    assert float(expected) == pytest.approx(sum(found) / len(found), rel=0.25)


def test_steps_of_weights_that_outputs_depend_on_get_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The descent on the expected distance alone has this effect: the rates of the following descents are almost
    zero.
    """
    monkeypatch.setattr(learned_rotation, "RATES", (1e-9,))
    _, module, params, symmetry, _ = prepared("ViT")
    images = torch.randn(12, 8, *CASES["ViT"].inputs[0].shape[1:], generator=generator(3))
    task = rg.Task(module, [(one, torch.zeros(8)) for one in images])
    method = rg.gauging.LearnedRotation(RoundToNearest(4), steps=30, lr=0.03, by="function")
    result = rg.gauge(params, symmetry, method=method, task=task, generator=generator(0))
    assert result.objective > 0.6 * result.initial


def test_running_statistics_have_gradients_where_networks_are_learned_by_function() -> None:
    case, module, params, _, _ = prepared("depthwise")
    floats = {key: tensor.float() for key, tensor in params.items()}
    inputs, found = case.inputs[0].float(), []
    for h in (-1e-2, 1e-2):
        shifted = {**floats, "body.1.running_var": floats["body.1.running_var"] + h}
        found.append(torch.func.functional_call(module, shifted, (inputs,)).square().sum())
    statistics = {key: floats[key].clone().requires_grad_() for key in ("body.1.running_var", "body.1.running_mean")}
    with DifferentiableStatistics():
        made = torch.func.functional_call(module, {**floats, **statistics}, (inputs,))
    assert torch.allclose(made, torch.func.functional_call(module, floats, (inputs,)), atol=1e-5)
    variances, means = torch.autograd.grad(made.square().sum(), [*statistics.values()])
    assert float(variances.sum()) == pytest.approx(float(found[1] - found[0]) / 2e-2, rel=1e-2)
    assert means.abs().max() > 0


def test_scales_of_a_network_without_rotations_are_learned_by_function() -> None:
    module, params, symmetry = mlp(0)
    params = symmetry.act(symmetry.random(generator(1), parts=["scale"]), params)
    batches = [(torch.randn(16, 5, generator=generator(k)).double(), torch.zeros(16, 3).double()) for k in range(4)]
    task = rg.Task(module, batches, criterion=nn.functional.mse_loss)
    with pytest.raises(ValueError, match="LearnedRotation needs the inputs of layers: give a task"):
        rg.gauge(params, symmetry, method=rg.gauging.LearnedRotation(by="function"))
    method = rg.gauging.LearnedRotation(steps=40, lr=0.05, by="function")
    result, again = (rg.gauge(params, symmetry, method=method, task=task) for _ in range(2))
    assert all(torch.equal(result.params[key], again.params[key]) for key in params)
    assert result.unit == "relative squared error"
    assert result.objective > 0.5 * result.initial
    assert result.certificate is not None
    assert result.certificate.exact <= 1e-9
    assert "there is nothing to rotate" in rg.gauge(params, symmetry, method=rg.gauging.LearnedRotation()).notes
    with pytest.raises(ValueError, match="the task has no batches"):
        rg.gauge(params, symmetry, method=rg.gauging.LearnedRotation(by="function"), task=rg.Task(module, []))

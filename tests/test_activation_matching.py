"""Activation matching recovers hidden elements, for every kind of group, in one pass over any batches."""

from typing import Any

import pytest
import torch
from coverings import every_other
from models import CASES, symmetry_of
from scipy.optimize import linear_sum_assignment
from symmetries import permutations_only
from torch import Tensor, nn

import regauge as rg
from regauge.alignment.activations import costs as costs_module
from regauge.alignment.activations.costs import (
    ActivationCosts,
    CrossMoments,
    Statistic,
    Traces,
    activation_costs,
    precision_of,
)
from regauge.core.probe import perturb
from regauge.discovery import activations

PLANTED = (
    *("mlp_relu", "mlp_tanh", "mlp_sine", "mlp_linear", "cnn_flatten", "glu", "lstm", "concatenation", "skip_nerf"),
    *("tied_autoencoder", "called_twice", "shuffle_unit", "grouped_conv", "squeeze_excite", "torch_transformer"),
    *("densenet", "hf_gpt2", "hf_llama"),
)
BY_NAME = {case.name: case for case in CASES}
PUBLISHED = rg.ActivationMatching(statistic="product", scales="keep")


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def again(value: Any, seed: int) -> Any:
    """Return another input of the same kind."""
    if not isinstance(value, Tensor):
        return value
    if value.is_floating_point():
        return torch.randn(value.shape, generator=generator(seed), dtype=torch.float64)
    return torch.randint(3, 17, value.shape, generator=generator(seed))


def problem(name: str, batches: int = 5) -> tuple[rg.Task, rg.Symmetry, rg.Params]:
    case = BY_NAME[name]
    torch.manual_seed(0)
    module = case.module().double().eval()
    inputs = tuple(double(x) for x in case.inputs())
    kwargs = {key: double(x) for key, x in case.kwargs().items()}
    symmetry = symmetry_of(case)
    state = {key: t.detach() for key, t in module.state_dict().items()}
    params = perturb(state, set(symmetry.buffers), generator(1))
    data: list[Any] = []
    for seed in range(batches):
        here = tuple(again(x, seed) for x in inputs)
        data.append(({"input_ids": here[0], **kwargs} if kwargs else here, torch.zeros(2)))
    return rg.Task(module, data, lambda out, _: out.square().mean()), symmetry, params


def mlp(seed: int, width: int = 9) -> tuple[rg.Task, rg.Symmetry, rg.Params, rg.Params]:
    """Return two unrelated networks on ten batches."""
    module = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    x = torch.randn(40, 4, generator=generator(seed), dtype=torch.float64)
    symmetry = rg.discover(module, (x[:4],), verify=False)
    state = {key: t.detach() for key, t in module.state_dict().items()}
    a, b = (
        {k: torch.randn(t.shape, generator=generator(seed + s), dtype=t.dtype) for k, t in state.items()}
        for s in (10, 20)
    )
    return rg.Task(module, [(part, torch.zeros(4)) for part in x.split(4)]), symmetry, a, b


@pytest.mark.parametrize("name", every_other(PLANTED, part=1, among=BY_NAME))
def test_a_planted_element_is_found(name: str) -> None:
    task, symmetry, a = problem(name)
    planted = symmetry.random(generator(2), ("permutation", "sign", "shift"))
    b = symmetry.act(planted, a)
    for method in (rg.ActivationMatching(), rg.alignment.MixedMatching()):
        result = rg.align(a, b, symmetry, method=method, task=task)
        assert result.is_converged
        for key, tensor in a.items():
            if tensor.is_floating_point():
                assert torch.allclose(result.params[key], tensor, atol=1e-6), key


def test_a_planted_rotation_is_found() -> None:
    module = nn.Sequential(nn.Linear(9, 6), nn.Linear(6, 5), nn.Linear(5, 3)).double()
    x = torch.randn(40, 9, generator=generator(0), dtype=torch.float64)
    symmetry, task = rg.discover(module, (x,), verify=False), rg.Task(module, [(x, None)])
    a = {key: t.detach() for key, t in module.state_dict().items()}
    rotations = rg.Symmetry(
        tuple(rg.Group(g.name, g.size, g.placements, is_permuted=False, matrix="orthogonal") for g in symmetry.groups),
        symmetry.shapes,
    )
    b = rotations.act(rotations.random(generator(3)), a)
    result = rg.align(a, b, rotations, method=rg.ActivationMatching(), task=task)
    assert all(torch.allclose(result.params[key], a[key], atol=1e-6) for key in a)


def test_correlations_do_not_see_scales() -> None:
    task, symmetry, a, b = mlp(1)
    only = rg.Symmetry(symmetry.groups, symmetry.shapes)
    stretched = only.act(only.random(generator(5), ("scale",)), b)
    x, y = (rg.align(a, start, symmetry, method=rg.ActivationMatching(), task=task) for start in (b, stretched))
    assert all(torch.equal(x.element[g.name].perm, y.element[g.name].perm) for g in symmetry.groups)  # type: ignore[arg-type]


def costs(
    task: rg.Task, symmetry: rg.Symmetry, a: rg.Params, b: rg.Params, statistic: Statistic = "correlation"
) -> ActivationCosts:
    return activation_costs(a, b, Traces(symmetry, task.module, precision_of(a, b)), task, statistic)


def test_products_are_those_of_the_activations_without_centering() -> None:
    task, symmetry, a, b = mlp(0)
    x = torch.cat([inputs for inputs, _ in task.batches])

    def activations_of(params: rg.Params) -> list[Tensor]:
        relu = (x @ params["0.weight"].T + params["0.bias"]).relu()
        return [relu, (relu @ params["2.weight"].T + params["2.bias"]).tanh()]

    firsts, seconds = activations_of(a), activations_of(b)
    found = costs(task, symmetry, a, b, "product")
    expected = [left.T @ right / len(x) for left, right in zip(firsts, seconds, strict=True)]
    assert len(found.a) == len(expected)
    for matrix in expected:
        assert any(t.shape == matrix.shape and torch.allclose(t, matrix, atol=1e-12) for t in found.a.values())
    centered = costs(task, symmetry, a, b, "covariance")
    assert not any(torch.allclose(found.a[name], centered.a[name], atol=1e-3) for name in found.a)
    # The assignment for each layer is the permutation with the least squared distance between activations.
    only = permutations_only(symmetry)
    element = rg.align(a, b, only, method=PUBLISHED, task=task).element
    for group in only.groups:
        left, right = next(pair for pair in zip(firsts, seconds, strict=True) if pair[0].shape[1] == group.size)
        _, columns = linear_sum_assignment(-(left.T @ right).numpy())
        assert element[group.name].perm.tolist() == columns.tolist()  # type: ignore[union-attr]


def test_how_the_data_are_cut_into_batches_and_their_order_do_not_matter() -> None:
    task, symmetry, a, b = mlp(0)
    data = [x for x, _ in task.batches]
    whole = costs(rg.Task(task.module, [(torch.cat(data), None)]), symmetry, a, b)
    uneven = [torch.cat(data)[:7], torch.cat(data)[7:8], torch.cat(data)[8:]]
    for parts in (data, data[::-1], uneven):
        streamed = costs(rg.Task(task.module, [(part, None) for part in parts]), symmetry, a, b)
        assert streamed.reach == pytest.approx(whole.reach)
        assert all(torch.allclose(streamed.a[key], whole.a[key], atol=1e-12) for key in whole.a)


def test_correlations_are_those_of_numpy() -> None:
    x, y = (torch.randn(5, 300, generator=generator(s), dtype=torch.float64) * 3 + 100 for s in (0, 1))
    moments = CrossMoments()
    for k in range(0, 300, 70):
        moments.update(x[:, k : k + 70], y[:, k : k + 70])
    expected = torch.corrcoef(torch.cat([x, y]))[:5, 5:]
    assert torch.allclose(moments.correlation(torch.arange(5))[0], expected, atol=1e-12)
    expected = torch.cov(torch.cat([x, y]), correction=0)[:5, 5:]
    assert torch.allclose(moments.covariance()[0], expected, atol=1e-12)


def test_a_large_mean_does_not_cost_precision_in_float32() -> None:
    x, y = (torch.randn(4, 4000, generator=generator(s)) + 50 for s in (0, 1))
    moments = CrossMoments()
    for k in range(0, 4000, 1000):
        moments.update(x[:, k : k + 1000], y[:, k : k + 1000])
    expected = torch.corrcoef(torch.cat([x, y]).double())[:4, 4:]
    assert torch.allclose(moments.correlation(torch.arange(4))[0], expected, atol=1e-5)


def test_dead_units_say_nothing_and_the_weights_decide_about_them() -> None:
    task, symmetry, a, _ = mlp(0)
    a["0.bias"][:3] = -1e3
    b = symmetry.act(symmetry.random(generator(6), ("permutation", "sign")), a)
    assert all(bool(t.isfinite().all()) for t in costs(task, symmetry, a, b).a.values())
    result = rg.align(a, b, symmetry, method=rg.ActivationMatching(), task=task)
    assert all(torch.allclose(result.params[key], a[key]) for key in a)


def test_values_on_which_a_group_acts_alike_share_one_tensor() -> None:
    task, symmetry, a = problem("called_twice", 1)
    found = costs(task, symmetry, a, a)
    assert len(found.a) == 1
    (matrix,) = found.a.values()
    assert matrix.diagonal().max() == pytest.approx(3)  # The layer's units show in three values.


def test_other_precisions_are_matched_alike() -> None:
    task, symmetry, a, b = mlp(2)
    single = rg.Task(task.module.float(), [(x.float(), y) for x, y in task.batches])
    results = []
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        x, y = ({key: t.to(torch.bfloat16).to(dtype) for key, t in p.items()} for p in (a, b))
        results.append(rg.align(x, y, symmetry, method=rg.ActivationMatching(), task=single))
    for other in results[1:]:
        for group in symmetry.groups:
            assert torch.equal(results[0].element[group.name].perm, other.element[group.name].perm)  # type: ignore[arg-type]


def test_what_cannot_be_matched_is_explained() -> None:
    task, symmetry, a, b = mlp(0)
    method = rg.ActivationMatching()
    with pytest.raises(ValueError, match="ActivationMatching needs data"):
        rg.align(a, b, symmetry, method=method)
    with pytest.raises(ValueError, match="MixedMatching needs data"):
        rg.align(a, b, symmetry, method=rg.alignment.MixedMatching())
    with pytest.raises(ValueError, match="no batches"):
        rg.align(a, b, symmetry, method=method, task=rg.Task(task.module, []))
    with pytest.raises(ValueError, match="fails on the example inputs"):
        rg.align(a, b, symmetry, method=method, task=rg.Task(task.module, [(torch.zeros(4, 3), None)]))
    hot = rg.Task(task.module, [(torch.full((4, 4), float("nan"), dtype=torch.float64), None)])
    with pytest.raises(ValueError, match=r"activation %relu .* of the first network is NaN or Inf"):
        rg.align(a, b, symmetry, method=method, task=hot)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: rg.alignment.MixedMatching(share=1.0), "share is 1.0"),
        (lambda: rg.alignment.MixedMatching(share=0.0), "share is 0.0"),
        (lambda: rg.ActivationMatching(statistic="cosine"), "choose 'correlation', 'covariance' or 'product'"),  # type: ignore[arg-type]
        (lambda: rg.ActivationMatching(max_sweeps=0), "at least one sweep"),
    ],
)
def test_settings_that_make_no_sense_are_refused(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def test_scales_are_balanced_or_kept() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    inputs = torch.randn(64, 4, dtype=torch.float64)
    symmetry = rg.discover(module, (inputs,), verify=False)
    a = {name: tensor.detach() for name, tensor in module.state_dict().items()}
    b = symmetry.act(symmetry.random(torch.Generator().manual_seed(1), parts=("permutation", "scale")), a)
    task = rg.Task(module, [(inputs, torch.zeros(64, dtype=torch.int64))])
    for method in (rg.alignment.MixedMatching(), rg.ActivationMatching()):
        moved = rg.align(a, b, symmetry, method=method, task=task).params
        assert all(torch.allclose(moved[name], a[name]) for name in a)
    kept = rg.align(a, b, symmetry, method=rg.alignment.MixedMatching(scales="keep"), task=task)
    assert torch.equal(kept.params["0.bias"].sort().values, b["0.bias"].sort().values)
    with pytest.raises(ValueError, match="choose 'balance', 'recompute' or 'keep'"):
        rg.alignment.MixedMatching(scales="match")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "method", [rg.ActivationMatching(), rg.alignment.MixedMatching()], ids=["activations", "mixed"]
)
def test_many_pairs_share_the_traces_of_the_module(
    method: rg.ActivationMatching | rg.alignment.MixedMatching, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    batches = [(torch.randn(n, 4, dtype=torch.float64), torch.zeros(n, dtype=torch.int64)) for n in (16, 16, 5)]
    task = rg.Task(module, batches)
    symmetry = rg.discover(module, (batches[0][0],), verify=False)
    start = {name: tensor.detach() for name, tensor in module.state_dict().items()}
    a, b = ({name: torch.stack([torch.randn_like(t) for _ in range(3)]) for name, t in start.items()} for _ in range(2))
    singles = [
        rg.align({n: t[k] for n, t in a.items()}, {n: t[k] for n, t in b.items()}, symmetry, method=method, task=task)
        for k in range(3)
    ]
    traced = 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal traced
        traced += 1
        return activations(*args, **kwargs)

    monkeypatch.setattr(costs_module, "activations", counted)
    many = rg.alignment.align_pairs(a, b, symmetry, method=method, task=task)
    assert traced == 2  # one for each shape of a batch
    for k, single in enumerate(singles):
        assert float(many.objective[k]) == single.objective
        assert all(torch.equal(many.params[name][k], single.params[name]) for name in single.params)

"""The default gauge never causes a larger rounding error than the unchanged network, measured by loss and by
weights.
"""

import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn
from transformer_cases import CASES as TRANSFORMERS
from transformer_cases import generator, network

import regauge as rg
from regauge.checkpoints.checkpoint import load
from regauge.checkpoints.writing import save
from regauge.cli.main import main
from regauge.core.params import Params
from regauge.gauging import GaugeMethod, Move, RoundToNearest, round_network
from regauge.gauging.gauge_method import GaugeProblem
from regauge.gauging.methods import best_gauge
from regauge.gauging.result import Chosen
from regauge.gauging.rounding import REPORTED, mean_error, rounding_errors

SCHEMES = (RoundToNearest(4), RoundToNearest(3, 4))


def cnn() -> nn.Module:
    """Return a convolutional network with batch normalization."""
    layers: list[nn.Module] = []
    for inner, outer in ((3, 8), (8, 6)):
        layers += [nn.Conv2d(inner, outer, 3, padding=1), nn.BatchNorm2d(outer), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4))


@cache
def prepared(name: str) -> tuple[Params, rg.Symmetry, rg.Task]:
    """Return a network in float64 with unbalanced scales, and a task whose targets are mostly the network's own
    answers.
    """
    torch.manual_seed(0)
    if name == "Llama":
        module, params = network(TRANSFORMERS["Llama"])
        batches = [torch.randint(0, 16, (8, 6), generator=generator(k)) for k in range(4)]
    elif name == "CNN":
        module, batches = cnn(), [torch.randn(16, 3, 5, 5, generator=generator(k)) for k in range(4)]
    else:
        module = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 6), nn.LeakyReLU(), nn.Linear(6, 3))
        batches = [torch.randn(32, 5, generator=generator(k)) for k in range(4)]
    module = module.double().eval()
    params = {key: tensor.detach().clone() for key, tensor in module.state_dict().items()}
    inputs = [one.double() if one.is_floating_point() else one for one in batches]
    symmetry = rg.discover(module, (inputs[0],), verify=False)
    params = symmetry.act(symmetry.random(generator(9), parts=["scale"]), params)
    blank = rg.Task(module, [(one, None) for one in inputs])
    answers = [blank.run(params, one).argmax(-1) for one in inputs]
    return params, symmetry, rg.Task(module, [*zip(inputs, answers, strict=True)])


def at(params: Params, task: rg.Task, dtype: torch.dtype) -> tuple[Params, rg.Task]:
    """Return a network and its task in some precision."""
    cast = {key: tensor.to(dtype) if tensor.is_floating_point() else tensor for key, tensor in params.items()}
    batches = [(x.to(dtype) if x.is_floating_point() else x, y) for x, y in task.batches]
    return cast, replace(task, module=task.module.to(dtype), batches=batches)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["MLP", "CNN", "Llama"])
def test_the_loss_after_rounding_is_never_higher(name: str, dtype: torch.dtype, scheme: RoundToNearest) -> None:
    given, symmetry, whole = prepared(name)
    params, task = at(given, whole, dtype)
    method = rg.gauging.BestGauge(scheme, steps=6)
    result = rg.gauge(params, symmetry, method=method, task=task, test=task, generator=generator(0))
    found = [task.evaluate(round_network(one, symmetry, scheme))["loss"] for one in (params, result.params)]
    trials = result.trials
    assert trials is not None
    assert trials.values["as it is"] == found[0]
    assert trials.values[trials.kept] == found[1] == min(trials.values.values())
    assert found[1] <= found[0]
    assert trials.whole == task.evaluate(params)["loss"]
    first = ["translations taken out"] if symmetry.translations else []
    assert [*trials.values] == ["as it is", *first, "equalized", "Hadamard", "learned", "learned by function"]
    assert (result.initial, result.objective) == (-found[0], -found[1])
    assert result.certificate is not None
    assert result.certificate.ok


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["MLP", "CNN", "Llama"])
def test_without_data_the_rounding_error_is_never_larger(name: str, dtype: torch.dtype, scheme: RoundToNearest) -> None:
    given, symmetry, whole = prepared(name)
    params, task = at(given, whole, dtype)
    for one, by in ((None, None), (task, "weights")):
        method = rg.gauging.BestGauge(scheme, by=by, steps=6)  # type: ignore[arg-type]
        result = rg.gauge(params, symmetry, method=method, task=one, generator=generator(0))
        for rounding in (scheme, *REPORTED):
            errors = [mean_error(network, symmetry, rounding) for network in (params, result.params)]
            assert errors[1] <= errors[0]
        trials = result.trials
        assert trials is not None
        assert trials.values[trials.kept] == mean_error(result.params, symmetry, scheme)
        assert "loss" not in str(trials)
        assert "learned by function" not in trials.values


def test_the_default_is_the_best_and_its_numbers_stand_in_one_line() -> None:
    params, symmetry, task = prepared("MLP")
    result, same = (
        rg.gauge(params, symmetry, **options, task=task, generator=generator(0))  # type: ignore[arg-type]
        for options in ({}, {"method": rg.gauging.BestGauge()})
    )
    assert all(torch.equal(result.params[key], same.params[key]) for key in params)
    first = str(result).splitlines()[0]
    assert first == str(result.trials)
    assert first.startswith("loss with weights rounded to 4 bits per row: ")
    assert all(f" {name}" in first for name in ("as it is", "equalized", "learned by function (", "before rounding"))
    errors = rounding_errors(params, symmetry, RoundToNearest(4))
    assert mean_error(params, symmetry, RoundToNearest(4)) == pytest.approx(sum(errors.values()) / len(errors))


@dataclass(frozen=True)
class Spread(GaugeMethod):
    """A method that scales units randomly by many octaves, which increases rounding errors, and claims an
    improvement.
    """

    label = "spread"

    def choose(self, problem: GaugeProblem) -> Chosen:
        """Return factors of all units."""
        element = problem.symmetry.random(generator(4), parts=["scale"])
        for _ in range(3):
            element = problem.symmetry.compose(element, element)
        return Chosen((Move(problem.symmetry, element),), 2.0, 1.0, (1.0, 2.0), "dB")


@pytest.mark.parametrize("has_task", [True, False])
def test_what_is_worse_is_kept_only_where_it_is_asked_for(has_task: bool) -> None:
    params, symmetry, whole = prepared("MLP")
    params = rg.gauge(params, symmetry, method=rg.Equalize()).params
    task = whole if has_task else None
    result = rg.gauge(params, symmetry, method=rg.gauging.BestGauge(methods=(Spread(),)), task=task)
    trials = result.trials
    assert trials is not None
    if has_task:
        assert trials.values["spread"] > trials.values["as it is"]
    assert trials.kept == "as it is"
    assert all(torch.equal(result.params[key], params[key]) for key in params)
    assert "the network was not changed" in str(result)
    kept = rg.gauge(params, symmetry, method=rg.gauging.BestGauge(methods=(Spread(),), is_kept_always=True), task=task)
    assert kept.trials is not None
    assert kept.trials.kept == "spread"
    assert not torch.equal(kept.params["0.weight"], params["0.weight"])


def test_data_that_judge_choose_nothing() -> None:
    params, symmetry, task = prepared("MLP")
    first, last = (replace(task, batches=part) for part in (task.batches[:2], task.batches[2:]))  # type: ignore[index]
    method = rg.gauging.BestGauge(RoundToNearest(3), steps=4)
    result, alone = (
        rg.gauge(params, symmetry, method=method, task=first, test=test, generator=generator(0))
        for test in (last, first)
    )
    assert all(torch.equal(result.params[key], alone.params[key]) for key in params)
    assert result.trials is not None
    found = last.evaluate(round_network(result.params, symmetry, RoundToNearest(3)))["loss"]
    assert result.trials.judged[result.trials.kept] == found
    assert "on data that were not used for this choice" in str(result.trials)
    halves = task.split()
    by_default, split = (
        rg.gauge(params, symmetry, method=method, task=choosing, test=judging, generator=generator(0)).trials
        for choosing, judging in ((task, None), halves)
    )
    assert by_default == split


def test_networks_in_half_precision_are_compared_as_they_are_written() -> None:
    given, symmetry, whole = prepared("MLP")
    params, _ = at(given, whole, torch.bfloat16)
    _, task = at(given, whole, torch.float32)
    result = rg.gauge(
        params, symmetry, method=rg.gauging.BestGauge(steps=4), task=task, test=task, generator=generator(0)
    )
    assert result.trials is not None
    wide = [{key: tensor.float() for key, tensor in one.items()} for one in (params, result.params)]
    found = [task.evaluate(round_network(one, symmetry, RoundToNearest(4)))["loss"] for one in wide]
    assert [result.trials.values[name] for name in ("as it is", result.trials.kept)] == found


def test_large_networks_are_not_learned_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    params, symmetry, _ = prepared("MLP")
    monkeypatch.setattr(best_gauge, "MOST_LEARNED", 10)
    result = rg.gauge(params, symmetry)
    assert result.trials is not None
    assert [*result.trials.values] == ["as it is", "equalized", "Hadamard"]
    assert "rotations were not learned, because layers have 95 values" in str(result)


def test_what_is_refused_says_why() -> None:
    params, symmetry, _ = prepared("MLP")
    with pytest.raises(ValueError, match="there is no method to choose from"):
        rg.gauging.BestGauge(methods=())
    with pytest.raises(ValueError, match="BestGauge needs the inputs of layers: give a task"):
        rg.gauge(params, symmetry, method=rg.gauging.BestGauge(by="loss"))


@pytest.mark.usefixtures("unsaved")
@pytest.mark.parametrize("options", [(), ("--bits", "3", "--group", "4"), ("--method", "equalize")], ids=str)
@pytest.mark.parametrize("has_data", [True, False])
def test_the_command_and_the_function_give_the_same(
    options: tuple[str, ...],
    has_data: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("nets.py").write_text(
        "import torch\nfrom torch import nn\n\n\ndef net():\n    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), "
        "nn.Linear(7, 6), nn.LeakyReLU(), nn.Linear(6, 3)), torch.ones(2, 5)\n"
    )
    given, symmetry, whole = prepared("MLP")
    params, task = at(given, whole, torch.float32)
    save(params, "in.safetensors")
    inputs, targets = (torch.cat(parts) for parts in zip(*task.batches, strict=True))
    save({"inputs": inputs, "targets": targets}, "data.safetensors")
    data = ["--data", "data.safetensors", "--batch", "32"] if has_data else []
    arguments = ["gauge", "in.safetensors", "-o", "out.safetensors", "--model", "nets.py:net", "--steps", "10"]
    main([*arguments, *options, *data, "--json"])
    told = json.loads(capsys.readouterr().out)
    scheme = RoundToNearest(3, 4) if "--bits" in options else RoundToNearest()
    method = rg.gauging.BestGauge(scheme, (rg.Equalize(),) if "equalize" in options else None, steps=10)
    result = rg.gauge(params, symmetry, method=method, task=task if has_data else None, generator=generator(0))
    assert result.trials is not None
    assert told["trials"]["values"] == dict(result.trials.values)
    assert told["trials"]["kept"] == result.trials.kept
    written = load("out.safetensors")
    assert all(torch.equal(written[key], result.params[key]) for key in params)

"""The change of a fine-tune transferred to another base: copies get it exactly, and no argument changes."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transport_cases import CASES, Networks, labels, mlp

import regauge as rg
from regauge.checkpoints.outputs.provenance import read_provenance
from regauge.merging import activation_maps, transport_change


def largest(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> float:
    return max(float((t.double() - second[n].double()).abs().max()) for n, t in first.items())


@pytest.mark.parametrize("name", CASES)
def test_a_copy_in_another_gauge_gets_exactly_the_fine_tune(name: str) -> None:
    nets = Networks(name)
    kept = [{n: t.clone() for n, t in one.items()} for one in (nets.base, nets.tuned, nets.copy)]
    own = {n: t.clone() for n, t in nets.module.state_dict().items()}
    for mode, way in nets.ways().items():
        made = rg.transport(nets.base, nets.tuned, nets.copy, nets.symmetry, **way)
        assert made.mode == mode
        assert made.element is not None
        assert made.scale == 1
        # A rotation takes gains out and puts those of the copy back, so that only the function is the same. The search
        # for it ends where a step gains less than 1e-9.
        is_rotated = any(note.startswith("rotated behind gains") for note in made.notes)
        assert is_rotated or largest(made.params, nets.wanted) < 1e-9
        assert torch.allclose(nets.run(made.params), nets.run(nets.tuned), atol=1e-7 if is_rotated else 1e-9)
        assert mode == "weights" or made.cosine > 1 - 1e-9
        assert all(made.params[names[0]] is made.params[n] or torch.equal(made.params[names[0]], made.params[n])
                   for names in nets.symmetry.tied for n in names)  # fmt: skip
    for before, after in zip(kept, (nets.base, nets.tuned, nets.copy), strict=True):
        assert all(torch.equal(t, after[n]) for n, t in before.items())
    assert all(torch.equal(t, own[n]) for n, t in nets.module.state_dict().items())
    assert not nets.module.training


@pytest.mark.parametrize("name", ["relu", "gpt"])
def test_without_data_the_result_says_what_to_expect_of_unlike_bases(name: str) -> None:
    nets, other = Networks(name), Networks(name, seed=1)
    told = [
        [note for note in rg.transport(nets.base, nets.tuned, base, nets.symmetry).notes if "cosine" in note]
        for base in (nets.copy, nets.tuned, other.base)
    ]
    assert told[:2] == [[], []]
    assert len(told[2]) == 1
    assert "expect that most of the gain is lost, or that the result is worse than base B" in told[2][0]


@pytest.mark.parametrize("name", ["relu", "gpt"])
def test_a_symmetry_that_lacks_an_axis_does_not_carry(name: str) -> None:
    nets = Networks(name)
    made = rg.transport(nets.base, nets.tuned, nets.copy, rg.Symmetry(()), rotate="never")
    assert largest(made.params, nets.wanted) > 1e-2
    assert (nets.run(made.params) - nets.run(nets.tuned)).abs().max() > 1e-2
    other = Networks(name, seed=1)
    strange = rg.transport(nets.base, nets.tuned, other.base, nets.symmetry, inputs=nets.x, module=nets.module)
    assert strange.cosine < 0.99


@pytest.mark.parametrize("name", ["relu", "batch norm", "encoder"])
def test_the_change_is_linear_in_its_scale(name: str) -> None:
    nets, other = Networks(name), Networks(name, seed=1)
    made = [rg.transport(nets.base, nets.tuned, other.base, nets.symmetry, scale=k) for k in (0.0, 1.0, 2.0)]
    assert all(torch.equal(t, made[0].params[n]) for n, t in other.base.items())
    for n, t in other.base.items():
        assert torch.allclose(made[2].params[n] - t, 2 * (made[1].params[n] - t), atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_the_next_release_of_a_base_gets_the_change_as_it_is(name: str) -> None:
    nets = Networks(name)
    released = {n: t + 1e-3 * (nets.tuned[n] - t).flip(0) if t.ndim else t for n, t in nets.base.items()}
    released |= {n: nets.base[n] for n in nets.symmetry.structure}
    for names in nets.symmetry.tied:
        released |= dict.fromkeys(names, released[names[0]])
    made = rg.transport(nets.base, nets.tuned, released, nets.symmetry)
    plain = {n: t + (nets.tuned[n] - nets.base[n]) if t.is_floating_point() else t for n, t in released.items()}
    assert largest(made.params, plain) < 0.02
    assert torch.allclose(nets.run(made.params), nets.run(plain), atol=0.02)


@pytest.mark.parametrize("name", ["relu", "tanh"])
def test_maps_between_copies_carry_the_change_as_the_element_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_maps, "RIDGE", 1e-13)
    nets = Networks(name)
    change, left = activation_maps.carry_by_maps(
        (nets.base, nets.tuned, nets.copy), (nets.module, nets.module), [nets.x[:20], nets.x[20:]], nets.symmetry
    )
    assert not left
    assert largest(change.on(nets.copy, 1.0), nets.wanted) < 1e-5


@pytest.mark.parametrize("is_narrower", [True, False])
def test_a_copy_with_every_unit_twice_gets_the_change_by_maps(
    is_narrower: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activation_maps, "RIDGE", 1e-13)
    nets = Networks("relu")

    def doubled(params: Mapping[str, Tensor]) -> rg.Params:
        made = {n: torch.cat([t, t]) if n.startswith("0") else t for n, t in params.items()}
        return made | {"2.weight": torch.cat([params["2.weight"]] * 2, 1) / 2}

    wide = mlp(nn.ReLU, 18).double()
    symmetry = rg.discover(wide, (nets.x,))
    networks, modules = (nets.base, nets.tuned, doubled(nets.base)), (nets.module, wide)
    if is_narrower:
        networks, modules = (doubled(nets.base), doubled(nets.tuned), nets.base), modules[::-1]
        symmetry = nets.symmetry
    made = rg.transport(*networks, symmetry, inputs=nets.x, module=modules[1], module_a=modules[0])
    assert made.element is None
    run = torch.func.functional_call(modules[1], made.params, (nets.x,))
    assert torch.allclose(run, nets.run(nets.tuned), atol=1e-6)
    with pytest.raises(ValueError, match="the bases have different widths, so no element maps one to the other"):
        rg.transport(*networks, symmetry, inputs=nets.x, module=modules[1])


def test_what_no_map_carries_is_carried_by_the_element_and_said() -> None:
    nets, other = Networks("encoder"), Networks("encoder", seed=1)
    way = {"inputs": nets.x, "module": nets.module}
    change, left = activation_maps.carry_by_maps(
        (nets.base, nets.tuned, other.base), (nets.module, nets.module), [nets.x], nets.symmetry
    )
    assert {*left} == {n for n in nets.base if n.startswith("self_attn.")}
    assert "linear1.weight" in change.change
    made = rg.transport(nets.base, nets.tuned, other.base, nets.symmetry, scale=1.0, **way)
    if made.element is None:
        assert any("'self_attn.in_proj_weight'" in note and "no map" in note for note in made.notes)
    by_element = rg.transport(nets.base, nets.tuned, other.base, nets.symmetry).params
    assert made.element is not None or torch.equal(
        made.params["self_attn.in_proj_weight"], by_element["self_attn.in_proj_weight"]
    )


def test_running_variances_stay_positive_and_structure_and_counters_those_of_b() -> None:
    nets, other = Networks("batch norm"), Networks("batch norm", seed=1)
    nets.tuned["1.running_var"] = nets.base["1.running_var"] * 0.1
    nets.tuned["1.num_batches_tracked"] += 7
    other.base["1.running_var"] = other.base["1.running_var"] * 0.01
    for way in nets.ways().values():
        made = rg.transport(nets.base, nets.tuned, other.base, nets.symmetry, **{**way, "scale": 1.0}).params
        assert (made["1.running_var"] > 0).all()
        assert not torch.equal(made["1.running_var"], other.base["1.running_var"])
        assert torch.equal(made["1.num_batches_tracked"], other.base["1.num_batches_tracked"])
    masked, strange = Networks("own parameters"), Networks("own parameters", seed=1)
    carried = rg.transport(masked.base, masked.tuned, strange.base, masked.symmetry)
    assert torch.equal(carried.params["mask"], strange.base["mask"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_result_has_the_dtypes_of_b(dtype: torch.dtype) -> None:
    nets = Networks("relu")
    rounded = [{n: t.to(dtype) for n, t in one.items()} for one in (nets.base, nets.tuned, nets.copy)]
    made = rg.transport(*rounded, nets.symmetry).params
    assert {t.dtype for t in made.values()} == {dtype}
    eps = torch.finfo(dtype).eps
    assert largest(made, nets.wanted) < 20 * eps


@pytest.mark.parametrize("name", ["relu", "tied gpt"])
def test_training_goes_on_from_the_carried_change(name: str) -> None:
    nets, other = Networks(name), Networks(name, seed=1)
    task = labels(nets)
    start = rg.transport(nets.base, nets.tuned, other.base, nets.symmetry, task=task)
    made = rg.transport(nets.base, nets.tuned, other.base, nets.symmetry, task=task, steps=60)
    again = rg.transport(nets.base, nets.tuned, other.base, nets.symmetry, task=task, steps=60)
    assert all(torch.equal(t, again.params[n]) for n, t in made.params.items())
    assert 0 <= made.steps <= 60
    assert task.evaluate(start.params)["loss"] <= task.evaluate(other.base)["loss"]
    keeping = task.split(1 - 1 / 3)[1]
    fixed = rg.transport(nets.base, nets.tuned, other.base, nets.symmetry, task=task, steps=1, scale=made.scale)
    assert keeping.evaluate(made.params)["loss"] <= keeping.evaluate(fixed.params)["loss"] + 1e-6
    for names in nets.symmetry.tied:
        assert all(torch.equal(made.params[names[0]], made.params[n]) for n in names)
    assert str(made).startswith("transferred by ")
    assert "labels" in str(made)


@pytest.mark.parametrize(("name", "logits"), [("relu", True), ("relu", False), ("tied gpt", True)])
def test_without_labels_training_leads_to_the_outputs_of_the_fine_tune(name: str, logits: bool) -> None:
    nets, other = Networks(name), Networks(name, seed=1)
    way = {"inputs": [one[None] for one in nets.x], "module": nets.module, "logits": logits}
    start, made, control = (
        rg.transport(nets.base, nets.tuned, other.base, nets.symmetry, **way, **more)
        for more in ({}, {"steps": 200}, {"steps": 200, "scale": 0.0})
    )
    assert (made.mode, control.mode) == ("inputs", "inputs")
    assert 0 < made.steps <= 200
    wanted = nets.run(nets.tuned)

    def left(params: Mapping[str, Tensor]) -> float:
        found = nets.run(params)
        if logits:
            return float(transport_change._divergence(found, wanted))
        return float((found - wanted).square().mean())

    assert left(made.params) < 0.7 * left(start.params)
    assert left(control.params) < left(other.base)
    exact = rg.transport(nets.base, nets.tuned, nets.copy, nets.symmetry, **way, steps=3)
    assert left(exact.params) < 1e-9


@pytest.mark.parametrize("mode", ["inputs", "task"])
@pytest.mark.parametrize("name", CASES)
def test_the_result_is_never_worse_than_base_b_on_the_examples_that_judge(name: str, mode: str) -> None:
    nets, other = Networks(name), Networks(name, seed=1)
    task = labels(nets)
    way = {"task": task} if mode == "task" else {"inputs": nets.x, "module": nets.module}
    made = rg.transport(nets.base, nets.tuned, other.base, nets.symmetry, **way)
    assert made.losses is not None
    assert made.losses[1] <= made.losses[0]
    is_split = len(nets.x) >= transport_change.ENOUGH
    assert is_split == (transport_change.FEW not in made.notes)
    if mode == "task":
        judging = task.split(1 - transport_change.KEPT)[1] if is_split else task
        assert made.losses == (judging.evaluate(other.base)["loss"], judging.evaluate(made.params)["loss"])
    is_nothing = transport_change.NOTHING in made.notes
    assert is_nothing == (made.scale == 0) == all(torch.equal(t, made.params[n]) for n, t in other.base.items())


@pytest.mark.parametrize("name", ["relu", "batch norm", "gpt"])
def test_base_b_is_returned_where_nothing_helps_and_the_result_says_so(name: str) -> None:
    nets, other = Networks(name), Networks(name, seed=1)
    own = rg.Task(nets.module, [(nets.x, nets.run(other.base))], criterion=functional.mse_loss)
    # A base that does already what the fine-tune does, and labels that are what base B says.
    for base, way in ((nets.tuned, {"inputs": nets.x, "module": nets.module}), (other.base, {"task": own})):
        made = rg.transport(nets.base, nets.tuned, base, nets.symmetry, **way)
        assert made.scale == 0
        assert made.losses == (made.losses[0], made.losses[0])
        assert all(torch.equal(t, base[n]) for n, t in made.params.items())
        assert str(made).startswith("transferred nothing, with ")
        assert str(made).endswith("base B is returned unchanged")
        forced = rg.transport(nets.base, nets.tuned, base, nets.symmetry, scale=1.0, **way)
        assert forced.losses[1] > forced.losses[0] == made.losses[0]


def test_outputs_that_are_no_logits_are_compared_by_squares() -> None:
    nets, other = Networks("relu"), Networks("relu", seed=1)
    given = (nets.base, nets.tuned, other.base, nets.symmetry)
    way = {"inputs": nets.x, "module": nets.module, "scale": 0.0}
    found = {logits: rg.transport(*given, **way, logits=logits).losses for logits in (True, False)}
    parts = torch.arange(len(nets.x)).double()
    (_, judging) = rg.Task(nets.module, [(nets.x, parts)]).split(1 - transport_change.KEPT)
    rows = judging.batches[0][1].long()
    made, wanted = nets.run(other.base)[rows], nets.run(nets.tuned)[rows]
    assert found[False][0] == pytest.approx(float((made - wanted).square().mean()), rel=1e-9)
    divergence = functional.kl_div(made.log_softmax(-1), wanted.log_softmax(-1), log_target=True, reduction="batchmean")
    assert found[True][0] == pytest.approx(float(divergence), rel=1e-9)
    narrow = nn.Sequential(nn.Linear(12, 5), nn.ReLU(), nn.Linear(5, 1)).double()
    own = narrow.state_dict()
    with pytest.raises(ValueError, match="are not logits of two or more classes; give `logits=False`"):
        rg.transport(own, own, own, rg.discover(narrow, nets.x), inputs=nets.x, module=narrow)


def test_a_method_may_look_at_the_inputs() -> None:
    nets = Networks("relu")
    way = {"inputs": nets.x, "module": nets.module, "method": rg.ActivationMatching()}
    made = rg.transport(nets.base, nets.tuned, nets.copy, nets.symmetry, **way)
    assert largest(made.params, nets.wanted) < 1e-9


def test_a_fine_tune_that_changed_nothing_is_said() -> None:
    nets, other = Networks("relu"), Networks("relu", seed=1)
    for way in ({}, {"inputs": nets.x, "module": nets.module}, {"task": labels(nets)}):
        made = rg.transport(nets.base, dict(nets.base), other.base, nets.symmetry, **way)
        assert largest(made.params, other.base) < 1e-12
        assert "the fine-tune equals its base: there is no change to transfer" in made.notes


def test_a_scale_at_which_outputs_overflow_is_not_chosen() -> None:
    scales = {0.0: 2.0, 0.25: 1.0, 0.5: 1.5, 1.0: math.inf}
    assert transport_change._line_search(lambda scale: scales.get(scale, math.inf)) == 0.25
    nets, other = Networks("relu"), Networks("relu", seed=1)
    huge = {name: tensor * 1e200 for name, tensor in nets.base.items()}
    made = rg.transport(nets.base, huge, other.base, nets.symmetry, task=labels(nets))
    assert made.losses[1] <= made.losses[0] < math.inf
    assert all(tensor.isfinite().all() for tensor in made.params.values())


NETS = Networks("relu")
BROKEN = {**NETS.tuned, "0.weight": NETS.tuned["0.weight"] * torch.nan}
NARROW = {**NETS.tuned, "4.bias": torch.zeros(2, dtype=torch.float64)}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"tuned_a": BROKEN}, "'0.weight' of tuned A holds NaN or Inf in 108 of"),
        ({"base_b": BROKEN}, "'0.weight' of base B holds NaN or Inf in 108 of"),
        ({"tuned_a": NARROW}, "'4.bias' has shape (3,) in the first network and (2,) in the second"),
        ({"base_b": {"0.weight": NETS.base["0.weight"]}}, "the two networks have different parameters"),
        ({"inputs": NETS.x}, "inputs need a model: give `module`, or a task, which has one"),
        ({"inputs": [], "module": NETS.module}, "there are no batches of inputs"),
        ({"inputs": NETS.x[:0], "module": NETS.module}, "the batches hold no examples"),
        ({"inputs": NETS.x * torch.nan, "module": NETS.module}, "the loss of base B on the examples is nan"),
        ({"steps": 3}, "`steps=3`: training needs a task or inputs"),
        ({"steps": -1, "task": labels(NETS)}, "`steps=-1`: training needs a task or inputs"),
        ({"scale": float("nan")}, "scale is nan; give a finite factor"),
        ({"inputs": NETS.x.float(), "module": NETS.module}, "the parameters are float64 and the inputs float32"),
        ({"rotate": "maybe"}, "rotate is 'maybe'; choose 'auto', 'always' or 'never'"),
        ({"out": "out.safetensors"}, "networks with `out` or `memory` must all be checkpoints"),
        ({"base_a": NETS.module}, "base_a is a Sequential"),
        ({"symmetry": NETS.module}, "but a regauge.Symmetry is expected"),
    ],
)
def test_what_cannot_be_carried_is_refused_in_a_sentence(change: dict[str, Any], sentence: str) -> None:
    given = {"base_a": NETS.base, "tuned_a": NETS.tuned, "base_b": NETS.copy, "symmetry": NETS.symmetry, **change}
    with pytest.raises((ValueError, TypeError), match=re.escape(sentence)):
        rg.transport(**given)


@pytest.mark.parametrize("where", ["in memory", "streamed"])
@pytest.mark.parametrize("name", ["relu", "batch norm", "encoder", "own parameters"])
def test_files_get_what_their_parameters_get(
    name: str, where: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if where == "streamed":
        request.getfixturevalue("streamed")
    nets, other = Networks(name), Networks(name, seed=1)
    networks = [nets.base, nets.tuned, other.base]
    expected = rg.transport(*networks, nets.symmetry, scale=0.7)
    paths = [rg.save(one, tmp_path / f"{k}.safetensors") for k, one in enumerate(networks)]
    out = tmp_path / "out.safetensors"
    found = rg.transport(*paths, nets.symmetry, scale=0.7, out=out, memory="150MB")
    assert (found.mode, found.scale, found.notes) == ("weights", 0.7, expected.notes)
    written = rg.load(out)
    assert largest(written, expected.params) < 1e-9
    assert largest(dict(found.params), written) == 0
    assert {n: t.dtype for n, t in written.items()} == {n: t.dtype for n, t in other.base.items()}
    origin = read_provenance(out)
    assert origin is not None
    assert [one["as"] for one in origin["inputs"]] == ["base_a", "tuned_a", "base_b"]
    assert (origin["command"], origin["settings"]["scale"]) == ("rg.transport", 0.7)
    with pytest.raises(FileExistsError):
        rg.transport(*paths, nets.symmetry, out=out, memory="150MB")


@pytest.mark.usefixtures("streamed")
def test_streamed_networks_are_carried_by_weights_alone(tmp_path: Path) -> None:
    paths = [rg.save(one, tmp_path / f"{k}.safetensors") for k, one in enumerate((NETS.base, NETS.tuned, NETS.copy))]
    out = tmp_path / "out.safetensors"
    with pytest.raises(ValueError, match="running the model on data needs the networks in memory"):
        rg.transport(*paths, NETS.symmetry, task=labels(NETS), out=out, memory="150MB")
    with pytest.raises(ValueError, match="do not fit in the memory that is allowed: give `out`"):
        rg.transport(*paths, NETS.symmetry, memory="150MB")
    with pytest.raises(ValueError, match=r"matched by WeightMatching\(\)"):
        rg.transport(*paths, NETS.symmetry, memory="150MB", out=out, method=rg.FrankWolfe())
    rg.save(NARROW, tmp_path / "narrow.safetensors")
    with pytest.raises(ValueError, match=r"4\.bias"):
        rg.transport(paths[0], tmp_path / "narrow.safetensors", paths[2], NETS.symmetry, memory="150MB", out=out)
    assert not out.exists()

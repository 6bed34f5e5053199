"""Learned matching: laws of the method with any net, laws of its losses, and results of training."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import weightspace_cases as cases
from coverings import covering
from methods import MODULES, module_case, outputs, teacher_task
from symmetries import BY_HAND, drawn, generator
from torch import Tensor, nn

import regauge as rg
from regauge import learn
from regauge import weightspace as ws
from regauge.alignment.problem import Problem
from regauge.core.element import PARTS
from regauge.core.params import Params, select
from regauge.learn.matching_losses import Copies, Losses, LossWeights, Siamese
from regauge.learn.matching_training import MatchingFitting, Partners
from regauge.learn.paired_gain import PairedGain
from regauge.nets.mlp import mlp
from regauge.nets.siren import Siren
from regauge.relaxed.sinkhorn_layer import sinkhorn
from regauge.storage.collection import Collection


def population(symmetry: rg.Symmetry, networks: int, seed: int = 0) -> Params:
    found = [drawn(symmetry, seed + k) for k in range(networks)]
    return {name: torch.stack([one[name] for one in found]) for name in found[0]}


def untrained(
    symmetry: rg.Symmetry,
    networks: Params,
    layer: str = "propagation",
    parts: tuple[str, ...] | None = None,
    **settings: Any,
) -> learn.LearnedMatching:
    """Return a matcher whose net is not trained, in double precision."""
    made = {"width": 16, "depth": 2, "parts": parts}
    net = ws.Metanet(symmetry, layer=ws.LAYERS[layer](), head=ws.UnitFeatures(16), generator=generator(0), **made)
    net.double().standardize(networks)
    return learn.LearnedMatching(net, **settings)


def networks_like(module: nn.Module, count: int, seed: int = 0) -> Params:
    noise = generator(seed)
    return {
        n: 0.5 * torch.randn(count, *t.shape, generator=noise, dtype=t.dtype) for n, t in module.state_dict().items()
    }


def are_close(x: Params, y: Params, tolerance: float = 1e-7) -> bool:
    return all(torch.allclose(x[name].double(), y[name].double(), atol=tolerance) for name in y)


SWEEPS = {"no sweeps": 0, "two sweeps": 2}


@pytest.mark.parametrize(("name", "layer", "sweeps"), covering(MODULES, ws.LAYERS, SWEEPS, of=2))
def test_a_moved_copy_is_found_and_functions_stay(name: str, layer: str, sweeps: str) -> None:
    """Proposition 5 of the paper holds for every kind of group and every layer, without training."""
    module, inputs, symmetry = module_case(name)
    networks = networks_like(module, 3)
    a, other = select(networks, 0), select(networks, 1)
    method = untrained(symmetry, networks, layer, sweeps=SWEEPS[sweeps])
    moved = symmetry.act(symmetry.random(generator(1), PARTS), a)  # It matches networks as they are.
    assert are_close(rg.align(a, moved, symmetry, method=method).params, a)
    for task in (None, teacher_task(module, a, inputs)):
        found = rg.align(a, other, symmetry, method=method, task=task)
        assert torch.allclose(outputs(module, found.params, inputs), outputs(module, other, inputs), atol=1e-9)
        assert found.objective >= found.initial
        assert found.is_judged == (task is not None)


ARCHITECTURES = ("siren", "cnn_flatten", "resnet8_batch_A", "grouped_conv", "tied_autoencoder", "vit", "hf_llama")


@pytest.mark.parametrize(("name", "sweeps"), covering(ARCHITECTURES, SWEEPS, of=2))
def test_moved_copies_of_every_architecture_are_found(name: str, sweeps: str) -> None:
    """The architectures have flattened images, residual streams, normalization, heads with rotary positions, and tied
    and grouped layers.
    """
    symmetry, networks = cases.symmetry(name), select(cases.population(name), slice(0, 2))
    method = untrained(symmetry, networks, sweeps=SWEEPS[sweeps])
    moved = symmetry.act(symmetry.random(generator(1), PARTS, (2,)), networks)
    found = rg.alignment.align_pairs(networks, moved, symmetry, method=method)
    assert are_close(found.params, {one: networks[one] for one in symmetry.sites}, 1e-5)


@pytest.mark.parametrize("name", BY_HAND)
def test_pairs_are_matched_as_each_alone_and_equivariantly(name: str) -> None:
    symmetry = BY_HAND[name]
    a, b = population(symmetry, 3), population(symmetry, 3, 10)
    method = untrained(symmetry.bind(a), a)
    found = rg.alignment.align_pairs(a, b, symmetry, method=method)
    assert bool((found.objective >= found.initial).all())
    for k in range(3):
        alone = rg.align(select(a, k), select(b, k), symmetry, method=method)
        assert are_close(alone.params, select(found.params, k), 1e-6)
    one = rg.alignment.align_pairs(select(a, 0), b, symmetry, method=method)
    many = rg.align_many([select(a, 0), select(b, 0), select(b, 1)], symmetry, method=method)
    assert are_close(many.params[2], select(one.params, 1), 1e-6)


@cache
def step(name: str) -> tuple[Losses, Params, Params, Any]:
    """Return the losses of a small architecture, some networks, copies, and a batch."""
    module, inputs, symmetry = module_case(name)
    networks = networks_like(module, 3)
    method = untrained(symmetry, networks, parts=PARTS)  # of what a representative has zero nothing is learned
    siamese = Siamese(method.net).double()
    task = teacher_task(module, select(networks, 0), inputs)
    losses = Losses(siamese, symmetry, LossWeights(0.3, 1.0, 0.5), task, "loss", tolerance=1e-13, max_iterations=5000)
    copies = {n: t + 0.02 * networks_like(module, 3, 9)[n] for n, t in networks.items()}
    return losses, networks, copies, next(iter(task.batches))


@pytest.mark.parametrize("sharpness", [2.0, 60.0])
@pytest.mark.parametrize("name", [name for name in MODULES if name != "linear"])
def test_the_gradient_of_a_whole_step_agrees_with_finite_differences(name: str, sharpness: float) -> None:
    """The gradient is right even at temperatures at which the published implicit gradient is wrong."""
    losses, networks, copies, batch = step(name)
    siamese = losses.siamese
    with torch.no_grad():
        siamese.raw.copy_(torch.logit(torch.tensor(sharpness / 100)) / 10)
    parameters = [p for p in siamese.parameters() if p.requires_grad]

    def value() -> Tensor:
        return losses.step(networks, None, Copies(copies, None), batch, generator(3))

    siamese.zero_grad()
    value().backward()  # type: ignore[no-untyped-call]
    chance = generator(4)
    directions = [torch.randn(p.shape, generator=chance, dtype=p.dtype) for p in parameters]
    expected = sum(float((p.grad * d).sum()) for p, d in zip(parameters, directions, strict=True) if p.grad is not None)
    ends = []
    for size in (1e-6, -2e-6):
        with torch.no_grad():
            for p, d in zip(parameters, directions, strict=True):
                p.add_(d, alpha=size)
            ends.append(float(value()))
    with torch.no_grad():
        for p, d in zip(parameters, directions, strict=True):
            p.add_(d, alpha=1e-6)
    assert expected == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-3, abs=1e-6)
    unused = {n for n, p in siamese.named_parameters() if p.grad is None or not bool((p.grad != 0).any())}
    assert unused <= {"net.layers.1.units.out.bias", "net.head.last.bias"}  # What all units of a set have in common.


def test_networks_that_are_read_some_at_a_time_give_the_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    module, inputs, symmetry = module_case("scaled")
    networks = networks_like(module, 3)
    siamese = Siamese(untrained(symmetry, networks, "dws").net).double()
    task = teacher_task(module, select(networks, 0), inputs)
    losses = Losses(siamese, symmetry, LossWeights(0.3, 1.0, 0.5), task, "loss", tolerance=1e-9, max_iterations=500)
    copies = Copies({n: t + 0.02 * networks_like(module, 3, 9)[n] for n, t in networks.items()}, None)
    made, reads = [], []
    monkeypatch.setattr(siamese.net, "canonical_features", _counted(siamese.net.canonical_features, reads))
    for kept in (1 << 27, 1):
        monkeypatch.setattr("regauge.learn.matching_losses.KEPT", kept)
        siamese.zero_grad()
        loss = losses.step(networks, None, copies, next(iter(task.batches)), generator(4))
        loss.backward()
        made.append([loss.detach(), *(p.grad for p in siamese.parameters() if p.grad is not None)])
    assert reads == [6] + [1] * 12  # of all at once; of each, twice
    assert len(made[0]) == len(made[1]) > 1
    for one, other in zip(*made, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def _counted(read: Any, counts: list[int]) -> Any:
    """Return a function that counts the networks that it reads."""

    def counted(params: Params) -> Any:
        counts.append(len(next(iter(params.values()))))
        return read(params)

    return counted


def test_the_gradient_of_sharp_plans_agrees_with_finite_differences() -> None:
    """Cosines are multiplied by 200. The published code reports a singular system in single precision for this
    factor.
    """
    cosines = (2 * torch.rand(12, 12, generator=generator(0), dtype=torch.float64) - 1).requires_grad_()
    weights, direction = torch.randn(2, 12, 12, generator=generator(1), dtype=torch.float64)

    def value(sharpness: float, shift: float) -> Tensor:
        logits = sharpness * (cosines + shift * direction)
        return (sinkhorn(logits, tolerance=1e-13, max_iterations=20_000)[0] * weights).sum()

    for sharpness in (35.0, 200.0):
        (gradient,) = torch.autograd.grad(value(sharpness, 0.0), cosines)
        slope = float((value(sharpness, 1e-7) - value(sharpness, -1e-7)).detach()) / 2e-7
        assert float((gradient * direction).sum()) == pytest.approx(slope, rel=1e-3)


CONFIG = learn.MatchingConfig(width=16, depth=2, vectors=16, batch=16, epochs=12, checked=6, lr=5e-3)


@cache
def students(width: int = 10) -> tuple[nn.Module, rg.Symmetry, Params, rg.Task]:
    """Return networks of one task: a teacher's units with noise, in any order."""
    module = mlp(6, width, width, 3)
    symmetry = rg.discover(module, (torch.zeros(1, 6),))
    teacher = {n: torch.randn(t.shape, generator=generator(k)) for k, (n, t) in enumerate(module.state_dict().items())}
    noise = networks_like(module, 60, 5)
    noisy = {n: t + 0.6 * noise[n] for n, t in teacher.items()}
    networks = symmetry.act(symmetry.random(generator(6), ("permutation",), (60,)), noisy)
    inputs = torch.randn(64, 6, generator=generator(7))
    targets = torch.func.functional_call(module, teacher, (inputs,))
    return module, symmetry, networks, rg.Task(module, [(inputs, targets)], nn.functional.mse_loss)


@cache
def trained() -> learn.LearnedMatching:
    _, symmetry, networks, task = students()
    made = learn.fit_matching(networks, symmetry, CONFIG, task=task, generator=generator(0))
    return replace(made, share=0.5)  # Whether or not the gain over six pairs is clear, the net is tested here.


def test_training_lowers_the_barrier_of_held_out_pairs() -> None:
    found = trained()
    assert found.trained is not None
    scores, history = found.about["scores"], found.trained.history
    course = [(row["step"], row["midpoint excess"]) for row in found.about["course"]]
    assert course == [(row["step"], row["validation_midpoint excess"]) for row in history]
    assert history[found.trained.best]["validation_midpoint excess"] < 0.7 * history[0]["validation_midpoint excess"]
    assert scores["vectors alone"]["midpoint excess"] < 0.5 * scores["no alignment"]["midpoint excess"]
    assert set(scores) == {"no alignment", "weight matching", "vectors alone", "vectors and sweeps"}


def test_a_matcher_is_saved_loaded_and_a_start_for_other_methods(tmp_path: Path) -> None:
    module, symmetry, networks, task = students()
    a, b = select(networks, 0), select(networks, 1)
    found = trained()
    other = learn.load_matching(found.save(tmp_path / "matcher.safetensors"))
    aligned = rg.align(a, b, symmetry, method=found)
    assert are_close(rg.align(a, b, symmetry, method=other).params, aligned.params, 0)
    assert (other.share, other.sweeps, other.about["settings"]) == (found.share, found.sweeps, repr(CONFIG))
    for method in (
        rg.Sinkhorn(init=found, steps=4),
        rg.WeightMatching(init=aligned.element),
        rg.alignment.BestOf((found, rg.WeightMatching())),
    ):
        after = rg.align(a, b, symmetry, method=method, task=task)
        assert task.midpoint_loss(a, after.params) < task.midpoint_loss(a, b)
    assert rg.merge([a, b], symmetry, method=found).params.keys() == a.keys()
    net = ws.Metanet(symmetry, head=ws.Invariant(1))
    net.save(tmp_path / "net.safetensors")
    with pytest.raises(ValueError, match="not a matcher"):
        learn.load_matching(tmp_path / "net.safetensors")
    with pytest.raises(ValueError, match="UnitFeatures"):
        learn.LearnedMatching(net)
    assert module is not None


def test_with_a_task_no_pair_is_worse_than_by_weight_matching_and_a_descent_on_scales() -> None:
    _, symmetry, networks, task = students()
    untrained = learn.LearnedMatching(ws.Metanet(symmetry, head=ws.UnitFeatures(8), width=8, depth=1))
    scaled = rg.ContinuousDescent("midpoint", init=rg.WeightMatching(), steps=untrained.steps)
    gains = []
    for matcher in (trained(), untrained, replace(untrained, share=0.0)):
        for k in range(1, 6):
            a, b = select(networks, 0), select(networks, k)
            losses = [
                task.midpoint_loss(a, rg.align(a, b, symmetry, method=method, task=given).params)
                for method, given in (
                    (matcher, task),
                    (rg.WeightMatching(), None),
                    (scaled, task),
                    (replace(matcher, steps=0), task),
                )
            ]
            assert losses[0] <= min(losses) + 1e-9
            gains.append(losses[3] - losses[0])
    assert max(gains) > 1e-3  # The descent does something: without it, pairs are worse.


@pytest.mark.parametrize(("gain", "noise"), [(1.0, 0.0), (0.05, 0.1), (-1.0, 0.0)])
def test_a_matcher_uses_its_net_only_where_that_is_clearly_better(
    gain: float, noise: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The mean gain, over pairs that were not used to choose the epoch, must exceed its standard error."""
    _, symmetry, networks, task = students()
    measure, steps = MatchingFitting._measure, []

    def favor(
        self: MatchingFitting, part: str, method: rg.alignment.Method | None, *, step: int = 1
    ) -> dict[str, Tensor]:
        found = measure(self, part, method, step=step)
        if part == "validation" and isinstance(method, rg.WeightMatching) and self.batches:
            steps.append(step)
            own = measure(self, part, learn.LearnedMatching(self.net.net, sweeps=0), step=step)
            spread = noise * torch.linspace(-2, 2, len(own["distance"]), dtype=torch.float64)
            swept = measure(self, part, learn.LearnedMatching(self.net.net), step=step)
            best = min(own, swept, key=lambda one: float(one["midpoint excess"].mean()))
            return {name: values + gain + spread for name, values in best.items() if name != "CPU ms"}
        return found

    monkeypatch.setattr(MatchingFitting, "_measure", favor)
    config = replace(CONFIG, epochs=1)
    made = learn.fit_matching(networks, symmetry, config, task=task, generator=generator(0))
    a, b = select(networks, 0), select(networks, 1)
    own, plain = (rg.align(a, b, symmetry, method=method).params for method in (made, rg.WeightMatching()))
    is_clear = gain == 1
    assert steps == [2]
    assert made.about["gain"]["mean"] == pytest.approx(gain)
    assert made.about["gain"]["count"] == CONFIG.checked == 6
    assert (made.about["gain"]["mean"] > made.about["gain"]["error"]) == is_clear
    assert made.about["is_better"] == (made.share > 0) == is_clear
    assert "midpoint excess" in made.about["verdict"]
    assert f"a gain of {gain:.3g} ± " in made.about["verdict"]
    if is_clear:
        assert made.about["verdict"].startswith("The matcher is better than weight matching by more than")
    else:
        assert "its net is not used (share=0)" in made.about["verdict"]
        assert "More networks, a longer training or probes help" in made.about["verdict"]
        assert are_close(own, plain, 0)
        loaded = learn.load_matching(made.save(tmp_path / "matcher.safetensors"))
        assert are_close(rg.align(a, b, symmetry, method=loaded).params, plain, 0)
        many = [rg.align_many([a, b], symmetry, method=method).params[1] for method in (loaded, rg.WeightMatching())]
        assert are_close(*many, 1e-6)
    unknown = learn.fit_matching(networks, symmetry, config, generator=generator(0))
    assert unknown.share > 0  # Distances do not say which is better.
    assert unknown.about["is_better"] is None
    assert "unknown without a task" in unknown.about["verdict"]


def test_a_gain_over_one_case_is_never_clear() -> None:
    one = PairedGain.of(torch.zeros(1), torch.ones(1))
    assert (one.is_clear, one.to_json()) == (False, {"mean": 1.0, "error": None, "count": 1})
    several = PairedGain.of(torch.zeros(4), torch.tensor([0.0, 1.0, 2.0, 3.0]))
    assert (several.mean, several.count, several.is_clear) == (1.5, 4, True)
    assert several.error == pytest.approx(np.std([0, 1, 2, 3], ddof=1) / 2)
    assert not PairedGain.of(several_losses := torch.rand(5), several_losses).is_clear


def test_pairs_that_judge_are_others_than_pairs_that_choose() -> None:
    _, symmetry, networks, _ = students()
    collection = Collection(networks, symmetry)
    for count, is_other in ((6, True), (5, True), (4, False), (2, False)):
        parts = {"train": np.arange(20, 40), "validation": np.arange(count)}
        found = Partners.of(collection, None, parts)
        pairs = [found.pairs(parts, "validation", 9, step=step)[0] for step in (1, 2)]
        first, second = ({frozenset(p) for p in zip(*ends, strict=True)} for ends in pairs)
        assert first.isdisjoint(second) == is_other


def test_networks_of_other_widths_are_matched() -> None:
    _, symmetry, networks, task = students(24)
    found = rg.alignment.align_pairs(select(networks, 0), networks, symmetry, method=trained())
    pairs = [(select(networks, 0), select(networks, k)) for k in range(1, 6)]
    before = [task.midpoint_loss(*pair) for pair in pairs]
    after = [task.midpoint_loss(pair[0], select(found.params, k)) for k, pair in enumerate(pairs, start=1)]
    assert np.mean(after) < 0.6 * np.mean(before)


def test_several_widths_are_trained_on_together() -> None:
    (_, first, narrow, task), (_, second, wide, other) = students(), students(24)
    config = replace(CONFIG, epochs=1)
    found = learn.fit_matching([narrow, wide], [first, second], config, task=[task, other], generator=generator(0))
    assert (
        found.about["scores"]["vectors alone"]["midpoint excess"]
        < found.about["scores"]["no alignment"]["midpoint excess"]
    )


def test_each_loss_can_be_left_out_and_partners_share_a_value() -> None:
    _, symmetry, networks, task = students()
    for changes in ({"supervised": 0.0, "distance": 0.0}, {"line": 0.0, "distance": 0.0}, {"line_by": "outputs"}):
        config = replace(CONFIG, epochs=1, **changes)
        found = learn.fit_matching(networks, symmetry, config, task=task, generator=generator(0))
        assert "midpoint excess" in found.about["scores"]["vectors alone"]
    found = learn.fit_matching(
        networks,
        symmetry,
        replace(CONFIG, epochs=1, augment=("scale",), parts=("permutation",)),
        generator=generator(0),
    )
    assert "midpoint excess" not in found.about["scores"]["vectors alone"]


def test_what_cannot_be_matched_is_told() -> None:
    _, symmetry, networks, task = students()
    config = replace(CONFIG, epochs=1)
    one = select(networks, slice(0, 1))
    with pytest.raises(ValueError, match="1 networks are too few for a matcher"):
        learn.fit_matching(one, symmetry, config, generator=generator(0))
    with pytest.raises(ValueError, match="needs a `task`"):
        learn.fit_matching(networks, symmetry, replace(config, supervised=0.0, distance=0.0), generator=generator(0))
    broken = {name: tensor.clone() for name, tensor in networks.items()}
    broken["layers.0.weight"][:] = torch.nan
    with pytest.raises(ValueError, match="NaN or Inf"):
        learn.fit_matching(broken, symmetry, config, generator=generator(0))
    with pytest.raises(ValueError, match="weights of losses"):
        learn.MatchingConfig(supervised=0.0, line=0.0, distance=0.0)
    with pytest.raises(ValueError, match="which hides copies"):
        learn.MatchingConfig(changes=(learn.Translation(0.1),))
    plain, _, rotated = module_case("linear")
    with pytest.raises(ValueError, match="there is no order to learn"):
        learn.fit_matching(networks_like(plain, 9), rotated, config, generator=generator(0))
    deeper = mlp(6, 10, 10, 10, 3)
    other = rg.discover(deeper, (torch.zeros(1, 6),))
    pair = networks_like(deeper, 2)
    with pytest.raises(ValueError, match="numbers of units"):
        rg.align(select(pair, 0), select(pair, 1), other, method=trained())
    constant = {name: torch.ones_like(tensor) for name, tensor in networks.items()}
    found = rg.alignment.align_pairs(constant, networks, symmetry, method=trained())
    assert bool((found.objective >= found.initial).all())
    assert all(bool(tensor.isfinite().all()) for tensor in found.params.values())
    assert task is not None


def test_the_line_is_judged_by_the_module_itself() -> None:
    """Fault of the published code: a functional copy of the networks omitted activations."""
    losses, networks, _, batch = step("scaled")
    assert losses.task is not None
    where = torch.zeros(3, dtype=torch.float64)
    found = losses.on_line(networks, {n: t.roll(1, 0) for n, t in networks.items()}, where, batch)
    expected = [float(losses.task.loss(select(networks, k), batch)) for k in range(3)]
    assert float(found) == pytest.approx(np.mean(expected))


def test_every_input_and_every_output_of_a_network_counts() -> None:
    """Faults of the published code: biases read pooled inputs, and the last matrix was constant along the outputs."""
    module, _, symmetry = module_case("permutation")
    networks = networks_like(module, 3)
    method = untrained(symmetry, networks)
    placed = method.prepare(Problem(networks, networks, symmetry))
    before = method.read(networks, placed)
    for name, axis in (("0.weight", 2), ("2.weight", 1)):
        after = method.read({**networks, name: networks[name].roll(1, axis)}, placed)
        assert all(float((after[n] - x).abs().max()) > 1e-3 for n, x in before.items())
    assert all(torch.equal(x, method.read(networks, placed)[n]) for n, x in before.items())


def test_the_best_weights_are_kept() -> None:
    """Fault of the published code: the best checkpoint was an alias of the last weights."""
    _, symmetry, networks, task = students()
    config = replace(CONFIG, epochs=3, lr=0.5)
    found = learn.fit_matching(networks, symmetry, config, task=task, generator=generator(0))
    assert found.trained is not None
    barriers = [row["validation_midpoint excess"] for row in found.trained.history]
    assert found.trained.best == int(np.argmin(barriers))


def test_pruning_takes_the_smallest_values_of_large_networks_too() -> None:
    """Limit of the published code: `torch.quantile` accepts at most 2^24 values."""
    values = torch.randn(1, (1 << 24) + 8, generator=generator(0))
    pruned = learn.Pruning(0.5).prune({"w": values}, generator(1))["w"]
    share = float((pruned == 0).double().mean())
    assert 0 < share < 0.5
    assert float(values[pruned == 0].abs().max()) <= float(pruned[pruned != 0].abs().min())


def test_networks_of_different_functions_are_trained_by_partners() -> None:
    """There are two networks of each signal, and the target outputs are the mean of both networks' outputs."""
    module = Siren(1, 6, 1, depth=1, omega=3.0, generator=generator(0))
    symmetry = rg.discover(module, (torch.zeros(4, 1),))
    signals = networks_like(module, 12, 1)
    both = [symmetry.act(symmetry.random(generator(k), batch=(12,)), signals) for k in range(2)]
    networks = {
        n: torch.cat([one[n] + 0.02 * torch.randn(one[n].shape, generator=generator(3)) for one in both])
        for n in signals
    }
    grid = torch.linspace(-1, 1, 16).unsqueeze(1)
    task = rg.Task(module, [(grid, grid)], nn.functional.mse_loss)
    codes = np.tile(np.arange(12), 2)
    partners = Partners(Collection(networks, symmetry), codes, np.arange(24))
    drawn_ = partners.draw(np.arange(24), generator(0))
    assert (codes[drawn_] == codes).all()
    assert (drawn_ != np.arange(24)).all()
    split = {
        "train": [k + 12 * j for k in range(8) for j in (0, 1)],
        "validation": [8, 20, 9, 21],
        "test": [10, 22, 11, 23],
    }
    config = replace(CONFIG, epochs=1, line_by="outputs", distance=0.0)
    found = learn.fit_matching(networks, symmetry, config, task=task, generator=generator(0), split=split)
    assert found.about["networks"]["train"] == 16

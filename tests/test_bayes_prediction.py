"""Predictions of posteriors: losses and their errors, calibration, barriers, slices and collapse."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from posterior_cases import KINDS, generator, network, normal
from torch import Tensor, nn
from torch.func import functional_call

from regauge import Element, Params, Symmetry
from regauge.bayes.posteriors.gaussian import GaussianPosterior
from regauge.bayes.posteriors.particles import ParticlePosterior
from regauge.bayes.prediction.likelihoods import Categorical, Normal
from regauge.bayes.prediction.posterior_landscape import posterior_collapse, posterior_line, posterior_slice
from regauge.bayes.prediction.predict import predict
from regauge.bayes.prediction.predictive import Predictive
from regauge.bayes.transport.posterior_mixtures import mixture
from regauge.bayes.transport.wasserstein import geodesic
from regauge.connect import variance_collapse
from regauge.core.element import PARTS
from regauge.core.task import Task

NETS = ["relu", "tanh", "filter response"]
Batches = list[tuple[Tensor, Tensor]]


def data_of(name: str) -> Batches:
    """Return six examples of two classes, in batches of four and two."""
    _, inputs, _ = network(name)
    targets = torch.tensor([0, 1, 1, 0, 1, 0])
    return [(inputs[:4], targets[:4]), (inputs[4:], targets[4:])]


def of_values(log_likelihoods: Tensor) -> Predictive:
    targets = torch.zeros(log_likelihoods.shape[1], dtype=torch.int64)
    return Predictive(log_likelihoods, targets, {"log_likelihood": log_likelihoods.mean(0)})


def of_probabilities(probabilities: Tensor, targets: Tensor) -> Predictive:
    """Return averages of `[samples, examples, classes]`, computed by their definition."""
    averages = {
        "probabilities": probabilities.mean(0),
        "entropy": torch.special.entr(probabilities).sum(-1).mean(0),
        "log_likelihood": probabilities[:, torch.arange(len(targets)), targets].log().mean(0),
    }
    return Predictive(probabilities[:, torch.arange(len(targets)), targets].log(), targets, averages)


def linear(features: int, *, std: float = 0.3) -> tuple[nn.Module, GaussianPosterior]:
    module = nn.Linear(features, 1).double()
    mean = {"weight": normal(0, 1, features), "bias": normal(1, 1)}
    return module, GaussianPosterior(mean, {name: torch.full_like(t, std) for name, t in mean.items()})


def test_tiny_likelihoods_are_averaged_without_underflow() -> None:
    values = torch.tensor([[-1e4], [-1e4 - 1.0]], dtype=torch.float64)
    expected = 1e4 - math.log((1 + math.exp(-1)) / 2)
    assert of_values(values).loss == pytest.approx(expected, abs=1e-9)
    assert of_values(values).corrected == pytest.approx(2 * expected - (1e4 + 0.5), abs=1e-7)
    assert of_values(torch.full((3, 2), -1e4, dtype=torch.float64)).error == 0.0


@pytest.mark.parametrize("kind", KINDS)
def test_everything_equals_what_is_written_out(kind: str) -> None:
    module, inputs, _ = network("tanh")
    q = KINDS[kind]("tanh", 1)
    noise = q.draw(9, generator(2))
    found = predict(q, module, data_of("tanh"), noise=noise)
    samples = q.at(noise)
    targets = torch.tensor([0, 1, 1, 0, 1, 0])
    probabilities = torch.stack(
        [functional_call(module, {n: t[k] for n, t in samples.items()}, (inputs,)).softmax(-1) for k in range(9)]
    ).detach()
    mean = probabilities.mean(0)
    at_targets = probabilities[:, torch.arange(6), targets]
    assert found.loss == pytest.approx(-float(at_targets.mean(0).log().mean()), rel=1e-12)
    assert found.gibbs == pytest.approx(-float(at_targets.log().mean()), rel=1e-12)
    assert found.gibbs > found.loss
    assert torch.allclose(found.log_likelihoods, at_targets.log())
    assert torch.allclose(found.probabilities, mean)
    assert found.accuracy == float((mean.argmax(-1) == targets).double().mean())
    entropy = found.entropy
    assert torch.allclose(entropy.predictive, -(mean * mean.log()).sum(-1))
    assert torch.allclose(entropy.expected, -(probabilities * probabilities.log()).sum(-1).mean(0))
    without = [-float(at_targets[torch.arange(9) != k].mean(0).log().mean()) for k in range(9)]
    assert found.corrected == pytest.approx(9 * found.loss - 8 * sum(without) / 9, rel=1e-9)
    assert found.bias == pytest.approx(found.loss - found.corrected)


@pytest.mark.parametrize("chunk", [1, 2, 9, 100])
def test_chunks_change_nothing(chunk: int) -> None:
    for name in NETS:
        module, _, _ = network(name)
        q = KINDS["gaussian"](name, 1)
        noise = q.draw(9, generator(2))
        whole, parts = (predict(q, module, data_of(name), noise=noise, chunk=c) for c in (None, chunk))
        assert torch.allclose(whole.log_likelihoods, parts.log_likelihoods, rtol=1e-12)
        assert torch.allclose(whole.probabilities, parts.probabilities, rtol=1e-12)


def test_drawing_is_giving_the_noise() -> None:
    module, _, _ = network("relu")
    q = KINDS["gaussian"]("relu", 1)
    given = predict(q, module, data_of("relu"), noise=q.draw(5, generator(3)))
    drawn = predict(q, module, iter(data_of("relu")), samples=5, generator=generator(3))
    assert torch.equal(given.log_likelihoods, drawn.log_likelihoods)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NETS)
def test_no_element_changes_a_prediction(name: str, kind: str) -> None:
    module, _, symmetry = network(name)
    q = KINDS[kind](name, 1)
    noise = q.draw(6, generator(2))
    before = predict(q, module, data_of(name), noise=noise)
    for seed in range(3):
        g = symmetry.random(generator(seed), PARTS)  # What is added would depend on parameters that are uncertain.
        moved = q.push(symmetry, g)
        after = predict(moved, module, data_of(name), noise=q.push_noise(symmetry, g, noise))
        assert torch.allclose(after.log_likelihoods, before.log_likelihoods, atol=1e-9)
        assert after.loss == pytest.approx(before.loss, abs=1e-10)
    if kind not in ("particles", "deviations alone"):  # Their noise does not move.
        assert predict(moved, module, data_of(name), noise=noise).loss != pytest.approx(before.loss, abs=1e-6)


def test_certain_posteriors_are_networks() -> None:
    for name in NETS:
        module, _, _ = network(name)
        mean, std = KINDS["gaussian"](name, 1)  # type: ignore[misc]
        task = Task(module, data_of(name)).evaluate(mean)
        point = predict(mean, module, data_of(name))
        assert point.error == 0.0
        assert point.corrected == point.loss == point.gibbs == pytest.approx(task["loss"], rel=1e-12)
        assert point.accuracy == pytest.approx(task["accuracy"])
        for factor in (0.0, 1e-9):
            q = GaussianPosterior(mean, {n: factor * t for n, t in std.items()})
            found = predict(q, module, data_of(name), samples=4, generator=generator(0))
            assert found.loss == pytest.approx(point.loss, abs=1e-7)
            assert found.error == pytest.approx(0, abs=1e-7)
            assert torch.allclose(found.entropy.mutual_information, torch.zeros(6).double(), atol=1e-7)


def test_an_ensemble_is_the_average_of_its_members() -> None:
    module, _, _ = network("relu")
    q = KINDS["particles"]("relu", 1)
    assert isinstance(q, ParticlePosterior)
    members = [predict({n: t[k] for n, t in q.stack.items()}, module, data_of("relu")) for k in range(q.count)]
    found = predict(q, module, data_of("relu"), samples=q.count, generator=generator(0))
    assert torch.allclose(found.probabilities, torch.stack([m.probabilities for m in members]).mean(0))
    assert found.gibbs == pytest.approx(sum(m.loss for m in members) / q.count)


def test_linear_regression_has_its_closed_form() -> None:
    module, q = linear(3)
    inputs, noise_std = normal(2, 20, 3), 0.7
    targets = inputs @ q.mean["weight"].T + normal(3, 20, 1)
    found = predict(
        q, module, [(inputs, targets)], samples=20_000, generator=generator(4), likelihood=Normal(noise_std), chunk=5000
    )
    mean = inputs @ q.mean["weight"].T + q.mean["bias"]
    std = ((inputs.square() @ q.std["weight"].square().T + q.std["bias"].square()) + noise_std**2).sqrt()
    exact = -float(torch.distributions.Normal(mean, std).log_prob(targets).mean())
    assert abs(found.loss - exact) < 4 * found.error < 0.05
    assert torch.allclose(found.mean, mean, atol=0.02)
    assert torch.allclose(found.std, std, rtol=0.02)
    assert float(found.std.min()) > noise_std
    assert found.metrics["rmse"] == pytest.approx(float((mean - targets).square().mean().sqrt()), abs=0.01)


def test_axes_of_one_example_are_summed() -> None:
    outputs, targets = normal(0, 5, 4, 3), normal(1, 4, 3)
    expected = torch.distributions.Normal(outputs, 0.5).log_prob(targets).sum(-1)
    assert torch.allclose(Normal(0.5).log_likelihood(outputs, targets), expected)
    flat = torch.distributions.Normal(outputs[..., 0], 0.5).log_prob(targets[:, 0])
    assert torch.allclose(Normal(0.5).log_likelihood(outputs[..., 0], targets[:, 0]), flat)
    assert Normal(0.5).log_likelihood(outputs[0], targets).shape == (4,)


def test_the_error_says_how_far_the_truth_is() -> None:
    """About 95% of 400 estimates lie within 1.96 errors. Samples are drawn from the exact distribution."""
    samples, examples, repeats = 64, 30, 400
    centers, spreads = normal(0, examples), 0.2 + 0.5 * normal(1, examples).abs()
    # One normal number for a sample, shared by all examples as parameters are; log-normal likelihoods have known means.
    truth = -float((centers + spreads.square() / 2).mean())
    draws = normal(2, repeats, samples, 1)
    found = [of_values(centers + spreads * draw) for draw in draws]
    near = sum(abs(one.corrected - truth) < 1.96 * one.error for one in found) / repeats
    assert 0.90 < near < 0.98
    spread = torch.tensor([one.loss for one in found]).std()
    assert sum(one.error for one in found) / repeats == pytest.approx(float(spread), rel=0.1)


def test_the_jackknife_removes_most_of_the_bias() -> None:
    samples, repeats = 8, 2000
    draws = normal(0, repeats, samples, 20)
    spread = 0.7
    truth = -(spread**2) / 2
    found = [of_values(spread * draw) for draw in draws]
    bias = sum(one.loss for one in found) / repeats - truth
    assert bias == pytest.approx((math.exp(spread**2) - 1) / (2 * samples), rel=0.25)
    assert abs(sum(one.corrected for one in found) / repeats - truth) < bias / 3


def test_calibration() -> None:
    confidences = torch.linspace(0.52, 0.98, 24, dtype=torch.float64)
    probabilities = torch.stack([confidences, 1 - confidences], -1).repeat_interleave(500, 0)
    is_right = torch.rand(len(probabilities), generator=generator(0), dtype=torch.float64) < probabilities[:, 0]
    honest = of_probabilities(probabilities[None], (~is_right).long()).calibration()
    assert honest.error < 0.02
    overconfident = of_probabilities(probabilities[None] * 0 + torch.tensor([0.999, 0.001]), (~is_right).long())
    assert overconfident.calibration().error == pytest.approx(0.999 - float(is_right.double().mean()))
    assert len(honest.table) == 15
    assert sum(row.count for row in honest.table) == len(probabilities)
    assert all(row.low < row.confidence <= row.high for row in honest.table if row.count)
    assert all(math.isnan(row.accuracy) for row in honest.table[:7])
    single = of_probabilities(probabilities[None], (~is_right).long()).calibration(bins=1)
    assert single.error == pytest.approx(abs(float(is_right.double().mean()) - 0.75))


def test_certainty_on_the_edges_of_bins() -> None:
    probabilities = torch.tensor([[[1.0, 0.0], [0.5, 0.5]]], dtype=torch.float64)
    table = of_probabilities(probabilities, torch.tensor([0, 0])).calibration(bins=2).table
    assert [row.count for row in table] == [1, 1]


def test_disagreement_is_mutual_information() -> None:
    sure = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]], dtype=torch.float64)
    entropy = of_probabilities(sure, torch.tensor([0])).entropy
    assert float(entropy.predictive) == pytest.approx(math.log(2))
    assert float(entropy.expected) == 0.0
    assert float(entropy.mutual_information) == pytest.approx(math.log(2))
    doubtful = of_probabilities(torch.full((2, 1, 2), 0.5, dtype=torch.float64), torch.tensor([0])).entropy
    assert float(doubtful.mutual_information) == pytest.approx(0, abs=1e-15)
    assert float(doubtful.expected) == pytest.approx(math.log(2))


class Sequence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4).double()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": x.sum(), "logits": self.layer(x)}


def test_tokens_are_examples_and_ignored_ones_do_not_count() -> None:
    module = Sequence()
    q = GaussianPosterior(
        {n: t.detach() for n, t in module.state_dict().items()}, {"layer.bias": torch.full((4,), 0.3).double()}
    )
    inputs, targets = normal(0, 2, 5, 3), torch.tensor([[0, 1, -100, 3, 2], [3, -100, -100, 0, 1]])
    noise = q.draw(3, generator(0))
    found = predict(q, module, [(inputs, targets)], noise=noise, outputs="logits")
    assert found.log_likelihoods.shape == (3, 7)
    kept = targets >= 0
    flat = predict(q, module, [(inputs[kept], targets[kept])], noise=noise, outputs="logits")
    assert torch.allclose(found.log_likelihoods, flat.log_likelihoods)


@dataclass(frozen=True)
class Poisson:
    """A likelihood that a user writes."""

    def log_likelihood(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return torch.distributions.Poisson(outputs.double().exp()).log_prob(targets.double()).squeeze(-1)

    def statistics(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        rate = outputs.double().exp()
        return {"mean": rate, "square": rate + rate.square()}


def test_a_likelihood_can_be_written() -> None:
    module, q = linear(3, std=0.0)
    inputs, targets = normal(2, 5, 3), torch.tensor([[0.0], [1.0], [2.0], [0.0], [4.0]])
    found = predict(q, module, [(inputs, targets)], samples=2, generator=generator(0), likelihood=Poisson())
    rate = (inputs @ q.mean["weight"].T + q.mean["bias"]).exp()
    assert torch.allclose(found.std, rate.sqrt())
    assert found.loss == pytest.approx(-float(torch.distributions.Poisson(rate).log_prob(targets).mean()))
    with pytest.raises(ValueError, match="is not for classes"):
        _ = found.accuracy


def permuted_pair() -> tuple[nn.Module, GaussianPosterior, GaussianPosterior, Symmetry, Element, Batches]:
    """Return a classifier, and a noisy copy with permuted units. An element undoes the permutation."""
    module, _, symmetry = network("tanh")
    q_a = KINDS["gaussian"]("tanh", 1)
    assert isinstance(q_a, GaussianPosterior)
    mean = {n: 2 * normal(k, *t.shape) for k, (n, t) in enumerate(q_a.mean.items())}
    q_a = GaussianPosterior(mean, {n: 0.5 * t for n, t in q_a.std.items()})
    inputs = normal(50, 60, 3)
    targets = functional_call(module, mean, (inputs,)).argmax(-1)
    g = symmetry.random(generator(8))
    q_b = q_a._replace(std={n: 1.3 * t for n, t in q_a.std.items()}).push(symmetry, g)
    return module, q_a, q_b, symmetry, symmetry.inverse(g), [(inputs, targets)]


def test_a_mixture_hides_the_barrier_that_alignment_removes() -> None:
    module, q_a, q_b, symmetry, element, data = permuted_pair()
    noise = q_a.draw(64, generator(0))
    naive = posterior_line(q_a, q_b, module, data, noise=noise, points=9)
    mixed = posterior_line(q_a, q_b, module, data, noise=noise, points=9, path=mixture)
    back = q_b.push(symmetry, element)
    aligned = posterior_line(q_a, back, module, data, noise=noise, points=9)
    assert naive.barrier > 0.2
    assert mixed.barrier == 0.0
    assert max(mixed.excess[1:-1]) < 0
    assert aligned.barrier < 0.02 * naive.barrier
    for end in (0, -1):
        assert mixed.table[end] == naive.table[end]
    found = mixed.table[4]
    ends = [predict(q, module, data, noise=noise) for q in (q_a, q_b)]
    both = torch.cat([end.log_likelihoods for end in ends])
    assert found["loss"] == pytest.approx(of_values(both).loss)
    assert found["gibbs"] == pytest.approx(sum(end.gibbs for end in ends) / 2)


def test_moved_noise_leaves_the_aligned_end_where_it_was() -> None:
    module, q_a, q_b, symmetry, element, data = permuted_pair()
    noise = q_b.draw(16, generator(1))
    back = q_b.push(symmetry, element)
    moved = q_b.push_noise(symmetry, element, noise)
    before = posterior_line(q_a, q_b, module, data, noise=noise, points=3).table[-1]
    with_moved = posterior_line(q_a, back, module, data, noise=moved, points=3).table[-1]
    assert with_moved["loss"] == pytest.approx(before["loss"], abs=1e-12)
    with_other = posterior_line(q_a, back, module, data, noise=noise, points=3).table[-1]
    assert with_other["loss"] != pytest.approx(before["loss"], abs=1e-4)


def test_common_noise_makes_the_barrier_more_precise_than_its_ends() -> None:
    """Over repetitions, the reported error of the barrier equals its spread, and is far below the error of independent
    losses.
    """
    module, q_a, _, _, _, data = permuted_pair()
    q_b = q_a._replace(mean={n: t + 0.3 * normal(90 + k, *t.shape) for k, (n, t) in enumerate(q_a.mean.items())})
    curves = [
        posterior_line(q_a, q_b, module, data, samples=24, generator=generator(seed), points=3) for seed in range(60)
    ]
    spread = float(torch.tensor([curve.excess[1] for curve in curves]).std())
    errors = sum(curve.excess_errors[1] for curve in curves) / len(curves)
    assert errors == pytest.approx(spread, rel=0.35)
    first, middle, last = (sum(curve.table[k]["error"] for curve in curves) / len(curves) for k in range(3))
    independent = math.sqrt(middle**2 + (first**2 + last**2) / 4)
    assert errors < independent / 2
    for curve in curves[:3]:
        peak = max(range(3), key=curve.excess.__getitem__)
        assert curve.error == curve.excess_errors[peak]
        assert curve.excess_errors[0] == curve.excess_errors[-1] == 0.0


@pytest.mark.parametrize("kind", KINDS)
def test_lines_connect_every_kind(kind: str) -> None:
    module, _, _ = network("relu")
    q_a, q_b = KINDS[kind]("relu", 1), KINDS[kind]("relu", 2)
    noise = q_a.draw(5, generator(0))
    curve = posterior_line(q_a, q_b, module, data_of("relu"), noise=noise, points=3)
    assert [row["t"] for row in curve.table] == [0.0, 0.5, 1.0]
    for row, q in ((curve.table[0], q_a), (curve.table[1], geodesic(q_a, q_b).at(0.5))):
        direct = predict(q, module, data_of("relu"), noise=noise)
        assert row["loss"] == pytest.approx(direct.loss, abs=1e-10)
        assert row["error"] == pytest.approx(direct.error, abs=1e-10)
    assert {"loss", "error", "gibbs", "corrected", "accuracy", "ece"} < curve.table[0].keys()
    assert "Monte Carlo error" in str(curve)


def test_a_slice_shows_likelihood_and_prior_apart() -> None:
    module, q_a, q_b, symmetry, element, data = permuted_pair()
    back = q_b.push(symmetry, element)
    back = back._replace(mean={n: t + 0.1 * normal(70 + k, *t.shape) for k, (n, t) in enumerate(back.mean.items())})
    found = posterior_slice(q_a, q_b, back, module, data, prior_std=1.5, resolution=5)
    values, at_points = found.plane.values, found.plane.at_points
    assert found.examples == 60
    assert torch.allclose(values["log_posterior"], values["log_likelihood"] + values["log_prior"])
    assert torch.allclose(found.per_example("log_likelihood"), -found.per_example("loss"))
    assert torch.allclose(found.per_example("log_prior") * 60, values["log_prior"])
    for k, q in enumerate((q_a, q_b, back)):
        prior = sum(float(torch.distributions.Normal(0, 1.5).log_prob(t).sum()) for t in q.mean.values())
        assert float(at_points["log_prior"][k]) == pytest.approx(prior)
        point = predict(q.mean, module, data)
        assert float(at_points["log_likelihood"][k]) == pytest.approx(-60 * point.loss)
    x, y = found.plane.basis
    assert sum(float((x[n] * y[n]).sum()) for n in x) == pytest.approx(0, abs=1e-9)
    assert sum(float(x[n].square().sum()) for n in x) == pytest.approx(1)
    sampled: list[Params] = [
        {n: t[0] for n, t in q.at(q.draw(1, generator(k))).items()} for k, q in enumerate((q_a, q_b, back))
    ]
    through = posterior_slice(*sampled, module, data, prior_std=1.5, resolution=3)
    assert float(through.plane.at_points["loss"][2]) == pytest.approx(predict(sampled[2], module, data).loss)


def test_variance_collapses_between_posteriors_that_are_not_aligned() -> None:
    module, q_a, q_b, symmetry, element, data = permuted_pair()
    inputs = [data[0][0][:40], data[0][0][40:]]
    noise = q_a.draw(6, generator(0))
    path = geodesic(q_a, q_b)
    naive = posterior_collapse(path.at(0.5), (q_a, q_b), module, inputs, noise=noise)
    back = q_b.push(symmetry, element)
    aligned = posterior_collapse(geodesic(q_a, back).at(0.5), (q_a, back), module, inputs, noise=noise)
    assert [row.layer for row in naive.samples.table] == ["0", "2", "4"]
    assert naive.samples.table[1].ratio < 0.8 < 0.95 < aligned.samples.table[1].ratio < 1.05
    assert naive.averages.table[1].ratio < 0.8 < 0.9 < aligned.averages.table[1].ratio < 1.1
    for kind in (naive, aligned):
        assert all(a.variance <= s.variance for a, s in zip(kind.averages.table, kind.samples.table, strict=True))
    at_ends = posterior_collapse(q_b, (q_a, q_b), module, inputs, noise=noise, weights=(0.0, 1.0))
    assert all(row.ratio == pytest.approx(1) for table in (at_ends.samples, at_ends.averages) for row in table.table)


def test_collapse_of_certain_posteriors_is_that_of_networks() -> None:
    module, q_a, q_b, _, _, data = permuted_pair()
    inputs = [data[0][0][:40], data[0][0][40:]]
    ends = [q._replace(std={n: 0 * t for n, t in q.std.items()}) for q in (q_a, q_b)]
    middle = geodesic(*ends).at(0.3)
    found = posterior_collapse(middle, ends, module, inputs, noise=ends[0].draw(3, generator(0)), weights=(0.7, 0.3))
    expected = variance_collapse(middle.moments().mean, module, [q.mean for q in ends], inputs, weights=(0.7, 0.3))
    for table in (found.samples, found.averages):
        for row, wanted in zip(table.table, expected.table, strict=True):
            assert row.variance == pytest.approx(wanted.variance)
            assert row.expected == pytest.approx(wanted.expected)
            assert replace(row, variance=0.0, expected=0.0, ratio=0.0) == replace(
                wanted, variance=0.0, expected=0.0, ratio=0.0
            )


def test_few_samples_say_so() -> None:
    one = of_values(normal(0, 1, 5))
    assert math.isnan(one.error)
    assert math.isnan(one.corrected)
    assert one.loss == one.gibbs


MISUSE: dict[str, tuple[str, Callable[[nn.Module, GaussianPosterior, Batches], object]]] = {
    "no samples": ("give `noise`", lambda m, q, d: predict(q, m, d)),
    "twice": (
        "give `noise`",
        lambda m, q, d: predict(q, m, d, noise=q.draw(2, generator(0)), samples=2, generator=generator(0)),
    ),
    "no generator": ("torch.Generator", lambda m, q, d: predict(q, m, d, samples=2)),
    "samples of a network": (
        "of one network",
        lambda m, q, d: predict(q.mean, m, d, samples=2, generator=generator(0)),
    ),
    "no examples": ("no examples", lambda m, q, d: predict(q.mean, m, [])),
    "all ignored": ("no examples", lambda m, q, d: predict(q.mean, m, [(d[0][0], d[0][1] * 0 - 100)])),
    "no chunk": ("chunk=0", lambda m, q, d: predict(q, m, d, noise=q.draw(2, generator(0)), chunk=0)),
    "not finite": (
        "NaN or Inf",
        lambda m, q, d: predict({n: t * math.nan for n, t in q.mean.items()}, m, d),
    ),
    "unknown class": ("counted from 0", lambda m, q, d: predict(q.mean, m, [(d[0][0], d[0][1] + 5)])),
    "numbers as classes": ("integer classes", lambda m, q, d: predict(q.mean, m, [(d[0][0], d[0][1].double())])),
    "shapes": (
        "must agree",
        lambda m, q, d: predict(q.mean, m, [(d[0][0], d[0][1].double())], likelihood=Normal(1.0)),
    ),
    "numbers of classes": ("is not for numbers", lambda m, q, d: predict(q.mean, m, d).std),
    "no bins": ("bins=0", lambda m, q, d: predict(q.mean, m, d).calibration(0)),
    "no noise": ("must be positive", lambda m, q, d: Normal(0.0)),
    "no prior": ("must be positive", lambda m, q, d: posterior_slice(q, q, q, m, d, prior_std=0.0)),
    "two points": (
        "at least one point between",
        lambda m, q, d: posterior_line(q, q, m, d, samples=2, generator=generator(0), points=2),
    ),
    "noise twice": (
        "leave one",
        lambda m, q, d: posterior_line(q, q, m, d, noise=q.draw(2, generator(0)), samples=2),
    ),
}


@pytest.mark.parametrize("case", MISUSE)
def test_misuse_is_explained(case: str) -> None:
    message, run = MISUSE[case]
    module, _, _ = network("relu")
    q = KINDS["gaussian"]("relu", 1)
    assert isinstance(q, GaussianPosterior)
    with pytest.raises(ValueError, match=message):
        run(module, q, data_of("relu"))


def test_modules_keep_their_mode() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2)).double()
    params = {n: t.detach() for n, t in module.state_dict().items()}
    data = data_of("relu")
    first, second = (predict(params, module, data).loss for _ in range(2))
    assert first == second
    assert module.training
    assert Categorical().log_likelihood(torch.zeros(2, 4), torch.tensor([0, 3])).tolist() == [-math.log(4)] * 2

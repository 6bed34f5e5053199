"""What is said about generated networks: copies are told from new ones, and scores are those of the definitions."""

import pytest
import torch
from torch import Tensor

import regauge as rg
from regauge import flow
from regauge.core.params import Params, select
from regauge.flow.controls import nearest
from regauge.nets.mlp import mlp

INPUTS = torch.randn(40, 3, generator=torch.Generator().manual_seed(9))
CLASSES = (INPUTS[:, 0] > 0).long()


@pytest.fixture(scope="module")
def judged() -> tuple[rg.Symmetry, Params, Params, rg.Task]:
    """Random networks around one teacher in random orders and scales, for training and held out."""
    module = mlp(3, 6, 2)
    symmetry = rg.discover(module, (INPUTS,))
    chance = torch.Generator().manual_seed(0)
    teacher = {n: torch.randn(t.shape, generator=chance) for n, t in module.state_dict().items()}

    def draw(count: int) -> Params:
        drawn = {n: t + 0.3 * torch.randn(count, *t.shape, generator=chance) for n, t in teacher.items()}
        return symmetry.act(symmetry.random(chance, batch=(count,)), drawn)

    return symmetry, draw(60), draw(30), rg.Task(module, [(INPUTS[:25], CLASSES[:25]), (INPUTS[25:], CLASSES[25:])])


def test_the_alarm_rings_for_copies_and_not_for_new_networks(
    judged: tuple[rg.Symmetry, Params, Params, rg.Task],
) -> None:
    symmetry, train, held_out, task = judged
    chance = torch.Generator().manual_seed(1)
    moved = symmetry.act(symmetry.random(chance, batch=(20,)), select(train, slice(0, 20)))
    copies = flow.judge(moved, train, held_out, symmetry, task)
    assert copies.is_copier
    assert copies["generated"].distance < 0.1
    assert "are copies of training networks" in str(copies)
    fresh = flow.judge(select(held_out, slice(0, 15)), train, select(held_out, slice(15, 30)), symmetry, task)
    assert not fresh.is_copier
    assert fresh["generated"].distance == pytest.approx(1, abs=0.25)
    assert fresh["generated"].spread == pytest.approx(1, abs=0.2)
    assert fresh["generated"].two_sample < fresh["means of 16"].two_sample
    assert fresh["copies with noise"].distance == pytest.approx(1, abs=0.2)
    assert fresh["copies"].distance == pytest.approx(0, abs=1e-3)
    assert fresh["means of 16"].spread < 0.5
    assert {score.networks for score in fresh.scores} == {15}


def test_scores_are_those_of_their_definitions(judged: tuple[rg.Symmetry, Params, Params, rg.Task]) -> None:
    symmetry, train, held_out, task = judged
    few = select(held_out, slice(0, 3))
    score = flow.judge(few, train, held_out, symmetry, task)["generated"]

    def run(params: Params) -> Tensor:
        return torch.func.functional_call(task.module, params, (INPUTS,)).softmax(-1).double()

    made = torch.stack([run(select(few, k)) for k in range(3)])
    each = [task.evaluate(select(few, k)) for k in range(3)]
    assert score.loss == pytest.approx(sum(one["loss"] for one in each) / 3)
    assert score.accuracy == pytest.approx(sum(one["accuracy"] for one in each) / 3)
    assert score.average_accuracy == pytest.approx(float((made.mean(0).argmax(-1) == CLASSES).double().mean()))
    pairs = [(0, 1), (0, 2), (1, 2)]
    differs = [float((made[a].argmax(-1) != made[b].argmax(-1)).double().mean()) for a, b in pairs]
    assert score.disagreement == pytest.approx(sum(differs) / 3)
    divergence = []
    for a, b in pairs:
        middle = (made[a] + made[b]) / 2
        parts = [(p * (p.log() - middle.log())).sum(-1).mean() for p in (made[a], made[b])]
        divergence.append(float(sum(parts) / 2))
    assert score.divergence == pytest.approx(sum(divergence) / 3, rel=1e-5)


def test_a_function_judges_too_and_one_network_is_refused(judged: tuple[rg.Symmetry, Params, Params, rg.Task]) -> None:
    symmetry, train, held_out, task = judged
    found = flow.judge(held_out, train, held_out, symmetry, lambda params: {"loss": task.evaluate(params)["loss"]})
    assert found["generated"].accuracy is None
    assert found["generated"].loss == pytest.approx(found["held-out"].loss)
    with pytest.raises(ValueError, match="`samples` has 1 networks"):
        flow.judge(select(held_out, slice(0, 1)), train, held_out, symmetry, task)


@pytest.mark.parametrize("scales", ["sphere", "keep"])
def test_the_nearest_network_is_the_nearest_of_all(
    judged: tuple[rg.Symmetry, Params, Params, rg.Task], scales: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regauge.flow.controls.FEW", 1)  # The straight distance alone is wrong for some.
    symmetry, train, held_out, _ = judged
    space = flow.Space.of(train, symmetry, flow.Representation(scales))  # type: ignore[arg-type]
    known, points = space.enter(train, torch.float64), space.enter(held_out, torch.float64)
    distances, numbers = nearest(space, points, known)
    every = torch.stack([space.distance(point.unsqueeze(0), known) for point in points])
    assert torch.equal(numbers, every.argmin(1))
    assert torch.allclose(distances, every.amin(1))
    straight = torch.cdist(points, known).argmin(1)
    assert torch.equal(straight, numbers) == (scales == "keep")

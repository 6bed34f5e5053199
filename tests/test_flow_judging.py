"""Judgements of generated networks: copies are distinguished from new networks, and scores follow their definitions."""

import itertools

import pytest
import torch
from torch import Tensor

import regauge as rg
from regauge import flow
from regauge.core.params import Params, select
from regauge.data.images import digits
from regauge.flow.alignment import align_points, find_reference
from regauge.flow.judging import KnownNetworks
from regauge.flow.novelty import find_chance, measure, nearest
from regauge.nets.mlp import mlp

INPUTS = torch.randn(40, 3, generator=torch.Generator().manual_seed(9))
CLASSES = (INPUTS[:, 0] > 0).long()


@pytest.fixture(scope="module")
def judged() -> tuple[rg.Symmetry, Params, Params, rg.Task]:
    """Return random networks around one teacher, in random orders and scales, for training and held out."""
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
    assert "They are copies of training networks" in str(copies)
    fresh = flow.judge(select(held_out, slice(0, 15)), train, select(held_out, slice(15, 30)), symmetry, task)
    assert not fresh.is_copier
    assert fresh["generated"].distance == pytest.approx(1, abs=0.25)
    assert fresh["generated"].spread == pytest.approx(1, abs=0.2)
    assert fresh["generated"].two_sample < fresh["means of 16"].two_sample
    assert fresh["copies with noise"].distance == pytest.approx(1, abs=0.2)
    assert fresh["copies"].distance == pytest.approx(0, abs=1e-3)
    assert fresh["means of 16"].spread < 0.5
    assert {score.networks for score in fresh.scores} == {15}


def test_known_networks_are_judged_once_for_many_judgements(
    judged: tuple[rg.Symmetry, Params, Params, rg.Task],
) -> None:
    symmetry, train, held_out, task = judged
    known = KnownNetworks.of(train, select(held_out, slice(15, 30)), symmetry, task, 5)
    for start in (0, 5):
        drawn = select(held_out, slice(start, start + 5))
        alone = flow.judge(drawn, train, select(held_out, slice(15, 30)), symmetry, task)
        assert known.judge(drawn).results() == alone.results()
    with pytest.raises(ValueError, match="`samples` has 1 networks"):
        known.judge(select(held_out, slice(0, 1)))


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


@pytest.fixture(scope="module")
def apart() -> tuple[rg.Symmetry, Params, rg.Task]:
    """Return small classifiers of digits with separate initializations, and the task on which they were tested."""
    data = digits()
    module = mlp(64, 16, 16, 10)
    chance = torch.Generator().manual_seed(0)
    params = {
        n: (torch.randn(80, *t.shape, generator=chance) * (1.4 * t.shape[-1] ** -0.5 if t.ndim > 1 else 0)).detach()
        for n, t in module.state_dict().items()
    }
    for tensor in params.values():
        tensor.requires_grad_()
    optimizer = torch.optim.Adam(params.values(), 3e-3)
    images, labels = data.train_images.flatten(1), data.train_labels
    for _ in range(300):
        some = torch.randint(len(labels), (80, 64), generator=chance)
        outputs = torch.func.vmap(lambda p, x: torch.func.functional_call(module, p, (x,)))(params, images[some])
        optimizer.zero_grad()
        (80 * torch.nn.functional.cross_entropy(outputs.flatten(0, 1), labels[some].flatten())).backward()
        optimizer.step()
    trained = {name: tensor.detach() for name, tensor in params.items()}
    task = rg.Task(module, [(data.test_images.flatten(1), data.test_labels)])
    return rg.discover(module, (images[:2],)), trained, task


@pytest.fixture(scope="module")
def known(apart: tuple[rg.Symmetry, Params, rg.Task]) -> KnownNetworks:
    """Return the first forty of these networks for training, twenty more as held-out networks, and twenty networks of
    each control.
    """
    symmetry, trained, task = apart
    train, held_out = select(trained, slice(0, 40)), select(trained, slice(40, 60))
    return KnownNetworks.of(train, held_out, symmetry, task, 20)


def shake(params: Params, noise: float, chance: torch.Generator) -> Params:
    """Return networks with noise, as a share of each tensor's deviation."""
    return {
        n: t + noise * t.flatten(1).std(1).reshape(-1, *[1] * (t.ndim - 1)) * torch.randn(t.shape, generator=chance)
        for n, t in params.items()
    }


@pytest.mark.parametrize(("noise", "most"), [(0.05, 0.1), (0.2, 0.3), (0.4, 0.65)])
def test_a_copy_with_noise_is_a_copy(
    apart: tuple[rg.Symmetry, Params, rg.Task], known: KnownNetworks, noise: float, most: float
) -> None:
    """Distances after alignment to one mean would be larger, because a copy has another order than its source."""
    symmetry, trained, _ = apart
    train = select(trained, slice(0, 40))
    chance = torch.Generator().manual_seed(1)
    copies = shake(select(train, slice(0, 20)), noise, chance)
    copies = symmetry.act(symmetry.random(chance, batch=(20,)), copies)
    found = known.judge(copies)
    assert found.is_copier
    assert found["generated"].distance < most
    assert found["generated"].copied > 0.9
    space = flow.Space.of(train, symmetry)
    points = [space.enter(one) for one in (copies, select(train, slice(0, 20)))]
    sources = measure(space, *(align_points(space, points[0][0], one) for one in points))
    unit = found["generated"].distance / float(sources.median())  # The true distance, in the same unit.
    assert float((sources * unit).median()) == pytest.approx(found["generated"].distance, rel=1e-3)
    assert not found.is_collapsed


def test_a_part_of_copies_and_networks_that_repeat_fail_and_new_ones_pass(
    apart: tuple[rg.Symmetry, Params, rg.Task], known: KnownNetworks
) -> None:
    symmetry, trained, _ = apart
    train, fresh = (select(trained, slice(*ends)) for ends in ((0, 40), (60, 80)))
    chance = torch.Generator().manual_seed(1)
    passed = known.judge(fresh)
    assert passed.is_working
    assert not passed.is_copier
    assert passed["generated"].distance == pytest.approx(1, abs=0.1)
    assert passed["generated"].copied <= 0.1
    assert passed["generated"].repeated == 0
    assert passed.verdict[0].startswith("The sampled networks work: ")

    copies = shake(select(train, slice(0, 10)), 0.3, chance)
    mixed = {n: torch.cat([t[:10], copies[n]]) for n, t in fresh.items()}
    mixed = symmetry.act(symmetry.random(chance, batch=(20,)), mixed)
    half = known.judge(mixed)
    assert half.is_copier
    assert half["generated"].copied == pytest.approx(0.5, abs=0.1)
    assert "copies of training networks" in half.verdict[1]

    one = {n: t[:1].expand(50, *t.shape[1:]) for n, t in fresh.items()}
    one = symmetry.act(symmetry.random(chance, batch=(50,)), shake(one, 0.01, chance))
    same = known.judge(one)
    assert same.is_collapsed
    assert same.is_copier
    assert same["generated"].copied == 0
    assert same["generated"].spread < 0.05
    assert "copies of one another: 100%" in " ".join(same.verdict)


def test_the_first_sentence_says_whether_they_work(
    apart: tuple[rg.Symmetry, Params, rg.Task], known: KnownNetworks
) -> None:
    symmetry, trained, task = apart
    train, held_out = select(trained, slice(0, 40)), select(trained, slice(40, 60))
    chance = torch.Generator().manual_seed(1)
    broken = {n: t.std() * torch.randn(10, *t.shape[1:], generator=chance) for n, t in train.items()}
    found = known.judge(broken)
    assert found.is_working is False
    assert found.verdict[0].startswith("The sampled networks do not work: ")
    assert f"{found['generated'].accuracy:.1%} accuracy against {found['held-out'].accuracy:.1%}" in found.verdict[0]
    assert str(found).startswith(found.verdict[0])
    worse = known.judge(shake(held_out, 0.4, chance))
    assert worse.verdict[0].startswith("The sampled networks work worse")

    def loss(params: Params) -> dict[str, float]:
        return {"loss": task.evaluate(params)["loss"]}

    assert flow.judge(held_out, train, held_out, symmetry, loss).is_working
    assert flow.judge(broken, train, held_out, symmetry, loss).is_working is False
    random = flow.judge(held_out, train, broken, symmetry, task)
    assert random.is_working is None or random["held-out"].accuracy > random.one_answer  # type: ignore[operator]


@pytest.mark.parametrize("scales", ["sphere", "keep"])
def test_the_nearest_network_is_that_of_all_pairs_aligned(
    judged: tuple[rg.Symmetry, Params, Params, rg.Task], scales: str
) -> None:
    symmetry, train, held_out, _ = judged
    space = flow.Space.of(train, symmetry, flow.Representation(scales))  # type: ignore[arg-type]
    known, points = space.enter(train, torch.float64), space.enter(held_out, torch.float64)
    middle = find_reference(space, known)
    known, points = (align_points(space, middle, one) for one in (known, points))
    distances, numbers = nearest(space, points, known)
    every = torch.stack([measure(space, point.expand_as(known), known) for point in points])
    assert (numbers == every.argmin(1)).double().mean() > 0.8  # The few in the common gauge need not hold it.
    assert torch.allclose(distances, every.gather(1, numbers.unsqueeze(1))[:, 0])
    assert (distances / every.amin(1) < 1.1).all()
    twins, others = nearest(space, known, known, is_same=True)
    assert (others != torch.arange(len(known))).all()
    assert (twins > 0).all()


def test_chance_is_that_of_all_orders() -> None:
    orders = list(itertools.permutations(range(6)))  # Generated networks are 0, 1, 2; held-out ones 3, 4, 5.
    for near, held_out in itertools.product(range(1, 4), range(3)):
        ends = [order.index([k for k in order if k > 2][held_out]) for order in orders]
        met = [sum(k < 3 for k in order[:end]) for order, end in zip(orders, ends, strict=True)]
        assert find_chance(near, 3, held_out, 3) == pytest.approx(sum(count >= near for count in met) / len(orders))

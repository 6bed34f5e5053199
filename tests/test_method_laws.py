"""The laws of alignment, for every public method and every kind of group."""

import inspect
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from coverings import covering
from methods import (
    CHANCE,
    EVERY,
    MODULES,
    are_close,
    are_equal,
    module_case,
    moved_by,
    needs_data,
    network_for,
    outputs,
    reads_activations,
    task_for,
    teacher_task,
    tensors_of,
)
from symmetries import BY_HAND, drawn, experts, generator, mlp_symmetry

import regauge as rg
from regauge import Params, Symmetry
from regauge.alignment import METHODS, Method

EXACT = ("permutation", "sign")
"""Parts of an element that every method can determine."""
ONE_BY_ONE = [label for label, method in EVERY.items() if not method.joint_roles and label not in CHANCE]
"""Methods for pairs that need no generator."""
each_method = pytest.mark.parametrize("label", EVERY)


def by_hand() -> list[Any]:
    """Return every method that does not need a module's activations, with every symmetry."""
    labels = [label for label, method in EVERY.items() if not reads_activations(method)]
    return [pytest.param(label, name, id=f"{label}-{name}") for label in labels for name in BY_HAND]


def align(label: str, a: Params, b: Params, symmetry: Symmetry, task: rg.Task | None = None) -> Any:
    method = EVERY[label]
    task = task_for(method, a) if task is None else task
    return rg.align(
        network_for(method, a), network_for(method, b), symmetry, method=method, task=task, generator=generator(0)
    )


def test_every_public_method_is_in_the_table_and_here() -> None:
    public = {value for value in vars_of(rg.alignment) if issubclass(value, Method) and not inspect.isabstract(value)}
    classes = {row.load() for row in METHODS.values()}
    assert public <= classes
    assert classes <= {type(method) for method in EVERY.values()}


def vars_of(package: Any) -> list[type]:
    return [value for name in package.__all__ if isinstance(value := getattr(package, name), type)]


def test_every_method_is_in_the_docs() -> None:
    text = (Path(__file__).parents[1] / "docs" / "alignment.md").read_text()
    assert not [row.name for row in METHODS.values() if f"`{row.name}" not in text]
    commands = [name for name, row in METHODS.items() if row.takes != "joint"]
    assert not [name for name in commands if f"`{name}`" not in text]


@pytest.mark.parametrize(("label", "name"), by_hand())
def test_it_is_never_worse_than_the_identity_and_moves_as_it_says(label: str, name: str) -> None:
    symmetry, method = BY_HAND[name], EVERY[label]
    a, b = drawn(symmetry, 0), drawn(symmetry, 1)
    kept = [{key: tensor.clone() for key, tensor in params.items()} for params in (a, b)]
    result = align(label, a, b, symmetry)
    assert result.objective >= result.initial
    assert all(x <= y for x, y in itertools.pairwise(result.history))
    assert not result.history or result.history[-1] == pytest.approx(result.objective)
    assert not result.starts or result.objective == pytest.approx(max(result.initial, *result.starts))
    assert are_equal(result.params, moved_by(method, symmetry, result.element, network_for(method, b)))
    assert are_equal(a, kept[0])
    assert are_equal(b, kept[1])


@pytest.mark.parametrize(("label", "name"), covering(EVERY, MODULES, part=0))
def test_the_function_is_unchanged(label: str, name: str) -> None:
    module, inputs, symmetry = module_case(name)
    a, b = drawn_like(module, 0), drawn_like(module, 1)
    result = align(label, a, b, symmetry, teacher_task(module, a, inputs))
    params = result.params[0] if EVERY[label].joint_roles else result.params
    assert torch.allclose(outputs(module, params, inputs), outputs(module, b, inputs), atol=1e-9)
    assert result.objective >= result.initial
    assert all(x <= y for x, y in itertools.pairwise(result.history))


def drawn_like(module: torch.nn.Module, seed: int) -> Params:
    noise = generator(seed)
    return {
        name: 0.5 * torch.randn(tensor.shape, generator=noise, dtype=tensor.dtype)
        for name, tensor in module.state_dict().items()
    }


@pytest.mark.parametrize("name", ["permutation", "signed"])
@pytest.mark.parametrize("label", [label for label, method in EVERY.items() if not needs_data(method)])
def test_a_symmetry_that_does_not_hold_is_caught_by_the_function(label: str, name: str) -> None:
    """The negative test of the law above: one axis is untied, so a closer network computes another function."""
    module, inputs, symmetry = module_case(name)
    (group,) = symmetry.groups
    places = tuple(place for place in group.placements if place.parameter != "2.weight")
    broken = replace(symmetry, groups=(replace(group, placements=places),))
    a = drawn_like(module, 0)
    b = symmetry.act(symmetry.random(generator(1), EXACT), a)
    result = align(label, a, b, broken)
    params = result.params[0] if EVERY[label].joint_roles else result.params
    assert not torch.allclose(outputs(module, params, inputs), outputs(module, b, inputs), atol=1e-3)


@pytest.mark.parametrize(("label", "name"), covering(EVERY, MODULES, part=1))
def test_equal_networks_stay(label: str, name: str) -> None:
    module, inputs, symmetry = module_case(name)
    a = drawn_like(module, 0)
    result = align(label, a, a, symmetry, teacher_task(module, a, inputs))
    assert are_close(result.params, network_for(EVERY[label], a), atol=1e-6)


@pytest.mark.parametrize(
    ("label", "name"), covering(EVERY, ["permutation", "signed", "dihedral", "scaled"], part=0, of=2)
)
def test_a_planted_element_of_one_hidden_layer_is_recovered(label: str, name: str) -> None:
    module, inputs, symmetry = module_case(name)
    method, a = EVERY[label], drawn_like(module, 0)
    element = symmetry.random(generator(1), EXACT)
    stay = network_for(method, a)
    away = moved_by(method, symmetry, element, stay)
    if method == rg.Sinkhorn(loss="l2", init=None, steps=4, every=2):
        method = replace(method, steps=80, lr=0.3)
    result = rg.align(stay, away, symmetry, method=method, task=teacher_task(module, a, inputs), generator=generator(0))
    assert are_close(result.params, stay, atol=1e-6)


@pytest.mark.parametrize(("label", "name"), covering(EVERY, ["permutation", "signed", "dihedral"], part=1, of=2))
def test_where_the_second_network_begins_does_not_matter(label: str, name: str) -> None:
    """`align(a, g b)` equals `align(a, b)` if the optimum is unique. In this test, b is close to a."""
    module, inputs, symmetry = module_case(name)
    method, a = EVERY[label], drawn_like(module, 0)
    b = {key: tensor + 0.01 * drawn_like(module, 1)[key] for key, tensor in a.items()}
    task = teacher_task(module, a, inputs)
    stay, near = network_for(method, a), network_for(method, b)
    away = moved_by(method, symmetry, symmetry.random(generator(2), EXACT), near)
    if method == rg.Sinkhorn(loss="l2", init=None, steps=4, every=2):
        method = replace(method, steps=80, lr=0.3)
    first, second = (
        rg.align(stay, x, symmetry, method=method, task=task, generator=generator(0)).params for x in (near, away)
    )
    assert are_close(first, second, atol=1e-6)


@pytest.mark.parametrize(("label", "name"), covering(CHANCE, BY_HAND, part=1))
def test_chance_comes_from_the_generator_alone(label: str, name: str) -> None:
    symmetry = BY_HAND[name]
    a, b = drawn(symmetry, 1), drawn(symmetry, 2)
    first, again = (align(label, a, b, symmetry) for _ in range(2))
    assert (first.history, first.starts) == (again.history, again.starts)
    assert are_equal(first.params, again.params)


@each_method
def test_the_same_generator_gives_the_same_result(label: str) -> None:
    module, inputs, symmetry = module_case("signed")
    a, b = drawn_like(module, 0), drawn_like(module, 1)
    first, again = (align(label, a, b, symmetry, teacher_task(module, a, inputs)) for _ in range(2))
    assert first.history == again.history
    assert first.starts == again.starts
    assert are_equal(first.params, again.params)


@pytest.mark.parametrize(("label", "name"), covering(ONE_BY_ONE, MODULES, part=2))
def test_a_batch_of_pairs_is_its_pairs_one_by_one(label: str, name: str) -> None:
    method = EVERY[label]
    module, inputs, symmetry = module_case(name)
    many = [[drawn_like(module, seed + k) for k in range(3)] for seed in (0, 10)]
    a, b = ({key: torch.stack([one[key] for one in networks]) for key in networks[0]} for networks in many)
    task = teacher_task(module, many[0][0], inputs)
    result = rg.alignment.align_pairs(a, b, symmetry, method=method, task=task)
    for k, (x, y) in enumerate(zip(*many, strict=True)):
        one = rg.align(x, y, symmetry, method=method, task=task)
        assert float(result.objective[k]) == pytest.approx(one.objective, rel=1e-6, abs=1e-9)
        assert float(result.initial[k]) == pytest.approx(one.initial, rel=1e-6, abs=1e-9)
        assert are_close(result.item(k).params, one.params, atol=1e-5)


@each_method
def test_many_networks_are_in_one_universe(label: str) -> None:
    module, inputs, symmetry = module_case("signed")
    method = EVERY[label]
    if method == rg.GaussianMatching(cost="symmetric kl"):
        return
    networks = [network_for(method, drawn_like(module, seed)) for seed in range(3)]
    task = teacher_task(module, drawn_like(module, 0), inputs)
    result, again = (
        rg.align_many(networks, symmetry, method=method, task=task, generator=generator(0)) for _ in range(2)
    )
    assert (result.history, result.starts) == (again.history, again.starts)
    assert all(are_equal(x, y) for x, y in zip(result.params, again.params, strict=True))
    assert result.objective >= result.initial
    assert are_equal(result.params[0], networks[0])
    for element, network, moved in zip(result.elements, networks, result.params, strict=True):
        assert are_close(moved, moved_by(method, symmetry, element, network), atol=1e-12)
    there = symmetry.compose(result.pairwise(0, 1), result.pairwise(1, 2))
    assert are_close(symmetry.act(there, networks_first(networks[2])), networks_first(result.params[2]))


def networks_first(network: Any) -> Params:
    return network[0] if isinstance(network, tuple) else network


@each_method
def test_dtypes_are_kept(label: str) -> None:
    module, inputs, symmetry = module_case("signed")
    a, b = ({key: tensor.float() for key, tensor in drawn_like(module, seed).items()} for seed in (0, 1))
    single = replace(teacher_task(module, drawn_like(module, 0), inputs), batches=[])
    batches = [(inputs.float(), outputs(module, a, inputs.float()))]
    result = align(label, a, b, symmetry, replace(single, batches=batches))
    for tensor in tensors_of(result.params).values():
        assert (tensor.dtype, tensor.device.type) == (torch.float32, "cpu")


@each_method
def test_what_does_not_fit_is_refused(label: str) -> None:
    symmetry, method = mlp_symmetry(3, 4, 2), EVERY[label]
    a, b = drawn(symmetry, 0), drawn(symmetry, 1)
    wrong = {**b, "0.weight": torch.full_like(b["0.weight"], torch.nan)}
    with pytest.raises(ValueError, match=r"'0.weight' of the second network holds NaN or Inf in 12 of"):
        align(label, a, wrong, symmetry)
    other = drawn(mlp_symmetry(3, 5, 2), 1)
    with pytest.raises(ValueError, match=r"'0.weight' has shape \(4, 3\) in the first network and \(5, 3\)"):
        align(label, a, other, symmetry)
    with pytest.raises(TypeError, match=f"{type(method).__name__} aligns"):
        rg.align(*((a, a, a, a),) * 2, symmetry, method=method)
    networks = network_for(method, a), network_for(method, b)
    if needs_data(method):
        with pytest.raises(ValueError, match=f"{type(method).__name__} needs data: give align a `task="):
            rg.align(*networks, symmetry, method=method, generator=generator(0))
    if label in CHANCE:
        with pytest.raises(ValueError, match=r"give align a torch\.Generator as `generator`"):
            rg.align(*networks, symmetry, method=method, task=task_for(method, a))


def test_results_without_a_climb_invent_nothing() -> None:
    """A method that only predicts an element reports no history, no starts, and no convergence."""

    class Predicted(Method):
        def match(self, problem: rg.alignment.Problem) -> rg.alignment.Results:
            element = problem.symmetry.random(generator(0), EXACT, (problem.pairs,))
            return problem.result(element, objective=torch.ones(problem.pairs), initial=torch.zeros(problem.pairs))

    symmetry = experts(3, 4, 5)
    a, b = drawn(symmetry, 0), drawn(symmetry, 1)
    result = rg.align(a, b, symmetry, method=Predicted())
    assert (result.history, result.starts, result.is_converged) == ((), (), None)
    assert str(result) == "objective 0 -> 1"
    batch = {key: torch.stack([a[key], b[key]]) for key in a}
    pairs = rg.alignment.align_pairs(a, batch, symmetry, method=Predicted())
    assert pairs.history.shape == pairs.starts.shape == (0, 2)
    assert str(pairs) == "2 pairs: mean objective 0 -> 1"
    many = rg.align_many([a, b, a], symmetry, method=Predicted())
    assert (many.objective, many.history, many.is_converged) == (2.0, (), None)
    assert str(many) == "3 networks: objective 0 -> 2"

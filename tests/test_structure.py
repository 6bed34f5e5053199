"""Laws of buffers that training does not change: all transformations of a network preserve them bit by bit."""

import itertools
import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from methods import CHANCE, EVERY, needs_data, network_for, reads_activations
from structured import DEGREES, STRUCTURED, Positions, made
from symmetries import generator
from torch import Tensor, nn
from torch.nn import functional

import regauge as rg
from regauge import Params, Symmetry, flow, learn
from regauge import weightspace as ws
from regauge.alignment.engine.frames import balances_of
from regauge.alignment.streamed.match import align_streamed
from regauge.alignment.streamed.plan import make_plan
from regauge.checkpoints.checkpoint import Checkpoint
from regauge.checkpoints.writing import save
from regauge.core.element import PARTS
from regauge.core.exchangeable import classes_of
from regauge.core.groups import Group, Placement, within_classes
from regauge.core.moving.random_moves import RandomMoves
from regauge.core.probe import perturb
from regauge.core.structure import carry
from regauge.merging.table import RULES

TOLERANCE = 1e-9
each_network = pytest.mark.parametrize("name", STRUCTURED)


@cache
def case(name: str) -> tuple[nn.Module, Tensor, Symmetry]:
    build, inputs = STRUCTURED[name]
    torch.manual_seed(0)
    module, x = build().double().eval(), inputs(generator(0))
    return module, x, rg.discover(module, (x,))


def network(name: str, seed: int) -> Params:
    """Return values far from initialization, with the structure of the module."""
    module, _, symmetry = case(name)
    state = {key: tensor.detach() for key, tensor in module.state_dict().items()}
    moved = perturb(state, {n for n, _ in module.named_buffers()}, generator(seed))
    return {key: state[key] if key in symmetry.structure else tensor for key, tensor in moved.items()}


def outputs(name: str, params: Params) -> Tensor:
    module, x, _ = case(name)
    result: Tensor = torch.func.functional_call(module, params, x)
    return result.detach()


def task(name: str) -> rg.Task:
    module, x, _ = case(name)
    return rg.Task(module, [(x, outputs(name, network(name, 9)))], functional.mse_loss)


def keeps(symmetry: Symmetry, params: Params, like: Params) -> bool:
    assert symmetry.structure
    return all(torch.equal(params[key], like[key]) for key in symmetry.structure)


def is_same_function(name: str, one: Params, other: Params) -> bool:
    return bool(torch.allclose(outputs(name, one), outputs(name, other), rtol=TOLERANCE, atol=TOLERANCE))


def planted(symmetry: Symmetry, name: str, seed: int) -> tuple[Params, rg.Element]:
    element = symmetry.random(generator(seed))
    return symmetry.act(element, network(name, 0)), element


def is_statistic(name: str) -> bool:
    return "running" in name or name in ("mean", "var")


@each_network
def test_it_is_found_and_random_elements_keep_it(name: str) -> None:
    module, _, symmetry = case(name)
    a = network(name, 0)
    buffers = {key for key, tensor in module.named_buffers() if tensor.ndim and not is_statistic(key)}
    assert {*symmetry.structure} == buffers
    assert not symmetry.unknown or name.startswith("triangular")
    for seed in range(3):
        moved, element = planted(symmetry, name, seed)
        assert keeps(symmetry, moved, a)
        assert is_same_function(name, moved, a)
        back = symmetry.act(symmetry.inverse(element), moved)
        assert all(torch.allclose(back[key], a[key], rtol=1e-12, atol=1e-12) for key in a)
        twice = symmetry.compose(element, symmetry.random(generator(seed + 10)))
        assert keeps(symmetry, symmetry.act(twice, a), a)
    if not any(group.matrix != "none" for group in symmetry.groups):
        stack = {key: torch.stack([tensor] * 4) for key, tensor in a.items()}
        many = RandomMoves(symmetry, ("permutation", "sign", "scale"))(stack, [([4], generator(0))])
        for k in range(4):
            one = {key: tensor[k] for key, tensor in many.items()}
            assert keeps(symmetry, one, a)
            assert is_same_function(name, one, a)


@each_network
def test_units_are_exchanged(name: str) -> None:
    """Freezing all groups does not pass this test."""
    _, _, symmetry = case(name)
    if name not in ("made of unequal degrees", "triangular hidden layer"):
        assert any(group.has_order for group in symmetry.groups)


@each_network
def test_the_text_form_keeps_classes(name: str) -> None:
    _, _, symmetry = case(name)
    again = Symmetry.from_json(symmetry.to_json())
    assert again == symmetry
    assert keeps(symmetry, again.act(again.random(generator(0)), network(name, 0)), network(name, 0))


@pytest.mark.parametrize(
    ("name", "label"),
    [
        (name, label)
        for k, (name, label) in enumerate(itertools.product(STRUCTURED, EVERY))
        if name in ("made", "made with odd units") or k % 5 == 0
    ],
)
def test_every_method_keeps_it(name: str, label: str) -> None:
    _, _, symmetry = case(name)
    method, a, b = EVERY[label], network(name, 0), network(name, 1)
    chance = generator(0) if label in CHANCE else None
    judged = task(name) if needs_data(method) or reads_activations(method) else None
    found = rg.align(
        network_for(method, a), network_for(method, b), symmetry, method=method, task=judged, generator=chance
    )
    params = found.params[0] if method.joint_roles else found.params
    assert keeps(symmetry, params, a)
    assert is_same_function(name, params, b)


@each_network
def test_a_planted_reordering_is_found_again(name: str) -> None:
    _, _, symmetry = case(name)
    a, (b, _) = network(name, 0), planted(symmetry, name, 0)
    found = rg.align(a, b, symmetry, method=rg.WeightMatching(restarts=5), generator=generator(0)).params
    assert all(torch.allclose(found[key], a[key], rtol=1e-6, atol=1e-6) for key in a if key not in symmetry.unused)


@each_network
def test_many_networks_and_pairs_keep_it(name: str) -> None:
    _, _, symmetry = case(name)
    networks = [network(name, k) for k in range(3)]
    for params, given in zip(rg.align_many(networks, symmetry).params, networks, strict=True):
        assert keeps(symmetry, params, networks[0])
        assert is_same_function(name, params, given)
    stacks = [{key: torch.stack([one[key] for one in some]) for key in some[0]} for some in (networks, networks[::-1])]
    moved = rg.alignment.align_pairs(*stacks, symmetry).params
    assert all(keeps(symmetry, {key: t[k] for key, t in moved.items()}, networks[0]) for k in range(3))


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_keeps_it(rule: str) -> None:
    for name in ("made", "made with masks that choose", "table of positions"):
        _, _, symmetry = case(name)
        networks = [network(name, k) for k in range(3)]
        made_rule, rest = RULES[rule].build(), {}  # type: Any, dict[str, Any]
        if made_rule.base != "none":
            rest["base"] = networks.pop()
        networks = networks[: made_rule.most] if made_rule.most else networks
        if made_rule.needs_task:
            rest["task"] = task(name)
        merged = rg.merge(networks, symmetry, rule=made_rule, generator=generator(0), **rest).params
        assert keeps(symmetry, merged, networks[0])


def test_a_merged_network_is_autoregressive() -> None:
    module, _, symmetry = case("made")
    networks = [network("made", k) for k in range(3)]
    merged = rg.merge(networks, symmetry).params
    jacobian = torch.autograd.functional.jacobian(
        lambda x: torch.func.functional_call(module, merged, x), torch.randn(4, dtype=torch.float64)
    )
    assert float(jacobian.triu().abs().max()) == 0  # type: ignore[union-attr]
    assert float(jacobian.tril(-1).abs().max()) > 0  # type: ignore[union-attr]


@each_network
def test_canonical_forms_keep_it(name: str) -> None:
    _, _, symmetry = case(name)
    a, (b, _) = network(name, 0), planted(symmetry, name, 0)
    first, second = rg.canonicalize(a, symmetry), rg.canonicalize(b, symmetry)
    assert keeps(symmetry, first, a)
    assert is_same_function(name, first, a)
    assert all(torch.allclose(first[key], second[key], rtol=1e-7, atol=1e-7) for key in first)
    again = rg.canonicalize(first, symmetry)
    assert all(torch.allclose(first[key], again[key], rtol=1e-9, atol=1e-9) for key in first)


@each_network
def test_gauges_keep_it(name: str) -> None:
    _, _, symmetry = case(name)
    a = network(name, 0)
    for method in (rg.Equalize(), rg.Hadamard()):
        gauged = rg.gauge(a, symmetry, method=method, generator=generator(0)).params
        assert keeps(symmetry, gauged, a)
        assert is_same_function(name, gauged, a)


@each_network
def test_pruning_keeps_the_rows_that_remain(name: str) -> None:
    _, _, symmetry = case(name)
    a = network(name, 0)
    found = rg.prune(a, symmetry, share=0.3)
    for key in symmetry.structure:
        rows = a[key]
        for site in symmetry.sites.get(key, ()):
            if site.group.name in found.kept and rows.shape != found.params[key].shape:
                assert site.is_plain
                rows = rows.index_select(site.placement.axis, found.kept[site.group.name])
        assert torch.equal(found.params[key], rows)
    small = found.symmetry
    assert keeps(small, small.act(small.random(generator(0)), found.params), found.params)


def reordered(name: str, seed: int) -> Params:
    """Return a network with its units, including structure, in a random order."""
    _, _, symmetry = case(name)
    free = replace(symmetry, groups=tuple(replace(g, classes=()) for g in symmetry.groups), structure=())
    return free.act(free.random(generator(seed), ("permutation",)), network(name, 0))


@pytest.mark.parametrize("name", ["made", "made with odd units", "made with masks that choose", "pruned", "recurrent"])
def test_structure_in_another_order_is_carried_over(name: str) -> None:
    _, _, symmetry = case(name)
    a = network(name, 0)
    for seed in range(3):
        b = reordered(name, seed)
        found = rg.align(a, b, symmetry)
        assert keeps(symmetry, found.params, a)
        assert all(torch.allclose(found.params[key], a[key], rtol=1e-7, atol=1e-7) for key in a)
        again = symmetry.act(found.element, b)
        assert all(torch.allclose(found.params[key], again[key], rtol=1e-12, atol=1e-12) for key in a)
        many = rg.align_many([a, b, network(name, 1)], symmetry)
        assert all(keeps(symmetry, params, a) for params in many.params)
        assert torch.allclose(symmetry.act(many.elements[1], b)[next(iter(a))], many.params[1][next(iter(a))])
        stack = {key: torch.stack([b[key], network(name, 1)[key]]) for key in b}
        pairs = rg.alignment.align_pairs(a, stack, symmetry)
        assert all(keeps(symmetry, {key: t[k] for key, t in pairs.params.items()}, a) for k in range(2))
        moved = symmetry.act(pairs.element, stack)
        assert all(torch.allclose(moved[key], pairs.params[key], rtol=1e-12, atol=1e-12) for key in moved)


def test_a_matching_of_units_in_pairs_is_carried_over() -> None:
    """No two units of one group alone can be exchanged: refinement leaves a choice to the search."""
    groups = tuple(Group(name, 5, (Placement("m", axis), Placement(name, 0))) for axis, name in enumerate("xy"))
    symmetry = Symmetry(groups, {"m": (5, 5), "x": (5,), "y": (5,)}, structure=("m",))
    orders = [torch.randperm(5, generator=generator(k)) for k in range(2)]
    a = {"m": torch.eye(5)[orders[0]], "x": torch.randn(5), "y": torch.randn(5)}
    b = {"m": torch.eye(5)[orders[1]], "x": torch.randn(5), "y": torch.randn(5)}
    bound = symmetry.bind(a)
    assert [group.class_sizes for group in bound.groups] == [(1,) * 5] * 2
    found = carry(bound, a, b)
    assert found is not None
    assert torch.equal(symmetry.act(found, b)["m"], a["m"])
    assert carry(bound, a, a) is None


REFUSING = {
    "align": lambda a, b, symmetry: rg.align(a, b, symmetry),
    "align many": lambda a, b, symmetry: rg.align_many([a, b], symmetry),
    "align pairs": lambda a, b, symmetry: rg.alignment.align_pairs(
        a, {n: t.unsqueeze(0) for n, t in b.items()}, symmetry
    ),
    "merge": lambda a, b, symmetry: rg.merge([a, b], symmetry),
    "compare": lambda a, b, symmetry: rg.compare(a, b, symmetry, generator=generator(0)),
}


@pytest.mark.parametrize("call", REFUSING)
@pytest.mark.parametrize("name", ["made", "coupling flow", "table of positions", "index"])
def test_other_structure_is_refused_by_name(name: str, call: str) -> None:
    _, _, symmetry = case(name)
    a = network(name, 0)
    for key in symmetry.structure:
        other = network(name, 1)
        other[key] = torch.ones_like(a[key]) if a[key].is_floating_point() else a[key].flip(0)
        with pytest.raises(ValueError, match=f"the networks differ in '{key}', a structure tensor.*with move="):
            REFUSING[call](a, other, symmetry)


def test_moving_it_is_a_choice() -> None:
    module, x, _ = case("made")
    a = network("made", 0)
    symmetry = rg.discover(module, (x,), move=["*.mask"])
    assert not symmetry.structure
    moved = symmetry.act(symmetry.random(generator(0)), a)
    assert not torch.equal(moved["0.mask"], a["0.mask"])
    assert is_same_function("made", moved, a)
    assert rg.discover(module, (x,), move=["2.mask"]).structure == ("0.mask", "4.mask")
    with pytest.raises(ValueError, match=r"reads no buffer called 'mask'; it has 0\.mask"):
        rg.discover(module, (x,), move=["mask"])
    with pytest.raises(TypeError, match=r"move is the text 'mask'; give a list of names: move=\['mask'\]"):
        rg.discover(module, (x,), move="mask")


def test_frozen_parameters_are_kept_where_they_are_named() -> None:
    torch.manual_seed(0)
    module, x = Positions(is_parameter=True).double().eval(), torch.randint(0, 7, (3, 5), generator=generator(0))
    state = {key: tensor.detach() for key, tensor in module.state_dict().items()}
    free, kept = rg.discover(module, (x,)), rg.discover(module, (x,), keep=["table"])
    assert (free.structure, kept.structure) == ((), ("table",))
    assert not torch.equal(free.act(free.random(generator(0)), state)["table"], state["table"])
    assert torch.equal(kept.act(kept.random(generator(0)), state)["table"], state["table"])
    with pytest.raises(ValueError, match="reads no parameter or buffer called 'place'"):
        rg.discover(module, (x,), keep=["place"])


class Statistics(nn.Module):
    """Normalizations of every form: an operator, explicit code, frozen gains, by training, and by power iteration."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.power = nn.BatchNorm1d(8), nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        for name in ("mean", "var", "gain", "bias", "average", "mask"):
            self.register_buffer(name, torch.rand(8) + 0.5)
        self.layers = nn.ModuleList([nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.layers[0](x)).relu()
        factor = self.gain * (self.var + 1e-5).rsqrt()
        x = (self.layers[1](x) * factor + (self.bias - self.mean * factor)).relu()
        x = self.layers[2](x)
        if self.training:
            self.average.data.mul_(0.9).add_(0.1 * x.detach().mean(0))
        y: Tensor = self.layers[3](self.power((x - self.average).relu()).relu() * self.mask)
        return y


def test_what_a_normalization_fills_is_no_structure() -> None:
    torch.manual_seed(0)
    module, x = Statistics().double().eval(), torch.randn((5, 4), generator=generator(0), dtype=torch.float64)
    before = {key: tensor.clone() for key, tensor in module.state_dict().items()}
    chance = torch.get_rng_state()
    symmetry = rg.discover(module, (x,))
    assert symmetry.structure == ("mask",)
    assert torch.equal(chance, torch.get_rng_state())
    assert not module.training
    assert all(torch.equal(tensor, before[key]) for key, tensor in module.state_dict().items())
    moved = symmetry.act(symmetry.random(generator(0)), before)
    assert not any(torch.equal(moved[key], before[key]) for key in ("mean", "var", "gain", "bias", "average"))


def test_without_values_an_element_waits_for_them() -> None:
    _, x, known = case("made")
    symmetry = rg.discover(made().to("meta"), (x.float(),))
    assert symmetry.structure == known.structure
    assert all(not group.classes for group in symmetry.groups)
    a = network("made", 0)
    element = symmetry.random(generator(0))
    with pytest.raises(ValueError, match="the structure tensors of this element's symmetry"):
        element["0"]
    for one in (element, symmetry.inverse(element), symmetry.compose(element, symmetry.identity())):
        assert keeps(symmetry, symmetry.act(one, a), a)
    assert [group.classes for group in symmetry.bind(a).groups] == [group.classes for group in known.groups]
    assert keeps(symmetry, rg.align(a, network("made", 1), symmetry).params, a)


def test_classes_are_those_of_the_networks_that_are_given() -> None:
    """The module on which the symmetry was found may have another structure."""
    _, _, symmetry = case("made")
    torch.manual_seed(1)
    other = {key: tensor.detach() for key, tensor in made(DEGREES.sort().values).double().state_dict().items()}
    bound = symmetry.bind(other)
    assert bound.groups[0].classes != symmetry.groups[0].classes
    assert keeps(symmetry, bound.act(bound.random(generator(0)), other), other)
    assert keeps(symmetry, rg.canonicalize(other, symmetry), other)


@pytest.mark.parametrize("seed", range(20))
def test_two_units_are_of_one_class_if_and_only_if_exchanging_them_keeps_all(seed: int) -> None:
    chance = generator(seed)
    tensors = {"v": torch.randint(0, 2, (5,), generator=chance), "m": torch.randint(0, 2, (5, 5), generator=chance)}
    tensors["w"] = torch.randint(0, 2, (3, 5), generator=chance).float()
    if seed % 2:
        tensors["m"] = torch.eye(5, dtype=torch.int64) + tensors["v"][:, None] * tensors["v"]
    places = (Placement("v", 0), Placement("m", 0), Placement("m", 1), Placement("w", 1))
    if seed % 3 == 0:
        places = places[:3]
    symmetry = Symmetry((Group("u", 5, places),), {n: tuple(t.shape) for n, t in tensors.items()})
    found = classes_of(symmetry.groups[0], symmetry.sites, tensors, {name: t.ndim for name, t in tensors.items()})
    for i, j in itertools.combinations(range(5), 2):
        order = torch.arange(5)
        order[[i, j]] = order[[j, i]]
        moved = {name: tensor.clone() for name, tensor in tensors.items()}
        for place in places:
            moved[place.parameter] = moved[place.parameter].index_select(place.axis, order)
        assert (found[i] == found[j]) == all(torch.equal(moved[name], tensors[name]) for name in tensors)


def test_random_orders_within_classes_are_uniform() -> None:
    group = Group("u", 5, (), classes=(3, 0, 3, 0, 3))
    orders = within_classes(group, torch.rand((6000, 5), generator=generator(0)).argsort(-1))
    _, counts = orders.unique(dim=0, return_counts=True)
    assert len(counts) == 12
    assert float(counts.min()) > 400
    assert float(counts.max()) < 600
    assert group.class_sizes == (3, 2)
    with pytest.raises(ValueError, match="has 4 classes of units, but 5 units"):
        replace(group, classes=(0, 0, 1, 1))
    with pytest.raises(ValueError, match="its units are not reordered"):
        replace(group, is_permuted=False)


def test_a_network_with_a_mask_is_described() -> None:
    _, _, symmetry = case("made")
    assert "order in 3 classes" in str(symmetry)
    assert (
        "which are not changed (no normalization computes them, or `keep` names them): 0.mask, 2.mask, 4.mask"
        in str(symmetry)
    )
    assert symmetry.log10_order < rg.discover(made(), (torch.zeros(2, 4),), move=["*"]).log10_order


NETWORKS_READ = [
    "made",
    "made with masks that choose",
    "made with integer masks",
    "recurrent",
    "table of positions",
    "coupling flow",
    "masked convolutions",
]


def many(name: str, count: int = 8) -> Params:
    networks = [network(name, k) for k in range(count)]
    return {key: torch.stack([one[key] for one in networks]) for key in networks[0]}


def metanet(name: str, head: Any) -> ws.Metanet:
    _, _, symmetry = case(name)
    net = ws.Metanet(symmetry, layer=ws.Propagation(), head=head, width=8, depth=1, generator=generator(0)).double()
    net.standardize(many(name))
    return net.eval()


@pytest.mark.parametrize("name", NETWORKS_READ)
@torch.no_grad()
def test_networks_over_networks_read_it_and_write_none(name: str) -> None:
    _, _, symmetry = case(name)
    networks, element = many(name), symmetry.random(generator(1), PARTS)  # linear, as changes need
    moved = symmetry.act(element, networks)
    told = metanet(name, ws.Invariant(3))
    assert torch.allclose(told(networks), told(moved), atol=TOLERANCE)
    changed = metanet(name, ws.Equivariant())
    changes, after = changed(networks), changed(moved)
    expected = symmetry.act(element, {**networks, **changes})
    assert all(torch.allclose(after[key], expected[key], atol=TOLERANCE) for key in changes)
    assert not any(changes[key].any() for key in symmetry.structure if key in changes)


@pytest.mark.parametrize("name", NETWORKS_READ)
def test_learned_matching_keeps_it(name: str) -> None:
    _, _, symmetry = case(name)
    a, b = network(name, 0), network(name, 1)
    for method in (
        learn.LearnedMatching(metanet(name, ws.UnitFeatures(16)), sweeps=0),
        learn.fit_matching(
            many(name),
            symmetry,
            learn.MatchingConfig(epochs=1, batch=4, width=8, depth=1, vectors=8),
            generator=generator(0),
        ),
    ):
        found = rg.align(a, b, symmetry, method=method).params
        assert keeps(symmetry, found, a)
        assert is_same_function(name, found, b)


@pytest.mark.parametrize("name", NETWORKS_READ)
def test_a_flow_draws_networks_with_it(name: str, tmp_path: Path) -> None:
    _, _, symmetry = case(name)
    networks = many(name)
    config = flow.FlowConfig(net=flow.Perceptron(8, 1), epochs=1, batch=8, is_aligned=True)
    found = flow.fit(networks, symmetry, config, generator=generator(0))
    again = flow.load_flow(found.save(tmp_path / "flow.safetensors"))
    for one in (found, again):
        drawn = one.sample(3, generator=generator(0))
        assert drawn.keys() == networks.keys()
        assert all(torch.equal(drawn[key], networks[key][:3]) for key in symmetry.structure)
    other = {**networks, (key := symmetry.structure[0]): networks[symmetry.structure[0]].flip(-1)}
    with pytest.raises(ValueError, match=f"the networks differ in '{key}', a structure tensor"):
        found.log_density(other)
    mixed = {name: torch.cat([networks[name], other[name]]) for name in networks}
    with pytest.raises(ValueError, match=f"the networks differ in '{key}', a structure tensor"):
        flow.fit(mixed, symmetry, config, generator=generator(0))


@pytest.mark.parametrize(
    "name", ["made", "made with masks that choose", "recurrent", "table of positions", "masked convolutions"]
)
def test_streamed_alignment_keeps_it(name: str, tmp_path: Path) -> None:
    _, _, symmetry = case(name)
    a, b = network(name, 0), network(name, 1)
    files = [Checkpoint.open(save(params, tmp_path / f"{k}.safetensors")) for k, params in enumerate((a, b))]
    dtypes = {key: entry.dtype for key, entry in files[0].stored.items()}
    balances = balances_of(symmetry, "recompute", None)
    whole = make_plan(symmetry, [dtypes, dtypes], memory=1 << 40, balances=balances)
    plans = [whole]
    try:
        plans.append(make_plan(symmetry, [dtypes, dtypes], memory=whole.peak - 1, balances=balances))
    except ValueError:
        assert name == "recurrent"  # Balancing holds most, in parts that no plan divides.
    as_given = replace(symmetry, translations=(), gains=())  # Streamed networks are not brought to representatives.
    expected = rg.align(a, b, as_given, method=rg.WeightMatching(scales="recompute"))
    for plan in plans:
        found = align_streamed(files[0], files[1], plan, rg.WeightMatching(scales="recompute"))
        moved = symmetry.act(found.element, b)
        assert keeps(symmetry, moved, a)
        assert all(torch.allclose(moved[key].double(), expected.params[key].double(), atol=1e-6) for key in moved)


@each_network
def test_gauges_that_are_learned_or_smoothed_keep_it(name: str) -> None:
    _, _, symmetry = case(name)
    a, judge = network(name, 0), task(name)
    for method in (
        rg.gauging.Smooth(),
        rg.gauging.LearnedRotation(steps=2),
        rg.gauging.RandomRotation(),
        rg.gauging.BestGauge(is_kept_always=True),
    ):
        gauged = rg.gauge(a, symmetry, method=method, task=judge, generator=generator(0)).params
        assert keeps(symmetry, gauged, a)
        assert is_same_function(name, gauged, a)


@each_network
def test_a_line_keeps_it_and_asks_for_it(name: str) -> None:
    _, _, symmetry = case(name)
    a, b, judge = network(name, 0), network(name, 1), task(name)
    assert keeps(symmetry, rg.connect.Straight().at(a, b, 0.3), a)
    assert len(rg.line(a, b, judge, points=3).table) == 3
    key = next(n for n in symmetry.structure if a[n].ndim)
    other = {**b, key: b[key].flip(0)} if not torch.equal(b[key].flip(0), b[key]) else {**b, key: 1 - b[key].to(float)}
    with pytest.raises(ValueError, match=f"the networks differ in '{key}', a structure tensor"):
        rg.line(a, other, judge)
    with pytest.raises(ValueError, match=f"the networks differ in '{key}', a structure tensor"):
        rg.connect.plane(a, b, other, judge, resolution=3)


def test_networks_of_other_widths_are_refused_by_its_name() -> None:
    _, _, narrow = case("made")
    wide = made(torch.arange(12) % 3).double().eval()
    symmetry = rg.discover(wide, (torch.randn(5, 4, dtype=torch.float64),))
    with pytest.raises(ValueError, match=r"'0\.mask' is a structure tensor, which has no average"):
        rg.merging.merge_widths([network("made", 0), wide.state_dict()], [narrow, symmetry])


def test_masks_with_infinity_are_no_damage() -> None:
    name = "causal attention"
    _, _, symmetry = case(name)
    networks = [network(name, k) for k in range(3)]
    assert torch.isinf(networks[0]["mask"]).any()
    for params in (
        rg.merge(networks, symmetry).params,
        rg.prune(networks[0], symmetry, share=0.5).params,
        rg.connect.Straight().at(networks[0], networks[1], 0.7),
    ):
        assert torch.equal(params["mask"], networks[0]["mask"])
    assert math.isfinite(rg.line(*networks[:2], task(name), points=3).barrier)
    broken = {**networks[1], "mask": networks[1]["mask"] * torch.nan}
    with pytest.raises(ValueError, match="'mask' of the second network holds NaN or Inf in 25 of"):
        rg.align(networks[0], broken, symmetry)
    broken = {**networks[1], "out.weight": networks[1]["out.weight"] * torch.inf}
    with pytest.raises(ValueError, match=r"'out\.weight' of the second network holds NaN or Inf in .* of"):
        rg.align(networks[0], broken, symmetry)

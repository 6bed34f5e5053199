"""Unneeded units are found and removed without a change of the function, and further units are removed by criteria."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import pytest
import torch
from models import CASES, Case, normal, symmetry_of
from torch import Tensor, nn

import regauge as rg
from regauge.core.act import covered
from regauge.core.params import Params
from regauge.core.probe import relative_change
from regauge.core.task import call
from regauge.pruning import Magnitude, OutputError, RandomUnits, Taylor
from regauge.pruning.compensation import SecondMoments
from regauge.pruning.network import Network


class Blocks(nn.Module):
    """A stream of channels with batch normalization, as in a residual network."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.first, self.between = nn.Conv2d(6, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.second, self.last = nn.Conv2d(8, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x)).relu()
        x = (x + self.last(self.second(self.between(self.first(x)).relu()))).relu()
        return self.head(x.mean((-2, -1)))


BY_NAME = {case.name: case for case in (*CASES, Case("batch_norm", Blocks, normal(2, 3, 5, 5), ""))}


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@cache
def prepared(name: str) -> tuple[Case, nn.Module, rg.Symmetry, rg.Task]:
    """Return a case in float64, far from its initial values, with its task."""
    case = BY_NAME[name]
    torch.manual_seed(0)
    module = case.module().double().eval()
    for tensor in [*module.parameters(), *(t for n, t in module.named_buffers() if n.endswith("running_mean"))]:
        tensor.data += 0.1 * torch.randn(tensor.shape, dtype=tensor.dtype)
    inputs = tuple(t.double() if t.is_floating_point() else t for t in case.inputs())
    task = rg.Task(module, [(inputs, torch.zeros(1))], lambda output, _: output.square().mean(), case.outputs)
    symmetry = symmetry_of(case) if case in CASES else rg.discover(module, inputs, outputs=case.outputs)
    return case, module, symmetry.bind(module.state_dict()), task


def params_of(module: nn.Module) -> Params:
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def spot(network: Network, group: str, unit: int, *, reading: bool) -> list[tuple[str, Tensor]]:
    """Return the tensors that compute or read a unit, with the flat indices of its entries."""
    places = network.sites(group, reading=reading)
    return [(name, network.entries(name, site)[unit]) for name, site in places]


def copied(network: Network, group: str, unit: int, other: int, factor: float = 1.0, *, is_odd: bool = False) -> Params:
    """Return parameters with a unit that duplicates another unit, up to a scale or a sign of the first families."""
    made = dict(network.params)
    for name, site in network.sites(group, reading=False):
        flat, entries = made[name].flatten().clone(), network.entries(name, site)
        here = factor ** (site.placement.scale[0] if site.placement.scale else 0)
        here *= -1.0 if is_odd and site.placement.sign and site.placement.sign[0] % 2 else 1.0
        flat[entries[unit]] = flat[entries[other]] * here
        made[name] = flat.reshape(made[name].shape)
    return made


PLANTED = ["mlp_relu", "mlp_tanh", "cnn_flatten", "concatenation", "glu", "squeeze_excite", "depthwise_conv"]
PLANTED += ["grouped_conv", "vit", "batch_norm"]


@pytest.mark.parametrize("name", PLANTED)
def test_planted_units_are_removed_and_the_function_stays(name: str) -> None:
    """In every group that can be cut, each copy has one duplicate unit, and in some groups another unit is unread."""
    _, module, symmetry, task = prepared(name)
    network = Network(params_of(module), symmetry, task)
    planted: dict[str, set[str]] = {}
    for k, group in enumerate(g for g in symmetry.groups if g.is_permuted and g.size > 2):
        planted[group.name] = {"duplicate"} | ({"unread"} if k % 2 else set())
        for first in range(0, symmetry.count_copies(group.name) * group.size, group.size):
            network.params = copied(network, group.name, first + 1, first, 2.0, is_odd=True)
            for place, entries in spot(network, group.name, first + group.size - 1, reading=True) if k % 2 else ():
                flat = network.params[place].flatten().clone()
                flat[entries] = 0.0
                network.put({place: flat.reshape(network.params[place].shape)})
    result = rg.prune(network.params, symmetry, task=task)
    assert result.certificate is not None
    assert result.certificate.ok
    assert result.certificate.tolerance == 1e-9
    assert result.sizes
    for group in {*planted} & {*result.sizes}:
        assert {one.why for one in result.exact if one.group == group} >= planted[group], group
        assert result.sizes[group][1] < result.sizes[group][0]
    assert result.module is not None
    (inputs, _), *_ = task.batches
    outputs = [task.run(network.params, inputs), replace(task, module=result.module).run(result.params, inputs)]
    assert relative_change(outputs[:1], outputs[1:]) <= 1e-9
    assert all(torch.equal(tensor, result.params[key]) for key, tensor in result.module.state_dict().items())
    assert sum(t.numel() for t in result.params.values()) < sum(t.numel() for t in network.params.values())


def resolved(symmetry: rg.Symmetry) -> dict[str, object]:
    """Return the meaning of each group of several units, and the entries that each unit owns on each axis."""
    return {
        group.name: (
            *(group.kind, group.size, group.within, group.scales, group.signs),
            {(p.parameter, p.axis, tuple(sorted(pairs(group, p, symmetry)))) for p in group.placements},
        )
        for group in symmetry.groups
        if group.size > 1
    }


def pairs(group: rg.Group, place: rg.Placement, symmetry: rg.Symmetry) -> list[tuple[int, int]]:
    positions, units = covered(group, place, symmetry.shapes[place.parameter])
    return list(zip(positions.tolist(), units.tolist(), strict=True))


@pytest.mark.parametrize("name", ["cnn_flatten", "concatenation", "batch_norm", "depthwise_conv"])
def test_the_symmetry_of_what_is_left_is_what_discovery_finds(name: str) -> None:
    case, module, symmetry, task = prepared(name)
    result = rg.prune(module.state_dict(), symmetry, share=0.4, task=task)
    assert result.module is not None
    assert sum(new < old for old, new in result.sizes.values()) >= 1
    found = rg.discover(result.module, task.batches[0][0], outputs=case.outputs, verify=False)  # type: ignore[index]
    assert resolved(found) == resolved(result.symmetry)
    assert {name: tuple(t.shape) for name, t in result.params.items()} == dict(result.symmetry.shapes)


class Gated(nn.Module):
    """A depthwise convolution whose halves are multiplied, as in NAFNet."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.each = nn.Conv2d(3, 16, 1), nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.out = nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.each(self.into(x)).chunk(2, 1)
        result: Tensor = self.out(first * second)
        return result


def test_units_of_a_gated_depthwise_convolution_are_removed_from_both_halves() -> None:
    torch.manual_seed(0)
    module, images = Gated().double(), torch.randn(2, 3, 6, 6, generator=generator(0)).double()
    task = rg.Task(module, [(images, torch.zeros(1))], lambda output, _: output.square().mean())
    result = rg.prune(params_of(module), rg.discover(module, (images,)), share=0.5, task=task)
    assert [*result.sizes.values()] == [(8, 4)]
    assert result.params["each.weight"].shape == (8, 1, 3, 3)
    assert result.module is not None
    assert result.module.each.groups == 8
    assert result.certificate is not None
    assert result.certificate.ok


def relu_net() -> tuple[nn.Module, rg.Symmetry, rg.Task]:
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(5, 12), nn.ReLU(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    batches = [
        (torch.randn(16, 5, generator=generator(k)).double(), torch.randint(0, 3, (16,), generator=generator(k)))
        for k in range(3)
    ]
    return module, rg.discover(module, (batches[0][0],)), rg.Task(module, batches)


CRITERIA = {"magnitude": Magnitude(), "Taylor": Taylor(), "output": OutputError(), "plain output": OutputError(False)}


@pytest.mark.parametrize("criterion", CRITERIA.values(), ids=CRITERIA)
def test_what_is_chosen_does_not_depend_on_the_gauge(criterion: rg.pruning.Criterion) -> None:
    module, symmetry, task = relu_net()
    params = params_of(module)
    moved = symmetry.act(symmetry.random(generator(3)), params)
    outputs = []
    for one in (params, moved):
        result = rg.prune(one, symmetry, share=0.5, criterion=criterion, task=task)
        assert [new for _, new in result.sizes.values()] == [6, 4]
        assert result.module is not None
        outputs.append(call(result.module, result.params, task.batches[0][0]))  # type: ignore[index]
        assert result.losses["at the end"]["loss"] != result.losses["as it was"]["loss"]
    assert relative_change(outputs[:1], outputs[1:]) <= 1e-5


def test_fitted_readers_are_never_worse_on_their_own_objective() -> None:
    module, symmetry, task = relu_net()
    group = symmetry.groups[0].name
    network = Network(params_of(module), symmetry, task)
    (reading,) = SecondMoments.collect(network, group).readings
    values = {}
    for is_compensated in (True, False):
        result = rg.prune(
            network.params, symmetry, share={group: 0.5}, criterion=OutputError(is_compensated), task=task, test=task
        )
        assert result.module is not None
        kept, errors = result.kept[group], []
        for inputs, _ in task.batches:
            hidden = torch.relu(nn.functional.linear(inputs, network.params["0.weight"], network.params["0.bias"]))
            given = nn.functional.linear(hidden, network.params["2.weight"], network.params["2.bias"])
            left = nn.functional.linear(hidden[:, kept], result.params["2.weight"], result.params["2.bias"])
            errors.append((given - left).square().sum(1).mean())
        values[is_compensated] = float(torch.stack(errors).mean())
    assert values[True] < 0.9 * values[False]
    # With the same units removed, nothing that is fitted otherwise is better.
    removed = torch.zeros(1, 12, dtype=torch.bool)
    fitted = rg.prune(network.params, symmetry, share={group: 0.5}, criterion=OutputError(), task=task, test=task)
    kept = fitted.kept[group]
    removed[0] = True
    removed[0, kept] = False
    hidden = torch.cat(
        [
            torch.relu(nn.functional.linear(x, network.params["0.weight"], network.params["0.bias"]))
            for x, _ in task.batches
        ]
    )
    design = torch.cat([hidden[:, kept], torch.ones(len(hidden), 1).double()], 1)
    target = nn.functional.linear(hidden, network.params["2.weight"], network.params["2.bias"])
    best = torch.linalg.lstsq(design, target).solution
    assert values[True] == pytest.approx(float((design @ best - target).square().sum(1).mean()), rel=1e-4)
    assert reading.moments.shape == (1, 13, 13)


@pytest.mark.parametrize("name", ["cnn_flatten", "batch_norm", "llama"])
def test_by_default_others_take_the_place_of_removed_units(name: str) -> None:
    """With a task, the outputs stay as close as possible to the given network's outputs. Without a task, magnitude
    decides.
    """
    _, module, symmetry, task = prepared(name)
    (inputs, _), *_ = task.batches
    given, errors = task.run(params_of(module), inputs), {}
    for label, criterion in ({"default": None} | CRITERIA).items():
        result = rg.prune(module.state_dict(), symmetry, share=0.5, criterion=criterion, task=task, test=task)
        assert result.module is not None
        made = replace(task, module=result.module).run(result.params, inputs)
        errors[label] = float((made - given).square().mean())
        assert result.certificate is not None
        assert result.certificate.given == pytest.approx(relative_change([given], [made]), rel=1e-6)
        assert str(result.certificate).startswith("outputs differ from those of the given network by ")
    assert errors["default"] == errors["output"] == min(errors.values())
    alone, by_magnitude = (rg.prune(module.state_dict(), symmetry, share=0.5, criterion=c) for c in (None, Magnitude()))
    assert all(torch.equal(alone.params[key], by_magnitude.params[key]) for key in alone.params)
    assert "With data, those units are removed that others can replace" in str(alone)
    assert "with data" not in str(by_magnitude)


def test_dead_and_constant_units_are_folded_where_something_can_take_them_up() -> None:
    module, symmetry, task = relu_net()
    params = params_of(module)
    params["0.weight"][2:5] = 0.0
    params["0.bias"][2:5] = torch.tensor([-1.0, 0.7, 0.0])
    result = rg.prune(params, symmetry, task=task)
    assert {(one.unit, one.why) for one in result.exact} == {(2, "dead"), (3, "constant"), (4, "dead")}
    assert result.certificate is not None
    assert result.certificate.ok
    assert result.losses["at the end"]["loss"] == pytest.approx(result.losses["as it was"]["loss"], rel=1e-12)
    assert str(result.exact[1]) == "0[3]: constant"
    # A unit that is silent on the data alone is not dead.
    params = params_of(module)
    params["0.bias"][2] = -100.0
    assert not rg.prune(params, symmetry, task=task).exact
    # Without a bias behind it a constant stays, and so does one that zero padding makes differ at the border.
    bare = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3, bias=False)).double()
    padded = nn.Sequential(nn.Conv2d(5, 6, 1), nn.ReLU(), nn.Conv2d(6, 3, 3, padding=1)).double()
    for net, inputs, reason in (
        (bare, torch.randn(4, 5), "it is constant, but '2.weight', which reads it, has no bias that could take it up"),
        (padded, torch.randn(2, 5, 4, 4), "constant, but outputs would change without it"),
    ):
        params = params_of(net)
        params["0.weight"][1], params["0.bias"][1] = 0.0, 0.7
        one = rg.Task(net, [(inputs.double(), torch.zeros(1))], lambda output, _: output.square().mean())
        result = rg.prune(params, rg.discover(net, (inputs.double(),)), task=one)
        assert not result.exact
        assert result.fixed == (("0[1]", reason),)


def test_a_unit_that_becomes_unread_goes_too() -> None:
    """A unit that becomes unneeded after another removal is found in a later round."""
    module, symmetry, task = relu_net()
    params = params_of(module)
    params["4.weight"][:, 2] = 0.0
    params["2.weight"][:, 5] = 0.0
    params["2.weight"][2, 5] = 1.0
    result = rg.prune(params, symmetry, task=task)
    assert [str(one) for one in result.exact] == ["2[2]: unread", "0[5]: unread"] or len(result.exact) == 1
    assert {one.group for one in result.exact} >= {"2"}


def test_layers_of_a_recurrent_network_keep_one_size() -> None:
    _, module, symmetry, task = prepared("gru")
    network = Network(params_of(module), symmetry, task)
    first, second = (group.name for group in symmetry.groups)
    for group, units in ((first, (1,)), (second, (3, 4))):
        mask = torch.zeros(12, dtype=torch.bool)
        mask[list(units)] = True
        network.remove(group, mask)
    result = rg.prune(network.params, symmetry, task=task)
    assert set(result.sizes.values()) == {(12, 11)}
    assert result.certificate is not None
    assert result.certificate.ok


def test_a_stream_under_norms_is_cut_only_by_name() -> None:
    _, module, symmetry, task = prepared("vit")
    result = rg.prune(module.state_dict(), symmetry, share=0.25, task=task)
    (stream,) = (name for name, reason in result.fixed if "a norm over its units" in reason)
    assert stream not in result.sizes
    cut = rg.prune(module.state_dict(), symmetry, share={stream: 0.25}, task=task)
    assert cut.sizes[stream] == (24, 18)
    assert cut.certificate is not None
    assert cut.certificate.cut is None
    assert "a norm reads units that were removed" in str(cut)
    assert cut.module is not None
    assert cut.removed(stream).shape == (6,)
    assert {*cut.removed(stream).tolist(), *cut.kept[stream].tolist()} == set(range(24))


def test_a_wrong_symmetry_is_not_cut() -> None:
    module, symmetry, task = relu_net()
    group = symmetry.groups[0]
    broken = replace(group, placements=tuple(p for p in group.placements if p.parameter != "2.weight"))
    wrong = replace(symmetry, groups=(broken, *symmetry.groups[1:]))
    result = rg.prune(module.state_dict(), wrong, share=0.5, task=task)
    assert group.name in dict(result.fixed)
    assert "a norm over its units, or a fixed size in the model" in dict(result.fixed)[group.name]
    with pytest.raises(ValueError, match="Sequential does not run with these sizes"):
        rg.prune(module.state_dict(), wrong, share={group.name: 0.5}, task=task)


def test_query_heads_go_evenly_and_with_their_key_value_heads() -> None:
    _, module, symmetry, task = prepared("llama")
    result = rg.prune(module.state_dict(), symmetry, share=0.5, task=task)
    (heads, *_), (queries, *_) = (
        [name for name in result.sizes if name.endswith(end)] for end in ("query.blocks", "query.units")
    )
    assert result.sizes[heads] == (2, 1)
    assert result.sizes[queries] == (2, 1)
    assert result.kept[queries].shape == (2, 1)
    assert result.params["blocks.0.attention.query.weight"].shape == (8, 32)
    assert result.params["blocks.0.attention.key.weight"].shape == (8, 32)
    assert result.certificate is not None
    assert result.certificate.ok


def test_without_a_task_nothing_is_checked() -> None:
    module, symmetry, _ = relu_net()
    result = rg.prune(module.state_dict(), symmetry, share=0.5, criterion=RandomUnits(), generator=generator(0))
    assert result.certificate is None
    assert result.module is None
    assert "the model was not run" in str(result)
    assert repr(result) == "Pruned(0 12 -> 6, 2 8 -> 4; 79 values)"
    assert result.params["2.weight"].shape == (4, 6)
    assert torch.equal(result.params["0.weight"], module.state_dict()["0.weight"][result.kept["0"]])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"share": 1.0}, "the share of '0' is 1.0; it is from 0 to below 1"),
        ({"share": {"nothing": 0.5}}, "there is no group 'nothing'"),
        ({"criterion": Taylor(), "task": None}, "Taylor needs data: give a task"),
        ({"criterion": RandomUnits()}, "RandomUnits chooses units at random: give a generator"),
        ({"alike": [("0", "2")]}, "must keep equal numbers of units, but have different sizes"),
    ],
)
def test_what_is_refused_says_why(options: Mapping[str, object], sentence: str) -> None:
    module, symmetry, task = relu_net()
    with pytest.raises((ValueError, KeyError), match=sentence):
        rg.prune(module.state_dict(), symmetry, **{"task": task, **options})  # type: ignore[arg-type]


def test_data_that_judge_choose_nothing() -> None:
    module, symmetry, task = relu_net()
    params = params_of(module)
    first, last = task.split()
    ways = ((task, None), (first, last), (first, first))
    by_default, split, alone = (rg.prune(params, symmetry, share=0.5, task=a, test=b) for a, b in ways)
    assert all(torch.equal(by_default.params[key], one.params[key]) for key in params for one in (split, alone))
    assert by_default.losses == split.losses != alone.losses
    assert by_default.data == (first.name, last.name)
    with pytest.raises(ValueError, match="test measures the result of a choice by a task"):
        rg.prune(params, symmetry, share=0.5, test=task)


class Bottleneck(nn.Module):
    """Two layers with only a matrix between them, one before ReLU units."""

    def __init__(self, *, has_reader: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(7, 4, bias=has_reader), nn.Linear(4, 6, bias=has_reader)
        self.read = nn.Linear(6, 3) if has_reader else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.second(self.first(x))
        result: Tensor = self.read(mixed.relu()) if isinstance(self.read, nn.Linear) else mixed
        return result


def test_a_share_for_a_linear_group_cuts_the_rank_of_its_product() -> None:
    torch.manual_seed(0)
    module = Bottleneck(has_reader=False).double()
    x = torch.randn(5, 7, dtype=torch.float64)
    symmetry = rg.discover(module, (x,))
    (group,) = symmetry.groups
    assert group.kind == "linear"
    params = dict(module.state_dict())
    left, values, right = torch.linalg.svd(params["second.weight"] @ params["first.weight"])
    best = left[:, :2] * values[:2] @ right[:2]
    for task in (None, rg.Task(module, [(x, None)], has_targets=False)):
        result = rg.prune(params, symmetry, share={group.name: 0.5}, task=task)
        assert result.sizes[group.name] == (4, 2)
        assert result.params["first.weight"].shape == (2, 7)
        assert torch.allclose(result.params["second.weight"] @ result.params["first.weight"], best, atol=1e-12)
        if result.module is not None and result.certificate is not None:
            assert result.certificate.ok
            assert torch.allclose(result.module(x), x @ best.T, atol=1e-12)
    # A rank that the product does not have is cut without a change.
    flat = {**params, "second.weight": best @ torch.linalg.pinv(params["first.weight"])}
    result = rg.prune(flat, symmetry, share={group.name: 0.5})
    product = flat["second.weight"] @ flat["first.weight"]
    assert torch.allclose(result.params["second.weight"] @ result.params["first.weight"], product, atol=1e-10)


def test_cut_ranks_do_not_depend_on_the_gauge_and_are_cut_by_name_alone() -> None:
    torch.manual_seed(1)
    module = Bottleneck(has_reader=True).double()
    x = torch.randn(5, 7, dtype=torch.float64)
    symmetry = rg.discover(module, (x,))
    name = next(group.name for group in symmetry.groups if group.kind == "linear")
    params = dict(module.state_dict())
    task = rg.Task(module, [(x, None)], has_targets=False)
    first = rg.prune(params, symmetry, share={name: 0.5}, task=task)
    moved = symmetry.act(symmetry.random(torch.Generator().manual_seed(2)), params)
    second = rg.prune(moved, symmetry, share={name: 0.5}, task=task)
    assert first.module is not None
    assert second.module is not None
    assert torch.allclose(first.module(x), second.module(x), atol=1e-10)
    assert not torch.allclose(first.module(x), module(x), atol=1e-3)
    left = rg.prune(params, symmetry, share=0.5, task=task)
    assert name in dict(left.fixed)
    assert "reduces its rank" in dict(left.fixed)[name]
    assert left.params["first.weight"].shape == (4, 7)


class Normed(nn.Module):
    """ReLU units that are divided by their norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 9), nn.Linear(9, 3)

    def forward(self, x: Tensor) -> Tensor:
        units = self.first(x).relu()
        result: Tensor = self.second(units / units.norm(dim=1, keepdim=True))
        return result


def test_a_silent_last_unit_does_not_hide_a_norm_over_its_group() -> None:
    torch.manual_seed(0)
    module = Normed().double()
    with torch.no_grad():
        module.first.bias[:-1] += 5.0
        module.first.bias[-1] = -100.0
    x = torch.randn(3, 4, dtype=torch.float64)
    symmetry = rg.discover(module, (x,))
    task = rg.Task(module, [(x, None)], has_targets=False)
    result = rg.prune(dict(module.state_dict()), symmetry, share=0.3, task=task)
    assert [name for name, reason in result.fixed if "a norm over its units" in reason] == ["first"]
    named = rg.prune(dict(module.state_dict()), symmetry, share={"first": 0.3}, task=task)
    assert named.sizes["first"] == (9, 6)
    assert named.certificate is not None
    assert named.certificate.cut is None


class Versioned(nn.Module):
    """A module that loads only tensors with their version, as MNASNet of torchvision does."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(self.norm(self.first(x)).relu())
        return result

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *rest):  # type: ignore[no-untyped-def]
        if local_metadata.get("version") is None:
            raise ValueError("version should be set")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


def test_modules_that_load_by_version_are_cut_and_hold_the_result() -> None:
    torch.manual_seed(0)
    module = Versioned().double().eval()
    module.first.bias.data += 1.0
    x = torch.randn(5, 4, dtype=torch.float64)
    symmetry = rg.discover(module, (x,))
    task = rg.Task(module, [(x, None)], has_targets=False)
    result = rg.prune(dict(module.state_dict()), symmetry, share=0.5, task=task)
    assert result.module is not None
    assert result.params["first.weight"].shape == (4, 4)
    held = result.module.state_dict()
    assert all(torch.equal(held[name], tensor) for name, tensor in result.params.items())

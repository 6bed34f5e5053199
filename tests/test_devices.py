"""Devices: networks stay on their devices, and nothing as large as a cost leaves the device while a batch is
optimized.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from threading import Event
from typing import Any

import pytest
import torch
from coverings import covering
from methods import EVERY, Heads, Sine
from pretend_device import DEVICE, PretendDevice, TwoDevicesError
from symmetries import BY_HAND, drawn, mlp_symmetry
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import regauge as rg
from regauge.alignment.engine import searches
from regauge.alignment.engine.ascent import Ascent, Neighborhoods
from regauge.alignment.engine.climbs import make_ascent
from regauge.alignment.engine.family_costs import FamilyCost
from regauge.alignment.engine.nested_blocks import solve_family
from regauge.core.balance import balance
from regauge.core.families import compared, families
from regauge.core.symmetry import Symmetry
from regauge.nets.transformer import GPT
from regauge.training import Adam

LEAVING = (Tensor.cpu, Tensor.numpy, Tensor.tolist, Tensor.__array__)
SYMMETRIES = {
    **{kind: mlp_symmetry(4, 20, 20, 3, kind=kind) for kind in ("permutation", "signed", "dihedral")},
    "stream": BY_HAND["stream"],
    "recurrent": BY_HAND["recurrent"],
}


class Transfers(TorchFunctionMode):
    """A counter of the entries of tensors that leave their device, outside of the assignment."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in LEAVING and not is_assigning():
            self.sizes.append(args[0].numel())
        return func(*args, **(kwargs or {}))


def is_assigning() -> bool:
    """Return whether the module of assignments is among the callers."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_globals["__name__"] == "regauge.core.assignment":
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


@pytest.mark.parametrize("pairs", [1, 3])
@pytest.mark.parametrize("name", SYMMETRIES)
def test_only_the_assignment_takes_costs_from_their_device(name: str, pairs: int) -> None:
    """Apart from costs, only a few numbers for each unit reach the CPU: the values of elements, and objectives."""
    symmetry: Symmetry = SYMMETRIES[name]
    a, b = far_pairs(symmetry, pairs)
    with Transfers() as transfers:
        ascent = make_ascent(symmetry, a, b)
        ascent.start_from_barycenter()
        ascent.climb(torch.arange(pairs), 100)
        ascent.objectives()
    units = max(group.size for group in symmetry.groups)
    assert transfers.sizes
    assert max(transfers.sizes) <= pairs * 2 * units < pairs * units**2


def far_pairs(symmetry: Symmetry, pairs: int) -> list[dict[str, Tensor]]:
    """Return random first and second networks, `[pair, ...]`."""
    drawings = [[drawn(symmetry, seed + k) for k in range(pairs)] for seed in (0, 10)]
    return compared([{n: torch.stack([p[n] for p in many]) for n in many[0]} for many in drawings], symmetry)


def independent(name: str) -> Symmetry:
    """Return a symmetry, or the symmetry of a transformer, most of whose groups depend only on the stream."""
    if name != "transformer":
        return SYMMETRIES[name]
    module = GPT(7, 5, width=8, layers=3, heads=2)
    return rg.discover(module, (torch.zeros(1, 5, dtype=torch.int64),), verify=False)


@pytest.mark.parametrize("pairs", [1, 3])
@pytest.mark.parametrize("name", [*SYMMETRIES, "transformer"])
def test_searches_at_the_same_time_find_what_one_after_another_does(name: str, pairs: int) -> None:
    symmetry = independent(name)
    a, b = far_pairs(symmetry, pairs)
    around = Neighborhoods.of(families(symmetry.groups, {n: symmetry.sites[n] for n in a}))
    ends = [Ascent(around, a, b, solve_family, searches=count) for count in (1, 4)]
    for end in ends:
        end.start_from_barycenter()
        end.climb(torch.arange(pairs), 100)
    assert torch.equal(ends[0].gained, ends[1].gained)
    values = [dict(end.networks.element.items()) for end in ends]
    for group, value in values[0].items():
        for (_, one), (_, other) in zip(value.items(), values[1][group].items(), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("count", [1, 3])
def test_the_next_cost_is_computed_while_the_last_is_searched(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    symmetry = independent("transformer")
    a, b = far_pairs(symmetry, 1)
    around = Neighborhoods.of(families(symmetry.groups, {n: symmetry.sites[n] for n in a}))
    next_is_there, costs, seen = Event(), list[int](), list[bool]()
    cost, closest = FamilyCost.cost, FamilyCost.closest

    def counted(self: FamilyCost, *args: Any) -> Any:
        costs.append(len(costs))
        if len(costs) > 1:
            next_is_there.set()
        return cost(self, *args)

    def searched(self: FamilyCost, *args: Any) -> Any:
        if not seen:
            seen.append(next_is_there.wait(30 if count > 1 else 0))
        return closest(self, *args)

    ascent = Ascent(around, a, b, solve_family, searches=count)
    # Feed-forward layers, which depend on the stream alone, come first.
    order = sorted(range(len(around.families)), key=lambda k: (around.families[k].is_nested, len(around.neighbors[k])))
    ascent._order[0] = order
    monkeypatch.setattr(FamilyCost, "cost", counted)
    monkeypatch.setattr(FamilyCost, "closest", searched)
    ascent.sweep(torch.arange(1))
    # Several searches may begin before the first one ends.
    assert {*seen} == {count > 1}


@pytest.mark.parametrize("pairs", [1, 3])
def test_a_search_waits_for_its_device_a_few_times(pairs: int) -> None:
    """The search waits once for the profits, and for a few numbers: finiteness, and the new and the old objective."""
    symmetry = mlp_symmetry(4, 64, 64, 64, 3, kind="permutation")  # larger than what is searched at once, without sums
    a, b = far_pairs(symmetry, pairs)
    with PretendDevice() as device:
        ascent = make_ascent(symmetry, device.bring(a), device.bring(b))
        device.waits = 0
        ascent.sweep(torch.arange(pairs))
        assert 0 < device.waits <= 5 * len(symmetry.groups)


def test_searches_share_the_cores_on_a_device_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    symmetry = SYMMETRIES["permutation"]
    a, b = far_pairs(symmetry, 1)
    assert make_ascent(symmetry, a, b)._searches == 1
    with PretendDevice() as device:
        monkeypatch.setattr(searches, "count_searches", lambda: 5)
        assert make_ascent(symmetry, device.bring(a), device.bring(b))._searches == 5


class Attending(nn.Module):
    """Convolutions, and queries and keys with four dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(3, 8, 9), nn.Conv1d(8, 40, 9)
        self.query, self.key = (nn.Linear(40, 4, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x).relu()).relu().mT
        found: Tensor = self.query(x) @ self.key(x).mT
        return found


def test_only_sums_leave_a_device_to_be_balanced() -> None:
    module = Attending()
    symmetry = rg.discover(module, (torch.zeros(1, 3, 20),), verify=False)
    assert {group.kind for group in symmetry.groups} >= {"scaled", "linear"}
    params = {name: tensor.detach() for name, tensor in module.state_dict().items()}
    here = balance(params, symmetry)
    with PretendDevice() as device:
        there = balance(device.bring(params), symmetry)
    assert 0 < max(device.left) <= 40 * 8 < params["second.weight"].numel()
    for name, value in here.items():
        for part, tensor in value.items():
            assert torch.allclose(tensor, dict(there[name].items())[part], rtol=1e-5)


class Residual(nn.Module):
    """Convolutions with batch normalization around a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first, self.second = (nn.Conv2d(c, 4, 3, padding=1, bias=False) for c in (2, 4, 4))
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(3))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norms[0](self.stem(x)).relu()
        x = (x + self.norms[2](self.second(self.norms[1](self.first(x)).relu()))).relu()
        result: Tensor = self.head(x.mean((2, 3)))
        return result


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (
        lambda: nn.Sequential(
            nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), Sine(), nn.Linear(6, 3)
        ),
        (8, 4),
    ),
    "attention": (Heads, (2, 3, 6)),
    "residual": (Residual, (4, 2, 5, 5)),
}


@dataclass(frozen=True)
class OnDevice:
    """Two networks, their module and data, all on the pretended device."""

    device: PretendDevice
    module: nn.Module
    symmetry: Symmetry
    a: rg.Params
    b: rg.Params
    task: rg.Task

    def require(self, *networks: Mapping[str, Tensor]) -> None:
        for network in networks:
            left = [name for name, tensor in network.items() if not self.device.holds(tensor)]
            assert not left, f"these left the device: {left}"


@pytest.fixture(params=MODULES)
def there(request: pytest.FixtureRequest) -> Iterator[OnDevice]:
    torch.manual_seed(0)
    make, shape = MODULES[request.param]
    module, inputs = make().eval(), torch.randn(shape)
    symmetry = rg.discover(module, (inputs,), verify=False)
    a = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    b = {name: t + 0.1 * torch.rand_like(t) if t.is_floating_point() else t for name, t in a.items()}
    with PretendDevice() as device:
        device.adopt(module)
        inputs = device.bring({"inputs": inputs})["inputs"]
        task = rg.Task(module, [(inputs, torch.randn_like(module(inputs).detach()))], nn.functional.mse_loss)
        yield OnDevice(device, module, symmetry, device.bring(a), device.bring(b), task)


def test_two_devices_are_told_apart() -> None:
    with PretendDevice() as device:
        here, there = torch.ones(3), torch.ones(3).to(DEVICE)
        assert device.holds(there)
        assert device.holds(there * 2 + torch.tensor(1.0))
        assert not device.holds(there.cpu())
        assert there.device == DEVICE
        with pytest.raises(TwoDevicesError, match="two devices"):
            here + there
        with pytest.raises(TypeError, match="numpy"):
            there.numpy()


def test_networks_stay_on_their_device(there: OnDevice) -> None:
    symmetry, a, b, chance = there.symmetry, there.a, there.b, torch.Generator().manual_seed(0)
    moved = symmetry.act(symmetry.random(chance), a)
    many = {name: torch.stack([t] * 3) for name, t in a.items()}
    there.require(
        moved,
        rg.align(a, b, symmetry).params,
        rg.align(a, b, symmetry, method=rg.WeightMatching(restarts=2), generator=chance).params,
        *rg.align_many([a, b, moved], symmetry).params,
        *rg.align_many(
            [symmetry.act(symmetry.random(chance), a) for _ in range(4)],
            symmetry,
            method=rg.alignment.MergeMany(core=2),
        ).params,
        rg.alignment.align_pairs(many, symmetry.act(symmetry.random(chance, batch=(3,)), many), symmetry).params,
        rg.merge([a, b], symmetry).params,
        rg.merge(
            [b, moved], symmetry, base=a, rule=rg.merging.Dare(0.5, rg.merging.Ties(0.5)), generator=chance
        ).params,
        rg.canonicalize(b, symmetry),
        rg.canonicalize(b, symmetry, reference=a),
    )
    rg.canonical.orbit_distance(a, b, symmetry)


@pytest.mark.parametrize(
    ("name", "there"),
    covering([name for name, method in EVERY.items() if not method.joint_roles], MODULES),
    indirect=["there"],
)
def test_methods_keep_networks_on_their_device(there: OnDevice, name: str) -> None:
    chance = torch.Generator().manual_seed(0)
    found = rg.align(there.a, there.b, there.symmetry, method=EVERY[name], task=there.task, generator=chance)
    there.require(found.params)


def test_what_lies_between_networks_is_on_their_device(there: OnDevice) -> None:
    a, b, task = there.a, there.b, there.task
    rg.line(a, b, task, points=3)
    merged = rg.merge([a, b], there.symmetry, rule=rg.merging.GreedySoup(), task=task).params
    there.require(merged, rg.repair(merged, there.module, [a, b], [inputs for inputs, _ in task.batches]).params)


def test_signals_are_fitted_on_their_device() -> None:
    inr, chance = rg.inr.image_inr(8, 8), torch.Generator().manual_seed(0)
    with PretendDevice() as device:
        image = device.bring({"image": torch.rand(1, 8, 8)})["image"]
        start, config = device.bring(inr.start(chance)), rg.inr.FitConfig(steps=2, optimizer=Adam(1e-3))
        found = rg.inr.fit(inr, rg.inr.image_samples(image), config, start=start, generator=chance)
        assert all(device.holds(tensor) for tensor in found.params.values())

"""The loader yields every network once in an epoch, and the same batches for the same generator; it preserves
functions.
"""

import json
import multiprocessing
import os
import pickle
import signal
import warnings
from itertools import islice
from pathlib import Path

import models
import numpy as np
import pytest
import torch
import translation_nets
import weightspace_cases
from torch.func import functional_call, vmap

import regauge as rg
from regauge.core.moving.random_moves import RandomMoves
from regauge.core.outputs import output_tensors
from regauge.core.params import Params
from regauge.storage import Store
from regauge.storage.architecture import Architecture
from regauge.storage.loader import SHARING, Batch, Loader
from regauge.storage.statistics import Statistics

SINE = {"in_features": 4, "width": 6, "out_features": 2, "depth": 2}
ARCHITECTURES = {
    "relu": (Architecture("MLP", "regauge.nets.mlp:mlp", {"widths": [4, 6, 5, 2]}), ("permutation", "scale")),
    "sine": (
        Architecture(
            "SIREN", "regauge.nets.siren:Siren", {"in_features": 4, "width": 6, "out_features": 2, "depth": 2}
        ),
        ("permutation", "sign", "shift"),
    ),
}


def chance(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def population(architecture: Architecture, count: int, seed: int = 0) -> Params:
    generator = chance(seed)
    return {spec.name: torch.randn(count, *spec.shape, generator=generator) for spec in architecture.layout}


def copied(params: Params) -> Params:
    return {name: tensor.clone() for name, tensor in params.items()}


def symmetry_of(architecture: Architecture) -> rg.Symmetry:
    return rg.discover(architecture.module(), (torch.randn(3, 4, generator=chance()),))


def store_of(folder: Path, params: Params, name: str = "relu") -> Store:
    """Return the networks in a store of three shards."""
    architecture = ARCHITECTURES[name][0]
    store = Store.create(folder, architecture, symmetry_of(architecture))
    count = len(next(iter(params.values())))
    for k, part in enumerate(np.array_split(np.arange(count), 3)):
        rows = [{"id": int(i), "step": 0, "square": int(i) ** 2} for i in part]
        store.append({n: t[torch.from_numpy(part)] for n, t in params.items()}, rows, name=f"{k}")
    store.refresh()
    return store


def same(first: list[Batch], second: list[Batch]) -> bool:
    return len(first) == len(second) and all(
        np.array_equal(a.indices, b.indices) and all(torch.equal(a.params[n], b.params[n]) for n in a.params)
        for a, b in zip(first, second, strict=True)
    )


@pytest.mark.parametrize("batch", [1, 4, 7, 23, 50])
@pytest.mark.parametrize("is_last_dropped", [False, True])
def test_every_network_once_in_an_epoch(batch: int, is_last_dropped: bool) -> None:
    params = population(ARCHITECTURES["relu"][0], 23)
    if is_last_dropped and batch > 23:
        with pytest.raises(ValueError, match="23 networks are fewer than a batch of 50"):
            Loader(params, batch=batch, is_last_dropped=True, generator=chance())
        return
    loader = Loader(params, batch=batch, is_last_dropped=is_last_dropped, generator=chance())
    orders = []
    for _ in range(3):
        batches = list(loader)
        assert len(batches) == len(loader)
        seen = np.concatenate([b.indices for b in batches])
        assert len(set(seen.tolist())) == len(seen) == (23 // batch * batch if is_last_dropped else 23)
        for b in batches:
            assert all(torch.equal(b.params[n], params[n][torch.from_numpy(b.indices)]) for n in params)
        orders.append(seen.tolist())
    assert orders[0] != orders[1] != orders[2] != orders[0]


def test_a_store_gives_what_the_population_gives(tmp_path: Path) -> None:
    params = population(ARCHITECTURES["relu"][0], 20)
    store = store_of(tmp_path / "zoo", params)
    chosen = store.rows.where(square=lambda values: values > 20)
    masked = Loader(store, batch=6, indices=store.rows["square"] > 20, generator=chance())
    assert masked.indices.tolist() == chosen.tolist()
    settings = {"batch": 6, "indices": chosen, "augment": ("permutation",)}
    from_store = list(Loader(store, **settings, generator=chance()))
    assert same(from_store, list(Loader(params, symmetry=store.symmetry, **settings, generator=chance())))
    assert sorted(np.concatenate([b.indices for b in from_store])) == chosen.tolist()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_random_elements_leave_the_functions_unchanged(name: str) -> None:
    architecture, parts = ARCHITECTURES[name]
    module, params = architecture.module().double(), population(architecture, 20)
    params = {n: t.double() for n, t in params.items()}
    inputs = torch.randn(7, 4, dtype=torch.float64, generator=chance(5))
    outputs = vmap(lambda one: functional_call(module, one, (inputs,)))(params)
    loader = Loader(params, batch=8, augment=parts, symmetry=symmetry_of(architecture), generator=chance())
    moved = []
    for b in (*loader, *loader):
        found = vmap(lambda one: functional_call(module, one, (inputs,)))(b.params)
        torch.testing.assert_close(found, outputs[torch.from_numpy(b.indices)], rtol=1e-10, atol=1e-10)
        moved += [(k, row) for k, row in zip(b.indices.tolist(), b.params["layers.0.weight"], strict=True)]
    for k, row in moved:
        assert not torch.equal(row, params["layers.0.weight"][k])  # with a probability of nearly one
    first, second = (dict(moved[:20]), dict(moved[20:]))
    assert all(not torch.equal(first[k], second[k]) for k in first)  # anew in every epoch


def test_random_elements_translate_and_rotate() -> None:
    module, x, symmetry, params = translation_nets.network("decoder")
    networks = {name: torch.stack([t] * 3) for name, t in params.items()}
    before = functional_call(module, params, (x,))
    for part, found in (("translation", "blocks.0.k.bias"), ("rotation", "tokens.weight")):
        loader = Loader(networks, batch=3, augment=(part,), symmetry=symmetry, generator=chance())
        batch = next(iter(loader)).params
        for k in range(3):
            moved = {name: t[k] for name, t in batch.items()}
            torch.testing.assert_close(functional_call(module, moved, (x,)), before, rtol=1e-10, atol=1e-10)
            assert float((moved[found] - params[found]).abs().max()) > 0.01


def test_equal_generators_give_equal_batches_and_others_give_others() -> None:
    architecture, parts = ARCHITECTURES["relu"]
    params, symmetry = population(architecture, 20), symmetry_of(architecture)

    def batches(seed: int) -> list[Batch]:
        loader = Loader(params, batch=8, augment=parts, symmetry=symmetry, generator=chance(seed))
        return [*loader, *loader]

    assert same(batches(3), batches(3))
    assert not same(batches(3), batches(4))


@pytest.mark.parametrize(("after", "batch", "count"), [(0, 6, 22), (1, 6, 22), (3, 6, 22), (4, 6, 22), (7, 16, 55)])
def test_a_resumed_loader_continues(after: int, batch: int, count: int, tmp_path: Path) -> None:
    store = store_of(tmp_path / "zoo", population(ARCHITECTURES["relu"][0], count))
    settings = {"batch": batch, "augment": ("permutation", "scale")}
    whole = list(islice(Loader(store, **settings, generator=chance()).stream(), 12))
    first = Loader(store, **settings, generator=chance())
    begun = list(islice(first.stream(), after))
    state = json.loads(json.dumps(first.state_dict()))
    other = Loader(pickle.loads(pickle.dumps(store)), **settings, generator=chance(9))
    other.load_state_dict(state)
    assert same(begun + list(islice(other.stream(), 12 - after)), whole)
    with pytest.raises(ValueError, match="other networks or another batch size"):
        Loader(store, batch=5, generator=chance()).load_state_dict(state)
    with pytest.raises(ValueError, match="other networks or another batch size"):
        Loader(store, batch=batch, indices=range(21), generator=chance()).load_state_dict(state)
    for absent in ({"number": 10**14}, {"number": -1}, {"epoch": -(10**14)}):
        with pytest.raises(ValueError, match="but an epoch has"):
            other.load_state_dict(state | absent)


@pytest.mark.parametrize(("batch", "count"), [(8, 50), (32, 200)])
def test_workers_give_together_what_one_loader_gives(batch: int, count: int) -> None:
    architecture, parts = ARCHITECTURES["relu"]
    params, symmetry = population(architecture, count), symmetry_of(architecture)

    def loader(rank: int, world: int) -> Loader:
        return Loader(params, batch=batch, augment=parts, symmetry=symmetry, rank=rank, world=world, generator=chance())

    single, shares = loader(0, 1), [loader(rank, 3) for rank in range(3)]
    for _ in range(2):
        whole, parts_of_it = list(single), [list(share) for share in shares]
        assert [len(part) for part in parts_of_it] == [3, 2, 2]
        assert same([parts_of_it[k % 3][k // 3] for k in range(7)], whole)


def test_workers_of_torch_share_the_batches(tmp_path: Path) -> None:
    architecture, parts = ARCHITECTURES["relu"]
    store = store_of(tmp_path / "zoo", population(architecture, 30))

    def loader() -> Loader:
        return Loader(store, batch=4, augment=parts, generator=chance())

    single, shared = loader(), loader()
    batches = torch.utils.data.DataLoader(shared, batch_size=None, num_workers=2)
    for epoch in range(2):
        shared.set_epoch(epoch)
        whole, found = list(single), [Batch(b.indices.numpy(), *b[1:]) for b in batches]
        assert same(sorted(found, key=lambda b: int(b.indices[0])), sorted(whole, key=lambda b: int(b.indices[0])))
    alone = torch.utils.data.DataLoader(loader(), batch_size=None)
    assert same([Batch(b.indices.numpy(), *b[1:]) for b in alone], list(loader()))


def test_batches_that_a_thread_prepares_are_the_same() -> None:
    architecture, parts = ARCHITECTURES["relu"]
    params, symmetry = population(architecture, 22), symmetry_of(architecture)

    def loader(prefetch: int) -> Loader:
        settings = {"batch": 4, "augment": parts, "symmetry": symmetry, "prefetch": prefetch}
        return Loader(params, **settings, generator=chance())

    for prefetch in (1, 2, 50):
        ahead = loader(prefetch)
        begun = list(islice(ahead.stream(), 8))
        other = loader(0)
        other.load_state_dict(ahead.state_dict())
        assert same(begun + list(islice(other.stream(), 4)), list(islice(loader(0).stream(), 12)))
    failing = Loader(
        {"a": params["layers.0.weight"]}, batch=4, augment=parts, symmetry=symmetry, prefetch=2, generator=chance()
    )
    with pytest.raises(KeyError, match="the parameters lack"):
        next(iter(failing))


@pytest.mark.parametrize(
    "case", ["resnet20_group_B", "grouped_conv", "depthwise_multiplier", "vit", "hf_gpt2", "concatenation"]
)
def test_random_elements_leave_any_function_unchanged(case: str) -> None:
    found = weightspace_cases.symmetry(case)
    parts = ("permutation", "sign", "scale", "shift")
    networks = weightspace_cases.population(case, 4)
    known = next(one for one in models.CASES if one.name == case)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = known.module().double().eval()
    inputs = tuple(x.double() if x.is_floating_point() else x for x in known.inputs())

    def run(params: Params, k: int) -> torch.Tensor:
        one = {name: tensor[k] for name, tensor in params.items()}
        return output_tensors(functional_call(module, one, inputs, known.kwargs(), tie_weights=False), known.outputs)[0]

    moved = RandomMoves(found, parts)(copied(networks), [((4,), chance())])
    for k in range(4):
        torch.testing.assert_close(run(moved, k), run(networks, k), rtol=1e-9, atol=1e-9)
    assert {n for n, t in moved.items() if not torch.equal(t, networks[n])} == {
        n
        for n, t in found.act(found.random(chance(1), parts, (4,)), networks).items()
        if not torch.equal(t, networks[n])
    }


def test_random_permutations_are_uniform() -> None:
    symmetry = rg.Symmetry.from_axes({"a": ("h",)}).bind({"a": torch.zeros(3)})
    moved = RandomMoves(symmetry, ("permutation",))({"a": torch.arange(3.0).repeat(6000, 1)}, [((6000,), chance())])[
        "a"
    ]
    _, counts = torch.unique(moved, dim=0, return_counts=True)
    assert len(counts) == 6
    assert float((counts / 1000 - 1).abs().max()) < 0.15


def test_batches_share_elements_that_are_independent_within_each() -> None:
    params = {"a": torch.arange(1.0, 4).repeat(2048, 1), "b": torch.ones(2048, 3)}
    places = (rg.Placement("a", 0, sign=(0,)), rg.Placement("b", 0, sign=(1,)))
    symmetry = rg.Symmetry((rg.Group("h", 3, places, signs=1),), {"a": (3,), "b": (3,)})
    loader = Loader(params, batch=64, augment=("permutation", "sign"), symmetry=symmetry, generator=chance())
    elements = []
    for _ in range(12):
        drawn = [torch.cat([batch.params["a"], batch.params["b"]], 1) for batch in loader]
        runs = [torch.stack(drawn[start : start + SHARING]) for start in range(0, len(drawn), SHARING)]
        assert all(torch.equal(one, run[0]) for run in runs for one in run)
        elements += [run[0] for run in runs]
    assert len({tuple(one.flatten().tolist()) for one in elements}) == len(elements) == 12 * 2048 // 64 // SHARING
    whole = torch.cat(elements)
    _, counts = torch.unique(whole, dim=0, return_counts=True)
    assert len(counts) == 6 * 8
    assert float(((counts - len(whole) / 48) ** 2).sum() / (len(whole) / 48)) < 100  # chi-squared, 47 degrees


def test_statistics_of_a_store_are_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGAUGE_CACHE", str(tmp_path / "cache"))
    store = store_of(tmp_path / "zoo", population(ARCHITECTURES["relu"][0], 12))
    first, some = Statistics.of(store), Statistics.of(store, range(6))
    monkeypatch.setattr("regauge.storage.statistics._join", None)  # what would be needed to compute them
    assert Statistics.of(Store.open(store.folder)) == first != some == Statistics.of(store, range(6))
    with pytest.raises(TypeError):
        Statistics.of(store, is_centered=False)
    store.append(population(ARCHITECTURES["relu"][0], 2), [{"id": 20 + k, "step": 0} for k in range(2)])
    store.refresh()
    with pytest.raises(TypeError):
        Statistics.of(store)


def test_standardized_values_have_mean_zero_and_deviation_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params = population(ARCHITECTURES["relu"][0], 40)
    params = {n: (k + 1) * t + 10 * k for k, (n, t) in enumerate(params.items())} | {"count": torch.arange(40)}
    monkeypatch.setattr("regauge.storage.statistics.BLOCK_BYTES", 1000)  # a few networks a block
    statistics = Statistics.of(params)
    (batch,) = Loader(params, batch=40, statistics=statistics, generator=chance())
    for name, tensor in batch.params.items():
        if name == "count":
            assert torch.equal(tensor, torch.from_numpy(batch.indices))
            continue
        assert abs(float(tensor.mean())) < 1e-5
        assert abs(float(tensor.std(correction=0)) - 1) < 1e-5
    back = statistics.restore(batch.params)
    for name, tensor in params.items():
        torch.testing.assert_close(back[name], tensor[torch.from_numpy(batch.indices)], rtol=1e-5, atol=1e-5)
    del params["count"]
    store = store_of(tmp_path / "zoo", params)
    of_store, of_params = Statistics.of(store), Statistics.of(params)
    assert of_store.mean == pytest.approx(of_params.mean, rel=1e-9)
    assert of_store.std == pytest.approx(of_params.std, rel=1e-9)
    plain = Statistics.of(params, range(10), is_centered=False)
    assert set(plain.mean.values()) == {0.0}
    for name, deviation in plain.std.items():
        assert deviation == pytest.approx(float(params[name][:10].double().square().mean().sqrt()), rel=1e-9)


def test_constant_tensors_are_divided_by_one() -> None:
    statistics = Statistics.of({"a": torch.full((4, 3), 2.5), "b": torch.zeros(4, 0)})
    assert (statistics.mean["a"], statistics.std["a"], statistics.std["b"]) == (2.5, 1.0, 1.0)


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    params = population(ARCHITECTURES["relu"][0], 5)
    with pytest.raises(ValueError, match="need the symmetry"):
        Loader(params, augment=("permutation",), generator=chance())
    with pytest.raises(ValueError, match="unknown"):
        Loader(params, augment=("turn",), generator=chance())
    with pytest.raises(ValueError, match="ranks count from 0"):
        Loader(params, rank=2, world=2, generator=chance())
    with pytest.raises(ValueError, match="0 networks are fewer than a batch"):
        Loader(params, indices=[], generator=chance())
    with pytest.raises(IndexError, match="the population has the networks 0 to 4, but 5 was asked for"):
        Loader(params, indices=[5], generator=chance())
    with pytest.raises(ValueError, match="one model axis of one length"):
        Loader(params | {"more": torch.zeros(3)}, generator=chance())
    with pytest.raises(ValueError, match="NaN or Inf"):
        Statistics.of({"a": torch.tensor([1.0, float("nan")])})


WIDE = Architecture("MLP", "regauge.nets.mlp:mlp", {"widths": [4, 8, 2]})


def several(folder: Path) -> tuple[list[Store], list[Params]]:
    """Return two stores of one architecture, and one store of another architecture."""
    relu = ARCHITECTURES["relu"][0]
    networks = [population(relu, 14, 1), population(relu, 9, 2), population(WIDE, 10, 3)]
    stores = [store_of(folder / "first", networks[0]), store_of(folder / "second", networks[1])]
    other = Store.create(folder / "other", WIDE, symmetry_of(WIDE))
    other.append(networks[2], [{"id": k, "step": 0} for k in range(10)])
    other.refresh()
    return [*stores, other], networks


def test_batches_of_several_stores_have_one_layout_each(tmp_path: Path) -> None:
    stores, networks = several(tmp_path)
    loader = Loader(stores, batch=4, generator=chance())
    assert loader.collection.layouts == (0, 0, 1)
    mixed = 0
    for _ in range(3):
        batches = list(loader)
        assert len(batches) == len(loader) == 6 + 3
        assert [b.layout for b in batches] != sorted(b.layout for b in batches)
        seen = np.concatenate([b.indices for b in batches])
        assert sorted(seen.tolist()) == list(range(33))
        for b in batches:
            member, there = loader.collection.locate(b.indices)
            assert {loader.collection.layouts[k] for k in member} == {b.layout}
            mixed += len(set(member.tolist())) > 1
            for row, (k, number) in enumerate(zip(member.tolist(), there.tolist(), strict=True)):
                assert all(torch.equal(t[row], networks[k][n][number]) for n, t in b.params.items())
    assert mixed  # networks of the two stores of one architecture share batches
    chosen = [1, 15, 22, 23, 30]
    some = Loader(stores, batch=2, indices=chosen, generator=chance())
    assert sorted(np.concatenate([b.indices for b in some]).tolist()) == chosen
    with pytest.raises(IndexError, match="the collection has the networks 0 to 32"):
        Loader(stores, indices=[33], generator=chance())


def test_networks_of_several_architectures_are_moved_and_standardized(tmp_path: Path) -> None:
    stores, networks = several(tmp_path)
    statistics = [Statistics.of(stores[:2]), Statistics.of(stores[2])]
    settings = {"batch": 5, "augment": ("permutation", "scale"), "statistics": statistics}
    x = torch.randn(7, 4, generator=chance(3))
    modules = [ARCHITECTURES["relu"][0].module(), WIDE.module()]
    loader = Loader(stores, **settings, generator=chance())
    for batch in loader:
        params = statistics[batch.layout].restore(batch.params)
        member, there = loader.collection.locate(batch.indices)
        for row, (k, number) in enumerate(zip(member.tolist(), there.tolist(), strict=True)):
            found = functional_call(modules[batch.layout], {n: t[row] for n, t in params.items()}, (x,))
            known = functional_call(modules[batch.layout], {n: t[number] for n, t in networks[k].items()}, (x,))
            torch.testing.assert_close(found, known, rtol=1e-3, atol=1e-3)
    with pytest.raises(ValueError, match="statistics for 1 layouts"):
        Loader(stores, statistics=statistics[0], generator=chance())
    with pytest.raises(ValueError, match="several layouts cannot be stacked"):
        Statistics.of(stores)
    with pytest.raises(ValueError, match="2 symmetries"):
        Loader(stores, symmetry=[None, None], generator=chance())


def dump(folder: str, workers: int, out: str, state: str, stop: int) -> None:
    """Write the remaining batches of an epoch to a file, and the state after each batch. The function runs in a
    separate process.
    """
    warnings.filterwarnings("ignore", message="This DataLoader will create")  # more workers than cores
    stores = [Store.open(Path(folder) / name) for name in ("first", "second", "other")]
    loader = Loader(stores, batch=3, augment=("permutation", "scale"), prefetch=2, generator=chance(7))
    if Path(state).exists():
        loader.load_state_dict(json.loads(Path(state).read_text()))
    batches = torch.utils.data.DataLoader(loader, batch_size=None, num_workers=workers)
    for number, batch in enumerate(batches):
        with open(out, "a") as file:
            values = [float(t.double().sum()) for t in batch.params.values()]
            file.write(json.dumps([batch.layout, batch.indices.tolist(), values]) + "\n")
        Path(state).write_text(json.dumps(dict(batch.state)))
        if number == stop:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_an_epoch_in_workers_goes_on_after_a_kill(tmp_path: Path, workers: int) -> None:
    several(tmp_path)
    context = multiprocessing.get_context("fork")

    def run(name: str, stop: int) -> int | None:
        args = (str(tmp_path), workers, str(tmp_path / name), str(tmp_path / f"{name}.json"), stop)
        process = context.Process(target=dump, args=args)
        process.start()
        process.join()
        return process.exitcode

    assert run("whole", -1) == 0
    assert run("killed", 4) == -signal.SIGKILL
    assert run("killed", -1) == 0
    whole, killed = ((tmp_path / name).read_text().splitlines() for name in ("whole", "killed"))
    assert len(whole) == 8 + 4
    assert killed == whole  # the same batches in the same order
    alone = Loader([Store.open(tmp_path / name) for name in ("first", "second", "other")], batch=3, generator=chance(7))
    assert [json.loads(line)[1] for line in whole] == [b.indices.tolist() for b in alone]


def test_processes_that_share_an_epoch_go_on_from_one_state() -> None:
    params = population(ARCHITECTURES["relu"][0], 31)

    def loader(rank: int) -> Loader:
        return Loader(params, batch=4, rank=rank, world=3, generator=chance())

    whole = [list(loader(rank)) for rank in range(3)]
    state = whole[0][1].state  # of the first process, when all have done two steps
    for rank in range(3):
        other = loader(rank)
        other.load_state_dict(state)
        assert same(list(other), whole[rank][2:])
    assert whole[1][-1].state["epoch"] == 1

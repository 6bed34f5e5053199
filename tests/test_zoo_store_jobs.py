"""Jobs that fill stores: populations are trained, aligned and compared in parts, and the parts equal the whole."""

import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from regauge.alignment import align_pairs
from regauge.checkpoints.writing import save
from regauge.core import products
from regauge.core.params import Params
from regauge.core.products import use_library
from regauge.storage import Store
from regauge.storage.architecture import Architecture
from regauge.zoo import (
    Checkpoints,
    Config,
    Discard,
    Share,
    plan_population,
    plan_training,
    reference,
    run_jobs,
    sample,
    train,
)
from regauge.zoo.jobs.compare_blocks import plan_comparison
from regauge.zoo.jobs.train_shards import Stage
from regauge.zoo.training.stack_state import SavedNetworks

UCI = Architecture("MLP 30-16-16-2", "regauge.nets.mlp:mlp", {"widths": [30, 16, 16, 2]})
CONFIG = Config(UCI, "breast-cancer", 20, steps=6, group=4, checkpoints=Checkpoints(every=3, warmup=3))


def test_a_population_in_shards_is_the_population(tmp_path: Path) -> None:
    store, jobs = plan_training(CONFIG, tmp_path / "zoo", size=7)
    assert jobs.size == 7
    assert run_jobs(jobs, share=Share(1, 2)) == 1
    assert run_jobs(jobs) == 2
    store, jobs = plan_training(CONFIG, tmp_path / "zoo", size=7)
    assert run_jobs(jobs) == 0
    assert len(store) == 40
    assert sorted(zip(store.rows["id"], store.rows["step"], strict=True)) == [(k, s) for k in range(20) for s in (3, 6)]
    final = store.rows.final()
    order = np.argsort(store.rows["id"][final])
    found = store.read(final[order])
    whole = [block for block in train(CONFIG) if block.rows[0]["step"] == 6]
    expected = {name: torch.cat([block.params[name] for block in whole]) for name in found}
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-6)
    assert store.symmetry is not None
    assert [group.size for group in store.symmetry.groups] == [16, 16]


def test_what_was_discarded_is_in_the_store_and_not_final(tmp_path: Path) -> None:
    store, jobs = plan_training(
        replace(CONFIG, checkpoints=None, discards=(Discard(3, worst=0.25),)), tmp_path / "zoo", size=8
    )
    run_jobs(jobs)
    assert sorted(store.rows["id"]) == list(range(20))
    discarded = store.rows.where(is_discarded=True)
    assert len(discarded) == 5
    assert set(store.rows["step"][discarded]) == {3}
    assert sorted([*discarded, *store.rows.final()]) == list(range(20))
    assert set(store.rows["step"][store.rows.final()]) == {6}
    assert np.intersect1d(sample(store, 20), discarded).tolist() == []
    lost = int(store.rows["id"][discarded[0]])
    with pytest.raises(ValueError, match=f"the id {lost} and a last network that is finite and not discarded"):
        reference(store, lost)


@pytest.fixture
def small_stacks(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Use stacks of four networks, and return the list of stacks that began."""
    begun: list[list[int]] = []

    def counted(config: Config, **settings: Any) -> Iterator[SavedNetworks]:
        for block in train(config, **settings):
            if list(block.stack) not in begun[-1:]:
                begun.append(list(block.stack))
            yield block

    monkeypatch.setattr("regauge.zoo.training.trainer.STACK", 4)
    monkeypatch.setattr("regauge.zoo.jobs.train_shards.train", counted)
    return begun


def trained_alone(folder: Path) -> Store:
    """Return the same population, trained in one piece."""
    store, jobs = plan_training(CONFIG, folder, size=20)
    run_jobs(jobs)
    store.refresh()
    return store


def assert_same_population(store: Store, other: Store) -> None:
    """Assert that two populations are equal, for any shards."""
    order, reference = (np.lexsort((s.rows["step"], s.rows["id"])) for s in (store, other))
    names = [name for name in other.rows.names if name != "train_loss"]
    for name in names:
        assert store.rows[name][order].tolist() == other.rows[name][reference].tolist() or "loss" in name
    for name, tensor in store.read(order).items():
        torch.testing.assert_close(tensor, other.read(reference)[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("last", [3, 5])
def test_a_kill_loses_the_stack_in_training_alone(
    last: int, small_stacks: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kill comes in the middle of the fourth stack, or after the last stack, before the shard is written."""
    store, jobs = plan_training(CONFIG, tmp_path / "zoo", size=20)

    def killed(self: Stage, ids: list[int], blocks: Iterator[SavedNetworks], *, is_last: bool) -> None:
        if len(small_stacks) > last:
            next(blocks)
            block = next(blocks)
            self._kept().append(block.params, block.rows, name=f"{ids[0]:09d}-{ids[-1] + 1:09d}-0000dead-000000-more")
            raise KeyboardInterrupt
        keep(self, ids, blocks, is_last=False)

    keep = Stage.keep

    def stopped(self: Stage) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Stage, "keep", killed)
        patch.setattr(Stage, "publish", stopped)
        with pytest.raises(KeyboardInterrupt):
            run_jobs(jobs)
    assert store.refresh() == 0
    assert (tmp_path / "zoo" / "staged" / "train-000000").is_dir()
    del small_stacks[:]
    assert run_jobs(jobs) == 1
    assert small_stacks == [list(range(4 * k, 4 * k + 4)) for k in range(last, 5)]
    assert sorted(os.listdir(tmp_path / "zoo")) == ["shards", "store.json"]
    store.refresh()
    assert len(store.shards) == 1
    assert_same_population(store, trained_alone(tmp_path / "alone"))


def test_long_trajectories_are_written_in_pieces(
    small_stacks: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, jobs = plan_training(CONFIG, tmp_path / "zoo", size=20)
    monkeypatch.setattr("regauge.zoo.jobs.train_shards.PIECE_BYTES", 4 * UCI.size * 10)
    assert run_jobs(jobs) == 1
    store.refresh()
    assert [shard.path.stem for shard in store.shards] == [
        *(f"train-000000-{k:06d}" for k in range(1, 5)),
        "train-000000",
    ]
    assert [shard.count for shard in store.shards] == [8] * 5
    assert sorted(os.listdir(tmp_path / "zoo")) == ["shards", "store.json"]
    assert_same_population(store, trained_alone(tmp_path / "alone"))


@pytest.mark.parametrize("moment", [0, 2, 4])
def test_the_same_job_at_two_workers(
    moment: int, small_stacks: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One worker does the whole job while the other worker is before, in or after the middle: nothing is lost or
    duplicated.
    """
    store, jobs = plan_training(CONFIG, tmp_path / "zoo", size=20)
    keep, calls = Stage.keep, []

    def overtaken(self: Stage, ids: list[int], blocks: Iterator[SavedNetworks], *, is_last: bool) -> None:
        calls.append(ids)
        if len(calls) == moment + 1:
            with monkeypatch.context() as patch:
                patch.setattr(Stage, "keep", keep)
                jobs(0)
        keep(self, ids, blocks, is_last=is_last)

    monkeypatch.setattr(Stage, "keep", overtaken)
    jobs(0)
    store.refresh()
    assert [shard.path.stem for shard in store.shards] == ["train-000000"]
    assert sorted(zip(store.rows["id"], store.rows["step"], strict=True)) == [(k, s) for k in range(20) for s in (3, 6)]
    assert not (tmp_path / "zoo" / "staged").exists()


def test_shards_are_some_minutes_of_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    # A network costs 6 steps of 32 examples, thrice 768 weights.
    work = 6 * 32 * 3 * (30 * 16 + 16 * 16 + 16 * 2)
    for networks in (100, 18, 7, 3, 1, 0.1):
        monkeypatch.setattr("regauge.zoo.jobs.train_shards.SHARD_WORK", networks * work * 1.01)
        _, jobs = plan_training(replace(CONFIG, batch=32), tmp_path / f"{networks}")
        sizes.append(jobs.size)
        # A store keeps its size, whatever a later version thinks.
        monkeypatch.setattr("regauge.zoo.jobs.train_shards.SHARD_WORK", 1e13)
        assert plan_training(replace(CONFIG, batch=32), tmp_path / f"{networks}")[1].size == jobs.size
    assert sizes == [20, 16, 4, 2, 1, 1]
    whole = replace(CONFIG, discards=(Discard(step=3, worst=0.5),))
    assert plan_training(whole, tmp_path / "whole", size=7)[1].size == 8


def test_data_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The data come from a function that is named, so every worker can call it."""
    (tmp_path / "my_own_data.py").write_text(
        "import torch\nfrom regauge.zoo import Examples\n"
        "def blobs():\n"
        "    generator = torch.Generator().manual_seed(0)\n"
        "    inputs, labels = torch.randn(40, 30, generator=generator), torch.arange(40) % 2\n"
        "    return Examples('blobs', inputs[:30], labels[:30], inputs[30:], labels[30:])\n"
        "def wrong():\n    return 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    store, jobs = plan_training(replace(CONFIG, data="my_own_data:blobs", count=3), tmp_path / "zoo", device="cpu:0")
    assert run_jobs(jobs) == 1
    store.refresh()
    assert len(store) == 6
    assert store.about["training"]["data"] == "my_own_data:blobs"
    for name, message in (("my_own_data:wrong", "returned a int"), ("my_own_data:other", "has no 'other'")):
        with pytest.raises(ValueError, match=message):
            plan_training(replace(CONFIG, data=name), tmp_path / "other")


def test_another_population_does_not_go_into_the_same_store(tmp_path: Path) -> None:
    plan_training(CONFIG, tmp_path / "zoo")
    for other in (replace(CONFIG, seed=1), replace(CONFIG, seed=2, count=21), replace(CONFIG, steps=7)):
        with pytest.raises(FileExistsError, match="other networks or settings"):
            plan_training(other, tmp_path / "zoo")
    with pytest.raises(ValueError, match="at least 1"):
        plan_training(CONFIG, tmp_path / "other", size=0)


def test_examples_are_read_where_networks_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> Any:
        raise ValueError(f"no examples of {name!r} here")

    _, jobs = plan_training(CONFIG, tmp_path / "zoo", size=10)
    jobs(0)
    with monkeypatch.context() as patch:
        patch.setattr("regauge.zoo.jobs.train_shards.load_examples", refuse)
        with pytest.raises(ValueError, match="no examples of 'breast-cancer' here"):
            plan_training(CONFIG, tmp_path / "zoo")
        with pytest.raises(ValueError, match="no examples"):
            plan_training(CONFIG, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    jobs(1)
    monkeypatch.setattr("regauge.zoo.jobs.train_shards.load_examples", refuse)
    store, jobs = plan_training(CONFIG, tmp_path / "zoo")
    assert run_jobs(jobs) == 0
    assert len(store) == 40


@pytest.mark.parametrize("before", [0, 1, 3])
def test_a_population_is_extended(before: int, tmp_path: Path) -> None:
    """A complete or incomplete store becomes equal to a population of the larger size."""
    _, jobs = plan_training(CONFIG, tmp_path / "zoo", size=7)
    for key in jobs.keys[:before]:
        jobs(key)
    bytes_before = {path: path.read_bytes() for path in (tmp_path / "zoo" / "shards").iterdir()}
    plan_training(replace(CONFIG, count=22), tmp_path / "zoo")
    store, more = plan_training(replace(CONFIG, count=30), tmp_path / "zoo")
    assert [more.ids(key) for key in more.keys] == [
        *(range(0, 7), range(7, 14), range(14, 20)),
        *(range(20, 22), range(22, 29), range(29, 30)),
    ]
    assert run_jobs(more) == 6 - before
    assert len(store) == 60
    assert all(path.read_bytes() == content for path, content in bytes_before.items())
    assert store.key == Store.open(tmp_path / "zoo").key
    found = store.read(store.rows.final()[np.argsort(store.rows["id"][store.rows.final()])])
    whole = [block for block in train(replace(CONFIG, count=30)) if block.rows[0]["step"] == 6]
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, torch.cat([b.params[name] for b in whole]), rtol=1e-4, atol=1e-6)
    again, jobs = plan_training(replace(CONFIG, count=30), tmp_path / "zoo")
    assert run_jobs(jobs) == 0
    assert again.about["training"]["count"] == 30
    with pytest.raises(FileExistsError, match="for 30 networks of this population already, and 20 are wanted"):
        plan_training(CONFIG, tmp_path / "zoo")


def test_networks_that_depend_on_their_number_are_not_extended(tmp_path: Path) -> None:
    config = replace(CONFIG, discards=(Discard(3, worst=0.5),), count=18)
    plan_training(config, tmp_path / "zoo", size=8)
    before = (tmp_path / "zoo" / "store.json").read_bytes()
    with pytest.raises(ValueError, match="no whole group of 4, of which the worst are given up"):
        plan_training(replace(config, count=30), tmp_path / "zoo")
    assert (tmp_path / "zoo" / "store.json").read_bytes() == before
    plan_training(replace(config, count=20), tmp_path / "whole", size=8)
    _, jobs = plan_training(replace(config, count=30), tmp_path / "whole")
    assert [jobs.ids(key).start for key in jobs.keys] == [0, 8, 16, 20, 28]


def squared_distances(first: Params, second: Params) -> Tensor:
    left, right = (torch.cat([t.flatten(1) for t in part.values()], 1).double() for part in (first, second))
    return torch.cdist(left, right).square()


def random_store(folder: Path, count: int) -> Store:
    from regauge.core.symmetry import Symmetry

    axes = {"layers.0.weight": ("a", None), "layers.0.bias": ("a",), "layers.1.weight": ("b", "a")}
    axes |= {"layers.1.bias": ("b",), "layers.2.weight": (None, "b")}
    store = Store.create(folder, UCI, Symmetry.from_axes(axes))
    generator = torch.Generator().manual_seed(0)
    for k in range(0, count, 3):
        n = min(3, count - k)
        params = {spec.name: torch.randn(n, *spec.shape, generator=generator) for spec in UCI.layout}
        if k == 3:
            params["layers.0.bias"][1, 0] = torch.nan
        store.append(params, [{"id": k + i, "step": 5, "seed": 7} for i in range(n)], name=f"part-{k}")
    return store


def test_a_store_is_aligned_shard_by_shard(tmp_path: Path) -> None:
    source = random_store(tmp_path / "zoo", 8)
    reference = {name: tensor[0] for name, tensor in source.read([0]).items()}
    save(reference, tmp_path / "reference.safetensors")
    target, jobs = plan_population(tmp_path / "zoo", tmp_path / "aligned", to=tmp_path / "reference.safetensors")
    assert run_jobs(jobs, executor=lambda: ThreadPoolExecutor(2)) == 3
    target.refresh()
    assert sorted(target.rows["id"].tolist()) == [0, 1, 2, 3, 5, 6, 7]
    assert (target.rows["objective"] >= target.rows["objective_before"]).all()
    assert set(target.rows["seed"].tolist()) == {7}
    assert source.symmetry is not None
    for k, row in enumerate(target.rows.dicts()):
        before = source.read([row["id"]])
        expected = align_pairs(reference, before, source.symmetry, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(row["objective"], float(expected.objective[0]), rtol=1e-5, atol=1e-5)
        x = torch.randn(4, 30)
        module = UCI.module()
        outputs = [
            torch.func.functional_call(module, {n: t[0] for n, t in params.items()}, (x,))
            for params in (before, target.read([k]))
        ]
        torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-4, atol=1e-4)
    assert run_jobs(jobs) == 0
    # A source that has grown is aligned by planning again; shards in which nothing is finite are done too.
    source.append({spec.name: torch.randn(2, *spec.shape) for spec in UCI.layout}, [{"id": 8, "step": 5}] * 2)
    source.append({spec.name: torch.full((1, *spec.shape), torch.nan) for spec in UCI.layout}, [{"id": 10, "step": 5}])
    source.append({spec.name: torch.empty(0, *spec.shape) for spec in UCI.layout}, [])
    target, jobs = plan_population(tmp_path / "zoo", tmp_path / "aligned", to=tmp_path / "reference.safetensors")
    assert run_jobs(jobs) == 3
    assert run_jobs(jobs) == 0
    assert len(target) == 9


def test_a_store_is_aligned_from_one_source_to_one_reference(tmp_path: Path) -> None:
    source, other = (random_store(tmp_path / name, 5) for name in ("zoo", "other"))
    for k in (0, 1):
        save({name: tensor[0] for name, tensor in source.read([k]).items()}, tmp_path / f"{k}.safetensors")
    plan_population(tmp_path / "zoo", tmp_path / "aligned", to=tmp_path / "0.safetensors")
    with pytest.raises(FileExistsError, match=r"\(source.key\)"):
        plan_population(tmp_path / "other", tmp_path / "aligned", to=tmp_path / "0.safetensors")
    with pytest.raises(FileExistsError, match=r"\(aligned.to.file, aligned.to.sha256\)"):
        plan_population(tmp_path / "zoo", tmp_path / "aligned", to=tmp_path / "1.safetensors")
    # An aligned store is aligned again like any other.
    again, _ = plan_population(tmp_path / "aligned", tmp_path / "again", to=tmp_path / "1.safetensors")
    assert again.about["aligned"]["to"]["file"] == "1.safetensors"
    assert again.about["source"]["about"]["aligned"]["to"]["file"] == "0.safetensors"
    shutil.move(tmp_path / "zoo", tmp_path / "moved")
    plan_population(tmp_path / "moved", tmp_path / "aligned", to=tmp_path / "0.safetensors")
    assert other.key != source.key


def test_blocks_are_the_matrix(tmp_path: Path) -> None:
    store = random_store(tmp_path / "zoo", 8)
    indices = [7, 1, 0, 2, 6]
    whole = squared_distances(store.read(indices), store.read(indices)).numpy()
    jobs = plan_comparison(tmp_path / "zoo", tmp_path / "parts", indices, squared_distances, size=2)
    assert jobs.keys == [(0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 2)]
    with pytest.raises(FileNotFoundError):
        jobs.matrix()
    assert run_jobs(jobs) == 6
    np.testing.assert_allclose(jobs.matrix(), whole, atol=1e-9)
    again = plan_comparison(tmp_path / "zoo", tmp_path / "parts", indices, squared_distances, size=2)
    assert run_jobs(again) == 0
    # Networks keep their places when others come before them.
    store.append({spec.name: torch.zeros(1, *spec.shape) for spec in UCI.layout}, [{"id": 99, "step": 5}], name="a")
    moved = plan_comparison(store, tmp_path / "moved", indices, squared_distances, size=2)
    assert run_jobs(moved) == 6
    np.testing.assert_allclose(moved.matrix(), whole, atol=1e-9)
    indices = [k + 1 for k in indices]  # as new readers number them
    every = plan_comparison(tmp_path / "zoo", tmp_path / "all", indices, squared_distances, size=3)
    assert run_jobs(every) == 3
    np.testing.assert_allclose(every.matrix(), whole, atol=1e-9)
    with pytest.raises(FileExistsError, match="another matrix"):
        plan_comparison(tmp_path / "zoo", tmp_path / "parts", [1, 2], squared_distances, size=2)
    part = tmp_path / "all" / "000000-000001.npy"
    np.save(part, np.ones((2, 2)))
    with pytest.raises(ValueError, match=r"000000-000001\.npy' has the shape \(2, 2\), not \(3, 2\); remove it"):
        every.matrix()
    part.write_bytes(part.read_bytes()[:90])
    with pytest.raises(ValueError, match=r"000000-000001\.npy' cannot be read as an array"):
        every.matrix()


def test_a_store_records_the_library_of_matrix_products(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run uses the recorded library for any default of its processor, or reports that another library is
    set.
    """
    monkeypatch.setattr(products, "has_onednn", lambda: True)
    with use_library("blas"):
        _, jobs = plan_training(CONFIG, tmp_path / "zoo", size=10)
    assert jobs.products == "blas"
    monkeypatch.setattr("regauge.zoo.jobs.driver.default_library", lambda: "onednn")
    store, jobs = plan_training(CONFIG, tmp_path / "zoo", size=10)
    assert store.about["products"] == jobs.products == "blas"
    used: list[str] = []

    def noted(config: Config, **settings: Any) -> Iterator[SavedNetworks]:
        used.append(products.library())
        yield from train(config, **settings)

    monkeypatch.setattr("regauge.zoo.jobs.train_shards.train", noted)
    assert run_jobs(jobs) == 2
    assert used == ["blas", "blas"]
    with use_library("onednn"), pytest.raises(FileExistsError, match="products"):
        plan_training(CONFIG, tmp_path / "zoo", size=10)
    _, elsewhere = plan_training(CONFIG, tmp_path / "other", size=10)
    assert elsewhere.products == "onednn"
    monkeypatch.setattr(products, "has_onednn", lambda: False)
    with pytest.raises(ValueError, match="'onednn', but this torch was built without it"):
        elsewhere(0)

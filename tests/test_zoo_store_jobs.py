"""Jobs that fill stores: populations are trained, aligned and compared in parts, and the parts are the whole."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from regauge.align import align_pairs
from regauge.checkpoints.writing import save
from regauge.core.params import Params
from regauge.zoo.architecture import Architecture
from regauge.zoo.jobs import Share, run_jobs
from regauge.zoo.jobs.aligning import plan_alignment, plan_comparison
from regauge.zoo.jobs.training import plan
from regauge.zoo.store import Store
from regauge.zoo.training import Checkpoints, Config, train

UCI = Architecture("MLP 30-16-16-2", "regauge.nets.mlp:mlp", {"widths": [30, 16, 16, 2]})
CONFIG = Config(UCI, "breast-cancer", 20, steps=6, group=4, checkpoints=Checkpoints(every=3, warmup=3))


def test_a_population_in_shards_is_the_population(tmp_path: Path) -> None:
    store, jobs = plan(CONFIG, tmp_path / "zoo", size=7)
    assert jobs.size == 8  # whole groups
    assert run_jobs(jobs, share=Share(1, 2)) == 1
    assert run_jobs(jobs) == 2
    store, jobs = plan(CONFIG, tmp_path / "zoo", size=7)
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


def test_another_population_does_not_go_into_the_same_store(tmp_path: Path) -> None:
    plan(CONFIG, tmp_path / "zoo")
    for other in (replace(CONFIG, seed=1), replace(CONFIG, count=21), replace(CONFIG, steps=7)):
        with pytest.raises(FileExistsError, match="other networks or settings"):
            plan(other, tmp_path / "zoo")
    with pytest.raises(ValueError, match="at least 1"):
        plan(CONFIG, tmp_path / "other", size=0)


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
    target, jobs = plan_alignment(tmp_path / "zoo", tmp_path / "aligned", tmp_path / "reference.safetensors")
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
    every = plan_comparison(tmp_path / "zoo", tmp_path / "all", indices, squared_distances, size=3, is_symmetric=False)
    assert run_jobs(every) == 4
    np.testing.assert_allclose(every.matrix(), whole, atol=1e-9)
    with pytest.raises(FileExistsError, match="another matrix"):
        plan_comparison(tmp_path / "zoo", tmp_path / "parts", [1, 2], squared_distances, size=2)

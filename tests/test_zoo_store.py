"""The store: reading returns exactly the written networks, complete or not at all, and metadata find networks."""

import json
import multiprocessing
import os
import pickle
import random
import time
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from regauge.checkpoints import writing
from regauge.checkpoints.formats.headers import TensorSpec
from regauge.checkpoints.writing import whole_file
from regauge.core.params import Params
from regauge.core.symmetry import Symmetry
from regauge.storage import Store, verify
from regauge.storage.architecture import Architecture
from regauge.storage.store import shard_file
from regauge.storage.store.columns import concatenate, decode, encode
from regauge.storage.store.rows import split

SMALL = Architecture("MLP 4-3-2", "regauge.nets.mlp:mlp", {"widths": [4, 3, 2]})
MIXED = Architecture(
    "with statistics",
    None,
    layout=(
        TensorSpec("weight", (3, 2), torch.float32),
        TensorSpec("count", (), torch.int64),
        TensorSpec("mean", (3,), torch.float32),
        TensorSpec("exact", (2,), torch.float64),
    ),
)


def networks(architecture: Architecture, count: int, seed: int = 0) -> Params:
    generator = torch.Generator().manual_seed(seed)

    def values(spec: TensorSpec) -> Tensor:
        if spec.dtype.is_floating_point:
            return torch.randn(count, *spec.shape, generator=generator, dtype=spec.dtype)
        return torch.randint(0, 100, (count, *spec.shape), generator=generator)

    return {spec.name: values(spec) for spec in architecture.layout}


def numbered(count: int, start: int = 0, **known: Any) -> list[dict[str, Any]]:
    return [{"id": start + k, "step": 0, **known} for k in range(count)]


@pytest.mark.parametrize("architecture", [SMALL, MIXED])
def test_networks_come_back_bit_for_bit(tmp_path: Path, architecture: Architecture) -> None:
    store = Store.create(tmp_path / "zoo", architecture)
    parts = [networks(architecture, 5, seed) for seed in range(4)]
    for k, part in enumerate(parts):
        store.append(part, numbered(5, 5 * k), name=f"part-{k}")
    everything = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    again = Store.open(tmp_path / "zoo")
    assert len(again) == 20
    for indices in ([7], [19, 0, 7, 7, 8, 9, 3], list(range(20)), [], np.arange(19, -1, -1)):
        found = again.read(indices)
        assert list(found) == [spec.name for spec in architecture.layout]
        for name, tensor in found.items():
            assert tensor.dtype == everything[name].dtype
            assert torch.equal(tensor, everything[name][torch.as_tensor(np.array(indices, dtype=np.int64))])
    assert torch.equal(
        again.read(slice(3, 8))[architecture.layout[0].name], everything[architecture.layout[0].name][3:8]
    )


@pytest.mark.parametrize("architecture", [SMALL, MIXED])
def test_memory_of_a_batch_is_used_again(tmp_path: Path, architecture: Architecture) -> None:
    store = Store.create(tmp_path / "zoo", architecture)
    store.append(networks(architecture, 9), numbered(9))
    first = store.read([1, 2, 3])
    places = {name: tensor.data_ptr() for name, tensor in first.items()}
    second = store.read([8, 0, 4], out=first)
    for name, tensor in store.read([8, 0, 4]).items():
        assert torch.equal(second[name], tensor)
        assert second[name].data_ptr() == places[name]
    with pytest.raises(ValueError, match="`out` has"):
        store.read([1, 2], out=first)
    half = Store.create(tmp_path / "half", architecture, storage="float16")
    half.append(networks(architecture, 3), numbered(3))
    with pytest.raises(ValueError, match="does not round values"):
        half.read([0, 1, 2], out=half.read([0, 1, 2]))


def test_a_shard_is_a_safetensors_file(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "zoo", SMALL)
    params = networks(SMALL, 3)
    content = load_file(store.append(params, numbered(3, 1000)))
    flat = torch.cat([params[spec.name].reshape(3, -1) for spec in SMALL.layout], 1)
    assert torch.equal(content["weights/float32"], flat)
    assert content["rows/id"].tolist() == [1000, 1001, 1002]


def test_the_manifest_brings_back_architecture_and_symmetry(tmp_path: Path) -> None:
    symmetry = Symmetry.from_axes(
        {"layers.0.weight": ("h", None), "layers.0.bias": ("h",), "layers.1.weight": (None, "h")}
    )
    Store.create(tmp_path / "zoo", SMALL, symmetry, about={"why": "test"})
    store = Store.open(tmp_path / "zoo")
    assert store.architecture == SMALL
    assert store.symmetry is not None
    assert store.symmetry.to_json() == symmetry.to_json()
    assert store.about == {"why": "test"}
    assert len(Store.create(tmp_path / "zoo", SMALL, symmetry, about={"why": "test"})) == 0
    with pytest.raises(FileExistsError, match="other networks or settings"):
        Store.create(tmp_path / "zoo", SMALL, about={"why": "another"})


@pytest.mark.parametrize(("storage", "eps"), [("float16", 2**-11), ("bfloat16", 2**-8)])
def test_half_precision_halves_the_bytes(tmp_path: Path, storage: str, eps: float) -> None:
    params = networks(MIXED, 50)
    files = []
    for name, kept in (("full", None), ("half", storage)):
        store = Store.create(tmp_path / name, MIXED, storage=kept)
        files.append(store.append(params, numbered(50)))
    found = Store.open(tmp_path / "half").read(range(50))
    assert torch.equal(found["count"], params["count"])
    for name in ("weight", "mean", "exact"):
        assert found[name].dtype == params[name].dtype
        torch.testing.assert_close(found[name], params[name], rtol=eps, atol=0)
        assert not torch.equal(found[name], params[name])
    assert load_file(files[1])[f"weights/{storage}"].element_size() == 2


def test_values_beyond_half_precision_are_refused(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "zoo", SMALL, storage="float16")
    params = networks(SMALL, 2)
    params["layers.0.bias"][1, 0] = 1e6
    store.append(params, [{"id": k, "step": 0, "is_diverged": k == 1} for k in range(2)])
    store.refresh()
    assert store.rows["is_finite"].tolist() == [True, False]
    with pytest.raises(ValueError, match="network 1 has values too large for float16"):
        store.append(params, numbered(2))
    Store.create(tmp_path / "other", SMALL, storage="bfloat16").append(params, numbered(2))


def test_networks_that_diverged_are_marked(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "zoo", SMALL)
    params = networks(SMALL, 4)
    params["layers.0.bias"][1, 0] = torch.nan
    params["layers.1.weight"][3, 0, 0] = -torch.inf
    store.append(params, numbered(4))
    assert store.rows.where(is_finite=False).tolist() == [1, 3]
    assert store.read([1])["layers.0.bias"].isnan().any()


def test_rows_of_every_kind_come_back(tmp_path: Path) -> None:
    rows = [
        {"id": 2**40, "step": 3, "lr": 0.1, "loss": float("nan"), "activation": "relu", "subset": [1, 2], "good": True},
        {"id": -1, "step": 200, "lr": 0.1, "loss": 0.5, "activation": "tanh", "good": False, "late": 1},
        {"id": 7, "step": 0, "lr": 0.1, "loss": 1 / 3, "activation": "relu", "subset": {"a": None}, "good": True},
    ]
    store = Store.create(tmp_path / "zoo", SMALL)
    store.append(networks(SMALL, 3), rows)
    found = Store.open(tmp_path / "zoo").rows.dicts()
    for row, expected in zip(found, rows, strict=True):
        assert row.pop("is_finite") is True
        assert json.dumps(row, sort_keys=True) == json.dumps(expected, sort_keys=True)
    narrow = Store.open(tmp_path / "zoo").rows
    assert narrow.column("step").values.dtype == np.int16
    assert narrow["step"].dtype == np.int64
    assert narrow["lr"].tolist() == [0.1] * 3
    assert narrow["late"].mask.tolist() == [True, False, True]


def test_columns_of_several_shards_are_joined_without_loss() -> None:
    parts: list[list[dict[str, Any]]] = [
        [{"a": 1, "b": 1, "c": "x"}, {"a": 300, "b": None, "c": "y"}],
        [{"a": 0.1, "b": "text", "c": "z"}],
        [{"c": "x"}, {"a": 2**40, "c": "z"}],
    ]
    encoded = [(encode(part), len(part)) for part in parts]
    for name in ("a", "b", "c"):
        joined = concatenate([(columns.get(name), count) for columns, count in encoded])
        assert decode(joined).tolist() == [row.get(name) for part in parts for row in part]
    assert decode(concatenate([(None, 2)])).mask.all()


def test_rows_are_found_by_conditions(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "zoo", SMALL)
    for part, activation in enumerate(("relu", "tanh", "sin")):
        rows = [
            {"id": part, "step": step, "activation": activation, "accuracy": 0.1 * step + part} for step in range(4)
        ]
        store.append(networks(SMALL, 4), rows, name=f"{part}")
    rows = store.rows
    assert rows.where(activation="tanh").tolist() == [4, 5, 6, 7]
    assert rows.where(activation=["tanh", "sin"], step=3).tolist() == [7, 11]
    assert rows.where(accuracy=lambda values: values > 1.95).tolist() == [8, 9, 10, 11]
    assert rows.where(step={0, 1}, id=2).tolist() == [8, 9]
    assert rows.where().tolist() == list(range(12))
    assert rows.where(activation="softsign").tolist() == []
    assert rows.final().tolist() == [3, 7, 11]
    store.append(
        networks(SMALL, 2), [{"id": 3, "step": step, "is_discarded": step == 1} for step in range(2)], name="3"
    )
    store.refresh()
    assert store.rows.final().tolist() == [3, 7, 11]
    with pytest.raises(KeyError, match="no column 'acuracy'; there are"):
        rows.where(acuracy=1)


def test_columns_in_words(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "zoo", SMALL)
    rows = [{"id": 2**60 + 1, "step": 5, "loss": 0.25, "name": "a"}, {"id": 7, "step": 5, "loss": float("inf")}]
    store.append(networks(SMALL, 2), rows)
    words = store.rows.summary()
    assert words["id"] == "7 to 1152921504606846977"
    assert words["step"] == "5"
    assert words["loss"] == "0.25, 1 not finite"
    assert words["name"] == "a, 1 of 2 without"
    assert words["is_finite"] == "2 true, 0 false"


def test_rows_without_a_value_meet_no_condition(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "zoo", SMALL)
    store.append(networks(SMALL, 2), [{"id": 0, "step": 0, "loss": 0.0}, {"id": 1, "step": 0}])
    assert store.rows.where(loss=0).tolist() == [0]
    assert store.rows.where(loss=lambda values: values < 1).tolist() == [0]
    assert store.rows.where(loss=None).tolist() == [1]


def specified(identity: int, salt: str) -> float:
    """Return the split of a trajectory, computed with Python's integers."""
    wrap = 2**64 - 1
    z = (
        identity * 0x9E3779B97F4A7C15 + int.from_bytes(blake2b(salt.encode(), digest_size=8).digest(), "little")
    ) & wrap
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & wrap
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & wrap
    return ((z ^ (z >> 31)) >> 11) / 2**53


def test_splits_keep_trajectories_together_and_never_change() -> None:
    ids = np.repeat(np.arange(4000), 3)
    parts = split(ids, {"a": 0.5, "b": 0.3, "c": 0.2}, salt="one")
    assert sorted(np.concatenate(list(parts.values())).tolist()) == list(range(12000))
    owner = {name: set(ids[rows].tolist()) for name, rows in parts.items()}
    assert not owner["a"] & owner["b"] | owner["a"] & owner["c"] | owner["b"] & owner["c"]
    for name, share in (("a", 0.5), ("b", 0.3), ("c", 0.2)):
        assert abs(len(owner[name]) / 4000 - share) < 4 * (share * (1 - share) / 4000) ** 0.5
    fewer = split(np.arange(100, 200), {"a": 0.5, "b": 0.3, "c": 0.2}, salt="one")
    assert {100 + k for k in fewer["a"].tolist()} == {k for k in owner["a"] if 100 <= k < 200}
    other = split(ids, {"a": 0.5, "b": 0.3, "c": 0.2}, salt="two")
    assert set(ids[other["a"]].tolist()) != owner["a"]
    # The same on every machine and in every version: docs/store.md says how.
    assert split(np.arange(20))["test"].tolist() == [3, 16]
    assert split(ids, {"a": 0.5, "b": 0.3, "c": 0.2}, salt="one")["b"].tolist() == [
        k for k, identity in enumerate(ids.tolist()) if 0.5 <= specified(identity, "one") < 0.8
    ]
    with pytest.raises(ValueError, match="add up to one"):
        split(ids, {"a": 0.5, "b": 0.6})


def test_readers_see_what_others_append(tmp_path: Path) -> None:
    reader = Store.create(tmp_path / "zoo", SMALL)
    writers = [Store.open(tmp_path / "zoo") for _ in range(3)]
    assert len(reader) == 0
    first = networks(SMALL, 2, 1)
    writers[0].append(first, numbered(2))
    assert reader.refresh() == 2
    for k, writer in enumerate(writers):
        writer.append(networks(SMALL, 2, k), numbered(2, 10 * k))
    assert reader.refresh() == 6
    assert reader.refresh() == 0
    assert len(reader) == 8
    assert torch.equal(reader.read([0, 1])["layers.0.bias"], first["layers.0.bias"])
    assert len(reader.rows) == 8
    assert len({shard.path for shard in reader.shards}) == 4


def test_one_shard_alone(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "zoo", SMALL)
    for k in range(3):
        store.append(networks(SMALL, k, k), numbered(k, 10 * k, late=k), name=f"part-{k}")
    part = store.part(["part-2"])
    assert part.rows["id"].tolist() == [20, 21]
    assert torch.equal(part.read([1, 0])["layers.0.bias"], networks(SMALL, 2, 2)["layers.0.bias"][[1, 0]])
    assert len(store.part(["part-0"])) == 0
    assert store.rows["id"].tolist() == [10, 20, 21]
    with pytest.raises(FileNotFoundError):
        store.part(["part-3"])


def test_more_shards_than_are_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regauge.storage.store.store.MAPPED_SHARDS", 3)
    store = Store.create(tmp_path / "zoo", SMALL)
    for k in range(8):
        store.append(networks(SMALL, 1, k), numbered(1, k), name=f"{k}")
    found = store.read(range(7, -1, -1))["layers.0.bias"]
    expected = torch.cat([networks(SMALL, 1, k)["layers.0.bias"] for k in range(7, -1, -1)])
    assert torch.equal(found, expected)


def test_threads_read_more_shards_than_are_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regauge.storage.store.store.MAPPED_SHARDS", 1)
    store = Store.create(tmp_path / "zoo", SMALL)
    for k in range(12):
        marked = {spec.name: torch.full((4, *spec.shape), float(k)) for spec in SMALL.layout}
        store.append(marked, numbered(4, 4 * k), name=f"part-{k:02d}")
    store.refresh()

    def read(seed: int) -> bool:
        wanted = np.random.default_rng(seed).integers(0, 48, 200)
        return torch.equal(store.read(wanted)["layers.1.bias"][:, 0], torch.from_numpy(wanted // 4).float())

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, range(64)))


@pytest.mark.parametrize("is_shorter", [False, True])
def test_a_replaced_shard_is_not_read_as_another(tmp_path: Path, is_shorter: bool) -> None:
    store = Store.create(tmp_path / "zoo", SMALL)
    path = store.append(networks(SMALL, 2), numbered(2), name="x")
    listed_before, read_before = Store.open(store.folder), Store.open(store.folder)
    assert len(listed_before) == 2
    before = read_before.read([0, 1])
    other = Store.create(tmp_path / "other", SMALL)
    os.replace(other.append(networks(SMALL, 1 if is_shorter else 2, 5), numbered(1 if is_shorter else 2)), path)
    with pytest.raises(ValueError, match="cannot be read as a shard"):
        listed_before.read([0])
    for name, tensor in read_before.read([0, 1]).items():  # the file that it was is there as long as it is mapped
        assert torch.equal(tensor, before[name])
    path.unlink()
    with pytest.raises(FileNotFoundError, match="was deleted"):
        listed_before.read([0])


def test_a_forked_reader_goes_on(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "zoo", SMALL)
    params = networks(SMALL, 8)
    for k in range(4):
        store.append({name: t[2 * k : 2 * k + 2] for name, t in params.items()}, numbered(2, 2 * k), name=f"{k}")
    store.read([0, 5])  # two of four shards are mapped before the fork
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    reader = context.Process(target=lambda: send.send(store.read([6, 5, 0, 3])["layers.0.bias"].tolist()))
    reader.start()
    assert receive.poll(60)
    assert receive.recv() == params["layers.0.bias"][[6, 5, 0, 3]].tolist()
    reader.join()
    assert torch.equal(store.read([7, 1])["layers.0.bias"], params["layers.0.bias"][[7, 1]])


def test_what_is_read_belongs_to_the_reader(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "zoo", SMALL)
    store.append(networks(SMALL, 3), numbered(3))
    batch = store.read(slice(None))
    before = batch["layers.0.bias"].clone()
    batch["layers.0.bias"].zero_()
    assert torch.equal(store.read(slice(None))["layers.0.bias"], before)
    assert store.verify().ok


def test_a_forked_writer_has_names_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store.create(tmp_path / "zoo", SMALL)
    for process in (1, 1, 2, 1):
        monkeypatch.setattr(os, "getpid", lambda process=process: process)
        store.append(networks(SMALL, 5), numbered(5))
    assert store.refresh() == 20
    names = [shard.path.stem.split("-") for shard in store.shards]
    assert len({prefix for prefix, _ in names}) == 3


def test_shards_never_change(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "zoo", SMALL)
    path = store.append(networks(SMALL, 2), numbered(2), name="x")
    before = path.read_bytes()
    with pytest.raises(FileExistsError, match="has a shard 'x', and shards never change"):
        store.append(networks(SMALL, 3, 1), numbered(3), name="x")
    # Another writer may be first after that was looked at.
    with pytest.raises(FileExistsError, match="by another process in the meantime"):
        shard_file.write(path, {}, {}, 0)
    assert path.read_bytes() == before
    assert store.verify().leftovers == ()


def test_two_writers_of_one_name_do_not_disturb_each_other(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"

    def write_meanwhile() -> None:
        with whole_file(path, is_new=True) as mine:
            mine.write_text("mine, half")
            with whole_file(path, is_new=True) as other:
                assert other != mine
                other.write_text("other, whole")
            mine.write_text("mine, whole")

    with pytest.raises(FileExistsError, match="by another process in the meantime"):
        write_meanwhile()
    assert path.read_text() == "other, whole"
    assert os.listdir(tmp_path) == ["x.txt"]


def test_a_folder_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise PermissionError("links are not supported here")

    monkeypatch.setattr(os, "link", refuse)
    store = Store.create(tmp_path / "zoo", SMALL)
    path = store.append(networks(SMALL, 2), numbered(2), name="x")
    with pytest.raises(FileExistsError, match="by another process in the meantime"):
        shard_file.write(path, {}, {}, 0)
    assert store.verify().networks == 2


def test_another_process_has_the_same_numbers(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "zoo", SMALL)
    store.append(networks(SMALL, 2, 1), numbered(2, 10), name="b")
    store.append(networks(SMALL, 2, 2), numbered(2, 20), name="c")
    store.refresh()
    places = store.places([3, 0])
    Store.open(store.folder).append(networks(SMALL, 2), numbered(2), name="a")
    copy = pickle.loads(pickle.dumps(store))
    assert copy.rows["id"].tolist() == store.rows["id"].tolist() == [10, 11, 20, 21]
    assert torch.equal(copy.read([0])["layers.0.bias"], store.read([0])["layers.0.bias"])
    part = pickle.loads(pickle.dumps(store.part(["c"])))
    assert part.rows["id"].tolist() == [20, 21]
    later = Store.open(store.folder)
    assert later.rows["id"][later.numbers(places)].tolist() == [21, 10]
    assert store.refresh() == 2
    assert store.rows["id"].tolist() == [10, 11, 20, 21, 0, 1]


def test_masks_and_what_is_no_number(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "zoo", SMALL)
    store.append(networks(SMALL, 3), [{"id": 0, "step": 0, "loss": 1.0}, {"id": 1, "step": 0}, {"id": 2, "step": 0}])
    everything = store.read(slice(None))["layers.0.bias"]
    for mask in (store.rows["id"] > 0, (store.rows["id"] > 0).tolist()):
        assert torch.equal(store.read(mask)["layers.0.bias"], everything[1:])
    assert torch.equal(store.read(store.rows["loss"] > 0)["layers.0.bias"], everything[:1])
    assert len(store.read([])["layers.0.bias"]) == 0
    with pytest.raises(IndexError, match="a mask of 2 truth values does not fit the store's 3 networks"):
        store.read([True, False])
    with pytest.raises(IndexError, match="numbered by integers, but float64"):
        store.read([0.0, 1.0])
    for wanted in ([-1, 2], [2, 3, 1]):
        with pytest.raises(IndexError, match=f"the networks 0 to 2, but {'-1' if -1 in wanted else 3} was"):
            store.read(wanted)
    assert store.rows.where(id=np.array([2, 0])).tolist() == [0, 2]


def test_an_empty_store_has_the_columns_of_every_store(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "zoo", SMALL)
    for _ in range(2):
        assert store.rows.final().tolist() == []
        assert store.rows.where(is_finite=True).tolist() == []
        assert store.split()["train"].tolist() == []
        store.append(networks(SMALL, 0), [])  # what it is with shards of nothing
        assert store.refresh() == 0


def test_what_differs_is_named(tmp_path: Path) -> None:
    Store.create(tmp_path / "zoo", SMALL, about={"training": {"lr": 0.1, "steps": 5}})
    about = {"training": {"lr": 0.2, "steps": 5}, "seed": 1}
    with pytest.raises(FileExistsError, match=r"\(storage, training.lr, seed\)"):
        Store.create(tmp_path / "zoo", SMALL, storage="float16", about=about)


def test_every_damaged_byte_is_found(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "zoo", SMALL)
    path = store.append(networks(SMALL, 2), numbered(2, note="x"))
    other = store.append(networks(SMALL, 2), numbered(2, 2))
    assert verify(store.folder).ok
    assert store.verify().networks == 4
    whole = path.read_bytes()
    chance = random.Random(0)
    for position in chance.sample(range(len(whole)), 150):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1 << chance.randrange(8)]) + whole[position + 1 :])
        report = verify(store.folder)
        assert list(report.damaged) == [path], position
        assert report.networks == 2
    for length in (0, 7, 100, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert not verify(store.folder).ok
        with pytest.raises(ValueError, match="cannot be read as a shard"):
            len(Store.open(store.folder))
    path.unlink()
    assert other.exists()
    assert len(Store.open(store.folder)) == 2


def _append_forever(folder: str, told: Any) -> None:
    store = Store.open(folder)
    for k in range(10**6):
        store.append(networks(SMALL, 8, k), numbered(8, 8 * k))
        told.send(k)


def test_a_writer_that_is_killed_loses_nothing_that_it_announced(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["regauge.storage.store"])
    chance = random.Random(0)
    for trial in range(6):
        folder = tmp_path / f"{trial}"
        Store.create(folder, SMALL)
        receive, send = context.Pipe(duplex=False)
        writer = context.Process(target=_append_forever, args=(str(folder), send))
        writer.start()
        send.close()
        assert receive.poll(60)
        time.sleep(chance.uniform(0, 0.03))
        writer.kill()
        writer.join()
        announced = 0
        try:
            while True:
                announced = receive.recv() + 1
        except EOFError:
            receive.close()
        report = verify(folder)
        assert report.ok
        assert report.networks in (8 * announced, 8 * announced + 8)
        store = Store.open(folder)
        ids = store.rows["id"]
        assert sorted(ids.tolist()) == list(range(len(store)))
        last = int(ids.argmax())
        expected = networks(SMALL, 8, int(ids[last]) // 8)["layers.0.weight"][7]
        assert torch.equal(store.read([last])["layers.0.weight"][0], expected)
        store.append(networks(SMALL, 1), numbered(1, 10**9))


def test_an_incomplete_file_is_no_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store.create(tmp_path / "zoo", SMALL)

    def fail(path: Path) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(writing, "flush", fail)
        with pytest.raises(OSError, match="no space"):
            store.append(networks(SMALL, 1), numbered(1))
    assert len(store) == 0
    assert os.listdir(store.folder / "shards") == []
    (store.folder / "shards" / ".x.safetensors.1.partial").write_bytes(b"abc")
    report = store.verify()
    assert report.ok
    assert len(report.leftovers) == 1
    assert store.refresh() == 0


@pytest.mark.parametrize(
    ("change", "rows", "match"),
    [
        ({"layers.0.bias": torch.zeros(2, 4)}, numbered(2), r"shape \(2, 4\)"),
        ({"layers.0.bias": torch.zeros(2, 3, dtype=torch.float64)}, numbered(2), "float64"),
        ({"more": torch.zeros(2)}, numbered(2), "lack"),
        ({}, numbered(3), "but 3 rows"),
        ({}, [], "but 0 rows"),
        ({}, [{"id": 0, "step": 0}, {"id": 1}], "row 1 has step=None"),
        ({}, [{"id": 0, "step": 0}, {"id": "b", "step": 0}], "row 1 has id='b'"),
        ({}, numbered(2, odd=object()), "'odd' has a value that is not plain JSON"),
        ({}, numbered(2, seed=2**64), "more than 64 bits"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, change: Params, rows: list[Any], match: str) -> None:
    store = Store.create(tmp_path / "zoo", SMALL)
    with pytest.raises(ValueError, match=match):
        store.append(networks(SMALL, 2) | change, rows)
    assert len(store) == 0


def test_what_is_no_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no store"):
        Store.open(tmp_path)
    with pytest.raises(FileNotFoundError, match="there is no store"):
        verify(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="holds other files"):
        Store.create(tmp_path, SMALL)
    with pytest.raises(ValueError, match="float16 or bfloat16"):
        Store.create(tmp_path / "zoo", SMALL, storage="int8")
    store = Store.create(tmp_path / "zoo", SMALL)
    with pytest.raises(IndexError, match="5 was asked for"):
        store.read([5])
    with pytest.raises(ValueError, match="cannot be named"):
        store.append(networks(SMALL, 1), numbered(1), name="../x")
    store.append(networks(SMALL, 1), numbered(1), name="other")
    wrong = Store.create(tmp_path / "wrong", MIXED)
    os.rename(store.path_of("other"), wrong.path_of("other"))
    with pytest.raises(ValueError, match="belongs to another store"):
        len(wrong)
    manifest = tmp_path / "zoo" / "store.json"
    manifest.write_text(manifest.read_text().replace('"version": 1', '"version": 99', 1))
    with pytest.raises(ValueError, match="version 99"):
        Store.open(tmp_path / "zoo")

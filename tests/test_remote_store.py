"""Stores at URLs are copied once, shard by shard, completely or not at all, and read like local stores."""

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from regauge.cli.main import main
from regauge.storage import Loader, Store
from regauge.storage.architecture import Architecture
from regauge.storage.collection import Collection
from regauge.storage.store.remote import url_of

MLP = Architecture("MLP 4-3-2", "regauge.nets.mlp:mlp", {"widths": [4, 3, 2]})
URL = "memory://bucket/mlps"


def fill(store: Store, seed: int) -> None:
    chance = torch.Generator().manual_seed(seed)
    params = {spec.name: torch.randn(3, *spec.shape, generator=chance) for spec in MLP.layout}
    store.append(params, [{"id": 3 * seed + k, "step": 1} for k in range(3)], name=f"shard-{seed}")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """Return a store of two shards, with a copy at the URL."""
    monkeypatch.setenv("REGAUGE_CACHE", str(tmp_path / "cache"))
    store = Store.create(tmp_path / "here", MLP, about={"from": "a test"})
    fill(store, 0)
    fill(store, 1)
    upload(store)
    yield store
    fsspec.filesystem("memory").rm("/bucket", recursive=True)


def upload(store: Store) -> None:
    fsspec.filesystem("memory").put(f"{store.folder}/", "/bucket/mlps/", recursive=True)


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the files that are copied from the memory file system."""
    names: list[str] = []
    get = MemoryFileSystem.get_file

    def count(self: MemoryFileSystem, rpath: str, lpath: str, **options: Any) -> None:
        names.append(rpath.rsplit("/", 1)[-1])
        get(self, rpath, lpath, **options)

    monkeypatch.setattr(MemoryFileSystem, "get_file", count)
    return names


def test_it_reads_what_is_there(here: Store) -> None:
    store = Store.open(URL)
    assert (len(store), store.key, store.about) == (6, here.key, here.about)
    for name, tensor in store.read(range(6)).items():
        assert torch.equal(tensor, here.read(range(6))[name])
    assert store.verify().damaged == here.verify().damaged
    again = pickle.loads(pickle.dumps(store))
    assert torch.equal(again.read([5])["layers.0.weight"], here.read([5])["layers.0.weight"])
    batches = list(Loader(Collection([store]), batch=2, generator=torch.Generator().manual_seed(0)))
    assert sorted(int(i) for batch in batches for i in batch.indices) == list(range(6))
    assert URL in repr(store)


def test_shards_are_copied_once(here: Store, fetched: list[str]) -> None:
    store = Store.open(URL)
    assert len(store) == 6
    assert fetched == ["store.json", "shard-0.safetensors", "shard-1.safetensors"]
    del fetched[:]
    fill(here, 2)
    upload(here)
    assert (store.refresh(), len(store)) == (3, 9)
    assert fetched == ["store.json", "shard-2.safetensors"]
    assert len(Store.open(URL)) == 9
    assert fetched[2:] == ["store.json"]


def test_an_interrupted_copy_continues_and_a_short_one_is_refused(
    here: Store, fetched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = MemoryFileSystem.get_file

    def cut(self: MemoryFileSystem, rpath: str, lpath: str, **options: Any) -> None:
        whole(self, rpath, lpath, **options)
        if "shard-1" in rpath:
            Path(lpath).write_bytes(Path(lpath).read_bytes()[:-1])

    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "get_file", cut)
        with pytest.raises(OSError, match=r"bytes, of which \d+ came; try again"):
            Store.open(URL)
    del fetched[:]
    assert len(Store.open(URL)) == 6
    assert fetched == ["store.json", "shard-1.safetensors"]


def test_errors_of_a_protocol_are_told(here: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    class NoCredentialsError(Exception):
        """An error like those of protocol packages."""

    def refuse(*_: Any, **__: Any) -> None:
        raise NoCredentialsError("Unable to locate credentials.")

    monkeypatch.setattr(MemoryFileSystem, "get_file", refuse)
    with pytest.raises(OSError, match=r"cannot be read \(Unable to locate credentials\); check the URL, the network"):
        Store.open(URL)


def test_another_store_at_the_same_url_takes_the_place_of_the_copy(here: Store, tmp_path: Path) -> None:
    assert len(Store.open(URL)) == 6
    fsspec.filesystem("memory").rm("/bucket", recursive=True)
    other = Store.create(tmp_path / "other", MLP, about={"from": "another test"})
    fill(other, 7)
    upload(other)
    store = Store.open(URL)
    assert (len(store), store.about["from"]) == (3, "another test")
    assert torch.equal(store.read([0])["layers.0.weight"], other.read([0])["layers.0.weight"])


def test_what_cannot_be_opened_or_written_is_told(here: Store) -> None:
    with pytest.raises(FileNotFoundError, match=r"no store at 'memory://nowhere'.*check the URL"):
        Store.open("memory://nowhere")
    assert Store.find("memory://nowhere") is None
    with pytest.raises(ValueError, match=r"'nothing://x' cannot be opened: .*copy the store to a folder"):
        Store.open("nothing://x")
    with pytest.raises(ValueError, match=r"cannot be written to 'memory://b'.*upload the folder"):
        Store.create("memory://b", MLP)
    store = Store.open(URL)
    with pytest.raises(ValueError, match="can only be read"):
        fill(store, 3)
    with pytest.raises(ValueError, match="can only be read"):
        store.tell({})


def test_urls_are_known_also_as_paths(here: Store, capsys: pytest.CaptureFixture[str]) -> None:
    assert url_of(Path("s3://bucket/mlps/")) == url_of("s3://bucket/mlps") == "s3://bucket/mlps"
    assert url_of("C:/mlps") is None
    assert url_of("mlps") is None
    main(["zoo", "info", here.folder.as_uri()])
    assert "6 networks of 'MLP 4-3-2'" in capsys.readouterr().out

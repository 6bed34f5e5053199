"""The cache of symmetries returns an earlier result only if nothing on which it depends has changed."""

import json
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import regauge as rg
from regauge.checkpoints.checkpoint import Checkpoint, load
from regauge.checkpoints.formats.state_dicts import memory_of
from regauge.cli.main import main
from regauge.hub import symmetry_cache as tracing
from regauge.hub.symmetry_cache import Traced
from regauge.storage import cache

transformers = pytest.importorskip("transformers")
KNOWN = "is known from an earlier run"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return two tiny Llama folders with tied embeddings, a and b."""
    root = tmp_path_factory.mktemp("pair")
    for seed, name in enumerate("ab"):
        torch.manual_seed(seed)
        config = transformers.LlamaConfig(
            vocab_size=16,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            initializer_range=0.3,
        )
        config.tie_word_embeddings = True
        transformers.LlamaForCausalLM(config).save_pretrained(root / name)
    return root


@pytest.fixture
def folder(pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a separate cache, and a copy of the folders that a test may change."""
    monkeypatch.setenv("REGAUGE_CACHE", str(tmp_path / "cache"))
    shutil.copytree(pair, tmp_path / "pair")
    return tmp_path / "pair"


@pytest.fixture
def align(folder: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[bool, dict[str, bytes]]]:
    """Align the two folders. Return whether their symmetry was cached, and the output."""

    def run(*args: str) -> tuple[bool, dict[str, bytes]]:
        out = folder / "out"
        main(["align", str(folder / "a"), str(folder / "b"), "-o", str(out), "--overwrite", *args])
        return KNOWN in capsys.readouterr().out, {path.name: path.read_bytes() for path in out.iterdir()}

    return run


def _entries() -> list[Path]:
    return sorted((cache.cache_folder() / tracing.KIND).glob("*"))


def test_a_hit_writes_what_a_miss_writes(align: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    is_known, first = align()
    assert not is_known
    (entry,) = _entries()
    kept = entry.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(rg.discovery, "discover", None)
        patch.setattr("regauge.hub.model.build_model", None)
        assert align() == (True, first)
    assert align("--retrace") == (False, first)
    assert _entries() == [entry]
    assert entry.read_bytes() == kept
    assert align() == (True, first)


def test_what_the_symmetry_depends_on_misses(
    align: Callable[..., Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    align()

    def change(**settings: Any) -> None:
        path = folder / "a" / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | settings))

    change(_name_or_path="elsewhere", transformers_version="0")
    assert align()[0]
    change(rms_norm_eps=1e-3)
    assert not align()[0]
    assert align()[0]
    assert not align("--outputs", "logits")[0]
    with monkeypatch.context() as patch:
        patch.setattr(tracing, "_source", lambda: "other code")
        assert not align()[0]
    with monkeypatch.context() as patch:
        patch.setattr(tracing, "_installed", lambda: ["torch-0.1.dist-info"])
        assert not align()[0]
    with monkeypatch.context() as patch:
        patch.setattr(tracing, "_is_released", lambda: False)
        assert not align()[0]
    count = len(_entries())
    change(auto_map={})
    assert not align()[0]
    assert len(_entries()) == count


DAMAGES: tuple[Callable[[bytes], bytes], ...] = (
    lambda text: b"",
    lambda text: text[:-10],
    lambda text: text.replace(b"llama", b"other").replace(b"q_proj", b"k_proj"),
    lambda text: b"\xff" + text,
    lambda text: b"{}",
)


def test_a_damaged_entry_is_passed_over_and_replaced(align: Callable[..., Any]) -> None:
    _, first = align()
    (entry,) = _entries()
    whole = entry.read_bytes()
    for damage in DAMAGES:
        entry.write_bytes(damage(whole))
        assert align() == (False, first)
        assert entry.read_bytes() == whole


def test_a_cache_that_cannot_be_written_stops_nothing(
    align: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("REGAUGE_CACHE", str(tmp_path / "file"))
    assert not align()[0]
    assert not align()[0]
    assert (tmp_path / "file").read_text() == "no folder"


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser writes everywhere")
def test_a_read_only_cache(align: Callable[..., Any]) -> None:
    _, first = align()
    folder = cache.cache_folder() / tracing.KIND
    folder.chmod(0o500)
    try:
        assert align() == (True, first)
        assert not align("--outputs", "logits")[0]
    finally:
        folder.chmod(0o700)


def test_the_text_form_keeps_the_symmetry_and_what_is_tied() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU(), torch.nn.Linear(3, 3).half())
    module[2].bias = module[0].bias
    state = module.state_dict()
    symmetry = rg.Symmetry.from_axes({"0.weight": ("h", None), "2.weight": (None, "h")}).bind(state)
    again = Traced.from_json(Traced(symmetry, state, was_meta=False).to_json())
    assert again.symmetry == symmetry
    assert list(again.state) == list(state)
    assert all(again.state[n].shape == t.shape and again.state[n].dtype == t.dtype for n, t in state.items())
    memory = {name: memory_of(tensor) for name, tensor in again.state.items()}
    assert memory["2.bias"] == memory["0.bias"]
    assert memory["2.weight"] != memory["0.weight"]


def test_old_entries_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGAUGE_CACHE", str(tmp_path))
    monkeypatch.setattr(cache, "CACHE_BYTES", 400)
    abandoned, current = (tmp_path / "kind" / f".x.txt.{k * 12}.partial" for k in "01")
    others = [tmp_path / "kind" / name for name in (".x.partial", "thesis.txt")]
    for k in range(5):
        cache.keep("kind", k, "x" * 100)
        path = cache._place("kind", k)
        os.utime(path, (1e9 + k, 1e9 + k))
        if k == 0:
            for one in (abandoned, current, *others):
                one.touch()
            for one in (abandoned, *others):
                os.utime(one, (time.time() - 2 * cache.ABANDONED,) * 2)
    assert [cache.recall("kind", k) is not None for k in range(5)] == [False, False, False, True, True]
    assert not abandoned.exists()
    assert all(one.exists() for one in (current, *others))
    assert cache.recall("other", 4) is None


def test_writers_at_once_leave_a_whole_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGAUGE_CACHE", str(tmp_path))
    texts = [f"{k}" * 10_000 for k in range(3)]
    cache.keep("kind", "shared", texts[0])

    def write(text: str) -> None:
        for _ in range(20):
            cache.keep("kind", "shared", text)

    with ThreadPoolExecutor() as pool:
        writers = [pool.submit(write, text) for text in texts]
        while not all(writer.done() for writer in writers):
            assert cache.recall("kind", "shared") in texts
        for writer in writers:
            writer.result()
    assert len(list((tmp_path / "kind").iterdir())) == 1


def test_tests_have_a_cache_of_their_own() -> None:
    assert Path(os.environ["REGAUGE_CACHE"]).name.startswith("regauge-tests-")


def test_the_names_of_files_are_known_with_the_symmetry(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REGAUGE_CACHE", str(tmp_path / "cache"))
    for seed, name in enumerate("ab"):
        torch.manual_seed(seed)
        config = transformers.MixtralConfig(
            vocab_size=16,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            num_local_experts=2,
        )
        transformers.MixtralForCausalLM(config).save_pretrained(tmp_path / name)
    out, written = tmp_path / "out", []
    for _ in range(2):
        main(["align", str(tmp_path / "a"), str(tmp_path / "b"), "-o", str(out), "--overwrite"])
        texts = {path.name: path.read_text("utf-8") for path in out.glob("*.json")}
        written.append((texts, {path.name: load(path) for path in out.glob("*.safetensors")}))
        monkeypatch.setattr("regauge.hub.model.build_model", None)
        monkeypatch.setattr("regauge.hub.networks.name_for", None)
    assert KNOWN in capsys.readouterr().out
    assert written[0][0] == written[1][0]
    # The last bit of a matrix depends on where memory begins.
    torch.testing.assert_close(*(tensors for _, tensors in written), rtol=1e-6, atol=1e-6)
    assert any("experts" in name for name in Checkpoint.open(out))

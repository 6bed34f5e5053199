"""Outputs that replace other outputs: at any end of a run, only the checkpoint's own files are removed, and removals
are reported.
"""

import json
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import regauge as rg
from regauge.checkpoints.checkpoint import Checkpoint, load
from regauge.checkpoints.disk import FullDiskError
from regauge.checkpoints.formats.headers import TensorSpec
from regauge.checkpoints.outputs.replacing import own_files
from regauge.checkpoints.outputs.staging import Staging, partial_of, require_place
from regauge.checkpoints.writing import Shard, save, whole_file, write_index, write_shard
from regauge.cli.main import main
from regauge.core.params import Params
from regauge.core.symmetry import Symmetry

INDEX = "model.safetensors.index.json"
SYMMETRY = Symmetry.from_axes({"up": ("h", None), "down": (None, "h")}, kinds={"h": "signed"})
OTHERS = {
    "README.md": "the user's",
    "notes.txt": "the user's",
    "optimizer.pt": "state",
    ".gitattributes": "*.safetensors filter=lfs",
    "runs/Nov22/events": "curves",
    "adapter_model.safetensors": "an adapter",
}


def _params(seed: int) -> Params:
    generator = torch.Generator().manual_seed(seed)
    return {"up": torch.randn(6, 3, generator=generator), "down": torch.randn(2, 6, generator=generator)}


def _shards(count: int = 2) -> list[Shard]:
    shapes = [("up", (6, 3)), ("down", (2, 6))]
    specs = [TensorSpec(name, shape, torch.float32) for name, shape in shapes]
    if count == 1:
        return [Shard("model.safetensors", tuple(specs), {})]
    return [Shard(f"model-0000{k + 1}-of-0000{count}.safetensors", (specs[k],), {}) for k in range(count)]


def _write(folder: Path, seed: int, count: int = 2, metadata: dict[str, object] | None = None) -> Path:
    folder.mkdir()
    params = _params(seed)
    for shard in _shards(count):
        write_shard(shard, folder, lambda name: iter([params[name]]))
    if count > 1:
        write_index(_shards(count), folder, metadata=metadata)
    (folder / "config.json").write_text("{}")
    return folder


def _put(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def _require(folder: Path, files: dict[str, str]) -> None:
    assert {name: (folder / name).read_text() for name in files} == files


def _make(out: Path, seed: int, count: int = 2, source: Checkpoint | None = None, **settings: Any) -> None:
    params, shards = _params(seed), _shards(count)
    if out.suffix:
        shards = [replace(shards[0], file=out.name)]
    with Staging(out, {"of": seed}, **{"resume": False, "overwrite": True, **settings}) as staging:
        staging.write(shards, lambda name: iter([params[name]]))
        staging.publish(shards, source)


def _equal(found: Params, seed: int) -> bool:
    return all(torch.equal(found[name], tensor) for name, tensor in _params(seed).items())


@pytest.mark.parametrize("new", [1, 2])
@pytest.mark.parametrize("old", [1, 2])
def test_only_the_checkpoints_own_files_are_replaced(
    old: int, new: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = _write(tmp_path / "out", 0, old)
    _put(out, OTHERS)
    _put(out, {"regauge.alignment.safetensors": "of the old weights", "pytorch_model.bin": "old weights"})
    inode = (out / "optimizer.pt").stat().st_ino
    caplog.set_level("INFO")
    _make(out, 1, new)
    assert _equal(load(out), 1)
    _require(out, {**OTHERS, "config.json": "{}"})
    assert (out / "optimizer.pt").stat().st_ino == inode
    weights = {shard.file for shard in _shards(new)} | ({INDEX} if new > 1 else set())
    tops = {Path(name).parts[0] for name in OTHERS}
    assert {path.name for path in out.iterdir()} == weights | tops | {"config.json"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith(f"in {str(out)!r}: replaced 'model")
    assert "kept '.gitattributes', 'README.md', 'adapter_model.safetensors', 'config.json'" in told


def test_a_folder_that_is_a_link_stays_one(tmp_path: Path) -> None:
    out = _write(tmp_path / "real", 0)
    (tmp_path / "link").symlink_to(out)
    _make(tmp_path / "link", 1)
    assert (tmp_path / "link").is_symlink()
    assert _equal(load(out), 1)


def test_what_makes_up_a_checkpoint(tmp_path: Path) -> None:
    folder = _write(tmp_path / "a", 0)
    _put(folder, OTHERS)
    _put(folder, {"model-00003-of-00007.safetensors": "of an earlier save"})
    weights = {shard.file for shard in _shards()} | {INDEX}
    assert own_files(folder) == weights | {"model-00003-of-00007.safetensors"}
    (folder / INDEX).write_text("damaged")
    assert own_files(folder) == weights | {"model-00003-of-00007.safetensors"}
    odd = tmp_path / "odd"
    odd.mkdir()
    save(_params(0), odd / "weights.safetensors")
    assert own_files(odd) == {"weights.safetensors"}


class Killed(BaseException):
    """An error that simulates the end of a process."""


def _kill(monkeypatch: pytest.MonkeyPatch, step: int, *calls: tuple[Any, str]) -> None:
    """Prevent all effects from the call with a given number on."""
    done = 0

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal done
            if done >= step:
                raise Killed
            done += 1
            return call(*args, **kwargs)

        return run

    for module, name in calls:
        monkeypatch.setattr(module, name, counted(getattr(module, name)))


@pytest.mark.parametrize("old", ["both", "file", "beside", "none"])
@pytest.mark.parametrize("step", range(24))
def test_a_file_is_never_beside_what_belongs_to_another(
    step: int, old: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For every system call that puts a file and its card in place, a run ends at this call, and the next run
    continues.
    """
    out, card = tmp_path / "out.safetensors", tmp_path / "out.md"
    shards, params = [replace(_shards(1)[0], file=out.name)], _params(1)
    if old in ("both", "file"):
        save(_params(0), out)
    if old in ("both", "beside"):
        card.write_text("0")
    staging = Staging(out, {}, resume=False, overwrite=True)
    staging.write(shards, lambda name: iter([params[name]]))
    (staging.content / card.name).write_text("1")
    with monkeypatch.context() as patch:
        _kill(patch, step, (os, "replace"), (os, "unlink"), (os, "fsync"), (os, "rmdir"), (os, "rename"))
        with suppress(Killed):
            staging.publish(shards)
    staging._lock.release()

    def require_whole() -> int | None:
        found = [seed for seed in (0, 1) if out.exists() and _equal(load(out), seed)]
        assert bool(found) == out.exists()
        assert not (found and card.exists()) or card.read_text() == str(found[0])
        return found[0] if found else None

    before = require_whole()
    with suppress(FileExistsError):
        require_place(out, overwrite=False)
    after = require_whole()
    assert after in (before, 1)
    expected = "1" if after == 1 else "0" if old in ("both", "beside") else None
    assert (card.read_text() if card.exists() else None) == expected
    _make(out, 0, 1)
    assert _equal(load(out), 0)
    assert not partial_of(out).exists()


@pytest.mark.parametrize("has_links", [True, False], ids=["links", "no links"])
@pytest.mark.parametrize("step", range(12))
def test_wherever_it_ends_nothing_is_lost(
    step: int, has_links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For every system call that replaces a folder, a run ends at this call, and the next run repairs the state."""
    out = _write(tmp_path / "out", 0)
    _put(out, OTHERS)
    count = 0
    is_over = False

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal count, is_over
            if is_over or count == step:
                is_over = True  # a killed process does nothing more
                raise KeyboardInterrupt
            count += 1
            return call(*args, **kwargs)

        return run

    def no_links(*args: Any, **kwargs: Any) -> None:
        raise OSError("not supported")

    def forbidden(*args: Any, **kwargs: Any) -> None:
        if not is_over:
            raise AssertionError

    params = _params(1)
    staging = Staging(out, {}, resume=False, overwrite=True)
    staging.write(_shards(), lambda name: iter([params[name]]))
    with monkeypatch.context() as patch:
        patch.setattr(os, "link", counted(os.link) if has_links else no_links)
        patch.setattr(os, "rename", counted(os.rename))
        patch.setattr(shutil, "rmtree", counted(shutil.rmtree))
        try:
            staging.publish(_shards())
        except KeyboardInterrupt:
            assert is_over
    staging.close()
    if out.exists():
        found = load(out)
        assert _equal(found, 0) or _equal(found, 1)
    with suppress(FileExistsError):
        Staging(out, {}, resume=False, overwrite=False).close()
    found = load(out)
    assert _equal(found, 0) or _equal(found, 1)
    _require(out, OTHERS)
    _make(out, 2)
    assert _equal(load(out), 2)
    _require(out, OTHERS)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_describes_a_network_goes_along(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = _write(tmp_path / "b", 0, metadata={"total_size": 3, "total_parameters": 30})
    carried = {
        "README.md": "about b",
        "tokenizer.json": "{}",
        ".gitattributes": "x",
        "1_Pooling/config.json": "{}",
        "chat_templates/a/b.jinja": "{{ }}",
    }
    left = {
        "optimizer.pt": "state",
        "model.gguf": "codes",
        ".git/HEAD": "x",
        "onnx/model.onnx": "other weights",
        "checkpoint-10/config.json": "{}",
        "checkpoint-10/model.safetensors": "weights",
        "regauge.json": "where b comes from",
    }
    _put(source, {**carried, **left})
    os.truncate(source / "1_Pooling" / "config.json", 2)
    with (source / "corpus.jsonl").open("wb") as large:
        large.truncate(200_000_000)
    os.mkfifo(source / "pipe")
    caplog.set_level("INFO")
    _make(tmp_path / "out", 1, source=Checkpoint.open(source))
    _require(tmp_path / "out", carried)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    tops = {Path(name).parts[0] for name in carried}
    assert names == tops | {"config.json", INDEX, *(shard.file for shard in _shards())}
    told = [record.getMessage() for record in caplog.records]
    assert told[0].startswith(f"copied from {str(source)!r}: '.gitattributes', '1_Pooling', 'README.md'")
    names_left = "'.git', 'checkpoint-10', 'corpus.jsonl', 'model.gguf', 'onnx', 'optimizer.pt', 'pipe'"
    assert told[1] == f"left in {str(source)!r}: {names_left}"
    metadata = json.loads((tmp_path / "out" / INDEX).read_text())["metadata"]
    assert metadata == {"total_size": 120, "total_parameters": 30}


@pytest.fixture
def pair(tmp_path: Path) -> list[str]:
    """Return two folders and the symmetry of their networks, as arguments."""
    (tmp_path / "symmetry.json").write_text(SYMMETRY.bind(_params(0)).to_json())
    folders = [str(_write(tmp_path / name, seed)) for seed, name in enumerate("ab")]
    return [*folders, "--symmetry", str(tmp_path / "symmetry.json")]


def test_the_command_tells_what_it_replaced(
    pair: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _put(tmp_path / "b", OTHERS)
    main(["align", *pair, "-o", pair[1], "--overwrite"])
    _require(tmp_path / "b", OTHERS)
    told = capsys.readouterr().err
    assert f"in '{pair[1]}': replaced 'config.json', 'model-00001-of-00002.safetensors'" in told
    assert "kept '.gitattributes', 'README.md'" in told


@pytest.mark.parametrize("out", ["out", "out.safetensors"])
def test_a_refused_input_leaves_nothing(out: str, pair: list[str], tmp_path: Path, refused: Callable[..., str]) -> None:
    params = {**_params(1), "up": torch.full((6, 3), float("nan"))}
    shard = _shards()[0]
    write_shard(shard, tmp_path / "b", lambda name: iter([params[name]]))
    for command in ("align", "merge"):
        assert "NaN or Inf" in refused(command, *pair, "-o", str(tmp_path / out))
    shutil.rmtree(tmp_path / "b")
    _write(tmp_path / "b", 1)
    main(["align", *pair, "-o", str(tmp_path / out)])


@pytest.mark.parametrize("out", ["out", "out.safetensors"])
@pytest.mark.parametrize("more", [[], ["--resume"], ["--overwrite"]], ids=["", "resume", "overwrite"])
def test_a_second_process_is_told_that_one_is_running(
    more: list[str], out: str, pair: list[str], tmp_path: Path, refused: Callable[..., str]
) -> None:
    arguments = ["merge", *pair, "-o", str(tmp_path / out), *more]
    if out != "out":
        arguments += ["--resume"]
    with Staging(tmp_path / out, {}, resume=False, overwrite=False):
        assert "another process is writing" in refused(*dict.fromkeys(arguments))
    shutil.rmtree(partial_of(tmp_path / out))
    main(list(dict.fromkeys(arguments)))


def test_what_a_killed_run_left_of_a_file_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "out[1].safetensors"
    left = tmp_path / f".{path.name}.0123456789ab.partial"
    others = [
        ".other.safetensors.0123456789ab.partial",
        f".{path.name}.notes.partial",
        f".{path.name}.0123456789AB.partial",
    ]
    for one in (left.name, *others):
        (tmp_path / one).write_text("half")
    with whole_file(path) as mine:
        mine.write_text("mine")
        save(_params(0), path)  # another writer, which leaves alone what this one writes
        assert mine.read_text() == "mine"
    assert path.read_text() == "mine"
    assert sorted(one.name for one in tmp_path.iterdir()) == sorted([*others, path.name])


def _child(work: Callable[[], object]) -> str:
    """Return the message of the OSError that work raises in a separate process, or nothing."""
    read, write = os.pipe()
    if os.fork() == 0:
        try:
            work()
        except OSError as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read, "rb") as stream:
        text = stream.read().decode()
    os.wait()
    return text


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_disk_that_fills_up_while_a_file_is_written(tmp_path: Path) -> None:
    def limited(path: Path, size: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        save({"a": torch.zeros(size)}, path, overwrite=True)

    path = save({"a": torch.ones(2)}, tmp_path / "out.safetensors")
    told = _child(lambda: limited(path, 1000))
    assert f"the disk is too full to write {str(path)!r}, which needs 4 kB; free space" in told
    assert torch.equal(load(path)["a"], torch.ones(2))
    assert [one.name for one in tmp_path.iterdir()] == ["out.safetensors"]
    assert _child(lambda: limited(path, 10)) == ""


@pytest.mark.parametrize("out", ["out", "out.safetensors"])
def test_a_full_disk_is_told_before_the_work(
    out: str, pair: list[str], tmp_path: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10))
    monkeypatch.setattr("regauge.alignment.streamed.job.align_streamed", None)
    for command in ("align", "merge"):
        told = refused(command, *pair, "-o", str(tmp_path / out))
        assert f"the disk is too full to write {str(tmp_path / out)!r}, which needs 120 B (10 B are free)" in told


def test_other_files_fill_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=50))
    told = [str(FullDiskError(tmp_path / "x", nbytes)) for nbytes in (40, 60, None)]
    assert ["which needs" in one for one in told] == [True, True, False]
    assert ["(50 B are free)" in one for one in told] == [False, True, True]


def test_a_link_to_an_input_and_a_folder_in_it_are_free(tmp_path: Path) -> None:
    a, b = (save(_params(k), tmp_path / f"{k}.safetensors") for k in range(2))
    (tmp_path / "link.safetensors").symlink_to(a)
    rg.align(a, b, SYMMETRY, out=rg.Output(tmp_path / "link.safetensors", overwrite=True))
    assert all(torch.equal(tensor, _params(0)[name]) for name, tensor in load(a).items())
    assert not (tmp_path / "link.safetensors").is_symlink()
    folder = _write(tmp_path / "folder", 2)
    rg.align(a, folder, SYMMETRY, out=folder / "aligned")
    assert all(torch.equal(tensor, _params(2)[name]) for name, tensor in load(folder).items())


def test_what_was_finished_before_a_disk_was_full_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params = _params(0)

    def pieces(name: str) -> Iterator[Tensor]:
        if name == "down":
            raise OSError(28, "No space left on device")
        yield params[name]

    out = tmp_path / "out"
    with (
        pytest.raises(
            OSError, match=r"to write '[^']*out', which needs .* in '[^']*out\.partial': free space, and add"
        ),
        Staging(out, {}, resume=False, overwrite=False, nbytes=1000) as staging,
    ):
        staging.write(_shards(), pieces)
    with Staging(out, {}, resume=True, overwrite=False) as staging:
        assert staging.write(_shards(), lambda name: iter([params[name]])) == ["model-00001-of-00002.safetensors"]
        staging.publish(_shards())
    assert _equal(load(out), 0)

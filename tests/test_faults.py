"""Faults of files: damage is reported before anything is written, and outputs are complete or absent."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import regauge as rg
from regauge.alignment.streamed.state import State, save_state
from regauge.checkpoints.checkpoint import Checkpoint, load
from regauge.checkpoints.formats.headers import TensorSpec
from regauge.checkpoints.outputs.staging import Staging, partial_of
from regauge.checkpoints.writing import Shard, save, write_index, write_shard
from regauge.cli.main import main
from regauge.core.params import Params

INDEX = "model.safetensors.index.json"
SYMMETRY = rg.Symmetry.from_axes(
    {"up.weight": ("h", None), "up.bias": ("h",), "down.weight": (None, "h")}, kinds={"h": "signed"}
)


def _params(seed: int, width: int = 24, dtype: torch.dtype = torch.float32) -> Params:
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "up.weight": (width, 6),
        "up.bias": (width,),
        "down.weight": (4, width),
        "down.bias": (4,),
        "extra": (9, 2),
    }
    return {n: torch.randn(s, generator=generator).to(dtype) for n, s in shapes.items()} | {"steps": torch.tensor(seed)}


def _sharded(params: Params, folder: Path) -> Path:
    """Write a checkpoint with one tensor in each file."""
    folder.mkdir()
    shards = []
    for k, (name, tensor) in enumerate(params.items()):
        shard = Shard(f"model-{k}.safetensors", (TensorSpec(name, tuple(tensor.shape), tensor.dtype),), {"k": str(k)})
        write_shard(shard, folder, lambda name: iter([params[name]]))
        shards.append(shard)
    write_index(shards, folder)
    (folder / "config.json").write_text("{}")
    return folder


def _equal(left: Params, right: Params) -> bool:
    return left.keys() == right.keys() and all(
        t.dtype == right[n].dtype and torch.equal(t, right[n]) for n, t in left.items()
    )


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Return two sharded checkpoints and the symmetry of their network."""
    (tmp_path / "symmetry.json").write_text(SYMMETRY.bind(_params(0)).to_json())
    return _sharded(_params(0), tmp_path / "a"), _sharded(_params(1), tmp_path / "b")


def _arguments(command: str, pair: tuple[Path, Path], out: Path, *more: str) -> list[str]:
    inputs = [str(path) for path in pair]
    return [command, *inputs, "-o", str(out), "--symmetry", str(pair[0].parent / "symmetry.json"), *more]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_reading_in_pieces_gives_the_bits_of_the_file(dtype: torch.dtype, tmp_path: Path) -> None:
    params = {**_params(0, dtype=dtype), "long": torch.randn(700, 900).to(dtype), "empty": torch.zeros(0, 3).to(dtype)}
    save(params, tmp_path / "a.safetensors")
    with Checkpoint.open(tmp_path / "a.safetensors") as lazy:
        assert _equal({name: lazy.read(name) for name in params}, params)
        assert torch.equal(lazy.read("long", rows=(13, 600)), params["long"][13:600])
        assert torch.equal(lazy.read("long", dtype=torch.float64), params["long"].double())
        assert lazy.nbytes == sum(t.numel() * t.element_size() for t in params.values())


def test_a_sharded_checkpoint_is_read_by_its_index(pair: tuple[Path, Path]) -> None:
    with Checkpoint.open(pair[0]) as lazy:
        assert _equal({name: lazy.read(name) for name in lazy.stored}, _params(0))
        assert sorted(shard.metadata["k"] for shard in lazy.layout()) == list("012345")


def test_a_layout_written_again_is_the_same_file(pair: tuple[Path, Path], tmp_path: Path) -> None:
    with Checkpoint.open(pair[0]) as lazy:
        for shard in lazy.layout():
            size, _ = write_shard(shard, tmp_path, lambda name: iter([lazy.read(name)]))
            assert (tmp_path / shard.file).read_bytes() == (pair[0] / shard.file).read_bytes()
            assert (tmp_path / shard.file).stat().st_size == size
        (one,) = lazy.layout("all.safetensors")
        write_shard(one, tmp_path, lambda name: iter([lazy.read(name)]))
    assert _equal(load(tmp_path / "all.safetensors"), _params(0))


def test_a_file_that_is_cut_while_it_is_read_is_named(tmp_path: Path) -> None:
    save({"a": torch.zeros(1000)}, tmp_path / "a.safetensors")
    with Checkpoint.open(tmp_path / "a.safetensors") as lazy:
        os.truncate(tmp_path / "a.safetensors", 1000)
        with pytest.raises(ValueError, match=r"a\.safetensors' ended inside 'a'"):
            lazy.read("a")


def _truncate(folder: Path) -> str:
    os.truncate(folder / "model-2.safetensors", 100)
    return "model-2.safetensors' is not a readable safetensors file"


def _remove(folder: Path) -> str:
    (folder / "model-1.safetensors").unlink()
    return "names shards that do not exist: 'model-1.safetensors'"


def _misname(folder: Path) -> str:
    document = json.loads((folder / INDEX).read_text())
    document["weight_map"]["other"] = "model-0.safetensors"
    (folder / INDEX).write_text(json.dumps(document))
    return "says that 'other' is in 'model-0.safetensors', but it is not"


def _reshape(folder: Path) -> str:
    shutil.rmtree(folder)
    _sharded(_params(1, width=20), folder)
    return "'down.weight' has shape (4, 20) in"


def _retype(folder: Path) -> str:
    shutil.rmtree(folder)
    _sharded(_params(1, dtype=torch.int64), folder)
    return "and torch.int64 in"


def _drop(folder: Path) -> str:
    shutil.rmtree(folder)
    _sharded({n: t for n, t in _params(1).items() if n != "extra"}, folder)
    return "lacks 'extra'"


@pytest.mark.parametrize("command", ["align", "merge"])
@pytest.mark.parametrize("damage", [_truncate, _remove, _misname, _reshape, _retype, _drop])
def test_damage_is_named_before_anything_is_written(
    damage: Callable[[Path], str], command: str, pair: tuple[Path, Path], refused: Callable[..., str]
) -> None:
    expected = damage(pair[1])
    out = pair[0].parent / "out"
    before = sorted(out.parent.iterdir())
    assert expected in refused(*_arguments(command, pair, out))
    assert sorted(out.parent.iterdir()) == before


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (("--restarts", "2"), "matching with restarts or init needs the networks in memory, which takes"),
        (("--method", "frank-wolfe"), "streamed networks are matched by WeightMatching()"),
        (
            ("--rule", "greedy", "--data", f"{__file__}:batches"),
            "--data runs the model and needs the networks in memory",
        ),
        (("--memory", "much"), "the memory 'much' cannot be read"),
        (("--memory", "1MB"), "but only 0.001 GB are allowed"),
    ],
)
@pytest.mark.usefixtures("streamed")
def test_what_cannot_stream_is_said(
    more: tuple[str, ...], sentence: str, pair: tuple[Path, Path], refused: Callable[..., str]
) -> None:
    assert sentence in refused(*_arguments("merge", pair, pair[0].parent / "out", *more))


def test_a_symmetry_of_folded_networks_is_for_folded_networks(
    pair: tuple[Path, Path], refused: Callable[..., str]
) -> None:
    text = replace(SYMMETRY.bind(_params(0)), ones=("extra",)).to_json()
    (pair[0].parent / "symmetry.json").write_text(text)
    assert "'extra' is not" in refused(*_arguments("align", pair, pair[0].parent / "out"))


def _merged_in_memory() -> Params:
    return rg.merge([_params(0), _params(1)], SYMMETRY, method=rg.WeightMatching()).params


@pytest.mark.parametrize("where", ["in memory", "streamed"])
def test_a_dry_run_writes_nothing(
    where: str, pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    if where == "streamed":
        request.getfixturevalue("streamed")
    before = sorted(pair[0].parent.iterdir())
    main(_arguments("merge", pair, pair[0].parent / "out", "--dry-run"))
    told = capsys.readouterr().out
    how = "at most" if where == "streamed" else "about"
    assert f"memory held at once, above the interpreter: {how}" in told
    assert "written: 6 files" in told
    assert sorted(pair[0].parent.iterdir()) == before


@pytest.mark.parametrize("where", ["in memory", "streamed"])
def test_a_folder_of_shards_becomes_a_folder_of_shards(
    where: str, pair: tuple[Path, Path], request: pytest.FixtureRequest
) -> None:
    if where == "streamed":
        request.getfixturevalue("streamed")
    folder = pair[0].parent
    main(_arguments("merge", pair, folder / "merged"))
    main(_arguments("align", pair, folder / "aligned"))
    names = {"config.json", "regauge.json", INDEX, *(f"model-{k}.safetensors" for k in range(6))}
    assert {path.name for path in (folder / "merged").iterdir()} == names | {"regauge.md"}
    assert {path.name for path in (folder / "aligned").iterdir()} == names | {"regauge.alignment.safetensors"}
    assert _equal(load(folder / "merged"), _merged_in_memory())
    expected = rg.align(_params(0), _params(1), SYMMETRY)
    assert _equal(load(folder / "aligned"), expected.params)
    main(["apply", str(folder / "aligned"), str(pair[1]), "-o", str(folder / "again.safetensors")])
    assert _equal(load(folder / "again.safetensors"), expected.params)
    assert not partial_of(folder / "merged").exists()


@pytest.mark.usefixtures("streamed")
def test_a_folder_of_shards_becomes_one_file(pair: tuple[Path, Path]) -> None:
    folder = pair[0].parent
    main(_arguments("merge", pair, folder / "merged.safetensors", "--memory", "160MB"))
    assert _equal(load(folder / "merged.safetensors"), _merged_in_memory())
    assert (folder / "merged.md").read_text().startswith("# Merged network")


@pytest.mark.usefixtures("streamed")
def test_task_arithmetic_streams(pair: tuple[Path, Path]) -> None:
    folder = pair[0].parent
    base = _sharded(_params(2), folder / "base")
    more = ("--rule", "task-arithmetic", "--scale", "0.5", "--base", str(base))
    main(_arguments("merge", pair, folder / "out", *more))
    networks = [_params(0), _params(1)]
    expected = rg.merge(networks, SYMMETRY, rule=rg.merging.TaskArithmetic(0.5), base=_params(2)).params
    found = load(folder / "out")
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)


def test_what_is_there_is_kept(pair: tuple[Path, Path], refused: Callable[..., str]) -> None:
    out = pair[0].parent / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("years of work")
    assert "exists already" in refused(*_arguments("merge", pair, out))
    assert "holds files but no checkpoint" in refused(*_arguments("merge", pair, out, "--overwrite"))
    assert (out / "thesis.txt").read_text() == "years of work"


def _shards(count: int = 3) -> list[Shard]:
    return [Shard(f"{k}.safetensors", (TensorSpec(str(k), (5,), torch.float32),), {}) for k in range(count)]


def test_finished_shards_are_kept_and_damaged_ones_written_again(tmp_path: Path) -> None:
    asked: list[str] = []

    def pieces(name: str) -> Iterator[Tensor]:
        asked.append(name)
        if name == "2" and len(asked) == 3:
            raise KeyboardInterrupt
        yield torch.full((5,), float(name))

    with (
        Staging(tmp_path / "out", {"of": 1}, resume=False, overwrite=False) as staging,
        pytest.raises(KeyboardInterrupt),
    ):
        staging.write(_shards(), pieces)
    assert not (tmp_path / "out").exists()
    with pytest.raises(FileExistsError, match=r"an interrupted run left .*add `resume=True`"):
        Staging(tmp_path / "out", {"of": 1}, resume=False, overwrite=False)
    with pytest.raises(ValueError, match="had other inputs or settings"):
        Staging(tmp_path / "out", {"of": 2}, resume=True, overwrite=False)
    with Staging(tmp_path / "out", {"of": 1}, resume=True, overwrite=False) as staging:
        data = bytearray((staging.content / "1.safetensors").read_bytes())
        data[-1] ^= 1
        (staging.content / "1.safetensors").write_bytes(data)
        asked[:] = ["", "", "", ""]
        assert staging.write(_shards(), pieces) == ["0.safetensors"]
        assert asked[4:] == ["1", "2"]
        staging.publish(_shards())
    assert {name: float(t[0]) for name, t in load(tmp_path / "out" / INDEX).items()} == {"0": 0, "1": 1, "2": 2}
    assert not partial_of(tmp_path / "out").exists()


def test_two_processes_do_not_write_one_output(tmp_path: Path) -> None:
    with (
        Staging(tmp_path / "out", {}, resume=False, overwrite=False),
        pytest.raises(ValueError, match="another process is writing"),
    ):
        Staging(tmp_path / "out", {}, resume=True, overwrite=False)


def _run(arguments: list[str], seconds: float | None = None) -> int:
    """Run a command in a separate process, which is killed after some time. Return its exit code, 0 on success."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 1)
            os.dup2(quiet, 2)
            main(arguments)
            code = 0
        finally:
            os._exit(code)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


@pytest.mark.usefixtures("streamed")
@pytest.mark.parametrize(("command", "step"), [("align", 3), ("merge", 3)])
def test_equal_runs_write_equal_bytes(
    command: str, step: int, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes do not depend on the point of an interruption or on the seed of Python's hashes. Both runs save the
    same states.
    """
    folder = pair[0].parent
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    code = [sys.executable, "-m", "regauge", *_arguments(command, pair, folder / "other")]
    subprocess.run(code, check=True, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    monkeypatch.setattr("regauge.alignment.streamed.climb.SAVE_SECONDS", 0.0)
    main(_arguments(command, pair, folder / "whole"))
    is_over, count = False, 0
    while not is_over:
        calls, out = 0, folder / f"out{count}"

        def keep(state: State, path: Path, limit: int = count) -> None:
            nonlocal calls
            save_state(state, path)
            calls += 1
            if calls > limit:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr("regauge.alignment.streamed.job.save_state", keep)
            try:
                main(_arguments(command, pair, out))
                is_over = True
            except SystemExit:
                pass
        if not is_over:
            main(_arguments(command, pair, out, "--resume"))
        for path in (folder / "whole").iterdir():
            assert path.read_bytes() == (out / path.name).read_bytes(), path.name
        count += step
    assert count > 2 * step
    for path in (folder / "other").iterdir():
        if path.name != "regauge.md":  # in memory the card says so
            assert path.read_bytes() == (folder / "whole" / path.name).read_bytes(), path.name


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("name", ["out", "out.safetensors"])
def test_a_kill_leaves_the_old_output_or_the_new_one(name: str, pair: tuple[Path, Path]) -> None:
    folder = pair[0].parent
    out, old, new = folder / name, _params(7), _merged_in_memory()

    def put_old() -> None:
        shutil.rmtree(out, ignore_errors=True)
        shutil.rmtree(partial_of(out), ignore_errors=True)
        if name == "out":
            _sharded(old, out)
            (out / "runs").mkdir()
            (out / "runs" / "events").write_text("of the training")
            (out / "optimizer.pt").write_text("of the training")
        else:
            save(old, out, overwrite=True)

    def require_others() -> None:
        for other in ("optimizer.pt", "runs/events") if name == "out" else ():
            assert (out / other).read_text() == "of the training"

    put_old()
    arguments = _arguments("merge", pair, out, "--overwrite", "--resume")
    start = time.perf_counter()
    assert _run(arguments) == 0
    longest = time.perf_counter() - start
    assert _equal(load(out), new)
    chance, killed = random.Random(0), 0
    put_old()
    for _ in range(10):
        start = time.perf_counter()
        status = _run(arguments, chance.uniform(0.3, 1.0) * longest)
        assert status in (0, signal.SIGKILL)
        if status == 0:  # The first run was slower: the next ones are killed earlier.
            longest = min(longest, time.perf_counter() - start)
        killed += status != 0
        found = load(out)
        assert _equal(found, old) or _equal(found, new)
        require_others()
        if _equal(found, new):
            put_old()
    assert killed
    assert _run(arguments) == 0
    assert _equal(load(out), new)
    require_others()
    assert not partial_of(out).exists()

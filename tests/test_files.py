"""Networks on the disk are aligned and merged in memory or streamed, with the same result."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import regauge as rg
from regauge.checkpoints import memory_limit
from regauge.checkpoints.alignments import load_alignment
from regauge.checkpoints.checkpoint import Checkpoint, load
from regauge.checkpoints.memory_limit import MemoryLimit
from regauge.checkpoints.writing import save
from regauge.cli.main import main
from regauge.core.interpolation import distance
from regauge.core.params import Params

SYMMETRY = rg.Symmetry.from_axes(
    {"up.weight": ("h", None), "up.bias": ("h",), "down.weight": (None, "h")}, kinds={"h": "signed"}
)
MODELS = """
import torch
from torch import nn


def normalized():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)), torch.ones(2, 4)


def batches():
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        yield torch.randn(16, 4, generator=generator), torch.randint(0, 3, (16,), generator=generator)
"""


def _params(seed: int, dtype: torch.dtype = torch.float32) -> Params:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"up.weight": (24, 6), "up.bias": (24,), "down.weight": (4, 24), "down.bias": (4,)}
    return {n: torch.randn(s, generator=generator).to(dtype) for n, s in shapes.items()} | {"steps": torch.tensor(seed)}


def _equal(left: Params, right: Params) -> bool:
    return left.keys() == right.keys() and all(
        t.dtype == right[n].dtype and torch.equal(t, right[n]) for n, t in left.items()
    )


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    """Return three checkpoints, the first of which has strings in its header."""
    return [
        save(_params(k), tmp_path / f"{letter}.safetensors", metadata={"author": letter})
        for k, letter in enumerate("abc")
    ]


@pytest.mark.parametrize("where", ["in memory", "streamed"])
def test_alignment_of_files_is_that_of_their_parameters(
    where: str, paths: list[Path], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if where == "streamed":
        request.getfixturevalue("streamed")
    expected = rg.align(_params(0), _params(1), SYMMETRY)
    out = tmp_path / "out.safetensors"
    found = rg.align(paths[0], paths[1], SYMMETRY, out=out, memory="150MB")
    assert _equal(load(out), expected.params)
    assert _equal(dict(found.params), expected.params)
    assert found.objective == pytest.approx(expected.objective)
    assert Checkpoint.open(out).header["author"] == "b"
    stored = load_alignment(tmp_path / "out.alignment.safetensors")
    assert _equal(stored.symmetry.act(stored.element, _params(1)), expected.params)
    with pytest.raises(FileExistsError):
        rg.align(paths[0], paths[1], SYMMETRY, out=out, memory="150MB")


@pytest.mark.parametrize("where", ["in memory", "streamed"])
def test_a_merge_of_files_is_that_of_their_parameters(
    where: str, paths: list[Path], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if where == "streamed":
        request.getfixturevalue("streamed")
    networks = [_params(k) for k in range(3)]
    expected = rg.merge(networks, SYMMETRY, method=rg.WeightMatching(), weights=[1, 2, 3])
    out = tmp_path / "out.safetensors"
    found = rg.merge(
        paths,
        SYMMETRY,
        method=rg.WeightMatching(),
        weights=[1, 2, 3],
        out=out,
        memory="150MB",
    )
    assert _equal(load(out), expected.params)
    assert _equal(dict(found.params), expected.params)
    assert Checkpoint.open(out).header["author"] == "a"
    assert (tmp_path / "out.md").read_text() == found.record.card
    assert found.record.networks == tuple(map(str, paths))
    for one, other in zip(found.elements, expected.elements, strict=True):
        assert one["h"].perm.equal(other["h"].perm)
    assert found.record.before == pytest.approx(expected.record.before)
    assert found.record.after == pytest.approx(expected.record.after)
    assert found.record.weights == pytest.approx(expected.record.weights)


def test_files_need_not_be_written(paths: list[Path]) -> None:
    assert _equal(rg.align(*paths[:2], SYMMETRY).params, rg.align(_params(0), _params(1), SYMMETRY).params)
    opened = [Checkpoint.open(path) for path in paths]
    assert _equal(rg.merge(opened, SYMMETRY).params, rg.merge([_params(k) for k in range(3)], SYMMETRY).params)


@pytest.mark.usefixtures("streamed")
def test_what_does_not_fit_says_what_helps(paths: list[Path], tmp_path: Path) -> None:
    a, b = paths[:2]
    out = tmp_path / "out.safetensors"
    with pytest.raises(ValueError, match=r"give `out`, a \.safetensors file or a folder for the result"):
        rg.align(a, b, SYMMETRY, memory="150MB")
    with pytest.raises(ValueError, match=r"GB are allowed; these tensors are needed together: .*; allow 0\.1.* GB"):
        rg.align(a, b, SYMMETRY, memory=1000, out=out)
    with pytest.raises(
        ValueError, match=r"needs the networks in memory, which takes .* kB, more than the 1 kB that are allowed"
    ):
        rg.align(a, b, SYMMETRY, memory=1000, out=out, method=rg.FrankWolfe())
    with pytest.raises(ValueError, match="matching with restarts or init needs the networks in memory"):
        rg.merge([a, b], SYMMETRY, memory=1000, out=out, method=rg.WeightMatching(restarts=1))
    task = rg.Task(nn.Identity(), [])
    with pytest.raises(ValueError, match="a task runs the model and needs the networks in memory"):
        rg.merge([a, b], SYMMETRY, memory=1000, out=out, task=task)
    with pytest.raises(TypeError, match="must all be checkpoints, given by their paths"):
        rg.align(a, _params(1), SYMMETRY)
    with pytest.raises(TypeError, match="must all be checkpoints, given by their paths"):
        rg.merge([_params(0), _params(1)], SYMMETRY, out=out)
    with pytest.raises(ValueError, match="the memory 'much' cannot be read"):
        rg.align(a, b, SYMMETRY, memory="much")
    assert not out.exists()


def test_torch_files_are_read_as_a_whole(paths: list[Path], tmp_path: Path) -> None:
    torch.save(_params(1), tmp_path / "b.pt")
    expected = rg.align(_params(0), _params(1), SYMMETRY)
    found = rg.align(paths[0], tmp_path / "b.pt", SYMMETRY, out=tmp_path / "out.safetensors")
    assert _equal(load(tmp_path / "out.safetensors"), expected.params)
    assert _equal(found.params, expected.params)
    found = rg.align(paths[0], tmp_path / "b.pt", SYMMETRY, out=tmp_path / "folder", memory=1000)
    assert _equal(load(tmp_path / "folder"), expected.params)
    assert _equal(found.params, expected.params)


# What the command line writes is what the library returns.


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a working directory with a model that has running statistics, data, and two checkpoints."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "normalized_nets.py").write_text(MODELS)
    for seed, name in enumerate("ab"):
        generator = torch.Generator().manual_seed(seed)
        module = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
        params = {
            n: torch.rand(t.shape, generator=generator) + 0.5 if t.is_floating_point() else t
            for n, t in module.state_dict().items()
        }
        save(params, tmp_path / f"{name}.safetensors")
    return tmp_path


def test_the_command_writes_the_network_that_merge_returns(folder: Path) -> None:
    model = ["--model", "normalized_nets.py:normalized", "--data", "normalized_nets.py:batches"]
    test = ["--test", "normalized_nets.py:batches"]
    main(["merge", "a.safetensors", "b.safetensors", "-o", "out.safetensors", *model, *test, "--method", "mixed"])
    module = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)).eval()
    generator = torch.Generator().manual_seed(0)
    batches = [
        (torch.randn(16, 4, generator=generator), torch.randint(0, 3, (16,), generator=generator)) for _ in range(3)
    ]

    def prepare(params: Params) -> Params:
        return rg.connect.reset_batchnorm(params, module, [inputs for inputs, _ in batches])

    task = rg.Task(module, batches, prepare=prepare)
    networks = [load("a.safetensors"), load("b.safetensors")]
    symmetry = rg.discover(module, (torch.ones(2, 4),))
    found = rg.merge(networks, symmetry, method=rg.alignment.MixedMatching(), task=task, test=task)
    assert _equal(load("out.safetensors"), found.params)
    bare = rg.Task(module, batches)
    plain = rg.merge(networks, symmetry, method=rg.alignment.MixedMatching(scales="recompute"), task=bare, test=bare)
    assert not torch.equal(plain.params["1.running_mean"], found.params["1.running_mean"])
    assert _equal(prepare(plain.params), found.params)
    assert found.record.merged_metrics == task.evaluate(found.params)


@pytest.mark.parametrize("where", ["in memory", "streamed"])
def test_both_commands_tell_the_same_distance(
    where: str, folder: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    if where == "streamed":
        request.getfixturevalue("streamed")
    pair = ["a.safetensors", "b.safetensors", "--model", "normalized_nets.py:normalized", "--method", "weights"]
    pair += ["--memory", "3GB"]
    main(["align", *pair, "-o", "aligned.safetensors"])
    told = capsys.readouterr().out
    main(["merge", *pair, "-o", "merged.safetensors"])
    buffers = ("1.running_mean", "1.running_var")
    networks = [load(f"{name}.safetensors") for name in ("a", "b", "aligned")]
    for other in networks[1:]:
        expected = f"{distance(networks[0], other, buffers):.6g}"
        assert expected in told
        assert expected in (folder / "merged.md").read_text()


# The object itself.


def test_a_checkpoint_is_a_mapping_that_reads_when_it_is_asked(paths: list[Path]) -> None:
    checkpoint = Checkpoint.open(paths[0])
    assert checkpoint.read_so_far.nbytes == 0
    assert list(checkpoint) == list(checkpoint.stored)
    assert torch.equal(checkpoint["up.bias"], _params(0)["up.bias"])
    assert checkpoint.read_so_far.nbytes == 24 * 4
    assert _equal(checkpoint.params, _params(0))
    before = checkpoint.read_so_far.nbytes
    assert checkpoint.params is checkpoint.params
    checkpoint.read("up.bias").zero_()
    assert torch.equal(checkpoint.read("up.bias", rows=(2, 5)), _params(0)["up.bias"][2:5])
    assert checkpoint.read_so_far.nbytes == before
    assert Checkpoint.open(checkpoint) is checkpoint


def test_other_values_are_written_in_the_form_of_the_file(paths: list[Path], tmp_path: Path) -> None:
    source = Checkpoint.open(save(_params(0, torch.bfloat16), tmp_path / "half.safetensors", metadata={"is": "kept"}))
    changed = {n: t.double() + 1 if t.is_floating_point() else t for n, t in source.items()}
    source.with_params({**changed, "tied": torch.zeros(2)}).write(tmp_path / "out.safetensors")
    written = Checkpoint.open(tmp_path / "out.safetensors")
    assert written.header["is"] == "kept"
    assert {n: (s.dtype, s.shape) for n, s in written.stored.items()} == {
        n: (s.dtype, s.shape) for n, s in source.stored.items()
    }
    assert _equal(written.params, {n: t.to(source[n].dtype) for n, t in changed.items()})
    with pytest.raises(KeyError, match=r"the parameters lack 'down\.bias'"):
        source.with_params({n: t for n, t in changed.items() if n != "down.bias"})


# Memory.


@pytest.mark.parametrize(
    ("text", "nbytes"), [("3GB", 3 * 10**9), ("500 MB", 5 * 10**8), ("1.5gib", 3 << 29), ("7", 7), (9, 9)]
)
def test_sizes_are_read(text: str | int, nbytes: int) -> None:
    assert MemoryLimit.of(text) == MemoryLimit(nbytes)
    assert MemoryLimit.of(text).held() == 0


def test_half_of_the_machine_is_the_limit_unless_given() -> None:
    assert 1 << 26 < MemoryLimit.of(None).nbytes < 1 << 60


HELD = """
import torch
from regauge.checkpoints.memory_limit import MemoryLimit, resident

limit = MemoryLimit(10**9, resident())
kept = torch.ones(50_000_000)
print(limit.held(), 4 * kept.numel())
"""


@pytest.mark.skipif(not memory_limit.PAGES.exists(), reason="reads /proc")
def test_what_is_held_is_measured() -> None:
    # In a process of its own: others of this one may give memory back meanwhile.
    held, size = map(int, subprocess.check_output([sys.executable, "-c", HELD], text=True).split())
    assert size - (1 << 24) < held < size + (1 << 26)


@pytest.mark.usefixtures("streamed")
def test_what_is_held_already_counts(paths: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_limit, "resident", lambda: 2 * 10**9)
    base = 2 * 10**9 - 2 * 10**8
    limit = MemoryLimit(2 * 10**8 + 10**7, base)
    with pytest.raises(ValueError, match=r"of memory, of which 0\.2 GB are in use, but only"):
        rg.align(*paths[:2], SYMMETRY, out=tmp_path / "out.safetensors", memory=limit)


@pytest.mark.usefixtures("streamed")
def test_a_dry_run_tells_what_tracing_left(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes: list[int] = []

    def growing() -> int:
        sizes.append(len(sizes))
        return 10**8 * len(sizes)

    monkeypatch.setattr(memory_limit, "resident", growing)
    monkeypatch.setattr("regauge.cli.streaming.resident", growing)
    pair = ["a.safetensors", "b.safetensors", "--model", "normalized_nets.py:normalized"]
    main(["align", *pair, "-o", "out.safetensors", "--memory", "1GB", "--dry-run"])
    assert "MB of them already" in capsys.readouterr().out


def test_systems_that_do_not_tell_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("os.sysconf")
    with pytest.raises(ValueError, match="does not report how much memory it has"):
        MemoryLimit.of(None)


@pytest.mark.parametrize("where", ["in memory", "streamed"])
def test_what_could_not_be_taken_over_reaches_every_report(
    where: str, tmp_path: Path, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this test, an inner matrix of one network is singular up to rounding."""
    if where == "streamed":
        request.getfixturevalue("streamed")
    symmetry = rg.Symmetry.from_axes({"up": ("h", None), "down": (None, "h")}, kinds={"h": "linear"})
    generator, files = torch.Generator().manual_seed(0), []
    for letter in "abc":
        params = {"up": torch.randn(4, 6, generator=generator), "down": torch.randn(5, 4, generator=generator)}
        if letter == "b":
            params["up"][0] = params["up"][1] * (1 + 1e-4 * torch.arange(6))
        files.append(str(save(params, tmp_path / f"{letter}.safetensors")))
    (tmp_path / "symmetry.json").write_text(symmetry.bind(params).to_json())
    told = "group 'h' was only rotated"
    for method in (rg.WeightMatching(), rg.alignment.MergeMany(), rg.FrankWolfe(), rg.Sinkhorn(loss="l2")):
        found = rg.align_many([load(file) for file in files], symmetry, method=method)
        assert len(found.notes) == 1
        assert told in found.report
    common = ["--symmetry", str(tmp_path / "symmetry.json"), "--json", "-o"]
    for command, count in (("align", 2), ("merge", 3)):
        out = tmp_path / f"{command}.safetensors"
        main([command, *files[:count], *common, str(out)])
        report = json.loads(capsys.readouterr().out)
        assert any(told in note for note in report["notes"])
        if command == "merge":
            assert any(told in note for note in report["record"]["notes"])
            assert told in out.with_suffix(".md").read_text()
    main(["merge", *files[1:], "--base", files[0], "--rule", "ties", *common, str(tmp_path / "ties.safetensors")])
    assert told in (tmp_path / "ties.md").read_text()
    found_alone = rg.align(files[0], files[2], symmetry, out=tmp_path / "alone.safetensors", memory="2GB")
    assert not found_alone.notes

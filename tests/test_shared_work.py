"""Several processes make the same output as one process, and killing one process loses nothing."""

import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from coverings import covering
from distributed_cases import load_alone, save_alone
from representative_cases import case, moved
from streamed_cases import pair_of, require_same
from translation_nets import stranger

import regauge as rg
import regauge.checkpoints.outputs.processes
import regauge.cli.align
import regauge.cli.merge  # before processes are forked, so that each need not do it
from regauge.alignment.streamed.match import align_streamed
from regauge.alignment.streamed.plan import can_be_blocked
from regauge.checkpoints.checkpoint import Checkpoint
from regauge.checkpoints.outputs.processes import join
from regauge.cli.main import main
from regauge.core.params import Params

RANKS = 4
WIDTH, LAYERS = 12, 4


def _params(seed: int) -> Params:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"first.weight": (WIDTH, 5), "last.weight": (3, WIDTH)}
    for k in range(LAYERS):
        shapes |= {
            f"{k}.up.weight": (2 * WIDTH, WIDTH),
            f"{k}.up.bias": (2 * WIDTH,),
            f"{k}.down.weight": (WIDTH, 2 * WIDTH),
        }
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def _symmetry() -> rg.Symmetry:
    """Return the symmetry of a residual stream and of hidden units in every layer."""
    axes: dict[str, tuple[str | None, ...]] = {"first.weight": ("stream", None), "last.weight": (None, "stream")}
    for k in range(LAYERS):
        axes |= {
            f"{k}.up.weight": (f"h{k}", "stream"),
            f"{k}.up.bias": (f"h{k}",),
            f"{k}.down.weight": ("stream", f"h{k}"),
        }
    kinds = {"stream": "permutation", **{f"h{k}": "scaled" for k in range(LAYERS)}}
    return rg.Symmetry.from_axes(axes, kinds=kinds).bind(_params(0))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with three networks in files of torch.distributed.checkpoint, a symmetry and a recipe."""
    return _fill(tmp_path)


@pytest.fixture(scope="module")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return such a folder for several tests, whose outputs have separate names."""
    return _fill(tmp_path_factory.mktemp("shared"))


def _fill(tmp_path: Path) -> Path:
    known = _symmetry()
    for k, name in enumerate("abc"):
        moved = known.act(known.random(torch.Generator().manual_seed(k)), _params(0))
        noise = _params(k + 1)
        save_alone({n: t + 0.1 * noise[n] for n, t in moved.items()}, tmp_path / name)
    (tmp_path / "symmetry.json").write_text(known.to_json())
    models = [f"{{model: {name}, parameters: {{weight: {1 + k}}}}}" for k, name in enumerate("abc")]
    (tmp_path / "recipe.yml").write_text(
        f"merge_method: linear\ndtype: float32\nregauge: {{align: false}}\nmodels: [{', '.join(models)}]\n"
    )
    return tmp_path


def _words(command: str, folder: Path, out: str, *more: str) -> list[str]:
    known = ["--symmetry", str(folder / "symmetry.json")]
    given = {
        "merge": [
            "merge",
            *(str(folder / name) for name in "abc"),
            "--rule",
            "dare",
            "--base",
            str(folder / "a"),
            *known,
        ],
        "align": ["align", str(folder / "a"), str(folder / "b"), *known],
        "recipe": ["merge", "--recipe", str(folder / "recipe.yml")],
    }
    return [*given[command], "-o", str(folder / out), "--shard-size", "2KB", *more]


def _fork(act: Callable[[int], object], size: int = RANKS) -> list[int]:
    """Call a function in several processes, as torchrun starts them, with the index of each process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                sys.stdout = open(os.devnull, "w")  # noqa: SIM115
                sys.stderr = _errors(rank).open("w", buffering=1)
                os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
                os.environ["MASTER_PORT"] = str(port)
                act(rank)
                code = 0
            except SystemExit as ended:
                code = ended.code if isinstance(ended.code, int) else 1
            except BaseException:
                traceback.print_exc(file=sys.stderr)
            finally:
                os._exit(code)
        children.append(child)
    return children


def _start(words: Sequence[str], before: Callable[[int], object] = int, size: int = RANKS) -> list[int]:
    """Run a command in several processes, each after a function of its index."""

    def act(rank: int) -> None:
        before(rank)
        main([*words, "--shared"])

    return _fork(act, size)


def _ends(children: Sequence[int]) -> list[int]:
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def _errors(rank: int) -> Path:
    return Path(os.environ["REGAUGE_CACHE"], f"rank{rank}")


def _told(rank: int) -> str:
    return _errors(rank).read_text()


def _files(folder: Path) -> dict[str, bytes]:
    """Return the files of an output. The provenance, which names the output's neighbors, is compared without these
    names.
    """
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name != "regauge.md"}


@pytest.mark.parametrize("command", ["recipe", "merge", "align"])
def test_processes_make_what_one_makes(command: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _ends(_start(_words(command, folder, "shared"))) == [0] * RANKS, [_told(k) for k in range(RANKS)]
    monkeypatch.setattr("regauge.checkpoints.job.FileJob.fits", False)
    main(_words(command, folder, "alone"))
    assert _files(folder / "shared") == _files(folder / "alone")
    assert len(list((folder / "shared").glob("*.distcp"))) > RANKS
    assert not (folder / "shared.partial").exists()
    loaded = load_alone(_params(0), folder / "shared")
    assert all(torch.equal(loaded[n], tensor) for n, tensor in rg.load(folder / "shared").items())


IN_CI = (("recipe", 0, RANKS), ("merge", 2, 2))
"""Cases with every command, every killed process, and every number of processes that continue."""


@pytest.mark.parametrize(
    ("command", "killed", "size"),
    [
        pytest.param(*case, marks=() if case in IN_CI else pytest.mark.thorough)
        for case in product(("recipe", "merge"), (0, 2), (RANKS, 2))
    ],
)
def test_a_kill_of_one_process_loses_nothing(command: str, killed: int, size: int, shared_folder: Path) -> None:
    """Every finished file is kept, for any killed process and any number of processes that continue."""

    def die(rank: int) -> None:
        """Kill a process when it begins to write its second file."""
        from regauge.checkpoints.outputs import staging

        write, count = staging.write_shard, 0

        def counted(*given: object) -> object:
            nonlocal count
            count += 1
            if count == 2 and rank == killed:
                time.sleep(0.5)
                os.kill(os.getpid(), signal.SIGKILL)
            return write(*given)  # type: ignore[arg-type]

        staging.write_shard = counted  # type: ignore[assignment]

    folder, out, whole = shared_folder, f"{command}-{killed}-{size}", f"{command}-whole"
    ends = _ends(_start(_words(command, folder, out), die))
    assert ends[killed] == -signal.SIGKILL
    assert all(end == 2 for rank, end in enumerate(ends) if rank != killed)
    assert "another process that writes this output ended" in _told(1)
    assert not (folder / out).exists()
    content = folder / f"{out}.partial/output"
    before = {path.name: path.stat().st_ino for path in content.iterdir() if path.suffix == ".distcp"}
    assert len(before) >= RANKS
    assert len(list(content.parent.glob("run*.json"))) == RANKS
    children = _start(_words(command, folder, out, "--resume"), size=size)
    assert _ends(children) == [0] * size, [_told(k) for k in range(size)]
    after = {path.name: path.stat().st_ino for path in (folder / out).iterdir()}
    assert all(after[name] == inode for name, inode in before.items())
    if not (folder / whole).exists():  # Nothing kills what makes it, and one for all is enough.
        assert _ends(_start(_words(command, folder, whole))) == [0] * RANKS
    assert _files(folder / out) == _files(folder / whole)


def test_a_refusal_of_one_process_is_told_by_all(folder: Path) -> None:
    params = _params(0)
    params["2.up.weight"][0, 0] = torch.inf
    save_alone(dict(params), folder / "d")
    words = [str(folder / "d") if word == str(folder / "b") else word for word in _words("align", folder, "out")]
    assert _ends(_start(words)) == [2] * RANKS
    assert all("'2.up.weight'" in _told(rank) for rank in range(RANKS))
    assert not (folder / "out.partial").exists()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"-o": "out.safetensors", "--shard-size": ""}, "is one file; name a folder"),
        ({"--symmetry": "missing.json"}, "there is no symmetry"),
    ],
)
def test_what_cannot_be_shared_is_refused_by_all(change: dict[str, str], sentence: str, folder: Path) -> None:
    words = _words("merge", folder, "out")
    for option, value in change.items():
        words[words.index(option) + 1] = str(folder / value) if value else "1GB"
    assert _ends(_start(words, size=2)) == [2, 2]
    assert all(sentence in _told(rank) for rank in range(2)), _told(0)


def test_one_process_alone_has_nobody_to_share_with(folder: Path, refused: Callable[..., str]) -> None:
    told = refused(*_words("merge", folder, "out"), "--shared")
    assert "work is shared by processes that torchrun or srun started, and this one was not" in told
    with pytest.raises(ValueError, match="canonicalizing cannot be shared by processes"):
        rg.canonicalize(folder / "a", _symmetry(), out=rg.Output(folder / "out", shared=True))


SHARED = ["mlp_relu", "mlp_tanh", "mlp_sine", "mlp_linear", "cnn_flatten", "llama", "gpt", "resnet20_batch_B"]
PAIRS = ["copy", "blocked stranger", "stranger", "blocked copy"]


@pytest.mark.parametrize(("name", "how"), covering(SHARED, PAIRS, of=4))
def test_sweeps_are_shared(name: str, how: str, tmp_path: Path) -> None:
    """Costs are summed over processes, and one process solves. The result equals a single process, and each process
    reads less.
    """
    noise, is_blocked = 0.02 if how.endswith("copy") else 1, how.startswith("blocked")
    pair, method = pair_of(name, tmp_path, noise), rg.WeightMatching(max_sweeps=8)
    plan = pair.smaller()
    if is_blocked:
        sets = [replace(one, is_blocked=can_be_blocked(pair.symmetry, one)) for one in plan.sets]
        plan = replace(plan, sets=tuple(sets))
    expected = align_streamed(*pair.files, plan, method)
    alone = sum(one.read_so_far.nbytes for one in pair.files)

    def act(rank: int) -> None:
        files = [Checkpoint.open(one.path) for one in pair.files]
        found = align_streamed(*files, plan, method, crew=join())
        read = sum(one.read_so_far.nbytes for one in files)
        torch.save((found.element, found.history, found.initial, read), tmp_path / f"{rank}.pt")

    assert _ends(_fork(act)) == [0] * RANKS, [_told(k) for k in range(RANKS)]
    found = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(RANKS)]
    for element, history, initial, _ in found:
        require_same(element, expected.element)
        assert history == pytest.approx(expected.history, rel=1e-9)
        assert initial == pytest.approx(expected.initial, rel=1e-9, abs=1e-9 * abs(history[-1]))
        assert history == found[0][1]
        for one, value in element.items():
            other = found[0][0][one]
            assert all(torch.equal(t, getattr(other, n)) for n, t in vars(value).items() if isinstance(t, torch.Tensor))
    if len(plan.sets) > 2:
        assert min(read for *_, read in found) < 0.7 * alone


@pytest.mark.parametrize(
    ("name", "other_network"),
    covering(["stream", "llama", "decoder", "batch norm"], ["stranger", "copy"], of=2),
)
def test_representatives_are_matched_together(
    name: str, other_network: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, known, params = case(name)
    other = moved(known, stranger(params, known, 1.0) if other_network == "stranger" else params)
    files = [
        rg.save({n: t.clone() for n, t in one.items()}, tmp_path / f"{k}.safetensors")
        for k, one in enumerate((params, other))
    ]
    monkeypatch.setattr("regauge.checkpoints.job.FileJob.fits", False)
    expected = rg.align(*files, known, out=tmp_path / "alone").params

    def act(rank: int) -> None:
        found = rg.align(*files, known, out=rg.Output(tmp_path / "out", shared=True)).params
        torch.save(dict(found), tmp_path / f"{rank}.pt")

    assert _ends(_fork(act)) == [0] * RANKS, [_told(k) for k in range(RANKS)]
    for rank in range(RANKS):
        found = torch.load(tmp_path / f"{rank}.pt")
        assert all(torch.allclose(found[n], t, rtol=1e-9, atol=1e-9) for n, t in expected.items())


@pytest.mark.slow
def test_torchrun_starts_them(folder: Path) -> None:
    code = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "regauge"]
    ended = subprocess.run(
        [*code, *_words("recipe", folder, "out"), "--shared"], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("# ") == ended.stdout.count("# ")
    main(_words("recipe", folder, "alone"))
    assert _files(folder / "out") == _files(folder / "alone")

"""Every known kind of broken file gives one sentence immediately, and no files are left behind."""

import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from coverings import covering

from regauge.checkpoints.checkpoint import load
from regauge.checkpoints.writing import save
from regauge.cli.main import main
from regauge.core.symmetry import Symmetry

INDEX = "model.safetensors.index.json"
SYMMETRY = Symmetry.from_axes({"up": ("h", None), "down": (None, "h")}, kinds={"h": "signed"})
PARAMS = {"up": torch.ones(4, 3), "down": torch.ones(2, 4)}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a working directory with two networks in files, one network in a folder, and their symmetry."""
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        save(PARAMS, tmp_path / f"{name}.safetensors")
    (tmp_path / "f").mkdir()
    save(PARAMS, tmp_path / "f" / "model.safetensors")
    (tmp_path / "s.json").write_text(SYMMETRY.bind(PARAMS).to_json())
    return tmp_path


ALIGN = ["align", "a.safetensors", "b.safetensors", "--symmetry", "s.json", "-o", "out.safetensors"]


def _header(header: object, values: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + values


def _tensor(**changes: object) -> dict[str, object]:
    return {"up": {"dtype": "F32", "shape": [4, 3], "data_offsets": [0, 48], **changes}}


FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "its header is cut off"),
    "short": (b"\x08\0\0", "its header is cut off"),
    "endless": (b"\xff" * 8, "its header is cut off"),
    "no JSON": (_header(b"{{{{"), "its header is malformed"),
    "no text": (_header(b"\xff\xfe\x00\x01"), "its header is malformed"),
    "list": (_header([1]), "its header is malformed"),
    "number": (_header(b"17"), "its header is malformed"),
    "nested": (_header(b'{"a":' * 100_000 + b"1" + b"}" * 100_000), "nested too deeply"),
    "entry": (_header({"up": 3}), "its header is malformed"),
    "no shape": (_header({"up": {"dtype": "F32", "data_offsets": [0, 48]}}, bytes(48)), "its header is malformed"),
    "negative": (_header(_tensor(shape=[-4, -3]), bytes(48)), "has shape [-4, -3], but lengths must be whole numbers"),
    "fraction": (
        _header(_tensor(shape=[4.0, 3.0]), bytes(48)),
        "has shape [4.0, 3.0], but lengths must be whole numbers",
    ),
    "truth": (_header(_tensor(shape=[True, 12]), bytes(48)), "has shape [True, 12], but lengths must be whole numbers"),
    "text": (_header(_tensor(shape="43"), bytes(48)), "but lengths must be whole numbers"),
    "overflow": (_header(_tensor(shape=[0, 1 << 64], data_offsets=[0, 0])), "but lengths must be whole numbers"),
    "dtype": (_header(_tensor(dtype="F33"), bytes(48)), "has dtype F33"),
    "dtypes": (_header(_tensor(dtype=["F32"]), bytes(48)), "its header is malformed"),
    "4 bits": (_header(_tensor(dtype="F4"), bytes(48)), "so the network is quantized"),
    "offsets": (_header(_tensor(data_offsets=[8, 56]), bytes(56)), "the place of 'up' does not fit its shape"),
    "order": (_header(_tensor(data_offsets=[48, 0]), bytes(48)), "the place of 'up' does not fit its shape"),
    "more": (_header(_tensor(), bytes(50)), "bytes instead of"),
    "less": (_header(_tensor(), bytes(40)), "bytes instead of"),
    "metadata": (_header({"__metadata__": {"a": 3}, **_tensor()}, bytes(48)), "its metadata are not all strings"),
    "no metadata": (_header({"__metadata__": [], **_tensor()}, bytes(48)), "its header is malformed"),
    "zip": (b"PK\x03\x04" + bytes(60), "is not a readable safetensors file"),
    "page": (b"<!DOCTYPE html><html>not found</html>", "is not a readable safetensors file"),
    "pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n", "Git LFS"),
}


@pytest.mark.parametrize("kind", FILES)
def test_safetensors_files(kind: str, folder: Path, refused: Callable[..., str]) -> None:
    content, sentence = FILES[kind]
    (folder / "b.safetensors").write_bytes(content)
    assert sentence in refused(*ALIGN)
    (folder / "f" / "model.safetensors").write_bytes(content)
    assert sentence in refused("align", "f", "f", "--symmetry", "s.json", "-o", "out")


class _Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (exec, ("raise SystemExit('code ran')",))


TORCH: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is not a readable torch file"),
    "pickle": (pickle.dumps({"up": [1, 2]}), "is not a readable torch file"),
    "evil": (pickle.dumps(_Evil()), "is not a readable torch file"),
    "old pickle": (pickle.dumps(_Evil(), protocol=0), "could run any code"),
    "zip": (b"PK\x03\x04" + bytes(60), "is not a readable torch file"),
    "text": (b"hello world", "is not a readable torch file"),
    "pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n", "Git LFS"),
}


@pytest.mark.parametrize("kind", TORCH)
def test_torch_files(kind: str, folder: Path, refused: Callable[..., str]) -> None:
    content, sentence = TORCH[kind]
    (folder / "b.pt").write_bytes(content)
    assert sentence in refused(*("b.pt" if one == "b.safetensors" else one for one in ALIGN))


INDICES: dict[str, tuple[object, str]] = {
    "parent": ({"weight_map": {"up": ".."}}, "names shards outside of its folder ('..')"),
    "nothing": ({"weight_map": {"up": ""}}, "names shards outside of its folder ('')"),
    "itself": ({"weight_map": {"up": "."}}, "names shards outside of its folder ('.')"),
    "NUL": ({"weight_map": {"up": "a\0.safetensors"}}, "names shards outside of its folder"),
    "number": ({"weight_map": {"up": 3}}, "names shards outside of its folder (3)"),
    "lists": ({"weight_map": {"up": ["model.safetensors"]}}, "lacks a 'weight_map'"),
    "index": ({"weight_map": {"up": INDEX}}, "names shards outside of its folder"),
    "folder": ({"weight_map": {"up": "sub.safetensors"}}, "names shards that do not exist"),
    "empty": ({"weight_map": {}}, "names no tensors"),
    "null": ({"weight_map": None}, "lacks a 'weight_map'"),
    "list": ([], "lacks a 'weight_map'"),
    "nested": (b"[" * 200_000, "is not the index of a sharded checkpoint: it is nested too deeply; fetch it again"),
    "cut": (b'{"weight_map": {"up": "sub', "is not the index of a sharded checkpoint: it is not JSON: Unterminated"),
    "bytes": (b"\xff\xfe\x00", "it is no text in UTF-8: invalid start byte at byte 0; fetch it again"),
    "digits": (b'{"weight_map": ' + b"9" * 10_000 + b"}", "is not the index of a sharded checkpoint: "),
}


@pytest.mark.parametrize("kind", INDICES)
def test_indices(kind: str, folder: Path, refused: Callable[..., str]) -> None:
    content, sentence = INDICES[kind]
    (folder / "f" / "sub.safetensors").mkdir()
    (folder / "f" / INDEX).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    assert sentence in refused("align", "f", "f", "--symmetry", "s.json", "-o", "out")


SYMMETRIES: dict[str, bytes] = {
    "pickle": pickle.dumps({"a": 1}),
    "empty": b"",
    "list": b"[]",
    "nested": b"[" * 200_000,
    "number": b"NaN",
    "other": b'{"format": "other"}',
    "newer": b'{"format": "regauge.symmetry", "version": 99}',
    "no groups": b'{"format": "regauge.symmetry", "version": 1}',
    "no list": b'{"format": "regauge.symmetry", "version": 1, "groups": 3}',
    "no group": b'{"format": "regauge.symmetry", "version": 1, "groups": [3], "shapes": {}}',
    "no shapes": b'{"format": "regauge.symmetry", "version": 1, "groups": [], "shapes": 3}',
    "wrong shapes": b'{"format": "regauge.symmetry", "version": 1, "groups": [], "shapes": {"up": "x"}}',
}


@pytest.mark.parametrize("kind", SYMMETRIES)
def test_symmetries(kind: str, folder: Path, refused: Callable[..., str]) -> None:
    (folder / "s.json").write_bytes(SYMMETRIES[kind])
    for command in (ALIGN, ["merge", *ALIGN[1:]], ["canonicalize", ALIGN[1], *ALIGN[3:]]):
        assert "'s.json' is no symmetry" in refused(*command)


def _changed(change: Callable[[dict[str, object]], object]) -> bytes:
    document = json.loads(SYMMETRY.bind(PARAMS).to_json())
    change(document)
    return json.dumps(document).encode()


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d["groups"][0].update(size=-4),
        lambda d: d["groups"][0].update(size="four"),
        lambda d: d["groups"][0].update(size=4.5),
        lambda d: d["groups"][0].update(name=None),
        lambda d: d["groups"][0].update(within=["nobody"]),
        lambda d: d["groups"][0].update(placements=None),
        lambda d: d["groups"][0]["placements"][0].update(axis=-1),
        lambda d: d["groups"][0]["placements"][0].update(axis=7),
        lambda d: d["groups"][0]["placements"][0].update(axis="0"),
        lambda d: d["groups"][0]["placements"][0].update(stride=0),
        lambda d: d["groups"][0]["placements"][0].update(start=-1),
        lambda d: d["groups"][0]["placements"][0].update(sign=["x"]),
        lambda d: d["groups"][0]["placements"][0].update(parameter="nobody"),
        lambda d: d["groups"][0]["placements"][0].update(repeats=3),
        lambda d: d["groups"].append(d["groups"][0]),
        lambda d: d["groups"].append({**d["groups"][0], "name": "again"}),
        lambda d: d.update(shapes={"up": [4, -3], "down": [2, 4]}),
        lambda d: d.update(shapes={}),
        lambda d: d.update(tied=3),
        lambda d: d.update(buffers=4),
        lambda d: d.update(ones=[3]),
        lambda d: d.update(frozen=[[1]]),
        lambda d: d.update(notes=3),
    ],
)
def test_changed_symmetries(
    change: Callable[[dict[str, object]], object], folder: Path, refused: Callable[..., str]
) -> None:
    (folder / "s.json").write_bytes(_changed(change))
    refused(*ALIGN)


@pytest.fixture(params=["pipe", "socket", "device"])
def special(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], None]:
    """Put something that is not a regular file in the place of a file."""

    def put(name: str) -> None:
        (tmp_path / name).unlink(missing_ok=True)
        if request.param == "pipe":
            os.mkfifo(tmp_path / name)
        elif request.param == "socket":
            socket.socket(socket.AF_UNIX).bind(name)  # names of sockets are short: relative to the working directory
        else:
            (tmp_path / name).symlink_to("/dev/zero")

    return put


@pytest.mark.filterwarnings("ignore:unclosed <socket")
@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("b.safetensors", ALIGN),
        ("s.json", ALIGN),
        ("b.pt", ["align", "a.safetensors", "b.pt", *ALIGN[3:]]),
        ("f/model.safetensors", ["align", "f", "f", "--symmetry", "s.json", "-o", "out"]),
        (f"f/{INDEX}", ["align", "f", "f", "--symmetry", "s.json", "-o", "out"]),
        ("f/config.json", ["align", "f", "f", "-o", "out"]),
        ("x.alignment.safetensors", ["apply", "x.alignment.safetensors", "b.safetensors", "-o", "out.safetensors"]),
        ("x.alignment.safetensors", ["apply", "x.safetensors", "b.safetensors", "-o", "out.safetensors"]),
        ("d.npz", [*ALIGN, "--model", "none.py:none", "--data", "d.npz"]),
        ("d.npz", ["line", "a.safetensors", "b.safetensors", "--model", "none.py:none", "--data", "d.npz"]),
        ("out.safetensors", [*ALIGN, "--overwrite"]),
        ("none.py", ["discover", "none.py:none"]),
        ("z.zip", ["zoo", "import", "z.zip", "-o", "store"]),
        ("store", ["zoo", "info", "store"]),
    ],
)
def test_what_is_no_file(
    name: str, command: list[str], special: Callable[[str], None], folder: Path, refused: Callable[..., str]
) -> None:
    special(name)
    before = time.monotonic()
    refused(*command)
    assert time.monotonic() - before < 60


def test_names_that_are_not_in_unicode(folder: Path, refused: Callable[..., str]) -> None:
    name = os.fsdecode(b"caf\xe9.safetensors")
    save(PARAMS, folder / name)
    assert "is not UTF-8" in refused("align", "a.safetensors", name, *ALIGN[3:])
    assert "is not UTF-8" in refused(*ALIGN[:-1], os.fsdecode(b"out\xe9.safetensors"))
    with pytest.raises(ValueError, match=r"is not UTF-8, so it cannot be printed or recorded; rename it"):
        load(folder / name)


CONFIGS: dict[str, object] = {
    "negative": {"model_type": "llama", "hidden_size": -4, "architectures": ["LlamaForCausalLM"]},
    "text": {"model_type": "llama", "hidden_size": "four"},
    "nothing": {"model_type": "gpt2", "n_embd": None},
    "zero heads": {"model_type": "gpt2", "n_head": 0},
    "uneven": {"model_type": "gpt2", "n_embd": 10, "n_head": 3, "n_layer": 1},
    "activation": {"model_type": "gpt2", "activation_function": "none", "n_layer": 1, "n_embd": 8, "n_head": 2},
    "list": [],
    "bytes": b"\xff\xfe",
    "nested": b"[" * 200_000,
    "empty": b"",
    "no type": {},
    "strange type": {"model_type": ["llama"]},
    "no class": {"model_type": "gpt2", "architectures": ["pipeline"], "n_layer": 1, "n_embd": 8, "n_head": 2},
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_configurations(kind: str, folder: Path, refused: Callable[..., str]) -> None:
    pytest.importorskip("transformers")
    content = CONFIGS[kind]
    (folder / "f" / "config.json").write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    refused("align", "f", "f", "-o", "out")
    refused("discover", "f")


MODEL = """
import sys
import torch
from torch import nn


def model():
    return nn.Sequential(nn.Linear(3, 4, bias=False), nn.Tanh(), nn.Linear(4, 2, bias=False)), torch.ones(2, 3)


def ends():
    sys.exit(3)


def recurses():
    return recurses()


def narrow():
    return [(torch.ones(5, 7), torch.zeros(5).long())]


def late():
    return [(torch.ones(5, 3), torch.zeros(5).long()), (torch.ones(5, 3), torch.full((5,), -1))]


def halves():
    return [(torch.ones(5, 3), torch.full((5,), 0.5))]


def nothing():
    return [(torch.ones(0, 3), torch.zeros(0).long())]


def infinite():
    return [(torch.full((5, 3), torch.inf), torch.zeros(5).long())]
"""


DATA = {
    "net.py:narrow": "the model fails on the data: RuntimeError",
    "net.py:late": "a target is class -1, but the model has 2 outputs",
    "net.py:halves": "the targets are not numbers of classes",
    "net.py:nothing": "has a batch without examples",
    "net.py:infinite": "has examples with NaN or Inf",
    "net.py:ends": "it ended the program with 3",
    "net.py:recurses": "RecursionError",
    "cut.npz": "cannot be read as arrays",
    "text.npz": "cannot be read as arrays",
    "scalar.npz": "are single numbers",
    "large.npz": "a target is class 9, but the model has 2 outputs",
    "objects.npz": "cannot be read as arrays",
}


@pytest.mark.parametrize(("data", "command"), covering(DATA, ["align", "merge", "line", "repair", "plane"], of=5))
def test_data(data: str, command: str, folder: Path, refused: Callable[..., str]) -> None:
    (folder / "net.py").write_text(MODEL)
    generator = torch.Generator().manual_seed(0)
    for name in "abc":
        weights = {
            "0.weight": torch.randn(4, 3, generator=generator),
            "2.weight": torch.randn(2, 4, generator=generator),
        }
        save(weights, folder / f"{name}.safetensors", overwrite=True)
    arrays = {"inputs": np.ones((5, 3), np.float32), "targets": np.full(5, 9, np.uint64)}
    np.savez(folder / "large.npz", **arrays)
    (folder / "cut.npz").write_bytes((folder / "large.npz").read_bytes()[:200])
    (folder / "text.npz").write_text("hello")
    np.savez(folder / "scalar.npz", inputs=np.float32(3), targets=np.float32(3))
    np.savez(folder / "objects.npz", inputs=np.array([{}], dtype=object), targets=np.zeros(1))
    networks = {"repair": ["c.safetensors", "--endpoints"], "plane": ["c.safetensors"]}.get(command, [])
    out = {"line": [], "plane": ["-o", "out.svg"]}.get(command, ["-o", "out.safetensors"])
    pair = ["a.safetensors", "b.safetensors"]
    assert DATA[data] in refused(command, *networks, *pair, "--model", "net.py:model", "--data", data, *out)


@pytest.mark.parametrize(
    ("out", "sentence"),
    [
        ("x.alignment.safetensors", "is the name of an alignment"),
        (".", "is not the name of a new file or folder"),
        ("..", "is not the name of a new file or folder"),
        ("a.safetensors/x", "does not exist; create it first"),
        ("folder.safetensors", "is a folder, but a file is written"),
        ("~/x.safetensors", "'~/x.safetensors' begins with ~, which stands for your home folder only in a shell"),
    ],
)
@pytest.mark.parametrize("command", ["align", "merge", "canonicalize"])
def test_names_of_no_output(command: str, out: str, sentence: str, folder: Path, refused: Callable[..., str]) -> None:
    (folder / "folder.safetensors").mkdir()
    checkpoints = ["a.safetensors", "b.safetensors"][: 1 if command == "canonicalize" else 2]
    assert sentence in refused(command, *checkpoints, "--symmetry", "s.json", "-o", out, "--overwrite")


@pytest.mark.parametrize("stream", ["full", "closed"])
def test_a_standard_output_that_takes_nothing(stream: str, folder: Path) -> None:
    if stream == "full" and not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    child = os.fork()  # which has imported everything already
    if child == 0:
        code = 1
        try:
            os.dup2(os.open("stderr.txt", os.O_WRONLY | os.O_CREAT), 2)
            os.close(1)
            sys.stdout, sys.stderr = None, open(2, "w", closefd=False)  # type: ignore[assignment]  # noqa: SIM115
            if stream == "full":
                os.open("/dev/full", os.O_WRONLY)
                sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
            main(ALIGN)
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
        finally:
            sys.stderr.flush()
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (2 if stream == "full" else 0)
    told = (folder / "stderr.txt").read_text()
    assert ("the standard output, or a file, cannot be used" in told) == (stream == "full")
    assert Path("out.safetensors").exists()


def test_a_refused_import_leaves_no_store(folder: Path, refused: Callable[..., str]) -> None:
    (folder / "zoo").mkdir()
    torch.save(PARAMS, folder / "zoo" / "1.pt")
    (folder / "zoo" / "2.pt").write_text("no network")
    assert "is not a readable torch file" in refused("zoo", "import", "zoo", "-o", "store")


def test_a_bug_is_told_as_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*args: object) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr("regauge.cli.align.method_of", broken)
    with pytest.raises(ZeroDivisionError):
        main(ALIGN)
    monkeypatch.delenv("REGAUGE_DEBUG")
    with pytest.raises(SystemExit) as stop:
        main(ALIGN)
    assert stop.value.code == 1
    told = capsys.readouterr().err.strip()
    assert told.startswith("regauge: this is a bug, please report it with the command (ZeroDivisionError in ")
    assert "\n" not in told


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to")]
)
def test_too_little_memory_is_told(
    error: Exception, folder: Path, monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str]
) -> None:
    def broken(*args: object) -> None:
        raise error

    monkeypatch.setattr("regauge.cli.align.method_of", broken)
    assert "there is not enough memory" in refused(*ALIGN)


@pytest.mark.parametrize("seconds", [0.05, 0.2, 0.4, 0.8, 1.6])
def test_an_interrupt_has_no_traceback(seconds: float, folder: Path) -> None:
    """The test also interrupts while modules are imported and options are parsed. Python's own startup is excluded."""
    code = "import regauge.__main__ as program; print('begun', flush=True); program.main()"
    environment = {name: value for name, value in os.environ.items() if name != "REGAUGE_DEBUG"}
    child = subprocess.Popen(
        [sys.executable, "-c", code, *ALIGN], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    )
    assert child.stdout is not None
    child.stdout.readline()
    time.sleep(seconds)
    child.send_signal(signal.SIGINT)
    _, told = child.communicate(timeout=60)
    assert b"Traceback" not in told
    assert child.returncode in (-signal.SIGINT, 130, 0), told


def test_an_interrupt_that_python_would_ignore_ends_the_command() -> None:
    """The interrupt may come while an object is deleted, or in an import callback, where Python prints exceptions and
    continues.
    """
    code = """if True:
        import regauge.__main__ as program
        from regauge.cli import main as commands

        class Interrupted:
            def __del__(self):
                raise KeyboardInterrupt

        def run():
            Interrupted()
            print("went on")

        commands.main = run
        program.main()
    """
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, timeout=60)
    assert (child.returncode, child.stdout, child.stderr) == (-signal.SIGINT, b"", b"")

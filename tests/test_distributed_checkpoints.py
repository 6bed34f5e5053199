"""Folders of torch.distributed.checkpoint are read and written as by torch, and no code in their pickles runs."""

import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from damage import EXAMPLES, LIMITED, damage_bytes
from distributed_cases import RANKS, load_alone, net, save_alone, save_in_four, symmetry

import regauge as rg
from regauge.checkpoints.formats.plain_pickles import MEMBER, read_pickle
from regauge.checkpoints.formats.shards import require_whole
from regauge.cli.main import main
from regauge.core.params import Params

FOLDERS = {"alone": None, "fully": "model", "mesh": None, "shards": None, "trained": None}
"""Folders by name, and the dictionary that contains the network."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("distributed")
    save_in_four(folder)
    save_alone(net().state_dict(), folder / "alone")
    return folder


@pytest.fixture
def copies(folders: Path, tmp_path: Path) -> Path:
    """Return copies of the folders that a test may change."""
    return Path(shutil.copytree(folders, tmp_path / "copies"))


def _equal(left: Params, right: Params) -> bool:
    return left.keys() == right.keys() and all(
        t.dtype == right[n].dtype and torch.equal(t, right[n]) for n, t in left.items()
    )


@pytest.mark.parametrize("name", FOLDERS)
def test_every_tensor_is_the_one_that_torch_loads(name: str, folders: Path) -> None:
    expected = net().state_dict()
    assert _equal(load_alone(expected, folders / name, FOLDERS[name]), expected)
    with rg.Checkpoint.open(folders / name) as checkpoint:
        assert checkpoint.is_lazy
        assert _equal({n: checkpoint[n] for n in expected}, expected)
        for n, tensor in expected.items():
            for rows in [(0, 1), (1, 3), (2, 3), (0, len(tensor))] if tensor.ndim else []:
                assert torch.equal(checkpoint.read(n, rows=rows), tensor[rows[0] : rows[1]])
            assert torch.equal(checkpoint.read(n, dtype=torch.float64), tensor.double())
        assert _equal(checkpoint.params, expected)
    assert _equal(rg.load(folders / name), expected)


def test_tensors_may_lie_in_any_order_of_their_axes(tmp_path: Path) -> None:
    state: Params = {
        "w": torch.randn(4, 3).T,
        "v": torch.randn(2, 3, 4).permute(2, 0, 1),
        "c": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "empty": torch.zeros(0, 4),
        "small": torch.randn(5).to(torch.float8_e4m3fn),
        "unsigned": torch.tensor(3, dtype=torch.uint16),
    }
    checkpoint = rg.Checkpoint.open(save_alone(dict(state), tmp_path / "a"))
    for name, tensor in state.items():
        assert torch.equal(checkpoint[name].float(), tensor.float()), name
    assert torch.equal(checkpoint.read("c", rows=(1, 2)), state["c"][1:2])
    assert torch.equal(checkpoint.read("v", rows=(1, 3)), state["v"][1:3])


def test_one_of_several_networks_is_chosen_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    params = net().state_dict()
    averaged = {name: tensor + 1 for name, tensor in params.items()}
    folder = save_alone({"model": params, "ema": averaged, "optim": {"m.w": torch.ones(3)}}, tmp_path / "a")
    assert _equal(rg.load(folder), params)
    assert "'model' is read, but not 'ema'" in caplog.text
    assert _equal(rg.load(f"{folder}:ema"), averaged)
    assert _equal(rg.load(folder, entry="ema"), averaged)
    with pytest.raises(ValueError, match="has no network called 'mea'; the networks in it are 'model', 'ema'"):
        rg.load(f"{folder}:mea")


def test_a_network_in_pieces_is_not_read_by_half(tmp_path: Path) -> None:
    folder = save_alone({"w": torch.ones(3), "head": {"v": torch.ones(3)}}, tmp_path / "a")
    with pytest.raises(ValueError, match="'head' is a dictionary with tensors next to those of a network"):
        rg.load(folder)


@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.parametrize("form", [{}, {"dtype": "float64"}, {"shard_size": 100}], ids=str)
def test_a_merge_of_folders_is_a_folder_that_torch_loads(
    name: str, form: dict[str, Any], folders: Path, tmp_path: Path
) -> None:
    """The transformed network is equivalent, so the mean is this network. The output has the names of its source."""
    params, known = net().state_dict(), symmetry()
    moved = known.act(known.random(torch.Generator().manual_seed(1)), params)
    save_alone({"model": moved}, tmp_path / "moved")
    out = tmp_path / "out"
    for overwrite in (False, True):
        rg.merge([folders / name, tmp_path / "moved"], known, out=rg.Output(out, overwrite=overwrite, **form))
    names = {path.name for path in out.iterdir()} - {"regauge.json", "regauge.md"}
    if name == "shards":
        assert all(name.startswith("model-") for name in names - {"model.safetensors.index.json"})
    else:
        count = len(names) - 1
        assert names == {".metadata", *(f"__{k}_0.distcp" for k in range(count))}
        expected = (
            [5] if "shard_size" in form else [1] if name == "alone" else [RANKS, RANKS + 1]
        )  # one may not be full
        assert count in expected
    is_wide = "dtype" in form
    like = {n: tensor.double() if is_wide and tensor.is_floating_point() else tensor for n, tensor in params.items()}
    written = load_alone(like, out, FOLDERS[name])
    assert all(torch.allclose(written[n].double(), tensor.double(), atol=1e-6) for n, tensor in params.items())
    assert _equal(rg.load(out), written)


def test_equal_runs_write_equal_bytes(folders: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        rg.merge([folders / "mesh", folders / "fully"], symmetry(), out=tmp_path / name)
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()


def test_values_of_many_kinds_are_written_as_torch_files(tmp_path: Path) -> None:
    state: Params = {
        "a": torch.randn(3, 4), "b": torch.randn(5).to(torch.float8_e5m2), "c": torch.tensor(3, dtype=torch.uint16),
        "d": torch.zeros(0, 4), "e": torch.tensor(True), "f": torch.randn(3, dtype=torch.complex64),
        "g": torch.randn(2, 2).half(), "h": torch.arange(3, dtype=torch.int8),
    }  # fmt: skip
    save_alone(dict(state), tmp_path / "a")
    rg.canonicalize(
        tmp_path / "a", rg.Symmetry.from_axes({"a": ("h", None)}, kinds={"h": "permutation"}), out=tmp_path / "b"
    )
    loaded = load_alone(state, tmp_path / "b")
    assert all(torch.equal(loaded[n].float(), t.float()) for n, t in state.items() if n not in "af")
    assert torch.equal(loaded["f"], state["f"])


def test_commands_take_such_folders(folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "symmetry.json").write_text(symmetry().bind(net().state_dict()).to_json())
    known = ["--symmetry", str(tmp_path / "symmetry.json")]
    pair = [str(folders / "shards"), str(folders / "fully")]
    main(["compare", *pair, *known])
    assert "identical" in capsys.readouterr().out
    main(["align", *pair, *known, "-o", str(tmp_path / "aligned")])
    assert _equal(load_alone(net().state_dict(), tmp_path / "aligned", "model"), net().state_dict())
    main(["merge", *pair, f"{folders}/fully:model", *known, "-o", str(tmp_path / "merged.safetensors")])
    assert rg.load(tmp_path / "merged.safetensors").keys() == net().state_dict().keys()
    main(["apply", str(tmp_path / "aligned/regauge.alignment.safetensors"), pair[1], "-o", str(tmp_path / "applied")])
    assert _equal(rg.load(tmp_path / "applied"), net().state_dict())


@pytest.mark.parametrize(
    ("name", "path", "error", "sentence"),
    [
        ("mesh", "__2_0.distcp", FileNotFoundError, r"names files that are not there: '__2_0.distcp' \(1 of 4\)"),
        ("shards", "shard-00001-model-00001-of-00002.safetensors", ValueError, "some values of '0.weight' are in no"),
        ("shards", "shard-00003-model-00002-of-00002.safetensors", ValueError, "one of them is missing"),
        ("mesh", ".metadata", FileNotFoundError, "holds no checkpoint"),
    ],
)
def test_what_is_missing_is_named(name: str, path: str, error: type[Exception], sentence: str, copies: Path) -> None:
    (copies / name / path).unlink()
    with pytest.raises(error, match=sentence):
        rg.load(copies / name)


def test_a_file_that_is_cut_is_named(copies: Path) -> None:
    path = copies / "mesh/__3_0.distcp"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"__3_0.distcp' does not hold the chunk of .* \(the file ends at byte"):
        rg.load(copies / "mesh")
    with pytest.raises(ValueError, match="is a part of a distributed checkpoint; name its folder"):
        rg.load(path)


@pytest.mark.parametrize(
    ("shape", "chunks", "sentence"),
    [
        ((4,), [((0,), (2,)), ((2,), (2,))], None),
        ((4, 2), [((0, 0), (2, 2)), ((2, 0), (2, 1)), ((2, 1), (2, 1))], None),
        ((0, 2), [((0, 0), (0, 2))], None),
        ((), [((), ())], None),
        ((4,), [((0,), (2,)), ((3,), (1,))], "in no chunk"),
        ((4,), [((0,), (3,)), ((2,), (2,))], "twice"),
        ((4,), [((0,), (5,))], "exceeds its shape"),
        ((4, 1), [((0,), (4,))], "another number of axes"),
        ((), [], "in no chunk"),
    ],
)
def test_chunks_fill_a_tensor_exactly(shape: Any, chunks: Any, sentence: str | None) -> None:
    if sentence is None:
        require_whole("w", shape, chunks)
    else:
        with pytest.raises(ValueError, match=sentence):
            require_whole("w", shape, chunks)


class _Hostile:
    """An object whose pickle runs a command."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self._mark}",)


def _in_place_of_metadata(folder: Path, content: bytes) -> None:
    (folder / ".metadata").write_bytes(content)


def _in_planner_data(folder: Path, content: bytes) -> None:
    found = pickle.loads((folder / ".metadata").read_bytes())
    found.planner_data = pickle.loads
    (folder / ".metadata").write_bytes(pickle.dumps(found))


def _in_a_chunk(folder: Path, content: bytes) -> None:
    """Return the first chunk of a file with another pickle and the original length."""
    stored = pickle.loads((folder / ".metadata").read_bytes()).storage_data
    info = next(one for one in stored.values() if one.relative_path == "__0_0.distcp" and one.offset == 0)
    whole = (folder / "__0_0.distcp").read_bytes()
    (folder / "one").write_bytes(whole[: info.length])
    with zipfile.ZipFile(folder / "one") as old, zipfile.ZipFile(folder / "two", "w") as new:
        for name in old.namelist():
            new.writestr(name, content if name.endswith("data.pkl") else old.read(name))
    other = (folder / "two").read_bytes()
    found = pickle.loads((folder / ".metadata").read_bytes())
    for one in found.storage_data.values():
        if one.relative_path == "__0_0.distcp":
            one.offset, one.length = (0, len(other)) if one.offset == 0 else (len(other) + one.offset, one.length)
    (folder / "__0_0.distcp").write_bytes(other + whole)
    (folder / ".metadata").write_bytes(pickle.dumps(found))


@pytest.mark.parametrize("put", [_in_place_of_metadata, _in_planner_data, _in_a_chunk])
@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_nothing_in_a_hostile_folder_runs(
    put: Callable[[Path, bytes], None], protocol: int, copies: Path, tmp_path: Path
) -> None:
    mark, folder = tmp_path / "mark", copies / "mesh"
    content = pickle.dumps(_Hostile(mark), protocol=protocol)
    put(folder, content)
    with pytest.raises(ValueError, match=r"is not run|instruction|does not hold the chunk") as refused:
        rg.load(folder)
    assert not mark.exists()
    assert str(folder) in str(refused.value)
    pickle.loads(content)
    assert mark.exists()  # the pickle does run where Python reads it


@LIMITED
@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize("path", ["mesh/.metadata", "mesh/__1_0.distcp"])
def test_a_file_with_other_bytes_is_read_or_refused(path: str, examples: int, copies: Path) -> None:
    refused = damage_bytes(lambda file: rg.load(file.parent), copies / path, examples)
    assert all(str(copies / "mesh") in told for told in refused)


def test_a_pickle_that_doubles_itself_takes_no_time(copies: Path) -> None:
    found = pickle.loads((copies / "mesh/.metadata").read_bytes())
    nested: Any = (1, 1)
    for _ in range(200):
        nested = (nested, nested)
    found.planner_data = dict.fromkeys(found.state_dict_metadata, nested)
    (copies / "mesh/.metadata").write_bytes(pickle.dumps(found))
    with pytest.raises(ValueError, match="an entry without a name"):
        rg.load(copies / "mesh")


class ByName:
    """A member of an enumeration, pickled as in some versions of Python."""

    def __init__(self, *path: object) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, self.path


def test_members_of_enumerations_may_be_named_and_nothing_else_is_looked_up() -> None:
    names = [MEMBER, "torch.Size"]
    found = read_pickle(pickle.dumps(ByName(torch.Size, "numel")), names)
    assert (found.path, found.args) == ("torch.Size.numel", ())
    for path in (("text", "upper"), (torch.Size, 1), (torch.Size,)):
        with pytest.raises(ValueError, match="damaged"):
            read_pickle(pickle.dumps(ByName(*path)), names)
    with pytest.raises(ValueError, match=r"builtins.getattr"):
        read_pickle(pickle.dumps(ByName(torch.Size, "numel")), ["torch.Size"])

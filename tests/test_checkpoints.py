"""Checkpoints: reading returns exactly the written bits, and every way in which a file can be wrong has an error
message.
"""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from regauge.checkpoints.alignments import Alignment, alignment_path, load_alignment
from regauge.checkpoints.checkpoint import load
from regauge.checkpoints.formats.state_dicts import match
from regauge.checkpoints.writing import save
from regauge.core.params import Params
from regauge.core.symmetry import Symmetry

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


def _params() -> Params:
    generator = torch.Generator().manual_seed(0)
    params = {str(dtype): (torch.randn(3, 5, generator=generator) * 3).to(dtype) for dtype in DTYPES}
    return params | {"scalar": torch.tensor(7), "empty": torch.zeros(0, 4), "nan": torch.tensor([float("nan"), 1.0])}


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def _require_equal(left: Params, right: Params) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        other = right[name]
        assert tensor.dtype == other.dtype
        assert tensor.shape == other.shape
        assert torch.equal(_bytes(tensor), _bytes(other))


def test_safetensors_round_trip_has_the_same_bits(tmp_path: Path) -> None:
    params = _params()
    assert save(params, tmp_path / "a.safetensors") == tmp_path / "a.safetensors"
    _require_equal(load(tmp_path / "a.safetensors"), params)
    assert [file.name for file in tmp_path.iterdir()] == ["a.safetensors"]


def test_the_umask_says_who_can_read(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    path = save({"a": torch.zeros(2)}, tmp_path / "a.safetensors")
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_tied_and_strided_tensors_are_written_in_full(tmp_path: Path) -> None:
    weight = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    params = {"a": weight, "tied": weight, "turned": weight.T, "part": weight[1:3], "column": weight[:, 2]}
    save(params, tmp_path / "a.safetensors")
    _require_equal(load(tmp_path / "a.safetensors"), params)


def test_channels_last_is_kept_as_values(tmp_path: Path) -> None:
    weight = torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)
    save({"a": weight}, tmp_path / "a.safetensors")
    assert torch.equal(load(tmp_path / "a.safetensors")["a"], weight)


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin"])
@pytest.mark.parametrize("wrapper", [None, "state_dict", "model"])
def test_torch_files(tmp_path: Path, suffix: str, wrapper: str | None) -> None:
    params = _params()
    path = tmp_path / f"a{suffix}"
    torch.save(params if wrapper is None else {wrapper: params, "epoch": 3}, path)
    _require_equal(load(path), params)


def _write_shards(folder: Path) -> Params:
    params = {"a": torch.arange(3.0), "b": torch.ones(2), "c": torch.zeros(1)}
    save({"a": params["a"], "b": params["b"]}, folder / "model-00001-of-00002.safetensors")
    save({"c": params["c"]}, folder / "model-00002-of-00002.safetensors")
    files = {"a": 1, "b": 1, "c": 2}
    index = {"metadata": {}, "weight_map": {k: f"model-0000{v}-of-00002.safetensors" for k, v in files.items()}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return params


def test_shards_by_index_and_by_folder(tmp_path: Path) -> None:
    params = _write_shards(tmp_path)
    _require_equal(load(tmp_path), params)
    _require_equal(load(tmp_path / "model.safetensors.index.json"), params)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    _write_shards(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"shards that do not exist: 'model-00002-of-00002\.safetensors'"):
        load(tmp_path)


def test_a_shard_without_its_tensor_is_named(tmp_path: Path) -> None:
    _write_shards(tmp_path)
    save({"other": torch.zeros(1)}, tmp_path / "model-00002-of-00002.safetensors", overwrite=True)
    with pytest.raises(ValueError, match=r"says that 'c' is in 'model-00002-of-00002\.safetensors', but it is not"):
        load(tmp_path)


@pytest.mark.parametrize("shard", ["../outside.safetensors", "/etc/outside.safetensors"])
def test_shards_outside_the_folder_are_not_read(tmp_path: Path, shard: str) -> None:
    save({"a": torch.zeros(1)}, tmp_path / "outside.safetensors")
    (tmp_path / "model").mkdir()
    index = tmp_path / "model" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(ValueError, match="outside of its folder"):
        load(index)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', "not json"])
def test_an_index_that_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    told = "lacks a 'weight_map' from parameter names to files; fetch" if text[:1] in ("[", "{") else "it is not JSON: "
    with pytest.raises(ValueError, match=f"is not the index of a sharded checkpoint: .*{told}"):
        load(tmp_path)


def test_folders(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="holds no checkpoint"):
        load(tmp_path)
    save({"a": torch.zeros(1)}, tmp_path / "one.safetensors")
    assert load(tmp_path).keys() == {"a"}
    save({"a": torch.zeros(1)}, tmp_path / "two.safetensors")
    with pytest.raises(ValueError, match=r"several checkpoints \('one\.safetensors', 'two\.safetensors'\); name one"):
        load(tmp_path)


def test_wrong_suffix_and_missing_file(tmp_path: Path) -> None:
    (tmp_path / "a.ckpt2").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"ends in '\.ckpt2', but a checkpoint is"):
        load(tmp_path / "a.ckpt2")
    with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
        load(tmp_path / "b.safetensors")


@pytest.mark.parametrize("content", [b"", b"\x08", b"\xff" * 64])
@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_damaged_files(tmp_path: Path, suffix: str, content: bytes) -> None:
    path = tmp_path / f"a{suffix}"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="is not a readable"):
        load(path)


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_truncated_files(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    if suffix == ".pt":
        torch.save(_params(), path)
    else:
        save(_params(), path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="is not a readable"):
        load(path)


class _Evil:
    ran = False

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (exec, ("import tests; raise SystemExit('code ran')",))


def test_pickled_code_is_refused_and_not_run(tmp_path: Path) -> None:
    torch.save({"weight": torch.zeros(2), "hook": _Evil()}, tmp_path / "a.pt")
    with pytest.raises(ValueError, match="loading them could run any code, so regauge refuses"):
        load(tmp_path / "a.pt")
    torch.save(nn.Linear(2, 2), tmp_path / "b.pt")
    with pytest.raises(ValueError, match=r"save `module.state_dict\(\)` instead"):
        load(tmp_path / "b.pt")


def test_torch_files_without_a_state_dict(tmp_path: Path) -> None:
    torch.save([torch.zeros(2)], tmp_path / "a.pt")
    with pytest.raises(ValueError, match="holds a list, not a state dict"):
        load(tmp_path / "a.pt")
    torch.save({"weight": torch.zeros(2), "epoch": 3}, tmp_path / "b.pt")
    with pytest.raises(ValueError, match=r"no tensors \('epoch'\)"):
        load(tmp_path / "b.pt")


def test_save_refuses(tmp_path: Path) -> None:
    params = {"a": torch.zeros(2)}
    path = save(params, tmp_path / "a.safetensors")
    with pytest.raises(FileExistsError, match="exists already; choose another name, or give `overwrite=True`"):
        save({"a": torch.ones(2)}, path)
    assert torch.equal(load(path)["a"], params["a"])
    save({"a": torch.ones(2)}, path, overwrite=True)
    assert torch.equal(load(path)["a"], torch.ones(2))
    with pytest.raises(ValueError, match=r"must end in \.safetensors"):
        save(params, tmp_path / "a.pt")
    with pytest.raises(FileNotFoundError, match="folder"):
        save(params, tmp_path / "absent" / "a.safetensors")
    with pytest.raises(ValueError, match="meta device"):
        save({"a": torch.zeros(2, device="meta")}, tmp_path / "m.safetensors")
    assert [file.name for file in tmp_path.iterdir()] == ["a.safetensors"]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save({"a": torch.zeros(2)}, tmp_path / "a.safetensors")

    def fails(descriptor: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("os.fsync", fails)
    with pytest.raises(OSError, match="no space left"):
        save({"a": torch.ones(2)}, path, overwrite=True)
    monkeypatch.undo()
    assert torch.equal(load(path)["a"], torch.zeros(2))
    assert [file.name for file in tmp_path.iterdir()] == ["a.safetensors"]


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_match_fills_in_tied_names(device: str) -> None:
    with torch.device(device):
        expected = _Tied().state_dict()
    weight = torch.randn(5, 3)
    matched = match({"embedding.weight": weight}, expected, "the file")
    assert list(matched) == ["embedding.weight", "head.weight"]
    assert matched["head.weight"] is weight


def test_match_names_what_is_missing_unexpected_or_of_another_shape() -> None:
    expected = nn.Linear(3, 2).state_dict()
    with pytest.raises(ValueError, match=r"a\.pt lacks 'bias', which the model has; a\.pt has 'gain', which the model"):
        match({"weight": torch.zeros(2, 3), "gain": torch.zeros(1)}, expected, "a.pt")
    with pytest.raises(ValueError, match=r"'weight' has shape \(2, 4\) in a\.pt, but \(2, 3\) in the model"):
        match({"weight": torch.zeros(2, 4), "bias": torch.zeros(2)}, expected, "a.pt")


def _alignment() -> Alignment:
    axes = {"a.weight": ("h", None), "a.bias": ("h",), "b.weight": ("k", "h"), "b.bias": ("k",), "c": (None, "k")}
    params = {"a.weight": torch.zeros(4, 2), "a.bias": torch.zeros(4), "b.weight": torch.zeros(3, 4)}
    params |= {"b.bias": torch.zeros(3), "c": torch.zeros(2, 3)}
    symmetry = Symmetry.from_axes(axes, kinds={"h": "scaled", "k": "dihedral"}).bind(params)
    return Alignment(symmetry, symmetry.random(torch.Generator().manual_seed(3)))


def test_alignment_round_trip(tmp_path: Path) -> None:
    alignment = _alignment()
    path = alignment.save(alignment_path(tmp_path / "b.safetensors"))
    assert path.name == "b.alignment.safetensors"
    assert alignment_path(path) == path
    again = load_alignment(path)
    assert again.symmetry == alignment.symmetry
    for name, value in alignment.element.items():
        for field in ("perm", "scale", "sign", "shift", "matrix"):
            one, two = getattr(value, field), getattr(again.element[name], field)
            assert (one is None and two is None) or torch.equal(one, two)


def test_alignments_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no alignment"):
        load_alignment(tmp_path / "a.alignment.safetensors")
    plain = save({"a": torch.zeros(2)}, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match="is not an alignment but the checkpoint of a network, whose path"):
        load_alignment(plain)
    (tmp_path / "b.safetensors").write_bytes(b"1234")
    with pytest.raises(ValueError, match="is not a readable safetensors file"):
        load_alignment(tmp_path / "b.safetensors")
    alignment = _alignment()
    header = {"kind": "regauge.alignment", "version": "9", "symmetry": alignment.symmetry.to_json()}
    newer = save({"h/perm": torch.arange(4)}, tmp_path / "c.safetensors", metadata=header)
    with pytest.raises(ValueError, match="has version 9, but this regauge reads version 1"):
        load_alignment(newer)
    other = save({"h/perm": torch.arange(4)}, tmp_path / "d.safetensors", metadata=header | {"version": "1"})
    with pytest.raises(ValueError, match=r"scale of group 'h' should have shape \(1, 4\)"):
        load_alignment(other)
    with pytest.raises(ValueError, match="is a batch of shape"):
        Alignment(alignment.symmetry, alignment.element.expand(2)).save(tmp_path / "e.safetensors")


def test_an_alignment_whose_order_is_no_permutation(tmp_path: Path) -> None:
    symmetry = Symmetry.from_axes({"w": ("h", None)}).bind({"w": torch.zeros(3, 2)})
    header = {"kind": "regauge.alignment", "version": "1", "symmetry": symmetry.to_json()}
    path = save({"h/perm": torch.tensor([0, 0, 2])}, tmp_path / "a.safetensors", metadata=header)
    with pytest.raises(ValueError, match="the order of group 'h' is not a permutation"):
        load_alignment(path)

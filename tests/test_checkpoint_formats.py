"""Formats of checkpoints are a table, to which a row or an entry point adds a format."""

from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch

import regauge as rg
from regauge.checkpoints.formats import file_formats
from regauge.checkpoints.job import open_job
from regauge.checkpoints.writing import Pieces, Shard
from regauge.core.params import Params

SYMMETRY = rg.Symmetry.from_axes({"fc1.weight": ("h", None), "fc2.weight": (None, "h")}, kinds={"h": "permutation"})
TOY = rg.checkpoints.FileFormat(
    (".toy",), opener=f"{__name__}:open_toy", writer=f"{__name__}:encode_toy", names=("model.toy",)
)
"""A format of text lines: the name, the shape and the values of a tensor, in float64."""


def open_toy(file: Path, entry: str | None) -> rg.checkpoints.OpenedFile:
    params: Params = {}
    for line in file.read_text().splitlines():
        name, shape, values = line.split(" ", 2)
        sizes = [int(size) for size in shape.split("x")]
        params[name] = torch.tensor([float(v) for v in values.split()], dtype=torch.float64).reshape(sizes)
    return rg.checkpoints.OpenedFile.of(file, params)


def encode_toy(shard: Shard, pieces: Pieces) -> Iterator[bytes]:
    for spec in shard.tensors:
        values = torch.cat([piece.flatten() for piece in pieces(spec.name)]).tolist()
        yield " ".join([spec.name, "x".join(map(str, spec.shape)), *map(repr, values)]).encode() + b"\n"


@pytest.fixture(params=["entry point", "row"])
def toy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Register an additional format, as another package or as a row of the table."""
    if request.param == "row":
        monkeypatch.setitem(file_formats.FORMATS, "toy", TOY)
    else:
        point = EntryPoint("toy", f"{__name__}:TOY", file_formats.GROUP)
        monkeypatch.setattr(file_formats, "entry_points", lambda group: [point] if group == file_formats.GROUP else [])
    file_formats.every_format.cache_clear()
    yield
    file_formats.every_format.cache_clear()


def network(seed: int) -> Params:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"fc1.weight": (6, 3), "fc2.weight": (2, 6)}
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


@pytest.mark.usefixtures("toy")
def test_a_further_format_is_read_and_written(tmp_path: Path) -> None:
    first, second = (rg.save(network(k), tmp_path / f"{k}.toy") for k in range(2))
    assert first.read_text().startswith("fc1.weight 6x3 ")
    assert all(torch.equal(tensor, network(0)[name]) for name, tensor in rg.load(first).items())
    result = rg.align(first, second, SYMMETRY, out=tmp_path / "out.toy")
    expected = rg.align(network(0), network(1), SYMMETRY).params
    assert all(torch.equal(tensor, expected[name]) for name, tensor in rg.load(tmp_path / "out.toy").items())
    stored = rg.checkpoints.load_alignment(tmp_path / "out.alignment.safetensors")
    assert torch.equal(stored.element["h"].perm, result.element["h"].perm)


@pytest.mark.usefixtures("toy")
def test_a_further_format_may_lie_in_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    rg.save(network(0), tmp_path / "a/model.toy")
    assert rg.Checkpoint.open(tmp_path / "a").keys() == network(0).keys()
    rg.align(tmp_path / "a", tmp_path / "a", SYMMETRY, out=tmp_path / "out")
    assert (tmp_path / "out/model.safetensors").is_file()


def test_refusals_and_outputs_are_read_from_the_table(tmp_path: Path) -> None:
    rg.save(network(0), tmp_path / "a.safetensors")
    (tmp_path / "b.toy").write_text("x 1 0.0\n")
    read = r"a checkpoint is \.safetensors, \.pt, \.pth, \.bin, \.ckpt, \.index\.json"
    with pytest.raises(ValueError, match=rf"ends in '\.toy', but {read} \(sharded\)"):
        rg.load(tmp_path / "b.toy")
    for ending in (*file_formats.weight_suffixes(), ".json"):
        job = open_job([tmp_path / "a.safetensors"], 0, out=tmp_path / f"out{ending}")
        assert job is not None
        if ending == ".safetensors":
            job.require_output()
        else:
            with pytest.raises(ValueError, match=r"must end in \.safetensors, or be the name of a folder"):
                job.require_output()

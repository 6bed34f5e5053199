"""Outputs in another dtype or in other files, and networks whose dtypes differ."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import regauge as rg
from regauge.alignment.streamed.job import align_job, plan_job
from regauge.checkpoints.alignments import load_alignment
from regauge.checkpoints.checkpoint import Checkpoint, load
from regauge.checkpoints.form import DTYPES, Form
from regauge.checkpoints.job import open_job
from regauge.checkpoints.writing import save
from regauge.cli.main import main
from regauge.merging.streamed import merge_job

SHAPES = {"fc1.weight": (12, 5), "fc1.bias": (12,), "fc2.weight": (7, 12), "fc2.bias": (7,), "head.weight": (4, 7)}
AXES = {"fc1.weight": ("h", None), "fc1.bias": ("h",), "fc2.weight": ("k", "h"), "fc2.bias": ("k",)}
AXES |= {"head.weight": (None, "k")}
SYMMETRY = rg.Symmetry.from_axes(AXES, kinds={"h": "scaled", "k": "signed"})
MIXED = {"fc1.weight": torch.bfloat16, "fc2.weight": torch.float64, "head.weight": torch.float16}
NARROW = dict.fromkeys(SHAPES, torch.bfloat16)


def _network(seed: int, dtypes: Mapping[str, torch.dtype] | None = None) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    made = {name: tensor.to((dtypes or {}).get(name, torch.float32)) for name, tensor in made.items()}
    return made | {"steps": torch.tensor(seed)}


def _wide(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {n: t.float() if t.is_floating_point() and t.dtype != torch.float64 else t for n, t in params.items()}


def _align_in_memory(a: Path, b: Path, out: Path, **form: Any) -> rg.Element:
    return rg.align(a, b, SYMMETRY, out=rg.Output(out, overwrite=True, **form)).element


def _align_streamed(a: Path, b: Path, out: Path, **form: Any) -> rg.Element:
    job = open_job([a, b], 1, out=rg.Output(out, overwrite=True, **form))
    assert job is not None
    return align_job(plan_job(job, SYMMETRY)).element


def _merge_in_memory(a: Path, b: Path, out: Path, **form: Any) -> Any:
    return rg.merge([a, b], SYMMETRY, method=rg.WeightMatching(), out=rg.Output(out, overwrite=True, **form))


def _merge_streamed(a: Path, b: Path, out: Path, **form: Any) -> Any:
    job = open_job([a, b], 0, work="merging", out=rg.Output(out, overwrite=True, **form))
    assert job is not None
    return merge_job(plan_job(job, SYMMETRY), rule=rg.merging.Average(), weights=None, has_base=False)


ALIGN = [_align_in_memory, _align_streamed]
MERGE = [_merge_in_memory, _merge_streamed]
DTYPES_OF_B = [None, NARROW, MIXED]


@pytest.fixture
def pair(tmp_path: Path) -> Callable[..., tuple[Path, Path, Path]]:
    def make(
        of_a: Mapping[str, torch.dtype] | None = None, of_b: Mapping[str, torch.dtype] | None = None
    ) -> tuple[Path, Path, Path]:
        a, b = (
            save(_network(seed, dtypes), tmp_path / f"{seed}.safetensors") for seed, dtypes in ((0, of_a), (1, of_b))
        )
        return a, b, tmp_path / "out.safetensors"

    return make


@pytest.mark.parametrize("align", ALIGN)
@pytest.mark.parametrize("of_b", DTYPES_OF_B, ids=["float32", "bfloat16", "mixed"])
@pytest.mark.parametrize("dtype", [None, *DTYPES])
def test_an_aligned_network_is_rounded_once(
    pair: Callable[..., Any], align: Callable[..., Any], of_b: Mapping[str, torch.dtype] | None, dtype: str | None
) -> None:
    a, b, out = pair(None, of_b)
    element = align(a, b, out, dtype=dtype)
    before, after = load(b), load(out)
    work = Form.of(dtype).work_dtype
    moved = SYMMETRY.act(element, {name: t.to(work(t.dtype)) for name, t in before.items()})
    expected = {name: t.to(Form.of(dtype).dtype_of(before[name].dtype)) for name, t in moved.items()}
    assert {name: t.dtype for name, t in after.items()} == {name: t.dtype for name, t in expected.items()}
    assert all(torch.equal(after[name], t) for name, t in expected.items())
    assert all(t.dtype == DTYPES[dtype] for t in after.values() if dtype and t.is_floating_point())


@pytest.mark.parametrize("align", ALIGN)
@pytest.mark.parametrize(("of_a", "of_b"), [(None, NARROW), (NARROW, None), (MIXED, NARROW), (None, MIXED)])
def test_precisions_are_matched_as_their_values(
    pair: Callable[..., Any], align: Callable[..., Any], of_a: Any, of_b: Any
) -> None:
    a, b, out = pair(of_a, of_b)
    found = align(a, b, out)
    same = rg.align(_wide(load(a)), _wide(load(b)), SYMMETRY).element
    for group, value in same.items():
        assert torch.equal(found[group].perm, value.perm)
        for part, tensor in value.items():
            assert torch.allclose(getattr(found[group], part).double(), tensor.double(), rtol=1e-5)
    assert {name: t.dtype for name, t in load(out).items()} == {name: t.dtype for name, t in load(b).items()}


@pytest.mark.parametrize("merge", MERGE)
@pytest.mark.parametrize(("of_a", "of_b"), [(None, NARROW), (NARROW, None), (MIXED, None)])
@pytest.mark.parametrize("dtype", [None, "float64", "float16"])
def test_merged_networks_have_the_dtypes_of_the_first(
    pair: Callable[..., Any], merge: Callable[..., Any], of_a: Any, of_b: Any, dtype: str | None
) -> None:
    a, b, out = pair(of_a, of_b)
    result = merge(a, b, out, dtype=dtype)
    first, second, after = load(a), load(b), load(out)
    moved = SYMMETRY.act(result.elements[1], {n: t.double() for n, t in second.items() if n != "steps"})
    for name, tensor in after.items():
        assert tensor.dtype == Form.of(dtype).dtype_of(first[name].dtype)
        if tensor.is_floating_point():
            mean = (first[name].double() + moved[name]) / 2
            error = (tensor.double() - mean).abs().max() / mean.abs().max()
            assert error <= max(torch.finfo(tensor.dtype).eps, torch.finfo(torch.float32).eps)
    assert torch.equal(after["steps"], first["steps"])
    told = [note for note in result.record.notes if "differ in dtype" in note]
    assert len(told) == (dtype is None)
    assert all(f"the result has those of {a}; `dtype=` chooses" in note for note in told)


@pytest.mark.parametrize("write", [*ALIGN, *MERGE])
def test_values_that_a_dtype_cannot_hold_are_refused(pair: Callable[..., Any], write: Callable[..., Any]) -> None:
    a, b, out = pair()
    large = {name: t * 1e6 if name == "head.weight" else t for name, t in load(b).items()}
    save(large, b, overwrite=True)
    with pytest.raises(ValueError, match=r"'head.weight' would exceed .* number of float16"):
        write(a, b, out, dtype="float16")
    assert not out.exists()
    write(a, b, out, dtype="bfloat16")


@pytest.mark.parametrize("write", [*ALIGN, *MERGE])
def test_floating_point_numbers_are_no_integers(pair: Callable[..., Any], write: Callable[..., Any]) -> None:
    a, b, out = pair()
    save(load(b) | {"steps": torch.tensor(1.0)}, b, overwrite=True)
    with pytest.raises(ValueError, match=r"'steps' is torch.int64 in .* and torch.float32 in"):
        write(a, b, out)
    assert not out.exists()


@pytest.mark.parametrize(("size", "files"), [(240, 5), (10**6, 1), (1, 6), ("0.6kB", 2)])
def test_shards_are_full_and_no_larger(pair: Callable[..., Any], tmp_path: Path, size: int | str, files: int) -> None:
    a, b, single = pair()
    _align_streamed(a, b, single)
    out = tmp_path / "folder"
    _align_streamed(a, b, out, shard_size=size)
    limit = Form.of(None, size).shard_size
    assert limit is not None
    checkpoint = Checkpoint.open(out)
    shards = sorted(checkpoint.layout(), key=lambda shard: shard.file)
    assert len(shards) == files
    names = [f"1-{k + 1:05}-of-{files:05}.safetensors" for k in range(files)] if files > 1 else ["1.safetensors"]
    assert [shard.file for shard in shards] == (names if files > 1 else ["model.safetensors"])
    assert sorted(path.name for path in out.glob("1*.safetensors")) == names
    for shard, following in zip(shards, [*shards[1:], None], strict=True):
        assert shard.nbytes <= limit or len(shard.tensors) == 1
        assert following is None or shard.nbytes + max(spec.nbytes for spec in following.tensors) > limit
    assert list(out.glob("*.index.json")) == ([out / "1.safetensors.index.json"] if files > 1 else [])
    one, many = load(single), load(out)
    assert one.keys() == many.keys()
    assert all(torch.equal(one[name], many[name]) for name in one)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"dtype": "int8"}, "the dtype 'int8' is unknown; choose one of float32"),
        ({"dtype": torch.float8_e5m2}, "cannot be written as torch.float8_e5m2"),
        ({"shard_size": 0}, "the shard size is 0 bytes; it must be positive"),
        ({"shard_size": "many"}, "the shard size 'many' cannot be read"),
        ({"shard_size": 100}, "the output is one file, 'out.safetensors', so it has no shards"),
    ],
)
@pytest.mark.parametrize("write", [*ALIGN, *MERGE])
def test_forms_that_make_no_sense(
    pair: Callable[..., Any], write: Callable[..., Any], form: dict[str, Any], message: str
) -> None:
    a, b, out = pair()
    with pytest.raises(ValueError, match=message):
        write(a, b, out, **form)
    assert not out.exists()


def test_a_form_is_for_files() -> None:
    with pytest.raises(TypeError, match="`out` or `memory` must all be checkpoints"):
        rg.align(_network(0), _network(1), SYMMETRY, out=rg.Output("out", dtype=torch.float16))


def test_a_configuration_names_the_dtype_wherever_it_stands() -> None:
    config = {"torch_dtype": "float32", "text_config": {"dtype": "bfloat16", "size": 3}, "parts": [{"dtype": None}]}
    known = Form.of("float16").describe(json.dumps(config).encode(), Path("config.json"))
    assert json.loads(known) == {
        "torch_dtype": "float16",
        "text_config": {"dtype": "float16", "size": 3},
        "parts": [{"dtype": None}],
    }
    assert Form.of(None, 100).describe(b"any text", Path("config.json")) == b"any text"
    with pytest.raises(ValueError, match=r"'config\.json' cannot be read: it is not JSON"):
        Form.of("float16").describe(b"any text", Path("config.json"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return two tiny Llama folders, and the symmetry of their model."""
    transformers = pytest.importorskip("transformers")
    root = tmp_path_factory.mktemp("folders")
    for seed, name in enumerate("ab"):
        torch.manual_seed(seed)
        config = transformers.LlamaConfig(
            vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
        )
        transformers.LlamaForCausalLM(config).save_pretrained(root / name)
    return root


@pytest.mark.parametrize("command", ["align", "merge"])
def test_folders_load_in_their_dtype(folders: Path, tmp_path: Path, command: str) -> None:
    pytest.importorskip("transformers")
    from folder_cases import open_clean

    out = tmp_path / "out"
    paths = [str(folders / name) for name in "ab"]
    main([command, *paths, "-o", str(out), "--dtype", "bfloat16", "--shard-size", "1kB"])
    assert len(list(out.glob("model-*-of-*.safetensors"))) > 1
    assert open_clean(out).dtype == torch.bfloat16
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"


def test_commands_on_one_checkpoint(folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    a, b = str(folders / "a"), str(folders / "b")
    main(["canonicalize", a, "-o", "canonical.safetensors", "--dtype", "float64"])
    alignment = load_alignment("canonical.alignment.safetensors")
    expected = alignment.symmetry.act(alignment.element, {name: t.double() for name, t in load(a).items()})
    assert all(torch.equal(t, expected[name]) for name, t in load("canonical.safetensors").items())
    main(["apply", "canonical.safetensors", b, "-o", "moved.safetensors", "--dtype", "float16"])
    moved = alignment.symmetry.act(alignment.element, load(b))
    assert all(torch.equal(t, moved[name].half()) for name, t in load("moved.safetensors").items())

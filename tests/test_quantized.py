"""Tensors without usable values: quantized weights are refused by name everywhere, and counters, masks and indices are
accepted.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import regauge as rg
from regauge.checkpoints.alignments import Alignment
from regauge.checkpoints.checkpoint import Checkpoint, load
from regauge.checkpoints.writing import save
from regauge.core.interpolation import mean
from regauge.core.params import Params

SYMMETRY = rg.Symmetry.from_axes(
    {"up.weight": ("h", None), "up.bias": ("h",), "mask": ("h",), "down.weight": (None, "h")},
    kinds={"h": "permutation"},
    buffers=("mask",),
)
SCALED = rg.Symmetry.from_axes(
    {"up.weight": ("h", None), "up.bias": ("h",), "down.weight": (None, "h")}, kinds={"h": "scaled"}
)
ODD = [torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64]


def _params(seed: int = 0) -> Params:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"up.weight": (6, 3), "up.bias": (6,), "down.weight": (2, 6), "down.bias": (2,)}
    floats = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    mask = torch.randn(6, generator=generator) > 0
    return {**floats, "mask": mask, "positions": torch.arange(5), "tracked": torch.tensor(seed)}


def _coded(dtype: torch.dtype, seed: int = 0, name: str = "up.weight") -> Params:
    params = _params(seed)
    values = params[name] * 9
    return {**params, name: values > 0 if dtype is torch.bool else values.to(dtype)}


def _stacked(params: Params) -> Params:
    return {name: torch.stack([tensor.view(torch.uint8), tensor.view(torch.uint8)]).view(tensor.dtype)
            if tensor.dtype.is_floating_point and tensor.itemsize == 1 else torch.stack([tensor, tensor])
            for name, tensor in params.items()}  # fmt: skip


PATHS: dict[str, Callable[[Params, Params], object]] = {
    "align": lambda a, b: rg.align(a, b, SYMMETRY),
    "align back": lambda a, b: rg.align(b, a, SYMMETRY),
    "align_many": lambda a, b: rg.align_many([a, b], SYMMETRY),
    "align_pairs": lambda a, b: rg.alignment.align_pairs(_stacked(a), _stacked(b), SYMMETRY),
    "align_pairs back": lambda a, b: rg.alignment.align_pairs(_stacked(b), _stacked(a), SYMMETRY),
    "merge": lambda a, b: rg.merge([a, b], SYMMETRY),
    "task vectors": lambda a, b: rg.merge([a, b], SYMMETRY, base=a, rule=rg.merging.Ties(0.5)),
    "act": lambda a, b: SYMMETRY.act(SYMMETRY.identity(), b),
    "canonicalize": lambda a, b: rg.canonicalize(b, SYMMETRY),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", ODD, ids=str)
def test_what_holds_no_values_is_not_moved(dtype: torch.dtype, path: str) -> None:
    with pytest.raises(ValueError, match=rf"'up\.weight' is {dtype}.* only values in float16, bfloat16, float32"):
        PATHS[path](_params(), _coded(dtype, 1))


@pytest.mark.parametrize("dtype", ODD, ids=str)
def test_what_holds_no_values_has_no_mean(dtype: torch.dtype) -> None:
    one, other = ({**_coded(dtype, seed, "down.bias"), "mask": torch.zeros(6) > 0} for seed in (0, 2))
    for run in (
        lambda: rg.merge([one, other], SYMMETRY),
        lambda: rg.merge([one, other], SYMMETRY, base=one, rule=rg.merging.TaskArithmetic()),
        lambda: rg.line(one, other, lambda params: {"loss": 0.0}, points=3),
        lambda: mean([one, other]),
    ):
        with pytest.raises(ValueError, match=rf"'down\.bias' is {dtype} and differs between the networks"):
            run()


def test_counters_may_differ_and_what_is_equal_passes() -> None:
    a, b = _coded(torch.int8, 0, "down.bias"), _params(1)
    b["down.bias"], b["mask"] = a["down.bias"], a["mask"]
    aligned = rg.align(a, b, SYMMETRY).params
    merged = mean([a, b])
    for result in (aligned, merged):
        assert torch.equal(result["down.bias"], a["down.bias"])
        assert torch.equal(result["positions"], a["positions"])
    assert [int(aligned["tracked"]), int(merged["tracked"])] == [1, 0]


def test_masks_are_reordered_with_their_units() -> None:
    params = _params()
    element = SYMMETRY.bind(params).random(torch.Generator().manual_seed(3))
    perm = element["h"].perm
    moved = SYMMETRY.act(element, params)
    assert perm is not None
    assert torch.equal(moved["mask"], params["mask"][perm])
    assert not torch.equal(moved["mask"], params["mask"])


def test_masks_have_no_scales() -> None:
    axes = {"up.weight": ("h", None), "mask": ("h",), "down.weight": (None, "h")}
    scaled = rg.Symmetry.from_axes(axes, kinds={"h": "scaled"}, buffers=("mask",))
    with pytest.raises(ValueError, match=r"'mask' is torch\.bool, but group 'h' acts on it"):
        scaled.act(scaled.identity(), _params())


def test_compiled_elements_refuse_codes() -> None:
    symmetry = SCALED.bind(_params())
    codes = {name: (tensor * 9).to(torch.int8) for name, tensor in _params().items()}
    with pytest.raises(ValueError, match=r"'up\.weight' is torch\.int8, but only values"):
        symmetry.compile(symmetry.identity())(codes)


def _write(folder: Path, params: Params, *, as_folder: bool) -> Path:
    if not as_folder:
        return save(params, folder.with_suffix(".safetensors"))
    folder.mkdir()
    save(params, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("as_folder", [False, True], ids=["file", "folder"])
@pytest.mark.parametrize("command", ["align", "merge", "apply", "canonicalize"])
def test_commands_refuse_codes(command: str, as_folder: bool, tmp_path: Path, refused: Callable[..., str]) -> None:
    symmetry = SCALED.bind(_params())
    (tmp_path / "symmetry.json").write_text(symmetry.to_json())
    Alignment(symmetry, symmetry.identity()).save(tmp_path / "x.alignment.safetensors")
    a, b = (str(_write(tmp_path / name, _coded(torch.int8, k), as_folder=as_folder)) for k, name in enumerate("ab"))
    known = ["--symmetry", str(tmp_path / "symmetry.json")]
    out = ["-o", str(tmp_path / ("out" if as_folder and command in ("align", "merge") else "out.safetensors"))]
    arguments = {
        "align": [a, b, *known],
        "merge": [a, b, *known],
        "apply": [str(tmp_path / "x.alignment.safetensors"), b],
        "canonicalize": [b, *known],
    }
    assert "'up.weight' is torch.int8" in refused(command, *arguments[command], *out)


@pytest.mark.parametrize("as_folder", [False, True], ids=["file", "folder"])
def test_merging_refuses_integers_that_differ(as_folder: bool, tmp_path: Path, refused: Callable[..., str]) -> None:
    (tmp_path / "symmetry.json").write_text(SCALED.bind(_params()).to_json())
    paths = [
        str(_write(tmp_path / name, {**_params(k), "mask": torch.zeros(6) > 0, "positions": torch.arange(5) + k},
                   as_folder=as_folder))
        for k, name in enumerate("ab")
    ]  # fmt: skip
    out = str(tmp_path / ("out" if as_folder else "out.safetensors"))
    text = refused("merge", *paths, "--symmetry", str(tmp_path / "symmetry.json"), "-o", out)
    assert "'positions' is torch.int64 and differs between the networks" in text


CODE, SCALE = torch.zeros(2, 2, dtype=torch.int8), torch.ones(2)
PACKED = CODE.to(torch.int32)
FORMATS: dict[str, dict[str, Tensor]] = {
    "bitsandbytes with 4 bits": {
        "m.weight": CODE.to(torch.uint8),
        "m.weight.absmax": SCALE,
        "m.weight.quant_map": SCALE,
        "m.weight.quant_state.bitsandbytes__nf4": CODE.to(torch.uint8),
    },
    "bitsandbytes with 8 bits": {"m.weight": CODE, "m.SCB": SCALE, "m.weight_format": torch.zeros(()).to(torch.uint8)},
    "GPTQ": {"m.qweight": PACKED, "m.qzeros": PACKED, "m.scales": SCALE.half(), "m.g_idx": PACKED},
    "AWQ or GPTQ": {"m.qweight": PACKED, "m.qzeros": PACKED, "m.scales": SCALE.half()},
    "FP8 with scales of blocks": {"m.weight": CODE.to(torch.float8_e4m3fn), "m.weight_scale_inv": SCALE},
    "codes with scales: 'm.weight' is torch.float8_e4m3fn and needs 'm.weight_scale'": {
        "m.weight": CODE.to(torch.float8_e4m3fn),
        "m.weight_scale": SCALE,
    },
    "codes with scales: 'm.weight' is torch.int8 and needs 'm.weight_zero_point'": {
        "m.weight": CODE,
        "m.weight_zero_point": CODE,
    },
    "compressed-tensors": {"m.weight_packed": PACKED, "m.weight_scale": SCALE, "m.weight_shape": torch.tensor([2, 2])},
    "torchao": {"m._weight_qdata": CODE, "m._weight_scale": SCALE},
    "MXFP4": {"m.down_proj_blocks": CODE.to(torch.uint8), "m.down_proj_scales": CODE.to(torch.uint8)},
    "HQQ": {"m.W_q": CODE.to(torch.uint8), "m.scale": SCALE, "m.zero": SCALE},
    "quanto": {"m.weight._data": CODE, "m.weight._scale": SCALE},
}


@pytest.mark.parametrize("title", FORMATS)
@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_formats_are_named(title: str, suffix: str, tmp_path: Path) -> None:
    params = {"norm.weight": SCALE, **FORMATS[title]}
    if suffix == ".pt":
        torch.save(params, tmp_path / "a.pt")
    else:
        save(params, tmp_path / "a.safetensors")
    with pytest.raises(
        ValueError, match="its values can be neither transformed nor averaged; dequantize it first"
    ) as error:
        Checkpoint.open(tmp_path / f"a{suffix}")
    assert f"quantized ({title}" in str(error.value)


@pytest.mark.parametrize(
    ("file", "content", "method"),
    [
        ("config.json", {"quantization_config": {"quant_method": "spqr"}}, "spqr"),
        ("config.json", {"text_config": {"quantization_config": {"quant_method": "vptq"}}}, "vptq"),
        ("config.json", {"compression_config": {}}, "a method without a name"),
        ("quantize_config.json", {"bits": 4}, "gptq"),
    ],
)
def test_configurations_name_the_method(file: str, content: object, method: str, tmp_path: Path) -> None:
    save({"m.weight": CODE}, tmp_path / "model.safetensors")
    (tmp_path / file).write_text(json.dumps(content))
    with pytest.raises(ValueError, match=rf"is quantized \({method}: 'm\.weight' is torch\.int8\)"):
        load(tmp_path)
    save({"m.weight": SCALE}, tmp_path / "model.safetensors", overwrite=True)
    assert load(tmp_path).keys() == {"m.weight"}


@pytest.mark.parametrize(
    "params",
    [
        {"attn.bias": CODE.to(torch.uint8), "attn.bias_scaled_token": PACKED.long(), "attn.weight": SCALE},
        {"index": PACKED, "index_token": SCALE, "logit_scale": SCALE},
        {"mask": CODE > 0, "mask_scale": SCALE, "positions": torch.arange(3)},
    ],
)
def test_indices_and_masks_are_no_codes(params: Params, tmp_path: Path) -> None:
    assert load(save(params, tmp_path / "a.safetensors")).keys() == params.keys()


def test_gguf_files_are_named(tmp_path: Path) -> None:
    for name in ("model.gguf", "renamed.safetensors", "renamed.pt"):
        (tmp_path / name).write_bytes(b"GGUF" + bytes(60))
        with pytest.raises(ValueError, match=r"is quantized \(a GGUF file\).*gguf_file=FILE"):
            load(tmp_path / name)
    (tmp_path / "renamed.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model\.gguf' is quantized"):
        load(tmp_path)


@pytest.mark.filterwarnings("ignore")
def test_quantized_and_sparse_tensors_of_torch_are_named(tmp_path: Path) -> None:
    torch.save({"w": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)}, tmp_path / "q.pt")
    with pytest.raises(ValueError, match=r"is quantized \(torch: 'w' is torch\.qint8\)"):
        load(tmp_path / "q.pt")
    torch.save({"w": torch.eye(3).to_sparse()}, tmp_path / "s.pt")
    with pytest.raises(ValueError, match=r"'w' in .* is torch\.sparse_coo; save it as a dense tensor"):
        load(tmp_path / "s.pt")


@pytest.mark.filterwarnings("ignore")
def test_quantized_modules_of_torch_are_refused(tmp_path: Path) -> None:
    quantized = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(3, 3)), {nn.Linear})
    torch.save(quantized.state_dict(), tmp_path / "q.pt")
    with pytest.raises(ValueError, match=r"is quantized \(torch: it holds '0\._packed_params"):
        load(tmp_path / "q.pt")

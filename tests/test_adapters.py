"""Low-rank adapters: merged into their base by their formulas, and aligned with respect to the matrices between their
factors.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import regauge as rg
from regauge.checkpoints.checkpoint import Checkpoint, load
from regauge.checkpoints.formats.adapters import adapter_symmetry
from regauge.checkpoints.writing import save
from regauge.cli.main import main

BASE = {
    "model.embed.weight": (16, 6),
    "model.fc1.weight": (8, 6),
    "model.fc1.bias": (8,),
    "model.square.weight": (8, 8),
    "model.conv.weight": (5, 8, 3, 3),
    "head.weight": (16, 5),
}
RANK, ALPHA = 3, 7.0
PREFIX = "base_model.model."


def _randn(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator)


def _base() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: _randn(generator, *shape) for name, shape in BASE.items()}


def _linear(module: str, out: int, inner: int, seed: int = 1, rank: int = RANK) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    names = (f"{PREFIX}{module}.lora_A.weight", f"{PREFIX}{module}.lora_B.weight")
    return {names[0]: _randn(generator, rank, inner), names[1]: _randn(generator, out, rank)}


def _conv(seed: int = 1) -> dict[str, Tensor]:
    made = _linear("model.conv", 5, 72, seed)
    return {n: t.reshape(RANK, 8, 3, 3) if "lora_A" in n else t.reshape(5, RANK, 1, 1) for n, t in made.items()}


def _embedding() -> dict[str, Tensor]:
    made = _linear("model.embed", 6, 16)
    return {n.replace("lora_", "lora_embedding_").removesuffix(".weight"): t for n, t in made.items()}


def _product(tensors: dict[str, Tensor], module: str) -> Tensor:
    down, up = (tensors[f"{PREFIX}{module}.lora_{factor}.weight"].double() for factor in "AB")
    return up.reshape(-1, RANK) @ down.flatten(1)


def _rescaled(weight: Tensor, magnitude: Tensor, axis: int) -> Tensor:
    """Return `weight` with every output along `axis` scaled to a given norm."""
    moved = weight.double().movedim(axis, 0)
    norms = moved.flatten(1).norm(dim=1)
    return (moved * (magnitude.double() / norms).reshape(-1, *[1] * (moved.ndim - 1))).movedim(0, axis)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write an adapter's folder."""

    def make(name: str, tensors: dict[str, Tensor], **config: Any) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        save(tensors, folder / "adapter_model.safetensors")
        settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "init_lora_weights": True} | config
        (folder / "adapter_config.json").write_text(json.dumps(settings))
        return folder

    save(_base(), tmp_path / "base.safetensors")
    return make


def _plain() -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Tensor]]:
    tensors = _linear("model.fc1", 8, 6)
    return tensors, {}, {"model.fc1.weight": ALPHA / RANK * _product(tensors, "model.fc1")}


def _stabilized() -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Tensor]]:
    tensors = _linear("model.fc1", 8, 6)
    config = {"use_rslora": True, "alpha_pattern": {"other": 1, "fc.": 5}}
    return tensors, config, {"model.fc1.weight": 5 / RANK**0.5 * _product(tensors, "model.fc1")}


def _transposed() -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Tensor]]:
    tensors = _linear("model.square", 8, 8) | _linear("model.fc1", 8, 6)
    changes = {f"model.{m}.weight": ALPHA / RANK * _product(tensors, f"model.{m}") for m in ("square", "fc1")}
    return tensors, {"fan_in_fan_out": True}, changes | {"model.square.weight": changes["model.square.weight"].T}


def _of_kernels() -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Tensor]]:
    tensors = _conv()
    return tensors, {}, {"model.conv.weight": ALPHA / RANK * _product(tensors, "model.conv").reshape(5, 8, 3, 3)}


def _of_embeddings() -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Tensor]]:
    change = ALPHA / RANK * _product(_linear("model.embed", 6, 16), "model.embed").T
    return _embedding(), {}, {"model.embed.weight": change}


def _dora() -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Tensor]]:
    base, changes = _base(), {}
    tensors = _linear("model.fc1", 8, 6) | _conv() | _embedding() | _linear("model.square", 8, 8)
    products = _plain()[2] | _of_kernels()[2] | _of_embeddings()[2]
    products["model.square.weight"] = ALPHA / RANK * _product(tensors, "model.square").T
    for name, axis in (("fc1", 0), ("conv", 0), ("embed", 1), ("square", 1)):
        key = f"model.{name}.weight"
        magnitude = torch.rand(base[key].shape[axis], generator=torch.Generator().manual_seed(3)) + 0.5
        shape = (1, -1, 1, 1) if name == "conv" else (-1,)
        tensors[f"{PREFIX}model.{name}.lora_magnitude_vector"] = magnitude.reshape(shape)
        changes[key] = _rescaled(base[key].double() + products[key], magnitude, axis) - base[key]
    return tensors, {"use_dora": True, "fan_in_fan_out": True}, changes


def _with_whole_layers() -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Tensor]]:
    base, (tensors, _, changes) = _base(), _plain()
    head, bias, offset = torch.ones(16, 5), torch.full((8,), 2.0), torch.full((8,), 3.0)
    tensors[f"{PREFIX}head.modules_to_save.weight"] = head
    tensors[f"{PREFIX}head.original_module.weight"] = base["head.weight"]
    tensors[f"{PREFIX}model.fc1.base_layer.bias"] = bias
    tensors[f"{PREFIX}model.fc1.lora_B.bias"] = offset
    bias_change = bias + ALPHA / RANK * offset - base["model.fc1.bias"]
    return tensors, {}, changes | {"head.weight": head - base["head.weight"], "model.fc1.bias": bias_change}


def _without_the_name_of_the_model() -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Tensor]]:
    tensors, config, changes = _plain()
    return {name.replace("model.fc1", "fc1"): t for name, t in tensors.items()}, config, changes


CASES = [
    _plain,
    _stabilized,
    _transposed,
    _of_kernels,
    _of_embeddings,
    _dora,
    _with_whole_layers,
    _without_the_name_of_the_model,
]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_an_adapter_changes_its_base_by_the_formula(
    write: Callable[..., Path], tmp_path: Path, case: Callable[[], Any], suffix: str
) -> None:
    tensors, config, changes = case()
    folder = write("adapter", tensors, **config)
    if suffix == ".pt":
        torch.save(_base(), tmp_path / "base.pt")
    found = Checkpoint.open(f"{tmp_path / 'base'}{suffix}+{folder}")
    assert list(found) == list(found.stored)
    for name, tensor in _base().items():
        expected = (tensor.double() + changes.get(name, 0)).float()
        torch.testing.assert_close(found[name], expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found.read(name, rows=(1, 3)), expected[1:3], rtol=1e-5, atol=1e-5)
        assert name in changes or torch.equal(found[name], tensor)
    assert load(found.path).keys() == _base().keys()


def test_sums_are_rounded_once_and_adapters_add_up(write: Callable[..., Path], tmp_path: Path) -> None:
    narrow = {name: t.bfloat16() for name, t in _base().items()}
    save(narrow, tmp_path / "narrow.safetensors")
    first = write("first", _linear("model.fc1", 8, 6, seed=1))
    second = write("second", _linear("model.fc1", 8, 6, seed=2))
    both = Checkpoint.open(f"{tmp_path / 'narrow.safetensors'}+{first}+{second}")
    products = sum(_product(load(folder), "model.fc1") for folder in (first, second))
    exact = narrow["model.fc1.weight"].double() + ALPHA / RANK * products
    torch.testing.assert_close(both["model.fc1.weight"].double(), exact, rtol=1e-6, atol=1e-6)
    both.write(tmp_path / "out.safetensors")
    after = load(tmp_path / "out.safetensors")
    assert after["model.fc1.weight"].dtype == torch.bfloat16
    assert torch.equal(after["model.fc1.weight"], both["model.fc1.weight"].bfloat16())
    assert torch.equal(after["head.weight"], narrow["head.weight"])


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        (_linear("model.fc1", 8, 6), {"peft_type": "ADAMSS"}, "is of type ADAMSS; LORA, IA3"),
        (
            _linear("model.fc1", 8, 6),
            {"init_lora_weights": "pissa"},
            "was initialized by 'pissa', which changed its base",
        ),
        (_linear("model.fc1", 8, 6), {"use_qalora": True}, "has 'use_qalora', which is not a low-rank change B A"),
        (_linear("model.fc1", 8, 6), {"use_something_new": {"a": 1}}, "has 'use_something_new'"),
        (_linear("model.fc1", 8, 6), {"target_parameters": ["x"]}, "has 'target_parameters'"),
        (_linear("model.fc1", 8, 6), {"arrow_config": {"k": 1}}, "has 'arrow_config'"),
        (_linear("model.fc1", 8, 6), {"lora_alpha": "much"}, "is not a configuration of an adapter"),
        ({}, {}, "holds no tensors"),
        (_linear("model.fc2", 8, 6), {}, "changes 'model.fc2.weight', which its base lacks"),
        (_linear("model.fc1", 8, 7), {}, r"changes 'model.fc1.weight', which has shape \(8, 6\)"),
        (_linear("model.fc1", 8, 6) | {f"{PREFIX}model.fc1.strange": torch.ones(2)}, {}, "which its base lacks"),
        (dict(list(_linear("model.fc1", 8, 6).items())[:1]), {}, "has only one of the two factors"),
        (
            _linear("model.fc1", 8, 6) | {f"{PREFIX}model.fc1.lora_B.weight": torch.ones(8, 2)},
            {},
            "cannot be multiplied",
        ),
    ],
)
def test_what_is_no_adapter_of_the_base_is_refused(
    write: Callable[..., Path], tmp_path: Path, tensors: dict[str, Tensor], config: dict[str, Any], message: str
) -> None:
    folder = write("adapter", tensors, **config)
    with pytest.raises(ValueError, match=message):
        Checkpoint.open(f"{tmp_path / 'base.safetensors'}+{folder}")


def test_a_tied_embedding_is_not_changed_alone(write: Callable[..., Path], tmp_path: Path) -> None:
    folder = write("adapter", _embedding())
    config: dict[str, Any] = {"tie_word_embeddings": True, "architectures": ["SomeForCausalLM"], "vocab_size": 16}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"'model\.embed\.weight', which is also the head of its base"):
        Checkpoint.open(f"{tmp_path / 'base.safetensors'}+{folder}")
    for change in ({"tie_word_embeddings": False}, {"architectures": ["SomeModel"]}, {"vocab_size": 17}):
        path.write_text(json.dumps(config | change))
        Checkpoint.open(f"{tmp_path / 'base.safetensors'}+{folder}")


def test_a_plus_is_a_sum_only_where_no_file_has_that_name(write: Callable[..., Path], tmp_path: Path) -> None:
    folder = write("adapter", _linear("model.fc1", 8, 6))
    other = save({"x": torch.ones(2)}, tmp_path / "a+b.safetensors")
    assert list(Checkpoint.open(other)) == ["x"]
    with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
        Checkpoint.open(f"{tmp_path / 'base.safetensors'}+{tmp_path / 'nothing'}")
    with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
        Checkpoint.open(f"{tmp_path / 'nothing'}+{folder}")
    with pytest.raises(ValueError, match=r"is no adapter: it lacks adapter_config\.json"):
        Checkpoint.open(f"{tmp_path / 'base.safetensors'}+{tmp_path}")


def _adapter(seed: int = 1) -> dict[str, Tensor]:
    tensors = _linear("model.fc1", 8, 6, seed) | _conv(seed) | _embedding()
    return tensors | {f"{PREFIX}head.weight": torch.ones(16, 5) * seed}


def _function(folder: Path, tmp_path: Path) -> dict[str, Tensor]:
    found = Checkpoint.open(f"{tmp_path / 'base.safetensors'}+{folder}")
    return {name: found[name].double() - tensor for name, tensor in _base().items()}


def _error(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    squares = [float((one[name] - tensor).square().sum()) for name, tensor in other.items()]
    return (sum(squares) / sum(float(tensor.square().sum()) for tensor in other.values())) ** 0.5


def test_the_symmetry_of_the_factors_leaves_the_adapter(write: Callable[..., Path], tmp_path: Path) -> None:
    tensors = _adapter()
    symmetry = adapter_symmetry(tensors)
    assert [(group.kind, group.size) for group in symmetry.groups] == [("linear", RANK)] * 3
    moved = symmetry.act(symmetry.random(torch.Generator().manual_seed(5)), tensors)
    assert sum(not torch.equal(moved[name], tensor) for name, tensor in tensors.items()) == 6
    before, after = (_function(write(name, of), tmp_path) for name, of in (("one", tensors), ("two", moved)))
    assert _error(after, before) < 1e-6
    with pytest.raises(ValueError, match="these parameters hold no factors of an adapter"):
        adapter_symmetry(_base())


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.1])
def test_adapters_are_aligned_in_their_factors_and_averaged_by_their_changes(
    write: Callable[..., Path], tmp_path: Path, noise: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    generator = torch.Generator().manual_seed(2)
    a = _adapter()
    symmetry = adapter_symmetry(a)
    near = {name: t + noise * t.std() * _randn(generator, *t.shape) for name, t in a.items()}
    write("a", a, note="kept")
    write("b", symmetry.act(symmetry.random(generator), near), note="kept")
    main(["align", "a", "b", "-o", "aligned"])
    main(["merge", "a", "b", "-o", "merged"])
    target = {
        n: (t + _function(tmp_path / "b", tmp_path)[n]) / 2 for n, t in _function(tmp_path / "a", tmp_path).items()
    }
    assert _error(_function(tmp_path / "aligned", tmp_path), _function(tmp_path / "b", tmp_path)) < 1e-6
    write("naive", {name: (t + load("b")[name]) / 2 for name, t in a.items()})
    unaligned = _error(_function(tmp_path / "naive", tmp_path), target)
    assert _error(_function(tmp_path / "merged", tmp_path), target) < 1e-6 < 0.01 * unaligned
    for folder in ("aligned", "merged"):
        assert json.loads((tmp_path / folder / "adapter_config.json").read_text())["note"] == "kept"
    kept = load("aligned")
    assert {name: (t.shape, t.dtype) for name, t in kept.items()} == {n: (t.shape, t.dtype) for n, t in a.items()}
    main(["apply", "aligned/regauge.alignment.safetensors", "aligned", "--inverse", "-o", "back.safetensors"])
    back = load("back.safetensors")
    assert all(torch.allclose(back[name], tensor, rtol=1e-4, atol=1e-4) for name, tensor in load("b").items())


def test_adapters_without_common_coordinates_are_refused(
    write: Callable[..., Path], refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    write("one", _linear("model.fc1", 8, 6))
    write("other", _linear("model.square", 8, 8))
    write("zero", _linear("model.fc1", 8, 6), lora_alpha=0)
    assert "change different modules" in refused("align", "one", "other", "-o", "out")
    assert "has scale 0 in 'zero'" in (said := refused("align", "one", "zero", "-o", "out"))
    assert "BASE+ADAPTER" in said
    assert "name a network with its adapter as BASE+ADAPTER" in refused("align", "base.safetensors", "one", "-o", "out")


def test_networks_with_adapters_are_checkpoints_like_others(
    write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    axes = {"model.fc1.weight": ("h", None), "model.fc1.bias": ("h",), "model.square.weight": (None, "h")}
    symmetry = rg.Symmetry.from_axes(axes)
    (tmp_path / "symmetry.json").write_text(symmetry.to_json())
    for seed in (1, 2):
        write(f"tuned{seed}", _linear("model.fc1", 8, 6, seed))
    paths = [f"base.safetensors+tuned{seed}" for seed in (1, 2)]
    options = ["--symmetry", "symmetry.json", "--base", "base.safetensors", "--rule", "task-arithmetic"]
    main(["merge", *paths, *options, "-o", "merged.safetensors"])
    result = rg.merge(
        [load(path) for path in paths],
        symmetry.bind(_base()),
        base=_base(),
        rule=rg.merging.TaskArithmetic(),
    )
    after = load("merged.safetensors")
    assert all(torch.allclose(after[name], tensor, atol=1e-5) for name, tensor in result.params.items())
    origin = Checkpoint.open("merged.safetensors").path.read_bytes()[:20000]
    assert b"adapter_model.safetensors" in origin


@dataclass(frozen=True)
class Pair:
    """Two adapters of two modules: their ranks, and their configurations."""

    ranks: tuple[dict[str, int], dict[str, int]]
    configs: tuple[dict[str, Any], dict[str, Any]]


PAIRS = {
    "ranks": Pair(({"fc1": 2, "square": 2}, {"fc1": 4, "square": 4}), ({"r": 2}, {"r": 4})),
    "scales": Pair(({"fc1": 3, "square": 3}, {"fc1": 3, "square": 3}), ({"lora_alpha": 5}, {"use_rslora": True})),
    "patterns": Pair(
        ({"fc1": 4, "square": 2}, {"fc1": 3, "square": 5}),
        (
            {"r": 2, "rank_pattern": {"fc.": 4}, "alpha_pattern": {"square": 3}},
            {"r": 3, "rank_pattern": {"model.square": 5}, "use_rslora": True},
        ),
    ),
}
SIDES = {"fc1": (8, 6), "square": (8, 8)}


def _named(pattern: dict[str, Any], module: str, otherwise: Any) -> Any:
    """Return a setting of a module as PEFT finds it."""
    return next((value for key, value in pattern.items() if re.match(rf"(.*\.)?({key})$", module)), otherwise)


def _changes(folder: Path) -> dict[str, Tensor]:
    """Return the change that an adapter makes in each module, by its configuration. Ranks must equal the named
    ranks.
    """
    config, tensors, found = json.loads((folder / "adapter_config.json").read_text()), load(folder), {}
    for module in SIDES:
        down, up = (tensors[f"{PREFIX}model.{module}.lora_{factor}.weight"].double() for factor in "AB")
        rank = _named(config.get("rank_pattern") or {}, f"model.{module}", config["r"])
        alpha = _named(config.get("alpha_pattern") or {}, f"model.{module}", config["lora_alpha"])
        assert (len(down), up.shape[1]) == (rank, rank)
        found[module] = alpha / (rank**0.5 if config.get("use_rslora") else rank) * up @ down
    bias = f"{PREFIX}model.fc1.lora_B.bias"
    rank, alpha = (config.get(key) for key in ("r", "lora_alpha"))
    rank = _named(config.get("rank_pattern") or {}, "model.fc1", rank)
    alpha = _named(config.get("alpha_pattern") or {}, "model.fc1", alpha)
    return found | {"bias": alpha / (rank**0.5 if config.get("use_rslora") else rank) * tensors[bias].double()}


@pytest.mark.parametrize("name", PAIRS)
def test_adapters_of_different_ranks_are_aligned(
    write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    """Each adapter keeps its function under the larger rank, which its configuration names."""
    monkeypatch.chdir(tmp_path)
    pair = PAIRS[name]
    for folder, ranks, config, seed in zip("ab", pair.ranks, pair.configs, (1, 2), strict=True):
        tensors: dict[str, Tensor] = {f"{PREFIX}model.fc1.lora_B.bias": torch.ones(8) * seed}
        for module, rank in ranks.items():
            tensors |= _linear(f"model.{module}", *SIDES[module], seed, rank)
        write(folder, tensors, **({"lora_alpha": 8} | config))
    largest = {module: max(ranks[module] for ranks in pair.ranks) for module in SIDES}
    for first, second in ("ab", "ba"):
        main(["align", first, second, "-o", f"{second}-aligned"])
        before, after = _changes(Path(second)), _changes(Path(f"{second}-aligned"))
        for module, change in before.items():
            torch.testing.assert_close(after[module], change, rtol=1e-5, atol=1e-5)
        for module, rank in largest.items():
            assert len(load(f"{second}-aligned")[f"{PREFIX}model.{module}.lora_A.weight"]) == rank
    assert Checkpoint.open("base.safetensors+b-aligned")["model.fc1.weight"].shape == (8, 6)


def test_an_adapter_is_found_in_one_of_a_larger_rank(
    write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The mean of an adapter and a transformed copy with larger rank is the adapter."""
    monkeypatch.chdir(tmp_path)
    generator, small, large = torch.Generator().manual_seed(4), dict[str, Tensor](), dict[str, Tensor]()
    for module, (out, inner) in SIDES.items():
        pair = _linear(f"model.{module}", out, inner, 3, 2)
        small |= pair
        mixed, (down, up) = _randn(generator, 4, 4) + torch.eye(4), pair
        rows, columns = torch.cat([pair[down], torch.zeros(2, inner)]), torch.cat([pair[up], torch.zeros(out, 2)], 1)
        large |= {down: mixed @ rows, up: columns @ torch.linalg.inv(mixed)}
    for folder, tensors, rank in (("a", small, 2), ("b", large, 4)):
        tensors[f"{PREFIX}model.fc1.lora_B.bias"] = torch.ones(8)
        write(folder, tensors, r=rank, lora_alpha=2 * rank)
    for first, second in ("ab", "ba"):
        main(["merge", first, second, "-o", f"{first}{second}"])
        one, two, found = (_changes(Path(folder)) for folder in (first, second, f"{first}{second}"))
        for module in SIDES:
            error = (found[module] - (one[module] + two[module]) / 2).norm() / one[module].norm()
            assert float(error) < 1e-5
    with pytest.raises(SystemExit):
        main(["align", "b", "a", "-o", "file.safetensors"])
    assert not Path("file.safetensors").exists()


@pytest.mark.parametrize("name", ["mixtral", "vit", "llava", "modernbert"])
def test_adapters_have_the_names_of_modules(write: Callable[..., Path], tmp_path: Path, name: str) -> None:
    """Files of these families use other names than the modules on which adapters are trained."""
    pytest.importorskip("transformers")
    from folder_cases import CASES

    model = CASES[name].save(tmp_path / "network", 0)
    state = model.state_dict()
    linear = [n for n, one in model.named_modules() if isinstance(one, torch.nn.Linear) and "head" not in n]
    chosen = linear[1:4]
    tensors: dict[str, Tensor] = {}
    for module in chosen:
        tensors |= _linear(module, *state[f"{module}.weight"].shape)
    folder = write("adapter", tensors)
    changed = Checkpoint.open(f"{tmp_path / 'network'}+{folder}")
    assert changed.keys() == load(tmp_path / "network").keys()
    for module in chosen:
        state[f"{module}.weight"] += (ALPHA / RANK * _product(tensors, module)).float()
    model.save_pretrained(tmp_path / "expected")
    expected = load(tmp_path / "expected")
    for key, tensor in expected.items():
        torch.testing.assert_close(changed[key], tensor, rtol=1e-5, atol=1e-5)
    assert sum(not torch.equal(tensor, load(tmp_path / "network")[key]) for key, tensor in expected.items()) == 3


def test_a_head_that_is_the_embedding_is_not_changed_alone(write: Callable[..., Path], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from folder_cases import CASES

    model = CASES["llama tied"].save(tmp_path / "network", 0)
    out, inner = model.lm_head.weight.shape
    folder = write("adapter", _linear("lm_head", out, inner))
    with pytest.raises(ValueError, match=r"'lm_head\.weight', which is also the embedding of its base"):
        Checkpoint.open(f"{tmp_path / 'network'}+{folder}")

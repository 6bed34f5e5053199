"""LoRA adapters transferred to another base: copies get exactly the adapter's change, in its rank and format."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transport_cases import CASES, Networks, chance, labels

import regauge as rg
from regauge.checkpoints.outputs.provenance import read_provenance
from regauge.cli.main import main
from regauge.merging.carried_adapter import probe

RANK = 2
PREFIX = "base_model.model."
KINDS = (nn.Linear, nn.Conv2d, nn.Embedding)


def factors(nets: Networks, *, seed: int = 7, size: float = 0.3, only: str = "") -> dict[str, Tensor]:
    """Return factors for every layer of a network, including layers whose weight is not a separate tensor."""
    g, made = chance(seed), dict[str, Tensor]()
    tied = {name for names in nets.symmetry.tied for name in names}
    for name, kind in nets.module.named_modules():
        weight = f"{name}.weight"
        if nets.name == "gpt" and name == "embedding" and not only:  # see the test of what has no place
            continue
        if not isinstance(kind, KINDS) or weight in tied or weight not in nets.base or not re.search(only, name):
            continue
        out, *rest = nets.base[weight].shape
        shapes = {"A.weight": (RANK, *rest), "B.weight": (out, RANK, *[1] * (len(rest) - 1))}
        if isinstance(kind, nn.Embedding):
            shapes = {"embedding_A": (RANK, out), "embedding_B": (*rest, RANK)}
        for key, shape in shapes.items():
            made[f"{PREFIX}{name}.lora_{key}"] = size * torch.randn(shape, generator=g, dtype=torch.float64)
    return made


def adapted(base: Mapping[str, Tensor], made: Mapping[str, Tensor], scale: float = 1.0) -> rg.Params:
    """Return a network with factors, computed by a second implementation."""
    result = dict(base)
    for name, down in made.items():
        if "lora_A" in name:
            key = name.removeprefix(PREFIX).replace("lora_A.", "")
            change = made[name.replace("lora_A", "lora_B")].flatten(1) @ down.flatten(1)
            result[key] = result[key] + scale * change.reshape(result[key].shape)
        elif "lora_embedding_A" in name:
            key = name.removeprefix(PREFIX).replace("lora_embedding_A", "weight")
            result[key] = result[key] + scale * (made[name.replace("embedding_A", "embedding_B")] @ down).T
        elif name.endswith("lora_B.bias"):
            key = name.removeprefix(PREFIX).replace("lora_B.", "")
            result[key] = result[key] + scale * down
    return result


@pytest.mark.parametrize("name", [name for name in CASES if name != "own parameters"])
def test_a_copy_in_another_gauge_gets_exactly_what_the_adapter_gives(name: str) -> None:
    nets = Networks(name)
    given = factors(nets)
    kept = {n: t.clone() for n, t in given.items()}
    wanted = nets.run(adapted(nets.base, given))
    assert (wanted - nets.run(nets.base)).abs().max() > 1e-2
    nets.tuned = adapted(nets.base, given)
    for mode, way in nets.ways().items():
        made = rg.transport(nets.base, given, nets.copy, nets.symmetry, **way)
        assert made.mode == mode
        assert made.scale == 1
        assert made.adapter is not None
        found = {n: t for n, t in made.adapter.items() if not n.endswith("lora_B.bias")}
        assert {n: (t.shape, t.dtype) for n, t in found.items()} == {n: (t.shape, t.dtype) for n, t in given.items()}
        is_rotated = any(note.startswith("rotated behind gains") for note in made.notes)
        tolerance = 1e-6 if is_rotated else 1e-9
        assert torch.allclose(nets.run(adapted(nets.copy, made.adapter)), wanted, atol=tolerance)
        assert torch.allclose(nets.run(made.params), wanted, atol=tolerance)
        assert "kept as an adapter" in str(made)
    verbatim = nets.run(adapted(nets.copy, given))
    assert (verbatim - wanted).abs().max() > 1e-2
    assert all(torch.equal(t, given[n]) for n, t in kept.items())


@pytest.mark.parametrize("name", ["relu", "batch norm", "gpt", "llama"])
def test_another_base_gets_the_change_of_the_network_in_its_rank(name: str) -> None:
    nets, other = Networks(name), Networks(name, seed=1)
    given = factors(nets)
    for way in ({}, {"inputs": nets.x, "module": nets.module}):
        small = rg.transport(nets.base, given, other.base, nets.symmetry, scale=0.7, **way)
        whole = rg.transport(nets.base, adapted(nets.base, given), other.base, nets.symmetry, scale=0.7, **way)
        assert (small.element is None) == (whole.element is None)
        for n, tensor in whole.params.items():
            assert torch.allclose(small.params[n], tensor, atol=1e-9), n
        assert small.adapter is not None
        again = adapted(other.base, small.adapter)
        assert all(torch.allclose(again[n], t, atol=1e-12) for n, t in small.params.items())


def test_training_changes_the_factors_alone() -> None:
    nets, other = Networks("gpt"), Networks("gpt", seed=1)
    given = factors(nets, only="query|value")
    nets.tuned = adapted(nets.base, given)
    task = labels(nets)
    start = rg.transport(nets.base, given, other.base, nets.symmetry, task=task)
    made = rg.transport(nets.base, given, other.base, nets.symmetry, task=task, steps=40)
    assert made.steps > 0
    assert made.adapter is not None
    assert task.evaluate(made.params)["loss"] < task.evaluate(start.params)["loss"]
    again = adapted(other.base, made.adapter)
    assert all(torch.allclose(again[n], t, atol=1e-12) for n, t in made.params.items())
    assert {n for n, t in made.params.items() if not torch.equal(t, other.base[n])} <= {
        n for n in nets.base if "query" in n or "value" in n
    }


@pytest.mark.parametrize("cuts", [[40], [1, 17, 40], [*range(1, 41)]])
@pytest.mark.parametrize("rank", [1, 3])
def test_factors_are_found_from_pieces_and_a_larger_rank_is_seen(rank: int, cuts: list[int]) -> None:
    g = chance(rank)
    up, down = (torch.randn(*shape, generator=g, dtype=torch.float64) for shape in ((40, rank), (rank, 25)))
    matrix = up @ down
    pieces = [matrix[i:j] for i, j in zip([0, *cuts[:-1]], cuts, strict=True)]
    left, right, lost = probe(pieces, rank)
    assert (left @ right - matrix).abs().max() < 1e-12 * matrix.abs().max()
    assert lost < 1e-20
    wider, tall, none = probe(pieces, rank + 2)
    assert (wider.shape, tall.shape) == ((40, rank + 2), (rank + 2, 25))
    assert (wider @ tall - matrix).abs().max() < 1e-12 * matrix.abs().max()
    more = [one + 1e-3 * torch.randn(one.shape, generator=g, dtype=torch.float64) for one in pieces]
    assert probe(more, rank)[2] > 1e-9
    assert not probe([torch.zeros(4, 3).double()], 2)[0].any()
    assert none < 1e-20


transformers = pytest.importorskip("transformers")

from folder_cases import SMALL, SMALL_LLAMA, logits, open_clean  # noqa: E402

SETTINGS = {"peft_type": "LORA", "r": RANK, "lora_alpha": 6, "init_lora_weights": True, "bias": "none"}
MODELS: dict[str, tuple[Any, Any, tuple[str, ...], bool]] = {
    "llama": (
        transformers.LlamaForCausalLM,
        transformers.LlamaConfig(**SMALL_LLAMA, tie_word_embeddings=False),
        ("q_proj", "v_proj", "o_proj", "down_proj"),
        False,
    ),
    "gpt2": (
        transformers.GPT2LMHeadModel,
        transformers.GPT2Config(**SMALL, n_embd=8, n_layer=2, n_head=2, n_positions=16),
        ("c_attn", "attn.c_proj", "c_fc"),
        True,
    ),
}


def place(folder: Path, name: str, **settings: Any) -> rg.Symmetry:
    """Return folders of a base "a", its copy in another gauge "copy", another base "b", and an adapter of "a"."""
    make, config, targets, is_turned = MODELS[name]
    for seed, part in enumerate("ab"):
        torch.manual_seed(seed)
        model = make(config).eval()
        with torch.no_grad():
            for tensor in model.parameters():
                tensor.add_(0.2 * torch.randn(tensor.shape))
        model.save_pretrained(folder / part, max_shard_size="4KB")
    symmetry = rg.open_model(folder / "a").symmetry
    model = open_clean(folder / "a")
    moved = symmetry.act(symmetry.random(chance(3)), {n: t.double() for n, t in model.state_dict().items()})
    model.load_state_dict(moved)
    model.double().save_pretrained(folder / "copy", max_shard_size="4KB")
    g, tensors = chance(4), dict[str, Tensor]()
    for module in [n for n, _ in model.named_modules() if n.endswith(targets)]:
        shape = model.state_dict()[f"{module}.weight"].shape[:: -1 if is_turned else 1]
        for key, size in (("A", (RANK, shape[1])), ("B", (shape[0], RANK))):
            tensors[f"{PREFIX}{module}.lora_{key}.weight"] = 0.2 * torch.randn(size, generator=g)
    (folder / "adapter").mkdir()
    save_file(tensors, folder / "adapter" / "adapter_model.safetensors", {"format": "pt"})
    own = {"target_modules": [*targets], "fan_in_fan_out": is_turned, "base_model_name_or_path": "a", **settings}
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(SETTINGS | own))
    return symmetry


def says(folder: Path, base: str, adapter: str) -> Tensor:
    """Return the outputs of a base with an adapter."""
    model = open_clean(folder / base).double()
    state = {n: t.double() for n, t in rg.load(f"{folder / base}+{folder / adapter}").items()}
    lacking, unknown = model.load_state_dict(state, strict=False)
    assert not unknown
    assert {*lacking} <= {"lm_head.weight"}  # tied
    return logits(model)


@pytest.mark.parametrize("where", ["in memory", "streamed"])
@pytest.mark.parametrize("name", MODELS)
def test_folders_of_adapters(name: str, where: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    symmetry = place(tmp_path, name)
    if where == "streamed":
        request.getfixturevalue("streamed")
    paths = [tmp_path / one for one in ("a", "adapter", "copy")]
    made = rg.transport(*paths, symmetry, out=tmp_path / "out", memory="200MB")
    wanted = says(tmp_path, "a", "adapter")
    found = says(tmp_path, "copy", "out")
    assert (wanted - says(tmp_path, "copy", "adapter")).abs().max() > 1e-2
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "adapter_model.safetensors", "adapter_config.json", "regauge.json"
    }  # fmt: skip
    tensors, given = rg.load(tmp_path / "out"), rg.load(tmp_path / "adapter")
    offsets = {n for n in tensors if n.endswith("lora_B.bias")}
    assert {n: (t.shape, t.dtype) for n, t in tensors.items() if n not in offsets} == {
        n: (t.shape, t.dtype) for n, t in given.items()
    }
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert bool(offsets) == config.get("lora_bias", False) == (name == "gpt2")
    before = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config | {"lora_bias": None, "base_model_name_or_path": "a"} == before | {"lora_bias": None}
    assert config["base_model_name_or_path"] == str(tmp_path / "copy")
    origin = read_provenance(tmp_path / "out")
    assert origin is not None
    assert [one["as"] for one in origin["inputs"]] == ["base_a", "tuned_a", "base_b"]
    assert made.adapter is not None
    assert all(torch.equal(t, tensors[n]) for n, t in made.adapter.items())
    whole = rg.load(f"{tmp_path / 'copy'}+{tmp_path / 'out'}")
    assert all(torch.allclose(made.params[n].double(), t.double(), atol=1e-6) for n, t in whole.items())
    with pytest.raises(FileExistsError):
        rg.transport(*paths, symmetry, out=tmp_path / "out", memory="200MB")


def test_the_command_keeps_an_adapter_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    symmetry = place(tmp_path, "llama")
    monkeypatch.chdir(tmp_path)
    main(["transport", "a", "adapter", "b", "--scale", "0.8", "-o", "out", "--json"])
    said = json.loads(capsys.readouterr().out)
    assert (said["scale"], said["is_element"]) == (0.8, True)
    networks = [rg.load(one) for one in ("a", "b")]
    expected = rg.transport(networks[0], Path("adapter"), networks[1], symmetry, scale=0.8).adapter
    assert expected is not None
    found = rg.load("out")
    assert found.keys() == expected.keys()
    for n in (n for n in expected if "lora_B" in n):
        down, again = n.replace("lora_B", "lora_A"), expected[n]
        torch.testing.assert_close(found[n] @ found[down], again @ expected[down], rtol=0, atol=1e-5)
    origin = read_provenance(Path("out"))
    assert origin is not None
    assert [(one["as"], one["path"]) for one in origin["inputs"]] == [
        ("base_a", "a"), ("tuned_a", "adapter"), ("base_b", "b")
    ]  # fmt: skip
    main(["transport", "a", "a+adapter", "b", "--scale", "0.8", "-o", "whole", "--json"])
    whole = rg.load("whole")
    torch.testing.assert_close(dict(rg.load("b+out")), dict(whole), rtol=0, atol=1e-5)
    capsys.readouterr()
    main(["transport", "a", "adapter", "b", "-o", "dry", "--dry-run", "--json"])
    assert [one["file"] for one in json.loads(capsys.readouterr().out)["files"]] == ["adapter_model.safetensors"]


@pytest.mark.parametrize(
    ("tensors", "settings", "sentence"),
    [
        ({}, {"use_dora": True}, "contains 'use_dora', whose effect depends on the base; give the fine-tune as BASE+"),
        ({"q_proj.lora_magnitude_vector": torch.ones(8)}, {}, "lora_magnitude_vector', whose effect depends on"),
        ({}, {"peft_type": "LOHA"}, "is of type LOHA, and has no factors of LORA"),
        ({"q_proj.lora_A.weight": torch.ones(3, 8)}, {}, "have shapes (3, 8) and (8, 2), which cannot be multiplied"),
        ({"nothing.lora_A.weight": torch.ones(2, 8), "nothing.lora_B.weight": torch.ones(8, 2)}, {}, "lacks"),
        ({"q_proj.lora_B.weight": torch.ones(9, 2)}, {}, "which has shape (8, 8) in the base, by another shape"),
    ],
)
def test_adapters_that_cannot_be_carried_are_refused(
    tensors: Mapping[str, Tensor], settings: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    symmetry = place(tmp_path, "llama", **settings)
    own = {n: t.clone() for n, t in rg.load(tmp_path / "adapter").items()}
    own |= {f"{PREFIX}model.layers.0.self_attn.{n}": t for n, t in tensors.items()}
    save_file(own, tmp_path / "adapter" / "adapter_model.safetensors", {"format": "pt"})
    networks = [rg.load(tmp_path / one) for one in "ab"]
    with pytest.raises(ValueError, match=re.escape(sentence)):
        rg.transport(networks[0], tmp_path / "adapter", networks[1], symmetry)
    with pytest.raises(ValueError):
        rg.transport(*(tmp_path / one for one in ("a", "adapter", "b")), symmetry, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_adapter_becomes_a_folder(tmp_path: Path) -> None:
    symmetry = place(tmp_path, "llama")
    paths = [tmp_path / one for one in ("a", "adapter", "b")]
    with pytest.raises(ValueError, match="is an adapter, so the output is a folder"):
        rg.transport(*paths, symmetry, out=tmp_path / "out.safetensors")
    with pytest.raises(ValueError, match="without a shard size"):
        rg.transport(*paths, symmetry, out=rg.Output(tmp_path / "out", shard_size="1KB"))
    with pytest.raises(ValueError, match="is an adapter, but others are networks"):
        rg.align(paths[0], paths[1], symmetry)


def test_what_has_no_place_in_an_adapter_is_named() -> None:
    nets = Networks("gpt")
    given = factors(nets, only="embedding")
    with pytest.raises(ValueError, match=r"'embedding\.weight' has rank 2 in base A and a larger one in base B"):
        rg.transport(nets.base, given, nets.copy, nets.symmetry)
    bias = "blocks.0.attention_norm.bias"
    given = factors(nets, only="out") | {f"{PREFIX}{bias}": nets.base[bias] + 0.3}
    with pytest.raises(ValueError, match=r"also changes .*'blocks\.0\.attention\.key\.bias'.* which it cannot store"):
        rg.transport(nets.base, given, nets.copy, nets.symmetry)
    tied = Networks("tied gpt")
    own = {n.replace("head", "embedding"): t for n, t in factors(nets, only="head").items()}
    own = {n.replace("lora_A.weight", "lora_embedding_B"): t.T for n, t in own.items() if "lora_A" in n} | {
        n.replace("lora_B.weight", "lora_embedding_A"): t.T for n, t in own.items() if "lora_B" in n
    }
    with pytest.raises(ValueError, match=r"changes 'embedding\.weight', which is also 'head\.weight' of its base"):
        rg.transport(tied.base, own, tied.copy, tied.symmetry)


def test_tensors_that_an_adapter_stores_as_a_whole_are_carried() -> None:
    nets = Networks("relu")
    given = factors(nets, only="2") | {f"{PREFIX}4.weight": nets.base["4.weight"] + 0.3}
    given |= {f"{PREFIX}2.base_layer.bias": nets.base["2.bias"] - 0.2}
    wanted = adapted(nets.base, given) | {"4.weight": nets.base["4.weight"] + 0.3, "2.bias": nets.base["2.bias"] - 0.2}
    made = rg.transport(nets.base, given, nets.copy, nets.symmetry)
    assert torch.allclose(nets.run(made.params), nets.run(wanted), atol=1e-9)
    assert made.adapter is not None
    assert made.adapter.keys() == given.keys()
    assert torch.equal(made.adapter[f"{PREFIX}4.weight"], made.params["4.weight"])

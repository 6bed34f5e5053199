"""Folders of many transformers families on the command line: the written folders load and compute the same function."""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

transformers = pytest.importorskip("transformers")

from folder_cases import CASES, LOOPS, MIXTURES, SMALL_LLAMA, FolderCase, first_tensor, open_clean  # noqa: E402

import regauge as rg  # noqa: E402
from regauge.checkpoints.checkpoint import Checkpoint, load  # noqa: E402
from regauge.checkpoints.names.from_transformers import name_by  # noqa: E402
from regauge.checkpoints.writing import save  # noqa: E402
from regauge.cli.main import main  # noqa: E402
from regauge.core.params import Params  # noqa: E402
from regauge.hub import Model, open_model  # noqa: E402

IN_CI = (
    *("llama tied", "gpt2", "gpt neox", "mamba", "deberta", "t5", "wav2vec2", "whisper"),
    *("vit", "swin", "resnet", "clip", "llava", "videomae", "granite speech"),
    *("mixtral", "deepseek v3", "gpt oss", "jamba", "switch", "dbrx", "jetmoe"),
)
"""Every kind of files (tied, transposed, fused, renamed, stacked, split), of inputs, and of experts."""
ALIKE = (
    *("mistral", "qwen2", "qwen3", "phi", "phi3", "bloom", "opt", "cohere", "stablelm", "olmo2", "granite", "gpt neox"),
    *("mamba", "bert", "roberta", "electra", "deberta", "deit", "beit", "dinov2", "clip", "siglip", "llava", "blip2"),
    *("qwen2 moe", "qwen3 moe", "olmoe", "granite moe", "phimoe", "hunyuan", "flex olmo", "dbrx", "jetmoe", "fnet"),
    *("videomae", "vivit", "timesformer", "spectra"),
)
"""Families whose layers are of one kind. One layer is enough, because other families of the kind have two (Llama, ViT,
Mixtral)."""

Aligned = Callable[[str], tuple[Path, Any]]
"""A function that returns the folder of a family by its name, and the saved second network."""


def in_suite(names: Collection[str]) -> list[Any]:
    """Return cases in the order of all families, some of which run in CI."""
    return [pytest.param(name, marks=() if name in IN_CI else pytest.mark.thorough, id=name) for name in names]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def of_one_layer(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a model and of its parts, with one layer."""
    counts = ("num_hidden_layers", "n_layers", "n_layer")
    return {
        name: of_one_layer(value) if isinstance(value, dict) else 1 if name in counts else value
        for name, value in settings.items()
    }


def outputs(model: torch.nn.Module, example: Model) -> Tensor:
    """Return the outputs of a model for example inputs."""
    with torch.no_grad():
        return first_tensor(model(*example.inputs, **(example.kwargs or {})))


@pytest.fixture(scope="module")
def aligned(tmp_path_factory: pytest.TempPathFactory) -> Aligned:
    """Align two networks of a family, once. Return a folder with `one`, `two` and `aligned`, and the second network."""
    known: dict[str, tuple[Path, Any]] = {}

    def run(name: str) -> tuple[Path, Any]:
        if name not in known:
            folder = tmp_path_factory.mktemp("family")
            case = CASES[name]
            if name in ALIKE:
                case = replace(case, settings=of_one_layer(case.settings))
            case.save(folder / "one", 0)
            second = case.save(folder / "two", 1, shard="4KB")
            before = (folder / "one/config.json").read_bytes()
            main(["align", str(folder / "one"), str(folder / "two"), "-o", str(folder / "aligned")])
            assert (folder / "one/config.json").read_bytes() == before
            known[name] = folder, second
        return known[name]

    return run


@pytest.mark.parametrize("name", in_suite(CASES))
def test_aligned_folders_load_and_compute_the_same(name: str, aligned: Aligned) -> None:
    """The output has the files, names, shapes and dtypes of B, a clean load report, and B's outputs up to rounding."""
    folder, second = aligned(name)
    loaded = open_clean(folder / "aligned", getattr(transformers, CASES[name].model))
    example = open_model(str(folder / "two"), values="always")
    expected, found = (outputs(model, example) for model in (second, loaded))
    assert float((found - expected).abs().max()) < 1e-5 * float(expected.abs().max())
    source, written = Checkpoint.open(folder / "two"), Checkpoint.open(folder / "aligned")
    assert [(n, t.file.name, t.shape, t.dtype) for n, t in source.stored.items()] == [
        (n, t.file.name, t.shape, t.dtype) for n, t in written.stored.items()
    ]
    assert any(not torch.equal(source.read(n), written.read(n)) for n in source)
    for file in {t.file for t in written.stored.values()}:
        with safe_open(file, "pt") as opened:
            assert opened.metadata()["format"] == "pt"


def symmetry_of(folder: Path) -> rg.Symmetry:
    """Return the symmetry with which the networks of a folder were aligned, from the cache."""
    return open_model(folder / "one").symmetry


@pytest.mark.parametrize("name", in_suite(MIXTURES))
def test_experts_and_their_hidden_units_are_reordered(name: str, aligned: Aligned) -> None:
    """A mixture in a folder is traced without frozen groups: experts can be permuted, and units within each expert."""
    found = symmetry_of(aligned(name)[0])
    assert not found.unknown
    on_experts = [g for g in found.groups if any("expert" in p.parameter for p in g.placements)]
    experts = {g.name for g in on_experts if g.is_permuted and any(p.axis == 0 for p in g.placements)}
    assert any(g.is_permuted and experts & set(g.within) for g in on_experts), str(found)


ONE_ORDER = ("longcat", "jetmoe")
"""Mixtures for which discovery finds one common order of the hidden units of all experts."""


@pytest.mark.parametrize("name", in_suite(LOOPS))
def test_hidden_units_of_experts_in_a_loop_are_reordered(name: str, aligned: Aligned) -> None:
    """Loops over chosen experts are traced as loops over all experts, so units can be permuted separately in each
    expert.

    If a router with an open order selects rows of one tensor, discovery finds fewer permutations than exist: one for
    all experts.
    """
    found = symmetry_of(aligned(name)[0])
    inside = [g for g in found.groups if g.is_permuted and all("experts" in p.parameter for p in g.placements)]
    assert inside, str(found)
    assert name in ONE_ORDER or len(inside) % 4 == 0, str(found)


@pytest.mark.parametrize("name", ["mixtral", pytest.param("switch", marks=pytest.mark.thorough)])
def test_discover_finds_the_groups_by_which_folders_are_aligned(name: str, aligned: Aligned) -> None:
    """Both commands trace the model, and the configuration does not change."""
    folder, _ = aligned(name)
    before = (folder / "one/config.json").read_bytes()
    main(["discover", str(folder / "one"), "-o", "found.json"])
    found = rg.Symmetry.from_json(Path("found.json").read_text(encoding="utf-8"))
    assert found.groups == symmetry_of(folder).groups
    assert (folder / "one/config.json").read_bytes() == before


def old_norms(params: Params) -> Params:
    names = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    return {next((n.replace(a, b) for a, b in names.items() if a in n), n): t for n, t in params.items()}


def with_positions(params: Params) -> Params:
    return {f"bert.{n}": t for n, t in params.items()} | {"bert.embeddings.position_ids": torch.arange(32)[None]}


BERT = replace(CASES["bert"], settings=of_one_layer(CASES["bert"].settings))
LLAMA = FolderCase("LlamaForCausalLM", "LlamaConfig", of_one_layer(SMALL_LLAMA) | {"num_attention_heads": 2})
"""The smallest model, for tests that do not depend on layers and heads."""
OLD: dict[str, tuple[FolderCase, str, Callable[[Params], Params]]] = {
    "names of norms": (BERT, "BertForMaskedLM", old_norms),
    "a prefix, and a buffer": (replace(BERT, model="BertModel"), "BertModel", with_positions),
    "another head": (replace(BERT, model="BertForPreTraining"), "BertForMaskedLM", dict),
    "tied, stored twice": (
        replace(LLAMA, settings=LLAMA.settings | {"tie_word_embeddings": True}),
        "LlamaForCausalLM",
        lambda params: params | {"lm_head.weight": params["model.embed_tokens.weight"]},
    ),
    "frequencies": (
        LLAMA,
        "LlamaForCausalLM",
        lambda params: params | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.rand(2)},
    ),
}


@pytest.mark.parametrize("name", OLD)
def test_what_from_pretrained_understands_is_understood(name: str) -> None:
    """B has old names, or more tensors than its class. The output has the same, and no head is lost."""
    case, used, change = OLD[name]
    case.save(Path("one"), 0)
    case.save(Path("two"), 1)
    for folder in ("one", "two"):
        config = json.loads(Path(folder, "config.json").read_text())
        Path(folder, "config.json").write_text(json.dumps(config | {"architectures": [used]}))
    save(change(load("two")), "two/model.safetensors", overwrite=True, metadata={"format": "pt"})
    main(["align", "one", "two", "-o", "aligned"])
    assert list(Checkpoint.open("aligned")) == list(Checkpoint.open("two"))
    before, after = (getattr(transformers, case.model).from_pretrained(f).eval() for f in ("two", "aligned"))
    example = open_model("two", values="always")
    expected = outputs(before, example)
    assert float((outputs(after, example) - expected).abs().max()) < 1e-5 * float(expected.abs().max())
    main(["apply", "aligned", "two", "-o", "again"])
    for tensor, other in zip(load("again").values(), load("aligned").values(), strict=True):
        torch.testing.assert_close(tensor, other)


def test_paths_of_folders_are_named_by_the_symmetry() -> None:
    """Calls from Python accept paths of folders, although the symmetry names stacked experts, and the files separate
    experts.
    """
    for seed, folder in enumerate(("one", "two")):
        replace(CASES["mixtral"], settings=of_one_layer(CASES["mixtral"].settings)).save(Path(folder), seed)
    model = open_model("one", values="never")
    symmetry = rg.discover(model.module, model.inputs, model.kwargs)
    found = rg.align("one", "two", symmetry, out="aligned")
    assert list(Checkpoint.open("aligned")) == list(Checkpoint.open("two"))
    moved = symmetry.act(found.element, name_by(Checkpoint.open("two"), symmetry).params)
    for name, tensor in moved.items():
        torch.testing.assert_close(found.params[name], tensor)
    merged = rg.merge(["one", "two"], symmetry, out="merged.safetensors")
    assert load("merged.safetensors").keys() == load("two").keys()
    assert set(merged.params) >= set(symmetry.sites)


SHARED = torch.arange(12.0).reshape(3, 4)


def save_with_extra() -> tuple[Params, Params]:
    """Save two folders with tensors that no class has: equal, different, integers, only in the first, only in the
    second.
    """
    extra = []
    for seed, folder in enumerate(("one", "two")):
        LLAMA.save(Path(folder), seed)
        own = {"model.same": SHARED, "model.other": torch.rand(700, 600), "model.codes": torch.full((3,), seed)}
        own[f"model.only.{folder}"] = torch.rand(2, 3).to(torch.bfloat16)
        extra.append(own)
        save(load(folder) | own, f"{folder}/model.safetensors", overwrite=True, metadata={"format": "pt"})
    return extra[0], extra[1]


def require_extra(folder: str, first: Params) -> None:
    """Assert that the output contains the equal tensors, and the tensors of the first network."""
    found = load(folder)
    assert found.keys() - first.keys() == load("plain").keys()
    for name, tensor in first.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("command", ["align", "merge"])
def test_tensors_that_no_class_has_are_those_of_the_first_network(
    command: str, is_streamed: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For tensors without a class, the transformation is unknown, but the first network's tensors fit the aligned
    network. Each tensor is reported by name.
    """
    if is_streamed:
        monkeypatch.setattr("regauge.checkpoints.job.FileJob.is_streamed", True)
    first, second = save_with_extra()
    LLAMA.save(Path("plain"), 0)
    main([command, "one", "two", "-o", "out", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert ("working_sets" in told) == is_streamed
    notes = told["notes"]
    assert "the model has no 'model.same', which is the same in all networks and copied without changes" in notes
    differing = "'model.codes', 'model.only.one', 'model.other'"
    assert f"the model has no {differing}, which are copied from one without changes" in notes
    assert "left out: 'model.only.two' of two, which neither the model nor one has" in notes
    require_extra("out", first)
    if command == "merge":
        card = Path("out/regauge.md").read_text()
        assert all(note in card for note in notes if "known from an earlier run" not in note)
    report = transformers.AutoModelForCausalLM.from_pretrained("out", output_loading_info=True)[1]
    assert set(report.pop("unexpected_keys")) == first.keys()
    assert not any(report.values())
    if command == "align":
        main(["apply", "out", "two", "-o", "again"])
        left = "the model has no 'model.codes', 'model.only.two', 'model.other', 'model.same', which are copied"
        assert left in capsys.readouterr().out
        require_extra("again", second)


def test_extra_tensors_of_shards_and_other_dtypes(capsys: pytest.CaptureFixture[str]) -> None:
    """Tensors that only the second network has are dropped, even if the first network has no extra tensor; from Python,
    and shard by shard.
    """
    for seed, folder in enumerate(("one", "two")):
        LLAMA.save(Path(folder), seed, shard="1kB")
    index = json.loads(Path("two/model.safetensors.index.json").read_text())
    file = index["weight_map"]["model.norm.weight"]
    save(load_file(Path("two", file)) | {"model.extra": SHARED}, Path("two", file), overwrite=True)
    index["weight_map"]["model.extra"] = file
    Path("two/model.safetensors.index.json").write_text(json.dumps(index))
    main(["align", "one", "two", "-o", "out", "--dtype", "bfloat16"])
    assert "left out: 'model.extra' of two, which neither the model nor one has" in capsys.readouterr().out
    assert load("out").keys() == load("one").keys()
    main(["align", "two", "one", "-o", "back", "--dtype", "bfloat16"])
    assert torch.equal(load("back")["model.extra"], SHARED.to(torch.bfloat16))
    model = open_model("one", values="never")
    found = rg.align("two", "one", rg.discover(model.module, model.inputs, model.kwargs), out="python")
    assert "the model has no 'model.extra', which is copied from two without changes" in found.notes
    assert torch.equal(load("python")["model.extra"], SHARED)


def test_needed_tensors_are_missed_beside_extra_ones(capsys: pytest.CaptureFixture[str]) -> None:
    """A network of another kind is not treated as a network with extra tensors."""
    save_with_extra()
    params = {name: tensor for name, tensor in load("two").items() if name != "model.norm.weight"}
    save(params, "two/model.safetensors", overwrite=True)
    with pytest.raises(SystemExit):
        main(["align", "one", "two", "-o", "out"])
    assert "two lacks 'model.norm.weight', which the model has" in capsys.readouterr().err
    assert not Path("out").exists()

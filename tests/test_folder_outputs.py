"""Every command that writes a network writes a folder that transformers loads, for inputs that are folders or files."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from coverings import covering

from regauge.checkpoints.checkpoint import Checkpoint, load
from regauge.cli.main import main
from regauge.merging import RULES

transformers = pytest.importorskip("transformers")

from folder_cases import SMALL_LLAMA, logits, open_clean  # noqa: E402

BATCHES = """
import torch


def batches():
    tokens = torch.randint(3, 24, (4, 6), generator=torch.Generator().manual_seed(0))
    return [(tokens, tokens)]
"""


def model(seed: int, layers: int = 1) -> Any:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(**SMALL_LLAMA | {"num_hidden_layers": layers}, tie_word_embeddings=False)
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a base and two similar networks, in shards, with files next to the weights."""
    folder = tmp_path_factory.mktemp("folders")
    base, *others = (model(seed) for seed in range(3))
    for other in others:
        with torch.no_grad():
            for own, start in zip(other.parameters(), base.parameters(), strict=True):
                own.copy_(start + 0.3 * own)
    for name, one in zip(("base", "one", "two"), (base, *others), strict=True):
        one.save_pretrained(folder / name, max_shard_size="2KB")
        (folder / name / "tokenizer_config.json").write_text("{}")
    (folder / "mydata.py").write_text(BATCHES)
    return folder


@pytest.fixture(autouse=True)
def _here(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("base", "one", "two"):
        (tmp_path / name).symlink_to(made / name)
    shutil.copy(made / "mydata.py", tmp_path)
    monkeypatch.chdir(tmp_path)


def require_same_form(folder: str, source: str) -> None:
    """Assert that the shards, the index and all other files equal those of the source."""
    assert {p.name for p in Path(source).iterdir()} - {"regauge.md"} <= {p.name for p in Path(folder).iterdir()}
    written, known = Checkpoint.open(folder), Checkpoint.open(source)
    assert [(n, t.file.name, t.dtype) for n, t in written.stored.items()] == [
        (n, t.file.name, t.dtype) for n, t in known.stored.items()
    ]


def options_of(rule: str) -> list[str]:
    kind = RULES[rule].classes[0]
    options = ["--rule", rule, *(["--base", "base"] if kind.base == "needed" else [])]
    return options + (["--data", "mydata.py:batches", "--outputs", "logits"] if kind.needs_task else [])


STREAMABLE = [rule for rule in RULES if not RULES[rule].classes[0].needs_task]
"""Rules that do not need the networks in memory."""
EVERY_RULE = [
    *covering(STREAMABLE, ["in memory", "streamed"], of=2),
    *((rule, "in memory") for rule in RULES if rule not in STREAMABLE),
]


@pytest.mark.parametrize(("rule", "where"), EVERY_RULE)
def test_every_rule_writes_a_folder(rule: str, where: str, request: pytest.FixtureRequest) -> None:
    kind = RULES[rule].classes[0]
    if where == "streamed":
        request.getfixturevalue("streamed")
    networks = ["one", "two"][: kind.most]
    main(["merge", *networks, *options_of(rule), "-o", "merged"])
    require_same_form("merged", "base" if kind.base == "needed" else "one")
    assert (Path("merged") / "regauge.md").read_text().startswith("# Merged network")
    parts, state, one = load("merged"), open_clean("merged").state_dict(), load("one")
    assert all(torch.equal(tensor, state[name]) for name, tensor in parts.items())
    changed = any(not torch.equal(tensor, one[name]) for name, tensor in parts.items())
    assert changed or rule in ("passthrough", "greedy")
    if where == "in memory":
        main(["merge", *networks, *options_of(rule), "-o", "merged.safetensors"])
        assert all(torch.equal(tensor, parts[name]) for name, tensor in load("merged.safetensors").items())


@pytest.mark.parametrize("where", ["in memory", "streamed"])
def test_moved_folders_compute_what_they_computed(where: str, request: pytest.FixtureRequest) -> None:
    main(["canonicalize", "two", "-o", "canonical"])  # in memory in both cases
    if where == "streamed":
        request.getfixturevalue("streamed")
    expected = logits(open_clean("two"))
    main(["align", "one", "two", "-o", "aligned"])
    main(["apply", "aligned", "two", "-o", "applied"])
    main(["apply", "aligned", "applied", "--inverse", "-o", "back"])
    for folder in ("aligned", "applied", "back", "canonical"):
        require_same_form(folder, "two")
        torch.testing.assert_close(logits(open_clean(folder)), expected, rtol=0, atol=1e-5)
    for name, tensor in load("applied").items():
        torch.testing.assert_close(tensor, load("aligned")[name])
        torch.testing.assert_close(load("back")[name], load("two")[name])
    assert any(not torch.equal(t, load("two")[n]) for n, t in load("canonical").items())
    main(["apply", "canonical", "two", "-o", "again"])
    for name, tensor in load("again").items():
        torch.testing.assert_close(tensor, load("canonical")[name])


def test_a_repaired_folder_loads() -> None:
    main(["merge", "one", "two", "-o", "merged"])
    data = ["--data", "mydata.py:batches", "--outputs", "logits"]
    main(["repair", "merged", "--endpoints", "one", "two", "--align", *data, "-o", "repaired"])
    require_same_form("repaired", "merged")
    assert not torch.equal(logits(open_clean("repaired")), logits(open_clean("merged")))


def test_files_become_folders_and_folders_files() -> None:
    """A file next to a configuration includes the files of its folder. Sharded torch files get names of safetensors."""
    network = open_clean("two")
    Path("plain").mkdir()
    shutil.copy("two/config.json", "plain")
    state = network.state_dict()
    torch.save(state, "plain/pytorch_model.bin")
    main(["align", "one", "plain", "-o", "aligned"])
    assert {p.name for p in Path("aligned").iterdir()} == {
        "config.json", "model.safetensors", "regauge.alignment.safetensors", "regauge.json"
    }  # fmt: skip
    torch.testing.assert_close(logits(open_clean("aligned")), logits(network), rtol=0, atol=1e-5)
    main(["apply", "aligned", "aligned/model.safetensors", "--inverse", "-o", "back"])
    torch.testing.assert_close(logits(open_clean("back")), logits(network), rtol=0, atol=1e-5)
    main(["canonicalize", "two", "-o", "one.safetensors"])
    assert load("one.safetensors").keys() == load("two").keys()


def test_sharded_torch_files_become_a_folder_of_safetensors() -> None:
    import json

    state = open_clean("two").state_dict()
    Path("plain").mkdir()
    shutil.copy("two/config.json", "plain")
    names = list(state)
    weight_map = {}
    for k in range(2):
        file, own = f"pytorch_model-0000{k + 1}-of-00002.bin", names[k::2]
        torch.save({name: state[name] for name in own}, f"plain/{file}")
        weight_map |= dict.fromkeys(own, file)
    Path("plain/pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    main(["merge", "plain", "one", "-o", "merged"])
    found = {p.name for p in Path("merged").iterdir() if "safetensors" in p.name or p.suffix == ".bin"}
    assert found == {"model.safetensors.index.json", *(f"model-0000{k}-of-00002.safetensors" for k in (1, 2))}
    open_clean("merged")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["merge", "one"], "there is only one checkpoint, but --rule average combines several"),
        (["merge", "one", "--rule", "karcher"], "there is only one checkpoint, but --rule karcher combines several"),
        (["merge", "one", "two", "base", "--rule", "slerp"], "takes two networks, but there are 3"),
        (["merge", "one", "two", "--rule", "della"], "--rule della combines differences from a base checkpoint"),
        (["merge", "one", "two", "--epsilon", "0.1"], "--rule della, della-linear; average does not use it"),
        (["merge", "one", "two", "--normalize", "yes"], "--normalize is for --rule task-arithmetic, ties, dare"),
        (["merge", "one", "two", "--weights", "1", "mlp=2"], "the setting 'mlp=2' cannot be read"),
        (["merge", "one", "two", "--weights", "1"], "give one finite weight for each"),
        (["align", "one", "two", "-o", "out.bin"], "'out.bin' must end in .safetensors, or be the name of a folder"),
        (["canonicalize", "one", "--memory", "10kB"], "canonicalizing needs all values in memory, in float64, which"),
    ],
)
def test_what_cannot_be_done_says_why(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([*arguments, *([] if "-o" in arguments else ["-o", "out"])])
    assert stop.value.code == 2
    assert sentence in capsys.readouterr().err
    assert not [path for path in Path().iterdir() if path.name.startswith("out")]


def test_settings_per_layer_and_module_on_the_command_line() -> None:
    for seed, name in enumerate(("left", "right")):
        model(seed, layers=2).save_pretrained(name)
    main(["merge", "left", "right", "--weights", "1,0", "mlp=1/0,1", "-o", "merged"])
    a, merged = load("left"), load("merged")
    for name in ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "lm_head.weight"):
        assert torch.equal(merged[name], a[name])
    assert not torch.equal(merged["model.layers.0.mlp.up_proj.weight"], a["model.layers.0.mlp.up_proj.weight"])
    assert "| mlp=1/0,1 |" in Path("merged/regauge.md").read_text()


def test_an_interrupted_run_in_memory_leaves_nothing_in_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    from regauge.checkpoints.outputs import staging

    def stop(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(staging.Staging, "publish", stop)
        with pytest.raises(SystemExit):
            main(["canonicalize", "two", "-o", "canonical"])
    assert not Path("canonical").exists()
    main(["canonicalize", "two", "-o", "canonical"])
    open_clean("canonical")
    assert not Path("canonical.partial").exists()

"""Adapters extracted from two networks: the closest change of a given rank, without other losses."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import regauge as rg
from regauge.checkpoints.checkpoint import Checkpoint, load
from regauge.core.progress import Advance

transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": 24}


def llama(**own: Any) -> Any:
    torch.manual_seed(0)
    settings = {"max_position_embeddings": 16, "tie_word_embeddings": False, "attention_bias": True}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES | settings | own)).double().eval()


def tune(model: Any, place: Path, name: str, rank: int | None = None, *, parts: str = "") -> None:
    """Write a network whose tensors with a given piece of a name differ, where matrices differ by a low-rank change if
    a rank is given.
    """
    generator = torch.Generator().manual_seed(3)
    state = {}
    for key, tensor in model.state_dict().items():
        change = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        if rank is not None and tensor.ndim == 2 and "embed" not in key:
            left, right = (torch.randn(n, rank, generator=generator, dtype=torch.float64) for n in tensor.shape)
            change = left @ right.T
        state[key] = tensor + 0.1 * change if parts in key else tensor.clone()
    model.load_state_dict(state)
    model.save_pretrained(place / name)


@pytest.fixture(name="place")
def _place(tmp_path: Path) -> Path:
    model = llama()
    model.save_pretrained(tmp_path / "base")
    tune(model, tmp_path, "tuned")
    return tmp_path


def test_at_full_rank_the_sum_is_the_tuned_network(place: Path) -> None:
    made = rg.merging.extract_adapter(place / "base", place / "tuned", place / "adapter", rank=100)
    found, tuned = Checkpoint.open(f"{place / 'base'}+{place / 'adapter'}"), load(place / "tuned")
    assert found.keys() == tuned.keys()
    for name, tensor in tuned.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-12)
    assert made.left < 1e-12
    assert {one.rank for one in made.modules} == {8}
    assert "model.norm.weight" in made.whole
    assert "model.layers.0.self_attn.q_proj.bias" in made.whole


@pytest.mark.parametrize("rank", [1, 3])
def test_the_change_is_the_closest_of_its_rank(place: Path, rank: int) -> None:
    made = rg.merging.extract_adapter(place / "base", place / "tuned", place / "adapter", rank=rank)
    found = Checkpoint.open(f"{place / 'base'}+{place / 'adapter'}")
    base, tuned = load(place / "base"), load(place / "tuned")
    for one in made.modules:
        name = f"{one.name}.weight"
        values = torch.linalg.svdvals(tuned[name] - base[name])
        missed = (found[name] - tuned[name]).square().sum()
        torch.testing.assert_close(missed, values[rank:].square().sum())
        assert one.left == pytest.approx(float(missed / values.square().sum()))
        assert int(torch.linalg.matrix_rank(found[name] - base[name], rtol=1e-9)) == one.rank == rank
    assert f"in rank {rank}, which lose at most" in str(made)


def test_a_low_rank_change_comes_back_in_its_rank(tmp_path: Path) -> None:
    model = llama()
    model.save_pretrained(tmp_path / "base")
    tune(model, tmp_path, "tuned", 2, parts="proj.weight")
    made = rg.merging.extract_adapter(tmp_path / "base", tmp_path / "tuned", tmp_path / "one", least=1e-9)
    assert {one.rank for one in made.modules} == {2}
    assert made.whole == ()
    config = json.loads((tmp_path / "one" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["bias"], config["modules_to_save"]) == (2, 2, "none", None)
    found, tuned = Checkpoint.open(f"{tmp_path / 'base'}+{tmp_path / 'one'}"), load(tmp_path / "tuned")
    for name, tensor in tuned.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-12)


def test_matrices_that_are_stored_the_other_way_around(tmp_path: Path) -> None:
    config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, n_positions=8, vocab_size=16)
    model = transformers.GPT2LMHeadModel(config).double()
    model.save_pretrained(tmp_path / "base")
    tune(model, tmp_path, "tuned", parts="h.0")
    rg.merging.extract_adapter(tmp_path / "base", tmp_path / "tuned", tmp_path / "adapter", rank=8)
    found, tuned = Checkpoint.open(f"{tmp_path / 'base'}+{tmp_path / 'adapter'}"), load(tmp_path / "tuned")
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["fan_in_fan_out"]
    for name, tensor in tuned.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-12)


def test_the_model_of_files_is_named_and_progress_is_shown(place: Path) -> None:
    (place / "net.py").write_text(
        "import transformers\n\ndef make():\n"
        f"    config = transformers.AutoConfig.from_pretrained({str(place / 'base')!r})\n"
        "    return transformers.LlamaForCausalLM(config), ()\n"
    )
    done: dict[str, list[float]] = {}

    def progress(label: str, total: float, /) -> Advance:
        done[label] = [0, total]

        def advance(amount: float = 1) -> None:
            done[label][0] += amount

        return advance

    files = [place / name / "model.safetensors" for name in ("base", "tuned")]
    made = rg.merging.extract_adapter(
        *files, place / "named", rank=2, model=f"{place / 'net.py'}:make", progress=progress
    )
    again = rg.merging.extract_adapter(place / "base", place / "tuned", place / "adapter", rank=2)
    assert made.modules == again.modules
    assert made.whole == again.whole
    assert done["extracting"][0] == done["extracting"][1] == len(load(place / "tuned"))


def test_what_cannot_be_extracted_is_refused(place: Path) -> None:
    extract = rg.merging.extract_adapter
    with pytest.raises(ValueError, match="are equal; there is nothing to extract"):
        extract(place / "base", place / "base", place / "adapter")
    with pytest.raises(ValueError, match=r"rank is 0 and least 0\.0; a rank is positive"):
        extract(place / "base", place / "tuned", place / "adapter", rank=0)
    with pytest.raises(ValueError, match="is one file, but an adapter is a folder"):
        extract(place / "base", place / "tuned", place / "adapter.safetensors")
    alone = place / "base" / "model.safetensors"
    with pytest.raises(ValueError, match="is unknown: name it with `model=`"):
        extract(alone.rename(place / "alone.safetensors"), place / "tuned", place / "adapter")
    (place / "alone.safetensors").rename(alone)
    llama(num_hidden_layers=1).save_pretrained(place / "short")
    with pytest.raises(ValueError, match="have different tensors; an adapter changes one architecture"):
        extract(place / "base", place / "short", place / "adapter")
    llama(vocab_size=25).save_pretrained(place / "wide")
    with pytest.raises(ValueError, match=r"has shape \(24, 8\) in .*base"):
        extract(place / "base", place / "wide", place / "adapter")
    model = llama(tie_word_embeddings=True)
    model.save_pretrained(place / "tied")
    tune(model, place, "tied_tuned")
    with pytest.raises(ValueError, match=r"is one tensor with 'lm_head\.weight': no adapter can change both"):
        extract(place / "tied", place / "tied_tuned", place / "adapter")
    assert not (place / "adapter").exists()
    extract(place / "base", place / "tuned", place / "adapter")
    with pytest.raises(FileExistsError, match="exists"):
        extract(place / "base", place / "tuned", place / "adapter")


def test_the_law_of_a_planted_adapter(tmp_path: Path) -> None:
    """An adapter that was merged into its base is extracted as the same change."""
    model = llama()
    model.save_pretrained(tmp_path / "base")
    tune(model, tmp_path, "tuned", 2, parts="q_proj.weight")
    first = rg.merging.extract_adapter(tmp_path / "base", tmp_path / "tuned", tmp_path / "one", rank=2)
    changed: dict[str, Tensor] = {}
    for folder in ("one",):
        found = Checkpoint.open(f"{tmp_path / 'base'}+{tmp_path / folder}")
        changed = {name: found[name] for name in found}
    model.load_state_dict(changed)
    model.save_pretrained(tmp_path / "merged")
    second = rg.merging.extract_adapter(tmp_path / "base", tmp_path / "merged", tmp_path / "two", rank=2)
    assert [one.name for one in first.modules] == [one.name for one in second.modules]
    one, two = load(tmp_path / "one"), load(tmp_path / "two")
    for name in one:
        if "lora_A" in name:
            up = name.replace("lora_A", "lora_B")
            torch.testing.assert_close(one[up] @ one[name], two[up] @ two[name], rtol=0, atol=1e-12)

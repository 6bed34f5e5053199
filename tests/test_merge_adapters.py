"""Adapters are merged by their changes: the result makes the change that the rule computes from the changes."""

import json
from collections.abc import Mapping, Sequence
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
from regauge.merging import Average, Rule, Slerp, TaskArithmetic, Ties, WeightedSum, merge_adapters
from regauge.merging.rule import Target

PREFIX = "base_model.model."
SHAPES = {"layers.0.up": (9, 7), "layers.1.up": (9, 7), "conv": (5, 4, 3, 3), "embed": (12, 6)}


def draw(seed: int, ranks: Mapping[str, int]) -> dict[str, Tensor]:
    """Return the tensors of a random adapter, in float64."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for module, rank in ranks.items():
        out, *inner = SHAPES[module]
        down = torch.randn(rank, *inner, generator=generator, dtype=torch.float64)
        up = torch.randn(out, rank, *[1] * (len(inner) - 1), generator=generator, dtype=torch.float64)
        if module == "embed":  # PEFT's factors are those of the transposed embedding
            made[f"{PREFIX}{module}.lora_embedding_A"] = up.T.contiguous()
            made[f"{PREFIX}{module}.lora_embedding_B"] = down.T.contiguous()
        else:
            made |= {f"{PREFIX}{module}.lora_A.weight": down, f"{PREFIX}{module}.lora_B.weight": up}
    return made


def write(folder: Path, tensors: Mapping[str, Tensor], **config: Any) -> Path:
    folder.mkdir()
    save(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 8, "lora_alpha": 4, **config}))
    return folder


@pytest.fixture(name="adapters")
def _adapters(tmp_path: Path) -> list[Path]:
    """Return two adapters with different ranks, scales and modules."""
    one = draw(1, {"layers.0.up": 2, "layers.1.up": 3, "conv": 2, "embed": 1})
    one[f"{PREFIX}layers.0.up.lora_B.bias"] = torch.arange(9.0, dtype=torch.float64)
    two = draw(2, {"layers.0.up": 3, "conv": 1, "embed": 2})
    first = write(tmp_path / "one", one, alpha_pattern={"layers.1.up": 5.0}, note="kept", lora_bias=True)
    save({f"{name}.weight": torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
         | {"layers.0.up.bias": torch.zeros(9, dtype=torch.float64)}, tmp_path / "base.safetensors")  # fmt: skip
    return [first, write(tmp_path / "two", two, use_rslora=True, rank_pattern={"embed": 2})]


def changes(folder: Path) -> dict[str, Tensor]:
    """Return the changes of all tensors, computed with a base of zeros."""
    return load(f"{folder.parent / 'base.safetensors'}+{folder}")


def dense(rule: Rule, weights: Sequence[float] | None, adapters: Sequence[Path]) -> dict[str, Tensor]:
    every = [changes(one) for one in adapters]
    factors = rule.factors(weights, len(every))
    return {n: rule.combine((c[n].clone() for c in every), factors, Target(n)) for n in every[0]}


@pytest.mark.parametrize(
    ("rule", "weights"),
    [
        (Average(), None),
        (Average(), [3.0, 1.0]),
        (WeightedSum(), [2.0, -1.0]),
        (TaskArithmetic(scale=0.5), None),
        (Ties(density=0.4), [1.0, 2.0]),
        (Slerp(), [2.0, 1.0]),
    ],
)
def test_the_change_is_what_the_rule_makes_of_the_changes(
    adapters: list[Path], tmp_path: Path, rule: Rule, weights: list[float] | None
) -> None:
    rank = None if isinstance(rule, Average | WeightedSum | TaskArithmetic) else 12
    made = merge_adapters(adapters, tmp_path / "out", rule=rule, weights=weights, rank=rank)
    found, expected = changes(tmp_path / "out"), dense(rule, weights, adapters)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-12)
    assert made.left < 1e-24
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["note"] == "kept"
    assert config["target_modules"] == sorted(SHAPES)
    if rank is None:
        assert {one.name: one.rank for one in made.modules} == {
            "layers.0.up": 5, "layers.1.up": 3, "conv": 3, "embed": 3
        }  # fmt: skip


def test_it_is_not_the_mean_of_the_factors(adapters: list[Path], tmp_path: Path) -> None:
    """An adapter with other factors is the same adapter, but the mean of the factors depends on the factors."""
    generator = torch.Generator().manual_seed(3)
    tensors = load(adapters[1])
    symmetry = adapter_symmetry(tensors)
    config = json.loads((adapters[1] / "adapter_config.json").read_text())
    moved = write(tmp_path / "moved", symmetry.act(symmetry.random(generator), tensors), **config)
    for name, second in (("a", adapters[1]), ("b", moved)):
        merge_adapters([adapters[0], second], tmp_path / name)
    one, two = changes(tmp_path / "a"), changes(tmp_path / "b")
    assert all(torch.allclose(one[name], tensor, rtol=0, atol=1e-11) for name, tensor in two.items())
    a, b = load(adapters[1]), load(moved)
    pairs = [name for name in a if "lora_A" in name]
    assert any(not torch.allclose(a[name], b[name], atol=0.1) for name in pairs)


@pytest.mark.parametrize("rank", [1, 2])
def test_a_smaller_rank_is_the_closest_and_its_error_is_said(adapters: list[Path], tmp_path: Path, rank: int) -> None:
    made = merge_adapters(adapters, tmp_path / "out", rank=rank)
    found, whole = changes(tmp_path / "out"), dense(Average(), None, adapters)
    for one in made.modules:
        name = f"{one.name}.weight"
        error = (found[name] - whole[name]).norm() ** 2 / whole[name].norm() ** 2
        values = torch.linalg.svdvals(whole[name].flatten(1)).square()
        assert float(error) == pytest.approx(float(values[rank:].sum() / values.sum()), abs=1e-12)
        assert one.left == pytest.approx(float(error), abs=1e-12)
        assert one.rank == rank
    assert f"rank {rank}, which lose at most {made.left:.2%} of a change" in str(made)


def test_whole_tensors_are_averaged_and_else_need_the_base(tmp_path: Path) -> None:
    norm = f"{PREFIX}norm.weight"
    parts = [draw(k, {"layers.0.up": 2}) | {norm: torch.full((3,), float(k), dtype=torch.float64)} for k in (1, 2)]
    folders = [write(tmp_path / str(k), own, modules_to_save=["norm"]) for k, own in enumerate(parts)]
    merge_adapters(folders, tmp_path / "out", weights=[1, 3])
    assert load(tmp_path / "out")[norm].tolist() == [1.75] * 3
    for rule in (Ties(), TaskArithmetic()):
        with pytest.raises(ValueError, match=r"as a whole, but .* needs its base; merge each adapter into its base"):
            merge_adapters(folders, tmp_path / "no", rule=rule)
    alone = write(tmp_path / "alone", draw(3, {"layers.0.up": 1}))
    with pytest.raises(ValueError, match=r"does not store 'base_model\.model\.norm\.weight'"):
        merge_adapters([folders[0], alone], tmp_path / "no")
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    ("tensors", "config", "said"),
    [
        ({}, {"use_dora": True}, "use_dora.*whose effect depends on the base"),
        (
            {f"{PREFIX}embed.token_adapter.trainable_tokens_delta": torch.ones(1, 6)},
            {},
            "whose effect depends on the base",
        ),
        ({}, {"peft_type": "LOHA"}, "is of type LOHA, and has no factors of LORA; merge it into its base"),
        ({}, {"kasa_config": {"beta": 1}}, "has 'kasa_config', not only factors B and A"),
        ({f"{PREFIX}layers.0.up.lora_A.weight": torch.ones(2, 8)}, {}, r"as matrices of shapes \[\(9, 7\), \(9, 8\)\]"),
    ],
)
def test_what_is_no_change_without_a_base_is_refused(
    adapters: list[Path], tmp_path: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any], said: str
) -> None:
    other = write(tmp_path / "other", draw(4, {"layers.0.up": 2}) | dict(tensors), **config)
    with pytest.raises(ValueError, match=said):
        merge_adapters([adapters[0], other], tmp_path / "out")


def test_arguments_are_checked(adapters: list[Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="rank is 0; give a positive one"):
        merge_adapters(adapters, tmp_path / "out", rank=0)
    with pytest.raises(ValueError, match=r"there are 1 adapters, but .* merges two or more"):
        merge_adapters(adapters[:1], tmp_path / "out")
    with pytest.raises(ValueError, match="is one file, but an adapter is a folder"):
        merge_adapters(adapters, tmp_path / "out.safetensors")
    with pytest.raises(FileExistsError, match="exists already; choose another name"):
        merge_adapters(adapters, adapters[0])
    with pytest.raises(ValueError, match=r"runs the model: merge the networks BASE\+ADAPTER instead"):
        merge_adapters(adapters, tmp_path / "out", rule=rg.merging.GreedySoup())


def test_the_command_merges_adapters_by_their_changes(
    adapters: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [str(one) for one in adapters]
    main(["merge", *paths, "--rule", "task-arithmetic", "--weights", "1", "-1", "-o", str(tmp_path / "out")])
    assert "which lose at most 0.00% of a change" in capsys.readouterr().out
    expected = dense(TaskArithmetic(), [1, -1], adapters)
    found = changes(tmp_path / "out")
    assert all(torch.allclose(found[name], tensor, rtol=0, atol=1e-12) for name, tensor in expected.items())
    assert Checkpoint.open(tmp_path / "out").is_adapter
    with pytest.raises(SystemExit):
        main(["merge", *paths, "--base", str(tmp_path / "base.safetensors"), "--rule", "ties", "-o", "x"])
    assert "leave out --base and --dry-run, or name BASE+ADAPTER" in capsys.readouterr().err

"""Tables of scale pairs of other tools: pairs that preserve the function, and the faults of all other pairs."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from folder_cases import DENSE, FolderCase, causal

from regauge.cli.main import main
from regauge.gauging.mappings import ScalePair, read_table, resolve_pair

NORM = {"smooth_layer": "re:.*post_attention_layernorm$", "balance_layers": ["re:.*gate_proj$", "re:.*up_proj$"]}
FIRST = {"smooth_layer": "input_layernorm", "balance_layers": ["q_proj", "k_proj", "v_proj"]}
VALUES = {"smooth_layer": "re:.*v_proj$", "balance_layers": ["re:.*o_proj$"]}
HIDDEN = {"smooth_layer": "re:.*up_proj$", "balance_layers": ["re:.*down_proj$"]}
ONE = {"num_hidden_layers": 1, "num_key_value_heads": 4}
EXPERTS = {
    "moe_intermediate_size": 12,
    "num_experts_per_tok": 2,
    "num_experts": 2,
    "shared_expert_intermediate_size": 8,
}


def audited(case: FolderCase, table: Any, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    case.save(Path("model"), 0)
    Path("table.json").write_text(json.dumps(table))
    capsys.readouterr()
    main(["audit", "model", "--mappings", "table.json", "--json"])
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["findings"]
    return found


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_table_that_leaves_out_a_router_and_a_shared_gate(capsys: pytest.CaptureFixture[str]) -> None:
    found = audited(causal("Qwen2Moe", **ONE | EXPERTS), [FIRST, VALUES, NORM, HIDDEN], capsys)
    verdicts = [row["verdict"] for row in found]
    assert verdicts == ["holds", "holds", "broken", *["holds"] * 3]  # Two experts and a shared one.
    assert all(row["change"] <= 1e-9 for row in found if row["verdict"] == "holds")
    assert found[2]["change"] > 1e-2
    assert found[2]["missing"] == ["model.layers.0.mlp.gate.weight", "model.layers.0.mlp.shared_expert_gate.weight"]


def test_a_norm_behind_attention_is_no_norm_before_the_mlp(
    capsys: pytest.CaptureFixture[str],
) -> None:
    right = {**NORM, "smooth_layer": "pre_feedforward_layernorm"}
    found = audited(causal("Gemma2", **ONE), [FIRST, NORM, right, HIDDEN], capsys)
    # Gains of Gemma are one more than their weights, and are scaled so.
    assert [row["verdict"] for row in found] == ["holds", "broken", "holds", "holds"]
    assert found[1]["change"] > 0.1
    assert "no positive scale of its channels" in found[1]["reason"]


def test_files_may_have_other_names_than_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    """A norm has a gain of one plus its weight. Missing parameters of a row are named as in the files."""
    llava = DENSE["llava"]
    text = llava.settings["text_config"] | {"model_type": "gemma2", "num_hidden_layers": 1}
    case = replace(llava, settings=llava.settings | {"text_config": text})
    right = {**NORM, "smooth_layer": "pre_feedforward_layernorm"}
    half = {**right, "balance_layers": ["gate_proj"]}
    found = [row for row in audited(case, [right, half], capsys) if row["smooth"].startswith("language_model")]
    assert [row["verdict"] for row in found] == ["holds", "broken"]
    assert found[1]["missing"] == ["model.language_model.layers.0.mlp.up_proj.weight"]


def test_clipped_values_cannot_be_scaled(capsys: pytest.CaptureFixture[str]) -> None:
    found = audited(causal("Olmo", **ONE, clip_qkv=0.3), [[["o_proj"], "v_proj"], HIDDEN], capsys)
    assert [row["verdict"] for row in found] == ["broken", "holds"]
    assert found[0]["change"] > 1e-3
    capsys.readouterr()
    main(["gauge", "model", "--mappings", "llm-compressor", "-o", "own.yaml"])
    main(["audit", "model", "--mappings", "own.yaml", "--json"])
    lines = capsys.readouterr().out
    own = json.loads(lines[lines.index("{") :])["findings"]
    assert own
    assert {row["verdict"] for row in own} == {"holds"}
    assert not any(row["smooth"].endswith("v_proj") for row in own)


GROUPED = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}


@pytest.mark.parametrize("family", ["Qwen3", "Llama"])
def test_what_a_layer_reads_is_not_guessed_from_lengths(family: str, capsys: pytest.CaptureFixture[str]) -> None:
    """There are sixteen channels of values, 32 channels that the next layer reads, and 16 channels that it computes."""
    found = audited(causal(family, **GROUPED), [VALUES, HIDDEN], capsys)
    assert [row["verdict"] for row in found] == ["skipped", "holds"]
    assert (
        found[0]["reason"] == "it has 16 channels, but model.layers.0.self_attn.o_proj reads 32: no tool scales these"
    )


FUSED = [
    {"smooth_layer": "re:.*qkv_proj$", "balance_layers": ["re:.*o_proj$"]},
    {"smooth_layer": "re:.*gate_up_proj$", "balance_layers": ["re:.*down_proj$"]},
]


def test_the_last_rows_of_fused_layers_are_scaled(capsys: pytest.CaptureFixture[str]) -> None:
    found = audited(causal("Phi3", **ONE), FUSED, capsys)
    assert [row["verdict"] for row in found] == ["holds", "holds"]
    main(["gauge", "model", "--mappings", "autoawq", "-o", "own.json"])
    rows = [(row["smooth_layer"], row["balance_layers"]) for row in json.loads(Path("own.json").read_text())]
    block = "model.layers.0"
    assert (f"{block}.self_attn.qkv_proj", [f"{block}.self_attn.o_proj"]) in rows
    assert (f"{block}.mlp.gate_up_proj", [f"{block}.mlp.down_proj"]) in rows
    capsys.readouterr()
    main(["audit", "model", "--mappings", "own.json", "--json"])
    assert {row["verdict"] for row in json.loads(capsys.readouterr().out)["findings"]} == {"holds"}
    # With grouped queries the last rows are keys and values, not what the next layer reads.
    found = audited(causal("Phi3", **ONE | {"num_key_value_heads": 2}), FUSED, capsys)
    assert [row["verdict"] for row in found] == ["broken", "holds"]
    assert found[0]["change"] > 1e-2


def test_layers_that_keep_their_inputs_first_are_read_by_the_symmetry(capsys: pytest.CaptureFixture[str]) -> None:
    """GPT-2 stores weights as [inputs, outputs], and in this test the two numbers are equal."""
    table = [{"smooth_layer": "c_attn", "balance_layers": ["attn.c_proj"]}]
    found = audited(replace(DENSE["gpt2"], settings={**DENSE["gpt2"].settings, "n_layer": 1}), table, capsys)
    assert [row["verdict"] for row in found] == ["holds"]


def test_rows_are_read_in_all_forms_and_resolved_within_their_block() -> None:
    pair = ScalePair("a.norm", ("a.up", "a.gate"))
    for table in (
        [{"smooth_layer": "a.norm", "balance_layers": ["a.up", "a.gate"]}],
        [[["a.up", "a.gate"], "a.norm"]],
        {"stage": {"modifiers": {"AWQModifier": {"mappings": [[["a.up", "a.gate"], ["a.norm"]]]}}}},
    ):
        assert read_table(table) == [pair]
    for wrong, sentence in (
        ({}, "there are no mappings"),
        ([["a"]], "is not a mapping"),
        ([[["a"], 3]], "does not name"),
        ([["a", "re:("]], r"'re:\(' in the row .* is no regular expression: missing \)"),
    ):
        with pytest.raises(ValueError, match=sentence):
            read_table(wrong)
    names = [f"{k}.{part}" for k in range(11) for part in ("norm", "mlp.up", "mlp.gate", "mlp.experts.0.up")]
    found = resolve_pair(ScalePair("norm", ("re:.*up$", "gate")), names)
    assert [one.smooth for one in found] == [f"{k}.norm" for k in range(11)]
    assert found[1].balance == ("1.mlp.up", "1.mlp.gate", "1.mlp.experts.0.up")
    (inner,) = resolve_pair(ScalePair("re:1.mlp.up", ("gate", "norm")), names[4:8])
    assert inner.balance == ("1.mlp.gate",)


def test_what_cannot_be_audited_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    causal("Llama", **ONE).save(Path("model"), 0)
    Path("table.json").write_text("[3]")
    for arguments, sentence in (
        (["audit", "model", "--mappings", "none.json"], "there is no table 'none.json'"),
        (["audit", "model", "--mappings", "table.json"], "'table.json': the row 3 is not a mapping"),
        (["gauge", "model", "--mappings", "autoawq", "-o", "out.txt"], "must end in .json"),
    ):
        with pytest.raises(SystemExit):
            main(arguments)
        assert sentence in capsys.readouterr().err

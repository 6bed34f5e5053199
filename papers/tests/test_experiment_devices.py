"""Experiments on other devices: networks are trained and evaluated on the device, in half precision if this is fast."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pretend_device import DEVICE, PretendDevice

import regauge as rg
from regauge_papers.experiment import Run
from regauge_papers.experiments import EXPERIMENTS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("paper", "name", "changes"), [("merging", "mnist", {"sets": 1}), ("004", "figure8", {}), ("001", "table2", {})]
)
def test_experiments_train_and_evaluate_on_the_device_of_the_run(
    paper: str, name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    experiment = EXPERIMENTS[paper][name]
    assert experiment.takes_device
    config = replace(experiment.config("smoke"), **changes)
    with PretendDevice() as device:
        run = Run("smoke", 0, tmp_path, device=DEVICE)
        assert all(device.holds(tensor) for tensor in run.network("settings", "key", mlp_params).values())
        table = experiment.measure(config, run)
    here = experiment.measure(config, Run("smoke", 0, tmp_path / "here"))
    assert "CPU s" not in {name for row in table.rows for name in row.values}
    for there, expected in zip(table.rows, here.rows, strict=True):
        assert there.values == {name: values for name, values in expected.values.items() if name != "CPU s"}


def mlp_params() -> rg.Params:
    return {"weight": torch.ones(3, 2)}


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [
        ({"avx2": True, "avx512_bf16": False, "amx_bf16": False}, False),
        ({"avx2": True, "avx512_bf16": True, "amx_bf16": False}, True),
        ({"avx512_bf16": False, "amx_bf16": True}, True),
        ({"neon": True, "arm_bf16": True}, True),
        ({}, False),
    ],
)
def test_bfloat16_is_for_processors_that_multiply_in_it(
    capabilities: dict[str, bool], expected: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    run = Run("smoke", 0, tmp_path)
    assert run.has_bfloat16 == expected
    assert run.half_precision.startswith("bfloat16" if expected else "float32")
    with run.autocast(is_bfloat16=True):
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == (torch.bfloat16 if expected else torch.float32)
    with run.autocast(is_bfloat16=False):
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == torch.float32

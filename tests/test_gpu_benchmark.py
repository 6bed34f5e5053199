"""The benchmark for a GPU runs on a CPU in small sizes, even without packages that a machine with a GPU may lack."""

import importlib
import json
import os
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parent.parent
ABSENT = ("beartype", "dask", "distributed", "igl", "lap", "platformdirs", "pooch", "posteriors", "trimesh", "tyro")
"""Import names of packages that a machine with a GPU did not have."""
WITHOUT = f"""
import runpy, sys
sys.modules.update(dict.fromkeys({ABSENT}))
sys.argv = sys.argv[1:]
sys.path.insert(0, {str(ROOT / "benchmarks")!r})
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("gpu")


def place(script: ModuleType, seconds: float = 60.0) -> Any:
    return script.Place(torch.device("cpu"), True, time.monotonic() + seconds)


def test_every_case_runs_without_what_may_be_absent(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WITHOUT, str(ROOT / "benchmarks" / "gpu.py"), "--device", "cpu", "--small"]
    environment = {**os.environ, "OUT": str(tmp_path), "OMP_NUM_THREADS": "1"}
    environment.pop("REGAUGE_CACHE")
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()]
    assert rows == [json.loads(line) for line in done.stdout.splitlines()]
    machine, *found = rows
    assert {"tyro", "lap", "pooch", "platformdirs"} <= set(machine["absent"])
    assert "lapx is not there: assignments are scipy's" in machine["notes"]
    assert {row["status"] for row in found[:-1]} == {"ok"}
    assert found[-1] == found[-1] | {"case": "tests marked gpu", "status": "skipped"}
    assert sum(row.get("laws", 0) for row in found) > 25
    timed = [row for row in found if "device_seconds" in row]
    assert len(timed) == 12
    assert all(row["ratio"] > 0 for row in timed)
    near = {"align GPT-2 XL", "align Llama-1B", "align ViT-B/16"}
    assert all(row["distance"] < 0.4 for row in found if row["case"] in near)  # of a copy with noise of 0.3


def test_records_are_written_whatever_a_case_does(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    def break_law(where: Any) -> dict[str, Any]:
        laws = script.gpu_laws.Laws(where)
        with laws.law("equal"):
            laws.equal(torch.ones(2), torch.zeros(2), 1e-3)
        with laws.law("shapes"):
            laws.equal(torch.ones(2), torch.ones(3), 1e-3)
        with laws.law("fine"):
            laws.equal(torch.ones(2), torch.ones(2), 0)
        return dict(laws.row())

    def absent(_: Any) -> dict[str, Any]:
        raise ModuleNotFoundError("No module named 'transformers'")

    chosen = [
        script.Case("error", 0, lambda _: {"number": 1 // 0}),
        script.Case("law", 0, break_law),
        script.Case("absent", 0, absent),
        script.Case("times", 0, lambda _: {"device_seconds": 0.5, "cpu_seconds": 2.0}),
        script.Case("long", 1000, lambda _: {}),
    ]
    file = StringIO()
    assert not script.run_cases(chosen, place(script), file)
    rows = [json.loads(line) for line in file.getvalue().splitlines()]
    assert file.getvalue() == capsys.readouterr().out
    assert [row["status"] for row in rows] == ["ok", "failed", "failed", "skipped", "ok", "skipped"]
    assert rows[1]["error"].startswith("ZeroDivisionError")
    assert rows[2]["laws"] == 3
    assert [text.split(":")[0] for text in rows[2]["failed"]] == ["equal", "shapes"]
    assert rows[4]["ratio"] == 4
    assert "it needs 1000" in rows[5]["reason"]
    assert script.run_cases(chosen[3:], place(script), StringIO())


def test_a_case_ends_with_the_budget(script: ModuleType) -> None:
    began = time.monotonic()
    row = script.run_case(script.Case("slow", 0, lambda _: time.sleep(60)), place(script, 0.3))
    assert time.monotonic() - began < 30
    assert row["status"] == "failed"
    assert row["error"].startswith("OverError: stopped after 0 s")


def test_the_table_names_the_card(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine = script.machine(torch.device("cpu")) | {"device": "NVIDIA H200", "cuda": "13.0", "notes": ["a note"]}
    about = {"torch": "2.11.0", "python": "3.12.3", "cpu": "a CPU", "cpu_threads": 16}
    align = {"values": 25e6, "seconds": 0.5, "groups": 9, "assignments": 3, "assignment_seconds": 0.25, "distance": 0.1}
    times = {"device_seconds": 0.5, "cpu_seconds": 4, "ratio": 8, "peak_bytes": 2e9}
    rows = [
        machine | about,
        {"case": "laws", "status": "failed", "laws": 3, "failed": ["a|b: wrong"], "worst_error": 1e-9},
        {"case": "align", "status": "ok", **align, **times},
        {"case": "later", "status": "skipped", "reason": "3 s left, it needs 9"},
    ]
    file = tmp_path / "gpu.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert script.main(["--table", str(file)]) == 0
    assert capsys.readouterr().out == (
        "Measured on NVIDIA H200 (torch 2.11.0, CUDA 13.0, Python 3.12.3), against 16 threads of a CPU. a note.\n\n"
        "| case | result | device, s | CPU, s | CPU / device | peak, GB | what |\n"
        "| --- | --- | --- | --- | --- | --- | --- |\n"
        "| laws | failed |  |  |  |  | 2 of 3 laws, largest error 1.0e-09; a/b: wrong |\n"
        "| align | ok | 0.5 | 4 | 8 | 2 | 25 million values in 0.5 s, 9 groups; "
        "3 assignments in 0.25 s; distance 0.1 |\n"
        "| later | skipped |  |  |  |  | 3 s left, it needs 9 |\n"
    )


def test_a_device_that_is_not_there_is_refused(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        script.main(["--device", "cuda:99", "--small"])
    assert "device 'cuda:99' cannot be used here" in capsys.readouterr().err


def test_auctions_reach_what_exact_assignments_do(script: ModuleType) -> None:
    profits = torch.randn(30, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found, share = script.gpu_sizes.auction(profits, 1e-6, 10_000)
    assert share == 1
    assert sorted(found.tolist()) == list(range(30))
    exact = script.gpu_sizes.assignment.assign(profits.numpy())
    reached, best = (float(profits[torch.arange(30), torch.as_tensor(c)].sum()) for c in (found, exact))
    assert best - reached <= 30 * 1e-6 * float(profits.max() - profits.min())

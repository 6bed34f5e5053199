"""GPU compared with the CPU of the same machine in one run: laws, times at realistic sizes, and peak memory.

Cases run one after another, in order of importance. Each case checks the remaining budget before it begins, and is
stopped when the budget ends. If a case fails, its error is recorded, and the next case runs. The record of a case, one
line of JSON, is printed and appended to `gpu.jsonl` in the folder of `--out`. Without `--out`, the folder is the
environment variable OUT, or else out/. `--table` makes the table of such a file.

    PYTHONPATH=src python benchmarks/gpu.py [part of a name] [--budget 480] [--out FOLDER]
    PYTHONPATH=src python benchmarks/gpu.py --table FILE

Nothing is downloaded. The cases do not need packages that a machine with a GPU may lack (tyro, lapx, pooch,
platformdirs).
"""

import argparse
import importlib.util
import json
import math
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

# Nothing that a user once kept changes what is measured, and the folder of caches needs no package to be found.
if "REGAUGE_CACHE" not in os.environ:
    os.environ["REGAUGE_CACHE"] = tempfile.mkdtemp(prefix="regauge-gpu-")

import gpu_laws
import gpu_sizes
import torch
from gpu_place import Place

import regauge as rg
from regauge.core.devices import find_device

ROOT = Path(__file__).parent.parent
BUDGET = 480.0
"""The time budget of the whole run, in seconds."""
OPTIONAL = ("tyro", "lap", "pooch", "platformdirs", "transformers", "pytest", "beartype", "distributed")
"""Packages whose absence is recorded."""


@dataclass(frozen=True)
class Case:
    """A case: its name, the seconds of budget that it needs to begin, and its function."""

    name: str
    needs: float
    run: Callable[[Place], Mapping[str, Any]]


def cases() -> list[Case]:
    """Return all cases in order of importance."""
    laws = {"action": 10, "alignment": 15, "metanets": 15, "flows": 8, "populations": 8}
    return [
        *(Case(f"laws of {name}", needs, gpu_laws.LAWS[name]) for name, needs in laws.items()),
        Case("align ResNet50", 20, partial(gpu_sizes.align_model, "ResNet50")),
        Case("10,000 MLPs", 15, gpu_sizes.mlps),
        *(Case(f"step of {name}", 8, partial(gpu_sizes.step_of, name)) for name in gpu_sizes.TRAININGS),
        Case("align GPT-2 XL", 40, partial(gpu_sizes.align_model, "GPT-2 XL")),
        Case("2,000 CNNs", 20, gpu_sizes.cnns),
        Case("align Llama-1B", 40, partial(gpu_sizes.align_model, "Llama-1B")),
        Case("align ViT-B/16", 20, partial(gpu_sizes.align_model, "ViT-B/16")),
        Case("10,000 pairs", 10, gpu_sizes.many_pairs),
        Case("assignments", 10, gpu_sizes.assignments),
        Case("tests marked gpu", 30, marked_tests),
    ]


def marked_tests(place: Place) -> Mapping[str, Any]:
    """Run the tests that need a GPU, until the budget ends."""
    if place.device.type != "cuda":
        return {"status": "skipped", "reason": "there is no CUDA device to test"}
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", str(ROOT / "tests/test_cuda.py")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=max(1.0, place.left - 2))
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|errors?)", done.stdout)}
    failed = [line[:300] for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    status = {} if done.returncode == 0 else {"status": "failed", "error": done.stdout[-1000:] + done.stderr[-500:]}
    return {**counts, "failed_tests": failed, **status}


def machine(device: torch.device) -> dict[str, Any]:
    """Return the first record: the machine, and its missing packages."""
    pin = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"][0]
    oldest = re.search(r">=([\d.]+)", pin)
    assert oldest is not None
    is_older = _numbers(torch.__version__) < _numbers(oldest[1])
    notes = []
    if is_older:
        notes.append(
            f"torch is older than {oldest[1]}: it has no switch that leaves stack traces out of traced graphs, so "
            "discovery takes longer; nothing else is skipped for it"
        )
    if importlib.util.find_spec("lap") is None:
        notes.append("lapx is not there: assignments are scipy's")
    is_cuda = device.type == "cuda"
    return {
        "case": "machine",
        "status": "ok",
        "device": torch.cuda.get_device_name(device) if is_cuda else device.type,
        "memory": torch.cuda.get_device_properties(device).total_memory if is_cuda else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda if is_cuda else None,
        "python": platform.python_version(),
        "regauge": rg.__version__,
        "cpu": torch.cpu.get_capabilities().get("cpu_name", platform.processor()),
        "cpu_threads": torch.get_num_threads(),
        "absent": [name for name in OPTIONAL if importlib.util.find_spec(name) is None],
        "notes": notes,
    }


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0]))


class OverError(TimeoutError):
    """An error that is raised when the time of a case is over."""


@contextmanager
def stopped_after(seconds: float) -> Iterator[None]:
    """Raise OverError in code that runs longer than a limit, if the system supports timers."""

    def stop(*_: object) -> None:
        raise OverError(f"stopped after {seconds:.0f} s")

    if not hasattr(signal, "setitimer"):
        yield
        return
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run_case(case: Case, place: Place) -> dict[str, Any]:
    """Return the record of a case: its result, or the reason why there is no result."""
    left = place.left
    if left < case.needs:
        return {"case": case.name, "status": "skipped", "reason": f"{left:.0f} s left, it needs {case.needs:.0f}"}
    began = time.monotonic()
    found: dict[str, Any] = {"status": "ok"}
    try:
        place.forget()
        with stopped_after(left):
            found |= case.run(place)
    except ImportError as error:
        found = {"status": "skipped", "reason": str(error)}
    except Exception as error:  # the next case runs whatever this one did
        text = " ".join(str(error).split())[:1000]
        found = {"status": "failed", "error": f"{type(error).__name__}: {text}"}
    if {"device_seconds", "cpu_seconds"} <= found.keys():
        found["ratio"] = found["cpu_seconds"] / found["device_seconds"]
    return {"case": case.name, **found, "case_seconds": time.monotonic() - began}


def run_cases(chosen: Iterable[Case], place: Place, file: TextIO) -> bool:
    """Run cases, and write each record immediately. Return whether all cases succeeded."""
    is_fine = True
    for row in (machine(place.device), *(run_case(case, place) for case in chosen)):
        for target in (file, sys.stdout):
            target.write(json.dumps(row) + "\n")
            target.flush()
        is_fine &= row["status"] != "failed"
    return is_fine


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the records of a run as a page: a sentence about the machine, and a table of the cases."""
    about, lines = next(row for row in rows if row["case"] == "machine"), []
    cuda = f", CUDA {about['cuda']}" if about["cuda"] else ""
    lines.append(
        f"Measured on {about['device']} (torch {about['torch']}{cuda}, Python {about['python']}), against "
        f"{about['cpu_threads']} threads of {about['cpu']}. {' '.join(note + '.' for note in about['notes'])}".strip()
    )
    lines += ["", "| case | result | device, s | CPU, s | CPU / device | peak, GB | what |", "| --- " * 7 + "|"]
    for row in rows:
        if row["case"] != "machine":
            numbers = [_number(row.get(name)) for name in ("device_seconds", "cpu_seconds", "ratio")]
            peak = row.get("peak_bytes")
            cells = [row["case"], row["status"], *numbers, _number(None if peak is None else peak / 1e9), _words(row)]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "" if value is None or not math.isfinite(value) else f"{value:.3g}"


def _words(row: Mapping[str, Any]) -> str:
    """Return the facts of a record, without its times."""
    told = []
    if "laws" in row:
        told.append(f"{row['laws'] - len(row['failed'])} of {row['laws']} laws, largest error {row['worst_error']:.1e}")
        told += row["failed"][:3]
    if "values" in row:
        told.append(f"{row['values'] / 1e6:,.0f} million values in {row['seconds']:.3g} s, {row['groups']} groups")
        told.append(f"{row['assignments']} assignments in {row['assignment_seconds']:.3g} s")
        told.append(f"distance {row['distance']:.3g}")
    if "steps_per_second" in row:
        told.append(f"{row['steps_per_second']:,.0f} steps of networks a second")
        told.append(f"{row['cpu_steps_per_second']:,.0f} on one core of the CPU")
    if "pairs" in row:
        told.append(f"{row['pairs']:,} pairs in {row['seconds']:.3g} s")
    told += [
        f"{one['units']} units: exact {one['exact']:.3g} s, auction {one['auction']:.3g} s to {one['reached']:.4%}"
        for one in row.get("sizes", ())
    ]
    if "passed" in row:
        told.append(f"{row['passed']} passed, {row.get('failed', 0)} failed")
    told += [str(row[key]) for key in ("reduced", "reason", "error") if key in row]
    return "; ".join(told).replace("|", "/").replace("\n", " ")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="What runs on a GPU, against the CPU of the same machine.")
    parser.add_argument("name", nargs="?", default="", help="part of the names of the cases that run")
    parser.add_argument("--budget", type=float, default=BUDGET, help="seconds of the whole run")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or ROOT / "out"), help="a folder")
    parser.add_argument("--small", action="store_true", help="the sizes of a test")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print the table of a run, and measure nothing")
    options = parser.parse_args(arguments)
    if options.table is not None:
        print(table([json.loads(line) for line in options.table.read_text().splitlines()]))
        return 0
    until = time.monotonic() + options.budget
    try:
        device = find_device(options.device)
    except ValueError as error:
        parser.error(str(error))
    options.out.mkdir(parents=True, exist_ok=True)
    place = Place(device, options.small, until)
    chosen = [case for case in cases() if options.name in case.name]
    with (options.out / "gpu.jsonl").open("w", encoding="utf-8") as file:
        return 0 if run_cases(chosen, place, file) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Every public function with arguments of wrong types: regauge raises one sentence, and no internal error occurs."""

import linecache
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import regauge as rg


def network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))


X, Y = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 3
A, B, C = network(0), network(1), network(2)
a, b, c = A.state_dict(), B.state_dict(), C.state_dict()
SYMMETRY = rg.discover(A, (X,))
TASK = rg.Task(A, [(X, Y)])
BATCHES = [(X, Y)]
CHANCE = torch.Generator().manual_seed(0)
ELEMENT = SYMMETRY.identity()
PAIR: dict[str, Any] = {"params_a": a, "params_b": b}
AXES = {"0.weight": ("h", None), "0.bias": ("h",), "2.weight": (None, "h")}

WRONG: dict[str, Any] = {
    "None": None,
    "a number": 3,
    "a fraction": 1.5,
    "text": "text",
    "bytes": b"x",
    "an object": object(),
    "a module": A,
    "a symmetry": SYMMETRY,
    "a tensor": X,
    "a single value": torch.tensor(1.0),
    "a task": TASK,
    "a class": rg.WeightMatching,
    "a method": rg.WeightMatching(),
    "a generator": CHANCE,
    "an element": ELEMENT,
    "networks": [a, b],
    "nothing in it": [None],
    "numbers": {"a": 1},
    "names that are numbers": {1: torch.ones(2)},
    "arrays": {name: tensor.numpy() for name, tensor in a.items()},
    "a sparse tensor": {**a, "0.weight": a["0.weight"].to_sparse()},
    "one tensor missing": {**a, "0.weight": None},
    "another shape": {name: tensor[:2] for name, tensor in a.items()},
    "NaN": {name: tensor * float("nan") for name, tensor in a.items()},
    "a place without a file": "/nowhere/x.safetensors",
}
"""Values that are wrong for most arguments. For a valid value, the function may return."""

CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any], str]] = {
    "discover": (rg.discover, {"module": A, "example_inputs": X}, "ones keep move example_kwargs"),
    "align": (rg.align, {**PAIR, "symmetry": SYMMETRY}, "method task generator rotate untie out memory"),
    "align_pairs": (rg.alignment.align_pairs, {**PAIR, "symmetry": SYMMETRY}, "method task generator"),
    "align_many": (rg.align_many, {"params": [a, b], "symmetry": SYMMETRY}, "method task generator"),
    "merge": (rg.merge, {"params": [a, b], "symmetry": SYMMETRY}, "method weights rule base"),
    "line": (rg.line, {**PAIR, "judge": TASK}, "points"),
    "plane": (rg.connect.plane, {**PAIR, "params_c": c, "judge": TASK, "resolution": 2}, ""),
    "repair": (rg.repair, {"params": a, "module": A, "endpoints": [a, b], "batches": BATCHES}, ""),
    "gauge": (rg.gauge, {"params": a, "symmetry": SYMMETRY}, "method task generator"),
    "prune": (rg.prune, {"params": a, "symmetry": SYMMETRY}, "share criterion task"),
    "canonicalize": (rg.canonicalize, {"params": a, "symmetry": SYMMETRY}, "parts reference method generator"),
    "orbit_distance": (rg.canonical.orbit_distance, {**PAIR, "symmetry": SYMMETRY}, ""),
    "canonical_manifold": (rg.canonical.canonical_manifold, {"symmetry": SYMMETRY}, "head"),
    "compare": (rg.compare, {**PAIR, "symmetry": SYMMETRY}, "generator task"),
    "transport": (rg.transport, {"base_a": a, "tuned_a": c, "base_b": b, "symmetry": SYMMETRY}, "task generator"),
    "activations": (rg.discovery.activations, {"module": A, "example_inputs": X, "symmetry": SYMMETRY}, ""),
    "fold": (rg.discovery.fold, {"params": a, "module": A, "example_inputs": X}, ""),
    "fingerprint": (rg.comparison.fingerprint, {"params": a, "symmetry": SYMMETRY}, "memory"),
    "Task": (rg.Task, {"module": A, "batches": BATCHES}, ""),
    "load": (rg.load, {"path": "there.safetensors"}, "entry"),
    "save": (rg.save, {"params": a, "path": "new.safetensors"}, ""),
    "act": (SYMMETRY.act, {"element": ELEMENT, "params": a}, ""),
    "random": (SYMMETRY.random, {"generator": CHANCE}, "parts"),
    "compose": (SYMMETRY.compose, {"left": ELEMENT, "right": ELEMENT}, ""),
    "inverse": (SYMMETRY.inverse, {"element": ELEMENT}, ""),
    "split": (SYMMETRY.split, {"params": a}, ""),
    "bind": (SYMMETRY.bind, {"params": a}, ""),
    "from_json": (rg.Symmetry.from_json, {"text": SYMMETRY.to_json()}, ""),
    "from_axes": (rg.Symmetry.from_axes, {"axes": AXES}, "kinds"),
    "ContinuousDescent": (rg.ContinuousDescent, {}, "steps lr seconds every kept"),
    "Sinkhorn": (rg.Sinkhorn, {}, "loss"),
}
"""Functions, valid arguments, and additional arguments that are tried."""
MEANT = {("discover", "example_inputs"), ("Task", "batches")}
"""Arguments that the user's own module reads, which raises its own errors."""


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rg.save(a, "there.safetensors")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_argument_is_told_in_a_sentence(name: str) -> None:
    function, given, further = CALLS[name]
    untold = []
    for argument in (*given, *further.split()):
        for what, value in WRONG.items():
            if (name, argument) in MEANT:
                continue
            try:
                function(**{**given, argument: value})
            except (FileNotFoundError, FileExistsError):
                continue
            except Exception as error:
                if not _is_told(error):
                    untold.append((argument, what, repr(error)))
    assert not untold


def _is_told(error: Exception) -> bool:
    """Return whether a line of regauge raised an error of the kinds that callers expect."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    source = linecache.getline(last.filename, last.lineno or 1)
    is_kind = isinstance(error, TypeError | ValueError | KeyError | rg.TraceError)
    return is_kind and "raise" in source and "/regauge/" in last.filename
